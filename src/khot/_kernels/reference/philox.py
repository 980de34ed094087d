"""Uniform random numbers that depend on a seed and on their position, and on nothing else.

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011): a block cipher whose key is the seed and whose counter is
the row and half the column; each of its 128-bit blocks gives two numbers. So the result does not depend on
the threads that share the work, on the device, or on the ranks that hold parts of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "KEY_STEPS",
    "LOW",
    "MULTIPLIERS",
    "ROUNDS",
    "cipher",
    "uniform",
    "uniform_at",
    "uniform_kernel",
]

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # from the golden ratio and √3
LOW = 0xFFFFFFFF  # 32-bit words are kept in int64, whose products wrap around as those of uint64 do


def uniform(seed: Tensor, shape: Sequence[int], *, offset: int = 0) -> Tensor:
    """:func:`uniform_kernel` for any shape; its last dimension is that of the columns."""
    *batch, n = shape
    return uniform_kernel(seed, math.prod(batch), n, offset).reshape(shape)


def uniform_kernel(seed: Tensor, rows: int, n: int, offset: int) -> Tensor:
    """The reference of khot::uniform, (rows, n)."""
    device = seed.device
    first, last = offset // 2, (offset + n + 1) // 2
    block = torch.arange(first, last, device=device)
    row = torch.arange(rows, device=device).unsqueeze(-1)
    counter = torch.broadcast_tensors(block & LOW, block >> 32 & LOW, row & LOW, row >> 32 & LOW)
    a, b, c, d = cipher(counter, (seed & LOW, seed >> 32 & LOW))
    bits = torch.stack((b << 20 | a >> 12, d << 20 | c >> 12), -1).flatten(-2)
    return bits[:, offset % 2 : offset % 2 + n].double().add_(0.5).mul_(2.0**-52)


def uniform_at(seed: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """The numbers of these rows and columns, int64 tensors that broadcast."""
    block = column // 2
    counter = torch.broadcast_tensors(block & LOW, block >> 32 & LOW, row & LOW, row >> 32 & LOW)
    a, b, c, d = cipher(counter, (seed & LOW, seed >> 32 & LOW))
    bits = torch.where(column % 2 == 0, b << 20 | a >> 12, d << 20 | c >> 12)
    return bits.double().add_(0.5).mul_(2.0**-52)


def cipher(counter: Sequence[Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The block of four 32-bit words for a counter of four and a key of two."""
    a, b, c, d = counter
    k, m = key
    for _ in range(ROUNDS):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (q >> 32 & LOW) ^ b ^ k, q & LOW, (p >> 32 & LOW) ^ d ^ m, p & LOW
        k, m = k + KEY_STEPS[0] & LOW, m + KEY_STEPS[1] & LOW
    return a, b, c, d
