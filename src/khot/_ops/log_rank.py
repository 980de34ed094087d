"""The sum of logarithms of ranks of each list, by its grades or, where these are many, by tiles of pairs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from khot._core import arguments
from khot._core.torch_internals import forward_mode_is_on
from khot._ops.laplace import laplace_integral

__all__ = ["log_ranks"]

# From so many entries on, pairs take less time than grades where these are at least a quarter of them.
LONG, FEW = 300, 4
CELLS = 1 << 18  # pairs of a tile, of which some ten arrays of 2 MB stay in the cache


def log_ranks(x: Tensor, gain: Tensor, grade: Tensor, step: Tensor) -> Tensor:
    """Σ_c step_c Σ_(i: gain_i ≥ c) log(1 + N_ic / o_c) of each list, as for the loss of :mod:`khot.losses`.

    Args:
        x: (*batch, n), in the wide dtype; −inf takes no part.
        gain: (*batch, n), ≥ 0.
        grade, step: (*batch, C), the distinct gains > 0 in rising order, and how far each is above the one
            below it; inf and 0 where a list has fewer.
    """
    if _by_pairs(x, gain, grade):
        loss: Tensor = _Pairs.apply(x, gain, grade, step)
        return loss
    return _by_grades(x, gain, grade, step)


def _by_pairs(x: Tensor, gain: Tensor, grade: Tensor) -> bool:
    n = x.shape[-1]
    if n < LONG or FEW * grade.shape[-1] < n or forward_mode_is_on():
        return False
    return arguments.readable(x) and arguments.readable(gain) and bool((x < math.inf).all())


def _by_grades(x: Tensor, gain: Tensor, grade: Tensor, step: Tensor) -> Tensor:
    """In O(n log n + C n) time and O(C n) memory."""
    y, order = torch.sort(x, -1, descending=True)
    high = gain.gather(-1, order).unsqueeze(-2) >= grade.unsqueeze(-1)
    before = laplace_integral(y, ~high & (y != -math.inf).unsqueeze(-2))
    best = (high.sum(-1, keepdim=True) + 1) / 2
    surplus = torch.where(high, torch.log1p(before / best), 0).sum(-1)
    return (surplus * step).sum(-1)


class _Pairs(Function):
    """In O(n²) time and O(n) memory, with the gradient in the same pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *constants: Tensor) -> Tensor:
        losses, slope = x.new_zeros(x.shape[:-1]), torch.zeros_like(x)
        for at in range(losses.numel()):
            row, *rest = (each.reshape(-1, each.shape[-1])[at] for each in (x, *constants))
            there = row != -math.inf
            loss, grad = _of_list(row[there], rest[0][there], *rest[1:])
            losses.view(-1)[at] = loss
            slope.view(-1, x.shape[-1])[at, there] = grad
        ctx.save_for_backward(slope, x, *constants)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slope, x, *constants = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated
            loss = _by_grades(x, *constants)
            (slope,) = torch.autograd.grad(loss, x, grad, create_graph=True)
            return slope, None, None, None
        return grad.unsqueeze(-1) * slope, None, None, None


def _of_list(x: Tensor, gain: Tensor, grade: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a list and its gradient in x.

    In the order of the gains, the entries below a grade come first. So N_ic of an entry and all its grades
    are places of one running sum of G(x_j − x_i), and the derivatives in it are running sums from the last
    grade on.
    """
    gain, order = torch.sort(gain)
    x = x[order]
    n, start = len(x), int((gain <= 0).sum())
    below = torch.searchsorted(gain, grade)  # of each grade
    reached = torch.searchsorted(grade, gain, right=True)  # how many grades an entry has
    best = (n - below + 1) / 2
    loss, slope = x.new_zeros(()), torch.zeros_like(x)
    while start < n:
        stop = min(n, start + max(1, CELLS // max(start, 512)))
        m = int(reached[stop - 1])
        width = int(below[m - 1])  # only these are below one of the grades
        rows = slice(start, stop)
        apart = x[:width] - x[rows].unsqueeze(-1)
        tail = 0.5 * torch.exp(-apart.abs())
        sums = pad((apart.clamp(min=0) + tail).cumsum_(-1), (1, 0))
        surplus = sums.index_select(-1, below[:m]) / best[:m]
        weight = torch.where(torch.arange(m) < reached[rows].unsqueeze(-1), step[:m], 0)
        loss = loss + (torch.log1p(surplus) * weight).sum()
        weight /= (surplus + 1) * best[:m]  # the derivatives in N_ic
        above = pad(weight.flip(-1).cumsum_(-1).flip(-1), (0, 1))
        each = above.index_select(-1, reached[:width].clamp(max=m))  # of the grades above that of entry j
        each *= torch.where(apart > 0, 1 - tail, tail)
        slope[:width] += each.sum(0)
        slope[rows] -= each.sum(-1)
        start = stop
    return loss, torch.empty_like(slope).index_copy_(0, order, slope)
