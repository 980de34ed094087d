"""The top-k in magnitude of s = |x|, for whole rows or for shards.

As for the soft top-k, the results include the value γ = hi + lo that the pooled entries share. So the vjp,
which is written in torch operations on s, γ and τ, can be differentiated again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from khot._core import arguments, rows
from khot._core.dispatch import Rule, define, gradient
from khot._core.precision import greatest
from khot._core.rows import HERE, Row
from khot._kernels.reference import magnitude as kernels

__all__ = ["magnitude", "magnitude_with_signs", "rescaled"]


def magnitude(s: Tensor, k: Tensor, tau: Tensor, p: float, row: Row = HERE) -> tuple[Tensor, Tensor, Tensor]:
    """y ≥ 0, and the pooled value γ = hi + lo, of which lo carries the derivatives.

    Args:
        s: (*batch, n), −inf where an entry may not be selected.
        k, tau: broadcast with batch; k has integer values.
        row: says whether s is the whole rows or a shard of them.
    """
    y, hi, lo = _magnitude.on(row.name)(s, k, tau, p, False)
    return y, hi, lo


def magnitude_with_signs(x: Tensor, k: Tensor, tau: Tensor, p: float) -> Tensor:
    """The same of |x|, with the signs of x, in one operator: |x| and the signs are no tensors. The value γ is
    left out."""
    y: Tensor = _magnitude(x, k, tau, p, True)[0]
    return y


def rescaled(s: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, p: float, row: Row = HERE) -> Tensor:
    """y + τ y^(p−1) from γ = hi + lo: s itself where y is not pooled, and Y + (s − γ)₊ elsewhere."""
    nothing = (hi.abs() == greatest(hi)).unsqueeze(-1)
    lo, tau = row.share([lo, tau.to(hi.dtype).expand(hi.shape)])
    hi, lo, tau = (v.unsqueeze(-1) for v in (hi, lo, tau))
    # infinities are masked, because the gradient would be 0·inf
    endless = s.isinf() | nothing
    finite = s.to(hi.dtype).masked_fill(endless, 0)
    w = ((finite - hi.masked_fill(nothing, 0)) - lo.masked_fill(nothing, 0)) / tau
    outside = (w <= 0) | endless
    w = w.masked_fill(outside, 1)
    Y = w ** (1 / (p - 1))
    alone = ((hi + lo <= Y) & ~outside) | (s == math.inf) | ((hi == 0) & (s == 0))
    pooled = (Y + tau * w).masked_fill(outside, 0).to(s.dtype)
    return torch.where(alone, s, pooled).masked_fill(hi.isnan(), math.nan)


class _Rule(Rule):
    constants = (1,)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, k, tau, ctx.p, ctx.signed = inputs
        y, hi, lo = outputs
        return x, y, k, hi, lo, tau

    @staticmethod
    def vjp(ctx: Any, grad: Tensor | None, _: Any, grad_lo: Tensor | None) -> tuple[Any, ...]:
        x, y, k, hi, lo, tau = ctx.saved_tensors
        grad = torch.zeros_like(y) if grad is None else grad
        grad_lo = arguments.unasked(hi) if grad_lo is None else grad_lo
        how = ctx.p, ctx.signed
        dx, dtau = _backward.pull(grad, grad_lo, x, y, k, hi, lo, tau, *how, group=ctx.group)
        return dx, None, gradient(ctx, 2, dtau, tau.shape, tau.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dk: None, dtau: Tensor | None, *_: None) -> Any:
        dy, dlo = kernels.jvp((dx, dtau), ctx.saved_tensors, ctx.p, ctx.signed, rows.of(ctx.group))
        return dy, None, dlo

    @staticmethod
    def examine(outputs: tuple[Tensor, ...], *inputs: Any) -> None:
        x, k, tau, _, signed, *group = inputs
        if not arguments.shows_nan(outputs[1]):  # before anything is prepared for the message
            return
        s = x.abs() if signed else x
        arguments.explain_nan(outputs[1], s, k, tau, integer=True, count=rows.of(*group).count)


_magnitude = define(
    "soft_topk_magnitude", kernels.soft_topk_magnitude, "x, x[row] wide, x[row] wide", _Rule, spread=True
)
_backward = define("soft_topk_magnitude_backward", kernels.soft_topk_magnitude_backward, "x, hi", spread=True)
