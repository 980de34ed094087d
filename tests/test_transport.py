"""sorted_soft_topk against Sinkhorn, 50-digit roots and hard plans."""

from __future__ import annotations

import functools
import math
from typing import Any

import mpmath
import numpy as np
import ot
import pytest
import torch
from scipy.special import logsumexp
from torch import Tensor
from torch.autograd import grad
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from drawn import f64, normal
from khot._kernels.reference import transport
from khot.transport import sorted_soft_topk
from largest import Largest
from oracles import ADVERSARIAL

INF, NAN = math.inf, math.nan


def assert_close(got: Tensor, want: Any, tolerance: float) -> None:
    want = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def cost(x: np.ndarray, k: int) -> np.ndarray:
    return (x[:, None] - np.arange(k, -1, -1.0)) ** 2


def masses(n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(n, 1 / n), np.append(np.full(k, 1 / n), (n - k) / n)


def sinkhorn(x: Tensor, k: int, epsilon: float, sweeps: int = 200_000) -> Tensor:
    """n times the plan, without its last anchor, by log-domain sweeps until nothing changes."""
    row, n = x.numpy(), len(x)
    # only the products x·a matter: the squares cost digits
    kernel = 2 * (row - row.max())[:, None] * np.arange(k, -1, -1.0) / epsilon
    with np.errstate(divide="ignore"):
        log_nu = np.log(np.append(np.ones(k), n - k))
    b, y = np.zeros(k + 1), np.full((n, k + 1), NAN)
    for _ in range(sweeps):
        a = -logsumexp(kernel + b, axis=1, keepdims=True)
        b = log_nu - logsumexp(kernel + a, axis=0)
        y, before = np.exp(kernel + a + b), y
        if np.abs(y - before).max() <= 1e-15:
            return torch.from_numpy(y[:, :k].T.copy())
    raise RuntimeError(f"no convergence in {sweeps} sweeps")


# A context of our own, as in oracles.py: anybody may change mpmath's global precision.
mp = mpmath.MPContext()
mp.dps = 60


def precise(x: list[Any], k: int, epsilon: Any) -> list[list[Any]]:
    """Rows of y in 50 digits: Newton on the k potentials from Sinkhorn's, without any rescaling."""
    n, s = len(x), 2 / mp.mpf(epsilon)
    x = [mp.mpf(v) for v in x]
    nu = [mp.mpf(1)] * k + [mp.mpf(n - k)]
    b = [mp.mpf(0)] * (k + 1)

    def plan() -> list[list[Any]]:
        rows = []
        for v in x:
            logits = [s * (k - r) * v + b[r] for r in range(k + 1)]
            top = max(logits)
            e = [mp.exp(z - top) for z in logits]
            rows.append([z / sum(e) for z in e])
        return rows

    for sweep in range(400):
        G = plan()
        c = [sum(row[r] for row in G) for r in range(k + 1)]
        error = max(abs(u - v) for u, v in zip(c, nu, strict=True))
        if error < mp.mpf(10) ** -55:
            return [[row[r] for row in G] for r in range(k)]
        if sweep < 20 or error > 0.1:
            b = [u + mp.log(v / w) for u, v, w in zip(b, nu, c, strict=True)]
            b = [u - b[k] for u in b]
        else:
            K = mp.matrix(k, k)
            for r in range(k):
                for q in range(k):
                    K[r, q] = -sum(row[r] * row[q] for row in G)
                K[r, r] += c[r]
            step = mp.lu_solve(K, mp.matrix([nu[r] - c[r] for r in range(k)]))
            b = [b[r] + step[r] for r in range(k)] + [b[k]]
    raise RuntimeError("no convergence")


# --------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("epsilon", [0.3, 3.0, 100.0])
@pytest.mark.parametrize("k", [1, 5, 16])
def test_agrees_with_sinkhorn_run_to_convergence(k: int, epsilon: float) -> None:
    x = normal(60, seed=1)
    assert_close(sorted_soft_topk(x, k, epsilon=epsilon), sinkhorn(x, k, epsilon), 1e-11)


CLOSE = [1.0, 1.001, 0.2, -0.7]  # a pair that ε = 0.05 hardly tells apart, and two that are far


@pytest.mark.parametrize("epsilon", ["0.05", "0.5", "4"])
@pytest.mark.parametrize(("x", "k"), [(CLOSE, 1), (CLOSE, 2), (CLOSE, 3), ([1e4, 1e4 + 0.125, 1e4 - 0.5], 2)])
def test_agrees_with_50_digits(x: list[float], k: int, epsilon: str) -> None:
    want = [[float(v) for v in row] for row in precise(x, k, epsilon)]
    assert_close(sorted_soft_topk(f64(x), k, epsilon=float(epsilon)), want, 1e-12)


@pytest.mark.parametrize(("n", "k"), [(7, 1), (7, 3), (7, 7), (40, 12)])
def test_small_epsilon_gives_the_permutation_matrix(n: int, k: int) -> None:
    x = normal(n, seed=3)
    want = torch.nn.functional.one_hot(x.argsort(descending=True), n)[:k].double()
    assert torch.equal(sorted_soft_topk(x, k, epsilon=1e-6), want)
    a, b = masses(n, k)
    assert_close(want, n * ot.emd(a, b, cost(x.numpy(), k))[:, :k].T, 1e-12)
    ascending = torch.nn.functional.one_hot(x.argsort(), n)[:k].double()
    assert torch.equal(sorted_soft_topk(x, k, epsilon=1e-6, largest=False), ascending)


def test_small_epsilon_shares_ties_equally() -> None:
    y = sorted_soft_topk(f64([2.0, 1.0, 1.0, 1.0, 0.5, 2.0]), 3, epsilon=1e-4)
    assert_close(y, [[0.5, 0, 0, 0, 0, 0.5]] * 2 + [[0, 1 / 3, 1 / 3, 1 / 3, 0, 0]], 1e-10)


# ---------------------------------------------------------------------------------- the solver


GRID = [(10, 3), (100, 1), (100, 64), (100, 100), (1000, 5), (1000, 64)]


@functools.cache
def adversarial(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    rows = [scores(n, generator) for scores in ADVERSARIAL.values()]
    rows += [1e4 * rows[0].sign().cumsum(0), 1e4 * normal(n).round()]
    return torch.stack([row.nan_to_num(0, 0, -INF) for row in rows])


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 100.0])
@pytest.mark.parametrize(("n", "k"), GRID)
def test_ten_newton_steps_are_enough(n: int, k: int, epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("the fallback was needed")

    monkeypatch.setattr(transport, "STEPS", 10)
    monkeypatch.setattr(transport, "_sinkhorn", never)
    x = adversarial(n)
    x = x[(x > -INF).sum(-1) >= k]
    y = sorted_soft_topk(x, k, epsilon=epsilon)
    assert (y >= 0).all() and (y <= 1).all()
    assert (y.sum(-1) - 1).abs().max() <= 1e-12
    assert (y.sum(-2) <= 1 + 1e-12).all()
    assert (y.sum(-2)[x == -INF] == 0).all()
    for ties in (len(x) - 1, list(ADVERSARIAL).index("equal")):
        for value in x[ties].unique():
            tied = y[ties][:, x[ties] == value]
            assert (tied - tied[:, :1]).abs().max() <= 1e-12


@pytest.mark.parametrize("epsilon", [0.3, 3.0])
def test_the_fallback_alone_comes_to_the_same(epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.stack((normal(30), torch.cat((f64([INF, INF]), normal(28))), normal(30).round()))
    x[0, 3] = -INF
    want = sorted_soft_topk(x, 4, epsilon=epsilon)
    monkeypatch.setattr(transport, "STEPS", 0)
    got = sorted_soft_topk(x, 4, epsilon=epsilon)
    assert (got.sum(-1) - 1).abs().max() <= 1e-10
    assert_close(got, want, 1e-8)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 10.0])
def test_entries_that_the_solver_leaves_out_do_not_matter(epsilon: float, monkeypatch: Any) -> None:
    x = normal(3, 2000, seed=5)
    got = sorted_soft_topk(x, 5, epsilon=epsilon)
    monkeypatch.setattr(transport, "_relevant", lambda x, k, scale: x)
    assert_close(got, sorted_soft_topk(x, 5, epsilon=epsilon), 1e-12)


def test_blocks_of_rows_agree_with_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(7, 30, seed=6)
    want = sorted_soft_topk(x, 3, epsilon=0.5)
    monkeypatch.setattr(transport, "BLOCK", 250)
    assert_close(sorted_soft_topk(x, 3, epsilon=0.5), want, 1e-13)


def test_nothing_is_larger_than_the_plan() -> None:
    n, k = 3000, 4
    x = normal(1, n).requires_grad_()
    with Largest() as seen:
        sorted_soft_topk(x, k, epsilon=1.0).square().sum().backward()
    assert seen.numel <= (k + 1) * n


# ---------------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("k", [1, 3, np.int64(4)], ids=str)
def test_normalize_takes_the_largest_cost_of_finite_entries(k: int, dtype: torch.dtype) -> None:
    """Of scores between the anchors, outside of them on either side, in the middle, and beside infinite ones;
    with one epsilon and with one for each row."""
    spread = normal(6)
    rows = [spread / 9 + k / 2, spread + 40, spread - 40, torch.full((6,), k / 2), spread, spread]
    x = torch.stack(rows).to(dtype)
    x[4, 2], x[4, 5], x[5, 1] = INF, -INF, -INF
    farthest = [max(max(abs(v), abs(v - int(k))) for v in row if math.isfinite(v)) for row in x.tolist()]
    for epsilon in (0.2, torch.linspace(0.1, 0.5, 6, dtype=torch.float64)):
        scaled = epsilon * f64(farthest).square()
        got = sorted_soft_topk(x, k, epsilon=epsilon, normalize=True)
        assert_close(got, sorted_soft_topk(x, k, epsilon=scaled).double(), 1e-12)


# ------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 0.02, 1e4])
def test_gradients_are_finite_and_vanish_where_the_plan_is_hard(epsilon: float) -> None:
    n, k = 100, 20
    x = adversarial(n).clone().requires_grad_()
    e = torch.full((len(x),), epsilon, dtype=torch.float64).requires_grad_()
    y = sorted_soft_topk(x, k, epsilon=e)
    gx, ge = grad(y, (x, e), normal(*y.shape, seed=1))
    assert gx.isfinite().all() and ge.isfinite().all()
    assert (gx[x == -INF] == 0).all()
    # what moves is no more than the products of shares, times the slope 2/ε and the anchors' range
    soft = (y * (1 - y)).sum((-2, -1)).detach()
    assert (gx.abs().amax(-1) <= 2 / epsilon * k * (100 * soft + 1e-12)).all()


@pytest.mark.parametrize("epsilon", [0.03, 0.02, 0.005])
def test_potentials_of_a_hard_plan_do_not_amplify_rounding(epsilon: float) -> None:
    # K and what it is solved for are of the order of exp(−1/ε): rounding of the order of 1e-16 in either
    # would make potentials, and with them gradients, of any size
    x = f64([1.1, 0.0, -1.0, -2.1]).requires_grad_()
    y = sorted_soft_topk(x, 3, epsilon=epsilon)
    (g,) = grad(y, x, normal(3, 4, seed=1))
    # ½ (2/ε) a exp(−(2/ε) gap/2), and the rounding of what is no potential
    assert g.abs().max() <= 10 / epsilon * math.exp(-1 / epsilon) + 1e-15 * 6 / epsilon
    with dual_level():
        pushed = unpack_dual(sorted_soft_topk(make_dual(x.detach(), normal(4)), 3, epsilon=epsilon)).tangent
    assert pushed.abs().max() <= 20 / epsilon * math.exp(-1 / epsilon) + 4e-15 * 6 / epsilon


@pytest.mark.parametrize("gap", [2.0, 4.0, 30.0])
def test_groups_that_hardly_exchange_anything_have_gradients_of_their_own(gap: float) -> None:
    near = f64([0.3, 0.28, 0.25])
    x = torch.cat((near + gap, near)).requires_grad_()
    v = normal(5, 6, seed=1)
    (g,) = grad(sorted_soft_topk(x, 5, epsilon=0.05), x, v)
    alone = near.clone().requires_grad_()
    (upper,) = grad(sorted_soft_topk(alone, 3, epsilon=0.05), alone, v[:3, :3])
    (lower,) = grad(sorted_soft_topk(alone, 2, epsilon=0.05), alone, v[3:, 3:])
    assert_close(g, torch.cat((upper, lower)), 1e-11)


def test_gradient_of_infinite_entries_is_zero_and_they_do_not_disturb() -> None:
    free = normal(5, seed=9)
    for k, places in ((3, 1), (3, 2), (6, 2)):
        x = torch.cat((f64([INF] * places), free[:3], f64([-INF]), free[3:])).requires_grad_()
        y = sorted_soft_topk(x, k, epsilon=0.6)
        keep = x.isfinite()
        rest = free.clone().requires_grad_()
        want = sorted_soft_topk(rest, k - places, epsilon=0.6)
        assert_close(y[places:, keep], want, 1e-12)
        assert_close(y[:places, :places], torch.full((places, places), 1 / places), 1e-15)
        assert (y[:places, places:] == 0).all() and (y[places:, ~keep] == 0).all()
        v = normal(*y.shape, seed=1)
        (got,) = grad(y, x, v)
        assert (got[~keep] == 0).all()
        assert_close(got[keep], grad(want, rest, v[places:, keep])[0], 1e-11)


# ------------------------------------------------------------------------------------ bad input


def test_rows_without_an_answer_are_nan_and_spoil_no_other() -> None:
    x = normal(4, 6)
    want = sorted_soft_topk(x, 2, epsilon=0.5)
    for bad in (NAN, INF):
        spoiled = x.clone()
        spoiled[1, :3] = bad
        spoiled.requires_grad_()
        y = sorted_soft_topk(spoiled, 2, epsilon=0.5)
        assert y[1].isnan().all()
        assert_close(y[[0, 2, 3]], want[[0, 2, 3]], 1e-15)
        (g,) = grad(y[[0, 2, 3]].square().sum(), spoiled)
        assert g[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"epsilon": f64([1.0, -1.0])}, ValueError, "epsilon must be finite and > 0, but got -1.0"),
        ({"epsilon": torch.ones(3)}, ValueError, r"epsilon must broadcast with the batch shape \(2,\)"),
        ({"input": torch.empty(3, 0), "k": 1}, ValueError, r"k must be an integer in \[1, 0\]"),
        ({"input": torch.tensor([1.0, -INF, -INF])}, ValueError, "k must lie in .* row with 1"),
    ],
)
def test_errors_name_the_argument(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sorted_soft_topk(**{"input": torch.ones(2, 4), "k": 2, **kwargs})


def test_vmap_reports_a_bad_epsilon() -> None:
    with pytest.raises(ValueError, match="epsilon must be finite and > 0, but got -1"):
        torch.func.vmap(lambda x, e: sorted_soft_topk(x, 2, epsilon=e))(normal(2, 4), f64([1.0, -1.0]))
