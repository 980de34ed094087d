"""The bounds of an assignment's rows, columns and total: whether they agree, and what they alone decide."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._core.rows import Row
from khot._kernels.reference.soft_assign import EQUAL

__all__ = ["Sides", "balanced", "beyond", "decide", "limits"]


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


def balanced(x: Tensor, sides: Sides, slack: float, shards: Row) -> tuple[Sides, float] | None:
    """The bounds for what is left beside entries of +inf, where sums that miss one another by their rounding
    meet, and how much they missed one another, relative; None if there is a NaN, or bounds contradict one
    another."""
    found = limits(x, sides, shards)
    pinned = (x == math.inf).to(x)
    by_column, everywhere, nan = shards.reduce([pinned.sum(0), pinned.sum(), x.isnan().sum().to(x)])
    low_k, high_k, low, high, bad_rows, bad_columns = (float(v) for v in found[1:])
    if float(nan) or bad_rows or bad_columns:
        return None
    if not (low_k <= high * (1 + slack) and low <= high_k * (1 + slack)):
        return None
    least_k, most_k, least, most, total = found.sides
    same, missed = least == most, 0.0
    if low_k > high > 0:
        missed = low_k / high - 1
        most = most * (low_k / high)
        least = torch.where(same, most, least)
    elif low > high_k:
        missed = 1 - high_k / low
        least = least * (high_k / low)
        most = torch.where(same, least, most)
    if total is not None:
        floor, ceiling = (float(v) for v in found.range())
        if not floor * (1 - slack) <= total <= ceiling * (1 + slack):
            return None
        total = min(max(total, floor), ceiling) - float(everywhere)
    by_row = pinned.sum(-1)
    left = Sides(least_k - by_row, most_k - by_row, least - by_column, most - by_column, total)
    return left, missed


def decide(y: Tensor, r: Tensor, c: Tensor, sides: Sides, open_: Tensor, shards: Row) -> Sides | None:
    """Settle, in place, the rows and columns that have to take nothing, or all that is left, and return the
    bounds for the others. None if a bound cannot be met."""
    least_k, most_k, least, most, total = sides
    spread = shards.reduce([most_k.abs().sum()], [torch.cat([most_k.abs(), most_k.new_zeros(1)]).amax()])
    slack, rounding = EQUAL * max(1.0, float(spread[0])), 64 * torch.finfo(r.dtype).eps
    lack, spare = (
        rounding * (1 + float(spread[1])),
        rounding * (1 + torch.cat([most.abs(), most.new_zeros(1)]).amax()),
    )
    while True:
        left = open_.sum(-1).to(r)
        (everywhere,) = (float(v) for v in shards.reduce([left.sum()]))
        nothing = total is not None and total <= rounding
        everything = total is not None and total >= everywhere - rounding * (1 + everywhere)
        none = ((most_k <= lack) | nothing) & (left > 0)
        full = ((least_k >= left - lack) | everything) & (left > 0) & ~none
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
            if not -slack <= total <= everywhere + slack:
                return None
        open_ &= ~settled
        if not bool(some_rows > 0) and not bool(settled.any()):
            bounds = (least_k.clamp(min=0), torch.minimum(most_k, left), least.clamp(min=0), most)
            return Sides(*bounds, total)
