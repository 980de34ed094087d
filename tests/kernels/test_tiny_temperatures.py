"""Temperatures far below the spacing of the scores: what is left of k or of a budget is shared within one
group of entries that are equal, or that differ by a few tau, as if the group were the whole row."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracles
from budget_rows import CDFS as NAMED
from budget_rows import numbers
from khot import _kernels, cdfs
from khot._kernels.reference import soft_budget as budgets
from khot._kernels.reference import soft_topk as topk

CDFS = {**{name: (name, shape) for name, shape in NAMED.items()}, "power 1.15": ("power", 1.15)}
LIMITS = {torch.float64: 1e-12, torch.float32: 5e-7}
# Where the groups lie; two of them are neighbours among the numbers of their dtype. Offsets of a few tau are
# exact at 0 only.
PLACES = {
    torch.float32: (-3e5, -1.0, 0.0, 0.5, 0.5 + 2.0**-24, 7.0),
    torch.float64: (-3e5, -1.0, 0.0, 0.5, 0.5 + 2.0**-53, 1e12),
}
REFERENCE = SimpleNamespace(
    soft_topk=topk.soft_topk,
    soft_topk_backward=topk.soft_topk_backward,
    soft_budget=budgets.soft_budget,
    soft_budget_backward=budgets.soft_budget_backward,
)
compiled = pytest.mark.skipif(
    not _kernels.active()["cpu"].startswith("compiled"), reason="the compiled kernels are not in use"
)
every_engine = pytest.mark.parametrize(
    "engine", [REFERENCE, pytest.param(torch.ops.khot, marks=compiled)], ids=["reference", "compiled"]
)
every_cdf = pytest.mark.parametrize("name", CDFS)
wide_dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=str)


class Row(NamedTuple):
    tau: float
    place: list[int]  # of each entry, an index of PLACES
    offset: list[int]  # in eighths of tau, used at 0
    log_cost: list[int]  # in base 2, so that a multiple of the cost is exact
    group: int  # the group that shares what is left
    part: float  # what is left, as a part of the group's cost; 0 and 1 are gaps


@st.composite
def rows(draw: st.DrawFn) -> Row:
    n = draw(st.integers(1, 12))
    place = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    offset = draw(st.lists(st.integers(-12, 12), min_size=n, max_size=n))
    log_cost = draw(st.lists(st.integers(-2, 2), min_size=n, max_size=n))
    part = draw(st.sampled_from((0.0, 1e-9, 0.225, 0.5, 0.9999, 1.0)))
    return Row(
        2.0 ** -draw(st.integers(100, 996)), place, offset, log_cost, draw(st.sampled_from(place)), part
    )


def check(engine: Any, row: Row, name: str, dtype: torch.dtype, by: str) -> None:
    """``by`` is "count" for the soft top-k, and the form of the budget otherwise."""
    cdf, shape = CDFS[name]
    near = [
        v / 8 if dtype == torch.float64 and p == 2 else 0.0
        for v, p in zip(row.offset, row.place, strict=True)
    ]
    w = [1.0 if by == "count" else 2.0**v for v in row.log_cost]
    a = [v if by == "value" else 1.0 for v in w]
    x = [PLACES[dtype][p] * s + row.tau * v * s for p, v, s in zip(row.place, near, a, strict=True)]
    inside = [i for i, p in enumerate(row.place) if p == row.group]
    paid = sum(Fraction(v) for v, p in zip(w, row.place, strict=True) if p > row.group)
    total = sum(Fraction(w[i]) for i in inside)
    goal = float(paid + Fraction(row.part) * total)
    left = Fraction(goal) - paid  # as it is after the goal was rounded
    want = [float(p > row.group) for p in row.place]
    if 0 < left < total:
        alone = [near[i] * a[i] for i in inside], [w[i] for i in inside], float(left)
        shares, _ = oracles.soft_budget(*alone, 1.0, cdf, shape or None, "score" if by == "count" else by)
        for i, share in zip(inside, shares, strict=True):
            want[i] = share
    elif left:
        want = [max(v, float(p == row.group)) for v, p in zip(want, row.place, strict=True)]

    scores, costs = (torch.tensor([v], dtype=dtype) for v in (x, w))
    k, tau = numbers(goal, row.tau)
    zero, v = torch.zeros(1, dtype=torch.float64), torch.ones_like(scores).cumsum(-1)
    grads: tuple[Tensor, ...]
    if by == "count":
        y, hi, lo = engine.soft_topk(scores, k, tau, cdf, shape, "y")
        grads = engine.soft_topk_backward(v, zero, scores, hi, lo, tau, cdf, shape, "y")
    else:
        y, hi, lo = engine.soft_budget(scores, costs, k, tau, cdf, shape, by, False)
        grads = engine.soft_budget_backward(v, zero, scores, costs, hi, lo, tau, cdf, shape, by, False)
    error = (y[0].double() - torch.tensor(want, dtype=torch.float64)).abs().max()
    assert error <= LIMITS[dtype], (y.tolist(), want)
    # a slope of 1/tau may overflow, but not to NaN
    assert not any(grad.isnan().any() for grad in grads), grads


@every_engine
@every_cdf
@wide_dtypes
@pytest.mark.parametrize("by", ["count", "score", "value"])
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(row=rows())
def test_one_group_shares_what_is_left(engine: Any, name: str, dtype: torch.dtype, by: str, row: Row) -> None:
    check(engine, row, name, dtype, by)


@every_engine
@every_cdf
@wide_dtypes
@pytest.mark.parametrize("scale", [1.0, 1e10])
def test_a_budget_pays_for_the_best_entries(engine: Any, name: str, dtype: torch.dtype, scale: float) -> None:
    """In whole, or the last of them in part. Squares of z have no digits left to compare, and overflow."""
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(50, 5, generator=g), torch.randint(1, 5, (50, 5), generator=g)
    order = x.argsort(-1, descending=True)
    costs = w.gather(-1, order).double()
    before = costs.cumsum(-1) - costs
    last = torch.randint(1, 5, (50, 1), generator=g)
    v = torch.randn(50, 5, generator=g).to(dtype)
    zero = torch.zeros(50, dtype=torch.float64)
    turn = list(CDFS).index(name) + (dtype == torch.float64)
    for i, tau in enumerate((1e-17, 1e-20, 1e-41, 1e-106, 1e-153, 1e-200, 1e-300)):
        for part in ((0.0, 0.3)[(turn + i) % 2],):
            budget = (before + part * costs).gather(-1, last)
            paid = ((budget - before) / costs).clamp(0, 1)
            want = torch.zeros_like(paid).scatter(-1, order, paid)
            given = (scale * x).to(dtype), w.to(dtype)
            rest = (*numbers(tau), *CDFS[name], "score", False)
            y, hi, lo = engine.soft_budget(*given, budget.squeeze(-1), *rest)
            assert (y.double() - want).abs().max() <= LIMITS[dtype], (tau, y, want)
            grads = engine.soft_budget_backward(v, zero, *given, hi, lo, *rest)
            assert not any(grad.isnan().any() for grad in grads), (tau, grads)


@every_engine
@every_cdf
@pytest.mark.parametrize("tau", [1e-180, 1e-200, 1e-300])
def test_a_budget_pays_for_the_best_of_many_entries(engine: Any, name: str, tau: float) -> None:
    """Their scores lie at distances of all sizes, so that steps from one to the next do not get far. Where
    even logarithms of F overflow, a trial tells only on which side of it the threshold is."""
    for seed in (list(CDFS).index(name) % 3,):
        g = torch.Generator().manual_seed(seed)
        n, scale = 1500, 10.0 ** float(torch.randint(0, 120, (), generator=g))
        size = 10 ** (-20 * torch.rand(4, n, generator=g, dtype=torch.float64))
        x = scale * size * torch.randn(4, n, generator=g, dtype=torch.float64)
        w = torch.randint(1, 5, (4, n), generator=g).double()
        order = x.argsort(-1, descending=True)
        costs = w.gather(-1, order)
        before = costs.cumsum(-1) - costs
        last = torch.randint(1, n, (4, 1), generator=g)
        for part in (0.0, 0.3):
            budget = (before + part * costs).gather(-1, last)
            paid = ((budget - before) / costs).clamp(0, 1)
            want = torch.zeros_like(paid).scatter(-1, order, paid)
            y, _, _ = engine.soft_budget(x, w, budget.squeeze(-1), *numbers(tau), *CDFS[name], "score", False)
            assert (y - want).abs().max() <= 1e-12, (seed, part)


@every_cdf
def test_equal_scores_and_ties_in_few_passes(name: str) -> None:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    x[1], x[2] = x[1].round(decimals=1), 0.7
    cases = [
        (k, tau) for k in (0.5, 4.5, 10.0, 19.3) for tau in (1e-30, 1e-35, 1e-42, 1e-100, 1e-200, 1e-300)
    ]
    for k, tau in cases:
        goal, scale = (torch.full((3,), v, dtype=torch.float64) for v in (k, tau))
        hi, lo, passes = topk.solve(x, goal, scale, cdfs.resolve(*CDFS[name]))
        assert passes.max() <= 10, (k, tau)
        assert math.isfinite((hi + lo).sum().item())
        y, _, _ = topk.soft_topk(x, *numbers(k, tau), *CDFS[name], "y")
        for row, shares in zip(x, y, strict=True):
            above = (row.unsqueeze(-1) < row).sum(-1)  # with m equal entries: each has (k − above)/m
            equal = (row.unsqueeze(-1) == row).sum(-1)
            want = ((k - above.double()) / equal).clamp(0, 1)
            torch.testing.assert_close(shares, want, rtol=0, atol=1e-12)
