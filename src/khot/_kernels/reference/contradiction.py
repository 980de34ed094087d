"""Whether bounds of rows, columns and a total contradict one another, where no thresholds were found.

Bounds are met by a circulation: from a source to the rows, over open entries, which take up to 1, to the
columns, to a sink, and with the total back. Hoffman (1960): one exists unless, for some set of these places,
what has to leave the set is more than what may enter it. If no matrix meets the bounds, prices of the columns
run away, and order the columns so that such a set has the first of them. Which rows belong to it is then
decided for each row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot import cdfs
from khot._core.rows import Row
from khot._kernels.reference.bounded_assign import FINE, Problem
from khot._kernels.reference.sides import Sides, settle
from khot._kernels.reference.soft_assign import EQUAL

__all__ = ["contradict"]


def contradict(x: Tensor, sides: Sides, slack: float, shards: Row) -> bool:
    """Whether it is certain that no matrix meets these bounds. x is (m, E), of which no entry is NaN."""
    left = settle(x, sides, slack, shards)
    if left is None:
        return True
    if not bool(left.columns.any()):
        return False
    # scores do not matter, so that all are the same, and with compact support there are no small densities
    level = left.x.masked_fill(left.x.isfinite(), 0)
    problem = Problem(level, left.sides, cdfs.resolve("uniform"), shards, left.missed)
    state = problem.descend(problem.at(torch.zeros_like(left.sides.least), 1.0), 1.0, FINE)
    if state.error <= problem.accepted * problem.scale(state):
        return False
    return _cut((~problem.closed).to(x), left.sides, state.c.argsort(), shards)


def _cut(open_: Tensor, sides: Sides, order: Tensor, shards: Row) -> bool:
    """Whether the first columns, of any number, show that bounds contradict one another."""
    count = _sums(open_[:, order])  # entries of each row in the first columns
    need = (sides.least_k.unsqueeze(-1) - count).clamp(min=0).sum(0)
    room = torch.minimum(sides.most_k.unsqueeze(-1), count).sum(0)
    need, room, below = shards.reduce([need, room, open_.sum(0)])
    least, most = sides.least[order], torch.minimum(sides.most, below)[order]
    first, others = _sums(least), most.sum() - _sums(most)
    gaps = [need - others, first - room]
    if sides.total is not None:
        gaps += [sides.total - others - room, need + first - sides.total]
    rounding = EQUAL * max(1.0, float(below.sum()))
    return bool((torch.stack(gaps) > rounding).any())


def _sums(values: Tensor) -> Tensor:
    """The sums of the first 0, 1, 2 and more along the last dim."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))
