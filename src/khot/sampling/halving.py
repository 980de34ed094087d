"""Exact draws from the conditional Poisson design, by halves."""

from __future__ import annotations

import torch
from torch import Tensor

from khot.sampling import poisson_binomial
from khot.sampling.poisson_binomial import characteristic, frequencies, pmf
from khot.sampling.tilting import tilt_rows

__all__ = ["draw_rows"]

# variance at which rows are drawn whole and kept if their size is right: one in five is
WHOLE = 4.0


def draw_rows(theta: Tensor, k: Tensor, generator: torch.Generator | None) -> Tensor:
    """Bool (*batch, n) with k True in each row, for float64 logits and k of the batch shape."""
    shape = theta.shape
    theta, order = theta.reshape(-1, shape[-1]).sort(-1)
    drawn = torch.zeros_like(theta, dtype=torch.bool)
    k = k.reshape(-1).clone()
    k.masked_fill_(theta.isnan().any(-1), 0)
    theta = theta.nan_to_num(0.0, torch.inf, -torch.inf)
    # every second unit in the order of θ: both halves have nearly the same variance, under any tilt
    stride = 1
    while shape[-1]:
        rest = theta[:, ::stride]
        trials = tilt_rows(rest, k)
        p, q = trials.p, trials.q
        whole = not bool(((p * q).sum(-1) > WHOLE).any())
        if whole:
            _accept(drawn[:, ::stride], p, lambda size, rows: size == k[rows], generator)
            break
        _accept(drawn[:, stride :: 2 * stride], p[:, 1::2], _completion(p[:, ::2], q[:, ::2], k), generator)
        k = k - drawn[:, stride :: 2 * stride].sum(-1)
        stride *= 2
    return torch.zeros_like(drawn).scatter_(-1, order, drawn).reshape(shape)


def _completion(p, q, k):
    """Accept with the probability that the rest completes, over its maximum."""
    mean, variance, n = p.sum(-1), (p * q).sum(-1), p.shape[-1]
    at = frequencies(variance, n)
    re, im = characteristic(q, p, at)
    # the mode is one of the two integers around the mean (Darroch 1964)
    mode = torch.maximum(pmf(re, im, mean.floor(), at), pmf(re, im, mean.ceil(), at))

    def accept(size, rows):
        missing = k[rows] - size
        here = poisson_binomial.Frequencies(at.period[rows], at.order, at.weight[rows])
        prob = pmf(re[rows], im[rows], missing, here)
        inside = (missing >= 0) & (missing <= n) & ((missing - mean[rows]).abs() < at.period[rows] / 2)
        return prob.where(inside, 0) / mode[rows]

    return accept


def _accept(drawn, p, probability, generator):
    rows = torch.arange(p.shape[0], device=p.device)
    while rows.numel():
        here = (
            torch.rand((rows.numel(), p.shape[-1]), dtype=p.dtype, device=p.device, generator=generator)
            < p[rows]
        )
        u = torch.rand(rows.shape, dtype=p.dtype, device=p.device, generator=generator)
        kept = u < probability(here.sum(-1), rows)
        drawn[rows[kept]] = here[kept]
        rows = rows[~kept]
