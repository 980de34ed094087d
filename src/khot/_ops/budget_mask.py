"""The hard selection under a budget. It has no derivative."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from khot._core import arguments
from khot._core.dispatch import Rule, define
from khot._kernels.reference import budget_mask as kernels

__all__ = ["greedy_mask"]


class _Rule(Rule):
    """No derivative. The rule makes vmap work, and reports bad values from inside it."""

    own_dims = (1, 1)
    differentiable = False

    @staticmethod
    def examine(outputs: Tensor, *inputs: Any) -> None:
        _, _, budget = inputs
        if arguments.readable(outputs) and bool(outputs.isnan().any()):
            arguments.check_values(budget, "budget", low=0)


greedy_mask = define("budget_mask", kernels.budget_mask, "x", _Rule)
