"""Soft budgets by score for rows that stay on chip, in float32.

As :mod:`.resident`, with a sum of costs in the place of a count: one read of the scores and of the costs, few
evaluations (:mod:`.threshold`, with the terms of :mod:`.costs`), one write. What float32 does not decide (a
threshold in a gap, where costs of many sizes meet; a budget that all entries together just spend) is solved
again, in the same program, in float64 by :mod:`.exact`.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.triton import costs, layout
from khot._kernels.triton.costs import as_bits, paid_moments, paid_terms, unit_of_costs
from khot._kernels.triton.exact import find_exactly, number64, write_exactly
from khot._kernels.triton.exact_sums import BY_SCORE
from khot._kernels.triton.fast import LOG2E, any_row, joined, reciprocal, two_sum, wide
from khot._kernels.triton.functions import VALUE
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.resident import (
    EVALUATIONS,
    entries,
    inside,
    load_rows,
    numbers,
    place_rows,
    result,
    row_values,
)
from khot._kernels.triton.terms import holds, term_count, unit
from khot._kernels.triton.threshold import guess, iterate, over, taylor_step

__all__ = ["KERNELS", "load_costs", "soft_budget"]

CLEAR = tl.constexpr(1e-5)  # of the budget: what t = 0 spends more or less than that is no matter of rounding


@triton.jit
def load_costs(
    at, column_stride, x, there, n,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The costs of the entries x, in the same pieces. What is masked, or not there, costs nothing."""
    column = tl.arange(0, WIDTH)
    step = (tl.zeros((), tl.int64) + WIDTH) * column_stride
    w = ()
    for i in tl.static_range(PIECES):
        valid = inside(there, column + i * WIDTH, n, TOGETHER, EXACT)
        piece = tl.load(at + i * step, mask=valid, other=0.0).to(tl.float32)
        w = w + (tl.where(x[i] == float("-inf"), 0.0, piece),)  # type: ignore[assignment]  # noqa: RUF005
    return w


@triton.jit
def _in_units(x, w, TOGETHER: tl.constexpr, PIECES: tl.constexpr):
    """The entries as pairs, with costs in their unit; and what :func:`.costs.unit_of_costs` has."""
    most = as_bits(w[0])
    for i in tl.static_range(1, PIECES):
        most = tl.maximum(most, as_bits(w[i]))
    per, good = unit_of_costs(tl.max(most, axis=0 if TOGETHER == 1 else 1))
    pairs = ()
    for i in tl.static_range(PIECES):
        pairs = pairs + ((x[i], w[i] * wide(per, TOGETHER)),)  # type: ignore[assignment]  # noqa: RUF005
    return pairs, per, good


@triton.jit
def _find(
    x, at, origin, there, n_columns, k, k_rest, good, tau, power, evaluations, grain, floor,
    CDF: tl.constexpr, WHOLE: tl.constexpr, AT_MOST: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, ORDINARY: tl.constexpr,
):  # fmt: skip
    """t of rows, where entries spend k, in the units of their costs; and which of them have one. Also
    returned are 1/τ and what k leaves of all costs."""
    n, n_rest, first, second = over(
        x, at, n_columns, paid_moments, (wide(origin, TOGETHER), grain), 4, TOGETHER, PIECES, WIDTH, False
    )
    rest = (n - k) + (n_rest - k_rest)
    n += n_rest
    inverse = reciprocal(tau)
    inverse = inverse * (2 - tau * inverse)  # to the last digit
    scale = inverse * unit(CDF)
    finite = (tau > 1e-25) & (tau < 1e25) & (second < float("inf")) & (k > 0) & (k < float("inf"))
    ok = good & there & finite
    loose = ok & ~ok
    if AT_MOST:
        # whether t = 0 spends less than there is, or more, or whether that is not clear
        sums = over(
            x, at, n_columns, paid_terms,
            (0.0, 0.0, wide(scale, TOGETHER), power, CDF, WHOLE, grain),
            term_count(CDF) + 1, TOGETHER, PIECES, WIDTH, False,
        )  # fmt: skip
        _, miss, _, _, _, _, _, _ = taylor_step(sums, k, k_rest, 0, k * 0, power, CDF, True)
        clear = tl.abs(miss) > CLEAR * tl.minimum(tl.maximum(k, 1.0), n)
        loose = ok & clear & (miss < 0)
        ok = ok & clear
    ok = ok & (loose | ((rest > 0) & holds(n, rest, power, CDF)))

    offset = first * reciprocal(n)
    variance = tl.maximum(second * reciprocal(n) - offset * offset, 0.0)
    hi, offset, deviation, per_deviation, normal = guess(n, offset, variance, k, tau, power, CDF)
    hi += origin
    ok = ok & (loose | (tl.abs(hi) < 1e30))
    hi = tl.where(loose, 0.0, hi)
    lo = hi * 0
    if ORDINARY:
        for _ in tl.static_range(ORDINARY):
            sums = over(
                x, at, n_columns, paid_terms,
                (
                    wide(hi, TOGETHER), wide(lo * scale, TOGETHER), wide(scale, TOGETHER), power, CDF, WHOLE,
                    grain,
                ),
                term_count(CDF) + 1, TOGETHER, PIECES, WIDTH, False,
            )  # fmt: skip
            _, _, h, _, _, _, _, _ = taylor_step(sums, k, k_rest, 0, lo, power, CDF, True)
            hi, lo = two_sum(hi, lo + h * tau)
    else:
        # bounds on any quantile (Cantelli), a little wider than they need to be; and the costs in a τ
        ratio = tl.sqrt(k * reciprocal(rest))
        low = (origin + offset) - 1.001 * deviation * ratio
        high = (origin + offset) + 1.001 * deviation * reciprocal(ratio)
        crowd = n * tl.exp2(normal * normal * (-0.5 * LOG2E)) * 0.3989423 * tau * per_deviation
        hi, lo, solved = iterate(
            x, at, n_columns, hi, lo, low, high, crowd, loose | ~ok, n, k, k_rest, tau, inverse,
            power, evaluations, CDF, WHOLE, TOGETHER, PIECES, WIDTH, False,
            grain=grain, floor=floor, PAID=True,
        )  # fmt: skip
        ok = ok & solved
    if AT_MOST:
        ok = ok & (loose | (hi > 0))
    return hi, lo, ok, inverse, rest


@triton.jit
def _rescue(
    x_pointer, x_stride, cost_pointer, cost_row, cost_column, out_pointer, hi_pointer, lo_pointer, row, n,
    budget, tau, slack, power, CDF: tl.constexpr, AT_MOST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row in float64, which is read again a chunk at a time."""
    source = (x_pointer + row * x_stride, cost_pointer + row * cost_row, cost_column, n)
    hi, lo = find_exactly(source, budget, tau, slack, power, CDF, BY_SCORE, AT_MOST, CHUNK)
    tl.store(hi_pointer + row, hi)
    tl.store(lo_pointer + row, lo)
    write_exactly(out_pointer + row * n, source, (hi, lo, tau, power), CDF, BY_SCORE, VALUE, CHUNK)


@triton.jit(do_not_specialize=["rows", "evaluations"])
def solve_budgets(
    x_pointer, x_stride, cost_pointer, cost_row, cost_column,
    budget_pointer, budget_stride, budget_high, budget_low, budget_rest,
    tau_pointer, tau_stride, tau_high, tau_low, out_pointer, hi_pointer, lo_pointer,
    rows, n_columns, evaluations, slack, grain, floor, power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr, AT_MOST: tl.constexpr, TOGETHER: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr,
    ORDINARY: tl.constexpr = 0,
):  # fmt: skip
    """`TOGETHER` rows of at most `PIECES`·`WIDTH` entries each. ORDINARY is as for
    :func:`.resident.solve_rows`."""
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    at = x_pointer + entries(row, x_stride, column, TOGETHER)
    x = load_rows(at, there, n_columns, TOGETHER, PIECES, WIDTH, EXACT)
    cost_at = cost_pointer + entries(row, cost_row, column.to(tl.int64) * cost_column, TOGETHER)
    w = load_costs(cost_at, cost_column, x, there, n_columns, TOGETHER, PIECES, WIDTH, EXACT)
    pairs, per, good = _in_units(x, w, TOGETHER, PIECES)
    origin = tl.load(x_pointer + row * x_stride, mask=there, other=0.0).to(tl.float32)
    origin = tl.where(tl.abs(origin) < float("inf"), origin, 0.0)
    k, k_rest = numbers(budget_pointer, budget_stride, budget_high, budget_low, row, there)
    tau, _ = numbers(tau_pointer, tau_stride, tau_high, tau_low, row, there)
    power = tl.zeros((), tl.float32) + power_high
    hi, lo, ok, inverse, rest = _find(
        pairs, at, origin, there, n_columns, k * per, k_rest * per, good, tau, power, evaluations,
        grain, floor, CDF, WHOLE, AT_MOST, TOGETHER, PIECES, WIDTH, ORDINARY,
    )  # fmt: skip

    tl.store(hi_pointer + row, hi.to(tl.float64), mask=ok)
    tl.store(lo_pointer + row, lo.to(tl.float64), mask=ok)
    values = row_values(hi, lo, inverse, k * per > rest, power, CDF, TOGETHER)
    to = out_pointer + entries(row, n_columns, column, TOGETHER)
    for i in tl.static_range(PIECES):
        valid = inside(ok, column + i * WIDTH, n_columns, TOGETHER, EXACT)
        out = result(x[i], values, CDF, VALUE, WHOLE).to(out_pointer.dtype.element_ty)
        tl.store(to + i * WIDTH, out, mask=valid)

    if not ORDINARY:
        bad = there & ~ok
        if any_row(bad, TOGETHER):
            start = tl.program_id(0).to(tl.int64) * TOGETHER
            for r in range(TOGETHER):
                if any_row(bad & (row == start + r), TOGETHER):
                    budget = number64(budget_pointer, budget_stride, budget_high, budget_low, start + r)
                    _rescue(
                        x_pointer, x_stride, cost_pointer, cost_row, cost_column,
                        out_pointer, hi_pointer, lo_pointer, start + r, n_columns,
                        budget + budget_rest,
                        number64(tau_pointer, tau_stride, tau_high, tau_low, start + r), slack,
                        joined(power_high, power_low), CDF, AT_MOST, CHUNK,
                    )  # fmt: skip


KERNELS = (solve_budgets,)


def soft_budget(
    source: tuple[Tensor, int],
    cost: tuple[Tensor, int, int],
    budget: tuple[Tensor | None, int, float, float, float],
    tau: layout.Values,
    out: Tensor,
    hi: Tensor,
    lo: Tensor,
    rows: int,
    n: int,
    F: cdfs.CDF,
    *,
    at_most: bool,
    slack: float,
) -> None:
    """Fill out, hi and lo. The budget is as for :func:`.exact.solve`."""
    start, programs, numbers = _variant(rows, n, F, at_most)
    start(programs, *source, *cost, *budget, *tau, out, hi, lo, rows, n, EVALUATIONS, slack, *numbers)


@functools.lru_cache(maxsize=1024)
def _variant(rows: int, n: int, F: cdfs.CDF, at_most: bool) -> tuple[Variant, int, tuple[float, ...]]:
    """What is launched, in how many programs; and the grain, the floor of Σ w f, and the exponent of z."""
    tile = layout.pair_tile(rows, n)
    solver = variant(
        solve_budgets,
        CDF=layout.cdf_id(F.name), WHOLE=layout.whole(F), AT_MOST=at_most,
        TOGETHER=tile.together, PIECES=tile.pieces, WIDTH=tile.width,
        EXACT=n == tile.pieces * tile.width, CHUNK=layout.RESCUE * tile.warps,
        num_warps=tile.warps, **layout.registers(),
    )  # fmt: skip
    numbers = costs.grain(n), costs.least_mass(n), *layout.power(F)
    return solver, -(-rows // tile.together), numbers
