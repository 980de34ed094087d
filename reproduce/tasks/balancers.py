"""Rules that balance experts by biases, written from their descriptions and with no framework's code.

Each takes the scores of a batch, (tokens, experts), the biases that were added to them, how many experts a
token gets, and how many updates came before; and returns the next biases.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BINS", "RATE", "centred", "histogram", "load", "sign_rule", "wanted"]

BINS, RATE = 1_000, 1e-3


def load(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """How many tokens each expert gets, (experts,)."""
    chosen = (scores + bias).topk(k, -1).indices
    return chosen.flatten().bincount(minlength=scores.shape[-1]).double()


def wanted(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """The bias at which each expert would just get each token, if no other changed its own."""
    return (scores + bias).topk(k + 1, -1).values[:, k:] - scores


def centred(bias: Tensor) -> Tensor:
    """Biases whose mean is 0; they choose the same."""
    return bias - bias.mean()


def histogram(scores: Tensor, bias: Tensor, k: int, updates: int = 0) -> Tensor:
    """The next bias from quantiles that are read from bins of equal width."""
    needed, p = wanted(scores, bias, k), k / scores.shape[-1]
    low, high = bias.min() - 1, bias.max() + 1
    width = (high - low) / BINS
    place = ((needed - low) / width).floor().clamp(0, BINS - 1).long()
    counts = torch.zeros(BINS, needed.shape[-1]).scatter_add(0, place, torch.ones_like(needed))
    below = counts.cumsum(0)
    rank = p * len(needed)
    i = (below < rank).sum(0, keepdim=True).clamp(max=BINS - 1)
    inside = counts.gather(0, i)
    part = ((rank - below.gather(0, i) + inside) / inside.clamp(min=1)).clamp(0, 1)
    return centred(low + width * (i + part).squeeze(0))


def sign_rule(scores: Tensor, bias: Tensor, k: int, updates: int = 0, rate: float = RATE) -> Tensor:
    """The next bias, which moves by the rate towards the mean load."""
    loads = load(scores, bias, k)
    return bias + rate * (loads.mean() - loads).sign().float()
