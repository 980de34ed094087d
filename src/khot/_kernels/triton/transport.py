"""The sorted SOFT top-k: one program per row finds the k largest entries, solves for the potentials and
writes the plan.

The method is the reference's (`_kernels.reference.transport`), which has the formulas; all in float64 but for
one part of Newton's matrix. What the entries outside the k largest take is a power of one number, w^a for the
anchor a with w = exp(s·(x − hi_k)) ≤ 1. So their part of ΓΓᵀ depends on the sum of two anchors alone, and
2k sums over the row have all of it. They go through memory, where each thread finds those that it needs.

Short rows are sorted by the program; of others, and of float64, a launch before finds the k + 1 largest.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import transport as reference
from khot._kernels.triton import layout
from khot._kernels.triton.fast import double, store, total
from khot._kernels.triton.float64 import number64
from khot._kernels.triton.largest import topk
from khot._kernels.triton.launch import launch
from khot._kernels.triton.selection import LEAST, key_of

MOST = 128  # as many anchors leave a program its matrices on chip; the reference serves beyond
SORTED = 1024  # entries of a row that its program sorts
HELD = 128  # anchors times entries that a warp holds at a time
FEW = 256  # rows that leave a large device idle, unless their programs have twice the warps
SWEEPS = 2_000  # of Sinkhorn, for rows that Newton leaves: none of 13,000 did
FAR, FARTHEST = tl.constexpr(reference.FAR), tl.constexpr(reference.FARTHEST)
STEEPEST, HIGHEST = tl.constexpr(reference.STEEPEST), tl.constexpr(reference.HIGHEST)
STEPS, TOLERANCE = tl.constexpr(reference.STEPS), tl.constexpr(reference.TOLERANCE)
GOAL, FLOOR = tl.constexpr(reference.GOAL), tl.constexpr(reference.FLOOR)
PLACES = tl.constexpr(0x7FFFFFFF)
LOOSE = tl.constexpr(1e-280)  # a coupling that has no effect, and whose inverse is all but infinite
SCRATCH = tl.constexpr(5)  # numbers of a row for each anchor: twice two sums, and the shift


# ------------------------------------------------------------------------------------ the plan


@triton.jit
def scale_of(pointer, stride, high, low, row):
    """s = 2/ε and ε; NaN where ε is not positive and finite."""
    epsilon = number64(pointer, stride, high, low, row)
    good = (epsilon > 0) & (epsilon < float("inf"))
    scale = tl.minimum(tl.maximum(2 / tl.where(good, epsilon, 1.0), 1 / FARTHEST), FARTHEST)
    return tl.where(good, scale, float("nan")), epsilon


@triton.jit
def beyond(x):
    """Infinite scores lie beyond every threshold."""
    x = tl.where(x == float("-inf"), -2 * FAR, x)
    return tl.where(x == float("inf"), 2 * FAR, x)


@triton.jit
def chosen(x, column, least, place):
    """Which entries are among the k largest, of which the last one is given; of ties, the first ones are."""
    return (x > least) | ((x == least) & (column <= place))


@triton.jit
def ratio(x, scale, last):
    """w of entries that are not among the k largest."""
    return tl.exp(tl.minimum(tl.maximum(scale * (beyond(x) - last), -STEEPEST), 0.0))


@triton.constexpr_function
def _bits(keys):
    return (2 * keys).bit_length() - 1


@triton.jit
def powers(w, exponent, KEYS: tl.constexpr):
    """(exponent, entry): w^exponent, for exponents below 2·KEYS."""
    product = tl.where((exponent & 1)[:, None] > 0, w[None, :], 1.0)
    for bit in tl.static_range(1, _bits(KEYS)):
        w = w * w
        product = tl.where(((exponent >> bit) & 1)[:, None] > 0, product * w[None, :], product)
    return product


@triton.jit
def factors(hi, shift, scale, last, index, k, KEYS: tl.constexpr):
    """exp(b) of the anchors with these indices, relative to the last one; 0 where there is none before it."""
    anchor = tl.arange(0, KEYS)
    offset = tl.minimum(tl.maximum(scale * (last - hi), -STEEPEST), STEEPEST)
    d = tl.where(anchor < k, offset - shift, 0.0)
    b = tl.sum(tl.where(anchor[None, :] >= index[:, None], d[None, :], 0.0), axis=1)
    return tl.where((index >= 0) & (index < k), tl.exp(tl.minimum(b, HIGHEST)), 0.0)


@triton.jit
def head(largest, hi_pointer, hi, shift_pointer, shift, scale, k, KEYS: tl.constexpr):
    """The plan of the k largest, (anchor, entry), and that of the last anchor: logits are sums over the
    thresholds on the way from the anchor that is theirs as ε → 0. No threshold is met twice, so none of the
    sums has to cancel."""
    anchor = tl.arange(0, KEYS)
    row, entry = anchor[:, None], anchor[None, :]
    steep = tl.minimum(tl.maximum(scale * (largest[None, :] - hi[:, None]), -STEEPEST), STEEPEST)
    step = tl.where(row < k, steep - shift[:, None], 0.0)
    down = tl.cumsum(tl.where(row < entry, step, 0.0), axis=0, reverse=True)
    last = -tl.sum(tl.where(row >= entry, step, 0.0), axis=0)
    # the same with the threshold before each anchor
    there = (anchor > 0) & (anchor < k)
    hi = tl.load(hi_pointer + anchor - 1, mask=there, other=0.0)
    shift = tl.load(shift_pointer + anchor - 1, mask=there, other=0.0)
    steep = tl.minimum(tl.maximum(scale * (largest[None, :] - hi[:, None]), -STEEPEST), STEEPEST)
    step = tl.where(there[:, None] & (row > entry), steep - shift[:, None], 0.0)
    logits = tl.where(row < k, down - tl.cumsum(step, axis=0), float("-inf"))
    highest = tl.maximum(tl.max(logits, axis=0), last)
    weight, last = tl.exp(logits - highest[None, :]), tl.exp(last - highest)
    mass = tl.sum(weight, axis=0) + last
    weight = tl.where(entry < k, weight / mass[None, :], 0.0)
    return weight, tl.where(anchor < k, last / mass, 0.0)


@triton.jit
def joined_gram(sums_pointer, factor, k, KEYS: tl.constexpr):
    """ΓΓᵀ of the entries outside the k largest, from the sums of w^m/D² over them, m from 1; and its last
    column, of the last anchor."""
    anchor = tl.arange(0, KEYS)
    row, column = anchor[:, None], anchor[None, :]
    inside = (row < k) & (column < k)
    both = tl.load(sums_pointer + (2 * k - 1) - row - column, mask=inside, other=0.0)
    edge = tl.load(sums_pointer + k - 1 - anchor, mask=anchor < k, other=0.0)
    return factor[:, None] * both * factor[None, :], factor * edge


@triton.jit
def solve(gram, excess, v, k, KEYS: tl.constexpr):
    """K⁻¹v for the M-matrix with −gram outside its diagonal and rows whose sums are `excess`.

    Its diagonal is added up from what is left of a row at each step, so that nothing cancels (Grassmann,
    Taksar, Heyman 1985). An anchor that is all but uncoupled keeps its v, which is as small.
    """
    anchor = tl.arange(0, KEYS)
    row, column = anchor[:, None], anchor[None, :]
    own = row == column
    # the sums take the place of the diagonal
    left = tl.where(own, excess[:, None], gram)
    left = tl.where((row < k) & (column < k), left, 0.0)
    given = tl.zeros((KEYS, KEYS), tl.float64) + v[:, None]
    pivots = tl.full((KEYS,), 1.0, tl.float64)
    for j in range(k):
        here = anchor == j
        at_row, v_row = total((tl.where(row == j, left, 0.0), tl.where(row == j, given, 0.0)), 1)
        at_column = tl.sum(tl.where(column == j, left, 0.0), axis=1)
        pivot, rest = tl.sum(tl.where(anchor >= j, at_row, 0.0)), tl.sum(tl.where(here, at_row, 0.0))
        pivot = tl.where(pivot < LOOSE, 1.0, pivot)
        pivots = tl.where(here, pivot, pivots)
        share = tl.where(here, 0.0, at_column * (1 / pivot))[:, None]
        left += share * tl.where(own, rest, tl.where(column > j, at_row[None, :], 0.0))
        given += share * v_row[None, :]
    return tl.where(anchor < k, tl.sum(tl.where(column == 0, given, 0.0), axis=1) / pivots, 0.0)


# ------------------------------------------------------------------------------------ the solver


@triton.jit
def _after(step, last, k, KEYS: tl.constexpr):
    """What the next anchor of each has."""
    anchor = tl.arange(0, KEYS)
    following = anchor[None, :] == anchor[:, None] + 1
    return tl.where(anchor == k - 1, last, tl.sum(tl.where(following, step[None, :], 0.0), axis=1))


@triton.jit
def _evaluate(
    x_pointer, hi_pointer, scratch_pointer, n, k, scale, hi, last, largest, least, place, shift, target,
    wanted, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The sums over the anchors, ΓΓᵀ and its last column, and the largest relative error of a sum. What
    belongs to the last anchor comes apart."""
    anchor, index = tl.arange(0, KEYS), tl.arange(0, 2 * KEYS)
    sums_pointer, shift_pointer = scratch_pointer + 2 * KEYS, scratch_pointer + 4 * KEYS
    rising = factors(hi, shift, scale, last, k - 1 - index, k, KEYS)
    sums = tl.zeros((2 * KEYS, CHUNK), tl.float64)
    squares = tl.zeros((2 * KEYS, CHUNK), tl.float64)
    rest = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, n, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = double(tl.load(x_pointer + column, mask=column < n, other=0.0))
        power = powers(ratio(x, scale, last), index + 1, KEYS)
        inverse = 1 / (1 + tl.sum(rising[:, None] * power, axis=0))
        inverse = tl.where((column < n) & ~chosen(x, column, least, place), inverse, 0.0)
        power *= inverse[None, :]
        sums += power
        squares += power * inverse[None, :]
        rest += inverse
    tl.debug_barrier()  # all threads have read what was there
    tl.store(scratch_pointer + index, tl.sum(squares, axis=1))
    tl.store(sums_pointer + index, tl.sum(sums, axis=1))
    tl.store(shift_pointer + anchor, shift)
    tl.debug_barrier()
    factor = factors(hi, shift, scale, last, anchor, k, KEYS)
    gram, edge = joined_gram(scratch_pointer, factor, k, KEYS)
    top, bottom = head(largest, hi_pointer, hi, shift_pointer, shift, scale, k, KEYS)
    reached = factor * tl.load(sums_pointer + k - 1 - anchor, mask=anchor < k, other=0.0) + tl.sum(
        top, axis=1
    )
    edge += tl.sum(top * bottom[None, :], axis=1)
    # Newton's matrix may be as rough as float32 is
    narrow = top.to(tl.float32)
    gram += tl.dot(narrow, tl.trans(narrow), input_precision="ieee").to(tl.float64)
    left = tl.sum(rest) + tl.sum(bottom)
    error = tl.where(anchor < k, tl.abs(reached - target) / tl.maximum(target, 1.0), 0.0)
    return (
        reached,
        left,
        gram,
        edge,
        tl.maximum(tl.max(error), tl.abs(left - wanted) / tl.maximum(wanted, 1.0)),
    )


@triton.jit
def _sweep(shift, sums, target, left, wanted, k, KEYS: tl.constexpr):
    """One of Sinkhorn's: every anchor for itself."""
    moves = (tl.arange(0, KEYS) < k) & (target != 0)
    goal, sums = tl.where(moves, target, 1.0), tl.where(moves, sums, 1.0)
    step = tl.log(tl.maximum(goal, 1e-300) / tl.maximum(sums, 1e-300))
    last = tl.log(tl.maximum(wanted, 1e-300) / tl.maximum(left, 1e-300))
    return shift + _after(step, tl.where(wanted != 0, last, 0.0), k, KEYS) - step


@triton.jit
def _first_step(shift, sums, edge, target, left, wanted, k, KEYS: tl.constexpr):
    """A sweep that leaves out the entries which are the last anchor's anyway."""
    free = (tl.arange(0, KEYS) < k) & (target == 1)
    mass = tl.sum(tl.where(free, sums, 0.0))
    places = tl.sum(tl.where(free, 1, 0)).to(tl.float64)
    leverage = tl.sum(edge)
    others = mass * mass / (mass - leverage)
    good = (leverage > 0) & (others > places + 0.5)  # nearer, rounding decides
    left, wanted = tl.where(good, others - mass, left), tl.where(good, others - places, wanted)
    return _sweep(shift, sums, target, left, wanted, k, KEYS)


@triton.jit
def _begin(x_pointer, index_pointer, n, k, scale, KEYS: tl.constexpr, CHUNK: tl.constexpr):
    """The k largest entries and their indices; hi; the shifts to start from; the goals of the sums, that of
    the last anchor apart; and how many entries are +inf."""
    anchor = tl.arange(0, KEYS)
    infinite, strange = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int32)
    for start in range(0, n, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = double(tl.load(x_pointer + column, mask=column < n, other=0.0))
        infinite += tl.where(x == float("inf"), 1, 0)
        strange += tl.where(x == x, 0, 1)
    taken = tl.sum(infinite)
    there, more = anchor < k, anchor < tl.minimum(k, n - 1)
    order = tl.load(index_pointer + anchor, mask=there, other=-1).to(tl.int32)
    following = tl.load(index_pointer + anchor + 1, mask=more, other=0)
    largest = double(tl.load(x_pointer + tl.maximum(order, 0), mask=there, other=0.0))
    below = double(tl.load(x_pointer + following, mask=more, other=0.0))
    nothing = (below == float("-inf")) | (there & ~more)
    missing = tl.max(tl.where(there & (largest == float("-inf")), 1, 0))
    bad = (tl.sum(strange) > 0) | (taken > k) | (missing > 0) | (scale != scale)
    above = tl.minimum(tl.maximum(largest, -FARTHEST), FARTHEST)
    below = tl.minimum(tl.maximum(below, -FARTHEST), FARTHEST)
    hi = tl.where(largest == float("inf"), FAR, tl.where(nothing, -FAR, below))
    start = 0.5 * tl.minimum(scale * (above - below), STEEPEST)
    shift = tl.where(there & (tl.abs(hi) != FAR), start, 0.0)
    target = tl.where(there & (hi != FAR), 1.0, 0.0)
    target = tl.where((anchor == 0) & (taken > 0), taken.to(tl.float64), target)
    poison = tl.where(bad, float("nan"), 0.0).to(tl.float64)
    return order, largest, tl.where(there, hi, 0.0) + poison, shift, target, taken, poison


@triton.jit
def _transport(
    x, epsilon, index_pointer, out_pointer, order_pointer, hi_pointer, shift_pointer, scratch_pointer, n, k,
    sweeps, KEYS: tl.constexpr, CHUNK: tl.constexpr, SORTS: tl.constexpr, WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_at = x.pointer + row * x.stride
    index_pointer += row * tl.minimum(k + 1, n)
    out_pointer, order_pointer = out_pointer + row * k * n, order_pointer + row * k
    hi_pointer, shift_pointer = hi_pointer + row * k, shift_pointer + row * k
    scratch_pointer += row * (SCRATCH * KEYS)
    anchor = tl.arange(0, KEYS)
    if SORTS:
        entry, slot = tl.arange(0, WIDTH), tl.arange(0, KEPT)
        key = key_of(tl.load(x_at + entry, mask=entry < n, other=0.0))
        packed = (tl.where(entry < n, key, LEAST).to(tl.int64) << 32) | (entry ^ PLACES).to(tl.int64)
        packed = tl.topk(packed, KEPT) if KEPT < WIDTH else tl.sort(packed, descending=True)
        index = ((packed & PLACES).to(tl.int32) ^ PLACES).to(tl.int64)
        tl.store(index_pointer + slot, index, mask=slot < tl.minimum(k + 1, n))
        tl.debug_barrier()
    scale, _ = scale_of(*epsilon, row)
    order, largest, hi, shift, target, taken, poison = _begin(x_at, index_pointer, n, k, scale, KEYS, CHUNK)
    place = tl.load(index_pointer + k - 1)
    least, wanted = double(tl.load(x_at + place)), tl.zeros((), tl.float64) + (n - k)
    tl.store(order_pointer + anchor, order.to(tl.int64), mask=anchor < k)
    tl.store(hi_pointer + anchor, hi, mask=anchor < k)
    tl.debug_barrier()
    last = tl.load(hi_pointer + k - 1)
    given, largest = largest, beyond(largest)
    pin = tl.where((anchor < k) & (tl.abs(hi) == FAR), 1.0, 0.0)

    sums, edge = tl.zeros((KEYS,), tl.float64), tl.zeros((KEYS,), tl.float64)
    gram = tl.zeros((KEYS, KEYS), tl.float64)
    trial, step, missing = shift, sums, sums
    left = tl.sum(sums)
    error, damping = left, left
    # one loop for all, since every copy of the evaluation is long: the start, a sweep, Newton's steps, and
    # Sinkhorn's sweeps for a row that Newton leaves
    count = 0
    tries = tl.where(poison == 0, 1, 0)  # a row without an answer is NaN already
    while tries > 0:
        new_sums, new_left, new_gram, new_edge, new_error = _evaluate(
            x_at, hi_pointer, scratch_pointer, n, k, scale, hi, last, largest, least, place, trial,
            target, wanted, KEYS, CHUNK,
        )  # fmt: skip
        # along a step of Newton's the convex dual must not climb half as steeply as it fell
        climb, fall = tl.sum((new_sums - target) * step), tl.sum(missing * step)
        newton = (count >= 2) & (count < STEPS + 2)
        good = (climb <= 0.5 * fall) | (new_error < error) | (count < 2) | (count >= STEPS + 2)
        eased = tl.where(damping > 1e-3, damping / 10, 0.0)
        damping = tl.where(newton, tl.where(good, eased, 10 * tl.maximum(damping, 1e-3)), damping)
        shift, sums = tl.where(good, trial, shift), tl.where(good, new_sums, sums)
        gram, edge = tl.where(good, new_gram, gram), tl.where(good, new_edge, edge)
        left, error = tl.where(good, new_left, left), tl.where(good, new_error, error)

        missing = tl.where(anchor < k, target - sums, 0.0)
        # a row that stops getting better is as good as rounding lets it be
        live = (error > TOLERANCE) | ((error > GOAL) & good & (count < STEPS + 1))
        if count == 0:
            live = count == 0
            trial = _first_step(shift, sums, edge, target, left, wanted, k, KEYS)
        elif live:
            if count < STEPS + 1:
                step = solve(gram, edge + pin + FLOOR + damping, missing, k, KEYS)
                trial = shift + _after(step, 0.0, k, KEYS) - step
            else:
                trial = _sweep(shift, sums, target, left, wanted, k, KEYS)
        count += 1
        tries = tl.where(live, STEPS + 2 + sweeps - count, 0)
    shift += poison
    tl.store(shift_pointer + anchor, shift, mask=anchor < k)
    tl.debug_barrier()

    there = (anchor < k)[:, None]
    factor = factors(hi, shift, scale, last, anchor, k, KEYS)
    at = out_pointer + anchor.to(tl.int64)[:, None] * n
    for start in range(0, n, CHUNK):
        column = start + tl.arange(0, CHUNK)
        held = double(tl.load(x_at + column, mask=column < n, other=0.0))
        power = powers(ratio(held, scale, last), tl.maximum(k - anchor, 0), KEYS)
        weight = factor[:, None] * power
        y = weight / (1 + tl.sum(weight, axis=0))[None, :] + poison
        store(at + column[None, :], y, there & ((column < n) & ~chosen(held, column, least, place))[None, :])
    top, _ = head(largest, hi_pointer, hi, shift_pointer, shift, scale, k, KEYS)
    # entries of +inf share the first places
    share = 1 / tl.maximum(taken.to(tl.float64), 1.0)
    first = (hi == FAR)[:, None] & (given == float("inf"))[None, :]
    top = tl.where(first, share, top) + poison
    store(at + order[None, :], top, there & (anchor < k)[None, :])


KERNELS = (_transport,)


def which(k: int, rows: int) -> dict[str, Any]:
    """How a program holds its anchors, and as many entries as there is room for beside them."""
    keys = max(16, 1 << (k - 1).bit_length())
    warps = 4 if keys == 16 and rows > FEW else max(8, keys // 8)
    return {"KEYS": keys, "CHUNK": max(16, HELD * warps // keys), "num_warps": warps}


def sorting(n: int, k: int, sorts: bool) -> dict[str, Any]:
    """How a program sorts a row of n entries, if it does."""
    width, kept = max(2, 1 << (n - 1).bit_length()), max(2, 1 << (min(k + 1, n) - 1).bit_length())
    return {"SORTS": sorts, "WIDTH": width if sorts else 0, "KEPT": kept if sorts else 0}


def sorted_soft_topk(x: Tensor, k: int, epsilon: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`transport.sorted_soft_topk`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    rows = batch.numel()
    if k > MOST or rows == 0:
        return reference.sorted_soft_topk(x, k, epsilon)
    y, hi = x.new_empty(*batch, k, n), x.new_empty(*batch, k, dtype=torch.float64)
    order, shift = torch.empty_like(hi, dtype=torch.int64), torch.empty_like(hi)
    constants, found = which(k, rows), min(k + 1, n)
    sorts = n <= SORTED and x.dtype != torch.float64
    index = order.new_empty(rows, found) if sorts else topk(x, found, True, True)[1].contiguous()
    launch(
        _transport, rows,
        layout.rows(x, n), layout.values(epsilon, batch, x.device), index, y, order, hi, shift,
        hi.new_empty(rows, SCRATCH.value * constants["KEYS"]), n, k, SWEEPS,
        **sorting(n, k, sorts), **constants,
    )  # fmt: skip
    return y, order, hi, shift
