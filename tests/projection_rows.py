"""Rows of every kind for the projection onto the permutahedron."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drawn import f64
from drawn import normal as randn

__all__ = ["ROUNDED", "ROWS", "f64", "randn", "ranks"]


def ranks(n: int) -> Tensor:
    return torch.arange(n, 0, -1, dtype=torch.float64)


#: Scores and w of n entries.
ROWS: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "normal": lambda n: (randn(n), randn(n, seed=1)),
    "ranks": lambda n: (3 * randn(n), ranks(n)),
    "ties": lambda n: (randn(n).round(), randn(n, seed=1).round()),
    "all equal": lambda n: (torch.full((n,), 0.3).double(), ranks(n)),
    "a cascade": lambda n: (ranks(n), torch.cat((ranks(n)[1:] / 2, f64([-100.0])))),
    "one outlier": lambda n: (torch.cat((f64([1000.0]), randn(n - 1))), ranks(n)),
    "top k": lambda n: (randn(n), (torch.arange(n) < n // 3).double()),
    "ascending w": lambda n: (randn(n), torch.linspace(-1, 1, n).double()),
}
ROUNDED = ("ties", "all equal", "top k")  # where rounding decides whether equal values are pooled
