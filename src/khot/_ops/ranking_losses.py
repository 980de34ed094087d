"""The loss of each list, once its entries have ranks; and the mean over the lists."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, define
from khot._core.precision import wide_dtype
from khot._kernels.reference import ranking_losses as kernels
from khot._ops.laplace import laplace_rank

__all__ = ["centred_places", "correlation_loss", "counted_mean", "ndcg_loss"]


def ndcg_loss(
    rank: Tensor, relevance: Tensor, x: Tensor, cut: Tensor | None, k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """1 − NDCG of each list, and whether it has one: arguments and results of the reference kernel's. The
    derivatives are those in the ranks and in the cut."""
    loss, counted, _ = _ndcg_loss(rank, relevance, x, cut, k)
    return loss, counted


def centred_places(value: Tensor, x: Tensor) -> Tensor:
    """The place of each entry in the descending order of the values, less the mean of all places: a constant.

    Args:
        value, x: (*batch, n); an entry whose x is −inf takes no part.
    """
    places: Tensor = _centred_places(value, x.detach())
    return places


def correlation_loss(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """1 − the correlation of a and b, both with the mean 0, and whether b is not all 0. b is a constant."""
    loss, counted = _correlation_loss(a, b)
    return loss, counted


def counted_mean(loss: Tensor, counted: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The mean of the losses that count, and 0 if none does, in the dtype.

    Args:
        loss: (lists,), in the wide dtype.
        counted: (lists,), bool; None if all of them count, of which there may be none: then the mean is NaN.
    """
    mean: Tensor = _counted_mean(loss, counted, dtype)[0]
    return mean


class _NDCG(Rule):
    own_dims = (1, 1, 1, 1)
    constants = (1, 2)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        rank, _, _, cut, _ = inputs
        return rank, outputs[2], cut

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        rank, gain, cut = ctx.saved_tensors
        drank, dcut = _ndcg_loss_backward.pull(grad, rank, gain, cut)
        return drank, None, None, None if cut is None else dcut, None

    @staticmethod
    def jvp(ctx: Any, drank: Tensor | None, _: Any, __: Any, dcut: Tensor | None, *___: Any) -> Any:
        by_rank, by_cut = kernels.ndcg_slopes(*ctx.saved_tensors)
        changes = torch.zeros_like(by_rank) if drank is None else by_rank * drank
        return (changes if dcut is None else changes + by_cut * dcut).sum(-1), None, None


class _Correlation(Rule):
    own_dims = (1, 1)
    constants = (1,)

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:
        return _correlation_loss_backward.pull(grad, *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, _: Any) -> tuple[Tensor | None, None]:
        if da is None:
            return None, None
        return (kernels.correlation_slopes(*ctx.saved_tensors) * da).sum(-1), None


class _Places(Rule):
    own_dims = (1, 1)
    differentiable = False  # which entries take part has no derivative


class _Mean(Rule):
    own_dims = (1, 1)
    constants = (1,)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        loss, counted, ctx.dtype = inputs
        ctx.lists = loss.shape[-1]
        return counted, outputs[1]

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        counted, number = ctx.saved_tensors
        of_each = (grad / number).unsqueeze(-1)
        return of_each.expand(*grad.shape, ctx.lists) if counted is None else of_each * counted, None, None

    @staticmethod
    def jvp(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, None]:
        counted, number = ctx.saved_tensors
        if dloss is None:
            return None, None
        changes = dloss if counted is None else torch.where(counted, dloss, 0)
        return (changes.sum(-1) / number).to(ctx.dtype), None


def _wide(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=wide_dtype(x.device))


def _flags(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.bool)


_ndcg_loss = define(
    "ndcg_loss",
    kernels.ndcg_loss,
    lambda rank, *_: (_wide(rank, *rank.shape[:-1]), _flags(rank), rank.new_empty(rank.shape)),
    _NDCG,
)
_ndcg_loss_backward = define(
    "ndcg_loss_backward",
    kernels.ndcg_loss_backward,
    lambda grad, rank, weight, cut: (
        rank.new_empty(rank.shape),
        rank.new_empty(0) if cut is None else cut.new_empty(cut.shape),
    ),
)
_centred_places = define(
    "centred_places",
    functools.partial(kernels.centred_places, rank_of=laplace_rank),  # by the kernel of the device
    lambda value, x: x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)),
    _Places,
)
_correlation_loss = define(
    "correlation_loss",
    kernels.correlation_loss,
    lambda a, b: (_wide(a, *a.shape[:-1]), _flags(a)),
    _Correlation,
)
_correlation_loss_backward = define("correlation_loss_backward", kernels.correlation_loss_backward, "a")
_counted_mean = define(
    "counted_mean",
    kernels.counted_mean,
    lambda loss, counted, dtype: (
        loss.new_empty(loss.shape[:-1], dtype=dtype),
        _wide(loss, *loss.shape[:-1]),
    ),
    _Mean,
)
