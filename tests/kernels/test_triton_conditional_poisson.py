"""Conditional Poisson samples of the Triton kernel, interpreted.

The law is checked in three steps, of which only the first two need the interpreter, which takes half a second
for each row: the trials that the kernel repeats have the inclusion probabilities, by enumeration; the sample
is the first of these trials that has the right size; and so chosen, samples have the law.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from khot import sigmoid_topk
from khot._kernels.reference import draws as reference
from khot._kernels.reference import fixed_point, philox
from subsets import assert_frequencies, subsets

SEED = torch.tensor(-5)
F64 = torch.float64
TOLERANCE = 1e-6
TRIES = 60  # of which each row needs far fewer

ROWS = {
    "two": [0.9, 0.1],
    # θ = logit π would be taken for the solution, after which the two would be drawn with even chances
    "nearly certain": [1 - 1e-6, 1e-6],
    "three": [1 - 1e-4, 6e-5, 4e-5],
    "certain": [1.0, 0.0, 0.6, 0.4, 0.0],
    "decided": [1.0, 0.0, 0.0, 1.0],
    "none": [0.0],
    "all": [1.0] * 8,
    "half a unit": [0.3, 0.15, 0.05],
    "one against many": [0.99] + [0.00125] * 8,
    "mixed": [0.999, 0.6, 0.4, 1e-3],
    "2.5 of 8": [0.9, 0.7, 0.3, 0.2, 0.15, 0.1, 0.1, 0.05],
    "beside zero": [1.0, 1e-7],  # within the tolerance of 1
}


@pytest.fixture
def draws(kernels: ModuleType) -> Any:
    return sys.modules["khot._kernels.triton.conditional_poisson"]


def trials(draws: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The sample; and the p of the trials that the kernel repeats, with the phantom unit after each row, as 0
    where it is none."""
    n, out = x.shape[-1], torch.empty_like(x)
    constants = draws.which(n)
    scratch = torch.empty(len(x), constants["BLOCK"] + 128, dtype=F64)
    given = draws.layout.rows(x, n), SEED, out, scratch, n, TOLERANCE
    draws.launch(draws._conditional_poisson, len(x), *given, **constants)
    none = sizes(x)[1] == 0
    return out, torch.cat((scratch[:, :n], scratch[:, n : n + 1].masked_fill(none.unsqueeze(-1), 0)), -1)


def sizes(x: Tensor) -> tuple[Tensor, Tensor]:
    """How many units rows select, with a phantom unit, and that unit's probability."""
    total = x.double().sum(-1)
    whole = (total - total.round()).abs() <= TOLERANCE
    k = torch.where(whole, total.round(), total.ceil())
    return k, torch.where(whole, 0, k - total)


def first_of_size(p: Tensor, k: Tensor, block: int, seed: Tensor = SEED) -> Tensor:
    """Of trials with uniforms of `block` columns each, the first of size k."""
    u = philox.uniform(seed, (len(p), TRIES * block)).view(len(p), TRIES, block)[..., : p.shape[-1]]
    x = u < p.unsqueeze(1)
    right = x.sum(-1) == k.unsqueeze(-1)
    assert right.any(-1).all()
    return x[torch.arange(len(p)), right.int().argmax(-1)]


def test_inclusion_probabilities_by_enumeration(draws: Any) -> None:
    """Of hard rows; and their samples are the trials' first of the right size."""
    x = torch.zeros(len(ROWS), 9, dtype=F64)
    for row, values in zip(x, ROWS.values(), strict=True):
        row[: len(values)] = torch.tensor(values)
    got, p = trials(draws, x)
    k, phantom = sizes(x)
    for name, pi, rest, size, odds in zip(ROWS, x, phantom, k, p, strict=True):
        S = subsets(10, int(size)).bool()
        weight = torch.where(S, odds, 1 - odds).prod(-1)
        found = (weight / weight.sum()) @ S.double()
        want = torch.cat((pi, rest.reshape(1)))
        assert (found - want).abs().max() < 2e-7, (name, found, want)
    assert torch.equal(got, first_of_size(p, k, draws.which(9)["BLOCK"])[:, :-1].double())
    assert (got[x == 1] == 1).all() and (got[x == 0] == 0).all()


def test_samples_have_the_law(draws: Any) -> None:
    """The trials' first of the right size, for a row that the kernel has calibrated."""
    x = torch.tensor([[0.9, 0.5, 0.3, 0.2, 0.1]], dtype=F64)
    _, p = trials(draws, x)
    S = subsets(6, 2)
    theta, _ = fixed_point.calibrate_kernel(torch.logit(x), torch.tensor([2.0], dtype=F64))
    law = torch.where(S[:, -1] == 1, 0, (S[:, :-1] @ theta[0]).exp())
    found = first_of_size(p.expand(1_500, 6), torch.full((1_500,), 2), draws.which(5)["BLOCK"])
    code = 2 ** torch.arange(6)
    counts = torch.bincount(found.long() @ code, minlength=64)[S.long() @ code]
    assert counts.sum() == 1_500
    assert_frequencies(counts.numpy(), (law / law.sum()).numpy())


def test_odds_of_longer_rows_as_the_reference(draws: Any) -> None:
    """Of one that fills the program's width with its phantom unit, of one that has none, and of some that
    fill it alone."""
    for n, k in ((63, 20.5), (40, 6.0), (32, 6.0), (64, 20.5)):
        scores = 2 * torch.randn(1, n, generator=torch.Generator().manual_seed(n), dtype=F64)
        x = sigmoid_topk(scores, k)
        got, p = trials(draws, x)
        size, phantom = sizes(x)
        pi = torch.cat((x, phantom.unsqueeze(-1)), -1)
        want, _ = fixed_point.calibrate_kernel(torch.logit(pi), size)
        free, variance = (pi > 0) & (pi < 1), pi * (1 - pi)
        difference = (torch.logit(p) - want).where(free, 0)
        difference -= (difference * variance).sum() / variance.sum()
        assert (difference * variance).abs().max() < 2e-7
        assert abs(got.sum() - k) < 1
        assert torch.equal(got, first_of_size(p, size, draws.which(n)["BLOCK"])[:, :-1].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes_layouts_and_the_seed(draws: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.75, 0.5, 0.25, 0.25, 0.25], [1.0, 0.5, 0.25, 0.125, 0.25]], dtype=dtype)
    want = draws.conditional_poisson_sample(x, SEED, TOLERANCE)
    assert want.dtype == dtype and want.is_contiguous()
    assert want.sum(-1)[0] == 2 and want.sum(-1)[1] in (2, 3) and set(want.unique().tolist()) == {0, 1}
    if dtype == torch.float32:
        same = x.T.contiguous().T.unsqueeze(0)
        again = draws.conditional_poisson_sample(same, SEED, TOLERANCE)
        assert torch.equal(again, want.unsqueeze(0)) and again.is_contiguous()
        repeated = draws.conditional_poisson_sample(x[:1].expand(4, 5), SEED, TOLERANCE)
        assert torch.equal(repeated[0], want[0]) and (repeated.sum(-1) == 2).all()
        assert len(repeated.unique(dim=0)) > 1


def test_what_is_long_or_empty_is_left_to_the_reference(draws: Any) -> None:
    x = torch.full((2, draws.LONGEST + 1), 0.01, dtype=F64)
    x[1, 5] = math.nan
    got = draws.conditional_poisson_sample(x, SEED, TOLERANCE)
    want = reference.conditional_poisson_sample(x, SEED, TOLERANCE)
    assert torch.equal(got[0], want[0]) and got[1].isnan().all() and want[1].isnan().all()
    assert got[0].sum() in (10, 11)
    for shape in ((0, 4), (3, 0), (2, 0, 3)):
        assert draws.conditional_poisson_sample(torch.zeros(shape), SEED, TOLERANCE).shape == shape
