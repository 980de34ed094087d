"""Reference kernels of the soft count at many levels: n entries times m levels, a few levels at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from khot import cdfs
from khot._core import rows
from khot._core.precision import large, on, wide_dtype, widen
from khot._core.rows import Row
from khot.cdfs import CDF

__all__ = [
    "jvp_count",
    "levels",
    "like_counts",
    "of_rows",
    "soft_count",
    "soft_count_backward",
]

AT_ONCE = 1 << 18  # entries times levels: temporaries of 2 MB stay in the cache
FAR = 1e9  # in τ: F is 0 or 1 there, and f is 0


def soft_count(
    x: Tensor, at: Tensor, tau: Tensor, cdf: str, shape: float, centred: bool, group: str = ""
) -> Tensor:
    """C(b) = Σ_j F((x_j − b)/τ) at every level b of a row, in the dtype of `precision.wide_dtype`; at one
    level for all rows, in x's dtype.

    Args:
        x: (*batch, n).
        at: (*batch, m); or one level for all rows, 0-dim.
        tau: broadcasts with batch.
        cdf, shape: as for :func:`khot.cdfs.resolve`.
        centred: take F(z + F⁻¹(½)) for F, so that every score, finite or not, counts itself as ½; otherwise
            +inf always counts, and −inf never.
        group: the names of the process groups that the rows are spread over; "" for whole rows.

    Returns:
        (*batch, m), or (*batch) for one level; NaN for a row with a NaN or with a τ that is not positive.
    """
    if not at.dim():
        count = soft_count(x, of_rows(at, x), on(x.device, tau), cdf, shape, centred, group)
        return count.squeeze(-1).to(x.dtype)
    F, tau = cdfs.resolve(cdf, shape), on(x.device, tau)
    parts = [_count(x, at[..., part], tau, F, centred) for part in _groups(x, at)]
    count = torch.cat(parts, -1) if parts else torch.empty_like(at, dtype=wide_dtype(x.device))
    return rows.of(group).reduce([count])[0]


def levels(at: Tensor) -> int:
    """How many levels a row has."""
    return at.shape[-1] if at.dim() else 1


def like_counts(x: Tensor, at: Tensor) -> tuple[torch.Size, torch.dtype]:
    """The shape and the dtype of the counts."""
    return (at.shape, wide_dtype(x.device)) if at.dim() else (x.shape[:-1], x.dtype)


def of_rows(at: Tensor, x: Tensor) -> Tensor:
    """One level for all rows as a level of each, (*batch, 1)."""
    return on(x.device, at).expand(*x.shape[:-1], 1)


def _groups(x: Tensor, at: Tensor) -> Iterator[slice]:
    size = max(1, AT_ONCE // max(1, x.numel()))
    return (slice(i, i + size) for i in range(0, at.shape[-1], size))


def _standardize(x: Tensor, at: Tensor, tau: Tensor, F: CDF, centred: bool) -> Tensor:
    """z (*batch, m, n). Infinite scores become ±`FAR`; infinite levels become 0, and the caller handles
    them."""
    infinite = x.isinf()
    b = widen(at).masked_fill(at.isinf(), 0)
    tau = widen(tau).expand(x.shape[:-1])
    tau = tau.masked_fill(~((tau > 0) & (tau < math.inf)), math.nan)[..., None, None]
    # masked before the difference, whose gradient would be 0·inf
    z = (widen(x).masked_fill(infinite, 0).unsqueeze(-2) - b.unsqueeze(-1)) / tau
    z = torch.where(infinite.unsqueeze(-2) & ~tau.isnan(), FAR * widen(x.sign()).unsqueeze(-2), z)
    return z + F.median if centred and F.median else z


def _count(x: Tensor, at: Tensor, tau: Tensor, F: CDF, centred: bool) -> Tensor:
    count = F.cdf(_standardize(x, at, tau, F, centred)).sum(-1)
    own = 0.5 if centred else 0.0
    first = (x == math.inf).sum(-1, keepdim=True) * (1 - own)  # at an infinite level
    last = x.shape[-1] - (x == -math.inf).sum(-1, keepdim=True) * (1 - own)
    at_infinity = widen(torch.where(at > 0, first, last))
    return torch.where(at.isinf() & ~count.isnan(), at_infinity, count)


def soft_count_backward(
    grad: Tensor, x: Tensor, at: Tensor, tau: Tensor, cdf: str, shape: float, centred: bool, group: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x, the levels (of the counts' shape) and τ (batch), differentiable:

    dx_j = Σ_b v_b f/τ,  db = −v_b Σ_j f/τ,  dτ = −Σ v_b f·(x − b)/τ²
    """
    F, row = cdfs.resolve(cdf, shape), rows.of(group)
    tau = on(x.device, tau)
    if not at.dim():
        given = grad.unsqueeze(-1), x, of_rows(at, x), tau
        dx, of_levels, dtau = soft_count_backward(*given, cdf, shape, centred, group)
        return dx, of_levels.squeeze(-1), dtau
    grad, at, tau = row.share([widen(grad), at, tau])
    scale = widen(tau).expand(x.shape[:-1])
    dx = torch.zeros_like(x, dtype=wide_dtype(x.device))
    dtau = torch.zeros_like(scale)
    dat = [torch.empty_like(at[..., :0], dtype=wide_dtype(x.device))]
    for part in _groups(x, at):
        v = _at_rest(grad[..., part], at[..., part]).unsqueeze(-1)
        f, fz = _density(x, at[..., part], tau, F, centred)
        dx = dx + (v * f).sum(-2) / scale.unsqueeze(-1)
        dat.append(-(v * f).sum(-1) / scale.unsqueeze(-1))
        dtau = dtau - (v * fz).sum((-1, -2)) / scale
    of_levels, dtau = row.total([torch.cat(dat, -1), dtau])
    return dx.to(x.dtype).contiguous(), of_levels.to(at.dtype).contiguous(), dtau


def jvp_count(
    tangents: tuple[Tensor | None, ...], saved: tuple[Tensor, ...], F: CDF, centred: bool, row: Row
) -> Tensor:
    """Forward mode, for the tangents of x, the levels and τ. One level for all rows is a constant."""
    (dx, dat, dtau), (x, at, tau) = tangents, saved
    tau = on(x.device, tau)
    if not at.dim():
        of_level = jvp_count((dx, None, dtau), (x, of_rows(at, x), tau), F, centred, row)
        return of_level.squeeze(-1).to(x.dtype)
    scale = widen(tau).expand(x.shape[:-1]).unsqueeze(-1)
    out = [torch.empty_like(at[..., :0], dtype=wide_dtype(x.device))]
    for part in _groups(x, at):
        f, fz = _density(x, at[..., part], tau, F, centred)
        total = torch.zeros_like(at[..., part], dtype=wide_dtype(x.device))
        if dx is not None:
            total = total + (f * widen(dx).unsqueeze(-2)).sum(-1)
        if dat is not None:
            total = total - f.sum(-1) * widen(dat[..., part])
        if dtau is not None:
            total = total - fz.sum(-1) * widen(dtau).expand(x.shape[:-1]).unsqueeze(-1)
        out.append(_at_rest(total, at[..., part]) / scale)
    return row.total([torch.cat(out, -1)])[0]


def _density(x: Tensor, at: Tensor, tau: Tensor, F: CDF, centred: bool) -> tuple[Tensor, Tensor]:
    """f and f·(x − b)/τ; 0 where x is infinite."""
    z = _standardize(x, at, tau, F, centred)
    z = z.clamp(-large(z), large(z))  # f = 0 there, and 0·inf would be NaN
    f = F.pdf(z)
    if centred and F.median:
        z = z - F.median
    return f, f * z


def _at_rest(v: Tensor, at: Tensor) -> Tensor:
    """v, and 0 at infinite levels: the derivative there is zero."""
    return v.masked_fill(at.isinf(), 0)
