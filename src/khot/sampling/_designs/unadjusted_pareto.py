"""Pareto sampling as Rosén (1997) gives it: θ = logit π, without the adjustment of :mod:`.pareto`.

Its inclusion probabilities lie further from ½ than π, the more so the fewer units are uncertain: of a pair
with π = (0.9, 0.1) the first is selected in 957 draws of 1,000. Rows that are nearly decided are decided
otherwise less often than their probabilities say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.reference.phantom import distinct, size
from khot.sampling import _order as order
from khot.sampling._designs import poisson

__all__ = ["draw", "joint", "log_prob", "marginals"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    rows = distinct(probs)
    return order.draw(poisson.log_odds(rows), size(rows), probs.shape, generator)


def log_prob(value: Tensor, probs: Tensor) -> Tensor:
    """log P(S), of the broadcast batch shape; differentiable in probs, twice."""
    return order.log_prob(value, poisson.log_odds(probs), size(probs.detach()))


def joint(probs: Tensor) -> Tensor:
    """P(i ∈ S and j ∈ S), with :func:`marginals` on the diagonal."""
    return order.joint(poisson.log_odds(probs), size(probs).double())


def marginals(probs: Tensor) -> Tensor:
    """The inclusion probabilities of :func:`draw`."""
    return order.inclusion(poisson.log_odds(probs), size(probs).double())[0]
