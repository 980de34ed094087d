"""Forward: which kernels take a batch, and the one for float64 scores and for thresholds of rows on chip."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import soft_topk as reference
from khot._kernels.triton import layout, polish, resident, split
from khot._kernels.triton.fast import joined
from khot._kernels.triton.functions import (
    OUTPUTS,
    THRESHOLD,
    load,
    pair,
)
from khot._kernels.triton.launch import launch
from khot._kernels.triton.solver import (
    begin,
    evaluate,
    statistics,
    take_step,
    write,
)

EVALUATIONS = 64  # at most, of a resident row


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


KERNELS = (_resident,)


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
    kernels = None
    if resident.serves(x.dtype, F, tau, output):
        kernels = split if layout.splits(rows, n) else resident
    elif n > layout.RESIDENT:
        kernels = polish
    if kernels is not None:
        numbers = layout.values(k, batch, x.device), layout.values(tau, batch, x.device)
        kernels.soft_topk(source, *numbers, out, hi, lo, rows, n, F, output)
        return out, hi, lo
    width, together, warps = layout.block(n)
    launch(
        _resident, triton.cdiv(rows, together),
        *source, *layout.numbers(k, batch, x.device), *layout.numbers(tau, batch, x.device), out, hi, lo,
        rows, n, EVALUATIONS, *layout.power(F),
        CDF=layout.cdf_id(F.name), OUTPUT=OUTPUTS[output], COMPUTE=layout.compute(x.dtype, tau),
        TOGETHER=together, WIDTH=width, num_warps=warps,
    )  # fmt: skip
    return out, hi, lo
