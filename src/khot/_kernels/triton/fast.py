"""Arithmetic in float32 that takes few instructions, and sums of several things at once."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# NVIDIA's approximations, of one instruction each. Elsewhere the exact functions take their place.
PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# 2^x for |x| ≤ ½, interpolated at the zeros of Chebyshev's polynomial in 40 digits: within 4e-16
POWERS = tl.constexpr(
    (
        1.0, 0.69314718055995, 0.24022650695910097, 0.05550410866444772, 0.009618129107606888,
        0.0013333558230164974, 0.0001540353044173605, 1.5252657260200837e-05, 1.321544258792169e-06,
        1.0208690299958306e-07, 7.072585949269223e-09,
    )
)  # fmt: skip
SHIFT = tl.constexpr(1.5 * 2.0**52)  # added to a number, it leaves the nearest integer in the lower bits


@triton.jit
def reciprocal(x):
    """1/x to one unit in the last place; a division takes eight instructions."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def inverse_of(x):
    """1/x to the last digit."""
    guess = reciprocal(x)
    return guess * (2 - x * guess)


@triton.jit
def reciprocal64(x):
    """1/x in float64, to the last digit but one, for x from 1e-300 to 1e300: a guess with some 20 bits, and
    two steps of Newton's method. A division takes twice as many instructions."""
    if PTX:
        guess = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f64 $0, $1;", "=d,d", [x], dtype=tl.float64, is_pure=True, pack=1
        )
        guess = guess * (2 - x * guess)
        return guess * (2 - x * guess)
    else:
        return 1 / x


@triton.jit
def exp_of_minus(a):
    """e^−a of a ≥ 0 in float64, with an error of a few units in the last place, and as many more as a is; of
    a > 693 it is e^−693. tl.exp takes twice as many instructions."""
    x = tl.maximum(a * -LOG2E, -1000.0)
    shifted = x + SHIFT
    x -= shifted - SHIFT
    y = x * POWERS[10] + POWERS[9]
    for i in tl.static_range(9):
        y = y * x + POWERS[8 - i]
    bits = y.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def log2(x):
    """log₂ x with an absolute error of 2⁻²², for guesses; tl.log2 takes 22 instructions."""
    if PTX:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def with_sign(x, v):
    """|x| with the sign of v, in one instruction."""
    sign = v.to(tl.int32, bitcast=True) & -0x80000000
    return ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)


@triton.jit
def half_with_sign(v):
    """±½ with the sign of v: summed, they count."""
    sign = v.to(tl.int32, bitcast=True) & -0x80000000
    return (sign | 0x3F000000).to(tl.float32, bitcast=True)


@triton.jit
def fma(a, b, c):
    """a·b + c of float32 numbers, rounded once, which Triton's interpreter would round twice."""
    if INTERPRETED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def two_sum(a, b):
    """a + b, rounded, and what rounding took from it (Knuth)."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


@triton.jit
def plus_exactly(sums, lows, values):
    """Sums with what rounding took from them, once the values are added."""
    sums, low = two_sum(sums, values)
    return sums, lows + low


@triton.jit
def _add_pairs(a, a_low, b, b_low):
    s, low = two_sum(a, b)
    return s, (a_low + b_low) + low


@triton.constexpr_function
def halvings(size):
    return size.bit_length() - 1


@triton.jit
def exact_total(sums, lows):
    """The total of a vector of such sums, and its low part: exact but for rounding of this."""
    if INTERPRETED:  # its reduction by a function takes a call for each entry
        for _ in tl.static_range(halvings(sums.shape[0])):
            a, b = tl.split(tl.reshape(sums, (sums.shape[0] // 2, 2)))
            a_low, b_low = tl.split(tl.reshape(lows, (lows.shape[0] // 2, 2)))
            sums, lows = _add_pairs(a, a_low, b, b_low)
        return tl.sum(sums, axis=0), tl.sum(lows, axis=0)
    else:
        return tl.reduce((sums, lows), 0, _add_pairs)


@triton.jit
def half_of(word, upper: tl.constexpr, DTYPE: tl.constexpr):
    """The lower or upper half of a word as a number of this half precision, in float32.

    An instruction with an effect stays where it is. Otherwise the compiler takes all words apart ahead of a
    loop, and each number has a register for itself.
    """
    if not PTX:
        return (word >> (16 * upper)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    else:
        half: tl.constexpr = "hi" if upper else "lo"
        convert: tl.constexpr = "{.reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, " + half + ";}"
        shift: tl.constexpr = "and.b32 $0, $1, 0xffff0000;" if upper else "shl.b32 $0, $1, 16;"
        code: tl.constexpr = shift if tl.bfloat16 == DTYPE else convert
        return tl.inline_asm_elementwise(code, "=r,r", [word], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def word_of(lower, upper, DTYPE: tl.constexpr):
    """Two numbers of float32, rounded to this half precision, as the halves of a word."""
    low = lower.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (upper.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def double(x):
    """In float64, which half precision reaches through float32."""
    return x.to(tl.float32).to(tl.float64) if x.dtype != tl.float64 else x


@triton.jit
def store(at, value, mask):
    """What :func:`double` is on the way back: half precision is reached through float32."""
    if at.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)
    tl.store(at, value.to(at.dtype.element_ty), mask=mask)


@triton.jit
def in_two(value):
    """A float64 number as two of float32."""
    high = value.to(tl.float32)
    return high, (value - high.to(tl.float64)).to(tl.float32)


@triton.jit
def joined(high, low):
    """The float64 number that two of float32 make."""
    return tl.zeros((), tl.float64) + high + low


# ------------------------------------------------------------------------------------ rows and entries
#
# A program that holds one row keeps the row's numbers as scalars: tensors of one element cost a trip through
# shared memory whenever they meet the entries.


@triton.jit
def wide(v, TOGETHER: tl.constexpr):
    """Numbers of rows, so that they broadcast with the rows' entries."""
    if TOGETHER == 1:
        return v
    else:
        return v[:, None]


@triton.jit
def before(column, n, TOGETHER: tl.constexpr):
    """Which columns rows of n entries have."""
    if TOGETHER == 1:
        return column < n
    else:
        return (column < n)[None, :]


@triton.constexpr_function
def always(i, ragged):
    """Whether there are entries in the i-th piece of a tile, whatever the lengths of its rows are."""
    return i == 0 or not ragged


@triton.jit
def reached(i: tl.constexpr, n, T: tl.constexpr):
    """Whether one of the rows of a ragged tile reaches the i-th piece."""
    return tl.max(n[1]) > i * T.width


@triton.jit
def any_row(flag, TOGETHER: tl.constexpr):
    """Whether the flag is up for any of the program's rows."""
    if TOGETHER == 1:
        return flag
    else:
        return tl.sum(tl.where(flag, 1, 0)) > 0


@triton.jit
def plus(a, b):
    """The sums of two tuples' members; of nothing and a tuple, the tuple.

    One number is no tuple: of tuples with one member Triton 3.6 makes one with both.
    """
    tl.static_assert(len(b) > 1)
    if len(a) == 0:
        return b
    else:
        sums = ()
        for i in tl.static_range(len(b)):
            sums = sums + (a[i] + b[i],)  # type: ignore[assignment]  # noqa: RUF005
        return sums


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def _add7(a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, b5, b6):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6


@triton.jit
def _add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def total(terms, TOGETHER: tl.constexpr):
    """The members of a tuple, each summed over its row, all in one reduction."""
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    if INTERPRETED:  # its reduction adds one after another, and loses digits that the device's keeps
        sums = ()
        for i in tl.static_range(len(terms)):
            sums = sums + (tl.sum(terms[i], axis=AXIS),)  # type: ignore[assignment]  # noqa: RUF005
        return sums
    elif len(terms) == 1:
        return (tl.sum(terms[0], axis=AXIS),)
    elif len(terms) == 2:
        return tl.reduce(terms, AXIS, _add2)
    elif len(terms) == 3:
        return tl.reduce(terms, AXIS, _add3)
    elif len(terms) == 4:
        return tl.reduce(terms, AXIS, _add4)
    elif len(terms) == 5:
        return tl.reduce(terms, AXIS, _add5)
    elif len(terms) == 6:
        return tl.reduce(terms, AXIS, _add6)
    elif len(terms) == 7:
        return tl.reduce(terms, AXIS, _add7)
    else:
        return tl.reduce(terms, AXIS, _add8)
