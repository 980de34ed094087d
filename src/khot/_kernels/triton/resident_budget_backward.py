"""Backward of soft budgets in float32: of rows that a program reads at once, or a part at a time.

Scores, costs and the incoming gradient are read twice, the second time from the caches. Rows whose densities
all but vanish, and rows without an ordinary threshold, are done again, in the same program, in float64 by
:mod:`.exact_backward`.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.triton import layout, native
from khot._kernels.triton.costs import load_pair, priced
from khot._kernels.triton.exact import number64
from khot._kernels.triton.exact_backward import pull_exactly
from khot._kernels.triton.exact_sums import BY, BY_VALUE
from khot._kernels.triton.fast import joined, plus, total, wide
from khot._kernels.triton.functions import VALUE
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.resident import entries, inside, place_rows, rescue, row_values
from khot._kernels.triton.resident_backward import FADED, asked, pull_of, suffices, threshold_of
from khot._kernels.triton.resident_budget import share_of
from khot._kernels.triton.sizes import cdiv
from khot._kernels.triton.terms import density, unit

__all__ = [
    "KERNELS",
    "pull_row_exactly",
    "pull_sums",
    "pull_threshold",
    "settle_pull",
    "soft_budget_backward",
    "write_pull",
]


@triton.jit
def _terms(
    at, grad_at, grad_column, offset, valid, given, CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr
):  # fmt: skip
    """x and w; w f; u = v f for the incoming gradient v; and z in the units of :mod:`.terms`."""
    x, w = load_pair(at, offset, valid)
    v = tl.load(grad_at + (tl.zeros((), tl.int64) + offset) * grad_column, mask=valid, other=0.0)
    hi, shift, scale, power = given
    finite = tl.abs(x) < float("inf")  # others take no part, whatever their gradient and their cost
    if BY == BY_VALUE:
        off, shift = priced(x, w, hi, shift, scale, CDF, WHOLE)
    else:
        off = x - hi
    z = tl.where(finite, off * scale - shift, -1e4)
    f = density(z, power, CDF, WHOLE)
    return x, w, tl.where(finite, w * f, 0.0), tl.where(finite, v.to(tl.float32) * f, 0.0), z


@triton.jit
def pull_threshold(
    hi_pointer, lo_pointer, tau_pointer, tau_stride, tau_high, tau_low, row, there, power_high,
    CDF: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """hi, lo, τ, 1/τ and the exponent of rows; and what :func:`pull_sums` is to know of them."""
    given_tau = (tau_pointer, tau_stride, tau_high, tau_low)
    hi, lo, tau, inverse = threshold_of(hi_pointer, lo_pointer, given_tau, row, there)
    power = tl.zeros((), tl.float32) + power_high
    scale = inverse * unit(CDF)
    given = (wide(hi, TOGETHER), wide(lo * scale, TOGETHER), wide(scale, TOGETHER), power)
    return hi, lo, tau, inverse, power, given


@triton.jit
def pull_sums(
    at, grad_at, grad_column, there, n, nothing, given,
    CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr,
    WIDTH: tl.constexpr, EXACT: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Σwf, Σu, Σwfz and Σuz; by value the first two times w. They are in the precision of `nothing`."""
    column = tl.arange(0, WIDTH)
    end = n if STREAM else 1
    mass, u_sum, moment, u_moment = nothing, nothing, nothing, nothing
    for start in range(0, end, PIECES * WIDTH):
        held = ()
        for i in tl.static_range(PIECES):
            offset = start + i * WIDTH
            valid = inside(there, column + offset, n, TOGETHER, EXACT)
            _, w, paid, u, z = _terms(at, grad_at, grad_column, offset, valid, given, CDF, WHOLE, BY)
            a = w if BY == BY_VALUE else 1.0
            held = plus(held, (paid * a, u * a, paid * z, u * z))
        found = total(held, TOGETHER)
        mass, u_sum, moment = mass + found[0], u_sum + found[1], moment + found[2]
        u_moment += found[3]
    return mass, u_sum, moment, u_moment


@triton.jit
def settle_pull(
    sums, grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low, row, there, hi, lo, tau, inverse,
    CDF: tl.constexpr, AT_MOST: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """The pull and dL/dτ of rows; and which rows have them in float32."""
    mass, u_sum, moment, u_moment = sums
    fixed = (hi == 0) & (lo == 0) if AT_MOST else hi != hi
    grad_lo = (grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low)
    mass = mass.to(tl.float32)
    pull = tl.where(fixed, 0.0, pull_of(mass, u_sum.to(tl.float32), grad_lo, tau, row, there, ASKED))
    dtau = (pull * moment.to(tl.float32) - u_moment.to(tl.float32)) * inverse * (1 / unit(CDF))
    ok = ((mass > FADED) & (mass < 1 / FADED)) | fixed
    return pull, dtau, suffices(ok, hi, tau, pull, dtau) & there


@triton.jit
def write_pull(
    at, grad_at, grad_column, dx_at, dcost_at, ok, n, given, pull, hi, lo, inverse, power,
    CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr,
    WIDTH: tl.constexpr, EXACT: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """dL/dx and dL/dw of rows, or of parts of them."""
    column = tl.arange(0, WIDTH)
    end = n if STREAM else 1
    values = row_values(hi, lo, inverse, hi != hi, power, CDF, TOGETHER)
    share, per, t = wide(pull, TOGETHER), wide(inverse, TOGETHER), wide(hi + lo, TOGETHER)
    for start in range(0, end, PIECES * WIDTH):
        for i in tl.static_range(PIECES):
            offset = start + i * WIDTH
            valid = inside(ok, column + offset, n, TOGETHER, EXACT)
            x, w, paid, u, _ = _terms(at, grad_at, grad_column, offset, valid, given, CDF, WHOLE, BY)
            dx = (u - paid * share) * per
            tl.store(dx_at + offset, dx.to(dx_at.dtype.element_ty), mask=valid)
            dcost = -share * share_of(x, w, values, CDF, WHOLE, BY)
            if BY == BY_VALUE:
                dcost -= t * dx
            dcost = tl.where(x == float("-inf"), 0.0, dcost)
            tl.store(dcost_at + offset, dcost.to(dcost_at.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["rows"])
def pull_budgets(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low,
    x_pointer, x_stride, cost_pointer, cost_row, cost_column, hi_pointer, lo_pointer,
    tau_pointer, tau_stride, tau_high, tau_low, dx_pointer, dcost_pointer, dbudget_pointer, dtau_pointer,
    rows, n_columns, power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr, ASKED: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
    STREAM: tl.constexpr, CHUNK: tl.constexpr, ORDINARY: tl.constexpr = False,
):  # fmt: skip
    """dL/dx = (u − w f·pull)/τ and dL/dw = −y·pull with pull = dL/dB = Σu/Σwf, less τ/Σwf times the
    gradient in lo if that is ASKED for; dL/dτ = (pull·Σwfz − Σuz)/τ. By value pull = Σuw/Σw²f, less τ/Σw²f
    times that gradient, and dL/dw = −y·pull − t·dL/dx. AT_MOST a budget that is not spent pulls nothing.

    ORDINARY leaves out the rescue: for counting instructions, and for nothing else.
    """
    row, there = place_rows(rows, TOGETHER)
    hi, lo, tau, inverse, power, given = pull_threshold(
        hi_pointer, lo_pointer, tau_pointer, tau_stride, tau_high, tau_low, row, there, power_high,
        CDF, TOGETHER,
    )  # fmt: skip
    column = tl.arange(0, WIDTH)
    far = column.to(tl.int64)
    cost_at = cost_pointer + entries(row, cost_row, far * cost_column, TOGETHER)
    at = (x_pointer + entries(row, x_stride, column, TOGETHER), cost_at, cost_column)
    grad_at = grad_pointer + entries(row, grad_row, far * grad_column, TOGETHER)
    nothing = tl.zeros_like(hi.to(tl.float64 if STREAM else tl.float32))
    sums = pull_sums(
        at, grad_at, grad_column, there, n_columns, nothing, given,
        CDF, WHOLE, BY, TOGETHER, PIECES, WIDTH, EXACT, STREAM,
    )  # fmt: skip
    pull, dtau, ok = settle_pull(
        sums, grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low, row, there, hi, lo, tau, inverse,
        CDF, AT_MOST, ASKED,
    )  # fmt: skip
    tl.store(dbudget_pointer + row, pull.to(tl.float64), mask=ok)
    tl.store(dtau_pointer + row, dtau.to(tl.float64), mask=ok)
    write_pull(
        at, grad_at, grad_column, dx_pointer + entries(row, n_columns, column, TOGETHER),
        dcost_pointer + entries(row, n_columns, column, TOGETHER), ok, n_columns, given, pull, hi, lo,
        inverse, power, CDF, WHOLE, BY, TOGETHER, PIECES, WIDTH, EXACT, STREAM,
    )  # fmt: skip

    if not ORDINARY:
        rescue(
            there & ~ok, row, pull_row_exactly,
            (
                grad_pointer, grad_row, grad_column, x_pointer, x_stride, cost_pointer, cost_row, cost_column,
                hi_pointer, lo_pointer, dx_pointer, dcost_pointer, dbudget_pointer, dtau_pointer, n_columns,
                (grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low),
                (tau_pointer, tau_stride, tau_high, tau_low), joined(power_high, power_low),
                CDF, BY, AT_MOST, CHUNK,
            ),
            TOGETHER,
        )  # fmt: skip


@triton.jit
def pull_row_exactly(
    row, grad_pointer, grad_row, grad_column, x_pointer, x_stride, cost_pointer, cost_row, cost_column,
    hi_pointer, lo_pointer, dx_pointer, dcost_pointer, dbudget_pointer, dtau_pointer, n, grad_lo, tau, power,
    CDF: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row in float64, which is read again a chunk at a time."""
    source = (x_pointer + row * x_stride, cost_pointer + row * cost_row, cost_column, n)
    threshold = (tl.load(hi_pointer + row), tl.load(lo_pointer + row), number64(*tau, row), power)
    pull_exactly(
        source, grad_pointer + row * grad_row, grad_column, number64(*grad_lo, row), threshold,
        dx_pointer + row * n, dcost_pointer + row * n, dbudget_pointer + row, dtau_pointer + row,
        CDF, BY, AT_MOST, VALUE, CHUNK,
    )  # fmt: skip


KERNELS = (pull_budgets,)


def soft_budget_backward(
    grad: tuple[Tensor, int, int],
    grad_lo: layout.Values,
    source: tuple[Tensor, int],
    cost: tuple[Tensor, int, int],
    t: tuple[Tensor, Tensor],
    tau: layout.Values,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: int,
    n: int,
    F: cdfs.CDF,
    *,
    by: str,
    at_most: bool,
) -> None:
    """Fill the results: the gradients in the scores, the costs, the budget, and τ."""
    start, programs, power = _variant(rows, n, F, by, at_most, asked(grad_lo))
    arguments = (*grad, *grad_lo, *source, *cost, *t, *tau, *results, rows, n, *power)
    start(programs, *arguments)
    if not asked(grad_lo):
        choices = F.name, by, at_most
        native.prepare("soft_budget", source[0], start, programs, arguments, *choices, backward=True)


@functools.lru_cache(maxsize=1024)
def _variant(
    rows: int, n: int, F: cdfs.CDF, by: str, at_most: bool, asked: bool
) -> tuple[Variant, int, tuple[float, float]]:
    """What is launched, in how many programs, and the exponent of z."""
    tile = layout.pair_tile(rows, n)
    puller = variant(
        pull_budgets,
        CDF=layout.cdf_id(F.name), WHOLE=layout.whole(F), BY=BY[by], AT_MOST=at_most, ASKED=asked,
        TOGETHER=tile.together, PIECES=tile.pieces, WIDTH=tile.width,
        EXACT=n == tile.pieces * tile.width, STREAM=tile.streams, CHUNK=layout.RESCUE * tile.warps,
        num_warps=tile.warps, **layout.registers(),
    )  # fmt: skip
    return puller, cdiv(rows, tile.together), layout.power(F)
