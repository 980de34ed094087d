"""The compiled sums of trials against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from khot._kernels import active
from khot._kernels.reference import poisson_binomial as reference
from khot._kernels.reference.fixed_point import calibrate_kernel
from khot._ops.tilting import tilt_rows

pytestmark = pytest.mark.skipif(active()["cpu"] == "reference", reason="no compiled kernels in use")

SIZES = [1, 2, 3, 7, 16, 33, 257, 1_500]


def trials(n: int, scale: float, rows: int = 5) -> tuple[Tensor, Tensor]:
    """Logits, and sizes near the mean."""
    generator = torch.Generator().manual_seed(n)
    z = scale * torch.randn(rows, n, generator=generator, dtype=torch.float64)
    z = z + torch.linspace(-2, 2, rows, dtype=torch.float64).unsqueeze(-1)
    z[:, 3::50] = math.inf
    z[:, 4::50] = -math.inf
    mean, slack = z.sigmoid().sum(-1), (z.sigmoid() * (-z).sigmoid()).sum(-1).sqrt()
    return z, (mean + 0.5 * slack).round().clamp((z == math.inf).sum(-1), (z > -math.inf).sum(-1))


def check(got: Tensor, want: Tensor, tol: float = 1e-12) -> None:
    assert got.dtype == torch.float64 and got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=tol, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("n", SIZES)
def test_as_the_reference(n: int, scale: float) -> None:
    z, k = trials(n, scale)
    u = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = reference.inclusion_kernel(z, k)
    for a, b in zip(torch.ops.khot.inclusion(z, k), want, strict=True):
        check(a, b, 1e-11)
    period, re, im = torch.ops.khot.characteristic(z)
    check(reference.pmf(re, im, k, reference.of_period(period)), want[0])
    check(torch.ops.khot.covariance(z, k, u), reference.covariance_kernel(z, k, u))
    certain = z.isinf()
    assert torch.equal(torch.ops.khot.inclusion(z, k)[1][certain], z.sigmoid()[certain])


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0, 15.0])
@pytest.mark.parametrize("n", [2, 3, 16, 100, 1_030])
def test_calibration_as_the_reference(n: int, scale: float) -> None:
    """The inclusion probabilities agree. The constant of each row differs, and so may the iterations."""
    scores = scale * torch.randn(4, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    k = torch.tensor([1, n // 3, n // 2, n - 1], dtype=torch.float64)
    z = tilt_rows(scores, k).z
    theta, iterations = torch.ops.khot.calibrate(z, k)
    want, reference_iterations = calibrate_kernel(z, k)
    assert ((iterations - reference_iterations).abs() <= 2).all() and (iterations <= 13).all()
    for got in (theta, want):
        _, pi, out = torch.ops.khot.inclusion(tilt_rows(got, k).z, k)
        check(pi, z.sigmoid(), 1e-10)
        check(out, (-z).sigmoid(), 1e-10)


def test_ends_and_rows_that_are_not_numbers() -> None:
    z = torch.tensor([[math.nan, 1.0, 2.0], [math.inf, -math.inf, math.inf]], dtype=torch.float64)
    prob, pi, out = torch.ops.khot.inclusion(z, torch.tensor([1.0, 2.0]))
    assert prob[0].isnan() and pi[0].isnan().all() and out[0].isnan().all()
    assert prob[1] == 1 and pi[1].tolist() == [1, 0, 1] and out[1].tolist() == [0, 1, 0]
    assert torch.ops.khot.covariance(z, torch.tensor([1.0, 2.0]), z.nan_to_num())[0].isnan().all()
    for shape in ((0, 4), (3, 0), (2, 0, 3)):
        empty = torch.zeros(shape, dtype=torch.float64)
        assert torch.ops.khot.characteristic(empty)[1].shape == (*shape[:-1], reference.FREQUENCIES)


@pytest.mark.parametrize("shape", [(3, 0), (0,), (0, 4), (2, 0, 3)], ids=str)
def test_calibration_of_nothing(shape: tuple[int, ...]) -> None:
    z, k = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape[:-1], dtype=torch.float64)
    for kernel in (torch.ops.khot.calibrate, calibrate_kernel):
        theta, iterations = kernel(z, k)
        assert theta.shape == shape and iterations.shape == shape[:-1]
