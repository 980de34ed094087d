"""What soft ranks, sorting and soft counts of many levels cost on the CPU beside torch.sort:
`python -m benchmarks.ranking`.

Forward and forward + backward with the Laplace CDF, as ratios to torch.sort (of the values, differentiated
where the operator is) on the same tensor in the same run: all calls interleaved, medians. Soft ranks and
sorting are on the shapes of the goals. Of the counts of m levels, every other case has twice the entries and
twice the levels of the one before. Nothing is reported if the results disagree with the reference kernels.
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
from khot._kernels.reference import soft_count

SHAPES = [(128, 1_000), (100, 10_000), (16, 1_000_000)]
GOAL = (1.1, 1.3)
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {"soft_rank": khot.soft_rank, "soft_sort": khot.soft_sort}
LEVELS = [(100, 1_000, 1_000), (100, 2_000, 2_000), (16, 100_000, 10_000), (16, 200_000, 20_000)]


def check(x: Tensor) -> None:
    """Raise unless a row agrees with the reference in float64."""
    row, one = x[:1], torch.ones((), dtype=torch.float64)
    n = row.shape[-1]
    want, _, _ = scans.laplace_count(-row.double(), None, one)
    hi, lo, _, _ = scans.laplace_thresholds(-row.double(), torch.arange(n).double() + 0.5, one)
    rank = (khot.soft_rank(row) - want).abs().max().item() / n
    sort = (khot.soft_sort(row) + (hi + lo)).abs().max().item() / (hi + lo).abs().max().item()
    if not max(rank, sort) <= 1e-7:
        raise SystemExit(f"off by {rank:.1e} and {sort:.1e} at {tuple(x.shape)}: nothing is reported")


def check_levels(x: Tensor, levels: Tensor, counts: Tensor) -> None:
    """Raise unless the first levels of a row have the counts that they have one by one."""
    row, at, one = x[:1].double(), levels[:1, :20].double(), torch.ones((), dtype=torch.float64)
    want = soft_count.soft_count(row, at, one, "laplace", 0.0, False)
    there = khot.soft_count(row, levels[:1].double(), cdf="laplace")[:, :20]
    back = khot.inverse_soft_count(row, counts[:1].double(), cdf="laplace")[:, :20]
    again = soft_count.soft_count(row, back, one, "laplace", 0.0, False)
    off = max((there - want).abs().max().item(), (again - counts[:1, :20].double()).abs().max().item())
    if not off <= 1e-9 * row.shape[-1]:
        raise SystemExit(f"off by {off:.1e} at {tuple(x.shape)}: nothing is reported")


def measure_levels(
    rows: int, n: int, m: int, seconds: float, clock: timing.Clock
) -> dict[str, tuple[float, float]]:
    g = torch.Generator().manual_seed(0)
    x = spread_normal(rows, n, g)
    levels, counts = torch.randn(rows, m, generator=g), 1 + (n - 2) * torch.rand(rows, m, generator=g)
    check_levels(x, levels, counts)
    return beside_sort(
        x,
        {
            "soft_count": lambda x: khot.soft_count(x, levels, cdf="laplace"),
            "inverse_soft_count": lambda x: khot.inverse_soft_count(x, counts, cdf="laplace"),
        },
        seconds,
        clock,
    )


def measure(shape: tuple[int, int], seconds: float, clock: timing.Clock) -> dict[str, tuple[float, float]]:
    x = spread_normal(*shape, torch.Generator().manual_seed(0))
    check(x)
    return beside_sort(x, OPERATORS, seconds, clock)


def beside_sort(
    x: Tensor, operators: dict[str, Callable[[Tensor], Tensor]], seconds: float, clock: timing.Clock
) -> dict[str, tuple[float, float]]:
    calls: dict[str, Callable[[Tensor], Tensor]] = {"sort": lambda x: torch.sort(x, -1).values, **operators}
    forward = {name: partial(call, x) for name, call in calls.items()}
    whole = {name: timing.forward_backward(call, x) for name, call in calls.items()}
    one, both = (timing.medians(c, seconds=seconds, clock=clock) for c in (forward, whole))
    return {name: (one[name] / one["sort"], both[name] / both["sort"]) for name in operators}


def main() -> None:
    seconds, clock = report.begin("soft ranks and sorting beside torch.sort, on the CPU", 2.0)
    rows = []
    for shape in SHAPES:
        ratios = measure(shape, seconds, clock)
        goal = f"{GOAL[0]} / {GOAL[1]}"
        rows.append([f"{shape}", goal, *(f"{a:.2f} / {b:.2f}" for a, b in ratios.values())])
    print(report.table(["rows, n", "goal", *OPERATORS], rows))
    rows = []
    for case in LEVELS:
        ratios = measure_levels(*case, seconds, clock)
        rows.append([f"{case}", *(f"{a:.2f} / {b:.2f}" for a, b in ratios.values())])
    print(report.table(["rows, n, m", *ratios], rows))


if __name__ == "__main__":
    main()
