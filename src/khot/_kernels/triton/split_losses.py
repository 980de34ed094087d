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
from khot._kernels.triton.exact import number64
from khot._kernels.triton.fast import inverse_of, joined
from khot._kernels.triton.fast import split as halves
from khot._kernels.triton.functions import place
from khot._kernels.triton.launch import launch
from khot._kernels.triton.losses import (
    losses_exactly,
    losses_of,
    pull,
    pull_entries_exactly,
    pulls,
    share_of,
    target_sums,
)
from khot._kernels.triton.sizes import next_power_of_2
from khot._kernels.triton.split import DONE, STATE, STATUS, last_of_row, total_of_parts
from khot._kernels.triton.terms import unit

__all__ = ["KERNELS", "fenchel_young", "fenchel_young_backward"]

LEFT = tl.constexpr(3)  # numbers that a part leaves: its targets' sum, whether they are soft, and its loss


@triton.jit(do_not_specialize=["parts", "length"])
def _target_parts(
    target_pointer, target_stride, counter_pointer, left_pointer, n_columns, length, parts,
    PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    start = part.to(tl.int64) * length
    at = target_pointer + row * target_stride + start + tl.arange(0, WIDTH)
    mine = tl.minimum(n_columns - start, length).to(tl.int32)
    mass, softness = target_sums(at, row >= 0, mine, 1, PIECES, WIDTH)
    left = left_pointer + row * LEFT * parts + part
    tl.store(left, mass)
    tl.store(left + parts, softness)
    if part == 0:  # programs that come late to a row that one of them has solved alone leave it counting
        tl.store(counter_pointer + row, 0)


@triton.jit(do_not_specialize=["parts", "length"])
def _loss_parts(
    x_pointer, x_stride, target_pointer, target_stride, k_pointer, k_stride, k_high, k_low,
    tau_pointer, tau_stride, tau_high, tau_low, loss_pointer, share_pointer, hi_pointer, lo_pointer,
    state_pointer, counter_pointer, left_pointer, n_columns, length, parts, power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    left = left_pointer + row * LEFT * parts
    per64 = share_of(total_of_parts(left, 0, parts, PARTS), number64(k_pointer, k_stride, k_high, k_low, row))
    per = per64.to(tl.float32)
    soft = (per != 1) | (total_of_parts(left, 1, parts, PARTS) != 0)
    tau64 = number64(tau_pointer, tau_stride, tau_high, tau_low, row)
    tau = tau64.to(tl.float32)
    hi64, lo64 = tl.load(hi_pointer + row), tl.load(lo_pointer + row)
    start = part.to(tl.int64) * length
    x_at, target_at = x_pointer + row * x_stride + start, target_pointer + row * target_stride + start
    mine = tl.minimum(n_columns - start, length).to(tl.int32)
    loss = per64 * 0 + float("nan")
    if tl.load(state_pointer + row * STATE + STATUS) == DONE:
        scale = inverse_of(tau) * unit(CDF)
        power = tl.zeros((), tl.float32) + power_high
        given = (hi64.to(tl.float32), lo64.to(tl.float32) * scale, scale, power)
        column, there = tl.arange(0, WIDTH), row >= 0
        if soft:
            loss = losses_of(
                x_at + column, target_at + column, there, mine, per, given, CDF, WHOLE, True, 1, 1, WIDTH
            )
        else:
            loss = losses_of(
                x_at + column, target_at + column, there, mine, 1.0, given, CDF, WHOLE, False,
                1, PIECES, WIDTH,
            )  # fmt: skip
        loss *= tau64
    if ~(tl.abs(loss) < float("inf")):
        threshold = (hi64, lo64, tau64, joined(power_high, power_low))
        loss = losses_exactly(x_at, target_at, mine, per64, threshold, CDF, CHUNK)
    tl.store(left + 2 * parts + part, loss)
    if last_of_row(counter_pointer + row, parts):
        loss = total_of_parts(left, 2, parts, PARTS)
        loss = tl.where((hi64 == hi64) & (per64 == per64), loss, float("nan"))
        tl.store(loss_pointer + row, loss)
        tl.store(share_pointer + row, per64)


@triton.jit(do_not_specialize=["parts", "length"])
def _pull_loss_parts(
    x_pointer, x_stride, target_pointer, target_stride, grad_pointer, grad_stride, grad_high, grad_low,
    share_pointer, loss_pointer, hi_pointer, lo_pointer, tau_pointer, tau_stride, tau_high, tau_low,
    dx_pointer, left_pointer, n_columns, length, parts, power_high, power_low,
    CDF: tl.constexpr, WHOLE: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    hi64, lo64 = tl.load(hi_pointer + row), tl.load(lo_pointer + row)
    per64, loss = tl.load(share_pointer + row), tl.load(loss_pointer + row)
    grad = number64(grad_pointer, grad_stride, grad_high, grad_low, row)
    tau64 = number64(tau_pointer, tau_stride, tau_high, tau_low, row)
    hi, rest = halves(hi64)
    start = part.to(tl.int64) * length
    x_at, target_at = x_pointer + row * x_stride + start, target_pointer + row * target_stride + start
    to = dx_pointer + row * n_columns + start
    mine = tl.minimum(n_columns - start, length).to(tl.int32)
    if pulls(row >= 0, hi, loss, tau64.to(tl.float32)):
        column = tl.arange(0, WIDTH)
        moved = pull(
            x_at + column, target_at + column, to + column, row >= 0, mine, hi, rest + lo64.to(tl.float32),
            tau64.to(tl.float32), per64.to(tl.float32), grad.to(tl.float32), power_high,
            CDF, WHOLE, 1, PIECES, WIDTH, False,
        )  # fmt: skip
        rate = tl.where(part == 0, loss / tau64, 0.0) - moved
    else:
        threshold = (hi64, lo64, tau64, joined(power_high, power_low))
        rate = pull_entries_exactly(x_at, target_at, to, mine, per64, threshold, grad, CDF, CHUNK)
    tl.store(left_pointer + row * parts + part, grad * rate)


@triton.jit(do_not_specialize=["parts"])
def _join_pulls(left_pointer, dtau_pointer, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(dtau_pointer + row, total_of_parts(left_pointer + row * parts, 0, parts, PARTS))


KERNELS = (_target_parts, _loss_parts, _pull_loss_parts, _join_pulls)


def fenchel_young(
    x: tuple[Tensor, int],
    target: tuple[Tensor, int],
    k: layout.Values,
    tau: layout.Values,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: int,
    n: int,
    F: cdfs.CDF,
) -> None:
    """Fill the losses, the shares of the targets, hi and lo."""
    state, counter, _, cut = split.solve(x, k, tau, *results[2:], rows, n, F, fine=False)
    left = results[0].new_empty(rows, LEFT.value, cut.parts)
    held = {"PIECES": cut.pieces, "WIDTH": cut.width, "num_warps": cut.warps, **layout.registers()}
    launch(_target_parts, rows * cut.parts, *target, counter, left, n, cut.length, cut.parts, **held)
    launch(
        _loss_parts, rows * cut.parts,
        *x, *target, *k, *tau, *results, state, counter, left, n, cut.length, cut.parts, *layout.power(F),
        PARTS=next_power_of_2(cut.parts), **held, **_formulas(F, cut),
    )  # fmt: skip


def fenchel_young_backward(
    x: tuple[Tensor, int],
    target: tuple[Tensor, int],
    grad: layout.Values,
    solved: tuple[Tensor, Tensor, Tensor, Tensor],
    tau: layout.Values,
    dx: Tensor,
    dtau: Tensor,
    rows: int,
    n: int,
    F: cdfs.CDF,
) -> None:
    """Fill the gradients; solved are share, loss, hi and lo."""
    cut = layout.cut(rows, n)
    left = torch.empty((rows, cut.parts), dtype=torch.float64, device=dx.device)
    launch(
        _pull_loss_parts, rows * cut.parts,
        *x, *target, *grad, *solved, *tau, dx, left, n, cut.length, cut.parts, *layout.power(F),
        PIECES=cut.pieces, WIDTH=cut.width, num_warps=cut.warps, **_formulas(F, cut), **layout.registers(),
    )  # fmt: skip
    launch(_join_pulls, rows, left, dtau, cut.parts, PARTS=next_power_of_2(cut.parts), num_warps=4)


def _formulas(F: cdfs.CDF, cut: layout.Cut) -> dict[str, Any]:
    return {"CDF": layout.cdf_id(F.name), "WHOLE": layout.whole(F), "CHUNK": layout.RESCUE * cut.warps}
