"""What is given of a two-sided assignment; and its rows' thresholds for those of the columns, in float64.

Each row finds its threshold inside a bracket, where the logarithms of what is above and below it are
compared, so that gaps of many τ are solved, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.reference import soft_assign as reference
from khot._kernels.triton.fast import double, total
from khot._kernels.triton.float64_steps import ROUNDING
from khot._kernels.triton.float64_sums import FARTHEST_Z
from khot._kernels.triton.functions import TINY, icdf, icdf_error, log_scale, log_scales, moments, side
from khot._kernels.triton.guard import stalls

TILE = 512  # entries that a program holds at a time: two of a thread, as float64 fills registers
EVALUATIONS = tl.constexpr(100)  # of a row, at most
LAST = tl.constexpr(1e-8)  # in τ: after a shorter step a row is exact
CLOSE = tl.constexpr(1e-2)  # in τ: below it steps of Newton's method need no bisection
INF = tl.constexpr(float("inf"))
LEAST = tl.constexpr(1e-300)  # the inverse of a smaller sum of densities overflows: such a row does not move
EQUAL, SLACK = tl.constexpr(reference.EQUAL), tl.constexpr(reference.SLACK)


@triton.jit
def flag(found):
    """1 if any of the flags is up, otherwise 0: the interpreter makes other integers of scalar flags."""
    return tl.max(tl.where(found, 1, 0), axis=0)


@triton.jit
def load_rows(x_at, x_stride, start, m, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Which rows these are, which of them there are, and their scores."""
    row = start + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = row < m
    at = x_at + (row[:, None] * x_stride + column[None, :])
    x = tl.load(at, mask=there[:, None] & (column < n)[None, :], other=float("-inf"))
    return row, there, double(x)


@triton.jit
def load_columns(capacity, bias, tau, matrix, n, WIDTH: tl.constexpr):
    """The capacities, the first thresholds and τ of a matrix."""
    column = tl.arange(0, WIDTH)
    there, far = column < n, column.to(tl.int64)
    at = capacity.pointer + matrix * capacity.row + far * capacity.column
    room = double(tl.load(at, mask=there, other=0.0))
    at = bias.pointer + matrix * bias.row + far * bias.column
    start = double(tl.load(at, mask=there, other=0.0))
    return room, start, double(tl.load(tau.pointer + matrix * tau.stride))


@triton.jit
def balanced(capacity, fewest, entries, total_k, tau, AT_MOST: tl.constexpr):
    """How many faults τ and the sums have; whether the sums of k and of the capacities are equal; and the
    capacities, whose sum is then that of k. Columns have so many entries of +inf, and so many that may be
    selected."""
    room = tl.sum(capacity, axis=0)
    wide = tl.maximum(EQUAL * tl.maximum(1.0, total_k), SLACK * total_k)
    equal = tl.where(room <= total_k + wide, 1, 0)
    wrong = tl.where((tau > 0) & (tau < INF), 0.0, 1.0) + tl.where(tl.abs(room + total_k) < INF, 0.0, 1.0)
    wrong += tl.where(room >= total_k - wide, 0.0, 1.0)
    if not AT_MOST:
        wrong += tl.where(equal > 0, 0.0, 1.0)
    # the sums agree up to their rounding, which columns take that are neither empty nor full
    weight = tl.maximum(tl.minimum(capacity - fewest, entries - capacity), 0.0)
    every = tl.sum(weight, axis=0)
    share = (total_k - room) / tl.where(every > 0, every, 1.0)
    share = tl.where(equal > 0, tl.minimum(tl.maximum(share, -1.0), 1.0), 0.0)
    return wrong, equal, capacity + weight * share


@triton.jit
def wanted(x, k, settled):
    """What a row that is not decided has to take besides what is +inf, and what full columns take."""
    got = (x == INF) | ((tl.abs(x) < INF) & (settled < 0)[None, :])
    return k - tl.sum(tl.where(got, 1.0, 0.0), axis=1)


@triton.jit
def roots(u, open_, k, count, r, tau, last, power, CDF: tl.constexpr):
    """r with Σ F((u − r)/τ) = k over a row's open entries, of which there are so many, from a guess. A row is
    done after a step that is no longer than `last`, in τ."""
    live = count > 0
    k, size = tl.where(live, k, 1.0), tl.where(live, count, 2.0)
    quantile = icdf(tl.minimum(tl.maximum(k / size, TINY), 1 - 1e-16), power, CDF)
    low = tl.min(tl.where(open_, u, INF), axis=1) - (quantile + icdf_error(CDF)) * tau
    high = tl.max(tl.where(open_, u, -INF), axis=1) - (quantile - icdf_error(CDF)) * tau
    low, high = tl.where(live, low, -1.0), tl.where(live, high, 1.0)
    pad = 1e-14 * tl.maximum(tl.abs(low), tl.abs(high))
    low, high = low - pad, high + pad
    mean = tl.sum(tl.where(open_, u, 0.0), axis=1) / size
    off = tl.where(open_, u - mean[:, None], 0.0) / tau
    _, variance = moments(power, CDF)
    guess = mean - tau * quantile * tl.sqrt(1 + tl.sum(off * off, axis=1) / (size * variance))
    guess = tl.where((guess > low) & (guess < high), guess, 0.5 * low + 0.5 * high)
    r = tl.where((r > low) & (r < high), r, guess)
    span = high - low
    active = tl.where(live, 1, 0)
    evaluation = 0
    left = tl.sum(active)
    while left > 0:
        z = (u - r[:, None]) / tau
        a = tl.abs(z)
        above, below = open_ & (z > 0), open_ & (z <= 0)
        near_up = tl.min(tl.where(above, a, INF), axis=1)
        near_down = tl.min(tl.where(below, a, INF), axis=1)
        near_up = tl.where(near_up < INF, tl.minimum(near_up, FARTHEST_Z), 0.0)
        near_down = tl.where(near_down < INF, tl.minimum(near_down, FARTHEST_Z), 0.0)
        near = tl.where(z > 0, near_up[:, None], near_down[:, None])
        tail, density = side(z, z, z > 0, near, near - a, power, CDF)
        number, lacking, excess, slope_up, slope_down = total(
            (
                tl.where(above, 1.0, 0.0).to(tl.float64),
                tl.where(above, tail, 0.0), tl.where(below, tail, 0.0),
                tl.where(above, density, 0.0), tl.where(below, density, 0.0),
            ),
            2,
        )  # fmt: skip
        spare = number - k
        spare = tl.where(tl.abs(spare) <= 8 * ROUNDING * tl.maximum(number, k), 0.0, spare)
        # log P = log Q, where P = Σ_below F + spare and Q = Σ_above (1 − F), or spare on the other side;
        # what has no spare is relative to the nearest entry
        scale_up, scale_down = log_scale(near_up, CDF), log_scale(near_down, CDF)
        by_up = tl.where(spare < 0, tl.exp(-scale_up), 1.0)
        by_down = tl.where(spare > 0, tl.exp(-scale_down), 1.0)
        P = tl.maximum(spare, 0.0) + excess * by_down
        Q = tl.maximum(-spare, 0.0) + lacking * by_up
        scales = tl.where(spare > 0, scale_up, -scale_down)
        scales = tl.where(spare == 0, log_scales(near_up, near_down, CDF), scales)
        ratio = tl.log(P) - tl.log(Q) + scales
        step = ratio / (slope_down * by_down / P + slope_up * by_up / Q)
        low = tl.where(ratio > 0, tl.maximum(low, r), low)
        high = tl.where(ratio < 0, tl.minimum(high, r), high)
        slow, span = stalls(high - low, span, tl.abs(step) <= CLOSE, evaluation)
        trial, middle = r + tau * step, 0.5 * low + 0.5 * high
        done = (tl.abs(step) <= last) | (trial == r)
        newton = done | ((trial > low) & (trial < high) & ~slow)
        exhausted = ~(newton | ((middle > low) & (middle < high)))
        moved = tl.where(newton, trial, middle)
        r = tl.where((active > 0) & ~exhausted, moved, r)
        active = tl.where(done | exhausted, 0, active)
        evaluation += 1
        left = tl.where(evaluation == EVALUATIONS, 0, tl.sum(active))
    return r
