"""What all baselines do with their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core import arguments

__all__ = ["at_dim", "check_iterations", "prepare"]


def prepare(
    input: Tensor, k: Any, dim: int, scale: Any, *, integer: bool = False, tau_name: str = "tau"
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in float32 or float64, and k and the scale in the same dtype with a dim for the entries."""
    x = arguments.rows(input, dim)
    k = arguments.per_row(k, "k", x, low=0, high=x.shape[-1], integer=integer)
    scale = arguments.per_row(scale, tau_name, x, low=0, low_open=True)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype), k.to(dtype).unsqueeze(-1), scale.to(dtype).unsqueeze(-1)


def check_iterations(iterations: Any) -> None:
    if isinstance(iterations, bool) or not isinstance(iterations, int):
        raise TypeError(f"iterations must be an int, but got {type(iterations).__name__}")
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, but got {iterations}")


def at_dim(matrix: Tensor, input: Tensor, dim: int) -> Tensor:
    """(*batch, places, n) with its last two dims where the input has dim."""
    dim = arguments.check_dim(input, dim)
    return matrix.movedim((-2, -1), (dim, dim + 1))
