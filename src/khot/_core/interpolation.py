"""What stands between two order statistics, exact or soft."""

from __future__ import annotations

import math
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.names import unknown

__all__ = ["InterpolationName", "between", "check_interpolation"]

InterpolationName = Literal["linear", "lower", "higher", "nearest", "midpoint"]


def check_interpolation(interpolation: Any) -> InterpolationName:
    names = get_args(InterpolationName)
    if not isinstance(interpolation, str):
        raise TypeError(f"interpolation must be a string, but got {type(interpolation).__name__}")
    if interpolation not in names:
        raise unknown("interpolation", interpolation, names)
    return cast("InterpolationName", interpolation)


def between(below: Tensor, above: Tensor, weight: Tensor | float) -> Tensor:
    """below + weight (above − below), computed from the nearer end, as numpy does."""
    line = _line(below, above, weight)
    if arguments.readable(line) and math.isfinite(line.sum().item()):
        return line
    infinite = (below.isinf() | above.isinf()).detach()
    a, b = below.masked_fill(infinite, 0), above.masked_fill(infinite, 0)
    # the difference of two finite numbers may overflow
    overflows = (b - a).detach().isinf()
    line = torch.where(overflows, (1 - weight) * a + weight * b, _line(a, b, weight))
    same = (below == above) | (weight == 0)
    ends = torch.where(same, below, below * (1 - weight) + above * weight).detach()
    return torch.where(infinite, ends, line)


def _line(a: Tensor, b: Tensor, weight: Tensor | float) -> Tensor:
    rise = b - a
    if not isinstance(weight, Tensor):
        return a + rise * weight if weight < 0.5 else b - rise * (1 - weight)
    return torch.where(weight < 0.5, a + rise * weight, b - rise * (1 - weight))
