"""The threshold t with Σ_i w_i F((x_i − t a_i)/τ) = B, and the shares y = F((x − t a)/τ).

There are two operators with one rule, as for the soft top-k: ``khot::soft_budget`` has compiled kernels,
and ``khot::reference_soft_budget`` serves rows spread over processes and users' CDFs. As there, the results
include t itself (as lo), so that the vjp, which is written in torch operations on x, w, t and τ, can be
differentiated again, to any order and in either mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._core import arguments, rows
from khot._core.dispatch import Rule, by_kernel, define
from khot._core.precision import on, wide_dtype, widen
from khot._core.rows import HERE, Row
from khot._kernels.reference import soft_budget as kernels
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
    if row.here and cdf.built_in:
        y, _, _ = _soft_budget(x, cost, budget, tau, *cdf.key, by, at_most)
    else:
        y, _, _ = _reference_soft_budget(x, cost, budget, tau, *cdf.key, by, at_most, row.name)
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
    zeros = False

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        x, cost, budget, tau, name, shape, ctx.by, ctx.at_most, *group = inputs
        _, hi, lo = outputs
        ctx.group = group  # no name in it where a compiled kernel may serve
        ctx.key, ctx.budget_like = (name, shape), (budget.shape, budget.dtype)
        ctx.cdf = cdfs.resolve(name, shape)  # kept, so that a user's CDF lives as long as the graph
        return x, cost, tau, hi, lo

    @staticmethod
    def vjp(ctx: Any, grad: Tensor | None, _: Any, grad_lo: Tensor | None) -> tuple[Any, ...]:
        x, cost, tau, hi, lo = ctx.saved_tensors
        grad = torch.zeros_like(x) if grad is None else grad
        grad_lo = arguments.unasked(hi) if grad_lo is None else grad_lo
        if by_kernel():
            backward = _reference_soft_budget_backward if ctx.group else _soft_budget_backward
            dx, dcost, dbudget, dtau = backward(
                grad, grad_lo, x, cost, hi, lo, tau, *ctx.key, ctx.by, ctx.at_most, *ctx.group
            )
        else:
            row = rows.of(*ctx.group)
            dx, dcost, dbudget, dtau = kernels.vjp(
                grad, grad_lo, x, cost, hi, lo, tau, ctx.cdf, ctx.by, ctx.at_most, row
            )
        shape, dtype = ctx.budget_like
        return (
            dx,
            dcost.sum_to_size(cost.shape) if ctx.needs_input_grad[1] else None,
            dbudget.sum_to_size(shape).to(dtype) if ctx.needs_input_grad[2] else None,
            dtau.sum_to_size(tau.shape).to(tau.dtype) if ctx.needs_input_grad[3] else None,
            *(None,) * (4 + len(ctx.group)),
        )

    @staticmethod
    def jvp(ctx: Any, dx: Any, dcost: Any, dbudget: Any, dtau: Any, *_: Any) -> tuple[Any, ...]:
        x, cost, tau, hi, lo = ctx.saved_tensors
        row, by_value = rows.of(*ctx.group), ctx.by == "value"
        tau = on(hi.device, tau).to(hi.dtype).expand(hi.shape)
        d = kernels.weigh(x, cost, hi, lo, tau, ctx.cdf, by_value, ctx.at_most, row)
        zero = torch.zeros_like(d.z)
        dx, dcost = (zero if v is None else v.to(hi.dtype) for v in (dx, dcost))
        dbudget, dtau = (
            torch.zeros_like(hi) if v is None else v.to(hi.dtype).expand(hi.shape) for v in (dbudget, dtau)
        )
        apart = x.isinf()
        dx, dcost = dx.masked_fill(apart, 0), dcost.masked_fill(x == -torch.inf, 0)
        t = hi.masked_fill(d.fixed, 0) + lo.masked_fill(d.fixed, 0)
        moved = dx - t.unsqueeze(-1) * dcost if by_value else dx
        along = moved - d.z * dtau.unsqueeze(-1)  # τ dz at a fixed t
        pay = d.w * d.a
        parts = [pay * d.weight, d.w * d.weight * along, d.share * dcost]
        for edge in d.edges:
            parts += [d.w.where(edge, 0), pay.where(edge, 0)]
        mass, shift, paid, *ends = row.total([part.sum(-1) for part in parts])
        dead = (mass == 0) | d.fixed
        mass = mass.masked_fill(dead, 1)
        left = (dbudget - paid).masked_fill(d.fixed, 0)  # what is left for the change of the shares
        dlo = (shift / mass).masked_fill(dead, 0)
        out = d.rate * (along - d.a * dlo.unsqueeze(-1)) / tau.unsqueeze(-1)
        rise = d.a * d.weight * (left / mass).masked_fill(dead, 0).unsqueeze(-1)
        if not ctx.cdf.full_support:
            shares = kernels.gap_parts(*ends)
            for edge, n, share in zip(d.edges, ends[1::2], shares, strict=True):
                part = (share * left / n.masked_fill(n == 0, 1)).unsqueeze(-1)
                rise = torch.where((dead & ~d.fixed).unsqueeze(-1) & edge, d.a * part, rise)
        idle = dead | (left == 0)
        lean = torch.exp(torch.log(tau) - (torch.log(mass) + d.log_scale).masked_fill(idle, 0))
        dlo = dlo - (left * lean).masked_fill(idle, 0)
        return (out + rise).to(x.dtype), None, dlo

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


def _fake(
    x: Tensor,
    cost: Tensor,
    budget: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    by: str,
    at_most: bool,
    group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    hi = x.new_empty(x.shape[:-1], dtype=wide_dtype(x.device))
    return x.new_empty(x.shape), hi, torch.empty_like(hi)


def _backward_fake(
    grad: Tensor, grad_lo: Tensor, x: Tensor, cost: Tensor, hi: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), cost.new_empty(x.shape), hi.new_empty(hi.shape), hi.new_empty(hi.shape)


_FORWARD = "Tensor x, Tensor cost, Tensor budget, Tensor tau, str cdf, float shape, str by, bool at_most"
_BACKWARD = (
    "Tensor grad, Tensor grad_lo, Tensor x, Tensor cost, Tensor hi, Tensor lo, Tensor tau, str cdf, "
    "float shape, str by, bool at_most"
)
_soft_budget = define(
    "soft_budget", f"({_FORWARD}) -> (Tensor, Tensor, Tensor)", kernels.soft_budget, _fake, _Rule
)
_soft_budget_backward = define(
    "soft_budget_backward",
    f"({_BACKWARD}) -> (Tensor, Tensor, Tensor, Tensor)",
    kernels.soft_budget_backward,
    _backward_fake,
)
_reference_soft_budget = define(
    "reference_soft_budget",
    f"({_FORWARD}, str group) -> (Tensor, Tensor, Tensor)",
    kernels.soft_budget,
    _fake,
    _Rule,
)
_reference_soft_budget_backward = define(
    "reference_soft_budget_backward",
    f"({_BACKWARD}, str group) -> (Tensor, Tensor, Tensor, Tensor)",
    kernels.soft_budget_backward,
    _backward_fake,
)
