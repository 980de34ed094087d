"""Thresholds with the digits of float64, from those that float32 arithmetic has found (:mod:`.threshold`).

Newton's method in float64. The threshold is off by some 1e-7 τ, so that one step is mostly enough: what it
leaves is about the square of that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.arguments import Tile
from khot._kernels.triton.fast import any_row, exp_of_minus, reciprocal64, two_sum, wide
from khot._kernels.triton.functions import LAPLACE, LOGISTIC, full_support, side
from khot._kernels.triton.threshold import over

STEPS = tl.constexpr(4)  # at most, before a row is searched in float64
# A step of up to so many τ is the last one. Its error is half its square (times z with the normal CDF); where
# entries cross a kink of F, it is as long as the step.
LAST = tl.constexpr(1e-6)
LAST_KINKED = tl.constexpr(1e-12)
EDGE = tl.constexpr(1e-6)  # of the support: so near to its ends rounding may have made the density
FLAT = tl.constexpr(1e-3)  # of compact support: a sum of densities that tells of a gap
LONG = tl.constexpr(0.1)  # a step from a threshold that float32 did not find


@triton.jit
def _terms(x, given):
    """Which entries lie above t, or with compact support, which ones F is 1 of; by how much F differs from
    that; and f."""
    hi, lo, inverse, power = given[:4]
    CDF: tl.constexpr = given[4]
    z = ((x.to(tl.float64) - hi) - lo) * inverse
    if (CDF == LOGISTIC) | (CDF == LAPLACE):
        above, e = z > 0, exp_of_minus(tl.abs(z))
        if CDF == LOGISTIC:
            share = reciprocal64(1 + e)
            tail = e * share
            density = tail * share
        else:
            tail = 0.5 * e
            density = tail
        tail = tl.where(above, -tail, tail)
    elif full_support(CDF):
        above = z > 0
        tail, density = side(z, z, above, 0.0, -tl.abs(z), power, CDF)
        tail = tl.where(above, -tail, tail)
    else:
        above = z >= 1
        tail, density = side(z, z, False, 0.0, -tl.abs(z), power, CDF)
        density = tl.where((z > EDGE) & (z < 1 - EDGE), density, 0.0)
    return tl.where(above, 1.0, 0.0), tail, density


@triton.jit
def polish(x, at, n, hi, lo, ok, k, tau, power, CDF: tl.constexpr, T: tl.constexpr):
    """hi and lo of the rows that are ok, and which of them have a threshold. All numbers are float64; x, at
    and n are as for :func:`.threshold.over`.

    A row that a program holds alone is read again: there are not registers enough for float64 beside it.
    """
    ALONE: tl.constexpr = T.together == 1
    inverse = 1 / tau
    ok = ok & (inverse < float("inf"))
    last: tl.constexpr = LAST if full_support(CDF) else LAST_KINKED
    open_ = ok
    count = 0
    running = any_row(open_, T.together)
    while running:
        above, tails, mass = over(
            x, at, n, _terms,
            (wide(hi, T.together), wide(lo, T.together), wide(inverse, T.together), power, CDF), 3,
            Tile(T.together, 1 if ALONE else T.pieces, T.width, False, ALONE, 0), TYPE=tl.float64,
        )  # fmt: skip
        step = ((above - k) + tails) / mass
        found = tl.abs(step) < LONG
        if not full_support(CDF):
            found = found & (mass > FLAT)
        ok = ok & (found | ~open_)
        open_ = open_ & found
        lo = tl.where(open_, lo + step * tau, lo)
        open_ = open_ & (tl.abs(step) > last)
        count += 1
        running = (count < STEPS) & any_row(open_, T.together)
    hi, lo = two_sum(hi, lo)
    return hi, lo, ok & ~open_
