"""Systematic sampling: the units lie end to end on a line, and one uniform places ticks 1 apart on it."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.reference.phantom import distinct, size

__all__ = ["draw", "joint"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A unit is selected if its interval, of length π, contains one of the ticks u, u + 1, ..., u + k − 1.

    Lengths are integer multiples of 1/``scale``. Sums of floats are rounded, so that a unit could get two
    ticks, and on a GPU they are not even monotone. With integers, rounding affects only where the line ends.
    """
    n, rows = probs.shape[-1], probs.shape[:-1]
    probs = distinct(probs)
    bits = 62 - n.bit_length()  # n·2^bits is an int64
    scale = 2**bits
    uncertain = (probs > 0) & (probs < 1)
    k = (size(probs) - (probs == 1).sum(-1)).unsqueeze(-1)
    line = (probs * scale).round_().long().mul_(uncertain).cumsum_(-1)
    uniform = torch.randint(scale, (*rows, 1), device=probs.device, generator=generator)
    ticks = torch.minimum((line + (scale - 1 - uniform)) >> bits, k)
    places = uncertain.cumsum(-1)
    ticks = torch.maximum(ticks, k - (places[..., -1:] - places))
    before = torch.nn.functional.pad(ticks, (1, 0))[..., :-1]
    return (ticks > before) | (probs == 1)


def joint(probs: Tensor) -> Tensor:
    """P(i and j): how much of their intervals overlaps when the line is wound around a circle of length 1."""
    start = torch.where(probs == 1, 0, probs).cumsum(-1) - probs
    p, q = probs.unsqueeze(-1), probs.unsqueeze(-2)
    apart = (start.unsqueeze(-2) - start.unsqueeze(-1)).remainder(1)  # from the start of i to the start of j
    overlap = torch.minimum(p - apart, q).clamp_(min=0) + torch.minimum(p, apart + q - 1).clamp_(min=0)
    overlap.diagonal(dim1=-2, dim2=-1).copy_(probs)
    return overlap
