"""The scan behind the sorted Laplace count. Both modes of its derivative are scans again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, define
from khot._kernels.reference import laplace as kernels

__all__ = ["scan"]


def scan(w: Tensor, g: Tensor, reverse: bool) -> Tensor:
    """out_i = e^(−g_i)·(out_(i−1) + w_(i−1)), differentiable; see the reference kernel."""
    # Not broadcast_tensors, which the vmap of torch.autograd.functional lacks. torch takes as long to find a
    # common shape as to scan a short row.
    shape = w.shape if w.shape == g.shape else torch.broadcast_shapes(w.shape, g.shape)
    out: Tensor = _decay_scan(w.expand(shape), g.expand(shape), reverse)
    return out


class _Rule(Rule):
    own_dims = (1, 1)
    plain = True  # its derivatives are scans again, so an expansion would not end

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Tensor) -> tuple[Tensor, ...]:
        _, g, ctx.reverse = inputs
        return g, outputs

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
        g, out = ctx.saved_tensors
        dw = scan(grad, g, not ctx.reverse)
        dg = -(grad + dw) * out
        return dw, kernels.behind(dg) if ctx.reverse else dg, None

    @staticmethod
    def jvp(ctx: Any, dw: Tensor | None, dg: Tensor | None, *_: None) -> Tensor:
        g, out = ctx.saved_tensors
        if dg is None:
            return scan(torch.zeros_like(out) if dw is None else dw, g, ctx.reverse)
        direct = -(kernels.ahead(dg) if ctx.reverse else dg) * out
        return direct + scan(direct if dw is None else direct + dw, g, ctx.reverse)


def _fake(w: Tensor, g: Tensor, reverse: bool) -> Tensor:
    return w.new_empty(torch.broadcast_shapes(w.shape, g.shape))


_decay_scan = define("decay_scan", kernels.decay_scan, _fake, _Rule)
