"""What soft ranks and sorting cost on the CPU beside torch.sort: `python -m benchmarks.ranking`.

Forward and forward + backward with the Laplace CDF on the shapes of the goals, as ratios to torch.sort (of
the values, differentiated where the operator is) on the same tensor in the same run: all calls interleaved,
medians. Nothing is reported if the results disagree with the reference kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import khot
from benchmarks.cpu import both_ways, medians, scores
from khot import kernels
from khot.kernels import scans

SHAPES = [(128, 1_000), (100, 10_000), (16, 1_000_000)]
GOAL = (1.1, 1.3)
ENTRIES = 30_000_000  # read by one call's repetitions altogether
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {"soft_rank": khot.soft_rank, "soft_sort": khot.soft_sort}


def check(x: Tensor) -> None:
    """Raise unless a row agrees with the reference in float64."""
    row, one = x[:1], torch.ones((), dtype=torch.float64)
    n = row.shape[-1]
    want, _ = scans.laplace_rank(-row.double(), one)
    hi, lo, _, _ = scans.laplace_thresholds(-row.double(), torch.arange(n).double() + 0.5, one)
    rank = (khot.soft_rank(row) - want).abs().max().item() / n
    sort = (khot.soft_sort(row) + (hi + lo)).abs().max().item() / (hi + lo).abs().max().item()
    if not max(rank, sort) <= 1e-7:
        raise SystemExit(f"off by {rank:.1e} and {sort:.1e} at {tuple(x.shape)}: nothing is reported")


def measure(shape: tuple[int, int], clock: Callable[[], float]) -> dict[str, tuple[float, float]]:
    x = scores(*shape)
    check(x)
    calls: dict[str, Callable[[Tensor], Tensor]] = {"sort": lambda x: torch.sort(x, -1).values, **OPERATORS}
    repeats = max(3, min(100, ENTRIES // x.numel()))
    forward = medians({name: lambda call=call: call(x) for name, call in calls.items()}, repeats, clock)
    whole = medians({name: both_ways(x, call) for name, call in calls.items()}, repeats, clock)
    return {name: (forward[name] / forward["sort"], whole[name] / whole["sort"]) for name in OPERATORS}


def main() -> None:
    parser = argparse.ArgumentParser(description="soft ranks and sorting beside torch.sort, on the CPU")
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
    print("| rows, n | goal | " + " | ".join(OPERATORS) + " |")
    print("|---|---|" + "---|" * len(OPERATORS))
    results = {}
    for shape in SHAPES:
        ratios = measure(shape, clock)
        results[str(shape)] = ratios
        cells = (f"{a:.2f} / {b:.2f}" for a, b in ratios.values())
        print(f"| {shape} | {GOAL[0]} / {GOAL[1]} | " + " | ".join(cells) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
