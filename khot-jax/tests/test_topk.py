"""The soft top-k: the contract on rows that are hard, and rows that have no ordinary answer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest

import khot_jax as kj
from khot_jax import _root
from khot_jax.cdfs import resolve
from operators import enable_x64

EVERY = pytest.mark.parametrize("cdf", oracle.CDFS)
EPS = 2.0**-23


def cases(n: int, tau: tuple[float, ...] = (1.0, 0.01)) -> tuple[np.ndarray, ...]:
    """The adversarial rows, at every k and tau."""
    every = [
        (row, np.float32(k), np.float32(t))
        for _, row in oracle.adversarial(n)
        for t in tau
        for k in (oracle.ks(n) if n <= 1000 else (n / 100, n // 2, n - 0.5))
    ]
    return tuple(np.stack(each) for each in zip(*every, strict=True))


@functools.cache
def rows(cdf: str, n: int) -> tuple[np.ndarray, ...]:
    """The cases, incoming gradients, and the oracle's answers."""
    law = oracle.CDFS[cdf]
    x, k, tau = cases(n)
    v = np.random.default_rng(3).standard_normal(x.shape).astype(np.float32)
    answers = [oracle.soft_topk(*case, law, row) for *case, row in zip(x, k, tau, v, strict=True)]
    return (
        x,
        k,
        tau,
        v,
        *(np.stack([getattr(a, name) for a in answers]) for name in ("y", "log_y", "dx", "dk")),
    )


def check_values(got: np.ndarray, y: np.ndarray, k: np.ndarray) -> None:
    """The contract of values."""
    n = y.shape[-1]
    allowed = 1e-6 * np.maximum(1, np.minimum(k, n - k)) + n * EPS / 2
    assert (np.abs(got.sum(-1) - k) <= allowed).all()
    assert np.abs(got - y).max() <= 5e-7


def pure(F: kj.cdfs.CDF, x: np.ndarray, k: np.ndarray, tau: np.ndarray) -> tuple[np.ndarray, int]:
    """What the engine that serves other platforms makes of rows, and its passes over them."""

    @jax.jit
    def solve(x: Any, k: Any, tau: Any) -> tuple[Any, Any]:
        root = _root.solve(x, None, k, tau, F)
        z = ((x - root.hi[:, None]) - root.lo[:, None]) / tau[:, None]
        return F.cdf(z), root.passes

    y, passes = solve(x, k, tau)
    return np.asarray(y, np.float64), int(passes.max())


@EVERY
@pytest.mark.parametrize("n", [64, 1000])
def test_contract(cdf: str, n: int) -> None:
    x, k, tau, v, y, log_y, dx, dk = rows(cdf, n)
    f = jax.jit(lambda x, k, tau: kj.soft_topk(x, k, tau=tau, cdf=cdf))
    got = np.asarray(f(x, k, tau), np.float64)
    check_values(got, y, k)
    got, passes = pure(resolve(cdf), x, k, tau)
    check_values(got, y, k)
    assert passes <= 10

    logs = np.asarray(jax.jit(lambda *a: kj.log_soft_topk(*a[:2], tau=a[2], cdf=cdf))(x, k, tau), np.float64)
    smooth = cdf != "uniform"  # a logarithm at the edge of a support has no digits
    if smooth:
        np.testing.assert_allclose(logs, log_y, rtol=1e-5, atol=2e-7)

    grad = jax.jit(jax.grad(lambda *a: (f(*a) * v).sum(), (0, 1, 2)))
    got_dx, got_dk, got_dtau = (np.asarray(g, np.float64) for g in grad(x, k, tau))
    # relative to what a float's rounding of v f/tau is
    size = np.abs(dx).max(-1) + 1e-3 * np.abs(v).max(-1) / tau
    assert (np.abs(got_dx - dx).max(-1) <= 5e-5 * size).all()
    assert np.isfinite(got_dtau).all()
    # In a wide gap the oracle's densities have no digits left: test_dk_in_a_wide_gap.
    ordered = -np.sort(-x, -1)
    at = np.minimum(np.ceil(k).astype(int), n - 1)[:, None]
    gap = np.take_along_axis(ordered, at - 1, -1) - np.take_along_axis(ordered, at, -1)
    ordinary = (gap[:, 0] < 1e3 * tau) | (k != np.ceil(k)) | (cdf != "normal")
    np.testing.assert_allclose(got_dk[ordinary], dk[ordinary], rtol=1e-5, atol=5e-6)


@EVERY
def test_dtau(cdf: str) -> None:
    x, k, _, v, *_ = rows(cdf, 64)
    x, k, v = x[:14], k[:14], v[:14]
    law = oracle.CDFS[cdf]
    for scale in (0.3, 2.0):
        x_scaled = (x * np.float32(2 * scale / np.abs(x).max())).astype(np.float32)
        tau = np.full(len(k), scale, np.float32)
        cases = zip(x_scaled, k, tau, v, strict=True)
        want = [oracle.soft_topk(row, one, scale, law, incoming).dtau for row, one, scale, incoming in cases]
        f = lambda t, x=x_scaled: (kj.soft_topk(x, k, tau=t, cdf=cdf) * v).sum()
        np.testing.assert_allclose(jax.jit(jax.grad(f))(tau), want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_pure_engine_needs_at_most_ten_passes_over_long_rows(cdf: str) -> None:
    law = oracle.CDFS[cdf]
    x, k, _ = cases(10_000, (1.0,))
    tau = np.where(np.arange(len(k)) % 2, 0.01, 1.0).astype(np.float32)
    got, passes = pure(resolve(cdf), x, k, tau)
    check_values(got, np.stack([oracle.soft_topk(*case, law).y for case in zip(x, k, tau, strict=True)]), k)
    assert passes <= 10


@pytest.mark.parametrize("p", [1.15, 3.0])
def test_pure_engine_needs_at_most_ten_passes_of_powers(p: float) -> None:
    """Densities are steep at one end of a support or infinite at the other, which multiplies roundings."""
    n, law = 1000, oracle.power(p)
    x, k, tau = cases(n)
    got, passes = pure(kj.cdfs.Power(p), x, k, tau)
    y = np.stack([oracle.soft_topk(*case, law).y for case in zip(x, k, tau, strict=True)])
    assert np.abs(got - y).max() <= 2e-6
    assert (np.abs(got.sum(-1) - k) <= 2e-6 * np.maximum(1, np.minimum(k, n - k)) + k * EPS / (p - 1)).all()
    assert passes <= 10


# ------------------------------------------------------------------------------------------- wide gaps

mp = mpmath.MPContext()
mp.dps = 40


def dk_exactly(x: np.ndarray, k: int, tau: float, v: np.ndarray, cdf: str) -> float:
    """v̄ in the gap after the k-th entry, in 40 digits, with t where log A = log B."""
    up = [mp.mpf(float(a)) / tau for a in x[:k]]
    down = [mp.mpf(float(a)) / tau for a in x[k:]]
    tail = {
        "logistic": lambda z: 1 / (1 + mp.exp(z)),
        "laplace": lambda z: mp.exp(-z) / 2,
        "normal": lambda z: mp.erfc(z / mp.sqrt(2)) / 2,
    }[cdf]
    pdf = {
        "logistic": lambda z: tail(z) * (1 - tail(z)),
        "laplace": lambda z: mp.exp(-z) / 2,
        "normal": lambda z: mp.exp(-z * z / 2) / mp.sqrt(2 * mp.pi),
    }[cdf]
    low, high = max(down), min(up)
    for _ in range(160):
        t = (low + high) / 2
        A, B = mp.fsum(tail(a - t) for a in up), mp.fsum(tail(t - b) for b in down)
        low, high = (t, high) if B > A else (low, t)
    f = [pdf(abs(a - t)) for a in (*up, *down)]
    return float(mp.fsum(p * float(c) for p, c in zip(f, v, strict=True)) / mp.fsum(f))


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
def test_dk_in_a_wide_gap(cdf: str, pure: bool) -> None:
    """Neighbours of the gap differ by so much that it matters, and so far from t by less than z resolves."""
    widths = [60.0, 1e4, 1e8, 1e11]
    if cdf == "normal" and not pure and kj.instruction_set():
        del widths[2:]  # z² has no digits left for them in the compiled kernels
    near = np.array([0.0, 0.4, 1.1], np.float32)
    rows = [[*near / (width if cdf == "normal" else 1), -width, -width] for width in widths]
    x = np.array(rows, np.float32)
    v = np.float32([1.0, -2.0, 3.0, 0.5, 4.0])
    want = [dk_exactly(row, 3, 1.0, v, cdf) for row in x]
    F = type("Pure", (type(resolve(cdf)),), {})() if pure else cdf  # a class of one's own has no kernels
    got = jax.jit(jax.grad(lambda k: (kj.soft_topk(x, k, cdf=F) * v).sum()))(jnp.full(len(x), 3.0))
    np.testing.assert_allclose(got, want, rtol=2e-5)


# ------------------------------------------------------------------------------------------- bad rows


@pytest.mark.parametrize("f", [kj.soft_topk, kj.log_soft_topk])
@pytest.mark.parametrize("cdf", ["logistic", "normal"])
def test_second_derivatives_in_a_wide_gap(f: Any, cdf: str) -> None:
    """Those in k are infinite, and 0 is returned."""
    x, v = jnp.float32([1e3, -1e3, 300, 2, 1, 0]), jnp.float32([0.3, -1, 2, 0.5, -0.7, 1.1])
    loss = lambda x, k, tau: (f(x, k, tau=tau, cdf=cdf) * v).sum()
    hessian = jax.jit(jax.hessian(loss, (0, 1, 2)))(x, 2.0, 0.1)
    assert all(np.isfinite(each).all() for each in jax.tree.leaves(hessian))


def test_infinite_scores_masks_and_bad_rows() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((7, 12)), jnp.float32)
    x = x.at[0, 0].set(jnp.nan).at[1, :3].set(-jnp.inf).at[2, 0].set(jnp.inf).at[3, :5].set(jnp.inf)
    k = jnp.array([4.0, 4.0, 4.0, 4.0, -1.0, 13.0, jnp.nan])
    v = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    bad = np.array([True, False, False, True, True, True, True])
    for f in (kj.soft_topk, kj.log_soft_topk, kj.topk_mask):
        assert (np.isnan(f(x, k)).all(-1) == bad).all()
        assert (np.isnan(f(x, k)).any(-1) == bad).all()
    y, pull = jax.vjp(lambda x, k: kj.soft_topk(x, k), x, k)
    np.testing.assert_allclose(y.sum(-1)[~bad], 4, atol=4e-6)
    assert (y[1, :3] == 0).all() and y[2, 0] == 1
    dx, dk = pull(v)
    assert np.isfinite(dx[~bad]).all() and np.isfinite(dk[~bad]).all() and np.isnan(dx[bad]).any(-1).all()
    assert (dx[1, :3] == 0).all() and dx[2, 0] == 0
    assert np.isnan(kj.soft_topk(x[4], 4.0, tau=jnp.array(-1.0))).all()
    # what is masked is ignored, whatever it is
    where = jnp.arange(12) >= 3
    np.testing.assert_array_equal(
        kj.soft_topk(x[1], 4.0, where=where)[3:],
        kj.soft_topk(x.at[1, :3].set(jnp.nan)[1], 4.0, where=where)[3:],
    )
    np.testing.assert_allclose(
        kj.soft_topk(x[1], 4.0, where=where)[3:], kj.soft_topk(x[1, 3:], 4.0), atol=1e-6
    )
    g = jax.grad(lambda x: (kj.soft_topk(x, 4.0, where=where) * v[1]).sum())(x.at[1, :3].set(jnp.nan)[1])
    assert (g[:3] == 0).all() and np.isfinite(g).all() and (g[3:] != 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_none_and_all(dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 9)), dtype)
    for k, want in ((0, 0.0), (9, 1.0), (jnp.array([0, 9, 0]), np.array([[0.0], [1.0], [0.0]]))):
        y, dx = jax.value_and_grad(lambda x, k=k: kj.soft_topk(x, k).astype(jnp.float32).sum())(x)
        assert float(y) == np.broadcast_to(want, x.shape).sum()
        assert (dx == 0).all()
    assert kj.soft_topk(jnp.zeros((4, 0)), 0).shape == (4, 0)
    assert kj.soft_topk(jnp.zeros((0, 4)), 2).shape == (0, 4)
    assert kj.soft_topk(jnp.ones((2, 1)), 0.25).tolist() == [[0.25], [0.25]]


def test_hard_is_the_mask_with_the_gradient_of_the_soft_one() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 30)), jnp.float32).round(1)
    v = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape), jnp.float32)
    y = kj.soft_topk(x, 7, hard=True)
    np.testing.assert_array_equal(y, kj.topk_mask(x, 7))
    # ties go to the lowest index: a stable sort
    want = np.zeros(x.shape)
    np.put_along_axis(want, np.argsort(-np.asarray(x), -1, kind="stable")[:, :7], 1, -1)
    np.testing.assert_array_equal(y, want)
    soft, hard = (jax.grad(lambda x, h=h: (kj.soft_topk(x, 7, hard=h) * v).sum())(x) for h in (False, True))
    np.testing.assert_array_equal(soft, hard)
    assert (jax.grad(lambda x: (kj.topk_mask(x, 7) * v).sum())(x) == 0).all()
    jitted = jax.jit(kj.topk_mask)
    for k in (0, 1, 2.5, 29, 30):
        assert (jitted(x, k).sum(-1) == int(k + 0.5)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_float32_rounded_once(dtype: str) -> None:
    for n in (50, 700):
        x = jnp.asarray(3 * np.random.default_rng(0).standard_normal((4, n)), dtype)
        y = kj.soft_topk(x, n / 10)
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, kj.soft_topk(x.astype(jnp.float32), n / 10).astype(dtype))
        g = jax.grad(lambda x, n=n: (kj.soft_topk(x, n / 10) ** 2).astype(jnp.float32).sum())(x)
        assert g.dtype == x.dtype and np.isfinite(np.asarray(g, np.float32)).all()


@EVERY
def test_float64_is_exact_to_its_digits(cdf: str) -> None:
    with enable_x64(True):
        f = jax.jit(lambda x, k: kj.soft_topk(x, k, tau=0.3, cdf=cdf))
        for n in (64, 1500):  # of which a sample is sorted
            x = np.random.default_rng(n).standard_normal(n) * 5
            k = np.array([1.0, n / 10 + 0.5, n - 1.0])
            y = np.asarray(f(np.broadcast_to(x, (3, n)), k))
            assert y.dtype == np.float64
            want = [oracle.soft_topk(x, each, 0.3, oracle.CDFS[cdf]).y for each in k]
            np.testing.assert_allclose(y, want, atol=2e-12)
            allowed = 1e-12 * np.maximum(1, np.minimum(k, n - k)) + n * 2.0**-53
            assert (np.abs(y.sum(-1) - k) <= allowed).all()


def test_smallest_and_other_axes() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 20, 2)), jnp.float32)
    np.testing.assert_allclose(
        kj.soft_topk(x, 3, axis=1), jnp.moveaxis(kj.soft_topk(jnp.moveaxis(x, 1, -1), 3), -1, 1), atol=1e-7
    )
    np.testing.assert_array_equal(kj.soft_topk(x, 3, 1, largest=False), kj.soft_topk(-x, 3, 1))
    k = jnp.arange(1.0, 7).reshape(3, 2)
    np.testing.assert_allclose(kj.soft_topk(x, k, 1).sum(1), k, rtol=2e-6)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: kj.soft_topk(x, 5), ValueError, "k must lie in .0, 4., but got 5"),
        (lambda x: kj.soft_topk(x, -0.5), ValueError, "k must lie in"),
        (lambda x: kj.soft_topk(x, 2, tau=0), ValueError, "tau must lie in .0, inf., but got 0"),
        (lambda x: kj.soft_topk(x, 2, cdf="cauchy"), ValueError, "cdf must be one of"),
        (lambda x: kj.soft_topk(x, 2, cdf=3), TypeError, "cdf must be a name"),
        (
            lambda x: kj.soft_topk(x, jnp.ones(3)),
            ValueError,
            "k must broadcast to the shape .2,. of the batch",
        ),
        (lambda x: kj.soft_topk(x.astype(int), 2), TypeError, "floating-point dtype, but got int32"),
        (lambda x: kj.soft_topk(x, 2, axis=2), ValueError, "axis 2 is out of bounds"),
        (lambda x: kj.soft_topk(x, 2, where=jnp.ones(4)), TypeError, "where must hold True and False"),
        (lambda x: kj.soft_topk(x, 2, where=jnp.ones(3, bool)), ValueError, "where must broadcast"),
        (lambda x: kj.soft_topk(x, 2, hard=1), TypeError, "hard must be True or False"),
        (lambda x: kj.soft_budget(x, x, -1), ValueError, "budget must lie in"),
        (lambda x: kj.soft_quantile(x, 1.5), ValueError, "q must lie in .0, 1."),
        (lambda x: kj.cdfs.Power(4), ValueError, "p must lie in"),
        (lambda x: kj.soft_topk(x, None), TypeError, "k must be a real number"),
        (lambda x: kj.soft_topk(x, 2, tau="0.5"), TypeError, "tau must be a real number"),
        (lambda x: kj.soft_quantile(x, jnp.array([True])), TypeError, "q must be a real number"),
    ],
)
def test_errors_name_the_argument(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(jnp.ones((2, 4)))
