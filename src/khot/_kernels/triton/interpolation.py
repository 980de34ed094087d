"""What stands between two entries of a row, and its derivatives: a number of each at a time, in float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import interpolation as reference
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Values
from khot._kernels.triton.fast import double, store
from khot._kernels.triton.float64 import number64
from khot._kernels.triton.launch import launch
from khot._kernels.triton.sizes import cdiv

BLOCK = 128


@triton.jit
def _ends(
    both_pointer, weight_pointer, weight_high, weight_low, weight_third, size, count, BLOCK: tl.constexpr
):
    """The lower and the upper one of each pair, its weight, whether one of them is infinite, and where all
    this is."""
    one = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = one < size
    upper = one + one // count * count
    above = double(tl.load(both_pointer + upper, mask=there, other=0.0))
    below = double(tl.load(both_pointer + upper + count, mask=there, other=0.0))
    weight = number64(weight_pointer, 1, weight_high, weight_low, tl.where(there, one, 0)) + weight_third
    weight += tl.zeros((BLOCK,), tl.float64)
    infinite = (tl.abs(above) == float("inf")) | (tl.abs(below) == float("inf"))
    return below, above, weight, infinite, one, upper, there


@triton.jit
def line(a, b, weight):
    """From a to b, computed from the nearer end."""
    rise = b - a
    infinite = (tl.abs(a) == float("inf")) | (tl.abs(b) == float("inf"))
    found = tl.where(weight < 0.5, a + rise * weight, b - rise * (1 - weight))
    mixed = (1 - weight) * a + weight * b
    # the difference of two finite numbers may overflow
    found = tl.where(infinite | (tl.abs(rise) == float("inf")), mixed, found)
    return tl.where(infinite & ((a == b) | (weight == 0)), a, found)


@triton.jit(do_not_specialize=["size", "count"])
def _interpolate(
    both_pointer, weight_pointer, weight_high, weight_low, weight_third, out_pointer, size, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    a, b, weight, _, one, _, there = _ends(
        both_pointer, weight_pointer, weight_high, weight_low, weight_third, size, count, BLOCK
    )
    store(out_pointer + one, line(a, b, weight), there)


@triton.jit(do_not_specialize=["size", "count"])
def _pull_ends(
    both_pointer, weight_pointer, weight_high, weight_low, weight_third, grad_pointer, dboth_pointer,
    dweight_pointer, size, count, BLOCK: tl.constexpr,
):  # fmt: skip
    a, b, weight, infinite, one, upper, there = _ends(
        both_pointer, weight_pointer, weight_high, weight_low, weight_third, size, count, BLOCK
    )
    grad = tl.where(infinite, 0.0, double(tl.load(grad_pointer + one, mask=there, other=0.0)))
    store(dboth_pointer + upper, grad * weight, there)
    store(dboth_pointer + upper + count, grad * (1 - weight), there)
    if weight_pointer is not None:
        tl.store(dweight_pointer + one, grad * tl.where(infinite, 0.0, b - a), mask=there)


KERNELS = (_interpolate, _pull_ends)


def interpolate(both: Tensor, weight: Tensor) -> Tensor:
    """`interpolation.interpolate`, in Triton."""
    count = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], count)
    given = weights(weight)
    if out.numel() == 0 or given is None:
        return reference.interpolate(both, weight)
    launch(
        _interpolate, cdiv(out.numel(), BLOCK),
        both.contiguous(), *given, out, out.numel(), count, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def interpolate_backward(both: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """`interpolation.interpolate_backward`, in Triton."""
    given = weights(weight)
    if grad.numel() == 0 or given is None:
        return reference.interpolate_backward(both, weight, grad)
    dboth = torch.empty_like(both, memory_format=torch.contiguous_format)
    dweight = both.new_empty(grad.shape if weight.dim() else 0, dtype=torch.float64)
    launch(
        _pull_ends, cdiv(grad.numel(), BLOCK),
        both.contiguous(), *given, grad.contiguous(), dboth, dweight, grad.numel(), grad.shape[-1],
        BLOCK=BLOCK,
    )  # fmt: skip
    return dboth, dweight


def weights(weight: Tensor) -> tuple[Tensor | None, float, float, float] | None:
    """In memory; or one number by value, as the sum of three."""
    if weight.dim():
        return weight.contiguous(), 0.0, 0.0, 0.0
    if not weight.is_cpu:
        return None
    given = Values(None, 0, *layout.halves(weight.item()))
    return None, given.high, given.low, layout.third(weight, given)
