"""The two-sided assignment y = F((x − r_i − c_j)/τ), whose rows and columns have given sums.

The thresholds r and c are results as well, so that the rule, which is written in torch operations on x, r, c
and τ, can be differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._core import rows
from khot._core.dispatch import Rule, define
from khot._core.precision import in_float64, wide_dtype
from khot._core.rows import HERE, Row
from khot._core.ways import by_kernel
from khot._kernels.reference import soft_assign as kernels
from khot._kernels.reference.sides import Sides
from khot._kernels.reference.soft_assign import SLACK, filled
from khot._ops.two_way import densities, lost_to_nan, two_way_fit
from khot._ops.unsolved import explain, is_unsolved
from khot.cdfs import CDF

__all__ = ["SLACK", "filled", "soft_assign"]


def soft_assign(
    x: Tensor,
    k: Tensor,
    capacity: Tensor,
    tau: Tensor,
    bias: Tensor,
    cdf: CDF,
    at_most: bool,
    row: Row = HERE,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, r and c for x (*batch, m, E); k (*batch, m), capacity and bias (*batch, E), and tau (*batch, 1) have
    exactly these dims. ``row`` says whether x and k are all rows of a matrix or a shard of them."""
    y, r, c = _soft_assign(x, k, capacity, tau, bias, *cdf.key, at_most, row.name)
    return y, r, c


class _Rule(Rule):
    own_dims = (2, 1, 1, 1, 1)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, k, capacity, tau, _, name, shape, ctx.at_most, ctx.group = inputs
        ctx.cdf = cdfs.resolve(name, shape)
        ctx.k_like, ctx.capacity_like = (k.shape, k.dtype), (capacity.shape, capacity.dtype)
        return x, tau, *outputs[1:]

    @staticmethod
    def vjp(ctx: Any, grad: Tensor | None, grad_r: Tensor | None, grad_c: Tensor | None) -> tuple[Any, ...]:
        x, tau, r, c = ctx.saved_tensors
        grad = torch.zeros_like(x) if grad is None else grad
        given = (grad, grad_r, grad_c, x, tau, r, c)
        served = _soft_assign_backward.is_served(x) and ctx.cdf.built_in and not ctx.group
        if served and by_kernel():
            dx, dk, dcapacity, dtau = _soft_assign_backward(*given, *ctx.cdf.key, ctx.at_most)
        else:
            dx, dk, dcapacity, dtau = _vjp(given, ctx.cdf, ctx.at_most, rows.of(ctx.group))
        return (
            dx,
            dk.sum_to_size(ctx.k_like[0]).to(x.device, ctx.k_like[1]),
            dcapacity.sum_to_size(ctx.capacity_like[0]).to(x.device, ctx.capacity_like[1]),
            dtau.sum_to_size(tau.shape).to(tau.device, tau.dtype),
            *(None,) * 5,
        )

    @staticmethod
    def jvp(
        ctx: Any, dx: Tensor | None, dk: Tensor | None, dq: Tensor | None, dtau: Tensor | None, *_: Any
    ) -> Any:
        x, tau, r, c = ctx.saved_tensors
        row = rows.of(ctx.group)
        z, f, fit, scale = _fit(x, tau, r, c, ctx.cdf, ctx.at_most, row)
        along = torch.zeros_like(f) if dx is None else in_float64(dx)
        if dtau is not None:
            along = along - z * in_float64(dtau).unsqueeze(-1)
        along = f * along
        by_row, (by_column,) = along.sum(-1), row.total([along.sum(-2)])
        by_row = by_row if dk is None else by_row - scale * in_float64(dk)
        by_column = by_column if dq is None else by_column - in_float64(tau) * in_float64(dq)
        dr, dc, _ = fit(by_row, by_column)
        dy = (along - f * (dr.unsqueeze(-1) + dc.unsqueeze(-2))) / scale.unsqueeze(-1)
        return dy.to(x.device, x.dtype), dr.to(r.device, r.dtype), dc.to(c.device, c.dtype)

    @staticmethod
    def examine(outputs: tuple[Tensor, ...], *inputs: Any) -> None:
        x, k, capacity, tau, *_, at_most, group = inputs
        y, _, c = outputs
        row = rows.of(group)
        if is_unsolved(y, x, row):
            least = torch.zeros_like(capacity) if at_most else capacity
            explain(c, x, Sides(k, k, least, capacity, None), tau, SLACK, row)


def _vjp(given: tuple[Any, ...], F: CDF, at_most: bool, row: Row) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients in x, k, capacity and τ, from what :func:`_backward` is given."""
    grad, grad_r, grad_c, x, tau, r, c = given
    z, f, fit, scale = _fit(x, tau, r, c, F, at_most, row)
    v = f * in_float64(grad) / scale.unsqueeze(-1)
    by_row, (by_column,) = -v.sum(-1), row.total([v.sum(-2)])
    by_row = by_row if grad_r is None else by_row + in_float64(grad_r)
    by_column = -by_column if grad_c is None else in_float64(grad_c) - by_column
    a, b, _ = fit(by_row, by_column)
    (b_here,) = row.share([b])
    dx = v + f * (a.unsqueeze(-1) + b_here.unsqueeze(-2))
    (dtau,) = row.total([-(z * dx).sum((-2, -1)).unsqueeze(-1)])
    return dx.to(device=x.device, dtype=x.dtype), -scale * a, -in_float64(tau) * b, dtau


def _backward(
    grad: Tensor, grad_r: Tensor | None, grad_c: Tensor | None, x: Tensor, tau: Tensor, r: Tensor, c: Tensor,
    cdf: str, shape: float, at_most: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    given = grad, grad_r, grad_c, x, tau, r, c
    dx, *rest = _vjp(given, cdfs.resolve(cdf, shape), at_most, HERE)
    dk, dcapacity, dtau = (value.to(device=x.device, dtype=wide_dtype(x.device)) for value in rest)
    return dx, dk, dcapacity, dtau


def _backward_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, _, x, _, r, c, *_ = given
    return x.new_empty(x.shape), r.new_empty(r.shape), c.new_empty(c.shape), r.new_empty(*x.shape[:-2], 1)


def _fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    *batch, m, width = x.shape
    wide = wide_dtype(x.device)
    return x.new_empty(x.shape), x.new_empty(*batch, m, dtype=wide), x.new_empty(*batch, width, dtype=wide)


_soft_assign = define("soft_assign", kernels.soft_assign, _fake, _Rule)
_soft_assign_backward = define("soft_assign_backward", _backward, _backward_fake)


def _fit(x: Tensor, tau: Tensor, r: Tensor, c: Tensor, F: CDF, at_most: bool, row: Row) -> Any:
    """z, f(z), the f-weighted two-way fit, and τ for the rows. Among all fits it takes the one in which b has
    the mean 0; with ``at_most``, b is 0 where a column has room."""
    z, f, tau = densities(x, tau, r, c, F, row)
    fit = two_way_fit(f, in_float64(c).detach() > 0 if at_most else None, not at_most, row)
    return z, lost_to_nan(f, c), fit, tau
