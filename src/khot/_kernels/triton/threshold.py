"""The threshold of a row in float32: from a guess by few evaluations of the soft count.

With the logistic CDF most rows need one evaluation at τ of the scores' own scale. The first guess comes from
the row's mean and variance; an evaluation yields the first five derivatives of the count, and the step to the
root of their Taylor polynomial is the last one if it is short. A kink of F, which no polynomial follows, is
allowed for by the number of entries near it. Far from the root the step comes from a model of the count,
inside a bracket; of a budget, from a t that no density reaches, onto the next entries if they cost enough. A
threshold in a gap wider than the density reaches has a closed form, or under the normal CDF nearly one. What
depends on the CDF is in :mod:`.terms`.

t is the unevaluated sum of two float32 numbers, and k too: a fractional k rounded to float32 would cost up to
6e-6 in y.
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.arguments import Tile
from khot._kernels.triton.costs import load_pair, paid_costs, paid_count, paid_series, paid_terms, priced
from khot._kernels.triton.fast import (
    LN2,
    LOG2E,
    always,
    any_row,
    before,
    double,
    fma,
    inverse_of,
    log2,
    plus,
    reached,
    reciprocal,
    total,
    two_sum,
    wide,
    with_sign,
)
from khot._kernels.triton.float64_sums import BY_COUNT, BY_SCORE, BY_VALUE
from khot._kernels.triton.functions import LAPLACE, LOGISTIC, NORMAL, POWER, full_support, moments
from khot._kernels.triton.pooled import pooled_terms, size, temperature, unpooled
from khot._kernels.triton.terms import (
    NORMAL_UNIT,
    hard_count,
    holds,
    kink,
    moment_quantile,
    normal_tail,
    series,
    term_count,
    terms,
    unit,
)
from khot._kernels.triton.words import columns, piece

# The Taylor polynomial of degree 5 is trusted for steps of up to this many τ: the rest of the series is below
# 1.6e-7 of the sum of densities there (logistic). Laplace's density has a kink, which the polynomial does not
# follow: the error is up to half the square of the step.
SHORT = tl.constexpr(0.2)
SHORT_NORMAL = tl.constexpr(0.15)
SHORT_KINKED = tl.constexpr(3e-4)
# and for misses of up to this many times the sum of densities
SMALL = tl.constexpr(0.3)
ROUNDING = tl.constexpr(3e-7)  # the error of a step, in τ, that rounding may cause anyway
UNDECIDED = tl.constexpr(1e-30)  # a sum of densities below which no float32 step is to be trusted
# and one below which t lies in a gap whose ends are so far away that both tails are like exponentials
APART = tl.constexpr(1e-8)
# Σ w f has to be so many times the digits of costs that a sum of float32 numbers may have lost
ROUGH = tl.constexpr(0.5)
# Where the temperature moves with t, the longest last step, as a share of t: its error is about the square
STEADY = tl.constexpr(2e-4)
FAR = tl.constexpr(3e38)  # farther than any t, and finite, so that an entry of −inf is below −FAR
FLUSH = tl.constexpr(16)  # steps of a row that streams past between additions in float64


# ------------------------------------------------------------------------------------- sums over entries


@triton.jit
def less(x, base, BASED: tl.constexpr):
    """x in float32; if BASED, x − base: what entries near base differ from it by is exact then."""
    if BASED:
        return (double(x) - base).to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit
def over(
    x, at, n, terms: tl.constexpr, given, COUNT: tl.constexpr, T: tl.constexpr, base=0.0,
    BASED: tl.constexpr = False, TYPE: tl.constexpr = tl.float32, BY: tl.constexpr = BY_COUNT,
):  # fmt: skip
    """The sums over a row of the COUNT members of terms(x, given), which are of this type: of the pieces in
    x, or of what is at `at`, which BASED takes less `base` (:func:`less`). BY says whether entries are pairs
    (:func:`.costs.load_pair`), whose costs are at `at` in units of 1/base.

    A row that streams past leaves its sums in float64: they are flushed often enough for float32 not to lose
    its digits to the many entries that a thread adds up.
    """
    PIECES: tl.constexpr = T.pieces
    WIDTH: tl.constexpr = T.width
    if T.streams:
        column = tl.arange(0, T.width)
        STEP: tl.constexpr = T.pieces * T.width
        sums = ()
        for _ in tl.static_range(COUNT):
            sums = sums + (tl.zeros((), tl.float64),)  # type: ignore[assignment]  # noqa: RUF005
        for begin_ in range(0, n, FLUSH * STEP):
            part = ()
            for _ in tl.static_range(COUNT):
                part = part + (tl.zeros((WIDTH,), TYPE),)  # type: ignore[assignment]  # noqa: RUF005
            for start in range(begin_, tl.minimum(n, begin_ + FLUSH * STEP), STEP):
                held = ()
                for i in tl.static_range(PIECES):  # all loads first
                    valid = column + (start + i * T.width) < n
                    if BY == BY_COUNT:
                        score = tl.load(at + (start + i * T.width), mask=valid, other=float("-inf"))
                        held = held + (less(score, base, BASED),)  # type: ignore[assignment]  # noqa: RUF005
                    else:
                        score, w = load_pair(at, start + i * T.width, valid)
                        held = held + ((score, w * base),)  # type: ignore[assignment]  # noqa: RUF005
                for i in tl.static_range(PIECES):
                    part = plus(part, terms(held[i], given))
            part = total(part, 1)
            sums = plus(sums, part)
        return sums
    else:
        held = terms(piece(x, 0, at, T.pieces), given)
        for i in tl.static_range(1, PIECES):
            if always(i, T.ragged) or reached(i, n, T):
                held = plus(held, terms(piece(x, i, at, T.pieces), given))
        return total(held, T.together)


@triton.jit
def moment_terms(x, origin):
    """Of what may be selected: one, x − origin and its square; not finite if x is not."""
    selectable = x != float("-inf")
    d = tl.where(selectable, x - origin, 0.0)
    return tl.where(selectable, 1.0, 0.0), d, d * d


@triton.jit
def _moments(x, at, origin, n, T: tl.constexpr):
    """Sums of x − origin and of its square; not finite if an entry is not."""
    PIECES: tl.constexpr = T.pieces
    sums = ()
    for i in tl.static_range(PIECES):
        d = piece(x, i, at, T.pieces) - wide(origin, T.together)
        if not T.full:
            d = tl.where(before(columns(x, i, T.pieces, T.width), n, T.together), d, 0.0)
        sums = plus(sums, (d, d * d))
    return total(sums, T.together)


@triton.jit
def _ordinary_terms(x, given):
    """y = σ(z), and with f = y(1 − y): f, fy, f², f²y, f³.

    Σy itself has enough digits where many entries are undecided; this takes two thirds of the instructions
    of :func:`.terms.terms`. Given are hi, lo·log₂e/τ and log₂e/τ.
    """
    hi, shift, scale = given
    y = reciprocal(1.0 + tl.exp2(shift - (x - hi) * scale))
    f = y - y * y
    ff = f * f
    return y, f, f * y, ff, ff * y, ff * f


# ----------------------------------------------------------------------------------------------- the step


@triton.constexpr_function
def _short_step(CDF):
    """The longest step in units of τ that may be the last one, by Taylor's polynomial."""
    lengths = (SHORT, SHORT_KINKED, SHORT_NORMAL, SHORT, SHORT)
    return lengths[getattr(CDF, "value", CDF)].value


@triton.jit
def _taylor(miss, mass, beta, gamma, delta, epsilon):
    """The step in units of τ that the Taylor polynomial of the count makes, and μ = miss/Σf."""
    mu = miss * reciprocal(mass)
    h = mu * reciprocal(1 - 0.5 * mu * beta)  # Halley's
    for _ in tl.static_range(2):  # Newton's on the polynomial
        cubic = 0.5 * beta - h * (1 / 6 * gamma - h * (1 / 24 * delta - h * (1 / 120 * epsilon)))
        rate = 1 - h * (beta - h * (0.5 * gamma - h * (1 / 6 * delta - h * (1 / 24 * epsilon))))
        h += (mu - h * (1 - h * cubic)) * reciprocal(rate)
    return h, mu


@triton.jit
def _is_short(h, gamma, epsilon, CDF: tl.constexpr):
    """Whether Taylor's polynomial is accurate for a step of h."""
    if CDF == NORMAL:
        # Its derivatives grow with z: γ is the mean of z² − 1 over the densities, and ε about that of z⁴,
        # which tells of many entries far out beside a few near t.
        square = tl.maximum(gamma, tl.sqrt(tl.maximum(epsilon, 1.0)))
        h *= tl.sqrt(square)
    return tl.abs(h) <= _short_step(CDF)


@triton.jit
def excess_of(sums, k, k_low, seen, CDF: tl.constexpr, BY: tl.constexpr = BY_COUNT):
    """By how much the hard count of an evaluation exceeds k. BY says whether the sums are of
    :func:`.costs.paid_terms`, and k is a budget."""
    if BY == BY_COUNT:
        return ((hard_count(sums[0], seen, CDF) - k) - k_low).to(tl.float32)
    else:
        return (((sums[0] - k) - k_low) + sums[paid_count(CDF, BY)]).to(tl.float32)


@triton.jit
def may_be_lost(sums, excess, power, floor, CDF: tl.constexpr, BY: tl.constexpr):
    """Whether a budget is spent, or Σ w f tells little, but for digits that float32 may have lost of the sum
    of costs."""
    unclear = floor + ROUGH * tl.abs(sums[paid_count(CDF, BY)].to(tl.float32))
    if BY == BY_VALUE:
        less, mass, _, _, _, _ = paid_series(sums, power, CDF)
    else:
        less, mass, _, _, _, _ = series(sums, power, CDF)
    if full_support(CDF):
        return ~(mass > unclear) & ~(tl.abs(excess - less) > unclear)
    else:  # whether entries leave a gap, or the last of them is taken in part
        return ~(tl.abs(excess) > unclear)


@triton.jit
def taylor_step(
    sums, excess, turn, power, CDF: tl.constexpr, BY: tl.constexpr = BY_COUNT,
    warming=0.0, POOLED: tl.constexpr = 0,
):  # fmt: skip
    """What follows from the sums of an evaluation, and the excess of the hard count, alone: by how much the
    soft count exceeds k, the step in units of τ, μ, β, γ, Σf, and whether the step may be the last one.

    With compact support the sums do not tell how Σf changes: turn is its relative fall per τ, if it is known,
    and 0 otherwise. BY is as in :func:`excess_of`. POOLED is p of a top-k in magnitude, whose temperature
    grows by `warming` with t.
    """
    LAST: tl.constexpr = paid_count(CDF, BY)
    if BY == BY_VALUE:
        less, mass, beta, gamma, delta, epsilon = paid_series(sums, power, CDF)
    else:
        less, mass, beta, gamma, delta, epsilon = series(sums, power, CDF)
    if POOLED > 0:  # −less is the sum of 0 < y < 1, which a greater temperature lowers
        mass -= warming * less
    miss = excess - less
    if full_support(CDF):
        h, mu = _taylor(miss, mass, beta, gamma, delta, epsilon)
        last = (tl.abs(mu) <= 1.5 * _short_step(CDF)) & _is_short(h, gamma, epsilon, CDF)
        if CDF == LAPLACE:  # an entry that crosses the kink leaves the polynomial by half a square
            crossing = sums[LAST - 1].to(tl.float32) * h * h
            last = last | ((tl.abs(h) <= kink(CDF)) & (tl.abs(mu) < 0.1) & (crossing <= ROUNDING * mass))
    else:
        mu = miss * reciprocal(mass)
        bend = 0.5 * mu * turn
        h = tl.where(tl.abs(bend) < 0.5, mu * reciprocal(1 - bend), mu)
        if CDF == POWER:
            # Few entries with 0 < y < 1: their sum P goes on as the power of a line, to what it should be.
            P, goal = -less, -excess
            line = (
                power * P * reciprocal(mass) * (1 - tl.exp2(log2(goal * reciprocal(P)) * reciprocal(power)))
            )
            lean = (P > 0) & (goal >= 0) & (mass < 4 * power) & ((tl.abs(mu) > 0.01) | (goal == 0))
            line = tl.where(goal == 0, 1.001 * line, line)  # into the gap that t is in then
            h = tl.where(lean, line, h)
            # All of them are about to reach 1, as z^e and z^(e − 1) agree: likewise, into the gap there.
            fill = (mass > 0) & (goal > 0) & (tl.abs(mu) < kink(CDF))
            fill = fill & (tl.abs(mass - power * P) <= kink(CDF) * mass)
            h = tl.where(fill, h - 1e-3, h)
        # Taylor's polynomial ends with h: `turn` is the slope of a chord, and knows no more than the size
        # of the next term. y moves up to `power` times as much as t.
        length = tl.abs(h)
        crossing = sums[3].to(tl.float32) * length  # at most, times the height of the kink
        bent = length * length * tl.abs(turn)
        short = length <= kink(CDF)
        if CDF == POWER:
            bent = tl.maximum(bent, length * length * power) * power
            crossing *= power * power
            short = short & (turn != 0)
        short = short & (crossing <= ROUNDING * mass) & (bent <= ROUNDING)
        last = (tl.abs(mu) <= ROUNDING) | short
        if CDF == POWER:
            last = last & (goal != 0) & ~fill
        else:  # into the gap, likewise, where all entries with 0 < y < 1 are about to leave it
            leaves = (excess == 0) & (mass > 0) & (sums[3].to(tl.float32) >= mass)
            h = tl.where(leaves, h + tl.where(h > 0, 1e-3, -1e-3), h)
            last = last & ~leaves
        if POOLED > 0:
            last = last & (length * warming <= STEADY)
    return miss, h, mu, beta, gamma, mass, last & (mass > UNDECIDED)


@triton.jit
def _quantile(log2_share):
    """The upper quantile of the normal distribution (Abramowitz and Stegun 26.2.23)."""
    u = tl.sqrt(log2_share * (-2 * LN2))
    numerator = 2.515517 + u * (0.802853 + u * 0.010328)
    return u - numerator * reciprocal(1 + u * (1.432788 + u * (0.189269 + u * 0.001308)))


@triton.jit
def _to_log(t, tau):
    return with_sign(log2(1 + tl.abs(t) * reciprocal(tau)), t)


@triton.jit
def _from_log(v, tau):
    return with_sign(tau * (tl.exp2(tl.abs(v)) - 1), v)


@triton.jit
def _few(miss, mu, f_sum, CDF: tl.constexpr):
    """Whether so few entries are undecided that each of them counts."""
    few = ((tl.abs(miss) < 1) & (f_sum < 1)) if full_support(CDF) else (tl.abs(mu) < 0.5)
    return few & (f_sum > UNDECIDED)


@triton.jit
def long_step(miss, mu, h, beta, gamma, f_sum, crowd, CDF: tl.constexpr, BY: tl.constexpr = BY_COUNT):
    """The step in units of τ where Taylor's, h, is too long to be trusted.

    Few entries near t: the densities go on as a cosh that agrees with their sum and its derivatives, or, with
    compact support, as they are. Many: the count goes on as of entries spread evenly, `crowd` of them in a τ.
    """
    if full_support(CDF):
        # sinh(λh)/λ − β(cosh(λh) − 1)/λ² = μ, a quadratic equation in e^(λh)
        slowest: tl.constexpr = 1e-8 if BY == BY_VALUE else 0.01  # of cheap entries z moves slowly
        rate = tl.sqrt(
            tl.minimum(tl.maximum(tl.maximum(gamma, beta * beta), slowest), 200.0 if CDF == NORMAL else 1.0)
        )
        per_rate = reciprocal(rate)
        q = tl.minimum(tl.maximum(beta * per_rate, -1.0), 1.0)
        p = rate * mu - q
        # of a far tail 1 − q or 1 + q is lost to rounding, but the step is not without end
        under, over_ = tl.maximum(1 - q, 1e-12), tl.maximum(1 + q, 1e-12)
        root = tl.sqrt(p * p + under * over_)
        larger, smaller = (p + root) * reciprocal(under), over_ * reciprocal(root - p)
        near = log2(tl.where(p > 0, larger, smaller)) * (per_rate * LN2)
    else:
        near = h

    if BY == BY_VALUE and full_support(CDF):  # few or many, cheap entries may be alike in a step of many τ
        return near
    else:
        dense = miss * (6 + 2 * reciprocal(tl.maximum(crowd, 1e-9))) * reciprocal(6 * f_sum + 2)
        close = (f_sum > UNDECIDED) & (tl.abs(near) < 0.5)
        return tl.where(_few(miss, mu, f_sum, CDF) | close, near, dense)


@triton.jit
def _search(taylor, t, aim, crowd, bracket, count, CDF: tl.constexpr, BY: tl.constexpr):
    """:func:`long_step`, which goes as if entries were spread as between the ends of the bracket [low, high]
    of t, and the bracket. Where the step leaves it: the secant of the count's logit, with Illinois' halving;
    and every third time the middle on a scale that is logarithmic in t/τ.
    """
    miss, mu, h, beta, gamma, f_sum = taylor
    n, k, _, tau, inverse, _ = aim
    low, high, miss_low, miss_high, g_low, g_high, side = bracket
    goal = log2(k) - log2(n - k)
    above = miss > 0  # t is too low
    soft = k + miss
    g = log2(soft + 0.5) - log2(n - soft + 0.5) - goal
    g_high = tl.where(above & (side > 0), 0.5 * g_high, g_high)
    g_low = tl.where((miss <= 0) & (side < 0), 0.5 * g_low, g_low)
    low, high = tl.where(above, tl.maximum(low, t), low), tl.where(above, high, tl.minimum(high, t))
    miss_low, miss_high = tl.where(above, miss, miss_low), tl.where(above, miss_high, miss)
    g_low, g_high = tl.where(above, g, g_low), tl.where(above, g_high, g)
    side = tl.where(above, 1.0, -1.0)

    both = (miss_low > 0) & (miss_high < 0)
    between = (miss_low - miss_high) * tau * reciprocal(high - low)
    crowd = tl.where(both & (between > 0), between, crowd)
    few = _few(miss, mu, f_sum, CDF)
    step = long_step(miss, mu, h, beta, gamma, f_sum, crowd, CDF, BY)

    reached = t + step * tau
    share = tl.minimum(tl.maximum(g_low * reciprocal(g_low - g_high), 0.02), 0.98)
    secant = tl.where(both, low + (high - low) * share, 0.5 * (low + high))
    astray = ~((reached > low) & (reached < high)) | (~few & both & (f_sum < 0.5))
    trusted: tl.constexpr = SHORT if full_support(CDF) else 1e-3
    step = tl.where(astray & ~(tl.abs(step) <= trusted), (secant - t) * inverse, step)
    if (count >= 5) & (count % 3 == 2):
        middle = _from_log(0.5 * _to_log(low, tau) + 0.5 * _to_log(high, tau), tau)
        if not full_support(CDF):  # Newton may creep where a support ends
            few = few & (tl.abs(step) < 1e-2)
        step = tl.where(few, step, (middle - t) * inverse)
    return step, (low, high, miss_low, miss_high, g_low, g_high, side)


@triton.jit
def min_max(a0, a1, b0, b1):
    return tl.minimum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _level(entry, POOLED: tl.constexpr, BY: tl.constexpr):
    """Which t has z = 0 of an entry."""
    if BY == BY_VALUE:
        return entry[0] * reciprocal(entry[1])
    elif BY == BY_SCORE:
        return entry[0]
    else:
        return size(entry) if POOLED > 0 else entry


@triton.jit
def _parted(entry, hi, lo, centre, POOLED: tl.constexpr, BY: tl.constexpr):
    """The level of an entry with zτ > centre, else inf; and that of one with less, else −inf. What is free is
    neither."""
    level = _level(entry, POOLED, BY)
    if BY == BY_VALUE:
        off, shift = priced(entry[0], entry[1], hi, lo, 1.0, LOGISTIC, 0)
    else:
        off, shift = level - hi, lo
    above = off - shift > centre
    over_, under = tl.where(above, level, float("inf")), tl.where(above, float("-inf"), level)
    if BY == BY_COUNT:
        return over_, under
    else:
        paid = entry[1] > 0
        return tl.where(paid, over_, float("inf")), tl.where(paid, under, float("-inf"))


@triton.jit
def _nearest(
    x, at, n, hi, lo, centre, T: tl.constexpr, base=0.0, BASED: tl.constexpr = False,
    POOLED: tl.constexpr = 0, BY: tl.constexpr = BY_COUNT,
):  # fmt: skip
    """The least level of entries with zτ > centre, and the greatest one of those with less; POOLED, of their
    sizes."""
    hi, lo, centre = wide(hi, T.together), wide(lo, T.together), wide(centre, T.together)
    PIECES: tl.constexpr = T.pieces
    WIDTH: tl.constexpr = T.width
    if T.streams:
        column = tl.arange(0, T.width)
        least = tl.full((WIDTH,), float("inf"), tl.float32)
        greatest = tl.full((WIDTH,), float("-inf"), tl.float32)
        for start in range(0, n, T.width):
            if BY == BY_COUNT:
                entry = less(tl.load(at + start, mask=column + start < n, other=float("-inf")), base, BASED)
            else:
                score, w = load_pair(at, start, column + start < n)
                entry = score, w * base
            over_, under = _parted(entry, hi, lo, centre, POOLED, BY)
            least, greatest = tl.minimum(least, over_), tl.maximum(greatest, under)
        return tl.reduce((least, greatest), 0, min_max)
    else:
        for i in tl.static_range(PIECES):
            over_, under = _parted(x[i], hi, lo, centre, POOLED, BY)
            if i == 0:
                least, greatest = over_, under
            else:
                least, greatest = tl.minimum(least, over_), tl.maximum(greatest, under)
        return tl.reduce((least, greatest), 0 if T.together == 1 else 1, min_max)


@triton.jit
def _centre(tau, CDF: tl.constexpr):
    """zτ between entries that are selected and others, of t that no density reaches."""
    return 0.0 * tau if full_support(CDF) else 0.5 * tau


@triton.jit
def _level_terms(entry, given):
    """Of the entries at a level: w; a w for the rate a at which z falls with t; and what x exceeds a t by."""
    x, w = entry
    level = given[0]
    BY: tl.constexpr = given[1]
    at_level = (_level(entry, 0, BY) == level) & (w > 0)
    w = tl.where(at_level, w, 0.0)
    if BY == BY_VALUE:
        return w, w * w, tl.where(at_level, fma(-level, w, x), 0.0)
    else:
        return w, w, w * 0


@triton.jit
def _onto_level(
    x, at, n, miss, hi, lo, low, high, tau, power, CDF: tl.constexpr, BY: tl.constexpr, T: tl.constexpr, base
):  # fmt: skip
    """The t at which the entries nearest to a t that no density reaches make up for what is missed, and
    whether they cost enough for that. If they cost just that, it is one beyond them, inside the bracket."""
    up, down = _nearest(x, at, n, hi, lo, _centre(tau, CDF), T, base, BY=BY)
    level = tl.where(miss > 0, up, down)
    costs, rates, off = over(x, at, n, _level_terms, (wide(level, T.together), BY), 3, T, base, BY=BY)
    costs, rates, off = costs.to(tl.float32), rates.to(tl.float32), off.to(tl.float32)
    # of F with F(−z) = 1 − F(z), what the entries lack has more digits than what they have
    share = tl.abs(miss) if full_support(CDF) else tl.where(miss > 0, costs - miss, -miss)
    _, own = _quantiles(costs, share, power, CDF)
    mean, variance = moments(power, CDF)
    place = mean + own * tl.sqrt(tau * 0 + variance)
    if full_support(CDF):
        place = tl.where(miss > 0, -place, place)
    in_part = tl.abs(miss) < costs
    beyond: tl.constexpr = 12.0 if full_support(CDF) else 1.0
    place = tl.where(in_part, place, mean + tl.where(miss > 0, -beyond, beyond))
    hi, lo = two_sum(level, off * reciprocal(costs) - tau * place * costs * reciprocal(rates))
    in_full = (tl.abs(miss) == costs) & (hi > low) & (hi < high)
    return hi, lo, (in_part | in_full) & (tl.abs(hi) < 1e30)


@triton.jit
def _costing(value, entry, BY: tl.constexpr):
    """A value of an entry times its cost. What is free may lie anywhere, and have no value."""
    return value if BY == BY_COUNT else tl.where(entry[1] > 0, value * entry[1], 0.0)


@triton.jit
def _gap_terms(entry, given):
    """2^(−distance) from the nearest entry on the same side of t, times the cost, for each side."""
    up, down, rate = given[:3]
    BY: tl.constexpr = given[3]
    x = entry if BY == BY_COUNT else entry[0]
    above = x >= up
    e = _costing(tl.exp2(tl.where(above, up - x, x - down) * rate), entry, BY)
    return tl.where(above, e, 0.0), tl.where(above, 0.0, e)


@triton.jit
def _normal_gap_terms(entry, given):
    """Tails and densities on each side of t, over those of the nearest entry there, at these distances, times
    the cost."""
    up, down, rate, to_up, to_down = given[:5]
    BY: tl.constexpr = given[5]
    x = entry if BY == BY_COUNT else entry[0]
    above = x >= up
    d, least = tl.where(above, x - up, down - x) * rate, tl.where(above, to_up, to_down)
    ratio, _ = normal_tail(least + d)
    f = _costing(tl.exp2(-d * (d + 2 * least)), entry, BY)
    tail = f * ratio
    tail_up, f_up = tl.where(above, tail, 0.0), tl.where(above, f, 0.0)
    return tail_up, tail - tail_up, f_up, f - f_up


@triton.jit
def _from_middle(
    x, at, n, up, down, scale, T: tl.constexpr, base=0.0, BASED: tl.constexpr = False,
    BY: tl.constexpr = BY_COUNT,
):  # fmt: skip
    """How far t is from the middle of a gap between normal tails, in units of z: by Newton's steps for the
    logarithms of what is missing above t and left over below it, which are nearly straight."""
    half = 0.5 * (up - down) * scale
    off = half * 0
    for _ in range(3):
        A, B, f_A, f_B = over(
            x, at, n, _normal_gap_terms,
            (  # without a name, or BY were no constant
                wide(up, T.together), wide(down, T.together), wide(scale, T.together),
                wide(half - off, T.together), wide(half + off, T.together), BY,
            ),
            4, T, base, BASED, BY=BY,
        )  # fmt: skip
        A, B, f_A, f_B = A.to(tl.float32), B.to(tl.float32), f_A.to(tl.float32), f_B.to(tl.float32)
        slope = (f_A * reciprocal(A) + f_B * reciprocal(B)) * (0.3989423 * LOG2E / NORMAL_UNIT)
        off += (log2(B) - log2(A) - 4 * half * off) * reciprocal(slope)
    return off / NORMAL_UNIT, tl.abs(off) < half


@triton.jit
def _gap(
    x, at, n, hi, lo, scale, tau, CDF: tl.constexpr, T: tl.constexpr, base=0.0, BASED: tl.constexpr = False,
    own_tau=0.0, POOLED: tl.constexpr = 0, BY: tl.constexpr = BY_COUNT,
):  # fmt: skip
    """t in a gap that no density crosses, and whether there is such a gap.

    With exponential tails as much is missing above t as is left over below it. Both are sums of one
    exponential law, so that the logarithms of the sums relative to the nearest entry, up above t and down
    below it, give t = (up + down)/2 + τ/2·(ln B − ln A). With compact support every t from down to up − τ
    solves the equation, and the middle of them is taken. POOLED, the end above is not up − τ, but what `up`
    is reduced to on its own.
    """
    up, down = _nearest(x, at, n, hi, lo, _centre(tau, CDF), T, base, BASED, POOLED, BY)
    if POOLED > 0:
        up = unpooled(up, own_tau, POOLED)
        tau = tau * 0
    middle, low = two_sum(0.5 * up, 0.5 * down)
    if CDF == NORMAL:
        off, exists = _from_middle(x, at, n, up, down, scale, T, base, BASED, BY)
        low += off * tau
    elif full_support(CDF):
        A, B = over(
            x, at, n, _gap_terms, (wide(up, T.together), wide(down, T.together), wide(scale, T.together), BY),
            2, T, base, BASED, BY=BY,
        )  # fmt: skip
        low += (log2(B.to(tl.float32)) - log2(A.to(tl.float32))) * (0.5 * LN2) * tau
        exists = up > down
    else:
        low -= 0.5 * tau
        exists = up - down >= tau
    t, t_low = two_sum(middle, low)
    return t, t_low, exists


# ----------------------------------------------------------------------------------------------- the rows


@triton.jit
def _quantiles(n, k, power, CDF: tl.constexpr):
    """The quantiles of k of n of the normal distribution and of F, in units of their deviations from their
    means."""
    log_k, log_complement = log2(k), log2(n - k)
    goal = log_k - log_complement
    log_share = tl.minimum(log_k, log_complement) - log2(n)
    normal = with_sign(_quantile(log_share), goal)
    return normal, moment_quantile(log_share, goal, normal, k, n, power, CDF)


@triton.jit
def guess(n, offset, variance, k, tau, power, CDF: tl.constexpr):
    """From moments: the quantile of a sum of the scores' distribution, taken for normal, and F's, less the
    origin; and the mean and 1/deviation of the sum, and the normal quantile."""
    normal, own = _quantiles(n, k, power, CDF)
    own_mean, own_variance = moments(power, CDF)
    noise = tau * tau * own_variance
    spread = noise + variance
    per_deviation = tl.rsqrt(spread)
    quantile = normal + (own - normal) * (noise * per_deviation * per_deviation)
    offset -= tau * own_mean
    deviation = spread * per_deviation
    return offset - quantile * deviation, offset, deviation, per_deviation, normal


@triton.jit
def guess_by_value(n, sums, k, tau, power, CDF: tl.constexpr):
    """t for which x − t w has that quantile at 0, from the sums of w x, w x², w², w² x and w³; the costs in a
    τ; and where F is k/n, times τ."""
    normal, own = _quantiles(n, k, power, CDF)
    own_mean, own_variance = moments(power, CDF)
    noise, per = tau * tau * own_variance, reciprocal(n)
    x, a = sums[0] * per, sums[2] * per
    spread, both, costs = sums[1] * per - x * x, sums[3] * per - x * a, sums[4] * per - a * a
    x -= tau * own_mean
    t = x * reciprocal(a)
    for _ in tl.static_range(5):  # the spread depends on t, so that this is a fixed point
        variance = noise + tl.maximum(spread - 2 * t * both + t * t * costs, 0.0)
        per_deviation = tl.rsqrt(variance)
        quantile = normal + (own - normal) * (noise * per_deviation * per_deviation)
        t = (x - quantile * variance * per_deviation) * reciprocal(a)
    crowd = n * a * tl.exp2(normal * normal * (-0.5 * LOG2E)) * 0.3989423 * tau * per_deviation
    return t, crowd, tau * (own_mean + own * tl.sqrt(own_variance))


@triton.jit
def advance(
    sums, excess, hi, lo, trail, crowd, done, ok, deep, count, aim, warming,
    L: tl.constexpr, TOGETHER: tl.constexpr, POOLED: tl.constexpr = 0,
):  # fmt: skip
    """t after the step that the sums of an evaluation and the excess of the hard count call for, the trail of
    the search, and which rows are done, have a threshold, and are in a gap that no density crosses.

    The trail is the bracket, what the count and its logit miss at its ends, the side of the last t, and t and
    Σf of the evaluation before: at first (low, high, 0, 0, 0, 0, 0, t, 0). The rest is as in :func:`iterate`.
    """
    bracket, t_before, mass_before = trail[:7], trail[7], trail[8]
    tau, inverse, power = aim[3:]
    turn = hi * 0
    if not full_support(L.cdf):
        moved = ((hi - t_before) + lo) * inverse
        mass = sums[2].to(tl.float32)
        if POOLED > 0:
            mass = (power * mass - warming * sums[1].to(tl.float32)) * inverse
        turn = (mass_before - mass) * reciprocal(moved * mass)
        turn = tl.where((mass_before > 0) & (tl.abs(turn) < 1e6), turn, 0.0)
        t_before, mass_before = hi + lo, mass
    miss, h, mu, beta, gamma, mass, last = taylor_step(
        sums, excess, turn, power, L.cdf, L.by, warming, POOLED
    )
    least: tl.constexpr = APART if full_support(L.cdf) else UNDECIDED
    deep = deep | (~done & ~(mass > least) & (excess == 0))
    done = done | deep
    if any_row(~(last | done), TOGETHER):
        taylor = (miss, mu, h, beta, gamma, mass)
        step, bracket = _search(taylor, hi + lo, aim, crowd, bracket, count, L.cdf, L.by)
        h = tl.where(last, h, step)
    failed = ~(tl.abs(h) < 1e30) & ~done
    new_hi, new_lo = two_sum(hi, lo + tl.where(done | failed, 0.0, h) * tau)
    if POOLED > 0:  # t stays above 0
        least = 0.25 * hi
        new_hi, new_lo = tl.maximum(new_hi, least), tl.where(new_hi < least, 0.0, new_lo)
    hi, lo = tl.where(done, hi, new_hi), tl.where(done, lo, new_lo)
    trail = bracket + (t_before, mass_before)  # noqa: RUF005
    return hi, lo, trail, done | last | failed, ok & ~failed, deep


@triton.jit
def iterate(
    x, at, n_columns, guess, done, aim, evaluations, L: tl.constexpr, T: tl.constexpr,
    AGAIN: tl.constexpr = False, base=0.0, BASED: tl.constexpr = False, grain=0.0, floor=0.0, goal=0.0,
    POOLED: tl.constexpr = 0,
):  # fmt: skip
    """t from a guess, and which rows have one: of the rows that are not done already, as those are that have
    none or are not there.

    The sums are those that ``L.by`` names: of a count, or of costs by score or by value, which x has as pairs
    with the scores. Of a row that streams past they are read at `at`, and a function of them is no sum of
    this kind.

    A guess is hi, lo, the bracket of t, and how many entries lie in a τ there; what is aimed at is n, k and
    k_low, τ, 1/τ and the exponent of z. AGAIN says that the entries can be read again at `at`, though they
    are held: in a gap, which few rows have to search, there are not registers enough for both. BASED and base
    are as in :func:`over`: BASED, t is less base, too. If entries have costs, k is a budget and n what all
    entries cost; grain is what :func:`.costs.paid_terms` needs; where Σ w f is below a floor, what selected
    entries cost is compared with the goal, the budget in float64, to the last digit. POOLED is p of a top-k
    in magnitude, whose temperature moves with t (:mod:`.pooled`).
    """
    hi, lo, low, high, crowd = guess
    n, k, k_low, tau, inverse, power = aim
    own_tau = tau
    scale = inverse * unit(L.cdf)
    # as many halves as entries were looked at, those beyond the row's end among them
    if T.ragged:
        seen = tl.maximum(tl.cdiv(tl.max(n_columns[1]), T.width), 1) * T.width
    else:
        seen = tl.cdiv(n_columns, T.pieces * T.width) * (T.pieces * T.width)
    nothing = hi * 0
    deep = done & ~done
    ok = ~deep
    trail = (low, high, nothing, nothing, nothing, nothing, nothing, hi, nothing)
    count = 0
    running = (count < evaluations) & any_row(~done, T.together)
    while running:
        warming = 0.0
        if POOLED > 0:
            tau, warming = temperature(hi + lo, own_tau, POOLED)
            inverse = inverse_of(tau)
            scale = inverse * unit(L.cdf)
        # Constants stay constants only in a tuple that has no name; and no sums of this name may come
        # from before the loop, which a row that streams past would carry along in another precision.
        if L.by != BY_COUNT:
            sums = over(
                x, at, n_columns, paid_terms,
                (
                    wide(hi, T.together), wide(lo * scale, T.together), wide(scale, T.together), power, L,
                    grain,
                ),
                paid_count(L.cdf, L.by) + 1, T, base, BY=L.by,
            )  # fmt: skip
            excess = excess_of(sums, k, k_low, seen, L.cdf, L.by)
            lost = ~done & may_be_lost(sums, excess, power, floor, L.cdf, L.by)
            if any_row(lost, T.together):
                paid, rest = over(
                    x, at, n_columns, paid_costs,
                    (
                        wide(hi, T.together), wide(lo * scale, T.together), wide(scale, T.together), power, L,
                        grain,
                    ),
                    2, T, base, BY=L.by, TYPE=tl.float64,
                )  # fmt: skip
                excess = tl.where(lost, ((paid - goal) + rest).to(tl.float32), excess)
        elif POOLED > 0:
            sums = over(
                x, at, n_columns, pooled_terms,
                (wide(hi, T.together), wide(lo * scale, T.together), wide(scale, T.together), power, L),
                term_count(L.cdf), T,
            )  # fmt: skip
            excess = excess_of(sums, k, k_low, seen, L.cdf)
        else:
            sums = over(
                x, at, n_columns, terms,
                (wide(hi, T.together), wide(lo * scale, T.together), wide(scale, T.together), power, L),
                term_count(L.cdf), T, base, BASED,
            )  # fmt: skip
            excess = excess_of(sums, k, k_low, seen, L.cdf)
        before_hi, before_lo = hi, lo
        far = ~done & (excess != 0) & ~(sums[2].to(tl.float32) > UNDECIDED)
        hi, lo, trail, done, ok, deep = advance(
            sums, excess, hi, lo, trail, crowd, done, ok, deep, count, (n, k, k_low, tau, inverse, power),
            warming, L, T.together, POOLED,
        )  # fmt: skip
        if L.by != BY_COUNT:  # noqa: SIM102 (known when it is compiled, the other is not)
            if any_row(far, T.together):
                level_hi, level_lo, found = _onto_level(
                    x, at, n_columns, excess, before_hi, before_lo, trail[0], trail[1], tau, power, L.cdf,
                    L.by, T, base,
                )  # fmt: skip
                hi, lo = tl.where(far & found, level_hi, hi), tl.where(far & found, level_lo, lo)
        count += 1
        running = (count < evaluations) & any_row(~done, T.together)
    ok = ok & done
    if L.by == BY_VALUE:
        ok = ok & ~deep
    else:
        if any_row(deep, T.together):
            gap_hi, gap_lo, exists = _gap(
                x, at, n_columns, hi, lo, scale, tau, L.cdf,
                Tile(T.together, 1 if AGAIN else T.pieces, T.width, False, T.streams or AGAIN, 0), base,
                BASED, own_tau, POOLED, L.by,
            )  # fmt: skip
            ok = ok & (exists | ~deep)
            hi, lo = tl.where(deep, gap_hi, hi), tl.where(deep, gap_lo, lo)
    return hi, lo, ok


@triton.jit
def find(
    x, at, origin, there, n_columns, k, k_low, tau, power, evaluations, L: tl.constexpr, T: tl.constexpr,
    AGAIN: tl.constexpr = False,
):  # fmt: skip
    """t of rows, and which of them have one. Also returned are 1/τ and n − k. AGAIN is as in
    :func:`iterate`. Of ragged rows, many of which have few entries, t is inf where k is 0, and −FAR
    where k is n."""
    if T.streams or T.ragged:
        n, first, second = over(x, at, n_columns, moment_terms, wide(origin, T.together), 3, T)
        n, first, second = n.to(tl.float32), first.to(tl.float32), second.to(tl.float32)
    else:
        n = origin * 0 + tl.cast(n_columns, tl.float32)
        first, second = _moments(x, at, origin, n_columns, T)
        if any_row(~(second < float("inf")), T.together):
            n, first, second = over(x, at, n_columns, moment_terms, wide(origin, T.together), 3, T)
    inverse = inverse_of(tau)
    scale = inverse * unit(L.cdf)
    complement = n - k
    ok = (k > 0) & (complement > 0) & (tau > 1e-25) & (tau < 1e25) & (second < float("inf"))
    ok = ok & holds(n, complement, power, L.cdf)
    settled = ok & ~ok
    if T.ragged:
        none, all_ = (k == 0) & (k_low == 0), (complement == 0) & (k_low == 0)
        settled = there & (none | all_) & (tau > 1e-25) & (tau < 1e25) & (second < float("inf"))

    per = reciprocal(n)
    offset = first * per
    variance = tl.maximum(second * per - offset * offset, 0.0)
    t, offset, deviation, per_deviation, normal = guess(n, offset, variance, k, tau, power, L.cdf)
    hi = origin + t
    lo = hi * 0
    ok = ok & (tl.abs(hi) < 1e30)
    done = ~(ok & there)
    if L.cdf == LOGISTIC:
        # many entries are undecided for most rows, and then one evaluation of Σy itself is enough
        given = (wide(hi, T.together), wide(lo * scale, T.together), wide(scale, T.together))
        y_sum, f_sum, fy, ff_sum, ffy, fff = over(x, at, n_columns, _ordinary_terms, given, 6, T)
        miss = ((y_sum - k) - k_low).to(tl.float32)
        f_sum, ff_sum, fff = f_sum.to(tl.float32), ff_sum.to(tl.float32), fff.to(tl.float32)
        first_sums = (
            miss,
            miss,
            f_sum,
            2 * fy.to(tl.float32) - f_sum,
            ff_sum,
            2 * ffy.to(tl.float32) - ff_sum,
            fff,
        )
        _, _, beta, gamma, delta, epsilon = series(first_sums, power, L.cdf)
        h, mu = _taylor(miss, f_sum, beta, gamma, delta, epsilon)
        last = (tl.abs(mu) <= SMALL) & (tl.abs(h) <= SHORT) & (8 * f_sum > k) & (k <= complement)
        hi, lo = two_sum(hi, tl.where(done | ~(tl.abs(mu) < 0.7), 0.0, h) * tau)
        done = done | last
    # bounds on any quantile (Cantelli), a little wider than they need to be; and the entries in a τ
    ratio = tl.sqrt(k * reciprocal(complement))
    low = (origin + offset) - 1.001 * deviation * ratio
    high = (origin + offset) + 1.001 * deviation * reciprocal(ratio)
    crowd = n * tl.exp2(normal * normal * (-0.5 * LOG2E)) * 0.3989423 * tau * per_deviation
    hi, lo, solved = iterate(
        x, at, n_columns, (hi, lo, low, high, crowd), done, (n, k, k_low, tau, inverse, power), evaluations,
        L, T, AGAIN,
    )  # fmt: skip
    ok = ok & solved & there
    if T.ragged:
        hi = tl.where(settled, tl.where(none, float("inf"), -FAR), hi)
        lo, ok = tl.where(settled, 0.0, lo), ok | settled
    return hi, lo, ok, inverse, complement
