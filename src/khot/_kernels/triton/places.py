"""Order statistics: the k-th largest entries of a row, for several k."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import order_statistics as reference
from khot._kernels.triton import layout
from khot._kernels.triton.largest import few
from khot._kernels.triton.launch import launch
from khot._kernels.triton.levels import MOST, PLACE, levels
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

__all__ = ["KERNELS", "order_statistics"]


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


KERNELS = (_resident_places,)


def order_statistics(x: Tensor, k: Tensor) -> Tensor:
    """`order_statistics.order_statistics`, in Triton. Long rows of float64 are left to torch's sort."""
    batch, n, count = x.shape[:-1], x.shape[-1], k.shape[-1]
    rows, long = batch.numel(), n > longest()
    if n == 0 or n > MOST or (long and x.dtype == torch.float64):
        return reference.order_statistics(x, k)
    out = x.new_empty(*batch, count)
    if rows == 0 or count == 0:
        return out
    source = layout.rows(x, n)
    places = _consecutive(k)
    if places is None:
        places = layout.Values(k.to(x.device).expand(*batch, count).contiguous(), 1, 0.0, 0.0)
    if long:
        best = few(x, places, rows, n, PLACE, count)
        if best is not None:
            return best.view(*batch, count)
        return levels(x, source, places, rows * count, n, PLACE, count).view(*batch, count)
    tile = layout.tile(rows, n)
    launch(
        _resident_places, triton.cdiv(rows, tile.together),
        *source, *places, out, rows, n, count,
        COMPUTE=layout.compute(x.dtype), **layout.held(tile, n),
    )  # fmt: skip
    return out


def _consecutive(k: Tensor) -> layout.Values | None:
    """The first of places that follow each other and are the same in all rows, if these are on the CPU."""
    if not k.is_cpu or any(k.stride(i) and k.shape[i] > 1 for i in range(k.dim() - 1)):
        return None
    numbers = k.reshape(-1, k.shape[-1])[0].tolist()
    if numbers != [numbers[0] + i for i in range(len(numbers))]:
        return None
    return layout.Values(None, 0, *layout.halves(numbers[0]))
