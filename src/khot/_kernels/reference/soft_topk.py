"""The reference kernels of the soft top-k, forward and backward.

The forward kernel reads its rows in tiles, so that it allocates nothing of the input's size except the
result. Both compute in the dtype of `precision.wide_dtype`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot import cdfs
from khot._core import rows
from khot._core.precision import greatest, invertible, on, widen
from khot._core.rows import HERE, Row
from khot._kernels.reference.implicit import Solved, vjp
from khot._kernels.reference.root import root
from khot._kernels.reference.survey import Problem, add, nothing, of_row, one_entry
from khot._kernels.reference.tiles import standardize, tiles
from khot.cdfs import CDF

__all__ = ["soft_topk", "soft_topk_backward", "solve"]

# The largest τ, relative to the greatest number, for rows whose differences overflow: for smaller ones, they
# are infinite in τ, too.
STEEPEST = 1e-18


def soft_topk(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str, group: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """F((x − t)/τ) or its logarithm, and the threshold t = hi + lo with C(t) = k.

    Args:
        x: (*batch, n).
        k, tau: broadcast with batch.
        cdf, shape: as for :func:`khot.cdfs.resolve`.
        output: "y", "log", "threshold" (the first result is then empty), or "rounded" (it is then t).
        group: the names of the process groups that the rows are spread over; "" for whole rows.

    Returns:
        (*batch, n) of x's dtype; hi and lo as :func:`solve` returns them.
    """
    F, row, batch = cdfs.resolve(cdf, shape), rows.of(group), x.shape[:-1]
    k, tau = (widen(on(x.device, number)).expand(batch) for number in (k, tau))
    tau = invertible(tau)
    hi, lo, _ = solve(x, k, tau, F, row)
    if output == "threshold":
        return x.new_empty(*batch, 0), hi, lo
    if output == "rounded":
        return (hi + lo).to(x.dtype), hi, lo
    apply = F.log_cdf if output == "log" else F.cdf
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, tile in tiles(x):
        out[..., part] = apply(standardize(tile, hi, lo, tau))
    return out, hi, lo


def solve(x: Tensor, k: Tensor, tau: Tensor, cdf: CDF, row: Row = HERE) -> tuple[Tensor, Tensor, Tensor]:
    """The thresholds t = hi + lo with C(t) = k, and the number of passes over each row; of the batch shape.

    Rows without an answer (a score is NaN, k is out of range, or tau is not positive) get NaN. Where no
    finite entry is selected, or all are, t = ±inf is written as hi = lo = ±`greatest`. Then (x − hi) − lo is
    ∓inf for finite x, and ±inf instead of NaN for x = ±inf.

    Args:
        x: scores, (*batch, n). −inf is never selected, +inf always.
        k, tau: of the batch shape.
        row: turns the sums of a shard into those of the row.
    """
    pinned = nan = torch.zeros_like(tau)
    survey = nothing(pinned)
    for _, tile in tiles(x):
        survey = add(survey, tile, None)
        pinned, nan = pinned + (tile == math.inf).sum(-1), nan + tile.isnan().sum(-1)
    survey, (pinned, nan) = of_row(survey, row, pinned, nan)
    free, left = survey.entries, k - pinned  # what is left for the finite entries
    none, every = left == 0, left == free
    bad = (nan > 0) | ~((left >= 0) & (left <= free)) | ~((tau > 0) & (tau < math.inf))
    bad = bad | ((tau > STEEPEST * greatest(tau)) & (survey.high - survey.low == math.inf))
    live = ~(none | every | bad)
    # rows that need no solving are computed with harmless numbers
    left, tau, survey = left.where(live, 0.5), tau.where(live, 1), one_entry(survey, live)
    hi, lo, passes = root(Problem(x, None, survey, left, tau, cdf, False, row), live)
    infinite = torch.full_like(hi, -greatest(hi)).masked_fill(none, greatest(hi)).masked_fill(bad, math.nan)
    return hi.where(live, infinite), lo.where(live, infinite), passes


def soft_topk_backward(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    output: str,
    y: Tensor | None = None,
    group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x, k and τ, as :func:`khot._kernels.reference.implicit.vjp` has them, differentiable.

    A caller that has ``y`` and does not need dL/dτ may pass y. Some kernels then compute f from y, and do not
    compute dL/dτ.
    """
    tau = invertible(widen(on(x.device, tau)).expand(hi.shape))
    F, row = cdfs.resolve(cdf, shape), rows.of(group)
    solved = Solved(x, None, hi, lo, tau, F, output, False, False, row)
    dx, _, dk, dtau = vjp(grad, grad_lo.to(hi.dtype), solved)
    return dx.contiguous(), dk.clone(), dtau.clone()
