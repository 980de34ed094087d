"""The soft top-k of rows that stay on chip or stream past one program: a count, for :mod:`.rows`.

One read, few evaluations of the soft count (:mod:`.threshold`), one write; or, in its place, the threshold
with the digits of float64 (:mod:`.polish`). What float32 does not suffice for takes :mod:`.float64`.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Found, Problem, Rows, Values
from khot._kernels.triton.fast import in_two, joined, reciprocal, store, wide, word_of
from khot._kernels.triton.float64 import solve_row
from khot._kernels.triton.functions import HUGE, LOG, LOGISTIC, THRESHOLD, log_F
from khot._kernels.triton.launch import Variant
from khot._kernels.triton.polish import polish
from khot._kernels.triton.rows import EVALUATIONS, at_of, first_of, hold, inside, numbers, solver, write_held
from khot._kernels.triton.terms import unit, value
from khot._kernels.triton.threshold import FAR, find
from khot._kernels.triton.words import WORD, piece


@triton.jit
def _find(
    x, other, k, tau, row, there, n, evaluations, digits, exponent, L: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    at = at_of(x, row, T)
    held = hold(x, at, row, there, n, T)
    if T.ragged:
        first = tl.max(held[0], axis=1)
        origin = tl.where(tl.abs(first) < float("inf"), first, 0.0)
    else:
        origin = first_of(x, row, there)
    own_k, k_low = numbers(*k, row, there)
    own_tau, tau_low = numbers(*tau, row, there)
    power = tl.zeros((), tl.float32) + exponent[0]
    hi, lo, ok, inverse, complement = find(
        held, at, origin, there, n, own_k, k_low, own_tau, power, evaluations, L, T,
        T.together == 1 and not T.streams,
    )  # fmt: skip

    fine_hi, fine_lo = hi.to(tl.float64), lo.to(tl.float64)
    settled = ok & ~ok
    if T.ragged:
        settled = ok & (tl.abs(hi) >= FAR)
    if L.polished:
        fine_hi, fine_lo, ok = polish(
            held, at, n, fine_hi, fine_lo, ok & ~settled, own_k.to(tl.float64) + k_low,
            own_tau.to(tl.float64) + tau_low, joined(*exponent), L.cdf, T,
        )  # fmt: skip
        hi, high_low = in_two(fine_hi)
        lo = high_low + fine_lo.to(tl.float32)
    if T.ragged:
        infinite = tl.where(hi > 0, HUGE, -HUGE)
        fine_hi, fine_lo = tl.where(settled, infinite, fine_hi), tl.where(settled, infinite, fine_lo)
        lo, ok = tl.where(settled, 0.0, lo), ok | settled
    return fine_hi, fine_lo, ok, (held, at, hi, lo, inverse, own_k > complement, power, fine_hi + fine_lo)


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
def _write(out_pointer, row, ok, n, found, L: tl.constexpr, T: tl.constexpr):
    held, at, hi, lo, inverse, above_half, power, t = found
    if L.output == THRESHOLD:
        if out_pointer is not None:  # in the scores' dtype
            store(out_pointer + row, t, ok)
    else:
        values = row_values(hi, lo, inverse, above_half, power, L.cdf, T.together)
        if T.streams:
            write_backwards(at, out_pointer + row * n + tl.arange(0, T.width), 0, n, ok, values, L, T)
        elif T.in_words:
            _write_words(held, at, out_pointer + row * n, ok, n, values, L, T)
        else:
            write_held(held, out_pointer, row, ok, n, result, values, L, T)


@triton.jit
def _write_words(held, at, to, ok, n, values, L: tl.constexpr, T: tl.constexpr):
    """The results of a row that is held two entries to a word (:mod:`.words`)."""
    HALF: tl.constexpr = T.pieces // 2
    column = tl.arange(0, T.width)
    words = to.to(WORD, bitcast=True) + column
    for i in tl.static_range(HALF):
        first = result(piece(held, 2 * i, at, T.pieces), values, L)
        second = result(piece(held, 2 * i + 1, at, T.pieces), values, L)
        word = word_of(first, second, to.dtype.element_ty)
        valid = inside(ok, column + i * T.width, n // 2, T.together, T.full)
        tl.store(words + i * T.width, word, mask=valid)


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


COUNT = Problem(_find, _write, solve_row)


def soft_topk(source: Rows, k: Values, tau: Values, found: Found, asked: layout.Asked) -> None:
    """Fill what is found; out not if only the threshold is asked for."""
    rows, n = source.pointer.shape
    # the normal CDF's formulas leave no registers for words
    in_words = layout.fits_words(*source, n) and asked.F.name != "normal"
    start, programs, power = _variant(rows, n, asked, in_words)
    if asked.output == "threshold":
        found = found._replace(out=None)
    start(programs, source, None, k, tau, found, rows, n, EVALUATIONS, None, power)


@functools.lru_cache(maxsize=1024)
def _variant(
    rows: int, n: int, asked: layout.Asked, in_words: bool
) -> tuple[Variant, int, tuple[float, float]]:
    """What is launched, in how many programs, and the exponent of z."""
    tile = layout.word_tile(n) if in_words else layout.tile(rows, n)
    law = layout.law(*asked)._replace(polished=layout.steep(asked.F, asked.output))
    return *solver(COUNT, law, tile, rows, n), layout.power(asked.F)
