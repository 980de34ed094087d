"""Checks of arguments, and their layout: rows along the last axis, numbers of the batch shape.

Shapes, dtypes and Python's numbers raise errors. The values of arrays are not read, since they may be traced:
a row with a bad one becomes NaN.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = ["costs", "flag", "per_row", "real", "rows", "selected", "wide"]


def wide(x: Array) -> Any:
    """The dtype that x is computed in: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def rows(x: Any, axis: Any, where: Any = None, *, largest: bool = True, fill: float = -math.inf) -> Array:
    """x with its rows along the last axis, negated unless ``largest``, and ``fill`` where not ``where``."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must have a floating-point dtype, but got {x.dtype}")
    rows = jnp.moveaxis(x, _axis(x, axis), -1)
    rows = rows if largest else -rows
    return rows if where is None else jnp.where(selected(where, x, axis), rows, fill)


def selected(where: Any, x: Any, axis: Any) -> Array:
    """``where`` as rows of x's shape, True everywhere if it is None."""
    where = jnp.asarray(True if where is None else where)
    if where.dtype != bool:
        raise TypeError(f"where must hold True and False, but got {where.dtype}")
    return jnp.moveaxis(_broadcast(where, "where", jnp.shape(x), "x"), axis, -1)


def costs(weights: Any, x: Any, axis: Any) -> Array:
    """A real number for each entry of x, as rows."""
    weights = jnp.asarray(weights)
    if not (jnp.issubdtype(weights.dtype, jnp.floating) or jnp.issubdtype(weights.dtype, jnp.integer)):
        raise TypeError(f"weights must hold real numbers, but got {weights.dtype}")
    return jnp.moveaxis(_broadcast(weights, "weights", jnp.shape(x), "x"), axis, -1)


def real(value: Any, name: str, *, high: float = math.inf, positive: bool = False) -> Array:
    """An array of real numbers. Python's must lie in [0, high]."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
        if not (number > 0 if positive else number >= 0) or number > high or math.isinf(number):
            allowed = f"{'(' if positive else '['}0, {high:g}{')' if math.isinf(high) else ']'}"
            raise ValueError(f"{name} must lie in {allowed}, but got {value}")
    if value is None or isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a real number or an array of them, but got {type(value).__name__}")
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.complexfloating) or value.dtype == bool:
        raise TypeError(f"{name} must be a real number or an array of them, but got {value.dtype}")
    return value


def per_row(value: Any, name: str, x: Array, *, high: float = math.inf, positive: bool = False) -> Array:
    """A number for each row of x, in the dtype that x is computed in."""
    value = real(value, name, high=high, positive=positive)
    return _broadcast(value, name, x.shape[:-1], "the batch").astype(wide(x))


def flag(value: Any, name: str) -> None:
    """An option that is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, but got {type(value).__name__}")


def _axis(x: Array, axis: Any) -> int:
    axis = operator.index(axis)
    if not -x.ndim <= axis < x.ndim:
        raise np.exceptions.AxisError(axis, x.ndim)
    return axis % x.ndim


def _broadcast(value: Array, name: str, shape: tuple[int, ...], of: str) -> Array:
    try:
        return jnp.broadcast_to(value, shape)
    except ValueError:
        raise ValueError(
            f"{name} must broadcast to the shape {shape} of {of}, but has the shape {value.shape}"
        ) from None
