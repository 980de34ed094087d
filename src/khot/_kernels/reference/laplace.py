"""Reference kernels of the sorted Laplace count: every sum over a row in O(n log n) time and O(n) memory.

With the scores sorted, y_0 ≥ y_1 ≥ …, and the decays e^(−g_p) of the gaps g_p = (y_(p−1) − y_p)/τ, sums such
as Σ_(j above p) e^(−(y_j − y_p)/τ) w_j follow from one another: :func:`decay_scan`. No decay exceeds 1, so
nothing overflows, whatever x/τ is (Struski et al. 2025, Proposition 4.2, has e^(±x/τ) instead).

The derivatives are written in torch operations and scans only. Given a differentiable ``scan`` they can be
differentiated again, to any order and in either mode (`khot._ops.laplace_rank` and its neighbours).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.precision import greatest, wide_dtype, widen

__all__ = [
    "FAR",
    "ahead",
    "behind",
    "decay_scan",
    "half_levels",
    "laplace_count",
    "laplace_count_backward",
    "laplace_rank",
    "laplace_rank_backward",
    "laplace_sort",
    "laplace_sort_backward",
    "laplace_thresholds",
    "laplace_thresholds_backward",
    "vjp_count",
    "vjp_rank",
    "vjp_thresholds",
    "jvp_count",
    "jvp_rank",
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


# --------------------------------------------------------------------------------------------- rank


def laplace_rank(x: Tensor, tau: Tensor, scan: Scan = decay_scan) -> tuple[Tensor, Tensor]:
    """r_i = ½ + Σ_j F((x_j − x_i)/τ) for Laplace's F, so that 1 is the largest; and the order that sorts x.

    Equal entries, infinite ones among them, share the mean of their ranks.

    Args:
        x: (*batch, n).
        tau: broadcasts with batch.

    Returns:
        The ranks, (*batch, n) of x's dtype; and the int32 indices that sort x in descending order. Rows with
        a NaN, or with a τ that is not positive, are NaN.
    """
    y, order = _descending(x)
    tau = widen(tau).expand(x.shape[:-1])
    gap = _gaps(y, tau)
    one = torch.ones_like(y)
    place = torch.arange(1, x.shape[-1] + 1, dtype=wide_dtype(x.device), device=x.device)
    rank = place + 0.5 * (scan(one, gap, True) - scan(one, gap, False))
    rank = rank.masked_fill(_bad(x, tau).unsqueeze(-1), math.nan)
    out = torch.empty_like(y).scatter_(-1, order, rank)
    return out.to(x.dtype), order.int()


def laplace_rank_backward(
    grad: Tensor, x: Tensor, order: Tensor, tau: Tensor, scan: Scan = decay_scan
) -> tuple[Tensor, Tensor]:
    """The gradients in x and in τ; the latter has the batch shape."""
    return vjp_rank(grad, x, order, tau, scan)


def vjp_rank(grad: Tensor, x: Tensor, order: Tensor, tau: Tensor, scan: Scan) -> tuple[Tensor, Tensor]:
    """Reverse mode: dL/dx_j = Σ_i f_ij (v_i − v_j)/τ, since ∂r/∂x is symmetric, and dL/dτ = ⟨v, ∂r/∂τ⟩."""
    s = _sorted(x, order, tau, scan)
    v = widen(grad).gather(-1, s.order)
    return _unsort(_spread(v, s, scan), s.order).to(x.dtype), (v * _rank_in_tau(s, scan)).sum(-1)


def jvp_rank(
    dx: Tensor | None, dtau: Tensor | None, x: Tensor, order: Tensor, tau: Tensor, scan: Scan
) -> Tensor:
    """Forward mode."""
    s = _sorted(x, order, tau, scan)
    out = torch.zeros_like(s.y)
    if dx is not None:
        out = out + _spread(widen(dx).gather(-1, s.order), s, scan)
    if dtau is not None:
        out = out + _rank_in_tau(s, scan) * widen(dtau).expand(s.tau.shape).unsqueeze(-1)
    return _unsort(out, s.order).to(x.dtype)


class _Sorted(NamedTuple):
    order: Tensor  # int64
    y: Tensor  # the scores, descending, 0 in place of infinite ones
    free: Tensor  # which are finite
    tau: Tensor  # (*batch)
    gap: Tensor
    up: Tensor  # Σ e^(−distance/τ) over the entries above
    down: Tensor


def _sorted(x: Tensor, order: Tensor, tau: Tensor, scan: Scan) -> _Sorted:
    order = order.long()
    y = widen(x).gather(-1, order)
    tau = widen(tau).expand(x.shape[:-1])
    gap = _gaps(y, tau)
    free = ~y.isinf()  # a NaN spreads over its row
    one = torch.ones_like(y)
    return _Sorted(
        order, y.masked_fill(~free, 0), free, tau, gap, scan(one, gap, False), scan(one, gap, True)
    )


def _descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sorted scores, widened, and their order. They are sorted in their own dtype, which has the same
    order and takes a GPU half the digits or fewer."""
    y, order = torch.sort(x.contiguous(), dim=-1, descending=True, stable=True)
    return widen(y), order


def _gaps(y: Tensor, tau: Tensor) -> Tensor:
    """(y_(p−1) − y_p)/τ, at most `FAR`, so that no product has an infinite factor; 0 for the first."""
    before, after = y[..., :-1], y[..., 1:]
    gap = (before - after).nan_to_num()  # ∞ − ∞ is 0; rows with a NaN are masked in the end
    tau = tau.unsqueeze(-1)
    gap = torch.minimum(gap, FAR * tau) / tau
    return torch.cat((torch.zeros_like(y[..., :1]), gap), -1)


def _spread(v: Tensor, s: _Sorted, scan: Scan) -> Tensor:
    """Σ_j f_ij (v_j − v_i)/τ, and 0 for infinite entries: the derivative there is zero."""
    v = v.masked_fill(~s.free, 0)
    around = scan(v, s.gap, False) + scan(v, s.gap, True)
    out = 0.5 * (around - v * (s.up + s.down)) / s.tau.unsqueeze(-1)
    return out.masked_fill(~s.free, 0)


def _distances(s: _Sorted, scan: Scan) -> tuple[Tensor, Tensor]:
    """Σ e^(−d) d over the entries above, and over those below, where d are their distances in τ."""
    up, down = s.gap * s.up, ahead(s.gap) * s.down
    return up + scan(up, s.gap, False), down + scan(down, s.gap, True)


def _rank_in_tau(s: _Sorted, scan: Scan) -> Tensor:
    up, down = _distances(s, scan)
    return 0.5 * (down - up) / s.tau.unsqueeze(-1)


def _unsort(v: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(v).scatter(-1, order, v)


def _bad(x: Tensor, tau: Tensor) -> Tensor:
    return x.isnan().any(-1) | ~((tau > 0) & (tau < math.inf))


# ------------------------------------------------------------------------------------------- counts


def laplace_count(
    x: Tensor, levels: Tensor, tau: Tensor, scan: Scan = decay_scan
) -> tuple[Tensor, Tensor, Tensor]:
    """C(b) = Σ_j F((x_j − b)/τ) for Laplace's F, at many levels b of a row.

    With p entries at or above b, C(b) = p − ½ a e^(−α) + ½ c e^(−β), where α and β are the distances in τ to
    the next entries above and below b, and a and c are the decayed counts from these outwards. An entry of
    +inf always counts, and one of −inf never.

    Args:
        x: (*batch, n).
        levels: (*batch, m).
        tau: broadcasts with batch.

    Returns:
        The counts, (*batch, m) in the dtype of `precision.wide_dtype`; the int32 indices that sort x in
        descending order; and the int32 numbers p. The counts are NaN for a level that is NaN, and in rows
        with a NaN or with a τ that is not positive.
    """
    y, order = _descending(x)
    levels = widen(levels).expand(*x.shape[:-1], levels.shape[-1])
    last = (y > -math.inf).sum(-1, keepdim=True)
    place = torch.searchsorted(-y, -levels.contiguous(), right=True)
    place, order = torch.minimum(place, last).int(), order.int()
    _, d = _around(x, levels, order, place, tau, scan)
    count = place - d.above.weight * d.above.mass + d.below.weight * d.below.mass
    bad = _bad(x, tau.expand(x.shape[:-1])).unsqueeze(-1) | levels.isnan()
    return count.masked_fill(bad, math.nan), order, place


def laplace_count_backward(
    grad: Tensor,
    x: Tensor,
    order: Tensor,
    levels: Tensor,
    place: Tensor,
    tau: Tensor,
    scan: Scan = decay_scan,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x, the levels (*batch, m) and τ (batch)."""
    return vjp_count(grad, x, order, levels, place, tau, scan)


def vjp_count(
    grad: Tensor, x: Tensor, order: Tensor, levels: Tensor, place: Tensor, tau: Tensor, scan: Scan
) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse mode: dx_j = Σ_b v_b f/τ, db = −v_b Σ_j f/τ, dτ = −Σ v_b f z/τ. All entries on one side of a
    level get their share through the one next to it."""
    s, d = _around(x, levels, order, place, tau, scan)
    v = widen(grad).masked_fill(levels.isinf(), 0) / s.tau.unsqueeze(-1)
    zero = torch.zeros_like(s.y)
    up = zero.scatter_add(-1, d.above.nearest, v * d.above.weight)
    down = zero.scatter_add(-1, d.below.nearest, v * d.below.weight)
    dx = up + scan(up, s.gap, True) + down + scan(down, s.gap, False)
    dx = _unsort(dx.masked_fill(~s.free, 0), s.order).to(x.dtype)
    return dx, -v * d.density, -(v * d.moment).sum(-1)


def jvp_count(
    dx: Tensor | None,
    dlevels: Tensor | None,
    dtau: Tensor | None,
    x: Tensor,
    order: Tensor,
    levels: Tensor,
    place: Tensor,
    tau: Tensor,
    scan: Scan,
) -> Tensor:
    """Forward mode."""
    s, d = _around(x, levels, order, place, tau, scan)
    out = torch.zeros_like(d.density)
    if dx is not None:
        v = widen(dx).gather(-1, s.order).masked_fill(~s.free, 0)
        up, down = v + scan(v, s.gap, False), v + scan(v, s.gap, True)
        out = d.above.weight * up.gather(-1, d.above.nearest) + d.below.weight * down.gather(
            -1, d.below.nearest
        )
    if dlevels is not None:
        out = out - d.density * widen(dlevels)
    if dtau is not None:
        out = out - d.moment * widen(dtau).expand(s.tau.shape).unsqueeze(-1)
    return out.masked_fill(levels.isinf(), 0) / s.tau.unsqueeze(-1)


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


def _around(
    x: Tensor, levels: Tensor, order: Tensor, place: Tensor, tau: Tensor, scan: Scan
) -> tuple[_Sorted, _Around]:
    tau = widen(tau)
    s = _sorted(x, order, tau.masked_fill(~((tau > 0) & (tau < math.inf)), math.nan), scan)
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
    return s, _Around(above, below, density, above.moment - below.moment)


# --------------------------------------------------------------------------------------- thresholds


def laplace_thresholds(
    x: Tensor, levels: Tensor, tau: Tensor, scan: Scan = decay_scan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """t = hi + lo with C(t) = level, for many levels of a row.

    Between neighbouring scores with m entries above, C(t) = m − ½ a e^(−α) + ½ b e^(−β), where α and β are
    the distances in τ to the two neighbours, and a and b are the decayed counts from each of them outwards.
    This is a quadratic equation in e^(−α), or in e^(−β). We solve for the one that is not small, and take t
    relative to that neighbour.

    Args:
        x: (*batch, n).
        levels: (m,) for the same levels in every row, or (*batch, m).
        tau: broadcasts with batch.

    Returns:
        hi and lo, (*batch, m), both ±`greatest` where t = ±inf, that is, where no finite entry is counted or
        all of them are; the int32 indices that sort x in descending order; and the int32 number of entries
        above t. hi and lo are NaN in rows with a NaN or with a τ that is not positive, and for a level that
        is NaN.
    """
    batch, n = x.shape[:-1], x.shape[-1]
    levels = levels.expand(*batch, levels.shape[-1]).contiguous()
    y, order = _descending(x)
    bad = (_bad(x, tau.expand(batch)) | (n == 0)).unsqueeze(-1) | levels.isnan()
    if n == 0:
        nan = torch.full_like(levels, math.nan)
        return nan, nan.clone(), order.int(), torch.zeros_like(levels, dtype=torch.int32)
    tau = widen(tau).expand(batch)
    gap = _gaps(y, tau)
    one = torch.ones_like(y)
    up, down = scan(one, gap, False), scan(one, gap, True)
    count = torch.arange(n, dtype=wide_dtype(x.device), device=x.device) + 0.5 * (1 + down - up)
    first = (y == math.inf).sum(-1, keepdim=True)  # the index of the first finite entry
    last = (y > -math.inf).sum(-1, keepdim=True)
    place = torch.searchsorted(count, levels, right=True)
    place = torch.minimum(torch.maximum(place, first), last)

    above, below = (place - 1).clamp(min=0), place.clamp(max=n - 1)
    a = (1 + up).gather(-1, above).masked_fill(place == first, 0)
    b = (1 + down).gather(-1, below).masked_fill(place == last, 0)
    y_above, y_below = y.gather(-1, above), y.gather(-1, below)
    short = place - levels
    root = torch.sqrt(short * short + a * b * torch.exp(-gap.gather(-1, below)))
    near = torch.log(torch.where(short > 0, a, b) / (short.abs() + root))
    middle = 0.5 * (y_above - y_below) + 0.5 * tau.unsqueeze(-1) * torch.log(b / a)
    lo = torch.where(short == 0, middle, -torch.sign(short) * tau.unsqueeze(-1) * near)
    hi = torch.where(short > 0, y_above, y_below)

    none, every, end = levels <= first, levels >= last, greatest(hi)
    hi = hi.masked_fill(every, -end).masked_fill(none, end).masked_fill(bad, math.nan)
    lo = lo.masked_fill(every, -end).masked_fill(none, end).masked_fill(bad, math.nan)
    return hi, lo, order.int(), place.int()


def laplace_sort(x: Tensor, tau: Tensor, descending: bool, scan: Scan = decay_scan) -> tuple[Tensor, Tensor]:
    """The thresholds of the levels i − ½, in x's dtype, in either order; and the descending order of x.

    Infinite entries stay unchanged.
    """
    hi, lo, order, _ = laplace_thresholds(x, half_levels(x), tau, scan)
    t = (hi + lo).to(x.dtype)
    return t if descending else t.flip(-1), order


def half_levels(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], dtype=wide_dtype(x.device), device=x.device) + 0.5


def laplace_sort_backward(
    grad: Tensor,
    x: Tensor,
    order: Tensor,
    tau: Tensor,
    descending: bool,
    want_tau: bool,
    scan: Scan = decay_scan,
) -> tuple[Tensor, Tensor]:
    """The gradients in x and, if it is wanted, in τ (batch). It computes the thresholds again, in O(n)."""
    hi, lo, order, place = laplace_thresholds(x, half_levels(x), tau, scan)
    v = widen(grad if descending else grad.flip(-1))
    dx, _, dtau = vjp_thresholds(v, x, order, hi, lo, place, tau, scan)
    return dx, dtau if want_tau else torch.zeros_like(dtau)


def laplace_thresholds_backward(
    grad: Tensor,
    x: Tensor,
    order: Tensor,
    hi: Tensor,
    lo: Tensor,
    place: Tensor,
    tau: Tensor,
    scan: Scan = decay_scan,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x, the levels (*batch, m) and τ (batch)."""
    return vjp_thresholds(grad, x, order, hi, lo, place, tau, scan)


def vjp_thresholds(
    grad: Tensor, x: Tensor, order: Tensor, hi: Tensor, lo: Tensor, place: Tensor, tau: Tensor, scan: Scan
) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse mode: with w = f/Σf at t, ∂t/∂x = w, ∂t/∂τ = −Σ w z and ∂t/∂level = −τ/Σf."""
    s, d = _linearize(x, order, hi, lo, place, tau, scan)
    v = grad.masked_fill(~d.live, 0)
    zero = torch.zeros_like(s.y)
    up = zero.scatter_add(-1, d.above, v * d.share_above / d.a)
    down = zero.scatter_add(-1, d.below, v * d.share_below / d.b)
    dx = up + scan(up, s.gap, True) + down + scan(down, s.gap, False)
    dx = dx.masked_fill(~s.free, 0)
    return _unsort(dx, s.order).to(x.dtype), -_over_density(v, d, s.tau), -(v * d.z_mean).sum(-1)


def jvp_thresholds(
    dx: Tensor | None,
    dlevels: Tensor | None,
    dtau: Tensor | None,
    x: Tensor,
    order: Tensor,
    hi: Tensor,
    lo: Tensor,
    place: Tensor,
    tau: Tensor,
    scan: Scan,
) -> Tensor:
    """Forward mode: the tangent of t."""
    s, d = _linearize(x, order, hi, lo, place, tau, scan)
    out = torch.zeros_like(d.z_mean)
    if dx is not None:
        v = widen(dx).gather(-1, s.order).masked_fill(~s.free, 0)
        up, down = v + scan(v, s.gap, False), v + scan(v, s.gap, True)
        out = d.share_above * up.gather(-1, d.above) / d.a + d.share_below * down.gather(-1, d.below) / d.b
    if dtau is not None:
        out = out - d.z_mean * widen(dtau).expand(s.tau.shape).unsqueeze(-1)
    if dlevels is not None:
        out = out - _over_density(dlevels.expand(out.shape), d, s.tau)
    return out.masked_fill(~d.live, 0)


class _Linear(NamedTuple):
    """At each threshold, all entries above count through the one next to t; so do all entries below."""

    live: Tensor  # t is finite
    above: Tensor  # the index of the entry next above t; arbitrary if there is none
    below: Tensor
    share_above: Tensor  # Σ w over the entries above t
    share_below: Tensor
    a: Tensor  # Σ e^(−distance/τ) from the entry next above t, over this entry and those above it
    b: Tensor
    z_mean: Tensor  # Σ w z
    log_mass: Tensor  # log Σ e^(−abs(z)), which is log 2Σf


def _linearize(
    x: Tensor, order: Tensor, hi: Tensor, lo: Tensor, place: Tensor, tau: Tensor, scan: Scan
) -> tuple[_Sorted, _Linear]:
    s = _sorted(x, order, tau, scan)
    live = (hi.abs() != greatest(hi)) & ~hi.isnan()
    hi, lo = hi.masked_fill(~live, 0).detach(), lo.masked_fill(~live, 0)
    place, n = place.long(), s.y.shape[-1]
    above, below = (place - 1).clamp(min=0), place.clamp(max=n - 1)
    up, down = _distances(s, scan)
    tau = s.tau.unsqueeze(-1)

    has_above = live & (place > 0) & s.free.gather(-1, above)
    has_below = live & (place < n) & s.free.gather(-1, below)
    to_above = torch.where(has_above, ((s.y.gather(-1, above) - hi) - lo) / tau, 0)
    to_below = torch.where(has_below, (lo - (s.y.gather(-1, below) - hi)) / tau, 0)
    a, b = 1 + s.up.gather(-1, above), 1 + s.down.gather(-1, below)
    log_a = torch.where(has_above | ~live, torch.log(a) - to_above, -math.inf)
    log_b = torch.where(has_below | ~live, torch.log(b) - to_below, -math.inf)
    logs = torch.stack((log_a, log_b))
    share_above, share_below = torch.softmax(logs, 0)
    z_mean = share_above * (to_above + up.gather(-1, above) / a)
    z_mean = z_mean - share_below * (to_below + down.gather(-1, below) / b)
    z_mean = z_mean.masked_fill(~live, 0)
    log_mass = torch.logsumexp(logs, 0)
    return s, _Linear(live, above, below, share_above, share_below, a, b, z_mean, log_mass)


def _over_density(v: Tensor, d: _Linear, tau: Tensor) -> Tensor:
    """v·τ/Σf; 0 where v is 0, even if Σf underflows."""
    idle = (v == 0) | ~d.live
    rate = torch.exp(torch.log(2 * tau.unsqueeze(-1)) - d.log_mass.masked_fill(idle, 0))
    return (v * rate).masked_fill(idle, 0)
