"""Pareto sampling: the k units with the smallest of random ranking variables (Rosén 1997).

The ranking variables are odds of uniforms over odds of the inclusion probabilities; in logarithms
logit U_i − θ_i, where θ = logit π gives nearly the inclusion probabilities π. The adjustment
θ_i = logit π_i − π_i(1 − π_i)(π_i − ½)/d², d = Σπ(1 − π), brings them closer (Bondesson, Traat,
Lundqvist 2006; Wijk, Vinuesa, Azizpour 2025).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._core import eager
from khot._kernels.reference.draws import adjusted
from khot._kernels.reference.order_sampling import LEAST
from khot._kernels.reference.phantom import distinct, size
from khot.sampling import _order as order

__all__ = ["draw", "draw_exact", "draw_small", "joint", "log_prob", "marginals"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    rows = distinct(probs)
    return order.draw(_parameters(rows), size(rows), probs.shape, generator)


def draw_small(probs: Tensor, dim: int, generator: torch.Generator | None, exact: bool) -> Tensor | None:
    """As :func:`draw`, or :func:`draw_exact`, along a dim, of a small plain tensor; None for everything else,
    with no random number used."""
    if torch.compiler.is_compiling():
        return None
    return eager.pareto(probs, dim, generator, math.inf if exact else LEAST)


def draw_exact(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """As :func:`draw`, with the parameters whose inclusion probabilities are probs."""
    rows = distinct(probs)
    k = size(rows)
    return order.draw(order.calibrate(rows, k.double()), k, probs.shape, generator)


def marginals(probs: Tensor) -> Tensor:
    """The inclusion probabilities of :func:`draw`."""
    return order.inclusion(_parameters(probs), size(probs).double())[0]


def log_prob(value: Tensor, probs: Tensor) -> Tensor:
    """log P(S) under :func:`draw`, of the broadcast batch shape; differentiable in probs, twice."""
    return order.log_prob(value, _live_parameters(probs), size(probs.detach()))


def joint(probs: Tensor) -> Tensor:
    """The joint inclusion probabilities of :func:`draw`."""
    return order.joint(_parameters(probs), size(probs).double())


def _parameters(probs: Tensor) -> Tensor:
    """θ (*batch, n): adjusted by the formula, or calibrated where that is not enough; ±inf if certain."""
    theta, d = adjusted(probs, LEAST)
    few = d.squeeze(-1) < LEAST
    if bool(few.any()):
        rows = probs[few]
        theta[few] = order.calibrate(rows, size(rows).double())
    return theta


def _live_parameters(probs: Tensor) -> Tensor:
    """As :func:`_parameters`, differentiable in probs; certain units stay out of the gradient."""
    certain = (probs <= 0) | (probs >= 1)
    variance = probs * (1 - probs)
    d = variance.sum(-1, keepdim=True)
    theta = torch.logit(probs.masked_fill(certain, 0.5)) - variance * (probs - 0.5) / d.clamp(min=LEAST) ** 2
    theta = torch.where(certain, torch.where(probs > 0.5, torch.inf, -torch.inf), theta)
    few = d.squeeze(-1) < LEAST
    if bool(few.any()):
        rows = probs[few]
        theta = theta.clone()
        theta[few] = order.solve(rows, size(rows.detach()).double())
    return theta
