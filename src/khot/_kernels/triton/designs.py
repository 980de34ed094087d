"""The designs that take the units in their order: systematic sampling, and the tournament of the pivotal
method.

The kernels read probabilities of any sum, and put the phantom unit (`_kernels.reference.phantom`) behind the
last one themselves. A row that is not of probabilities is NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import draws as reference
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Nodes, Rows
from khot._kernels.triton.draws import SIZES, uniforms
from khot._kernels.triton.fast import double, total
from khot._kernels.triton.functions import place
from khot._kernels.triton.launch import launch
from khot._kernels.triton.sizes import cdiv, next_power_of_2

WIDTH = 1024  # units of a row that a program holds at a time
NODES = 2048  # units of a tournament that one program plays off


# ----------------------------------------------------------------------------------------- the phantom


@triton.jit
def _counts(p):
    """Of each probability: itself, 1 where it is none, where it is certain, and where it is neither 0 nor
    1."""
    wrong = tl.where((p >= 0) & (p <= 1), 0.0, 1.0)
    return p, wrong, tl.where(p == 1, 1.0, 0.0), tl.where((p > 0) & (p < 1), 1.0, 0.0)


@triton.jit
def _phantom(sum, wrong, tolerance):
    """The probability of the phantom unit, which makes the sum an integer; NaN for a row that is not of
    probabilities."""
    phantom = tl.where(tl.abs(sum - tl.floor(sum + 0.5)) <= tolerance, 0.0, tl.ceil(sum) - sum)
    return tl.where(wrong > 0, float("nan"), phantom)


@triton.jit
def _row_counts(x_at, n, WIDTH: tl.constexpr):
    """The totals of :func:`_counts` over a row."""
    zero = tl.zeros((WIDTH,), tl.float64)
    sums = (zero, zero, zero, zero)
    for start in range(0, n, WIDTH):
        column = start + tl.arange(0, WIDTH)
        more = _counts(double(tl.load(x_at + column, mask=column < n, other=0.0)))
        sums = (sums[0] + more[0], sums[1] + more[1], sums[2] + more[2], sums[3] + more[3])
    return total(sums, 1)


@triton.jit
def _phantoms(x, phantom_pointer, n, tolerance, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sum, wrong, _, _ = _row_counts(x.pointer + row * x.stride, n, WIDTH)
    tl.store(phantom_pointer + row, _phantom(sum, wrong, tolerance))


# ------------------------------------------------------------------------------------------- systematic


@triton.jit
def _ticks(line, places, shift, bits, k, uncertain):
    """How many ticks there are up to a place of the line. Each unit that is still to come has at most one,
    and all k have to find a unit."""
    return tl.maximum(tl.minimum((line + shift) >> bits, k), k - (uncertain - places))


@triton.jit
def _systematic(x, seed_pointer, out_pointer, n, bits, tolerance, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_at, out_at = x.pointer + row * x.stride, out_pointer + row * n
    sum, wrong, certain, between = _row_counts(x_at, n, WIDTH)
    phantom = _phantom(sum, wrong, tolerance)
    fair = phantom == phantom
    phantom = tl.where(fair, phantom, 0.0)
    k = tl.where(fair, tl.floor(sum + phantom + 0.5) - certain, 0.0).to(tl.int64)
    uncertain = (between + tl.where((phantom > 0) & (phantom < 1), 1.0, 0.0)).to(tl.int64)
    one = row * 0 + 1
    scale = one << bits
    u, _ = uniforms(tl.load(seed_pointer), row, row * 0)
    shift = scale - 1 - (u * scale.to(tl.float64)).to(tl.int64)
    line, places = row * 0, row * 0
    for start in range(0, n + 1, WIDTH):
        column = start + tl.arange(0, WIDTH)
        p = double(tl.load(x_at + column, mask=column < n, other=0.0))
        p = tl.where(column == n, phantom, p)
        here = tl.where((p > 0) & (p < 1), one, 0)
        length = tl.where(here > 0, tl.floor(p * scale.to(tl.float64) + 0.5), 0.0).to(tl.int64)
        up_to, place = line + tl.cumsum(length), places + tl.cumsum(here)
        after = _ticks(up_to, place, shift, bits, k, uncertain)
        before = _ticks(up_to - length, place - here, shift, bits, k, uncertain)
        y = tl.where((after > before) | (p == 1), 1.0, 0.0)
        y = tl.where(fair, y, float("nan"))
        tl.store(out_at + column, y.to(out_pointer.dtype.element_ty), mask=column < n)
        line += tl.sum(length)
        places += tl.sum(here)


def systematic_sample(probs: Tensor, seed: Tensor, tolerance: float) -> Tensor:
    """`draws.systematic_sample`, in Triton."""
    n, out = probs.shape[-1], probs.new_empty(probs.shape)
    if out.numel() == 0:
        return out
    width = min(WIDTH, next_power_of_2(n + 1))
    launch(
        _systematic, out.numel() // n,
        layout.rows(probs, n), seed, out, n, reference.line_bits(n + 1), tolerance,
        WIDTH=width, num_warps=max(1, width // 256),
    )  # fmt: skip
    return out


# --------------------------------------------------------------------------------------- the tournament


@triton.jit
def _one_uniform(seed, row, column):
    first, second = uniforms(seed, row, column // 2)
    return tl.where(column % 2 == 0, first, second)


@triton.jit(do_not_specialize=["rows", *SIZES])
def _duels(
    playing, phantom_pointer, seed_pointer, out_pointer, after, rows, n, nodes, column, parts, tolerance,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr, SUMMED: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """Play off the nodes of some rows, or of one part of a row: each of a pair but the one that goes on is
    decided.

    A node is a unit that is still in play, with its probability. The phantom unit's is in memory, or with
    `SUMMED` follows from the row, which is whole here. Where the tournament ends, `LAST`, the last unit is
    decided as well.
    """
    first_row, part = place(parts)
    row = (first_row * TOGETHER + tl.arange(0, TOGETHER))[:, None]
    node = (part * WIDTH + tl.arange(0, WIDTH))[None, :]
    there = (row < rows) & (node < nodes)
    units_there = there & (node < n) if SUMMED or phantom_pointer is not None else there
    x = double(tl.load(playing.x.pointer + row * playing.x.stride + node, mask=units_there, other=0.0))
    if SUMMED:
        counts = total(_counts(x), 2)
        phantom = _phantom(counts[0], counts[1], tolerance)[:, None]
        x = tl.where(node == n, phantom, tl.where(phantom == phantom, x, float("nan")))
    elif phantom_pointer is not None:
        phantom = tl.load(phantom_pointer + row, mask=row < rows, other=0.0)
        x = tl.where(node == n, phantom, tl.where(phantom == phantom, x, float("nan")))
    unit = node + tl.zeros((TOGETHER, WIDTH), tl.int32)
    if playing.units is not None:
        unit = tl.load(playing.units + row * nodes + node, mask=there, other=n)
    unit = tl.where(there, unit, n)
    seed = tl.load(seed_pointer)
    to = out_pointer + row * n
    for level in tl.static_range(1, LEVELS + 1):
        a, b = tl.split(tl.reshape(x, [TOGETHER, WIDTH >> level, 2]))
        unit_a, unit_b = tl.split(tl.reshape(unit, [TOGETHER, WIDTH >> level, 2]))
        duel = column + part * (WIDTH >> level) + tl.arange(0, WIDTH >> level)
        u = _one_uniform(seed, row, duel[None, :])
        sum = a + b
        one = tl.where(sum > 1, 1.0, 0.0)  # in float32, through which half precision is reached
        first = u * tl.abs(sum - 2 * one) < tl.abs(a - one)
        decided = tl.where(first, unit_b, unit_a)
        y = tl.where(sum == sum, one, float("nan")).to(out_pointer.dtype.element_ty)
        tl.store(to + decided, y, mask=decided < n)
        x, unit = sum - one, tl.where(first, unit_a, unit_b)
        nodes = (nodes + 1) // 2
        column += nodes
    if LAST:
        y = tl.where(x == x, tl.where(x > 0.5, 1.0, 0.0), float("nan"))
        tl.store(to + unit, y.to(out_pointer.dtype.element_ty), mask=unit < n)
    else:
        at = row * parts + part
        tl.store(after.x.pointer + at, x, mask=row < rows)
        tl.store(after.units + at, unit, mask=row < rows)


def tournament(probs: Tensor, seed: Tensor) -> Tensor:
    """`draws.tournament`, in Triton."""
    out = torch.empty(probs.shape, dtype=torch.bool, device=probs.device)
    if out.numel():
        _play(probs, seed, out, probs.shape[-1], None, False, 0.0)
    return out


def pivotal_sample(probs: Tensor, seed: Tensor, tolerance: float) -> Tensor:
    """`draws.pivotal_sample`, in Triton."""
    n, out = probs.shape[-1], probs.new_empty(probs.shape)
    if out.numel() == 0:
        return out
    phantom = None
    if n + 1 > NODES:
        rows, source = out.numel() // n, layout.rows(probs, n)
        phantom = torch.empty(rows, dtype=torch.float64, device=probs.device)
        launch(_phantoms, rows, source, phantom, n, tolerance, WIDTH=WIDTH, num_warps=WIDTH // 256)
    _play(probs, seed, out, n + 1, phantom, phantom is None, tolerance)
    return out


def _play(
    probs: Tensor, seed: Tensor, out: Tensor, nodes: int,
    phantom: Tensor | None, summed: bool, tolerance: float,
) -> None:  # fmt: skip
    """Fill out by a tournament of so many nodes a row."""
    n = probs.shape[-1]
    rows, playing, column = out.numel() // n, Nodes(layout.rows(probs, n), None), 0
    while True:
        which, parts = way(nodes)
        levels = which["LEVELS"]
        left = torch.empty(rows * parts if parts > 1 else 0, dtype=torch.float64, device=probs.device)
        after = Nodes(Rows(left, parts), torch.empty_like(left, dtype=torch.int32))
        launch(
            _duels, cdiv(rows, which["TOGETHER"]) * parts,
            playing, phantom, seed, out, after, rows, n, nodes, column, parts, tolerance,
            SUMMED=summed, LAST=parts == 1, **which,
        )  # fmt: skip
        if parts == 1:
            return
        for _ in range(levels):
            nodes = (nodes + 1) // 2
            column += nodes
        playing, phantom, summed = after, None, False


def way(nodes: int) -> tuple[dict[str, int], int]:
    """How so many nodes are played off: the kernel's constants, and into how many parts a row is cut."""
    width = min(next_power_of_2(nodes), NODES)
    together = max(1, layout.TOGETHER // width)
    return {
        "TOGETHER": together,
        "WIDTH": width,
        "LEVELS": width.bit_length() - 1,
        "num_warps": max(1, together * width // 256),
    }, cdiv(nodes, width)


KERNELS = (_systematic, _phantoms, _duels)
