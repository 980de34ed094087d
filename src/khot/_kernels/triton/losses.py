"""The Fenchel-Young loss of a row, and its gradients: one pass over the scores and the target, in float64.

The formulas are the reference's (`_kernels.reference.fenchel_young`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import fenchel_young as reference
from khot._kernels.triton import layout
from khot._kernels.triton.counts import distribution
from khot._kernels.triton.fast import double, joined, store
from khot._kernels.triton.functions import (
    HUGE,
    LAPLACE,
    LOGISTIC,
    NORMAL,
    POWER,
    UNIFORM,
    log1p,
    normal_icdf,
    place,
    side,
)
from khot._kernels.triton.launch import launch

CHUNK, WARPS = 512, 8  # entries that a program holds at a time: two of a thread, as float64 fills registers
CLOSE = tl.constexpr(reference.CLOSE)
SIZES = ["length", "parts"]  # for which Triton need not compile anew


@triton.jit
def _conjugate(z, F, power, CDF: tl.constexpr):
    """ω*(z), whose derivative is F."""
    if CDF == LOGISTIC:
        value = tl.maximum(z, 0.0) + log1p(tl.exp(-tl.abs(z)))
    elif CDF == LAPLACE:
        value = tl.maximum(z, 0.0) + 0.5 * tl.exp(-tl.abs(z))
    elif CDF == NORMAL:
        near = tl.maximum(z, -40.0)  # below, the value is 0
        value = tl.where(z > -40, near * F + 0.3989422804014327 * tl.exp(-0.5 * near * near), 0.0)
    else:
        tl.static_assert((CDF == UNIFORM) | (CDF == POWER), f"no conjugate for the CDF with the id {CDF}")
        q = power + 1
        inside = (z > 0) & (z < 1)
        value = tl.exp(q * tl.log(tl.where(inside, z, 1.0))) / q
        value = tl.where(inside, value, tl.where(z > 0, z - power / q, 0.0))
    return tl.where(z == z, value, z)


@triton.jit
def _potential(y, power, CDF: tl.constexpr):
    """ω(y)."""
    if CDF == LOGISTIC:
        value = _times_log(y, y) + tl.where(y < 1, (1 - y) * log1p(-tl.where(y < 1, y, 0.0)), 0.0)
    elif CDF == LAPLACE:
        w = tl.minimum(y, 1 - y)
        value = _times_log(w, 2 * w) - w
    elif CDF == NORMAL:
        w = tl.minimum(y, 1 - y)
        z = -tl.abs(normal_icdf(tl.where(w > 0, w, 0.5)))
        for _ in tl.static_range(2):  # of Halley's steps, from an error of 5e-4
            tail, density = side(z, z, False, 0.0, -tl.abs(z), power, CDF)
            step = (tail - w) / density
            z = tl.where(w > 0, z - step / (1 + 0.5 * z * step), z)
        value = tl.where(w > 0, -0.3989422804014327 * tl.exp(-0.5 * z * z), 0.0)
    else:
        tl.static_assert((CDF == UNIFORM) | (CDF == POWER), f"no potential for the CDF with the id {CDF}")
        p = 1 + 1 / power
        value = tl.where(y > 0, tl.exp(p * tl.log(tl.where(y > 0, y, 1.0))), 0.0) / p
    return tl.where(y == y, value, y)


@triton.jit
def _times_log(x, y):
    return tl.where(x > 0, x * tl.log(tl.where(x > 0, y, 1.0)), 0.0)


@triton.jit
def _row(share_pointer, hi_pointer, lo_pointer, tau_pointer, tau_stride, row):
    """share, t as hi + lo, τ, and whether t is infinite."""
    hi, lo = tl.load(hi_pointer + row), tl.load(lo_pointer + row)
    settled = tl.where(tl.abs(hi) == HUGE, 1, 0)
    tau = double(tl.load(tau_pointer + row * tau_stride))
    return tl.load(share_pointer + row).to(tl.float64), hi, lo, tau, settled


@triton.jit
def _entries(x_pointer, target_pointer, column, n, share, hi, lo, tau, settled):
    """z and T, whether an entry is decided, and whether it is selected then."""
    x = double(tl.load(x_pointer + column, mask=column < n, other=0.0))
    T = double(tl.load(target_pointer + column, mask=column < n, other=0.0)) * share
    infinite = tl.abs(x) == float("inf")
    decided = tl.where(infinite, 1, settled) > 0
    z = tl.where(decided, 0.0, ((x - hi) - lo) / tau)
    return z, T, decided, tl.where(infinite, x, -hi) > 0


@triton.jit(do_not_specialize=SIZES)
def _losses(
    x_pointer, x_stride, target_pointer, target_stride, share_pointer, hi_pointer, lo_pointer, tau_pointer,
    tau_stride, sums_pointer, n, length, parts,
    power_high, power_low, CDF: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    power = joined(power_high, power_low)
    row, part = place(parts)
    share, hi, lo, tau, settled = _row(
        share_pointer, hi_pointer, lo_pointer, tau_pointer, tau_stride, row
    )  # fmt: skip
    x_pointer += row * x_stride
    target_pointer += row * target_stride
    total = tl.zeros((CHUNK,), tl.float64)
    for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
        column = start + tl.arange(0, CHUNK)
        z, T, decided, selected = _entries(x_pointer, target_pointer, column, n, share, hi, lo, tau, settled)
        F = distribution(z, power, CDF, False)
        term = tau * (_conjugate(z, F, power, CDF) + _potential(T, power, CDF) - z * T)
        agrees = tl.abs(T - tl.where(selected, 1.0, 0.0)) < CLOSE
        term = tl.where(decided, tl.where(agrees, 0.0, float("inf")), term)
        total += tl.where(column < n, term, 0.0)
    loss = tl.where(hi == hi, tl.sum(total, axis=0), hi)
    tl.store(sums_pointer + row * parts + part, loss)


@triton.jit(do_not_specialize=SIZES)
def _pull_losses(
    grad_pointer, grad_stride, x_pointer, x_stride, target_pointer, target_stride, share_pointer, hi_pointer,
    lo_pointer, tau_pointer, tau_stride, dx_pointer, mass_pointer, rate_pointer, n, length, parts,
    power_high, power_low, CDF: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    power = joined(power_high, power_low)
    row, part = place(parts)
    share, hi, lo, tau, settled = _row(
        share_pointer, hi_pointer, lo_pointer, tau_pointer, tau_stride, row
    )  # fmt: skip
    grad = tl.load(grad_pointer + row * grad_stride).to(tl.float64)
    x_pointer += row * x_stride
    target_pointer += row * target_stride
    mass = tl.zeros((CHUNK,), tl.float64)
    rate = tl.zeros((CHUNK,), tl.float64)
    for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
        column = start + tl.arange(0, CHUNK)
        z, T, decided, _ = _entries(x_pointer, target_pointer, column, n, share, hi, lo, tau, settled)
        free = ~decided & (column < n)
        F = distribution(z, power, CDF, False)
        dx = grad * tl.where(free, F - T, 0.0)
        mass -= dx
        value = _conjugate(z, F, power, CDF) + _potential(T, power, CDF) - z * F
        rate += tl.where(free, value, 0.0)
        store(dx_pointer + row * n + column, dx, column < n)
    tl.store(mass_pointer + row * parts + part, tl.sum(mass, axis=0))
    tl.store(rate_pointer + row * parts + part, grad * tl.sum(rate, axis=0))


KERNELS = (_losses, _pull_losses)


class _Rows:
    """The arguments of a call as the kernels take them."""

    def __init__(
        self, x: Tensor, target: Tensor, share: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str,
        shape: float,
    ) -> None:  # fmt: skip
        batch, self.n = x.shape[:-1], x.shape[-1]
        self.rows = batch.numel()
        self.parts = min(triton.cdiv(self.n, CHUNK), max(1, layout.PROGRAMS // self.rows))
        self.length = triton.cdiv(triton.cdiv(self.n, self.parts), CHUNK) * CHUNK
        self.parts = triton.cdiv(self.n, self.length)
        self.given = (
            *layout.rows(x, self.n), *layout.rows(target.expand(x.shape), self.n),
            share.expand(batch).contiguous(), hi.expand(batch).contiguous(), lo.expand(batch).contiguous(),
            *layout.numbers(tau, batch, x.device),
        )  # fmt: skip
        self.power = layout.power(cdfs.resolve(cdf, shape))
        self.which = {"CDF": layout.cdf_id(cdf), "CHUNK": CHUNK, "num_warps": WARPS}


def fenchel_young(
    x: Tensor, target: Tensor, share: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str, shape: float
) -> Tensor:
    """`fenchel_young.fenchel_young`, in Triton."""
    if x.numel() == 0:
        return reference.fenchel_young(x, target, share, hi, lo, tau, cdf, shape)
    rows = _Rows(x, target, share, hi, lo, tau, cdf, shape)
    sums = torch.empty((*x.shape[:-1], rows.parts), dtype=torch.float64, device=x.device)
    launch(
        _losses, rows.rows * rows.parts,
        *rows.given, sums, rows.n, rows.length, rows.parts, *rows.power, **rows.which
    )  # fmt: skip
    return sums.squeeze(-1) if rows.parts == 1 else sums.sum(-1)


def fenchel_young_backward(
    grad: Tensor, x: Tensor, target: Tensor, share: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str,
    shape: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`fenchel_young.fenchel_young_backward`, in Triton."""
    if x.numel() == 0:
        return reference.fenchel_young_backward(grad, x, target, share, hi, lo, tau, cdf, shape)
    rows, dx = _Rows(x, target, share, hi, lo, tau, cdf, shape), x.new_empty(x.shape)
    dlo = torch.empty((*x.shape[:-1], rows.parts), dtype=torch.float64, device=x.device)
    dtau = torch.empty_like(dlo)
    incoming = layout.numbers(grad, x.shape[:-1], x.device)
    launch(
        _pull_losses, rows.rows * rows.parts,
        *incoming, *rows.given, dx, dlo, dtau, rows.n, rows.length, rows.parts, *rows.power, **rows.which
    )  # fmt: skip
    if rows.parts == 1:
        return dx, dlo.squeeze(-1), dtau.squeeze(-1)
    return dx, dlo.sum(-1), dtau.sum(-1)
