"""The soft count of a row under Laplace's CDF and its inverse, each at many levels, by one sort and scans.

Without levels, the count is taken at the entries themselves, which gives their ranks, and the inverse at the
levels i − ½, which gives the soft sort. All take O((n + m) log n) time and O(n + m) memory in both modes
(Struski et al. 2025, section 4).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, define, gradient
from khot._core.precision import wide_dtype, widen
from khot._kernels.reference import laplace as kernels
from khot._ops.decay_scan import scan

__all__ = [
    "laplace_centred_rank",
    "laplace_count",
    "laplace_integral",
    "laplace_rank",
    "laplace_sort",
    "laplace_thresholds",
]


def laplace_count(x: Tensor, levels: Tensor, tau: Tensor) -> Tensor:
    """C(b) at every level b of a row, in the wide dtype.

    Args:
        x: (*batch, n) with n > 0.
        levels: (*batch, m), or (m,) for the same levels in every row.
        tau: broadcasts with batch.
    """
    count: Tensor = _laplace_count(x, levels, tau, True)[0]
    return count


def laplace_rank(x: Tensor, tau: Tensor, descending: bool = True) -> Tensor:
    """r_i = ½ + Σ_j F((x_j − x_i)/τ), 1 for the largest: C at each entry, which counts itself as 1. In x's
    dtype. Otherwise n + 1 − r_i, the ranks of −x."""
    rank: Tensor = _laplace_count(x, None, tau, descending)[0]
    return rank


def laplace_centred_rank(x: Tensor, tau: Tensor) -> Tensor:
    """r_i less the mean rank, with all its digits also where τ is far greater than the differences of the
    scores; 0 for entries of −inf. In x's dtype, at least float32."""
    rank: Tensor = _laplace_centred_rank(x, tau)[0]
    return rank


def laplace_thresholds(x: Tensor, levels: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs (hi, lo) of t with C(t) = level.

    Args:
        x, levels, tau: as for :func:`laplace_count`; n may be 0.

    Returns:
        hi, a constant, and lo, which carries the derivatives.
    """
    hi, lo, _, _ = _laplace_thresholds(x, levels, tau, True)
    return hi, lo


def laplace_integral(y: Tensor, weight: Tensor) -> Tensor:
    """Σ_j weight_j G(y_j − y_i) at every entry i, where G(t) = max(t, 0) + ½ e^(−|t|) is the integral of
    Laplace's CDF.

    Args:
        y: (*batch, n) in descending order. An entry of −inf comes last and has no weight.
        weight: (*batch, m, n), 0 or 1: the sums of m subsets of the row, (*batch, m, n).
    """
    weight = weight.to(y.dtype)
    ahead = torch.where(y[..., 1:] > -math.inf, y[..., :-1] - y[..., 1:], 0).nan_to_num()
    gap = torch.cat((torch.zeros_like(y[..., :1]), ahead), -1).unsqueeze(-2)
    straight = (gap * kernels.behind(weight.cumsum(-1))).cumsum(-1)
    decay = gap.clamp(max=kernels.FAR).expand(weight.shape)
    return straight + (scan(weight, decay, False) + scan(weight, decay, True)) / 2


def laplace_sort(x: Tensor, tau: Tensor, descending: bool) -> Tensor:
    """The thresholds of the levels i − ½, in x's dtype, in this order."""
    t: Tensor = _laplace_thresholds(x, None, tau, descending)[1]
    return t


class _Rule(Rule):
    """What both have in common. Both modes start from the order of the entries and the places of the levels
    among them."""

    own_dims = (1, 1)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        x, levels, tau, ctx.descending = inputs
        *_, order, place = outputs
        return x, order, levels, place, tau


def _gradients(
    ctx: Any, saved: tuple[Tensor, ...], dx: Tensor, dlevels: Tensor | None, dtau: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
    """In the shapes and dtypes of the arguments; None of what is not wanted. What is saved is read once, as
    checkpoints ask for."""
    _, _, levels, _, tau = saved
    of_levels = None if levels is None else gradient(ctx, 1, dlevels, levels.shape, levels.dtype)
    return dx, of_levels, gradient(ctx, 2, dtau, tau.shape, tau.dtype), None


class _Count(_Rule):
    constants = (1, 2)

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        saved, want_tau = ctx.saved_tensors, ctx.needs_input_grad[2]
        found = _laplace_count_backward.pull(grad, *saved, want_tau, ctx.descending, scan=scan)
        return _gradients(ctx, saved, *found)

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, dlevels: Tensor | None, dtau: Tensor | None, *_: None
    ) -> tuple[Tensor, None, None]:
        saved, descending = ctx.saved_tensors, ctx.descending
        drank = kernels.jvp_count((dx, dlevels, dtau), saved, descending=descending, scan=scan)
        return drank, None, None


class _CentredRank(Rule):
    """As for ranks: the mean rank has no derivatives."""

    own_dims = (1,)
    constants = (1,)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        x, tau = inputs
        return x, outputs[1], None, outputs[1][..., :0], tau

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor | None]:
        saved, want_tau = ctx.saved_tensors, ctx.needs_input_grad[1]
        tau = saved[-1]
        dx, __, dtau = _laplace_count_backward.pull(grad, *saved, want_tau, True, scan=scan)
        return dx, gradient(ctx, 1, dtau, tau.shape, tau.dtype)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dtau: Tensor | None) -> tuple[Tensor, None]:
        x, *saved = ctx.saved_tensors
        drank = kernels.jvp_count((dx, None, dtau), (widen(x), *saved), scan=scan)
        return drank.to(torch.promote_types(x.dtype, torch.float32)), None


class _Thresholds(_Rule):
    constants = (0, 2, 3)

    @staticmethod
    def vjp(ctx: Any, _: Any, grad: Tensor, *__: Any) -> tuple[Any, ...]:
        saved, want_tau = ctx.saved_tensors, ctx.needs_input_grad[2]
        found = _laplace_thresholds_backward.pull(grad, *saved, want_tau, ctx.descending, scan=scan)
        return _gradients(ctx, saved, *found)

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, dlevels: Tensor | None, dtau: Tensor | None, *_: None
    ) -> tuple[None, Tensor, None, None]:
        saved, descending = ctx.saved_tensors, ctx.descending
        dt = kernels.jvp_thresholds((dx, dlevels, dtau), saved, descending=descending, scan=scan)
        return None, dt, None, None


def _count_fake(x: Tensor, levels: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    count = _for_levels(x, levels)
    places = (*x.shape[:-1], 0) if levels is None else count.shape
    order, place = (x.new_empty(shape, dtype=torch.int32) for shape in (x.shape, places))
    return count, order, place


def _thresholds_fake(x: Tensor, levels: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lo = _for_levels(x, levels)
    hi = x.new_empty((*x.shape[:-1], 0) if levels is None else lo.shape, dtype=wide_dtype(x.device))
    order, place = (x.new_empty(shape, dtype=torch.int32) for shape in (x.shape, lo.shape))
    return hi, lo, order, place


def _for_levels(x: Tensor, levels: Tensor | None) -> Tensor:
    """What there is for each level: in the wide dtype, but without levels in x's dtype."""
    if levels is None:
        return x.new_empty(x.shape)
    return x.new_empty((*x.shape[:-1], levels.shape[-1]), dtype=wide_dtype(x.device))


def _backward_fake(
    grad: Tensor, x: Tensor, order: Tensor, levels: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wide, m = wide_dtype(x.device), 0 if levels is None else levels.shape[-1]
    dlevels, dtau = (x.new_empty(shape, dtype=wide) for shape in ((*x.shape[:-1], m), x.shape[:-1]))
    return x.new_empty(x.shape), dlevels, dtau


_laplace_count = define("laplace_count", kernels.laplace_count, _count_fake, _Count)
_laplace_count_backward = define("laplace_count_backward", kernels.laplace_count_backward, _backward_fake)
_laplace_centred_rank = define(
    "laplace_centred_rank",
    # by the kernel for counts of the device
    functools.partial(kernels.laplace_centred_rank, count=_laplace_count.overload),
    lambda x, tau: (
        x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)),
        x.new_empty(x.shape, dtype=torch.int32),
    ),
    _CentredRank,
)
_laplace_thresholds = define("laplace_thresholds", kernels.laplace_thresholds, _thresholds_fake, _Thresholds)
_laplace_thresholds_backward = define(
    "laplace_thresholds_backward", kernels.laplace_thresholds_backward, _backward_fake
)
