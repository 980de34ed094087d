"""Thresholds of rows and columns together, by Newton's method on those of the columns."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot import counting
from khot._core.rows import Row

__all__ = ["column_thresholds", "even_shares"]

TAU = 0.01  # of the standard deviation of the scores
STAGES = (100.0, 30.0, 10.0, 3.0, 1.0)  # of TAU: from far away, Newton's method stalls at a small one
STEPS = 60  # per stage
ROUGH, FINE = 0.1, 1e-9  # the largest error of a load, relative, at which a stage ends, and the last one
ALMOST = 0.999  # the largest share of the tokens open to an expert that it gets: for all, c would be −∞
GRID = 1024.0  # thresholds are multiples of about τ/1024


def column_thresholds(x: Tensor, k: int, shards: Row) -> Tensor:
    """(tokens, experts) → c, (experts,), with mean 0, for which all experts have the same load

        Σ_i y_ij = Σ_ij y_ij / experts,    y_ij = σ((x_ij − r_i − c_j)/τ),   Σ_j y_ij = k

    An expert that is open to fewer tokens, because the scores of the others are −∞, gets nearly all of these.
    The result is rounded to a grid, which is coarse beside the differences that come from another order of
    the sums over the tokens. It is thus the same however the tokens are spread over processes.
    """
    width = x.shape[-1]
    available = (x != -math.inf).sum(-1)
    k_of_row = available.clamp(max=k).double()
    inner = x.masked_fill(~x.isfinite(), 0)
    finite = x.isfinite()
    mean = inner.sum(-1, keepdim=True) / finite.sum(-1, keepdim=True).clamp(min=1)
    spread = ((x - mean).masked_fill(~finite, 0)).square().sum()
    numbers = torch.stack([spread, finite.sum().double(), k_of_row.sum()])
    numbers, open_to = shards.reduce([numbers, (x != -math.inf).sum(0).double()])
    spread, entries, total = numbers.tolist()
    c = x.new_zeros(width)
    sd = math.sqrt(spread / max(entries, 1))
    if total == 0 or sd == 0:
        return c
    load = even_shares(numbers[2], ALMOST * open_to)
    state = _Problem(x - mean, k_of_row, load, shards)
    for stage in STAGES:
        tau = stage * TAU * sd
        goal = (FINE if stage == STAGES[-1] else ROUGH) * load.max().item()
        c = _newton(state, c, tau, goal)
    grid = 2.0 ** math.floor(math.log2(TAU * sd / GRID))
    return ((c - c.mean()) / grid).round() * grid


def even_shares(total: Tensor, most: Tensor) -> Tensor:
    """The same for all, min(s, most_j), with the sum ``total``; or ``most`` where that is not enough."""
    ordered = most.sort().values
    others = torch.arange(len(most), 0, -1, device=most.device)  # that get more than all before them
    s = (total - ordered.cumsum(0) + ordered) / others
    # s rises up to the first that it does not fill, and does not rise from there on
    return most.clamp(max=s.amax())


class _Problem:
    """The dual objective of the columns, its gradient and its second derivatives."""

    def __init__(self, x: Tensor, k: Tensor, load: Tensor, shards: Row) -> None:
        self.x, self.k, self.load, self.shards = x, k, load, shards

    def __call__(self, c: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        """By how much the loads exceed their goal, (experts,), and the second derivatives."""
        z = self.x - c
        y = ((z - counting.inverse_soft_count(z, self.k, tau=tau).unsqueeze(-1)) / tau).sigmoid()
        y = y.masked_fill(self.x == -math.inf, 0)
        f = y * (1 - y)
        rows = f.sum(-1, keepdim=True)
        # where no entry of a row is between 0 and 1, the row does not move
        shares = f / rows.masked_fill(rows == 0, 1)
        sums = torch.cat([y.sum(0)[None], f.sum(0)[None], f.T @ shares])
        sums = self.shards.reduce([sums])[0]
        return sums[0] - self.load, (sums[1].diag() - sums[2:]) / tau


def _newton(problem: _Problem, c: Tensor, tau: float, goal: float) -> Tensor:
    """From c, damped steps until no load is off by more than the goal, or no step helps any more."""
    damping, identity = 1e-6, torch.eye(len(c), dtype=c.dtype, device=c.device)
    miss, curvature = problem(c, tau)
    for _ in range(STEPS):
        if miss.abs().max() <= goal:
            break
        # the same constant added to all thresholds changes nothing, so that one direction has to be fixed
        scale = curvature.diagonal().mean() + problem.load.max() / tau * 1e-12
        fixed = curvature + scale / len(c)
        step = torch.linalg.solve(fixed + damping * scale * identity, miss)
        tried = c + step
        next_miss, next_curvature = problem(tried, tau)
        if next_miss.square().sum() < miss.square().sum():
            c, miss, curvature = tried, next_miss, next_curvature
            damping = max(damping / 10, 1e-12)
        elif damping > 1e6:
            break
        else:
            damping = damping * 10 if damping >= 1e-3 else 1e-3
    return c
