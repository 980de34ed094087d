"""How a loss is reduced over the rows of a batch."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from khot._core.names import unknown
from khot._core.packed import note_weights
from khot._core.rows import batch
from khot._ops.ranking_losses import counted_mean

__all__ = [
    "Reduction",
    "check_reduction",
    "over_batch",
    "reduce",
    "reduce_counted",
    "reduce_over",
    "reduce_wide",
]

Reduction = Literal["mean", "sum", "none"]


def check_reduction(reduction: Reduction) -> Reduction:
    if reduction not in get_args(Reduction):
        raise unknown("reduction", reduction, get_args(Reduction))
    return reduction


def reduce(loss: Tensor, reduction: Reduction) -> Tensor:
    """The reduction; of a batch that is spread over processes, this process's part of the sum over them."""
    if reduction == "mean" and not batch().here:
        return loss.sum() / over_batch(torch.tensor(loss.numel(), device=loss.device))
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def reduce_wide(loss: Tensor, reduction: Reduction, dtype: torch.dtype) -> Tensor:
    """:func:`reduce` of losses in the wide dtype, in another dtype."""
    if reduction == "mean" and loss.is_cuda and batch().here:
        return counted_mean(loss.reshape(-1), None, dtype)
    return reduce(loss, reduction).to(dtype)


def reduce_counted(loss: Tensor, counted: Tensor, reduction: Reduction, dtype: torch.dtype) -> Tensor:
    """The reduction over the rows that are counted, in the dtype. The others are 0, and the mean of none is
    0, too."""
    note_weights(counted)
    if reduction == "mean" and batch().here:
        return counted_mean(loss.reshape(-1), counted.reshape(-1), dtype)
    loss = torch.where(counted, loss, 0)
    if reduction == "mean":
        return (loss.sum() / over_batch(counted.sum()).clamp(min=1)).to(dtype)
    return reduce(loss, reduction).to(dtype)


def reduce_over(loss: Tensor, counted: Tensor, reduction: Reduction) -> Tensor:
    """The reduction over what is counted, as of PyTorch's losses with an index to ignore: the others are 0,
    and the mean over none is NaN."""
    note_weights(counted)
    loss = torch.where(counted, loss, 0)
    return loss.sum() / over_batch(counted.sum()) if reduction == "mean" else reduce(loss, reduction)


def over_batch(number: Tensor) -> Tensor:
    """The sum over all processes that have a part of the batch, of which this one has the number."""
    return number if batch().here else batch().count(number).to(number.dtype)
