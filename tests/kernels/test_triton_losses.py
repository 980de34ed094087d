"""The Fenchel-Young loss of the Triton kernels, interpreted, against the reference and other oracles."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import fenchel_young as reference
from khot._kernels.reference import soft_topk

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    # Triton reads this variable at import, so a test cannot set it
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs with TRITON_INTERPRET=1"),
    # the interpreter computes with NumPy, which warns of infinities; they are intended
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CDFS = {"logistic": 0.0, "laplace": 0.0, "normal": 0.0, "uniform": 0.0, "power": 4 / 3}
INF = torch.inf


def rows(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with infinite entries and a NaN, targets with hard, soft and tiny entries, and k."""
    g = torch.Generator().manual_seed(n)
    x = 2 * torch.randn(5, n, generator=g, dtype=torch.float64)
    x[1, 0], x[1, 1], x[2, 3] = INF, -INF, torch.nan
    target = torch.rand(5, n, generator=g, dtype=torch.float64)
    target[0], target[0, :4] = 0.0, 1.0
    target[1, 0], target[1, 1], target[3, :3] = 0.5, 0.0, torch.tensor([1e-30, 1.0, 1e-4])
    return x.to(dtype), target.to(dtype), torch.tensor([2.0, 3.0, 3.0, 2.5, 0.0], dtype=torch.float64)


def arguments(x: Tensor, target: Tensor, k: Tensor, cdf: str) -> list[Tensor]:
    tau = torch.tensor([0.7, 1.0, 1.0, 0.3, 1.0], dtype=torch.float64)[: len(x)]
    _, hi, lo = soft_topk.soft_topk(x.double(), k, tau, cdf, CDFS[cdf], "threshold")
    return [x, target, k / target.double().sum(-1), hi, lo, tau]


def compare(got: Tensor, want: Tensor, tolerance: float) -> None:
    same = (got == want) | (got.isnan() & want.isnan())
    error = ((got.double() - want.double()).abs() / (1 + want.abs())).masked_fill(same, 0)
    assert (error.nan_to_num(nan=INF) <= tolerance).all(), error


@pytest.mark.parametrize("cdf", CDFS)
@pytest.mark.parametrize(
    ("dtype", "where"), [(torch.float64, "kernels"), (torch.bfloat16, "kernels"), (torch.float32, "split")]
)
def test_losses_and_gradients(
    request: pytest.FixtureRequest, cdf: str, dtype: torch.dtype, where: str
) -> None:
    """The arithmetic is in float64 for every dtype."""
    kernels, (x, target, k) = request.getfixturevalue(where), rows(33, dtype)
    if where == "split":
        request.getfixturevalue("monkeypatch").setattr(kernels.losses, "CHUNK", 8)
    some = slice(None) if where == "kernels" else slice(1, 2)
    given = arguments(x[some], target[some], k[some], cdf)
    wide = [v.double() for v in given]
    compare(
        kernels.fenchel_young(*given, cdf, CDFS[cdf]), reference.fenchel_young(*wide, cdf, CDFS[cdf]), 1e-12
    )
    grad = torch.linspace(-1, 2, len(given[0]), dtype=torch.float64)
    found = kernels.fenchel_young_backward(grad, *given, cdf, CDFS[cdf])
    wanted = reference.fenchel_young_backward(grad, *wide, cdf, CDFS[cdf])
    assert found[0].dtype == dtype
    # the interpreter cuts digits off where it stores bfloat16, and a device rounds
    compare(found[0], wanted[0], 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps)
    compare(found[1], wanted[1], 1e-12)
    compare(found[2], wanted[2], 1e-12)


@pytest.mark.parametrize("cdf", CDFS)
def test_the_loss_vanishes_where_the_target_is_met(kernels: ModuleType, cdf: str) -> None:
    x = torch.randn(1, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k, tau, shape = torch.tensor([3.0]), torch.tensor(0.6, dtype=torch.float64), CDFS[cdf]
    y, hi, lo = soft_topk.soft_topk(x, k, tau, cdf, shape, "y")
    loss = kernels.fenchel_young(x, y, torch.ones(1), hi, lo, tau, cdf, shape)
    assert loss.abs() <= 1e-13
    dx, _, dtau = kernels.fenchel_young_backward(torch.ones(()), x, y, torch.ones(1), hi, lo, tau, cdf, shape)
    assert dx.abs().max() <= 1e-13
    assert dtau.abs() <= 1e-12  # Σω(target) − Σω(y), which is the same
    other = cdfs.resolve(cdf, shape).potential(y.roll(1, -1)).sum()  # ω does not see the order
    dtau = kernels.fenchel_young_backward(
        torch.ones(()), x, torch.zeros_like(y), torch.ones(1), hi, lo, tau, cdf, shape
    )[2]
    # with T = 0, Σ[ω*(z) + ω(0) − zF(z)] = Σω(0) − Σω(y)
    assert (dtau + other - 12 * cdfs.resolve(cdf, shape).potential(torch.zeros(())).double()).abs() <= 1e-12
