"""Soft top-ks of packed rows, which have different lengths and lie one behind the other: row i is
values[offsets[i]:offsets[i + 1]].

Nobody but the programs reads the offsets, so that nothing waits for the device. There are two launches each
way. In the first a program holds several short rows, of like lengths: neighbouring rows share a window, whose
lengths each of its programs sorts, which takes few instructions, to serve its part of them. It looks at as
many pieces as the longest of its rows has. In the second a program looks for longer rows among a few
neighbours, and these stream past it. What is done to rows is that of :mod:`.rows` and :mod:`.pull`, with
pointers that are where the rows begin. Two things are not: a row of which none or all are selected, as many
short ones are, needs no search in float64, and has no gradient.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.triton import counted, layout, pull
from khot._kernels.triton.arguments import Found, Matrix, Pairs, Pulled, Rows, Tile, Values
from khot._kernels.triton.fast import any_row, joined, wide
from khot._kernels.triton.functions import HUGE
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.pull import places, results
from khot._kernels.triton.rows import EVALUATIONS, entries, present
from khot._kernels.triton.sizes import cdiv, next_power_of_2

WINDOW = tl.constexpr(32)  # rows that are sorted by length: one of a thread
ALIGNED = tl.constexpr(4)  # entries: of float32 16 bytes
MOST = 16  # pieces of short rows, as are 64 entries of a thread; or half of it, if rows of twice the mean fit
SEEN = tl.constexpr(64)  # rows that a program looks for longer ones among, at most
# How many programs look for longer rows, about: if only rows of twice the mean length are such; if more are.
FEW, MANY = 128, 4096

# --------------------------------------------------------------------------------- which rows


@triton.jit
def _extents(offsets, row, there, total):
    """Where rows begin, and their lengths; within the values, whatever the offsets say."""
    start = tl.load(offsets + row, mask=there, other=0).to(tl.int64)
    end = tl.load(offsets + row + 1, mask=there, other=0).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), total)
    n = tl.minimum(tl.maximum(end, start), total) - start
    return tl.minimum(start, total - 1), n.to(tl.int32)


@triton.jit
def _alike(offsets, rows, total, T: tl.constexpr):
    """Several short rows of like lengths: which they are, whether they are there, where they begin, and their
    lengths."""
    SHARED: tl.constexpr = WINDOW // T.together  # programs of a window
    program = tl.program_id(0).to(tl.int64)
    first = program // SHARED * WINDOW
    number = tl.arange(0, WINDOW)
    start, n = _extents(offsets, first + number, first + number < rows, total)
    there = (first + number < rows) & (n <= T.pieces * T.width - ALIGNED)
    if SHARED == 1:  # all of them are the program's
        return first + number, there, start, tl.where(there, n, 0)
    else:
        n = tl.where(there, n, -1)
        order = n * WINDOW + number
        if tl.min(n) < tl.max(n):  # rows of one length are alike as they come
            order = tl.sort(order, descending=True)
        mine = (program % SHARED).to(tl.int32) * T.together + tl.arange(0, T.together)
        own = tl.gather(order, mine, 0)
        number = own & (WINDOW - 1)
        return first + number, own >= 0, tl.gather(start, number, 0), tl.maximum(own, 0) // WINDOW


@triton.jit
def _columns(start, n, T: tl.constexpr):
    """Where rows are held from, and n as functions of problems take it. Ragged rows are held from a multiple
    of 16 bytes on, for which a thread has neighbours, as it has of other rows; the row begins some columns
    behind it."""
    if T.ragged:
        begin = start // ALIGNED * ALIGNED
        first = wide((start - begin).to(tl.int32), T.together)
        return wide(begin, T.together), (first, first + wide(n, T.together))
    else:
        return start, n


@triton.jit
def _one(bad, row, start, n, r, T: tl.constexpr):
    """Whether the r-th of the program's rows is bad; which it is, where it begins, and its length."""
    if T.together == 1:
        return bad, row, start, n
    else:
        mine = tl.arange(0, T.together) == r
        row, start, n = tl.where(mine, row, 0), tl.where(mine, start, 0), tl.where(mine, n, 0)
        return any_row(bad & mine, T.together), tl.sum(row), tl.sum(start), tl.sum(n)


@triton.jit
def _serve(offsets, rows, total, each, least, serve: tl.constexpr, given, T: tl.constexpr):
    """serve(row, there, start, n, *given) for rows of up to as many entries as a :class:`.arguments.Tile`
    holds, together; or, of `each` rows one after another, for those that are longer than the least, which
    stream past."""
    if T.ragged:
        row, there, start, n = _alike(offsets, rows, total, T)
        serve(row, there, start, n, *given)
    else:
        first = tl.program_id(0).to(tl.int64) * each
        number = tl.arange(0, SEEN)
        there = (number < each) & (first + number < rows)
        start, n = _extents(offsets, first + number, there, total)
        left = there & (n > least)
        for _ in range(tl.sum(left.to(tl.int32))):
            r = tl.min(tl.where(left, number, SEEN))
            found = number == r
            serve(
                first + r, r < SEEN, tl.sum(tl.where(found, start, 0)), tl.sum(tl.where(found, n, 0)), *given
            )
            left = left & ~found


# --------------------------------------------------------------------------------- forward


@triton.jit
def _solve(
    row, there, start, n, x, k, tau, found, evaluations, exponent,
    P: tl.constexpr, L: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    ok = there & ~there
    if x.dtype.element_ty != tl.float64:
        begin, columns = _columns(start, n, T)
        hi, lo, ok, more = P.find(
            Rows(x + begin, 0), None, k, tau, row, there, columns, evaluations, None, exponent, L, T
        )
        tl.store(found.hi + row, hi, mask=ok)
        tl.store(found.lo + row, lo, mask=ok)
        P.write(found.out + (begin if T.ragged else start - row * n), row, ok, columns, more, L, T)
    bad = there & ~ok
    if any_row(bad, T.together):
        for r in range(T.together):
            asked, own, first, length = _one(bad, row, start, n, r, T)
            if asked:
                to = Found(found.out + (first - own * length), found.hi, found.lo)
                power = joined(*exponent)
                P.in_float64(own, Rows(x + first, 0), None, k, tau, to, length, None, power, L, T)


@triton.jit(do_not_specialize=["rows", "total", "each", "least", "evaluations"])
def solve_ragged(
    x, offsets, k, tau, found, rows, total, each, least, evaluations, exponent,
    P: tl.constexpr, L: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Finds and writes what a :class:`.arguments.Problem` asks for of the rows that :func:`_serve` names."""
    _serve(
        offsets, rows, total, each, least, _solve, (x, k, tau, found, evaluations, exponent, P, L, T), T
    )  # fmt: skip


# --------------------------------------------------------------------------------- backward


@triton.jit
def _pull(
    row, there, start, n, grad, x, solved, to, power, P: tl.constexpr, L: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    PIECES: tl.constexpr = T.pieces
    unasked = Values(None, 0, 0.0, 0.0)
    ok = there & ~there
    if x.dtype.element_ty != tl.float64:
        begin, columns = _columns(start, n, T)
        column = tl.arange(0, T.width)
        pairs = Pairs(Rows(x + begin, 0), None)
        at, grad_at = places(pairs, Matrix(grad + begin, 0, 1), row, column, T.together)
        goes = results(to, entries(row, 0, column, T.together) + begin)
        threshold, ordinary, given = P.prepare(solved, power, row, there, L, T)
        settled = ok
        if T.ragged:
            settled = there & (tl.abs(tl.load(solved.t.hi + row, mask=there, other=0.0)) == HUGE)
            ordinary = ordinary & ~settled
        sums, kept = P.sums(at, grad_at, ordinary, columns, given, L, T)
        of_k, dtau, ok = P.settle(sums, solved, unasked, row, ordinary, threshold, L, False)
        P.write(at, grad_at, goes, ok, columns, given, of_k, threshold, kept, L, T)
        if T.ragged:
            of_k, dtau, ok = tl.where(settled, 0.0, of_k), tl.where(settled, 0.0, dtau), ok | settled
            if any_row(settled, T.together):
                for i in tl.static_range(PIECES):
                    valid = present(settled, i * T.width, columns, T)
                    tl.store(
                        goes[0] + i * T.width, tl.zeros_like(valid).to(to.dx.dtype.element_ty), mask=valid
                    )
        tl.store(to.dgoal + row, of_k.to(tl.float64), mask=ok)
        tl.store(to.dtau + row, dtau.to(tl.float64), mask=ok)
    bad = there & ~ok
    if any_row(bad, T.together):
        for r in range(T.together):
            asked, own, first, length = _one(bad, row, start, n, r, T)
            if asked:
                from_ = Matrix(grad + first, 0, 1)
                goes_to = Pulled(to.dx + (first - own * length), to.dgoal, to.dtau, None)
                alone = Pairs(Rows(x + first, 0), None)
                P.in_float64(own, from_, unasked, alone, solved, goes_to, length, power, L, T)


@triton.jit(do_not_specialize=["rows", "total", "each", "least"])
def pull_ragged(
    grad, x, offsets, solved, to, rows, total, each, least, power,
    P: tl.constexpr, L: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradients of the rows that :func:`solve_ragged` has."""
    _serve(offsets, rows, total, each, least, _pull, (grad, x, solved, to, power, P, L, T), T)


KERNELS = (solve_ragged, pull_ragged)


# --------------------------------------------------------------------------------- the host


class Part(NamedTuple):
    """What a launch serves: how its programs hold rows, with how many warps; how many programs there are, and
    how many rows each looks at for those that are longer than the least."""

    tile: Tile
    warps: int
    programs: int
    each: int = 1
    least: int = 0


@functools.lru_cache(maxsize=1024)
def parts(rows: int, total: int, dtype: torch.dtype, steep: bool = False) -> tuple[Part, ...]:
    """The launches for so many packed rows with so many entries; ``steep`` as :func:`.layout.steep` has it,
    where float64 needs registers, too."""
    found: list[Part] = []
    mean, least = cdiv(total, rows), -1
    if dtype != torch.float64:  # of which all rows count as long
        together = max(2, layout.tile(rows, mean).together)
        width = 128 // together
        fits = MOST // 2 * width >= 2 * mean + ALIGNED.value
        pieces = MOST // 2 if fits or steep else MOST
        least = pieces * width - ALIGNED.value
        tile = layout.constant(layout.Tile(together, pieces, width, 1), 0)._replace(ragged=True)
        found.append(Part(tile, 1, cdiv(rows, WINDOW.value) * (WINDOW.value // together)))
    if total > least:
        warps = min(16, max(4, next_power_of_2(mean) // 1024))
        each = min(SEEN.value, cdiv(rows, FEW if 2 * mean < least else MANY))
        tile = layout.constant(layout.Tile(1, 4, 128 * warps, warps, True), 0)
        found.append(Part(tile, warps, cdiv(rows, each), each, least))
    return tuple(found)


def packed_soft_topk(
    x: Tensor, offsets: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y of packed rows that have entries, or its logarithm; and of each row t = hi + lo."""
    x, offsets, rows, total = x.contiguous(), offsets.contiguous(), len(offsets) - 1, len(x)
    out, hi = layout.like(x), torch.empty(rows, dtype=torch.float64, device=x.device)
    lo, asked = torch.empty_like(hi), layout.asked(cdf, shape, output=output)
    given = layout.values(k, hi.shape, x.device), layout.values(tau, hi.shape, x.device)
    for part in parts(rows, total, x.dtype, layout.steep(asked.F, output)):
        _variant(solve_ragged, asked, part.tile, part.warps)(
            part.programs, x, offsets, *given, Found(out, hi, lo), rows, total, part.each, part.least,
            EVALUATIONS, layout.power(asked.F),
        )  # fmt: skip
    return out, hi, lo


def packed_soft_topk_backward(
    grad: Tensor, x: Tensor, offsets: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str, shape: float,
    output: str, y: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, k and tau; y is for other kernels."""
    x, offsets, rows, total = x.contiguous(), offsets.contiguous(), len(offsets) - 1, len(x)
    dx, dk, dtau = layout.like(x), torch.empty_like(hi), torch.empty_like(hi)
    grad, asked = grad.contiguous(), layout.asked(cdf, shape, output=output)
    solved, to = layout.solved(hi, lo, tau), Pulled(dx, dk, dtau, None)
    for part in parts(rows, total, x.dtype):
        _variant(pull_ragged, asked, part.tile, part.warps)(
            part.programs, grad, x, offsets, solved, to, rows, total, part.each, part.least,
            layout.power(asked.F),
        )  # fmt: skip
    return dx, dk, dtau


@functools.lru_cache(maxsize=256)
def _variant(kernel: Any, asked: layout.Asked, tile: Tile, warps: int) -> Variant:
    law = layout.law(*asked)
    if kernel is solve_ragged:
        law = law._replace(polished=layout.steep(asked.F, asked.output))
    problem = counted.COUNT if kernel is solve_ragged else pull.PULL_PAID
    return variant(kernel, P=problem, L=law, T=tile, num_warps=warps, **layout.registers())
