"""Where rows spread far beyond τ, the entry at which the budget is spent: by counting, pass after pass.

There the root is next to this entry, or between it and the following one, and points elsewhere say little
about it. A pass adds up the costs in bins and goes on with the bin in which the budget is spent. It takes a
fiftieth of what a pass of the search takes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.precision import greatest
from khot._kernels.reference.sample import Sample, ranked
from khot._kernels.reference.survey import Problem, Scales, costs_of, per
from khot._kernels.reference.tiles import tiles

__all__ = ["PASSES", "Window", "narrow_pass", "window_of"]

PASSES = 4
# The width of a bin, in τ, from which on Newton's method is better. Without tails (False) few entries decide.
FINE = {True: 4.0, False: 0.1}
FAR = 1e7  # the same of a window that bins of equal width would take too many passes for
EDGE = 1e-6  # of a bin's cost: what is not left of it by more than this ends between two entries


class Window(NamedTuple):
    """The levels (see :class:`Sample`) among which the budget is spent, and the guess of the root."""

    low: Tensor
    high: Tensor
    guess: Tensor
    found: Tensor  # whether the guess is next to the root


def window_of(p: Problem, sample: Sample, guess: Tensor, low: Tensor, high: Tensor) -> Window:
    """Where the level is, if the sample does not deceive by more than three standard deviations.

    Args:
        low, high: bounds of all levels.
    """
    level, _, paid = ranked(sample)
    share = (p.budget / p.survey.total).unsqueeze(-1)
    rank = (paid < paid[..., -1:] * share).sum(-1, keepdim=True)
    there = (level > -math.inf).sum(-1, keepdim=True)
    off = (3 * torch.sqrt(there * share * (1 - share)) + 3).long()

    def end(place: Tensor, bound: Tensor) -> Tensor:
        inside = (place >= 0) & (place < there)
        found = level.gather(-1, place.clamp(0, level.shape[-1] - 1))
        return torch.where(inside, found, bound.unsqueeze(-1)).squeeze(-1)

    return Window(
        end(rank + off, low), end(rank - off, high), guess, torch.zeros_like(guess, dtype=torch.bool)
    )


def narrow_pass(p: Problem, scales: Scales, at: Window, running: Tensor) -> tuple[Window, Tensor]:
    """One pass: the bin in which the budget is spent."""
    batch, n = p.tau.shape, p.x.shape[-1]
    bins = min(1024, max(32, n // 8)) if p.row.here else 256  # must be the same on every process
    inner, outer, quantile = at.low.unsqueeze(-1), at.high.unsqueeze(-1), scales.quantile.unsqueeze(-1)
    unit = p.tau / p.survey.dearest if p.by_value else p.tau  # of a level, as much as τ is of a score
    far = outer - inner > FAR * unit.unsqueeze(-1)
    zero = at.low.new_zeros(*batch, bins + 2)
    costs, least, most = zero, zero + math.inf, zero - math.inf
    for part, tile in tiles(p.x):
        w, x, a = costs_of(p, part, tile)
        level = per(x - quantile, a)
        place = (level - inner) / (outer - inner)
        if p.x.is_cuda or bool(far.any()):
            place = torch.where(far, _place(level, inner, outer, unit.unsqueeze(-1)), place)
        place = (place * bins).nan_to_num(0).clamp(-1, bins - 1).floor_().long() + 1
        place = place.masked_fill(level < inner, 0).masked_fill(level > outer, bins + 1)
        costs = costs.scatter_add(-1, place, w)
        least = least.scatter_reduce(-1, place, level.where(w > 0, math.inf), "amin")
        most = most.scatter_reduce(-1, place, level.where(w > 0, -math.inf), "amax")
    costs, least, most = p.row.reduce([costs], [-least, most])
    least = -least

    spent = costs.flip(-1).cumsum(-1).flip(-1)  # with all bins above
    budget, tau = p.budget, p.tau
    chosen = ((spent >= budget.unsqueeze(-1) * (1 - 1e-9)).sum(-1, keepdim=True) - 1).clamp(min=0)
    low, high, cost, above = (v.gather(-1, chosen).squeeze(-1) for v in (least, most, costs, spent))
    share = (budget - (above - cost)) / cost
    below = torch.arange(bins + 2, device=chosen.device) < chosen
    after = most.where(below, -math.inf).amax(-1)
    edge, single = (share > 1 - EDGE) & (after > -math.inf), low == high
    slope = cost if p.by_value else torch.ones_like(cost)
    close = high - low <= FINE[p.cdf.full_support] * unit
    z = torch.where(single, p.cdf.icdf(share.clamp(1e-3, 1 - 1e-3).nan_to_num(0.5)), p.cdf.median)
    at_entry = high - share * (high - low) + (scales.quantile - tau * z) / slope
    guess = torch.where(edge, 0.5 * low + 0.5 * after + scales.quantile / slope, at_entry)
    usable = running & guess.isfinite() & (cost > 0)
    found = usable & (edge | single | close)
    moved = Window(
        low.where(usable, at.low),
        high.where(usable, at.high),
        guess.where(usable, at.guess),
        at.found | found,
    )
    return moved, usable & ~found


def _place(level: Tensor, low: Tensor, high: Tensor, unit: Tensor) -> Tensor:
    """Where a number lies between two others, from 0 to 1, on a scale of sizes from the unit on."""
    far = greatest(level)
    level, low, high = (torch.asinh((v / unit).clamp(-far, far)) for v in (level, low, high))
    return (level - low) / (high - low)
