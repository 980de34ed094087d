"""Soft budgets of rows that many programs share, under Triton's interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from budget_rows import check_rows, far, numbers
from khot._kernels.reference import soft_budget as reference
from noted import Launches

STEPS = 6  # launches that evaluate
FORWARD = ("_weigh_budget_parts", "_spend_parts", "_rescue_budgets", "_write_budget_parts")
BACKWARD = ("_pull_parts", "_gradient_parts")
every_form = pytest.mark.parametrize("by", ["score", "value"])


@every_form
def test_an_infinite_gradient_spoils_its_row_and_no_other(split: ModuleType, by: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, w, v = torch.randn(2, 45, generator=g), torch.rand(2, 45, generator=g) + 0.1, torch.ones(2, 45)
    v[0, 40] = torch.inf
    rest = (*numbers(0.5), "logistic", 0.0, by, False)
    budget = w.sum(-1).double() / 3
    _, hi, lo = reference.soft_budget(x.double(), w.double(), budget, *rest)
    given = (torch.zeros(2).double(), x, w, hi, lo, *rest)
    for got, want in zip(
        split.soft_budget_backward(v, *given), reference.soft_budget_backward(v.double(), *given), strict=True
    ):
        assert not got[0].isfinite().any() and not want[0].isfinite().any()
        assert (far(got[1], want[1].to(got.dtype)) <= 1e-5).all()


@every_form
def test_a_budget_at_most(split: ModuleType, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Of which t = 0 spends less, as much, a little more, and more; or which pays for everything."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(40, generator=g).expand(5, 40), torch.rand(40, generator=g).expand(5, 40) + 0.1
    spent = (w.double() * x.double().sigmoid()).sum(-1)
    budget = spent * torch.tensor([1.1, 9.0, 0.999, 0.5, 1.0]).double()
    check_rows(split, x, w, budget, 1.0, "logistic", by, True)
    monkeypatch.setattr(split.split_budget, "find_in_float64", None)  # which only the last row needs
    _, hi, _ = split.soft_budget(x[:4], w[:4], budget[:4], *numbers(1.0), "logistic", 0.0, by, True)
    assert (hi > 0).tolist() == [False, False, True, True] and (hi[:2] == 0).all()


@every_form
@pytest.mark.parametrize(("cdf", "tau"), [("logistic", 0.1), ("power", 1.0)])
def test_ordinary_rows_need_no_program_of_their_own(
    split: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str, tau: float, by: str
) -> None:
    """Costs of each part in a unit of its own; and what follows the last step goes on where that ended."""
    noted = Launches(split.split_budget, FORWARD[:3], monkeypatch)
    g = torch.Generator().manual_seed(1)
    x, w = (
        torch.randn(2, 200, generator=g),
        (torch.rand(2, 200, generator=g) + 0.1) * 2.0 ** (torch.arange(200) // 64),
    )
    budget = w.double().sum(-1) * torch.tensor([0.05, 0.4])

    def none(*_: object, **__: object) -> None:
        raise AssertionError("a row was searched in float64")

    monkeypatch.setattr(split.split_budget, "find_in_float64", none)
    for steps in (STEPS, 1):
        monkeypatch.setattr(split.split_budget, "STEPS", steps)
        check_rows(split, x, w, budget, tau, cdf, by, False)
        status = noted.given["_spend_parts"]["status"]
        assert all(s == split.split_budget.DONE.value for s in status) == (steps == STEPS)
    assert noted.given["_rescue_budgets"]["status"] == [split.split_budget.DONE.value] * 2


def test_launches_forward(split: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many whatever the row takes, and what they count is reset, so that they can be replayed."""
    noted = Launches(split.split_budget, FORWARD, monkeypatch)
    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(5))
    for cost, status in ((x.abs(), split.split_budget.DONE), (x.abs() * 0, split.split_budget.CAREFUL)):
        y, *_ = split.soft_budget(x, cost, *numbers(0.3, 1.0), "logistic", 0.0, "score", True)
        assert y.isfinite().all()
        assert noted.given["_spend_parts"]["counter_pointer"].tolist() == [0]
        assert noted.given["_rescue_budgets"]["status"] == [status.value]
    weigh, spend, rescue, write = FORWARD
    assert noted.names == [weigh, *[spend] * STEPS, rescue, write] * 2


def test_launches_backward(split: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many whatever the row takes, and what they count is reset, so that they can be replayed."""
    noted = Launches(split.pull, BACKWARD, monkeypatch)
    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(5))
    rest = (*numbers(1.0), "logistic", 0.0, "score", False)
    for hi in (0.3, 500.0):  # the second is far from all entries, so that float64 serves it
        found = split.soft_budget_backward(
            x, *numbers(0.0), x, x.abs(), torch.tensor([hi]).double(), torch.zeros(1).double(), *rest
        )
        assert all(v.isfinite().all() for v in found)
        assert noted.given[BACKWARD[0]]["counter_pointer"].tolist() == [0]
        assert noted.given[BACKWARD[0]]["state_pointer"].tolist() == [int(hi > 1)]
    assert noted.names == [*BACKWARD] * 2
