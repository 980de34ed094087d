"""The relaxed top-k of φ(x) = e^(x−1), in plain torch operations.

An entry that is selected on its own has y = e^(v−1) with v + τ y^(p−1) = s; pooled entries share one v = γ
and have y = ((s − γ)₊/τ)^(1/(p−1)), where Σ min(1, y·e^(1−γ)) over the row is k. Values are found without
autograd. Then two Newton steps are recorded, with a constant slope: each makes one more order of derivatives
exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.precision import large, widen
from khot._kernels.reference.guard import guarded

__all__ = ["exponential", "log_omega"]

STEPS = 80  # of safeguarded Newton for γ
OMEGA_STEPS = 8  # Newton converges quadratically from the start


def log_omega(c: Tensor) -> Tensor:
    """The root u of e^u + u = c, the logarithm of Wright's ω."""
    fixed = c.detach()
    u = torch.where(fixed > 1, fixed.clamp(min=1).log(), fixed)  # the left side is convex, and ≥ c here
    for _ in range(OMEGA_STEPS):
        u = u - (u.exp() + u - fixed) / (u.exp() + 1)
    slope = u.exp() + 1
    for _ in range(2):
        u = u - (u.exp() + u - c) / slope
    return u


def exponential(s: Tensor, k: Tensor, tau: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """y, and the y = e^(γ−1) of an entry that would be selected on its own at γ; 0 where nothing is pooled.

    Args:
        s: (*batch, n) in the wide dtype, −inf where an entry may not be selected.
        k, tau: broadcast with batch; k has integer values.

    Returns:
        y as s, and the level (*batch, 1). Rows with a NaN, with more than k entries of +inf, or with k or τ
        out of range are NaN.
    """
    e = 1 / (p - 1)
    k, tau = (widen(v).expand(s.shape[:-1]).unsqueeze(-1) for v in (k, tau))
    fixed = s.detach()
    selectable = (fixed != -math.inf).sum(-1, keepdim=True)
    pinned = (fixed == math.inf).sum(-1, keepdim=True)
    bad = fixed.isnan().any(-1, keepdim=True) | (pinned > k)
    bad = bad | ~((k >= 0) & (k <= selectable) & (k == torch.floor(k))) | ~((tau > 0) & (tau < math.inf))
    n = s.shape[-1]
    if not n:
        return s.clone(), torch.where(bad, math.nan, 0.0).to(s.dtype)
    k, tau = k.masked_fill(bad, 0), tau.masked_fill(bad, 1)
    absent = (s == -math.inf) | bad
    finite = s.masked_fill(s.isinf() | bad, 0)

    # on its own: with ω = (p−1)τ y^(p−1), ω + log ω = (p−1)(s−1) + log((p−1)τ), and s − v = ω/(p−1)
    shift = torch.log((p - 1) * tau)
    u = log_omega((p - 1) * (finite - 1) + shift)
    single = torch.where(u > 0, torch.exp(e * (u - shift)), torch.exp(finite - 1 - e * u.exp()))
    drop = (e * u.exp()).detach()

    ordered, order = fixed.masked_fill(absent, -math.inf).sort(-1, descending=True)
    last = (k - 1).clamp(min=0).long()
    least_in = ordered.gather(-1, last)
    most_out = ordered.gather(-1, k.clamp(max=n - 1).long())
    gap = least_in - most_out
    reach = drop.gather(-1, order.gather(-1, last)) - gap
    pooled = (k > 0) & (k < selectable) & (least_in < math.inf) & (reach > 0)

    anchor = most_out.masked_fill(~pooled, 0)
    scale = torch.log(tau) + (anchor - 1) / e
    offset = finite - anchor
    endless = fixed == math.inf
    reach = reach.masked_fill(~pooled, 1)

    def above(delta: Tensor, offset: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """s − γ for γ = anchor − delta, the shares min(1, y·e^(1−γ)), and which of them are between 0 and
        1."""
        w = offset + delta
        positive = (w > 0) & ~absent & ~endless
        w = w.masked_fill(~positive, 1)
        log_share = delta + e * (torch.log(w) - scale)
        inside = positive & (log_share < 0)
        share = torch.where(inside, torch.exp(log_share.masked_fill(~inside, 0)), positive | endless)
        return w, share, inside

    # Newton for δ in [0, reach], without autograd
    known, low, high = (offset.detach(), scale.detach()), torch.zeros_like(reach), reach
    delta, eps = 0.5 * high, torch.finfo(s.dtype).eps
    running = pooled
    for _ in range(STEPS):
        w, share, inside = above(delta, *known)
        slope = torch.where(inside, share * (1 + e / w), 0).sum(-1, keepdim=True)
        excess = share.sum(-1, keepdim=True) - k
        low, high = torch.where(excess <= 0, delta, low), torch.where(excess >= 0, delta, high)
        trial = delta - excess / slope
        trial = guarded(trial, low, high, (trial == low) | (trial == high))
        # what is left is rounding, either of δ or of the sum
        running = running & ((trial - delta).abs() > eps * reach) & (excess.abs() > 2 * eps * (k + 1))
        delta = trial
        if arguments.readable(running) and not bool(running.any()):
            break
    w, share, inside = above(delta, *known)
    slope = torch.where(inside, share * (1 + e / w), 0).sum(-1, keepdim=True)
    inside = inside & pooled
    empty = ~inside.any(-1, keepdim=True)
    slope = slope.masked_fill(empty | (slope == 0), large(s))
    for _ in range(2):
        _, share, _ = above(delta, offset, scale)
        delta = delta - ((share.sum(-1, keepdim=True) - k) / slope).masked_fill(empty, 0)
    w, share, _ = above(delta, offset, scale)
    alone = torch.where(pooled, (share >= 1) & ~inside, fixed >= least_in) & (k > 0) & ~absent
    block = torch.exp(e * (torch.log(w.masked_fill(~inside, 1)) - torch.log(tau)))
    y = torch.where(inside, block, torch.where(alone & ~endless, single, 0))
    y = torch.where(alone & endless, math.inf, y)
    level = torch.where(pooled & ~empty, torch.exp(anchor - 1 - delta), 0)
    return y.masked_fill(bad, math.nan), level.masked_fill(bad, math.nan)
