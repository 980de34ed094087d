"""The compiled sweep of the two-sided assignment against the reference, and its other promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from khot import _kernels as kernels
from khot._kernels.reference.assign_pass import assign_pass as reference

needs_extension = pytest.mark.skipif(
    not kernels.active()["cpu"].startswith("compiled"), reason="the compiled kernels are not in use"
)
every_cdf = pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
CLOSE = {torch.float32: 2e-5, torch.float64: 1e-12}


def sweep(*args: object) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.ops.khot.assign_pass(*args)
    return found


def problem(
    m: int, n: int, dtype: torch.dtype, masked: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(31 * m + n)
    x = torch.randn(m, n, generator=g, dtype=torch.float64)
    if masked:
        x[::3, 0] = -math.inf
    k = torch.rand(m, generator=g, dtype=torch.float64) * (n - 1.2) + 0.1
    k[::2] = 1
    r, c = (0.5 * torch.randn(size, generator=g, dtype=torch.float64) for size in (m, n))
    return x.to(dtype), k.to(dtype), r.to(dtype), c.to(dtype)


@needs_extension
@every_cdf
@every_dtype
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tau", [2.0, 0.1])
@pytest.mark.parametrize(("m", "n"), [(1, 2), (5, 3), (33, 16), (70, 17), (130, 64), (2100, 33)])
def test_sums_at_given_thresholds(
    m: int, n: int, tau: float, masked: bool, dtype: torch.dtype, cdf: str
) -> None:
    x, k, r, c = problem(m, n, dtype, masked)
    got = sweep(x, k, r, c, tau, cdf, 0.0, 0, 0.0, True, True)
    want = reference(x.double(), k.double(), r.double(), c.double(), tau, cdf, 0.0, 0, 0.0, True, True)
    assert torch.equal(got[0], r)
    for ours, theirs, size in zip(got[1:], want[1:], (n, n, m, 1), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=CLOSE[dtype] * size / tau)
    assert got[3].dtype == torch.float64
    short = sweep(x, k, r, c, tau, cdf, 0.0, 0, 0.0, False, False)
    assert torch.equal(short[3], got[3][:3]) and short[4].shape == (0, n)


@every_cdf
@every_dtype
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("tau", [2.0, 0.1, 0.01])
@pytest.mark.parametrize(("m", "n"), [(5, 3), (65, 17), (40, 64)])
def test_rows_reach_their_sums(m: int, n: int, tau: float, known: bool, dtype: torch.dtype, cdf: str) -> None:
    x, k, r, c = problem(m, n, dtype, masked=True)
    start = r if known else torch.full_like(r, math.nan)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    moved, _, _, sums, y = sweep(x, k, start, c, tau, cdf, 0.0, 100, tolerance, True, True)
    assert bool(moved.isfinite().all())
    assert ((y.double().sum(-1) - k).abs() / k).max() <= CLOSE[dtype]
    torch.testing.assert_close(sums[0], y.double().sum(0), rtol=0, atol=CLOSE[dtype] * m)
    wide = [v.double() for v in (x, k, start, c)]
    want = reference(*wide, tau, cdf, 0.0, 100, 1e-13, True, True)
    torch.testing.assert_close(y.double(), want[4], rtol=0, atol=CLOSE[dtype] / tau)
    torch.testing.assert_close(sums, want[3], rtol=0, atol=20 * CLOSE[dtype] * m / tau)


@every_cdf
@pytest.mark.parametrize("start", [math.nan, 0.01, 0.99])
def test_thresholds_in_a_gap_are_exact(start: float, cdf: str) -> None:
    """All densities are below 1e-10, and the sum would be right to rounding at most thresholds."""
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    one, r, c = torch.ones(1).double(), torch.tensor([start]).double(), torch.zeros(2).double()
    moved, miss, density, *_ = sweep(x, one, r, c, 0.02, cdf, 0.0, 40, 1e-13, True, True)
    assert 0 < density.item() < 1e-10
    assert abs(miss.item()) <= 1e-13 * density.item()
    assert abs(moved.item() - 0.5) <= 1e-13


@needs_extension
def test_layouts_and_threads_change_nothing() -> None:
    x, k, r, c = problem(3000, 33, torch.float32)
    want = sweep(x, k, r, c, 0.3, "logistic", 0.0, 4, 1e-3, True, True)
    spread = torch.stack([x, x], -1)[..., 0], k.double().repeat(2).view(2, -1).T.float()[:, 0]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        got = sweep(*spread, r, c, 0.3, "logistic", 0.0, 4, 1e-3, True, True)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_nan_ends_the_sweep_and_no_rows_are_allowed() -> None:
    x, k, r, c = problem(5, 3, torch.float64)
    x[2, 1] = math.nan
    moved, miss, *_ = sweep(x, k, r, c, 0.5, "logistic", 0.0, 50, 1e-13, True, True)
    assert miss.isnan().tolist() == [False, False, True, False, False]
    assert bool(moved[[0, 1, 3, 4]].isfinite().all())
    *_, sums, y = sweep(x[:0], k[:0], r[:0], c, 0.5, "logistic", 0.0, 3, 1e-13, True, True)
    assert torch.equal(sums, torch.zeros(6, 3).double()) and y.shape == (0, 3)


@needs_extension
def test_errors() -> None:
    x, k, r, c = problem(5, 3, torch.float64)
    rest = (0.5, "logistic", 0.0, 3, 1e-13, True, True)
    with pytest.raises(RuntimeError, match="full support, not 'uniform'"):
        sweep(x, k, r, c, 0.5, "uniform", *rest[2:])
    with pytest.raises(RuntimeError, match="unknown cdf 'cauchy'"):
        sweep(x, k, r, c, 0.5, "cauchy", *rest[2:])
    with pytest.raises(RuntimeError, match="k must have the dtype of x"):
        sweep(x, k.float(), r, c, *rest)
    with pytest.raises(RuntimeError, match="c must have 3 entries"):
        sweep(x, k, r, c[:2], *rest)
