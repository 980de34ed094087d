"""The hard selection under a budget, which goes through a row in descending order: a program sorts short rows
and takes what fits; of long rows, once they are sorted (:mod:`.row_sort`), a program goes through each once.

The method is the reference's (`_kernels.reference.budget_mask`): of a long row, a chunk of the order at a
time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import budget_mask as reference
from khot._kernels.triton import layout, ranks, row_sort
from khot._kernels.triton.fast import any_row, double, wide
from khot._kernels.triton.float64 import number64
from khot._kernels.triton.launch import launch
from khot._kernels.triton.ranks import RANKED, across, nan_of, sorted_rows
from khot._kernels.triton.rows import entries, inside, place_rows
from khot._kernels.triton.sizes import cdiv, next_power_of_2

WIDTH = 1024  # entries that a program holds at a time


@triton.jit
def _unpayable(price):
    """Whether no budget pays for it: it is negative, infinite or NaN."""
    return ~((price >= 0) & (price < float("inf")))


@triton.jit
def _with_slack(budget, slack):
    """The budget and the share of it by which it may be exceeded (`_kernels.reference.budget_mask.slack`)."""
    return budget + budget * (tl.zeros((), tl.float64) + slack)


@triton.jit
def _take(price, waiting, left, TOGETHER: tl.constexpr):
    """Which of the entries that wait are taken, in their order, and what is then left of the budget."""
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    waiting = tl.where(price <= wide(left, TOGETHER), waiting, 0)
    taken = waiting * 0
    while any_row(tl.max(waiting, axis=AXIS) > 0, TOGETHER):
        # the longest run from the front that fits; what then costs more than is left never fits
        run = tl.cumsum(tl.where(waiting > 0, price, 0.0), axis=AXIS)
        fits = tl.where(run <= wide(left, TOGETHER), waiting, 0)
        taken += fits
        spent = tl.max(tl.where(fits > 0, run, 0.0), axis=AXIS)
        left = tl.where(left < float("inf"), left - spent, left)  # never below 0, so that free entries fit
        waiting = tl.where((fits == 0) & (price <= wide(left, TOGETHER)), waiting, 0)
    return taken, left


@triton.jit(do_not_specialize=["rows"])
def _greedy_rows(
    x, cost, budget, budget_low, slack, out_pointer, rows, n, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
    FULL: tl.constexpr, DOUBLES: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    valid = inside(there, column, n, TOGETHER, FULL)
    held = tl.load(x.pointer + entries(row, x.stride, column, TOGETHER), mask=valid, other=0.0).to(tl.float32)
    poison = nan_of(held, AXIS)
    taking = tl.where(held > float("-inf"), valid, False)
    _, order = sorted_rows(held, column, taking, TOGETHER, DOUBLES)
    number_of = wide(tl.sum(tl.where(taking, 1, 0), axis=AXIS), TOGETHER)
    waiting = tl.where(across(column, TOGETHER) < number_of, 1, 0)  # those that may be taken come first
    costs = cost.pointer + wide(row * cost.row, TOGETHER)
    price = double(tl.load(costs + order.to(tl.int64) * cost.column, mask=waiting > 0, other=0.0))
    own_budget = tl.zeros_like(poison).to(tl.float64) + budget_low
    own_budget += number64(*budget, tl.where(there, row, 0))
    own_budget = _with_slack(own_budget, slack)
    wrong = tl.max(tl.where(_unpayable(price), 1, 0), axis=AXIS) > 0
    bad = wrong | (poison != poison) | ~(own_budget >= 0)
    taken, _ = _take(price, waiting, own_budget, TOGETHER)
    y = tl.where(wide(bad, TOGETHER), float("nan"), taken.to(tl.float32))
    to = out_pointer + wide(row * n, TOGETHER) + order
    tl.store(to, y.to(out_pointer.dtype.element_ty), mask=valid)


@triton.jit
def _greedy(x_pointer, place_pointer, cost, budget, budget_low, slack, out_pointer, n, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_at, place_at, out_at = x_pointer + row * n, place_pointer + row * n, out_pointer + row * n
    cost_at = cost.pointer + row * cost.row
    own_budget = number64(*budget, row) + budget_low
    own_budget = _with_slack(own_budget, slack)
    worst, left = tl.zeros((WIDTH,), tl.int32), own_budget
    for start in range(0, n, WIDTH):
        at = start + tl.arange(0, WIDTH)
        there = at < n
        x = tl.load(x_at + at, mask=there, other=float("-inf"))
        place = tl.load(place_at + at, mask=there, other=0).to(tl.int32)  # as `at` is, and half as wide
        taking = x != float("-inf")
        price = double(tl.load(cost_at + place.to(tl.int64) * cost.column, mask=taking, other=0.0))
        worst = tl.maximum(worst, tl.where((x != x) | _unpayable(price), 1, 0))
        taken, left = _take(price, tl.where(taking, 1, 0), left, 1)
        tl.store(out_at + place, taken.to(tl.float32).to(out_pointer.dtype.element_ty), mask=there)
    if (tl.max(worst, axis=0) > 0) | ~(own_budget >= 0):  # which few rows are, so that it is seen late
        for start in range(0, n, WIDTH):
            at = start + tl.arange(0, WIDTH)
            place = tl.load(place_at + at, mask=at < n, other=0)  # what the thread has written
            nan = (at * 0).to(tl.float32) + float("nan")
            tl.store(out_at + place, nan.to(out_pointer.dtype.element_ty), mask=at < n)


KERNELS = (_greedy, _greedy_rows)


def budget_mask(x: Tensor, cost: Tensor, budget: Tensor) -> Tensor:
    """`budget_mask.budget_mask`, in Triton."""
    n = x.shape[-1]
    if x.numel() == 0:
        return reference.budget_mask(x, cost, budget)
    amount, rows = layout.values(budget, x.shape[:-1], x.device), x.numel() // n
    slack = reference.slack(n, cost.dtype, budget.dtype)
    prices, given = layout.matrix(cost, x), (layout.third(budget, amount), slack)
    out = x.new_empty(x.shape)
    if n <= RANKED and x.dtype != torch.float64:
        tile = ranks.tile(n)
        launch(
            _greedy_rows, cdiv(rows, tile["TOGETHER"]),
            layout.rows(x, n), prices, amount, *given, out, rows, n,
            DOUBLES=layout.compares_doubles(x.device), **tile,
        )  # fmt: skip
        return out
    ordered, order = row_sort.descending(x)
    width = min(WIDTH, max(64, next_power_of_2(n)))
    launch(
        _greedy, rows, ordered, order, prices, amount, *given, out, n,
        WIDTH=width, num_warps=max(1, width // 256),
    )  # fmt: skip
    return out
