"""Sharp rows on the CPU, whose scores spread far beyond τ: rows beside a bad one, ties at the threshold, and
gaps in which densities underflow. What rows are at every temperature is held by ``test_sharp_oracle.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Generator

import khot


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
@pytest.mark.parametrize("n", [16, 64, 1_000])
def test_a_bad_row_among_sharp_ones(n: int, cdf: Any) -> None:
    x = torch.randn(16, n, generator=Generator().manual_seed(n))
    for tau in (1e-2, 1e-5):
        y = khot.soft_topk(x, 3, tau=tau, cdf=cdf)
        for bad in (torch.nan, torch.inf):
            spoiled = x.clone()
            spoiled[5, :4] = bad
            found = khot.soft_topk(spoiled, 3, tau=tau, cdf=cdf)
            assert found[5].isnan().all() and torch.equal(found[:5], y[:5]) and torch.equal(found[6:], y[6:])


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
def test_entries_that_are_equal_at_the_threshold_share_alike(cdf: Any) -> None:
    for n in (11, 64, 300):
        for equal in (2, 5):
            x = torch.randn(16, n, generator=Generator().manual_seed(n)).clamp(max=5)
            x[:, :4] += 20
            x[:, 4 : 4 + equal] = 7
            for tau in (0.01, 1e-4, 1e-6):
                y = khot.soft_topk(x, 5, tau=tau, cdf=cdf)
                share = y[:, 4 : 4 + equal]
                assert (share == share[:, :1]).all() and (share - 1 / equal).abs().max() < 1e-5


@pytest.mark.parametrize("cdf", ["logistic", "laplace"])
@pytest.mark.parametrize(("rows", "n"), [(1, 24), (16, 24), (1, 1000)])
def test_small_gradients_times_small_densities(rows: int, n: int, cdf: Any) -> None:
    """Their products are nothing in float32, and dL/dk is of the size of the gradients."""
    x = torch.arange(float(n)).repeat(rows, 1)
    v = torch.arange(1.0, n + 1).expand(rows, n)
    for size, tau in ((1e-30, 0.03), (1e-30, 0.015), (1e-25, 0.0115)):
        k = torch.full((rows,), 5.0, dtype=torch.float64, requires_grad=True)
        (dk,) = torch.autograd.grad(khot.soft_topk(x, k, tau=tau, cdf=cdf), k, v * size)
        torch.testing.assert_close(dk, torch.full_like(dk, (n - 4.5) * size), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 17, 255])
def test_both_ends_of_a_gap_weigh_alike_where_densities_underflow(n: int, dtype: torch.dtype) -> None:
    """With t in the middle, also where some of the densities are still numbers of float64, and others not."""
    v = torch.zeros(1, n, dtype=dtype)
    v[0, -1] = 1
    for gap in range(1_380, 1_520, 2):
        x = torch.zeros(1, n, dtype=dtype)
        x[0, :-1] = torch.linspace(0, 3, n - 1)
        x[0, -1] = -gap
        k = torch.tensor([n - 1.0], dtype=torch.float64, requires_grad=True)
        (dk,) = torch.autograd.grad(khot.soft_topk(x.requires_grad_(), k), k, v)
        assert abs(dk.item() - 0.5) < 1e-3, gap
