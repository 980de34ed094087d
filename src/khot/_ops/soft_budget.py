"""The threshold t with Σ_i w_i F((x_i − t a_i)/τ) = B, and the shares y = F((x − t a)/τ).

The results include t itself (as lo), so that the vjp, which is written in torch operations on x, w, t and τ
(:mod:`khot._kernels.reference.implicit`), can be differentiated again, to any order and in either mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._core import arguments, rows
from khot._core.dispatch import Rule, define, gradient
from khot._core.precision import widen
from khot._core.rows import HERE, Row
from khot._kernels.reference import implicit
from khot._kernels.reference import soft_budget as kernels
from khot._kernels.reference.implicit import Solved
from khot.cdfs import CDF

__all__ = ["budget_map", "check_costs"]


def budget_map(
    x: Tensor,
    cost: Tensor,
    budget: Tensor,
    tau: Tensor,
    cdf: CDF,
    by: str,
    at_most: bool,
    row: Row = HERE,
) -> Tensor:
    """The shares y, of x's shape and dtype.

    Args:
        x, cost: (*batch, n).
        budget, tau: broadcast with batch.
        by: "score" for y = F((x − t)/τ), "value" for y = F((x − t w)/τ).
        at_most: whether the budget may be left unspent.
        row: says whether x is the whole rows or a shard of them.
    """
    y, _, _ = _soft_budget.on(row.name, cdf)(x, cost, budget, tau, *cdf.key, by, at_most)
    return y


def check_costs(cost: Tensor) -> None:
    """Raise for a cost that is negative, infinite or NaN, if the values can be read."""
    if arguments.readable(cost):
        bad = ~((cost >= 0) & (cost < torch.inf))
        if bool(bad.any()):
            raise ValueError(f"cost must be finite and >= 0, but got {cost.detach()[bad][0].item()}")


class _Rule(Rule):
    own_dims = (1, 1)
    constants = (1,)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        x, cost, budget, tau, name, shape, ctx.by, ctx.at_most = inputs
        _, hi, lo = outputs
        ctx.key, ctx.budget_like = (name, shape), (budget.shape, budget.dtype)
        ctx.cdf = cdfs.resolve(name, shape)  # kept, so that a user's CDF lives as long as the graph
        return x, cost, tau, hi, lo

    @staticmethod
    def vjp(ctx: Any, grad: Tensor | None, _: Any, grad_lo: Tensor | None) -> tuple[Any, ...]:
        x, cost, tau, hi, lo = ctx.saved_tensors
        grad = torch.zeros_like(x) if grad is None else grad
        grad_lo = arguments.unasked(hi) if grad_lo is None else grad_lo
        how = *ctx.key, ctx.by, ctx.at_most
        dx, dcost, dbudget, dtau = _soft_budget_backward.pull(
            grad, grad_lo, x, cost, hi, lo, tau, *how, group=ctx.group, cdf=ctx.cdf
        )
        return (
            dx,
            gradient(ctx, 1, dcost, cost.shape, cost.dtype),
            gradient(ctx, 2, dbudget, *ctx.budget_like),
            gradient(ctx, 3, dtau, tau.shape, tau.dtype),
            *(None,) * 4,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Any, dcost: Any, dbudget: Any, dtau: Any, *_: Any) -> tuple[Any, ...]:
        x, cost, tau, hi, lo = ctx.saved_tensors
        out, dlo = implicit.jvp(dx, dcost, dbudget, dtau, _solved(ctx, x, cost, hi, lo, tau))
        return out, None, dlo

    @staticmethod
    def examine(outputs: tuple[Tensor, ...], *inputs: Any) -> None:
        x, cost, budget, tau, _, _, _, at_most, *group = inputs
        hi = outputs[1]
        if not arguments.readable(hi) or not bool(hi.isnan().any()):
            return
        arguments.check_values(tau, "tau", low=0, low_open=True)
        check_costs(cost)
        count, free = rows.of(*group).count, x == -torch.inf
        total = count(widen(cost).expand(x.shape).masked_fill(free, 0).sum(-1))
        wide = widen(budget).expand(hi.shape)
        bad = hi.isnan() & ~((wide >= 0) & (at_most | (wide <= total))) & ~total.isnan()
        bad = bad & ~count(widen(x.isnan().any(-1))).bool()
        if bool(bad.any()):
            raise ValueError(
                f"budget must lie in [0, cost of all entries], but got {wide[bad][0].item():g} for a row "
                f"with {total[bad][0].item():g}"
            )


def _solved(ctx: Any, x: Tensor, cost: Tensor, hi: Tensor, lo: Tensor, tau: Tensor) -> Solved:
    row = rows.of(ctx.group)
    return Solved(x, cost, hi, lo, tau, ctx.cdf, "y", ctx.by == "value", ctx.at_most, row)


def _backward_fake(
    grad: Tensor, grad_lo: Tensor, x: Tensor, cost: Tensor, hi: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), cost.new_empty(x.shape), hi.new_empty(hi.shape), hi.new_empty(hi.shape)


_soft_budget = define("soft_budget", kernels.soft_budget, "x, x[row] wide, x[row] wide", _Rule, spread=True)
_soft_budget_backward = define(
    "soft_budget_backward", kernels.soft_budget_backward, _backward_fake, spread=True
)
