"""The conditional Poisson design, given by its inclusion probabilities: the one of maximum entropy.

:mod:`khot.sampling.conditional_poisson` is the same family, given by its natural parameters θ. Calibration
finds the θ that have the prescribed inclusion probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._ops.calibration import parameters, solve
from khot.sampling import conditional_poisson
from khot.sampling._halving import draw_rows, numbered

__all__ = ["draw", "joint", "log_prob"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    rows, which = numbered(probs)
    k = rows.sum(-1).round()
    return draw_rows(parameters(rows, k), k, which, generator)


def log_prob(value: Tensor, probs: Tensor) -> Tensor:
    """log P(S), of the broadcast batch shape; differentiable in probs."""
    return conditional_poisson.log_prob(value, solve(probs), probs.detach().sum(-1).round())


def joint(probs: Tensor) -> Tensor:
    """P(i ∈ S and j ∈ S), (*batch, n, n), with probs on the diagonal; differentiable in probs."""
    return conditional_poisson.joint_marginals(solve(probs), probs.detach().sum(-1).round())
