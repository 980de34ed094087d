"""The reference kernels of order statistics and weighted quantiles, and the entries that gradients go to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._core import rows
from khot._core.precision import on, widen
from khot._core.rows import HERE, Row, Shards
from khot._kernels.reference.selection import from_keys, keys_of, kth_largest, place

__all__ = [
    "order_statistics",
    "order_statistics_backward",
    "places_of",
    "weighted_quantiles",
]


def order_statistics(x: Tensor, k: Tensor, group: str = "") -> Tensor:
    """The k-th largest entries of each row; NaN for a row with a NaN, and for a k that is not in [1, n].

    Args:
        x: (*batch, n).
        k: (*batch, m).
        group: the names of the process groups that the rows are spread over, all of which get the values;
            "" for whole rows.
    """
    row = rows.of(group)
    return _of_shards(x, k, row) if isinstance(row, Shards) else _of_whole_rows(x, k)


def _of_whole_rows(x: Tensor, k: Tensor) -> Tensor:
    n, k = x.shape[-1], on(x.device, k)
    if n == 0 or k.numel() == 0:
        return x.new_full(k.shape, math.nan)
    bad = x.isnan().any(-1, keepdim=True) | _outside(k, n)
    whole = k.masked_fill(bad, 1).long()
    if k.shape[-1] > 2 or x.is_cuda:  # one sort costs less than several selections, which sort on a GPU
        values = x.sort(dim=-1, descending=True).values.gather(-1, whole - 1)
    else:
        values = torch.cat([kth_largest(x, each) for each in whole.split(1, -1)], -1)
    return (values + 0.0).masked_fill(bad, math.nan)  # 0 where the entry is −0


def _outside(k: Tensor, n: Tensor | int) -> Tensor:
    return ~((k >= 1) & (k <= n) & (k == k.floor()))


def _of_shards(x: Tensor, k: Tensor, row: Shards) -> Tensor:
    n = row.count(x.new_full((1,), x.shape[-1], dtype=torch.float64))
    bad = _outside(k, n)
    keys, whole = keys_of(x), k.masked_fill(bad, 1)
    columns = []
    for each in whole.unbind(-1):
        at = place(x, keys, each, row)
        columns.append(from_keys(at.key, x).masked_fill(at.nan, math.nan))
    values = torch.stack(columns, -1) if columns else x.new_empty(k.shape)
    return (values + 0.0).masked_fill(bad, math.nan)


def places_of(x: Tensor, values: Tensor, row: Row = HERE) -> tuple[Tensor, Tensor]:
    """The lowest index at which each row has each of the values, and whether this shard has that entry.

    No entry stands for an infinite value or for NaN. Of several shards, the one of lowest rank counts.

    Args:
        x: (*batch, n).
        values: (*batch, m), taken from x.
    """
    x, values = x.detach(), values.detach()
    if x.shape[-1] and values.shape[-1]:
        # argmax, unlike max, promises the first of equal entries
        equal = [(x == v).to(torch.uint8) for v in values.split(1, -1)]
        index = torch.cat([e.argmax(-1, keepdim=True) for e in equal], -1)
        here = x.gather(-1, index) == values
    else:
        index = torch.zeros_like(values, dtype=torch.long)
        here = index.bool()
    if isinstance(row, Shards):
        (having,) = row.reduce([row.slots(here.double())])
        here = here & (having[..., : row.rank].sum(-1) == 0)
    return index, here & values.isfinite()


def order_statistics_backward(x: Tensor, values: Tensor, grad: Tensor, group: str = "") -> Tensor:
    """The gradient of x from that of the values, which is summed over the shards. A row with NaN gets NaN."""
    row = rows.of(group)
    index, here = places_of(x, values, row)
    grad = row.total([grad])[0].to(x.dtype)
    start = torch.where(values.detach().isnan().any(-1, keepdim=True), math.nan, 0.0).to(x.dtype)
    dx = start.expand(x.shape)
    return dx.scatter_add(-1, index, grad.masked_fill(~here, 0)) if x.shape[-1] else dx.clone()


def weighted_quantiles(x: Tensor, weights: Tensor, level: Tensor) -> Tensor:
    """The smallest entries of each row up to which the weights sum to shares of all of them.

    Args:
        x: (*batch, n).
        weights: (*batch, n), ≥ 0. Entries of weight 0 are not found.
        level: (*batch, m), in [0, 1].

    NaN for a row with a NaN, with a bad weight or without any weight, and for other levels.
    """
    if x.numel() == 0:
        return x.new_full(level.shape, math.nan)
    weights = widen(weights)
    ordered, order = x.sort(dim=-1, stable=True)
    sums = weights.gather(-1, order).cumsum(-1)
    total = sums[..., -1:]
    share = (sums / total).masked_fill(sums == 0, -1)  # even a level of 0 needs some weight
    at = torch.searchsorted(share, level.contiguous()).clamp(max=x.shape[-1] - 1)
    bad = x.isnan().any(-1, True) | (weights < 0).any(-1, True) | ~((total > 0) & (total < math.inf))
    return (ordered.gather(-1, at) + 0.0).masked_fill(bad | ~((level >= 0) & (level <= 1)), math.nan)
