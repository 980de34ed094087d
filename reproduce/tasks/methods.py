"""The methods that Tables 3 and 4 of sigmoid-topk compare: k-hot samples from logits, with a gradient."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from khot import estimators

__all__ = ["LABELS", "METHODS", "draw"]


def draw(method: str, logits: Tensor, k: int) -> Tensor:
    """Samples (..., n) of zeros and ones with k ones, which have that method's gradient."""
    return METHODS[method](logits, k)


# The design with which the tables' figures can be reached; the report of `vae` says what others give.


def _straight_through(logits: Tensor, k: int) -> Tensor:
    return estimators.straight_through(logits, k, design="unadjusted_pareto")


def _second_order(logits: Tensor, k: int) -> Tensor:
    return estimators.second_order(logits, k, design="unadjusted_pareto")


def _sequential_softmax_half(logits: Tensor, k: int) -> Tensor:
    """The temperature that code of the paper's authors has by default; the paper says 1."""
    return estimators.sequential_softmax(logits, k, tau=0.5)


REDRAWS = 100


def _ncpss(logits: Tensor, k: int) -> Tensor:
    """Seven rounds; samples of another size than k are drawn again (up to REDRAWS times)."""
    sample = estimators.ncpss(logits, k, rounds=7)
    for _ in range(REDRAWS):
        wrong = sample.detach().sum(-1).round() != k
        if not wrong.any():
            break
        sample = sample.index_put((wrong,), estimators.ncpss(logits[wrong], k, rounds=7))
    return sample


METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sequential_softmax": estimators.sequential_softmax,
    "sequential_softmax_half": _sequential_softmax_half,
    "ncpss": _ncpss,
    "simple": estimators.simple,
    "straight_through": _straight_through,
    "second_order": _second_order,
    "gumbel": estimators.gumbel,
}

# The names that the paper's tables use.
LABELS = {
    "sequential_softmax": "Xie & Ermon",
    "sequential_softmax_half": "Xie & Ermon, τ = ½",
    "ncpss": "NCPSS",
    "simple": "SIMPLE",
    "straight_through": "straight-through (πST)",
    "second_order": "second order (πST2)",
    "gumbel": "Gumbel-σ_k",
}
