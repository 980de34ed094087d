"""Order statistics: the k-th largest entries of a row, for several k."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import order_statistics as reference
from khot._kernels.triton import layout
from khot._kernels.triton.functions import load
from khot._kernels.triton.launch import launch
from khot._kernels.triton.selection import digits, histograms, ordered, select, whole

MOST = 2_000_000_000  # entries of a row whose places fit into int32


@triton.jit
def _number(key, COMPUTE: tl.constexpr):
    """The number that a key of :func:`ordered` stands for."""
    wide: tl.constexpr = tl.float64 == COMPUTE
    if wide:
        bits = key.to(tl.int64)
        return (bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    else:
        bits = key.to(tl.int32)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _no_place(nan, k, n):
    return (nan > 0) | (k != k) | (k < 1) | (k > n) | (k != tl.floor(k))


@triton.jit(do_not_specialize=["rows", "count"])
def _resident_places(
    x_pointer, x_stride, k_pointer, out_pointer, rows, n, count,
    COMPUTE: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    there = row < rows
    valid = there[:, None] & (column < n)[None, :]
    x = load(x_pointer, row, x_stride, column, valid, COMPUTE)
    nan = tl.sum(tl.where(valid & (x != x), 1, 0), axis=1)
    key = ordered(x)
    for j in range(count):
        k = tl.load(k_pointer + row * count + j, mask=there, other=1.0).to(tl.float64)
        bad = _no_place(nan, k, n)
        level = select(key, valid & ~bad[:, None], tl.where(bad, 1.0, k).to(tl.int32))[:, None]
        # the level may lie between the wanted key and the next smaller one
        reached = tl.where(valid & (key >= level), key, tl.max(key, axis=1)[:, None])
        value = tl.where(bad, float("nan"), _number(tl.min(reached, axis=1), COMPUTE))
        tl.store(out_pointer + row * count + j, value.to(out_pointer.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "place", "count", "wanted", "unused"])
def _part_place(
    k_pointer, k_stride, counts_pointer, tally_pointer, out_pointer, rows, n, place, count, wanted, unused,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    prefix, _, _ = digits(counts_pointer, rows, row, whole(k_pointer, k_stride, row), wanted)
    # the bits below the digits are 0 in every number, and so 1 in the keys of negative numbers
    key = (prefix << unused) + tl.where(prefix < 0, (tl.full((), 1, tl.int64) << unused) - 1, 0)
    k = tl.load(k_pointer + row * k_stride).to(tl.float64)
    bad = _no_place(tl.load(tally_pointer + row * 3), k, n)
    value = tl.where(bad, float("nan"), _number(key, COMPUTE))
    tl.store(out_pointer + row * count + place, value.to(out_pointer.dtype.element_ty))


KERNELS = (_resident_places, _part_place)


def order_statistics(x: Tensor, k: Tensor) -> Tensor:
    """`order_statistics.order_statistics`, in Triton."""
    batch, n, count = x.shape[:-1], x.shape[-1], k.shape[-1]
    rows = batch.numel()
    if n == 0 or n > MOST:
        return reference.order_statistics(x, k)
    out = x.new_empty(*batch, count)
    if rows == 0 or count == 0:
        return out
    source, compute = layout.rows(x, n), layout.compute(x.dtype)
    places = k.expand(*batch, count).contiguous()
    if n <= layout.RESIDENT:
        width, together, warps = layout.block(n)
        launch(
            _resident_places, triton.cdiv(rows, together),
            *source, places, out, rows, n, count,
            COMPUTE=compute, TOGETHER=together, WIDTH=width, num_warps=warps,
        )  # fmt: skip
        return out
    for place, each in enumerate(places.view(rows, count).unbind(-1)):
        counts, tally, unused = histograms(x, source, (each, count), rows, n)
        wanted = counts.numel() // (rows * 256)
        launch(
            _part_place,
            rows,
            each,
            count,
            counts,
            tally,
            out,
            rows,
            n,
            place,
            count,
            wanted,
            unused,
            COMPUTE=compute,
        )
    return out
