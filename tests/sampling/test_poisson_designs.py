"""The Poisson designs against enumeration of all subsets: laws, draws, moments."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import khot
from khot import sampling
from khot.sampling import designs
from khot.sampling._designs.iterative_poisson import ROUNDS
from subsets import assert_frequencies, conditional_poisson_law, moments, subsets

F64 = torch.float64
NAMES = ["poisson", "repeated_poisson", "adjusted_conditional_poisson", "iterative_poisson"]
PROBS = {
    "three of five": torch.tensor([0.9, 0.7, 0.6, 0.5, 0.3], dtype=F64),
    "with certain units": torch.tensor([0.8, 1.0, 0.5, 0.0, 0.4, 0.3], dtype=F64),
}
ALL = {n: torch.tensor(list(itertools.product((0.0, 1.0), repeat=n)), dtype=F64) for n in (5, 6)}


def independent(probs: Tensor, x: Tensor) -> Tensor:
    return torch.where(x.bool(), probs, 1 - probs).prod(-1)


def corrected(x: Tensor, probs: Tensor, k: int) -> Tensor:
    """The law of the next vector of iterative Poisson sampling, one correction after x."""
    size = int(x.sum())
    among = [i for i in range(len(x)) if bool(x[i]) == (size > k)]
    wanted = k if size > k else k - size
    total = sum(float(probs[i]) for i in among)
    chance = (x if size <= k else torch.zeros_like(x)).clone()
    for i in among:
        p = float(probs[i])
        if p in (0.0, 1.0):
            chance[i] = p
        elif total >= wanted:
            chance[i] = p * wanted / total
        else:
            chance[i] = 1 - (1 - p) * (len(among) - wanted) / (len(among) - total)
    return independent(chance, ALL[len(x)])


def law(design: str, probs: Tensor) -> Tensor:
    """The probabilities of all vectors of zeros and ones, from the definition of the design."""
    x, k = ALL[len(probs)], round(float(probs.sum()))
    first = independent(probs, x)
    if design == "poisson":
        return first
    if design == "iterative_poisson":
        step = torch.stack([corrected(row, probs, k) for row in x])
        return first @ torch.linalg.matrix_power(step, ROUNDS)
    if design == "adjusted_conditional_poisson":  # d < 2.5: the only such law with these probabilities
        first = sampling.designs["conditional_poisson"].log_prob(x, probs).exp()  # type: ignore[misc]
    weight = first * (x.sum(-1) == k)
    return weight / weight.sum()


@pytest.mark.parametrize("case", PROBS)
@pytest.mark.parametrize("design", NAMES)
def test_draws_have_the_law(design: str, case: str) -> None:
    probs = PROBS[case]
    expected, n = law(design, probs), len(probs)
    x = sampling.sample(probs, design, sample_shape=(40_000,), generator=torch.Generator().manual_seed(7))
    code = (x.long() << torch.arange(n - 1, -1, -1)).sum(-1)
    assert_frequencies(torch.bincount(code, minlength=2**n).numpy(), expected.numpy())


@pytest.mark.parametrize("case", PROBS)
@pytest.mark.parametrize("design", NAMES[:3])
def test_log_prob_and_moments(design: str, case: str) -> None:
    probs = PROBS[case]
    x, expected = ALL[len(probs)], law(design, probs)
    found = designs[design].log_prob
    assert found is not None
    torch.testing.assert_close(found(x, probs), expected.log(), rtol=1e-10, atol=1e-10)
    single, both, _ = moments(expected.log(), x)
    torch.testing.assert_close(sampling.inclusion_probs(probs, design), single, rtol=0, atol=1e-10)
    torch.testing.assert_close(sampling.joint_inclusion_probs(probs, design), both, rtol=0, atol=1e-10)


@pytest.mark.parametrize("design", NAMES[:3])
def test_log_prob_is_differentiable(design: str) -> None:
    scores = torch.randn(5, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x, found = subsets(5, 2), designs[design].log_prob
    assert found is not None
    assert torch.autograd.gradcheck(lambda s: found(x, khot.sigmoid_topk(s, 2)), scores)
    probs = PROBS["with certain units"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(found(sampling.sample(probs, design), probs), probs)
    assert grad.isfinite().all()
    if design != "poisson":  # P(S) of the others is a function of the uncertain units alone
        assert (grad[[1, 3]] == 0).all()


def test_the_formula_of_the_adjusted_design() -> None:
    """θ = logit π + (½ − π)/d where d ≥ 2.5, by enumeration; and how far its probabilities are from π."""
    probs = khot.sigmoid_topk(torch.linspace(-1, 1, 12, dtype=F64), 5)
    d = (probs * (1 - probs)).sum()
    assert d >= 2.5
    S, expected = subsets(12, 5), conditional_poisson_law(torch.logit(probs) + (0.5 - probs) / d, 5)
    found = designs["adjusted_conditional_poisson"].log_prob
    assert found is not None
    torch.testing.assert_close(found(S, probs), expected, rtol=1e-11, atol=1e-11)
    worst = [0.0, 0.0]
    for n, spread in itertools.product((12, 20, 60), (0.0, 0.5, 1.0, 2.0)):
        scores = torch.randn(n, dtype=F64, generator=torch.Generator().manual_seed(n))
        rows = torch.stack([khot.sigmoid_topk(spread * scores, k) for k in (n // 4, n // 2, n - 3)])
        enough = (rows * (1 - rows)).sum(-1) >= 2.5
        for i, name in enumerate(("adjusted_conditional_poisson", "repeated_poisson")):
            error = (sampling.inclusion_probs(rows, name) - rows).abs()[enough]
            worst[i] = max([worst[i], *error.flatten().tolist()])
    assert worst[0] <= 1.5e-3 and worst[1] >= 10 * worst[0], worst


def test_iterative_poisson_is_not_tractable() -> None:
    probs = PROBS["three of five"]
    with pytest.raises(
        ValueError, match=r"known inclusion probabilities .*'pareto'.* got 'iterative_poisson'"
    ):
        sampling.inclusion_probs(probs, "iterative_poisson")
    with pytest.raises(ValueError, match=r"joint inclusion probabilities .* got 'iterative_poisson'"):
        sampling.joint_inclusion_probs(probs, "iterative_poisson")


def test_sizes_come_closer_with_the_corrections() -> None:
    probs = torch.full((400,), 0.25)
    spread = {
        name: sampling.sample(probs, name, sample_shape=(400,), generator=torch.Generator().manual_seed(1))
        .sum(-1)
        .std()
        .item()
        for name in NAMES
    }
    assert spread["poisson"] > 7 and spread["iterative_poisson"] < 3
    assert spread["repeated_poisson"] == spread["adjusted_conditional_poisson"] == 0
