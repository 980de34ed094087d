"""Sigmoids that are scaled to a sum of k."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.arguments import Scalar
from khot.baselines._rows import prepare

__all__ = ["rescaled_sigmoid_topk"]


def rescaled_sigmoid_topk(input: Tensor, k: Scalar, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """Sigmoids, scaled linearly so that they sum to k (NCPSS).

    With s = σ(x/τ): s·k/Σs where Σs ≥ k, else 1 − (1 − s)(n − k)/(n − Σs). Entries of −inf are 0 and do not
    count in n.

    Defects: adding a constant to the scores changes the result. If all scores have the same sign, the limit
    τ → 0 is k/n everywhere instead of the top k. Saturated sigmoids have no gradient, even if their sum is
    far from k.

    Args:
        input, dim, tau: as for :func:`sequential_softmax_topk`.
        k: how many, in [0, n], not necessarily an integer; a number or a tensor that broadcasts with the
            batch shape.

    Returns:
        Same shape and dtype as the input, in [0, 1], each row summing to k. Differentiable, exactly, in
        input, k and tau.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`khot.soft_topk`.

    Source: Pervez, Lippe, Gavves 2023.

    Example:
        >>> x = torch.tensor([1.0, -1.0, 0.0])
        >>> khot.baselines.rescaled_sigmoid_topk(x, 1)
        tensor([0.4874, 0.1793, 0.3333])
        >>> khot.baselines.rescaled_sigmoid_topk(x + 9, 1)
        tensor([0.3334, 0.3333, 0.3333])
    """
    x, k, tau = prepare(input, k, dim, tau)
    possible = x != -math.inf
    n = possible.sum(-1, keepdim=True)
    z = x.where(possible, 0) / tau
    s, rest = possible * torch.sigmoid(z), possible * torch.sigmoid(-z)
    total, left = s.sum(-1, keepdim=True), rest.sum(-1, keepdim=True)
    shrink = total >= k
    # neither branch may divide by 0, even where the other one is used, because the gradient would be NaN
    down = k / torch.where(shrink & (total > 0), total, 1)
    up = (n - k) / torch.where(shrink, 1, left)
    y = torch.where(shrink, s * down, possible.to(s) - rest * up).masked_fill(k > n, math.nan)
    arguments.explain_nan(y, x, k.squeeze(-1))
    return arguments.unrows(y.to(input.dtype), input, dim)
