"""Sampling from rows that are spread over processes: what :func:`khot.sampling.sample` does with ``group=``.

A unit's uniform depends on the seed and on the unit's place in the whole row, so that it does not matter how
the row is divided. The k largest keys are found in the same way as the hard mask of shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from khot._core import arguments, rows
from khot._core.arguments import Scalar
from khot._core.rows import Shards
from khot._kernels.reference.order_sampling import LEAST
from khot._ops import uniform as philox
from khot._ops.topk_mask import hard_mask
from khot.sampling._axes import from_end, to_dim

__all__ = ["gumbel_topk", "pareto"]


def pareto(
    probs: Tensor,
    dim: int,
    sample_shape: Sequence[int],
    generator: torch.Generator | None,
    seed: int | None,
    group: Any,
) -> Tensor:
    """The design "pareto" for shards of rows, adjusted by its formula."""

    def prepare() -> tuple[Tensor]:
        arguments.check_input(probs, "probs")
        return (arguments.check_values(arguments.rows(probs, dim).detach(), "probs", low=0, high=1),)

    shards = rows.named(group)
    assert isinstance(shards, Shards)
    (x,) = shards.agree(prepare, sample_shape=tuple(sample_shape), seed=seed)
    tolerance = sum(shards.lengths) * torch.finfo(probs.dtype).eps
    pi = x.double()
    bad = ~((pi >= 0) & (pi <= 1))
    pi = pi.masked_fill(bad, 0)
    halves = _halves(pi.device, generator, seed, shards)
    variance = pi * (1 - pi)
    total, d, bad_count, halves = shards.reduce([pi.sum(-1), variance.sum(-1), bad.sum(-1), halves])
    rest = total.ceil() - total
    phantom = rest.masked_fill((total - total.round()).abs() <= tolerance, 0)
    d = d + phantom * (1 - phantom)
    invalid = bad_count > 0
    if bool(((d < LEAST) & ~invalid).any()):
        raise ValueError(
            f"with group, probs must have a sum of π(1 − π) of at least {LEAST} in every row, because the "
            f"formula for the adjustment does not hold below, but got {d[(d < LEAST) & ~invalid][0].item()}"
        )
    if shards.rank == shards.world - 1:
        pi = torch.cat((pi, phantom.unsqueeze(-1)), -1)
    theta = torch.logit(pi) - pi * (1 - pi) * (pi - 0.5) / d.clamp(min=LEAST).square().unsqueeze(-1)
    shape = torch.Size(sample_shape)
    uniform = _uniform(halves, shape + pi.shape, shards)
    k = (total + phantom).round().expand(shape + total.shape)
    chosen = hard_mask(theta - uniform.logit_(), k, shards)
    chosen = chosen[..., : x.shape[-1]].masked_fill(invalid.unsqueeze(-1), math.nan)
    return to_dim(chosen.to(probs.dtype), probs, from_end(probs, dim))


def gumbel_topk(
    logits: Tensor,
    k: Scalar,
    dim: int,
    sample_shape: Sequence[int],
    generator: torch.Generator | None,
    seed: int | None,
    group: Any,
) -> Tensor:
    """:func:`khot.sampling.gumbel_topk` of shards."""

    def prepare() -> tuple[Tensor]:
        x = arguments.rows(logits, dim).detach()
        arguments.per_row(k, "k", x, low=0, integer=True)
        return (x,)

    shards = rows.named(group)
    assert isinstance(shards, Shards)
    (x,) = shards.agree(prepare, k=k, sample_shape=tuple(sample_shape), seed=seed)
    k = arguments.per_row(k, "k", x, low=0, high=shards.limit(x), integer=True)
    (halves,) = shards.reduce([_halves(x.device, generator, seed, shards)])
    shape = torch.Size(sample_shape) + x.shape
    exponential = _uniform(halves, shape, shards).log_().neg_()
    chosen = hard_mask(x - exponential.log_(), k, shards)
    return to_dim(chosen.to(logits.dtype), logits, from_end(logits, dim))


def _halves(
    device: torch.device, generator: torch.Generator | None, seed: int | None, shards: Shards
) -> Tensor:
    """The given seed, or rank 0's, as two halves: a sum in float64 rounds neither of them."""
    if seed is None:
        value = philox.new_seed(device, generator)
    else:
        value = torch.tensor(seed, dtype=torch.int64, device=device)
    return torch.stack((value & philox.LOW, value >> 32)) * int(shards.rank == 0)


def _uniform(halves: Tensor, shape: torch.Size, shards: Shards) -> Tensor:
    low, high = halves.long().unbind()
    return philox.uniform(high << 32 | low, shape, offset=int(sum(shards.lengths[: shards.rank])))
