"""The root: the threshold t of each row with Σ_i w_i F((x_i − t a_i)/τ) = B, where a is 1 or w.

It serves the soft top-k, whose entries cost 1 each, and the soft budget. Plain torch, any device, batched
over rows, in float64 (`precision.wide_dtype`). A pass reads each row once, in tiles; only sums and maxima
over the row leave a pass, so that rows may be spread over processes. There are four kinds of passes:

1. The first one brackets the root.
2. Where the scores spread far beyond τ, entries are counted, to find the one at which B is spent.
3. Newton's method evaluates one point a pass. It finds the root of ordinary rows and is left as soon as it
   converges too slowly.
4. The search evaluates many points in a pass, which rules propose from both ends of the bracket.

A point is taken only if it lies inside the bracket, so that a rule may fail but never mislead. Points spread
over the bracket take its place, for Newton's method the middle, and the middle is tried besides.

The threshold is a pair t = hi + lo, and x − hi·a is computed with one rounding, so that z has full accuracy
for the entries near t however large x/τ is. By value this ends where z needs more digits than the pair
has: t·w has 32 of them, and x/w is not a number of few digits in general. From τ = 1e-20·abs(x) on, what is
spent is no longer exact; below 1e-32·abs(x) it may be off by the cost of one entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from khot._core.precision import greatest
from khot._kernels.reference import narrow
from khot._kernels.reference.narrow import Window, narrow_pass, window_of
from khot._kernels.reference.newton import Walk, walk_pass
from khot._kernels.reference.sample import LANES, guess_from, padded, sampled
from khot._kernels.reference.search import Point, State, search_pass
from khot._kernels.reference.survey import Problem, Scales, Survey, per, quantile_of, scales_of
from khot._kernels.reference.tiles import some
from khot.cdfs import Normal

__all__ = ["root"]

# Passes of Newton's method, with and without tails; a pass of the search costs twenty times as much, but
# without tails it often has to have the last word.
SINGLE = {True: 7, False: 3}
PASSES = 24  # of the search; of all kinds together ten are enough for all rows known but one, which takes 11
# The standard deviation of the scores, in τ, above which moments say little about the root, and entries are
# counted.
SPREAD = 8.0

_Stage = TypeVar("_Stage", State, Walk, Window)


def root(p: Problem, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """t = hi + lo where ``live``, and the number of passes over each row; all of the batch shape.

    Other rows may hold anything but have to have a positive budget, less than their costs.
    """
    batch, rows, n = p.tau.shape, p.tau.numel(), p.x.shape[-1]
    flat = [v.reshape(-1) for v in (*p.survey, p.budget, p.tau, live)]
    survey, (budget, tau, live) = Survey(*flat[:-3]), flat[-3:]
    cost = None if p.cost is None else p.cost.reshape(rows, n)
    p = Problem(p.x.reshape(rows, n), cost, survey, budget, tau, *p[5:])
    scales = scales_of(p)
    low, high, guess, wide = _start(p, scales)
    passes = torch.ones_like(low)
    nowhere = torch.zeros_like(live)
    sample = None
    running = live & (wide > SPREAD)
    if some(running, p.row):
        sample = sampled(p, scales)
        guess = torch.where(running, guess_from(p, scales, sample, guess, low, high), guess)
        window, running = window_of(p, sample, guess, low, high), running & (p.survey.entries > LANES)
        if p.cost is not None and not p.cdf.full_support:  # then the search takes too many passes besides
            running = nowhere
        for _ in range(narrow.PASSES):
            if not some(running, p.row):
                break
            passes = passes + running
            window, running = _on_some(narrow_pass, p, scales, window, running)
        guess = torch.maximum(torch.minimum(window.guess, high), low)

    zero, infinite = torch.zeros_like(low), torch.full_like(low, math.inf)
    walk = Walk(guess, zero, low, zero, scales.rest, high, zero, -p.budget, infinite, zero, nowhere)
    running = live
    for _ in range(SINGLE[p.cdf.full_support]):
        if not some(running, p.row):
            break
        passes = passes + running
        walk, running = _on_some(walk_pass, p, scales, walk, running)
    running = live & ~walk.found
    if not some(running, p.row):
        return walk.hi.view(batch), walk.lo.view(batch), passes.view(batch)

    unknown = torch.full_like(low, math.nan)
    no_steps = low.new_full((*low.shape, 4 if p.cdf.full_support else 6), math.nan)
    left, right = (
        Point(*end, sign, sign * math.inf, unknown, unknown, unknown, unknown, no_steps)
        for end, sign in ((walk[2:5], zero + 1), (walk[5:8], zero - 1))
    )
    sample = padded(sampled(p, scales) if sample is None else sample)
    known = torch.where(walk.found, -infinite, infinite)
    state = State(left, right, sample, running, walk.hi, walk.lo, known)
    # a user's F may have tails whose logarithms are far from lines and parabolas
    for _ in range(PASSES if p.cdf.built_in else 3 * PASSES):
        if not some(running, p.row):
            break
        passes = passes + running
        state, running = _on_some(search_pass, p, scales, state, running)
    # without a point from which the root is known, the bracket has it: where tails underflow, the best point
    # need not be near
    known = state.best < 0
    hi, lo = (
        torch.where(known, state.best_hi, state.left.hi),
        torch.where(known, state.best_lo, state.left.lo),
    )
    return hi.view(batch), lo.view(batch), passes.view(batch)


def _on_some(
    step: Callable[..., tuple[_Stage, Tensor]], p: Problem, scales: Scales, state: _Stage, running: Tensor
) -> tuple[_Stage, Tensor]:
    """One pass over the rows that are running."""
    if not p.x.is_cpu or 2 * int(running.sum()) > len(running):
        return step(p, scales, state, running)
    rows = running.nonzero().squeeze(-1)
    part = _rows(p, rows), _rows(scales, rows), _rows(state, rows)
    moved, still = step(*part, running[rows])
    return _put(state, rows, moved), running.index_put((rows,), still)


def _rows(value: Any, rows: Tensor) -> Any:
    """These rows of all tensors in it."""
    if isinstance(value, Tensor):
        return value[rows]
    if not isinstance(value, tuple):
        return value
    parts = [_rows(v, rows) for v in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _put(value: Any, rows: Tensor, part: Any) -> Any:
    """The value with these rows replaced."""
    if isinstance(value, Tensor):
        return value.index_put((rows,), part)
    return type(value)(*(_put(old, rows, new) for old, new in zip(value, part, strict=True)))


def _start(p: Problem, scales: Scales) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bounds of the root, a guess, and the standard deviation of the scores in units of the noise.

    The guess is the threshold of a distribution with the moments of the scores and of the noise of law τF.
    Its quantiles are those of F where the noise dominates, and those of the normal distribution where the
    scores dominate.
    """
    total, quantile, far = p.survey.total, scales.quantile, greatest(p.tau) / 4
    low, high, mean, square, cheapest = p.survey[4:]
    ones = p.survey.entries if p.by_value else total
    ends = quantile / cheapest, per(quantile, p.survey.dearest if p.by_value else None)
    low, high = low.clamp(-far, far), high.clamp(-far, far)
    size = torch.maximum(low.abs(), high.abs()) + (quantile.abs() + 2 * p.tau) / cheapest
    pad = size * (18 * torch.finfo(size.dtype).eps)  # more than the rounding error of a level
    low, high = low - torch.maximum(*ends) - pad, high - torch.minimum(*ends) + pad
    low, high = low.clamp(-far, far), high.clamp(-far, far)
    mean, ones = mean / total, ones / total
    variance = (square / total - mean * mean).clamp(min=0)
    noise = per(p.tau.square() * p.cdf.variance * ones, p.survey.dearest if p.by_value else None)
    own = (quantile / p.tau - p.cdf.mean) / math.sqrt(p.cdf.variance)
    unit = torch.lerp(quantile_of(Normal(), p.budget, scales.rest), own, noise / (noise + variance))
    guess = mean - p.tau * p.cdf.mean * ones - unit * torch.sqrt(variance + noise)
    guess = torch.maximum(torch.minimum(guess.nan_to_num(0, 0, 0), high), low)
    return low, high, guess, torch.sqrt(variance / noise).nan_to_num(math.inf)
