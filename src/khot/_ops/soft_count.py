"""The soft count at many levels of a row. Derivatives recompute it, some levels at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._core import rows
from khot._core.dispatch import Rule, define, gradient
from khot._core.precision import wide_dtype
from khot._core.rows import HERE, Row
from khot._kernels.reference import soft_count as kernels
from khot._kernels.reference.soft_count import jvp_count
from khot.cdfs import CDF

__all__ = ["count_above"]


def count_above(
    x: Tensor, at: Tensor, tau: Tensor, cdf: CDF, centred: bool = False, row: Row = HERE
) -> Tensor:
    """C(b) at every level of a row, in the wide dtype; at one level for all rows in x's dtype.

    Args:
        x: (*batch, n).
        at: (*batch, m); or, for x on another device than the CPU, one level for all rows: 0-dim and a
            constant, whose counts are (*batch).
        tau: broadcasts with batch.
        centred: shift F to the median 0; every score, finite or not, then counts itself as ½.
        row: says whether x is the whole rows or a shard of them; the levels are the same on every process.
    """
    count: Tensor = _soft_count.on(row.name, cdf)(x, at, tau, *cdf.key, centred)
    return count


class _Rule(Rule):
    own_dims = (1, 1)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Tensor) -> tuple[Tensor, ...]:
        x, at, tau, *ctx.key, ctx.centred = inputs
        ctx.cdf = cdfs.resolve(*ctx.key)
        return x, at, tau

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        x, at, tau = ctx.saved_tensors
        dx, dat, dtau = _soft_count_backward.pull(
            grad, x, at, tau, *ctx.key, ctx.centred, group=ctx.group, cdf=ctx.cdf
        )
        if not at.dim():
            dat = None
        return dx, dat, gradient(ctx, 2, dtau, tau.shape, tau.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dat: Tensor | None, dtau: Tensor | None, *_: None) -> Tensor:
        return jvp_count((dx, dat, dtau), ctx.saved_tensors, ctx.cdf, ctx.centred, rows.of(ctx.group))


def _fake(x: Tensor, at: Tensor, tau: Tensor, cdf: str, shape: float, centred: bool) -> Tensor:
    counts, dtype = kernels.like_counts(x, at)
    return x.new_empty(counts, dtype=dtype)


def _backward_fake(grad: Tensor, x: Tensor, at: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dat = x.new_empty(kernels.like_counts(x, at)[0], dtype=at.dtype)
    return x.new_empty(x.shape), dat, x.new_empty(x.shape[:-1], dtype=wide_dtype(x.device))


_soft_count = define("soft_count", kernels.soft_count, _fake, _Rule, spread=True)
_soft_count_backward = define("soft_count_backward", kernels.soft_count_backward, _backward_fake, spread=True)

torch.library.define(
    "khot::soft_count_vjp", "(Tensor grad, Tensor x, float at, float tau, str cdf, float shape) -> Tensor"
)


@torch.library.impl("khot::soft_count_vjp", "CompositeImplicitAutograd")
def _differentiable(grad: Tensor, x: Tensor, at: float, tau: float, cdf: str, shape: float) -> Tensor:
    """The gradient of x, for plain calls (:mod:`khot._core.eager`) that are differentiated twice."""
    level = torch.full((*x.shape[:-1], 1), at, dtype=wide_dtype(x.device))
    scale = torch.full((), tau, dtype=wide_dtype(x.device))
    return kernels.soft_count_backward(grad.unsqueeze(-1), x, level, scale, cdf, shape, False)[0]
