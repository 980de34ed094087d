"""The k largest entries of each row with their indices. The derivative of an entry goes to that entry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, define
from khot._kernels.reference import topk as kernels

__all__ = ["largest_entries"]


def largest_entries(x: Tensor, k: int, largest: bool, sorted: bool) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) entries of rows (*batch, n) and their indices: (*batch, k) each.

    NaN counts as larger than every number, and ties go to the lowest index.
    """
    values, indices = _topk(x, k, largest, sorted)
    return values, indices


class _Rule(Rule):
    constants = (1,)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> tuple[Tensor]:
        ctx.n = inputs[0].shape[-1]  # the row itself need not be kept
        return (outputs[1],)

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        dx = grad.new_zeros(*grad.shape[:-1], ctx.n).scatter(-1, indices, grad)
        return dx, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: None) -> Any:
        (indices,) = ctx.saved_tensors
        return dx.gather(-1, indices), None


def _fake(x: Tensor, k: int, largest: bool, sorted: bool) -> tuple[Tensor, Tensor]:
    values = x.new_empty(*x.shape[:-1], k)
    return values, torch.empty_like(values, dtype=torch.int64)


_topk = define("topk", kernels.topk, _fake, _Rule, decomposition=kernels.exported_topk)
