"""Distributions over k-subsets, slow and independent: enumeration, a dynamic programme, statistical tests.

Nothing here imports khot. The statistical tests state the rate at which they fail when the code is correct.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import stats
from torch import Tensor

__all__ = [
    "assert_frequencies",
    "assert_inclusion",
    "assert_mean",
    "calibrated",
    "conditional_poisson_law",
    "dynamic_programme",
    "iterative_poisson_law",
    "moments",
    "order_law",
    "softmax_law",
    "subsets",
    "successive_law",
    "vectors",
]

FAILURE_RATE = 1e-6


def subsets(n: int, k: int) -> Tensor:
    """All k-subsets of n units as rows of 0 and 1, float64."""
    rows = [[float(i in chosen) for i in range(n)] for chosen in itertools.combinations(range(n), k)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, n)


def conditional_poisson_law(logits: Tensor, k: int) -> Tensor:
    """log P(S) ∝ Σ_S θ for each of :func:`subsets`; differentiable."""
    weight = (subsets(len(logits), k) * logits).sum(-1)
    return weight - weight.logsumexp(0)


def vectors(n: int) -> Tensor:
    """All vectors of n zeros and ones, as the digits of 0, ..., 2ⁿ − 1; float64."""
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=n)), dtype=torch.float64)


def softmax_law(theta: Tensor, S: Tensor) -> Tensor:
    """P(S) ∝ exp Σ_S θ."""
    return torch.softmax(S @ theta, 0)


def order_law(theta: Tensor, S: Tensor) -> Tensor:
    """P(the variables of S are the smallest), by the largest of them, each with the CDF σ(t + θ)."""
    t = torch.linspace(-80, 80, 3201, dtype=torch.float64).unsqueeze(-1)
    below, above = torch.nn.functional.logsigmoid(t + theta), torch.nn.functional.logsigmoid(-t - theta)
    density = (below @ S.T + above @ (1 - S).T).exp() * (above.exp() @ S.T)
    return density.sum(0) * (t[1] - t[0])


def calibrated(law: Callable[[Tensor, Tensor], Tensor], probs: Tensor, S: Tensor) -> Tensor:
    """θ for which law(θ, S), of all k-subsets, has these inclusion probabilities; differentiable in them.
    Newton's method, and a last step with the derivative of the implicit function."""
    theta = torch.logit(probs).detach()
    for last in (False,) * 30 + (True,):
        jacobian = torch.autograd.functional.jacobian(lambda theta: law(theta, S) @ S, theta)
        excess = law(theta, S) @ S - (probs if last else probs.detach())
        theta = theta - torch.linalg.pinv(jacobian, rtol=1e-9) @ excess
    return theta


def iterative_poisson_law(probs: list[float], k: int, rounds: int) -> Tensor:
    """P of each of :func:`vectors` after independent draws and so many corrections: a vector with more than k
    ones has these drawn again, one with fewer its zeros, with probabilities that are scaled to the sum that
    is missing, linearly from 0 or from 1."""
    x = vectors(len(probs))

    def drawn(chance: list[float]) -> Tensor:
        p = torch.tensor(chance, dtype=torch.float64)
        return torch.where(x.bool(), p, 1 - p).prod(-1)

    def corrected(row: list[float]) -> Tensor:
        many = sum(row) > k
        among = [i for i, one in enumerate(row) if bool(one) == many]
        wanted = k if many else k - sum(row)
        total, chance = sum(probs[i] for i in among), [0.0 if many else one for one in row]
        for i in among:
            if total >= wanted:
                chance[i] = probs[i] * wanted / total if total else 0.0
            else:
                chance[i] = 1 - (1 - probs[i]) * (len(among) - wanted) / (len(among) - total)
        return drawn(chance)

    step = torch.stack([corrected(row) for row in x.tolist()])
    return drawn(probs) @ torch.linalg.matrix_power(step, rounds)


def successive_law(logits: Tensor, k: int) -> Tensor:
    """P(S) of k units that are drawn one after the other without replacement, each ∝ e^θ, for each of
    :func:`subsets`; differentiable."""
    weight, total = logits.exp(), []
    for row in subsets(len(logits), k):
        p = torch.zeros((), dtype=logits.dtype)
        for order in itertools.permutations(row.nonzero().squeeze(1).tolist()):
            q, left = torch.ones((), dtype=logits.dtype), weight.sum()
            for i in order:
                q, left = q * weight[i] / left, left - weight[i]
            p = p + q
        total.append(p)
    return torch.stack(total)


def moments(log_law: Tensor, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inclusion probabilities, joint inclusion probabilities, entropy."""
    p = log_law.exp()
    return p @ S, torch.einsum("s,si,sj->ij", p, S, S), -torch.special.xlogy(p, p).sum()


def dynamic_programme(logits: np.ndarray) -> np.ndarray:
    """log Z_k for k = 0, ..., n: Z_k(θ_1..θ_m) = Z_k(θ_1..θ_(m−1)) + e^θ_m Z_(k−1)(θ_1..θ_(m−1))."""
    log_z = np.full(len(logits) + 1, -np.inf)
    log_z[0] = 0.0
    for m, theta in enumerate(logits):
        log_z[1 : m + 2] = np.logaddexp(log_z[1 : m + 2], log_z[: m + 1] + theta)
    return log_z


def assert_inclusion(counts: Tensor, draws: int, probs: Tensor) -> None:
    """Counts of each unit against Binomial(draws, π): two-sided, all together at the stated rate."""
    counts, p = counts.double().numpy(), probs.double().numpy().clip(0, 1)
    tail = np.minimum(stats.binom.cdf(counts, draws, p), stats.binom.sf(counts - 1, draws, p))
    assert tail.min() * 2 * tail.size >= FAILURE_RATE, (tail.min(), (counts / draws - p).reshape(-1))


def assert_frequencies(counts: np.ndarray, probs: np.ndarray) -> None:
    """Pearson's χ² of counts against probabilities; cells expected fewer than 10 times are pooled."""
    counts, expected = np.asarray(counts, dtype=float), counts.sum() * np.asarray(probs)
    rare = expected < 10
    assert (counts[expected == 0] == 0).all()
    if rare.any():
        counts = np.r_[counts[~rare], counts[rare].sum()]
        expected = np.r_[expected[~rare], expected[rare].sum()]
    keep = expected > 0
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    assert stats.chi2.sf(statistic, max(1, keep.sum() - 1)) >= FAILURE_RATE, statistic


def assert_mean(values: Tensor, expected: Tensor) -> None:
    """The mean of independent rows is the expected one, by their own deviations."""
    error = values.std(0) / math.sqrt(len(values))
    bound = stats.norm.isf(FAILURE_RATE / 2 / expected.numel()) * error + 1e-12
    assert ((values.mean(0) - expected).abs() <= bound).all(), (values.mean(0), expected, error)
