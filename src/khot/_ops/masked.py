"""The entries under a mask, and a number in the place of the others. The derivative of those is 0."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from khot._core.dispatch import Rule, define
from khot._kernels.reference import masked as kernels

__all__ = ["masked"]


class _Rule(Rule):
    own_dims = (1, 1)
    plain = True

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Tensor) -> tuple[Tensor]:
        return (inputs[1],)

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return masked(grad, ctx.saved_tensors[0], 0.0), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: None) -> Tensor:
        found: Tensor = masked(dx, ctx.saved_tensors[0], 0.0)
        return found


masked = define("masked", kernels.masked, "x", _Rule)
