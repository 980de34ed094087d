"""The hard k-hot mask: by one program for short rows, and by :mod:`.levels` for longer ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import topk_mask as reference
from khot._kernels.triton import layout
from khot._kernels.triton.fast import any_row, wide
from khot._kernels.triton.functions import place
from khot._kernels.triton.largest import of_long_rows
from khot._kernels.triton.launch import launch
from khot._kernels.triton.levels import MASK, MOST, STATE
from khot._kernels.triton.rows import entries, inside, place_rows
from khot._kernels.triton.selection import (
    GREATEST,
    GREATEST64,
    INFINITE,
    INFINITE64,
    MINUS_INFINITE,
    MINUS_INFINITE64,
    choose,
    greatest_of,
    held,
    k_of,
    key_of,
    load_keys,
    longest,
    masked,
    reached,
    reaches,
)
from khot._kernels.triton.sizes import cdiv


@triton.jit(do_not_specialize=["rows"])
def _resident_mask(
    x, k, out_pointer, rows, n, COMPUTE: tl.constexpr, SORT: tl.constexpr, TOGETHER: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 == COMPUTE
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    at = x.pointer + entries(row, x.stride, column, TOGETHER)
    keys, columns = load_keys(at, there, n, COMPUTE, TOGETHER, PIECES, WIDTH, FULL)
    greatest = greatest_of(keys)
    selectable = reached(keys, greatest * 0 + ((MINUS_INFINITE64 if WIDE else MINUS_INFINITE) + 1))
    pinned = selectable * 0
    if any_row(greatest >= (INFINITE64 if WIDE else INFINITE), TOGETHER):
        pinned = reached(keys, greatest * 0 + (INFINITE64 if WIDE else INFINITE))
    own_k = k_of(*k, tl.where(there, row, 0))
    wanted, bad = masked(own_k, greatest, selectable, pinned)
    level, tie = choose(keys, columns, tl.maximum(wanted, 1), SORT)
    level = wide(tl.where(wanted > 0, level, GREATEST64 if WIDE else GREATEST), TOGETHER)
    at = out_pointer + entries(row, n, column, TOGETHER)
    for i in tl.static_range(PIECES):
        chosen = reaches(keys[i], columns[i], level, wide(tie, TOGETHER))
        out = tl.where(wide(bad, TOGETHER), float("nan"), tl.where(chosen, 1.0, 0.0))
        valid = inside(there, column + i * WIDTH, n, TOGETHER, FULL)
        tl.store(at + i * WIDTH, out.to(out_pointer.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["parts"])
def _write_mask(x, level_pointer, out_pointer, n, parts, CHUNK: tl.constexpr):
    row, part = place(parts)
    level_pointer += row * STATE
    level, tie, bad = tl.load(level_pointer), tl.load(level_pointer + 1), tl.load(level_pointer + 2)
    column = part * CHUNK + tl.arange(0, CHUNK)
    valid = column < n
    key = key_of(tl.load(x.pointer + row * x.stride + column, mask=valid, other=0.0))
    out = tl.where(reaches(key, column, level, tie), 1.0, 0.0)
    out = tl.where(bad > 0, float("nan"), out)
    tl.store(out_pointer + row * n + column, out.to(out_pointer.dtype.element_ty), mask=valid)


KERNELS = (_resident_mask, _write_mask)


def topk_mask(x: Tensor, k: Tensor) -> Tensor:
    """`topk_mask.topk_mask`, in Triton. Long rows of float64 are left to torch's sort."""
    batch, n = x.shape[:-1], x.shape[-1]
    rows, long = batch.numel(), n > longest()
    if n == 0 or n > MOST or (long and x.dtype == torch.float64):
        return reference.topk_mask(x, k)
    out = layout.like(x)
    if rows == 0:
        return out
    source, given = layout.rows(x, n), layout.values(k, batch, x.device)
    if long:
        state = of_long_rows(x, given, rows, n, MASK)
        parts = cdiv(n, layout.CHUNK)
        launch(
            _write_mask, rows * parts, source, state, out, n, parts,
            CHUNK=layout.CHUNK, num_warps=max(1, layout.CHUNK // 512),
        )  # fmt: skip
        return out
    together, which = held(rows, n, layout.compute(x.dtype))
    launch(_resident_mask, cdiv(rows, together), source, given, out, rows, n, **which)
    return out
