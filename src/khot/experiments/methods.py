"""The methods that Tables 3 and 4 of sigmoid-topk compare: k-hot samples of logits, with a gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from khot import baselines, estimators
from khot.sampling._noise import gumbel_noise
from khot.topk import topk_mask

__all__ = ["LABELS", "METHODS", "draw"]

# After this many corrections iterative Poisson sampling takes the size it has.
ROUNDS = 3


def draw(method: str, logits: Tensor, k: int) -> Tensor:
    """Samples (..., n) of zeros and ones with k ones (NCPSS: about k), and that method's gradient."""
    return METHODS[method](logits, k)


def sequential_softmax(logits: Tensor, k: int) -> Tensor:
    """The top k of perturbed logits, with the gradient of their relaxation (Xie and Ermon 2019)."""
    perturbed = logits + gumbel_noise(logits)
    relaxed = baselines.sequential_softmax_topk(perturbed, k)
    return topk_mask(perturbed.detach(), k) + (relaxed - relaxed.detach())


def ncpss(logits: Tensor, k: int) -> Tensor:
    """NCPSS (Pervez, Lippe, Gavves 2023): rescaled sigmoids, iterative Poisson sampling, straight-through."""
    probs = baselines.rescaled_sigmoid_topk(logits, k)
    return iterative_poisson(probs.detach(), k) + (probs - probs.detach())


def iterative_poisson(probs: Tensor, k: int) -> Tensor:
    """Independent draws, corrected: too many are drawn again among the drawn, what is missing among the rest.

    The probabilities of those among which a correction draws are rescaled, linearly as those of NCPSS are, so
    that they sum to what is wanted. Sizes come closer to k with each round, but need not reach it.
    """
    x = torch.bernoulli(probs)
    for _ in range(ROUNDS):
        size = x.sum(-1, keepdim=True)
        over = size > k
        among = torch.where(over, x, 1 - x)
        wanted = torch.where(over, k, k - size)
        count, total = among.sum(-1, keepdim=True), (among * probs).sum(-1, keepdim=True)
        down = probs * wanted / total.clamp_min(1e-12)
        up = 1 - (1 - probs) * (count - wanted) / (count - total).clamp_min(1e-12)
        drawn = torch.bernoulli(torch.where(total >= wanted, down, up).clamp(0, 1)) * among
        x = torch.where(over, drawn, x + drawn)
    return x


# The pivotal design has exact inclusion probabilities, whatever they are, and needs no calibration.
def _straight_through(logits: Tensor, k: int) -> Tensor:
    return estimators.straight_through(logits, k, design="pivotal")


def _second_order(logits: Tensor, k: int) -> Tensor:
    return estimators.second_order(logits, k, design="pivotal")


METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sequential_softmax": sequential_softmax,
    "ncpss": ncpss,
    "simple": estimators.simple,
    "straight_through": _straight_through,
    "second_order": _second_order,
    "gumbel": estimators.gumbel,
}

# As the paper's tables call them.
LABELS = {
    "sequential_softmax": "Xie & Ermon",
    "ncpss": "NCPSS",
    "simple": "SIMPLE",
    "straight_through": "straight-through (πST)",
    "second_order": "second order (πST2)",
    "gumbel": "Gumbel-σ_k",
}
