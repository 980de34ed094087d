"""Time against n, beside softmax, entmax and torch.topk: `python -m benchmarks.headline`.

Forward and backward of the same scores on one CPU thread, in the shapes of `benchmarks.device bench`, whose
times on a GPU come from device.json, and those of entmax there from device_entmax.json. It writes
headline.json and headline.md; `make figures` draws them.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import khot
from benchmarks import report, timing
from benchmarks.cpu import spread_normal
from benchmarks.device import SOFT_TOPK, Case

RESULTS = Path(__file__).parent / "results"
CASES = [case for case in SOFT_TOPK if case.dtype == torch.float32]
# the calls of the figure, with their names in device.json and device_entmax.json
CALLS = {
    "torch.softmax": "softmax",
    "khot.soft_topk": "soft_topk",
    "entmax.budget_bisect": "entmax, budget bisection",
    "torch.topk": "torch.topk",
}
# what entmax computes; and scores whose spread is from 0.1 to 5 at a temperature far below it
SPARSE, SHARP = "khot.sparse_topk", "khot.soft_topk, τ = 1e-3"


def functions(k: int) -> dict[str, Callable[[Tensor], Tensor]]:
    import entmax

    return {
        "torch.softmax": partial(torch.softmax, dim=-1),
        "khot.soft_topk": partial(khot.soft_topk, k=k),
        "entmax.budget_bisect": lambda x: entmax.budget_bisect(x, budget=k),
        "torch.topk": lambda x: torch.topk(x, k).values,
        SPARSE: partial(khot.sparse_topk, k=k),
        SHARP: partial(khot.soft_topk, k=k, tau=1e-3),
    }


def measure(case: Case, seconds: float, clock: timing.Clock) -> dict[str, float]:
    """Seconds of forward + backward. entmax has to agree with khot."""
    x = spread_normal(case.rows, case.n, torch.Generator().manual_seed(0))
    calls = functions(case.k)
    ours, theirs = (calls[name](x) for name in (SPARSE, "entmax.budget_bisect"))
    if (ours - theirs).abs().max() > 1e-3:
        raise SystemExit(f"{case.id}: entmax and khot disagree. Nothing is reported.")
    del ours, theirs
    both = {name: timing.forward_backward(f, x) for name, f in calls.items()}
    return timing.medians(both, seconds=seconds, clock=clock)


def on_a_gpu() -> dict[str, dict[str, float]]:
    """In softmaxes of the same run, by shape and call: the time of the device, forward + backward."""
    found: dict[str, dict[str, float]] = {case.id: {} for case in CASES}
    for file in ("device.json", "device_entmax.json"):
        cases = json.loads((RESULTS / file).read_text(encoding="utf-8"))["cases"]
        for shape, ratios in found.items():
            times = cases[f"bench: soft top-k, {shape}"]
            for name, there in CALLS.items():
                if there in times:
                    ratios.setdefault(name, times[there][1]["device"] / times["softmax"][1]["device"])
    return found


def in_softmaxes(results: report.Results) -> dict[str, dict[str, dict[str, float]]]:
    """By device, shape and call."""
    cpu = {
        shape: {name: time / times["torch.softmax"] for name, time in times.items()}
        for shape, times in results["cases"].items()
    }
    gpu = json.loads((RESULTS / "device.json").read_text(encoding="utf-8"))["setting"]["device"]
    return {f"{results['setting']['processor']}, one thread": cpu, gpu: on_a_gpu()}


def text(results: report.Results) -> str:
    setting = report.said(results["setting"])
    parts = [
        "# Beside softmax, entmax and torch.topk",
        "Written by `python -m benchmarks.headline`.",
        setting,
    ]
    for device, shapes in in_softmaxes(results).items():
        names = [name for name in (*CALLS, SPARSE, SHARP) if name in shapes[CASES[0].id]]
        rows = [[f"`{name}`", *(report.ratio(times[name]) for times in shapes.values())] for name in names]
        parts.append(report.table([f"{device}: forward + backward, in softmaxes", *shapes], rows))
    return "\n\n".join(parts)


def main() -> None:
    parser = report.parser("beside softmax, entmax and torch.topk", seconds=0.5)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread: steadier where others work")
    args = parser.parse_args()
    clock = timing.clock(args.cpu_time)
    setting: dict[str, Any] = report.machine(cpu_time=args.cpu_time)
    setting["packages"] = f"entmax {importlib.metadata.version('entmax')}"
    todo = {case.id: partial(measure, case, args.seconds, clock) for case in CASES}
    report.complete(
        RESULTS / "headline.md", setting, todo, lambda out, found: out.write_text(text(found), "utf-8")
    )


if __name__ == "__main__":
    main()
