"""Sharp rows on the CPU, whose scores spread far beyond τ: rows beside a bad one, ties at the threshold, and
gaps in which densities underflow. What rows are at every temperature is held by ``test_sharp_oracle.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

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


@pytest.mark.parametrize("cdf", ["logistic", "laplace"])
@pytest.mark.parametrize("k", [1 - 1e-5, 1 - 1e-7, 1 + 1e-7, 1 + 1e-5, 1e-6, 1e-12, 4.000001])
def test_logarithms_of_k_beside_a_whole_number(k: float, cdf: Any) -> None:
    """In groups of rows, whose steps begin at entries that have next to nothing, or lack it."""
    for scores in ([0.0, -1.6, -30, -31, -32], [0.0, -0.1, -0.2, -30, -31]):
        x = torch.tensor(scores).expand(16, 5)
        found = khot.log_soft_topk(x, k, cdf=cdf).double()
        want = khot.log_soft_topk(x.double(), k, cdf=cdf)
        assert (want.exp().sum(-1) - k).abs().max() < 1e-9 * max(k, 1e-3)
        torch.testing.assert_close(found, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("k", [7 - 1e-6, 7 + 1e-6, 7 - 1e-9])
@pytest.mark.parametrize("cdf", [khot.cdfs.Logistic(), khot.cdfs.Laplace(), khot.cdfs.Normal()], ids=str)
def test_shares_of_next_to_nothing_have_the_digits_of_float64(k: float, cdf: Any) -> None:
    x = 3 * torch.randn(32, 16, dtype=torch.float64, generator=Generator().manual_seed(0))
    for tau in (0.1, 0.01):
        y = khot.soft_topk(x, k, tau=tau, cdf=cdf)
        t = khot.inverse_soft_count(x, k, tau=tau, cdf=cdf)
        small = (y < 0.5) & (y > 1e-100)
        want = cdf.cdf((x - t[:, None]) / tau)
        torch.testing.assert_close(y[small], want[small], rtol=3e-11, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("cdf", "tau"), [("logistic", 1e-4), ("laplace", 1e-4), ("normal", 1e-3)])
def test_nan_gradients_of_decided_rows_stay(cdf: Any, tau: float, dtype: torch.dtype) -> None:
    for rows in (1, 16):
        x = torch.tensor([3.0, 2, 1, 0], dtype=dtype).repeat(rows, 1).requires_grad_()
        v = torch.tensor([1.0, torch.nan, 1, 1], dtype=dtype).expand(rows, 4)
        (dx,) = torch.autograd.grad(khot.soft_topk(x, 2, tau=tau, cdf=cdf), x, v)
        assert dx.isnan().any(-1).all()


def test_thresholds_of_scores_that_are_many_tau_large() -> None:
    """Of a group that holds an ordinary row, too."""
    x = torch.tensor([1003.117, 999.31, 1001.77, 998.2]).repeat(16, 1)
    x[0] = 0
    for number in (1.23, 1.77):
        for tau in (3.4639175257731957e-9, 1e-7):
            k, taus = (torch.full((16,), value, dtype=torch.float64) for value in (number, tau))
            _, hi, lo = torch.ops.khot.soft_topk(x, k, taus, "logistic", 0.0, "threshold")
            want = khot.inverse_soft_count(x.double() - x[1, 2].double(), k, tau=taus)
            found = (hi[1:] - x[1, 2].double()) + lo[1:]
            assert ((found - want[1:]).abs() < 1e-9 * tau).all()


def test_costs_behind_the_ends_of_a_gap() -> None:
    """Those at the ends are small beside them, so that they tell where t is."""
    n = 32
    for cost in (1e2, 1e5, 3.82e8):
        x, costs = torch.full((16, n), -12.99), torch.full((16, n), cost)
        x[:, :16], x[:, 0], x[:, 16] = 13.15, 11.55, -11.55
        costs[:, 0] = costs[:, 16] = 1
        v = torch.zeros(16, n)
        v[:, :16] = 1
        budgets = costs[:, :16].double().sum(-1)
        gradients: list[Tensor] = []
        for dtype in (torch.float32, torch.float64):
            budget = budgets.clone().requires_grad_()
            y = khot.soft_budget(x.to(dtype), costs.to(dtype), budget, cdf="normal")
            gradients += torch.autograd.grad(y, budget, v.to(dtype))
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal", "uniform", khot.cdfs.Power(4 / 3)], ids=str)
@pytest.mark.parametrize("n", [8, 64, 1_000])
def test_budgets_that_need_not_be_spent(n: int, cdf: Any) -> None:
    """In rows that spend them and rows that do not, and where 0 and the threshold lie in the same gap."""
    g = Generator().manual_seed(n)
    for offset in (0.0, 1.0, -2.0):
        x = torch.randn(16, n, generator=g) + offset
        costs = (3 * torch.rand(16, n, generator=g)).round() + 1
        budget = costs.double().sum(-1) * torch.rand(16, generator=g)
        order = x.argsort(-1, descending=True)
        spent = costs.double().gather(-1, order).cumsum(-1)
        budget[:4] = spent[:4].gather(-1, (x[:4] > 0).sum(-1, keepdim=True).clamp(1, n - 1) - 1).squeeze(-1)
        v = torch.randn(16, n, generator=g)
        for tau in (0.03, 1e-3, 1e-6):
            y, db = [], []
            for dtype in (torch.float32, torch.float64):
                b = budget.clone().requires_grad_()
                y.append(khot.soft_budget(x.to(dtype), costs.to(dtype), b, tau=tau, cdf=cdf, at_most=True))
                db += torch.autograd.grad(y[-1], b, v.to(dtype))
            torch.testing.assert_close(y[0].double(), y[1], rtol=0, atol=1e-6)
            assert ((y[0] * costs).double().sum(-1) <= budget * (1 + 1e-6)).all()
            torch.testing.assert_close(*db, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
@pytest.mark.parametrize("n", [3, 64, 1_000])
def test_thresholds_follow_the_ends_of_a_gap(n: int, cdf: Any) -> None:
    x = torch.randn(16, n, generator=Generator().manual_seed(n))
    for tau in (0.01, 1e-3, 1e-6):
        found = []
        for dtype in (torch.float32, torch.float64):
            leaf = x.to(dtype).requires_grad_()
            (dx,) = torch.autograd.grad(khot.inverse_soft_count(leaf, 2, tau=tau, cdf=cdf).sum(), leaf)
            found.append(dx.double())
        torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_counts_of_likelihoods_of_chosen_entries() -> None:
    """The incoming gradient is 0 below the threshold, where log y moves, and next to nothing above."""
    for rows in (1, 16):
        for distance in (60.0, 82.0, 88.0):
            x = torch.tensor([distance, -distance, -distance]).repeat(rows, 1)
            v = torch.tensor([1e-3, 0, 0]).expand(rows, 3)
            k = torch.ones(rows, dtype=torch.float64, requires_grad=True)
            (dk,) = torch.autograd.grad(khot.log_soft_topk(x, k), k, v)
            torch.testing.assert_close(dk, torch.full_like(dk, 5e-4), rtol=1e-4, atol=0)


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
@pytest.mark.parametrize("call", [khot.log_soft_topk, khot.inverse_soft_count])
def test_gradients_of_long_rows_whose_entries_are_decided(call: Callable[..., Tensor], cdf: Any) -> None:
    n = (1 << 18) + 5  # longer than what is kept between the two passes
    x = torch.randperm(n, generator=Generator().manual_seed(1)).float()
    v = torch.randn(n, generator=Generator().manual_seed(2))
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype).requires_grad_()
        out = call(leaf, 1_000, tau=1e-3, cdf=cdf)
        (dx,) = torch.autograd.grad(out, leaf, v.to(dtype) if out.dim() else torch.ones_like(out))
        found.append(dx.double())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6 * found[1].abs().max().item())


def test_logarithms_with_next_to_nothing_left_and_large_gradients() -> None:
    x = torch.randn(16, 9, generator=Generator().manual_seed(0))
    for left in (1e-6, 1e-7, 1e-8):
        found = khot.log_soft_topk(x, 9 - left, cdf="normal").double()
        want = khot.log_soft_topk(x.double(), 9 - left, cdf="normal")
        torch.testing.assert_close(found, want, rtol=1e-5, atol=0)
    masked = torch.randn(128, 500, generator=Generator().manual_seed(1))
    masked[:, 153:] = -torch.inf
    found = khot.log_soft_topk(masked, 153 - 1.7e-8, tau=0.1664, cdf="normal").double()
    want = khot.log_soft_topk(masked.double(), 153 - 1.7e-8, tau=0.1664, cdf="normal")
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-37)
    rows = torch.tensor([0.5, -1, 0.2, 3, 1]).repeat(8, 1)
    v = torch.tensor([1e27, 0, 0, 0, 0]).expand(8, 5)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaf = rows.to(dtype).requires_grad_()
        gradients += torch.autograd.grad(khot.log_soft_topk(leaf, 1e-15, cdf="normal"), leaf, v.to(dtype))
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-3, atol=1e22)
    far = torch.tensor([0.0, 0.0, -2e19])
    assert khot.log_soft_topk(far, 1, cdf="normal").isfinite().all()
