"""How a loss is reduced over the rows of a batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["Reduction", "check_reduction", "reduce", "reduce_counted"]

Reduction = Literal["mean", "sum", "none"]


def check_reduction(reduction: Reduction) -> Reduction:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', but got {reduction!r}")
    return reduction


def reduce(loss: Tensor, reduction: Reduction) -> Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def reduce_counted(loss: Tensor, counted: Tensor, reduction: Reduction) -> Tensor:
    """The reduction over the rows that are counted. The others are 0, and the mean of none is 0, too."""
    loss = torch.where(counted, loss, 0)
    return loss.sum() / counted.sum().clamp(min=1) if reduction == "mean" else reduce(loss, reduction)
