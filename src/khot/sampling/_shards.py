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

from khot import sharded
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._kernels.reference import philox
from khot._kernels.sharded import Shards, topk_mask
from khot.sampling._axes import from_end, to_dim
from khot.sampling._designs.pareto import LEAST

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

    groups = sharded.groups_of(group)
    (rows,), lengths = sharded.agreed(groups, prepare, None, None, f"{tuple(sample_shape)}, seed={seed}")
    shards = Shards(sharded.names(groups))
    tolerance = sum(lengths) * torch.finfo(probs.dtype).eps
    pi = rows.double()
    bad = ~((pi >= 0) & (pi <= 1))
    pi = pi.masked_fill(bad, 0)
    halves = _halves(pi.device, generator, seed, shards)
    variance = pi * (1 - pi)
    total, d, bad_count, halves = shards([pi.sum(-1), variance.sum(-1), bad.sum(-1), halves])
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
    uniform = _uniform(halves, shape + pi.shape, lengths, shards)
    k = (total + phantom).round().expand(shape + total.shape)
    chosen, _ = topk_mask(theta - uniform.logit_(), k, sharded.names(groups))
    chosen = chosen[..., : rows.shape[-1]].masked_fill(invalid.unsqueeze(-1), math.nan)
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

    groups = sharded.groups_of(group)
    (x,), lengths = sharded.agreed(groups, prepare, k, None, f"{tuple(sample_shape)}, seed={seed}")
    k = arguments.per_row(k, "k", x, low=0, high=sum(lengths), integer=True)
    shards = Shards(sharded.names(groups))
    (halves,) = shards([_halves(x.device, generator, seed, shards)])
    shape = torch.Size(sample_shape) + x.shape
    exponential = _uniform(halves, shape, lengths, shards).log_().neg_()
    chosen = sharded.hard_mask(x - exponential.log_(), k, groups)
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


def _uniform(halves: Tensor, shape: torch.Size, lengths: list[float], shards: Shards) -> Tensor:
    low, high = halves.long().unbind()
    return philox.uniform(high << 32 | low, shape, offset=int(sum(lengths[: shards.rank])))
