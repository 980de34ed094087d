"""The oracles agree with one another, with SciPy and with closed forms."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq

import oracles
from oracles import CDFS, mp

KINDS = [
    pytest.param("logistic", None, id="logistic"),
    pytest.param("laplace", None, id="laplace"),
    pytest.param("normal", None, id="normal"),
    pytest.param("uniform", None, id="uniform"),
    pytest.param("power", 4 / 3, id="power_4/3"),
    pytest.param("power", 1.15, id="power_1.15"),
]
SMOOTH = ["logistic", "laplace", "normal"]
kinds = pytest.mark.parametrize(("cdf", "p"), KINDS)

# SciPy's names, where it has the distribution; of a power law it knows F(z) = z^a as powerlaw(a).
SCIPY = {
    "logistic": lambda p: stats.logistic,
    "laplace": lambda p: stats.laplace,
    "normal": lambda p: stats.norm,
    "uniform": lambda p: stats.uniform,
    "power": lambda p: stats.powerlaw(1 / (p - 1)),
}


def cdf_of(cdf: str, p: float | None) -> oracles.MpCdf:
    return CDFS[cdf] if p is None else oracles.power(p)


def row(n: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(seed).standard_normal(n)


# ------------------------------------------------------------------------------------------- CDFs


@kinds
def test_cdf_is_scipys(cdf: str, p: float | None) -> None:
    F, reference = cdf_of(cdf, p), SCIPY[cdf](p)
    for z in (-30.0, -2.5, -0.1, 0.2, 0.5, 0.9, 1.7, 30.0):
        inside = not F.compact or 0 < z < 1
        assert float(F.cdf(z)) == pytest.approx(reference.cdf(z), rel=1e-13)
        assert float(F.pdf(z)) == pytest.approx(reference.pdf(z), rel=1e-13)
        if inside:
            assert float(F.log_cdf(z)) == pytest.approx(reference.logcdf(z), rel=1e-12)
            assert float(F.log_pdf(z)) == pytest.approx(reference.logpdf(z), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("cdf", SMOOTH)
def test_cdf_tails_stay_finite(cdf: str) -> None:
    F = CDFS[cdf]
    assert F.cdf(mp.ninf) == 0 and F.cdf(mp.inf) == 1
    assert mp.isfinite(F.log_cdf(-1e10)) and F.log_cdf(1e10) < 0
    assert mp.isfinite(F.log_pdf(-1e10)) and F.log_pdf(1e10) == F.log_pdf(-1e10)


# ------------------------------------------------------------------------------------- soft top-k


@kinds
@pytest.mark.parametrize("tau", [1.0, 0.3])
@pytest.mark.parametrize("k", [0.5, 3.0, 7.25, 11.0])
def test_soft_topk_is_brentqs(cdf: str, p: float | None, tau: float, k: float) -> None:
    x, F = row(12), SCIPY[cdf](p).cdf
    t = brentq(lambda t: F((x - t) / tau).sum() - k, -50, 50, xtol=1e-14)
    y, log_y, _ = oracles.soft_topk(x, k, tau, cdf, p)
    np.testing.assert_allclose(y, F((x - t) / tau), atol=1e-12)
    np.testing.assert_array_equal(y == 0, log_y == -np.inf)
    np.testing.assert_allclose(np.exp(log_y), y, rtol=1e-14)
    assert math.fsum(y) == pytest.approx(k, abs=1e-14)


@pytest.mark.parametrize("cdf", SMOOTH)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e9])
def test_threshold_in_a_wide_gap_is_the_middle(cdf: str, scale: float) -> None:
    # C is flat at k here, to hundreds of millions of digits; symmetry puts t half-way.
    x = scale * np.array([3.0, -1.0, 3.0, -1.0])
    y, log_y, t = oracles.soft_topk(x, 2, 0.01, cdf)
    assert t == scale
    # At twice the width z = 2 scale / tau. Nothing but log F is left to compare with.
    expected = float(CDFS[cdf].log_cdf(-2 * mp.mpf(scale) / mp.mpf(0.01)))
    np.testing.assert_array_equal(log_y[[1, 3]], expected)
    np.testing.assert_allclose(y, [1, 0, 1, 0], atol=1e-80)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_threshold_in_an_uneven_gap_is_laplaces_closed_form(k: int) -> None:
    x, tau = np.array([9.0, 8.97, 2.0, 1.99, -5.0]), 0.01
    with mpmath.workdps(3000):
        scores = [mpmath.mpf(float(e)) / mpmath.mpf(tau) for e in x]
        A = mpmath.fsum(mpmath.exp(-e) for e in scores[:k]) / 2
        B = mpmath.fsum(mpmath.exp(e) for e in scores[k:]) / 2
        expected = float(mpmath.mpf(tau) * (mpmath.log(B) - mpmath.log(A)) / 2)
    assert oracles.soft_topk(x, k, tau, "laplace")[2] == pytest.approx(expected, rel=1e-15)


def test_threshold_in_a_gap_of_compact_support_is_the_midpoint() -> None:
    x = [5.0, 4.0, 0.5, 0.0]
    for cdf, p in (("uniform", None), ("power", 4 / 3)):
        y, log_y, t = oracles.soft_topk(x, 2, 1.0, cdf, p)
        assert t == (0.5 + (4.0 - 1.0)) / 2
        np.testing.assert_array_equal(y, [1, 1, 0, 0])
        np.testing.assert_array_equal(log_y, [0, 0, -np.inf, -np.inf])


def test_a_root_on_a_kink_is_exact() -> None:
    y, log_y, t = oracles.soft_topk([0.15, 0.0, -0.3], 0.5, 0.3, "uniform")
    assert t == 0
    np.testing.assert_array_equal(y, [0.5, 0, 0])
    np.testing.assert_array_equal(log_y, [np.log(0.5), -np.inf, -np.inf])


@kinds
def test_equal_scores_share_k_and_may_be_counted(cdf: str, p: float | None) -> None:
    n = 6_290_000
    y, _, _ = oracles.soft_topk([0.3], 64, 1.0, cdf, p, counts=[n])
    assert y[0] == 64 / n
    many = oracles.soft_topk(np.repeat([0.4, 1.0, 0.4], [2, 3, 1]), 2.5, 0.3, cdf, p)
    few = oracles.soft_topk([0.4, 1.0], 2.5, 0.3, cdf, p, counts=[3, 3])
    np.testing.assert_array_equal(many[0], few[0][[0, 0, 1, 1, 1, 0]])
    assert many[2] == few[2]


@kinds
def test_ends_and_infinities(cdf: str, p: float | None) -> None:
    x = np.array([1.0, -np.inf, 0.3, np.inf, 0.1])
    y, log_y, _ = oracles.soft_topk(x, 2, 0.5, cdf, p)
    inner, _, _ = oracles.soft_topk(x[[0, 2, 4]], 1, 0.5, cdf, p)
    np.testing.assert_array_equal(y, [inner[0], 0, inner[1], 1, inner[2]])
    assert log_y[1] == -np.inf and log_y[3] == 0
    np.testing.assert_array_equal(oracles.soft_topk(x, 1, 0.5, cdf, p)[0], [0, 0, 0, 1, 0])
    np.testing.assert_array_equal(oracles.soft_topk(x, 4, 0.5, cdf, p)[0], [1, 0, 1, 1, 1])
    assert np.isnan(oracles.soft_topk(x, 0, 0.5, cdf, p)[0]).all()
    assert np.isnan(oracles.soft_topk([1.0, np.nan, 2.0], 3, 0.5, cdf, p)[0]).all()
    with pytest.raises(ValueError, match="finite"):
        oracles.soft_topk(x, 5, 0.5, cdf, p)
    np.testing.assert_array_equal(oracles.soft_topk(row(3), 0, 0.5, cdf, p)[0], np.zeros(3))
    np.testing.assert_array_equal(oracles.soft_topk(row(3), 3, 0.5, cdf, p)[0], np.ones(3))


# -------------------------------------------------------------------------------------- gradients


@kinds
def test_gradient_in_a_gap(cdf: str, p: float | None) -> None:
    x, v = np.array([40.0, 40.0, 60.0, 7.0, 7.0, 7.0, -3.0]), row(7, seed=5)
    dx, dk, dtau = oracles.soft_topk_grad(x, 3, 0.5, cdf, v, p)
    np.testing.assert_allclose(dx, 0, atol=1e-12)
    # A limit for tau -> 0. Logistic and Laplace miss it by e^(-10 / tau), 10 being the distance to
    # the next score; the normal CDF by O(tau), since its density is |z| times its tail.
    limit = (v[:2].mean() + v[3:6].mean()) / 2
    assert dk == pytest.approx(limit, abs=1e-3 if cdf == "normal" else 1e-8)
    assert abs(dtau) < 1e-10
    assert oracles.soft_topk_grad(x, 7, 0.5, cdf, v, p)[1:] == (0, 0)


# ----------------------------------------------------------------- programmes, PAV, Sinkhorn, masks


@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3, 1.15])
@pytest.mark.parametrize(("k", "tau", "scale"), [(4, 1.0, 1.0), (3.5, 0.3, 1.0), (7, 0.01, 1e4)])
def test_mask_pav_is_the_capped_simplex(p: float, k: float, tau: float, scale: float) -> None:
    for x in (row(15, seed=2, scale=scale), np.round(row(15, seed=2)) * scale):
        y = oracles.soft_topk(x, k, tau, "power", p)[0]
        np.testing.assert_allclose(oracles.mask_pav(x, k, tau, p), y, rtol=1e-12, atol=1e-14)


def test_magnitude_pav_at_p_2_is_the_closed_form() -> None:
    y = oracles.magnitude_pav([10.0, -6.0, 3.0, 1.0], 2, 0.5, 2.0)
    np.testing.assert_allclose(y, [10 / 1.5, -6 / 1.5, 0, 0], rtol=1e-15)
    # gamma = sum s / sum(1 + tau w) over the block {3, 2.9}, y = (s - gamma) / tau
    gamma = (3.0 + 2.9) / (1 + 0.5 + 1)
    y = oracles.magnitude_pav([10.0, -3.0, 2.9, 1.0], 2, 0.5, 2.0)
    np.testing.assert_allclose(y, [10 / 1.5, -(3 - gamma) / 0.5, (2.9 - gamma) / 0.5, 0], rtol=1e-13)


def test_magnitude_pav_keeps_its_digits_on_large_scores() -> None:
    y = oracles.magnitude_pav([1e4, -3.0], 1, 0.01, 1.15)
    assert y[0] + 0.01 * y[0] ** (1.15 - 1) == pytest.approx(1e4, rel=1e-15)


# ---------------------------------------------------------------------------------------- budgets


def budget_problem(by: str, whole: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Scores, costs, their order, and the cost of the first two, or somewhat more."""
    x, w = row(5), np.array([7.0, 6.0, 5.0, 3.0, 3.0])
    order = np.argsort(-x / (w if by == "value" else 1))
    return x, w, order, w[order][:2].sum() + (0 if whole else 0.3)


@kinds
@pytest.mark.parametrize("by", ["score", "value"])
@pytest.mark.parametrize("whole", [False, True])
def test_soft_budget_spends_it_and_its_gradient_is_a_difference_quotient(
    cdf: str, p: float | None, by: str, whole: bool
) -> None:
    x, w, _, budget = budget_problem(by, whole)
    v, tau, step = row(5, 1), 5.0, 1e-5
    y, _ = oracles.soft_budget(x, w, budget, tau, cdf, p, by)
    assert w @ y == pytest.approx(budget, rel=1e-14)
    point = np.array([*x, *w, budget, tau])

    def value(point: np.ndarray) -> float:
        x, w, (budget, tau) = point[:5], point[5:10], point[10:]
        return float(oracles.soft_budget(x, w, budget, tau, cdf, p, by)[0] @ v)

    want = [(value(point + step * e) - value(point - step * e)) / (2 * step) for e in np.eye(12)]
    dx, dw, dbudget, dtau = oracles.soft_budget_grad(x, w, budget, tau, cdf, v, p, by)
    np.testing.assert_allclose([*dx, *dw, dbudget, dtau], want, rtol=1e-6, atol=1e-8)


@kinds
@pytest.mark.parametrize("by", ["score", "value"])
def test_soft_budget_in_a_gap_follows_the_entries_next_to_it(cdf: str, p: float | None, by: str) -> None:
    x, w, order, budget = budget_problem(by, whole=True)
    v = row(5, 1)
    y, _ = oracles.soft_budget(x, w, budget, 1e-6, cdf, p, by)
    assert w @ y == pytest.approx(budget, rel=1e-14)
    price = oracles.soft_budget_grad(x, w, budget, 1e-6, cdf, v, p, by)[2]
    pair = order[1:3]
    want = v[pair].sum() / w[pair].sum() if by == "value" else (v[pair] / w[pair]).mean()
    assert price == pytest.approx(want, rel=1e-8)  # the normal CDF's is near its limit, and not there
