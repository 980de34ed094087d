"""What ranks, sorting and permutations share: the thresholds of many levels of a row, and the share that each
entry has of the places between them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot import cdfs
from khot._core.precision import greatest, wide_dtype, widen
from khot._ops.laplace_thresholds import laplace_thresholds
from khot._ops.soft_topk import thresholds
from khot.cdfs import CDF

__all__ = [
    "boundaries",
    "by_scans",
    "infinite_shares",
    "log_difference",
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


def boundaries(x: Tensor, tau: Tensor, F: CDF) -> tuple[Tensor, Tensor]:
    """t_0 = +inf, t_1, …, t_n = −inf, as pairs (*batch, n + 1)."""
    n = x.shape[-1]
    levels = torch.arange(1, max(n, 1), dtype=wide_dtype(x.device), device=x.device)
    hi, lo = level_thresholds(x, levels, tau, F)
    end = greatest(hi)
    ends = torch.full_like(hi[..., :1], end) if n > 1 else hi.new_full((*x.shape[:-1], 1), end)
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
