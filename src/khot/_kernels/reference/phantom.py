"""The phantom unit: it makes inclusion probabilities of any sum usable for designs of fixed size.

A temporary unit of probability ⌈Σπ⌉ − Σπ makes the sum an integer. It is dropped after the draw. Then ⌊Σπ⌋
units remain with the phantom's probability and ⌈Σπ⌉ otherwise, and E[x] = π (Bondesson, Grafström 2011; Wijk,
Vinuesa, Azizpour 2025, eq. 14 and, with its two cases exchanged, eq. 15).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["append", "distinct", "numbered", "size"]


def append(probs: Tensor, tolerance: float) -> Tensor:
    """probs (*batch, n), with a phantom as entry n if any row needs one; it is 0 in rows that need none. On a
    GPU there always is one, because looking would wait for the device.

    A sum within ``tolerance`` of an integer is that integer.
    """
    total = probs.sum(-1, keepdim=True)
    whole = (total - total.round()).abs() <= tolerance
    if not total.is_cuda and bool(whole.all()):
        return probs
    return torch.cat([probs, (total.ceil() - total).masked_fill_(whole, 0)], -1)


def size(probs: Tensor) -> Tensor:
    """How many units each row (*batch, n) selects, (*batch), int64: the integer that it sums to."""
    return probs.sum(-1).round_().long()


def distinct(probs: Tensor) -> Tensor:
    """probs without the rows that expand() repeats, so that what depends on probs alone is computed once."""
    return probs[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in probs.stride()[:-1])]


def numbered(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The :func:`distinct` rows as (m, n), and which of them each row is, (*batch)."""
    few = distinct(rows)
    count = math.prod(few.shape[:-1])
    which = torch.arange(count, device=rows.device).reshape(few.shape[:-1]).expand(rows.shape[:-1])
    return few.reshape(count, rows.shape[-1]), which
