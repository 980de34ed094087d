"""The methods that Tables 3 and 4 of sigmoid-topk compare: k-hot samples from logits, with a gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import khot
from khot import baselines, estimators

__all__ = ["LABELS", "METHODS", "draw", "iterative_poisson"]

# The number of corrections in iterative Poisson sampling, after which the size may still differ from k.
ROUNDS = 3


def draw(method: str, logits: Tensor, k: int) -> Tensor:
    """Samples (..., n) of zeros and ones with k ones (NCPSS: about k), which have that method's gradient."""
    return METHODS[method](logits, k)


def _sequential_softmax(logits: Tensor, k: int) -> Tensor:
    """The top k of perturbed logits, with the gradient of their relaxation (Xie and Ermon 2019)."""
    # drawn in float64: uniform numbers in float32 have 24 bits, so that extreme values would often tie
    exponential = torch.empty_like(logits, dtype=torch.float64, requires_grad=False).exponential_()
    perturbed = logits - exponential.log().to(logits.dtype)
    relaxed = baselines.sequential_softmax_topk(perturbed, k)
    return khot.topk_mask(perturbed.detach(), k) + (relaxed - relaxed.detach())


def _ncpss(logits: Tensor, k: int) -> Tensor:
    """NCPSS (Pervez, Lippe, Gavves 2023): rescaled sigmoids, iterative Poisson sampling, straight-through."""
    probs = baselines.rescaled_sigmoid_topk(logits, k)
    return iterative_poisson(probs.detach(), k) + (probs - probs.detach())


def iterative_poisson(probs: Tensor, k: int) -> Tensor:
    """Independent draws, followed by corrections of the size.

    If there are too many ones, a correction draws k of them again, in expectation. If there are too few, it
    draws the missing ones among the zeros. The probabilities of the entries among which it draws are rescaled
    linearly, as in NCPSS, so that they sum to the wanted number. Sizes come closer to k in each round, but
    need not reach it.
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


# The pivotal design has exact inclusion probabilities without any calibration.
def _straight_through(logits: Tensor, k: int) -> Tensor:
    return estimators.straight_through(logits, k, design="pivotal")


def _second_order(logits: Tensor, k: int) -> Tensor:
    return estimators.second_order(logits, k, design="pivotal")


METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sequential_softmax": _sequential_softmax,
    "ncpss": _ncpss,
    "simple": estimators.simple,
    "straight_through": _straight_through,
    "second_order": _second_order,
    "gumbel": estimators.gumbel,
}

# The names that the paper's tables use.
LABELS = {
    "sequential_softmax": "Xie & Ermon",
    "ncpss": "NCPSS",
    "simple": "SIMPLE",
    "straight_through": "straight-through (πST)",
    "second_order": "second order (πST2)",
    "gumbel": "Gumbel-σ_k",
}
