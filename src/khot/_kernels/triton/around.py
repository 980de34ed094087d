"""What a plain call does to its rows before and after the kernel of its operator, in a launch each: masks,
signs, and rows that do not lie one after another.

In the ordinary way torch's own operations do it, with the same results. The extension for plain calls
(``csrc/eager/gpu_around.cpp``) starts this kernel; Python only has it compiled.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from khot._kernels.triton import native
from khot._kernels.triton.launch import variant
from khot._kernels.triton.sizes import next_power_of_2

WIDTH = 1024  # entries that share a program

#: What becomes of an entry v where the mask is True; 0, or ``fill``, is what it becomes elsewhere. ``other``
#: is the other tensor's entry.
HOW = {
    "fill": 0,  # v, or −v; and the other's entry beside it, if there is a second result
    "sizes": 1,  # |v| by the sign of the other
    "signs": 2,  # v with the sign of the other, also where the mask is False
    "ranks": 3,  # v; with ``fill`` beside it, less half the number of entries where the mask is False
    "product": 4,  # v times the mask, which keeps NaN; or times the other, if there is one
    "places": 5,  # v in the first places, as many as the mask is True in; beside NaN in the others, too
}
FILL, SIZES, SIGNS, RANKS, PRODUCT, PLACES = (tl.constexpr(number) for number in HOW.values())

INTEGERS = ("inner", "outer", "row", "column")
SPREAD = ("v", "mask", "other")


@triton.jit
def _entries(pointer, inner, outer, row_stride, column_stride, row, column):
    return pointer + (row // inner * outer + row % inner * row_stride + column * column_stride)


@triton.jit(
    do_not_specialize=[
        *(f"{name}_{integer}" for name in SPREAD for integer in INTEGERS), "rows", "n",
    ],
    do_not_specialize_on_alignment=[f"{name}_pointer" for name in (*SPREAD, "out", "second")],
)  # fmt: skip
def _around(
    v_pointer, v_inner: tl.int64, v_outer: tl.int64, v_row: tl.int64, v_column: tl.int64,
    mask_pointer, mask_inner: tl.int64, mask_outer: tl.int64, mask_row: tl.int64, mask_column: tl.int64,
    other_pointer, other_inner: tl.int64, other_outer: tl.int64, other_row: tl.int64, other_column: tl.int64,
    out_pointer, second_pointer, rows: tl.int64, n: tl.int64, sign, fill,
    HOW: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program, chunks = tl.program_id(0).to(tl.int64), (n + WIDTH - 1) // WIDTH
    row = (program // chunks * TOGETHER + tl.arange(0, TOGETHER))[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    column = program % chunks * WIDTH + columns
    there = (row < rows) & (column < n)
    v = tl.load(_entries(v_pointer, v_inner, v_outer, v_row, v_column, row, column), mask=there, other=0)
    taken = there
    if mask_pointer is not None:
        at = _entries(mask_pointer, mask_inner, mask_outer, mask_row, mask_column, row, column)
        taken = tl.load(at, mask=there, other=0) != 0
    other = v
    if other_pointer is not None:
        at = _entries(other_pointer, other_inner, other_outer, other_row, other_column, row, column)
        other = tl.load(at, mask=there, other=0)
    wide = v if v.dtype == tl.float64 else v.to(tl.float32)
    beside = other if other.dtype == tl.float64 else other.to(tl.float32)
    if HOW == FILL:
        result = tl.where(taken, wide * sign, fill)
    elif HOW == SIZES or HOW == SIGNS:  # noqa: SIM109 - Triton has no `in`
        negative = beside.to(tl.float32).to(tl.int32, bitcast=True) < 0
        result = wide * tl.where(negative, -1.0, 1.0)
        if HOW == SIZES:
            result = tl.where(taken, result, fill)
    elif HOW == PRODUCT:
        result = wide * (beside if other_pointer is not None else tl.where(taken, 1.0, 0.0))
    else:
        count = tl.zeros((TOGETHER, 1), tl.int32)
        start = tl.zeros((), tl.int64)
        while start < n:
            each = start + columns
            inside = (row < rows) & (each < n)
            counted = _entries(mask_pointer, mask_inner, mask_outer, mask_row, mask_column, row, each)
            found = tl.load(counted, mask=inside, other=0) != 0
            count += tl.sum(found.to(tl.int32), axis=1)[:, None]
            start += WIDTH
        if HOW == RANKS:
            less = wide - 0.5 * (n - count).to(tl.float32)
            result = tl.where(beside == fill, less, wide) * tl.where(taken, 1.0, 0.0)
        else:
            result = tl.where((column < count) | (beside != beside), wide, 0.0)
    tl.store(out_pointer + row * n + column, result.to(out_pointer.dtype.element_ty), mask=there)
    if second_pointer is not None:
        tl.store(second_pointer + row * n + column, tl.where(taken, other, 0), mask=there)


KERNELS = (_around,)


def compiled(
    how: str, n: int, device: torch.device, dtypes: tuple[torch.dtype | None, ...]
) -> tuple[int, tuple[Any, ...], int, int]:
    """Have the kernel compiled for rows of n entries, by a launch that has no rows.

    Args:
        dtypes: those of the rows, the mask, the other tensor, the result and the second result.

    Returns:
        What the extension finds the kernel by; of the rows that share a program how many, and how wide.
    """
    width = min(WIDTH, next_power_of_2(n))
    together = WIDTH // width
    v, mask, other, out, second = (
        None if dtype is None else torch.empty(16, dtype=dtype, device=device) for dtype in dtypes
    )
    start = variant(_around, HOW=HOW[how], TOGETHER=together, WIDTH=width, num_warps=4)
    spread = (1, 0, 0, 0)
    arguments = (v, *spread, mask, *spread, other, *spread, out, second, 0, n, 1.0, 0.0)
    start(1, *arguments)
    return start.table, arguments, together, width


native.ASKED["around"] = compiled
