"""What of a two-sided assignment is decided before anything has to be solved, by one program.

Rows and columns that take nothing, or all that is left to them, as in the reference
(`_kernels.reference.soft_assign`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.assign_rows import EQUAL, INF, balanced, flag, load_rows, wanted
from khot._kernels.triton.fast import double
from khot._kernels.triton.float64_steps import ROUNDING


@triton.jit
def _facts(x_at, x_stride, k_at, k_row, m, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Whether there is a NaN or a negative k; Σk; the number of +inf in each column, and of entries that may
    be selected; and Σ|k| and max |k| of what is left of k beside +inf."""
    bad, sum_of_k = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    left, most = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
    pinned, may = tl.zeros((ROWS, WIDTH), tl.float64), tl.zeros((ROWS, WIDTH), tl.float64)
    for start in range(0, m, ROWS):
        row, there, x = load_rows(x_at, x_stride, start, m, n, ROWS, WIDTH)
        k = double(tl.load(k_at + row * k_row, mask=there, other=0.0))
        infinite = tl.where(x == INF, 1.0, 0.0)
        bad += tl.sum(tl.where(x != x, 1.0, 0.0).to(tl.float64), axis=1) + tl.where(k >= 0, 0.0, 1.0)
        sum_of_k += k
        pinned += infinite
        may += tl.where(x == -INF, 0.0, 1.0)
        lacking = tl.abs(k - tl.sum(infinite, axis=1))
        left += tl.where(there, lacking, 0.0)
        most = tl.maximum(most, tl.where(there, lacking, 0.0))
    return (
        tl.sum(bad, axis=0), tl.sum(sum_of_k, axis=0), tl.sum(pinned, axis=0), tl.sum(may, axis=0),
        tl.sum(left, axis=0), tl.max(most, axis=0),
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
        row, there, x = load_rows(x_at, x_stride, start, m, n, ROWS, WIDTH)
        state = tl.load(state_at + row, mask=there, other=1.0)
        k = wanted(x, double(tl.load(k_at + row * k_row, mask=there, other=0.0)), settled)
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
    failed = tl.maximum(tl.max(broken, axis=0), flag(wrong))
    return settled, left, below, failed, flag(full | none), ends[0], ends[1]


@triton.jit
def goals(
    x_at, x_stride, k_at, k_row, capacity, start, tau, m, n,
    AT_MOST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Whether the arguments are in their ranges (otherwise the status 2); whether the sums of k and of the
    capacities are equal; what is left of the capacities beside +inf; and Σ|k| and max |k|, of what is left of
    k."""
    wrong, total_k, pinned, may, left_k, most_k = _facts(x_at, x_stride, k_at, k_row, m, n, ROWS, WIDTH)
    faults, equal, goal = balanced(capacity, pinned, may, total_k, tau, AT_MOST)
    wrong += faults + tl.sum(tl.where(capacity >= 0, 0.0, 1.0), axis=0)
    wrong += tl.sum(tl.where(tl.abs(start) < INF, 0.0, 1.0), axis=0)
    goal = tl.where(tl.arange(0, WIDTH) < n, goal - pinned, 0.0)
    return tl.where(wrong > 0, 2, 0), equal, goal, left_k, most_k


@triton.jit
def decide_all(
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
    status = tl.where((status == 0) & (flag(free) == 0), 1, status)
    return status, settled, tl.where(free, load, 0.0), below, low, high
