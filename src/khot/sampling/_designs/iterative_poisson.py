"""Iterative Poisson sampling: a Poisson draw, and corrections of its size (Pervez, Lippe, Gavves 2023).

Where there are too many units, a correction draws k of them again, in expectation; where there are too few,
it draws the missing ones among the others. The probabilities of the units among which it draws are moved
linearly, towards 0 or 1, so that they sum to the wanted number. Sizes come closer to k in each round, but
need not reach it, and neither they nor the inclusion probabilities are tractable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.reference.phantom import size
from khot.sampling._designs import poisson

__all__ = ["ROUNDS", "draw"]

ROUNDS = 3  # of corrections; our choice, as in the experiments
TINY = 1e-300


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    k = size(probs).unsqueeze(-1)
    x = poisson.draw(probs, generator)
    for _ in range(ROUNDS):
        total = x.sum(-1, keepdim=True)
        over = total > k
        among = torch.where(over, x, ~x)
        x = torch.where(over, False, x) | poisson.draw(
            redrawn(probs, among, torch.where(over, k, k - total)), generator
        )
    return x


def redrawn(probs: Tensor, among: Tensor, wanted: Tensor) -> Tensor:
    """The probabilities of a correction: 0 outside of ``among``, and inside with the sum ``wanted``."""
    certain = among & (probs == 1)
    count, total = among.sum(-1, keepdim=True), probs.where(among, 0).sum(-1, keepdim=True)
    down = probs * (wanted / total.clamp_min(TINY))
    up = 1 - (1 - probs) * ((count - wanted) / (count - total).clamp_min(TINY))
    moved = torch.where(total >= wanted, down, up).masked_fill(probs == 0, 0).masked_fill(certain, 1)
    return moved.clamp(0, 1).where(among, 0)
