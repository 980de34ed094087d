"""A few entries of each row, from which thresholds are guessed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.precision import widen
from khot._core.rows import Row
from khot._kernels.reference.survey import Problem, Scales, costs_of, per

__all__ = [
    "LANES",
    "Sample",
    "guess_from",
    "keep",
    "lanes",
    "no_sample",
    "padded",
    "ranked",
    "sample_of",
    "sampled",
]

LANES = 256  # entries of a row that stand for all of them, from which points are chosen


class Sample(NamedTuple):
    """Some entries of each row: where each of them alone would have the share B/W, and their costs."""

    level: Tensor  # (*batch, LANES); NaN where there is none
    cost: Tensor


def sampled(p: Problem, scales: Scales) -> Sample:
    """Evenly spaced entries of each row."""
    n = p.x.shape[-1]
    part = slice(None, None, -(-n // LANES) or 1)
    w, x, a = costs_of(p, part, widen(p.x[..., part]))
    there = w > 0
    level = per(x - scales.quantile.unsqueeze(-1), a).where(there, math.nan)
    sample = Sample(level, w)
    return sample if p.row.here else sample_of(*p.row.reduce(lanes(p.row, padded(sample))))


def padded(sample: Sample) -> Sample:
    fill = 0, LANES - sample.level.shape[-1]
    level = torch.nn.functional.pad(sample.level, fill, value=math.nan)
    return Sample(level, torch.nn.functional.pad(sample.cost, fill))


def no_sample(zero: Tensor) -> Sample:
    nothing = torch.full((*zero.shape, LANES), math.nan, dtype=zero.dtype, device=zero.device)
    return Sample(nothing, torch.zeros_like(nothing))


def keep(
    sample: Sample, keys: Tensor | None, level: Tensor, w: Tensor, there: Tensor, start: int
) -> tuple[Sample, Tensor]:
    """The sample after a tile: one entry for each lane, out of those that are there.

    Which one is as good as random, so that sorted rows are sampled as well as others. The keys decide it, and
    are None before the first tile.
    """
    width = level.shape[-1]
    groups = -(-width // LANES)
    place = torch.arange(start, start + width, device=level.device)
    key = ((place * 2654435761) % (1 << 31)).to(level.dtype).expand(level.shape).where(there, -1)
    fill = groups * LANES - width
    key, level, w = (
        torch.nn.functional.pad(v, (0, fill), value=-1.0).unflatten(-1, (groups, LANES))
        for v in (key, level, w)
    )
    key, index = key.max(-2, keepdim=True)
    level, w = level.gather(-2, index).squeeze(-2), w.gather(-2, index).squeeze(-2)
    key = key.squeeze(-2)
    newer = key >= 0 if keys is None else key > keys
    keys = key if keys is None else torch.maximum(key, keys)
    return Sample(level.where(newer, sample.level), w.where(newer, sample.cost)), keys


def lanes(row: Row, sample: Sample) -> list[Tensor]:
    """Numbers whose sums over the processes are a sample of the row. Every process adds as many lanes of its
    own sample: all entries that it has, or evenly spaced ones of them."""
    count = -(-LANES // -(-LANES // max(1, LANES // row.world)))
    missing = sample.level.isnan()
    lane = missing.to(torch.int8).argsort(dim=-1, stable=True)  # those with an entry come first
    entries = (~missing).sum(-1, keepdim=True).clamp(min=count)
    lane = lane.gather(-1, torch.arange(count, device=lane.device) * entries // count)
    parts = (v.gather(-1, lane).nan_to_num(math.inf) for v in sample)
    return [row.slots(v).flatten(-2) for v in parts]  # type: ignore[attr-defined]


def sample_of(level: Tensor, cost: Tensor) -> Sample:
    return Sample(level.masked_fill(level == math.inf, math.nan), cost.where(level < math.inf, 0))


def ranked(sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """The levels in descending order, -inf where there is none, their costs, and what the first ones cost."""
    level, order = sample.level.nan_to_num(-math.inf).sort(-1, descending=True)
    cost = sample.cost.gather(-1, order)
    return level, cost, cost.cumsum(-1)


def guess_from(
    p: Problem, scales: Scales, sample: Sample, guess: Tensor, low: Tensor, high: Tensor
) -> Tensor:
    """The root if the sample were the row, and one of its entries alone were undecided."""
    level, cost, paid = ranked(sample)
    target = paid[..., -1:] * (p.budget / p.survey.total).unsqueeze(-1)
    rank = (paid < target * (1 - 1e-9)).sum(-1, keepdim=True).clamp(max=level.shape[-1] - 1)
    w = cost.gather(-1, rank)
    share = 1 - (paid.gather(-1, rank) - target) / w
    at, after = level.gather(-1, rank), level.gather(-1, (rank + 1).clamp(max=level.shape[-1] - 1))
    slope = w if p.by_value else torch.ones_like(w)
    z = p.cdf.icdf(share.clamp(1e-3, 1 - 1e-3).nan_to_num(0.5))
    alone = at + (scales.quantile.unsqueeze(-1) - p.tau.unsqueeze(-1) * z) / slope
    # after an entry that is paid for, the root lies between it and the next one
    between = 0.5 * at + 0.5 * after + scales.quantile.unsqueeze(-1) / slope
    found = torch.where(share > 1 - 1e-6, between, alone).squeeze(-1)
    return torch.maximum(torch.minimum(found.where(found.isfinite(), guess), high), low)
