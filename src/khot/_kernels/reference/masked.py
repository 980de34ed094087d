"""The reference kernel of masked entries."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["masked"]


def masked(x: Tensor, mask: Tensor, fill: float) -> Tensor:
    """x where the mask is True, and ``fill`` elsewhere.

    Args:
        x, mask: (*batch, n), the mask of bools.
        fill: 0 or infinite.
    """
    return torch.where(mask, x, fill)
