"""What the derivatives of assignments are made of: densities, and their weighted fit by rows and columns."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from khot._core.precision import in_float64
from khot._core.rows import Row
from khot._ops.solve import solve
from khot.cdfs import CDF

__all__ = ["densities", "lost_to_nan", "two_way_fit"]

#: Below it, relative, a link between columns is rounding: they do not move one another.
SINGULAR = 1e-13
#: The inverse of a smaller sum of densities overflows: such a row does not move.
LEAST = 1e-300

#: (Σ_j f v, Σ_i f v, the sum of f v over the rows that have one number) → (a, b, that number)
Fit = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]


def densities(
    x: Tensor, tau: Tensor, r: Tensor, c: Tensor, F: CDF, row: Row
) -> tuple[Tensor, Tensor, Tensor]:
    """z = (x − r_i − c_j)/τ, f(z) and τ for the rows, in float64, on the CPU where the device of x has none.
    Both are 0 where nothing moves."""
    x, tau, r, c = in_float64(x), in_float64(tau), in_float64(r), in_float64(c)
    # rows and columns that are decided have infinite thresholds and do not move; where there is no
    # solution all thresholds are NaN
    still, stays = r.isinf() | r.isnan(), c.isinf() | c.isnan()
    fixed = x.isinf() | still.unsqueeze(-1) | stays.unsqueeze(-2)
    r, c = r.masked_fill(still, 0), c.masked_fill(stays, 0)
    c_here, tau = row.share([c, tau])
    value = x.masked_fill(fixed, 0)
    z = (value - r.unsqueeze(-1) - c_here.unsqueeze(-2)) / tau.unsqueeze(-1)
    z = z.masked_fill(fixed, 0)
    f = F.pdf(z).masked_fill(fixed, 0)
    return z, f, tau


def lost_to_nan(f: Tensor, c: Tensor) -> Tensor:
    """The densities, NaN where there is no solution, so that derivatives are NaN as well."""
    lost = in_float64(c).isnan()
    return f.masked_fill(lost.any(-1)[..., None, None], math.nan)


def two_way_fit(
    f: Tensor,
    may_move: Tensor | None,
    centred: bool,
    row: Row,
    own: Tensor | None = None,
    joined: bool = False,
) -> Fit:
    """The map from (Σ_j f v, Σ_i f v) to (a, b) with

        Σ_j f (v − a_i − b_j) = 0,   Σ_i f (v − a_i − b_j) = 0

    It is symmetric. Of rows that are spread over processes, each process has its f and a; b and the sums over
    columns are replicated.

    Args:
        f: the weights, (*batch, m, E), of which no gap is left open: they are 0 where v does not count.
        may_move: bool, (*batch, E): False where b is 0; None for all True.
        centred: of all fits, take the one in which b has the mean 0.
        own: bool, (*batch, m): the rows that have a number; None for all. The others have a = 0; or with
            ``joined`` they have one number in common, and one equation, the sum of theirs.
    """
    by_row = f.sum(-1)
    rests = by_row <= LEAST
    if own is not None:
        rests = rests | ~own
    inverse = torch.where(rests, 0, 1 / by_row.masked_fill(rests, 1))
    moves = row.count((f.detach() > 0).sum(-2)) > 0
    if may_move is not None:
        moves = moves & may_move
    free = moves.to(f.dtype)
    g = f * free.unsqueeze(-2)
    sums = [g.sum(-2), g.mT @ (inverse.unsqueeze(-1) * g)]
    others = None if own is None else (~own).to(f.dtype)
    if others is not None and joined:
        sums += [(g * others.unsqueeze(-1)).sum(-2), (by_row * others).sum(-1, keepdim=True)]
    columns, overlap, *together = row.total(sums)
    common: Tensor | None = None
    once: Tensor | None = None
    if together:
        common, weight = together
        still = weight <= LEAST
        once = torch.where(still, 0, 1 / weight.masked_fill(still, 1))
        overlap = overlap + common.unsqueeze(-1) * (once * common).unsqueeze(-2)
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
        if not centred:
            return b
        excess = b.sum(-1, keepdim=True)
        # what rounding leaves would count for columns whose densities all but vanish, as if it were theirs
        rounding = excess.abs() <= SINGULAR * b.abs().sum(-1, keepdim=True)
        excess = excess.masked_fill(rounding, 0)
        return b - free * excess / free.sum(-1, keepdim=True).clamp(min=1)

    def fit(
        by_row: Tensor, by_column: Tensor, by_joined: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        (through,) = row.total([(g.mT @ (inverse * by_row).unsqueeze(-1)).squeeze(-1)])
        if common is not None and once is not None and by_joined is not None:
            through = through + common * (once * by_joined)
        b = row.same(centre(pseudo_inverse(centre(by_column - through))))
        (b_here,) = row.share([b])
        a = inverse * (by_row - (g @ b_here.unsqueeze(-1)).squeeze(-1))
        if others is None or common is None or once is None or by_joined is None:
            return a, b, None
        e = once * (by_joined - (common * b).sum(-1, keepdim=True))
        (e_here,) = row.share([e])
        return a + others * e_here, b, e

    return fit


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
