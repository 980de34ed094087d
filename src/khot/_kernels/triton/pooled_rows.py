"""Top-k in magnitude of rows in float32, and its gradients in either precision: what the kernels of rows that
a program holds, of those that stream past one, and of those that many share have in common."""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.arguments import Law
from khot._kernels.triton.exact_sums import BY_COUNT
from khot._kernels.triton.fast import LOG2E, inverse_of, log2, plus, reciprocal, store, total, wide
from khot._kernels.triton.functions import HUGE, POWER
from khot._kernels.triton.pooled import pooled_moments, size, temperature, unpooled
from khot._kernels.triton.rows import inside, load_rows
from khot._kernels.triton.terms import holds, value
from khot._kernels.triton.threshold import guess, iterate, over

__all__ = [
    "find_gamma",
    "in_range",
    "ordinary_pull",
    "pooled_result",
    "pooled_values",
    "pull_given",
    "pull_sums",
    "settle_pull",
    "write_pooled",
    "write_pull",
]


@triton.jit
def find_gamma(
    x, at, there, n_columns, k, tau, power, evaluations, P: tl.constexpr, SIGNED: tl.constexpr,
    WHOLE: tl.constexpr, T: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """γ of rows, and which of them have one. AGAIN is as in :func:`.threshold.iterate`."""
    n, first, second = over(x, at, n_columns, pooled_moments, 0, 3, T)
    n, first, second = n.to(tl.float32), first.to(tl.float32), second.to(tl.float32)
    rest = n - k
    ok = there & (k > 0) & (rest > 0) & holds(n, rest, power, POWER)
    ok = ok & (tau > 1e-15) & (tau < 1e15) & (second < 1e25) & (second > 1e-25)
    if SIGNED:  # −inf is of infinite size
        ok = ok & (n == n_columns)
    mean = first * reciprocal(n)
    variance = tl.maximum(second * reciprocal(n) - mean * mean, 0.0)
    # γ if all entries were pooled, and alike; from it a temperature, and from that the quantile
    alike = n * reciprocal(k) * tl.exp2(power * (log2(mean) - log2(tau)))
    gamma = mean * alike * reciprocal(mean + alike)
    heat, _ = temperature(gamma, tau, P)
    t, _, _, per_deviation, normal = guess(n, mean, variance, k, heat, power, POWER)
    high = 1.01 * (mean + tl.sqrt(variance * rest * reciprocal(k)))
    hi = tl.minimum(tl.where(t > 0.25 * gamma, t, gamma), high)
    crowd = n * tl.exp2(normal * normal * (-0.5 * LOG2E)) * 0.3989423 * heat * per_deviation
    done = ~ok
    hi = tl.where(ok, hi, 1.0)
    hi, lo, solved = iterate(
        x, at, n_columns, (hi, hi * 0, hi * 0, high, crowd), done,
        (n, k, k * 0, tau, reciprocal(heat), power), evaluations, Law(POWER, WHOLE, 0, BY_COUNT), T, AGAIN,
        POOLED=P,
    )  # fmt: skip
    return hi, lo, ok & solved & (hi > 0)


@triton.jit
def pooled_values(hi, lo, tau, power, P: tl.constexpr, TOGETHER: tl.constexpr):
    """What :func:`pooled_result` needs to know of rows."""
    heat, _ = temperature(hi + lo, tau, P)
    scale = inverse_of(heat)
    return (
        wide(hi, TOGETHER), wide(lo * scale, TOGETHER), wide(scale, TOGETHER), wide(hi + lo, TOGETHER),
        wide(tau, TOGETHER), power,
    )  # fmt: skip


@triton.jit
def pooled_result(x, given, L: tl.constexpr):
    """y with the sign of x. Given are hi, lo/τγ^(p−1), 1/τγ^(p−1), γ, τ and the exponent of z."""
    hi, shift, scale, gamma, tau, power = given
    s = size(x)
    z = (s - hi) * scale - shift
    y = tl.where(z >= 1, unpooled(s, tau, L.p), gamma * value(s, hi, scale, shift, power, POWER, L.whole))
    return tl.where(x < 0, -y, y)


@triton.jit
def write_pooled(at, to, ok, n, given, L: tl.constexpr, T: tl.constexpr):
    """y of a row that is read again, or of a part of one, to where its entries go."""
    PIECES: tl.constexpr = T.pieces
    column = tl.arange(0, T.width)
    for start in range(0, n, T.pieces * T.width):
        held = load_rows(at + start, ok, n - start, 1, T.pieces, T.width, False)
        for i in tl.static_range(PIECES):
            valid = inside(ok, column + (start + i * T.width), n, 1, False)
            y = pooled_result(held[i], given, L).to(to.dtype.element_ty)
            tl.store(to + (start + i * T.width), y, mask=valid)


@triton.jit
def _rates(x, y, given, P: tl.constexpr, SIGNED: tl.constexpr):
    """Which entries are selected on their own; dv/ds and −dv/dτ there; r = dY/ds of pooled ones, and r w.

    Given are hi, lo, 1/τγ^(p−1), γ/τγ^(p−1), γ^(p−1) and τ, in the dtype of the arithmetic.
    """
    hi, lo, inverse, lift, heat, tau = given
    s = tl.abs(x) if SIGNED else x
    z = ((s - hi) - lo) * inverse
    own = z >= 1
    if hi.dtype == tl.float64:  # of other rows γ is not 0, and nothing is infinite
        own = ((z >= tl.where(inverse == 0, 0.0, 1.0)) & (s >= 0)) | (s == float("inf"))
    pooled = (z > 0) & ~own
    moves = own & (s < float("inf"))
    if P == 2:
        rate = tl.where(pooled, lift, 0.0)
        slope = 1 / (1 + tau)
        slope = tl.where(moves, slope, 0.0)
        fall = slope * slope * tl.where(moves, s, 0.0)
    else:
        y = tl.abs(y)
        moves = moves & (y > 0)
        log_y = tl.log2(tl.where(moves, y, 1.0))
        slope = tl.where(moves, 1 / (1 + tau * (P - 1) * tl.exp2((P - 2) * log_y)), 0.0)
        fall = slope * tl.exp2((P - 1) * log_y)
        e: tl.constexpr = 1 / (P - 1)
        rate = e * lift * tl.exp2((e - 1) * tl.log2(tl.where(pooled, z, 1.0)))
        rate = tl.where(pooled, rate, 0.0)
    return own, slope, fall, rate, rate * tl.where(pooled, z, 0.0) * heat


@triton.jit
def _entries(at, offset, valid, TYPE: tl.constexpr, P: tl.constexpr, SIGNED: tl.constexpr):
    """x; y where it is used; and the incoming gradient, in the direction of |x|."""
    x = tl.load(at[0] + offset, mask=valid, other=0.0 if SIGNED else float("-inf")).to(TYPE)
    y = x
    if P != 2:
        y = tl.load(at[1] + offset, mask=valid, other=0.0).to(TYPE)
    v = tl.load(at[2] + tl.cast(offset, tl.int64) * at[3], mask=valid, other=0.0).to(TYPE)
    return x, y, tl.where(x < 0, -v, v)


@triton.jit
def pull_given(hi, lo, tau, P: tl.constexpr, TOGETHER: tl.constexpr):
    """What :func:`_rates` needs of rows, in the dtype of hi."""
    none = tl.abs(hi) >= HUGE if hi.dtype == tl.float64 else hi != hi
    gamma = tl.where(none, 0.0, hi + lo)
    heat = temperature(gamma, tau, P)[0]
    inverse = tl.where(heat > 0, 1 / heat, 0.0)
    return (
        wide(hi, TOGETHER), wide(lo, TOGETHER), wide(inverse, TOGETHER), wide(gamma * inverse, TOGETHER),
        wide(heat / tau, TOGETHER), wide(tau, TOGETHER),
    )  # fmt: skip


@triton.jit
def pull_sums(
    at, there, n, nothing, given, P: tl.constexpr, SIGNED: tl.constexpr, TOGETHER: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """How many entries are selected on their own; Σr and Σr z γ^(p−1) of the pooled ones; Σr v; and what τ
    takes from y by itself. In float64, of which each row has nothing yet."""
    column = tl.arange(0, WIDTH)
    TYPE: tl.constexpr = given[0].dtype
    alone, mass, moment, through, falls = nothing, nothing, nothing, nothing, nothing
    for start in range(0, n, PIECES * WIDTH):
        held = ()
        for i in tl.static_range(PIECES):
            offset = start + i * WIDTH
            valid = inside(there, column + offset, n, TOGETHER, False)
            x, y, v = _entries(at, offset, valid, TYPE, P, SIGNED)
            own, _slope, fall, rate, turn = _rates(x, y, given, P, SIGNED)
            one = tl.where(valid & own, 1.0, 0.0).to(TYPE)
            held = plus(held, (one, rate, turn, rate * v, v * (fall + turn)))
        found = total(held, TOGETHER)
        alone, mass, moment = alone + found[0], mass + found[1], moment + found[2]
        through, falls = through + found[3], falls + found[4]
    return alone, mass, moment, through, falls


@triton.jit
def settle_pull(sums, k, grad_lo):
    """What γ brings to the pooled entries, and dL/dτ."""
    alone, mass, moment, through, falls = sums
    live = mass > 0
    pull = tl.where(live, (grad_lo - through) / tl.where(live, k - alone + mass, 1.0), 0.0)
    return pull, -falls - pull * moment


@triton.jit
def ordinary_pull(hi, tau):
    """Whether float32 is to be tried."""
    return (hi > 1e-12) & (hi < 1e12) & (tau > 1e-15) & (tau < 1e15)


@triton.jit
def in_range(pull, dtau):
    """Whether float32 has them."""
    return (tl.abs(dtau) < 1e30) & (tl.abs(pull) < 1e30)


@triton.jit
def write_pull(
    at, dx_at, there, n, hi, pull, given, P: tl.constexpr, SIGNED: tl.constexpr, TOGETHER: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    share = wide(pull.to(hi.dtype), TOGETHER)
    for start in range(0, n, PIECES * WIDTH):
        for i in tl.static_range(PIECES):
            offset = start + i * WIDTH
            valid = inside(there, column + offset, n, TOGETHER, False)
            x, y, v = _entries(at, offset, valid, hi.dtype, P, SIGNED)
            _own, slope, _fall, rate, _turn = _rates(x, y, given, P, SIGNED)
            dx = slope * v + rate * (v + share)
            dx = tl.where(x < 0, -dx, dx)
            if hi.dtype == tl.float64:
                dx = tl.where(hi == hi, dx, hi)
            store(dx_at + offset, dx, valid)
