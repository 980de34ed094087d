"""Gumbel top-k: weighted sampling without replacement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import on_cpu
from khot._core.ways import by_lengths
from khot._ops import uniform as philox
from khot.masks import topk_mask
from khot.sampling import _shards
from khot.sampling._axes import check_sample_shape, from_end, to_dim

__all__ = ["gumbel_topk"]


@by_lengths
@on_cpu
def gumbel_topk(
    logits: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    sample_shape: Sequence[int] = (),
    generator: torch.Generator | None = None,
    group: Any = None,
    seed: int | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Weighted sampling without replacement: k draws, each ∝ exp(logits) among the units that are left.

    The k largest of logits + Gumbel noise. The inclusion probabilities have no tractable form, and they are
    not the ones that exp(logits) might suggest; use :func:`sample` to prescribe them.

    Args:
        logits: of any floating-point dtype. Units with −inf are never selected, units with +inf always.
        k: how many, an integer; a number or a tensor that broadcasts with the batch shape (the shape of
            logits without ``dim``).
        dim: the dimension along which the units lie.
        sample_shape: shape of the draws for each row.
        generator: the source of randomness, on the device of logits.
        group, seed: as for :func:`sample`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones in logits' dtype, of shape sample_shape + logits.shape. A row with a NaN is NaN.
        Not differentiable.

    Raises:
        ValueError: k that is not an integer in [0, number of units that may be selected], a negative size in
            sample_shape.
        TypeError: logits that are not a floating-point tensor, a sample_shape that is not a sequence of ints.
        IndexError: dim out of range.

    Source: Kool, van Hoof, Welling 2019, section 3.

    Example:
        >>> khot.sampling.gumbel_topk(torch.tensor([0.0, 200.0, 100.0, -100.0]), 2)
        tensor([0., 1., 1., 0.])
    """
    check_sample_shape(sample_shape)
    arguments.check_input(logits, "logits")
    if group is not None:
        return _shards.gumbel_topk(logits, k, dim, sample_shape, generator, seed, group)
    if seed is not None:
        raise ValueError("seed is used only together with group; without a group, pass a generator")
    x = arguments.rows(logits, dim).detach()
    k = arguments.per_row(k, "k", x, low=0, high=x.shape[-1], integer=True)
    shape = torch.Size(sample_shape) + x.shape
    exponential = philox.rand(shape, x.device, generator).log_().neg_()
    chosen = topk_mask(x - exponential.log_(), k)
    return to_dim(chosen.to(logits.dtype), logits, from_end(logits, dim))
