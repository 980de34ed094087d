"""The assignment y = F((x − r_i − c_j)/τ) whose rows and columns have sums within bounds.

The thresholds r and c are results as well, so that the rule, which is written in torch operations on x, r, c
and τ, can be differentiated again. Which sums are at their bounds is a constant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot import cdfs
from khot._core import rows
from khot._core.dispatch import Rule, define
from khot._core.precision import in_float64, wide_dtype
from khot._core.rows import HERE, Row
from khot._kernels.reference import bounded_assign as kernels
from khot._kernels.reference.sides import AT_LEAST, BETWEEN, Sides
from khot._ops.two_way import densities, lost_to_nan, two_way_fit
from khot._ops.unsolved import explain, is_unsolved
from khot.cdfs import CDF

__all__ = ["Bounds", "bounded_assign"]


class Bounds(NamedTuple):
    """The least and the most that rows, (*batch, m), and columns, (*batch, E), may have; and what all have
    together, (*batch, 1), or None. ``equal`` says that each sum is given: then prices have the mean 0.
    ``slack`` is by how much sums of bounds may miss one another, relative."""

    least_k: Tensor
    most_k: Tensor
    least: Tensor
    most: Tensor
    total: Tensor | None
    equal: bool
    slack: float


def bounded_assign(
    x: Tensor, bounds: Bounds, tau: Tensor, bias: Tensor, cdf: CDF, row: Row = HERE
) -> tuple[Tensor, Tensor, Tensor]:
    """y, c and t for x (*batch, m, E), tau (*batch, 1) and bias (*batch, E). ``row`` says whether x and the
    bounds of rows are all rows of a matrix or a shard of them."""
    *sides, total, equal, slack = bounds
    whole = torch.zeros_like(tau) if total is None else total
    options = (*cdf.key, total is not None, equal, slack, row.name)
    y, _, c, t, _, _ = _bounded_assign(x, *sides, whole, tau, bias, *options)
    return y, c, t


class _Rule(Rule):
    constants = (3, 4, 5)
    zeros = True
    own_dims = (2, 1, 1, 1, 1, 1, 1, 1)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *bounds, tau, _, name, shape, ctx.has_total, ctx.equal, _, ctx.group = inputs
        ctx.cdf = cdfs.resolve(name, shape)
        ctx.like = [(bound.shape, bound.dtype) for bound in bounds]
        _, r, c, _, row_side, side = outputs
        return x, tau, r, c, row_side, side

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, grad_r: Tensor, grad_c: Tensor, *_: Any) -> tuple[Any, ...]:
        x, tau, r, c, row_side, side = ctx.saved_tensors
        row = rows.of(ctx.group)
        row_side, side = in_float64(row_side), in_float64(side)  # where all that they meet is
        z, f, fit, own, scale = _fit(ctx, x, tau, r, c, row_side, side, row)
        grad, grad_r, grad_c = in_float64(grad), in_float64(grad_r), in_float64(grad_c)
        v = f * grad / scale.unsqueeze(-1)
        by_row = grad_r - v.sum(-1)
        by_column, by_joined = row.total([v.sum(-2), (by_row * ~own).sum(-1, keepdim=True)])
        a, b, e = fit(by_row, grad_c - by_column, by_joined)
        (b_here,) = row.share([b])
        dx = v + f * (a.unsqueeze(-1) + b_here.unsqueeze(-2))
        (dtau,) = row.total([-(z * dx).sum((-2, -1)).unsqueeze(-1)])
        tau_all = in_float64(tau)
        if e is None:
            dtotal, price = torch.zeros_like(tau_all), -scale * a
        else:  # what a row at its bound has more, the others have less
            (e_here,) = row.share([e])
            dtotal, price = -tau_all * e, -scale * (a - e_here)
        price, toll, lowest, low = price * own, -tau_all * b, row_side == AT_LEAST, side == AT_LEAST
        gradients = (price * lowest, price * ~lowest, toll * low, toll * ~low, dtotal)
        return (
            dx.to(x.device, x.dtype),
            *(
                value.sum_to_size(shape).to(x.device, dtype)
                for value, (shape, dtype) in zip(gradients, ctx.like, strict=True)
            ),
            dtau.sum_to_size(tau.shape).to(tau.device, tau.dtype),
            *(None,) * 7,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, *tangents: Any) -> Any:
        x, tau, r, c, row_side, side = ctx.saved_tensors
        row = rows.of(ctx.group)
        row_side, side = in_float64(row_side), in_float64(side)  # where all that they meet is
        z, f, fit, own, scale = _fit(ctx, x, tau, r, c, row_side, side, row)
        least_k, most_k, least, most, dtotal, dtau = (
            None if tangent is None else in_float64(tangent) for tangent in tangents[:6]
        )
        along = torch.zeros_like(f) if dx is None else in_float64(dx)
        if dtau is not None:
            along = along - z * dtau.unsqueeze(-1)
        along = f * along
        by_row = along.sum(-1)
        by_column, by_joined = row.total([along.sum(-2), (by_row * ~own).sum(-1, keepdim=True)])
        dk = _at_bound(least_k, most_k, row_side) * own
        (bounds,) = row.total([dk.sum(-1, keepdim=True)])
        tau_all = in_float64(tau)
        rest = -bounds if dtotal is None else dtotal - bounds
        dr, dc, _ = fit(
            by_row - scale * dk,
            by_column - tau_all * _at_bound(least, most, side),
            by_joined - tau_all * rest,
        )
        dy = (along - f * (dr.unsqueeze(-1) + dc.unsqueeze(-2))) / scale.unsqueeze(-1)
        dr, dc = dr.to(r.device, r.dtype), dc.to(c.device, c.dtype)
        return dy.to(x.device, x.dtype), dr, dc, None, None, None

    @staticmethod
    def examine(outputs: tuple[Tensor, ...], *inputs: Any) -> None:
        x, least_k, most_k, least, most, total, tau, _, _, _, has_total, _, slack, group = inputs
        y, _, c, *_ = outputs
        row = rows.of(group)
        if is_unsolved(y, x, row):
            sides = Sides(least_k, most_k, least, most, total if has_total else None)
            explain(c, x, sides, tau, slack, row)


def _at_bound(least: Tensor | None, most: Tensor | None, side: Tensor) -> Tensor:
    """The tangent of the bound that is met."""
    zero = torch.zeros_like(side)
    least, most = (zero if bound is None else bound for bound in (least, most))
    return torch.where(side == AT_LEAST, least, most)


def _fit(
    ctx: Any, x: Tensor, tau: Tensor, r: Tensor, c: Tensor, row_side: Tensor, side: Tensor, row: Row
) -> tuple[Tensor, Tensor, Any, Tensor, Tensor]:
    """z, f(z), their two-way fit, which rows have a threshold of their own, and τ for the rows."""
    z, f, scale = densities(x, tau, r, c, ctx.cdf, row)
    own = row_side != BETWEEN
    fit = two_way_fit(f, side != BETWEEN, ctx.equal, row, own, ctx.has_total)
    return z, lost_to_nan(f, c), fit, own, scale


def _fake(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    *batch, m, width = x.shape
    r, c, t = (x.new_empty(*batch, n, dtype=wide_dtype(x.device)) for n in (m, width, 1))
    sides = (torch.empty_like(each, dtype=torch.int8) for each in (r, c))
    return x.new_empty(x.shape), r, c, t, *sides


_bounded_assign = define("bounded_assign", kernels.bounded_assign, _fake, _Rule)
