"""The soft count at the levels of a row, and its gradients: tiles of levels and entries, which stay on chip.

Sums over entries and sums over levels each have a kernel, in which a program holds the terms of its own sums
and walks along the others. They compute the density twice, except where one program has a whole row and all
of its levels. Every sum is added in the same order each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference.soft_count import levels, like_counts
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Cells, Values
from khot._kernels.triton.fast import double, joined, store
from khot._kernels.triton.float64 import number64
from khot._kernels.triton.functions import POWER, full_support, median, place, side
from khot._kernels.triton.launch import launch
from khot._kernels.triton.sizes import cdiv, next_power_of_2

TILE = 2048  # entries times levels that a program holds at a time, in float32
LEVELS, ENTRIES = 32, 1024  # at most, in a tile: more take too many registers
MANY = 16  # tiles are added up in the entries' dtype before their sums go to float64
STEEPEST = tl.constexpr(1e38)  # of 1/τ in float32, where nothing but the sign of x − b matters
FAR = tl.constexpr(1e30)  # in τ: f is 0 there, and 0·inf would be NaN
SIZES = ["m", "groups", "length", "parts"]  # for which Triton need not compile anew


@triton.jit
def _scale(tau, row, COMPUTE: tl.constexpr):
    """1/τ, NaN if there is none."""
    tau = number64(*tau, row)
    scale = tl.where((tau > 0) & (tau < float("inf")), 1 / tau, float("nan"))
    if tl.float32 == COMPUTE:
        scale = tl.where(scale > STEEPEST, STEEPEST, scale)
    return scale.to(COMPUTE)


@triton.jit
def _load_entries(pointer, there, other, COMPUTE: tl.constexpr):
    x = tl.load(pointer, mask=there, other=other)
    return x.to(tl.float32).to(COMPUTE) if x.dtype != tl.float64 else x.to(COMPUTE)


@triton.jit
def _level_values(levels, row, at, there):
    """The levels; without a pointer there is one, which came by value, the same for all rows."""
    pointer, stride, high, low = levels
    if pointer is None:
        return tl.zeros_like(at).to(tl.float64) + joined(high, low)
    else:
        return tl.load(pointer + row * stride + at, mask=there, other=0.0)


@triton.jit
def _load_grads(pointer, stride, level, row, at, there):
    """The gradients of the counts in float64, 0 at infinite levels."""
    v = double(tl.load(pointer + row * stride + at, mask=there, other=0.0))
    return tl.where(tl.abs(level) == float("inf"), 0.0, v)


@triton.jit
def _load_levels(levels, row, at, there, COMPUTE: tl.constexpr):
    """The levels as high + low, with 0 for infinite ones, and the levels themselves."""
    level = _level_values(levels, row, at, there)
    finite = tl.where(tl.abs(level) == float("inf"), 0.0, level)
    high = finite.to(COMPUTE)
    return high, (finite.to(tl.float64) - high.to(tl.float64)).to(COMPUTE), level


@triton.jit
def _distance(x, high, low, scale, ONE_PART: tl.constexpr):
    """(x − b)/τ; ONE_PART where b = high."""
    return (x - high) * scale if ONE_PART else ((x - high) - low) * scale


@triton.jit
def _median(power):
    """Of Power, with all digits; the solver needs fewer."""
    return tl.exp(-0.6931471805599453 / power)


@triton.jit
def distribution(z, power, CDF: tl.constexpr, CENTRED: tl.constexpr):
    if CENTRED:
        z += _median(power).to(z.dtype) if CDF == POWER else median(power, CDF)
    tail, _ = side(z, z, False, 0.0, -tl.abs(z), power, CDF)
    F = tl.where(z > 0, 1 - tail, tail) if full_support(CDF) else tl.where(z >= 1, 1.0, tail)
    return tl.where(z == z, F, z)


@triton.jit
def _pdf(z, power, CDF: tl.constexpr, CENTRED: tl.constexpr):
    if CENTRED:
        z += _median(power).to(z.dtype) if CDF == POWER else median(power, CDF)
    _, density = side(z, z, False, 0.0, -tl.abs(z), power, CDF)
    return tl.where(z == z, density, z)


@triton.jit
def _part_of_levels(
    levels, tau, n, m, groups, length, parts, COMPUTE: tl.constexpr, HEIGHT: tl.constexpr
):  # fmt: skip
    """The row of a program; which of its levels, and these as :func:`_load_levels` has them; 1/τ; the part of
    the row, and where it begins and ends."""
    cell, part = place(parts)
    row, group = cell // groups, (cell % groups).to(tl.int32)
    at = group * HEIGHT + tl.arange(0, HEIGHT)
    high, low, level = _load_levels(levels, row, at, at < m, COMPUTE)
    scale = _scale(tau, row, COMPUTE)
    return row, at, high, low, level, scale, part, part * length, tl.minimum(n, (part + 1) * length)


@triton.jit(do_not_specialize=SIZES)
def _count(
    x, at, tau, sums_pointer, n, m, groups, length, parts, exponent, CDF: tl.constexpr, CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Σ F over one part of a row, at some of its levels."""
    HEIGHT: tl.constexpr = T.height
    WIDTH: tl.constexpr = T.width
    power = joined(*exponent)
    row, number, high, low, level, scale, part, first, stop = _part_of_levels(
        at, tau, n, m, groups, length, parts, COMPUTE, T.height
    )
    x_at = x.pointer + row * x.stride
    count = tl.zeros((HEIGHT,), tl.float64)
    for begin in range(first, stop, T.many * T.width):
        total = tl.zeros((HEIGHT, WIDTH), COMPUTE)
        for start in range(begin, tl.minimum(stop, begin + T.many * T.width), T.width):
            column = start + tl.arange(0, T.width)
            # F is 0 beyond the row
            held = _load_entries(x_at + column, column < n, float("-inf"), COMPUTE)
            z = _distance(held[None, :], high[:, None], low[:, None], scale, T.one_part)
            total += distribution(z, power, CDF, CENTRED)
        count += tl.sum(total, axis=1).to(tl.float64)
    infinite = tl.abs(level) == float("inf")
    if tl.sum(tl.where(infinite, 1, 0)) > 0:
        # there the infinite entries count: those above a level of +inf, all but those below one of −inf
        own = 0.5 if CENTRED else 0.0
        above = tl.zeros((WIDTH,), tl.float64)
        below = tl.zeros((WIDTH,), tl.float64)
        for start in range(first, stop, T.width):
            column = start + tl.arange(0, T.width)
            held = _load_entries(x_at + column, column < n, 0.0, COMPUTE)
            above += tl.where(held == float("inf"), 1 - own, 0.0)
            below += tl.where(column < n, tl.where(held == float("-inf"), own, 1.0), 0.0)
        ends = tl.where(level > 0, tl.sum(above, axis=0), tl.sum(below, axis=0))
        count = tl.where(infinite & (count == count), ends, count)
    store(sums_pointer + (row * m + number) * parts + part, count, number < m)


@triton.jit(do_not_specialize=SIZES)
def _count_densities(
    x, at, tau, sums_pointer, n, m, groups, length, parts, exponent, CDF: tl.constexpr, CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Σ f and Σ f·(x − b)/τ over one part of a row, at some of its levels."""
    HEIGHT: tl.constexpr = T.height
    WIDTH: tl.constexpr = T.width
    power = joined(*exponent)
    row, number, high, low, _, scale, part, first, stop = _part_of_levels(
        at, tau, n, m, groups, length, parts, COMPUTE, T.height
    )
    x_at = x.pointer + row * x.stride
    mass = tl.zeros((HEIGHT,), tl.float64)
    moment = tl.zeros((HEIGHT,), tl.float64)
    for begin in range(first, stop, T.many * T.width):
        total = tl.zeros((HEIGHT, WIDTH), COMPUTE)
        total_z = tl.zeros((HEIGHT, WIDTH), COMPUTE)
        for start in range(begin, tl.minimum(stop, begin + T.many * T.width), T.width):
            column = start + tl.arange(0, T.width)
            held = _load_entries(x_at + column, column < n, float("-inf"), COMPUTE)
            z = _distance(held[None, :], high[:, None], low[:, None], scale, T.one_part)
            f = _pdf(z, power, CDF, CENTRED)
            total += f
            total_z += f * tl.minimum(tl.maximum(z, -FAR), FAR)
        mass += tl.sum(total, axis=1).to(tl.float64)
        moment += tl.sum(total_z, axis=1).to(tl.float64)
    sums = sums_pointer + ((row * m + number) * parts + part) * 2
    tl.store(sums, mass, mask=number < m)
    tl.store(sums + 1, moment, mask=number < m)


@triton.jit(do_not_specialize=SIZES)
def _pull_levels(
    grad, at, tau, sums_pointer, dat_pointer, dtau_pointer, m, parts, WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The gradients of a row's levels, −vΣf/τ, and of τ, −Σv Σ f·(x − b)/τ²; 0 at infinite levels."""
    row = tl.program_id(0).to(tl.int64)
    scale = _scale(tau, row, tl.float64)
    part = tl.arange(0, PARTS)
    dtau = tl.zeros((WIDTH,), tl.float64)
    for start in range(0, m, WIDTH):
        number = start + tl.arange(0, WIDTH)
        there = number < m
        level = _level_values(at, row, number, there)
        v = _load_grads(grad.pointer, grad.stride, level, row, number, there)
        sums = sums_pointer + ((row * m + number[:, None]) * parts + part[None, :]) * 2
        inside = there[:, None] & (part < parts)[None, :]
        mass = tl.sum(tl.load(sums, mask=inside, other=0.0), axis=1)
        moment = tl.sum(tl.load(sums + 1, mask=inside, other=0.0), axis=1)
        store(dat_pointer + row * m + number, -v * mass * scale, there)
        dtau -= v * moment * scale
    tl.store(dtau_pointer + row, tl.sum(dtau, axis=0))


@triton.jit(do_not_specialize=SIZES)
def _pull_entries(
    grad, x, at, tau, dx_pointer, n, m, parts, exponent, CDF: tl.constexpr, CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradients of some of a row's entries, Σ v f/τ over the levels."""
    HEIGHT: tl.constexpr = T.height
    WIDTH: tl.constexpr = T.width
    power = joined(*exponent)
    row, part = place(parts)
    column = part * T.width + tl.arange(0, T.width)
    scale = _scale(tau, row, COMPUTE)
    held = _load_entries(x.pointer + row * x.stride + column, column < n, 0.0, COMPUTE)
    total = tl.zeros((HEIGHT, WIDTH), COMPUTE)
    for start in range(0, m, T.height):
        number = start + tl.arange(0, T.height)
        high, low, level = _load_levels(at, row, number, number < m, COMPUTE)
        v = _load_grads(grad.pointer, grad.stride, level, row, number, number < m).to(COMPUTE)
        z = _distance(held[None, :], high[:, None], low[:, None], scale, T.one_part)
        total += v[:, None] * _pdf(z, power, CDF, CENTRED)
    store(dx_pointer + row * n + column, tl.sum(total, axis=0) * scale, column < n)


@triton.jit(do_not_specialize=SIZES)
def _pull_row(
    grad, x, at, tau, dx_pointer, dat_pointer, dtau_pointer, n, m, exponent, CDF: tl.constexpr,
    CENTRED: tl.constexpr, COMPUTE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """All gradients of a row whose levels are in one tile: those of :func:`_pull_levels` and of
    :func:`_pull_entries`, from the same densities."""
    HEIGHT: tl.constexpr = T.height
    WIDTH: tl.constexpr = T.width
    power = joined(*exponent)
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, T.height)
    high, low, level = _load_levels(at, row, number, number < m, COMPUTE)
    v = _load_grads(grad.pointer, grad.stride, level, row, number, number < m)
    own_tau = tau
    scale, fine = _scale(own_tau, row, COMPUTE), _scale(own_tau, row, tl.float64)
    mass = tl.zeros((HEIGHT,), tl.float64)
    moment = tl.zeros((HEIGHT,), tl.float64)
    for begin in range(0, n, T.many * T.width):
        total = tl.zeros((HEIGHT, WIDTH), COMPUTE)
        total_z = tl.zeros((HEIGHT, WIDTH), COMPUTE)
        for start in range(begin, tl.minimum(n, begin + T.many * T.width), T.width):
            column = start + tl.arange(0, T.width)
            held = _load_entries(x.pointer + row * x.stride + column, column < n, float("-inf"), COMPUTE)
            z = _distance(held[None, :], high[:, None], low[:, None], scale, T.one_part)
            f = _pdf(z, power, CDF, CENTRED)
            total += f
            total_z += f * tl.minimum(tl.maximum(z, -FAR), FAR)
            dx = tl.sum(v.to(COMPUTE)[:, None] * f, axis=0) * scale
            store(dx_pointer + row * n + column, dx, column < n)
        mass += tl.sum(total, axis=1).to(tl.float64)
        moment += tl.sum(total_z, axis=1).to(tl.float64)
    store(dat_pointer + row * m + number, -v * mass * fine, number < m)
    tl.store(dtau_pointer + row, -tl.sum(v * moment * fine, axis=0))


KERNELS = (_count, _count_densities, _pull_levels, _pull_entries, _pull_row)


class _Tile:
    """How a call is cut into tiles."""

    def __init__(self, x: Tensor, at: Tensor, tau: Tensor, cdf: str, shape: float, centred: bool) -> None:
        batch, n, self.m = x.shape[:-1], x.shape[-1], levels(at)
        F, compute = cdfs.resolve(cdf, shape), layout.compute(x.dtype, tau)
        size = TILE if compute == tl.float32 else TILE // 2
        self.rows, self.height = batch.numel(), min(LEVELS, next_power_of_2(self.m))
        self.width = min(size // self.height, ENTRIES, next_power_of_2(n))
        self.groups = cdiv(self.m, self.height)
        # a row with few levels is split among programs
        wanted = max(1, layout.PROGRAMS // (self.rows * self.groups))
        self.parts = min(cdiv(n, MANY * self.width), wanted)
        self.length = cdiv(cdiv(n, self.parts), self.width) * self.width
        self.parts = cdiv(n, self.length)
        # of two numbers of float32, float64 would miss the last digits
        given = layout.values if compute == tl.float32 else _in_memory
        self.x, self.tau, self.power = layout.rows(x, n), given(tau, batch, x.device), layout.power(F)
        if at.dim():
            self.at = Values(*layout.rows(at, self.m), 0.0, 0.0)
        else:
            self.at = given(at, batch, x.device)
        one_part = at.dtype != torch.float64 or compute == tl.float64
        self.which = {
            "CDF": layout.cdf_id(cdf),
            "CENTRED": centred,
            "COMPUTE": compute,
            "T": Cells(one_part, self.height, self.width, MANY),
            "num_warps": min(4, max(1, self.height * self.width // 256)),
        }


def _in_memory(value: Tensor, batch: torch.Size, device: torch.device) -> Values:
    return Values(*layout.numbers(value, batch, device), 0.0, 0.0)


def soft_count(x: Tensor, at: Tensor, tau: Tensor, cdf: str, shape: float, centred: bool) -> Tensor:
    """`soft_count.soft_count`, in Triton."""
    n, m = x.shape[-1], levels(at)
    result, dtype = like_counts(x, at)
    if x.numel() == 0 or m == 0:
        return torch.zeros(result, dtype=dtype, device=x.device)
    tile = _Tile(x, at, tau, cdf, shape, centred)
    whole = tile.parts == 1
    sums = torch.empty(
        result if whole else (*result, tile.parts), dtype=dtype if whole else torch.float64, device=x.device
    )
    launch(
        _count, tile.rows * tile.groups * tile.parts,
        tile.x, tile.at, tile.tau, sums, n, m, tile.groups, tile.length, tile.parts, tile.power, **tile.which,
    )  # fmt: skip
    return sums if whole else sums.sum(-1).to(dtype)


def soft_count_backward(
    grad: Tensor, x: Tensor, at: Tensor, tau: Tensor, cdf: str, shape: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_count.soft_count_backward`, in Triton."""
    n, m, batch = x.shape[-1], levels(at), x.shape[:-1]
    dx, dat = x.new_empty(x.shape), x.new_empty(like_counts(x, at)[0], dtype=at.dtype)
    dtau = torch.empty(batch, dtype=torch.float64, device=x.device)
    if x.numel() == 0 or m == 0:
        return dx.zero_(), dat.zero_(), dtau.zero_()
    tile = _Tile(x, at, tau, cdf, shape, centred)
    incoming = layout.rows(grad.expand(dat.shape), m)
    if tile.parts == tile.groups == 1:
        launch(
            _pull_row, tile.rows,
            incoming, tile.x, tile.at, tile.tau, dx, dat, dtau, n, m, tile.power, **tile.which,
        )  # fmt: skip
        return dx, dat, dtau
    sums = torch.empty(tile.rows * m * tile.parts * 2, dtype=torch.float64, device=x.device)
    width = min(next_power_of_2(m), 1024 // next_power_of_2(tile.parts))
    entries = cdiv(n, tile.width)
    launch(
        _count_densities, tile.rows * tile.groups * tile.parts,
        tile.x, tile.at, tile.tau, sums, n, m, tile.groups, tile.length, tile.parts, tile.power, **tile.which,
    )  # fmt: skip
    launch(
        _pull_levels, tile.rows,
        incoming, tile.at, tile.tau, sums, dat, dtau, m, tile.parts,
        WIDTH=width, PARTS=next_power_of_2(tile.parts),
    )  # fmt: skip
    launch(
        _pull_entries, tile.rows * entries,
        incoming, tile.x, tile.at, tile.tau, dx, n, m, entries, tile.power, **tile.which,
    )  # fmt: skip
    return dx, dat, dtau
