"""Reference kernels of the sorted Laplace count: every sum over a row in O(n log n) time and O(n) memory.

With the scores sorted, y_0 ≥ y_1 ≥ …, and the decays e^(−g_p) of the gaps g_p = (y_(p−1) − y_p)/τ, sums such
as Σ_(j above p) e^(−(y_j − y_p)/τ) w_j follow from one another: :func:`decay_scan`. No decay exceeds 1, so
nothing overflows, whatever x/τ is (Struski et al. 2025, Proposition 4.2, has e^(±x/τ) instead).

The count and its inverse are taken at any levels; without levels, the count at the entries themselves, which
gives their ranks, and the inverse at the levels i − ½, which gives the soft sort.

The derivatives are written in torch operations and scans only. Given a differentiable ``scan`` they can be
differentiated again, to any order and in either mode (`khot._ops.laplace`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._core.precision import greatest, on, wide_dtype, widen

__all__ = [
    "FAR",
    "ahead",
    "behind",
    "decay_scan",
    "half_levels",
    "laplace_centred_rank",
    "laplace_count",
    "laplace_count_backward",
    "laplace_thresholds",
    "laplace_thresholds_backward",
    "jvp_count",
    "jvp_thresholds",
]

Scan = Callable[[Tensor, Tensor, bool], Tensor]

FAR = 1000.0  # in τ: e^(−g) is 0 for gaps from here on


def behind(v: Tensor) -> Tensor:
    """v shifted by one place: out_i = v_(i−1), out_0 = 0."""
    return torch.cat((torch.zeros_like(v[..., :1]), v[..., :-1]), -1)


def ahead(v: Tensor) -> Tensor:
    """v shifted back by one place: out_i = v_(i+1), and 0 for the last."""
    return torch.cat((v[..., 1:], torch.zeros_like(v[..., :1])), -1)


def decay_scan(w: Tensor, g: Tensor, reverse: bool) -> Tensor:
    """out_i = e^(−g_i)·(out_(i−1) + w_(i−1)) with out_0 = 0.

    With ``reverse``, out_i = e^(−g_(i+1))·(out_(i+1) + w_(i+1)), and the last one is 0.

    Args:
        w, g: (*batch, n), or tensors that broadcast to it. g ≥ 0 is the gap before each entry; the first
            entry has none, and g_0 is not read.

    The result is linear in w. It takes log₂ n steps; each step doubles how far back a sum reaches.
    """
    w, g = torch.broadcast_tensors(w, g)
    n = w.shape[-1]
    if reverse:
        w, g = w.flip(-1), behind(g.flip(-1))
    decay = torch.exp(-g)
    out = decay * behind(w)
    decay = torch.cat((torch.zeros_like(decay[..., :1]), decay[..., 1:]), -1)
    reach = 1
    while reach < n:
        far = slice(reach, None)
        out = torch.cat((out[..., :reach], out[..., far] + decay[..., far] * out[..., :-reach]), -1)
        decay = torch.cat((torch.zeros_like(decay[..., :reach]), decay[..., far] * decay[..., :-reach]), -1)
        reach *= 2
    return out.flip(-1) if reverse else out


# ------------------------------------------------------------------------------------------- the row


class _Sorted(NamedTuple):
    order: Tensor  # int64
    y: Tensor  # the scores, descending, 0 in place of infinite ones
    free: Tensor  # which are finite, or in a row without an answer
    tau: Tensor  # (*batch), NaN if it is not positive and finite, or if the row has a NaN
    gap: Tensor
    up: Tensor  # Σ e^(−distance/τ) over the entries above
    down: Tensor
    bad: Tensor  # which rows have no answer, (*batch, 1)


def _sorted(x: Tensor, order: Tensor | None, tau: Tensor, scan: Scan) -> _Sorted:
    """The row in the given order, or sorted. It is sorted in its own dtype, which has the same order and
    takes a GPU half the digits or fewer."""
    if order is None:
        y, order = torch.sort(x.contiguous(), dim=-1, descending=True, stable=True)
        y = widen(y)
    else:
        order = order.long()
        y = widen(x).gather(-1, order)
    tau = widen(on(x.device, tau)).expand(x.shape[:-1])
    bad = (~((tau > 0) & (tau < math.inf)) | y.isnan().any(-1)).unsqueeze(-1)
    tau = tau.masked_fill(bad.squeeze(-1), math.nan)
    gap = _gaps(y, tau)
    free = ~y.isinf() | bad
    one = torch.ones_like(y)
    up, down = scan(one, gap, False), scan(one, gap, True)
    return _Sorted(order, y.masked_fill(~free, 0), free, tau, gap, up, down, bad)


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """The index of the first finite entry of the sorted row, and the one after the last: (*batch, 1)."""
    return (x == math.inf).sum(-1, keepdim=True), (x > -math.inf).sum(-1, keepdim=True)


def _gaps(y: Tensor, tau: Tensor) -> Tensor:
    """(y_(p−1) − y_p)/τ, at most `FAR`, so that no product has an infinite factor; 0 for the first."""
    before, after = y[..., :-1], y[..., 1:]
    gap = (before - after).nan_to_num()  # ∞ − ∞ is 0
    tau = tau.unsqueeze(-1)
    gap = torch.minimum(gap, FAR * tau) / tau
    return torch.cat((torch.zeros_like(y[..., :1]), gap), -1)


def _distances(s: _Sorted, scan: Scan) -> tuple[Tensor, Tensor]:
    """Σ e^(−d) d over the entries above, and over those below, where d are their distances in τ."""
    up, down = s.gap * s.up, ahead(s.gap) * s.down
    return up + scan(up, s.gap, False), down + scan(down, s.gap, True)


def _unsort(v: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(v).scatter(-1, order, v)


# ------------------------------------------------------------------------------------------- counts


def laplace_count(
    x: Tensor, levels: Tensor | None, tau: Tensor, descending: bool = True, *, scan: Scan = decay_scan
) -> tuple[Tensor, Tensor, Tensor]:
    """C(b) = Σ_j F((x_j − b)/τ) for Laplace's F, at many levels b of a row.

    With p entries at or above b, C(b) = p − ½ a e^(−α) + ½ c e^(−β), where α and β are the distances in τ to
    the next entries above and below b, and a and c are the decayed counts from these outwards. An entry of
    +inf always counts, and one of −inf never.

    Args:
        x: (*batch, n).
        levels: (*batch, m), or (m,) for the same levels in every row; or None for the ranks
            r_i = ½ + Σ_j F((x_j − x_i)/τ), the counts at the entries, each of which counts itself as 1. Equal
            entries, infinite ones among them, share the mean of their ranks.
        tau: broadcasts with batch.
        descending: False for ranks that count from the smallest entry, n + 1 − r_i. Not for levels.

    Returns:
        The counts, (*batch, m) in the dtype of `precision.wide_dtype`, but the ranks in x's; the int32
        indices that sort x in descending order; and the int32 numbers p, empty for the ranks. The counts are
        NaN for a level that is NaN, and in rows with a NaN or with a τ that is not positive.
    """
    s = _sorted(x, None, tau, scan)
    bad, order = s.bad, s.order.int()
    if levels is None:
        n, apart = x.shape[-1], 0.5 * (s.down - s.up)
        ends = (1, n + 1, 1) if descending else (n, 0, -1)
        place = torch.arange(*ends, dtype=s.y.dtype, device=x.device)
        rank = (place + (apart if descending else -apart)).masked_fill(bad, math.nan)
        return _unsort(rank, s.order).to(x.dtype), order, order.new_empty((*x.shape[:-1], 0))
    levels = widen(levels).expand(*x.shape[:-1], levels.shape[-1])
    y = widen(x).gather(-1, s.order)
    place = torch.searchsorted(-y, -levels.contiguous(), right=True)
    place = torch.minimum(place, _ends(x)[1]).int()
    d = _around(levels, place, s, scan)
    count = place - d.above.weight * d.above.mass + d.below.weight * d.below.mass
    return count.masked_fill(bad | levels.isnan(), math.nan), order, place


def laplace_centred_rank(
    x: Tensor, tau: Tensor, count: Callable[..., tuple[Tensor, Tensor, Tensor]] = laplace_count
) -> tuple[Tensor, Tensor]:
    """r_i − (m + 1)/2 in a row in which m entries are not −inf; these others have 0.

    Args:
        x, tau: as for :func:`laplace_count`.
        count: which kernel gives the ranks.

    Returns:
        The centred ranks, in x's dtype, at least float32, and the int32 indices that sort x in descending
        order.
    """
    rank, order, _ = count(widen(x), None, tau, True)
    there = x != -math.inf
    rank = torch.where(there, rank - 0.5 * (there.sum(-1, keepdim=True) + 1), 0)
    return rank.to(torch.promote_types(x.dtype, torch.float32)).contiguous(), order


def laplace_count_backward(
    grad: Tensor,
    x: Tensor,
    order: Tensor,
    levels: Tensor | None,
    place: Tensor,
    tau: Tensor,
    want_tau: bool,
    descending: bool = True,
    *,
    scan: Scan = decay_scan,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x, the levels (*batch, m) and τ (batch), differentiable. Without levels theirs is
    empty, and that of τ may hold anything unless it is wanted.

    dx_j = Σ_b v_b f/τ, db = −v_b Σ_j f/τ, dτ = −Σ v_b f z/τ. All entries on one side of a level get their
    share through the one next to it.
    """
    s = _sorted(x, order, tau, scan)
    if levels is None:  # ∂r/∂x is symmetric
        v = widen(grad if descending else -grad).gather(-1, s.order)
        dx = _unsort(_spread(v, s, scan), s.order).to(x.dtype)
        return dx, v.new_empty((*v.shape[:-1], 0)), (v * _rank_in_tau(s, scan)).sum(-1)
    d = _around(levels, place, s, scan)
    v = widen(grad).masked_fill(levels.isinf(), 0) / s.tau.unsqueeze(-1)
    zero = torch.zeros_like(s.y)
    up = zero.scatter_add(-1, d.above.nearest, v * d.above.weight)
    down = zero.scatter_add(-1, d.below.nearest, v * d.below.weight)
    dx = up + scan(up, s.gap, True) + down + scan(down, s.gap, False)
    dx = _unsort(dx.masked_fill(~s.free, 0), s.order).to(x.dtype)
    return dx, -v * d.density, -(v * d.moment).sum(-1)


def jvp_count(
    tangents: tuple[Tensor | None, ...], saved: tuple[Any, ...], *, descending: bool = True, scan: Scan
) -> Tensor:
    """Forward mode, for the tangents of x, the levels and τ."""
    (dx, dlevels, dtau), (x, order, levels, place, tau) = tangents, saved
    s = _sorted(x, order, tau, scan)
    v = None if dx is None else widen(dx).gather(-1, s.order)
    by_tau = 0 if dtau is None else widen(dtau).expand(s.tau.shape).unsqueeze(-1)
    if levels is None:
        rank = torch.zeros_like(s.y) if v is None else _spread(v, s, scan)
        if dtau is not None:
            rank = rank + _rank_in_tau(s, scan) * by_tau
        return _unsort(rank if descending else -rank, s.order).to(x.dtype)
    d = _around(levels, place, s, scan)
    out = torch.zeros_like(d.density)
    if v is not None:
        v = v.masked_fill(~s.free, 0)
        up, down = v + scan(v, s.gap, False), v + scan(v, s.gap, True)
        out = d.above.weight * up.gather(-1, d.above.nearest) + d.below.weight * down.gather(
            -1, d.below.nearest
        )
    if dlevels is not None:
        out = out - d.density * widen(dlevels)
    if dtau is not None:
        out = out - d.moment * by_tau
    return out.masked_fill(levels.isinf(), 0) / s.tau.unsqueeze(-1)


def _spread(v: Tensor, s: _Sorted, scan: Scan) -> Tensor:
    """Σ_j f_ij (v_j − v_i)/τ, and 0 for infinite entries: the derivative there is zero."""
    v = v.masked_fill(~s.free, 0)
    around = scan(v, s.gap, False) + scan(v, s.gap, True)
    out = 0.5 * (around - v * (s.up + s.down)) / s.tau.unsqueeze(-1)
    return out.masked_fill(~s.free, 0)


def _rank_in_tau(s: _Sorted, scan: Scan) -> Tensor:
    up, down = _distances(s, scan)
    return 0.5 * (down - up) / s.tau.unsqueeze(-1)


class _Side(NamedTuple):
    """The entries on one side of each level, which all count through the one next to it."""

    nearest: Tensor  # the index of the entry next to the level; arbitrary if there is none
    weight: Tensor  # ½ e^(−distance/τ) of this entry, which is f; 0 if there is none
    mass: Tensor  # Σ e^(−distance/τ) from this entry, over it and those beyond
    moment: Tensor  # Σ f d over the side, for distances d from the level in τ


class _Around(NamedTuple):
    above: _Side
    below: _Side
    density: Tensor  # Σ f
    moment: Tensor  # Σ f z


def _around(levels: Tensor, place: Tensor, s: _Sorted, scan: Scan) -> _Around:
    b, finite = widen(levels).masked_fill(levels.isinf(), 0), ~levels.isinf()
    place, n = place.long(), s.y.shape[-1]

    def side(nearest: Tensor, there: Tensor, sign: int, others: Tensor, distances: Tensor) -> _Side:
        there = there & finite & s.free.gather(-1, nearest)
        distance = torch.where(there, sign * (s.y.gather(-1, nearest) - b), 0) / s.tau.unsqueeze(-1)
        weight = torch.where(there, 0.5 * torch.exp(-distance), 0)
        mass = 1 + others.gather(-1, nearest)
        return _Side(nearest, weight, mass, weight * (distance * mass + distances.gather(-1, nearest)))

    up, down = _distances(s, scan)
    above = side((place - 1).clamp(min=0), place > 0, 1, s.up, up)
    below = side(place.clamp(max=n - 1), place < n, -1, s.down, down)
    density = above.weight * above.mass + below.weight * below.mass
    return _Around(above, below, density, above.moment - below.moment)


# --------------------------------------------------------------------------------------- thresholds


def laplace_thresholds(
    x: Tensor, levels: Tensor | None, tau: Tensor, descending: bool = True, *, scan: Scan = decay_scan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """t = hi + lo with C(t) = level, for many levels of a row.

    Between neighbouring scores with m entries above, C(t) = m − ½ a e^(−α) + ½ b e^(−β), where α and β are
    the distances in τ to the two neighbours, and a and b are the decayed counts from each of them outwards.
    This is a quadratic equation in e^(−α), or in e^(−β). We solve for the one that is not small, and take t
    relative to that neighbour.

    Args:
        x: (*batch, n).
        levels: (*batch, m), or (m,) for the same levels in every row; or None for the soft sort, the
            thresholds of the levels i − ½ in descending order.
        tau: broadcasts with batch.
        descending: False for the soft sort in ascending order. Not for levels.

    Returns:
        hi and lo, (*batch, m), both ±`greatest` where t = ±inf, that is, where no finite entry is counted or
        all of them are; the int32 indices that sort x in descending order; and the int32 number of entries
        above t. hi and lo are NaN in rows with a NaN or with a τ that is not positive, and for a level that
        is NaN. For the soft sort hi is empty, and lo is t in x's dtype; the last result is in descending
        order always.
    """
    batch, n = x.shape[:-1], x.shape[-1]
    asked = _asked(levels, x).expand(*batch, -1)
    s = _sorted(x, None, tau, scan)
    order = s.order.int()
    if n == 0:
        hi, lo = torch.full_like(asked, math.nan), torch.full_like(asked, math.nan)
        place = torch.zeros_like(asked, dtype=torch.int64)
    else:
        count = torch.arange(n, dtype=s.y.dtype, device=x.device) + 0.5 * (1 + s.down - s.up)
        place = torch.searchsorted(count, asked.contiguous(), right=True)
        first, last = ends = _ends(x)
        place = torch.minimum(torch.maximum(place, first), last)
        g = _segment(asked, place, s, ends)
        from_above = g.lack > 0
        hi = s.y.gather(-1, torch.where(from_above, g.above, g.below))
        lo = s.tau.unsqueeze(-1) * torch.where(from_above, -g.near, g.near)
        bad, none, every, end = s.bad | asked.isnan(), asked <= first, asked >= last, greatest(hi)
        hi, lo = (
            t.masked_fill(every, -end).masked_fill(none, end).masked_fill(bad, math.nan) for t in (hi, lo)
        )
    if levels is None:
        t = (hi + lo).to(x.dtype)
        return hi.new_empty((*batch, 0)), t if descending else t.flip(-1), order, place.int()
    return hi, lo, order, place.int()


def half_levels(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], dtype=wide_dtype(x.device), device=x.device) + 0.5


def _asked(levels: Tensor | None, x: Tensor) -> Tensor:
    """The levels, (m,) or (*batch, m)."""
    return half_levels(x) if levels is None else widen(levels)


def laplace_thresholds_backward(
    grad: Tensor,
    x: Tensor,
    order: Tensor,
    levels: Tensor | None,
    place: Tensor,
    tau: Tensor,
    want_tau: bool,
    descending: bool = True,
    *,
    scan: Scan = decay_scan,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`laplace_count_backward`, from the gradient of lo: with w = f/Σf at t, ∂t/∂x = w,
    ∂t/∂τ = −Σ w z and ∂t/∂level = −τ/Σf."""
    s, g, d = _linearize(x, order, levels, place, tau, scan)
    v = widen(grad if descending else grad.flip(-1)).masked_fill(~g.live, 0)
    zero = torch.zeros_like(s.y)
    up = zero.scatter_add(-1, g.above, v * d.share_above / g.a)
    down = zero.scatter_add(-1, g.below, v * d.share_below / g.b)
    dx = up + scan(up, s.gap, True) + down + scan(down, s.gap, False)
    dx = _unsort(dx.masked_fill(~s.free, 0), s.order).to(x.dtype)
    dlevels = v[..., :0] if levels is None else -_over_density(v, g, d, s.tau)
    return dx, dlevels, -(v * d.z_mean).sum(-1)


def jvp_thresholds(
    tangents: tuple[Tensor | None, ...], saved: tuple[Any, ...], *, descending: bool = True, scan: Scan
) -> Tensor:
    """Forward mode, as :func:`jvp_count`: the tangent of t."""
    (dx, dlevels, dtau), (x, order, levels, place, tau) = tangents, saved
    s, g, d = _linearize(x, order, levels, place, tau, scan)
    out = torch.zeros_like(d.z_mean)
    if dx is not None:
        v = widen(dx).gather(-1, s.order).masked_fill(~s.free, 0)
        up, down = v + scan(v, s.gap, False), v + scan(v, s.gap, True)
        out = d.share_above * up.gather(-1, g.above) / g.a + d.share_below * down.gather(-1, g.below) / g.b
    if dtau is not None:
        out = out - d.z_mean * widen(dtau).expand(s.tau.shape).unsqueeze(-1)
    if dlevels is not None:
        out = out - _over_density(dlevels.expand(out.shape), g, d, s.tau)
    out = out.masked_fill(~(g.live | s.bad), 0)
    if levels is not None:
        return out
    return (out if descending else out.flip(-1)).to(x.dtype)


class _Segment(NamedTuple):
    """Where the threshold of each level lies between its neighbours in the sorted row.

    All entries above it count through the one next to it, as A = a e^(−α), and all below as B = b e^(−β).
    A − B is 2·lack, and A·B is a b e^(−gap).
    """

    live: Tensor  # t is finite
    above: Tensor  # the index of the entry next above t; arbitrary if there is none
    below: Tensor
    both: Tensor  # whether there are two
    a: Tensor  # Σ e^(−distance/τ) from the entry next above t, over this entry and those above it
    b: Tensor
    gap: Tensor  # α + β; ∞ without two neighbours
    lack: Tensor
    larger: Tensor  # the larger one of A and B; arbitrary where they are equal, as both may underflow
    near: Tensor  # α or β, that of the larger one; where they are equal β


def _segment(asked: Tensor, place: Tensor, s: _Sorted, ends: tuple[Tensor, Tensor]) -> _Segment:
    n, (first, last) = s.y.shape[-1], ends
    live = (asked > first) & (asked < last)
    above, below = (place - 1).clamp(min=0), place.clamp(max=n - 1)
    has_above, has_below = live & (place > first), live & (place < last)
    both = has_above & has_below
    a = torch.where(has_above, 1 + s.up.gather(-1, above), 1)
    b = torch.where(has_below, 1 + s.down.gather(-1, below), 1)
    gap = (s.y.gather(-1, above) - s.y.gather(-1, below)) / s.tau.unsqueeze(-1)
    gap = torch.where(both, gap, math.inf)
    lack = torch.where(live, place - asked, 1)
    equal = lack == 0
    size = torch.where(equal, 1, lack.abs())
    larger = size + torch.sqrt(size * size + a * b * torch.exp(-gap))
    near = torch.log(torch.where(lack > 0, a, b) / larger)
    near = torch.where(equal, 0.5 * (gap + torch.log(b / a)), near)
    return _Segment(live, above, below, both, a, b, gap, lack, larger, near)


class _Linear(NamedTuple):
    share_above: Tensor  # Σ w over the entries above t, for w = f/Σf
    share_below: Tensor
    z_mean: Tensor  # Σ w z
    over_density: Tensor  # 1/Σf


def _linearize(
    x: Tensor, order: Tensor, levels: Tensor | None, place: Tensor, tau: Tensor, scan: Scan
) -> tuple[_Sorted, _Segment, _Linear]:
    s = _sorted(x, order, tau, scan)
    g = _segment(_asked(levels, x), place.long(), s, _ends(x))
    equal, from_above, product = g.lack == 0, g.lack > 0, g.a * g.b
    smaller = product * torch.exp(-g.gap) / g.larger
    total = g.larger + smaller
    # Where A and B are equal, the lack is 0, but has derivatives: A is √(AB) e^asinh(lack/√(AB)).
    half = torch.where(equal, 0.5 * (g.gap - torch.log(product)), 0)
    ratio = torch.where(equal, g.lack, 0) * torch.exp(half.clamp(max=math.log(greatest(half)) - 1))
    scale = torch.rsqrt(1 + ratio * ratio)
    share_near = torch.where(equal, 0.5 - 0.5 * ratio * scale, g.larger / total)
    share_far = torch.where(equal, 0.5 + 0.5 * ratio * scale, smaller / total)
    over_density = torch.where(equal, torch.exp(half) * scale, 2 / total)
    near = g.near + torch.asinh(ratio)
    far = torch.where(g.both, g.gap - near, 0)
    share_above, share_below = _either(from_above, share_near, share_far)
    to_above, to_below = _either(from_above, near, far)

    up, down = _distances(s, scan)
    z_mean = share_above * (to_above + up.gather(-1, g.above) / g.a)
    z_mean = z_mean - share_below * (to_below + down.gather(-1, g.below) / g.b)
    return s, g, _Linear(share_above, share_below, z_mean.masked_fill(~g.live, 0), over_density)


def _either(first: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(first, one, other), torch.where(first, other, one)


def _over_density(v: Tensor, g: _Segment, d: _Linear, tau: Tensor) -> Tensor:
    """v·τ/Σf; 0 where v is 0, even if Σf underflows."""
    return (v * tau.unsqueeze(-1) * d.over_density).masked_fill((v == 0) | ~g.live, 0)
