"""Laplace's soft ranks with their gradients, and hard ranks, in float32: one launch each, after a sort
(:mod:`.row_sort`) if rows are long.

The program of short rows sorts them, with the index of each entry behind its score, so that equal scores keep
their order. A sum over the entries on one side of each follows from one scan: a piece of the sorted row is
its last score and what its entries add up to where they are decayed to that score (:func:`sums`). So there
are no gaps and no products of decays, and differences of scores are taken before they are divided by τ.

Ranks less their mean are sums of what each pair lacks of a step (:func:`lack`), in which nothing cancels
where τ is far greater than the differences of the scores. Hard ranks are those of equal entries that count
half and others that do not.

The backward pass reads the entries in the order that the forward pass found, and sorts nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import laplace as reference
from khot._kernels.triton import layout, row_sort
from khot._kernels.triton.arguments import Matrix, Rows, Values
from khot._kernels.triton.fast import LN2, LOG2E, double, total, wide
from khot._kernels.triton.launch import launch
from khot._kernels.triton.rows import entries, inside, place_rows
from khot._kernels.triton.selection import ordered
from khot._kernels.triton.sizes import cdiv, next_power_of_2

SHORT = 2048  # entries of a row that one program sorts; a compiler takes half a minute for 4,096
RANKED = 1024  # entries of a row that is sorted to be ranked; sorted by itself, a longer one takes less time
NARROW = 16  # entries to which rows are padded at least
TOGETHER = 512  # entries of short rows that share a program
CHUNK, WARPS = 1024, 8  # of a long row, that a program holds at a time
BIG = tl.constexpr(torch.finfo(torch.float32).max)  # stands for an infinite score: differences stay numbers
FAR = tl.constexpr(reference.FAR)
# What a kernel gives of a row: ranks, ranks less their mean, or hard ranks less their mean.
RANK, CENTRED, PLACE = (tl.constexpr(i) for i in range(3))
# τ within these has a reciprocal in float32. Where it is cut, all scores are equal or infinitely far apart.
LEAST, GREATEST = tl.constexpr(1e-37), tl.constexpr(1e37)


# ---------------------------------------------------------------------------------- sums along a row


@triton.jit
def sums(y, c, s, next_y, next_c, next_s):
    """Of two pieces of a sorted row: the last score, log₂(e)/τ, and Σ e^(−distance) to the last score."""
    return next_y, next_c, s * tl.exp2(-tl.abs(y - next_y) * next_c) + next_s


@triton.jit
def _differences(y, c, v, s, w, next_y, next_c, next_v, next_s, next_w):
    """As :func:`sums`, with w = Σ e^(−distance) (v − v_last), which loses nothing where all v are nearly
    equal."""
    decay = tl.exp2(-tl.abs(y - next_y) * next_c)
    return next_y, next_c, next_v, s * decay + next_s, (w + s * (v - next_v)) * decay + next_w


@triton.jit
def lack(distance):
    """1 − 2^(−distance), to the last digits also of small distances, by Taylor's series below ½."""
    u = distance * LN2
    near = 0.041666668 - u * (0.0083333338 - u * (0.0013888889 - u * 0.00019841270))
    near = u * (1 - u * (0.5 - u * (0.16666667 - u * near)))
    return tl.where(distance < 0.5, near, 1 - tl.exp2(-distance))


@triton.jit
def _deficits(y, c, m, s, next_y, next_c, next_m, next_s):
    """As :func:`sums` of 1 − e^(−distance) over m entries."""
    distance = tl.abs(y - next_y) * next_c
    return next_y, next_c, m + next_m, m * lack(distance) + s * tl.exp2(-distance) + next_s


@triton.jit
def _equal(y, s, next_y, next_s):
    """How many entries are equal to the last one."""
    return next_y, tl.where(y == next_y, s, 0.0) + next_s


@triton.jit
def both_sums(y, c, one, AXIS: tl.constexpr):
    """Σ e^(−distance) over the entries above each one, and below it; both count the entry itself."""
    _, _, above = tl.associative_scan((y, c, one), AXIS, sums)
    _, _, below = tl.associative_scan((y, c, one), AXIS, sums, reverse=True)
    return above, below


@triton.jit
def _sums_of(y, c, one, AXIS: tl.constexpr, KIND: tl.constexpr):
    """The sums that ranks of this kind are made of, over the entries above each one, and below it."""
    if KIND == RANK:
        above, below = both_sums(y, c, one, AXIS)
    elif KIND == CENTRED:
        zero = tl.zeros_like(y)
        _, _, _, above = tl.associative_scan((y, c, one, zero), AXIS, _deficits)
        _, _, _, below = tl.associative_scan((y, c, one, zero), AXIS, _deficits, reverse=True)
    else:
        _, above = tl.associative_scan((y, one), AXIS, _equal)
        _, below = tl.associative_scan((y, one), AXIS, _equal, reverse=True)
    return above, below


@triton.jit
def _carried(y, c, m, s, to, KIND: tl.constexpr):
    """What m entries at y or beyond it, whose sum at y is s, add to the sum at an entry."""
    if KIND == PLACE:
        sum = tl.where(y == to, s, 0.0)
    else:
        distance = tl.abs(y - to) * c
        sum = s * tl.exp2(-distance)
        if KIND == CENTRED:
            sum += m * lack(distance)
    return sum


@triton.jit
def _rank_of(place, count, above, below, KIND: tl.constexpr):
    """From the sums of :func:`_sums_of`; place counts from 1, and count entries take part. Of a place that
    counts from below, the sums are those below each entry and above it."""
    if KIND == RANK:
        rank = place + 0.5 * (below - above)
    elif KIND == CENTRED:
        rank = 0.5 * (above - below)
    else:  # an entry behind all that take part may be equal to the last of them
        rank = tl.minimum(place, count) - 0.5 * (count + 1) + 0.5 * (tl.maximum(below, 1.0) - above)
    return rank


# ---------------------------------------------------------------------------------- rows and their order


@triton.jit
def temperature(pointer, stride, high, row, there):
    """τ, held within the range of float32, and NaN in place of 0 for rows whose τ is none."""
    if pointer is None:
        tau = row.to(tl.float32) * 0 + high  # the rest is below float32's digits
    else:
        tau = double(tl.load(pointer + row * stride, mask=there, other=1.0))
    poison = tl.where(tau > 0, tl.where(tau < float("inf"), 0.0, float("nan")), float("nan"))
    return tl.minimum(tl.maximum(tau, LEAST), GREATEST).to(tl.float32), poison.to(tl.float32)


@triton.jit
def across(columns, TOGETHER: tl.constexpr):
    """What columns have, so that it broadcasts with the entries."""
    if TOGETHER == 1:
        return columns
    else:
        return columns[None, :]


@triton.jit
def sorted_rows(x, column, valid, TOGETHER: tl.constexpr, DOUBLES: tl.constexpr):
    """The scores in descending order, and the columns that they came from; what is not valid comes last.

    Where float64 runs at half the rate of float32, score and column are the digits of a number in [1, 2),
    which takes one instruction to compare; as an integer they take two of a slower kind.
    """
    key = tl.where(valid, ~ordered(x), 0x7FFFFFFF)
    source = across(column, TOGETHER).to(tl.int64)
    if DOUBLES:
        key = (key ^ -0x80000000).to(tl.uint32, bitcast=True).to(tl.int64)
        digits = ((key << 16) | source | 0x3FF0000000000000).to(tl.float64, bitcast=True)
        digits = tl.sort(digits).to(tl.int64, bitcast=True)
        order, key = (digits & 0xFFFF).to(tl.int32), (digits >> 16).to(tl.int32) ^ -0x80000000
    else:
        digits = tl.sort((key.to(tl.int64) << 32) | source)
        order, key = digits.to(tl.int32), (digits >> 32).to(tl.int32)
    bits = ~key
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), order


@triton.jit
def finite(x):
    return tl.minimum(tl.maximum(x, -BIG), BIG)


@triton.jit
def nan_of(x, AXIS: tl.constexpr):
    """NaN if there is one in the row, and otherwise 0."""
    return tl.sum(tl.where(x == x, 0.0, x), axis=AXIS)


# ---------------------------------------------------------------------------------- ranks


@triton.jit(do_not_specialize=["rows"])
def _rank_rows(
    x, value, tau, out_pointer, index_pointer, rows, n, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
    FULL: tl.constexpr, DOUBLES: tl.constexpr, KIND: tl.constexpr, DESCENDING: tl.constexpr,
):  # fmt: skip
    """Ranks of the scores x; places in the order of other values, without the entries whose score is −inf."""
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    valid = inside(there, column, n, TOGETHER, FULL)
    held = tl.load(x.pointer + entries(row, x.stride, column, TOGETHER), mask=valid, other=0.0).to(tl.float32)
    own_value, taken = held, valid
    if KIND != RANK:
        taken = tl.where(held > float("-inf"), valid, held != held)
    if KIND == PLACE:
        at = value.pointer + entries(row, value.row, column.to(tl.int64) * value.column, TOGETHER)
        own_value = tl.load(at, mask=taken, other=0).to(tl.float32)
        c, poison = row.to(tl.float32) * 0, nan_of(own_value, AXIS)
    else:
        own_tau, poison = temperature(tau.pointer, tau.stride, tau.high, row, there)
        c, poison = 1 / own_tau * LOG2E, poison + nan_of(held, AXIS)
    y, order = sorted_rows(own_value, column, taken, TOGETHER, DOUBLES)
    zero, place, count = tl.zeros_like(y), across((column + 1).to(tl.float32), TOGETHER), n
    one = tl.where(valid, 1.0, zero)
    if KIND != RANK:  # the entries that take part come first
        count = wide(tl.sum(tl.where(taken, 1.0, 0.0), axis=AXIS), TOGETHER)
        one = tl.where(place <= count, 1.0, zero)
    y = tl.where(one > 0, y if KIND == PLACE else finite(y), 0.0)
    above, below = _sums_of(y, zero + wide(c, TOGETHER), one, AXIS, KIND)
    if not DESCENDING:
        place, above, below = across((n - column).to(tl.float32), TOGETHER), below, above
    rank = _rank_of(place, count, above, below, KIND) + wide(poison, TOGETHER)
    if KIND != RANK:
        rank = tl.where(one > 0, rank, 0.0)
    at, base = entries(row, n, column, TOGETHER), wide(row * n, TOGETHER)
    tl.store(out_pointer + base + order, rank.to(out_pointer.dtype.element_ty), mask=valid)
    if KIND != PLACE:
        tl.store(index_pointer + at, order, mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _pull_ranks(
    grad, x, tau, index_pointer, dx_pointer, dtau_pointer, rows, n, TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr, ASKED: tl.constexpr, DESCENDING: tl.constexpr,
):  # fmt: skip
    """∂r/∂x is symmetric: dL/dx_i = Σ_j f_ij (v_j − v_i)/τ. Across the gap between two neighbours flows what
    the entries on either side pull the others, a product of their sums, and −dL/dτ = Σ gap/τ · flow: no sum
    over far scores cancels, as Σ x_i/τ · dL/dx_i does."""
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    valid = inside(there, column, n, TOGETHER, FULL)
    at, base = entries(row, n, column, TOGETHER), wide(row * n, TOGETHER)
    order = tl.load(index_pointer + at, mask=valid, other=0).to(tl.int64)
    sources = x.pointer + wide(row * x.stride, TOGETHER)
    held = tl.load(sources + order, mask=valid, other=0.0).to(tl.float32)
    grads = grad.pointer + wide(row * grad.row, TOGETHER)
    v = tl.load(grads + order * grad.column, mask=valid, other=0.0).to(tl.float32)
    own_tau, poison = temperature(tau.pointer, tau.stride, tau.high, row, there)
    poison += nan_of(held, AXIS)
    free = tl.where(tl.abs(held) == float("inf"), False, valid)
    y, zero = finite(held), tl.zeros_like(held)
    v, one, c = tl.where(free, v, 0.0), tl.where(free, 1.0, zero), zero + wide(1 / own_tau * LOG2E, TOGETHER)
    _, _, _, up, w_up = tl.associative_scan((y, c, v, one, zero), AXIS, _differences)
    _, _, _, down, w_down = tl.associative_scan((y, c, v, one, zero), AXIS, _differences, reverse=True)
    half = (0.5 if DESCENDING else -0.5) / own_tau
    dx = tl.where(free, (w_up + w_down) * wide(half, TOGETHER) + wide(poison, TOGETHER), 0.0)
    tl.store(dx_pointer + base + order, dx.to(dx_pointer.dtype.element_ty), mask=valid)
    if ASKED:
        later = valid & across(column + 1 < n, TOGETHER)
        after = tl.load(index_pointer + at + 1, mask=later, other=0).to(tl.int64)
        after = tl.load(sources + after, mask=later, other=0.0).to(tl.float32)
        gap = tl.minimum((y - finite(after)) * wide(1 / own_tau, TOGETHER), FAR)
        flow = tl.where(free & later, up * w_down - w_up * (down - 1), 0.0)
        dtau = -half * tl.sum(tl.where(flow == 0, 0.0, gap * flow), axis=AXIS)
        tl.store(dtau_pointer + row, (dtau + poison).to(tl.float64), mask=there)


# ---------------------------------------------------------------------------------- long rows
#
# Once they are sorted, a program goes through each twice, a chunk at a time: from the end to the start, for
# what lies below each chunk, of which it leaves a note; and from the start to the end, for the results.


@triton.jit
def entries_of(values, column, which):
    """One entry of each of some vectors."""
    picked = ()
    for i in tl.static_range(len(values)):
        picked = picked + (tl.where(column == which, values[i], 0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return total(picked, 1)


@triton.jit
def _values(y_at, column, first, n, count, KIND: tl.constexpr):
    """Sorted values, 1 for those of entries that take part and 0 for others, and the first of them."""
    y, top = tl.load(y_at + column, mask=column < n, other=0.0).to(tl.float32), tl.load(y_at + first)
    top = top.to(tl.float32)
    if KIND != PLACE:
        y, top = tl.where(column < n, finite(y), 0.0), finite(top)
    return y, tl.where(column < count, 1.0, 0.0), top


@triton.jit(do_not_specialize=["parts"])
def _rank_long_rows(
    y_pointer, order_pointer, x, tau, out_pointer, index_pointer, sums_pointer, note_pointer, n, parts,
    CHUNK: tl.constexpr, KIND: tl.constexpr, DESCENDING: tl.constexpr,
):  # fmt: skip
    """y are the sorted values, in which −inf stands for entries that take no part; x are the scores. With
    sums it leaves, in place of ranks, what these are made of, in sorted order."""
    row = tl.program_id(0).to(tl.int64)
    y_at, order_at, note_at = y_pointer + row * n, order_pointer + row * n, note_pointer + row * parts * 3
    top = tl.load(y_at).to(tl.float32)  # a NaN would be here
    poison = tl.where(top == top, 0.0, top)
    if KIND == PLACE:
        c = poison * 0
    else:
        own_tau, bad = temperature(tau.pointer, tau.stride, tau.high, row, row >= 0)
        c, poison = 1 / own_tau * LOG2E, poison + bad
    count = n
    if KIND != RANK:
        found = tl.zeros((CHUNK,), tl.int32)
        for part in range(parts):
            column = part * CHUNK + tl.arange(0, CHUNK)
            held = tl.load(x.pointer + row * x.stride + column, mask=column < n, other=float("-inf"))
            found += tl.where(held.to(tl.float32) == float("-inf"), 0, 1)
        count = tl.sum(found, axis=0)
    zero = poison * 0
    m, s, y_below = zero, zero, zero
    for i in range(1, parts):
        part = parts - i
        column = part * CHUNK + tl.arange(0, CHUNK)
        y, one, top = _values(y_at, column, part * CHUNK, n, count, KIND)
        alone = one * 0 if KIND == CENTRED else one
        m_near, s_near = total((one, _carried(y, c, one, alone, top, KIND)), 1)
        s = _carried(y_below, c, m, s, top, KIND) + s_near
        m, y_below = m + m_near, top
        tl.store(note_at + part * 3, y_below)
        tl.store(note_at + part * 3 + 1, s)
        tl.store(note_at + part * 3 + 2, m)
    tl.debug_barrier()
    y_above, m_above, s_above = zero, zero, zero
    for part in range(parts):
        column = part * CHUNK + tl.arange(0, CHUNK)
        valid, more = column < n, part + 1 < parts
        y, one, _ = _values(y_at, column, part * CHUNK, n, count, KIND)
        order = tl.load(order_at + column, mask=valid, other=0)
        up, down = _sums_of(y, tl.zeros_like(y) + c, one, 0, KIND)
        up += _carried(y_above, c, m_above, s_above, y, KIND)
        y_below = tl.load(note_at + part * 3 + 3, mask=more, other=0.0)
        s_below = tl.load(note_at + part * 3 + 4, mask=more, other=0.0)
        m_below = tl.load(note_at + part * 3 + 5, mask=more, other=0.0)
        down += _carried(y_below, c, m_below, s_below, y, KIND)
        if DESCENDING:
            rank = _rank_of((column + 1).to(tl.float32), count, up, down, KIND) + poison
        else:
            rank = _rank_of((n - column).to(tl.float32), count, down, up, KIND) + poison
        if KIND == CENTRED:
            rank = tl.where(one > 0, rank, 0.0)
        if KIND == PLACE:  # the last values may be those of entries that take part, and of others
            last = valid & (y == float("-inf"))
            held = tl.load(x.pointer + row * x.stride + order, mask=last, other=0.0).to(tl.float32)
            rank = tl.where(held == float("-inf"), 0.0, rank)
        if sums_pointer is None:
            tl.store(out_pointer + row * n + order, rank.to(out_pointer.dtype.element_ty), mask=valid)
        else:
            at = sums_pointer + row * n * 4 + column
            tl.store(at, y, mask=valid)
            tl.store(at + n, up, mask=valid)
            tl.store(at + 2 * n, down, mask=valid)
            tl.store(at + 3 * n, 0.5 * (down - up), mask=valid)
        if index_pointer is not None:
            tl.store(index_pointer + row * n + column, order.to(tl.int32), mask=valid)
        y_above, s_above = entries_of((y, up), column, (part + 1) * CHUNK - 1)
        m_above += CHUNK  # of a part that is followed by entries that take part


@triton.jit
def _scored(index_at, x_at, grad_at, grad_column, column, valid):
    """Of sorted entries where they came from, their scores, which of these are finite, and what comes in."""
    order = tl.load(index_at + column, mask=valid, other=0).to(tl.int64)
    x = tl.load(x_at + order, mask=valid, other=0.0).to(tl.float32)
    v = tl.load(grad_at + order * grad_column, mask=valid, other=0.0).to(tl.float32)
    one = tl.where(tl.abs(x) == float("inf"), 0.0, tl.where(valid, 1.0, 0.0))
    return order, x, finite(x), one, tl.where(one > 0, v, 0.0)


@triton.jit(do_not_specialize=["parts"])
def _pull_long_ranks(
    grad, x, tau, index_pointer, dx_pointer, dtau_pointer, note_pointer, n, parts, CHUNK: tl.constexpr,
    ASKED: tl.constexpr, DESCENDING: tl.constexpr,
):  # fmt: skip
    """As :func:`_pull_ranks`."""
    row = tl.program_id(0).to(tl.int64)
    own_tau, poison = temperature(tau.pointer, tau.stride, tau.high, row, row >= 0)
    index_at, note_at = index_pointer + row * n, note_pointer + row * parts * 4
    x_at, grad_at = x.pointer + row * x.stride, grad.pointer + row * grad.row
    first = tl.load(x_at + tl.load(index_at).to(tl.int64)).to(tl.float32)  # a NaN would be here
    poison += tl.where(first == first, 0.0, first)
    c, s, half = 1 / own_tau * LOG2E, own_tau * 0, (0.5 if DESCENDING else -0.5) / own_tau
    y_below, v_below, w = s, s, s
    for i in range(1, parts):
        part = parts - i
        column = part * CHUNK + tl.arange(0, CHUNK)
        _, _, y, one, v = _scored(index_at, x_at, grad_at, grad.column, column, column < n)
        _, _, top, _, top_v = _scored(index_at, x_at, grad_at, grad.column, part * CHUNK, row >= 0)
        near = tl.exp2(-tl.abs(top - y) * c) * one
        s_near, w_near = total((near, near * (v - top_v)), 1)
        decay = tl.exp2(-tl.abs(top - y_below) * c)
        w = (w + s * (v_below - top_v)) * decay + w_near
        s = s * decay + s_near
        y_below, v_below = top, top_v
        tl.store(note_at + part * 4, y_below)
        tl.store(note_at + part * 4 + 1, v_below)
        tl.store(note_at + part * 4 + 2, s)
        tl.store(note_at + part * 4 + 3, w)
    tl.debug_barrier()
    y_above, v_above, s_above, w_above, dtau = own_tau * 0, own_tau * 0, own_tau * 0, own_tau * 0, own_tau * 0
    for part in range(parts):
        column = part * CHUNK + tl.arange(0, CHUNK)
        valid = column < n
        order, _, y, one, v = _scored(index_at, x_at, grad_at, grad.column, column, valid)
        zero = tl.zeros_like(y)
        given = (y, zero + c, v, one, zero)
        _, _, _, up, w_up = tl.associative_scan(given, 0, _differences)
        _, _, _, down, w_down = tl.associative_scan(given, 0, _differences, reverse=True)
        decay = tl.exp2(-tl.abs(y_above - y) * c)
        w_up += (w_above + s_above * (v_above - v)) * decay
        up += s_above * decay
        more = part + 1 < parts
        y_below = tl.load(note_at + part * 4 + 4, mask=more, other=0.0)
        v_below = tl.load(note_at + part * 4 + 5, mask=more, other=0.0)
        s_below = tl.load(note_at + part * 4 + 6, mask=more, other=0.0)
        w_below = tl.load(note_at + part * 4 + 7, mask=more, other=0.0)
        decay = tl.exp2(-tl.abs(y - y_below) * c)
        w_down += (w_below + s_below * (v_below - v)) * decay
        down += s_below * decay
        dx = tl.where(one > 0, (w_up + w_down) * half + poison, 0.0)
        tl.store(dx_pointer + row * n + order, dx.to(dx_pointer.dtype.element_ty), mask=valid)
        if ASKED:
            later = column + 1 < n
            after = tl.load(index_at + column + 1, mask=later, other=0).to(tl.int64)
            after = finite(tl.load(x_at + after, mask=later, other=0.0).to(tl.float32))
            flow = tl.where(later, (up * w_down - w_up * (down - 1)) * one, 0.0)
            gap = tl.minimum((y - after) * (1 / own_tau), FAR)
            dtau -= half * tl.sum(tl.where(flow == 0, 0.0, gap * flow), axis=0)
        y_above, v_above, s_above, w_above = entries_of((y, v, up, w_up), column, (part + 1) * CHUNK - 1)
    if ASKED:
        tl.store(dtau_pointer + row, (dtau + poison).to(tl.float64))


KERNELS = (_rank_rows, _pull_ranks, _rank_long_rows, _pull_long_ranks)


# ---------------------------------------------------------------------------------- the host


def tile(n: int) -> dict[str, Any]:
    """Rows in a program and warps. An H100 takes the least time for a row of 512 in one warp, whose threads
    exchange entries without shared memory, and for longer ones in 8."""
    width = max(NARROW, next_power_of_2(n))
    together, warps = max(1, TOGETHER // width), 4
    if width > 128:
        together, warps = 1, {256: 2, 512: 1}.get(width, 8)
    return {"TOGETHER": together, "WIDTH": width, "FULL": n == width, "num_warps": warps}


def laplace_rank(
    x: Tensor, tau: Tensor, descending: bool = True, centred: bool = False
) -> tuple[Tensor, Tensor]:
    """The ranks, or these less their mean in float32, and the order of the entries."""
    out = x.new_empty(x.shape, dtype=torch.float32 if centred else x.dtype)
    order = _rank(x, None, tau, out, (CENTRED if centred else RANK).value, descending)
    assert order is not None
    return out, order


def sorted_sums(y: Tensor, order: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Of long rows in descending order: the scores, the sums above and below each, and how far its rank is
    from its place, (rows, 4, n) in float32; and the order in int32."""
    n, index = y.shape[-1], _narrow(order)
    sums = y.new_empty(y.numel() * 4, dtype=torch.float32)
    parts, room = notes(y, 3)
    launch(
        _rank_long_rows, y.numel() // n,
        y, order, Rows(y, n), layout.values(tau, y.shape[:-1], y.device), None, index, sums, room, n, parts,
        CHUNK=CHUNK, KIND=RANK.value, DESCENDING=True, num_warps=WARPS,
    )  # fmt: skip
    return sums, order if index is None else index


def _narrow(order: Tensor) -> Tensor | None:
    """Where to write the order in int32, unless it is."""
    return None if order.dtype == torch.int32 else torch.empty_like(order, dtype=torch.int32)


def centred_places(value: Tensor, x: Tensor) -> Tensor:
    """`ranking_losses.centred_places`, of values that float32 has."""
    out = x.new_empty(x.shape, dtype=torch.float32)
    _rank(x, value, None, out, PLACE.value, True)
    return out


def _rank(
    x: Tensor, value: Tensor | None, tau: Tensor | None, out: Tensor, kind: int, descending: bool
) -> Tensor | None:
    """Writes the ranks, and gives the order of the entries, unless they are places."""
    batch, n = x.shape[:-1], x.shape[-1]
    rows = batch.numel()
    scores = layout.rows(x, n)
    scale = Values(None, 0, 1.0, 0.0) if tau is None else layout.values(tau, batch, x.device)
    if n > RANKED:
        keys = x if value is None else torch.where(x == -math.inf, -math.inf, value)
        y, order = row_sort.descending(keys)
        index = None if kind == PLACE.value else _narrow(order)
        parts, room = notes(x, 3)
        launch(
            _rank_long_rows, rows,
            y, order, scores, scale, out, index, None, room, n, parts,
            CHUNK=CHUNK, KIND=kind, DESCENDING=descending, num_warps=WARPS,
        )  # fmt: skip
        return order if index is None else index
    which = tile(n)
    index = None if kind == PLACE.value else x.new_empty(x.shape, dtype=torch.int32)
    given = Matrix(None, 0, 0) if value is None else layout.matrix(value, x)
    which |= {"DOUBLES": layout.compares_doubles(x.device), "KIND": kind, "DESCENDING": descending}
    launch(_rank_rows, cdiv(rows, which["TOGETHER"]), scores, given, scale, out, index, rows, n, **which)
    return index


def laplace_rank_backward(
    grad: Tensor, x: Tensor, order: Tensor, tau: Tensor, want_tau: bool, descending: bool = True
) -> tuple[Tensor, Tensor]:
    """The gradients in x and τ; that of τ holds anything unless it is wanted."""
    batch, n = x.shape[:-1], x.shape[-1]
    rows, dx, dtau = batch.numel(), x.new_empty(x.shape), x.new_empty(batch, dtype=torch.float64)
    source, scale = layout.rows(x, n), layout.values(tau, batch, x.device)
    given = layout.matrix(grad, x), source, scale, order.contiguous(), dx, dtau
    if n > RANKED:
        parts, room = notes(x, 4)
        launch(
            _pull_long_ranks, rows, *given, room, n, parts,
            CHUNK=CHUNK, ASKED=want_tau, DESCENDING=descending, num_warps=WARPS,
        )  # fmt: skip
        return dx, dtau
    which, flags = tile(n), {"ASKED": want_tau, "DESCENDING": descending}
    launch(_pull_ranks, cdiv(rows, which["TOGETHER"]), *given, rows, n, **which, **flags)
    return dx, dtau


def notes(x: Tensor, count: int) -> tuple[int, Tensor]:
    """Into how many chunks the rows of x are cut, and room for so many numbers of each."""
    n = x.shape[-1]
    parts = cdiv(n, CHUNK)
    return parts, x.new_empty(x.numel() // n * parts * count, dtype=torch.float32)
