"""What the backward pass is made of, in Triton: sums over entries, numbers of a row, and gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.functions import (
    HUGE,
    LOG,
    THRESHOLD,
    VALUE,
    full_support,
    gaussian_tail,
    log_scale,
    log_scales,
    median,
    side,
    slope_of_log,
    standardize,
)

__all__ = [
    "add_gradient_sums",
    "gradient_row",
    "gradient_sums",
    "gradient_write",
    "rescale",
    "write_gradient",
]


@triton.jit
def _cotangents(x, v, valid, hi, lo, tau, near, power, CDF: tl.constexpr, OUTPUT: tl.constexpr):
    """z; f relative to near; u = v·∂out/∂z; and v·∂out/∂F·f, relative to near where out is y."""
    z, rest = standardize(x, hi, lo, tau, CDF)
    z = tl.where(valid, z, 0.0)
    above = z > median(power, CDF)
    near = near.to(z.dtype)[:, None]
    a = tl.minimum(tl.abs(z), 1e15) if gaussian_tail(CDF) else tl.abs(z)
    _, density = side(z, rest, above, near, near - a, power, CDF)
    density = tl.where(valid, density, 0.0)
    if OUTPUT == VALUE:
        _, own = side(z, rest, above, 0.0, -tl.abs(z), power, CDF)
        share = v * density
        u = tl.where(valid, v * own, 0.0)
    elif OUTPUT == LOG:
        tail, own = side(z, rest, above, 0.0, -tl.abs(z), power, CDF)
        ratio = tl.where(valid, slope_of_log(z, own, tail, power, CDF), 0.0)
        u = tl.where(ratio == 0, 0.0, v * ratio)
        share = u
    else:
        u = density * 0
        share = u
    return z, density, u, share


@triton.jit
def gradient_sums(x, v, valid, hi, lo, tau, power, CDF: tl.constexpr, OUTPUT: tl.constexpr):
    """near, the least abs(z), and sums relative to it; and for compact support what lies next to a gap."""
    valid = valid & (tl.abs(x) < float("inf")) & (tl.abs(hi) != HUGE)[:, None]
    z, _ = standardize(x, hi, lo, tau, CDF)
    if full_support(CDF):
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
    above = valid & (z > median(power, CDF))
    below = valid & (z <= median(power, CDF))
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
def _part(count, other):
    """khot._kernels.reference.soft_topk.gap_parts, of one side."""
    return tl.where(count > 0, tl.where(other > 0, 0.5, 1.0), 0.0)


@triton.jit
def gradient_row(
    near, mass, mass_z, u_sum, u_z, share_sum, up, up_count, up_sum, down, down_count, down_sum, grad_lo, hi,
    tau, CDF: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """dL/dk, dL/dτ, and what dL/dx has per unit of relative density. For compact support also the edges of
    the gap that t lies in, NaN if it lies in none, and dL/dx there."""
    live = mass > 0
    safe = tl.where(live, mass, 1.0)
    z_mean = tl.where(live, mass_z / safe, 0.0)
    log_mass = tl.log(safe) - log_scale(near, CDF)
    through_t = tl.exp(tl.log(tau) - log_mass)
    share = share_sum / safe
    if OUTPUT == LOG:
        share = tl.where(share_sum == 0, 0.0, share * tl.exp(log_scale(near, CDF)))
    dk = tl.where(live, share, 0.0) - tl.where(live & (grad_lo != 0), grad_lo * through_t, 0.0)
    if not full_support(CDF) and OUTPUT != THRESHOLD:
        gap = _part(up_count, down_count) * up_sum / tl.maximum(up_count, 1.0)
        if OUTPUT == VALUE:
            gap += _part(down_count, up_count) * down_sum / tl.maximum(down_count, 1.0)
        dk = tl.where(live | (tl.abs(hi) == HUGE), dk, gap)
    pull = tl.where(live, (grad_lo - u_sum / tau) / safe, 0.0)
    dtau = (u_sum * z_mean - u_z) / tau - grad_lo * z_mean
    gap = (up, down, up, down)
    if not full_support(CDF):  # t = ½(up + down) − ½τ
        flat = (mass == 0) & (tl.abs(hi) != HUGE)
        at_up, at_down = _part(up_count, down_count) * grad_lo, _part(down_count, up_count) * grad_lo
        dtau = tl.where(flat, -at_up, dtau)
        at_up, at_down = at_up / tl.maximum(up_count, 1.0), at_down / tl.maximum(down_count, 1.0)
        gap = (tl.where(flat, up, float("nan")), tl.where(flat, down, float("nan")), at_up, at_down)
    bad = hi != hi
    return tl.where(bad, hi, dk), tl.where(bad, hi, dtau), tl.where(bad, hi, pull), gap


@triton.jit
def gradient_write(
    pointer, offset, x, v, valid, hi, lo, tau, near, pull, gap,
    power, CDF: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    live = valid & (tl.abs(x) < float("inf")) & (tl.abs(hi) != HUGE)[:, None]
    _, density, u, _ = _cotangents(x, v, live, hi, lo, tau, near, power, CDF, OUTPUT)
    dx = u / tau.to(u.dtype)[:, None] + density * pull.to(u.dtype)[:, None]
    if not full_support(CDF):
        up, down, at_up, at_down = gap
        dx = tl.where(live & (x == up.to(x.dtype)[:, None]), at_up.to(dx.dtype)[:, None], dx)
        dx = tl.where(live & (x == down.to(x.dtype)[:, None]), at_down.to(dx.dtype)[:, None], dx)
    dx = tl.where((hi != hi)[:, None], float("nan"), dx)
    tl.store(pointer + offset, dx.to(pointer.dtype.element_ty), mask=valid)


@triton.jit
def _load_cotangent(given, x, valid, row, column, OUTPUT: tl.constexpr):
    v = x * 0
    if OUTPUT != THRESHOLD:
        pointer, row_stride, column_stride = given
        at = pointer + row * row_stride + column[None, :].to(tl.int64) * column_stride
        v = tl.load(at, mask=valid, other=0.0).to(x.dtype)
    return v


@triton.jit
def add_gradient_sums(sums, given, x, valid, row, column):
    near, mass, mass_z, u_sum, u_z, share, up, up_count, up_sum, down, down_count, down_sum = sums
    incoming, hi, lo, tau = given[:4]
    power = given[4]
    CDF: tl.constexpr = given[5]
    OUTPUT: tl.constexpr = given[6]
    v = _load_cotangent(incoming, x, valid, row, column, OUTPUT)
    near_c, mass_c, mass_z_c, u_c, u_z_c, share_c, up_c, up_n, up_s, down_c, down_n, down_s = gradient_sums(
        x, v, valid, hi, lo, tau, power, CDF, OUTPUT
    )
    nearest = tl.minimum(near, near_c)
    old, new = rescale(near, nearest, CDF), rescale(near_c, nearest, CDF)
    mass, mass_z = mass * old + mass_c * new, mass_z * old + mass_z_c * new
    share = share * old + share_c * new if OUTPUT == VALUE else share + share_c
    least, greatest = tl.minimum(up, up_c), tl.maximum(down, down_c)
    up_count, up_sum = _ties(up, up_count, up_c, up_n, least), _ties(up, up_sum, up_c, up_s, least)
    down_count = _ties(down, down_count, down_c, down_n, greatest)
    down_sum = _ties(down, down_sum, down_c, down_s, greatest)
    u_sum, u_z = u_sum + u_c, u_z + u_z_c
    return nearest, mass, mass_z, u_sum, u_z, share, least, up_count, up_sum, greatest, down_count, down_sum


@triton.jit
def rescale(near, nearest, CDF: tl.constexpr):
    """What turns sums relative to near into sums relative to nearest ≤ near."""
    return tl.exp(log_scales(nearest, near, CDF))


@triton.jit
def _ties(a, a_sum, b, b_sum, chosen):
    """The sum over those of two groups that lie at the chosen end."""
    return tl.where(a == chosen, a_sum, 0.0) + tl.where(b == chosen, b_sum, 0.0)


@triton.jit
def write_gradient(sums, given, x, valid, row, column):
    incoming, pointer, n, hi, lo, tau, near, pull, gap = given[:9]
    power = given[9]
    CDF: tl.constexpr = given[10]
    OUTPUT: tl.constexpr = given[11]
    v = _load_cotangent(incoming, x, valid, row, column, OUTPUT)
    offset = row * n + column[None, :]
    gradient_write(pointer, offset, x, v, valid, hi, lo, tau, near, pull, gap, power, CDF, OUTPUT)
    return sums
