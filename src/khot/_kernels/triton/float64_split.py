"""Few, very long rows in float64, which programs share: what follows the kernels of :mod:`.split`.

They find t by float32 arithmetic, with an error of some 1e-7 τ, on differences from the sample's threshold.
Here follow one evaluation in float64 and the step that it calls for, whose error is about the square of that:
the sums of :mod:`.float64_sums` over each part, relative to the part's own entries next to t, and the step
of :mod:`.float64`. Rows for which float32 does not suffice are searched in float64 by one program.

1. to 3. as in :mod:`.split`.
4. `_polish_parts`.
5. `_write_fine`, unless only the threshold is asked for.

Backward, `_pull_fine` leaves the sums of every part, relative to its own entry next to t, and the program
that is the last of its row to finish adds them up; `_write_pull_fine` writes dL/dx.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from khot import cdfs
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import (
    Found,
    Matrix,
    Pairs,
    Pulled,
    Rows,
    Scratch,
    Solved,
    Threshold,
    Values,
)
from khot._kernels.triton.fast import joined, two_sum
from khot._kernels.triton.float64 import (
    between_levels,
    find_in_float64,
    number64,
    write_in_float64,
)
from khot._kernels.triton.float64_backward import pull_sums_in_float64, settle_pull, write_pull_in_float64
from khot._kernels.triton.float64_steps import differences, logs, newton
from khot._kernels.triton.float64_sums import (
    BY_COUNT,
    FARTHEST_Z,
    beside_levels,
    distances,
    evaluate,
    finite,
    least,
    standardized,
    sums,
)
from khot._kernels.triton.functions import (
    HUGE,
    OUTPUTS,
    VALUE,
    exponential_tail,
    extent,
    full_support,
    log_scales,
    place,
)
from khot._kernels.triton.launch import launch
from khot._kernels.triton.sizes import next_power_of_2
from khot._kernels.triton.split import BASE, HOPELESS, LEFT, STATE, STATUS, last_of_row, of_parts, solve

# A step of up to so many τ leaves an error of at most half its square (times z with the normal CDF).
SHORT = tl.constexpr(5e-7)
FAR_OUT = tl.constexpr(36.0)  # z from which a tail that falls exponentially does so to the last digit
STRAIGHT = tl.constexpr(1e-13)  # of a step's error in τ that kinks between t before and after may cause


@triton.jit
def _part_source(x, row, part, n, length):
    """The source of a part of a row."""
    start, mine = extent(part, n, length)
    x_at = x.pointer + row * x.stride + start
    return x_at, x_at, 0, mine


@triton.jit
def _crossing(x, w, given):
    """Which entries are so near the lower kink, or the upper one, that t may cross it."""
    hi, lo, tau, _ = given[0]
    CDF: tl.constexpr = given[1]
    z, one_minus_z = standardized(x, w, hi, lo, tau, CDF, BY_COUNT)
    return tl.where(tl.abs(z) <= SHORT, 1.0, 0.0), tl.where(tl.abs(one_minus_z) <= SHORT, 1.0, 0.0)


@triton.jit
def _leave_sums(left, parts, source, threshold, CDF: tl.constexpr, CHUNK: tl.constexpr):
    """The sums of a part: of an evaluation; what is next to t on either side; and how many entries are near a
    kink."""
    crossing = threshold[0] * 0
    if full_support(CDF):
        up, down = least(distances, (threshold, CDF, BY_COUNT), 2, source, BY_COUNT, CHUNK)
        near_up, near_down = finite(up), finite(down)
    else:
        up, down = least(beside_levels, (threshold, CDF, BY_COUNT), 2, source, BY_COUNT, CHUNK)
        near_up, near_down = threshold[0] * 0, threshold[0] * 0
        lower, upper = sums(_crossing, (threshold, CDF), 2, source, BY_COUNT, CHUNK)
        crossing = lower + upper
    spent, tails = evaluate(source, threshold, near_up, near_down, CDF, BY_COUNT, CHUNK)
    numbers = (spent[0],) + tails + (up, down, crossing)  # noqa: RUF005
    for i in tl.static_range(8):
        tl.store(left + i * parts, numbers[i])


@triton.jit
def _relative_sum(left, number, parts, own, near, PARTS: tl.constexpr, CDF: tl.constexpr):
    """The sum of what parts left relative to their own nearest entries, relative to the nearest of them."""
    v = of_parts(left, number, parts, PARTS, 0.0)
    own = tl.where(v > 0, own, near)
    return tl.sum(tl.where(v > 0, v * tl.exp(log_scales(near, own, CDF)), 0.0), axis=0)


@triton.jit
def _step(left, parts, hi, lo, k, tau, power, PARTS: tl.constexpr, CDF: tl.constexpr):
    """t after the step that the sums of all parts call for, and whether it is short enough to be the last."""
    over = tl.sum(of_parts(left, 0, parts, PARTS, 0.0), axis=0) - k
    ups = of_parts(left, 5, parts, PARTS, float("inf"))
    downs = of_parts(left, 6, parts, PARTS, float("inf"))
    up, down = tl.min(ups, axis=0), tl.min(downs, axis=0)
    if full_support(CDF):
        near = (finite(up), finite(down))
        ups, downs = tl.minimum(ups, FARTHEST_Z), tl.minimum(downs, FARTHEST_Z)
    else:
        near = (hi * 0, hi * 0)
        ups, downs = ups * 0, downs * 0
    tails = (
        _relative_sum(left, 1, parts, ups, near[0], PARTS, CDF),
        _relative_sum(left, 2, parts, downs, near[1], PARTS, CDF),
        _relative_sum(left, 3, parts, ups, near[0], PARTS, CDF),
        _relative_sum(left, 4, parts, downs, near[1], PARTS, CDF),
    )
    if full_support(CDF):
        _, ratio, logarithms, rates, _ = logs(over, tails, near, CDF)
        step, _ = newton(over, tails, near, near, ratio, logarithms, rates, CDF)
        last = tl.abs(step) <= SHORT
        if exponential_tail(CDF):
            last = last | ((over == 0) & (tl.minimum(near[0], near[1]) > FAR_OUT) & (tl.abs(step) < 1))
        new_hi, new_lo = two_sum(hi, lo + step * tau)
    else:
        _, step, _ = differences(over, tails, power, CDF)
        crossing = tl.sum(of_parts(left, 7, parts, PARTS, 0.0), axis=0)
        last = (tl.abs(step) <= SHORT) & (crossing * tl.abs(step) <= STRAIGHT * (tails[2] + tails[3]))
        new_hi, new_lo = two_sum(hi, lo + step * tau)
        if (
            (over == 0) & (tails[0] == 0) & (tails[1] == 0)
        ):  # no entry has f > 0: any t in the gap will do, so the middle
            last = up >= -down
            new_hi, new_lo = between_levels(up, -down, 1.0, 1.0)
    return new_hi, new_lo, last & (tl.abs(new_hi) < HUGE)


@triton.jit(do_not_specialize=["parts", "length"])
def _polish_parts(
    x, k, tau, t, scratch, n_columns, length, parts, exponent, CDF: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    state = scratch.state + row * STATE
    alone = tl.load(state + STATUS) == HOPELESS
    if ~alone | (part == 0):
        own_k = number64(*k, row)
        own_tau = number64(*tau, row)
        power = joined(*exponent)
        if not alone:
            hi, lo = two_sum(tl.load(state + BASE), tl.load(t.hi + row) + tl.load(t.lo + row))
            left = scratch.left + row * LEFT * parts
            source = _part_source(x, row, part, n_columns, length)
            _leave_sums(left + part, parts, source, (hi, lo, own_tau, power), CDF, CHUNK)
            if last_of_row(scratch.counter + row, parts):
                hi, lo, last = _step(left, parts, hi, lo, own_k, own_tau, power, PARTS, CDF)
                tl.store(t.hi + row, hi)
                tl.store(t.lo + row, lo)
                alone = ~last
        if alone:
            x_at = x.pointer + row * x.stride
            source = (x_at, x_at, 0, n_columns)
            hi, lo = find_in_float64(source, own_k, own_tau, 0.0, power, CDF, BY_COUNT, False, CHUNK)
            tl.store(t.hi + row, hi)
            tl.store(t.lo + row, lo)


@triton.jit(do_not_specialize=["parts", "length"])
def _write_fine(
    x, tau, out_pointer, t, n_columns, length, parts, exponent, CDF: tl.constexpr, OUTPUT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    threshold = (tl.load(t.hi + row), tl.load(t.lo + row), number64(*tau, row), joined(*exponent))
    to = out_pointer + row * n_columns + part.to(tl.int64) * length
    source = _part_source(x, row, part, n_columns, length)
    write_in_float64(to, source, threshold, CDF, BY_COUNT, OUTPUT, CHUNK)


# ---------------------------------------------------------------------------------------- backward

# the numbers of a row that the parts are written with: those of :func:`.float64_backward.settle_pull`
NEAR, SPREAD, UP, DOWN, AT_UP, AT_DOWN = (tl.constexpr(i) for i in range(6))
PULLED = tl.constexpr(6)  # as many as that, and as many as a part leaves: |z| next to t, and five sums


@triton.jit(do_not_specialize=["parts", "length"])
def _pull_fine(
    grad, grad_lo, x, t, tau, dk_pointer, dtau_pointer, scratch, n_columns, length, parts, exponent,
    CDF: tl.constexpr, OUTPUT: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    threshold = (tl.load(t.hi + row), tl.load(t.lo + row), number64(*tau, row), joined(*exponent))
    grad_at = grad.pointer + row * grad.row
    near, totals = pull_sums_in_float64(
        _part_source(x, row, part, n_columns, length), grad_at + part.to(tl.int64) * length * grad.column,
        grad.column, threshold, CDF, BY_COUNT, OUTPUT, CHUNK,
    )  # fmt: skip
    left = scratch.left + row * PULLED * parts
    numbers = (near,) + totals  # noqa: RUF005
    for i in tl.static_range(PULLED):
        tl.store(left + i * parts + part, numbers[i])
    if last_of_row(scratch.counter + row, parts):
        nears = of_parts(left, 0, parts, PARTS, FARTHEST_Z)
        near = tl.min(nears, axis=0)
        scale = tl.exp(log_scales(near, nears, CDF))
        priced = of_parts(left, 2, parts, PARTS, 0.0)
        totals = (
            tl.sum(of_parts(left, 1, parts, PARTS, 0.0) * scale, axis=0),
            tl.sum(priced * scale if OUTPUT == VALUE else priced, axis=0),
            tl.sum(of_parts(left, 3, parts, PARTS, 0.0), axis=0),
            tl.sum(of_parts(left, 4, parts, PARTS, 0.0), axis=0),
            tl.sum(of_parts(left, 5, parts, PARTS, 0.0) * scale, axis=0),
        )
        x_at = x.pointer + row * x.stride
        dk, dtau, spread, gap = settle_pull(
            near, totals, (x_at, x_at, 0, n_columns), grad_at, grad.column, number64(*grad_lo, row),
            threshold, CDF, BY_COUNT, False, OUTPUT, CHUNK,
        )  # fmt: skip
        tl.store(dk_pointer + row, dk)
        tl.store(dtau_pointer + row, dtau)
        state = scratch.state + row * PULLED
        tl.store(state + NEAR, near)
        tl.store(state + SPREAD, spread)
        for i in tl.static_range(4):
            tl.store(state + (UP + i), gap[i])


@triton.jit(do_not_specialize=["parts", "length"])
def _write_pull_fine(
    grad, x, t, tau, dx_pointer, state_pointer, n_columns, length, parts, exponent, CDF: tl.constexpr,
    OUTPUT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    start = part.to(tl.int64) * length
    threshold = (tl.load(t.hi + row), tl.load(t.lo + row), number64(*tau, row), joined(*exponent))
    state = state_pointer + row * PULLED
    gap = (
        tl.load(state + UP), tl.load(state + DOWN), tl.load(state + AT_UP), tl.load(state + AT_DOWN)
    )  # fmt: skip
    dx_at = dx_pointer + row * n_columns + start
    write_pull_in_float64(
        dx_at, dx_at, _part_source(x, row, part, n_columns, length),
        grad.pointer + row * grad.row + start * grad.column, grad.column, threshold, tl.load(state + NEAR),
        0.0, tl.load(state + SPREAD), gap, CDF, BY_COUNT, False, OUTPUT, CHUNK,
    )  # fmt: skip


KERNELS = (_polish_parts, _write_fine, _pull_fine, _write_pull_fine)


def soft_topk(source: Rows, k: Values, tau: Values, found: Found, asked: layout.Asked) -> None:
    """Fill what is found; out not if only the threshold is asked for."""
    rows, n = source.pointer.shape
    F, t, power = asked.F, Threshold(found.hi, found.lo), layout.power(asked.F)
    scratch, cut = solve(source, k, tau, t, layout.law(F), power, fine=True)
    which, size = _which(cut, F), (n, cut.length, cut.parts)
    launch(
        _polish_parts, rows * cut.parts,
        source, k, tau, t, scratch._replace(window=None), *size, power, **which,
        PARTS=next_power_of_2(cut.parts),
    )  # fmt: skip
    if asked.output in ("y", "log"):
        launch(
            _write_fine, rows * cut.parts,
            source, tau, found.out, t, *size, power, **which, OUTPUT=OUTPUTS[asked.output],
        )  # fmt: skip


def backward(
    grad: Matrix, grad_lo: Values, pairs: Pairs, solved: Solved, to: Pulled, asked: layout.Asked
) -> None:
    """Fill the results, as :func:`.pull.backward` does."""
    (source, _), (t, tau, _), (rows, n) = pairs, solved, pairs.x.pointer.shape
    cut, dk = layout.cut(rows, n), to.dgoal
    state, left = dk.new_empty(rows, PULLED.value), dk.new_empty(rows, PULLED.value, cut.parts)
    scratch = Scratch(state, torch.zeros(rows, dtype=torch.int32, device=dk.device), left)
    which = {**_which(cut, asked.F), "OUTPUT": OUTPUTS[asked.output]}
    size, power, programs = (n, cut.length, cut.parts), layout.power(asked.F), rows * cut.parts
    launch(
        _pull_fine, programs,
        grad, grad_lo, source, t, tau, dk, to.dtau, scratch, *size, power, **which,
        PARTS=next_power_of_2(cut.parts),
    )  # fmt: skip
    launch(_write_pull_fine, programs, grad, source, t, tau, to.dx, state, *size, power, **which)


def _which(cut: layout.Cut, F: cdfs.CDF) -> dict[str, int]:
    which = {"CDF": layout.cdf_id(F.name), "CHUNK": layout.RESCUE * cut.warps, "num_warps": cut.warps}
    return {**which, **layout.registers()}
