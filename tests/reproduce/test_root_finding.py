"""Root finding for sigmoid top-k: the roots, and how many steps they take."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor

from khot.baselines._root_finders import iterate
from reproduce.papers import root_finding
from reproduce.papers.root_finding import METHODS, PAPER, problems


def quantile(x: Tensor, k: Tensor) -> Tensor:
    """x_(n−k), by counting: the entry that n − k − 1 others are below."""
    below = (x[:, :, None] > x[:, None, :]).sum(-1)
    return x[below == x.shape[-1] - k.long() - 1][:, None]


@pytest.mark.parametrize("method", METHODS)
def test_reaches_the_root(method: str) -> None:
    x, k = problems(rows=6, n=40, seed=3)
    step, _, guess = method.partition(", ")
    *_, (c, error) = itertools.islice(iterate(x, k, step, guess or "zero", quantile(x, k)), 60)
    assert error.abs().max() < 1e-12
    for row, size, found in zip(x, k, c, strict=True):
        wanted = brentq(lambda c, row=row, size=size: (row + c).sigmoid().sum().item() - size.item(), -50, 50)
        assert found.item() == pytest.approx(wanted, abs=1e-11)


def test_errors_are_those_of_the_sum() -> None:
    x, k = problems(rows=3, n=20, seed=0)
    for c, error in itertools.islice(iterate(x, k, "newton", "logit"), 4):
        torch.testing.assert_close(error, (x + c).sigmoid().sum(-1, keepdim=True) - k)


def test_better_guess_is_no_worse_than_either() -> None:
    x, k = problems(rows=50, n=200, seed=1)
    first = {
        guess: next(iterate(x, k, "halley", guess, quantile(x, k)))[1].abs()
        for guess in ("quantile", "logit", "both")
    }
    assert torch.equal(first["both"], torch.minimum(first["quantile"], first["logit"]))


@pytest.mark.parametrize("method", METHODS)
def test_steps_are_those_of_the_paper(method: str) -> None:
    """The mean of two draws at the paper's n and rows is within two of its standard errors."""
    counts = [root_finding.solve(*problems(rows=100, n=10_000, seed=seed), method) for seed in range(2)]
    mean, deviation = map(float, PAPER[method][0].split(" ± "))
    assert abs(sum(counts) / 2 - mean) <= max(0.05, 1.5 * deviation)


def test_wide_bracket_encloses_the_root_for_every_k() -> None:
    x = torch.zeros(1, 10, dtype=torch.float64)
    for k in (0.0, 10.0):
        *_, (_, error) = itertools.islice(iterate(x, k, "bisection"), 60)
        assert error.abs().max() <= 1e-12


def test_smoke_run(smoke) -> None:
    found = smoke("root-finding")
    for seed in "01":
        steps = {method: found.last("steps", what="table", seed=seed, method=method) for method in METHODS}
        assert steps["bisection"] > 30
        assert max(steps[m] for m in METHODS[1:]) < 15
        assert steps["halley, both"] <= min(steps.values())
    for method in METHODS:
        assert found.last("error", what="figure", method=method) <= root_finding.TOLERANCE
    timed = [row["method"] for row in found.rows if row["what"] == "time"]
    assert timed == [*METHODS, *root_finding.OURS]
    assert "| halley, both |" in found.report
