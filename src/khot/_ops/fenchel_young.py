"""The Fenchel-Young loss of each row, with the threshold of its soft top-k.

The loss is smallest at that threshold, so its first derivatives do not need those of the threshold. Its
second ones do, and solve for the threshold again, differentiably.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from khot import cdfs
from khot._core import arguments
from khot._core.dispatch import Rule, define, gradient
from khot._core.precision import on
from khot._core.ways import by_kernel
from khot._kernels.reference import fenchel_young as kernels
from khot._kernels.reference.fenchel_young import jvp_loss, loss_of, shares, vjp_target
from khot._ops.soft_topk import threshold_map
from khot.cdfs import CDF

__all__ = ["row_losses"]


def row_losses(x: Tensor, target: Tensor, k: Tensor, tau: Tensor, cdf: CDF) -> tuple[Tensor, Tensor]:
    """τ Σ [ω*(z) + ω(T) − zT] with z = (x − t)/τ and T = share·target, which sums to k; and the share, NaN in
    the rows of too small a target.

    Args:
        x, target: (*batch, n).
        k, tau: broadcast with batch. k has no derivative.
    """
    if cdf.built_in:
        loss, share, _, _ = _fenchel_young(x, target, k, tau, *cdf.key)
        return loss, share
    share, hi, lo = _solved(x, target, k, tau, cdf)  # the kernels do not know the CDF
    return loss_of(x, target, share, hi, lo, tau, cdf), share


def _solved(x: Tensor, target: Tensor, k: Tensor, tau: Tensor, cdf: CDF) -> tuple[Tensor, Tensor, Tensor]:
    """The share and the threshold, differentiable."""
    _, hi, lo = threshold_map(x, k, tau, cdf, "threshold")
    return shares(target, k), hi, lo


class _Rule(Rule):
    constants = (1, 2, 3)
    own_dims = (1, 1)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, target, k, tau, name, shape = inputs
        loss, share, hi, lo = outputs
        ctx.key, ctx.cdf = (name, shape), cdfs.resolve(name, shape)
        return x, target, k, tau, share, loss, hi, lo

    @staticmethod
    def vjp(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 6
        x, target, k, tau, share, loss, hi, lo = ctx.saved_tensors
        if not by_kernel():
            share, hi, lo = _solved(x, target, k, tau, ctx.cdf)
        dx, dtau = _backward.pull(grad, x, target, share, loss, hi, lo, tau, *ctx.key)
        dtarget = None
        if ctx.needs_input_grad[1]:
            dtarget = vjp_target(grad, x, target, share, hi, lo, on(x.device, tau), ctx.cdf)
        return dx, dtarget, None, gradient(ctx, 3, dtau, tau.shape, tau.dtype), None, None

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, dtarget: Tensor | None, dk: None, dtau: Tensor | None, *_: None
    ) -> Any:
        x, target, k, tau, *_rest = ctx.saved_tensors
        share, hi, lo = _solved(x, target, k, tau, ctx.cdf)
        out = jvp_loss((dx, dtarget, dtau), (x, target, share, hi, lo, on(x.device, tau)), ctx.cdf)
        return out, None, None, None

    @staticmethod
    def examine(outputs: tuple[Tensor, ...], *inputs: Any) -> None:
        if arguments.shows_nan(outputs[2]):
            x, _, k, tau, *_ = inputs
            arguments.explain_nan(outputs[2], x, k, tau)


_fenchel_young = define(
    "fenchel_young", kernels.fenchel_young, "x[row] wide, x[row] wide, x[row] wide, x[row] wide", _Rule
)
_backward = define("fenchel_young_backward", kernels.fenchel_young_backward, "x, x[row] wide")
