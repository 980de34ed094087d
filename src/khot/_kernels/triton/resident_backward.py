"""Backward of the soft top-k for rows that stay on chip or stream past one program, in float32.

Of x and the incoming gradient one read, of the result one write, as softmax's backward has. The density f is
taken from x: y of a narrow dtype has not the digits for it. Rows whose densities all but vanish, and rows
without an ordinary threshold, are done again, in the same program, in float64 by :mod:`.exact_backward`.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._core import eager
from khot._kernels.triton import layout, native
from khot._kernels.triton.exact import number64
from khot._kernels.triton.exact_backward import pull_exactly
from khot._kernels.triton.exact_sums import BY_COUNT
from khot._kernels.triton.fast import inverse_of, joined, plus, reciprocal, split, total, wide
from khot._kernels.triton.functions import LOG, OUTPUTS, THRESHOLD
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.resident import entries, inside, numbers, place_rows, rescue
from khot._kernels.triton.sizes import cdiv
from khot._kernels.triton.terms import density, log_rate, unit
from khot._kernels.triton.threshold import FLUSH

__all__ = [
    "FADED",
    "KERNELS",
    "asked",
    "pull_of",
    "pull_rows",
    "pull_sums",
    "soft_topk_backward",
    "suffices",
    "threshold_of",
    "write_pull",
]

FADED = tl.constexpr(1e-20)  # a sum of densities below which float32 has lost their digits


@triton.jit
def _terms(
    x_at, grad_at, valid, hi, shift, scale, power, CDF: tl.constexpr, WHOLE: tl.constexpr,
    OUTPUT: tl.constexpr,
):  # fmt: skip
    """f; u = v·∂out/∂z for the incoming gradient v; and z in the units of :mod:`.terms`."""
    x = tl.load(x_at, mask=valid, other=float("-inf")).to(tl.float32)
    v = tl.load(grad_at, mask=valid, other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")  # others take no part, whatever their gradient
    z = tl.where(finite, (x - hi) * scale - shift, -1e4)
    f = density(z, power, CDF, WHOLE)
    if OUTPUT == THRESHOLD:
        return f, f * 0, z
    rate = log_rate(z, f, power, CDF) if OUTPUT == LOG else f
    return f, tl.where(finite, v * rate, 0.0), z


@triton.jit
def pull_sums(
    x_at, grad_at, grad_column, n, hi, shift, scale, power,
    CDF: tl.constexpr, WHOLE: tl.constexpr, OUTPUT: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Σf, Σu, Σfz and Σuz of entries that stream past, in float64."""
    STEP: tl.constexpr = PIECES * WIDTH
    column = tl.arange(0, WIDTH)
    steps = tl.cdiv(n, STEP)
    nothing = tl.zeros((), tl.float64)
    sums = (nothing, nothing, nothing, nothing)
    for first in range(0, steps, FLUSH):
        zero = tl.zeros((WIDTH,), tl.float32)
        part = (zero, zero, zero, zero)
        for number in range(first, tl.minimum(steps, first + FLUSH)):
            start = number * STEP
            for i in tl.static_range(PIECES):
                offset = start + i * WIDTH
                f, u, z = _terms(
                    x_at + offset, grad_at + tl.cast(offset, tl.int64) * grad_column,
                    column + offset < n, hi, shift, scale, power, CDF, WHOLE, OUTPUT,
                )  # fmt: skip
                part = plus(part, (f, u, f * z, u * z))
        sums = plus(sums, total(part, 1))
    return sums


@triton.jit
def write_pull(
    x_at, grad_at, dx_at, grad_column, n, ok, hi, shift, scale, pull, inverse, power,
    CDF: tl.constexpr, WHOLE: tl.constexpr, OUTPUT: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dL/dx of the same entries, the last first: the row's end is what the cache still has."""
    STEP: tl.constexpr = PIECES * WIDTH
    column = tl.arange(0, WIDTH)
    steps = tl.cdiv(n, STEP)
    for behind in range(steps):
        start = (steps - 1 - behind) * STEP
        for i in tl.static_range(PIECES):
            offset = start + i * WIDTH
            valid = inside(ok, column + offset, n, 1, False)
            f, u, _ = _terms(
                x_at + offset, grad_at + tl.cast(offset, tl.int64) * grad_column, valid,
                hi, shift, scale, power, CDF, WHOLE, OUTPUT,
            )  # fmt: skip
            dx = (u - f * pull) * inverse
            tl.store(dx_at + offset, dx.to(dx_at.dtype.element_ty), mask=valid)


@triton.jit
def _held_sums(
    x_at, grad_at, step, there, n, hi, shift, scale, power,
    CDF: tl.constexpr, WHOLE: tl.constexpr, OUTPUT: tl.constexpr, TOGETHER: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Σf, Σu, Σfz and Σuz of rows that a program holds; and f and u of each piece, unless they are computed
    AGAIN when dL/dx is written."""
    column = tl.arange(0, WIDTH)
    fs, us = (), ()
    for i in tl.static_range(PIECES):
        valid = inside(there, column + i * WIDTH, n, TOGETHER, EXACT)
        f, u, z = _terms(
            x_at + i * WIDTH, grad_at + i * step, valid, hi, shift, scale, power, CDF, WHOLE, OUTPUT
        )
        terms = (f, u, f * z, u * z)
        held = plus(held, terms) if i > 0 else terms  # type: ignore[has-type]  # noqa: F821
        if not AGAIN:
            fs, us = fs + (f,), us + (u,)  # type: ignore[assignment]  # noqa: RUF005
    return total(held, TOGETHER), (fs, us)


@triton.jit
def _write_held(
    x_at, grad_at, dx_at, step, ok, n, hi, shift, scale, pull, inverse, power, kept,
    CDF: tl.constexpr, WHOLE: tl.constexpr, OUTPUT: tl.constexpr, TOGETHER: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """dL/dx of the same rows."""
    column = tl.arange(0, WIDTH)
    for i in tl.static_range(PIECES):
        valid = inside(ok, column + i * WIDTH, n, TOGETHER, EXACT)
        if AGAIN:
            f, u, _ = _terms(
                x_at + i * WIDTH, grad_at + i * step, valid, hi, shift, scale, power, CDF, WHOLE, OUTPUT
            )
        else:
            f, u = kept[0][i], kept[1][i]
        dx = (u - f * pull) * inverse
        tl.store(dx_at + i * WIDTH, dx.to(dx_at.dtype.element_ty), mask=valid)


@triton.jit
def threshold_of(hi_pointer, lo_pointer, tau, row, there):
    """t = hi + lo of rows, τ, and 1/τ to the last digit."""
    hi, rest = split(tl.load(hi_pointer + row, mask=there, other=0.0))
    lo = rest + tl.load(lo_pointer + row, mask=there, other=0.0).to(tl.float32)
    tau = numbers(*tau, row, there)[0]
    return hi, lo, tau, inverse_of(tau)


@triton.jit
def pull_of(f_sum, u_sum, grad_lo, tau, row, there, ASKED: tl.constexpr):
    """Σu/Σf, less τ/Σf times the gradient in lo if that is ASKED for."""
    pull = u_sum * reciprocal(f_sum)
    if ASKED:
        pull -= numbers(*grad_lo, row, there)[0] * tau * reciprocal(f_sum)
    return pull


@triton.jit
def suffices(ok, hi, tau, pull, dtau):
    """Which rows float32 suffices for, of those that are ok so far."""
    ok = ok & (tl.abs(hi) < 1e30) & (tl.abs(pull) < float("inf")) & (tl.abs(dtau) < float("inf"))
    return ok & (tau > 1e-25) & (tau < 1e25)


@triton.jit
def _pull_exactly(
    row, grad_pointer, grad_row, grad_column, x_pointer, x_stride, hi_pointer, lo_pointer,
    dx_pointer, dk_pointer, dtau_pointer, n, grad_lo, tau, power,
    CDF: tl.constexpr, OUTPUT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row in float64, which is read again a chunk at a time."""
    x_at, dx_at = x_pointer + row * x_stride, dx_pointer + row * n
    grad_lo, tau = number64(*grad_lo, row), number64(*tau, row)
    threshold = (tl.load(hi_pointer + row), tl.load(lo_pointer + row), tau, power)
    pull_exactly(
        (x_at, x_at, 0, n), grad_pointer + row * grad_row, grad_column, grad_lo, threshold,
        dx_at, dx_at, dk_pointer + row, dtau_pointer + row, CDF, BY_COUNT, False, OUTPUT, CHUNK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def pull_rows(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low,
    x_pointer, x_stride, hi_pointer, lo_pointer,
    tau_pointer, tau_stride, tau_high, tau_low, dx_pointer, dk_pointer, dtau_pointer, rows, n_columns,
    power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr, OUTPUT: tl.constexpr, ASKED: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr, AGAIN: tl.constexpr, STREAM: tl.constexpr, CHUNK: tl.constexpr,
    ORDINARY: tl.constexpr = False,
):  # fmt: skip
    """dL/dx = (u − f·pull)/τ with pull = dL/dk = Σu/Σf, less τ/Σf times the gradient in lo if that is ASKED
    for; dL/dτ = (pull·Σfz − Σuz)/τ.

    AGAIN reads x and the gradient a second time, mostly from L2, where they do not fit into the registers;
    so does a row that streams past.
    ORDINARY leaves out the rescue: for counting instructions, and for nothing else.
    """
    row, there = place_rows(rows, TOGETHER)
    grad_lo = (grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low)
    given_tau = (tau_pointer, tau_stride, tau_high, tau_low)
    hi, lo, tau, inverse = threshold_of(hi_pointer, lo_pointer, given_tau, row, there)
    center, scale = wide(hi, TOGETHER), wide(inverse * unit(CDF), TOGETHER)
    shift = wide(lo * inverse * unit(CDF), TOGETHER)
    power = tl.zeros((), tl.float32) + power_high

    column = tl.arange(0, WIDTH)
    x_at = x_pointer + entries(row, x_stride, column, TOGETHER)
    grad_at = grad_pointer + entries(row, grad_row, column.to(tl.int64) * grad_column, TOGETHER)
    dx_at = dx_pointer + entries(row, n_columns, column, TOGETHER)
    step = (tl.zeros((), tl.int64) + WIDTH) * grad_column
    kept = ((), ())
    if STREAM:
        f_sum, u_sum, fz, uz = pull_sums(
            x_at, grad_at, grad_column, n_columns, center, shift, scale, power,
            CDF, WHOLE, OUTPUT, PIECES, WIDTH,
        )  # fmt: skip
        f_sum, u_sum = f_sum.to(tl.float32), u_sum.to(tl.float32)
        fz, uz = fz.to(tl.float32), uz.to(tl.float32)
    else:
        sums, kept = _held_sums(
            x_at, grad_at, step, there, n_columns, center, shift, scale, power,
            CDF, WHOLE, OUTPUT, TOGETHER, PIECES, WIDTH, EXACT, AGAIN,
        )  # fmt: skip
        f_sum, u_sum, fz, uz = sums
    pull = pull_of(f_sum, u_sum, grad_lo, tau, row, there, ASKED)
    dtau = (pull * fz - uz) * inverse * (1 / unit(CDF))
    ok = suffices(f_sum > FADED, hi, tau, pull, dtau) & there
    tl.store(dk_pointer + row, pull.to(tl.float64), mask=ok)
    tl.store(dtau_pointer + row, dtau.to(tl.float64), mask=ok)
    share, per = wide(pull, TOGETHER), wide(inverse, TOGETHER)
    if STREAM:
        write_pull(
            x_at, grad_at, dx_at, grad_column, n_columns, ok, center, shift, scale, share, per, power,
            CDF, WHOLE, OUTPUT, PIECES, WIDTH,
        )  # fmt: skip
    else:
        _write_held(
            x_at, grad_at, dx_at, step, ok, n_columns, center, shift, scale, share, per, power, kept,
            CDF, WHOLE, OUTPUT, TOGETHER, PIECES, WIDTH, EXACT, AGAIN,
        )  # fmt: skip

    if not ORDINARY:
        rescue(
            there & ~ok, row, _pull_exactly,
            (
                grad_pointer, grad_row, grad_column, x_pointer, x_stride, hi_pointer, lo_pointer,
                dx_pointer, dk_pointer, dtau_pointer, n_columns, grad_lo, given_tau,
                joined(power_high, power_low), CDF, OUTPUT, CHUNK,
            ),
            TOGETHER,
        )  # fmt: skip


KERNELS = (pull_rows,)


def soft_topk_backward(
    grad: tuple[Tensor, int, int],
    grad_lo: layout.Values,
    source: tuple[Tensor, int],
    t: tuple[Tensor, Tensor],
    tau: layout.Values,
    results: tuple[Tensor, Tensor, Tensor],
    rows: int,
    n: int,
    F: cdfs.CDF,
    output: str,
) -> None:
    """Fill the results: dx, dk and dtau."""
    start, programs, power = _variant(rows, n, F, output, asked(grad_lo))
    arguments = (*grad, *grad_lo, *source, *t, *tau, *results, rows, n, *power)
    start(programs, *arguments)
    if eager.launching and output != "threshold" and not asked(grad_lo):
        choices = F.name, output == "log"
        native.prepare("soft_topk", source[0], start, programs, arguments, *choices, backward=True)


def asked(grad_lo: layout.Values) -> bool:
    """Whether somebody asked for the derivative of lo: a 0 that is given by value says that nobody did."""
    return grad_lo.pointer is not None or grad_lo.high != 0


@functools.lru_cache(maxsize=1024)
def _variant(
    rows: int, n: int, F: cdfs.CDF, output: str, asked: bool
) -> tuple[Variant, int, tuple[float, float]]:
    """What is launched, in how many programs, and the exponent of z."""
    tile = layout.tile(rows, n)
    puller = variant(
        pull_rows,
        CDF=layout.cdf_id(F.name), WHOLE=layout.whole(F), OUTPUT=OUTPUTS[output], ASKED=asked,
        TOGETHER=tile.together, PIECES=tile.pieces, WIDTH=tile.width,
        EXACT=n == tile.pieces * tile.width, AGAIN=tile.pieces > 8, STREAM=tile.streams,
        CHUNK=layout.RESCUE * tile.warps, num_warps=tile.warps, **layout.registers(),
    )  # fmt: skip
    return puller, cdiv(rows, tile.together), layout.power(F)
