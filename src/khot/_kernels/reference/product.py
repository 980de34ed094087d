"""Products of matrices in half precision, whose results are in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._core.arguments import broadcast_shape
from khot._core.precision import without_autocast

__all__ = ["product"]

# So many entries of the larger factor are widened at a time: 4 MB, which stay in the cache.
PART = 1 << 20


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (..., n, d) times b (..., d, m), both of the same half-precision dtype, in float32.

    The products of their entries are exact in float32, and are summed there. The smaller factor is widened as
    a whole, and the larger one a part at a time.
    """
    with without_autocast(a.device):
        if torch.compiler.is_compiling():
            return a.float() @ b.float()
        if _widens_itself(a) and a.numel() and b.numel():
            return _by_device(a, b)
        batch = broadcast_shape(a.shape[:-2], b.shape[:-2])
        out = a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=torch.float32)
        parted, whole, dim = (b, a.float(), -1) if b.numel() > a.numel() else (a, b.float(), -2)
        size = max(PART * parted.shape[dim] // max(parted.numel(), 1), 1)
        for part, result in zip(parted.split(size, dim), out.split(size, dim), strict=True):
            factors = (whole, part.float()) if dim == -1 else (part.float(), whole)
            torch.matmul(*factors, out=result)
        return out


def _widens_itself(a: Tensor) -> bool:
    """Whether the device multiplies half precision with a result in float32: CUDA does from torch 2.8 on."""
    return a.is_cuda and torch.version.cuda is not None and hasattr(torch.ops.aten.bmm, "dtype")


def _by_device(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    batch = broadcast_shape(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
    return torch.bmm(a, b, out_dtype=torch.float32).unflatten(0, batch)
