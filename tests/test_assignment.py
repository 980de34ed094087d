"""soft_assign against linear programs, convex solvers and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from khot.assignment import soft_assign

CDFS = ("logistic", "laplace", "normal")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cdf", CDFS)
@pytest.mark.parametrize("tau", [1e3, 1.0, 0.1, 0.01, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_and_columns_have_their_sums(cdf: str, tau: float, dtype: torch.dtype) -> None:
    x = (normal(1, 60, 6) + 2 * normal(6, seed=1)).to(dtype)
    k = torch.linspace(0.5, 4.5, 60, dtype=torch.float64)
    capacity = torch.tensor([5.0, 15.0, 25.0, 30.0, 35.0, 40.0], dtype=torch.float64)
    y = soft_assign(x, k, capacity, tau=tau, cdf=cdf)
    assert y.dtype == dtype and bool(((y >= 0) & (y <= 1)).all())
    tolerance = 1e-11 if dtype == torch.float64 else 1e-6
    assert ((y.double().sum(-1) - k).abs() / k).max() <= tolerance
    assert ((y.double().sum(-2) - capacity).abs() / capacity).max() <= tolerance


@pytest.mark.parametrize("at_most", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_tends_to_the_linear_program(k: int, at_most: bool) -> None:
    m, width = 40, 5
    x = normal(m, width, seed=2) + normal(width, seed=3)
    capacity = (1.2 if at_most else 1.0) * m * k / width
    rows, columns = np.kron(np.eye(m), np.ones(width)), np.tile(np.eye(width), m)
    need = np.full(m, k), np.full(width, capacity)
    if at_most:
        limits = {"A_eq": rows, "b_eq": need[0], "A_ub": columns, "b_ub": need[1]}
    else:
        limits = {"A_eq": np.vstack([rows, columns]), "b_eq": np.concatenate(need)}
    best = -linprog(-x.flatten().numpy(), bounds=(0, 1), **limits).fun
    gaps = []
    for tau in (0.3, 0.03, 0.003, 0.0003):
        y = soft_assign(x, k, capacity, tau=tau, at_most=at_most)
        assert y.sum(-2).max() <= capacity * (1 + 1e-11)
        gaps.append(1 - float((x * y).sum()) / best)
    assert gaps == sorted(gaps, reverse=True) and -1e-12 < gaps[-1] < 1e-4


@pytest.mark.parametrize("at_most", [False, True])
def test_maximises_the_entropic_objective(at_most: bool) -> None:
    cvxpy = pytest.importorskip("cvxpy")
    x, tau, k, m, width = normal(12, 4, seed=5), 0.4, 1.5, 12, 4
    capacity = (1.2 if at_most else 1.0) * m * k / width
    Y = cvxpy.Variable((m, width))
    value = cvxpy.sum(cvxpy.multiply(x.numpy(), Y)) + tau * cvxpy.sum(cvxpy.entr(Y) + cvxpy.entr(1 - Y))
    columns = cvxpy.sum(Y, axis=0)
    limits = [cvxpy.sum(Y, axis=1) == k, columns <= capacity if at_most else columns == capacity]
    cvxpy.Problem(cvxpy.Maximize(value), limits).solve(
        solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12
    )
    y, c = soft_assign(x, k, capacity, tau=tau, at_most=at_most, return_bias=True)
    assert np.abs(y.numpy() - Y.value).max() < 1e-5
    dual = limits[1].dual_value
    dual = dual if at_most else dual - dual.mean()
    assert np.abs(c.numpy() - dual).max() < 1e-4 or np.abs(c.numpy() + dual).max() < 1e-4


@pytest.mark.parametrize("cdf", ["logistic", "normal"])
@pytest.mark.parametrize("at_most", [False, True])
def test_gradients(cdf: str, at_most: bool) -> None:
    x, tau = normal(2, 5, 4, seed=7).requires_grad_(), torch.tensor(0.6, dtype=torch.float64)
    k = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    skew = torch.tensor([0.5, 0.8, 1.2, 1.5], dtype=torch.float64)
    room = 1.2 if at_most else 1.0

    def call(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
        return soft_assign(x, k, room * skew * k * 5 / 4, tau=tau, cdf=cdf, at_most=at_most)

    args = (x, k, tau.requires_grad_())
    assert torch.autograd.gradcheck(call, args, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, args, check_fwd_over_rev=True)


def test_gradients_with_decided_rows_and_columns() -> None:
    x = normal(6, 5, seed=8)
    x[0, 1], x[2, 3], x[5] = -math.inf, math.inf, -math.inf
    finite = x.isfinite()
    k = torch.tensor([2.0, 1.5, 2.0, 5.0, 0.0, 0.0], dtype=torch.float64)
    capacity = torch.tensor([1.5, 1.0, 2.0, 3.0, 3.0], dtype=torch.float64)

    def call(values: Tensor) -> Tensor:
        return soft_assign(torch.where(finite, values, x), k, capacity, tau=0.7)

    y = call(x)
    assert y[2, 3] == 1 and y[0, 1] == 0 and bool((y[3] == 1).all()) and bool((y[4:] == 0).all())
    assert torch.allclose(y.sum(-1), k, atol=1e-12) and torch.allclose(y.sum(0), capacity, atol=1e-12)
    values = x.masked_fill(~finite, 0).requires_grad_()
    assert torch.autograd.gradcheck(call, values, check_forward_ad=True)


def test_the_bias_starts_the_next_call_and_chooses_alone() -> None:
    x = normal(256, 8, seed=9) + 3 * normal(8, seed=10)
    y, c = soft_assign(x, 2, tau=0.01, return_bias=True)
    assert abs(c.mean()) < 1e-12 and not c.requires_grad
    again = soft_assign(x, 2, tau=0.01, bias=c)
    assert (again - y).abs().max() < 1e-10
    load = torch.zeros_like(x).scatter(1, (x - c).topk(2).indices, 1).sum(0)
    assert (load - 64).abs().max() <= 2
    assert (x.topk(2).indices == 0).sum() != load[0]


def test_ties_share_equally_and_a_mask_hides() -> None:
    assert torch.allclose(soft_assign(torch.zeros(6, 3), 1), torch.full((6, 3), 1 / 3))
    x, mask = normal(7, 4), torch.ones(7, 4, dtype=torch.bool)
    mask[2, 1] = mask[3, 0] = False
    hidden = x.masked_fill(~mask, math.nan)
    y = soft_assign(hidden, 2, mask=mask)
    assert torch.equal(y, soft_assign(x.masked_fill(~mask, -math.inf), 2))
    assert bool((y[~mask] == 0).all()) and (y.sum(0) - 3.5).abs().max() < 1e-12


def test_a_nan_spoils_its_matrix_alone() -> None:
    x = normal(2, 5, 4)
    want = soft_assign(x[1], 2)
    x[0, 2, 1] = math.nan
    y = soft_assign(x, 2)
    assert bool(y[0].isnan().all()) and torch.equal(y[1], want)


def test_vmap_and_compile() -> None:
    x = normal(3, 5, 4)
    tau = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
    want = soft_assign(x, 2, tau=tau)
    mapped = torch.func.vmap(lambda x, tau: soft_assign(x, 2, tau=tau))(x, tau)
    assert torch.allclose(mapped, want, atol=1e-14)
    compiled = torch.compile(soft_assign, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x, 2, tau=tau), want, atol=1e-14)
    args = x.clone().requires_grad_(), torch.full((3, 5), 2.0).double(), torch.full((3, 4), 2.5).double()
    op = torch.ops.khot.soft_assign.default
    torch.library.opcheck(op, (*args, tau.unsqueeze(-1), torch.zeros(3, 4).double(), "logistic", 0.0, False))


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (ValueError, "k", {"k": 5}),
        (ValueError, "k", {"k": -1.0}),
        (TypeError, "k", {"k": "two"}),
        (ValueError, "k", {"k": torch.ones(4)}),
        (ValueError, "capacity", {"capacity": 2.0}),
        (ValueError, "capacity", {"capacity": 7.0}),
        (ValueError, "capacity", {"capacity": torch.ones(5)}),
        (ValueError, "capacity", {"capacity": 2.4, "at_most": True}),
        (ValueError, "tau", {"tau": 0.0}),
        (ValueError, "tau", {"tau": torch.ones(2)}),
        (ValueError, "cdf", {"cdf": "uniform"}),
        (ValueError, "cdf", {"cdf": "unknown"}),
        (ValueError, "input", {"input": torch.ones(4)}),
        (TypeError, "input", {"input": torch.ones(5, 4, dtype=torch.int64)}),
        (TypeError, "mask", {"mask": torch.ones(5, 4)}),
        (ValueError, "k", {"mask": torch.eye(5, 4) == 1}),
    ],
)
def test_bad_input(error: type[Exception], name: str, options: dict) -> None:
    with pytest.raises(error, match=name):
        soft_assign(**{"input": torch.zeros(5, 4), "k": 2, **options})


def test_empty_and_trivial() -> None:
    assert soft_assign(torch.empty(0, 5, 4), 2).shape == (0, 5, 4)
    assert soft_assign(torch.zeros(3, 4), 4).tolist() == torch.ones(3, 4).tolist()
    assert soft_assign(torch.zeros(3, 4), 0).tolist() == torch.zeros(3, 4).tolist()
