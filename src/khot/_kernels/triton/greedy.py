"""The hard selection under a budget: a program a row, which it goes through in descending order, once for
what is bad and once for what fits.

The method is the reference's (`_kernels.reference.budget_mask`), a chunk of the order at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import budget_mask as reference
from khot._kernels.triton import layout
from khot._kernels.triton.exact import number64
from khot._kernels.triton.fast import double
from khot._kernels.triton.launch import launch

__all__ = ["KERNELS", "budget_mask"]

WIDTH = 1024  # entries that a program holds at a time


@triton.jit
def _chunk(x_at, place_at, cost_at, cost_column, start, n, WIDTH: tl.constexpr):
    """What follows from `start` on in the order: scores, their places, and their costs in float64."""
    at = start + tl.arange(0, WIDTH)
    there = at < n
    x = tl.load(x_at + at, mask=there, other=float("-inf"))
    place = tl.load(place_at + at, mask=there, other=0)
    price = double(tl.load(cost_at + place * cost_column, mask=there & (x != float("-inf")), other=0.0))
    return x, place, price, there


@triton.jit
def _greedy(
    x_pointer, place_pointer, cost_pointer, cost_row, cost_column,
    budget_pointer, budget_stride, budget_high, budget_low, budget_rest, out_pointer, n,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_at, place_at, out_at = x_pointer + row * n, place_pointer + row * n, out_pointer + row * n
    cost_at = cost_pointer + row * cost_row
    budget = number64(budget_pointer, budget_stride, budget_high, budget_low, row) + budget_rest
    worst = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, n, WIDTH):
        x, _, price, _ = _chunk(x_at, place_at, cost_at, cost_column, start, n, WIDTH)
        wrong = (x != x) | ~((price >= 0) & (price < float("inf")))
        worst = tl.maximum(worst, tl.where(wrong, 1, 0))
    bad = (tl.max(worst, axis=0) > 0) | ~(budget >= 0)
    left = budget
    for start in range(0, n, WIDTH):
        x, place, price, there = _chunk(x_at, place_at, cost_at, cost_column, start, n, WIDTH)
        taken = tl.zeros((WIDTH,), tl.int32)
        waiting = tl.where((x != float("-inf")) & (price <= left) & ~bad, 1, 0)
        more = tl.max(waiting, axis=0)
        while more > 0:
            # the longest run from the front that fits; what then costs more than is left never fits
            run = tl.cumsum(tl.where(waiting > 0, price, 0.0), axis=0)
            fits = tl.where((waiting > 0) & (run <= left), 1, 0)
            taken += fits
            # never below 0, so that free entries fit
            left = tl.where(left < float("inf"), left - tl.max(tl.where(fits > 0, run, 0.0), axis=0), left)
            waiting = tl.where((waiting > 0) & (fits == 0) & (price <= left), 1, 0)
            more = tl.max(waiting, axis=0)
        y = tl.where(bad, float("nan"), taken.to(tl.float32))
        tl.store(out_at + place, y.to(out_pointer.dtype.element_ty), mask=there)


KERNELS = (_greedy,)


def budget_mask(x: Tensor, cost: Tensor, budget: Tensor) -> Tensor:
    """`budget_mask.budget_mask`, in Triton."""
    n = x.shape[-1]
    if x.numel() == 0:
        return reference.budget_mask(x, cost, budget)
    ordered, order = torch.sort(x.contiguous(), dim=-1, descending=True, stable=True)
    amount = layout.values(budget, x.shape[:-1], x.device)
    out = x.new_empty(x.shape)
    width = min(WIDTH, max(64, triton.next_power_of_2(n)))
    launch(
        _greedy, x.numel() // n,
        ordered, order, *layout.matrix(cost, x),
        *amount, layout.rest(budget, amount), out, n, WIDTH=width, num_warps=max(1, width // 256),
    )  # fmt: skip
    return out
