"""The law of every design, by its definition: the probabilities of all vectors of zeros and ones.

A new design needs a line in ``LAWS``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import khot
from khot import sampling
from khot.sampling import designs
from khot.sampling._designs.iterative_poisson import ROUNDS
from subsets import (
    assert_frequencies,
    calibrated,
    conditional_poisson_law,
    iterative_poisson_law,
    moments,
    order_law,
    softmax_law,
    subsets,
    vectors,
)

F64 = torch.float64
PROBS = {
    "three of five": torch.tensor([0.9, 0.7, 0.6, 0.5, 0.3], dtype=F64),
    "with certain units": torch.tensor([0.8, 1.0, 0.5, 0.0, 0.4, 0.3], dtype=F64),
    "steep": khot.sigmoid_topk(4 * torch.randn(6, dtype=F64, generator=torch.Generator().manual_seed(6)), 3),
}
each_case = pytest.mark.parametrize("case", PROBS)


def scattered(weight: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Of weights of the k-subsets, those of all vectors."""

    def law(probs: Tensor, k: int) -> Tensor:
        x, S = vectors(len(probs)), subsets(len(probs), k)
        found = torch.zeros(len(x), dtype=F64)
        found[x.sum(-1) == k] = weight(probs, S.flip(0))  # both in the order of binary numbers
        return found

    return law


def independent(probs: Tensor, x: Tensor) -> Tensor:
    return torch.where(x.bool(), probs, 1 - probs).prod(-1)


def brewer(probs: Tensor, S: Tensor) -> Tensor:
    """Sums over all orders in which the units can be drawn."""
    p, k = probs.tolist(), int(S[0].sum())
    found = dict.fromkeys(map(tuple, S.tolist()), 0.0)
    for path in itertools.permutations(range(len(p)), k):
        chance, left = 1.0, sum(p)
        for step, unit in enumerate(path):
            r, rest = k - step, [i for i in range(len(p)) if i not in path[:step]]
            weight = {i: p[i] * (left - p[i]) / (left - r * p[i]) if r > 1 else p[i] for i in rest}
            chance *= weight[unit] / sum(weight.values())
            left -= p[unit]
        found[tuple(float(i in path) for i in range(len(p)))] += chance
    return torch.tensor(list(found.values()), dtype=F64)


def systematic(probs: Tensor, S: Tensor) -> Tensor:
    """A uniform number and all at distances of 1 from it, on the units' intervals one after another."""
    ends = [0.0, *probs.cumsum(0).tolist()]
    starts = sorted({0.0, 1.0, *(end % 1 for end in ends[:-1])})
    found = dict.fromkeys(map(tuple, S.tolist()), 0.0)
    for low, high in itertools.pairwise(starts):
        u = (low + high) / 2
        hit = (float(math.ceil(b - u) > math.ceil(a - u)) for a, b in itertools.pairwise(ends))
        found[tuple(hit)] += high - low
    return torch.tensor(list(found.values()), dtype=F64)


def pivotal(probs: Tensor, S: Tensor) -> Tensor:
    """A tournament: two neighbours meet, one of them ends at 0 or 1, and the other goes to the next round."""
    found = dict.fromkeys(map(tuple, S.tolist()), 0.0)

    def meet(row: tuple[float, ...], round_: list[int], later: list[int], chance: float) -> None:
        if len(round_) < 2:
            round_, later = [*later, *round_], []
        if len(round_) < 2:
            found[tuple(float(round(p)) for p in row)] += chance
            return
        (i, j), others = round_[:2], round_[2:]
        a, b = row[i], row[j]
        end = 0.0 if a + b < 1 else 1.0
        first = b / (a + b) if a + b < 1 else (1 - b) / (2 - a - b)  # that i is the one that ends
        for one, other, share in ((i, j, first), (j, i, 1 - first)):
            changed = list(row)
            changed[one], changed[other] = end, a + b - end
            meet(tuple(changed), others, [*later, other], chance * share)

    meet(tuple(probs.tolist()), list(range(len(probs))), [], 1.0)
    return torch.tensor(list(found.values()), dtype=F64)


def random_pivotal(probs: Tensor, S: Tensor) -> Tensor:
    """In a random order, each with the same probability."""
    place = {tuple(row): i for i, row in enumerate(S.tolist())}
    total, orders = torch.zeros(len(S), dtype=F64), list(itertools.permutations(range(len(probs))))
    for order in orders:
        total += pivotal(probs[list(order)], S)[[place[tuple(row)] for row in S[:, order].tolist()]]
    return total / len(orders)


LAWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "poisson": lambda probs, k: independent(probs, vectors(len(probs))),
    "repeated_poisson": scattered(independent),
    "conditional_poisson": scattered(lambda p, S: softmax_law(calibrated(softmax_law, p, S), S)),
    # Σπ(1 − π) < 2.5, where it is the only such law with these probabilities
    "adjusted_conditional_poisson": scattered(lambda p, S: softmax_law(calibrated(softmax_law, p, S), S)),
    "sampford": scattered(lambda p, S: (S @ (1 - p)) * independent(p, S)),
    "pareto": scattered(lambda p, S: order_law(calibrated(order_law, p, S), S)),
    "unadjusted_pareto": scattered(lambda p, S: order_law(torch.logit(p), S)),
    "iterative_poisson": lambda probs, k: iterative_poisson_law(probs.tolist(), k, ROUNDS),
    "brewer": scattered(brewer),
    "systematic": scattered(systematic),
    "pivotal": scattered(pivotal),
    "random_pivotal": scattered(random_pivotal),
}


def law(design: str, probs: Tensor) -> Tensor:
    """Of all vectors; units with probability 0 or 1 are as they have to be, and no part of the design."""
    x, free = vectors(len(probs)), (probs > 0) & (probs < 1)
    possible = (x[:, ~free] == probs[~free]).all(-1)
    weight = torch.zeros(len(x), dtype=F64)
    weight[possible] = LAWS[design](probs[free], round(float(probs[free].sum())))
    return weight / weight.sum()


def test_every_design_has_a_law() -> None:
    assert set(LAWS) == set(designs)


@each_case
@pytest.mark.parametrize("design", LAWS)
def test_draws_have_the_law(design: str, case: str) -> None:
    probs = PROBS[case]
    expected, n = law(design, probs), len(probs)
    x = sampling.sample(probs, design, sample_shape=(40_000,), generator=torch.Generator().manual_seed(7))
    code = (x.long() << torch.arange(n - 1, -1, -1)).sum(-1)
    assert_frequencies(torch.bincount(code, minlength=2**n).numpy(), expected.numpy())


@each_case
@pytest.mark.parametrize("design", LAWS)
def test_moments(design: str, case: str) -> None:
    probs, known = PROBS[case], designs[design]
    single, both, _ = moments(law(design, probs).log(), vectors(len(probs)))
    if known.exact or known.marginals is not None:
        torch.testing.assert_close(sampling.inclusion_probs(probs, design), single, rtol=0, atol=2e-9)
    if known.joint is not None:
        torch.testing.assert_close(sampling.joint_inclusion_probs(probs, design), both, rtol=0, atol=2e-9)


TRACTABLE = [name for name, design in designs.items() if design.log_prob is not None]
# pareto's calibration stops at errors of 1e-8 of the probabilities, the grid of its law has 1e-9
EXACT = {name: 1e-10 if "pareto" not in name else 1e-6 for name in TRACTABLE}


@each_case
@pytest.mark.parametrize("design", TRACTABLE)
def test_log_prob(design: str, case: str) -> None:
    """Of impossible vectors, too; and of two rows."""
    probs = PROBS[case]
    x, found = vectors(len(probs)), designs[design].log_prob
    assert found is not None
    rows, given = torch.stack((probs, probs.flip(-1))), torch.stack((x, x.flip(-1)), 1)
    want = law(design, probs).log().unsqueeze(-1).expand(-1, 2)
    torch.testing.assert_close(found(given, rows), want, rtol=EXACT[design], atol=EXACT[design])
    certain = probs.round()
    assert found(certain, certain).item() == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("design", TRACTABLE)
def test_log_prob_is_differentiable(design: str) -> None:
    """To second order, along changes that keep the sum."""
    scores = torch.randn(5, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x, found = subsets(5, 2), designs[design].log_prob
    assert found is not None
    # the calibration's error is divided by the difference between two arguments
    options = {"eps": 1e-3, "atol": 5e-5, "rtol": 1e-4} if design == "pareto" else {}

    def f(scores: Tensor) -> Tensor:
        return found(x, khot.sigmoid_topk(scores, 2))  # type: ignore[misc]

    assert torch.autograd.gradcheck(f, scores, **options)  # type: ignore[arg-type]
    assert torch.autograd.gradgradcheck(f, scores, fast_mode=True, **options)  # type: ignore[arg-type]
    probs = PROBS["with certain units"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(found(sampling.sample(probs, design), probs), probs)
    assert grad.isfinite().all()
    if design not in ("poisson", "sampford"):  # P(S) of the others is one of the uncertain units alone
        assert (grad[[1, 3]] == 0).all()


@pytest.mark.parametrize("design", ["pareto", "adjusted_conditional_poisson"])
def test_the_formula_of_designs_with_a_large_variance(design: str) -> None:
    """The parameters where d = Σπ(1 − π) ≥ 2.5, written down here anew."""
    probs = khot.sigmoid_topk(torch.linspace(-1, 1, 12, dtype=F64), 5)
    v, S, found = probs * (1 - probs), subsets(12, 5), designs[design].log_prob
    assert v.sum() >= 2.5 and found is not None
    if design == "pareto":
        want = order_law(torch.logit(probs) - v * (probs - 0.5) / v.sum() ** 2, S).log()
    else:
        want = conditional_poisson_law(torch.logit(probs) + (0.5 - probs) / v.sum(), 5)
    torch.testing.assert_close(found(S, probs), want, rtol=0, atol=1e-8)


def test_how_far_the_adjusted_design_is_from_its_probabilities() -> None:
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
