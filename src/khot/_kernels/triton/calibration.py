"""The parameters of Pareto sampling for given inclusion probabilities, if the sizes of draws vary little.

The inclusion probabilities π(θ) are those of `_kernels.reference.order_sampling`: those of the conditional
Poisson design, weighted by the sum of the coefficients c. Under that design, which is a mixture of
independent trials over the frequencies of their sum,

    E[x_j Σ c x] = Σ_l A_l (r_j Σ c r + c_j r_j (1 − r_j)),    r = p e^(iω)/(1 − p + p e^(iω)),

and likewise for 1 − x_j. Both have few terms, because the variance of the sum is small. θ solves π(θ) = π by
steps θ ← θ + a(logit π − logit π(θ)). The derivative of logit π(θ) has eigenvalues from about 0.95, of many
units, to n/(n − 1), of n equal units that share the variance. Three values of a, one after another, are one
over the points at which Chebyshev's polynomial of that interval is 0. No earlier step has to be kept. Five
steps are usual, and ten are needed where two units share the variance.

Of a row in the memory of a program are four vectors: θ, c, and p and 1 − p of the independent trials.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from khot._kernels.reference import order_sampling
from khot._kernels.triton.fast import LN2, double, total

__all__ = ["LARGEST_VARIANCE", "calibrate", "probability"]

LARGEST_VARIANCE = 4.0  # of a row, for which there are frequencies enough
FREQUENCIES = tl.constexpr(16)
PERIOD = tl.constexpr(31)  # of a sum; sizes so far apart are 15 deviations or more from each other
COS, SIN = tl.constexpr(math.cos(math.pi / 31)), tl.constexpr(math.sin(math.pi / 31))
LEAST = tl.constexpr(0.95)  # of the eigenvalues
ROOT = tl.constexpr(math.cos(math.pi / 6))  # of Chebyshev's third polynomial
ITERATIONS = tl.constexpr(60)
NEAR = tl.constexpr(3e-7)  # the error of π before the last step
CLOSE = tl.constexpr(1e-3)  # and of its logit
SETTLED = tl.constexpr(order_sampling.SETTLED)
SPACING = tl.constexpr(0.375)  # of the integral's nodes
NEGLIGIBLE = tl.constexpr(25.0)  # e^−25 times the greatest value is less than the error that is left
MOST_NODES = tl.constexpr(1600)  # on a side: no exponential overflows
NODES = tl.constexpr(16)  # of the integral, computed together
CENTRING = tl.constexpr(20)  # steps, at most
BIAS = tl.constexpr(1023)  # of the exponent of float64
FARTHEST = tl.constexpr(30.0)  # a longer step would go by the odds of one side alone
SETTLING = tl.constexpr(1e-9)  # the next step would be the square of this
OFF_CENTRE = tl.constexpr(0.3)  # deviations of the sum, which cost no digits
SMALL = tl.constexpr(1e-6)  # a variance that covers rounding errors of the mean


@triton.jit
def probability(x_pointer, column, n, phantom):
    """π, with the phantom unit after the row."""
    p = double(tl.load(x_pointer + column, mask=column < n, other=0.0))
    return tl.where(column == n, phantom, p)


@triton.jit
def _logit(p):
    inside = (p > 0) & (p < 1)
    free = tl.where(inside, p, 0.5)
    return tl.where(inside, tl.log(free / (1 - free)), tl.where(p > 0.5, float("inf"), float("-inf")))


@triton.jit
def _sides(z):
    """σ(z) and 1 − σ(z), both to the last digits."""
    e = tl.exp(-tl.abs(z))
    likely = 1 / (1 + e)
    unlikely = e * likely
    return tl.where(z > 0, likely, unlikely), tl.where(z > 0, unlikely, likely)


@triton.jit
def _clamp(x, most):
    return tl.minimum(tl.maximum(x, -most), most)


@triton.jit
def _centre(x_pointer, n, units, phantom, k, WIDTH: tl.constexpr):
    """The shift s with Σσ(logit π − s) = k, to rounding, and whether no unit is free then.

    What is unlikely is summed on its own for either side of ½, so that no digit is lost where nearly
    everything is certain.
    """
    shift = k * 0
    decided = shift != 0
    tries = 0
    running = tries == 0
    while running:
        zero = tl.zeros((WIDTH,), tl.float64)
        sums = (zero, zero, zero, zero, zero)
        for start in range(0, units, WIDTH):
            z = _logit(probability(x_pointer, start + tl.arange(0, WIDTH), n, phantom)) - shift
            yes, no = _sides(z)
            up = yes > no
            both = yes * no
            sums = (
                sums[0] + tl.where(up, 1.0, 0.0),
                sums[1] + tl.where(up, 0.0, yes), sums[2] + tl.where(up, no, 0.0),
                sums[3] + tl.where(up, 0.0, both), sums[4] + tl.where(up, both, 0.0),
            )  # fmt: skip
        ups, below, above, below_slope, above_slope = total(sums, 1)
        more = ups - k
        decided = (more == 0) & ((below > 0) != (above > 0))
        slope = below_slope + above_slope
        step = _clamp((more + (below - above)) / tl.where(slope > 0, slope, 1.0), 1.0)
        if (more == 0) & (below > 0) & (above > 0):
            step = _clamp(tl.log(below / above) / (below_slope / below + above_slope / above), FARTHEST)
        step = tl.where(decided | (slope == 0), 0.0, step)
        shift += step
        tries += 1
        running = (tl.abs(step) > SETTLING) & (tries < CENTRING)
    return shift, decided


@triton.jit
def _begin(x_pointer, theta_pointer, n, units, phantom, shift, decided, WIDTH: tl.constexpr):
    """Store logit π, shifted, as θ. Returns the variance of the sum, and the odds of the unlikely units' sums
    below and above ½."""
    zero = tl.zeros((WIDTH,), tl.float64)
    sums = (zero, zero, zero)
    for start in range(0, units, WIDTH):
        column = start + tl.arange(0, WIDTH)
        z = _logit(probability(x_pointer, column, n, phantom)) - shift
        z = tl.where(decided, tl.where(z > 0, float("inf"), float("-inf")), z)
        tl.store(theta_pointer + column, z, mask=column < units)
        yes, no = _sides(z)
        odds = tl.exp(-tl.abs(z))
        sums = (
            sums[0] + yes * no,
            sums[1] + tl.where(yes > no, 0.0, odds), sums[2] + tl.where(yes > no, odds, 0.0),
        )  # fmt: skip
    tl.debug_barrier()
    return total(sums, 1)


@triton.jit
def _add_swaps(theta_pointer, units, below, above, WIDTH: tl.constexpr):
    """With a tiny variance π is nearly w times the sum of the other side's odds w, so that the solution is
    nearly w = π/√Σπ."""
    lower = -0.5 * tl.log(tl.where(below > 0, below, 1.0))
    raise_by = 0.5 * tl.log(tl.where(above > 0, above, 1.0))
    for start in range(0, units, WIDTH):
        column = start + tl.arange(0, WIDTH)
        z = tl.load(theta_pointer + column, mask=column < units, other=0.0)
        tl.store(theta_pointer + column, z + tl.where(z > 0, raise_by, lower), mask=column < units)
    tl.debug_barrier()


@triton.jit
def _near(theta_pointer, p_pointer, q_pointer, units, k, offset, WIDTH: tl.constexpr):
    """An offset for which the mean Σσ(θ − offset) is near k, and how many units are certain. Store p and
    1 − p of the units that are random; of all others 0 and 1."""
    tries = 0
    running = tries == 0
    certain = offset
    while running:
        zero = tl.zeros((WIDTH,), tl.float64)
        sums = (zero, zero, zero)
        for start in range(0, units, WIDTH):
            column = start + tl.arange(0, WIDTH)
            z = tl.load(theta_pointer + column, mask=column < units, other=float("-inf"))
            yes, no = _sides(z - offset)
            always = z == float("inf")
            sums = (sums[0] + yes, sums[1] + yes * no, sums[2] + tl.where(always, 1.0, 0.0))
            tl.store(p_pointer + column, tl.where(always, 0.0, yes), mask=column < units)
            tl.store(q_pointer + column, tl.where(always, 1.0, no), mask=column < units)
        mean, variance, certain = total(sums, 1)
        running = (tl.abs(mean - k) > OFF_CENTRE * tl.sqrt(variance + SMALL)) & (tries < CENTRING)
        if running:
            offset += _clamp((mean - k) / variance, 1.0)
        tries += 1
    tl.debug_barrier()
    return offset, certain


@triton.jit
def _random(p_pointer, q_pointer, column, units):
    there = column < units
    p = tl.load(p_pointer + column, mask=there, other=0.0)
    return p, tl.load(q_pointer + column, mask=there, other=1.0)


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _log_of_product(x):
    """Of the numbers in each column, which are > 0. The digits are multiplied and the exponents added: a
    logarithm of each number would take most of the time."""
    bits = x.to(tl.int64, bitcast=True)
    exponents = (bits >> 52) - BIAS
    digits = ((bits & ((1 << 52) - 1)) | (BIAS << 52)).to(tl.float64, bitcast=True)
    product = tl.reduce(digits, 0, _product)
    return tl.log(product) + LN2 * tl.sum(exponents, axis=0).to(tl.float64)


@triton.jit
def _coefficients(p_pointer, q_pointer, c_pointer, units, k, WIDTH: tl.constexpr):
    """Store c, up to one factor: the integral by the trapezoidal rule. The integrand falls off on either side
    of 0, from where nodes are added, first on one side, then on the other, until it is negligible."""
    first, side = 0, k * 0 + 1
    running = first == 0
    while running:
        node = first + tl.arange(0, NODES)
        t = side * SPACING * node.to(tl.float64)
        e = tl.exp(t)
        level = tl.zeros((NODES,), tl.float64)
        for start in range(0, units, WIDTH):
            p, q = _random(p_pointer, q_pointer, start + tl.arange(0, WIDTH), units)
            level += _log_of_product(q[:, None] + p[:, None] * e[None, :])
        depth = level - k * t
        weight = tl.exp(-depth)
        over = (tl.max(depth) > NEGLIGIBLE) | (first > MOST_NODES)
        for start in range(0, units, WIDTH):
            column = start + tl.arange(0, WIDTH)
            p, q = _random(p_pointer, q_pointer, column, units)
            c = tl.sum(weight[:, None] / (q[None, :] + p[None, :] * e[:, None]), axis=0)
            if (first > 0) | (side < 0):
                c += tl.load(c_pointer + column, mask=column < units, other=0.0)
            tl.store(c_pointer + column, tl.where(over & (side < 0), c * q, c), mask=column < units)
        tl.debug_barrier()
        running = (side > 0) | (over == 0)
        first = tl.where(over, 1, first + NODES)
        side = tl.where(over, -side, side)


@triton.jit
def _times(a, b, c, d):
    """The complex product (a + ib)(c + id)."""
    return a * c - b * d, a * d + b * c


@triton.jit
def _half_turns(order):
    """cos and sin of order·π/PERIOD, for orders from 0 to 31. (For all angles, tl.sin takes far more.)"""
    x, y = order.to(tl.float64) * 0 + 1, order.to(tl.float64) * 0
    c, s = tl.zeros((), tl.float64) + COS, tl.zeros((), tl.float64) + SIN
    for bit in tl.static_range(5):
        turned_x, turned_y = _times(x, y, c, s)
        there = (order >> bit) & 1 == 1
        x, y = tl.where(there, turned_x, x), tl.where(there, turned_y, y)
        c, s = _times(c, s, c, s)
    return x, y


@triton.jit
def _factors(p, less, sin):
    """1 − p + p e^(iω), and 1 over it."""
    a = 1 - p * less
    b = p * sin
    size = 1 / (a * a + b * b)
    return a, b, a * size, -b * size


@triton.jit
def _step(
    x_pointer, theta_pointer, p_pointer, q_pointer, c_pointer, n, units, phantom, shift, k, a,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Move θ by one step, `a` times the residual. Returns the greatest error of π(θ) before, and that of its
    logit."""
    order = tl.arange(0, FREQUENCIES)
    cos, sin = _half_turns(order)
    less, sin = 2 * sin * sin, 2 * sin * cos  # 1 − cos ω, without cancellation, and sin ω
    x, y = less * 0 + 1, less * 0
    sum_x, sum_y = less * 0, less * 0
    for start in range(0, units, WIDTH):
        column = start + tl.arange(0, WIDTH)
        p, _ = _random(p_pointer, q_pointer, column, units)
        c = tl.load(c_pointer + column, mask=column < units, other=0.0)
        real, imaginary, u, v = _factors(p[:, None], less[None, :], sin[None, :])
        product_x, product_y = tl.reduce((real, imaginary), 0, _times)
        x, y = _times(x, y, product_x, product_y)
        r_x, r_y = _times(1 - less[None, :], sin[None, :], u, v)
        sum_x += tl.sum((c * p)[:, None] * r_x, axis=0)
        sum_y += tl.sum((c * p)[:, None] * r_y, axis=0)
    c_k, s_k = _half_turns(order * k.to(tl.int32) % PERIOD)
    x, y = _times(x, y, c_k * c_k - s_k * s_k, -2 * s_k * c_k)  # times e^(−iωk)
    x, y = tl.where(order > 0, 2 * x, x), tl.where(order > 0, 2 * y, y)
    sum_x, sum_y = _times(x, y, sum_x, sum_y)
    error, rest = tl.zeros((WIDTH,), tl.float64), tl.zeros((WIDTH,), tl.float64)
    for start in range(0, units, WIDTH):
        column = start + tl.arange(0, WIDTH)
        theta = tl.load(theta_pointer + column, mask=column < units, other=float("-inf"))
        p, q = _random(p_pointer, q_pointer, column, units)
        c = tl.load(c_pointer + column, mask=column < units, other=0.0)
        _, _, u, v = _factors(p[None, :], less[:, None], sin[:, None])
        r_x, r_y = _times(1 - less[:, None], sin[:, None], u, v)
        selected, _ = _times(sum_x[:, None], sum_y[:, None], r_x, r_y)
        left, _ = _times(sum_x[:, None], sum_y[:, None], u, v)
        r_x, r_y = _times(r_x, r_y, u, v)
        both, _ = _times(x[:, None], y[:, None], r_x, r_y)
        cross = c * p * q * tl.sum(both, axis=0)
        yes, no = p * tl.sum(selected, axis=0) + cross, q * tl.sum(left, axis=0) - cross
        known = (tl.abs(theta) < float("inf")) & (yes > 0) & (no > 0)
        yes, no = tl.where(known, yes, 0.5), tl.where(known, no, 0.5)
        goal = tl.where(known, _logit(probability(x_pointer, column, n, phantom)) - shift, 0.0)
        residual = goal - tl.log(yes / no)
        wanted, _ = _sides(goal)
        error = tl.maximum(error, tl.abs(yes / (yes + no) - wanted))
        rest = tl.maximum(rest, tl.abs(residual))
        tl.store(theta_pointer + column, theta + a * residual, mask=column < units)
    tl.debug_barrier()
    return tl.max(error), tl.max(rest)


@triton.jit
def calibrate(x_pointer, n, k, phantom, theta_pointer, WIDTH: tl.constexpr):
    """Store the θ of a row and its phantom unit, ±inf for certain units, in the first of four vectors for
    which there is room. Returns how many units there are: the phantom is none where it is impossible."""
    c_pointer = theta_pointer + n + 1
    p_pointer, q_pointer = c_pointer + n + 1, c_pointer + 2 * (n + 1)
    k = k.to(tl.float64)
    units = tl.where(phantom > 0, n + 1, n)
    shift, decided = _centre(x_pointer, n, units, phantom, k, WIDTH)
    variance, below, above = _begin(x_pointer, theta_pointer, n, units, phantom, shift, decided, WIDTH)
    running = variance >= SETTLED
    if variance < SETTLED:
        _add_swaps(theta_pointer, units, below, above, WIDTH)
    # of equal units, whose eigenvalue is n/(n − 1), all are likely to the half
    greatest = 1 + 1 / tl.maximum(4 * variance - 1, 1.0)
    middle, half = (greatest + LEAST) / 2, (greatest - LEAST) / 2
    offset = shift * 0
    count = 0
    while running:
        offset, certain = _near(theta_pointer, p_pointer, q_pointer, units, k, offset, WIDTH)
        _coefficients(p_pointer, q_pointer, c_pointer, units, k - certain, WIDTH)
        root = tl.where(count % 3 == 0, -ROOT, tl.where(count % 3 == 1, 0.0, ROOT))
        error, rest = _step(
            x_pointer, theta_pointer, p_pointer, q_pointer, c_pointer, n, units, phantom, shift, k - certain,
            1 / (middle + half * root), WIDTH,
        )  # fmt: skip
        count += 1
        running = ((error > NEAR) | (rest > CLOSE)) & (count < ITERATIONS)
    return units
