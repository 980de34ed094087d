"""The matrix of a soft permutation with its thresholds, as one operator: what kernels of whole rows serve.

The thresholds are results as well. So both modes of the derivative, which are written in torch operations on
x, τ and the thresholds, can be differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._core.dispatch import Rule, define, gradient
from khot._core.precision import on, wide_dtype, widen
from khot._core.rows import HERE
from khot._core.ways import by_kernel
from khot._kernels.reference import implicit
from khot._kernels.reference import permutation as kernels
from khot._kernels.reference.implicit import Solved
from khot._ops.permutation import boundaries, correction
from khot._ops.permutation_shares import shares
from khot.cdfs import CDF

__all__ = ["matrix", "serves"]


def serves(x: Tensor, cdf: CDF) -> bool:
    """Whether there is a kernel of the device for these rows, in eager mode."""
    short = x.dtype != torch.float64 and x.numel() > 0 and x.shape[-1] <= kernels.LONGEST
    return short and cdf.built_in and _soft_permutation.is_served(x) and not torch.compiler.is_compiling()


def matrix(x: Tensor, tau: Tensor, cdf: CDF) -> Tensor:
    """P, (*batch, n, n): the places of the descending order by entries, in x's dtype.

    Args:
        x: (*batch, n).
        tau: broadcasts with batch; a number may be on the CPU.
        cdf: a built-in one.
    """
    p: Tensor = _soft_permutation(x, tau, *cdf.key)[0]
    return p


def _reference(x: Tensor, tau: Tensor, cdf: str, shape: float) -> tuple[Tensor, Tensor, Tensor]:
    F, tau = cdfs.resolve(cdf, shape), on(x.device, tau)
    hi, lo = boundaries(x, tau, F)
    correct = correction(x, tau, None, lambda share: share)
    return correct(shares(x, hi, lo, tau, F), 0, x.shape[-1]), hi, lo


def _reference_backward(
    grad: Tensor, x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str, shape: float, want_tau: bool
) -> tuple[Tensor, Tensor]:
    dx, dtau = _vjp(grad, None, x, on(x.device, tau), hi, lo, cdfs.resolve(cdf, shape))
    return dx.to(x.dtype), dtau if want_tau else dtau.new_empty(0)


class _Rule(Rule):
    constants = (1,)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, tau, *ctx.key = inputs
        return x, tau, *outputs[1:]

    @staticmethod
    def vjp(ctx: Any, grad: Tensor | None, _: Any, grad_lo: Tensor | None) -> tuple[Any, ...]:
        x, tau, hi, lo = ctx.saved_tensors
        want_tau = ctx.needs_input_grad[1]
        cotangent = x.new_zeros(*x.shape, x.shape[-1]) if grad is None else grad
        if by_kernel() and grad_lo is None:  # this is so for every first derivative
            dx, dtau = _soft_permutation_backward(cotangent, x, hi, lo, tau, *ctx.key, want_tau)
        else:
            dx, dtau = _vjp(cotangent, grad_lo, x, on(x.device, tau), hi, lo, cdfs.resolve(*ctx.key))
        return dx.to(x.dtype), gradient(ctx, 1, dtau, tau.shape, tau.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dtau: Tensor | None, *_: None) -> tuple[Tensor, None, Tensor]:
        x, tau, hi, lo = ctx.saved_tensors
        tau, F = on(x.device, tau), cdfs.resolve(*ctx.key)
        each = None if dx is None else dx.unsqueeze(-2).expand(*hi.shape, dx.shape[-1])
        turned = None if dtau is None else dtau.expand(x.shape[:-1]).unsqueeze(-1).expand(hi.shape)
        dlo = implicit.jvp(each, None, None, turned, _solved(x, tau, hi, lo, F))[1]
        spread = None if dtau is None else dtau.expand(x.shape[:-1])
        moved = kernels.jvp_shares((dx, dlo, spread), x, hi, lo, tau, F)
        return moved.diff(dim=-2).to(x.dtype), None, dlo


def _vjp(
    grad: Tensor, grad_lo: Tensor | None, x: Tensor, tau: Tensor, hi: Tensor, lo: Tensor, F: CDF
) -> tuple[Tensor, Tensor]:
    """The gradients in x and τ, in the wide dtype: at fixed thresholds, and what these pass on."""
    # at the two ends F does not move
    rise = torch.nn.functional.pad(widen(grad).diff(dim=-2).neg(), (0, 0, 1, 1))
    dx, dlo, dtau = kernels.vjp_shares(rise, x, hi, lo, tau, F)
    through = dlo if grad_lo is None else dlo + grad_lo
    solved = _solved(x, tau, hi, lo, F)
    dx_through, _, _, dtau_through = implicit.vjp(x.new_zeros(*hi.shape, 0), through, solved)
    return dx + widen(dx_through).sum(-2), dtau + dtau_through.sum(-1)


def _solved(x: Tensor, tau: Tensor, hi: Tensor, lo: Tensor, F: CDF) -> Solved:
    """Each threshold as that of a soft top-k of its own."""
    wide = widen(x).unsqueeze(-2).expand(*hi.shape, x.shape[-1])
    return Solved(wide, None, hi, lo, tau.unsqueeze(-1), F, "threshold", False, False, HERE)


def _fake(x: Tensor, tau: Tensor, cdf: str, shape: float) -> tuple[Tensor, Tensor, Tensor]:
    *batch, n = x.shape
    hi = x.new_empty(*batch, n + 1, dtype=wide_dtype(x.device))
    return x.new_empty(*batch, n, n), hi, torch.empty_like(hi)


def _backward_fake(
    grad: Tensor, x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str, shape: float, want_tau: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), hi.new_empty(x.shape[:-1] if want_tau else 0)


_soft_permutation = define("soft_permutation", _reference, _fake, _Rule)
_soft_permutation_backward = define("soft_permutation_backward", _reference_backward, _backward_fake)
