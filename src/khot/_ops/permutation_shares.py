"""The matrix of a soft permutation from its thresholds, which the derivatives compute again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._core.dispatch import Rule, define, gradient
from khot._core.precision import widen
from khot._core.ways import by_kernel
from khot._kernels.reference import permutation as kernels
from khot.cdfs import CDF

__all__ = ["shares"]


def shares(x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: CDF) -> Tensor:
    """What each entry has of the places between the thresholds, as the reference kernel says; the CDF is a
    built-in one.

    Args:
        x: (*batch, n).
        hi, lo: (*batch, m), m ≥ 2.
        tau: broadcasts with batch.
    """
    p: Tensor = _shares(x, hi, lo, tau, *cdf.key)
    return p


class _Rule(Rule):
    own_dims = (1, 1, 1)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Tensor) -> tuple[Tensor, ...]:
        x, hi, lo, tau, *ctx.key = inputs
        return x, hi, lo, tau

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, hi, lo, tau = ctx.saved_tensors
        if by_kernel():
            dx, dlo, dtau = _backward(grad, x, hi, lo, tau, *ctx.key)
        else:
            # at the two ends F does not move
            rise = torch.nn.functional.pad(widen(grad).diff(dim=-2).neg(), (0, 0, 1, 1))
            dx, dlo, dtau = kernels.vjp_shares(rise, x, hi, lo, tau, cdfs.resolve(*ctx.key))
        grad_tau = gradient(ctx, 3, dtau, tau.shape, tau.dtype)
        return dx.to(x.dtype), None, dlo.to(lo.dtype), grad_tau, None, None

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, dhi: None, dlo: Tensor | None, dtau: Tensor | None, *_: None
    ) -> Tensor:
        x, hi, lo, tau = ctx.saved_tensors
        moved = kernels.jvp_shares((dx, dlo, dtau), x, hi, lo, tau, cdfs.resolve(*ctx.key))
        return moved.diff(dim=-2).to(x.dtype)


def _fake(x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str, shape: float) -> Tensor:
    *batch, n = x.shape
    return x.new_empty(*batch, hi.shape[-1] - 1, n)


_shares = define("permutation_shares", kernels.permutation_shares, _fake, _Rule)
_backward = define(
    "permutation_shares_backward", kernels.permutation_shares_backward, "x, hi wide, x[row] wide"
)
