"""The baselines: each agrees with its publication, and keeps the rules of the house."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import khot
import oracles
from khot import baselines

INF = float("inf")
ROWS, N = 3, 7
TAU = torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64)

CALLS: dict[str, Callable[..., Tensor]] = {
    "sequential_softmax": baselines.sequential_softmax_topk,
    "masked_softmax": baselines.masked_softmax_topk,
    "neuralsort": baselines.neuralsort_topk,
    "softsort": baselines.softsort_topk,
    "rescaled_sigmoid": baselines.rescaled_sigmoid_topk,
    "root_finding": baselines.root_finding_topk,
    "sinkhorn": baselines.sinkhorn_topk,
    "pav": baselines.pav_topk,
    "pav-4/3": lambda *a, **o: baselines.pav_topk(*a, p=4 / 3, **o),
    "pav-magnitude": lambda *a, **o: baselines.pav_topk(*a, magnitude=True, **o),
    "pav-magnitude-4/3": lambda *a, **o: baselines.pav_topk(*a, p=4 / 3, magnitude=True, **o),
    "generic_pav": lambda *a, **o: baselines.generic_pav_topk(*a, p=1.5, **o),
    "generic_pav-magnitude": lambda *a, **o: baselines.generic_pav_topk(*a, p=1.2, magnitude=True, **o),
    "block_ascent-magnitude": lambda *a, **o: baselines.block_ascent_topk(
        *a, **{"p": 1.5, "magnitude": True, "iterations": 40, **o}
    ),
    "dykstra": baselines.dykstra_topk,
    "dykstra-magnitude": lambda *a, **o: baselines.dykstra_topk(*a, magnitude=True, **o),
}
every = pytest.mark.parametrize("name", CALLS)

# those that return places by entries
MATRICES: dict[str, Callable[..., Tensor]] = {
    "sorted_sinkhorn": lambda x, *a, tau=0.8, **o: baselines.sorted_sinkhorn_topk(x, 3, *a, epsilon=tau, **o),
    "neuralsort": baselines.neuralsort_permutation,
    "softsort": baselines.softsort_permutation,
}
every_matrix = pytest.mark.parametrize("name", MATRICES)
relaxed_sorts = pytest.mark.parametrize("name", ["neuralsort", "softsort"])


def call(name: str, x: Tensor, k: Any, tau: Any, **options: Any) -> Tensor:
    scale = "epsilon" if name == "sinkhorn" else "tau"
    return CALLS[name](x, k, **{scale: tau}, **options)


def matrix_call(name: str, x: Tensor, k: Any, tau: Any, dim: int = -1) -> Tensor:
    return MATRICES[name](x, dim, tau=tau)


# of both kinds: the places, if there are any, stand before the dim of the entries
every_call = pytest.mark.parametrize(
    "function",
    [partial(call, name) for name in CALLS] + [partial(matrix_call, name) for name in MATRICES],
    ids=[*CALLS, *(f"{name}, matrix" for name in MATRICES)],
)


def scores(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (ROWS, N)), generator=generator, dtype=torch.float64)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def value_and_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, scores(*y.shape, seed=9))]


# -------------------------------------------------------------------------- agreement with khot


class Agreement(NamedTuple):
    """A baseline of scores in some spread, beside khot's operator: functions of x, k and tau."""

    baseline: Callable[..., Tensor]
    khots: Callable[..., Tensor]
    n: int
    ks: Sequence[Any]
    tolerance: float = 1e-9
    of_k: bool = False


def regression(name: str, p: float, magnitude: bool, n: int, ks: Sequence[Any], **options: Any) -> Agreement:
    ours = partial(khot.soft_topk_magnitude if magnitude else khot.sparse_topk, p=p)
    options |= {"magnitude": magnitude} | ({} if name == "dykstra_topk" else {"p": p})
    exact = name in ("pav_topk", "dykstra_topk")
    return Agreement(partial(getattr(baselines, name), **options), ours, n, ks, 1e-9 if exact else 1e-6)


FINDERS = [("bisection", None)]
FINDERS += [(m, g) for m in ("newton", "halley") for g in ("zero", "quantile", "logit", "both", None)]
AGREEMENTS: dict[str, Agreement] = {}
for magnitude in (False, True):
    more = ", magnitude" * magnitude
    AGREEMENTS |= {
        f"pav, {n}, {p:.2f}{more}": regression("pav_topk", p, magnitude, n, (1, 3, 9))
        for n in (10, 300)
        for p in (2, 4 / 3)
    }
    AGREEMENTS[f"dykstra{more}"] = regression("dykstra_topk", 2, magnitude, 20, (1, 3, 19), iterations=2000)
    each = [torch.tensor([1, 3, 3, 5, 2, 4])]
    for p in (1.15, 4 / 3, 1.5, 2.0, 3.0):
        AGREEMENTS[f"generic, {p:.2f}{more}"] = regression("generic_pav_topk", p, magnitude, 6, each)
    for p in (1.15, 1.5, 3.0):
        ascent = regression("block_ascent_topk", p, magnitude, 6, each, iterations=80)
        AGREEMENTS[f"block ascent, {p:.2f}{more}"] = ascent
for method, guess in FINDERS:
    finder = partial(baselines.root_finding_topk, method=method, guess=guess)
    each = [torch.tensor([0.3, 2, 6.5, 11, 4, 1]).double()]
    AGREEMENTS[f"{method}, {guess}"] = Agreement(finder, khot.sigmoid_topk, 12, each, 1e-6, of_k=True)


@pytest.mark.parametrize("name", AGREEMENTS)
def test_agrees_with_khot(name: str) -> None:
    """In values and gradients, once converged."""
    case = AGREEMENTS[name]
    x = scores(6, case.n) * torch.tensor([0.1, 1, 5, 40 if case.of_k else 3, 2, 0.5]).double()[:, None]
    tau = torch.tensor([0.5, 1, 1.7, 3, 0.3, 0.8], dtype=torch.float64)
    for k in case.ks:
        inputs = (x, tau, k) if case.of_k else (x, tau)
        got, want = (
            value_and_gradients(lambda x, t, k=k, f=f: f(x, k, tau=t), *inputs)
            for f in (case.baseline, case.khots)
        )
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, case.tolerance)
        if case.of_k:
            assert (got[0].sum(-1) - k).abs().max() <= 1.1e-8


def test_block_ascent_has_the_iterates_of_dykstra_for_p_2() -> None:
    """Tibshirani 2017: they are the same in the Euclidean case, stopped early as well."""
    x = scores(5, 9)
    for iterations, magnitude in ((1, True), (2, False), (5, True)):
        options = {"iterations": iterations, "magnitude": magnitude, "tau": 1.3}
        ascent = baselines.block_ascent_topk(x, 4, **options)
        assert_close(ascent, baselines.dykstra_topk(x, 4, **options), 1e-12)


@pytest.mark.parametrize(
    ("name", "p"), [("pav", 2), ("pav", 4 / 3), ("generic_pav", 1.15), ("generic_pav", 3.0)]
)
@pytest.mark.parametrize("magnitude", [False, True])
def test_pav_agrees_with_pooling_pair_by_pair(name: str, magnitude: bool, p: float) -> None:
    oracle, method = (
        oracles.magnitude_pav if magnitude else oracles.mask_pav,
        getattr(baselines, f"{name}_topk"),
    )
    x = torch.cat((scores(3, 8), torch.tensor([[2.0, 1, 1, 1, 0, 0, -1, -1]])))  # ties, too
    for k in (0, 2, 8):
        want = torch.tensor(np.array([oracle(row, k, 0.8, p) for row in x]))
        assert_close(method(x, k, tau=0.8, p=p, magnitude=magnitude), want, 1e-9 if name == "pav" else 1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 0.005])  # in numbers, and in logs
def test_sinkhorn_agrees_with_khot_once_converged(epsilon: float) -> None:
    x = scores(4, 9)
    largest = torch.maximum(x**2, (x - 1) ** 2).max()
    k = torch.tensor([0.5, 3.5, 5.5, 8.5]).double()  # whole ones take far more iterations
    got = value_and_gradients(
        lambda x: baselines.sinkhorn_topk(
            x, k, epsilon=epsilon, iterations=20_000 if epsilon < 0.01 else 2000
        ),
        x,
    )
    want = value_and_gradients(lambda x: khot.ot_topk(x, k, epsilon=epsilon * largest), x)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-9)


def test_root_finding_takes_few_steps_and_stops_early_where_told() -> None:
    x = scores(5, 400)
    for method, guess, steps in (("halley", "both", 4), ("newton", "both", 7), ("bisection", None, 43)):
        options = {"method": method, "guess": guess}
        short = (baselines.root_finding_topk(x, 40, iterations=1, **options).sum(-1) - 40).abs().max()
        full = (baselines.root_finding_topk(x, 40, iterations=steps, **options).sum(-1) - 40).abs().max()
        assert full <= 1e-8 < short


def test_root_finding_refuses() -> None:
    x = scores()
    with pytest.raises(ValueError, match="method must be one of 'bisection', 'newton', 'halley', but got"):
        baselines.root_finding_topk(x, 1, method="secant")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"guess must be None or one of zero, .* but got 'mean'"):
        baselines.root_finding_topk(x, 1, guess="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="guess must be None for method 'bisection', but got 'zero'"):
        baselines.root_finding_topk(x, 1, method="bisection", guess="zero")


def test_rescaled_sigmoid_is_the_formula() -> None:
    for k in (1, 6):  # less and more than the sigmoids' sum
        x, s = scores(N), torch.sigmoid(scores(N) / 0.7)
        want = s * k / s.sum() if s.sum() >= k else 1 - (1 - s) * (N - k) / (N - s.sum())
        assert_close(baselines.rescaled_sigmoid_topk(x, k, tau=0.7), want, 1e-14)
    assert (s.sum() < 6) and (s.sum() > 1)


def test_sequential_softmax_is_drawing_without_replacement_by_mean_field() -> None:
    alpha, y = list(scores(N)), torch.zeros(N).double()
    for _ in range(3):
        weights = [torch.exp(a / 0.7) for a in alpha]
        p = [w / sum(weights) for w in weights]
        alpha = [a + torch.log(1 - q) for a, q in zip(alpha, p, strict=True)]
        y = y + torch.stack(p)
    assert_close(baselines.sequential_softmax_topk(scores(N), 3, tau=0.7), y, 1e-13)


def test_masked_softmax_is_the_formula() -> None:
    x = torch.cat((scores(3, N), torch.tensor([[1.0, 2, 2, 0, 0, -1, 2]])))  # ties, too: the first is masked
    for row, got in zip(x, baselines.masked_softmax_topk(x, 4, tau=0.7), strict=True):
        left, y = list(range(N)), [0.0] * N
        for _ in range(4):
            weights = {i: math.exp(row[i] / 0.7) for i in left}
            for i, w in weights.items():
                y[i] += w / sum(weights.values())
            left.remove(max(left, key=lambda i: weights[i]))
        assert_close(got, torch.tensor(y, dtype=torch.float64), 1e-13)
    assert_close(baselines.masked_softmax_topk(x, 1, tau=0.7), torch.softmax(x / 0.7, -1), 1e-14)


@pytest.mark.parametrize("epsilon", [0.1, 0.005])  # in numbers, and in logs
@pytest.mark.parametrize("k", [1, 3])
def test_sorted_sinkhorn_agrees_with_khot_once_converged(k: int, epsilon: float) -> None:
    x = scores(3, 8)
    largest = torch.maximum(x**2, (x - k) ** 2).max()
    held = torch.full_like(x[:1], 9)  # this row has the maximum, which has no gradient
    largest = (held**2).max()
    iterations = 2000 if epsilon > 0.01 else 6000
    got = value_and_gradients(
        lambda x: baselines.sorted_sinkhorn_topk(
            torch.cat((x, held)), k, epsilon=epsilon, iterations=iterations
        )[:-1],
        x,
    )
    want = value_and_gradients(lambda x: khot.sorted_soft_topk(x, k, epsilon=epsilon * largest), x)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-9)


def by_loops(name: str, row: Tensor, tau: float) -> Tensor:
    x, n, P = row.tolist(), len(row), []
    for i, s in enumerate(sorted(x, reverse=True), 1):
        if name == "neuralsort":
            logits = [((n + 1 - 2 * i) * v - sum(abs(v - w) for w in x)) / tau for v in x]
        else:
            logits = [-abs(s - v) / tau for v in x]
        total = sum(math.exp(v) for v in logits)
        P.append([math.exp(v) / total for v in logits])
    return torch.tensor(P, dtype=torch.float64)


@relaxed_sorts
@pytest.mark.parametrize("n", [1, 2, 6])
def test_relaxed_sorts_are_the_formulas(name: str, n: int) -> None:
    x = torch.stack((scores(n), scores(n, seed=1).round()))  # ties, too
    for row in x:
        assert_close(MATRICES[name](row, tau=0.7), by_loops(name, row, 0.7), 1e-12)
        for k in range(n + 1):
            assert_close(CALLS[name](row, k, tau=0.7), by_loops(name, row, 0.7)[:k].sum(0), 1e-12)


# ------------------------------------------------------------------------------ the house's rules


def with_largest_cost_held(x: Tensor) -> Tensor:
    """A last row that has SOFT's maximum, which has no gradient."""
    return torch.cat((x, torch.full_like(x[:1], 4)))


@every
def test_gradcheck(name: str) -> None:
    options = {"iterations": 300} if name in ("sinkhorn", "dykstra", "dykstra-magnitude") else {}

    def function(x: Tensor, tau: Tensor) -> Tensor:
        if name == "sinkhorn":
            return call(name, with_largest_cost_held(x), 3, 0.1, **options)
        return call(name, x, 3, tau, **options)

    x, tau = scores().requires_grad_(), TAU.clone().requires_grad_(name != "sinkhorn")
    torch.autograd.gradcheck(function, (x, tau), fast_mode=True)


@pytest.mark.parametrize("name", ["sinkhorn", "pav", "dykstra"])
def test_closed_form_gradients_are_not_differentiated_again(name: str) -> None:
    x = scores().requires_grad_()
    (grad,) = torch.autograd.grad(call(name, x, 3, 0.8).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_rescaled_sigmoid_is_differentiable_in_k() -> None:
    k = torch.tensor([1.0, 3.3, 6.0]).double().requires_grad_()
    torch.autograd.gradcheck(lambda k: baselines.rescaled_sigmoid_topk(scores(), k), (k,))


@every
def test_k_and_tau_may_differ_between_rows(name: str) -> None:
    x, k, tau = scores(), torch.tensor([1, 3, 6]), TAU
    for i in range(ROWS):
        row = x[i : i + 1].expand(ROWS, N)  # the same batch maximum for SOFT
        together, alone = call(name, row, k, tau)[i], call(name, row, int(k[i]), TAU[i].item())[i]
        assert_close(together, alone, 1e-12)


@every
def test_sums_to_k_and_its_ends(name: str) -> None:
    if "magnitude" in name:
        assert torch.equal(call(name, scores(), 0, 0.8), torch.zeros(ROWS, N).double())
        return
    for k in range(N + 1):
        if (name, k) in (("sequential_softmax", 0), ("masked_softmax", 0)):
            continue  # no softmax, and nothing that depends on x
        x = scores().requires_grad_()
        y = call(name, x, k, 0.8)
        # the published iteration of root finding stops at 1e-8
        rounding = 1.1e-8 if name == "root_finding" else 1e-12
        assert_close(y.sum(-1), torch.full((ROWS,), k).double(), rounding)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        # SOFT's K is 0 where all or nothing is selected
        assert grad.isfinite().all() != (name == "sinkhorn" and k in (0, N))


@every_call
def test_any_dim_and_dtype(function: Callable[..., Tensor]) -> None:
    x = scores(4, N, 2)
    y, moved = function(x, 3, 0.8, dim=1), x.movedim(1, -1).contiguous()
    want = function(moved, 3, 0.8)
    want = want.movedim(-1, 1) if want.ndim == 3 else want.movedim((-2, -1), (1, 2))
    assert_close(y, want, 1e-13)
    if want.ndim == 4:
        assert_close(y.sum(2), torch.ones_like(y[:, :, 0]), 1e-12)
    for dtype, rounding in ((torch.float32, 1e-4), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        low = x.to(dtype)
        y = function(low, 3, 0.8, dim=1)
        assert y.dtype == dtype
        assert_close(y.double(), function(low.double(), 3, 0.8, dim=1), 2 * rounding)


@every_call
def test_does_not_change_its_arguments_and_takes_empty_batches(function: Callable[..., Tensor]) -> None:
    x, k, tau = scores().requires_grad_(), torch.tensor([1, 3, 6]), TAU
    before = [v.detach().clone() for v in (x, k, tau)]
    function(x, k, tau).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip((x, k, tau), before, strict=True))
    places = function(x, 3, 0.8).shape[1:-1]
    assert function(torch.empty(0, N), 2, 0.8).shape == (0, *places, N)


def test_a_number_is_a_row() -> None:
    assert {call(name, torch.tensor(0.3), 1, 0.8).shape for name in CALLS} == {()}


@every
def test_bad_k(name: str) -> None:
    for k in (-1, N + 1, torch.tensor([1, 2, N + 1])):
        with pytest.raises(ValueError, match=r"^k must .* but got"):
            call(name, scores(), k, 0.8)
    if name not in ("rescaled_sigmoid", "root_finding", "sinkhorn"):
        with pytest.raises(ValueError, match=r"^k must .* integer .* but got 1.5"):
            call(name, scores(), 1.5, 0.8)


@every_matrix
def test_matrices_take_a_tau_for_each_row(name: str) -> None:
    moved = scores(2, 5, 3).movedim(1, -1).contiguous()
    tau = torch.tensor([[0.5, 1, 2], [3, 0.2, 0.4]], dtype=torch.float64)
    together = MATRICES[name](moved, tau=tau)
    assert together.shape == (2, 3, 3 if name == "sorted_sinkhorn" else 5, 5)
    for i in range(3):
        row = moved if name == "sorted_sinkhorn" else moved[:1, i]  # the same batch maximum for SOFT
        alone = MATRICES[name](row, tau=tau[0, i].item())
        assert_close(together[0, i], alone[0, i] if name == "sorted_sinkhorn" else alone[0], 1e-12)


@every_matrix
def test_matrices_have_exact_gradients(name: str) -> None:
    x, tau = scores(2, 5).requires_grad_(), TAU[:2].clone().requires_grad_(name != "sorted_sinkhorn")

    def function(x: Tensor, tau: Tensor) -> Tensor:
        rows = torch.cat((x, torch.full_like(x[:1], 9))) if name == "sorted_sinkhorn" else x
        return MATRICES[name](rows, tau=0.1 if name == "sorted_sinkhorn" else tau)

    torch.autograd.gradcheck(function, (x, tau), fast_mode=True)


# ----------------------------------------------------------------------------------------- defects
# Those that the formulas do not show.


@pytest.mark.parametrize("name", ["pav", "dykstra"])
def test_makes_nan_of_infinite_scores(name: str) -> None:
    x = torch.tensor([1.0, 2.0, -INF])
    assert call(name, x, 1, 0.8).isnan().any()
    assert khot.sparse_topk(x, 1, tau=0.8).isfinite().all()


def test_sinkhorn_puts_minus_infinity_at_a_finite_score() -> None:
    x = torch.tensor([[0.5, 0.4, -INF]])
    assert baselines.sinkhorn_topk(x, 1)[0, 2] > 1e-3
    assert khot.ot_topk(x, 1, normalize=True)[0, 2] == 0


def test_an_infinite_score_makes_the_batch_of_sinkhorn_even() -> None:
    x = scores()
    x[1, 2] = INF
    y = baselines.sinkhorn_topk(x, 2)
    assert y[1].isnan().all() and ((y[[0, 2]] - 2 / N).abs() < 1e-12).all()
    assert khot.ot_topk(x, 2, normalize=True)[[0, 2]].isfinite().all()


def test_sinkhorn_ignores_the_gradient_of_the_maximum() -> None:
    x = torch.tensor([[3.0, 1.0, 0.2]], dtype=torch.float64, requires_grad=True)
    assert not torch.autograd.gradcheck(lambda x: baselines.sinkhorn_topk(x, 1), (x,), raise_exception=False)
