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

from khot._kernels.reference.poisson_binomial import Frequencies, of_period, pmf
from khot._ops import uniform as philox
from khot.sampling.phantom import distinct
from khot.sampling.tilting import tilt_rows

__all__ = ["draw_rows", "numbered"]

WHOLE = 16.0  # variance up to which whole draws are tried: one in ten, or more, has the right size
OFF_CENTRE = 0.2  # in deviations: a fiftieth of the draws is lost
TINY = torch.finfo(torch.float64).tiny

Acceptance = Callable[[Tensor, Tensor], Tensor]  # sizes, and the designs they are of → probabilities


def draw_rows(theta: Tensor, k: Tensor, which: Tensor, generator: torch.Generator | None) -> Tensor:
    """Bool (*shape, n): draws of the designs that which (*shape) names, with their k True in each row.

    Args:
        theta: float64 logits (m, n), a design a row.
        k: (m). Where it does not suit the design (NaN, too many certain units) draws stay empty.
    """
    n, shape = theta.shape[-1], which.shape
    # every second unit in the order of θ: whatever the tilt, both halves have nearly the same variance
    theta, order = theta.sort(-1)
    which = which.reshape(-1)
    drawn = torch.zeros((len(which), n), dtype=torch.bool, device=theta.device)
    order = order[which]
    z = tilt_rows(theta, k).z
    stride = 1
    while n:
        p, q = torch.sigmoid(z), torch.sigmoid(-z)
        pending = (~z.isnan().any(-1))[which].nonzero().squeeze(-1)
        if not bool(((p * q).sum(-1) > WHOLE).any()):
            _draw_trials(drawn[:, ::stride], p, which, pending, _right_size(k), generator)
            break
        half = drawn[:, stride :: 2 * stride]
        _draw_trials(half, p[:, 1::2], which, pending, _completion(z[:, ::2], k), generator)
        # what is left of each draw is a design of its own
        theta, k = theta[:, ::2][which], k[which] - half.sum(-1)
        z = _centred(z[:, ::2][which], theta, k)
        which = torch.arange(len(which), device=which.device)
        stride *= 2
    return torch.zeros_like(drawn).scatter_(-1, order, drawn).reshape(*shape, n)


def numbered(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The :func:`distinct` rows as (m, n), and which of them each row is, (*batch)."""
    few = distinct(rows)
    count = math.prod(few.shape[:-1])
    which = torch.arange(count, device=rows.device).reshape(few.shape[:-1]).expand(rows.shape[:-1])
    return few.reshape(count, rows.shape[-1]), which


def _centred(z: Tensor, theta: Tensor, k: Tensor) -> Tensor:
    """z + c, with c such that trials make k on average, or nearly: any c is right, and this one fast.

    The half that was drawn moved k by a deviation or so: two Newton steps do, or else the solver.
    """
    for _ in range(2):
        p = torch.sigmoid(z)
        z = z + ((k - p.sum(-1)) / (p * (1 - p)).sum(-1).clamp(min=TINY)).unsqueeze(-1)
    p = torch.sigmoid(z)
    near = (k - p.sum(-1)).abs() <= OFF_CENTRE * (p * (1 - p)).sum(-1).sqrt()
    far = (~near).nonzero().squeeze(-1)
    if far.numel():
        z[far] = tilt_rows(theta[far], k[far]).z
    return z


def _right_size(k: Tensor) -> Acceptance:
    return lambda size, design: (size == k[design]).double()


def _completion(z: Tensor, k: Tensor) -> Acceptance:
    """P(these trials make k − size), over its maximum."""
    mean, n = torch.sigmoid(z).sum(-1), z.shape[-1]
    period, re, im = torch.ops.khot.characteristic.default(z)
    at = of_period(period)
    # the mode is next to the mean (Darroch 1964)
    mode = torch.maximum(pmf(re, im, mean.floor(), at), pmf(re, im, mean.ceil(), at))

    def accept(size: Tensor, design: Tensor) -> Tensor:
        rest = k[design] - size
        period = at.period[design]
        prob = pmf(re[design], im[design], rest, Frequencies(period, at.order, at.weight[design]))
        # beyond half a period lie aliases, of what has a probability below rounding
        inside = (rest >= 0) & (rest <= n) & ((rest - mean[design]).abs() < period / 2)
        return prob.where(inside, 0) / mode[design]

    return accept


def _draw_trials(
    drawn: Tensor,
    p: Tensor,
    which: Tensor,
    pending: Tensor,
    accept: Acceptance,
    generator: torch.Generator | None,
) -> None:
    """Fill the pending rows of drawn with trials of probabilities p[which], again until they are accepted."""

    def uniforms(*size: int) -> Tensor:
        return philox.rand(size, p.device, generator)

    while pending.numel():
        design = which[pending]
        trial = uniforms(len(pending), p.shape[-1]) < p[design]
        kept = uniforms(len(pending)) < accept(trial.sum(-1), design)
        drawn[pending[kept]] = trial[kept]
        pending = pending[~kept]
