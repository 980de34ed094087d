"""What ranks, sorting and permutations share: the thresholds of many levels of a row, and the share that each
entry has of the places between them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from khot import cdfs
from khot._core import arguments
from khot._core.precision import greatest, wide_dtype, widen
from khot._ops.laplace import laplace_thresholds
from khot._ops.soft_topk import thresholds
from khot.cdfs import CDF

__all__ = [
    "boundaries",
    "by_scans",
    "correction",
    "infinite_shares",
    "log_between",
    "log_shares",
    "places",
    "quantiles",
    "standardize",
    "unanswerable",
]


def by_scans(F: CDF) -> bool:
    """Whether each sum over a sorted row follows from the one before, as for exponentials."""
    return isinstance(F, cdfs.Laplace) and F.built_in


def level_thresholds(x: Tensor, levels: Tensor, tau: Tensor, F: CDF) -> tuple[Tensor, Tensor]:
    """The pairs of C⁻¹(level) for the CDF without a shift; ±inf for levels among the infinite entries."""
    if by_scans(F):
        return laplace_thresholds(x, levels, tau)
    first = widen((x == math.inf).sum(-1, keepdim=True))
    last = widen((x != -math.inf).sum(-1, keepdim=True))
    if x.shape[-1] == 0:
        nan = torch.full(
            (*x.shape[:-1], levels.shape[-1]), math.nan, dtype=wide_dtype(x.device), device=x.device
        )
        return nan, nan
    hi, lo = thresholds(x, torch.minimum(torch.maximum(levels, first), last), tau, F)
    beyond = (first == last) & (levels > first)  # without finite entries, none and all of them are the same
    return hi.masked_fill(beyond, -greatest(hi)), lo.masked_fill(beyond, -greatest(hi))


def quantiles(x: Tensor, levels: Tensor, tau: Tensor, F: CDF) -> Tensor:
    """C⁻¹(level) for the centred CDF, in the wide dtype."""
    hi, lo = level_thresholds(x, levels, tau, F)
    if F.median:
        shift = F.median * widen(tau).unsqueeze(-1)
        lo = torch.where(hi.abs() == greatest(hi), lo, lo + shift)
    return hi + lo


def boundaries(x: Tensor, tau: Tensor, F: CDF, k: int | None = None) -> tuple[Tensor, Tensor]:
    """t_0 = +inf, t_1, …, t_n = −inf, as pairs (*batch, n + 1). With a k < n, −inf stands after t_k, so that
    one place more takes the rest."""
    n = x.shape[-1]
    inner = max(n - 1, 0) if k is None else max(min(k, n - 1), 0)
    levels = torch.arange(1, inner + 1, dtype=wide_dtype(x.device), device=x.device)
    hi, lo = level_thresholds(x, levels, tau, F)
    end = greatest(hi)
    ends = torch.full_like(hi[..., :1], end) if inner else hi.new_full((*x.shape[:-1], 1), end)
    return torch.cat((ends, hi, -ends), -1), torch.cat((ends, lo, -ends), -1)


def standardize(x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor) -> Tensor:
    """(x − t)/τ, for tensors that broadcast; its gradient is zero where t or x is infinite."""
    infinite = hi.abs() == greatest(hi)
    x = widen(x).masked_fill(x.isinf(), 0)
    z = ((x - hi.masked_fill(infinite, 0)) - lo.masked_fill(infinite, 0)) / widen(tau)
    return torch.where(infinite, -math.inf * hi.sign(), z)


def log_shares(x: Tensor, index: Tensor, tau: Tensor, F: CDF) -> Tensor:
    """log P_(i, index_i) for the descending order and each place i; the rest of P is not computed.

    Args:
        x, index: (*batch, n).
        tau: broadcasts with batch.
    """
    hi, lo = boundaries(x, tau, F)
    chosen, tau = x.gather(-1, index), tau.unsqueeze(-1)
    before = standardize(chosen, hi[..., :-1], lo[..., :-1], tau)
    after = standardize(chosen, hi[..., 1:], lo[..., 1:], tau)
    share = infinite_shares(chosen, x, places(x))
    log_p = torch.where(chosen.isinf(), share.log(), log_difference(before, after, F))
    return log_p.masked_fill(unanswerable(x, tau.squeeze(-1)), math.nan).to(x.dtype)


def log_difference(a: Tensor, b: Tensor, F: CDF) -> Tensor:
    """log(F(b) − F(a)) for a ≤ b, computed in the lower of the two tails."""
    if not F.full_support:
        p = F.cdf(b) - F.cdf(a)
        return torch.where(p > 0, torch.log(torch.where(p > 0, p, 1)), -math.inf)
    upper = a + b > 0
    a, b = torch.where(upper, -b, a), torch.where(upper, -a, b)
    nothing, all_below, everything = b == -math.inf, a == -math.inf, b == math.inf
    log_b = F.log_cdf(torch.where(nothing | everything, 0, b)).masked_fill(everything, 0)
    log_a = F.log_cdf(torch.where(all_below, 0, a))
    # The thresholds differ. If rounding makes them equal far out in a tail, the result must not be −inf.
    apart = (log_b - log_a).masked_fill(all_below, 1).clamp(min=torch.finfo(a.dtype).tiny)
    difference = log_b + torch.log(-torch.expm1(-apart)).masked_fill(all_below, 0)
    return difference.masked_fill(nothing, -math.inf)


def log_between(z: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, F: CDF, dtype: torch.dtype) -> Tensor:
    """log(F(z_i) − F(z_(i−1))), (*batch, m − 1, n), for distances z (*batch, m, n) to falling thresholds.

    Where F is made of exponentials, the difference is a product, and its logarithm a sum without cancellation
    in which the distance between the thresholds has a term of its own.

    Args:
        z, tau: as from and for :func:`standardize`.
        hi, lo: (*batch, m, 1).
        dtype: to compute in where that loses nothing but the last digits.
    """
    a, b = z[..., :-1, :], z[..., 1:, :]
    if not (F.built_in and isinstance(F, (cdfs.Logistic, cdfs.Laplace))) or not a.shape[-2]:
        return log_difference(a, b, F)
    infinite = hi.abs() == greatest(hi)
    fall = hi.masked_fill(infinite, 0).diff(dim=-2) + lo.masked_fill(infinite, 0).diff(dim=-2)
    gap = (-fall / widen(tau)).clamp(min=torch.finfo(z.dtype).tiny)  # rounding may make thresholds equal
    gap = gap.masked_fill(infinite[..., 1:, :] | infinite[..., :-1, :], math.inf)
    apart = torch.log(-torch.expm1(-gap)).to(dtype)
    if isinstance(F, cdfs.Logistic):
        return F.log_cdf(b.to(dtype)) + F.log_cdf(-a.to(dtype)) + apart
    # F(b) − F(a) is ½e^b(1 − e^−gap) if b ≤ 0, and ½e^−a(1 − e^−gap) if a ≥ 0, where the places of negative z
    # are over. An entry has at most one place where a < 0 < b.
    last = (z < 0).sum(-2, keepdim=True) - 1
    place = torch.arange(a.shape[-2], device=z.device).unsqueeze(-1)
    log_p = torch.where(place > last, -a.to(dtype), b.to(dtype)) + (apart - math.log(2))
    across = last.clamp(0, a.shape[-2] - 1)
    below, above = a.gather(-2, across), -b.gather(-2, across)
    crosses = (below < 0) & (above < 0)
    below, above = (torch.where(crosses, side, -1) for side in (below, above))
    rest = 0.5 * (torch.exp(below) + torch.exp(above))
    share = -0.5 * (torch.expm1(below) + torch.expm1(above))
    small = share < 0.5
    log_share = torch.where(
        small, torch.log(torch.where(small, share, 1)), torch.log1p(-torch.where(small, 0, rest))
    )
    there = torch.where(crosses, log_share.to(dtype), log_p.gather(-2, across))
    return log_p.scatter(-2, across, there)


def places(x: Tensor) -> Tensor:
    return torch.arange(1, x.shape[-1] + 1, device=x.device)


def infinite_shares(value: Tensor, x: Tensor, place: Tensor, selected: Tensor | None = None) -> Tensor:
    """The share of a place that an entry of this value has if it is infinite. Entries of +inf share the first
    places equally, and those of −inf the last ones; entries that do not take part have none."""
    shape = (*x.shape[:-1], *(1,) * (value.dim() - x.dim() + 1))
    first = (x == math.inf).sum(-1).reshape(shape)
    last = (x == -math.inf).sum(-1).reshape(shape)
    end = torch.full_like(last, x.shape[-1])
    if selected is not None:
        out = (~selected).sum(-1).reshape(shape)
        last, end = last - out, end - out
    at_top = (place <= first) / first.clamp(min=1)
    at_bottom = ((place > end - last) & (place <= end)) / last.clamp(min=1)
    share = widen(torch.where(value > 0, at_top, at_bottom))
    return share if selected is None else share * selected.unsqueeze(-2)


def unanswerable(x: Tensor, tau: Tensor) -> Tensor:
    tau = tau.expand(x.shape[:-1])
    return (x.isnan().any(-1) | ~((tau > 0) & (tau < math.inf))).unsqueeze(-1)


def correction(
    x: Tensor, tau: Tensor, selected: Tensor | None, of_share: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, int, int], Tensor]:
    """What gives infinite entries their shares of the places from start to stop, and bad rows NaN."""
    entries, infinite = x.unsqueeze(-2), x.isinf().unsqueeze(-2)
    bad = unanswerable(x, tau).unsqueeze(-1)
    all_finite = arguments.readable(infinite) and not bool(infinite.any())
    all_good = arguments.readable(bad) and not bool(bad.any())

    def correct(p: Tensor, start: int, stop: int) -> Tensor:
        if not all_finite:
            share = infinite_shares(entries, x, places(x)[start:stop].unsqueeze(-1), selected)
            p = torch.where(infinite, of_share(share).to(p.dtype), p)
        return p if all_good else p.masked_fill(bad, math.nan)

    return correct
