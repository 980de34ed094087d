"""Rows that a selection may find hard."""

from __future__ import annotations

import math
from collections.abc import Callable

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


# log(1 − F)
LOG_TAILS: dict[str, Callable[[Tensor], Tensor]] = {
    "logistic": lambda z: -torch.nn.functional.softplus(z),
    "laplace": lambda z: -z - math.log(2),
    "normal": lambda z: torch.special.log_ndtr(-z),
}


def rows_in_gaps(tau: float) -> Tensor:
    """Rows of 7 entries above a gap and 11 below it, in float32, with gaps of 14 to 2,000 tau."""
    gap = torch.tensor([14.0, 22.0, 40.0, 62.0, 100.0, 130.0, 160.0, 300.0, 2000.0])
    up = torch.tensor([0.0, 0.0, 0.0, 0.25, 1.5, 90.0, 400.0])  # beyond the ends of the gap, in tau
    down = torch.tensor([0.0, 0.5, 3.0, 3.0, 20.0, 150.0, 700.0, 900.0, 1000.0, 2000.0, 5000.0])
    return torch.cat([gap[:, None] / 2 + up, -gap[:, None] / 2 - down], 1) * tau + 2
