"""Distributions over k-subsets, slow and independent: enumeration, a dynamic programme, statistical tests.

Nothing here imports khot. The statistical tests state the rate at which they fail when the code is correct.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from scipy import stats
from torch import Tensor

__all__ = [
    "assert_frequencies",
    "assert_inclusion",
    "conditional_poisson_law",
    "dynamic_programme",
    "moments",
    "random_probs",
    "sampford_law",
    "subsets",
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


def sampford_law(probs: Tensor, k: int) -> Tensor:
    """log P(S) for each of :func:`subsets`, as Sampford (1967) defined it."""
    S = subsets(len(probs), k).bool()
    free = (probs > 0) & (probs < 1)
    odds = torch.where(free, probs / (1 - probs), 1.0)
    weight = ((1 - probs) * S).sum(-1) * torch.where(S, odds, 1.0).prod(-1)
    if not free.any():
        weight = torch.ones_like(weight)
    allowed = (S | (probs < 1)).all(-1) & ~(S & (probs <= 0)).any(-1)
    weight = torch.where(allowed, weight, 0.0)
    return (weight / weight.sum()).log()


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


def random_probs(count: int, n: int, seed: int) -> Tensor:
    """(count, n): rows with integer sums from 1 to n − 2, a unit near 0, one near 1, one 0 and one 1."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        k = generator.integers(1, n - 4)  # of the units that are not certain
        score = generator.normal(0, generator.uniform(0.3, 3), n - 2)
        score[0], score[1] = score.min() - 5, score.max() + 5
        low, high = score.min() - 50, score.max() + 50
        for _ in range(200):  # Σσ(score − t) = k
            t = (low + high) / 2
            low, high = (t, high) if (1 / (1 + np.exp(t - score))).sum() > k else (low, t)
        row = np.r_[1 / (1 + np.exp(t - score)), 0.0, 1.0]
        rows.append(row[generator.permutation(n)])
    return torch.tensor(np.stack(rows))


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
