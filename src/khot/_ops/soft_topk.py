"""The threshold t with Σ_j F((x_j − t)/τ) = k, and the output of a soft top-k: y, log y, or t itself.

The results include t itself (as lo). So the vjp, which is written in torch operations on x, t and τ
(:mod:`khot._kernels.reference.implicit`), can be differentiated again, to any order and in either mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._core import arguments, rows
from khot._core.dispatch import Rule, define, gradient
from khot._core.precision import at_least_single, wide_dtype
from khot._core.rows import HERE, Row
from khot._kernels.reference import implicit
from khot._kernels.reference import soft_topk as kernels
from khot._kernels.reference.implicit import Solved
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
        output: "y", "log" for log y, "threshold" for neither of them; or, for x on a GPU, "rounded" for t in
            x's dtype, which also carries its derivatives.
        row: says whether x is the whole rows or a shard of them.

    Returns:
        The output; hi, a constant; and lo, which carries the derivatives of t.
    """
    out, hi, lo = _soft_topk.on(row.name, cdf)(x, k, tau, *cdf.key, output)
    return out, hi, lo


def thresholds(x: Tensor, levels: Tensor, tau: Tensor, cdf: CDF) -> tuple[Tensor, Tensor]:
    """The pairs (hi, lo) of t with C(t) = level, for levels (*batch, m): lo carries the derivatives."""
    if levels.shape[-1] > 1:
        x = at_least_single(x)  # the gradients of the levels are summed in its dtype
    group = max(1, LEVELS_AT_ONCE // max(1, x.numel()))
    parts = []
    for level in levels.split(group, -1):
        # one level per row; expand() does not copy the rows
        copies = x.unsqueeze(-2).expand(*level.shape, x.shape[-1])
        parts.append(threshold_map(copies, level, tau.unsqueeze(-1), cdf, "threshold")[1:])
    return torch.cat([hi for hi, _ in parts], -1), torch.cat([lo for _, lo in parts], -1)


class _Rule(Rule):
    constants = (1, 3, 4)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        x, k, tau, name, shape, output = inputs
        ctx.rounded, ctx.output = output == "rounded", "threshold" if output == "rounded" else output
        out, hi, lo = outputs
        ctx.key, ctx.k_like = (name, shape), (k.shape, k.dtype)
        ctx.cdf = F = cdfs.resolve(name, shape)  # kept, so that a user's CDF lives as long as the graph
        compiled = x.dtype == torch.float32 and x.is_cpu and F.built_in and not ctx.group
        serves = ctx.output == "y" and F.density_from_value and compiled
        y = out if serves and not ctx.needs_input_grad[2] else None
        return x, tau, hi, lo, y

    @staticmethod
    def vjp(ctx: Any, grad: Any, _: Any, grad_lo: Any) -> tuple[Any, ...]:
        x, tau, hi, lo, y = ctx.saved_tensors
        if ctx.rounded and grad is not None:
            of_t = at_least_single(grad)  # the kernels take no half precision for numbers of rows
            grad_lo, grad = of_t if grad_lo is None else of_t + grad_lo, None
        if grad is None:
            grad = x.new_empty((*x.shape[:-1], 0)) if ctx.output == "threshold" else x.new_zeros(x.shape)
        if grad_lo is None:  # this is so for every first derivative of y
            grad_lo = arguments.unasked(hi)
        dx, dk, dtau = _soft_topk_backward.pull(
            grad, grad_lo, x, hi, lo, tau, *ctx.key, ctx.output, y, group=ctx.group, cdf=ctx.cdf
        )
        grad_tau = gradient(ctx, 2, dtau, tau.shape, tau.dtype)
        return dx, gradient(ctx, 1, dk, *ctx.k_like), grad_tau, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dk: Tensor | None, dtau: Tensor | None, *_: None) -> Any:
        x, tau, hi, lo, _y = ctx.saved_tensors
        out, dlo = implicit.jvp(dx, None, dk, dtau, _solved(ctx, x, hi, lo, tau))
        return dlo.to(x.dtype) if ctx.rounded else out, None, dlo

    @staticmethod
    def examine(outputs: tuple[Tensor, ...], *inputs: Any) -> None:
        if not arguments.shows_nan(outputs[1]):  # before anything is prepared for the message
            return
        x, k, tau, _, _, output, *group = inputs
        name = "count" if output in ("threshold", "rounded") else "k"
        arguments.explain_nan(outputs[1], x, k, tau, name=name, count=rows.of(*group).count)


def _solved(ctx: Any, x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor) -> Solved:
    return Solved(x, None, hi, lo, tau, ctx.cdf, ctx.output, False, False, rows.of(ctx.group))


def _fake(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str
) -> tuple[Tensor, Tensor, Tensor]:
    batch = x.shape[:-1]
    out = x.new_empty({"threshold": (*batch, 0), "rounded": batch}.get(output, x.shape))
    hi = x.new_empty(batch, dtype=wide_dtype(x.device))
    return out, hi, torch.empty_like(hi)


_soft_topk = define("soft_topk", kernels.soft_topk, _fake, _Rule, spread=True)
_soft_topk_backward = define("soft_topk_backward", kernels.soft_topk_backward, "x, hi, hi", spread=True)

torch.library.define(
    "khot::soft_topk_vjp",
    "(Tensor grad, Tensor grad_lo, Tensor x, Tensor hi, Tensor lo, Tensor tau, str cdf, float shape,"
    " str output) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("khot::soft_topk_vjp", "CompositeImplicitAutograd")
def _differentiable(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    output: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, k and τ, for calls of :mod:`khot._core.eager` that are differentiated twice."""
    solved = Solved(x, None, hi, lo, tau, cdfs.resolve(cdf, shape), output, False, False, HERE)
    dx, _, dk, dtau = implicit.vjp(grad, grad_lo, solved)
    return dx, dk, dtau
