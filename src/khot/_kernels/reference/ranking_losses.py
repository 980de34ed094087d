"""Reference kernels of the ranking losses: what becomes of a list once its entries have ranks.

The losses and their slopes in the ranks are written in differentiable torch operations, so that a slope has
derivatives to any order and in either mode (`khot._ops.ranking_losses`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from khot._core.precision import not_below_zero, wide_dtype, widen
from khot._kernels.reference.laplace import laplace_count

__all__ = [
    "centred_places",
    "correlation_loss",
    "correlation_loss_backward",
    "correlation_slopes",
    "counted_mean",
    "ndcg_loss",
    "ndcg_loss_backward",
    "ndcg_slopes",
]


def _rank(x: Tensor, tau: Tensor) -> Tensor:
    return laplace_count(x, None, tau)[0]


# --------------------------------------------------------------------------------------------- NDCG


def ndcg_loss(
    rank: Tensor, relevance: Tensor, x: Tensor, cut: Tensor | None, k: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """1 − Σ_i w_i c_i/log₂(1 + r_i), where w is the relevance over the largest DCG of the list.

    Args:
        rank: (*batch, n), 1 for the best entry.
        relevance: (*batch, n), of any real dtype.
        x: (*batch, n), the scores; an entry of −inf takes no part, whatever its relevance.
        cut: (*batch, n), how much of each entry counts; None if all of them do.
        k: (*batch), how many places of the best list count; None for all of them.

    Returns:
        The loss (*batch), in the dtype of `precision.wide_dtype`; whether the list has an NDCG; and the
        weights w, in the ranks' dtype, 0 in lists without. The loss is NaN where the relevance of an entry
        is negative or infinite.
    """
    gain = torch.where(x == -math.inf, 0, widen(relevance))
    bad = ~((gain >= 0) & (gain < math.inf)).all(-1)
    place = torch.arange(x.shape[-1], dtype=gain.dtype, device=x.device)
    largest = gain.sort(-1, descending=True).values / torch.log2(2 + place)
    if k is not None:
        largest = largest * (widen(k).unsqueeze(-1) - place).clamp(0, 1)
    total = largest.sum(-1).masked_fill(bad, math.nan)
    counted = total != 0
    weight = (gain / total.masked_fill(~counted, 1).unsqueeze(-1)).to(rank.dtype).contiguous()
    share = weight if cut is None else weight * cut
    return not_below_zero(1 - (share / torch.log2(1 + widen(rank))).sum(-1)), counted, weight


def ndcg_slopes(rank: Tensor, weight: Tensor, cut: Tensor | None) -> tuple[Tensor, Tensor]:
    """The loss's derivatives in the rank and in the cut of each entry."""
    r, w = widen(rank), widen(weight)
    log = torch.log2(1 + r)
    share = w if cut is None else w * cut
    return share / (math.log(2) * (1 + r) * log * log), -w / log


def ndcg_loss_backward(
    grad: Tensor, rank: Tensor, weight: Tensor, cut: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients in the ranks and in the cut, which is empty if there is none."""
    by_rank, by_cut = ndcg_slopes(rank, weight, cut)
    drank = (grad.unsqueeze(-1) * by_rank).to(rank.dtype).contiguous()
    if cut is None:
        return drank, rank.new_empty(0)
    return drank, (grad.unsqueeze(-1) * by_cut).to(cut.dtype).contiguous()


# --------------------------------------------------------------------------------------- correlation


def centred_places(value: Tensor, x: Tensor, rank_of: Callable[[Tensor, Tensor], Tensor] = _rank) -> Tensor:
    """The place of each entry in the descending order of the values, less the mean of all places.

    Equal values share the mean of their places. So they are ranks at a τ below any difference.

    Args:
        value: (*batch, n), of any real dtype.
        x: (*batch, n), the scores; an entry of −inf takes no part.
        rank_of: gives the ranks, of which 1 is the largest entry's.

    Returns:
        (*batch, n) in x's dtype, at least float32; 0 for entries that take no part, and NaN in rows in which
        one that does has the value NaN.
    """
    there = x != -math.inf
    if not value.is_floating_point() and value.dtype.itemsize > 4:
        value = _steps(value)
    y = torch.where(there, widen(value), -math.inf)
    hard = torch.full((), 1e12 * torch.finfo(y.dtype).tiny, dtype=y.dtype, device=y.device)
    rank = rank_of(y, hard)
    m = there.sum(-1, keepdim=True)
    rank = torch.where(y == -math.inf, rank - 0.5 * (x.shape[-1] - m), rank)  # which others are tied with
    rank = torch.where(there, rank - 0.5 * (m + 1), 0)
    return rank.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def _steps(value: Tensor) -> Tensor:
    """The place of each integer among the different ones of its row; a float lacks digits for large ones."""
    if not value.numel():
        return value
    if value.dtype == torch.uint64:  # torch does not sort it
        value = value.view(torch.int64) ^ torch.iinfo(torch.int64).min
    y, order = value.long().sort(-1)
    # a difference may overflow, but only that of equal numbers is 0
    steps = y.diff(dim=-1, prepend=y[..., :1]) != 0
    return torch.zeros_like(order).scatter(-1, order, steps.cumsum(-1))


def correlation_loss(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """1 − Σ a b/√(Σ a² Σ b²), for numbers whose mean is 0.

    Args:
        a: (*batch, n). If all of them are as small as rounding makes sums of n ranks, they count as 0, and
            the loss is 1.
        b: (*batch, n), centred places.

    Returns:
        The loss (*batch), in the dtype of `precision.wide_dtype`, and whether any b is not 0.
    """
    a, b = widen(a), widen(b)
    spread = b.square().sum(-1)
    counted = spread != 0
    scaled, _ = _unit(a)
    cosine = (scaled * b).sum(-1) / spread.masked_fill(~counted, 1).sqrt()
    return not_below_zero(1 - cosine), counted


def _unit(a: Tensor) -> tuple[Tensor, Tensor]:
    """a over its length, (*batch, n), and 1 over the length, (*batch, 1): both 0 where that is rounding."""
    n, square = a.shape[-1], a.square().sum(-1, keepdim=True)
    noise = n * (4 * torch.finfo(wide_dtype(a.device)).eps * n) ** 2
    none = square <= noise
    over = square.masked_fill(none, 1).rsqrt().masked_fill(none, 0)
    return a * over, over


def correlation_slopes(a: Tensor, b: Tensor) -> Tensor:
    """The loss's derivative in each a."""
    b = widen(b)
    spread = b.square().sum(-1, keepdim=True)
    b = b * spread.masked_fill(spread == 0, 1).rsqrt()
    unit, over = _unit(widen(a))
    return over * (unit * (unit * b).sum(-1, keepdim=True) - b)


def correlation_loss_backward(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The gradient in a."""
    return (grad.unsqueeze(-1) * correlation_slopes(a, b)).to(a.dtype).contiguous()


# -------------------------------------------------------------------------------------------- the mean


def counted_mean(loss: Tensor, counted: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The mean of the losses that count, and 0 if none does, in the dtype; and their number, at least 1.

    Args:
        loss, counted: (*batch, lists). None for counted: all count; the mean of none is NaN then.
    """
    if counted is None:
        return loss.mean(-1).to(dtype), widen(loss.new_full(loss.shape[:-1], max(1, loss.shape[-1])))
    number = widen(counted.sum(-1)).clamp(min=1)
    return (torch.where(counted, loss, 0).sum(-1) / number).to(dtype), number
