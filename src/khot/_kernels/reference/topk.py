"""The reference kernel of the k largest entries with their indices: a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["exported_topk", "topk"]


def topk(x: Tensor, k: int, largest: bool, sorted: bool) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) entries of rows (*batch, n) and their indices: (*batch, k) each.

    They are in order, the lowest index first where they are equal, whether that was asked for or not.
    """
    values, indices = x.sort(dim=-1, descending=largest, stable=True)
    return values[..., :k].contiguous(), indices[..., :k].contiguous()


def exported_topk(x: Tensor, k: int, largest: bool, sorted: bool) -> tuple[Tensor, Tensor]:
    """:func:`topk` in operations that other formats have, such as ONNX, whose TopK promises the lowest
    index."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # few runtimes sort half precision
    values, indices = wide.topk(k, dim=-1, largest=largest, sorted=True)
    return values.to(x.dtype), indices
