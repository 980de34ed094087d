"""The compiled kernels of the soft budget against the reference kernels, and their other promises."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Generator

import fresh
from budget_rows import (
    CDFS,
    REFERENCE,
    check_gradients,
    check_rows,
    far,
    numbers,
    table,
)
from khot import _kernels as kernels
from khot._kernels.reference import soft_budget as reference

needs_extension = pytest.mark.skipif(
    not kernels.active()["cpu"].startswith("compiled"), reason="the compiled kernels are not in use"
)
pytestmark = needs_extension

INF = math.inf
every_cdf = pytest.mark.parametrize("cdf", CDFS)
every_form = pytest.mark.parametrize("by", ["score", "value"])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
every_engine = pytest.mark.parametrize("engine", [REFERENCE, torch.ops.khot], ids=["reference", "compiled"])
FORMS = ((1.0, False), (0.01, False), (1.0, True))  # τ, and whether the budget may be left unspent


@every_cdf
@every_form
@every_dtype
@pytest.mark.parametrize("n", [1, 60])
def test_rows_as_the_reference(cdf: str, by: str, dtype: torch.dtype, n: int) -> None:
    x, w, budget = table(n, dtype)
    for tau, at_most in FORMS:
        check_rows(torch.ops.khot, x, w, budget, tau, cdf, by, at_most)


@every_cdf
@every_form
@every_dtype
@pytest.mark.parametrize("n", [5, 60])
def test_gradients_as_the_reference(cdf: str, by: str, dtype: torch.dtype, n: int) -> None:
    x, w, budget = table(n, dtype, (0.0, 0.02, 0.3, 0.5, 1.0))
    for tau, at_most in FORMS:
        check_gradients(torch.ops.khot, x, w, budget, tau, cdf, by, at_most)


@every_engine
@every_form
@every_cdf
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scores_of_minus_infinity_get_no_gradient(engine: Any, cdf: str, by: str, dtype: torch.dtype) -> None:
    """Exactly 0, so that what is multiplied by it later is 0 or NaN by its own doing; whatever they cost."""
    for seed in range(5):
        g = Generator().manual_seed(seed)
        n = int(torch.randint(2, 60, (), generator=g))
        hidden = torch.rand(3, n, generator=g) < 0.4
        hidden[:, 0] = False
        x = torch.randn(3, n, generator=g).to(dtype).masked_fill(hidden, -INF)
        w = (
            torch.rand(3, n, generator=g)
            .to(dtype)
            .masked_fill(hidden & (torch.rand(n, generator=g) < 0.5), 0)
        )
        budget = 0.4 * w.double().masked_fill(hidden, 0).sum(-1)
        rest = (*numbers(0.3), cdf, CDFS[cdf], by, False)
        _, hi, lo = engine.soft_budget(x, w, budget, *rest)
        v, v_lo = torch.randn(3, n, generator=g).to(dtype), torch.randn(3, generator=g).double()
        dx, dw, dbudget, dtau = engine.soft_budget_backward(v, v_lo, x, w, hi, lo, *rest)
        assert not dx[hidden].any() and not dw[hidden].any()
        assert all(grad.isfinite().all() for grad in (dx, dw, dbudget, dtau))


@every_engine
def test_a_budget_that_leaves_the_last_digits_of_a_sum(engine: Any) -> None:
    """What it leaves of the costs depends on digits of their sum beyond those of float64."""
    for seed in range(40):
        g = Generator().manual_seed(seed)
        n, ulps = int(torch.randint(3, 60, (), generator=g)), int(torch.randint(40, 400, (), generator=g))
        w = torch.rand(1, n, generator=g, dtype=torch.float64)
        total = sum(map(Fraction, w[0].tolist()))
        budget = float(total) * (1 - ulps * 2.0**-53)
        given = torch.full_like(w, 0.25), w, torch.tensor([budget], dtype=torch.float64)
        _, hi, lo = engine.soft_budget(*given, *numbers(1.0), "logistic", 0.0, "score", False)
        t = 0.25 - math.log(budget / float(total - Fraction(budget)))  # all have the same share
        assert hi + lo == pytest.approx(t, abs=1e-12)


FEW_UNDECIDED = {
    "equal": lambda shape, g: torch.full(shape, 2.0),
    "whole": lambda shape, g: torch.randint(0, 4, shape, generator=g).float(),
    "any": lambda shape, g: torch.rand(shape, generator=g) + 0.05,
    "four decades": lambda shape, g: 10 ** (4 * torch.rand(shape, generator=g) - 2),
}


# half of all combinations, among them all of any two
@pytest.mark.parametrize(
    ("cdf", "costs", "share"),
    [
        (cdf, costs, share)
        for i, cdf in enumerate(CDFS)
        for j, costs in enumerate(FEW_UNDECIDED)
        for m, share in enumerate((0.03, 0.125, 0.5, 0.9))
        if (i + j + m) % 2 == 0
    ],
)
def test_many_short_rows_with_few_undecided_entries(cdf: str, costs: str, share: float) -> None:
    """Under a CDF of compact support often none: then a gap spends the budget, and t is its middle."""
    g, shape = Generator().manual_seed(0), (512, 48)
    x = torch.randn(shape, generator=g) * torch.logspace(-1, 3, 512)[:, None]
    w = FEW_UNDECIDED[costs](shape, g)
    budget = (share * w.sum(-1)).double()
    if costs in ("equal", "whole"):
        budget = budget.round() - budget.round() % (2 if costs == "equal" else 1)
    rest = (*numbers(1.0), cdf, CDFS[cdf], "score", False)
    y, hi, lo = torch.ops.khot.soft_budget(x, w, budget, *rest)
    want, want_hi, want_lo = reference.soft_budget(x.double(), w.double(), budget, *rest)
    assert (((w.double() * y.double()).sum(-1) - budget).abs() <= 1e-6 * budget).all()
    # where next to nothing is undecided, the budget determines y no better than this
    z = (x.double() - (want_hi + want_lo)[:, None]).clamp(-1e30, 1e30)
    f = reference.cdfs.resolve(cdf, CDFS[cdf]).pdf(z).nan_to_num(nan=0)
    unclear = 2e-15 * budget * f.amax(-1) / (w.double() * f).sum(-1).clamp(min=1e-300)
    sure = unclear < 1e-7
    assert (far(y, want).amax(-1) <= 5e-7)[sure].all()
    if cdf in ("uniform", "power"):
        gap = (((want == 0) | (want == 1)) | (w == 0)).all(-1) & (want_hi.abs() < 1e30)
        assert gap.sum() > (100 if costs in ("equal", "whole") else -1)
        # an end of the gap, where an entry is undecided by rounding only, spends the budget as well
        exact = gap & ((y == 0) | (y == 1) | (w == 0)).all(-1)
        assert exact.sum() >= 0.99 * gap.sum()
        off = ((hi + lo) - (want_hi + want_lo)).abs()
        assert (off <= 2.5e-7 * want_hi.abs().clamp(min=1))[exact].all()
        grad, zero = torch.randn(shape, generator=g), torch.zeros_like(hi)
        got = torch.ops.khot.soft_budget_backward(grad, zero, x, w, hi, lo, *rest)
        true = reference.soft_budget_backward(grad.double(), zero, x.double(), w.double(), hi, lo, *rest)
        for found, wanted in zip(got, true, strict=True):
            assert (far(found, wanted)[exact] <= 2e-5 * (1 + wanted.abs().amax())).all()


@every_cdf
@every_form
@pytest.mark.parametrize("n", [5_000, 70_000, 200_000])
def test_long_rows_spend_the_budget(cdf: str, by: str, n: int) -> None:
    """Also from a sample, and sampled costs that do not tell about the others."""
    g = Generator().manual_seed(n)
    x = torch.randn(n, generator=g)
    for w in (torch.rand(n, generator=g), torch.exp(3 * torch.randn(n, generator=g)), torch.arange(n) ** 2.0):
        w = w.float()
        for share in (0.01, 0.4, 0.9):
            budget = share * w.double().sum()
            y, hi, lo = torch.ops.khot.soft_budget(x, w, budget, *numbers(1.0), cdf, CDFS[cdf], by, False)
            assert abs((w.double() * y.double()).sum() / budget - 1) <= 1e-6
            z = (x.double() - (hi + lo) * (w.double() if by == "value" else 1)) / 1.0
            assert far(y, reference.cdfs.resolve(cdf, CDFS[cdf]).cdf(z)).amax() <= 1e-6


def test_unknown_names_raise() -> None:
    x, t = torch.randn(3, 8), torch.zeros(3, dtype=torch.float64)
    tau = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match="unknown cdf 'cauchy'"):
        torch.ops.khot.soft_budget(x, x.abs(), t, tau, "cauchy", 0.0, "score", False)
    with pytest.raises(RuntimeError, match="unknown by 'price': the CPU kernels know score, value"):
        torch.ops.khot.soft_budget(x, x.abs(), t, tau, "logistic", 0.0, "price", False)
    with pytest.raises(RuntimeError, match="unknown by 'price'"):
        torch.ops.khot.soft_budget_backward(x, t, x, x, t, t, tau, "logistic", 0.0, "price", False)


@pytest.mark.slow
def test_another_instruction_set() -> None:
    """This file again with AVX2, where the processor has more than that."""
    if os.environ.get("KHOT_KERNELS") or "AVX-512" not in kernels.active()["cpu"]:
        pytest.skip("the kernels in use are not those of AVX-512 by default")
    chosen = "rows_as_the_reference or gradients or long_rows"
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", __file__, "-k", chosen]
    environment = {**os.environ, "KHOT_KERNELS": "avx2"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]


NEW_THREADS = """
import torch, khot
g = torch.Generator().manual_seed(0)
x, w = torch.randn((1, 200_000), generator=g), torch.rand((1, 200_000), generator=g)
rest = (w.double().sum(-1) / 5, torch.tensor(1e-3, dtype=torch.float64), "logistic", 0.0, "score", False)
results = []
for count in (1, 2):
    torch.set_num_threads(count)
    results.append(torch.ops.khot.soft_budget(x, w, *rest)[0])
assert torch.equal(*results), (results[0] != results[1]).sum()
tiny = torch.full((1 << 20,), 1e-40)
assert (tiny * 1).count_nonzero() == tiny.numel()
"""


def test_threads_that_a_long_row_starts_keep_subnormal_numbers() -> None:
    """A new thread inherits the mode of the one that starts it, and keeps it for whatever torch does."""
    done = fresh.run(NEW_THREADS)
    assert done.returncode == 0, done.stderr
