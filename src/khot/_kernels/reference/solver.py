"""The solver: the threshold t of each row with soft count C(t) = Σ_j F((x_j − t)/τ) = k.

Plain torch, any device, batched over rows, in float64 (`precision.wide_dtype`) whatever the input is. A pass
reads each row once, one tile of columns at a time, and reduces it to a few sums per row; everything between
passes works on these sums. One solve takes these passes, in this order:

1. statistics: counts, extremes, mean and variance;
2. histograms, where the scores spread far wider than τ: the order statistics around rank k, to within a
   few τ, and so a bracket for t;
3. evaluations of C and C', each followed by a safeguarded Newton step;
4. in a gap so wide that both tails underflow, the same in logarithms.

If a row is spread over processes, `Row.reduce` turns the sums of each shard into those of the row; everything
else is the same on every process.

The threshold is a pair t = hi + lo with abs(lo) ≤ ulp(hi)/2: x − hi is exact for the entries near t, so that
((x − hi) − lo)/τ has full relative accuracy however large x/τ is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.precision import greatest, widen
from khot._core.rows import HERE, Row
from khot._kernels.reference.bracket import (
    Bracket,
    Statistics,
    first_guess,
    histogram_search,
    order_bounds,
    statistics,
)
from khot._kernels.reference.steps import DIGITS, Sums, newton_step
from khot._kernels.reference.tiles import some, standardize, tiles, two_sum
from khot.cdfs import CDF

__all__ = ["Threshold", "solve"]

# Width of the first bracket, in τ, above which a histogram saves more passes than it costs. Without tails
# (False), Newton's method fails for narrower brackets.
WIDE = {True: 64.0, False: 8.0}
EVALUATIONS = 24
# The largest τ, relative to the greatest number, for rows whose differences overflow: for smaller ones, they
# are infinite in τ, too.
STEEPEST = 1e-18
LOG_EVALUATIONS = 4


class Threshold(NamedTuple):
    """t = hi + lo for each row, and the entries next to t as of the last evaluation: the least entry with
    F > ½ and the greatest of the others, ±inf if there is none."""

    hi: Tensor
    lo: Tensor
    above: Tensor
    below: Tensor


def solve(x: Tensor, k: Tensor, tau: Tensor, cdf: CDF, row: Row = HERE) -> tuple[Threshold, int]:
    """The thresholds t with C(t) = k, of the batch shape, and the number of passes over the rows.

    Rows without an answer (a score is NaN, k is out of range, or tau is not positive) get NaN. Where no
    finite entry is selected, or all are, t = ±inf is written as hi = lo = ±`greatest`. Then (x − hi) − lo is
    ∓inf for finite x, and ±inf instead of NaN for x = ±inf.

    Args:
        x: scores, (*batch, n). −inf is never selected, +inf always.
        k, tau: of the batch shape.
        row: turns the sums of a shard into those of the row.
    """
    stats = statistics(x, row)
    passes = 1
    k_free = k - stats.pinned  # what is left for the finite entries
    none, every = k_free == 0, k_free == stats.free
    bad = stats.nan | ~((k_free >= 0) & (k_free <= stats.free)) | ~((tau > 0) & (tau < math.inf))
    bad = bad | ((tau > STEEPEST * greatest(tau)) & (stats.high - stats.low == math.inf))
    live = ~(none | every | bad)
    # rows that need no solving are computed with harmless numbers
    k_safe = torch.where(live, k_free, 0.5)
    free = torch.where(live, stats.free, 1.0)
    tau_safe = torch.where(live, tau, 1.0)

    guess, bracket = first_guess(stats, k_safe, free, tau_safe, cdf, live)
    wide = live & (bracket.high - bracket.low > WIDE[cdf.full_support] * tau_safe)
    if some(wide, row):
        guess, histograms = histogram_search(x, k_safe, free, tau_safe, cdf, stats, wide, guess, bracket, row)
        passes += histograms
    (hi, lo, *near), evaluations = _newton(
        _Problem(x, k_safe, free, tau_safe, cdf, stats, row), live, guess, bracket
    )

    infinite = torch.full_like(hi, -greatest(hi)).masked_fill(none, greatest(hi))
    hi, lo = hi.where(live, infinite), lo.where(live, infinite)
    t = Threshold(hi.masked_fill(bad, math.nan), lo.masked_fill(bad, math.nan), *near)
    return t, passes + evaluations


class _Problem(NamedTuple):
    """What stays the same from one step to the next."""

    x: Tensor
    k: Tensor
    n: Tensor  # number of finite entries
    tau: Tensor
    cdf: CDF
    stats: Statistics
    row: Row


def _evaluate(p: _Problem, hi: Tensor, lo: Tensor) -> tuple[Sums, Tensor, Tensor]:
    """The sums at t = hi + lo, and the entries next to t."""
    zero = torch.zeros_like(hi)
    m, A, B, fA, fB = zero, zero, zero, zero, zero
    up, down = zero + math.inf, zero - math.inf
    for _, tile in tiles(p.x):
        z = standardize(tile, hi, lo, p.tau)
        above = z > p.cdf.median
        weight = widen(above)
        tail, density = p.cdf.tail(z, above), p.cdf.pdf(z)
        tail_above, density_above = tail * weight, density * weight
        m = m + weight.sum(-1)
        A = A + tail_above.sum(-1)
        B = B + tail.sub_(tail_above).sum(-1)  # exact: one of the two is 0
        fA = fA + density_above.sum(-1)
        fB = fB + density.sub_(density_above).sum(-1)
        up = torch.minimum(up, tile.masked_fill(~above, math.inf).amin(-1))
        down = torch.maximum(down, tile.masked_fill(above, -math.inf).amax(-1))
    m, A, B, fA, fB, up, down = p.row.reduce([m, A, B, fA, fB], [-up, down])
    return Sums(m, A, B, fA, fB, -up - hi, down - hi), -up, down


def _log_evaluate(p: _Problem, hi: Tensor, lo: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """log B − log A and its slope in −t/τ, where the tails themselves may underflow.

    Every tail is divided by that of the nearest entry on its side, up or down.
    """
    cdf = p.cdf
    zero = torch.zeros_like(hi)
    A, B, fA, fB = zero, zero, zero, zero
    z_up, z_down = (up - lo) / p.tau, (down - lo) / p.tau
    log_up = cdf.log_tail(z_up, z_up > cdf.median).unsqueeze(-1)
    log_down = cdf.log_tail(z_down, z_down > cdf.median).unsqueeze(-1)
    for _, tile in tiles(p.x):
        z = standardize(tile, hi, lo, p.tau)
        above = z > cdf.median
        reference = torch.where(above, log_up, log_down)
        tail = torch.exp(cdf.log_tail(z, above) - reference)
        density = torch.exp(cdf.log_pdf(z) - reference)
        A = A + tail.where(above, 0).sum(-1)
        B = B + tail.where(~above, 0).sum(-1)
        fA = fA + density.where(above, 0).sum(-1)
        fB = fB + density.where(~above, 0).sum(-1)
    A, B, fA, fB = p.row.reduce([A, B, fA, fB])
    log_ratio = (log_down - log_up).squeeze(-1) + torch.log(B) - torch.log(A)
    return log_ratio, fA / A + fB / B


@dataclass
class _Iterate:
    """The state of the search. t = hi + lo; all other positions are relative to hi."""

    hi: Tensor
    lo: Tensor
    bounds: Bracket
    below: Tensor  # the greatest point evaluated with C > k
    over: Tensor  # the least point evaluated with C < k
    C_below: Tensor  # C − k there
    C_over: Tensor
    misses: tuple[Tensor, Tensor]  # |C − k| of the last two evaluations
    running: Tensor
    deep: Tensor  # rows in a gap so wide that both tails underflow
    above: Tensor  # the entry next above t, as of the last evaluation
    under: Tensor

    @classmethod
    def at(cls, guess: Tensor, bracket: Bracket, live: Tensor) -> _Iterate:
        inside = (guess >= bracket.low) & (guess <= bracket.high)
        hi = torch.where(inside, guess, 0.5 * bracket.low + 0.5 * bracket.high)
        hi, lo = torch.where(live, hi, 0.0), torch.zeros_like(hi)
        bounds = Bracket(bracket.low - hi, bracket.high - hi)
        infinite = torch.full_like(hi, math.inf)
        return cls(
            hi,
            lo,
            bounds,
            below=bounds.low - math.inf,
            over=bounds.high + math.inf,
            C_below=infinite,
            C_over=-infinite,
            misses=(infinite, infinite),
            running=live,
            deep=torch.zeros_like(live),
            above=infinite,
            under=-infinite,
        )

    def move(self, trial: Tensor, done: Tensor, next_above: Tensor, next_below: Tensor) -> None:
        """Move to hi + trial in the rows that are running."""
        new_hi, self.lo = two_sum(self.hi, torch.where(self.running, trial, self.lo))
        moved = new_hi - self.hi
        self.bounds = Bracket(self.bounds.low - moved, self.bounds.high - moved)
        self.below, self.over = self.below - moved, self.over - moved
        self.above = torch.where(self.running, next_above, self.above)
        self.under = torch.where(self.running, next_below, self.under)
        self.hi = new_hi
        self.running = self.running & ~done


def _newton(p: _Problem, live: Tensor, guess: Tensor, bracket: Bracket) -> tuple[Threshold, int]:
    """The result of safeguarded Newton from the guess, and the number of evaluations."""
    at = _Iterate.at(guess, bracket, live)
    digits = DIGITS[p.tau.dtype]
    settled = digits.settled if p.cdf.smooth else digits.settled_compact
    passes = 0
    while passes < EVALUATIONS and some(at.running, p.row):
        passes += 1
        s, next_above, next_below = _evaluate(p, at.hi, at.lo)
        trial, done = _trial(p, at, s, settled)
        at.move(trial, done, next_above, next_below)

    hi, lo, logs = _log_newton(p, at, settled)
    return Threshold(hi, lo, at.above, at.under), passes + logs


def _log_newton(p: _Problem, at: _Iterate, settled: float) -> tuple[Tensor, Tensor, int]:
    """Newton on log A = log B in the rows deep in a gap: t = hi + lo, and the number of evaluations."""
    hi, lo, deep, passes = at.hi, at.lo, at.deep, 0
    low, high = at.under - hi, at.above - hi
    # the tails of the built-in CDFs have logarithms that are nearly straight lines or parabolas
    limit = LOG_EVALUATIONS if p.cdf.built_in else EVALUATIONS
    while p.cdf.full_support and passes < limit and some(deep, p.row):
        passes += 1
        log_ratio, slope = _log_evaluate(p, hi, lo, at.above - hi, at.under - hi)
        step = p.tau * log_ratio / slope
        if p.cdf.built_in:
            # a step out of the gap means that even the logarithms are inaccurate: t stays in the middle of
            # the gap
            step = torch.where((lo + step > at.under - hi) & (lo + step < at.above - hi), step, 0.0)
        else:
            low, high = torch.where(log_ratio > 0, lo, low), torch.where(log_ratio < 0, lo, high)
            inside = (lo + step > low) & (lo + step < high)
            step = torch.where(inside | (log_ratio == 0), step, 0.5 * (low + high) - lo)
        new_hi, new_lo = two_sum(hi, torch.where(deep, lo + step, lo))
        low, high = low - (new_hi - hi), high - (new_hi - hi)
        hi, lo = new_hi, new_lo
        deep = deep & (step.abs() > settled * p.tau)
    return hi, lo, passes


def _trial(p: _Problem, at: _Iterate, s: Sums, settled: float) -> tuple[Tensor, Tensor]:
    """The next point to evaluate, relative to hi, and whether it is the last one, from the sums at this
    point."""
    k, n, tau, lo, bounds = p.k, p.n, p.tau, at.lo, at.bounds
    m = s.m - p.stats.pinned
    excess = m - k
    # C − k = P − Q without cancellation: in a gap both are small
    P = s.tail_below + excess.clamp(min=0)
    Q = s.tail_above + (-excess).clamp(min=0)
    miss = P - Q
    bounds.tighten(*order_bounds(s.next_above, m, k, n, tau, p.cdf))
    bounds.tighten(*order_bounds(s.next_below, m + 1, k, n, tau, p.cdf))
    at.below, at.C_below = torch.where(miss > 0, lo, at.below), torch.where(miss > 0, miss, at.C_below)
    at.over, at.C_over = torch.where(miss < 0, lo, at.over), torch.where(miss < 0, miss, at.C_over)

    # The root is often on an order bound (with one undecided entry), so a step beyond a bound is cut to it. A
    # point that was evaluated before cannot be the root, so a step to it or beyond is replaced by bisection.
    opposite = (
        torch.where(miss < 0, at.below - lo, at.over - lo),
        torch.where(miss < 0, at.C_below, at.C_over),
    )
    low, high = p.stats.low - at.hi, p.stats.high - at.hi
    step = newton_step(s, lo, low, high, opposite, k, n, excess, P, Q, tau, p.cdf)
    trial = torch.minimum(torch.maximum(lo + step, bounds.low), bounds.high)
    middle = 0.5 * torch.maximum(at.below, bounds.low) + 0.5 * torch.minimum(at.over, bounds.high)
    # if the miss is the same as two steps ago, the iteration cycles
    before = at.misses[0]
    stuck = ((miss.abs() - before).abs() < 0.1 * before) & ((at.over - at.below) < math.inf)
    at.misses = at.misses[1], miss.abs()
    trial = torch.where((trial > at.below) & (trial < at.over) & ~stuck, trial, middle)
    # Close to the root the sign of miss is only rounding, so brackets must not change the last steps. But if
    # a step is too small to explain the miss, the step is wrong, and bisection takes over.
    digits = DIGITS[tau.dtype]
    density = s.density_above + s.density_below
    noise = digits.sum * torch.minimum(k, n - k).clamp(min=1)
    known = miss.abs() <= 8 * density * step.abs() / tau + noise
    tiny = step.abs() <= digits.near * tau
    trial = torch.where(tiny, torch.where(known, lo + step, middle), trial)
    done = known & (step.abs() <= settled * tau)
    if not p.cdf.full_support:  # log y needs the digits of z − start, which is small where k is
        distance = s.next_below - (lo + step) - p.cdf.support[0] * tau
        done = done & ~((k < 1e-6) & (distance > 0) & (step.abs() > settled * distance))

    far = greatest(lo) / 4
    gap_middle = 0.5 * (s.next_above.clamp(max=far) + s.next_below.clamp(min=-far))
    if p.cdf.full_support:
        gap = (excess == 0) & ((s.tail_above < digits.tiny) | (s.tail_below < digits.tiny))
        trial = torch.where(gap, gap_middle, trial)
        at.deep = at.deep | (gap & at.running)
    else:  # if no entry has f > 0, all of [next_below − τ·start, next_above − τ·end] are roots: the middle
        start, end = p.cdf.support
        gap = (excess == 0) & (s.next_above - s.next_below >= (end - start) * tau)
        trial = torch.where(gap, gap_middle - 0.5 * (start + end) * tau, trial)
    return trial, done | gap
