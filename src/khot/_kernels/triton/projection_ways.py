"""Which kernels a projection onto the permutahedron takes, by its rows.

| rows | forward | backward |
|---|---|---|
| "l2", float32, up to 1,024 entries | :mod:`.short_projection` | :mod:`.short_projection` |
| "l2", float32, longer, one program for each | :mod:`.long_projection` | :mod:`.projection` |
| "kl", float64, or split over programs | :mod:`.projection` | :mod:`.projection` |
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.triton import long_projection, projection, short_projection

__all__ = ["permutahedron", "permutahedron_backward"]


def _single(z: Tensor, w: Tensor, regularization: str) -> bool:
    """Whether float32 has the rows, of which there are some."""
    return regularization == "l2" and torch.float64 not in (z.dtype, w.dtype) and z.numel() > 0


def permutahedron(
    z: Tensor, w: Tensor, tau: Tensor, regularization: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`permutahedron.permutahedron`, in Triton."""
    if _single(z, w, regularization):
        n = z.shape[-1]
        if n <= short_projection.LONGEST:
            return short_projection.project(z, w, tau)
        if not projection.splits(z.numel() // n, n):
            return long_projection.project(z, w, tau)
    return projection.permutahedron(z, w, tau, regularization)


def permutahedron_backward(
    grad: Tensor, z: Tensor, w: Tensor, tau: Tensor, order: Tensor, w_order: Tensor, start: Tensor,
    regularization: str, want_w: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`permutahedron.permutahedron_backward`, in Triton."""
    given = (grad, z, w, tau, order, w_order, start)
    if _single(z, w, regularization) and z.shape[-1] <= short_projection.LONGEST:
        return short_projection.pull(*given, want_w)
    return projection.permutahedron_backward(*given, regularization, want_w)
