"""Backward of the soft top-k for few, very long rows, which many programs share: two launches, and a fill of
the counters, before which there is no launch that could do it.

`_pull_parts` leaves the sums of every part; the program that is the last of its row to finish adds them up.
`_gradient_parts` writes dL/dx. A row whose densities all but vanish is summed again by that last program,
in float64 by the functions of :mod:`.exact_backward`, which its parts are then written with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.triton import layout
from khot._kernels.triton.exact import number64
from khot._kernels.triton.exact_backward import pull_sums_exactly, settle_pull, write_pull_exactly
from khot._kernels.triton.exact_sums import BY_COUNT
from khot._kernels.triton.fast import inverse_of, joined, split
from khot._kernels.triton.functions import OUTPUTS, place
from khot._kernels.triton.launch import launch
from khot._kernels.triton.resident_backward import (
    FADED,
    asked,
    pull_sums,
    write_pull,
)
from khot._kernels.triton.sizes import next_power_of_2
from khot._kernels.triton.split import last_of_row, total_of_parts
from khot._kernels.triton.terms import unit

__all__ = ["KERNELS", "soft_topk_backward"]

LEFT = tl.constexpr(4)  # numbers that a part leaves
# the numbers of a row: dL/dk in float32, or NaN; and what the float64 functions need otherwise
PULL, NEAR, SPREAD, UP, DOWN, AT_UP, AT_DOWN = (tl.constexpr(i) for i in range(7))
STATE = tl.constexpr(7)


@triton.jit
def _threshold(hi_pointer, lo_pointer, tau_pointer, tau_stride, tau_high, tau_low, row):
    """hi, lo and τ in float64; hi, lo and 1/τ in float32."""
    hi64, lo64 = tl.load(hi_pointer + row), tl.load(lo_pointer + row)
    tau64 = number64(tau_pointer, tau_stride, tau_high, tau_low, row)
    hi, rest = split(hi64)
    return hi64, lo64, tau64, hi, rest + lo64.to(tl.float32), inverse_of(tau64.to(tl.float32))


@triton.jit(do_not_specialize=["parts", "length"])
def _pull_parts(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low,
    x_pointer, x_stride, hi_pointer, lo_pointer,
    tau_pointer, tau_stride, tau_high, tau_low, dk_pointer, dtau_pointer,
    state_pointer, counter_pointer, left_pointer, n_columns, length, parts, power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr, OUTPUT: tl.constexpr, ASKED: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    hi64, lo64, tau64, hi, lo, inverse = _threshold(
        hi_pointer, lo_pointer, tau_pointer, tau_stride, tau_high, tau_low, row
    )
    power = tl.zeros((), tl.float32) + power_high
    scale = inverse * unit(CDF)
    start = part.to(tl.int64) * length
    column = tl.arange(0, WIDTH)
    mine = tl.minimum(n_columns - start, length).to(tl.int32)
    sums = pull_sums(
        x_pointer + row * x_stride + start + column,
        grad_pointer + row * grad_row + (start + column) * grad_column,
        grad_column, mine, hi, lo * scale, scale, power, CDF, WHOLE, OUTPUT, PIECES, WIDTH,
    )  # fmt: skip
    left = left_pointer + row * LEFT * parts
    for i in tl.static_range(LEFT):
        tl.store(left + i * parts + part, sums[i])
    if last_of_row(counter_pointer + row, parts):
        f_sum, u_sum = total_of_parts(left, 0, parts, PARTS), total_of_parts(left, 1, parts, PARTS)
        fz, uz = total_of_parts(left, 2, parts, PARTS), total_of_parts(left, 3, parts, PARTS)
        pull = u_sum / f_sum
        grad_lo = number64(grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low, row)
        if ASKED:
            pull -= grad_lo * tau64 / f_sum
        dtau = (pull * fz - uz) / tau64 * (1 / unit(CDF))
        state = state_pointer + row * STATE
        ok = (f_sum > FADED) & (tl.abs(hi) < 1e30) & (tl.abs(pull) < 1e37) & (tl.abs(dtau) < 1e37)
        ok = ok & (tau64 > 1e-25) & (tau64 < 1e25)
        tl.store(state + PULL, tl.where(ok, pull, float("nan")))
        if ok:
            tl.store(dk_pointer + row, pull)
            tl.store(dtau_pointer + row, dtau)
        else:
            x_at, grad_at = x_pointer + row * x_stride, grad_pointer + row * grad_row
            source, threshold = (x_at, x_at, 0, n_columns), (hi64, lo64, tau64, joined(power_high, power_low))
            near, totals = pull_sums_exactly(
                source, grad_at, grad_column, threshold, CDF, BY_COUNT, OUTPUT, CHUNK
            )
            dk, careful_dtau, spread, gap = settle_pull(
                near, totals, source, grad_at, grad_column, grad_lo, threshold,
                CDF, BY_COUNT, False, OUTPUT, CHUNK,
            )  # fmt: skip
            tl.store(dk_pointer + row, dk)
            tl.store(dtau_pointer + row, careful_dtau)
            tl.store(state + NEAR, near)
            tl.store(state + SPREAD, spread)
            for i in tl.static_range(4):
                tl.store(state + (UP + i), gap[i])


@triton.jit(do_not_specialize=["parts", "length"])
def _gradient_parts(
    grad_pointer, grad_row, grad_column, x_pointer, x_stride, hi_pointer, lo_pointer,
    tau_pointer, tau_stride, tau_high, tau_low, dx_pointer, state_pointer, n_columns, length, parts,
    power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr, OUTPUT: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows first: the cache still has them
    row, part = (program // parts).to(tl.int64), program % parts
    hi64, lo64, tau64, hi, lo, inverse = _threshold(
        hi_pointer, lo_pointer, tau_pointer, tau_stride, tau_high, tau_low, row
    )
    state = state_pointer + row * STATE
    pull = tl.load(state + PULL)
    start = part.to(tl.int64) * length
    mine = tl.minimum(n_columns - start, length).to(tl.int32)
    x_at, dx_at = x_pointer + row * x_stride + start, dx_pointer + row * n_columns + start
    grad_at = grad_pointer + row * grad_row + start * grad_column
    if pull == pull:
        power = tl.zeros((), tl.float32) + power_high
        scale = inverse * unit(CDF)
        column = tl.arange(0, WIDTH)
        write_pull(
            x_at + column, grad_at + column.to(tl.int64) * grad_column, dx_at + column,
            grad_column, mine, pull == pull, hi, lo * scale, scale, pull.to(tl.float32), inverse, power,
            CDF, WHOLE, OUTPUT, PIECES, WIDTH,
        )  # fmt: skip
    else:
        gap = (
            tl.load(state + UP), tl.load(state + DOWN), tl.load(state + AT_UP), tl.load(state + AT_DOWN)
        )  # fmt: skip
        write_pull_exactly(
            dx_at, dx_at, (x_at, x_at, 0, mine), grad_at, grad_column,
            (hi64, lo64, tau64, joined(power_high, power_low)), tl.load(state + NEAR), 0.0,
            tl.load(state + SPREAD), gap, CDF, BY_COUNT, False, OUTPUT, CHUNK,
        )  # fmt: skip


KERNELS = (_pull_parts, _gradient_parts)


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
    dx, dk, dtau = results
    cut = layout.cut(rows, n)
    state = dk.new_empty(rows, STATE.value)
    left = dk.new_empty(rows, LEFT.value, cut.parts)
    counter = torch.zeros(rows, dtype=torch.int32, device=dk.device)
    programs, given = rows * cut.parts, (*source, *t, *tau)
    which = {
        "CDF": layout.cdf_id(F.name), "WHOLE": layout.whole(F), "OUTPUT": OUTPUTS[output],
        "PIECES": cut.pieces, "WIDTH": cut.width, "CHUNK": layout.RESCUE * cut.warps,
        "num_warps": cut.warps, **layout.registers(),
    }  # fmt: skip
    launch(
        _pull_parts, programs,
        *grad, *grad_lo, *given, dk, dtau, state, counter, left, n, cut.length, cut.parts, *layout.power(F),
        **which, ASKED=asked(grad_lo), PARTS=next_power_of_2(cut.parts),
    )  # fmt: skip
    launch(
        _gradient_parts, programs,
        *grad, *given, dx, state, n, cut.length, cut.parts, *layout.power(F), **which,
    )  # fmt: skip
