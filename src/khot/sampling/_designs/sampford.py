"""Sampford's design: exactly the prescribed inclusion probabilities, without calibration.

P(S) ∝ Σ_{i∈S} (1 − π_i) Π_{j∈S} π_j/(1 − π_j) (Sampford 1967). One unit is drawn; the others are a
conditional Poisson draw of size k − 1 from the rest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._kernels.reference.phantom import numbered
from khot._ops import uniform as philox
from khot._ops.tilting import inclusion, mixture, tilt_rows
from khot.sampling import conditional_poisson
from khot.sampling._designs.poisson import log_odds
from khot.sampling._halving import draw_rows

__all__ = ["draw", "joint", "log_prob"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Bool k-subsets with inclusion probabilities probs: float64 (*batch, n), each row's sum an integer."""
    rows, which = numbered(probs)
    odds, k, n = log_odds(rows), _size(rows), rows.shape[-1]
    # P(first unit is i) ∝ (1 − π_i)·P(i ∈ S) under the conditional Poisson design with these odds
    chance = ((1 - rows) * inclusion(tilt_rows(odds, k))[1]).cumsum(-1)
    total = chance[:, -1:]
    u = philox.rand((*which.shape, 1), rows.device, generator)
    unit = torch.searchsorted(chance[which], u * total[which], right=True)
    random = total > 0  # otherwise every unit is certain, and none is drawn first
    units = torch.arange(n, device=rows.device)
    first = random[which] & (units == unit)
    if which.numel() <= n * len(rows):
        rest = torch.where(first, -math.inf, odds[which]).reshape(-1, n)
        size = (k - random.squeeze(-1).to(k))[which].reshape(-1)
        which = torch.arange(len(rest), device=rows.device).reshape(which.shape)
    else:  # many draws of few designs: compute the design of the rest once for every possible first unit
        taken = random.unsqueeze(-1) & (units == units.unsqueeze(-1))
        rest = torch.where(taken, -math.inf, odds.unsqueeze(-2)).reshape(-1, n)
        size = (k - random.squeeze(-1).to(k)).repeat_interleave(n)
        which = which * n + unit.squeeze(-1).clamp(max=n - 1)
    return first | draw_rows(tilt_rows(rest, size).z, size, which, generator)


def log_prob(value: Tensor, probs: Tensor) -> Tensor:
    """log P(S), of the broadcast batch shape, −inf where S cannot be drawn; differentiable in probs."""
    odds, k = log_odds(probs), _size(probs)
    left = 1 - probs
    chosen = value.bool()
    mean = (left * conditional_poisson.marginals(odds, k)).sum(-1)
    certain = mean == 0
    share = left.where(chosen, 0).sum(-1).masked_fill(certain, 1) / mean.masked_fill(certain, 1)
    return share.log() + conditional_poisson.log_prob(value, odds, k)


def joint(probs: Tensor) -> Tensor:
    """P(i ∈ S and j ∈ S), (*batch, n, n), with probs on the diagonal; differentiable in probs.

    It is E[x_i x_j w]/E[w] under the conditional Poisson design with these odds, w = Σ_l (1 − π_l) x_l. Of
    independent trials with probabilities r, which that design is a mixture of,
    E[x_i x_j w] = r_i r_j Σ_l d_l r_l + d_i r_i (1 − r_i) r_j + r_i d_j r_j (1 − r_j), where d = 1 − π.
    """
    trials = tilt_rows(log_odds(probs), _size(probs))
    weight, r = mixture(trials)
    d = (1 - probs).unsqueeze(-2)
    w = (r * d).sum(-1)
    cross = (weight.unsqueeze(-1) * d * r * (1 - r)).mT @ r
    both = ((weight * w).unsqueeze(-1) * r).mT @ r + cross + cross.mT
    mean = (weight * w).sum(-1).real[..., None, None]
    product = probs.unsqueeze(-1) * probs.unsqueeze(-2)  # exact where every unit is certain
    both = torch.where(mean == 0, product, both.real / mean.masked_fill(mean == 0, 1)).clamp(0, 1)
    diagonal = torch.eye(probs.shape[-1], dtype=torch.bool, device=probs.device)
    return torch.where(diagonal, probs.unsqueeze(-1), both)


def _size(probs: Tensor) -> Tensor:
    return probs.detach().sum(-1).round()
