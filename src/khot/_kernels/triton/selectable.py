"""How many entries of a row may be selected, in one launch instead of three."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import selectable as reference
from khot._kernels.triton import layout
from khot._kernels.triton.fast import joined
from khot._kernels.triton.launch import launch
from khot._kernels.triton.sizes import cdiv


@triton.jit(do_not_specialize=["rows"])
def _selectable(
    x_pointer, x_stride, out_pointer, rows, n, most_high, most_low,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    there = row < rows
    at = x_pointer + row[:, None] * x_stride + column[None, :]
    x = tl.load(at, mask=there[:, None] & (column < n)[None, :], other=float("-inf"))
    count = tl.sum(tl.where(x != float("-inf"), 1, 0), axis=1).to(tl.float64)
    tl.store(out_pointer + row, tl.minimum(count, joined(most_high, most_low)), mask=there)


KERNELS = (_selectable,)


def selectable(x: Tensor, most: float) -> Tensor:
    """`selectable.selectable`, in Triton for rows that one program holds."""
    n = x.shape[-1]
    if not x.numel() or n > layout.RESIDENT:
        return reference.selectable(x, most)
    out = x.new_empty(x.shape[:-1], dtype=torch.float64)
    rows, (width, together, warps) = out.numel(), layout.block(n)
    source = layout.rows(x, n)
    launch(
        _selectable, cdiv(rows, together), *source, out, rows, n, *layout.halves(most),
        TOGETHER=together, WIDTH=width, num_warps=warps,
    )  # fmt: skip
    return out
