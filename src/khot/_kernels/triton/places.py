"""Order statistics: the k-th largest entries of a row, for several k; and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import order_statistics as reference
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Values
from khot._kernels.triton.functions import load, place
from khot._kernels.triton.largest import of_long_rows
from khot._kernels.triton.launch import launch
from khot._kernels.triton.levels import MOST, PLACE
from khot._kernels.triton.rows import entries, place_rows
from khot._kernels.triton.selection import (
    LEAST,
    LEAST64,
    at_place,
    ends,
    greatest_of,
    held,
    in_order,
    k_of,
    kth,
    load_keys,
    longest,
    number,
    ranked,
    reached,
)
from khot._kernels.triton.sizes import cdiv, next_power_of_2

PULLED = 8  # places of a row that a program looks for, one after another


@triton.jit
def entry_at(keys, greatest, k, n, SORT: tl.constexpr):
    """The k-th largest entry of each row, whose keys are in pieces, or in order in one; NaN if there is none.
    And its key."""
    wanted, bad = ranked(k, greatest, n)
    if SORT:
        key = at_place(keys[0], wanted)
    else:
        level, _reached = kth(keys, wanted)
        key, _greatest = ends(keys, level, greatest + 1)  # the level may lie between two keys
    return tl.where(bad, float("nan"), number(key)), key


@triton.jit
def entry_after(keys, greatest, key, k, n):
    """The entry of each row that follows the k-th largest, of which the key is known, or is its equal."""
    _wanted, bad = ranked(k + 1, greatest, n)
    NONE: tl.constexpr = LEAST64 if key.dtype == tl.int64 else LEAST
    _least, less = ends(keys, key * 0 + NONE, key)
    below = tl.where(reached(keys, key) > k.to(tl.int32), key, less)
    return tl.where(bad, float("nan"), number(below))


@triton.jit
def hold(x, rows, n, COMPUTE: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr):
    """The program's rows and which of them there are, their columns, which entries there are, and these."""
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    valid = (row < rows)[:, None] & (column < n)[None, :]
    return row, row < rows, column, valid, load(x.pointer, row, x.stride, column, valid, COMPUTE)


@triton.jit
def add_where(dx, x, valid, column, n, value, grad):
    """The gradients of rows, with one more for the first entry of each row that has a value. That of NaN is
    NaN everywhere."""
    grad = tl.where(value != value, value, grad)
    found = valid & (x == value[:, None]) & (tl.abs(x) < float("inf"))
    first = tl.min(tl.where(found, column[None, :], n), axis=1)
    taken = (column[None, :] == first[:, None]) | (value != value)[:, None]
    return dx + tl.where(taken, grad[:, None], 0.0)


@triton.jit(do_not_specialize=["rows", "count"])
def _resident_places(
    x, k, out_pointer, rows, n, count, COMPUTE: tl.constexpr, SORT: tl.constexpr, TOGETHER: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    row, there = place_rows(rows, TOGETHER)
    at = x.pointer + entries(row, x.stride, tl.arange(0, WIDTH), TOGETHER)
    keys, _columns = load_keys(at, there, n, COMPUTE, TOGETHER, PIECES, WIDTH, FULL)
    greatest = greatest_of(keys)
    if SORT:
        keys = (in_order(keys),)
    for j in range(count):
        query = row * count + j
        own_k = k_of(*k, tl.where(there, query, 0), j)
        value, _key = entry_at(keys, greatest, own_k, n, SORT)
        tl.store(out_pointer + query, value.to(out_pointer.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "count"])
def _pull_places(
    x, values_pointer, grad_pointer, dx_pointer, rows, n, count, COMPUTE: tl.constexpr,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """To the first entry of each value goes what comes in for it."""
    row, there, column, valid, held = hold(x, rows, n, COMPUTE, TOGETHER, WIDTH)
    dx = tl.zeros_like(held)
    for j in range(count):
        value = tl.load(values_pointer + row * count + j, mask=there, other=0.0).to(COMPUTE)
        grad = tl.load(grad_pointer + row * count + j, mask=there, other=0.0).to(COMPUTE)
        dx = add_where(dx, held, valid, column, n, value, grad)
    to = dx_pointer + row[:, None] * n + column[None, :]
    tl.store(to, dx.to(dx_pointer.dtype.element_ty), mask=valid)


@triton.jit
def _asked(pointer, row, count, COUNT: tl.constexpr, COMPUTE: tl.constexpr):
    """A number for each place that is asked for of one row, as a column."""
    j = tl.arange(0, COUNT)
    return tl.load(pointer + row * count + j, mask=j < count, other=0.0).to(COMPUTE)[:, None]


@triton.jit(do_not_specialize=["count", "length", "parts"])
def _find_places(
    x, values_pointer, first_pointer, n, count, length, parts, COMPUTE: tl.constexpr, COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The first column of a part of a row that has each of the values; n if none has."""
    row, part = place(parts)
    value = _asked(values_pointer, row, count, COUNT, COMPUTE)
    first = tl.full((COUNT, CHUNK), n, tl.int32)
    for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
        column = start + tl.arange(0, CHUNK)
        held = tl.load(x.pointer + row * x.stride + column, mask=column < n, other=float("inf")).to(COMPUTE)
        found = (held[None, :] == value) & (tl.abs(held) < float("inf"))[None, :]
        first = tl.minimum(first, tl.where(found, column[None, :], n))
    j = tl.arange(0, COUNT)
    tl.store(first_pointer + (row * count + j) * parts + part, tl.min(first, axis=1), mask=j < count)


@triton.jit(do_not_specialize=["count", "length", "parts"])
def _write_places(
    values_pointer, grad_pointer, first_pointer, dx_pointer, n, count, length, parts,
    COMPUTE: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What :func:`_pull_places` writes, in a part of a row."""
    row, part = place(parts)
    j, other = tl.arange(0, COUNT)[:, None], tl.arange(0, PARTS)[None, :]
    there = (j < count) & (other < parts)
    first = tl.load(first_pointer + (row * count + j) * parts + other, mask=there, other=n)
    first = tl.min(first, axis=1)[:, None]
    value = _asked(values_pointer, row, count, COUNT, COMPUTE)
    grad = _asked(grad_pointer, row, count, COUNT, COMPUTE)
    grad = tl.where(value != value, value, grad)
    for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
        column = start + tl.arange(0, CHUNK)
        taken = (column[None, :] == first) | (value != value)
        dx = tl.sum(tl.where(taken, grad, 0.0), axis=0)
        tl.store(dx_pointer + row * n + column, dx.to(dx_pointer.dtype.element_ty), mask=column < n)


KERNELS = (_resident_places, _pull_places, _find_places, _write_places)


def order_statistics(x: Tensor, k: Tensor) -> Tensor:
    """`order_statistics.order_statistics`, in Triton. Long rows of float64 are left to torch's sort."""
    batch, n, count = x.shape[:-1], x.shape[-1], k.shape[-1]
    rows, long = batch.numel(), n > longest()
    if n == 0 or n > MOST or (long and x.dtype == torch.float64):
        return reference.order_statistics(x, k)
    out = x.new_empty(*batch, count)
    if rows == 0 or count == 0:
        return out
    places = given(k, x)
    if long:
        return of_long_rows(x, places, rows, n, PLACE, count).view(*batch, count)
    together, which = held(rows, n, layout.compute(x.dtype))
    arguments = layout.rows(x, n), places, out, rows, n, count
    launch(_resident_places, cdiv(rows, together), *arguments, **which)
    return out


def order_statistics_backward(x: Tensor, values: Tensor, grad: Tensor) -> Tensor:
    """`order_statistics.order_statistics_backward`, in Triton for few places of a row."""
    n, count = x.shape[-1], values.shape[-1]
    if not x.numel() or n > MOST or not 0 < count <= PULLED:
        return reference.order_statistics_backward(x, values, grad)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, compute = x.shape[:-1].numel(), layout.compute(x.dtype)
    source, values, grad = layout.rows(x, n), values.contiguous(), grad.contiguous()
    if n <= longest():
        width, together, warps = layout.block(n)
        launch(
            _pull_places, cdiv(rows, together),
            source, values, grad, dx, rows, n, count,
            COMPUTE=compute, TOGETHER=together, WIDTH=width, num_warps=warps,
        )  # fmt: skip
        return dx
    parts, length = layout.parts(rows, n)
    first = torch.empty((rows, count, parts), dtype=torch.int32, device=x.device)
    wide = next_power_of_2(count)
    which: dict[str, Any] = {
        "COMPUTE": compute,
        "COUNT": wide,
        "CHUNK": max(1, layout.CHUNK // wide),
        "num_warps": max(1, layout.CHUNK // 512),
    }
    launch(_find_places, rows * parts, source, values, first, n, count, length, parts, **which)
    launch(
        _write_places, rows * parts, values, grad, first, dx, n, count, length, parts,
        PARTS=next_power_of_2(parts), **which,
    )  # fmt: skip
    return dx


def given(k: Tensor, x: Tensor) -> Values:
    """The places that are asked for of each row: by value if they follow each other and are the same in all
    rows."""
    found = _consecutive(k)
    if found is None:
        found = Values(k.to(x.device).expand(*x.shape[:-1], k.shape[-1]).contiguous(), 1, 0.0, 0.0)
    return found


def _consecutive(k: Tensor) -> Values | None:
    """The first of places that follow each other and are the same in all rows, if these are on the CPU."""
    if not k.is_cpu or any(k.stride(i) and k.shape[i] > 1 for i in range(k.dim() - 1)):
        return None
    numbers = k.reshape(-1, k.shape[-1])[0].tolist()
    if numbers != [numbers[0] + i for i in range(len(numbers))]:
        return None
    return Values(None, 0, *layout.halves(numbers[0]))
