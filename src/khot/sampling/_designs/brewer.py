"""Brewer's method: k units one after the other, with exact inclusion probabilities (Brewer 1975)."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.reference.phantom import size

__all__ = ["draw"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """With r draws left and D the sum of π over the units left, the next is i ∝ π_i (D − π_i)/(D − r π_i).

    D = r + C, where C is the sum of 1 − π over the units drawn. With it the weights are computed without
    subtracting numbers that are nearly equal. Certain units have an infinite weight and are drawn first.
    """
    shape = probs.shape
    chosen = probs == 1
    left = size(probs) - chosen.sum(-1)
    rejected = torch.zeros(shape[:-1], dtype=torch.float64, device=probs.device)  # C
    weight = torch.empty(shape, dtype=torch.float64, device=probs.device)
    for _ in range(int(left.max()) if left.numel() else 0):
        r, C = left.unsqueeze(-1), rejected.unsqueeze(-1)
        torch.div(probs * ((C + r) - probs), C + r * (1 - probs), out=weight)
        edges = weight.masked_fill_(chosen, 0).cumsum_(-1)
        uniform = torch.rand((*shape[:-1], 1), dtype=torch.float64, device=probs.device, generator=generator)
        # right=True finds the first edge above, so that a unit of weight 0 is never drawn
        unit = torch.searchsorted(edges, uniform * edges[..., -1:], right=True)
        unit = unit.clamp_(max=shape[-1] - 1)
        chosen.scatter_(-1, unit, chosen.gather(-1, unit) | (r > 0))
        rejected = rejected + (1 - probs.gather(-1, unit)).squeeze(-1)
        left = left - 1
    return chosen
