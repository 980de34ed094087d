"""The dim along which the units lie: moved to the end for the computation, and back afterwards.

The dim is counted from the end, so that the same number holds for a result with more dims in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from khot._core import arguments

__all__ = ["check_sample_shape", "from_end", "to_dim", "to_last", "to_pair"]


def from_end(input: Tensor, dim: int, name: str = "logits") -> int:
    """dim as a negative number, checked, as is the input; a 0-dim input counts as one with one entry."""
    arguments.check_input(input, name)
    return arguments.check_dim(input, dim) - max(input.dim(), 1)


def check_sample_shape(sample_shape: Any) -> None:
    """Raise unless it is a sequence of sizes."""
    if not isinstance(sample_shape, Sequence):
        raise TypeError(
            f"sample_shape must be a sequence of ints, such as (3,) or a torch.Size, but got "
            f"{type(sample_shape).__name__}"
        )
    for size in sample_shape:
        arguments.check_integer(size, "each size in sample_shape", low=0)


def to_last(input: Tensor, dim: int) -> Tensor:
    """The input with the units along the last dim; a 0-dim input becomes a row of one unit."""
    if not input.dim():
        return input.reshape(1)
    return input if dim == -1 else input.movedim(dim, -1)


def to_dim(result: Tensor, input: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`to_last`, for a result with any number of additional dims in front."""
    if not input.dim():
        return result.squeeze(-1)
    return result if dim == -1 else result.movedim(-1, dim)


def to_pair(result: Tensor, dim: int) -> Tensor:
    """The last two dims of a result (*batch, n, n) moved to where the input had its dim."""
    return result if dim == -1 else result.movedim((-2, -1), (dim - 1, dim))
