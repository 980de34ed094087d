"""The solver: the threshold t of each row with soft count C(t) = Σ_j F((x_j − t)/τ) = k.

Plain torch, any device, batched over rows, in float64 (`wide_dtype`) whatever the
input. A pass reads each row once, a tile of columns at a time, and reduces it to a handful of sums a row;
everything between passes works on these. The passes of one solve, in order (`PASSES` counts them for the
tests):

1. statistics: counts, extremes, mean and variance;
2. histograms, where the scores spread far wider than τ: the order statistics around rank k, to within a
   few τ, and so a bracket for t;
3. evaluations of C and C', each a safeguarded Newton step;
4. in a gap so wide that both tails underflow, the same in logarithms.

Where a row is spread over processes, `reduce` turns the sums of each shard into those of the row; all else
is the same on every process.

The threshold is a pair t = hi + lo with abs(lo) ≤ ulp(hi)/2: x − hi is exact for the entries near t, so that
((x − hi) − lo)/τ has full relative accuracy however large x/τ is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.precision import greatest, wide_dtype, widen
from khot._kernels.reference.steps import DIGITS, Sums, newton_step
from khot.cdfs import CDF, Normal

__all__ = [
    "PASSES",
    "Reduce",
    "Threshold",
    "alone",
    "solve",
    "some",
    "standardize",
    "tiles",
    "two_sum",
]

PASSES = {"count": 0}  # passes over the row since a test last set it to 0

TILE = 1 << 18  # entries per tile: its few float64 temporaries stay in a 2 MiB cache
# width of the first bracket, in τ, from which a histogram saves more passes than it costs; without
# tails to lead it, Newton gets lost sooner
WIDE = {True: 64.0, False: 8.0}
FINE = 4.0  # width, in τ, at which a histogram's window is narrow enough for Newton
FAR = 1e12  # width, in τ, that histograms of equal bins would take too long to get through
HISTOGRAMS = 5
EVALUATIONS = 24
LOG_EVALUATIONS = 4


# Sums over, and maxima of, each process's shard of the rows; what comes back, in that order, is the row's.
Reduce = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def alone(sums: Sequence[Tensor], maxima: Sequence[Tensor] = ()) -> list[Tensor]:
    """The `Reduce` of rows that are all here."""
    return [*sums, *maxima]


class Threshold(NamedTuple):
    """t = hi + lo a row, and the entries next to it, ±inf where there is none: the least one with F > ½ and
    the greatest other, as of the last evaluation."""

    hi: Tensor
    lo: Tensor
    above: Tensor
    below: Tensor


def tiles(x: Tensor, size: int = TILE) -> Iterator[tuple[slice, Tensor]]:
    """The row, widened, as consecutive slices of the last dimension and what lies there."""
    PASSES["count"] += 1
    n = x.shape[-1]
    rows = max(1, x.numel() // max(1, n))
    if x.is_cuda:
        size *= 64  # launches, not the cache, are what small tiles cost there
    width = min(n, max(64, size // rows))
    for start in range(0, n, max(1, width)):
        part = slice(start, min(start + width, n))
        yield part, widen(x[..., part])


def standardize(x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor) -> Tensor:
    """z = (x − t)/τ for a tile; hi, lo and tau have one entry a row."""
    return ((x - hi.unsqueeze(-1)) - lo.unsqueeze(-1)) / tau.unsqueeze(-1)


def solve(x: Tensor, k: Tensor, tau: Tensor, cdf: CDF, reduce: Reduce = alone) -> Threshold:
    """The thresholds t with C(t) = k, of the batch shape.

    Rows without an answer (NaN among the scores, k outside what can be selected, tau not positive) get NaN;
    where no finite entry is selected, or all are, t = ±inf, written as hi = lo = ±`greatest`: (x − hi) − lo
    is ∓inf then for finite x, and ±inf, not NaN, for x = ±inf.

    Args:
        x: scores, (*batch, n). −inf is never selected, +inf always.
        k, tau: of the batch shape.
        reduce: makes the sums of a shard those of the row.
    """
    stats = _statistics(x, reduce)
    k_free = k - stats.pinned  # what is left for the finite entries
    none, every = k_free == 0, k_free == stats.free
    bad = stats.nan | ~((k_free >= 0) & (k_free <= stats.free)) | ~((tau > 0) & (tau < math.inf))
    live = ~(none | every | bad)
    # rows that need no solving go through the motions with harmless numbers
    k_safe = torch.where(live, k_free, 0.5)
    free = torch.where(live, stats.free, 1.0)
    tau_safe = torch.where(live, tau, 1.0)

    guess, bracket = _first_guess(stats, k_safe, free, tau_safe, cdf, live)
    wide = live & (bracket.high - bracket.low > WIDE[cdf.full_support] * tau_safe)
    if some(wide, reduce):
        guess, bracket = _histogram_search(
            x, k_safe, free, tau_safe, cdf, stats, wide, guess, bracket, reduce
        )
    hi, lo, *near = _newton(x, k_safe, free, tau_safe, cdf, stats, live, guess, bracket, reduce)

    infinite = torch.full_like(hi, -greatest(hi)).masked_fill(none, greatest(hi))
    hi, lo = hi.where(live, infinite), lo.where(live, infinite)
    return Threshold(hi.masked_fill(bad, math.nan), lo.masked_fill(bad, math.nan), *near)


def some(rows: Tensor, reduce: Reduce) -> bool:
    """Whether any is left to be done. To look would wait for a GPU; but so does a reduction."""
    return (rows.is_cuda and reduce is alone) or bool(rows.any())


class _Statistics(NamedTuple):
    free: Tensor  # number of finite entries
    pinned: Tensor  # number of +inf entries
    nan: Tensor
    low: Tensor  # least finite entry
    high: Tensor
    mean: Tensor  # of the finite entries
    variance: Tensor


def _statistics(x: Tensor, reduce: Reduce) -> _Statistics:
    batch = x.shape[:-1]
    zero = x.new_zeros(batch, dtype=wide_dtype(x.device))
    free, pinned, nan, total, squares, shift = zero, zero, zero, zero, zero, zero
    low, high = zero + math.inf, zero - math.inf
    for part, tile in tiles(x):
        finite = tile.isfinite()
        count = widen(finite.sum(-1))
        if part.start == 0:  # a shift near the data keeps the one-pass variance from cancelling
            shift = tile.where(finite, 0).sum(-1) / count.clamp(min=1)
        centred = (tile - shift.unsqueeze(-1)).where(finite, 0)
        free = free + count
        pinned = pinned + (tile == math.inf).sum(-1)
        nan = nan + tile.isnan().sum(-1)
        low = torch.minimum(low, tile.where(finite, math.inf).amin(-1))
        high = torch.maximum(high, tile.where(finite, -math.inf).amax(-1))
        total = total + centred.sum(-1)
        squares = squares + (centred * centred).sum(-1)
    n = free.clamp(min=1)
    mean = total / n
    spread, mean = (squares - total * mean).clamp(min=0), shift + mean

    # of shards: the spread within them, and that of their means
    moments = [free * mean, free * mean * mean, spread]
    free, pinned, nan, total, squares, spread, low, high = reduce([free, pinned, nan, *moments], [-low, high])
    n, low = free.clamp(min=1), -low
    mean = (total / n).clamp(low, high)
    variance = (spread + (squares - total * mean).clamp(min=0)) / n
    # the means' part cancels where they are far from 0, but no variance exceeds this one
    variance = torch.minimum(variance, (0.5 * high - 0.5 * low).square())
    return _Statistics(free, pinned, nan > 0, low, high, mean, variance)


@dataclass
class _Bracket:
    """t lies in [low, high]; both are moved inwards only."""

    low: Tensor
    high: Tensor

    def tighten(self, low: Tensor, high: Tensor) -> None:
        self.low = torch.fmax(self.low, low)  # fmax: a bound that is NaN says nothing
        self.high = torch.fmin(self.high, high)


def _order_bounds(
    value: Tensor, rank: Tensor, k: Tensor, n: Tensor, tau: Tensor, cdf: CDF
) -> tuple[Tensor, Tensor]:
    """Bounds on t from one order statistic: the rank-th largest of n entries equals value.

    C(b) ≥ rank·F((value − b)/τ) bounds t from below where rank > k, and
    C(b) ≤ (rank − 1) + (n − rank + 1)·F((value − b)/τ) from above where rank − 1 < k.
    Padded by what rounding could take; −inf and +inf where there is no bound.
    """
    digits = DIGITS[tau.dtype]
    pad = digits.quantile * tau + digits.value * value.abs()
    from_below = value - tau * cdf.icdf((k / rank).clamp(digits.tiny, 1)) - pad
    share = (k - rank + 1) / (n - rank + 1)
    from_above = value - tau * cdf.icdf(share.clamp(digits.tiny, 1)) + pad
    return (
        torch.where((rank > k) & (rank >= 1), from_below, -math.inf),
        torch.where((rank - 1 < k) & (rank <= n), from_above, math.inf),
    )


def _first_guess(
    stats: _Statistics, k: Tensor, n: Tensor, tau: Tensor, cdf: CDF, live: Tensor
) -> tuple[Tensor, _Bracket]:
    """The threshold of a distribution with the moments of x + noise of law τF.

    Its quantiles are F's own where the noise dominates (exact where all scores agree) and the normal
    distribution's where the scores do.
    """
    low, high = torch.where(live, stats.low, 0), torch.where(live, stats.high, 0)
    bracket = _Bracket(*_order_bounds(low, n, k, n, tau, cdf))
    bracket.tighten(*_order_bounds(high, torch.ones_like(n), k, n, tau, cdf))
    digits = DIGITS[tau.dtype]
    share = (k / n).clamp(digits.tiny, digits.below_one)
    noise = tau * tau * cdf.variance
    total = noise + stats.variance
    own = (cdf.icdf(share) - cdf.mean) / math.sqrt(cdf.variance)
    quantile = torch.lerp(Normal().icdf(share), own, noise / total)
    guess = stats.mean - tau * cdf.mean - quantile * torch.sqrt(total)
    return guess, bracket


def _histogram_search(
    x: Tensor,
    k: Tensor,
    n: Tensor,
    tau: Tensor,
    cdf: CDF,
    stats: _Statistics,
    wide: Tensor,
    guess: Tensor,
    bracket: _Bracket,
    reduce: Reduce,
) -> tuple[Tensor, _Bracket]:
    """Narrow, in the rows marked wide, the guess and the bracket to the order statistics around rank k.

    Counts the entries in equal bins of a window and zooms in on the bins of the ranks ⌈k⌉ and ⌊k⌋ + 1 (one
    entry for a fractional k, two neighbours for an integer one), until the window is `FINE`·τ wide, holds
    next to nothing, or has shown a gap between the two. A window with stand-ins for −inf in it, or tails
    as far, is first cut into bins of equal ratio of abs(x), down to τ.
    """
    digits = DIGITS[tau.dtype]
    bins = 256 if x.shape[-1] <= 512 and reduce is alone else 1024  # the same for every shard
    rank_high, rank_low = torch.ceil(k), torch.floor(k) + 1
    log_tau = torch.log(tau)

    def fold(v: Tensor, log_tau: Tensor) -> Tensor:
        return torch.sign(v) * (torch.log(v.abs()) - log_tau).clamp(min=0)

    def unfold(v: Tensor) -> Tensor:
        return torch.sign(v) * torch.exp(v.abs() + log_tau).clamp(max=greatest(v))

    low = torch.where(wide, stats.low, 0.0)
    high = torch.where(wide, stats.high, 1.0)
    searching = wide
    for _ in range(HISTOGRAMS):
        if not some(searching, reduce):
            break
        folded = searching & (high - low > FAR * tau)
        bottom, top = (
            torch.where(folded, fold(low, log_tau), low),
            torch.where(folded, fold(high, log_tau), high),
        )
        top = top + digits.bin**2 * (top - bottom)  # the window is half open, and the maximum belongs to it
        width = (top - bottom) / bins
        # bin 0 and bin `bins` + 1 hold what lies below and above the window
        counts = x.new_zeros(*x.shape[:-1], bins + 2, dtype=torch.int32)
        one = counts.new_ones(())
        any_folded = x.is_cuda or bool(folded.any())
        for _, tile in tiles(x):
            if any_folded:
                tile = torch.where(folded.unsqueeze(-1), fold(tile, log_tau.unsqueeze(-1)), tile)
            index = (tile - bottom.unsqueeze(-1)).div_(width.unsqueeze(-1)).floor_()
            index = index.nan_to_num_(nan=0.0).clamp_(-1, bins).add_(1).long()
            counts.scatter_add_(-1, index, one.expand(index.shape))
        (counts,) = reduce([widen(counts)], ())
        above = counts.flip(-1).cumsum(-1).flip(-1) - stats.pinned.unsqueeze(-1)
        bin_high = (above >= rank_high.unsqueeze(-1)).sum(-1) - 1
        bin_low = (above >= rank_low.unsqueeze(-1)).sum(-1) - 1
        inside = above.gather(-1, bin_low.clamp(min=0).unsqueeze(-1)) - above.gather(
            -1, (bin_high + 1).clamp(max=bins + 1).unsqueeze(-1)
        )
        pad = digits.bin * width + digits.value * torch.maximum(bottom.abs(), top.abs())
        bottom, top = bottom + (bin_low - 1) * width - pad, bottom + bin_high * width + pad
        # folding makes one of all that lies within τ of 0
        next_low = torch.where(folded, unfold(bottom) - tau, bottom)
        next_high = torch.where(folded, unfold(top) + tau, top)
        low = torch.where(searching, torch.maximum(next_low, low), low)
        high = torch.where(searching, torch.minimum(next_high, high), high)
        found = (high - low <= FINE * tau) | (inside.squeeze(-1) <= 2) | (bin_high - bin_low >= 4)
        searching = searching & ~found
    bracket.tighten(
        torch.where(wide, _order_bounds(low, rank_low, k, n, tau, cdf)[0], -math.inf),
        torch.where(wide, _order_bounds(high, rank_high, k, n, tau, cdf)[1], math.inf),
    )
    middle = 0.5 * low + 0.5 * high - tau * cdf.median
    return torch.where(wide, middle, guess), bracket


def _evaluate(
    x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: CDF, reduce: Reduce
) -> tuple[Sums, Tensor, Tensor]:
    """The sums at t = hi + lo, and the entries next to it."""
    zero = torch.zeros_like(hi)
    m, A, B, fA, fB = zero, zero, zero, zero, zero
    up, down = zero + math.inf, zero - math.inf
    for _, tile in tiles(x):
        z = standardize(tile, hi, lo, tau)
        above = z > cdf.median
        weight = widen(above)
        tail, density = cdf.tail(z, above), cdf.pdf(z)
        tail_above, density_above = tail * weight, density * weight
        m = m + weight.sum(-1)
        A = A + tail_above.sum(-1)
        B = B + tail.sub_(tail_above).sum(-1)  # exact: one of the two is 0
        fA = fA + density_above.sum(-1)
        fB = fB + density.sub_(density_above).sum(-1)
        up = torch.minimum(up, tile.masked_fill(~above, math.inf).amin(-1))
        down = torch.maximum(down, tile.masked_fill(above, -math.inf).amax(-1))
    m, A, B, fA, fB, up, down = reduce([m, A, B, fA, fB], [-up, down])
    return Sums(m, A, B, fA, fB, -up - hi, down - hi), -up, down


def _log_evaluate(
    x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: CDF, up: Tensor, down: Tensor, reduce: Reduce
) -> tuple[Tensor, Tensor]:
    """log B − log A and its slope in −t/τ, where the tails themselves may underflow.

    Every tail is taken relative to that of the nearest entry on its side, up or down.
    """
    zero = torch.zeros_like(hi)
    A, B, fA, fB = zero, zero, zero, zero
    z_up, z_down = (up - lo) / tau, (down - lo) / tau
    log_up = cdf.log_tail(z_up, z_up > cdf.median).unsqueeze(-1)
    log_down = cdf.log_tail(z_down, z_down > cdf.median).unsqueeze(-1)
    for _, tile in tiles(x):
        z = standardize(tile, hi, lo, tau)
        above = z > cdf.median
        reference = torch.where(above, log_up, log_down)
        tail = torch.exp(cdf.log_tail(z, above) - reference)
        density = torch.exp(cdf.log_pdf(z) - reference)
        A = A + tail.where(above, 0).sum(-1)
        B = B + tail.where(~above, 0).sum(-1)
        fA = fA + density.where(above, 0).sum(-1)
        fB = fB + density.where(~above, 0).sum(-1)
    A, B, fA, fB = reduce([A, B, fA, fB], ())
    log_ratio = (log_down - log_up).squeeze(-1) + torch.log(B) - torch.log(A)
    return log_ratio, fA / A + fB / B


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and its exact error (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _newton(
    x: Tensor,
    k: Tensor,
    n: Tensor,
    tau: Tensor,
    cdf: CDF,
    stats: _Statistics,
    live: Tensor,
    guess: Tensor,
    bracket: _Bracket,
    reduce: Reduce,
) -> Threshold:
    """Safeguarded Newton from the guess. The iterate is hi + lo; all else is kept relative to hi."""
    inside = (guess >= bracket.low) & (guess <= bracket.high)
    hi = torch.where(inside, guess, 0.5 * bracket.low + 0.5 * bracket.high)
    hi, lo = torch.where(live, hi, 0.0), torch.zeros_like(hi)
    bounds = _Bracket(bracket.low - hi, bracket.high - hi)
    below, over = bounds.low - math.inf, bounds.high + math.inf  # evaluated: C > k, C < k there
    C_below, C_over = torch.full_like(hi, math.inf), torch.full_like(hi, -math.inf)  # C − k there
    misses = torch.full_like(hi, math.inf), torch.full_like(hi, math.inf)  # of the last two evaluations
    running, deep = live, torch.zeros_like(live)
    digits = DIGITS[tau.dtype]
    settled = digits.settled if cdf.full_support else digits.settled_compact
    nearest_above, nearest_below = torch.full_like(hi, math.inf), torch.full_like(hi, -math.inf)

    far = greatest(hi) / 4
    for _ in range(EVALUATIONS):
        if not some(running, reduce):
            break
        s, next_above, next_below = _evaluate(x, hi, lo, tau, cdf, reduce)
        m = s.m - stats.pinned
        excess = m - k
        # C − k = P − Q without cancellation: in a gap both are small
        P = s.tail_below + excess.clamp(min=0)
        Q = s.tail_above + (-excess).clamp(min=0)
        miss = P - Q
        bounds.tighten(*_order_bounds(s.next_above, m, k, n, tau, cdf))
        bounds.tighten(*_order_bounds(s.next_below, m + 1, k, n, tau, cdf))
        below, C_below = torch.where(miss > 0, lo, below), torch.where(miss > 0, miss, C_below)
        over, C_over = torch.where(miss < 0, lo, over), torch.where(miss < 0, miss, C_over)

        # The root often sits on an order bound (one undecided entry), so a step beyond goes there; a point
        # that was evaluated before cannot be the root, so a step to or beyond one is replaced by bisection.
        last = torch.where(miss < 0, below - lo, over - lo), torch.where(miss < 0, C_below, C_over)
        step = newton_step(s, lo, stats.low - hi, stats.high - hi, last, k, n, excess, P, Q, tau, cdf)
        trial = torch.minimum(torch.maximum(lo + step, bounds.low), bounds.high)
        middle = 0.5 * torch.maximum(below, bounds.low) + 0.5 * torch.minimum(over, bounds.high)
        # a miss that is back after two steps is a cycle
        stuck = ((miss.abs() - misses[0]).abs() < 0.1 * misses[0]) & ((over - below) < math.inf)
        misses = misses[1], miss.abs()
        trial = torch.where((trial > below) & (trial < over) & ~stuck, trial, middle)
        # Close to the root the sign of miss is rounding, and no bracket may overrule the last steps. But a
        # step too small for what is missing knows nothing, and then bisection is left.
        density = s.density_above + s.density_below
        noise = digits.sum * torch.minimum(k, n - k).clamp(min=1)
        known = miss.abs() <= 8 * density * step.abs() / tau + noise
        tiny = step.abs() <= digits.near * tau
        trial = torch.where(tiny, torch.where(known, lo + step, middle), trial)
        done = known & (step.abs() <= settled * tau)

        gap_middle = 0.5 * (s.next_above.clamp(max=far) + s.next_below.clamp(min=-far))
        if cdf.full_support:
            gap = (excess == 0) & ((s.tail_above < digits.tiny) | (s.tail_below < digits.tiny))
            trial = torch.where(gap, gap_middle, trial)
            deep = deep | (gap & running)
            done = done | gap
        else:  # no entry has f > 0: any t in [next_below, next_above − τ] will do, so the middle
            gap = (excess == 0) & (s.next_above - s.next_below >= tau)
            trial = torch.where(gap, gap_middle - 0.5 * tau, trial)
            done = done | gap

        new_lo = torch.where(running, trial, lo)
        new_hi, new_lo = two_sum(hi, new_lo)
        moved = new_hi - hi
        bounds = _Bracket(bounds.low - moved, bounds.high - moved)
        below, over = below - moved, over - moved
        nearest_above = torch.where(running, next_above, nearest_above)
        nearest_below = torch.where(running, next_below, nearest_below)
        hi, lo = new_hi, new_lo
        running = running & ~done

    if cdf.full_support:
        for _ in range(LOG_EVALUATIONS):
            if not some(deep, reduce):
                break
            up, down = nearest_above - hi, nearest_below - hi
            log_ratio, slope = _log_evaluate(x, hi, lo, tau, cdf, up, down, reduce)
            # where even the logarithms have lost their digits, the middle of the gap is the best guess
            step = tau * log_ratio / slope
            step = torch.where((lo + step > down) & (lo + step < up), step, 0.0)
            hi, lo = two_sum(hi, torch.where(deep, lo + step, lo))
            deep = deep & (step.abs() > settled * tau)
    return Threshold(hi, lo, nearest_above, nearest_below)
