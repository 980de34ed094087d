"""Gradients of two-sided assignments, in two launches.

With f the densities and v = f · grad/τ, the gradient is v + f (a_i + b_j), where a and b are the f-weighted
fit of `_ops.two_way`. In the first launch programs leave sums over their rows, and the last one solves the
columns' system for b, to the digits of float64; in the second, rows find their a and write the gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._core.dispatch import OPERATORS
from khot._kernels.triton import assign, layout
from khot._kernels.triton.assign_rows import INF, LEAST, load_rows
from khot._kernels.triton.assign_steps import left_by_part
from khot._kernels.triton.assign_system import add_up, conjugate, overlap
from khot._kernels.triton.fast import double, store
from khot._kernels.triton.functions import place, side
from khot._kernels.triton.launch import variant
from khot._kernels.triton.split import last_of_row

__all__ = ["KERNELS", "soft_assign_backward", "which"]

ROUNDING = 1e-14  # the error at which conjugate gradients end, relative to its beginning


@triton.jit
def _densities(
    x_at, x_stride, grad_at, grad_row, grad_column, r_at, c, tau, start, end, n,
    CDF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Which rows these are; z and f, which are 0 where nothing moves; v; and 1/Σ_j f, 0 of a row at rest."""
    row, there, x = load_rows(x_at, x_stride, start, end, n, ROWS, WIDTH)
    r = tl.load(r_at + row, mask=there, other=0.0)
    open_ = (tl.abs(x) < INF) & (tl.abs(r) < INF)[:, None] & (tl.abs(c) < INF)[None, :]
    z = tl.where(open_, (x - tl.where(tl.abs(r) < INF, r, 0.0)[:, None]) - c[None, :], 0.0) / tau
    power = tl.zeros((), tl.float64) + 1  # which no CDF with full support has
    _, density = side(z, z, z > 0, 0.0, -tl.abs(z), power, CDF)
    f = tl.where(open_, density, 0.0)
    column = tl.arange(0, WIDTH).to(tl.int64)
    at = grad_at + (row.to(tl.int64)[:, None] * grad_row + column[None, :] * grad_column)
    inside = there[:, None] & (column < n)[None, :]
    v = f * (double(tl.load(at, mask=inside, other=0.0)) / tau)
    mass = tl.sum(f, axis=1)
    moves = mass > LEAST
    return row, there, z, f, v, tl.where(moves, 1 / tl.where(moves, mass, 1.0), 0.0)


@triton.jit(do_not_specialize=["m", "length", "parts", "most"])
def pull_columns(
    x_pointer, x_stride, grad_pointer, grad_row, grad_column, grad_r_pointer, grad_c_pointer, tau_pointer,
    tau_stride, r_pointer, c_pointer, b_pointer, dcapacity_pointer, slope_pointer, part_pointer,
    counter_pointer, m, n, parts, length, tolerance, most,
    CDF: tl.constexpr, AT_MOST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """b, and the gradient of the capacities."""
    matrix, part = place(parts)
    stride = n.to(tl.int64) * n + 2 * n + 8
    part_at = part_pointer + matrix * parts * stride
    own_at = part_at + part * stride
    slope_at = slope_pointer + matrix * m * n
    first, end = part * length, tl.minimum(m, (part + 1) * length)
    column = tl.arange(0, WIDTH)
    there = column < n
    tau = double(tl.load(tau_pointer + matrix * tau_stride))
    c = tl.load(c_pointer + matrix * n + column, mask=there, other=INF)
    by_column, slopes = tl.zeros((ROWS, WIDTH), tl.float64), tl.zeros((ROWS, WIDTH), tl.float64)
    for start in range(first, end, ROWS):
        row, is_row, _, f, v, inverse = _densities(
            x_pointer + matrix * m * x_stride, x_stride, grad_pointer + matrix * m * grad_row, grad_row,
            grad_column, r_pointer + matrix * m, c, tau, start, end, n, CDF, ROWS, WIDTH,
        )  # fmt: skip
        by_row = -tl.sum(v, axis=1)
        if grad_r_pointer is not None:
            by_row += tl.load(grad_r_pointer + matrix * m + row, mask=is_row, other=0.0)
        by_column -= v + f * (by_row * inverse)[:, None]
        slopes += f
        at = row[:, None] * n + column[None, :]
        tl.store(slope_at + at, f * tl.sqrt(inverse)[:, None], mask=is_row[:, None] & there[None, :])
    tl.store(own_at + column, tl.sum(by_column, axis=0), mask=there)
    tl.store(own_at + n + column, tl.sum(slopes, axis=0), mask=there)
    tl.store(own_at + 2 * n, tau * 0)
    tl.debug_barrier()
    overlap(slope_at, own_at + (2 * n + 8), first, end, n, BLOCK, DEPTH)
    if add_up(part_at, counter_pointer + matrix * (parts + 1), part, parts, stride, GROUP, ADDED):
        wanted = tl.load(part_at + column, mask=there, other=0.0)
        if grad_c_pointer is not None:
            wanted += tl.load(grad_c_pointer + matrix * n + column, mask=there, other=0.0)
        scale = tl.load(part_at + n + column, mask=there, other=0.0)
        moves = there & (scale > 0)
        if AT_MOST:
            moves = moves & (c > 0)
        free = tl.where(moves, 1.0, 0.0).to(tl.float64)
        width = tl.maximum(tl.sum(free, axis=0), 1.0)
        wanted = wanted * free
        if not AT_MOST:  # all rows and columns together say nothing
            wanted -= free * (tl.sum(wanted, axis=0) / width)
        b_at = b_pointer + matrix * n
        b = conjugate(
            wanted, scale, scale, part_at + (2 * n + 8), b_at, moves, tau * 0, tolerance, most, n, WIDTH,
            CHUNK,
        )  # fmt: skip
        if not AT_MOST:
            b -= free * (tl.sum(b, axis=0) / width)
        lost = tl.sum(tl.where(there & (c != c), 1, 0), axis=0) > 0
        b = tl.where(lost, float("nan"), b)
        tl.debug_barrier()
        tl.store(b_at + column, b, mask=there)
        store(dcapacity_pointer + matrix * n + column, -tau * b, there)


@triton.jit(do_not_specialize=["m", "length", "parts"])
def pull_entries(
    x_pointer, x_stride, grad_pointer, grad_row, grad_column, grad_r_pointer, tau_pointer, tau_stride,
    r_pointer, c_pointer, b_pointer, dx_pointer, dk_pointer, dtau_pointer, part_pointer, counter_pointer, m,
    n, parts, length,
    CDF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of the scores, of k and of τ."""
    matrix, part = place(parts)
    first, end = part * length, tl.minimum(m, (part + 1) * length)
    column = tl.arange(0, WIDTH)
    there = column < n
    tau = double(tl.load(tau_pointer + matrix * tau_stride))
    c = tl.load(c_pointer + matrix * n + column, mask=there, other=INF)
    b = tl.load(b_pointer + matrix * n + column, mask=there, other=0.0)
    along = tl.zeros((ROWS,), tl.float64)
    for start in range(first, end, ROWS):
        row, is_row, z, f, v, inverse = _densities(
            x_pointer + matrix * m * x_stride, x_stride, grad_pointer + matrix * m * grad_row, grad_row,
            grad_column, r_pointer + matrix * m, c, tau, start, end, n, CDF, ROWS, WIDTH,
        )  # fmt: skip
        by_row = -tl.sum(v + f * b[None, :], axis=1)
        if grad_r_pointer is not None:
            by_row += tl.load(grad_r_pointer + matrix * m + row, mask=is_row, other=0.0)
        a = by_row * inverse
        dx = v + f * (a[:, None] + b[None, :])
        along -= tl.sum(z * dx, axis=1)
        at = dx_pointer + matrix * m * n + (row[:, None] * n + column[None, :])
        store(at, dx, is_row[:, None] & there[None, :])
        store(dk_pointer + matrix * m + row, -tau * a, is_row)
    tl.store(part_pointer + matrix * parts + part, tl.sum(along, axis=0))
    if last_of_row(counter_pointer + matrix * (parts + 1), parts):
        total = tl.zeros((ROWS,), tl.float64)
        for some in range(0, parts, ROWS):
            one = some + tl.arange(0, ROWS)
            at_part = part_pointer + matrix * parts + one
            total += tl.load(at_part, mask=one < parts, other=0.0, cache_modifier=".cg")
        tl.store(dtau_pointer + matrix, tl.sum(total, axis=0))


KERNELS = (pull_columns, pull_entries)


def soft_assign_backward(
    grad: Tensor, grad_r: Tensor | None, grad_c: Tensor | None, x: Tensor, tau: Tensor, r: Tensor, c: Tensor,
    cdf: str, shape: float, at_most: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`_ops.soft_assign.soft_assign_backward`, in Triton."""
    if not assign.fits(x, cdf, shape):
        reference = OPERATORS["soft_assign_backward"].kernel
        found: tuple[Tensor, ...] = reference(grad, grad_r, grad_c, x, tau, r, c, cdf, shape, at_most)
        return found
    *batch, m, n = x.shape
    cut = assign.cut(torch.Size(batch).numel(), m, n)
    programs, size = cut.matrices * cut.parts, (m, n, cut.parts, cut.length)
    flat, stride = assign.scores(x)
    taus = tau.expand(*batch, 1).reshape(-1)
    by_row = None if grad_r is None else grad_r.contiguous()
    by_column = None if grad_c is None else grad_c.contiguous()
    source = flat, stride, *layout.matrix(grad, x), by_row
    numbers = taus, taus.stride(0), r.contiguous(), c.contiguous()
    dx, dk, dcapacity, b = x.new_empty(x.shape), layout.like(r), layout.like(c), layout.like(c)
    dtau = r.new_empty(*batch, 1)
    slopes = r.new_empty(x.numel())
    left = r.new_empty(programs * left_by_part(n))
    counter = torch.zeros(cut.matrices * (cut.parts + 1), dtype=torch.int32, device=x.device)
    constants = which(n, cdf, at_most)
    variant(pull_columns, **constants["columns"])(
        programs, *source, by_column, *numbers, b, dcapacity, slopes, left, counter, *size, ROUNDING,
        64 + 4 * n,
    )  # fmt: skip
    variant(pull_entries, **constants["entries"])(
        programs, *source, *numbers, b, dx, dk, dtau, left, counter, *size
    )
    return dx, dk, dcapacity, dtau


def which(n: int, cdf: str, at_most: bool) -> dict[str, dict[str, int]]:
    """The constants of both kernels, for so many columns."""
    step = assign.which(n, cdf, at_most)["step"]
    entries = {name: step[name] for name in ("CDF", "ROWS", "WIDTH", "num_warps")}
    return {"columns": step, "entries": entries}
