"""Reductions along rows: of several arrays in one loop, and in blocks, so that float32 keeps its digits."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

__all__ = ["least", "most", "sums", "two_sum"]

# An error of BLOCK + log(n) terms and not of n. At 512, equal scores missed the contract by a factor of 4.
BLOCK = 64

_JOIN: dict[str, Callable[[Array, Array], Array]] = {"+": jnp.add, "<": jnp.minimum, ">": jnp.maximum}
_FIRST = {"+": 0.0, "<": jnp.inf, ">": -jnp.inf}


def sums(*arrays: Array, least: Array | None = None, most: Array | None = None) -> tuple[Array, ...]:
    """The sums along the last axis, then the minimum of ``least`` and the maximum of ``most``.

    XLA takes a loop for each reduction on a CPU, unless they are one reduction of several operands.
    """
    kinds = "+" * len(arrays) + "<" * (least is not None) + ">" * (most is not None)
    given = [*arrays, *(each for each in (least, most) if each is not None)]
    while (n := given[0].shape[-1]) > 2 * BLOCK:
        blocks = -(-n // BLOCK)
        padded = [_pad(kind, each, blocks * BLOCK) for kind, each in zip(kinds, given, strict=True)]
        given = list(_reduce(kinds, [each.reshape(*each.shape[:-1], blocks, BLOCK) for each in padded]))
    return _reduce(kinds, given)


def _pad(kind: str, array: Array, n: int) -> Array:
    width = [(0, 0)] * (array.ndim - 1) + [(0, n - array.shape[-1])]
    return jnp.pad(array, width, constant_values=_FIRST[kind]) if n > array.shape[-1] else array


def _reduce(kinds: str, arrays: list[Array]) -> tuple[Array, ...]:
    def join(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(_JOIN[kind](p, q) for kind, p, q in zip(kinds, a, b, strict=True))

    if len(arrays) == 1 and kinds == "+":
        return (arrays[0].sum(-1),)
    first = tuple(jnp.asarray(_FIRST[kind], each.dtype) for kind, each in zip(kinds, arrays, strict=True))
    return tuple(lax.reduce(tuple(arrays), first, join, (arrays[0].ndim - 1,)))


def least(x: Array, where: Array) -> Array:
    """The minimum along rows, +inf of none."""
    return jnp.min(jnp.where(where, x, jnp.inf), -1, initial=jnp.inf)


def most(x: Array, where: Array) -> Array:
    """The maximum along rows, −inf of none."""
    return jnp.max(jnp.where(where, x, -jnp.inf), -1, initial=-jnp.inf)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum, and what rounding has left."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)
