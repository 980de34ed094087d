"""How many entries of each row may be selected, at most k. It has no derivative."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._core.dispatch import define
from khot._kernels.reference import selectable as kernels

__all__ = ["selectable"]


def _fake(x: Tensor, most: float) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float64)


selectable = define("selectable", "(Tensor x, float most) -> Tensor", kernels.selectable, _fake)
