"""The reference kernels of the projection onto the permutahedron, forward and backward.

With u = z/τ and w both sorted in descending order, the projection is u − v, where v is the decreasing
regression of u on w (Blondel et al. 2020, Propositions 2 and 3). It has blocks in which v is constant:

    v = mean(u) − mean(w)  ("l2"),    v = log Σ e^u − log Σ e^w  ("kl")

Everything is computed from differences to an entry of the same block. Equal scores of any size thus share w
exactly, and an entry that is alone in its block has exactly its w.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.precision import on, wide_dtype, widen
from khot._kernels.reference.guard import middle

__all__ = [
    "farthest",
    "jvp_permutahedron",
    "permutahedron",
    "permutahedron_backward",
    "pooled",
    "power_blocks",
]


def farthest(dtype: torch.dtype) -> float:
    """Scores in τ and entries of w count as infinite from this number on, or from 1e-4 of it for w. Sums of
    many of them still do not overflow."""
    return 1e280 if dtype == torch.float64 else 1e28


def permutahedron(
    z: Tensor, w: Tensor, tau: Tensor, regularization: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The projection of z/τ onto the permutahedron of w, or log of that of e^(z/τ) onto that of e^w.

    Args:
        z: (*batch, n).
        w: broadcasts with z; it has n entries.
        tau: broadcasts with batch.
        regularization: ``"l2"`` or ``"kl"``.

    Returns:
        The projection, of z's shape and dtype; and three of z's shape in int32: the indices that sort z and w
        in descending order, and for each place in the order of z the place at which its block starts. Rows
        with a NaN, or with a τ that is not positive and finite, are NaN.
    """
    scores, order = torch.sort(widen(z).contiguous(), dim=-1, descending=True, stable=True)
    weights, w_order = torch.sort(widen(w).contiguous(), dim=-1, descending=True, stable=True)
    tau = widen(on(z.device, tau)).expand(z.shape[:-1])
    bad = scores.isnan().any(-1) | weights.isnan().any(-1) | ~((tau > 0) & (tau < math.inf))
    bad = bad.unsqueeze(-1)
    far = farthest(scores.dtype)
    u = (scores / tau.unsqueeze(-1)).clamp(-far, far)
    u = torch.where(scores.isinf(), 2 * u, u).masked_fill(bad, 0)
    v = weights.clamp(-1e-4 * far, 1e-4 * far).expand(u.shape).masked_fill(bad, 0)
    blocks = _blocks(u, v, regularization)
    y = (u - blocks.u) - blocks.m + blocks.w
    # an infinite w makes the mean of its block infinite, and two of opposite signs leave no mean
    lowest = v.gather(-1, blocks.stop - 1) if regularization == "l2" else blocks.w
    y = y + torch.where(blocks.w >= 1e-4 * far, math.inf, 0) - torch.where(lowest <= -1e-4 * far, math.inf, 0)
    y = torch.empty_like(y).scatter_(-1, order, y.masked_fill(bad, math.nan))
    w_order = (
        w_order.int().expand(z.shape).contiguous()
    )  # also for vmap, which needs a batch dim in all results
    return y.to(z.dtype), order.int(), w_order, blocks.start.int()


class _Blocks(NamedTuple):
    """For each place, about its block."""

    start: Tensor  # its first place
    stop: Tensor  # the place after its last
    u: Tensor  # u at its first place
    w: Tensor
    m: Tensor  # its value v, less u − w at its first place


def _blocks(u: Tensor, w: Tensor, regularization: str) -> _Blocks:
    """The blocks of all rows at once, in O(n log n).

    Segments of 1, 2, 4, … places are solved, each from its two halves: where the last value of the left half
    does not exceed the first one of the right half, one block reaches across the middle. It is extended in
    turn by all blocks on the left and all blocks on the right that break the order, until none does.
    """
    n = u.shape[-1]
    width = 1 << max(n - 1, 0).bit_length()
    if width > n:  # places that no block of the row reaches
        below = -torch.arange(4, 4 + width - n, device=u.device).to(u.dtype) * farthest(u.dtype)
        u = torch.cat((u, below.expand(*u.shape[:-1], -1)), -1)
        w = torch.cat((w, w.new_zeros(*w.shape[:-1], width - n)), -1)
    start = torch.arange(width, device=u.device).expand(u.shape)
    blocks = _Blocks(start, start + 1, u, w, torch.zeros_like(u))
    length = 1
    while length < width and u.numel():
        shape = (*u.shape[:-1], width // (2 * length), 2, length)
        halves = _Blocks(*(t.reshape(shape) for t in blocks))
        joined = _join(u.reshape(shape), w.reshape(shape), halves, regularization)
        blocks = _Blocks(*(t.reshape(u.shape) for t in joined))
        length *= 2
    return _Blocks(*(t[..., :n] for t in blocks))


def _join(u: Tensor, w: Tensor, blocks: _Blocks, regularization: str) -> _Blocks:
    """The blocks of segments (…, 2, length) whose halves are solved.

    Each block is compared with what lies between it and the other half. The first one that keeps the order
    ends the new block, whatever the ones behind it seem to be: they may be so far that their differences to
    the middle have no digit left.
    """
    length = u.shape[-1]
    here = torch.arange(length, device=u.device)
    # what differences are taken to; where w is −∞ on the right, those to it would have no digits
    middle_u, middle_w = u[..., 1:, :1], w[..., :1, -1:]
    value = (blocks.u - middle_u) - (blocks.w - middle_w) + blocks.m
    left, right = value[..., 0, :], value[..., 1, :]
    at = blocks.start[..., 0, :1]  # the first place of the segment
    # of the left blocks, and of the right ones, counted from the middle
    left_start, left_stop = blocks.start[..., 0, :] - at, blocks.stop[..., 0, :] - at
    right_start, right_stop = (t[..., 1, :] - at - length for t in (blocks.start, blocks.stop))
    violated = left[..., -1:] <= right[..., :1]
    a, b = _running(u - middle_u, w - middle_w, regularization)

    def across(first: Tensor, stop: Tensor) -> Tensor:
        """The value of a block from a place on the left to before a place on the right."""
        parts = [t[half].gather(-1, i) for t in (a, b) for half, i in ((0, first), (1, stop))]
        if regularization == "l2":
            return (parts[0] + parts[1]) / (parts[2] + parts[3])
        return torch.logaddexp(parts[0], parts[1]) - torch.logaddexp(parts[2], parts[3])

    first, stop = left_start[..., -1:], right_stop[..., :1]
    while True:
        keeps = left > across(left_stop, stop.expand(left.shape))
        new_first = torch.minimum(first, torch.where(keeps, left_stop, 0).amax(-1, keepdim=True))
        keeps = across(new_first.expand(left.shape), right_start) > right
        new_stop = torch.maximum(stop, torch.where(keeps, right_start, length).amin(-1, keepdim=True))
        unchanged = ((new_first == first) & (new_stop == stop)) | ~violated
        first, stop = new_first, new_stop
        if bool(unchanged.all()):
            break
    place = torch.stack((here, here + length))
    inside = violated & (place.flatten() >= first) & (place.flatten() < length + stop)
    inside = inside.unflatten(-1, place.shape)
    u_first, w_first = (t[..., 0, :].gather(-1, first).unsqueeze(-1) for t in (u, w))
    m = across(first, stop).unsqueeze(-1) - ((u_first - middle_u) - (w_first - middle_w))
    first, stop = (at + first).unsqueeze(-1), (at + length + stop).unsqueeze(-1)
    now = _Blocks(first, stop, u_first, w_first, m)
    return _Blocks(*(torch.where(inside, new, old) for new, old in zip(now, blocks, strict=True)))


def _running(
    u: Tensor, w: Tensor, regularization: str
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What a block's value follows from: sums from each place on the left to the middle, and from the middle
    to before each place on the right. There are length + 1 of both, and one is empty."""

    def outwards(values: Tensor, log: bool) -> tuple[Tensor, Tensor]:
        empty = values.new_full((*values.shape[:-2], 1), -math.inf if log else 0)
        left, right = values[..., 0, :].flip(-1), values[..., 1, :]
        left, right = (t.logcumsumexp(-1) if log else t.cumsum(-1) for t in (left, right))
        return torch.cat((left.flip(-1), empty), -1), torch.cat((empty, right), -1)

    if regularization == "l2":
        return outwards(u - w, False), outwards(torch.ones_like(u), False)
    return outwards(u, True), outwards(w, True)


# ---------------------------------------------------------------------------------------- p-norms

HALVINGS = 64


def power_blocks(z: Tensor, w: Tensor, tau: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The blocks of argmin_(y ∈ P(w)) Σ |y|^p/p − ⟨y, z/τ⟩ (Sander et al. 2023, appendix B.2).

    In the order of z, y = s(u − v) with s(t) = sgn(t) |t|^(1/(p − 1)), and v is constant over each block,
    where Σ s(u − v) = Σ w. All blocks of all rows that break the order are pooled at once, until none does.

    Args:
        z, w, tau: as for :func:`permutahedron`.
        p: > 1.

    Returns:
        Three of z's shape in int32, as for :func:`permutahedron`; and for each place v less u at the first
        place of its block, in the wide dtype, right to about 2^-64 of the block's spread. Rows with a NaN or
        a bad τ have blocks without a meaning.
    """
    scores, order = torch.sort(widen(z).contiguous(), dim=-1, descending=True, stable=True)
    weights, w_order = torch.sort(widen(w).contiguous(), dim=-1, descending=True, stable=True)
    tau = widen(tau).expand(z.shape[:-1]).unsqueeze(-1)
    far = farthest(scores.dtype)
    u = (scores / tau).clamp(-far, far)
    u = torch.where(scores.isinf(), 2 * u, u).nan_to_num(0)
    weights = weights.clamp(-1e-4 * far, 1e-4 * far).nan_to_num(0).expand(u.shape)
    place = torch.arange(u.shape[-1], device=u.device).expand(u.shape)
    start, v = place, _powers(-weights, p - 1)
    while u.shape[-1] > 1:
        first = u.gather(-1, start)
        above = (first[..., :-1] - first[..., 1:]) + (v[..., :-1] - v[..., 1:])
        broken = torch.zeros_like(start, dtype=torch.bool)
        broken[..., 1:] = (above <= 0) & (start[..., 1:] == place[..., 1:])
        if not bool(broken.any()):
            break
        start = place.masked_fill((start != place) | broken, 0).cummax(-1).values
        v = _level(u, weights, start, p)
    w_order = w_order.int().expand(z.shape).contiguous()
    return order.int(), w_order, start.int(), v


def _level(u: Tensor, w: Tensor, start: Tensor, p: float) -> Tensor:
    """For each place v of its block, less u at the block's first place, by halving."""
    count, total = pooled(torch.ones_like(u), start), pooled(w, start)
    a = u - u.gather(-1, start)
    last = torch.zeros_like(a).scatter_reduce(-1, start, a, "amin").gather(-1, start)
    high = _powers(-total / count, p - 1)  # its solution if all were as large as the first
    low = last + high
    for _ in range(HALVINGS):
        trial = middle(low, high)
        much = pooled(_powers(a - trial, 1 / (p - 1)), start) > total
        low, high = torch.where(much, trial, low), torch.where(much, high, trial)
    return torch.where(count == 1, _powers(-w, p - 1), middle(low, high))


def _powers(t: Tensor, exponent: float) -> Tensor:
    return t.sign() * t.abs() ** exponent


# ------------------------------------------------------------------------------------ derivatives


def pooled(values: Tensor, start: Tensor) -> Tensor:
    """For each place the sum over its block."""
    return torch.zeros_like(values).scatter_add(-1, start, values).gather(-1, start)


class _Linear(NamedTuple):
    """The derivative at a point, as differentiable functions of z, w and τ."""

    p: Tensor  # how much each entry of a block counts in the mean of u over the block
    q: Tensor  # the same for w
    a: Tensor  # u, less u at the first place of its block
    scale: Tensor  # 1/τ; 0 where a score is infinite
    moves: Tensor  # whether w is finite there
    order: Tensor
    w_order: Tensor
    start: Tensor


def _linearize(
    z: Tensor, w: Tensor, tau: Tensor, order: Tensor, w_order: Tensor, start: Tensor, regularization: str
) -> _Linear:
    order, w_order, start = order.long(), w_order.long(), start.long()
    far = farthest(wide_dtype(z.device))
    scores = widen(z).gather(-1, order)
    weights = widen(w).expand(z.shape).gather(-1, w_order)
    infinite, still = scores.isinf(), weights.abs() >= 1e-4 * far
    rate = 1 / widen(on(z.device, tau)).expand(z.shape[:-1]).unsqueeze(-1)
    scores = scores.masked_fill(infinite, 0)
    a = ((scores - scores.gather(-1, start)) * rate).clamp(-far, far)
    if regularization == "l2":
        p = q = 1 / pooled(torch.ones_like(a), start)
    else:
        weights = weights.clamp(-1e-4 * far, 1e-4 * far)
        p, q = torch.exp(a), torch.exp(weights - weights.gather(-1, start))
        p, q = p / pooled(p, start), q / pooled(q, start)
    scale = rate.expand(a.shape).masked_fill(infinite, 0)
    return _Linear(p, q, a, scale, ~still, order, w_order, start)


def permutahedron_backward(
    grad: Tensor,
    z: Tensor,
    w: Tensor,
    tau: Tensor,
    order: Tensor,
    w_order: Tensor,
    start: Tensor,
    regularization: str,
    want_w: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in z, in w broadcast to z's shape, and in τ, which has the batch shape, differentiable.
    That in w is empty unless it is wanted.

    Given the blocks, y = u − v, and dv = Σ p du − Σ q dw over the block. The derivative in τ is taken from u
    less a number per block, which changes no digit of the sum: y does not change if u grows on a block.
    """
    d = _linearize(z, w, tau, order, w_order, start, regularization)
    g = widen(grad).gather(-1, d.order)
    total = pooled(g, d.start)
    du = (g - d.p * total) * d.scale
    dw = (d.q * total).masked_fill(~d.moves, 0)
    zeros = torch.zeros_like(g)
    dz = zeros.scatter(-1, d.order, du).to(z.dtype)
    dw = zeros.scatter(-1, d.w_order, dw).to(torch.promote_types(w.dtype, torch.float32))
    return dz, dw if want_w else dw.new_empty(0), -(du * d.a).sum(-1)


def jvp_permutahedron(
    tangents: tuple[Tensor | None, ...], saved: tuple[Tensor, ...], regularization: str
) -> Tensor:
    """Forward mode, for the tangents of z, w and τ; saved are these and the blocks."""
    (dz, dw, dtau), (z, w, tau, order, w_order, start) = tangents, saved
    d = _linearize(z, w, tau, order, w_order, start, regularization)
    du, dv = torch.zeros_like(d.a), torch.zeros_like(d.a)
    if dz is not None:
        du = du + widen(dz).gather(-1, d.order)
    if dtau is not None:
        du = du - d.a * widen(dtau).expand(z.shape[:-1]).unsqueeze(-1)
    du = du * d.scale
    if dw is not None:
        dv = dv + widen(dw).expand(d.a.shape).gather(-1, d.w_order).masked_fill(~d.moves, 0)
    dy = du - pooled(d.p * du, d.start) + pooled(d.q * dv, d.start)
    return torch.zeros_like(dy).scatter(-1, d.order, dy).to(z.dtype)
