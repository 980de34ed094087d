"""Two-sided assignments: a program a matrix, whatever the number of its steps, in float64.

What is decided before anything has to be solved, and the damped steps of Newton's method in the columns'
thresholds, in falling temperatures, are those of the reference (`_kernels.reference.soft_assign`, its safe
way). For given thresholds of the columns, each row finds its own inside a bracket, where the logarithms of
what is above and below it are compared, so that gaps of many τ are solved, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import soft_assign as reference
from khot._kernels.triton import layout
from khot._kernels.triton.exact_steps import ROUNDING
from khot._kernels.triton.exact_sums import FARTHEST_Z
from khot._kernels.triton.fast import double, store, total
from khot._kernels.triton.functions import (
    TINY,
    icdf,
    icdf_error,
    log_scale,
    log_scales,
    moments,
    side,
)
from khot._kernels.triton.guard import stalls
from khot._kernels.triton.launch import launch

WIDEST = 256  # columns: beyond, factors of their matrix take one program longer than all the rest
ENTRIES = 1 << 20  # of a matrix, for each matrix that there is: beyond, one program a matrix idles the device
LONGEST = 1 << 30  # places in a matrix are integers of 32 bits
TILE = 512  # entries that a program holds at a time: two of a thread, as float64 fills registers
BLOCK = 32  # columns of a block of the columns' matrix
DEPTH = 32  # rows that such a block sums at a time
STEPS = 2048  # at most, in all stages together
EVALUATIONS = tl.constexpr(100)  # of a row, at most
LAST = tl.constexpr(1e-8)  # in τ: after a shorter step a row is done
CLOSE = tl.constexpr(1e-2)  # in τ: below it steps of Newton's method need no bisection
STAGE_STEPS = tl.constexpr(reference.STEPS)
NEAR = tl.constexpr(reference.NEAR)
ROUGH, FINE = tl.constexpr(reference.ROUGH), tl.constexpr(reference.FINE)
ACCEPTED, ROUNDED = tl.constexpr(reference.ACCEPTED), tl.constexpr(reference.ROUNDING)
REACH, STAGE = tl.constexpr(reference.REACH), tl.constexpr(reference.STAGE)
EQUAL = tl.constexpr(reference.EQUAL)
INF = tl.constexpr(float("inf"))


# ---------------------------------------------------------------------------------------------- rows


@triton.jit
def _rows(x_at, x_stride, start, m, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Which rows these are, which of them there are, and their scores."""
    row = start + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = row < m
    at = x_at + (row[:, None] * x_stride + column[None, :])
    x = tl.load(at, mask=there[:, None] & (column < n)[None, :], other=float("-inf"))
    return row, there, double(x)


@triton.jit
def _wanted(x, k, settled):
    """What a row that is not decided has to take besides what is +inf, and what full columns take."""
    got = (x == INF) | ((tl.abs(x) < INF) & (settled < 0)[None, :])
    return k - tl.sum(tl.where(got, 1.0, 0.0), axis=1)


@triton.jit
def _roots(u, open_, k, count, r, tau, power, CDF: tl.constexpr):
    """r with Σ F((u − r)/τ) = k over a row's open entries, of which there are so many, from a guess."""
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
        done = (tl.abs(step) <= LAST) | (trial == r)
        newton = done | ((trial > low) & (trial < high) & ~slow)
        exhausted = ~(newton | ((middle > low) & (middle < high)))
        moved = tl.where(newton, trial, middle)
        r = tl.where((active > 0) & ~exhausted, moved, r)
        active = tl.where(done | exhausted, 0, active)
        evaluation += 1
        left = tl.where(evaluation == EVALUATIONS, 0, tl.sum(active))
    return r


@triton.jit
def _sweep(
    x_at, x_stride, k_at, k_row, state_at, r_at, slope_at, c, settled, tau, m, n, power,
    CDF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Σ y, Σ f and Σ f²/Σ_j f over the rows, whose thresholds for these c and f/√Σ_j f are stored."""
    sums = tl.zeros((ROWS, WIDTH), tl.float64)
    slopes = tl.zeros((ROWS, WIDTH), tl.float64)
    squares = tl.zeros((ROWS, WIDTH), tl.float64)
    column = tl.arange(0, WIDTH)
    for start in range(0, m, ROWS):
        row, there, x = _rows(x_at, x_stride, start, m, n, ROWS, WIDTH)
        state = tl.load(state_at + row, mask=there, other=1.0)
        k = _wanted(x, double(tl.load(k_at + row * k_row, mask=there, other=0.0)), settled)
        open_ = (tl.abs(x) < INF) & (settled == 0)[None, :] & (state == 0)[:, None]
        count = tl.sum(tl.where(open_, 1.0, 0.0).to(tl.float64), axis=1)
        u = tl.where(open_, x - c[None, :], 0.0)
        r = tl.load(r_at + row, mask=there, other=0.0)
        r = _roots(u, open_, k, count, r, tau, power, CDF)
        tl.debug_barrier()  # all threads have read what is stored again
        tl.store(r_at + row, r, mask=there)
        z = (u - r[:, None]) / tau
        tail, density = side(z, z, z > 0, 0.0, -tl.abs(z), power, CDF)
        y = tl.where(open_, tl.where(z > 0, 1 - tail, tail), 0.0)
        f = tl.where(open_, density, 0.0)
        mass = tl.sum(f, axis=1)
        g = f * tl.where(mass > 0, 1 / tl.sqrt(tl.where(mass > 0, mass, 1.0)), 0.0)[:, None]
        at = slope_at + (row[:, None] * n + column[None, :])
        tl.store(at, g, mask=there[:, None] & (column < n)[None, :])
        sums += y
        slopes += f
        squares += g * g
    tl.debug_barrier()
    return tl.sum(sums, axis=0), tl.sum(slopes, axis=0), tl.sum(squares, axis=0)


# ------------------------------------------------------------------------------------------- columns

# Vectors over the columns are kept in memory: registers are for the rows.
SETTLED, LOAD, KEPT, C, TRIED, MISS, SLOPES = (tl.constexpr(i) for i in range(7))
VECTORS = tl.constexpr(7)


@triton.jit
def _get(vectors, which: tl.constexpr, n, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    return tl.load(vectors + which * n + column, mask=column < n, other=0.0)


@triton.jit
def _put(vectors, which: tl.constexpr, value, n, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    tl.store(vectors + which * n + column, value, mask=column < n)


@triton.jit
def _overlap(slope_at, schur_at, m, n, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Σ_i g gᵀ, on and above its diagonal, from the rows' g."""
    for top in range(0, n, BLOCK):
        for left in range(top, n, BLOCK):
            one, other = top + tl.arange(0, BLOCK), left + tl.arange(0, BLOCK)
            is_one, is_other = one < n, other < n
            sums = tl.zeros((BLOCK, BLOCK), tl.float64)
            for start in range(0, m, DEPTH):
                row = start + tl.arange(0, DEPTH)
                there = row < m
                a_at = slope_at + (row[None, :] * n + one[:, None])
                b_at = slope_at + (row[:, None] * n + other[None, :])
                a = tl.load(a_at, mask=there[None, :] & is_one[:, None], other=0.0)
                b = tl.load(b_at, mask=there[:, None] & is_other[None, :], other=0.0)
                sums = tl.dot(a, b, sums, out_dtype=tl.float64)
            at = schur_at + (one[:, None] * n + other[None, :])
            tl.store(at, sums, mask=is_one[:, None] & is_other[None, :])
    tl.debug_barrier()


@triton.jit
def _newton(
    schur_at, factor_at, slopes, miss, moves, scale, damping, tie, n, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """(diag(slopes) − overlap + tie + damping · scale)⁻¹ miss of the columns that move, and 0 of the others,
    by Cholesky's factors, whose rows are stored one after another."""
    column = tl.arange(0, WIDTH)
    step = tl.where(moves, miss, 0.0)
    diagonal = tl.where(moves, slopes, scale) + damping * scale
    for j in range(n):
        here = column == j
        line = (column >= j) & (column < n)
        row = tl.load(schur_at + (j * n + column), mask=line, other=0.0)
        bound = tl.sum(tl.where(here & moves, 1.0, 0.0).to(tl.float64))
        row = tl.where(moves & line, bound * (tie - row), 0.0) + tl.where(here, diagonal, 0.0)
        for start in range(0, j, CHUNK):
            before = start + tl.arange(0, CHUNK)
            at = factor_at + (before[:, None] * n + column[None, :])
            known = tl.load(at, mask=(before < j)[:, None] & line[None, :], other=0.0)
            by = tl.load(factor_at + (before * n + j), mask=before < j, other=0.0)
            row -= tl.sum(known * by[:, None], axis=0)
        # rounding may take a pivot that is damping alone
        pivot = tl.sqrt(tl.maximum(tl.sum(tl.where(here, row, 0.0)), 1e-14 * scale))
        row = tl.where(here, pivot, row / pivot)
        tl.store(factor_at + (j * n + column), row, mask=line)
        own = tl.sum(tl.where(here, step, 0.0)) / pivot
        step = tl.where(here, own, tl.where(line, step - own * row, step))
        tl.debug_barrier()
    for back in range(n):
        j = n - 1 - back
        here = column == j
        line = (column >= j) & (column < n)
        row = tl.load(factor_at + (j * n + column), mask=line, other=0.0)
        rest = tl.sum(tl.where(here, step, -row * step))
        step = tl.where(here, rest / tl.sum(tl.where(here, row, 0.0)), step)
    return step


# ----------------------------------------------------------------------------------------- the matrix


@triton.jit
def _flag(found):
    """1 if any of the flags is up, otherwise 0: the interpreter makes other integers of scalar flags."""
    return tl.max(tl.where(found, 1, 0), axis=0)


@triton.jit
def _facts(x_at, x_stride, k_at, k_row, m, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Whether there is a NaN or a negative k; Σk; the number of +inf in each column; and Σ|k| and max |k| of
    what is left of k beside them."""
    bad, sum_of_k = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    left, most = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    pinned = tl.zeros((ROWS, WIDTH), tl.float64)
    for start in range(0, m, ROWS):
        row, there, x = _rows(x_at, x_stride, start, m, n, ROWS, WIDTH)
        k = double(tl.load(k_at + row * k_row, mask=there, other=0.0))
        infinite = tl.where(x == INF, 1.0, 0.0)
        bad += tl.sum(tl.where(x != x, 1.0, 0.0).to(tl.float64), axis=1) + tl.where(k >= 0, 0.0, 1.0)
        sum_of_k += k
        pinned += infinite
        rest = tl.abs(k - tl.sum(infinite, axis=1))
        left += tl.where(there, rest, 0.0)
        most = tl.maximum(most, tl.where(there, rest, 0.0))
    return (
        tl.sum(bad, axis=0), tl.sum(sum_of_k, axis=0), tl.sum(pinned, axis=0), tl.sum(left, axis=0),
        tl.max(most, axis=0),
    )  # fmt: skip


@triton.jit
def _decide(
    x_at, x_stride, k_at, k_row, state_at, settled, goal, equal, slack, lack, spare, round_, m, n,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A round of decisions: rows, and then columns, that take nothing or all that is left to them.

    A state is 0 for what is open, and otherwise the round in which it was decided, with the sign + for
    nothing and − for all. Returned are the columns' states; what is left of their goals, and how many rows to
    take it from; whether a row or column has to take more than there is, or less than nothing; whether a
    column was decided; and the ends of what is open."""
    taken = tl.zeros((ROWS, WIDTH), tl.float64)
    below = tl.zeros((ROWS, WIDTH), tl.float64)
    least, most = tl.full((ROWS, WIDTH), INF, tl.float64), tl.full((ROWS, WIDTH), -INF, tl.float64)
    broken = tl.zeros((ROWS,), tl.int32)
    for start in range(0, m, ROWS):
        row, there, x = _rows(x_at, x_stride, start, m, n, ROWS, WIDTH)
        state = tl.load(state_at + row, mask=there, other=1.0)
        k = _wanted(x, double(tl.load(k_at + row * k_row, mask=there, other=0.0)), settled)
        finite, open_row = tl.abs(x) < INF, state == 0
        left = tl.sum(tl.where(finite & (settled == 0)[None, :], 1.0, 0.0).to(tl.float64), axis=1)
        broken = tl.maximum(broken, tl.where(open_row & ((k < -slack) | (k > left + slack)), 1, 0))
        some = open_row & (left > 0)
        state = tl.where(some & (k <= lack), round_, tl.where(some & (k >= left - lack), -round_, state))
        tl.debug_barrier()  # all threads have read what is stored again
        tl.store(state_at + row, state, mask=there)
        taken += tl.where(finite & (there & (state < 0))[:, None], 1.0, 0.0)
        open_ = finite & (state == 0)[:, None] & (settled == 0)[None, :]
        below += tl.where(open_, 1.0, 0.0)
        least, most = tl.minimum(least, tl.where(open_, x, INF)), tl.maximum(most, tl.where(open_, x, -INF))
    tl.debug_barrier()
    open_column = settled == 0
    left, below = tl.where(open_column, goal - tl.sum(taken, axis=0), 0.0), tl.sum(below, axis=0)
    some = open_column & (below > 0)
    full = some & (left >= below - spare) & (equal > 0)
    none = some & (left <= spare)
    wrong = open_column & ((left < -slack) | ((left > below + slack) & (equal > 0)))
    settled = tl.where(full, -round_, tl.where(none, round_, settled))
    ends = tl.min(tl.min(least, axis=1), axis=0), tl.max(tl.max(most, axis=1), axis=0)
    failed = tl.maximum(tl.max(broken, axis=0), _flag(wrong))
    return settled, left, below, failed, _flag(full | none), ends[0], ends[1]


@triton.jit
def _goals(
    x_at, x_stride, k_at, k_row, capacity, start, tau, m, n,
    AT_MOST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Whether the arguments are in their ranges (otherwise the status 2); whether the sums of k and of the
    capacities are equal; what is left of the capacities beside +inf; and Σ|k| and max |k|, of what is left of
    k."""
    wrong, total_k, pinned, left_k, most_k = _facts(x_at, x_stride, k_at, k_row, m, n, ROWS, WIDTH)
    room = tl.sum(capacity, axis=0)
    wide = tl.maximum(EQUAL * tl.maximum(1.0, total_k), 1e-6 * total_k)
    wrong += tl.where((tau > 0) & (tau < INF), 0.0, 1.0) + tl.where(tl.abs(room + total_k) < INF, 0.0, 1.0)
    wrong += tl.where(room >= total_k - wide, 0.0, 1.0) + tl.sum(tl.where(capacity >= 0, 0.0, 1.0), axis=0)
    wrong += tl.sum(tl.where(tl.abs(start) < INF, 0.0, 1.0), axis=0)
    equal = tl.where(room <= total_k + wide, 1, 0)
    if not AT_MOST:
        wrong += tl.where(equal > 0, 0.0, 1.0)
    # the sums agree up to their rounding
    goal = capacity * tl.where((equal > 0) & (room > 0), total_k / tl.where(room > 0, room, 1.0), 1.0)
    goal = tl.where(tl.arange(0, WIDTH) < n, goal - pinned, 0.0)
    return tl.where(wrong > 0, 2, 0), equal, goal, left_k, most_k


@triton.jit
def _decide_all(
    x_at, x_stride, k_at, k_row, state_at, r_at, status, goal, equal, left_k, most_k, m, n,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rounds of decisions until there is nothing to decide: the status, which is 1 where nothing is left to
    solve; the columns' states, which are INF where a column is open to no row; what is left of the goals, and
    how many rows to take it from; and the ends of what is open."""
    for first_row in range(0, m, ROWS):
        row = first_row + tl.arange(0, ROWS)
        tl.store(state_at + row, row * 0.0, mask=row < m)
        tl.store(r_at + row, row * 0.0 + float("nan"), mask=row < m)
    tl.debug_barrier()
    settled, load, below = goal * 0, goal, goal * 0
    low, high, round_ = left_k * 0, left_k * 0, left_k * 0 + 1
    more = tl.where(status == 0, 1, 0)
    while more > 0:
        settled, load, below, failed, more, low, high = _decide(
            x_at, x_stride, k_at, k_row, state_at, settled, goal, equal, EQUAL * tl.maximum(1.0, left_k),
            64 * ROUNDING * (1 + most_k), 64 * ROUNDING * (1 + tl.max(tl.abs(goal), axis=0)), round_, m, n,
            ROWS, WIDTH,
        )  # fmt: skip
        round_ += 1
        status = tl.where(failed > 0, 2, status)
        more = tl.where(failed > 0, 0, more)
    settled = tl.where((settled == 0) & ~((tl.arange(0, WIDTH) < n) & (below > 0)), INF, settled)
    free = settled == 0
    status = tl.where((status == 0) & (_flag(free) == 0), 1, status)
    return status, settled, tl.where(free, load, 0.0), below, low, high


@triton.jit
def _next_trial(
    vectors, schur_at, factor_at, equal, scale, damping, width, stage, n,
    AT_MOST: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The columns' thresholds after a damped step of Newton's method from the best ones."""
    c, miss = _get(vectors, C, n, WIDTH), _get(vectors, MISS, n, WIDTH)
    moves = (tl.arange(0, WIDTH) < n) & (_get(vectors, SETTLED, n, WIDTH) == 0)
    if AT_MOST:
        moves = moves & ((equal > 0) | (c > 0) | (miss > 0))
    # the same constant added to all thresholds changes nothing, so that one direction has to be fixed
    tie = tl.where(equal > 0, scale / width, 0.0)
    step = _newton(
        schur_at,
        factor_at,
        _get(vectors, SLOPES, n, WIDTH),
        miss,
        moves,
        scale,
        damping,
        tie,
        n,
        WIDTH,
        CHUNK,
    )
    # farther out, the sums are flat and say nothing of the way back
    longest = tl.max(tl.abs(step), axis=0)
    c = _get(vectors, C, n, WIDTH) + step * tl.where(longest > REACH, REACH / longest, 1.0) * stage
    if AT_MOST:
        c = tl.where(equal > 0, c, tl.maximum(c, 0.0))
    return c


@triton.jit
def _solve(
    x_at, x_stride, k_at, k_row, state_at, r_at, slope_at, schur_at, factor_at, vectors, status, equal, low,
    high, most, width, warm, tau, m, n, steps, power,
    CDF: tl.constexpr, AT_MOST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The status after the steps in falling temperatures: 1 if the columns' thresholds have their loads.

    Scores from `low` to `high` are open; `most` is the largest load, `width` the number of open columns, and
    `warm` whether there is a guess, which is tried at τ before anything else."""
    there = tl.arange(0, WIDTH) < n
    # `rung` is the temperature after which the next one comes, `stage` one on the way to it. While `near`,
    # the guess is tried at τ. `closing` says that the rows are to be brought to the last c.
    highest = tau
    while (highest * STAGE < (high - low) / 4) & (highest < 1e300):
        highest *= STAGE
    near = warm
    rung = highest
    stage = tl.where(near > 0, tau, highest)
    best, worst, slope, scale, damping = tau * 0, tau * 0, tau * 0, tau * 0, tau * 0
    before = tau * 0 + INF
    first, closing, count, all_ = 1, 0, 0, 0
    while status == 0:
        all_ += 1
        tried, settled = _get(vectors, TRIED, n, WIDTH), _get(vectors, SETTLED, n, WIDTH)
        loads, densities, squares = _sweep(
            x_at, x_stride, k_at, k_row, state_at, r_at, slope_at, tried, settled, stage, m, n, power,
            CDF, ROWS, WIDTH,
        )  # fmt: skip
        free = there & (_get(vectors, SETTLED, n, WIDTH) == 0)
        tried = _get(vectors, TRIED, n, WIDTH)
        miss = tl.where(free, loads - _get(vectors, LOAD, n, WIDTH), 0.0)
        mean = tl.sum(tl.where(free, densities - squares, 0.0), axis=0) / width
        slope = tl.where(first > 0, mean + most * 1e-12, slope)
        off = miss
        if AT_MOST:  # 0 where c = 0 and the load is below its goal
            price = tried / stage
            off = tl.where(equal > 0, miss, (tl.maximum(price + miss / slope, 0.0) - price) * slope)
        square = tl.sum(off * off, axis=0)
        accepted = tl.where((first > 0) | (square < best), 1, 0)
        tl.debug_barrier()  # all threads have read what is stored again
        stuck = tl.where((damping > 1e6) | (worst <= ROUNDED * most), 1, 0) * (1 - accepted)
        if accepted > 0:
            _put(vectors, C, tried, n, WIDTH)
            _put(vectors, MISS, miss, n, WIDTH)
            _put(vectors, SLOPES, densities, n, WIDTH)
            best, scale = square, mean + most * 1e-12
            worst = tl.where(square == square, tl.max(tl.abs(off), axis=0), square)
            damping = tl.where(first > 0, 1e-6, tl.maximum(damping / 10, 1e-12))
            _overlap(slope_at, schur_at, m, n, BLOCK, DEPTH)
        else:
            damping = tl.where(damping >= 1e-3, damping * 10, 1e-3)
        count = tl.where(first > 0, 0, count + 1)
        final = stage == tau
        arrived = worst <= tl.where(final, FINE, ROUGH) * most
        failed = tl.where(worst <= tl.where(final, ACCEPTED, 10 * ROUGH) * most, 0, 1)
        ended = tl.where(arrived | (worst != worst) | (count >= STAGE_STEPS), 1, tl.maximum(stuck, closing))
        leaves = tl.where((near > 0) & (first > 0) & (worst > NEAR * most), 1, near * ended * failed)
        c = _get(vectors, C, n, WIDTH)
        if leaves > 0:  # the guess was too far away
            near, first, closing, stage = 0, 1, 0, highest
            _put(vectors, TRIED, c * 0, n, WIDTH)
        elif ended > 0:
            first = 1
            if (failed > 0) & (1.01 * stage < before) & (before < INF):
                # too far from the solution before: in a gap, densities underflow and give no direction
                stage = tl.sqrt(stage) * tl.sqrt(before)
                c = _get(vectors, KEPT, n, WIDTH)
            elif final:
                status = tl.where(failed > 0, 2, tl.where(accepted > 0, 1, 0))
                closing = 1
            else:
                _put(vectors, KEPT, c, n, WIDTH)
                before = stage
                rung = tl.where(stage == rung, tl.maximum(rung / STAGE, tau), rung)
                stage = rung
            _put(vectors, TRIED, c, n, WIDTH)
        else:
            first = 0
            c = _next_trial(
                vectors, schur_at, factor_at, equal, scale, damping, width, stage, n, AT_MOST, WIDTH, CHUNK
            )
            _put(vectors, TRIED, c, n, WIDTH)
        tl.debug_barrier()
        status = tl.where((status == 0) & (all_ >= steps), 2, status)

    return status


@triton.jit
def _write(
    x_at, x_stride, state_at, out_at, r_at, c_at, vectors, status, equal, width, tau, m, n, power,
    CDF: tl.constexpr, AT_MOST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The results, which are NaN unless the status is 1."""
    column = tl.arange(0, WIDTH)
    there = column < n
    c, settled = _get(vectors, C, n, WIDTH), _get(vectors, SETTLED, n, WIDTH)
    free = there & (settled == 0)
    shift = tl.sum(c, axis=0) / width
    if AT_MOST:
        shift = tl.where(equal > 0, tl.min(tl.where(free, c, INF), axis=0), 0.0)
    shift = tl.where(tl.abs(shift) < INF, shift, 0.0)
    solved = status == 1
    thresholds = tl.where(settled > 0, INF, tl.where(settled < 0, -INF, c - shift))
    thresholds = tl.where(settled == INF, 0.0, thresholds)
    tl.store(c_at + column, tl.where(solved, thresholds, float("nan")), mask=there)
    for first_row in range(0, m, ROWS):
        row, in_matrix, x = _rows(x_at, x_stride, first_row, m, n, ROWS, WIDTH)
        state = tl.load(state_at + row, mask=in_matrix, other=1.0)
        r = tl.load(r_at + row, mask=in_matrix, other=0.0)
        finite = tl.abs(x) < INF
        open_ = finite & free[None, :] & (state == 0)[:, None]
        z = tl.where(open_, (x - c[None, :]) - r[:, None], 0.0) / tau
        tail, _ = side(z, z, z > 0, 0.0, -tl.abs(z), power, CDF)
        # of a row and a column that are both decided, the first to be so decides
        row_state, column_state = state[:, None], settled[None, :]
        by_row = (row_state != 0) & ((column_state == 0) | (tl.abs(row_state) <= tl.abs(column_state)))
        chosen = tl.where(by_row, row_state, column_state) < 0
        decided = tl.where((x == INF) | (finite & chosen), 1.0, 0.0)
        y = tl.where(open_, tl.where(z > 0, 1 - tail, tail), decided)
        y_at = out_at + (row[:, None] * n + column[None, :])
        store(y_at, tl.where(solved, y, float("nan")), in_matrix[:, None] & there[None, :])
        moves_row = tl.max(tl.where(open_, 1, 0), axis=1) > 0
        threshold = tl.where(state > 0, INF, tl.where(state < 0, -INF, tl.where(moves_row, r + shift, 0.0)))
        tl.debug_barrier()  # all threads have read what is stored again
        tl.store(r_at + row, tl.where(solved, threshold, float("nan")), mask=in_matrix)


@triton.jit(do_not_specialize=["m", "k_matrix", "steps"])
def _assignments(
    x_pointer, x_stride, k_pointer, k_matrix, k_row, capacity_pointer, capacity_matrix, capacity_column,
    tau_pointer, tau_stride, bias_pointer, bias_matrix, bias_column, out_pointer, r_pointer, c_pointer,
    scratch_pointer, m, n, steps,
    CDF: tl.constexpr, AT_MOST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0).to(tl.int64)
    x_at, k_at = x_pointer + matrix * m * x_stride, k_pointer + matrix * k_matrix
    r_at = r_pointer + matrix * m
    state_at = scratch_pointer + matrix * (m + n * (m + 2 * n + VECTORS))
    slope_at = state_at + m
    schur_at = slope_at + m.to(tl.int64) * n
    factor_at = schur_at + n * n
    vectors = factor_at + n * n
    power = tl.zeros((), tl.float64) + 1  # which no CDF with full support has
    column = tl.arange(0, WIDTH)
    there = column < n
    place = column.to(tl.int64)
    at = capacity_pointer + matrix * capacity_matrix + place * capacity_column
    capacity = double(tl.load(at, mask=there, other=0.0))
    at = bias_pointer + matrix * bias_matrix + place * bias_column
    start = double(tl.load(at, mask=there, other=0.0))
    tau = double(tl.load(tau_pointer + matrix * tau_stride))

    status, equal, goal, left_k, most_k = _goals(
        x_at, x_stride, k_at, k_row, capacity, start, tau, m, n, AT_MOST, ROWS, WIDTH
    )
    tau = tl.where(status > 0, 1.0, tau)
    status, settled, load, below, low, high = _decide_all(
        x_at, x_stride, k_at, k_row, state_at, r_at, status, goal, equal, left_k, most_k, m, n, ROWS, WIDTH
    )
    free = settled == 0
    most = tl.max(tl.minimum(load, below), axis=0)
    width = tl.maximum(tl.sum(tl.where(free, 1.0, 0.0).to(tl.float64), axis=0), 1.0)
    middle = tl.sum(tl.where(free, start, 0.0), axis=0) / width
    start = tl.where(free, tl.where(equal > 0, start - middle, tl.maximum(start, 0.0)), 0.0)
    _put(vectors, SETTLED, settled, n, WIDTH)
    _put(vectors, LOAD, load, n, WIDTH)
    _put(vectors, TRIED, start, n, WIDTH)
    _put(vectors, C, start, n, WIDTH)
    tl.debug_barrier()
    status = _solve(
        x_at, x_stride, k_at, k_row, state_at, r_at, slope_at, schur_at, factor_at, vectors, status, equal,
        low, high, most, width, _flag(start != 0), tau, m, n, steps, power,
        CDF, AT_MOST, ROWS, WIDTH, BLOCK, DEPTH, CHUNK,
    )  # fmt: skip
    _write(
        x_at, x_stride, state_at, out_pointer + matrix * m * n, r_at, c_pointer + matrix * n, vectors, status,
        equal, width, tau, m, n, power, CDF, AT_MOST, ROWS, WIDTH,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- the host

KERNELS = (_assignments,)


def which(n: int, cdf: str, at_most: bool) -> dict[str, int]:
    width = max(16, triton.next_power_of_2(n))
    rows = max(1, TILE // width)
    return {
        "CDF": layout.cdf_id(cdf), "AT_MOST": at_most, "ROWS": rows, "WIDTH": width,
        "BLOCK": min(BLOCK, width), "DEPTH": DEPTH, "CHUNK": rows, "num_warps": TILE // 64,
    }  # fmt: skip


def soft_assign(
    x: Tensor, k: Tensor, capacity: Tensor, tau: Tensor, bias: Tensor, cdf: str, shape: float, at_most: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`soft_assign.soft_assign`, in Triton."""
    *batch, m, n = x.shape
    outer = torch.Size(batch)
    count = outer.numel()
    fits = 0 < n <= WIDEST and m * n <= min(ENTRIES * count, LONGEST)
    if group or not fits or not x.numel() or not cdfs.resolve(cdf, shape).built_in:
        return reference.soft_assign(x, k, capacity, tau, bias, cdf, shape, at_most, group)
    flat, stride = layout.rows(x, n)
    if m * stride > LONGEST:
        flat = flat.contiguous()
    y = x.new_empty(x.shape)
    r = torch.empty((*batch, m), dtype=torch.float64, device=x.device)
    c = torch.empty((*batch, n), dtype=torch.float64, device=x.device)
    scratch = r.new_empty(count * (m + n * (m + 2 * n + VECTORS.value)))
    taus = tau.expand(*batch, 1).reshape(-1)
    launch(
        _assignments, count,
        flat, flat.stride(0), *layout.matrix(k, x[..., 0]), *layout.matrix(capacity, x[..., 0, :]),
        taus, taus.stride(0), *layout.matrix(bias, x[..., 0, :]), y, r, c, scratch, m, n, STEPS,
        **which(n, cdf, at_most),
    )  # fmt: skip
    return y, r, c
