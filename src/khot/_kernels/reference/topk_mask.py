"""The reference kernel of the hard k-hot mask."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from khot._core import rows
from khot._core.precision import on, widen
from khot._core.rows import HERE, Row, Shards
from khot._kernels.reference.selection import from_keys, keys_of, kth_largest, place

__all__ = ["sorted_topk_mask", "topk_mask"]


def topk_mask(x: Tensor, k: Tensor, group: str = "") -> Tensor:
    """1 for the ⌊k + ½⌋ largest entries of each row, ties to the lowest index; NaN without an answer.

    Args:
        x: (*batch, n).
        k: broadcasts with batch.
        group: the names of the process groups that the rows are spread over; "" for whole rows. Ties go to
            the lowest rank first, and within it to the lowest index.
    """
    return _mask(x, k, rows.of(group))


def sorted_topk_mask(x: Tensor, k: Tensor) -> Tensor:
    """:func:`topk_mask` in operations that other formats have, such as ONNX; no value is read."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # few runtimes sort half precision
    return _mask(wide, k, HERE, _kth_of_sorted).to(x.dtype)


def _kth_of_sorted(x: Tensor, k: Tensor) -> Tensor:
    return x.sort(dim=-1, descending=True).values.gather(-1, k.clamp(1, x.shape[-1]) - 1)


def _mask(x: Tensor, k: Tensor, row: Row, kth: Callable[[Tensor, Tensor], Tensor] = kth_largest) -> Tensor:
    k = widen(on(x.device, k)).expand(x.shape[:-1])
    count = torch.floor(k + 0.5)
    shards = row if isinstance(row, Shards) else None
    at = shards and place(x, keys_of(x), count.nan_to_num(0.0).clamp(0), shards)
    if at:
        nan, selectable, pinned = at.nan, at.selectable, at.pinned
    else:
        nan, selectable, pinned = x.isnan().any(-1), (x != -math.inf).sum(-1), (x == math.inf).sum(-1)
    bad = nan | ~((k >= 0) & (k <= selectable)) | (pinned > count)
    count = count.masked_fill(bad, 0)

    if shards and at:
        value = from_keys(at.key, x).unsqueeze(-1)
        above, level = x > value, x == value
        left = at.left
        if bool(((left < at.equal) & ~bad).any()):  # the processes share the ties
            (there,) = shards.reduce([shards.slots(level.sum(-1))])
            left = left - there[..., : shards.rank].sum(-1)
    else:
        value = kth(x, count.long().unsqueeze(-1))
        above, level = x > value, x == value
        left = count.long() - above.sum(-1)
    chosen = (above | (level & (level.cumsum(-1, dtype=torch.int32) <= left.unsqueeze(-1)))) & (
        count > 0
    ).unsqueeze(-1)
    return chosen.to(x.dtype).masked_fill(bad.unsqueeze(-1), math.nan)
