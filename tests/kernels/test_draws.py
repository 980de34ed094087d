"""The compiled draws against the reference: the same seed gives the same units."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from khot import sigmoid_topk
from khot._kernels import active
from khot._kernels.reference import draws, halving
from khot._kernels.reference.order_sampling import LEAST
from khot._ops.tilting import tilt_rows

pytestmark = pytest.mark.skipif(active()["cpu"] == "reference", reason="no compiled kernels in use")

SIZES = [1, 2, 3, 7, 8, 33, 100, 1_024, 1_025, 5_000]
SEED, ORDER = torch.tensor(-5), torch.tensor(7)


def rows(n: int, scale: float = 1.5) -> tuple[Tensor, Tensor]:
    """Probabilities of every size k with some certain units, and k."""
    k = torch.linspace(0, n, 9).round()
    scores = scale * torch.randn(9, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    scores[::2, : n // 10] = math.inf
    scores[1::2, : n // 10] = -math.inf
    k = k.clamp(min=n // 10, max=n - n // 10)
    return sigmoid_topk(scores, k), k


def check_order(theta: Tensor, k: Tensor) -> None:
    got = torch.ops.khot.order_sample(theta, k, SEED)
    assert torch.equal(got, draws.order_sample(theta, k, SEED))
    assert torch.equal(got.sum(-1), k.expand(got.shape[:-1]).long())


@pytest.mark.parametrize("n", SIZES)
def test_order_sampling_as_the_reference(n: int) -> None:
    probs, k = rows(n)
    check_order(torch.logit(probs), k.long())
    check_order(torch.logit(probs[:, None]).expand(9, 50, n), k.long()[:, None].expand(9, 50))
    # wherever the threshold lies
    check_order(torch.logit(probs) + 100, k.long())
    check_order(1e4 * torch.logit(probs), k.long())


@pytest.mark.parametrize("n", SIZES)
def test_tournaments_as_the_reference(n: int) -> None:
    probs, k = rows(n)
    for x in (probs, probs[:, None].expand(9, 50, n), probs.flip(0)):
        assert torch.equal(torch.ops.khot.tournament(x, SEED), draws.tournament(x, SEED))
        got, want = (f(x, ORDER, SEED) for f in (torch.ops.khot.random_tournament, draws.random_tournament))
        assert torch.equal(got, want)
    assert torch.equal(torch.ops.khot.tournament(probs, SEED).sum(-1), k.long())
    assert torch.equal(torch.ops.khot.random_tournament(probs, ORDER, SEED).sum(-1), k.long())


def check_trials(z: Tensor, k: Tensor, which: Tensor) -> None:
    got, want = (f(z, k, which, SEED) for f in (torch.ops.khot.trials, halving.trials))
    assert torch.equal(got, want)
    assert torch.equal(got.sum(-1), k[which].long())


@pytest.mark.parametrize("scale", [0.1, 1.5, 20.0])
@pytest.mark.parametrize("n", SIZES)
def test_trials_as_the_reference(n: int, scale: float) -> None:
    """Every size, whole draws and halves, several draws of each design; centred and not quite so."""
    probs, k = rows(n, scale)
    z = tilt_rows(torch.logit(probs), k).z
    which = torch.arange(9).repeat(5 if n <= 1_024 else 1)
    check_trials(z, k, which)
    check_trials(z + torch.linspace(-0.5, 0.5, 9, dtype=torch.float64).unsqueeze(-1), k, which.flip(0))


def test_trials_that_cannot_be_drawn_stay_empty() -> None:
    z = torch.tensor([[math.nan, 1.0, 2.0], [math.inf] * 3, [math.inf, 0.0, -math.inf]], dtype=torch.float64)
    k, which = torch.tensor([1.0, 2.0, 3.0]), torch.arange(3)
    for f in (torch.ops.khot.trials, halving.trials):
        assert not f(z, k, which, SEED).any()


def test_ends_and_rows_that_are_not_numbers() -> None:
    theta = torch.tensor([[math.nan, 1.0, 2.0], [math.inf, -math.inf, math.inf], [math.nan] * 3])
    for k in range(4):
        got = torch.ops.khot.order_sample(theta, torch.tensor([k] * 3), SEED)
        assert (got.sum(-1) == k).all()
    assert not torch.ops.khot.order_sample(theta, torch.tensor([2] * 3), SEED)[:2, :2].all(-1).any()
    for rows_, n in ((0, 4), (3, 0)):
        z, k, which = torch.zeros(rows_, n, dtype=torch.float64), torch.zeros(rows_), torch.arange(rows_)
        assert torch.ops.khot.trials(z, k, which, SEED).shape == (rows_, n)


def test_threads_do_not_change_a_bit_of_trials() -> None:
    (probs, k), which = rows(700), torch.arange(9).repeat_interleave(40)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(torch.ops.khot.trials(torch.logit(probs), k, which, SEED))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def pareto(probs: Tensor) -> tuple[Tensor, Tensor]:
    args = (probs, SEED, LEAST, probs.shape[-1] * torch.finfo(probs.dtype).eps)
    got, drawn = torch.ops.khot.pareto_sample(*args)
    want, reference_drawn = draws.pareto_sample(*args)
    assert drawn and reference_drawn
    return got, want


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [33, 100, 1_024, 5_000])
def test_pareto_samples_as_the_reference(n: int, dtype: torch.dtype) -> None:
    """Whole sums and others, with certain units, in any layout."""
    probs = rows(n)[0]
    probs = probs[(probs * (1 - probs)).sum(-1) > LEAST + 1].to(dtype)
    assert len(probs) > 2
    for x in (
        probs,
        0.9 * probs,
        probs.T.contiguous().T,
        probs[:1].expand(5, n),
        probs[:, None].expand(-1, 3, n),
    ):
        got, want = pareto(x)
        assert got.dtype == dtype and torch.equal(got, want) and got.any()


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        *((2, torch.bfloat16), (5, torch.float64), (16, torch.float32), (40, torch.bfloat16)),
        *((150, torch.float64), (150, torch.float32)),
    ],
)
def test_calibrated_pareto_samples_as_the_reference(n: int, dtype: torch.dtype) -> None:
    """Rows that the formula does not serve, and rows that are to be exact. The parameters differ by 1e-7."""
    few = sigmoid_topk(2 * torch.randn(64, n, generator=torch.Generator().manual_seed(n)), 1).to(dtype)
    assert ((few * (1 - few)).sum(-1) < LEAST).any()
    few[0], few[1, : n // 2], few[1, n // 2 :] = 0, 1, 0
    for x in (few, 0.9 * few):
        for least in (LEAST, math.inf):
            args = (x, SEED, least, n * torch.finfo(dtype).eps)
            got, drawn = torch.ops.khot.pareto_sample(*args)
            want, reference_drawn = draws.pareto_sample(*args)
            assert drawn and reference_drawn and got.dtype == dtype
            assert torch.equal(got, want)


def test_pareto_samples_are_of_probabilities() -> None:
    good = torch.full((2, 20), 0.5)
    wrong = [good.clone() for _ in range(4)]
    for x, value in zip(wrong, (math.nan, 1.5, -0.1, math.inf), strict=True):
        x[1, 3] = value
    for least in (LEAST, math.inf):
        for x in wrong:
            args = (x, SEED, least, 1e-6)
            assert not torch.ops.khot.pareto_sample(*args)[1] and not draws.pareto_sample(*args)[1]
        assert torch.ops.khot.pareto_sample(good, SEED, least, 1e-6)[1]
