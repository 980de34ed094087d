"""Exact draws of k-subsets with P(S) ∝ exp(Σ_{i∈S} θ_i), by halves, in O(n).

Independent trials with logits z, a shift of θ, select k units on average. One half A of the units is drawn as
such trials and accepted with probability P(S_B = k − S_A)/max P(S_B), that is, in proportion to the
probability that the other half B selects the remaining units. Then B is drawn in the same way, with the
remaining size. This takes about √2 tries per half, whereas rejecting whole draws of the wrong size takes
about √(2πV) tries. Which units are in which half is of no consequence for the law, only for the time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from khot._kernels.reference import philox
from khot._kernels.reference.poisson_binomial import characteristic_kernel, of_period, pmf

__all__ = ["trials"]

WHOLE = 4.0  # the variance up to which whole draws are tried: about one in five has the right size
# Units go to the two halves in turn, in the order of z to within a bucket, so that the halves have nearly the
# same variance whatever the tilt.
BUCKETS, FINE = 64, 4.0  # of them, and how many to a unit of z
CENTRING = 20  # at most so many steps to where k are selected on average, each of at most 1
OFF_CENTRE = 0.3  # in standard deviations: this loses a twentieth of the draws
SMALL = 1e-6  # a variance that covers rounding errors of the mean

Acceptance = Callable[[Tensor, Tensor], Tensor]  # (sizes, which rows) → probabilities


def trials(z: Tensor, k: Tensor, which: Tensor, seed: Tensor) -> Tensor:
    """The reference of khot::trials, bool (draws, n): k entries of each row are True.

    Args:
        z: (m, n) in float64, one design per row, with Σσ(z) nearly k; ±inf for certain units.
        k: (m), integers. A draw stays empty where the trials cannot select k.
        which: (draws), the design of each draw.
        seed: of philox, 0-dim; the tries of a draw take the columns of its row one after another.
    """
    z, k = _centred(z, k)
    units = (
        (z * FINE).floor().add_(BUCKETS // 2).nan_to_num(0).clamp(0, BUCKETS - 1).argsort(stable=True, dim=-1)
    )
    z, k, units = z.gather(-1, units)[which], k[which], units[which]
    chosen = torch.zeros(z.shape, dtype=torch.bool, device=z.device)
    drawn, column = torch.zeros_like(chosen), torch.zeros_like(which)
    rows = _near(z, k).nonzero().squeeze(-1)  # those that are not complete
    z, k, stride = z[rows], k[rows], 1
    while rows.numel():
        z, k = _centred(z, k)
        p = z.sigmoid()
        few = (p * (-z).sigmoid()).sum(-1) <= WHOLE
        done = few.nonzero().squeeze(-1)
        drawn[rows[done], ::stride] = _until(p[done], rows[done], column, _right_size(k[done]), seed)
        rows, z, p, k = rows[~few], z[~few], p[~few], k[~few]
        if not rows.numel():
            break
        half = _until(p[:, 1::2], rows, column, _completion(z[:, ::2], k), seed)
        drawn[rows, stride :: 2 * stride] = half
        z, p, k = z[:, ::2], p[:, ::2], k - half.sum(-1)
        # the half that was drawn moved k by about one standard deviation
        shift = ((p.sum(-1) - k) / (p * (-z).sigmoid()).sum(-1)).clamp(-1, 1)
        z, stride = z - shift.unsqueeze(-1), 2 * stride
    return chosen.scatter_(-1, units, drawn)


def _near(z: Tensor, k: Tensor) -> Tensor:
    p = z.sigmoid()
    return (p.sum(-1) - k).abs() <= OFF_CENTRE * ((p * (-z).sigmoid()).sum(-1) + SMALL).sqrt()


def _centred(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """z + c, with c such that the trials select k on average, or nearly so; and k in float64."""
    k = k.double()
    for _ in range(CENTRING):
        far = (~_near(z, k)).unsqueeze(-1)
        if not bool(far.any()):
            break
        p = z.sigmoid()
        shift = ((p.sum(-1) - k) / (p * (-z).sigmoid()).sum(-1)).clamp(-1, 1).unsqueeze(-1)
        z = torch.where(far, z - shift, z)
    return z, k


def _right_size(k: Tensor) -> Acceptance:
    return lambda size, i: (size == k[i]).double()


def _completion(z: Tensor, k: Tensor) -> Acceptance:
    """P(these trials select k − size), divided by its maximum."""
    mean, n = z.sigmoid().sum(-1), z.shape[-1]
    period, re, im = characteristic_kernel(z)

    def chance(size: Tensor, i: Tensor) -> Tensor:
        prob = pmf(re[i], im[i], size, of_period(period[i]))
        # beyond half a period lie aliases of sizes whose probability is below rounding
        inside = (size >= 0) & (size <= n) & ((size - mean[i]).abs() < period[i] / 2)
        return prob.where(inside, 0)

    everywhere = torch.arange(len(z), device=z.device)
    # the mode is next to the mean (Darroch 1964)
    most = torch.maximum(chance(mean.floor(), everywhere), chance(mean.ceil(), everywhere))
    return lambda size, i: chance(k[i] - size, i) / most[i]


def _until(p: Tensor, rows: Tensor, column: Tensor, accept: Acceptance, seed: Tensor) -> Tensor:
    """Trials with probabilities p, of these rows, until each size is accepted; ``column`` moves on."""
    m = p.shape[-1]
    drawn = torch.zeros(p.shape, dtype=torch.bool, device=p.device)
    places = torch.arange(m + 1, device=p.device)
    pending = torch.arange(len(rows), device=p.device)
    while pending.numel():
        own = rows[pending].unsqueeze(-1)
        u = philox.uniform_at(seed, own, column[own] + places)
        column[own] += (m + 2) // 2 * 2
        trial = u[:, :m] < p[pending]
        kept = u[:, m] < accept(trial.sum(-1), pending)
        drawn[pending[kept]] = trial[kept]
        pending = pending[~kept]
    return drawn
