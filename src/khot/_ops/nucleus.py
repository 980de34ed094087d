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

FIRST, LONG = 256, 512  # so many entries mostly have the whole probability of so many
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
    share = torch.exp(widen(rows) - widen(rows.amax(-1, keepdim=True)))
    total = share.sum(-1, keepdim=True)
    goal = p * total * (1 - SLACK)
    if x.is_cpu and n > LONG:  # to see that a few entries are enough takes a look at values
        mask, enough = _of_few(rows, share, goal)
        left = ~(enough | (p == 1)).squeeze(-1)
        if bool(left.any()):
            mask[left] = _of_all(rows[left], share[left], goal[left], total[left])
    else:
        mask = _of_all(rows, share, goal, total)
    mask = torch.where(p == 1, rows != -math.inf, mask)  # whatever sums are rounded to
    bad = total.isnan() | ~((p >= 0) & (p <= 1))
    return mask.to(x.dtype).masked_fill(bad, math.nan).reshape(x.shape)


def _of_few(x: Tensor, share: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """Of the first entries of the descending order, those before which the sum is less than the goal, and
    whether all of them reach it."""
    index = largest_entries(x, FIRST, True, True)[1]
    sums = share.gather(-1, index).cumsum(-1)
    keep = torch.nn.functional.pad(sums[..., :-1], (1, 0)) < goal
    return torch.zeros_like(x, dtype=torch.bool).scatter(-1, index, keep), sums[..., -1:] >= goal


def _of_all(x: Tensor, share: Tensor, goal: Tensor, total: Tensor) -> Tensor:
    """Those before which the sum is less than the goal, from the entry with which it is reached."""
    last = -weighted_quantiles.overload(-x, share, goal / total)
    above, equal = x > last, x == last
    before = share.masked_fill(~above, 0).sum(-1, keepdim=True)
    each = torch.exp(widen(last) - widen(x.amax(-1, keepdim=True)))
    count = ((goal - before) / each).ceil()
    return above | (equal & (equal.cumsum(-1) <= count))


class _Rule(Rule):
    """No derivative. The rule makes vmap work, and reports bad values from inside it."""

    differentiable = False

    @staticmethod
    def examine(outputs: Tensor, *inputs: Any) -> None:
        if arguments.shows_nan(outputs):
            arguments.check_values(inputs[1], "p", low=0, high=1)


nucleus = define("nucleus_mask", _kernel, "x", _Rule)
