"""Top-k in magnitude in float64: γ of a row, which is read a chunk at a time, by Newton's method in a bracket
(:mod:`.float64_steps`), and y. Float64 entries take it, and the rows for which float32 does not suffice."""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.fast import store
from khot._kernels.triton.float64_steps import NOISE, next_state
from khot._kernels.triton.float64_sums import BY_COUNT, least, load, sums
from khot._kernels.triton.functions import HUGE, UNIFORM
from khot._kernels.triton.pooled import temperature, unpooled

EVALUATIONS64 = tl.constexpr(128)  # at most, in float64


@triton.jit
def _finite_size(x):
    """|x|; 0 for infinite entries."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, tl.abs(x))


@triton.jit
def _kinds(x, w, given):
    """Whether an entry is NaN, +inf, −inf, or finite and not 0."""
    return (
        tl.where(x != x, 1.0, 0.0).to(tl.float64), tl.where(x == float("inf"), 1.0, 0.0).to(tl.float64),
        tl.where(x == float("-inf"), 1.0, 0.0).to(tl.float64),
        tl.where(_finite_size(x) > 0, 1.0, 0.0).to(tl.float64),
    )  # fmt: skip


@triton.jit
def _position(s, hi, lo, tau, P: tl.constexpr):
    """z, of which 0 < z < 1 says that an entry is pooled; and F(z) then."""
    z = ((s - hi) - lo) / tau
    pooled = (z > 0) & (z < 1)
    F = tl.where(pooled, z, 0.0)
    if P != 2:
        F = tl.where(pooled, tl.exp2((1 / (P - 1)) * tl.log2(tl.where(pooled, z, 1.0))), 0.0)
    return z, pooled, F


@triton.jit
def _counts(x, w, given):
    """Which entries are selected on their own, F, and its slope. Given are hi, lo, τγ^(p−1) and p."""
    P: tl.constexpr = given[3]
    z, pooled, F = _position(_finite_size(x), given[0], given[1], given[2], P)
    slope = tl.where(pooled, F / tl.where(pooled, z, 1.0), 0.0) / (P - 1)
    return tl.where(z >= 1, 1.0, 0.0).to(tl.float64), F, slope


@triton.jit
def _ends(x, w, given):
    """The least size of an entry that is selected on its own, and the greatest of the others with the sign
    changed. Given as for :func:`_counts`."""
    s = _finite_size(x)
    own = ((s - given[0]) - given[1]) / given[2] >= 1
    return tl.where(own, s, float("inf")), tl.where(own, float("inf"), -s)


@triton.jit
def _greatest(x, w, given):
    s = _finite_size(x)
    return -s, s  # Triton 3.6 has faults with tuples of one member


@triton.jit
def find_sizes_in_float64(source, k, tau, P: tl.constexpr, SIGNED: tl.constexpr, WIDTH: tl.constexpr):
    """γ = hi + lo of a row, for which the order of the edge cases is the reference's."""
    n = source[3]
    nan, above, below, positive = sums(_kinds, 0, 4, source, BY_COUNT, WIDTH)
    below -= tl.cdiv(n, WIDTH) * WIDTH - n  # what is not there
    pinned = above + below if SIGNED else above
    selectable = n + below * 0 if SIGNED else n - below
    answered = (nan == 0) & (k >= 0) & (k <= selectable) & (k == tl.floor(k)) & (pinned <= k)
    answered = answered & (tau > 0) & (tau < float("inf"))
    left = k - pinned
    most = -least(_greatest, 0, 2, source, BY_COUNT, WIDTH)[0]
    zero = tl.zeros((), tl.float64)
    hi, lo = zero, zero  # where the k-th entry is 0
    live = tl.where(answered, tl.where(left > 0, positive >= left, False), False)
    if live:
        hi, lo = _root(source, left, selectable == k, tau, most, P, WIDTH)
    hi = tl.where((left == 0) & (pinned > 0), tl.where(k == selectable, 1.0, most + 1), hi)
    hi, lo = tl.where(k == 0, HUGE, hi), tl.where(k == 0, HUGE, lo)
    return tl.where(answered, hi, float("nan")), tl.where(answered, lo, float("nan"))


@triton.jit
def _root(source, left, every, tau, most, P: tl.constexpr, WIDTH: tl.constexpr):
    zero = tl.zeros((), tl.float64)
    infinite = zero + float("inf")
    state = (0.5 * most, zero, zero, zero, most, zero, infinite, infinite)
    count = 0
    running = count == 0
    while running:
        heat, warming = temperature(state[0] + state[1], tau, P)
        own, F, slope = sums(_counts, (state[0], state[1], heat, P), 3, source, BY_COUNT, WIDTH)
        miss = (own - left) + F
        gap = tl.where(own == left, F == 0, False)
        if gap:
            up, down = least(_ends, (state[0], state[1], heat), 2, source, BY_COUNT, WIDTH)
            middle = 0.5 * unpooled(up, tau, P) - tl.where(every, 0.0, 0.5 * down)
            state = (middle, zero) + state[2:]  # noqa: RUF005
            running = count < 0
        else:
            step = miss / (slope + warming * F)
            trial = (miss, tl.abs(miss), 2 * NOISE * tl.maximum(F, 1.0), step, F > 0)
            state, finished = next_state(
                state, trial, (zero + float("nan"), zero), heat, 1.0, count, UNIFORM
            )  # fmt: skip
            count += 1
            running = ~finished & (count < EVALUATIONS64)
    return state[0], state[1]


@triton.jit
def write_sizes_in_float64(
    to, source, hi, lo, tau, P: tl.constexpr, SIGNED: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    none = hi == HUGE
    gamma = tl.where(none, 0.0, hi + lo)
    heat = temperature(gamma, tau, P)[0]
    for start in range(0, source[3], WIDTH):
        column = start + tl.arange(0, WIDTH)
        x, _ = load(source, start, BY_COUNT, WIDTH)
        s = tl.abs(x)
        selectable = s == s if SIGNED else x != float("-inf")
        finite = tl.where(s == float("inf"), 0.0, s)
        z, _, F = _position(finite, hi, lo, tl.where(heat > 0, heat, 1.0), P)
        # where γ is 0, nothing is pooled
        own = selectable & ((z >= tl.where(gamma == 0, 0.0, 1.0)) | (s == float("inf")))
        y = tl.where(own, tl.where(s == float("inf"), s, unpooled(finite, tau, P)), gamma * F)
        y = tl.where(none, 0.0, tl.where(x < 0, -y, y))
        store(to + column, tl.where(hi == hi, y, hi), column < source[3])
