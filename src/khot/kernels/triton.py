"""Triton kernels of the soft top-k, for CUDA and ROCm: one read of the row, one write.

A row of up to `RESIDENT` entries stays on chip: one program reads it, runs the whole solver on it and writes
y. Several short rows share a program. A longer row is split over programs: every pass is one launch, whose
programs first take the solver's step from the sums that the pass before left, all of them alike, and then
sum their own part. The number of launches is fixed and rows that are done skip theirs, so that nothing waits
for the device and a CUDA graph can hold it all.

The arithmetic on entries is in float32 for float32, bfloat16 and float16 scores, with float64 for sums and for
what is one number a row; float64 scores are float64 throughout. The method is the reference's
(:mod:`khot.kernels.solver`), with a bisection in place of its histograms: passes over what lies on chip are
cheap.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot.kernels import reference

__all__ = ["soft_topk", "soft_topk_backward"]

RESIDENT = 32768  # entries of a row that stay on chip
TOGETHER = 1024  # entries of short rows that share a program
CHUNK = 4096  # entries of a long row that a program holds at a time
PROGRAMS = 1024  # about as many as fill a large device several times over
EVALUATIONS = 64  # at most, of a resident row
LAUNCHES = 40  # passes over a long row, most of which find it done

CDFS = {"logistic": 0, "laplace": 1, "normal": 2, "uniform": 3, "power": 4}
LOGISTIC, LAPLACE, NORMAL, UNIFORM, POWER = (tl.constexpr(i) for i in CDFS.values())
OUTPUTS = {"y": 0, "log": 1, "threshold": 2}
VALUE, LOG, THRESHOLD = (tl.constexpr(i) for i in OUTPUTS.values())
HUGE = tl.constexpr(torch.finfo(torch.float64).max)  # hi = lo = ±HUGE stands for t = ±inf
TINY = tl.constexpr(1e-290)

# log(erfcx(x)/t) as a Chebyshev series in 2t − 1, t = 2/(2 + x): computed with mpmath by interpolation at 48
# nodes in 60 digits. The first 13 terms leave 5e-9, all of them 1e-16.
ERFCX = tl.constexpr(
    (
        -0.6513268598908547171,
        0.6419697923564902603,
        0.019476473204185836312,
        -0.0095615147868086316419,
        -0.0009465953444820368663,
        0.00036683949785276145187,
        0.000042523324806907771645,
        -0.000020278578112534243154,
        -1.6242900046470255135e-6,
        1.3036558355805232018e-6,
        1.5626441722066143178e-8,
        -8.5238095914926542525e-8,
        6.5290544390988514964e-9,
        5.0593434955514689418e-9,
        -9.9136415649303308674e-10,
        -2.2736512229318358557e-10,
        9.646791102015526802e-11,
        2.3940380830391147447e-12,
        -6.8860275264975533984e-12,
        8.9448792730907257167e-13,
        3.1309213993429580783e-13,
        -1.1270822361367252366e-13,
        3.8109052551892320552e-16,
        7.1060976136092369878e-15,
        -1.5230282014571043043e-15,
        -9.4574945712912340005e-17,
        1.2102371892242789923e-16,
    )
)


# ------------------------------------------------------------------------------- the CDFs


@triton.jit
def _log1p(x):
    """For x ≥ −1/2 (Kahan): exact where 1 + x is, corrected where it is not."""
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * (x / tl.where(u == 1, 1, u - 1)))


@triton.jit
def _expm1(x):
    """For x in [−1, 0] (Kahan)."""
    u = tl.exp(x)
    return tl.where(u == 1, x, (u - 1) * (x / tl.where(u == 1, 1, tl.log(u))))


@triton.jit
def _log_erfcx(x):
    """log(e^(x²) erfc(x)) for x ≥ 0."""
    t = 2 / (2 + x)
    s = 2 * t - 1
    terms: tl.constexpr = 27 if x.dtype == tl.float64 else 13
    b1 = x * 0
    b2 = x * 0
    for i in tl.static_range(terms - 1, 0, -1):
        b = 2 * s * b1 - b2 + ERFCX[i]
        b2 = b1
        b1 = b
    return tl.log(t) + (s * b1 - b2 + ERFCX[0])


@triton.constexpr_function
def _median(power, CDF):
    return 0.5 ** (1 / power) if CDF >= 3 else 0.0


@triton.jit
def _side(z, rest, above, near, power: tl.constexpr, CDF: tl.constexpr):
    """min(F, 1 − F) and f at z, of CDFs with full support relative to what they are at ±near.

    That is, times e^near (logistic, Laplace) or e^(near²/2) (normal): near = 0 leaves them as they are, and
    with the z of the entry nearest to t they do not underflow however wide the gap.
    """
    a = tl.abs(z)
    if CDF == LOGISTIC:
        e = tl.exp(-a)
        E = tl.exp(near - a)
        tail = E / (1 + e)
        density = tail / (1 + e)
    elif CDF == LAPLACE:
        tail = 0.5 * tl.exp(near - a)
        density = tail
    elif CDF == NORMAL:
        a = tl.minimum(a, 1e15)  # its square stays finite
        E = tl.exp(0.5 * (near - a) * (near + a))
        tail = 0.5 * E * tl.exp(_log_erfcx(a * 0.7071067811865476))
        density = E * 0.3989422804014327
    else:
        inside = (z > 0) & (z < 1)
        z = tl.where(inside, z, 0.5)
        if CDF == UNIFORM:
            tail = tl.where(above, rest, z)
            density = tl.where(inside, 1.0, 0.0).to(z.dtype)
        else:
            F = tl.exp(power * tl.log(z))
            rest = tl.where(inside & above, rest, 0.0)
            tail = tl.where(above, -_expm1(power * _log1p(-rest)), F)
            density = tl.where(inside, power * F / z, 0.0)
        tail = tl.where(inside, tail, 0.0)
    return tail, density


@triton.jit
def _log_F(z, power: tl.constexpr, CDF: tl.constexpr):
    """log F(z)."""
    a = tl.abs(z)
    if CDF == LOGISTIC:
        log_F = tl.minimum(z, 0.0) - _log1p(tl.exp(-a))
    elif CDF == LAPLACE:
        log_F = tl.where(z > 0, _log1p(-0.5 * tl.exp(-a)), -a - 0.6931471805599453)
    elif CDF == NORMAL:
        a = tl.minimum(a, 1e15)
        log_tail = _log_erfcx(a * 0.7071067811865476) - 0.5 * a * a - 0.6931471805599453
        log_F = tl.where(z > 0, _log1p(-tl.exp(log_tail)), log_tail)
    else:
        inside = (z > 0) & (z < 1)
        edge = tl.where(z > 0, 0.0, float("-inf")).to(z.dtype)
        log_F = tl.where(inside, power * tl.log(tl.where(inside, z, 1.0)), edge)
    return log_F


@triton.jit
def _icdf(y, power: tl.constexpr, CDF: tl.constexpr):
    """F⁻¹(y) of float64 numbers; of the normal CDF to 5e-4 (Abramowitz and Stegun 26.2.23)."""
    w = tl.minimum(y, 1 - y)
    if CDF == LOGISTIC:
        z = tl.log(y) - tl.log(1 - y)
    elif CDF == LAPLACE:
        z = tl.where(y > 0.5, -tl.log(2 * w), tl.log(2 * w))
    elif CDF == NORMAL:
        z = _normal_icdf(y)
    elif CDF == UNIFORM:
        z = y
    else:
        z = tl.exp(tl.log(y) / power)
    return z


@triton.jit
def _normal_icdf(y):
    u = tl.sqrt(-2 * tl.log(tl.minimum(y, 1 - y)))
    a = u - (2.515517 + u * (0.802853 + u * 0.010328)) / (1 + u * (1.432788 + u * (0.189269 + u * 0.001308)))
    return tl.where(y > 0.5, a, -a)


# ------------------------------------------------------------------- passes: sums over entries


@triton.jit
def _statistics(x, valid):
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
def _standardize(x, hi, lo, tau, CDF: tl.constexpr):
    """z = (x − t)/τ, and 1 − z where the support ends at 1: of a z near 1 it is the accurate half."""
    high = hi.to(x.dtype)
    lo = (hi - high.to(tl.float64) + lo).to(x.dtype)[:, None]
    hi, tau = high[:, None], tau.to(x.dtype)[:, None]
    z = ((x - hi) - lo) / tau
    rest = ((tau - (x - hi)) + lo) / tau if CDF >= UNIFORM else z
    return z, rest


@triton.jit
def _evaluate(x, valid, hi, lo, tau, near_up, near_down, power: tl.constexpr, CDF: tl.constexpr):
    """The sums of one evaluation at t = hi + lo: see :class:`khot.kernels.steps.Sums`. The last two are the
    nearest entries themselves.

    Tails and densities of each side are relative to those at near_up and near_down (:func:`_side`).
    """
    z, rest = _standardize(x, hi, lo, tau, CDF)
    above = (z > _median(power, CDF)) & valid
    below = (z <= _median(power, CDF)) & valid
    near = tl.where(above, near_up.to(z.dtype)[:, None], near_down.to(z.dtype)[:, None])
    tail, density = _side(z, rest, above, near, power, CDF)
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
def _begin(nan, n, pinned, xmin, xmax, mean, variance, k, tau, MEAN: tl.constexpr, VARIANCE: tl.constexpr, power: tl.constexpr, CDF: tl.constexpr):
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
    own = _icdf(share, power, CDF)
    pad = 1e-3 * tau if CDF == NORMAL else 1e-9 * tau
    low = xmin - tau * own - pad - 1e-15 * tl.abs(xmin)
    high = xmax - tau * own + pad + 1e-15 * tl.abs(xmax)
    noise = tau * tau * VARIANCE
    total = noise + variance
    quantile = _normal_icdf(share)
    quantile += ((own - MEAN) / tl.sqrt(VARIANCE) - quantile) * (noise / total)
    guess = mean - tau * MEAN - quantile * tl.sqrt(total)
    guess = tl.where((guess > low) & (guess < high), guess, 0.5 * low + 0.5 * high)
    return k, n, tau, settled, guess, low, high


@triton.jit
def _order_bounds(value, rank, k, n, tau, power: tl.constexpr, CDF: tl.constexpr):
    """Bounds on t from the rank-th largest entry: khot.kernels.solver._order_bounds."""
    pad = (1e-3 if CDF == NORMAL else 1e-9) * tau + 1e-15 * tl.abs(value)
    share = tl.minimum(tl.maximum(k / tl.maximum(rank, 1.0), TINY), 1 - 1e-16)
    low = value - tau * _icdf(share, power, CDF) - pad
    share = (k - rank + 1) / tl.maximum(n - rank + 1, 1.0)
    high = value - tau * _icdf(tl.minimum(tl.maximum(share, TINY), 1 - 1e-16), power, CDF) + pad
    low = tl.where((rank > k) & (rank >= 1) & (tl.abs(value) < HUGE), low, float("-inf"))
    return low, tl.where((rank - 1 < k) & (rank <= n) & (tl.abs(value) < HUGE), high, float("inf"))


@triton.jit
def _step(
    m, A, B, f_above, f_below, up, down, pinned, k, n, tau,
    hi, lo, low, high, near_up, near_down, count, FINE: tl.constexpr, power: tl.constexpr, CDF: tl.constexpr,
):  # fmt: skip
    """One step of the solver, for rows that are not done: the new hi, lo, low, high, near_up, near_down, done.

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
    low_1, high_1 = _order_bounds(up, rank, k, n, tau, power, CDF)
    low_2, high_2 = _order_bounds(down, rank + 1, k, n, tau, power, CDF)
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
    if CDF < UNIFORM:
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
    settled = (1e-8 if FINE else 3e-4) if CDF < UNIFORM else (1e-12 if FINE else 1e-6)
    finished = tl.abs(step) <= settled * tau
    finished = finished | (miss == 0)
    stuck = (middle <= new_low) | (middle >= new_high)
    finished = finished | (stuck & (density == 0))

    up, down = up - hi, down - hi
    gap_middle = 0.5 * tl.minimum(up, HUGE / 4) + 0.5 * tl.maximum(down, -HUGE / 4)
    if CDF < UNIFORM:
        gap = (excess == 0) & (tl.minimum(A, B) < (TINY if FINE else 1e-30)) & (deep == 0)
        log_ratio = tl.log(B) - tl.log(A)
        if CDF == NORMAL:
            log_ratio += 0.5 * (near_up - near_down) * (near_up + near_down)
        else:
            log_ratio += near_up - near_down
        deep_step = tau * log_ratio / (f_above / A + f_below / B)
        # where even the logarithms have lost their digits, the middle of the gap is the best guess
        ok = (lo + deep_step > down) & (lo + deep_step < up)
        step = tl.where(deep, tl.where(ok, deep_step, 0.0), step)
        newton = newton | deep
        finished = tl.where(deep, (tl.abs(step) <= settled * tau) | (near_up != near_up), finished & (gap == 0))
    else:  # no entry has f > 0: any t in [down, up − tau] will do, so the middle
        gap = (excess == 0) & (up - down >= tau)
        gap_middle -= 0.5 * tau
        finished = finished | gap

    # hi takes what its precision holds, lo the rest
    base = tl.where(newton | gap, hi, middle)
    rest = tl.where(gap, gap_middle, tl.where(newton, lo + step, 0.0))
    rest = tl.where((miss == 0) & (deep == 0) & (gap == 0), lo, rest)
    base = tl.where((miss == 0) & (deep == 0) & (gap == 0), hi, base)
    new_hi, new_lo = _pair(base, rest, FINE)
    if CDF < UNIFORM:
        near_up = tl.where(deep | gap, tl.maximum((hi + up - new_hi - new_lo) / tau, 1e-300), 0.0)
        near_down = tl.where(deep | gap, tl.maximum((new_hi + new_lo - hi - down) / tau, 1e-300), 0.0)
    return new_hi, new_lo, new_low, new_high, near_up, near_down, finished


@triton.jit
def _pair(hi, lo, FINE: tl.constexpr):
    """hi + lo, with as much of it in hi as float32 (float64 if FINE) holds."""
    s = hi + lo
    if FINE:
        v = s - hi
        rest = (hi - (s - v)) + (lo - v)
    else:
        s = s.to(tl.float32).to(tl.float64)
        rest = (hi - s) + lo
    return s, rest


# ------------------------------------------------------------------------------ the kernels


@triton.jit
def _load(pointer, row, stride, column, valid, dtype: tl.constexpr):
    return tl.load(pointer + row[:, None] * stride + column[None, :], mask=valid, other=0.0).to(dtype)


@triton.jit
def _write(pointer, x, valid, offset, hi, lo, tau, power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr):
    settled = tl.abs(hi) == HUGE
    z, rest = _standardize(x, tl.where(settled, 0.0, hi), tl.where(settled, 0.0, lo), tau, CDF)
    nothing = tl.where(hi > 0, float("-inf"), float("inf")).to(z.dtype)
    z = tl.where(settled[:, None] & (tl.abs(x) < float("inf")), nothing[:, None], z)
    z = tl.where(tl.abs(x) == float("inf"), x, z)
    if OUTPUT == LOG:
        out = tl.where(z == float("-inf"), z, _log_F(z, power, CDF))
    else:
        above = z > _median(power, CDF)
        tail, _ = _side(z, rest, above, 0.0, power, CDF)
        out = tl.where(above, 1 - tail, tail)
    # a row without an answer is NaN everywhere
    out = tl.where((hi != hi)[:, None], float("nan"), out)
    tl.store(pointer + offset, out.to(pointer.dtype.element_ty), mask=valid)


@triton.jit
def _resident(
    x_pointer, x_stride, k_pointer, k_stride, tau_pointer, tau_stride, out_pointer, hi_pointer, lo_pointer,
    rows, n, evaluations,
    MEAN: tl.constexpr, VARIANCE: tl.constexpr, power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The whole of a soft top-k, for `TOGETHER` rows of at most `WIDTH` entries."""
    FINE: tl.constexpr = COMPUTE == tl.float64
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    there = row < rows
    valid = there[:, None] & (column < n)[None, :]
    x = _load(x_pointer, row, x_stride, column, valid, COMPUTE)
    k = tl.load(k_pointer + row * k_stride, mask=there, other=0.0).to(tl.float64)
    tau = tl.load(tau_pointer + row * tau_stride, mask=there, other=1.0).to(tl.float64)

    nan, size, pinned, xmin, xmax, mean, squares = _statistics(x, valid)
    variance = squares / tl.maximum(size, 1.0)
    k, size, tau, settled, hi, low, high = _begin(
        nan, size, pinned, xmin, xmax, mean, variance, k, tau, MEAN, VARIANCE, power, CDF
    )
    hi, lo = _pair(hi, hi * 0, FINE)
    done = settled != 0
    near_up, near_down = lo * 0, lo * 0
    count = 0
    running = tl.sum(tl.where(done, 0, 1))
    while running > 0:
        m, A, B, f_above, f_below, up, down = _evaluate(
            x, valid, hi, lo, tau, near_up, near_down, power, CDF
        )
        new_hi, new_lo, low, high, new_up, new_down, finished = _step(
            m, A, B, f_above, f_below, up, down, pinned, k, size, tau,
            hi, lo, low, high, near_up, near_down, count, FINE, power, CDF,
        )  # fmt: skip
        hi, lo = tl.where(done, hi, new_hi), tl.where(done, lo, new_lo)
        near_up, near_down = tl.where(done, near_up, new_up), tl.where(done, near_down, new_down)
        done = done | finished
        count += 1
        running = tl.where(count < evaluations, tl.sum(tl.where(done, 0, 1)), 0)

    hi, lo = tl.where(settled == 0, hi, settled), tl.where(settled == 0, lo, settled)
    tl.store(hi_pointer + row, hi, mask=there)
    tl.store(lo_pointer + row, lo, mask=there)
    if OUTPUT != THRESHOLD:
        offset = row[:, None] * n + column[None, :]
        _write(out_pointer, x, valid, offset, hi, lo, tau, power, CDF, OUTPUT)


# A long row: its parts leave sums, which all programs of the next launch combine alike.


@triton.jit
def _gather(pointer, parts, what, PARTS: tl.constexpr, STRIDE: tl.constexpr, other):
    """One of the numbers that the parts of a row left, as (1, PARTS)."""
    part = tl.arange(0, PARTS)[None, :]
    return tl.load(pointer + part * STRIDE + what, mask=part < parts, other=other)


@triton.jit
def _part_statistics(
    x_pointer, x_stride, sums_pointer, n, length, parts, COMPUTE: tl.constexpr, CHUNK: tl.constexpr
):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    nan = tl.zeros((1,), tl.float64)
    size, pinned, mean, squares = nan, nan, nan, nan
    low, high = nan + float("inf"), nan - float("inf")
    for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
        column = start + tl.arange(0, CHUNK)
        valid = (column < n)[None, :]
        x = tl.load(x_pointer + row * x_stride + column[None, :], mask=valid, other=0.0).to(COMPUTE)
        nan_c, size_c, pinned_c, low_c, high_c, mean_c, squares_c = _statistics(x, valid)
        nan, pinned = tl.maximum(nan, nan_c.to(tl.float64)), pinned + pinned_c
        low, high = tl.minimum(low, low_c), tl.maximum(high, high_c)
        # moments of the union from those of the parts (Chan, Golub, LeVeque)
        both = tl.maximum(size + size_c, 1.0)
        shift = mean_c - mean
        squares += squares_c + shift * shift * size * size_c / both
        mean += shift * size_c / both
        size += size_c
    base = sums_pointer + (row * parts + part) * 7 + tl.arange(0, 1)
    tl.store(base, nan)
    tl.store(base + 1, size)
    tl.store(base + 2, pinned)
    tl.store(base + 3, low)
    tl.store(base + 4, high)
    tl.store(base + 5, mean)
    tl.store(base + 6, squares)


@triton.jit
def _part_begin(
    k_pointer, k_stride, tau_pointer, tau_stride, sums_pointer, state_pointer, parts,
    MEAN: tl.constexpr, VARIANCE: tl.constexpr, power: tl.constexpr, CDF: tl.constexpr,
    FINE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    one = row + tl.arange(0, 1)
    sums = sums_pointer + row * parts * 7
    nan = tl.max(_gather(sums, parts, 0, PARTS, 7, 0.0), axis=1)
    sizes = _gather(sums, parts, 1, PARTS, 7, 0.0)
    size = tl.sum(sizes, axis=1)
    pinned = tl.sum(_gather(sums, parts, 2, PARTS, 7, 0.0), axis=1)
    xmin = tl.min(_gather(sums, parts, 3, PARTS, 7, float("inf")), axis=1)
    xmax = tl.max(_gather(sums, parts, 4, PARTS, 7, float("-inf")), axis=1)
    means = _gather(sums, parts, 5, PARTS, 7, 0.0)
    mean = tl.sum(sizes * means, axis=1) / tl.maximum(size, 1.0)
    between = tl.sum(sizes * (means - mean[:, None]) * (means - mean[:, None]), axis=1)
    squares = tl.sum(_gather(sums, parts, 6, PARTS, 7, 0.0), axis=1) + between
    k = tl.load(k_pointer + one * k_stride).to(tl.float64)
    tau = tl.load(tau_pointer + one * tau_stride).to(tl.float64)
    k, size, tau, settled, hi, low, high = _begin(
        nan, size, pinned, xmin, xmax, mean, squares / tl.maximum(size, 1.0), k, tau,
        MEAN, VARIANCE, power, CDF,
    )  # fmt: skip
    hi, lo = _pair(hi, hi * 0, FINE)
    done = tl.where(settled == 0, 0.0, 1.0)
    hi, lo = tl.where(settled == 0, hi, settled), tl.where(settled == 0, lo, settled)
    state = state_pointer + one * 11
    tl.store(state, k)
    tl.store(state + 1, size)
    tl.store(state + 2, tau)
    tl.store(state + 3, pinned)
    _put(state, hi, lo, low, high, hi * 0, hi * 0, done)


@triton.jit
def _put(state, hi, lo, low, high, near_up, near_down, done):
    tl.store(state + 4, hi)
    tl.store(state + 5, lo)
    tl.store(state + 6, low)
    tl.store(state + 7, high)
    tl.store(state + 8, near_up)
    tl.store(state + 9, near_down)
    tl.store(state + 10, done)


@triton.jit
def _advance(state, sums, parts, count, FINE: tl.constexpr, power: tl.constexpr, CDF: tl.constexpr, PARTS: tl.constexpr):
    """The state of a row after the step that its sums call for; as it was where it is done."""
    k, n = tl.load(state), tl.load(state + 1)
    tau, pinned = tl.load(state + 2), tl.load(state + 3)
    hi, lo = tl.load(state + 4), tl.load(state + 5)
    low, high = tl.load(state + 6), tl.load(state + 7)
    near_up, near_down = tl.load(state + 8), tl.load(state + 9)
    done = tl.load(state + 10)
    if tl.sum(done) == 0 and count > 0:
        m = tl.sum(_gather(sums, parts, 0, PARTS, 7, 0.0), axis=1)
        A = tl.sum(_gather(sums, parts, 1, PARTS, 7, 0.0), axis=1)
        B = tl.sum(_gather(sums, parts, 2, PARTS, 7, 0.0), axis=1)
        f_above = tl.sum(_gather(sums, parts, 3, PARTS, 7, 0.0), axis=1)
        f_below = tl.sum(_gather(sums, parts, 4, PARTS, 7, 0.0), axis=1)
        up = tl.min(_gather(sums, parts, 5, PARTS, 7, float("inf")), axis=1)
        down = tl.max(_gather(sums, parts, 6, PARTS, 7, float("-inf")), axis=1)
        hi, lo, low, high, near_up, near_down, finished = _step(
            m, A, B, f_above, f_below, up, down, pinned, k, n, tau,
            hi, lo, low, high, near_up, near_down, count - 1, FINE, power, CDF,
        )  # fmt: skip
        done = tl.where(finished, 1.0, 0.0).to(tl.float64)
    return k, n, tau, pinned, hi, lo, low, high, near_up, near_down, done


@triton.jit
def _part_evaluate(
    x_pointer, x_stride, sums_before, state_before, sums_after, state_after, n, length, parts, count,
    power: tl.constexpr, CDF: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    FINE: tl.constexpr = COMPUTE == tl.float64
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    state = row * 11 + tl.arange(0, 1)
    k, size, tau, pinned, hi, lo, low, high, near_up, near_down, done = _advance(
        state_before + state, sums_before + row * parts * 7, parts, count, FINE, power, CDF, PARTS
    )
    if part == 0:
        tl.store(state_after + state, k)
        tl.store(state_after + state + 1, size)
        tl.store(state_after + state + 2, tau)
        tl.store(state_after + state + 3, pinned)
        _put(state_after + state, hi, lo, low, high, near_up, near_down, done)
    if tl.sum(done) == 0:
        m = tl.zeros((1,), tl.float64)
        A, B, f_above, f_below = m, m, m, m
        up, down = m + float("inf"), m - float("inf")
        for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
            column = start + tl.arange(0, CHUNK)
            valid = (column < n)[None, :]
            x = tl.load(x_pointer + row * x_stride + column[None, :], mask=valid, other=0.0).to(COMPUTE)
            m_c, A_c, B_c, f_above_c, f_below_c, up_c, down_c = _evaluate(
                x, valid, hi, lo, tau, near_up, near_down, power, CDF
            )
            m, A, B = m + m_c, A + A_c, B + B_c
            f_above, f_below = f_above + f_above_c, f_below + f_below_c
            up, down = tl.minimum(up, up_c), tl.maximum(down, down_c)
        base = sums_after + (row * parts + part) * 7 + tl.arange(0, 1)
        tl.store(base, m)
        tl.store(base + 1, A)
        tl.store(base + 2, B)
        tl.store(base + 3, f_above)
        tl.store(base + 4, f_below)
        tl.store(base + 5, up)
        tl.store(base + 6, down)


@triton.jit
def _part_write(
    x_pointer, x_stride, sums_pointer, state_pointer, out_pointer, hi_pointer, lo_pointer, n, length, parts, count,
    power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    FINE: tl.constexpr = COMPUTE == tl.float64
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    _, _, tau, _, hi, lo, _, _, _, _, _ = _advance(
        state_pointer + row * 11 + tl.arange(0, 1), sums_pointer + row * parts * 7, parts, count,
        FINE, power, CDF, PARTS,
    )  # fmt: skip
    if part == 0:
        tl.store(hi_pointer + row + tl.arange(0, 1), hi)
        tl.store(lo_pointer + row + tl.arange(0, 1), lo)
    if OUTPUT != THRESHOLD:
        for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
            column = start + tl.arange(0, CHUNK)
            valid = (column < n)[None, :]
            x = tl.load(x_pointer + row * x_stride + column[None, :], mask=valid, other=0.0).to(COMPUTE)
            _write(out_pointer, x, valid, row * n + column[None, :], hi, lo, tau, power, CDF, OUTPUT)


# ------------------------------------------------------------------------------ backward


@triton.jit
def _slope_of_log(z, density, tail, power: tl.constexpr, CDF: tl.constexpr):
    """f/F, from the f and the tail that are not relative to anything; 0 where F is 0."""
    a = tl.abs(z)
    if CDF == LOGISTIC:
        e = tl.exp(-a)
        ratio = tl.where(z > 0, e, 1.0) / (1 + e)
    elif CDF == LAPLACE:
        ratio = tl.where(z > 0, density / (1 - tail), 1.0)
    elif CDF == NORMAL:
        lower = 0.7978845608028654 * tl.exp(-_log_erfcx(tl.minimum(a, 1e15) * 0.7071067811865476))
        ratio = tl.where(z > 0, density / (1 - tail), lower)
    else:
        inside = (z > 0) & (z < 1)
        ratio = tl.where(inside, power / tl.where(inside, z, 1.0), 0.0)
    return ratio.to(z.dtype)


@triton.jit
def _cotangents(x, v, valid, hi, lo, tau, near, power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr):
    """z; f relative to near; u = v·∂out/∂z; and v·∂out/∂F·f, relative to near where out is y."""
    z, rest = _standardize(x, hi, lo, tau, CDF)
    z = tl.where(valid, z, 0.0)
    above = z > _median(power, CDF)
    near = near.to(z.dtype)[:, None]
    _, density = _side(z, rest, above, near, power, CDF)
    density = tl.where(valid, density, 0.0)
    if OUTPUT == VALUE:
        _, own = _side(z, rest, above, 0.0, power, CDF)
        share = v * density
        u = tl.where(valid, v * own, 0.0)
    elif OUTPUT == LOG:
        tail, own = _side(z, rest, above, 0.0, power, CDF)
        ratio = tl.where(valid, _slope_of_log(z, own, tail, power, CDF), 0.0)
        u = tl.where(ratio == 0, 0.0, v * ratio)
        share = u
    else:
        u = density * 0
        share = u
    return z, density, u, share


@triton.jit
def _gradient_sums(x, v, valid, hi, lo, tau, power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr):
    """near, the least abs(z), and sums relative to it; and for compact support what lies next to a gap."""
    valid = valid & (tl.abs(x) < float("inf")) & (tl.abs(hi) != HUGE)[:, None]
    z, rest = _standardize(x, hi, lo, tau, CDF)
    if CDF < UNIFORM:
        near = tl.min(tl.where(valid, tl.abs(z), float("inf")), axis=1)
        near = tl.minimum(near.to(tl.float64), 1e15)
    else:
        near = tl.zeros_like(hi)
    z, density, u, share = _cotangents(x, v, valid, hi, lo, tau, near, power, CDF, OUTPUT)
    density, u = density.to(tl.float64), u.to(tl.float64)
    mass = tl.sum(density, axis=1)
    mass_z = tl.sum(tl.where(density == 0, 0.0, density * z), axis=1)
    u_sum = tl.sum(u, axis=1)
    u_z = tl.sum(tl.where(u == 0, 0.0, u * z), axis=1)
    share_sum = tl.sum(share.to(tl.float64), axis=1)
    above = valid & (z > _median(power, CDF))
    below = valid & (z <= _median(power, CDF))
    up = tl.min(tl.where(above, x, float("inf")), axis=1)
    down = tl.max(tl.where(below, x, float("-inf")), axis=1)
    at_up, at_down = above & (x == up[:, None]), below & (x == down[:, None])
    up_count = tl.sum(tl.where(at_up, 1.0, 0.0), axis=1).to(tl.float64)
    down_count = tl.sum(tl.where(at_down, 1.0, 0.0), axis=1).to(tl.float64)
    up_sum = tl.sum(tl.where(at_up, v, 0.0).to(tl.float64), axis=1)
    down_sum = tl.sum(tl.where(at_down, v, 0.0).to(tl.float64), axis=1)
    up, down = up.to(tl.float64), down.to(tl.float64)
    return near, mass, mass_z, u_sum, u_z, share_sum, up, up_count, up_sum, down, down_count, down_sum


@triton.jit
def _log_scale(near, CDF: tl.constexpr):
    """log of what densities relative to near are divided by: they are e^this times f."""
    return 0.5 * near * near if CDF == NORMAL else near


@triton.jit
def _gradient_row(
    near, mass, mass_z, u_sum, u_z, share_sum, up_count, up_sum, down_count, down_sum, grad_lo, hi, tau,
    CDF: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """dL/dk, dL/dτ, and what dL/dx has per unit of relative density."""
    live = mass > 0
    safe = tl.where(live, mass, 1.0)
    z_mean = tl.where(live, mass_z / safe, 0.0)
    log_mass = tl.log(safe) - _log_scale(near, CDF)
    through_t = tl.exp(tl.log(tau) - log_mass)
    share = share_sum / safe
    if OUTPUT == LOG:
        share = tl.where(share_sum == 0, 0.0, share * tl.exp(_log_scale(near, CDF)))
    dk = tl.where(live, share, 0.0) - tl.where(live & (grad_lo != 0), grad_lo * through_t, 0.0)
    if CDF >= UNIFORM and OUTPUT != THRESHOLD:
        gap = 0.5 * up_sum / tl.maximum(up_count, 1.0)
        if OUTPUT == VALUE:
            gap += 0.5 * down_sum / tl.maximum(down_count, 1.0)
        dk = tl.where(live | (tl.abs(hi) == HUGE), dk, gap)
    pull = tl.where(live, (grad_lo - u_sum / tau) / safe, 0.0)
    dtau = (u_sum * z_mean - u_z) / tau - grad_lo * z_mean
    bad = hi != hi
    return tl.where(bad, hi, dk), tl.where(bad, hi, dtau), tl.where(bad, hi, pull)


@triton.jit
def _gradient_write(
    pointer, offset, x, v, valid, hi, lo, tau, near, pull,
    power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    live = valid & (tl.abs(x) < float("inf")) & (tl.abs(hi) != HUGE)[:, None]
    _, density, u, _ = _cotangents(x, v, live, hi, lo, tau, near, power, CDF, OUTPUT)
    dx = u / tau.to(u.dtype)[:, None] + density * pull.to(u.dtype)[:, None]
    dx = tl.where((hi != hi)[:, None], float("nan"), dx)
    tl.store(pointer + offset, dx.to(pointer.dtype.element_ty), mask=valid)


@triton.jit
def _resident_backward(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, x_pointer, x_stride,
    hi_pointer, lo_pointer, tau_pointer, tau_stride, dx_pointer, dk_pointer, dtau_pointer, rows, n,
    power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    there = row < rows
    valid = there[:, None] & (column < n)[None, :]
    x = _load(x_pointer, row, x_stride, column, valid, COMPUTE)
    v = x * 0
    if OUTPUT != THRESHOLD:
        offset = row[:, None] * grad_row + column[None, :] * grad_column
        v = tl.load(grad_pointer + offset, mask=valid, other=0.0).to(COMPUTE)
    grad_lo = tl.load(grad_lo_pointer + row * grad_lo_stride, mask=there, other=0.0).to(tl.float64)
    hi, lo = tl.load(hi_pointer + row, mask=there, other=0.0), tl.load(lo_pointer + row, mask=there, other=0.0)
    tau = tl.load(tau_pointer + row * tau_stride, mask=there, other=1.0).to(tl.float64)
    near, mass, mass_z, u_sum, u_z, share, up, up_count, up_sum, down, down_count, down_sum = _gradient_sums(
        x, v, valid, hi, lo, tau, power, CDF, OUTPUT
    )
    dk, dtau, pull = _gradient_row(
        near, mass, mass_z, u_sum, u_z, share, up_count, up_sum, down_count, down_sum, grad_lo, hi, tau,
        CDF, OUTPUT,
    )  # fmt: skip
    tl.store(dk_pointer + row, dk, mask=there)
    tl.store(dtau_pointer + row, dtau, mask=there)
    offset = row[:, None] * n + column[None, :]
    _gradient_write(dx_pointer, offset, x, v, valid, hi, lo, tau, near, pull, power, CDF, OUTPUT)


@triton.jit
def _part_gradient_sums(
    grad_pointer, grad_row, grad_column, x_pointer, x_stride, hi_pointer, lo_pointer, tau_pointer, tau_stride,
    sums_pointer, n, length, parts,
    power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    one = row + tl.arange(0, 1)
    hi, lo = tl.load(hi_pointer + one), tl.load(lo_pointer + one)
    tau = tl.load(tau_pointer + one * tau_stride).to(tl.float64)
    mass = tl.zeros((1,), tl.float64)
    mass_z, u_sum, u_z, share = mass, mass, mass, mass
    near = mass + (1e15 if CDF < UNIFORM else 0.0)
    up, down = mass + float("inf"), mass - float("inf")
    up_count, up_sum, down_count, down_sum = mass, mass, mass, mass
    for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
        column = start + tl.arange(0, CHUNK)
        valid = (column < n)[None, :]
        x = tl.load(x_pointer + row * x_stride + column[None, :], mask=valid, other=0.0).to(COMPUTE)
        v = x * 0
        if OUTPUT != THRESHOLD:
            at = grad_pointer + row * grad_row + column[None, :] * grad_column
            v = tl.load(at, mask=valid, other=0.0).to(COMPUTE)
        near_c, mass_c, mass_z_c, u_c, u_z_c, share_c, up_c, up_n, up_s, down_c, down_n, down_s = _gradient_sums(
            x, v, valid, hi, lo, tau, power, CDF, OUTPUT
        )
        nearest = tl.minimum(near, near_c)
        old, new = _rescale(near, nearest, CDF), _rescale(near_c, nearest, CDF)
        near = nearest
        mass, mass_z = mass * old + mass_c * new, mass_z * old + mass_z_c * new
        share = share * old + share_c * new if OUTPUT == VALUE else share + share_c
        u_sum, u_z = u_sum + u_c, u_z + u_z_c
        up_count, up_sum = _ties(up, up_count, up_c, up_n, tl.minimum(up, up_c)), _ties(up, up_sum, up_c, up_s, tl.minimum(up, up_c))
        down_count = _ties(down, down_count, down_c, down_n, tl.maximum(down, down_c))
        down_sum = _ties(down, down_sum, down_c, down_s, tl.maximum(down, down_c))
        up, down = tl.minimum(up, up_c), tl.maximum(down, down_c)
    base = sums_pointer + (row * parts + part) * 12 + tl.arange(0, 1)
    tl.store(base, near)
    tl.store(base + 1, mass)
    tl.store(base + 2, mass_z)
    tl.store(base + 3, u_sum)
    tl.store(base + 4, u_z)
    tl.store(base + 5, share)
    tl.store(base + 6, up)
    tl.store(base + 7, up_count)
    tl.store(base + 8, up_sum)
    tl.store(base + 9, down)
    tl.store(base + 10, down_count)
    tl.store(base + 11, down_sum)


@triton.jit
def _rescale(near, nearest, CDF: tl.constexpr):
    """What turns sums relative to near into sums relative to nearest ≤ near."""
    exponent = 0.5 * (nearest - near) * (nearest + near) if CDF == NORMAL else nearest - near
    return tl.exp(exponent)


@triton.jit
def _ties(a, a_sum, b, b_sum, chosen):
    """The sum over those of two groups that lie at the chosen end."""
    return tl.where(a == chosen, a_sum, 0.0) + tl.where(b == chosen, b_sum, 0.0)


@triton.jit
def _part_gradient_write(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, x_pointer, x_stride,
    hi_pointer, lo_pointer, tau_pointer, tau_stride, sums_pointer, dx_pointer, dk_pointer, dtau_pointer,
    n, length, parts,
    power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    one = row + tl.arange(0, 1)
    hi, lo = tl.load(hi_pointer + one), tl.load(lo_pointer + one)
    tau = tl.load(tau_pointer + one * tau_stride).to(tl.float64)
    grad_lo = tl.load(grad_lo_pointer + one * grad_lo_stride).to(tl.float64)
    sums = sums_pointer + row * parts * 12
    nears = _gather(sums, parts, 0, PARTS, 12, 1e15)
    near = tl.min(nears, axis=1)
    scale = _rescale(nears, near[:, None], CDF)
    mass = tl.sum(_gather(sums, parts, 1, PARTS, 12, 0.0) * scale, axis=1)
    mass_z = tl.sum(_gather(sums, parts, 2, PARTS, 12, 0.0) * scale, axis=1)
    u_sum = tl.sum(_gather(sums, parts, 3, PARTS, 12, 0.0), axis=1)
    u_z = tl.sum(_gather(sums, parts, 4, PARTS, 12, 0.0), axis=1)
    shares = _gather(sums, parts, 5, PARTS, 12, 0.0)
    share = tl.sum(shares * scale if OUTPUT == VALUE else shares, axis=1)
    ups, downs = _gather(sums, parts, 6, PARTS, 12, float("inf")), _gather(sums, parts, 9, PARTS, 12, float("-inf"))
    at_up, at_down = ups == tl.min(ups, axis=1)[:, None], downs == tl.max(downs, axis=1)[:, None]
    up_count = tl.sum(tl.where(at_up, _gather(sums, parts, 7, PARTS, 12, 0.0), 0.0), axis=1)
    up_sum = tl.sum(tl.where(at_up, _gather(sums, parts, 8, PARTS, 12, 0.0), 0.0), axis=1)
    down_count = tl.sum(tl.where(at_down, _gather(sums, parts, 10, PARTS, 12, 0.0), 0.0), axis=1)
    down_sum = tl.sum(tl.where(at_down, _gather(sums, parts, 11, PARTS, 12, 0.0), 0.0), axis=1)
    dk, dtau, pull = _gradient_row(
        near, mass, mass_z, u_sum, u_z, share, up_count, up_sum, down_count, down_sum, grad_lo, hi, tau,
        CDF, OUTPUT,
    )  # fmt: skip
    if part == 0:
        tl.store(dk_pointer + one, dk)
        tl.store(dtau_pointer + one, dtau)
    for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
        column = start + tl.arange(0, CHUNK)
        valid = (column < n)[None, :]
        x = tl.load(x_pointer + row * x_stride + column[None, :], mask=valid, other=0.0).to(COMPUTE)
        v = x * 0
        if OUTPUT != THRESHOLD:
            at = grad_pointer + row * grad_row + column[None, :] * grad_column
            v = tl.load(at, mask=valid, other=0.0).to(COMPUTE)
        offset = row * n + column[None, :]
        _gradient_write(dx_pointer, offset, x, v, valid, hi, lo, tau, near, pull, power, CDF, OUTPUT)


# ------------------------------------------------------------------------------ the host's side


def soft_topk(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`khot.kernels.reference.soft_topk`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if n == 0:
        return reference.soft_topk(x, k, tau, cdf, shape, output)
    F = cdfs.resolve(cdf, shape)
    out = x.new_empty((*batch, 0) if output == "threshold" else x.shape)
    hi = x.new_empty(batch, dtype=torch.float64)
    lo = torch.empty_like(hi)
    rows = hi.numel()
    if rows == 0:
        return out, hi, lo
    source, k_row, tau_row = _rows(x, n), _numbers(k, batch), _numbers(tau, batch)
    which = {"power": _power(F), "CDF": CDFS[F.name]}
    moments = {"MEAN": F.mean, "VARIANCE": F.variance}
    how = {"OUTPUT": OUTPUTS[output], "COMPUTE": _compute(x.dtype)}
    with torch.cuda.device_of(x):
        if n <= RESIDENT:
            width, together, warps = _block(n)
            _resident[(triton.cdiv(rows, together),)](
                *source, *k_row, *tau_row, out, hi, lo, rows, n, EVALUATIONS,
                **which, **moments, **how, TOGETHER=together, WIDTH=width, num_warps=warps,
            )  # fmt: skip
            return out, hi, lo
        parts, length = _parts(rows, n)
        sums = [x.new_empty(rows, parts, 7, dtype=torch.float64) for _ in range(2)]
        state = [x.new_empty(rows, 11, dtype=torch.float64) for _ in range(2)]
        width = {"PARTS": triton.next_power_of_2(parts)}
        chunk = {"CHUNK": CHUNK, "COMPUTE": how["COMPUTE"]}
        _part_statistics[(parts, rows)](*source, sums[0], n, length, parts, **chunk)
        fine = {"FINE": x.dtype == torch.float64}
        _part_begin[(rows,)](*k_row, *tau_row, sums[0], state[0], parts, **which, **moments, **fine, **width)
        for count in range(LAUNCHES):
            a, b = count % 2, 1 - count % 2
            _part_evaluate[(parts, rows)](
                *source, sums[a], state[a], sums[b], state[b], n, length, parts, count,
                **which, **chunk, **width,
            )  # fmt: skip
        last = LAUNCHES % 2
        _part_write[(parts, rows)](
            *source, sums[last], state[last], out, hi, lo, n, length, parts, LAUNCHES,
            **which, **how, CHUNK=CHUNK, **width,
        )  # fmt: skip
    return out, hi, lo


def soft_topk_backward(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    output: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`khot.kernels.reference.soft_topk_backward`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if n == 0:
        return reference.soft_topk_backward(grad, grad_lo, x, hi, lo, tau, cdf, shape, output)
    F = cdfs.resolve(cdf, shape)
    dx, dk, dtau = x.new_empty(x.shape), hi.new_empty(batch), hi.new_empty(batch)
    rows = dk.numel()
    if rows == 0:
        return dx, dk, dtau
    hi, lo = hi.contiguous(), lo.contiguous()
    incoming = grad.expand(x.shape).reshape(-1, n) if output != "threshold" else grad_lo.reshape(-1, 1)
    cotangent = (incoming, *incoming.stride())
    cotangent_lo, source, tau_row = _numbers(grad_lo, batch), _rows(x, n), _numbers(tau, batch)
    which = {"power": _power(F), "CDF": CDFS[F.name], "OUTPUT": OUTPUTS[output], "COMPUTE": _compute(x.dtype)}
    with torch.cuda.device_of(x):
        if n <= RESIDENT:
            width, together, warps = _block(n)
            _resident_backward[(triton.cdiv(rows, together),)](
                *cotangent, *cotangent_lo, *source, hi, lo, *tau_row, dx, dk, dtau, rows, n,
                **which, TOGETHER=together, WIDTH=width, num_warps=warps,
            )  # fmt: skip
            return dx, dk, dtau
        parts, length = _parts(rows, n)
        sums = hi.new_empty(rows, parts, 12)
        _part_gradient_sums[(parts, rows)](
            *cotangent, *source, hi, lo, *tau_row, sums, n, length, parts, **which, CHUNK=CHUNK
        )
        _part_gradient_write[(parts, rows)](
            *cotangent, *cotangent_lo, *source, hi, lo, *tau_row, sums, dx, dk, dtau, n, length, parts,
            **which, CHUNK=CHUNK, PARTS=triton.next_power_of_2(parts),
        )  # fmt: skip
    return dx, dk, dtau


def _block(n: int) -> tuple[int, int, int]:
    """Of a resident row: the width it is padded to, rows in a program, warps."""
    width = triton.next_power_of_2(n)
    return width, max(1, TOGETHER // width), min(16, max(4, width // 1024))


def _parts(rows: int, n: int) -> tuple[int, int]:
    """Into how many parts a long row is cut, and their length: enough programs to fill a device."""
    parts = min(triton.cdiv(n, CHUNK), max(1, PROGRAMS // rows))
    length = triton.cdiv(triton.cdiv(n, parts), CHUNK) * CHUNK
    return triton.cdiv(n, length), length


def _rows(x: Tensor, n: int) -> tuple[Tensor, int]:
    """The rows of x one after another, and the distance between them."""
    flat = x.reshape(-1, n)
    if n > 1 and flat.stride(1) != 1:
        flat = flat.contiguous()
    return flat, flat.stride(0)


def _numbers(value: Tensor, batch: torch.Size) -> tuple[Tensor, int]:
    """A number a row, likewise."""
    if value.numel() == 1:
        return value, 0
    return value.expand(batch).contiguous(), 1


def _power(F: cdfs.CDF) -> float:
    """1/(p − 1), the exponent of z."""
    return 1 / (F.shape - 1) if F.shape else 1.0


def _compute(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
