"""What stands between two entries of a row, as a quantile does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, define
from khot._core.precision import on, widen
from khot._kernels.reference import interpolation as kernels

__all__ = ["interpolate", "moved"]


class _Rule(Rule):
    own_dims = (1, 1)

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        both, weight = ctx.saved_tensors
        pulled, to_weight = _interpolate_backward.pull(both, weight, grad)
        return pulled, to_weight if weight.dim() else None

    @staticmethod
    def jvp(ctx: Any, dboth: Tensor | None, dweight: Tensor | None) -> Tensor:
        both, weight = ctx.saved_tensors
        return moved(both, weight, dboth, dweight)


def moved(both: Tensor, weight: Tensor, dboth: Tensor | None, dweight: Tensor | None) -> Tensor:
    """Forward mode."""
    rise, infinite = kernels.differences(both)
    found = torch.zeros_like(rise)
    if dboth is not None:
        above, below = widen(dboth).chunk(2, -1)
        weight = on(both.device, weight)
        found = found + weight * above + (1 - weight) * below
    if dweight is not None:
        found = found + rise * dweight
    return found.masked_fill(infinite, 0).to(both.dtype)


def _fake(both: Tensor, weight: Tensor) -> Tensor:
    return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)


def _backward_fake(both: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(both, memory_format=torch.contiguous_format), both.new_empty(
        grad.shape if weight.dim() else (0,), dtype=weight.dtype
    )


interpolate = define("interpolate", kernels.interpolate, _fake, _Rule)
_interpolate_backward = define("interpolate_backward", kernels.interpolate_backward, _backward_fake)
