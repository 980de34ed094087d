"""Exact draws of k-subsets with P(S) ∝ exp(Σ_{i∈S} θ_i), by halves, in O(n log n).

Tilted so that independent trials make k on average, one half A of the units is drawn as such trials and kept
with probability P(S_B = k − S_A)/max P(S_B): as often as the other half B can make up the rest. Then B is
drawn the same way, for what is left. About √2 tries a half, where rejecting whole draws of the wrong
size takes √(2πV).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from khot.sampling.poisson_binomial import Frequencies, characteristic, frequencies, pmf
from khot.sampling.tilting import tilt_rows

__all__ = ["draw_rows"]

WHOLE = 4.0  # variance up to which whole draws are tried: one in five, or more, has the right size

Acceptance = Callable[[Tensor, Tensor], Tensor]  # sizes, and the rows they belong to → probabilities


def draw_rows(theta: Tensor, k: Tensor, generator: torch.Generator | None) -> Tensor:
    """Bool (*batch, n) with k True in each row.

    Args:
        theta: float64 logits (*batch, n).
        k: of the batch shape. Rows that it does not suit (NaN, too many certain units) stay empty.
    """
    n = theta.shape[-1]
    # every second unit in the order of θ: whatever the tilt, both halves have nearly the same variance
    rows, order = theta.reshape(math.prod(theta.shape[:-1]), n).sort(-1)
    drawn = torch.zeros_like(rows, dtype=torch.bool)
    left = k.reshape(-1)
    stride = 1
    while n:
        trials = tilt_rows(rows[:, ::stride], left)
        p, q = trials.p, trials.q
        pending = (~trials.hi.isnan()).nonzero().squeeze(-1)
        if not bool(((p * q).sum(-1) > WHOLE).any()):
            _draw_trials(drawn[:, ::stride], p, pending, _right_size(left), generator)
            break
        half = drawn[:, stride :: 2 * stride]
        _draw_trials(half, p[:, 1::2], pending, _completion(p[:, ::2], q[:, ::2], left), generator)
        left = left - half.sum(-1)
        stride *= 2
    return torch.zeros_like(drawn).scatter_(-1, order, drawn).reshape(theta.shape)


def _right_size(k: Tensor) -> Acceptance:
    return lambda size, rows: (size == k[rows]).double()


def _completion(p: Tensor, q: Tensor, k: Tensor) -> Acceptance:
    """P(these trials make k − size), over its maximum."""
    mean, n = p.sum(-1), p.shape[-1]
    at = frequencies((p * q).sum(-1), n)
    re, im = characteristic(q, p, at)
    # the mode is next to the mean (Darroch 1964)
    mode = torch.maximum(pmf(re, im, mean.floor(), at), pmf(re, im, mean.ceil(), at))

    def accept(size: Tensor, rows: Tensor) -> Tensor:
        rest = k[rows] - size
        period = at.period[rows]
        prob = pmf(re[rows], im[rows], rest, Frequencies(period, at.order, at.weight[rows]))
        # beyond half a period lie aliases, of what has a probability below rounding
        inside = (rest >= 0) & (rest <= n) & ((rest - mean[rows]).abs() < period / 2)
        return prob.where(inside, 0) / mode[rows]

    return accept


def _draw_trials(
    drawn: Tensor, p: Tensor, pending: Tensor, accept: Acceptance, generator: torch.Generator | None
) -> None:
    """Fill the pending rows of drawn with trials of probabilities p, again until they are accepted."""

    def uniforms(*size: int) -> Tensor:
        return torch.rand(size, dtype=torch.float64, device=p.device, generator=generator)

    while pending.numel():
        trial = uniforms(len(pending), p.shape[-1]) < p[pending]
        kept = uniforms(len(pending)) < accept(trial.sum(-1), pending)
        drawn[pending[kept]] = trial[kept]
        pending = pending[~kept]
