"""The Fenchel-Young loss of the Triton kernels, interpreted, against the reference and other oracles."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from differences import error
from khot._kernels.reference import fenchel_young as reference
from khot._kernels.reference import soft_topk

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


def solved(given: tuple[Tensor, ...], cdf: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The results of the reference in float64, and of its backward."""
    x, target, k, tau = (v.double() for v in given)
    results = reference.fenchel_young(x, target, k, tau, cdf, CDFS[cdf])
    loss, share, hi, lo = results
    grad = torch.linspace(-1, 2, len(x), dtype=torch.float64)
    back = reference.fenchel_young_backward(grad, x, target, share, loss, hi, lo, tau, cdf, CDFS[cdf])
    return results, back


def compare(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert error(got, want) <= tolerance


@pytest.mark.parametrize(
    ("dtype", "where", "cdf"),
    [
        *((torch.float32, ("kernels", "split")[i % 2], cdf) for i, cdf in enumerate(CDFS)),
        *((torch.float64, "kernels", cdf) for cdf in ("logistic", "power")),
    ],
    ids=str,
)
def test_losses_and_gradients(
    request: pytest.FixtureRequest, cdf: str, dtype: torch.dtype, where: str
) -> None:
    kernels = request.getfixturevalue(where)
    x, target, k = rows(33, dtype)
    tau = torch.tensor([0.7, 1.0, 1.0, 0.3, 1.0], dtype=torch.float64)
    given = (x, target, k, tau)
    want, want_back = solved(given, cdf)
    found = kernels.fenchel_young(*given, cdf, CDFS[cdf])
    compare(found[0], want[0], 1e-12 if dtype == torch.float64 else 1e-6)
    compare(found[1], want[1], 1e-14 if dtype == torch.float64 else 1e-7)
    compare(found[2] + found[3], want[2] + want[3], 1e-12 if dtype == torch.float64 else 1e-6)
    grad = torch.linspace(-1, 2, len(x), dtype=torch.float64)
    loss, share, hi, lo = found
    dx, dtau = kernels.fenchel_young_backward(grad, x, target, share, loss, hi, lo, tau, cdf, CDFS[cdf])
    compare(dx, want_back[0], 1e-12 if dtype == torch.float64 else 1e-6)
    # it is the difference of the loss and Σ z(F − T), of rows whose loss is finite
    size = 1 + torch.where(want[0].isfinite(), want[0] / tau, 1).nan_to_num()
    compare(dtau / size, want_back[1] / size, 1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("cdf", CDFS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_vanishes_where_the_target_is_met(kernels: ModuleType, cdf: str, dtype: torch.dtype) -> None:
    x = torch.randn(1, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    k, tau, shape = torch.tensor([3.0]), torch.tensor(0.6, dtype=torch.float64), CDFS[cdf]
    y, *_ = soft_topk.soft_topk(x.double(), k, tau, cdf, shape, "y")
    unit = 1e-13 if dtype == torch.float64 else 4e-7
    loss, share, hi, lo = kernels.fenchel_young(x, y, k, tau, cdf, shape)
    assert loss.abs() <= 3 * unit and (loss >= 0 or dtype == torch.float64)
    dx, dtau = kernels.fenchel_young_backward(torch.ones(()), x, y, share, loss, hi, lo, tau, cdf, shape)
    assert dx.abs().max() <= unit
    assert dtau.abs() <= 10 * unit  # Σω(target) − Σω(y), which is the same
    # ω does not see the order
    other = y.roll(1, -1)
    loss, share, hi, lo = kernels.fenchel_young(x, other, k, tau, cdf, shape)
    _, dtau = kernels.fenchel_young_backward(torch.ones(()), x, other, share, loss, hi, lo, tau, cdf, shape)
    assert dtau.abs() <= 10 * unit


@pytest.mark.parametrize("cdf", CDFS)
def test_small_losses_of_float32_have_all_their_digits(kernels: ModuleType, cdf: str) -> None:
    """Where every target is met but for the tails; and of compact support exactly."""
    x = torch.tensor([[3.9, 3.7, 3.5, -3.1, -3.4, -3.6, -4.0]])
    target, k, tau = torch.tensor([[1.0, 1, 1, 0, 0, 0, 0]]), torch.tensor(3.0), torch.tensor(1.0)
    want = reference.fenchel_young(x.double(), target.double(), k, tau, cdf, CDFS[cdf])[0]
    loss = kernels.fenchel_young(x, target, k, tau, cdf, CDFS[cdf])[0]
    assert (loss - want).abs() <= 4e-6 * want  # times z², of the normal CDF
    assert (want == 0) == (cdf in ("uniform", "power"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_target_of_too_little_mass_has_no_loss(kernels: ModuleType, dtype: torch.dtype) -> None:
    x, target = torch.randn(2, 6, dtype=dtype), torch.zeros(2, 6)
    target[0, :2], target[1, :3] = 1, 1
    loss, share, *_ = kernels.fenchel_young(x, target, torch.tensor(3.0), torch.tensor(1.0), "logistic", 0.0)
    assert loss.isnan().tolist() == share.isnan().tolist() == [True, False]
