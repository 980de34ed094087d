"""The reference kernels of the top-k in magnitude, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core import rows
from khot._core.precision import greatest, large, on, widen
from khot._core.rows import Row, Shards
from khot._kernels.reference.guard import guarded, middle
from khot._kernels.reference.selection import from_keys, keys_of, kth_largest, place
from khot._kernels.reference.tiles import some, tiles, two_sum

__all__ = [
    "jvp",
    "soft_topk_magnitude",
    "signs",
    "soft_topk_magnitude_backward",
    "unpooled",
]

STEPS = 60  # of safeguarded Newton for γ; up to 10 are common, 25 the most seen (p = 1.15, γ of 1e-30)
ROUNDING = {torch.float64: 1e-15, torch.float32: 5e-7}  # the relative error of a score
UNPOOLED_STEPS = 12  # Newton converges quadratically from the start: 8 steps are enough for every p >= 1.15


def soft_topk_magnitude(
    x: Tensor, k: Tensor, tau: Tensor, p: float, signed: bool, group: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k in magnitude of s = |x| ≥ 0: y, and the value γ = hi + lo of the pooled block.

    A selected entry that is not pooled has y = v(s), the root of v + τ v^(p−1) = s. Entries around the k-th
    place for which this would break the order are pooled at γ: they have y = Y(γ) = ((s − γ)₊/τ)^(q−1), and γ
    is the root of Σ min(γ, Y) = kγ over the row. Entries with Y ≥ γ are not pooled. If no entry is pooled, γ
    is any number between the selected v and the rejected s.

    Args:
        x: (*batch, n): with ``signed`` any numbers, whose signs y has; otherwise s, with −inf where an entry
            may not be selected.
        k, tau: broadcast with batch; k has integer values.
        group: the names of the process groups that the rows are spread over; "" for whole rows.

    Returns:
        y, of x's shape and dtype; hi and lo (*batch), ±`greatest` where k = 0. They are NaN in rows with a
        NaN, with more than k infinite entries, or with k or τ out of range.
    """
    if not signed:
        return _magnitude(x, k, tau, p, rows.of(group))
    sign = signs(x)
    y, hi, lo = _magnitude(x * sign, k, tau, p, rows.of(group))
    return (y * sign).contiguous(), hi, lo


def signs(x: Tensor) -> Tensor:
    """±1, also at ±0: unlike abs(x), x times its sign has a nonzero slope at 0."""
    return torch.copysign(torch.ones_like(x), x.detach())


class _Places(NamedTuple):
    """The facts about a row that top-k in magnitude needs before it solves for γ."""

    nan: Tensor  # whether there is one
    selectable: Tensor  # how many entries are not −inf
    pinned: Tensor  # how many are +inf
    least_in: Tensor  # the k-th largest entry; any number where k is out of range
    most_out: Tensor  # the next one


def _around(s: Tensor, k: Tensor, row: Row) -> _Places:
    if isinstance(row, Shards):
        keys = keys_of(s)
        at = place(s, keys, k.nan_to_num(1.0).clamp(1), row)
        least_in = from_keys(at.key, s).double()
        next_out = s.double().masked_fill(keys >= at.key.unsqueeze(-1), -math.inf)
        next_out = next_out.amax(-1) if s.shape[-1] else torch.full_like(least_in, -math.inf)
        (next_out,) = row.reduce([], [next_out])
        most_out = torch.where(at.left < at.equal, least_in, next_out)
        return _Places(at.nan, at.selectable, at.pinned, least_in, most_out)
    index = k.nan_to_num(0.0).clamp(0, s.shape[-1]).long().unsqueeze(-1)
    least_in, most_out = (widen(kth_largest(s, i).squeeze(-1)) for i in (index, index + 1))
    selectable, pinned = (s != -math.inf).sum(-1), (s == math.inf).sum(-1)
    return _Places(s.isnan().any(-1), selectable, pinned, least_in, most_out)


def _magnitude(s: Tensor, k: Tensor, tau: Tensor, p: float, row: Row) -> tuple[Tensor, Tensor, Tensor]:
    k = widen(k).expand(s.shape[:-1])
    nan, selectable, pinned, least_in, most_out = _around(s, k, row)
    tau = widen(tau).expand(s.shape[:-1])
    bad = nan | ~((k >= 0) & (k <= selectable) & (k == torch.floor(k)))
    bad = bad | ~((tau > 0) & (tau < math.inf)) | (pinned > k)
    k, tau = k.masked_fill(bad, 0), tau.masked_fill(bad, 1)
    most_out = most_out.masked_fill(k == selectable, 0)

    single, drop = unpooled(least_in, tau, p)
    gap = least_in - most_out
    none = k == 0
    pooled = (gap < drop) & ~none  # as if v(least_in) < most_out, but without the rounding error of v
    near = drop < 0.5 * least_in  # otherwise γ may be close to 0
    slack = 1 + 10 * ROUNDING[drop.dtype]  # because γ may be equal to a bound
    hi, lo = _solve_block(
        s,
        k,
        tau,
        p,
        anchor=least_in.where(near, 0),
        low=torch.where(near, -drop * slack, single / slack).masked_fill(~pooled, -1),
        high=torch.where(near, -gap, most_out).masked_fill(~pooled, 1),
        pooled=pooled,
        row=row,
    )
    parting = torch.where(single == math.inf, most_out + 1, 0.5 * single + 0.5 * most_out)
    hi = torch.where(pooled, hi, parting).masked_fill(none, greatest(hi)).masked_fill(bad, math.nan)
    lo = lo.masked_fill(~pooled, 0).masked_fill(none, greatest(lo)).masked_fill(bad, math.nan)

    y = torch.empty_like(s, memory_format=torch.contiguous_format)
    for part, tile in tiles(s):
        block = _block(tile, hi, lo, tau, p)
        y[..., part] = torch.where(block.alone, unpooled(tile, tau.unsqueeze(-1), p)[0], block.y)
    return y, hi, lo


def unpooled(s: Tensor, tau: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """v(s) ≥ 0 with v + τ v^(p−1) = s, and the difference s − v, with full relative accuracy."""
    if p == 2:
        return s / (1 + tau), s * (tau / (1 + tau))
    # With v = s·b^m, the equation is b^m + c·b^d = 1. It is convex in b, as neither power is less than 1, so
    # Newton converges from above the root.
    m, d = (1 / (p - 1), 1.0) if p < 2 else (1.0, p - 1)
    c = (tau * s.clamp(min=0).abs() ** (p - 2)).clamp(max=large(s))  # abs: −0 to a negative power is −inf
    b = (1 / c ** (1 / d)).clamp(max=1)
    for _ in range(UNPOOLED_STEPS):
        b = b - (b**m + c * b**d - 1) / (m * b ** (m - 1) + c * d * b ** (d - 1))
    b = b.clamp(0, 1)
    return s * b**m, s * (c * b**d).clamp(max=1)


class _Block(NamedTuple):
    w: Tensor  # (s − γ)₊/τ
    y: Tensor  # Y = w^(q−1)
    alone: Tensor  # Y ≥ γ: selected and not pooled
    inside: Tensor  # 0 < Y < γ: pooled


def _block(tile: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, p: float) -> _Block:
    hi, lo, tau = hi.unsqueeze(-1), lo.unsqueeze(-1), tau.unsqueeze(-1)
    w = ((tile - hi) - lo).clamp(min=0) / tau
    y = w ** (1 / (p - 1))
    alone = (y >= hi + lo) & (tile >= 0)
    inside = (y > 0) & ~alone
    return _Block(w, y, alone, inside)


def _solve_block(
    s: Tensor,
    k: Tensor,
    tau: Tensor,
    p: float,
    anchor: Tensor,
    low: Tensor,
    high: Tensor,
    pooled: Tensor,
    row: Row,
) -> tuple[Tensor, Tensor]:
    """The root γ of the increasing function G(γ) = (k − #alone)·γ − Σ_block Y, in anchor + [low, high].

    The anchor is the k-th largest entry if γ is near it, so that s − γ is accurate; otherwise it is 0, so
    that γ is accurate. :mod:`.root` does not find it: its terms have a τ that stays, and τγ^(p−1), of the
    soft count that has γ as its threshold, moves with γ.
    """
    e = 1 / (p - 1)
    anchor, drop = anchor.masked_fill(~pooled, 0), -low
    lo = middle(low, high)
    running = pooled
    for _ in range(STEPS):
        if not some(running, row):
            break
        own, total, slope = torch.zeros_like(lo), torch.zeros_like(lo), torch.zeros_like(lo)
        for _, tile in tiles(s):
            block = _block(tile, anchor, lo, tau, p)
            own = own + block.alone.sum(-1)
            total = total + block.y.where(block.inside, 0).sum(-1)
            rate = e * block.w ** (e - 1) / tau.unsqueeze(-1)
            slope = slope + rate.where(block.inside, 0).sum(-1)
        own, total, slope = row.reduce([own, total, slope])
        left = k - own
        target = total - left * anchor
        low = torch.where(target > left * lo, torch.maximum(low, lo), low)
        high = torch.where(target < left * lo, torch.minimum(high, lo), high)
        trial = target / (left + slope) + slope / (left + slope) * lo  # Newton's
        rounding = ROUNDING[lo.dtype] * torch.where(anchor == 0, trial.clamp(low, high), drop)
        tiny = ((trial - lo).abs() <= rounding) & trial.isfinite()
        # near a kink of G, Newton's step may end below the bracket by a rounding error
        short = (trial <= low) & (low - trial <= rounding) & ~tiny
        trial = guarded(torch.where(short, low + rounding, trial), low, high, tiny)
        lo = torch.where(running, trial, lo)
        running = running & ~(tiny | (high - low <= rounding))
    return two_sum(anchor, lo)


# ------------------------------------------------------------------------------------ derivatives


class _Linear(NamedTuple):
    """The derivative at a point, as differentiable functions of s, y, γ and τ."""

    own: Tensor  # dv/ds where an entry is selected on its own
    fall: Tensor  # −dv/dτ there
    rate: Tensor  # r = dY/ds in the pooled block
    w: Tensor  # (s − γ)/τ there, so that dY/dτ = −rw
    selected: Tensor  # whether an entry is selected on its own
    inside: Tensor  # whether it is pooled


def _linearize(s: Tensor, y: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, p: float) -> _Linear:
    e = 1 / (p - 1)
    nothing = hi.abs() == greatest(hi)
    tau = tau.to(hi.dtype).expand(hi.shape).unsqueeze(-1)
    t = (hi.masked_fill(nothing, 0) + lo.masked_fill(nothing, 0)).unsqueeze(-1)
    s, y = s.to(hi.dtype), y.to(hi.dtype)
    bad = y.detach().masked_fill(~y.isnan(), 0)  # rows of NaN stay so
    infinite = s.isinf()
    offset = s.masked_fill(infinite, 0) - hi.masked_fill(nothing, 0).unsqueeze(-1)
    w = (offset - lo.masked_fill(nothing, 0).unsqueeze(-1)) / tau
    idle = infinite | nothing.unsqueeze(-1)
    alone = (s >= 0) & (w.clamp(min=0) ** e >= t) & ~idle
    inside = (w > 0) & ~alone & ~idle
    w = w.masked_fill(~inside, 1)
    rate = torch.where(inside, e / tau * w ** (e - 1), bad)
    none = y <= 0  # also where half precision has no such small y
    y = torch.where(alone & ~none, y, 1)
    slope = (tau * (p - 1) * y ** (p - 2)).masked_fill(none & (p > 2), 0)  # τ v^(p−1) has none there
    own = torch.where(alone & ~(none & (p < 2)), 1 / (1 + slope), bad)
    fall = own * (y ** (p - 1)).masked_fill(none, 0)
    return _Linear(own, fall, rate, w, alone | (s == math.inf), inside)


def _per_pooled(k: Tensor, selected: Tensor, pooled: Tensor, rate: Tensor) -> Tensor:
    """1/(k − #alone + Σr) from sums over the row; 0 where nothing is pooled."""
    empty = pooled == 0
    left = k.to(rate.dtype).expand(rate.shape) - selected
    return torch.where(empty, 0, 1 / (left + rate).masked_fill(empty, 1))


def soft_topk_magnitude_backward(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    y: Tensor,
    k: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    p: float,
    signed: bool,
    group: str = "",
) -> tuple[Tensor, Tensor]:
    """The gradients in x and τ, differentiable. With r = dY/ds in the block:

    dγ = (Σ_block r ds − Σ_block r w dτ) / (k − #alone + Σ_block r)
    """
    if signed:
        sign = signs(x)
        sizes = grad * sign, grad_lo, x * sign, y * sign
        ds, dtau = soft_topk_magnitude_backward(*sizes, k, hi, lo, tau, p, False, group)
        return (ds * sign).contiguous(), dtau
    s, row = x, rows.of(group)
    k, tau = on(hi.device, k), on(hi.device, tau)
    lo, tau = row.share([lo, tau.to(hi.dtype).expand(hi.shape)])

    def parts() -> Iterator[tuple[slice, Tensor]]:
        # an empty shard takes part as well: what it shares is recorded
        return tiles(s) if s.shape[-1] else iter([(slice(0), widen(s))])

    def of(part: slice, tile: Tensor) -> tuple[_Linear, Tensor]:
        return _linearize(tile, y[..., part], hi, lo, tau, p), widen(grad[..., part])

    sums = [torch.zeros_like(hi)] * 6
    last: tuple[_Linear, Tensor] | None = None  # serves again where there is one tile only
    for part, tile in parts():
        d, v = last = of(part, tile)
        turn = d.rate * d.w
        terms = d.selected, d.inside, d.rate, turn, d.rate * v, v * (d.fall + turn)
        sums = [total + term.sum(-1) for total, term in zip(sums, terms, strict=True)]
    selected, pooled, rate, moment, along, direct = row.total(sums)
    through = (grad_lo - along) * _per_pooled(k, selected, pooled, rate)
    share = row.share([through])[0].unsqueeze(-1)
    found = []
    for part, tile in parts():
        d, v = last if last and tile.shape == s.shape else of(part, tile)
        found.append((d.own * v + d.rate * (v + share)).to(s.dtype))
    return torch.cat(found, -1).contiguous(), -direct - through * moment


def jvp(
    tangents: tuple[Tensor | None, ...], saved: tuple[Tensor, ...], p: float, signed: bool, row: Row
) -> tuple[Tensor, Tensor]:
    """Forward mode, for the tangents of x and τ: those of y and of lo."""
    (dx, dtau), (x, y, k, hi, lo, tau) = tangents, saved
    if signed:
        sign = signs(x)
        ds = None if dx is None else dx * sign
        dy, dlo = jvp((ds, dtau), (x * sign, y * sign, k, hi, lo, tau), p, False, row)
        return dy * sign, dlo
    k, tau = on(hi.device, k), on(hi.device, tau)
    d = _linearize(x, y, hi, lo, tau, p)
    ds = torch.zeros_like(d.w) if dx is None else dx.to(hi.dtype)
    dtau = torch.zeros_like(hi) if dtau is None else dtau.to(hi.dtype).expand(hi.shape)
    dtau = dtau.unsqueeze(-1)
    block = d.rate * (ds - d.w * dtau)
    parts = [d.selected.to(hi.dtype), d.inside.to(hi.dtype), d.rate, block]
    selected, pooled, rate, moved = row.total([part.sum(-1) for part in parts])
    dlo = moved * _per_pooled(k, selected, pooled, rate)
    dy = d.own * ds - d.fall * dtau + block - d.rate * dlo.unsqueeze(-1)
    return dy.to(y.dtype), dlo
