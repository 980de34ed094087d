"""The loss of logarithms of ranks: its formula, pair by pair, and what it promises of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import khot
from drawn import normal as randn
from khot._ops import log_rank as log_rank_ways
from khot.losses import log_rank_loss
from largest import Largest
from test_ranking_losses import log_rank

INF = math.inf


def grades(*shape: int, most: int = 3, seed: int = 1) -> Tensor:
    return torch.randint(0, most + 1, shape, generator=torch.Generator().manual_seed(seed))


# Ties in scores and in relevance, scores far from each other, real relevance with gaps, none relevant, all.
LISTS = {
    "normal": (randn(4, 30), grades(4, 30)),
    "far": (1e3 * randn(4, 30), grades(4, 30)),
    "near": (1e-9 * randn(4, 30), grades(4, 30)),
    "ties": (randn(4, 30).round(), grades(4, 30)),
    "equal": (torch.zeros(4, 30, dtype=torch.float64), grades(4, 30)),
    "binary": (randn(4, 30), grades(4, 30, most=1)),
    "real": (randn(4, 30), randn(4, 30, seed=2).relu()),
    "gaps": (randn(4, 30), torch.tensor([0, 0.25, 7, 1e3])[grades(4, 30)]),
    "other grades in each": (randn(4, 30), grades(4, 30) * (torch.arange(4) % 3).unsqueeze(-1)),
    "all": (randn(4, 30), 1 + grades(4, 30)),
    "one": (randn(4, 1), grades(4, 1)),
}


@pytest.mark.parametrize("kind", LISTS)
def test_the_pairwise_formula(kind: str) -> None:
    x, relevance = LISTS[kind]
    want = [1 - log_rank(*row) for row in zip(x.numpy(), relevance.double().numpy(), strict=True)]
    got = log_rank_loss(x, relevance, reduction="none")
    assert got.shape == (4,) and got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-13, atol=1e-13)
    assert math.isclose(log_rank_loss(x, relevance, reduction="sum"), sum(want), rel_tol=1e-13)
    mean = sum(want) / max(relevance.sum().item(), 1)
    assert math.isclose(log_rank_loss(x, relevance), mean, rel_tol=1e-13, abs_tol=1e-15)
    single = log_rank_loss(x.float(), relevance, reduction="none")
    assert single.dtype == torch.float32
    if kind != "near":
        np.testing.assert_allclose(single.numpy(), want, rtol=2e-6)


@pytest.mark.parametrize("kind", LISTS)
def test_gradients_of_both_orders(kind: str) -> None:
    x, relevance = (t[:2, :9] for t in LISTS[kind])
    if kind in ("ties", "equal", "far"):
        x = x / x.abs().max().clamp(min=1) * 3  # and central differences meet no kink: G is smooth twice only
    x = x.clone().requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return log_rank_loss(x, relevance)

    assert gradcheck(loss, x, check_forward_ad=True)
    if kind not in ("ties", "equal", "near"):
        assert gradgradcheck(loss, x, check_fwd_over_rev=True, fast_mode=True)


def test_no_pair_is_too_wrong_for_a_gradient() -> None:
    x = torch.tensor([0.0, 1e4], requires_grad=True)
    relevance = torch.tensor([1, 0])
    log_rank_loss(x, relevance).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([-1.0, 1.0]) / (1 + 1e4))
    metric = torch.tensor([0.0, 1e4], requires_grad=True)
    (grad,) = torch.autograd.grad(khot.losses.ndcg_loss(metric, relevance), metric)
    assert (grad == 0).all()


def test_grades_are_a_bound_and_do_not_change_the_loss() -> None:
    x, relevance = LISTS["normal"]
    want = log_rank_loss(x, relevance)
    for most in (3, 4, 50):
        assert torch.equal(log_rank_loss(x, relevance, grades=most), want)
    with pytest.raises(ValueError, match=r"^grades must be at least the number of .*, 3, but got 2$"):
        log_rank_loss(x, relevance, grades=2)
    with pytest.raises(ValueError, match=r"^grades must be at least 1, but got 0"):
        log_rank_loss(x, relevance, grades=0)
    with pytest.raises(TypeError, match=r"^grades must be an int, but got float"):
        log_rank_loss(x, relevance, grades=2.0)  # type: ignore[arg-type]
    traced = torch.compile(lambda x, r: log_rank_loss(x, r, grades=2, reduction="none"), backend="aot_eager")
    few = torch.cat((relevance[:1].clamp(max=2), relevance[1:]))
    assert traced(x, few).isnan().tolist() == [False, True, True, True]


def test_a_bad_relevance_spoils_its_list_alone() -> None:
    x, relevance = randn(2, 3), torch.tensor([[2.0, 1, 0], [0, 1, 2]])
    for at, value in ((0, -1.0), (1, INF), (2, math.nan)):
        wrong = relevance.clone()
        wrong[0, at] = value
        got = torch.func.vmap(lambda x, r: log_rank_loss(x, r, reduction="sum"))(x, wrong)
        assert got.isnan().tolist() == [True, False]


def test_infinite_scores() -> None:
    relevance = torch.tensor([1, 0, 0])
    assert log_rank_loss(torch.tensor([INF, 1, 0]), relevance) == 0
    tied = log_rank_loss(torch.tensor([INF, INF, 0], dtype=torch.float64), relevance)
    assert math.isclose(tied, math.log1p(0.5))
    x = torch.tensor([1.0, INF, 0], requires_grad=True)
    loss = log_rank_loss(x, relevance)
    loss.backward()
    assert loss > 700 and x.grad is not None and x.grad.isfinite().all()
    assert log_rank_loss(torch.tensor([-INF, 1, 0]), relevance) == 0


@pytest.mark.parametrize("cells", [1, 300, 1 << 18])
def test_tiles_of_pairs_are_the_same(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, gradients of both orders, with a mask and where a list has few grades, or none."""
    relevance = randn(3, 40, seed=2).relu() * torch.tensor([[1.0], [0.0], [3.0]]).double()
    relevance[2] = relevance[2].ceil()
    mask = torch.arange(40) % 7 != 2
    monkeypatch.setattr(log_rank_ways, "CELLS", cells)
    for x in (randn(3, 40), 30 * randn(3, 40).round()):
        for options in ({}, {"mask": mask}, {"reduction": "none"}, {"grades": 40}):
            found = []
            for long in (10_000, 1):
                monkeypatch.setattr(log_rank_ways, "LONG", long)
                leaf = x.clone().requires_grad_()
                loss = log_rank_loss(leaf, relevance, **options)
                (first,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
                (again,) = torch.autograd.grad(loss.sum(), leaf, create_graph=True)
                (second,) = torch.autograd.grad(again.square().sum(), leaf)
                found.append((loss, first, second))
            torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


def test_many_grades_take_little_memory() -> None:
    """No tensor is as large as one with an entry for each pair."""
    x, relevance = randn(2000).requires_grad_(), randn(2000, seed=1).abs()

    with Largest() as mode:
        log_rank_loss(x, relevance).backward()
    assert mode.nbytes < 8 * 2000**2 / 4
