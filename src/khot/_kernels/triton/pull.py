"""The gradients of rows that stay on chip, that stream past one program, or that many programs share: the row
program, :func:`pull_rows`, and what it is given for soft top-ks and soft budgets in float32.

Of the scores, of the costs if there are some, and of the incoming gradient one read, or a second one from the
caches where they do not fit into the registers; of each result one write, as softmax's backward has. What is
summed over a row and written is a :class:`.arguments.Puller`: :data:`PAID` here, whose costs are all 1 where
entries are counted, and that of a top-k in magnitude (:mod:`.magnitude`). Rows for which float32 does not
suffice are done again, in the same program, in float64: those without an ordinary threshold, and those whose
densities all but vanish.

Few very long rows take two launches, and a fill of the counters, before which there is no launch that could
do it. In the first, every part leaves its sums, and the program that is the last of its row to finish adds
them up. In the second, every part writes its gradients. A row that needs float64 is done by that last program
alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from khot._kernels.triton import layout
from khot._kernels.triton.arguments import (
    Matrix,
    Pairs,
    Pulled,
    Puller,
    Scratch,
    Solved,
    Tile,
    Values,
)
from khot._kernels.triton.costs import load_pair, priced
from khot._kernels.triton.counted import row_values
from khot._kernels.triton.fast import (
    always,
    fma,
    in_two,
    inverse_of,
    joined,
    plus,
    reached,
    reciprocal,
    total,
    wide,
)
from khot._kernels.triton.float64 import number64, row_source
from khot._kernels.triton.float64_backward import pull_in_float64
from khot._kernels.triton.float64_sums import BY_COUNT, BY_VALUE
from khot._kernels.triton.functions import LOG, THRESHOLD, extent, place, place_last
from khot._kernels.triton.launch import Variant, launch, variant
from khot._kernels.triton.paid import share_of
from khot._kernels.triton.rows import entries, numbers, place_rows, present, rescue
from khot._kernels.triton.sizes import cdiv, next_power_of_2
from khot._kernels.triton.split import last_of_row, total_of_parts
from khot._kernels.triton.terms import density, log_rate, unit
from khot._kernels.triton.threshold import FLUSH

# --------------------------------------------------------------------------------- the row program


@triton.jit
def places(pairs, grad, row, column, TOGETHER: tl.constexpr):
    """Where the scores lie, the second number of each entry if there is one, and the incoming gradient: a
    start of each, and how far apart its columns are."""
    x, other = pairs
    far = column.to(tl.int64)
    x_at = x.pointer + entries(row, x.stride, column, TOGETHER)
    grad_at = grad.pointer + entries(row, grad.row, far * grad.column, TOGETHER)
    if other is None:
        return (x_at, x_at, 0), (grad_at, grad.column)
    else:
        other_at = other.pointer + entries(row, other.row, far * other.column, TOGETHER)
        return (x_at, other_at, other.column), (grad_at, grad.column)


@triton.jit
def results(to, offset):
    """Where the gradients of entries go."""
    dx_at = to.dx + offset
    return dx_at, (dx_at if to.dcost is None else to.dcost + offset)


@triton.jit
def in_float32(solved, row, there):
    """hi, lo and τ of rows."""
    hi, middle = in_two(tl.load(solved.t.hi + row, mask=there, other=0.0))
    lo = middle + tl.load(solved.t.lo + row, mask=there, other=0.0).to(tl.float32)
    return hi, lo, numbers(*solved.tau, row, there)[0]


@triton.jit(do_not_specialize=["rows"])
def pull_rows(
    grad, grad_lo, pairs, solved, to, rows, n_columns, power,
    P: tl.constexpr, L: tl.constexpr, T: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """The rows of a :class:`.arguments.Tile`, or one of any length that streams past; those of float64 take
    float64 for all of it. ASKED says whether somebody wants the derivative of lo, whose gradient comes in.
    The functions of a :class:`.arguments.Puller` get what is given here."""
    row, there = place_rows(rows, T.together)
    ok = there & ~there
    if pairs[0].pointer.dtype.element_ty != tl.float64:
        threshold, ordinary, given = P.prepare(solved, power, row, there, L, T)
        column = tl.arange(0, T.width)
        at, grad_at = places(pairs, grad, row, column, T.together)
        sums, kept = P.sums(at, grad_at, ordinary, n_columns, given, L, T)
        pull, dtau, ok = P.settle(sums, solved, grad_lo, row, ordinary, threshold, L, ASKED)
        if to.dgoal is not None:
            tl.store(to.dgoal + row, pull.to(tl.float64), mask=ok)
        tl.store(to.dtau + row, dtau.to(tl.float64), mask=ok)
        goes = results(to, entries(row, n_columns, column, T.together))
        P.write(at, grad_at, goes, ok, n_columns, given, pull, threshold, kept, L, T)

    rescue(
        there & ~ok, row, P.in_float64, (grad, grad_lo, pairs, solved, to, n_columns, power, L, T), T.together
    )  # fmt: skip


# ---------------------------------------------------------------------------- rows of many programs


@triton.jit(do_not_specialize=["parts", "length"])
def _pull_parts(
    grad, grad_lo, pairs, solved, to, scratch, n_columns, length, parts, power,
    P: tl.constexpr, L: tl.constexpr, T: tl.constexpr, ASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    threshold, ordinary, given = P.prepare(solved, power, row, row >= 0, L, T)
    start, mine = extent(part, n_columns, length)
    at, grad_at = places(pairs, grad, row, start + tl.arange(0, T.width), 1)
    sums, _ = P.sums(at, grad_at, ordinary, mine, given, L, T)
    LEFT: tl.constexpr = P.left
    left = scratch.left + row * LEFT * parts
    for i in tl.static_range(LEFT):
        tl.store(left + i * parts + part, sums[i])
    if last_of_row(scratch.counter + row, parts):
        totals = ()
        for i in tl.static_range(LEFT):
            totals = totals + (total_of_parts(left, i, parts, PARTS),)  # type: ignore[assignment]  # noqa: RUF005
        pull, dtau, ok = P.settle(totals, solved, grad_lo, row, ordinary, threshold, L, ASKED)
        tl.store(scratch.state + row, tl.where(ok, 0, 1))
        if ok:
            tl.store(to.dgoal + row, pull.to(tl.float64))
            tl.store(to.dtau + row, dtau.to(tl.float64))
        else:
            P.in_float64(row, grad, grad_lo, pairs, solved, to, n_columns, power, L, T)


@triton.jit(do_not_specialize=["parts", "length"])
def _gradient_parts(
    grad, pairs, solved, to, done_pointer, n_columns, length, parts, power,
    P: tl.constexpr, L: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    row, part = place_last(parts)
    if tl.load(done_pointer + row) == 0:
        threshold, _, given = P.prepare(solved, power, row, row >= 0, L, T)
        start, mine = extent(part, n_columns, length)
        column = start + tl.arange(0, T.width)
        at, grad_at = places(pairs, grad, row, column, 1)
        pull = tl.load(to.dgoal + row)
        goes = results(to, row * n_columns + column)
        P.write(at, grad_at, goes, row >= 0, mine, given, pull, threshold, ((), ()), L, T)


KERNELS = (pull_rows, _pull_parts, _gradient_parts)


def puller(problem: Puller, law: Any, tile: Tile, warps: int, wants_lo: bool) -> Variant:
    """What is launched for a problem."""
    return variant(
        pull_rows, P=problem, L=law, T=tile, ASKED=wants_lo, num_warps=warps, **layout.registers()
    )  # fmt: skip


def wants_lo(grad_lo: Values) -> bool:
    """Whether somebody asked for the derivative of lo: a 0 that is given by value says that nobody did."""
    return grad_lo.pointer is not None or grad_lo.high != 0


def share(
    problem: Puller,
    law: Any,
    grad: Matrix,
    grad_lo: Values,
    pairs: Pairs,
    solved: Solved,
    to: Pulled,
    power: tuple[float, float] | None,
    wants_lo: bool,
    pieces: int | None = None,
) -> None:
    """Fill the results of rows that many programs share, so many pieces at a time."""
    rows, n = pairs.x.pointer.shape
    cut = layout.cut(rows, n)
    done = torch.empty(rows, dtype=torch.int32, device=to.dx.device)
    left = to.dtau.new_empty(rows, problem.left, cut.parts)
    scratch = Scratch(done, torch.zeros_like(done), left)
    which = {"P": problem, "L": law, "T": layout.part_tile(cut, pieces), "num_warps": cut.warps}
    which |= layout.registers()
    size, programs = (n, cut.length, cut.parts), rows * cut.parts
    launch(
        _pull_parts, programs, grad, grad_lo, pairs, solved, to, scratch, *size, power,
        ASKED=wants_lo, PARTS=next_power_of_2(cut.parts), **which,
    )  # fmt: skip
    launch(_gradient_parts, programs, grad, pairs, solved, to, done, *size, power, **which)


FADED = tl.constexpr(1e-20)  # a sum of densities below which float32 has lost their digits
KEPT = tl.constexpr(8)  # pieces at most whose terms stay in registers until they are written


# ------------------------------------------------------------------ of soft top-ks and soft budgets


@triton.jit
def _prepare(solved, power, row, there, L: tl.constexpr, T: tl.constexpr):
    """hi, lo, τ and 1/τ of rows; all of which may be ordinary; and what :func:`_entry` is to know of them."""
    hi, lo, tau = in_float32(solved, row, there)
    inverse = inverse_of(tau)
    scale = inverse * unit(L.cdf)
    z_power = tl.zeros((), tl.float32) + power[0]
    given = (wide(hi, T.together), wide(lo * scale, T.together), wide(scale, T.together), z_power)
    return (hi, lo, tau, inverse), there, given


@triton.jit
def _entry(at, grad, offset, valid, given, L: tl.constexpr):
    """x and w; w f; u = v·∂out/∂z for the incoming gradient v; and z in the units of :mod:`.terms`."""
    hi, shift, scale, power = given
    if L.by == BY_COUNT:
        x, w = tl.load(at[0] + offset, mask=valid, other=float("-inf")).to(tl.float32), 1.0
    else:
        x, w = load_pair(at, offset, valid)
    v = tl.load(grad[0] + (tl.zeros((), tl.int64) + offset) * grad[1], mask=valid, other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")  # others take no part, whatever their gradient and their cost
    off = x - hi
    if L.by == BY_VALUE:
        off, shift = priced(x, w, hi, shift, scale, L.cdf, L.whole)
    z = tl.where(finite, off * scale - shift, -1e4)
    f = density(z, power, L.cdf, L.whole)
    paid = f if L.by == BY_COUNT else tl.where(finite, w * f, 0.0)
    if L.output == THRESHOLD:
        return x, w, paid, f * 0, z
    rate = log_rate(z, f, power, L.cdf) if L.output == LOG else f
    return x, w, paid, tl.where(finite, v * rate, 0.0), z


@triton.jit
def _products(entry, L: tl.constexpr):
    """w f, u, w f z and u z; by value the first two times w, in float64."""
    _, w, paid, u, z = entry
    if L.by == BY_VALUE:
        a = w.to(tl.float64)
        return paid * a, u * a, paid * z, u * z
    else:
        return paid, u, paid * z, u * z


@triton.jit
def _held_sums(at, grad, there, n, given, L: tl.constexpr, T: tl.constexpr):
    """The sums of the products over rows that a program holds; and w f and u of each piece, if they are
    kept."""
    PIECES: tl.constexpr = T.pieces
    TOGETHER: tl.constexpr = T.together
    WIDTH: tl.constexpr = T.width
    held, masses, us = (), (), ()
    nothing = tl.zeros((WIDTH,) if TOGETHER == 1 else (TOGETHER, WIDTH), tl.float32)
    for i in tl.static_range(PIECES):
        mass, u = nothing, nothing
        if always(i, T.ragged) or reached(i, n, T):
            entry = _entry(at, grad, i * T.width, present(there, i * T.width, n, T), given, L)
            held = plus(held, _products(entry, L))
            mass, u = entry[2], entry[3]
        if L.by == BY_COUNT and PIECES <= KEPT:
            masses, us = masses + (mass,), us + (u,)  # type: ignore[assignment]  # noqa: RUF005
    return total(held, T.together), (masses, us)


@triton.jit
def _streamed_sums(at, grad, n, given, L: tl.constexpr, T: tl.constexpr):
    """The same sums over n entries that stream past, in float64."""
    PIECES: tl.constexpr = T.pieces
    WIDTH: tl.constexpr = T.width
    column = tl.arange(0, WIDTH)
    steps = tl.cdiv(n, PIECES * WIDTH)
    nothing = tl.zeros((), tl.float64)
    sums = (nothing, nothing, nothing, nothing)
    for first in range(0, steps, FLUSH):
        zero = tl.zeros((WIDTH,), tl.float32)
        first_two = zero.to(tl.float64) if L.by == BY_VALUE else zero
        part = (first_two, first_two, zero, zero)
        for number in range(first, tl.minimum(steps, first + FLUSH)):
            start = number * (PIECES * WIDTH)
            for i in tl.static_range(PIECES):
                offset = start + i * WIDTH
                part = plus(part, _products(_entry(at, grad, offset, column + offset < n, given, L), L))
        sums = plus(sums, total(part, 1))
    return sums


@triton.jit
def _sums(at, grad, there, n, given, L: tl.constexpr, T: tl.constexpr):
    if T.streams:
        return _streamed_sums(at, grad, n, given, L, T), ((), ())
    else:
        return _held_sums(at, grad, there, n, given, L, T)


@triton.jit
def _settle(sums, solved, grad_lo, row, there, threshold, L: tl.constexpr, ASKED: tl.constexpr):
    """dL/dgoal = Σu/Σwf, less τ/Σwf times the gradient in lo if that is ASKED for, by value Σuw/Σw²f and
    τ/Σw²f, and 0 of a budget that is not spent; dL/dτ = (dL/dgoal·Σwfz − Σuz)/τ; and which rows have them in
    float32.

    By value dL/dgoal is in float64: dL/dw has t times what is left of u − w f·dL/dgoal, which is nothing
    where one entry moves."""
    hi, lo, tau, inverse = threshold
    mass, u_sum, moment, u_moment = sums
    if L.by == BY_VALUE:
        per = 1 / mass.to(tl.float64)
        pull = u_sum.to(tl.float64) * per
    else:
        per = reciprocal(mass.to(tl.float32))
        pull = u_sum.to(tl.float32) * per
    mass = mass.to(tl.float32)
    if ASKED:
        pull -= numbers(*grad_lo, row, there)[0] * tau * per
    ok = (mass > FADED) & (mass < 1 / FADED)
    if L.at_most:
        fixed = (hi == 0) & (lo == 0)
        pull, ok = tl.where(fixed, 0.0, pull), ok | fixed
    dtau = (pull.to(tl.float32) * moment.to(tl.float32) - u_moment.to(tl.float32)) * inverse
    dtau *= 1 / unit(L.cdf)
    ok = ok & (tl.abs(hi) < 1e30) & (tl.abs(pull) < float("inf")) & (tl.abs(dtau) < float("inf"))
    return pull, dtau, ok & (tau > 1e-25) & (tau < 1e25) & there


@triton.jit
def _write(at, grad, to, ok, n, given, pull, threshold, kept, L: tl.constexpr, T: tl.constexpr):
    """dL/dx = (u − w f·pull)/τ, and dL/dw = −y·pull, by value less t·dL/dx; the last entries first: the row's
    end is what the cache still has."""
    hi, lo, inverse = threshold[0], threshold[1], threshold[3]
    PIECES: tl.constexpr = T.pieces
    values = row_values(hi, lo, inverse, hi != hi, given[3], L.cdf, T.together)
    whole = pull.to(tl.float32)
    rest = wide((pull - whole).to(tl.float32), T.together) if L.by == BY_VALUE else 0.0
    share, per, t = wide(whole, T.together), wide(inverse, T.together), wide(hi + lo, T.together)
    steps = tl.cdiv(n, PIECES * T.width) if T.streams else 1
    for behind in range(steps):
        for i in tl.static_range(PIECES):
            if always(i, T.ragged) or reached(i, n, T):
                offset = (steps - 1 - behind) * (PIECES * T.width) + i * T.width
                valid = present(ok, offset, n, T)
                if L.by == BY_COUNT and PIECES <= KEPT and not T.streams:
                    known = (hi, 1.0, kept[0][i], kept[1][i])
                else:
                    known = _entry(at, grad, offset, valid, given, L)
                _write_entry(known, to, offset, valid, (share, rest, per, t), values, L)


@triton.jit
def _write_entry(known, to, offset, valid, of_row, values, L: tl.constexpr):
    x, w, paid, u = known[0], known[1], known[2], known[3]
    share, rest, per, t = of_row
    dx_at, dcost_at = to
    left = fma(-paid, share, u) - paid * rest if L.by == BY_VALUE else u - paid * share
    dx = left * per
    tl.store(dx_at + offset, dx.to(dx_at.dtype.element_ty), mask=valid)
    if L.by != BY_COUNT:
        dcost = -share * share_of(x, w, values, L)
        if L.by == BY_VALUE:
            dcost -= t * dx
        dcost = tl.where(x == float("-inf"), 0.0, dcost)
        tl.store(dcost_at + offset, dcost.to(dcost_at.dtype.element_ty), mask=valid)


@triton.jit
def _pull_in_float64(row, grad, grad_lo, pairs, solved, to, n, power, L: tl.constexpr, T: tl.constexpr):
    """One row in float64, which is read again a chunk at a time."""
    x, cost = pairs
    t = solved.t
    threshold = (tl.load(t.hi + row), tl.load(t.lo + row), number64(*solved.tau, row), joined(*power))
    dx_at, dcost_at = results(to, row * n)
    pull_in_float64(
        row_source(x, cost, row, n, L.by), grad.pointer + row * grad.row, grad.column,
        number64(*grad_lo, row), threshold, dx_at, dcost_at, to.dgoal + row, to.dtau + row,
        L.cdf, L.by, L.at_most, L.output, T.chunk,
    )  # fmt: skip


PULL_PAID = Puller(_prepare, _sums, _settle, _write, _pull_in_float64, left=4)


def backward(
    grad: Matrix, grad_lo: Values, pairs: Pairs, solved: Solved, to: Pulled, asked: layout.Asked
) -> None:
    """Fill the results of soft top-ks and soft budgets."""
    (rows, n), wanted = pairs.x.pointer.shape, wants_lo(grad_lo)
    given = grad, grad_lo, pairs, solved, to
    if layout.splits(rows, n):
        pieces = None if asked.by == "count" else 2
        return share(PULL_PAID, layout.law(*asked), *given, layout.power(asked.F), wanted, pieces)
    start, programs, power = _variant(rows, n, asked, wanted)
    start(programs, *given, rows, n, power)


@functools.lru_cache(maxsize=1024)
def _variant(
    rows: int, n: int, asked: layout.Asked, wants_lo: bool
) -> tuple[Variant, int, tuple[float, float]]:
    """What is launched, in how many programs, and the exponent of z."""
    tile = (layout.tile if asked.by == "count" else layout.pair_tile)(rows, n)
    start = puller(PULL_PAID, layout.law(*asked), layout.constant(tile, n), tile.warps, wants_lo)
    return start, cdiv(rows, tile.together), layout.power(asked.F)
