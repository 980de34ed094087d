"""The ranks of a row softened by Laplace's CDF, by one sort and scans, in O(n log n) time in both modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, by_kernel, define
from khot._core.precision import wide_dtype
from khot._kernels.reference import laplace as kernels
from khot._ops.decay_scan import scan

__all__ = ["laplace_rank"]


def laplace_rank(x: Tensor, tau: Tensor) -> Tensor:
    """r_i = ½ + Σ_j F((x_j − x_i)/τ), 1 for the largest.

    Args:
        x: (*batch, n).
        tau: broadcasts with batch.
    """
    rank: Tensor = _laplace_rank(x, tau)[0]
    return rank


class _Rule(Rule):
    constants = (1,)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        x, tau = inputs
        return x, outputs[1], tau

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        x, order, tau = ctx.saved_tensors
        if by_kernel():
            dx, dtau = _laplace_rank_backward(grad, x, order, tau)
        else:
            dx, dtau = kernels.vjp_rank(grad, x, order, tau, scan)
        return dx, dtau.sum_to_size(tau.shape).to(tau.dtype)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dtau: Tensor | None, *_: None) -> tuple[Tensor, None]:
        x, order, tau = ctx.saved_tensors
        return kernels.jvp_rank(dx, dtau, x, order, tau, scan), None


def _fake(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int32)


def _backward_fake(grad: Tensor, x: Tensor, order: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide_dtype(x.device))


_laplace_rank = define(
    "laplace_rank", "(Tensor x, Tensor tau) -> (Tensor, Tensor)", kernels.laplace_rank, _fake, _Rule
)
_laplace_rank_backward = define(
    "laplace_rank_backward",
    "(Tensor grad, Tensor x, Tensor order, Tensor tau) -> (Tensor, Tensor)",
    kernels.laplace_rank_backward,
    _backward_fake,
)
