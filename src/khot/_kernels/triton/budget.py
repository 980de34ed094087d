"""Soft budgets on a GPU: a row is searched and differentiated by :mod:`.exact` and :mod:`.exact_backward`."""

from __future__ import annotations

import torch
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import soft_budget as reference
from khot._kernels.triton import exact, exact_backward, layout


def soft_budget(
    x: Tensor, cost: Tensor, budget: Tensor, tau: Tensor, cdf: str, shape: float, by: str, at_most: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_budget.soft_budget`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        return reference.soft_budget(x, cost, budget, tau, cdf, shape, by, at_most)
    y = x.new_empty(x.shape)
    hi = torch.empty(batch, dtype=torch.float64, device=x.device)
    lo = torch.empty_like(hi)
    amount = layout.values(budget, batch, x.device)
    exact.solve(
        layout.rows(x, n), layout.matrix(cost, x), (*amount, layout.rest(budget, amount)),
        layout.values(tau, batch, x.device), y, hi, lo, n, cdfs.resolve(cdf, shape),
        by=by, at_most=at_most, slack=reference.SLACK * torch.finfo(cost.dtype).eps,
    )  # fmt: skip
    return y, hi, lo


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
    exact_backward.backward(
        layout.matrix(grad, x), layout.values(grad_lo, batch, x.device), layout.rows(x, n),
        layout.matrix(cost, x), (hi.contiguous(), lo.contiguous()), layout.values(tau, batch, x.device),
        (dx, dcost, dbudget, dtau), n, cdfs.resolve(cdf, shape), by=by, at_most=at_most,
    )  # fmt: skip
    return dx, dcost, dbudget, dtau
