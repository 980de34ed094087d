"""Cross-entropy of a soft permutation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import at_least_single
from khot._core.ways import by_rows
from khot._ops.permutation import log_shares
from khot.cdfs import CDF, CDFName
from khot.losses._reduction import Reduction, check_reduction, reduce

__all__ = ["permutation_cross_entropy"]


@by_rows(1, loss=True)
def permutation_cross_entropy(
    input: Tensor,
    target: Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    descending: bool = False,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    offsets: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of the soft permutation of the scores with the true order.

        L_i = −log P_(i, target_i)

    The row-wise cross-entropy of :func:`khot.soft_permutation` with the true permutation matrix. Only the n
    entries of P on the true order are computed: with the Laplace CDF in O(n log n) time.

    Args:
        input: scores, of any floating-point dtype.
        target: int64, of the input's shape: which entry belongs in each place, as ``torch.argsort`` of the
            true values gives it, in the same order (``descending`` or not). Places behind the last entry of a
            masked row are not looked at.
        dim: the dimension that is sorted.
        tau, cdf, descending: as for :func:`khot.soft_permutation`.
        mask: bool, broadcastable to input; False excludes an entry. Then scores of −inf (if ascending, +inf)
            are excluded, too.
        reduction: ``"mean"`` over all places, ``"sum"``, or ``"none"``. As in PyTorch, the mean over no
            places is NaN.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A number of the input's dtype, ≥ 0; with ``"none"`` the loss of each place, of the input's shape, 0
        behind the last entry of a masked row.

    The gradient in input and tau is exact, to any order and in either mode.

    Raises:
        ValueError: an index in target that is not in [0, n), or of an entry under False; a target of another
            shape, an unknown reduction; tau and cdf as for :func:`khot.soft_permutation`.
        TypeError: input that is not a floating-point tensor, target that is not an int64 one.
        IndexError: dim out of range.

    Source: Struski et al. 2025, section 5.2.

    Example:
        >>> scores = torch.tensor([0.1, 2.0, 0.9])
        >>> khot.losses.permutation_cross_entropy(scores, torch.tensor([0, 2, 1]), tau=0.5)
        tensor(0.3086)
    """
    arguments.check_flags(descending=descending)
    F = cdfs.resolve(cdf)
    x = arguments.rows(input, dim, mask, largest=descending)
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True)
    check_reduction(reduction)
    there = None if mask is None else x != -math.inf
    index, counted = _order_rows(target, input, x, dim, there)
    # at least float32, in which the gradients of a score in several places are summed
    loss = 0.0 - log_shares(at_least_single(x), index, tau, F)  # not −0
    loss = reduce(loss, counted, reduction, input.dtype)
    return arguments.unrows(loss, input, dim) if reduction == "none" else loss


def _order_rows(
    target: Any, input: Tensor, x: Tensor, dim: int, there: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The target, checked, with dim last; and which places count, None for all."""
    arguments.check_index(target, "target", input)
    index = arguments.like_rows(target, "target", input, dim)
    if there is None:
        arguments.check_values(index, "target", low=0, high=x.shape[-1] - 1)
        return index, None
    counted = torch.arange(x.shape[-1], device=x.device) < there.sum(-1, keepdim=True)
    index = torch.where(counted, index, 0)
    arguments.check_values(index, "target", low=0, high=x.shape[-1] - 1)
    excluded = counted & ~there.gather(-1, index)
    if arguments.readable(excluded) and excluded.any():
        raise ValueError(
            f"target must name entries under the mask, but got {int(index[excluded][0])}, which is not"
        )
    return index, counted
