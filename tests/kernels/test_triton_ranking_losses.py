"""The ranking losses of the Triton kernels, interpreted, against sums over all pairs and NumPy in float64."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from drawn import normal as randn

INF, NAN = torch.inf, torch.nan


@pytest.fixture(autouse=True)
def small(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs, because the interpreter also spends time on rows and entries that are not there. Lists
    of more than 32 entries are long."""
    ranks = sys.modules["khot._kernels.triton.ranks"]
    for name, value in {"NARROW": 1, "TOGETHER": 64, "RANKED": 32, "CHUNK": 16}.items():
        monkeypatch.setattr(ranks, name, value)
    monkeypatch.setattr(sys.modules["khot._kernels.triton.ranking_losses"], "SORTED", 32)


def scores(n: int) -> Tensor:
    """Narrow and wide lists, ties, all equal, padding, a first place at infinity, nothing but padding."""
    x = randn(7, n)
    x[0] *= 1e-6
    x[1] *= 30
    x[2] = (2 * x[2]).round()
    x[3] = -1.5
    x[4, ::3] = -INF
    x[5, 0] = INF
    x[6] = -INF
    return x.float()


LENGTHS = [1, 2, 19, 32, 33, 50]  # of which the last two are long, and 33 has a chunk of one entry


# ------------------------------------------------------------------------------------------ centred ranks


def centred(x: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Σ_j [F((x_j − x_i)/τ) − ½] over the entries that are there, and Σ_j |…|."""
    x = x.double()
    distance = (x.unsqueeze(-2) - x.unsqueeze(-1)).nan_to_num(posinf=INF, neginf=-INF) / tau
    there = x != -INF
    both = there.unsqueeze(-2) & there.unsqueeze(-1)
    terms = torch.where(both, -0.5 * distance.sign() * torch.expm1(-distance.abs()), 0)
    return terms.sum(-1), terms.abs().sum(-1)


@pytest.mark.parametrize("tau", [0.02, 1.0, 1e7])
@pytest.mark.parametrize("n", LENGTHS)
def test_centred_ranks_keep_their_digits(kernels: ModuleType, n: int, tau: float) -> None:
    x = scores(n)
    got, order = kernels.laplace_centred_rank(x, torch.tensor(tau).double())
    assert got.dtype == torch.float32 and torch.equal(
        order.long(), x.sort(dim=-1, descending=True, stable=True).indices
    )
    want, size = centred(x, tau)
    assert ((got.double() - want).abs() <= 1e-6 * size).all()
    assert (got[x == -INF] == 0).all()


# ------------------------------------------------------------------------------------------------- places


def places(value: Tensor, x: Tensor) -> Tensor:
    """½ for each equal entry and 1 for each larger one, less the mean, by all pairs."""
    there = x != -INF
    above, equal = (
        (f(value.unsqueeze(-2), value.unsqueeze(-1)) & there.unsqueeze(-2)).sum(-1)
        for f in (torch.gt, torch.eq)
    )
    rank = above + 0.5 * (equal + 1) - 0.5 * (there.sum(-1, keepdim=True) + 1)
    return torch.where(there, rank, 0)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int16, torch.int64],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 19, 32, 50])
def test_places_share_those_of_equal_values(kernels: ModuleType, n: int, dtype: torch.dtype) -> None:
    x = scores(n)
    value = (3 * randn(7, n, seed=1)).round()
    value = (value > 0) if dtype == torch.bool else value.abs().to(dtype)
    if dtype.is_floating_point:
        value[1, ::2], value[1, 1::4] = -INF, INF
        value[4, 1::2] = -INF  # as low as padding
        least = 1e-30 if dtype == torch.bfloat16 else 1e-40  # whose digits the interpreter drops
        value[5] = torch.tensor([0.0, -0.0, least, 2 * least])[torch.arange(n) % 4].to(dtype)
        value[4, 0] = NAN  # which takes no part
    elif dtype == torch.int64:
        value += 2**60
    assert torch.equal(kernels.centred_places(value, x), places(value, x).float())
    turned = kernels.centred_places(value.mT.contiguous().mT, x)
    assert torch.equal(turned, places(value, x).float())


def test_places_of_a_nan(kernels: ModuleType) -> None:
    for n in (9, 40):
        x, value = randn(2, n).float(), randn(2, n).float()
        value[0, 3] = NAN
        assert kernels.centred_places(value, x).isnan().all(-1).tolist() == [True, False]


# --------------------------------------------------------------------------------------------------- NDCG


@pytest.mark.parametrize("at_k", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
def test_ndcg(kernels: ModuleType, n: int, at_k: bool) -> None:
    x, relevance = scores(n), (2 * randn(7, n, seed=2).abs()).round()
    relevance[1] = 0
    relevance[0] *= 1e37  # whose sum float32 has not
    relevance[2] *= 1e-42
    relevance[4, 0] = NAN  # which takes no part
    relevance[5] = torch.rand(n, generator=torch.Generator().manual_seed(n))
    rank = (1 + (n - 1) * torch.rand(7, n, generator=torch.Generator().manual_seed(3))).float()
    k = torch.tensor([1.0, 2.0, 2.5, n, n + 3, 1.5, 4.0]).double() if at_k else None
    cut = torch.rand(7, n, generator=torch.Generator().manual_seed(4)).double() if at_k else None
    loss, counted, weight = kernels.ndcg_loss(rank, relevance.float(), x, cut, k)
    assert loss.dtype == torch.float64 and weight.dtype == torch.float32
    gain = np.where(x == -INF, 0, relevance.float())
    place = np.arange(n)
    part = 1.0 if k is None else np.clip(k[:, None].numpy() - place, 0, 1)
    ideal = (-np.sort(-gain.astype(float)) / np.log2(place + 2) * part).sum(-1)
    want = gain / np.where(ideal > 0, ideal, 1)[:, None]
    assert counted.tolist() == (ideal > 0).tolist()
    np.testing.assert_allclose(weight.numpy(), want, rtol=1e-6)
    y = 1.0 if cut is None else cut.numpy()
    log = np.log2(1 + rank.double().numpy())
    np.testing.assert_allclose(loss.numpy(), np.maximum(0, 1 - (want * y / log).sum(-1)), rtol=0, atol=3e-7)

    grad = torch.linspace(-1, 2, 7).double()
    drank, dcut = kernels.ndcg_loss_backward(grad, rank, weight, cut)
    slope = grad[:, None].numpy() * want * y / (log**2 * (1 + rank.double().numpy()) * np.log(2))
    np.testing.assert_allclose(drank.numpy(), slope, rtol=2e-6)
    if cut is not None:
        np.testing.assert_allclose(dcut.numpy(), -grad[:, None].numpy() * want / log, rtol=2e-6)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64], ids=str
)
def test_ndcg_takes_relevance_of_any_dtype(kernels: ModuleType, dtype: torch.dtype) -> None:
    for n in (7, 40):
        rank, x = 1 + randn(3, n).abs().float(), scores(n)[:3]
        relevance = (randn(3, n, seed=1) > 0).to(dtype)
        want = kernels.ndcg_loss(rank, relevance.float(), x, None, None)
        for each in (relevance, relevance.mT.contiguous().mT):
            got = kernels.ndcg_loss(rank, each, x, None, None)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [-1.0, -1e-45, INF, NAN])
@pytest.mark.parametrize("n", [7, 40])
def test_ndcg_of_a_relevance_that_is_none(kernels: ModuleType, n: int, bad: float) -> None:
    rank, x, relevance = torch.ones(2, n), randn(2, n).float(), torch.ones(2, n)
    relevance[0, 2] = bad
    loss, counted, weight = kernels.ndcg_loss(rank, relevance, x, None, None)
    assert loss.isnan().tolist() == [True, False] and counted.all()
    assert weight.isnan().all(-1).tolist() == [True, False]


# -------------------------------------------------------------------------------------------- correlation


@pytest.mark.parametrize("n", LENGTHS)
def test_correlation(kernels: ModuleType, n: int) -> None:
    a, b = randn(6, n), randn(6, n, seed=1)
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    a[1] *= 1e-9
    a[2] *= 1e-17  # less than rounding leaves of ranks
    b[3] = 0
    a[4] = b[4]
    a[5] = -b[5]
    a, b = a.float(), b.float()
    loss, counted = kernels.correlation_loss(a, b)
    x, y = a.double().requires_grad_(), b.double()
    length, other = x.square().sum(-1), y.square().sum(-1)
    none = length <= n * (4 * 2.0**-52 * n) ** 2
    cosine = (x * y).sum(-1) / (length * other).masked_fill(none | (other == 0), 1).sqrt()
    want = (1 - cosine.masked_fill(none, 0)).clamp(min=0)
    assert counted.tolist() == (other != 0).tolist()
    np.testing.assert_allclose(loss.numpy(), want.detach().numpy(), rtol=0, atol=5e-7)
    grad = torch.linspace(-1, 2, 6).double()
    (cosine.masked_fill(none, 0) * -grad).sum().backward()
    got = kernels.correlation_loss_backward(grad, a, b).double()
    assert x.grad is not None
    size = torch.where(none, 1, grad.abs() / length.clamp(min=1e-300).sqrt())[:, None]
    assert ((got - x.grad).abs() <= 1e-6 * size).all()


def test_mean_of_what_counts(kernels: ModuleType) -> None:
    loss, counted = randn(3, 70), randn(3, 70, seed=1) > 0
    counted[1] = False
    loss[~counted] = NAN
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        mean, number = kernels.counted_mean(loss, counted, dtype)
        assert mean.dtype == dtype and number.tolist() == counted.sum(-1).clamp(min=1).tolist()
        want = [loss[0, counted[0]].mean(), 0, loss[2, counted[2]].mean()]
        # the interpreter cuts digits off where it stores bfloat16, and a device rounds
        np.testing.assert_allclose(mean.double(), want, rtol=8 * torch.finfo(dtype).eps, atol=0)
        mean, number = kernels.counted_mean(loss[:, counted[2]], None, dtype)  # of all, also where one is NaN
        assert number.tolist() == [counted[2].sum()] * 3
        want = loss[:, counted[2]].mean(-1)
        np.testing.assert_allclose(mean.double(), want, rtol=8 * torch.finfo(dtype).eps, atol=0)
    assert kernels.counted_mean(loss[:, :0], counted[:, :0], torch.float32)[0].tolist() == [0, 0, 0]
    assert kernels.counted_mean(loss[:, :0], None, torch.float32)[0].isnan().all()
