"""Exact draws of k-subsets with P(S) ∝ exp(Σ_{i∈S} θ_i), by halves, in O(n log n).

The design is tilted so that independent trials select k units on average. One half A of the units is drawn as
such trials and accepted with probability P(S_B = k − S_A)/max P(S_B), that is, in proportion to the
probability that the other half B selects the remaining units. Then B is drawn in the same way, with the
remaining size. This takes about √2 tries per half, whereas rejecting whole draws of the wrong size takes
about √(2πV) tries.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from khot._kernels.reference.poisson_binomial import Frequencies, of_period, pmf
from khot._ops import poisson_binomial as operators
from khot._ops import uniform as philox
from khot._ops.tilting import tilt_rows
from khot.sampling._phantom import distinct

__all__ = ["draw_rows", "numbered"]

WHOLE = 16.0  # the variance up to which whole draws are tried: at least one in ten has the right size
OFF_CENTRE = 0.2  # in standard deviations: this loses a fiftieth of the draws
TINY = torch.finfo(torch.float64).tiny

Acceptance = Callable[[Tensor, Tensor], Tensor]  # (sizes, indices of their designs) → probabilities


def draw_rows(theta: Tensor, k: Tensor, which: Tensor, generator: torch.Generator | None) -> Tensor:
    """Bool (*shape, n): one draw per entry of which (*shape), with k entries True in each row.

    Args:
        theta: float64 logits (m, n), one design per row.
        k: (m). Where it does not suit the design (NaN, too many certain units) the draws stay empty.
        which: the index in [0, m) of the design of each draw.
    """
    n, shape = theta.shape[-1], which.shape
    # the halves alternate in the order of θ, so that they have nearly the same variance whatever the tilt
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
        # the rest of each draw is a design of its own
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
    """z + c, with c such that the trials select k on average, or nearly so. Any c is right; this one is fast.

    The half that was drawn moved k by about one standard deviation: two Newton steps are mostly enough, and
    the solver does the other rows.
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
    """P(these trials select k − size), divided by its maximum."""
    mean, n = torch.sigmoid(z).sum(-1), z.shape[-1]
    period, re, im = operators.characteristic(z)
    at = of_period(period)
    # the mode is next to the mean (Darroch 1964)
    mode = torch.maximum(pmf(re, im, mean.floor(), at), pmf(re, im, mean.ceil(), at))

    def accept(size: Tensor, design: Tensor) -> Tensor:
        rest = k[design] - size
        period = at.period[design]
        prob = pmf(re[design], im[design], rest, Frequencies(period, at.order, at.weight[design]))
        # beyond half a period lie aliases of sizes whose probability is below rounding
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
    """Fill the pending rows of drawn with trials of probabilities p[which], until all are accepted."""

    def uniforms(*size: int) -> Tensor:
        return philox.rand(size, p.device, generator)

    while pending.numel():
        design = which[pending]
        trial = uniforms(len(pending), p.shape[-1]) < p[design]
        kept = uniforms(len(pending)) < accept(trial.sum(-1), design)
        drawn[pending[kept]] = trial[kept]
        pending = pending[~kept]
