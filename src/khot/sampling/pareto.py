"""Pareto sampling: the k units with the smallest of random ranking variables (Rosén 1997).

The ranking variables are odds of uniforms over odds of the inclusion probabilities; in logarithms
logit U_i − θ_i, where θ = logit π gives nearly the inclusion probabilities π. The adjustment
θ_i = logit π_i − π_i(1 − π_i)(π_i − ½)/d², d = Σπ(1 − π), brings them closer (Bondesson, Traat,
Lundqvist 2006; Wijk, Vinuesa, Azizpour 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot.sampling.phantom import distinct, size

__all__ = ["draw", "draw_exact"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    rows = distinct(probs)
    return _rank(adjusted(rows), size(rows), probs.shape, generator)


def draw_exact(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    raise NotImplementedError


def adjusted(probs: Tensor) -> Tensor:
    """The parameters θ (*batch, n); ±inf for the certain units."""
    variance = probs * (1 - probs)
    d = variance.sum(-1, keepdim=True)
    return torch.logit(probs) - variance * (probs - 0.5) / d.clamp(min=1e-300) ** 2


def _rank(theta: Tensor, k: Tensor, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    uniform = torch.rand(shape, dtype=torch.float64, device=theta.device, generator=generator)
    return smallest(torch.logit(uniform) - theta, k)


def smallest(keys: Tensor, k: Tensor) -> Tensor:
    """True for the k smallest keys of each row, exactly k of them also among equals."""
    n = keys.shape[-1]
    most = int(k.max()) if k.numel() else 0
    chosen = torch.zeros(keys.shape, dtype=torch.bool, device=keys.device)
    if keys.numel() == 0 or most == 0:
        return chosen
    if int(k.min()) == most:
        return chosen.scatter_(-1, keys.topk(most, largest=False, sorted=False).indices, True)
    ranked = torch.arange(most, device=keys.device) < k.unsqueeze(-1)
    order = keys.topk(min(most, n), largest=False).indices
    return chosen.scatter_(-1, order, ranked.expand(order.shape))
