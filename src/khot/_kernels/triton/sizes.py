"""Sizes of blocks and grids. Triton's own functions for them can be compiled, which makes a call on the host
cost as much as two launches."""

from __future__ import annotations


def cdiv(n: int, size: int) -> int:
    """How many pieces of a size hold n."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is at least n > 0."""
    return 1 << (n - 1).bit_length()
