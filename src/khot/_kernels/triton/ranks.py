"""Laplace's soft ranks of short rows, and their gradients: one launch each, in float32.

The program sorts its rows, with the index of each entry behind its score, so that equal scores keep their
order. A sum over the entries on one side of each follows from one scan: a piece of the sorted row is its last
score and what its entries add up to where they are decayed to that score (:func:`sums`). So there are no
gaps and no products of decays, and differences of scores are taken before they are divided by τ.

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
from khot._kernels.triton.fast import LOG2E, double, wide
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

SHORT = 2048  # entries of a row that one program sorts, in 8 warps; a compiler takes half a minute for 4,096
NARROW = 16  # entries to which rows are padded at least
TOGETHER = 512  # entries of short rows that share a program
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


KERNELS = (_rank_rows, _pull_ranks)


# ---------------------------------------------------------------------------------- the host


def serves(x: Tensor) -> bool:
    """Whether a program sorts a row of x, and in float32."""
    return 0 < x.shape[-1] <= SHORT and x.dtype != torch.float64 and x.numel() > 0


def tile(n: int) -> dict[str, Any]:
    """Rows in a program and warps, for 4 to 8 entries of a thread."""
    width = max(NARROW, triton.next_power_of_2(n))
    warps = 4 if width <= 128 else width // 256
    return {"TOGETHER": max(1, TOGETHER // width), "WIDTH": width, "EXACT": n == width, "num_warps": warps}


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
    rows, which = batch.numel(), tile(n)
    launch(
        _rank_rows, -(-rows // which["TOGETHER"]),
        *layout.rows(x, n), *layout.values(tau, batch, x.device), out, index, rows, n,
        **which, DOUBLES=compares_doubles(x.device),
    )  # fmt: skip
    return out, index


def laplace_rank_backward(
    grad: Tensor, x: Tensor, order: Tensor, tau: Tensor, want_tau: bool
) -> tuple[Tensor, Tensor]:
    """The gradients in x and τ; that of τ holds anything unless it is wanted."""
    batch, n = x.shape[:-1], x.shape[-1]
    rows, which = batch.numel(), tile(n)
    dx, dtau = x.new_empty(x.shape), x.new_empty(batch, dtype=torch.float64)
    launch(
        _pull_ranks, -(-rows // which["TOGETHER"]),
        *layout.matrix(grad, x), *layout.rows(x, n), *layout.values(tau, batch, x.device), order.contiguous(),
        dx, dtau, rows, n, **which, ASKED=want_tau,
    )  # fmt: skip
    return dx, dtau
