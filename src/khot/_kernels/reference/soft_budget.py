"""The reference kernels of the soft budget, forward and backward: Σ_i w_i F((x_i − t a_i)/τ) = B.

Here a_i = 1 if the selection is by score, and a_i = w_i if it is by value. The spend Σ w y falls with t, so
that the root is bracketed and then found by Newton's method on log P = log Q, where P − Q = Σ w y − B is
formed without cancellation: P has the shares of rejected entries and Q what selected entries lack. Rows are
read in tiles, and only sums over a row leave a pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot import cdfs
from khot._core import rows
from khot._core.precision import greatest, large, on, widen
from khot._core.rows import Row
from khot._kernels.reference.steps import DIGITS
from khot._kernels.reference.tiles import some, tiles, two_sum
from khot.cdfs import CDF

__all__ = ["CLOSE", "SLACK", "soft_budget", "soft_budget_backward", "unbound", "vjp", "weigh"]

EVALUATIONS = 96
LOG_EVALUATIONS = 8
# A miss, relative to what can be missed, from which on every step improves it, or rounding prevents that.
CLOSE = 1e-9
# A budget so near to the sum of the costs, in units of the rounding of the costs' dtype, is that sum: a user
# adds the costs in their own dtype and order.
SLACK = 4.0


class _Problem(NamedTuple):
    x: Tensor  # (*batch, n); −inf where an entry does not take part
    cost: Tensor
    budget: Tensor  # what is left of it for the finite entries
    total: Tensor  # the sum of their costs
    tau: Tensor
    cdf: CDF
    by_value: bool
    row: Row


class _Sums(NamedTuple):
    """The sums over a row at a threshold t, and the levels of the entries next to it."""

    spent: Tensor  # Σ w over the entries above: z > median
    lacking: Tensor  # Σ_above w (1 − F)
    excess: Tensor  # Σ_below w F
    slope_above: Tensor  # Σ_above w a f
    slope_below: Tensor
    up: Tensor  # the least level of an entry above
    down: Tensor  # the greatest level of an entry below


def soft_budget(
    x: Tensor,
    cost: Tensor,
    budget: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    by: str,
    at_most: bool,
    group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The shares y, and t = hi + lo, of the batch shape.

    Rows without an answer (a score is NaN; a cost is negative, infinite or NaN; the budget is negative or
    more than all costs; τ is not positive) are NaN. Where no finite entry is paid for, or all are, t = ±inf
    is written as hi = lo = ±`greatest`. With ``at_most``, t = 0 where F(x/τ) spends no more than the budget.

    Args:
        x: scores, (*batch, n). −inf is never selected and costs nothing, +inf is selected and paid for.
        cost: broadcasts with x.
        budget, tau: broadcast with batch.
        by: "score" or "value".
        at_most: whether the budget may be left unspent.
        group: the names of the process groups that the rows are spread over; "" for whole rows.
    """
    F, row, by_value, batch = cdfs.resolve(cdf, shape), rows.of(group), by == "value", x.shape[:-1]
    cost = cost.expand(x.shape)
    budget, tau = (widen(on(x.device, number)).expand(batch) for number in (budget, tau))
    zero = torch.zeros_like(budget)
    free, pinned, bad = zero, zero, zero
    for part, tile in tiles(x):
        w = widen(cost[..., part])
        there = tile != -math.inf
        bad = bad + (tile.isnan() | (there & ~((w >= 0) & (w < math.inf)))).sum(-1)
        free = free + w.where(tile.isfinite(), 0).sum(-1)
        pinned = pinned + w.where(tile == math.inf, 0).sum(-1)
    free, pinned, bad = row.reduce([free, pinned, bad])
    slack = SLACK * torch.finfo(cost.dtype).eps * (free + pinned)
    left = budget - pinned
    wrong = (bad > 0) | ~((tau > 0) & (tau < math.inf)) | ~(left >= -slack)
    if not at_most:
        wrong = wrong | ~(left <= free + slack)
    left = left.clamp(min=0)
    # what is left of the costs to rounding is not a share that could be spent
    rounded = 16 * torch.finfo(free.dtype).eps * free
    every, none = (left >= free - rounded) & ~wrong, (left == 0) & (free > 0) & ~wrong
    tau_safe = torch.where(wrong, 1.0, tau)
    p = _Problem(x, cost, torch.where(wrong, 0.5, left), free, tau_safe, F, by_value, row)
    loose = torch.zeros_like(every)
    if at_most:
        at_zero = _evaluate(p, zero, zero)
        loose = ((at_zero.spent - at_zero.lacking + at_zero.excess) <= p.budget) & ~wrong
        every, none = every & ~loose, none & ~loose
    live = ~(every | none | wrong | loose)
    p = p._replace(budget=torch.where(live, p.budget, 0.5), total=torch.where(live, free, 1.0))
    hi, lo = _solve(p, live, at_most)
    infinite = torch.full_like(hi, -greatest(hi)).masked_fill(none, greatest(hi)).masked_fill(loose, 0)
    infinite = infinite.masked_fill(wrong, math.nan)
    hi, lo = hi.where(live, infinite), lo.where(live, infinite)

    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, tile in tiles(x):
        y[..., part] = F.cdf(_position(tile, widen(cost[..., part]), hi, lo, tau, by_value))
    return y.masked_fill_(wrong.unsqueeze(-1), math.nan), hi, lo


def unbound(hi: Tensor, lo: Tensor, at_most: bool) -> Tensor:
    """The rows whose budget does not bind, of which t does not depend on anything."""
    fixed = hi.abs() == greatest(hi)
    return fixed | ((hi == 0) & (lo == 0)) if at_most else fixed


def _position(x: Tensor, w: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, by_value: bool) -> Tensor:
    """z = (x − t a)/τ for a tile."""
    hi, lo, tau = hi.unsqueeze(-1), lo.unsqueeze(-1), tau.unsqueeze(-1)
    if not by_value:
        return ((x - hi) - lo) / tau
    infinite = hi.abs() == greatest(hi)
    hi_safe, lo_safe = hi.masked_fill(infinite, 0), lo.masked_fill(infinite, 0)
    z = ((x - hi_safe * w) - lo_safe * w) / tau
    return torch.where(infinite & (w > 0) & x.isfinite(), -torch.sign(hi) * math.inf, z)


def _evaluate(p: _Problem, hi: Tensor, lo: Tensor) -> _Sums:
    zero = torch.zeros_like(hi)
    spent, lacking, excess, slope_above, slope_below = zero, zero, zero, zero, zero
    up, down = zero + math.inf, zero - math.inf
    start, end = (p.cdf.median, p.cdf.median) if p.cdf.full_support else p.cdf.support
    tau = p.tau.unsqueeze(-1)
    for part, tile in tiles(p.x):
        w = widen(p.cost[..., part]).where(tile.isfinite(), 0)
        a = w if p.by_value else torch.ones_like(w)
        z = _position(tile, w, hi, lo, p.tau, p.by_value)
        above, counts = z > p.cdf.median, w > 0
        tail = p.cdf.tail(z, above).where(counts, 0) * w
        slope = (p.cdf.pdf(z) * a).where(counts, 0) * w
        spent = spent + w.where(above, 0).sum(-1)
        lacking = lacking + tail.where(above, 0).sum(-1)
        excess = excess + tail.where(~above, 0).sum(-1)
        slope_above = slope_above + slope.where(above, 0).sum(-1)
        slope_below = slope_below + slope.where(~above, 0).sum(-1)
        a = a.where(counts, 1)
        up = torch.minimum(up, ((tile - end * tau) / a).where(above & counts, math.inf).amin(-1))
        down = torch.maximum(down, ((tile - start * tau) / a).where(~above & counts, -math.inf).amax(-1))
    sums = [spent, lacking, excess, slope_above, slope_below]
    *sums, up, down = p.row.reduce(sums, [-up, down])
    spent, lacking, excess, slope_above, slope_below = sums
    return _Sums(spent, lacking, excess, slope_above, slope_below, -up, down)


def _bracket(p: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The least and the greatest threshold at which one of the entries alone would have the share B/W, and
    between which t lies; and a guess."""
    digits = DIGITS[p.tau.dtype]
    share = (p.budget / p.total).clamp(digits.tiny, digits.below_one)
    quantile = (p.tau * p.cdf.icdf(share)).unsqueeze(-1)
    zero = torch.zeros_like(p.tau)
    low, high, mean, square = zero + math.inf, zero - math.inf, zero, zero
    for part, tile in tiles(p.x):
        w = widen(p.cost[..., part]).where(tile.isfinite(), 0)
        a = w if p.by_value else torch.ones_like(w)
        level = (tile - quantile) / a.where(w > 0, 1)
        low = torch.minimum(low, level.where(w > 0, math.inf).amin(-1))
        high = torch.maximum(high, level.where(w > 0, -math.inf).amax(-1))
        weight = w / p.total.unsqueeze(-1)
        score = tile.where(w > 0, 0) / (1 if not p.by_value else a.where(w > 0, 1))
        mean, square = mean + (weight * score).sum(-1), square + (weight * score * score).sum(-1)
    mean, square, low, high = p.row.reduce([mean, square], [-low, high])
    low = -low
    # with room for rounding
    pad = digits.quantile * p.tau * (0 if p.by_value else 1) + digits.value * torch.maximum(
        low.abs(), high.abs()
    )
    low, high = low - pad, high + pad
    spread = torch.sqrt((square - mean * mean).clamp(min=0))
    noise = 0 if p.by_value else p.tau * math.sqrt(p.cdf.variance)
    unit = (p.cdf.icdf(share) - p.cdf.mean) / math.sqrt(p.cdf.variance)
    guess = mean - (0 if p.by_value else p.tau * p.cdf.mean) - unit * torch.sqrt(spread**2 + noise**2)
    return low, high, guess


def _solve(p: _Problem, live: Tensor, at_most: bool) -> tuple[Tensor, Tensor]:
    """t = hi + lo by bracketed Newton; the best of the points that were evaluated."""
    low, high, guess = _bracket(p)
    if at_most:
        low = low.clamp(min=0)
    low, high = low.where(live, 0), high.where(live, 1)
    hi = guess.where((guess > low) & (guess < high), 0.5 * low + 0.5 * high).where(live, 0)
    lo = torch.zeros_like(hi)
    best_hi, best_lo, best = hi, lo, torch.full_like(hi, math.inf)
    idle = torch.zeros_like(hi)
    span = torch.full_like(hi, math.inf)  # the bracket two evaluations ago
    running, deep, tried = live, torch.zeros_like(live), torch.zeros_like(live)
    scale = torch.minimum(p.budget, p.total - p.budget).clamp(min=DIGITS[hi.dtype].sum * p.budget)
    eps, tiny = torch.finfo(hi.dtype).eps, DIGITS[hi.dtype].tiny
    count = 0
    while count < EVALUATIONS and some(running, p.row):
        count += 1
        s = _evaluate(p, hi, lo)
        over = s.spent - p.budget
        over = over.masked_fill(over.abs() <= 8 * eps * torch.maximum(s.spent, p.budget), 0)
        P, Q = s.excess + over.clamp(min=0), s.lacking + (-over).clamp(min=0)
        miss = P - Q
        better = running & (miss.abs() < best)
        close = miss.abs() <= CLOSE * scale
        t = hi + lo
        low = torch.maximum(low, t).where(miss > 0, low)
        high = torch.minimum(high, t).where(miss < 0, high)
        middle = _middle(low, high)
        spent_bracket = (middle <= low) | (middle >= high)  # its ends are rounded, and hi + lo is not
        idle = idle + ((close | spent_bracket) & (miss.abs() >= 0.5 * best))
        settled = (miss == 0) | (idle >= 4) | ((idle >= 1) & (best <= 64 * eps * scale))
        best_hi, best_lo = hi.where(better, best_hi), lo.where(better, best_lo)
        best = miss.abs().where(better, best)

        step = p.tau * miss / (s.slope_above + s.slope_below)
        logs = p.tau * (torch.log(P) - torch.log(Q)) / (s.slope_below / P + s.slope_above / Q)
        step = logs.where(logs.isfinite(), step)
        room = (close | spent_bracket) * 8 * eps * torch.maximum(low.abs(), high.abs())
        inside = (t + step > low - room) & (t + step < high + room)
        # a bracket that has not become half as wide in three evaluations is bisected
        slow = (high - low > 0.5 * span) & (count % 3 == 0) & ~close
        span = high - low if count % 3 == 0 else span
        accept = step.isfinite() & inside & ~slow
        new_hi, new_lo = two_sum(hi, torch.where(accept, lo + step, middle - hi))
        # another hi would round the products with the costs in another way
        kept = (close | spent_bracket) & accept
        new_hi, new_lo = hi.where(kept, new_hi), (lo + step).where(kept, new_lo)

        gap = running & (over == 0)
        if p.cdf.full_support:  # the middle is near the root, at which both tails may underflow
            gap = gap & ((s.lacking < tiny) | (s.excess < tiny))
            gone = gap & ((torch.maximum(s.lacking, s.excess) < math.sqrt(tiny)) | tried)
        else:
            gone = gap = gap & (s.lacking == 0) & (s.excess == 0)
        far = greatest(hi) / 4
        between = 0.5 * s.up.clamp(max=far) + 0.5 * s.down.clamp(min=-far)
        new_hi, new_lo = between.where(gap, new_hi), new_lo.masked_fill(gap, 0)
        tried = tried | gap
        best_hi, best_lo = between.where(gone, best_hi), best_lo.masked_fill(gone, 0)
        deep = deep | gone
        running = running & ~(gone | (settled & ~gap))
        hi, lo = new_hi.where(running, hi), new_lo.where(running, lo)
    if p.cdf.full_support and some(deep, p.row):
        best_lo = _deep(p, best_hi, best_lo, deep)
    return best_hi, best_lo


def _middle(low: Tensor, high: Tensor) -> Tensor:
    """A point between the two: the middle, or the middle of their bits where one is far larger than the
    other."""
    integer = torch.int64 if low.dtype == torch.float64 else torch.int32

    def key(v: Tensor) -> Tensor:
        bits = v.abs().view(integer)
        return bits.where(v >= 0, -bits)

    bits = (key(low) & key(high)) + ((key(low) ^ key(high)) >> 1)
    by_bits = bits.abs().view(low.dtype) * torch.sign(bits)
    far = (low.sign() * high.sign() < 0) | (low.abs() > 4 * high.abs()) | (high.abs() > 4 * low.abs())
    return by_bits.where(far & by_bits.isfinite(), 0.5 * low + 0.5 * high)


def _deep(p: _Problem, hi: Tensor, lo: Tensor, deep: Tensor) -> Tensor:
    """lo after Newton on log P = log Q, in gaps so wide that tails underflow."""
    for _ in range(LOG_EVALUATIONS):
        tops = [torch.full_like(hi, -greatest(hi)) for _ in range(4)]
        totals = [torch.zeros_like(hi) for _ in range(4)]
        for phase in range(2):
            for part, tile in tiles(p.x):
                w = widen(p.cost[..., part]).where(tile.isfinite(), 0)
                z = _position(tile, w, hi, lo, p.tau, p.by_value)
                above = z > p.cdf.median
                log_w = torch.log(w)
                tail = log_w + p.cdf.log_tail(z, above)
                slope = log_w + p.cdf.log_pdf(z) + (log_w if p.by_value else 0)
                for i, (value, side) in enumerate(
                    [(tail, above), (tail, ~above), (slope, above), (slope, ~above)]
                ):
                    value = value.where(side & (w > 0), -math.inf)
                    if phase == 0:
                        tops[i] = torch.maximum(tops[i], value.amax(-1))
                    else:
                        totals[i] = totals[i] + torch.exp(value - tops[i].unsqueeze(-1)).sum(-1)
            if phase == 0:
                tops = p.row.reduce([], tops)
        totals = p.row.reduce(totals)
        above, below, slope_above, slope_below = (
            top + torch.log(total) for top, total in zip(tops, totals, strict=True)
        )
        rate = torch.exp(slope_above - above) + torch.exp(slope_below - below)
        step = (p.tau * (below - above) / rate).nan_to_num(0.0, 0.0, 0.0)
        lo = torch.where(deep, lo + step, lo)  # hi stays: see _solve
        deep = deep & (step.abs() > 1e-12 * p.tau)
        if not some(deep, p.row):
            break
    return lo


# ------------------------------------------------------------------------------------ derivatives


class Weighed(NamedTuple):
    """What both modes of the derivative need, as differentiable functions of x, w, lo and τ."""

    z: Tensor
    a: Tensor
    w: Tensor
    rate: Tensor  # f
    share: Tensor  # F
    weight: Tensor  # f, divided by a scale
    log_scale: Tensor  # of the batch shape
    fixed: Tensor  # the rows in which t does not depend on anything
    edges: tuple[Tensor, Tensor]  # of compact support: the entries next to a gap


def weigh(
    x: Tensor,
    cost: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: CDF,
    by_value: bool,
    at_most: bool,
    row: Row,
) -> Weighed:
    """Densities relative to a scale near their maximum, so that ratios are right even where every f
    underflows."""
    fixed = unbound(hi, lo, at_most)
    infinite = (hi.abs() == greatest(hi)).unsqueeze(-1)
    w = cost.to(hi.dtype)
    w = w.masked_fill(x == -math.inf, 0)
    a = w if by_value else torch.ones_like(w)
    tau = tau.to(hi.dtype).unsqueeze(-1)
    hi_safe, lo_safe = (v.unsqueeze(-1).masked_fill(infinite, 0) for v in (hi, lo))
    held = infinite & (a > 0)  # entries that an infinite t decides
    decided = x.isinf() | held
    wide = x.to(hi.dtype).masked_fill(decided, 0)
    z = (((wide - hi_safe * a) - lo_safe * a) / tau).masked_fill(decided, 0)
    chosen = (x == math.inf) | (held & (hi.unsqueeze(-1) < 0) & (x != -math.inf))
    share = torch.where(decided, chosen.to(z.dtype), cdf.cdf(z))
    log_f = cdf.log_pdf(z).masked_fill(decided, -math.inf)
    still = log_f == -math.inf
    counts = (w.detach() > 0) & ~still
    scale = log_f.detach().masked_fill(~counts, -math.inf).amax(-1) if x.shape[-1] else torch.zeros_like(hi)
    (scale,) = row.reduce([], [scale])
    scale = scale.clamp(min=-large(hi))
    weight = torch.exp((log_f - scale.unsqueeze(-1)).masked_fill(still, 0).clamp(max=math.log(large(hi))))
    weight = weight.masked_fill(still, 0)
    rate = torch.exp(log_f.masked_fill(still, 0)).masked_fill(still, 0)
    edges = (torch.zeros_like(still), torch.zeros_like(still))
    if not cdf.full_support:
        start, end = cdf.support
        level_up = ((wide - end * tau) / a.masked_fill(a == 0, 1)).detach()
        level_down = ((wide - start * tau) / a.masked_fill(a == 0, 1)).detach()
        payable = (w.detach() > 0) & ~decided
        above = payable & (z.detach() > cdf.median)
        below = payable & ~(z.detach() > cdf.median)
        if x.shape[-1]:
            up = level_up.masked_fill(~above, math.inf).amin(-1)
            down = level_down.masked_fill(~below, -math.inf).amax(-1)
        else:
            up, down = torch.full_like(hi, math.inf), torch.full_like(hi, -math.inf)
        minus_up, down = row.reduce([], [-up, down])
        edges = above & (level_up == -minus_up.unsqueeze(-1)), below & (level_down == down.unsqueeze(-1))
    return Weighed(z, a, w, rate, share, weight, scale, fixed, edges)


def vjp(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    cost: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: CDF,
    by: str,
    at_most: bool,
    row: Row,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients in x, w, B and τ (the last two of the batch shape), in operations that autograd records.

    With u = grad·f, D = Σ w a f and T = grad_lo − Σ u a/τ, which is the gradient in t:

        dL/dx = u/τ + T w f/D           dL/dB = −T τ/D
        dL/dτ = −Σ u z/τ − T Σ w f z/D  dL/dw = T τ y/D, and − t dL/dx if t is multiplied by w

    In a gap of compact support, dL/dB is the limit of smooth CDFs: half of either side's Σ a grad/Σ w a over
    the entries next to the gap.
    """
    by_value = by == "value"
    tau = on(hi.device, tau).to(hi.dtype).expand(hi.shape)
    lo_shared, tau_shared = row.share([lo, tau])
    d = weigh(x, cost, hi, lo_shared, tau_shared, cdf, by_value, at_most, row)
    v = grad.to(hi.dtype)
    u = v * d.rate
    pay = d.w * d.a
    parts = [pay * d.weight, d.a * v * d.weight, u * d.a, u * d.z, d.w * d.weight * d.z]
    for edge in d.edges:
        parts += [pay.where(edge, 0), (d.a * v).where(edge, 0)]
    mass, mean, pull, u_moment, moment, *ends = row.total([part.sum(-1) for part in parts])
    dead = (mass == 0) | d.fixed
    mass = mass.masked_fill(dead, 1)
    through_t = (grad_lo - pull / tau).masked_fill(d.fixed, 0)
    (spread,) = row.share([(through_t / mass).masked_fill(dead, 0)])
    dx = u / tau_shared.unsqueeze(-1) + spread.unsqueeze(-1) * d.w * d.weight
    dtau = -u_moment / tau - through_t * (moment / mass).masked_fill(dead, 0)
    # −T τ/D: its second part is a ratio of densities, which may all underflow
    idle = (grad_lo == 0) | dead
    lean = torch.exp(torch.log(tau) - (torch.log(mass) + d.log_scale).masked_fill(idle, 0)).masked_fill(
        idle, 0
    )
    dbudget = (mean / mass).masked_fill(dead, 0) - (grad_lo * lean).masked_fill(idle, 0)
    if not cdf.full_support:
        sides = [0.5 * s / n.masked_fill(n == 0, 1) for n, s in (ends[:2], ends[2:])]
        dbudget = torch.where(dead & ~d.fixed, sides[0] + sides[1], dbudget)
    (price,) = row.share([dbudget])
    dcost = -price.unsqueeze(-1) * d.share
    if by_value:
        hi_safe, lo_safe = hi.masked_fill(d.fixed, 0), lo_shared.masked_fill(d.fixed, 0)
        dcost = dcost - (hi_safe + lo_safe).unsqueeze(-1) * dx
    dcost = dcost.masked_fill(x == -math.inf, 0)
    return dx.to(x.dtype), dcost.to(cost.dtype), dbudget, dtau


def soft_budget_backward(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    cost: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    by: str,
    at_most: bool,
    group: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`vjp` as an operator, for traces and where no second derivative is wanted."""
    F = cdfs.resolve(cdf, shape)
    dx, dcost, dbudget, dtau = vjp(grad, grad_lo, x, cost, hi, lo, tau, F, by, at_most, rows.of(group))
    return dx.contiguous(), dcost.contiguous(), dbudget.clone(), dtau.clone()
