"""From the sums of one evaluation to the next trial: the steps of the search in float64 (:mod:`.float64`)."""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.fast import two_sum
from khot._kernels.triton.functions import (
    POWER,
    TINY,
    full_support,
    gaussian_tail,
    log1p,
    log_scale,
    log_scales,
)
from khot._kernels.triton.guard import stalls

FARTHEST = tl.constexpr(1e300)
ROUNDING = tl.constexpr(2.0**-52)
NOISE = tl.constexpr(1e-15)  # of log P − log Q, for each unit of the logarithms
IDLE = tl.constexpr(1e3)  # so many times as much may be noise, if it does not fall any more
LAST = tl.constexpr(1e-9)  # in units of z: a shorter step leaves an error of about its square
ENOUGH = tl.constexpr(-1.4)  # the logarithm of a part of the miss, which the nearest entries make up for


# ------------------------------------------------------------------------------------ Newton's step


@triton.jit
def logs(over, tails, near, CDF: tl.constexpr):
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
def newton(over, tails, near, nearest, ratio, logs, rates, CDF: tl.constexpr):
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
def differences(over, tails, power, CDF: tl.constexpr):
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


# ---------------------------------------------------------------------------------- the next trial


@triton.jit
def next_state(state, trial, jump, tau, most, count, CDF: tl.constexpr):
    """The state after an evaluation at t: t; the ends of the bracket, and its width some time ago; the least
    size of a miss so far. And whether that is all.

    Trials are a `jump`, if there is one; Newton's step, where the nearest entries make up for the miss; and
    the middle of the bracket, on a scale that is logarithmic if the ends are far from each other.
    """
    hi, lo, low_hi, low_lo, high_hi, high_lo, span, best = state
    _, size, rounding, step, reaches = trial
    jump_hi, jump_lo = jump
    done = (size <= rounding) | ((size <= IDLE * rounding) & (size >= 0.5 * best))
    fast = size <= 0.25 * best
    best = tl.minimum(best, size)
    low_hi, low_lo = tl.where(step > 0, hi, low_hi), tl.where(step > 0, lo, low_lo)
    high_hi, high_lo = tl.where(step < 0, hi, high_hi), tl.where(step < 0, lo, high_lo)
    width = less(high_hi, high_lo, low_hi, low_lo)

    slow, span = stalls(width, span, fast, count)
    unit = tau / most
    other_hi, other_lo = two_sum(low_hi, low_lo + 0.5 * width)
    middle = _from_log(0.5 * _to_log(low_hi, unit) + 0.5 * _to_log(high_hi, unit), unit)
    inner = _far(low_hi, high_hi) & (middle > low_hi) & (middle < high_hi)
    other_hi, other_lo = tl.where(inner, middle, other_hi), tl.where(inner, 0.0, other_lo)

    jumps = jump_hi == jump_hi
    newton_hi, newton_lo = two_sum(hi, lo + step * tau)
    newton_hi, newton_lo = tl.where(jumps, jump_hi, newton_hi), tl.where(jumps, jump_lo, newton_lo)
    inside = (less(newton_hi, newton_lo, low_hi, low_lo) > 0) & (
        less(newton_hi, newton_lo, high_hi, high_lo) < 0
    )
    inside = inside & (reaches | jumps) & ~slow
    new_hi, new_lo = tl.where(inside, newton_hi, other_hi), tl.where(inside, newton_lo, other_lo)
    stuck = ~(less(new_hi, new_lo, low_hi, low_lo) > 0) | ~(less(new_hi, new_lo, high_hi, high_lo) < 0)
    leap = less(newton_hi, newton_lo, hi, lo) / tau
    last = tl.abs(tl.where(jumps | (leap == 0), leap, step)) * most <= (
        LAST if full_support(CDF) else 4 * ROUNDING
    )
    stays, goes = done | (stuck & ~last), last & ~done
    new_hi = tl.where(stays, hi, tl.where(goes, newton_hi, new_hi))
    new_lo = tl.where(stays, lo, tl.where(goes, newton_lo, new_lo))
    state = (new_hi, new_lo, low_hi, low_lo, high_hi, high_lo, span, best)
    return state, stays | goes


@triton.jit
def less(a_hi, a_lo, b_hi, b_lo):
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
