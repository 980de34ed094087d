"""Order sampling with Pareto variables: the draw, and its law, differentiable in the parameters by autograd.

The formulas are those of :mod:`khot._kernels.reference.order_sampling`, which has the inclusion probabilities
and the calibration as kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot._kernels.reference.order_sampling import coefficients
from khot._ops import poisson_binomial as operators
from khot._ops import tilting as conditional
from khot._ops import uniform as philox
from khot._ops.calibration import conjugate_gradients
from khot._ops.draws import order_sample
from khot._ops.tilting import mixture, tilt_rows
from khot.sampling import conditional_poisson

__all__ = ["calibrate", "draw", "inclusion", "joint", "log_prob", "solve"]

LEAST = 1e-24  # of the squared residual of the derivatives, beside its first: θ itself is known to 1e-8


def draw(theta: Tensor, k: Tensor, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """The k units of the least logit U_i − θ_i in each row, as a mask of this shape."""
    seed = philox.new_seed(theta.device, generator)
    chosen: Tensor = order_sample(theta.expand(shape), k.expand(shape[:-1]), seed)
    return chosen


def calibrate(probs: Tensor, k: Tensor) -> Tensor:
    """θ (*batch, n) with inclusion probabilities probs within 1e-8; ±inf for certain units."""
    theta: Tensor = operators.order_calibrate(torch.logit(probs), k)
    return theta


def solve(probs: Tensor, k: Tensor) -> Tensor:
    """As :func:`calibrate`, differentiable in probs, twice, along changes that keep their sum."""
    return _Calibrate.apply(probs, k)


def inclusion(theta: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """π and 1 − π, each of full relative accuracy, for θ (*batch, n) in float64 and k (*batch). Constants."""
    pi, out = operators.order_inclusion(tilt_rows(theta.detach(), k).z, k)
    return pi, out


def _live_inclusion(theta: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`inclusion`, differentiable in θ."""
    trials = tilt_rows(theta, k)
    c, settled = coefficients(trials.z, k, trials.change)
    _, pi, out = conditional.inclusion(trials)
    mean = (c * pi).sum(-1, keepdim=True).masked_fill(settled, 1)
    more = (conditional.covariance_product(trials, c) / mean).masked_fill(settled, 0)
    return (pi + more).clamp(0, 1), (out - more).clamp(0, 1)


def joint(theta: Tensor, k: Tensor) -> Tensor:
    """P(i ∈ S and j ∈ S), (*batch, n, n), with π on the diagonal."""
    trials = tilt_rows(theta, k)
    c, settled = coefficients(trials.z, trials.k, trials.change)
    weight, ratio = mixture(trials)
    # for independent trials, E[x_i x_j Σ c x] = r_i r_j Σ c r + c_i r_i (1 − r_i) r_j + c_j r_j (1 − r_j) r_i
    total = (ratio * c.unsqueeze(-2)).sum(-1)
    mixed = ((weight * total).unsqueeze(-1) * ratio).mT @ ratio
    cross = (weight.unsqueeze(-1) * ratio * (1 - ratio) * c.unsqueeze(-2)).mT @ ratio
    mean = (weight * total).sum(-1).real[..., None, None]
    both = ((mixed + cross + cross.mT).real / mean).clamp(0, 1)
    p = trials.z.sigmoid()
    both = torch.where(settled.unsqueeze(-1), p.unsqueeze(-1) * p.unsqueeze(-2), both)
    both.diagonal(dim1=-2, dim2=-1).copy_(inclusion(theta, k)[0])
    return both


def log_prob(value: Tensor, theta: Tensor, k: Tensor) -> Tensor:
    """log P(S), of the broadcast batch shape; −inf where S cannot be drawn.

    P(S) is an integral over the largest ranking variable of S. It is computed numerically, for all S by the
    same n coefficients. Differentiable in θ, twice.
    """
    k = k.double()
    base = conditional_poisson.log_prob(value, theta, k)
    return torch.where(base == -torch.inf, base, base + _log_weight(value, theta, k))


def _log_weight(value: Tensor, theta: Tensor, k: Tensor) -> Tensor:
    """log P(S), less that under the conditional Poisson design with the same θ: log Σ_S c − log E[Σ c x].

    Zero in rows whose units are all certain, or nearly so.
    """
    trials = tilt_rows(theta, k)
    c, settled = coefficients(trials.z, trials.k, trials.change)
    mean = (c * conditional.inclusion(trials)[1]).sum(-1, keepdim=True).masked_fill(settled, 1)
    share = c.where(value.bool(), 0).sum(-1, keepdim=True)
    # no unit with a coefficient: such an S is empty, or cannot be drawn
    share = share.masked_fill(settled | (share == 0), 1)
    return (share.log() - mean.log()).squeeze(-1)


class _Calibrate(Function):
    """θ with π(θ) = probs, up to a constant.

    The Jacobian of π(θ) has the entries −∫ f_i f_j P(k − 1 of the others are below t) dt off the diagonal,
    and its rows sum to 0: like a covariance it is symmetric and semidefinite.
    """

    @staticmethod
    def forward(ctx: Any, probs: Tensor, k: Tensor) -> Tensor:
        theta = calibrate(probs, k)
        ctx.save_for_backward(theta, k)
        return theta

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Solve.apply(*ctx.saved_tensors, grad), None


class _Solve(Function):
    """u with J(θ)u = v for v whose sum is 0, J being the Jacobian of π(θ)."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.enable_grad():
            at = theta.detach().requires_grad_()
            pi, out = _live_inclusion(at, k)
        free = theta.isfinite() & (pi * out > 0)
        u = conjugate_gradients(
            lambda u: torch.autograd.grad(pi, at, u, retain_graph=True)[0],
            (pi * out).detach(),
            free,
            v,
            LEAST,
        )
        ctx.save_for_backward(theta, k, u)
        return u

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        theta, k, u = ctx.saved_tensors
        w = _Solve.apply(theta, k, grad)
        with torch.enable_grad():
            at = theta.detach().requires_grad_()
            image = torch.autograd.grad(_live_inclusion(at, k)[0], at, u, create_graph=True)[0]
            (by_theta,) = torch.autograd.grad(image, at, w)
        return -by_theta, None, w
