"""Reference kernels of the shares that entries have of the places between thresholds: a few thresholds at a
time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from khot import cdfs
from khot._core.precision import greatest, wide_dtype, widen
from khot.cdfs import CDF

__all__ = ["LONGEST", "jvp_shares", "permutation_shares", "permutation_shares_backward", "vjp_shares"]

LONGEST = 512  # entries of a row whose whole matrix a GPU's kernels take
AT_ONCE = 1 << 18  # entries of the matrix: temporaries of 2 MB stay in the cache


def permutation_shares(x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str, shape: float) -> Tensor:
    """P_ij = F((x_j − t_i)/τ) − F((x_j − t_(i−1))/τ), (*batch, m − 1, n) in x's dtype.

    Args:
        x: (*batch, n). The shares of an infinite entry have no meaning, and no gradient.
        hi, lo: the falling thresholds t_0 = +inf, …, t_(m−1) = −inf as pairs, (*batch, m), with ±`greatest`
            for an infinite one. hi is a constant, and lo carries the derivatives.
        tau: broadcasts with batch; > 0.
        cdf, shape: as for :func:`khot.cdfs.resolve`.
    """
    F = cdfs.resolve(cdf, shape)
    parts = [
        F.cdf(_standardized(x, hi[..., part], lo[..., part], tau)).diff(dim=-2).to(x.dtype)
        for part in _groups(x, hi.shape[-1] - 1, 1)
    ]
    return torch.cat(parts, -2)


def permutation_shares_backward(
    grad: Tensor, x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str, shape: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x; in lo, (*batch, m), and τ, of the batch shape, both in the wide dtype."""
    F = cdfs.resolve(cdf, shape)
    dx, dlo, dtau = (
        torch.zeros(shape, dtype=wide_dtype(x.device), device=x.device)
        for shape in (x.shape, lo.shape, x.shape[:-1])
    )
    for part in _groups(x, hi.shape[-1] - 2, 0):
        inner = slice(part.start + 1, part.stop + 1)  # of the thresholds
        rise = widen(grad[..., part, :]) - widen(grad[..., inner, :])
        a, b, c = vjp_shares(rise, x, hi[..., inner], lo[..., inner], tau, F)
        dx, dtau = dx + a, dtau + c
        dlo[..., inner] = b
    return dx.to(x.dtype), dlo, dtau


def vjp_shares(
    rise: Tensor, x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, F: CDF
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x, lo and τ from those of F at each threshold, (*batch, m, n)."""
    z, f = _density(x, hi, lo, tau, F)
    along = rise * f / widen(tau)[..., None, None]
    return along.sum(-2), -along.sum(-1), -(along * z).sum((-2, -1))


def jvp_shares(
    tangents: tuple[Tensor | None, ...], x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, F: CDF
) -> Tensor:
    """The tangent of F at each threshold, which is that of P after ``diff``, from those of x, lo and τ."""
    dx, dlo, dtau = tangents
    z, f = _density(x, hi, lo, tau, F)
    moved = torch.zeros_like(f)
    if dx is not None:
        moved = moved + widen(dx).unsqueeze(-2)
    if dlo is not None:
        moved = moved - widen(dlo).unsqueeze(-1)
    if dtau is not None:
        moved = moved - z * widen(dtau)[..., None, None]
    return f * moved / widen(tau)[..., None, None]


def _groups(x: Tensor, length: int, more: int) -> Iterator[slice]:
    size = max(1, AT_ONCE // max(1, x.numel()))
    return (slice(i, min(i + size, length) + more) for i in range(0, length, size))


def _standardized(x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor) -> Tensor:
    """z, (*batch, m, n)."""
    ends = hi.abs() == greatest(hi)
    t = torch.where(ends, hi.sign() * torch.inf, hi)
    z = (widen(x).unsqueeze(-2) - t.unsqueeze(-1)) - lo.masked_fill(ends, 0).unsqueeze(-1)
    return z / widen(tau)[..., None, None]


def _density(x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, F: CDF) -> tuple[Tensor, Tensor]:
    """z and f, which are 0 where x or t is infinite: nothing moves there."""
    fixed = x.isinf().unsqueeze(-2) | (hi.abs() == greatest(hi)).unsqueeze(-1)
    # masked before the differences, whose gradients would be 0·inf
    x, still = x.masked_fill(x.isinf(), 0), hi.abs() == greatest(hi)
    z = _standardized(x, hi.masked_fill(still, 0), lo.masked_fill(still, 0), tau).masked_fill(fixed, 0)
    return z, F.pdf(z).masked_fill(fixed, 0)
