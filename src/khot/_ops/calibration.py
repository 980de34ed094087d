"""The logits of the conditional Poisson design with prescribed inclusion probabilities.

The fixed point θ ← θ + logit probs − logit π(θ) is iterated with Anderson's acceleration; its derivative
solves Cov(θ) dθ = dprobs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot._core.torch_internals import differentiable
from khot._ops import poisson_binomial as operators
from khot._ops.soft_topk import threshold_map
from khot._ops.tilting import covariance_product, in_front, inclusion, tilt_rows
from khot.cdfs import Logistic

__all__ = ["conjugate_gradients", "solve"]

TINY = torch.finfo(torch.float64).tiny
CONJUGATE_GRADIENTS = 200
LEAST = 1e-30  # of the squared residual, beside the first one


def solve(probs: Tensor) -> Tensor:
    """θ with π(θ) = probs and Σσ(θ) = k, for rows (*batch, n) in float64.

    Each row sums to an integer, up to the rounding of the dtype that it came from.
    """
    k = probs.detach().sum(-1).round()
    theta = _Calibrate.apply(probs, k)
    _, hi, lo = threshold_map(theta, k, theta.new_ones(()), Logistic(), "threshold")
    decided = hi.abs() == torch.finfo(hi.dtype).max  # no unit is free
    shift = (hi + lo).masked_fill(decided, 0)
    return theta - shift.unsqueeze(-1)


class _Calibrate(Function):
    """θ with π(θ) = probs, up to a constant."""

    @staticmethod
    def forward(probs: Tensor, k: Tensor) -> Tensor:
        theta: Tensor = operators.calibrate(torch.logit(probs), k)[0]
        return theta

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])
        ctx.save_for_forward(output, inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        theta, k = ctx.saved_tensors
        return _Solve.apply(theta, k, grad), None

    @staticmethod
    @differentiable
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        theta, k = ctx.saved_tensors
        return _Solve.apply(theta, k, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
        return _Calibrate.apply(*in_front(info, in_dims, args)), 0


class _Solve(Function):
    """u with Cov(θ)u = v, for v whose sum is 0; u is unique up to a constant."""

    @staticmethod
    def forward(theta: Tensor, k: Tensor, v: Tensor) -> Tensor:
        trials = tilt_rows(theta, k)
        _, pi, out = inclusion(trials)
        free = (pi * out > 0) & theta.isfinite()
        return conjugate_gradients(lambda u: covariance_product(trials, u), pi * out, free, v, LEAST)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)
        ctx.save_for_forward(*inputs[:2], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        theta, k, u = ctx.saved_tensors
        w = _Solve.apply(theta, k, grad)
        vjp = torch.func.vjp(lambda theta: covariance_product(tilt_rows(theta, k), u), theta)[1]
        return -vjp(w)[0], None, w

    @staticmethod
    @differentiable
    def jvp(ctx: Any, of_theta: Tensor | None, _: None, of_v: Tensor | None) -> Tensor:
        theta, k, u = ctx.saved_tensors
        right = torch.zeros_like(u) if of_v is None else of_v
        if of_theta is not None:
            image = torch.func.jvp(
                lambda theta: covariance_product(tilt_rows(theta, k), u), (theta,), (of_theta,)
            )[1]
            right = right - image
        return _Solve.apply(theta, k, right)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
        return _Solve.apply(*in_front(info, in_dims, args)), 0


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], variance: Tensor, free: Tensor, v: Tensor, least: float
) -> Tensor:
    """u with Cu = v, for a matrix like a covariance: symmetric, semidefinite, that maps constants to 0.

    Conjugate gradients, preconditioned by the variances: with many units, the covariances are small.

    Args:
        product: u -> Cu, for u (*batch, n).
        variance: nearly the diagonal of C, (*batch, n).
        free: which units take part; u is 0 for the others.
        v: the right side, whose sum is 0 in each row.
        least: the squared residual at which the iteration ends, as a part of the first one.
    """
    variance = variance.masked_fill(~free, 1)
    total = variance.where(free, 0).sum(-1, keepdim=True).clamp(TINY)

    def precondition(r: Tensor) -> Tensor:
        """Divide by the variances, and remove the constant, which C maps to 0 but rounding amplifies."""
        u = (r / variance).masked_fill(~free, 0)
        mean = (u * variance).sum(-1, keepdim=True) / total
        return (u - mean).masked_fill(~free, 0)

    r = v.masked_fill(~free, 0)
    u = torch.zeros_like(r)
    d = precondition(r)
    rho = (r * d).sum(-1, keepdim=True)
    enough = least * rho
    for _ in range(CONJUGATE_GRADIENTS):
        active = rho > enough
        if not bool(active.any()):
            break
        image = product(d)
        alpha = (rho / (d * image).sum(-1, keepdim=True)).where(active, 0)
        u, r = u + alpha * d, r - alpha * image
        z = precondition(r)
        rho, before = (r * z).sum(-1, keepdim=True), rho
        d = z + (rho / before).where(active, 0) * d
    return u
