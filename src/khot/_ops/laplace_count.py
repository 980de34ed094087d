"""The soft count at many levels of a row under Laplace's CDF, by one sort and scans (Struski et al. 2025,
Theorem 4.1), in O((n + m) log n) time and O(n + m) memory in both modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, by_kernel, define
from khot._core.precision import wide_dtype
from khot._kernels.reference import laplace as kernels
from khot._ops.decay_scan import scan

__all__ = ["laplace_count"]


def laplace_count(x: Tensor, levels: Tensor, tau: Tensor) -> Tensor:
    """C(b) at every level b of a row.

    Args:
        x: (*batch, n) with n > 0.
        levels: (*batch, m).
        tau: broadcasts with batch.
    """
    count: Tensor = _laplace_count(x, levels, tau)[0]
    return count


class _Rule(Rule):
    own_dims = (1, 1)
    constants = (1, 2)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, levels, tau = inputs
        _, order, place = outputs
        return x, order, levels, place, tau

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        x, order, levels, place, tau = ctx.saved_tensors
        if by_kernel():
            dx, dlevels, dtau = _laplace_count_backward(grad, x, order, levels, place, tau)
        else:
            dx, dlevels, dtau = kernels.vjp_count(grad, x, order, levels, place, tau, scan)
        dlevels = dlevels.sum_to_size(levels.shape).to(levels.dtype)
        return dx, dlevels, dtau.sum_to_size(tau.shape).to(tau.dtype)

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, dlevels: Tensor | None, dtau: Tensor | None, *_: None
    ) -> tuple[Tensor, None, None]:
        x, order, levels, place, tau = ctx.saved_tensors
        return kernels.jvp_count(dx, dlevels, dtau, x, order, levels, place, tau, scan), None, None


def _fake(x: Tensor, levels: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = x.new_empty((*x.shape[:-1], levels.shape[-1]), dtype=wide_dtype(x.device))
    order, place = x.new_empty(x.shape, dtype=torch.int32), count.new_empty(count.shape, dtype=torch.int32)
    return count, order, place


def _backward_fake(
    grad: Tensor, x: Tensor, order: Tensor, levels: Tensor, place: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    wide = wide_dtype(x.device)
    levels = x.new_empty(place.shape, dtype=wide)
    return x.new_empty(x.shape), levels, x.new_empty(x.shape[:-1], dtype=wide)


_laplace_count = define(
    "laplace_count",
    "(Tensor x, Tensor levels, Tensor tau) -> (Tensor, Tensor, Tensor)",
    kernels.laplace_count,
    _fake,
    _Rule,
)
_laplace_count_backward = define(
    "laplace_count_backward",
    "(Tensor grad, Tensor x, Tensor order, Tensor levels, Tensor place, Tensor tau) "
    "-> (Tensor, Tensor, Tensor)",
    kernels.laplace_count_backward,
    _backward_fake,
)
