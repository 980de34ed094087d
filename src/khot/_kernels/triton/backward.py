"""Backward: sums over the row, then the gradient of each entry."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import soft_topk as reference
from khot._kernels.triton import layout
from khot._kernels.triton.functions import (
    CDFS,
    HUGE,
    LAPLACE,
    LOG,
    LOGISTIC,
    NORMAL,
    OUTPUTS,
    THRESHOLD,
    UNIFORM,
    VALUE,
    chunks,
    gather,
    load,
    log_erfcx,
    median,
    place,
    put,
    side,
    standardize,
)


@triton.jit
def _slope_of_log(z, density, tail, power: tl.constexpr, CDF: tl.constexpr):
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
        inside = (z > 0) & (z < 1)
        ratio = tl.where(inside, power / tl.where(inside, z, 1.0), 0.0)
    return ratio.to(z.dtype)


@triton.jit
def _cotangents(x, v, valid, hi, lo, tau, near, power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr):
    """z; f relative to near; u = v·∂out/∂z; and v·∂out/∂F·f, relative to near where out is y."""
    z, rest = standardize(x, hi, lo, tau, CDF)
    z = tl.where(valid, z, 0.0)
    above = z > median(power, CDF)
    near = near.to(z.dtype)[:, None]
    _, density = side(z, rest, above, near, power, CDF)
    density = tl.where(valid, density, 0.0)
    if OUTPUT == VALUE:
        _, own = side(z, rest, above, 0.0, power, CDF)
        share = v * density
        u = tl.where(valid, v * own, 0.0)
    elif OUTPUT == LOG:
        tail, own = side(z, rest, above, 0.0, power, CDF)
        ratio = tl.where(valid, _slope_of_log(z, own, tail, power, CDF), 0.0)
        u = tl.where(ratio == 0, 0.0, v * ratio)
        share = u
    else:
        u = density * 0
        share = u
    return z, density, u, share


@triton.jit
def _gradient_sums(x, v, valid, hi, lo, tau, power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr):
    """near, the least abs(z), and sums relative to it; and for compact support what lies next to a gap."""
    valid = valid & (tl.abs(x) < float("inf")) & (tl.abs(hi) != HUGE)[:, None]
    z, _ = standardize(x, hi, lo, tau, CDF)
    if CDF < UNIFORM:
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
def _log_scale(near, CDF: tl.constexpr):
    """log of what densities relative to near are divided by: they are e^this times f."""
    return 0.5 * near * near if CDF == NORMAL else near


@triton.jit
def _gradient_row(
    near, mass, mass_z, u_sum, u_z, share_sum, up_count, up_sum, down_count, down_sum, grad_lo, hi, tau,
    CDF: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """dL/dk, dL/dτ, and what dL/dx has per unit of relative density."""
    live = mass > 0
    safe = tl.where(live, mass, 1.0)
    z_mean = tl.where(live, mass_z / safe, 0.0)
    log_mass = tl.log(safe) - _log_scale(near, CDF)
    through_t = tl.exp(tl.log(tau) - log_mass)
    share = share_sum / safe
    if OUTPUT == LOG:
        share = tl.where(share_sum == 0, 0.0, share * tl.exp(_log_scale(near, CDF)))
    dk = tl.where(live, share, 0.0) - tl.where(live & (grad_lo != 0), grad_lo * through_t, 0.0)
    if CDF >= UNIFORM and OUTPUT != THRESHOLD:
        gap = 0.5 * up_sum / tl.maximum(up_count, 1.0)
        if OUTPUT == VALUE:
            gap += 0.5 * down_sum / tl.maximum(down_count, 1.0)
        dk = tl.where(live | (tl.abs(hi) == HUGE), dk, gap)
    pull = tl.where(live, (grad_lo - u_sum / tau) / safe, 0.0)
    dtau = (u_sum * z_mean - u_z) / tau - grad_lo * z_mean
    bad = hi != hi
    return tl.where(bad, hi, dk), tl.where(bad, hi, dtau), tl.where(bad, hi, pull)


@triton.jit
def _gradient_write(
    pointer, offset, x, v, valid, hi, lo, tau, near, pull,
    power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    live = valid & (tl.abs(x) < float("inf")) & (tl.abs(hi) != HUGE)[:, None]
    _, density, u, _ = _cotangents(x, v, live, hi, lo, tau, near, power, CDF, OUTPUT)
    dx = u / tau.to(u.dtype)[:, None] + density * pull.to(u.dtype)[:, None]
    dx = tl.where((hi != hi)[:, None], float("nan"), dx)
    tl.store(pointer + offset, dx.to(pointer.dtype.element_ty), mask=valid)


@triton.jit
def _resident_backward(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, x_pointer, x_stride,
    hi_pointer, lo_pointer, tau_pointer, tau_stride, dx_pointer, dk_pointer, dtau_pointer, rows, n,
    power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    there = row < rows
    valid = there[:, None] & (column < n)[None, :]
    x = load(x_pointer, row, x_stride, column, valid, COMPUTE)
    v = x * 0
    if OUTPUT != THRESHOLD:
        offset = row[:, None] * grad_row + column[None, :] * grad_column
        v = tl.load(grad_pointer + offset, mask=valid, other=0.0).to(COMPUTE)
    grad_lo = tl.load(grad_lo_pointer + row * grad_lo_stride, mask=there, other=0.0).to(tl.float64)
    hi, lo = (
        tl.load(hi_pointer + row, mask=there, other=0.0),
        tl.load(lo_pointer + row, mask=there, other=0.0),
    )
    tau = tl.load(tau_pointer + row * tau_stride, mask=there, other=1.0).to(tl.float64)
    near, mass, mass_z, u_sum, u_z, share, _, up_count, up_sum, _, down_count, down_sum = _gradient_sums(
        x, v, valid, hi, lo, tau, power, CDF, OUTPUT
    )
    dk, dtau, pull = _gradient_row(
        near, mass, mass_z, u_sum, u_z, share, up_count, up_sum, down_count, down_sum, grad_lo, hi, tau,
        CDF, OUTPUT,
    )  # fmt: skip
    tl.store(dk_pointer + row, dk, mask=there)
    tl.store(dtau_pointer + row, dtau, mask=there)
    offset = row[:, None] * n + column[None, :]
    _gradient_write(dx_pointer, offset, x, v, valid, hi, lo, tau, near, pull, power, CDF, OUTPUT)


@triton.jit
def _load_cotangent(given, x, valid, row, column, OUTPUT: tl.constexpr):
    v = x * 0
    if OUTPUT != THRESHOLD:
        pointer, row_stride, column_stride = given
        at = pointer + row * row_stride + column[None, :] * column_stride
        v = tl.load(at, mask=valid, other=0.0).to(x.dtype)
    return v


@triton.jit
def _add_gradient_sums(sums, given, x, valid, row, column):
    near, mass, mass_z, u_sum, u_z, share, up, up_count, up_sum, down, down_count, down_sum = sums
    incoming, hi, lo, tau = given[:4]
    power: tl.constexpr = given[4]
    CDF: tl.constexpr = given[5]
    OUTPUT: tl.constexpr = given[6]
    v = _load_cotangent(incoming, x, valid, row, column, OUTPUT)
    near_c, mass_c, mass_z_c, u_c, u_z_c, share_c, up_c, up_n, up_s, down_c, down_n, down_s = _gradient_sums(
        x, v, valid, hi, lo, tau, power, CDF, OUTPUT
    )
    nearest = tl.minimum(near, near_c)
    old, new = _rescale(near, nearest, CDF), _rescale(near_c, nearest, CDF)
    mass, mass_z = mass * old + mass_c * new, mass_z * old + mass_z_c * new
    share = share * old + share_c * new if OUTPUT == VALUE else share + share_c
    least, greatest = tl.minimum(up, up_c), tl.maximum(down, down_c)
    up_count, up_sum = _ties(up, up_count, up_c, up_n, least), _ties(up, up_sum, up_c, up_s, least)
    down_count = _ties(down, down_count, down_c, down_n, greatest)
    down_sum = _ties(down, down_sum, down_c, down_s, greatest)
    u_sum, u_z = u_sum + u_c, u_z + u_z_c
    return nearest, mass, mass_z, u_sum, u_z, share, least, up_count, up_sum, greatest, down_count, down_sum


@triton.jit
def _part_gradient_sums(
    grad_pointer, grad_row, grad_column, x_pointer, x_stride, hi_pointer, lo_pointer, tau_pointer, tau_stride,
    sums_pointer, n, length, parts,
    power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    one = row + tl.arange(0, 1)
    hi, lo = tl.load(hi_pointer + one), tl.load(lo_pointer + one)
    tau = tl.load(tau_pointer + one * tau_stride).to(tl.float64)
    zero = tl.zeros((1,), tl.float64)
    near = zero + (1e15 if CDF < UNIFORM else 0.0)
    up, down = zero + float("inf"), zero - float("inf")
    sums = (near, zero, zero, zero, zero, zero, up, zero, zero, down, zero, zero)
    sums = chunks(
        _add_gradient_sums, sums, ((grad_pointer, grad_row, grad_column), hi, lo, tau, power, CDF, OUTPUT),
        x_pointer, x_stride, row, part, n, length, COMPUTE, CHUNK,
    )  # fmt: skip
    put(sums_pointer + (row * parts + part) * 12 + tl.arange(0, 1), sums)


@triton.jit
def _rescale(near, nearest, CDF: tl.constexpr):
    """What turns sums relative to near into sums relative to nearest ≤ near."""
    exponent = 0.5 * (nearest - near) * (nearest + near) if CDF == NORMAL else nearest - near
    return tl.exp(exponent)


@triton.jit
def _ties(a, a_sum, b, b_sum, chosen):
    """The sum over those of two groups that lie at the chosen end."""
    return tl.where(a == chosen, a_sum, 0.0) + tl.where(b == chosen, b_sum, 0.0)


@triton.jit
def _part_gradient_write(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, x_pointer, x_stride,
    hi_pointer, lo_pointer, tau_pointer, tau_stride, sums_pointer, dx_pointer, dk_pointer, dtau_pointer,
    n, length, parts,
    power: tl.constexpr, CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    one = row + tl.arange(0, 1)
    hi, lo = tl.load(hi_pointer + one), tl.load(lo_pointer + one)
    tau = tl.load(tau_pointer + one * tau_stride).to(tl.float64)
    grad_lo = tl.load(grad_lo_pointer + one * grad_lo_stride).to(tl.float64)
    sums = sums_pointer + row * parts * 12
    nears = gather(sums, parts, 0, PARTS, 12, 1e15)
    near = tl.min(nears, axis=1)
    scale = _rescale(nears, near[:, None], CDF)
    mass = tl.sum(gather(sums, parts, 1, PARTS, 12, 0.0) * scale, axis=1)
    mass_z = tl.sum(gather(sums, parts, 2, PARTS, 12, 0.0) * scale, axis=1)
    u_sum = tl.sum(gather(sums, parts, 3, PARTS, 12, 0.0), axis=1)
    u_z = tl.sum(gather(sums, parts, 4, PARTS, 12, 0.0), axis=1)
    shares = gather(sums, parts, 5, PARTS, 12, 0.0)
    share = tl.sum(shares * scale if OUTPUT == VALUE else shares, axis=1)
    ups, downs = (
        gather(sums, parts, 6, PARTS, 12, float("inf")),
        gather(sums, parts, 9, PARTS, 12, float("-inf")),
    )
    at_up, at_down = ups == tl.min(ups, axis=1)[:, None], downs == tl.max(downs, axis=1)[:, None]
    up_count = tl.sum(tl.where(at_up, gather(sums, parts, 7, PARTS, 12, 0.0), 0.0), axis=1)
    up_sum = tl.sum(tl.where(at_up, gather(sums, parts, 8, PARTS, 12, 0.0), 0.0), axis=1)
    down_count = tl.sum(tl.where(at_down, gather(sums, parts, 10, PARTS, 12, 0.0), 0.0), axis=1)
    down_sum = tl.sum(tl.where(at_down, gather(sums, parts, 11, PARTS, 12, 0.0), 0.0), axis=1)
    dk, dtau, pull = _gradient_row(
        near, mass, mass_z, u_sum, u_z, share, up_count, up_sum, down_count, down_sum, grad_lo, hi, tau,
        CDF, OUTPUT,
    )  # fmt: skip
    if part == 0:
        tl.store(dk_pointer + one, dk)
        tl.store(dtau_pointer + one, dtau)
    chunks(
        _write_gradient, (),
        ((grad_pointer, grad_row, grad_column), dx_pointer, n, hi, lo, tau, near, pull, power, CDF, OUTPUT),
        x_pointer, x_stride, row, part, n, length, COMPUTE, CHUNK,
    )  # fmt: skip


@triton.jit
def _write_gradient(sums, given, x, valid, row, column):
    incoming, pointer, n, hi, lo, tau, near, pull = given[:8]
    power: tl.constexpr = given[8]
    CDF: tl.constexpr = given[9]
    OUTPUT: tl.constexpr = given[10]
    v = _load_cotangent(incoming, x, valid, row, column, OUTPUT)
    offset = row * n + column[None, :]
    _gradient_write(pointer, offset, x, v, valid, hi, lo, tau, near, pull, power, CDF, OUTPUT)
    return sums


KERNELS = (_resident_backward, _part_gradient_sums, _part_gradient_write)


def soft_topk_backward(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    output: str,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_topk.soft_topk_backward`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if n == 0:
        return reference.soft_topk_backward(grad, grad_lo, x, hi, lo, tau, cdf, shape, output)
    F = cdfs.resolve(cdf, shape)
    dx, dk, dtau = x.new_empty(x.shape), hi.new_empty(batch), hi.new_empty(batch)
    rows = dk.numel()
    if rows == 0:
        return dx, dk, dtau
    hi, lo = hi.contiguous(), lo.contiguous()
    incoming = grad.expand(x.shape).reshape(-1, n) if output != "threshold" else grad_lo.reshape(-1, 1)
    cotangent = (incoming, *incoming.stride())
    cotangent_lo, source, tau_row = (
        layout.numbers(grad_lo, batch),
        layout.rows(x, n),
        layout.numbers(tau, batch),
    )
    which = {
        "power": layout.power(F),
        "CDF": CDFS[F.name],
        "OUTPUT": OUTPUTS[output],
        "COMPUTE": layout.compute(x.dtype),
    }
    with torch.cuda.device_of(x):
        if n <= layout.RESIDENT:
            width, together, warps = layout.block(n)
            _resident_backward[(triton.cdiv(rows, together),)](
                *cotangent, *cotangent_lo, *source, hi, lo, *tau_row, dx, dk, dtau, rows, n,
                **which, TOGETHER=together, WIDTH=width, num_warps=warps,
            )  # fmt: skip
            return dx, dk, dtau
        parts, length = layout.parts(rows, n)
        sums = hi.new_empty(rows, parts, 12)
        _part_gradient_sums[(rows * parts,)](
            *cotangent, *source, hi, lo, *tau_row, sums, n, length, parts, **which, CHUNK=layout.CHUNK
        )
        _part_gradient_write[(rows * parts,)](
            *cotangent, *cotangent_lo, *source, hi, lo, *tau_row, sums, dx, dk, dtau, n, length, parts,
            **which, CHUNK=layout.CHUNK, PARTS=triton.next_power_of_2(parts),
        )  # fmt: skip
    return dx, dk, dtau
