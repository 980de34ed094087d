"""What a pure build costs: `python -m benchmarks.reference`.

The same calls with the compiled CPU kernels and with the reference kernels, which a pure build has, each in a
process of its own beside torch.softmax of the same tensor: one thread, CPU time, medians of interleaved
calls. It prints both in softmaxes, and how many times as long the reference takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import khot
from benchmarks import report, timing
from benchmarks.cpu import spread_normal

SHAPES = ((4, 64), (4_096, 64), (128, 1_000), (100, 10_000), (100, 100_000))
Times = dict[str, list[dict[str, float]]]  # of each shape: forward, forward + backward


def entries(k: int) -> dict[str, Callable[[Tensor], Tensor]]:
    named = {
        name: partial(getattr(khot, name), k=k) for name in ("sigmoid_topk", "laplace_topk", "sparse_topk")
    }
    return {
        "softmax": lambda x: torch.softmax(x, -1),
        **named,
        "soft_topk, normal": partial(khot.soft_topk, k=k, cdf="normal"),
        "log_soft_topk": partial(khot.log_soft_topk, k=k),
        "topk_mask": partial(khot.topk_mask, k=k),
        "soft_rank": khot.soft_rank,
        "sample_khot": partial(khot.sample_khot, k=k),
    }


def measure(seconds: float, clock: timing.Clock) -> Times:
    found: Times = {}
    for rows, n in SHAPES:
        x = spread_normal(rows, n, torch.Generator().manual_seed(0))
        calls = entries(n // 8)
        forward: dict[str, timing.Call] = {name: partial(f, x) for name, f in calls.items()}
        both = {name: timing.forward_backward(f, x) for name, f in calls.items() if name != "topk_mask"}
        found[f"({rows:,}, {n:,})"] = [
            timing.medians(c, seconds=seconds, clock=clock) for c in (forward, both)
        ]
    return found


def elsewhere(kernels: str) -> Times:
    """What `measure` finds in a process with these kernels."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.reference", *sys.argv[1:]],
        env={**os.environ, "KHOT_KERNELS": kernels, "KHOT_MEASURE": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: Times = json.loads(run.stdout.splitlines()[-1])
    return found


def pair(times: list[dict[str, float]], name: str, unit: Callable[[int, str], float]) -> str:
    """Forward / forward + backward."""
    cells = [report.ratio(t[name] / unit(i, name)) if name in t else "–" for i, t in enumerate(times)]
    return " / ".join(cells)


def main() -> None:
    seconds, clock = report.begin("Compiled and reference kernels, on the CPU", 0.3)
    if os.environ.get("KHOT_MEASURE"):
        print(json.dumps(measure(seconds, clock)))
        return
    compiled, reference = elsewhere("compiled"), elsewhere("reference")
    names = list(entries(8))[1:]

    def table(title: str, times: Times, units: Times, of: str = "") -> None:
        """In times of ``of``, or of the same call among the units."""
        lines = [
            [
                f"`{name}`",
                *(pair(t, name, lambda i, own, s=s: units[s][i][of or own]) for s, t in times.items()),
            ]
            for name in names
        ]
        print(report.table([f"{title}, forward / forward + backward", *times], lines))

    table("reference, in times of the compiled kernels", reference, compiled)
    table("reference, in softmaxes", reference, reference, "softmax")
    table("compiled, in softmaxes", compiled, compiled, "softmax")


if __name__ == "__main__":
    main()
