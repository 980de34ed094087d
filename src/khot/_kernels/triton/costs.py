"""Entries that have costs, in float32: what the kernels of soft budgets add up in the place of a count.

An entry is a pair, of its score and its cost. Costs are in units of a power of two by which the dearest of a
row costs from ½ to 1, so that a budget is to them what k is to a count.

A count is exact in float32, and a sum of costs is not: what the selected entries cost more than the budget
would have an error as large as all that the tails of F add to it. So each cost is added as two parts. The
first is a multiple of 2^-q, with q so small that float32 has the sum over a row exactly; the second is what
is left, at most 2^-(q + 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.functions import full_support
from khot._kernels.triton.terms import term_count, terms

__all__ = ["as_bits", "grain", "least_mass", "paid_moments", "paid_terms", "unit_of_costs"]

DIGITS = 24  # of float32
INFINITE = tl.constexpr(0x7F800000)  # the bits of +inf: those of NaN and of negative numbers are greater


def grain(n: int) -> float:
    """A number g for which (w + g) − g is the multiple of 2^-q next to w, for rows of n entries."""
    return 1.5 * 2.0 ** (DIGITS - 1 - _places(n))


def least_mass(n: int) -> float:
    """How large Σ w f has to be, lest the rounding of sums over the second parts moves y by more than 1e-7.

    They are summed without order, as the rounding of numbers of up to 2^-(q + 1) that have either sign.
    """
    return n**0.5 * 2.0 ** -(_places(n) + 1) * 2.0**-DIGITS / 2e-7


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
def paid_moments(entry, given):
    """The two parts of w, w d and w d² for d = x − origin; not finite if x is not. Given are the origin and
    the grain."""
    x, w = entry
    origin, grain = given
    coarse = (w + grain) - grain
    d = tl.where(x == float("-inf"), 0.0, x - origin)
    wd = w * d
    return coarse, w - coarse, wd, wd * d


@triton.jit
def paid_terms(entry, given):
    """:func:`.terms.terms` of entries that cost w, times w; the first of them in two parts, the second of
    which comes last. It is w of an entry above t and 0 of the others. Given are, after what
    :func:`.terms.terms` is given, the grain."""
    x, w = entry
    CDF: tl.constexpr = given[4]
    sums = terms(x, given)
    chosen = sums[0] + 0.5 if full_support(CDF) else sums[0]
    # not of w itself: the compiler would keep the parts of all entries over all evaluations
    paid = chosen * w
    coarse = (paid + given[6]) - given[6]
    held = (coarse,)
    for i in tl.static_range(1, term_count(CDF)):
        held = held + (sums[i] * w,)  # type: ignore[assignment]  # noqa: RUF005
    return held + (paid - coarse,)  # noqa: RUF005
