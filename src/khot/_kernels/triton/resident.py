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
from khot._core import eager
from khot._kernels.triton import layout, native
from khot._kernels.triton.exact import find_exactly, number64, write_exactly
from khot._kernels.triton.exact_sums import BY_COUNT
from khot._kernels.triton.fast import any_row, before, joined, reciprocal, split, store, wide, word_of
from khot._kernels.triton.functions import LOG, LOGISTIC, OUTPUTS, THRESHOLD, log_F
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
def result(x, given, CDF: tl.constexpr, OUTPUT: tl.constexpr, WHOLE: tl.constexpr):
    """y or its logarithm.

    Given are hi; for y, lo and 1, each times ±unit/τ, and what turns 1 − y into y; for the logarithm, 1/τ and
    lo/τ; and the exponent of z.
    """
    hi, shift, turn, sign, base, inverse, low, power = given
    if OUTPUT == LOG:
        z = (x - hi) * inverse - low
        return tl.where(z == float("-inf"), z, log_F(z, power, CDF))
    elif CDF == LOGISTIC:
        return reciprocal(1.0 + tl.exp2(shift - (x - hi) * turn)) * sign + base
    else:
        return value(x, hi, turn, shift, power, CDF, WHOLE)


@triton.jit
def _store_rounded(pointer, row, t, there):
    """The threshold in the scores' dtype, if it is asked for."""
    if pointer is not None:
        store(pointer + row, t, there)


@triton.jit
def _solve_exactly(
    row, x_pointer, x_stride, k, tau, out_pointer, hi_pointer, lo_pointer, n, power,
    CDF: tl.constexpr, OUTPUT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row in float64, which is read again a chunk at a time."""
    x_at = x_pointer + row * x_stride
    source = (x_at, x_at, 0, n)
    k, tau = number64(*k, row), number64(*tau, row)
    hi, lo = find_exactly(source, k, tau, 0.0, power, CDF, BY_COUNT, False, CHUNK)
    tl.store(hi_pointer + row, hi)
    tl.store(lo_pointer + row, lo)
    if OUTPUT == THRESHOLD:
        _store_rounded(out_pointer, row, hi + lo, row >= 0)
    else:
        write_exactly(out_pointer + row * n, source, (hi, lo, tau, power), CDF, BY_COUNT, OUTPUT, CHUNK)


# --------------------------------------------------------------------------------------------- the kernel


@triton.jit(do_not_specialize=["rows", "evaluations"])
def solve_rows(
    x_pointer, x_stride, k_pointer, k_stride, k_high, k_low, tau_pointer, tau_stride, tau_high, tau_low,
    out_pointer, hi_pointer, lo_pointer, rows, n_columns, evaluations, power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr,
    OUTPUT: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr, STREAM: tl.constexpr, CHUNK: tl.constexpr,
    POLISHED: tl.constexpr = False, PACKED: tl.constexpr = False,
):  # fmt: skip
    """`TOGETHER` rows of at most `PIECES`·`WIDTH` entries each; or one of any length that streams past, as
    many entries at a time. POLISHED says that t is to have the digits of float64, and PACKED that a row is
    held two entries to a word (:mod:`.packed`).
    """
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    at = x_pointer + entries(row, x_stride, column, TOGETHER)
    x = ()
    if PACKED:
        x = load_words(x_pointer + row * x_stride, n_columns, PIECES, WIDTH, EXACT)
    elif not STREAM:
        x = load_rows(at, there, n_columns, TOGETHER, PIECES, WIDTH, EXACT)
    origin = tl.load(x_pointer + row * x_stride, mask=there, other=0.0).to(tl.float32)
    origin = tl.where(tl.abs(origin) < float("inf"), origin, 0.0)
    k, k_rest = numbers(k_pointer, k_stride, k_high, k_low, row, there)
    tau, tau_rest = numbers(tau_pointer, tau_stride, tau_high, tau_low, row, there)
    power = tl.zeros((), tl.float32) + power_high
    hi, lo, ok, inverse, rest = find(
        x, at, origin, there, n_columns, k, k_rest, tau, power, evaluations,
        CDF, WHOLE, TOGETHER, PIECES, WIDTH, EXACT, STREAM, TOGETHER == 1 and not STREAM,
    )  # fmt: skip

    fine_hi, fine_lo = hi.to(tl.float64), lo.to(tl.float64)
    if POLISHED:
        fine_hi, fine_lo, ok = polish(
            x, at, n_columns, fine_hi, fine_lo, ok, k.to(tl.float64) + k_rest,
            tau.to(tl.float64) + tau_rest, joined(power_high, power_low), CDF, TOGETHER, PIECES, WIDTH,
        )  # fmt: skip
        hi, high_rest = split(fine_hi)
        lo = high_rest + fine_lo.to(tl.float32)
    tl.store(hi_pointer + row, fine_hi, mask=ok)
    tl.store(lo_pointer + row, fine_lo, mask=ok)
    if OUTPUT == THRESHOLD:
        _store_rounded(out_pointer, row, fine_hi + fine_lo, ok)
    else:
        values = row_values(hi, lo, inverse, k > rest, power, CDF, TOGETHER)
        to = out_pointer + entries(row, n_columns, column, TOGETHER)
        if STREAM:
            write_backwards(at, to, 0, n_columns, ok, values, CDF, OUTPUT, WHOLE, PIECES, WIDTH)
        elif PACKED:
            words = (out_pointer + row * n_columns).to(WORD, bitcast=True) + column
            for i in tl.static_range(PIECES // 2):
                first = result(piece(x, 2 * i, at, PIECES), values, CDF, OUTPUT, WHOLE)
                second = result(piece(x, 2 * i + 1, at, PIECES), values, CDF, OUTPUT, WHOLE)
                valid = inside(ok, column + i * WIDTH, n_columns // 2, TOGETHER, EXACT)
                tl.store(words + i * WIDTH, word_of(first, second, out_pointer.dtype.element_ty), mask=valid)
        else:
            for i in tl.static_range(PIECES):
                valid = inside(ok, column + i * WIDTH, n_columns, TOGETHER, EXACT)
                out = result(x[i], values, CDF, OUTPUT, WHOLE).to(out_pointer.dtype.element_ty)
                tl.store(to + i * WIDTH, out, mask=valid)

    rescue(
        there & ~ok, row, _solve_exactly,
        (
            x_pointer, x_stride, (k_pointer, k_stride, k_high, k_low),
            (tau_pointer, tau_stride, tau_high, tau_low), out_pointer, hi_pointer, lo_pointer, n_columns,
            joined(power_high, power_low), CDF, OUTPUT, CHUNK,
        ),
        TOGETHER,
    )  # fmt: skip


@triton.jit
def write_backwards(
    at, to, begin, end, ok, values, CDF: tl.constexpr, OUTPUT: tl.constexpr, WHOLE: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The results from begin to end of one row, the last first: the row's end is what the cache still has."""
    STEP: tl.constexpr = PIECES * WIDTH
    column = tl.arange(0, WIDTH)
    steps = tl.cdiv(end - begin, STEP)
    for behind in range(steps):
        start = begin + (steps - 1 - behind) * STEP
        held = ()
        for i in tl.static_range(PIECES):
            valid = inside(ok, column + (start + i * WIDTH), end, 1, False)
            piece = tl.load(at + (start + i * WIDTH), mask=valid, other=0.0).to(tl.float32)
            held = held + (piece,)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(PIECES):
            valid = inside(ok, column + (start + i * WIDTH), end, 1, False)
            out = result(held[i], values, CDF, OUTPUT, WHOLE).to(to.dtype.element_ty)
            tl.store(to + (start + i * WIDTH), out, mask=valid)


KERNELS = (solve_rows,)


def soft_topk(
    source: tuple[Tensor, int],
    k: layout.Values,
    tau: layout.Values,
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
    arguments = (*source, *k, *tau, to, hi, lo, rows, n, EVALUATIONS, *power)
    start(programs, *arguments)
    if eager.launching and output in ("y", "log"):
        native.prepare("soft_topk", source[0], start, programs, arguments, F.name, output == "log")


@functools.lru_cache(maxsize=1024)
def _variant(
    rows: int, n: int, F: cdfs.CDF, output: str, packed: bool
) -> tuple[Variant, int, tuple[float, float]]:
    """What is launched, in how many programs, and the exponent of z."""
    tile = layout.packed_tile(n) if packed else layout.tile(rows, n)
    solver = variant(
        solve_rows,
        CDF=layout.cdf_id(F.name), WHOLE=layout.whole(F),
        OUTPUT=OUTPUTS[output], TOGETHER=tile.together, PIECES=tile.pieces, WIDTH=tile.width,
        EXACT=n == tile.pieces * tile.width, STREAM=tile.streams, CHUNK=layout.RESCUE * tile.warps,
        POLISHED=layout.steep(F, output), PACKED=packed,
        num_warps=tile.warps, **layout.registers(),
    )  # fmt: skip
    return solver, cdiv(rows, tile.together), layout.power(F)
