"""How a loss is reduced over the rows of a batch."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.names import unknown
from khot._core.precision import wide_dtype
from khot._core.rows import batch
from khot._ops.ranking_losses import counted_mean

__all__ = ["Reduction", "check_reduction", "mean_over", "reduce", "with_entries"]

Reduction = Literal["mean", "sum", "none"]


def check_reduction(reduction: Reduction) -> Reduction:
    if reduction not in get_args(Reduction):
        raise unknown("reduction", reduction, get_args(Reduction))
    return reduction


def reduce(
    loss: Tensor,
    counted: Tensor | None,
    reduction: Reduction,
    dtype: torch.dtype,
    *,
    zero_of_none: bool = False,
) -> Tensor:
    """The reduction over the rows that count, None for all, in the dtype. The others are 0. Of a batch that
    is spread over processes, it is this process's part of the sum over them.

    The mean over no rows is NaN, as in PyTorch, or 0 with ``zero_of_none``.
    """
    if reduction == "mean" and batch().here:
        if counted is None:
            fused = loss.is_cuda and loss.dtype != dtype  # one launch for the mean in another dtype
            return counted_mean(loss.reshape(-1), None, dtype) if fused else loss.mean().to(dtype)
        if zero_of_none:
            return counted_mean(loss.reshape(-1), counted.reshape(-1), dtype)
    if counted is not None:
        loss = torch.where(counted, loss, 0)
    if reduction == "mean":
        number = torch.tensor(loss.numel(), device=loss.device) if counted is None else counted.sum()
        total = loss.sum(dtype=wide_dtype(loss.device))
        return mean_over(total, number, zero_of_none=zero_of_none).to(dtype)
    return (loss.sum() if reduction == "sum" else loss).to(dtype)


def mean_over(total: Tensor, weight: Tensor, *, zero_of_none: bool) -> Tensor:
    """The sum over rows divided by their weight, of those on all processes that have a part of the batch."""
    weight = batch().count(weight).to(weight.dtype)
    return total / (torch.where(weight == 0, 1, weight) if zero_of_none else weight)


def with_entries(input: Tensor, dim: int, mask: Tensor | None) -> Tensor | None:
    """Which rows have an entry, as those that count; None for all."""
    if mask is None and (not input.dim() or input.shape[dim]):
        return None
    there = torch.ones_like(input, dtype=torch.bool) if mask is None else mask
    return arguments.mask_rows(there, input, dim).any(-1)
