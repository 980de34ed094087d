"""Laplace's ranks and sorts of the Triton kernels, interpreted, against sums over all pairs."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from khot._kernels.reference import laplace as reference

INF = torch.inf
TAUS = [1e-3, 1.0, 30.0]
#: How far a sum of float32 may be off, in units of its largest terms: the rounding of a few of them.
ROUNDED = 2e-6


@pytest.fixture(autouse=True)
def small(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs, because the interpreter also spends time on rows and entries that are not there."""
    module = sys.modules["khot._kernels.triton.ranks"]
    monkeypatch.setattr(module, "NARROW", 1)
    monkeypatch.setattr(module, "TOGETHER", 64)


def rows(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Spread and narrow rows, ties, equal entries, clusters, Cauchy's, an outlier, infinite entries; a tie of
    signed zeros."""
    g = torch.Generator().manual_seed(n)
    x = torch.randn(10, n, generator=g, dtype=torch.float64)
    x[0] *= 1e-6
    x[1] *= 5
    x[2] = (2 * x[2]).round()
    x[3] = 3.3
    x[4, n // 2 :] += 1e4
    x[5] /= torch.randn(n, generator=g, dtype=torch.float64)
    x[6, -1] = 1e6 if dtype != torch.float16 else 6e4
    x[7, ::7], x[7, 3::5] = INF, -INF
    x[8], x[8, ::2] = 0.0, -0.0
    x[9] *= 1e4
    return x.to(dtype)


def distances(x: Tensor, t: Tensor, tau: Tensor) -> Tensor:
    """(x_j − t_i)/τ at [i, j], 0 of equal ones."""
    x, t = x.double().unsqueeze(-2), t.double().unsqueeze(-1)
    return torch.where(x == t, 0, x - t) / tau.double()[:, None, None]


def pairs(x: Tensor, tau: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ranks, the gradients in x and τ, and Σ |f (v_j − v_i)|/τ, by which errors of the gradients are told."""
    z = distances(x, x, tau)
    f, v, tau = 0.5 * torch.exp(-z.abs()), v.double(), tau.double()
    rank = 0.5 + torch.where(z > 0, 1 - f, f).sum(-1)
    finite = x.isfinite()
    f = torch.where(finite[:, None] & finite[..., None], f, 0)
    pull = f * (v[:, None] - v[..., None]) / tau[:, None, None]
    dtau = -(v[..., None] * torch.where(f == 0, 0, f * z)).sum((-2, -1)) / tau
    return rank, pull.sum(-1), dtau, pull.abs().sum(-1)


def check_ranks(kernels: ModuleType, x: Tensor, tau: Tensor, eps: float = 0.0) -> None:
    g = torch.Generator().manual_seed(0)
    v = torch.randn(x.shape, generator=g).to(x.dtype)
    rank, order, place = kernels.laplace_count(x, None, tau)
    assert rank.dtype == x.dtype and order.dtype == place.dtype == torch.int32
    assert place.shape == (*x.shape[:-1], 0)
    assert torch.equal(order, reference.laplace_count(x, None, tau)[1])
    dx, dlevels, dtau = kernels.laplace_count_backward(v, x, order, None, place, tau, True)
    assert dx.dtype == x.dtype and dtau.dtype == torch.float64 and dlevels.shape == (*x.shape[:-1], 0)
    want, want_dx, want_dtau, size = pairs(x, tau, v)
    assert ((rank.double() - want).abs() <= (5e-7 + eps) * want).all()
    most = size.amax(-1, keepdim=True)
    assert ((dx.double() - want_dx).abs() <= (ROUNDED + eps) * most + 1e-30).all()
    assert ((dtau - want_dtau).abs() <= 2 * ROUNDED * (want_dtau.abs() + most[:, 0]) + 1e-30).all()
    rank, index, _ = kernels.laplace_count(x, None, tau, False)
    want = pairs(-x, tau, v)[0]
    assert ((rank.double() - want).abs() <= (5e-7 + eps) * want).all() and torch.equal(index, order)
    other = kernels.laplace_count_backward(v, x, order, None, place, tau, True, False)
    assert torch.equal(other[0], -dx) and torch.equal(other[2], -dtau)


@pytest.mark.parametrize("n", [1, 2, 33])
def test_ranks_are_the_sums_over_all_pairs(kernels: ModuleType, n: int) -> None:
    x = rows(n)
    tau = torch.tensor(TAUS, dtype=torch.float64)
    check_ranks(kernels, x.repeat(len(TAUS), 1), tau.repeat_interleave(len(x)))


@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize("n", [65, 130])
def test_ranks_of_a_row_to_a_program(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, n: int, doubles: bool
) -> None:
    monkeypatch.setattr(kernels.layout, "compares_doubles", lambda _: doubles)
    check_ranks(kernels, rows(n)[4:8:3], torch.tensor([1.0, 0.05], dtype=torch.float64))


def test_ranks_at_the_ends_of_float32(kernels: ModuleType) -> None:
    """Temperatures that float32 has not, and scores whose differences it has not."""
    most = torch.finfo(torch.float32).max
    x = torch.tensor([[1.0, 1.0, 1.0 + 2**-20, -2.0], [most, -most, 3e38, 3e38]])
    for number in (1e-300, 1e-39, 1e-12):
        tau = torch.tensor(number, dtype=torch.float64)
        rank, order, place = kernels.laplace_count(x, None, tau)
        assert rank.tolist() == [[2.5, 2.5, 1, 4], [1, 4, 2.5, 2.5]]
        dx, _, dtau = kernels.laplace_count_backward(torch.ones_like(x), x, order, None, place, tau, True)
        assert (dx == 0).all() and (dtau == 0).all()
    rank = kernels.laplace_count(x[:1], None, torch.tensor(1e300, dtype=torch.float64))[0]
    assert rank.tolist() == [[2.5] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [17, 50])
def test_ranks_of_long_rows(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, n: int, dtype: torch.dtype
) -> None:
    """In chunks of 16: two, of which one has a single entry, and four."""
    module = sys.modules["khot._kernels.triton.ranks"]
    monkeypatch.setattr(module, "RANKED", 8)
    monkeypatch.setattr(module, "CHUNK", 16)
    x = rows(n, dtype)
    tau = torch.tensor([0.05, 3.0], dtype=torch.float64).repeat(5)
    eps = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    check_ranks(kernels, x, tau, eps)


# ------------------------------------------------------------------------------------------- sorts


def thresholds(x: Tensor, tau: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of finite scores the thresholds of i − ½, by bisection; the gradients in x and τ, and Σ |v w|."""
    level = torch.arange(x.shape[-1], dtype=torch.float64) + 0.5
    low = (x.double().amin(-1, keepdim=True) - 60 * tau[:, None]).expand(x.shape)
    high = (x.double().amax(-1, keepdim=True) + 60 * tau[:, None]).expand(x.shape)
    for _ in range(200):
        t = 0.5 * (low + high)
        z = distances(x, t, tau)
        tail = 0.5 * torch.exp(-z.abs())
        above = torch.where(z > 0, 1 - tail, tail).sum(-1) > level
        low, high = torch.where(above, t, low), torch.where(above, high, t)
    z = distances(x, t, tau)
    # relative to the nearest entry, as all densities may vanish in a gap
    f = torch.exp(z.abs().amin(-1, keepdim=True) - z.abs())
    w = f / f.sum(-1, keepdim=True)
    pull = v.double()[..., None] * w
    return t, pull.sum(-2), -(pull * z).sum((-2, -1)), pull.abs().sum(-2)


def check_sorts(kernels: ModuleType, x: Tensor, tau: Tensor, eps: float = 0.0, want_tau: bool = True) -> None:
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype)
    hi, t, order, place = kernels.laplace_thresholds(x, None, tau)
    assert t.dtype == x.dtype and hi.shape == (*x.shape[:-1], 0) and hi.dtype == torch.float64
    assert torch.equal(order, reference.laplace_thresholds(x, None, tau)[2]) and place.dtype == torch.int32
    dx, _, dtau = kernels.laplace_thresholds_backward(v, x, order, None, place, tau, want_tau)
    assert dx.dtype == x.dtype and dtau.dtype == torch.float64
    _, ascending, *places = kernels.laplace_thresholds(x, None, tau, False)
    assert torch.equal(ascending, t.flip(-1)) and all(map(torch.equal, places, (order, place)))
    given = v.flip(-1), x, order, None, place, tau, want_tau
    other, _, by_tau = kernels.laplace_thresholds_backward(*given, False)
    assert torch.equal(other, dx) and (not want_tau or torch.equal(by_tau, dtau))
    finite = x.isfinite()
    for row in range(len(x)):
        y = x[row : row + 1, finite[row]]
        first, m = int((x[row] == INF).sum()), y.shape[-1]
        assert (t[row, :first] == INF).all() and (t[row, first + m :] == -INF).all()
        if m == 0:
            continue
        middle = slice(first, first + m)
        want, want_dx, want_dtau, size = thresholds(y, tau[row : row + 1], v[row : row + 1, middle])
        limit = (5e-7 + eps) * (tau[row] + want[0].abs())
        assert ((t[row, middle].double() - want[0]).abs() <= limit).all()
        limit = (ROUNDED + eps) * size.max()
        assert ((dx[row, finite[row]].double() - want_dx[0]).abs() <= limit).all()
        assert (dx[row, ~finite[row]] == 0).all()
        limit = ROUNDED * (v[row].abs().sum() + want_dtau.abs())
        assert not want_tau or (dtau[row] - want_dtau[0]).abs() <= limit


@pytest.mark.parametrize("n", [1, 2, 33])
def test_sorts_have_the_counts_of_all_pairs(kernels: ModuleType, n: int) -> None:
    x = rows(n)
    tau = torch.tensor([1e-3, 1.0, 30.0] if n < 33 else [0.1, 3.0], dtype=torch.float64)
    check_sorts(kernels, x.repeat(len(tau), 1), tau.repeat_interleave(len(x)))


def test_sorts_of_a_row_to_a_program(kernels: ModuleType) -> None:
    check_sorts(kernels, rows(130)[4:8:3], torch.tensor([1.0, 0.05], dtype=torch.float64))


@pytest.mark.parametrize(("n", "dtype"), [(17, torch.bfloat16), (50, torch.float32)], ids=str)
def test_sorts_of_long_rows(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, n: int, dtype: torch.dtype
) -> None:
    """In chunks of 16: two, of which one has a single entry, and four."""
    module = sys.modules["khot._kernels.triton.ranks"]
    monkeypatch.setattr(module, "SHORT", 8)
    monkeypatch.setattr(module, "CHUNK", 16)
    x = rows(n, dtype)
    tau = torch.tensor([0.05, 3.0], dtype=torch.float64).repeat(5)
    eps = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    check_sorts(kernels, x, tau, eps)
    check_sorts(kernels, x[:2], tau[:2], eps, want_tau=False)


@pytest.mark.parametrize("short", [2048, 64], ids=["short", "long"])
def test_sorts_of_many_entries_keep_their_digits(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    """Float32 has ranks of 2,000 to 1e-4, by which an entry may seem to be on a threshold's other side."""
    module = sys.modules["khot._kernels.triton.ranks"]
    monkeypatch.setattr(module, "SHORT", short)
    monkeypatch.setattr(module, "CHUNK", 512)
    g = torch.Generator().manual_seed(0)
    x, v = (torch.randn(8, 2000, generator=g)[5:6] for _ in range(2))  # a row with such an entry
    tau = torch.tensor(2e-3)
    _, t, order, place = kernels.laplace_thresholds(x, None, tau.double())
    dx, *_ = kernels.laplace_thresholds_backward(v, x, order, None, place, tau.double(), False)
    given = x.double(), None, tau.double()
    _, want, order, place = reference.laplace_thresholds(*given)
    assert ((t - want).abs() <= 5e-7 * (tau + want.abs())).all()
    want, *_ = reference.laplace_thresholds_backward(v, given[0], order, None, place, given[2], False)
    assert ((dx - want).abs() <= ROUNDED * want.abs().max()).all()
