"""Draws where Python cannot see the values of tensors: under torch.compile, and under torch.func.vmap.

The designs look at values: to find rows that need a phantom unit, or to repeat rejected draws. There a draw
is one registered operator, whose kernel does what a draw does in eager mode. In a trace the kernel draws from
the global generator when the compiled function runs, and so gives what eager mode gives after the same
torch.manual_seed. Under vmap it gets a seed, which torch draws by vmap's rule for ``randomness``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from khot._core.torch_internals import vmap_changes_draws
from khot._ops import uniform as philox

__all__ = ["operator", "values_are_hidden"]


def values_are_hidden(rows: Tensor) -> bool:
    """Whether a draw from these rows has to be one registered operator."""
    return torch.compiler.is_compiling() or vmap_changes_draws(rows)


def operator(name: str, arguments: str, draw: Callable[..., Tensor], dtype: torch.dtype | None) -> Any:
    """Register a draw of rows (*batch, n) as ``khot::<name>``, and return the function that calls it.

    Args:
        name: the name after ``khot::``.
        arguments: those after the rows, in torch's schema language.
        draw: (rows, *arguments, sample_shape, generator) -> (*sample_shape, *batch, n).
        dtype: of the result; None for that of the rows.
    """
    full = f"khot::{name}"
    schema = f"(Tensor rows, {arguments}, SymInt[] sample_shape, Tensor? seed) -> Tensor"
    torch.library.define(full, schema, tags=(torch.Tag.nondeterministic_seeded,))
    overload = getattr(torch.ops.khot, name).default

    def kernel(rows: Tensor, *args: Any) -> Tensor:
        *options, sample_shape, seed = args
        generator = None if seed is None else torch.Generator(rows.device).manual_seed(int(seed))
        return draw(rows, *options, sample_shape, generator).clone(memory_format=torch.contiguous_format)

    def fake(rows: Tensor, *args: Any) -> Tensor:
        return rows.new_empty((*args[-2], *rows.shape), dtype=dtype or rows.dtype)

    def batch(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        parts = []
        for i in range(info.batch_size):
            pairs = zip(args, in_dims, strict=True)
            parts.append(overload(*(a.select(d, i) if isinstance(d, int) else a for a, d in pairs)))
        return torch.stack(parts), 0

    torch.library.impl(full, "CompositeExplicitAutograd")(kernel)
    torch.library.register_fake(full, fake)
    torch.library.register_vmap(full, batch)

    def call(
        rows: Tensor, *options: Any, sample_shape: Sequence[int], generator: torch.Generator | None
    ) -> Tensor:
        seed = None
        if generator is not None or not torch.compiler.is_compiling():
            # in a trace, torch says that it cannot take a generator
            seed = philox.new_seed(rows.device, generator)
        drawn: Tensor = overload(rows, *options, list(sample_shape), seed)
        return drawn

    return call
