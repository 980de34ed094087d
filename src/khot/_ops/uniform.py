"""Uniform random numbers that depend only on a seed and on their position: see the reference kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import define
from khot._kernels.reference import philox as kernels

__all__ = ["LOW", "new_seed", "rand", "uniform"]

LOW = kernels.LOW


def rand(
    shape: Sequence[int], device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> Tensor:
    """float64 uniforms in (0, 1): torch.rand with threads, and with one draw from the generator."""
    return uniform(new_seed(device, generator), shape)


def new_seed(device: torch.device | str = "cpu", generator: torch.Generator | None = None) -> Tensor:
    """A seed, any int64, from torch's own random numbers; it stays on the device."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device, generator=generator)


def uniform(seed: Tensor, shape: Sequence[int], *, offset: int = 0) -> Tensor:
    """float64 uniforms in (0, 1), on the seed's device: odd multiples of 2^−53, so never 0 or 1.

    Args:
        seed: an int64 of any value; 0-dim.
        shape: (*batch, n). The number at (row, j) depends on the seed, on which row it is (the batch counted
            in row-major order) and on the column offset + j.
        offset: the index of the first column, for a part of longer rows.
    """
    *batch, n = shape or (1,)
    numbers: Tensor = _uniform(seed, math.prod(batch), n, offset)
    return numbers.reshape(shape)


def _fake(seed: Tensor, rows: int, n: int, offset: int) -> Tensor:
    return seed.new_empty((rows, n), dtype=torch.float64)


_uniform = define("uniform", kernels.uniform_kernel, _fake)


def _batch(info: Any, in_dims: tuple[Any, ...], seed: Tensor, *args: int) -> tuple[Tensor, int]:
    """The rule of vmap: a seed for each, which is what torch draws with ``randomness="different"``."""
    return torch.stack([_uniform(one, *args) for one in seed.unbind(in_dims[0])]), 0


torch.library.register_vmap("khot::uniform", _batch)
