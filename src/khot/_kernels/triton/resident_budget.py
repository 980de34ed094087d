"""Soft budgets of rows that stay on chip or stream past one program, in float32.

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
from khot._kernels.triton import costs, layout, native
from khot._kernels.triton.costs import (
    as_bits,
    levels,
    load_pair,
    moment_count,
    paid_count,
    paid_moments,
    paid_terms,
    priced,
    unit_of_costs,
)
from khot._kernels.triton.exact import find_exactly, number64, write_exactly
from khot._kernels.triton.exact_sums import BY, BY_SCORE, BY_VALUE
from khot._kernels.triton.fast import LOG2E, inverse_of, joined, reciprocal, wide
from khot._kernels.triton.functions import VALUE
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.resident import (
    EVALUATIONS,
    entries,
    inside,
    numbers,
    place_rows,
    rescue,
    result,
    row_values,
)
from khot._kernels.triton.sizes import cdiv
from khot._kernels.triton.terms import holds, unit
from khot._kernels.triton.threshold import (
    FLUSH,
    guess,
    guess_by_value,
    iterate,
    min_max,
    over,
    taylor_step,
)

__all__ = [
    "EVALUATIONS",
    "KERNELS",
    "bracket",
    "dearest",
    "facts_of",
    "guess_of",
    "origin_of",
    "share_of",
    "soft_budget",
    "spends_at_zero",
    "write_shares",
]

CLEAR = tl.constexpr(1e-5)  # of the budget: what t = 0 spends more or less than that is no matter of rounding


@triton.jit
def _load_pairs(
    at, there, n, TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """The entries of rows as pairs, in pieces, with costs in their unit; and what
    :func:`.costs.unit_of_costs` has."""
    column = tl.arange(0, WIDTH)
    held = ()
    for i in tl.static_range(PIECES):
        valid = inside(there, column + i * WIDTH, n, TOGETHER, EXACT)
        held = held + (load_pair(at, i * WIDTH, valid),)  # type: ignore[assignment]  # noqa: RUF005
    most = as_bits(held[0][1])  # type: ignore[misc]
    for i in tl.static_range(1, PIECES):
        most = tl.maximum(most, as_bits(held[i][1]))
    per, good = unit_of_costs(tl.max(most, axis=0 if TOGETHER == 1 else 1))
    pairs = ()
    for i in tl.static_range(PIECES):
        pair = (held[i][0], held[i][1] * wide(per, TOGETHER))
        pairs = pairs + (pair,)  # type: ignore[assignment]  # noqa: RUF005
    return pairs, per, good


@triton.jit
def dearest(at, n, WIDTH: tl.constexpr):
    """The bits of the dearest cost of a row that streams past, or of a part of one."""
    column = tl.arange(0, WIDTH)
    most = tl.zeros((WIDTH,), tl.uint32)
    for start in range(0, n, WIDTH):
        most = tl.maximum(most, as_bits(load_pair(at, start, column + start < n)[1]))
    return tl.max(most, axis=0)


@triton.jit
def bracket(
    x, at, n, per, quantile,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Between which thresholds all entries of a row have the same share (:func:`.costs.levels`)."""
    if STREAM:
        column = tl.arange(0, WIDTH)
        low, high = tl.full((WIDTH,), float("inf"), tl.float32), tl.full((WIDTH,), float("-inf"), tl.float32)
        for start in range(0, n, WIDTH):
            score, w = load_pair(at, start, column + start < n)
            least, greatest = levels(score, w * per, quantile)
            low, high = tl.minimum(low, least), tl.maximum(high, greatest)
    else:
        low, high = levels(x[0][0], x[0][1], wide(quantile, TOGETHER))
        for i in tl.static_range(1, PIECES):
            least, greatest = levels(x[i][0], x[i][1], wide(quantile, TOGETHER))
            low, high = tl.minimum(low, least), tl.maximum(high, greatest)
    return tl.reduce((low, high), 0 if TOGETHER == 1 else 1, min_max)


@triton.jit
def origin_of(x_pointer, x_stride, row, there, BY: tl.constexpr):
    """What scores are less by in the moments of rows."""
    if BY == BY_SCORE:
        origin = tl.load(x_pointer + row * x_stride, mask=there, other=0.0).to(tl.float32)
        return tl.where(tl.abs(origin) < float("inf"), origin, 0.0)
    else:
        return row.to(tl.float32) * 0


@triton.jit
def facts_of(found, k, k_rest, tau):
    """From moments, and a budget in the same unit: all costs, what the budget leaves of them, 1/τ, and which
    rows float32 may do."""
    n, n_rest, second = found[0], found[1].to(tl.float32), found[3].to(tl.float32)
    rest = ((n - k) + (n_rest - k_rest)).to(tl.float32)
    n = (n + n_rest).to(tl.float32)
    finite = (tau > 1e-25) & (tau < 1e25) & (second < float("inf")) & (k > 0) & (k < float("inf"))
    return n, rest, inverse_of(tau), finite


@triton.jit
def guess_of(found, origin, n, rest, k, tau, power, CDF: tl.constexpr, BY: tl.constexpr):
    """t from moments; bounds on it, by score; the costs in a τ; and, by value, where F is k/n, times τ, which
    :func:`bracket` has the bounds from."""
    if BY == BY_VALUE:
        moments_ = (
            found[2].to(tl.float32), found[3].to(tl.float32), found[4].to(tl.float32),
            found[5].to(tl.float32), found[6].to(tl.float32),
        )  # fmt: skip
        hi, crowd, quantile = guess_by_value(n, moments_, k, tau, power, CDF)
        return hi, hi, hi, crowd, quantile
    else:
        offset = found[2].to(tl.float32) * reciprocal(n)
        variance = tl.maximum(found[3].to(tl.float32) * reciprocal(n) - offset * offset, 0.0)
        hi, offset, deviation, per_deviation, normal = guess(n, offset, variance, k, tau, power, CDF)
        hi += origin
        # bounds on any quantile (Cantelli), a little wider than they need to be; and the costs in a τ
        ratio = tl.sqrt(k * reciprocal(rest))
        low = (origin + offset) - 1.001 * deviation * ratio
        high = (origin + offset) + 1.001 * deviation * reciprocal(ratio)
        crowd = n * tl.exp2(normal * normal * (-0.5 * LOG2E)) * 0.3989423 * tau * per_deviation
        return hi, low, high, crowd, hi * 0


@triton.jit
def spends_at_zero(sums, k, k_rest, n, power, CDF: tl.constexpr, BY: tl.constexpr):
    """Whether t = 0 spends less than there is, and whether that is clear; from the sums there."""
    _, miss, _, _, _, _, _, _ = taylor_step(sums, k, k_rest, 0, k * 0, power, CDF, BY)
    return miss < 0, tl.abs(miss) > CLEAR * tl.minimum(tl.maximum(k, 1.0), n)


@triton.jit
def _find(
    x, at, origin, there, n_columns, k, k_rest, per, good, tau, power, evaluations, grain, floor,
    CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """t of rows, where entries spend k, in the units of their costs, of which `per` make one; and which of
    the rows have one. Also returned are 1/τ and what k leaves of all costs."""
    COUNT: tl.constexpr = paid_count(CDF, BY) + 1
    found = over(
        x, at, n_columns, paid_moments, (wide(origin, TOGETHER), grain, BY), moment_count(BY),
        TOGETHER, PIECES, WIDTH, STREAM, per, BY=BY,
    )  # fmt: skip
    n, rest, inverse, finite = facts_of(found, k, k_rest, tau)
    scale = inverse * unit(CDF)
    ok = good & there & finite
    loose = ok & ~ok
    if AT_MOST:
        # whether t = 0 spends less than there is, or more, or whether that is not clear
        nothing = tl.zeros((), tl.float32)
        sums = over(
            x, at, n_columns, paid_terms,
            (nothing, nothing, wide(scale, TOGETHER), power, CDF, WHOLE, grain, BY),
            COUNT, TOGETHER, PIECES, WIDTH, STREAM, per, BY=BY,
        )  # fmt: skip
        less, clear = spends_at_zero(sums, k, k_rest, n, power, CDF, BY)
        loose = ok & clear & less
        ok = ok & clear
    ok = ok & (loose | ((rest > 0) & holds(n, rest, power, CDF)))
    hi, low, high, crowd, quantile = guess_of(found, origin, n, rest, k, tau, power, CDF, BY)
    if BY == BY_VALUE:
        low, high = bracket(x, at, n_columns, per, quantile, TOGETHER, PIECES, WIDTH, STREAM)
        hi = tl.where((hi > low) & (hi < high), hi, 0.5 * (low + high))
    ok = ok & (loose | (tl.abs(hi) < 1e30))
    hi = tl.where(loose, 0.0, hi)
    lo = hi * 0
    hi, lo, solved = iterate(
        x, at, n_columns, hi, lo, low, high, crowd, loose | ~ok, n, k, k_rest, tau, inverse,
        power, evaluations, CDF, WHOLE, TOGETHER, PIECES, WIDTH, STREAM,
        base=per, grain=grain, floor=floor, BY=BY,
    )  # fmt: skip
    ok = ok & solved
    if AT_MOST:
        ok = ok & (loose | (hi > 0))
    return hi, lo, ok, inverse, rest


@triton.jit
def share_of(x, w, values, CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr):
    """y of entries, by what :func:`.resident.row_values` has of their rows."""
    if BY == BY_VALUE:
        off, shift = priced(x, w, values[0], values[1], values[2], CDF, WHOLE)
        _, _, turn, sign, base, inverse, low, power = values
        return result(off, (0.0, shift, turn, sign, base, inverse, low, power), CDF, VALUE, WHOLE)
    else:
        return result(x, values, CDF, VALUE, WHOLE)


@triton.jit
def write_shares(
    at, to, ok, n, per, values, CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """y of a row that streams past, or of a part of one."""
    column = tl.arange(0, WIDTH)
    for start in range(0, n, WIDTH):
        valid = inside(ok, column + start, n, 1, False)
        x, w = load_pair(at, start, valid)
        y = share_of(x, w * per, values, CDF, WHOLE, BY)
        tl.store(to + start, y.to(to.dtype.element_ty), mask=valid)


@triton.jit
def _solve_exactly(
    row, x_pointer, x_stride, cost_pointer, cost_row, cost_column, out_pointer, hi_pointer, lo_pointer, n,
    budget, budget_rest, tau, slack, power,
    CDF: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row in float64, which is read again a chunk at a time."""
    source = (x_pointer + row * x_stride, cost_pointer + row * cost_row, cost_column, n)
    budget, tau = number64(*budget, row) + budget_rest, number64(*tau, row)
    hi, lo = find_exactly(source, budget, tau, slack, power, CDF, BY, AT_MOST, CHUNK)
    tl.store(hi_pointer + row, hi)
    tl.store(lo_pointer + row, lo)
    write_exactly(out_pointer + row * n, source, (hi, lo, tau, power), CDF, BY, VALUE, CHUNK)


@triton.jit(do_not_specialize=["rows", "evaluations"])
def solve_budgets(
    x_pointer, x_stride, cost_pointer, cost_row, cost_column,
    budget_pointer, budget_stride, budget_high, budget_low, budget_rest,
    tau_pointer, tau_stride, tau_high, tau_low, out_pointer, hi_pointer, lo_pointer,
    rows, n_columns, evaluations, slack, grain, floor, power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr, TOGETHER: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, STREAM: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """`TOGETHER` rows of at most `PIECES`·`WIDTH` entries each; or one of any length that streams past, as
    many entries at a time."""
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    cost_at = cost_pointer + entries(row, cost_row, column.to(tl.int64) * cost_column, TOGETHER)
    at = (x_pointer + entries(row, x_stride, column, TOGETHER), cost_at, cost_column)
    pairs = ()
    if STREAM:
        per, good = unit_of_costs(dearest(at, n_columns, WIDTH))
    else:
        pairs, per, good = _load_pairs(at, there, n_columns, TOGETHER, PIECES, WIDTH, EXACT)
    origin = origin_of(x_pointer, x_stride, row, there, BY)
    k, k_rest = numbers(budget_pointer, budget_stride, budget_high, budget_low, row, there)
    tau, _ = numbers(tau_pointer, tau_stride, tau_high, tau_low, row, there)
    power = tl.zeros((), tl.float32) + power_high
    hi, lo, ok, inverse, rest = _find(
        pairs, at, origin, there, n_columns, k * per, k_rest * per, per, good, tau, power, evaluations,
        grain, floor, CDF, WHOLE, BY, AT_MOST, TOGETHER, PIECES, WIDTH, STREAM,
    )  # fmt: skip

    apart = per.to(tl.float64) if BY == BY_VALUE else 1.0
    tl.store(hi_pointer + row, hi.to(tl.float64) * apart, mask=ok)
    tl.store(lo_pointer + row, lo.to(tl.float64) * apart, mask=ok)
    values = row_values(hi, lo, inverse, k * per > rest, power, CDF, TOGETHER)
    to = out_pointer + entries(row, n_columns, column, TOGETHER)
    if STREAM:
        write_shares(at, to, ok, n_columns, per, values, CDF, WHOLE, BY, WIDTH)
    else:
        for i in tl.static_range(PIECES):
            valid = inside(ok, column + i * WIDTH, n_columns, TOGETHER, EXACT)
            y = share_of(pairs[i][0], pairs[i][1], values, CDF, WHOLE, BY)
            tl.store(to + i * WIDTH, y.to(out_pointer.dtype.element_ty), mask=valid)

    rescue(
        there & ~ok, row, _solve_exactly,
        (
            x_pointer, x_stride, cost_pointer, cost_row, cost_column, out_pointer, hi_pointer, lo_pointer,
            n_columns, (budget_pointer, budget_stride, budget_high, budget_low), budget_rest,
            (tau_pointer, tau_stride, tau_high, tau_low), slack, joined(power_high, power_low),
            CDF, BY, AT_MOST, CHUNK,
        ),
        TOGETHER,
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
    by: str,
    at_most: bool,
    slack: float,
) -> None:
    """Fill out, hi and lo. The budget is as for :func:`.exact.solve`."""
    start, programs, numbers = _variant(rows, n, F, by, at_most)
    arguments = (*source, *cost, *budget, *tau, out, hi, lo, rows, n, EVALUATIONS, slack, *numbers)
    start(programs, *arguments)
    native.prepare("soft_budget", source[0], start, programs, arguments, F.name, by, at_most)


@functools.lru_cache(maxsize=1024)
def _variant(
    rows: int, n: int, F: cdfs.CDF, by: str, at_most: bool
) -> tuple[Variant, int, tuple[float, ...]]:
    """What is launched, in how many programs; and the grain, the floor of Σ w f, and the exponent of z."""
    tile = layout.pair_tile(rows, n)
    solver = variant(
        solve_budgets,
        CDF=layout.cdf_id(F.name), WHOLE=layout.whole(F), BY=BY[by], AT_MOST=at_most,
        TOGETHER=tile.together, PIECES=tile.pieces, WIDTH=tile.width,
        EXACT=n == tile.pieces * tile.width, STREAM=tile.streams, CHUNK=layout.RESCUE * tile.warps,
        num_warps=tile.warps, **layout.registers(),
    )  # fmt: skip
    together = FLUSH.value * tile.pieces * tile.width if tile.streams else n  # whose sum is to be exact
    numbers = *costs.digits(n, together), *layout.power(F)
    return solver, cdiv(rows, tile.together), numbers
