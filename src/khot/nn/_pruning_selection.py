"""Which entries of a row are kept: by magnitude or score, to a budget, within bounds of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot import cdfs, masks
from khot._core import rows
from khot._core.arguments import Scalar
from khot._core.precision import vector
from khot.budgets import budget_mask, soft_budget
from khot.magnitude import soft_topk_magnitude

__all__ = ["Repeatable", "affordable_selection", "bounded_selection", "kept"]


def kept(
    row: Tensor, score: Tensor | None, k: Any, *, hard: bool, tau: Scalar, p: float, **options: Any
) -> Tensor:
    """The row with k entries kept: those of largest score, or without scores of largest magnitude."""
    if hard:
        return row * masks.topk_mask(row.abs() if score is None else score, k, **options)
    if score is None:
        return soft_topk_magnitude(row, k, tau=tau, p=p, rescale=True, **options)
    return row * masks.soft_topk(score, k, tau=tau, **options)


def affordable_selection(
    row: Tensor,
    score: Tensor | None,
    cost: Tensor,
    budget: float | Tensor,
    *,
    hard: bool,
    tau: Scalar,
    p: float,
) -> Tensor:
    """The row with the entries of largest score kept that the budget pays for, or without scores with those
    that change it least for what they cost."""
    free = cost == 0
    cdf: cdfs.CDF | cdfs.CDFName = "logistic"
    if score is None:
        size = row.abs().clamp(min=torch.finfo(row.dtype).tiny)
        score = size.log() - 0.5 * cost.masked_fill(free, 1).log().to(row.dtype)
        cdf = cdfs.Uniform() if p == 2 else cdfs.Power(p)
    score = score.masked_fill(free, math.inf)
    if hard:
        return row * budget_mask(score, cost, budget)
    return row * soft_budget(score, cost, budget, tau=tau, cdf=cdf)


def bounded_selection(
    row: Tensor,
    score: Tensor | None,
    lengths: list[int],
    k: int | Tensor,
    least: list[int],
    most: list[int],
    *,
    hard: bool,
    tau: Scalar,
    p: float,
    group: Any,
) -> Tensor:
    """The row with k entries kept, of which ``least`` to ``most`` are of each part.

    The largest ``least`` entries of a part are kept whatever the others are, those behind its ``most``
    largest never are, and what is between competes. No value is read, so that this can be traced.
    """
    size = row.detach().abs() if score is None else score.detach()
    parts = size.split(lengths)

    def largest(counts: list[int]) -> Tensor:
        of_parts = [masks.topk_mask(x, c, group=group) for x, c in zip(parts, counts, strict=True)]
        return torch.cat(of_parts).bool()

    ranked = size.masked_fill(largest(least), math.inf)
    chosen = masks.topk_mask(ranked, k, mask=largest(most), group=group)
    if hard:
        return row * chosen
    scores = [None] * len(lengths) if score is None else score.split(lengths)
    counts = rows.named(group).count(torch.stack([x.sum(dtype=torch.int64) for x in chosen.split(lengths)]))
    low, high = (vector(row.device, bound) for bound in (least, most))
    free = (counts > low) & (counts < high)
    competes = torch.cat([each.expand(n) for each, n in zip(free, lengths, strict=True)])
    options: dict[str, Any] = {"hard": False, "tau": tau, "p": p, "group": group}
    shared = kept(row, score, (counts * free).sum(), mask=competes, **options)
    alone = [kept(*each, **options) for each in zip(row.split(lengths), scores, counts, strict=True)]
    return torch.where(competes, shared, torch.cat(alone))


class Repeatable(torch.autograd.Function):
    """A function of tensors and numbers whose backward pass can run several times.

    The layers of a pruned model share a selection, but not always a loss. Autograd frees what a graph saved
    in the first backward pass through it. Here later passes, and those that are differentiated themselves,
    compute the function again.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        # attributes, because autograd frees what is saved by save_for_backward; the inputs are made for this
        # function, so that nothing changes them in place
        ctx.function, ctx.inputs = function, inputs
        ctx.graph = _recorded(function, inputs) if any(ctx.needs_input_grad) else None
        return function(*inputs) if ctx.graph is None else ctx.graph[1].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inputs, output), ctx.graph = ctx.graph or (ctx.inputs, None), None
        if torch.is_grad_enabled():
            inputs, output = ctx.inputs, ctx.function(*ctx.inputs)
        elif output is None:
            inputs, output = _recorded(ctx.function, inputs)
        needed = [x for x, need in zip(inputs, ctx.needs_input_grad[1:], strict=True) if need]
        again = torch.is_grad_enabled()
        grads = iter(torch.autograd.grad(output, needed, grad, create_graph=again, allow_unused=True))
        return (None, *(next(grads) if need else None for need in ctx.needs_input_grad[1:]))


def _recorded(function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> tuple[list[Any], Tensor]:
    """Copies of the inputs, and a graph from them to the output."""
    with torch.enable_grad():
        copies = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
        return copies, function(*copies)
