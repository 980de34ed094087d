"""The reference kernel of what stands between two order statistics, and of its derivatives: those of both and
of the line between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from khot._kernels.reference.interpolation import interpolate, interpolate_backward
from khot._kernels.reference.order_statistics import order_statistics, order_statistics_backward

__all__ = ["quantiles", "quantiles_backward"]


def quantiles(
    x: Tensor,
    k: Tensor,
    weight: Tensor,
    statistics: Callable[..., Tensor] = order_statistics,
    line: Callable[..., Tensor] = interpolate,
) -> tuple[Tensor, Tensor]:
    """What stands between the k-th largest entries of each row.

    Args:
        x: (*batch, n).
        k: (*batch, 2m), the places of the m upper entries first, as for `order_statistics`.
        weight: (*batch, m), or one number, as for `interpolate`.
        statistics, line: the kernels of the two.

    Returns:
        The results, (*batch, m), and both entries of each, (*batch, 2m).
    """
    both = statistics(x, k)
    return line(both, weight), both


def quantiles_backward(
    x: Tensor,
    both: Tensor,
    weight: Tensor,
    grad: Tensor,
    statistics: Callable[..., Tensor] = order_statistics_backward,
    line: Callable[..., Any] = interpolate_backward,
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, which is empty for one number."""
    pulled, dweight = line(both, weight, grad)
    return statistics(x, both, pulled), dweight
