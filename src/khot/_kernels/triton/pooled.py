"""What a top-k in magnitude adds up: a soft count whose temperature depends on its threshold.

The value γ that the pooled entries share solves Σ min(γ, Y) = kγ with Y = ((s − γ)₊/τ)^(1/(p−1)), of s = |x|.
Divided by γ it is the soft count of the CDF z^(1/(p−1)), clipped to [0, 1], at the threshold γ and the
temperature τγ^(p−1), and y = γF where F < 1. The terms are those of :mod:`.terms`; only the slope of the
count has a part more, because the temperature moves with γ.
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.terms import terms


@triton.jit
def size(x):
    """|x|; 0 for −inf, which stands for an entry that may not be selected or is not there."""
    return tl.where(float("-inf") == x, 0.0, tl.abs(x))


@triton.jit
def pooled_moments(x, given):
    """Of what may be selected: one, |x| and its square; not finite if x is not."""
    s = size(x)
    return tl.where(float("-inf") == x, 0.0, 1.0), s, s * s


@triton.jit
def pooled_terms(x, given):
    return terms(size(x), given)


@triton.jit
def temperature(gamma, tau, P: tl.constexpr):
    """τγ^(p−1) and τγ^(p−2), in γ's dtype. Powers take float64: F has up to seven times their relative
    error."""
    if P == 2:
        return tau * gamma, tau + gamma * 0
    else:
        wide_gamma = tl.maximum(gamma.to(tl.float64), 1e-290)
        warming = tau.to(tl.float64) * tl.exp2((P - 2) * tl.log2(wide_gamma))
        return (warming * wide_gamma).to(gamma.dtype), warming.to(gamma.dtype)


@triton.jit
def unpooled(s, tau, P: tl.constexpr):
    """v ≥ 0 with v + τ v^(p−1) = s, for s ≥ 0."""
    if P == 2:
        return s * (1 / (1 + tau))
    else:
        e: tl.constexpr = 1 / (P - 1)
        # With v = s·2^(eu) the equation is log₂(2^(eu) + 2^(c + u)) = 0, which is convex in u and all but
        # linear: Newton converges from above the root, in steps that double the digits.
        c = tl.log2(tau) + (P - 2) * tl.log2(tl.where(s > 0, s, 1.0))
        u = tl.minimum(-c, 0.0)
        for _ in tl.static_range(8 if s.dtype == tl.float64 else 5):
            a, b = tl.exp2(e * u), tl.exp2(c + u)
            u -= tl.log2(a + b) * (a + b) / (e * a + b)
        a, b = tl.exp2(e * u), tl.exp2(c + u)
        # each has its digits where it is the smaller share of s
        return tl.where(s > 0, tl.where(a > 0.5, s * (1 - b), s * a), 0.0)
