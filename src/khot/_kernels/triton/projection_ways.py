"""Which kernels a projection onto the permutahedron takes, by its rows.

| rows | forward | backward |
|---|---|---|
| float32, up to 1,024 entries, with "kl" up to 256 | :mod:`.short_projection` | :mod:`.short_projection` |
| float32, longer, "l2", one program for each | :mod:`.long_projection` | :mod:`.projection` |
| longer with "kl", float64, or split over programs | :mod:`.projection` | :mod:`.projection` |
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.triton import long_projection, projection, short_projection

__all__ = ["permutahedron", "permutahedron_backward"]


def _single(z: Tensor, w: Tensor) -> bool:
    """Whether float32 has the rows, of which there are some."""
    return torch.float64 not in (z.dtype, w.dtype) and z.numel() > 0


def _short(z: Tensor, w: Tensor, regularization: str) -> bool:
    longest = short_projection.LONGEST if regularization == "l2" else short_projection.LONGEST_POWERS
    return _single(z, w) and z.shape[-1] <= longest


def permutahedron(
    z: Tensor, w: Tensor, tau: Tensor, regularization: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`permutahedron.permutahedron`, in Triton."""
    if _short(z, w, regularization):
        return short_projection.project(z, w, tau, regularization)
    n = z.shape[-1]
    if _single(z, w) and regularization == "l2" and not projection.splits(z.numel() // n, n):
        return long_projection.project(z, w, tau)
    return projection.permutahedron(z, w, tau, regularization)


def permutahedron_backward(
    grad: Tensor, z: Tensor, w: Tensor, tau: Tensor, order: Tensor, w_order: Tensor, start: Tensor,
    regularization: str, want_w: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`permutahedron.permutahedron_backward`, in Triton."""
    short = _short(z, w, regularization)
    pull = short_projection.pull if short else projection.permutahedron_backward
    return pull(grad, z, w, tau, order, w_order, start, regularization, want_w)
