"""The weighted root: the threshold t of each row with Σ_i w_i F((x_i − t a_i)/τ) = B, where a is 1 or w.

Plain torch, any device, batched over rows, in float64 (`precision.wide_dtype`). A pass reads each row once,
in tiles, and evaluates it at several points at the same time; only sums and maxima over the row leave a pass,
so that rows may be spread over processes. The first pass brackets the root, and each of the next ones
evaluates points that several rules propose from both ends of the bracket. A point is taken only if it lies
inside the bracket, so that a rule may fail but never mislead; and the middle is always among them.

The equation is solved as P = Q, where P = Σ_below w F + max(over, 0), Q = Σ_above w (1 − F) + max(−over, 0),
and over = Σ_above w − B. In a gap, P and Q are tails of the entries next to it, and may underflow: both are
sums of exponentials relative to the greatest one, and the search looks at log P − log Q. There, over has to
be 0 exactly: costs are cut into slices of so few digits that their sums are exact in any order.

The threshold is a pair t = hi + lo, and x − hi·a is computed with one rounding, so that z has full accuracy
for the entries near t however large x/τ is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._core.precision import greatest, large, widen
from khot._core.rows import Row
from khot._kernels.reference.tiles import TILE, some, tiles, two_sum
from khot.cdfs import CDF

__all__ = ["Costs", "Problem", "add_costs", "all_costs", "residual", "root"]

PASSES = 24
# Rows whose bracket is at most this wide, in τ, are first evaluated at so many single points: Newton's method
# is right for most of them, and the other rules cost twenty times as much.
WIDE, SINGLE = 64.0, 4
RULES, COMPACT_RULES = (2, 1, 0), (0, 2, 4)  # of the steps of a point, which to take for a single one
LANES = 256  # entries of a row that a pass keeps, from which the next pass chooses points
# ranks, among these entries, next to the one at which the budget is spent
RANKS = (0, -1, 1, -2, 2, -3, 4, -5, 8, -9, 16, -17)


class Costs(NamedTuple):
    """What the entries of finite x and positive cost have in common, of the batch shape."""

    entries: Tensor  # how many
    dearest: Tensor
    total: Tensor  # the sum of the costs, with the next digits of it in:
    digits: Tensor


class Problem(NamedTuple):
    x: Tensor  # (*batch, n); only finite entries take part
    cost: Tensor  # (*batch, n)
    costs: Costs
    budget: Tensor  # 0 < B < the sum of the costs
    tau: Tensor
    cdf: CDF
    by_value: bool
    row: Row


class _Scales(NamedTuple):
    """What the first pass finds, and all others need."""

    slices: tuple[Tensor, Tensor]  # numbers whose addition cuts a cost to the digits of a slice
    log_base: Tensor  # the logarithm of the greatest cost
    rest: Tensor  # the sum of the costs less B
    quantile: Tensor  # τ F⁻¹(B/W)


class _Point(NamedTuple):
    """Evaluations, of shape (*batch, K), or the ends of the bracket, of the batch shape."""

    hi: Tensor
    lo: Tensor
    over: Tensor
    miss: Tensor  # (P − Q), in units of the greater one of the two
    log_ratio: Tensor  # log P − log Q
    logit: Tensor  # logit(C/W) − logit(B/W)
    excess: Tensor  # P − Q
    slope: Tensor  # Σ w a f
    steps: Tensor  # (..., M): where the rules say that the root is, relative to this point


class _State(NamedTuple):
    """Where the search stands."""

    left: _Point
    right: _Point
    sample: _Sample
    guess: Tensor
    fresh: Tensor  # the rows that were not evaluated yet
    best_hi: Tensor
    best_lo: Tensor
    best: Tensor  # how far off the best point is; negative if it is the root


class _Sums(NamedTuple):
    """The sums over a row at a point."""

    slices: list[Tensor]  # of the costs above
    tops: list[Tensor]  # the logarithm of the greatest term of P, and of Q
    sides: list[list[Tensor]]  # for either: its tails, Σ w a f and Σ w a² f, divided by that term
    steepest: Tensor  # log max a f
    edges: _Edges | None  # for compact support


class _Sample(NamedTuple):
    """Some entries of each row: where each of them alone would have the share B/W, and their costs."""

    level: Tensor  # (*batch, LANES); NaN where there is none
    cost: Tensor


def residual(x: Tensor, a: Tensor, hi: Tensor) -> Tensor:
    """x − hi·a with one rounding; its derivatives are those of x − hi·a."""
    product = hi * a
    return (x - product) - _product_error(hi.detach(), a.detach(), product.detach())


def _product_error(u: Tensor, v: Tensor, product: Tensor) -> Tensor:
    """u·v − product, exactly (Dekker); 0 where the halves would overflow."""
    (u1, u2), (v1, v2) = _halves(u), _halves(v)
    error = ((u1 * v1 - product) + u1 * v2 + u2 * v1) + u2 * v2
    return error.nan_to_num(0, 0, 0)


def _halves(v: Tensor) -> tuple[Tensor, Tensor]:
    c = v * (2.0**27 + 1 if v.dtype == torch.float64 else 2.0**12 + 1)
    high = c - (c - v)
    return high, v - high


def root(p: Problem, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """t = hi + lo where ``live``, and the number of passes over each row; all of the batch shape.

    Other rows may hold anything but have to have a positive budget, less than their costs.
    """
    batch, rows, n = p.tau.shape, p.tau.numel(), p.x.shape[-1]
    flat = [v.reshape(-1) for v in (*p.costs, p.budget, p.tau, live)]
    costs, (budget, tau, live) = Costs(*flat[:4]), flat[4:]
    p = Problem(p.x.reshape(rows, n), p.cost.reshape(rows, n), costs, budget, tau, *p[5:])
    scales = _scales(p)
    low, high, guess, sample = _first_pass(p, scales)
    zero, infinite = torch.zeros_like(low), torch.full_like(low, math.inf)
    unknown = torch.full_like(low, math.nan)
    no_steps = low.new_full((*low.shape, 4 if p.cdf.full_support else 6), math.nan)
    left = _Point(low, zero, scales.rest, zero + 1, infinite, unknown, unknown, unknown, no_steps)
    right = _Point(high, zero, -p.budget, zero - 1, -infinite, unknown, unknown, unknown, no_steps)
    state = _State(left, right, sample, guess, torch.ones_like(live), guess, zero, infinite)

    passes = zero + 1
    reach = (p.costs.dearest if p.by_value else 1) * (high - low)
    ordinary = live & (reach <= WIDE * p.tau)
    running = ordinary
    for single in (True, False):
        if not single:
            running = live & (~ordinary | running)
        for _ in range(SINGLE if single else PASSES):
            if not some(running, p.row):
                break
            passes = passes + running
            state, running = _on_some(p, scales, state, running, single)
    return state.best_hi.view(batch), state.best_lo.view(batch), passes.view(batch)


def _on_some(
    p: Problem, scales: _Scales, state: _State, running: Tensor, single: bool
) -> tuple[_State, Tensor]:
    """One pass over the rows that are running."""
    if not p.x.is_cpu or 2 * int(running.sum()) > len(running):
        return _step(p, scales, state, running, single)
    rows = running.nonzero().squeeze(-1)
    part = _rows(p, rows), _rows(scales, rows), _rows(state, rows)
    moved, still = _step(*part, running[rows], single)
    return _put(state, rows, moved), running.index_put((rows,), still)


def _rows(value: Any, rows: Tensor) -> Any:
    """These rows of all tensors in it."""
    if isinstance(value, Tensor):
        return value[rows]
    if not isinstance(value, tuple):
        return value
    parts = [_rows(v, rows) for v in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _put(value: Any, rows: Tensor, part: Any) -> Any:
    """The value with these rows replaced."""
    if isinstance(value, Tensor):
        return value.index_put((rows,), part)
    return type(value)(*(_put(old, rows, new) for old, new in zip(value, part, strict=True)))


def _step(p: Problem, scales: _Scales, state: _State, running: Tensor, single: bool) -> tuple[_State, Tensor]:
    """One pass, at one point or at many."""
    left, right, fresh = state.left, state.right, state.fresh
    hi, lo, found = _trials(p, state, single)
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
    # where no point lies between the ends, the root is known to the last digit
    running = running & ~done.any(-1) & (found | fresh)
    state = _State(left, right, sample, state.guess, torch.zeros_like(fresh), best_hi, best_lo, best)
    return state, running


def _pick(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _costs(p: Problem, part: slice, tile: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The costs of the entries that take part (0 for the others), x and a there."""
    w = widen(p.cost[..., part])
    counts = (w > 0) & tile.isfinite()
    w = w.where(counts, 0)
    return w, tile.where(counts, 0), w.where(counts, 1) if p.by_value else torch.ones_like(w)


# --------------------------------------------------------------------------------------------- first pass


def _scales(p: Problem) -> _Scales:
    rest = _sum((p.costs.total, -p.budget, p.costs.digits))
    quantile = p.tau * _quantile(p.cdf, p.budget, rest)
    return _Scales(_slices(p.costs.entries, p.costs.dearest), torch.log(p.costs.dearest), rest, quantile)


def _first_pass(p: Problem, scales: _Scales) -> tuple[Tensor, Tensor, Tensor, _Sample]:
    """Bounds of the root, a guess, and a sample of the entries."""
    zero, quantile = torch.zeros_like(p.tau), scales.quantile
    eps = torch.finfo(p.tau.dtype).eps
    low, high, mean, square, ones = zero + math.inf, zero - math.inf, zero, zero, zero
    sample = _no_sample(zero)
    keys = None
    for part, tile in tiles(p.x):
        w, x, a = _costs(p, part, tile)
        counts = w > 0
        level = (x - quantile.unsqueeze(-1)) / a
        pad = (x.abs() + (quantile.abs() + 2 * p.tau).unsqueeze(-1)) * (18 * eps) / a
        low = torch.minimum(low, (level - pad).where(counts, math.inf).amin(-1))
        high = torch.maximum(high, (level + pad).where(counts, -math.inf).amax(-1))
        weight, score = w / p.costs.total.unsqueeze(-1), x / a
        mean, square = mean + (weight * score).sum(-1), square + (weight * score * score).sum(-1)
        ones = ones + (weight / a).sum(-1)
        sample, keys = _keep(sample, keys, level, w, counts, part.start)
    if p.row.here:
        low = -low
    else:
        lanes = _lanes(p.row, sample)
        mean, square, ones, *lanes, low, high = p.row.reduce([mean, square, ones, *lanes], [-low, high])
        sample = _sample_of(*lanes)
    far = greatest(low) / 4
    low, high = (-low).clamp(-far, far), high.clamp(-far, far)
    noise = p.tau.square() * p.cdf.variance * ones
    spread = torch.sqrt((square - mean * mean).clamp(min=0) + noise)
    unit = (quantile / p.tau - p.cdf.mean) / math.sqrt(p.cdf.variance)
    guess = (mean - p.tau * p.cdf.mean * ones - unit * spread).nan_to_num(0, 0, 0)
    return low, high, torch.maximum(torch.minimum(guess, high), low), sample


def _cut(w: Tensor, slices: tuple[Tensor, Tensor]) -> list[Tensor]:
    """w as a sum of two slices and a rest."""
    pieces, left = [], w
    for scale in slices:
        scale = scale.unsqueeze(-1)
        piece = ((scale + left) - scale).where(scale.isfinite(), left)
        pieces.append(piece)
        left = left - piece
    return [*pieces, left]


def _slices(count: Tensor, dearest: Tensor) -> tuple[Tensor, Tensor]:
    digits = torch.ceil(torch.log2(count + 2))
    first = torch.exp2(digits + torch.ceil(torch.log2(dearest)))
    return first, torch.exp2(digits) * first * (torch.finfo(dearest.dtype).eps / 2)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """The sum of some numbers, as exact as if it had twice the digits."""
    total, digits = _sum_of_two(terms)
    return total + digits


def _sum_of_two(terms: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    total, digits = terms[0], torch.zeros_like(terms[0])
    for term in terms[1:]:
        total, error = two_sum(total, term)
        digits = digits + error
    return total, digits


def add_costs(seen: Costs, w: Tensor) -> Costs:
    """The costs with those of a tile, which are positive where the entries take part, else 0."""
    count, dearest = widen((w > 0).sum(-1)), w.amax(-1)
    parts = [piece.sum(-1) for piece in _cut(w, _slices(torch.full_like(count, w.shape[-1]), dearest))]
    total, digits = _sum_of_two([seen.total, *parts, seen.digits])
    return Costs(seen.entries + count, torch.maximum(seen.dearest, dearest), total, digits)


def all_costs(costs: Costs, row: Row) -> Costs:
    """The same over the row instead of a shard of it."""
    if row.here:
        return costs
    totals, digits = (row.slots(v) for v in costs[2:])  # type: ignore[attr-defined]
    count, totals, digits, dearest = row.reduce([costs.entries, totals, digits], [costs.dearest])
    return Costs(count, dearest, *_sum_of_two([*totals.unbind(-1), *digits.unbind(-1)]))


def _quantile(cdf: CDF, spent: Tensor, rest: Tensor) -> Tensor:
    """F⁻¹(B/W), from B and W − B: their ratio to W loses digits near 1."""
    info = torch.finfo(spent.dtype)
    if not cdf.symmetric:
        return cdf.icdf((spent / (spent + rest)).clamp(info.tiny, 1 - info.eps / 2))
    lesser = (torch.minimum(spent, rest) / (spent + rest)).clamp(min=info.tiny)
    z = cdf.icdf(lesser)
    return torch.where(spent <= rest, z, -z)


def _no_sample(zero: Tensor) -> _Sample:
    nothing = torch.full((*zero.shape, LANES), math.nan, dtype=zero.dtype, device=zero.device)
    return _Sample(nothing, torch.zeros_like(nothing))


def _keep(
    sample: _Sample, keys: Tensor | None, level: Tensor, w: Tensor, there: Tensor, start: int
) -> tuple[_Sample, Tensor]:
    """One entry for each lane, of those that are there: which one is as good as random, so that it does not
    matter if a row is sorted."""
    width = level.shape[-1]
    groups = -(-width // LANES)
    place = torch.arange(start, start + width, device=level.device)
    key = ((place * 2654435761) % (1 << 31)).to(level.dtype).expand(level.shape).where(there, -1)
    fill = groups * LANES - width
    key, level, w = (
        torch.nn.functional.pad(v, (0, fill), value=-1.0).unflatten(-1, (groups, LANES))
        for v in (key, level, w)
    )
    key, index = key.max(-2, keepdim=True)
    level, w = level.gather(-2, index).squeeze(-2), w.gather(-2, index).squeeze(-2)
    key = key.squeeze(-2)
    newer = key >= 0 if keys is None else key > keys
    keys = key if keys is None else torch.maximum(key, keys)
    return _Sample(level.where(newer, sample.level), w.where(newer, sample.cost)), keys


def _lanes(row: Row, sample: _Sample) -> list[Tensor]:
    """The numbers whose sums over the processes are a sample of the row: each of them adds an equal part of
    its lanes."""
    step = -(-LANES // max(1, LANES // row.world))
    parts = (v[..., ::step].nan_to_num(math.inf) for v in sample)
    return [row.slots(v).flatten(-2) for v in parts]  # type: ignore[attr-defined]


def _sample_of(level: Tensor, cost: Tensor) -> _Sample:
    return _Sample(level.masked_fill(level == math.inf, math.nan), cost.where(level < math.inf, 0))


# ------------------------------------------------------------------------------------------------- trials


def _trials(p: Problem, state: _State, single: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Points inside the bracket, (*batch, K) as hi and lo; and whether there are any besides its middle.

    A single point is Newton's from the nearer end, or the middle of the bracket.
    """
    left, right = state.left, state.right
    width = (right.hi - left.hi) + (right.lo - left.lo)
    middle = _shift(left, (0.5 * width).unsqueeze(-1))
    guess = _alone(torch.where(state.fresh, state.guess, math.nan))
    if single:
        nearer = left.log_ratio.abs() < right.log_ratio.abs()
        order = RULES if p.cdf.full_support else COMPACT_RULES
        # an index list would be copied to the device
        steps = [torch.stack([end.steps[..., i] for i in order], -1) for end in (left, right)]
        ends = [_shift(end, each) for end, each in zip((left, right), steps, strict=True)]
        points = [
            guess,
            tuple(torch.where(nearer.unsqueeze(-1), u, v) for u, v in zip(*ends, strict=True)),
        ]
    else:
        tiny = 16 * torch.finfo(width.dtype).eps * torch.maximum(left.hi.abs(), right.hi.abs())
        tiny = torch.minimum(tiny, 0.25 * width).where(state.fresh, math.nan)
        points = [
            guess,
            _alone(left.hi + tiny),
            _alone(right.hi - tiny),
            _shift(left, left.steps),
            _shift(right, right.steps),
            *_between(p, left, right, width),
            _alone(_pivots(left, right, state.sample)),
            _alone(_middle_of_sizes(left.hi, right.hi)),
        ]
    hi, lo = (torch.cat(parts, -1) for parts in zip(*points, strict=True))
    from_left = (hi - left.hi.unsqueeze(-1)) + (lo - left.lo.unsqueeze(-1))
    from_right = (right.hi.unsqueeze(-1) - hi) + (right.lo.unsqueeze(-1) - lo)
    inside = (from_left > 0) & (from_right > 0)
    hi, lo = torch.where(inside, hi, middle[0]), torch.where(inside, lo, middle[1])
    found = inside.any(-1) | (
        (middle[0] - left.hi.unsqueeze(-1)) + (middle[1] - left.lo.unsqueeze(-1)) > 0
    ).squeeze(-1)
    if single:
        first = inside.to(torch.int8).argmax(-1)
        return _pick(hi, first).unsqueeze(-1), _pick(lo, first).unsqueeze(-1), found
    return torch.cat((hi, middle[0]), -1), torch.cat((lo, middle[1]), -1), found


def _alone(hi: Tensor) -> tuple[Tensor, Tensor]:
    hi = hi if hi.dim() > 1 else hi.unsqueeze(-1)
    return hi, torch.zeros_like(hi)


def _shift(point: _Point, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The points at these distances, as hi and lo."""
    first, error = two_sum(point.hi.unsqueeze(-1), point.lo.unsqueeze(-1) + steps)
    return first, error


def _between(p: Problem, left: _Point, right: _Point, width: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Points from both ends together: secants, and where one end lies on a plateau of slow entries."""
    secants = []
    for l_value, r_value in ((left.log_ratio, right.log_ratio), (left.logit, right.logit)):
        share = l_value / (l_value - r_value)
        secants.append(_shift(left, (width * share).unsqueeze(-1)))
    jump = left.excess - right.excess
    off_right = -p.tau * jump / right.slope * torch.log(jump / left.excess)
    off_left = p.tau * jump / left.slope * torch.log(jump / -right.excess)
    return [*secants, _shift(right, off_right.unsqueeze(-1)), _shift(left, off_left.unsqueeze(-1))]


def _pivots(left: _Point, right: _Point, sample: _Sample) -> Tensor:
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


def _narrow(left: _Point, right: _Point, points: _Point) -> tuple[_Point, _Point]:
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
        ends.append(_Point(*fields))
    return ends[0], ends[1]


# --------------------------------------------------------------------------------------------- evaluation


def _evaluate(
    p: Problem, scales: _Scales, hi: Tensor, lo: Tensor, left: _Point, right: _Point
) -> tuple[_Point, Tensor, tuple[Tensor, Tensor], _Sample]:
    """What :func:`_conclude` returns, and a sample of the entries in the bracket."""
    F, full = p.cdf, p.cdf.full_support
    tau = p.tau.unsqueeze(-1)
    zero = torch.zeros_like(hi)
    slices = [zero, zero, zero]
    base = scales.log_base.unsqueeze(-1)
    tops = [zero - math.inf, zero - math.inf] if full else [zero + base, zero + base]
    # of each side: the tails, Σ w a f and Σ w a² f, relative to the top
    sums = [[zero, zero, zero], [zero, zero, zero]]
    steepest = zero - math.inf  # log max a f
    edges = _Edges.none(zero)
    sample, keys = _no_sample(p.tau), None
    start, end = F.support
    for part, tile in tiles(p.x, max(1, TILE // hi.shape[-1])):
        w, x, a = _costs(p, part, tile)
        level = (x - scales.quantile.unsqueeze(-1)) / a
        there = (w > 0) & (level > left.hi.unsqueeze(-1)) & (level < right.hi.unsqueeze(-1))
        sample, keys = _keep(sample, keys, level, w, there, part.start)
        cut = [piece.unsqueeze(-2) for piece in _cut(w, scales.slices)]
        w, x, a = w.unsqueeze(-2), x.unsqueeze(-2), a.unsqueeze(-2)
        counts, log_w = w > 0, torch.log(w)
        log_a = log_w.where(counts, 0) if p.by_value else torch.zeros_like(log_w)
        at, more = hi.unsqueeze(-1), lo.unsqueeze(-1)
        distance = residual(x, a, at) - more * a if p.by_value else (x - at) - more
        z = distance / tau.unsqueeze(-1)
        above = z > F.median
        for i, piece in enumerate(cut):
            slices[i] = slices[i] + piece.where(above & counts, 0).sum(-1)
        log_f = F.log_pdf(z)
        steepest = torch.maximum(steepest, (log_f + log_a).where(counts, -math.inf).amax(-1))
        tail = F.log_tail(z, above) + log_w
        sides = ~above & counts, above & counts
        if full:
            for i, side in enumerate(sides):
                top = torch.maximum(tops[i], tail.where(side, -math.inf).amax(-1))
                rescale = torch.exp(tops[i] - top).nan_to_num(0)
                sums[i], tops[i] = [total * rescale for total in sums[i]], top
        below, over = (top.nan_to_num(neginf=0).unsqueeze(-1) for top in tops)
        scale = torch.where(above, over, below)
        tail, rate = torch.exp(tail - scale), torch.exp(log_f + log_w - scale)
        rate = rate * a
        for i, side in enumerate(sides):
            for j, term in enumerate((tail, rate, rate * a)):
                sums[i][j] = sums[i][j] + term.where(side, 0).sum(-1)
        if not full:
            edges = edges.seen(distance, z, w, a, above, counts, tau, start, end)
    local = _Sums(slices, tops, sums, steepest, None if full else edges)
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


def _reduce(p: Problem, sums: _Sums, sample: _Sample) -> tuple[_Sums, _Sample]:
    """The same over the row instead of a shard of it."""
    if p.row.here:
        return sums, sample
    edges = sums.edges
    levels = [] if edges is None else edges.levels()
    low, high, steepest, *levels = p.row.reduce([], [*sums.tops, sums.steepest, *levels])
    sides = [
        [total * torch.exp(old - new).nan_to_num(0) for total in side]
        for side, old, new in zip(sums.sides, sums.tops, (low, high), strict=True)
    ]
    payloads = [] if edges is None else edges.payloads(levels)
    lanes = _lanes(p.row, sample)
    reduced = p.row.reduce([*sums.slices, *sides[0], *sides[1], *lanes], payloads)
    sample = _sample_of(*reduced[9:11])
    edges = None if edges is None else _Edges(*levels, *reduced[11:])
    return _Sums(reduced[:3], [low, high], [reduced[3:6], reduced[6:9]], steepest, edges), sample


def _conclude(
    p: Problem, scales: _Scales, hi: Tensor, lo: Tensor, s: _Sums
) -> tuple[_Point, Tensor, tuple[Tensor, Tensor]]:
    """Points from the sums over the row; whether the root is known from them, and where it then is."""
    over = _sum((s.slices[0], -p.budget.unsqueeze(-1).expand_as(hi), *s.slices[1:]))
    tops, sums, steepest = s.tops, s.sides, s.steepest
    eps = torch.finfo(hi.dtype).eps
    tau, total, rest, budget, log_base = (
        v.unsqueeze(-1) for v in (p.tau, p.costs.total, scales.rest, p.budget, scales.log_base)
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
        torch.exp(torch.log(side[1]) + top - log_tail).nan_to_num(0)
        for side, top, log_tail in zip(sums, tops, (log_P, log_Q), strict=True)
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
    if s.edges is None:
        done = done | (ratio.abs() <= 4 * eps + 8 * eps * log_P.abs().clamp(max=large(hi)))
        jump = (change * bend < eps / 4) & (bend < 1e-7)
        move = plain.where(jump & ~done, 0)
    else:
        more, gap, room = _edge_steps(p, s.edges, over, P, Q, miss, scale, slopes[0], tau)
        steps += more
        # f'/f is of the order of 1/z next to the edges of the support
        bend = torch.maximum(bend, 16 * plain.abs() / room)
        jump = ((change * bend < eps / 4) & (bend < 1e-7)) | ((plain.abs() < room) & (change < 8 * eps))
        done = excess.abs() <= 64 * eps * s.edges.least_cost()
        move = gap.where(gap.isfinite(), plain.where(jump & ~done, 0))
        done = done | gap.isfinite()
    ends = two_sum(hi, lo + move)
    points = _Point(hi, lo, over, miss, ratio, logit, excess, absolute, torch.stack(steps, -1))
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
