"""The Fenchel-Young loss of rows and its gradients, in one launch each; few very long rows are left to
:mod:`.split_losses`, which has what is here by parts.

A program holds rows, or streams past one, as in :mod:`.rows`: it finds the threshold in float32
(:mod:`.threshold`) and adds up the loss, which is smallest there, so that an error of the threshold hardly
shows. Float64 scores, and the rows for which float32 does not suffice, take float64 for all of it
(:mod:`.float64`).
The formulas are the reference's (`_kernels.reference.fenchel_young`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import fenchel_young as reference
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Found, Problem, Rows, Tile, Values
from khot._kernels.triton.fast import any_row, double, in_two, inverse_of, joined, reciprocal, store, wide
from khot._kernels.triton.float64 import find_in_float64, number64, share
from khot._kernels.triton.float64_sums import BY_COUNT
from khot._kernels.triton.functions import (
    LAPLACE,
    LOGISTIC,
    NORMAL,
    full_support,
    log1p,
    normal_icdf,
    only_powers,
    side,
)
from khot._kernels.triton.launch import Variant, variant
from khot._kernels.triton.rows import (
    EVALUATIONS,
    at_of,
    entries,
    first_of,
    hold,
    inside,
    load_rows,
    numbers,
    place_rows,
    rescue,
    solver,
)
from khot._kernels.triton.terms import PHI, normal_tail, unit, value
from khot._kernels.triton.threshold import find, over

CLOSE, SHORT = tl.constexpr(reference.CLOSE), tl.constexpr(reference.SHORT)


# ---------------------------------------------------------------------------------- of an entry


@triton.jit
def _potential(y, power, CDF: tl.constexpr):
    """ω(y)."""
    if CDF == LOGISTIC:
        found = _times_log(y, y) + tl.where(y < 1, (1 - y) * log1p(-tl.where(y < 1, y, 0.0)), 0.0)
    elif CDF == LAPLACE:
        w = tl.minimum(y, 1 - y)
        found = _times_log(w, 2 * w) - w
    elif CDF == NORMAL:
        w = tl.minimum(y, 1 - y)
        z = -tl.abs(normal_icdf(tl.where(w > 0, w, 0.5)))
        for _ in tl.static_range(2):  # of Halley's steps, from an error of 5e-4
            tail, density = side(z, z, False, 0.0, -tl.abs(z), power, CDF)
            step = (tail - w) / density
            z = tl.where(w > 0, z - step / (1 + 0.5 * z * step), z)
        found = tl.where(w > 0, -0.3989422804014327 * tl.exp(-0.5 * z * z), 0.0)
    else:
        only_powers(CDF)
        p = 1 + 1 / power
        found = tl.where(y > 0, tl.exp(p * tl.log(tl.where(y > 0, y, 1.0))), 0.0) / p
    return tl.where(y == y, found, y)


@triton.jit
def _times_log(x, y):
    return tl.where(x > 0, x * tl.log(tl.where(x > 0, y, 1.0)), 0.0)


@triton.jit
def _log_of_more(e):
    """log(1 + e) for e in [0, 1], by the series of 2 artanh(e/(2 + e)), with the digits of a small e."""
    s = e * reciprocal(2 + e)
    t = s * s
    series = 1 / 13 * t + 1 / 11
    for i in tl.static_range(9, 0, -2):
        series = series * t + 1 / i
    return 2 * s * series


@triton.jit
def _entry(x, T, given, CDF: tl.constexpr, WHOLE: tl.constexpr, SOFT: tl.constexpr):
    """ω*(z) + ω(T) − zT in float32; F(z) − T; and z. Not SOFT says that T is 0 or 1.

    Of the CDFs with full support let S be 1 − T of an entry above t, and T of one below it. The loss is |z|S,
    plus what ω* is more than max(z, 0), and F − T is S less the tail, but for its sign: nothing cancels. With
    compact support, |z|S is of the part of z beyond [0, 1]. Given are hi, lo·unit/τ, unit/τ and the exponent
    of z.
    """
    hi, shift, scale, power = given
    v = (x - hi) * scale - shift
    if full_support(CDF):
        size = tl.abs(v) * (1 / unit(CDF))
        missed = tl.where(v > 0, 1 - T, T)
        if CDF == NORMAL:
            ratio, e = normal_tail(v)
            tail, more = ratio * e, (PHI - size * ratio) * e
        else:
            e = tl.exp2(-tl.abs(v))
            if CDF == LOGISTIC:
                tail, more = e * reciprocal(1 + e), _log_of_more(e)
            else:
                tl.static_assert(CDF == LAPLACE, f"no branch for the CDF with the id {CDF}")
                tail, more = 0.5 * e, 0.5 * e
        loss = size * missed + more
        away = missed - tail
        away = tl.where(v > 0, away, -away)
        if SOFT:
            loss += _potential(T, power, CDF)
    else:
        only_powers(CDF)
        F = value(x, hi, scale, shift, power, CDF, WHOLE)
        held = tl.minimum(tl.maximum(v, 0.0), 1.0)
        per = 1 / (power + 1)
        loss = held * (F * per - T) + tl.abs(v - held) * tl.where(v > 0, 1 - T, T)
        if SOFT:
            loss += _potential(T, power, CDF)
        else:
            loss += T * (1 - per)
        away = F - T
    return tl.maximum(loss, 0.0), away, v * (1 / unit(CDF))


# ------------------------------------------------------------------------------------ in float64


@triton.jit
def _conjugate(z, F, power, CDF: tl.constexpr):
    """ω*(z), whose derivative is F."""
    if CDF == LOGISTIC:
        found = tl.maximum(z, 0.0) + log1p(tl.exp(-tl.abs(z)))
    elif CDF == LAPLACE:
        found = tl.maximum(z, 0.0) + 0.5 * tl.exp(-tl.abs(z))
    elif CDF == NORMAL:
        near = tl.maximum(z, -40.0)  # below, the value is 0
        found = tl.where(z > -40, near * F + 0.3989422804014327 * tl.exp(-0.5 * near * near), 0.0)
    else:
        only_powers(CDF)
        q = power + 1
        inside_ = (z > 0) & (z < 1)
        found = tl.exp(q * tl.log(tl.where(inside_, z, 1.0))) / q
        found = tl.where(inside_, found, tl.where(z > 0, z - power / q, 0.0))
    return tl.where(z == z, found, z)


@triton.jit
def _entries64(x_at, target_at, start, n, per, threshold, CDF: tl.constexpr, WIDTH: tl.constexpr):
    """F − T, ω*(z) + ω(T), zT and zF; and what a decided entry adds to the loss. Decided are infinite scores,
    and all scores where t is infinite; the others are 0 there."""
    column = start + tl.arange(0, WIDTH)
    there = column < n
    x = double(tl.load(x_at + column, mask=there, other=0.0))
    T = double(tl.load(target_at + column, mask=there, other=0.0)) * per
    F, z, _, _, decided = share(x, 1.0, threshold, CDF, BY_COUNT)
    F = tl.where(z == z, F, z)
    free = there & ~decided
    both = _conjugate(z, F, threshold[3], CDF) + _potential(T, threshold[3], CDF)
    wrong = tl.where(there & decided & ~(tl.abs(T - F) < CLOSE), float("inf"), 0.0)
    return (
        tl.where(free, F - T, 0.0), tl.where(free, both, 0.0), tl.where(free, z * T, 0.0),
        tl.where(free, z * F, 0.0), wrong,
    )  # fmt: skip


@triton.jit
def losses_in_float64(x_at, target_at, n, per, threshold, CDF: tl.constexpr, WIDTH: tl.constexpr):
    """The loss of one row or of a part of one, which is read a chunk at a time."""
    losses = tl.zeros((WIDTH,), tl.float64)
    for start in range(0, n, WIDTH):
        _, both, zT, _, wrong = _entries64(x_at, target_at, start, n, per, threshold, CDF, WIDTH)
        losses += threshold[2] * (both - zT) + wrong
    return tl.sum(losses, axis=0)


@triton.jit
def pull_entries_in_float64(
    x_at, target_at, dx_at, n, per, threshold, grad, CDF: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The gradients of the entries of one row or of a part of one, and what they bring to that of τ."""
    rates = tl.zeros((WIDTH,), tl.float64)
    for start in range(0, n, WIDTH):
        column = start + tl.arange(0, WIDTH)
        away, both, _, zF, _ = _entries64(x_at, target_at, start, n, per, threshold, CDF, WIDTH)
        rates += both - zF
        store(dx_at + column, grad * away, column < n)
    return tl.sum(rates, axis=0)


@triton.jit
def _pull_in_float64(
    row, x, target, grad, share_pointer, t, tau, power, dx_pointer, dtau_pointer, n, L: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    x_at, target_at = x.pointer + row * x.stride, target.pointer + row * target.stride
    per, dx_at, grad = tl.load(share_pointer + row), dx_pointer + row * n, number64(*grad, row)
    threshold = (tl.load(t.hi + row), tl.load(t.lo + row), number64(*tau, row), power)
    rate = pull_entries_in_float64(x_at, target_at, dx_at, n, per, threshold, grad, L.cdf, T.chunk)
    tl.store(dtau_pointer + row, grad * rate)


@triton.jit
def share_of(sums, k):
    """What a target is multiplied by so that it sums to k."""
    short = ~(sums >= SHORT * k)
    return tl.where(short, float("nan"), tl.where(k == 0, 0.0, k / tl.where(sums == 0, 1.0, sums)))


# ------------------------------------------------------------------------------------- the kernels


@triton.jit
def _target_terms(T, given):
    """T, and T(1 − T), whose sum is 0 if every entry is 0 or 1."""
    T = tl.where(float("-inf") == T, 0.0, T)  # which is what lies beyond the row's end
    return T, T * (1 - T)


@triton.jit
def target_sums(
    target_at, there, n, TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    mass = there.to(tl.float64) * 0
    softness = mass
    for start in range(0, n, PIECES * WIDTH):
        T = load_rows(target_at + start, there, n - start, TOGETHER, PIECES, WIDTH, False)
        sums = over(T, target_at, n, _target_terms, 0, 2, Tile(TOGETHER, PIECES, WIDTH, False, False, 0))
        mass += sums[0]
        softness += sums[1]
    return mass, softness


@triton.jit
def losses_of(
    at, target_at, there, n, per, given, CDF: tl.constexpr, WHOLE: tl.constexpr, SOFT: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The loss of rows, in units of τ. Entries are read again, so many pieces at a time: beside those that
    are held there are not registers enough for their targets."""
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    found = there.to(tl.float64) * 0
    column = tl.arange(0, WIDTH)
    for start in range(0, n, PIECES * WIDTH):
        for i in tl.static_range(PIECES):
            offset = start + i * WIDTH
            valid = inside(there, column + offset, n, TOGETHER, False)
            x = tl.load(at + offset, mask=valid, other=0.0).to(tl.float32)
            T = tl.load(target_at + offset, mask=valid, other=0.0).to(tl.float32) * per
            loss = _entry(x, T, given, CDF, WHOLE, SOFT)[0]
            # no tuple of one member, which Triton 3.6 joins with another where their members are to be added
            loss = tl.where(valid, loss, 0.0)
            part = part + loss if i > 0 else loss  # type: ignore[has-type]  # noqa: F821
        found += tl.sum(part, axis=AXIS)
    return found


@triton.jit
def _find(
    x, target, k, tau, row, there, n, evaluations, digits, exponent, L: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """t of rows, and their losses."""
    at, target_at = at_of(x, row, T), at_of(target, row, T)
    own_k, k_low = numbers(*k, row, there)
    own_tau, _ = numbers(*tau, row, there)
    mass, softness = target_sums(target_at, there, n, T.together, T.pieces, T.width)
    per64 = share_of(mass, own_k.to(tl.float64) + k_low)
    per = per64.to(tl.float32)
    soft = there & ((per != 1) | (softness != 0))

    held = hold(x, at, row, there, n, T)
    origin = first_of(x, row, there)
    power = tl.zeros((), tl.float32) + exponent[0]
    hi, lo, ok, inverse, _ = find(
        held, at, origin, there, n, own_k, k_low, own_tau, power, evaluations, L, T,
        T.together == 1 and not T.streams,
    )  # fmt: skip
    scale = inverse * unit(L.cdf)
    given = (wide(hi, T.together), wide(lo * scale, T.together), wide(scale, T.together), power)
    if any_row(soft, T.together):
        loss = losses_of(
            at, target_at, there, n, wide(per, T.together), given, L.cdf, L.whole, True,
            T.together, 1, T.width,
        )  # fmt: skip
    else:
        loss = losses_of(
            at, target_at, there, n, 1.0, given, L.cdf, L.whole, False,
            T.together, T.pieces if T.pieces < 4 else 4, T.width,
        )  # fmt: skip
    loss *= own_tau
    ok = ok & (tl.abs(loss) < float("inf")) & (per == per)
    return hi.to(tl.float64), lo.to(tl.float64), ok, (loss, per64)


@triton.jit
def _write(to, row, ok, n, found, L: tl.constexpr, T: tl.constexpr):
    loss_pointer, share_pointer = to
    loss, per64 = found
    tl.store(loss_pointer + row, loss, mask=ok)
    tl.store(share_pointer + row, per64, mask=ok)


@triton.jit
def _solve_in_float64(
    row, x, target, k, tau, found, n, digits, power, L: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """One row, which is read a chunk at a time."""
    WIDTH: tl.constexpr = T.chunk
    x_at, target_at = x.pointer + row * x.stride, target.pointer + row * target.stride
    k, tau = number64(*k, row), number64(*tau, row)
    hi, lo = find_in_float64((x_at, x_at, 0, n), k, tau, 0.0, power, L.cdf, BY_COUNT, False, T.chunk)
    sums = tl.zeros((WIDTH,), tl.float64)
    for start in range(0, n, T.chunk):
        column = start + tl.arange(0, T.chunk)
        sums += double(tl.load(target_at + column, mask=column < n, other=0.0))
    per = share_of(tl.sum(sums, axis=0), k)
    loss = losses_in_float64(x_at, target_at, n, per, (hi, lo, tau, power), L.cdf, T.chunk)
    loss = tl.where((hi == hi) & (per == per), loss, float("nan"))
    loss_pointer, share_pointer = found.out
    tl.store(loss_pointer + row, loss)
    tl.store(share_pointer + row, per)
    tl.store(found.hi + row, hi)
    tl.store(found.lo + row, lo)


LOSS = Problem(_find, _write, _solve_in_float64)


@triton.jit
def pulls(there, hi, loss, tau):
    """Whether the gradients of a row are taken in float32."""
    return there & (tl.abs(hi) < 1e30) & (tl.abs(loss) < float("inf")) & (tau > 1e-25) & (tau < 1e25)


@triton.jit
def pull(at, target_at, to, ok, n, hi, lo, tau, per, grad, power_high, L: tl.constexpr, T: tl.constexpr):
    """The gradients of rows' entries, and Σ z(F − T)."""
    PIECES: tl.constexpr = T.pieces
    scale = inverse_of(tau) * unit(L.cdf)
    power = tl.zeros((), tl.float32) + power_high
    given = (wide(hi, T.together), wide(lo * scale, T.together), wide(scale, T.together), power)
    per, incoming = wide(per, T.together), wide(grad, T.together)
    column = tl.arange(0, T.width)
    moved = ok.to(tl.float64) * 0
    for start in range(0, n, T.pieces * T.width):
        for i in tl.static_range(PIECES):
            offset = start + i * T.width
            valid = inside(ok, column + offset, n, T.together, T.full)
            x = tl.load(at + offset, mask=valid, other=float("-inf")).to(tl.float32)
            target = tl.load(target_at + offset, mask=valid, other=0.0).to(tl.float32) * per
            free = tl.abs(x) < float("inf")  # the others are decided
            entry = _entry(x, target, given, L.cdf, L.whole, False)
            away = tl.where(free, entry[1], 0.0)
            product = tl.where(free, away * entry[2], 0.0)
            part = part + product if i > 0 else product  # type: ignore[has-type]  # noqa: F821
            tl.store(to + offset, (incoming * away).to(to.dtype.element_ty), mask=valid)
        moved += tl.sum(part, axis=0 if T.together == 1 else 1)
    return moved


@triton.jit(do_not_specialize=["rows"])
def pull_losses(
    x, target, grad, share_pointer, loss_pointer, t, tau, dx_pointer, dtau_pointer, rows, n_columns, exponent,
    L: tl.constexpr, FLOAT64: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """dL/dx = F − T, and dL/dτ from the loss, times the gradient that comes in. FLOAT64 says that all takes
    float64."""
    row, there = place_rows(rows, T.together)
    ok = there & ~there
    if not FLOAT64:
        hi, middle = in_two(tl.load(t.hi + row, mask=there, other=0.0))
        lo = middle + tl.load(t.lo + row, mask=there, other=0.0).to(tl.float32)
        per = tl.load(share_pointer + row, mask=there, other=0.0).to(tl.float32)
        loss = tl.load(loss_pointer + row, mask=there, other=0.0)
        own_grad = numbers(*grad, row, there)[0]
        own_tau = numbers(*tau, row, there)[0]
        ok = pulls(there, hi, loss, own_tau)
        column = tl.arange(0, T.width)
        moved = pull(
            x.pointer + entries(row, x.stride, column, T.together),
            target.pointer + entries(row, target.stride, column, T.together),
            dx_pointer + entries(row, n_columns, column, T.together), ok, n_columns, hi, lo, own_tau, per,
            own_grad, exponent[0], L, T,
        )  # fmt: skip
        rate = loss / tl.where(ok, own_tau, 1.0).to(tl.float64) - moved
        tl.store(dtau_pointer + row, own_grad.to(tl.float64) * rate, mask=ok)

    rescue(
        there & ~ok, row, _pull_in_float64,
        (
            x, target, grad, share_pointer, t, tau, joined(*exponent), dx_pointer, dtau_pointer, n_columns,
            L, T,
        ),
        T.together,
    )  # fmt: skip


KERNELS = (pull_losses,)


def fenchel_young(x: Rows, target: Rows, k: Values, tau: Values, found: Found, F: cdfs.CDF) -> None:
    """Fill the losses with the shares of the targets, hi and lo."""
    rows, n = x.pointer.shape
    start, _, programs, power = _variants(rows, n, F, x.pointer.dtype == torch.float64)
    start(programs, x, target, k, tau, found, rows, n, EVALUATIONS, None, power)


def fenchel_young_backward(
    x: Rows, target: Rows, grad: Values, solved: Any, tau: Values, dx: Tensor, dtau: Tensor, F: cdfs.CDF
) -> None:
    """Fill the gradients; solved are share, loss and the threshold."""
    rows, n = x.pointer.shape
    _, puller, programs, power = _variants(rows, n, F, x.pointer.dtype == torch.float64)
    puller(programs, x, target, grad, *solved, tau, dx, dtau, rows, n, power)


@functools.lru_cache(maxsize=1024)
def _variants(
    rows: int, n: int, F: cdfs.CDF, fine: bool
) -> tuple[Variant, Variant, int, tuple[float, float]]:
    """What is launched for the losses and their gradients, in how many programs, and the exponent of z."""
    tile, law = layout.Tile(1, 1, 128, 4) if fine else layout.tile(rows, n), layout.law(F)
    puller = variant(
        pull_losses, L=law, T=layout.constant(tile, n), FLOAT64=fine, num_warps=tile.warps,
        **layout.registers(),
    )  # fmt: skip
    start, programs = solver(LOSS, law, tile, rows, n)
    return start, puller, programs, layout.power(F)
