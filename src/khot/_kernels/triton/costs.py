"""Entries that have costs, in float32: what the kernels of soft budgets add up in the place of a count.

An entry is a pair, of its score and its cost. Costs are in units of a power of two by which the dearest of a
row costs from ½ to 1, so that a budget is to them what k is to a count. By value y = F((x − t w)/τ): a step
of t by τ moves z of an entry by its cost, which is at most 1, and each derivative of the sum in t carries a
power of the cost more.

A count is exact in float32, and a sum of costs is not: what the selected entries cost more than the budget
would have an error as large as all that the tails of F add to it. So each cost is added as two parts. The
first is a multiple of 2^-q, with q so small that float32 has the sum over a row exactly; the second is what
is left, at most 2^-(q + 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.fast import fma, reciprocal, two_sum
from khot._kernels.triton.float64_sums import BY_VALUE
from khot._kernels.triton.functions import LAPLACE, LOGISTIC, NORMAL, POWER, full_support, only_powers
from khot._kernels.triton.terms import NORMAL_UNIT, PHI, term_count, terms

DIGITS = 24  # of float32
INFINITE = tl.constexpr(0x7F800000)  # the bits of +inf: those of NaN and of negative numbers are greater


def digits(n: int, together: int) -> tuple[float, float]:
    """The grain, and the floor of Σ w f (:func:`.threshold.iterate`), of rows of n entries, so many of which
    are summed together in float32."""
    return _grain(min(n, together)), _least_mass(n, together)


def _grain(n: int) -> float:
    """A number g for which (w + g) − g is the multiple of 2^-q next to w, for sums over n entries."""
    return 1.5 * 2.0 ** (DIGITS - 1 - _places(n))


def _least_mass(n: int, together: int) -> float:
    """How large Σ w f has to be, lest the rounding of sums over the second parts moves y by more than 1e-7;
    in a row of n entries, so many of which are summed together.

    They are summed without order, as the rounding of numbers of up to 2^-(q + 1) that have either sign.
    """
    return n**0.5 * 2.0 ** -(_places(min(n, together)) + 1) * 2.0**-DIGITS / 2e-7


def _places(n: int) -> int:
    return min(20, DIGITS - (n - 1).bit_length())


@triton.jit
def as_bits(w):
    """The bits of costs as whole numbers, whose order is that of the costs. The greatest one tells of a bad
    cost, too."""
    return tl.where(w == 0, 0.0, w).to(tl.uint32, bitcast=True)


@triton.jit
def unit_of_costs(most):
    """The power of two that costs are multiplied by, and whether all costs are good. Given are the bits of
    the dearest one.

    A row whose costs are all 0, or so small or large that this unit is no number, is not good, either.
    """
    exponent = (most & INFINITE).to(tl.int32)
    good = (most < INFINITE) & (exponent > (1 << 23)) & (exponent < (252 << 23))
    exponent = tl.where(good, exponent, 126 << 23)
    per = ((253 << 23) - exponent).to(tl.float32, bitcast=True)
    return per, good


@triton.jit
def load_pair(at, offset, valid):
    """The scores and the costs of entries so far behind `at`, which is where scores lie, where costs do, and
    how far apart those are. What is masked, or not there, costs nothing."""
    x_at, cost_at, cost_column = at
    x = tl.load(x_at + offset, mask=valid, other=float("-inf")).to(tl.float32)
    w = tl.load(cost_at + (tl.zeros((), tl.int64) + offset) * cost_column, mask=valid, other=0.0)
    return x, tl.where(x == float("-inf"), 0.0, w.to(tl.float32))


@triton.jit
def priced(x, w, hi, shift, scale, CDF: tl.constexpr, WHOLE: tl.constexpr):
    """x − hi w, and by how much that times the scale exceeds v, for the threshold t w of an entry; shift is
    lo·unit/τ and scale unit/τ."""
    off, shift = fma(-hi, w, x), shift * w
    if CDF == POWER and not WHOLE:  # the exponent multiplies what rounding takes from it
        paid = hi * w
        off, low = two_sum(x, -paid)
        low -= fma(hi, w, -paid)
        shift -= tl.where(tl.abs(low) < float("inf"), low, 0.0) * scale
    return off, shift


@triton.constexpr_function
def moment_count(BY):
    """How many members the tuple of :func:`paid_moments` has."""
    return 7 if getattr(BY, "value", BY) == BY_VALUE.value else 4


@triton.jit
def paid_moments(entry, given):
    """The two parts of w, w d and w d² for d = x − origin, and by value w², w² d and w³; not finite if x is
    not. Given are the origin, the grain and the law."""
    x, w = entry
    origin, grain = given[:2]
    L: tl.constexpr = given[2]
    coarse = (w + grain) - grain
    d = tl.where(x == float("-inf"), 0.0, x - origin)
    wd = w * d
    if L.by == BY_VALUE:
        return coarse, w - coarse, wd, wd * d, w * w, w * wd, w * w * w
    else:
        return coarse, w - coarse, wd, wd * d


@triton.constexpr_function
def paid_count(CDF, BY):
    """How many members :func:`paid_terms` has before the last."""
    CDF = getattr(CDF, "value", CDF)
    if getattr(BY, "value", BY) == BY_VALUE.value and LAPLACE.value == CDF:
        return 6
    return term_count(CDF)


@triton.jit
def paid_terms(entry, given):
    """:func:`.terms.terms` of entries that cost w, times w; the first of them in two parts, the second of
    which comes last. It is w of an entry above t and 0 of the others. Given is, after what
    :func:`.terms.terms` is given, the grain.

    By value the terms after the second are the derivatives of F, each times one power of w more; those of the
    normal CDF are in units of its greatest density.
    """
    x, w = entry
    L: tl.constexpr = given[4]
    CDF: tl.constexpr = L.cdf
    if L.by == BY_VALUE:
        x, shift = priced(x, w, given[0], given[1], given[2], CDF, L.whole)
        sums = terms(x, (0.0, shift, given[2], given[3], L))
    else:
        sums = terms(x, given)
    chosen = sums[0] + 0.5 if full_support(CDF) else sums[0]
    # not of w itself: the compiler would keep the parts of all entries over all evaluations
    paid = chosen * w
    coarse = (paid + given[5]) - given[5]
    held = (coarse,)
    held = held + (sums[1] * w,)  # type: ignore[assignment]  # noqa: RUF005
    if L.by == BY_VALUE:
        # powers of w alone would be kept, too
        density = sums[2] * 0.5 if CDF == LAPLACE else sums[2]
        density = density * w * w
        held = held + (density,)  # type: ignore[assignment]  # noqa: RUF005
        if full_support(CDF):
            ratios = _derivatives(sums, x * given[2] - shift, CDF)
            for i in tl.static_range(len(ratios)):
                density = density * w
                held = held + (density * ratios[i],)  # type: ignore[assignment]  # noqa: RUF005
        if not ((CDF == LOGISTIC) | (CDF == NORMAL)):
            held = held + (sums[term_count(CDF) - 1] * w * w,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        for i in tl.static_range(2, term_count(CDF)):
            held = held + (sums[i] * w,)  # type: ignore[assignment]  # noqa: RUF005
    return held + (paid - coarse,)  # noqa: RUF005


@triton.jit
def paid_costs(entry, given):
    """The two parts of w in float64. Their sums over a row are exact; where costs span many decades, but for
    about the last digit of a budget."""
    held = paid_terms(entry, given)
    L: tl.constexpr = given[4]
    return held[0].to(tl.float64), held[paid_count(L.cdf, L.by)].to(tl.float64)


@triton.jit
def _derivatives(sums, v, CDF: tl.constexpr):
    """The derivatives of f, in units of f, of an entry at v: those that :func:`.terms.series` derives from
    sums."""
    if CDF == LOGISTIC:
        f, w = sums[2], 2 * (sums[1] - sums[0])
        return w, 1 - 6 * f, w * (1 - 12 * f), 1 - f * (30 - 120 * f)
    elif CDF == NORMAL:
        z = tl.minimum(tl.maximum(v, -1e4), 1e4) * (1 / NORMAL_UNIT)
        zz = z * z
        return -z, zz - 1, z * (3 - zz), zz * (zz - 6) + 3
    else:
        tl.static_assert(CDF == LAPLACE, f"no branch for the CDF with the id {CDF}")
        # as over the whole neighbourhood of the kink, which has no second derivative
        return -2 * sums[0], (4 / 3) * (1 - 2 * sums[2])


@triton.jit
def paid_series(sums, power, CDF: tl.constexpr):
    """:func:`.terms.series` of sums by value."""
    less, mass = sums[1].to(tl.float32), sums[2].to(tl.float32)
    nothing = mass * 0
    if (CDF == LOGISTIC) | (CDF == NORMAL):
        per = reciprocal(mass)
        if CDF == NORMAL:
            mass *= PHI
        return (
            less, mass, sums[3].to(tl.float32) * per, sums[4].to(tl.float32) * per,
            sums[5].to(tl.float32) * per, sums[6].to(tl.float32) * per,
        )  # fmt: skip
    elif CDF == LAPLACE:  # steps by its polynomial are short
        per = reciprocal(mass)
        return less, mass, sums[3].to(tl.float32) * per, sums[4].to(tl.float32) * per, nothing, nothing
    else:
        only_powers(CDF)
        if CDF == POWER:
            mass *= power
        return less, mass, nothing, nothing, nothing, nothing


@triton.jit
def levels(x, w, quantile):
    """The thresholds at which entries have x − t w = quantile, less and plus room for rounding, none of them
    farther than 1e30; inf and −inf of entries that cost nothing."""
    room = 1e-5 * (tl.abs(x) + tl.abs(quantile))
    per, paid = reciprocal(w), (w > 0) & (x > float("-inf"))
    low, high = (x - quantile - room) * per, (x - quantile + room) * per
    return (
        tl.where(paid, tl.maximum(low, -1e30), float("inf")),
        tl.where(paid, tl.minimum(high, 1e30), float("-inf")),
    )  # fmt: skip
