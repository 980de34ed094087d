"""The threshold of a row in float64, with costs or without: a program reads the row a chunk at a time.

It serves float64 scores, and the rows for which float32 does not suffice. The equations and the
order of the edge cases are the reference's (`_kernels.reference.root`, `_kernels.reference.soft_budget`).
What selected entries cost beyond the budget (with a cost of one each: their number beyond k), less what they
lack, plus what the others spend, is P − Q for two sums of positive numbers. These have all their digits in a
gap, too. The root is found by Newton's method on log P = log Q. Every trial is clamped into a bracket, whose
ends are pairs as t is one, and a bracket that does not shrink is bisected. By value the slopes of log P and
log Q carry the costs, which may differ by many decades: where one cost hands over to another, a step of
Newton's may lead anywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Digits, Found, Matrix, Rows, Tile, Values
from khot._kernels.triton.fast import joined, store, two_sum
from khot._kernels.triton.float64_steps import (
    FARTHEST,
    NOISE,
    ROUNDING,
    differences,
    less,
    logs,
    newton,
    next_state,
)
from khot._kernels.triton.float64_sums import (
    BY_COUNT,
    BY_VALUE,
    beside,
    cost_moments,
    distances,
    evaluate,
    facts,
    finite,
    least,
    levels_of_share,
    load,
    standardized,
    sums,
)
from khot._kernels.triton.functions import (
    HUGE,
    LOG,
    THRESHOLD,
    TINY,
    full_support,
    icdf,
    icdf_error,
    log_F,
    median,
    moments,
    normal_icdf,
    side,
)
from khot._kernels.triton.launch import launch
from khot._kernels.triton.sizes import next_power_of_2

EVALUATIONS = tl.constexpr(128)  # at most
WIDTH = 1024  # entries that a program holds at a time: two of a thread, as float64 fills registers


# ------------------------------------------------------------------------------------ what a row is


@triton.jit
def number64(pointer, stride, high, low, row):
    """The number of one row in float64; without a pointer it came by value, the same for all."""
    if pointer is None:
        return tl.zeros((), tl.float64) + high + low
    else:
        return tl.load(pointer + row * stride).to(tl.float64)


@triton.jit
def row_source(x, cost, row, n, BY: tl.constexpr):
    """The source of one row (:mod:`.float64_sums`)."""
    x_at = x.pointer + row * x.stride
    if BY == BY_COUNT:
        return x_at, x_at, 0, n
    else:
        return x_at, cost.pointer + row * cost.row, cost.column, n


@triton.jit
def find_in_float64(
    source, goal, tau, slack, power,
    CDF: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """hi and lo of a row, where entries spend the goal, a budget or k: ±HUGE where t is infinite, and NaN
    where the row has no answer. Slack is the share of all costs by which a budget may be out of reach."""
    bad, free, pinned, mean, square = facts(source, BY, WIDTH)
    slack *= free[0] + pinned[0]
    left, left_low = two_sum(goal, -pinned[0])
    left_low -= pinned[1]
    answered = (bad == 0) & (tau > 0) & (tau < float("inf")) & (left >= -slack)
    if not AT_MOST:
        answered = answered & (left <= free[0] + slack)
    tau = tl.where(answered, tau, 1.0)
    left, left_low = tl.where(left > 0, left, 0.0), tl.where(left > 0, left_low, 0.0)
    complement = less(free[0], free[1], left, left_low)
    # what is left of costs to rounding is not a share that could be spent; a count is exact
    every = (complement <= 0) & (left > 0) if BY == BY_COUNT else complement <= 16 * ROUNDING * free[0]
    settled = tl.where(every, -HUGE, tl.where(left == 0, HUGE, 0.0))
    hi, lo = tl.where(answered, settled, float("nan")), tl.where(answered, settled, float("nan"))
    live = answered if AT_MOST else answered & (settled == 0)
    if live:
        hi, lo = _search(
            source, goal, left, complement, settled, free[0], mean, square, tau, power,
            CDF, BY, AT_MOST, WIDTH,
        )  # fmt: skip
    return hi, lo


@triton.jit
def share(x, w, threshold, CDF: tl.constexpr, BY: tl.constexpr):
    """F(z), for infinite scores and thresholds, too; z and 1 − z; f; and which entries an infinite score or
    threshold decides. Their z is that of another score, and their f is 0."""
    hi, lo, tau, power = threshold
    z, one_minus_z, decided, chosen = _position(x, w, hi, lo, tau, CDF, BY)
    above = z > median(power, CDF)
    tail, density = side(z, one_minus_z, above, 0.0, -tl.abs(z), power, CDF)
    y = tl.where(above, 1 - tail, tail)
    y = tl.where(decided, tl.where(chosen, 1.0, 0.0), y)
    return y, z, one_minus_z, tl.where(decided, 0.0, density), decided


@triton.jit
def _position(x, w, hi, lo, tau, CDF: tl.constexpr, BY: tl.constexpr):
    """z and 1 − z of entries; which ones an infinite score or threshold decides, and which of them it
    selects."""
    infinite = tl.abs(hi) == HUGE
    # not "&": Triton's interpreter makes integers of scalar flags
    held = tl.where(infinite, w > 0 if BY == BY_VALUE else x == x, False)
    decided = held | (tl.abs(x) == float("inf"))
    chosen = tl.where(tl.abs(x) == float("inf"), x > 0, hi < 0)
    hi, lo = tl.where(infinite, 0.0, hi), tl.where(infinite, 0.0, lo)
    z, one_minus_z = standardized(tl.where(decided, 0.0, x), w, hi, lo, tau, CDF, BY)
    return z, one_minus_z, decided, chosen


@triton.jit
def write_in_float64(
    to, source, threshold, CDF: tl.constexpr, BY: tl.constexpr, OUTPUT: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """y of a row, or its logarithm; NaN everywhere if the row has no answer."""
    hi, lo, tau, power = threshold
    for start in range(0, source[3], WIDTH):
        x, w = load(source, start, BY, WIDTH)
        if OUTPUT == LOG:
            z, _, decided, chosen = _position(x, w, hi, lo, tau, CDF, BY)
            out = tl.where(decided, tl.where(chosen, 0.0, float("-inf")), log_F(z, power, CDF))
        else:
            out, _, _, _, _ = share(x, w, threshold, CDF, BY)
        column = start + tl.arange(0, WIDTH)
        store(to + column, tl.where(hi == hi, out, hi), column < source[3])


# -------------------------------------------------------------------------------------- the search

# why a search ends: after its last step; in a gap of compact support; or, where the goal is an upper bound,
# because t = 0 spends no more, or because t is infinite
OPEN, DONE, GAP, LOOSE, SETTLED = (tl.constexpr(i) for i in range(5))


@triton.jit
def _search(
    source, goal, left, complement, settled, free, mean, square, tau, power,
    CDF: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    guess, low, high, most = _begin(
        source, left, complement, free, mean, square, tau, power, CDF, BY, WIDTH
    )  # fmt: skip
    zero = tl.zeros((), tl.float64)
    infinite = zero + float("inf")
    state = (zero if AT_MOST else guess, zero, low, zero, high, zero, infinite, infinite)
    near = (zero, zero)
    count = 0
    status = 0  # OPEN
    while status == OPEN:
        threshold = (state[0], state[1], tau, power)
        spent, tails = evaluate(source, threshold, near[0], near[1], CDF, BY, WIDTH)
        over, over_low = two_sum(spent[0], -goal)
        over += over_low + spent[1]
        jump = (zero + float("nan"), zero)
        if full_support(CDF):
            trial, next_near, again = _smooth_trial(source, threshold, over, tails, near, CDF, BY, WIDTH)
        else:
            trial, jump, between = _compact_trial(source, threshold, over, tails, CDF, BY, WIDTH)
            next_near, again = near, over != over
            status = tl.where(between, GAP, status)
        if AT_MOST:  # noqa: SIM102 (known when it is compiled, the other is not)
            if count == 0:
                loose = trial[0] <= 0
                again = again & ~loose
                status = tl.where(loose, LOOSE, tl.where(settled != 0, SETTLED, OPEN))
                jump = (guess, zero)
        if again:
            near = next_near
        elif status == OPEN:
            state, finished = next_state(state, trial, jump, tau, most, count, CDF)
            status = tl.where(finished, DONE, OPEN)
            near = (zero, zero)
        elif status == GAP:
            state = jump + state[2:]
        count += 1
        status = tl.where((status == OPEN) & (count >= EVALUATIONS), DONE, status)
    hi, lo = state[0], state[1]
    if AT_MOST:
        hi, lo = tl.where(status == LOOSE, 0.0, hi), tl.where(status == LOOSE, 0.0, lo)
        hi, lo = tl.where(status == SETTLED, settled, hi), tl.where(status == SETTLED, settled, lo)
    return hi, lo


@triton.jit
def _begin(
    source,
    left,
    complement,
    free,
    mean,
    square,
    tau,
    power,
    CDF: tl.constexpr,
    BY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The first guess, the bracket, and the greatest a."""
    quantile = _quantile(left, complement, free, power, CDF)
    low, high, most = least(
        levels_of_share, (quantile, tau, icdf_error(CDF), BY), 3, source, BY, WIDTH
    )  # fmt: skip
    low, high, most = tl.maximum(low, -FARTHEST), tl.minimum(-high, FARTHEST), -most
    costs, products, cubes = free, free, free
    if BY == BY_VALUE:
        costs, products, cubes = sums(cost_moments, (), 3, source, BY, WIDTH)
    else:
        most = most * 0 + 1
    portion = tl.minimum(tl.maximum(left / free, TINY), 1 - 1e-16)
    guess = _guess(free, mean, square, costs, products, cubes, portion, tau, power, CDF, BY)
    guess = tl.where((guess > low) & (guess < high), guess, 0.5 * low + 0.5 * high)
    return guess, low, high, most


@triton.jit
def _smooth_trial(
    source, threshold, over, tails, near, CDF: tl.constexpr, BY: tl.constexpr, WIDTH: tl.constexpr
):
    """Of CDFs with f > 0 everywhere: the trial, which is the miss, its size, the size that rounding may have,
    Newton's step in t/τ, and whether that is to be tried; |z| of the nearest entries; and whether to evaluate
    again relative to them, since tails underflow that decide."""
    miss, ratio, logarithms, rates, deep = logs(over, tails, near, CDF)
    plain = near[0] + near[1] == 0
    next_up, next_down = near
    if plain & ~(tl.abs(ratio) <= 1):
        next_up, next_down = least(distances, (threshold, CDF, BY), 2, source, BY, WIDTH)
        next_up, next_down = finite(next_up), finite(next_down)
    step, reaches = newton(over, tails, near, (next_up, next_down), ratio, logarithms, rates, CDF)
    # deep in a gap the digits of the logarithms are few
    size, rounding = tl.abs(ratio) / (NOISE * (2 + tl.abs(logarithms[0]))), miss * 0 + 1
    return (miss, size, rounding, step, reaches), (next_up, next_down), deep & plain


@triton.jit
def _compact_trial(source, threshold, over, tails, CDF: tl.constexpr, BY: tl.constexpr, WIDTH: tl.constexpr):
    """Of compact support: the trial as above; a threshold to jump to, NaN if there is none; and whether t is
    in a gap, for which that threshold is the answer."""
    miss, step, rounding = differences(over, tails, threshold[3], CDF)
    reaches = tails[2] + tails[3] > 0
    jump_hi, jump_lo, between = miss + float("nan"), miss * 0, miss != miss
    if ((over >= 0) & (tails[0] == 0)) | ((over <= 0) & (tails[1] == 0)):
        jump_hi, jump_lo, between = _jump(source, threshold, over, miss, CDF, BY, WIDTH)
        jump_hi = tl.where(reaches & ~between, float("nan"), jump_hi)
    return (miss, tl.abs(miss), rounding, step, reaches), (jump_hi, jump_lo), between


@triton.jit
def _jump(source, threshold, over, miss, CDF: tl.constexpr, BY: tl.constexpr, WIDTH: tl.constexpr):
    """Where one side of t has no entry with 0 < y < 1: the threshold at which the next entry alone makes up
    for the miss, NaN if it is not dear enough; or in a gap the limit of smooth CDFs, and whether it is one.
    """
    _, _, tau, power = threshold
    up, down = beside(source, threshold, CDF, BY, WIDTH)
    between = (over == 0) & (up[0] >= down[0])
    flat, flat_low = between_levels(up[0], down[0], up[3], down[3])
    above = miss > 0
    portion = tl.abs(miss) / tl.where(above, up[2], down[2])
    place = icdf(tl.where(above, 1 - portion, portion), power, CDF)
    x, a = tl.where(above, up[1], down[1]), tl.where(above, up[3], down[3])
    t = x / a
    low = (tl.fma(-t, a, x) - tau * place) / a
    t = tl.where((portion > 0) & (portion < 1), t, float("nan"))
    t, low = two_sum(t, low)
    return tl.where(between, flat, t), tl.where(between, flat_low, low), between


@triton.jit
def between_levels(up, down, up_a, down_a):
    """The threshold in a gap of compact support: a mean of its ends, by the slopes of the entries there."""
    a = up_a + down_a
    return two_sum(up * (up_a / a), down * (down_a / a))


@triton.jit
def _guess(
    free, mean, square, costs, products, cubes, share, tau, power, CDF: tl.constexpr, BY: tl.constexpr
):
    """t, if x − t a were normal and had noise distributed as τF. Given are sums of w and of its products with
    x, x², and by value w, wx, w²."""
    own_mean, own_variance = moments(power, CDF)
    noise = tau * tau * own_variance
    normal = normal_icdf(share)
    own = (icdf(share, power, CDF) - own_mean) / tl.sqrt(noise * 0 + own_variance)
    x = mean / free
    spread = tl.maximum(square / free - x * x, 0.0)
    x_mean = x - tau * own_mean
    if BY == BY_VALUE:
        a = costs / free
        both = products / free - x * a
        of_costs = tl.maximum(cubes / free - a * a, 0.0)
        t = x_mean / a
        for _ in tl.static_range(4):  # the spread depends on t, so that this is a fixed point
            variance = noise + tl.maximum(spread - 2 * t * both + t * t * of_costs, 0.0)
            t = (x_mean - (normal + (own - normal) * (noise / variance)) * tl.sqrt(variance)) / a
        return t
    else:
        variance = noise + spread
        return x_mean - (normal + (own - normal) * (noise / variance)) * tl.sqrt(variance)


@triton.jit
def _quantile(left, complement, free, power, CDF: tl.constexpr):
    """F⁻¹(left/free), from what is left of the budget and what it does not pay for."""
    least = tl.maximum(tl.minimum(left, complement) / free, TINY)
    if full_support(CDF):  # which are symmetric
        z = icdf(tl.minimum(least, 0.5), power, CDF)
        return tl.where(left < complement, z, -z)
    else:
        return icdf(tl.minimum(tl.maximum(left / free, TINY), 1.0), power, CDF)


# ------------------------------------------------------------------------------------- the kernel


@triton.jit
def solve_row(row, x, cost, k, tau, found, n, digits, power, L: tl.constexpr, T: tl.constexpr):
    """One row, as :class:`.arguments.Problem` has it: a count, or a budget with its digits."""
    source = row_source(x, cost, row, n, L.by)
    goal, slack, own_tau = number64(*k, row), 0.0, number64(*tau, row)
    if digits is not None:
        goal, slack = goal + digits.third, digits.slack
    hi, lo = find_in_float64(source, goal, own_tau, slack, power, L.cdf, L.by, L.at_most, T.chunk)
    tl.store(found.hi + row, hi)
    tl.store(found.lo + row, lo)
    if L.output != THRESHOLD:
        write_in_float64(
            found.out + row * n, source, (hi, lo, own_tau, power), L.cdf, L.by, L.output, T.chunk
        )
    elif found.out is not None:
        store(found.out + row, hi + lo, row >= 0)


@triton.jit
def solve_in_float64(x, cost, k, tau, found, n, digits, exponent, L: tl.constexpr, T: tl.constexpr):
    solve_row(
        tl.program_id(0).to(tl.int64), x, cost, k, tau, found, n, digits, joined(*exponent), L, T
    )  # fmt: skip


KERNELS = (solve_in_float64,)


def chunk(n: int) -> dict[str, int]:
    """How much of a row of n entries a program holds at a time."""
    width = min(WIDTH, max(64, next_power_of_2(n)))
    return {"WIDTH": width, "num_warps": width // 64}


def solve(
    x: Rows, cost: Matrix | None, goal: Values, tau: Values, found: Found, asked: layout.Asked, digits: Digits
) -> None:
    """Fill what is found; out not if only the threshold is asked for. The goal is k or a budget."""
    rows, n = x.pointer.shape
    held = chunk(n)
    if asked.output not in ("y", "log"):
        found = found._replace(out=None)
    launch(
        solve_in_float64, rows,
        x, cost, goal, tau, found, n, digits, layout.power(asked.F), L=layout.law(*asked),
        T=Tile(1, 1, held["WIDTH"], False, True, held["WIDTH"]), num_warps=held["num_warps"],
    )  # fmt: skip
