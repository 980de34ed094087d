"""The Fenchel-Young loss of each row, from the threshold of its soft top-k."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from khot import cdfs
from khot._core.dispatch import Rule, by_kernel, define
from khot._core.precision import wide_dtype
from khot._kernels.reference import fenchel_young as kernels
from khot._kernels.reference.fenchel_young import jvp_loss, loss_of, vjp_loss, vjp_target
from khot.cdfs import CDF

__all__ = ["row_losses"]


def row_losses(
    x: Tensor, target: Tensor, share: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: CDF
) -> Tensor:
    """τ Σ [ω*(z) + ω(T) − zT] with z = (x − hi − lo)/τ and T = share·target.

    Args:
        x, target: (*batch, n).
        share, hi, lo, tau: broadcast with batch.
    """
    if not cdf.built_in:  # which the kernels do not know
        return loss_of(x, target, share, hi, lo, tau, cdf)
    loss: Tensor = _fenchel_young(x, target, share, hi, lo, tau, *cdf.key)
    return loss


class _Rule(Rule):
    own_dims = (1, 1)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Tensor) -> tuple[Tensor, ...]:
        *tensors, name, shape = inputs
        ctx.key, ctx.cdf = (name, shape), cdfs.resolve(name, shape)
        return tuple(tensors)

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, target, share, hi, lo, tau = ctx.saved_tensors
        if by_kernel():
            dx, dlo, dtau = _backward(grad, x, target, share, hi, lo, tau, *ctx.key)
        else:
            dx, dlo, dtau = vjp_loss(grad, x, target, share, hi, lo, tau, ctx.cdf)
        dtarget = dshare = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dtarget, dshare = vjp_target(grad, x, target, share, hi, lo, tau, ctx.cdf)
            dtarget, dshare = dtarget.sum_to_size(target.shape), dshare.sum_to_size(share.shape)
        return (
            dx,
            dtarget,
            dshare,
            None,
            dlo.sum_to_size(lo.shape),
            dtau.sum_to_size(tau.shape).to(tau.dtype),
            None,
            None,
        )

    @staticmethod
    def jvp(
        ctx: Any,
        dx: Tensor | None,
        dtarget: Tensor | None,
        dshare: Tensor | None,
        dhi: Tensor | None,
        dlo: Tensor | None,
        dtau: Tensor | None,
        *_: None,
    ) -> Tensor:
        x, target, share, hi, lo, tau = ctx.saved_tensors
        return jvp_loss((dx, dtarget, dshare, dlo, dtau), x, target, share, hi, lo, tau, ctx.cdf)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=wide_dtype(x.device))


def _backward_fake(grad: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), _fake(x), _fake(x)


_ROWS = "Tensor x, Tensor target, Tensor share, Tensor hi, Tensor lo, Tensor tau, str cdf, float shape"

_fenchel_young = define("fenchel_young", f"({_ROWS}) -> Tensor", kernels.fenchel_young, _fake, _Rule)
_backward = define(
    "fenchel_young_backward",
    f"(Tensor grad, {_ROWS}) -> (Tensor, Tensor, Tensor)",
    kernels.fenchel_young_backward,
    _backward_fake,
)
