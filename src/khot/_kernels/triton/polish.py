"""Thresholds with the digits of float64, of rows that programs share: what follows the kernels of `split`.

They find t by float32 arithmetic, with an error of some 1e-7 τ, on differences from the sample's threshold.
Here follow one evaluation in float64 and the step that it calls for, whose error is about the square of that.
Sums of tails are relative to the entries next to t, so that they do not underflow in a gap, where the step is
on log A = log B for the sums A of 1 − F above t and B of F below. Rows for which float32 does not suffice are
solved in float64 by one program.

1. to 3. as in :mod:`.split`.
4. `_polish_parts`.
5. `_write_fine`, unless only the threshold is asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.triton import layout
from khot._kernels.triton.fast import joined
from khot._kernels.triton.functions import (
    HUGE,
    OUTPUTS,
    chunks,
    exponential_tail,
    full_support,
    log_scales,
    median,
    pair,
    place,
    standardize,
)
from khot._kernels.triton.launch import launch
from khot._kernels.triton.resident import RESCUE_EVALUATIONS, number64
from khot._kernels.triton.solver import evaluate, solve_row, write_chunk
from khot._kernels.triton.split import BASE, HOPELESS, LEFT, STATE, STATUS, last_of_row, solve

__all__ = ["KERNELS", "soft_topk"]

# A step of up to so many τ leaves an error of at most half its square (times z with the normal CDF).
SHORT = tl.constexpr(5e-7)
FAR_OUT = tl.constexpr(36.0)  # z from which a tail that falls exponentially does so to the last digit
EXACT = tl.constexpr(1e-13)  # of a step's error in τ that kinks between t before and after may cause


@triton.jit
def _add_nearest(sums, given, x, valid, row, column):
    """The least finite entry above t and the greatest below."""
    up, down = sums
    hi, lo, tau, power = given[:4]
    CDF: tl.constexpr = given[4]
    z, _ = standardize(x, hi, lo, tau, CDF)
    finite = valid & (tl.abs(x) < float("inf"))
    above = z > median(power, CDF)
    up = tl.minimum(up, tl.min(tl.where(finite & above, x, float("inf")), axis=1))
    return up, tl.maximum(down, tl.max(tl.where(finite & ~above, x, float("-inf")), axis=1))


@triton.jit
def _add_sums(sums, given, x, valid, row, column):
    """The sums of :func:`.solver.evaluate`, and how many entries are so near a kink that t may cross it."""
    m, A, B, f_above, f_below, crossing = sums
    hi, lo, tau, near_up, near_down, power = given[:6]
    CDF: tl.constexpr = given[6]
    m_c, A_c, B_c, f_above_c, f_below_c, _, _ = evaluate(
        x, valid, hi, lo, tau, near_up, near_down, power, CDF
    )
    if not full_support(CDF):
        z, rest = standardize(x, hi, lo, tau, CDF)
        kink = valid & ((tl.abs(z) <= SHORT) | (tl.abs(rest) <= SHORT))
        crossing += tl.sum(tl.where(kink, 1, 0), axis=1)
    return m + m_c, A + A_c, B + B_c, f_above + f_above_c, f_below + f_below_c, crossing


@triton.jit
def _distance(entry, t, rest, tau):
    """How many τ the entry is from t; 0 if there is none."""
    return tl.where(tl.abs(entry) < float("inf"), tl.abs((entry - t) - rest) / tau, 0.0)


@triton.jit
def _of_parts(left, number, parts, PARTS: tl.constexpr, other):
    part = tl.arange(0, PARTS)
    return tl.load(left + number * parts + part, mask=part < parts, other=other, cache_modifier=".cg")


@triton.jit
def _relative_sum(left, number, parts, distances, nearest, PARTS: tl.constexpr, CDF: tl.constexpr):
    """The sum of what each part left relative to its own nearest entry, relative to the nearest of them."""
    v = _of_parts(left, number, parts, PARTS, 0.0)
    return tl.sum(
        tl.where(v > 0, v * tl.exp(log_scales(nearest, tl.where(v > 0, distances, nearest), CDF)), 0.0)
    )


@triton.jit
def _step(left, parts, hi, lo, k, tau, PARTS: tl.constexpr, CDF: tl.constexpr):
    """t after the step that the sums of all parts call for, and whether it is short enough to be the last."""
    up = tl.min(_of_parts(left, 6, parts, PARTS, float("inf")), axis=0)
    down = tl.max(_of_parts(left, 7, parts, PARTS, float("-inf")), axis=0)
    near_up, near_down = _distance(up, hi, lo, tau), _distance(down, hi, lo, tau)
    above = _distance(_of_parts(left, 6, parts, PARTS, float("inf")), hi, lo, tau)
    below = _distance(_of_parts(left, 7, parts, PARTS, float("-inf")), hi, lo, tau)
    excess = tl.sum(_of_parts(left, 0, parts, PARTS, 0.0)) - k
    A = _relative_sum(left, 1, parts, above, near_up, PARTS, CDF)
    B = _relative_sum(left, 2, parts, below, near_down, PARTS, CDF)
    f_above = _relative_sum(left, 3, parts, above, near_up, PARTS, CDF)
    f_below = _relative_sum(left, 4, parts, below, near_down, PARTS, CDF)
    crossing = tl.sum(_of_parts(left, 5, parts, PARTS, 0.0))

    a, b = tl.exp(log_scales(near_up * 0, near_up, CDF)), tl.exp(log_scales(near_up * 0, near_down, CDF))
    density = f_above * a + f_below * b
    step = ((B * b - A * a) + excess) / density
    limit: tl.constexpr = SHORT
    last = (tl.abs(step) <= limit) & (crossing * tl.abs(step) <= EXACT * density)
    t, rest = hi, lo + step * tau
    if full_support(CDF):
        log_step = (tl.log(B) - tl.log(A) + log_scales(near_up, near_down, CDF)) / (f_above / A + f_below / B)
        alike = excess == 0
        step = tl.where(alike, log_step, step)
        rest = lo + step * tau
        last = tl.abs(step) <= limit
        if exponential_tail(CDF):
            last = last | (alike & (tl.minimum(near_up, near_down) > FAR_OUT) & (tl.abs(step) < 1))
    else:  # no entry has f > 0: any t in [down, up − tau] will do, so the middle
        gap = (excess == 0) & (up - down >= tau)
        t = tl.where(gap, 0.5 * up + 0.5 * down, t)
        rest = tl.where(gap, -0.5 * tau, rest)
        last = last | gap
    hi, lo = pair(t, rest, True)
    return hi, lo, last & (tl.abs(hi) < HUGE)


@triton.jit(do_not_specialize=["parts", "length"])
def _polish_parts(
    x_pointer, x_stride, k_pointer, k_stride, k_high, k_low, tau_pointer, tau_stride, tau_high, tau_low,
    hi_pointer, lo_pointer, state_pointer, counter_pointer, left_pointer,
    n_columns, length, parts, power_high, power_low,
    CDF: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    state = state_pointer + row * STATE
    alone = tl.load(state + STATUS) == HOPELESS
    if ~alone | (part == 0):
        k = number64(k_pointer, k_stride, k_high, k_low, row)
        tau = number64(tau_pointer, tau_stride, tau_high, tau_low, row)
        power = joined(power_high, power_low)
        zero = tl.zeros((1,), tl.float64)
        if not alone:
            hi, lo = pair(tl.load(state + BASE), tl.load(hi_pointer + row) + tl.load(lo_pointer + row), True)
            up, down = chunks(
                _add_nearest, (zero + float("inf"), zero - float("inf")),
                (hi + zero, lo + zero, tau + zero, power, CDF),
                x_pointer, x_stride, row, part, n_columns, length, tl.float64, CHUNK,
            )  # fmt: skip
            near_up, near_down = _distance(up, hi, lo, tau), _distance(down, hi, lo, tau)
            sums = chunks(
                _add_sums, (zero, zero, zero, zero, zero, zero),
                (hi + zero, lo + zero, tau + zero, near_up, near_down, power, CDF),
                x_pointer, x_stride, row, part, n_columns, length, tl.float64, CHUNK,
            )  # fmt: skip
            left = left_pointer + row * LEFT * parts
            numbers = sums + (up, down)  # noqa: RUF005
            for i in tl.static_range(8):
                tl.store(left + i * parts + part, tl.sum(numbers[i]))
            if last_of_row(counter_pointer + row, parts):
                hi, lo, last = _step(left, parts, hi, lo, k, tau, PARTS, CDF)
                tl.store(hi_pointer + row, hi)
                tl.store(lo_pointer + row, lo)
                alone = ~last
        if alone:
            hi, lo = solve_row(
                x_pointer, x_stride, row, n_columns, k, tau, power, RESCUE_EVALUATIONS, CDF, CHUNK, tl.float64
            )
            tl.store(hi_pointer + row + tl.arange(0, 1), hi)
            tl.store(lo_pointer + row + tl.arange(0, 1), lo)


@triton.jit(do_not_specialize=["parts", "length"])
def _write_fine(
    x_pointer, x_stride, tau_pointer, tau_stride, tau_high, tau_low, out_pointer, hi_pointer, lo_pointer,
    n_columns, length, parts, power_high, power_low,
    CDF: tl.constexpr, OUTPUT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    one = row + tl.arange(0, 1)
    hi, lo = tl.load(hi_pointer + one), tl.load(lo_pointer + one)
    tau = number64(tau_pointer, tau_stride, tau_high, tau_low, row) + hi * 0
    chunks(
        write_chunk, (), (out_pointer, n_columns, hi, lo, tau, joined(power_high, power_low), CDF, OUTPUT),
        x_pointer, x_stride, row, part, n_columns, length, tl.float64, CHUNK,
    )  # fmt: skip


KERNELS = (_polish_parts, _write_fine)


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
    """Fill out, unless only the threshold is asked for, hi and lo."""
    state, counter, left, cut = solve(source, k, tau, hi, lo, rows, n, F, fine=True)
    which = {
        "CDF": layout.cdf_id(F.name), "CHUNK": layout.RESCUE * cut.warps, "num_warps": cut.warps,
        **layout.registers(),
    }  # fmt: skip
    launch(
        _polish_parts, rows * cut.parts,
        *source, *k, *tau, hi, lo, state, counter, left, n, cut.length, cut.parts, *layout.power(F),
        **which, PARTS=triton.next_power_of_2(cut.parts),
    )  # fmt: skip
    if output != "threshold":
        launch(
            _write_fine, rows * cut.parts,
            *source, *tau, out, hi, lo, n, cut.length, cut.parts, *layout.power(F),
            **which, OUTPUT=OUTPUTS[output],
        )  # fmt: skip
