"""The soft top-k of rows that stay on chip, in float32, for float32 and narrower scores.

One read, few evaluations of the soft count, one write: with the logistic CDF most rows need one evaluation at
τ of the scores' own scale. The first guess comes from the row's mean and variance; an evaluation yields the
first five derivatives of the count, and the step to the root of their Taylor polynomial is the last one if it
is short. Far from the root the step comes from a model of the count, inside a bracket. A threshold in a gap
wider than the density reaches has a closed form, except for the normal CDF. What depends on the CDF is in
:mod:`.terms`.

The rows for which that does not suffice (no answer, infinite scores, a temperature out of range, no
convergence) are solved again, in the same program, by the float64 solver of :mod:`.solver`, a chunk at a
time: a second launch would cost more than a short row takes.

t is the unevaluated sum of two float32 numbers, and k too: a fractional k rounded to float32 would cost up to
6e-6 in y.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.triton import layout
from khot._kernels.triton.fast import (
    LN2,
    LOG2E,
    any_row,
    log2,
    plus,
    reciprocal,
    split,
    total,
    two_sum,
    wide,
    with_sign,
)
from khot._kernels.triton.functions import (
    LAPLACE,
    LOG,
    LOGISTIC,
    NORMAL,
    OUTPUTS,
    chunks,
    full_support,
    log_F,
    median,
    pair,
)
from khot._kernels.triton.solver import add_statistics, add_sums, begin, take_step, write_chunk
from khot._kernels.triton.terms import hard_count, moment_quantile, series, term_count, terms, unit, value

__all__ = [
    "FLUSH",
    "KERNELS",
    "POWER",
    "entries",
    "inside",
    "load_rows",
    "number64",
    "numbers",
    "place_rows",
    "serves",
    "soft_topk",
    "solve_rows",
]

# The CDFs besides the logistic one, for rows that stay on chip. The power is not among them: where few
# entries are undecided, the step for compact support takes more evaluations than the older kernel's.
SERVED = {"laplace", "uniform", "normal"}
POWER = tl.constexpr(1.0)  # what the functions of all CDFs are given: the exponent of z, which only one needs
EVALUATIONS = 24  # at most, before a row is left to the float64 solver

# The Taylor polynomial of degree 5 is trusted for steps of up to this many τ: the rest of the series is below
# 1.6e-7 of the sum of densities there (logistic). Laplace's density has a kink, which the polynomial does not
# follow: the error is up to half the square of the step.
SHORT = tl.constexpr(0.2)
SHORT_NORMAL = tl.constexpr(0.15)
SHORT_KINKED = tl.constexpr(3e-4)
# and for misses of up to this many times the sum of densities; for compact support, whose polynomial ends
# wherever an entry enters or leaves the support, the miss itself has to be as small as rounding leaves it
SMALL = tl.constexpr(0.3)
SMALL_COMPACT = tl.constexpr(3e-7)
UNDECIDED = tl.constexpr(1e-30)  # a sum of densities below which no float32 step is to be trusted
RESCUE_EVALUATIONS = tl.constexpr(64)
FLUSH = tl.constexpr(16)  # steps of a row that streams past between additions in float64


# ------------------------------------------------------------------------------- what a program holds


@triton.jit
def numbers(pointer, stride, high, low, row, there):
    """A number of each row as two float32 ones; without a pointer they came by value, the same for all."""
    if pointer is None:
        nothing = row.to(tl.float32) * 0
        return nothing + high, nothing + low
    else:
        return split(tl.load(pointer + row * stride, mask=there, other=1.0).to(tl.float64))


@triton.jit
def number64(pointer, stride, high, low, row):
    """The number of one row in float64."""
    if pointer is None:
        return tl.zeros((), tl.float64) + high + low
    else:
        return tl.load(pointer + row * stride).to(tl.float64)


@triton.jit
def place_rows(rows, TOGETHER: tl.constexpr):
    """The program's rows, and which of them there are."""
    if TOGETHER == 1:
        row = tl.program_id(0).to(tl.int64)
    else:
        row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    return row, row < rows


@triton.jit
def entries(row, stride, column, TOGETHER: tl.constexpr):
    """Where the entries of rows lie."""
    if TOGETHER == 1:
        return row * stride + column
    else:
        return row[:, None] * stride + column[None, :]


@triton.jit
def inside(there, column, n, TOGETHER: tl.constexpr, EXACT: tl.constexpr):
    """Which entries there are."""
    if EXACT and TOGETHER > 1:
        return there[:, None]
    else:
        # neither "&" nor a broadcast: Triton's interpreter makes integers of scalar flags
        present = column >= 0 if EXACT else before(column, n, TOGETHER)
        return tl.where(present, wide(there, TOGETHER), False)


@triton.jit
def before(column, n, TOGETHER: tl.constexpr):
    """Which columns a row has."""
    if TOGETHER == 1:
        return column < n
    else:
        return (column < n)[None, :]


@triton.jit
def load_rows(
    at, there, n,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The entries of the rows, in pieces that a thread holds side by side: they are summed first."""
    column = tl.arange(0, WIDTH)
    x = ()
    for i in tl.static_range(PIECES):
        valid = inside(there, column + i * WIDTH, n, TOGETHER, EXACT)
        piece = tl.load(at + i * WIDTH, mask=valid, other=float("-inf")).to(tl.float32)
        x = x + (piece,)  # type: ignore[assignment]  # noqa: RUF005
    return x


# ------------------------------------------------------------------------------------- sums over entries


@triton.jit
def over(
    x, at, n, terms: tl.constexpr, given, COUNT: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """The sums over a row of the COUNT members of terms(x, given): of the pieces in x, or of what is at `at`.

    A row that streams past leaves its sums in float64: they are flushed often enough for float32 not to lose
    its digits to the many entries that a thread adds up.
    """
    if STREAM:
        column = tl.arange(0, WIDTH)
        STEP: tl.constexpr = PIECES * WIDTH
        sums = ()
        for _ in tl.static_range(COUNT):
            sums = sums + (tl.zeros((), tl.float64),)  # type: ignore[assignment]  # noqa: RUF005
        for begin_ in range(0, n, FLUSH * STEP):
            part = ()
            for _ in tl.static_range(COUNT):
                part = part + (tl.zeros((WIDTH,), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            for start in range(begin_, tl.minimum(n, begin_ + FLUSH * STEP), STEP):
                held = ()
                for i in tl.static_range(PIECES):  # all loads first
                    valid = column + (start + i * WIDTH) < n
                    piece = tl.load(at + (start + i * WIDTH), mask=valid, other=float("-inf"))
                    held = held + (piece.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
                for i in tl.static_range(PIECES):
                    part = plus(part, terms(held[i], given))
            part = total(part, 1)
            sums = plus(sums, part)
        return sums
    else:
        held = terms(x[0], given)
        for i in tl.static_range(1, PIECES):
            held = plus(held, terms(x[i], given))
        return total(held, TOGETHER)


@triton.jit
def _moment_terms(x, origin):
    """Of what may be selected: one, x − origin and its square; not finite if x is not."""
    selectable = x != float("-inf")
    d = tl.where(selectable, x - origin, 0.0)
    return tl.where(selectable, 1.0, 0.0), d, d * d


@triton.jit
def _moments(
    x, origin, n, TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Sums of x − origin and of its square; not finite if an entry is not."""
    column = tl.arange(0, WIDTH)
    sums = ()
    for i in tl.static_range(PIECES):
        d = x[i] - wide(origin, TOGETHER)
        if not EXACT:
            d = tl.where(before(column + i * WIDTH, n, TOGETHER), d, 0.0)
        sums = plus(sums, (d, d * d))
    return total(sums, TOGETHER)


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
    CDF = getattr(CDF, "value", CDF)
    if LAPLACE.value == CDF:
        return SHORT_KINKED.value
    return SHORT_NORMAL.value if NORMAL.value == CDF else SHORT.value


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
def _propose(sums, k, k_rest, seen, CDF: tl.constexpr):
    """What follows from the sums of an evaluation alone: by how much the hard count and the soft one exceed
    k, the step in units of τ, μ, β, γ, Σf, and whether the step may be the last one."""
    less, mass, beta, gamma, delta, epsilon = series(sums, CDF)
    excess = ((hard_count(sums[0], seen, CDF) - k) - k_rest).to(tl.float32)
    miss = excess - less
    live = mass > UNDECIDED
    if full_support(CDF):
        h, mu = _taylor(miss, mass, beta, gamma, delta, epsilon)
        last = (tl.abs(mu) <= 1.5 * _short_step(CDF)) & _is_short(h, gamma, epsilon, CDF) & live
    else:
        mu = miss * reciprocal(mass)
        h = mu
        last = (tl.abs(mu) <= SMALL_COMPACT) & live
    return excess, miss, h, mu, beta, gamma, mass, last


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
def _search(
    miss, mu, beta, gamma, f_sum, t, k, n, tau, inverse, goal, crowd,
    low, high, miss_low, miss_high, g_low, g_high, side, count, CDF: tl.constexpr,
):  # fmt: skip
    """The step in units of τ where Taylor's is too long to be trusted; and the bracket [low, high] of t.

    Few entries near t: the densities go on as a cosh that agrees with their sum and its derivatives, or, with
    compact support, as they are. Many: the count goes on as of entries spread evenly, as many in a τ as
    between the ends of the bracket. Where either leaves the bracket: the secant of the count's logit, with
    Illinois' halving; and every third time the middle on a scale that is logarithmic in t/τ.
    """
    live = f_sum > UNDECIDED
    if full_support(CDF):
        # sinh(λh)/λ − β(cosh(λh) − 1)/λ² = μ, a quadratic equation in e^(λh)
        rate = tl.sqrt(
            tl.minimum(tl.maximum(tl.maximum(gamma, beta * beta), 0.01), 200.0 if CDF == NORMAL else 1.0)
        )
        per_rate = reciprocal(rate)
        q = tl.minimum(tl.maximum(beta * per_rate, -1.0), 1.0)
        p = rate * mu - q
        root = tl.sqrt(p * p + (1 - q) * (1 + q))
        larger = (p + root) * reciprocal(tl.maximum(1 - q, 1e-12))
        smaller = tl.maximum(1 + q, 1e-12) * reciprocal(root - p)
        near = log2(tl.where(p > 0, larger, smaller)) * (per_rate * LN2)
    else:
        near = mu

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
    dense = miss * (6 + 2 * reciprocal(crowd)) * reciprocal(6 * f_sum + 2)
    few = live & (((tl.abs(miss) < 1) & (f_sum < 1)) if full_support(CDF) else (tl.abs(mu) < 0.5))
    step = tl.where(few | (live & (tl.abs(near) < 0.5)), near, dense)

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
    return step, low, high, miss_low, miss_high, g_low, g_high, side


@triton.jit
def _result(x, given, CDF: tl.constexpr, OUTPUT: tl.constexpr):
    """y or its logarithm.

    Given are hi; for y, lo and 1, each times ±unit/τ, and what turns 1 − y into y; for the logarithm, 1/τ and
    lo/τ.
    """
    hi, shift, turn, sign, base, inverse, low = given
    if OUTPUT == LOG:
        z = (x - hi) * inverse - low
        return tl.where(z == float("-inf"), z, log_F(z, POWER, CDF))
    elif CDF == LOGISTIC:
        return reciprocal(1.0 + tl.exp2(shift - (x - hi) * turn)) * sign + base
    else:
        return value((x - hi) * turn - shift, CDF)


@triton.jit
def _min_max(a0, a1, b0, b1):
    return tl.minimum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _gap(x, hi, lo, scale, tau, CDF: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr):
    """t in a gap that no density crosses, and whether there is such a gap.

    With exponential tails as much is missing above t as is left over below it. Both are sums of one
    exponential law, so that the logarithms of the sums relative to the nearest entry, up above t and down
    below it, give t = (up + down)/2 + τ/2·(ln B − ln A). With compact support every t from down to up − τ
    solves the equation, and the middle of them is taken.
    """
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    if not full_support(CDF):
        lo = lo + median(POWER, CDF) * tau
    hi, lo, rate = wide(hi, TOGETHER), wide(lo, TOGETHER), wide(scale, TOGETHER)
    for i in tl.static_range(PIECES):
        above = x[i] - hi > lo
        over, under = tl.where(above, x[i], float("inf")), tl.where(above, float("-inf"), x[i])
        if i == 0:
            least, greatest = over, under
        else:
            least, greatest = tl.minimum(least, over), tl.maximum(greatest, under)
    up, down = tl.reduce((least, greatest), AXIS, _min_max)
    middle, rest = two_sum(0.5 * up, 0.5 * down)
    if full_support(CDF):
        sums = ()
        for i in tl.static_range(PIECES):
            above = x[i] - hi > lo
            distance = tl.where(above, wide(up, TOGETHER) - x[i], x[i] - wide(down, TOGETHER))
            e = tl.exp2(distance * rate)
            terms = (tl.where(above, e, 0.0), tl.where(above, 0.0, e))
            sums = plus(sums, terms)
        A, B = total(sums, TOGETHER)
        rest += (log2(B) - log2(A)) * (0.5 * LN2) * tau
        exists = up > down
    else:
        rest -= 0.5 * tau
        exists = up - down >= tau
    t, t_rest = two_sum(middle, rest)
    return t, t_rest, exists


@triton.jit
def _rescue(
    x_pointer, x_stride, out_pointer, hi_pointer, lo_pointer, row, n, k, tau,
    MEAN: tl.constexpr, VARIANCE: tl.constexpr, CDF: tl.constexpr,
    OUTPUT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row by the float64 solver, which reads it again a chunk at a time."""
    one = row + tl.arange(0, 1)
    zero = tl.zeros((1,), tl.float64)
    k, tau = k + zero, tau + zero
    sums = (zero, zero, zero, zero + float("inf"), zero - float("inf"), zero, zero)
    nan, size, pinned, low, high, mean, squares = chunks(
        add_statistics, sums, (), x_pointer, x_stride, row, 0, n, n, tl.float32, CHUNK
    )
    k, size, tau, settled, hi, low, high = begin(
        nan,
        size,
        pinned,
        low,
        high,
        mean,
        squares / tl.maximum(size, 1.0),
        k,
        tau,
        MEAN,
        VARIANCE,
        POWER,
        CDF,
    )
    hi, lo = pair(hi, zero, False)
    near_up, near_down = zero, zero
    count = 0
    running = tl.sum(tl.where(settled == 0, 1, 0))
    while running > 0:
        sums = (zero, zero, zero, zero, zero, zero + float("inf"), zero - float("inf"))
        m, A, B, f_above, f_below, up, down = chunks(
            add_sums, sums, (hi, lo, tau, near_up, near_down, POWER, CDF),
            x_pointer, x_stride, row, 0, n, n, tl.float32, CHUNK,
        )  # fmt: skip
        hi, lo, low, high, near_up, near_down, finished = take_step(
            m, A, B, f_above, f_below, up, down, pinned, k, size, tau,
            hi, lo, low, high, near_up, near_down, count, False, POWER, CDF,
        )  # fmt: skip
        count += 1
        running = tl.where(count < RESCUE_EVALUATIONS, tl.sum(tl.where(finished, 0, 1)), 0)
    hi, lo = tl.where(settled == 0, hi, settled), tl.where(settled == 0, lo, settled)
    tl.store(hi_pointer + one, hi)
    tl.store(lo_pointer + one, lo)
    chunks(
        write_chunk, (), (out_pointer, n, hi, lo, tau, POWER, CDF, OUTPUT),
        x_pointer, x_stride, row, 0, n, n, tl.float32, CHUNK,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------- the kernel


@triton.jit(do_not_specialize=["rows", "evaluations"])
def solve_rows(
    x_pointer, x_stride, k_pointer, k_stride, k_high, k_low, tau_pointer, tau_stride, tau_high, tau_low,
    out_pointer, hi_pointer, lo_pointer, rows, n_columns, evaluations,
    MEAN: tl.constexpr, VARIANCE: tl.constexpr, CDF: tl.constexpr,
    OUTPUT: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr, STREAM: tl.constexpr, CHUNK: tl.constexpr, ORDINARY: tl.constexpr = 0,
):  # fmt: skip
    """`TOGETHER` rows of at most `PIECES`·`WIDTH` entries each; or one of any length that streams past, as
    many entries at a time.

    ORDINARY, if not 0, leaves out all but the path of an ordinary row that takes so many evaluations: for
    counting its instructions, and for nothing else.
    """
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    at = x_pointer + entries(row, x_stride, column, TOGETHER)
    x = ()
    if not STREAM:
        x = load_rows(at, there, n_columns, TOGETHER, PIECES, WIDTH, EXACT)
    origin = tl.load(x_pointer + row * x_stride, mask=there, other=0.0).to(tl.float32)
    origin = tl.where(tl.abs(origin) < float("inf"), origin, 0.0)
    k, k_rest = numbers(k_pointer, k_stride, k_high, k_low, row, there)
    tau, _ = numbers(tau_pointer, tau_stride, tau_high, tau_low, row, there)

    if STREAM:
        n, first, second = over(x, at, n_columns, _moment_terms, origin, 3, 1, PIECES, WIDTH, True)
        n, first, second = n.to(tl.float32), first.to(tl.float32), second.to(tl.float32)
    else:
        n = (row * 0 + n_columns).to(tl.float32)
        first, second = _moments(x, origin, n_columns, TOGETHER, PIECES, WIDTH, EXACT)
        if not ORDINARY:  # noqa: SIM102 (known when it is compiled, the other is not)
            if any_row(~(second < float("inf")), TOGETHER):
                n, first, second = over(
                    x, at, n_columns, _moment_terms, wide(origin, TOGETHER), 3, TOGETHER, PIECES, WIDTH, False
                )
    inverse = reciprocal(tau)
    inverse = inverse * (2 - tau * inverse)  # to the last digit
    scale = inverse * unit(CDF)
    rest = n - k
    ok = (k > 0) & (rest > 0) & (tau > 1e-25) & (tau < 1e25) & (second < float("inf"))

    # the guess: the quantile of a sum of the scores' distribution, taken for normal, and F's
    per = reciprocal(n)
    offset = first * per
    variance = tl.maximum(second * per - offset * offset, 0.0)
    log_k, log_rest = log2(k), log2(rest)
    goal = log_k - log_rest
    log_share = tl.minimum(log_k, log_rest) - log2(n)
    normal = with_sign(_quantile(log_share), goal)
    noise = tau * tau * VARIANCE
    spread = noise + variance
    per_deviation = tl.rsqrt(spread)
    deviation = spread * per_deviation
    own = moment_quantile(log_share, goal, normal, k, n, CDF)
    quantile = normal + (own - normal) * (noise * per_deviation * per_deviation)
    offset -= tau * MEAN
    hi = origin + (offset - quantile * deviation)
    lo = hi * 0
    ok = ok & (tl.abs(hi) < 1e30)
    done = ~(ok & there)
    deep = done & ~done
    nothing = hi * 0

    # as many halves as entries were looked at, those beyond the row's end among them
    seen = tl.cdiv(n_columns, PIECES * WIDTH) * (PIECES * WIDTH)
    if CDF == LOGISTIC:
        # many entries are undecided for most rows, and then one evaluation of Σy itself is enough
        given = (wide(hi, TOGETHER), wide(lo * scale, TOGETHER), wide(scale, TOGETHER))
        y_sum, f_sum, fy, ff_sum, ffy, fff = over(
            x, at, n_columns, _ordinary_terms, given, 6, TOGETHER, PIECES, WIDTH, STREAM
        )
        miss = ((y_sum - k) - k_rest).to(tl.float32)
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
        _, _, beta, gamma, delta, epsilon = series(first_sums, CDF)
        h, mu = _taylor(miss, f_sum, beta, gamma, delta, epsilon)
        last = (tl.abs(mu) <= SMALL) & (tl.abs(h) <= SHORT) & (8 * f_sum > k) & (k <= rest)
        hi, lo = two_sum(hi, tl.where(done | ~(tl.abs(mu) < 0.7), 0.0, h) * tau)
        done = done | last
    for _ in tl.static_range(ORDINARY - 1 if CDF == LOGISTIC else ORDINARY):
        sums = over(
            x, at, n_columns, terms,
            (wide(hi, TOGETHER), wide(lo * scale, TOGETHER), wide(scale, TOGETHER), CDF),
            term_count(CDF), TOGETHER, PIECES, WIDTH, STREAM,
        )  # fmt: skip
        _, _, h, _, _, _, _, _ = _propose(sums, k, k_rest, seen, CDF)
        hi, lo = two_sum(hi, lo + tl.where(done, 0.0, h) * tau)

    if not ORDINARY:
        # bounds on any quantile (Cantelli), a little wider than they need to be
        ratio = tl.sqrt(k * reciprocal(rest))
        low = (origin + offset) - 1.001 * deviation * ratio
        high = (origin + offset) + 1.001 * deviation * reciprocal(ratio)
        crowd = n * tl.exp2(normal * normal * (-0.5 * LOG2E)) * 0.3989423 * tau * per_deviation
        miss_low, miss_high, g_low, g_high, side = nothing, nothing, nothing, nothing, nothing
        count = 0
        running = (count < evaluations) & any_row(~done, TOGETHER)
        while running:
            # Constants stay constants only in a tuple that has no name; and no sums of this name may come
            # from before the loop, which a row that streams past would carry along in another precision.
            sums = over(
                x, at, n_columns, terms,
                (wide(hi, TOGETHER), wide(lo * scale, TOGETHER), wide(scale, TOGETHER), CDF),
                term_count(CDF), TOGETHER, PIECES, WIDTH, STREAM,
            )  # fmt: skip
            excess, miss, h, mu, beta, gamma, mass, last = _propose(sums, k, k_rest, seen, CDF)
            deep = deep | (~done & ~(mass > UNDECIDED) & (excess == 0))
            done = done | deep
            if any_row(~(last | done), TOGETHER):
                step, low, high, miss_low, miss_high, g_low, g_high, side = _search(
                    miss, mu, beta, gamma, mass, hi + lo, k, n, tau, inverse, goal, crowd,
                    low, high, miss_low, miss_high, g_low, g_high, side, count, CDF,
                )  # fmt: skip
                h = tl.where(last, h, step)
            failed = ~(tl.abs(h) < 1e30) & ~done
            new_hi, new_lo = two_sum(hi, lo + tl.where(done | failed, 0.0, h) * tau)
            hi, lo = tl.where(done, hi, new_hi), tl.where(done, lo, new_lo)
            ok = ok & ~failed
            done = done | last | failed
            count += 1
            running = (count < evaluations) & any_row(~done, TOGETHER)
        ok = ok & done
        if STREAM or CDF == NORMAL:
            ok = ok & ~deep
        else:
            if any_row(deep, TOGETHER):
                gap_hi, gap_lo, exists = _gap(x, hi, lo, scale, tau, CDF, TOGETHER, PIECES)
                ok = ok & (exists | ~deep)
                hi, lo = tl.where(deep, gap_hi, hi), tl.where(deep, gap_lo, lo)
    ok = ok & there

    tl.store(hi_pointer + row, hi.to(tl.float64), mask=ok)
    tl.store(lo_pointer + row, lo.to(tl.float64), mask=ok)
    turn, sign, base = scale, nothing + 1, nothing
    if CDF == LOGISTIC:  # the others' y above t is 1 less a tail anyhow
        # of y near 1 the accurate part is 1 − y: it is what is computed where most y are
        flip = k > rest
        turn, sign, base = tl.where(flip, -scale, scale), tl.where(flip, -1.0, 1.0), tl.where(flip, 1.0, 0.0)
    row_values = (
        wide(hi, TOGETHER), wide(lo * turn, TOGETHER), wide(turn, TOGETHER), wide(sign, TOGETHER),
        wide(base, TOGETHER), wide(inverse, TOGETHER), wide(lo * inverse, TOGETHER),
    )  # fmt: skip
    to = out_pointer + entries(row, n_columns, column, TOGETHER)
    if STREAM:
        STEP: tl.constexpr = PIECES * WIDTH
        steps = tl.cdiv(n_columns, STEP)
        for done_steps in range(steps):
            start = (steps - 1 - done_steps) * STEP  # backwards: the row's end is what the cache still has
            held = ()
            for i in tl.static_range(PIECES):
                valid = inside(ok, column + (start + i * WIDTH), n_columns, 1, False)
                piece = tl.load(at + (start + i * WIDTH), mask=valid, other=0.0).to(tl.float32)
                held = held + (piece,)  # type: ignore[assignment]  # noqa: RUF005
            for i in tl.static_range(PIECES):
                valid = inside(ok, column + (start + i * WIDTH), n_columns, 1, False)
                out = _result(held[i], row_values, CDF, OUTPUT).to(out_pointer.dtype.element_ty)
                tl.store(to + (start + i * WIDTH), out, mask=valid)
    else:
        for i in tl.static_range(PIECES):
            valid = inside(ok, column + i * WIDTH, n_columns, TOGETHER, EXACT)
            out = _result(x[i], row_values, CDF, OUTPUT).to(out_pointer.dtype.element_ty)
            tl.store(to + i * WIDTH, out, mask=valid)

    if not ORDINARY:
        bad = there & ~ok
        if any_row(bad, TOGETHER):
            start = tl.program_id(0).to(tl.int64) * TOGETHER
            for r in range(TOGETHER):
                if any_row(bad & (row == start + r), TOGETHER):
                    _rescue(
                        x_pointer, x_stride, out_pointer, hi_pointer, lo_pointer, start + r, n_columns,
                        number64(k_pointer, k_stride, k_high, k_low, start + r),
                        number64(tau_pointer, tau_stride, tau_high, tau_low, start + r),
                        MEAN, VARIANCE, CDF, OUTPUT, CHUNK,
                    )  # fmt: skip


KERNELS = (solve_rows,)


def serves(dtype: torch.dtype, rows: int, n: int, F: cdfs.CDF, tau: Tensor, output: str) -> bool:
    """Whether these kernels do: otherwise those of :mod:`.forward` and :mod:`.backward`."""
    if output == "threshold" or dtype == torch.float64:
        return False
    if F.name == "logistic":
        return n <= max(layout.RESIDENT, layout.STREAMED) or rows >= layout.STREAMS
    # their rescue computes in float32 too, which does not hold every τ
    return F.name in SERVED and n <= layout.RESIDENT and layout.compute(dtype, tau) == tl.float32


def soft_topk(
    source: tuple[Tensor, int],
    k: layout.Values,
    tau: layout.Values,
    out: Tensor,
    hi: Tensor,
    lo: Tensor,
    rows: int,
    n: int,
    F: cdfs.CDF,
    output: str,
) -> None:
    """Fill out, hi and lo."""
    tile = layout.tile(rows, n)
    solve_rows[(-(-rows // tile.together),)](
        *source, *k, *tau, out, hi, lo, rows, n, EVALUATIONS,
        MEAN=F.mean, VARIANCE=F.variance, CDF=layout.cdf_id(F.name),
        OUTPUT=OUTPUTS[output], TOGETHER=tile.together, PIECES=tile.pieces, WIDTH=tile.width,
        EXACT=n == tile.pieces * tile.width, STREAM=tile.streams, CHUNK=layout.RESCUE * tile.warps,
        num_warps=tile.warps, **layout.registers(),
    )  # fmt: skip
