"""Newton's method for the root of a row, one point a pass.

Its sums are plain ones, which underflow far from the entries. Those of :mod:`.search` do not, since they are
relative to their greatest terms, but they take several times as long, so both are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from khot._kernels.reference.guard import guarded_pairs
from khot._kernels.reference.survey import Problem, Scales, costs_of, residual, times
from khot._kernels.reference.tiles import tiles, two_sum

__all__ = ["Walk", "walk_pass"]

# Newton's method goes on while a pass divides the miss by this: in the first passes, and later
SHRINK, SOON = (2.0, 8.0), 2
# log P − log Q, beyond which it is left at once: for normal tails, a pass divides such a miss by 4 only
FAR = 100.0


class Walk(NamedTuple):
    """Where Newton's method stands: at hi + lo, in a bracket."""

    hi: Tensor
    lo: Tensor
    left_hi: Tensor
    left_lo: Tensor
    left_over: Tensor
    right_hi: Tensor
    right_lo: Tensor
    right_over: Tensor
    before: Tensor  # |log P − log Q| of the last evaluation
    passes: Tensor  # how many there were
    found: Tensor  # whether t is the root


def walk_pass(p: Problem, scales: Scales, at: Walk, running: Tensor) -> tuple[Walk, Tensor]:
    """One pass of Newton's method."""
    s = _tails(p, at.hi, at.lo)
    eps, tau, full = torch.finfo(p.tau.dtype).eps, p.tau, p.cdf.full_support
    budget, rest = p.budget, scales.rest
    over = s.paid - budget
    P, Q = s.below + over.clamp(min=0), s.above + (-over).clamp(min=0)
    miss, slope = (s.below - s.above) + over, s.slope_above + s.slope_below
    plain = tau * miss / slope
    ratio = torch.log(P / Q)
    rate_below, rate_above = s.slope_below / P, s.slope_above / Q
    by_logs = tau * ratio / (rate_below + rate_above)
    spent, spare = budget + miss, rest - miss
    by_logit = plain * (torch.log(spent / spare) - torch.log(budget / rest)) * spent * spare
    by_logit = by_logit / (p.survey.total * miss)
    few = (p.survey.dearest > P) & (p.survey.dearest > Q)
    near = miss.abs() <= 1e-4 * torch.minimum(budget, rest)
    step = torch.where(near, plain, by_logit)
    step = torch.where(few & ~near, by_logs, step) if full else torch.where(few, plain, step)

    # these sums of costs are rounded, so that a small miss does not tell the side
    told = running if p.cost is None else running & (miss.abs() > 64 * eps * p.survey.total)
    left, right = told & (miss > 0), told & (miss < 0)
    ends = [
        torch.where(side, new, old)
        for side, news, olds in (
            (left, (at.hi, at.lo, over), at[2:5]),
            (right, (at.hi, at.lo, over), at[5:8]),
        )
        for new, old in zip(news, olds, strict=True)
    ]
    hi, lo = two_sum(at.hi, at.lo + step)
    hi, lo, _, (*_, apart) = guarded_pairs(hi.unsqueeze(-1), lo.unsqueeze(-1), ends[:2], ends[3:5])

    shift = plain.abs() / tau
    change = s.steepest * shift  # of any y, in a step
    if full:
        # of the slopes, relatively: far from the median a density changes as fast as the tail
        per_unit = s.square / slope if p.by_value else torch.maximum(rate_below, rate_above).clamp(min=1)
        bend = per_unit * shift
        found = (change * bend < eps / 4) & (bend < 1e-7)
    else:  # the density may jump; and a tiny share needs digits of its own
        found = (change < 8 * eps) & (torch.minimum(budget, rest) > 1e-6 * p.survey.dearest)
    if p.cost is not None:  # where few entries move, the sums have to be exact
        found = found & (slope > 1e-4 * s.steepest * p.survey.total)
    last = two_sum(at.hi, at.lo + plain)
    hi, lo = (torch.where(found, end, new.squeeze(-1)) for end, new in zip(last, (hi, lo), strict=True))
    hi, lo = torch.where(running, hi, at.hi), torch.where(running, lo, at.lo)
    slow = ~(ratio.abs() * torch.where(at.passes < SOON, *SHRINK) <= at.before) | (ratio.abs() > FAR)
    bracket = dict(zip(Walk._fields[2:8], ends, strict=True))
    moved = at._replace(
        hi=hi, lo=lo, **bracket, before=ratio.abs(), passes=at.passes + running,
        found=at.found | (running & found),
    )  # fmt: skip
    return moved, told & ~found & ~slow & apart & step.isfinite()


class _Tails(NamedTuple):
    """The sums over a row at one point: above and below t, where Σ w F is Σ_above w − above + below."""

    paid: Tensor  # Σ_above w
    above: Tensor  # Σ_above w (1 − F)
    below: Tensor  # Σ_below w F
    slope_above: Tensor  # Σ_above w a f
    slope_below: Tensor
    square: Tensor  # Σ w a² |f'|, or f where that is more
    steepest: Tensor  # max a f


def _tails(p: Problem, hi: Tensor, lo: Tensor) -> _Tails:
    F = p.cdf
    zero = torch.zeros_like(hi)
    paid, above_sum, below_sum, slope_above, slope_below, square, steepest = [zero] * 7
    for part, tile in tiles(p.x):
        w, x, a = costs_of(p, part, tile)
        if a is None:
            z = ((x - hi.unsqueeze(-1)) - lo.unsqueeze(-1)) / p.tau.unsqueeze(-1)
        else:
            z = (residual(x, a, hi.unsqueeze(-1)) - lo.unsqueeze(-1) * a) / p.tau.unsqueeze(-1)
        above = z > F.median
        over = w * above
        tail, density = F.tail(z, above), F.pdf(z)
        rate = times(density, a)
        slope = w * rate
        tail_above, slope_over = tail * over, rate * over
        paid = paid + over.sum(-1)
        above_sum, below_sum = above_sum + tail_above.sum(-1), below_sum + (w * tail - tail_above).sum(-1)
        slope_above, slope_below = (
            slope_above + slope_over.sum(-1),
            slope_below + (slope - slope_over).sum(-1),
        )
        if a is not None:
            hazard = (density / tail).nan_to_num(1).clamp(min=1)
            square = square + torch.where(slope > 0, slope * a * hazard, 0).sum(-1)
        steepest = torch.maximum(steepest, rate.where(w > 0, 0).amax(-1))
    sums = [paid, above_sum, below_sum, slope_above, slope_below, square]
    return _Tails(*p.row.reduce(sums, [steepest]))
