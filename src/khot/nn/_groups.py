"""Groups of experts, of which a token may use a few."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core import arguments
from khot.selection import topk

__all__ = ["Groups"]


class Groups(NamedTuple):
    """Experts in ``number`` groups of as many neighbours each, of which a token may use ``top``: those with
    the largest sums of their two best scores; of equal ones, the first."""

    number: int
    top: int

    @classmethod
    def of(cls, groups: int, top_groups: int | None, num_experts: int, k: float) -> Groups:
        """The groups, if the arguments are good ones for so many experts, of which k are chosen."""
        arguments.check_integer(groups, "groups", low=1, high=num_experts)
        if num_experts % groups:
            raise ValueError(f"groups must divide num_experts={num_experts}, but got {groups}")
        if top_groups is None:
            top_groups = groups
        arguments.check_integer(top_groups, "top_groups", low=1, high=groups)
        most = top_groups * (num_experts // groups)
        if k > most:
            raise ValueError(f"top_groups={top_groups} of groups={groups} have {most} experts, but got k={k}")
        return cls(groups, top_groups)

    @property
    def all(self) -> bool:
        return self.top == self.number

    def sums(self, scores: Tensor) -> Tensor:
        """The sum of the two best scores of each group, (..., number)."""
        each = scores.detach().unflatten(-1, (self.number, -1))
        return topk(each, min(2, each.shape[-1])).values.sum(-1)

    def closed(self, sums: Tensor) -> Tensor:
        """Which groups the token may not use, (..., number)."""
        best = topk(sums, self.top).indices
        return torch.ones_like(sums, dtype=torch.bool).scatter(-1, best, False)

    def offered(self, scores: Tensor, closed: Tensor) -> Tensor:
        """The scores, −∞ in closed groups."""
        each = scores.unflatten(-1, (self.number, -1))
        return each.masked_fill(closed.unsqueeze(-1), -math.inf).flatten(-2)

    def describe(self) -> dict[str, int]:
        """For the repr of a layer; nothing where all groups may be used."""
        return {} if self.all else {"groups": self.number, "top_groups": self.top}
