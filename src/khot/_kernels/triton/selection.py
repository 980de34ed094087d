"""The k-th largest entry of a row, by bisection of the bits on chip or digit by digit; and the hard mask."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import topk_mask as reference
from khot._kernels.triton import layout
from khot._kernels.triton.functions import chunks, get, load, place
from khot._kernels.triton.launch import launch

# ----------------------------------------------------------------------------------- what is shared


@triton.jit
def ordered(x):
    """Integers in the order of the scores; −0 is 0."""
    x = tl.where(x == 0, 0.0, x)
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        key = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key


@triton.jit
def select(key, valid, k):
    """The k-th largest key of each row, k from 1 to as many as are valid; or, between it and the next smaller
    one, any number that parts the two."""
    low = tl.min(tl.where(valid, key, tl.max(key, axis=1)[:, None]), axis=1)
    high = tl.max(tl.where(valid, key, low[:, None]), axis=1) + 1
    running = tl.sum(tl.where(low + 1 < high, 1, 0))
    while running > 0:
        middle = (low & high) + ((low ^ high) >> 1)
        count = tl.sum(tl.where(valid & (key >= middle[:, None]), 1, 0), axis=1)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, low + 1, middle))
        running = tl.sum(tl.where(low + 1 < high, 1, 0))
    return low


@triton.jit
def digits(pointer, rows, row, k, wanted):
    """Follows the histograms of the first `wanted` digits to the k-th largest key: its digits, what is left
    of k among the keys that have them, and how many these are."""
    digit = tl.arange(0, 256)
    left, level = k, k * 0
    prefix = tl.zeros((), tl.int64)
    for i in range(wanted):
        counts = tl.load(pointer + (i * rows + row) * 256 + digit)
        reach = tl.sum(counts) - tl.cumsum(counts) + counts  # keys with this digit or a greater one
        chosen = tl.max(tl.where(reach >= left, digit, 0))
        level = tl.sum(tl.where(digit == chosen, counts, 0))
        left = left - (tl.sum(tl.where(digit == chosen, reach, 0)) - level)
        prefix = prefix * 256 + chosen - tl.where(i == 0, 128, 0)
    return prefix, left, level


@triton.jit
def _count_digits(sums, given, x, valid, row, column):
    counts, nan, selectable, pinned = sums
    prefix, later, shift = given
    key = ordered(x)
    # the first digit has the sign, so it runs from −128, and no digit before it
    digit = ((key >> shift) + 128 * (1 - later)) & 255
    match = valid & ((key >> shift >> 8) * later == prefix)
    counts += tl.histogram(
        tl.reshape(digit.to(tl.int32), [x.shape[1]]), 256, mask=tl.reshape(match, [x.shape[1]])
    )
    nan += tl.sum(tl.where(valid & (x != x), 1, 0))
    selectable += tl.sum(tl.where(valid & (x != float("-inf")), 1, 0))
    pinned += tl.sum(tl.where(valid & (x == float("inf")), 1, 0))
    return counts, nan, selectable, pinned


@triton.jit
def whole(k_pointer, k_stride, row):
    """⌊k + ½⌋, at least 1 and within int32."""
    k = tl.load(k_pointer + row * k_stride).to(tl.float64)
    return tl.where((k >= 1) & (k < 2e9), tl.floor(k + 0.5), 1.0).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "parts", "done", "shift"])
def _part_digits(
    x_pointer, x_stride, k_pointer, k_stride, counts_pointer, tally_pointer,
    rows, n, length, parts, done, shift,
    COMPUTE: tl.constexpr, CHUNK: tl.constexpr, ABSOLUTE: tl.constexpr,
):  # fmt: skip
    """Add the part to the histogram of digit number `done` over the keys that have the digits before it."""
    row, part = place(parts)
    count = whole(k_pointer, k_stride, row)
    prefix, _, _ = digits(counts_pointer, rows, row, count, done)
    counts = tl.zeros((256,), tl.int32)
    zero = tl.zeros((), tl.int32)
    counts, nan, selectable, pinned = chunks(
        _count_digits, (counts, zero, zero, zero), (prefix, tl.minimum(done, 1), shift),
        x_pointer, x_stride, row, part, n, length, COMPUTE, CHUNK, ABSOLUTE,
    )  # fmt: skip
    tl.atomic_add(counts_pointer + (done * rows + row) * 256 + tl.arange(0, 256), counts)
    if done == 0:
        tl.atomic_add(tally_pointer + row * 3, nan)
        tl.atomic_add(tally_pointer + row * 3 + 1, selectable)
        tl.atomic_add(tally_pointer + row * 3 + 2, pinned)


def histograms(
    x: Tensor,
    source: tuple[Tensor, int],
    k: tuple[Tensor, int],
    rows: int,
    n: int,
    absolute: bool = False,
) -> tuple[Tensor, Tensor, int]:
    """Counts (digits, rows, 256) of the digits of the k-th largest keys, of x or of |x|; a tally a row of
    NaN, selectable and +inf; and how many bits below the digits are 0 in every key."""
    parts, length = layout.parts(rows, n)
    bits = 64 if x.dtype == torch.float64 else 32
    unused = 16 if x.dtype == torch.bfloat16 else 0
    count = (bits - unused) // 8
    buffer = torch.zeros(rows * (256 * count + 3), dtype=torch.int32, device=x.device)
    counts, tally = buffer[: rows * 256 * count], buffer[rows * 256 * count :]
    for done in range(count):
        launch(
            _part_digits, rows * parts,
            *source, *k, counts, tally, rows, n, length, parts, done, bits - 8 * (done + 1),
            COMPUTE=layout.compute(x.dtype), CHUNK=layout.CHUNK, ABSOLUTE=absolute,
        )  # fmt: skip
    return counts, tally, unused


# ------------------------------------------------------------------------------------- the hard mask


@triton.jit
def _no_mask(nan, k, count, selectable, pinned):
    """Rows without an answer."""
    return (nan > 0) | (k != k) | (k < 0) | (k > selectable) | (pinned > count)


@triton.jit(do_not_specialize=["rows"])
def _resident_mask(
    x_pointer, x_stride, k_pointer, k_stride, out_pointer, rows, n,
    COMPUTE: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    there = row < rows
    valid = there[:, None] & (column < n)[None, :]
    x = load(x_pointer, row, x_stride, column, valid, COMPUTE)
    k = tl.load(k_pointer + row * k_stride, mask=there, other=0.0).to(tl.float64)
    nan = tl.sum(tl.where(valid & (x != x), 1, 0), axis=1)
    selectable = tl.sum(tl.where(valid & (x != float("-inf")), 1, 0), axis=1)
    pinned = tl.sum(tl.where(valid & (x == float("inf")), 1, 0), axis=1)
    count = tl.floor(k + 0.5)
    bad = _no_mask(nan, k, count, selectable, pinned)
    count = tl.where(bad, 0.0, count).to(tl.int32)

    key = ordered(x)
    low = select(key, valid & ~bad[:, None], tl.maximum(count, 1))[:, None]
    above, level = valid & (key > low), valid & (key == low)
    left = count - tl.sum(tl.where(above, 1, 0), axis=1)
    ties = tl.sum(tl.where(level, 1, 0), axis=1)
    if tl.sum(tl.where(ties > left, 1, 0)) > 0:
        level = level & (tl.cumsum(level.to(tl.int32), axis=1) <= left[:, None])
    out = tl.where((above | level) & (count > 0)[:, None], 1.0, 0.0)
    out = tl.where(bad[:, None], float("nan"), out)
    tl.store(
        out_pointer + row[:, None] * n + column[None, :], out.to(out_pointer.dtype.element_ty), mask=valid
    )


@triton.jit
def _count_level(sums, given, x, valid, row, column):
    prefix, unused = given
    return sums + tl.sum(tl.where(valid & ((ordered(x) >> unused) == prefix), 1, 0))


@triton.jit(do_not_specialize=["rows", "parts", "wanted", "unused"])
def _part_ties(
    x_pointer, x_stride, k_pointer, k_stride, counts_pointer, ties_pointer, rows, n, length, parts, wanted,
    unused, COMPUTE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """How many of the part's entries tie with the k-th largest, where not all of them are chosen."""
    row, part = place(parts)
    count = whole(k_pointer, k_stride, row)
    prefix, left, level = digits(counts_pointer, rows, row, count, wanted)
    ties = tl.zeros((), tl.int32)
    if level > left:
        ties = chunks(
            _count_level, ties, (prefix, unused),
            x_pointer, x_stride, row, part, n, length, COMPUTE, CHUNK,
        )  # fmt: skip
    tl.store(ties_pointer + row * parts + part, ties)


@triton.jit
def _write_mask(before, given, x, valid, row, column):
    pointer, n, prefix, unused, left, bad, some = given
    key = ordered(x) >> unused
    level = valid & (key == prefix)
    rank = before + tl.cumsum(level.to(tl.int32), axis=1)
    chosen = ((key > prefix) | (level & (rank <= left))) & some
    out = tl.where(bad, float("nan"), tl.where(chosen, 1.0, 0.0))
    tl.store(pointer + row * n + column[None, :], out.to(pointer.dtype.element_ty), mask=valid)
    return before + tl.sum(level.to(tl.int32))


@triton.jit(do_not_specialize=["rows", "parts", "wanted", "unused"])
def _part_mask(
    x_pointer, x_stride, k_pointer, k_stride, counts_pointer, tally_pointer, ties_pointer, out_pointer,
    rows, n, length, parts, wanted, unused,
    COMPUTE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    prefix, left, _ = digits(counts_pointer, rows, row, whole(k_pointer, k_stride, row), wanted)
    one = row + tl.arange(0, 1)
    k = tl.load(k_pointer + one * k_stride).to(tl.float64)
    nan, selectable, pinned = get(tally_pointer + one * 3, 3)
    bad = _no_mask(nan, k, tl.floor(k + 0.5), selectable, pinned)
    other = tl.arange(0, PARTS)
    before = tl.sum(tl.load(ties_pointer + row * parts + other, mask=other < part, other=0))
    given = (out_pointer, n, prefix, unused, left, bad[:, None], (k >= 0.5)[:, None])
    chunks(_write_mask, before, given, x_pointer, x_stride, row, part, n, length, COMPUTE, CHUNK)


KERNELS = (_part_digits, _resident_mask, _part_ties, _part_mask)


def topk_mask(x: Tensor, k: Tensor) -> Tensor:
    """`selection.topk_mask`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    rows = batch.numel()
    if n == 0:
        return reference.topk_mask(x, k)
    out = x.new_empty(x.shape)
    if rows == 0:
        return out
    source, k_row, compute = layout.rows(x, n), layout.numbers(k, batch, x.device), layout.compute(x.dtype)
    if n <= layout.RESIDENT:
        width, together, warps = layout.block(n)
        launch(
            _resident_mask,
            triton.cdiv(rows, together),
            *source,
            *k_row,
            out,
            rows,
            n,
            COMPUTE=compute,
            TOGETHER=together,
            WIDTH=width,
            num_warps=warps,
        )
        return out
    parts, length = layout.parts(rows, n)
    counts, tally, unused = histograms(x, source, k_row, rows, n)
    ties = torch.empty(rows * parts, dtype=torch.int32, device=x.device)
    wanted = counts.numel() // (rows * 256)
    which = {"COMPUTE": compute, "CHUNK": layout.CHUNK}
    size = (rows, n, length, parts, wanted, unused)
    launch(_part_ties, rows * parts, *source, *k_row, counts, ties, *size, **which)
    launch(
        _part_mask,
        rows * parts,
        *source,
        *k_row,
        counts,
        tally,
        ties,
        out,
        *size,
        **which,
        PARTS=triton.next_power_of_2(parts),
    )
    return out
