"""Sums over the entries of a row in float64, a chunk at a time: what :mod:`.float64` finds thresholds with.

BY says what an entry costs. BY_COUNT: each costs one, y = F((x − t)/τ), and what is multiplied by a cost
compiles to what is not. BY_SCORE: w, and y is the same. BY_VALUE: w, and y = F((x − t w)/τ).

A source is where the scores and the costs of a row lie, how far apart its costs are, and how many entries it
has; a threshold is hi, lo, τ and the exponent of the CDF.
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.fast import double, exact_total, plus, plus_exactly, total
from khot._kernels.triton.functions import full_support, median, side

BY = {"count": 0, "score": 1, "value": 2}
BY_COUNT, BY_SCORE, BY_VALUE = (tl.constexpr(i) for i in BY.values())
FARTHEST_Z = tl.constexpr(1e150)  # its square stays finite


# ------------------------------------------------------------------------------------ of an entry


@triton.jit
def load(source, start, BY: tl.constexpr, WIDTH: tl.constexpr):
    """Scores and costs. What is masked, or not there, has the score −inf and costs nothing."""
    x_at, cost_at, cost_column, n = source
    column = start + tl.arange(0, WIDTH)
    x = double(tl.load(x_at + column, mask=column < n, other=float("-inf")))
    if BY == BY_COUNT:
        return x, 1.0  # a constant, which the compiler multiplies by
    else:
        w = double(tl.load(cost_at + column.to(tl.int64) * cost_column, mask=column < n, other=0.0))
        return x, tl.where(x == float("-inf"), 0.0, w)


@triton.jit
def cotangent(grad_at, grad_column, start, n, WIDTH: tl.constexpr):
    """The incoming gradients of the same entries."""
    column = start + tl.arange(0, WIDTH)
    return double(tl.load(grad_at + column.to(tl.int64) * grad_column, mask=column < n, other=0.0))


@triton.jit
def standardized(x, w, hi, lo, tau, CDF: tl.constexpr, BY: tl.constexpr):
    """z = (x − t a)/τ, of finite t; and 1 − z, where the support ends at 1."""
    if BY == BY_VALUE:
        off, low = tl.fma(-hi, w, x), lo * w
    else:
        off, low = x - hi, lo
    z = (off - low) / tau
    return z, (z if full_support(CDF) else ((tau - off) + low) / tau)


@triton.jit
def _levels(x, w, place, tau, BY: tl.constexpr):
    """The thresholds at which entries have z = place."""
    level = x - place * tau
    return level / tl.where(w > 0, w, 1.0) if BY == BY_VALUE else level


@triton.jit
def _parted(x, w, threshold, CDF: tl.constexpr, BY: tl.constexpr):
    """Of what is paid for: which entries are selected (z > median), which are not, and z."""
    hi, lo, tau, power = threshold
    counts = (tl.abs(x) < float("inf")) & (w > 0)
    z, _ = standardized(tl.where(counts, x, 0.0), w, hi, lo, tau, CDF, BY)
    above = z > median(power, CDF)
    return counts & above, counts & ~above, z


# ------------------------------------------------------------------------------- over all entries


@triton.jit
def _plus_costs(spent, low, chosen, w, BY: tl.constexpr):
    """The sum of costs, as a pair, with what the chosen ones cost. A count is exact without its low part."""
    if BY == BY_COUNT:
        return spent + tl.where(chosen, 1.0, 0.0), low
    else:
        return plus_exactly(spent, low, tl.where(chosen, w, 0.0))


@triton.jit
def _total_costs(spent, low, BY: tl.constexpr):
    if BY == BY_COUNT:
        return tl.sum(spent, axis=0), 0.0
    else:
        return exact_total(spent, low)


@triton.jit
def facts(source, BY: tl.constexpr, WIDTH: tl.constexpr):
    """How many entries are bad; the costs of finite entries, and of those that are +inf, as pairs; and
    moments of the finite ones, weighted with the costs."""
    zero = tl.zeros((WIDTH,), tl.float64)
    free, free_low, pinned, pinned_low = zero, zero, zero, zero
    held = (zero, zero, zero)
    for start in range(0, source[3], WIDTH):
        x, w = load(source, start, BY, WIDTH)
        finite_ = tl.abs(x) < float("inf")
        # not "~": of a cost that is a constant Triton makes an integer of it
        bad = (x != x) | ((x != float("-inf")) & ((w < 0) | (w == float("inf")) | (w != w)))
        d = tl.where(finite_, x, 0.0)
        paid = w * d
        free, free_low = _plus_costs(free, free_low, finite_, w, BY)
        pinned, pinned_low = _plus_costs(pinned, pinned_low, x == float("inf"), w, BY)
        held = plus(held, (tl.where(bad, 1.0, 0.0).to(tl.float64), paid, paid * d))
    bad, mean, square = total(held, 1)
    return bad, _total_costs(free, free_low, BY), _total_costs(pinned, pinned_low, BY), mean, square


@triton.jit
def evaluate(
    source, threshold, near_up, near_down, CDF: tl.constexpr, BY: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """What selected entries (z > median, or +inf) cost, as a pair; and what they lack, what the others spend,
    and the slopes of both, relative to near_up and near_down (:func:`.functions.side`)."""
    hi, lo, tau, power = threshold
    zero = tl.zeros((WIDTH,), tl.float64)
    spent, spent_low = zero, zero
    held = (zero, zero, zero, zero)
    for start in range(0, source[3], WIDTH):
        x, w = load(source, start, BY, WIDTH)
        counts = (tl.abs(x) < float("inf")) & (w > 0)
        z, one_minus_z = standardized(tl.where(counts, x, 0.0), w, hi, lo, tau, CDF, BY)
        above, size = z > median(power, CDF), tl.abs(z)
        near = tl.where(above, near_up, near_down)
        tail, density = side(z, one_minus_z, above, near, near - size, power, CDF)
        tail, slope = tl.where(counts, tail * w, 0.0), tl.where(counts, density * w, 0.0)
        if BY == BY_VALUE:
            slope *= w
        chosen = (counts & above) | (x == float("inf"))
        spent, spent_low = _plus_costs(spent, spent_low, chosen, w, BY)
        held = plus(
            held,
            (
                tl.where(above, tail, 0.0), tl.where(above, 0.0, tail),
                tl.where(above, slope, 0.0), tl.where(above, 0.0, slope),
            ),
        )  # fmt: skip
    return _total_costs(spent, spent_low, BY), total(held, 1)


@triton.jit
def sums(
    terms: tl.constexpr, given, COUNT: tl.constexpr, source, BY: tl.constexpr, WIDTH: tl.constexpr,
    grad_at=None, grad_column=0,
):  # fmt: skip
    """The sums over a row of the COUNT members of terms(x, w, given), or of terms(x, w, v, given) with the
    cotangent v."""
    held = ()
    for _ in tl.static_range(COUNT):
        held = held + (tl.zeros((WIDTH,), tl.float64),)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(0, source[3], WIDTH):
        x, w = load(source, start, BY, WIDTH)
        if grad_at is None:
            held = plus(held, terms(x, w, given))
        else:
            held = plus(held, terms(x, w, cotangent(grad_at, grad_column, start, source[3], WIDTH), given))
    return total(held, 1)


@triton.jit
def least(
    places: tl.constexpr, given, COUNT: tl.constexpr, source, BY: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The least of each of the COUNT members of places(x, w, given)."""
    held = ()
    for _ in tl.static_range(COUNT):
        held = held + (tl.full((WIDTH,), float("inf"), tl.float64),)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(0, source[3], WIDTH):
        x, w = load(source, start, BY, WIDTH)
        seen, lower = places(x, w, given), ()
        for i in tl.static_range(COUNT):
            lower = lower + (tl.minimum(held[i], seen[i]),)  # type: ignore[assignment]  # noqa: RUF005
        held = lower
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.min(held[i], axis=0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


# ------------------------------------------------------------- what is summed, or of which the least


@triton.jit
def cost_moments(x, w, given):
    w = tl.where(tl.abs(x) < float("inf"), w, 0.0)
    wx = w * tl.where(w > 0, x, 0.0)
    return w * w, w * wx, w * w * w


@triton.jit
def levels_of_share(x, w, given):
    """The levels at which entries have a share of what may be spent, with room for rounding: least, and
    greatest with the sign changed; and the greatest cost, likewise. Given are z of that share, τ, the error
    of z, and BY."""
    quantile, tau, error = given[:3]
    BY: tl.constexpr = given[3]
    counts = (tl.abs(x) < float("inf")) & (w > 0)
    room = 4e-15 * tl.abs(x) + (error + 8e-15 * (1 + tl.abs(quantile))) * tau
    low = _levels(x - room, w, quantile, tau, BY)
    high = _levels(x + room, w, quantile, tau, BY)
    return (
        tl.where(counts, low, float("inf")), tl.where(counts, -high, float("inf")),
        tl.where(counts, -w, float("inf")),
    )  # fmt: skip


@triton.jit
def distances(x, w, given):
    """|z| of what is selected, and of the rest. Given are the threshold, the CDF and BY."""
    above, below, z = _parted(x, w, given[0], given[1], given[2])
    return tl.where(above, z, float("inf")), tl.where(below, -z, float("inf"))


@triton.jit
def beside_levels(x, w, given):
    """Of compact support: the levels next to t at which y leaves 1, and 0 with the sign changed. Given as for
    :func:`distances`."""
    BY: tl.constexpr = given[2]
    above, below, _ = _parted(x, w, given[0], given[1], BY)
    level = _levels(x, w, tl.where(above, 1.0, 0.0), given[0][2], BY)
    return tl.where(above, level, float("inf")), tl.where(below, -level, float("inf"))


@triton.jit
def finite(near):
    """|z| of the nearest entry; 0 if there is none."""
    return tl.where(near < float("inf"), tl.minimum(near, FARTHEST_Z), 0.0)


@triton.jit
def beside(
    source, threshold, CDF: tl.constexpr, BY: tl.constexpr, WIDTH: tl.constexpr, grad_at=None, grad_column=0
):
    """Of compact support: the level next to t at which selected entries leave y = 1, their score, their cost,
    their mean slope a, and Σ a v for the cotangent v, if there is one; and the same where others leave 0."""
    up, down = least(beside_levels, (threshold, CDF, BY), 2, source, BY, WIDTH)
    zero = tl.zeros((WIDTH,), tl.float64)
    held = (zero, zero, zero, zero, zero, zero)
    up_x, down_x = zero - float("inf"), zero - float("inf")
    for start in range(0, source[3], WIDTH):
        x, w = load(source, start, BY, WIDTH)
        level, other = beside_levels(x, w, (threshold, CDF, BY))
        at_up, at_down = (level == up) & (level < float("inf")), (other == down) & (other < float("inf"))
        a = w if BY == BY_VALUE else 1.0
        v = zero
        if grad_at is not None:
            v = cotangent(grad_at, grad_column, start, source[3], WIDTH)
        up_x = tl.maximum(up_x, tl.where(at_up, x, float("-inf")))
        down_x = tl.maximum(down_x, tl.where(at_down, x, float("-inf")))
        held = plus(
            held,
            (
                tl.where(at_up, w, 0.0), tl.where(at_down, w, 0.0),
                tl.where(at_up, w * a, 0.0), tl.where(at_down, w * a, 0.0),
                tl.where(at_up, a * v, 0.0), tl.where(at_down, a * v, 0.0),
            ),
        )  # fmt: skip
    up_cost, down_cost, up_paid, down_paid, up_priced, down_priced = total(held, 1)
    up_a, down_a = (
        up_paid / tl.where(up_cost > 0, up_cost, 1.0),
        down_paid / tl.where(down_cost > 0, down_cost, 1.0),
    )
    return (
        (up, tl.max(up_x, axis=0), up_cost, up_a, up_priced),
        (-down, tl.max(down_x, axis=0), down_cost, down_a, down_priced),
    )  # fmt: skip
