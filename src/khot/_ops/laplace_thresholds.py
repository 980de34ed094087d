"""The thresholds of many levels of a row under Laplace's CDF, by one sort and scans (Struski et al. 2025,
section 4), in O(n log n) time and O(n) memory in both modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, by_kernel, define
from khot._kernels.reference import laplace as kernels
from khot._ops.decay_scan import scan

__all__ = ["found", "laplace_thresholds"]


def laplace_thresholds(x: Tensor, levels: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs (hi, lo) of t with C(t) = level.

    Args:
        x: (*batch, n).
        levels: (*batch, m), or (m,) for the same levels in every row.
        tau: broadcasts with batch.

    Returns:
        hi, a constant, and lo, which carries the derivatives.
    """
    hi, lo, _, _ = _laplace_thresholds(x, levels, tau)
    return hi, lo


def found(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order, hi, lo and place of the levels i − ½, with derivatives in lo."""
    hi, lo, order, place = _laplace_thresholds(x, kernels.half_levels(x), tau)
    return order, hi, lo, place


class _Rule(Rule):
    own_dims = (1, 1)
    constants = (0, 2, 3)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, levels, tau = inputs
        hi, lo, order, place = outputs
        ctx.levels_shape = levels.shape
        return x, order, hi, lo, place, tau

    @staticmethod
    def vjp(ctx: Any, _: Any, grad: Tensor, *__: Any) -> tuple[Any, ...]:
        x, order, hi, lo, place, tau = ctx.saved_tensors
        if by_kernel():
            dx, dlevels, dtau = _laplace_thresholds_backward(grad, x, order, hi, lo, place, tau)
        else:
            dx, dlevels, dtau = kernels.vjp_thresholds(grad, x, order, hi, lo, place, tau, scan)
        levels = dlevels.sum_to_size(ctx.levels_shape) if ctx.needs_input_grad[1] else None
        return dx, levels, dtau.sum_to_size(tau.shape).to(tau.dtype)

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, dlevels: Tensor | None, dtau: Tensor | None, *_: None
    ) -> tuple[None, Tensor, None, None]:
        x, order, hi, lo, place, tau = ctx.saved_tensors
        dlo = kernels.jvp_thresholds(dx, dlevels, dtau, x, order, hi, lo, place, tau, scan)
        return None, dlo, None, None


def _fake(x: Tensor, levels: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hi = levels.new_empty((*x.shape[:-1], levels.shape[-1]))
    order, place = x.new_empty(x.shape, dtype=torch.int32), hi.new_empty(hi.shape, dtype=torch.int32)
    return hi, torch.empty_like(hi), order, place


def _backward_fake(
    grad: Tensor, x: Tensor, order: Tensor, hi: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), hi.new_empty(hi.shape), hi.new_empty(hi.shape[:-1])


_laplace_thresholds = define(
    "laplace_thresholds",
    "(Tensor x, Tensor levels, Tensor tau) -> (Tensor, Tensor, Tensor, Tensor)",
    kernels.laplace_thresholds,
    _fake,
    _Rule,
)
_laplace_thresholds_backward = define(
    "laplace_thresholds_backward",
    "(Tensor grad, Tensor x, Tensor order, Tensor hi, Tensor lo, Tensor place, Tensor tau) "
    "-> (Tensor, Tensor, Tensor)",
    kernels.laplace_thresholds_backward,
    _backward_fake,
)
