"""The table of designs: every way to draw a k-hot vector with given inclusion probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from khot._ops import draws
from khot.sampling._designs import (
    adjusted_conditional_poisson,
    brewer,
    conditional_poisson,
    iterative_poisson,
    pareto,
    pivotal,
    poisson,
    repeated_poisson,
    sampford,
    systematic,
    unadjusted_pareto,
)

__all__ = ["Design", "DesignName", "designs"]

DesignName = Literal[
    "pareto",
    "unadjusted_pareto",
    "conditional_poisson",
    "adjusted_conditional_poisson",
    "sampford",
    "brewer",
    "pivotal",
    "random_pivotal",
    "poisson",
    "repeated_poisson",
    "iterative_poisson",
    "systematic",
]
"""The names in :data:`designs`, which are the values of the argument ``design``."""


@dataclass(frozen=True)
class Design:
    """A distribution over vectors of zeros and ones that is given by its inclusion probabilities.

    All functions take probs (*batch, n) in float64. Each row sums to an integer k, up to rounding. Units of
    probability 0 and 1 are certain.

    Attributes:
        description: what the design is, in one line.
        exact: whether the inclusion probabilities are the given ones, up to rounding.
        draw: (probs, generator) -> bool (*batch, n), with k entries True in each row if the size is fixed.
            Rows may be repeated by expand().
        log_prob: (value, probs) -> log p(value), (*batch), differentiable in probs; None where it is not
            tractable.
        joint: probs -> P(i and j are both selected), (*batch, n, n); None where it is not tractable.
        marginals: probs -> the true inclusion probabilities; None where they are the given ones (exact), or
            not tractable.
        fixed_size: whether a draw has exactly k units. If not, only its expectation is near k, and what
            promises k-hot vectors refuses the design.
        sample: the operator that draws from probabilities of any dtype and sum, for devices that one would
            have to wait for to look at them; None where the other functions have to do.
        close: whether the inclusion probabilities are the given ones within 2e-3.
    """

    description: str
    exact: bool
    draw: Callable[[Tensor, torch.Generator | None], Tensor]
    log_prob: Callable[[Tensor, Tensor], Tensor] | None = None
    joint: Callable[[Tensor], Tensor] | None = None
    marginals: Callable[[Tensor], Tensor] | None = None
    fixed_size: bool = True
    close: bool = True
    sample: Callable[[Tensor, Tensor, float], Tensor] | None = None


designs: Mapping[DesignName, Design] = MappingProxyType(
    {
        "pareto": Design(
            "order sampling: one top-k of adjusted Pareto variables",
            False,
            pareto.draw,
            pareto.log_prob,
            pareto.joint,
            marginals=pareto.marginals,
        ),
        "unadjusted_pareto": Design(
            "one top-k of Pareto variables, as they are: less random than the probabilities say",
            False,
            unadjusted_pareto.draw,
            unadjusted_pareto.log_prob,
            unadjusted_pareto.joint,
            unadjusted_pareto.marginals,
            close=False,
        ),
        "conditional_poisson": Design(
            "independent trials, given their sum; maximum entropy",
            True,
            conditional_poisson.draw,
            conditional_poisson.log_prob,
            conditional_poisson.joint,
        ),
        "adjusted_conditional_poisson": Design(
            "conditional Poisson with parameters by a formula",
            False,
            adjusted_conditional_poisson.draw,
            adjusted_conditional_poisson.log_prob,
            adjusted_conditional_poisson.joint,
            adjusted_conditional_poisson.marginals,
        ),
        "sampford": Design(
            "one unit, then conditional Poisson for the others; no calibration",
            True,
            sampford.draw,
            sampford.log_prob,
            sampford.joint,
        ),
        "brewer": Design("draw by draw; O(nk)", True, brewer.draw),
        "pivotal": Design(
            "duels between neighbours, in rounds; units nearby repel",
            True,
            pivotal.draw,
            sample=draws.pivotal_sample,
        ),
        "random_pivotal": Design("pivotal, shuffled for every draw", True, pivotal.draw_random_order),
        "poisson": Design(
            "independent trials; the size is random",
            True,
            poisson.draw,
            poisson.log_prob,
            poisson.joint,
            fixed_size=False,
        ),
        "repeated_poisson": Design(
            "independent trials, all of them again until the size is k",
            False,
            repeated_poisson.draw,
            repeated_poisson.log_prob,
            repeated_poisson.joint,
            repeated_poisson.marginals,
            close=False,
        ),
        "iterative_poisson": Design(
            "independent trials and three corrections of the size, which stays random",
            False,
            iterative_poisson.draw,
            fixed_size=False,
            close=False,
        ),
        "systematic": Design(
            "one uniform for all units; the order matters, low entropy",
            True,
            systematic.draw,
            joint=systematic.joint,
            sample=draws.systematic_sample,
        ),
    }
)
"""Every design by its name: what ``design=`` takes, and what each of them can tell."""
