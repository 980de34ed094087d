"""How many entries of a row may be selected."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["selectable"]


def selectable(x: Tensor, most: float) -> Tensor:
    """How many entries of each row (*batch, n) are not −inf, but at most so many, in float64."""
    return (x != -math.inf).sum(-1, dtype=torch.float64).clamp(max=most)
