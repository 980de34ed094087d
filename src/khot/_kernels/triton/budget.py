"""Soft budgets, forward and backward: a program a row, which it reads a chunk at a time, in float64.

The equations, the order of the edge cases and the gradients are the reference's
(`_kernels.reference.soft_budget`). The root is found by Newton's method on log P = log Q inside a bracket,
whose ends are kept relative to hi, so that they have digits that hi has not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import soft_budget as reference
from khot._kernels.triton import layout
from khot._kernels.triton.fast import double, joined, plus, store, total, two_sum
from khot._kernels.triton.functions import (
    HUGE,
    TINY,
    full_support,
    gaussian_tail,
    icdf,
    icdf_error,
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
LOG_EVALUATIONS = tl.constexpr(8)
WIDTH = 1024  # entries that a program holds at a time: two of a thread, as float64 fills registers
FARTHEST = tl.constexpr(1e300)
FARTHEST_Z = tl.constexpr(1e150)  # its square stays finite
ROUNDING = tl.constexpr(2.0**-52)
CLOSE = tl.constexpr(reference.CLOSE)
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
def _standardized(x, w, hi, lo, tau, power, CDF: tl.constexpr, BY_VALUE: tl.constexpr):
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
def _costs(x, w, given):
    """How many entries are bad; the costs of finite entries, and of those that are +inf; and moments of the
    finite ones, weighted with the costs."""
    there, finite = x != float("-inf"), tl.abs(x) < float("inf")
    bad = (x != x) | (there & ~((w >= 0) & (w < float("inf"))))
    free = tl.where(finite, w, 0.0)
    d = tl.where(finite, x, 0.0)
    pinned = tl.where(x == float("inf"), w, 0.0)
    return tl.where(bad, 1.0, 0.0).to(tl.float64), free, pinned, free * d, free * d * d


@triton.jit
def _cost_moments(x, w, given):
    w = tl.where(tl.abs(x) < float("inf"), w, 0.0)
    wx = w * tl.where(w > 0, x, 0.0)
    return w * w, w * wx, w * w * w


@triton.jit
def _spend(x, w, given):
    """What selected entries (z > median) cost and lack, what the others spend, and the slopes of both."""
    hi, lo, tau, near_up, near_down, power = given[:6]
    CDF: tl.constexpr = given[6]
    BY_VALUE: tl.constexpr = given[7]
    w = tl.where(tl.abs(x) < float("inf"), w, 0.0)
    z, rest = _standardized(tl.where(w > 0, x, 0.0), w, hi, lo, tau, power, CDF, BY_VALUE)
    above = z > median(power, CDF)
    near = tl.where(above, near_up, near_down)
    tail, density = side(z, rest, above, near, near - tl.abs(z), power, CDF)
    tail, slope = tl.where(w > 0, tail * w, 0.0), tl.where(w > 0, density * w, 0.0)
    if BY_VALUE:
        slope *= w
    return (
        tl.where(above, w, 0.0), tl.where(above, tail, 0.0), tl.where(above, 0.0, tail),
        tl.where(above, slope, 0.0), tl.where(above, 0.0, slope),
    )  # fmt: skip


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
def _ends(
    places: tl.constexpr, given, x_at, cost_at, cost_column, n, WIDTH: tl.constexpr
):  # fmt: skip
    """The least of the first, and the greatest of the second of what places(x, w, given) gives."""
    least = tl.full((WIDTH,), float("inf"), tl.float64)
    greatest = tl.full((WIDTH,), float("-inf"), tl.float64)
    for start in range(0, n, WIDTH):
        x, w = _load(x_at, cost_at, cost_column, start, n, WIDTH)
        low, high = places(x, w, given)
        least, greatest = tl.minimum(least, low), tl.maximum(greatest, high)
    return tl.min(least, axis=0), tl.max(greatest, axis=0)


@triton.jit
def _range(x, w, given):
    """The levels at which entries have the share B/W, with room for the error of its quantile."""
    quantile, tau, error = given[:3]
    BY_VALUE: tl.constexpr = given[3]
    counts = (tl.abs(x) < float("inf")) & (w > 0)
    low = _levels(x, w, quantile + error, tau, BY_VALUE)
    high = _levels(x, w, quantile - error, tau, BY_VALUE)
    return tl.where(counts, low, float("inf")), tl.where(counts, high, float("-inf"))


@triton.jit
def _parted(x, w, given):
    """Of what is paid for: which entries are selected (z > median), which are not, and z."""
    hi, lo, tau, power = given[:4]
    CDF: tl.constexpr = given[4]
    BY_VALUE: tl.constexpr = given[5]
    counts = (tl.abs(x) < float("inf")) & (w > 0)
    z, _ = _standardized(tl.where(counts, x, 0.0), w, hi, lo, tau, power, CDF, BY_VALUE)
    above = z > median(power, CDF)
    return counts & above, counts & ~above, z


@triton.jit
def _beside(x, w, given):
    """The levels next to t: of compact support, where y leaves 1 or 0."""
    tau = given[2]
    CDF: tl.constexpr = given[4]
    BY_VALUE: tl.constexpr = given[5]
    above, below, _ = _parted(x, w, given)
    up = _levels(x, w, 0.0 if full_support(CDF) else 1.0, tau, BY_VALUE)
    down = _levels(x, w, 0.0, tau, BY_VALUE)
    return tl.where(above, up, float("inf")), tl.where(below, down, float("-inf"))


@triton.jit
def _nearest(x, w, given):
    """The least z of what is selected, and the greatest of the rest."""
    above, below, z = _parted(x, w, given)
    return tl.where(above, z, float("inf")), tl.where(below, z, float("-inf"))


# ---------------------------------------------------------------------------------------- of a row


@triton.jit
def _key(v):
    bits = tl.abs(v).to(tl.int64, bitcast=True)
    return tl.where(v >= 0, bits, -bits)


@triton.jit
def _between(low, high):
    """A point between the two: the middle, or that of their bits where one is far larger than the other."""
    a, b = _key(low), _key(high)
    half = (a & b) + ((a ^ b) >> 1)
    by_bits = tl.abs(half).to(tl.float64, bitcast=True)
    by_bits = tl.where(half < 0, -by_bits, by_bits)
    far = ((low < 0) & ((high > 0) | (low < 4 * high))) | ((low >= 0) & (high > 4 * low))
    return tl.where(far & (tl.abs(by_bits) < float("inf")), by_bits, 0.5 * low + 0.5 * high)


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
def _step(sums, state, left, scale, noise, tau, count, CDF: tl.constexpr):
    """The state after the sums at t: hi, lo; the bracket, relative to hi; the best t so far, and its miss;
    the width of the bracket some time ago; and whether this was the last step, or t lies in a gap."""
    spent, lacking, excess, slope_above, slope_below = sums
    hi, lo, low, high, best_hi, best_lo, best, span = state
    over = spent - left
    over = tl.where(tl.abs(over) <= 8 * ROUNDING * tl.maximum(spent, left), 0.0, over)
    P, Q = excess + tl.maximum(over, 0.0), lacking + tl.maximum(-over, 0.0)
    miss = P - Q
    if full_support(CDF):
        gap = (over == 0) & (tl.minimum(lacking, excess) < TINY)
    else:
        gap = (over == 0) & (lacking == 0) & (excess == 0)
    size = tl.abs(miss)
    done = (size <= 1e-15 * scale) | ((size <= noise) & (size >= 0.5 * best))
    better = size < best
    best_hi, best_lo = tl.where(better, hi, best_hi), tl.where(better, lo, best_lo)
    best = tl.where(better, size, best)
    low, high = tl.where(miss > 0, tl.maximum(low, lo), low), tl.where(miss < 0, tl.minimum(high, lo), high)

    step = tau * miss / (slope_above + slope_below)
    if full_support(CDF):
        logs = tau * (tl.log(P) - tl.log(Q)) / (slope_below / P + slope_above / Q)
        step = tl.where(tl.abs(logs) < float("inf"), logs, step)
    close = size <= CLOSE * scale
    # a bracket that has not become half as wide in three evaluations is bisected
    third = count % 3 == 0
    slow = third & (high - low > 0.5 * span) & ~close
    span = tl.where(third, high - low, span)
    room = tl.where(close, 8 * ROUNDING * tl.abs(hi), 0.0)  # the ends were seen from another hi
    trial = lo + step
    other = _between(hi + low, hi + high) - hi
    # where t has no digits left, lo may be far smaller than the last one
    last = high - low <= 8 * ROUNDING * tl.abs(hi)
    inner = tl.where(last, _between(low, high), 0.5 * low + 0.5 * high)
    other = tl.where((other > low) & (other < high), other, inner)
    newton = (trial > low - room) & (trial < high + room) & ~slow
    done = done | ~(newton | ((other > low) & (other < high)))
    trial = tl.where(newton, trial, other)
    # close to the root another hi would round the products with the costs anew
    new_hi, new_lo = two_sum(hi, trial)
    moved = tl.where(close, 0.0, new_hi - hi)
    new_hi, new_lo = tl.where(close, hi, new_hi), tl.where(close, trial, new_lo)
    return (
        (new_hi, new_lo, low - moved, high - moved, best_hi, best_lo, best, span),
        tl.where(gap, 2, tl.where(done, 1, 0)),
    )  # fmt: skip


@triton.jit
def _threshold(
    x_at, cost_at, cost_column, n, budget, tau, slack, evaluations, power,
    CDF: tl.constexpr, BY_VALUE: tl.constexpr, AT_MOST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """hi and lo of a row."""
    bad, free, pinned, mean, square = _sums(_costs, (), 5, x_at, cost_at, cost_column, n, WIDTH)
    slack *= free + pinned
    left = budget - pinned
    answered = (bad == 0) & (tau > 0) & (tau < float("inf")) & (left >= -slack)
    if not AT_MOST:
        answered = answered & (left <= free + slack)
    tau = tl.where(answered, tau, 1.0)
    left = tl.maximum(left, 0.0)
    # what is left of the costs to rounding is not a share that could be spent
    every = left >= free - 16 * ROUNDING * free
    settled = tl.where(every, -HUGE, tl.where(left == 0, HUGE, 0.0))
    solvable = answered & (settled == 0)
    if AT_MOST:
        zero = free * 0
        spent, lacking, excess, _, _ = _sums(
            _spend, (zero, zero, tau, 0.0, 0.0, power, CDF, BY_VALUE), 5,
            x_at, cost_at, cost_column, n, WIDTH,
        )  # fmt: skip
        loose = spent - lacking + excess <= left
        settled, solvable = tl.where(loose, 0.0, settled), solvable & ~loose
    hi, lo = tl.where(answered, settled, float("nan")), tl.where(answered, settled, float("nan"))
    if solvable:
        hi, lo = _solve(
            x_at, cost_at, cost_column, n, left, free, mean, square, tau, evaluations, power,
            CDF, BY_VALUE, AT_MOST, WIDTH,
        )  # fmt: skip
    return hi, lo


@triton.jit
def _solve(
    x_at, cost_at, cost_column, n, left, free, mean, square, tau, evaluations, power,
    CDF: tl.constexpr, BY_VALUE: tl.constexpr, AT_MOST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    share = tl.minimum(tl.maximum(left / free, TINY), 1 - 1e-16)
    low, high = _ends(
        _range, (icdf(share, power, CDF), tau, icdf_error(CDF), BY_VALUE),
        x_at, cost_at, cost_column, n, WIDTH,
    )  # fmt: skip
    low, high = tl.maximum(low, -FARTHEST), tl.minimum(high, FARTHEST)
    pad = 1e-14 * tl.maximum(tl.abs(low), tl.abs(high))
    low, high = low - pad, high + pad
    if AT_MOST:
        low = tl.maximum(low, 0.0)
    costs, products, cubes = free, free, free
    if BY_VALUE:
        costs, products, cubes = _sums(_cost_moments, (), 3, x_at, cost_at, cost_column, n, WIDTH)
    guess = _guess(free, mean, square, costs, products, cubes, share, tau, power, CDF, BY_VALUE)
    hi = tl.where((guess > low) & (guess < high), guess, 0.5 * low + 0.5 * high)
    lo = hi * 0
    scale = tl.maximum(tl.minimum(left, free - left), 1e-13 * left)
    noise = tl.maximum(1e-14 * scale, 8 * ROUNDING * left)  # below it, rounding keeps a miss up
    infinite = lo + float("inf")
    state = (hi, lo, low - hi, high - hi, hi, lo, infinite, infinite)
    status = 0
    count = 1
    while status == 0:
        hi, lo = state[0], state[1]
        sums = _sums(
            _spend, (hi, lo, tau, 0.0, 0.0, power, CDF, BY_VALUE), 5, x_at, cost_at, cost_column, n, WIDTH
        )
        state, status = _step(sums, state, left, scale, noise, tau, count, CDF)
        count += 1
        status = tl.where((status == 0) & (count > evaluations), 1, status)
    if status == 2:
        hi, lo = _in_gap(x_at, cost_at, cost_column, n, hi, lo, tau, power, CDF, BY_VALUE, WIDTH)
    else:
        hi, lo = state[4], state[5]
    return hi, lo


@triton.jit
def _in_gap(
    x_at, cost_at, cost_column, n, hi, lo, tau, power,
    CDF: tl.constexpr, BY_VALUE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """t in the gap that it lies in: its middle, or, with tails, where log P = log Q."""
    up, down = _ends(_beside, (hi, lo, tau, power, CDF, BY_VALUE), x_at, cost_at, cost_column, n, WIDTH)
    # with no entry on one side, nothing or everything is paid for, but for rounding
    settled = tl.where(down == float("-inf"), -HUGE, tl.where(up == float("inf"), HUGE, 0.0))
    hi, lo = tl.where(settled == 0, 0.5 * up + 0.5 * down, settled), settled
    if full_support(CDF):
        left = tl.where(settled == 0, LOG_EVALUATIONS, 0)
        while left > 0:
            near_up, near_down = _ends(
                _nearest, (hi, lo, tau, power, CDF, BY_VALUE), x_at, cost_at, cost_column, n, WIDTH
            )
            near_up, near_down = tl.maximum(near_up, 0.0), tl.maximum(-near_down, 0.0)
            _, A, B, slope_above, slope_below = _sums(
                _spend, (hi, lo, tau, near_up, near_down, power, CDF, BY_VALUE), 5,
                x_at, cost_at, cost_column, n, WIDTH,
            )  # fmt: skip
            ratio = tl.log(B) - tl.log(A) + log_scales(near_up, near_down, CDF)
            step = tau * ratio / (slope_above / A + slope_below / B)
            usable = tl.abs(step) < float("inf")
            lo = tl.where(usable, lo + step, lo)  # another hi would round the products with the costs anew
            left = tl.where(usable & (tl.abs(step) > 1e-12 * tau), left - 1, 0)
    return hi, lo


@triton.jit
def _share(x, w, hi, lo, tau, power, CDF: tl.constexpr, BY_VALUE: tl.constexpr):
    """F(z), also of infinite x and t; z of the entries that these do not decide; and which ones they do."""
    infinite = tl.abs(hi) == HUGE
    # not "&": Triton's interpreter makes integers of scalar flags
    held = tl.where(infinite, w > 0 if BY_VALUE else w == w, False)
    decided = held | (tl.abs(x) == float("inf"))
    chosen = tl.where(tl.abs(x) == float("inf"), x > 0, hi < 0)
    hi, lo = tl.where(infinite, 0.0, hi), tl.where(infinite, 0.0, lo)
    z, rest = _standardized(tl.where(decided, 0.0, x), w, hi, lo, tau, power, CDF, BY_VALUE)
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
    near = tl.where(decided | ~(w > 0), float("inf"), tl.abs(z))
    return near, near


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
def _edges(x, w, v, given):
    """Of the entries next to a gap, on either side: Σ w a and Σ a v."""
    hi, lo, tau, up, down, power = given[:6]
    CDF: tl.constexpr = given[6]
    BY_VALUE: tl.constexpr = given[7]
    _, z, _, _, decided = _share(x, w, hi, lo, tau, power, CDF, BY_VALUE)
    payable = (w > 0) & ~decided
    above = z > median(power, CDF)
    leaves, enters = _levels(x, w, 1.0, tau, BY_VALUE), _levels(x, w, 0.0, tau, BY_VALUE)
    at_up, at_down = payable & above & (leaves == up), payable & ~above & (enters == down)
    a = w if BY_VALUE else w * 0 + 1
    return (
        tl.where(at_up, w * a, 0.0), tl.where(at_up, a * v, 0.0),
        tl.where(at_down, w * a, 0.0), tl.where(at_down, a * v, 0.0),
    )  # fmt: skip


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
        ends = _ends(_closest, (hi, lo, tau, power, CDF, BY_VALUE), x_at, cost_at, cost_column, n, WIDTH)
        near = tl.minimum(ends[0], FARTHEST_Z)
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
            up, down = _ends(
                _beside, (hi, lo, tau, power, CDF, BY_VALUE), x_at, cost_at, cost_column, n, WIDTH
            )
            up_paid, up_priced, down_paid, down_priced = _sums(
                _edges, (hi, lo, tau, up, down, power, CDF, BY_VALUE), 4,
                x_at, cost_at, cost_column, n, WIDTH, grad_at, grad_column,
            )  # fmt: skip
            price = 0.5 * up_priced / tl.where(up_paid == 0, 1.0, up_paid)
            price += 0.5 * down_priced / tl.where(down_paid == 0, 1.0, down_paid)
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
