"""The compiled draws against the reference: the same seed gives the same units."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from khot import sigmoid_topk
from khot._kernels import active
from khot._kernels.reference import draws
from khot.sampling._designs.pareto import LEAST

pytestmark = pytest.mark.skipif(active()["cpu"] == "reference", reason="no compiled kernels in use")

SIZES = [1, 2, 3, 7, 8, 33, 100, 1_024, 1_025, 5_000]
SEED = torch.tensor(-5)


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
    assert torch.equal(torch.ops.khot.tournament(probs, SEED).sum(-1), k.long())


def test_layouts() -> None:
    base = torch.rand(40, 90, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    views = (
        base.T,
        base[:, ::2],
        base[::3],
        base[:1].expand(5, 90),
        base[:, :1].expand(40, 32),
        base[:, 3:53],
    )
    for x in views:
        k = torch.full(x.shape[:-1], x.shape[-1] // 3)
        for dtype in (torch.float64, torch.float32):
            check_order(x.to(dtype), k)
            got, want = torch.ops.khot.tournament(x.to(dtype), SEED), draws.tournament(x.to(dtype), SEED)
            assert torch.equal(got, want)


def test_ends_and_rows_that_are_not_numbers() -> None:
    theta = torch.tensor([[math.nan, 1.0, 2.0], [math.inf, -math.inf, math.inf], [math.nan] * 3])
    for k in range(4):
        got = torch.ops.khot.order_sample(theta, torch.tensor([k] * 3), SEED)
        assert (got.sum(-1) == k).all()
    assert not torch.ops.khot.order_sample(theta, torch.tensor([2] * 3), SEED)[:2, :2].all(-1).any()
    for shape in ((0, 4), (3, 0), (2, 0, 3)):
        empty = torch.zeros(shape, dtype=torch.float64)
        assert torch.ops.khot.order_sample(empty, torch.zeros(shape[:-1]), SEED).shape == shape
        assert torch.ops.khot.tournament(empty, SEED).shape == shape


def test_threads_do_not_change_a_bit() -> None:
    probs = rows(700)[0][:, None].expand(9, 40, 700)
    k = probs.sum(-1).round()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            order = torch.ops.khot.order_sample(torch.logit(probs), k, SEED)
            results.append(torch.stack((order, torch.ops.khot.tournament(probs, SEED))))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_opcheck() -> None:
    probs, k = rows(33)
    torch.library.opcheck(torch.ops.khot.order_sample.default, (torch.logit(probs), k.long(), SEED))
    torch.library.opcheck(torch.ops.khot.tournament.default, (probs, SEED))


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


def test_pareto_samples_are_left_to_others() -> None:
    """Where the formula does not hold in some row, or a row is not of probabilities."""
    good = torch.full((2, 20), 0.5)
    few = torch.stack((good[0], torch.tensor([0.99] + [0.01] * 19)))
    wrong = [good.clone() for _ in range(4)]
    for x, value in zip(wrong, (math.nan, 1.5, -0.1, math.inf), strict=True):
        x[1, 3] = value
    for x in (few, *wrong):
        args = (x, SEED, LEAST, 1e-6)
        assert not torch.ops.khot.pareto_sample(*args)[1] and not draws.pareto_sample(*args)[1]
    assert torch.ops.khot.pareto_sample(good, SEED, LEAST, 1e-6)[1]


def test_opcheck_of_pareto_samples() -> None:
    probs = torch.rand(3, 33, generator=torch.Generator().manual_seed(0))
    for x in (probs, probs.double(), probs.T.contiguous().T):
        torch.library.opcheck(torch.ops.khot.pareto_sample.default, (x, SEED, LEAST, 1e-6))
