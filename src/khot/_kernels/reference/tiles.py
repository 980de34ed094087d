"""Helpers of all reference kernels: they read rows in tiles, and keep sums of two numbers exact."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from khot._core.precision import widen
from khot._core.rows import Row

__all__ = ["TILE", "some", "standardize", "tiles", "two_sum"]

TILE = 1 << 18  # entries per tile: its few float64 temporaries stay in a 2 MiB cache


def tiles(x: Tensor, size: int = TILE) -> Iterator[tuple[slice, Tensor]]:
    """Consecutive slices of the last dimension, and the widened entries in each of them."""
    n = x.shape[-1]
    rows = max(1, x.numel() // max(1, n))
    if x.is_cuda:
        size *= 64  # on a GPU, small tiles cost launches, and the cache does not matter
    width = min(n, max(64, size // rows))
    for start in range(0, n, max(1, width)):
        part = slice(start, min(start + width, n))
        yield part, widen(x[..., part])


def standardize(x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor) -> Tensor:
    """z = (x − t)/τ for a tile; hi, lo and tau have one entry per row."""
    return ((x - hi.unsqueeze(-1)) - lo.unsqueeze(-1)) / tau.unsqueeze(-1)


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and its exact error (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def some(rows: Tensor, row: Row) -> bool:
    """Whether any row is left. On a GPU this is always true for whole rows, because reading it would wait for
    the device. For shards it is read, because a reduction waits anyway."""
    return (rows.is_cuda and row.here) or bool(rows.any())
