"""Soft permutations of short rows and their gradients, in float32: one launch each way.

A program takes some levels of a row: it finds their thresholds at once, each as a soft top-k of the row
(:mod:`.threshold`), with the digits of float64 (:mod:`.polish`), as a share is a difference of two. Then it
writes what entries have of the places between neighbouring thresholds. The first of its levels is the last
one of the program before, since a place lies between two; the first and the last place of a row end at
infinity, for which no level is needed. Thresholds go through memory, where the backward
pass needs them anyway: a program would have to shuffle them between its threads otherwise. The few that
float32 does not find are searched in float64 there.

The backward pass has a program for each row, which goes through the levels: what a threshold passes on to the
entries is Σ f·v/Σ f, a mean of what arrives there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._core.dispatch import OPERATORS
from khot._kernels.reference import permutation as reference
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Threshold, Tile
from khot._kernels.triton.fast import LOG2E, any_row, joined, plus, reciprocal, total
from khot._kernels.triton.float64 import find_in_float64, number64
from khot._kernels.triton.float64_sums import BY_COUNT
from khot._kernels.triton.functions import HUGE, LAPLACE, LOGISTIC, NORMAL, UNIFORM, log1p, only_powers
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.polish import polish
from khot._kernels.triton.ranks import lack
from khot._kernels.triton.rows import EVALUATIONS, numbers
from khot._kernels.triton.sizes import cdiv, next_power_of_2
from khot._kernels.triton.terms import PHI, density, normal_tail, unit, value
from khot._kernels.triton.threshold import find

NARROW = 16  # entries to which rows are padded at least
HELD, HELD_BACK = 4096, 2048  # entries times levels that a program holds at a time, forward and backward
SHARE = 256  # and a warp
SHARE_OF_EXPONENTIALS = 512  # the same forward, with CDFs whose float64 takes few registers
LEVELS = 4  # at least
MOST = tl.constexpr(1e37)  # of 1/τ in float32, where two scores are equal or infinitely far apart


# --------------------------------------------------------------------------------------- the shares


@triton.jit
def _load(at, column, n, PIECES: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr):
    """The entries of the row, once for each level, in pieces."""
    x = ()
    for i in tl.static_range(PIECES):
        if FULL:
            piece = tl.load(at + i * WIDTH)
        else:
            piece = tl.load(at + i * WIDTH, mask=column + i * WIDTH < n, other=float("-inf"))
        x = x + (piece.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return x


@triton.jit
def _kinds(x):
    """1 for a finite entry, for one of +inf and for a NaN."""
    size = tl.abs(x)
    finite = tl.where(size < float("inf"), 1.0, 0.0)
    return finite, tl.where(x == float("inf"), 1.0, 0.0), tl.where(x == x, 0.0, 1.0)


@triton.jit
def _temperature(tau, row):
    """1/τ in float64, and in float32 within its range; NaN in place of 0 if τ is none."""
    own_tau = number64(*tau, row)
    poison = tl.where(own_tau > 0, tl.where(own_tau < float("inf"), 0.0, float("nan")), float("nan"))
    inverse = 1 / own_tau
    return inverse, tl.minimum(inverse, MOST).to(tl.float32), poison.to(tl.float32)


@triton.jit
def _threshold(hi_at, lo_at, mask, inverse, CDF: tl.constexpr):
    """A threshold, 0 if it is infinite; as a number of float32 and what is left of it, in units of v
    (:mod:`.terms`), which is ±inf then; and whether it is."""
    hi, lo = tl.load(hi_at, mask=mask, other=0.0), tl.load(lo_at, mask=mask, other=0.0)
    infinite = tl.abs(hi) == HUGE
    high = tl.where(tl.abs(hi) < MOST, hi, 0.0).to(tl.float32)
    shift = (((hi - high.to(tl.float64)) + lo) * (inverse * unit(CDF))).to(tl.float32)
    end = tl.where(hi > 0, float("inf"), float("-inf"))
    return hi, lo, high, tl.where(infinite, end, shift), infinite


@triton.jit
def _between(x, given, L: tl.constexpr):
    """F at a threshold less F at the one above it, where entries are finite: by the distance between the two,
    so that small shares keep their digits."""
    hi, shift, hi_before, shift_before, gap, scale, power = given
    a, b = (x - hi_before) * scale - shift_before, (x - hi) * scale - shift
    if L.cdf == LOGISTIC:
        return reciprocal(1.0 + tl.exp2(a)) * reciprocal(1.0 + tl.exp2(-b)) * lack(gap)
    elif L.cdf == LAPLACE:
        one_side = tl.exp2(tl.where(b <= 0, b, -tl.maximum(a, 0.0))) * lack(gap)
        return 0.5 * tl.where(
            (a < 0) & (b > 0), lack(tl.maximum(-a, 0.0)) + lack(tl.maximum(b, 0.0)), one_side
        )
    elif L.cdf == NORMAL:
        ratio_a, e_a = normal_tail(a)
        ratio_b, e_b = normal_tail(b)
        tail_a, tail_b = ratio_a * e_a, ratio_b * e_b
        far = tl.where((a < 0) & (b > 0), 1 - tail_a - tail_b, tl.abs(tail_a - tail_b))
        # the integral over a short gap, by the even derivatives of the density in its middle
        middle = 0.5 * (a + b)
        m, d = middle * (1 / unit(NORMAL)), gap * (1 / unit(NORMAL))
        m, dd = m * m, d * d
        near = 1 + dd * ((m - 1) * (1 / 24) + dd * ((m * m - 6 * m + 3) * (1 / 1920)))
        near *= PHI * d * tl.exp2(-middle * middle)
        return tl.where(dd * tl.maximum(m, 1.0) < 0.12, near, far)
    elif L.cdf == UNIFORM:
        ends = tl.minimum(tl.maximum(b, 0.0), 1.0) - tl.minimum(tl.maximum(a, 0.0), 1.0)
        return tl.where((a >= 0) & (b <= 1), gap, ends)
    else:
        only_powers(L.cdf)
        top = tl.minimum(tl.maximum(b, 1e-30), 1.0)
        step = tl.where(b > 1, 1 - a, gap) / top
        fall = power * log1p(-tl.minimum(tl.maximum(step, 0.0), 1.0))
        return value(x, hi, scale, shift, power, L.cdf, L.whole) * tl.where(a > 0, lack(-fall * LOG2E), 1.0)


@triton.jit(do_not_specialize=["groups", "evaluations"])
def _permute(x, tau, out_pointer, t, n, groups, evaluations, exponent, L: tl.constexpr, T: tl.constexpr):
    LEVELS: tl.constexpr = T.together
    PIECES: tl.constexpr = T.pieces
    WIDTH: tl.constexpr = T.width
    row, group = tl.program_id(0).to(tl.int64) // groups, tl.program_id(0) % groups
    slot, column = tl.arange(0, T.together), tl.arange(0, T.width)[None, :]
    level = 1 + group * (T.together - 1) + slot
    nothing = level.to(tl.float32) * 0
    row_at = x.pointer + row * x.stride
    at = row_at + (slot * 0)[:, None] + column
    held = _load(at, column, n, T.pieces, T.width, T.full)
    odd = tl.zeros((LEVELS, WIDTH), tl.float32)
    for i in tl.static_range(PIECES):
        odd += held[i] * 0 if T.full else tl.where(column + i * T.width < n, held[i] * 0, 0.0)
    last, first, strange = nothing + n.to(tl.float32), nothing, nothing
    if any_row(~(tl.sum(odd, axis=1) == 0), T.together):  # of NaN if an entry is not finite
        kinds, kept = (), ()
        for i in tl.static_range(PIECES):
            kinds = plus(kinds, _kinds(held[i]))
            # an entry of +inf takes a place of its own, and no part in the others
            kept = kept + (tl.where(held[i] == float("inf"), float("-inf"), held[i]),)  # type: ignore[assignment]  # noqa: RUF005
        held = kept
        finite, first, strange = total(kinds, T.together)
        last = first + finite

    origin = tl.load(row_at).to(tl.float32)
    origin = tl.where(tl.abs(origin) < float("inf"), origin, 0.0)
    own_tau, tau_low = numbers(*tau, row, row >= 0)
    inverse, narrow, poison = _temperature(tau, row)
    poison = tl.where(strange > 0, float("nan"), nothing + poison)
    goal = level.to(tl.float32)
    live = (goal > first) & (goal < last) & (poison == 0)
    power = tl.zeros((), tl.float32) + exponent[0]
    hi, lo, ok, _, _ = find(
        held, at, nothing + origin, live, n, goal - first, nothing, nothing + own_tau, power, evaluations, L,
        Tile(T.together, T.pieces, T.width, T.full, False, 0),
    )  # fmt: skip
    fine_hi, fine_lo, ok = polish(
        held, at, n, hi.to(tl.float64), lo.to(tl.float64), ok, (goal - first).to(tl.float64),
        (nothing + own_tau).to(tl.float64) + tau_low, joined(*exponent), L.cdf, T,
    )  # fmt: skip
    settled = tl.where(goal <= first, HUGE, -HUGE).to(tl.float64) + poison.to(tl.float64)
    # of the ends of the row, which are no level of any program
    end_at = row * (n + 1) + tl.where(slot == 0, 0, n)
    end = tl.where((slot == 0) | (first >= n), HUGE, -HUGE).to(tl.float64) + poison.to(tl.float64)
    ends = (slot == tl.where(group == 0, 0, -1)) | (slot == tl.where(group == groups - 1, 1, -1))
    tl.store(t.hi + end_at, end, mask=ends)
    tl.store(t.lo + end_at, end, mask=ends)
    hi_at, lo_at = t.hi + row * (n + 1) + level, t.lo + row * (n + 1) + level
    known = (ok | ~live) & (level < n)
    tl.store(hi_at, tl.where(live, fine_hi, settled), mask=known)
    tl.store(lo_at, tl.where(live, fine_lo, settled), mask=known)
    missing = live & ~ok
    if any_row(missing, T.together):
        source = (row_at, row_at, 0, n)
        tau64 = number64(*tau, row)
        for r in range(T.together):
            if any_row(missing & (slot == r), T.together):
                k = (1 + group * (T.together - 1) + r).to(tl.float64)
                hi64, lo64 = find_in_float64(
                    source, k, tau64, 0.0, joined(*exponent), L.cdf, BY_COUNT, False, T.chunk
                )
                at_level = row * (n + 1) + 1 + group * (T.together - 1) + r
                tl.store(t.hi + at_level, hi64)
                tl.store(t.lo + at_level, lo64)
    tl.debug_barrier()  # thresholds of other threads are read

    # the place before each level, but in the last program the place after it
    after = tl.where((group > 0) & (group == groups - 1), 1, 0)
    place = level + after
    hi_at += after
    lo_at += after
    scale = narrow * unit(L.cdf)
    writes = (slot >= tl.where((after > 0) | (group == 0), 0, 1)) & (place <= n)
    hi, lo, near, shift, end = _threshold(hi_at, lo_at, writes, inverse, L.cdf)
    hi_before, lo_before, near_before, shift_before, end_before = _threshold(
        hi_at - 1, lo_at - 1, writes, inverse, L.cdf
    )
    gap = ((hi_before - hi) + (lo_before - lo)) * (inverse * unit(L.cdf))
    gap = tl.where(end | end_before, float("inf"), tl.maximum(gap, 0.0).to(tl.float32))
    top = tl.where(place <= first, reciprocal(tl.maximum(first, 1.0)), 0.0)
    bottom = tl.where(place > last, reciprocal(tl.maximum(n - last, 1.0)), 0.0)
    to = out_pointer + (row * n + place - 1)[:, None] * n + column
    again = _load(at, column, n, T.pieces, T.width, T.full)
    for i in tl.static_range(PIECES):
        given = (
            near[:, None], shift[:, None], near_before[:, None], shift_before[:, None], gap[:, None], scale,
            power,
        )  # fmt: skip
        p = _between(again[i], given, L)
        p = tl.where(again[i] == float("inf"), top[:, None], p)
        p = tl.where(again[i] == float("-inf"), bottom[:, None], p) + poison[:, None]
        there = writes[:, None] if T.full else writes[:, None] & (column + i * T.width < n)
        tl.store(to + i * T.width, p.to(out_pointer.dtype.element_ty), mask=there)


# ------------------------------------------------------------------------------------ the gradients


@triton.jit
def _pull_permutations(
    grad_pointer, grad_row, grad_place, grad_column, x, tau, t, dx_pointer, dtau_pointer, n, exponent,
    L: tl.constexpr, T: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """dL/dx = Σ_i f_i (g_i − q_i)/τ over the thresholds, with q_i = Σ f_i g_i/Σ f_i; −dL/dτ is the sum of
    these terms times z. Where no density reaches a threshold, nothing moves."""
    LEVELS: tl.constexpr = T.together
    PIECES: tl.constexpr = T.pieces
    WIDTH: tl.constexpr = T.width
    row = tl.program_id(0).to(tl.int64)
    column, step = tl.arange(0, T.width)[None, :], tl.arange(0, T.together)
    inverse, narrow, _poison = _temperature(tau, row)
    scale = narrow * unit(L.cdf)
    power = tl.zeros((), tl.float32) + exponent[0]
    poison = tl.load(t.hi + row * (n + 1))  # NaN if the row has no answer
    poison = tl.where(poison == poison, 0.0, poison).to(tl.float32)
    x_at = x.pointer + row * x.stride + (step * 0)[:, None] + column
    held = _load(x_at, column, n, T.pieces, T.width, T.full)
    sums, turned = (), tl.zeros((LEVELS,), tl.float32)
    for piece in tl.static_range(PIECES):  # noqa: B007
        sums = sums + (tl.zeros((LEVELS, WIDTH), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(1, n, T.together):
        level = start + step
        at = row * (n + 1) + level
        _hi, _lo, hi, shift, end = _threshold(t.hi + at, t.lo + at, level < n, inverse, L.cdf)
        moves = ((level < n) & ~end)[:, None]
        grads = grad_pointer + row * grad_row + column.to(tl.int64) * grad_column
        grads += (level - 1).to(tl.int64)[:, None] * grad_place
        f, rise, both = (), (), ()
        for i in tl.static_range(PIECES):
            inside = moves if T.full else moves & (column + i * T.width < n)
            to = grads + (i * T.width) * grad_column
            g = tl.load(to, mask=inside, other=0.0).to(tl.float32)
            g -= tl.load(to + grad_place, mask=inside, other=0.0).to(tl.float32)
            moved = density((held[i] - hi[:, None]) * scale - shift[:, None], power, L.cdf, L.whole)
            moved = tl.where(inside & (tl.abs(held[i]) < float("inf")), moved, 0.0)
            both = plus(both, (moved, moved * g))
            f, rise = f + (moved,), rise + (g,)  # type: ignore[assignment]  # noqa: RUF005
        mass, moment = total(both, T.together)
        mean = tl.where(mass > 0, moment / tl.where(mass > 0, mass, 1.0), 0.0)
        pulls = ()
        for i in tl.static_range(PIECES):
            pull = f[i] * (rise[i] - mean[:, None])
            pulls = pulls + (pull,)  # type: ignore[assignment]  # noqa: RUF005
            if ASKED:
                v = (held[i] - hi[:, None]) * scale - shift[:, None]
                turned += tl.sum(tl.where(f[i] > 0, pull * v, 0.0), axis=1)
        sums = plus(sums, pulls)
    for i in tl.static_range(PIECES):
        dx = tl.sum(sums[i], axis=0)[None, :] * narrow + poison
        there = column + i * T.width < n
        tl.store(dx_pointer + row * n + column + i * T.width, dx.to(dx_pointer.dtype.element_ty), mask=there)
    if ASKED:
        dtau = -tl.sum(turned, axis=0) * (narrow / unit(L.cdf)) + poison
        tl.store(dtau_pointer + row, dtau.to(tl.float64))


KERNELS = (_permute, _pull_permutations)


# ---------------------------------------------------------------------------------------- the calls


def soft_permutation(x: Tensor, tau: Tensor, cdf: str, shape: float) -> tuple[Tensor, Tensor, Tensor]:
    """P, hi and lo of `khot::soft_permutation`: the places of the descending order by entries,
    (*batch, n, n), and the thresholds between them, (*batch, n + 1)."""
    batch, n = x.shape[:-1], x.shape[-1]
    if not _fits(x):
        kernel = OPERATORS["soft_permutation"].kernel
        found: tuple[Tensor, Tensor, Tensor] = kernel(x, tau, cdf, shape)
        return found
    p = x.new_empty(*batch, n, n)
    hi, lo = (torch.empty((*batch, n + 1), dtype=torch.float64, device=x.device) for _ in range(2))
    if x.numel():
        start, groups, power = _forward(n, cdfs.resolve(cdf, shape))
        start(
            batch.numel() * groups,
            layout.rows(x, n), layout.values(tau, batch, x.device), p, Threshold(hi, lo), n, groups,
            EVALUATIONS, power,
        )  # fmt: skip
    return p, hi, lo


def soft_permutation_backward(
    grad: Tensor, x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str, shape: float, want_tau: bool
) -> tuple[Tensor, Tensor]:
    """The gradients in x, and in τ if they are wanted, (*batch) in float64, otherwise empty."""
    batch, n = x.shape[:-1], x.shape[-1]
    if not _fits(x):
        kernel = OPERATORS["soft_permutation_backward"].kernel
        found: tuple[Tensor, Tensor] = kernel(grad, x, hi, lo, tau, cdf, shape, want_tau)
        return found
    dx = x.new_empty(x.shape)
    dtau = torch.empty(batch if want_tau else 0, dtype=torch.float64, device=x.device)
    if x.numel():
        start, power = _backward(n, cdfs.resolve(cdf, shape), want_tau)
        flat = grad.reshape(-1, n, n)
        start(
            batch.numel(),
            flat, *flat.stride(), layout.rows(x, n), layout.values(tau, batch, x.device), Threshold(hi, lo),
            dx, dtau, n, power,
        )  # fmt: skip
    return dx, dtau


def _fits(x: Tensor) -> bool:
    return x.dtype != torch.float64 and x.shape[-1] <= reference.LONGEST


@functools.lru_cache(maxsize=1024)
def _forward(n: int, F: cdfs.CDF) -> tuple[Variant, int, tuple[float, float]]:
    """What is launched, in how many programs for a row, and the exponent of z."""
    counts = [LEVELS << i for i in range(5) if i == 0 or _padded(n) * LEVELS << i <= HELD]
    levels = min(counts, key=lambda levels: (_programs(n, levels) * levels, levels))
    tile = _tile(n, levels, SHARE_OF_EXPONENTIALS if F.name in ("logistic", "laplace") else SHARE)
    kernel = variant(_permute, L=layout.law(F), **tile, **registers(F))
    return kernel, _programs(n, levels), layout.power(F)


def _programs(n: int, levels: int) -> int:
    """So many write the places of a row: as many as they have levels at either end, and one less between."""
    return 1 if n <= levels else 2 + max(0, cdiv(n - 2 * levels, levels - 1))


@functools.lru_cache(maxsize=1024)
def _backward(n: int, F: cdfs.CDF, want_tau: bool) -> tuple[Variant, tuple[float, float]]:
    levels = max(LEVELS, min(HELD_BACK // _padded(n), next_power_of_2(n)))
    kernel = variant(
        _pull_permutations, L=layout.law(F), ASKED=want_tau, **_tile(n, levels, SHARE), **layout.registers(),
    )  # fmt: skip
    return kernel, layout.power(F)


def registers(F: cdfs.CDF) -> dict[str, int]:
    """How many a thread has forward: in float64 the normal CDF is a series, for which 128 are too few."""
    return {"maxnreg": 168} if F.name == "normal" and layout.registers() else layout.registers()


def _padded(n: int) -> int:
    return max(NARROW, next_power_of_2(n))


def _tile(n: int, levels: int, share: int) -> dict[str, Any]:
    """Of so many levels at a time, and so much for a warp: pieces of the row, of which a thread has a part
    for one level.

    It reads four neighbours at once where rows are aligned. Elsewhere it would get parts of several levels
    for that, and would have to compute with the thresholds of each.
    """
    warps = max(1, levels * _padded(n) // share)
    width = (128 if n % 16 == 0 else 32) * warps // levels
    pieces = max(2, cdiv(n, width))  # Triton 3.6 has trouble with tuples of one member
    tile = Tile(levels, pieces, width, n == pieces * width, False, layout.RESCUE * warps)
    return {"T": tile, "num_warps": warps}
