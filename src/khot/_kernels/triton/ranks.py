"""Laplace's soft ranks, and their gradients, in float32: one launch each, after one of torch's sorts if rows
are long.

The program of short rows sorts them, with the index of each entry behind its score, so that equal scores keep
their order. A sum over the entries on one side of each follows from one scan: a piece of the sorted row is
its last score and what its entries add up to where they are decayed to that score (:func:`sums`). So there
are no gaps and no products of decays, and differences of scores are taken before they are divided by τ.

The backward pass reads the entries in the order that the forward pass found, and sorts nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import laplace as reference
from khot._kernels.triton import fast, layout
from khot._kernels.triton.fast import LOG2E, double, total, wide
from khot._kernels.triton.launch import launch
from khot._kernels.triton.resident import entries, inside, place_rows
from khot._kernels.triton.selection import ordered

__all__ = [
    "KERNELS",
    "SHORT",
    "across",
    "both_sums",
    "compares_doubles",
    "finite",
    "laplace_rank",
    "laplace_rank_backward",
    "nan_of",
    "serves",
    "sorted_rows",
    "temperature",
    "tile",
]

SHORT = 2048  # entries of a row that one program sorts; a compiler takes half a minute for 4,096
RANKED = 1024  # entries of a row that is sorted to be ranked; torch sorts a longer one in less time
NARROW = 16  # entries to which rows are padded at least
TOGETHER = 512  # entries of short rows that share a program
CHUNK, WARPS = 1024, 8  # of a long row, that a program holds at a time
BIG = tl.constexpr(torch.finfo(torch.float32).max)  # stands for an infinite score: differences stay numbers
FAR = tl.constexpr(reference.FAR)
# τ within these has a reciprocal in float32. Where it is cut, all scores are equal or infinitely far apart.
LEAST, GREATEST = tl.constexpr(1e-37), tl.constexpr(1e37)


# ---------------------------------------------------------------------------------- sums along a row


@triton.jit
def sums(y, c, s, next_y, next_c, next_s):
    """Of two pieces of a sorted row: the last score, log₂(e)/τ, and Σ e^(−distance) to the last score."""
    return next_y, next_c, s * tl.exp2(-tl.abs(y - next_y) * next_c) + next_s


@triton.jit
def _differences(y, c, v, s, w, next_y, next_c, next_v, next_s, next_w):
    """As :func:`sums`, with w = Σ e^(−distance) (v − v_last), which loses nothing where all v are nearly
    equal."""
    decay = tl.exp2(-tl.abs(y - next_y) * next_c)
    return next_y, next_c, next_v, s * decay + next_s, (w + s * (v - next_v)) * decay + next_w


@triton.jit
def both_sums(y, c, one, AXIS: tl.constexpr):
    """Σ e^(−distance) over the entries above each one, and below it; both count the entry itself."""
    _, _, above = tl.associative_scan((y, c, one), AXIS, sums)
    _, _, below = tl.associative_scan((y, c, one), AXIS, sums, reverse=True)
    return above, below


# ---------------------------------------------------------------------------------- rows and their order


@triton.jit
def temperature(pointer, stride, high, row, there):
    """τ, held within the range of float32, and NaN in place of 0 for rows whose τ is none."""
    if pointer is None:
        tau = row.to(tl.float32) * 0 + high  # the rest is below float32's digits
    else:
        tau = double(tl.load(pointer + row * stride, mask=there, other=1.0))
    poison = tl.where(tau > 0, tl.where(tau < float("inf"), 0.0, float("nan")), float("nan"))
    return tl.minimum(tl.maximum(tau, LEAST), GREATEST).to(tl.float32), poison.to(tl.float32)


@triton.jit
def across(columns, TOGETHER: tl.constexpr):
    """What columns have, so that it broadcasts with the entries."""
    if TOGETHER == 1:
        return columns
    else:
        return columns[None, :]


@triton.jit
def sorted_rows(x, column, valid, TOGETHER: tl.constexpr, DOUBLES: tl.constexpr):
    """The scores in descending order, and the columns that they came from; what is not valid comes last.

    Where float64 runs at half the rate of float32, score and column are the digits of a number in [1, 2),
    which takes one instruction to compare; as an integer they take two of a slower kind.
    """
    key = tl.where(valid, ~ordered(x), 0x7FFFFFFF)
    source = across(column, TOGETHER).to(tl.int64)
    if DOUBLES:
        key = (key ^ -0x80000000).to(tl.uint32, bitcast=True).to(tl.int64)
        digits = ((key << 16) | source | 0x3FF0000000000000).to(tl.float64, bitcast=True)
        digits = tl.sort(digits).to(tl.int64, bitcast=True)
        order, key = (digits & 0xFFFF).to(tl.int32), (digits >> 16).to(tl.int32) ^ -0x80000000
    else:
        digits = tl.sort((key.to(tl.int64) << 32) | source)
        order, key = digits.to(tl.int32), (digits >> 32).to(tl.int32)
    bits = ~key
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), order


@triton.jit
def finite(x):
    return tl.minimum(tl.maximum(x, -BIG), BIG)


@triton.jit
def nan_of(x, AXIS: tl.constexpr):
    """NaN if there is one in the row, and otherwise 0."""
    return tl.sum(tl.where(x == x, 0.0, x), axis=AXIS)


# ---------------------------------------------------------------------------------- ranks


@triton.jit(do_not_specialize=["rows"])
def _rank_rows(
    x_pointer, x_stride, tau_pointer, tau_stride, tau_high, tau_low, out_pointer, index_pointer, rows, n,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, DOUBLES: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    valid = inside(there, column, n, TOGETHER, EXACT)
    x = tl.load(x_pointer + entries(row, x_stride, column, TOGETHER), mask=valid, other=0.0).to(tl.float32)
    tau, poison = temperature(tau_pointer, tau_stride, tau_high, row, there)
    poison += nan_of(x, AXIS)
    y, order = sorted_rows(x, column, valid, TOGETHER, DOUBLES)
    y = tl.where(valid, finite(y), 0.0)
    zero = tl.zeros_like(y)
    above, below = both_sums(y, zero + wide(1 / tau * LOG2E, TOGETHER), tl.where(valid, 1.0, zero), AXIS)
    rank = across((column + 1).to(tl.float32), TOGETHER) + 0.5 * (below - above) + wide(poison, TOGETHER)
    at, base = entries(row, n, column, TOGETHER), wide(row * n, TOGETHER)
    tl.store(out_pointer + base + order, rank.to(out_pointer.dtype.element_ty), mask=valid)
    tl.store(index_pointer + at, order, mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _pull_ranks(
    grad_pointer, grad_row, grad_column, x_pointer, x_stride, tau_pointer, tau_stride, tau_high, tau_low,
    index_pointer, dx_pointer, dtau_pointer, rows, n,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """∂r/∂x is symmetric: dL/dx_i = Σ_j f_ij (v_j − v_i)/τ. Across the gap between two neighbours flows what
    the entries on either side pull the others, a product of their sums, and −dL/dτ = Σ gap/τ · flow: no sum
    over far scores cancels, as Σ x_i/τ · dL/dx_i does."""
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    valid = inside(there, column, n, TOGETHER, EXACT)
    at, base = entries(row, n, column, TOGETHER), wide(row * n, TOGETHER)
    order = tl.load(index_pointer + at, mask=valid, other=0).to(tl.int64)
    sources = x_pointer + wide(row * x_stride, TOGETHER)
    x = tl.load(sources + order, mask=valid, other=0.0).to(tl.float32)
    grads = grad_pointer + wide(row * grad_row, TOGETHER)
    v = tl.load(grads + order * grad_column, mask=valid, other=0.0).to(tl.float32)
    tau, poison = temperature(tau_pointer, tau_stride, tau_high, row, there)
    poison += nan_of(x, AXIS)
    free = tl.where(tl.abs(x) == float("inf"), False, valid)
    y, zero = finite(x), tl.zeros_like(x)
    v, one, c = tl.where(free, v, 0.0), tl.where(free, 1.0, zero), zero + wide(1 / tau * LOG2E, TOGETHER)
    _, _, _, up, w_up = tl.associative_scan((y, c, v, one, zero), AXIS, _differences)
    _, _, _, down, w_down = tl.associative_scan((y, c, v, one, zero), AXIS, _differences, reverse=True)
    half = 0.5 / tau
    dx = tl.where(free, (w_up + w_down) * wide(half, TOGETHER) + wide(poison, TOGETHER), 0.0)
    tl.store(dx_pointer + base + order, dx.to(dx_pointer.dtype.element_ty), mask=valid)
    if ASKED:
        later = valid & across(column + 1 < n, TOGETHER)
        after = tl.load(index_pointer + at + 1, mask=later, other=0).to(tl.int64)
        after = tl.load(sources + after, mask=later, other=0.0).to(tl.float32)
        gap = tl.minimum((y - finite(after)) * wide(1 / tau, TOGETHER), FAR)
        flow = tl.where(free & later, up * w_down - w_up * (down - 1), 0.0)
        dtau = -half * tl.sum(tl.where(flow == 0, 0.0, gap * flow), axis=AXIS)
        tl.store(dtau_pointer + row, (dtau + poison).to(tl.float64), mask=there)


# ---------------------------------------------------------------------------------- long rows
#
# torch sorts them, and a program goes through each twice, a chunk at a time: from the end to the start, for
# what lies below each chunk, of which it leaves a note; and from the start to the end, for the results.


@triton.jit
def _entries_of(values, column, which):
    """One entry of each of some vectors."""
    picked = ()
    for i in tl.static_range(len(values)):
        picked = picked + (tl.where(column == which, values[i], 0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return total(picked, 1)


@triton.jit(do_not_specialize=["parts"])
def _rank_long_rows(
    y_pointer, order_pointer, tau_pointer, tau_stride, tau_high, tau_low, out_pointer, index_pointer,
    note_pointer, n, parts, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tau, poison = temperature(tau_pointer, tau_stride, tau_high, row, row >= 0)
    y_at, order_at, note_at = y_pointer + row * n, order_pointer + row * n, note_pointer + row * parts * 2
    top = tl.load(y_at).to(tl.float32)  # a NaN would be here
    poison += tl.where(top == top, 0.0, top)
    c, s = 1 / tau * LOG2E, tau * 0
    y_below = s
    for i in range(1, parts):
        part = parts - i
        column = part * CHUNK + tl.arange(0, CHUNK)
        y = finite(tl.load(y_at + column, mask=column < n, other=0.0).to(tl.float32))
        top = finite(tl.load(y_at + part * CHUNK).to(tl.float32))
        near = tl.sum(tl.where(column < n, tl.exp2(-tl.abs(top - y) * c), 0.0), axis=0)
        s = s * tl.exp2(-tl.abs(top - y_below) * c) + near
        y_below = top
        tl.store(note_at + part * 2, y_below)
        tl.store(note_at + part * 2 + 1, s)
    tl.debug_barrier()
    y_above, s_above = tau * 0, tau * 0
    for part in range(parts):
        column = part * CHUNK + tl.arange(0, CHUNK)
        valid = column < n
        y = tl.where(valid, finite(tl.load(y_at + column, mask=valid, other=0.0).to(tl.float32)), 0.0)
        order = tl.load(order_at + column, mask=valid, other=0)
        zero = tl.zeros_like(y)
        up, down = both_sums(y, zero + c, tl.where(valid, 1.0, zero), 0)
        up += s_above * tl.exp2(-tl.abs(y_above - y) * c)
        y_below = tl.load(note_at + part * 2 + 2, mask=part + 1 < parts, other=0.0)
        s_below = tl.load(note_at + part * 2 + 3, mask=part + 1 < parts, other=0.0)
        down += s_below * tl.exp2(-tl.abs(y - y_below) * c)
        rank = (column + 1).to(tl.float32) + 0.5 * (down - up) + poison
        tl.store(out_pointer + row * n + order, rank.to(out_pointer.dtype.element_ty), mask=valid)
        tl.store(index_pointer + row * n + column, order.to(tl.int32), mask=valid)
        y_above, s_above = _entries_of((y, up), column, (part + 1) * CHUNK - 1)


@triton.jit
def _scored(index_at, x_at, grad_at, grad_column, column, valid):
    """Of sorted entries where they came from, their scores, which of these are finite, and what comes in."""
    order = tl.load(index_at + column, mask=valid, other=0).to(tl.int64)
    x = tl.load(x_at + order, mask=valid, other=0.0).to(tl.float32)
    v = tl.load(grad_at + order * grad_column, mask=valid, other=0.0).to(tl.float32)
    one = tl.where(tl.abs(x) == float("inf"), 0.0, tl.where(valid, 1.0, 0.0))
    return order, x, finite(x), one, tl.where(one > 0, v, 0.0)


@triton.jit(do_not_specialize=["parts"])
def _pull_long_ranks(
    grad_pointer, grad_row, grad_column, x_pointer, x_stride, tau_pointer, tau_stride, tau_high, tau_low,
    index_pointer, dx_pointer, dtau_pointer, note_pointer, n, parts,
    CHUNK: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """As :func:`_pull_ranks`."""
    row = tl.program_id(0).to(tl.int64)
    tau, poison = temperature(tau_pointer, tau_stride, tau_high, row, row >= 0)
    index_at, note_at = index_pointer + row * n, note_pointer + row * parts * 4
    x_at, grad_at = x_pointer + row * x_stride, grad_pointer + row * grad_row
    first = tl.load(x_at + tl.load(index_at).to(tl.int64)).to(tl.float32)  # a NaN would be here
    poison += tl.where(first == first, 0.0, first)
    c, s, half = 1 / tau * LOG2E, tau * 0, 0.5 / tau
    y_below, v_below, w = s, s, s
    for i in range(1, parts):
        part = parts - i
        column = part * CHUNK + tl.arange(0, CHUNK)
        _, _, y, one, v = _scored(index_at, x_at, grad_at, grad_column, column, column < n)
        _, _, top, _, top_v = _scored(index_at, x_at, grad_at, grad_column, part * CHUNK, row >= 0)
        near = tl.exp2(-tl.abs(top - y) * c) * one
        s_near, w_near = total((near, near * (v - top_v)), 1)
        decay = tl.exp2(-tl.abs(top - y_below) * c)
        w = (w + s * (v_below - top_v)) * decay + w_near
        s = s * decay + s_near
        y_below, v_below = top, top_v
        tl.store(note_at + part * 4, y_below)
        tl.store(note_at + part * 4 + 1, v_below)
        tl.store(note_at + part * 4 + 2, s)
        tl.store(note_at + part * 4 + 3, w)
    tl.debug_barrier()
    y_above, v_above, s_above, w_above, dtau = tau * 0, tau * 0, tau * 0, tau * 0, tau * 0
    for part in range(parts):
        column = part * CHUNK + tl.arange(0, CHUNK)
        valid = column < n
        order, _, y, one, v = _scored(index_at, x_at, grad_at, grad_column, column, valid)
        zero = tl.zeros_like(y)
        given = (y, zero + c, v, one, zero)
        _, _, _, up, w_up = tl.associative_scan(given, 0, _differences)
        _, _, _, down, w_down = tl.associative_scan(given, 0, _differences, reverse=True)
        decay = tl.exp2(-tl.abs(y_above - y) * c)
        w_up += (w_above + s_above * (v_above - v)) * decay
        up += s_above * decay
        more = part + 1 < parts
        y_below = tl.load(note_at + part * 4 + 4, mask=more, other=0.0)
        v_below = tl.load(note_at + part * 4 + 5, mask=more, other=0.0)
        s_below = tl.load(note_at + part * 4 + 6, mask=more, other=0.0)
        w_below = tl.load(note_at + part * 4 + 7, mask=more, other=0.0)
        decay = tl.exp2(-tl.abs(y - y_below) * c)
        w_down += (w_below + s_below * (v_below - v)) * decay
        down += s_below * decay
        dx = tl.where(one > 0, (w_up + w_down) * half + poison, 0.0)
        tl.store(dx_pointer + row * n + order, dx.to(dx_pointer.dtype.element_ty), mask=valid)
        if ASKED:
            later = column + 1 < n
            after = tl.load(index_at + column + 1, mask=later, other=0).to(tl.int64)
            after = finite(tl.load(x_at + after, mask=later, other=0.0).to(tl.float32))
            flow = tl.where(later, (up * w_down - w_up * (down - 1)) * one, 0.0)
            gap = tl.minimum((y - after) * (1 / tau), FAR)
            dtau -= half * tl.sum(tl.where(flow == 0, 0.0, gap * flow), axis=0)
        y_above, v_above, s_above, w_above = _entries_of((y, v, up, w_up), column, (part + 1) * CHUNK - 1)
    if ASKED:
        tl.store(dtau_pointer + row, (dtau + poison).to(tl.float64))


KERNELS = (_rank_rows, _pull_ranks, _rank_long_rows, _pull_long_ranks)


# ---------------------------------------------------------------------------------- the host


def serves(x: Tensor, long: bool) -> bool:
    """Whether a row of x has a program: a short one, which sorts it, or a long one that torch sorts. Few
    very long rows would leave most of a device idle."""
    n = x.shape[-1]
    if x.dtype == torch.float64 or x.numel() == 0:
        return False
    return n <= SHORT or (long and (n <= layout.RESIDENT or x.numel() >= n * layout.STREAMS))


def tile(n: int) -> dict[str, Any]:
    """Rows in a program and warps. An H100 takes the least time for a row of 512 in one warp, whose threads
    exchange entries without shared memory, and for longer ones in 8."""
    width = max(NARROW, triton.next_power_of_2(n))
    together, warps = max(1, TOGETHER // width), 4
    if width > 128:
        together, warps = 1, {256: 2, 512: 1}.get(width, 8)
    return {"TOGETHER": together, "WIDTH": width, "EXACT": n == width, "num_warps": warps}


@functools.cache
def compares_doubles(device: torch.device) -> bool:
    """Whether the device compares numbers of float64 at half the rate of float32, as NVIDIA's for data
    centres do."""
    if not fast.PTX.value or device.type != "cuda" or not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return minor == 0 and major <= 10


def laplace_rank(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """The ranks, and the order of the entries."""
    out, index = x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int32)
    batch, n = x.shape[:-1], x.shape[-1]
    rows, scale = batch.numel(), layout.values(tau, batch, x.device)
    if n > RANKED:
        y, order = torch.sort(x.contiguous(), dim=-1, descending=True, stable=True)
        parts, notes = _notes(x, 2)
        launch(
            _rank_long_rows, rows,
            y, order, *scale, out, index, notes, n, parts, CHUNK=CHUNK, num_warps=WARPS,
        )  # fmt: skip
        return out, index
    which = tile(n)
    launch(
        _rank_rows, -(-rows // which["TOGETHER"]),
        *layout.rows(x, n), *scale, out, index, rows, n, **which, DOUBLES=compares_doubles(x.device),
    )  # fmt: skip
    return out, index


def laplace_rank_backward(
    grad: Tensor, x: Tensor, order: Tensor, tau: Tensor, want_tau: bool
) -> tuple[Tensor, Tensor]:
    """The gradients in x and τ; that of τ holds anything unless it is wanted."""
    batch, n = x.shape[:-1], x.shape[-1]
    rows, dx, dtau = batch.numel(), x.new_empty(x.shape), x.new_empty(batch, dtype=torch.float64)
    given = (
        *layout.matrix(grad, x), *layout.rows(x, n), *layout.values(tau, batch, x.device),
        order.contiguous(), dx, dtau,
    )  # fmt: skip
    if n > RANKED:
        parts, notes = _notes(x, 4)
        launch(_pull_long_ranks, rows, *given, notes, n, parts, CHUNK=CHUNK, ASKED=want_tau, num_warps=WARPS)
        return dx, dtau
    which = tile(n)
    launch(_pull_ranks, -(-rows // which["TOGETHER"]), *given, rows, n, **which, ASKED=want_tau)
    return dx, dtau


def _notes(x: Tensor, count: int) -> tuple[int, Tensor]:
    """Into how many chunks the rows of x are cut, and room for so many numbers of each."""
    n = x.shape[-1]
    parts = -(-n // CHUNK)
    return parts, x.new_empty(x.numel() // n * parts * count, dtype=torch.float32)
