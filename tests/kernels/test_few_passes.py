"""Rows on which the search for the threshold of a budget takes long: at most ten passes of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from budget_rows import CDFS
from khot._kernels.reference import soft_budget as reference

MOST = 10
# scores, costs, budget, τ, CDF, form: of the worst rows of a hunt; most took 11 to 27 passes before
WORST: list[tuple[tuple[float, ...], tuple[float, ...], float, float, str, str]] = [
    # the budget is a digit less than the dear entry costs: no number has the z that this entry needs
    ((-0.69, 2.91), (0.39, 1e9), 999999999.9999999, 6.3e-4, "power", "score"),
    ((-0.69, 2.91), (0.39, 1e9), 999999999.9999999, 6.3e-4, "power", "value"),
    # and here the numbers around it are next to each other
    (
        (0.47795309812391895, -0.17555877827380115, 0.3639052406671224),
        (1.0, 9.999999974752427e-07, 9.999999974752427e-07),
        0.9999999999999999,
        1.3273802934700832e-22,
        "power",
        "score",
    ),
    # the slopes of few cheap entries say nothing about the root, which is near one end of a wide bracket
    ((-1.92, 1.68, 1.23), (0.0961, 1e9, 0.256), 1000000000.2576542, 0.0299, "normal", "score"),
    (
        (0.162, 0.375, 0.27, 0.472, 0.27, 0.287, 0.883),
        (0.869, 0.792, 0.16, 1e9, 0.821, 0.68, 0.451),
        1000000003.2160978,
        0.00617,
        "normal",
        "score",
    ),
    # steps on the tail of an exponential are all of the same length
    ((2.4e-5, 6.8e-6, -4.5e-6, 2.8e-5), (1.0, 1.0, 1e-6, 1.0), 3.0, 1.0, "laplace", "value"),
    (
        (2.4e-5, 6.8e-6, -4.5e-6, 2.8e-5, 4.2e-5, -1.2e-5, 2e-5),
        (1.0, 1.0, 1e-6, 1.0, 1.0, 1e-6, 1.0),
        5.000001,
        1.0,
        "logistic",
        "value",
    ),
    (
        (0.769, 0.956, 0.369, 0.365, 0.607, 0.0734, 0.875),
        (1e-6, 1.0, 1e-6, 1.0, 1e-6, 1e-6, 1.0),
        2.1437420737271316e-06,
        5.64,
        "normal",
        "value",
    ),
]


def solved(x: Tensor, w: Tensor, budget: Tensor, tau: Tensor, cdf: str, by: str) -> tuple[Tensor, Tensor]:
    """By how much rows miss their budget, in units of what is allowed, and the number of passes over each."""
    found: list[Any] = []

    def counting(*problem: Any) -> Any:
        found.append(root(*problem))
        return found[-1]

    root = getattr(reference, "root")  # noqa: B009
    setattr(reference, "root", counting)  # noqa: B010
    try:
        y, _, _ = reference.soft_budget(x, w, budget, tau, cdf, CDFS[cdf], by, False)
    finally:
        setattr(reference, "root", root)  # noqa: B010
    allowed = 1e-12 * budget + torch.finfo(y.dtype).eps * w.sum(-1)
    return ((w * y).sum(-1) - budget).abs() / allowed, found[0][2]


@pytest.mark.parametrize(("x", "w", "budget", "tau", "cdf", "by"), WORST)
def test_the_worst_rows_known(
    x: tuple[float, ...], w: tuple[float, ...], budget: float, tau: float, cdf: str, by: str
) -> None:
    scores, costs, budgets, taus = (torch.tensor([v], dtype=torch.float64) for v in (x, w, budget, tau))
    missed, passes = solved(scores, costs, budgets, taus, cdf, by)
    assert passes.item() <= MOST
    assert missed.item() <= 1


def hard_rows(n: int, count: int, seed: int, by: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of many sizes, costs of up to twelve decades, budgets next to gaps and next to the ends."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def one_of(parts: list[Tensor]) -> Tensor:
        which = torch.randint(0, len(parts), (count,), generator=g)
        return torch.stack(parts)[which, torch.arange(count)]

    z, scale = normal(count, n), 10 ** (10 * uniform(count, 1) - 5)
    ties = torch.randint(-3, 4, (count, n), generator=g).double()
    x = one_of(
        [
            z,
            z * scale,
            (3 * z).exp(),
            -(5 * z).exp(),
            ties,
            ties * scale + z,
            z * 10 ** (12 * uniform(count, n) - 6),
        ]
    )
    half = torch.where(uniform(count, n) < 0.5, 1e-6, 1.0)
    w = one_of([10 ** (12 * uniform(count, n) - 6), 10 ** (4 * uniform(count, n) - 2), half, 1e6 * half])
    tau = 10 ** (10 * uniform(count) - 7)
    if by == "value":  # of less, t w has not the digits
        tau = torch.maximum(tau, 1e-16 * x.abs().amax(-1))
    level = x / w if by == "value" else x
    costs = w.gather(-1, level.argsort(dim=-1, descending=True))
    paid, place = costs.cumsum(-1), torch.randint(0, n - 1, (count, 1), generator=g)
    gap, total = paid.gather(-1, place).squeeze(-1), w.sum(-1)
    small = 10 ** (-8 * uniform(count))
    part = costs.gather(-1, place + 1).squeeze(-1) * small
    below, above = (torch.nextafter(gap, gap * factor) for factor in (0, 2))
    budget = one_of(
        [gap, below, above, gap + part, total * small, total * (1 - small), total * uniform(count)]
    )
    return x, w, torch.minimum(budget, total * (1 - 1e-13)), tau


@pytest.mark.parametrize("by", ["score", "value"])
@pytest.mark.parametrize("cdf", CDFS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(n=st.sampled_from([2, 3, 5, 7, 12, 30]), seed=st.integers(0, 10_000))
def test_hard_rows(cdf: str, by: str, n: int, seed: int) -> None:
    x, w, budget, tau = hard_rows(n, 200, seed, by)
    missed, passes = solved(x, w, budget, tau, cdf, by)
    assert passes.max() <= MOST
    assert missed.max() <= 1


@pytest.mark.parametrize("by", ["score", "value"])
@pytest.mark.parametrize("cdf", CDFS)
def test_the_unit_of_the_costs_does_not_count(cdf: str, by: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = 15 * torch.randn(4, 200, generator=g, dtype=torch.float64)
    w, tau = torch.rand(4, 200, generator=g, dtype=torch.float64) + 0.1, torch.ones(4, dtype=torch.float64)
    unit = 2.0**30
    _, passes = solved(x, w, 0.2 * w.sum(-1), tau, cdf, by)
    missed, in_units = solved(x, unit * w, 0.2 * unit * w.sum(-1), tau, cdf, by)
    assert (in_units - passes).abs().max() <= 1
    assert missed.max() <= 1
