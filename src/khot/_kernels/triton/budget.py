"""Which kernels take a batch of soft budgets: the one place that decides it.

- Of float32 and narrower: `resident_budget`; for few rows that are longer than `layout.STREAMED`,
  `split_budget`, where programs share a row. `pull` has the gradients of both.
- Of float64: `exact` and `exact_backward`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import soft_budget as reference
from khot._kernels.triton import exact, exact_backward, layout, pull, resident_budget, split_budget
from khot._kernels.triton.arguments import Threshold


def soft_budget(
    x: Tensor, cost: Tensor, budget: Tensor, tau: Tensor, cdf: str, shape: float, by: str, at_most: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_budget.soft_budget`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        return reference.soft_budget(x, cost, budget, tau, cdf, shape, by, at_most)
    y, F = x.new_empty(x.shape), cdfs.resolve(cdf, shape)
    hi = torch.empty(batch, dtype=torch.float64, device=x.device)
    lo = torch.empty_like(hi)
    amount = layout.values(budget, batch, x.device)
    source, prices = layout.rows(x, n), layout.matrix(cost, x)
    goal, tau_row = (*amount, layout.rest(budget, amount)), layout.values(tau, batch, x.device)
    slack = _slack(n, cost.dtype)
    if _in_float32(x, cost):
        kernels = split_budget if layout.splits(hi.numel(), n) else resident_budget
        kernels.soft_budget(
            source, prices, goal, tau_row, y, hi, lo, hi.numel(), n, F, by=by, at_most=at_most, slack=slack
        )  # fmt: skip
    else:
        exact.solve(
            source, prices, goal, tau_row, y, hi, lo, n, F, by=by, at_most=at_most, slack=slack
        )  # fmt: skip
    return y, hi, lo


@functools.lru_cache(maxsize=256)
def _slack(n: int, dtype: torch.dtype) -> float:
    return reference.slack(torch.tensor(n, dtype=torch.float64), dtype).item()


def _in_float32(x: Tensor, cost: Tensor) -> bool:
    """Whether a batch is solved in float32, but for rows that need more."""
    return x.dtype != torch.float64 and cost.dtype != torch.float64


def soft_budget_backward(
    grad: Tensor, grad_lo: Tensor, x: Tensor, cost: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str,
    shape: float, by: str, at_most: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`soft_budget.soft_budget_backward`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        return reference.soft_budget_backward(
            grad, grad_lo, x, cost, hi, lo, tau, cdf, shape, by, at_most
        )  # fmt: skip
    dx, dcost = x.new_empty(x.shape), cost.new_empty(x.shape)
    dbudget, dtau = hi.new_empty(batch), hi.new_empty(batch)
    t = Threshold(hi.contiguous(), lo.contiguous())
    given = (
        layout.matrix(grad, x), layout.values(grad_lo, batch, x.device), layout.rows(x, n),
        layout.matrix(cost, x), t, layout.values(tau, batch, x.device), (dx, dcost, dbudget, dtau),
    )  # fmt: skip
    F = cdfs.resolve(cdf, shape)
    kernels = pull if _in_float32(x, cost) else exact_backward
    kernels.backward(*given, n, F, by=by, at_most=at_most)
    return dx, dcost, dbudget, dtau
