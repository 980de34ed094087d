"""Choosing under a budget: not k of n, but as much as a budget pays for."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from khot import cdfs
from khot._core import arguments, eager, rows
from khot._core.arguments import Scalar
from khot._core.names import unknown
from khot._core.precision import at_least_single, on, widen
from khot._core.torch_internals import forward_mode_is_on, transforms_are_on
from khot._core.ways import by_rows
from khot._ops.budget_mask import greedy_mask
from khot._ops.nucleus import nucleus
from khot._ops.soft_budget import budget_map, check_costs
from khot.cdfs import CDF, CDFName

__all__ = ["budget_mask", "nucleus_mask", "soft_budget"]

BudgetName = Literal["score", "value"]


def soft_budget(
    input: Tensor,
    cost: Tensor,
    budget: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "logistic",
    by: BudgetName = "score",
    at_most: bool = False,
    largest: bool = True,
    mask: Tensor | None = None,
    hard: bool = False,
    group: Any = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """A differentiable selection of entries with costs: the weights y that spend a budget, Σ_i w_i y_i = B.

        by score    y_i = F((x_i − t)/τ)
        by value    y_i = F((x_i − t w_i)/τ)

    with the t for which Σ_i w_i y_i = B. It is :func:`khot.soft_topk` with a sum of costs in place of the
    number of entries, in two forms:

    - ``by="score"``: the input is a priority, such as a relevance, or a value per unit
      of cost. Entries with equal scores have equal weights, and to split an entry into several whose costs
      add up changes nothing. With log-probabilities (``logits.log_softmax(-1)``) as input, probabilities as
      cost and the budget p, it is a soft top-p (nucleus) selection. Do not take the logarithm of the
      probabilities instead: its gradient is NaN where one of them is 0.
    - ``by="value"``: the input is the value of the whole entry, and t is the value
      that a unit of cost has to have. As τ → 0, it is the fractional knapsack problem.

    Args:
        input: scores or values, of any floating-point dtype. −inf is never selected and is not paid for;
            +inf is always selected and paid for.
        cost: the costs w ≥ 0, a tensor of integers or floating-point numbers that broadcasts to the input.
            An entry of cost 0 is free: by score, it is selected like the others; by value, its weight is
            F(x/τ).
        budget: B, in [0, cost of all entries that may be selected]; a number or a tensor that broadcasts with
            the batch shape (the input's shape without ``dim``). A budget that exceeds the cost of all n
            entries by rounding pays for all: by a share of 4 ε + min(n ε/2, 2⁻¹⁰), where ε is the rounding of
            the costs' dtype, in the second term of float32 at most. Sums of n costs in any order are so near.
        dim: the dimension to select along.
        tau: temperature > 0, in the units of the input; a number or a tensor, as the budget. By value, a
            threshold has digits for temperatures from 1e-20 times the largest input on; with lower ones the
            spend is wrong by up to the cost of the entries at the threshold.
        cdf, largest: as for :func:`khot.soft_topk`.
        by: ``"score"`` or ``"value"``.
        at_most: the budget is a bound: where F(x/τ) spends no more than it, that is the result. The budget
            may then exceed the cost of all entries.
        mask: bool, broadcastable to the input; True where an entry may be selected. Scores and costs under
            False are ignored, even NaN and inf.
        hard: return the zeros and ones of :func:`budget_mask`, with the gradient of the soft selection. The
            mask skips entries that no longer fit and goes on with cheaper ones, so that it is no nucleus of a
            top-p selection: that is :func:`nucleus_mask`.
        group: a ``torch.distributed`` process group over which the rows are spread, as for
            :func:`khot.soft_topk`. Each process passes its shard of the input and of the cost, and the same
            budget and tau. Not with ``hard``.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input, in [0, 1]. A row with a NaN, or whose entries of +inf cost more
        than the budget, is NaN.

    The gradient in input, cost, budget and tau is exact (by implicit differentiation; nothing is unrolled),
    in both modes and to second order.

    Raises:
        ValueError: a cost that is negative, infinite or NaN; a budget that is negative, or more than the cost
            of all entries (unless ``at_most``); tau ≤ 0; a mask, cost or scalar that does not broadcast; an
            unknown cdf or ``by``; ``hard`` with a group; arguments that differ between the processes of a
            group. (The values of tensors are checked on the CPU in eager mode; elsewhere a row with a bad
            value is NaN.)
        TypeError: input that is not a floating-point tensor, cost that is not a tensor of
            real numbers, mask that is not bool.
        IndexError: dim out of range.

    Example:
        >>> scores, cost = torch.tensor([1.0, 3.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 1.0, 4.0])
        >>> y = khot.soft_budget(scores, cost, 3.0, tau=0.5)
        >>> y
        tensor([0.2416, 0.9456, 0.7018, 0.0413])
        >>> round((cost * y).sum().item(), 4)
        3.0
    """
    if offsets is None and not is_dynamo_compiling():
        plain = eager.soft_budget(
            input, cost, budget, dim, tau, cdf, by, at_most, largest, mask, hard, group
        )  # fmt: skip
        if plain is not None:
            return plain
    return _soft(input, cost, budget, dim, tau, cdf, by, at_most, largest, mask, hard, group, offsets=offsets)


@by_rows(1)
def _soft(
    input: Tensor,
    cost: Tensor,
    budget: Scalar,
    dim: int,
    tau: Scalar,
    cdf: CDFName | CDF,
    by: BudgetName,
    at_most: bool,
    largest: bool,
    mask: Tensor | None,
    hard: bool,
    group: Any,
    offsets: Tensor | None = None,
) -> Tensor:
    """:func:`soft_budget`."""
    row = rows.named(group)
    _check_by(by)

    def prepare() -> tuple[Tensor, Tensor, Tensor, Tensor, CDF]:
        arguments.check_flags(at_most=at_most, largest=largest, hard=hard)
        if hard and not row.here:
            raise ValueError("hard must be False with a group, but got True")
        F = cdfs.resolve(cdf)
        x = arguments.rows(input, dim, mask, largest)
        # the kernel looks at costs, too, and a row with a bad one is NaN; but a group agrees on errors before
        w = _costs(cost, input, dim, mask, check=not row.here)
        amount = arguments.per_row(budget, "budget", x, low=0, by_value=row.here)
        scale = arguments.per_row(tau, "tau", x, low=0, low_open=True, by_value=row.here)
        return x, w, amount, scale, F

    x, w, amount, scale, F = row.agree(
        prepare, budget=budget, tau=tau, cdf=cdf, by=by, at_most=at_most, largest=largest
    )
    y = budget_map(x, w, amount, scale, F, by, at_most, row)
    if hard:
        y = _greedy(x, w, amount, by, at_most) + (y - y.detach())
    return arguments.unrows(y, input, dim)


eager.PYTHON_WAY["soft_budget"] = _soft


@by_rows(1)
def budget_mask(
    input: Tensor,
    cost: Tensor,
    budget: Scalar,
    dim: int = -1,
    *,
    by: BudgetName = "score",
    at_most: bool = False,
    largest: bool = True,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The hard selection under a budget: 1 for the entries that are taken, 0 for the others.

    Each entry in turn is taken if what is left of the budget pays for it: in the order of the scores, or
    ``by="value"`` in the order of value per cost. Ties go to the lowest index. An entry that does not fit is
    skipped, and a cheaper one after it may be taken. By value, this is the greedy algorithm of the knapsack
    problem, whose value is short of the optimum by less than that of one entry.

    The costs that are taken never exceed the budget by more than the rounding of sums, so that a budget that
    is a sum of costs pays for them: by a share of (128 + n/2) ε of the budget for n costs in float64 (ε =
    2⁻⁵²), and of 2⁻¹⁶ for costs in float32 or less. Where a limit must be kept to the last unit, pass the
    costs as integers, which are added in float64.

    A budget in half precision is rounded, and may be exceeded by one unit of its own rounding (2⁻⁷ of it in
    bfloat16, 2⁻¹⁰ in float16). Add costs in half precision by ``cost.sum(-1, dtype=torch.float32)``: the sum
    in their own dtype is wrong by as much, and what is left after a subtraction by far more.

    Args:
        input, cost, dim, by, largest, mask: as for :func:`soft_budget`.
        budget: B ≥ 0; it may exceed the cost of all entries. Entries of +inf come first, but no more of them
            than it pays for.
        at_most: take no entry with an input below 0, as :func:`soft_budget` does in the limit of τ → 0.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones of the input's shape and dtype. The mask has no gradient. A row with a NaN is NaN.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`soft_budget`.

    Example:
        >>> scores, cost = torch.tensor([1.0, 3.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 1.5, 4.0])
        >>> khot.budget_mask(scores, cost, 3.0)
        tensor([1., 1., 0., 0.])
    """
    _check_by(by)
    arguments.check_flags(at_most=at_most, largest=largest)
    x = arguments.rows(input, dim, mask, largest)
    w = _costs(cost, input, dim, mask, check=True)
    amount = arguments.per_row(budget, "budget", x, low=0, by_value=True)
    return arguments.unrows(_greedy(x.detach(), w, amount, by, at_most), input, dim)


@by_rows(1)
def nucleus_mask(
    logits: Tensor,
    p: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The nucleus (top-p) of a distribution: 1 for the most probable entries, as few as have the probability
    p together, 0 for the others.

    The probabilities are softmax(logits), and their sums are taken in float64. Of equal entries, those of the
    lowest index are taken. With p = 1 these are all entries above −inf.

    Args:
        logits: of any floating-point dtype, unnormalised. −inf is never selected.
        p: in [0, 1]; a number or a tensor that broadcasts with the batch shape (the shape of the logits
            without ``dim``).
        dim: the dimension to select along.
        tau: temperature > 0 of the soft selection whose gradient the mask has, in the units of the logits.
        mask: bool, broadcastable to the logits; True where an entry may be selected. Entries under False are
            ignored, even NaN and inf, and have no probability.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones of the logits' shape and dtype. A row without probabilities is NaN: one with a NaN or
        +inf, or in which no entry may be selected.

    The gradient in logits, p and tau is a surrogate (straight-through), as with ``hard=True`` elsewhere: that
    of the soft nucleus ``soft_budget(log_p, log_p.exp(), p, tau=tau)``, where log_p are the
    log-probabilities. With p = 1 it is 0.

    Raises:
        ValueError: p outside [0, 1]; tau ≤ 0; a mask or scalar that does not broadcast. (The values of
            tensors are checked on the CPU in eager mode; elsewhere a row with a bad p is NaN.)
        TypeError: logits that are not a floating-point tensor, mask that is not bool.
        IndexError: dim out of range.

    Source: Holtzman et al. 2020.

    Example:
        >>> logits = torch.tensor([0.05, 0.5, 0.12, 0.3, 0.02, 0.01]).log()
        >>> khot.nucleus_mask(logits, 0.9)
        tensor([0., 1., 1., 1., 0., 0.])
    """
    arguments.check_input(logits, "logits")
    x = arguments.rows(logits, dim, mask)
    share = arguments.per_row(p, "p", x, low=0, high=1, by_value=True)
    scale = arguments.per_row(tau, "tau", x, low=0, low_open=True, by_value=True)
    y = nucleus(x.detach(), share.detach())
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in (x, share, scale))
    if recorded or forward_mode_is_on() or transforms_are_on():
        log_p = at_least_single(x).log_softmax(-1)
        cost = log_p.exp().nan_to_num(0)  # in a row without probabilities, which is NaN by its log_p
        spent = share if x.shape[-1] else 0 * share  # rows without entries can spend nothing
        # p = 1 is all of them: of a sum that is rounded to more, improbable entries would pay for the rest
        every = widen(cost.detach()).sum(-1)
        spent = torch.where(on(x.device, share.detach()) == 1, spent + (every - spent).detach(), spent)
        soft = budget_map(log_p, cost, spent, scale, cdfs.Logistic(), "score", False).to(x.dtype)
        y = y + (soft - soft.detach())
    return arguments.unrows(y, logits, dim)


def _greedy(x: Tensor, cost: Tensor, budget: Tensor, by: str, at_most: bool) -> Tensor:
    x, cost = x.detach(), cost.detach()
    order = x
    if by == "value":
        wide = widen(x)
        ratio = torch.where(cost > 0, wide / widen(cost), math.inf)
        # entries that are free and worth nothing come last
        ratio = torch.where((cost == 0) & (wide < 0), -torch.finfo(ratio.dtype).max, ratio)
        order = torch.where(wide.isinf() | wide.isnan(), wide, ratio)
    if at_most:
        order = order.masked_fill(x < 0, -math.inf)
    return greedy_mask(order, cost, budget.detach()).to(x.dtype)


def _costs(cost: Any, input: Tensor, dim: int, mask: Tensor | None, check: bool) -> Tensor:
    """The costs in the layout of the rows, 0 under the mask; with ``check``, their values are checked."""
    w = arguments.of_entries(cost, "cost", input, dim, mask)
    if check:
        check_costs(w)
    return w


def _check_by(by: Any) -> None:
    names = get_args(BudgetName)
    if not isinstance(by, str):
        raise TypeError(f"by must be a string, but got {type(by).__name__}")
    if by not in names:
        raise unknown("by", by, names)
