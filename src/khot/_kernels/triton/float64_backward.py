"""The gradients of a row in float64, with costs or without: what belongs to :mod:`.float64`.

The equations are the reference's (`_kernels.reference.soft_topk` and `_kernels.reference.soft_budget`).
Densities are relative to that of the entry nearest to t, so that their sums do not underflow in a gap. Where
no entry has f > 0, which compact support allows, the entries next to the gap have the limit of smooth CDFs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Matrix, Pairs, Pulled, Solved, Values
from khot._kernels.triton.fast import joined, store
from khot._kernels.triton.float64 import chunk, number64, row_source, share
from khot._kernels.triton.float64_sums import (
    BY_COUNT,
    BY_VALUE,
    FARTHEST_Z,
    beside,
    beside_levels,
    cotangent,
    least,
    load,
    sums,
)
from khot._kernels.triton.functions import (
    HUGE,
    LOG,
    THRESHOLD,
    VALUE,
    full_support,
    gaussian_tail,
    log_scale,
    median,
    side,
    slope_of_log,
)
from khot._kernels.triton.launch import launch

DENSEST = tl.constexpr(690.0)  # the logarithm of a number that is nearly the greatest one
PEAK = tl.constexpr(0.3989422804014327)  # of the normal density, and its logarithm
LOG_PEAK = tl.constexpr(-0.9189385332046727)


# ------------------------------------------------------------------------------------ of an entry


@triton.jit
def _closest(x, w, given):
    """The least |z| of what is paid for. Given are the threshold, the CDF and BY."""
    _, z, _, _, decided = share(x, w, given[0], given[1], given[2])
    return (tl.where(decided | (w <= 0), float("inf"), tl.abs(z)),)


@triton.jit
def _relative(z, one_minus_z, density, near, power, CDF: tl.constexpr):
    """f in units of its value where |z| = near. What is free may lie nearer, and stays finite."""
    if full_support(CDF):
        a = tl.minimum(tl.abs(z), FARTHEST_Z)
        most = 2 * DENSEST / tl.maximum(near + a, 1e-300) if gaussian_tail(CDF) else DENSEST
        above, behind = z > median(power, CDF), tl.minimum(near - a, most)
        _, relative = side(z, one_minus_z, above, near, behind, power, CDF)
        if gaussian_tail(CDF):
            relative /= PEAK  # 1 where |z| = near, so that the mean of a single z is that z
        return tl.where(density == density, relative, density)
    else:
        return density


@triton.jit
def _slopes(x, w, v, threshold, near, CDF: tl.constexpr, BY: tl.constexpr, OUTPUT: tl.constexpr):
    """y, z, u = v·∂out/∂z for the incoming gradient v, and f relative to near."""
    y, z, one_minus_z, density, decided = share(x, w, threshold, CDF, BY)
    power = threshold[3]
    relative = tl.where(decided, 0.0, _relative(z, one_minus_z, density, near, power, CDF))
    if OUTPUT == THRESHOLD:
        return y, z, density * 0, relative
    slope = density
    if OUTPUT == LOG:
        tail = tl.where(z > median(power, CDF), 1 - y, y)
        slope = tl.where(decided, 0.0, slope_of_log(z, density, tail, power, CDF))
    return y, z, tl.where(slope == 0, 0.0, v * slope), relative


@triton.jit
def _pull(x, w, v, given):
    """Σ w a f relative to near; what dL/dk is that sum's part of, Σ a v f relative to near, or of log y Σ u;
    Σ u a and Σ u z; and Σ w f z, relative to near."""
    threshold, near = given[:2]
    CDF: tl.constexpr = given[2]
    BY: tl.constexpr = given[3]
    OUTPUT: tl.constexpr = given[4]
    _, z, u, relative = _slopes(x, w, v, threshold, near, CDF, BY, OUTPUT)
    paid = w * relative
    priced = v * relative if OUTPUT == VALUE else u
    moment = tl.where(paid == 0, 0.0, paid * z)
    u_moment = tl.where(u == 0, 0.0, u * z)
    if BY == BY_VALUE:
        return w * paid, w * priced, w * u, u_moment, moment
    else:
        return paid, priced, u, u_moment, moment


# ----------------------------------------------------------------------------------------- of a row


@triton.jit
def pull_sums_in_float64(
    source, grad_at, grad_column, threshold,
    CDF: tl.constexpr, BY: tl.constexpr, OUTPUT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """|z| of the entry nearest to t, and the sums of :func:`_pull` relative to it."""
    near = threshold[0] * 0
    if full_support(CDF):
        (near,) = least(_closest, (threshold, CDF, BY), 1, source, BY, WIDTH)
        near = tl.minimum(near, FARTHEST_Z)
    return near, sums(_pull, (threshold, near, CDF, BY, OUTPUT), 5, source, BY, WIDTH, grad_at, grad_column)


@triton.jit
def settle_pull(
    near, totals, source, grad_at, grad_column, grad_lo, threshold,
    CDF: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr, OUTPUT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """From the sums over a row: the gradients in its goal and in τ; what dL/dx has of each entry's w f; and
    what it has beside a gap (:func:`_gap`)."""
    hi, lo, tau, _ = threshold
    mass, priced, pull, u_moment, moment = totals
    dead = (mass == 0) | _fixed(hi, lo, AT_MOST)
    mass = tl.where(dead, 1.0, mass)
    through_t = tl.where(_fixed(hi, lo, AT_MOST), 0.0, grad_lo - pull / tau)
    spread = tl.where(dead, 0.0, through_t / mass)
    # the first two cancel before they are divided: tau may be 1e-42
    z_mean = tl.where(dead, 0.0, moment / mass)
    dtau = (pull * z_mean - u_moment) / tau - grad_lo * z_mean
    in_units = log_scale(near, CDF)
    if gaussian_tail(CDF):
        in_units -= LOG_PEAK
    if OUTPUT == LOG:
        priced = tl.where(priced == 0, 0.0, priced * tl.exp(in_units))
    price = tl.where(dead, 0.0, priced / mass)
    lean = tl.exp(tl.log(tau) - tl.log(mass) + in_units)
    price -= tl.where(dead | (grad_lo == 0), 0.0, grad_lo * lean)
    gap = (price + float("nan"), price + float("nan"), price, price)
    if not full_support(CDF):  # noqa: SIM102 (the first is known to the compiler)
        if dead & ~_fixed(hi, lo, AT_MOST):
            price, dtau, gap = _gap(source, grad_at, grad_column, grad_lo, threshold, CDF, BY, OUTPUT, WIDTH)
    return tl.where(hi == hi, price, hi), tl.where(hi == hi, dtau, hi), spread, gap


@triton.jit
def _fixed(hi, lo, AT_MOST: tl.constexpr):
    """Whether t does not move with what it depends on."""
    infinite = tl.abs(hi) == HUGE
    return infinite | ((hi == 0) & (lo == 0)) if AT_MOST else infinite


@triton.jit
def write_pull_in_float64(
    dx_at, dcost_at, source, grad_at, grad_column, threshold, near, price, spread, gap,
    CDF: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr, OUTPUT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients in the entries of a row, or of a part of one."""
    hi, lo, tau = threshold[0], threshold[1], threshold[2]
    t = tl.where(_fixed(hi, lo, AT_MOST), 0.0, hi + lo)
    for start in range(0, source[3], WIDTH):
        x, w = load(source, start, BY, WIDTH)
        v = cotangent(grad_at, grad_column, start, source[3], WIDTH)
        y, _, u, relative = _slopes(x, w, v, threshold, near, CDF, BY, OUTPUT)
        dx = u / tau + spread * (w * relative)
        if not full_support(CDF):
            level, other = beside_levels(x, w, (threshold, CDF, BY))
            dx = tl.where(level == gap[0], gap[2], tl.where(other == gap[1], gap[3], dx))
        dx = tl.where(hi == hi, dx, hi)
        column = start + tl.arange(0, WIDTH)
        store(dx_at + column, dx, column < source[3])
        if BY != BY_COUNT:
            dcost = -price * y
            if BY == BY_VALUE:
                dcost -= t * dx
            dcost = tl.where(x == float("-inf"), 0.0, dcost)
            store(dcost_at + column, dcost, column < source[3])


@triton.jit
def pull_in_float64(
    source, grad_at, grad_column, grad_lo, threshold, dx_at, dcost_at, dgoal_at, dtau_at,
    CDF: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr, OUTPUT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients in a row's scores, in its costs, if it has some, in its goal, and in τ."""
    near, totals = pull_sums_in_float64(source, grad_at, grad_column, threshold, CDF, BY, OUTPUT, WIDTH)
    price, dtau, spread, gap = settle_pull(
        near, totals, source, grad_at, grad_column, grad_lo, threshold, CDF, BY, AT_MOST, OUTPUT, WIDTH
    )
    tl.store(dgoal_at, price)
    tl.store(dtau_at, dtau)
    write_pull_in_float64(
        dx_at, dcost_at, source, grad_at, grad_column, threshold, near, price, spread, gap,
        CDF, BY, AT_MOST, OUTPUT, WIDTH,
    )  # fmt: skip


@triton.jit
def _gap(
    source, grad_at, grad_column, grad_lo, threshold,
    CDF: tl.constexpr, BY: tl.constexpr, OUTPUT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dL/dgoal and dL/dτ in a gap, t = ½(up + down) − ½τ without costs; and the levels of the entries next to
    it, as :func:`.float64_sums.beside_levels` has them, with dL/dx there."""
    up, down = beside(source, threshold, CDF, BY, WIDTH, grad_at, grad_column)
    both = up[3] + down[3]
    up_part, down_part = up[3] / both, down[3] / both
    up_cost, down_cost = tl.maximum(up[2], 1e-300), tl.maximum(down[2], 1e-300)
    price = up[4] / up_cost
    if OUTPUT == VALUE:  # log y is −inf on the other side, whatever t is
        price += down[4] / down_cost
    price = price * 0 if OUTPUT == THRESHOLD else price / both
    up_pull, down_pull, dtau = price * 0, price * 0, price * 0
    if BY == BY_COUNT:  # of budgets nothing that is asked for depends on it
        up_pull, down_pull = up_part * grad_lo / up_cost, down_part * grad_lo / down_cost
        dtau = -up_part * grad_lo
    up_level = tl.where(up[0] < float("inf"), up[0], float("nan"))
    down_level = tl.where(down[0] > float("-inf"), -down[0], float("nan"))
    return price, dtau, (up_level, down_level, up_pull, down_pull)


# -------------------------------------------------------------------------------------- the kernel


@triton.jit
def pull_rows_in_float64(
    grad, grad_lo, x, cost, t, tau, to, n, exponent, L: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    threshold = (tl.load(t.hi + row), tl.load(t.lo + row), number64(*tau, row), joined(*exponent))
    dx_at = to.dx + row * n
    pull_in_float64(
        row_source(x, cost, row, n, L.by), grad.pointer + row * grad.row, grad.column,
        number64(*grad_lo, row), threshold, dx_at, dx_at if L.by == BY_COUNT else to.dcost + row * n,
        to.dgoal + row, to.dtau + row, L.cdf, L.by, L.at_most, L.output, WIDTH,
    )  # fmt: skip


KERNELS = (pull_rows_in_float64,)


def backward(
    grad: Matrix, grad_lo: Values, pairs: Pairs, solved: Solved, to: Pulled, asked: layout.Asked
) -> None:
    """Fill the results, as :func:`.pull.backward` does."""
    rows, n = pairs.x.pointer.shape
    launch(
        pull_rows_in_float64, rows,
        grad, grad_lo, *pairs, solved.t, solved.tau, to, n, layout.power(asked.F), L=layout.law(*asked),
        **chunk(n),
    )  # fmt: skip
