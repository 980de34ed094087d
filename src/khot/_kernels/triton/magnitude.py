"""Top-k in magnitude: the value γ that the pooled entries share, y, and the gradients, in one launch each.

A program holds rows, or streams past one, as in :mod:`.resident`; few very long rows go to
:mod:`.split_magnitude`. It finds γ in float32 (:mod:`.threshold`) as the threshold of a soft count
(:mod:`.pooled`). Float64 entries, and the rows for which float32 does not suffice, are solved in float64
(:mod:`.exact_magnitude`). The formulas are the reference's (`_kernels.reference.magnitude`).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import magnitude as reference
from khot._kernels.triton import layout, native, split_magnitude
from khot._kernels.triton.exact import number64
from khot._kernels.triton.exact_magnitude import find_sizes_exactly, write_sizes_exactly
from khot._kernels.triton.fast import split
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.pooled_rows import (
    find_gamma,
    in_range,
    ordinary_pull,
    pooled_result,
    pooled_values,
    pull_given,
    pull_sums,
    settle_pull,
    write_pooled,
    write_pull,
)
from khot._kernels.triton.resident import EVALUATIONS, entries, inside, load_rows, numbers, place_rows, rescue
from khot._kernels.triton.sizes import cdiv

# ------------------------------------------------------------------------------------- forward


@triton.jit(do_not_specialize=["rows", "evaluations"])
def solve_magnitudes(
    x_pointer, x_stride, k_pointer, k_stride, k_high, k_low, tau_pointer, tau_stride, tau_high, tau_low,
    out_pointer, hi_pointer, lo_pointer, rows, n_columns, evaluations, power_high,
    P: tl.constexpr, SIGNED: tl.constexpr, FINE: tl.constexpr, WHOLE: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
    STREAM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`TOGETHER` rows of at most `PIECES`·`WIDTH` entries each, or one of any length that streams past. Where
    entries are SIGNED they stand for their size. FINE says that all of it takes float64."""
    row, there = place_rows(rows, TOGETHER)
    ok = there & ~there
    if not FINE:
        column = tl.arange(0, WIDTH)
        at = x_pointer + entries(row, x_stride, column, TOGETHER)
        x = ()
        if not STREAM:
            x = load_rows(at, there, n_columns, TOGETHER, PIECES, WIDTH, EXACT)
        k, k_rest = numbers(k_pointer, k_stride, k_high, k_low, row, there)
        tau = numbers(tau_pointer, tau_stride, tau_high, tau_low, row, there)[0]
        power = tl.zeros((), tl.float32) + power_high
        whole = (k_rest == 0) & (k == tl.floor(k))
        hi, lo, ok = find_gamma(
            x, at, there & whole, n_columns, k, tau, power, evaluations,
            P, SIGNED, WHOLE, TOGETHER, PIECES, WIDTH, STREAM, TOGETHER == 1 and not STREAM,
        )  # fmt: skip
        tl.store(hi_pointer + row, hi.to(tl.float64), mask=ok)
        tl.store(lo_pointer + row, lo.to(tl.float64), mask=ok)
        given = pooled_values(hi, lo, tau, power, P, TOGETHER)
        to = out_pointer + entries(row, n_columns, column, TOGETHER)
        if STREAM:
            write_pooled(at, to, ok, n_columns, given, P, WHOLE, PIECES, WIDTH)
        else:
            for i in tl.static_range(PIECES):
                valid = inside(ok, column + i * WIDTH, n_columns, TOGETHER, EXACT)
                y = pooled_result(x[i], given, P, WHOLE).to(out_pointer.dtype.element_ty)
                tl.store(to + i * WIDTH, y, mask=valid)

    rescue(
        there & ~ok, row, _solve_exactly,
        (
            x_pointer, x_stride, (k_pointer, k_stride, k_high, k_low),
            (tau_pointer, tau_stride, tau_high, tau_low), out_pointer, hi_pointer, lo_pointer, n_columns,
            P, SIGNED, CHUNK,
        ),
        TOGETHER,
    )  # fmt: skip


@triton.jit
def _solve_exactly(
    row, x_pointer, x_stride, k, tau, out_pointer, hi_pointer, lo_pointer, n,
    P: tl.constexpr, SIGNED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row, which is read a chunk at a time."""
    source = (x_pointer + row * x_stride, x_pointer, 0, n)
    k, tau = number64(*k, row), number64(*tau, row)
    hi, lo = find_sizes_exactly(source, k, tau, P, SIGNED, WIDTH)
    tl.store(hi_pointer + row, hi)
    tl.store(lo_pointer + row, lo)
    write_sizes_exactly(out_pointer + row * n, source, hi, lo, tau, P, SIGNED, WIDTH)


# ------------------------------------------------------------------------------------ backward


@triton.jit
def _pull(
    x_at, y_at, grad_at, grad_column, dx_at, dtau_at, there, n, k, hi, lo, tau, grad_lo,
    P: tl.constexpr, SIGNED: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of rows, in the dtype of hi; and which rows have finite ones. Entries are read twice, as
    many pieces at a time: first for what γ brings to the pooled ones."""
    given = pull_given(hi, lo, tau, P, TOGETHER)
    nothing = hi.to(tl.float64) * 0
    sums = pull_sums(
        x_at, y_at, grad_at, grad_column, there, n, nothing, given, P, SIGNED, TOGETHER, PIECES, WIDTH
    )
    pull, dtau = settle_pull(sums, k, grad_lo)
    ok = there
    if hi.dtype != tl.float64:
        ok = ok & in_range(pull, dtau)
    else:
        dtau = tl.where(hi == hi, dtau, hi)
    tl.store(dtau_at, dtau, mask=ok)
    write_pull(
        x_at, y_at, grad_at, grad_column, dx_at, ok, n, hi, pull, given, P, SIGNED, TOGETHER, PIECES, WIDTH
    )
    return ok


@triton.jit(do_not_specialize=["rows"])
def pull_magnitudes(
    x_pointer, x_stride, y_pointer, y_stride, grad_pointer, grad_row, grad_column,
    grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low, k_pointer, k_stride, k_high, k_low,
    hi_pointer, lo_pointer, tau_pointer, tau_stride, tau_high, tau_low, dx_pointer, dtau_pointer,
    rows, n_columns,
    P: tl.constexpr, SIGNED: tl.constexpr, FINE: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The gradients in x and τ. FINE is as for :func:`solve_magnitudes`."""
    row, there = place_rows(rows, TOGETHER)
    ok = there & ~there
    if not FINE:
        column = tl.arange(0, WIDTH)
        hi64 = tl.load(hi_pointer + row, mask=there, other=0.0)
        hi, rest = split(hi64)
        lo = rest + tl.load(lo_pointer + row, mask=there, other=0.0).to(tl.float32)
        grad_lo = numbers(grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low, row, there)[0]
        tau = numbers(tau_pointer, tau_stride, tau_high, tau_low, row, there)[0]
        k = numbers(k_pointer, k_stride, k_high, k_low, row, there)[0]
        ordinary = there & ordinary_pull(hi, tau)
        ok = _pull(
            x_pointer + entries(row, x_stride, column, TOGETHER),
            y_pointer + entries(row, y_stride, column, TOGETHER),
            grad_pointer + entries(row, grad_row, column.to(tl.int64) * grad_column, TOGETHER), grad_column,
            dx_pointer + entries(row, n_columns, column, TOGETHER), dtau_pointer + row,
            ordinary, n_columns, k, tl.where(ordinary, hi, 1.0), lo, tl.where(ordinary, tau, 1.0), grad_lo,
            P, SIGNED, TOGETHER, PIECES, WIDTH,
        )  # fmt: skip

    rescue(
        there & ~ok, row, _pull_exactly,
        (
            x_pointer, x_stride, y_pointer, y_stride, grad_pointer, grad_row, grad_column,
            (grad_lo_pointer, grad_lo_stride, grad_lo_high, grad_lo_low),
            (k_pointer, k_stride, k_high, k_low), hi_pointer, lo_pointer,
            (tau_pointer, tau_stride, tau_high, tau_low), dx_pointer, dtau_pointer, rows, n_columns,
            P, SIGNED, CHUNK,
        ),
        TOGETHER,
    )  # fmt: skip


@triton.jit
def _pull_exactly(
    row, x_pointer, x_stride, y_pointer, y_stride, grad_pointer, grad_row, grad_column, grad_lo, k,
    hi_pointer, lo_pointer, tau, dx_pointer, dtau_pointer, rows, n,
    P: tl.constexpr, SIGNED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row in float64."""
    place = tl.arange(0, WIDTH)
    _pull(
        x_pointer + row * x_stride + place, y_pointer + row * y_stride + place,
        grad_pointer + row * grad_row + place.to(tl.int64) * grad_column, grad_column,
        dx_pointer + row * n + place, dtau_pointer + row, row < rows, n,
        number64(*k, row), tl.load(hi_pointer + row), tl.load(lo_pointer + row), number64(*tau, row),
        number64(*grad_lo, row), P, SIGNED, 1, 1, WIDTH,
    )  # fmt: skip


KERNELS = (solve_magnitudes, pull_magnitudes)
_NAMES = "sizes", "soft_topk_magnitude"  # of plain calls, without and with signs


@functools.lru_cache(maxsize=1024)
def _variants(rows: int, n: int, p: float, signed: bool, fine: bool) -> tuple[Variant, Variant, int, float]:
    """What is launched forward and backward, in how many programs, and the exponent of z."""
    tile = layout.Tile(1, 1, 128, 4) if fine else layout.tile(rows, n)
    power, _ = layout.power(cdfs.Power(p))
    constants = {
        "P": float(p), "SIGNED": signed, "FINE": fine, "TOGETHER": tile.together, "WIDTH": tile.width,
        "CHUNK": layout.RESCUE * tile.warps, "num_warps": tile.warps, **layout.registers(),
    }  # fmt: skip
    solver = variant(
        solve_magnitudes, WHOLE=layout.whole_of_sizes(p), PIECES=tile.pieces,
        EXACT=n == tile.pieces * tile.width, STREAM=tile.streams, **constants,
    )  # fmt: skip
    puller = variant(pull_magnitudes, PIECES=min(tile.pieces, 4), **constants)
    return solver, puller, cdiv(rows, tile.together), power


def soft_topk_magnitude(
    s: Tensor, k: Tensor, tau: Tensor, p: float, signed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`magnitude.soft_topk_magnitude`, in Triton."""
    if s.numel() == 0 or p > 2:  # the kernels solve for an entry by an equation that is convex for p ≤ 2
        return reference.soft_topk_magnitude(s, k, tau, p, signed)
    batch, n = s.shape[:-1], s.shape[-1]
    y, hi = s.new_empty(s.shape), s.new_empty(batch, dtype=torch.float64)
    lo = torch.empty_like(hi)
    rows, fine, source = hi.numel(), s.dtype == torch.float64, layout.rows(s, n)
    given = (source, layout.values(k, batch, s.device), layout.values(tau, batch, s.device), y, hi, lo)
    if layout.splits(rows, n) and not fine:
        split_magnitude.soft_topk_magnitude(*given, rows, n, p, signed)
        return y, hi, lo
    solver, _, programs, power = _variants(rows, n, p, signed, fine)
    arguments = (*source, *given[1], *given[2], y, hi, lo, rows, n, EVALUATIONS, power)
    solver(programs, *arguments)
    native.prepare(_NAMES[signed], source[0], solver, programs, arguments, p)
    return y, hi, lo


def soft_topk_magnitude_backward(
    grad: Tensor,
    grad_lo: Tensor,
    s: Tensor,
    y: Tensor,
    k: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    p: float,
    signed: bool,
) -> tuple[Tensor, Tensor]:
    """`magnitude.soft_topk_magnitude_backward`, in Triton."""
    if s.numel() == 0 or p > 2:
        return reference.soft_topk_magnitude_backward(grad, grad_lo, s, y, k, hi, lo, tau, p, signed)
    batch, n = s.shape[:-1], s.shape[-1]
    ds, dtau = s.new_empty(s.shape), hi.new_empty(batch)
    rows, fine, source = dtau.numel(), s.dtype == torch.float64, layout.rows(s, n)
    results, incoming = layout.rows(y, n), layout.matrix(grad, s)
    rest = layout.values(grad_lo, batch, s.device)
    goal, tau_row = layout.values(k, batch, s.device), layout.values(tau, batch, s.device)
    t = hi.contiguous(), lo.contiguous()
    if layout.splits(rows, n) and not fine:
        split_magnitude.soft_topk_magnitude_backward(
            source, results, incoming, rest, goal, t, tau_row, (ds, dtau), rows, n, p, signed
        )
        return ds, dtau
    _, puller, programs, _ = _variants(rows, n, p, signed, fine)
    arguments = (*source, *results, *incoming, *rest, *goal, *t, *tau_row, ds, dtau, rows, n)
    puller(programs, *arguments)
    if rest.pointer is None and rest.high == 0:
        native.prepare(_NAMES[signed], source[0], puller, programs, arguments, p, backward=True)
    return ds, dtau
