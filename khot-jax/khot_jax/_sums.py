"""Reductions along rows: of several arrays in one loop, and in blocks, so that float32 keeps its digits."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

__all__ = ["least", "most", "sums", "two_sum"]

# An error of BLOCK + log(n) terms and not of n. At 512, equal scores missed the contract by a factor of 4.
BLOCK = 64


def sums(*arrays: Array) -> tuple[Array, ...]:
    """The sums along the last axis.

    XLA takes a loop for each reduction on a CPU, unless they are one reduction of several operands.
    """
    while (n := arrays[0].shape[-1]) > 2 * BLOCK:
        blocks = -(-n // BLOCK)
        pad = [(0, 0)] * (arrays[0].ndim - 1) + [(0, blocks * BLOCK - n)]
        arrays = _reduce(*(jnp.pad(x, pad).reshape(*x.shape[:-1], blocks, BLOCK) for x in arrays))
    return _reduce(*arrays)


def _reduce(*arrays: Array) -> tuple[Array, ...]:
    if len(arrays) == 1:
        return (arrays[0].sum(-1),)
    join = lambda a, b: tuple(map(jnp.add, a, b))
    zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
    return tuple(lax.reduce(arrays, zeros, join, (arrays[0].ndim - 1,)))


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
