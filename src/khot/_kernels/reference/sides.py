"""The bounds of an assignment's rows, columns and total: whether they agree, and what they alone decide."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._core.rows import Row
from khot._kernels.reference.soft_assign import EQUAL, SLACK, filled

__all__ = ["AT_LEAST", "AT_MOST", "BETWEEN", "Settled", "Sides", "beyond", "limits", "settle"]

AT_LEAST, BETWEEN, AT_MOST = -1, 0, 1  # where the sum of a row or column is
SAME = 1e-12  # by how much sums of the same numbers may differ by their order, relative


class Sides(NamedTuple):
    """The least and the most of each row and of each column, and the sum of all, or None."""

    least_k: Tensor
    most_k: Tensor
    least: Tensor
    most: Tensor
    total: Any

    def part(self, lines: Tensor, columns: Tensor) -> Sides:
        return Sides(
            self.least_k[lines], self.most_k[lines], self.least[columns], self.most[columns], self.total
        )


class Limits(NamedTuple):
    """What bounds say beside one another: those that entries can reach; the sums of the least and the most of
    rows, and of columns; and how many rows and columns cannot meet theirs."""

    sides: Sides
    low_k: Tensor
    high_k: Tensor
    low: Tensor
    high: Tensor
    bad_rows: Tensor
    bad_columns: Tensor

    def range(self) -> tuple[Tensor, Tensor]:
        """Between which sums of all entries rows and columns allow, where they miss one another by rounding
        at most."""
        floor = torch.maximum(self.low_k, torch.minimum(self.low, self.high_k))
        return floor, torch.minimum(self.high_k, torch.maximum(self.high, self.low_k))


def beyond(least: Tensor, most: Tensor, fewest: Tensor, entries: Tensor) -> Tensor:
    """Whether entries leave no sum within bounds; but for the rounding of the bounds."""
    return ~((least <= entries * (1 + EQUAL)) & (most >= fewest) & (least <= most))


def limits(x: Tensor, sides: Sides, shards: Row) -> Limits:
    """For x (*batch, m, E)."""
    may, certain = (x != -math.inf).to(x), (x == math.inf).to(x)
    by_row, by_column, fewest = may.sum(-1), may.sum(-2), certain.sum(-2)
    by_column, fewest = shards.reduce([by_column, fewest])
    bad_rows = beyond(sides.least_k, sides.most_k, certain.sum(-1), by_row)
    bad_columns = beyond(sides.least, sides.most, fewest, by_column)
    most_k, most = torch.minimum(sides.most_k, by_row), torch.minimum(sides.most, by_column)
    least_k, least = torch.minimum(sides.least_k, most_k), torch.minimum(sides.least, most)
    low_k, high_k, many = shards.reduce([least_k.sum(-1), most_k.sum(-1), bad_rows.to(x).sum(-1)])
    kept = Sides(least_k, most_k, least, most, sides.total)
    return Limits(kept, low_k, high_k, least.sum(-1), most.sum(-1), many, bad_columns.to(x).sum(-1))


class Settled(NamedTuple):
    """What bounds alone decide, and what is left to solve.

    Attributes:
        y, r, c: the results, where they are decided: (m, E), (m,) and (E,).
        open_: which entries are not decided, (m, E).
        lines, columns: which rows and columns have such entries.
        x: the scores of these rows and columns, −inf where an entry is decided.
        sides: their bounds, for the sums of what is not decided.
        missed: by how much sums of bounds missed one another, relative.
        rows_at, columns_at: where the sum of all has all rows, or all columns: at their least, at their
            most, or between.
    """

    y: Tensor
    r: Tensor
    c: Tensor
    open_: Tensor
    lines: Tensor
    columns: Tensor
    x: Tensor
    sides: Sides
    missed: float
    rows_at: int
    columns_at: int


def settle(x: Tensor, sides: Sides, slack: float, shards: Row) -> Settled | None:
    """What the bounds of a matrix x, (m, E), decide; None if there is a NaN, or bounds contradict one
    another."""
    found = _balanced(x, sides, slack, shards)
    if found is None:
        return None
    bounds, missed = found
    y, r, c = torch.zeros_like(x), x.new_zeros(len(x)), x.new_zeros(x.shape[1])
    y[x == math.inf] = 1
    open_ = x.isfinite()
    decided = _decide(y, r, c, bounds, open_, shards)
    if decided is None:
        return None
    bounds, rows_at, columns_at = decided
    lines, columns = open_.any(-1), shards.count(open_.sum(0).to(x)) > 0
    inner = x.masked_fill(~open_, -math.inf)[lines][:, columns]
    left = bounds.part(lines, columns)
    return Settled(y, r, c, open_, lines, columns, inner, left, missed, rows_at, columns_at)


def _balanced(x: Tensor, sides: Sides, slack: float, shards: Row) -> tuple[Sides, float] | None:
    """The bounds for what is left beside entries of +inf, where sums that miss one another by their rounding
    meet, and how much they missed one another, relative; None if there is a NaN, or bounds contradict one
    another."""
    found = limits(x, sides, shards)
    pinned, may = (x == math.inf).to(x), (x != -math.inf).to(x)
    by_column, entries, nan = shards.reduce([pinned.sum(0), may.sum(0), x.isnan().sum().to(x)])
    low_k, high_k, low, high, bad_rows, bad_columns = (float(v) for v in found[1:])
    if float(nan) or bad_rows or bad_columns:
        return None
    if not (low_k <= high * (1 + slack) and low <= high_k * (1 + slack)):
        return None
    least_k, most_k, least, most, total = found.sides
    same, missed = least == most, 0.0
    # sums without a total that all but meet are meant to meet, and what they leave is rounding
    near = SLACK if total is None else 0.0
    if low_k > high * (1 - near) > 0:
        missed = abs(low_k / high - 1)
        most = filled(most, by_column, entries, low_k - high)
        least = torch.where(same, most, torch.minimum(least, most))
    elif low > high_k * (1 - near):
        missed = abs(1 - high_k / low)
        least = filled(least, by_column, entries, high_k - low)
        most = torch.where(same, least, torch.maximum(least, most))
    if total is not None:
        floor, ceiling = (float(v) for v in found.range())
        if not floor * (1 - slack) <= total <= ceiling * (1 + slack):
            return None
        total = min(max(total, floor), ceiling) - float(by_column.sum())
    by_row = pinned.sum(-1)
    left = Sides(least_k - by_row, most_k - by_row, least - by_column, most - by_column, total)
    return left, missed


def _decide(
    y: Tensor, r: Tensor, c: Tensor, sides: Sides, open_: Tensor, shards: Row
) -> tuple[Sides, int, int] | None:
    """Settle, in place, the rows and columns that have to take nothing, or all that is left. The bounds for
    the others, and where all rows and all columns have to be; None if a bound cannot be met."""
    least_k, most_k, least, most, total = sides
    spread = shards.reduce([most_k.abs().sum()], [torch.cat([most_k.abs(), most_k.new_zeros(1)]).amax()])
    slack, rounding = EQUAL * max(1.0, float(spread[0])), 64 * torch.finfo(r.dtype).eps
    lack, spare = (
        rounding * (1 + float(spread[1])),
        rounding * (1 + torch.cat([most.abs(), most.new_zeros(1)]).amax()),
    )
    rows_at = columns_at = BETWEEN
    while True:
        left, below = open_.sum(-1).to(r), open_.sum(0).to(r)
        smallest, largest = least_k.clamp(min=0), torch.minimum(most_k, left)
        everywhere, below, *sums = shards.reduce([left.sum(), below, smallest.sum(), largest.sum()])
        low_k, high_k = (float(v) for v in sums)
        fewest, most_of_all = least.clamp(min=0), torch.minimum(most, below)
        low, high = float(fewest.sum()), float(most_of_all.sum())
        # what all have together: rows with their least fill columns with their most, or the reverse
        every = total if total is not None else max(low_k, low)
        if total is not None or every >= min(high, high_k) - SAME * (1 + every):
            rows_at = rows_at or _end(every, low_k, high_k)
            columns_at = columns_at or _end(every, low, high)
        if rows_at == AT_MOST:
            least_k = torch.maximum(least_k, largest)
        elif rows_at == AT_LEAST:
            most_k = torch.minimum(most_k, smallest)
        if columns_at == AT_MOST:
            least = torch.maximum(least, most_of_all)
        elif columns_at == AT_LEAST:
            most = torch.minimum(most, fewest)
        none = (most_k <= lack) & (left > 0)
        full = (least_k >= left - lack) & (left > 0) & ~none
        broken = (most_k < -slack) | (least_k > left + slack)
        broken |= (none & (least_k > slack)) | (full & (most_k < left - slack))
        take = full.unsqueeze(-1) & open_
        y[take] = 1
        r[none], r[full] = math.inf, -math.inf
        settled = none | full
        least_k, most_k = (bound.masked_fill(settled, 0) for bound in (least_k, most_k))
        open_ &= ~settled.unsqueeze(-1)
        facts = [broken.any().to(r), settled.any().to(r), take.sum(0).to(r), open_.sum(0).to(r)]
        broken, some_rows, taken, below = shards.reduce(facts)
        least, most = least - taken, most - taken
        none = (most <= spare) & (below > 0)
        full = (least >= below - spare) & (below > 0) & ~none
        wrong = (most < -slack) | (least > below + slack)
        if bool(broken > 0) or bool(wrong.any()):
            return None
        take = full & open_
        y[take] = 1
        c[none], c[full] = math.inf, -math.inf
        settled = none | full
        least, most = (bound.masked_fill(settled, 0) for bound in (least, most))
        least_k, most_k = least_k - take.sum(-1), most_k - take.sum(-1)
        if total is not None:
            total -= float(taken.sum() + (below * full).sum())
            if not -slack <= total <= float(everywhere) + slack:
                return None
        open_ &= ~settled
        if not bool(some_rows > 0) and not bool(settled.any()):
            bounds = (least_k.clamp(min=0), torch.minimum(most_k, left), least.clamp(min=0), most)
            return Sides(*bounds, total), rows_at, columns_at


def _end(every: float, low: float, high: float) -> int:
    """At which of their bounds all have to be if this is their sum."""
    near = SAME * (1 + every)
    return AT_MOST if every >= high - near else AT_LEAST if every <= low + near else BETWEEN
