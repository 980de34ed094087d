"""The projection onto the permutahedron of sorted long rows of float32: one launch.

The method is that of :mod:`.short_projection`, and a program goes through its row in passes, a chunk at a
time: where segments begin and end, the sums, the chords to the points 1, 2, 4, … places away, the nearest
points that are left, and the means of blocks. Places of segments lie in the memory of results until these are
known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.triton import layout, row_sort
from khot._kernels.triton.fast import store
from khot._kernels.triton.launch import launch
from khot._kernels.triton.projection import greater
from khot._kernels.triton.short_projection import (
    ENDLESS,
    ENDLESS_WEIGHT,
    LEAST,
    digits_of,
    finite,
    inverse_tau,
    since,
    smaller,
    steepest,
    within,
)
from khot._kernels.triton.sizes import cdiv

CHUNK, WARPS = 1024, 8


@triton.jit
def _scores(z_at, w_at, column, n, inverse):
    """u and v of a chunk."""
    z = tl.load(z_at + column, mask=column < n, other=0.0)
    w = tl.load(w_at + column, mask=column < n, other=0.0)
    return finite(z, ENDLESS) * tl.maximum(inverse, LEAST), finite(w, ENDLESS_WEIGHT)


@triton.jit
def _of_one(z_at, w_at, at, inverse):
    """u and v of some places."""
    z, w = tl.load(z_at + at), tl.load(w_at + at)
    return finite(z, ENDLESS) * tl.maximum(inverse, LEAST), finite(w, ENDLESS_WEIGHT)


@triton.jit
def _sums_from(first, last, total, z_at, w_at, column, n, inverse, CHUNK: tl.constexpr):
    """Σ (u − v), less those at the place `first` of each one's block, from there up to a chunk's places: of
    the block `last` of the chunk before there is `total` already. And both for the next chunk."""
    u, v = _scores(z_at, w_at, column, n, inverse)
    u_first, v_first = _of_one(z_at, w_at, tl.maximum(first, 0), inverse)
    _, sums = tl.associative_scan((first, (u - u_first) - (v - v_first)), 0, within)
    sums += tl.where(first == last, total, 0.0)
    return sums, tl.max(first), tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, sums, 0.0))


@triton.jit
def _link(left_at, before_at, after_at, n, parts, CHUNK: tl.constexpr):
    """For each place the last one up to it, and the first one from it on, that is left."""
    tl.debug_barrier()
    lane, carried = tl.arange(0, CHUNK), parts * 0
    for part in range(parts):
        column = part * CHUNK + lane
        left = tl.load(left_at + column, mask=column < n, other=0)
        before = tl.maximum(tl.associative_scan(tl.where(left > 0, column, 0), 0, greater), carried)
        tl.store(before_at + column, before, mask=column < n)
        carried = tl.max(before)
    carried = parts * 0 + n
    for behind in range(parts):
        column = (parts - 1 - behind) * CHUNK + lane
        left = tl.load(left_at + column, mask=column < n, other=0)
        after = tl.associative_scan(tl.where(left > 0, column, n), 0, smaller, reverse=True)
        after = tl.minimum(after, carried)
        tl.store(after_at + column, after, mask=column < n)
        carried = tl.min(after)
    tl.debug_barrier()


@triton.jit
def _asked(left_at, begin_at, column, n):
    """Places that are left and may be dropped; and where the segments of all places begin."""
    left = tl.load(left_at + column, mask=column < n, other=0)
    begin = tl.load(begin_at + column, mask=column < n, other=0)
    return (left > 0) & (begin < column), begin


@triton.jit
def _check(left_at, begin_at, sum_at, before_at, after_at, n, parts, CHUNK: tl.constexpr):
    """Marks with 2 what is left without being above the chord to its neighbours, and whether there is any."""
    lane = tl.arange(0, CHUNK)
    found = tl.zeros((CHUNK,), tl.int32)
    for part in range(parts):
        column = part * CHUNK + lane
        asked, begin = _asked(left_at, begin_at, column, n)
        before = tl.load(before_at + column - 1, mask=asked, other=0)
        after = tl.load(after_at + column + 1, mask=asked & (column + 1 < n), other=n)
        here = tl.load(sum_at + column, mask=asked, other=0.0)
        lower = (here - since(sum_at, before, begin)) * (after - column).to(tl.float64)
        upper = (tl.load(sum_at + after) - here) * (column - before).to(tl.float64)
        dropped = asked & tl.where(lower > upper, False, True)
        tl.store(left_at + column, lane * 0 + 2, mask=dropped)
        found += tl.where(dropped, 1, 0)
    tl.debug_barrier()
    return tl.max(found) > 0


@triton.jit
def _drop(left_at, begin_at, end_at, sum_at, before_at, after_at, n, parts, steps, CHUNK: tl.constexpr):
    """Drops what is not above all chords to the places left that are 1, 2, 4, … away at least."""
    lane = tl.arange(0, CHUNK)
    for part in range(parts):
        column = part * CHUNK + lane
        asked, begin = _asked(left_at, begin_at, column, n)
        any_asked = tl.max(tl.where(asked, 1, 0)) > 0
        if any_asked:
            end = tl.load(end_at + column + 1, mask=asked & (column + 1 < n), other=n)
            here = tl.load(sum_at + column, mask=asked, other=0.0)
            falls, rises = here * 0 + float("inf"), here * 0 - float("inf")
            given = ((here,), column, n, begin, end, asked, sum_at, before_at, after_at)
            for hop in range(steps):
                falls, rises = steepest(falls, rises, 1 << hop, *given, 0, False)
            marked = tl.load(left_at + column, mask=asked, other=0) == 2
            tl.store(left_at + column, lane * 0, mask=asked & (marked | (falls <= rises)))


@triton.jit
def _chord(falls, rises, hop, scale, here, column, begin, end, inner, sum_at):
    """The least slope from a place before and the greatest to one behind, with those so far away."""
    near, far = inner & (column - begin >= hop), inner & (end - column >= hop)
    before = tl.load(sum_at + column - hop, mask=near & (column - hop > begin), other=0.0)
    slope = (here - before) * scale
    falls = tl.where(near & (slope < falls), slope, falls)
    slope = (tl.load(sum_at + column + hop, mask=far) - here) * scale
    return falls, tl.where(far & (slope > rises), slope, rises)


@triton.jit(do_not_specialize=["n", "parts", "steps"])
def _project_long_rows(
    z, order, w, w_order, tau, out_pointer, index_pointer, w_index_pointer, start_pointer, after_pointer,
    left_pointer, sums_pointer, n, parts, steps, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_at, w_at = z.pointer + row * z.stride, w.pointer + row * w.stride
    begin_at, end_at = index_pointer + row * n, w_index_pointer + row * n
    before_at, after_at = start_pointer + row * n, after_pointer + row * n
    sum_at, left_at = sums_pointer + row * (n + 1), left_pointer + row * n
    inverse, poison = inverse_tau(*tau, row, row >= 0)
    # a NaN comes first
    first_z, first_w = tl.load(z_at).to(tl.float32), tl.load(w_at).to(tl.float32)
    bad = (first_z != first_z) | (first_w != first_w)
    poison = tl.where(bad, float("nan"), poison)
    lane = tl.arange(0, CHUNK)

    carried = tl.zeros((), tl.int32) + 0x7FFFFFFF
    for part in range(parts):
        column = part * CHUNK + lane
        u, v = _scores(z_at, w_at, column, n, inverse)
        least = tl.associative_scan(digits_of((u - v) + 0.0), 0, smaller)  # −0 is 0
        least = tl.minimum(least, carried)
        tl.store(before_at + column + 1, least, mask=column + 1 < n)
        carried = tl.min(least)
    tl.debug_barrier()
    most, next_end = tl.zeros((), tl.int32) - 0x7FFFFFFF, parts * 0 + n
    for behind in range(parts):
        column = (parts - 1 - behind) * CHUNK + lane
        u, v = _scores(z_at, w_at, column, n, inverse)
        digits = tl.where(column < n, digits_of((u - v) + 0.0), -0x7FFFFFFF)
        rest = tl.maximum(tl.associative_scan(digits, 0, greater, reverse=True), most)
        inner = (column > 0) & (column < n)
        certain = inner & (tl.load(before_at + column, mask=inner, other=0) > rest)
        end = tl.associative_scan(tl.where(certain, column, n), 0, smaller, reverse=True)
        end = tl.minimum(end, next_end)
        tl.store(end_at + column, end, mask=column < n)
        most, next_end = tl.max(rest), tl.min(end)
    tl.debug_barrier()
    last, total = parts * 0, tl.zeros((), tl.float64)
    tl.store(sum_at, total)
    for part in range(parts):
        column = part * CHUNK + lane
        valid = column < n
        certain = valid & (tl.load(end_at + column, mask=valid, other=-1) == column)
        start = tl.maximum(tl.associative_scan(tl.where(certain, column, 0), 0, greater), last)
        tl.store(begin_at + column, start, mask=valid)
        sums, last, total = _sums_from(start, last, total, z_at, w_at, column, n, inverse, CHUNK)
        tl.store(sum_at + column + 1, sums, mask=valid)
    tl.debug_barrier()

    for part in range(parts):
        column = part * CHUNK + lane
        valid = column < n
        begin = tl.load(begin_at + column, mask=valid, other=0)
        end = tl.load(end_at + column + 1, mask=column + 1 < n, other=n)
        inner, here = valid & (column > begin), tl.load(sum_at + column, mask=valid, other=0.0)
        falls, rises = here * 0 + float("inf"), here * 0 - float("inf")
        scale = tl.zeros((), tl.float64) + 1
        for hop in range(steps):
            falls, rises = _chord(falls, rises, 1 << hop, scale, here, column, begin, end, inner, sum_at)
            scale *= 0.5
        left = (column == begin) | (falls > rises)
        tl.store(left_at + column, tl.where(left, 1, 0), mask=valid)

    _link(left_at, before_at, after_at, n, parts, CHUNK)
    found = _check(left_at, begin_at, sum_at, before_at, after_at, n, parts, CHUNK)
    while found:
        _drop(left_at, begin_at, end_at, sum_at, before_at, after_at, n, parts, steps, CHUNK)
        _link(left_at, before_at, after_at, n, parts, CHUNK)
        found = _check(left_at, begin_at, sum_at, before_at, after_at, n, parts, CHUNK)

    # the sums of blocks, which stand at their first places
    last, total = parts * 0 - 1, tl.zeros((), tl.float64)
    for part in range(parts):
        column = part * CHUNK + lane
        valid = column < n
        first = tl.load(before_at + column, mask=valid, other=-2)
        sums, last, total = _sums_from(first, last, total, z_at, w_at, column, n, inverse, CHUNK)
        after = tl.load(after_at + column + 1, mask=column + 1 < n, other=n)
        tl.store(sum_at + first, sums, mask=valid & (after == column + 1))
    tl.debug_barrier()
    for part in range(parts):
        column = part * CHUNK + lane
        valid = column < n
        first = tl.load(before_at + column, mask=valid, other=0)
        after = tl.load(after_at + column + 1, mask=column + 1 < n, other=n)
        u, v = _scores(z_at, w_at, column, n, inverse)
        u_first, v_first = _of_one(z_at, w_at, first, inverse)
        y = (u - u_first) - tl.load(sum_at + first) / tl.maximum(after - first, 1).to(tl.float64) + v_first
        # an infinite w makes the mean of its block infinite, and two of opposite signs leave no mean
        lowest = finite(tl.load(w_at + after - 1), ENDLESS_WEIGHT)
        y += tl.where(v_first >= ENDLESS_WEIGHT, float("inf"), 0.0)
        y -= tl.where(lowest <= -ENDLESS_WEIGHT, float("inf"), 0.0)
        own_order = tl.load(order.pointer + row * order.stride + column, mask=valid, other=0)
        own_w_order = tl.load(w_order.pointer + row * w_order.stride + column, mask=valid, other=0)
        store(out_pointer + row * n + own_order, y + poison, valid)
        tl.store(begin_at + column, own_order.to(tl.int32), mask=valid)
        tl.store(end_at + column, own_w_order.to(tl.int32), mask=valid)


KERNELS = (_project_long_rows,)


# -------------------------------------------------------------------------------------- the host


def permutahedron(
    z: Tensor, w: Tensor, tau: Tensor, regularization: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The projection of rows that a program each goes through, and its blocks."""
    n = z.shape[-1]
    rows = z.numel() // n
    scores, order = sorted_once(z)
    weights, w_order = sorted_once(w)
    y = z.new_empty(z.shape)
    index, w_index, start, after = (z.new_empty(z.shape, dtype=torch.int32) for _ in range(4))
    left = z.new_empty(z.shape, dtype=torch.int8)
    sums = z.new_empty(rows * (n + 1), dtype=torch.float64)
    launch(
        _project_long_rows, rows,
        *(layout.rows(each.expand(z.shape), n) for each in (scores, order, weights, w_order)),
        layout.values(tau, z.shape[:-1], z.device), y, index, w_index, start, after, left, sums,
        n, cdiv(n, CHUNK), (n - 1).bit_length(), CHUNK=CHUNK, num_warps=WARPS, **layout.registers(),
    )  # fmt: skip
    return y, index, w_index, start


def sorted_once(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in descending order, and the order; of rows that are one in memory, this one."""
    once = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride()[:-1])]
    return row_sort.descending(once)
