"""Backward of soft budgets by score for rows that a program reads at once, in float32.

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
from khot._kernels.triton import layout
from khot._kernels.triton.exact import number64
from khot._kernels.triton.exact_backward import pull_exactly
from khot._kernels.triton.exact_sums import BY_SCORE
from khot._kernels.triton.fast import any_row, joined, plus, reciprocal, split, total, wide
from khot._kernels.triton.functions import VALUE
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.resident import entries, inside, numbers, place_rows, result, row_values
from khot._kernels.triton.resident_backward import FADED, asked
from khot._kernels.triton.terms import density, unit

__all__ = ["KERNELS", "soft_budget_backward"]


@triton.jit
def _terms(
    x_at, cost_at, grad_at, valid, hi, shift, scale, power, CDF: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """x; w f; u = v f for the incoming gradient v; and z in the units of :mod:`.terms`."""
    x = tl.load(x_at, mask=valid, other=float("-inf")).to(tl.float32)
    v = tl.load(grad_at, mask=valid, other=0.0).to(tl.float32)
    w = tl.load(cost_at, mask=valid, other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")  # others take no part, whatever their gradient and their cost
    z = tl.where(finite, (x - hi) * scale - shift, -1e4)
    f = density(z, power, CDF, WHOLE)
    return x, tl.where(finite, w * f, 0.0), tl.where(finite, v * f, 0.0), z


@triton.jit(do_not_specialize=["rows"])
def pull_budgets(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low,
    x_pointer, x_stride, cost_pointer, cost_row, cost_column, hi_pointer, lo_pointer,
    tau_pointer, tau_stride, tau_high, tau_low, dx_pointer, dcost_pointer, dbudget_pointer, dtau_pointer,
    rows, n_columns, power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr, AT_MOST: tl.constexpr, ASKED: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
    CHUNK: tl.constexpr, ORDINARY: tl.constexpr = False,
):  # fmt: skip
    """dL/dx = (u − w f·pull)/τ and dL/dw = −y·pull with pull = dL/dB = Σu/Σwf, less τ/Σwf times the
    gradient in lo if that is ASKED for; dL/dτ = (pull·Σwfz − Σuz)/τ. AT_MOST a budget that is not spent pulls
    nothing.

    ORDINARY leaves out the rescue: for counting instructions, and for nothing else.
    """
    row, there = place_rows(rows, TOGETHER)
    hi, rest = split(tl.load(hi_pointer + row, mask=there, other=0.0))
    lo = rest + tl.load(lo_pointer + row, mask=there, other=0.0).to(tl.float32)
    tau = numbers(tau_pointer, tau_stride, tau_high, tau_low, row, there)[0]
    inverse = reciprocal(tau)
    inverse = inverse * (2 - tau * inverse)  # to the last digit
    center, scale = wide(hi, TOGETHER), wide(inverse * unit(CDF), TOGETHER)
    shift = wide(lo * inverse * unit(CDF), TOGETHER)
    power = tl.zeros((), tl.float32) + power_high

    column = tl.arange(0, WIDTH)
    far = column.to(tl.int64)
    x_at = x_pointer + entries(row, x_stride, column, TOGETHER)
    cost_at = cost_pointer + entries(row, cost_row, far * cost_column, TOGETHER)
    grad_at = grad_pointer + entries(row, grad_row, far * grad_column, TOGETHER)
    cost_step = (tl.zeros((), tl.int64) + WIDTH) * cost_column
    grad_step = (tl.zeros((), tl.int64) + WIDTH) * grad_column
    held = ()
    for i in tl.static_range(PIECES):
        valid = inside(there, column + i * WIDTH, n_columns, TOGETHER, EXACT)
        _, paid, u, z = _terms(
            x_at + i * WIDTH, cost_at + i * cost_step, grad_at + i * grad_step, valid,
            center, shift, scale, power, CDF, WHOLE,
        )  # fmt: skip
        held = plus(held, (paid, u, paid * z, u * z))
    mass, u_sum, moment, u_moment = total(held, TOGETHER)
    fixed = (hi == 0) & (lo == 0) if AT_MOST else hi != hi
    pull = u_sum * reciprocal(mass)
    if ASKED:
        grad_lo = numbers(grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low, row, there)[0]
        pull -= grad_lo * tau * reciprocal(mass)
    pull = tl.where(fixed, 0.0, pull)
    dtau = (pull * moment - u_moment) * inverse * (1 / unit(CDF))
    ok = (mass > FADED) | fixed
    ok = ok & (tl.abs(hi) < 1e30) & (tl.abs(pull) < float("inf")) & (tl.abs(dtau) < float("inf"))
    ok = ok & (tau > 1e-25) & (tau < 1e25) & there
    tl.store(dbudget_pointer + row, pull.to(tl.float64), mask=ok)
    tl.store(dtau_pointer + row, dtau.to(tl.float64), mask=ok)

    values = row_values(hi, lo, inverse, hi != hi, power, CDF, TOGETHER)
    dx_at = dx_pointer + entries(row, n_columns, column, TOGETHER)
    dcost_at = dcost_pointer + entries(row, n_columns, column, TOGETHER)
    share, per = wide(pull, TOGETHER), wide(inverse, TOGETHER)
    for i in tl.static_range(PIECES):
        valid = inside(ok, column + i * WIDTH, n_columns, TOGETHER, EXACT)
        x, paid, u, _ = _terms(
            x_at + i * WIDTH, cost_at + i * cost_step, grad_at + i * grad_step, valid,
            center, shift, scale, power, CDF, WHOLE,
        )  # fmt: skip
        dx = (u - paid * share) * per
        tl.store(dx_at + i * WIDTH, dx.to(dx_pointer.dtype.element_ty), mask=valid)
        dcost = tl.where(x == float("-inf"), 0.0, -share * result(x, values, CDF, VALUE, WHOLE))
        tl.store(dcost_at + i * WIDTH, dcost.to(dcost_pointer.dtype.element_ty), mask=valid)

    if not ORDINARY:
        bad = there & ~ok
        if any_row(bad, TOGETHER):
            start = tl.program_id(0).to(tl.int64) * TOGETHER
            for r in range(TOGETHER):
                if any_row(bad & (row == start + r), TOGETHER):
                    _rescue(
                        grad_pointer, grad_row, grad_column, x_pointer, x_stride,
                        cost_pointer, cost_row, cost_column, hi_pointer, lo_pointer,
                        dx_pointer, dcost_pointer, dbudget_pointer, dtau_pointer, start + r, n_columns,
                        number64(grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low, start + r),
                        number64(tau_pointer, tau_stride, tau_high, tau_low, start + r),
                        joined(power_high, power_low), CDF, AT_MOST, CHUNK,
                    )  # fmt: skip


@triton.jit
def _rescue(
    grad_pointer, grad_row, grad_column, x_pointer, x_stride, cost_pointer, cost_row, cost_column,
    hi_pointer, lo_pointer, dx_pointer, dcost_pointer, dbudget_pointer, dtau_pointer, row, n,
    grad_lo, tau, power, CDF: tl.constexpr, AT_MOST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row in float64, which is read again a chunk at a time."""
    source = (x_pointer + row * x_stride, cost_pointer + row * cost_row, cost_column, n)
    threshold = (tl.load(hi_pointer + row), tl.load(lo_pointer + row), tau, power)
    pull_exactly(
        source, grad_pointer + row * grad_row, grad_column, grad_lo, threshold,
        dx_pointer + row * n, dcost_pointer + row * n, dbudget_pointer + row, dtau_pointer + row,
        CDF, BY_SCORE, AT_MOST, VALUE, CHUNK,
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
    at_most: bool,
) -> None:
    """Fill the results: the gradients in the scores, the costs, the budget, and τ."""
    start, programs, power = _variant(rows, n, F, at_most, asked(grad_lo))
    start(programs, *grad, *grad_lo, *source, *cost, *t, *tau, *results, rows, n, *power)


@functools.lru_cache(maxsize=1024)
def _variant(
    rows: int, n: int, F: cdfs.CDF, at_most: bool, asked: bool
) -> tuple[Variant, int, tuple[float, float]]:
    """What is launched, in how many programs, and the exponent of z."""
    tile = layout.pair_tile(rows, n)
    puller = variant(
        pull_budgets,
        CDF=layout.cdf_id(F.name), WHOLE=layout.whole(F), AT_MOST=at_most, ASKED=asked,
        TOGETHER=tile.together, PIECES=tile.pieces, WIDTH=tile.width,
        EXACT=n == tile.pieces * tile.width, CHUNK=layout.RESCUE * tile.warps,
        num_warps=tile.warps, **layout.registers(),
    )  # fmt: skip
    return puller, -(-rows // tile.together), layout.power(F)
