"""Soft and hard selection under a budget: sums, oracles, gradients, limits, shards, unusual and bad input."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import budget_rows
import khot
import oracles
import processes
import shards
from khot import cdfs

INF, NAN = math.inf, math.nan
POWER = cdfs.Power(4 / 3)
CDFS: tuple[Any, ...] = ("logistic", "laplace", "normal", "uniform", POWER)
every_cdf = pytest.mark.parametrize("cdf", CDFS, ids=str)
both = pytest.mark.parametrize("by", ["score", "value"])


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def problem(kind: str, rows: int = 4, n: int = 40, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, costs and budgets in float64."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=g, dtype=torch.float64)
    share = torch.rand(rows, generator=g, dtype=torch.float64)
    uniform = torch.rand(rows, n, generator=g, dtype=torch.float64)
    cost = {
        "uniform": uniform,
        "12 decades": 10 ** (12 * uniform - 6),
        "integers": (4 * uniform).floor(),
        "equal": torch.ones_like(uniform),
        "ties": uniform,
    }[kind]
    if kind == "ties":
        x = x.round()
    budget = cost.sum(-1) * share
    return x, cost, budget.round() if kind in ("integers", "equal") else budget


# ------------------------------------------------------------------------------------------ values


@every_cdf
@both
@pytest.mark.parametrize("tau", [0.05, 1.0])
def test_agrees_with_its_oracle(cdf: Any, by: str, tau: float) -> None:
    x, cost, budget = problem("uniform", 3, 6)
    y = khot.soft_budget(x, cost + 0.1, budget + 0.1, tau=tau, cdf=cdf, by=by)
    for i in range(3):
        name, p = ("power", cdf.p) if isinstance(cdf, cdfs.Power) else (cdf, None)
        want, _ = oracles.soft_budget(x[i], cost[i] + 0.1, float(budget[i]) + 0.1, tau, name, p, by)
        torch.testing.assert_close(y[i], torch.from_numpy(want), rtol=0, atol=1e-11)


@every_cdf
@both
@pytest.mark.parametrize("tau", [1e-6, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("kind", ["uniform", "12 decades", "integers", "equal", "ties"])
def test_the_budget_is_spent(cdf: Any, by: str, tau: float, kind: str) -> None:
    for n in (1, 5, 300):
        x, cost, budget = problem(kind, n=n)
        y = khot.soft_budget(x, cost, budget, tau=tau, cdf=cdf, by=by)
        assert ((y >= 0) & (y <= 1)).all()
        torch.testing.assert_close((cost * y).sum(-1), budget, rtol=1e-12, atol=1e-300)
        single = khot.soft_budget(x.float(), cost, budget, tau=tau, cdf=cdf, by=by)
        torch.testing.assert_close((cost * single.double()).sum(-1), budget, rtol=1e-6, atol=1e-300)


@both
def test_at_most(by: str) -> None:
    x, cost = f64(-1.0, 2.0, 3.0), f64(1.0, 2.0, 1.0)
    loose = khot.soft_budget(x, cost, 100.0, by=by, at_most=True)
    torch.testing.assert_close(loose, torch.sigmoid(x), rtol=1e-14, atol=0)
    tight = khot.soft_budget(x, cost, 1.0, by=by, at_most=True)
    torch.testing.assert_close(tight, khot.soft_budget(x, cost, 1.0, by=by), rtol=0, atol=1e-13)
    x, cost, budget = (v.clone().requires_grad_() for v in (x, cost, f64(100.0).squeeze()))
    y = khot.soft_budget(x, cost, budget, by=by, at_most=True)
    dx, dcost, dbudget = torch.autograd.grad(y.sum(), [x, cost, budget])
    torch.testing.assert_close(dx, loose * (1 - loose))
    assert not dcost.any() and dbudget == 0


# --------------------------------------------------------------------------------------- gradients


@every_cdf
@both
@pytest.mark.parametrize("at_most", [False, True])
def test_gradients(cdf: Any, by: str, at_most: bool) -> None:
    x, cost, budget = problem("uniform", 3, 5, seed=1)
    args = [x, cost + 0.1, 0.3 * budget + 0.2, f64(0.7, 1.0, 0.3)]
    if at_most:
        args[2] = args[2] + f64(0, 0, 10)
    leaves = [v.requires_grad_() for v in args]

    def call(x: Tensor, cost: Tensor, budget: Tensor, tau: Tensor) -> Tensor:
        return khot.soft_budget(x, cost, budget, tau=tau, cdf=cdf, by=by, at_most=at_most)

    # along random directions: the second derivatives of all entries took a hundred times as long
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, fast_mode=True)
    if cdf != "uniform":  # has kinks
        assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@every_cdf
def test_gradients_in_a_gap_are_those_of_the_soft_topk(cdf: Any) -> None:
    """No density is left at any entry, so that the gradient is that of the nearest ones in the limit."""
    x, weights = f64(0.0, 100.0, 50.0, 300.0), f64(1.0, 2.0, 3.0, 4.0)
    grads = []
    for call in (khot.soft_topk, lambda x, k, **o: khot.soft_budget(x, torch.ones_like(x), k, **o)):
        leaves = [x.clone().requires_grad_(), f64(2.0).squeeze().requires_grad_()]
        y = call(leaves[0], leaves[1], tau=0.01, cdf=cdf)
        grads.append(torch.autograd.grad((y * weights).sum(), leaves))
    for got, want in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads[0][1], f64(2.5).squeeze(), rtol=0, atol=1e-12)  # ½(2 + 3)


# --------------------------------------------------------------------------------- unusual, bad input


@both
def test_infinite_scores_and_free_entries(by: str) -> None:
    x, cost = f64(1.0, INF, -INF, 2.0, 0.0), f64(1.0, 2.0, 1e9, 3.0, 1.0)
    y = khot.soft_budget(x, cost, 4.0, by=by)
    assert y[1] == 1 and y[2] == 0
    torch.testing.assert_close(y[[0, 3, 4]], khot.soft_budget(x[[0, 3, 4]], cost[[0, 3, 4]], 2.0, by=by))
    assert khot.soft_budget(x, cost, 2.0, by=by).tolist() == [0, 1, 0, 0, 0]
    assert khot.soft_budget(x, cost, 1.5, by=by).isnan().all()  # +inf alone costs 2
    assert khot.soft_budget(x, cost, 1.5, by=by, at_most=True).isnan().all()
    assert khot.soft_budget(x, cost, 7.0, by=by).tolist() == [1, 1, 0, 1, 1]
    free = khot.soft_budget(f64(1.0, 2.0, 3.0), f64(0.0, 1.0, 1.0), 1.0, by=by)
    torch.testing.assert_close(free[1:].sum(), f64(1.0).squeeze())
    t = 2.5  # of the two others
    assert free[0] == pytest.approx(1 / (1 + math.exp(t - 1 if by == "score" else -1)), abs=1e-12)
    assert khot.soft_budget(torch.zeros(2, 0), torch.zeros(2, 0), 0.0, by=by).shape == (2, 0)
    with pytest.raises(ValueError, match="but got 1 for a row with 0"):
        khot.soft_budget(torch.zeros(2, 0), torch.zeros(2, 0), 1.0, by=by)
    nan = khot.soft_budget(torch.stack((f64(1.0, NAN), f64(1.0, 2.0))), f64(1.0, 1.0), 1.0, by=by)
    assert nan[0].isnan().all() and not nan[1].isnan().any()
    assert (
        not torch.autograd.grad(
            khot.soft_budget(leaf := x.clone().requires_grad_(), cost, 4.0, by=by).sum(), leaf
        )[0]
        .isnan()
        .any()
    )


@both
def test_masks_hide_anything(by: str) -> None:
    x, cost, budget = problem("uniform", 2, 6)
    mask = torch.tensor([True, True, False, True, False, True])
    hidden, prices = x.masked_fill(~mask, NAN), cost.masked_fill(~mask, -INF)
    budget = 0.4 * cost[:, mask].sum(-1)
    y = khot.soft_budget(hidden, prices, budget, by=by, mask=mask)
    assert not y[:, ~mask].any()
    torch.testing.assert_close(y[:, mask], khot.soft_budget(x[:, mask], cost[:, mask], budget, by=by))
    assert not khot.budget_mask(hidden, prices, budget, by=by, mask=mask)[:, ~mask].any()


@both
def test_a_budget_that_is_all_costs_to_rounding(by: str) -> None:
    x, cost, _ = problem("uniform")
    for budget in (cost.sum(-1), cost.flip(-1).cumsum(-1)[:, -1], cost.sum(-1) * (1 - 2**-53)):
        leaves = [x.clone().requires_grad_(), budget.clone().requires_grad_()]
        y = khot.soft_budget(leaves[0], cost, leaves[1], by=by)
        dx, dbudget = torch.autograd.grad(y.square().sum(), leaves)
        assert (y == 1).all() and not dx.any() and not dbudget.any()


# what test_bad_input.py does not draw
X, COST = f64(1.0, 2.0, 3.0), f64(1.0, 2.0, 1.0)
BAD: list[tuple[type[Exception], str, Callable[[Any], Any]]] = [
    (ValueError, "budget", lambda f: f(X, COST, f64(-1.0).squeeze())),
    (ValueError, "budget", lambda f: f(X, COST, f64(1.0, 2.0))),
    (ValueError, "cost", lambda f: f(X, f64(1.0, -2.0, 1.0), 1.0)),
    (ValueError, "cost", lambda f: f(X, f64(1.0, INF, 1.0), 1.0)),
    (ValueError, "cost", lambda f: f(X, f64(1.0, NAN, 1.0), 1.0)),
    (ValueError, "cost", lambda f: f(X, f64(1.0, 2.0), 1.0)),
]


@pytest.mark.parametrize("case", range(len(BAD)))
@pytest.mark.parametrize("call", [khot.soft_budget, khot.budget_mask])
def test_bad_input(call: Any, case: int) -> None:
    error, name, bad = BAD[case]
    with pytest.raises(error, match=f"^{name} must "):
        bad(call)


def test_a_budget_above_what_can_be_selected() -> None:
    with pytest.raises(ValueError, match=r"^budget must "):
        khot.soft_budget(f64(1.0, -INF, 0.0), COST, 2.5)


# --------------------------------------------------------------------------------------------- hard


@both
@pytest.mark.parametrize("kind", ["uniform", "12 decades", "integers", "ties"])
def test_the_mask_takes_each_entry_that_fits(by: str, kind: str) -> None:
    x, cost, budget = problem(kind, 20, 30)
    y = khot.budget_mask(x, cost, budget, by=by)
    for i in range(20):
        w = cost[i].tolist()
        ratio = [
            v if by == "score" else (v / c if c else (INF if v >= 0 else -1e300))
            for v, c in zip(x[i].tolist(), w, strict=True)
        ]
        left, taken = float(budget[i]), set()
        for j in sorted(range(30), key=lambda j: -ratio[j]):
            if w[j] <= left * (1 + 1e-15):
                left, taken = left - w[j], taken | {j}
        assert set(y[i].nonzero().squeeze(-1).tolist()) == taken
    assert ((cost * y).sum(-1) <= budget * (1 + 1e-15)).all()


@pytest.mark.parametrize("many", range(1, 9))
def test_the_mask_takes_what_is_free_when_all_is_spent(many: int) -> None:
    """Sums of tenths are rounded, and what is left of a budget that they use up may not fall below 0."""
    cost = torch.tensor([0.1] * 8 + [0.0] * 2, dtype=torch.float64)
    y = khot.budget_mask(-torch.arange(10, dtype=torch.float64), cost, sum([0.1] * many))
    assert y.tolist() == [1] * many + [0] * (8 - many) + [1, 1]


def test_the_mask_of_a_budget_without_limit() -> None:
    x, cost, _ = problem("uniform", 3, 8)
    assert khot.budget_mask(x, cost, INF).all() and khot.budget_mask(x, 1e308 + cost, INF).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_mask_pays_for_the_entries_whose_costs_were_added(dtype: torch.dtype) -> None:
    """For all of them, or for the best few; and the budget is exceeded by no more than it says."""
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        n = (7, 60, 700, 9000)[int(torch.randint(0, 4, (), generator=g))]
        x = torch.randn(n, generator=g)
        for prices in budget_rows.PRICES.values():
            w = prices(n, g).to(dtype)
            many = n if seed % 2 else int(torch.randint(1, n + 1, (), generator=g))
            best = x.argsort(descending=True)[:many]
            for budget in budget_rows.sums(w[best]).values():
                y = khot.budget_mask(x, w, budget)
                assert y[best].all()
                share = budget_rows.mask_share(n, dtype, dtype)
                spent = math.fsum(w[y.bool()].tolist())
                assert spent <= budget.item() * (1 + share) * (1 + 1e-12)
                if many == n:
                    assert khot.soft_budget(x, w, budget, tau=0.1, hard=True, at_most=False).all()
                    assert khot.budget_mask(x, w, budget, by="value").all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_cover_of_equal_probabilities(dtype: torch.dtype) -> None:
    """What is left when the least probable entries are taken for the rest: as few as reach the budget."""
    for n in range(2, 41):
        p = torch.full((n,), 1 / n, dtype=dtype)
        for twentieths in range(1, 20):
            kept = 1 - khot.budget_mask(p, p, p.sum(-1) - twentieths / 20, largest=False)
            assert kept.sum() == math.ceil(Fraction(twentieths, 20) * n)


def test_a_small_budget_does_not_pay_for_small_costs() -> None:
    """Of many costs, each is small beside the sum of all, but not beside the budget."""
    n = 200_000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    for cost in (torch.tensor(0.1), 0.1 + torch.zeros(n)):
        for many in (0, 1, 30):
            assert khot.budget_mask(x, cost, 0.1 * (many + 0.99)).sum() == many


def test_whole_costs_are_kept_to_the_unit() -> None:
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        cost = torch.randint(1, 5000, (20_000,), generator=g)
        budget = int(torch.randint(1, 10**7, (), generator=g))
        y = khot.budget_mask(torch.randn(20_000, generator=g), cost, budget)
        assert cost[y.bool()].sum() <= budget


@both
@pytest.mark.parametrize("at_most", [False, True])
def test_hard_has_the_gradient_of_the_soft_selection(by: str, at_most: bool) -> None:
    x, cost, budget = problem("uniform", 3, 8)
    weights = torch.arange(8).double()
    grads = []
    for hard in (False, True):
        leaf = x.clone().requires_grad_()
        y = khot.soft_budget(leaf, cost, budget, tau=0.3, by=by, at_most=at_most, hard=hard)
        grads.append(torch.autograd.grad((y * weights).sum(), leaf)[0])
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(y.detach(), khot.budget_mask(x, cost, budget, by=by, at_most=at_most))
    if at_most:
        assert not y[x < 0].any()


# --------------------------------------------------------------------------------- short rows, by lanes


def rows_of_every_kind(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """37 rows, so that groups of 8 and 16 leave some over: ordinary ones and unusual ones."""
    g = torch.Generator().manual_seed(n)
    x = 2 * torch.randn(37, n, generator=g, dtype=torch.float64)
    cost = torch.rand(37, n, generator=g, dtype=torch.float64) + 0.05
    share = torch.rand(37, generator=g, dtype=torch.float64)
    tau = 10 ** (2 * torch.rand(37, generator=g, dtype=torch.float64) - 1.5)
    x[3] += 1e4  # far from 0
    x[5, 0], x[6, 0] = -INF, INF
    x[8] = 0.5  # ties
    cost[10] *= 1e-8
    cost[11] *= 1e8
    cost[12] = 10 ** (12 * torch.rand(n, generator=g, dtype=torch.float64) - 6)
    cost[13, : n // 2] = 0
    cost[14, 0] = 100.0  # one entry costs most
    share[16], share[17], share[18], share[19] = 0, 1, 1e-9, 1 - 1e-9
    tau[21], tau[22], tau[23] = 1e-4, 1e3, 1e-6
    x, cost = x.to(dtype), cost.to(dtype)
    total = torch.where(x == -INF, 0, cost).double().sum(-1)
    pinned = torch.where(x == INF, cost, 0).double().sum(-1)
    return x, cost, pinned + share * (total - pinned), tau


@every_cdf
@pytest.mark.parametrize("n", [1, 2, 7, 64, 255, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@both
def test_short_rows_in_groups(by: str, dtype: torch.dtype, n: int, cdf: Any) -> None:
    """Several rows are solved at once, one per lane of a vector. Each must be what it is alone. (All four
    gradients are held against the reference by the fuzz, whose batches have such rows, too.)"""
    x, cost, budget, tau = rows_of_every_kind(n, dtype)
    weights = torch.linspace(-1, 1, x.numel()).view_as(x).to(dtype)

    def results(*rows: Tensor) -> list[Tensor]:
        x, cost, budget, tau, weights = rows
        leaves = [cost.clone().requires_grad_(), budget.clone().requires_grad_()]
        y = khot.soft_budget(x, *leaves, tau=tau, cdf=cdf, by=by)
        return [y.detach(), *torch.autograd.grad(y, leaves, weights)]

    given = (x, cost, budget, tau, weights)
    together = results(*given)
    each = [results(*(v[i : i + 1] for v in given)) for i in range(len(x))]
    alone = [torch.cat(parts) for parts in zip(*each, strict=True)]
    if dtype == torch.float32:
        spent = torch.where(x == -INF, 0, cost).double().mul(together[0].double()).sum(-1)
        assert bool(((spent - budget).abs() <= 1e-6 * budget).all())
    for got, want in zip(together, alone, strict=True):
        size = want.double().abs()
        size = size.amax(-1, keepdim=True) if want.dim() > 1 else size
        error = (got.double() - want.double()).abs()
        # at a small τ, float32 carries y but not its density
        rows = tau > (0 if got is together[0] else 1e-3)
        assert bool((error <= (2e-5 + 2 * torch.finfo(dtype).eps) * size)[rows].all())


@every_cdf
@pytest.mark.parametrize("tau", [0.03, 1e-3, 1e-5])
@pytest.mark.parametrize(
    "kind", ["normal", "ties", "heavy costs", "free entries", "left out", "whole costs", "spent in full"]
)
@pytest.mark.parametrize(("rows", "n"), [(64, 48), (4, 1000)])
@both
def test_rows_of_decided_costs(by: str, rows: int, n: int, kind: str, tau: float, cdf: Any) -> None:
    """The entries near the threshold are solved by themselves; as in float64, which solves whole rows."""
    g = torch.Generator().manual_seed(0)
    x, cost = torch.randn(rows, n, generator=g), torch.rand(rows, n, generator=g) + 0.05
    if kind == "ties":
        x = (4 * x).round() / 4
    elif kind == "heavy costs":
        cost = (3 * torch.randn(rows, n, generator=g)).exp()
    elif kind == "free entries":
        cost[:, ::3] = 0
    elif kind == "left out":
        x[:, ::3] = -INF
    elif kind == "whole costs":
        cost = (5 * cost).ceil()
    share = torch.tensor([0.02, 0.1, 0.5, 0.9], dtype=torch.float64).repeat(rows // 4)
    budget = share * torch.where(x == -INF, 0, cost).double().sum(-1)
    # a threshold lies in a gap where the budget is spent to the last digit
    if kind == "whole costs":
        budget = budget.round()
    elif kind == "spent in full":
        level = x / cost if by == "value" else x
        spent = cost.gather(-1, level.argsort(descending=True)).double().cumsum(-1)
        budget = spent.gather(-1, (share.unsqueeze(-1) * n).long()).squeeze(-1)
    given, wide = (
        (x.to(dtype), cost.to(dtype), budget.clone().requires_grad_())
        for dtype in (torch.float32, torch.float64)
    )
    y, expected = (khot.soft_budget(*each, tau=tau, cdf=cdf, by=by) for each in (given, wide))
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-6)
    spent = (torch.where(x == -INF, 0, wide[1]) * y).sum(-1)
    assert bool(((spent - wide[2]).abs() <= 1e-6 * wide[2]).all())
    if isinstance(cdf, str) and tau > 1e-5:
        # who gets more, were there more to spend: in a gap, tails that are nothing beside 1 decide
        weights = torch.rand(rows, n, generator=g)
        shares = [
            torch.autograd.grad((v * weights).sum(), b)[0] for v, (*_, b) in ((y, given), (expected, wide))
        ]
        torch.testing.assert_close(*shares, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("tau", [1e-3, 1e-5, 1e-6])
@pytest.mark.parametrize(("rows", "n"), [(20, 40), (2, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_costs_of_sharp_rows_by_value(dtype: torch.dtype, rows: int, n: int, tau: float) -> None:
    """dL/dw has t dL/dx, which is nothing where one entry moves: t/τ times its rounding would be left."""
    g = torch.Generator().manual_seed(0)
    x, cost, v = (torch.randn(rows, n, generator=g).to(dtype) for _ in range(3))
    cost = cost.abs() + 0.5
    budget = 0.2 * cost.double().sum(-1)

    def price(dtype: torch.dtype) -> Tensor:
        w = cost.to(dtype).requires_grad_()
        y = khot.soft_budget(x.to(dtype), w, budget, tau=tau, by="value")
        return torch.autograd.grad(y, w, v.to(dtype))[0].double()

    want = price(torch.float64)
    error = (price(dtype) - want).abs().amax(-1) / want.abs().amax(-1)
    assert (error <= 1e-5 + torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("n", [64, 1000])
@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_values_that_are_large_in_units_of_tau(cdf: str, n: int) -> None:
    """By value t w is as large as x, and its last digits decide y."""
    g = torch.Generator().manual_seed(0)
    x, cost = torch.randn(16, n, generator=g) + 1e5, torch.rand(16, n, generator=g) + 0.05
    budget = 0.37 * cost.double().sum(-1)
    y, want = (
        khot.soft_budget(x.to(dtype), cost.to(dtype), budget, tau=1e-6, cdf=cdf, by="value")
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(y.double(), want, rtol=0, atol=5e-7)


# -------------------------------------------------------------------------------------------- top-p


def page_says(line: str) -> str:
    """What the line of this name in the section on top-p of docs/budgets.md computes."""
    page = (Path(__file__).parents[1] / "docs" / "budgets.md").read_text(encoding="utf-8")
    section = page.split("## Top-p")[1].split("\n## ")[0]
    (found,) = re.findall(rf"^{line} = (.*)$", section, re.MULTILINE)
    return str(found)


def top_p(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """Logits of all spreads, with ties and tokens that cannot come."""
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(2, 300, (), generator=g))
    logits = torch.randn(4, n, generator=g) * (0.3, 1.0, 3.0, 10.0)[seed % 4]
    logits[1] = logits[1].round()
    hidden = torch.rand(4, n, generator=g) < 0.3
    hidden[:, 0] = False
    logits = logits.masked_fill(hidden, -INF).to(dtype).requires_grad_()
    return {"torch": torch, "khot": khot, "logits": logits}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_the_pages_soft_top_p(dtype: torch.dtype) -> None:
    for seed in range(25):
        given = top_p(seed, dtype)
        p = eval("logits.softmax(-1)", given)
        given |= {"p": p, "log_p": given["logits"].log_softmax(-1)}
        y = eval(page_says("y"), given)
        (grad,) = torch.autograd.grad((y * torch.arange(y.shape[-1])).sum(), given["logits"])
        assert grad.isfinite().all() and grad.any()
        assert not grad[given["logits"] == -INF].any()
        spent = (p.double() * y.double()).sum(-1)
        torch.testing.assert_close(spent, f64(0.9).expand(4), rtol=0, atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("n", [1, 300, 3000])
@pytest.mark.parametrize("scale", [0.01, 1, 4, 30])
def test_the_nucleus_of_peaked_and_flat_rows(scale: float, n: int) -> None:
    x = scale * torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    x[1] = (2 * x[1]).round() / 2
    x[2, n // 2 :] = -1e30
    x[:, 3:4] = -INF
    for p in (1e-300, 0.01, 0.3, 0.9, 0.999, 1.0):
        want = np.stack([oracles.nucleus(row, p) for row in x])
        assert (khot.nucleus_mask(x, p).numpy() == want).all()
    levels = f64(0, 0.9, 1)
    want = np.stack([oracles.nucleus(row, p) for row, p in zip(x, levels.tolist(), strict=True)])
    assert (khot.nucleus_mask(x, levels).numpy() == want).all()


def test_the_nucleus_of_equal_entries() -> None:
    for n in range(2, 41):
        for twentieths in range(1, 21):
            taken = khot.nucleus_mask(torch.zeros(n), twentieths / 20)
            assert taken.sum() == math.ceil(Fraction(twentieths, 20) * n) == taken.nonzero().max() + 1
    assert khot.nucleus_mask(torch.zeros(1000), 0.55).sum() == 550


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_nucleus_has_the_gradient_of_the_soft_one(dtype: torch.dtype) -> None:
    for seed in range(8):
        logits = top_p(seed, dtype)["logits"]
        mask = logits.detach() < 1
        mask[:, 0] = True
        wide = logits.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        p, tau = f64(0.5, 0.9, 0.99, 0.999), torch.tensor(0.7, dtype=torch.float64)
        inputs = [p.requires_grad_(), tau.requires_grad_()]
        log_p = wide.masked_fill(~mask, -INF).log_softmax(-1)
        soft = khot.soft_budget(log_p, log_p.exp(), p, tau=tau)
        y = khot.nucleus_mask(logits, p, tau=tau, mask=mask)
        v = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        want = torch.autograd.grad(soft, [wide, *inputs], v.to(soft.dtype))
        got = torch.autograd.grad(y, [logits, *inputs], v)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b.to(a.dtype))
        hidden = logits.detach().masked_fill(~mask, NAN)
        assert torch.equal(khot.nucleus_mask(hidden, p.detach(), mask=mask), y.detach().round())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nucleus_of_everything_has_no_gradient(dtype: torch.dtype) -> None:
    """Softmax may sum to a little more than 1, and improbable entries would get what is left."""
    g = torch.Generator().manual_seed(0)
    logits, v = (torch.randn(20, 30, generator=g).to(dtype) for _ in range(2))
    logits, p = (8 * logits).requires_grad_(), torch.tensor(1.0, requires_grad=True)
    (khot.nucleus_mask(logits, p, tau=0.5) * v).sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits)) and p.grad == 0


def test_the_gradient_of_a_nucleus_under_transforms() -> None:
    x, v = problem("uniform")[0], problem("uniform", seed=1)[0]

    def loss(x: Tensor, v: Tensor) -> Tensor:
        return (khot.nucleus_mask(x, 0.6, tau=0.5) * v).sum()

    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf, v), leaf)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x, v), want)
    torch.testing.assert_close(torch.func.jvp(loss, (x, v), (x, x))[1], (want * x).sum() + loss(x, x))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(leaf, v), leaf)[0], want)


def test_the_nucleus_of_a_row_without_probabilities() -> None:
    x = torch.randn(5, 400, generator=torch.Generator().manual_seed(0))
    want = khot.nucleus_mask(x, 0.9)
    x[0, 2], x[1, 3], x[2] = NAN, INF, -INF
    for given in (x, x.clone().requires_grad_()):
        y = khot.nucleus_mask(given, 0.9).detach()
        assert y[:3].isnan().all() and torch.equal(y[3:], want[3:])
    assert khot.nucleus_mask(torch.zeros(2, 0, requires_grad=True), 0.9).shape == (2, 0)
    with pytest.raises(ValueError, match=r"^p must lie in \[0, 1\], but got 1.5"):
        khot.nucleus_mask(x, f64(0.1, 0.2, 0.3, 0.4, 1.5))


# ------------------------------------------------------------------------------------------- shards


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_sum_of_costs_over_processes(dtype: torch.dtype, by: str) -> None:
    """The sum of a row is rounded as one of all its costs is, also for the process that has few of them."""
    x = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    cost = torch.full_like(x, 0.1)
    budget = cost.double().sum(-1) * (1 + 0.5 * budget_rows.soft_share(3000, dtype))
    args = [x, cost, budget, f64(1.0, 0.5)]
    parts = processes.run(
        2, shards.derivatives_of_shards, "soft_budget", {"by": by}, args, torch.ones_like(x), [0, 40, 3000]
    )
    assert all((part[0] == 1).all() for part in parts)


@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
@both
def test_rows_over_processes(cdf: str, by: str) -> None:
    x, cost, budget = problem("uniform", 3, 12)
    x[0, 2], x[1, 7] = -INF, INF
    budget = budget.clamp(min=1.5)
    args = [x, cost, budget, f64(0.7, 1.0, 0.3)]
    weights = problem("uniform", 3, 12, seed=3)[0]
    options = {"cdf": cdf, "by": by}
    shards.assert_like_whole_rows(2, "soft_budget", options, args, weights, [0, 5, 12])
    with pytest.raises(RuntimeError, match="hard must be False with a group"):
        processes.run(
            2, shards.derivatives_of_shards, "soft_budget", {"hard": True}, args, weights, [0, 5, 12]
        )
