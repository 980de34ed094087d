"""Top-k in magnitude: the value γ that the pooled entries share, y, and the gradients, in one launch each.

A program holds rows, or streams past one, as in :mod:`.rows`; few very long rows go to
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
from khot._kernels.triton import layout, split_magnitude
from khot._kernels.triton.arguments import Found, Norm, Problem, Threshold
from khot._kernels.triton.exact import number64
from khot._kernels.triton.exact_magnitude import find_sizes_exactly, write_sizes_exactly
from khot._kernels.triton.fast import in_two
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
from khot._kernels.triton.rows import (
    EVALUATIONS,
    at_of,
    entries,
    hold,
    numbers,
    place_rows,
    rescue,
    solver,
    write_held,
)

# ------------------------------------------------------------------------------------- forward


@triton.jit
def _find(
    x, other, k, tau, row, there, n, evaluations, digits, exponent, L: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    at = at_of(x, row, T)
    held = hold(x, at, row, there, n, T)
    own_k, k_rest = numbers(*k, row, there)
    own_tau = numbers(*tau, row, there)[0]
    power = tl.zeros((), tl.float32) + exponent[0]
    whole = (k_rest == 0) & (own_k == tl.floor(own_k))
    hi, lo, ok = find_gamma(
        held, at, there & whole, n, own_k, own_tau, power, evaluations, L.p, L.signed, L.whole, T,
        T.together == 1 and not T.streams,
    )  # fmt: skip
    return hi.to(tl.float64), lo.to(tl.float64), ok, (held, at, hi, lo, own_tau, power)


@triton.jit
def _write(out_pointer, row, ok, n, found, L: tl.constexpr, T: tl.constexpr):
    held, at, hi, lo, tau, power = found
    given = pooled_values(hi, lo, tau, power, L.p, T.together)
    if T.streams:
        write_pooled(at, out_pointer + row * n + tl.arange(0, T.width), ok, n, given, L, T)
    else:
        write_held(held, out_pointer, row, ok, n, pooled_result, given, L, T)


@triton.jit
def _solve_exactly(
    row, x, other, k, tau, found, n, digits, power, L: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """One row, which is read a chunk at a time."""
    source = (x.pointer + row * x.stride, x.pointer, 0, n)
    k, tau = number64(*k, row), number64(*tau, row)
    hi, lo = find_sizes_exactly(source, k, tau, L.p, L.signed, T.chunk)
    tl.store(found.hi + row, hi)
    tl.store(found.lo + row, lo)
    write_sizes_exactly(found.out + row * n, source, hi, lo, tau, L.p, L.signed, T.chunk)


SIZED = Problem(_find, _write, _solve_exactly)


# ------------------------------------------------------------------------------------ backward


@triton.jit
def _pull(
    at, dx_at, dtau_at, there, n, k, hi, lo, tau, grad_lo, P: tl.constexpr, SIGNED: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of rows, in the dtype of hi; and which rows have finite ones. Entries are read twice, as
    many pieces at a time: first for what γ brings to the pooled ones."""
    given = pull_given(hi, lo, tau, P, TOGETHER)
    nothing = hi.to(tl.float64) * 0
    sums = pull_sums(at, there, n, nothing, given, P, SIGNED, TOGETHER, PIECES, WIDTH)
    pull, dtau = settle_pull(sums, k, grad_lo)
    ok = there
    if hi.dtype != tl.float64:
        ok = ok & in_range(pull, dtau)
    else:
        dtau = tl.where(hi == hi, dtau, hi)
    tl.store(dtau_at, dtau, mask=ok)
    write_pull(at, dx_at, ok, n, hi, pull, given, P, SIGNED, TOGETHER, PIECES, WIDTH)
    return ok


@triton.jit(do_not_specialize=["rows"])
def pull_magnitudes(
    x, y, grad, grad_lo, k, t, tau, dx_pointer, dtau_pointer, rows, n_columns, P: tl.constexpr,
    SIGNED: tl.constexpr, FLOAT64: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradients in x and τ. FLOAT64 says that all of it takes float64."""
    row, there = place_rows(rows, T.together)
    ok = there & ~there
    if not FLOAT64:
        column = tl.arange(0, T.width)
        hi64 = tl.load(t.hi + row, mask=there, other=0.0)
        hi, rest = in_two(hi64)
        lo = rest + tl.load(t.lo + row, mask=there, other=0.0).to(tl.float32)
        own_grad_lo = numbers(*grad_lo, row, there)[0]
        own_tau = numbers(*tau, row, there)[0]
        own_k = numbers(*k, row, there)[0]
        ordinary = there & ordinary_pull(hi, own_tau)
        ok = _pull(
            (
                x.pointer + entries(row, x.stride, column, T.together),
                y.pointer + entries(row, y.stride, column, T.together),
                grad.pointer + entries(row, grad.row, column.to(tl.int64) * grad.column, T.together),
                grad.column,
            ),
            dx_pointer + entries(row, n_columns, column, T.together), dtau_pointer + row, ordinary, n_columns,
            own_k, tl.where(ordinary, hi, 1.0), lo, tl.where(ordinary, own_tau, 1.0), own_grad_lo, P, SIGNED,
            T.together, T.pieces, T.width,
        )  # fmt: skip

    rescue(
        there & ~ok, row, _pull_exactly,
        (x, y, grad, grad_lo, k, t, tau, dx_pointer, dtau_pointer, rows, n_columns, P, SIGNED, T), T.together,
    )  # fmt: skip


@triton.jit
def _pull_exactly(
    row, x, y, grad, grad_lo, k, t, tau, dx_pointer, dtau_pointer, rows, n, P: tl.constexpr,
    SIGNED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """One row in float64."""
    place = tl.arange(0, T.chunk)
    _pull(
        (
            x.pointer + row * x.stride + place, y.pointer + row * y.stride + place,
            grad.pointer + row * grad.row + place.to(tl.int64) * grad.column, grad.column,
        ),
        dx_pointer + row * n + place, dtau_pointer + row, row < rows, n, number64(*k, row),
        tl.load(t.hi + row), tl.load(t.lo + row), number64(*tau, row), number64(*grad_lo, row), P, SIGNED, 1,
        1, T.chunk,
    )  # fmt: skip


KERNELS = (pull_magnitudes,)


@functools.lru_cache(maxsize=1024)
def _variants(
    rows: int, n: int, p: float, signed: bool, fine: bool
) -> tuple[Variant, Variant, int, tuple[float, float]]:
    """What is launched forward and backward, in how many programs, and the exponent of z."""
    tile = layout.Tile(1, 1, 128, 4) if fine else layout.tile(rows, n)
    start, programs = solver(SIZED, Norm(float(p), signed, layout.whole_of_sizes(p)), tile, rows, n)
    again = layout.constant(tile, n)._replace(pieces=min(tile.pieces, 4), full=False, streams=False)
    puller = variant(
        pull_magnitudes, P=float(p), SIGNED=signed, FLOAT64=fine, T=again, num_warps=tile.warps,
        **layout.registers(),
    )  # fmt: skip
    return start, puller, programs, layout.power(cdfs.Power(p))


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
    goal, tau_row = layout.values(k, batch, s.device), layout.values(tau, batch, s.device)
    if layout.splits(rows, n) and not fine:
        t = Threshold(hi, lo)
        split_magnitude.soft_topk_magnitude(source, goal, tau_row, y, t, rows, n, p, signed)
        return y, hi, lo
    start, _, programs, power = _variants(rows, n, p, signed, fine)
    found = Found(y, hi, lo)
    start(programs, source, None, goal, tau_row, found, rows, n, EVALUATIONS, None, power)
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
    t = Threshold(hi.contiguous(), lo.contiguous())
    if layout.splits(rows, n) and not fine:
        split_magnitude.soft_topk_magnitude_backward(
            source, results, incoming, rest, goal, t, tau_row, (ds, dtau), rows, n, p, signed
        )
        return ds, dtau
    _, puller, programs, _ = _variants(rows, n, p, signed, fine)
    puller(programs, source, results, incoming, rest, goal, t, tau_row, ds, dtau, rows, n)
    return ds, dtau
