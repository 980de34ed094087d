"""jit, grad, jvp, vmap, hessian, scan, checkpoint, shards: each operator under each of them."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import khot_jax as kj
from operators import OPERATORS, arguments, enable_x64

EVERY = pytest.mark.parametrize("name", OPERATORS)


def directions(args: tuple[Array, ...], seed: int = 1) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in args)


def along(f: Any, args: tuple[Array, ...], moves: tuple[Array, ...], e: float = 1e-5) -> Any:
    """Central differences."""
    up = f(*(a + e * m for a, m in zip(args, moves, strict=True)))
    down = f(*(a - e * m for a, m in zip(args, moves, strict=True)))
    return jax.tree.map(lambda a, b: (a - b) / (2 * e), up, down)


@EVERY
def test_derivatives_are_differences_in_both_modes(name: str) -> None:
    """In float64; for a smooth operator those of its gradients as well, which are second derivatives."""
    with enable_x64(True):
        f, _, smooth = OPERATORS[name]
        args = arguments(name, dtype=jnp.float64)
        (v,) = directions((jax.eval_shape(f, *args),), 2)

        def values(*args: Array) -> Any:
            out, pull = jax.vjp(f, *args)
            return out, pull(v) if smooth else ()

        moves = directions(args)
        (out, gradients), tangents = jax.jit(lambda args, moves: jax.jvp(values, args, moves))(args, moves)
        assert out.dtype == jnp.float64
        differences = along(jax.jit(values), args, moves)
        np.testing.assert_allclose(tangents[0], differences[0], rtol=2e-6, atol=1e-8)
        for got, want in zip(tangents[1], differences[1], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
        back = jax.jit(lambda args, given: jax.vjp(values, *args)[1](given))
        dot = lambda a, b: sum(map(jnp.vdot, jax.tree.leaves(a), jax.tree.leaves(b)))
        first = back(args, (v, jax.tree.map(jnp.zeros_like, gradients)))
        np.testing.assert_allclose(dot(first, moves), jnp.vdot(v, tangents[0]), rtol=1e-9, atol=1e-10)
        if not smooth:
            return
        for got, want in zip(gradients, first, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
        # reverse over reverse, which transposes pull
        w = directions(gradients, 3)
        second = back(args, (jnp.zeros_like(v), w))
        np.testing.assert_allclose(dot(second, moves), dot(w, tangents[1]), rtol=1e-7)


@pytest.mark.parametrize("name", ["soft_topk logistic", "soft_budget", "soft_rank laplace", "log_soft_topk"])
def test_forward_is_reverse_and_hessians_are_symmetric(name: str) -> None:
    f, args = OPERATORS[name][0], arguments(name)
    of_x = lambda x: f(x, *args[1:])
    np.testing.assert_allclose(jax.jacfwd(of_x)(args[0]), jax.jacrev(of_x)(args[0]), atol=3e-6)
    v = directions(args[:1])[0]
    h = jax.jit(jax.hessian(lambda x: jnp.vdot(of_x(x), v)))(args[0])
    np.testing.assert_allclose(h, h.T, atol=2e-5)
    assert np.abs(h).max() > 1e-2


@EVERY
def test_vmap_in_vmap_is_a_loop(name: str) -> None:
    f = OPERATORS[name][0]
    args = arguments(name)
    scale = 1 + 0.1 * jnp.arange(6.0).reshape(2, 3)
    x = args[0] * scale[..., None]
    g = jax.grad(lambda x, *rest: (f(x, *rest) ** 2).sum())
    both = jax.vmap(jax.vmap(lambda x, tau: (f(x, *args[1:-1], tau), g(x, *args[1:-1], tau))))
    values, gradients = jax.jit(both)(x, scale)
    one = jax.jit(lambda x, tau: (f(x, *args[1:-1], tau), g(x, *args[1:-1], tau)))
    for i in range(2):
        for j in range(3):
            value, gradient = one(x[i, j], scale[i, j])
            np.testing.assert_allclose(values[i, j], value, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(gradients[i, j], gradient, rtol=1e-4, atol=3e-5)
    # a batch in the middle, of one argument
    moved = jax.vmap(lambda x: f(x, *args[1:]), in_axes=1, out_axes=-1)(x[0].T)
    alone = jnp.stack([f(row, *args[1:]) for row in x[0]], -1)
    np.testing.assert_allclose(moved, alone, rtol=1e-5, atol=1e-6)


def test_k_and_tau_are_traced_and_learned() -> None:
    x = arguments("soft_topk logistic")[0]

    @jax.jit
    def loss(k: Array, tau: Array) -> Array:
        return (kj.soft_topk(x, k, tau=tau) * x).sum()

    assert loss(2.0, 0.5) != loss(3.0, 0.5)
    assert loss._cache_size() == 1
    dk, dtau = jax.grad(loss, (0, 1))(2.5, 0.5)
    assert np.isfinite(dk) and np.isfinite(dtau) and dk != 0 and dtau != 0


@EVERY
def test_without_jit(name: str) -> None:
    f, args = OPERATORS[name][0], arguments(name)
    want = f(*args)
    with jax.disable_jit():
        got = f(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_scan_and_checkpoint() -> None:
    x = jnp.stack([arguments("soft_topk logistic")[0] * (1 + i) for i in range(4)])

    def total(x: Array, wrap: Any) -> Array:
        step = wrap(lambda carry, row: (carry + (y := kj.soft_topk(row, 2.5, tau=0.5)) * row, y.sum()))
        carry, sums = jax.lax.scan(step, jnp.zeros_like(x[0]), x)
        return (carry**2).sum() + sums.sum()

    plain = jax.value_and_grad(lambda x: total(x, lambda f: f))(x)
    again = jax.value_and_grad(lambda x: total(x, jax.checkpoint))(x)
    by_hand = jax.value_and_grad(
        lambda x: (sum(kj.soft_topk(row, 2.5, tau=0.5) * row for row in x) ** 2).sum() + 4 * 2.5
    )(x)
    for one in (again, by_hand):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), one, plain)


# ------------------------------------------------------------------------------------------- devices

needs_two = pytest.mark.skipif(len(jax.devices()) < 2, reason="one device")


def test_there_are_two_devices() -> None:
    assert len(jax.devices()) == 2  # of conftest.py


class Pure(kj.cdfs.Logistic):
    """A CDF of one's own has no compiled kernels."""


@needs_two
@pytest.mark.parametrize("name", ["soft_topk logistic", "soft_topk pure", "soft_budget", "soft_sort laplace"])
def test_shard_map_over_rows(name: str) -> None:
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    if name == "soft_topk pure":
        f, args = lambda x, k, tau: kj.soft_topk(x, k, tau=tau, cdf=Pure()), arguments("soft_topk logistic")
    else:
        f, args = OPERATORS[name][0], arguments(name)
    x = args[0] * jnp.arange(1.0, 5)[:, None]

    def loss(x: Array, tau: Array) -> Array:
        return f(x, *args[1:-1], tau) * x

    spec = PartitionSpec("rows")
    shards = jax.shard_map(loss, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    got, want = (
        jax.jit(lambda *a, g=g: (g(*a), jax.grad(lambda *a: g(*a).sum(), (0, 1))(*a)))(x, args[-1])
        for g in (shards, loss)
    )
    np.testing.assert_allclose(got[0], want[0], atol=2e-6)
    for one, other in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


@needs_two
@pytest.mark.parametrize("cdf", ["logistic", Pure()])
def test_sharded_inputs(cdf: Any) -> None:
    """Rows that are split over devices are solved where they are, and split rows are put together."""
    mesh = Mesh(np.array(jax.devices()), ("d",))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 40)), jnp.float32)
    f = lambda x: kj.soft_topk(x, 5.3, tau=0.3, cdf=cdf)
    both = jax.jit(lambda x: (f(x), jax.grad(lambda x: (f(x) * x).sum())(x)))

    def exchanged(*spec: str | None) -> dict[str, set[str]]:
        """The collectives, and what each of them exchanges."""
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        compiled = both.lower(split).compile()
        for got, want in zip(compiled(split), both(x), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)
        names = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
        results = {name: re.findall(rf"= (.*) {name}\(", compiled.as_text()) for name in names}
        return {name: set(re.findall(r"\w+\[[\d,]*\]", " ".join(each))) for name, each in results.items()}

    whole, parts = exchanged("d"), exchanged(None, "d")
    # devices tell each other whether one of their rows still runs on the pure engine
    loops = set() if cdf == "logistic" and kj.instruction_set() is not None else {"pred[]"}
    assert whole == {name: loops if name == "all-reduce" else set() for name in whole}
    assert parts["all-reduce"] - {"pred[]"} or parts["all-gather"]


@needs_two
@pytest.mark.parametrize("name", ["soft_topk logistic", "soft_rank laplace", "soft_quantile"])
def test_numbers_of_rows_that_are_split_otherwise(name: str) -> None:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    f, args = OPERATORS[name][0], arguments(name)
    x, tau = args[0] * jnp.arange(1.0, 5)[:, None], args[-1] * jnp.arange(1.0, 5)
    loss = lambda x, tau: (f(x, *args[1:-1], tau) ** 2).sum()
    both = jax.jit(jax.value_and_grad(loss, (0, 1)))
    want = both(x, tau)
    for spec, of_tau in (("d", None), (None, "d")):
        got = both(
            jax.device_put(x, NamedSharding(mesh, PartitionSpec(spec))),
            jax.device_put(tau, NamedSharding(mesh, PartitionSpec(of_tau))),
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@EVERY
def test_other_platforms_get_the_pure_engine(name: str) -> None:
    """Lowered for a GPU, which needs none."""
    f, args = jax.jit(OPERATORS[name][0]), arguments(name)
    for platform in ("cuda", "tpu"):
        assert "khot_" not in f.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    here = f.lower(*args).as_text()
    assert ("khot_" in here) == (kj.instruction_set() is not None and name != "soft_rank logistic")
