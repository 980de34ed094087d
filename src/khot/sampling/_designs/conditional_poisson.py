"""The conditional Poisson design, given by its inclusion probabilities: the one of maximum entropy.

:mod:`khot.sampling.conditional_poisson` is the same family, given by its natural parameters θ. Calibration
finds the θ that have the prescribed inclusion probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.reference import draws
from khot._ops import uniform as philox
from khot._ops.calibration import solve
from khot.sampling import conditional_poisson

__all__ = ["draw", "joint", "log_prob"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return draws.conditional_poisson(probs, philox.new_seed(probs.device, generator))


def log_prob(value: Tensor, probs: Tensor) -> Tensor:
    """log P(S), of the broadcast batch shape; differentiable in probs."""
    return conditional_poisson.log_prob(value, solve(probs), probs.detach().sum(-1).round())


def joint(probs: Tensor) -> Tensor:
    """P(i ∈ S and j ∈ S), (*batch, n, n), with probs on the diagonal; differentiable in probs."""
    return conditional_poisson.joint_marginals(solve(probs), probs.detach().sum(-1).round())
