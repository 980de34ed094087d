"""The two-sided assignment y = F((x − r_i − c_j)/τ), whose rows and columns have given sums.

The thresholds r and c are results as well, so that the rule, which is written in torch operations on x, r, c
and τ, can be differentiated again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._core import arguments, rows
from khot._core.dispatch import Rule, define
from khot._core.precision import in_float64, wide_dtype, widen
from khot._core.rows import HERE, Row
from khot._kernels.reference import soft_assign as kernels
from khot._ops.solve import solve
from khot.cdfs import CDF

__all__ = ["soft_assign"]

#: Below it, relative, a link between columns is rounding: they do not move one another.
SINGULAR = 1e-13
#: The inverse of a smaller sum of densities overflows: such a row does not move.
LEAST = 1e-300


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
    def vjp(ctx: Any, grad: Tensor, grad_r: Tensor, grad_c: Tensor) -> tuple[Any, ...]:
        x, tau, r, c = ctx.saved_tensors
        row = rows.of(ctx.group)
        z, f, fit, scale = _fit(x, tau, r, c, ctx.cdf, ctx.at_most, row)
        grad, grad_r, grad_c = in_float64(grad), in_float64(grad_r), in_float64(grad_c)
        v = f * grad / scale.unsqueeze(-1)
        (by_column,) = row.total([v.sum(-2)])
        a, b = fit(grad_r - v.sum(-1), grad_c - by_column)
        (b_here,) = row.share([b])
        dx = v + f * (a.unsqueeze(-1) + b_here.unsqueeze(-2))
        (dtau,) = row.total([-(z * dx).sum((-2, -1)).unsqueeze(-1)])
        dk, dcapacity = -scale * a, -in_float64(tau) * b
        return (
            dx.to(x.device, x.dtype),
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
        dr, dc = fit(by_row, by_column)
        dy = (along - f * (dr.unsqueeze(-1) + dc.unsqueeze(-2))) / scale.unsqueeze(-1)
        return dy.to(x.device, x.dtype), dr.to(r.device, r.dtype), dc.to(c.device, c.dtype)

    @staticmethod
    def examine(outputs: tuple[Tensor, ...], *inputs: Any) -> None:
        x, k, capacity, tau, *_, at_most, group = inputs
        y, row = outputs[0], rows.of(group)
        if not arguments.readable(y):
            return
        if row.here and not math.isnan(y.sum().item()):
            return
        most, k = (x != -math.inf).sum(-1), k.expand(x.shape[:-1])
        facts = (y.isnan().any(), x.isnan().any(), (k < (x == math.inf).sum(-1)) | (k > most))
        nothing, nan, many, total = row.reduce([*(v.sum().double() for v in facts), widen(k).sum()])
        if not nothing or nan:
            return
        arguments.check_values(tau, "tau", low=0, low_open=True)
        if many:
            bad = facts[-1]
            which = ""
            if bad.any():
                got = arguments.plain(k[bad][0].item())
                which = f", but got {got} for a row with {most[bad][0].item()}"
            raise ValueError(
                "k must lie in [number of entries of +inf, number of entries that may be selected] of each "
                f"row{which}"
            )
        relation = "at least" if at_most else "equal to"
        raise ValueError(
            f"capacity must be {relation} the sum of k in total, and leave room for k in the entries that "
            f"may be selected, but got a capacity of {arguments.plain(capacity.sum().item())} for a sum of k "
            f"of {arguments.plain(total.item())}"
        )


def _fake(
    x: Tensor,
    k: Tensor,
    capacity: Tensor,
    tau: Tensor,
    bias: Tensor,
    cdf: str,
    shape: float,
    at_most: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    *batch, m, width = x.shape
    wide = wide_dtype(x.device)
    return x.new_empty(x.shape), x.new_empty(*batch, m, dtype=wide), x.new_empty(*batch, width, dtype=wide)


_soft_assign = define(
    "soft_assign",
    "(Tensor x, Tensor k, Tensor capacity, Tensor tau, Tensor bias, str cdf, float shape, bool at_most, "
    "str group) "
    "-> (Tensor, Tensor, Tensor)",
    kernels.soft_assign,
    _fake,
    _Rule,
)


def _fit(x: Tensor, tau: Tensor, r: Tensor, c: Tensor, F: CDF, at_most: bool, row: Row) -> Any:
    """z, f(z), the f-weighted two-way fit, and τ for the rows. The fit is the map from (Σ_j f v, Σ_i f v) to
    (a, b) with

        Σ_j f (v − a_i − b_j) = 0,   Σ_i f (v − a_i − b_j) = 0

    It is symmetric. Among all fits it takes the one in which b has the mean 0; with ``at_most``, b is 0 where
    a column has room. All of it is in float64, on the CPU where the device of x has none.

    Of rows that are spread over processes, each process has its x, r and a; c, b and the sums over columns
    are replicated.
    """
    x, tau, r, c = in_float64(x), in_float64(tau), in_float64(r), in_float64(c)
    # rows and columns that are decided have infinite thresholds and do not move; where there is no
    # solution all thresholds are NaN, and so are the derivatives
    lost = c.isnan()
    still, stays = r.isinf() | r.isnan(), c.isinf() | lost
    fixed = x.isinf() | still.unsqueeze(-1) | stays.unsqueeze(-2)
    r, c = r.masked_fill(still, 0), c.masked_fill(stays, 0)
    c_here, tau = row.share([c, tau])
    value = x.masked_fill(fixed, 0)
    z = (value - r.unsqueeze(-1) - c_here.unsqueeze(-2)) / tau.unsqueeze(-1)
    z = z.masked_fill(fixed, 0)
    f = F.pdf(z).masked_fill(fixed, 0)
    by_row = f.sum(-1)
    rests = by_row <= LEAST
    inverse = torch.where(rests, 0, 1 / by_row.masked_fill(rests, 1))
    moves = row.count((f.detach() > 0).sum(-2)) > 0
    if at_most:
        moves = moves & (c.detach() > 0)
    free = moves.to(f.dtype)
    g = f * free.unsqueeze(-2)
    columns, overlap = row.total([g.sum(-2), g.mT @ (inverse.unsqueeze(-1) * g)])
    root = torch.where(moves, columns.masked_fill(~moves, 1).rsqrt(), 0)
    schur = columns.diag_embed() - overlap
    scaled = schur * root.unsqueeze(-1) * root.unsqueeze(-2)
    null = _null_space(scaled, torch.where(moves, columns.masked_fill(~moves, 1).sqrt(), 0), moves)
    regular = scaled + null + (1 - free).diag_embed()

    def pseudo_inverse(b: Tensor) -> Tensor:
        """The pseudo-inverse of the Schur complement times b. Nothing here waits for a device, as an
        eigendecomposition or a check for errors would."""
        b = root * b
        inner = solve(regular, b - (null @ b.unsqueeze(-1)).squeeze(-1))
        return root * (inner - (null @ inner.unsqueeze(-1)).squeeze(-1))

    def centre(b: Tensor) -> Tensor:
        b = b * free
        if at_most:
            return b
        return b - free * b.sum(-1, keepdim=True) / free.sum(-1, keepdim=True).clamp(min=1)

    def fit(by_row: Tensor, by_column: Tensor) -> tuple[Tensor, Tensor]:
        (through,) = row.total([(g.mT @ (inverse * by_row).unsqueeze(-1)).squeeze(-1)])
        b = row.same(centre(pseudo_inverse(centre(by_column - through))))
        (b_here,) = row.share([b])
        return inverse * (by_row - (g @ b_here.unsqueeze(-1)).squeeze(-1)), b

    f = f.masked_fill(lost.any(-1)[..., None, None], math.nan)
    return z, f, fit, tau


def _null_space(scaled: Tensor, weight: Tensor, moves: Tensor) -> Tensor:
    """The projection onto the null space of D^−½ (D − overlap) D^−½, with weight = D^½ where columns move.

    Columns that rows link, directly or through others, move together: their weights span the null space,
    unless rows link them to a column that does not move.
    """
    n = scaled.shape[-1]
    fixed = scaled.detach()
    together = ((fixed.abs() > SINGULAR) | torch.eye(n, dtype=torch.bool, device=scaled.device)).to(
        fixed.dtype
    )
    for _ in range(max(n - 1, 0).bit_length()):
        together = (together @ together > 0).to(fixed.dtype)
    total = (together @ weight.square().unsqueeze(-1)).squeeze(-1)
    pulls = weight.detach() * (fixed @ weight.detach().unsqueeze(-1)).squeeze(-1)
    pull = (together @ pulls.unsqueeze(-1)).squeeze(-1)
    loose = moves & (pull.abs() <= SINGULAR * n * total.detach())
    weight = weight * loose * total.masked_fill(~loose, 1).rsqrt()
    return together * weight.unsqueeze(-1) * weight.unsqueeze(-2)
