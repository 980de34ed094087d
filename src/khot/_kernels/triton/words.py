"""Rows of half precision that stay on chip two entries to a register.

Neighbours make a word of 32 bits, the first of them its lower half. A word is taken apart wherever an entry
is used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from khot._kernels.triton.fast import half_of

WORD = tl.constexpr(tl.pointer_type(tl.int32))
# two entries of −∞
LEAST16 = tl.constexpr(0xFC00FC00 - (1 << 32))
LEAST_BF16 = tl.constexpr(0xFF80FF80 - (1 << 32))


@triton.jit
def load_words(at, n, T: tl.constexpr):
    """The n entries of the row at `at`, an even number: `PIECES` pieces, held as half as many of words."""
    PIECES: tl.constexpr = T.pieces
    least: tl.constexpr = LEAST16 if at.dtype.element_ty == tl.float16 else LEAST_BF16
    words = at.to(WORD, bitcast=True)
    column = tl.arange(0, T.width)
    x = ()
    for i in tl.static_range(PIECES // 2):
        if T.full:
            held = tl.load(words + (column + i * T.width))
        else:
            held = tl.load(words + (column + i * T.width), mask=column + i * T.width < n // 2, other=least)
        x = x + (held,)  # type: ignore[assignment]  # noqa: RUF005
    return x


@triton.jit
def piece(x, i: tl.constexpr, at, PIECES: tl.constexpr):
    """The i-th of the `PIECES` pieces of entries that x holds, one or two of them to a register; their dtype
    in memory is that of what is at `at`."""
    if len(x) == PIECES:
        return x[i]
    else:
        return half_of(x[i // 2], i % 2, at.dtype.element_ty)


@triton.jit
def columns(x, i: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """Where the entries of the i-th piece are in their row."""
    if len(x) == PIECES:
        return tl.arange(0, WIDTH) + i * WIDTH
    else:
        return 2 * (tl.arange(0, WIDTH) + i // 2 * WIDTH) + i % 2
