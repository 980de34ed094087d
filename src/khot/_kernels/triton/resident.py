"""The soft top-k of rows that stay on chip or stream past one program, in float32.

One read, few evaluations of the soft count (:mod:`.threshold`), one write; or, in its place, the threshold
with the digits of float64 (:mod:`.polish`). The rows for which float32 does
not suffice (no answer, infinite scores, a temperature out of range, no convergence) are solved again, in the
same program, in float64 by :mod:`.exact`, a chunk at a time: a second launch would cost more than a short row
takes.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Rows, Threshold, Values
from khot._kernels.triton.exact import find_exactly, number64, write_exactly
from khot._kernels.triton.exact_sums import BY_COUNT
from khot._kernels.triton.fast import any_row, before, joined, reciprocal, split, store, wide, word_of
from khot._kernels.triton.functions import LOG, LOGISTIC, THRESHOLD, log_F
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.packed import WORD, load_words, piece
from khot._kernels.triton.polish import polish
from khot._kernels.triton.sizes import cdiv
from khot._kernels.triton.terms import unit, value
from khot._kernels.triton.threshold import find

__all__ = [
    "KERNELS",
    "entries",
    "inside",
    "load_rows",
    "numbers",
    "place_rows",
    "rescue",
    "result",
    "row_values",
    "soft_topk",
]

EVALUATIONS = 24  # at most, before a row is searched in float64


# ------------------------------------------------------------------------------- what a program holds


@triton.jit
def numbers(pointer, stride, high, low, row, there):
    """A number of each row as two float32 ones; without a pointer they came by value, the same for all."""
    if pointer is None:
        nothing = row.to(tl.float32) * 0
        return nothing + high, nothing + low
    else:
        return split(tl.load(pointer + row * stride, mask=there, other=1.0).to(tl.float64))


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
def inside(there, column, n, TOGETHER: tl.constexpr, EXACT: tl.constexpr):
    """Which entries there are."""
    if EXACT and TOGETHER > 1:
        return there[:, None]
    else:
        # neither "&" nor a broadcast: Triton's interpreter makes integers of scalar flags
        present = column >= 0 if EXACT else before(column, n, TOGETHER)
        return tl.where(present, wide(there, TOGETHER), False)


@triton.jit
def load_rows(
    at, there, n,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The entries of the rows, in pieces that a thread holds side by side: they are summed first."""
    column = tl.arange(0, WIDTH)
    x = ()
    for i in tl.static_range(PIECES):
        valid = inside(there, column + i * WIDTH, n, TOGETHER, EXACT)
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
def row_values(hi, lo, tau_inverse, above_half, power, CDF: tl.constexpr, TOGETHER: tl.constexpr):
    """What :func:`result` needs to know of rows; above_half says that k is more than half of a row."""
    scale = tau_inverse * unit(CDF)
    turn, sign, base = scale, scale * 0 + 1, scale * 0
    if CDF == LOGISTIC:  # the others' y above t is 1 less a tail anyhow
        # of y near 1 the accurate part is 1 − y: it is what is computed where most y are
        turn = tl.where(above_half, -scale, scale)
        sign, base = tl.where(above_half, -1.0, 1.0), tl.where(above_half, 1.0, 0.0)
    return (
        wide(hi, TOGETHER), wide(lo * turn, TOGETHER), wide(turn, TOGETHER), wide(sign, TOGETHER),
        wide(base, TOGETHER), wide(tau_inverse, TOGETHER), wide(lo * tau_inverse, TOGETHER), power,
    )  # fmt: skip


@triton.jit
def result(x, given, L: tl.constexpr):
    """y or its logarithm.

    Given are hi; for y, lo and 1, each times ±unit/τ, and what turns 1 − y into y; for the logarithm, 1/τ and
    lo/τ; and the exponent of z.
    """
    hi, shift, turn, sign, base, inverse, low, power = given
    if L.output == LOG:
        z = (x - hi) * inverse - low
        return tl.where(z == float("-inf"), z, log_F(z, power, L.cdf))
    elif L.cdf == LOGISTIC:
        return reciprocal(1.0 + tl.exp2(shift - (x - hi) * turn)) * sign + base
    else:
        return value(x, hi, turn, shift, power, L.cdf, L.whole)


@triton.jit
def _store_rounded(pointer, row, t, there):
    """The threshold in the scores' dtype, if it is asked for."""
    if pointer is not None:
        store(pointer + row, t, there)


@triton.jit
def _solve_exactly(row, x, k, tau, out_pointer, t, n, power, L: tl.constexpr, T: tl.constexpr):
    """One row in float64, which is read again a chunk at a time."""
    x_at = x.pointer + row * x.stride
    source = (x_at, x_at, 0, n)
    k, tau = number64(*k, row), number64(*tau, row)
    hi, lo = find_exactly(source, k, tau, 0.0, power, L.cdf, BY_COUNT, False, T.chunk)
    tl.store(t.hi + row, hi)
    tl.store(t.lo + row, lo)
    if L.output == THRESHOLD:
        _store_rounded(out_pointer, row, hi + lo, row >= 0)
    else:
        write_exactly(out_pointer + row * n, source, (hi, lo, tau, power), L.cdf, BY_COUNT, L.output, T.chunk)


# --------------------------------------------------------------------------------------------- the kernel


@triton.jit(do_not_specialize=["rows", "evaluations"])
def solve_rows(
    x, k, tau, out_pointer, t, rows, n_columns, evaluations, exponent, L: tl.constexpr, T: tl.constexpr,
    POLISHED: tl.constexpr = False, PACKED: tl.constexpr = False,
):  # fmt: skip
    """The rows of a :class:`.arguments.Tile`; or one of any length that streams past. POLISHED says that t is
    to have the digits of float64, and PACKED that a row is held two entries to a word (:mod:`.packed`)."""
    PIECES: tl.constexpr = T.pieces
    row, there = place_rows(rows, T.together)
    column = tl.arange(0, T.width)
    at = x.pointer + entries(row, x.stride, column, T.together)
    held = ()
    if PACKED:
        held = load_words(x.pointer + row * x.stride, n_columns, T)
    elif not T.streams:
        held = load_rows(at, there, n_columns, T.together, T.pieces, T.width, T.full)
    origin = tl.load(x.pointer + row * x.stride, mask=there, other=0.0).to(tl.float32)
    origin = tl.where(tl.abs(origin) < float("inf"), origin, 0.0)
    own_k, k_rest = numbers(*k, row, there)
    own_tau, tau_rest = numbers(*tau, row, there)
    power = tl.zeros((), tl.float32) + exponent[0]
    hi, lo, ok, inverse, rest = find(
        held, at, origin, there, n_columns, own_k, k_rest, own_tau, power, evaluations, L, T,
        T.together == 1 and not T.streams,
    )  # fmt: skip

    fine_hi, fine_lo = hi.to(tl.float64), lo.to(tl.float64)
    if POLISHED:
        fine_hi, fine_lo, ok = polish(
            held, at, n_columns, fine_hi, fine_lo, ok, own_k.to(tl.float64) + k_rest,
            own_tau.to(tl.float64) + tau_rest, joined(*exponent), L.cdf, T,
        )  # fmt: skip
        hi, high_rest = split(fine_hi)
        lo = high_rest + fine_lo.to(tl.float32)
    tl.store(t.hi + row, fine_hi, mask=ok)
    tl.store(t.lo + row, fine_lo, mask=ok)
    if L.output == THRESHOLD:
        _store_rounded(out_pointer, row, fine_hi + fine_lo, ok)
    else:
        values = row_values(hi, lo, inverse, own_k > rest, power, L.cdf, T.together)
        to = out_pointer + entries(row, n_columns, column, T.together)
        if T.streams:
            write_backwards(at, to, 0, n_columns, ok, values, L, T)
        elif PACKED:
            words = (out_pointer + row * n_columns).to(WORD, bitcast=True) + column
            for i in tl.static_range(PIECES // 2):
                first = result(piece(held, 2 * i, at, T.pieces), values, L)
                second = result(piece(held, 2 * i + 1, at, T.pieces), values, L)
                word = word_of(first, second, out_pointer.dtype.element_ty)
                valid = inside(ok, column + i * T.width, n_columns // 2, T.together, T.full)
                tl.store(words + i * T.width, word, mask=valid)
        else:
            for i in tl.static_range(PIECES):
                valid = inside(ok, column + i * T.width, n_columns, T.together, T.full)
                out = result(held[i], values, L).to(out_pointer.dtype.element_ty)
                tl.store(to + i * T.width, out, mask=valid)

    rescue(
        there & ~ok, row, _solve_exactly, (x, k, tau, out_pointer, t, n_columns, joined(*exponent), L, T),
        T.together,
    )  # fmt: skip


@triton.jit
def write_backwards(at, to, begin, end, ok, values, L: tl.constexpr, T: tl.constexpr):
    """The results from begin to end of one row, the last first: the row's end is what the cache still has."""
    PIECES: tl.constexpr = T.pieces
    STEP: tl.constexpr = T.pieces * T.width
    column = tl.arange(0, T.width)
    steps = tl.cdiv(end - begin, STEP)
    for behind in range(steps):
        start = begin + (steps - 1 - behind) * STEP
        held = ()
        for i in tl.static_range(PIECES):
            valid = inside(ok, column + (start + i * T.width), end, 1, False)
            piece = tl.load(at + (start + i * T.width), mask=valid, other=0.0).to(tl.float32)
            held = held + (piece,)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(PIECES):
            valid = inside(ok, column + (start + i * T.width), end, 1, False)
            out = result(held[i], values, L).to(to.dtype.element_ty)
            tl.store(to + (start + i * T.width), out, mask=valid)


KERNELS = (solve_rows,)


def soft_topk(
    source: Rows,
    k: Values,
    tau: Values,
    out: Tensor,
    hi: Tensor,
    lo: Tensor,
    rows: int,
    n: int,
    F: cdfs.CDF,
    output: str,
) -> None:
    """Fill out, hi and lo."""
    packed = layout.packs(*source, n) and F.name != "normal"  # whose formulas leave no registers for a row
    start, programs, power = _variant(rows, n, F, output, packed)
    to = None if output == "threshold" else out
    start(programs, source, k, tau, to, Threshold(hi, lo), rows, n, EVALUATIONS, power)


@functools.lru_cache(maxsize=1024)
def _variant(
    rows: int, n: int, F: cdfs.CDF, output: str, packed: bool
) -> tuple[Variant, int, tuple[float, float]]:
    """What is launched, in how many programs, and the exponent of z."""
    tile = layout.packed_tile(n) if packed else layout.tile(rows, n)
    solver = variant(
        solve_rows, L=layout.law(F, output=output), T=layout.constant(tile, n),
        POLISHED=layout.steep(F, output), PACKED=packed, num_warps=tile.warps, **layout.registers(),
    )  # fmt: skip
    return solver, cdiv(rows, tile.together), layout.power(F)
