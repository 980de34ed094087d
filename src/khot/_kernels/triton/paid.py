"""Soft budgets of rows that stay on chip or stream past one program: a sum of costs, for :mod:`.rows`.

As :mod:`.counted`, with a sum of costs in the place of a count: one read of the scores and of the costs, few
evaluations (:mod:`.threshold`, with the terms of :mod:`.costs`), one write. What float32 does not decide (by
value, a threshold in a gap that no density crosses; a budget that all entries together just spend) is solved
again, in the same program, in float64 by :mod:`.float64`.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from khot._kernels.triton import costs, layout
from khot._kernels.triton.arguments import Digits, Found, Matrix, Problem, Rows, Values
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
from khot._kernels.triton.fast import LOG2E, in_two, inverse_of, reciprocal, wide
from khot._kernels.triton.float64 import solve_row
from khot._kernels.triton.float64_sums import BY_SCORE, BY_VALUE
from khot._kernels.triton.launch import Variant
from khot._kernels.triton.rows import (
    EVALUATIONS,
    at_of,
    entries,
    first_of,
    inside,
    numbers,
    solver,
    write_held,
)
from khot._kernels.triton.terms import holds, unit
from khot._kernels.triton.threshold import (
    FLUSH,
    excess_of,
    guess,
    guess_by_value,
    iterate,
    min_max,
    over,
    taylor_step,
)

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
        return first_of(x, row, there)
    else:
        return row.to(tl.float32) * 0


@triton.jit
def facts_of(found, k, k_low, tau):
    """From moments, and a budget in the same unit: all costs, what the budget leaves of them, 1/τ, and which
    rows float32 may do."""
    n, n_low, second = found[0], found[1].to(tl.float32), found[3].to(tl.float32)
    complement = ((n - k) + (n_low - k_low)).to(tl.float32)
    n = (n + n_low).to(tl.float32)
    finite = (tau > 1e-25) & (tau < 1e25) & (second < float("inf")) & (k > 0) & (k < float("inf"))
    return n, complement, inverse_of(tau), finite


@triton.jit
def guess_of(found, origin, n, complement, k, tau, power, CDF: tl.constexpr, BY: tl.constexpr):
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
        ratio = tl.sqrt(k * reciprocal(complement))
        low = (origin + offset) - 1.001 * deviation * ratio
        high = (origin + offset) + 1.001 * deviation * reciprocal(ratio)
        crowd = n * tl.exp2(normal * normal * (-0.5 * LOG2E)) * 0.3989423 * tau * per_deviation
        return hi, low, high, crowd, hi * 0


@triton.jit
def spends_at_zero(sums, k, k_low, n, power, CDF: tl.constexpr, BY: tl.constexpr):
    """Whether t = 0 spends less than there is, and whether that is clear; from the sums there."""
    excess = excess_of(sums, k, k_low, 0, CDF, BY)
    miss, _, _, _, _, _, _ = taylor_step(sums, excess, k * 0, power, CDF, BY)
    return miss < 0, tl.abs(miss) > CLEAR * tl.minimum(tl.maximum(k, 1.0), n)


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
def _goal64(pointer, stride, high, low, row, there, third):
    """The budget of each row; without a pointer it came by value, as three numbers."""
    if pointer is None:
        return row.to(tl.float64) * 0 + high + low + third
    else:
        return tl.load(pointer + row * stride, mask=there, other=1.0).to(tl.float64)


@triton.jit
def _find(
    x, cost, k, tau, row, there, n_columns, evaluations, digits, exponent, L: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, T.width)
    cost_at = cost.pointer + entries(row, cost.row, column.to(tl.int64) * cost.column, T.together)
    at = (at_of(x, row, T), cost_at, cost.column)
    pairs = ()
    if T.streams:
        per, good = unit_of_costs(dearest(at, n_columns, T.width))
    else:
        pairs, per, good = _load_pairs(at, there, n_columns, T)
    origin = origin_of(x, row, there, L.by)
    goal = _goal64(*k, row, there, digits.third)
    k, k_low = in_two(goal)
    k, k_low, goal = k * per, k_low * per, goal * per
    tau, _ = numbers(*tau, row, there)
    power = tl.zeros((), tl.float32) + exponent[0]

    grain = digits.grain
    found = over(
        pairs, at, n_columns, paid_moments, (wide(origin, T.together), grain, L), moment_count(L.by), T, per,
        BY=L.by,
    )  # fmt: skip
    n, complement, inverse, finite = facts_of(found, k, k_low, tau)
    scale = inverse * unit(L.cdf)
    ok = good & there & finite
    loose = ok & ~ok
    if L.at_most:
        # whether t = 0 spends less than there is, or more, or whether that is not clear
        COUNT: tl.constexpr = paid_count(L.cdf, L.by) + 1
        nothing = tl.zeros((), tl.float32)
        sums = over(
            pairs, at, n_columns, paid_terms,
            (nothing, nothing, wide(scale, T.together), power, L, grain), COUNT, T, per, BY=L.by,
        )  # fmt: skip
        less, clear = spends_at_zero(sums, k, k_low, n, power, L.cdf, L.by)
        loose = ok & clear & less
        ok = ok & clear
    ok = ok & (loose | ((complement > 0) & holds(n, complement, power, L.cdf)))
    hi, low, high, crowd, quantile = guess_of(found, origin, n, complement, k, tau, power, L.cdf, L.by)
    if L.by == BY_VALUE:
        low, high = bracket(pairs, at, n_columns, per, quantile, T)
        hi = tl.where((hi > low) & (hi < high), hi, 0.5 * (low + high))
    ok = ok & (loose | (tl.abs(hi) < 1e30))
    hi = tl.where(loose, 0.0, hi)
    lo = hi * 0
    hi, lo, solved = iterate(
        pairs, at, n_columns, (hi, lo, low, high, crowd), loose | ~ok, (n, k, k_low, tau, inverse, power),
        evaluations, L, T, base=per, grain=grain, floor=digits.floor, goal=goal,
    )  # fmt: skip
    ok = ok & solved
    if L.at_most:
        ok = ok & (loose | (hi > 0))

    apart = per.to(tl.float64) if L.by == BY_VALUE else 1.0
    found = (pairs, at, per, hi, lo, inverse, k > complement, power)
    return hi.to(tl.float64) * apart, lo.to(tl.float64) * apart, ok, found


@triton.jit
def _write(out_pointer, row, ok, n, found, L: tl.constexpr, T: tl.constexpr):
    pairs, at, per, hi, lo, inverse, above_half, power = found
    values = row_values(hi, lo, inverse, above_half, power, L.cdf, T.together)
    if T.streams:
        write_shares(at, out_pointer + row * n + tl.arange(0, T.width), ok, n, per, values, L, T.width)
    else:
        write_held(pairs, out_pointer, row, ok, n, _share_of_pair, values, L, T)


@triton.jit
def _share_of_pair(pair, values, L: tl.constexpr):
    return share_of(pair[0], pair[1], values, L)


PAID = Problem(_find, _write, solve_row)


def soft_budget(
    source: Rows, cost: Matrix, budget: Values, tau: Values, found: Found, asked: layout.Asked, digits: Digits
) -> None:
    """Fill what is found. The digits have what is left of the budget, and the slack."""
    rows, n = source.pointer.shape
    start, programs, (grain, floor), power = _variant(rows, n, asked)
    digits = digits._replace(grain=grain, floor=floor)
    start(programs, source, cost, budget, tau, found, rows, n, EVALUATIONS, digits, power)


@functools.lru_cache(maxsize=1024)
def _variant(
    rows: int, n: int, asked: layout.Asked
) -> tuple[Variant, int, tuple[float, float], tuple[float, float]]:
    """What is launched, in how many programs; the grain and the floor of Σ w f; and the exponent of z."""
    tile, law = layout.pair_tile(rows, n), layout.law(*asked)
    together = FLUSH.value * tile.pieces * tile.width if tile.streams else n  # whose sum is to be exact
    return *solver(PAID, law, tile, rows, n), costs.digits(n, together), layout.power(asked.F)
