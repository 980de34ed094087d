"""The decay scan, with Triton's associative scan; and Laplace's ranks, which stand on it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import laplace as reference
from khot._kernels.triton import layout, row_sort
from khot._kernels.triton.arguments import Rows
from khot._kernels.triton.fast import double, store
from khot._kernels.triton.functions import place
from khot._kernels.triton.launch import launch
from khot._kernels.triton.sizes import cdiv, next_power_of_2

FAR = tl.constexpr(reference.FAR)


@triton.jit
def _compose(decay, value, next_decay, next_value):
    """Of the maps h → decay·h + value, the first after the second."""
    return decay * next_decay, value * next_decay + next_value


@triton.jit
def _scan(w, g, row, there, start, n, REVERSE: tl.constexpr, ONES: tl.constexpr, WIDTH: tl.constexpr):
    """The maps from what stands before `start` to each of the next sums. ONES says that w is 1."""
    at = start + tl.arange(0, WIDTH)
    valid = there[:, None] & ((at >= 1) & (at < n))[None, :]
    gap = n - at if REVERSE else at
    source = n - at if REVERSE else at - 1
    own_g = tl.load(g.pointer + row[:, None] * g.stride + gap[None, :], mask=valid, other=0.0)
    decay = tl.where(valid, tl.exp(-own_g.to(w.pointer.dtype.element_ty)), 0.0)
    if ONES:
        return tl.associative_scan((decay, decay), 1, _compose)
    else:
        own_w = tl.load(w.pointer + row[:, None] * w.stride + source[None, :], mask=valid, other=0.0)
        return tl.associative_scan((decay, decay * own_w), 1, _compose)


@triton.jit
def _last(values, WIDTH: tl.constexpr):
    return tl.sum(tl.where((tl.arange(0, WIDTH) == WIDTH - 1)[None, :], values, 0.0), axis=1)


@triton.jit(do_not_specialize=["rows", "parts"])
def _part_maps(
    w, g, maps_pointer, rows, n, length, parts, REVERSE: tl.constexpr, ONES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The map over the whole part, for the parts after it."""
    row, part = place(parts)
    row = row + tl.arange(0, 1)
    decay = tl.zeros((1,), w.pointer.dtype.element_ty) + 1.0
    value = decay * 0
    for start in range(part * length, tl.minimum(n, (part + 1) * length), WIDTH):
        decays, values = _scan(w, g, row, row < rows, start, n, REVERSE, ONES, WIDTH)
        decay, value = _compose(decay, value, _last(decays, WIDTH), _last(values, WIDTH))
    tl.store(maps_pointer + (row * parts + part) * 2, decay)
    tl.store(maps_pointer + (row * parts + part) * 2 + 1, value)


@triton.jit(do_not_specialize=["rows", "parts"])
def _part_scan(
    w, g, maps_pointer, out_pointer, rows, n, length, parts, REVERSE: tl.constexpr, ONES: tl.constexpr,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    row = row * TOGETHER + tl.arange(0, TOGETHER)
    there = row < rows
    carry = tl.zeros((TOGETHER,), w.pointer.dtype.element_ty)
    if PARTS > 1:  # a program has one row then
        other = tl.arange(0, PARTS)[None, :]
        maps = maps_pointer + (row[:, None] * parts + other) * 2
        before = tl.load(maps, mask=other < part, other=1.0), tl.load(maps + 1, mask=other < part, other=0.0)
        _, sums = tl.associative_scan(before, 1, _compose)
        carry += _last(sums, PARTS)
    for start in range(part * length, tl.minimum(n, (part + 1) * length), WIDTH):
        decays, values = _scan(w, g, row, there, start, n, REVERSE, ONES, WIDTH)
        h = values + decays * carry[:, None]
        carry = _last(h, WIDTH)
        at = start + tl.arange(0, WIDTH)
        column = n - 1 - at if REVERSE else at
        offset = row[:, None] * n + column[None, :]
        tl.store(out_pointer + offset, h, mask=there[:, None] & (at < n)[None, :])


@triton.jit
def _temperature(tau, row, there):
    """τ, NaN if there is none."""
    own_tau = tl.load(tau.pointer + row * tau.stride, mask=there, other=1.0).to(tl.float64)
    return tl.where((own_tau > 0) & (own_tau < float("inf")), own_tau, float("nan"))


@triton.jit(do_not_specialize=["rows", "parts"])
def _sorted_gaps(y_pointer, tau, gap_pointer, rows, n, parts, TOGETHER: tl.constexpr, WIDTH: tl.constexpr):
    """(y_(i−1) − y_i)/τ of descending rows, at most FAR; equal infinite entries have none between them."""
    row, part = place(parts)
    row = row * TOGETHER + tl.arange(0, TOGETHER)
    column = part * WIDTH + tl.arange(0, WIDTH)
    own_tau = _temperature(tau, row, row < rows)[:, None]
    offset = row[:, None] * n + column[None, :]
    there = (row < rows)[:, None] & (column < n)[None, :]
    later = there & (column > 0)[None, :]
    y = double(tl.load(y_pointer + offset, mask=there, other=0.0))
    before = double(tl.load(y_pointer + offset - 1, mask=later, other=0.0))
    gap = tl.where(later & (before > y), tl.minimum(before - y, FAR * own_tau) / own_tau, 0.0)
    tl.store(gap_pointer + offset, gap, mask=there)


@triton.jit(do_not_specialize=["rows", "parts"])
def _ranks(
    y_pointer, order_pointer, up_pointer, down_pointer, tau, out_pointer, index_pointer, rows, n, parts,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr, DESCENDING: tl.constexpr,
):  # fmt: skip
    """The ranks from the sums to either side of each sorted entry, where the entries came from."""
    row, part = place(parts)
    row = row * TOGETHER + tl.arange(0, TOGETHER)
    column = part * WIDTH + tl.arange(0, WIDTH)
    own_tau = _temperature(tau, row, row < rows)
    first = double(tl.load(y_pointer + row * n, mask=row < rows, other=0.0))  # NaN comes first
    bad = (first != first) | (own_tau != own_tau)
    offset = row[:, None] * n + column[None, :]
    there = (row < rows)[:, None] & (column < n)[None, :]
    above = tl.load(up_pointer + offset, mask=there, other=0.0)
    below = tl.load(down_pointer + offset, mask=there, other=0.0)
    if DESCENDING:
        rank = (column + 1).to(tl.float64)[None, :] + 0.5 * (below - above)
    else:
        rank = (n - column).to(tl.float64)[None, :] + 0.5 * (above - below)
    rank = tl.where(bad[:, None], float("nan"), rank)
    order = tl.load(order_pointer + offset, mask=there, other=0)
    store(out_pointer + row[:, None] * n + order, rank, there)
    tl.store(index_pointer + offset, order.to(tl.int32), mask=there)


KERNELS = (_part_maps, _part_scan, _sorted_gaps, _ranks)


def decay_scan(w: Tensor, g: Tensor, reverse: bool) -> Tensor:
    """`laplace.decay_scan`, in Triton."""
    return _decay_scan(w, g, reverse, False)


def _decay_scan(w: Tensor, g: Tensor, reverse: bool, ones: bool) -> Tensor:
    """The same, with 1 in place of w's numbers where ``ones`` says so."""
    shape = torch.broadcast_shapes(w.shape, g.shape)
    n = shape[-1]
    out = w.new_empty(shape)
    if out.numel() == 0:
        return out
    rows = out.numel() // n
    given = layout.rows(w.expand(shape), n), layout.rows(g.expand(shape), n)
    if n <= layout.CHUNK:
        width, together, warps = layout.block(n)
        launch(
            _part_scan, cdiv(rows, together),
            *given, out, out, rows, n, n, 1,
            REVERSE=reverse, ONES=ones, TOGETHER=together, WIDTH=width, PARTS=1, num_warps=warps,
        )  # fmt: skip
        return out
    parts, length = layout.parts(rows, n)
    maps = out.new_empty(rows * parts * 2)
    which = {"REVERSE": reverse, "ONES": ones, "WIDTH": layout.CHUNK}
    if parts > 1:
        launch(_part_maps, rows * parts, *given, maps, rows, n, length, parts, **which)
    launch(
        _part_scan, rows * parts,
        *given, maps, out, rows, n, length, parts,
        **which, TOGETHER=1, PARTS=next_power_of_2(parts),
    )  # fmt: skip
    return out


def laplace_rank(x: Tensor, tau: Tensor, descending: bool = True) -> tuple[Tensor, Tensor]:
    """The ranks, and the order of the entries."""
    out, index = x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int32)
    if x.numel() == 0:
        return out, index
    n = x.shape[-1]
    rows = x.numel() // n
    y, order = row_sort.descending(x)
    tau_row = Rows(*layout.numbers(tau, x.shape[:-1], x.device))
    width, together, warps = layout.block(min(n, layout.CHUNK))
    parts = cdiv(n, width)
    programs = cdiv(rows, together) * parts
    which = {"TOGETHER": together, "WIDTH": width, "num_warps": warps}
    gap = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    launch(_sorted_gaps, programs, y, tau_row, gap, rows, n, parts, **which)
    above, below = (_decay_scan(gap, gap, reverse, True) for reverse in (False, True))
    launch(
        _ranks, programs, y, order, above, below, tau_row, out, index, rows, n, parts,
        **which, DESCENDING=descending,
    )  # fmt: skip
    return out, index
