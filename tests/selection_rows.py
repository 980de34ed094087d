"""Rows that a selection may find hard."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rows(n: int) -> Tensor:
    """One row of each kind."""
    x = torch.randn(12, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x[1] = x[1].sort().values
    x[2] = x[2].sort(descending=True).values
    x[3] = (4 * x[3]).round() / 4
    x[4] = -3.0
    x[5] = torch.sin(torch.arange(n) * 2 * math.pi / 128) + 1e-3 * x[5]
    x[6] /= x[7].clone()
    x[7] = torch.where(x[7] > 1, math.inf, torch.where(x[7] < -0.5, -math.inf, x[7]))
    x[8] = torch.where(x[8].abs() > 1.5, math.nan * x[8], x[8])
    x[9] = math.nan
    x[10] = torch.where(x[10] > 1.5, x[10], 0.0 * x[10])
    x[11] = (torch.arange(n) < n // 2).double()  # as many at the level as there is no room for
    return x
