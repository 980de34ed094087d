"""The Fenchel-Young loss of few, very long rows, which many programs share: five launches, and two for its
gradients.

The threshold takes the first three of :mod:`.split`. One more leaves what each part of the targets sums to,
and one adds up the losses: the program that is the last of its row to finish joins what all of them left.
Backward, every part writes its gradients, and a last launch joins what the parts know of dL/dτ, since before
these there is no launch that could reset a counter.

A part whose loss is no number in float32, as where scores are infinite, computes it in float64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.triton import layout, split
from khot._kernels.triton.arguments import Found, Rows, Scratch, Threshold, Values
from khot._kernels.triton.fast import in_two, inverse_of, joined
from khot._kernels.triton.float64 import number64
from khot._kernels.triton.functions import extent, place
from khot._kernels.triton.launch import launch
from khot._kernels.triton.losses import (
    losses_in_float64,
    losses_of,
    pull,
    pull_entries_in_float64,
    pulls,
    share_of,
    target_sums,
)
from khot._kernels.triton.sizes import next_power_of_2
from khot._kernels.triton.split import DONE, STATE, STATUS, last_of_row, total_of_parts
from khot._kernels.triton.terms import unit

LEFT = tl.constexpr(3)  # numbers that a part leaves: its targets' sum, whether they are soft, and its loss


@triton.jit(do_not_specialize=["parts", "length"])
def _target_parts(
    target, counter_pointer, left_pointer, n_columns, length, parts, T: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    start, mine = extent(part, n_columns, length)
    at = target.pointer + row * target.stride + start + tl.arange(0, T.width)
    mass, softness = target_sums(at, row >= 0, mine, 1, T.pieces, T.width)
    left = left_pointer + row * LEFT * parts + part
    tl.store(left, mass)
    tl.store(left + parts, softness)
    if part == 0:  # programs that come late to a row that one of them has solved alone leave it counting
        tl.store(counter_pointer + row, 0)


@triton.jit(do_not_specialize=["parts", "length"])
def _loss_parts(
    x, target, k, tau, loss_pointer, share_pointer, t, scratch, n_columns, length, parts, exponent,
    L: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    left = scratch.left + row * LEFT * parts
    per64 = share_of(total_of_parts(left, 0, parts, PARTS), number64(*k, row))
    per = per64.to(tl.float32)
    soft = (per != 1) | (total_of_parts(left, 1, parts, PARTS) != 0)
    tau64 = number64(*tau, row)
    own_tau = tau64.to(tl.float32)
    hi64, lo64 = tl.load(t.hi + row), tl.load(t.lo + row)
    start, mine = extent(part, n_columns, length)
    x_at, target_at = x.pointer + row * x.stride + start, target.pointer + row * target.stride + start
    loss = per64 * 0 + float("nan")
    if tl.load(scratch.state + row * STATE + STATUS) == DONE:
        scale = inverse_of(own_tau) * unit(L.cdf)
        power = tl.zeros((), tl.float32) + exponent[0]
        given = (hi64.to(tl.float32), lo64.to(tl.float32) * scale, scale, power)
        column, there = tl.arange(0, T.width), row >= 0
        if soft:
            loss = losses_of(
                x_at + column, target_at + column, there, mine, per, given, L.cdf, L.whole, True,
                1, 1, T.width,
            )  # fmt: skip
        else:
            loss = losses_of(
                x_at + column, target_at + column, there, mine, 1.0, given, L.cdf, L.whole, False,
                1, T.pieces, T.width,
            )  # fmt: skip
        loss *= tau64
    if ~(tl.abs(loss) < float("inf")):
        threshold = (hi64, lo64, tau64, joined(*exponent))
        loss = losses_in_float64(x_at, target_at, mine, per64, threshold, L.cdf, T.chunk)
    tl.store(left + 2 * parts + part, loss)
    if last_of_row(scratch.counter + row, parts):
        loss = total_of_parts(left, 2, parts, PARTS)
        loss = tl.where((hi64 == hi64) & (per64 == per64), loss, float("nan"))
        tl.store(loss_pointer + row, loss)
        tl.store(share_pointer + row, per64)


@triton.jit(do_not_specialize=["parts", "length"])
def _pull_loss_parts(
    x, target, grad, share_pointer, loss_pointer, t, tau, dx_pointer, left_pointer, n_columns, length, parts,
    exponent, L: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    hi64, lo64 = tl.load(t.hi + row), tl.load(t.lo + row)
    per64, loss = tl.load(share_pointer + row), tl.load(loss_pointer + row)
    own_grad = number64(*grad, row)
    tau64 = number64(*tau, row)
    hi, middle = in_two(hi64)
    start, mine = extent(part, n_columns, length)
    x_at, target_at = x.pointer + row * x.stride + start, target.pointer + row * target.stride + start
    to = dx_pointer + row * n_columns + start
    if pulls(row >= 0, hi, loss, tau64.to(tl.float32)):
        column = tl.arange(0, T.width)
        moved = pull(
            x_at + column, target_at + column, to + column, row >= 0, mine, hi, middle + lo64.to(tl.float32),
            tau64.to(tl.float32), per64.to(tl.float32), own_grad.to(tl.float32), exponent[0], L, T,
        )  # fmt: skip
        rate = tl.where(part == 0, loss / tau64, 0.0) - moved
    else:
        threshold = (hi64, lo64, tau64, joined(*exponent))
        rate = pull_entries_in_float64(x_at, target_at, to, mine, per64, threshold, own_grad, L.cdf, T.chunk)
    tl.store(left_pointer + row * parts + part, own_grad * rate)


@triton.jit(do_not_specialize=["parts"])
def _join_pulls(left_pointer, dtau_pointer, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(dtau_pointer + row, total_of_parts(left_pointer + row * parts, 0, parts, PARTS))


KERNELS = (_target_parts, _loss_parts, _pull_loss_parts, _join_pulls)


def fenchel_young(x: Rows, target: Rows, k: Values, tau: Values, found: Found, F: cdfs.CDF) -> None:
    """Fill the losses with the shares of the targets, hi and lo."""
    (rows, n), (loss, share), t = x.pointer.shape, found.out, Threshold(found.hi, found.lo)
    law, power = layout.law(F), layout.power(F)
    scratch, cut = split.solve(x, k, tau, t, law, power, fine=False)
    scratch = Scratch(scratch.state, scratch.counter, loss.new_empty(rows, LEFT.value, cut.parts))
    held = {"T": layout.part_tile(cut), "num_warps": cut.warps, **layout.registers()}
    programs, size = rows * cut.parts, (n, cut.length, cut.parts)
    launch(_target_parts, programs, target, scratch.counter, scratch.left, *size, **held)
    launch(
        _loss_parts, programs,
        x, target, k, tau, loss, share, t, scratch, *size, power,
        L=law, PARTS=next_power_of_2(cut.parts), **held,
    )  # fmt: skip


def fenchel_young_backward(
    x: Rows, target: Rows, grad: Values, solved: Any, tau: Values, dx: Tensor, dtau: Tensor, F: cdfs.CDF
) -> None:
    """Fill the gradients; solved are share, loss and the threshold."""
    rows, n = x.pointer.shape
    cut = layout.cut(rows, n)
    left = torch.empty((rows, cut.parts), dtype=torch.float64, device=dx.device)
    launch(
        _pull_loss_parts, rows * cut.parts,
        x, target, grad, *solved, tau, dx, left, n, cut.length, cut.parts, layout.power(F),
        L=layout.law(F), T=layout.part_tile(cut), num_warps=cut.warps, **layout.registers(),
    )  # fmt: skip
    launch(_join_pulls, rows, left, dtau, cut.parts, PARTS=next_power_of_2(cut.parts), num_warps=4)
