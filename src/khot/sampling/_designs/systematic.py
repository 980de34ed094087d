"""Systematic sampling: the units lie end to end on a line, and one uniform places ticks 1 apart on it."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.reference.draws import systematic
from khot._kernels.reference.phantom import distinct
from khot._ops import uniform as philox

__all__ = ["draw", "joint"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    uniform = philox.rand(torch.Size((*probs.shape[:-1], 1)), probs.device, generator)
    return systematic(distinct(probs), uniform)


def joint(probs: Tensor) -> Tensor:
    """P(i and j): how much of their intervals overlaps when the line is wound around a circle of length 1."""
    start = torch.where(probs == 1, 0, probs).cumsum(-1) - probs
    p, q = probs.unsqueeze(-1), probs.unsqueeze(-2)
    apart = (start.unsqueeze(-2) - start.unsqueeze(-1)).remainder(1)  # from the start of i to the start of j
    overlap = torch.minimum(p - apart, q).clamp_(min=0) + torch.minimum(p, apart + q - 1).clamp_(min=0)
    overlap.diagonal(dim1=-2, dim2=-1).copy_(probs)
    return overlap
