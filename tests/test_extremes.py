"""Scores, temperatures and k at the ends of float64's range: the right result, or an error in words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
import oracles
from khot import cdfs

ROW = torch.tensor([0.9, 0.3, -0.2, -1.0, 0.1], dtype=torch.float64)
GREATEST = torch.finfo(torch.float64).max
CDFS = ["logistic", "laplace", "normal", "uniform", cdfs.Power(1.5)]


def sorted_with_gradient(scale: float, epsilon: float) -> tuple[Tensor, Tensor]:
    x = (ROW * scale).requires_grad_()
    y = khot.sorted_soft_topk(x, 3, epsilon=epsilon * scale)
    (grad,) = torch.autograd.grad((y * torch.arange(15.0).reshape(3, 5)).sum(), x)
    return y, grad * scale


@pytest.mark.parametrize("scale", [1e150, 1e290, 1e299, 1e301, 1e305, 1e307, 1.7e308])
@pytest.mark.parametrize("epsilon", [0.1, 0.01, 1e-100])
def test_the_sorted_top_k_of_huge_scores(scale: float, epsilon: float) -> None:
    y, grad = sorted_with_gradient(scale, epsilon)
    want, want_grad = sorted_with_gradient(1.0, epsilon)
    torch.testing.assert_close(y.sum(-1), torch.ones(3).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, want_grad, rtol=1e-9, atol=1e-12)


def test_the_sorted_top_k_of_huge_and_infinite_scores() -> None:
    rows = [[1e307, math.inf, -math.inf, -1e307, 3e306], [1.0, 2.0, 0.5, -math.inf, 1.5]]
    x = torch.tensor(rows, dtype=torch.float64)
    y = khot.sorted_soft_topk(x, 2, epsilon=0.1)
    assert y[0].argmax(-1).tolist() == [1, 0] and y[0].sum(-1).tolist() == [1, 1]
    assert torch.equal(y[1], khot.sorted_soft_topk(x[1], 2, epsilon=0.1))


@pytest.mark.parametrize("cdf", CDFS, ids=str)
@pytest.mark.parametrize("scale", [1e300, 1e307, 8e307])
def test_the_top_k_of_huge_scores(scale: float, cdf: Any) -> None:
    for tau in (0.1, 1e-3):
        got = khot.soft_topk(ROW * scale, 2.5, tau=tau * scale, cdf=cdf)
        torch.testing.assert_close(got, khot.soft_topk(ROW, 2.5, tau=tau, cdf=cdf), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cdf", CDFS, ids=str)
def test_differences_that_overflow(cdf: Any) -> None:
    """They are infinite in τ as well, unless τ is huge: then the row is refused."""
    x = torch.tensor([-GREATEST, -1e308, 1e308, GREATEST], dtype=torch.float64)
    assert khot.soft_topk(x, 2, tau=1e280, cdf=cdf).tolist() == [0, 0, 1, 1]
    for function in (khot.soft_topk, khot.log_soft_topk, khot.inverse_soft_count):
        with pytest.raises(ValueError, match=r"tau must be at most 1e\+290 for a row .* got 1e\+300"):
            function(torch.stack((x, ROW[:4])), 2, tau=1e300, cdf=cdf)
    masked = torch.tensor([-GREATEST, 1.0, 2.0, 3.0], dtype=torch.float64)
    assert khot.soft_topk(masked, 2, tau=1e300, cdf=cdf).isfinite().all()


@pytest.mark.parametrize("k", [1e-5, 1e-7, 1e-9, 1e-12, 1e-13, 1e-15, 1e-20, 1e-30])
@pytest.mark.parametrize("cdf", [*CDFS[3:], cdfs.Power(4 / 3), cdfs.Power(1.15)], ids=str)
def test_log_y_of_ties_at_a_tiny_k(cdf: Any, k: float) -> None:
    """m equal entries far ahead of the others have y = k/m."""
    rows = [[1.0, 1, 1, 0], [0.3] * 7, [5, 5, 1, 1, -math.inf], [0.0] * 5, [100, 100, 3], [1e6] * 3]
    for tau in (1.0, 0.01, 100.0):
        for row in rows:
            x = torch.tensor(row, dtype=torch.float64)
            first = x == x.max()
            if (~first).any() and (x.max() - x[~first].max()) / tau < 0.8:
                continue  # others count, too
            got = khot.log_soft_topk(x, k, tau=tau, cdf=cdf)[first]
            torch.testing.assert_close(got, torch.full_like(got, math.log(k / len(got))), rtol=1e-9, atol=0)


@pytest.mark.parametrize("k", [1e-5, 1e-9, 1e-13, 1e-15])
def test_log_y_of_ties_at_a_tiny_k_for_p_above_2(k: float) -> None:
    """z = y^(p−1) is what must stay above 1e-30: for p = 3 this is k = 1e-15."""
    test_log_y_of_ties_at_a_tiny_k(cdfs.Power(3), k)


@pytest.mark.parametrize("k", [1e-9, 1e-13, 1e-16, 1e-30])
@pytest.mark.parametrize("cdf", CDFS[:3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equal_scores_at_a_tiny_k(dtype: torch.dtype, cdf: Any, k: float) -> None:
    """With F > 0 everywhere, all of them have y = k/n."""
    for n in (1, 2, 5, 300):
        for value, tau in ((0.0, 1.0), (0.3, 100.0), (7.0, 0.01)):
            x = torch.full((n,), value, dtype=dtype)
            log_y = khot.log_soft_topk(x, k, tau=tau, cdf=cdf).double()
            limit = 1e-12 if dtype == torch.float64 else 1e-6
            torch.testing.assert_close(log_y, torch.full_like(log_y, math.log(k / n)), rtol=limit, atol=0)


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("cdf", CDFS[:3])
@pytest.mark.parametrize("scale", [1e8, 1e10, 1e12, 1e14, 1e20])
def test_float32_scores_of_many_tau(scale: float, cdf: Any, count: int) -> None:
    """The entry at the threshold has the fraction of k: t holds its digits beside those of the scores."""
    x = torch.tensor([3.0, 2.0, 1.0, 0.0]).mul(scale).repeat(count, 1)
    want = torch.tensor([1.0, 0.7, 0.0, 0.0]).expand_as(x)
    torch.testing.assert_close(khot.soft_topk(x, 1.7, cdf=cdf), want, rtol=0, atol=5e-7)
    torch.testing.assert_close(khot.log_soft_topk(x, 1.7, cdf=cdf).exp(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("cdf", CDFS, ids=str)
def test_float32_keeps_the_order_around_the_threshold(cdf: Any, count: int) -> None:
    x = torch.linspace(-1e-5, 1e-5, 201).repeat(count, 1)
    for k in (100, 100.5, 100.53):
        assert (khot.soft_topk(x, k, cdf=cdf).diff(dim=-1) >= 0).all()


@pytest.mark.parametrize("cdf", CDFS, ids=str)
@pytest.mark.parametrize("tau", [1e-303, 2.3e-308, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ties_at_temperatures_near_0(cdf: Any, tau: float, dtype: torch.dtype) -> None:
    """Entries equal to the threshold's share what the others leave of k, whatever tau is."""
    g = torch.Generator().manual_seed(0)
    for n in (3, 5):
        for scale in (1e-3, 1e5):
            x = (torch.randn(16, n, generator=g, dtype=torch.float64).round() * scale).to(dtype)
            for k in (0.5, 1.0, 1.5):
                y = khot.soft_topk(x, k, tau=tau, cdf=cdf)
                above = (x.unsqueeze(-2) > x.unsqueeze(-1)).sum(-1)
                tied = (x.unsqueeze(-2) == x.unsqueeze(-1)).sum(-1)
                want = ((k - above.double()) / tied).clamp(0, 1)
                limit = 1e-6 if dtype == torch.float32 else 1e-12
                torch.testing.assert_close(y.double(), want, rtol=0, atol=limit)


@pytest.mark.parametrize("cdf", CDFS, ids=str)
@pytest.mark.parametrize("k", [1e-280, 1e-291, 1e-300])
def test_logarithms_where_nearly_nothing_is_selected(cdf: Any, k: float) -> None:
    got = khot.log_soft_topk(ROW, k, cdf=cdf)
    if cdf in ("logistic", "laplace", "normal"):
        want = torch.from_numpy(oracles.soft_topk(ROW, k, 1.0, cdf)[1])
    else:  # the greatest entry alone is selected
        want = torch.full_like(ROW, -math.inf).masked_fill(ROW.max() == ROW, math.log(k))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("p", [2.5, 2.8, 3.0])
def test_a_tiny_k_of_one_entry_under_a_power_above_2(p: float) -> None:
    """F rises like a root there, so that t needs twice the digits."""
    x = torch.randn(17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = khot.log_soft_topk(x, 1e-8, tau=0.1, cdf=cdfs.Power(p)).max().exp()
    torch.testing.assert_close(got, torch.tensor(1e-8, dtype=torch.float64), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("tau", "cdf"), [(3e-4, "uniform"), (1e-6, "logistic"), (2e-6, "normal")])
def test_the_share_of_an_entry_whose_digits_end_at_tau(tau: float, cdf: str) -> None:
    x, left = 1000 + torch.arange(320_000).float() / 512, 0.05
    y = khot.soft_topk(x, 160_000 - left, tau=tau, cdf=cdf)
    torch.testing.assert_close(y[160_000], torch.tensor(1 - left), rtol=0, atol=1e-6)
