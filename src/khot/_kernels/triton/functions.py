"""The CDFs and what else the kernels share, in Triton's language."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

CDFS = {"logistic": 0, "laplace": 1, "normal": 2, "uniform": 3, "power": 4}
LOGISTIC, LAPLACE, NORMAL, UNIFORM, POWER = (tl.constexpr(i) for i in CDFS.values())


class Traits(NamedTuple):
    """What the kernels ask about a CDF. The formulas of float64 are below. Those of float32 ask which CDF it
    is, in :mod:`.terms` and in the files that docs/architecture.md names ("A new CDF")."""

    full_support: bool  # f > 0 everywhere, and F is symmetric around 0; otherwise f > 0 on (0, 1) only
    # "exponential" for tails like e^−|z|, at this rate; "gaussian" for e^(−z²/2): they underflow in a gap;
    # "plain" where nothing is rescaled
    tail: str
    median: float | None  # None where the power decides
    moments: tuple[float, float] | None  # mean and variance, likewise
    icdf_error: float  # more than the error of icdf


# by their ids; a constexpr, so that Triton's cache knows a kernel that was compiled with other traits
TRAITS = tl.constexpr(
    (
        Traits(True, "exponential", 0.0, (0.0, math.pi**2 / 3), 1e-9),
        Traits(True, "exponential", 0.0, (0.0, 2.0), 1e-9),
        Traits(True, "gaussian", 0.0, (0.0, 1.0), 1e-3),
        Traits(False, "plain", 0.5, (0.5, 1 / 12), 1e-9),
        Traits(False, "plain", None, None, 1e-9),
    )
)
OUTPUTS = {"y": 0, "log": 1, "threshold": 2, "rounded": 2}
VALUE, LOG, THRESHOLD = (tl.constexpr(i) for i in range(3))
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


@triton.jit
def log1p(x):
    """For x ≥ −1/2 (Kahan): exact where 1 + x is, corrected where it is not."""
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * (x / tl.where(u == 1, 1, u - 1)))


@triton.jit
def expm1(x):
    """For x in [−1, 0] (Kahan)."""
    u = tl.exp(x)
    return tl.where(u == 1, x, (u - 1) * (x / tl.where(u == 1, 1, tl.log(u))))


@triton.jit
def log_erfcx(x):
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
def traits(CDF):
    if not 0 <= CDF < len(TRAITS.value):
        raise ValueError(f"no CDF has the id {CDF}")
    return TRAITS.value[CDF]


@triton.constexpr_function
def full_support(CDF):
    return traits(CDF).full_support


@triton.constexpr_function
def exponential_tail(CDF):
    return traits(CDF).tail == "exponential"


@triton.constexpr_function
def gaussian_tail(CDF):
    return traits(CDF).tail == "gaussian"


@triton.constexpr_function
def icdf_error(CDF):
    return traits(CDF).icdf_error


@triton.constexpr_function
def _known_median(CDF):
    return traits(CDF).median


@triton.constexpr_function
def _known_moment(CDF, order):
    known = traits(CDF).moments
    return None if known is None else known[order]


@triton.jit
def median(power, CDF: tl.constexpr):
    if _known_median(CDF) is None:
        return tl.exp2(-1 / power).to(tl.float32)
    else:
        return _known_median(CDF)


@triton.jit
def moments(power, CDF: tl.constexpr):
    """Mean and variance."""
    if _known_moment(CDF, 0) is None:
        mean = power / (power + 1)
        return mean, mean / ((power + 1) * (power + 2))
    else:
        return _known_moment(CDF, 0), _known_moment(CDF, 1)


@triton.jit
def log_scale(near, CDF: tl.constexpr):
    """The logarithm of what tails and densities relative to near are multiplied by (:func:`side`)."""
    if gaussian_tail(CDF):
        return 0.5 * near * near
    elif exponential_tail(CDF):
        return near
    else:
        return near * 0


@triton.jit
def log_scales(a, b, CDF: tl.constexpr):
    """log_scale(a) − log_scale(b), without cancellation."""
    if gaussian_tail(CDF):
        return 0.5 * (a - b) * (a + b)
    elif exponential_tail(CDF):
        return a - b
    else:
        return (a - b) * 0


@triton.jit
def only_powers(CDF: tl.constexpr):
    """Fails for a CDF without a branch of its own, in the last branch, which is for clipped powers."""
    tl.static_assert((CDF == UNIFORM) | (CDF == POWER), f"no branch for the CDF with the id {CDF}")


@triton.jit
def side(z, one_minus_z, above, near, behind, power, CDF: tl.constexpr):
    """min(F, 1 − F) and f at z, of CDFs whose tails underflow relative to what they are at ±near.

    That is, times e^near (an exponential tail) or e^(near²/2) (a gaussian one): near = 0 leaves them as they
    are, and with the z of the entry nearest to t they do not underflow however wide the gap. `behind` is
    near − |z|.
    """
    a = tl.abs(z)
    if CDF == LOGISTIC:
        e = tl.exp(-a)
        r = 1 / (1 + e)
        tail = tl.exp(behind) * r
        density = tail * r
    elif CDF == LAPLACE:
        tail = 0.5 * tl.exp(behind)
        density = tail
    elif CDF == NORMAL:
        a = tl.minimum(a, 1e150 if a.dtype == tl.float64 else 1e15)  # its square stays finite
        E = tl.exp(0.5 * tl.maximum(behind, -1e15) * (near + a))
        tail = 0.5 * E * tl.exp(log_erfcx(a * 0.7071067811865476))
        density = E * 0.3989422804014327
    else:
        only_powers(CDF)
        inside = (z > 0) & (z < 1)
        z = tl.where(inside, z, 0.5)
        if CDF == UNIFORM:
            tail = tl.where(above, one_minus_z, z)
            density = tl.where(inside, 1.0, 0.0).to(z.dtype)
        else:
            power = power.to(z.dtype)
            F = tl.exp(power * tl.log(z))
            one_minus_z = tl.where(inside & above, one_minus_z, 0.0)
            tail = tl.where(above, -expm1(power * log1p(-one_minus_z)), F)
            density = tl.where(inside, power * F / z, 0.0)
        tail = tl.where(inside, tail, 0.0)
    return tail, density


@triton.jit
def log_F(z, power, CDF: tl.constexpr):
    """log F(z)."""
    a = tl.abs(z)
    if CDF == LOGISTIC:
        log_F = tl.minimum(z, 0.0) - log1p(tl.exp(-a))
    elif CDF == LAPLACE:
        log_F = tl.where(z > 0, log1p(-0.5 * tl.exp(-a)), -a - 0.6931471805599453)
    elif CDF == NORMAL:
        a = tl.minimum(a, 1e15)
        log_tail = log_erfcx(a * 0.7071067811865476) - 0.5 * a * a - 0.6931471805599453
        log_F = tl.where(z > 0, log1p(-tl.exp(log_tail)), log_tail)
    else:
        only_powers(CDF)
        inside = (z > 0) & (z < 1)
        edge = tl.where(z > 0, 0.0, float("-inf")).to(z.dtype)
        log_F = tl.log(tl.where(inside, z, 1.0))
        if CDF == POWER:
            log_F = log_F * power.to(z.dtype)
        log_F = tl.where(inside, log_F, edge)
    return log_F


@triton.jit
def slope_of_log(z, density, tail, power, CDF: tl.constexpr):
    """f/F, from the f and the tail that are not relative to anything; 0 where F is 0."""
    a = tl.abs(z)
    if CDF == LOGISTIC:
        e = tl.exp(-a)
        ratio = tl.where(z > 0, e, 1.0) / (1 + e)
    elif CDF == LAPLACE:
        ratio = tl.where(z > 0, density / (1 - tail), 1.0)
    elif CDF == NORMAL:
        lower = 0.7978845608028654 * tl.exp(-log_erfcx(tl.minimum(a, 1e15) * 0.7071067811865476))
        ratio = tl.where(z > 0, density / (1 - tail), lower)
    else:
        only_powers(CDF)
        inside = (z > 0) & (z < 1)
        ratio = 1 / tl.where(inside, z, 1.0)
        if CDF == POWER:
            ratio = ratio * power.to(z.dtype)
        ratio = tl.where(inside, ratio, 0.0)
    return ratio.to(z.dtype)


@triton.jit
def icdf(y, power, CDF: tl.constexpr):
    """F⁻¹(y) of float64 numbers, to the trait icdf_error."""
    w = tl.minimum(y, 1 - y)
    if CDF == LOGISTIC:
        z = tl.log(y) - tl.log(1 - y)
    elif CDF == LAPLACE:
        z = tl.where(y > 0.5, -tl.log(2 * w), tl.log(2 * w))
    elif CDF == NORMAL:
        z = normal_icdf(y)
    elif CDF == UNIFORM:
        z = y
    else:
        only_powers(CDF)
        z = tl.exp(tl.log(y) / power)
    return z


@triton.jit
def normal_icdf(y):
    """Φ⁻¹(y) to 5e-4 (Abramowitz and Stegun 26.2.23)."""
    u = tl.sqrt(-2 * tl.log(tl.minimum(y, 1 - y)))
    a = u - (2.515517 + u * (0.802853 + u * 0.010328)) / (1 + u * (1.432788 + u * (0.189269 + u * 0.001308)))
    return tl.where(y > 0.5, a, -a)


@triton.jit
def pair(hi, lo, FLOAT64: tl.constexpr):
    """hi + lo, with as much of it in hi as float32 (float64 if FLOAT64) holds."""
    s = hi + lo
    if FLOAT64:
        v = s - hi
        low = (hi - (s - v)) + (lo - v)
    else:
        s = s.to(tl.float32).to(tl.float64)
        low = (hi - s) + lo
    return s, low


@triton.jit
def load(pointer, row, stride, column, valid, dtype: tl.constexpr):
    return tl.load(pointer + row[:, None] * stride + column[None, :], mask=valid, other=0.0).to(dtype)


@triton.jit
def gather(pointer, parts, what, PARTS: tl.constexpr, STRIDE: tl.constexpr, other):
    """One of the numbers that the parts of a row left, as (1, PARTS)."""
    part = tl.arange(0, PARTS)[None, :]
    return tl.load(pointer + part * STRIDE + what, mask=part < parts, other=other)


@triton.jit
def put(pointer, values):
    """Numbers one after another."""
    for i in tl.static_range(len(values)):
        tl.store(pointer + i, values[i])


@triton.jit
def get(pointer, COUNT: tl.constexpr):
    values = ()
    for i in tl.static_range(COUNT):
        values = values + (tl.load(pointer + i),)  # type: ignore[assignment]  # noqa: RUF005
    return values


@triton.jit
def place(parts):
    """The row and the part of it that are this program's. Only the first axis of a grid is long enough."""
    program = tl.program_id(0)
    return (program // parts).to(tl.int64), program % parts


@triton.jit
def place_last(parts):
    """The same with the last rows first, of which the cache still has what was read before."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    return (program // parts).to(tl.int64), program % parts


@triton.jit
def extent(part, n, length):
    """Where a part of a row of n entries starts, and how many it has."""
    start = part.to(tl.int64) * length
    return start, tl.minimum(n - start, length).to(tl.int32)


@triton.jit
def chunks(
    fold: tl.constexpr, sums, given, pointer, stride, row, part, n, length,
    COMPUTE: tl.constexpr, CHUNK: tl.constexpr, ABSOLUTE: tl.constexpr = False,
):  # fmt: skip
    """sums once fold(sums, given, x, valid, row, column) has seen the part's entries, or their absolute
    values, a chunk at a time."""
    for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
        column = start + tl.arange(0, CHUNK)
        valid = (column < n)[None, :]
        x = tl.load(pointer + row * stride + column[None, :], mask=valid, other=0.0).to(COMPUTE)
        sums = fold(sums, given, tl.abs(x) if ABSOLUTE else x, valid, row, column)
    return sums
