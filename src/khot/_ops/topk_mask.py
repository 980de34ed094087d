"""The hard k-hot mask of whole rows or of shards. It has no derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core import arguments, rows
from khot._core.dispatch import Rule, define
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
    return _topk_mask(x, k) if row.here else _reference_topk_mask(x, k, row.name)[0]


class _Rule(Rule):
    """No derivative. The rule makes vmap work, and reports bad values from inside it."""

    differentiable = False

    @staticmethod
    def examine(outputs: Tensor | tuple[Tensor, ...], *inputs: Any) -> None:
        x, k, *group = inputs
        if isinstance(outputs, tuple):
            marked = outputs[1]
        else:
            marked = outputs.select(-1, 0) if outputs.shape[-1] else outputs
        if not arguments.shows_nan(marked):
            return
        arguments.explain_nan(marked, x, k, count=rows.of(*group).count)


def _fake(x: Tensor, k: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _reference_fake(x: Tensor, k: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float64)


_topk_mask = define(
    "topk_mask",
    "(Tensor x, Tensor k) -> Tensor",
    kernels.topk_mask,
    _fake,
    _Rule,
    decomposition=kernels.sorted_topk_mask,
)
_reference_topk_mask = define(
    "reference_topk_mask",
    "(Tensor x, Tensor k, str group) -> (Tensor, Tensor)",
    kernels.reference_topk_mask,
    _reference_fake,
    _Rule,
)
