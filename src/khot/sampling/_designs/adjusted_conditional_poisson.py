"""Conditional Poisson sampling with parameters by a formula instead of calibration.

θ_i = logit π_i + (½ − π_i)/d with d = Σπ(1 − π): to first order in 1/d the inclusion probabilities are then π
(Hájek 1964, theorem 5.2, solved for the parameters). Where d is small, the parameters are calibrated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.reference.phantom import numbered, size
from khot._ops.calibration import solve
from khot.sampling import conditional_poisson
from khot.sampling._designs import poisson
from khot.sampling._halving import draw_rows

__all__ = ["draw", "joint", "log_prob", "marginals"]

LEAST = 2.5  # the least d for the formula: the error is at most 1e-3 from there on, and 1.4e-2 at d = 1


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    rows, which = numbered(probs)
    return draw_rows(_parameters(rows), size(rows).double(), which, generator)


def log_prob(value: Tensor, probs: Tensor) -> Tensor:
    """log P(S), of the broadcast batch shape; differentiable in probs."""
    return conditional_poisson.log_prob(value, _parameters(probs), size(probs.detach()))


def joint(probs: Tensor) -> Tensor:
    """P(i ∈ S and j ∈ S), with :func:`marginals` on the diagonal; differentiable in probs."""
    return conditional_poisson.joint_marginals(_parameters(probs), size(probs.detach()))


def marginals(probs: Tensor) -> Tensor:
    """The inclusion probabilities of :func:`draw`; differentiable in probs."""
    return conditional_poisson.marginals(_parameters(probs), size(probs.detach()))


def _parameters(probs: Tensor) -> Tensor:
    d = (probs * (1 - probs)).sum(-1, keepdim=True)
    theta = poisson.log_odds(probs) + (0.5 - probs) / d.clamp(min=LEAST)
    few = d.squeeze(-1) < LEAST
    if bool(few.any()):
        theta = theta.clone()
        theta[few] = solve(probs[few])
    return theta
