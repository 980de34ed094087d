"""The root of a row: the threshold t = hi + lo with Σ_i w_i F((x_i − t)/τ) = B. For the soft top-k w = 1.

It is the root of khot in the dtype of the row, float32 as a rule: x − t is exact near t since t is a pair,
and sums are taken above and below t apart, of small numbers. There are four kinds of passes:

1. The first brackets the root and guesses it from moments.
2. Where the scores spread far wider than τ, a sample of the row is sorted, and entries are counted at some
   levels of it, until the neighbourhood of the root is known. A sample of all entries needs no counts.
3. Newton's method, in a bracket that is halved where it is slow.
4. Where t lies in a gap between entries and both tails are next to nothing, log A = log B, where A is the sum
   of tails above t, and B the one below.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from khot_jax._sums import least, most, sums, two_sum
from khot_jax.cdfs import CDF

__all__ = ["Root", "rounding", "solve"]

# The standard deviation of the scores, in τ, above which moments say little
SPREAD = 8.0
# The size of the sample, levels of a count, and passes of each kind at most
SAMPLE, LEVELS, COUNTS, STEPS, GAP = 1024, 16, 8, 40, 12
# How many entries say where moments are taken
FEW_ENTRIES = 64
# The tail from which on an entry is decided
DECIDED = 1e-4
# The share of a gap's tails by which A and B are known from their logarithms alone
FEW = 1e-3


_Pair = tuple[Array, Array]


class Root(NamedTuple):
    """t = hi + lo: ±(greatest number) where no finite entry is selected, or all; NaN without an answer."""

    hi: Array
    lo: Array
    passes: Array


class _Row(NamedTuple):
    """Rows, (*batch, n), of which w is 0 and x is 0 where an entry is not finite; the others (*batch)."""

    x: Array
    w: Array
    live: Array  # finite entries that cost something
    goal: Array
    rest: Array  # what the goal leaves
    tau: Array
    cdf: CDF
    unit: bool  # whether every entry costs 1


def rounding(n: int, cost: Array | None) -> float:
    """The share of the sum of n costs by which a goal may exceed it; none where entries are counted."""
    if cost is None:
        return 0.0
    eps = float(jnp.finfo(cost.dtype).eps)
    return 4 * eps + min(0.5 * min(eps, 2.0**-23) * n, 2.0**-10)


def solve(x: Array, cost: Array | None, goal: Array, tau: Array, cdf: CDF) -> Root:
    """The thresholds.

    Args:
        x: scores, (*batch, n). −inf is never selected, +inf always.
        cost: of x's shape, or None where each entry costs 1.
        goal, tau: of the batch shape, in the dtype that all is computed in.
    """
    dtype, n = goal.dtype, x.shape[-1]
    greatest = jnp.finfo(dtype).max
    finite, pinned = jnp.isfinite(x), x == jnp.inf
    w = jnp.ones(x.shape, dtype) if cost is None else cost.astype(dtype)
    bad_cost = (jnp.isnan(w) | (w < 0) | jnp.isinf(w)) & (x != -jnp.inf)
    live = finite & (w > 0)
    total, paid, bad = sums(
        jnp.where(finite, w, 0),
        jnp.where(pinned, w, 0),
        (jnp.isnan(x) | bad_cost).astype(dtype),
    )
    left, slack = goal - paid, rounding(n, cost) * (total + paid)
    none = left == 0
    every = ~none & (jnp.abs(left - total) <= slack)
    wrong = (bad > 0) | ~((left >= 0) & (left <= total + slack)) | ~((tau > 0) & (tau < jnp.inf))
    ends = jnp.where(wrong, jnp.nan, jnp.where(none, greatest, -greatest)).astype(dtype)
    if n == 0:
        return Root(ends, ends, jnp.zeros(ends.shape, jnp.int32))

    ordinary = ~(none | every | wrong)
    # rows that need no solving are computed with harmless numbers: half of one entry
    lone = ~ordinary[..., None] & (jnp.arange(n) == 0)
    keep = live & ordinary[..., None]
    row = _Row(
        jnp.where(keep, x, 0).astype(dtype),
        jnp.where(keep, w, lone),
        keep | lone,
        jnp.where(ordinary, left, 0.5),
        jnp.where(ordinary, total - left, 0.5),
        jnp.where(ordinary, jnp.maximum(tau, jnp.finfo(dtype).tiny), 1),
        cdf,
        cost is None,
    )
    root = _root(row, ordinary)
    return Root(jnp.where(ordinary, root.hi, ends), jnp.where(ordinary, root.lo, ends), root.passes)


def _root(row: _Row, running: Array) -> Root:
    (left, right), ends, middle, wide = _survey(row)
    plain = jnp.clip(middle, left, right), jnp.zeros_like(middle)
    none = jnp.zeros_like(middle, jnp.int32)
    guess, counted = lax.cond(jnp.any(wide), lambda: _narrow(row, ends, plain, wide), lambda: (plain, none))
    walk = (_walk if row.cdf.full_support else _search)(row, left, right, guess, ~running)
    hi, lo, more = lax.cond(
        jnp.any(walk.flat),
        lambda: _gap(row, walk),
        lambda: (walk.hi, walk.lo, jnp.zeros_like(walk.passes)),
    )
    return Root(hi, lo, 1 + counted + walk.passes + more)


def _survey(row: _Row) -> tuple[_Pair, _Pair, Array, Array]:
    """Bounds of the root, the least and the largest score, a guess, and whether scores spread far beyond τ.

    The guess is the threshold of a distribution with the moments of the scores and of the noise of law τF.
    Its quantiles are those of F where the noise dominates, and of the normal distribution where scores do.
    """
    F, tau = row.cdf, row.tau
    info = jnp.finfo(tau.dtype)
    # moments about the mean of a few entries, so that they keep their digits
    step = -(-row.x.shape[-1] // FEW_ENTRIES)
    few, few_w = row.x[..., ::step], row.w[..., ::step]
    origin = sums(few * few_w)[0] / jnp.maximum(sums(few_w)[0], info.tiny)
    distance = row.x - origin[..., None]
    total, first, square, low, high = sums(
        row.w,
        row.w * distance,
        row.w * distance * distance,
        least=jnp.where(row.live, row.x, jnp.inf),
        most=jnp.where(row.live, row.x, -jnp.inf),
    )
    off = first / total
    mean, variance = jnp.clip(origin + off, low, high), jnp.maximum(square / total - off * off, 0)
    noise = tau * tau * F.variance
    own = F.quantile(row.goal / total, row.rest / total)
    normal = jax.scipy.special.ndtri(jnp.maximum(jnp.minimum(row.goal, row.rest) / total, info.tiny))
    normal = jnp.where(row.goal < row.rest, normal, -normal)
    unit = normal + ((own - F.mean) / math.sqrt(F.variance) - normal) * (noise / (noise + variance))
    guess = mean - tau * F.mean - unit * jnp.sqrt(variance + noise)
    pad = (jnp.maximum(jnp.abs(low), jnp.abs(high)) + (jnp.abs(own) + 2) * tau) * (8 * info.eps)
    left, right = low - tau * own - pad, high - tau * own + pad
    left, right = jnp.clip(left, -info.max / 4, info.max / 4), jnp.clip(right, -info.max / 4, info.max / 4)
    guess = jnp.where(jnp.isfinite(guess), guess, 0.5 * left + 0.5 * right)
    wide = ~(jnp.sqrt(variance) <= SPREAD * tau) | (not F.full_support)
    return (left, right), (low, high), guess, wide


# -------------------------------------------------------------------------------------- wide rows


class _Window(NamedTuple):
    """Levels between which the root lies, and what entries above each of them cost."""

    low: Array
    high: Array
    low_cost: Array  # >= the goal
    high_cost: Array  # < the goal
    guess: Array
    running: Array
    passes: Array
    trip: Array


def _narrow(row: _Row, ends: _Pair, guess: _Pair, wide: Array) -> tuple[_Pair, Array]:
    """A guess from the entry at which the goal is spent, and the number of passes."""
    n = row.x.shape[-1]
    step = -(-n // SAMPLE)
    key = jnp.where(row.live, -row.x, jnp.inf)[..., ::step]
    order, w = lax.sort((key, row.w[..., ::step]), num_keys=1)
    entries, spent = -order, jnp.cumsum(w, -1)
    at = lambda values, i: jnp.take_along_axis(values, jnp.clip(i, 0, key.shape[-1] - 1), -1)
    if step == 1:
        where = (spent < row.goal[..., None]).sum(-1, keepdims=True)
        own, below = at(entries, where)[..., 0], at(entries, where + 1)[..., 0]
        after, cost = at(spent, where)[..., 0], at(w, where)[..., 0]
        share = jnp.clip(1 - (after - row.goal) / cost, 0, 1)
        gap = (share == 1) & jnp.isfinite(below)
        half, error = two_sum(0.5 * own, jnp.where(gap, 0.5 * below, 0.5 * own))
        off = jnp.where(gap, _centre(row.cdf), row.cdf.quantile(share, 1 - share))
        found = two_sum(half, error - row.tau * off)
        return _choose(wide & jnp.isfinite(found[0]), found, guess), wide.astype(jnp.int32)

    count = key.shape[-1]
    total = spent[..., -1:]
    share = (row.goal / (row.goal + row.rest))[..., None] * total
    # where the goal is spent, give or take three standard deviations of a sample's rank
    place = (spent < share).sum(-1, keepdims=True)
    spread = 2 + 3 * jnp.sqrt(jnp.minimum(place, count - place).astype(total.dtype))
    offsets = jnp.linspace(-1, 1, LEVELS)
    places = (place + (offsets * spread).astype(jnp.int32)).astype(jnp.int32)
    low, high = ends
    eps = float(jnp.finfo(low.dtype).eps)
    low = low - (2 * eps * jnp.abs(low) + eps * row.tau)  # all entries lie above it
    first = jnp.clip(at(entries, places), low[..., None], high[..., None])

    def body(s: _Window) -> _Window:
        width = s.high - s.low
        line = jnp.clip((s.low_cost - row.goal) / (s.low_cost - s.high_cost), 0, 1)
        near = jnp.array([-1 / 16, -1 / 64, -1 / 256, 1 / 256, 1 / 64, 1 / 16], row.x.dtype)
        even = jnp.arange(1, LEVELS - 5, dtype=row.x.dtype) / (LEVELS - 5)
        parts = jnp.clip(jnp.concatenate([line[..., None] + near, even + 0 * line[..., None]], -1), 0, 1)
        levels = jnp.where(s.trip == 0, first, s.low[..., None] + parts * width[..., None])
        costs = jnp.stack(
            [sums(jnp.where(row.x > levels[..., j, None], row.w, 0))[0] for j in range(LEVELS)], -1
        )
        over = costs >= row.goal[..., None]
        low = jnp.maximum(jnp.max(jnp.where(over, levels, -jnp.inf), -1), s.low)
        high = jnp.minimum(jnp.min(jnp.where(over, jnp.inf, levels), -1), s.high)
        low_cost = jnp.minimum(jnp.min(jnp.where(over, costs, jnp.inf), -1), s.low_cost)
        high_cost = jnp.maximum(jnp.max(jnp.where(over, -jnp.inf, costs), -1), s.high_cost)
        line = jnp.clip((low_cost - row.goal) / (low_cost - high_cost), 0, 1)
        width = high - low
        size = jnp.maximum(jnp.abs(low), jnp.abs(high))
        stop = (
            (width <= 2 * row.tau) | (low_cost == row.goal) | (width <= 4 * jnp.finfo(low.dtype).eps * size)
        )
        if row.unit:
            stop = stop | (low_cost - high_cost <= 1)
        new = (low, high, low_cost, high_cost, low + line * width)
        kept = (jnp.where(s.running, a, b) for a, b in zip(new, s[:5], strict=True))
        moved = dict(zip(_Window._fields[:5], kept, strict=True))
        return s._replace(**moved, running=s.running & ~stop, passes=s.passes + s.running, trip=s.trip + 1)

    zero = jnp.zeros_like(low)
    start = _Window(
        low, high, row.goal + row.rest, zero, guess[0], wide, jnp.where(wide, 1, 0).astype(jnp.int32),
        jnp.zeros((), jnp.int32),
    )  # fmt: skip
    end = lax.while_loop(lambda s: jnp.any(s.running) & (s.trip < COUNTS), body, start)
    # of the entries between the levels, those at both ends, which may be the same
    between = (row.x > end.low[..., None]) & (row.x <= end.high[..., None]) & row.live
    top, bottom = most(row.x, between), least(row.x, between)
    share = jnp.clip((row.goal - end.high_cost) / (end.low_cost - end.high_cost), 0, 1)
    off = row.tau * row.cdf.quantile(share, 1 - share) / (1 + (top - bottom) / row.tau)
    found = two_sum(top + share * (bottom - top), -off)
    found = _choose(jnp.isfinite(found[0]) & jnp.isfinite(found[1]), found, (end.guess, zero))
    return _choose(wide, found, guess), end.passes + wide


def _centre(F: CDF) -> float:
    """Of a gap's middle, how far t lies below it, in τ."""
    return F.median if F.full_support else 0.5 * (F.support[0] + F.support[1])


# -------------------------------------------------------------------------------------- Newton's method


class _Walk(NamedTuple):
    hi: Array
    lo: Array
    left: _Pair
    right: _Pair
    width: Array  # of the bracket, when last looked at
    before: Array  # the miss then
    flat: Array  # t lies in a gap, and the tails are next to nothing
    done: Array
    passes: Array
    trip: Array


def _choose(condition: Array, new: _Pair, old: _Pair) -> _Pair:
    return jnp.where(condition, new[0], old[0]), jnp.where(condition, new[1], old[1])


def _apart(a: _Pair, b: _Pair) -> Array:
    return (a[0] - b[0]) + (a[1] - b[1])


def _middle(a: _Pair, b: _Pair) -> _Pair:
    half, error = two_sum(0.5 * a[0], 0.5 * b[0])
    return two_sum(half, error + 0.5 * (a[1] + b[1]))


def _moved(a: _Pair, step: Array) -> _Pair:
    return two_sum(a[0], a[1] + step)


class _Sums(NamedTuple):
    """What a pass finds at t: Σ w F = paid − A + B, the entries next to t, and where Newton's method goes."""

    over: Array  # paid − goal
    miss: Array  # over − A + B
    A: Array
    B: Array
    slopes: _Pair  # Σ w f above and below
    sure: _Pair  # what entries cost that are decided, above and below
    plain: Array  # Newton's step
    alone: Array  # the step after which the next entry alone makes up for the miss, or to the middle of a gap
    exact: Array  # whether the miss is rounding


def _sums(row: _Row, at: _Pair) -> _Sums:
    F, tau = row.cdf, row.tau
    info = jnp.finfo(tau.dtype)
    z = _standardize(row, *at)
    above = (z > F.median) & row.live
    below = row.live & ~above
    tail, f = F.tail(z, z > F.median), F.pdf(z)
    wf, wt = row.w * f, row.w * tail
    sure = jnp.where(tail < DECIDED, row.w, 0)
    paid, A, B, SA, SB, sure_in, sure_out, a, b = sums(
        jnp.where(above, row.w, 0), jnp.where(above, wt, 0), jnp.where(below, wt, 0),
        jnp.where(above, wf, 0), jnp.where(below, wf, 0),
        jnp.where(above, sure, 0), jnp.where(below, sure, 0),
        least=jnp.where(above, row.x, jnp.inf), most=jnp.where(below, row.x, -jnp.inf),
    )  # fmt: skip
    over = paid - row.goal
    miss = (B - A) + over
    middle = 0.5 * ((a - at[0]) + (b - at[0])) - at[1] - tau * _centre(F)
    alone = middle
    if row.unit:
        part = jnp.clip(jnp.where(over < 0, -over, 1 - over), info.tiny, 1)
        off = tau * F.quantile(part, jnp.clip(1 - part, info.eps / 2, 1))
        alone = jnp.where(over == 0, middle, (jnp.where(over < 0, b, a) - at[0]) - at[1] - off)
    exact = jnp.abs(miss) <= 0.5 * info.eps * jnp.maximum(B + jnp.maximum(over, 0), A + jnp.maximum(-over, 0))
    return _Sums(over, miss, A, B, (SA, SB), (sure_in, sure_out), tau * miss / (SA + SB), alone, exact)


def _walk(row: _Row, left: Array, right: Array, guess: _Pair, done: Array) -> _Walk:
    """Newton's method under a CDF with tails, one point a pass."""
    tau, goal, rest = row.tau, row.goal, row.rest
    info = jnp.finfo(tau.dtype)
    enough = 2e-4 if info.bits == 32 else 1e-8  # it squares the error

    def body(s: _Walk) -> _Walk:
        here = s.hi, s.lo
        at = _sums(row, here)
        over, miss, A, B, (SA, SB) = at[:5]
        P, Q = B + jnp.maximum(over, 0), A + jnp.maximum(-over, 0)
        size, greater, gap = jnp.abs(miss), jnp.maximum(P, Q), over == 0
        # log odds, of what is spent and spared of the entries that are not decided, are nearly a line
        goals, rests = goal - at.sure[0], rest - at.sure[1]
        none = (goals <= 0) | (rests <= 0)
        goals, rests = jnp.where(none, goal, goals), jnp.where(none, rest, rests)
        spent, spare = goals + miss, rests - miss
        g = jnp.log(jnp.maximum(spent, info.tiny) / goals) - jnp.log(jnp.maximum(spare, info.tiny) / rests)
        by_logit = tau * g * spent * (spare / (goals + rests)) / (SA + SB)
        by_logs = tau * jnp.log(P / Q) / (SB / P + SA / Q)
        few = gap | ((A < 0.25) & (B < 0.25) & (jnp.abs(over) < 1)) if row.unit else gap
        far = few & (jnp.minimum(P, Q) < 1e-4 * greater)
        step = jnp.where(size <= 1e-3 * jnp.minimum(goal, rest), at.plain, by_logit)
        step = jnp.where(far, at.alone, jnp.where(few, by_logs, step))

        left, right = _choose(miss > 0, here, s.left), _choose(miss < 0, here, s.right)
        width, to, middle = _apart(right, left), _moved(here, step), _middle(left, right)
        look = s.trip % 3 == 2
        stuck = look & (width > 0.5 * s.width) & (size > 0.125 * s.before)
        ok = jnp.isfinite(step) & (_apart(to, left) > 0) & (_apart(right, to) > 0) & ~stuck
        flat = gap & (jnp.maximum(A, B) < FEW)
        found = jnp.abs(step) <= tau * enough
        ended = (_apart(middle, left) == 0) | (_apart(middle, right) == 0)
        to = _choose(at.exact | flat, here, _choose(ok | found, to, middle))
        hi, lo = _choose(s.done, here, to)
        return _Walk(
            hi, lo, _choose(s.done, s.left, left), _choose(s.done, s.right, right),
            jnp.where(look, width, s.width), jnp.where(look, size, s.before),
            jnp.where(s.done, s.flat, flat), s.done | at.exact | found | ended | flat,
            s.passes + ~s.done, s.trip + 1,
        )  # fmt: skip

    zero = jnp.zeros_like(left)
    infinite = zero + jnp.inf
    start = _Walk(
        *guess, (left, zero), (right, zero), infinite, infinite, zero > 1, done, zero.astype(jnp.int32),
        jnp.zeros((), jnp.int32),
    )  # fmt: skip
    return lax.while_loop(lambda s: ~jnp.all(s.done) & (s.trip < STEPS), body, start)


class _End(NamedTuple):
    """An end of a bracket, and what it proposes."""

    at: _Pair
    miss: Array
    step: Array


class _Search(NamedTuple):
    points: tuple[_Pair, ...]
    left: _End
    right: _End
    near: Array  # whether a step was next to nothing: one more pass decides
    found: _Walk


def _search(row: _Row, left: Array, right: Array, guess: _Pair, done: Array) -> _Walk:
    """Without tails, where C bends at every entry: both ends of a bracket propose, six points a pass."""
    tau = row.tau
    eps = float(jnp.finfo(tau.dtype).eps)
    # a quarter of what is promised: equal entries round alike, so that the last step may spoil the sum
    allowed = eps * (2 * jnp.maximum(1, jnp.minimum(row.goal, row.rest)) + row.x.shape[-1] / 8)

    def body(s: _Search) -> _Search:
        left, right, near, walk = s.left, s.right, s.near, s.found
        for point in s.points:
            at = _sums(row, point)
            slope = at.slopes[0] + at.slopes[1]
            end = _End(point, at.miss, jnp.where(slope == 0, at.alone, at.plain))
            flat = (at.over == 0) & (slope == 0)
            small = jnp.abs(end.step) <= 8 * eps * tau
            new = (at.exact | flat | (small & (jnp.abs(end.miss) <= allowed))) & ~walk.done
            near = near | small
            hi, lo = _choose(new, point, (walk.hi, walk.lo))
            walk = walk._replace(hi=hi, lo=lo, flat=walk.flat | (new & flat), done=walk.done | new)
            left = _closer((at.miss > 0) & (_apart(point, left.at) > 0), end, left)
            right = _closer((at.miss < 0) & (_apart(right.at, point) > 0), end, right)
        width, middle = _apart(right.at, left.at), _middle(left.at, right.at)
        secant = width * (left.miss / (left.miss - right.miss))
        # at the edge of many entries C is a square, whose root is two of Newton's steps away
        proposals = (
            _moved(left.at, left.step), _moved(left.at, 2 * left.step), _moved(right.at, right.step),
            _moved(right.at, 2 * right.step), _moved(left.at, secant), middle,
        )  # fmt: skip
        points = []
        for place, to in enumerate(proposals):
            inside = (_apart(to, left.at) > 0) & (_apart(right.at, to) > 0)
            points.append(_choose(inside, to, _moved(left.at, width * ((place + 1) / 7))))
        ended = (_apart(middle, left.at) == 0) | (_apart(middle, right.at) == 0) | s.near
        better = _choose(~(jnp.abs(left.miss) > jnp.abs(right.miss)), left.at, right.at)
        hi, lo = _choose(ended & ~walk.done, better, (walk.hi, walk.lo))
        running = ~s.found.done
        walk = walk._replace(
            hi=hi, lo=lo, done=walk.done | ended, passes=walk.passes + running, trip=walk.trip + 1
        )
        return _Search(tuple(points), left, right, near, walk)

    zero = jnp.zeros_like(left)
    walk = _Walk(
        *guess, (left, zero), (right, zero), zero, zero, zero > 1, done, zero.astype(jnp.int32),
        jnp.zeros((), jnp.int32),
    )  # fmt: skip
    unknown = zero + jnp.nan
    points = tuple(_moved(guess, part * tau) for part in (0, -0.03, 0.03, -0.2, 0.2, 1))
    start = _Search(
        points, _End((left, zero), unknown, unknown), _End((right, zero), unknown, unknown), zero > 1, walk
    )
    return lax.while_loop(lambda s: ~jnp.all(s.found.done) & (s.found.trip < STEPS), body, start).found


def _closer(condition: Array, new: _End, old: _End) -> _End:
    return _End(
        _choose(condition, new.at, old.at),
        jnp.where(condition, new.miss, old.miss),
        jnp.where(condition, new.step, old.step),
    )


def _standardize(row: _Row, hi: Array, lo: Array) -> Array:
    return ((row.x - hi[..., None]) - lo[..., None]) / row.tau[..., None]


# -------------------------------------------------------------------------------------- gaps


def _gap(row: _Row, walk: _Walk) -> tuple[Array, Array, Array]:
    """Rows with t in a gap, and next to nothing in both tails: log A = log B; without tails, the middle."""
    F, tau, flat = row.cdf, row.tau, walk.flat
    eps = jnp.finfo(tau.dtype).eps
    above = (_standardize(row, walk.hi, walk.lo) > F.median) & row.live
    below = row.live & ~above
    a, b = least(row.x, above), most(row.x, below)
    half, error = two_sum(0.5 * a, 0.5 * b)
    middle = two_sum(half, error - tau * _centre(F))
    hi, lo = _choose(flat & jnp.isfinite(a) & jnp.isfinite(b), middle, (walk.hi, walk.lo))
    if not F.full_support:
        return hi, lo, flat.astype(jnp.int32)

    log_w = jnp.log(jnp.where(row.live, row.w, 1))

    def log_sum(log: Array, side: Array) -> Array:
        log = jnp.where(side, log, -jnp.inf)
        top = jnp.max(log, -1)
        top = jnp.where(jnp.isfinite(top), top, 0)
        return jnp.log(sums(jnp.exp(log - top[..., None]))[0]) + top

    def body(s: tuple[Array, ...]) -> tuple[Array, ...]:
        hi, lo, passes, trip, done = s
        z = _standardize(row, hi, lo)
        log = F.log_tail(z, above) + log_w
        A, B = log_sum(log, above), log_sum(log, below)
        rate = jnp.exp(jnp.where(above, F.log_hazard(-z) if F.symmetric else F.log_pdf(z) - F.log_sf(z),
                                 F.log_hazard(z)))  # fmt: skip
        rates = sums(
            jnp.where(above, jnp.exp(log - A[..., None]) * rate, 0),
            jnp.where(below, jnp.exp(log - B[..., None]) * rate, 0),
        )
        step = tau * (B - A) / (rates[0] + rates[1])
        step = jnp.clip(step, 0.75 * ((b - hi) - lo), 0.75 * ((a - hi) - lo))  # it stays in the gap
        to = two_sum(hi, lo + jnp.where(jnp.isfinite(step), step, 0))
        stop = ~(jnp.abs(step) > tau * (1e-5 + 4 * eps * jnp.maximum(jnp.abs(A), 1)))
        hi, lo = _choose(done, (hi, lo), to)
        return hi, lo, passes + ~done, trip + 1, done | stop

    start = (hi, lo, flat.astype(jnp.int32), jnp.zeros((), jnp.int32), ~flat)
    end = lax.while_loop(lambda s: ~jnp.all(s[4]) & (s[3] < GAP), body, start)
    return end[0], end[1], end[2]
