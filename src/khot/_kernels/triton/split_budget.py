"""Soft budgets of few, very long rows, which many programs share: nine launches, whatever a row takes, and a
fill of the counters before them.

1. `_weigh_budget_parts`: the dearest cost and the moments of every part, in its own unit of costs. The
   program that is the last of its row to finish adds them up in the row's unit and makes the first guess.
2. to 7. `_spend_parts`: an evaluation of every part, whose last program takes the step of :mod:`.threshold`
   and leaves the search in memory. The first of them also looks for the bracket by value, and whether t = 0
   spends less than there is. Programs of rows that are done leave at once.
8. `_rescue_budgets`: one program goes on with a row that is not done, in float64 where float32 does not do.
9. `_write_budget_parts`.

As in :mod:`.split`, nothing waits for the host, and the same row has the same result each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.triton import costs, layout
from khot._kernels.triton.costs import (
    moment_count,
    paid_count,
    paid_moments,
    paid_terms,
    unit_of_costs,
)
from khot._kernels.triton.exact import find_exactly, number64, write_exactly
from khot._kernels.triton.exact_sums import BY, BY_VALUE
from khot._kernels.triton.fast import inverse_of, joined
from khot._kernels.triton.functions import VALUE, place, put
from khot._kernels.triton.launch import launch
from khot._kernels.triton.resident import EVALUATIONS, numbers, row_values
from khot._kernels.triton.resident_budget import (
    bracket,
    dearest,
    facts_of,
    guess_of,
    origin_of,
    spends_at_zero,
    write_shares,
)
from khot._kernels.triton.sizes import next_power_of_2
from khot._kernels.triton.split import CAREFUL, DONE, HOPELESS, OPEN, last_of_row, of_parts, total_of_parts
from khot._kernels.triton.terms import holds, unit
from khot._kernels.triton.threshold import FLUSH, advance, iterate, over

__all__ = ["KERNELS", "PIECES", "part_of", "soft_budget"]

PIECES = 2  # that a part holds at a time: entries are pairs
STEPS = 6  # launches that evaluate: most rows take one to five
LEFT = tl.constexpr(18)  # numbers that a part leaves at most: of two evaluations, and a bracket

# the numbers of a row; t is in the unit of its costs, and the trail that of :func:`.threshold.advance`
STATUS, PER, ALL, REST, CROWD, QUANTILE, FITS, HI, LO, TRAIL = (tl.constexpr(i) for i in range(10))
TRAILED = tl.constexpr(9)
STATE = tl.constexpr(18)


@triton.jit
def part_of(
    x_pointer, x_stride, cost_pointer, cost_row, cost_column, row, part, n, length, WIDTH: tl.constexpr
):  # fmt: skip
    """Where the scores and costs of a part lie, how many they are, and which column is its first."""
    start = part.to(tl.int64) * length
    column = start + tl.arange(0, WIDTH)
    at = (
        x_pointer + row * x_stride + column,
        cost_pointer + row * cost_row + column * cost_column,
        cost_column,
    )
    return at, tl.minimum(n - start, length).to(tl.int32), start


@triton.jit
def _budget_and_tau(
    budget_pointer, budget_stride, budget_high, budget_low, tau_pointer, tau_stride, tau_high, tau_low, row
):  # fmt: skip
    """The budget as two numbers of float32, and τ as one."""
    k, k_rest = numbers(budget_pointer, budget_stride, budget_high, budget_low, row, row >= 0)
    tau, _ = numbers(tau_pointer, tau_stride, tau_high, tau_low, row, row >= 0)
    return k, k_rest, tau


@triton.jit
def _in_unit(moment, per, NUMBER: tl.constexpr):
    """A moment of costs, so many of which make one. Members of :func:`.costs.paid_moments` have one cost as a
    factor, the fifth and sixth have two, and the last has three."""
    moment *= per
    if NUMBER >= 4:
        moment *= per
    if NUMBER >= 6:
        moment *= per
    return moment


@triton.jit(do_not_specialize=["parts", "length"])
def _weigh_budget_parts(
    x_pointer, x_stride, cost_pointer, cost_row, cost_column,
    budget_pointer, budget_stride, budget_high, budget_low, tau_pointer, tau_stride, tau_high, tau_low,
    state_pointer, counter_pointer, left_pointer, n_columns, length, parts, grain, power_high,
    CDF: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    at, mine, _start = part_of(
        x_pointer, x_stride, cost_pointer, cost_row, cost_column, row, part, n_columns, length, WIDTH
    )
    COUNT: tl.constexpr = moment_count(BY)
    origin = origin_of(x_pointer, x_stride, row, row >= 0, BY)
    most = dearest(at, mine, WIDTH)
    per, good = unit_of_costs(most)
    sums = over(
        (), at, mine, paid_moments, (origin, grain, BY), COUNT, 1, PIECES, WIDTH, True, per, BY=BY
    )  # fmt: skip
    left = left_pointer + row * LEFT * parts
    back = 1 / per.to(tl.float64)  # of a power of two, so exact
    for i in tl.static_range(COUNT):
        tl.store(left + i * parts + part, _in_unit(sums[i], back, i))
    tl.store(left + COUNT * parts + part, most.to(tl.float64))

    if last_of_row(counter_pointer + row, parts):
        most = tl.max(of_parts(left, COUNT, parts, PARTS, 0.0), axis=0).to(tl.uint32)
        per, good = unit_of_costs(most)
        found = ()
        for i in tl.static_range(COUNT):
            moment = _in_unit(total_of_parts(left, i, parts, PARTS), per.to(tl.float64), i)
            found = found + (moment,)  # type: ignore[assignment]  # noqa: RUF005
        k, k_rest, tau = _budget_and_tau(
            budget_pointer, budget_stride, budget_high, budget_low, tau_pointer, tau_stride, tau_high,
            tau_low, row,
        )  # fmt: skip
        k, k_rest = k * per, k_rest * per
        power = tl.zeros((), tl.float32) + power_high
        n, rest, _inverse, finite = facts_of(found, k, k_rest, tau)
        hi, low, high, crowd, quantile = guess_of(found, origin, n, rest, k, tau, power, CDF, BY)
        fits = (rest > 0) & holds(n, rest, power, CDF)
        if BY != BY_VALUE:  # where a guess that is no number gives way to the middle of the bracket
            fits = fits & (tl.abs(hi) < 1e30)
        ok = good & finite
        if not AT_MOST:  # then it does not matter if t = 0 spends less
            ok = ok & fits
        nothing = tl.zeros((), tl.float32)
        state = state_pointer + row * STATE
        put(
            state,
            (
                tl.where(ok, OPEN, HOPELESS), per, n, rest, crowd, quantile, tl.where(fits, 1.0, 0.0),
                hi, nothing, low, high, nothing, nothing, nothing, nothing, nothing, hi, nothing,
            ),
        )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "length", "number"])
def _spend_parts(
    x_pointer, x_stride, cost_pointer, cost_row, cost_column,
    budget_pointer, budget_stride, budget_high, budget_low, tau_pointer, tau_stride, tau_high, tau_low,
    hi_pointer, lo_pointer, state_pointer, counter_pointer, left_pointer, n_columns, length, parts,
    number, grain, floor, power_high,
    CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr, FIRST: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """An evaluation, of which this is the given number."""
    row, part = place(parts)
    state = state_pointer + row * STATE
    status = tl.load(state + STATUS)
    if status == OPEN:
        at, mine, _start = part_of(
            x_pointer, x_stride, cost_pointer, cost_row, cost_column, row, part, n_columns, length, WIDTH
        )
        COUNT: tl.constexpr = paid_count(CDF, BY) + 1
        k, k_rest, tau = _budget_and_tau(
            budget_pointer, budget_stride, budget_high, budget_low, tau_pointer, tau_stride, tau_high,
            tau_low, row,
        )  # fmt: skip
        per, inverse = tl.load(state + PER).to(tl.float32), inverse_of(tau)
        k, k_rest = k * per, k_rest * per
        power = tl.zeros((), tl.float32) + power_high
        hi, lo = tl.load(state + HI).to(tl.float32), tl.load(state + LO).to(tl.float32)
        left = left_pointer + row * LEFT * parts
        scale = inverse * unit(CDF)
        sums = over(
            (), at, mine, paid_terms, (hi, lo * scale, scale, power, CDF, WHOLE, grain, BY),
            COUNT, 1, PIECES, WIDTH, True, per, BY=BY,
        )  # fmt: skip
        for i in tl.static_range(COUNT):
            tl.store(left + i * parts + part, sums[i])
        if FIRST and BY == BY_VALUE:
            quantile = tl.load(state + QUANTILE).to(tl.float32)
            least, greatest = bracket((), at, mine, per, quantile, 1, PIECES, WIDTH, True)
            tl.store(left + COUNT * parts + part, least.to(tl.float64))
            tl.store(left + (COUNT + 1) * parts + part, greatest.to(tl.float64))
        if FIRST and AT_MOST:
            nothing = tl.zeros((), tl.float32)  # the guess may be NaN, where there is more than enough
            free = over(
                (), at, mine, paid_terms, (nothing, nothing, scale, power, CDF, WHOLE, grain, BY),
                COUNT, 1, PIECES, WIDTH, True, per, BY=BY,
            )  # fmt: skip
            for i in tl.static_range(COUNT):
                tl.store(left + (COUNT + 2 + i) * parts + part, free[i])

        if last_of_row(counter_pointer + row, parts):
            n = tl.load(state + ALL).to(tl.float32)
            trail = ()
            for i in tl.static_range(TRAILED):
                member = tl.load(state + TRAIL + i).to(tl.float32)
                if FIRST and BY == BY_VALUE:
                    if i == 0:
                        member = tl.min(of_parts(left, COUNT, parts, PARTS, float("inf")), axis=0)
                    elif i == 1:
                        member = tl.max(of_parts(left, COUNT + 1, parts, PARTS, float("-inf")), axis=0)
                trail = trail + (member.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            new_hi, new_lo, new_trail, done, ok, _deep = advance(
                _totals(left, 0, parts, PARTS, COUNT), hi, lo, trail, tl.load(state + CROWD).to(tl.float32),
                status != OPEN, status == OPEN, status != OPEN, number, n, k, k_rest, tau, inverse, power, 0,
                0.0, floor, CDF, 1, BY,
            )  # fmt: skip
            if FIRST and BY == BY_VALUE:  # a guess outside the bracket tells nothing
                low, high = trail[0], trail[1]  # type: ignore[misc]
                inside = (hi > low) & (hi < high)
                new_hi = tl.where(inside, new_hi, 0.5 * (low + high))
                new_lo = tl.where(inside, new_lo, 0.0)
                done, ok = done & inside, ok | ~inside
                for i in tl.static_range(TRAILED):
                    tl.store(state + TRAIL + i, tl.where(inside, new_trail[i], trail[i]).to(tl.float64))
            else:
                put(state + TRAIL, new_trail)
            if AT_MOST:
                ok = ok & (~done | (new_hi > 0))
                if FIRST:
                    less, clear = spends_at_zero(
                        _totals(left, COUNT + 2, parts, PARTS, COUNT), k, k_rest, n, power, CDF, BY
                    )
                    loose = clear & less
                    ok = loose | (ok & clear & (tl.load(state + FITS) != 0))
                    done = loose | done
                    new_hi, new_lo = tl.where(loose, 0.0, new_hi), tl.where(loose, 0.0, new_lo)
            tl.store(state + STATUS, tl.where(ok, tl.where(done, DONE, OPEN), HOPELESS).to(tl.float64))
            _store_threshold(state, hi_pointer + row, lo_pointer + row, new_hi, new_lo, per, BY)


@triton.jit
def _totals(left, number, parts, PARTS: tl.constexpr, COUNT: tl.constexpr):
    """The sums over parts of so many of the numbers that they left."""
    sums = ()
    for i in tl.static_range(COUNT):
        sums = sums + (total_of_parts(left, number + i, parts, PARTS),)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@triton.jit
def _store_threshold(state, hi_at, lo_at, hi, lo, per, BY: tl.constexpr):
    """t, in the unit of the row's costs for what follows, and in that of the costs themselves."""
    hi64, lo64 = hi.to(tl.float64), lo.to(tl.float64)
    tl.store(state + HI, hi64)
    tl.store(state + LO, lo64)
    apart = per.to(tl.float64) if BY == BY_VALUE else 1.0
    tl.store(hi_at, hi64 * apart)
    tl.store(lo_at, lo64 * apart)


@triton.jit(do_not_specialize=["evaluations"])
def _rescue_budgets(
    x_pointer, x_stride, cost_pointer, cost_row, cost_column,
    budget_pointer, budget_stride, budget_high, budget_low, budget_rest,
    tau_pointer, tau_stride, tau_high, tau_low, hi_pointer, lo_pointer, state_pointer,
    n_columns, evaluations, slack, grain, floor, power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    state = state_pointer + row * STATE
    status = tl.load(state + STATUS)
    if status != DONE:
        k, k_rest, tau = _budget_and_tau(
            budget_pointer, budget_stride, budget_high, budget_low, tau_pointer, tau_stride, tau_high,
            tau_low, row,
        )  # fmt: skip
        per = tl.load(state + PER).to(tl.float32)
        x_at, cost_at = x_pointer + row * x_stride, cost_pointer + row * cost_row
        column = tl.arange(0, WIDTH).to(tl.int64)
        at = (x_at + column, cost_at + column * cost_column, cost_column)
        hi, lo, ok = iterate(
            (), at, n_columns, tl.load(state + HI).to(tl.float32), tl.load(state + LO).to(tl.float32),
            tl.load(state + TRAIL).to(tl.float32), tl.load(state + TRAIL + 1).to(tl.float32),
            tl.load(state + CROWD).to(tl.float32), status == HOPELESS, tl.load(state + ALL).to(tl.float32),
            k * per, k_rest * per, tau, inverse_of(tau), tl.zeros((), tl.float32) + power_high, evaluations,
            CDF, WHOLE, 1, PIECES, WIDTH, True, base=per, grain=grain, floor=floor, BY=BY,
        )  # fmt: skip
        ok = ok & (status == OPEN)
        if AT_MOST:
            ok = ok & (hi > 0)
        tl.store(state + STATUS, tl.where(ok, DONE, CAREFUL).to(tl.float64))
        if ok:
            _store_threshold(state, hi_pointer + row, lo_pointer + row, hi, lo, per, BY)
        else:
            budget = number64(budget_pointer, budget_stride, budget_high, budget_low, row) + budget_rest
            hi64, lo64 = find_exactly(
                (x_at, cost_at, cost_column, n_columns), budget,
                number64(tau_pointer, tau_stride, tau_high, tau_low, row), slack,
                joined(power_high, power_low), CDF, BY, AT_MOST, CHUNK,
            )  # fmt: skip
            tl.store(hi_pointer + row, hi64)
            tl.store(lo_pointer + row, lo64)


@triton.jit(do_not_specialize=["parts", "length"])
def _write_budget_parts(
    x_pointer, x_stride, cost_pointer, cost_row, cost_column,
    budget_pointer, budget_stride, budget_high, budget_low, tau_pointer, tau_stride, tau_high, tau_low,
    out_pointer, hi_pointer, lo_pointer, state_pointer, n_columns, length, parts, power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows first: the cache still has them
    row, part = (program // parts).to(tl.int64), program % parts
    at, mine, start = part_of(
        x_pointer, x_stride, cost_pointer, cost_row, cost_column, row, part, n_columns, length, WIDTH
    )
    state = state_pointer + row * STATE
    done = tl.load(state + STATUS) == DONE
    to = out_pointer + row * n_columns + start
    if done:
        k, _, tau = _budget_and_tau(
            budget_pointer, budget_stride, budget_high, budget_low, tau_pointer, tau_stride, tau_high,
            tau_low, row,
        )  # fmt: skip
        per = tl.load(state + PER).to(tl.float32)
        hi, lo = tl.load(state + HI).to(tl.float32), tl.load(state + LO).to(tl.float32)
        power = tl.zeros((), tl.float32) + power_high
        much = k * per > tl.load(state + REST).to(tl.float32)
        values = row_values(hi, lo, inverse_of(tau), much, power, CDF, 1)
        write_shares(at, to + tl.arange(0, WIDTH), done, mine, per, values, CDF, WHOLE, BY, WIDTH)
    else:
        threshold = (
            tl.load(hi_pointer + row), tl.load(lo_pointer + row),
            number64(tau_pointer, tau_stride, tau_high, tau_low, row), joined(power_high, power_low),
        )  # fmt: skip
        source = (
            x_pointer + row * x_stride + start, cost_pointer + row * cost_row + start * cost_column,
            cost_column, mine,
        )  # fmt: skip
        write_exactly(to, source, threshold, CDF, BY, VALUE, CHUNK)


KERNELS = (_weigh_budget_parts, _spend_parts, _rescue_budgets, _write_budget_parts)


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
    cut, tile = layout.cut(rows, n), layout.STREAMED_PAIRS
    programs, size = rows * cut.parts, (n, cut.length, cut.parts)
    state, left = hi.new_empty(rows, STATE.value), hi.new_empty(rows, LEFT.value, cut.parts)
    counter = torch.zeros(rows, dtype=torch.int32, device=hi.device)
    grain, floor = costs.digits(n, min(cut.length, FLUSH.value * PIECES * cut.width))
    power = layout.power(F)
    given = *source, *cost, *budget[:4], *tau
    which = {"CDF": layout.cdf_id(F.name), "BY": BY[by]}
    whole, limit = {"WHOLE": layout.whole(F)}, {"AT_MOST": at_most}
    part = {"WIDTH": cut.width, "num_warps": cut.warps, **layout.registers()}
    sums = {"PIECES": PIECES, "PARTS": next_power_of_2(cut.parts), **part}
    launch(
        _weigh_budget_parts, programs,
        *given, state, counter, left, *size, grain, power[0], **which, **limit, **sums,
    )  # fmt: skip
    for number in range(STEPS):
        launch(
            _spend_parts, programs,
            *given, hi, lo, state, counter, left, *size, number, grain, floor, power[0],
            **which, **whole, **limit, **sums, FIRST=number == 0,
        )  # fmt: skip
    launch(
        _rescue_budgets, rows,
        *source, *cost, *budget, *tau, hi, lo, state, n, EVALUATIONS, slack,
        *costs.digits(n, FLUSH.value * tile.pieces * tile.width), *power, **which, **whole, **limit,
        PIECES=tile.pieces, WIDTH=tile.width, CHUNK=layout.RESCUE * tile.warps, num_warps=tile.warps,
        **layout.registers(),
    )  # fmt: skip
    launch(
        _write_budget_parts, programs,
        *given, out, hi, lo, state, *size, *power, **which, **whole, **part, CHUNK=layout.RESCUE * cut.warps,
    )  # fmt: skip
