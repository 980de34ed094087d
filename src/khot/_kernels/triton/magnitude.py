"""Top-k in magnitude: the value γ that the pooled entries share, y, and the gradients, in one launch each.

A program holds rows, or streams past one, as in :mod:`.rows` and :mod:`.pull`. It finds γ in float32
(:mod:`.threshold`) as the threshold of a soft count (:mod:`.pooled`). Float64 entries, and the rows for which
float32 does not suffice, are solved in float64 (:mod:`.float64_magnitude`). Few very long rows, which many
programs share, take the first three launches of :mod:`.split`, and one more that writes y. The formulas are
the reference's (`_kernels.reference.magnitude`).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import magnitude as reference
from khot._kernels.triton import layout, split
from khot._kernels.triton.arguments import (
    Found,
    Norm,
    Pairs,
    Problem,
    Pulled,
    Puller,
    Rows,
    Threshold,
    Tile,
    Values,
)
from khot._kernels.triton.fast import plus, store, total, wide
from khot._kernels.triton.float64 import number64
from khot._kernels.triton.float64_magnitude import find_sizes_in_float64, write_sizes_in_float64
from khot._kernels.triton.functions import HUGE, extent, place_last
from khot._kernels.triton.launch import Variant, launch
from khot._kernels.triton.pooled import temperature
from khot._kernels.triton.pooled_rows import find_gamma, pooled_result, pooled_values, write_pooled
from khot._kernels.triton.pull import in_float32, places, puller, share
from khot._kernels.triton.rows import EVALUATIONS, at_of, hold, inside, numbers, solver, write_held
from khot._kernels.triton.split import DONE, STATE, STATUS

# ------------------------------------------------------------------------------------- forward


@triton.jit
def _find(
    x, other, k, tau, row, there, n, evaluations, digits, exponent, L: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    at = at_of(x, row, T)
    held = hold(x, at, row, there, n, T)
    own_k, k_low = numbers(*k, row, there)
    own_tau = numbers(*tau, row, there)[0]
    power = tl.zeros((), tl.float32) + exponent[0]
    whole = (k_low == 0) & (own_k == tl.floor(own_k))
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
def _solve_in_float64(
    row, x, other, k, tau, found, n, digits, power, L: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """One row, which is read a chunk at a time."""
    source = (x.pointer + row * x.stride, x.pointer, 0, n)
    k, tau = number64(*k, row), number64(*tau, row)
    hi, lo = find_sizes_in_float64(source, k, tau, L.p, L.signed, T.chunk)
    tl.store(found.hi + row, hi)
    tl.store(found.lo + row, lo)
    write_sizes_in_float64(found.out + row * n, source, hi, lo, tau, L.p, L.signed, T.chunk)


SIZED = Problem(_find, _write, _solve_in_float64)


# ------------------------------------------------------------------------------------ backward


@triton.jit
def _rates(x, y, given, L: tl.constexpr):
    """Which entries are selected on their own; dv/ds and −dv/dτ there; r = dY/ds of pooled ones, and r w.

    Given are hi, lo, 1/τγ^(p−1), γ/τγ^(p−1), γ^(p−1) and τ, in the dtype of the arithmetic.
    """
    P: tl.constexpr = L.p
    hi, lo, inverse, lift, heat, tau = given
    s = tl.abs(x) if L.signed else x
    z = ((s - hi) - lo) * inverse
    own = z >= 1
    if hi.dtype == tl.float64:  # of other rows γ is not 0, and nothing is infinite
        own = ((z >= tl.where(inverse == 0, 0.0, 1.0)) & (s >= 0)) | (s == float("inf"))
    pooled = (z > 0) & ~own
    moves = own & (s < float("inf"))
    if P == 2:
        rate = tl.where(pooled, lift, 0.0)
        slope = 1 / (1 + tau)
        slope = tl.where(moves, slope, 0.0)
        fall = slope * slope * tl.where(moves, s, 0.0)
    else:
        y = tl.abs(y)
        moves = moves & (y > 0)
        log_y = tl.log2(tl.where(moves, y, 1.0))
        slope = tl.where(moves, 1 / (1 + tau * (P - 1) * tl.exp2((P - 2) * log_y)), 0.0)
        fall = slope * tl.exp2((P - 1) * log_y)
        e: tl.constexpr = 1 / (P - 1)
        rate = e * lift * tl.exp2((e - 1) * tl.log2(tl.where(pooled, z, 1.0)))
        rate = tl.where(pooled, rate, 0.0)
    return own, slope, fall, rate, rate * tl.where(pooled, z, 0.0) * heat


@triton.jit
def _entry(at, grad, offset, valid, TYPE: tl.constexpr, L: tl.constexpr):
    """x; y where it is used; and the incoming gradient, in the direction of |x|."""
    far = tl.cast(offset, tl.int64)
    x = tl.load(at[0] + offset, mask=valid, other=0.0 if L.signed else float("-inf")).to(TYPE)
    y = x
    if L.p != 2:
        y = tl.load(at[1] + far * at[2], mask=valid, other=0.0).to(TYPE)
    v = tl.load(grad[0] + far * grad[1], mask=valid, other=0.0).to(TYPE)
    return x, y, tl.where(x < 0, -v, v)


@triton.jit
def _given_of(hi, lo, tau, P: tl.constexpr, TOGETHER: tl.constexpr):
    """What :func:`_rates` needs of rows, in the dtype of hi."""
    none = tl.abs(hi) >= HUGE if hi.dtype == tl.float64 else hi != hi
    gamma = tl.where(none, 0.0, hi + lo)
    heat = temperature(gamma, tau, P)[0]
    inverse = tl.where(heat > 0, 1 / heat, 0.0)
    return (
        wide(hi, TOGETHER), wide(lo, TOGETHER), wide(inverse, TOGETHER), wide(gamma * inverse, TOGETHER),
        wide(heat / tau, TOGETHER), wide(tau, TOGETHER),
    )  # fmt: skip


@triton.jit
def _prepare(solved, power, row, there, L: tl.constexpr, T: tl.constexpr):
    """hi; which rows are tried in float32; and what :func:`_rates` needs of them."""
    hi, lo, tau = in_float32(solved, row, there)
    ordinary = there & (hi > 1e-12) & (hi < 1e12) & (tau > 1e-15) & (tau < 1e15)
    hi, tau = tl.where(ordinary, hi, 1.0), tl.where(ordinary, tau, 1.0)
    return hi, ordinary, _given_of(hi, lo, tau, L.p, T.together)


@triton.jit
def _sums(at, grad, there, n, given, L: tl.constexpr, T: tl.constexpr):
    """How many entries are selected on their own; Σr and Σr z γ^(p−1) of the pooled ones; Σr v; and what τ
    takes from y by itself: in float64."""
    PIECES: tl.constexpr = T.pieces
    TYPE: tl.constexpr = given[0].dtype
    column = tl.arange(0, T.width)
    nothing = there.to(tl.float64) * 0
    sums = (nothing, nothing, nothing, nothing, nothing)
    for start in range(0, n, PIECES * T.width):
        held = ()
        for i in tl.static_range(PIECES):
            offset = start + i * T.width
            valid = inside(there, column + offset, n, T.together, False)
            x, y, v = _entry(at, grad, offset, valid, TYPE, L)
            own, _slope, fall, rate, turn = _rates(x, y, given, L)
            one = tl.where(valid & own, 1.0, 0.0).to(TYPE)
            held = plus(held, (one, rate, turn, rate * v, v * (fall + turn)))
        sums = plus(sums, total(held, T.together))
    return sums, ()


@triton.jit
def _pull_of(sums, k, grad_lo):
    """What γ brings to the pooled entries, and dL/dτ."""
    alone, mass, moment, through, falls = sums
    live = mass > 0
    pull = tl.where(live, (grad_lo - through) / tl.where(live, k - alone + mass, 1.0), 0.0)
    return pull, -falls - pull * moment


@triton.jit
def _settle(sums, solved, grad_lo, row, there, threshold, L: tl.constexpr, ASKED: tl.constexpr):
    pull, dtau = _pull_of(
        sums, numbers(*solved.goal, row, there)[0], numbers(*grad_lo, row, there)[0]
    )  # fmt: skip
    return pull, dtau, there & (tl.abs(dtau) < 1e30) & (tl.abs(pull) < 1e30)


@triton.jit
def _write_pull(at, grad, to, ok, n, given, pull, threshold, kept, L: tl.constexpr, T: tl.constexpr):
    """The gradients of entries, which are read again, as many pieces at a time."""
    PIECES: tl.constexpr = T.pieces
    hi = given[0]
    column = tl.arange(0, T.width)
    share = wide(pull.to(hi.dtype), T.together)
    for start in range(0, n, PIECES * T.width):
        for i in tl.static_range(PIECES):
            offset = start + i * T.width
            valid = inside(ok, column + offset, n, T.together, False)
            x, y, v = _entry(at, grad, offset, valid, hi.dtype, L)
            _own, slope, _fall, rate, _turn = _rates(x, y, given, L)
            dx = slope * v + rate * (v + share)
            dx = tl.where(x < 0, -dx, dx)
            if hi.dtype == tl.float64:
                dx = tl.where(hi == hi, dx, hi)
            store(to[0] + offset, dx, valid)


@triton.jit
def _pull_in_float64(row, grad, grad_lo, pairs, solved, to, n, power, L: tl.constexpr, T: tl.constexpr):
    """One row in float64."""
    WIDTH: tl.constexpr = T.chunk
    CHUNK: tl.constexpr = Tile(1, 1, WIDTH, False, True, WIDTH)
    column, there = tl.arange(0, WIDTH), row >= 0
    at, grad_at = places(pairs, grad, row, column, 1)
    hi = tl.load(solved.t.hi + row)
    given = _given_of(hi, tl.load(solved.t.lo + row), number64(*solved.tau, row), L.p, 1)
    sums, _ = _sums(at, grad_at, there, n, given, L, CHUNK)
    pull, dtau = _pull_of(sums, number64(*solved.goal, row), number64(*grad_lo, row))
    tl.store(to.dtau + row, tl.where(hi == hi, dtau, hi))
    _write_pull(at, grad_at, (to.dx + row * n + column,), there, n, given, pull, hi, (), L, CHUNK)


PULL_SIZED = Puller(_prepare, _sums, _settle, _write_pull, _pull_in_float64, left=5)


# ----------------------------------------------------------------------------- rows of many programs


@triton.jit(do_not_specialize=["parts", "length"])
def _write_sizes(
    x, tau, out_pointer, t, state_pointer, n_columns, length, parts, power_high, L: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    row, part = place_last(parts)
    hi64, lo64 = tl.load(t.hi + row), tl.load(t.lo + row)
    tau64 = number64(*tau, row)
    start, mine = extent(part, n_columns, length)
    x_at, to = x.pointer + row * x.stride + start, out_pointer + row * n_columns + start
    done = tl.load(state_pointer + row * STATE + STATUS) == DONE
    if done:
        power = tl.zeros((), tl.float32) + power_high
        given = pooled_values(hi64.to(tl.float32), lo64.to(tl.float32), tau64.to(tl.float32), power, L.p, 1)
        column = tl.arange(0, T.width)
        write_pooled(x_at + column, to + column, done, mine, given, L, T)
    else:
        write_sizes_in_float64(to, (x_at, x_at, 0, mine), hi64, lo64, tau64, L.p, L.signed, T.chunk)


KERNELS = (_write_sizes,)


# ------------------------------------------------------------------------------------ on the host


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
    if not fine and layout.splits(rows, n):
        _solve_shared(source, goal, tau_row, y, Threshold(hi, lo), _norm(p, signed))
        return y, hi, lo
    start, _, programs = _variants(rows, n, p, signed, fine)
    found, power = Found(y, hi, lo), layout.power(cdfs.Power(p))
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
    rows, fine, pairs = dtau.numel(), s.dtype == torch.float64, Pairs(layout.rows(s, n), layout.matrix(y, s))
    solved, lo_row = layout.solved(hi, lo, tau, k), layout.values(grad_lo, batch, s.device)
    given = layout.matrix(grad, s), lo_row, pairs, solved
    if not fine and layout.splits(rows, n):
        to = Pulled(ds, torch.empty_like(dtau), dtau, None)
        share(PULL_SIZED, _norm(p, signed), *given, to, None, wants_lo=True)
        return ds, dtau
    _, start, programs = _variants(rows, n, p, signed, fine)
    start(programs, *given, Pulled(ds, None, dtau, None), rows, n, None)
    return ds, dtau


@functools.lru_cache(maxsize=1024)
def _variants(rows: int, n: int, p: float, signed: bool, fine: bool) -> tuple[Variant, Variant, int]:
    """What is launched forward and backward, and in how many programs."""
    tile, law = layout.Tile(1, 1, 128, 4) if fine else layout.tile(rows, n), _norm(p, signed)
    start, programs = solver(SIZED, law, tile, rows, n)
    again = layout.constant(tile, n)._replace(pieces=min(tile.pieces, 4), full=False, streams=False)
    return start, puller(PULL_SIZED, law, again, tile.warps, wants_lo=True), programs


def _norm(p: float, signed: bool) -> Norm:
    return Norm(float(p), signed, layout.whole_of_sizes(p))


def _solve_shared(source: Rows, k: Values, tau: Values, out: Tensor, t: Threshold, norm: Norm) -> None:
    """Fill out and t of rows that many programs share."""
    (rows, n), F = source.pointer.shape, cdfs.Power(norm.p)
    law, power = layout.law(F)._replace(whole=norm.whole), layout.power(F)
    scratch, cut = split.solve(
        source, k, tau, t, law, power, fine=False, POOLED=norm.p, SIGNED=norm.signed
    )  # fmt: skip
    launch(
        _write_sizes, rows * cut.parts,
        source, tau, out, t, scratch.state, n, cut.length, cut.parts, power[0],
        L=norm, T=layout.part_tile(cut), num_warps=cut.warps, **layout.registers(),
    )  # fmt: skip
