"""What soft ranks and sorting cost on the CPU beside torch.sort: `python -m benchmarks.ranking`.

Forward and forward + backward with the Laplace CDF on the shapes of the goals, as ratios to torch.sort (of
the values, differentiated where the operator is) on the same tensor in the same run: all calls interleaved,
medians. Nothing is reported if the results disagree with the reference kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import khot
from benchmarks import report, timing
from benchmarks.cpu import spread_normal
from khot._kernels.reference import laplace as scans

SHAPES = [(128, 1_000), (100, 10_000), (16, 1_000_000)]
GOAL = (1.1, 1.3)
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


def measure(shape: tuple[int, int], seconds: float, clock: timing.Clock) -> dict[str, tuple[float, float]]:
    x = spread_normal(*shape, torch.Generator().manual_seed(0))
    check(x)
    calls: dict[str, Callable[[Tensor], Tensor]] = {"sort": lambda x: torch.sort(x, -1).values, **OPERATORS}
    forward = {name: partial(call, x) for name, call in calls.items()}
    whole = {name: timing.forward_backward(call, x) for name, call in calls.items()}
    one, both = (timing.medians(c, seconds=seconds, clock=clock) for c in (forward, whole))
    return {name: (one[name] / one["sort"], both[name] / both["sort"]) for name in OPERATORS}


def main() -> None:
    seconds, clock = report.begin("soft ranks and sorting beside torch.sort, on the CPU", 2.0)
    rows = []
    for shape in SHAPES:
        ratios = measure(shape, seconds, clock)
        goal = f"{GOAL[0]} / {GOAL[1]}"
        rows.append([f"{shape}", goal, *(f"{a:.2f} / {b:.2f}" for a, b in ratios.values())])
    print(report.table(["rows, n", "goal", *OPERATORS], rows))


if __name__ == "__main__":
    main()
