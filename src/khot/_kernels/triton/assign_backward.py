"""Gradients of two-sided assignments, in two launches.

With f the densities and v = f · grad/τ, the gradient is v + f (a_i + b_j), where a and b are the f-weighted
fit of `_ops.two_way`. In the first launch programs leave sums over their rows, and the last one solves the
columns' system for b, to the digits of float64; in the second, rows find their a and write the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._core.dispatch import OPERATORS
from khot._kernels.triton import assign, layout
from khot._kernels.triton.arguments import Duals, Rows, Scratch, Sizes
from khot._kernels.triton.assign_rows import INF, LEAST, load_rows
from khot._kernels.triton.assign_steps import left_by_part
from khot._kernels.triton.assign_system import add_up, conjugate, overlap
from khot._kernels.triton.fast import double, store
from khot._kernels.triton.functions import place, side
from khot._kernels.triton.launch import variant
from khot._kernels.triton.split import last_of_row

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
    x, grad, grad_t, tau, t, to, scratch, m, n, parts, length, tolerance, most,
    CDF: tl.constexpr, AT_MOST: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """b, and the gradient of the capacities, which go there."""
    ROWS: tl.constexpr = T.rows
    WIDTH: tl.constexpr = T.width
    matrix, part = place(parts)
    stride = n.to(tl.int64) * n + 2 * n + 8
    part_at = scratch.left + matrix * parts * stride
    own_at = part_at + part * stride
    slope_at = scratch.window + matrix * m * n
    first, end = part * length, tl.minimum(m, (part + 1) * length)
    column = tl.arange(0, T.width)
    there = column < n
    own_tau = double(tl.load(tau.pointer + matrix * tau.stride))
    c = tl.load(t.c + matrix * n + column, mask=there, other=INF)
    by_column, slopes = tl.zeros((ROWS, WIDTH), tl.float64), tl.zeros((ROWS, WIDTH), tl.float64)
    for start in range(first, end, T.rows):
        row, is_row, _, f, v, inverse = _densities(
            x.pointer + matrix * m * x.stride, x.stride, grad.pointer + matrix * m * grad.row, grad.row,
            grad.column, t.r + matrix * m, c, own_tau, start, end, n, CDF, T.rows, T.width,
        )  # fmt: skip
        by_row = -tl.sum(v, axis=1)
        if grad_t.r is not None:
            by_row += tl.load(grad_t.r + matrix * m + row, mask=is_row, other=0.0)
        by_column -= v + f * (by_row * inverse)[:, None]
        slopes += f
        at = row[:, None] * n + column[None, :]
        tl.store(slope_at + at, f * tl.sqrt(inverse)[:, None], mask=is_row[:, None] & there[None, :])
    tl.store(own_at + column, tl.sum(by_column, axis=0), mask=there)
    tl.store(own_at + n + column, tl.sum(slopes, axis=0), mask=there)
    tl.store(own_at + 2 * n, own_tau * 0)
    tl.debug_barrier()
    overlap(slope_at, own_at + (2 * n + 8), first, end, n, T.block, T.depth)
    if add_up(part_at, scratch.counter + matrix * (parts + 1), part, parts, stride, T.group, T.added):
        wanted = tl.load(part_at + column, mask=there, other=0.0)
        if grad_t.c is not None:
            wanted += tl.load(grad_t.c + matrix * n + column, mask=there, other=0.0)
        scale = tl.load(part_at + n + column, mask=there, other=0.0)
        moves = there & (scale > 0)
        if AT_MOST:
            moves = moves & (c > 0)
        free = tl.where(moves, 1.0, 0.0).to(tl.float64)
        width = tl.maximum(tl.sum(free, axis=0), 1.0)
        wanted = wanted * free
        if not AT_MOST:  # all rows and columns together say nothing
            wanted -= free * (tl.sum(wanted, axis=0) / width)
        b_at = to[0] + matrix * n
        b = conjugate(
            wanted, scale, scale, part_at + (2 * n + 8), b_at, moves, own_tau * 0, tolerance, most, n,
            T.width, T.chunk,
        )  # fmt: skip
        if not AT_MOST:
            b -= free * (tl.sum(b, axis=0) / width)
        lost = tl.sum(tl.where(there & (c != c), 1, 0), axis=0) > 0
        b = tl.where(lost, float("nan"), b)
        tl.debug_barrier()
        tl.store(b_at + column, b, mask=there)
        store(to[1] + matrix * n + column, -own_tau * b, there)


@triton.jit(do_not_specialize=["m", "length", "parts"])
def pull_entries(
    x, grad, grad_r_pointer, tau, t, b_pointer, dx_pointer, dk_pointer, dtau_pointer, scratch, m, n, parts,
    length, CDF: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradients of the scores, of k and of τ."""
    ROWS: tl.constexpr = T.rows
    matrix, part = place(parts)
    first, end = part * length, tl.minimum(m, (part + 1) * length)
    column = tl.arange(0, T.width)
    there = column < n
    own_tau = double(tl.load(tau.pointer + matrix * tau.stride))
    c = tl.load(t.c + matrix * n + column, mask=there, other=INF)
    b = tl.load(b_pointer + matrix * n + column, mask=there, other=0.0)
    along = tl.zeros((ROWS,), tl.float64)
    for start in range(first, end, T.rows):
        row, is_row, z, f, v, inverse = _densities(
            x.pointer + matrix * m * x.stride, x.stride, grad.pointer + matrix * m * grad.row, grad.row,
            grad.column, t.r + matrix * m, c, own_tau, start, end, n, CDF, T.rows, T.width,
        )  # fmt: skip
        by_row = -tl.sum(v + f * b[None, :], axis=1)
        if grad_r_pointer is not None:
            by_row += tl.load(grad_r_pointer + matrix * m + row, mask=is_row, other=0.0)
        a = by_row * inverse
        dx = v + f * (a[:, None] + b[None, :])
        along -= tl.sum(z * dx, axis=1)
        at = dx_pointer + matrix * m * n + (row[:, None] * n + column[None, :])
        store(at, dx, is_row[:, None] & there[None, :])
        store(dk_pointer + matrix * m + row, -own_tau * a, is_row)
    tl.store(scratch.left + matrix * parts + part, tl.sum(along, axis=0))
    if last_of_row(scratch.counter + matrix * (parts + 1), parts):
        total = tl.zeros((ROWS,), tl.float64)
        for some in range(0, parts, T.rows):
            one = some + tl.arange(0, T.rows)
            at_part = scratch.left + matrix * parts + one
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
    taus = tau.expand(*batch, 1).reshape(-1)
    by_row = None if grad_r is None else grad_r.contiguous()
    by_column = None if grad_c is None else grad_c.contiguous()
    source = assign.scores(x), layout.matrix(grad, x)
    numbers = Rows(taus, taus.stride(0)), Duals(r.contiguous(), c.contiguous())
    dx, dk, dcapacity, b = x.new_empty(x.shape), layout.like(r), layout.like(c), layout.like(c)
    dtau = r.new_empty(*batch, 1)
    slopes = r.new_empty(x.numel())
    left = r.new_empty(programs * left_by_part(n))
    counter = torch.zeros(cut.matrices * (cut.parts + 1), dtype=torch.int32, device=x.device)
    constants = which(n, cdf, at_most)
    scratch, pulls = Scratch(None, counter, left, slopes), Duals(by_row, by_column)
    variant(pull_columns, **constants["columns"])(
        programs, *source, pulls, *numbers, (b, dcapacity), scratch, *size, ROUNDING, 64 + 4 * n
    )
    variant(pull_entries, **constants["entries"])(
        programs, *source, by_row, *numbers, b, dx, dk, dtau, scratch, *size
    )
    return dx, dk, dcapacity, dtau


def which(n: int, cdf: str, at_most: bool) -> dict[str, dict[str, Any]]:
    """The constants of both kernels, for so many columns."""
    step = assign.which(n, cdf, at_most)["step"]
    entries = {**{name: step[name] for name in ("CDF", "num_warps")}, "T": Sizes(*step["T"][:2])}
    return {"columns": step, "entries": entries}
