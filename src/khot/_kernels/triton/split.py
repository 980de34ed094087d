"""The soft top-k of few, very long rows, which many programs share: four launches, whatever a row takes.

1. `_sample_rows`: one program a row solves a sample of the row, and where few entries are undecided also
   bounds the threshold, four deviations of a sample's rank to either side.
2. `_sum_parts`: the sums of an evaluation at the sample's threshold. The program that is the last of its row
   to finish adds up what all of them left and takes the step. If the bounds leave few entries undecided, it
   also gives every part its place in a window of the row's entries.
3. `_finish_parts`: the same at the new threshold, or the window is filled, and its last program solves it.
   What is not done then, the last program solves by itself. Parts of rows that are done leave at once.
4. `_write_parts`; or, where t is to have the digits of float64, the kernels of :mod:`.float64_split`. BASED
   stands for that: the arithmetic in float32 is on differences from the sample's threshold then, and t is
   such a difference, too.

Nothing waits for the host, and the first launch resets what the others count, so that a CUDA graph can hold
them. What the programs of a launch leave for its last one is added in float64, in the order of the parts: the
same row has the same result each time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Found, Law, Rows, Scratch, Threshold, Tile, Values
from khot._kernels.triton.counted import row_values, write_backwards
from khot._kernels.triton.fast import double, in_two, inverse_of, joined, reciprocal, two_sum
from khot._kernels.triton.float64 import find_in_float64, number64, write_in_float64
from khot._kernels.triton.float64_magnitude import find_sizes_in_float64
from khot._kernels.triton.float64_sums import BY_COUNT
from khot._kernels.triton.functions import NORMAL, extent, full_support, place, place_last
from khot._kernels.triton.launch import launch
from khot._kernels.triton.pooled import pooled_terms, size, temperature
from khot._kernels.triton.pooled_rows import find_gamma
from khot._kernels.triton.sizes import next_power_of_2
from khot._kernels.triton.terms import holds, kink, series, term_count, terms, unit
from khot._kernels.triton.threshold import (
    excess_of,
    find,
    iterate,
    less,
    long_step,
    moment_terms,
    over,
    taylor_step,
)

EVALUATIONS = tl.constexpr(24)  # at most, of a sample, of a window, and of a row by one program
LEFT = tl.constexpr(11)  # numbers that a part leaves: of an evaluation, then four counts
FAR = tl.constexpr(1e37)  # of a bound that there is not

# the numbers of a row, besides hi and lo
STATUS, WIDE, LOW, HIGH, CROWD, TURN, ABOVE, COUNT, LOWEST, HIGHEST, BASE = (
    tl.constexpr(i) for i in range(11)
)
STATE = tl.constexpr(11)
# and what STATUS says: t is to be evaluated; done; the window is to be solved; done in float64, whose
# functions write the result, too; not for sums in float32
OPEN, DONE, GATHER, CAREFUL, HOPELESS = (tl.constexpr(float(i)) for i in range(5))


@triton.jit
def last_of_row(counter, parts):
    """Whether all other programs of the row have come here, after what they stored."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def of_parts(pointer, number, parts, PARTS: tl.constexpr, other):
    """One of the numbers that parts left, of each of them."""
    part = tl.arange(0, PARTS)
    return tl.load(pointer + number * parts + part, mask=part < parts, other=other, cache_modifier=".cg")


@triton.jit
def total_of_parts(pointer, number, parts, PARTS: tl.constexpr):
    """The sum over parts of one of the numbers that they left."""
    return tl.sum(of_parts(pointer, number, parts, PARTS, 0.0), axis=0)


@triton.jit
def _reach(n, CDF: tl.constexpr):
    """How far from t, in units of z, F of n entries makes no difference."""
    if CDF == NORMAL:
        return tl.sqrt(2 * tl.log(n.to(tl.float32)) + 34)
    elif full_support(CDF):
        return tl.log(n.to(tl.float32)) + 17
    else:
        return 1.0


@triton.jit
def _row_numbers(k, tau, row):
    """k and τ in float64; k as two numbers of float32, τ and 1/τ as one."""
    k64 = number64(*k, row)
    tau64 = number64(*tau, row)
    own_k, k_low = in_two(k64)
    own_tau = tau64.to(tl.float32)
    return k64, tau64, own_k, k_low, own_tau, inverse_of(own_tau)


@triton.jit
def _heat(t, tau, inverse, POOLED: tl.constexpr):
    """The temperature at a threshold, its inverse, and how much it grows with t. It is τ, unless what is
    POOLED has the exponent p = POOLED (:mod:`.pooled`)."""
    if POOLED > 0:
        heat, warming = temperature(t, tau, POOLED)
        return heat, inverse_of(heat), warming
    else:
        return tau, inverse, 0.0


@triton.jit
def _mass(x, at, hi, lo, inverse, warming, power, L: tl.constexpr, T: tl.constexpr, POOLED: tl.constexpr):
    """By how much a sample's count falls in a step by the temperature, at the rate that it has at hi + lo."""
    scale = inverse * unit(L.cdf)
    if POOLED > 0:
        sums = over(x, at, 0, pooled_terms, (hi, lo * scale, scale, power, L), term_count(L.cdf), T)
    else:
        sums = over(x, at, 0, terms, (hi, lo * scale, scale, power, L), term_count(L.cdf), T)
    mass = series(sums, power, L.cdf)[1]
    if POOLED > 0:
        mass -= warming * sums[1]
    return mass


@triton.jit(do_not_specialize=["window"])
def _sample_rows(
    x, k, tau, t, state_pointer, counter_pointer, n_columns, window, power_high, L: tl.constexpr,
    BASED: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr = 0,
    SIGNED: tl.constexpr = False,
):  # fmt: skip
    PIECES: tl.constexpr = T.pieces
    SAMPLE: tl.constexpr = T.pieces * T.width
    row = tl.program_id(0).to(tl.int64)
    tl.store(counter_pointer + row, 0)
    k64, _, _, _, own_tau, inverse = _row_numbers(k, tau, row)
    power = tl.zeros((), tl.float32) + power_high
    at = x.pointer + row * x.stride
    spacing = n_columns // (SAMPLE // BLOCK)
    start = double(tl.load(at))
    start = tl.where(tl.abs(start) < float("inf"), start, 0.0)
    held = ()
    for i in tl.static_range(PIECES):
        number = tl.arange(0, T.width) + i * T.width
        piece = tl.load(at + (number // BLOCK).to(tl.int64) * spacing + number % BLOCK)
        held = held + (less(piece, start, BASED),)  # type: ignore[assignment]  # noqa: RUF005
    origin = less(start, start, BASED)
    there, _, second = over(held, at, SAMPLE, moment_terms, origin, 3, T)
    share = (k64 * SAMPLE / n_columns).to(tl.float32)
    share = tl.minimum(share, there - 0.01)
    ok = (second < float("inf")) & (k64 > 0) & (k64 < n_columns) & (share > 0)
    ok = ok & (own_tau > 1e-25) & (own_tau < 1e25)
    if POOLED > 0:
        ok = ok & (k64 == tl.floor(k64))
    ok = ok & holds(there, there - share, power, L.cdf)

    # of the number of sampled entries above the row's threshold
    variance = share * tl.maximum(1 - share * reciprocal(there), 0.0)
    deviation = tl.sqrt(variance) + 1
    margin = _reach(n_columns, L.cdf)
    per_entry = (n_columns / SAMPLE).to(tl.float32)
    hi, lo = origin * 0, origin * 0
    low, high = origin * 0 - FAR, origin * 0 + FAR
    crowd, turn = origin * 0, origin * 0
    levels = tl.where(ok, 1, 0)
    level = 0
    while level < levels:
        # first the threshold itself, then a lower and a higher one
        goal = share + deviation * tl.where(level == 0, 0.0, tl.where(level == 1, 4.0, -4.0))
        if POOLED > 0:
            new_hi, new_lo, solved = find_gamma(
                held, at, ok, SAMPLE, goal, own_tau, power, EVALUATIONS, POOLED, SIGNED, L.whole, T, False
            )
        else:
            new_hi, new_lo, solved, _, _ = find(
                held, at, origin, ok, SAMPLE, goal, goal * 0, own_tau, power, EVALUATIONS, L, T
            )
        if level == 0:
            hi, lo = new_hi, new_lo
            heat, per_heat, warming = _heat(hi + lo, own_tau, inverse, POOLED)
            mass = _mass(held, at, hi, lo, per_heat, warming, power, L, T, POOLED)
            if not full_support(L.cdf):  # how the density changes, which its sums do not tell
                further = lo + 0.125 * heat
                _, later, warms = _heat(hi + further, own_tau, inverse, POOLED)
                found = _mass(held, at, hi, further, later, warms, power, L, T, POOLED)
                if POOLED > 0:  # in steps by the same temperature
                    found *= later * heat
                turn = (mass - found) * reciprocal(0.125 * mass)
                turn = tl.where(tl.abs(turn) < 8, turn, 0.0)
            crowd = mass * per_entry
            # The variance of the sample's soft count is less, by Σ(y − y²), for which a part of Σf stands
            # here. Where the error that follows is too large for two evaluations, a window may do.
            soft = variance - (1.0 if full_support(L.cdf) else 0.1) * mass
            error = tl.sqrt(tl.maximum(soft, 1e-3 * variance))
            hard = mass * (0.15 if kink(L.cdf) == 0 else 0.03) < error
            entries = (8 * deviation + 2 * margin * mass) * per_entry
            levels = tl.where(hard & (entries < window), 3, 1)
        else:
            threshold = tl.where(solved, new_hi + new_lo, tl.where(level == 1, -FAR, FAR))
            low, high = tl.where(level == 1, threshold, low), tl.where(level == 2, threshold, high)
        level += 1
    state = state_pointer + row * STATE
    ok = ok & (tl.abs(hi) < 1e30)
    if BASED:
        threshold = hi + lo
        tl.store(state + BASE, start + threshold.to(tl.float64))
        low = tl.where(tl.abs(low) < FAR, low - threshold, low)
        high = tl.where(tl.abs(high) < FAR, high - threshold, high)
        hi, lo = hi * 0, lo * 0
    tl.store(t.hi + row, hi.to(tl.float64))
    tl.store(t.lo + row, lo.to(tl.float64))
    tl.store(state + STATUS, tl.where(ok, OPEN, HOPELESS).to(tl.float64))
    tl.store(state + WIDE, tl.where(levels == 3, 1.0, 0.0).to(tl.float64))
    tl.store(state + LOW, low.to(tl.float64))
    tl.store(state + HIGH, high.to(tl.float64))
    tl.store(state + CROWD, crowd.to(tl.float64))
    tl.store(state + TURN, turn.to(tl.float64))


@triton.jit
def _more_than(x, given):
    """Which entries exceed each of four numbers."""
    a, b, c, d = given
    return (
        tl.where(x > a, 1.0, 0.0), tl.where(x > b, 1.0, 0.0),
        tl.where(x > c, 1.0, 0.0), tl.where(x > d, 1.0, 0.0),
    )  # fmt: skip


@triton.jit
def _larger_than(x, given):
    return _more_than(size(x), given)


@triton.jit
def _window(bound, side, margin):
    """The bound, a margin further to one side; where there is no bound, all entries but infinite ones."""
    return tl.where(tl.abs(bound) < FAR, bound + side * margin, bound * 3)


@triton.jit(do_not_specialize=["parts", "length", "window"])
def _sum_parts(
    x, k, tau, t, scratch, n_columns, length, parts, window, power_high, L: tl.constexpr, BASED: tl.constexpr,
    T: tl.constexpr, PARTS: tl.constexpr, POOLED: tl.constexpr = 0, SIGNED: tl.constexpr = False,
):  # fmt: skip
    row, part = place(parts)
    state = scratch.state + row * STATE
    if tl.load(state + STATUS) == OPEN:
        _, _, own_k, k_low, own_tau, inverse = _row_numbers(k, tau, row)
        power = tl.zeros((), tl.float32) + power_high
        hi, lo = tl.load(t.hi + row).to(tl.float32), tl.load(t.lo + row).to(tl.float32)
        left = scratch.left + row * LEFT * parts
        start, mine = extent(part, n_columns, length)
        at = x.pointer + row * x.stride + start + tl.arange(0, T.width)
        base = tl.load(state + BASE)
        threshold = hi + lo
        heat, per_heat, warming = _heat(threshold, own_tau, inverse, POOLED)
        _leave_sums(at, mine, hi, lo, per_heat, power, left + part, parts, base, L, BASED, T, POOLED, SIGNED)
        wide = tl.load(state + WIDE) != 0
        low, high = tl.load(state + LOW).to(tl.float32), tl.load(state + HIGH).to(tl.float32)
        margin = _reach(n_columns, L.cdf) * heat
        lowest, highest = _window(low, -1, margin), _window(high, 1, margin)
        first = threshold - margin
        if POOLED > 0:  # it is hottest at the higher end; and no size is below 0
            hottest, _ = temperature(tl.where(high < FAR, high, threshold), own_tau, POOLED)
            highest = _window(high, 1, hottest)
            lowest, first = tl.maximum(lowest, 0.0), tl.maximum(first, 0.0)
        if wide:
            if POOLED > 0:
                more = over((), at, mine, _larger_than, (lowest, first, threshold + margin, highest), 4, T)
            else:
                more = over(
                    (),
                    at,
                    mine,
                    _more_than,
                    (lowest, first, threshold + margin, highest),
                    4,
                    T,
                    base,
                    BASED,
                )
            for i in tl.static_range(4):
                tl.store(left + (7 + i) * parts + part, more[i])

        if last_of_row(scratch.counter + row, parts):
            status, hi, lo, miss, mass = _step(
                left, n_columns, parts, hi, lo, own_k, k_low, heat, warming, power,
                tl.load(state + CROWD).to(tl.float32), tl.load(state + TURN).to(tl.float32),
                L.cdf, T.pieces * T.width, PARTS, POOLED,
            )  # fmt: skip
            if wide & (status == OPEN):
                # the part of the window on t's side
                too_low = miss > 0
                begin, end = tl.where(too_low, 8, 7), tl.where(too_low, 10, 9)
                above = total_of_parts(left, end, parts, PARTS)
                count = total_of_parts(left, begin, parts, PARTS) - above
                free = own_k.to(tl.float64) + k_low - above
                fits = (count <= window) & (free > 0) & (free < count)
                status = tl.where(fits, GATHER, status)
                if fits:
                    low, high = tl.where(too_low, threshold, low), tl.where(too_low, high, threshold)
                    tl.store(state + LOW, low.to(tl.float64))
                    tl.store(state + HIGH, high.to(tl.float64))
                    # the very bounds that the entries were counted with
                    lowest = tl.where(too_low, first, lowest)
                    highest = tl.where(too_low, highest, threshold + margin)
                    tl.store(state + LOWEST, lowest.to(tl.float64))
                    tl.store(state + HIGHEST, highest.to(tl.float64))
                    tl.store(state + ABOVE, above)
                    tl.store(state + COUNT, count)
                    p = tl.arange(0, PARTS)
                    there = p < parts
                    counts = tl.load(left + begin * parts + p, mask=there, other=0.0, cache_modifier=".cg")
                    counts -= tl.load(left + end * parts + p, mask=there, other=0.0, cache_modifier=".cg")
                    # where each part's entries begin
                    counts = counts.to(tl.int32)
                    tl.store(left + p, (tl.cumsum(counts, axis=0) - counts).to(tl.float64), mask=there)
            tl.store(t.hi + row, hi.to(tl.float64))
            tl.store(t.lo + row, lo.to(tl.float64))
            tl.store(state + STATUS, status)
            tl.store(state + CROWD, mass.to(tl.float64))


@triton.jit
def _leave_sums(
    at, n, hi, lo, inverse, power, left, parts, base, L: tl.constexpr, BASED: tl.constexpr, T: tl.constexpr,
    POOLED: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    scale = inverse * unit(L.cdf)
    COUNT: tl.constexpr = term_count(L.cdf)
    if POOLED > 0:
        sums = over((), at, n, _pooled_and_bad, (hi, lo * scale, scale, power, L, SIGNED), COUNT + 1, T)
        # what is loaded beyond the part's end counts as −inf
        beyond = tl.cdiv(n, T.pieces * T.width) * (T.pieces * T.width) - n if SIGNED else 0
        tl.store(left, tl.where(sums[COUNT] > beyond, float("nan"), sums[0]))
    elif L.cdf == NORMAL or not full_support(L.cdf):
        sums = over((), at, n, _terms_and_nan, (hi, lo * scale, scale, power, L), COUNT + 1, T, base, BASED)
        tl.store(left, tl.where(sums[COUNT] > 0, float("nan"), sums[0]))
    else:
        sums = over((), at, n, terms, (hi, lo * scale, scale, power, L), COUNT, T, base, BASED)
        tl.store(left, sums[0])
    for i in tl.static_range(1, COUNT):
        tl.store(left + i * parts, sums[i])


@triton.jit
def _terms_and_nan(x, given):
    """The terms, and 1 for a score that is NaN: the sample may miss it, and what is cut to the ends of an
    interval hides it."""
    return terms(x, given) + (tl.where(x == x, 0.0, 1.0),)  # noqa: RUF005


@triton.jit
def _pooled_and_bad(x, given):
    """The terms of a size, and 1 for what has none in float32: a NaN, an infinite entry, and −inf where
    entries are SIGNED; otherwise −inf stands for what may not be selected."""
    SIGNED: tl.constexpr = given[5]
    good = (tl.abs(x) if SIGNED else x) < float("inf")
    return pooled_terms(x, given) + (tl.where(good, 0.0, 1.0),)  # noqa: RUF005


@triton.jit
def _step(
    left, n_columns, parts, hi, lo, k, k_low, heat, warming, power, crowd, turn,
    CDF: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    """STATUS and t after the step that the sums of all parts call for, by how much the count exceeds k, and
    Σf."""
    sums = ()
    for i in tl.static_range(term_count(CDF)):
        sums = sums + (total_of_parts(left, i, parts, PARTS),)  # type: ignore[assignment]  # noqa: RUF005
    seen = tl.cdiv(n_columns, STEP) * tl.full((), STEP, tl.int64)
    excess = excess_of(sums, k, k_low, seen, CDF)
    miss, h, mu, beta, gamma, mass, last = taylor_step(
        sums, excess, turn, power, CDF, BY_COUNT, warming, POOLED
    )
    step = long_step(miss, mu, h, beta, gamma, mass, crowd, CDF)
    h = tl.where(last, h, step)
    new_hi, new_lo = two_sum(hi, lo + h * heat)
    if POOLED > 0:  # it stays above 0
        least = 0.25 * hi
        new_hi, new_lo = tl.maximum(new_hi, least), tl.where(new_hi < least, 0.0, new_lo)
    fine = tl.abs(new_hi) < 1e30
    status = tl.where(last, DONE, tl.where(tl.abs(miss) < 1e30, OPEN, HOPELESS)).to(tl.float64)
    return status, tl.where(fine, new_hi, hi), tl.where(fine, new_lo, lo), miss, mass


@triton.jit
def _gather(
    at, n, begin, lowest, highest, buffer, base, BASED: tl.constexpr, WIDTH: tl.constexpr,
    POOLED: tl.constexpr,
):  # fmt: skip
    """Of a part's entries those between two numbers, in their order."""
    column = tl.arange(0, WIDTH)
    for start in range(0, n, WIDTH):
        x = tl.load(at + start, mask=column + start < n, other=float("-inf"))
        value = less(x, base, BASED)
        if POOLED > 0:
            value = size(value)
        chosen = (value > lowest) & ~(value > highest)
        ones = tl.where(chosen, 1, 0)
        count = tl.sum(ones, axis=0)
        if count > 0:
            tl.store(buffer + (begin + tl.cumsum(ones, axis=0) - 1), x, mask=chosen)
        begin += count


@triton.jit(do_not_specialize=["parts", "length", "window"])
def _finish_parts(
    x, k, tau, t, scratch, n_columns, length, parts, window, exponent, L: tl.constexpr, BASED: tl.constexpr,
    T: tl.constexpr, PARTS: tl.constexpr, POOLED: tl.constexpr = 0, SIGNED: tl.constexpr = False,
):  # fmt: skip
    row, part = place(parts)
    state = scratch.state + row * STATE
    status = tl.load(state + STATUS)
    if (status != DONE) & ((status != HOPELESS) | ((part == 0) & (not BASED))):
        k64, tau64, own_k, k_low, own_tau, inverse = _row_numbers(k, tau, row)
        power = tl.zeros((), tl.float32) + exponent[0]
        hi, lo = tl.load(t.hi + row).to(tl.float32), tl.load(t.lo + row).to(tl.float32)
        crowd = tl.load(state + CROWD).to(tl.float32)
        left = scratch.left + row * LEFT * parts
        start, mine = extent(part, n_columns, length)
        column = tl.arange(0, T.width)
        at = x.pointer + row * x.stride + start + column
        low, high = tl.load(state + LOW).to(tl.float32), tl.load(state + HIGH).to(tl.float32)
        buffer = scratch.window + row * window
        base = tl.load(state + BASE)
        heat, per_heat, warming = _heat(hi + lo, own_tau, inverse, POOLED)
        if status == GATHER:
            begin = tl.load(left + part).to(tl.int32)
            lowest = tl.load(state + LOWEST).to(tl.float32)
            highest = tl.load(state + HIGHEST).to(tl.float32)
            _gather(at, mine, begin, lowest, highest, buffer, base, BASED, T.width, POOLED)
        elif status == OPEN:
            _leave_sums(
                at, mine, hi, lo, per_heat, power, left + part, parts, base, L, BASED, T, POOLED, SIGNED
            )

        alone = status == HOPELESS
        if not alone:
            alone = last_of_row(scratch.counter + row, parts)
        if alone:
            gathered = status == GATHER
            if status == OPEN:
                status, hi, lo, _, _ = _step(
                    left, n_columns, parts, hi, lo, own_k, k_low, heat, warming, power, crowd,
                    tl.load(state + TURN).to(tl.float32), L.cdf, T.pieces * T.width, PARTS, POOLED,
                )  # fmt: skip
            t64, rest64 = hi.to(tl.float64), lo.to(tl.float64)
            trying = status != DONE
            while trying:
                if gathered:
                    source, count = buffer, tl.cast(tl.load(state + COUNT), n_columns.dtype)
                    level = k64 - tl.load(state + ABOVE)
                else:
                    source, count = x.pointer + row * x.stride, n_columns
                    level = k64
                    low, high = low * 0 - FAR, high * 0 + FAR
                goal, goal_low = in_two(level)
                n = tl.cast(count, tl.float32)
                hi, lo, ok = iterate(
                    (), source + column, count, (hi, lo, low, high, crowd), status == HOPELESS,
                    (n, goal, goal_low, own_tau, inverse, power), EVALUATIONS, L, T, False, base, BASED,
                    POOLED=POOLED,
                )  # fmt: skip
                ok = ok & (status != HOPELESS)
                if POOLED > 0:
                    ok = ok & (hi > 0)
                t64, rest64 = hi.to(tl.float64), lo.to(tl.float64)
                careful = ~ok
                if BASED:  # a whole row is solved with the others' t
                    careful = careful & gathered
                if careful:
                    if POOLED > 0:
                        t64, rest64 = find_sizes_in_float64(
                            (source, source, 0, count), level, tau64, POOLED, SIGNED, T.chunk
                        )
                    else:
                        t64, rest64 = find_in_float64(
                            (source, source, 0, count), level, tau64, 0.0, joined(*exponent), L.cdf, BY_COUNT,
                            False, T.chunk,
                        )  # fmt: skip
                        if BASED:
                            t64 -= base
                status = tl.where(ok, DONE, tl.where(careful, CAREFUL, HOPELESS)).to(tl.float64)
                inside = (t64 + rest64 >= low) & (t64 + rest64 <= high)
                trying = gathered & ~inside  # one row in ten thousand
                gathered = gathered & ~gathered
            tl.store(t.hi + row, t64)
            tl.store(t.lo + row, rest64)
            tl.store(state + STATUS, status)


@triton.jit(do_not_specialize=["parts", "length"])
def _write_parts(
    x, k, tau, out_pointer, t, state_pointer, n_columns, length, parts, exponent, L: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    row, part = place_last(parts)
    k64, tau64, _, _, _, inverse = _row_numbers(k, tau, row)
    hi64, lo64 = tl.load(t.hi + row), tl.load(t.lo + row)
    start, mine = extent(part, n_columns, length)
    x_at, to = x.pointer + row * x.stride + start, out_pointer + row * n_columns + start
    done = tl.load(state_pointer + row * STATE + STATUS) == DONE
    if done:
        hi, lo = hi64.to(tl.float32), lo64.to(tl.float32)
        power = tl.zeros((), tl.float32) + exponent[0]
        values = row_values(hi, lo, inverse, 2 * k64 > n_columns, power, L.cdf, 1)
        column = tl.arange(0, T.width)
        write_backwards(x_at + column, to + column, 0, mine, done, values, L, T)
    else:
        threshold = (hi64, lo64, tau64, joined(*exponent))
        write_in_float64(to, (x_at, x_at, 0, mine), threshold, L.cdf, BY_COUNT, L.output, T.chunk)


KERNELS = (_sample_rows, _sum_parts, _finish_parts, _write_parts)


def solve(
    source: Rows,
    k: Values,
    tau: Values,
    t: Threshold,
    law: Law,
    power: tuple[float, float],
    fine: bool,
    **more: Any,
) -> tuple[Scratch, layout.Cut]:
    """Fill t; if fine, with what it is more than the row's BASE. More constants make it γ of a top-k in
    magnitude. Returned is what the launches leave for those that follow, and how rows are cut."""
    rows, n = source.pointer.shape
    cut, window = layout.cut(rows, n), layout.window(rows)
    state, left = t.hi.new_empty(rows, STATE.value), t.hi.new_empty(rows, LEFT.value, cut.parts)
    counter = t.hi.new_empty(rows, dtype=torch.int32)
    scratch = Scratch(state, counter, left, source.pointer.new_empty(rows, window))
    numbers, size = (source, k, tau, t), (n, cut.length, cut.parts, window)
    which = {"L": law, "BASED": fine, **more}
    part = {"T": layout.part_tile(cut), "num_warps": cut.warps, **layout.registers()}
    programs, padded = rows * cut.parts, next_power_of_2(cut.parts)
    pieces, width, warps = layout.sample()
    launch(
        _sample_rows, rows,
        *numbers, state, counter, n, window, power[0], **which, T=Tile(1, pieces, width, True, False, 0),
        BLOCK=layout.SAMPLE_BLOCK, num_warps=warps, **layout.registers(),
    )  # fmt: skip
    launch(_sum_parts, programs, *numbers, scratch, *size, power[0], **which, **part, PARTS=padded)
    launch(_finish_parts, programs, *numbers, scratch, *size, power, **which, **part, PARTS=padded)
    return scratch, cut


def soft_topk(source: Rows, k: Values, tau: Values, found: Found, asked: layout.Asked) -> None:
    """Fill what is found."""
    rows, n = source.pointer.shape
    law, power, t = layout.law(*asked), layout.power(asked.F), Threshold(found.hi, found.lo)
    scratch, cut = solve(source, k, tau, t, law, power, fine=False)
    launch(
        _write_parts, rows * cut.parts,
        source, k, tau, found.out, t, scratch.state, n, cut.length, cut.parts, power,
        L=law, T=layout.part_tile(cut), num_warps=cut.warps, **layout.registers(),
    )  # fmt: skip
