"""The relatives of top-k in magnitude: other φ, their values, and the conjugates, against PAV and duality."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import khot
import oracles
from drawn import f64, normal
from khot._ops import exponential

INF, NAN = math.inf, math.nan
P = (2.0, 4 / 3, 1.15, 3.0)
TAUS = (0.01, 3.0)

each_p = pytest.mark.parametrize("p", P, ids=[f"p{p:.3g}" for p in P])
each_phi = pytest.mark.parametrize("phi", ["identity", "abs", "square", "exp"])
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "identity": khot.sparse_topk,
    "abs": khot.soft_topk_signed,
    "square": khot.soft_topk_magnitude,
    "exp": khot.soft_topk_exp,
}


ROWS = {
    "normal": normal(6),
    "ties": f64([2, 1, 1, 1, 0, -1]),
    "tied_magnitudes": f64([2, -1, 1, -1, 0.5, -3]),
    "low": 5 * normal(6, seed=1) - 20,
    "close": 1 + 1e-3 * normal(6, seed=2),
    "zeros": f64([0, 0, 3, 0, -0.5, 0]),
}
each_row = pytest.mark.parametrize("name", ROWS)


# --------------------------------------------------------------------------------- against PAV


@each_row
@pytest.mark.parametrize("tau", TAUS)
@each_p
def test_exp_agrees_with_pav(p: float, tau: float, name: str) -> None:
    x = ROWS[name]
    for k in (1, 3, 6):
        want = torch.from_numpy(oracles.exp_pav(x, k, tau, p))
        got = khot.soft_topk_exp(x, k, tau=tau, p=p)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14 * float(want.max()))
        got = khot.soft_topk_exp(x.float(), k, tau=tau, p=p)
        want = torch.from_numpy(oracles.exp_pav(x.float(), k, tau, p))
        torch.testing.assert_close(got.double(), want, rtol=1e-7, atol=1e-7 * float(want.max()))


@each_row
@pytest.mark.parametrize("tau", TAUS)
@each_p
def test_signed_agrees_with_pav(p: float, tau: float, name: str) -> None:
    x = ROWS[name]
    for k in (1, 3, 6):
        want = torch.from_numpy(oracles.signed_pav(x, k, tau, p))
        torch.testing.assert_close(khot.soft_topk_signed(x, k, tau=tau, p=p), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("p", [2.0, 4 / 3, 3.0])
def test_exp_of_long_rows_is_optimal(p: float) -> None:
    """y = e^(v−1) where v = x − τ y^(p−1) is above the k-th largest v, 0 where it is below, and what is left
    of k·e^(γ−1) where it is equal."""
    x = normal(20_000, seed=3)
    for k, tau in ((200, 0.3), (10_000, 5.0), (19_999, 1.0)):
        y = khot.soft_topk_exp(x, k, tau=tau, p=p)
        v = x - tau * y ** (p - 1)
        gamma = v.sort(descending=True).values[k - 1]
        above, below = v > gamma + 1e-11, v < gamma - 1e-11
        share = y * torch.exp(1 - v)
        assert (y[below] == 0).all()
        torch.testing.assert_close(share[above], torch.ones_like(share[above]), rtol=1e-10, atol=0)
        assert abs(float(share[~above & ~below].sum()) + int(above.sum()) - k) < 1e-6


@pytest.mark.parametrize("k", [1, 2.5, 4])
def test_signed_is_the_sparse_mask_where_its_threshold_is_positive(k: float) -> None:
    x = normal(20, 30, seed=4)
    y, mask = khot.soft_topk_signed(x, k, tau=0.3), khot.sparse_topk(x.abs(), k, tau=0.3)
    assert torch.equal(y.abs(), mask) and torch.equal(y.sign(), x.sign() * (mask > 0))
    loose = khot.soft_topk_signed(x, 29.5, tau=40.0)
    torch.testing.assert_close(loose, x / 40.0)  # no constraint binds
    assert khot.soft_topk_signed(f64([0, 0, 3]), 3, tau=0.1).tolist() == [0, 0, 1]


# --------------------------------------------------------------------------------- values


@each_phi
@each_p
def test_value_is_the_conjugate_at_the_operator(p: float, phi: str) -> None:
    """f = ⟨y, x⟩ − f*(y) − R(y), with f* from the public functions."""
    x = normal(8, 9, seed=5)
    conjugates: dict[str, Callable[[Tensor], Tensor]] = {
        "square": lambda y: khot.k_support_norm(y, 4) ** 2 / 2,
        "exp": lambda y: khot.k_support_negentropy(y, 4),
    }
    for tau in TAUS:
        y = OPERATORS[phi](x, 4, tau=tau, p=p)
        want = (x * y).sum(-1) - tau / p * (y.abs() ** p).sum(-1)
        if phi in conjugates:
            want = want - conjugates[phi](y)
        got = khot.soft_topk_sum(x, 4, tau=tau, p=p, phi=phi)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@each_phi
@each_p
def test_gradient_of_the_value_is_the_operator(p: float, phi: str) -> None:
    x = normal(8, 9, seed=6).requires_grad_()
    tau = torch.linspace(0.1, 5, 8, dtype=torch.float64).requires_grad_()
    value = khot.soft_topk_sum(x, 3, tau=tau, p=p, phi=phi)
    dx, dtau = grad(value.sum(), (x, tau))
    y = OPERATORS[phi](x, 3, tau=tau, p=p).detach()
    torch.testing.assert_close(dx, y, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(dtau, -(y.abs() ** p).sum(-1) / p, rtol=1e-10, atol=1e-11)


def test_known_values_of_the_conjugates() -> None:
    x = normal(5, 8, seed=7)
    torch.testing.assert_close(khot.k_support_norm(x, 1), x.abs().sum(-1))
    torch.testing.assert_close(khot.k_support_norm(x, 8), x.norm(dim=-1))
    y = x.softmax(-1)
    torch.testing.assert_close(khot.k_support_negentropy(y, 8), (y * y.log()).sum(-1))
    torch.testing.assert_close(khot.k_support_negentropy(y, 1), torch.zeros(5, dtype=torch.float64))
    sparse = f64([3, 0, -4, 0, 0])
    for k in (2, 3, 5):  # on k-sparse vectors it is the Euclidean norm
        assert float(khot.k_support_norm(sparse, k)) == 5
    assert float(khot.k_support_norm(1e200 * sparse, 2)) == pytest.approx(5e200)
    assert float(khot.k_support_norm(1e-200 * sparse, 2)) == pytest.approx(5e-200)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_norm_is_dual_to_that_of_the_k_largest(k: int) -> None:
    """‖y‖ = max ⟨x, y⟩ over all x whose k largest entries have a Euclidean norm of at most 1, and the
    gradient is the maximiser."""
    y = normal(7, seed=8).requires_grad_()
    norm = khot.k_support_norm(y, k)
    (best,) = grad(norm, y)
    norm = norm.detach()
    assert float(best.abs().sort(descending=True).values[:k].norm()) == pytest.approx(1, abs=1e-12)
    assert float(best @ y.detach()) == pytest.approx(float(norm), abs=1e-12)
    others = normal(500, 7, seed=9)
    others = others / others.abs().sort(dim=-1, descending=True).values[:, :k].norm(dim=-1, keepdim=True)
    assert float((others @ y.detach()).max()) <= float(norm)


# --------------------------------------------------------------------------------- derivatives

CALLS: dict[str, Callable[..., Tensor]] = {
    "signed": khot.soft_topk_signed,
    "exp": khot.soft_topk_exp,
    **{f"sum-{phi}": functools.partial(khot.soft_topk_sum, phi=phi) for phi in OPERATORS},  # type: ignore[arg-type]
}


def test_no_gradient_of_the_norm_at_0_is_nan() -> None:
    y = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    (slope,) = grad(khot.k_support_norm(y, 2), y)
    assert torch.equal(slope, torch.zeros_like(slope))


# --------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("name", CALLS)
def test_masked_entries_are_as_absent(name: str) -> None:
    x, keep = f64([1.0, 7, -0.9, 0.97, -5, 0.2]), torch.tensor([True, False, True, True, False, True])
    for hole in (7.0, NAN, INF, -INF):
        row = torch.where(keep, x, hole).requires_grad_()
        y, want = CALLS[name](row, 2, tau=0.7, mask=keep), CALLS[name](x[keep], 2, tau=0.7)
        if y.dim():
            assert (y[~keep] == 0).all()
            y = y[keep]
        torch.testing.assert_close(y, want, rtol=1e-14, atol=1e-14)
        (slope,) = grad(y.sum(), row)
        assert slope.isfinite().all() and (slope[~keep] == 0).all()


@pytest.mark.parametrize("name", ["k_support_norm", "k_support_negentropy"])
def test_masked_entries_of_a_vector_count_as_0(name: str) -> None:
    keep = torch.tensor([True, False, True, True, False])
    y = normal(5, seed=10).square()
    for hole in (7.0, NAN, INF, -INF):
        row = torch.where(keep, y, hole).requires_grad_()
        got = getattr(khot, name)(row, 2, mask=keep)
        torch.testing.assert_close(got, getattr(khot, name)(y[keep], 2), rtol=1e-14, atol=0)
        (slope,) = grad(got, row)
        assert slope.isfinite().all() and (slope[~keep] == 0).all()


def test_infinite_entries() -> None:
    x = f64([1.0, INF, 0.5])
    assert khot.soft_topk_signed(-x, 1, tau=0.5).tolist() == [0, -1, 0]
    assert khot.soft_topk_exp(x, 1).tolist() == [0, INF, 0]
    two = khot.soft_topk_exp(x, 2)
    torch.testing.assert_close(two[[0, 2]], khot.soft_topk_exp(x[[0, 2]], 1), rtol=1e-12, atol=0)
    bad = f64([INF, INF, 0.5])
    assert khot.soft_topk_exp(bad, 1).isnan().all() and khot.soft_topk_signed(bad, 1).isnan().all()
    for phi in OPERATORS:
        assert khot.soft_topk_sum(x, 2, phi=phi) == INF  # type: ignore[arg-type]
    assert khot.k_support_norm(x, 2) == INF
    assert khot.k_support_negentropy(x, 2) == INF
    assert khot.k_support_negentropy(f64([1.0, -0.1]), 2) == INF


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_exp_of_extreme_scores_is_finite(size: float) -> None:
    x = f64([-700.0, 700, 699, -1, 0]) * size
    for p in P:
        for tau in (1e-3, 1.0, 1e3):
            for k in (0, 1, 2, 5):
                leaf = x.clone().requires_grad_()
                y = khot.soft_topk_exp(leaf, k, tau=tau, p=p)
                (slope,) = grad(y.sum(), leaf)
                assert not y.isnan().any() and not slope.isnan().any(), (p, tau, k)
    assert (khot.soft_topk_exp(x, 0) == 0).all()


def test_bad_arguments() -> None:
    x = normal(2, 4)
    for call in (khot.soft_topk_signed, khot.soft_topk_exp, khot.soft_topk_sum):
        with pytest.raises(ValueError, match=r"^p must lie in \[1.15, 3\]"):
            call(x, 2, p=3.5)
        with pytest.raises(ValueError, match=r"^k must .* 3.* row with 2"):
            call(x, 3, mask=torch.tensor([True, False, True, False]))
    for phi in ("square", "exp"):
        with pytest.raises(ValueError, match=r"^k must .* 2.5"):
            khot.soft_topk_sum(x, 2.5, phi=phi)  # type: ignore[arg-type]
    for norm in (khot.k_support_norm, khot.k_support_negentropy):
        for k in (0, 5, 1.5):
            with pytest.raises(ValueError, match=rf"^k must .* {k}"):
                norm(x, k)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
def test_exp_ends_where_rounding_is_left(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Newton's method takes a dozen steps, of the 80 that bisection might need."""
    asked = []
    readable = exponential.arguments.readable

    def count(x: Tensor) -> bool:
        asked.append(x)
        return readable(x)

    monkeypatch.setattr(exponential.arguments, "readable", count)
    khot.soft_topk_exp(scale * normal(256, 64), 8)
    assert 1 <= len(asked) <= 20
