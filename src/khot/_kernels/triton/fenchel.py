"""Which kernels a batch of Fenchel-Young losses takes: few very long rows are split over programs."""

from __future__ import annotations

import torch
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import fenchel_young as reference
from khot._kernels.triton import layout, losses, split_losses
from khot._kernels.triton.arguments import Threshold
from khot._kernels.triton.resident import EVALUATIONS

__all__ = ["fenchel_young", "fenchel_young_backward"]


def fenchel_young(
    x: Tensor, target: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fenchel_young.fenchel_young`, in Triton."""
    if x.numel() == 0:
        return reference.fenchel_young(x, target, k, tau, cdf, shape)
    batch, n, F = x.shape[:-1], x.shape[-1], cdfs.resolve(cdf, shape)
    loss = torch.empty(batch, dtype=torch.float64, device=x.device)
    results = loss, torch.empty_like(loss), torch.empty_like(loss), torch.empty_like(loss)
    rows, fine = loss.numel(), x.dtype == torch.float64
    source, targets = layout.rows(x, n), layout.rows(target, n)
    given, temperature = layout.values(k, batch, x.device), layout.values(tau, batch, x.device)
    if layout.splits(rows, n) and not fine:
        split_losses.fenchel_young(source, targets, given, temperature, results, rows, n, F)
        return results
    solver, _, programs = losses.variants(rows, n, F, fine)
    solver(
        programs, source, targets, given, temperature, *results[:2], Threshold(*results[2:]), rows, n,
        EVALUATIONS, layout.power(F),
    )  # fmt: skip
    return results


def fenchel_young_backward(
    grad: Tensor, x: Tensor, target: Tensor, share: Tensor, loss: Tensor, hi: Tensor, lo: Tensor, tau: Tensor,
    cdf: str, shape: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fenchel_young.fenchel_young_backward`, in Triton."""
    if x.numel() == 0:
        return reference.fenchel_young_backward(grad, x, target, share, loss, hi, lo, tau, cdf, shape)
    batch, n, F = x.shape[:-1], x.shape[-1], cdfs.resolve(cdf, shape)
    dx, dtau = x.new_empty(x.shape), hi.new_empty(batch)
    rows, fine = dtau.numel(), x.dtype == torch.float64
    if not any(grad.stride()):  # one number for all rows, as a mean's
        grad = grad.as_strided((), ())
    source, targets, incoming = (
        layout.rows(x, n),
        layout.rows(target, n),
        layout.values(grad, batch, x.device),
    )
    solved = share.contiguous(), loss.contiguous(), Threshold(hi.contiguous(), lo.contiguous())
    temperature = layout.values(tau, batch, x.device)
    if layout.splits(rows, n) and not fine:
        split_losses.fenchel_young_backward(
            source, targets, incoming, solved, temperature, dx, dtau, rows, n, F
        )
        return dx, dtau
    _, puller, programs = losses.variants(rows, n, F, fine)
    puller(programs, source, targets, incoming, *solved, temperature, dx, dtau, rows, n, layout.power(F))
    return dx, dtau
