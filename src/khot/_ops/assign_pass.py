"""One sweep over the rows of a two-sided assignment. It is a part of the solver and has no derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import define
from khot._kernels.reference import assign_pass as kernels

__all__ = ["assign_pass"]


def _fake(x: Tensor, k: Tensor, r: Tensor, c: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    (m, width), (slopes, values) = x.shape, rest[-2:]
    sums = c.new_empty(3 + width if slopes else 3, width, dtype=torch.float64)
    row = x.new_empty(m)
    return row, row.clone(), row.clone(), sums, x.new_empty(m if values else 0, width)


assign_pass = define(
    "assign_pass",
    kernels.assign_pass,
    _fake,
    schema="(Tensor x, Tensor k, Tensor r, Tensor c, float tau, str cdf, float shape, int steps, "
    "float tolerance, bool slopes, bool values) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
