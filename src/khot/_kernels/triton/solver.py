"""What the solver is made of, in Triton: sums over entries, and the step that follows from them."""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.functions import (
    HUGE,
    LOG,
    TINY,
    chunks,
    full_support,
    icdf,
    icdf_error,
    last_step,
    log_F,
    log_scales,
    median,
    moments,
    normal_icdf,
    pair,
    side,
    standardize,
)

__all__ = [
    "add_statistics",
    "add_sums",
    "begin",
    "evaluate",
    "solve_row",
    "statistics",
    "take_step",
    "write",
    "write_chunk",
]


# ------------------------------------------------------------------- passes: sums over entries


@triton.jit
def statistics(x, valid):
    """Of the entries in x (rows, columns): whether one is NaN; how many are finite, and +inf; least and
    greatest finite one; mean and sum of squared deviations of these."""
    nan = tl.max(tl.where(valid & (x != x), 1, 0), axis=1)
    finite = valid & (tl.abs(x) < float("inf"))
    n = tl.sum(tl.where(finite, 1, 0), axis=1).to(tl.float64)
    pinned = tl.sum(tl.where(valid & (x == float("inf")), 1, 0), axis=1).to(tl.float64)
    low = tl.min(tl.where(finite, x, float("inf")), axis=1).to(tl.float64)
    high = tl.max(tl.where(finite, x, float("-inf")), axis=1).to(tl.float64)
    mean = tl.sum(tl.where(finite, x, 0.0).to(tl.float64), axis=1) / tl.maximum(n, 1.0)
    centred = tl.where(finite, x.to(tl.float64) - mean[:, None], 0.0)
    return nan, n, pinned, low, high, mean, tl.sum(centred * centred, axis=1)


@triton.jit
def evaluate(x, valid, hi, lo, tau, near_up, near_down, power, CDF: tl.constexpr):
    """The sums of one evaluation at t = hi + lo: see `steps.Sums`. The last two are the
    nearest entries themselves.

    Tails and densities of each side are relative to those at near_up and near_down (:func:`_side`).
    """
    z, rest = standardize(x, hi, lo, tau, CDF)
    above = (z > median(power, CDF)) & valid
    below = (z <= median(power, CDF)) & valid
    near = tl.where(above, near_up.to(z.dtype)[:, None], near_down.to(z.dtype)[:, None])
    # near − |z| from the scores themselves: far out in a gap the digits of z would not tell them apart
    up, down = hi + lo + near_up * tau, hi + lo - near_down * tau
    nearest = tl.where(above, up.to(x.dtype)[:, None], down.to(x.dtype)[:, None])
    behind = tl.where(near > 0, -(tl.abs(x - nearest) / tau.to(z.dtype)[:, None]), -tl.abs(z))
    tail, density = side(z, rest, above, near, behind, power, CDF)
    tail, density = tail.to(tl.float64), density.to(tl.float64)
    m = tl.sum(tl.where(above, 1, 0), axis=1).to(tl.float64)
    A = tl.sum(tl.where(above, tail, 0.0), axis=1)
    B = tl.sum(tl.where(below, tail, 0.0), axis=1)
    f_above = tl.sum(tl.where(above, density, 0.0), axis=1)
    f_below = tl.sum(tl.where(below, density, 0.0), axis=1)
    up = tl.min(tl.where(above, x, float("inf")), axis=1).to(tl.float64)
    down = tl.max(tl.where(below, x, float("-inf")), axis=1).to(tl.float64)
    return m, A, B, f_above, f_below, up, down


# ------------------------------------------------------------- between passes: numbers of a row


@triton.jit
def begin(
    nan,
    n,
    pinned,
    xmin,
    xmax,
    mean,
    variance,
    k,
    tau,
    power,
    CDF: tl.constexpr,
):
    """The first guess and bracket, and which rows need no solving: what :func:`solve` does before Newton.

    Returns k and n of the finite entries, tau made harmless where it is not, settled (hi where no solving is
    needed: ±HUGE or NaN, else 0), the guess, and the bracket.
    """
    free = k - pinned
    bad = (nan > 0) | (free != free) | (free < 0) | (free > n) | (tau != tau) | (tau <= 0) | (tau > HUGE)
    settled = tl.where(free == 0, HUGE, tl.where(free == n, -HUGE, 0.0))
    settled = tl.where(bad, float("nan"), settled)
    live = settled == 0
    k = tl.where(live, free, 0.5)
    n = tl.where(live, n, 1.0)
    tau = tl.where(live, tau, 1.0)
    xmin, xmax = tl.where(live, xmin, 0.0), tl.where(live, xmax, 0.0)
    mean, variance = tl.where(live, mean, 0.0), tl.where(live, variance, 0.0)

    share = tl.minimum(tl.maximum(k / n, TINY), 1 - 1e-16)
    own = icdf(share, power, CDF)
    own_mean, own_variance = moments(power, CDF)
    pad = icdf_error(CDF) * tau
    low = xmin - tau * own - pad - 1e-15 * tl.abs(xmin)
    high = xmax - tau * own + pad + 1e-15 * tl.abs(xmax)
    noise = tau * tau * own_variance
    total = noise + variance
    quantile = normal_icdf(share)
    quantile += ((own - own_mean) / tl.sqrt(tau * 0 + own_variance) - quantile) * (noise / total)
    guess = mean - tau * own_mean - quantile * tl.sqrt(total)
    guess = tl.where((guess > low) & (guess < high), guess, 0.5 * low + 0.5 * high)
    return k, n, tau, settled, guess, low, high


@triton.jit
def order_bounds(value, rank, k, n, tau, power, CDF: tl.constexpr):
    """Bounds on t from the rank-th largest entry: khot._kernels.reference.solver._order_bounds."""
    pad = icdf_error(CDF) * tau + 1e-15 * tl.abs(value)
    share = tl.minimum(tl.maximum(k / tl.maximum(rank, 1.0), TINY), 1 - 1e-16)
    low = value - tau * icdf(share, power, CDF) - pad
    share = (k - (rank - 1.0)) / tl.maximum(n - (rank - 1.0), 1.0)  # k − rank may round
    high = value - tau * icdf(tl.minimum(tl.maximum(share, TINY), 1 - 1e-16), power, CDF) + pad
    low = tl.where((rank > k) & (rank >= 1) & (tl.abs(value) < HUGE), low, float("-inf"))
    return low, tl.where((rank - 1 < k) & (rank <= n) & (tl.abs(value) < HUGE), high, float("inf"))


@triton.jit
def take_step(
    m, A, B, f_above, f_below, up, down, pinned, k, n, tau,
    hi, lo, low, high, near_up, near_down, count, FINE: tl.constexpr, power, CDF: tl.constexpr,
):  # fmt: skip
    """One step of the solver: the new hi, lo, low, high, near_up, near_down; and whether it was the last.

    low and high bracket t. near_up or near_down above 0 mark a row in a gap so deep that both tails
    underflow, where log A = log B is solved.
    """
    excess = m - pinned - k
    deep = (near_up > 0) | (near_down > 0)
    # C − k = P − Q without cancellation: in a gap both are small
    P = B + tl.maximum(excess, 0.0)
    Q = A + tl.maximum(-excess, 0.0)
    miss = P - Q
    density = f_above + f_below
    t = hi + lo
    rank = m - pinned
    low_1, high_1 = order_bounds(up, rank, k, n, tau, power, CDF)
    low_2, high_2 = order_bounds(down, rank + 1, k, n, tau, power, CDF)
    new_low = tl.maximum(low, tl.maximum(low_1, low_2))
    new_high = tl.minimum(high, tl.minimum(high_1, high_2))
    new_low = tl.maximum(new_low, tl.where(miss > 0, t, float("-inf")))
    new_high = tl.minimum(new_high, tl.where(miss < 0, t, float("inf")))

    # Many undecided entries: Newton on logit(C/n), nearly linear in t. Few: on log P = log Q.
    share = tl.minimum(tl.maximum((k + miss) / n, TINY), 1 - 1e-16)
    target = tl.minimum(tl.maximum(k / n, TINY), 1 - 1e-16)
    logit = tl.log(share) - tl.log(1 - share) - tl.log(target) + tl.log(1 - target)
    step = logit * share * (1 - share) * n / density
    step = tl.where(tl.abs(miss) <= 1e-4 * tl.minimum(k, n - k), miss / density, step)
    if full_support(CDF):
        few = tl.log(P / Q) / (f_below / P + f_above / Q)
        step = tl.where((P < 1) & (Q < 1) & (tl.abs(few) < HUGE), few, step)
    step = step * tau
    middle = 0.5 * new_low + 0.5 * new_high
    inside = (t + step > new_low) & (t + step < new_high)
    # now and then the middle, since Newton may creep
    newton = inside & ((count < 8) | (count % 3 != 0))
    close = tl.abs(step) <= (1e-6 if FINE else 1e-3) * tau
    # close to the root the sign of miss is rounding, and no bracket may overrule the last steps
    newton = newton | close
    finished = tl.abs(step) <= last_step(CDF, FINE) * tau
    finished = finished | (miss == 0)
    stuck = (middle <= new_low) | (middle >= new_high)
    stuck_where_flat = stuck & (density == 0)

    up, down = up - hi, down - hi
    gap_middle = 0.5 * tl.minimum(up, HUGE / 4) + 0.5 * tl.maximum(down, -HUGE / 4)
    if full_support(CDF):
        finished = finished | stuck_where_flat
        gap = (excess == 0) & (tl.minimum(A, B) < (TINY if FINE else 1e-30)) & (deep == 0)
        log_ratio = tl.log(B) - tl.log(A)
        log_ratio += log_scales(near_up, near_down, CDF)
        deep_step = tau * log_ratio / (f_above / A + f_below / B)
        # where even the logarithms have lost their digits, the middle of the gap is the best guess
        ok = (lo + deep_step > down) & (lo + deep_step < up)
        step = tl.where(deep, tl.where(ok, deep_step, 0.0), step)
        newton = newton | deep
        finished = tl.where(
            deep, (tl.abs(step) <= last_step(CDF, FINE) * tau) | (near_up != near_up), finished & (gap == 0)
        )
    else:  # no entry has f > 0: any t in [down, up − tau] will do, so the middle
        gap = (excess == 0) & (up - down >= tau)
        gap_middle -= 0.5 * tau
        finished = finished | gap
        # Where τ is less than what t = hi + lo can tell apart, t lies in the support of the nearest entry.
        # Newton starts in the middle of that, with the entry as hi, and stays inside.
        fine = stuck & (t - 0.5 * tau == t)
        jump = fine & (density == 0) & (miss != 0) & (gap == 0)
        held = tl.where(lo + step >= 0, 0.5 * lo, tl.where(lo + step <= -tau, 0.5 * (lo - tau), lo + step))
        step = tl.where(fine & (density > 0), held - lo, step)
        newton = newton | fine
        finished = (finished | stuck_where_flat) & (jump == 0)

    # hi takes what its precision holds, lo the rest
    base = tl.where(newton | gap, hi, middle)
    rest = tl.where(gap, gap_middle, tl.where(newton, lo + step, 0.0))
    rest = tl.where((miss == 0) & (deep == 0) & (gap == 0), lo, rest)
    base = tl.where((miss == 0) & (deep == 0) & (gap == 0), hi, base)
    if not full_support(CDF):
        base = tl.where(jump, hi + tl.where(miss < 0, down, up), base)
        rest = tl.where(jump, -0.5 * tau, rest)
    new_hi, new_lo = pair(base, rest, FINE)
    if full_support(CDF):
        near_up = tl.where(deep | gap, tl.maximum((hi + up - new_hi - new_lo) / tau, 1e-300), 0.0)
        near_down = tl.where(deep | gap, tl.maximum((new_hi + new_lo - hi - down) / tau, 1e-300), 0.0)
    return new_hi, new_lo, new_low, new_high, near_up, near_down, finished


# ------------------------------------------------------------------------- of a chunk of a row


@triton.jit
def write(pointer, x, valid, offset, hi, lo, tau, power, CDF: tl.constexpr, OUTPUT: tl.constexpr):
    settled = tl.abs(hi) == HUGE
    z, rest = standardize(x, tl.where(settled, 0.0, hi), tl.where(settled, 0.0, lo), tau, CDF)
    nothing = tl.where(hi > 0, float("-inf"), float("inf")).to(z.dtype)
    z = tl.where(settled[:, None] & (tl.abs(x) < float("inf")), nothing[:, None], z)
    z = tl.where(tl.abs(x) == float("inf"), x, z)
    if OUTPUT == LOG:
        out = tl.where(z == float("-inf"), z, log_F(z, power, CDF))
    else:
        above = z > median(power, CDF)
        tail, _ = side(z, rest, above, 0.0, -tl.abs(z), power, CDF)
        out = tl.where(above, 1 - tail, tail)
    # a row without an answer is NaN everywhere
    out = tl.where((hi != hi)[:, None], float("nan"), out)
    tl.store(pointer + offset, out.to(pointer.dtype.element_ty), mask=valid)


@triton.jit
def add_statistics(sums, given, x, valid, row, column):
    nan, size, pinned, low, high, mean, squares = sums
    nan_c, size_c, pinned_c, low_c, high_c, mean_c, squares_c = statistics(x, valid)
    # moments of the union from those of the parts (Chan, Golub, LeVeque)
    both = tl.maximum(size + size_c, 1.0)
    shift = mean_c - mean
    squares += squares_c + shift * shift * size * size_c / both
    mean += shift * size_c / both
    nan, pinned = tl.maximum(nan, nan_c.to(tl.float64)), pinned + pinned_c
    return nan, size + size_c, pinned, tl.minimum(low, low_c), tl.maximum(high, high_c), mean, squares


@triton.jit
def add_sums(sums, given, x, valid, row, column):
    m, A, B, f_above, f_below, up, down = sums
    hi, lo, tau, near_up, near_down = given[:5]
    power = given[5]
    CDF: tl.constexpr = given[6]
    m_c, A_c, B_c, f_above_c, f_below_c, up_c, down_c = evaluate(
        x, valid, hi, lo, tau, near_up, near_down, power, CDF
    )
    up, down = tl.minimum(up, up_c), tl.maximum(down, down_c)
    return m + m_c, A + A_c, B + B_c, f_above + f_above_c, f_below + f_below_c, up, down


@triton.jit
def write_chunk(sums, given, x, valid, row, column):
    pointer, n, hi, lo, tau = given[:5]
    power = given[5]
    CDF: tl.constexpr = given[6]
    OUTPUT: tl.constexpr = given[7]
    write(pointer, x, valid, row * n + column[None, :], hi, lo, tau, power, CDF, OUTPUT)
    return sums


# ------------------------------------------------------------------------- all of it by one program


@triton.jit
def solve_row(
    pointer, stride, row, n, k, tau, power, evaluations,
    CDF: tl.constexpr, CHUNK: tl.constexpr, COMPUTE: tl.constexpr = tl.float32,
):  # fmt: skip
    """hi and lo of a row that one program reads a chunk at a time, for rows that nothing else can do."""
    FINE: tl.constexpr = tl.float64 == COMPUTE
    zero = tl.zeros((1,), tl.float64)
    k, tau = k + zero, tau + zero
    sums = (zero, zero, zero, zero + float("inf"), zero - float("inf"), zero, zero)
    nan, size, pinned, low, high, mean, squares = chunks(
        add_statistics, sums, (), pointer, stride, row, 0, n, n, COMPUTE, CHUNK
    )
    variance = squares / tl.maximum(size, 1.0)
    k, size, tau, settled, hi, low, high = begin(
        nan, size, pinned, low, high, mean, variance, k, tau, power, CDF
    )
    hi, lo = pair(hi, zero, FINE)
    near_up, near_down = zero, zero
    count = 0
    running = tl.sum(tl.where(settled == 0, 1, 0))
    while running > 0:
        sums = (zero, zero, zero, zero, zero, zero + float("inf"), zero - float("inf"))
        m, A, B, f_above, f_below, up, down = chunks(
            add_sums, sums, (hi, lo, tau, near_up, near_down, power, CDF),
            pointer, stride, row, 0, n, n, COMPUTE, CHUNK,
        )  # fmt: skip
        hi, lo, low, high, near_up, near_down, finished = take_step(
            m, A, B, f_above, f_below, up, down, pinned, k, size, tau,
            hi, lo, low, high, near_up, near_down, count, FINE, power, CDF,
        )  # fmt: skip
        count += 1
        running = tl.where(count < evaluations, tl.sum(tl.where(finished, 0, 1)), 0)
    return tl.where(settled == 0, hi, settled), tl.where(settled == 0, lo, settled)
