"""Rows that stay on chip or stream past one program: the row program, :func:`solve`.

A program places its rows, finds their thresholds in float32, and writes them and the results. The rows for
which float32 does not suffice (no answer, infinite scores, a temperature out of range, no convergence) are
solved again, in the same program, in float64, a chunk at a time: a second launch would cost more than a short
row takes. What is found and written is a :class:`.arguments.Problem`, which lies beside its formulas: a count
(:mod:`.counted`), a budget (:mod:`.paid`), a top-k in magnitude (:mod:`.magnitude`) or a loss
(:mod:`.losses`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Problem
from khot._kernels.triton.fast import always, any_row, before, in_two, joined, reached, wide
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.sizes import cdiv
from khot._kernels.triton.words import load_words

EVALUATIONS = 24  # at most, before a row is searched in float64


# ------------------------------------------------------------------------------- what a program holds


@triton.jit
def numbers(pointer, stride, high, low, row, there):
    """A number of each row as two float32 ones; without a pointer they came by value, the same for all."""
    if pointer is None:
        nothing = row.to(tl.float32) * 0
        return nothing + high, nothing + low
    else:
        return in_two(tl.load(pointer + row * stride, mask=there, other=1.0).to(tl.float64))


@triton.jit
def place_rows(rows, TOGETHER: tl.constexpr):
    """The program's rows, and which of them there are."""
    if TOGETHER == 1:
        row = tl.program_id(0).to(tl.int64)
    else:
        row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    return row, row < rows


@triton.jit
def entries(row, stride, column, TOGETHER: tl.constexpr):
    """Where the entries of rows lie."""
    if TOGETHER == 1:
        return row * stride + column
    else:
        return row[:, None] * stride + column[None, :]


@triton.jit
def inside(there, column, n, TOGETHER: tl.constexpr, FULL: tl.constexpr):
    """Which entries there are."""
    if FULL and TOGETHER > 1:
        return there[:, None]
    else:
        # neither "&" nor a broadcast: Triton's interpreter makes integers of scalar flags
        present = column >= 0 if FULL else before(column, n, TOGETHER)
        return tl.where(present, wide(there, TOGETHER), False)


@triton.jit
def present(there, start, n, T: tl.constexpr):
    """Which entries there are in the piece that starts at this column."""
    column = tl.arange(0, T.width) + start
    if T.ragged:
        length = tl.where(wide(there, T.together), n[1] - n[0], 0)
        behind = column[None, :] - n[0]  # of what is before the row, a large number without a sign
        return behind.to(tl.uint32, bitcast=True) < length.to(tl.uint32, bitcast=True)
    else:
        return inside(there, column, n, T.together, T.full)


@triton.jit
def _load_reached(at, there, n, T: tl.constexpr):
    """As :func:`load_rows`, of a ragged tile."""
    PIECES: tl.constexpr = T.pieces
    TOGETHER: tl.constexpr = T.together
    WIDTH: tl.constexpr = T.width
    x = ()
    for i in tl.static_range(PIECES):
        piece = tl.full((TOGETHER, WIDTH), float("-inf"), at.dtype.element_ty)
        if always(i, T.ragged) or reached(i, n, T):
            piece = tl.load(at + i * T.width, mask=present(there, i * T.width, n, T), other=float("-inf"))
        x = x + (piece.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return x


@triton.jit
def load_rows(
    at, there, n,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The entries of the rows, in pieces that a thread holds side by side: they are summed first."""
    column = tl.arange(0, WIDTH)
    x = ()
    for i in tl.static_range(PIECES):
        valid = inside(there, column + i * WIDTH, n, TOGETHER, FULL)
        piece = tl.load(at + i * WIDTH, mask=valid, other=float("-inf")).to(tl.float32)
        x = x + (piece,)  # type: ignore[assignment]  # noqa: RUF005
    return x


@triton.jit
def rescue(bad, row, solve: tl.constexpr, given, TOGETHER: tl.constexpr):
    """solve(r, *given) for each of the program's rows that is bad."""
    if any_row(bad, TOGETHER):
        first = tl.program_id(0).to(tl.int64) * TOGETHER
        for r in range(TOGETHER):
            if any_row(bad & (row == first + r), TOGETHER):
                solve(first + r, *given)


@triton.jit
def at_of(x, row, T: tl.constexpr):
    """Where the first piece of the program's rows lies."""
    return x.pointer + entries(row, x.stride, tl.arange(0, T.width), T.together)


@triton.jit
def hold(x, at, row, there, n, T: tl.constexpr):
    """What the program holds of its rows, in pieces; nothing of one that streams past."""
    held = ()
    if T.in_words:
        held = load_words(x.pointer + row * x.stride, n, T)
    elif T.ragged:
        held = _load_reached(at, there, n, T)
    elif not T.streams:
        held = load_rows(at, there, n, T.together, T.pieces, T.width, T.full)
    return held


@triton.jit
def first_of(x, row, there):
    """The first score of each row, by which scores are less in the moments of rows; 0 if it is infinite."""
    origin = tl.load(x.pointer + row * x.stride, mask=there, other=0.0).to(tl.float32)
    return tl.where(tl.abs(origin) < float("inf"), origin, 0.0)


@triton.jit
def write_held(held, out_pointer, row, ok, n, result: tl.constexpr, given, L: tl.constexpr, T: tl.constexpr):
    """result(entries, given, L) of what the program holds, to where the rows' results go."""
    PIECES: tl.constexpr = T.pieces
    column = tl.arange(0, T.width)
    to = out_pointer + entries(row, 0 if T.ragged else n, column, T.together)
    for i in tl.static_range(PIECES):
        if always(i, T.ragged) or reached(i, n, T):
            y = result(held[i], given, L).to(out_pointer.dtype.element_ty)
            tl.store(to + i * T.width, y, mask=present(ok, i * T.width, n, T))


# ------------------------------------------------------------------------------------ the row program


@triton.jit(do_not_specialize=["rows", "evaluations"])
def solve(
    x, other, k, tau, found, rows, n_columns, evaluations, digits, exponent,
    P: tl.constexpr, L: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The rows of a :class:`.arguments.Tile`, or one of any length that streams past; those of float64 take
    float64 for all of it. The functions of a :class:`.arguments.Problem` get what is given here."""
    row, there = place_rows(rows, T.together)
    ok = there & ~there
    if x.pointer.dtype.element_ty != tl.float64:
        hi, lo, ok, more = P.find(
            x, other, k, tau, row, there, n_columns, evaluations, digits, exponent, L, T
        )  # fmt: skip
        tl.store(found.hi + row, hi, mask=ok)
        tl.store(found.lo + row, lo, mask=ok)
        P.write(found.out, row, ok, n_columns, more, L, T)

    rescue(
        there & ~ok, row, P.in_float64, (x, other, k, tau, found, n_columns, digits, joined(*exponent), L, T),
        T.together,
    )  # fmt: skip


KERNELS = (solve,)


def solver(problem: Problem, law: Any, tile: layout.Tile, rows: int, n: int) -> tuple[Variant, int]:
    """What is launched for a problem, and in how many programs."""
    constants = {"P": problem, "L": law, "T": layout.constant(tile, n), "num_warps": tile.warps}
    return variant(solve, **constants, **layout.registers()), cdiv(rows, tile.together)
