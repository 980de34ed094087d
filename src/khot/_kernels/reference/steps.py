"""The solver's step: from the sums of one evaluation towards the threshold with C(t) = k."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot.cdfs import CDF, Normal

__all__ = ["DIGITS", "Digits", "Sums", "newton_step"]


class Digits(NamedTuple):
    """The limits that rounding and underflow set for one dtype."""

    tiny: float  # tails below this are taken in logarithms
    below_one: float  # the greatest number below 1
    value: float  # relative rounding error of a score
    quantile: float  # error of a quantile, in τ
    bin: float  # error of a position among bins, in bins
    sum: float  # error of C, relative to min(k, n − k)
    near: float  # a step, in τ, whose sign may be rounding
    settled: float  # a step, in τ, whose square is below rounding, and so is Newton's error after it
    settled_compact: float  # the same for CDFs of compact support, where the error may not be the square


DIGITS = {
    torch.float64: Digits(2.3e-308, 1 - 1e-16, 1e-15, 1e-9, 1e-6, 1e-12, 1e-6, 1e-8, 1e-12),
    torch.float32: Digits(1e-30, 1 - 6e-8, 5e-7, 0.25, 1e-3, 2e-6, 1e-4, 1e-4, 1e-6),
}


class Sums(NamedTuple):
    """The sums over a row that one evaluation computes, at a threshold t."""

    m: Tensor  # number of entries above: z > median
    tail_above: Tensor  # A = Σ_above 1 − F
    tail_below: Tensor  # B = Σ_below F
    density_above: Tensor  # Σ_above f
    density_below: Tensor
    next_above: Tensor  # the least entry above, minus hi
    next_below: Tensor  # the greatest entry below, minus hi


def newton_step(
    s: Sums,
    lo: Tensor,
    low: Tensor,
    high: Tensor,
    opposite: tuple[Tensor, Tensor],
    k: Tensor,
    n: Tensor,
    excess: Tensor,
    P: Tensor,
    Q: Tensor,
    tau: Tensor,
    cdf: CDF,
) -> Tensor:
    """The step in t towards C(t) = k, that is P = Q; NaN where the sums do not determine one.

    Newton needs a function of C that is nearly linear in t. Which one that is depends on how many entries
    are undecided; Newton on C itself is right only close to the root.
    """
    tiny, below_one, *_ = DIGITS[k.dtype]
    m, density = k + excess, s.density_above + s.density_below
    plain = (P - Q) / density

    # With many undecided entries, C/n is nearly a shifted F if the scores are equal, and nearly normal if
    # they spread (an F of compact support is not a model of a tail). Entries on a decided side are left out.
    link = cdf if cdf.full_support else Normal()
    decided_above = (s.tail_above < 1e-3 * s.tail_below) & (excess < 0)
    decided_below = (s.tail_below < 1e-3 * s.tail_above) & (excess > 0)
    base = torch.where(decided_above, m, 0)
    size = torch.where(decided_below, m, n) - base
    z = link.icdf(((m - base + s.tail_below - s.tail_above) / size).clamp(tiny, below_one))
    target = link.icdf(((k - base) / size).clamp(tiny, below_one))
    many = (z - target) * link.pdf(z) * size / density
    near = (P - Q).abs() <= 1e-4 * torch.minimum(k - base, base + size - k)

    if cdf.full_support:
        limit, few = 1, _tail_step(s, lo, excess, P, Q, tau, cdf)
    else:  # C and n − C are powers of the distance to the points where they become 0
        limit, few = 3, _edge_step(s, lo, opposite, excess, P, Q, tau, cdf)
        C = k + P - Q
        start, end = cdf.support
        first, last = (high - lo) / tau - start, end - (low - lo) / tau
        rise = first - first * (k / C) ** (C / (density * first))
        fall = last * ((n - k) / (n - C)) ** ((n - C) / (density * last)) - last
        reach = 2 * (end - start)
        many = torch.where((k <= n / 2) & (first < reach), rise, many)
        many = torch.where((k > n / 2) & (last < reach), fall, many)
    use_few = (((limit > P) & (limit > Q)) | (density == 0)) & few.isfinite()
    return tau * torch.where(use_few, few, torch.where(near, plain, many))


def _tail_step(s: Sums, lo: Tensor, excess: Tensor, P: Tensor, Q: Tensor, tau: Tensor, cdf: CDF) -> Tensor:
    """Newton on F⁻¹(P/c) = F⁻¹(Q/c): linear in t for c entries like the nearest undecided one.

    For a single entry c = 1, and the step is exact; for many it tends to Newton on the logarithm.
    """
    like_up = s.tail_above / cdf.sf((s.next_above - lo) / tau)
    like_down = s.tail_below / cdf.cdf((s.next_below - lo) / tau)
    c = torch.fmax(
        torch.where(excess > 0, 1, like_down).nan_to_num(1.0),
        torch.where(excess < 0, 1, like_up).nan_to_num(1.0),
    )
    zP, zQ = (cdf.icdf((tail / c).clamp(min=DIGITS[c.dtype].tiny)) for tail in (P, Q))
    return c * (zP - zQ) / (s.density_below / cdf.pdf(zP) + s.density_above / cdf.pdf(zQ))


def _edge_step(
    s: Sums,
    lo: Tensor,
    opposite: tuple[Tensor, Tensor],
    excess: Tensor,
    P: Tensor,
    Q: Tensor,
    tau: Tensor,
    cdf: CDF,
) -> Tensor:
    """For compact support: near the edge where entries start to count, tails are powers.

    B ~ Δ^γ in the distance Δ of the nearest entry from the edge, with γ = Δ·B'/B; the same holds for A. If
    only one side counts, its power law is solved; if both sides count, the step is Newton's on C.
    ``opposite`` is the nearest known point on the other side of the root, and C − k there. Where a tail has
    to grow by much, γ is computed from the two points, because most of the entries that count at the root do
    not count yet.
    """
    up, down = (s.next_above - lo) / tau, (s.next_below - lo) / tau
    start, end = cdf.support
    from_start, to_end = down - start, end - up
    distance, miss = opposite[0].abs() / tau, opposite[1]
    ratio, growth = (Q / P).log(), (miss - (P - Q)).abs()

    def stretch(log_ratio: Tensor, tail: Tensor, density: Tensor, delta: Tensor) -> Tensor:
        two_points = ((tail + growth) / tail).log() / ((delta + distance) / delta).log()
        use = (log_ratio > math.log(3)) & (two_points > 0) & two_points.isfinite()
        return delta * (log_ratio / torch.where(use, two_points, density * delta / tail)).expm1()

    rise = stretch(ratio, s.tail_below, s.density_below, from_start)
    fall = stretch(-ratio, s.tail_above, s.density_above, to_end)
    both = (P - Q) / (s.density_below + s.density_above)
    # the nearest entry of a side is the first that counts
    start_above = up - cdf.icdf(1 - P.clamp(max=1))
    start_below = down - cdf.icdf(Q.clamp(max=1))
    none_above, none_below = s.tail_above == 0, s.tail_below == 0
    more = torch.where(none_below, fall, both).where(~none_above, start_above)  # C > k
    less = torch.where(none_above, -rise, both).where(~none_below, start_below)
    # m = k: the density may jump to its maximum at the upper end, and may rise from 0 at the lower end
    edge = cdf.pdf(torch.full_like(up, end * DIGITS[up.dtype].below_one))
    level = both.where(~none_above, up - end + s.tail_below / (s.density_below + edge))
    drained = (s.tail_above + s.density_above * from_start).clamp(0, 1)
    level = level.where(~none_below, down - cdf.icdf(drained))
    return torch.where(excess > 0, more, torch.where(excess < 0, less, level))
