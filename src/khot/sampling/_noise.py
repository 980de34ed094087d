"""Gumbel noise."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from khot._core.precision import on_cpu
from khot._core.torch_internals import vmap_changes_draws
from khot._ops import uniform as philox

__all__ = ["gumbel_noise"]


@on_cpu
def gumbel_noise(like: Tensor, *, generator: Generator | None = None) -> Tensor:
    """Gumbel(0, 1) numbers of the shape, dtype and device of a tensor.

    They are drawn in float64: with the 24 bits of float32 the largest of 10⁷ numbers would often be a tie.
    """
    if not torch.compiler.is_compiling() and vmap_changes_draws(like):
        # vmap cannot fill a tensor in place that it does not map over
        uniform = philox.rand(like.shape, like.device, generator)
        return uniform.log().neg().log().neg().to(like.dtype)
    noise = torch.empty_like(like, dtype=torch.float64, requires_grad=False)
    return noise.exponential_(generator=generator).log_().neg_().to(like.dtype)
