"""The nucleus of each row, the most probable entries that have a given probability together. It has no
derivative."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.dispatch import Rule, define
from khot._core.precision import on, widen
from khot._ops.order_statistics import weighted_quantiles
from khot._ops.topk import largest_entries

__all__ = ["nucleus"]

FIRST = 256  # entries, which mostly have the whole probability
SLACK = 1e-12  # by which sums are rounded: p is reached by equal entries that add up to it


def _kernel(x: Tensor, p: Tensor) -> Tensor:
    """1 for the fewest entries whose probability softmax(x) sums to p or more, ties to the lowest index.

    Args:
        x: (*batch, n).
        p: broadcasts with batch; in [0, 1].

    A row that has no probabilities, or a p out of its range, is NaN.
    """
    if not x.numel():
        return torch.zeros_like(x)
    n, p = x.shape[-1], widen(on(x.device, p)).expand(x.shape[:-1]).reshape(-1, 1)
    rows = x.reshape(-1, n)
    top = widen(rows.amax(-1, keepdim=True))
    total = torch.exp(widen(rows) - top).sum(-1, keepdim=True)
    # few entries need no sort of the row, but to see that they do takes a look at values
    count = min(FIRST, n) if x.is_cpu else n
    goal = p * total * (1 - SLACK)
    mask, short = _prefix(rows, top, 0 * total, goal, count)
    mask = torch.where(p == 1, rows != -math.inf, mask)  # whatever sums are rounded to
    left = (short & (p < 1)).squeeze(-1)
    if count < n and bool(left.any()):
        mask[left] = _nearly_flat(rows[left], top[left], goal[left], total[left])
    bad = total.isnan() | ~((p >= 0) & (p <= 1))
    return mask.to(x.dtype).masked_fill(bad, math.nan).reshape(x.shape)


def _prefix(x: Tensor, top: Tensor, before: Tensor, goal: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of the first entries of the descending order, those before which the sum is less than the goal, and
    whether all of them fall short of it."""
    best, index = largest_entries(x, count, True, True)
    sums = before + torch.exp(widen(best) - top).cumsum(-1)
    keep = (torch.cat((before, sums[..., :-1]), -1) < goal) & (best != -math.inf)
    return torch.zeros_like(x, dtype=torch.bool).scatter(-1, index, keep), sums[..., -1:] < goal


def _nearly_flat(x: Tensor, top: Tensor, goal: Tensor, total: Tensor) -> Tensor:
    """The same by the entry with which the goal is reached: only its equals are sorted."""
    share = torch.exp(widen(x) - top)
    last = -weighted_quantiles(-x, share, goal / total)
    above, equal = x > last, x == last
    before = share.masked_fill(~above, 0).sum(-1, keepdim=True)
    count = int(equal.sum(-1).max())
    return above | _prefix(x.masked_fill(~equal, -math.inf), top, before, goal, count)[0]


class _Rule(Rule):
    """No derivative. The rule makes vmap work, and reports bad values from inside it."""

    differentiable = False

    @staticmethod
    def examine(outputs: Tensor, *inputs: Any) -> None:
        if arguments.shows_nan(outputs):
            arguments.check_values(inputs[1], "p", low=0, high=1)


nucleus = define("nucleus_mask", _kernel, "x", _Rule)
