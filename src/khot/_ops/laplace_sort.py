"""The sorted row softened by Laplace's CDF: the thresholds of the levels i − ½.

It saves only x and its order; the derivatives compute the thresholds again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, by_kernel, define
from khot._core.precision import wide_dtype, widen
from khot._kernels.reference import laplace as kernels
from khot._ops.decay_scan import scan
from khot._ops.laplace_thresholds import found

__all__ = ["laplace_sort"]


def laplace_sort(x: Tensor, tau: Tensor, descending: bool) -> Tensor:
    """The thresholds of the levels i − ½, in x's dtype and in either order.

    Args:
        x: (*batch, n).
        tau: broadcasts with batch.
    """
    t: Tensor = _laplace_sort(x, tau, descending)[0]
    return t


class _Rule(Rule):
    constants = (1,)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        x, tau, ctx.descending = inputs
        return x, outputs[1], tau

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
        x, order, tau = ctx.saved_tensors
        if by_kernel():
            dx, dtau = _laplace_sort_backward(grad, x, order, tau, ctx.descending, ctx.needs_input_grad[1])
        else:
            v = widen(grad if ctx.descending else grad.flip(-1))
            dx, _levels, dtau = kernels.vjp_thresholds(v, x, *found(x, tau), tau, scan)
        return dx, dtau.sum_to_size(tau.shape).to(tau.dtype), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dtau: Tensor | None, *_: None) -> tuple[Tensor, None]:
        x, _order, tau = ctx.saved_tensors
        out = kernels.jvp_thresholds(dx, None, dtau, x, *found(x, tau), tau, scan).to(x.dtype)
        return out if ctx.descending else out.flip(-1), None


def _fake(x: Tensor, tau: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int32)


def _backward_fake(grad: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide_dtype(x.device))


_laplace_sort = define(
    "laplace_sort",
    "(Tensor x, Tensor tau, bool descending) -> (Tensor, Tensor)",
    kernels.laplace_sort,
    _fake,
    _Rule,
)
_laplace_sort_backward = define(
    "laplace_sort_backward",
    "(Tensor grad, Tensor x, Tensor order, Tensor tau, bool descending, bool want_tau) -> (Tensor, Tensor)",
    kernels.laplace_sort_backward,
    _backward_fake,
)
