"""Uniform random numbers that depend on a seed and on where they stand, and on nothing else.

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011): a block cipher whose key is the seed and whose counter is
the row and half the column; each of its 128-bit blocks makes two numbers. So the threads that share the work,
the device, and the ranks that hold parts of the rows make no difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["cipher", "new_seed", "rand", "uniform", "uniform_kernel"]

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # of the golden ratio and √3
LOW = 0xFFFFFFFF  # 32-bit words are kept in int64, whose products wrap around as those of uint64 do


def rand(
    shape: Sequence[int], device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> Tensor:
    """float64 uniforms in (0, 1): torch.rand with threads, taking a single number from the generator."""
    return uniform(new_seed(device, generator), shape)


def new_seed(device: torch.device | str = "cpu", generator: torch.Generator | None = None) -> Tensor:
    """A seed, any int64, from torch's own random numbers; it stays on the device."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device, generator=generator)


def uniform(seed: Tensor, shape: Sequence[int], *, offset: int = 0) -> Tensor:
    """float64 uniforms in (0, 1), on the seed's device: odd multiples of 2^−53, so never 0 or 1.

    Args:
        seed: an int64 of any value; 0-dim.
        shape: (*batch, n). The number at (row, j) depends on the seed, on which row it is (the batch counted
            through in row-major order) and on the column offset + j.
        offset: the column that the first one counts as: where a part of longer rows begins.
    """
    *batch, n = shape or (1,)
    return torch.ops.khot.uniform.default(seed, math.prod(batch), n, offset).reshape(shape)


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


def cipher(counter: Sequence[Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The block of four 32-bit words for a counter of four and a key of two."""
    a, b, c, d = counter
    k, m = key
    for _ in range(ROUNDS):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (q >> 32 & LOW) ^ b ^ k, q & LOW, (p >> 32 & LOW) ^ d ^ m, p & LOW
        k, m = k + KEY_STEPS[0] & LOW, m + KEY_STEPS[1] & LOW
    return a, b, c, d
