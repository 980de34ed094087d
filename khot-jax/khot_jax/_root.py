"""The root of a row: the threshold t = hi + lo with Σ_i w_i F((x_i − t)/τ) = B. For the soft top-k w = 1.

It is the root of khot in the dtype of the row, float32 as a rule: x − t is exact near t since t is a pair,
and sums are taken above and below t apart, of small numbers. There are four kinds of passes:

1. The first brackets the root and guesses it from moments.
2. Where the scores spread far wider than τ, a sample of the row is sorted, and entries are counted at some
   levels of it, and then evenly between two of them, until the neighbourhood of the root is known.
3. Newton's method, in a bracket, which is halved where a step leaves it.
4. Where t lies in a gap between entries and both tails are next to nothing, log A = log B, where A is the sum
   of tails above t, and B the one below.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import logsumexp

from khot_jax._sums import least, most, sums, two_sum
from khot_jax.cdfs import CDF

__all__ = ["Root", "rounding", "solve"]

# The variance of the scores, in that of the noise, above which moments say little
SPREAD = 4.0
# The size of the sample, levels of a count, and passes of each kind at most
SAMPLE, LEVELS, COUNTS, STEPS, GAP = 1024, 16, 8, 40, 12
# What a pass looks at besides one point without tails, in the width of the bracket
AROUND = (0.0, -1 / 32, 1 / 32, -1 / 4, 1 / 4, 1 / 2)
# The share of a gap's tails by which A and B are known from their logarithms alone
FEW = 1e-3

_Pair = tuple[Array, Array]
_State = TypeVar("_State")


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

    def z(self, t: _Pair) -> Array:
        return ((self.x - t[0][..., None]) - t[1][..., None]) / self.tau[..., None]


def rounding(n: int, dtype: Any) -> float:
    """The share of the sum of n costs by which a budget may exceed it."""
    eps = float(jnp.finfo(dtype).eps)
    return 4 * eps + min(0.5 * min(eps, 2.0**-23) * n, 2.0**-10)


def solve(x: Array, cost: Array | None, goal: Array, tau: Array, cdf: CDF) -> Root:
    """The thresholds of rows of scores, (*batch, n), of which −inf is never selected, and +inf always.

    Each entry costs 1 where there are no costs. All is computed in the dtype of the goals.
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
    left, slack = goal - paid, 0 if cost is None else rounding(n, dtype) * (total + paid)
    none = (left == 0) & (total > 0)  # entries that are all free are selected
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
    )
    window, middle, wide = _survey(row)
    none = jnp.zeros_like(wide, jnp.int32)
    plain = (middle, jnp.zeros_like(middle)), _bracket(row, window), none
    guess, bracket, counted = lax.cond(
        jnp.any(wide), lambda: _narrow(row, window, plain, wide), lambda: plain
    )
    walk = _walk(row, bracket, guess, ~ordinary)
    t, more = lax.cond(jnp.any(walk.flat), lambda: _gap(row, walk), lambda: (walk.at, none))
    return Root(*_choose(ordinary, t, (ends, ends)), 1 + counted + walk.passes + more)


class _Window(NamedTuple):
    """Levels between which the goal is spent, and what entries above each of them cost."""

    low: Array
    high: Array
    low_cost: Array  # >= the goal
    high_cost: Array  # < the goal


def _bracket(row: _Row, s: _Window) -> _Pair:
    """Bounds of the root: low_cost F((low − t)/τ) ≤ Σ w F ≤ high_cost + the other costs F((high − t)/τ)."""
    room = row.goal + row.rest - s.high_cost
    above = row.cdf.quantile(row.goal / s.low_cost, (s.low_cost - row.goal) / s.low_cost)
    below = row.cdf.quantile((row.goal - s.high_cost) / room, row.rest / room)
    info = jnp.finfo(room.dtype)

    def end(level: Array, z: Array, side: int) -> Array:
        pad = 8 * info.eps * (jnp.abs(level) + (jnp.abs(z) + 2) * row.tau)
        return jnp.clip(level - row.tau * z + side * pad, -info.max / 4, info.max / 4)

    return end(s.low, above, -1), end(s.high, below, 1)


def _survey(row: _Row) -> tuple[_Window, Array, Array]:
    """The least and the largest score, a guess, and whether scores spread far beyond τ.

    The guess is the threshold of a distribution with the moments of the scores and of the noise of law τF,
    and quantiles as those of F.
    """
    F, tau = row.cdf, row.tau
    info = jnp.finfo(tau.dtype)
    low, high = least(row.x, row.live), most(row.x, row.live)
    distance = row.x - low[..., None]  # so that moments of narrow rows keep their digits
    total, first, square = sums(row.w, row.w * distance, row.w * distance * distance)
    off = first / total
    mean, variance = low + off, jnp.maximum(square / total - off * off, 0)
    noise = tau * tau * F.variance
    unit = (F.quantile(row.goal / total, row.rest / total) - F.median) / math.sqrt(F.variance)
    guess = mean - tau * F.median - unit * jnp.sqrt(variance + noise)
    low = low - (2 * info.eps * jnp.abs(low) + info.eps * tau)  # all entries lie above it
    window = _Window(low, high, row.goal + row.rest, jnp.zeros_like(low))
    return window, guess, ~(variance <= SPREAD * noise)


# -------------------------------------------------------------------------------------- wide rows

_Guess = tuple[_Pair, _Pair, Array]  # with a bracket, and the number of passes


class _Counts(NamedTuple):
    window: _Window
    levels: Array  # to count at
    running: Array
    passes: Array


def _narrow(row: _Row, window: _Window, plain: _Guess, wide: Array) -> _Guess:
    """A guess from the entries at which the goal is spent."""
    step = -(-row.x.shape[-1] // SAMPLE)
    sample = jnp.where(row.live, -row.x, jnp.inf)[..., ::step], row.w[..., ::step]
    entries, costs = lax.sort(sample, num_keys=1)
    spent = jnp.cumsum(costs, -1)
    # where the goal is spent, give or take three standard deviations of a sample's rank, or a few entries
    share = (row.goal / (row.goal + row.rest))[..., None] * spent[..., -1:]
    place = (spent < share).sum(-1, keepdims=True)
    error = 3 * jnp.sqrt(jnp.minimum(place, spent.shape[-1] - place).astype(share.dtype))
    spread = LEVELS / 2 if step == 1 else 2 + error
    places = place + (jnp.linspace(-1, 1, LEVELS) * spread).astype(place.dtype)
    first = -jnp.take_along_axis(entries, jnp.clip(places, 0, spent.shape[-1] - 1), -1)
    eps = jnp.finfo(first.dtype).eps
    least_cost = least(row.w, row.live)
    even = jnp.arange(1, LEVELS + 1, dtype=first.dtype) / (LEVELS + 1)

    def body(s: _Counts) -> _Counts:
        (spent,) = sums(jnp.where(row.x[..., None, :] > s.levels[..., None], row.w[..., None, :], 0))
        old = s.window
        over = spent >= row.goal[..., None]
        low, high = jnp.maximum(most(s.levels, over), old.low), jnp.minimum(least(s.levels, ~over), old.high)
        low_cost = jnp.minimum(least(spent, over), old.low_cost)
        high_cost = jnp.maximum(most(spent, ~over), old.high_cost)
        levels = low[..., None] + even * (high - low)[..., None]
        close = 2 * row.tau + 4 * eps * jnp.maximum(jnp.abs(low), jnp.abs(high))
        stop = (high - low <= close) | (low_cost == row.goal) | (low_cost - high_cost <= least_cost)
        new = _Counts(_Window(low, high, low_cost, high_cost), levels, ~stop, s.passes + 1)
        return _choose(s.running, new, s)

    levels = jnp.clip(first, window.low[..., None], window.high[..., None])
    start = _Counts(window, levels, wide, jnp.zeros_like(wide, jnp.int32))
    end = lax.while_loop(lambda s: jnp.any(s.running & (s.passes < COUNTS)), body, start)
    low, high, low_cost, high_cost = end.window
    found = _bracket(row, end.window)
    # of the entries between the levels, those at both ends, which may be the same
    above, under = row.live & (row.x > low[..., None]), row.live & (row.x <= high[..., None])
    bottom, top = least(row.x, above), most(row.x, above & under)
    share = jnp.clip((row.goal - high_cost) / (low_cost - high_cost), 0, 1)
    off = row.cdf.quantile(share, 1 - share) / (1 + (top - bottom) / row.tau)
    between = two_sum(top + share * (bottom - top), -row.tau * off)
    gap = _middle_of_gap(row, bottom, most(row.x, row.live & ~above))
    guess = _choose(low_cost == row.goal, gap, between)
    bracket = jnp.maximum(found[0], plain[1][0]), jnp.minimum(found[1], plain[1][1])
    return _choose(wide, (guess, bracket, end.passes + 1), plain)


def _middle_of_gap(row: _Row, above: Array, below: Array) -> _Pair:
    F = row.cdf
    centre = F.median if F.full_support else 0.5 * (F.support[0] + F.support[1])
    hi, lo = two_sum(0.5 * above, 0.5 * below)
    return two_sum(hi, lo - row.tau * centre)


# -------------------------------------------------------------------------------------- Newton's method


class _Walk(NamedTuple):
    points: _Pair  # (*batch, points): what the next pass looks at
    left: _Pair
    right: _Pair
    at: _Pair
    flat: Array  # t lies in a gap, and the tails are next to nothing
    done: Array
    passes: Array


def _choose(condition: Array, new: _State, old: _State) -> _State:
    """Of two states of rows the new one where the condition holds."""
    at = lambda x: condition if x.ndim == condition.ndim else condition[..., None]
    return jax.tree.map(lambda a, b: jnp.where(at(a), a, b), new, old)


def _apart(a: _Pair, b: _Pair) -> Array:
    return (a[0] - b[0]) + (a[1] - b[1])


def _walk(row: _Row, ends: _Pair, guess: _Pair, done: Array) -> _Walk:
    """Newton's method in a bracket.

    With ``over`` the cost of the entries above t less the goal, A of their tails and B of those of the
    others, the root is where P = over⁺ + B and Q = over⁻ + A are equal. Under a CDF with tails log P/Q is
    nearly a line. Without them the sum bends at every entry, so that a pass looks at six points.
    """
    F, tau = row.cdf, row.tau[..., None]
    info = jnp.finfo(tau.dtype)
    # Newton's method squares the error, but at an edge of a support, where densities may be infinite
    enough = 8 * info.eps if not F.full_support else 2e-4 if info.bits == 32 else 1e-8
    each = row._replace(x=row.x[..., None, :], tau=tau)  # for each point
    w, live, goal = row.w[..., None, :], row.live[..., None, :], row.goal[..., None]

    def body(s: _Walk) -> _Walk:
        z = each.z(s.points)
        above = (z > F.median) & live
        below = live & ~above
        f, tail = w * F.pdf(z), w * F.tail(z, z > F.median)
        paid, A, B, SA, SB = sums(
            jnp.where(above, w, 0), jnp.where(above, tail, 0), jnp.where(below, tail, 0),
            jnp.where(above, f, 0), jnp.where(below, f, 0),
        )  # fmt: skip
        over = paid - goal
        miss = over + (B - A)
        P, Q = B + jnp.maximum(over, 0), A + jnp.maximum(-over, 0)
        if F.full_support:
            step = tau * jnp.log(P / Q) / (SB / P + SA / Q)
            flat = (over == 0) & (jnp.maximum(A, B) < FEW)
        else:
            step = tau * miss / (SA + SB)
            flat = (over == 0) & (SA + SB == 0)
        stays = flat | (jnp.abs(miss) <= 0.5 * info.eps * jnp.maximum(P, Q))
        found = (jnp.abs(step) <= tau * enough) & (F.full_support | (jnp.abs(miss) <= 8 * enough * goal))
        to = two_sum(s.points[0], s.points[1] + jnp.where(stays, 0, step))

        left = _closer(s.left, s.points, miss > 0, 1)
        right = _closer(s.right, s.points, miss < 0, -1)
        # no pair lies between them
        ended = _apart(right, left) <= 4 * info.eps**2 * jnp.maximum(row.tau, jnp.abs(left[0]))
        best = jnp.where(stays, 2, jnp.where(found, 1, -jnp.abs(miss)))
        found, to, flat = _pick(best, (stays | found, to, flat))
        at = _choose(found | ~ended, to, left)
        new = _Walk(around(at, left, right), left, right, at, flat, found | ended, s.passes + 1)
        return _choose(~s.done, new, s)

    def around(at: _Pair, left: _Pair, right: _Pair) -> _Pair:
        """Points at and around the one, or where these lie outside of the bracket, evenly in it."""
        at, left, right = ((end[0][..., None], end[1][..., None]) for end in (at, left, right))
        width = _apart(right, left)
        near = two_sum(at[0], at[1] + width * jnp.array(AROUND[:count], width.dtype))
        inside = (_apart(near, left) > 0) & (_apart(right, near) > 0)
        even = jnp.arange(1, count + 1, dtype=width.dtype) / (count + 1)
        return _choose(inside, near, two_sum(left[0], left[1] + width * even))

    count, zero = 1 if F.full_support else len(AROUND), jnp.zeros_like(row.tau)
    left, right = ((end, zero) for end in ends)
    start = _Walk(around(guess, left, right), left, right, guess, zero > 1, done, zero.astype(jnp.int32))
    return lax.while_loop(lambda s: jnp.any(~s.done & (s.passes < STEPS)), body, start)


def _pick(best: Array, points: _State) -> _State:
    """Of the points of each row the best."""
    i = jnp.argmax(best, -1, keepdims=True)
    return jax.tree.map(lambda x: jnp.take_along_axis(x, i, -1)[..., 0], points)


def _closer(end: _Pair, points: _Pair, beyond: Array, side: int) -> _Pair:
    """The end of a bracket, or of the points beyond which the root lies the one that is closest to it."""
    away = side * _apart(points, (end[0][..., None], end[1][..., None]))
    away, point = _pick(jnp.where(beyond, away, 0), (jnp.where(beyond, away, 0), points))
    return _choose(away > 0, point, end)


# -------------------------------------------------------------------------------------- gaps


def _gap(row: _Row, walk: _Walk) -> tuple[_Pair, Array]:
    """Rows with t in a gap, and next to nothing in both tails: log A = log B; without tails, the middle."""
    F, tau, flat = row.cdf, row.tau, walk.flat
    eps = jnp.finfo(tau.dtype).eps
    above = (row.z(walk.at) > F.median) & row.live
    below = row.live & ~above
    a, b = least(row.x, above), most(row.x, below)
    start = _choose(flat, _middle_of_gap(row, a, b), walk.at)
    if not F.full_support:
        return start, flat.astype(jnp.int32)

    log_w = jnp.log(jnp.where(row.live, row.w, 1))

    def excess(z: Array) -> Array:
        log = F.log_tail(z, above) + log_w
        return logsumexp(log, -1, where=below) - logsumexp(log, -1, where=above)

    def body(s: tuple[_Pair, Array, Array]) -> tuple[_Pair, Array, Array]:
        at, passes, done = s
        z = row.z(at)
        miss, slope = jax.jvp(excess, (z,), (jnp.ones_like(z),))
        step = tau * miss / slope
        # it stays in the gap
        step = jnp.clip(step, 0.75 * ((b - at[0]) - at[1]), 0.75 * ((a - at[0]) - at[1]))
        to = two_sum(at[0], at[1] + jnp.where(jnp.isfinite(step), step, 0))
        stop = ~(jnp.abs(step) > 1e-5 * tau + 2 * eps * (a - b))
        return _choose(done, at, to), passes + ~done, done | stop

    none = flat.astype(jnp.int32)
    at, passes, _ = lax.while_loop(lambda s: jnp.any(~s[2] & (s[1] < GAP)), body, (start, none, ~flat))
    return at, passes
