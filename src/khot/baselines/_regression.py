"""Four solvers of the isotonic regression v_1 ≥ … ≥ v_n that minimises Σ h_i(v_i).

Each takes z in descending order (*batch, n), c and k (*batch, 1), which entries are selected (w = 1_k), the
power q − 1, and e: h_i'(v) = w_i(c v + e) − (z_i − v)^power. Each returns v, and for each entry a number that
is the same in its block.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Solver", "ascend", "dykstra", "merge", "pool", "power_of", "power_slope"]

Solver = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]

# each round cuts an interval into so many parts; 55 bits in all are enough for float64
PARTS, ROUNDS = 32, 11


def pool(z: Tensor, c: Tensor, k: Tensor, selected: Tensor, power: float, e: float) -> tuple[Tensor, Tensor]:
    """Pool adjacent violators; v, and for each entry the first index of its block.

    The sign of h'_B(v), which says whether γ_B > v, is computed from the power sums of the block. They are
    summed from the k-th place outwards, so that far entries do not round off those of near ones.
    """
    power = int(power)
    n, index = z.shape[-1], torch.arange(z.shape[-1], device=z.device)
    k = k.expand(*z.shape[:-1], 1)
    z = z.double()
    alone = torch.where(selected, _alone(z, c.double(), power, e), z)
    last, first = (k - 1).clamp(min=0), k.clamp(max=n - 1)
    centre = z.gather(-1, last)
    powers = torch.stack([(z - centre) ** r for r in range(power + 1)])
    above = torch.where(selected, powers, 0).flip(-1).cumsum(-1).flip(-1)
    below = torch.where(selected, 0, powers).cumsum(-1)

    def at(sums: Tensor, place: Tensor) -> Tensor:
        return sums.gather(-1, place.expand(power + 1, *place.shape))

    def slope(v: Tensor, count: Tensor, sums: Tensor) -> Tensor:
        """Σ h_i'(v) of a block that holds `count` of the selected."""
        u = v - centre
        spread = sum(math.comb(power, r) * sums[r] * (-u) ** (power - r) for r in range(power + 1))
        return count * (c * v + e) - spread

    violated = (alone.gather(-1, last) < alone.gather(-1, first)) & (k > 0) & (k < n)
    start, stop = k - violated.long(), k + violated.long()  # an empty interval: no block
    while True:
        left = selected & violated & (slope(alone, k - index, above + at(below, (stop - 1).clamp(min=0))) < 0)
        new_start = torch.minimum(start, torch.where(left, index, n).amin(-1, keepdim=True))
        sums = below + at(above, new_start.clamp(max=n - 1))
        right = ~selected & violated & (slope(alone, k - new_start, sums) > 0)
        new_stop = torch.maximum(stop, torch.where(right, index + 1, 0).amax(-1, keepdim=True))
        if torch.equal(new_start, start) and torch.equal(new_stop, stop):
            break
        start, stop = new_start, new_stop
    inside = (index >= start) & (index < stop)
    v = torch.where(inside, _pooled_value(z, c, inside, selected, power, e), alone)
    return v.to(c.dtype), torch.where(inside, start, index)


def _alone(z: Tensor, c: Tensor, power: int, e: float) -> Tensor:
    """The value of a selected entry that is not in a block: h_i'(v) = 0."""
    return (z - e) / (1 + c) if power == 1 else z - _cubic_root(c, e + c * z)


def _pooled_value(z: Tensor, c: Tensor, inside: Tensor, selected: Tensor, power: int, e: float) -> Tensor:
    """γ with Σ_inside h_i'(γ) = 0."""

    def total(value: Tensor) -> Tensor:
        return torch.where(inside, value, 0).sum(-1, keepdim=True)

    size, chosen = inside.sum(-1, keepdim=True).clamp(min=1), (inside & selected).sum(-1, keepdim=True)
    mean = total(z) / size
    if power == 1:
        return (size * mean - chosen * e) / (size + chosen * c)
    d = z - mean
    linear = (3 * total(d**2) + chosen * c) / size
    return mean + _cubic_root(linear, (total(d**3) - chosen * (e + c * mean)) / size)


def _cubic_root(a: Tensor, b: Tensor) -> Tensor:
    """The real g with g³ + a g = b, for a ≥ 0."""
    scale = torch.sqrt(a.masked_fill(a == 0, 1) / 3)
    g = 2 * scale * torch.sinh(torch.asinh(b / (2 * scale**3)) / 3)
    return torch.where(a == 0, b.sign() * b.abs() ** (1 / 3), g)


def merge(z: Tensor, c: Tensor, k: Tensor, selected: Tensor, power: float, e: float) -> tuple[Tensor, Tensor]:
    """Pool adjacent violators, block by block; as :func:`pool`."""
    rows = z.double().reshape(-1, z.shape[-1])
    weights = selected.expand(z.shape).reshape(rows.shape).double()
    slopes = c.double().expand(*z.shape[:-1], 1).reshape(-1, 1)
    v, block = torch.empty_like(rows), torch.empty_like(rows, dtype=torch.long)
    for i, (row, weight, per_v) in enumerate(zip(rows, weights, slopes, strict=True)):

        def value(start: int, stop: int, row: Tensor = row, w: Tensor = weight, a: Tensor = per_v) -> Tensor:
            zero = row.new_zeros(1)
            return _root(row[None, start:stop], w[None, start:stop], a, zero, power, e)[0]

        pools: list[tuple[int, int, Tensor]] = []
        for j in range(len(row)):
            # an unselected entry on its own has exactly v = z, so that y is exactly 0
            pool = (j, j + 1, value(j, j + 1) if bool(weight[j]) else row[j])
            while pools and bool(pools[-1][2] < pool[2]):
                start = pools.pop()[0]
                pool = (start, j + 1, value(start, j + 1))
            pools.append(pool)
        for start, stop, gamma in pools:
            v[i, start:stop], block[i, start:stop] = gamma, start
    return v.to(z.dtype).view(z.shape), block.view(z.shape)


def ascend(
    iterations: int, z: Tensor, c: Tensor, k: Tensor, selected: Tensor, power: float, e: float
) -> tuple[Tensor, Tensor]:
    """Block coordinate ascent in the dual; v, and the tied block of each entry, as :func:`dykstra`."""
    dtype, n = z.dtype, z.shape[-1]
    z, c, w = z.double(), c.double(), selected.expand(z.shape).double()
    alpha = z.new_zeros(*z.shape[:-1], n + 1)  # of the constraint before each entry, and 0 at both ends
    for _ in range(iterations):
        for first in (0, 1):
            stop = first + (n - first) // 2 * 2
            if stop == first:
                continue
            pair, weight = (t[..., first:stop].unflatten(-1, (-1, 2)) for t in (z, w))
            before, after = alpha[..., first:stop:2], alpha[..., first + 2 : stop + 1 : 2]
            gamma = _root(pair, weight, c, after - before, power, e)
            slope = weight[..., 0] * (c * gamma + e) - power_of(pair[..., 0] - gamma, power)
            alpha[..., first + 1 : stop : 2] = (slope + before).clamp(min=0)
    pull = alpha.diff(dim=-1)
    v = _root(z.unsqueeze(-1), w.unsqueeze(-1), c, pull, power, e)
    v = torch.where((w == 0) & (pull == 0), z, v).to(dtype)  # exactly
    return v, _tied(v)


def _root(z: Tensor, w: Tensor, c: Tensor, target: Tensor, power: float, e: float) -> Tensor:
    """(*batch): the v with Σ h_i'(v) = target, h_i' = w_i(c v + e) − (z_i − v)^power, by nested intervals."""
    reach = (target.abs() + 2 * (c * z.abs().amax(-1) + e)) ** (1 / power)
    low, high = z.amin(-1) - reach, z.amax(-1) + reach
    share = torch.arange(1, PARTS, device=z.device) / PARTS
    z, w, c, target = z.unsqueeze(-2), w.unsqueeze(-2), c.unsqueeze(-1), target.unsqueeze(-1)
    for _ in range(ROUNDS):
        low, high = low.unsqueeze(-1), high.unsqueeze(-1)
        v = low + (high - low) * share
        slope = (w * (c * v + e).unsqueeze(-1) - power_of(z - v.unsqueeze(-1), power)).sum(-1)
        part = (slope < target).sum(-1, keepdim=True)
        ends = torch.cat((low, v, high), -1)
        low, high = (ends.gather(-1, part + i).squeeze(-1) for i in (0, 1))
    return 0.5 * low + 0.5 * high


def dykstra(
    iterations: int, z: Tensor, c: Tensor, k: Tensor, selected: Tensor, power: float, e: float
) -> tuple[Tensor, Tensor]:
    """The projection onto the monotone cone, weighted by 1 + c w; v, and the tied block of each entry."""
    weight = 1 + c * selected
    v = (z - e * selected) / weight
    corrections = [torch.zeros_like(v), torch.zeros_like(v)]
    for _ in range(iterations):
        for first in (0, 1):
            point = v + corrections[first]
            v = _project_pairs(point, weight, first)
            corrections[first] = point - v
    return v, _tied(v)


def _project_pairs(v: Tensor, weight: Tensor, first: int) -> Tensor:
    """Replace each ascending pair (first + 2i, first + 2i + 1) by its mean."""
    stop = first + (v.shape[-1] - first) // 2 * 2
    pair, share = (t[..., first:stop].unflatten(-1, (-1, 2)) for t in (v, weight))
    mean = (pair * share).sum(-1, keepdim=True) / share.sum(-1, keepdim=True)
    pair = torch.where(pair[..., :1] < pair[..., 1:], mean, pair)
    return torch.cat((v[..., :first], pair.flatten(-2), v[..., stop:]), -1)


def _tied(v: Tensor) -> Tensor:
    """The number of each entry's block of values that are equal but for rounding."""
    apart = v.diff(dim=-1).abs() > math.sqrt(torch.finfo(v.dtype).eps)
    return torch.nn.functional.pad(apart.cumsum(-1), (1, 0))


def power_of(d: Tensor, power: float) -> Tensor:
    """The odd power d^power, sign(d)·|d|^power for a fraction."""
    if isinstance(power, int):
        return d**power
    return d.sign() * d.abs().masked_fill(d == 0, 1) ** power  # sign is 0 there, and the slope not infinite


def power_slope(d: Tensor, power: float) -> Tensor:
    """Its slope; 0 instead of infinity at d = 0."""
    if isinstance(power, int):
        return power * d ** (power - 1)
    at_0 = (d == 0) & (power != 1.0)
    return (power * d.abs().masked_fill(at_0, 1) ** (power - 1)).masked_fill(at_0, 0)
