"""The gradients of the sorted SOFT top-k, in float64: one program per row.

The formulas are those of `_ops.sorted_soft_topk`, with v less what the entry's own anchor has: for one of the
k largest the anchor that is its as ε → 0, and the last anchor for the others. What an anchor gets from an
entry is a product of Γ with differences then, so that nothing cancels where the plan is nearly hard. Of ΓΓᵀ
the entries outside the k largest give sums alone, as in :mod:`.transport`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from khot._core.dispatch import OPERATORS
from khot._kernels.triton import layout
from khot._kernels.triton.fast import double, store
from khot._kernels.triton.launch import launch
from khot._kernels.triton.transport import (
    FAR,
    MOST,
    SCRATCH,
    beyond,
    chosen,
    factors,
    head,
    joined_gram,
    powers,
    ratio,
    scale_of,
    solve,
    which,
)


@triton.jit
def _gram(A, k, KEYS: tl.constexpr):
    """AAᵀ, row by row: Triton's own product of float64 matrices fails to compile (3.6, sm_90)."""
    anchor = tl.arange(0, KEYS)
    gram = tl.zeros((KEYS, KEYS), tl.float64)
    for r in range(k):
        row = tl.sum(tl.where((anchor == r)[:, None], A, 0.0), axis=0)
        products = tl.sum(A * row[None, :], axis=1)
        gram += tl.where((anchor == r)[None, :], products[:, None], 0.0)
    return gram


@triton.jit
def _pull_transport(
    grad_pointer, grad_row, grad_anchor, grad_column, x, epsilon, order_pointer, hi_pointer, shift_pointer,
    dx_pointer, depsilon_pointer, scratch_pointer, n, k, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_at, dx_pointer = x.pointer + row * x.stride, dx_pointer + row * n
    hi_pointer, shift_pointer = hi_pointer + row * k, shift_pointer + row * k
    scratch_pointer += row * (SCRATCH * KEYS)
    anchor, index = tl.arange(0, KEYS), tl.arange(0, 2 * KEYS)
    there, here = (anchor < k)[:, None], (anchor < k)[None, :]
    grads = grad_pointer + row * grad_row + anchor.to(tl.int64)[:, None] * grad_anchor
    scale, own_epsilon = scale_of(*epsilon, row)
    hi = tl.load(hi_pointer + anchor, mask=anchor < k, other=0.0)
    shift = tl.load(shift_pointer + anchor, mask=anchor < k, other=0.0)
    order = tl.load(order_pointer + row * k + anchor, mask=anchor < k, other=-1).to(tl.int32)
    given = double(tl.load(x_at + tl.maximum(order, 0), mask=anchor < k, other=0.0))
    last, place = tl.load(hi_pointer + k - 1), tl.load(order_pointer + row * k + k - 1)
    least = double(tl.load(x_at + place))
    poison = tl.where(tl.sum(hi * 0) + scale * 0 == 0, 0.0, float("nan"))
    origin = tl.where(tl.abs(last) == FAR, 0.0, last)
    factor = factors(hi, shift, scale, last, anchor, k, KEYS)
    rising = factors(hi, shift, scale, last, k - 1 - index, k, KEYS)
    exponent = tl.maximum(k - anchor, 0)

    squares = tl.zeros((2 * KEYS, CHUNK), tl.float64)
    pulls = tl.zeros((KEYS, CHUNK), tl.float64)
    for start in range(0, n, CHUNK):
        column = start + tl.arange(0, CHUNK)
        held = double(tl.load(x_at + column, mask=column < n, other=0.0))
        counts = (column < n) & ~chosen(held, column, least, place)
        w = ratio(held, scale, last)
        power = powers(w, index + 1, KEYS)
        inverse = tl.where(counts, 1 / (1 + tl.sum(rising[:, None] * power, axis=0)), 0.0)
        squares += power * (inverse * inverse)[None, :]
        gamma = factor[:, None] * powers(w, exponent, KEYS) * inverse[None, :]
        at = grads + column.to(tl.int64)[None, :] * grad_column
        v = double(tl.load(at, mask=there & counts[None, :], other=0.0))
        pulls += gamma * (v - tl.sum(gamma * v, axis=0)[None, :])
    tl.store(scratch_pointer + index, tl.sum(squares, axis=1))
    tl.debug_barrier()

    gram, edge = joined_gram(scratch_pointer, factor, k, KEYS)
    top, bottom = head(beyond(given), hi_pointer, hi, shift_pointer, shift, scale, k, KEYS)
    gram += _gram(top, k, KEYS)
    edge += tl.sum(top * bottom[None, :], axis=1)
    places = grads + tl.maximum(order, 0).to(tl.int64)[None, :] * grad_column
    u = double(tl.load(places, mask=there & here, other=0.0))
    own = anchor[:, None] == anchor[None, :]
    level = tl.sum(tl.where(own, u, 0.0), axis=0)  # of the last anchor it is −level
    u -= level[None, :]
    mean = tl.sum(top * u, axis=0) - bottom * level
    pull = tl.sum(pulls, axis=1) + tl.sum(top * (u - mean[None, :]), axis=1)

    # A little damping keeps the potential of an anchor bounded if its coupling to the others is lost in
    # rounding; the plan hardly depends on such a potential.
    pin = tl.where((anchor < k) & (tl.abs(hi) == FAR), 1.0, 0.0)
    excess = edge + pin
    diagonal = tl.sum(tl.where(own, 0.0, gram), axis=1) + excess
    through = solve(gram, excess + 1e-15 * diagonal, pull, k, KEYS)

    slope = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, n, CHUNK):
        column = start + tl.arange(0, CHUNK)
        held = double(tl.load(x_at + column, mask=column < n, other=0.0))
        counts = (column < n) & ~chosen(held, column, least, place)
        weight = factor[:, None] * powers(ratio(held, scale, last), exponent, KEYS)
        gamma = weight / (1 + tl.sum(weight, axis=0))[None, :]
        at = grads + column.to(tl.int64)[None, :] * grad_column
        v = double(tl.load(at, mask=there & counts[None, :], other=0.0)) - through[:, None]
        along = gamma * exponent.to(tl.float64)[:, None]
        along = tl.sum(along * v, axis=0) - tl.sum(along, axis=0) * tl.sum(gamma * v, axis=0)
        along = tl.where(counts, along, 0.0)
        slope += tl.where(tl.abs(held) == float("inf"), 0.0, held - origin) * along
        store(dx_pointer + column, scale * along + poison, counts)

    u -= through[:, None] - through[None, :]
    away = (anchor[None, :] - anchor[:, None]).to(tl.float64)  # from the entry's own anchor
    end = (anchor - k).to(tl.float64)
    level = bottom * (through - level)
    along = tl.sum(top * away * u, axis=0) + end * level
    along -= (tl.sum(top * away, axis=0) + end * bottom) * (tl.sum(top * u, axis=0) + level)
    along = tl.where(anchor < k, along, 0.0)
    total = tl.sum(slope) + tl.sum(tl.where(tl.abs(given) == float("inf"), 0.0, given - origin) * along)
    store(dx_pointer + order, scale * along + poison, anchor < k)
    tl.store(depsilon_pointer + row, -scale * total / own_epsilon + poison)


KERNELS = (_pull_transport,)


def sorted_soft_topk_backward(
    grad: Tensor, x: Tensor, epsilon: Tensor, order: Tensor, hi: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients in x and ε (of the batch shape)."""
    batch, n, k = x.shape[:-1], x.shape[-1], hi.shape[-1]
    rows = batch.numel()
    if k > MOST or rows == 0:
        kernel = OPERATORS["sorted_soft_topk_backward"].kernel
        return kernel(grad, x, epsilon, order, hi, shift)
    dx, depsilon = x.new_empty(x.shape), hi.new_empty(batch)
    constants, grads = which(k, rows), grad.reshape(-1, k, n)
    launch(
        _pull_transport, rows,
        grads, *grads.stride(), layout.rows(x, n), layout.values(epsilon, batch, x.device),
        order.contiguous(), hi.contiguous(), shift.contiguous(), dx, depsilon,
        hi.new_empty(rows, SCRATCH.value * constants["KEYS"]), n, k,
        **constants,
    )  # fmt: skip
    return dx, depsilon
