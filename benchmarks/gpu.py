"""What a soft top-k costs on a GPU: `python -m benchmarks.gpu`.

Every operator of the soft top-k beside torch.softmax and torch.topk on the same tensor in the same run, and
beside what people run today: the time that its kernels take on the device (torch.profiler), the time that a
call takes with the device idle before and after, bytes per second against a copy, kernels per call, memory.

Writes gpu.json and gpu.md, case by case; stopped and started again with the same code and machine it goes on.
An operator that fails or disagrees with the reference kernels in float64 gets no figures; it is named at the
end, and the exit code is 1. Exit code 2 without a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report, timing
from benchmarks.cpu import call_operator, spread_normal
from benchmarks.operators import OPERATORS, disagreement
from khot import _kernels as kernels
from khot.experiments.harness.timing import Call
from khot.experiments.tasks.peers import PEERS, missing

RESULTS = Path(__file__).parent / "results"
REPEATS = 20  # calls that the profiler looks at
WARM = 0.03  # seconds of calls before that, so that the clocks are up


@dataclass(frozen=True)
class Case:
    """One tensor of scores N(0, s²), how many to select, and the goal in softmaxes, if there is one."""

    rows: int
    n: int
    k: int
    dtype: torch.dtype
    goal: float | None

    @property
    def id(self) -> str:
        return f"({self.rows:,}, {self.n:,}) {str(self.dtype).removeprefix('torch.')}"


CASES = [
    Case(8_192, 64, 8, torch.float32, 1.5),
    Case(32_768, 512, 32, torch.bfloat16, 1.5),
    Case(2_048, 4_096, 64, torch.float32, 1.5),
    Case(4_096, 16_384, 64, torch.float32, 1.5),
    Case(2_048, 65_536, 64, torch.bfloat16, None),
    Case(100, 1_000_000, 100_000, torch.float32, 2.5),
    Case(1, 6_290_000, 64, torch.float32, None),
]
OURS = {
    name: operator
    for name, operator in OPERATORS.items()
    # the others are these under another name, or take no part in the goals
    if name not in ("sigmoid_topk", "laplace_topk", "sparse_topk", "ot_topk")
}
FORWARD_ONLY = ("topk", "topk_mask", "copy")


def scores(case: Case, device: torch.device) -> Tensor:
    x = spread_normal(case.rows, case.n, torch.Generator().manual_seed(0))
    return x.to(device=device, dtype=case.dtype)


def functions(case: Case) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is timed by the profiler: torch's own, and ours."""
    own = {name: partial(call_operator, operator, k=case.k, tau=1.0) for name, operator in OURS.items()}
    return {
        "softmax": lambda x: torch.softmax(x, -1),
        "topk": lambda x: torch.topk(x, case.k).values,
        "copy": lambda x: x.clone(),
        **own,
    }


def wrong(case: Case, x: Tensor) -> dict[str, str]:
    """The operators that have no figures here, and why."""
    found = {}
    for name, operator in OURS.items():
        try:
            reason = disagreement(operator, x, case.k, 1.0)
        except Exception as error:  # a kernel that does not compile, say: the others count
            reason = f"fails: {type(error).__name__}: {str(error)[:200]}"
        if reason:
            found[name] = reason
    return found


def calls(x: Tensor, given: Mapping[str, Callable[[Tensor], Tensor]]) -> list[dict[str, Call]]:
    """Forward, and forward + backward."""
    return [
        {name: partial(f, x) for name, f in given.items()},
        {name: timing.forward_backward(f, x) for name, f in given.items() if name not in FORWARD_ONLY},
    ]


# ---------------------------------------------------------------------------------- one measurement


def clock(device: torch.device) -> timing.Clock:
    """Wall time, once the device has nothing left to do."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return now


def on_device(call: Call, device: torch.device) -> tuple[float, float]:
    """Seconds that the kernels of a call take, the gaps between them left out; and how many there are."""
    now = clock(device)
    start = now()
    while now() - start < WARM:
        call()
    with torch.profiler.profile() as profile:
        for _ in range(REPEATS):
            call()
        now()
    kind = getattr(torch.autograd.DeviceType, device.type.upper())
    found = [e for e in profile.events() if e.device_type == kind and not _overhead(e.name)]
    return sum(e.time_range.elapsed_us() for e in found) / 1e6 / REPEATS, len(found) / REPEATS


def _overhead(name: str) -> bool:
    """The profiler's own entries."""
    return name in ("Activity Buffer Request", "Command Buffer Full", "Buffer Flush", "Lazy Function Loading")


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Bytes allocated at most while the call runs, results included."""
    if device.type != "cuda":
        return timing.peak_memory(call)
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, device: torch.device, seconds: float) -> dict[str, Any]:
    x = scores(case, device)
    bad = wrong(case, x)
    given = calls(x, {name: f for name, f in functions(case).items() if name not in bad})
    timed = partial(timing.medians, seconds=seconds, clock=clock(device))
    result: dict[str, Any] = {
        "bytes": x.numel() * x.element_size(),
        "wrong": bad,
        "left out": {},
        "peers": [{}, {}],
    }
    pairs = [{name: on_device(call, device) for name, call in c.items()} for c in given]
    result["device"] = [{name: pair[0] for name, pair in p.items()} for p in pairs]
    result["kernels"] = [{name: pair[1] for name, pair in p.items()} for p in pairs]
    result["calls"] = [timed(c) for c in given]
    result["memory"] = [{name: peak_memory(call, device) for name, call in c.items()} for c in given]
    for name, peer in PEERS.items():
        reason = missing(peer) or ("" if peer.fits(case.rows, case.n, case.k) else "too large")
        try:
            if not reason:
                peers = calls(x, {name: lambda x, call=peer.call: call(x, case.k, 1.0)})
                for times, c in zip(result["peers"], peers, strict=True):
                    times |= timed(c)
        except (RuntimeError, TypeError, NotImplementedError) as error:  # out of memory is one of the first
            reason = f"fails: {type(error).__name__}"
        if reason:
            result["left out"][name] = reason
    return result


def warm(case: Case, name: str, device: str) -> None:
    """Have Triton compile what the case needs of one operator; its cache is on disk, for all processes."""
    x = torch.randn(case.rows, case.n, dtype=case.dtype, device=device)
    for c in calls(x, {name: functions(case)[name]}):
        for call in c.values():
            call()


def warm_all(todo: list[Case], device: torch.device, jobs: int) -> None:
    """Compile as many at a time as there are jobs. What fails here fails again when it is timed."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(warm, case, name, str(device)) for case in todo for name in OURS]
        for task in tasks:
            task.exception()


# -------------------------------------------------------------------------------------------- report


def pair(result: dict[str, Any], what: str, name: str, to: str) -> str:
    """Forward / forward + backward, in units of what `to` takes."""
    return " / ".join(quotient(v.get(name), v.get(to)) for v in result[what])


def quotient(value: float | None, unit: float | None) -> str:
    return "–" if value is None or not unit else report.ratio(value / unit)


def sections(results: report.Results) -> Iterator[tuple[str, str]]:
    """What each table says, and the table."""
    done: dict[str, dict[str, Any]] = results["cases"]
    head = [case.id for case in CASES if case.id in done]
    goals = [str(case.goal or "–") for case in CASES if case.id in done]
    ours = [f"`{name}`" for name in OURS]

    def rows(cell: Callable[[dict[str, Any], str], str], names: list[str]) -> list[list[str]]:
        return [[name, *(cell(done[id], name.strip("`")) for id in head)] for name in names]

    both = "forward / forward + backward"
    yield (
        f"Time on the device, in softmaxes: {both}",
        report.table(
            ["", *head],
            [
                ["*goal, logistic*", *goals],
                *rows(lambda r, n: pair(r, "device", n, "softmax"), ["topk", *ours]),
            ],
        ),
    )
    yield (
        "Time on the device, forward, in torch.topks",
        report.table(
            ["", *head], rows(lambda r, n: quotient(r["device"][0].get(n), r["device"][0]["topk"]), ours)
        ),
    )
    yield (
        f"Time of a call that finds the device idle, in softmaxes: {both}",
        report.table(["", *head], rows(lambda r, n: pair(r, "calls", n, "softmax"), ["topk", *ours])),
    )
    yield (
        "GB/s, forward: one read and one write of the tensor over the time on the device",
        report.table(
            ["", *head],
            rows(bandwidth, ["copy", "softmax", *ours]),
        ),
    )
    yield (
        f"Kernels per call: {both}",
        report.table(["", *head], rows(counts, ["softmax", "topk", *ours])),
    )
    yield (
        f"Memory allocated at most, results included, in tensors: {both}",
        report.table(["", *head], rows(memory, ["softmax", "topk", *ours])),
    )
    yield (
        f"What people run today, time of a call in softmaxes: {both}",
        report.table(["", *head], rows(lambda r, n: peer(r, n, "softmax"), list(PEERS))),
    )
    yield (
        "The same, in times of khot's soft_topk, logistic",
        report.table(["", *head], rows(lambda r, n: peer(r, n, "soft_topk, logistic"), list(PEERS))),
    )


def bandwidth(result: dict[str, Any], name: str) -> str:
    seconds = result["device"][0].get(name)
    return f"{2 * result['bytes'] / seconds / 1e9:,.0f}" if seconds else "–"


def counts(result: dict[str, Any], name: str) -> str:
    return " / ".join(f"{values[name]:.0f}" if name in values else "–" for values in result["kernels"])


def memory(result: dict[str, Any], name: str) -> str:
    return " / ".join(quotient(values.get(name), result["bytes"]) for values in result["memory"])


def peer(result: dict[str, Any], name: str, to: str) -> str:
    if name in result["left out"]:
        return str(result["left out"][name])
    pairs = zip(result["peers"], result["calls"], strict=True)
    return " / ".join(quotient(times[name], units.get(to)) for times, units in pairs)


def write(path: Path, results: report.Results) -> None:
    setting = ["- " + f"{key}: {value}" for key, value in results["setting"].items()]
    parts = [f"## {title}\n\n{table}" for title, table in sections(results)]
    text = "\n\n".join(["# GPU benchmark", "\n".join(setting), *parts])
    path.with_suffix(".md").write_text(text, encoding="utf-8")


# ---------------------------------------------------------------------------------------------- main


def machine(device: torch.device) -> dict[str, str]:
    """What the figures depend on, but for the name of the machine."""
    own = report.machine(cpu_time=False)
    found = {"device": own["processor"]}
    if device.type == "cuda":
        version = torch.version.cuda or f"ROCm {torch.version.hip}"
        found = {"device": torch.cuda.get_device_name(device), "CUDA": version}
    if kernels.active()["gpu"] == "triton":
        import triton  # its metadata may be under another name, or missing

        found["triton"] = triton.__version__
    return {
        **found,
        "kernels": kernels.active()["gpu"],
        "khot": own["khot"],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.05, help="for the calls of each function")
    parser.add_argument(
        "--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile at first"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for gpu.json and gpu.md")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu: torch sees no GPU, so nothing was measured", file=sys.stderr)
        raise SystemExit(2)

    path = args.out / "gpu"
    setting = {"command": "python -m benchmarks.gpu", **machine(device)}
    results = report.resume(path.with_suffix(".json"), setting)
    todo = [case for case in CASES if case.id not in results["cases"]]
    if args.jobs > 1 and todo:
        warm_all(todo, device, args.jobs)
    for case in todo:
        print(case.id, file=sys.stderr, flush=True)
        results["cases"][case.id] = measure(case, device, args.seconds)
        report.save(path.with_suffix(".json"), results)
    write(path, results)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    faults = [f"{id}, {n}: {why}" for id, c in results["cases"].items() for n, why in c["wrong"].items()]
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
