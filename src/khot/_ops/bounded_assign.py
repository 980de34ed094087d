"""The assignment y = F((x − r_i − c_j)/τ) whose rows and columns have sums within bounds.

The thresholds r and c are results as well, so that the rule, which is written in torch operations on x, r, c
and τ, can be differentiated again. Which sums are at their bounds is a constant.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot import cdfs
from khot._core import arguments, rows
from khot._core.dispatch import Rule, define
from khot._core.precision import in_float64, wide_dtype
from khot._core.rows import HERE, Row
from khot._kernels.reference import bounded_assign as kernels
from khot._kernels.reference.bounded_assign import AT_LEAST, BETWEEN
from khot._kernels.reference.sides import Sides, beyond, limits
from khot._ops.two_way import densities, lost_to_nan, two_way_fit
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
        x, *bounds, total, tau, _, _, _, has_total, _, slack, group = inputs
        y, row = outputs[0], rows.of(group)
        if not arguments.readable(y) or (row.here and not math.isnan(y.sum().item())):
            return
        nothing, nan = row.reduce([y.isnan().any().double(), x.isnan().any().double()])
        if not nothing or nan:
            return
        arguments.check_values(tau, "tau", low=0, low_open=True)
        *batch, m, width = x.shape
        least_k, most_k = (v.expand(*batch, m).double() for v in bounds[:2])
        least, most = (v.expand(*batch, width).double() for v in bounds[2:])
        _explain(x.double(), Sides(least_k, most_k, least, most, total if has_total else None), slack, row)


def _explain(x: Tensor, sides: Sides, slack: float, row: Row) -> None:
    """Raise: bounds contradict one another, or leave no matrix. All processes of a group say it."""
    found, plain = limits(x, sides, row), arguments.plain
    certain, may = (x == math.inf).double(), (x != -math.inf).double()
    pinned, below = row.reduce([certain.sum(-2), may.sum(-2)])
    of_rows = ("k", "row", sides.least_k, sides.most_k, certain.sum(-1), may.sum(-1), found.bad_rows)
    of_columns = ("capacity", "column", sides.least, sides.most, pinned, below, found.bad_columns)
    for name, what, least, most, fewest, entries, many in (of_rows, of_columns):
        if not many.any():
            continue
        which, bad = "", beyond(least, most, fewest, entries)
        if bad.any():
            got = (least if least[bad][0] > entries[bad][0] else most)[bad][0].item()
            which = f", but got {plain(got)} for a {what} with {plain(entries[bad][0].item())}"
        raise ValueError(
            f"{name} must lie in [number of entries of +inf, number of entries that may be selected] of each "
            f"{what}{which}"
        )
    short, over = found.low_k > found.high * (1 + slack), found.low > found.high_k * (1 + slack)
    for name, other, bad, need, room in (
        ("capacity", "k", short, found.low_k, found.high),
        ("k", "capacity", over, found.low, found.high_k),
    ):
        if bad.any():
            raise ValueError(
                f"{name} must allow a sum of at least {plain(need[bad][0].item())}, which {other} asks for, "
                f"but got one of at most {plain(room[bad][0].item())}"
            )
    if sides.total is not None:
        floor, ceiling = found.range()
        total = sides.total.double().expand(*x.shape[:-2], 1).squeeze(-1)
        bad = ~((total >= floor * (1 - slack)) & (total <= ceiling * (1 + slack)))
        if bad.any():
            raise ValueError(
                f"total must lie in [{plain(floor[bad][0].item())}, {plain(ceiling[bad][0].item())}], as the "
                f"bounds of k and capacity allow, but got {plain(total[bad][0].item())}"
            )
    raise ValueError(
        "capacity must leave room for the bounds of k, and for the total, in the entries that may be "
        "selected, but no matrix meets all of them"
    )


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


def _fake(
    x: Tensor,
    least_k: Tensor,
    most_k: Tensor,
    least: Tensor,
    most: Tensor,
    total: Tensor,
    tau: Tensor,
    bias: Tensor,
    cdf: str,
    shape: float,
    has_total: bool,
    equal: bool,
    slack: float,
    group: str,
) -> tuple[Tensor, ...]:
    *batch, m, width = x.shape
    shapes, wide = ((*batch, m), (*batch, width), (*batch, 1)), wide_dtype(x.device)
    r, c, t = (x.new_empty(own, dtype=wide) for own in shapes)
    return (
        x.new_empty(x.shape),
        r,
        c,
        t,
        torch.empty_like(r, dtype=torch.int8),
        torch.empty_like(c, dtype=torch.int8),
    )


_bounded_assign = define("bounded_assign", kernels.bounded_assign, _fake, _Rule)
