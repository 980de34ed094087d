"""Why an assignment has no result: bounds that no matrix meets, or thresholds that were not found."""

from __future__ import annotations

import math
from typing import NoReturn

from torch import Tensor

from khot._core import arguments
from khot._core.precision import in_float64
from khot._core.rows import Row
from khot._kernels.reference.contradiction import contradict
from khot._kernels.reference.sides import Sides, beyond, limits

__all__ = ["explain", "is_unsolved"]


def is_unsolved(y: Tensor, x: Tensor, row: Row) -> bool:
    """Whether an assignment has a NaN, but its scores have none. All processes of a group say the same."""
    if not arguments.readable(y) or (row.here and not math.isnan(y.sum().item())):
        return False
    unsolved, nan = row.reduce([in_float64(value.isnan().any()) for value in (y, x)])
    return bool(unsolved) and not bool(nan)


def explain(c: Tensor, x: Tensor, sides: Sides, tau: Tensor, slack: float, row: Row) -> NoReturn:
    """Raise the error of an assignment that is unsolved.

    Args:
        c: the columns' thresholds, (*batch, E), NaN where there is none.
        x: the scores, (*batch, m, E), of which none is NaN.
        sides: bounds that broadcast with (*batch, m), (*batch, E) and (*batch, 1).
        slack: by how much sums of bounds may miss one another, relative.
    """
    arguments.check_values(tau, "tau", low=0, low_open=True)
    *batch, m, width = x.shape

    def each(value: Tensor, *own: int) -> Tensor:
        # the number of matrices, which cannot be left to reshape: a shard may have no rows
        return in_float64(value).expand(*batch, *own).reshape(math.prod(batch), *own)

    x, (least_k, most_k, least, most, total) = each(x, m, width), sides
    least_k, most_k, least, most = each(least_k, m), each(most_k, m), each(least, width), each(most, width)
    total = None if total is None else each(total, 1)
    _check_sums(x, Sides(least_k, most_k, least, most, total), slack, row)
    for i in c.isnan().any(-1).reshape(-1).nonzero().flatten().tolist():
        whole = None if total is None else float(total[i])
        if contradict(x[i], Sides(least_k[i], most_k[i], least[i], most[i], whole), slack, row):
            raise ValueError(
                "capacity must leave room for k, and for the total, in the entries that may be selected, but "
                "no matrix meets all of the bounds"
            )
    raise RuntimeError(
        "soft_assign did not converge, although nothing shows that k, capacity and total contradict one "
        f"another: a larger tau than {tau.min().item():g}, or a cdf of full support, is easier"
    )


def _check_sums(x: Tensor, sides: Sides, slack: float, row: Row) -> None:
    """Raise if a bound alone, or their sums, contradict one another."""
    found, plain = limits(x, sides, row), arguments.plain
    certain, may = (x == math.inf).double(), (x != -math.inf).double()
    pinned, below = row.reduce([certain.sum(-2), may.sum(-2)])
    of_rows = ("k", "row", sides.least_k, sides.most_k, certain.sum(-1), may.sum(-1), found.bad_rows)
    of_columns = ("capacity", "column", sides.least, sides.most, pinned, below, found.bad_columns)
    for name, what, least, most, fewest, entries, many in (of_rows, of_columns):
        if not many.any():
            continue
        which, bad = "", beyond(least, most, fewest, entries)
        if bad.any():
            got = (least if least[bad][0] > entries[bad][0] else most)[bad][0].item()
            which = f", but got {plain(got)} for a {what} with {plain(entries[bad][0].item())}"
        raise ValueError(
            f"{name} must lie in [number of entries of +inf, number of entries that may be selected] of each "
            f"{what}{which}"
        )
    short, over = found.low_k > found.high * (1 + slack), found.low > found.high_k * (1 + slack)
    for name, other, bad, need, room in (
        ("capacity", "k", short, found.low_k, found.high),
        ("k", "capacity", over, found.low, found.high_k),
    ):
        if bad.any():
            raise ValueError(
                f"{name} must allow a sum of at least {plain(need[bad][0].item())}, which {other} asks for, "
                f"but got one of at most {plain(room[bad][0].item())}"
            )
    if sides.total is not None:
        floor, ceiling = found.range()
        total = sides.total.squeeze(-1)
        bad = ~((total >= floor * (1 - slack)) & (total <= ceiling * (1 + slack)))
        if bad.any():
            raise ValueError(
                f"total must lie in [{plain(floor[bad][0].item())}, {plain(ceiling[bad][0].item())}], as the "
                f"bounds of k and capacity allow, but got {plain(total[bad][0].item())}"
            )
