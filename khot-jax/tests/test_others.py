"""Ranks, sorts, quantiles, budgets, samples and users' CDFs, beside their definitions in float64."""

from __future__ import annotations

import doctest
import functools
import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import Array

import khot_jax as kj
from khot_jax import _order, _root
from operators import enable_x64

EVERY = pytest.mark.parametrize("cdf", oracle.CDFS)


def centred(cdf: str, z: np.ndarray) -> np.ndarray:
    law = oracle.CDFS[cdf]
    return law.cdf(z + (0.5 if law.compact else 0.0))


def scores(n: int, scale: float = 1.0) -> np.ndarray:
    return np.float32(scale * np.random.default_rng(n).standard_normal((3, n)))


@EVERY
@pytest.mark.parametrize("descending", [False, True])
def test_rank_is_its_definition(cdf: str, descending: bool) -> None:
    x, tau = scores(40), np.float32([0.01, 0.5, 3.0])
    x[0, :5] = 1.0  # ties
    wide = x.astype(np.float64) * (-1 if descending else 1)
    z = (wide[:, :, None] - wide[:, None, :]) / tau[:, None, None]
    want = 0.5 + centred(cdf, z).sum(-1)
    got = kj.soft_rank(x, tau=tau, cdf=cdf, descending=descending)
    np.testing.assert_allclose(got, want, rtol=2e-6)


@EVERY
def test_sort_has_the_counts_of_its_places(cdf: str) -> None:
    x, tau = scores(40), np.float32([0.02, 0.5, 3.0])
    for descending in (False, True):
        s = np.asarray(kj.soft_sort(x, tau=tau, cdf=cdf, descending=descending), np.float64)
        sign = -1 if descending else 1
        z = sign * (s[:, :, None] - x[:, None, :]) / tau[:, None, None]
        count = centred(cdf, z).sum(-1)
        # a count is as exact as the digits of s allow
        slack = 1e-4 + 40 * 2.0**-22 * np.abs(s) / tau[:, None]
        assert (np.abs(count - (np.arange(40) + 0.5)) <= slack).all()
        assert (sign * np.diff(s) >= -1e-6).all()


@pytest.mark.parametrize("pure", [False, True])
def test_sort_between_far_entries_keeps_its_digits(pure: bool) -> None:
    """In gaps far wider than tau the sums of exponentials underflow, their logarithms do not."""
    body = functools.partial(_order._order_body, law=_order.Order("sort", False))
    sort = jax.jit(lambda x: body(x, jnp.full(x.shape[:-1], 0.1))[0] if pure else kj.soft_sort(x, tau=0.1))
    x = jnp.float32([[1e6, 0.0, 0.3, -1e9, -1e9, 2e5]])
    got = sort(x)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[0, [4, 5]], [2e5, 1e6], rtol=1e-6)
    small = np.float64([0.0, 0.3])
    count = centred("laplace", (np.asarray(got[0, 2:4], np.float64)[:, None] - small) / 0.1).sum(-1)
    np.testing.assert_allclose(count, [0.5, 1.5], atol=2e-6)
    jac = jax.jit(jax.jacrev(sort))(x[0])
    assert np.isfinite(jac).all()
    np.testing.assert_allclose(jac.sum(-1), 1, rtol=1e-5)  # s moves along with x


@pytest.mark.parametrize("f", [kj.soft_rank, kj.soft_sort])
@pytest.mark.parametrize("cdf", ["laplace", "logistic"])
def test_masked_infinite_and_bad_rows(f: Any, cdf: str) -> None:
    x = scores(8)
    x[0, 2], x[1, 0], x[1, 1], x[1, 5] = np.nan, np.inf, -np.inf, np.inf
    out = np.asarray(f(x, cdf=cdf))
    assert np.isnan(out[0]).all() and not np.isnan(out[1:]).any()
    if f is kj.soft_rank:
        assert out[1, 0] == out[1, 5] == 7.5 and out[1, 1] == 1
    else:
        assert (out[1, [0, 6, 7]] == [-np.inf, np.inf, np.inf]).all()
    assert np.isnan(f(x[2], cdf=cdf, tau=jnp.array(-1.0))).all()
    where = np.array([True, False, True, True, False, True, True, True])
    x[2, 1] = np.nan
    masked, alone = np.asarray(f(x[2], cdf=cdf, where=where)), np.asarray(f(x[2][where], cdf=cdf))
    if f is kj.soft_rank:
        assert (masked[~where] == 0).all()
        np.testing.assert_allclose(masked[where], alone, rtol=1e-6)
    else:
        np.testing.assert_allclose(masked, [*alone, 0, 0], rtol=2e-6, atol=1e-6)
    g = jax.grad(lambda x: (f(x, cdf=cdf, where=where) ** 2).sum())(x[2])
    assert np.isfinite(g).all() and (g[~where] == 0).all()


@pytest.mark.parametrize("f", [kj.soft_rank, kj.soft_sort])
@pytest.mark.parametrize("cdf", ["laplace", "logistic"])
def test_modes_agree_at_ties_and_infinities(f: Any, cdf: str) -> None:
    x, tau = jnp.float32([1.0, 1.0, 0.9, -np.inf, np.inf, 1.0]), jnp.float32(0.1)
    of = functools.partial(f, cdf=cdf)
    modes = [mode(lambda x, tau: of(x, tau=tau), (0, 1)) for mode in (jax.jacfwd, jax.jacrev)]
    (forward, forward_tau), (reverse, reverse_tau) = (jax.jit(jac)(x, tau) for jac in modes)
    np.testing.assert_allclose(forward, reverse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(forward_tau, reverse_tau, rtol=1e-5, atol=1e-5)
    assert (np.asarray(forward)[:, 3:5] == 0).all()
    if f is kj.soft_rank:
        finite = np.float64([1.0, 1.0, 0.9, 1.0])
        law = oracle.CDFS[cdf]
        density = np.exp(law.log_pdf((finite[:, None] - finite) / 0.1)) / 0.1
        want = np.diag(density.sum(-1)) - density
        np.testing.assert_allclose(np.asarray(forward)[np.ix_([0, 1, 2, 5], [0, 1, 2, 5])], want, atol=1e-4)


def test_quantile_is_like_numpys() -> None:
    x = scores(21)
    q = jnp.array([0.0, 0.25, 0.5, 1.0])
    got = kj.soft_quantile(x, q, tau=1e-4)
    assert got.shape == (4, 3)
    np.testing.assert_allclose(got, np.quantile(x, q, axis=-1), atol=1e-3)
    np.testing.assert_allclose(kj.soft_quantile(x.T, 0.5, 0, tau=1e-4), np.median(x, -1), atol=1e-3)
    where = np.arange(21) < 11
    np.testing.assert_allclose(
        kj.soft_quantile(x, 0.3, where=where), kj.soft_quantile(x[:, :11], 0.3), rtol=1e-5
    )
    assert np.isnan(kj.soft_quantile(x, jnp.array(1.5))).all()
    x[0, :3], x[1, 0] = np.inf, np.nan
    got = kj.soft_quantile(x, 1.0)
    assert got[0] == np.inf and np.isnan(got[1]) and np.isfinite(got[2])
    x[0, :12] = -np.inf
    assert kj.soft_quantile(x[0], 0.4) == -np.inf
    assert np.isnan(kj.soft_quantile(x[:, :0], 0.5)).tolist() == [True] * 3
    np.testing.assert_array_equal(
        kj.soft_quantile(x[2], [0.2, 0.5]), kj.soft_quantile(x[2], jnp.array([0.2, 0.5]))
    )


@pytest.mark.parametrize(
    ("cdf", "pure"), [*((cdf, False) for cdf in oracle.CDFS), ("logistic", True), ("uniform", True)]
)
def test_budget_spends_what_it_has(cdf: str, pure: bool) -> None:
    rng = np.random.default_rng(0)
    law, F = oracle.CDFS[cdf], kj.cdfs.resolve(cdf)
    solve = jax.jit(lambda x, w, budget: _root.solve(x, w, budget, jnp.ones(4), F))
    for n in (50, 1500):
        for scale in (0.1, 1.0, 30.0):
            x = np.float32(scale * rng.standard_normal((4, n)))
            w = np.float32(np.exp(np.array([0, 1, 3, 6])[:, None] * rng.standard_normal((4, n))))
            total = w.sum(-1, dtype=np.float64)
            budget = np.float32(total * [0.1, 0.3, 0.5, 0.9])
            if pure:
                root = solve(x, w, budget)
                assert int(root.passes.max()) <= 10
                hi, lo = (np.asarray(each, np.float64)[:, None] for each in root[:2])
                y = law.cdf((x - hi) - lo)
            else:
                y = np.asarray(kj.soft_budget(x, w, budget, cdf=cdf), np.float64)
            spent = (w * y).sum(-1)
            allowed = w.max(-1) * (
                1e-6 * np.maximum(1, np.minimum(budget, total - budget) / w.max(-1)) + n * 2**-24
            )
            assert (np.abs(spent - budget) <= allowed).all()


def test_budget_of_equal_costs_is_topk() -> None:
    x = scores(30)
    np.testing.assert_allclose(kj.soft_budget(x, np.full(30, 2.0), 12.0), kj.soft_topk(x, 6.0), atol=3e-7)
    where = np.arange(30) < 20
    w = np.where(where, 1.0, np.nan)
    np.testing.assert_allclose(
        kj.soft_budget(x, w, 5.0, where=where), kj.soft_topk(x, 5.0, where=where), atol=3e-7
    )
    assert np.isnan(kj.soft_budget(x, -np.ones(30), jnp.array(2.0))).all()
    assert np.isnan(kj.soft_budget(x, np.ones(30), jnp.array(31.0))).all()
    assert (kj.soft_budget(x, np.ones(30), 30.0) == 1).all() and (
        kj.soft_budget(x, np.ones(30), 0) == 0
    ).all()


@pytest.mark.parametrize("pure", [False, True])
def test_free_entries_are_selected_without_a_budget(pure: bool) -> None:
    """By a budget of 0, if none of them costs anything."""
    x = jnp.float32([[1.0, -2.0], [1.0, -2.0], [1.0, -np.inf]])
    w, want = jnp.float32([[0, 0], [0, 1], [0, 1]]), [[1, 1], [0, 0], [1, 0]]
    if pure:
        hi = _root.solve(x, w, jnp.zeros(3), jnp.ones(3), kj.cdfs.Logistic()).hi
        assert np.sign(hi).tolist() == [-1, 1, -1]
    else:
        assert kj.soft_budget(x, w, 0.0).tolist() == want


# ------------------------------------------------------------------------------------------- samples


def test_samples_have_k_ones_and_the_probabilities_of_the_soft_topk() -> None:
    """40,000 draws. Each of 4 × 12 means is off by 5.5 standard deviations once in 26 million."""
    logits = jnp.asarray(2 * np.random.default_rng(0).standard_normal((4, 12)), jnp.float32)
    logits = logits.at[0, :2].set(jnp.array([-jnp.inf, jnp.inf]))
    k = jnp.array([1.0, 3.0, 2.4, 11.0])
    draws = 40_000
    keys = jax.random.split(jax.random.key(3), draws)
    x = np.asarray(jax.jit(jax.vmap(lambda key: kj.sample_khot(key, logits, k, tau=0.8)))(keys))
    assert set(np.unique(x)) == {0.0, 1.0}
    sizes = x.sum(-1)
    assert (sizes[:, [0, 1, 3]] == [1, 3, 11]).all() and set(np.unique(sizes[:, 2])) == {2.0, 3.0}
    pi = np.asarray(kj.soft_topk(logits, k, tau=0.8), np.float64)
    assert (np.abs(x.mean(0) - pi) <= 5.5 * np.sqrt(pi * (1 - pi) / draws) + 1e-6).all()


def test_samples_have_the_gradient_of_the_soft_topk() -> None:
    logits, v = jnp.asarray(scores(10)), jnp.asarray(scores(10)[::-1])
    key = jax.random.key(0)
    hard = jax.jit(jax.grad(lambda x: (kj.sample_khot(key, x, 3) * v).sum()))(logits)
    np.testing.assert_allclose(hard, jax.grad(lambda x: (kj.soft_topk(x, 3) * v).sum())(logits), atol=1e-6)
    relaxed = kj.sample_khot(key, logits, 3, tau=0.5, hard=False)
    np.testing.assert_allclose(relaxed.sum(-1), 3, atol=2e-6)
    assert not np.array_equal(relaxed, kj.sample_khot(jax.random.key(1), logits, 3, tau=0.5, hard=False))
    columns = jax.jit(lambda x: kj.sample_khot(key, x, 1, 0))(logits.astype(jnp.bfloat16))
    assert columns.dtype == jnp.bfloat16 and (columns.sum(0) == 1).all()
    assert kj.sample_khot(key, jnp.zeros((2, 1)), 1).tolist() == [[1.0], [1.0]]
    assert kj.sample_khot(key, jnp.zeros((0, 5)), 2).shape == (0, 5)


# ------------------------------------------------------------------------------------------- the package


@dataclass(frozen=True)
class Student(kj.cdfs.CDF):
    """Student's distribution with 2 degrees of freedom."""

    symmetric = True

    def cdf(self, z: Array) -> Array:
        root = jnp.sqrt(2 + z * z)
        return jnp.where(z < 0, 1 / (root * (root + jnp.abs(z))), 0.5 + z / (2 * root))


class Lopsided(kj.cdfs.CDF):
    """Gumbel's distribution."""

    def cdf(self, z: Array) -> Array:
        return jnp.exp(-jnp.exp(-z))

    def sf(self, z: Array) -> Array:
        return -jnp.expm1(-jnp.exp(-z))


@pytest.mark.parametrize("F", [Student(), Lopsided()])
def test_cdfs_of_your_own(F: kj.cdfs.CDF) -> None:
    x = jnp.asarray(scores(25, 3.0))
    k, v = jnp.array([1.0, 5.5, 20.0]), x[::-1]

    def f(k: Array) -> tuple[Array, Array]:
        y = kj.soft_topk(x, k, cdf=F)
        return y.sum(-1), (y * v).sum(-1)

    (total, _), (_, slope) = jax.jit(lambda k: jax.jvp(f, (k,), (jnp.ones(3),)))(k)
    np.testing.assert_allclose(total, k, atol=1e-5)
    with enable_x64(True):
        x, v, k = (jnp.asarray(np.asarray(each), jnp.float64) for each in (x, v, k))
        up, down = jax.jit(lambda k: jax.vmap(lambda e: f(k + e)[1])(jnp.array([1e-4, -1e-4])))(k)
        np.testing.assert_allclose(slope, (up - down) / 2e-4, rtol=2e-3, atol=1e-4)
    assert Student() == Student() and hash(Student()) == hash(Student())


@pytest.mark.parametrize("name", ["_order", "_sample", "_topk", "cdfs"])
def test_docstrings_run(name: str) -> None:
    module = importlib.import_module(f"khot_jax.{name}")
    found = doctest.testmod(module, extraglobs={"jax": jax, "jnp": jnp, "khot_jax": kj})
    assert found.failed == 0 and found.attempted > 0


def test_pure_engine_says_once_that_it_serves() -> None:
    code = """
import warnings, jax.numpy as jnp
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import khot_jax._compiled as compiled
    compiled.Path = lambda *_: type("Nowhere", (), {"parent": property(lambda s: s), "glob": lambda *_: []})()
    import khot_jax
    for k in (1, 2):
        print(khot_jax.soft_topk(jnp.array([0.0, 1.0, 400.0]), k).sum(), khot_jax.instruction_set())
print([str(each.message)[:60] for each in said])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "1.0 None",
        "2.0 None",
        "['khot_jax runs without its compiled CPU kernels, on the pure ']",
    ]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be taken away")
@pytest.mark.skipif(kj.instruction_set() is None, reason="of the compiled kernels")
def test_no_bit_depends_on_the_number_of_threads(tmp_path: Path) -> None:
    code = """
import hashlib, os, sys
if sys.argv[1] == "1":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np, khot_jax
assert khot_jax.instruction_set()
for shape in ((500, 64), (300, 1000), (1, 300_000)):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    y, pull = jax.vjp(jax.jit(lambda x, k: khot_jax.soft_topk(x, k)), x, 7.0)
    print(hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in (y, pull(x)[0]))).hexdigest())
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    told = [
        subprocess.run(  # elsewhere, or the sources here would be what is imported
            [sys.executable, "-c", code, threads],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "all")
    ]
    assert told[0] == told[1] and len(told[0].splitlines()) == 3


def test_torch_is_not_imported() -> None:
    code = "import sys, khot_jax; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
