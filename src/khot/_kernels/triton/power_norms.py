"""The blocks of the projection onto the permutahedron in a p-norm: one launch after torch has sorted.

As in the reference (`_kernels.reference.permutahedron`), all blocks of a row that break the order are pooled
at once, until none does. The level of a block has no closed form: it is a root, which Newton's steps find
inside a bracket, those of all blocks of the row at a time. A program does a row, in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import permutahedron as reference
from khot._kernels.triton import layout, row_sort
from khot._kernels.triton.fast import double, joined
from khot._kernels.triton.guard import stalls
from khot._kernels.triton.launch import launch
from khot._kernels.triton.projection import FAR_WEIGHT, add2, bounded, greater, score
from khot._kernels.triton.sizes import next_power_of_2

LONGEST = 4096  # a longer row would keep one multiprocessor for too long: the reference serves beyond
EVALUATIONS = 128  # at most, of the sums of a row; Newton's steps take about ten
WIDTH = 256
ROUNDING = tl.constexpr(2.0**-52)
CLOSE = tl.constexpr(1e-2)  # of a bracket: shorter steps of Newton's method need no bisection


@triton.jit
def _power(t, exponent):
    """sgn(t) |t|^exponent."""
    size = tl.exp(exponent * tl.log(tl.where(t == 0, 1.0, tl.abs(t))))
    return tl.where(t == 0, 0.0, tl.where(t < 0, -size, size))


@triton.jit
def _breaks(u_at, v_at, start_at, mark_at, n, WIDTH: tl.constexpr):
    """Marks the starts of blocks that are not below the block in front. Returns whether there are any."""
    found = tl.zeros((WIDTH,), tl.int32)
    for at in range(0, n, WIDTH):
        here = at + tl.arange(0, WIDTH)
        there = here < n
        starts = there & (here > 0) & (tl.load(start_at + here, mask=there, other=-1) == here)
        before = tl.load(start_at + here - 1, mask=starts, other=0)
        du = tl.load(u_at + before, mask=starts, other=0.0) - tl.load(u_at + here, mask=starts, other=0.0)
        dv = tl.load(v_at + before, mask=starts, other=0.0) - tl.load(v_at + here, mask=starts, other=0.0)
        broken = tl.where(starts & (du + dv <= 0), 1, 0)
        tl.store(mark_at + here, broken, mask=there)
        found = tl.maximum(found, broken)
    tl.debug_barrier()
    return tl.max(found)


@triton.jit
def _pool(start_at, mark_at, n, WIDTH: tl.constexpr):
    """Joins each marked block to the one in front."""
    last = 0
    for at in range(0, n, WIDTH):
        here = at + tl.arange(0, WIDTH)
        there = here < n
        starts = there & (tl.load(start_at + here, mask=there, other=-1) == here)
        starts = starts & (tl.load(mark_at + here, mask=there, other=1) == 0)
        first = tl.maximum(tl.associative_scan(tl.where(starts, here, 0), 0, greater), last)
        last = tl.max(first)
        tl.store(start_at + here, first, mask=there)
    tl.debug_barrier()


@triton.jit
def _bracket(
    u_at, w_at, v_at, low_at, high_at, span_at, total_at, start_at, n, less, WIDTH: tl.constexpr
):  # fmt: skip
    """Σ w of every block; ends that enclose its level, and how far they are apart; and their middle."""
    last, last_total = -1, tl.zeros((), tl.float64)
    for at in range(0, n, WIDTH):
        here = at + tl.arange(0, WIDTH)
        there = here < n
        first = tl.load(start_at + here, mask=there, other=-2)
        w = tl.load(w_at + here, mask=there, other=0.0)
        _, total, _ = tl.associative_scan((first, w, w), 0, add2)
        total += tl.where(first == last, last_total, 0.0)
        last_total = tl.sum(tl.where(tl.arange(0, WIDTH) == WIDTH - 1, total, 0.0))
        last = tl.max(first)
        ends = there & (tl.load(start_at + here + 1, mask=here + 1 < n, other=-1) != first)
        # if all were as large as the first one; and if they were as small as the last one
        high = _power(-total / (here - first + 1).to(tl.float64), less)
        a = tl.load(u_at + here, mask=ends, other=0.0) - tl.load(u_at + first, mask=ends, other=0.0)
        low = high + a
        tl.store(total_at + first, total, mask=ends)
        tl.store(low_at + first, low, mask=ends)
        tl.store(high_at + first, high, mask=ends)
        tl.store(span_at + first, high - low, mask=ends)
        tl.store(v_at + first, 0.5 * low + 0.5 * high, mask=ends)
    tl.debug_barrier()


@triton.jit
def _step(
    u_at, v_at, low_at, high_at, span_at, total_at, start_at, n, count, exponent, WIDTH: tl.constexpr
):  # fmt: skip
    """The levels after a step, Newton's if it stays in the bracket. Where one is found, its bracket is empty.
    Returns whether one is not."""
    found = tl.zeros((WIDTH,), tl.int32)
    last, last_sum, last_slope = -1, tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    for at in range(0, n, WIDTH):
        here = at + tl.arange(0, WIDTH)
        there = here < n
        first = tl.load(start_at + here, mask=there, other=-2)
        v = tl.load(v_at + first, mask=there, other=0.0)
        a = tl.load(u_at + here, mask=there, other=0.0) - tl.load(u_at + first, mask=there, other=0.0)
        t = a - v
        s = tl.where(there, _power(t, exponent), 0.0)
        slope = tl.where(there & (t != 0), exponent * s / tl.where(t == 0, 1.0, t), 0.0)
        _, s, slope = tl.associative_scan((first, s, slope), 0, add2)
        s += tl.where(first == last, last_sum, 0.0)
        slope += tl.where(first == last, last_slope, 0.0)
        last_sum = tl.sum(tl.where(tl.arange(0, WIDTH) == WIDTH - 1, s, 0.0))
        last_slope = tl.sum(tl.where(tl.arange(0, WIDTH) == WIDTH - 1, slope, 0.0))
        last = tl.max(first)

        ends = there & (tl.load(start_at + here + 1, mask=here + 1 < n, other=-1) != first)
        low = tl.load(low_at + first, mask=ends, other=0.0)
        high = tl.load(high_at + first, mask=ends, other=0.0)
        live = ends & (low < high)
        miss = s - tl.load(total_at + first, mask=ends, other=0.0)
        low, high = tl.where(miss > 0, v, low), tl.where(miss > 0, high, v)
        newton, middle = v + miss / slope, 0.5 * low + 0.5 * high
        span = tl.load(span_at + first, mask=ends, other=0.0)
        slow, span = stalls(high - low, span, tl.abs(newton - v) <= CLOSE * (high - low), count)
        inside = (newton > low) & (newton < high) & ~slow
        after = tl.where(inside, newton, middle)
        near = inside & (tl.abs(newton - v) <= ROUNDING * tl.maximum(tl.abs(low), tl.abs(high)))
        done = (miss == 0) | near | ~((after > low) & (after < high))
        after = tl.where(miss == 0, v, after)
        tl.store(v_at + first, after, mask=live)
        tl.store(low_at + first, tl.where(done, after, low), mask=live)
        tl.store(high_at + first, tl.where(done, after, high), mask=live)
        tl.store(span_at + first, span, mask=live)
        found = tl.maximum(found, tl.where(live & ~done, 1, 0))
    tl.debug_barrier()
    return tl.max(found)


@triton.jit(do_not_specialize=["rows", "n", "evaluations"])
def _power_levels(
    z_pointer, order_pointer, w_pointer, w_stride, w_order_pointer, w_order_stride, tau_pointer, tau_stride,
    index_pointer, w_index_pointer, start_pointer, v_pointer, mark_pointer, scratch_pointer, rows, n,
    evaluations, less_high, less_low, exponent_high, exponent_low, WIDTH: tl.constexpr,
):  # fmt: skip
    """p − 1 and its inverse are given as the sums of two numbers."""
    row = tl.program_id(0).to(tl.int64)
    less, exponent = joined(less_high, less_low), joined(exponent_high, exponent_low)
    start_at, v_at, mark_at = start_pointer + row * n, v_pointer + row * n, mark_pointer + row * n
    size = rows.to(tl.int64) * n
    u_at = scratch_pointer + row * n
    w_at, low_at, high_at, span_at, total_at = (
        u_at + size, u_at + 2 * size, u_at + 3 * size, u_at + 4 * size, u_at + 5 * size,
    )  # fmt: skip
    tau = tl.load(tau_pointer + row * tau_stride).to(tl.float64)
    for at in range(0, n, WIDTH):
        here = at + tl.arange(0, WIDTH)
        there = here < n
        u = score(double(tl.load(z_pointer + row * n + here, mask=there, other=0.0)), tau)
        w = double(tl.load(w_pointer + row * w_stride + here, mask=there, other=0.0))
        w = tl.where(w == w, bounded(w, FAR_WEIGHT), 0.0)
        tl.store(u_at + here, tl.where(u == u, u, 0.0), mask=there)
        tl.store(w_at + here, w, mask=there)
        tl.store(start_at + here, here, mask=there)
        tl.store(v_at + here, _power(-w, less), mask=there)
        order = tl.load(order_pointer + row * n + here, mask=there, other=0)
        w_order = tl.load(w_order_pointer + row * w_order_stride + here, mask=there, other=0)
        tl.store(index_pointer + row * n + here, order.to(tl.int32), mask=there)
        tl.store(w_index_pointer + row * n + here, w_order.to(tl.int32), mask=there)
    tl.debug_barrier()
    while _breaks(u_at, v_at, start_at, mark_at, n, WIDTH) > 0:
        _pool(start_at, mark_at, n, WIDTH)
        _bracket(u_at, w_at, v_at, low_at, high_at, span_at, total_at, start_at, n, less, WIDTH)
        count = 0
        live = 1
        while live > 0:
            live = _step(u_at, v_at, low_at, high_at, span_at, total_at, start_at, n, count, exponent, WIDTH)
            count += 1
            live = tl.where(count < evaluations, live, 0)
    for at in range(0, n, WIDTH):
        here = at + tl.arange(0, WIDTH)
        first = tl.load(start_at + here, mask=here < n, other=0)
        v = tl.load(v_at + first, mask=here < n, other=0.0)
        tl.store(v_at + here, v, mask=here < n)


KERNELS = (_power_levels,)


def power_blocks(z: Tensor, w: Tensor, tau: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`permutahedron.power_blocks`, in Triton."""
    n = z.shape[-1]
    if z.numel() == 0 or n > LONGEST:
        return reference.power_blocks(z, w, tau, p)
    rows = z.numel() // n
    scores, order = row_sort.descending(z)
    weights, w_order = row_sort.descending(w)
    index, w_index, start, mark = (z.new_empty(z.shape, dtype=torch.int32) for _ in range(4))
    v, scratch = (z.new_empty(shape, dtype=torch.float64) for shape in (z.shape, (6, rows, n)))
    width = min(WIDTH, max(32, next_power_of_2(n)))
    launch(
        _power_levels, rows,
        scores, order, *layout.rows(weights.expand(z.shape), n), *layout.rows(w_order.expand(z.shape), n),
        *layout.numbers(tau, z.shape[:-1], z.device), index, w_index, start, v, mark, scratch, rows, n,
        EVALUATIONS, *layout.halves(p - 1), *layout.halves(1 / (p - 1)), WIDTH=width, num_warps=width // 32,
    )  # fmt: skip
    return index, w_index, start, v
