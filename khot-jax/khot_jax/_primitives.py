"""Primitives on rows, with rules for batching, lowering and derivatives.

``jax.custom_vjp`` has no forward mode and ``jax.linear_call`` no batching rule, so an operator is three
primitives with rules of their own:

    solve   the operator               its jvp is push
    push    linear in the tangents     its transpose is pull; derivatives in the rest are those of its body
    pull    linear in the gradients    its transpose is push; derivatives in the rest are those of its body

Rows are along the last axis, and any number of axes before it are the batch, so that a batching rule only
adds one. Bodies are jnp. On a CPU solve and pull are lowered to the compiled kernels (``_compiled``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from khot_jax import _compiled

__all__ = ["arrays", "bind", "define", "linear"]

Body = Callable[..., Sequence[Array]]


def define(name: str, body: Body, jvp: Callable[..., Any] | None = None) -> Primitive:
    """A primitive whose operands share their leading axes, with rules for batching and lowering."""
    p = Primitive(name)
    p.multiple_results = True

    @functools.cache
    def compiled(**params: Any) -> Callable[..., Any]:
        return jax.jit(functools.partial(p.bind, **params))

    @functools.cache
    def shapes(*operands: Any, **params: Any) -> Sequence[jax.ShapeDtypeStruct]:
        return jax.eval_shape(functools.partial(body, **params), *operands)

    def results_of(operands: Sequence[Any], params: Any) -> Sequence[jax.ShapeDtypeStruct]:
        return shapes(*(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands), **params)

    def abstract(*operands: Any, **params: Any) -> list[Any]:
        # inside shard_map they vary over the axes that the operands vary over (bind)
        like = operands[0]
        results = results_of(operands, params)
        return [like.update(shape=each.shape, dtype=each.dtype, weak_type=False) for each in results]

    def batched(operands: Sequence[Array], axes: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        (size,) = {each.shape[i] for each, i in zip(operands, axes, strict=True) if i is not None}
        aligned = [
            jnp.broadcast_to(each, (size, *each.shape)) if i is None else jnp.moveaxis(each, i, 0)
            for each, i in zip(operands, axes, strict=True)
        ]
        results = bind(p, *aligned, **params)
        return results, (0,) * len(results)

    def on_cpu(*operands: Array, **params: Any) -> Sequence[Array]:
        results = _compiled.call(name, operands, results_of, params)
        return body(*operands, **params) if results is None else results

    def evaluated(*operands: Array, **params: Any) -> Sequence[Array]:
        if jax.config.jax_disable_jit:  # which jit would bind again
            with jax.disable_jit(False):
                return compiled(**params)(*operands)
        return compiled(**params)(*operands)

    p.def_impl(evaluated)
    p.def_abstract_eval(abstract)
    batching.primitive_batchers[p] = batched
    if jvp is not None:
        ad.primitive_jvps[p] = jvp
    if _compiled.needs_devices is not None:
        _compiled.needs_devices.add(p)
    mlir.register_lowering(p, mlir.lower_fun(body, multiple_results=True))
    mlir.register_lowering(p, mlir.lower_fun(on_cpu, multiple_results=True), platform="cpu")
    return p


def bind(p: Primitive, *operands: Array, **params: Any) -> list[Array]:
    """The primitive, whose operands inside ``shard_map`` have to vary over the same axes of the mesh."""
    axes = [_axes(each) for each in operands]
    every = frozenset().union(*axes)
    together = [
        _varying(each, tuple(every - own)) if every - own else each
        for each, own in zip(operands, axes, strict=True)
    ]
    return p.bind(*together, **params)


def _axes(x: Array) -> frozenset[str]:
    aval: Any = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # since jax 0.10
    return getattr(aval, "vma", frozenset()) if manual is None else manual.varying


def _varying(x: Array, axes: tuple[str, ...]) -> Array:
    lax: Any = jax.lax  # pvary until jax 0.9
    return lax.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, axes)


def linear(name: str, push: Body) -> Primitive:
    """A primitive that is linear in its last operands, tangents of those at ``law.moved``, and its pull."""

    def pull(*operands: Array, law: Any) -> Sequence[Array]:
        known, gradients = operands[: law.known], operands[law.known :]
        of_moves = lambda *moves: push(*known, *moves, law=law)
        return jax.linear_transpose(of_moves, *(known[i] for i in law.moved))(list(gradients))

    pushing, pulling = define(f"{name}_push", push), define(f"{name}_pull", pull)
    for p, body, other in ((pushing, push, pulling), (pulling, pull, pushing)):
        ad.primitive_jvps[p] = _linear_jvp(p, body)
        ad.primitive_transposes[p] = _transpose(other)
    return pushing


def arrays(tangents: Sequence[Any]) -> list[Array]:
    """The tangents, of which those that are known to be zero become arrays."""
    return [ad.instantiate_zeros(each) for each in tangents]


def _linear_jvp(p: Primitive, body: Body) -> Callable[..., Any]:
    @functools.partial(jax.jit, static_argnames="law")
    def moved_body(known: Any, linear: Any, steps: Any, law: Any) -> Any:
        return jax.jvp(lambda *given: body(*given, *linear, law=law), known, steps)[1]

    def rule(primals: Sequence[Any], tangents: Sequence[Any], *, law: Any) -> tuple[Any, Any]:
        results = bind(p, *primals, law=law)
        known, linear = primals[: law.known], primals[law.known :]
        parts = []
        of_known, of_linear = tangents[: law.known], tangents[law.known :]
        if any(type(each) is not ad.Zero for each in of_linear):
            parts.append(bind(p, *known, *arrays(of_linear), law=law))
        if any(type(each) is not ad.Zero for each in of_known):
            parts.append(moved_body(tuple(known), tuple(linear), tuple(arrays(of_known)), law=law))
        return results, [sum(each[1:], each[0]) for each in zip(*parts, strict=True)]

    return rule


def _transpose(other: Primitive) -> Callable[..., Any]:
    def rule(gradients: Sequence[Any], *operands: Any, law: Any) -> list[Any]:
        known, linear = operands[: law.known], operands[law.known :]
        results = bind(other, *known, *arrays(gradients), law=law)
        wanted = [
            result if ad.is_undefined_primal(each) else None
            for result, each in zip(results, linear, strict=True)
        ]
        return [None] * law.known + wanted

    return rule
