"""Top-k masks that are sums of k softmaxes, one after the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.arguments import Scalar
from khot.baselines._rows import prepare

__all__ = ["masked_softmax_topk", "sequential_softmax_topk"]


def sequential_softmax_topk(input: Tensor, k: int | Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """k softmaxes, one after the other; each one takes off what the earlier ones have selected.

    y = p¹ + … + pᵏ with pʲ = softmax(αʲ/τ), α¹ = x, αʲ⁺¹ = αʲ + log(1 − pʲ).

    Defects: entries exceed 1 (for n = k = 2 one of them does unless they are equal); their order may differ
    from that of the scores; k is an integer; O(nk) time, and O(nk) memory for the gradient.

    Args:
        input: scores, of any floating-point dtype.
        k: an integer in [0, n]; a number or a tensor that broadcasts with the batch shape (the input's
            shape without ``dim``).
        dim: the dimension to select along.
        tau: temperature > 0; a number or a tensor, as k.

    Returns:
        Same shape and dtype as the input, in [0, k], each row summing to k. Differentiable in input and tau,
        by unrolling.

    Raises:
        ValueError: k out of range or not an integer; tau ≤ 0.
        TypeError, IndexError: as for :func:`khot.soft_topk`.

    Source: Xie and Ermon 2019, Algorithm 2; Plötz and Roth 2018. log(1 − p) is kept finite as in their code.

    Example:
        >>> khot.baselines.sequential_softmax_topk(torch.tensor([0.2, 0.0]), 2)
        tensor([1.0498, 0.9502])
    """
    x, k, tau = prepare(input, k, dim, tau, integer=True)
    y, p = torch.zeros_like(x), torch.zeros_like(x)
    tiny = torch.finfo(x.dtype).tiny
    for step in range(int(k.max()) if k.numel() else 0):
        x = x + torch.log(torch.clamp(1 - p, min=tiny))
        p = torch.softmax(x / tau, -1)
        y = y + (p if k.numel() == 1 else torch.where(step < k, p, 0))
    return arguments.unrows(y.to(input.dtype), input, dim)


def masked_softmax_topk(input: Tensor, k: int | Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """k softmaxes, one after the other; each one is over the scores without the largest of the one before.

    y = p¹ + … + pᵏ, where pʲ is the softmax of x/τ over all scores but the j − 1 largest.

    Defects: entries exceed 1 (for n = k = 2 the smaller score's does). The larger of two close scores, which
    is masked first, gets the smaller entry, so that y jumps where scores change their order, and equal scores
    get different entries. k is an integer; O(nk) time, and O(nk) memory for the gradient.

    Args:
        input, k, dim, tau: as for :func:`sequential_softmax_topk`. Of equal scores the first is masked first.

    Returns, raises: as for :func:`sequential_softmax_topk`.

    Source: Xie et al. 2020, appendix C ("softmax k times"); after Goyal et al. 2018.

    Example:
        >>> khot.baselines.masked_softmax_topk(torch.tensor([0.2, 0.0]), 2)
        tensor([0.5498, 1.4502])
    """
    x, k, tau = prepare(input, k, dim, tau, integer=True)
    z, y = x / tau, torch.zeros_like(x)
    for step in range(int(k.max()) if k.numel() else 0):
        p = torch.softmax(z, -1)
        y = y + (p if k.numel() == 1 else torch.where(step < k, p, 0))
        z = z.scatter(-1, z.argmax(-1, keepdim=True), -math.inf)
    return arguments.unrows(y.to(input.dtype), input, dim)
