"""Repeated Poisson sampling: all units are drawn again until the size is right (Hájek 1964).

That is the conditional Poisson design with the odds of π as its odds. Its inclusion probabilities are not π:
they lie further from ½, and are closer to π the more units are uncertain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.reference.phantom import size
from khot.sampling import conditional_poisson
from khot.sampling._designs import poisson

__all__ = ["draw", "joint", "log_prob", "marginals"]

AT_ONCE = 64  # the most draws of one row in a round; a size is right with probability about 1/√(2πd)


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    n = probs.shape[-1]
    rows = probs.reshape(-1, n)
    k = size(rows)
    chosen = torch.zeros(rows.shape, dtype=torch.bool, device=probs.device)
    left = torch.arange(len(rows), device=probs.device)
    while len(left):
        times = min(AT_ONCE, 1 + len(rows) // len(left))
        x = poisson.draw(rows[left].unsqueeze(1).expand(-1, times, n), generator)
        right = x.sum(-1) == k[left].unsqueeze(-1)
        first = right.int().argmax(-1)
        done = right.any(-1)
        chosen[left[done]] = x[done, first[done]]
        left = left[~done]
    return chosen.reshape(probs.shape)


def log_prob(value: Tensor, probs: Tensor) -> Tensor:
    """log P(S), of the broadcast batch shape; differentiable in probs."""
    return conditional_poisson.log_prob(value, poisson.log_odds(probs), size(probs.detach()))


def joint(probs: Tensor) -> Tensor:
    """P(i ∈ S and j ∈ S), with :func:`marginals` on the diagonal; differentiable in probs."""
    return conditional_poisson.joint_marginals(poisson.log_odds(probs), size(probs.detach()))


def marginals(probs: Tensor) -> Tensor:
    """The inclusion probabilities of :func:`draw`; differentiable in probs."""
    return conditional_poisson.marginals(poisson.log_odds(probs), size(probs.detach()))
