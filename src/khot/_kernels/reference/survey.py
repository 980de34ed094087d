"""The problem whose root is wanted, and what the first pass over the rows finds out about it.

Costs are added up exactly: they are cut into slices of so few digits that sums of slices have no rounding
error, in any order, tile or shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.precision import widen
from khot._core.rows import Row
from khot._kernels.reference.tiles import two_sum
from khot.cdfs import CDF

__all__ = [
    "Problem",
    "Scales",
    "Survey",
    "add",
    "costs_of",
    "cut",
    "exact_sum",
    "nothing",
    "of_row",
    "one_entry",
    "per",
    "quantile_of",
    "residual",
    "scales_of",
    "times",
]


class Survey(NamedTuple):
    """What the entries of finite x and positive cost have in common, of the batch shape."""

    entries: Tensor  # how many
    dearest: Tensor
    total: Tensor  # the sum of the costs, with the next digits of it in:
    digits: Tensor
    # Of x or, by value, of x/w:
    low: Tensor  # the least
    high: Tensor
    mean: Tensor  # the sums, each times w
    square: Tensor  # of the squares
    cheapest: Tensor  # the least cost; 1 by score


class Problem(NamedTuple):
    x: Tensor  # (*batch, n); only finite entries take part
    cost: Tensor | None  # (*batch, n); None if every entry costs 1
    survey: Survey
    budget: Tensor  # 0 < B < the sum of the costs
    tau: Tensor
    cdf: CDF
    by_value: bool
    row: Row


class Scales(NamedTuple):
    """What the first pass finds, and all others need."""

    slices: tuple[Tensor, Tensor]  # numbers whose addition cuts a cost to the digits of a slice
    log_base: Tensor  # the logarithm of the greatest cost
    rest: Tensor  # the sum of the costs less B
    quantile: Tensor  # τ F⁻¹(B/W)


def residual(x: Tensor, a: Tensor, hi: Tensor) -> Tensor:
    """x − hi·a with one rounding; its derivatives are those of x − hi·a."""
    product = hi * a
    return (x - product) - _product_error(hi.detach(), a.detach(), product.detach())


def _product_error(u: Tensor, v: Tensor, product: Tensor) -> Tensor:
    """u·v − product, exactly (Dekker); 0 where the halves would overflow."""
    (u1, u2), (v1, v2) = _halves(u), _halves(v)
    error = ((u1 * v1 - product) + u1 * v2 + u2 * v1) + u2 * v2
    return error.nan_to_num(0, 0, 0)


def _halves(v: Tensor) -> tuple[Tensor, Tensor]:
    c = v * (2.0**27 + 1 if v.dtype == torch.float64 else 2.0**12 + 1)
    high = c - (c - v)
    return high, v - high


def costs_of(p: Problem, part: slice, tile: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The costs of the entries that take part (0 for the others), x and a there; a is None if it is 1."""
    if p.cost is None:
        counts = tile.isfinite()
        return widen(counts), tile.where(counts, 0), None
    w = widen(p.cost[..., part])
    counts = (w > 0) & tile.isfinite()
    w = w.where(counts, 0)
    return w, tile.where(counts, 0), w.where(counts, 1) if p.by_value else None


def per(value: Tensor, a: Tensor | None) -> Tensor:
    return value if a is None else value / a


def times(value: Tensor, a: Tensor | None) -> Tensor:
    return value if a is None else value * a


def scales_of(p: Problem) -> Scales:
    rest = exact_sum((p.survey.total, -p.budget, p.survey.digits))
    quantile = p.tau * quantile_of(p.cdf, p.budget, rest)
    return Scales(_slices(p.survey.entries, p.survey.dearest), torch.log(p.survey.dearest), rest, quantile)


def nothing(zero: Tensor) -> Survey:
    """The survey of no entries."""
    return Survey(zero, zero, zero, zero, zero + math.inf, zero - math.inf, zero, zero, zero + math.inf)


def add(seen: Survey, x: Tensor, w: Tensor | None, by_value: bool = False) -> Survey:
    """The survey with the entries of a tile; their costs w are 0 where they take no part, or None for 1."""
    counts = x.isfinite() if w is None else w > 0
    cheapest = torch.ones_like(seen.cheapest)
    if by_value:
        assert w is not None
        cheapest = torch.minimum(seen.cheapest, w.where(counts, math.inf).amin(-1))
        x = x / w.where(counts, 1)
    low = torch.minimum(seen.low, x.where(counts, math.inf).amin(-1))
    high = torch.maximum(seen.high, x.where(counts, -math.inf).amax(-1))
    x = x.where(counts, 0)
    count, weighted = widen(counts.sum(-1)), times(x, w)
    entries, mean, square = seen.entries + count, weighted.sum(-1), (weighted * x).sum(-1)
    moments = low, high, seen.mean + mean, seen.square + square, cheapest
    if w is None:
        return Survey(entries, torch.ones_like(entries), entries, seen.digits, *moments)
    dearest = w.amax(-1)
    parts = [piece.sum(-1) for piece in cut(w, _slices(torch.full_like(count, w.shape[-1]), dearest))]
    total, digits = _sum_of_two([seen.total, *parts, seen.digits])
    return Survey(entries, torch.maximum(seen.dearest, dearest), total, digits, *moments)


def of_row(survey: Survey, row: Row, *sums: Tensor) -> tuple[Survey, list[Tensor]]:
    """The same over the row instead of a shard of it, and other sums with it."""
    if row.here:
        return survey, list(sums)
    entries, dearest, *totals, low, high, mean, square, cheapest = survey
    slots = [row.slots(v) for v in totals]  # type: ignore[attr-defined]
    entries, mean, square, *slots, dearest, low, high, cheapest = row.reduce(
        [entries, mean, square, *slots, *sums], [dearest, -low, high, -cheapest]
    )
    total, digits = _sum_of_two([*slots[0].unbind(-1), *slots[1].unbind(-1)])
    return Survey(entries, dearest, total, digits, -low, high, mean, square, -cheapest), slots[2:]


def one_entry(survey: Survey, live: Tensor) -> Survey:
    """The survey with that of a single entry, 0 of cost 1, in the rows that are not live."""
    ones = (1, 1, 1, 0, 0, 0, 0, 0, 1)
    return Survey(*(v.where(live, one) for v, one in zip(survey, ones, strict=True)))


def cut(w: Tensor, slices: tuple[Tensor, Tensor]) -> list[Tensor]:
    """w as a sum of two slices and a rest."""
    pieces, left = [], w
    for scale in slices:
        scale = scale.unsqueeze(-1)
        piece = ((scale + left) - scale).where(scale.isfinite(), left)
        pieces.append(piece)
        left = left - piece
    return [*pieces, left]


def _slices(count: Tensor, dearest: Tensor) -> tuple[Tensor, Tensor]:
    digits = torch.ceil(torch.log2(count + 2))
    first = torch.exp2(digits + torch.ceil(torch.log2(dearest)))
    return first, torch.exp2(digits) * first * (torch.finfo(dearest.dtype).eps / 2)


def exact_sum(terms: Sequence[Tensor]) -> Tensor:
    """The sum of some numbers, as exact as if it had twice the digits."""
    total, digits = _sum_of_two(terms)
    return total + digits


def _sum_of_two(terms: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    total, digits = terms[0], torch.zeros_like(terms[0])
    for term in terms[1:]:
        total, error = two_sum(total, term)
        digits = digits + error
    return total, digits


def quantile_of(cdf: CDF, spent: Tensor, rest: Tensor) -> Tensor:
    """F⁻¹(B/W), from B and W − B: their ratio to W loses digits near 1."""
    info = torch.finfo(spent.dtype)
    if not cdf.symmetric:
        share = (spent / (spent + rest)).clamp(info.tiny, 1 - info.eps / 2)
        z = cdf.icdf(share)
        # A user's quantile may be infinite at the number before 1, and a search does not start there. It is
        # asked for once more only then, as it may be a search of its own; a GPU would have to wait to know.
        infinite = ~z.isfinite()
        if z.is_cuda or bool(infinite.any()):
            z = torch.where(infinite, cdf.icdf(share.clamp(max=1 - 16 * info.eps)), z)
        return z
    lesser = (torch.minimum(spent, rest) / (spent + rest)).clamp(min=info.tiny)
    z = cdf.icdf(lesser)
    return torch.where(spent <= rest, z, -z)
