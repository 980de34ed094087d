"""The solver's step: from the sums of one evaluation towards the threshold with C(t) = k."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot.cdfs import CDF, Normal

__all__ = ["DIGITS", "Digits", "Sums", "newton_step"]


class Digits(NamedTuple):
    """What rounding and underflow leave of a row's numbers, for one dtype."""

    tiny: float  # tails below this are taken in logarithms
    below_one: float  # the greatest number below 1
    value: float  # of a score, relative: what rounding could take
    quantile: float  # of a quantile, in τ
    bin: float  # of a place among bins, in bins
    sum: float  # of C, relative to min(k, n − k)
    near: float  # a step, in τ, whose sign may be rounding
    settled: float  # a step, in τ, after which Newton's error, its square, is rounding
    settled_compact: float  # the same for CDFs of compact support, where it may not be its square


DIGITS = {
    torch.float64: Digits(1e-290, 1 - 1e-16, 1e-15, 1e-9, 1e-6, 1e-12, 1e-6, 1e-8, 1e-12),
    torch.float32: Digits(1e-30, 1 - 6e-8, 5e-7, 0.25, 1e-3, 2e-6, 1e-4, 1e-4, 1e-6),
}


class Sums(NamedTuple):
    """What one evaluation leaves of a row, at a threshold t."""

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
    """The step in t towards C(t) = k, that is P = Q; NaN where there is no information.

    Newton needs a function of C that is nearly linear in t. Which one that is depends on how many entries
    are undecided; Newton on C itself is right only close to the root.
    """
    tiny, below_one, *_ = DIGITS[k.dtype]
    m, density = k + excess, s.density_above + s.density_below
    plain = (P - Q) / density

    # Many: C/n is nearly a shifted F where the scores agree, and nearly normal where they spread (an F of
    # compact support is no model of a tail). Entries on a side that is decided do not count.
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
    else:  # C and n − C are powers of the distance to where they vanish
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

    c = 1 for a lone entry, where this is exact; for many it tends to Newton on the logarithm.
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

    B ~ Δ^γ in the distance Δ of the nearest entry from the edge, and γ = Δ·B'/B; so too A. One side alone
    is solved by its power; with both, Newton on C, from where both are under way. ``opposite`` is the
    nearest point known on the other side of the root, and C − k there: far from the root, γ is taken from
    the two points, since few of the entries that will count do so yet.
    """
    up, down = (s.next_above - lo) / tau, (s.next_below - lo) / tau
    start, end = cdf.support
    from_start, to_end = down - start, end - up
    distance, miss = opposite[0].abs() / tau, opposite[1]
    ratio, growth = (Q / P).log(), (miss - (P - Q)).abs()

    def exponent(tail: Tensor, density: Tensor, delta: Tensor) -> Tensor:
        two_points = ((tail + growth) / tail).log() / ((delta + distance) / delta).log()
        use = (ratio.abs() > math.log(3)) & (two_points > 0) & two_points.isfinite()
        return torch.where(use, two_points, density * delta / tail)

    rise = from_start * (ratio / exponent(s.tail_below, s.density_below, from_start)).expm1()
    fall = to_end * (-ratio / exponent(s.tail_above, s.density_above, to_end)).expm1()
    both = (P - Q) / (s.density_below + s.density_above)
    # a side that has to start counting does so with its nearest entry
    start_above = up - cdf.icdf(1 - P.clamp(max=1))
    start_below = down - cdf.icdf(Q.clamp(max=1))
    none_above, none_below = s.tail_above == 0, s.tail_below == 0
    more = torch.where(none_below, fall, both).where(~none_above, start_above)  # C > k
    less = torch.where(none_above, -rise, both).where(~none_below, start_below)
    # m = k: at the upper end the density may jump to its maximum, at the lower one it may start from nothing
    edge = cdf.pdf(torch.full_like(up, end * DIGITS[up.dtype].below_one))
    level = both.where(~none_above, up - end + s.tail_below / (s.density_below + edge))
    drained = (s.tail_above + s.density_above * from_start).clamp(0, 1)
    level = level.where(~none_below, down - cdf.icdf(drained))
    return torch.where(excess > 0, more, torch.where(excess < 0, less, level))
