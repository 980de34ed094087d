"""The projection onto the permutahedron of short rows of float32, forward and backward: one launch each.

The program sorts z and w, unless they are in order already, as ranks are. With u = z/τ, the sums
S_g = Σ_(j<g) (u_j − w_j) are points over the places g between entries, and the blocks of the reference
(`_kernels.reference.permutahedron`) begin where S has the corners of its least concave majorant: at a g above
all chords from a point before it to one behind it. Whatever is not above one chord is dropped. Chords to the
points that are 1, 2, 4, … places away on either side drop most of them, and the same with the nearest points
that are left drops the others: three times for ordinary rows, and about log n times for any other. The last
time asks the neighbours among those left alone, which is exact.

Where all u − w before a place are greater than all behind it, a block begins for certain. Sums start again
there, at 0 and with differences to the entry that comes first, so that far entries take no digits from
others. (Those before that are greater only on average leave the others no digits, if they are 1e16 times as
great, which takes a w of such a range.)

The means of blocks are taken anew, from differences to their first entries, in float64.

With "kl" the value of a block is the logarithm of Σ e^u / Σ e^w, so that the points have these sums as their
coordinates, both. They are summed from the last entry, since the terms ascend from there: a difference of two
sums, which starts with the greatest term, then keeps its digits, however far the others are. As e^u leaves
the range of float64, a sum is a number and a power of two, that of the entry that it starts with.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.triton import layout, ranks
from khot._kernels.triton.arguments import Blocks, Projected
from khot._kernels.triton.fast import LOG2E, double, reciprocal, store, wide
from khot._kernels.triton.launch import launch
from khot._kernels.triton.projection import add2, bounded, greater
from khot._kernels.triton.ranks import across, nan_of, sorted_rows
from khot._kernels.triton.rows import entries, inside, place_rows
from khot._kernels.triton.sizes import cdiv, next_power_of_2

LONGEST = ranks.RANKED  # sorted by itself, a longer row takes less time
LONGEST_POWERS = 256  # with "kl", whose chords cost more: a longer row's blocks are pooled in less time
TOGETHER = 512  # entries of short rows that share a program
HELD, HELD_POWERS = 4, 2  # entries of a thread, and with "kl", where each is four numbers
# What stands for infinite scores and w, and for 1/τ at least and at most, in float64, which reaches to 1e308:
# so infinite scores in τ are farther than w reaches, and different ones of float32 are at the greatest 1/τ.
ENDLESS, ENDLESS_WEIGHT, LEAST, MOST = (tl.constexpr(x) for x in (1e100, 1e50, 1e-45, 1e200))


SLACK = tl.constexpr(1 + 2.0**-40)  # of slopes that count as equal with "kl", where rounding would decide
NOTHING = tl.constexpr(-1e305)  # the exponent of a sum of nothing
FARTHEST = tl.constexpr(1000.0)  # exponents of powers of two that are numbers of float64


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def within(key, a, next_key, next_a):
    """Sums over the same block."""
    return next_key, next_a + tl.where(key == next_key, a, 0.0)


@triton.jit
def inverse_tau(pointer, stride, high, low, row, there):
    """1/τ in float64, and NaN in place of 0 for rows whose τ is none."""
    if pointer is None:
        tau = row.to(tl.float64) * 0 + high + low
    else:
        tau = double(tl.load(pointer + row * stride, mask=there, other=1.0))
    poison = tl.where(tau > 0, tl.where(tau < float("inf"), 0.0, float("nan")), float("nan"))
    return tl.minimum(1 / tau, MOST), poison


@triton.jit
def finite(x, infinite):
    return bounded(double(x), infinite)


@triton.jit
def digits_of(x):
    """Integers in the order of the first six digits of numbers of float64."""
    bits = (x.to(tl.int64, bitcast=True) >> 32).to(tl.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _in_order(at, step, column, valid, n, TOGETHER: tl.constexpr, DOUBLES: tl.constexpr):
    """Entries in descending order, their columns, and NaN if there is one in the row."""
    x = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    followed = valid & across(column + 1 < n, TOGETHER)
    after = tl.load(at + step, mask=followed, other=0.0).to(tl.float32)
    y, order = x, tl.where(valid, across(column, TOGETHER), 0)
    unordered = tl.max(tl.where(followed, tl.where(x >= after, 0, 1), 0)) > 0
    if unordered:
        y, order = sorted_rows(x, column, valid, TOGETHER, DOUBLES)
    return tl.where(valid, y, 0.0), order, nan_of(x, 0 if TOGETHER == 1 else 1)


@triton.jit
def _segments(certain, i, n, AXIS: tl.constexpr):
    """Where the segment of each place begins and ends."""
    begin = tl.associative_scan(tl.where(certain, i, 0), AXIS, greater)
    return begin, tl.associative_scan(tl.where(certain, i, n), AXIS, smaller, reverse=True)


@triton.jit
def since(sum_at, place, begin):
    """The sum up to a place of the segment that starts at `begin`, where 0 stands in the place of the sum of
    the segment before."""
    return tl.where(place == begin, 0.0, tl.load(sum_at + place))


@triton.jit
def _power(exponent):
    """2^exponent for whole exponents of any size; 0 in place of what is smaller than numbers of float64."""
    least = tl.minimum(tl.maximum(exponent, -FARTHEST), FARTHEST)
    power = ((least.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(exponent < -FARTHEST, 0.0, power)


@triton.jit
def _split(x):
    """e^x as a number from 1 to 2 and the exponent of a power of two."""
    x *= LOG2E
    exponent = tl.floor(x)
    return tl.exp2(x - exponent), exponent


@triton.jit
def _plus_powers(a, a_exponent, b, b_exponent, c, c_exponent, d, d_exponent):
    """Two sums of numbers with powers of two."""
    first, second = tl.maximum(a_exponent, c_exponent), tl.maximum(b_exponent, d_exponent)
    return (
        a * _power(a_exponent - first) + c * _power(c_exponent - first), first,
        b * _power(b_exponent - second) + d * _power(d_exponent - second), second,
    )  # fmt: skip


@triton.jit
def _powers_at(sum_at, place, size):
    """The sums of e^u and of e^w from a place on."""
    return (
        tl.load(sum_at + place), tl.load(sum_at + size + place), tl.load(sum_at + 2 * size + place),
        tl.load(sum_at + 3 * size + place),
    )  # fmt: skip


@triton.jit
def _slope_of_powers(near, far, here):
    """Σ e^u / Σ e^w from one place to a later one, from the sums from either on, in the unit of those from
    here on."""
    a = near[0] - far[0] * _power(far[1] - near[1])
    b = near[2] - far[2] * _power(far[3] - near[3])
    guess = reciprocal(b.to(tl.float32)).to(tl.float64)
    return a * guess * (2 - b * guess) * _power((near[1] - here[1]) - (near[3] - here[3]))


@triton.jit
def _falls(here, i, above, begin, sum_at, size, KL: tl.constexpr):
    """The slope of the chord to a place before."""
    if KL:
        return _slope_of_powers(_powers_at(sum_at, above, size), here, here)
    else:
        return (here[0] - since(sum_at, above, begin)) * one_over(tl.maximum(i - above, 1))


@triton.jit
def _rises(here, i, below, sum_at, size, KL: tl.constexpr):
    """The slope of the chord to a place behind."""
    if KL:
        return _slope_of_powers(here, _powers_at(sum_at, below, size), here)
    else:
        return (tl.load(sum_at + below) - here[0]) * one_over(tl.maximum(below - i, 1))


@triton.jit
def _above(falls, rises, KL: tl.constexpr):
    return falls > rises * SLACK if KL else falls > rises


@triton.jit
def _neighbours(
    left, inner, here, i, n, begin, valid, sum_at, size, before_at, after_at, AXIS: tl.constexpr,
    KL: tl.constexpr,
):  # fmt: skip
    """For each place the last one up to it and the next one behind it that are left, and whether it is left
    without being above the chord to the nearest ones on either side."""
    first = tl.associative_scan(tl.where(left, i, 0), AXIS, greater)
    stop = tl.associative_scan(tl.where(left, i, n), AXIS, smaller, reverse=True)
    tl.debug_barrier()  # before what was read is written over
    tl.store(before_at + i, first, mask=valid)
    tl.store(after_at + i, stop, mask=valid)
    tl.debug_barrier()
    stop = tl.load(after_at + i + 1, mask=valid & (i + 1 < n), other=n)
    asked = inner & left
    before = tl.load(before_at + i - 1, mask=asked, other=0)
    if KL:
        lower = _falls(here, i, before, begin, sum_at, size, KL)
        upper = _rises(here, i, stop, sum_at, size, KL)
    else:
        lower = (here[0] - since(sum_at, before, begin)) * (stop - i).to(tl.float64)
        upper = (tl.load(sum_at + stop) - here[0]) * (i - before).to(tl.float64)
    return first, stop, asked & tl.where(_above(lower, upper, KL), False, True)


@triton.jit
def one_over(count):
    """1/count to 14 digits, without a division."""
    guess = reciprocal(count.to(tl.float32)).to(tl.float64)
    return guess * (2 - count.to(tl.float64) * guess)


@triton.jit
def steepest(
    falls, rises, hop, here, i, n, begin, end, asked, sum_at, before_at, after_at, size, KL: tl.constexpr
):  # fmt: skip
    """The least slope to a place before and the greatest to one behind, of those left that are at least so
    far away."""
    above = tl.load(before_at + i - hop, mask=asked & (i >= hop), other=0)
    below = tl.load(after_at + i + hop, mask=asked & (i + hop < n), other=n)
    above, below = tl.maximum(above, begin), tl.minimum(below, end)
    falls = tl.minimum(falls, _falls(here, i, above, begin, sum_at, size, KL))
    return falls, tl.maximum(rises, _rises(here, i, below, sum_at, size, KL))


@triton.jit(do_not_specialize=["rows"])
def _project_rows(
    z, w, tau, to, held_pointer, left_pointer, sums_pointer, rows, n, TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr, DOUBLES: tl.constexpr, STEPS: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    valid = inside(there, column, n, TOGETHER, FULL)
    z_at = z.pointer + entries(row, z.stride, column, TOGETHER)
    score, order, poison = _in_order(z_at, 1, column, valid, n, TOGETHER, DOUBLES)
    w_at = w.pointer + entries(row, w.row, column.to(tl.int64) * w.column, TOGETHER)
    weight, w_order, bad = _in_order(w_at, w.column, column, valid, n, TOGETHER, DOUBLES)
    at, base = entries(row, n, column, TOGETHER), wide(row * n, TOGETHER)
    tl.store(to.order + at, order, mask=valid)
    tl.store(to.w_order + at, w_order, mask=valid)
    inverse, worse = inverse_tau(*tau, row, there)
    inverse, poison = wide(inverse, TOGETHER), wide(poison + bad + worse, TOGETHER)

    i = tl.where(valid, across(column, TOGETHER), n)
    mine = wide(tl.minimum(row, rows - 1), TOGETHER)  # all may read there
    u_at, v_at = held_pointer + mine * (2 * n), held_pointer + mine * (2 * n) + n
    before_at, after_at = left_pointer + mine * (2 * n), left_pointer + mine * (2 * n) + n
    # with room for places that no row has, which count nothing
    sum_at, size = sums_pointer + mine * (n + 1) + WIDTH, rows.to(tl.int64) * (n + 1) + 3 * WIDTH
    u, v = finite(score, ENDLESS) * tl.maximum(inverse, LEAST), finite(weight, ENDLESS_WEIGHT)
    tl.store(u_at + i, u, mask=valid)
    tl.store(v_at + i, v, mask=valid)
    begin, end = i * 0, i * 0 + n
    if KL:
        sums = _split(u) + _split(v)
        sums = tl.associative_scan(
            (
                tl.where(valid, sums[0], 0.0), tl.where(valid, sums[1], NOTHING),
                tl.where(valid, sums[2], 0.0), tl.where(valid, sums[3], NOTHING),
            ),
            AXIS, _plus_powers, reverse=True,
        )  # fmt: skip
        for number in tl.static_range(4):
            tl.store(sum_at + number * size + i, sums[number], mask=valid)
            nothing = NOTHING if number % 2 else 0.0
            tl.store(sum_at + number * size + i + n, nothing + sums[0] * 0, mask=valid & (i == 0))
    else:
        # where all differences before are greater than all from there on, a segment ends for certain
        digits = digits_of((u - v) + 0.0)  # −0 is 0
        least = tl.associative_scan(digits, AXIS, smaller)
        most = tl.associative_scan(tl.where(valid, digits, -0x80000000), AXIS, greater, reverse=True)
        tl.store(before_at + i + 1, least, mask=valid & (i + 1 < n))
        tl.debug_barrier()
        certain = valid & (i > 0) & (tl.load(before_at + i, mask=valid & (i > 0), other=0) > most)
        d = tl.where(valid, (u - tl.load(u_at + begin)) - (v - tl.load(v_at + begin)), 0.0)
        sums = tl.cumsum(d, AXIS)
        any_ends = tl.max(tl.where(certain, 1, 0)) > 0
        if any_ends:
            begin, end = _segments(certain, i, n, AXIS)
            d = tl.where(valid, (u - tl.load(u_at + begin)) - (v - tl.load(v_at + begin)), 0.0)
            _, sums = tl.associative_scan((begin, d), AXIS, within)
        tl.store(sum_at + i + 1, sums, mask=valid)
        tl.store(sum_at + i, 0.0, mask=valid & (i == 0))
    tl.debug_barrier()

    here = _powers_at(sum_at, i, size) if KL else (tl.load(sum_at + i),)
    inner = valid & (i > begin)
    room = tl.where(inner, i - begin, 0)
    falls, rises = here[0] * 0 + float("inf"), here[0] * 0 - float("inf")
    for step in tl.static_range(STEPS):
        near, far = room >= (1 << step), inner & (end - i >= (1 << step))
        if KL:
            slope = _falls(here, i, tl.where(near, i - (1 << step), i), begin, sum_at, size, KL)
            falls = tl.where(near & (slope < falls), slope, falls)
            slope = _rises(here, i, tl.where(far, i + (1 << step), i), sum_at, size, KL)
        else:
            slope = (here[0] - since(sum_at, i - (1 << step), begin)) * (0.5**step)
            falls = tl.where(near & (slope < falls), slope, falls)
            slope = (tl.load(sum_at + i + (1 << step)) - here[0]) * (0.5**step)
        rises = tl.where(far & (slope > rises), slope, rises)
    left = valid & ((i == begin) | _above(falls, rises, KL))

    first, stop, dropped = _neighbours(
        left, inner, here, i, n, begin, valid, sum_at, size, before_at, after_at, AXIS, KL
    )  # fmt: skip
    while tl.max(tl.where(dropped, 1, 0)) > 0:
        falls, rises = here[0] * 0 + float("inf"), here[0] * 0 - float("inf")
        for hop in range(STEPS):
            falls, rises = steepest(
                falls, rises, 1 << hop, here, i, n, begin, end, inner & left, sum_at, before_at, after_at,
                size, KL,
            )  # fmt: skip
        left = left & tl.where(dropped | (inner & ~_above(falls, rises, KL)), False, True)
        first, stop, dropped = _neighbours(
            left, inner, here, i, n, begin, valid, sum_at, size, before_at, after_at, AXIS, KL
        )  # fmt: skip

    ahead = u - tl.load(u_at + first)
    v_first = tl.load(v_at + first)
    if KL:
        total, other = tl.where(valid, tl.exp(ahead), 0.0), tl.where(valid, tl.exp(v - v_first), 0.0)
        _, total, other = tl.associative_scan((first, total, other), AXIS, add2)
    else:
        total = tl.where(valid, ahead - (v - v_first), 0.0)
        _, total = tl.associative_scan((first, total), AXIS, within)
    tl.debug_barrier()
    tl.store(sum_at + first, total, mask=valid & (stop == i + 1))
    if KL:
        tl.store(sum_at + size + first, other, mask=valid & (stop == i + 1))
    tl.debug_barrier()
    total = tl.load(sum_at + first)
    if KL:
        value = tl.log(total / tl.load(sum_at + size + first))
    else:
        value = total / tl.maximum(stop - first, 1).to(tl.float64)
    y = ahead - value + v_first
    # an infinite w makes the mean of its block infinite, and two of opposite signs leave no mean
    lowest = v_first if KL else tl.load(v_at + stop - 1)
    y += tl.where(v_first >= ENDLESS_WEIGHT, float("inf"), 0.0)
    y -= tl.where(lowest <= -ENDLESS_WEIGHT, float("inf"), 0.0)
    y = (y + poison).to(tl.float32)
    order = tl.load(to.order + at, mask=valid, other=0)
    tl.store(to.out + base + order, y.to(to.out.dtype.element_ty), mask=valid)
    tl.store(to.start + at, first, mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _pull_rows(
    grad, z, w, tau, order_pointer, w_order_pointer, start_pointer, to, rows, n, TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr, WANT_W: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    valid = inside(there, column, n, TOGETHER, FULL)
    at, base = entries(row, n, column, TOGETHER), wide(row * n, TOGETHER)
    first = tl.load(start_pointer + at, mask=valid, other=0)
    order = tl.load(order_pointer + at, mask=valid, other=0)
    first_order = tl.load(order_pointer + base + first, mask=valid, other=0)
    z_at = z.pointer + wide(row * z.stride, TOGETHER)
    score = tl.load(z_at + order, mask=valid, other=0.0).to(tl.float32)
    z_first = tl.load(z_at + first_order, mask=valid, other=0.0).to(tl.float32)
    grad_at = grad.pointer + wide(row * grad.row, TOGETHER)
    g = double(tl.load(grad_at + order.to(tl.int64) * grad.column, mask=valid, other=0.0))
    inverse, poison = inverse_tau(*tau, row, there)
    inverse, poison = wide(inverse, TOGETHER), wide(poison, TOGETHER)

    endless = tl.abs(score) == float("inf")  # as all of its block
    ahead = (double(tl.where(endless, 0.0, score)) - double(tl.where(endless, 0.0, z_first))) * inverse
    # how much an entry counts in the value of its block
    key, part = tl.where(valid, first, -1), tl.exp(ahead) if KL else g * 0 + 1
    # both sums of a place have its own entry
    _, up, more = tl.associative_scan((key, g, part), AXIS, add2)
    _, down, others = tl.associative_scan((key, g, part), AXIS, add2, reverse=True)
    total, parts = up + (down - g), more + (others - part)
    du = tl.where(endless, 0.0, (g - total * part / parts) * inverse + poison)
    store(to.dz + base + order, du, valid)
    dtau = tl.sum(tl.where(valid, du * ahead, 0.0), axis=AXIS)
    tl.store(to.dtau + row, -dtau, mask=there)
    if WANT_W:
        w_order = tl.load(w_order_pointer + at, mask=valid, other=0)
        w_at = w.pointer + wide(row * w.row, TOGETHER)
        weight = tl.load(w_at + w_order.to(tl.int64) * w.column, mask=valid, other=0.0).to(tl.float32)
        if KL:
            w_first = tl.load(w_order_pointer + base + first, mask=valid, other=0)
            w_first = tl.load(w_at + w_first.to(tl.int64) * w.column, mask=valid, other=0.0)
            part = tl.exp(finite(weight, ENDLESS_WEIGHT) - finite(w_first, ENDLESS_WEIGHT))
            _, more = tl.associative_scan((key, part), AXIS, within)
            _, others = tl.associative_scan((key, part), AXIS, within, reverse=True)
            parts = more + (others - part)
        dw = tl.where(tl.abs(weight) == float("inf"), 0.0, total * part / parts)
        store(to.dw + base + w_order, dw, valid)


KERNELS = (_project_rows, _pull_rows)


# -------------------------------------------------------------------------------------- the host


def tile(n: int, held: int = HELD) -> dict[str, Any]:
    """Rows in a program and warps."""
    width = max(ranks.NARROW, next_power_of_2(n))
    together = max(1, TOGETHER // width)
    warps = max(1, together * width // (32 * held))
    return {"TOGETHER": together, "WIDTH": width, "FULL": n == width, "num_warps": warps}


def permutahedron(
    z: Tensor, w: Tensor, tau: Tensor, regularization: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The projection of rows that a program sorts, and its blocks."""
    n, kl = z.shape[-1], regularization == "kl"
    rows, which = z.numel() // n, tile(n, HELD_POWERS if kl else HELD)
    y = z.new_empty(z.shape)
    index, w_index, start = (z.new_empty(z.shape, dtype=torch.int32) for _ in range(3))
    held = z.new_empty(rows * 2 * n, dtype=torch.float64)
    left = z.new_empty(rows * 2 * n, dtype=torch.int32)
    sums = z.new_empty((4 if kl else 1) * (rows * (n + 1) + 3 * which["WIDTH"]), dtype=torch.float64)
    launch(
        _project_rows, cdiv(rows, which["TOGETHER"]),
        layout.rows(z, n), layout.matrix(w, z), layout.values(tau, z.shape[:-1], z.device),
        Blocks(y, index, w_index, start), held, left, sums, rows, n,
        STEPS=max(1, (n - 1).bit_length()), DOUBLES=layout.compares_doubles(z.device), KL=kl,
        **which, **layout.registers(),
    )  # fmt: skip
    return y, index, w_index, start


def permutahedron_backward(
    grad: Tensor, z: Tensor, w: Tensor, tau: Tensor, order: Tensor, w_order: Tensor, start: Tensor,
    regularization: str, want_w: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients in z, w if it is wanted, and τ."""
    n = z.shape[-1]
    rows, which = z.numel() // n, tile(n)
    dz, dtau = z.new_empty(z.shape), z.new_empty(z.shape[:-1], dtype=torch.float64)
    dw = z.new_empty(z.shape if want_w else (0,), dtype=torch.float32)
    launch(
        _pull_rows, cdiv(rows, which["TOGETHER"]),
        layout.matrix(grad, z), layout.rows(z, n), layout.matrix(w, z),
        layout.values(tau, z.shape[:-1], z.device), order.contiguous(), w_order.contiguous(),
        start.contiguous(), Projected(dz, dw, dtau), rows, n,
        WANT_W=want_w, KL=regularization == "kl", **which,
    )  # fmt: skip
    return dz, dw, dtau
