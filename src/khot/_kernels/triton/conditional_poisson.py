"""Conditional Poisson samples with given inclusion probabilities: one launch, one program for each row.

The program finds how many units the row selects, calibrates the design, and draws from it.

Calibration solves π(θ) = π, where π(θ) are the inclusion probabilities of independent trials with logits θ,
given that k of them succeed. They are a mixture over at most 26 frequencies ω of the size
(`_kernels.reference.poisson_binomial`), computed in real arithmetic. With Φ the transform of the size and
A = weight Φ(ω) e^(−iωk)/P(k),

    π_j = p_j Σ (q_j Re A e^(iω) + p_j Re A)/D,   1 − π_j = q_j Σ (q_j Re A + p_j Re A e^(−iω))/D,
    D = 1 − 2 p_j q_j (1 − cos ω),

which takes one reciprocal for each unit and frequency. Each step θ ← θ + logit π − logit π(θ) is combined
with the one before it (Anderson acceleration of depth 1).

A draw repeats the independent trials until k of them succeed. That is exact, and takes about √(2πV) tries, V
being the variance of the size: 6 for 8 of 64 units, and at most 40 for 1,024.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import draws as reference
from khot._kernels.reference import fixed_point
from khot._kernels.triton import layout
from khot._kernels.triton.calibration import clamp, sides, times
from khot._kernels.triton.draws import columns_of, moments_of, plan_of, uniforms
from khot._kernels.triton.fast import INTERPRETED, double, halvings, reciprocal64, total
from khot._kernels.triton.launch import launch
from khot._kernels.triton.sizes import next_power_of_2

LONGEST = 1024  # entries of a row that one program draws
ENTRIES = 4  # of a thread
FREQUENCIES = tl.constexpr(32)  # for which there is room; 26 are used, as in the reference
MOST = tl.constexpr(26)
QUARTER = tl.constexpr(math.pi / 2)
STEPS = tl.constexpr(30)  # over hard rows at most 13 were needed
NEAR = tl.constexpr(1e-7)  # an error of π from which a step is the last one
CLOSE = tl.constexpr(fixed_point.CLOSE)
HAJEK = tl.constexpr(fixed_point.HAJEK)
SETTLED = tl.constexpr(1e-8)  # a variance up to which the start is the solution, but for its square
CENTRING = tl.constexpr(30)  # steps, at most
EXACTLY = tl.constexpr(1e-10)  # deviations of the sum, for logit π: no solution fits another sum
OFF_CENTRE = tl.constexpr(0.3)  # the same where the sum does not matter, for the frequencies
OFF_CENTRE_DRAW = tl.constexpr(0.1)  # and for a draw: this loses one in 200
SMALL = tl.constexpr(1e-6)  # a variance that covers rounding errors of the mean
TINY = tl.constexpr(1e-300)
TRIES = tl.constexpr(20_000)  # of a draw; the last of 1,000 is needed in one of 10¹⁰ rows


@triton.jit
def _turn(x):
    """cos, sin and 1 − cos of 2πx for x in [0, 1): the series of a quarter of the angle, doubled twice."""
    z = (x - tl.where(x >= 0.5, 1.0, 0.0)) * QUARTER
    t = z * z
    s = t * (-1.0 / 1307674368000) + 1.0 / 6227020800
    s = s * t - 1.0 / 39916800
    s = s * t + 1.0 / 362880
    s = s * t - 1.0 / 5040
    s = s * t + 1.0 / 120
    s = z * ((s * t - 1.0 / 6) * t + 1.0)
    c = t * (1.0 / 20922789888000) - 1.0 / 87178291200
    c = c * t + 1.0 / 479001600
    c = c * t - 1.0 / 3628800
    c = c * t + 1.0 / 40320
    c = c * t - 1.0 / 720
    c = c * t + 1.0 / 24
    c = (c * t - 0.5) * t + 1.0
    s, c = 2 * s * c, 1 - 2 * s * s
    return 1 - 2 * s * s, 2 * s * c, 2 * s * s


@triton.jit
def _product(a, b):
    """The complex product over the first dim."""
    if INTERPRETED:  # its reduction by a function takes a call for each entry
        for _ in tl.static_range(halvings(a.shape[0])):
            a, c = tl.split(tl.permute(tl.reshape(a, (2, a.shape[0] // 2, a.shape[1])), (1, 2, 0)))
            b, d = tl.split(tl.permute(tl.reshape(b, (2, b.shape[0] // 2, b.shape[1])), (1, 2, 0)))
            a, b = times(a, b, c, d)
        return tl.reshape(a, (a.shape[1],)), tl.reshape(b, (b.shape[1],))
    else:
        return tl.reduce((a, b), 0, times)


@triton.jit
def _trials(theta, free, k, offset, SHARE: tl.constexpr):
    """The p and 1 − p of θ − offset, their variance, and the offset: one for which k of the free units
    succeed on average, to that share of a deviation."""
    p, q, variance, shift = theta, theta, offset, offset * 0
    tries = 0
    running = tries == 0
    while running:
        offset += shift
        p, q = sides(theta - offset)
        p, q = tl.where(free, p, 0.0), tl.where(free, q, 1.0)
        mean, variance = total((p, p * q), 1)
        shift = clamp((mean - k) / tl.maximum(variance, TINY), 1.0)
        running = (tl.abs(mean - k) > SHARE * tl.sqrt(variance + SMALL)) & (tries < CENTRING)
        tries += 1
    return p, q, variance, offset


@triton.jit
def _marginals(p, q, variance, k, n, scratch, column, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """P(x_j = 1) and P(x_j = 0), given that k of n trials succeed."""
    tl.store(scratch + column, p)
    tl.debug_barrier()
    # a size that is 7√V + 6 from the mean is at most 1e-9 times as likely; no more than n + 1 sizes have to
    # be told apart
    window = 2 * tl.ceil((7 * tl.sqrt(variance) + 6) / 2) + 1
    period = tl.minimum(window.to(tl.int32), 2 * ((n + 1) // 2) + 1)
    count = tl.minimum((period + 1) // 2, MOST)
    order = tl.arange(0, FREQUENCIES)
    turn = 1 / period.to(tl.float64)
    cos, sin, less = _turn(order.to(tl.float64) * turn)
    x, y = less * 0 + 1, less * 0
    for start in range(0, n, CHUNK):
        own = tl.load(scratch + start + tl.arange(0, CHUNK))
        a, b = _product(1 - own[:, None] * less[None, :], own[:, None] * sin[None, :])
        x, y = times(x, y, a, b)
    cos_k, sin_k, _ = _turn((order * (k.to(tl.int32) % period) % period).to(tl.float64) * turn)
    x, y = times(x, y, cos_k, -sin_k)
    weight = tl.where(order < count, tl.where(order > 0, 2.0, 1.0), 0.0)
    x, y = x * weight, y * weight
    size = 1 / tl.sum(x, axis=0)
    at = scratch + BLOCK
    tl.store(at + order, x)
    tl.store(at + FREQUENCIES + order, x * cos - y * sin)
    tl.store(at + 2 * FREQUENCIES + order, x * cos + y * sin)
    tl.store(at + 3 * FREQUENCIES + order, 2 * less)
    tl.debug_barrier()
    yes, no, both = p * 0, p * 0, p * q
    for i in range(count):
        here, ahead, behind = (
            tl.load(at + i), tl.load(at + FREQUENCIES + i), tl.load(at + 2 * FREQUENCIES + i)
        )  # fmt: skip
        share = reciprocal64(1 - both * tl.load(at + 3 * FREQUENCIES + i))
        yes += (q * ahead + p * here) * share
        no += (q * here + p * behind) * share
    tl.debug_barrier()
    return p * yes * size, q * no * size


@triton.jit
def _calibrated(pi, free, k, n, fair, scratch, column, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """θ of the free units, of which k are selected, and the offset of their trials."""
    inside = tl.where(free, pi, 0.5)
    goal = tl.log(inside / (1 - inside))
    p, q, variance, offset = _trials(goal, free, k, k * 0, EXACTLY)
    goal -= offset
    spread = p * q
    # `fixed_point.calibrate_kernel` says why there are two ways to begin. Where k units are likely, the
    # odds of these to fail and of the others to succeed decide how many change places.
    odds = tl.where(free, tl.exp(-tl.abs(goal)), 0.0)
    likely = free & (goal > 0)
    above, below, sure = total(
        (tl.where(likely, odds, 0.0), tl.where(likely, 0.0, odds), tl.where(likely, 1.0, 0.0)), 1
    )
    swaps = (sure == k) & (above > 0) & (below > 0)
    up, down = tl.log(tl.where(swaps, above, 1.0)), tl.log(tl.where(swaps, below, 1.0))
    begin = tl.where(likely, 0.5 * up, -0.5 * down)
    begin = tl.where(variance >= HAJEK, (0.5 - p) / tl.maximum(variance, HAJEK), begin)
    theta = goal + begin
    move, before = goal * 0, goal * 0
    steps, offset = 0, offset * 0
    running = (variance > SETTLED) & fair
    while running:
        yes, no, size, offset = _trials(theta, free, k, offset, OFF_CENTRE)
        yes, no = _marginals(yes, no, size, k, n, scratch, column, CHUNK, BLOCK)
        known = free & (yes > 0) & (no > 0)
        residual = tl.where(known, goal - tl.log(tl.where(known, yes, 0.5) / tl.where(known, no, 0.5)), 0.0)
        error = tl.max(tl.where(free, tl.abs(yes - p), 0.0))
        greatest = tl.max(tl.abs(residual))
        turned = residual - before
        along, length = total((spread * turned * residual, spread * turned * turned), 1)
        back = tl.where((steps > 0) & (length > 0), along / tl.maximum(length, TINY), 0.0)
        move = residual - back * (move + turned)
        before = residual
        theta += move
        steps += 1
        running = ((error > NEAR) | (greatest > CLOSE)) & (steps < STEPS)
    return theta, offset


@triton.jit
def _draw(
    x_row, out_row, scratch, seed, row, n, units, k, phantom, fair,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Draw k of a row's units, of which the phantom unit is one or not. A try takes a STRIDE of numbers."""
    column = tl.arange(0, BLOCK)
    x = tl.load(x_row + column, mask=column < n, other=0.0)
    pi = tl.where(column == n, phantom, double(x))
    free = (pi > 0) & (pi < 1)
    left = k - tl.sum(tl.where(pi >= 1, 1.0, 0.0).to(tl.float64))
    theta, offset = _calibrated(pi, free, left, units, fair, scratch, column, CHUNK, BLOCK)
    p, _, _, _ = _trials(theta, free, left, offset, OFF_CENTRE_DRAW)
    tl.store(scratch + column, tl.where(pi >= 1, 1.0, p))
    tl.debug_barrier()
    pair = tl.arange(0, BLOCK // 2)
    p_even, p_odd = tl.load(scratch + 2 * pair), tl.load(scratch + 2 * pair + 1)
    even, odd = p_even < 0, p_odd < 0
    tries, size = k * 0, k * 0 - 1
    running = fair
    while running:
        u, v = uniforms(seed, row, tries * (STRIDE // 2) + pair)
        even, odd = u < p_even, v < p_odd
        size = tl.sum(even.to(tl.int32) + odd.to(tl.int32))
        tries += 1
        running = (size != k) & (tries < TRIES)
    drawn = tl.where(tl.join(even, odd), 1.0, 0.0) + tl.where(size == k, 0.0, float("nan"))
    column = columns_of(pair)
    tl.store(out_row + column, drawn.to(out_row.dtype.element_ty), mask=column < n)


@triton.jit(do_not_specialize=["n"])
def _conditional_poisson(
    x, seed_pointer, out_pointer, scratch_pointer, n, tolerance, CHUNK: tl.constexpr, NARROW: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """A row whose sum is whole has no phantom unit, for which a NARROW block is enough.

    WHOLE leaves out all other rows: for counting instructions, and for nothing else."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, NARROW)
    scratch = scratch_pointer + row * (BLOCK + 4 * FREQUENCIES)
    x_row, out_row, seed = x.pointer + row * x.stride, out_pointer + row * n, tl.load(seed_pointer)
    sums = total(moments_of(tl.load(x_row + column, mask=column < n, other=0.0)), 1)
    k, phantom, _, fair = plan_of(sums[0], sums[1], 0.0, tolerance)
    if WHOLE:
        _draw(x_row, out_row, scratch, seed, row, n, n, k, 0.0, fair, CHUNK, NARROW, BLOCK)
    elif NARROW == BLOCK:
        _draw(x_row, out_row, scratch, seed, row, n, n + 1, k, phantom, fair, CHUNK, BLOCK, BLOCK)
    elif phantom == 0:
        _draw(x_row, out_row, scratch, seed, row, n, n, k, 0.0, fair, CHUNK, NARROW, BLOCK)
    else:
        _draw(x_row, out_row, scratch, seed, row, n, n + 1, k, phantom, fair, CHUNK, BLOCK, BLOCK)


def which(n: int) -> dict[str, int]:
    """The constants of rows of n entries, with a phantom unit."""
    narrow, block = (max(32, next_power_of_2(units)) for units in (n, n + 1))
    warps = min(8, max(1, block // 32 // ENTRIES))  # more would leave a thread 128 registers
    return {"CHUNK": min(narrow, 16 * warps), "NARROW": narrow, "BLOCK": block, "num_warps": warps}


def conditional_poisson_sample(probs: Tensor, seed: Tensor, tolerance: float) -> Tensor:
    """`draws.conditional_poisson_sample`, in Triton for rows that one program holds. The calibration leaves
    an error of at most 1e-7 in π, and the samples are others than the reference's."""
    n = probs.shape[-1]
    if not probs.numel() or n > LONGEST:
        return reference.conditional_poisson_sample(probs, seed, tolerance)
    constants, rows = which(n), probs.numel() // n
    scratch = torch.empty(
        rows, constants["BLOCK"] + 4 * FREQUENCIES.value, dtype=torch.float64, device=probs.device
    )
    out = probs.new_empty(probs.shape)
    launch(_conditional_poisson, rows, layout.rows(probs, n), seed, out, scratch, n, tolerance, **constants)
    return out
