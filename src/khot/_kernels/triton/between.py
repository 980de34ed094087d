"""What stands between two order statistics, and its gradients: of rows that a program holds in one launch
each way. Longer rows take those of :mod:`.places` and of :mod:`.interpolation`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import quantiles as reference
from khot._kernels.triton import interpolation, layout, places
from khot._kernels.triton.arguments import Weight
from khot._kernels.triton.fast import double, store
from khot._kernels.triton.float64 import number64
from khot._kernels.triton.interpolation import line
from khot._kernels.triton.launch import launch
from khot._kernels.triton.places import add_where, entry_after, entry_at, hold
from khot._kernels.triton.rows import entries, place_rows
from khot._kernels.triton.selection import greatest_of, held, in_order, k_of, load_keys, longest
from khot._kernels.triton.sizes import cdiv


@triton.jit(do_not_specialize=["rows", "count"])
def _resident_quantiles(
    x, k, weight, out_pointer, both_pointer, rows, n, count, COMPUTE: tl.constexpr, SORT: tl.constexpr,
    FOLLOWS: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """FOLLOWS says that the lower entry of each pair is the next one after the upper."""
    row, there = place_rows(rows, TOGETHER)
    known = tl.where(there, row, 0)
    at = x.pointer + entries(row, x.stride, tl.arange(0, WIDTH), TOGETHER)
    keys, _columns = load_keys(at, there, n, COMPUTE, TOGETHER, PIECES, WIDTH, FULL)
    greatest = greatest_of(keys)
    if SORT:
        keys = (in_order(keys),)
    for j in range(count):
        upper = row * (2 * count) + j
        own_k = k_of(*k, known * (2 * count) + j, j)
        above, key = entry_at(keys, greatest, own_k, n, SORT)
        if FOLLOWS and not SORT:  # a second search takes as long as the first
            below = entry_after(keys, greatest, key, own_k, n)
        else:
            own_k = k_of(*k, known * (2 * count) + count + j, count + j)
            below, _key = entry_at(keys, greatest, own_k, n, SORT)
        tl.store(both_pointer + upper, above.to(both_pointer.dtype.element_ty), mask=there)
        tl.store(both_pointer + upper + count, below.to(both_pointer.dtype.element_ty), mask=there)
        own_weight = number64(weight.pointer, 1, weight.high, weight.low, known * count + j) + weight.third
        own_weight += tl.zeros_like(row).to(tl.float64)
        store(out_pointer + row * count + j, line(double(below), double(above), own_weight), there)


@triton.jit(do_not_specialize=["rows", "count"])
def _pull_quantiles(
    x, both_pointer, weight, grad_pointer, dx_pointer, dweight_pointer, rows, n, count, COMPUTE: tl.constexpr,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, there, column, valid, held = hold(x, rows, n, COMPUTE, TOGETHER, WIDTH)
    dx = tl.zeros_like(held)
    for j in range(count):
        upper = both_pointer + row * (2 * count) + j
        above = tl.load(upper, mask=there, other=0.0).to(COMPUTE)
        below = tl.load(upper + count, mask=there, other=0.0).to(COMPUTE)
        at = tl.where(there, row, 0) * count + j
        own_weight = number64(weight.pointer, 1, weight.high, weight.low, at) + weight.third
        infinite = (tl.abs(above) == float("inf")) | (tl.abs(below) == float("inf"))
        grad = double(tl.load(grad_pointer + row * count + j, mask=there, other=0.0))
        grad = tl.where(infinite, 0.0, grad)
        dx = add_where(dx, held, valid, column, n, above, (grad * own_weight).to(COMPUTE))
        dx = add_where(dx, held, valid, column, n, below, (grad * (1 - own_weight)).to(COMPUTE))
        if weight.pointer is not None:
            rise = tl.where(infinite, 0.0, double(above) - double(below))
            tl.store(dweight_pointer + at, grad * rise, mask=there)
    to = dx_pointer + row[:, None] * n + column[None, :]
    tl.store(to, dx.to(dx_pointer.dtype.element_ty), mask=valid)


KERNELS = (_resident_quantiles, _pull_quantiles)


def quantiles(x: Tensor, k: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`quantiles.quantiles`, in Triton."""
    batch, n, count = x.shape[:-1], x.shape[-1], k.shape[-1] // 2
    rows, given = batch.numel(), interpolation.weights(weight)
    if not x.numel() or count == 0 or n > longest() or given is None:
        return reference.quantiles(x, k, weight, places.order_statistics, interpolation.interpolate)
    out, both = x.new_empty(*batch, count), x.new_empty(*batch, 2 * count)
    together, which = held(rows, n, layout.compute(x.dtype))
    asked = places.given(k, x)
    launch(
        _resident_quantiles, cdiv(rows, together), layout.rows(x, n), asked, Weight(*given), out, both, rows,
        n, count, FOLLOWS=asked.pointer is None and count == 1, **which,
    )  # fmt: skip
    return out, both


def quantiles_backward(x: Tensor, both: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """`quantiles.quantiles_backward`, in Triton."""
    n, count, given = x.shape[-1], grad.shape[-1], interpolation.weights(weight)
    if not x.numel() or n > longest() or not 0 < 2 * count <= places.PULLED or given is None:
        line = interpolation.interpolate_backward
        return reference.quantiles_backward(x, both, weight, grad, places.order_statistics_backward, line)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight = both.new_empty(grad.shape if weight.dim() else 0, dtype=torch.float64)
    rows, (width, together, warps) = x.shape[:-1].numel(), layout.block(n)
    launch(
        _pull_quantiles, cdiv(rows, together),
        layout.rows(x, n), both.contiguous(), Weight(*given), grad.contiguous(), dx, dweight, rows, n, count,
        COMPUTE=layout.compute(x.dtype), TOGETHER=together, WIDTH=width, num_warps=warps,
    )  # fmt: skip
    return dx, dweight
