"""Laplace's soft sort and its gradients, in float32: of short rows in one launch each. Of long rows that are
sorted (:mod:`.row_sort`) one launch takes the sums, and one more the thresholds or the gradients.

Around the threshold of a level i − ½ lies a gap between two neighbours in the sorted row. All entries above
it count through the upper neighbour, and all below through the lower one, with the sums that ranks are made
of (:mod:`.ranks`). In units of the density there are at least ½ more on one side than on the other, so that
no gap is too wide for an exponential, and t is told as its distance from one neighbour.

Where the thresholds lie follows from the ranks without a search: the levels above that of an entry's rank are
below the entry. A thread finds entries of others in a scratch tensor: `tl.gather` would put a row into one
warp, which takes five times the instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.triton import layout, ranks, row_sort
from khot._kernels.triton.fast import LN2, LOG2E, wide
from khot._kernels.triton.launch import launch
from khot._kernels.triton.ranks import (
    across,
    both_sums,
    entries_of,
    finite,
    nan_of,
    sorted_rows,
    temperature,
    tile,
)
from khot._kernels.triton.rows import entries, inside, place_rows
from khot._kernels.triton.sizes import cdiv

PLANES = tl.constexpr(5)  # of the scratch tensor, for each row


@triton.jit
def _moments(y, c, s, m, next_y, next_c, next_s, next_m):
    """As `ranks.sums`, with m = Σ e^(−distance) distance, in units of ln 2."""
    distance = tl.abs(y - next_y) * next_c
    decay = tl.exp2(-distance)
    return next_y, next_c, s * decay + next_s, tl.where(decay > 0, (m + s * distance) * decay, 0.0) + next_m


@triton.jit
def _pulls(high, low, c, p, next_high, next_low, next_c, next_p):
    """Σ p e^(−distance) to the last of points that are sums of two numbers."""
    decay = tl.exp2(-tl.abs((high - next_high) + (low - next_low)) * next_c)
    return next_high, next_low, next_c, p * decay + next_p


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _ends(x, valid, AXIS: tl.constexpr):
    """How many entries are +inf, and how many are not −inf."""
    first = tl.sum(tl.where(x == float("inf"), 1, 0), axis=AXIS)
    return first, tl.sum(tl.where(valid & (x != float("-inf")), 1, 0), axis=AXIS)


@triton.jit
def _between(row_at, place, level, first, last, tau, tau_inverse, n):
    """What lies around the threshold of each level: its neighbours' places and scores, the sums from these
    outwards, and the threshold, as a neighbour and the distance from it."""
    above, below = tl.maximum(place - 1, 0), tl.minimum(place, n - 1)
    y_above, y_below = tl.load(row_at + above), tl.load(row_at + below)
    a = tl.where(place > first, tl.load(row_at + n + above), 0.0)
    b = tl.where(place < last, tl.load(row_at + 2 * n + below), 0.0)
    lack = place.to(tl.float32) - level
    gap = tl.where((a > 0) & (b > 0), (y_above - y_below) * tau_inverse, 1e30)
    larger = tl.abs(lack) + tl.sqrt(lack * lack + a * b * tl.exp2(-gap * LOG2E))
    near = tau * tl.log2(tl.where(lack > 0, a, b) / larger) * LN2
    high, low = tl.where(lack > 0, y_above, y_below), tl.where(lack > 0, -near, near)
    return above, below, y_above, y_below, a, b, high, low


@triton.jit
def _masses(y_above, y_below, a, b, high, low, tau_inverse):
    """The distances from the threshold to its neighbours, and the sums over all entries beyond these, decayed
    to the threshold."""
    to_above = ((y_above - high) - low) * tau_inverse
    to_below = (low - (y_below - high)) * tau_inverse
    mass_above = tl.where(a > 0, a * tl.exp2(-to_above * LOG2E), 0.0)
    mass_below = tl.where(b > 0, b * tl.exp2(-to_below * LOG2E), 0.0)
    return to_above, to_below, mass_above, mass_below


@triton.jit
def _pulled(high, low, c, p, to_high, to_low):
    """As :func:`_pulls`, of one point."""
    return p * tl.exp2(-tl.abs((high - to_high) + (low - to_low)) * c)


@triton.jit(do_not_specialize=["rows"])
def _sort_rows(
    x, tau, out_pointer, index_pointer, place_pointer, scratch_pointer, rows, n, TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr, DOUBLES: tl.constexpr, DESCENDING: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    valid = inside(there, column, n, TOGETHER, FULL)
    held = tl.load(x.pointer + entries(row, x.stride, column, TOGETHER), mask=valid, other=0.0).to(tl.float32)
    own_tau, poison = temperature(tau.pointer, tau.stride, tau.high, row, there)
    poison += nan_of(held, AXIS)
    first, last = _ends(held, valid, AXIS)
    y, order = sorted_rows(held, column, valid, TOGETHER, DOUBLES)
    at = entries(row, n, column, TOGETHER)
    tl.store(index_pointer + at, order, mask=valid)
    y = tl.where(valid, finite(y), 0.0)
    zero, i = tl.zeros_like(y), across(column, TOGETHER)
    up, down = both_sums(y, zero + wide(1 / own_tau * LOG2E, TOGETHER), tl.where(valid, 1.0, zero), AXIS)

    # the first level that is not above the entry: its threshold is below, and those of all further ones
    level = tl.maximum(i + tl.ceil(0.5 * (down - up)).to(tl.int32), 0)
    level = tl.associative_scan(tl.where(valid, level, n), AXIS, _larger)
    row_at = scratch_pointer + tl.minimum(row, rows - 1) * (n * PLANES)  # all may read there
    row_at = wide(row_at, TOGETHER)
    tl.store(row_at + i, y, mask=valid)
    tl.store(row_at + n + i, up, mask=valid)
    tl.store(row_at + 2 * n + i, down, mask=valid)
    tl.store(row_at + 3 * n + i, level.to(tl.float32), mask=valid)
    tl.store(row_at + 4 * n + i, zero, mask=valid)
    tl.debug_barrier()
    after = tl.load(row_at + 3 * n + i + 1, mask=valid & (i + 1 < n), other=n)
    final = valid & (after > level)  # of several entries with the same level
    tl.store(row_at + 4 * n + level, (i + 1).to(tl.float32) + zero, mask=final)
    tl.debug_barrier()
    place = tl.load(row_at + 4 * n + i, mask=valid, other=0.0).to(tl.int32)
    place = tl.associative_scan(place, AXIS, _larger)
    first, last = wide(first, TOGETHER), wide(last, TOGETHER)
    place = tl.minimum(tl.maximum(place, first), last)
    tl.store(place_pointer + at, place, mask=valid)

    middle, width, inverse = i.to(tl.float32) + 0.5, wide(own_tau, TOGETHER), wide(1 / own_tau, TOGETHER)
    _, _, _, _, _, _, high, low = _between(row_at, place, middle, first, last, width, inverse, n)
    t = tl.where(i < first, float("inf"), tl.where(i < last, high + low, float("-inf")))
    to = entries(row, n, column if DESCENDING else n - 1 - column, TOGETHER)
    tl.store(out_pointer + to, (t + wide(poison, TOGETHER)).to(out_pointer.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["parts"])
def _sort_long_rows(
    sums_pointer, y_pointer, tau, out_pointer, place_pointer, n, parts, STEPS: tl.constexpr,
    CHUNK: tl.constexpr, DESCENDING: tl.constexpr,
):  # fmt: skip
    """A part of a row, of whose sorted scores the sums are known: each level looks for its place."""
    row, part = tl.program_id(0).to(tl.int64) // parts, tl.program_id(0) % parts
    own_tau, poison = temperature(tau.pointer, tau.stride, tau.high, row, row >= 0)
    row_at, y_at = sums_pointer + row * n * 4, y_pointer + row * n
    top = tl.load(y_at).to(tl.float32)  # a NaN would be here
    poison += tl.where(top == top, 0.0, top)
    column = part * CHUNK + tl.arange(0, CHUNK)
    valid, level = column < n, column.to(tl.float32) + 0.5
    place, first, last = column * 0, part * 0, part * 0
    for i in tl.static_range(STEPS):  # of as many entries as are below 2^STEPS
        step = 1 << (STEPS - 1 - i)
        at = place + (step - 1)
        # an entry is above the threshold if its rank is not above the level's; of their places the difference
        # is exact, where a rank of a long row lacks digits
        above = tl.load(row_at + 3 * n + at, mask=at < n, other=float("inf")) <= (column - at).to(tl.float32)
        place += tl.where(above, step, 0)
        before = first + (step - 1)
        first += tl.where(tl.load(y_at + before, mask=before < n, other=0.0) == float("inf"), step, 0)
        before = last + (step - 1)
        finite_or_more = tl.load(y_at + before, mask=before < n, other=float("-inf")) != float("-inf")
        last += tl.where(finite_or_more, step, 0)
    place = tl.minimum(tl.maximum(place, first), last)
    tl.store(place_pointer + row * n + column, place, mask=valid)
    _, _, _, _, _, _, high, low = _between(row_at, place, level, first, last, own_tau, 1 / own_tau, n)
    t = tl.where(column < first, float("inf"), tl.where(column < last, high + low, float("-inf")))
    to = column if DESCENDING else n - 1 - column
    tl.store(out_pointer + row * n + to, (t + poison).to(out_pointer.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _pull_sorts(
    grad, x, tau, index_pointer, place_pointer, dx_pointer, dtau_pointer, scratch_pointer, rows, n,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, ASKED: tl.constexpr,
    DESCENDING: tl.constexpr,
):  # fmt: skip
    """dL/dx_j = Σ q_i e^(−|x_j − t_i|/τ) with q_i = v_i/Σ_j e^(−|x_j − t_i|/τ): the same sums, over the
    thresholds, taken where the entry lies among these, which its rank says."""
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    valid = inside(there, column, n, TOGETHER, FULL)
    at, base = entries(row, n, column, TOGETHER), wide(row * n, TOGETHER)
    order = tl.load(index_pointer + at, mask=valid, other=0)
    place = tl.load(place_pointer + at, mask=valid, other=0)
    level = (column if DESCENDING else n - 1 - column).to(tl.int64)
    grads = grad.pointer + entries(row, grad.row, level * grad.column, TOGETHER)
    v = tl.load(grads, mask=valid, other=0.0).to(tl.float32)
    sources = x.pointer + wide(row * x.stride, TOGETHER)
    held = tl.load(sources + order, mask=valid, other=0.0).to(tl.float32)
    own_tau, poison = temperature(tau.pointer, tau.stride, tau.high, row, there)
    poison += nan_of(held, AXIS)
    first, last = _ends(held, valid, AXIS)
    first, last = wide(first, TOGETHER), wide(last, TOGETHER)
    y, zero, i = finite(held), tl.zeros_like(held), across(column, TOGETHER)
    live = valid & (i >= first) & (i < last)  # entries and thresholds that are finite
    one, c = tl.where(live, 1.0, zero), zero + wide(1 / own_tau * LOG2E, TOGETHER)
    row_at = scratch_pointer + tl.minimum(row, rows - 1) * (n * PLANES)
    row_at = wide(row_at, TOGETHER)
    if ASKED:
        _, _, up, moment_up = tl.associative_scan((y, c, one, zero), AXIS, _moments)
        _, _, down, moment_down = tl.associative_scan((y, c, one, zero), AXIS, _moments, reverse=True)
        tl.store(row_at + 3 * n + i, moment_up, mask=valid)
        tl.store(row_at + 4 * n + i, moment_down, mask=valid)
    else:
        up, down = both_sums(y, c, one, AXIS)
    tl.store(row_at + i, y, mask=valid)
    tl.store(row_at + n + i, up, mask=valid)
    tl.store(row_at + 2 * n + i, down, mask=valid)
    tl.debug_barrier()
    tau_inverse = wide(1 / own_tau, TOGETHER)
    above, below, y_above, y_below, a, b, high, low = _between(
        row_at, place, i.to(tl.float32) + 0.5, first, last, wide(own_tau, TOGETHER), tau_inverse, n
    )
    to_above, to_below, mass_above, mass_below = _masses(y_above, y_below, a, b, high, low, tau_inverse)
    q = tl.where(live, v / (mass_above + mass_below), 0.0)
    if ASKED:
        m_above, m_below = tl.load(row_at + 3 * n + above), tl.load(row_at + 4 * n + below)
        z_above = tl.where(a > 0, mass_above * (to_above + m_above * LN2 / tl.where(a > 0, a, 1.0)), 0.0)
        z_below = tl.where(b > 0, mass_below * (to_below + m_below * LN2 / tl.where(b > 0, b, 1.0)), 0.0)
        dtau = tl.sum(tl.where(live, q * (z_below - z_above), 0.0), axis=AXIS) + poison
        tl.store(dtau_pointer + row, dtau.to(tl.float64), mask=there)
    high, low = tl.where(live, high, y), tl.where(live, low, 0.0)
    _, _, _, pull_down = tl.associative_scan((high, low, c, q), AXIS, _pulls)
    _, _, _, pull_up = tl.associative_scan((high, low, c, q), AXIS, _pulls, reverse=True)
    tl.debug_barrier()  # before what was read above is written over
    tl.store(row_at + i, high, mask=valid)
    tl.store(row_at + n + i, low, mask=valid)
    tl.store(row_at + 2 * n + i, pull_down, mask=valid)
    tl.store(row_at + 3 * n + i, pull_up, mask=valid)
    tl.debug_barrier()
    # how many thresholds are above the entry: as many as levels are below its rank
    k = i + tl.ceil(0.5 * (down - up)).to(tl.int32)
    k = tl.minimum(tl.maximum(k, first), last)
    above, below = tl.maximum(k - 1, 0), tl.minimum(k, n - 1)
    distance = tl.maximum((tl.load(row_at + above) - y) + tl.load(row_at + n + above), 0.0)
    dx = tl.where(k > first, tl.load(row_at + 2 * n + above) * tl.exp2(-distance * c), 0.0)
    distance = tl.maximum((y - tl.load(row_at + below)) - tl.load(row_at + n + below), 0.0)
    dx += tl.where(k < last, tl.load(row_at + 3 * n + below) * tl.exp2(-distance * c), 0.0)
    dx = tl.where(live, dx + wide(poison, TOGETHER), 0.0)
    tl.store(dx_pointer + base + order, dx.to(dx_pointer.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["parts"])
def _pull_long_sorts(
    grad, x, tau, index_pointer, place_pointer, sums_pointer, pulls_pointer, note_pointer, dx_pointer, n,
    parts, CHUNK: tl.constexpr, DESCENDING: tl.constexpr,
):  # fmt: skip
    """As :func:`_pull_sorts`, of a row whose sums are known: what pulls from below each chunk is noted on the
    way to the start."""
    row = tl.program_id(0).to(tl.int64)
    own_tau, poison = temperature(tau.pointer, tau.stride, tau.high, row, row >= 0)
    row_at, pull_at, note_at = sums_pointer + row * n * 4, pulls_pointer + row * n * 4, row * parts * 3
    note_at += note_pointer
    c, tau_inverse, zero = 1 / own_tau * LOG2E, 1 / own_tau, own_tau * 0
    firsts, lasts = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int32)
    for part in range(parts):
        column = part * CHUNK + tl.arange(0, CHUNK)
        held = tl.load(x.pointer + row * x.stride + column, mask=column < n, other=float("-inf")).to(
            tl.float32
        )
        firsts += tl.where(held == float("inf"), 1, 0)
        lasts += tl.where(held == float("-inf"), 0, 1)
        poison += tl.sum(tl.where(held == held, 0.0, held), axis=0)
    first, last = tl.sum(firsts, axis=0), tl.sum(lasts, axis=0)
    high_below, low_below, pull = zero, zero, zero
    for i in range(parts):
        part = parts - 1 - i
        column = part * CHUNK + tl.arange(0, CHUNK)
        valid, live = column < n, (column >= first) & (column < last)
        place = tl.load(place_pointer + row * n + column, mask=valid, other=0)
        level = (column if DESCENDING else n - 1 - column).to(tl.int64)
        grads = grad.pointer + row * grad.row + level * grad.column
        v = tl.load(grads, mask=live, other=0.0).to(tl.float32)
        _, _, y_above, y_below, a, b, high, low = _between(
            row_at, place, column.to(tl.float32) + 0.5, first, last, own_tau, tau_inverse, n
        )
        _, _, mass_above, mass_below = _masses(y_above, y_below, a, b, high, low, tau_inverse)
        q = tl.where(live, v / (mass_above + mass_below), 0.0)
        high = tl.where(live, high, tl.load(row_at + column, mask=valid, other=0.0))
        low = tl.where(live, low, 0.0)
        tl.store(pull_at + column, high, mask=valid)
        tl.store(pull_at + n + column, low, mask=valid)
        tl.store(pull_at + 2 * n + column, q, mask=valid)
        high_top, low_top = entries_of((high, low), column, part * CHUNK)
        near = tl.sum(_pulled(high, low, c, q, high_top, low_top), axis=0)
        pull = _pulled(high_below, low_below, c, pull, high_top, low_top) + near
        high_below, low_below = high_top, low_top
        tl.store(note_at + part * 3, high_below)
        tl.store(note_at + part * 3 + 1, low_below)
        tl.store(note_at + part * 3 + 2, pull)
    tl.debug_barrier()
    high_above, low_above, pull = zero, zero, zero
    for part in range(parts):
        column = part * CHUNK + tl.arange(0, CHUNK)
        valid, more = column < n, part + 1 < parts
        high = tl.load(pull_at + column, mask=valid, other=0.0)
        low = tl.load(pull_at + n + column, mask=valid, other=0.0)
        q = tl.load(pull_at + 2 * n + column, mask=valid, other=0.0)
        given = (high, low, tl.zeros_like(high) + c, q)
        _, _, _, down = tl.associative_scan(given, 0, _pulls)
        _, _, _, up = tl.associative_scan(given, 0, _pulls, reverse=True)
        down += _pulled(high_above, low_above, c, pull, high, low)
        high_below = tl.load(note_at + part * 3 + 3, mask=more, other=0.0)
        low_below = tl.load(note_at + part * 3 + 4, mask=more, other=0.0)
        pull_below = tl.load(note_at + part * 3 + 5, mask=more, other=0.0)
        up += _pulled(high_below, low_below, c, pull_below, high, low)
        tl.store(pull_at + 2 * n + column, down, mask=valid)
        tl.store(pull_at + 3 * n + column, up, mask=valid)
        high_above, low_above, pull = entries_of((high, low, down), column, (part + 1) * CHUNK - 1)
    tl.debug_barrier()
    for part in range(parts):
        column = part * CHUNK + tl.arange(0, CHUNK)
        valid = column < n
        y = tl.load(row_at + column, mask=valid, other=0.0)
        shift = tl.load(row_at + 3 * n + column, mask=valid, other=0.0)
        k = tl.minimum(tl.maximum(column + tl.ceil(shift).to(tl.int32), first), last)
        above, below = tl.maximum(k - 1, 0), tl.minimum(k, n - 1)
        distance = tl.maximum((tl.load(pull_at + above) - y) + tl.load(pull_at + n + above), 0.0)
        dx = tl.where(k > first, tl.load(pull_at + 2 * n + above) * tl.exp2(-distance * c), 0.0)
        distance = tl.maximum((y - tl.load(pull_at + below)) - tl.load(pull_at + n + below), 0.0)
        dx += tl.where(k < last, tl.load(pull_at + 3 * n + below) * tl.exp2(-distance * c), 0.0)
        dx = tl.where((column >= first) & (column < last), dx + poison, 0.0)
        order = tl.load(index_pointer + row * n + column, mask=valid, other=0)
        tl.store(dx_pointer + row * n + order, dx.to(dx_pointer.dtype.element_ty), mask=valid)


KERNELS = (_sort_rows, _sort_long_rows, _pull_sorts, _pull_long_sorts)


def laplace_sort(x: Tensor, tau: Tensor, descending: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """The thresholds of the levels i − ½, the order of the entries, and how many are above each threshold.
    The first of them is in ascending order if that is asked for."""
    out, place = x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int32)
    batch, n = x.shape[:-1], x.shape[-1]
    rows = batch.numel()
    if n > ranks.SHORT:
        y, order = row_sort.descending(x)
        sums, index = ranks.sorted_sums(y, order, tau)
        parts = cdiv(n, ranks.CHUNK)
        launch(
            _sort_long_rows, rows * parts,
            sums, y, layout.values(tau, batch, x.device), out, place, n, parts,
            STEPS=n.bit_length(), CHUNK=ranks.CHUNK, DESCENDING=descending, num_warps=ranks.WARPS,
        )  # fmt: skip
        return out, index, place
    index, which = x.new_empty(x.shape, dtype=torch.int32), tile(n)
    launch(
        _sort_rows, cdiv(rows, which["TOGETHER"]),
        layout.rows(x, n), layout.values(tau, batch, x.device), out, index, place, _scratch(x), rows, n,
        **which, DOUBLES=layout.compares_doubles(x.device), DESCENDING=descending,
    )  # fmt: skip
    return out, index, place


def laplace_sort_backward(
    grad: Tensor, x: Tensor, order: Tensor, place: Tensor, tau: Tensor, want_tau: bool,
    descending: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients in x and τ; that of τ holds anything unless it is wanted, which a long row has not."""
    batch, n = x.shape[:-1], x.shape[-1]
    rows = batch.numel()
    dx, dtau = x.new_empty(x.shape), x.new_empty(batch, dtype=torch.float64)
    if n > ranks.SHORT:
        sums, _ = ranks.sorted_sums(x.gather(-1, order.long()), order, tau)
        parts, room = ranks.notes(x, 3)
        launch(
            _pull_long_sorts, rows,
            layout.matrix(grad, x), layout.rows(x, n), layout.values(tau, batch, x.device),
            order.contiguous(), place.contiguous(), sums, torch.empty_like(sums), room, dx, n, parts,
            CHUNK=ranks.CHUNK, DESCENDING=descending, num_warps=ranks.WARPS,
        )  # fmt: skip
        return dx, dtau
    which = tile(n)
    launch(
        _pull_sorts, cdiv(rows, which["TOGETHER"]),
        layout.matrix(grad, x), layout.rows(x, n), layout.values(tau, batch, x.device), order.contiguous(),
        place.contiguous(), dx, dtau, _scratch(x), rows, n,
        **which, ASKED=want_tau, DESCENDING=descending,
    )  # fmt: skip
    return dx, dtau


def _scratch(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() * PLANES.value, dtype=torch.float32)
