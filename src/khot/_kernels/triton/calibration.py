"""The parameters of Pareto sampling for given inclusion probabilities, if the sizes of draws vary little.

The inclusion probabilities π(θ) are those of `_kernels.reference.order_sampling`: those of the conditional
Poisson design, weighted by the sum of the coefficients c. Under that design, which is a mixture of
independent trials over the frequencies of their sum,

    E[x_j Σ c x] = Σ_l A_l (r_j Σ c r + c_j r_j (1 − r_j)),    r = p e^(iω)/(1 − p + p e^(iω)),

and likewise for 1 − x_j. Both have few terms, because the variance of the sum is small. θ solves π(θ) = π by
steps θ ← θ + logit π − logit π(θ), each combined with the one before it (Anderson acceleration of depth 1).
Three or four steps are usual, and five are needed where two units share the variance.

What is computed for each unit and node or frequency is in float32, whose errors are 1e-7 of a sum. Where the
variance is less than FINE, they would be too much of the probabilities, and all is in float64.

Of a row in the memory of a program are two vectors in float64, θ and logit π, and six in the precision of
the rest: p and 1 − p of the independent trials, c, and what acceleration needs.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from khot._kernels.reference import order_sampling
from khot._kernels.triton.fast import double, reciprocal, reciprocal64, total

VECTORS = tl.constexpr(8)  # of a row with its phantom unit, in float64
LARGEST_VARIANCE = 4.0  # of a row, for which there are frequencies enough
FINE = tl.constexpr(0.02)
FREQUENCIES = tl.constexpr(8)
PERIOD = tl.constexpr(15)  # of a sum; sizes so far apart are seven deviations or more from each other
COS, SIN = tl.constexpr(math.cos(math.pi / 15)), tl.constexpr(math.sin(math.pi / 15))
ITERATIONS = tl.constexpr(30)
NEAR = tl.constexpr(2e-6)  # an error of π that a step makes at least three times smaller
CLOSE = tl.constexpr(1e-3)  # and one of its logit
SETTLED = tl.constexpr(order_sampling.SETTLED)
# of the integral's nodes, at most and in deviations of the integrand, which is like a normal density
SPACING, NORMAL_SPACING = tl.constexpr(0.8), tl.constexpr(0.9)
NEGLIGIBLE = tl.constexpr(14.0)  # e^−14 times the greatest value is less than the error that is left
NODES = tl.constexpr(16)  # of the integral, computed together: 8 on either side
MOST_NODES = tl.constexpr(100)  # on a side: no exponential overflows
CENTRING = tl.constexpr(20)  # steps, at most
FARTHEST = tl.constexpr(30.0)  # a longer step would go by the odds of one side alone
SETTLING = tl.constexpr(1e-9)  # a step that need not be made
OFF_CENTRE = tl.constexpr(0.3)  # deviations of the sum, which cost no digits
SMALL = tl.constexpr(1e-6)  # a variance that covers rounding errors of the mean


@triton.jit
def _probability(x_pointer, column, n, phantom):
    """π, with the phantom unit after the row."""
    p = double(tl.load(x_pointer + column, mask=column < n, other=0.0))
    return tl.where(column == n, phantom, p)


@triton.jit
def _logit(p):
    inside = (p > 0) & (p < 1)
    free = tl.where(inside, p, 0.5)
    return tl.where(inside, tl.log(free / (1 - free)), tl.where(p > 0.5, float("inf"), float("-inf")))


@triton.jit
def _inverse(x):
    return reciprocal(x) if x.dtype == tl.float32 else reciprocal64(x)


@triton.jit
def sides(z):
    """σ(z) and 1 − σ(z), both to the last digits."""
    e = tl.exp(-tl.abs(z))
    likely = _inverse(1 + e)
    unlikely = e * likely
    return tl.where(z > 0, likely, unlikely), tl.where(z > 0, unlikely, likely)


@triton.jit
def clamp(x, most):
    return tl.minimum(tl.maximum(x, -most), most)


@triton.jit
def _centre(x_pointer, theta_pointer, goal_pointer, n, units, phantom, k, shift, WIDTH: tl.constexpr):
    """Store logit π − s, with the shift s that makes Σσ(logit π − s) = k, to rounding; it is ±inf where no
    unit is free then. Returns the variance of the sum, Σσ of the units below ½ and Σ(1 − σ) of those above,
    and how many units are certain.

    What is unlikely is summed on its own for either side of ½, so that no digit is lost where nearly
    everything is certain.
    """
    variance, below, above, certain = shift * 0, shift * 0, shift * 0, shift * 0
    decided = shift != shift
    tries = 0
    running = tries == 0
    while running:
        zero = tl.zeros((WIDTH,), tl.float64)
        sums = (zero, zero, zero, zero, zero, zero)
        for start in range(0, units, WIDTH):
            column = start + tl.arange(0, WIDTH)
            z = _logit(_probability(x_pointer, column, n, phantom)) - shift
            z = tl.where(decided, tl.where(z > 0, float("inf"), float("-inf")), z)
            tl.store(theta_pointer + column, z, mask=column < units)
            tl.store(goal_pointer + column, z, mask=column < units)
            yes, no = sides(z)
            up = yes > no
            both = yes * no
            sums = (
                sums[0] + tl.where(up, 1.0, 0.0),
                sums[1] + tl.where(up, 0.0, yes), sums[2] + tl.where(up, no, 0.0),
                sums[3] + tl.where(up, 0.0, both), sums[4] + tl.where(up, both, 0.0),
                sums[5] + tl.where(z == float("inf"), 1.0, 0.0),
            )  # fmt: skip
        ups, below, above, below_slope, above_slope, certain = total(sums, 1)
        variance = below_slope + above_slope
        more = ups - k
        was, decided = decided, (more == 0) & ((below > 0) != (above > 0))
        step = clamp((more + (below - above)) / tl.where(variance > 0, variance, 1.0), 1.0)
        if (more == 0) & (below > 0) & (above > 0) & (tl.abs(below - above) > SETTLING * variance):
            step = clamp(tl.log(below / above) / (below_slope / below + above_slope / above), FARTHEST)
        step = tl.where(decided | (variance == 0), 0.0, step)
        tries += 1
        # of units that are decided once more, to store what they are
        running = ((tl.abs(step) > SETTLING) | (decided & ~was)) & (tries < CENTRING)
        shift += tl.where(running, step, 0.0)
    tl.debug_barrier()
    return variance, below, above, certain


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
def _near(
    theta_pointer, p_pointer, q_pointer, units, k, offset, WIDTH: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """An offset for which the mean Σσ(θ − offset) of the random units is near k, the variance, and how many
    of them are likely. Store their p and 1 − p; of all others 0 and 1."""
    tries = 0
    running = tries == 0
    variance, ups = offset.to(COMPUTE), offset.to(COMPUTE)
    while running:
        zero = tl.zeros((WIDTH,), COMPUTE)
        sums = (zero, zero, zero)
        for start in range(0, units, WIDTH):
            column = start + tl.arange(0, WIDTH)
            z = tl.load(theta_pointer + column, mask=column < units, other=float("-inf"))
            yes, no = sides((z - offset).to(COMPUTE))
            yes, no = tl.where(z == float("inf"), 0.0, yes), tl.where(z == float("inf"), 1.0, no)
            sums = (sums[0] + yes, sums[1] + yes * no, sums[2] + tl.where(yes > no, 1.0, 0.0))
            tl.store(p_pointer + column, yes, mask=column < units)
            tl.store(q_pointer + column, no, mask=column < units)
        mean, variance, ups = total(sums, 1)
        more = mean - k.to(COMPUTE)
        running = (tl.abs(more) > OFF_CENTRE * tl.sqrt(variance + SMALL)) & (tries < CENTRING)
        if running:
            offset += clamp(more / variance, 1.0)
        tries += 1
    tl.debug_barrier()
    return offset, variance, ups


@triton.jit
def _random(p_pointer, q_pointer, column, units):
    there = column < units
    p = tl.load(p_pointer + column, mask=there, other=0.0)
    return p, tl.load(q_pointer + column, mask=there, other=1.0)


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _factor(p, q, e, inverse):
    """q + p·e of unlikely units, and as much divided by e of likely ones, so that products of many are in
    range; and what they have to be multiplied by."""
    up = p > q
    return tl.where(up, p, q) + tl.where(up, q, p) * tl.where(up, inverse, e), tl.where(up, inverse, 1.0)


@triton.jit
def _coefficients(
    p_pointer, q_pointer, c_pointer, units, k, variance, ups, WIDTH: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """Store c, up to one factor: the integral by the trapezoidal rule. The integrand falls off on either side
    of 0, from where nodes are added on both sides until it is negligible."""
    spacing = tl.minimum((1 / tl.sqrt(variance)) * NORMAL_SPACING, SPACING)
    index = tl.arange(0, NODES)
    first = 0
    running = first == 0
    while running:
        side = tl.where(index < NODES // 2, -1 - first - index, first + index - NODES // 2)
        t = side.to(COMPUTE) * spacing
        e = tl.exp(t)
        inverse = _inverse(e)
        product = t * 0 + 1
        for start in range(0, units, WIDTH):
            p, q = _random(p_pointer, q_pointer, start + tl.arange(0, WIDTH), units)
            factor, _ = _factor(p[:, None], q[:, None], e[None, :], inverse[None, :])
            product *= tl.reduce(factor, 0, _product)
        depth = tl.log(product) - (k.to(COMPUTE) - ups) * t
        weight = tl.exp(-depth)
        last = index % (NODES // 2) == NODES // 2 - 1
        over = (tl.min(tl.where(last, depth, float("inf"))) > NEGLIGIBLE) | (first >= MOST_NODES)
        for start in range(0, units, WIDTH):
            column = start + tl.arange(0, WIDTH)
            p, q = _random(p_pointer, q_pointer, column, units)
            factor, scale = _factor(p[None, :], q[None, :], e[:, None], inverse[:, None])
            c = tl.sum(weight[:, None] * scale * _inverse(factor), axis=0)
            if first > 0:
                c += tl.load(c_pointer + column, mask=column < units, other=0.0)
            tl.store(c_pointer + column, tl.where(over, c * q, c), mask=column < units)
        tl.debug_barrier()
        running = over == 0
        first += NODES // 2


@triton.jit
def times(a, b, c, d):
    """The complex product (a + ib)(c + id)."""
    return a * c - b * d, a * d + b * c


@triton.jit
def _half_turns(order):
    """cos and sin of order·π/PERIOD, for orders from 0 to 15. (For all angles, tl.sin takes far more.)"""
    x, y = order.to(tl.float64) * 0 + 1, order.to(tl.float64) * 0
    c, s = tl.zeros((), tl.float64) + COS, tl.zeros((), tl.float64) + SIN
    for bit in tl.static_range(4):
        turned_x, turned_y = times(x, y, c, s)
        there = (order >> bit) & 1 == 1
        x, y = tl.where(there, turned_x, x), tl.where(there, turned_y, y)
        c, s = times(c, s, c, s)
    return x, y


@triton.jit
def _turns(k):
    """Of each frequency ω: 1 − cos ω, without cancellation, sin ω, and its weight times e^(−iωk)."""
    order = tl.arange(0, FREQUENCIES)
    cos, sin = _half_turns(order)
    c, s = _half_turns(order * (k.to(tl.int32) % PERIOD) % PERIOD)
    weight = tl.where(order > 0, 2.0, 1.0)
    return 2 * sin * sin, 2 * sin * cos, weight * (c * c - s * s), -2 * weight * s * c


@triton.jit
def _factors(p, less, sin):
    """1 − p + p e^(iω), and 1 over it."""
    a = 1 - p * less
    b = p * sin
    size = _inverse(a * a + b * b)
    return a, b, a * size, -b * size


@triton.jit
def _product_and_sums(x, y, a, b, other_x, other_y, other_a, other_b):
    x, y = times(x, y, other_x, other_y)
    return x, y, a + other_a, b + other_b


@triton.jit
def _sums_and_most(a, b, c, d, other_a, other_b, other_c, other_d):
    return a + other_a, b + other_b, tl.maximum(c, other_c), tl.maximum(d, other_d)


@triton.jit
def _residuals(
    goal_pointer, p_pointer, q_pointer, c_pointer, residual_pointer, turned_pointer, units, turns, steps,
    WIDTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store logit π − logit π(θ), and how much it changed since the last step. Returns the scalar product of
    both and the square of the change, by the variance of each unit, and the greatest error of π(θ) and of its
    logit."""
    less, sin, turn_x, turn_y = (
        turns[0].to(COMPUTE), turns[1].to(COMPUTE), turns[2].to(COMPUTE), turns[3].to(COMPUTE)
    )  # fmt: skip
    x, y = less * 0 + 1, less * 0
    sum_x, sum_y = less * 0, less * 0
    for start in range(0, units, WIDTH):
        column = start + tl.arange(0, WIDTH)
        p, _ = _random(p_pointer, q_pointer, column, units)
        c = tl.load(c_pointer + column, mask=column < units, other=0.0)
        real, imaginary, u, v = _factors(p[:, None], less[None, :], sin[None, :])
        r_x, r_y = times(1 - less[None, :], sin[None, :], u, v)
        found = (real, imaginary, (c * p)[:, None] * r_x, (c * p)[:, None] * r_y)
        x, y, sum_x, sum_y = _product_and_sums(x, y, sum_x, sum_y, *tl.reduce(found, 0, _product_and_sums))
    x, y = times(x, y, turn_x, turn_y)
    sum_x, sum_y = times(x, y, sum_x, sum_y)
    zero = tl.zeros((WIDTH,), COMPUTE)
    along, length, error, greatest = zero, zero, zero, zero
    for start in range(0, units, WIDTH):
        column = start + tl.arange(0, WIDTH)
        there = column < units
        goal = tl.load(goal_pointer + column, mask=there, other=float("-inf")).to(COMPUTE)
        p, q = _random(p_pointer, q_pointer, column, units)
        c = tl.load(c_pointer + column, mask=there, other=0.0)
        before = tl.load(residual_pointer + column, mask=there & (steps > 0), other=0.0)
        _, _, u, v = _factors(p[None, :], less[:, None], sin[:, None])
        r_x, r_y = times(1 - less[:, None], sin[:, None], u, v)
        selected, _ = times(sum_x[:, None], sum_y[:, None], r_x, r_y)
        left, _ = times(sum_x[:, None], sum_y[:, None], u, v)
        r_x, r_y = times(r_x, r_y, u, v)
        both, _ = times(x[:, None], y[:, None], r_x, r_y)
        selected, left, both = total((selected, left, both), 1)
        cross = c * p * q * both
        yes, no = p * selected + cross, q * left - cross
        known = (tl.abs(goal) < float("inf")) & (yes > 0) & (no > 0)
        yes, no = tl.where(known, yes, 0.5), tl.where(known, no, 0.5)
        goal = tl.where(known, goal, 0.0)
        residual = goal - tl.log(yes / no)
        wanted, _ = sides(goal)
        turned = residual - before
        along += p * q * turned * residual
        length += p * q * turned * turned
        error = tl.maximum(error, tl.abs(yes / (yes + no) - wanted))
        greatest = tl.maximum(greatest, tl.abs(residual))
        tl.debug_barrier()  # the last residuals may be read by several threads
        tl.store(residual_pointer + column, residual, mask=there)
        tl.store(turned_pointer + column, turned, mask=there)
    tl.debug_barrier()
    return tl.reduce((along, length, error, greatest), 0, _sums_and_most)


@triton.jit
def _move(
    theta_pointer, residual_pointer, turned_pointer, move_pointer, units, back, steps, WIDTH: tl.constexpr
):  # fmt: skip
    """Move θ by the residual, less what the last move and the change since then say of it."""
    for start in range(0, units, WIDTH):
        column = start + tl.arange(0, WIDTH)
        there = column < units
        theta = tl.load(theta_pointer + column, mask=there, other=0.0)
        turned = tl.load(turned_pointer + column, mask=there, other=0.0)
        move = tl.load(move_pointer + column, mask=there & (steps > 0), other=0.0)
        move = tl.load(residual_pointer + column, mask=there, other=0.0) - back * (move + turned)
        tl.store(move_pointer + column, move, mask=there)
        tl.store(theta_pointer + column, theta + move, mask=there)
    tl.debug_barrier()


@triton.jit
def _solve(theta_pointer, goal_pointer, pointer, n, units, k, WIDTH: tl.constexpr, COMPUTE: tl.constexpr):
    """Move θ to where π(θ) = π, of which the units that are not certain make k."""
    size = n + 1
    p_pointer, q_pointer, c_pointer = pointer, pointer + size, pointer + 2 * size
    residual_pointer, turned_pointer, move_pointer = (
        pointer + 3 * size,
        pointer + 4 * size,
        pointer + 5 * size,
    )
    turns = _turns(k)
    offset, steps = k * 0, 0
    running = steps == 0
    while running:
        offset, variance, ups = _near(theta_pointer, p_pointer, q_pointer, units, k, offset, WIDTH, COMPUTE)
        _coefficients(p_pointer, q_pointer, c_pointer, units, k, variance, ups, WIDTH, COMPUTE)
        along, length, error, greatest = _residuals(
            goal_pointer, p_pointer, q_pointer, c_pointer, residual_pointer, turned_pointer, units, turns,
            steps, WIDTH, COMPUTE,
        )  # fmt: skip
        back = tl.where((steps > 0) & (length > 0), along / tl.where(length > 0, length, 1.0), 0.0)
        _move(theta_pointer, residual_pointer, turned_pointer, move_pointer, units, back, steps, WIDTH)
        steps += 1
        running = ((error > NEAR) | (greatest > CLOSE)) & (steps < ITERATIONS)


@triton.jit
def calibrate(
    x_pointer, n, k, phantom, shift, variance, numbers_pointer, singles_pointer, WIDTH: tl.constexpr
):  # fmt: skip
    """Store the θ of a row and its phantom unit, ±inf for certain units, in the first of the VECTORS for
    which there is room; `shift` is one by which Σπ is nearly k, and `variance` Σπ(1 − π). Returns how many
    units there are: the phantom is none where it is impossible."""
    k = k.to(tl.float64)
    size = n + 1
    goal_pointer = numbers_pointer + size
    units = tl.where(phantom > 0, size, n)
    coarse = variance >= FINE
    variance, below, above, certain = _centre(
        x_pointer, numbers_pointer, goal_pointer, n, units, phantom, k, tl.where(coarse, shift, 0.0), WIDTH
    )
    k -= certain
    if variance < SETTLED:
        _add_swaps(numbers_pointer, units, below, above, WIDTH)
    elif coarse:
        _solve(numbers_pointer, goal_pointer, singles_pointer + 4 * size, n, units, k, WIDTH, tl.float32)
    else:
        _solve(numbers_pointer, goal_pointer, numbers_pointer + 2 * size, n, units, k, WIDTH, tl.float64)
    return units
