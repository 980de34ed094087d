"""Top-k by optimal transport, with Sinkhorn's iterations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from khot._core import arguments
from khot._core.arguments import Scalar
from khot.baselines._rows import at_dim, check_iterations, prepare

__all__ = ["sinkhorn_topk", "sorted_sinkhorn_topk"]


def sinkhorn_topk(
    input: Tensor, k: Scalar, dim: int = -1, *, epsilon: Scalar = 0.1, iterations: int = 200
) -> Tensor:
    """SOFT top-k by a fixed number of Sinkhorn iterations.

    The result is n times the mass that goes to the anchor 1 in the entropic optimal transport of the scores
    onto 0 and 1, with cost C_ij = (x_i − a_j)² divided by its maximum over the whole batch. When converged,
    it is :func:`khot.ot_topk` at epsilon·max C. For ε ≤ 0.01, and after a NaN, the iterations work with
    logarithms.

    Defects: a row's result depends on the other rows through the maximum, so that one NaN makes the whole
    batch NaN, and one +inf makes every entry of the other rows k/n. If the iterations stop early, as they do
    for small ε, entries exceed 1, and the gradient is that of a fixed point that was not reached. The maximum
    has no gradient. For k = 0 and k = n the gradient is NaN.

    Args:
        input: scores, of any floating-point dtype. −inf is replaced by a score that is as far below the
            smallest of the batch as this is below the largest.
        k: as for :func:`rescaled_sigmoid_topk`.
        dim: the dimension to select along.
        epsilon: regularisation > 0; a number or a tensor that broadcasts with the batch shape. No gradient.
        iterations: at least 1.

    Returns:
        Same shape and dtype as the input, each row summing to k, in [0, 1] if converged. Differentiable in
        input, to first order, by the implicit function theorem at the last iterate.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`khot.ot_topk`; iterations < 1.

    Source: Xie et al. 2020, Algorithm 1 and appendix H.

    Example:
        >>> x = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
        >>> khot.baselines.sinkhorn_topk(x, 2)
        tensor([[0.2477, 0.9656, 0.7523, 0.0344]])
        >>> khot.baselines.sinkhorn_topk(torch.cat((x, x * 5)), 2)[:1]
        tensor([[0.4889, 0.5333, 0.5111, 0.4667]])
    """
    check_iterations(iterations)
    x, k, epsilon = prepare(input, k, dim, epsilon, tau_name="epsilon")
    if not x.numel():
        return torch.zeros_like(input)
    share = (k / x.shape[-1]).detach()
    plan = _plan(x, torch.tensor([1.0, 0.0]), torch.stack((share, 1 - share), -1), epsilon, iterations)
    return arguments.unrows((x.shape[-1] * plan[..., 0]).to(input.dtype), input, dim)


def sorted_sinkhorn_topk(
    input: Tensor, k: int, dim: int = -1, *, epsilon: Scalar = 0.1, iterations: int = 200
) -> Tensor:
    """Sorted SOFT top-k by a fixed number of Sinkhorn iterations.

    As :func:`sinkhorn_topk`, with the anchors k, k − 1, …, 1, each of mass 1/n, and the anchor 0 with the
    rest. When converged, it is :func:`khot.sorted_soft_topk` at epsilon·max C.

    Defects: as for :func:`sinkhorn_topk`, in entries and columns. For k = n the matrix whose inverse the
    gradient needs is singular. O(nk) memory for the iterations and for the gradient.

    Args:
        input, dim, epsilon, iterations: as for :func:`sinkhorn_topk`.
        k: an int in [1, n].

    Returns:
        A tensor of the input's dtype and shape, with ``dim`` replaced by (k, n): one row per place. Each row
        sums to 1. Differentiable in input, to first order, by the implicit function theorem at the last
        iterate.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`khot.sorted_soft_topk`; iterations < 1.

    Source: Xie et al. 2020, appendices B and H: Algorithm 3, in the order of multiplications of Algorithm 4.

    Example:
        >>> khot.baselines.sorted_sinkhorn_topk(torch.tensor([1.0, 3.0, 2.0, 0.5]), 2)
        tensor([[0.0080, 0.7779, 0.2131, 0.0010],
                [0.1847, 0.2112, 0.5340, 0.0700]])
    """
    check_iterations(iterations)
    x, _, epsilon = prepare(input, 0, dim, epsilon, tau_name="epsilon")
    n = x.shape[-1]
    arguments.check_integer(k, "k", low=1, high=n)
    anchors = torch.arange(k, -1, -1)
    nu = torch.where(anchors > 0, 1, n - k).to(x) / n
    plan = _plan(x, anchors, nu.expand(*x.shape[:-1], 1, k + 1), epsilon, iterations)
    return at_dim((n * plan[..., :k]).mT.to(input.dtype), input, dim)


def _plan(x: Tensor, anchors: Tensor, nu: Tensor, epsilon: Tensor, iterations: int) -> Tensor:
    """The transport of the scores (*batch, n) to m anchors of mass nu (*batch, 1, m): (*batch, n, m)."""
    if not x.numel():
        return x.unsqueeze(-1).expand(*x.shape, len(anchors))
    finite = x.detach().masked_fill(x == -math.inf, math.inf)
    x = x.masked_fill(x == -math.inf, finite.amin() - (x.detach().amax() - finite.amin()))
    cost = (x.unsqueeze(-1) - anchors.to(x)) ** 2
    cost = cost / cost.detach().max()
    plan: Tensor = _Sinkhorn.apply(cost, nu, epsilon.detach().unsqueeze(-1), iterations)
    return plan


class _Sinkhorn(Function):
    """The plan (*batch, n, m) with row sums 1/n and column sums nu (*batch, 1, m)."""

    @staticmethod
    def forward(ctx: Any, cost: Tensor, nu: Tensor, epsilon: Tensor, iterations: int) -> Tensor:
        n = cost.shape[-2]
        plan = _scale(torch.exp(-cost / epsilon), nu, iterations) if bool((epsilon > 1e-2).all()) else None
        if plan is None or bool(plan.isnan().any()):
            f, g = torch.zeros_like(cost[..., :1]), torch.zeros_like(nu)
            for _ in range(iterations):
                f = -math.log(n) - torch.logsumexp(g - cost / epsilon, -1, keepdim=True)
                g = torch.log(nu) - torch.logsumexp(f - cost / epsilon, -2, keepdim=True)
            plan = torch.exp(f + g - cost / epsilon)
        ctx.save_for_backward(plan, nu, epsilon)
        return plan

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Appendix H: the dual of the last anchor is fixed, so that K belongs to the m − 1 others."""
        plan, nu, epsilon = ctx.saved_tensors
        others = plan[..., :-1]
        first = plan.shape[-2] * others  # Γ̄/μ
        kappa = torch.diag_embed(nu[..., 0, :-1]) - first.mT @ others
        weighted = grad * plan
        by_row = plan.shape[-2] * weighted.sum(-1, keepdim=True)
        by_column = weighted[..., :-1].sum(-2).unsqueeze(-1)
        # of the duals: ζ of the anchors, and ξ of each entry
        zeta = torch.linalg.inv_ex(kappa).inverse @ (by_column - others.mT @ by_row)
        xi = by_row - first @ zeta
        zeta = torch.nn.functional.pad(zeta.mT, (0, 1))
        return plan * (xi + zeta - grad) / epsilon, None, None, None


def _scale(kernel: Tensor, nu: Tensor, iterations: int) -> Tensor:
    p, q = torch.ones_like(kernel[..., :1]), torch.full_like(nu, 0.5)
    for _ in range(iterations):
        p = 1 / (kernel.shape[-2] * (kernel * q).sum(-1, keepdim=True))
        q = nu / (kernel * p).sum(-2, keepdim=True)
    return p * kernel * q
