"""Top-k in magnitude: the value γ that the pooled entries share, y, and the gradients, in one launch each.

A program holds rows, or streams past one, as in :mod:`.resident`. It finds γ in float32 (:mod:`.threshold`)
as the threshold of a soft count (:mod:`.pooled`). Float64 entries, and the rows for which float32 does not
suffice, are solved in float64, by Newton's method in a bracket (:mod:`.exact_steps`). The formulas are the
reference's (`_kernels.reference.magnitude`).
"""

from __future__ import annotations

import functools
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import magnitude as reference
from khot._kernels.triton import layout, native
from khot._kernels.triton.exact import number64
from khot._kernels.triton.exact_steps import NOISE, next_state
from khot._kernels.triton.exact_sums import BY_COUNT, least, load, sums
from khot._kernels.triton.fast import LOG2E, log2, plus, reciprocal, split, store, total, wide
from khot._kernels.triton.functions import HUGE, POWER, UNIFORM
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.pooled import pooled_moments, size, temperature, unpooled
from khot._kernels.triton.resident import EVALUATIONS, entries, inside, load_rows, numbers, place_rows, rescue
from khot._kernels.triton.terms import holds, value
from khot._kernels.triton.threshold import guess, iterate, over

EVALUATIONS64 = tl.constexpr(128)  # at most, in float64


# ------------------------------------------------------------------------------------ in float64


@triton.jit
def _finite_size(x):
    """|x|; 0 for infinite entries."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, tl.abs(x))


@triton.jit
def _kinds(x, w, given):
    """Whether an entry is NaN, +inf, −inf, or finite and not 0."""
    return (
        tl.where(x != x, 1.0, 0.0).to(tl.float64), tl.where(x == float("inf"), 1.0, 0.0).to(tl.float64),
        tl.where(x == float("-inf"), 1.0, 0.0).to(tl.float64),
        tl.where(_finite_size(x) > 0, 1.0, 0.0).to(tl.float64),
    )  # fmt: skip


@triton.jit
def _position(s, hi, lo, tau, P: tl.constexpr):
    """z, of which 0 < z < 1 says that an entry is pooled; and F(z) then."""
    z = ((s - hi) - lo) / tau
    pooled = (z > 0) & (z < 1)
    F = tl.where(pooled, z, 0.0)
    if P != 2:
        F = tl.where(pooled, tl.exp2((1 / (P - 1)) * tl.log2(tl.where(pooled, z, 1.0))), 0.0)
    return z, pooled, F


@triton.jit
def _counts(x, w, given):
    """Which entries are selected on their own, F, and its slope. Given are hi, lo, τγ^(p−1) and p."""
    P: tl.constexpr = given[3]
    z, pooled, F = _position(_finite_size(x), given[0], given[1], given[2], P)
    slope = tl.where(pooled, F / tl.where(pooled, z, 1.0), 0.0) / (P - 1)
    return tl.where(z >= 1, 1.0, 0.0).to(tl.float64), F, slope


@triton.jit
def _ends(x, w, given):
    """The least size of an entry that is selected on its own, and the greatest of the others with the sign
    changed. Given as for :func:`_counts`."""
    s = _finite_size(x)
    own = ((s - given[0]) - given[1]) / given[2] >= 1
    return tl.where(own, s, float("inf")), tl.where(own, float("inf"), -s)


@triton.jit
def _greatest(x, w, given):
    s = _finite_size(x)
    return -s, s  # Triton 3.6 has faults with tuples of one member


@triton.jit
def _find_exactly(source, k, tau, P: tl.constexpr, SIGNED: tl.constexpr, WIDTH: tl.constexpr):
    """γ = hi + lo of a row, for which the order of the edge cases is the reference's."""
    n = source[3]
    nan, above, below, positive = sums(_kinds, 0, 4, source, BY_COUNT, WIDTH)
    below -= tl.cdiv(n, WIDTH) * WIDTH - n  # what is not there
    pinned = above + below if SIGNED else above
    selectable = n + below * 0 if SIGNED else n - below
    answered = (nan == 0) & (k >= 0) & (k <= selectable) & (k == tl.floor(k)) & (pinned <= k)
    answered = answered & (tau > 0) & (tau < float("inf"))
    left = k - pinned
    most = -least(_greatest, 0, 2, source, BY_COUNT, WIDTH)[0]
    zero = tl.zeros((), tl.float64)
    hi, lo = zero, zero  # where the k-th entry is 0
    live = tl.where(answered, tl.where(left > 0, positive >= left, False), False)
    if live:
        hi, lo = _root(source, left, selectable == k, tau, most, P, WIDTH)
    hi = tl.where((left == 0) & (pinned > 0), tl.where(k == selectable, 1.0, most + 1), hi)
    hi, lo = tl.where(k == 0, HUGE, hi), tl.where(k == 0, HUGE, lo)
    return tl.where(answered, hi, float("nan")), tl.where(answered, lo, float("nan"))


@triton.jit
def _root(source, left, every, tau, most, P: tl.constexpr, WIDTH: tl.constexpr):
    zero = tl.zeros((), tl.float64)
    infinite = zero + float("inf")
    state = (0.5 * most, zero, zero, zero, most, zero, infinite, infinite)
    count = 0
    running = count == 0
    while running:
        heat, warming = temperature(state[0] + state[1], tau, P)
        own, F, slope = sums(_counts, (state[0], state[1], heat, P), 3, source, BY_COUNT, WIDTH)
        miss = (own - left) + F
        gap = tl.where(own == left, F == 0, False)
        if gap:
            up, down = least(_ends, (state[0], state[1], heat), 2, source, BY_COUNT, WIDTH)
            middle = 0.5 * unpooled(up, tau, P) - tl.where(every, 0.0, 0.5 * down)
            state = (middle, zero) + state[2:]  # noqa: RUF005
            running = count < 0
        else:
            step = miss / (slope + warming * F)
            trial = (miss, tl.abs(miss), 2 * NOISE * tl.maximum(F, 1.0), step, F > 0)
            state, finished = next_state(
                state, trial, (zero + float("nan"), zero), heat, 1.0, count, UNIFORM
            )  # fmt: skip
            count += 1
            running = ~finished & (count < EVALUATIONS64)
    return state[0], state[1]


@triton.jit
def _write_exactly(
    to, source, hi, lo, tau, P: tl.constexpr, SIGNED: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    none = hi == HUGE
    gamma = tl.where(none, 0.0, hi + lo)
    heat = temperature(gamma, tau, P)[0]
    for start in range(0, source[3], WIDTH):
        column = start + tl.arange(0, WIDTH)
        x, _ = load(source, start, BY_COUNT, WIDTH)
        s = tl.abs(x)
        selectable = s == s if SIGNED else x != float("-inf")
        finite = tl.where(s == float("inf"), 0.0, s)
        z, _, F = _position(finite, hi, lo, tl.where(heat > 0, heat, 1.0), P)
        # where γ is 0, nothing is pooled
        own = selectable & ((z >= tl.where(gamma == 0, 0.0, 1.0)) | (s == float("inf")))
        y = tl.where(own, tl.where(s == float("inf"), s, unpooled(finite, tau, P)), gamma * F)
        y = tl.where(none, 0.0, tl.where(x < 0, -y, y))
        store(to + column, tl.where(hi == hi, y, hi), column < source[3])


@triton.jit
def _solve_exactly(
    row, x_pointer, x_stride, k, tau, out_pointer, hi_pointer, lo_pointer, n,
    P: tl.constexpr, SIGNED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row, which is read a chunk at a time."""
    source = (x_pointer + row * x_stride, x_pointer, 0, n)
    k, tau = number64(*k, row), number64(*tau, row)
    hi, lo = _find_exactly(source, k, tau, P, SIGNED, WIDTH)
    tl.store(hi_pointer + row, hi)
    tl.store(lo_pointer + row, lo)
    _write_exactly(out_pointer + row * n, source, hi, lo, tau, P, SIGNED, WIDTH)


# ------------------------------------------------------------------------------------- forward


@triton.jit
def _find(
    x, at, there, n_columns, k, tau, power, evaluations,
    P: tl.constexpr, SIGNED: tl.constexpr, WHOLE: tl.constexpr, TOGETHER: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """γ of rows, and which of them have one."""
    n, first, second = over(x, at, n_columns, pooled_moments, 0, 3, TOGETHER, PIECES, WIDTH, STREAM)
    n, first, second = n.to(tl.float32), first.to(tl.float32), second.to(tl.float32)
    rest = n - k
    ok = there & (k > 0) & (rest > 0) & (k == tl.floor(k)) & holds(n, rest, power, POWER)
    ok = ok & (tau > 1e-15) & (tau < 1e15) & (second < 1e25) & (second > 1e-25)
    if SIGNED:  # −inf is of infinite size
        ok = ok & (n == n_columns)
    mean = first * reciprocal(n)
    variance = tl.maximum(second * reciprocal(n) - mean * mean, 0.0)
    # γ if all entries were pooled, and alike; from it a temperature, and from that the quantile
    alike = n * reciprocal(k) * tl.exp2(power * (log2(mean) - log2(tau)))
    gamma = mean * alike * reciprocal(mean + alike)
    heat, _ = temperature(gamma, tau, P)
    t, _, _, per_deviation, normal = guess(n, mean, variance, k, heat, power, POWER)
    high = 1.01 * (mean + tl.sqrt(variance * rest * reciprocal(k)))
    hi = tl.minimum(tl.where(t > 0.25 * gamma, t, gamma), high)
    crowd = n * tl.exp2(normal * normal * (-0.5 * LOG2E)) * 0.3989423 * heat * per_deviation
    done = ~ok
    hi = tl.where(ok, hi, 1.0)
    hi, lo, solved = iterate(
        x, at, n_columns, hi, hi * 0, hi * 0, high, crowd, done, n, k, k * 0, tau, reciprocal(heat),
        power, evaluations, POWER, WHOLE, TOGETHER, PIECES, WIDTH, STREAM, TOGETHER == 1 and not STREAM,
        POOLED=P,
    )  # fmt: skip
    return hi, lo, ok & solved & (hi > 0)


@triton.jit
def _values(x, given, P: tl.constexpr, WHOLE: tl.constexpr):
    """y with the sign of x. Given are hi, lo/τγ^(p−1), 1/τγ^(p−1), γ, τ and the exponent of z."""
    hi, shift, scale, gamma, tau, power = given
    s = size(x)
    z = (s - hi) * scale - shift
    y = tl.where(z >= 1, unpooled(s, tau, P), gamma * value(s, hi, scale, shift, power, POWER, WHOLE))
    return tl.where(x < 0, -y, y)


@triton.jit(do_not_specialize=["rows", "evaluations"])
def solve_magnitudes(
    x_pointer, x_stride, k_pointer, k_stride, k_high, k_low, tau_pointer, tau_stride, tau_high, tau_low,
    out_pointer, hi_pointer, lo_pointer, rows, n_columns, evaluations, power_high,
    P: tl.constexpr, SIGNED: tl.constexpr, FINE: tl.constexpr, WHOLE: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
    STREAM: tl.constexpr, CHUNK: tl.constexpr, ORDINARY: tl.constexpr = 0,
):  # fmt: skip
    """`TOGETHER` rows of at most `PIECES`·`WIDTH` entries each, or one of any length that streams past. Where
    entries are SIGNED they stand for their size. FINE says that all of it takes float64, ORDINARY that
    nothing does: for counting instructions, and for nothing else."""
    row, there = place_rows(rows, TOGETHER)
    ok = there & ~there
    if not FINE:
        column = tl.arange(0, WIDTH)
        at = x_pointer + entries(row, x_stride, column, TOGETHER)
        x = ()
        if not STREAM:
            x = load_rows(at, there, n_columns, TOGETHER, PIECES, WIDTH, EXACT)
        k, k_rest = numbers(k_pointer, k_stride, k_high, k_low, row, there)
        tau = numbers(tau_pointer, tau_stride, tau_high, tau_low, row, there)[0]
        power = tl.zeros((), tl.float32) + power_high
        hi, lo, ok = _find(
            x, at, there & (k_rest == 0), n_columns, k, tau, power, evaluations,
            P, SIGNED, WHOLE, TOGETHER, PIECES, WIDTH, STREAM,
        )  # fmt: skip
        tl.store(hi_pointer + row, hi.to(tl.float64), mask=ok)
        tl.store(lo_pointer + row, lo.to(tl.float64), mask=ok)
        heat, _ = temperature(hi + lo, tau, P)
        scale = reciprocal(heat)
        scale = scale * (2 - heat * scale)  # to the last digit
        given = (
            wide(hi, TOGETHER), wide(lo * scale, TOGETHER), wide(scale, TOGETHER), wide(hi + lo, TOGETHER),
            wide(tau, TOGETHER), power,
        )  # fmt: skip
        to = out_pointer + entries(row, n_columns, column, TOGETHER)
        if STREAM:
            for start in range(0, n_columns, PIECES * WIDTH):
                held = load_rows(at + start, ok, n_columns - start, 1, PIECES, WIDTH, False)
                for i in tl.static_range(PIECES):
                    valid = inside(ok, column + (start + i * WIDTH), n_columns, 1, False)
                    y = _values(held[i], given, P, WHOLE).to(out_pointer.dtype.element_ty)
                    tl.store(to + (start + i * WIDTH), y, mask=valid)
        else:
            for i in tl.static_range(PIECES):
                valid = inside(ok, column + i * WIDTH, n_columns, TOGETHER, EXACT)
                y = _values(x[i], given, P, WHOLE).to(out_pointer.dtype.element_ty)
                tl.store(to + i * WIDTH, y, mask=valid)

    if not ORDINARY:
        rescue(
            there & ~ok, row, _solve_exactly,
            (
                x_pointer, x_stride, (k_pointer, k_stride, k_high, k_low),
                (tau_pointer, tau_stride, tau_high, tau_low), out_pointer, hi_pointer, lo_pointer, n_columns,
                P, SIGNED, CHUNK,
            ),
            TOGETHER,
        )  # fmt: skip


# ------------------------------------------------------------------------------------ backward


@triton.jit
def _rates(x, y, given, P: tl.constexpr, SIGNED: tl.constexpr):
    """Which entries are selected on their own; dv/ds and −dv/dτ there; r = dY/ds of pooled ones, and r w.

    Given are hi, lo, 1/τγ^(p−1), γ/τγ^(p−1), γ^(p−1) and τ, in the dtype of the arithmetic.
    """
    hi, lo, inverse, lift, heat, tau = given
    s = tl.abs(x) if SIGNED else x
    z = ((s - hi) - lo) * inverse
    own = z >= 1
    if hi.dtype == tl.float64:  # of other rows γ is not 0, and nothing is infinite
        own = ((z >= tl.where(inverse == 0, 0.0, 1.0)) & (s >= 0)) | (s == float("inf"))
    pooled = (z > 0) & ~own
    moves = own & (s < float("inf"))
    if P == 2:
        rate = tl.where(pooled, lift, 0.0)
        slope = 1 / (1 + tau)
        slope = tl.where(moves, slope, 0.0)
        fall = slope * slope * tl.where(moves, s, 0.0)
    else:
        y = tl.abs(y)
        moves = moves & (y > 0)
        log_y = tl.log2(tl.where(moves, y, 1.0))
        slope = tl.where(moves, 1 / (1 + tau * (P - 1) * tl.exp2((P - 2) * log_y)), 0.0)
        fall = slope * tl.exp2((P - 1) * log_y)
        e: tl.constexpr = 1 / (P - 1)
        rate = e * lift * tl.exp2((e - 1) * tl.log2(tl.where(pooled, z, 1.0)))
        rate = tl.where(pooled, rate, 0.0)
    return own, slope, fall, rate, rate * tl.where(pooled, z, 0.0) * heat


@triton.jit
def _entries(
    x_at, y_at, grad_at, grad_column, offset, valid, TYPE: tl.constexpr, P: tl.constexpr, SIGNED: tl.constexpr
):  # fmt: skip
    """x; y where it is used; and the incoming gradient, in the direction of |x|."""
    x = tl.load(x_at + offset, mask=valid, other=0.0 if SIGNED else float("-inf")).to(TYPE)
    y = x
    if P != 2:
        y = tl.load(y_at + offset, mask=valid, other=0.0).to(TYPE)
    v = tl.load(grad_at + tl.cast(offset, tl.int64) * grad_column, mask=valid, other=0.0).to(TYPE)
    return x, y, tl.where(x < 0, -v, v)


@triton.jit
def _pull(
    x_at, y_at, grad_at, grad_column, dx_at, dtau_at, there, n, k, hi, lo, tau, grad_lo,
    P: tl.constexpr, SIGNED: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of rows, in the dtype of hi; and which rows have finite ones. Entries are read twice, as
    many pieces at a time: first for what γ brings to the pooled ones."""
    column = tl.arange(0, WIDTH)
    none = tl.abs(hi) >= HUGE if hi.dtype == tl.float64 else hi != hi
    gamma = tl.where(none, 0.0, hi + lo)
    heat = temperature(gamma, tau, P)[0]
    inverse = tl.where(heat > 0, 1 / heat, 0.0)
    given = (
        wide(hi, TOGETHER), wide(lo, TOGETHER), wide(inverse, TOGETHER), wide(gamma * inverse, TOGETHER),
        wide(heat / tau, TOGETHER), wide(tau, TOGETHER),
    )  # fmt: skip
    nothing = hi.to(tl.float64) * 0
    alone, mass, moment, through, falls = nothing, nothing, nothing, nothing, nothing
    for start in range(0, n, PIECES * WIDTH):
        held = ()
        for i in tl.static_range(PIECES):
            offset = start + i * WIDTH
            valid = inside(there, column + offset, n, TOGETHER, False)
            x, y, v = _entries(x_at, y_at, grad_at, grad_column, offset, valid, hi.dtype, P, SIGNED)
            own, _slope, fall, rate, turn = _rates(x, y, given, P, SIGNED)
            one = tl.where(valid & own, 1.0, 0.0).to(hi.dtype)
            held = plus(held, (one, rate, turn, rate * v, v * (fall + turn)))
        found = total(held, TOGETHER)
        alone, mass, moment = alone + found[0], mass + found[1], moment + found[2]
        through, falls = through + found[3], falls + found[4]
    live = mass > 0
    pull = tl.where(live, (grad_lo - through) / tl.where(live, k - alone + mass, 1.0), 0.0)
    dtau = -falls - pull * moment
    ok = there
    if hi.dtype != tl.float64:
        ok = ok & (tl.abs(dtau) < 1e30) & (tl.abs(pull) < 1e30)
    else:
        dtau = tl.where(hi == hi, dtau, hi)
    tl.store(dtau_at, dtau, mask=ok)
    share = wide(pull.to(hi.dtype), TOGETHER)
    for start in range(0, n, PIECES * WIDTH):
        for i in tl.static_range(PIECES):
            offset = start + i * WIDTH
            valid = inside(ok, column + offset, n, TOGETHER, False)
            x, y, v = _entries(x_at, y_at, grad_at, grad_column, offset, valid, hi.dtype, P, SIGNED)
            _own, slope, _fall, rate, _turn = _rates(x, y, given, P, SIGNED)
            dx = slope * v + rate * (v + share)
            dx = tl.where(x < 0, -dx, dx)
            if hi.dtype == tl.float64:
                dx = tl.where(hi == hi, dx, hi)
            store(dx_at + offset, dx, valid)
    return ok


@triton.jit(do_not_specialize=["rows"])
def pull_magnitudes(
    x_pointer, x_stride, y_pointer, y_stride, grad_pointer, grad_row, grad_column,
    grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low, k_pointer, k_stride, k_high, k_low,
    hi_pointer, lo_pointer, tau_pointer, tau_stride, tau_high, tau_low, dx_pointer, dtau_pointer,
    rows, n_columns,
    P: tl.constexpr, SIGNED: tl.constexpr, FINE: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, ORDINARY: tl.constexpr = 0,
):  # fmt: skip
    """The gradients in x and τ. FINE and ORDINARY are as for :func:`solve_magnitudes`."""
    row, there = place_rows(rows, TOGETHER)
    ok = there & ~there
    if not FINE:
        column = tl.arange(0, WIDTH)
        hi64 = tl.load(hi_pointer + row, mask=there, other=0.0)
        hi, rest = split(hi64)
        lo = rest + tl.load(lo_pointer + row, mask=there, other=0.0).to(tl.float32)
        grad_lo = numbers(grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low, row, there)[0]
        tau = numbers(tau_pointer, tau_stride, tau_high, tau_low, row, there)[0]
        k = numbers(k_pointer, k_stride, k_high, k_low, row, there)[0]
        ordinary = there & (hi > 1e-12) & (hi < 1e12) & (tau > 1e-15) & (tau < 1e15)
        ok = _pull(
            x_pointer + entries(row, x_stride, column, TOGETHER),
            y_pointer + entries(row, y_stride, column, TOGETHER),
            grad_pointer + entries(row, grad_row, column.to(tl.int64) * grad_column, TOGETHER), grad_column,
            dx_pointer + entries(row, n_columns, column, TOGETHER), dtau_pointer + row,
            ordinary, n_columns, k, tl.where(ordinary, hi, 1.0), lo, tl.where(ordinary, tau, 1.0), grad_lo,
            P, SIGNED, TOGETHER, PIECES, WIDTH,
        )  # fmt: skip

    if not ORDINARY:
        rescue(
            there & ~ok, row, _pull_exactly,
            (
                x_pointer, x_stride, y_pointer, y_stride, grad_pointer, grad_row, grad_column,
                (grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low),
                (k_pointer, k_stride, k_high, k_low), hi_pointer, lo_pointer,
                (tau_pointer, tau_stride, tau_high, tau_low), dx_pointer, dtau_pointer, rows, n_columns,
                P, SIGNED, CHUNK,
            ),
            TOGETHER,
        )  # fmt: skip


@triton.jit
def _pull_exactly(
    row, x_pointer, x_stride, y_pointer, y_stride, grad_pointer, grad_row, grad_column, grad_lo, k,
    hi_pointer, lo_pointer, tau, dx_pointer, dtau_pointer, rows, n,
    P: tl.constexpr, SIGNED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row in float64."""
    place = tl.arange(0, WIDTH)
    _pull(
        x_pointer + row * x_stride + place, y_pointer + row * y_stride + place,
        grad_pointer + row * grad_row + place.to(tl.int64) * grad_column, grad_column,
        dx_pointer + row * n + place, dtau_pointer + row, row < rows, n,
        number64(*k, row), tl.load(hi_pointer + row), tl.load(lo_pointer + row), number64(*tau, row),
        number64(*grad_lo, row), P, SIGNED, 1, 1, WIDTH,
    )  # fmt: skip


KERNELS = (solve_magnitudes, pull_magnitudes)


@functools.lru_cache(maxsize=1024)
def _variants(rows: int, n: int, p: float, signed: bool, fine: bool) -> tuple[Variant, Variant, int, float]:
    """What is launched forward and backward, in how many programs, and the exponent of z."""
    tile = layout.Tile(1, 1, 128, 4) if fine else layout.tile(rows, n)
    power, _ = layout.power(cdfs.Power(p)) if p < 2 else (1.0, 0.0)
    constants = {
        "P": float(p), "SIGNED": signed, "FINE": fine, "TOGETHER": tile.together, "WIDTH": tile.width,
        "CHUNK": layout.RESCUE * tile.warps, "num_warps": tile.warps, **layout.registers(),
    }  # fmt: skip
    solver = variant(
        solve_magnitudes, WHOLE=1 if p == 2 else layout.whole(cdfs.Power(p)), PIECES=tile.pieces,
        EXACT=n == tile.pieces * tile.width, STREAM=tile.streams, **constants,
    )  # fmt: skip
    puller = variant(pull_magnitudes, PIECES=min(tile.pieces, 4), **constants)
    return solver, puller, -(-rows // tile.together), power


def _solve(s: Tensor, k: Tensor, tau: Tensor, p: float, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """For magnitudes, or for entries with signs."""
    if s.numel() == 0 or p > 2:  # the kernels solve for an entry by an equation that is convex for p ≤ 2
        serves = reference.magnitude_with_signs if signed else reference.soft_topk_magnitude
        return serves(s, k, tau, p)
    batch, n = s.shape[:-1], s.shape[-1]
    y, hi = s.new_empty(s.shape), s.new_empty(batch, dtype=torch.float64)
    lo = torch.empty_like(hi)
    solver, _, programs, power = _variants(hi.numel(), n, p, signed, s.dtype == torch.float64)
    source = layout.rows(s, n)
    arguments = (
        *source, *layout.values(k, batch, s.device), *layout.values(tau, batch, s.device), y, hi, lo,
        hi.numel(), n, EVALUATIONS, power,
    )  # fmt: skip
    solver(programs, *arguments)
    if signed:
        native.prepare("soft_topk_magnitude", source[0], solver, programs, arguments, p)
    return y, hi, lo


soft_topk_magnitude: partial[tuple[Tensor, Tensor, Tensor]] = partial(_solve, signed=False)
magnitude_with_signs: partial[tuple[Tensor, Tensor, Tensor]] = partial(_solve, signed=True)


def _solve_back(
    grad: Tensor,
    grad_lo: Tensor,
    s: Tensor,
    y: Tensor,
    k: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    p: float,
    signed: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of what :func:`_solve` computes."""
    if s.numel() == 0 or p > 2:
        serves = reference.magnitude_with_signs_backward if signed else reference.soft_topk_magnitude_backward
        return serves(grad, grad_lo, s, y, k, hi, lo, tau, p)
    batch, n = s.shape[:-1], s.shape[-1]
    ds, dtau = s.new_empty(s.shape), hi.new_empty(batch)
    _, puller, programs, _ = _variants(dtau.numel(), n, p, signed, s.dtype == torch.float64)
    source, rest = layout.rows(s, n), layout.values(grad_lo, batch, s.device)
    arguments = (
        *source, *layout.rows(y, n), *layout.matrix(grad, s), *rest, *layout.values(k, batch, s.device),
        hi.contiguous(), lo.contiguous(), *layout.values(tau, batch, s.device), ds, dtau, dtau.numel(), n,
    )  # fmt: skip
    puller(programs, *arguments)
    if signed and rest.pointer is None and rest.high == 0:
        native.prepare("soft_topk_magnitude", source[0], puller, programs, arguments, p, backward=True)
    return ds, dtau


soft_topk_magnitude_backward: partial[tuple[Tensor, Tensor]] = partial(_solve_back, signed=False)
magnitude_with_signs_backward: partial[tuple[Tensor, Tensor]] = partial(_solve_back, signed=True)
