"""The hard k-hot mask of whole rows or of shards. It has no derivative."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._core import arguments, rows
from khot._core.dispatch import Rule, define
from khot._core.precision import wide_dtype
from khot._core.rows import HERE, Row
from khot._kernels.reference import topk_mask as kernels

__all__ = ["hard_mask"]


def hard_mask(x: Tensor, k: Tensor, row: Row = HERE) -> Tensor:
    """1 for the ⌊k + ½⌋ largest entries of each row, ties to the lowest index of the whole row.

    Args:
        x: (*batch, n).
        k: broadcasts with batch.
        row: says whether x is the whole rows or a shard of them.
    """
    mask: Tensor = _topk_mask.on(row.name)(x, k)
    return mask


class _Rule(Rule):
    """No derivative. The rule makes vmap work, and reports bad values from inside it."""

    differentiable = False

    @staticmethod
    def examine(mask: Tensor, x: Tensor, k: Tensor, group: str = "") -> None:
        marked = mask.select(-1, 0) if mask.shape[-1] else torch.zeros_like(mask.sum(-1))
        if group:  # an empty shard has no entry that is NaN
            (bad,) = rows.of(group).reduce([], [marked.isnan().to(wide_dtype(x.device))])
            marked = bad.masked_fill(bad > 0, math.nan)
        if arguments.shows_nan(marked):
            arguments.explain_nan(marked, x, k, count=rows.of(group).count)


_topk_mask = define(
    "topk_mask", kernels.topk_mask, "x", _Rule, decomposition=kernels.sorted_topk_mask, spread=True
)
