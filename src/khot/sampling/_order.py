"""Order sampling with Pareto variables: its inclusion probabilities, and the parameters for prescribed ones.

Let L_i = logit U_i − θ_i, whose distribution function is σ(t + θ_i), and S the k units with the smallest.
With t the largest of these, P(S) = ∫ Σ_{i∈S} σ'(t + θ_i) Π_{j∈S∖i} σ(t + θ_j) Π_{j∉S} σ(−t − θ_j) dt, so that

    P(S) = exp(Σ_{i∈S} θ_i) Σ_{i∈S} c_i,    c_i = ∫ σ(−t − θ_i) e^(kt) Π_j σ(−t − θ_j) dt

(Traat, Bondesson, Meister 2004): a conditional Poisson design, weighted by the sum of the coefficients c_i.
Everything but :func:`calibrate` is differentiable in θ by autograd, under the same quadrature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import softplus

from khot._kernels.reference.fixed_point import fixed_point, start
from khot._ops import tilting as conditional
from khot._ops.calibration import conjugate_gradients
from khot._ops.tilting import Tilted, mixture, tilt_rows

__all__ = ["calibrate", "inclusion", "joint", "log_weight", "solve"]

NEAR = 1e-7  # one more step leads from this error of the probabilities to less than 1e-8
NEGLIGIBLE = 40.0  # e^−40 times the integrand's maximum is less than its rounding error
# The trapezoidal rule has the error exp(−2π·π/step), because the integrand's poles are π away from the real
# line, and, where the integrand is like a normal density of variance 1/V, exp(−2π²/(step²V)): both are at
# most 1e-15.
STEP, NORMAL_STEP = 0.5, 0.75
LARGEST = 600.0  # the largest t: no exponential overflows, and only a logit below −560 would need more
# Σπ(1 − π) below which the θ of the conditional Poisson design serve: they make the unlikely units at most
# log(1/π) times as likely as prescribed, which is less than 1e-8.
SETTLED = 1e-10
LEAST = 1e-24  # of the squared residual of the derivatives, beside its first: θ itself is known to 1e-8
AT_ONCE = 1 << 16  # entries times nodes that are computed together
NEWTON = 6  # Newton steps: the ends of the integral need not be exact, and no step falls short of them


def calibrate(probs: Tensor, k: Tensor) -> Tensor:
    """θ (*batch, n) with inclusion probabilities probs within 1e-8; ±inf for certain units."""
    goal = tilt_rows(torch.logit(probs), k).z
    settled = _variance(goal) < SETTLED
    # the iteration needs no logit π(θ) of these rows, which may be infinite
    started = torch.where(settled, goal.sign() * torch.inf, goal)
    return torch.where(settled, start(goal, k), fixed_point(started, k, inclusion, NEAR)[0])


def solve(probs: Tensor, k: Tensor) -> Tensor:
    """As :func:`calibrate`, differentiable in probs, twice, along changes that keep their sum."""
    return _Calibrate.apply(probs, k)


def inclusion(theta: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """π and 1 − π, each of full relative accuracy, for θ (*batch, n) in float64 and k (*batch).

    Under the conditional Poisson design E[x_j Σ c x]/E[Σ c x] = π_j + Cov(x_j, Σ c x)/Σ c π.
    """
    trials = tilt_rows(theta, k)
    c, settled = _coefficients(trials)
    _, pi, out = conditional.inclusion(trials)
    mean = (c * pi).sum(-1, keepdim=True).masked_fill(settled, 1)
    more = (conditional.covariance_product(trials, c) / mean).masked_fill(settled, 0)
    return (pi + more).clamp(0, 1), (out - more).clamp(0, 1)


def joint(theta: Tensor, k: Tensor) -> Tensor:
    """P(i ∈ S and j ∈ S), (*batch, n, n), with π on the diagonal."""
    trials = tilt_rows(theta, k)
    c, settled = _coefficients(trials)
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


def log_weight(value: Tensor, theta: Tensor, k: Tensor) -> Tensor:
    """log P(S), less that under the conditional Poisson design with the same θ: log Σ_S c − log E[Σ c x].

    Zero in rows whose units are all certain, or nearly so.
    """
    trials = tilt_rows(theta, k)
    c, settled = _coefficients(trials)
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
            pi, out = inclusion(at, k)
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
            image = torch.autograd.grad(inclusion(at, k)[0], at, u, create_graph=True)[0]
            (by_theta,) = torch.autograd.grad(image, at, w)
        return -by_theta, None, w


def _variance(z: Tensor) -> Tensor:
    """Of the sum of trials with logits z, (*batch, 1)."""
    return (z.sigmoid() * (-z).sigmoid()).sum(-1, keepdim=True)


def _coefficients(trials: Tilted) -> tuple[Tensor, Tensor]:
    """c, up to one factor per row, and whether the row has no random unit, or nearly none, (*batch, 1).

    The integrand is σ(−t − z_i) e^−D(t) with D(t) = Σ [softplus(t + z) − softplus(z)] − kt, which is convex
    and has its minimum, 0, at t = 0. Units with z = ∞ are left out, and k is reduced by their number.
    """
    always = trials.z == torch.inf
    z = trials.z.masked_fill(always, -torch.inf)
    k = trials.k - always.sum(-1)
    settled = (k <= 0) | (k >= z.isfinite().sum(-1)) | (_variance(trials.z).squeeze(-1) < SETTLED)
    level = softplus(z, threshold=40).sum(-1)
    variance = _variance(trials.z).squeeze(-1).masked_fill(settled, 1)

    def end(side: int, least: Tensor) -> tuple[Tensor, Tensor]:
        """t beyond which D exceeds least, and the variance of the size there."""
        t = side * (2 * least / variance).sqrt()
        for _ in range(NEWTON):
            y = z + t.unsqueeze(-1)
            t = t - (softplus(y, threshold=40).sum(-1) - level - k * t - least) / (y.sigmoid().sum(-1) - k)
        t = t.masked_fill(settled, side)
        p = (z + t.unsqueeze(-1)).sigmoid()
        return t, (p * (1 - p)).sum(-1)

    # where z_i is large, σ(−t − z_i) is small around t = 0, so that the lower tail matters more
    low, low_variance = end(-1, NEGLIGIBLE + softplus(z.amax(-1)))
    high, high_variance = end(1, torch.full_like(low, NEGLIGIBLE))
    high = high.clamp(max=LARGEST)
    widest = torch.maximum(variance, torch.maximum(low_variance, high_variance))
    step = (NORMAL_STEP / widest.sqrt()).clamp(max=STEP)
    nodes = int(((high - low) / step).max().ceil()) + 1 if low.numel() else 0
    # the nodes and the level are constants; what a row without a random unit would have is not used
    odds = (z + trials.change.masked_fill(settled.unsqueeze(-1), 0)).exp()
    c = torch.zeros_like(z)
    # all nodes at once are faster, and autograd keeps all of them anyway
    if odds.requires_grad or nodes * odds.numel() <= AT_ONCE:
        t = low.unsqueeze(-1) + (high - low).unsqueeze(-1) * torch.linspace(
            0, 1, nodes, dtype=low.dtype, device=low.device
        )
        raised = 1 + odds.unsqueeze(-2) * t.exp().unsqueeze(-1)
        D = raised.log().sum(-1) - level.unsqueeze(-1) - k.unsqueeze(-1) * t
        c, nodes = ((-D).exp().unsqueeze(-1) / raised).sum(-2), 0
    for node in range(nodes):
        t = low + (high - low) * (node / (nodes - 1))
        raised = (odds * t.exp().unsqueeze(-1)).add_(1)
        D = raised.log().sum(-1) - level - k * t
        c.addcdiv_((-D).exp().unsqueeze(-1), raised)
    c = c.masked_fill(always, 0)
    return c / c.detach().amax(-1, keepdim=True), settled.unsqueeze(-1)
