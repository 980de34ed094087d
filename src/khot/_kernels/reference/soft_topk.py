"""The reference kernels of the soft top-k, forward and backward.

Each kernel reads its rows in tiles, so that it allocates nothing of the input's size except the result. It
computes in the dtype of `precision.wide_dtype`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot import cdfs
from khot._core import rows
from khot._core.precision import greatest, invertible, large, on, widen
from khot._core.rows import HERE, Row
from khot._kernels.reference.solver import Threshold, solve
from khot._kernels.reference.tiles import standardize, tiles
from khot.cdfs import CDF

__all__ = [
    "backward",
    "gap_parts",
    "log_scale",
    "neighbours",
    "reference_soft_topk",
    "reference_soft_topk_backward",
    "soft_topk",
    "soft_topk_backward",
]

# A tile whose densities are less than exp(−SLACK) of the row's greatest one is summed relative to the latter.
SLACK = 100.0


def soft_topk(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str
) -> tuple[Tensor, Tensor, Tensor]:
    """F((x − t)/τ) or its logarithm, and the threshold t = hi + lo with C(t) = k.

    Args:
        x: (*batch, n).
        k, tau: broadcast with batch.
        cdf, shape: as for :func:`khot.cdfs.resolve`.
        output: "y", "log", or "threshold" (the first result is then empty).

    Returns:
        (*batch, n) of x's dtype; hi and lo as :func:`solve` returns them.
    """
    out, t = _forward(x, k, tau, cdfs.resolve(cdf, shape), output, HERE)
    return out, t.hi, t.lo


def reference_soft_topk(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`soft_topk` for users' CDFs and for rows spread over the processes of ``group``, which no faster
    kernel supports. It also returns the entries next to t, which the backward pass needs."""
    out, t = _forward(x, k, tau, cdfs.resolve(cdf, shape), output, rows.of(group))
    return out, t.hi, t.lo, t.above, t.below


def _forward(x: Tensor, k: Tensor, tau: Tensor, F: CDF, output: str, row: Row) -> tuple[Tensor, Threshold]:
    batch = x.shape[:-1]
    k, tau = (widen(on(x.device, number)).expand(batch) for number in (k, tau))
    tau = invertible(tau)
    t, _ = solve(x, k, tau, F, row)
    if output == "threshold":
        return x.new_empty(*batch, 0), t
    apply = F.log_cdf if output == "log" else F.cdf
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, tile in tiles(x):
        out[..., part] = apply(standardize(tile, t.hi, t.lo, tau))
    return out, t


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
    """The gradients in x, k and τ (the last two of the batch shape) from those in the output and in lo.

    A caller that has ``y`` and does not need dL/dτ may pass y. Some kernels then compute f from y, and do not
    compute dL/dτ.

    With u = grad·∂out/∂z, w = f/Σf and z̄ = Σwz:

        dL/dx = (u − w Σu)/τ + w·grad_lo
        dL/dk = Σ (u/f)·w − grad_lo·τ/Σf
        dL/dτ = −Σ u (z − z̄)/τ − grad_lo·z̄

    In a gap of compact support, t = ½(up + down) − ½(start + end)τ for the entries up and down next to it.
    There dL/dx is ½grad_lo on either side, shared by equal entries, and dL/dτ = −½(start + end)·grad_lo.
    Where rounding has left no entry on one side, the other side has both halves.
    """
    F = cdfs.resolve(cdf, shape)
    near = torch.full_like(hi, math.inf), torch.full_like(hi, -math.inf)
    if not F.full_support:
        near = neighbours(x, hi, lo)
    return backward(grad, grad_lo, x, Threshold(hi, lo, *near), tau, F, output, HERE)


def reference_soft_topk_backward(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    hi: Tensor,
    lo: Tensor,
    above: Tensor,
    below: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    output: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`soft_topk_backward` for the results of :func:`reference_soft_topk`."""
    t, F = Threshold(hi, lo, above, below), cdfs.resolve(cdf, shape)
    return backward(grad, grad_lo, x, t, tau, F, output, rows.of(group))


def log_scale(t: Threshold, tau: Tensor, F: CDF) -> Tensor:
    """A number near the greatest log f of the row, which every shard of it can compute."""
    if not F.full_support:
        return torch.zeros_like(t.hi)  # the densities of compact support stay in float64's range
    near = torch.stack((t.above, t.below), -1)
    return F.log_pdf(standardize(near, t.hi, t.lo, tau)).amax(-1).clamp(min=-greatest(tau))


def backward(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    t: Threshold,
    tau: Tensor,
    F: CDF,
    output: str,
    row: Row,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`soft_topk_backward` for whole rows or for shards.

    The neighbours in ``t`` are needed for compact support and for shards.
    """
    hi, lo, *near = t
    tau = invertible(widen(on(x.device, tau)).expand(x.shape[:-1]))
    zero = torch.zeros_like(hi)
    top, mass, u_sum, uz_sum, wz_sum, v_sum = zero - math.inf, zero, zero, zero, zero, zero
    if output == "log":  # f/F does not become small with f: relative to a far tile's f it would overflow
        top = (log_scale(t, tau, F) if not row.here else _log_peak(x, t, tau, F)) - SLACK
    for part, tile in tiles(x):
        z = standardize(tile, hi, lo, tau)
        log_f = F.log_pdf(z)
        u, log_rate, v = _cotangent(z, log_f, None if output == "threshold" else grad[..., part], F, output)
        z = z.clamp_(-large(z), large(z))  # f = 0 there, and 0·inf would be NaN
        new_top = torch.maximum(top, log_f.amax(-1))
        scale = new_top.clamp(min=-greatest(top))  # if all f = 0 so far, exp(−inf) and not exp(NaN)
        rescale = torch.exp(top - scale)
        weight = torch.exp(log_f - scale.unsqueeze(-1))
        mass = mass * rescale + weight.sum(-1)
        wz_sum = wz_sum * rescale + (weight * z).sum(-1)
        share = torch.exp(log_rate - scale.unsqueeze(-1))
        v_sum = v_sum * rescale + torch.where(v == 0, 0, share * v).sum(-1)
        u_sum, uz_sum = u_sum + u.sum(-1), uz_sum + (u * z).sum(-1)
        top = new_top

    if not row.here:  # all shards must use the same scale
        rescale = torch.exp(top - log_scale(t, tau, F))
        mass, wz_sum, v_sum = mass * rescale, wz_sum * rescale, v_sum * rescale
        top = log_scale(t, tau, F)
    gap = [] if F.full_support else _gap_sums(None if output == "threshold" else grad, x, hi, *near)
    mass, wz_sum, v_sum, u_sum, uz_sum, *gap = row.reduce([mass, wz_sum, v_sum, u_sum, uz_sum, *gap])
    live = mass != 0
    z_mean = (wz_sum / mass).where(live, 0)
    grad_k = (v_sum / mass).where(live, 0)
    through_t = torch.exp(torch.log(tau) - torch.log(mass) - top)
    grad_k = grad_k - torch.where(live & (grad_lo != 0), grad_lo * through_t, 0)
    grad_tau = (u_sum * z_mean - uz_sum) / tau - grad_lo * z_mean
    pull = (grad_lo - u_sum / tau).where(live, 0)
    flat = torch.zeros_like(live)
    parts: tuple[Tensor, ...] = ()
    if gap:
        # The limit of the smooth CDFs: half the mean of v over the least selected entries, plus half the mean
        # over the greatest rejected entries. The latter is left out for log y, which is −inf for rejected
        # entries.
        up_count, up_sum, down_count, down_sum = gap
        parts = up_part, down_part = gap_parts(up_count, down_count)
        mean = up_part * up_sum / up_count.clamp(min=1)
        if output == "y":
            mean = mean + down_part * down_sum / down_count.clamp(min=1)
        flat = ~live & (hi.abs() != greatest(hi))
        if output != "threshold":
            grad_k = grad_k.where(live, mean.where(flat, 0))
        start, end = F.support
        grad_tau = torch.where(flat, -(up_part * end + down_part * start) * grad_lo, grad_tau)

    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, tile in tiles(x):
        z = standardize(tile, hi, lo, tau)
        log_f = F.log_pdf(z)
        u, _, _ = _cotangent(z, log_f, None if output == "threshold" else grad[..., part], F, output)
        weight = torch.exp(log_f - top.clamp(min=-greatest(top)).unsqueeze(-1))
        spread = (pull / mass.masked_fill(~live, 1)).unsqueeze(-1)
        result = u / tau.unsqueeze(-1) + weight * spread
        for edge, own, count in zip(near, parts, gap[::2], strict=False):
            there = flat.unsqueeze(-1) & tile.isfinite() & (tile == edge.unsqueeze(-1))
            result = torch.where(there, (own * grad_lo / count.clamp(min=1)).unsqueeze(-1), result)
        grad_x[..., part] = result
    return grad_x, grad_k, grad_tau


def _log_peak(x: Tensor, t: Threshold, tau: Tensor, F: CDF) -> Tensor:
    """The greatest log f of the row."""
    peak = torch.full_like(t.hi, -math.inf)
    for _, tile in tiles(x):
        if tile.shape[-1] == x.shape[-1]:
            return peak  # the sums over one tile do not need it
        peak = torch.maximum(peak, F.log_pdf(standardize(tile, t.hi, t.lo, tau)).amax(-1))
    return peak


def _cotangent(
    z: Tensor, log_f: Tensor, v: Tensor | None, F: CDF, output: str
) -> tuple[Tensor, Tensor, Tensor]:
    """u = v·∂out/∂z; the logarithm of ∂out/∂z where v is not 0; and v, with 0 where y is exactly 0."""
    zero = torch.zeros_like(z)
    if v is None:
        return zero, zero, zero
    v = widen(v)
    if output == "y":
        return v * torch.exp(log_f), log_f, v
    log_F = F.log_cdf(z)
    still = log_F == -math.inf  # y is exactly 0 here, and its derivative is 0
    v = v.masked_fill(still, 0)
    rate = F.log_hazard(z).masked_fill(still, 0)
    return torch.where(v == 0, 0, v * torch.exp(rate)), rate, v


def neighbours(x: Tensor, hi: Tensor, lo: Tensor) -> tuple[Tensor, Tensor]:
    """The least entry above t and the greatest of the others, ±inf if there is none."""
    up = torch.full_like(hi, math.inf)
    down = -up
    for _, tile in tiles(x):
        above = tile - hi.unsqueeze(-1) > lo.unsqueeze(-1)
        up = torch.minimum(up, tile.masked_fill(~above, math.inf).amin(-1))
        down = torch.maximum(down, tile.masked_fill(above, -math.inf).amax(-1))
    return up, down


def gap_parts(up_count: Tensor, down_count: Tensor) -> tuple[Tensor, Tensor]:
    """How far t follows either neighbour: half the way, or all of it where the other side has no entries."""
    up, down = up_count > 0, down_count > 0
    return up * (1 - 0.5 * down), down * (1 - 0.5 * up)


def _gap_sums(v: Tensor | None, x: Tensor, hi: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
    """For each neighbour of t, how many entries are equal to it, and the sum of v over them (None: 0)."""
    sums = [torch.zeros_like(hi) for _ in range(4)]
    for part, tile in tiles(x):
        part_v = torch.zeros_like(tile) if v is None else widen(v[..., part])
        for i, near in enumerate((up, down)):
            there = tile.isfinite() & (tile == near.unsqueeze(-1))
            sums[2 * i] += there.sum(-1)
            sums[2 * i + 1] += part_v.where(there, 0).sum(-1)
    return sums
