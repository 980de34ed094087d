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

from khot._kernels.triton import costs, layout
from khot._kernels.triton.arguments import Digits, Found, Matrix, Pairs, Rows, Scratch, Threshold, Values
from khot._kernels.triton.costs import (
    moment_count,
    paid_count,
    paid_moments,
    paid_terms,
    unit_of_costs,
)
from khot._kernels.triton.counted import row_values
from khot._kernels.triton.fast import inverse_of, joined
from khot._kernels.triton.float64 import find_in_float64, number64, write_in_float64
from khot._kernels.triton.float64_sums import BY_VALUE
from khot._kernels.triton.functions import VALUE, extent, place, place_last, put
from khot._kernels.triton.launch import launch
from khot._kernels.triton.paid import (
    bracket,
    dearest,
    facts_of,
    guess_of,
    origin_of,
    spends_at_zero,
    write_shares,
)
from khot._kernels.triton.rows import EVALUATIONS, numbers
from khot._kernels.triton.sizes import next_power_of_2
from khot._kernels.triton.split import CAREFUL, DONE, HOPELESS, OPEN, last_of_row, of_parts, total_of_parts
from khot._kernels.triton.terms import holds, unit
from khot._kernels.triton.threshold import FLUSH, advance, excess_of, iterate, may_be_lost, over

PIECES = 2  # that a part holds at a time: entries are pairs
STEPS = 6  # launches that evaluate: most rows take one to five
LEFT = tl.constexpr(18)  # numbers that a part leaves at most: of two evaluations, and a bracket

# the numbers of a row; t is in the unit of its costs, and the trail that of :func:`.threshold.advance`
STATUS, PER, ALL, REST, CROWD, QUANTILE, FITS, HI, LO, TRAIL = (tl.constexpr(i) for i in range(10))
TRAILED = tl.constexpr(9)
STATE = tl.constexpr(18)


@triton.jit
def part_of(pairs, row, part, n, length, WIDTH: tl.constexpr):
    """Where the scores and costs of a part lie, how many they are, and which column is its first."""
    start, mine = extent(part, n, length)
    column = start + tl.arange(0, WIDTH)
    at = (
        pairs.x.pointer + row * pairs.x.stride + column,
        pairs.other.pointer + row * pairs.other.row + column * pairs.other.column,
        pairs.other.column,
    )
    return at, mine, start


@triton.jit
def _budget_and_tau(budget, tau, row):
    """The budget as two numbers of float32, and τ as one."""
    k, k_low = numbers(*budget, row, row >= 0)
    own_tau, _ = numbers(*tau, row, row >= 0)
    return k, k_low, own_tau


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
    pairs, budget, tau, scratch, n_columns, length, parts, grain, power_high, L: tl.constexpr,
    T: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    at, mine, _start = part_of(pairs, row, part, n_columns, length, T.width)
    COUNT: tl.constexpr = moment_count(L.by)
    origin = origin_of(pairs.x, row, row >= 0, L.by)
    most = dearest(at, mine, T.width)
    per, good = unit_of_costs(most)
    sums = over((), at, mine, paid_moments, (origin, grain, L), COUNT, T, per, BY=L.by)
    left = scratch.left + row * LEFT * parts
    back = 1 / per.to(tl.float64)  # of a power of two, so exact
    for i in tl.static_range(COUNT):
        tl.store(left + i * parts + part, _in_unit(sums[i], back, i))
    tl.store(left + COUNT * parts + part, most.to(tl.float64))

    if last_of_row(scratch.counter + row, parts):
        most = tl.max(of_parts(left, COUNT, parts, PARTS, 0.0), axis=0).to(tl.uint32)
        per, good = unit_of_costs(most)
        found = ()
        for i in tl.static_range(COUNT):
            moment = _in_unit(total_of_parts(left, i, parts, PARTS), per.to(tl.float64), i)
            found = found + (moment,)  # type: ignore[assignment]  # noqa: RUF005
        k, k_low, own_tau = _budget_and_tau(budget, tau, row)
        k, k_low = k * per, k_low * per
        power = tl.zeros((), tl.float32) + power_high
        n, complement, _inverse, finite = facts_of(found, k, k_low, own_tau)
        guessed = guess_of(found, origin, n, complement, k, own_tau, power, L.cdf, L.by)
        hi, low, high, crowd, quantile = guessed
        fits = (complement > 0) & holds(n, complement, power, L.cdf)
        if L.by != BY_VALUE:  # where a guess that is no number gives way to the middle of the bracket
            fits = fits & (tl.abs(hi) < 1e30)
        ok = good & finite
        if not L.at_most:  # then it does not matter if t = 0 spends less
            ok = ok & fits
        nothing = tl.zeros((), tl.float32)
        state = scratch.state + row * STATE
        put(
            state,
            (
                tl.where(ok, OPEN, HOPELESS), per, n, complement, crowd, quantile, tl.where(fits, 1.0, 0.0),
                hi, nothing, low, high, nothing, nothing, nothing, nothing, nothing, hi, nothing,
            ),
        )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "length", "number"])
def _spend_parts(
    pairs, budget, tau, t, scratch, n_columns, length, parts, number, digits, power_high, L: tl.constexpr,
    FIRST: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """An evaluation, of which this is the given number."""
    grain, floor = digits
    row, part = place(parts)
    state = scratch.state + row * STATE
    status = tl.load(state + STATUS)
    if status == OPEN:
        at, mine, _start = part_of(pairs, row, part, n_columns, length, T.width)
        COUNT: tl.constexpr = paid_count(L.cdf, L.by) + 1
        k, k_low, own_tau = _budget_and_tau(budget, tau, row)
        per, inverse = tl.load(state + PER).to(tl.float32), inverse_of(own_tau)
        k, k_low = k * per, k_low * per
        power = tl.zeros((), tl.float32) + power_high
        hi, lo = tl.load(state + HI).to(tl.float32), tl.load(state + LO).to(tl.float32)
        left = scratch.left + row * LEFT * parts
        scale = inverse * unit(L.cdf)
        sums = over(
            (), at, mine, paid_terms, (hi, lo * scale, scale, power, L, grain), COUNT, T, per, BY=L.by
        )
        for i in tl.static_range(COUNT):
            tl.store(left + i * parts + part, sums[i])
        if FIRST and L.by == BY_VALUE:
            quantile = tl.load(state + QUANTILE).to(tl.float32)
            least, greatest = bracket((), at, mine, per, quantile, T)
            tl.store(left + COUNT * parts + part, least.to(tl.float64))
            tl.store(left + (COUNT + 1) * parts + part, greatest.to(tl.float64))
        if FIRST and L.at_most:
            nothing = tl.zeros((), tl.float32)  # the guess may be NaN, where there is more than enough
            free = over(
                (), at, mine, paid_terms, (nothing, nothing, scale, power, L, grain), COUNT, T, per, BY=L.by
            )
            for i in tl.static_range(COUNT):
                tl.store(left + (COUNT + 2 + i) * parts + part, free[i])

        if last_of_row(scratch.counter + row, parts):
            n = tl.load(state + ALL).to(tl.float32)
            trail = ()
            for i in tl.static_range(TRAILED):
                member = tl.load(state + TRAIL + i).to(tl.float32)
                if FIRST and L.by == BY_VALUE:
                    if i == 0:
                        member = tl.min(of_parts(left, COUNT, parts, PARTS, float("inf")), axis=0)
                    elif i == 1:
                        member = tl.max(of_parts(left, COUNT + 1, parts, PARTS, float("-inf")), axis=0)
                trail = trail + (member.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            totals = _totals(left, 0, parts, PARTS, COUNT)
            excess = excess_of(totals, k, k_low, 0, L.cdf, L.by)
            new_hi, new_lo, new_trail, done, ok, alone = advance(
                totals, excess, hi, lo, trail, tl.load(state + CROWD).to(tl.float32),
                status != OPEN, status == OPEN, status != OPEN, number,
                (n, k, k_low, own_tau, inverse, power), 0.0, L, 1,
            )  # fmt: skip
            # in a gap, or but for digits that the sums of parts have lost
            alone = alone | may_be_lost(totals, excess, power, floor, L.cdf, L.by)
            new_hi, new_lo = tl.where(alone, hi, new_hi), tl.where(alone, lo, new_lo)
            ok = ok | alone
            if FIRST and L.by == BY_VALUE:  # a guess outside the bracket tells nothing
                low, high = trail[0], trail[1]  # type: ignore[misc]
                inside = (hi > low) & (hi < high)
                new_hi = tl.where(inside, new_hi, 0.5 * (low + high))
                new_lo = tl.where(inside, new_lo, 0.0)
                done, ok, alone = done & inside, ok | ~inside, alone & inside
                for i in tl.static_range(TRAILED):
                    tl.store(state + TRAIL + i, tl.where(inside, new_trail[i], trail[i]).to(tl.float64))
            else:
                put(state + TRAIL, new_trail)
            if L.at_most:
                ok = ok & (~done | alone | (new_hi > 0))
                if FIRST:
                    less, clear = spends_at_zero(
                        _totals(left, COUNT + 2, parts, PARTS, COUNT), k, k_low, n, power, L.cdf, L.by
                    )
                    loose = clear & less
                    ok = loose | (ok & clear & (tl.load(state + FITS) != 0))
                    done, alone = loose | done, alone & ~loose
                    new_hi, new_lo = tl.where(loose, 0.0, new_hi), tl.where(loose, 0.0, new_lo)
            stays = tl.where(alone, CAREFUL, tl.where(done, DONE, OPEN))
            tl.store(state + STATUS, tl.where(ok, stays, HOPELESS).to(tl.float64))
            _store_threshold(state, t.hi + row, t.lo + row, new_hi, new_lo, per, L.by)


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
    pairs, budget, budget_low, tau, t, state_pointer, n_columns, evaluations, slack, digits, exponent,
    L: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    state = state_pointer + row * STATE
    status = tl.load(state + STATUS)
    if status != DONE:
        k, k_low, own_tau = _budget_and_tau(budget, tau, row)
        own_budget = number64(*budget, row) + budget_low
        per = tl.load(state + PER).to(tl.float32)
        x_at, cost_at = pairs.x.pointer + row * pairs.x.stride, pairs.other.pointer + row * pairs.other.row
        column = tl.arange(0, T.width).to(tl.int64)
        at = (x_at + column, cost_at + column * pairs.other.column, pairs.other.column)
        hi, lo, ok = iterate(
            (), at, n_columns,
            (
                tl.load(state + HI).to(tl.float32), tl.load(state + LO).to(tl.float32),
                tl.load(state + TRAIL).to(tl.float32), tl.load(state + TRAIL + 1).to(tl.float32),
                tl.load(state + CROWD).to(tl.float32),
            ),
            status == HOPELESS,
            (
                tl.load(state + ALL).to(tl.float32), k * per, k_low * per, own_tau, inverse_of(own_tau),
                tl.zeros((), tl.float32) + exponent[0],
            ),
            evaluations, L, T, base=per, grain=digits[0], floor=digits[1], goal=own_budget * per,
        )  # fmt: skip
        ok = ok & (status != HOPELESS)
        if L.at_most:
            ok = ok & (hi > 0)
        tl.store(state + STATUS, tl.where(ok, DONE, CAREFUL).to(tl.float64))
        if ok:
            _store_threshold(state, t.hi + row, t.lo + row, hi, lo, per, L.by)
        else:
            hi64, lo64 = find_in_float64(
                (x_at, cost_at, pairs.other.column, n_columns), own_budget, number64(*tau, row), slack,
                joined(*exponent), L.cdf, L.by, L.at_most, T.chunk,
            )  # fmt: skip
            tl.store(t.hi + row, hi64)
            tl.store(t.lo + row, lo64)


@triton.jit(do_not_specialize=["parts", "length"])
def _write_budget_parts(
    pairs, budget, tau, out_pointer, t, state_pointer, n_columns, length, parts, exponent, L: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    row, part = place_last(parts)
    at, mine, start = part_of(pairs, row, part, n_columns, length, T.width)
    state = state_pointer + row * STATE
    done = tl.load(state + STATUS) == DONE
    to = out_pointer + row * n_columns + start
    if done:
        k, _, own_tau = _budget_and_tau(budget, tau, row)
        per = tl.load(state + PER).to(tl.float32)
        hi, lo = tl.load(state + HI).to(tl.float32), tl.load(state + LO).to(tl.float32)
        power = tl.zeros((), tl.float32) + exponent[0]
        much = k * per > tl.load(state + REST).to(tl.float32)
        values = row_values(hi, lo, inverse_of(own_tau), much, power, L.cdf, 1)
        write_shares(at, to + tl.arange(0, T.width), done, mine, per, values, L, T.width)
    else:
        threshold = (tl.load(t.hi + row), tl.load(t.lo + row), number64(*tau, row), joined(*exponent))
        source = (
            pairs.x.pointer + row * pairs.x.stride + start,
            pairs.other.pointer + row * pairs.other.row + start * pairs.other.column,
            pairs.other.column, mine,
        )  # fmt: skip
        write_in_float64(to, source, threshold, L.cdf, L.by, VALUE, T.chunk)


KERNELS = (_weigh_budget_parts, _spend_parts, _rescue_budgets, _write_budget_parts)


def soft_budget(
    source: Rows, cost: Matrix, budget: Values, tau: Values, found: Found, asked: layout.Asked, digits: Digits
) -> None:
    """Fill what is found, as :func:`.paid.soft_budget` does."""
    (rows, n), (out, hi, lo) = source.pointer.shape, found
    cut, tile = layout.cut(rows, n), layout.STREAMED_PAIRS
    programs, size = rows * cut.parts, (n, cut.length, cut.parts)
    state, left = hi.new_empty(rows, STATE.value), hi.new_empty(rows, LEFT.value, cut.parts)
    scratch = Scratch(state, torch.zeros(rows, dtype=torch.int32, device=hi.device), left)
    sums = costs.digits(n, min(cut.length, FLUSH.value * PIECES * cut.width))
    power, t, pairs = layout.power(asked.F), Threshold(hi, lo), Pairs(source, cost)
    which = {"L": layout.law(*asked), "T": layout.part_tile(cut, PIECES), "num_warps": cut.warps}
    which |= layout.registers()
    padded = next_power_of_2(cut.parts)
    launch(
        _weigh_budget_parts, programs,
        pairs, budget, tau, scratch, *size, sums[0], power[0], **which, PARTS=padded,
    )  # fmt: skip
    for number in range(STEPS):
        launch(
            _spend_parts, programs,
            pairs, budget, tau, t, scratch, *size, number, sums, power[0],
            **which, PARTS=padded, FIRST=number == 0,
        )  # fmt: skip
    whole = costs.digits(n, FLUSH.value * tile.pieces * tile.width)
    launch(
        _rescue_budgets, rows,
        pairs, budget, digits.third, tau, t, state, n, EVALUATIONS, digits.slack, whole, power,
        **which | {"T": layout.constant(tile, n)._replace(full=False), "num_warps": tile.warps},
    )  # fmt: skip
    launch(_write_budget_parts, programs, pairs, budget, tau, out, t, state, *size, power, **which)
