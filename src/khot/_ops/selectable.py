"""How many entries of each row may be selected, at most k. It has no derivative."""

from __future__ import annotations

from khot._core.dispatch import define
from khot._kernels.reference import selectable as kernels

__all__ = ["selectable"]


selectable = define("selectable", kernels.selectable, "x[row] float64")
