"""Soft budgets of rows that stay on chip or stream past one program, in float32.

As :mod:`.counted`, with a sum of costs in the place of a count: one read of the scores and of the costs, few
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
from khot._kernels.triton.arguments import Matrix, Rows, Threshold, Values
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
from khot._kernels.triton.counted import result, row_values
from khot._kernels.triton.exact import find_exactly, number64, write_exactly
from khot._kernels.triton.exact_sums import BY_SCORE, BY_VALUE
from khot._kernels.triton.fast import LOG2E, inverse_of, joined, reciprocal, wide
from khot._kernels.triton.functions import VALUE
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.rows import EVALUATIONS, entries, inside, numbers, place_rows, rescue
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
def _load_pairs(at, there, n, T: tl.constexpr):
    """The entries of rows as pairs, in pieces, with costs in their unit; and what
    :func:`.costs.unit_of_costs` has."""
    PIECES: tl.constexpr = T.pieces
    column = tl.arange(0, T.width)
    held = ()
    for i in tl.static_range(PIECES):
        valid = inside(there, column + i * T.width, n, T.together, T.full)
        held = held + (load_pair(at, i * T.width, valid),)  # type: ignore[assignment]  # noqa: RUF005
    most = as_bits(held[0][1])  # type: ignore[misc]
    for i in tl.static_range(1, PIECES):
        most = tl.maximum(most, as_bits(held[i][1]))
    per, good = unit_of_costs(tl.max(most, axis=0 if T.together == 1 else 1))
    pairs = ()
    for i in tl.static_range(PIECES):
        pair = (held[i][0], held[i][1] * wide(per, T.together))
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
def bracket(x, at, n, per, quantile, T: tl.constexpr):
    """Between which thresholds all entries of a row have the same share (:func:`.costs.levels`)."""
    PIECES: tl.constexpr = T.pieces
    WIDTH: tl.constexpr = T.width
    if T.streams:
        column = tl.arange(0, T.width)
        low, high = tl.full((WIDTH,), float("inf"), tl.float32), tl.full((WIDTH,), float("-inf"), tl.float32)
        for start in range(0, n, T.width):
            score, w = load_pair(at, start, column + start < n)
            least, greatest = levels(score, w * per, quantile)
            low, high = tl.minimum(low, least), tl.maximum(high, greatest)
    else:
        low, high = levels(x[0][0], x[0][1], wide(quantile, T.together))
        for i in tl.static_range(1, PIECES):
            least, greatest = levels(x[i][0], x[i][1], wide(quantile, T.together))
            low, high = tl.minimum(low, least), tl.maximum(high, greatest)
    return tl.reduce((low, high), 0 if T.together == 1 else 1, min_max)


@triton.jit
def origin_of(x, row, there, BY: tl.constexpr):
    """What scores are less by in the moments of rows."""
    if BY == BY_SCORE:
        origin = tl.load(x.pointer + row * x.stride, mask=there, other=0.0).to(tl.float32)
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
    x, at, origin, there, n_columns, k, k_rest, per, good, tau, power, evaluations, digits, L: tl.constexpr,
    AT_MOST: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """t of rows, where entries spend k, in the units of their costs, of which `per` make one; and which of
    the rows have one. Also returned are 1/τ and what k leaves of all costs."""
    COUNT: tl.constexpr = paid_count(L.cdf, L.by) + 1
    grain, floor = digits
    found = over(
        x, at, n_columns, paid_moments, (wide(origin, T.together), grain, L), moment_count(L.by), T, per,
        BY=L.by,
    )  # fmt: skip
    n, rest, inverse, finite = facts_of(found, k, k_rest, tau)
    scale = inverse * unit(L.cdf)
    ok = good & there & finite
    loose = ok & ~ok
    if AT_MOST:
        # whether t = 0 spends less than there is, or more, or whether that is not clear
        nothing = tl.zeros((), tl.float32)
        sums = over(
            x, at, n_columns, paid_terms, (nothing, nothing, wide(scale, T.together), power, L, grain), COUNT,
            T, per, BY=L.by,
        )  # fmt: skip
        less, clear = spends_at_zero(sums, k, k_rest, n, power, L.cdf, L.by)
        loose = ok & clear & less
        ok = ok & clear
    ok = ok & (loose | ((rest > 0) & holds(n, rest, power, L.cdf)))
    hi, low, high, crowd, quantile = guess_of(found, origin, n, rest, k, tau, power, L.cdf, L.by)
    if L.by == BY_VALUE:
        low, high = bracket(x, at, n_columns, per, quantile, T)
        hi = tl.where((hi > low) & (hi < high), hi, 0.5 * (low + high))
    ok = ok & (loose | (tl.abs(hi) < 1e30))
    hi = tl.where(loose, 0.0, hi)
    lo = hi * 0
    hi, lo, solved = iterate(
        x, at, n_columns, (hi, lo, low, high, crowd), loose | ~ok, (n, k, k_rest, tau, inverse, power),
        evaluations, L, T, base=per, grain=grain, floor=floor,
    )  # fmt: skip
    ok = ok & solved
    if AT_MOST:
        ok = ok & (loose | (hi > 0))
    return hi, lo, ok, inverse, rest


@triton.jit
def share_of(x, w, values, L: tl.constexpr):
    """y of entries, by what :func:`.counted.row_values` has of their rows."""
    if L.by == BY_VALUE:
        off, shift = priced(x, w, values[0], values[1], values[2], L.cdf, L.whole)
        _, _, turn, sign, base, inverse, low, power = values
        return result(off, (0.0, shift, turn, sign, base, inverse, low, power), L)
    else:
        return result(x, values, L)


@triton.jit
def write_shares(at, to, ok, n, per, values, L: tl.constexpr, WIDTH: tl.constexpr):
    """y of a row that streams past, or of a part of one."""
    column = tl.arange(0, WIDTH)
    for start in range(0, n, WIDTH):
        valid = inside(ok, column + start, n, 1, False)
        x, w = load_pair(at, start, valid)
        y = share_of(x, w * per, values, L)
        tl.store(to + start, y.to(to.dtype.element_ty), mask=valid)


@triton.jit
def _solve_exactly(
    row, x, cost, out_pointer, t, n, budget, budget_rest, tau, slack, power, L: tl.constexpr,
    AT_MOST: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """One row in float64, which is read again a chunk at a time."""
    source = (x.pointer + row * x.stride, cost.pointer + row * cost.row, cost.column, n)
    budget, tau = number64(*budget, row) + budget_rest, number64(*tau, row)
    hi, lo = find_exactly(source, budget, tau, slack, power, L.cdf, L.by, AT_MOST, T.chunk)
    tl.store(t.hi + row, hi)
    tl.store(t.lo + row, lo)
    write_exactly(out_pointer + row * n, source, (hi, lo, tau, power), L.cdf, L.by, VALUE, T.chunk)


@triton.jit(do_not_specialize=["rows", "evaluations"])
def solve_budgets(
    x, cost, budget, budget_rest, tau, out_pointer, t, rows, n_columns, evaluations, slack, digits, exponent,
    L: tl.constexpr, AT_MOST: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The rows of a :class:`.arguments.Tile`; or one of any length that streams past."""
    PIECES: tl.constexpr = T.pieces
    row, there = place_rows(rows, T.together)
    column = tl.arange(0, T.width)
    cost_at = cost.pointer + entries(row, cost.row, column.to(tl.int64) * cost.column, T.together)
    at = (x.pointer + entries(row, x.stride, column, T.together), cost_at, cost.column)
    pairs = ()
    if T.streams:
        per, good = unit_of_costs(dearest(at, n_columns, T.width))
    else:
        pairs, per, good = _load_pairs(at, there, n_columns, T)
    origin = origin_of(x, row, there, L.by)
    k, k_rest = numbers(*budget, row, there)
    own_tau, _ = numbers(*tau, row, there)
    power = tl.zeros((), tl.float32) + exponent[0]
    hi, lo, ok, inverse, rest = _find(
        pairs, at, origin, there, n_columns, k * per, k_rest * per, per, good, own_tau, power, evaluations,
        digits, L, AT_MOST, T,
    )  # fmt: skip

    apart = per.to(tl.float64) if L.by == BY_VALUE else 1.0
    tl.store(t.hi + row, hi.to(tl.float64) * apart, mask=ok)
    tl.store(t.lo + row, lo.to(tl.float64) * apart, mask=ok)
    values = row_values(hi, lo, inverse, k * per > rest, power, L.cdf, T.together)
    to = out_pointer + entries(row, n_columns, column, T.together)
    if T.streams:
        write_shares(at, to, ok, n_columns, per, values, L, T.width)
    else:
        for i in tl.static_range(PIECES):
            valid = inside(ok, column + i * T.width, n_columns, T.together, T.full)
            y = share_of(pairs[i][0], pairs[i][1], values, L)
            tl.store(to + i * T.width, y.to(out_pointer.dtype.element_ty), mask=valid)

    rescue(
        there & ~ok, row, _solve_exactly,
        (
            x, cost, out_pointer, t, n_columns, budget, budget_rest, tau, slack, joined(*exponent), L,
            AT_MOST, T,
        ),
        T.together,
    )  # fmt: skip


KERNELS = (solve_budgets,)


def soft_budget(
    source: Rows,
    cost: Matrix,
    budget: tuple[Tensor | None, int, float, float, float],
    tau: Values,
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
    start, programs, digits, power = _variant(rows, n, F, by, at_most)
    amount, rest = Values(*budget[:4]), budget[4]
    t = Threshold(hi, lo)
    start(
        programs, source, cost, amount, rest, tau, out, t, rows, n, EVALUATIONS, slack, digits, power
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _variant(
    rows: int, n: int, F: cdfs.CDF, by: str, at_most: bool
) -> tuple[Variant, int, tuple[float, float], tuple[float, float]]:
    """What is launched, in how many programs; the grain and the floor of Σ w f; and the exponent of z."""
    tile = layout.pair_tile(rows, n)
    solver = variant(
        solve_budgets, L=layout.law(F, by), T=layout.constant(tile, n), AT_MOST=at_most,
        num_warps=tile.warps, **layout.registers(),
    )  # fmt: skip
    together = FLUSH.value * tile.pieces * tile.width if tile.streams else n  # whose sum is to be exact
    return solver, cdiv(rows, tile.together), costs.digits(n, together), layout.power(F)
