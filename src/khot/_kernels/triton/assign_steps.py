"""Two-sided assignments whose rows are spread over programs: a launch a step, and a fixed number of launches.

In a launch each program brings its rows to their thresholds for the columns' present ones, and leaves sums
over them: loads, densities, and the overlap Σ f fᵀ/Σ_j f of columns. The last program adds these up and moves
the columns' thresholds by a step of Newton's method, whose system it solves by conjugate gradients. Rows need
not be quite at their thresholds: their next step of Newton's method is in the loads. τ falls in stages, which
end at a rough error. A matrix that has arrived is left alone by all further launches.

Matrices of which something is decided beforehand, and those that do not arrive, are left to a program of
their own (:mod:`.assign_whole`). Everything is in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.assign_rows import INF, LAST, LEAST, balanced, flag, load_columns, load_rows, roots
from khot._kernels.triton.assign_system import add_up, conjugate, overlap, product
from khot._kernels.triton.fast import double, store
from khot._kernels.triton.float64_steps import ROUNDING
from khot._kernels.triton.functions import place, side
from khot._kernels.triton.split import last_of_row

STAGE = tl.constexpr(3.0)  # how much τ falls from stage to stage
COARSE = tl.constexpr(0.3)  # the error, relative to the goals, at which a stage ends; a guess may have it
GENTLE = tl.constexpr(0.1)  # above it, a column's error is on the scale of log-odds
CLOSE = tl.constexpr(3e-3)  # from here on, rows are brought exactly to their thresholds, and y is written
LOOSE = tl.constexpr(0.05)  # in τ: before, a row is left to its last step of Newton's method
REACH, LAST_REACH = tl.constexpr(4.0), tl.constexpr(8.0)  # the longest step, in τ
ROUGHLY = tl.constexpr(1e-2)  # the error, relative to its beginning, at which conjugate gradients end
MOST = 64  # of these, in a step

# What is known of a matrix. STATUS is OPEN until the matrix is DONE, or LEFT to a program of its own. STAGED
# is the present τ. EQUALLY, CLOSELY and GUESSED are flags: the sums of rows and columns are equal, rows are
# to be exact, the first step is from a guess. Rows take the SHIFT over from columns.
STATUS, TAU, STAGED, EQUALLY, CLOSELY, HIGHEST, GUESSED, ACCEPTED, SHIFT = (tl.constexpr(i) for i in range(9))
NUMBERS = tl.constexpr(16)
NOTES = 16  # and the columns' goals, how many rows are open to them, and a vector for the solver
OPEN, DONE, LEFT = (tl.constexpr(float(i)) for i in range(3))


def left_by_part(n: int) -> int:
    """Numbers: loads, densities, the number of rows that are not exact, and the overlap."""
    return n * n + 2 * n + 8


@triton.jit(do_not_specialize=["m", "k_matrix", "length", "parts"])
def begin_assignments(
    x, k, k_matrix, capacity, tau, bias, t, scratch, m, n, parts, length, AT_MOST: tl.constexpr,
    FLOAT64: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Where to start from, or that something is decided beforehand, or wrong."""
    ROWS: tl.constexpr = T.rows
    WIDTH: tl.constexpr = T.width
    matrix, part = place(parts)
    stride = n.to(tl.int64) * n + 2 * n + 8
    x_at, k_at = x.pointer + matrix * m * x.stride, k.pointer + matrix * k_matrix
    part_at = scratch.left + matrix * parts * stride
    lack = 64 * ROUNDING * (1 + n)
    below = tl.zeros((ROWS, WIDTH), tl.float64)
    least, most = tl.full((ROWS, WIDTH), INF, tl.float64), tl.full((ROWS, WIDTH), -INF, tl.float64)
    bad, sum_of_k = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    end = tl.minimum(m, (part + 1) * length)
    for first in range(part * length, end, T.rows):
        row, there, held = load_rows(x_at, x.stride, first, end, n, T.rows, T.width)
        own_k = double(tl.load(k_at + row * k.stride, mask=there, other=0.0))
        open_ = tl.abs(held) < INF
        count = tl.sum(tl.where(open_, 1.0, 0.0).to(tl.float64), axis=1)
        undecided = ((own_k > lack) & (own_k < count - lack)) | ((count == 0) & (own_k == 0))
        known = tl.sum(tl.where(held < INF, 0.0, 1.0).to(tl.float64), axis=1)
        bad += known + tl.where(undecided, 0.0, 1.0)
        sum_of_k += own_k
        below += tl.where(open_, 1.0, 0.0)
        least = tl.minimum(least, tl.where(open_, held, INF))
        most = tl.maximum(most, tl.where(open_, held, -INF))
        tl.store(t.r + matrix * m + row, row * 0.0 + float("nan"), mask=there)
    column = tl.arange(0, T.width)
    there = column < n
    at = part_at + part * stride
    tl.store(at + column, tl.sum(below, axis=0), mask=there)
    tl.store(at + n, tl.sum(bad, axis=0))
    tl.store(at + n + 1, tl.sum(sum_of_k, axis=0))
    tl.store(at + n + 2, tl.min(tl.min(least, axis=0), axis=0))
    tl.store(at + n + 3, tl.max(tl.max(most, axis=0), axis=0))
    if last_of_row(scratch.counter + matrix * (parts + 1), parts):
        open_to, faults, total_k, lowest, highest = _facts(part_at, stride, parts, n, T.rows, T.width)
        room, start, own_tau = load_columns(capacity, bias, tau, matrix, n, T.width)
        _start(
            scratch.state + matrix * (NUMBERS + 3 * n), t.c + matrix * n, open_to, faults,
            total_k, lowest, highest, room, start, own_tau, n, AT_MOST, FLOAT64, T.width,
        )  # fmt: skip


@triton.jit
def _facts(part_at, stride, parts, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What all parts have found: open rows of each column, faults, Σ k, and the ends of the scores."""
    column = tl.arange(0, WIDTH)
    below = tl.zeros((ROWS, WIDTH), tl.float64)
    bad, sum_of_k = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    least, most = tl.full((ROWS,), INF, tl.float64), tl.full((ROWS,), -INF, tl.float64)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        there = part < parts
        at = part_at + part * stride
        inside = there[:, None] & (column < n)[None, :]
        below += tl.load(at[:, None] + column[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        bad += tl.load(at + n, mask=there, other=0.0, cache_modifier=".cg")
        sum_of_k += tl.load(at + n + 1, mask=there, other=0.0, cache_modifier=".cg")
        least = tl.minimum(least, tl.load(at + n + 2, mask=there, other=INF, cache_modifier=".cg"))
        most = tl.maximum(most, tl.load(at + n + 3, mask=there, other=-INF, cache_modifier=".cg"))
    return (
        tl.sum(below, axis=0), tl.sum(bad, axis=0), tl.sum(sum_of_k, axis=0), tl.min(least, axis=0),
        tl.max(most, axis=0),
    )  # fmt: skip


@triton.jit
def _start(
    note, c_at, below, bad, sum_of_k, least, most, capacity, start, tau, n,
    AT_MOST: tl.constexpr, FLOAT64: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The note of a matrix, and its columns' first thresholds."""
    column = tl.arange(0, WIDTH)
    there = column < n
    faults, equal, goal = balanced(capacity, below * 0, below, sum_of_k, tau, AT_MOST)
    bad += faults
    spare = 64 * ROUNDING * (1 + tl.max(tl.abs(goal), axis=0))
    undecided = (goal > spare) & (below > 0) & ((goal < below - spare) | (equal == 0))
    good = undecided & (goal < INF) & (tl.abs(start) < INF)
    bad += tl.sum(tl.where(there & ~good, 1.0, 0.0).to(tl.float64), axis=0)
    status = tl.where(bad == 0, OPEN, LEFT)
    tau = tl.where(bad == 0, tau, 1.0)
    spread = tl.where(bad == 0, most - least, 0.0)
    highest = tau
    while (highest * STAGE < spread / 4) & (highest < 1e300):
        highest *= STAGE
    middle = tl.sum(start, axis=0) / n
    if AT_MOST:
        middle = tl.where(equal > 0, tl.min(tl.where(there, start, INF), axis=0), 0.0)
    start = start - middle
    if AT_MOST:
        start = tl.maximum(start, 0.0)
    start = tl.where(bad == 0, tl.where(there, start, 0.0), 0.0)
    guessed = flag(start != 0)
    # what rounding of the scores leaves of a load's digits
    accepted = (2e-13 if FLOAT64 else 1e-9) + 8 * ROUNDING * tl.maximum(tl.abs(least), tl.abs(most)) / tau
    tl.store(c_at + column, start, mask=there)
    tl.store(note + NUMBERS + column, goal, mask=there)
    tl.store(note + NUMBERS + n + column, below, mask=there)
    tl.store(note + STATUS, status)
    tl.store(note + TAU, tau)
    tl.store(note + STAGED, tl.where(guessed > 0, tau, highest))
    tl.store(note + EQUALLY, equal.to(tl.float64))
    tl.store(note + CLOSELY, tau * 0)
    tl.store(note + HIGHEST, highest)
    tl.store(note + GUESSED, guessed.to(tl.float64))
    tl.store(note + ACCEPTED, tl.where(bad == 0, accepted, 0.0))
    tl.store(note + SHIFT, tau * 0)


@triton.jit(do_not_specialize=["m", "k_matrix", "length", "parts"])
def step_assignments(
    x, k, k_matrix, out_pointer, t, scratch, m, n, parts, length, most, CDF: tl.constexpr,
    AT_MOST: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A step of the columns' thresholds, if the matrix is open."""
    matrix, part = place(parts)
    note = scratch.state + matrix * (NUMBERS + 3 * n)
    if tl.load(note + STATUS) == OPEN:
        stride = n.to(tl.int64) * n + 2 * n + 8
        part_at = scratch.left + matrix * parts * stride
        first, end = part * length, tl.minimum(m, (part + 1) * length)
        slope_at = scratch.window + matrix * m * n
        _rows(
            x.pointer + matrix * m * x.stride, x.stride, k.pointer + matrix * k_matrix, k.stride,
            out_pointer + matrix * m * n, t.r + matrix * m, t.c + matrix * n, note, slope_at,
            part_at + part * stride, first, end, n, CDF, T.rows, T.width,
        )  # fmt: skip
        overlap(slope_at, part_at + part * stride + (2 * n + 8), first, end, n, T.block, T.depth)
        if add_up(part_at, scratch.counter + matrix * (parts + 1), part, parts, stride, T.group, T.added):
            _move(note, t.c + matrix * n, part_at, n, most, AT_MOST, T.width, T.chunk)


@triton.jit
def _rows(
    x_at, x_stride, k_at, k_row, out_at, r_at, c_at, note, slope_at, part_at, first, end, n,
    CDF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Bring rows to their thresholds, and leave their sums; f/√Σ_j f is stored for the overlap."""
    column = tl.arange(0, WIDTH)
    c = tl.load(c_at + column, mask=column < n, other=0.0)
    tau, closely = tl.load(note + STAGED), tl.where(tl.load(note + CLOSELY) > 0, 1, 0)
    accepted, shift = tl.load(note + ACCEPTED), tl.load(note + SHIFT)
    last = tl.where(closely > 0, LAST, LOOSE)
    power = tl.zeros((), tl.float64) + 1  # which no CDF with full support has
    loads, slopes = tl.zeros((ROWS, WIDTH), tl.float64), tl.zeros((ROWS, WIDTH), tl.float64)
    inexact = tl.zeros((ROWS,), tl.float64)
    for start in range(first, end, ROWS):
        row, there, x = load_rows(x_at, x_stride, start, end, n, ROWS, WIDTH)
        k = double(tl.load(k_at + row * k_row, mask=there, other=0.0))
        open_ = tl.abs(x) < INF
        count = tl.sum(tl.where(open_, 1.0, 0.0).to(tl.float64), axis=1)
        u = tl.where(open_, x - c[None, :], 0.0)
        r = tl.load(r_at + row, mask=there, other=0.0) + shift
        r = roots(u, open_, k, count, r, tau, last, power, CDF)
        r = tl.where(count > 0, r, 0.0)
        tl.debug_barrier()  # all threads have read what is stored again
        tl.store(r_at + row, r, mask=there)
        z = (u - r[:, None]) / tau
        tail, density = side(z, z, z > 0, 0.0, -tl.abs(z), power, CDF)
        above = open_ & (z > 0)
        f = tl.where(open_, density, 0.0)
        mass = tl.sum(f, axis=1)
        spare = tl.sum(tl.where(above, 1.0, 0.0).to(tl.float64), axis=1) - k
        miss = spare + tl.sum(tl.where(open_, tl.where(above, -tail, tail), 0.0), axis=1)
        inexact += tl.where(tl.abs(miss) <= accepted * k, 0.0, 1.0)
        moves = mass > LEAST
        inverse = tl.where(moves, 1 / tl.where(moves, mass, 1.0), 0.0)
        step = tl.minimum(tl.maximum(miss * inverse, -1.0), 1.0)
        y = tl.where(open_, tl.where(above, 1 - tail, tail), 0.0)
        inside = there[:, None] & (column < n)[None, :]
        at = row[:, None] * n + column[None, :]
        if closely > 0:
            store(out_at + at, y, inside)
        tl.store(slope_at + at, f * tl.sqrt(inverse)[:, None], mask=inside)
        loads += y - f * step[:, None]
        slopes += f
    tl.store(part_at + column, tl.sum(loads, axis=0), mask=column < n)
    tl.store(part_at + n + column, tl.sum(slopes, axis=0), mask=column < n)
    tl.store(part_at + 2 * n, tl.sum(inexact, axis=0))
    tl.debug_barrier()


@triton.jit
def _gently(miss, goal, below):
    """Far away, a load's error on the scale of log-odds neither explodes for empty columns nor stalls for
    full ones."""
    got = tl.minimum(tl.maximum(miss + goal, 0.01 * goal), below - 0.01 * tl.maximum(below - goal, 0.01))
    left = tl.maximum(below - got, 1e-3)
    wanted = tl.maximum(below - goal, 1e-3)
    return (tl.log(got / goal) - tl.log(left / wanted)) * got * left / below


@triton.jit
def _move(note, c_at, part_at, n, most, AT_MOST: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Whether the matrix is done, or else a step of its columns' thresholds, from the sums over all rows."""
    column = tl.arange(0, WIDTH)
    there = column < n
    loads = tl.load(part_at + column, mask=there, other=0.0)
    slopes = tl.load(part_at + n + column, mask=there, other=0.0)
    inexact = tl.load(part_at + 2 * n)
    overlap_at, direction_at = part_at + (2 * n + 8), note + NUMBERS + 2 * n
    goal = tl.load(note + NUMBERS + column, mask=there, other=1.0)
    below = tl.load(note + NUMBERS + n + column, mask=there, other=2.0)
    c = tl.load(c_at + column, mask=there, other=0.0)
    tau, stage, highest = tl.load(note + TAU), tl.load(note + STAGED), tl.load(note + HIGHEST)
    equal = tl.where(tl.load(note + EQUALLY) > 0, 1, 0)
    guessed, closely = tl.load(note + GUESSED), tl.load(note + CLOSELY)
    miss = tl.where(there, loads - goal, 0.0)
    off = miss
    if AT_MOST:  # a load may be below its goal where c = 0
        off = tl.where((equal > 0) | (c > 0), miss, tl.maximum(miss, 0.0))
    lost = flag(~(tl.abs(off) < INF))
    error = tl.max(tl.abs(off) / goal, axis=0)
    final = tl.where(stage == tau, 1, 0)
    exact = tl.where((closely > 0) & (inexact == 0) & (error <= tl.load(note + ACCEPTED)), final, 0)
    tl.store(note + GUESSED, guessed * 0)
    if (lost > 0) | (exact > 0):
        tl.store(note + STATUS, tl.where(lost > 0, LEFT, DONE))
    elif (guessed > 0) & (error > COARSE):  # the guess was too far away
        tl.store(c_at + column, c * 0, mask=there)
        tl.store(note + STAGED, highest)
        tl.store(note + SHIFT, stage * 0)
    else:
        mean = tl.sum(slopes, axis=0) / n
        slopes += tl.where(there, 1e-12 * (mean + 1e-30), 0.0)
        own = tl.load(overlap_at + column * (n + 1), mask=there, other=0.0)
        diagonal = tl.maximum(slopes - own, 1e-12 * (mean + 1e-30))
        wanted = tl.where(error > GENTLE, _gently(miss, goal, below), miss)
        moves, back, tie = there, c * 0, tl.sum(diagonal * 0, axis=0)
        if AT_MOST:
            # a column has the threshold 0 or its goal as load, whichever it is nearer to (Hintermüller, Ito,
            # Kunisch 2002)
            moves = there & ((equal > 0) | (c > -stage * wanted / diagonal))
            back = tl.where(there & ~moves, -c / stage, 0.0)
            wanted -= product(back, slopes, overlap_at, direction_at, tie, n, WIDTH, CHUNK)
        # the same constant added to all thresholds changes nothing, so that one direction has to be fixed
        all_move = flag(there & ~moves) == 0
        tie = tl.where(all_move, tl.sum(tl.where(there, diagonal, 0.0), axis=0) / n / n, 0.0)
        tolerance = tl.where(final > 0, tl.minimum(ROUGHLY, tl.maximum(0.1 * error, 1e-10)), ROUGHLY)
        wanted = tl.where(moves, wanted, 0.0)
        step = conjugate(
            wanted, slopes, diagonal, overlap_at, direction_at, moves, tie, tolerance, most, n, WIDTH, CHUNK
        )
        step = tl.where(moves, step, back)
        reach = tl.where(final > 0, LAST_REACH, REACH)
        longest = tl.max(tl.abs(step), axis=0)
        c += step * (stage * reach / tl.maximum(longest, reach))
        shift = tl.sum(tl.where(there, c, 0.0), axis=0) / n
        if AT_MOST:
            lowest = tl.min(tl.where(there, c, INF), axis=0)
            shift = tl.where(equal > 0, lowest, tl.maximum(lowest, 0.0))
        c -= shift
        if AT_MOST:
            c = tl.maximum(c, 0.0)
        tl.store(c_at + column, c, mask=there)
        tl.store(note + SHIFT, shift)
        leaves = (final == 0) & (error <= COARSE)
        lower = tl.where(stage > 1.001 * STAGE * tau, stage / STAGE, tau)
        tl.store(note + STAGED, tl.where(leaves, lower, stage))
        tl.store(note + CLOSELY, tl.where((final > 0) & (error <= CLOSE), 1.0, closely))


KERNELS = (begin_assignments, step_assignments)
