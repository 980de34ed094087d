"""Large results in parts, whose intermediate results are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from khot._core.torch_internals import is_exporting, transforms_are_on

__all__ = ["in_parts"]

# A part has about so many intermediate entries: on a CPU they stay in the cache, on another device each part
# has all its launches.
PART, PART_OF_DEVICE = 1 << 20, 1 << 25
# A compiled graph has at most so many parts, because each is a copy of the same code.
COMPILED_PARTS = 16


def in_parts(
    part: Callable[[int, int], Tensor],
    length: int,
    entries: int,
    device: torch.device,
    *,
    least: int = 1,
    dim: int = -2,
    preserve_rng_state: bool = False,
) -> Tensor:
    """The results of ``part(start, stop)`` for successive pieces of range(length), joined along dim.

    Args:
        part: keeps no more than ``entries`` intermediate entries for each of its stop - start items.
        length: of the range. Under torch.func's transforms and in exported programs there is one piece.
        entries: intermediate entries for each item.
        device: on which they are.
        least: items that a piece has at least.
        dim: of ``part``'s results.
        preserve_rng_state: whether ``part`` draws random numbers.
    """
    most = PART if device.type == "cpu" else PART_OF_DEVICE
    size = max(most // max(1, entries), least, 1)
    if torch.compiler.is_compiling():
        size = max(size, -(-length // COMPILED_PARTS))
    if size >= length or transforms_are_on() or is_exporting():
        return part(0, length)
    pieces = [
        checkpoint(
            part, start, min(start + size, length), use_reentrant=False, preserve_rng_state=preserve_rng_state
        )
        for start in range(0, length, size)
    ]
    return torch.cat(pieces, dim)
