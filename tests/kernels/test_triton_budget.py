"""The soft budget of the Triton kernels, interpreted, against the reference."""

from __future__ import annotations

import inspect
import math
from types import ModuleType
from typing import Any

import pytest
import torch

from budget_rows import (
    CDFS,
    GAP_EXAMPLES,
    check_gradients,
    check_rows,
    far,
    gaps,
    numbers,
)
from khot._kernels.reference import soft_budget as reference
from khot._kernels.reference.budget_mask import budget_mask as reference_mask
from selection_rows import LOG_TAILS, rows_in_gaps

INF, NAN = math.inf, math.nan
every_cdf = pytest.mark.parametrize("cdf", CDFS)


def stream(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows stream past their program, 256 entries at a time."""
    monkeypatch.setattr(kernels.layout, "pair_tile", lambda rows, n: kernels.layout.Tile(1, 2, 128, 1, True))
    for module in (kernels.paid, kernels.pull):
        monkeypatch.setattr(module, "_variant", inspect.unwrap(module._variant))


# a CDF, the length of the rows, and whether the budget is a bound
ORDINARY = [*((cdf, 64, True) for cdf in CDFS), ("logistic", 700, False), ("uniform", 700, True)]


@every_cdf
def test_rows_of_several_chunks(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str) -> None:
    monkeypatch.setattr(kernels.float64, "WIDTH", 64)
    g = torch.Generator().manual_seed(0)
    x, w = 3 * torch.randn(2, 150, generator=g).double(), torch.rand(2, 150, generator=g).double() + 0.01
    budget = torch.tensor([0.01, 0.6]) * w.sum(-1)
    for by in ("score", "value"):
        check_rows(kernels, x, w, budget, 0.5, cdf, by, False)
        check_gradients(kernels, x, w, budget, 0.5, cdf, by, False)


@pytest.mark.parametrize(
    ("cdf", "n", "at_most", "by", "long"),
    # held and streaming by turns: every CDF has both, and so has either form
    [
        (cdf, n, at_most, by, long)
        for i, (cdf, n, at_most) in enumerate(ORDINARY)
        for by, long in (("score", bool(i % 2)), ("value", not i % 2))
    ],
)
def test_ordinary_rows_need_no_float64(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, by: str, cdf: str, n: int, at_most: bool, long: bool
) -> None:
    """Rows with costs of about one size are decided in float32, whatever their scale, in few evaluations,
    forward and backward."""
    taken = []

    def rescue(*_: object) -> None:
        taken.append("rescue")

    monkeypatch.setattr(kernels.paid, "PAID", kernels.paid.PAID._replace(in_float64=rescue))
    monkeypatch.setattr(kernels.paid, "_variant", inspect.unwrap(kernels.paid._variant))
    monkeypatch.setattr(kernels.pull, "_pull_in_float64", rescue)
    if long:
        stream(kernels, monkeypatch)
    iterate = kernels.threshold.taylor_step
    monkeypatch.setattr(
        kernels.threshold, "taylor_step", lambda *given: taken.append("evaluation") or iterate(*given)
    )
    g = torch.Generator().manual_seed(n)
    x, w = torch.randn(2, n, generator=g), 1e4 * (torch.rand(2, n, generator=g) + 0.1)
    budget = torch.tensor([0.05, 0.3]) * w.double().sum(-1)
    for tau in (1.0, 0.05):
        taken.clear()
        check_rows(kernels, x, w, budget, tau, cdf, by, at_most)
        # A streamed row starts from a wider bracket, which costs it one or two evaluations where few entries
        # lie inside a compact support. No row of 64 entries is streamed but here.
        most = 12 if long and n == 64 else 10
        assert "rescue" not in taken and len(taken) <= 2 * most
        check_gradients(kernels, x, w, budget, tau, cdf, by, at_most)
        assert "rescue" not in taken


def leave_hard_rows_out(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the float32 solver does not solve stay NaN."""
    monkeypatch.setattr(kernels.paid, "PAID", kernels.paid.PAID._replace(in_float64=lambda *_: None))
    monkeypatch.setattr(kernels.paid, "_variant", inspect.unwrap(kernels.paid._variant))
    monkeypatch.setattr(kernels.split_budget, "find_in_float64", lambda *_: (NAN, NAN))


def costs_and_budgets(x: torch.Tensor, whole: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By turns a budget is what the first entries cost, and any."""
    g = torch.Generator().manual_seed(seed)
    w = torch.rand(x.shape, generator=g) + 0.1
    w = (10 * w).ceil() if whole else w
    paid = w.double().gather(-1, x.argsort(descending=True)).cumsum(-1)
    budget = paid[torch.arange(len(x)), torch.randint(0, x.shape[1] // 2, (len(x),), generator=g)]
    budget[::2] *= torch.rand(len(x[::2]), generator=g).double()
    return w, budget


@pytest.mark.parametrize(("cdf", "whole"), [(cdf, i % 2 == 0) for i, cdf in enumerate(CDFS)])
def test_sharp_rows_need_no_float64(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str, whole: bool
) -> None:
    """There a row takes hundreds of times as long."""
    leave_hard_rows_out(kernels, monkeypatch)
    x = torch.randn(32, 100, generator=torch.Generator().manual_seed(12))
    w, budget = costs_and_budgets(x, whole, 13)
    for tau in (3e-3, 1e-4, 1e-6):
        check_rows(kernels, x, w, budget, tau, cdf, "score", False)


@pytest.mark.parametrize(
    ("where", "cdf", "digits"),
    # half of all combinations, among them all of any two
    [
        (where, cdf, digits)
        for i, where in enumerate(("kernels", "split"))
        for j, cdf in enumerate(("logistic", "laplace", "normal"))
        for digits in (-1, 0, 1)
        if (i + j + digits) % 2
    ],
)
def test_gaps_of_any_width_need_no_float64(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, where: str, cdf: str, digits: int
) -> None:
    """What is missing above t is what is spent below it; or that and so many of the last digits of the
    budget."""
    kernels = request.getfixturevalue(where)
    leave_hard_rows_out(kernels, monkeypatch)
    tau = 2.0**-10
    x, log_tail = rows_in_gaps(tau), LOG_TAILS[cdf]
    w = 10 ** (3 * torch.rand(18, generator=torch.Generator().manual_seed(0)) - 2)
    spent = w[:7].double().sum()
    budget = spent * (1 + digits * 2.0**-52)
    rest = budget - spent
    y, hi, lo = kernels.soft_budget(
        x, w.expand_as(x), budget.expand(len(x)), *numbers(tau), cdf, 0.0, "score", False
    )
    assert not y.isnan().any()
    z = ((x.double() - hi[:, None]) - lo[:, None]) / tau
    log_w = w.double().log()
    missing = (log_tail(z[:, :7]) + log_w[:7]).logsumexp(1)
    over = (log_tail(-z[:, 7:]) + log_w[7:]).logsumexp(1)
    if digits > 0:
        missing = torch.logaddexp(missing, rest.log())
    elif digits < 0:
        over = torch.logaddexp(over, (-rest).log())
    torch.testing.assert_close(missing, over, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cdf", ["uniform", "power"])
def test_where_no_entry_is_taken_in_part_t_is_the_middle_of_the_gap(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str
) -> None:
    """At its end one entry alone would decide what more of the budget is worth."""
    leave_hard_rows_out(kernels, monkeypatch)
    x = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)).sort(descending=True).values
    w = torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) + 0.1
    up, down = x[:, 9].double(), x[:, 10].double()
    for tau in (0.01, 1e-4):
        _, hi, lo = kernels.soft_budget(
            x, w, w[:, :10].double().sum(-1), *numbers(tau), cdf, CDFS[cdf], "score", False
        )
        wide = up - down > 1.01 * tau
        middle = (up - tau + down) / 2
        torch.testing.assert_close((hi + lo)[wide], middle[wide], rtol=0, atol=1e-6 * tau)


@pytest.mark.parametrize(
    ("cdf", "by", "long"),
    [("logistic", "score", False), ("uniform", "score", False), ("logistic", "value", True)],
)  # fmt: skip
def test_the_rounding_of_a_sum_of_costs_does_not_move_the_shares(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str, by: str, long: bool
) -> None:
    """In float32 what 4,000 selected entries cost has an error of 1e-4, which one entry makes up for."""
    if long:
        stream(kernels, monkeypatch)
    n, g = 8_000, torch.Generator().manual_seed(0)
    x = torch.cat((torch.full((n // 2,), 9.0), torch.zeros(1), torch.full((n // 2 - 1,), -9.0)))[None]
    w = torch.rand(1, n, generator=g) / 3 + 0.5
    budget = w[:, : n // 2].double().sum(-1) + 0.3 * w[:, n // 2].double()
    check_rows(kernels, x, w, budget, 0.1, cdf, by, False)


def test_the_end_of_a_gap_at_which_entries_are_taken_whole(kernels: ModuleType) -> None:
    """Under a power they are about to reach y = 1 there, and t goes on into the gap."""
    x = torch.tensor(
        [
            [2 + 2.0**-21, 1, 3 + 5 * 2.0**-21, 3 * 2.0**-22, 1, 2],
            [1 + 2.0**-19, 1, 1, 1 + 3 * 2.0**-22, 1, 1],
            [2, 3 + 11 * 2.0**-22, 2 + 3 * 2.0**-22, 3 * 2.0**-22, 1 + 2.0**-21, 2 + 2.0**-21],
            [1, 0, 2, 2, 3 + 2.0**-19, 0],
        ]
    )
    w = torch.tensor([[1.0, 1, 4, 1, 4, 1], [1, 4, 2, 1, 2, 1], [2, 1, 4, 2, 4, 1], [2, 2, 2, 1, 2, 2]])
    budget = torch.tensor([6.0, 2, 1, 7], dtype=torch.float64)
    tau = torch.tensor(
        [0.9523162841796875, 7.144030860217754e-07, 0.9523180723190308, 0.9988079071044922],
        dtype=torch.float64,
    )
    _, hi, lo = kernels.soft_budget(x, w, budget, tau, "power", 1.5, "score", False)
    z = ((x.double() - hi[:, None]) - lo[:, None]) / tau[:, None]
    assert ((z > 1.0001) | (z < -0.0001)).all()


def test_a_bound_that_is_nearly_spent(kernels: ModuleType) -> None:
    """Whether t = 0 spends more than the bound is decided by the last digits, and by float64."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 50, generator=g), torch.rand(5, 50, generator=g)
    asked_for = (w.double() * torch.sigmoid(x.double())).sum(-1)
    budget = asked_for * (1 + torch.tensor([0, 1e-9, -1e-9, 1e-4, -1e-4], dtype=torch.float64))
    check_rows(kernels, x, w, budget, 1.0, "logistic", "score", True)
    _, hi, lo = kernels.soft_budget(x, w, budget, *numbers(1.0), "logistic", 0.0, "score", True)
    assert ((hi + lo)[[2, 4]] > 0).all() and torch.equal((hi + lo)[[1, 3]], torch.zeros(2).double())


def test_a_budget_by_value_keeps_its_last_digit(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device gets numbers in float32, unlike the interpreter. More than all costs is not a budget."""
    launch = kernels.float64.launch

    def narrow(value: Any) -> Any:
        if isinstance(value, tuple):
            inner = map(narrow, value)
            return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
        return torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value

    monkeypatch.setattr(kernels.float64, "launch", lambda *given, **more: launch(*map(narrow, given), **more))
    (all_costs,) = numbers(1.2505063413624407)
    x = torch.zeros(1, 1, dtype=torch.float64)
    y, _, _ = kernels.soft_budget(
        x, all_costs.reshape(1, 1), all_costs, *numbers(1.0), "logistic", 0.0, "score", False
    )
    assert torch.equal(y, torch.ones_like(y))


@pytest.mark.parametrize("streams", [False, True])
def test_costs_of_sharp_rows_by_value(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """dL/dw has t dL/dx, which is nothing where one entry moves: t/τ times its rounding would be left."""
    if streams:
        stream(kernels, monkeypatch)
    g = torch.Generator().manual_seed(0)
    x, v = torch.randn(8, 64, generator=g), torch.randn(8, 64, generator=g)
    w = torch.rand(8, 64, generator=g) + 0.5
    budget, rest = 0.2 * w.double().sum(-1), (*numbers(1e-6), "logistic", 0.0, "value", False)

    def costs(engine: Any, dtype: torch.dtype) -> torch.Tensor:
        wide, cost, grad = x.to(dtype), w.to(dtype), v.to(dtype)
        _, hi, lo = engine.soft_budget(wide, cost, budget, *rest)
        _, dw, *_ = engine.soft_budget_backward(grad, torch.zeros_like(lo), wide, cost, hi, lo, *rest)
        return torch.as_tensor(dw).double()

    want = costs(reference, torch.float64)
    error = (costs(kernels, torch.float32) - want).abs().amax(-1) / want.abs().amax(-1)
    assert (error <= 1e-5).all()


@pytest.mark.parametrize(("cdf", "by"), [("logistic", "score"), ("normal", "value")])
def test_gaps_of_many_tau(kernels: ModuleType, cdf: str, by: str) -> None:
    """Entries on either side of t that are all far from it are not for that equally near."""
    x = torch.tensor([[1.38, -1.04, -1.72]], dtype=torch.float64)
    w = torch.tensor([[72, 2.0**-12, 2.0**-17]], dtype=torch.float64)
    given = kernels, x, w, w[:, :2].sum(-1), 1e-20, cdf, by, False
    check_rows(*given)
    check_gradients(*given)


@every_cdf
def test_a_hard_row_takes_few_evaluations(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str
) -> None:
    """A method that creeps still ends in its bracket, only later. These rows take 18 at most."""
    evaluate, taken = kernels.float64.evaluate, []

    def counted(*given: object) -> object:
        taken.append(1)
        return evaluate(*given)

    monkeypatch.setattr(kernels.float64, "evaluate", counted)
    rows = [(x, w, budget, tau) for x, w, budget, tau in GAP_EXAMPLES]
    x, w, budget = gaps(5, torch.float64, "value", 6)
    rows += [(*row, 0.01) for row in zip(x.tolist(), w.tolist(), budget.tolist(), strict=True)]
    for scores, costs, amount, tau in rows:
        x, w = (torch.tensor([v], dtype=torch.float64) for v in (scores, costs))
        taken.clear()
        kernels.soft_budget(x, w, *numbers(amount, tau), cdf, CDFS[cdf], "value", False)
        assert len(taken) <= 20, (scores, costs, amount, tau)


def test_scores_far_beyond_the_digits_of_tau(kernels: ModuleType) -> None:
    """t differs by less than one digit from the score of the only entry that is taken in part."""
    x = torch.tensor([[1e290, -3e289]], dtype=torch.float64)
    budget = torch.tensor([1.25], dtype=torch.float64)
    y, _, _ = kernels.soft_budget(
        x, torch.ones_like(x), budget, *numbers(1.0), "uniform", 0.0, "score", False
    )
    assert (far(y, torch.tensor([[1, 0.25]])) <= 1e-12).all()


# ------------------------------------------------------------------------------------ the hard selection


@pytest.mark.parametrize("n", [1, 7, 150])
@pytest.mark.parametrize("kind", ["real", "integers", "ties"])
def test_the_mask_is_the_references(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, n: int, kind: str
) -> None:
    """150 entries are three chunks where torch sorts them, as it does in float64. Whole numbers fit exactly,
    or do not by one unit."""
    monkeypatch.setattr(kernels.greedy, "WIDTH", 64)
    g = torch.Generator().manual_seed(n)
    x, cost = torch.randn(12, n, generator=g), torch.rand(12, n, generator=g)
    if kind != "real":
        cost = torch.randint(0, 9, (12, n), generator=g).float()
    if kind == "ties":
        x = x.round()
    x[8:, 0], x[10:, -1] = -INF, INF
    budget = torch.tensor([0.0, 0.02, 0.1, 0.5, 1.0, 3.0]).repeat(2).double() * cost.double().sum(-1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        given = (x.to(dtype), cost, budget)
        assert torch.equal(kernels.budget_mask(*given), reference_mask(*given))
    monkeypatch.setattr(kernels.greedy, "RANKED", 100)
    if n > 100:
        assert torch.equal(kernels.budget_mask(x, cost, budget), reference_mask(x, cost, budget))


def test_the_mask_when_all_is_spent_and_without_a_limit(kernels: ModuleType) -> None:
    cost = torch.tensor([0.1] * 8 + [0.0] * 2, dtype=torch.float64)
    x = -torch.arange(10, dtype=torch.float64).expand(9, -1)
    budget = torch.tensor([*(sum([0.1] * many) for many in range(1, 9)), INF], dtype=torch.float64)
    assert kernels.budget_mask(x, cost, budget).sum(-1).tolist() == [*range(3, 11), 10]
