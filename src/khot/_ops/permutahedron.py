"""The projection onto the permutahedron, as an operator with its blocks.

The blocks and the orders of z and w are results as well. Where they are known, the derivative is a mean over
each block, which can be differentiated again.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from khot._core.dispatch import Rule, define, gradient
from khot._core.names import unknown
from khot._core.precision import wide_dtype, widen
from khot._kernels.reference import permutahedron as kernels

__all__ = ["RegularizationName", "check_regularization", "permutahedron", "power_permutahedron", "without"]

RegularizationName = Literal["l2", "kl"]
_REGULARIZATIONS = get_args(RegularizationName)


def check_regularization(regularization: Any) -> None:
    if not isinstance(regularization, str):
        raise TypeError(f"regularization must be a name, but got {type(regularization).__name__}")
    if regularization not in _REGULARIZATIONS:
        raise unknown("regularization", regularization, _REGULARIZATIONS)


def permutahedron(z: Tensor, w: Tensor, tau: Tensor, regularization: str) -> Tensor:
    """The projection of z/τ onto the permutahedron of w ("l2"), or log of that of e^(z/τ) onto that of e^w
    ("kl"), in z's dtype.

    Args:
        z: (*batch, n).
        w: broadcasts with z and has n entries.
        tau: broadcasts with batch.
    """
    y: Tensor = _permutahedron(z, w, tau, regularization)[0]
    return y


def power_permutahedron(z: Tensor, w: Tensor, tau: Tensor, p: float) -> Tensor:
    """argmin_(y ∈ P(w)) Σ |y|^p/p − ⟨y, z/τ⟩, in z's dtype; arguments as for :func:`permutahedron`.

    The operator finds the blocks and their levels, without derivatives. Newton's steps from there have those
    of the implicit equation: after each step, twice as many orders are exact.
    """
    order, w_order, start, v = _power_blocks(z.detach(), w.detach(), tau.detach(), p)
    order, w_order, start = order.long(), w_order.long(), start.long()
    scores, weights = widen(z).gather(-1, order), widen(w).expand(z.shape).gather(-1, w_order)
    rate = 1 / widen(tau).expand(z.shape[:-1]).unsqueeze(-1)
    first = scores.gather(-1, start)
    a = (scores.masked_fill(scores.isinf(), 0) - first.masked_fill(first.isinf(), 0)) * rate
    exponent, total = 1 / (p - 1), kernels.pooled(weights, start)
    tiny = torch.finfo(a.dtype).tiny ** 0.25

    def powers(v: Tensor) -> tuple[Tensor, Tensor]:
        """s(a − v) and its slope; 0 is moved aside, where one of them has no derivative."""
        t = a - v
        t = t.masked_fill(t.abs() < tiny, tiny)
        size = t * (1 - 2 * (t < 0).to(t.dtype))  # |t|, whose sign is a constant here
        slope = exponent * size ** (exponent - 1)
        return t * slope / exponent, slope

    for _ in range(3):
        s, slope = powers(v)
        v = v + (kernels.pooled(s, start) - total) / kernels.pooled(slope, start)
    count = kernels.pooled(torch.ones_like(a), start)
    # entries that are alone, and equal ones that share nothing, where the slope is 0 or infinite
    even = (count == 1) | ((kernels.pooled(a.abs(), start) == 0) & (total == 0))
    y = torch.where(even, total / count, powers(v)[0])
    bad = (z.isnan() | w.isnan()).any(-1) | ~((tau > 0) & (tau < math.inf))
    y = torch.zeros_like(y).scatter(-1, order, y)
    return y.masked_fill(bad.unsqueeze(-1), math.nan).to(z.dtype)


def without(z: Tensor, w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """z and w such that the entries under False are a block of their own, which changes no other entry.

    They have the smallest scores, which the largest negative number does not reach, and the smallest w.
    """
    z = torch.where(mask, z.clamp(min=torch.finfo(z.dtype).min), -math.inf)
    if not w.shape[-1]:
        return z, w
    least = torch.where(mask, w, math.inf).amin(-1, keepdim=True)
    return z, torch.where(mask, w, torch.where(mask.any(-1, keepdim=True), least, 0))


class _Rule(Rule):
    own_dims = (1, 1)
    constants = (1, 2, 3)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        z, w, tau, ctx.regularization = inputs
        return z, w, tau, *outputs[1:]

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        z, w, tau, order, w_order, start = ctx.saved_tensors
        want_w = ctx.needs_input_grad[1]
        places = order, w_order, start
        dz, dw, dtau = _permutahedron_backward.pull(grad, z, w, tau, *places, ctx.regularization, want_w)
        dw = gradient(ctx, 1, dw, w.shape, w.dtype)
        return dz, dw, gradient(ctx, 2, dtau, tau.shape, tau.dtype), None

    @staticmethod
    def jvp(
        ctx: Any, dz: Tensor | None, dw: Tensor | None, dtau: Tensor | None, *_: None
    ) -> tuple[Tensor, None, None, None]:
        dy = kernels.jvp_permutahedron((dz, dw, dtau), ctx.saved_tensors, ctx.regularization)
        return dy, None, None, None


def _backward_fake(grad: Tensor, z: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape, dtype = z.shape if rest[-1] else (0,), torch.promote_types(w.dtype, torch.float32)
    dtau = z.new_empty(z.shape[:-1], dtype=wide_dtype(z.device))
    return z.new_empty(z.shape), z.new_empty(shape, dtype=dtype), dtau


class _OfBlocks(Rule):
    own_dims = (1, 1)
    differentiable = False


_permutahedron = define("permutahedron", kernels.permutahedron, "z, z int32, z int32, z int32", _Rule)
_permutahedron_backward = define("permutahedron_backward", kernels.permutahedron_backward, _backward_fake)
_power_blocks = define("power_blocks", kernels.power_blocks, "z int32, z int32, z int32, z wide", _OfBlocks)
