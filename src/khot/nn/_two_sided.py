"""Thresholds of rows and columns together, by Newton's method on those of the columns."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot import cdfs
from khot._core.rows import Row
from khot._kernels.reference.soft_assign import Problem, descend

__all__ = ["column_thresholds", "even_shares"]

TAU = 0.01  # of the standard deviation of the scores
STAGES = (100.0, 30.0, 10.0, 3.0, 1.0)  # of TAU: from far away, Newton's method stalls at a small one
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
    state = Problem(x - mean, k_of_row, load, cdfs.resolve("logistic"), shards)
    for stage in STAGES:
        tau = stage * TAU * sd
        goal = (FINE if stage == STAGES[-1] else ROUGH) * load.max().item()
        c = descend(state, c, tau, goal)
    grid = 2.0 ** math.floor(math.log2(TAU * sd / GRID))
    return ((c - c.mean()) / grid).round() * grid


def even_shares(total: Tensor, most: Tensor) -> Tensor:
    """The same for all, min(s, most_j), with the sum ``total``; or ``most`` where that is not enough."""
    ordered = most.sort().values
    others = torch.arange(len(most), 0, -1, device=most.device)  # that get more than all before them
    s = (total - ordered.cumsum(0) + ordered) / others
    # s rises up to the first that it does not fill, and does not rise from there on
    return most.clamp(max=s.amax())
