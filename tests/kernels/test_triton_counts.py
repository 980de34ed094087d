"""The soft count of the Triton kernels, interpreted, and its gradients, against the reference in float64."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from differences import compare
from khot._kernels.reference import soft_count as reference

CDFS = {"logistic": 0.0, "laplace": 0.0, "normal": 0.0, "uniform": 0.0, "power": 4 / 3}
INF, NAN = torch.inf, torch.nan


@pytest.fixture
def whole(kernels: ModuleType) -> Any:
    return sys.modules["khot._kernels.triton.counts"]


@pytest.fixture
def tiled(whole: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, with several tiles and parts of everything."""
    for name, value in {"TILE": 16, "LEVELS": 2, "MANY": 2}.items():
        monkeypatch.setattr(whole, name, value)
    return whole


def rows(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of several kinds with a temperature each, and levels inside and outside of them."""
    x = torch.randn(6, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x[1] = 50 * x[1].round()
    x[2] += 300
    x[3, ::3], x[4, ::3], x[4, 1::3] = -INF, INF, -INF
    x[5] = -INF
    x = x.to(dtype)
    tau = torch.tensor([1.0, 7.0, 0.3, 0.01, 2.0, 1.0], dtype=torch.float64)
    finite = x.double().masked_fill(x.isinf(), 0)
    at = finite.mean(-1, keepdim=True) + torch.tensor([0.0, -1.5, 4.0]).double() * tau[:, None]
    return x, torch.cat((at, torch.tensor([INF, -INF]).double().expand(6, 2)), -1), tau


@pytest.mark.parametrize("cdf", CDFS)
@pytest.mark.parametrize(("dtype", "centred"), [(torch.float64, False), (torch.float32, True)], ids=str)
def test_counts_and_gradients(whole: Any, cdf: str, dtype: torch.dtype, centred: bool) -> None:
    check(whole, *rows(33, dtype), cdf, centred)


@pytest.mark.parametrize("cdf", CDFS)
def test_tiles(tiled: Any, cdf: str) -> None:
    x, at, tau = rows(37, torch.float32)
    check(tiled, x[3:5], at[3:5, 1:], tau[3:5], cdf, cdf in ("uniform", "logistic"))
    check(tiled, x[:1], at[:1, :1], tau[:1], cdf, False)  # one level, and a row in several parts


def check(kernels: Any, x: Tensor, at: Tensor, tau: Tensor, cdf: str, centred: bool) -> None:
    n, dtype, rest = x.shape[-1], x.dtype, (at, tau, cdf, CDFS[cdf], centred)
    # z has an error of a rounding, of which Power makes three; a term is at most 1
    relative = 1e-13 if dtype == torch.float64 else 4e-7
    got, want = kernels.soft_count(x, *rest), reference.soft_count(x.double(), *rest)
    assert got.dtype == torch.float64 and got.shape == at.shape
    compare(got, want, relative * want + n * relative / 10 + 1e-12)

    v = torch.randn(at.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = kernels.soft_count_backward(v, x, *rest)
    wanted = reference.soft_count_backward(v, x.double(), *rest)
    assert [t.dtype for t in found] == [dtype, torch.float64, torch.float64]
    # the interpreter cuts digits off where it stores bfloat16, and a device rounds
    rounding = 2 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-13
    size = 3 * v.abs().sum(-1) / tau  # no density exceeds 3
    compare(found[0], wanted[0], (relative + rounding) * size[:, None] + 1e-12)
    compare(found[1], wanted[1], relative * (n * size)[:, None] + 1e-12)
    compare(found[2], wanted[2], 3 * relative * n * size + 1e-12)


@pytest.mark.parametrize(
    ("level", "dtype", "parts"),
    [
        (0.0, torch.float64, False),
        (0.1, torch.float32, True),
        (0.1, torch.float64, True),
        (-300.3, torch.bfloat16, False),
        (INF, torch.float32, False),
        (-INF, torch.float64, True),
    ],
    ids=str,
)
def test_one_level_for_all_rows(
    request: pytest.FixtureRequest, parts: bool, level: float, dtype: torch.dtype
) -> None:
    """Its counts are in the scores' dtype; here it and τ come by value."""
    kernels: Any = request.getfixturevalue("tiled" if parts else "whole")
    x, each, tau = rows(37, dtype)
    at, tau = torch.tensor(level, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    each = at.expand(6, 1)
    got = kernels.soft_count(x, at, tau, "logistic", 0.0, False)
    want = reference.soft_count(x.double(), each, tau, "logistic", 0.0, False).squeeze(-1)
    assert got.dtype == dtype and got.shape == (6,)
    # the interpreter cuts digits off where it stores bfloat16
    relative = 1e-13 if dtype == torch.float64 else 4e-7 + 2 * torch.finfo(dtype).eps
    compare(got, want, relative * (want + 4))

    v = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    found = kernels.soft_count_backward(v, x, at, tau, "logistic", 0.0, False)
    wanted = reference.soft_count_backward(v.double()[:, None], x.double(), each, tau, "logistic", 0.0, False)
    assert [t.dtype for t in found] == [dtype, torch.float64, torch.float64]
    compare(found[0], wanted[0], relative * 4 * v.abs().double()[:, None])
    single = 1e-13 if dtype == torch.float64 else 4e-7
    compare(found[1], wanted[1].squeeze(-1), single * 37 * 4 * v.abs().double())
    compare(found[2], wanted[2], single * 37 * 6 * v.abs().double())


def test_a_level_that_is_not_a_number(whole: Any) -> None:
    x, at, tau = (
        torch.tensor([[2.0, 1.0, 0.0]]),
        torch.tensor([[NAN, INF]]).double(),
        torch.tensor(1.0).double(),
    )
    rest = (at, tau, "logistic", 0.0, False)
    assert whole.soft_count(x, *rest)[0].isnan().tolist() == [True, False]
    dx, dat, dtau = whole.soft_count_backward(torch.ones_like(at), x, *rest)
    assert dx.isnan().all() and dat[0, 0].isnan() and dtau.isnan().all()


@pytest.mark.parametrize("tau", [1e-42, 1e-30, 1e30, 1e300])
def test_temperatures_that_float32_does_not_hold(whole: Any, tau: float) -> None:
    x = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    x[1, 0] = x[1, 1]
    at = torch.stack((x[:, 0], x[:, 3] + 0.25), -1).double()
    for given in (torch.tensor(tau, dtype=torch.float64), torch.tensor([tau] * 2, dtype=torch.float64)):
        rest = (at, given, "logistic", 0.0, True)
        compare(whole.soft_count(x, *rest), reference.soft_count(x.double(), *rest), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 37, 1100])
def test_entries_that_may_be_selected(kernels: ModuleType, n: int, dtype: torch.dtype) -> None:
    """Each row has more of them than the one before; neither NaN nor a number that float32 takes for −inf is
    one that may not."""
    x = torch.full((5, n), -torch.inf, dtype=dtype)
    for row, count in enumerate(want := [0, 1, n // 2, n - 1, n]):
        x[row, :count] = torch.finfo(dtype).min
    x[4, 0] = torch.nan
    for most in (0.5, 7.1, 2000.0):
        got = kernels.selectable(torch.stack((x, x), -1)[..., 0], most)
        # a number by value has the 48 bits of two of float32
        limit = torch.tensor(want, dtype=torch.float64).clamp(max=most)
        torch.testing.assert_close(got, limit, rtol=2.0**-48, atol=0)
        assert most != 2000 or torch.equal(got, limit)
