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

__all__ = ["flag", "per_row", "rows", "selected", "unrows", "wide"]


def wide(x: Array) -> Any:
    """The dtype that x is computed in: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def rows(x: Any, axis: Any, where: Any = None, *, largest: bool = True, fill: float = -math.inf) -> Array:
    """x with its rows along the last axis, negated unless ``largest``, and ``fill`` where not ``where``."""
    x = array(x, "x")
    axis = _axis(x, axis)
    x = jnp.moveaxis(x, axis, -1)
    x = x if largest else -x
    return x if where is None else jnp.where(_of_entries(where, x, axis), x, fill)


def array(x: Any, name: str) -> Array:
    """x as an array, of floating-point numbers."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must have a floating-point dtype, but got {x.dtype}")
    return x


def selected(where: Any, x: Any, axis: Any) -> Array:
    """``where`` as rows of x's shape, True everywhere if it is None."""
    x = jnp.asarray(x)
    axis = _axis(x, axis)
    rows = jnp.moveaxis(x, axis, -1)
    return jnp.ones(rows.shape, bool) if where is None else _of_entries(where, rows, axis)


def of_entries(value: Any, name: str, x: Any, axis: Any) -> Array:
    """A number for each entry of x, as rows."""
    x, value = jnp.asarray(x), jnp.asarray(value)
    if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
        raise TypeError(f"{name} must hold real numbers, but got {value.dtype}")
    return jnp.moveaxis(_broadcast(value, name, x.shape, "x"), _axis(x, axis), -1)


def unrows(y: Array, axis: int) -> Array:
    """Rows back along their axis."""
    return jnp.moveaxis(y, -1, axis)


def per_row(
    value: Any,
    name: str,
    x: Array,
    *,
    low: float = 0,
    high: float = math.inf,
    low_open: bool = False,
) -> Array:
    """A number for each row of x, in the dtype that x is computed in.

    Python's numbers must lie in [low, high], or (low, high] if ``low_open``.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
        inside = (low < number if low_open else low <= number) and number <= high and not math.isinf(number)
        if not inside:
            allowed = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
            raise ValueError(f"{name} must lie in {allowed}, but got {value}")
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.complexfloating) or value.dtype == bool:
        raise TypeError(f"{name} must be a real number or an array of them, but got {value.dtype}")
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


def _of_entries(where: Any, x: Array, axis: int) -> Array:
    where = jnp.asarray(where)
    if where.dtype != bool:
        raise TypeError(f"where must hold True and False, but got {where.dtype}")
    shape = (*x.shape[:axis], x.shape[-1], *x.shape[axis:-1])
    return jnp.moveaxis(_broadcast(where, "where", shape, "x"), axis, -1)


def _broadcast(value: Array, name: str, shape: tuple[int, ...], of: str) -> Array:
    try:
        return jnp.broadcast_to(value, shape)
    except ValueError:
        raise ValueError(
            f"{name} must broadcast to the shape {shape} of {of}, but has the shape {value.shape}"
        ) from None
