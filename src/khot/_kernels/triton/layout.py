"""How rows are laid out over programs, and what the host passes to the kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot import cdfs

RESIDENT = 32768  # entries of a row that stay on chip
TOGETHER = 1024  # entries of short rows that share a program
CHUNK = 4096  # entries of a long row that a program holds at a time
PROGRAMS = 1024  # about as many as fill a large device several times over


def block(n: int) -> tuple[int, int, int]:
    """Of a resident row: the width it is padded to, rows in a program, warps."""
    width = triton.next_power_of_2(n)
    return width, max(1, TOGETHER // width), min(16, max(4, width // 1024))


def parts(rows: int, n: int) -> tuple[int, int]:
    """Into how many parts a long row is cut, and their length: enough programs to fill a device."""
    parts = min(triton.cdiv(n, CHUNK), max(1, PROGRAMS // rows))
    length = triton.cdiv(triton.cdiv(n, parts), CHUNK) * CHUNK
    return triton.cdiv(n, length), length


def rows(x: Tensor, n: int) -> tuple[Tensor, int]:
    """The rows of x one after another, and the distance between them."""
    flat = x.reshape(-1, n)
    if n > 1 and flat.stride(1) != 1:
        flat = flat.contiguous()
    return flat, flat.stride(0)


def numbers(value: Tensor, batch: torch.Size) -> tuple[Tensor, int]:
    """A number a row, likewise."""
    if value.numel() == 1:
        return value, 0
    return value.expand(batch).contiguous(), 1


def power(F: cdfs.CDF) -> float:
    """1/(p − 1), the exponent of z."""
    return 1 / (F.shape - 1) if F.shape else 1.0


def compute(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
