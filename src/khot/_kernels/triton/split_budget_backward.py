"""Backward of soft budgets of few, very long rows, which many programs share: two launches, and a fill of the
counters.

In the first, every part leaves its sums, and the program that is the last of its row to finish adds them up;
in the second, every part writes its gradients. A row that needs float64 is done by that last program alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.triton import layout
from khot._kernels.triton.exact_sums import BY
from khot._kernels.triton.fast import joined
from khot._kernels.triton.functions import place
from khot._kernels.triton.launch import launch
from khot._kernels.triton.resident_backward import asked
from khot._kernels.triton.resident_budget_backward import (
    pull_row_exactly,
    pull_sums,
    pull_threshold,
    settle_pull,
    write_pull,
)
from khot._kernels.triton.sizes import next_power_of_2
from khot._kernels.triton.split import last_of_row, total_of_parts
from khot._kernels.triton.split_budget import PIECES, part_of

__all__ = ["KERNELS", "soft_budget_backward"]

LEFT = tl.constexpr(4)  # numbers that a part leaves


@triton.jit(do_not_specialize=["parts", "length"])
def _pull_budget_parts(
    grad_pointer, grad_row, grad_column, grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low,
    x_pointer, x_stride, cost_pointer, cost_row, cost_column, hi_pointer, lo_pointer,
    tau_pointer, tau_stride, tau_high, tau_low, dx_pointer, dcost_pointer, dbudget_pointer, dtau_pointer,
    done_pointer, counter_pointer, left_pointer, n_columns, length, parts, power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr, AT_MOST: tl.constexpr, ASKED: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    hi, lo, tau, inverse, _, given = pull_threshold(
        hi_pointer, lo_pointer, tau_pointer, tau_stride, tau_high, tau_low, row, row >= 0, power_high, CDF, 1
    )
    at, mine, start = part_of(
        x_pointer, x_stride, cost_pointer, cost_row, cost_column, row, part, n_columns, length, WIDTH
    )
    grad_at = grad_pointer + row * grad_row + (start + tl.arange(0, WIDTH)) * grad_column
    sums = pull_sums(
        at, grad_at, grad_column, row >= 0, mine, hi.to(tl.float64) * 0, given,
        CDF, WHOLE, BY, 1, PIECES, WIDTH, False, True,
    )  # fmt: skip
    left = left_pointer + row * LEFT * parts
    for i in tl.static_range(LEFT):
        tl.store(left + i * parts + part, sums[i])
    if last_of_row(counter_pointer + row, parts):
        totals = (
            total_of_parts(left, 0, parts, PARTS), total_of_parts(left, 1, parts, PARTS),
            total_of_parts(left, 2, parts, PARTS), total_of_parts(left, 3, parts, PARTS),
        )  # fmt: skip
        pull, dtau, ok = settle_pull(
            totals, grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low, row, row >= 0, hi, lo, tau,
            inverse, CDF, AT_MOST, ASKED,
        )  # fmt: skip
        tl.store(done_pointer + row, tl.where(ok, 0, 1))
        if ok:
            tl.store(dbudget_pointer + row, pull.to(tl.float64))
            tl.store(dtau_pointer + row, dtau.to(tl.float64))
        else:
            pull_row_exactly(
                row, grad_pointer, grad_row, grad_column, x_pointer, x_stride, cost_pointer, cost_row,
                cost_column, hi_pointer, lo_pointer, dx_pointer, dcost_pointer, dbudget_pointer, dtau_pointer,
                n_columns, (grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low),
                (tau_pointer, tau_stride, tau_high, tau_low), joined(power_high, power_low),
                CDF, BY, AT_MOST, CHUNK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "length"])
def _budget_gradient_parts(
    grad_pointer, grad_row, grad_column, x_pointer, x_stride, cost_pointer, cost_row, cost_column,
    hi_pointer, lo_pointer, tau_pointer, tau_stride, tau_high, tau_low, dx_pointer, dcost_pointer,
    dbudget_pointer, done_pointer, n_columns, length, parts, power_high,
    CDF: tl.constexpr, WHOLE: tl.constexpr, BY: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows first: the cache still has them
    row, part = (program // parts).to(tl.int64), program % parts
    if tl.load(done_pointer + row) == 0:
        hi, lo, _, inverse, power, given = pull_threshold(
            hi_pointer, lo_pointer, tau_pointer, tau_stride, tau_high, tau_low, row, row >= 0, power_high,
            CDF, 1,
        )  # fmt: skip
        at, mine, start = part_of(
            x_pointer, x_stride, cost_pointer, cost_row, cost_column, row, part, n_columns, length, WIDTH
        )
        column = start + tl.arange(0, WIDTH)
        grad_at, to = grad_pointer + row * grad_row + column * grad_column, row * n_columns + column
        pull = tl.load(dbudget_pointer + row).to(tl.float32)
        write_pull(
            at, grad_at, grad_column, dx_pointer + to, dcost_pointer + to, row >= 0, mine, given, pull,
            hi, lo, inverse, power, CDF, WHOLE, BY, 1, PIECES, WIDTH, False, True,
        )  # fmt: skip


KERNELS = (_pull_budget_parts, _budget_gradient_parts)


def soft_budget_backward(
    grad: tuple[Tensor, int, int],
    grad_lo: layout.Values,
    source: tuple[Tensor, int],
    cost: tuple[Tensor, int, int],
    t: tuple[Tensor, Tensor],
    tau: layout.Values,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: int,
    n: int,
    F: cdfs.CDF,
    *,
    by: str,
    at_most: bool,
) -> None:
    """Fill the results: the gradients in the scores, the costs, the budget, and τ."""
    dx, dcost, dbudget, _ = results
    cut, power = layout.cut(rows, n), layout.power(F)
    done = torch.empty(rows, dtype=torch.int32, device=dx.device)
    counter, left = torch.zeros_like(done), dbudget.new_empty(rows, LEFT.value, cut.parts)
    which = {
        "CDF": layout.cdf_id(F.name), "WHOLE": layout.whole(F), "BY": BY[by],
        "PIECES": PIECES, "WIDTH": cut.width, "num_warps": cut.warps, **layout.registers(),
    }  # fmt: skip
    size = n, cut.length, cut.parts
    launch(
        _pull_budget_parts, rows * cut.parts,
        *grad, *grad_lo, *source, *cost, *t, *tau, *results, done, counter, left, *size, *power,
        AT_MOST=at_most, ASKED=asked(grad_lo), PARTS=next_power_of_2(cut.parts),
        CHUNK=layout.RESCUE * cut.warps, **which,
    )  # fmt: skip
    launch(
        _budget_gradient_parts, rows * cut.parts,
        *grad, *source, *cost, *t, *tau, dx, dcost, dbudget, done, *size, power[0], **which,
    )  # fmt: skip
