"""How a quantile is taken from the two order statistics beside it, exact or soft."""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

from khot._core.names import unknown

__all__ = ["InterpolationName", "check_interpolation"]

InterpolationName = Literal["linear", "lower", "higher", "nearest", "midpoint"]


def check_interpolation(interpolation: Any) -> InterpolationName:
    names = get_args(InterpolationName)
    if not isinstance(interpolation, str):
        raise TypeError(f"interpolation must be a string, but got {type(interpolation).__name__}")
    if interpolation not in names:
        raise unknown("interpolation", interpolation, names)
    return cast("InterpolationName", interpolation)
