"""Quantiles of whole rows: what stands between two order statistics.

The entries themselves are results, too, so that the first derivatives need not look for them again. Higher
derivatives go through the two operators that this one stands on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, define
from khot._core.ways import by_kernel
from khot._kernels.reference import order_statistics as statistics
from khot._kernels.reference import quantiles as kernels
from khot._kernels.reference.interpolation import interpolate_backward
from khot._ops import interpolation
from khot._ops.order_statistics import order_statistics

__all__ = ["quantiles"]


def quantiles(x: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """Arguments and results of the reference kernel, of which this is the first."""
    value: Tensor = _quantiles(x, k, weight)[0]
    return value


class _Rule(Rule):
    own_dims = (1, 1, 1)
    constants = (1,)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return *inputs, outputs[1]

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        x, k, weight, both = ctx.saved_tensors
        if by_kernel():
            dx, dweight = _quantiles_backward(x, both, weight, grad)
        else:
            pulled, dweight = interpolate_backward(order_statistics(x, k), weight, grad)
            dx = statistics.order_statistics_backward(x, both, pulled)
        return dx, None, dweight if weight.dim() else None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, _: None, dweight: Tensor | None) -> tuple[Tensor, None]:
        x, k, weight, both = ctx.saved_tensors
        moved = None
        if dx is not None:
            index, here = statistics.places_of(x, both)
            moved = dx.gather(-1, index).masked_fill(~here, 0).to(both.dtype)
            moved = moved.masked_fill(both.isnan(), torch.nan)
        return interpolation.moved(order_statistics(x, k), weight, moved, dweight), None


def _fake(x: Tensor, k: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(*k.shape[:-1], k.shape[-1] // 2), x.new_empty(k.shape)


def _backward_fake(x: Tensor, both: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(grad.shape if weight.dim() else (0,), dtype=weight.dtype)


_ops = torch.ops.khot
_quantiles = define(
    "quantiles",
    # by the kernels of the device
    functools.partial(kernels.quantiles, statistics=_ops.order_statistics, line=_ops.interpolate),
    _fake,
    _Rule,
)
_quantiles_backward = define(
    "quantiles_backward",
    functools.partial(
        kernels.quantiles_backward,
        statistics=_ops.order_statistics_backward,
        line=_ops.interpolate_backward,
    ),
    _backward_fake,
)
