"""Two-sided assignments by a program a matrix, whatever the number of its steps, in float64.

What is decided before anything has to be solved, and the damped steps of Newton's method in the columns'
thresholds, in falling temperatures, are those of the reference (`_kernels.reference.soft_assign`, its safe
way).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from khot._kernels.reference import soft_assign as reference
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Sizes
from khot._kernels.triton.assign_decided import decide_all, goals
from khot._kernels.triton.assign_rows import INF, LAST, TILE, flag, load_columns, load_rows, roots, wanted
from khot._kernels.triton.assign_steps import DONE, NUMBERS, STATUS
from khot._kernels.triton.assign_system import overlap
from khot._kernels.triton.fast import double, store
from khot._kernels.triton.functions import side
from khot._kernels.triton.sizes import next_power_of_2

BLOCK = 32  # columns of a block of the columns' matrix
DEPTH = 32  # rows that such a block sums at a time
STEPS = 2048  # at most, in all stages together
STAGE_STEPS = tl.constexpr(reference.STEPS)
NEAR = tl.constexpr(reference.NEAR)
ROUGH, FINE = tl.constexpr(reference.ROUGH), tl.constexpr(reference.FINE)
ACCEPTED, ROUNDED = tl.constexpr(reference.ACCEPTED), tl.constexpr(reference.ROUNDING)
REACH, STAGE = tl.constexpr(reference.REACH), tl.constexpr(reference.STAGE)


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
        row, there, x = load_rows(x_at, x_stride, start, m, n, ROWS, WIDTH)
        state = tl.load(state_at + row, mask=there, other=1.0)
        k = wanted(x, double(tl.load(k_at + row * k_row, mask=there, other=0.0)), settled)
        open_ = (tl.abs(x) < INF) & (settled == 0)[None, :] & (state == 0)[:, None]
        count = tl.sum(tl.where(open_, 1.0, 0.0).to(tl.float64), axis=1)
        u = tl.where(open_, x - c[None, :], 0.0)
        r = tl.load(r_at + row, mask=there, other=0.0)
        r = roots(u, open_, k, count, r, tau, LAST, power, CDF)
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
def _missed(
    rows, vectors, equal, stage, slope, first, most, width, m, n, power,
    CDF: tl.constexpr, AT_MOST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """By how much the columns' loads at the tried thresholds miss their goals; how much of that counts; the
    sums of the densities, their mean without the rows' share, and the slope by which it is judged."""
    settled = _get(vectors, SETTLED, n, WIDTH)
    loads, densities, squares = _sweep(
        *rows, _get(vectors, TRIED, n, WIDTH), settled, stage, m, n, power, CDF, ROWS, WIDTH
    )
    free = (tl.arange(0, WIDTH) < n) & (_get(vectors, SETTLED, n, WIDTH) == 0)
    miss = tl.where(free, loads - _get(vectors, LOAD, n, WIDTH), 0.0)
    mean = tl.sum(tl.where(free, densities - squares, 0.0), axis=0) / width
    slope = tl.where(first > 0, mean + most * 1e-12, slope)
    off = miss
    if AT_MOST:  # 0 where c = 0 and the load is below its goal
        price = _get(vectors, TRIED, n, WIDTH) / stage
        off = tl.where(equal > 0, miss, (tl.maximum(price + miss / slope, 0.0) - price) * slope)
    return miss, off, densities, mean, slope


@triton.jit
def _next_trial(
    matrices, vectors, equal, scale, damping, width, stage, n,
    AT_MOST: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The columns' thresholds after a damped step of Newton's method from the best ones."""
    c, miss = _get(vectors, C, n, WIDTH), _get(vectors, MISS, n, WIDTH)
    moves = (tl.arange(0, WIDTH) < n) & (_get(vectors, SETTLED, n, WIDTH) == 0)
    if AT_MOST:
        moves = moves & ((equal > 0) | (c > 0) | (miss > 0))
    # the same constant added to all thresholds changes nothing, so that one direction has to be fixed
    tie = tl.where(equal > 0, scale / width, 0.0)
    slopes = _get(vectors, SLOPES, n, WIDTH)
    step = _newton(*matrices, slopes, miss, moves, scale, damping, tie, n, WIDTH, CHUNK)
    # farther out, the sums are flat and say nothing of the way back
    longest = tl.max(tl.abs(step), axis=0)
    c = _get(vectors, C, n, WIDTH) + step * tl.where(longest > REACH, REACH / longest, 1.0) * stage
    if AT_MOST:
        c = tl.where(equal > 0, c, tl.maximum(c, 0.0))
    return c


@triton.jit
def _next_stage(vectors, stage, rung, before, closing, tau, accepted, failed, n, WIDTH: tl.constexpr):
    """After the end of a stage: the next one, its rung, the stage before it, the status, and whether what is
    left is to bring the rows to the last c."""
    c = _get(vectors, C, n, WIDTH)
    status = 0
    if (failed > 0) & (1.01 * stage < before) & (before < INF):
        # too far from the solution before: in a gap, densities underflow and give no direction
        stage = tl.sqrt(stage) * tl.sqrt(before)
        c = _get(vectors, KEPT, n, WIDTH)
    elif stage == tau:
        status = tl.where(failed > 0, 2, tl.where(accepted > 0, 1, 0))
        closing = 1
    else:
        _put(vectors, KEPT, c, n, WIDTH)
        before = stage
        rung = tl.where(stage == rung, tl.maximum(rung / STAGE, tau), rung)
        stage = rung
    _put(vectors, TRIED, c, n, WIDTH)
    return stage, rung, before, status, closing


@triton.jit
def _solve(
    rows, matrices, vectors, status, facts, warm, tau, m, n, steps, power,
    CDF: tl.constexpr, AT_MOST: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The status after the steps in falling temperatures: 1 if the columns' thresholds have their loads.

    The facts are whether the sums are `equal`, how far the scores that are open `spread`, the largest load
    (`most`), and the number of open columns (`width`). `warm` says that there is a guess, which is tried at τ
    before anything else."""
    equal, spread, most, width = facts
    # `rung` is the temperature after which the next one comes, `stage` one on the way to it. While `near`,
    # the guess is tried at τ. `closing` says that the rows are to be brought to the last c.
    highest = tau
    while (highest * STAGE < spread / 4) & (highest < 1e300):
        highest *= STAGE
    near = warm
    rung = highest
    stage = tl.where(near > 0, tau, highest)
    best, worst, slope, scale, damping = tau * 0, tau * 0, tau * 0, tau * 0, tau * 0
    before = tau * 0 + INF
    first, closing, count, all_ = 1, 0, 0, 0
    while status == 0:
        all_ += 1
        miss, off, densities, mean, slope = _missed(
            rows, vectors, equal, stage, slope, first, most, width, m, n, power, CDF, AT_MOST, T.rows, T.width
        )
        square = tl.sum(off * off, axis=0)
        accepted = tl.where((first > 0) | (square < best), 1, 0)
        tl.debug_barrier()  # all threads have read what is stored again
        stuck = tl.where((damping > 1e6) | (worst <= ROUNDED * most), 1, 0) * (1 - accepted)
        if accepted > 0:
            _put(vectors, C, _get(vectors, TRIED, n, T.width), n, T.width)
            _put(vectors, MISS, miss, n, T.width)
            _put(vectors, SLOPES, densities, n, T.width)
            best, scale = square, mean + most * 1e-12
            worst = tl.where(square == square, tl.max(tl.abs(off), axis=0), square)
            damping = tl.where(first > 0, 1e-6, tl.maximum(damping / 10, 1e-12))
            overlap(rows[6], matrices[0], 0, m, n, T.block, T.depth)
        else:
            damping = tl.where(damping >= 1e-3, damping * 10, 1e-3)
        count = tl.where(first > 0, 0, count + 1)
        arrived = worst <= tl.where(stage == tau, FINE, ROUGH) * most
        failed = tl.where(worst <= tl.where(stage == tau, ACCEPTED, 10 * ROUGH) * most, 0, 1)
        ended = tl.where(arrived | (worst != worst) | (count >= STAGE_STEPS), 1, tl.maximum(stuck, closing))
        leaves = tl.where((near > 0) & (first > 0) & (worst > NEAR * most), 1, near * ended * failed)
        if leaves > 0:  # the guess was too far away
            near, first, closing, stage = 0, 1, 0, highest
            _put(vectors, TRIED, _get(vectors, C, n, T.width) * 0, n, T.width)
        elif ended > 0:
            first = 1
            stage, rung, before, status, closing = _next_stage(
                vectors, stage, rung, before, closing, tau, accepted, failed, n, T.width
            )
        else:
            first = 0
            trial = _next_trial(
                matrices, vectors, equal, scale, damping, width, stage, n, AT_MOST, T.width, T.chunk
            )
            _put(vectors, TRIED, trial, n, T.width)
        tl.debug_barrier()
        status = tl.where((status == 0) & (all_ >= steps), 2, status)

    return status


@triton.jit
def _write(
    rows, out_at, c_at, vectors, status, equal, width, tau, m, n, power,
    CDF: tl.constexpr, AT_MOST: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The results, which are NaN unless the status is 1."""
    x_at, x_stride, state_at, r_at = rows[0], rows[1], rows[4], rows[5]
    column = tl.arange(0, T.width)
    there = column < n
    c, settled = _get(vectors, C, n, T.width), _get(vectors, SETTLED, n, T.width)
    free = there & (settled == 0)
    shift = tl.sum(c, axis=0) / width
    if AT_MOST:
        shift = tl.where(equal > 0, tl.min(tl.where(free, c, INF), axis=0), 0.0)
    shift = tl.where(tl.abs(shift) < INF, shift, 0.0)
    solved = status == 1
    thresholds = tl.where(settled > 0, INF, tl.where(settled < 0, -INF, c - shift))
    thresholds = tl.where(settled == INF, 0.0, thresholds)
    tl.store(c_at + column, tl.where(solved, thresholds, float("nan")), mask=there)
    for first_row in range(0, m, T.rows):
        row, in_matrix, x = load_rows(x_at, x_stride, first_row, m, n, T.rows, T.width)
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
def solve_whole(
    x, k, k_matrix, capacity, tau, bias, out_pointer, t, scratch_pointer, note_pointer, m, n, steps,
    CDF: tl.constexpr, AT_MOST: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Solve a matrix, unless its note says that it is done."""
    matrix = tl.program_id(0).to(tl.int64)
    if note_pointer is not None:  # noqa: SIM102
        if tl.load(note_pointer + matrix * (NUMBERS + 3 * n) + STATUS) == DONE:
            return
    x_at, k_at = x.pointer + matrix * m * x.stride, k.pointer + matrix * k_matrix
    r_at = t.r + matrix * m
    state_at = scratch_pointer + matrix * (m + n * (m + 2 * n + VECTORS))
    slope_at = state_at + m
    schur_at = slope_at + m.to(tl.int64) * n
    factor_at = schur_at + n * n
    vectors = factor_at + n * n
    power = tl.zeros((), tl.float64) + 1  # which no CDF with full support has
    room, start, own_tau = load_columns(capacity, bias, tau, matrix, n, T.width)

    status, equal, goal, left_k, most_k = goals(
        x_at, x.stride, k_at, k.stride, room, start, own_tau, m, n, AT_MOST, T.rows, T.width
    )
    own_tau = tl.where(status > 0, 1.0, own_tau)
    status, settled, load, below, low, high = decide_all(
        x_at, x.stride, k_at, k.stride, state_at, r_at, status, goal, equal, left_k, most_k, m, n,
        T.rows, T.width,
    )  # fmt: skip
    free = settled == 0
    most = tl.max(tl.minimum(load, below), axis=0)
    width = tl.maximum(tl.sum(tl.where(free, 1.0, 0.0).to(tl.float64), axis=0), 1.0)
    middle = tl.sum(tl.where(free, start, 0.0), axis=0) / width
    start = tl.where(free, tl.where(equal > 0, start - middle, tl.maximum(start, 0.0)), 0.0)
    _put(vectors, SETTLED, settled, n, T.width)
    _put(vectors, LOAD, load, n, T.width)
    _put(vectors, TRIED, start, n, T.width)
    _put(vectors, C, start, n, T.width)
    tl.debug_barrier()
    rows = (x_at, x.stride, k_at, k.stride, state_at, r_at, slope_at)
    status = _solve(
        rows, (schur_at, factor_at), vectors, status, (equal, high - low, most, width), flag(start != 0),
        own_tau, m, n, steps, power, CDF, AT_MOST, T,
    )  # fmt: skip
    _write(
        rows, out_pointer + matrix * m * n, t.c + matrix * n, vectors, status, equal, width, own_tau, m, n,
        power, CDF, AT_MOST, T,
    )  # fmt: skip


KERNELS = (solve_whole,)


def which(n: int, cdf: str, at_most: bool) -> dict[str, Any]:
    width = max(16, next_power_of_2(n))
    rows = max(1, TILE // width)
    sizes = Sizes(rows, width, min(BLOCK, width), DEPTH, rows)
    return {"CDF": layout.cdf_id(cdf), "AT_MOST": at_most, "T": sizes, "num_warps": TILE // 64}
