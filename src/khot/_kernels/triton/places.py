"""Order statistics: the k-th largest entries of a row, for several k; and their gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import order_statistics as reference
from khot._kernels.triton import layout
from khot._kernels.triton.largest import of_long_rows
from khot._kernels.triton.launch import launch
from khot._kernels.triton.levels import MOST, PLACE
from khot._kernels.triton.resident import entries, place_rows
from khot._kernels.triton.selection import (
    ends,
    greatest_of,
    k_of,
    kth,
    load_keys,
    longest,
    number,
    ranked,
)

__all__ = ["KERNELS", "order_statistics", "order_statistics_backward"]

PULLED = 8  # places of a row that a program looks for, one after another


@triton.jit(do_not_specialize=["rows", "count"])
def _resident_places(
    x_pointer, x_stride, k_pointer, k_stride, k_high, k_low, out_pointer, rows, n, count,
    COMPUTE: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row, there = place_rows(rows, TOGETHER)
    at = x_pointer + entries(row, x_stride, tl.arange(0, WIDTH), TOGETHER)
    keys, _columns = load_keys(at, there, n, COMPUTE, TOGETHER, PIECES, WIDTH, EXACT)
    greatest = greatest_of(keys)
    for j in range(count):
        query = row * count + j
        k = k_of(k_pointer, k_stride, k_high, k_low, tl.where(there, query, 0), j)
        wanted, bad = ranked(k, greatest, n)
        level, _reached = kth(keys, wanted)
        least, _greatest = ends(keys, level, greatest + 1)  # the level may lie between two keys
        value = tl.where(bad, float("nan"), number(least))
        tl.store(out_pointer + query, value.to(out_pointer.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "count"])
def _pull_places(
    x_pointer, x_stride, values_pointer, grad_pointer, dx_pointer, rows, n, count,
    COMPUTE: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """To the first entry of each value goes what comes in for it."""
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    there = row < rows
    valid = there[:, None] & (column < n)[None, :]
    x = tl.load(x_pointer + row[:, None] * x_stride + column[None, :], mask=valid, other=0.0).to(COMPUTE)
    dx = x * 0
    dx = tl.where(dx == 0, dx, 0.0)  # of infinite entries, too
    for j in range(count):
        value = tl.load(values_pointer + row * count + j, mask=there, other=0.0).to(COMPUTE)
        grad = tl.load(grad_pointer + row * count + j, mask=there, other=0.0).to(COMPUTE)
        grad = tl.where(value != value, value, grad)
        found = valid & (x == value[:, None]) & (tl.abs(x) < float("inf"))
        first = tl.min(tl.where(found, column[None, :], n), axis=1)
        taken = (column[None, :] == first[:, None]) | (value != value)[:, None]
        dx += tl.where(taken, grad[:, None], 0.0)
    to = dx_pointer + row[:, None] * n + column[None, :]
    tl.store(to, dx.to(dx_pointer.dtype.element_ty), mask=valid)


KERNELS = (_resident_places, _pull_places)


def order_statistics(x: Tensor, k: Tensor) -> Tensor:
    """`order_statistics.order_statistics`, in Triton. Long rows of float64 are left to torch's sort."""
    batch, n, count = x.shape[:-1], x.shape[-1], k.shape[-1]
    rows, long = batch.numel(), n > longest()
    if n == 0 or n > MOST or (long and x.dtype == torch.float64):
        return reference.order_statistics(x, k)
    out = x.new_empty(*batch, count)
    if rows == 0 or count == 0:
        return out
    places = _consecutive(k)
    if places is None:
        places = layout.Values(k.to(x.device).expand(*batch, count).contiguous(), 1, 0.0, 0.0)
    if long:
        return of_long_rows(x, places, rows, n, PLACE, count).view(*batch, count)
    tile = layout.tile(rows, n)
    launch(
        _resident_places, triton.cdiv(rows, tile.together),
        *layout.rows(x, n), *places, out, rows, n, count,
        COMPUTE=layout.compute(x.dtype), **layout.held(tile, n),
    )  # fmt: skip
    return out


def order_statistics_backward(x: Tensor, values: Tensor, grad: Tensor) -> Tensor:
    """`order_statistics.order_statistics_backward`, in Triton for rows that one program holds."""
    n, count = x.shape[-1], values.shape[-1]
    if not x.numel() or n > longest() or count > PULLED:
        return reference.order_statistics_backward(x, values, grad)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, (width, together, warps) = x.shape[:-1].numel(), layout.block(n)
    launch(
        _pull_places, triton.cdiv(rows, together),
        *layout.rows(x, n), values.contiguous(), grad.contiguous(), dx, rows, n, count,
        COMPUTE=layout.compute(x.dtype), TOGETHER=together, WIDTH=width, num_warps=warps,
    )  # fmt: skip
    return dx


def _consecutive(k: Tensor) -> layout.Values | None:
    """The first of places that follow each other and are the same in all rows, if these are on the CPU."""
    if not k.is_cpu or any(k.stride(i) and k.shape[i] > 1 for i in range(k.dim() - 1)):
        return None
    numbers = k.reshape(-1, k.shape[-1])[0].tolist()
    if numbers != [numbers[0] + i for i in range(len(numbers))]:
        return None
    return layout.Values(None, 0, *layout.halves(numbers[0]))
