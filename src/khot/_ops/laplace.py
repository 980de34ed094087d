"""The Laplace count of a whole row at once, differentiable: ranks, sorting, thresholds of many levels.

By one sort and scans, in O(n log n) time and O(n) memory in either direction (Struski et al. 2025, section
4, evaluates so too; its backward of the rank does not). `_kernels.reference.laplace` has the formulas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import khot._kernels  # noqa: F401  (registers torch.ops.khot)
from khot._core.dispatch import below_autograd, call, register, vmap_rows
from khot._core.precision import widen
from khot._kernels.reference import laplace as scans

__all__ = ["laplace_rank", "laplace_sort", "laplace_thresholds"]


def laplace_rank(x: Tensor, tau: Tensor) -> Tensor:
    """r_i = ½ + Σ_j F((x_j − x_i)/τ), 1 for the largest: the differentiable form of the kernel.

    Args:
        x: (*batch, n).
        tau: broadcasts with batch.
    """
    rank: Tensor = call(_Rank, torch.ops.khot.laplace_rank, x, tau)[0]
    return rank


def laplace_sort(x: Tensor, tau: Tensor, descending: bool) -> Tensor:
    """The thresholds of the levels i − ½ in x's dtype: the differentiable form of the kernel.

    As :func:`laplace_thresholds` without what it keeps of each threshold: nothing but x and its order.
    """
    t: Tensor = call(_Sort, torch.ops.khot.laplace_sort, x, tau, descending)[0]
    return t


def laplace_thresholds(x: Tensor, levels: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs (hi, lo) of t with C(t) = level: the differentiable form of the kernel.

    Args:
        x: (*batch, n).
        levels: (*batch, m), or (m,) where nothing maps over them.
        tau: broadcasts with batch.

    Returns:
        hi, a constant, and lo, which carries the derivatives.
    """
    hi, lo, _, _ = call(_Thresholds, torch.ops.khot.laplace_thresholds, x, levels, tau)
    return hi, lo


def _scan(w: Tensor, g: Tensor, reverse: bool) -> Tensor:
    return _DecayScan.apply(*torch.broadcast_tensors(w, g), reverse)


class _DecayScan(Function):
    """Each direction of the derivative is again a scan with the same decays."""

    @staticmethod
    def forward(w: Tensor, g: Tensor, reverse: bool) -> Tensor:
        with below_autograd():
            return torch.ops.khot.decay_scan.default(w, g, reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, g, ctx.reverse = inputs
        ctx.save_for_backward(g, output)
        ctx.save_for_forward(g, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        g, out = ctx.saved_tensors
        dw = _scan(grad, g, not ctx.reverse)
        dg = -(grad + dw) * out
        return dw, scans.behind(dg) if ctx.reverse else dg, None

    @staticmethod
    def jvp(ctx: Any, dw: Tensor | None, dg: Tensor | None, _: None) -> Tensor:
        g, out = ctx.saved_tensors
        if dg is None:
            return _scan(torch.zeros_like(out) if dw is None else dw, g, ctx.reverse)
        direct = -(scans.ahead(dg) if ctx.reverse else dg) * out
        return direct + _scan(direct if dw is None else direct + dw, g, ctx.reverse)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return vmap_rows(_DecayScan.apply, info, in_dims, *args)


register("khot::decay_scan")


def _like(grad: Tensor, value: Tensor) -> Tensor:
    return grad.sum_to_size(value.shape).to(value.dtype)


def _save_rank(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _rank_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    x, order, tau = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        dx, dtau = scans.pull_rank(grad, x, order, tau, _scan)
    else:
        dx, dtau = torch.ops.khot.laplace_rank_backward.default(grad, x, order, tau)
    return dx, _like(dtau, tau)


register("khot::laplace_rank", _rank_backward, _save_rank)


class _Rank(Function):
    @staticmethod
    def forward(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        with below_autograd():
            return torch.ops.khot.laplace_rank.default(x, tau)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save_rank(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_forward(inputs[0], output[1], inputs[1])

    backward = staticmethod(_rank_backward)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dtau: Tensor | None) -> tuple[Tensor, None]:
        x, order, tau = ctx.saved_tensors
        return scans.push_rank(dx, dtau, x, order, tau, _scan), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return vmap_rows(_Rank.apply, info, in_dims, *args)


def _save_thresholds(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, levels, tau = inputs
    hi, lo, order, place = output
    ctx.save_for_backward(x, order, hi, lo, place, tau)
    ctx.levels_shape = levels.shape


def _thresholds_backward(ctx: Any, _: Any, grad: Tensor, *__: Any) -> tuple[Any, ...]:
    x, order, hi, lo, place, tau = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        dx, dlevels, dtau = scans.pull_thresholds(grad, x, order, hi, lo, place, tau, _scan)
    else:
        dx, dlevels, dtau = torch.ops.khot.laplace_thresholds_backward.default(
            grad, x, order, hi, lo, place, tau
        )
    levels = dlevels.sum_to_size(ctx.levels_shape) if ctx.needs_input_grad[1] else None
    return dx, levels, _like(dtau, tau)


register("khot::laplace_thresholds", _thresholds_backward, _save_thresholds)


class _Thresholds(Function):
    @staticmethod
    def forward(x: Tensor, levels: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with below_autograd():
            return torch.ops.khot.laplace_thresholds.default(x, levels, tau)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save_thresholds(ctx, inputs, output)
        hi, lo, order, place = output
        ctx.mark_non_differentiable(hi, order, place)
        ctx.save_for_forward(inputs[0], order, hi, lo, place, inputs[2])

    backward = staticmethod(_thresholds_backward)

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, dlevels: Tensor | None, dtau: Tensor | None
    ) -> tuple[None, Tensor, None, None]:
        x, order, hi, lo, place, tau = ctx.saved_tensors
        dlo = scans.push_thresholds(dx, dlevels, dtau, x, order, hi, lo, place, tau, _scan)
        return None, dlo, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return vmap_rows(_Thresholds.apply, info, in_dims, *args)


def _save_sort(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, tau, ctx.descending = inputs
    ctx.save_for_backward(x, output[1], tau)


def _sort_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
    x, order, tau = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = _thresholds_again(x, tau)
        v = widen(grad if ctx.descending else grad.flip(-1))
        dx, _, dtau = scans.pull_thresholds(v, x, *found, tau, _scan)
    else:
        dx, dtau = torch.ops.khot.laplace_sort_backward.default(
            grad, x, order, tau, ctx.descending, ctx.needs_input_grad[1]
        )
    return dx, _like(dtau, tau), None


def _thresholds_again(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order, hi, lo and place, where lo has derivatives, too."""
    hi, lo, order, place = call(_Thresholds, torch.ops.khot.laplace_thresholds, x, scans.half_levels(x), tau)
    return order, hi, lo, place


register("khot::laplace_sort", _sort_backward, _save_sort)


class _Sort(Function):
    @staticmethod
    def forward(x: Tensor, tau: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
        with below_autograd():
            return torch.ops.khot.laplace_sort.default(x, tau, descending)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save_sort(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_forward(inputs[0], output[1], inputs[1])

    backward = staticmethod(_sort_backward)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dtau: Tensor | None, _: None) -> tuple[Tensor, None]:
        x, _, tau = ctx.saved_tensors
        found = _thresholds_again(x, tau)
        out = scans.push_thresholds(dx, None, dtau, x, *found, tau, _scan).to(x.dtype)
        return out if ctx.descending else out.flip(-1), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return vmap_rows(_Sort.apply, info, in_dims, *args)
