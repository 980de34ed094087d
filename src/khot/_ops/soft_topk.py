"""The threshold t with Σ_j F((x_j − t)/τ) = k, and the output of a soft top-k: y, log y, or t itself.

There are two operators with one rule. ``khot::soft_topk`` has compiled kernels. ``khot::reference_soft_topk``
runs the reference kernels for everything that the compiled kernels do not support: rows spread over
processes, and users' CDFs. The results include t itself (as lo). So the vjp, which is written in torch
operations on x, t and τ, can be differentiated again, to any order and in either mode.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot import cdfs
from khot._core import arguments, rows
from khot._core.dispatch import Rule, by_kernel, define
from khot._core.precision import greatest, on, wide_dtype
from khot._core.rows import HERE, Row
from khot._kernels.reference import soft_topk as kernels
from khot._kernels.reference.soft_topk import gap_parts, log_scale, neighbours
from khot._kernels.reference.solver import Threshold
from khot.cdfs import CDF

__all__ = ["threshold_map", "thresholds"]

LEVELS_AT_ONCE = 1 << 22  # entries times levels in one call of the operator


def threshold_map(
    x: Tensor, k: Tensor, tau: Tensor, cdf: CDF, output: str, row: Row = HERE
) -> tuple[Tensor, Tensor, Tensor]:
    """y = F((x − t)/τ) with t = hi + lo solving C(t) = k.

    Args:
        x: (*batch, n).
        k, tau: broadcast with batch.
        output: "y", "log" for log y, or "threshold" for neither of them.
        row: says whether x is the whole rows or a shard of them.

    Returns:
        The output; hi, a constant; and lo, which carries the derivatives of t.
    """
    if row.here and cdf.built_in:
        out, hi, lo = _soft_topk(x, k, tau, *cdf.key, output)
    else:
        out, hi, lo, _, _ = _reference_soft_topk(x, k, tau, *cdf.key, output, row.name)
    return out, hi, lo


def thresholds(x: Tensor, levels: Tensor, tau: Tensor, cdf: CDF) -> tuple[Tensor, Tensor]:
    """The pairs (hi, lo) of t with C(t) = level, for levels (*batch, m): lo carries the derivatives."""
    group = max(1, LEVELS_AT_ONCE // max(1, x.numel()))
    parts = []
    for level in levels.split(group, -1):
        # one level per row; expand() does not copy the rows
        copies = x.unsqueeze(-2).expand(*level.shape, x.shape[-1])
        parts.append(threshold_map(copies, level, tau.unsqueeze(-1), cdf, "threshold")[1:])
    return torch.cat([hi for hi, _ in parts], -1), torch.cat([lo for _, lo in parts], -1)


class _Rule(Rule):
    constants = (1, 3, 4)
    zeros = False

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        x, k, tau, name, shape, ctx.output, *group = inputs
        out, hi, lo, *near = outputs
        ctx.group, ctx.key, ctx.k_like = (*group, "")[0], (name, shape), (k.shape, k.dtype)
        ctx.cdf = F = cdfs.resolve(name, shape)  # kept, so that a user's CDF lives as long as the graph
        float32 = x.dtype == torch.float32 and x.is_cpu
        serves = ctx.output == "y" and F.density_from_value and float32 and not near
        y = out if serves and not ctx.needs_input_grad[2] else None
        return x, tau, hi, lo, y, *near

    @staticmethod
    def vjp(ctx: Any, grad: Any, _: Any, grad_lo: Any, *__: Any) -> tuple[Any, ...]:
        x, tau, hi, lo, y, *near = ctx.saved_tensors
        if grad is None:
            grad = x.new_zeros((*x.shape[:-1], 0) if ctx.output == "threshold" else x.shape)
        if grad_lo is None:  # this is so for every first derivative of y
            grad_lo = arguments.unasked(hi)
        if not by_kernel():
            row = rows.of(ctx.group)
            dx, dk, dtau = _vjp(grad, grad_lo, x, hi, lo, tau, ctx.cdf, ctx.output, row, near)
        elif near:
            dx, dk, dtau = _reference_soft_topk_backward(
                grad, grad_lo, x, hi, lo, *near, tau, *ctx.key, ctx.output, ctx.group
            )
        else:
            dx, dk, dtau = _soft_topk_backward(grad, grad_lo, x, hi, lo, tau, *ctx.key, ctx.output, y)
        k_shape, k_dtype = ctx.k_like
        grad_k = dk.sum_to_size(k_shape).to(k_dtype) if ctx.needs_input_grad[1] else None
        grad_tau = dtau.sum_to_size(tau.shape).to(tau.dtype) if ctx.needs_input_grad[2] else None
        return dx, grad_k, grad_tau, None, None, None, *([None] if near else [])

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dk: Tensor | None, dtau: Tensor | None, *_: None) -> Any:
        x, tau, hi, lo, _y, *near = ctx.saved_tensors
        out, dlo = _jvp(dx, dk, dtau, x, tau, hi, lo, ctx.cdf, ctx.output, rows.of(ctx.group), near)
        return out, None, dlo, *([None, None] if near else [])

    @staticmethod
    def examine(outputs: tuple[Tensor, ...], *inputs: Any) -> None:
        if not arguments.shows_nan(outputs[1]):  # before anything is prepared for the message
            return
        x, k, tau, _, _, output, *group = inputs
        name = "count" if output == "threshold" else "k"
        arguments.explain_nan(outputs[1], x, k, tau, name=name, count=rows.of(*group).count)


def _fake(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str
) -> tuple[Tensor, Tensor, Tensor]:
    batch = x.shape[:-1]
    out = x.new_empty((*batch, 0) if output == "threshold" else x.shape)
    hi = x.new_empty(batch, dtype=wide_dtype(x.device))
    return out, hi, torch.empty_like(hi)


def _reference_fake(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str, group: str
) -> tuple[Tensor, ...]:
    out, hi, lo = _fake(x, k, tau, cdf, shape, output)
    return out, hi, lo, torch.empty_like(hi), torch.empty_like(hi)


def _backward_fake(grad: Tensor, grad_lo: Tensor, x: Tensor, hi: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), hi.new_empty(hi.shape), hi.new_empty(hi.shape)


_soft_topk = define(
    "soft_topk",
    "(Tensor x, Tensor k, Tensor tau, str cdf, float shape, str output) -> (Tensor, Tensor, Tensor)",
    kernels.soft_topk,
    _fake,
    _Rule,
)
_soft_topk_backward = define(
    "soft_topk_backward",
    "(Tensor grad, Tensor grad_lo, Tensor x, Tensor hi, Tensor lo, Tensor tau, str cdf, float shape, "
    "str output, Tensor? y=None) -> (Tensor, Tensor, Tensor)",
    kernels.soft_topk_backward,
    _backward_fake,
)
_reference_soft_topk = define(
    "reference_soft_topk",
    "(Tensor x, Tensor k, Tensor tau, str cdf, float shape, str output, str group) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernels.reference_soft_topk,
    _reference_fake,
    _Rule,
)
_reference_soft_topk_backward = define(
    "reference_soft_topk_backward",
    "(Tensor grad, Tensor grad_lo, Tensor x, Tensor hi, Tensor lo, Tensor above, Tensor below, Tensor tau, "
    "str cdf, float shape, str output, str group) -> (Tensor, Tensor, Tensor)",
    kernels.reference_soft_topk_backward,
    _backward_fake,
)


torch.library.define(
    "khot::soft_topk_vjp",
    "(Tensor grad, Tensor grad_lo, Tensor x, Tensor hi, Tensor lo, float tau, str cdf, str output) -> Tensor",
)


@torch.library.impl("khot::soft_topk_vjp", "CompositeImplicitAutograd")
def _differentiable(
    grad: Tensor, grad_lo: Tensor, x: Tensor, hi: Tensor, lo: Tensor, tau: float, cdf: str, output: str
) -> Tensor:
    """The gradient of x, for small calls (:mod:`khot._core.eager`) that are differentiated twice."""
    scale = torch.full_like(hi, tau)
    return _vjp(grad, grad_lo, x, hi, lo, scale, cdfs.resolve(cdf), output, HERE, [])[0]


# ------------------------------------------------------------------------------------ derivatives


class _Linear(NamedTuple):
    """What both modes of the derivative need for each entry, as differentiable functions of x, lo, τ."""

    z: Tensor
    weight: Tensor  # f, divided by a scale
    log_scale: Tensor  # of the batch shape
    rate: Tensor  # g = ∂out/∂z
    log_k_rate: Tensor | None  # the logarithm of ∂out/∂k times Σ weight; None if that is weight
    gap: tuple[Tensor, Tensor] | None  # for compact support: the entries equal to either neighbour of t


def _linearize(
    x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: CDF, output: str, near: list[Tensor]
) -> _Linear:
    """Weights are relative to a scale near their maximum, so that they are right even if every f
    underflows."""
    infinite = hi.abs() == greatest(hi)  # nothing, or everything, is selected
    tau = tau.to(hi.dtype).expand(hi.shape)
    decided = x.isinf() | infinite.unsqueeze(-1)  # kept out of products such as 0·inf
    hi_safe, lo_safe = (v.masked_fill(infinite, 0).unsqueeze(-1) for v in (hi, lo))
    z = ((x.to(hi.dtype).masked_fill(decided, 0) - hi_safe) - lo_safe) / tau.unsqueeze(-1)
    z = z.masked_fill(decided, 0)
    log_f = cdf.log_pdf(z).masked_fill(decided, -math.inf)

    still = log_f == -math.inf
    if not near:
        scale = log_f.detach().amax(-1).clamp(min=-greatest(hi)) if x.shape[-1] else torch.zeros_like(hi)
    else:
        scale = log_scale(Threshold(hi, lo.detach(), *near), tau.detach(), cdf)
    log_weight = (log_f - scale.unsqueeze(-1)).masked_fill(still, 0)
    weight = torch.exp(log_weight).masked_fill(still, 0)

    gap = None
    if not cdf.full_support:
        ends = near or neighbours(x.detach(), hi, lo.detach())
        up, down = (x.detach().to(hi.dtype) == v.unsqueeze(-1) for v in ends)
        gap = up & ~decided, down & ~decided
    if output == "log":
        still = still | (cdf.log_cdf(z.detach()) == -math.inf)
        # w/y through logarithms: y may underflow where w/y does not
        log_rate = cdf.log_hazard(z.masked_fill(still, cdf.median)).masked_fill(still, 0)
        rate = torch.exp(log_rate).masked_fill(still, 0)
        log_k_rate = (log_rate - scale.unsqueeze(-1)).masked_fill(still, -math.inf)
    else:
        rate, log_k_rate = torch.exp(log_f), None
    return _Linear(z, weight, scale, rate, log_k_rate, gap)


def _k_rate(d: _Linear, factor: Tensor) -> Tensor:
    """∂out/∂k times Σ weight, for a product with the factor: 0 where it overflows but the factor is 0."""
    if d.log_k_rate is None:
        return d.weight
    idle = (factor == 0) & (d.log_k_rate > math.log(greatest(d.log_k_rate)))
    return torch.exp(d.log_k_rate.masked_fill(idle, -math.inf))


def _in_gap(dead: Tensor, counts: list[Tensor]) -> Tensor:
    """Where no entry has f > 0 because t lies between two entries: t = ½(up + down) − ½(start + end)τ, or
    next to one of them where rounding has left no other."""
    return dead & ((counts[0] > 0) | (counts[1] > 0))


def _gap_means(output: str, counts: list[Tensor], sums: list[Tensor]) -> Tensor:
    """½(the mean over the least entries above t + the mean over the greatest entries below t), or the mean of
    one side where the other one has no entries. For log y only the first is used, because rejected entries
    have log y = −inf."""
    up, down = (p * s / n.clamp(min=1) for p, n, s in zip(gap_parts(*counts), counts, sums, strict=True))
    return up if output == "log" else up + down


def _vjp(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: CDF,
    output: str,
    row: Row,
    near: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse mode: the formulas of the reference's backward kernel, in operations that autograd records."""
    tau = on(hi.device, tau).to(hi.dtype).expand(hi.shape)
    lo_shared, tau_shared = row.share([lo, tau])
    d = _linearize(x, hi, lo_shared, tau_shared, cdf, output, near)
    v = torch.zeros_like(d.z) if output == "threshold" else grad.to(hi.dtype)
    u = v * d.rate
    parts = [d.weight, d.weight * d.z, v * _k_rate(d, v), u, u * d.z]
    if d.gap is not None:
        parts += [g.to(hi.dtype) for g in d.gap] + [v.where(g, 0) for g in d.gap]
    mass, moment, vk, total, u_moment, *gap = row.total([part.sum(-1) for part in parts])
    dead = mass == 0  # no entry has f > 0
    mass = mass.masked_fill(dead, 1)
    z_mean = moment / mass
    through_t = grad_lo - total / tau
    (spread,) = row.share([(through_t / mass).masked_fill(dead, 0)])
    dx = u / tau_shared.unsqueeze(-1) + d.weight * spread.unsqueeze(-1)
    dtau = -u_moment / tau - through_t * z_mean
    dk = vk / mass
    if gap and d.gap is not None:
        dk = torch.where(dead, _gap_means(output, gap[:2], gap[2:]), dk)
        flat, (start, end) = _in_gap(dead, gap[:2]), cdf.support
        up, down = gap_parts(*gap[:2])
        pull = grad_lo.masked_fill(~flat, 0)
        dtau = torch.where(flat, -(up * end + down * start) * pull, dtau)
        # equal entries share it equally
        shares = row.share([p * pull / n.clamp(min=1) for p, n in zip((up, down), gap[:2], strict=True)])
        for there, share in zip(d.gap, shares, strict=True):
            dx = torch.where(there & flat.unsqueeze(-1), share.unsqueeze(-1), dx)
    dk = dk - _times_dt_dk(grad_lo, tau, mass, dead, d.log_scale)
    return dx.to(x.dtype), dk, dtau


def _times_dt_dk(value: Tensor, tau: Tensor, mass: Tensor, dead: Tensor, log_scale: Tensor) -> Tensor:
    """value·τ/Σf; 0 where value is 0, even if Σf underflows, and in a gap, at which t jumps with k."""
    idle = (value == 0) | dead
    rate = torch.exp(torch.log(tau) - (torch.log(mass) + log_scale).masked_fill(idle, 0))
    return (value * rate).masked_fill(idle, 0)


def _jvp(
    dx: Tensor | None,
    dk: Tensor | None,
    dtau: Tensor | None,
    x: Tensor,
    tau: Tensor,
    hi: Tensor,
    lo: Tensor,
    cdf: CDF,
    output: str,
    row: Row,
    near: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Forward mode: the tangents of the output and of lo."""
    tau = on(hi.device, tau).to(hi.dtype).expand(hi.shape)
    d = _linearize(x, hi, lo, tau, cdf, output, near)
    dx = torch.zeros_like(d.z) if dx is None else dx.to(hi.dtype)
    dk = torch.zeros_like(hi) if dk is None else dk.to(hi.dtype).expand(hi.shape)
    dtau = torch.zeros_like(hi) if dtau is None else dtau.to(hi.dtype).expand(hi.shape)
    parts = [d.weight, d.weight * dx, d.weight * d.z]
    if d.gap is not None:
        parts += [g.to(hi.dtype) for g in d.gap] + [dx.where(g, 0) for g in d.gap]
    mass, along_t, moment, *ends = row.total([part.sum(-1) for part in parts])
    dead = mass == 0
    mass = mass.masked_fill(dead, 1)
    mean, z_mean = along_t / mass, moment / mass
    along = dx - mean.unsqueeze(-1) - (d.z - z_mean.unsqueeze(-1)) * dtau.unsqueeze(-1)
    along_k = _k_rate(d, dk.unsqueeze(-1)) / mass.unsqueeze(-1) * dk.unsqueeze(-1)
    dlo = mean - z_mean * dtau
    if d.gap is not None:
        gap = _gap_means(output, [c.unsqueeze(-1) for c in ends[:2]], [g.to(hi.dtype) for g in d.gap])
        along_k = torch.where(dead.unsqueeze(-1), gap * dk.unsqueeze(-1), along_k)
        flat, (start, end) = _in_gap(dead, ends[:2]), cdf.support
        up, down = gap_parts(*ends[:2])
        moved = _gap_means("y", ends[:2], ends[2:]) - (up * end + down * start) * dtau
        dlo = torch.where(flat, moved, dlo)
    out = d.rate * along / tau.unsqueeze(-1) + along_k
    dlo = dlo - _times_dt_dk(dk, tau, mass, dead, d.log_scale)
    if output == "threshold":
        out = out[..., :0]
    return out.to(x.dtype), dlo
