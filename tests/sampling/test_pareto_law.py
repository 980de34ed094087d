"""The law of Pareto sampling: log_prob against its integral, by adaptive quadrature, and its moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit, logit
from torch import Tensor

import khot
from khot import sampling
from subsets import assert_frequencies, subsets

log_prob = sampling.designs["pareto"].log_prob


def probs_of(n: int, k: int, spread: float) -> Tensor:
    scores = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return khot.sigmoid_topk(spread * scores, k)


def integral(chosen: np.ndarray, theta: np.ndarray) -> float:
    """P(the variables of S are the smallest), by the largest of them, each with the CDF σ(t + θ)."""
    inside, outside = theta[chosen], theta[~chosen]

    def density(t: float) -> float:
        below = expit(t + inside)
        largest = sum(below[i] * (1 - below[i]) * np.prod(np.delete(below, i)) for i in range(len(inside)))
        return float(largest * np.prod(expit(-t - outside)))

    return quad(density, -60, 60, points=[-10, 0, 10], epsabs=1e-14, epsrel=1e-11, limit=400)[0]


@pytest.mark.parametrize("n, k", [(12, 6), (14, 5)])
def test_log_prob_is_the_integral(n: int, k: int) -> None:
    """With Σπ(1 − π) ≥ 2.5 the parameters are the adjusted logits of the formula, written down here anew."""
    probs = probs_of(n, k, 0.2)
    p = probs.numpy()
    d = (p * (1 - p)).sum()
    assert d >= 2.5
    theta = logit(p) - p * (1 - p) * (p - 0.5) / d**2
    S = subsets(n, k)[:: 97 if n == 12 else 211]
    expected = [math.log(integral(x.bool().numpy(), theta)) for x in S]
    torch.testing.assert_close(
        log_prob(S, probs), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("n, k, spread", [(5, 2, 1.0), (6, 3, 4.0)])
def test_the_unadjusted_design(n: int, k: int, spread: float) -> None:
    """Its parameters are the logits: log_prob by the integral, draws and moments by sums over all subsets."""
    probs, S = probs_of(n, k, spread), subsets(n, k)
    theta = logit(probs.numpy())
    expected = torch.tensor([integral(x.bool().numpy(), theta) for x in S], dtype=torch.float64)
    found = sampling.designs["unadjusted_pareto"].log_prob
    assert found is not None
    torch.testing.assert_close(found(S, probs), expected.log(), rtol=0, atol=1e-8)
    exact = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(sampling.inclusion_probs(probs, "unadjusted_pareto"), expected @ S, **exact)
    joint = torch.einsum("s,si,sj->ij", expected, S, S)
    torch.testing.assert_close(sampling.joint_inclusion_probs(probs, "unadjusted_pareto"), joint, **exact)
    generator = torch.Generator().manual_seed(3)
    x = sampling.sample(probs, "unadjusted_pareto", sample_shape=(40_000,), generator=generator)
    which = (x @ S.mT == k).long().argmax(-1)
    assert_frequencies(torch.bincount(which, minlength=len(S)).numpy(), expected.numpy())


@pytest.mark.parametrize("p", [0.5, 0.6, 0.9, 0.999])
def test_a_pair_of_the_unadjusted_design(p: float) -> None:
    """In closed form; 0.957 for p = 0.9. Units that are certain, and the gradient of log p, as elsewhere."""
    r = ((1 - p) / p) ** 2  # the larger of two logistic variables a distance −log r apart
    expected = 0.5 if r == 1 else 1 / (1 - r) + r * math.log(r) / (1 - r) ** 2
    probs = torch.tensor([p, 1 - p, 1, 0], dtype=torch.float64, requires_grad=True)
    pi = sampling.inclusion_probs(probs, "unadjusted_pareto")
    torch.testing.assert_close(pi, pi.new_tensor([expected, 1 - expected, 1, 0]), rtol=0, atol=1e-10)
    found = sampling.designs["unadjusted_pareto"].log_prob
    assert found is not None
    value = found(probs.new_tensor([1, 0, 1, 0]), probs)
    assert value.exp().item() == pytest.approx(expected, abs=1e-10)
    (grad,) = torch.autograd.grad(value, probs)
    assert grad.isfinite().all() and (grad[2:] == 0).all()
    assert found(probs.new_tensor([1, 1, 0, 0]), probs) == -math.inf


@pytest.mark.parametrize("n, k, spread", [(2, 1, 1.0), (4, 1, 2.0), (5, 2, 1.0), (6, 3, 4.0), (12, 6, 0.2)])
def test_log_prob_sums_to_one_and_has_the_moments_of_the_design(n: int, k: int, spread: float) -> None:
    probs, S = probs_of(n, k, spread), subsets(n, k)
    law = log_prob(S, probs).exp()
    exact = {"rtol": 0, "atol": 1e-11}
    torch.testing.assert_close(law.sum().item(), 1.0, **exact)
    torch.testing.assert_close(law @ S, sampling.inclusion_probs(probs), **exact)
    joint = torch.einsum("s,si,sj->ij", law, S, S)
    torch.testing.assert_close(joint, sampling.joint_inclusion_probs(probs, "pareto"), **exact)
    if k == 1:  # a single unit: there is only one law with these probabilities
        torch.testing.assert_close(law, probs.flip(0) if (S[0, 0] == 0) else probs, rtol=0, atol=1e-8)


def test_it_is_another_law_than_conditional_poisson() -> None:
    probs, S = probs_of(6, 3, 2.0), subsets(6, 3)
    other = sampling.designs["conditional_poisson"].log_prob
    assert other is not None
    assert (log_prob(S, probs) - other(S, probs)).abs().max() > 1e-4


def test_certain_units_and_batches() -> None:
    free = probs_of(5, 2, 1.0)
    probs = torch.cat([free, free.new_tensor([1.0, 0.0])])
    S = subsets(5, 2)
    with_certain = torch.cat([S, S.new_tensor([[1.0, 0.0]]).expand(len(S), 2)], -1)
    torch.testing.assert_close(log_prob(with_certain, probs), log_prob(S, free), rtol=0, atol=1e-10)
    for wrong in ([1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 1], [1, 1, 1, 0, 0, 1, 0]):
        assert log_prob(probs.new_tensor(wrong), probs) == -math.inf
    certain = probs.new_tensor([1.0, 0.0, 1.0])
    assert log_prob(certain, certain).item() == pytest.approx(0, abs=1e-15)
    rows = torch.stack([probs, probs.flip(-1)])
    both = log_prob(torch.stack([with_certain, with_certain.flip(-1)], 1), rows)
    torch.testing.assert_close(both, log_prob(with_certain, probs).unsqueeze(-1).expand(-1, 2))


@pytest.mark.parametrize("n, k, spread", [(5, 2, 1.0), (12, 6, 0.2)])
def test_gradients_are_those_of_the_values(n: int, k: int, spread: float) -> None:
    """To second order, along changes that keep the sum; the first row is calibrated, the last is not."""
    scores = torch.logit(probs_of(n, k, spread)).requires_grad_()
    value = subsets(n, k)[:: 1 + 100 * (n == 12)]

    def law(scores: Tensor) -> Tensor:
        return log_prob(value, khot.sigmoid_topk(scores, k))

    # the calibration's error of 1e-8 is divided by the difference between two arguments
    assert torch.autograd.gradcheck(law, scores, eps=1e-3, atol=2e-5, rtol=1e-4, fast_mode=True)
    v = torch.randn(len(value), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradgradcheck(
        lambda scores: (v * law(scores)).sum(), scores, eps=1e-3, atol=5e-5, rtol=1e-4, fast_mode=True
    )


def test_the_score_has_mean_zero_and_certain_units_have_none() -> None:
    probs = torch.cat([probs_of(5, 2, 1.0), torch.tensor([1.0, 0.0], dtype=torch.float64)]).requires_grad_()
    S = torch.cat([subsets(5, 2), torch.tensor([[1.0, 0.0]]).expand(10, 2)], -1)
    law = log_prob(S, probs)
    (mean,) = torch.autograd.grad(law.exp().detach() @ law, probs)
    assert (mean[5:] == 0).all()
    torch.testing.assert_close(
        mean[:5] - mean[:5].mean(), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-9
    )
