"""The projection onto the permutahedron, forward and backward: one launch each after torch has sorted.

As in the reference (`_kernels.reference.permutahedron`, which has the formulas), segments of 1, 2, 4, …
places are solved from their two halves. A lane joins two halves: from the middle outwards it pools one block
after another, until those on either side keep the order. Where a block stops stands at its first place, and
where it starts at its last one, so that joining two takes a fixed time. The value of a block follows from
sums of differences to its first place, in float64.

A program does a row. Few long rows are cut into parts, which are solved first, before one program for each
row joins them: three launches forward and, with the sum over the parts, three backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import permutahedron as reference
from khot._kernels.triton import layout, row_sort
from khot._kernels.triton.arguments import Blocks, Projected, Rows
from khot._kernels.triton.fast import double, store
from khot._kernels.triton.functions import place
from khot._kernels.triton.launch import launch
from khot._kernels.triton.sizes import cdiv, next_power_of_2

WIDTH = 512  # places that a program holds at a time: two of a thread
FAR = tl.constexpr(reference.farthest(torch.float64))
FAR_WEIGHT = tl.constexpr(1e-4 * reference.farthest(torch.float64))


# -------------------------------------------------------------------------------------- of places


@triton.jit
def bounded(x, most):
    """x within ±most; a NaN stays."""
    return tl.where(x > most, most, tl.where(x < -most, -most, x))


@triton.jit
def score(z, tau):
    """u = z/τ. An infinite score is farther than any other."""
    infinite = tl.where(z > 0, 2 * FAR, -2 * FAR)
    return tl.where(tl.abs(z) == float("inf"), infinite, bounded(z / tau, FAR))


# -------------------------------------------------------------------------------------- of blocks


@triton.jit
def _value(a, b, count, KL: tl.constexpr):
    """v of blocks, less u − w at their first places."""
    if KL:
        return tl.log(a / b)
    else:
        return a / count.to(tl.float64)


@triton.jit
def _block(sums_at, more_at, first, stop, there, KL: tl.constexpr):
    """What the value of blocks follows from. That of a block of one place is known and not read."""
    several = there & (stop - first > 1)
    if KL:  # Σ e^u and Σ e^w, in units of their first terms
        a = tl.load(sums_at + first, mask=several, other=1.0)
        b = tl.load(more_at + first, mask=several, other=1.0)
        return a, b
    else:  # Σ (u − w), less as often that difference at the first place
        a = tl.load(sums_at + first, mask=several, other=0.0)
        return a, a


@triton.jit
def _appended(a, b, next_a, next_b, next_count, du, dw, KL: tl.constexpr):
    """The same of two blocks together; du and dw are the differences of the second one's first place."""
    if KL:  # no sum overflows, because u and w descend
        return a + next_a * tl.exp(du), b + next_b * tl.exp(dw)
    else:
        a = a + next_a + next_count.to(tl.float64) * (du - dw)
        return a, a


@triton.jit
def _join(
    u_at, w_at, first_at, stop_at, sums_at, more_at, begin, middle, end, there, KL: tl.constexpr,
):  # fmt: skip
    """Pools what breaks the order between the two halves of segments, from begin to middle to end."""
    first = tl.load(first_at + middle - 1, mask=there, other=0)
    stop = middle
    a, b = _block(sums_at, more_at, first, stop, there, KL)
    u = tl.load(u_at + first, mask=there, other=0.0)
    w = tl.load(w_at + first, mask=there, other=0.0)
    live = there
    while tl.max(tl.where(live, 1, 0)) > 0:
        after = live & (stop < end)
        next_stop = tl.load(stop_at + stop, mask=after, other=0)
        next_a, next_b = _block(sums_at, more_at, stop, next_stop, after, KL)
        du = tl.load(u_at + stop, mask=after, other=0.0) - u
        dw = tl.load(w_at + stop, mask=after, other=0.0) - w
        level = _value(a, b, tl.maximum(stop - first, 1), KL)
        next_level = _value(next_a, next_b, tl.maximum(next_stop - stop, 1), KL)
        after = after & (level - next_level <= du - dw)
        joined_a, joined_b = _appended(a, b, next_a, next_b, next_stop - stop, du, dw, KL)
        a, b = tl.where(after, joined_a, a), tl.where(after, joined_b, b)
        tl.store(stop_at + stop, 0, mask=after)  # no block starts there any more
        stop = tl.where(after, next_stop, stop)

        before = live & (first > begin)
        last_first = tl.load(first_at + first - 1, mask=before, other=0)
        last_a, last_b = _block(sums_at, more_at, last_first, first, before, KL)
        last_u = tl.load(u_at + last_first, mask=before, other=0.0)
        last_w = tl.load(w_at + last_first, mask=before, other=0.0)
        du, dw = u - last_u, w - last_w
        level = _value(a, b, tl.maximum(stop - first, 1), KL)
        last_level = _value(last_a, last_b, tl.maximum(first - last_first, 1), KL)
        before = before & (last_level - level <= du - dw)
        joined_a, joined_b = _appended(last_a, last_b, a, b, stop - first, du, dw, KL)
        a, b = tl.where(before, joined_a, a), tl.where(before, joined_b, b)
        tl.store(stop_at + first, 0, mask=before)
        first = tl.where(before, last_first, first)
        u, w = tl.where(before, last_u, u), tl.where(before, last_w, w)
        live = after | before
    tl.store(stop_at + first, stop, mask=there)
    tl.store(first_at + stop - 1, first, mask=there)
    tl.store(sums_at + first, a, mask=there)
    if KL:
        tl.store(more_at + first, b, mask=there)


@triton.jit
def greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def _start_before(stop_at, begin, WIDTH: tl.constexpr):
    """The first place of the block that place begin belongs to, if it starts further on the left; else 0."""
    first = begin * 0
    at = begin
    inside = tl.load(stop_at + begin) == 0
    while inside:
        at -= WIDTH
        here = at + tl.arange(0, WIDTH)
        stop = tl.load(stop_at + here, mask=(here >= 0) & (here < begin), other=0)
        first = tl.max(tl.where(stop > 0, here, -1))
        inside = first < 0
    return first


@triton.jit(do_not_specialize=["rows", "n", "parts", "length", "half"])
def _project(
    z_pointer, order_pointer, w, w_order, tau, to, scratch_pointer, rows, n, parts, length, half,
    BEGIN: tl.constexpr, WRITE: tl.constexpr, KL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A part of a row: starts with blocks of one place (BEGIN); joins halves of `half` places, of twice as
    many, and so on; and writes the results (WRITE)."""
    row, part = place(parts)
    begin = part * length
    end = begin + tl.minimum(length, n - begin)
    z_at, weight_at = z_pointer + row * n, w.pointer + row * w.stride
    first_at, stop_at = to.start + row * n, to.stop + row * n
    # u, w, and one or two sums, row after row
    size = rows.to(tl.int64) * n
    u_at = scratch_pointer + row * n
    w_at, sums_at = u_at + size, u_at + 2 * size
    more_at = sums_at + size if KL else sums_at
    own_tau = tl.load(tau.pointer + row * tau.stride).to(tl.float64)
    own_tau = tl.where((own_tau > 0) & (own_tau < float("inf")), own_tau, float("nan"))
    # a NaN comes first
    largest, heaviest = double(tl.load(z_at)), double(tl.load(weight_at))
    bad = tl.where((largest != largest) | (heaviest != heaviest) | (own_tau != own_tau), 1, 0)
    lane = tl.arange(0, WIDTH)
    if BEGIN:
        for at in range(begin, end, WIDTH):
            here = at + lane
            there = here < end
            u = score(double(tl.load(z_at + here, mask=there, other=0.0)), own_tau)
            weight = bounded(double(tl.load(weight_at + here, mask=there, other=0.0)), FAR_WEIGHT)
            tl.store(u_at + here, u, mask=there)
            tl.store(w_at + here, weight, mask=there)
            tl.store(first_at + here, here, mask=there)
            tl.store(stop_at + here, here + 1, mask=there)
        tl.debug_barrier()
    places = tl.where(bad > 0, 0, end - begin)
    half = half.to(tl.int64)  # which may pass by 2³¹
    while half < places:
        nodes = (((places - 1) // half + 1) // 2).to(tl.int32)
        for at in range(0, nodes, WIDTH):
            node = at + lane
            there = node < nodes
            left = tl.where(there, begin + 2 * half * node, 0).to(tl.int32)
            middle = left + tl.minimum(half, end - left).to(tl.int32)
            right = middle + tl.minimum(half, end - middle).to(tl.int32)
            _join(
                u_at, w_at, first_at, stop_at, sums_at, more_at, left, middle, right, there, KL
            )  # fmt: skip
        tl.debug_barrier()
        half *= 2
    if WRITE:
        last = _start_before(stop_at, begin, WIDTH)
        for at in range(begin, end, WIDTH):
            here = at + lane
            there = here < end
            stop = tl.load(stop_at + here, mask=there, other=0)
            first = tl.associative_scan(tl.where(there & (stop > 0), here, 0), 0, greater)
            first = tl.maximum(first, last)
            last = tl.max(first)
            stop = tl.load(stop_at + first, mask=there, other=0)
            a, b = _block(sums_at, more_at, first, stop, there, KL)
            weight = tl.load(w_at + first, mask=there, other=0.0)
            y = tl.load(u_at + here, mask=there, other=0.0) - tl.load(u_at + first, mask=there, other=0.0)
            y = y - _value(a, b, tl.maximum(stop - first, 1), KL) + weight
            # an infinite w makes the mean of its block infinite, and two of opposite signs leave no mean
            lowest = weight
            if not KL:
                lowest = tl.load(w_at + stop - 1, mask=there, other=0.0)
            y += tl.where(weight >= FAR_WEIGHT, float("inf"), 0.0)
            y -= tl.where(lowest <= -FAR_WEIGHT, float("inf"), 0.0)
            y = tl.where(bad > 0, float("nan"), y)
            order = tl.load(order_pointer + row * n + here, mask=there, other=0)
            w_place = tl.load(w_order.pointer + row * w_order.stride + here, mask=there, other=0)
            store(to.out + row * n + order, y, there)
            tl.store(to.order + row * n + here, order.to(tl.int32), mask=there)
            tl.store(to.w_order + row * n + here, w_place.to(tl.int32), mask=there)
            tl.store(first_at + here, first, mask=there)


# -------------------------------------------------------------------------------------- backward


@triton.jit
def add2(key, a, b, next_key, next_a, next_b):
    """Sums over the same block."""
    same = key == next_key
    return next_key, next_a + tl.where(same, a, 0.0), next_b + tl.where(same, b, 0.0)


@triton.jit
def _add3(key, a, b, c, next_key, next_a, next_b, next_c):
    same = key == next_key
    return (
        next_key, next_a + tl.where(same, a, 0.0), next_b + tl.where(same, b, 0.0),
        next_c + tl.where(same, c, 0.0),
    )  # fmt: skip


@triton.jit
def _finite(z):
    return tl.where(tl.abs(z) == float("inf"), 0.0, z)


@triton.jit
def _linear(given, here, there, KL: tl.constexpr, WANT_W: tl.constexpr):
    """Of places: where their blocks start, g, how much they count in the means of u and of w over the block
    (up to the sums of both), a = u less that at the block's first place, z and w."""
    grad_at, grad_column, z_at, w_at, w_column, order_at, w_order_at, start_at, tau = given
    first = tl.load(start_at + here, mask=there, other=0)
    order = _places(order_at, here, there)
    z = double(tl.load(z_at + order, mask=there, other=0.0))
    g = double(tl.load(grad_at + order * grad_column, mask=there, other=0.0))
    first_order = _places(order_at, first, there)
    first_z = double(tl.load(z_at + first_order, mask=there, other=0.0))
    a = bounded((_finite(z) - _finite(first_z)) / tau, FAR)
    p, q, w = tl.zeros_like(a) + 1, tl.zeros_like(a) + 1, a
    if KL:
        p = tl.exp(a)
    if WANT_W:
        w = double(tl.load(w_at + _places(w_order_at, here, there) * w_column, mask=there, other=0.0))
        if KL:
            first_w = tl.load(w_at + _places(w_order_at, first, there) * w_column, mask=there, other=0.0)
            q = tl.exp(bounded(w, FAR_WEIGHT) - bounded(double(first_w), FAR_WEIGHT))
    return first, order, g, p, q, a, z, w


@triton.jit
def _places(order_at, here, there):
    return tl.load(order_at + here, mask=there, other=0).to(tl.int64)


@triton.jit
def _of_all_parts(totals_at, heads_at, start_at, key, parts, length, PARTS: tl.constexpr):
    """The sum over a block, whose part of the row's parts has only what lies in it."""
    other = tl.arange(0, PARTS)
    at = other.to(tl.int64) * length
    first = tl.load(start_at + at, mask=other < parts, other=0)
    crosses = (other < parts) & (first == key) & (first < at)
    return tl.load(totals_at + key) + tl.sum(tl.load(heads_at + other, mask=crosses, other=0.0))


@triton.jit(do_not_specialize=["rows", "n", "parts", "length"])
def _pull(
    grad, z, w, tau, blocks, to, rows, n, parts, length, SUM: tl.constexpr, WRITE: tl.constexpr,
    KL: tl.constexpr, WANT_W: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A part of a row: sums over its blocks (SUM), and the gradients from these (WRITE)."""
    row, part = place(parts)
    begin = part * length
    end = begin + tl.minimum(length, n - begin)
    start_at = blocks.start + row * n
    own_tau = tl.load(tau.pointer + row * tau.stride).to(tl.float64)
    given = (
        grad.pointer + row * grad.row, grad.column, z.pointer + row * z.stride, w.pointer + row * w.row,
        w.column, blocks.order + row * n, blocks.w_order + row * n, start_at, own_tau,
    )  # fmt: skip
    # three sums after another: of g, and of the two counts
    g_at = blocks.totals + row * n
    p_at = g_at + rows.to(tl.int64) * n
    q_at = p_at
    g_heads = blocks.heads + row * parts
    p_heads = g_heads + rows.to(tl.int64) * parts
    q_heads = p_heads
    THIRD: tl.constexpr = KL and WANT_W
    if THIRD:
        q_at += rows.to(tl.int64) * n
        q_heads += rows.to(tl.int64) * parts
    lane = tl.arange(0, WIDTH)
    if SUM:
        last = begin * 0 - 1
        last_g = own_tau * 0
        last_p = own_tau * 0
        last_q = own_tau * 0
        for at in range(begin, end, WIDTH):
            here = at + lane
            there = here < end
            first, _, g, p, q, _, _, _ = _linear(given, here, there, KL, THIRD)
            key = tl.where(there, first, -2)
            if THIRD:
                _, g, p, q = tl.associative_scan((key, g, p, q), 0, _add3)
            else:
                _, g, p = tl.associative_scan((key, g, p), 0, add2)
            g += tl.where(key == last, last_g, 0.0)
            p += tl.where(key == last, last_p, 0.0)
            q += tl.where(key == last, last_q, 0.0)
            last_g = tl.sum(tl.where(lane == WIDTH - 1, g, 0.0))
            last_p = tl.sum(tl.where(lane == WIDTH - 1, p, 0.0))
            last_q = tl.sum(tl.where(lane == WIDTH - 1, q, 0.0))
            last = tl.max(key)
            next_first = tl.load(start_at + here + 1, mask=here + 1 < end, other=-1)
            ends = there & (next_first != first)
            head, own = ends & (first < begin), ends & (first >= begin)
            tl.store(g_at + first, g, mask=own)
            tl.store(p_at + first, p, mask=own)
            tl.store(g_heads + part + lane * 0, g, mask=head)
            tl.store(p_heads + part + lane * 0, p, mask=head)
            if THIRD:
                tl.store(q_at + first, q, mask=own)
                tl.store(q_heads + part + lane * 0, q, mask=head)
        tl.debug_barrier()
    if WRITE:
        dtau = tl.zeros((WIDTH,), tl.float64)
        # the blocks that may reach into other parts
        head, tail = tl.load(start_at + begin), tl.load(start_at + end - 1)
        if PARTS > 1:
            g_head = _of_all_parts(g_at, g_heads, start_at, head, parts, length, PARTS)
            p_head = _of_all_parts(p_at, p_heads, start_at, head, parts, length, PARTS)
            q_head = _of_all_parts(q_at, q_heads, start_at, head, parts, length, PARTS)
            g_tail = _of_all_parts(g_at, g_heads, start_at, tail, parts, length, PARTS)
            p_tail = _of_all_parts(p_at, p_heads, start_at, tail, parts, length, PARTS)
            q_tail = _of_all_parts(q_at, q_heads, start_at, tail, parts, length, PARTS)
        for at in range(begin, end, WIDTH):
            here = at + lane
            there = here < end
            first, order, g, p, q, a, score, weight = _linear(given, here, there, KL, WANT_W)
            total = tl.load(g_at + first, mask=there, other=0.0)
            p_total = tl.load(p_at + first, mask=there, other=1.0)
            q_total = tl.load(q_at + first, mask=there, other=1.0)
            if PARTS > 1:
                in_head, in_tail = first == head, first == tail
                total = tl.where(in_head, g_head, tl.where(in_tail, g_tail, total))
                p_total = tl.where(in_head, p_head, tl.where(in_tail, p_tail, p_total))
                q_total = tl.where(in_head, q_head, tl.where(in_tail, q_tail, q_total))
            du = tl.where(tl.abs(score) == float("inf"), 0.0, (g - p / p_total * total) / own_tau)
            dtau -= du * a
            store(to.dz + row * n + order, du, there)
            if WANT_W:
                dw = tl.where(tl.abs(weight) >= FAR_WEIGHT, 0.0, q / q_total * total)
                store(to.dw + row * n + _places(given[6], here, there), dw, there)
        tl.store(to.dtau + row * parts + part, tl.sum(dtau))


# -------------------------------------------------------------------------------------- the host

KERNELS = (_project, _pull)


def _width(n: int) -> dict[str, int]:
    width = min(WIDTH, max(64, next_power_of_2(n)))
    return {"WIDTH": width, "num_warps": width // 64}


def _parts(rows: int, n: int) -> tuple[int, int]:
    """Into how many parts a row is cut, and their length, a power of two."""
    length = next_power_of_2(layout.parts(rows, n)[1])
    parts = cdiv(n, length)
    return parts, length if parts > 1 else n


def splits(rows: int, n: int) -> bool:
    """Whether rows are cut into parts."""
    return _parts(rows, n)[0] > 1


def permutahedron(
    z: Tensor, w: Tensor, tau: Tensor, regularization: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`permutahedron.permutahedron`, in Triton."""
    if z.numel() == 0:
        return reference.permutahedron(z, w, tau, regularization)
    n = z.shape[-1]
    rows, kl = z.numel() // n, regularization == "kl"
    scores, order = row_sort.descending(z)
    weights, w_order = row_sort.descending(w)
    y = z.new_empty(z.shape)
    index, w_index, start, stop = (z.new_empty(z.shape, dtype=torch.int32) for _ in range(4))
    scratch = z.new_empty((3 + kl, rows, n), dtype=torch.float64)
    given = (
        scores, order, layout.rows(weights.expand(z.shape), n), layout.rows(w_order.expand(z.shape), n),
        Rows(*layout.numbers(tau, z.shape[:-1], z.device)), Blocks(y, index, w_index, start, stop), scratch,
        rows, n,
    )  # fmt: skip
    which = {"KL": kl, **_width(n)}
    parts, length = _parts(rows, n)
    if parts == 1:
        launch(_project, rows, *given, 1, n, 1, BEGIN=True, WRITE=True, **which)
    else:
        launch(_project, rows * parts, *given, parts, length, 1, BEGIN=True, WRITE=False, **which)
        launch(_project, rows, *given, 1, n, length, BEGIN=False, WRITE=False, **which)
        launch(_project, rows * parts, *given, parts, length, n, BEGIN=False, WRITE=True, **which)
    return y, index, w_index, start


def permutahedron_backward(
    grad: Tensor, z: Tensor, w: Tensor, tau: Tensor, order: Tensor, w_order: Tensor, start: Tensor,
    regularization: str, want_w: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`permutahedron.permutahedron_backward`, in Triton."""
    if z.numel() == 0:
        return reference.permutahedron_backward(
            grad, z, w, tau, order, w_order, start, regularization, want_w
        )
    n = z.shape[-1]
    rows, kl = z.numel() // n, regularization == "kl"
    dz = z.new_empty(z.shape)
    dw = z.new_empty(z.shape if want_w else (0,), dtype=torch.promote_types(w.dtype, torch.float32))
    parts, length = _parts(rows, n)
    many = 2 + (kl and want_w)
    totals = z.new_empty((many, rows, n), dtype=torch.float64)
    heads, dtau = totals.new_empty(many, rows, parts), totals.new_empty(rows, parts)
    blocks = Blocks(
        None, order.contiguous(), w_order.contiguous(), start.contiguous(), totals=totals, heads=heads
    )
    given = (
        layout.matrix(grad, z), layout.rows(z, n), layout.matrix(w, z),
        Rows(*layout.numbers(tau, z.shape[:-1], z.device)), blocks, Projected(dz, dw, dtau),
        rows, n, parts, length,
    )  # fmt: skip
    which = {
        "KL": kl, "WANT_W": want_w, "PARTS": next_power_of_2(parts), **_width(n),
    }  # fmt: skip
    if parts == 1:
        launch(_pull, rows, *given, SUM=True, WRITE=True, **which)
    else:
        launch(_pull, rows * parts, *given, SUM=True, WRITE=False, **which)
        launch(_pull, rows * parts, *given, SUM=False, WRITE=True, **which)
        dtau = dtau.sum(-1)
    return dz, dw, dtau.reshape(z.shape[:-1])
