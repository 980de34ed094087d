"""Assignments within bounds, with a total, and of compact support: against programmes and equations."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import khot
import processes
import shards
from khot import cdfs
from khot._kernels.reference import bounded_assign as solver

COMPACT: tuple[Any, ...] = ("uniform", cdfs.Power(1.5), cdfs.Power(3.0))
CDFS: tuple[Any, ...] = ("logistic", "laplace", "normal", *COMPACT)
CASES: dict[str, dict[str, Any]] = {
    "rows": {"k": (1, 2.5), "capacity": (8, 8)},
    "columns": {"k": 2, "capacity": (7, 9)},
    "both": {"k": (1, 2.5), "capacity": (5, 14)},
    "both-total": {"k": (1, 2.5), "capacity": (5, 14), "total": 44.0},
    "caps-total": {"k": (0, 3), "capacity": (0, 11.5), "total": 40.0},
    "row-caps-total": {"k": (0, 3), "total": 36.5},
    "no-total": {"k": (1, 2.5)},
}


def scores(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g, dtype=torch.float64) + torch.linspace(-1, 1, shape[-1]).double()
    return x.to(dtype)


def pair(value: Any, most: float) -> tuple[Any, Any]:
    """The least and the most that an argument means."""
    if value is None:
        return 0, most
    least, high = value if isinstance(value, tuple) else (value, value)
    return least, min(high, most) if isinstance(high, (int, float)) else high


def sums_of(x: Tensor, args: dict[str, Any]) -> tuple[Tensor, ...]:
    m, width = x.shape
    bounds = (*pair(args["k"], width), *pair(args.get("capacity"), m))
    sizes = (m, m, width, width)
    return tuple(
        torch.as_tensor(b, dtype=torch.float64).expand(n) for b, n in zip(bounds, sizes, strict=True)
    )


def assert_optimal(
    x: Tensor, args: dict[str, Any], y: Tensor, bias: Tensor, tau: float, cdf: Any, tolerance: float = 1e-9
) -> None:
    """The conditions of optimality, from y and the bias alone: sums lie within bounds, and a row or column
    is moved in the direction that its bound needs."""
    least_k, most_k, least, most = sums_of(x, args)
    rows, columns = y.sum(-1), y.sum(-2)
    slack_k, slack = tolerance * (1 + least_k), tolerance * (1 + columns)
    assert bool(((rows >= least_k - slack_k) & (rows <= most_k + slack_k)).all())
    assert bool(((columns >= least - slack) & (columns <= most + slack)).all())
    if args.get("total") is not None:
        assert abs(y.sum().item() - args["total"]) <= tolerance * args["total"]
    F = cdfs.resolve(cdf)
    free = F.cdf((x + bias) / tau)
    for i, row in enumerate(y):
        between = bool(rows[i] > least_k[i] + slack_k[i]) and bool(rows[i] < most_k[i] - slack_k[i])
        if between:
            torch.testing.assert_close(row, free[i], rtol=0, atol=tolerance)
            continue
        alone = khot.soft_topk(x[i] + bias, rows[i], tau=tau, cdf=cdf)
        torch.testing.assert_close(row, alone, rtol=0, atol=10 * tolerance)
        if bool(most_k[i] > least_k[i]):  # it is at the bound that it would leave
            beyond = free[i].sum() - rows[i]
            at_most = bool(rows[i] > (least_k[i] + most_k[i]) / 2)
            assert beyond >= -slack_k[i] if at_most else beyond <= slack_k[i]
    if args.get("total") is None and bool((most_k > least_k).any()):  # then prices are not shifted
        full, empty = columns > most - slack, columns < least + slack
        assert bool((bias[~full & ~empty] == 0).all())
        assert bool((bias[full & ~empty] <= 0).all()) and bool((bias[empty & ~full] >= 0).all())


# ------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("cdf", CDFS, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tau", [1.0, 0.1, 0.01])
def test_conditions_of_optimality(tau: float, case: str, cdf: Any) -> None:
    x, args = scores(24, 6, seed=1), CASES[case]
    y, bias = khot.soft_assign(x, **args, tau=tau, cdf=cdf, return_bias=True)
    assert bool(((y >= 0) & (y <= 1)).all())
    assert_optimal(x, args, y, bias, tau, cdf)


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
def test_pairs_that_say_the_same_as_numbers(cdf: str) -> None:
    x = scores(2, 30, 5)
    capacity = torch.tensor([8.0, 10, 12, 14, 16]).double()
    assign = functools.partial(khot.soft_assign, x, tau=0.2, cdf=cdf, return_bias=True)
    for numbers, pairs in (
        ({"k": 2, "capacity": capacity}, {"k": (2, 2), "capacity": (capacity, capacity)}),
        ({"k": 2}, {"k": (2, 2), "capacity": 12}),
        ({"k": 2}, {"k": 2, "total": 60}),
        ({"k": 2, "capacity": 14, "at_most": True}, {"k": 2, "capacity": (0, 14)}),
        ({"k": 2, "capacity": 14, "at_most": True}, {"k": (2, 2), "capacity": 14, "at_most": True}),
        ({"k": 2, "capacity": 14, "at_most": True}, {"k": 2, "capacity": 14, "at_most": True, "total": 60}),
    ):
        (want, price), (y, bias) = assign(**numbers), assign(**pairs)
        torch.testing.assert_close(y, want, rtol=0, atol=1e-10)
        if "total" not in pairs or "at_most" not in pairs:  # where all rows are at a bound, μ is not unique
            torch.testing.assert_close(bias - bias.mean(), price - price.mean(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("cdf", CDFS, ids=str)
def test_of_rows_and_of_totals_alone(cdf: str) -> None:
    """Where the columns have no bounds, rows are soft top-ks or clipped, and a total is one soft top-k."""
    x, tau = scores(9, 5, seed=2), 0.7
    got = khot.soft_assign(x, (0, math.inf), total=20, tau=tau, cdf=cdf)
    want = khot.soft_topk(x.flatten(), 20, tau=tau, cdf=cdf).view(9, 5)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    free = cdfs.resolve(cdf).cdf(x / tau)
    k = free.sum(-1).clamp(1.5, 2.5)
    want = khot.soft_topk(x, k, tau=tau, cdf=cdf)
    torch.testing.assert_close(khot.soft_assign(x, (1.5, 2.5), tau=tau, cdf=cdf), want, rtol=0, atol=1e-12)
    got, bias = khot.soft_assign(x, (0, 2), total=12, tau=tau, cdf=cdf, return_bias=True)
    full = got.sum(-1) > 2 - 1e-9
    assert 0 < int(full.sum()) < 9 and bool((bias == bias[0]).all())
    torch.testing.assert_close(got[full], khot.soft_topk(x, 2, tau=tau, cdf=cdf)[full], rtol=0, atol=1e-12)
    rest = khot.soft_topk(x[~full].flatten(), 12 - 2 * int(full.sum()), tau=tau, cdf=cdf)
    torch.testing.assert_close(got[~full].flatten(), rest, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_infinite_and_masked_scores(cdf: str) -> None:
    x = scores(10, 4, seed=4)
    x[0, 0], x[3] = -math.inf, -math.inf
    x[1, 2], x[2, :3] = math.inf, math.inf
    args = {"k": (1, 3), "capacity": (3, 7), "total": 20.0}
    y = khot.soft_assign(x, **args, tau=0.3, cdf=cdf)
    assert y[0, 0] == 0 and bool((y[3] == 0).all()) and y[1, 2] == 1 and bool((y[2, :3] == 1).all())
    assert y[2, 3] == 0  # the row is full
    rows, columns = y.sum(-1), y.sum(-2)
    others = torch.arange(10) != 3
    assert bool((rows[others] >= 1 - 1e-12).all()) and bool((rows <= 3 + 1e-12).all())
    assert bool(((columns >= 3 - 1e-12) & (columns <= 7 + 1e-12)).all()) and abs(y.sum().item() - 20) < 1e-11
    mask = x != -math.inf
    masked = khot.soft_assign(x.masked_fill(~mask, math.nan), **args, tau=0.3, cdf=cdf, mask=mask)
    assert torch.equal(masked, y)


def test_what_bounds_decide_alone() -> None:
    x = scores(5, 3)
    assert torch.equal(khot.soft_assign(x, (0, 3), total=0), torch.zeros_like(x))
    assert torch.equal(khot.soft_assign(x, (0, 3), total=15), torch.ones_like(x))
    least = torch.tensor([0.0, 5, 1]).double()
    y, bias = khot.soft_assign(x, (1, 2), (least, torch.tensor([0.0, 5, 2]).double()), return_bias=True)
    assert bool((y[:, 0] == 0).all()) and bool((y[:, 1] == 1).all())
    assert bias[0] == -math.inf and bias[1] == math.inf and 1 - 1e-12 <= y[:, 2].sum() <= 2 + 1e-12
    # a total that leaves nothing but the least, or the most
    for total, k in ((5, 1), (10, 2)):
        y = khot.soft_assign(x, (1, 2), (1, 4), total=total, tau=0.5)
        torch.testing.assert_close(y.sum(-1), torch.full((5,), float(k)).double(), rtol=0, atol=1e-11)
    assert khot.soft_assign(x[:0], (0, 2), (0, 1), total=0).shape == (0, 3)
    assert khot.soft_assign(x[:, :0], (0, 2), (0, 1), total=0).shape == (5, 0)
    assert khot.soft_assign(x.expand(0, 5, 3), (0, 2), total=4).shape == (0, 5, 3)


def test_bounds_of_their_own_and_batches() -> None:
    x, tau = scores(2, 3, 8, 4), torch.tensor([[0.5], [2.0]]).double()
    least_k, most_k = torch.linspace(0.2, 1.2, 8).double(), torch.tensor([[1.5], [2.0], [2.5]]).double()
    most = torch.tensor([2.0, 3.0, 4.0, 5.0]).double()
    total = torch.tensor([9.0, 10.0, 11.0]).double()
    y = khot.soft_assign(x, (least_k, most_k), (1, most), total=total, tau=tau)
    for i in range(2):
        for j in range(3):
            alone = khot.soft_assign(x[i, j], (least_k, most_k[j]), (1, most), total=total[j], tau=tau[i, 0])
            torch.testing.assert_close(y[i, j], alone, rtol=0, atol=1e-12)
    mapped = torch.func.vmap(lambda x, k, q, M: khot.soft_assign(x, (least_k, k), (1, q), total=M, tau=0.5))(
        x[0], most_k, most.expand(3, 4), total
    )
    torch.testing.assert_close(mapped, y[0], rtol=0, atol=1e-13)


def test_the_bias_is_a_start_and_gives_the_rows() -> None:
    x, args = scores(30, 5), {"k": (1, 2), "capacity": (6, 9.5), "total": 40}
    y, bias = khot.soft_assign(x, **args, tau=0.05, return_bias=True)
    free = torch.sigmoid((x + bias) / 0.05)
    k = free.sum(-1).clamp(1, 2)
    torch.testing.assert_close(y, khot.soft_topk(x + bias, k, tau=0.05), rtol=0, atol=1e-9)
    for guess in (bias, bias + 3, -10 * bias):
        again = khot.soft_assign(x, **args, tau=0.05, bias=guess)
        torch.testing.assert_close(again, y, rtol=0, atol=1e-10)


def test_nan_stays_in_its_matrix() -> None:
    x = scores(2, 6, 4).requires_grad_()
    with torch.no_grad():
        x[0, 1, 2] = math.nan
    y, bias = khot.soft_assign(x, (1, 2), (2, 3), total=9, return_bias=True)
    assert bool(y[0].isnan().all()) and bool(bias[0].isnan().all()) and bool(y[1].isfinite().all())
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert bool(grad[0].isnan().all()) and bool(grad[1].isfinite().all())


def test_the_docs_of_an_own_cdf_hold_here() -> None:
    class Cauchy(cdfs.CDF):
        symmetric = True

        def cdf(self, z: Tensor) -> Tensor:
            return 0.5 + torch.atan(z) / torch.pi

        def pdf(self, z: Tensor) -> Tensor:
            return 1 / (torch.pi * (1 + z * z))

    x, args, F = scores(12, 4), {"k": (1, 2), "capacity": (3, 7), "total": 17.0}, Cauchy()
    y, bias = khot.soft_assign(x, **args, tau=0.3, cdf=F, return_bias=True)
    assert_optimal(x, args, y, bias, 0.3, F)


# ------------------------------------------------------------------------------------------ passes

#: Passes of the solver, of which each has the exact thresholds of all rows: the most that were seen, and a
#: third more.
PASSES = {"logistic": 60, "laplace": 60, "normal": 60, "uniform": 80, cdfs.Power(1.5): 80}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[solver.Problem]:
    seen: list[solver.Problem] = []
    solve = solver.Problem.solve

    def watched(self: solver.Problem, *args: Any) -> Any:
        seen.append(self)
        return solve(self, *args)

    monkeypatch.setattr(solver.Problem, "solve", watched)
    return seen


@pytest.mark.parametrize("cdf", PASSES, ids=str)
def test_passes_are_few(cdf: Any, passes: list[solver.Problem]) -> None:
    x, q = scores(200, 8, seed=4) + torch.linspace(0, 2, 8).double(), 50
    for args in (
        {"k": 2, "capacity": (0, 1.25 * q)},
        {"k": (1, 3), "capacity": (0.8 * q, 1.2 * q), "total": 8 * q},
        {"k": 2, "capacity": (0.9 * q, 1.1 * q)},
        {"k": (0, 4), "capacity": (0.5 * q, 1.5 * q), "total": 6 * q},
        {"k": (2, 2), "capacity": q},
    ):
        for tau in (1.0, 0.1, 0.01, 0.001):
            khot.soft_assign(x, **args, tau=tau, cdf=cdf)
    assert max(problem.passes for problem in passes) <= PASSES[cdf]


@pytest.mark.parametrize("cdf", CDFS, ids=str)
def test_columns_without_bounds_take_one_pass(cdf: Any, passes: list[solver.Problem]) -> None:
    for tau in (1.0, 0.01, 1e-4):
        khot.soft_assign(scores(200, 8), (1, 3), total=450, tau=tau, cdf=cdf)
    assert [problem.passes for problem in passes] == [1, 1, 1]


def test_few_sums_are_tried_for_the_common_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five at most, where bisection takes fifty."""
    tried: list[int] = []
    common, pooled = solver.Problem._common, solver.Problem._pooled
    monkeypatch.setattr(solver.Problem, "_common", lambda *given: tried.append(0) or common(*given))
    monkeypatch.setattr(solver.Problem, "_pooled", lambda *given: tried.append(1) or pooled(*given))
    for tau in (1.0, 0.01, 1e-4):
        khot.soft_assign(scores(20, 8), (1, 3), (2, 12), total=44, tau=tau)
    searches = "".join(map(str, tried)).split("0")[1:]
    assert len(searches) > 20 and max(map(len, searches)) <= 5


def test_a_guess_saves_passes(passes: list[solver.Problem]) -> None:
    x, args = scores(200, 8), {"k": (1, 3), "capacity": (45, 55), "total": 400, "tau": 0.01}
    _, bias = khot.soft_assign(x, **args, return_bias=True)
    khot.soft_assign(x + 1e-4 * scores(200, 8, seed=1), **args, bias=bias)
    assert passes[1].passes <= 6 < passes[0].passes


def test_what_has_no_solution_ends_soon(passes: list[solver.Problem]) -> None:
    mask = torch.ones(40, 6, dtype=torch.bool)
    mask[:30, :3] = False  # thirty rows have only three columns, which have room for 24 of them
    with pytest.raises(ValueError, match=r"^capacity must leave room for k"):
        khot.soft_assign(scores(40, 6), (1, 3), (0, 8), tau=0.01, mask=mask)
    assert passes[0].passes <= 2 * solver.STEPS


@pytest.mark.slow
@pytest.mark.parametrize("cdf", CDFS, ids=str)
def test_random_problems(cdf: Any) -> None:
    """Every one has a solution; it is found, whatever bounds, masks, scales and temperatures."""
    g = torch.Generator().manual_seed(0)

    def share(n: int) -> Tensor:  # of the way to a bound: often none
        return torch.where(torch.rand(n, generator=g) < 0.3, 0, torch.rand(n, generator=g)).double()

    for i in range(60):
        m, width = 4 + i % 23, 2 + i % 7
        x = scores(m, width, seed=i) * 10 ** (i % 3 - 1) + 100 * (i % 5 == 0)
        if i % 4 == 1:
            x[torch.rand(m, width, generator=g) < 0.15] = -math.inf
        inside = 0.02 + 0.96 * torch.rand(m, width, generator=g).double() ** (1 + i % 4)
        inside = inside * (x > -math.inf)
        k, capacity = inside.sum(-1), inside.sum(-2)
        wide = (k * (1 - share(m) / 2), k * (1 + share(m) / 2))
        loads = (capacity * (1 - share(width) / 2), capacity * (1 + share(width) / 2))
        args: dict[str, Any] = [
            {"k": wide, "capacity": capacity},
            {"k": k, "capacity": loads},
            {"k": wide, "capacity": loads},
            {"k": wide, "capacity": loads, "total": k.sum().item()},
            {"k": (0 * k, wide[1]), "total": k.sum().item()},
            {"k": k, "capacity": capacity},
        ][(i // 2) % 6]
        tau = (1.0, 0.4, 0.1, 0.01, 0.001)[(i // 7) % 5]
        y, bias = khot.soft_assign(x, **args, tau=tau, cdf=cdf, return_bias=True)
        rows = x.isfinite().any(-1)
        args = {**args, "k": tuple(b[rows] for b in pair(args["k"], width))}
        finite = bias.isfinite()
        if bool(finite.all()):
            assert_optimal(x[rows], args, y[rows], bias, tau, cdf, 1e-8)


# ------------------------------------------------------------------------------------- derivatives


def number(*values: float) -> Tensor:
    value = torch.tensor(values if len(values) > 1 else values[0]).double()
    return value.requires_grad_()


BOUNDS = {
    "between": ((0.3, 2.4), (0.05, 1.83), 4.93),
    "total": ((1.1, 1.9), (1.0, 2.63), 5.77),
    "no-total": ((1.1, 1.3), (1.2, 1.93), None),
}


@pytest.mark.parametrize(
    "case, cdf",
    # of full and of compact support
    [("between", "logistic"), ("total", "uniform"), ("no-total", "logistic"), ("between", cdfs.Power(1.5))],
    ids=str,
)
def test_derivatives_to_second_order(case: str, cdf: Any) -> None:
    k, capacity, total = BOUNDS[case]
    x, tau = scores(4, 3, seed=6).requires_grad_(), number(0.6)
    rest = [number(v) for v in (*k, *capacity)] + ([] if total is None else [number(total)])

    def call(x: Tensor, tau: Tensor, *bounds: Tensor) -> Any:
        pairs = {"k": bounds[:2], "capacity": bounds[2:4]}
        whole = bounds[4] if len(bounds) > 4 else None
        return khot.soft_assign(x, **pairs, total=whole, tau=tau, cdf=cdf, return_bias=True)[0]

    # along random directions: each entry of a Jacobian would solve anew
    assert torch.autograd.gradcheck(call, (x, tau, *rest), check_forward_ad=True, fast_mode=True)
    if isinstance(cdf, str):
        assert torch.autograd.gradgradcheck(call, (x, tau, *rest), fast_mode=True)


def test_gradients_against_differences() -> None:
    """Of each bound of its own, with masked, pinned and decided entries."""
    x = scores(8, 4, seed=7)
    x[0, 1], x[1, 2], x[2] = -math.inf, math.inf, -math.inf
    weights = scores(8, 4, seed=1)
    inputs = {
        "least_k": torch.full((8,), 1.2).double(),
        "most_k": torch.linspace(1.4, 2.2, 8).double(),
        "least": torch.tensor([2.0, 2.2, 2.5, 1.0]).double(),
        "most": torch.tensor([3.0, 3.5, 3.25, 3.0]).double(),
        "total": torch.tensor(10.9).double(),
    }
    for cdf in ("logistic", "uniform"):

        def value(cdf: str = cdf, **v: Tensor) -> Tensor:
            bounds = (v["least_k"], v["most_k"]), (v["least"], v["most"])
            return (weights * khot.soft_assign(x, *bounds, total=v["total"], tau=0.7, cdf=cdf)).sum()

        leaves = {name: v.clone().requires_grad_() for name, v in inputs.items()}
        grads = dict(zip(leaves, torch.autograd.grad(value(**leaves), list(leaves.values())), strict=True))
        assert all(bool((grad != 0).any()) for grad in grads.values())
        for name, grad in grads.items():
            for place in np.ndindex(tuple(grad.shape)):
                step = torch.zeros_like(inputs[name])
                step[place] = 1e-6
                up, down = (value(**{**inputs, name: inputs[name] + s}) for s in (step, -step))
                assert abs((up - down).item() / 2e-6 - grad[place].item()) < 1e-7


def test_what_is_not_at_a_bound_has_no_gradient() -> None:
    x, most = scores(6, 4), number(*[2.0] * 6)
    y = khot.soft_assign(x, (0, most), total=9, tau=0.5)
    (grad,) = torch.autograd.grad((y * scores(6, 4, seed=1)).sum(), most)
    full = y.sum(-1) > 2 - 1e-12
    assert bool((grad[~full] == 0).all()) and bool((grad[full] != 0).all()) and bool(full.any())


def test_compiles_as_one_graph() -> None:
    x = scores(6, 4).requires_grad_()

    def call(x: Tensor) -> Tensor:
        return khot.soft_assign(x, (1, 2), (1, 4), total=9, tau=0.5).square().sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want, got = call(x), compiled(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, x)[0], torch.autograd.grad(want, x)[0])


# ---------------------------------------------------------------------------------------- bad input

X = scores(6, 4)
FIRST = torch.tensor([True, False, False, False])
BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("three values", "k must be a number, a tensor or a pair", {"k": (1, 2, 3)}),
    ("least above most", r"k must be a pair .* but got \(3, 1\)", {"k": (3, 1)}),
    ("negative", r"k must lie in \[0, inf\]", {"k": (-1, 2)}),
    ("NaN", r"k must lie in \[0, inf\]", {"k": (1, math.nan)}),
    ("NaN in a tensor", "capacity must lie in", {"capacity": (torch.full((4,), math.nan), 3)}),
    ("NaN as a total", "total must lie in", {"total": math.nan}),
    ("more than the row", "k must lie in .* but got 5 for a row with 4", {"k": (5, 6)}),
    ("more than the mask", "k must lie in .* but got 2 for a row with 1", {"k": (2, 3), "mask": FIRST}),
    (
        "more than the column",
        "capacity must lie in .* but got 1 for a column with 0",
        {"k": (0, 1), "capacity": (1, 9), "mask": FIRST},
    ),
    ("columns too small", "capacity must allow a sum of at least 12, which k asks for", {"capacity": (0, 2)}),
    ("rows too small", "k must allow a sum of at least 20, which capacity asks for", {"capacity": (5, 6)}),
    ("total too large", r"total must lie in \[12, 18\]", {"total": 18.1}),
    ("total too small", r"total must lie in \[12, 18\]", {"total": 11.9}),
    ("total beyond columns", r"total must lie in \[12, 14\]", {"total": 15, "capacity": (1, 3.5)}),
    ("total of each sum", r"total must lie in \[12, 12\]", {"k": 2, "total": 13}),
    ("at_most of a pair", "at_most must be False", {"capacity": (1, 4), "at_most": True}),
    ("+inf", "k must lie in", {"input": X.masked_fill(X > 0.4, math.inf), "k": (0, 1)}),
    ("total of another shape", "total must broadcast", {"total": torch.ones(6)}),
    ("tau", "tau must be finite and > 0", {"tau": torch.tensor(-1.0)}),
]


@pytest.mark.parametrize(("why", "message", "changed"), BAD, ids=[b[0] for b in BAD])
def test_bad_input(why: str, message: str, changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        khot.soft_assign(**{"input": X, "k": (2, 3), **changed})


def test_a_list_is_told_of_pairs() -> None:
    for given in ({"k": [1, 2]}, {"k": 2, "capacity": [1, 2]}):
        with pytest.raises(TypeError, match=r"a tuple \(least, most\), but got \[1, 2\]$"):
            khot.soft_assign(X, **given)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize(
    ("cuts", "total", "cdf"),
    [
        ([0, 4, 9], True, "uniform"),
        ([0, 4, 9], False, "logistic"),
        ([0, 0, 9], True, "logistic"),
        ([0, 0, 9], False, "uniform"),
    ],
)
def test_rows_over_processes(cuts: list[int], total: bool, cdf: str) -> None:
    x = scores(2, 9, 4, seed=9)
    x[0, 2], x[0, 5, 1], x[0, 6, 3] = -math.inf, math.inf, -math.inf
    least_k, most_k = torch.linspace(0.5, 1.0, 18).double().view(2, 9), torch.full((2, 9), 1.6).double()
    least, most = torch.tensor([[2.0, 2, 3, 3]] * 2).double(), torch.tensor([[3.0, 2.5, 4, 3.5]] * 2).double()
    args = [
        x,
        least_k,
        most_k,
        least,
        most,
        torch.tensor([0.4, 1.0]).double(),
        # with 11 all columns would be at a bound, and more than one gradient would be right
        torch.tensor([11.2, 12.1]).double(),
    ]
    weights = scores(2, 9, 4, seed=10)
    args = args if total else args[:-1]
    given = ("soft_assign within bounds", {"cdf": cdf}, args, weights, cuts)
    shards.assert_like_whole_rows(2, *given, second=False)


NARROW = torch.tensor([[True, False, False]] * 3 + [[True] * 3])  # three rows have one column in common


@pytest.mark.parametrize(
    ("why", "changed"),
    [
        ("all processes of group must pass the same arguments", [{"total": 6.0}, {"total": 7.0}]),
        ("capacity must allow a sum of at least 8, which k asks for", [{"capacity": (0, 2)}] * 2),
        ("total must lie in [8, 16]", [{"total": 17}] * 2),
        ("k must lie in", [{"k": (1, 2), "mask": torch.zeros(3, dtype=torch.bool)}, {"k": (4, 5)}]),
        ("capacity must leave room for k", [{"capacity": (0, 2.9), "mask": NARROW}, {"capacity": (0, 2.9)}]),
        (
            "capacity must leave room for k",
            [{"capacity": (0, 2.9), "mask": NARROW}, {"capacity": (0, 2.9), "input": scores(0, 3)}],
        ),
    ],
)
def test_bad_input_over_processes(why: str, changed: list[dict[str, Any]]) -> None:
    """Each process has an error: none waits for another."""
    calls = [((), {"input": scores(4, 3), "k": (1, 2), "tau": 0.1, **one}) for one in changed]
    for message in processes.run(2, shards.failure, "soft_assign", calls):
        assert message.startswith("ValueError") and why in message
