"""The CDFs in float32, in few instructions: what the kernels of resident rows add up, and y.

Everything is a function of v = (x − t)·unit/τ, where :func:`unit` makes the exponential a power of two. A CDF
has one tuple of terms that are summed over the entries, and :func:`series` derives from the sums what a step
needs. `power` is the exponent of z, 1/(p − 1), and not p.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from khot._kernels.triton.fast import LN2, half_with_sign, log2, reciprocal, with_sign
from khot._kernels.triton.functions import (
    LAPLACE,
    LOGISTIC,
    NORMAL,
    POWER,
    UNIFORM,
    full_support,
    moments,
    only_powers,
)

NORMAL_UNIT = tl.constexpr(math.sqrt(0.5 / math.log(2)))  # 2^(−v²) = e^(−z²/2)
PHI = tl.constexpr(1 / math.sqrt(2 * math.pi))
STEEP = tl.constexpr(2.0**24)  # a slope that makes a clipped line a step
# The normal distribution's tail, divided by 2^(−v²)·t, as a polynomial in t = 1/(1 + 0.3|v|). It was fitted
# by least squares with Lawson's weights, which minimise the largest relative error: 4e-8.
TAIL = tl.constexpr(
    (
        0.10164911299943924,
        0.10164880007505417,
        0.09505034983158112,
        0.08197396993637085,
        0.061606839299201965,
        0.052643246948719025,
        -0.013254992663860321,
        0.07025182992219925,
        -0.0703066810965538,
        0.018737539649009705,
    )
)


@triton.constexpr_function
def unit(CDF):
    """v/z, where z = (x − t)/τ. This tuple and the next two are in the order of the ids."""
    exponential = 1 / math.log(2)
    units = (exponential, exponential, NORMAL_UNIT.value, 1.0, 1.0)
    return units[getattr(CDF, "value", CDF)]


@triton.constexpr_function
def term_count(CDF):
    """How many members the tuple of :func:`terms` has."""
    return (7, 5, 7, 4, 4)[getattr(CDF, "value", CDF)]


@triton.constexpr_function
def kink(CDF):
    """How near to a kink of F an entry counts as near, in units of z; 0 where F has none."""
    return (0.0, 2.0**-8, 0.0, 2.0**-12, 2.0**-12)[getattr(CDF, "value", CDF)]


@triton.jit
def normal_tail(v):
    """The tail beyond |v| over 2^(−v²), and that power."""
    a = tl.abs(v)
    t = reciprocal(1.0 + 0.3 * a)
    P = t * TAIL[9] + TAIL[8]
    for i in tl.static_range(7, -1, -1):
        P = P * t + TAIL[i]
    return t * P, tl.exp2(-a * a)


@triton.jit
def _raised(z, power, CDF: tl.constexpr, WHOLE: tl.constexpr):
    """z^e and z^(e − 1) for z from 0 to 1."""
    if (CDF == UNIFORM) | (WHOLE == 1):
        return z, 1.0
    elif WHOLE == 2:
        return z * z, z
    elif WHOLE == 3:
        return z * z * z, z * z
    else:
        y = tl.exp2(power * tl.log2(z))  # not the approximation, whose error the exponent multiplies
        return y, y * reciprocal(tl.maximum(z, 1e-30))


@triton.jit
def _raised_closely(x, hi, scale, shift, power):
    """v^e and v^(e − 1) of v = (x − hi)·scale − shift, clipped to [0, 1].

    The exponent multiplies the relative error of v: what rounding took from it is made up for by the slope.
    """
    d = x - hi
    back = d - x
    lost = (x - (d - back)) - (hi + back)
    v = tl.fma(d, scale, -shift)
    lost = tl.fma(lost, scale, tl.fma(d, scale, -v) - shift)
    y, rate = _raised(_clip(v), power, POWER, 0)
    lost = tl.where((v > 0) & (v < 1), lost, 0.0)
    return tl.minimum(tl.fma(power * rate, lost, y), 1.0), rate


@triton.jit
def _clip(x):
    """x in [0, 1], which is part of the instruction that computes x."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def terms(x, given):
    """What is summed over the entries.

    The first two are the count of the hard mask (½ for an entry above t and −½ for one below, or 1 and 0 with
    compact support; for a power, 1 where y is) and what the soft count is less than it, so that no digits are
    lost far from the entries.
    The others are what :func:`series` needs, and last, if F has kinks, the count of the entries that are near
    one. Given are hi, lo·unit/τ, unit/τ, the exponent of z, and the :class:`.arguments.Law`.
    """
    hi, shift, scale, power = given[:4]
    L: tl.constexpr = given[4]
    CDF: tl.constexpr = L.cdf
    WHOLE: tl.constexpr = L.whole
    v = (x - hi) * scale - shift
    if CDF == LOGISTIC:
        e = tl.exp2(-tl.abs(v))
        r = reciprocal(1.0 + e)
        tail = e * r
        f = tail * r
        w = with_sign(r - tail, v)
        ff = f * f
        return half_with_sign(v), with_sign(tail, v), f, f * w, ff, ff * w, ff * f
    elif CDF == LAPLACE:
        e = tl.exp2(-tl.abs(v))  # twice the tail, and twice the density
        near = tl.where(e > 1 - kink(CDF), 1.0, 0.0)
        half = half_with_sign(v)
        return half, half * e, e, e * e, near
    elif CDF == NORMAL:
        v = tl.minimum(tl.maximum(v, -1e4), 1e4)  # 0·v is to be 0
        ratio, e = normal_tail(v)
        first = e * v
        second = first * v
        return half_with_sign(v), with_sign(e * ratio, v), e, first, second, second * v, second * v * v
    else:
        only_powers(CDF)
        distance = tl.abs(v - 0.5)
        near = _clip(kink(CDF) * STEEP - tl.abs(distance - 0.5) * STEEP)
        z = _clip(v)
        if WHOLE:
            # 1 where v >= 1, as no float32 number lies between 1 − 1/STEEP and 1. Comparisons would leave a
            # predicate for each entry, which ptxas packs into bits and unpacks again.
            one = _clip(v * STEEP + (1 - STEEP))
            rate = z - one  # 0 where z is 0 or 1
            if WHOLE == 1:
                return one, -rate, tl.where(rate > 0, 1.0, 0.0), near
            for _ in tl.static_range(WHOLE - 2):
                rate *= z
            return one, -rate * z, rate, near
        else:
            one = tl.where(v >= (1.0 if CDF == POWER else 0.5), 1.0, 0.0)
            if CDF == POWER:
                y, rate = _raised_closely(x, hi, scale, shift, power)
            else:
                y, rate = z, 1.0
            return one, one - y, tl.where(distance < 0.5, rate, 0.0), near


@triton.jit
def holds(n, complement, power, CDF: tl.constexpr):
    """Whether the sum is right even if y of all entries near 1 are rounded alike, for the complement n − k.

    A power multiplies the rounding of z there, and no smaller 1 − y takes the place of y.
    """
    if CDF == POWER:
        return 32 * complement > power * n
    else:
        return n == n


@triton.jit
def hard_count(first, seen, CDF: tl.constexpr):
    """How many entries lie above t, from the sum of the first of the terms over `seen` entries."""
    if full_support(CDF):
        return first + 0.5 * seen
    else:
        return first


@triton.jit
def series(sums, power, CDF: tl.constexpr):
    """By how much the hard count exceeds the soft one; Σf; and β, γ, δ, ε of the Taylor polynomial.

    The count falls by Σf·(h − βh²/2 + γh³/6 − δh⁴/24 + εh⁵/120) over a step of hτ.
    """
    less, mass, others = sums[1].to(tl.float32), sums[2].to(tl.float32), ()
    for i in tl.static_range(3, term_count(CDF)):
        others = others + (sums[i].to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    per = reciprocal(mass)
    if CDF == LOGISTIC:
        # the derivatives of σ are f, −fw, f(1 − 6f), −fw(1 − 12f), f(1 − 30f + 120f²)
        beta, ff = -others[0] * per, others[1] * per  # type: ignore[misc]
        return less, mass, beta, 1 - 6 * ff, beta + 12 * others[2] * per, 1 - 30 * ff + 120 * others[3] * per  # type: ignore[misc]
    elif CDF == LAPLACE:
        # f has a kink at 0, which has no second derivative: γ takes it as spread over the neighbourhood
        beta, ff = -2 * less * per, 0.5 * others[0] * per  # type: ignore[misc]
        return less, 0.5 * mass, beta, 1 - (16 * ff - 1) * (1 / 3), beta, beta * 0 + 1
    elif CDF == NORMAL:
        z = per * (1 / NORMAL_UNIT)
        first = others[0] * z  # type: ignore[misc]
        z = z * (1 / NORMAL_UNIT)
        second = others[1] * z  # type: ignore[misc]
        z = z * (1 / NORMAL_UNIT)
        third, fourth = others[2] * z, others[3] * z * (1 / NORMAL_UNIT)  # type: ignore[misc]
        return less, mass * PHI, -first, second - 1, 3 * first - third, fourth - 6 * second + 3
    else:
        only_powers(CDF)
        nothing = mass * 0
        if CDF == POWER:
            mass *= power
        return less, mass, nothing, nothing, nothing, nothing


@triton.jit
def moment_quantile(log2_share, goal, normal, k, n, power, CDF: tl.constexpr):
    """(F⁻¹(k/n) − mean)/deviation. Given are log₂ min(k, n − k)/n, log₂ k/(n − k) and the normal one."""
    if CDF == LOGISTIC:
        return goal * (LN2 * 0.5513288954217921)  # the deviation is π/√3
    elif CDF == LAPLACE:
        return with_sign((log2_share + 1) * (LN2 * 0.7071067811865476), goal)
    elif CDF == NORMAL:
        return normal
    elif CDF == UNIFORM:
        return (k * reciprocal(n) - 0.5) * 3.4641016151377544  # the deviation is 1/√12
    else:
        only_powers(CDF)
        mean, variance = moments(power, CDF)
        return (tl.exp2(log2(k * reciprocal(n)) / power) - mean) * tl.rsqrt(variance)


@triton.jit
def value(x, hi, scale, shift, power, CDF: tl.constexpr, WHOLE: tl.constexpr):
    """F at (x − hi)·scale − shift, of the CDFs other than the logistic one."""
    v = (x - hi) * scale - shift
    if CDF == LAPLACE:
        tail = 0.5 * tl.exp2(-tl.abs(v))
        return tl.where(v > 0, 1 - tail, tail)
    elif CDF == NORMAL:
        ratio, e = normal_tail(v)
        return tl.where(v > 0, 1 - ratio * e, ratio * e)
    elif (CDF == UNIFORM) | (WHOLE > 0):
        return _raised(_clip(v), power, CDF, WHOLE)[0]
    else:
        only_powers(CDF)
        return _raised_closely(x, hi, scale, shift, power)[0]


@triton.jit
def density(v, power, CDF: tl.constexpr, WHOLE: tl.constexpr):
    """f(z)."""
    if CDF == LOGISTIC:
        e = tl.exp2(-tl.abs(v))
        r = reciprocal(1.0 + e)
        return e * r * r
    elif CDF == LAPLACE:
        return 0.5 * tl.exp2(-tl.abs(v))
    elif CDF == NORMAL:
        return PHI * tl.exp2(-v * v)
    elif CDF == UNIFORM:
        return tl.where((v > 0) & (v < 1), 1.0, 0.0)
    else:
        only_powers(CDF)
        inside = (v > 0) & (v < 1)
        _, rate = _raised(tl.where(inside, v, 0.0), power, CDF, WHOLE)
        return tl.where(inside, power * rate, 0.0)


@triton.jit
def log_rate(v, f, power, CDF: tl.constexpr):
    """f/F at v, where f is the density."""
    if CDF == LOGISTIC:
        e = tl.exp2(-tl.abs(v))
        r = reciprocal(1.0 + e)
        return tl.where(v > 0, e * r, r)
    elif CDF == LAPLACE:
        return tl.where(v > 0, f * reciprocal(1 - f), 1.0)
    elif CDF == NORMAL:
        ratio, e = normal_tail(v)
        return tl.where(v > 0, f * reciprocal(1 - ratio * e), PHI * reciprocal(ratio))
    else:
        only_powers(CDF)
        rate = reciprocal(v)
        if CDF == POWER:
            rate *= power
        return tl.where((v > 0) & (v < 1), rate, 0.0)
