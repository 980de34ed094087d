"""The hard selection under a budget: each entry in turn, if what is left of the budget pays for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._core.precision import on, widen

__all__ = ["budget_mask", "slack"]


def slack(n: int, cost: torch.dtype, budget: torch.dtype) -> float:
    """The share of itself by which a budget may be exceeded, because it is a rounded sum of costs.

    It is a share of the budget and not of all costs: many small costs must not be taken for rounding where
    the budget is small. 128 units of rounding are more than a sum by torch is wrong by, even where such a
    sum is left after another was subtracted that is 30 times as large. In float64, sums in any order of n
    numbers are within n/2 more. Costs of half precision are added in float32, and a budget of half precision
    is itself known to one unit.

    Args:
        n: the number of entries.
        cost, budget: the dtypes of both.
    """
    if cost == torch.float64:
        share = (128 + n / 2) * torch.finfo(cost).eps
    else:
        share = 128 * torch.finfo(torch.float32).eps
    return max(share, torch.finfo(budget).eps if budget.itemsize == 2 else 0.0)


def budget_mask(x: Tensor, cost: Tensor, budget: Tensor) -> Tensor:
    """1 for the entries that are taken, in descending order of x and ties by the lowest index.

    Args:
        x: the order, (*batch, n). −inf is never taken.
        cost: broadcasts with x.
        budget: broadcasts with batch. It may be exceeded by the share :func:`slack` of it.

    A row with a NaN among x, with a cost of an entry that is negative, infinite or NaN, or with a budget that
    is negative or NaN, is NaN.
    """
    # From the front, the longest run of entries that fits is taken; what then costs more than is left never
    # fits, and the rest is a shorter row of the same kind.
    share = slack(x.shape[-1], cost.dtype, budget.dtype)
    budget = widen(on(x.device, budget)).expand(x.shape[:-1]).unsqueeze(-1)
    budget = budget + budget * share
    cost = cost.expand(x.shape)
    order = x.argsort(dim=-1, descending=True, stable=True)
    price = widen(cost).gather(-1, order)
    there = x.gather(-1, order) != -math.inf
    bad = (
        x.isnan().any(-1, True)
        | (there & ~((price >= 0) & (price < math.inf))).any(-1, True)
        | ~(budget >= 0)
    )
    price = price.where(there, 0)
    taken, left = torch.zeros_like(there), budget
    waiting = there & (price <= left)
    while bool(waiting.any()):
        run = price.where(waiting, 0).cumsum(-1)
        fits = waiting & (run <= left)
        taken = taken | fits
        # never below 0, so that free entries fit
        left = left.where(left.isinf(), left - run.where(fits, 0).amax(-1, True))
        waiting = waiting & ~taken & (price <= left)
    chosen = torch.zeros_like(taken).scatter(-1, order, taken)
    return chosen.to(x.dtype).masked_fill(bad, math.nan)
