"""Top-k in magnitude of rows in float32, and its gradients in either precision: what the kernels of rows that
a program holds, of those that stream past one, and of those that many share have in common."""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.arguments import Law
from khot._kernels.triton.fast import LOG2E, inverse_of, log2, reciprocal, wide
from khot._kernels.triton.float64_sums import BY_COUNT
from khot._kernels.triton.functions import POWER
from khot._kernels.triton.pooled import pooled_moments, size, temperature, unpooled
from khot._kernels.triton.rows import inside, load_rows
from khot._kernels.triton.terms import holds, value
from khot._kernels.triton.threshold import guess, iterate, over


@triton.jit
def find_gamma(
    x, at, there, n_columns, k, tau, power, evaluations, P: tl.constexpr, SIGNED: tl.constexpr,
    WHOLE: tl.constexpr, T: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """γ of rows, and which of them have one. AGAIN is as in :func:`.threshold.iterate`."""
    n, first, second = over(x, at, n_columns, pooled_moments, 0, 3, T)
    n, first, second = n.to(tl.float32), first.to(tl.float32), second.to(tl.float32)
    complement = n - k
    ok = there & (k > 0) & (complement > 0) & holds(n, complement, power, POWER)
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
    high = 1.01 * (mean + tl.sqrt(variance * complement * reciprocal(k)))
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
