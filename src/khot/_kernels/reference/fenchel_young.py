"""Reference kernels of the Fenchel-Young loss of a soft top-k, from its threshold."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot import cdfs
from khot._core.precision import greatest, on, wide_dtype, widen
from khot.cdfs import CDF

__all__ = [
    "CLOSE",
    "SHORT",
    "fenchel_young",
    "fenchel_young_backward",
    "jvp_loss",
    "loss_of",
    "shares",
    "vjp_target",
]

CLOSE = 1e-6  # a target within this of the selection of a decided entry agrees with it
SHORT = 1 - 1e-6  # a target that sums to less than so many times k sums to too little


def fenchel_young(
    x: Tensor, target: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """τ Σ [ω*(z) + ω(T) − zT] with z = (x − hi − lo)/τ and T = share·target.

    Every term is ≥ 0. Infinite scores, and all scores where t is infinite, are decided: they add 0 where the
    target agrees and inf where it does not.

    Args:
        x, target: (*batch, n).
        k, tau: broadcast with batch.
        cdf, shape: as for :func:`khot.cdfs.resolve`.

    Returns:
        The loss; the share of :func:`shares`; and the threshold t of the soft top-k as hi and lo. All have
        the batch shape and the dtype of `wide_dtype`. The loss is NaN where the share or t is.
    """
    _, hi, lo = torch.ops.khot.soft_topk.default(x, k, tau, cdf, shape, "threshold")
    share = shares(target, k)
    return loss_of(x, target, share, hi, lo, tau, cdfs.resolve(cdf, shape)), share, hi, lo


def shares(target: Tensor, k: Tensor) -> Tensor:
    """What each row of a target is multiplied by so that it sums to k; NaN where it sums to less.

    The target is (*batch, n), and k broadcasts with batch.
    """
    mass = torch.where(k == 0, 1, target.sum(-1, dtype=wide_dtype(target.device)) / k)
    return torch.where(mass < SHORT, math.nan, torch.where(k == 0, 0, 1 / mass))


class _Terms(NamedTuple):
    z: Tensor  # 0 for decided entries
    T: Tensor
    decided: Tensor
    tau: Tensor  # (*batch, 1)


def _terms(x: Tensor, target: Tensor, share: Tensor, hi: Tensor, lo: Tensor, tau: Tensor) -> _Terms:
    settled = (hi.abs() == greatest(hi)).unsqueeze(-1)
    decided = x.isinf() | settled
    t_hi, t_lo = (v.unsqueeze(-1).masked_fill(settled, 0) for v in (hi, lo))
    scale = widen(tau).expand(x.shape[:-1]).unsqueeze(-1)
    z = ((widen(x).masked_fill(decided, 0) - t_hi) - t_lo) / scale
    T = (widen(target) * share.unsqueeze(-1)).clamp(max=1)  # a sum may miss k by rounding
    return _Terms(z.masked_fill(decided, 0), T, decided, scale)


def loss_of(x: Tensor, target: Tensor, share: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, F: CDF) -> Tensor:
    """The loss of :func:`fenchel_young`, differentiable. t = hi + lo stays in the graph: it adds nothing to
    the gradient, but it does to the Hessian."""
    z, T, decided, scale = _terms(x, target, share, hi, lo, tau)
    terms = scale * (F.conjugate(z) + F.potential(T) - z * T)
    selected = torch.where(x.isinf(), x > 0, hi.unsqueeze(-1) < 0).to(T.dtype)
    mismatch = torch.where((T - selected).abs() < CLOSE, 0.0, math.inf).to(T.dtype)
    loss = torch.where(decided, mismatch, terms).sum(-1)
    return torch.where(hi.isnan() | share.isnan(), math.nan, loss)


def fenchel_young_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    share: Tensor,
    loss: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
) -> tuple[Tensor, Tensor]:
    """The gradients in x and, of the batch shape, in τ, differentiable: F(z) − T in x, and
    Σ[ω*(z) + ω(T) − zF(z)] in τ, which is loss/τ − Σ z(F(z) − T), too, where the loss is finite. That in t is
    0, because F and T have the same sum."""
    F = cdfs.resolve(cdf, shape)
    e, rate = _rates(_terms(x, target, share, hi, lo, on(x.device, tau)), F)
    return (grad.unsqueeze(-1) * e).to(x.dtype).contiguous(), grad * rate


def _rates(terms: _Terms, F: CDF) -> tuple[Tensor, Tensor]:
    z, T, decided, _ = terms
    y = F.cdf(z)
    rate = (F.conjugate(z) + F.potential(T) - z * y).masked_fill(decided, 0).sum(-1)
    return (y - T).masked_fill(decided, 0), rate


def vjp_target(
    grad: Tensor, x: Tensor, target: Tensor, share: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, F: CDF
) -> Tensor:
    """Reverse mode in the target, differentiable: τ(F⁻¹(T) − z) in T."""
    z, T, decided, scale = _terms(x, target, share, hi, lo, tau)
    dT = grad.unsqueeze(-1) * (scale * (F.icdf(T) - z)).masked_fill(decided, 0)
    # T is as the target over its sum
    along = (dT * widen(target)).sum(-1, keepdim=True) / _sums(target)
    return (share.unsqueeze(-1) * (dT - along)).to(target.dtype)


def _sums(target: Tensor) -> Tensor:
    """(*batch, 1): what a target sums to; 1 in the place of 0."""
    sums = widen(target).sum(-1, keepdim=True)
    return sums.masked_fill(sums == 0, 1)


def jvp_loss(tangents: tuple[Tensor | None, ...], solved: tuple[Tensor, ...], F: CDF) -> Tensor:
    """Forward mode, for the tangents of x, the target and τ, from what :func:`loss_of` is given."""
    (dx, dtarget, dtau), (x, target, share, *_) = tangents, solved
    terms = _terms(*solved)
    e, rate = _rates(terms, F)
    out = torch.zeros(x.shape[:-1], dtype=wide_dtype(x.device), device=x.device)
    if dx is not None:
        out = out + (e * widen(dx)).sum(-1)
    if dtau is not None:
        out = out + rate * widen(dtau)
    if dtarget is not None:
        dT = widen(dtarget)
        dT = share.unsqueeze(-1) * (dT - widen(target) * dT.sum(-1, keepdim=True) / _sums(target))
        slope = (terms.tau * (F.icdf(terms.T) - terms.z)).masked_fill(terms.decided, 0)
        # at a target of 0 or 1 the slope may be infinite
        out = out + (slope.masked_fill(dT == 0, 0) * dT).sum(-1)
    return out
