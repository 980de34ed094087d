"""The design P(S) ∝ exp(Σ_{i∈S} θ_i) on k-subsets, as independent trials given that their sum is k.

The trials' logits are z = θ − t, with t from the sigmoid top-k: σ(z) sums to k, so that their sum is k as
often as can be. What follows does not depend on t, which is a constant in every derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from khot import arguments
from khot.arguments import Scalar
from khot.cdfs import Logistic
from khot.sampling import poisson_binomial
from khot.sampling.poisson_binomial import Frequencies
from khot.soft_count import threshold_map

__all__ = [
    "Tilted",
    "check_design",
    "covariance_product",
    "inclusion",
    "log_size_prob",
    "mixture",
    "tilt",
    "tilt_rows",
]


class Tilted(NamedTuple):
    """Independent trials whose sum, given that it is k, is the design. All but change and p are constants."""

    k: Tensor  # of the batch shape
    hi: Tensor  # t = hi + lo
    lo: Tensor
    z: Tensor  # θ − t, infinite for units that are certain
    change: Tensor  # θ less its own value: 0, with θ's derivatives; and 0 for infinite θ
    p: Tensor  # σ(z)·exp(change)
    q: Tensor  # σ(−z)
    at: Frequencies


def tilt(logits: Tensor, k: Scalar) -> Tilted:
    """The trials for logits (*batch, n) and integers k that broadcast with batch."""
    return tilt_rows(*check_design(logits, k))


def check_design(logits: Tensor, k: Scalar) -> tuple[Tensor, Tensor]:
    """θ, and k in its batch shape, in float64."""
    arguments.check_input(logits, "logits")
    if not logits.dim():
        raise ValueError("logits must have the units along their last dim, but got a 0-dim tensor")
    n = logits.shape[-1]
    k = arguments.per_row(k, "k", logits, low=0, high=float(n), integer=True).double()
    return logits.double(), k.expand(logits.shape[:-1])


def tilt_rows(theta: Tensor, k: Tensor) -> Tilted:
    """The same for float64 of matching shapes."""
    value = theta.detach()
    _, hi, lo = threshold_map(value, k, value.new_ones(()), Logistic(), "threshold")
    z = (value - hi.unsqueeze(-1)) - lo.unsqueeze(-1)
    infinite = value.isinf()
    change = theta.masked_fill(infinite, 0) - value.masked_fill(infinite, 0)
    p, q = torch.sigmoid(z), torch.sigmoid(-z)
    at = poisson_binomial.frequencies((p * q).sum(-1), theta.shape[-1])
    return Tilted(k, hi, lo, z, change, p * change.exp(), q, at)


def log_size_prob(trials: Tilted) -> Tensor:
    """log P(size = k), of the batch shape."""
    return _log_size_prob(trials.q, trials.p, trials.k, trials.at)


def _log_size_prob(q: Tensor, p: Tensor, k: Tensor, at: Frequencies) -> Tensor:
    return poisson_binomial.pmf(*poisson_binomial.characteristic(q, p, at), k, at).log()


def inclusion(trials: Tilted) -> tuple[Tensor, Tensor, Tensor]:
    """log P(size = k), π and 1 − π, both of full relative accuracy where P(size = k) has it.

    π_j = p_j P(the others make k − 1)/P(all make k) and 1 − π_j = q_j P(the others make k)/P(all make k).
    """
    q, p = trials.q, trials.p
    log_prob, pull = torch.func.vjp(lambda q, p: _log_size_prob(q, p, trials.k, trials.at), q, p)[:2]
    by_q, by_p = pull(torch.ones_like(log_prob))
    # rounding may leave −1e-17 of an entry that is 0
    return log_prob, (p * by_p).clamp(0, 1), (q * by_q).clamp(0, 1)


def mixture(trials: Tilted) -> tuple[Tensor, Tensor]:
    """The design as a mixture of independent trials, P(S) = Re Σ_l a_l Π_{j∈S} r_lj Π_{j∉S} (1 − r_lj).

    a (*batch, l) and r (*batch, l, n) are complex, Σ_l Re a_l = 1, with r = p e^(iω)/(q + p e^(iω)).
    """
    q, p, at = trials.q, trials.p, trials.at
    re, im = poisson_binomial.characteristic(q, p, at)
    size = at.angle(trials.k.unsqueeze(-1)).squeeze(-1)
    weight = at.weight * torch.complex(re, im) * torch.polar(torch.ones_like(size), -size)
    weight = weight / weight.sum(-1, keepdim=True).real
    turned = _turned(trials)
    return weight, turned / (q.unsqueeze(-2) + turned)


def covariance_product(trials: Tilted) -> Callable[[Tensor], Tensor]:
    """u ↦ Cov·u for u (*batch, n), Cov being the covariance of the units' indicators."""
    _, pi, out = inclusion(trials)
    weight, ratio = mixture(trials)
    # r − π from whichever of r, 1 − r is the smaller
    rest = trials.q.unsqueeze(-2) / (trials.q.unsqueeze(-2) + _turned(trials))
    deviation = torch.where((pi < out).unsqueeze(-2), ratio - pi.unsqueeze(-2), out.unsqueeze(-2) - rest)
    own = (weight.unsqueeze(-1) * ratio * rest).sum(-2).real

    def product(u: Tensor) -> Tensor:
        along = weight * (deviation * u.unsqueeze(-2)).sum(-1)
        return (along.unsqueeze(-1) * deviation).sum(-2).real + own * u

    return product


def _turned(trials: Tilted) -> Tensor:
    """p e^(iω), (*batch, l, n)."""
    angle = trials.at.angle(torch.ones_like(trials.at.period).unsqueeze(-1))
    return trials.p.unsqueeze(-2) * torch.polar(torch.ones_like(angle), angle)
