"""Budgets that equal the cost of the best entries, so that the threshold lies in a gap: every engine against
50 digits."""

from __future__ import annotations

import importlib.util
import itertools
import os
from typing import Any

import pytest
import torch

from budget_rows import (
    CDFS,
    GAP_EXAMPLES,
    GAP_TAUS,
    REFERENCE,
    check_gap_gradients,
    check_gap_shares,
    check_slack,
    check_spend,
    check_sums,
    gaps,
    numbers,
    table,
)
from khot import _kernels
from khot._kernels.reference import soft_budget as reference

compiled = pytest.mark.skipif(
    not _kernels.active()["cpu"].startswith("compiled"), reason="the compiled kernels are not in use"
)
# Triton reads this variable at import, so a test cannot set it
interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs with Triton and TRITON_INTERPRET=1",
)
# the interpreter computes with NumPy, which warns of infinities; they are intended
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ENGINES = [
    "reference",
    pytest.param("compiled", marks=[compiled]),
    pytest.param("triton", marks=[interpreted]),
]
every_cdf = pytest.mark.parametrize("cdf", CDFS)
every_form = pytest.mark.parametrize("by", ["score", "value"])
#: All of the compiled engine, and half of the slow ones: each pair of two values is among them.
by_turns = pytest.mark.parametrize(
    ("engine", "cdf", "by", "dtype"),
    [
        pytest.param(*engine.values, *case, marks=engine.marks)
        for engine in (pytest.param("reference"), *ENGINES[1:])
        for case in itertools.product(CDFS, ["score", "value"], [torch.float32, torch.float64])
        if engine.values == ("compiled",)
        or (list(CDFS).index(case[0]) + (case[1] == "value") + (case[2] == torch.float64)) % 2
    ],
    ids=str,
    indirect=["engine"],
)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    """Where soft_budget, soft_budget_backward and budget_mask are."""
    if request.param == "reference":
        return REFERENCE
    return torch.ops.khot if request.param == "compiled" else request.getfixturevalue("kernels")


def is_interpreted(engine: Any) -> bool:
    """Whether the engine is slow, so that it gets a few short rows only."""
    return engine is not REFERENCE and engine is not torch.ops.khot


def part(engine: Any) -> slice:
    return slice(None, None, 11 if is_interpreted(engine) else 1)


@by_turns
def test_the_budget_is_spent(engine: Any, cdf: str, by: str, dtype: torch.dtype) -> None:
    spend(engine, (2, 7) if is_interpreted(engine) else (2, 7, 300), cdf, by, dtype)


# interpreted rows of half precision are widened before they are solved: test_conformance.py
@pytest.mark.parametrize("engine", ENGINES[:2], indirect=True)
@every_cdf
@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_budget_is_spent_in_half_precision(engine: Any, cdf: str, by: str, dtype: torch.dtype) -> None:
    spend(engine, (7,), cdf, by, dtype)


def spend(engine: Any, sizes: tuple[int, ...], cdf: str, by: str, dtype: torch.dtype) -> None:
    for n in sizes:
        x, w, budget = (v[part(engine)] for v in gaps(n, dtype, by, 24 if n < 300 else 6))
        # all together: the interpreter takes as long for a tile of rows as for one of them
        tau = torch.tensor(GAP_TAUS, dtype=torch.float64).repeat_interleave(len(x))
        rows = [v.repeat(len(GAP_TAUS), *(1,) * (v.dim() - 1)) for v in (x, w, budget)]
        for at_most in (n == 2,) if is_interpreted(engine) else (False, True):
            check_spend(engine, *rows, tau, cdf, by, at_most)
        check_spend(engine, x[-1:], w[-1:], budget[-1:], 0.01, cdf, by)


@by_turns
@pytest.mark.parametrize("at_most", [False, True])
def test_the_examples(engine: Any, cdf: str, by: str, dtype: torch.dtype, at_most: bool) -> None:
    for scores, costs, amount, tau in GAP_EXAMPLES:
        x, w = torch.tensor([scores], dtype=dtype), torch.tensor([costs], dtype=dtype)
        budget = torch.tensor([amount], dtype=torch.float64)
        check_gap_shares(engine, x, w, budget, tau, cdf, by, at_most)


@by_turns
def test_every_share_is_right(engine: Any, cdf: str, by: str, dtype: torch.dtype) -> None:
    for n, tau in ((2, 1e-6), (2, 1.0), (5, 0.01), (7, 1e-6), (7, 100.0)):
        x, w, budget = (v[part(engine)] for v in gaps(n, dtype, by, 6))
        check_gap_shares(engine, x, w, budget, tau, cdf, by, at_most=tau == 1)


@by_turns
def test_gradients(engine: Any, cdf: str, by: str, dtype: torch.dtype) -> None:
    """Among them dL/dB in a gap: ½(v_u/w_u + v_d/w_d) by score, and (v_u + v_d)/(w_u + w_d) by value."""
    x, w, budget = (v[part(engine)] for v in gaps(5, dtype, by, 6, exact=True))
    for tau in (1e-6, 0.01, 1.0):
        check_gap_gradients(engine, x, w, budget, tau, cdf, by)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [3, 40, 700, 30_000])
def test_sums_of_costs_pay_for_them(engine: Any, dtype: torch.dtype, n: int) -> None:
    # rows of many entries are those that the compiled kernels share between threads
    n = n if engine is torch.ops.khot else min(n, 1_500 if is_interpreted(engine) else 5_000)
    for seed in range(4 if n < 1_000 and engine is torch.ops.khot else 1):
        check_sums(engine, dtype, n, seed)


@pytest.mark.parametrize("of_budget", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_what_a_budget_may_miss_by(
    engine: Any, monkeypatch: pytest.MonkeyPatch, of_budget: torch.dtype
) -> None:
    for dtype in (torch.float64, torch.float32) if of_budget == torch.float64 else (of_budget,):
        for n in (2, 50) if is_interpreted(engine) else (2, 20, 50):
            check_slack(engine, dtype, of_budget, n)
        if of_budget == torch.float64 and not is_interpreted(engine):
            check_slack(engine, dtype, of_budget, 10_000)
    if is_interpreted(engine):
        monkeypatch.setattr(engine.greedy, "RANKED", 30)
        check_slack(engine, torch.float32, of_budget, 50)


@every_cdf
@every_form
def test_the_reference_reads_a_row_at_most_ten_times(
    cdf: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []

    def counting(*args: Any) -> Any:
        found = root(*args)
        passes.append(found[2])
        return found

    root = reference.root
    monkeypatch.setattr(reference, "root", counting)
    for n in (2, 7, 100):
        x, w, budget = gaps(n, torch.float64, by, 12 if n < 100 else 4)
        ordinary = 0.3 * w.sum(-1)
        for tau in GAP_TAUS if n < 100 else (0.01, 1.0):
            for amount in (budget, ordinary):
                reference.soft_budget(x, w, amount, *numbers(tau), cdf, CDFS[cdf], by, False)
    # among these rows are some whose first guess is off by hundreds of nats, or by infinitely many
    x, w, budget = table(300, torch.float64, (1e-6, 0.3))
    reference.soft_budget(x, w, budget, *numbers(0.01), cdf, CDFS[cdf], by, False)
    assert torch.cat([found.flatten() for found in passes]).max() <= 10
