"""The sorted SOFT top-k: one soft selection of the largest entry, one of the second largest, and so on."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import large, on_cpu
from khot._core.ways import by_rows
from khot._ops.sorted_soft_topk import sorted_soft_topk as transported

__all__ = ["sorted_soft_topk"]


@by_rows(2)
@on_cpu
def sorted_soft_topk(
    input: Tensor,
    k: int,
    dim: int = -1,
    *,
    epsilon: Scalar = 0.1,
    largest: bool = True,
    normalize: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """k rows that softly select the largest entry, the second largest, ..., the k-th largest.

    The result is n times the plan Γ that minimises ⟨C, Γ⟩ + ε Σ Γ log Γ for the cost C_ri = (x_i − a_r)²,
    without the row of the last anchor. Every score has mass 1/n, each of the anchors k, k − 1, ..., 1 has
    1/n, and the anchor 0 has (n − k)/n. As ε → 0 the result tends to the first k rows of the permutation
    matrix that sorts the scores (tied scores share their places equally); as ε → ∞, to 1/n everywhere.

    Args:
        input: scores, of any floating-point dtype. −inf is never selected; entries of +inf share the first
            places.
        k: how many to select, an int in [1, n].
        dim: the dimension to select along.
        epsilon: regularisation > 0, in the units of the scores: the logits are 2·score·anchor/ε, and the
            anchors are 1 apart; a number or a tensor that broadcasts with the batch
            shape (the input's shape without ``dim``).
        largest: select the largest entries, in descending order; if False, the smallest, in ascending order.
        normalize: divide the cost by its largest entry in the row. (The published code divides by the largest
            entry of the whole batch, and ignores the gradient of that.)
        mask: bool, broadcastable to the input; True where an entry may be selected. Entries under False are
            ignored, even NaN and inf, and get 0.

    Returns:
        A tensor of the input's dtype and shape, with ``dim`` replaced by (k, n). Its entries lie in [0, 1];
        each of the k rows sums to 1 (up to 1e-10 before rounding to the dtype), and each of the n columns to
        at most 1. It is NaN for a row of scores with a NaN, or with more than k entries of +inf.

    The gradient in input and epsilon is exact (by implicit differentiation, in O(nk) memory; nothing
    is unrolled), in both modes and to second order.

    Raises:
        ValueError: k not in [1, n], or more than the entries above −inf; epsilon ≤ 0 or of a shape that does
            not broadcast. (The values of tensors are checked on the CPU in eager mode; elsewhere a row with
            a bad value is NaN.)
        TypeError: input that is not a floating-point tensor, k that is not an int.
        IndexError: dim out of range.

    Source: Xie et al. 2020, appendix B, with Newton's method on the k potentials in place of Sinkhorn's.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> khot.sorted_soft_topk(scores, 2, epsilon=2.0)
        tensor([[0.0753, 0.6202, 0.2914, 0.0131],
                [0.2493, 0.2779, 0.3549, 0.1180]])
        >>> khot.sorted_soft_topk(scores, 2, epsilon=0.01) @ scores
        tensor([3., 2.])
    """
    arguments.check_flags(largest=largest, normalize=normalize)
    x = arguments.rows(input, dim, mask, largest)
    n = x.shape[-1]
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt, numbers.Integral)):
        raise TypeError(f"k must be an int, but got {type(k).__name__}")
    if not 1 <= k <= n:
        raise ValueError(f"k must be an integer in [1, {n}], but got {k}")
    number = not isinstance(epsilon, Tensor)
    epsilon = arguments.per_row(epsilon, "epsilon", x, low=0, low_open=True, by_value=True).double()
    if normalize:
        # neither infinite entries nor a NaN (which makes its row NaN anyway) decide: at k/2 the cost is least
        finite = x.double().masked_fill(x - x != 0, k / 2)
        # of the anchors, 0 or k is the farthest
        cost = (torch.maximum(finite, torch.rsub(finite, k)) ** 2).amax(-1)
        scaled = (epsilon * cost).clamp(1 / large(epsilon), large(epsilon))
        epsilon = scaled if number else scaled.where((epsilon > 0) & (epsilon < math.inf), math.nan)
    y = transported(x, k, epsilon)
    return y.movedim((-2, -1), (dim % max(input.dim(), 1), dim % max(input.dim(), 1) + 1))
