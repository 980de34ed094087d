"""Order statistics: the k-th largest entries of each row, whole or spread over processes; and weighted
quantiles of whole rows, the entries up to which weights have a share.

The derivative of an order statistic goes to one entry that has its value. That entry is looked for only when
a derivative is wanted, so the operator returns the values alone.
"""

from __future__ import annotations

import math
import sys
from typing import Any, ClassVar

import torch
from torch import Tensor

from khot._core import arguments, rows
from khot._core.dispatch import Rule, define
from khot._core.precision import widen
from khot._core.rows import HERE, Row
from khot._kernels.reference import order_statistics as kernels

__all__ = ["order_statistics", "weighted_quantiles"]


def order_statistics(x: Tensor, k: Tensor, row: Row = HERE) -> Tensor:
    """The entries of the places k of each row, which are counted from 1 for the largest: (*batch, m).

    Args:
        x: (*batch, n).
        k: (*batch, m), in the wide dtype, with integer values in [1, n]; all other values give NaN. It may be
            on the CPU if m numbers one after another are the same for all rows.
        row: says whether x is the whole rows or a shard of them.
    """
    values: Tensor = _order_statistics.on(row.name)(x, k)
    return values


class _Rule(Rule):
    own_dims: ClassVar[tuple[int, ...]] = (1, 1)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Tensor) -> tuple[Tensor, ...]:
        return inputs[0], outputs

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, values = ctx.saved_tensors
        return _order_statistics_backward.pull(x, values, grad, group=ctx.group), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, *_: None) -> Tensor:
        x, values = ctx.saved_tensors
        if dx is None:
            return torch.zeros_like(values)
        row = rows.of(ctx.group)
        index, here = kernels.places_of(x, values, row)
        if x.shape[-1]:
            moved = dx.gather(-1, index).masked_fill(~here, 0)
        else:  # an empty shard
            moved = torch.zeros_like(values) + dx.sum(-1, keepdim=True)
        (moved,) = row.total([moved])
        return moved.to(values.dtype).masked_fill(values.isnan(), math.nan)


def _fake(x: Tensor, k: Tensor) -> Tensor:
    return x.new_empty(k.shape)


_order_statistics = define("order_statistics", kernels.order_statistics, _fake, _Rule, spread=True)
_order_statistics_backward = define(
    "order_statistics_backward", kernels.order_statistics_backward, "x", spread=True
)


class _Weighted(_Rule):
    """The same for an entry, however it was found. The weights have no derivative."""

    own_dims = (1, 1, 1)

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *_Rule.vjp(ctx, grad), None

    @staticmethod
    def examine(outputs: Tensor, *inputs: Any) -> None:
        if arguments.shows_nan(outputs):
            arguments.check_values(widen(inputs[1]), "weights", low=0, high=sys.float_info.max)


def _weighted_fake(x: Tensor, weights: Tensor, level: Tensor) -> Tensor:
    return x.new_empty(level.shape)


weighted_quantiles = define("weighted_quantiles", kernels.weighted_quantiles, _weighted_fake, _Weighted)
