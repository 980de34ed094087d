"""Soft budgets, forward and backward: a program a row, which it reads a chunk at a time, in float64.

The equations, the order of the edge cases and the gradients are the reference's
(`_kernels.reference.soft_budget`). The root is found by Newton's method on log P = log Q. Every trial is
clamped into a bracket, whose ends are pairs as t is one, and a bracket that does not shrink is bisected. By
value the slopes of log P and log Q carry the costs, which may differ by many decades: where one cost hands
over to another, a step of Newton's may lead anywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import soft_budget as reference
from khot._kernels.triton import layout
from khot._kernels.triton.fast import (
    double,
    exact_total,
    joined,
    plus,
    plus_exactly,
    store,
    total,
    two_sum,
)
from khot._kernels.triton.functions import (
    HUGE,
    POWER,
    TINY,
    full_support,
    gaussian_tail,
    icdf,
    icdf_error,
    log1p,
    log_scale,
    log_scales,
    median,
    moments,
    normal_icdf,
    side,
)
from khot._kernels.triton.launch import launch
from khot._kernels.triton.resident import number64

EVALUATIONS = 128  # at most
WIDTH = 1024  # entries that a program holds at a time: two of a thread, as float64 fills registers
FARTHEST = tl.constexpr(1e300)
FARTHEST_Z = tl.constexpr(1e150)  # its square stays finite
ROUNDING = tl.constexpr(2.0**-52)
NOISE = tl.constexpr(1e-15)  # of log P − log Q, for each unit of the logarithms
IDLE = tl.constexpr(1e3)  # so many times as much may be noise, if it does not fall any more
LAST = tl.constexpr(1e-9)  # in units of z: a shorter step leaves an error of about its square
ENOUGH = tl.constexpr(-1.4)  # the logarithm of a part of the miss, which the nearest entries make up for
DENSEST = tl.constexpr(690.0)  # the logarithm of a number that is nearly the greatest one


# ------------------------------------------------------------------------------------ of entries


@triton.jit
def _load(x_at, cost_at, cost_column, start, n, WIDTH: tl.constexpr):
    """Scores and costs. What is masked, or not there, costs nothing."""
    column = start + tl.arange(0, WIDTH)
    x = double(tl.load(x_at + column, mask=column < n, other=float("-inf")))
    w = double(tl.load(cost_at + column.to(tl.int64) * cost_column, mask=column < n, other=0.0))
    return x, tl.where(x == float("-inf"), 0.0, w)


@triton.jit
def _standardized(x, w, hi, lo, tau, CDF: tl.constexpr, BY_VALUE: tl.constexpr):
    """z = (x − t a)/τ, of finite t; and 1 − z, where the support ends at 1."""
    if BY_VALUE:
        off, low = tl.fma(-hi, w, x), lo * w
    else:
        off, low = x - hi, lo
    z = (off - low) / tau
    return z, (z if full_support(CDF) else ((tau - off) + low) / tau)


@triton.jit
def _levels(x, w, place_, tau, BY_VALUE: tl.constexpr):
    """The thresholds at which entries have z = place_."""
    level = x - place_ * tau
    return level / tl.where(w > 0, w, 1.0) if BY_VALUE else level


@triton.jit
def _facts(x_at, cost_at, cost_column, n, WIDTH: tl.constexpr):
    """How many entries are bad; the costs of finite entries, and of those that are +inf, as pairs; and
    moments of the finite ones, weighted with the costs."""
    zero = tl.zeros((WIDTH,), tl.float64)
    free, free_rest, pinned, pinned_rest = zero, zero, zero, zero
    held = (zero, zero, zero)
    for start in range(0, n, WIDTH):
        x, w = _load(x_at, cost_at, cost_column, start, n, WIDTH)
        there, finite = x != float("-inf"), tl.abs(x) < float("inf")
        bad = (x != x) | (there & ~((w >= 0) & (w < float("inf"))))
        paid, d = tl.where(finite, w, 0.0), tl.where(finite, x, 0.0)
        free, free_rest = plus_exactly(free, free_rest, paid)
        pinned, pinned_rest = plus_exactly(pinned, pinned_rest, tl.where(x == float("inf"), w, 0.0))
        held = plus(held, (tl.where(bad, 1.0, 0.0).to(tl.float64), paid * d, paid * d * d))
    bad, mean, square = total(held, 1)
    return bad, exact_total(free, free_rest), exact_total(pinned, pinned_rest), mean, square


@triton.jit
def _cost_moments(x, w, given):
    w = tl.where(tl.abs(x) < float("inf"), w, 0.0)
    wx = w * tl.where(w > 0, x, 0.0)
    return w * w, w * wx, w * w * w


@triton.jit
def _evaluate(
    x_at, cost_at, cost_column, n, hi, lo, tau, near_up, near_down, power,
    CDF: tl.constexpr, BY_VALUE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What selected entries (z > median, or +inf) cost, as a pair; and what they lack, what the others spend,
    and the slopes of both, relative to near_up and near_down (:func:`.functions.side`)."""
    zero = tl.zeros((WIDTH,), tl.float64)
    spent, spent_rest = zero, zero
    held = (zero, zero, zero, zero)
    for start in range(0, n, WIDTH):
        x, cost = _load(x_at, cost_at, cost_column, start, n, WIDTH)
        finite = tl.abs(x) < float("inf")
        w = tl.where(finite, cost, 0.0)
        counts = w > 0
        z, rest = _standardized(tl.where(counts, x, 0.0), w, hi, lo, tau, CDF, BY_VALUE)
        above, size = z > median(power, CDF), tl.abs(z)
        near = tl.where(above, near_up, near_down)
        tail, density = side(z, rest, above, near, near - size, power, CDF)
        tail, slope = tl.where(counts, tail * w, 0.0), tl.where(counts, density * w, 0.0)
        if BY_VALUE:
            slope *= w
        spent, spent_rest = plus_exactly(spent, spent_rest, tl.where(above | ~finite, cost, 0.0))
        held = plus(
            held,
            (
                tl.where(above, tail, 0.0), tl.where(above, 0.0, tail),
                tl.where(above, slope, 0.0), tl.where(above, 0.0, slope),
            ),
        )  # fmt: skip
    return exact_total(spent, spent_rest), total(held, 1)


@triton.jit
def _finite(near):
    """|z| of the nearest entry; 0 if there is none."""
    return tl.where(near < float("inf"), tl.minimum(near, FARTHEST_Z), 0.0)


@triton.jit
def _cotangent(grad_at, grad_column, start, n, WIDTH: tl.constexpr):
    column = start + tl.arange(0, WIDTH)
    return double(tl.load(grad_at + column.to(tl.int64) * grad_column, mask=column < n, other=0.0))


@triton.jit
def _sums(
    terms: tl.constexpr, given, COUNT: tl.constexpr, x_at, cost_at, cost_column, n, WIDTH: tl.constexpr,
    grad_at=None, grad_column=0,
):  # fmt: skip
    """The sums over a row of the COUNT members of terms(x, w, given), or of terms(x, w, v, given) with the
    cotangent v."""
    held = ()
    for _ in tl.static_range(COUNT):
        held = held + (tl.zeros((WIDTH,), tl.float64),)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(0, n, WIDTH):
        x, w = _load(x_at, cost_at, cost_column, start, n, WIDTH)
        if grad_at is None:
            held = plus(held, terms(x, w, given))
        else:
            held = plus(held, terms(x, w, _cotangent(grad_at, grad_column, start, n, WIDTH), given))
    return total(held, 1)


@triton.jit
def _least(
    places: tl.constexpr, given, COUNT: tl.constexpr, x_at, cost_at, cost_column, n, WIDTH: tl.constexpr
):  # fmt: skip
    """The least of each of the COUNT members of places(x, w, given)."""
    held = ()
    for _ in tl.static_range(COUNT):
        held = held + (tl.full((WIDTH,), float("inf"), tl.float64),)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(0, n, WIDTH):
        x, w = _load(x_at, cost_at, cost_column, start, n, WIDTH)
        seen, lower = places(x, w, given), ()
        for i in tl.static_range(COUNT):
            lower = lower + (tl.minimum(held[i], seen[i]),)  # type: ignore[assignment]  # noqa: RUF005
        held = lower
    least = ()
    for i in tl.static_range(COUNT):
        least = least + (tl.min(held[i], axis=0),)  # type: ignore[assignment]  # noqa: RUF005
    return least


@triton.jit
def _range(x, w, given):
    """The levels at which entries have the share B/W, with room for rounding: least, and greatest with the
    sign changed; and the greatest cost, likewise."""
    quantile, tau, error = given[:3]
    BY_VALUE: tl.constexpr = given[3]
    counts = (tl.abs(x) < float("inf")) & (w > 0)
    room = 4e-15 * tl.abs(x) + (error + 8e-15 * (1 + tl.abs(quantile))) * tau
    low = _levels(x - room, w, quantile, tau, BY_VALUE)
    high = _levels(x + room, w, quantile, tau, BY_VALUE)
    return (
        tl.where(counts, low, float("inf")), tl.where(counts, -high, float("inf")),
        tl.where(counts, -w, float("inf")),
    )  # fmt: skip


@triton.jit
def _parted(x, w, given):
    """Of what is paid for: which entries are selected (z > median), which are not, and z."""
    hi, lo, tau, power = given[:4]
    CDF: tl.constexpr = given[4]
    BY_VALUE: tl.constexpr = given[5]
    counts = (tl.abs(x) < float("inf")) & (w > 0)
    z, _ = _standardized(tl.where(counts, x, 0.0), w, hi, lo, tau, CDF, BY_VALUE)
    above = z > median(power, CDF)
    return counts & above, counts & ~above, z


@triton.jit
def _distances(x, w, given):
    """|z| of what is selected, and of the rest."""
    above, below, z = _parted(x, w, given)
    return tl.where(above, z, float("inf")), tl.where(below, -z, float("inf"))


@triton.jit
def _levels_beside(x, w, given):
    """Of compact support: the levels next to t at which y leaves 1, and 0 with the sign changed."""
    tau = given[2]
    BY_VALUE: tl.constexpr = given[5]
    above, below, _ = _parted(x, w, given)
    level = _levels(x, w, tl.where(above, 1.0, 0.0), tau, BY_VALUE)
    return tl.where(above, level, float("inf")), tl.where(below, -level, float("inf"))


@triton.jit
def _beside(
    x_at, cost_at, cost_column, n, hi, lo, tau, power,
    CDF: tl.constexpr, BY_VALUE: tl.constexpr, WIDTH: tl.constexpr, grad_at=None, grad_column=0,
):  # fmt: skip
    """Of compact support: the level next to t at which selected entries leave y = 1, their score, their cost,
    their mean slope a, and Σ a v for the cotangent v, if there is one; and the same where others leave 0."""
    up, down = _least(
        _levels_beside, (hi, lo, tau, power, CDF, BY_VALUE), 2, x_at, cost_at, cost_column, n, WIDTH
    )
    zero = tl.zeros((WIDTH,), tl.float64)
    held = (zero, zero, zero, zero, zero, zero)
    up_x, down_x = zero - float("inf"), zero - float("inf")
    for start in range(0, n, WIDTH):
        x, w = _load(x_at, cost_at, cost_column, start, n, WIDTH)
        level, other = _levels_beside(x, w, (hi, lo, tau, power, CDF, BY_VALUE))
        at_up, at_down = level == up, other == down
        a = w if BY_VALUE else zero + 1
        v = zero
        if grad_at is not None:
            v = _cotangent(grad_at, grad_column, start, n, WIDTH)
        up_x = tl.maximum(up_x, tl.where(at_up, x, float("-inf")))
        down_x = tl.maximum(down_x, tl.where(at_down, x, float("-inf")))
        held = plus(
            held,
            (
                tl.where(at_up, w, 0.0), tl.where(at_down, w, 0.0),
                tl.where(at_up, w * a, 0.0), tl.where(at_down, w * a, 0.0),
                tl.where(at_up, a * v, 0.0), tl.where(at_down, a * v, 0.0),
            ),
        )  # fmt: skip
    up_cost, down_cost, up_paid, down_paid, up_priced, down_priced = total(held, 1)
    return (
        (up, tl.max(up_x, axis=0), up_cost, up_paid / up_cost, up_priced),
        (-down, tl.max(down_x, axis=0), down_cost, down_paid / down_cost, down_priced),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- of a row


@triton.jit
def _less(a_hi, a_lo, b_hi, b_lo):
    """The difference of two pairs."""
    return (a_hi - b_hi) + (a_lo - b_lo)


@triton.jit
def _to_log(t, unit):
    size = tl.log(1 + tl.minimum(tl.abs(t) / unit, FARTHEST))
    return tl.where(t < 0, -size, size)


@triton.jit
def _from_log(v, unit):
    size = (tl.exp(tl.abs(v)) - 1) * unit
    return tl.where(v < 0, -size, size)


@triton.jit
def _far(low, high):
    """Whether one is far larger than the other."""
    return ((low < 0) & ((high > 0) | (low < 4 * high))) | ((low >= 0) & (high > 4 * low))


@triton.jit
def _guess(
    free, mean, square, costs, products, cubes, share, tau, power, CDF: tl.constexpr, BY_VALUE: tl.constexpr
):
    """t, if x − t a were normal and had noise distributed as τF. Given are sums of w and of its products with
    x, x², and by value w, wx, w²."""
    own_mean, own_variance = moments(power, CDF)
    noise = tau * tau * own_variance
    normal = normal_icdf(share)
    own = (icdf(share, power, CDF) - own_mean) / tl.sqrt(noise * 0 + own_variance)
    x = mean / free
    spread = tl.maximum(square / free - x * x, 0.0)
    x_mean = x - tau * own_mean
    if BY_VALUE:
        a = costs / free
        both = products / free - x * a
        of_costs = tl.maximum(cubes / free - a * a, 0.0)
        t = x_mean / a
        for _ in tl.static_range(4):  # the spread depends on t, so that this is a fixed point
            variance = noise + tl.maximum(spread - 2 * t * both + t * t * of_costs, 0.0)
            t = (x_mean - (normal + (own - normal) * (noise / variance)) * tl.sqrt(variance)) / a
        return t
    else:
        variance = noise + spread
        return x_mean - (normal + (own - normal) * (noise / variance)) * tl.sqrt(variance)


@triton.jit
def _quantile(left, rest, free, power, CDF: tl.constexpr):
    """F⁻¹(left/free), from what is left of the budget and what it does not pay for."""
    least = tl.maximum(tl.minimum(left, rest) / free, TINY)
    if full_support(CDF):  # which are symmetric
        z = icdf(tl.minimum(least, 0.5), power, CDF)
        return tl.where(left < rest, z, -z)
    else:
        return icdf(tl.minimum(tl.maximum(left / free, TINY), 1.0), power, CDF)


@triton.jit
def _logs(over, tails, near, CDF: tl.constexpr):
    """P − Q; log P − log Q; log P and log Q; their rates in t/τ; and whether tails underflow that decide.

    P = excess + over and Q = lacking where more is spent than there is, and the other way round. Tails are
    relative to `near`.
    """
    lacking, excess, slope_above, slope_below = tails
    scale_up, scale_down = log_scale(near[0], CDF), log_scale(near[1], CDF)
    in_up, in_down = tl.exp(-scale_up), tl.exp(-scale_down)
    by_up, by_down = tl.where(over < 0, in_up, 1.0), tl.where(over > 0, in_down, 1.0)
    P = tl.maximum(over, 0.0) + excess * by_down
    Q = tl.maximum(-over, 0.0) + lacking * by_up
    log_P, log_Q = tl.log(P), tl.log(Q)
    scales = tl.where(over > 0, scale_up, -scale_down)
    scales = tl.where(over == 0, log_scales(near[0], near[1], CDF), scales)
    relative = (P - Q) / Q
    alike = tl.abs(relative) < 0.5
    ratio = tl.where(alike, log1p(tl.where(alike, relative, 0.0)), log_P - log_Q) + scales
    log_P -= tl.where(over > 0, 0.0, scale_down)
    log_Q -= tl.where(over < 0, 0.0, scale_up)
    deep = ((over >= 0) & (lacking < TINY)) | ((over <= 0) & (excess < TINY))
    miss = over + (excess * in_down - lacking * in_up)
    return miss, ratio, (log_P, log_Q), (slope_below * by_down / P, slope_above * by_up / Q), deep


@triton.jit
def _newton(over, tails, near, nearest, ratio, logs, rates, CDF: tl.constexpr):
    """Newton's step in t/τ for log P = log Q; and whether the nearest entries may make up for the miss."""
    # the logarithms of what lies within a τ or so of these
    up = tl.log(tails[0]) + log_scales(nearest[0], near[0], CDF)
    down = tl.log(tails[1]) + log_scales(nearest[1], near[1], CDF)
    rate = rates[0] + rates[1]
    if gaussian_tail(CDF):
        up, down = up + tl.log(1 + nearest[0]), down + tl.log(1 + nearest[1])
        # far out the square roots of logarithms are linear in t
        top = tl.where(over > 0, up, tl.where(over < 0, down, tl.maximum(up, down)))
        top = tl.maximum(top, tl.maximum(logs[0], logs[1]))
        root_P, root_Q = tl.sqrt(1 + 2 * (top - logs[0])), tl.sqrt(1 + 2 * (top - logs[1]))
        rate = 0.5 * (root_P + root_Q) * (rates[0] / root_P + rates[1] / root_Q)
    enough = tl.where(over > 0, up - logs[0], down - logs[1]) > ENOUGH
    return ratio / rate, (over == 0) | enough


@triton.jit
def _differences(over, tails, power, CDF: tl.constexpr):
    """Of compact support: P − Q; Newton's step in t/τ; and how far rounding may miss P = Q."""
    lacking, excess, slope_above, slope_below = tails
    P, Q = excess + tl.maximum(over, 0.0), lacking + tl.maximum(-over, 0.0)
    miss = P - Q
    step = miss / (slope_above + slope_below)
    if CDF == POWER:  # where one side alone moves, its tail is a power of the distance to where it ends
        alone = (over <= 0) & (slope_above == 0) & (slope_below > 0)
        ratio = tl.where(alone, Q / tl.where(alone, P, 1.0), 0.0)
        step = tl.where(alone, power * (P / slope_below) * (1 - tl.exp(tl.log(ratio) / power)), step)
    return miss, step, 2 * NOISE * tl.maximum(P, Q)


@triton.jit
def _step(
    state, size, rounding, step, reaches, jump_hi, jump_lo, tau, most, count, CDF: tl.constexpr
):  # fmt: skip
    """The state after an evaluation at t: t; the ends of the bracket, and its width some time ago; the least
    size of a miss so far. And whether that is all.

    Trials are a `jump`, if there is one; Newton's step, where the nearest entries make up for the miss; and
    the middle of the bracket, on a scale that is logarithmic if the ends are far from each other.
    """
    hi, lo, low_hi, low_lo, high_hi, high_lo, span, best = state
    done = (size <= rounding) | ((size <= IDLE * rounding) & (size >= 0.5 * best))
    fast = size <= 0.25 * best
    best = tl.minimum(best, size)
    low_hi, low_lo = tl.where(step > 0, hi, low_hi), tl.where(step > 0, lo, low_lo)
    high_hi, high_lo = tl.where(step < 0, hi, high_hi), tl.where(step < 0, lo, high_lo)
    width = _less(high_hi, high_lo, low_hi, low_lo)

    # a bracket that has not become half as wide in three evaluations is bisected, unless Newton's steps help
    third = count % 3 == 0
    slow = third & (width > 0.5 * span) & ~fast
    span = tl.where(third, width, span)
    unit = tau / most
    other_hi, other_lo = two_sum(low_hi, low_lo + 0.5 * width)
    middle = _from_log(0.5 * _to_log(low_hi, unit) + 0.5 * _to_log(high_hi, unit), unit)
    inner = _far(low_hi, high_hi) & (middle > low_hi) & (middle < high_hi)
    other_hi, other_lo = tl.where(inner, middle, other_hi), tl.where(inner, 0.0, other_lo)

    jumps = jump_hi == jump_hi
    newton_hi, newton_lo = two_sum(hi, lo + step * tau)
    newton_hi, newton_lo = tl.where(jumps, jump_hi, newton_hi), tl.where(jumps, jump_lo, newton_lo)
    inside = (_less(newton_hi, newton_lo, low_hi, low_lo) > 0) & (
        _less(newton_hi, newton_lo, high_hi, high_lo) < 0
    )
    inside = inside & (reaches | jumps) & ~slow
    new_hi, new_lo = tl.where(inside, newton_hi, other_hi), tl.where(inside, newton_lo, other_lo)
    stuck = ~(_less(new_hi, new_lo, low_hi, low_lo) > 0) | ~(_less(new_hi, new_lo, high_hi, high_lo) < 0)
    leap = _less(newton_hi, newton_lo, hi, lo) / tau
    last = tl.abs(tl.where(jumps | (leap == 0), leap, step)) * most <= (
        LAST if full_support(CDF) else 4 * ROUNDING
    )
    stays, goes = done | (stuck & ~last), last & ~done
    new_hi = tl.where(stays, hi, tl.where(goes, newton_hi, new_hi))
    new_lo = tl.where(stays, lo, tl.where(goes, newton_lo, new_lo))
    state = (new_hi, new_lo, low_hi, low_lo, high_hi, high_lo, span, best)
    return state, tl.where(stays | goes, 1, 0)


@triton.jit
def _threshold(
    x_at, cost_at, cost_column, n, budget, tau, slack, evaluations, power,
    CDF: tl.constexpr, BY_VALUE: tl.constexpr, AT_MOST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """hi and lo of a row."""
    bad, free, pinned, mean, square = _facts(x_at, cost_at, cost_column, n, WIDTH)
    slack *= free[0] + pinned[0]
    left, left_rest = two_sum(budget, -pinned[0])
    left_rest -= pinned[1]
    answered = (bad == 0) & (tau > 0) & (tau < float("inf")) & (left >= -slack)
    if not AT_MOST:
        answered = answered & (left <= free[0] + slack)
    tau = tl.where(answered, tau, 1.0)
    left, left_rest = tl.where(left > 0, left, 0.0), tl.where(left > 0, left_rest, 0.0)
    rest = _less(free[0], free[1], left, left_rest)
    # what is left of the costs to rounding is not a share that could be spent
    every = rest <= 16 * ROUNDING * free[0]
    settled = tl.where(every, -HUGE, tl.where(left == 0, HUGE, 0.0))
    hi, lo = tl.where(answered, settled, float("nan")), tl.where(answered, settled, float("nan"))
    live = answered if AT_MOST else answered & (settled == 0)
    if live:
        hi, lo = _solve(
            x_at, cost_at, cost_column, n, budget, left, rest, settled, free[0], mean, square, tau,
            evaluations, power, CDF, BY_VALUE, AT_MOST, WIDTH,
        )  # fmt: skip
    return hi, lo


@triton.jit
def _solve(
    x_at, cost_at, cost_column, n, budget, left, rest, settled, free, mean, square, tau, evaluations, power,
    CDF: tl.constexpr, BY_VALUE: tl.constexpr, AT_MOST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    quantile = _quantile(left, rest, free, power, CDF)
    low, high, most = _least(
        _range, (quantile, tau, icdf_error(CDF), BY_VALUE), 3, x_at, cost_at, cost_column, n, WIDTH
    )
    low, high, most = tl.maximum(low, -FARTHEST), tl.minimum(-high, FARTHEST), -most
    if not BY_VALUE:
        most = most * 0 + 1
    costs, products, cubes = free, free, free
    if BY_VALUE:
        costs, products, cubes = _sums(_cost_moments, (), 3, x_at, cost_at, cost_column, n, WIDTH)
    share = tl.minimum(tl.maximum(left / free, TINY), 1 - 1e-16)
    guess = _guess(free, mean, square, costs, products, cubes, share, tau, power, CDF, BY_VALUE)
    guess = tl.where((guess > low) & (guess < high), guess, 0.5 * low + 0.5 * high)
    zero = tl.zeros((), tl.float64)
    hi, lo = zero if AT_MOST else guess, zero
    infinite = zero + float("inf")
    state = (hi, lo, low, zero, high, zero, infinite, infinite)
    near_up, near_down = zero, zero
    status = 0
    remaining = evaluations
    while status == 0:
        hi, lo = state[0], state[1]
        spent, tails = _evaluate(
            x_at, cost_at, cost_column, n, hi, lo, tau, near_up, near_down, power, CDF, BY_VALUE, WIDTH
        )
        over, over_rest = two_sum(spent[0], -budget)
        over += over_rest + spent[1]
        jump_hi, jump_lo = zero + float("nan"), zero
        again = over != over
        if full_support(CDF):
            miss, ratio, logs, rates, deep = _logs(over, tails, (near_up, near_down), CDF)
            again = deep & (near_up + near_down == 0)
            next_up, next_down = near_up, near_down
            if (near_up + near_down == 0) & ~(tl.abs(ratio) <= 1):
                next_up, next_down = _least(
                    _distances, (hi, lo, tau, power, CDF, BY_VALUE), 2, x_at, cost_at, cost_column, n, WIDTH
                )
                next_up, next_down = _finite(next_up), _finite(next_down)
            step, reaches = _newton(
                over, tails, (near_up, near_down), (next_up, next_down), ratio, logs, rates, CDF
            )
            # deep in a gap the digits of the logarithms are few
            size, rounding = tl.abs(ratio) / (NOISE * (2 + tl.abs(logs[0]))), zero + 1
        else:
            lacking, excess, slope_above, slope_below = tails
            miss, step, rounding = _differences(over, tails, power, CDF)
            size, reaches = tl.abs(miss), slope_above + slope_below > 0
            next_up, next_down = near_up, near_down
            if ((over >= 0) & (lacking == 0)) | ((over <= 0) & (excess == 0)):
                jump_hi, jump_lo, between = _jump(
                    x_at, cost_at, cost_column, n, hi, lo, over, miss, tau, power, CDF, BY_VALUE, WIDTH
                )
                jump_hi = tl.where(reaches & ~between, float("nan"), jump_hi)
                status = tl.where(between, 2, status)
        if AT_MOST:  # noqa: SIM102 (known when it is compiled, the other is not)
            if remaining == evaluations:
                loose = miss <= 0
                again = again & ~loose
                status = tl.where(loose, 3, tl.where(settled != 0, 4, 0))
                jump_hi, jump_lo = guess, zero
        if again:
            near_up, near_down = next_up, next_down
        elif status == 0:
            state, status = _step(
                state, size, rounding, step, reaches, jump_hi, jump_lo, tau, most, remaining, CDF
            )
            near_up, near_down = zero, zero
        elif status == 2:
            state = (jump_hi, jump_lo) + state[2:]  # noqa: RUF005
        remaining -= 1
        status = tl.where((status == 0) & (remaining <= 0), 1, status)
    hi, lo = state[0], state[1]
    if AT_MOST:
        hi, lo = tl.where(status == 3, 0.0, hi), tl.where(status == 3, 0.0, lo)
        hi, lo = tl.where(status == 4, settled, hi), tl.where(status == 4, settled, lo)
    return hi, lo


@triton.jit
def _jump(
    x_at, cost_at, cost_column, n, hi, lo, over, miss, tau, power,
    CDF: tl.constexpr, BY_VALUE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of compact support, where one side of t has no entry with 0 < y < 1: the threshold at which the next
    entry alone makes up for the miss, NaN if it is not dear enough; or in a gap the limit of smooth CDFs, and
    whether it is one."""
    up, down = _beside(x_at, cost_at, cost_column, n, hi, lo, tau, power, CDF, BY_VALUE, WIDTH)
    between = (over == 0) & (up[0] >= down[0])
    flat = (up[3] * up[0] + down[3] * down[0]) / (up[3] + down[3])
    above = miss > 0
    share = tl.abs(miss) / tl.where(above, up[2], down[2])
    place_ = icdf(tl.where(above, 1 - share, share), power, CDF)
    x, a = tl.where(above, up[1], down[1]), tl.where(above, up[3], down[3])
    t = x / a
    rest = (tl.fma(-t, a, x) - tau * place_) / a
    t = tl.where((share > 0) & (share < 1), t, float("nan"))
    t, rest = two_sum(t, rest)
    return tl.where(between, flat, t), tl.where(between, 0.0, rest), between


@triton.jit
def _share(x, w, hi, lo, tau, power, CDF: tl.constexpr, BY_VALUE: tl.constexpr):
    """F(z), also of infinite x and t; z of the entries that these do not decide; and which ones they do."""
    infinite = tl.abs(hi) == HUGE
    # not "&": Triton's interpreter makes integers of scalar flags
    held = tl.where(infinite, w > 0 if BY_VALUE else w == w, False)
    decided = held | (tl.abs(x) == float("inf"))
    chosen = tl.where(tl.abs(x) == float("inf"), x > 0, hi < 0)
    hi, lo = tl.where(infinite, 0.0, hi), tl.where(infinite, 0.0, lo)
    z, rest = _standardized(tl.where(decided, 0.0, x), w, hi, lo, tau, CDF, BY_VALUE)
    above = z > median(power, CDF)
    tail, density = side(z, rest, above, 0.0, -tl.abs(z), power, CDF)
    y = tl.where(above, 1 - tail, tail)
    return tl.where(decided, tl.where(chosen, 1.0, 0.0), y), z, rest, tl.where(decided, 0.0, density), decided


@triton.jit(do_not_specialize=["evaluations"])
def _budgets(
    x_pointer, x_stride, cost_pointer, cost_row, cost_column,
    budget_pointer, budget_stride, budget_high, budget_low, budget_rest,
    tau_pointer, tau_stride, tau_high, tau_low, out_pointer, hi_pointer, lo_pointer, n, slack, evaluations,
    power_high, power_low,
    CDF: tl.constexpr, BY_VALUE: tl.constexpr, AT_MOST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    power = joined(power_high, power_low)
    x_at, cost_at = x_pointer + row * x_stride, cost_pointer + row * cost_row
    budget = number64(budget_pointer, budget_stride, budget_high, budget_low, row) + budget_rest
    tau = number64(tau_pointer, tau_stride, tau_high, tau_low, row)
    hi, lo = _threshold(
        x_at, cost_at, cost_column, n, budget, tau, slack, evaluations, power, CDF, BY_VALUE, AT_MOST, WIDTH
    )
    tl.store(hi_pointer + row, hi)
    tl.store(lo_pointer + row, lo)
    for start in range(0, n, WIDTH):
        x, w = _load(x_at, cost_at, cost_column, start, n, WIDTH)
        y, _, _, _, _ = _share(x, w, hi, lo, tau, power, CDF, BY_VALUE)
        y = tl.where(hi == hi, y, hi)
        column = start + tl.arange(0, WIDTH)
        store(out_pointer + row * n + column, y, column < n)


# ---------------------------------------------------------------------------------------- backward


@triton.jit
def _closest(x, w, given):
    """The least |z| of what is paid for."""
    hi, lo, tau, power = given[:4]
    CDF: tl.constexpr = given[4]
    BY_VALUE: tl.constexpr = given[5]
    _, z, _, _, decided = _share(x, w, hi, lo, tau, power, CDF, BY_VALUE)
    return (tl.where(decided | ~(w > 0), float("inf"), tl.abs(z)),)


@triton.jit
def _relative(z, rest, density, near, power, CDF: tl.constexpr):
    """f in units of its value where |z| = near. What is free may lie nearer, and stays finite."""
    if full_support(CDF):
        a = tl.minimum(tl.abs(z), FARTHEST_Z)
        most = 2 * DENSEST / tl.maximum(near + a, 1e-300) if gaussian_tail(CDF) else DENSEST
        _, relative = side(z, rest, z > median(power, CDF), near, tl.minimum(near - a, most), power, CDF)
        return tl.where(density == density, relative, density)
    else:
        return density


@triton.jit
def _slopes(x, w, v, hi, lo, tau, near, power, CDF: tl.constexpr, BY_VALUE: tl.constexpr):
    """y, z, v f, and f relative to near."""
    y, z, rest, density, decided = _share(x, w, hi, lo, tau, power, CDF, BY_VALUE)
    relative = tl.where(decided, 0.0, _relative(z, rest, density, near, power, CDF))
    return y, z, tl.where(density == 0, 0.0, v * density), relative


@triton.jit
def _pull(x, w, v, given):
    """Σ w a f and Σ a v f, relative to near; Σ v f a and Σ v f z; and Σ w f z, relative to near."""
    hi, lo, tau, near, power = given[:5]
    CDF: tl.constexpr = given[5]
    BY_VALUE: tl.constexpr = given[6]
    _, z, u, relative = _slopes(x, w, v, hi, lo, tau, near, power, CDF, BY_VALUE)
    paid = w * relative
    priced = v * relative
    moment = tl.where(paid == 0, 0.0, paid * z)
    if BY_VALUE:
        return w * paid, w * priced, w * u, u * z, moment
    else:
        return paid, priced, u, u * z, moment


@triton.jit
def _pull_budgets(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low,
    x_pointer, x_stride, cost_pointer, cost_row, cost_column, hi_pointer, lo_pointer,
    tau_pointer, tau_stride, tau_high, tau_low,
    dx_pointer, dcost_pointer, dbudget_pointer, dtau_pointer, n, power_high, power_low,
    CDF: tl.constexpr, BY_VALUE: tl.constexpr, AT_MOST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    power = joined(power_high, power_low)
    x_at, cost_at = x_pointer + row * x_stride, cost_pointer + row * cost_row
    grad_at = grad_pointer + row * grad_row
    hi, lo = tl.load(hi_pointer + row), tl.load(lo_pointer + row)
    tau = number64(tau_pointer, tau_stride, tau_high, tau_low, row)
    grad_lo = number64(grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low, row)
    fixed = tl.abs(hi) == HUGE
    if AT_MOST:
        fixed = fixed | ((hi == 0) & (lo == 0))

    near = hi * 0
    if full_support(CDF):
        (near,) = _least(
            _closest, (hi, lo, tau, power, CDF, BY_VALUE), 1, x_at, cost_at, cost_column, n, WIDTH
        )
        near = tl.minimum(near, FARTHEST_Z)
    mass, mean, pull, u_moment, moment = _sums(
        _pull, (hi, lo, tau, near, power, CDF, BY_VALUE), 5,
        x_at, cost_at, cost_column, n, WIDTH, grad_at, grad_column,
    )  # fmt: skip
    dead = (mass == 0) | fixed
    mass = tl.where(dead, 1.0, mass)
    through_t = tl.where(fixed, 0.0, grad_lo - pull / tau)
    spread = tl.where(dead, 0.0, through_t / mass)
    dtau = -u_moment / tau - tl.where(dead, 0.0, through_t * (moment / mass))
    lean = tl.exp(tl.log(tau) - tl.log(mass) + log_scale(near, CDF))
    price = tl.where(dead, 0.0, mean / mass)
    price -= tl.where(dead | (grad_lo == 0), 0.0, grad_lo * lean)
    if not full_support(CDF):  # noqa: SIM102 (the first is known to the compiler)
        if dead & ~fixed:
            up, down = _beside(
                x_at, cost_at, cost_column, n, hi, lo, tau, power, CDF, BY_VALUE, WIDTH, grad_at, grad_column
            )
            price = up[4] / up[2] + down[4] / down[2]
            price /= up[3] + down[3]
    bad = hi != hi
    price = tl.where(bad, hi, price)
    tl.store(dbudget_pointer + row, price)
    tl.store(dtau_pointer + row, tl.where(bad, hi, dtau))
    t = tl.where(fixed, 0.0, hi + lo)
    for start in range(0, n, WIDTH):
        x, w = _load(x_at, cost_at, cost_column, start, n, WIDTH)
        v = _cotangent(grad_at, grad_column, start, n, WIDTH)
        share, _, u, relative = _slopes(x, w, v, hi, lo, tau, near, power, CDF, BY_VALUE)
        dx = tl.where(bad, hi, u / tau + spread * w * relative)
        dcost = -price * share
        if BY_VALUE:
            dcost -= t * dx
        dcost = tl.where(x == float("-inf"), 0.0, dcost)
        column = start + tl.arange(0, WIDTH)
        store(dx_pointer + row * n + column, dx, column < n)
        store(dcost_pointer + row * n + column, dcost, column < n)


# -------------------------------------------------------------------------------------------- the host

KERNELS = (_budgets, _pull_budgets)


def _which(n: int, cdf: str, by: str, at_most: bool) -> dict[str, int]:
    width = min(WIDTH, max(64, triton.next_power_of_2(n)))
    constants = {"CDF": layout.cdf_id(cdf), "BY_VALUE": by == "value", "AT_MOST": at_most, "WIDTH": width}
    return {**constants, "num_warps": width // 64}


def soft_budget(
    x: Tensor, cost: Tensor, budget: Tensor, tau: Tensor, cdf: str, shape: float, by: str, at_most: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_budget.soft_budget`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        return reference.soft_budget(x, cost, budget, tau, cdf, shape, by, at_most)
    y = x.new_empty(x.shape)
    hi = torch.empty(batch, dtype=torch.float64, device=x.device)
    lo = torch.empty_like(hi)
    slack = reference.SLACK * torch.finfo(cost.dtype).eps
    amount = layout.values(budget, batch, x.device)
    launch(
        _budgets, hi.numel(),
        *layout.rows(x, n), *layout.matrix(cost, x), *amount, layout.rest(budget, amount),
        *layout.values(tau, batch, x.device), y, hi, lo, n, slack, EVALUATIONS,
        *layout.power(cdfs.resolve(cdf, shape)), **_which(n, cdf, by, at_most),
    )  # fmt: skip
    return y, hi, lo


def soft_budget_backward(
    grad: Tensor, grad_lo: Tensor, x: Tensor, cost: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str,
    shape: float, by: str, at_most: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`soft_budget.soft_budget_backward`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        return reference.soft_budget_backward(
            grad, grad_lo, x, cost, hi, lo, tau, cdf, shape, by, at_most
        )  # fmt: skip
    dx, dcost = x.new_empty(x.shape), cost.new_empty(x.shape)
    dbudget, dtau = hi.new_empty(batch), hi.new_empty(batch)
    launch(
        _pull_budgets, dbudget.numel(),
        *layout.matrix(grad, x), *layout.values(grad_lo, batch, x.device), *layout.rows(x, n),
        *layout.matrix(cost, x), hi.contiguous(), lo.contiguous(), *layout.values(tau, batch, x.device),
        dx, dcost, dbudget, dtau, n,
        *layout.power(cdfs.resolve(cdf, shape)), **_which(n, cdf, by, at_most),
    )  # fmt: skip
    return dx, dcost, dbudget, dtau
