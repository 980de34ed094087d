"""How a loss is reduced over the rows of a batch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

__all__ = ["Reduction", "check_reduction", "reduce"]

Reduction = Literal["mean", "sum", "none"]


def check_reduction(reduction: Reduction) -> Reduction:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', but got {reduction!r}")
    return reduction


def reduce(loss: Tensor, reduction: Reduction) -> Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
