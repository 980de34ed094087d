"""Top-k in magnitude: the relaxed version of x·(|x| is among the k largest)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import khot._kernels  # noqa: F401  (registers torch.ops.khot)
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.dispatch import below_autograd, call, register, vmap_rows
from khot._core.precision import greatest
from khot.counting import Row

__all__ = ["absolute", "pull", "rescaled", "soft_topk_magnitude"]


def soft_topk_magnitude(
    input: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    p: float = 2.0,
    rescale: bool = False,
    mask: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """The k entries of largest magnitude, the others 0, relaxed so that it is continuous.

    Maximises ⟨y, x⟩ − f*(y) − τ/p Σ|y_i|^p, where f* is half the squared k-support norm (Sander et al.
    2023, section 4). As τ → 0, y tends to x on the k entries of largest magnitude and to 0 elsewhere. At
    most n entries around the k-th place share one value γ of the dual; the others are closed forms: a
    selected entry has y + τ·y^(p−1) = x (signs aside), a rejected one y = 0 exactly.

    Args:
        input: of any floating-point dtype.
        k: an integer in [0, n]; a number or a tensor that broadcasts with the batch shape (the input's
            shape without ``dim``). No gradient.
        dim: the dimension to select along.
        tau: regularisation > 0; a number or a tensor, as k. Its unit is that of the input to the power
            2 − p.
        p: in [1.15, 2]. p = 2 is piecewise linear, p = 4/3 continuously differentiable.
        rescale: return y + τ·y^(p−1), which equals the input on selected entries that are not tied up
            around the k-th place.
        mask: bool, broadcastable to the input; True where an entry may be selected. What lies under False
            is ignored and gets 0.
        group: as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input, with the input's signs. A row with a NaN, or with more than k
        infinite entries, is NaN. Differentiable, exactly, in input and tau, to second order and in forward
        mode.

    Raises:
        ValueError: k < 0, more than may be selected or not an integer; tau ≤ 0; p out of range.
        TypeError, IndexError: as for :func:`khot.soft_topk`.

    Example:
        >>> x = torch.tensor([-3.0, 1.0, 2.0, 0.0])
        >>> khot.soft_topk_magnitude(x, 2, tau=0.5)
        tensor([-2.0000,  0.0000,  1.3333,  0.0000])
        >>> khot.soft_topk_magnitude(x, 2, tau=0.5, rescale=True)
        tensor([-3.,  0.,  2.,  0.])
    """
    if arguments.spread(input, group):
        from khot import sharded

        options: dict[str, Any] = {"tau": tau, "p": p, "rescale": rescale, "mask": mask}
        return sharded.apply(soft_topk_magnitude, input, k, dim, group, **options)
    arguments.check_number(p, "p", low=1.15, high=2.0)
    s, sign = absolute(input, dim, mask)
    k = arguments.per_row(k, "k", s, low=0, high=s.shape[-1], integer=True).detach()
    tau = arguments.per_row(tau, "tau", s, low=0, low_open=True)
    y, hi, lo = call(_Magnitude, torch.ops.khot.soft_topk_magnitude, s, k, tau, float(p))
    if rescale:
        y = rescaled(s, hi, lo, tau, p)
    return arguments.unrows(y * sign, input, dim)


def absolute(input: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows' magnitudes, −inf where the mask is False, and their signs."""
    x = arguments.rows(input, dim)
    sign = torch.copysign(torch.ones_like(x), x.detach())  # with a slope at 0, which abs() has not
    s = x * sign
    if mask is not None:
        s = torch.where(arguments.mask_rows(mask, input, dim), s, -math.inf)
    return s, sign


def rescaled(s: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, p: float) -> Tensor:
    """y + τ y^(p−1) from γ = hi + lo: s itself where y is not pooled, and Y + (s − γ)₊ where it is."""
    nothing = (hi.abs() == greatest(hi)).unsqueeze(-1)
    hi, lo, tau = (v.unsqueeze(-1) for v in (hi, lo, tau.to(hi.dtype).expand(hi.shape)))
    # infinities stay out of arithmetic whose gradient would be 0·inf
    finite = s.to(hi.dtype).masked_fill(s.isinf() | nothing, 0)
    w = ((finite - hi.masked_fill(nothing, 0)) - lo.masked_fill(nothing, 0)) / tau
    outside = (w <= 0) | s.isinf() | nothing
    w = w.masked_fill(outside, 1)
    Y = w ** (1 / (p - 1))
    alone = ((hi + lo <= Y) & ~outside) | (s == math.inf) | ((hi == 0) & (s == 0))
    pooled = (Y + tau * w).masked_fill(outside, 0).to(s.dtype)
    return torch.where(alone, s, pooled).masked_fill(hi.isnan(), math.nan)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    s, k, tau, ctx.p = inputs
    y, hi, lo = output
    ctx.save_for_backward(s, y, k, hi, lo, tau)


def _backward(ctx: Any, grad: Tensor, _: Tensor, grad_lo: Tensor) -> tuple[Any, ...]:
    s, y, k, hi, lo, tau = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        ds, dtau = pull(grad, grad_lo, s, y, k, hi, lo, tau, ctx.p, Row())
    else:
        ds, dtau = torch.ops.khot.soft_topk_magnitude_backward.default(
            grad, grad_lo, s, y, k, hi, lo, tau, ctx.p
        )
    grad_tau = dtau.sum_to_size(tau.shape).to(tau.dtype) if ctx.needs_input_grad[2] else None
    return ds, None, grad_tau, None


register("khot::soft_topk_magnitude", _backward, _save)


class _Magnitude(torch.autograd.Function):
    """As soft_count._ThresholdMap: y and γ = hi + lo are outputs, so backward can be differentiated."""

    @staticmethod
    def forward(s: Tensor, k: Tensor, tau: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
        with below_autograd():
            y, hi, lo = torch.ops.khot.soft_topk_magnitude.default(s, k, tau, p)
        arguments.explain_nan(hi, s, k, tau, integer=True)
        return y, hi, lo

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])
        s, k, tau, _ = inputs
        y, hi, lo = output
        ctx.save_for_forward(s, y, k, hi, lo, tau)

    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx: Any, ds: Tensor | None, dk: None, dtau: Tensor | None, _: None) -> Any:
        s, y, k, hi, lo, tau = ctx.saved_tensors
        return _push(ds, dtau, s, y, k, hi, lo, tau, ctx.p)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return vmap_rows(_Magnitude.apply, info, in_dims, *args)


class _Linear(NamedTuple):
    """The derivative at a point, as differentiable functions of s, y, γ and τ."""

    own: Tensor  # dv/ds where an entry is selected on its own
    fall: Tensor  # −dv/dτ there
    rate: Tensor  # r = dY/ds in the pooled block
    w: Tensor  # (s − γ)/τ there, so that dY/dτ = −rw
    selected: Tensor  # whether an entry is selected on its own
    inside: Tensor  # whether it is pooled


def _linearize(s: Tensor, y: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, p: float) -> _Linear:
    e = 1 / (p - 1)
    nothing = hi.abs() == greatest(hi)
    tau = tau.to(hi.dtype).expand(hi.shape).unsqueeze(-1)
    t = (hi.masked_fill(nothing, 0) + lo.masked_fill(nothing, 0)).unsqueeze(-1)
    s, y = s.to(hi.dtype), y.to(hi.dtype)
    infinite = s.isinf()
    offset = s.masked_fill(infinite, 0) - hi.masked_fill(nothing, 0).unsqueeze(-1)
    w = (offset - lo.masked_fill(nothing, 0).unsqueeze(-1)) / tau
    idle = infinite | nothing.unsqueeze(-1)
    alone = (s >= 0) & (w.clamp(min=0) ** e >= t) & ~idle
    inside = (w > 0) & ~alone & ~idle
    w = w.masked_fill(~inside, 1)
    rate = torch.where(inside, e / tau * w ** (e - 1), 0)
    y = torch.where(alone & (y > 0), y, 1)
    own = torch.where(alone & ((s > 0) | (p == 2)), 1 / (1 + tau * (p - 1) * y ** (p - 2)), 0)
    fall = own * torch.where(s > 0, y ** (p - 1), 0)
    return _Linear(own, fall, rate, w, alone | (s == math.inf), inside)


def _per_pooled(k: Tensor, selected: Tensor, pooled: Tensor, rate: Tensor) -> Tensor:
    """1/(k − #alone + Σr), 0 where nothing is pooled; from sums over the row."""
    empty = pooled == 0
    left = k.to(rate.dtype).expand(rate.shape) - selected
    return torch.where(empty, 0, 1 / (left + rate).masked_fill(empty, 1))


def pull(
    grad: Tensor,
    grad_lo: Tensor,
    s: Tensor,
    y: Tensor,
    k: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    p: float,
    row: Row,
) -> tuple[Tensor, Tensor]:
    """Reverse mode: as `selection.soft_topk_magnitude_backward`, differentiable."""
    lo, tau = row.share([lo, tau.to(hi.dtype).expand(hi.shape)])
    d = _linearize(s, y, hi, lo, tau, p)
    v = grad.to(hi.dtype)
    turn = d.rate * d.w
    parts = [d.selected.to(hi.dtype), d.inside.to(hi.dtype), d.rate, turn, d.rate * v, v * (d.fall + turn)]
    selected, pooled, rate, moment, pulled, direct = row.total([part.sum(-1) for part in parts])
    pull = (grad_lo - pulled) * _per_pooled(k, selected, pooled, rate)
    ds = d.own * v + d.rate * (v + row.share([pull])[0].unsqueeze(-1))
    return ds.to(s.dtype), -direct - pull * moment


def _push(
    ds: Tensor | None,
    dtau: Tensor | None,
    s: Tensor,
    y: Tensor,
    k: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    p: float,
) -> tuple[Tensor, None, Tensor]:
    d = _linearize(s, y, hi, lo, tau, p)
    ds = torch.zeros_like(d.w) if ds is None else ds.to(hi.dtype)
    dtau = torch.zeros_like(hi) if dtau is None else dtau.to(hi.dtype).expand(hi.shape)
    dtau = dtau.unsqueeze(-1)
    block = d.rate * (ds - d.w * dtau)
    per_pooled = _per_pooled(k, *(v.sum(-1) for v in (d.selected, d.inside, d.rate)))
    dlo = block.sum(-1) * per_pooled
    dy = d.own * ds - d.fall * dtau + block - d.rate * dlo.unsqueeze(-1)
    return dy.to(y.dtype), None, dlo
