"""The sorted SOFT top-k: one program per row solves for its k potentials, then programs write the plan.

The method is the reference's (`_kernels.reference.transport`), which has the formulas; all in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import transport as reference
from khot._kernels.triton import layout
from khot._kernels.triton.fast import double, store
from khot._kernels.triton.functions import place
from khot._kernels.triton.launch import launch

MOST = 127  # as many anchors leave a program its matrices on chip; the reference serves beyond
SWEEPS = 2_000  # of Sinkhorn, for rows that Newton leaves: none of 13,000 did
FAR, FARTHEST = tl.constexpr(reference.FAR), tl.constexpr(reference.FARTHEST)
STEEPEST, HIGHEST = tl.constexpr(reference.STEEPEST), tl.constexpr(reference.HIGHEST)
STEPS, TOLERANCE = tl.constexpr(reference.STEPS), tl.constexpr(reference.TOLERANCE)
GOAL, FLOOR = tl.constexpr(reference.GOAL), tl.constexpr(reference.FLOOR)


@triton.jit
def _scores(pointer, column, n):
    return double(tl.load(pointer + column, mask=column < n, other=0.0))


@triton.jit
def _beyond(x):
    """Infinite scores lie beyond every threshold."""
    x = tl.where(x == float("-inf"), -2 * FAR, x)
    return tl.where(x == float("inf"), 2 * FAR, x)


@triton.jit
def _at(values, index, KEYS: tl.constexpr):
    """values[index], 0 beyond their end, for (KEYS,) of both."""
    anchor = tl.arange(0, KEYS)
    return tl.sum(tl.where(anchor[None, :] == index[:, None], values[None, :], 0.0), axis=1)


@triton.jit
def _potentials(hi, shift, scale, last, k, KEYS: tl.constexpr):
    """b relative to the last anchor."""
    anchor = tl.arange(0, KEYS)
    offset = tl.minimum(tl.maximum(scale * (last - hi), -STEEPEST), STEEPEST)
    d = tl.where(anchor < k, offset - shift, 0.0)
    return tl.sum(tl.where(anchor[None, :] >= anchor[:, None], d[None, :], 0.0), axis=1)


@triton.jit
def _head(hi_pointer, largest, shift, scale, k, KEYS: tl.constexpr):
    """The plan of the k largest, (anchor, entry): sums over the thresholds on the way from the anchor that is
    theirs as ε → 0."""
    anchor = tl.arange(0, KEYS)
    logits = tl.zeros((KEYS, KEYS), tl.float64)
    for q in range(k):
        steep = tl.minimum(tl.maximum(scale * (largest - tl.load(hi_pointer + q)), -STEEPEST), STEEPEST)
        step = steep - tl.sum(tl.where(anchor == q, shift, 0.0))
        down = tl.where(steep <= 0, step, 0.0)[None, :]
        up = tl.where(steep > 0, step, 0.0)[None, :]
        logits += tl.where((anchor <= q)[:, None], down, -up)
    logits = tl.where((anchor <= k)[:, None], logits, float("-inf"))
    weight = tl.exp(logits - tl.max(logits, axis=0)[None, :])
    return tl.where((anchor < k)[None, :], weight / tl.sum(weight, axis=0)[None, :], 0.0)


@triton.jit
def _slopes(x, scale, last, k, KEYS: tl.constexpr):
    """(anchor, entry): the logits without the potentials."""
    below = tl.minimum(tl.maximum(scale * (_beyond(x) - last), -STEEPEST), 0.0)
    return (k - tl.arange(0, KEYS)).to(tl.float64)[:, None] * below[None, :]


@triton.jit
def _chosen(order, column):
    """Which columns are among the k largest."""
    return tl.max(tl.where(order[:, None] == column[None, :], 1, 0), axis=0) > 0


@triton.jit
def _gram(A, k, KEYS: tl.constexpr):
    """AAᵀ, row by row: Triton's own product of float64 matrices fails to compile (3.6, sm_90)."""
    anchor = tl.arange(0, KEYS)
    gram = tl.zeros((KEYS, KEYS), tl.float64)
    for r in range(k + 1):
        row = tl.sum(tl.where((anchor == r)[:, None], A, 0.0), axis=0)
        products = tl.sum(A * row[None, :], axis=1)
        gram += tl.where((anchor == r)[:, None], products[None, :], 0.0)
    return gram


@triton.jit
def _evaluate(
    x_pointer, hi_pointer, n, k, scale, hi, last, largest, order, shift, target,
    KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The sums over the anchors, ΓΓᵀ, and the largest relative error of a sum."""
    anchor = tl.arange(0, KEYS)
    b = _potentials(hi, shift, scale, last, k, KEYS)
    factor = tl.where(anchor <= k, tl.exp(tl.minimum(b, HIGHEST)), 0.0)
    sums = tl.zeros((KEYS,), tl.float64)
    gram = tl.zeros((KEYS, KEYS), tl.float64)
    for start in range(0, n, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = _scores(x_pointer, column, n)
        weight = tl.exp(_slopes(x, scale, last, k, KEYS))
        counts = (anchor <= k)[:, None] & ((column < n) & ~_chosen(order, column))[None, :]
        weight = tl.where(counts, weight, 0.0)
        tail = weight / tl.maximum(tl.sum(factor[:, None] * weight, axis=0), 1.0)[None, :]
        sums += tl.sum(tail, axis=1)
        gram += _gram(tail, k, KEYS)
    head = _head(hi_pointer, largest, shift, scale, k, KEYS)
    sums = factor * sums + tl.sum(head, axis=1)
    gram = factor[:, None] * gram * factor[None, :] + _gram(head, k, KEYS)
    error = tl.where(anchor <= k, tl.abs(sums - target) / tl.maximum(target, 1.0), 0.0)
    return sums, gram, tl.max(error)


@triton.jit
def _move(shift, step, KEYS: tl.constexpr):
    """The shifts once b has moved by step."""
    return shift + _at(step, tl.arange(0, KEYS) + 1, KEYS) - step


@triton.jit
def _sweep(shift, sums, target, k, KEYS: tl.constexpr):
    """One of Sinkhorn's: every anchor for itself."""
    moves = (tl.arange(0, KEYS) <= k) & (target != 0)
    ratio = tl.maximum(tl.where(moves, target, 1.0), 1e-300) / tl.maximum(tl.where(moves, sums, 1.0), 1e-300)
    return _move(shift, tl.log(ratio), KEYS)


@triton.jit
def _first_step(shift, sums, gram, target, k, KEYS: tl.constexpr):
    """A sweep that leaves out the entries which are the last anchor's anyway."""
    anchor = tl.arange(0, KEYS)
    free = (anchor < k) & (target == 1)
    total = tl.sum(tl.where(free, sums, 0.0))
    wanted = tl.sum(tl.where(free, 1, 0)).to(tl.float64)
    leverage = tl.sum(tl.where((anchor < k)[:, None] & (anchor == k)[None, :], gram, 0.0))
    others = total * total / (total - leverage)
    good = (leverage > 0) & (others > wanted + 0.5)  # nearer, rounding decides
    last = tl.where(good, 1.0, 0.0) * tl.where(anchor == k, 1.0, 0.0) > 0
    return _sweep(
        shift, tl.where(last, others - total, sums), tl.where(last, others - wanted, target), k, KEYS
    )


@triton.jit
def _solve(gram, ridge, v, k, KEYS: tl.constexpr):
    """K⁻¹v for the Laplacian K of ΓΓᵀ and a ridge: elimination needs no pivots, as K is an M-matrix."""
    anchor = tl.arange(0, KEYS)
    diagonal = anchor[:, None] == anchor[None, :]
    between = tl.where(diagonal, 0.0, gram)
    own = tl.where(anchor < k, tl.sum(between, axis=1) + ridge, 1.0)
    inside = (anchor < k)[:, None] & (anchor < k)[None, :]
    K = tl.where(diagonal, own[:, None], tl.where(inside, -between, 0.0))
    v = tl.where(anchor < k, v, 0.0)
    for j in range(k):
        at_row = tl.sum(tl.where((anchor == j)[:, None], K, 0.0), axis=0)
        at_column = tl.sum(tl.where((anchor == j)[None, :], K, 0.0), axis=1)
        pivot = tl.sum(tl.where(anchor == j, at_row, 0.0))
        share = tl.where(anchor == j, 0.0, at_column / pivot)
        K -= share[:, None] * at_row[None, :]
        v -= share * tl.sum(tl.where(anchor == j, v, 0.0))
    return v / tl.sum(tl.where(diagonal, K, 0.0), axis=1)


@triton.jit
def _newton(
    x_pointer, x_stride, scale_pointer, hi_pointer, shift_pointer, order_pointer, largest_pointer,
    target_pointer, n, k, sweeps, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The shifts at which every column sum is its target, in place of those to start from."""
    row = tl.program_id(0).to(tl.int64)
    x_pointer, hi_pointer, shift_pointer = (
        x_pointer + row * x_stride, hi_pointer + row * k, shift_pointer + row * k
    )  # fmt: skip
    anchor = tl.arange(0, KEYS)
    scale = tl.load(scale_pointer + row)
    last = tl.load(hi_pointer + k - 1)
    hi = tl.load(hi_pointer + anchor, mask=anchor < k, other=0.0)
    shift = tl.load(shift_pointer + anchor, mask=anchor < k, other=0.0)
    order = tl.load(order_pointer + row * k + anchor, mask=anchor < k, other=-1)
    largest = _beyond(tl.load(largest_pointer + row * k + anchor, mask=anchor < k, other=0.0))
    target = tl.load(target_pointer + row * (k + 1) + anchor, mask=anchor <= k, other=0.0)
    pin = tl.where(tl.abs(hi) == FAR, 1.0, 0.0)

    sums = tl.zeros((KEYS,), tl.float64)
    gram = tl.zeros((KEYS, KEYS), tl.float64)
    trial, step, missing = shift, sums, sums
    error = tl.sum(sums)
    damping = error
    # one loop for all, since every copy of the evaluation is long: the start, a sweep, Newton's steps, and
    # Sinkhorn's sweeps for a row that Newton leaves
    count = 0
    left = 1 - tl.max(tl.where(hi != hi, 1, 0), axis=0)  # a row without an answer is NaN already
    while left > 0:
        new_sums, new_gram, new_error = _evaluate(
            x_pointer, hi_pointer, n, k, scale, hi, last, largest, order, trial, target, KEYS, CHUNK
        )
        # along a step of Newton's the convex dual must not climb half as steeply as it fell
        climb, fall = tl.sum((new_sums - target) * step), tl.sum(missing * step)
        newton = (count >= 2) & (count < STEPS + 2)
        good = (climb <= 0.5 * fall) | (new_error < error) | (count < 2) | (count >= STEPS + 2)
        eased = tl.where(damping > 1e-3, damping / 10, 0.0)
        damping = tl.where(newton, tl.where(good, eased, 10 * tl.maximum(damping, 1e-3)), damping)
        accept = tl.where(good, 1.0, 0.0)
        shift = tl.where(accept + tl.zeros((KEYS,), tl.float64) > 0, trial, shift)
        sums = tl.where(accept + tl.zeros((KEYS,), tl.float64) > 0, new_sums, sums)
        gram = tl.where(accept + tl.zeros((KEYS, KEYS), tl.float64) > 0, new_gram, gram)
        error = tl.where(good, new_error, error)

        missing = tl.where(anchor <= k, target - sums, 0.0)
        step = _solve(gram, pin + FLOOR + damping, missing, k, KEYS)
        if count == 0:
            trial = _first_step(shift, sums, gram, target, k, KEYS)
        elif count < STEPS + 1:
            trial = _move(shift, step, KEYS)
        else:
            trial = _sweep(shift, sums, target, k, KEYS)
        # a row that stops getting better is as good as rounding lets it be
        live = (error > TOLERANCE) | ((error > GOAL) & good & (count < STEPS + 1)) | (count == 0)
        count += 1
        left = tl.where(live, STEPS + 2 + sweeps - count, 0)
    tl.store(shift_pointer + anchor, tl.where(hi != hi, hi, shift), mask=anchor < k)


@triton.jit(do_not_specialize=["parts"])
def _plan(
    x_pointer, x_stride, scale_pointer, hi_pointer, shift_pointer, order_pointer, largest_pointer,
    taken_pointer, out_pointer, n, k, parts, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    hi_pointer = hi_pointer + row * k
    anchor = tl.arange(0, KEYS)
    there = (anchor < k)[:, None]
    scale, last = tl.load(scale_pointer + row), tl.load(hi_pointer + k - 1)
    hi = tl.load(hi_pointer + anchor, mask=anchor < k, other=0.0)
    shift = tl.load(shift_pointer + row * k + anchor, mask=anchor < k, other=0.0)
    order = tl.load(order_pointer + row * k + anchor, mask=anchor < k, other=-1)
    bad = tl.where(tl.sum(hi * 0) == 0, 0.0, float("nan"))
    out_pointer = out_pointer + (row * k + anchor)[:, None] * n

    column = part * CHUNK + tl.arange(0, CHUNK)
    x = _scores(x_pointer + row * x_stride, column, n)
    b = _potentials(hi, shift, scale, last, k, KEYS)
    logits = _slopes(x, scale, last, k, KEYS) + b[:, None]
    logits = tl.where((anchor <= k)[:, None], logits, float("-inf"))
    weight = tl.exp(logits - tl.max(logits, axis=0)[None, :])
    y = weight / tl.sum(weight, axis=0)[None, :] + bad
    others = there & ((column < n) & ~_chosen(order, column))[None, :]
    store(out_pointer + column[None, :], y, others)
    if part == 0:
        largest = tl.load(largest_pointer + row * k + anchor, mask=anchor < k, other=0.0)
        head = _head(hi_pointer, _beyond(largest), shift, scale, k, KEYS)
        # entries of +inf share the first places
        share = 1 / tl.maximum(tl.load(taken_pointer + row), 1.0)
        first = (hi == FAR)[:, None] & (largest == float("inf"))[None, :]
        head = tl.where(first, share, head) + bad
        store(out_pointer + order[None, :], head, there & (anchor < k)[None, :])


KERNELS = (_newton, _plan)


def sorted_soft_topk(x: Tensor, k: int, epsilon: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`transport.sorted_soft_topk`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    rows = batch.numel()
    if k > MOST or rows == 0:
        return reference.sorted_soft_topk(x, k, epsilon)
    flat, stride = layout.rows(x, n)
    scale = reference.scale_of(epsilon.double().expand(batch).reshape(-1, 1))
    order, largest, hi, shift, target, taken = reference.begin(flat.double(), k, scale)
    order, largest = order.contiguous(), largest.contiguous()
    scale, hi, shift, target = scale.reshape(-1), hi.contiguous(), shift.contiguous(), target.contiguous()
    y = x.new_empty(rows, k, n)
    keys = max(16, triton.next_power_of_2(k + 1))
    chunk = max(16, min(triton.next_power_of_2(n), 2048 // keys))
    parts = triton.cdiv(n, chunk)
    which = {"KEYS": keys, "CHUNK": chunk, "num_warps": 4 if keys <= 32 else 8}
    launch(_newton, rows, flat, stride, scale, hi, shift, order, largest, target, n, k, SWEEPS, **which)
    launch(
        _plan,
        rows * parts,
        flat,
        stride,
        scale,
        hi,
        shift,
        order,
        largest,
        taken.double().reshape(-1),
        y,
        n,
        k,
        parts,
        **which,
    )
    return y.reshape(*batch, k, n), order.reshape(*batch, k), hi.reshape(*batch, k), shift.reshape(*batch, k)
