"""The reference kernels of the soft budget, forward and backward: Σ_i w_i F((x_i − t a_i)/τ) = B.

Here a_i = 1 if the selection is by score, and a_i = w_i if it is by value. :func:`root` finds t. Rows are
read in tiles, and only sums over a row leave a pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot import cdfs
from khot._core import rows
from khot._core.precision import greatest, large, on, widen
from khot._core.rows import Row
from khot._kernels.reference.root import Costs, Problem, add_costs, all_costs, residual, root
from khot._kernels.reference.tiles import tiles
from khot.cdfs import CDF

__all__ = ["SLACK", "gap_parts", "soft_budget", "soft_budget_backward", "unbound", "vjp", "weigh"]

# A budget so near to the sum of the costs, in units of the rounding of the costs' dtype, is that sum: a user
# adds the costs in their own dtype and order.
SLACK = 4.0


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
    costs, pinned, bad = Costs(zero, zero, zero, zero), zero, zero
    for part, tile in tiles(x):
        w = widen(cost[..., part])
        there = tile != -math.inf
        bad = bad + (tile.isnan() | (there & ~((w >= 0) & (w < math.inf)))).sum(-1)
        costs = add_costs(costs, w.where(tile.isfinite() & (w > 0), 0))
        pinned = pinned + w.where(tile == math.inf, 0).sum(-1)
    costs = all_costs(costs, row)
    pinned, bad = row.reduce([pinned, bad])
    free = costs.total
    slack = SLACK * torch.finfo(cost.dtype).eps * (free + pinned)
    left = budget - pinned
    wrong = (bad > 0) | ~((tau > 0) & (tau < math.inf)) | ~(left >= -slack)
    if not at_most:
        wrong = wrong | ~(left <= free + slack)
    left = left.clamp(min=0)
    # what is left of the costs to rounding is not a share that could be spent
    rounded = 16 * torch.finfo(free.dtype).eps * free
    every, none = (left >= free - rounded) & ~wrong, (left == 0) & (free > 0) & ~wrong
    loose = every & at_most
    every = every & ~loose
    live = ~(every | none | wrong | loose)
    costs = Costs(*(v.where(live, harmless) for v, harmless in zip(costs, (1, 1, 1, 0), strict=True)))
    problem = Problem(x, cost, costs, left.where(live, 0.5), tau.where(live, 1), F, by_value, row)
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


def unbound(hi: Tensor, lo: Tensor, at_most: bool) -> Tensor:
    """The rows whose budget does not bind, of which t does not depend on anything."""
    fixed = hi.abs() == greatest(hi)
    return fixed | ((hi == 0) & (lo == 0)) if at_most else fixed


def _position(x: Tensor, w: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, by_value: bool) -> Tensor:
    """z = (x − t a)/τ for a tile."""
    hi, lo, tau = hi.unsqueeze(-1), lo.unsqueeze(-1), tau.unsqueeze(-1)
    if not by_value:
        return ((x - hi) - lo) / tau
    infinite = hi.abs() == greatest(hi)
    hi_safe, lo_safe = hi.masked_fill(infinite, 0), lo.masked_fill(infinite, 0)
    z = (residual(x, w, hi_safe) - lo_safe * w) / tau
    return torch.where(infinite & (w > 0) & x.isfinite(), -torch.sign(hi) * math.inf, z)


# ------------------------------------------------------------------------------------ derivatives


class Weighed(NamedTuple):
    """What both modes of the derivative need, as differentiable functions of x, w, lo and τ."""

    z: Tensor
    a: Tensor
    w: Tensor
    rate: Tensor  # f
    share: Tensor  # F
    weight: Tensor  # f, divided by a scale
    log_scale: Tensor  # of the batch shape
    fixed: Tensor  # the rows in which t does not depend on anything
    edges: tuple[Tensor, Tensor]  # of compact support: the entries next to a gap


def weigh(
    x: Tensor,
    cost: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: CDF,
    by_value: bool,
    at_most: bool,
    row: Row,
) -> Weighed:
    """Densities relative to a scale near their maximum, so that ratios are right even where every f
    underflows."""
    fixed = unbound(hi, lo, at_most)
    infinite = (hi.abs() == greatest(hi)).unsqueeze(-1)
    w = cost.to(hi.dtype)
    w = w.masked_fill(x == -math.inf, 0)
    a = w if by_value else torch.ones_like(w)
    tau = tau.to(hi.dtype).unsqueeze(-1)
    hi_safe, lo_safe = (v.unsqueeze(-1).masked_fill(infinite, 0) for v in (hi, lo))
    held = infinite & (a > 0)  # entries that an infinite t decides
    decided = x.isinf() | held
    wide = x.to(hi.dtype).masked_fill(decided, 0)
    z = ((residual(wide, a, hi_safe) - lo_safe * a) / tau).masked_fill(decided, 0)
    chosen = (x == math.inf) | (held & (hi.unsqueeze(-1) < 0) & (x != -math.inf))
    share = torch.where(decided, chosen.to(z.dtype), cdf.cdf(z))
    log_f = cdf.log_pdf(z).masked_fill(decided, -math.inf)
    still = log_f == -math.inf
    counts = (w.detach() > 0) & ~still
    scale = log_f.detach().masked_fill(~counts, -math.inf).amax(-1) if x.shape[-1] else torch.zeros_like(hi)
    (scale,) = row.reduce([], [scale])
    scale = scale.clamp(min=-large(hi))
    weight = torch.exp((log_f - scale.unsqueeze(-1)).masked_fill(still, 0).clamp(max=math.log(large(hi))))
    weight = weight.masked_fill(still, 0)
    rate = torch.exp(log_f.masked_fill(still, 0)).masked_fill(still, 0)
    edges = (torch.zeros_like(still), torch.zeros_like(still))
    if not cdf.full_support:
        start, end = cdf.support
        level_up = ((wide - end * tau) / a.masked_fill(a == 0, 1)).detach()
        level_down = ((wide - start * tau) / a.masked_fill(a == 0, 1)).detach()
        payable = (w.detach() > 0) & ~decided
        above = payable & (z.detach() > cdf.median)
        below = payable & ~(z.detach() > cdf.median)
        if x.shape[-1]:
            up = level_up.masked_fill(~above, math.inf).amin(-1)
            down = level_down.masked_fill(~below, -math.inf).amax(-1)
        else:
            up, down = torch.full_like(hi, math.inf), torch.full_like(hi, -math.inf)
        minus_up, down = row.reduce([], [-up, down])
        edges = above & (level_up == -minus_up.unsqueeze(-1)), below & (level_down == down.unsqueeze(-1))
    return Weighed(z, a, w, rate, share, weight, scale, fixed, edges)


def gap_parts(
    up_cost: Tensor, up_mass: Tensor, down_cost: Tensor, down_mass: Tensor
) -> tuple[Tensor, Tensor]:
    """How much of a change of the budget the entries next to a gap get, on either side of it.

    It is their slope Σ w a/Σ w relative to that of both sides: a half by score, w_u/(w_u + w_d) by value.
    """
    up, down = (
        mass / cost.masked_fill(cost == 0, 1) for cost, mass in ((up_cost, up_mass), (down_cost, down_mass))
    )
    both = (up + down).masked_fill(up + down == 0, 1)
    return up / both, down / both


def vjp(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    cost: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: CDF,
    by: str,
    at_most: bool,
    row: Row,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients in x, w, B and τ (the last two of the batch shape), in operations that autograd records.

    With u = grad·f, D = Σ w a f and T = grad_lo − Σ u a/τ, which is the gradient in t:

        dL/dx = u/τ + T w f/D           dL/dB = −T τ/D
        dL/dτ = −Σ u z/τ − T Σ w f z/D  dL/dw = T τ y/D, and − t dL/dx if t is multiplied by w

    In a gap of compact support, dL/dB is the limit of smooth CDFs: Σ a grad/Σ w a over the entries next to
    the gap on either side, averaged with the weights of :func:`gap_parts`.
    """
    by_value = by == "value"
    tau = on(hi.device, tau).to(hi.dtype).expand(hi.shape)
    lo_shared, tau_shared = row.share([lo, tau])
    d = weigh(x, cost, hi, lo_shared, tau_shared, cdf, by_value, at_most, row)
    v = grad.to(hi.dtype)
    u = v * d.rate
    pay = d.w * d.a
    parts = [pay * d.weight, d.a * v * d.weight, u * d.a, u * d.z, d.w * d.weight * d.z]
    for edge in d.edges:
        parts += [d.w.where(edge, 0), pay.where(edge, 0), (d.a * v).where(edge, 0)]
    mass, mean, pull, u_moment, moment, *ends = row.total([part.sum(-1) for part in parts])
    dead = (mass == 0) | d.fixed
    mass = mass.masked_fill(dead, 1)
    through_t = (grad_lo - pull / tau).masked_fill(d.fixed, 0)
    (spread,) = row.share([(through_t / mass).masked_fill(dead, 0)])
    dx = u / tau_shared.unsqueeze(-1) + spread.unsqueeze(-1) * d.w * d.weight
    dtau = -u_moment / tau - through_t * (moment / mass).masked_fill(dead, 0)
    # −T τ/D: its second part is a ratio of densities, which may all underflow
    idle = (grad_lo == 0) | dead
    lean = torch.exp(torch.log(tau) - (torch.log(mass) + d.log_scale).masked_fill(idle, 0)).masked_fill(
        idle, 0
    )
    dbudget = (mean / mass).masked_fill(dead, 0) - (grad_lo * lean).masked_fill(idle, 0)
    if not cdf.full_support:
        shares = gap_parts(*ends[:2], *ends[3:5])
        sides = [
            part * side / n.masked_fill(n == 0, 1)
            for part, n, side in zip(shares, ends[1::3], ends[2::3], strict=True)
        ]
        dbudget = torch.where(dead & ~d.fixed, sides[0] + sides[1], dbudget)
    (price,) = row.share([dbudget])
    dcost = -price.unsqueeze(-1) * d.share
    if by_value:
        hi_safe, lo_safe = hi.masked_fill(d.fixed, 0), lo_shared.masked_fill(d.fixed, 0)
        dcost = dcost - (hi_safe + lo_safe).unsqueeze(-1) * dx
    dcost = dcost.masked_fill(x == -math.inf, 0)
    return dx.to(x.dtype), dcost.to(cost.dtype), dbudget, dtau


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
    """:func:`vjp` as an operator, for traces and where no second derivative is wanted."""
    F = cdfs.resolve(cdf, shape)
    dx, dcost, dbudget, dtau = vjp(grad, grad_lo, x, cost, hi, lo, tau, F, by, at_most, rows.of(group))
    return dx.contiguous(), dcost.contiguous(), dbudget.clone(), dtau.clone()
