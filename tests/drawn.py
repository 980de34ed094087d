"""Numbers that many tests begin with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["f64", "floats", "normal"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64, the same in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def floats(*shape: int, seed: int = 0) -> Tensor:
    """The same in float32, which are other numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def f64(values: Any, **options: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, **options)
