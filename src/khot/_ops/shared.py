"""Sums over shards, and numbers that the shards have in common, as operators that a trace can contain.

In eager mode, ``total`` and ``share`` of :class:`khot._core.rows.Row` do the same for several tensors in one
all-reduce.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from khot._core import rows
from khot._core.dispatch import Rule, define

__all__ = ["share", "total"]


def _total_kernel(values: Tensor, group: str) -> Tensor:
    (result,) = rows.of(group).reduce([values])
    return result.to(values.dtype)


def _share_kernel(values: Tensor, group: str) -> Tensor:
    return values.clone()


class _Total(Rule):
    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.group = inputs[1]
        return ()

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return share(grad, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return total(tangent, ctx.group)


class _Share(_Total):
    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return total(grad, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return share(tangent, ctx.group)


#: The sums over the shards, which every process gets.
total = define("reference_total", _total_kernel, "values", _Total)
#: The same numbers, whose gradient is summed over the shards.
share = define("reference_share", _share_kernel, "values", _Share)
