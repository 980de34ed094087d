"""Sampford's design against enumeration of its definition, and statistics of its draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import subsets
from khot import sigmoid_topk
from khot.sampling._designs import sampford


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scores(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def assert_close(got: Tensor, want: Tensor, tol: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("n", [1, 2, 3, 6, 10])
def test_law_by_enumeration(n: int, scale: float) -> None:
    x = scale * scores(n, seed=n)
    for k in range(n + 1):
        probs = sigmoid_topk(x, k)
        S = subsets.subsets(n, k)
        law = subsets.sampford_law(probs, k)
        pi, joint, _ = subsets.moments(law, S)
        assert_close(pi, probs, 1e-12)  # the oracle itself: that is what the design is for
        assert_close(sampford.log_prob(S, probs), law)
        assert_close(sampford.joint(probs), joint)


def test_certain_units() -> None:
    probs = torch.tensor([0.3, 1.0, 0.0, 0.9, 0.8], dtype=torch.float64)
    S = subsets.subsets(5, 3)
    law = subsets.sampford_law(probs, 3)
    assert_close(sampford.log_prob(S, probs), law)
    assert_close(sampford.joint(probs), subsets.moments(law, S)[1])
    x = sampford.draw(probs.expand(1000, 5), seeded())
    assert x[:, 1].all()
    assert not x[:, 2].any()
    assert (x.sum(-1) == 3).all()
    certain = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert (sampford.draw(certain, seeded()) == certain).all()
    assert sampford.log_prob(certain, certain).tolist() == pytest.approx([0, 0], rel=0, abs=1e-15)
    assert_close(sampford.joint(certain), certain.unsqueeze(-1) * certain.unsqueeze(-2), 0)


def test_gradients() -> None:
    x = scores(5, seed=2).requires_grad_()
    value = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
    for f in (
        lambda x: sampford.log_prob(value, sigmoid_topk(x, 2)),
        lambda x: sampford.joint(sigmoid_topk(x, 2)),
    ):
        assert gradcheck(f, x)
        assert gradgradcheck(f, x)
    probs = torch.tensor([0.0, 0.5, 0.5, 1.0], dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(sampford.log_prob(torch.tensor([0.0, 1.0, 0.0, 1.0]), probs), probs)
    assert g.isfinite().all()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_distribution_of_draws(k: int) -> None:
    """Fails at a rate of 1e-6."""
    probs = sigmoid_topk(1.5 * scores(5, seed=k), k)
    x = sampford.draw(probs.expand(100_000, 5), seeded(k)).double()
    counts = (x @ subsets.subsets(5, k).T == k).sum(0)
    subsets.assert_frequencies(counts.numpy(), subsets.sampford_law(probs, k).exp().numpy())
