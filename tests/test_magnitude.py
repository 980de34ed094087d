"""soft_topk_magnitude against PAV in 50 digits, its closed forms, and theorems of the paper."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import grad

from drawn import f64
from khot import soft_topk_magnitude
from oracles import ADVERSARIAL, TAUS, magnitude_pav

INF, NAN = math.inf, math.nan
P = (2.0, 4 / 3, 1.5, 1.15, 1.9, 2.5, 3.0)
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

each_p = pytest.mark.parametrize("p", P, ids=[f"p{p:.3g}" for p in P])
each_rescale = pytest.mark.parametrize("rescale", [False, True], ids=["plain", "rescale"])
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=[str(d)[6:] for d in FLOATS])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def full(y: Tensor, tau: float | Tensor, p: float) -> Tensor:
    """y + τ y^(p−1), with signs."""
    return y + tau * y.sign() * y.abs() ** (p - 1)


def assert_within_rounding(got: Tensor, want: np.ndarray | Tensor, scale: float) -> None:
    """float64: 1e-12 of the largest input, and 1e-10 of itself besides; below: rounded once from float64.

    1e-14 of the largest input is what an entry within rounding of γ gets instead of 0.
    """
    want = torch.as_tensor(want).double()
    eps, tiny = torch.finfo(got.dtype).eps, torch.finfo(got.dtype).tiny
    error = (got.double() - want).abs()
    if got.dtype == torch.float64:
        assert error.max() <= 1e-12 * scale
        allowed = 1e-10 * want.abs() + 1e-14 * scale
    else:
        allowed = 0.51 * eps * want.abs() + tiny + 1e-14 * scale
    assert (error <= allowed).all(), (got, want)


def assert_optimal(x: Tensor, y: Tensor, k: int, tau: float, p: float, rounding: float = 1e-12) -> None:
    """y is a subgradient of half the sum of the k largest v², at v = s − τ y^(p−1): the optimality condition.

    With γ the k-th largest v: y = v where v > γ, 0 where v < γ, and where v = γ it is in [0, γ], the sum of
    all being the share of k that is left.
    """
    s, y = x.double().abs(), (y.double() * x.double().sign())
    v = s - tau * y.abs() ** (p - 1)
    tol = rounding * s.max()
    gamma = v.sort(descending=True).values[k - 1]
    above, below = v > gamma + tol, v < gamma - tol
    tied = ~above & ~below
    assert (y >= 0).all()
    assert (y[below] == 0).all()
    assert ((y - v)[above].abs() <= tol).all()
    assert (y[tied] <= gamma + tol).all()
    assert abs(y[tied].sum() - (k - above.sum()) * gamma) <= tol * (1 + tied.sum())
    assert int((y > 0).sum()) <= k + int(tied.sum())


# --------------------------------------------------------------------------------------------- values


def _rows() -> dict[str, Tensor]:
    """All values are exact in float32, so that one oracle is enough for all dtypes except half precision."""
    sparse = normal(6, seed=4).float()
    sparse[::2] = 0
    rows = {
        "normal": normal(7),
        "ties": f64([2, -2, 2, 1, 3, 0, -3]),
        "tie_at_the_kth_place": f64([5, 4, -4, 4, 4, 1]),
        "zeros": sparse,
        "signed_zeros": f64([0.0, -0.0, 2, -0.0, -3]),
        "all_zero": f64([0.0, -0.0, 0.0]),
        "all_equal": f64([0.75] * 5),
        "tiny": 1e-6 * normal(5, seed=1),
        "large": 1e4 * normal(6, seed=2),
        "wide": f64([1e4, -1e-6, 3, 1e-3, 0.5, -700]),
        "close": 1 + 1e-3 * normal(6, seed=3),
        "one": f64([-1.5]),
        "two": f64([1, -1.0625]),
    }
    return {name: row.float().double() for name, row in rows.items()}


ROWS = _rows()


def places(n: int) -> list[int]:
    """k; the adversarial and the long rows have 1 and n − 1."""
    return sorted({max(1, n // 3), n})


@functools.cache
def expected(name: str, k: int, tau: float, p: float) -> Tensor:
    return torch.as_tensor(magnitude_pav(ROWS[name], k, tau, p))


@pytest.mark.parametrize("tau", [1e-3, 0.01, 0.3, 1.0, 10.0])
@each_p
def test_agrees_with_pav(p: float, tau: float) -> None:
    for name, x in ROWS.items():
        for k in places(len(x)):
            want, scale = expected(name, k, tau, p), float(x.abs().max())
            y = soft_topk_magnitude(x, k, tau=tau, p=p)
            assert_within_rounding(y, want, scale)
            assert_optimal(x, y, k, tau, p)
            assert_within_rounding(soft_topk_magnitude(x.float(), k, tau=tau, p=p), want, scale)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("kind", [kind for kind in ADVERSARIAL if kind != "minus_inf"])
def test_agrees_with_pav_on_adversarial_rows(kind: str, tau: float) -> None:
    x = ADVERSARIAL[kind](12, torch.Generator().manual_seed(0))
    for p in (2.0, 1.15):
        for k in (1, 5, 11):
            y = soft_topk_magnitude(x, k, tau=tau, p=p)
            assert_within_rounding(y, magnitude_pav(x, k, tau, p), float(x.abs().max()))


@pytest.mark.parametrize("kind", ["normal_1", "cauchy", "lognormal", "ties", "equal", "outlier"])
@pytest.mark.parametrize("p", [2.0, 4 / 3, 1.15, 3.0])
def test_long_rows_are_optimal(p: float, kind: str) -> None:
    n = 20_000
    x = ADVERSARIAL[kind](n, torch.Generator().manual_seed(1))
    for k, tau in ((200, 0.01), (n // 2, 10.0), (n - 1, 0.3)):
        assert_optimal(x, soft_topk_magnitude(x, k, tau=tau, p=p), k, tau, p)


@pytest.mark.parametrize("tau", [1e-6, 1e-9, 1e-12, 1e-14, 1e-16, 1e-30, 1e-300])
@each_p
def test_ties_share_equally_however_small_tau_is(p: float, tau: float) -> None:
    """m ties for j places at s = 1 have γ = 1 − τ(jγ/m)^(p−1), so y = jγ/m is j/m to within τ."""
    for row, places in (([1.0, 1, 1], [1, 2]), ([3, 1, 1, -1, 0.5], [2, 3])):
        x, largest = f64(row), int(row[0] > 1)
        for k in places:
            y = soft_topk_magnitude(x, k, tau=tau, p=p)
            want = torch.where(x.abs() == 1, x * (k - largest) / 3, torch.where(x > 1, x, 0))
            torch.testing.assert_close(y, want, rtol=3 * tau + 1e-12, atol=0)


@each_float
@each_p
def test_extreme_scales_stay_finite(p: float, dtype: torch.dtype) -> None:
    big, small = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    for row in ([big, -big, big, 1.0], [big, small, 3.0, 0.0], [small, small / 4, 0.0, 0.0], [1.0, 2, 2, 1]):
        x = torch.tensor(row, dtype=torch.float64).to(dtype)
        for tau in (1e-300, 1.0, 1e300):
            for k in (1, 2, 4):
                y = soft_topk_magnitude(x, k, tau=tau, p=p)
                assert y.isfinite().all() and (y.sign() * x.sign() >= 0).all(), (row, tau, k)
                assert (y.double().abs() <= x.double().abs() * (1 + 1e-14)).all(), (row, tau, k)


# ------------------------------------------------------------------------------- what the paper proves


@each_p
@pytest.mark.parametrize("tau", [1e-2, 1.0, 700.0, 1e5])
def test_pooled_value_solves_its_equation_however_small_it_is(p: float, tau: float) -> None:
    s, k = torch.cat((3 + 1e-3 * normal(8, 8), normal(8, 8, seed=1).exp())), 2.0
    _, hi, lo = torch.ops.khot.soft_topk_magnitude(s, f64(k), f64(tau), p, False)
    gamma = hi + lo
    Y = ((((s - hi[:, None]) - lo[:, None]) / tau).clamp(min=0)) ** (1 / (p - 1))
    alone = gamma.unsqueeze(-1) <= Y
    pooled = (Y * ~alone).sum(-1)
    some = pooled > 0
    assert some[:8].all()  # the clusters
    assert (((k - alone.sum(-1)) * gamma - pooled).abs() <= 1e-9 * pooled)[some].all()


def test_pooled_value_of_entries_of_all_sizes() -> None:
    """γ is close to the point where the fifth entry would no longer be pooled, and G is nearly flat below
    it."""
    s = [
        0.0255126953125,
        9.5367431640625e-07,
        0.00665283203125,
        16.25,
        0.0005950927734375,
        0.0033416748046875,
    ]
    tau = f64([32.060839912207436, 32.0, 31.5, 100.0])
    _, hi, lo = torch.ops.khot.soft_topk_magnitude(f64([s] * 4), f64(5.0), tau, 1.15, False)
    for got, t in zip((hi + lo).tolist(), tau.tolist(), strict=True):
        # v + τ v^0.15 = s: v = (s/τ)^(20/3) but for a share of itself far below a digit
        assert got == pytest.approx((0.0005950927734375 / t) ** (1 / (1.15 - 1)), rel=1e-12, abs=0)


# -------------------------------------------------------------------------------------------- rescale


@pytest.mark.parametrize("tau", [1e-3, 0.3, 1.0, 10.0])
@each_p
def test_rescale(p: float, tau: float) -> None:
    """x itself where a selected entry is on its own, y + τ y^(p−1) elsewhere."""
    seen = 0
    for name, x in ROWS.items():
        for k in places(len(x)):
            y = expected(name, k, tau, p)
            want, scale = full(y, tau, p), float(x.abs().max())
            alone = (y.abs() > 1e-3 * x.abs()) & ((want - x).abs() <= 1e-13 * x.abs())
            for dtype in (torch.float64, torch.float32):
                got = soft_topk_magnitude(x.to(dtype), k, tau=tau, p=p, rescale=True)
                assert torch.equal(got[alone], x[alone].to(dtype)), (name, k)
                rounding = 2 * torch.finfo(dtype).eps * want.abs() + 1e-14 * scale
                assert ((got - want).abs() <= rounding).all(), (name, k)
                seen += int(alone.sum())
    assert seen > 20


@each_float
@each_p
def test_rescale_near_the_edge_of_a_block(p: float, dtype: torch.dtype) -> None:
    """v(s₁) is above s₂ by less than rounding of the dtype: nothing is pooled, so the result is (s₁, 0),
    with gradient (1, 0), however v(s₁) rounds."""
    tau, first = 0.3, normal(400, seed=11, dtype=torch.float32).abs().to(dtype) + 1
    v = soft_topk_magnitude(first.double()[:, None], 1, tau=tau, p=p)[:, 0]
    second = v.to(dtype)
    clear = v - second.double() > 1e-10  # rounded down: at 1e-10 float64 has no doubt that v(s₁) > s₂
    if dtype == torch.float64:
        second, clear = v - 1e-10, torch.ones_like(clear)
    x = torch.stack([first, second], -1)[clear].requires_grad_()
    assert len(x) > 100
    y = soft_topk_magnitude(x, 1, tau=tau, p=p, rescale=True)
    assert torch.equal(y, x.detach() * torch.tensor([1, 0], dtype=dtype))
    (got,) = grad(y.sum(), x)
    assert torch.equal(got, torch.tensor([1, 0], dtype=dtype).expand_as(x))


# ------------------------------------------------------------------------------- the ends, inf and NaN


@each_rescale
@each_p
def test_k_zero_and_k_n(p: float, rescale: bool) -> None:
    x = f64([[3, -1, 0.5, 2], [0.1, 0.1, -0.1, 0.1]], requires_grad=True)
    tau = f64(0.5, requires_grad=True)
    y = soft_topk_magnitude(x, 0, tau=tau, p=p, rescale=rescale)
    dx, dtau = grad(y.sum(), (x, tau))
    assert (y == 0).all() and (dx == 0).all() and dtau == 0
    y = soft_topk_magnitude(x, 4, tau=tau, p=p, rescale=rescale)
    torch.testing.assert_close(y if rescale else full(y, tau, p), x, rtol=1e-14, atol=0)
    assert all(g.isfinite().all() for g in grad(y.sum(), (x, tau)))


@pytest.mark.parametrize(("p", "slope"), [(1.5, 0.0), (2.0, 2 / 3), (3.0, 1.0)])
@pytest.mark.parametrize("x", [[0.0, -0.0, 0.0], [3, 0.0, -1]], ids=["all", "some"])
def test_slope_at_zero_is_that_of_the_power(x: list[float], p: float, slope: float) -> None:
    """v + τ v^(p−1) = s: the limit of dv/ds at 0, recorded or not, where all entries are selected."""
    point = f64(x, requires_grad=True)
    y = soft_topk_magnitude(point, 3 if any(x) else 1, tau=0.5, p=p)
    for recorded in (False, True):
        (got,) = grad(y.sum(), point, retain_graph=True, create_graph=recorded)
        zeros = got[point == 0].detach()
        torch.testing.assert_close(zeros, torch.full_like(zeros, slope))


@each_rescale
@each_p
def test_infinite_entries_are_the_largest(p: float, rescale: bool) -> None:
    """±inf takes one of k and leaves the others as if it were not there, gradients included."""
    rest = [2.0, -1.9, 0.5, 1.8]
    x = f64([-INF, *rest], requires_grad=True)
    finite = f64(rest, requires_grad=True)
    for k in (1, 2, 3, 5):
        tau, tau_finite = f64(0.7, requires_grad=True), f64(0.7, requires_grad=True)
        y = soft_topk_magnitude(x, k, tau=tau, p=p, rescale=rescale)
        want = soft_topk_magnitude(finite, k - 1, tau=tau_finite, p=p, rescale=rescale)
        assert y[0] == -INF
        torch.testing.assert_close(y[1:], want, rtol=1e-14, atol=0)
        (dx, dtau), (dwant, dtau_want) = grad(y[1:].sum(), (x, tau)), grad(want.sum(), (finite, tau_finite))
        torch.testing.assert_close(dx, torch.cat([f64([0]), dwant]), rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(dtau, dtau_want, rtol=1e-13, atol=1e-15)
    assert soft_topk_magnitude(f64([INF, 1]), 0, p=p, rescale=rescale).isnan().all()


@pytest.mark.parametrize(("p", "tau"), [(1.15, 175.0), (1.5, 1e3), (2.0, 1e6)])
def test_slope_is_none_where_half_precision_has_no_such_small_y(p: float, tau: float) -> None:
    """v + τ v^(p−1) = s has v < 1e-8 there, which float16 rounds to 0, and dv/ds and dv/dτ < 2e-6."""
    x = f64([0.1, -0.05, 0.01]).half().requires_grad_()
    heat = f64(tau, requires_grad=True)

    def f(x: Tensor, heat: Tensor) -> Tensor:
        return soft_topk_magnitude(x, 3, tau=heat, p=p)

    y = f(x, heat)
    assert (y[2] == 0).all()
    found = [grad(y[2], (x, heat), retain_graph=True, create_graph=recorded) for recorded in (False, True)]
    forward = torch.func.jvp(f, (x.detach(), heat.detach()), (torch.ones_like(x), torch.ones_like(heat)))
    for slope in (*(each for pair in found for each in pair), forward[1][2]):
        assert slope.abs().max() < 2e-6


@each_float
@pytest.mark.parametrize("p", [2.0, 4 / 3, 1.5, 3.0])
@pytest.mark.parametrize("n", [1, 7, 64, 700, 5_000])
def test_one_operator_with_signs_is_the_one_without(p: float, dtype: torch.dtype, n: int) -> None:
    """A mask of ones takes the way by |x| and signs, and no mask that of one operator."""
    x = normal(12, n, seed=n) * f64([0.1, 1, 30]).repeat(4)[:, None]
    x[1::4] = x[1::4].round()
    x[2::4, ::3] = -0.0
    x[3, : n // 4] = -INF
    x[5, n // 2] = NAN
    x, v = x.to(dtype), normal(12, n, seed=1, dtype=dtype)
    k = torch.tensor([0, 1, n // 2, n]).repeat_interleave(3)
    results = []
    for mask in (None, torch.ones((), dtype=torch.bool)):
        leaves = [x.clone().requires_grad_(), f64([1.0, 0.2, 5.0, 1e-3]).repeat(3).requires_grad_()]
        y = soft_topk_magnitude(leaves[0], k, tau=leaves[1], p=p, mask=mask)
        results.append((y.detach(), *grad(y, leaves, v)))
    (y, dx, dtau), (y_want, dx_want, dtau_want) = results
    torch.testing.assert_close(y, y_want, rtol=0, atol=0, equal_nan=True)
    # the pooled entries share a sum, which has the rounding errors of its terms
    eps = max(torch.finfo(dtype).eps, 1e-12)
    size = dx_want.double().nan_to_num().abs().amax(-1, keepdim=True)
    assert dx.isnan().equal(dx_want.isnan())
    assert ((dx.double() - dx_want.double()).nan_to_num().abs() <= eps * size).all()
    torch.testing.assert_close(dtau, dtau_want, rtol=1e-9, atol=1e-9, equal_nan=True)
    some = y != 0
    some &= ~y.isnan()
    assert torch.equal(y.signbit()[some], x.signbit()[some])


# ------------------------------------------------------------------------------------------ derivatives

# Of these the first row is pooled (four entries share two places), the second in part, the third not at all.
SMOOTH = [[1.0, -0.98, 0.97, -0.95, 0.2], [7.0, 2.0, -1.9, 0.3, 1.7], [6.0, -3.0, 0.8, 0.3, 0.1]]


def test_no_gradient_in_k() -> None:
    k = f64(2.0, requires_grad=True)
    x = f64(SMOOTH, requires_grad=True)
    y = soft_topk_magnitude(x, k)
    assert grad(y.sum(), (x, k), allow_unused=True)[1] is None
    assert not soft_topk_magnitude(x.detach(), k).requires_grad


def test_gradients_in_float16_of_small_results() -> None:
    x = torch.tensor([0.0010, 0.0006, -0.0002, 0.0001, 0.0004]).half()

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = soft_topk_magnitude(x, 2, p=4 / 3)  # at most 1e-9, which float16 does not have
        return grad(y, x, torch.full_like(y, 2**15))[0]

    torch.testing.assert_close(gradient(x), gradient(x.float()).half())
