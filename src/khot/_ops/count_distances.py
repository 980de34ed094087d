"""What a balancer counts. It has no derivative, and no rule: traces and transforms see torch's operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import define
from khot._core.torch_internals import transforms_are_on
from khot._kernels.reference import count_distances as kernels

__all__ = ["count_distances"]


def count_distances(counts: Tensor, biased: Tensor, *rest: Any) -> None:
    """Add tokens to the counts, in place: see the reference kernel."""
    if _count.is_served(biased) and not torch.compiler.is_compiling() and not transforms_are_on():
        _count(counts, biased, *rest)
    else:
        kernels.count_distances(counts, biased, *rest)


def _fake(*_: Tensor | None) -> None:
    pass


_count = define(
    "count_distances",
    kernels.count_distances,
    _fake,
    schema="(Tensor(a!) counts, Tensor biased, Tensor values, Tensor best, Tensor updates, Tensor octave, "
    "Tensor? mask, Tensor? sums, Tensor? tops, Tensor? closed) -> ()",
)
