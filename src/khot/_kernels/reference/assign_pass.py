"""One sweep over the rows of a two-sided assignment: what a step of Newton's method needs to know.

For given thresholds c of the columns, each row moves its threshold r towards the root of

    miss(r) = Σ_j F((x_j − r − c_j)/τ) − k

with the tails of F on each side of the threshold added separately, so that a root in a wide gap between
scores, where all densities are tiny, is as exact as any other. For the rows' new thresholds, the sums over
rows follow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot import cdfs
from khot._kernels.reference.guard import guarded

__all__ = ["assign_pass"]

PLAIN = 0.25  # a step of Newton's method of this length, in τ, is safe as it is
LEAP = 16.0  # the longest move, in τ
LEAST = {torch.float32: 1e-30, torch.float64: 1e-290}  # a row of less density gives no direction


def assign_pass(
    x: Tensor,
    k: Tensor,
    r: Tensor,
    c: Tensor,
    tau: float,
    cdf: str,
    shape: float,
    steps: int,
    tolerance: float,
    slopes: bool,
    values: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """r (m,) after up to ``steps`` moves, until |miss| ≤ tolerance Σ_j f; miss and Σ_j f, (m,); sums; and y,
    (m, E), or (0, E) where ``values`` is false.

    The sums, in float64, are Σ_i y, Σ_i f and Σ_i f miss/Σ_j f, (E,) each, and with ``slopes``
    Σ_i f fᵀ/Σ_j f, (E, E); they are the rows of one tensor. x, (m, E), is −inf where nothing may be. An r of
    NaN is not known.
    """
    F = cdfs.resolve(cdf, shape)
    u = x - c
    closed = u == -torch.inf
    u = u.masked_fill(closed, 0)
    r = torch.where(r.isnan(), _guess(x - c, k), r)
    rounding, n = 4 * torch.finfo(x.dtype).eps, x.shape[-1]
    low, high = torch.full_like(r, -torch.inf), torch.full_like(r, torch.inf)
    step = 0
    while True:
        z = (u - r.unsqueeze(-1)) / tau
        up = (z > 0) & ~closed
        tail = torch.where(up, F.sf(z), F.cdf(z)).masked_fill(closed, 0)
        f = F.pdf(z).masked_fill(closed, 0)
        below, above = tail.masked_fill(up, 0).sum(-1), tail.masked_fill(~up, 0).sum(-1)
        density, upper = f.sum(-1), f.masked_fill(~up, 0).sum(-1)
        spare = up.sum(-1).to(k.dtype) - k
        miss = spare + (below - above)
        todo = miss.abs() > tolerance * density + rounding * spare.abs()
        if step == steps or not bool(todo.any()):
            break
        step += 1
        low, high = torch.where(todo & (miss > 0), r, low), torch.where(todo & (miss < 0), r, high)
        moved = r + tau * _move(k, n, spare, below, above, density, upper, miss)
        moved = guarded(moved, low, high, moved == r)
        r = torch.where(todo & moved.isfinite(), moved, r)
    y = torch.where(up, 1 - tail, tail)
    moves = density > LEAST[x.dtype]
    inverse = torch.where(moves, 1 / density.masked_fill(~moves, 1), 0)
    share = (miss * inverse).clamp(-1, 1)
    sums = [y.sum(0, dtype=torch.float64), f.sum(0, dtype=torch.float64), (share @ f).double()]
    block = torch.stack(sums)
    if slopes:
        block = torch.cat([block, (f.mT @ (f * inverse.unsqueeze(-1))).double()])
    return r, miss, density, block, y if values else y.new_empty(0, n)


def _guess(u: Tensor, k: Tensor) -> Tensor:
    """Between the k-th and the next largest score of each row."""
    top = u.sort(-1, descending=True).values
    whole = k.floor()
    last = u.shape[-1] - 1
    at = whole.long().clamp(0, last).unsqueeze(-1)
    next_, least = top.gather(-1, at), top.gather(-1, (at - (whole == k).long().unsqueeze(-1)).clamp(min=0))
    least = torch.where(next_ == -torch.inf, next_, least)
    return (next_ + (least - next_) / 2).squeeze(-1).nan_to_num(nan=0.0)


def _move(
    k: Tensor,
    n: int,
    spare: Tensor,
    below: Tensor,
    above: Tensor,
    density: Tensor,
    upper: Tensor,
    miss: Tensor,
) -> Tensor:
    """By how much the thresholds move, in τ. The plain step of Newton's method is too long or too short from
    far away. In a gap, the logarithms of the tails are nearly linear in r, and otherwise the log-odds of the
    sum are."""
    plain = miss / density
    ratio = (below.log() - above.log()) / ((density - upper) / below + upper / above)
    got = k + miss
    odds = ((got / (n - got)).log() - (k / (n - k)).log()) * (got * (n - got)) / (n * density)
    gap = spare == 0
    far = torch.where(gap, ratio, odds)
    far = torch.where(far.abs() <= LEAP, far, LEAP * miss.sign())
    near = (plain.abs() <= PLAIN) & ~(gap & (miss.abs() > PLAIN * (below + above)))
    return torch.where(near, plain, far)
