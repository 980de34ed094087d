"""Top-k in magnitude of few, very long rows, which many programs share: four launches, and two for the
gradients, with a fill of the counters before them.

The value γ that pooled entries share takes the first three of :mod:`.split`, with the terms of
:mod:`.pooled`. One more writes y, or the parts of rows for which float32 does not suffice write theirs by
:mod:`.exact_magnitude`. Backward, every part leaves its sums, and the program that is the last of its row to
finish adds them up, or sums that row in float64; then every part writes its gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.triton import layout, split
from khot._kernels.triton.arguments import Matrix, Norm, Rows, Scratch, Threshold, Values
from khot._kernels.triton.exact import number64
from khot._kernels.triton.exact_magnitude import write_sizes_exactly
from khot._kernels.triton.fast import in_two
from khot._kernels.triton.functions import place
from khot._kernels.triton.launch import launch
from khot._kernels.triton.pooled_rows import (
    in_range,
    ordinary_pull,
    pooled_values,
    pull_given,
    pull_sums,
    settle_pull,
    write_pooled,
    write_pull,
)
from khot._kernels.triton.sizes import next_power_of_2
from khot._kernels.triton.split import DONE, STATE, STATUS, last_of_row, total_of_parts

__all__ = ["KERNELS", "soft_topk_magnitude", "soft_topk_magnitude_backward"]

LEFT = tl.constexpr(5)  # numbers that a part leaves, and of a row: what γ brings, and whether in float64
PULL, CAREFUL, PULLED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["parts", "length"])
def _write_sizes(
    x, tau, out_pointer, t, state_pointer, n_columns, length, parts, power_high, L: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows first: the cache still has them
    row, part = (program // parts).to(tl.int64), program % parts
    hi64, lo64 = tl.load(t.hi + row), tl.load(t.lo + row)
    tau64 = number64(*tau, row)
    start = part.to(tl.int64) * length
    x_at, to = x.pointer + row * x.stride + start, out_pointer + row * n_columns + start
    mine = tl.minimum(n_columns - start, length).to(tl.int32)
    done = tl.load(state_pointer + row * STATE + STATUS) == DONE
    if done:
        power = tl.zeros((), tl.float32) + power_high
        given = pooled_values(hi64.to(tl.float32), lo64.to(tl.float32), tau64.to(tl.float32), power, L.p, 1)
        column = tl.arange(0, T.width)
        write_pooled(x_at + column, to + column, done, mine, given, L, T)
    else:
        write_sizes_exactly(to, (x_at, x_at, 0, mine), hi64, lo64, tau64, L.p, L.signed, T.chunk)


@triton.jit
def _threshold(t, tau, row):
    """hi, lo and τ in float64, and in float32."""
    hi64, lo64 = tl.load(t.hi + row), tl.load(t.lo + row)
    tau64 = number64(*tau, row)
    hi, rest = in_two(hi64)
    return hi64, lo64, tau64, hi, rest + lo64.to(tl.float32), tau64.to(tl.float32)


@triton.jit(do_not_specialize=["parts", "length"])
def _pull_size_parts(
    x, y, grad, grad_lo, k, t, tau, dtau_pointer, scratch, n_columns, length, parts, POOLED: tl.constexpr,
    SIGNED: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    hi64, lo64, tau64, hi, lo, own_tau = _threshold(t, tau, row)
    start = part.to(tl.int64) * length
    column = tl.arange(0, T.width)
    mine = tl.minimum(n_columns - start, length).to(tl.int32)
    ordinary = ordinary_pull(hi, own_tau)
    left = scratch.left + row * LEFT * parts
    x_at, y_at = x.pointer + row * x.stride, y.pointer + row * y.stride
    grad_at = grad.pointer + row * grad.row
    if ordinary:
        given = pull_given(hi, lo, own_tau, POOLED, 1)
        sums = pull_sums(
            (
                x_at + start + column, y_at + start + column, grad_at + (start + column) * grad.column,
                grad.column,
            ),
            ordinary, mine, hi64 * 0, given, POOLED, SIGNED, 1, T.pieces, T.width,
        )  # fmt: skip
        for i in tl.static_range(LEFT):
            tl.store(left + i * parts + part, sums[i])
    if last_of_row(scratch.counter + row, parts):
        own_k = number64(*k, row)
        own_grad_lo = number64(*grad_lo, row)
        totals = (
            total_of_parts(left, 0, parts, PARTS), total_of_parts(left, 1, parts, PARTS),
            total_of_parts(left, 2, parts, PARTS), total_of_parts(left, 3, parts, PARTS),
            total_of_parts(left, 4, parts, PARTS),
        )  # fmt: skip
        pull, dtau = settle_pull(totals, own_k, own_grad_lo)
        careful = ~(ordinary & in_range(pull, dtau))
        if careful:
            slot = tl.arange(0, T.chunk)
            given64 = pull_given(hi64, lo64, tau64, POOLED, 1)
            sums64 = pull_sums(
                (x_at + slot, y_at + slot, grad_at + slot.to(tl.int64) * grad.column, grad.column), careful,
                n_columns, hi64 * 0, given64, POOLED, SIGNED, 1, 1, T.chunk,
            )  # fmt: skip
            pull, dtau = settle_pull(sums64, own_k, own_grad_lo)
            dtau = tl.where(hi64 == hi64, dtau, hi64)
        tl.store(dtau_pointer + row, dtau)
        tl.store(scratch.state + row * PULLED + PULL, pull)
        tl.store(scratch.state + row * PULLED + CAREFUL, tl.where(careful, 1.0, 0.0).to(tl.float64))


@triton.jit(do_not_specialize=["parts", "length"])
def _size_gradient_parts(
    x, y, grad, t, tau, dx_pointer, state_pointer, n_columns, length, parts, POOLED: tl.constexpr,
    SIGNED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows first: the cache still has them
    row, part = (program // parts).to(tl.int64), program % parts
    hi64, lo64, tau64, hi, lo, own_tau = _threshold(t, tau, row)
    start = part.to(tl.int64) * length
    mine = tl.minimum(n_columns - start, length).to(tl.int32)
    x_at, y_at = x.pointer + row * x.stride + start, y.pointer + row * y.stride + start
    grad_at, dx_at = grad.pointer + row * grad.row + start * grad.column, dx_pointer + row * n_columns + start
    pull = tl.load(state_pointer + row * PULLED + PULL)
    if tl.load(state_pointer + row * PULLED + CAREFUL) == 0:
        column = tl.arange(0, T.width)
        write_pull(
            (x_at + column, y_at + column, grad_at + column.to(tl.int64) * grad.column, grad.column),
            dx_at + column, row >= 0, mine, hi, pull, pull_given(hi, lo, own_tau, POOLED, 1), POOLED, SIGNED,
            1, T.pieces, T.width,
        )  # fmt: skip
    else:
        slot = tl.arange(0, T.chunk)
        write_pull(
            (x_at + slot, y_at + slot, grad_at + slot.to(tl.int64) * grad.column, grad.column), dx_at + slot,
            row >= 0, mine, hi64, pull, pull_given(hi64, lo64, tau64, POOLED, 1), POOLED, SIGNED, 1, 1,
            T.chunk,
        )  # fmt: skip


KERNELS = (_write_sizes, _pull_size_parts, _size_gradient_parts)


def soft_topk_magnitude(
    source: Rows,
    k: Values,
    tau: Values,
    out: Tensor,
    t: Threshold,
    rows: int,
    n: int,
    p: float,
    signed: bool,
) -> None:
    """Fill out and t."""
    F = cdfs.Power(p)
    law, power = layout.law(F)._replace(whole=layout.whole_of_sizes(p)), layout.power(F)
    scratch, cut = split.solve(
        source, k, tau, t, rows, n, law, power, fine=False, POOLED=float(p), SIGNED=signed
    )  # fmt: skip
    launch(
        _write_sizes, rows * cut.parts,
        source, tau, out, t, scratch.state, n, cut.length, cut.parts, power[0],
        L=Norm(float(p), signed, law.whole), **_held(cut),
    )  # fmt: skip


def soft_topk_magnitude_backward(
    source: Rows,
    y: Rows,
    grad: Matrix,
    grad_lo: Values,
    k: Values,
    t: Threshold,
    tau: Values,
    results: tuple[Tensor, Tensor],
    rows: int,
    n: int,
    p: float,
    signed: bool,
) -> None:
    """Fill the results: dx and dtau."""
    dx, dtau = results
    cut = layout.cut(rows, n)
    state, left = dtau.new_empty(rows, PULLED.value), dtau.new_empty(rows, LEFT.value, cut.parts)
    scratch = Scratch(state, torch.zeros(rows, dtype=torch.int32, device=dtau.device), left)
    which = {"POOLED": float(p), "SIGNED": signed, **_held(cut)}
    programs, size = rows * cut.parts, (n, cut.length, cut.parts)
    launch(
        _pull_size_parts, programs,
        source, y, grad, grad_lo, k, t, tau, dtau, scratch, *size, PARTS=next_power_of_2(cut.parts), **which,
    )  # fmt: skip
    launch(_size_gradient_parts, programs, source, y, grad, t, tau, dx, state, *size, **which)


def _held(cut: layout.Cut) -> dict[str, Any]:
    return {"T": layout.part_tile(cut), "num_warps": cut.warps, **layout.registers()}
