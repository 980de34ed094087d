"""What a soft top-k costs on the CPU beside torch.softmax: `python -m benchmarks.cpu`, `make bench`.

Forward and forward + backward of each CDF on the shapes of the goals, as ratios to torch.softmax on the
same tensor in the same run: all calls interleaved, medians. Nothing is reported if the results disagree
with the reference kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import khot
from khot import kernels
from khot.kernels import reference

SHAPES = {(4_096, 64): 8, (128, 1_000): 100, (100, 10_000): 1_000, (100, 100_000): 10_000}
SHAPES |= {(16, 1_000_000): 100_000, (1, 6_000_000): 600_000}
GOALS = dict(zip(SHAPES, [(2.0, 1.8), (1.7, 1.6), (1.3, 1.15), *[(1.1, 1.05)] * 3], strict=True))
CDFS = ("logistic", "laplace", "normal", "uniform")
ENTRIES = 30_000_000  # read by one call's repetitions altogether


def scores(rows: int, n: int) -> Tensor:
    """N(0, s²), s from 0.1 to 5 evenly over the rows."""
    spread = torch.linspace(0.1, 5, rows) if rows > 1 else torch.tensor([2.0])
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(0)) * spread[:, None]


def check(x: Tensor, k: int, cdf: str) -> None:
    """Raise unless a few rows agree with the reference in float64."""
    part = x[:: max(1, len(x) // 4)][:4]
    y = khot.soft_topk(part, k, cdf=cdf)
    one = torch.ones((), dtype=torch.float64)
    want, _, _ = reference.soft_topk(part.double(), k * one, one, cdf, 0.0, "y")
    worst = (y - want).abs().max().item()
    if not worst <= 5e-7:
        raise SystemExit(f"{cdf} at {tuple(x.shape)} is off by {worst:.1e}: nothing is reported")


def medians(
    calls: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def both_ways(x: Tensor, call: Callable[[Tensor], Tensor]) -> Callable[[], object]:
    leaf = x.clone().requires_grad_()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def run() -> None:
        leaf.grad = None
        call(leaf).backward(grad)

    return run


def measure(shape: tuple[int, int], clock: Callable[[], float]) -> dict[str, tuple[float, float]]:
    """Ratios to softmax, forward and forward + backward, by CDF."""
    x, k = scores(*shape), SHAPES[shape]
    for cdf in CDFS:
        check(x, k, cdf)
    calls: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda x: torch.softmax(x, -1)}
    calls |= {cdf: lambda x, cdf=cdf: khot.soft_topk(x, k, cdf=cdf) for cdf in CDFS}  # type: ignore[misc]
    repeats = max(7, min(300, ENTRIES // x.numel()))
    forward = medians({name: lambda call=call: call(x) for name, call in calls.items()}, repeats, clock)
    whole = medians({name: both_ways(x, call) for name, call in calls.items()}, repeats, clock)
    return {cdf: (forward[cdf] / forward["softmax"], whole[cdf] / whole["softmax"]) for cdf in CDFS}


def main() -> None:
    parser = argparse.ArgumentParser(description="soft top-k beside torch.softmax, on the CPU")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the ratios here, too")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread and its CPU time: steadier on a machine that others use",
    )
    args = parser.parse_args()
    torch.set_num_threads(1 if args.cpu_time else args.threads)
    clock = time.thread_time if args.cpu_time else time.perf_counter

    print(
        f"kernels: {kernels.active()['cpu']}; torch {torch.__version__}, Python {platform.python_version()}"
    )
    print(f"threads: {torch.get_num_threads()}; load: {os.getloadavg()[0]:.1f}; {platform.platform()}\n")
    print("| rows, n | goal | " + " | ".join(CDFS) + " |")
    print("|---|---|" + "---|" * len(CDFS))
    results = {}
    for shape, goal in GOALS.items():
        ratios = measure(shape, clock)
        results[str(shape)] = ratios
        cells = (f"{a:.2f} / {b:.2f}" for a, b in ratios.values())
        print(f"| {shape} | {goal[0]} / {goal[1]} | " + " | ".join(cells) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
