"""The soft count C(b) = Σ_j F((x_j − b)/τ): evaluate it, invert it, and differentiate the inverse.

Every deterministic operator stands on this. A soft top-k is y = F((x − t)/τ) at the threshold
t = C⁻¹(k); :func:`threshold_map` computes both, and one autograd rule serves y, log y and t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import khot._kernels  # noqa: F401  (registers torch.ops.khot)
from khot import cdfs
from khot._core import arguments, precision
from khot._core.arguments import Scalar
from khot._core.dispatch import below_autograd, call, register, vmap_rows
from khot._core.precision import greatest
from khot._kernels.reference.soft_count import pull_count, push_count
from khot._kernels.reference.soft_topk import log_scale as kernel_scale
from khot._kernels.reference.soft_topk import neighbours
from khot._kernels.reference.solver import Threshold
from khot.cdfs import CDF

__all__ = ["Row", "count_above", "inverse_soft_count", "pull", "soft_count", "threshold_map", "thresholds"]

LEVELS_AT_ONCE = 1 << 22  # entries times levels that one backward pass of many levels may allocate


def soft_count(
    input: Tensor, at: Scalar, dim: int = -1, *, tau: Scalar = 1.0, cdf: str | CDF = "logistic"
) -> Tensor:
    """How many entries of each row lie above ``at``, softened: C(b) = Σ_j F((x_j − b)/τ).

    As τ → 0, C(b) tends to the number of entries above b, an entry equal to b counting F(0).

    Args:
        input: scores, of any floating-point dtype; ±inf count as 1 and 0.
        at: where to count. A number (``dim`` is dropped), or a tensor of the input's number of dims with m
            entries along ``dim`` and otherwise broadcasting with the input.
        dim: the dimension to count along.
        tau: temperature > 0; a number or a tensor that broadcasts with the batch shape (the input's shape
            without ``dim``).
        cdf: ``"logistic"``, ``"laplace"``, ``"normal"``, ``"uniform"``, or an object of
            :mod:`khot.cdfs`.

    Returns:
        Counts in [0, n], of the input's dtype, with m entries along ``dim`` or without it.
        Differentiable (exactly, to any order and in either mode) in input, at and tau. Memory is linear in
        n + m, but where the backward pass is itself recorded.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Example:
        >>> x = torch.tensor([3.0, 1.0, 2.0, 0.0])
        >>> khot.soft_count(x, 1.5, tau=0.01)
        tensor(2.)
    """
    F = cdfs.resolve(cdf)
    x = arguments.rows(input, dim)
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True)
    at, scalar = _levels(at, "at", input, x, dim, low=-math.inf)
    count = count_above(x, at, tau, F).to(input.dtype)
    return count.squeeze(-1) if scalar else count.movedim(-1, dim)


def inverse_soft_count(
    input: Tensor, count: Scalar, dim: int = -1, *, tau: Scalar = 1.0, cdf: str | CDF = "logistic"
) -> Tensor:
    """The threshold above which the soft count of each row is ``count``: t with Σ_j F((x_j − t)/τ) = count.

    Where C is flat in floating point (an integer count and a gap much wider than τ) t is still the exact
    root; where it is flat indeed (compact support) t is the middle of the gap.

    Args:
        input: scores, of any floating-point dtype. −inf never counts, +inf always.
        count: in [0, n]. A number (``dim`` is dropped), or a tensor of the input's number of dims with m
            entries along ``dim`` and otherwise broadcasting with the input.
        dim, tau, cdf: as for :func:`soft_count`.

    Returns:
        Thresholds of the input's dtype, with m entries along ``dim`` or without it; +inf for count = 0 and
        −inf for count = n. Differentiable (exactly, by the implicit function theorem) in input, count and
        tau.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Example:
        >>> x = torch.tensor([3.0, 1.0, 2.0, 0.0])
        >>> khot.inverse_soft_count(x, 2, tau=0.01)
        tensor(1.5000)
    """
    F = cdfs.resolve(cdf)
    x = arguments.rows(input, dim)
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True)
    count, scalar = _levels(count, "count", input, x, dim, low=0.0, high=float(x.shape[-1]))
    hi, lo = thresholds(x, count, tau, F)
    t = (hi + lo).to(input.dtype)
    return t.squeeze(-1) if scalar else t.movedim(-1, dim)


def thresholds(x: Tensor, levels: Tensor, tau: Tensor, cdf: CDF) -> tuple[Tensor, Tensor]:
    """The pairs (hi, lo) of t with C(t) = level, for levels (*batch, m): lo carries the derivatives."""
    group = max(1, LEVELS_AT_ONCE // max(1, x.numel()))
    parts = []
    for level in levels.split(group, -1):
        # a level a row: the row itself is not copied
        copies = x.unsqueeze(-2).expand(*level.shape, x.shape[-1])
        parts.append(threshold_map(copies, level, tau.unsqueeze(-1), cdf, "threshold")[1:])
    return torch.cat([hi for hi, _ in parts], -1), torch.cat([lo for _, lo in parts], -1)


def _levels(
    value: Scalar, name: str, input: Tensor, x: Tensor, dim: int, *, low: float, high: float = math.inf
) -> tuple[Tensor, bool]:
    """Levels as (*batch, m), and whether they came as one number."""
    if isinstance(value, Tensor) and value.dim():
        if value.dtype == torch.bool or value.is_complex():
            raise TypeError(f"{name} must be a real number or tensor, but got dtype {value.dtype}")
        if value.dim() != input.dim():
            raise ValueError(
                f"{name} must be a number or have the input's {input.dim()} dims, but got shape "
                f"{tuple(value.shape)}"
            )
        levels = precision.on(x.device, value.movedim(dim, -1))
        if any(a not in (1, b) for a, b in zip(levels.shape[:-1], x.shape[:-1], strict=True)):
            raise ValueError(
                f"{name} must broadcast with the input's shape {tuple(input.shape)} outside dim {dim}, "
                f"but got {tuple(value.shape)}"
            )
        levels = arguments.check_values(levels, name, low=low, high=high)
        return levels.expand(*x.shape[:-1], levels.shape[-1]), False
    level = arguments.per_row(value, name, x, low=low, high=high)
    return level.expand(*x.shape[:-1], 1), True


def count_above(x: Tensor, at: Tensor, tau: Tensor, cdf: CDF, centred: bool = False) -> Tensor:
    """C(b) at every level of a row: the differentiable form of the kernel.

    Args:
        x: (*batch, n).
        at: (*batch, m).
        tau: broadcasts with batch.
        centred: shift F to the median 0; a score counts itself as ½ then, infinite ones too.
    """
    return call(_CountAbove, torch.ops.khot.soft_count, x, at, tau, cdf.name, cdf.shape, centred)


def _save_count(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, at, tau, name, shape, ctx.centred = inputs
    ctx.save_for_backward(x, at, tau)
    ctx.cdf = name, shape


def _count_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, at, tau = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        dx, dat, dtau = pull_count(grad, x, at, tau, cdfs.resolve(*ctx.cdf), ctx.centred)
    else:
        dx, dat, dtau = torch.ops.khot.soft_count_backward.default(grad, x, at, tau, *ctx.cdf, ctx.centred)
    return dx, dat, dtau.sum_to_size(tau.shape).to(tau.dtype), None, None, None


register("khot::soft_count", _count_backward, _save_count)


class _CountAbove(torch.autograd.Function):
    """Recomputes the entries of each level, a group of levels at a time, in either direction."""

    @staticmethod
    def forward(x: Tensor, at: Tensor, tau: Tensor, name: str, shape: float, centred: bool) -> Tensor:
        with below_autograd():
            return torch.ops.khot.soft_count.default(x, at, tau, name, shape, centred)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save_count(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:3])

    backward = staticmethod(_count_backward)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dat: Tensor | None, dtau: Tensor | None, *_: None) -> Tensor:
        x, at, tau = ctx.saved_tensors
        return push_count(dx, dat, dtau, x, at, tau, cdfs.resolve(*ctx.cdf), ctx.centred)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return vmap_rows(_CountAbove.apply, info, in_dims, *args)


def threshold_map(x: Tensor, k: Tensor, tau: Tensor, cdf: CDF, output: str) -> tuple[Tensor, Tensor, Tensor]:
    """y = F((x − t)/τ) with t = hi + lo solving C(t) = k: the differentiable form of the kernel.

    Args:
        x: (*batch, n).
        k, tau: broadcast with batch.
        output: "y", "log" for log y, "threshold" for none.

    Returns:
        The output; hi, a constant; and lo, which carries t's derivatives.
    """
    return call(_ThresholdMap, torch.ops.khot.soft_topk, x, k, tau, cdf.name, cdf.shape, output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, k, tau, name, shape, ctx.kind = inputs
    out, hi, lo = output
    serves = ctx.kind == "y" and name in ("logistic", "laplace") and x.dtype == torch.float32 and x.is_cpu
    ctx.save_for_backward(x, tau, hi, lo, out if serves and not ctx.needs_input_grad[2] else None)
    ctx.k_like, ctx.cdf = (k.shape, k.dtype), (name, shape)


def _backward(ctx: Any, grad: Tensor, _: Tensor, grad_lo: Tensor) -> tuple[Any, ...]:
    x, tau, hi, lo, y = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        dx, dk, dtau = pull(grad, grad_lo, x, hi, lo, tau, cdfs.resolve(*ctx.cdf), ctx.kind, Row())
    else:
        dx, dk, dtau = torch.ops.khot.soft_topk_backward.default(
            grad, grad_lo, x, hi, lo, tau, *ctx.cdf, ctx.kind, y
        )
    k_shape, k_dtype = ctx.k_like
    grad_k = dk.sum_to_size(k_shape).to(k_dtype) if ctx.needs_input_grad[1] else None
    grad_tau = dtau.sum_to_size(tau.shape).to(tau.dtype) if ctx.needs_input_grad[2] else None
    return dx, grad_k, grad_tau, None, None, None


register("khot::soft_topk", _backward, _save)


class _ThresholdMap(torch.autograd.Function):
    """The one autograd rule. Outputs include t itself (as lo), so that backward, written in torch
    operations on x, t and τ, can be differentiated again, to any order and in either mode."""

    @staticmethod
    def forward(
        x: Tensor, k: Tensor, tau: Tensor, name: str, shape: float, kind: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        with below_autograd():
            out, hi, lo = torch.ops.khot.soft_topk.default(x, k, tau, name, shape, kind)
        arguments.explain_nan(hi, x, k, tau, name="count" if kind == "threshold" else "k")
        return out, hi, lo

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])
        x, _, tau = inputs[:3]
        ctx.save_for_forward(x, tau, *output[1:])

    backward = staticmethod(_backward)

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, dk: Tensor | None, dtau: Tensor | None, *_: None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        x, tau, hi, lo = ctx.saved_tensors
        return _push(dx, dk, dtau, x, tau, hi, lo, cdfs.resolve(*ctx.cdf), ctx.kind)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return vmap_rows(_ThresholdMap.apply, info, in_dims, *args)


class Row(NamedTuple):
    """How the sums in a derivative are taken over rows, and what depends on them; by default the rows are
    all here. For shards of rows: :mod:`khot.sharded`."""

    total: Callable[[list[Tensor]], list[Tensor]] = list  # sums over each shard -> sums over the row
    share: Callable[[list[Tensor]], list[Tensor]] = list  # a number a row -> the same, for use by entries
    near: tuple[Tensor, Tensor] | None = None  # the entries next to t, where they are known


class _Linear(NamedTuple):
    """What both directions of the derivative need of each entry, as differentiable functions of x, lo, τ."""

    z: Tensor
    weight: Tensor  # f, divided by a scale
    log_scale: Tensor  # of the batch shape
    rate: Tensor  # g = ∂out/∂z
    k_rate: Tensor  # ∂out/∂k times Σ weight
    gap: tuple[Tensor, Tensor] | None  # for compact support: which entries the two neighbours of t are


def _linearize(
    x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: CDF, kind: str, near: tuple[Tensor, Tensor] | None
) -> _Linear:
    """Weights are relative to a scale like the greatest of them, right even where every f underflows."""
    infinite = hi.abs() == greatest(hi)  # nothing, or everything, is selected
    tau = tau.to(hi.dtype).expand(hi.shape)
    decided = x.isinf() | infinite.unsqueeze(-1)  # kept out of products such as 0·inf
    hi_safe, lo_safe = (v.masked_fill(infinite, 0).unsqueeze(-1) for v in (hi, lo))
    z = ((x.to(hi.dtype).masked_fill(decided, 0) - hi_safe) - lo_safe) / tau.unsqueeze(-1)
    z = z.masked_fill(decided, 0)
    log_f = cdf.log_pdf(z).masked_fill(decided, -math.inf)

    still = log_f == -math.inf
    if near is None:
        log_scale = log_f.detach().amax(-1).clamp(min=-greatest(hi)) if x.shape[-1] else torch.zeros_like(hi)
    else:
        log_scale = kernel_scale(Threshold(hi, lo.detach(), *near), tau.detach(), cdf)
    log_weight = (log_f - log_scale.unsqueeze(-1)).masked_fill(still, 0)
    weight = torch.exp(log_weight).masked_fill(still, 0)

    gap = None
    if not cdf.full_support:
        near = neighbours(x.detach(), hi, lo.detach()) if near is None else near
        up, down = (x.detach().to(hi.dtype) == v.unsqueeze(-1) for v in near)
        gap = up & ~infinite.unsqueeze(-1), down & ~infinite.unsqueeze(-1)
    if kind == "log":
        still = still | (cdf.log_cdf(z.detach()) == -math.inf)
        # w/y through logarithms: y may underflow where w/y does not
        log_rate = cdf.log_hazard(z.masked_fill(still, cdf.median)).masked_fill(still, 0)
        rate = torch.exp(log_rate).masked_fill(still, 0)
        k_rate = torch.exp(log_rate - log_scale.unsqueeze(-1)).masked_fill(still, 0)
    else:
        rate, k_rate = torch.exp(log_f), weight
    return _Linear(z, weight, log_scale, rate, k_rate, gap)


def _gap_means(kind: str, counts: list[Tensor], sums: list[Tensor]) -> Tensor:
    """½(the mean over the least entries above t + that over the greatest below); for log y the first alone,
    as rejected entries have log y = −inf; 0 where a side is empty."""
    up, down = (0.5 * s / n.clamp(min=1) for n, s in zip(counts, sums, strict=True))
    return up if kind == "log" else up + down


def pull(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: CDF,
    kind: str,
    row: Row,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse mode: the formulas of `soft_topk.soft_topk_backward`, differentiable."""
    tau = tau.to(hi.dtype).expand(hi.shape)
    lo_shared, tau_shared = row.share([lo, tau])
    d = _linearize(x, hi, lo_shared, tau_shared, cdf, kind, row.near)
    v = torch.zeros_like(d.z) if kind == "threshold" else grad.to(hi.dtype)
    u = v * d.rate
    parts = [d.weight, d.weight * d.z, v * d.k_rate, u, u * d.z]
    if d.gap is not None:
        parts += [g.to(hi.dtype) for g in d.gap] + [v.where(g, 0) for g in d.gap]
    mass, moment, vk, total, u_moment, *gap = row.total([part.sum(-1) for part in parts])
    dead = mass == 0  # no entry has f > 0
    mass = mass.masked_fill(dead, 1)
    z_mean = moment / mass
    pull = grad_lo - total / tau
    (spread,) = row.share([(pull / mass).masked_fill(dead, 0)])
    dx = u / tau_shared.unsqueeze(-1) + d.weight * spread.unsqueeze(-1)
    dtau = -u_moment / tau - pull * z_mean
    dk = vk / mass
    if gap:
        dk = torch.where(dead, _gap_means(kind, gap[:2], gap[2:]), dk)
    dk = dk - _times_dt_dk(grad_lo, tau, mass, dead, d.log_scale)
    return dx.to(x.dtype), dk, dtau


def _times_dt_dk(value: Tensor, tau: Tensor, mass: Tensor, dead: Tensor, log_scale: Tensor) -> Tensor:
    """value·τ/Σf, and 0 where value is 0 even if Σf underflows."""
    idle = (value == 0) | dead
    rate = torch.exp(torch.log(tau) - (torch.log(mass) + log_scale).masked_fill(idle, 0))
    return (value * rate).masked_fill(idle, 0)


def _push(
    dx: Tensor | None,
    dk: Tensor | None,
    dtau: Tensor | None,
    x: Tensor,
    tau: Tensor,
    hi: Tensor,
    lo: Tensor,
    cdf: CDF,
    kind: str,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Forward mode: the tangents of the output and of lo."""
    tau = tau.to(hi.dtype).expand(hi.shape)
    d = _linearize(x, hi, lo, tau, cdf, kind, None)
    dx = torch.zeros_like(d.z) if dx is None else dx.to(hi.dtype)
    dk = torch.zeros_like(hi) if dk is None else dk.to(hi.dtype).expand(hi.shape)
    dtau = torch.zeros_like(hi) if dtau is None else dtau.to(hi.dtype).expand(hi.shape)
    mass = d.weight.sum(-1)
    dead = mass == 0
    mass = mass.masked_fill(dead, 1)
    mean, z_mean = (d.weight * dx).sum(-1) / mass, (d.weight * d.z).sum(-1) / mass
    along = dx - mean.unsqueeze(-1) - (d.z - z_mean.unsqueeze(-1)) * dtau.unsqueeze(-1)
    k_rate = d.k_rate / mass.unsqueeze(-1)
    if d.gap is not None:
        gap = _gap_means(kind, [g.sum(-1, keepdim=True) for g in d.gap], [g.to(hi.dtype) for g in d.gap])
        k_rate = torch.where(dead.unsqueeze(-1), gap, k_rate)
    out = d.rate * along / tau.unsqueeze(-1) + k_rate * dk.unsqueeze(-1)
    dlo = mean - z_mean * dtau - _times_dt_dk(dk, tau, mass, dead, d.log_scale)
    if kind == "threshold":
        out = out[..., :0]
    return out.to(x.dtype), None, dlo
