"""The reference kernels of the soft budget, forward and backward: Σ_i w_i F((x_i − t a_i)/τ) = B.

Here a_i = 1 if the selection is by score, and a_i = w_i if it is by value. :func:`root` finds t. Rows are
read in tiles, and only sums over a row leave a pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot import cdfs
from khot._core import rows
from khot._core.precision import greatest, on, widen
from khot._kernels.reference.implicit import Solved, vjp
from khot._kernels.reference.root import root
from khot._kernels.reference.survey import Problem, add, nothing, of_row, one_entry, residual
from khot._kernels.reference.tiles import tiles

__all__ = ["slack", "soft_budget", "soft_budget_backward"]

# A budget that exceeds the sum of the costs by no more than this is that sum, because a user adds the costs
# in their own dtype and order. In blocks, as torch.sum does, and rounded a few times, sums are wrong by this
# many units of rounding at most (3.3 were seen for a million costs).
SUMMED = 4.0
# One after the other, n numbers >= 0 are wrong by up to n/2 such units (0.08 n were seen for equal ones).
# Sums of half precision are kept in float32. A budget that is further off than this share is rather a
# mistake.
MOST = 2.0**-10


def slack(n: Tensor, dtype: torch.dtype) -> Tensor:
    """The share of the sum of n costs by which a budget may exceed it."""
    eps = torch.finfo(dtype).eps
    kept = min(eps, torch.finfo(torch.float32).eps)
    return SUMMED * eps + (0.5 * kept * n).clamp(max=MOST)


def soft_budget(
    x: Tensor,
    cost: Tensor,
    budget: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    by: str,
    at_most: bool,
    group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The shares y, and t = hi + lo, of the batch shape.

    Rows without an answer (a score is NaN; a cost is negative, infinite or NaN; the budget is negative or
    more than all costs; τ is not positive) are NaN. Where no finite entry is paid for, or all are, t = ±inf
    is written as hi = lo = ±`greatest`. With ``at_most``, t = 0 where F(x/τ) spends no more than the budget.

    Args:
        x: scores, (*batch, n). −inf is never selected and costs nothing, +inf is selected and paid for.
        cost: broadcasts with x.
        budget, tau: broadcast with batch.
        by: "score" or "value".
        at_most: whether the budget may be left unspent.
        group: the names of the process groups that the rows are spread over; "" for whole rows.
    """
    F, row, by_value, batch = cdfs.resolve(cdf, shape), rows.of(group), by == "value", x.shape[:-1]
    cost = cost.expand(x.shape)
    budget, tau = (widen(on(x.device, number)).expand(batch) for number in (budget, tau))
    zero = torch.zeros_like(budget)
    survey, pinned, bad = nothing(zero), zero, zero
    for part, tile in tiles(x):
        w = widen(cost[..., part])
        there = tile != -math.inf
        bad = bad + (tile.isnan() | (there & ~((w >= 0) & (w < math.inf)))).sum(-1)
        survey = add(survey, tile, w.where(tile.isfinite() & (w > 0), 0), by_value)
        pinned = pinned + w.where(tile == math.inf, 0).sum(-1)
    survey, (pinned, bad, n) = of_row(survey, row, pinned, bad, zero + x.shape[-1])
    free = survey.total
    rounding = slack(n, cost.dtype) * (free + pinned)
    left = budget - pinned
    wrong = (bad > 0) | ~((tau > 0) & (tau < math.inf)) | ~(left >= -rounding)
    if not at_most:
        wrong = wrong | ~(left <= free + rounding)
    left = left.clamp(min=0)
    # what is left of the costs to rounding is not a share that could be spent
    rounded = 16 * torch.finfo(free.dtype).eps * free
    every, none = (left >= free - rounded) & ~wrong, (left == 0) & (free > 0) & ~wrong
    loose = every & at_most
    every = every & ~loose
    live = ~(every | none | wrong | loose)
    survey = one_entry(survey, live)
    problem = Problem(x, cost, survey, left.where(live, 0.5), tau.where(live, 1), F, by_value, row)
    hi, lo, _ = root(problem, live)
    if at_most:  # t < 0: F(x/τ) spends less than the budget
        unspent = live & (hi + lo < 0)
        loose, live = loose | unspent, live & ~unspent
    infinite = torch.full_like(hi, -greatest(hi)).masked_fill(none, greatest(hi)).masked_fill(loose, 0)
    infinite = infinite.masked_fill(wrong, math.nan)
    hi, lo = hi.where(live, infinite), lo.where(live, infinite)

    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, tile in tiles(x):
        y[..., part] = F.cdf(_position(tile, widen(cost[..., part]), hi, lo, tau, by_value))
    return y.masked_fill_(wrong.unsqueeze(-1), math.nan), hi, lo


def _position(x: Tensor, w: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, by_value: bool) -> Tensor:
    """z = (x − t a)/τ for a tile."""
    hi, lo, tau = hi.unsqueeze(-1), lo.unsqueeze(-1), tau.unsqueeze(-1)
    if not by_value:
        return ((x - hi) - lo) / tau
    infinite = hi.abs() == greatest(hi)
    hi_safe, lo_safe = hi.masked_fill(infinite, 0), lo.masked_fill(infinite, 0)
    z = (residual(x, w, hi_safe) - lo_safe * w) / tau
    return torch.where(infinite & (w > 0) & x.isfinite(), -torch.sign(hi) * math.inf, z)


def soft_budget_backward(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    cost: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    by: str,
    at_most: bool,
    group: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients in x, w, B and τ, as :func:`khot._kernels.reference.implicit.vjp` has them."""
    F, row = cdfs.resolve(cdf, shape), rows.of(group)
    dx, dcost, dbudget, dtau = vjp(
        grad, grad_lo, Solved(x, cost, hi, lo, tau, F, "y", by == "value", at_most, row)
    )
    assert dcost is not None
    return dx.contiguous(), dcost.contiguous(), dbudget.clone(), dtau.clone()
