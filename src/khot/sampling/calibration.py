"""The logits of the conditional Poisson design with prescribed inclusion probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot._core import arguments
from khot._core.precision import on_cpu
from khot._ops.soft_topk import threshold_map
from khot.cdfs import Logistic
from khot.sampling.tilting import covariance_product, in_front, inclusion, tilt_rows

__all__ = ["calibrate", "solve"]

TINY = torch.finfo(torch.float64).tiny
CONJUGATE_GRADIENTS = 200


@on_cpu
def calibrate(probs: Tensor) -> Tensor:
    """The logits θ whose :func:`marginals` are probs: with k = Σ probs, π(θ) = probs.

    They are unique up to a constant, which is chosen so that Σσ(θ) = k. The fixed point
    θ ← θ + logit probs − logit π(θ) is iterated with Anderson's acceleration.

    Args:
        probs: (*batch, n) in [0, 1], with integer sums (to within 8n·eps).

    Returns:
        θ, (*batch, n), of probs' dtype; −inf and +inf for units of probability 0 and 1. Differentiable in
        probs along changes that keep their sum, exactly and to any order: the derivative solves
        Cov(θ) dθ = dprobs.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Source:
        Chen, Dempster, Liu (1994) for the design; Anderson (1965) for the acceleration.

    Example:
        >>> from khot.sampling.conditional_poisson import calibrate, marginals
        >>> logits = calibrate(torch.tensor([0.9, 0.6, 0.5, 0.0]))
        >>> marginals(logits, 2)
        tensor([0.9000, 0.6000, 0.5000, 0.0000])
    """
    arguments.check_input(probs, "probs")
    if not probs.dim():
        raise ValueError("probs must have the units along their last dim, but got a 0-dim tensor")
    arguments.check_values(probs, "probs", low=0, high=1)
    pi = probs.double()
    size = pi.detach().sum(-1)
    slack = 8 * probs.shape[-1] * torch.finfo(probs.dtype).eps
    arguments.check_values(
        (size - size.round()).abs(), "the distance of probs' sum from an integer", low=0, high=slack
    )
    return solve(pi).to(probs.dtype)


def solve(probs: Tensor) -> Tensor:
    """:func:`calibrate` for float64 rows, which sum to integers up to what their first dtype rounded."""
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
        # the nearest probabilities that sum to k exactly: what rounding left of the sum is not to be chased
        return torch.ops.khot.calibrate.default(tilt_rows(torch.logit(probs), k).z, k)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])
        ctx.save_for_forward(output, inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        theta, k = ctx.saved_tensors
        return _Solve.apply(theta, k, grad), None

    @staticmethod
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
        return _conjugate_gradients(theta, k, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        theta, k, u = ctx.saved_tensors
        w = _Solve.apply(theta, k, grad)
        pull = torch.func.vjp(lambda theta: covariance_product(tilt_rows(theta, k), u), theta)[1]
        return -pull(w)[0], None, w

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
        return _Solve.apply(*in_front(info, in_dims, args)), 0


def _conjugate_gradients(theta: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Preconditioned by the variances, next to which the covariances are small where there are many."""
    trials = tilt_rows(theta, k)
    _, pi, out = inclusion(trials)
    variance = pi * out
    free = (variance > 0) & theta.isfinite()
    variance = variance.masked_fill(~free, 1)
    total = variance.where(free, 0).sum(-1, keepdim=True).clamp(TINY)

    def precondition(r: Tensor) -> Tensor:
        """Without the constant, which Cov does not see and rounding would let grow."""
        u = (r / variance).masked_fill(~free, 0)
        mean = (u * variance).sum(-1, keepdim=True) / total
        return (u - mean).masked_fill(~free, 0)

    r = v.masked_fill(~free, 0)
    u = torch.zeros_like(r)
    d = precondition(r)
    rho = (r * d).sum(-1, keepdim=True)
    least = 1e-30 * rho
    for _ in range(CONJUGATE_GRADIENTS):
        active = rho > least
        if not bool(active.any()):
            break
        image = covariance_product(trials, d)
        alpha = (rho / (d * image).sum(-1, keepdim=True)).where(active, 0)
        u, r = u + alpha * d, r - alpha * image
        z = precondition(r)
        rho, before = (r * z).sum(-1, keepdim=True), rho
        d = z + (rho / before).where(active, 0) * d
    return u
