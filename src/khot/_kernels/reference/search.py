"""The search for the root of a row: many points a pass, which rules propose from both ends of a bracket.

The equation is solved as P = Q, where P = Σ_below w F + max(over, 0), Q = Σ_above w (1 − F) + max(−over, 0),
and over = Σ_above w − B. In a gap, P and Q are tails of the entries next to it, and may underflow: both are
sums of exponentials relative to the greatest one, and the search looks at log P − log Q. There, over has to
be 0 exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.precision import greatest, large
from khot._kernels.reference.guard import guarded_pairs
from khot._kernels.reference.sample import Sample, keep, lanes, no_sample, sample_of
from khot._kernels.reference.survey import Problem, Scales, costs_of, cut, exact_sum, per, residual
from khot._kernels.reference.tiles import TILE, tiles, two_sum

__all__ = ["Point", "State", "search_pass"]

# ranks, among the sampled entries, next to the one at which the budget is spent
RANKS = (0, -1, 1, -2, 2, -3, 4, -5, 8, -9, 16, -17)

BY_LOGS, BY_LOGIT = 1, 2  # of the steps of a point, those that take log_ratio and logit for lines


class Point(NamedTuple):
    """Evaluations, of shape (*batch, K), or the ends of the bracket, of the batch shape."""

    hi: Tensor
    lo: Tensor
    over: Tensor
    miss: Tensor  # (P − Q), in units of the greater one of the two
    log_ratio: Tensor  # log P − log Q
    logit: Tensor  # logit(C/W) − logit(B/W)
    excess: Tensor  # P − Q
    slope: Tensor  # Σ w a f
    grain: Tensor  # so small a step from here changes no z by more than its rounding, 0 if unknown
    steps: Tensor  # (..., M): where the rules say that the root is, relative to this point


class State(NamedTuple):
    """Where the search stands."""

    left: Point
    right: Point
    sample: Sample
    fresh: Tensor  # the rows in which the search has evaluated no point yet
    best_hi: Tensor  # a guess, while the row is fresh
    best_lo: Tensor
    best: Tensor  # how far off the best point is; negative if it is the root


def search_pass(p: Problem, scales: Scales, state: State, running: Tensor) -> tuple[State, Tensor]:
    """One pass of the search."""
    left, right, fresh = state.left, state.right, state.fresh
    hi, lo, found = _trials(p, state)
    points, done, ends, sample = _evaluate(p, scales, hi, lo, left, right)
    left, right = _narrow(left, right, points)
    # the best point so far, or better the one from which the root is known
    size = (points.log_ratio if p.cdf.full_support else points.excess).abs()
    size = size.nan_to_num(math.inf).clamp(max=greatest(hi) / 4)
    size = torch.where(done, -1 / (1 + size), size)
    value, index = size.min(-1)
    better = running & (value < state.best)
    best_hi = torch.where(better, _pick(ends[0], index), state.best_hi)
    best_lo = torch.where(better, _pick(ends[1], index), state.best_lo)
    best = torch.where(better, value, state.best)
    # Where no point lies between the ends, or none at which a z differs, the root is known to the last digit.
    width = (right.hi - left.hi) + (right.lo - left.lo)
    grain = torch.minimum(left.grain, right.grain)
    settled = (width <= grain) & grain.isfinite()
    running = running & ~done.any(-1) & (found | fresh) & ~settled
    state = State(left, right, sample, torch.zeros_like(fresh), best_hi, best_lo, best)
    return state, running


def _pick(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _trials(p: Problem, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Points inside the bracket, (*batch, K) as hi and lo; and whether there are any besides its middle."""
    left, right = state.left, state.right
    width = (right.hi - left.hi) + (right.lo - left.lo)
    points = [
        (state.best_hi.where(state.fresh, math.nan).unsqueeze(-1), state.best_lo.unsqueeze(-1)),
        _shift(left, left.steps),
        _shift(right, right.steps),
        *_between(p, left, right, width),
        *_near(p, left, right, width),
        _alone(_pivots(left, right, state.sample)),
        _alone(_middle_of_sizes(left.hi, right.hi)),
    ]
    hi, lo = (torch.cat(parts, -1) for parts in zip(*points, strict=True))
    hi, lo, inside, middle = guarded_pairs(hi, lo, left[:2], right[:2])
    # Nothing is proposed from an end that was not evaluated. Where tau is far below the rounding error of
    # the scores, the root lies next to an entry, and steps from elsewhere end on that entry itself. That is
    # one end of the bracket if Newton's method came there, and steps from it are exact.
    fresh = state.fresh.unsqueeze(-1)
    ends = [
        [torch.where(fresh, part.unsqueeze(-1), mid) for part, mid in zip(end[:2], middle[:2], strict=True)]
        for end in (left, right)
    ]
    hi, lo = (torch.cat(parts, -1) for parts in zip((hi, lo), middle[:2], *ends, strict=True))
    return hi, lo, inside.any(-1) | middle[2]


def _alone(hi: Tensor) -> tuple[Tensor, Tensor]:
    hi = hi if hi.dim() > 1 else hi.unsqueeze(-1)
    return hi, torch.zeros_like(hi)


def _shift(point: Point, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The points at these distances, as hi and lo."""
    first, error = two_sum(point.hi.unsqueeze(-1), point.lo.unsqueeze(-1) + steps)
    return first, error


def _between(p: Problem, left: Point, right: Point, width: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Points from both ends together: secants and cubics, and for one end on a plateau of slow entries."""
    secants = []
    for l_value, r_value, rule in (
        (left.log_ratio, right.log_ratio, BY_LOGS),
        (left.logit, right.logit, BY_LOGIT),
    ):
        share = l_value / (l_value - r_value)
        # and the cubic through both ends, with their slopes, of the inverse function
        outer = right.steps[..., rule] + (3 - 2 * share) * width
        cubic = (1 - share).square() * left.steps[..., rule] + share.square() * outer
        secants += [_shift(left, v.unsqueeze(-1)) for v in (width * share, cubic)]
    jump = left.excess - right.excess
    off_right = -p.tau * jump / right.slope * torch.log(jump / left.excess)
    off_left = p.tau * jump / left.slope * torch.log(jump / -right.excess)
    return [*secants, _shift(right, off_right.unsqueeze(-1)), _shift(left, off_left.unsqueeze(-1))]


def _near(p: Problem, left: Point, right: Point, width: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Points near the ends, on a scale between tau and the width of the bracket, which tell if the root is
    near one of them."""
    step = (p.tau * (width / p.tau) ** 0.25).unsqueeze(-1)
    return [_shift(left, step), _shift(right, -step)]


def _pivots(left: Point, right: Point, sample: Sample) -> Tensor:
    """Levels of the sample around the one at which the budget is spent, (*batch, ranks)."""
    level, order = sample.level.nan_to_num(-math.inf).sort(-1, descending=True)
    inside = (level > left.hi.unsqueeze(-1)) & (level < right.hi.unsqueeze(-1))
    cost = sample.cost.gather(-1, order).where(inside, 0).cumsum(-1)
    # of the costs in the bracket, what is left of the budget at its right end
    part = (-right.over / (left.over - right.over)).clamp(0, 1).nan_to_num(0.5)
    target = part.unsqueeze(-1) * cost[..., -1:]
    first = (~inside & (level >= right.hi.unsqueeze(-1))).sum(-1, keepdim=True)
    rank = ((cost < target) & inside).sum(-1, keepdim=True) + first
    ranks = torch.cat([rank + offset for offset in RANKS], -1)
    return level.gather(-1, ranks.clamp(0, level.shape[-1] - 1))


def _middle_of_sizes(low: Tensor, high: Tensor) -> Tensor:
    """The middle of the bits of two numbers: it finds the size of the root in few steps."""
    integer = torch.int64 if low.dtype == torch.float64 else torch.int32

    def key(v: Tensor) -> Tensor:
        bits = v.abs().contiguous().view(integer)
        return bits.where(v >= 0, -bits)

    bits = (key(low) & key(high)) + ((key(low) ^ key(high)) >> 1)
    return bits.abs().view(low.dtype) * torch.sign(bits).to(low.dtype)


def _narrow(left: Point, right: Point, points: Point) -> tuple[Point, Point]:
    """The bracket after these evaluations: the last point with P > Q, and the first with P < Q."""
    offset = (points.hi - left.hi.unsqueeze(-1)) + (points.lo - left.lo.unsqueeze(-1))
    ends = []
    for end, value in (
        (left, offset.where(points.miss > 0, -math.inf)),
        (right, -offset.where(points.miss < 0, math.inf)),
    ):
        best, index = value.max(-1)
        known = best > -math.inf
        fields = []
        for new, old in zip(points, end, strict=True):
            if new is points.steps:
                picked = new.gather(
                    -2, index[..., None, None].expand(*index.shape, 1, new.shape[-1])
                ).squeeze(-2)
                fields.append(picked.where(known.unsqueeze(-1), old))
            else:
                fields.append(_pick(new, index).where(known, old))
        ends.append(Point(*fields))
    return ends[0], ends[1]


class _Sums(NamedTuple):
    """The sums over a row at a point."""

    slices: list[Tensor]  # of the costs above
    tops: list[Tensor]  # the logarithm of the greatest term of P, and of Q
    sides: list[list[Tensor]]  # for either: its tails, Σ w a f and Σ w a² |f'|, divided by that term
    steepest: Tensor  # log max a f
    nearest: list[Tensor]  # the greatest x below, and minus the least x above
    edges: _Edges | None  # for compact support


def _evaluate(
    p: Problem, scales: Scales, hi: Tensor, lo: Tensor, left: Point, right: Point
) -> tuple[Point, Tensor, tuple[Tensor, Tensor], Sample]:
    """What :func:`_conclude` returns, and a sample of the entries in the bracket."""
    F, full = p.cdf, p.cdf.full_support
    tau = p.tau.unsqueeze(-1)
    zero = torch.zeros_like(hi)
    slices = [zero, zero, zero]
    base = scales.log_base.unsqueeze(-1)
    tops = [zero - math.inf, zero - math.inf] if full else [zero + base, zero + base]
    # of each side: the tails, Σ w a f and Σ w a² |f'|, or f where that is more, relative to the top
    sums = [[zero, zero, zero], [zero, zero, zero]]
    steepest = zero - math.inf  # log max a f
    nearest = [zero - math.inf, zero - math.inf]
    edges = _Edges.none(zero)
    sample, keys = no_sample(p.tau), None
    start, end = F.support
    for part, tile in tiles(p.x, max(1, TILE // hi.shape[-1])):
        w, x, a = costs_of(p, part, tile)
        level = per(x - scales.quantile.unsqueeze(-1), a)
        there = (w > 0) & (level > left.hi.unsqueeze(-1)) & (level < right.hi.unsqueeze(-1))
        sample, keys = keep(sample, keys, level, w, there, part.start)
        pieces = [piece.unsqueeze(-2) for piece in cut(w, scales.slices)]
        w, x = w.unsqueeze(-2), x.unsqueeze(-2)
        a = torch.ones_like(w) if a is None else a.unsqueeze(-2)
        counts, log_w = w > 0, torch.log(w)
        log_a = log_w.where(counts, 0) if p.by_value else torch.zeros_like(log_w)
        at, more = hi.unsqueeze(-1), lo.unsqueeze(-1)
        distance = residual(x, a, at) - more * a if p.by_value else (x - at) - more
        z = (distance / tau.unsqueeze(-1)).clamp(-large(hi), large(hi))  # tails of 0 have a finite hazard
        above = z > F.median
        for i, piece in enumerate(pieces):
            slices[i] = slices[i] + piece.where(above & counts, 0).sum(-1)
        log_f = F.log_pdf(z)
        steepest = torch.maximum(steepest, (log_f + log_a).where(counts, -math.inf).amax(-1))
        tail = F.log_tail(z, above) + log_w
        sides = ~above & counts, above & counts
        for i, signed in enumerate((x, -x)):
            nearest[i] = torch.maximum(nearest[i], signed.where(sides[i], -math.inf).amax(-1))
        if full:
            for i, side in enumerate(sides):
                top = torch.maximum(tops[i], tail.where(side, -math.inf).amax(-1))
                rescale = torch.exp(tops[i] - top).nan_to_num(0)
                sums[i], tops[i] = [total * rescale for total in sums[i]], top
        below, over = (top.nan_to_num(neginf=0).unsqueeze(-1) for top in tops)
        scale = torch.where(above, over, below)
        # Far from the median f changes as fast as the tail, and under the normal CDF log f less the log of
        # the tail has no digits left there. So f is the tail times the hazard.
        hazard = torch.exp(F.log_hazard(-z.abs())) if full and F.symmetric else None
        density = torch.exp(log_f + log_w - scale) if hazard is None else torch.exp(tail - scale) * hazard
        if hazard is None:
            hazard = torch.exp(log_f + log_w - tail).nan_to_num(1) if full else torch.ones_like(z)
        tail, rate = torch.exp(tail - scale), density * a
        for i, side in enumerate(sides):
            for j, term in enumerate((tail, rate, rate * a * hazard.clamp(min=1))):
                sums[i][j] = sums[i][j] + term.where(side, 0).sum(-1)
        if not full:
            edges = edges.seen(distance, z, w, a, above, counts, tau, start, end)
    local = _Sums(slices, tops, sums, steepest, nearest, None if full else edges)
    whole, sample = _reduce(p, local, sample)
    return *_conclude(p, scales, hi, lo, whole), sample


# of which level, in the order of the fields, each slope or cost is
PAYLOADS = (0, 1, 2, 3, 2, 3)


class _Edges(NamedTuple):
    """For compact support, relative to the point: the interval in which no entry is undecided, and the
    entries that start to count next, on either side; all but the last as maxima, those above negated."""

    flat0: Tensor  # the greatest level below at which y = 0
    flat1: Tensor  # minus the least level above at which y = 1
    next0: Tensor  # as flat0, of those with y = 0
    next1: Tensor
    leave0: Tensor  # minus the least distance of an entry with 0 < y < 1 from where y = 0 ...
    leave1: Tensor  # ... and from where y = 1
    lightest: Tensor  # minus the least cost of an entry with 0 < y < 1
    a0: Tensor  # slopes and costs of flat0, flat1, next0, next1
    a1: Tensor
    next_a0: Tensor
    next_a1: Tensor
    next_w0: Tensor
    next_w1: Tensor

    @classmethod
    def none(cls, zero: Tensor) -> _Edges:
        return cls(*(zero - math.inf for _ in range(13)))

    def levels(self) -> list[Tensor]:
        return list(self[: -len(PAYLOADS)])

    def payloads(self, levels: Sequence[Tensor]) -> list[Tensor]:
        """The slopes and costs that belong to the levels of the row, or -inf."""
        mine = self[-len(PAYLOADS) :]
        return [v.where(self[i] == levels[i], -math.inf) for v, i in zip(mine, PAYLOADS, strict=True)]

    def least_cost(self) -> Tensor:
        """Of the entries that the next digits of t are about."""
        nexts = (v.where(v > 0, math.inf) for v in (self.next_w0, self.next_w1))
        return torch.minimum(-self.lightest, torch.minimum(*nexts))

    def seen(
        self,
        distance: Tensor,
        z: Tensor,
        w: Tensor,
        a: Tensor,
        above: Tensor,
        counts: Tensor,
        tau: Tensor,
        start: float,
        end: float,
    ) -> _Edges:
        tau = tau.unsqueeze(-1)
        to_zero, to_one = (distance - start * tau) / a, -((distance - end * tau) / a)
        below, above = ~above & counts, above & counts
        zeros, ones = counts & (z <= start), counts & (z >= end)
        moving = counts & ~zeros & ~ones
        values = [
            to_zero.where(below, -math.inf),
            to_one.where(above, -math.inf),
            to_zero.where(zeros, -math.inf),
            to_one.where(ones, -math.inf),
        ]
        leave = [v.where(moving, -math.inf) for v in (-to_zero, -to_one, -w)]
        firsts = [value.amax(-1) for value in values]
        new = [*firsts, *(value.amax(-1) for value in leave)]
        kept = [torch.maximum(u, v) for u, v in zip(self, new, strict=False)]
        payloads = []
        for j, i in enumerate(PAYLOADS):
            payload = w if j > 3 else a
            here = (
                payload.expand(values[i].shape)
                .where(values[i] == firsts[i].unsqueeze(-1), -math.inf)
                .amax(-1)
            )
            old = self[7 + j]
            newer, same = firsts[i] > self[i], firsts[i] == self[i]
            payloads.append(torch.where(newer, here, torch.where(same, torch.maximum(old, here), old)))
        return _Edges(*kept, *payloads)


def _reduce(p: Problem, sums: _Sums, sample: Sample) -> tuple[_Sums, Sample]:
    """The same over the row instead of a shard of it."""
    if p.row.here:
        return sums, sample
    edges = sums.edges
    levels = [] if edges is None else edges.levels()
    low, high, steepest, *levels = p.row.reduce([], [*sums.tops, sums.steepest, *sums.nearest, *levels])
    nearest, levels = levels[:2], levels[2:]
    sides = [
        [total * torch.exp(old - new).nan_to_num(0) for total in side]
        for side, old, new in zip(sums.sides, sums.tops, (low, high), strict=True)
    ]
    payloads = [] if edges is None else edges.payloads(levels)
    kept = lanes(p.row, sample)
    reduced = p.row.reduce([*sums.slices, *sides[0], *sides[1], *kept], payloads)
    sample = sample_of(*reduced[9:11])
    edges = None if edges is None else _Edges(*levels, *reduced[11:])
    sides = [reduced[3:6], reduced[6:9]]
    return _Sums(reduced[:3], [low, high], sides, steepest, nearest, edges), sample


def _conclude(
    p: Problem, scales: Scales, hi: Tensor, lo: Tensor, s: _Sums
) -> tuple[Point, Tensor, tuple[Tensor, Tensor]]:
    """Points from the sums over the row; whether the root is known from them, and where it then is."""
    over = exact_sum((s.slices[0], -p.budget.unsqueeze(-1).expand_as(hi), *s.slices[1:]))
    tops, sums, steepest = s.tops, s.sides, s.steepest
    eps = torch.finfo(hi.dtype).eps
    tau, total, rest, budget, log_base = (
        v.unsqueeze(-1) for v in (p.tau, p.survey.total, scales.rest, p.budget, scales.log_base)
    )
    logs = [torch.log(side[0]) + top for side, top in zip(sums, tops, strict=True)]
    log_more, log_less = torch.log(over.clamp(min=0)), torch.log((-over).clamp(min=0))
    log_P, log_Q = torch.logaddexp(logs[0], log_more), torch.logaddexp(logs[1], log_less)
    # both relative to the greater one
    scale = torch.maximum(log_P, log_Q).nan_to_num(neginf=0)
    P = torch.exp(logs[0] - scale) + torch.exp(log_more - scale)
    Q = torch.exp(logs[1] - scale) + torch.exp(log_less - scale)
    lower = sums[0][0] * torch.exp(tops[0] - scale).nan_to_num(0)
    upper = sums[1][0] * torch.exp(tops[1] - scale).nan_to_num(0)
    miss = (lower - upper) + over * torch.exp(-scale)
    miss = torch.where(miss.isfinite(), miss, P - Q)
    ratio = torch.where(miss.abs() < 0.5, torch.log1p(miss / Q), log_P - log_Q)
    ratio = ratio.masked_fill((log_P == -math.inf) & (log_Q == -math.inf), 0)
    slopes = [
        [side[j] * torch.exp(top - scale).nan_to_num(0) for side, top in zip(sums, tops, strict=True)]
        for j in (1, 2)
    ]
    slope, square = (sum(each) for each in slopes)
    plain = tau * miss / slope
    # of log P and log Q, which may lie on scales of their own
    rates = [
        (side[1] / (side[0] + torch.exp(log_whole - top))).nan_to_num(0, 0)
        for side, top, log_whole in zip(sums, tops, (log_more, log_less), strict=True)
    ]
    by_logs = tau * ratio / sum(rates)
    excess, absolute = miss * torch.exp(scale), slope * torch.exp(scale)
    spent = budget + excess
    small = excess.abs() < 0.1 * torch.minimum(budget, rest)
    logit = torch.where(
        small,
        torch.log1p(excess / budget) - torch.log1p(-excess / rest),
        torch.log(spent / (total - spent)) - torch.log(budget / rest),
    )
    by_logit = tau * logit * spent * (total - spent) / total / absolute
    # the logarithms of normal tails are squares
    deep = [torch.sqrt((log_base - v).clamp(min=1e-3)) for v in (log_P, log_Q)]
    by_roots = 2 * tau * (deep[1] - deep[0]) / (rates[0] / deep[0] + rates[1] / deep[1])
    steps = [plain, by_logs, by_logit, by_roots]
    shift = plain.abs() / tau
    change = torch.exp(steepest) * shift  # of any y, in a step
    bend = square / slope * shift  # of the slopes, relatively
    done = miss == 0
    digits = 4 * eps + 8 * eps * log_P.abs().clamp(max=large(hi))
    if s.edges is None:
        done, grain = done | (ratio.abs() <= digits), torch.zeros_like(hi)
        jump = (change * bend < eps / 4) & (bend < 1e-7)
        move = plain.where(jump & ~done, 0)
    else:
        more, gap, room = _edge_steps(p, s.edges, over, P, Q, miss, scale, slopes[0], tau)
        steps += more
        # f'/f is of the order of 1/z next to the edges of the support
        bend = torch.maximum(bend, 16 * plain.abs() / room)
        jump = ((change * bend < eps / 4) & (bend < 1e-7)) | ((plain.abs() < room) & (change < 8 * eps))
        grain = -s.edges.leave0 * (eps / 4)
        # without float64 a share has no more digits than that
        near = min(64 * eps, 5e-7)
        done = excess.abs() <= near * s.edges.least_cost()
        move = gap.where(gap.isfinite(), plain.where(jump & ~done, 0))
        done = done | gap.isfinite()
    ends = two_sum(hi, lo + move)
    if s.edges is None and p.cdf.symmetric and not p.by_value:
        # Deep in a gap, where logarithms of tails have few digits left, the middle is as good as this point,
        # and only there do the last digits of z leave the next entries on either side the same density.
        below, above = s.nearest[0], -s.nearest[1]
        middle = two_sum(0.5 * below, 0.5 * above)
        off = (middle[0] - ends[0]) + (middle[1] - ends[1])
        unknown = (off.abs() * sum(rates) <= tau * digits) | (log_P <= -large(hi))
        equal = done & (over == 0) & (digits > 64 * eps) & unknown
        ends = torch.where(equal, middle[0], ends[0]), torch.where(equal, middle[1], ends[1])
    points = Point(hi, lo, over, miss, ratio, logit, excess, absolute, grain, torch.stack(steps, -1))
    return points, done | jump, ends


def _edge_steps(
    p: Problem,
    edges: _Edges,
    over: Tensor,
    P: Tensor,
    Q: Tensor,
    miss: Tensor,
    scale: Tensor,
    slopes: list[Tensor],
    tau: Tensor,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """For compact support: steps; the step to the middle of the gap, where the point lies in one; and how far
    t may move before an entry starts or ceases to count."""
    start, end = p.cdf.support
    flat0, flat1, next0, next1 = edges.flat0, -edges.flat1, edges.next0, -edges.next1
    weight = edges.a0 + edges.a1
    gap = (edges.a1 / weight) * flat1 + (edges.a0 / weight) * flat0
    in_gap = (over == 0) & (flat0 <= flat1) & gap.isfinite()
    # the next entry that starts to count makes up for the miss alone
    short = miss.abs() * torch.exp(scale)
    tiny, one = torch.finfo(P.dtype).tiny, 1 - torch.finfo(P.dtype).eps / 2
    rise = p.cdf.icdf((short / edges.next_w0).clamp(tiny, one).nan_to_num(0.5))
    fall = p.cdf.icdf((1 - short / edges.next_w1).clamp(tiny, one).nan_to_num(0.5))
    up = next0 - tau * (rise - start) / edges.next_a0
    down = next1 + tau * (end - fall) / edges.next_a1
    alone = torch.where(miss > 0, down, up)
    # if one side alone moves, its tail is a power of the distance from the edge
    D0, D1 = flat0, -flat1
    law0 = -D0 * torch.expm1(torch.log(Q / P) * P * tau / (D0 * slopes[0]))
    law1 = D1 * torch.expm1(torch.log(P / Q) * Q * tau / (D1 * slopes[1]))
    law = torch.where(slopes[0] == 0, law1, law0)
    room = torch.stack((next1, -next0, -edges.leave0, -edges.leave1)).amin(0)
    return [alone, law], gap.where(in_gap, math.inf), room
