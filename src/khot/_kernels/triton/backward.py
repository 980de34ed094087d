"""Backward: sums over the row, then the gradient of each entry."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import soft_topk as reference
from khot._kernels.triton import layout, resident, resident_backward, split_backward
from khot._kernels.triton.fast import joined
from khot._kernels.triton.functions import (
    OUTPUTS,
    THRESHOLD,
    VALUE,
    chunks,
    full_support,
    gather,
    load,
    place,
    put,
)
from khot._kernels.triton.gradients import (
    add_gradient_sums,
    gradient_row,
    gradient_sums,
    gradient_write,
    rescale,
    write_gradient,
)
from khot._kernels.triton.launch import launch


@triton.jit(do_not_specialize=["rows"])
def _resident_backward(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, x_pointer, x_stride,
    hi_pointer, lo_pointer, tau_pointer, tau_stride, dx_pointer, dk_pointer, dtau_pointer, rows, n,
    power_high, power_low, CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    power = joined(power_high, power_low)
    there = row < rows
    valid = there[:, None] & (column < n)[None, :]
    x = load(x_pointer, row, x_stride, column, valid, COMPUTE)
    v = x * 0
    if OUTPUT != THRESHOLD:
        offset = row[:, None] * grad_row + column[None, :].to(tl.int64) * grad_column
        v = tl.load(grad_pointer + offset, mask=valid, other=0.0).to(COMPUTE)
    grad_lo = tl.load(grad_lo_pointer + row * grad_lo_stride, mask=there, other=0.0).to(tl.float64)
    hi, lo = (
        tl.load(hi_pointer + row, mask=there, other=0.0),
        tl.load(lo_pointer + row, mask=there, other=0.0),
    )
    tau = tl.load(tau_pointer + row * tau_stride, mask=there, other=1.0).to(tl.float64)
    near, mass, mass_z, u_sum, u_z, share, up, up_count, up_sum, down, down_count, down_sum = gradient_sums(
        x, v, valid, hi, lo, tau, power, CDF, OUTPUT
    )
    dk, dtau, pull, gap = gradient_row(
        near, mass, mass_z, u_sum, u_z, share, up, up_count, up_sum, down, down_count, down_sum, grad_lo, hi,
        tau, CDF, OUTPUT,
    )  # fmt: skip
    tl.store(dk_pointer + row, dk, mask=there)
    tl.store(dtau_pointer + row, dtau, mask=there)
    offset = row[:, None] * n + column[None, :]
    gradient_write(dx_pointer, offset, x, v, valid, hi, lo, tau, near, pull, gap, power, CDF, OUTPUT)


@triton.jit(do_not_specialize=["parts"])
def _part_gradient_sums(
    grad_pointer, grad_row, grad_column, x_pointer, x_stride, hi_pointer, lo_pointer, tau_pointer, tau_stride,
    sums_pointer, n, length, parts, power_high, power_low,
    CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    power = joined(power_high, power_low)
    one = row + tl.arange(0, 1)
    hi, lo = tl.load(hi_pointer + one), tl.load(lo_pointer + one)
    tau = tl.load(tau_pointer + one * tau_stride).to(tl.float64)
    zero = tl.zeros((1,), tl.float64)
    near = zero + (1e15 if full_support(CDF) else 0.0)
    up, down = zero + float("inf"), zero - float("inf")
    sums = (near, zero, zero, zero, zero, zero, up, zero, zero, down, zero, zero)
    sums = chunks(
        add_gradient_sums, sums, ((grad_pointer, grad_row, grad_column), hi, lo, tau, power, CDF, OUTPUT),
        x_pointer, x_stride, row, part, n, length, COMPUTE, CHUNK,
    )  # fmt: skip
    put(sums_pointer + (row * parts + part) * 12 + tl.arange(0, 1), sums)


@triton.jit(do_not_specialize=["parts"])
def _part_gradient_write(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, x_pointer, x_stride,
    hi_pointer, lo_pointer, tau_pointer, tau_stride, sums_pointer, dx_pointer, dk_pointer, dtau_pointer,
    n, length, parts,
    power_high, power_low, CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    power = joined(power_high, power_low)
    one = row + tl.arange(0, 1)
    hi, lo = tl.load(hi_pointer + one), tl.load(lo_pointer + one)
    tau = tl.load(tau_pointer + one * tau_stride).to(tl.float64)
    grad_lo = tl.load(grad_lo_pointer + one * grad_lo_stride).to(tl.float64)
    sums = sums_pointer + row * parts * 12
    nears = gather(sums, parts, 0, PARTS, 12, 1e15)
    near = tl.min(nears, axis=1)
    scale = rescale(nears, near[:, None], CDF)
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
    up, down = tl.min(ups, axis=1), tl.max(downs, axis=1)
    at_up, at_down = ups == up[:, None], downs == down[:, None]
    up_count = tl.sum(tl.where(at_up, gather(sums, parts, 7, PARTS, 12, 0.0), 0.0), axis=1)
    up_sum = tl.sum(tl.where(at_up, gather(sums, parts, 8, PARTS, 12, 0.0), 0.0), axis=1)
    down_count = tl.sum(tl.where(at_down, gather(sums, parts, 10, PARTS, 12, 0.0), 0.0), axis=1)
    down_sum = tl.sum(tl.where(at_down, gather(sums, parts, 11, PARTS, 12, 0.0), 0.0), axis=1)
    dk, dtau, pull, gap = gradient_row(
        near, mass, mass_z, u_sum, u_z, share, up, up_count, up_sum, down, down_count, down_sum, grad_lo, hi,
        tau, CDF, OUTPUT,
    )  # fmt: skip
    if part == 0:
        tl.store(dk_pointer + one, dk)
        tl.store(dtau_pointer + one, dtau)
    chunks(
        write_gradient, (),
        ((grad_pointer, grad_row, grad_column), dx_pointer, n, hi, lo, tau, near, pull, gap, power, CDF,
         OUTPUT),
        x_pointer, x_stride, row, part, n, length, COMPUTE, CHUNK,
    )  # fmt: skip


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
    if output == "threshold":
        incoming = grad_lo.expand(batch).reshape(-1, 1)
    else:
        incoming = grad.expand(x.shape).reshape(-1, n)
    cotangent = (incoming, incoming.stride(0), incoming.stride(1))
    source = layout.rows(x, n)
    # a 0 on the CPU says that nobody asked for the derivative of lo: looking at it waits for nothing
    unasked = grad_lo.is_cpu and grad_lo.dim() == 0 and grad_lo.item() == 0
    if unasked and resident.serves(x.dtype, F, tau, output):
        kernels = split_backward if layout.splits(rows, n) else resident_backward
        kernels.soft_topk_backward(
            cotangent, source, (hi, lo), layout.values(tau, batch, x.device), (dx, dk, dtau),
            rows, n, F, output,
        )  # fmt: skip
        return dx, dk, dtau
    cotangent_lo = layout.numbers(grad_lo, batch, x.device)
    tau_row = layout.numbers(tau, batch, x.device)
    power = layout.power(F)
    which = {
        "CDF": layout.cdf_id(F.name),
        "OUTPUT": OUTPUTS[output],
        "COMPUTE": layout.compute(x.dtype, tau),
    }
    if n <= layout.RESIDENT:
        width, together, warps = layout.block(n)
        launch(
            _resident_backward, triton.cdiv(rows, together),
            *cotangent, *cotangent_lo, *source, hi, lo, *tau_row, dx, dk, dtau, rows, n, *power,
            **which, TOGETHER=together, WIDTH=width, num_warps=warps,
        )  # fmt: skip
        return dx, dk, dtau
    parts, length = layout.parts(rows, n)
    sums = hi.new_empty(rows, parts, 12)
    launch(
        _part_gradient_sums,
        rows * parts,
        *cotangent,
        *source,
        hi,
        lo,
        *tau_row,
        sums,
        n,
        length,
        parts,
        *power,
        **which,
        CHUNK=layout.CHUNK,
    )
    launch(
        _part_gradient_write, rows * parts,
        *cotangent, *cotangent_lo, *source, hi, lo, *tau_row, sums, dx, dk, dtau, n, length, parts,
        *power, **which, CHUNK=layout.CHUNK, PARTS=triton.next_power_of_2(parts),
    )  # fmt: skip
    return dx, dk, dtau
