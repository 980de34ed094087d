"""Forward: which kernels take a batch; and those for float64 scores and for thresholds alone.

The solver on a row on chip, and on one that is split over programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import soft_topk as reference
from khot._kernels.triton import layout, resident, split
from khot._kernels.triton.fast import joined
from khot._kernels.triton.functions import (
    OUTPUTS,
    THRESHOLD,
    chunks,
    gather,
    get,
    load,
    pair,
    place,
    put,
)
from khot._kernels.triton.launch import launch
from khot._kernels.triton.solver import (
    add_statistics,
    add_sums,
    begin,
    evaluate,
    statistics,
    take_step,
    write,
    write_chunk,
)

EVALUATIONS = 64  # at most, of a resident row
LAUNCHES = 40  # passes over a long row, most of which find it done


# ------------------------------------------------------------------------------ the kernels


@triton.jit(do_not_specialize=["rows", "evaluations"])
def _resident(
    x_pointer, x_stride, k_pointer, k_stride, tau_pointer, tau_stride, out_pointer, hi_pointer, lo_pointer,
    rows, n, evaluations, power_high, power_low,
    CDF: tl.constexpr, OUTPUT: tl.constexpr,
    COMPUTE: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The whole of a soft top-k, for `TOGETHER` rows of at most `WIDTH` entries."""
    FINE: tl.constexpr = tl.float64 == COMPUTE
    power = joined(power_high, power_low)
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    there = row < rows
    valid = there[:, None] & (column < n)[None, :]
    x = load(x_pointer, row, x_stride, column, valid, COMPUTE)
    k = tl.load(k_pointer + row * k_stride, mask=there, other=0.0).to(tl.float64)
    tau = tl.load(tau_pointer + row * tau_stride, mask=there, other=1.0).to(tl.float64)

    nan, size, pinned, xmin, xmax, mean, squares = statistics(x, valid)
    variance = squares / tl.maximum(size, 1.0)
    k, size, tau, settled, hi, low, high = begin(
        nan, size, pinned, xmin, xmax, mean, variance, k, tau, power, CDF
    )
    hi, lo = pair(hi, hi * 0, FINE)
    done = settled != 0
    near_up, near_down = lo * 0, lo * 0
    count = 0
    running = tl.sum(tl.where(done, 0, 1))
    while running > 0:
        m, A, B, f_above, f_below, up, down = evaluate(x, valid, hi, lo, tau, near_up, near_down, power, CDF)
        new_hi, new_lo, low, high, new_up, new_down, finished = take_step(
            m, A, B, f_above, f_below, up, down, pinned, k, size, tau,
            hi, lo, low, high, near_up, near_down, count, FINE, power, CDF,
        )  # fmt: skip
        hi, lo = tl.where(done, hi, new_hi), tl.where(done, lo, new_lo)
        near_up, near_down = tl.where(done, near_up, new_up), tl.where(done, near_down, new_down)
        done = done | finished
        count += 1
        running = tl.where(count < evaluations, tl.sum(tl.where(done, 0, 1)), 0)

    hi, lo = tl.where(settled == 0, hi, settled), tl.where(settled == 0, lo, settled)
    tl.store(hi_pointer + row, hi, mask=there)
    tl.store(lo_pointer + row, lo, mask=there)
    if OUTPUT != THRESHOLD:
        offset = row[:, None] * n + column[None, :]
        write(out_pointer, x, valid, offset, hi, lo, tau, power, CDF, OUTPUT)


# A long row: its parts leave sums, which all programs of the next launch combine alike.


@triton.jit(do_not_specialize=["parts"])
def _part_statistics(
    x_pointer, x_stride, sums_pointer, n, length, parts, COMPUTE: tl.constexpr, CHUNK: tl.constexpr
):
    row, part = place(parts)
    zero = tl.zeros((1,), tl.float64)
    sums = (zero, zero, zero, zero + float("inf"), zero - float("inf"), zero, zero)
    sums = chunks(add_statistics, sums, (), x_pointer, x_stride, row, part, n, length, COMPUTE, CHUNK)
    put(sums_pointer + (row * parts + part) * 7 + tl.arange(0, 1), sums)


@triton.jit(do_not_specialize=["parts"])
def _part_begin(
    k_pointer, k_stride, tau_pointer, tau_stride, sums_pointer, state_pointer, parts, power_high, power_low,
    CDF: tl.constexpr,
    FINE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    power = joined(power_high, power_low)
    one = row + tl.arange(0, 1)
    sums = sums_pointer + row * parts * 7
    nan = tl.max(gather(sums, parts, 0, PARTS, 7, 0.0), axis=1)
    sizes = gather(sums, parts, 1, PARTS, 7, 0.0)
    size = tl.sum(sizes, axis=1)
    pinned = tl.sum(gather(sums, parts, 2, PARTS, 7, 0.0), axis=1)
    xmin = tl.min(gather(sums, parts, 3, PARTS, 7, float("inf")), axis=1)
    xmax = tl.max(gather(sums, parts, 4, PARTS, 7, float("-inf")), axis=1)
    means = gather(sums, parts, 5, PARTS, 7, 0.0)
    mean = tl.sum(sizes * means, axis=1) / tl.maximum(size, 1.0)
    between = tl.sum(sizes * (means - mean[:, None]) * (means - mean[:, None]), axis=1)
    squares = tl.sum(gather(sums, parts, 6, PARTS, 7, 0.0), axis=1) + between
    k = tl.load(k_pointer + one * k_stride).to(tl.float64)
    tau = tl.load(tau_pointer + one * tau_stride).to(tl.float64)
    k, size, tau, settled, hi, low, high = begin(
        nan, size, pinned, xmin, xmax, mean, squares / tl.maximum(size, 1.0), k, tau,
        power, CDF,
    )  # fmt: skip
    hi, lo = pair(hi, hi * 0, FINE)
    done = tl.where(settled == 0, 0.0, 1.0)
    hi, lo = tl.where(settled == 0, hi, settled), tl.where(settled == 0, lo, settled)
    put(state_pointer + one * 11, (k, size, tau, pinned, hi, lo, low, high, hi * 0, hi * 0, done))


@triton.jit
def _advance(state, sums, parts, count, power, FINE: tl.constexpr, CDF: tl.constexpr, PARTS: tl.constexpr):
    """The state of a row after the step that its sums call for; as it was where it is done."""
    k, n, tau, pinned, hi, lo, low, high, near_up, near_down, done = get(state, 11)
    if tl.sum(done) == 0 and count > 0:
        m = tl.sum(gather(sums, parts, 0, PARTS, 7, 0.0), axis=1)
        A = tl.sum(gather(sums, parts, 1, PARTS, 7, 0.0), axis=1)
        B = tl.sum(gather(sums, parts, 2, PARTS, 7, 0.0), axis=1)
        f_above = tl.sum(gather(sums, parts, 3, PARTS, 7, 0.0), axis=1)
        f_below = tl.sum(gather(sums, parts, 4, PARTS, 7, 0.0), axis=1)
        up = tl.min(gather(sums, parts, 5, PARTS, 7, float("inf")), axis=1)
        down = tl.max(gather(sums, parts, 6, PARTS, 7, float("-inf")), axis=1)
        hi, lo, low, high, near_up, near_down, finished = take_step(
            m, A, B, f_above, f_below, up, down, pinned, k, n, tau,
            hi, lo, low, high, near_up, near_down, count - 1, FINE, power, CDF,
        )  # fmt: skip
        done = tl.where(finished, 1.0, 0.0).to(tl.float64)
    return k, n, tau, pinned, hi, lo, low, high, near_up, near_down, done


@triton.jit(do_not_specialize=["parts", "count"])
def _part_evaluate(
    x_pointer, x_stride, sums_before, state_before, sums_after, state_after, n, length, parts, count,
    power_high, power_low, CDF: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    FINE: tl.constexpr = tl.float64 == COMPUTE
    power = joined(power_high, power_low)
    row, part = place(parts)
    at = row * 11 + tl.arange(0, 1)
    state = _advance(state_before + at, sums_before + row * parts * 7, parts, count, power, FINE, CDF, PARTS)
    if part == 0:
        put(state_after + at, state)
    _, _, tau, _, hi, lo, _, _, near_up, near_down, done = state
    if tl.sum(done) == 0:
        zero = tl.zeros((1,), tl.float64)
        sums = (zero, zero, zero, zero, zero, zero + float("inf"), zero - float("inf"))
        sums = chunks(
            add_sums, sums, (hi, lo, tau, near_up, near_down, power, CDF),
            x_pointer, x_stride, row, part, n, length, COMPUTE, CHUNK,
        )  # fmt: skip
        put(sums_after + (row * parts + part) * 7 + tl.arange(0, 1), sums)


@triton.jit(do_not_specialize=["parts", "count"])
def _part_write(
    x_pointer, x_stride, sums_pointer, state_pointer, out_pointer, hi_pointer, lo_pointer,
    n, length, parts, count, power_high, power_low,
    CDF: tl.constexpr, OUTPUT: tl.constexpr, COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    FINE: tl.constexpr = tl.float64 == COMPUTE
    power = joined(power_high, power_low)
    row, part = place(parts)
    one = row + tl.arange(0, 1)
    _, _, tau, _, hi, lo, _, _, _, _, _ = _advance(
        state_pointer + one * 11, sums_pointer + row * parts * 7, parts, count, power, FINE, CDF, PARTS
    )
    if part == 0:
        tl.store(hi_pointer + one, hi)
        tl.store(lo_pointer + one, lo)
    if OUTPUT != THRESHOLD:
        chunks(
            write_chunk, (), (out_pointer, n, hi, lo, tau, power, CDF, OUTPUT),
            x_pointer, x_stride, row, part, n, length, COMPUTE, CHUNK,
        )  # fmt: skip


KERNELS = (_resident, _part_statistics, _part_begin, _part_evaluate, _part_write)


def soft_topk(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_topk.soft_topk`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if n == 0:
        return reference.soft_topk(x, k, tau, cdf, shape, output)
    F = cdfs.resolve(cdf, shape)
    if output == "threshold":
        out = x.new_empty((*batch, 0))
    else:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)  # half of new_empty's time
    hi = x.new_empty(batch, dtype=torch.float64)
    lo = torch.empty_like(hi)
    rows = hi.numel()
    if rows == 0:
        return out, hi, lo
    source = layout.rows(x, n)
    if resident.serves(x.dtype, F, tau, output):
        numbers = layout.values(k, batch, x.device), layout.values(tau, batch, x.device)
        kernels = split if layout.splits(rows, n) else resident
        kernels.soft_topk(source, *numbers, out, hi, lo, rows, n, F, output)
        return out, hi, lo
    k_row, tau_row = layout.numbers(k, batch, x.device), layout.numbers(tau, batch, x.device)
    power, which = layout.power(F), {"CDF": layout.cdf_id(F.name)}
    how = {"OUTPUT": OUTPUTS[output], "COMPUTE": layout.compute(x.dtype, tau)}
    if n <= layout.RESIDENT:
        width, together, warps = layout.block(n)
        launch(
            _resident, triton.cdiv(rows, together),
            *source, *k_row, *tau_row, out, hi, lo, rows, n, EVALUATIONS, *power,
            **which, **how, TOGETHER=together, WIDTH=width, num_warps=warps,
        )  # fmt: skip
        return out, hi, lo
    parts, length = layout.parts(rows, n)
    sums = [x.new_empty(rows, parts, 7, dtype=torch.float64) for _ in range(2)]
    state = [x.new_empty(rows, 11, dtype=torch.float64) for _ in range(2)]
    padded = {"PARTS": triton.next_power_of_2(parts)}
    chunk = {"CHUNK": layout.CHUNK, "COMPUTE": how["COMPUTE"]}
    launch(_part_statistics, rows * parts, *source, sums[0], n, length, parts, **chunk)
    fine = {"FINE": how["COMPUTE"] == tl.float64}
    launch(_part_begin, rows, *k_row, *tau_row, sums[0], state[0], parts, *power, **which, **fine, **padded)
    for count in range(LAUNCHES):
        a, b = count % 2, 1 - count % 2
        launch(
            _part_evaluate, rows * parts,
            *source, sums[a], state[a], sums[b], state[b], n, length, parts, count, *power,
            **which, **chunk, **padded,
        )  # fmt: skip
    last = LAUNCHES % 2
    launch(
        _part_write, rows * parts,
        *source, sums[last], state[last], out, hi, lo, n, length, parts, LAUNCHES, *power,
        **which, **how, CHUNK=layout.CHUNK, **padded,
    )  # fmt: skip
    return out, hi, lo
