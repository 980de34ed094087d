"""The ranking losses in float32: the loss of a list from its ranks, and the slopes in these, one launch each.

A list that fits is sorted by relevance in the program, and a longer one by :mod:`.row_sort`. All other
passes go along a list as far as a program holds it at a time, so that a list of any length is the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import ranking_losses as reference
from khot._kernels.triton import layout, ranks, row_sort
from khot._kernels.triton.arguments import Matrix, Rows
from khot._kernels.triton.fast import LN2, store, total, wide
from khot._kernels.triton.launch import launch
from khot._kernels.triton.rows import entries, inside, place_rows
from khot._kernels.triton.sizes import cdiv
from khot._kernels.triton.ways import laplace_count, sorts_rows

SORTED, WARPS = 2048, 8  # entries of a list that a program sorts, or holds at a time
LISTS = 1 << 16  # that one program takes the mean of; torch takes less time for more
# Sums of n ranks are off by about n · 4 · 2⁻⁵² where float64 holds them: what is smaller counts as nothing.
NOISE = tl.constexpr((4 * torch.finfo(torch.float64).eps) ** 2)


# --------------------------------------------------------------------------------------------- NDCG


@triton.jit
def _gains(gain, x, row, column, valid, TOGETHER: tl.constexpr):
    """The relevance of entries, and 0 of those that take no part."""
    held = tl.load(x.pointer + entries(row, x.stride, column, TOGETHER), mask=valid, other=float("-inf"))
    at = gain.pointer + entries(row, gain.row, column.to(tl.int64) * gain.column, TOGETHER)
    own_gain = tl.load(at, mask=valid, other=0).to(tl.float32)
    return tl.where(held.to(tl.float32) == float("-inf"), 0.0, own_gain)


@triton.jit
def _scale(top):
    """The power of 2 that takes the largest relevance to about 1: sums of it neither overflow nor vanish."""
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _counted_gains(best, place, k, K: tl.constexpr):
    """What the best list's entries add to the largest DCG, from their relevance and places."""
    gain = best / tl.log2(place + 2.0)
    if K:
        gain *= tl.minimum(tl.maximum(k - place, 0.0), 1.0)
    return gain


@triton.jit(do_not_specialize=["rows"])
def _ndcg(
    rank_pointer, gain, x, best_pointer, cut, k, loss_pointer, counted_pointer, weight_pointer, rows, n,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    K: tl.constexpr = k.pointer is not None
    row, there = place_rows(rows, TOGETHER)
    own_k = row.to(tl.float32)
    if K:
        own_k = tl.load(k.pointer + row * k.stride, mask=there, other=0.0).to(tl.float32)
    own_k = wide(own_k, TOGETHER)
    if best_pointer is None:
        column = tl.arange(0, WIDTH)
        valid = inside(there, column, n, TOGETHER, FULL)
        own_gain = _gains(gain, x, row, column, valid, TOGETHER)
        top = tl.max(own_gain, axis=AXIS)
        # of a NaN, which the maximum may leave out, a negative number and an infinite one
        wrong = tl.sum(tl.where((own_gain >= 0) & (own_gain < float("inf")), 0.0, 1.0), axis=AXIS)
        best = tl.sort(own_gain * wide(_scale(top), TOGETHER), descending=True)
        place = column.to(tl.float32) if TOGETHER == 1 else column[None, :].to(tl.float32)
        ideal = tl.sum(_counted_gains(best, place, own_k, K), axis=AXIS)
    else:
        top, least = tl.load(best_pointer + row * n), tl.load(best_pointer + row * n + n - 1)
        top, least = top.to(tl.float32), least.to(tl.float32)
        wrong = tl.where(top < float("inf"), tl.where(least >= 0, 0.0, 1.0), 1.0)  # a NaN comes first
        sums = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, n, WIDTH):
            column = start + tl.arange(0, WIDTH)
            best = tl.load(best_pointer + row * n + column, mask=column < n, other=0).to(tl.float32)
            sums += _counted_gains(best * _scale(top), column.to(tl.float32), own_k, K)
        ideal = tl.sum(sums, axis=0)
    ideal = tl.where(wrong > 0, float("nan"), ideal)
    counted = ideal != 0
    scale = wide(_scale(top), TOGETHER)
    over_ideal = wide(tl.where(counted, 1 / tl.where(counted, ideal, 1.0), 0.0), TOGETHER)
    loss = ideal * 0 + 1
    for start in range(0, n, WIDTH):
        column = start + tl.arange(0, WIDTH)
        valid = inside(there, column, n, TOGETHER, FULL)
        own_gain = _gains(gain, x, row, column, valid, TOGETHER)
        at = entries(row, n, column, TOGETHER)
        weight = (own_gain * scale) * over_ideal
        tl.store(weight_pointer + at, weight, mask=valid)
        if cut.pointer is not None:
            cuts = cut.pointer + entries(row, cut.row, column.to(tl.int64) * cut.column, TOGETHER)
            weight *= tl.load(cuts, mask=valid, other=0.0).to(tl.float32)
        rank = tl.load(rank_pointer + at, mask=valid, other=1.0)
        loss -= tl.sum(tl.where(valid, weight / tl.log2(1 + rank), 0.0), axis=AXIS)
    loss = tl.where(loss < 0, 0.0, loss)
    tl.store(loss_pointer + row, loss.to(loss_pointer.dtype.element_ty), mask=there)
    tl.store(counted_pointer + row, counted, mask=there)


@triton.jit(do_not_specialize=["rows"])
def _pull_ndcg(
    rank_pointer, grad, weight_pointer, cut, drank_pointer, dcut_pointer, rows, n, TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    row, there = place_rows(rows, TOGETHER)
    own_grad = tl.load(grad.pointer + row * grad.stride, mask=there, other=0.0).to(tl.float32)
    own_grad = wide(own_grad, TOGETHER)
    for start in range(0, n, WIDTH):
        column = start + tl.arange(0, WIDTH)
        valid = inside(there, column, n, TOGETHER, FULL)
        at = entries(row, n, column, TOGETHER)
        weight = own_grad * tl.load(weight_pointer + at, mask=valid, other=0.0)
        after = 1 + tl.load(rank_pointer + at, mask=valid, other=1.0)
        log = tl.log2(after)
        if cut.pointer is not None:
            tl.store(dcut_pointer + at, (-weight / log).to(dcut_pointer.dtype.element_ty), mask=valid)
            cuts = cut.pointer + entries(row, cut.row, column.to(tl.int64) * cut.column, TOGETHER)
            weight *= tl.load(cuts, mask=valid, other=0.0).to(tl.float32)
        tl.store(drank_pointer + at, weight / (LN2 * after * log * log), mask=valid)


# --------------------------------------------------------------------------------------- correlation


@triton.jit
def _products(
    a_pointer, b_pointer, row, there, n, TOGETHER: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr
):
    """Σ a², Σ b² and Σ a b of rows."""
    sums = (row.to(tl.float32) * 0, row.to(tl.float32) * 0, row.to(tl.float32) * 0)
    for start in range(0, n, WIDTH):
        column = start + tl.arange(0, WIDTH)
        valid, at = inside(there, column, n, TOGETHER, FULL), entries(row, n, column, TOGETHER)
        a = tl.load(a_pointer + at, mask=valid, other=0.0)
        b = tl.load(b_pointer + at, mask=valid, other=0.0)
        more = total((a * a, b * b, a * b), TOGETHER)
        sums = (sums[0] + more[0], sums[1] + more[1], sums[2] + more[2])
    # what is not of rounding has a length
    size = n * 1.0
    over_a = tl.where(sums[0] <= size * size * size * NOISE, 0.0, 1 / tl.sqrt(sums[0]))
    over_b = tl.where(sums[1] == 0, 0.0, 1 / tl.sqrt(sums[1]))
    return over_a, over_b, sums[2] * over_a * over_b


@triton.jit(do_not_specialize=["rows"])
def _correlations(
    a_pointer, b_pointer, loss_pointer, counted_pointer, rows, n,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    row, there = place_rows(rows, TOGETHER)
    _, over_b, cosine = _products(a_pointer, b_pointer, row, there, n, TOGETHER, WIDTH, FULL)
    loss = tl.where(cosine > 1, 0.0, 1 - cosine)
    tl.store(loss_pointer + row, loss.to(loss_pointer.dtype.element_ty), mask=there)
    tl.store(counted_pointer + row, over_b != 0, mask=there)


@triton.jit(do_not_specialize=["rows"])
def _pull_correlations(
    a_pointer, grad, b_pointer, da_pointer, rows, n, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    row, there = place_rows(rows, TOGETHER)
    own_grad = tl.load(grad.pointer + row * grad.stride, mask=there, other=0.0).to(tl.float32)
    over_a, over_b, cosine = _products(a_pointer, b_pointer, row, there, n, TOGETHER, WIDTH, FULL)
    by_a = wide(own_grad * over_a * over_a * cosine, TOGETHER)
    by_b = wide(own_grad * over_a * over_b, TOGETHER)
    for start in range(0, n, WIDTH):
        column = start + tl.arange(0, WIDTH)
        valid, at = inside(there, column, n, TOGETHER, FULL), entries(row, n, column, TOGETHER)
        a = tl.load(a_pointer + at, mask=valid, other=0.0)
        b = tl.load(b_pointer + at, mask=valid, other=0.0)
        tl.store(da_pointer + at, a * by_a - b * by_b, mask=valid)


# -------------------------------------------------------------------------------------------- the mean


@triton.jit
def _mean(loss_pointer, counted_pointer, mean_pointer, number_pointer, lists, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sums, found = tl.zeros((WIDTH,), tl.float64), tl.zeros((WIDTH,), tl.int32)
    for start in range(0, lists, WIDTH):
        column = start + tl.arange(0, WIDTH)
        if counted_pointer is None:
            counted = (column < lists).to(tl.int32)
        else:
            at = counted_pointer + row * lists + column
            counted = tl.load(at, mask=column < lists, other=0).to(tl.int32)
        loss = tl.load(loss_pointer + row * lists + column, mask=counted > 0, other=0.0)
        sums, found = sums + loss, found + counted
    number = tl.maximum(tl.sum(found, axis=0), 1).to(tl.float64)
    store(mean_pointer + row, tl.sum(sums, axis=0) / number, row >= 0)
    tl.store(number_pointer + row, number)


KERNELS = (_ndcg, _pull_ndcg, _correlations, _pull_correlations, _mean)


# ---------------------------------------------------------------------------------------------- the host


def _serves(x: Tensor, value: Tensor | None = None) -> bool:
    """Whether the kernels take the list, and its targets: those that float32 has exactly, or nearly."""
    return sorts_rows(x) and (value is None or value.dtype != torch.float64)


def tile(n: int) -> dict[str, Any]:
    """As :func:`.ranks.tile`, of lists of any length."""
    if n <= SORTED:
        return ranks.tile(n)
    return {"TOGETHER": 1, "WIDTH": SORTED, "FULL": False, "num_warps": WARPS}


def _programs(x: Tensor, which: dict[str, Any]) -> int:
    return cdiv(x.numel() // x.shape[-1], which["TOGETHER"])


def ndcg_loss(
    rank: Tensor, relevance: Tensor, x: Tensor, cut: Tensor | None, k: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`ranking_losses.ndcg_loss`, in Triton."""
    if not _serves(rank, relevance):
        return reference.ndcg_loss(rank, relevance, x, cut, k)
    batch, n = rank.shape[:-1], rank.shape[-1]
    which, best = tile(n), None
    if n > SORTED:
        best = row_sort.descending_values(torch.where(x == -math.inf, 0.0, relevance))
    loss = rank.new_empty(batch, dtype=torch.float64)
    counted, weight = rank.new_empty(batch, dtype=torch.bool), rank.new_empty(rank.shape)
    launch(
        _ndcg, _programs(rank, which),
        rank.contiguous(), layout.matrix(relevance, rank), layout.rows(x, n), best, _cut(cut, rank),
        Rows(*((None, 0) if k is None else layout.numbers(k, batch, x.device))), loss, counted, weight,
        batch.numel(), n, **which,
    )  # fmt: skip
    return loss, counted, weight


def _cut(cut: Tensor | None, rank: Tensor) -> Matrix:
    return Matrix(None, 0, 0) if cut is None else layout.matrix(cut, rank)


def ndcg_loss_backward(
    grad: Tensor, rank: Tensor, weight: Tensor, cut: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`ranking_losses.ndcg_loss_backward`, in Triton."""
    if not _serves(rank):
        return reference.ndcg_loss_backward(grad, rank, weight, cut)
    batch, n = rank.shape[:-1], rank.shape[-1]
    which, drank = tile(n), rank.new_empty(rank.shape)
    dcut = rank.new_empty(0) if cut is None else cut.new_empty(cut.shape)
    launch(
        _pull_ndcg, _programs(rank, which),
        rank.contiguous(), Rows(*layout.numbers(grad, batch, rank.device)), weight.contiguous(),
        _cut(cut, rank), drank, dcut, batch.numel(), n, **which,
    )  # fmt: skip
    return drank, dcut


def centred_places(value: Tensor, x: Tensor) -> Tensor:
    """`ranking_losses.centred_places`, in Triton, for values that float32 has."""
    exact = value.dtype.itemsize <= 2 or value.dtype == torch.float32
    if exact and _serves(x):
        return ranks.centred_places(value, x)
    return reference.centred_places(value, x, lambda y, tau: laplace_count(y, None, tau)[0])


def correlation_loss(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`ranking_losses.correlation_loss`, in Triton."""
    if not _serves(a):
        return reference.correlation_loss(a, b)
    batch, n = a.shape[:-1], a.shape[-1]
    loss, counted = a.new_empty(batch, dtype=torch.float64), a.new_empty(batch, dtype=torch.bool)
    which = tile(n)
    launch(
        _correlations, _programs(a, which),
        a.contiguous(), b.contiguous(), loss, counted, batch.numel(), n, **which,
    )  # fmt: skip
    return loss, counted


def correlation_loss_backward(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`ranking_losses.correlation_loss_backward`, in Triton."""
    if not _serves(a):
        return reference.correlation_loss_backward(grad, a, b)
    batch, n = a.shape[:-1], a.shape[-1]
    which, da = tile(n), a.new_empty(a.shape)
    launch(
        _pull_correlations, _programs(a, which),
        a.contiguous(), Rows(*layout.numbers(grad, batch, a.device)), b.contiguous(), da, batch.numel(), n,
        **which,
    )  # fmt: skip
    return da


def counted_mean(loss: Tensor, counted: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`ranking_losses.counted_mean`, in Triton."""
    lists = loss.shape[-1]
    if not 0 < lists <= LISTS or loss.numel() == 0:
        return reference.counted_mean(loss, counted, dtype)
    batch = loss.shape[:-1]
    mean, number = loss.new_empty(batch, dtype=dtype), loss.new_empty(batch, dtype=torch.float64)
    launch(
        _mean, batch.numel(),
        loss.contiguous(), None if counted is None else counted.contiguous(), mean, number, lists,
        WIDTH=SORTED, num_warps=WARPS,
    )  # fmt: skip
    return mean, number
