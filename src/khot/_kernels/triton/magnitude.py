"""Top-k in magnitude: the k-th largest entry, Newton for the value that the pooled entries share, and y.

The method is the reference's (`_kernels.reference.magnitude`), which has the formulas.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import magnitude as reference
from khot._kernels.triton import layout
from khot._kernels.triton.functions import HUGE, chunks, gather, get, load, pair, place, put
from khot._kernels.triton.launch import launch
from khot._kernels.triton.selection import digits, histograms, ordered, select, whole

EVALUATIONS = 60  # at most, of a resident row; bisection alone would need about as many
LAUNCHES = 8  # passes over a long row by all programs: of rows of many kinds one in a hundred needs more

# ----------------------------------------------------------------------------------- of an entry


@triton.jit
def _signs(x, v, SIGNED: tl.constexpr):
    """v with the signs of x: a result, or a cotangent. Where entries are SIGNED they stand for |x|."""
    return tl.where(x < 0, -v, v) if SIGNED else v


@triton.jit
def _size(x, SIGNED: tl.constexpr):
    return tl.abs(x) if SIGNED else x


@triton.jit
def _unpooled(s, tau, P: tl.constexpr):
    """v ≥ 0 with v + τ v^(p−1) = s, and s − v: see `selection.unpooled`."""
    if P == 2:
        v, drop = s / (1 + tau), s * (tau / (1 + tau))
    else:
        e: tl.constexpr = 1 / (P - 1)
        largest: tl.constexpr = 1e300 if s.dtype == tl.float64 else 1e30
        s = tl.maximum(s, 0.0)
        c = tl.minimum(tau * tl.exp((P - 2) * tl.log(s)), largest)
        b = tl.minimum(1 / c, 1.0)
        for _ in tl.static_range(12):
            power = tl.exp(e * tl.log(b))
            b -= (power + c * b - 1) / (e * power / b + c)
            b = tl.minimum(tl.maximum(b, 1 / largest), 1.0)
        power = tl.exp(e * tl.log(b))
        drop = s * tl.minimum(c * b, 1.0)
        # each has its digits where it is the smaller share of s
        v = tl.where(power > 0.5, s * (1 - tl.minimum(c * b, 1.0)), s * power)
    return v, drop


@triton.jit
def _block(s, valid, hi, lo, tau, P: tl.constexpr):
    """w = (s − γ)₊/τ, Y = w^(q−1), whether an entry is selected on its own, and whether it is pooled."""
    high = hi.to(s.dtype)
    rest = (hi - high.to(tl.float64) + lo).to(s.dtype)[:, None]
    gamma = (hi + lo).to(s.dtype)[:, None]
    w = tl.maximum((s - high[:, None]) - rest, 0.0) / tau.to(s.dtype)[:, None]
    y = w if P == 2 else tl.exp((1 / (P - 1)) * tl.log(w))
    alone = valid & (y >= gamma) & (s >= 0)
    return w, y, alone, valid & (y > 0) & (y < gamma)


@triton.jit
def _pooled_sums(s, valid, hi, lo, tau, P: tl.constexpr):
    """How many are selected on their own; ΣY over the pooled, and its slope in −γ."""
    w, y, alone, inside = _block(s, valid, hi, lo, tau, P)
    rate = tl.where(inside, y / tl.where(inside, w, 1.0), 0.0) / ((P - 1) * tau.to(s.dtype)[:, None])
    return (
        tl.sum(tl.where(alone, 1, 0), axis=1).to(tl.float64),
        tl.sum(tl.where(inside, y, 0.0).to(tl.float64), axis=1),
        tl.sum(rate.to(tl.float64), axis=1),
    )


@triton.jit
def _write(pointer, offset, x, valid, hi, lo, tau, P: tl.constexpr, SIGNED: tl.constexpr):
    s = _size(x, SIGNED)
    _, y, alone, _ = _block(s, valid, hi, lo, tau, P)
    v, _ = _unpooled(s, tau.to(s.dtype)[:, None], P)
    y = tl.where((hi != hi)[:, None], float("nan"), _signs(x, tl.where(alone, v, y), SIGNED))
    tl.store(pointer + offset, y.to(pointer.dtype.element_ty), mask=valid)


# ------------------------------------------------------------------------------------ of a row


@triton.jit
def _unanswered(nan, k, selectable, pinned, tau):
    bad = (nan > 0) | (k != k) | (k < 0) | (k > selectable) | (k != tl.floor(k)) | (pinned > k)
    return bad | (tau != tau) | (tau <= 0) | (tau > HUGE)


@triton.jit
def _begin(least_in, most_out, k, tau, bad, P: tl.constexpr):
    """γ to begin with as anchor + offset, the offset's bracket, s − v of the k-th entry, and whether that is
    all. The anchor is that entry or 0, as in the reference.
    """
    most_out = tl.maximum(most_out, 0.0)
    tau = tl.where(bad, 1.0, tau)
    v, drop = _unpooled(least_in, tau, P)
    gap = least_in - most_out
    pooled = (gap < drop) & (k > 0) & ~bad
    near = drop < 0.5 * least_in
    slack: tl.constexpr = 1 + 1e-14
    low, high = tl.where(near, -drop * slack, v / slack), tl.where(near, -gap, most_out)
    parting = tl.where(v == float("inf"), most_out + 1, 0.5 * v + 0.5 * most_out)
    settled = tl.where(bad, float("nan"), tl.where(k == 0, HUGE, parting))
    anchor = tl.where(pooled, tl.where(near, least_in, 0.0), settled)
    rest = tl.where(bad, float("nan"), tl.where(k == 0, HUGE, 0.0))
    offset = tl.where(pooled, 0.5 * low + 0.5 * high, rest)
    return anchor, offset, low, high, tl.where(pooled, drop, 1.0), tl.where(pooled, 0.0, 1.0).to(tl.float64)


@triton.jit
def _gamma(anchor, offset, FINE: tl.constexpr):
    """γ as hi + lo, or what stands for none."""
    hi, lo = pair(anchor, offset, FINE)
    some = tl.abs(anchor) < HUGE
    return tl.where(some, hi, anchor), tl.where(some, lo, offset)


@triton.jit
def _step(alone, total, slope, k, anchor, offset, low, high, drop, FINE: tl.constexpr):
    """One of safeguarded Newton for (k − #alone)·γ = ΣY, which increases in γ."""
    left = k - alone
    target = total - left * anchor
    low = tl.where(target > left * offset, tl.maximum(low, offset), low)
    high = tl.where(target < left * offset, tl.minimum(high, offset), high)
    trial = target / (left + slope) + slope / (left + slope) * offset
    finite = tl.abs(trial) < HUGE
    inside = tl.minimum(tl.maximum(trial, low), high)
    rounding = tl.where(anchor == 0, inside, drop) * (1e-15 if FINE else 1e-7)  # as ΣY
    last = (tl.abs(trial - offset) <= rounding) & finite
    inside = tl.where(tl.abs(trial - low) <= rounding, low + rounding, 0.5 * low + 0.5 * high)
    trial = tl.where(((trial > low) & (trial < high)) | last, trial, inside)
    return trial, low, high, last | (finite & (high - low <= rounding))


# ------------------------------------------------------------------------------------ forward


@triton.jit(do_not_specialize=["rows", "evaluations"])
def _resident(
    s_pointer, s_stride, k_pointer, k_stride, tau_pointer, tau_stride, out_pointer, hi_pointer, lo_pointer,
    rows, n, evaluations,
    P: tl.constexpr, SIGNED: tl.constexpr, COMPUTE: tl.constexpr, TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    FINE: tl.constexpr = tl.float64 == COMPUTE
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    there = row < rows
    valid = there[:, None] & (column < n)[None, :]
    x = load(s_pointer, row, s_stride, column, valid, COMPUTE)
    s = _size(x, SIGNED)
    k = tl.load(k_pointer + row * k_stride, mask=there, other=0.0).to(tl.float64)
    tau = tl.load(tau_pointer + row * tau_stride, mask=there, other=1.0).to(tl.float64)
    nan = tl.sum(tl.where(valid & (s != s), 1, 0), axis=1)
    selectable = tl.sum(tl.where(valid & (s != float("-inf")), 1, 0), axis=1)
    pinned = tl.sum(tl.where(valid & (s == float("inf")), 1, 0), axis=1)
    bad = _unanswered(nan, k, selectable, pinned, tau)

    key = ordered(s)
    count = tl.where(bad | (k < 1), 1.0, k).to(tl.int32)
    inside = valid & ~bad[:, None]
    parting = select(key, inside, count)[:, None]
    reach = tl.sum(tl.where(inside & (key >= parting), 1, 0), axis=1)
    least_in = tl.min(tl.where(inside & (key >= parting), s, float("inf")), axis=1).to(tl.float64)
    most_out = tl.max(tl.where(inside & (key < parting), s, float("-inf")), axis=1).to(tl.float64)
    most_out = tl.where(reach > count, least_in, most_out)
    anchor, offset, low, high, drop, done = _begin(least_in, most_out, k, tau, bad, P)
    hi, lo = _gamma(anchor, offset, FINE)
    tau = tl.where(bad, 1.0, tau)

    left = evaluations
    running = tl.sum(tl.where(done > 0, 0, 1))
    while running > 0:
        alone, total, slope = _pooled_sums(s, valid, hi, lo, tau, P)
        trial, low, high, last = _step(alone, total, slope, k, anchor, offset, low, high, drop, FINE)
        offset = tl.where(done > 0, offset, trial)
        hi, lo = _gamma(anchor, offset, FINE)
        done = tl.where(last, 1.0, done)
        left -= 1
        running = tl.where(left > 0, tl.sum(tl.where(done > 0, 0, 1)), 0)
    tl.store(hi_pointer + row, hi, mask=there)
    tl.store(lo_pointer + row, lo, mask=there)
    _write(out_pointer, row[:, None] * n + column[None, :], x, valid, hi, lo, tau, P, SIGNED)


@triton.jit
def _greatest_below(greatest, given, s, valid, row, column):
    key = ordered(s) >> given[1]
    below = tl.max(tl.where(valid & (key < given[0]), s, float("-inf")), axis=1)
    return tl.maximum(greatest, below.to(tl.float64))


@triton.jit(do_not_specialize=["rows", "parts", "wanted", "unused"])
def _part_below(
    s_pointer, s_stride, k_pointer, k_stride, counts_pointer, sums_pointer,
    rows, n, length, parts, wanted, unused,
    SIGNED: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The greatest of the part's entries that is less than the k-th largest."""
    row, part = place(parts)
    prefix, _, _ = digits(counts_pointer, rows, row, whole(k_pointer, k_stride, row), wanted)
    greatest = tl.zeros((1,), tl.float64) - float("inf")
    greatest = chunks(
        _greatest_below, greatest, (prefix, unused),
        s_pointer, s_stride, row, part, n, length, COMPUTE, CHUNK, SIGNED,
    )  # fmt: skip
    tl.store(sums_pointer + (row * parts + part) * 3 + tl.arange(0, 1), greatest)


@triton.jit(do_not_specialize=["rows", "parts", "wanted", "unused"])
def _part_begin(
    k_pointer, k_stride, tau_pointer, tau_stride, counts_pointer, tally_pointer, sums_pointer, state_pointer,
    rows, parts, wanted, unused, P: tl.constexpr, COMPUTE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    one = row + tl.arange(0, 1)
    prefix, left, level = digits(counts_pointer, rows, row, whole(k_pointer, k_stride, row), wanted)
    key = (prefix << unused) + tl.zeros((1,), tl.int64)  # no entry is negative, but for −inf
    if tl.float64 == COMPUTE:
        least_in = key.to(tl.float64, bitcast=True)
    else:
        least_in = key.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    most_out = tl.max(gather(sums_pointer + row * parts * 3, parts, 0, PARTS, 3, float("-inf")), axis=1)
    most_out = tl.where(level > left, least_in, most_out)
    k = tl.load(k_pointer + one * k_stride).to(tl.float64)
    tau = tl.load(tau_pointer + one * tau_stride).to(tl.float64)
    nan, selectable, pinned = get(tally_pointer + one * 3, 3)
    bad = _unanswered(nan, k, selectable, pinned, tau)
    anchor, offset, low, high, drop, done = _begin(least_in, most_out, k, tau, bad, P)
    put(state_pointer + one * 8, (k, tl.where(bad, 1.0, tau), anchor, offset, low, high, drop, done))


@triton.jit
def _advance(state, sums, parts, count, FINE: tl.constexpr, PARTS: tl.constexpr):
    """The state of a row after the step that its sums call for; as it was where it is done."""
    k, tau, anchor, offset, low, high, drop, done = get(state, 8)
    if tl.sum(done) == 0 and count > 0:
        alone = tl.sum(gather(sums, parts, 0, PARTS, 3, 0.0), axis=1)
        total = tl.sum(gather(sums, parts, 1, PARTS, 3, 0.0), axis=1)
        slope = tl.sum(gather(sums, parts, 2, PARTS, 3, 0.0), axis=1)
        offset, low, high, last = _step(alone, total, slope, k, anchor, offset, low, high, drop, FINE)
        done = tl.where(last, 1.0, 0.0).to(tl.float64)
    return k, tau, anchor, offset, low, high, drop, done


@triton.jit
def _add_sums(sums, given, s, valid, row, column):
    alone, total, slope = sums
    P: tl.constexpr = given[3]
    alone_c, total_c, slope_c = _pooled_sums(s, valid, given[0], given[1], given[2], P)
    return alone + alone_c, total + total_c, slope + slope_c


@triton.jit(do_not_specialize=["parts", "count"])
def _part_evaluate(
    s_pointer, s_stride, sums_before, state_before, sums_after, state_after, n, length, parts, count,
    P: tl.constexpr, SIGNED: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    FINE: tl.constexpr = tl.float64 == COMPUTE
    row, part = place(parts)
    at = row * 8 + tl.arange(0, 1)
    state = _advance(state_before + at, sums_before + row * parts * 3, parts, count, FINE, PARTS)
    if part == 0:
        put(state_after + at, state)
    _, tau, anchor, offset, _, _, _, done = state
    if tl.sum(done) == 0:
        hi, lo = _gamma(anchor, offset, FINE)
        zero = tl.zeros((1,), tl.float64)
        sums = chunks(
            _add_sums, (zero, zero, zero), (hi, lo, tau, P),
            s_pointer, s_stride, row, part, n, length, COMPUTE, CHUNK, SIGNED,
        )  # fmt: skip
        put(sums_after + (row * parts + part) * 3 + tl.arange(0, 1), sums)


@triton.jit(do_not_specialize=["parts", "count", "evaluations"])
def _finish_rows(
    s_pointer, s_stride, sums_before, state_before, state_after, n, parts, count, evaluations,
    P: tl.constexpr, SIGNED: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The steps that few rows still need, by one program each."""
    FINE: tl.constexpr = tl.float64 == COMPUTE
    row = tl.program_id(0).to(tl.int64)
    at = row * 8 + tl.arange(0, 1)
    k, tau, anchor, offset, low, high, drop, done = _advance(
        state_before + at, sums_before + row * parts * 3, parts, count, FINE, PARTS
    )
    left = tl.where(tl.sum(done) == 0, evaluations, 0)
    while left > 0:
        hi, lo = _gamma(anchor, offset, FINE)
        zero = tl.zeros((1,), tl.float64)
        alone, total, slope = chunks(
            _add_sums, (zero, zero, zero), (hi, lo, tau, P),
            s_pointer, s_stride, row, 0, n, n, COMPUTE, CHUNK, SIGNED,
        )  # fmt: skip
        offset, low, high, last = _step(alone, total, slope, k, anchor, offset, low, high, drop, FINE)
        left = tl.where(tl.sum(tl.where(last, 1, 0)) > 0, 0, left - 1)
    put(state_after + at, (k, tau, anchor, offset, low, high, drop, done * 0 + 1))


@triton.jit
def _write_chunk(sums, given, x, valid, row, column):
    pointer, n, hi, lo, tau = given[:5]
    P: tl.constexpr = given[5]
    SIGNED: tl.constexpr = given[6]
    _write(pointer, row * n + column[None, :], x, valid, hi, lo, tau, P, SIGNED)
    return sums


@triton.jit(do_not_specialize=["parts", "count"])
def _part_write(
    s_pointer, s_stride, sums_pointer, state_pointer, out_pointer, hi_pointer, lo_pointer,
    n, length, parts, count,
    P: tl.constexpr, SIGNED: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    FINE: tl.constexpr = tl.float64 == COMPUTE
    row, part = place(parts)
    one = row + tl.arange(0, 1)
    _, tau, anchor, offset, _, _, _, _ = _advance(
        state_pointer + one * 8, sums_pointer + row * parts * 3, parts, count, FINE, PARTS
    )
    hi, lo = _gamma(anchor, offset, FINE)
    if part == 0:
        tl.store(hi_pointer + one, hi)
        tl.store(lo_pointer + one, lo)
    chunks(
        _write_chunk, (), (out_pointer, n, hi, lo, tau, P, SIGNED),
        s_pointer, s_stride, row, part, n, length, COMPUTE, CHUNK,
    )  # fmt: skip


def _solve(s: Tensor, k: Tensor, tau: Tensor, p: float, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """For magnitudes, or for entries with signs."""
    if s.shape[-1] == 0 or p > 2:  # the kernels solve for an entry by an equation that is convex for p ≤ 2
        serves = reference.magnitude_with_signs if signed else reference.soft_topk_magnitude
        return serves(s, k, tau, p)
    batch, n = s.shape[:-1], s.shape[-1]
    y, hi = s.new_empty(s.shape), s.new_empty(batch, dtype=torch.float64)
    lo, rows = torch.empty_like(hi), hi.numel()
    if rows == 0:
        return y, hi, lo
    source, k_row, tau_row = (
        layout.rows(s, n),
        layout.numbers(k, batch, s.device),
        layout.numbers(tau, batch, s.device),
    )
    which = {"P": float(p), "COMPUTE": layout.compute(s.dtype)}
    form = {"SIGNED": signed}
    if n <= layout.RESIDENT:
        width, together, warps = layout.block(n)
        launch(
            _resident, triton.cdiv(rows, together),
            *source, *k_row, *tau_row, y, hi, lo, rows, n, EVALUATIONS,
            **which, **form, TOGETHER=together, WIDTH=width, num_warps=warps,
        )  # fmt: skip
        return y, hi, lo
    parts, length = layout.parts(rows, n)
    counts, tally, unused = histograms(s, source, k_row, rows, n, signed)
    wanted = counts.numel() // (rows * 256)
    sums = [hi.new_empty(rows * parts * 3) for _ in range(2)]
    state = [hi.new_empty(rows * 8) for _ in range(2)]
    chunk, padded = {"CHUNK": layout.CHUNK}, {"PARTS": triton.next_power_of_2(parts)}
    launch(
        _part_below, rows * parts,
        *source, *k_row, counts, sums[0], rows, n, length, parts, wanted, unused,
        COMPUTE=which["COMPUTE"], **form, **chunk,
    )  # fmt: skip
    launch(
        _part_begin,
        rows,
        *k_row,
        *tau_row,
        counts,
        tally,
        sums[0],
        state[0],
        rows,
        parts,
        wanted,
        unused,
        **which,
        **padded,
    )
    for count in range(LAUNCHES):
        a, b = count % 2, 1 - count % 2
        launch(
            _part_evaluate, rows * parts,
            *source, sums[a], state[a], sums[b], state[b], n, length, parts, count,
            **which, **form, **chunk, **padded,
        )  # fmt: skip
    last = LAUNCHES % 2
    launch(
        _finish_rows, rows,
        *source, sums[last], state[last], state[1 - last], n, parts, LAUNCHES, EVALUATIONS,
        **which, **form, **chunk, **padded,
    )  # fmt: skip
    launch(
        _part_write,
        rows * parts,
        *source,
        sums[last],
        state[1 - last],
        y,
        hi,
        lo,
        n,
        length,
        parts,
        LAUNCHES,
        **which,
        **form,
        **chunk,
        **padded,
    )
    return y, hi, lo


soft_topk_magnitude: partial[tuple[Tensor, Tensor, Tensor]] = partial(_solve, signed=False)
magnitude_with_signs: partial[tuple[Tensor, Tensor, Tensor]] = partial(_solve, signed=True)


# ----------------------------------------------------------------------------------- backward


@triton.jit
def _rates(s, y, valid, hi, lo, tau, P: tl.constexpr):
    """dv/ds and −dv/dτ where an entry is selected on its own, dY/ds and w where it is pooled, else 0; and
    which are on their own."""
    w, _, alone, inside = _block(s, valid, hi, lo, tau, P)
    tau = tau.to(s.dtype)[:, None]
    w = tl.where(inside, w, 0.0)
    if P == 2:
        moves = alone & (s < float("inf"))
        own = tl.where(moves, 1 / (1 + tau), 0.0)
        fall = tl.where(moves & (s > 0), own * y, 0.0)
        rate = tl.where(inside, 1 / tau, 0.0)
    else:
        moves = alone & (s < float("inf")) & (y > 0)
        log_y = tl.log(tl.where(moves, y, 1.0))
        own = tl.where(moves, 1 / (1 + tau * (P - 1) * tl.exp((P - 2) * log_y)), 0.0)
        fall = tl.where(moves & (s > 0), own * tl.exp((P - 1) * log_y), 0.0)
        slope = tl.exp((1 / (P - 1) - 1) * tl.log(tl.where(inside, w, 1.0)))
        rate = tl.where(inside, slope / ((P - 1) * tau), 0.0)
    return own, fall, rate, w, alone


@triton.jit
def _gradient_sums(x, y, v, valid, hi, lo, tau, P: tl.constexpr, SIGNED: tl.constexpr):
    """#alone; Σr, Σrw, Σrv; and Σ v·(−∂out/∂τ)."""
    s, y, v = _size(x, SIGNED), _size(y, SIGNED), _signs(x, v, SIGNED)
    _, fall, rate, w, alone = _rates(s, y, valid, hi, lo, tau, P)
    return (
        tl.sum(tl.where(alone, 1, 0), axis=1).to(tl.float64),
        tl.sum(rate.to(tl.float64), axis=1),
        tl.sum((rate * w).to(tl.float64), axis=1),
        tl.sum((rate * v).to(tl.float64), axis=1),
        tl.sum((v * (fall + rate * w)).to(tl.float64), axis=1),
    )


@triton.jit
def _gradient_row(alone, mass, moment, through, falls, grad_lo, k, hi):
    """dL/dτ, and what γ brings to each pooled entry per unit of its rate."""
    live = mass > 0
    pull = tl.where(live, (grad_lo - through) / tl.where(live, k - alone + mass, 1.0), 0.0)
    return tl.where(hi != hi, hi, -falls - pull * moment), tl.where(hi != hi, hi, pull)


@triton.jit
def _gradient_write(
    pointer, offset, x, y, v, valid, hi, lo, tau, pull, P: tl.constexpr, SIGNED: tl.constexpr
):  # fmt: skip
    s, y, v = _size(x, SIGNED), _size(y, SIGNED), _signs(x, v, SIGNED)
    own, _, rate, _, _ = _rates(s, y, valid, hi, lo, tau, P)
    ds = own * v + rate * (v + pull.to(s.dtype)[:, None])
    ds = tl.where((hi != hi)[:, None], float("nan"), _signs(x, ds, SIGNED))
    tl.store(pointer + offset, ds.to(pointer.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _resident_backward(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, s_pointer, s_stride,
    y_pointer, y_stride, k_pointer, k_stride, hi_pointer, lo_pointer, tau_pointer, tau_stride,
    ds_pointer, dtau_pointer, rows, n,
    P: tl.constexpr, SIGNED: tl.constexpr, COMPUTE: tl.constexpr, TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    there = row < rows
    valid = there[:, None] & (column < n)[None, :]
    s = load(s_pointer, row, s_stride, column, valid, COMPUTE)
    y = load(y_pointer, row, y_stride, column, valid, COMPUTE)
    offset = row[:, None] * grad_row + column[None, :] * grad_column
    v = tl.load(grad_pointer + offset, mask=valid, other=0.0).to(COMPUTE)
    grad_lo = tl.load(grad_lo_pointer + row * grad_lo_stride, mask=there, other=0.0).to(tl.float64)
    k = tl.load(k_pointer + row * k_stride, mask=there, other=0.0).to(tl.float64)
    tau = tl.load(tau_pointer + row * tau_stride, mask=there, other=1.0).to(tl.float64)
    hi = tl.load(hi_pointer + row, mask=there, other=0.0)
    lo = tl.load(lo_pointer + row, mask=there, other=0.0)
    alone, mass, moment, through, falls = _gradient_sums(s, y, v, valid, hi, lo, tau, P, SIGNED)
    dtau, pull = _gradient_row(alone, mass, moment, through, falls, grad_lo, k, hi)
    tl.store(dtau_pointer + row, dtau, mask=there)
    offset = row[:, None] * n + column[None, :]
    _gradient_write(ds_pointer, offset, s, y, v, valid, hi, lo, tau, pull, P, SIGNED)


@triton.jit
def _load_both(given, s, valid, row, column):
    """The part of the cotangent, and of y."""
    grad_pointer, grad_row, grad_column, y_pointer, y_stride = given
    at = grad_pointer + row * grad_row + column[None, :] * grad_column
    v = tl.load(at, mask=valid, other=0.0).to(s.dtype)
    y = tl.load(y_pointer + row * y_stride + column[None, :], mask=valid, other=0.0).to(s.dtype)
    return v, y


@triton.jit
def _add_gradient_sums(sums, given, s, valid, row, column):
    P: tl.constexpr = given[4]
    SIGNED: tl.constexpr = given[5]
    v, y = _load_both(given[0], s, valid, row, column)
    alone, mass, moment, through, falls = sums
    alone_c, mass_c, moment_c, through_c, falls_c = _gradient_sums(
        s, y, v, valid, given[1], given[2], given[3], P, SIGNED
    )
    return alone + alone_c, mass + mass_c, moment + moment_c, through + through_c, falls + falls_c


@triton.jit(do_not_specialize=["parts"])
def _part_gradient_sums(
    grad_pointer, grad_row, grad_column, s_pointer, s_stride, y_pointer, y_stride, hi_pointer, lo_pointer,
    tau_pointer, tau_stride, sums_pointer, n, length, parts,
    P: tl.constexpr, SIGNED: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    one = row + tl.arange(0, 1)
    hi, lo = tl.load(hi_pointer + one), tl.load(lo_pointer + one)
    tau = tl.load(tau_pointer + one * tau_stride).to(tl.float64)
    zero = tl.zeros((1,), tl.float64)
    sums = chunks(
        _add_gradient_sums, (zero, zero, zero, zero, zero),
        ((grad_pointer, grad_row, grad_column, y_pointer, y_stride), hi, lo, tau, P, SIGNED),
        s_pointer, s_stride, row, part, n, length, COMPUTE, CHUNK,
    )  # fmt: skip
    put(sums_pointer + (row * parts + part) * 5 + tl.arange(0, 1), sums)


@triton.jit
def _write_gradient(sums, given, s, valid, row, column):
    P: tl.constexpr = given[7]
    SIGNED: tl.constexpr = given[8]
    v, y = _load_both(given[0], s, valid, row, column)
    pointer, n, hi, lo, tau, pull = given[1:7]
    _gradient_write(pointer, row * n + column[None, :], s, y, v, valid, hi, lo, tau, pull, P, SIGNED)
    return sums


@triton.jit(do_not_specialize=["parts"])
def _part_gradient_write(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, s_pointer, s_stride,
    y_pointer, y_stride, k_pointer, k_stride, hi_pointer, lo_pointer, tau_pointer, tau_stride, sums_pointer,
    ds_pointer, dtau_pointer, n, length, parts,
    P: tl.constexpr, SIGNED: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    one = row + tl.arange(0, 1)
    hi, lo = tl.load(hi_pointer + one), tl.load(lo_pointer + one)
    tau = tl.load(tau_pointer + one * tau_stride).to(tl.float64)
    k = tl.load(k_pointer + one * k_stride).to(tl.float64)
    grad_lo = tl.load(grad_lo_pointer + one * grad_lo_stride).to(tl.float64)
    sums = sums_pointer + row * parts * 5
    alone = tl.sum(gather(sums, parts, 0, PARTS, 5, 0.0), axis=1)
    mass = tl.sum(gather(sums, parts, 1, PARTS, 5, 0.0), axis=1)
    moment = tl.sum(gather(sums, parts, 2, PARTS, 5, 0.0), axis=1)
    through = tl.sum(gather(sums, parts, 3, PARTS, 5, 0.0), axis=1)
    falls = tl.sum(gather(sums, parts, 4, PARTS, 5, 0.0), axis=1)
    dtau, pull = _gradient_row(alone, mass, moment, through, falls, grad_lo, k, hi)
    if part == 0:
        tl.store(dtau_pointer + one, dtau)
    chunks(
        _write_gradient, (),
        (
            (grad_pointer, grad_row, grad_column, y_pointer, y_stride), ds_pointer, n, hi, lo, tau, pull,
            P, SIGNED,
        ),
        s_pointer, s_stride, row, part, n, length, COMPUTE, CHUNK,
    )  # fmt: skip


KERNELS = (
    _resident, _part_below, _part_begin, _part_evaluate, _finish_rows, _part_write,
    _resident_backward, _part_gradient_sums, _part_gradient_write,
)  # fmt: skip


def _pull(
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
    if s.shape[-1] == 0 or p > 2:
        serves = reference.magnitude_with_signs_backward if signed else reference.soft_topk_magnitude_backward
        return serves(grad, grad_lo, s, y, k, hi, lo, tau, p)
    batch, n = s.shape[:-1], s.shape[-1]
    ds, dtau = s.new_empty(s.shape), hi.new_empty(batch)
    rows = dtau.numel()
    if rows == 0:
        return ds, dtau
    hi, lo = hi.contiguous(), lo.contiguous()
    incoming = grad.expand(s.shape).reshape(-1, n)
    cotangent, cotangent_lo = (incoming, *incoming.stride()), layout.numbers(grad_lo, batch, s.device)
    source, result = layout.rows(s, n), layout.rows(y, n)
    k_row, tau_row = layout.numbers(k, batch, s.device), layout.numbers(tau, batch, s.device)
    which = {"P": float(p), "SIGNED": signed, "COMPUTE": layout.compute(s.dtype)}
    if n <= layout.RESIDENT:
        width, together, warps = layout.block(n)
        launch(
            _resident_backward, triton.cdiv(rows, together),
            *cotangent, *cotangent_lo, *source, *result, *k_row, hi, lo, *tau_row, ds, dtau, rows, n,
            **which, TOGETHER=together, WIDTH=width, num_warps=warps,
        )  # fmt: skip
        return ds, dtau
    parts, length = layout.parts(rows, n)
    sums = hi.new_empty(rows * parts * 5)
    launch(
        _part_gradient_sums,
        rows * parts,
        *cotangent,
        *source,
        *result,
        hi,
        lo,
        *tau_row,
        sums,
        n,
        length,
        parts,
        **which,
        CHUNK=layout.CHUNK,
    )
    launch(
        _part_gradient_write, rows * parts,
        *cotangent, *cotangent_lo, *source, *result, *k_row, hi, lo, *tau_row, sums, ds, dtau,
        n, length, parts, **which, CHUNK=layout.CHUNK, PARTS=triton.next_power_of_2(parts),
    )  # fmt: skip
    return ds, dtau


soft_topk_magnitude_backward: partial[tuple[Tensor, Tensor]] = partial(_pull, signed=False)
magnitude_with_signs_backward: partial[tuple[Tensor, Tensor]] = partial(_pull, signed=True)
