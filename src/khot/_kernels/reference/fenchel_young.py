"""Reference kernels of the Fenchel-Young loss of a soft top-k, from its threshold."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot import cdfs
from khot._core.precision import greatest, wide_dtype, widen
from khot.cdfs import CDF

__all__ = [
    "CLOSE",
    "fenchel_young",
    "fenchel_young_backward",
    "jvp_loss",
    "loss_of",
    "vjp_loss",
    "vjp_target",
]

CLOSE = 1e-6  # a target within this of the selection of a decided entry agrees with it


def fenchel_young(
    x: Tensor, target: Tensor, share: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str, shape: float
) -> Tensor:
    """τ Σ [ω*(z) + ω(T) − zT] with z = (x − hi − lo)/τ and T = share·target, in the dtype of `wide_dtype`.

    Every term is ≥ 0. Infinite scores, and all scores where t is infinite, are decided: they add 0 where the
    target agrees and inf where it does not.

    Args:
        x, target: (*batch, n).
        share, hi, lo, tau: broadcast with batch.
        cdf, shape: as for :func:`khot.cdfs.resolve`.

    Returns:
        (*batch); NaN for a row whose hi is NaN.
    """
    return loss_of(x, target, share, hi, lo, tau, cdfs.resolve(cdf, shape))


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
    return _Terms(z.masked_fill(decided, 0), widen(target) * share.unsqueeze(-1), decided, scale)


def loss_of(x: Tensor, target: Tensor, share: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, F: CDF) -> Tensor:
    """:func:`fenchel_young`, differentiable. t = hi + lo stays in the graph: it adds nothing to the gradient,
    but it does to the Hessian."""
    z, T, decided, scale = _terms(x, target, share, hi, lo, tau)
    terms = scale * (F.conjugate(z) + F.potential(T) - z * T)
    selected = torch.where(x.isinf(), x > 0, hi.unsqueeze(-1) < 0).to(T.dtype)
    mismatch = torch.where((T - selected).abs() < CLOSE, 0.0, math.inf).to(T.dtype)
    loss = torch.where(decided, mismatch, terms).sum(-1)
    return torch.where(hi.isnan(), math.nan, loss)


def fenchel_young_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    share: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x, lo and τ; the latter two have the batch shape."""
    dx, dlo, dtau = vjp_loss(grad, x, target, share, hi, lo, tau, cdfs.resolve(cdf, shape))
    return dx.contiguous(), dlo, dtau


def vjp_loss(
    grad: Tensor, x: Tensor, target: Tensor, share: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, F: CDF
) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse mode, differentiable: F(z) − T in x, −Σ(F(z) − T) in lo, Σ[ω*(z) + ω(T) − zF(z)] in τ."""
    e, rate = _rates(_terms(x, target, share, hi, lo, tau), F)
    dx = grad.unsqueeze(-1) * e
    return dx.to(x.dtype), -dx.sum(-1), grad * rate


def _rates(terms: _Terms, F: CDF) -> tuple[Tensor, Tensor]:
    z, T, decided, _ = terms
    y = F.cdf(z)
    rate = (F.conjugate(z) + F.potential(T) - z * y).masked_fill(decided, 0).sum(-1)
    return (y - T).masked_fill(decided, 0), rate


def vjp_target(
    grad: Tensor, x: Tensor, target: Tensor, share: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, F: CDF
) -> tuple[Tensor, Tensor]:
    """Reverse mode in the target and its share, differentiable: τ(F⁻¹(T) − z) in T."""
    z, T, decided, scale = _terms(x, target, share, hi, lo, tau)
    dT = grad.unsqueeze(-1) * (scale * (F.icdf(T) - z)).masked_fill(decided, 0)
    return (dT * share.unsqueeze(-1)).to(target.dtype), (dT * widen(target)).sum(-1)


def jvp_loss(
    tangents: tuple[Tensor | None, ...],
    x: Tensor,
    target: Tensor,
    share: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    F: CDF,
) -> Tensor:
    """Forward mode, for the tangents of x, the target, its share, lo and τ."""
    dx, dtarget, dshare, dlo, dtau = tangents
    terms = _terms(x, target, share, hi, lo, tau)
    e, rate = _rates(terms, F)
    out = torch.zeros(x.shape[:-1], dtype=wide_dtype(x.device), device=x.device)
    if dx is not None:
        out = out + (e * widen(dx)).sum(-1)
    if dlo is not None:
        out = out - e.sum(-1) * dlo
    if dtau is not None:
        out = out + rate * widen(dtau)
    if dtarget is not None or dshare is not None:
        dT = torch.zeros_like(e)
        if dtarget is not None:
            dT = dT + widen(dtarget) * share.unsqueeze(-1)
        if dshare is not None:
            dT = dT + widen(target) * dshare.unsqueeze(-1)
        slope = (terms.tau * (F.icdf(terms.T) - terms.z)).masked_fill(terms.decided, 0)
        # at a target of 0 or 1 the slope may be infinite
        out = out + (slope.masked_fill(dT == 0, 0) * dT).sum(-1)
    return out
