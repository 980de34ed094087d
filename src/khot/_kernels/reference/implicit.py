"""The derivatives of a threshold t with Σ_i w_i F((x_i − t a_i)/τ) = B, and of the output at (x − t a)/τ.

One body serves the soft top-k, where there are no costs (w = a = 1 and B = k), and the soft budget, where
a_i = 1 if the selection is by score, and a_i = w_i if it is by value. It is written in torch operations on
x, w, t = hi + lo and τ: autograd records them if a derivative of these derivatives is wanted, and otherwise
they are the backward kernels. Only sums and maxima over a row are exchanged, so rows may be spread.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.precision import greatest, large, on
from khot._core.rows import Row
from khot._kernels.reference.survey import residual
from khot.cdfs import CDF

__all__ = ["Solved", "Weighed", "jvp", "unbound", "vjp", "weigh"]


class Solved(NamedTuple):
    """A solved row: its arguments and its threshold."""

    x: Tensor  # (*batch, n)
    cost: Tensor | None  # broadcasts with x; None if every entry costs 1
    hi: Tensor  # of the batch shape, as all of the rest
    lo: Tensor
    tau: Tensor
    cdf: CDF
    output: str  # "y" for F, "log" for log F, "threshold" for t alone
    by_value: bool
    at_most: bool  # whether the budget may be left unspent
    row: Row


class Weighed(NamedTuple):
    """What both modes of the derivative need, as differentiable functions of x, w, lo and τ."""

    z: Tensor
    a: Tensor | None  # None if it is 1, as for w
    w: Tensor | None
    rate: Tensor  # ∂out/∂z
    share: Tensor | None  # F, if there are costs
    weight: Tensor  # f, divided by a scale
    log_scale: Tensor  # of the batch shape
    log_rise: Tensor | None  # the logarithm of ∂out/∂B times Σ w a weight; None if that is a·weight
    fixed: Tensor  # the rows in which t does not depend on anything
    edges: tuple[Tensor, ...]  # of compact support: the entries next to a gap, above and below it


def unbound(hi: Tensor, lo: Tensor, at_most: bool) -> Tensor:
    """The rows whose budget does not bind, of which t does not depend on anything."""
    fixed = hi.abs() == greatest(hi)
    return fixed | ((hi == 0) & (lo == 0)) if at_most else fixed


def weigh(s: Solved) -> Weighed:
    """Densities relative to a scale near their maximum, so that ratios are right even where every f
    underflows."""
    x, hi, cdf = s.x, s.hi, s.cdf
    fixed = unbound(hi, s.lo, s.at_most)
    infinite = (hi.abs() == greatest(hi)).unsqueeze(-1)
    w = None if s.cost is None else s.cost.to(hi.dtype).masked_fill(x == -math.inf, 0)
    a = w if s.by_value else None
    held = infinite if a is None else infinite & (a > 0)  # entries that an infinite t decides
    decided = x.isinf() | held  # kept out of products such as 0·inf
    tau = s.tau.unsqueeze(-1)
    hi_safe, lo_safe = (v.unsqueeze(-1).masked_fill(infinite, 0) for v in (hi, s.lo))
    wide = x.to(hi.dtype).masked_fill(decided, 0)
    distance = (wide - hi_safe) - lo_safe if a is None else residual(wide, a, hi_safe) - lo_safe * a
    # a quotient that overflows would be 0·inf in the moments below
    z = (distance / tau).masked_fill(decided, 0).clamp(-large(hi), large(hi))
    log_f = cdf.log_pdf(z).masked_fill(decided, -math.inf)
    still = log_f == -math.inf
    counts = ~still if w is None else (w.detach() > 0) & ~still
    scale = log_f.detach().masked_fill(~counts, -math.inf).amax(-1) if x.shape[-1] else _none(hi)
    sides = None if cdf.full_support else _sides(s, wide.detach(), z.detach(), w, a, decided)
    scale, *nearest = s.row.reduce([], [scale] if sides is None else [scale, *sides.nearest])
    scale = scale.clamp(min=-large(hi))
    log_weight = (log_f - scale.unsqueeze(-1)).masked_fill(still, 0)
    if w is not None:  # free entries have no part in the scale
        log_weight = log_weight.clamp(max=math.log(large(hi)))
    weight = torch.exp(log_weight).masked_fill(still, 0)
    share = None
    if w is not None:
        chosen = (x == math.inf) | (held & (hi.unsqueeze(-1) < 0) & (x != -math.inf))
        share = torch.where(decided, chosen.to(z.dtype), cdf.cdf(z))
    log_rise = None
    if s.output == "log":
        at_rest = still | (cdf.log_cdf(z.detach()) == -math.inf)
        # f/F through logarithms: F may underflow where f/F does not
        log_rate = cdf.log_hazard(z.masked_fill(at_rest, cdf.median)).masked_fill(at_rest, 0)
        rate = torch.exp(log_rate).masked_fill(at_rest, 0)
        log_rise = (log_rate - scale.unsqueeze(-1)).masked_fill(at_rest, -math.inf)
    else:
        rate = torch.exp(log_f.masked_fill(still, 0)).masked_fill(still, 0)
    edges = () if sides is None else sides.edges(nearest)
    return Weighed(z, a, w, rate, share, weight, scale, log_rise, fixed, edges)


def _none(hi: Tensor) -> Tensor:
    """The maximum over no entries."""
    return torch.full_like(hi, -math.inf)


class _Sides(NamedTuple):
    """For compact support: the payable entries above t and below it, by the level at which they move."""

    above: Tensor
    below: Tensor
    up_level: Tensor
    down_level: Tensor
    nearest: list[Tensor]  # minus the least level above, and the greatest below

    def edges(self, nearest: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The entries that would move first if t rose, or fell, into them: equal ones together."""
        up, down = -nearest[0].unsqueeze(-1), nearest[1].unsqueeze(-1)
        return self.above & (self.up_level == up), self.below & (self.down_level == down)


def _sides(s: Solved, x: Tensor, z: Tensor, w: Tensor | None, a: Tensor | None, decided: Tensor) -> _Sides:
    above = z > s.cdf.median
    payable = ~decided if w is None else (w.detach() > 0) & ~decided
    above, below = above & payable, ~above & payable
    up_level = down_level = x  # where all slopes are 1, the support does not matter
    if a is not None:
        start, end = s.cdf.support
        slope, tau = a.detach().masked_fill(a.detach() == 0, 1), s.tau.detach().unsqueeze(-1)
        up_level, down_level = (x - end * tau) / slope, (x - start * tau) / slope
    nearest = [_none(s.hi), _none(s.hi)]
    if x.shape[-1]:
        nearest = [
            (-up_level).masked_fill(~above, -math.inf).amax(-1),
            down_level.masked_fill(~below, -math.inf).amax(-1),
        ]
    return _Sides(above, below, up_level, down_level, nearest)


class _Gap(NamedTuple):
    """A gap of compact support, in which no entry has f > 0: the sums over the entries next to it.

    There t = (x_u − τ·end + x_d − τ·start)/(a_u + a_d) for the entries u above and d below, which is the
    limit of smooth CDFs. Where rounding has left no entry on one side, the other side decides alone.
    """

    parts: tuple[Tensor, Tensor]  # how much of a change each side gets: a_u/(a_u + a_d) and a_d/(a_u + a_d)
    paid: tuple[Tensor, Tensor]  # Σ w a over each side; 1 where it has none
    slope: Tensor  # −dt/dτ


def _gap_of(cdf: CDF, counts: list[Tensor]) -> _Gap:
    """From Σ w and Σ w a over the side above and the side below."""
    costs, pays = counts[::2], counts[1::2]
    slopes = [pay / cost.masked_fill(cost == 0, 1) for cost, pay in zip(costs, pays, strict=True)]
    both = (slopes[0] + slopes[1]).masked_fill(slopes[0] + slopes[1] == 0, 1)
    parts = slopes[0] / both, slopes[1] / both
    paid = [pay.masked_fill(pay == 0, 1) for pay in pays]
    start, end = cdf.support
    slope = parts[0] * end * costs[0] / paid[0] + parts[1] * start * costs[1] / paid[1]
    return _Gap(parts, (paid[0], paid[1]), slope)


def _times(*factors: Tensor | None) -> Tensor:
    """The product, without the factors that are 1."""
    product: Tensor | None = None
    for factor in factors:
        if factor is not None:
            product = factor if product is None else product * factor
    assert product is not None
    return product


def _ends(d: Weighed) -> list[Tensor]:
    """Of each side of a gap, the entries' w and w a."""
    kept = []
    for edge in d.edges:
        w = edge.to(d.z.dtype) if d.w is None else d.w.where(edge, 0)
        kept += [w, _times(w, d.a)]
    return kept


def _rise(d: Weighed, factor: Tensor) -> Tensor:
    """∂out/∂B times Σ w a weight, for a product with the factor: 0 where it overflows but the factor is 0."""
    if d.log_rise is None:
        return _times(d.a, d.weight)
    idle = (factor == 0) & (d.log_rise > math.log(greatest(d.log_rise)))
    return _times(d.a, torch.exp(d.log_rise.masked_fill(idle, -math.inf)))


def _times_dt_dB(value: Tensor, tau: Tensor, mass: Tensor, dead: Tensor, log_scale: Tensor) -> Tensor:
    """value·τ/Σ w a f; 0 where value is 0, even if the sum underflows, and in a gap, at which t jumps."""
    idle = (value == 0) | dead
    rate = torch.exp(torch.log(tau) - (torch.log(mass) + log_scale).masked_fill(idle, 0))
    return (value * rate).masked_fill(idle, 0)


def vjp(grad: Tensor, grad_lo: Tensor, s: Solved) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The gradients in x, w, B and τ (the last two of the batch shape).

    With g = ∂out/∂z, u = grad·g, D = Σ w a f and T = grad_lo − Σ u a/τ, which is the gradient in t:

        dL/dx = u/τ + T w f/D           dL/dB = Σ grad g a/D − grad_lo τ/D
        dL/dτ = −Σ u z/τ − T Σ w f z/D  dL/dw = −(dL/dB) F, and − t dL/dx if t is multiplied by w

    In a gap of compact support, dL/dB is Σ a grad/Σ w a over the entries next to the gap on either side,
    weighted as :class:`_Gap` says. For log y, the side below is left out, because rejected entries have
    log y = −inf. The gradient in t goes to these entries, too, but only without costs: t is no result of a
    budget, and in a gap the shares do not depend on it.
    """
    hi = s.hi
    tau = on(hi.device, s.tau).to(hi.dtype).expand(hi.shape)
    lo_shared, tau_shared = s.row.share([s.lo, tau])
    s = s._replace(lo=lo_shared, tau=tau_shared)
    d = weigh(s)
    v = torch.zeros_like(d.z) if s.output == "threshold" else grad.to(hi.dtype)
    if s.output == "log":  # log y is −inf and at rest there, whatever gradient arrives
        v = v.masked_fill((s.x == -math.inf) | (s.cdf.log_cdf(d.z.detach()) == -math.inf), 0)
    u = v * d.rate
    mass_weight = _times(d.w, d.weight)
    ends = _ends(d)
    sums = [_times(mass_weight, d.a), v * _rise(d, v), _times(u, d.a), u * d.z, mass_weight * d.z, *ends]
    sums += [_times(d.a, v).where(edge, 0) for edge in d.edges]
    totals = s.row.total([part.sum(-1) for part in sums])
    mass, mean, pull, u_moment, moment = totals[:5]
    dead = (mass == 0) | d.fixed
    mass = mass.masked_fill(dead, 1)
    through_t = (grad_lo - pull / tau).masked_fill(d.fixed, 0)
    (spread,) = s.row.share([(through_t / mass).masked_fill(dead, 0)])
    dx = u / tau_shared.unsqueeze(-1) + spread.unsqueeze(-1) * mass_weight
    dtau = -u_moment / tau - through_t * (moment / mass).masked_fill(dead, 0)
    dB = (mean / mass).masked_fill(dead, 0)
    if d.edges:
        gap, flat = _gap_of(s.cdf, totals[5:9]), dead & ~d.fixed
        rises = [p * each / n for p, n, each in zip(gap.parts, gap.paid, totals[9:], strict=True)]
        dB = torch.where(flat, rises[0] if s.output == "log" else rises[0] + rises[1], dB)
        if d.w is None:
            lean = grad_lo.masked_fill(~flat, 0)
            dtau = torch.where(flat, -gap.slope * lean, dtau)
            # equal entries share it equally
            shares = s.row.share([p * lean / n for p, n in zip(gap.parts, gap.paid, strict=True)])
            for edge, part in zip(d.edges, shares, strict=True):
                dx = torch.where(edge & flat.unsqueeze(-1), part.unsqueeze(-1), dx)
    dB = dB - _times_dt_dB(grad_lo, tau, mass, dead, d.log_scale)
    if s.cost is None or d.share is None:
        return dx.to(s.x.dtype), None, dB, dtau
    (price,) = s.row.share([dB])
    dcost = -price.unsqueeze(-1) * d.share
    if s.by_value:
        t = hi.masked_fill(d.fixed, 0) + lo_shared.masked_fill(d.fixed, 0)
        dcost = dcost - t.unsqueeze(-1) * dx
    dcost = dcost.masked_fill(s.x == -math.inf, 0)
    return dx.to(s.x.dtype), dcost.to(s.cost.dtype), dB, dtau


def jvp(
    dx: Tensor | None, dcost: Tensor | None, dB: Tensor | None, dtau: Tensor | None, s: Solved
) -> tuple[Tensor, Tensor]:
    """The tangents of the output and of lo."""
    hi = s.hi
    tau = on(hi.device, s.tau).to(hi.dtype).expand(hi.shape)
    s = s._replace(tau=tau)
    d = weigh(s)
    dx = torch.zeros_like(d.z) if dx is None else dx.to(hi.dtype).masked_fill(s.x.isinf(), 0)
    dB, dtau = (torch.zeros_like(hi) if v is None else v.to(hi.dtype).expand(hi.shape) for v in (dB, dtau))
    along = dx - d.z * dtau.unsqueeze(-1)  # τ dz at a fixed t
    paid = []
    if d.share is not None and dcost is not None:
        dcost = dcost.to(hi.dtype).masked_fill(s.x == -math.inf, 0)
        paid = [d.share * dcost]
        if s.by_value:
            t = hi.masked_fill(d.fixed, 0) + s.lo.masked_fill(d.fixed, 0)
            dx = dx - t.unsqueeze(-1) * dcost
            along = along - t.unsqueeze(-1) * dcost
    mass_weight = _times(d.w, d.weight)
    ends = _ends(d)
    moves = [dx.where(edge, 0) for edge in d.edges] if d.w is None else []
    sums = [_times(mass_weight, d.a), mass_weight * along, *ends, *moves, *paid]
    totals = s.row.total([part.sum(-1) for part in sums])
    mass, shift = totals[:2]
    left = dB - totals[-1] if paid else dB  # what is left for the change of the shares
    left = left.masked_fill(d.fixed, 0)
    dead = (mass == 0) | d.fixed
    mass = mass.masked_fill(dead, 1)
    dlo = (shift / mass).masked_fill(dead, 0)
    out = d.rate * (along - _times(d.a, dlo.unsqueeze(-1))) / tau.unsqueeze(-1)
    spend = (left / mass).masked_fill(dead, 0).unsqueeze(-1)
    rise = _rise(d, spend) * spend
    if d.edges:
        gap, flat = _gap_of(s.cdf, totals[2:6]), dead & ~d.fixed
        for i, edge in enumerate(d.edges[: 1 if s.output == "log" else 2]):
            part = (gap.parts[i] * left / gap.paid[i]).unsqueeze(-1)
            rise = torch.where(flat.unsqueeze(-1) & edge, _times(d.a, part), rise)
        if moves:
            moved = [p * each / n for p, n, each in zip(gap.parts, gap.paid, totals[6:8], strict=True)]
            dlo = torch.where(flat, moved[0] + moved[1] - gap.slope * dtau, dlo)
    dlo = dlo - _times_dt_dB(left, tau, mass, dead, d.log_scale)
    result = out + rise
    return (result[..., :0] if s.output == "threshold" else result).to(s.x.dtype), dlo
