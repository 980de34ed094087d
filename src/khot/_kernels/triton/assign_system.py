"""The columns' system of a two-sided assignment: sums of parts, and its solution by conjugate gradients.

With f the densities, S = diag(Σ_i f) − Σ_i f fᵀ/Σ_j f is the derivative of the columns' loads in −c/τ, where
the rows keep their sums. Programs have the overlap Σ_i f fᵀ/Σ_j f of their rows; it is never subtracted from
the diagonal before it meets a vector.
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.fast import total
from khot._kernels.triton.split import last_of_row

TINY = tl.constexpr(1e-300)
SINGULAR = tl.constexpr(1e-15)  # relative to the scale, a bend that is rounding


@triton.jit
def overlap(slope_at, to_at, first, end, n, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Σ_i g gᵀ over some rows of g = f/√Σ_j f."""
    for top in range(0, n, BLOCK):
        for left in range(top, n, BLOCK):
            one, other = top + tl.arange(0, BLOCK), left + tl.arange(0, BLOCK)
            is_one, is_other = one < n, other < n
            sums = tl.zeros((BLOCK, BLOCK), tl.float64)
            for start in range(first, end, DEPTH):
                row = start + tl.arange(0, DEPTH)
                there = row < end
                a_at = slope_at + (row[None, :] * n + one[:, None])
                b_at = slope_at + (row[:, None] * n + other[None, :])
                a = tl.load(a_at, mask=there[None, :] & is_one[:, None], other=0.0)
                b = tl.load(b_at, mask=there[:, None] & is_other[None, :], other=0.0)
                sums = tl.dot(a, b, sums, out_dtype=tl.float64)
            inside = is_one[:, None] & is_other[None, :]
            tl.store(to_at + (one[:, None] * n + other[None, :]), sums, mask=inside)
            tl.store(to_at + (other[None, :] * n + one[:, None]), sums, mask=inside)
    tl.debug_barrier()


@triton.jit
def _add(part_at, first, step, count, stride, ADDED: tl.constexpr):
    """Into the first of some parts, its sum with the others, of which eight are read at a time."""
    for start in range(0, stride, ADDED):
        number = start + tl.arange(0, ADDED)
        sums = tl.zeros((ADDED,), tl.float64)
        for some in range(0, count, 8):
            part = some + tl.arange(0, 8)
            at = part_at + (first + part * step)[:, None] * stride + number[None, :]
            inside = (part < count)[:, None] & (number < stride)[None, :]
            sums += tl.sum(tl.load(at, mask=inside, other=0.0, cache_modifier=".cg"), axis=0)
        tl.debug_barrier()  # all threads have read what is stored again
        tl.store(part_at + first * stride + number, sums, mask=number < stride)
    tl.debug_barrier()


@triton.jit
def add_up(part_at, counter_at, part, parts, stride, GROUP: tl.constexpr, ADDED: tl.constexpr):
    """Whether this is the last program of all; then the first part has the sums over all parts.

    The last program of a group adds up the group, and the last of these adds up the groups."""
    group = part // GROUP
    members = tl.minimum(GROUP, parts - group * GROUP)
    groups = (parts + GROUP - 1) // GROUP
    last = 0
    if last_of_row(counter_at + 1 + group, members):
        _add(part_at, group * GROUP, 1, members, stride, ADDED)
        if last_of_row(counter_at, groups):
            _add(part_at, 0, GROUP, groups, stride, ADDED)
            last = 1
    return last > 0


@triton.jit
def product(p, slopes, overlap_at, direction_at, tie, n, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """(S + tie) p. The vector goes through memory, since each thread needs all of it."""
    column = tl.arange(0, WIDTH)
    tl.debug_barrier()
    tl.store(direction_at + column, p, mask=column < n)
    tl.debug_barrier()
    sums = tl.zeros((CHUNK, WIDTH), tl.float64)
    for start in range(0, n, CHUNK):
        one = start + tl.arange(0, CHUNK)
        inside = (one < n)[:, None] & (column < n)[None, :]
        by = tl.load(direction_at + one, mask=one < n, other=0.0)
        at = overlap_at + (one[:, None] * n + column[None, :])
        sums += tl.load(at, mask=inside, other=0.0) * by[:, None]
    return slopes * p - tl.sum(sums, axis=0) + tie * tl.sum(p, axis=0)


@triton.jit
def conjugate(
    wanted, slopes, scale, overlap_at, direction_at, moves, tie, tolerance, most, n,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(S + tie)⁻¹ wanted by conjugate gradients from 0, of columns that move; 0 of the others.

    The scale is that of the preconditioner. Of all solutions of a singular system it is the one that is
    orthogonal, weighted by the scale, to what the system does not see. The scale is 0 nowhere that columns
    move, and the direction that is left where the system bends no more is rounding."""
    inverse = tl.where(moves, 1 / tl.where(moves, scale, 1.0), 0.0)
    x, residual = wanted * 0, wanted
    p = residual * inverse
    square = tl.sum(residual * p, axis=0)
    goal = tolerance * tolerance * square
    count = 0
    while (square > goal) & (count < most):
        moved = tl.where(moves, product(p, slopes, overlap_at, direction_at, tie, n, WIDTH, CHUNK), 0.0)
        bend, size = total((p * moved, p * p * scale), 1)
        bends = bend > SINGULAR * size
        length = tl.where(bends, square / tl.maximum(bend, TINY), 0.0)
        x += length * p
        residual -= length * moved
        next_ = tl.sum(residual * residual * inverse, axis=0)
        p = residual * inverse + p * (next_ / square)
        count = tl.where(bends, count + 1, most)
        square = next_
    return x
