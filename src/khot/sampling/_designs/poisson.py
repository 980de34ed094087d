"""Poisson sampling: every unit by itself, with its inclusion probability; the size is random (Hájek 1958)."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._ops import uniform as philox

__all__ = ["draw", "joint", "log_odds", "log_prob"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    chosen: Tensor = philox.rand(probs.shape, probs.device, generator) < probs
    return chosen


def log_prob(value: Tensor, probs: Tensor) -> Tensor:
    """log Π π_i^x_i (1 − π_i)^(1 − x_i), of the broadcast batch shape; differentiable in probs."""
    chosen = value.bool()
    likely = torch.where(chosen, probs, 1 - probs)
    possible = likely > 0  # the others would have a gradient of 0·inf
    log = likely.masked_fill(~possible, 1).log()
    return log.sum(-1).masked_fill(~possible.all(-1), -torch.inf)


def joint(probs: Tensor) -> Tensor:
    """π_i π_j, with probs on the diagonal; differentiable in probs."""
    diagonal = torch.eye(probs.shape[-1], dtype=torch.bool, device=probs.device)
    return torch.where(diagonal, probs.unsqueeze(-1), probs.unsqueeze(-1) * probs.unsqueeze(-2))


def log_odds(probs: Tensor) -> Tensor:
    """logit π, ±inf for certain units, which stay out of the gradient: there it would be 0·inf."""
    certain = (probs <= 0) | (probs >= 1)
    odds = torch.logit(probs.masked_fill(certain, 0.5))
    return torch.where(certain, torch.where(probs > 0.5, torch.inf, -torch.inf), odds)
