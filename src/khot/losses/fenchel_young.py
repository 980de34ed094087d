"""The Fenchel-Young loss of a soft top-k."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor, nn

from khot import cdfs
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.ways import by_rows
from khot._ops.fenchel_young import row_losses
from khot.cdfs import CDF, CDFName
from khot.losses._reduction import Reduction, check_reduction, reduce, with_entries

__all__ = ["FenchelYoungTopKLoss"]


class FenchelYoungTopKLoss(nn.Module):
    """The Fenchel-Young loss of a soft top-k: convex in the scores, 0 where the soft top-k is the target.

    With the regulariser ω of the CDF, a target T with ΣT = k, and y in the capped simplex:

        L(x, T) = max_y (⟨y, x⟩ − τ Σ_i ω(y_i)) − (⟨T, x⟩ − τ Σ_i ω(T_i)) ≥ 0
        ∂L/∂x = soft_topk(x, k) − T

    For k = 1 and the logistic CDF it is the counterpart of the binary cross-entropy of sigmoids, under the
    constraint that the probabilities sum to k.

    Args:
        k: how many, in [0, n]; a number or a tensor that broadcasts with the batch shape.
        dim: the dimension of the classes.
        tau: temperature > 0; a number or a tensor, as k.
        cdf: as for :func:`khot.soft_topk`.
        reduction: ``"mean"`` over the rows that have entries, ``"sum"`` or ``"none"``. As in PyTorch, the
            mean over no rows is NaN.

    Shape:
        input: scores, of any floating-point dtype. Scores of −inf and +inf are never and always selected:
        they add nothing to the loss where the target agrees, and make it inf where the target does not.

        target: the input's shape; bool, integer or floating-point in [0, 1]. A row that sums to m ≥ k, such
        as one with m equivalent labels, is scaled by k/m. A row that sums to less than k would make the loss
        unbounded below, and raises an error; on other devices than the CPU, and while compiling, its loss is
        NaN.

        mask: bool, broadcastable to the input; True where an entry takes part. Scores and targets under False
        are ignored, even NaN. A row without entries, of which k must be 0, is 0.

        offsets: of packed rows, as for :func:`khot.soft_topk`.

        output: a number of the input's dtype; with ``reduction="none"`` the batch shape.

    Differentiable in input (with ``"sum"`` the gradient is y − T), tau and target, exactly, to any order; not
    in k, because the target has to sum to it.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Source: Blondel, Martins, Niculae 2020; for top-k Sander et al. 2023, section 6, whose one-hot target
    with k = 3 is unbounded below.

    Example:
        >>> loss = khot.losses.FenchelYoungTopKLoss(k=2, tau=0.5)
        >>> scores = torch.tensor([1.0, 3.0, 2.0, 0.0], requires_grad=True)
        >>> target = torch.tensor([0, 1, 1, 0])
        >>> loss(scores, target).backward()
        >>> torch.allclose(scores.grad, khot.soft_topk(scores, 2, tau=0.5) - target)
        True
    """

    k: Scalar
    dim: int
    tau: Scalar
    cdf: CDF
    reduction: Reduction

    def __init__(
        self,
        k: Scalar,
        dim: int = -1,
        *,
        tau: Scalar = 1.0,
        cdf: CDFName | CDF = "logistic",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        arguments.check_scalar(k, "k", low=0, high=sys.float_info.max)
        arguments.check_dim_type(dim)
        arguments.check_scalar(tau, "tau", low=0, low_open=True)
        self.k, self.dim, self.tau = k, dim, tau
        self.cdf = cdfs.resolve(cdf)
        self.reduction = check_reduction(reduction)

    def extra_repr(self) -> str:
        return f"k={self.k}, dim={self.dim}, tau={self.tau}, cdf={self.cdf!r}, reduction={self.reduction!r}"

    def forward(
        self, input: Tensor, target: Tensor, *, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        return _loss(
            input, target, self.k, self.dim, self.tau, self.cdf, self.reduction, mask, offsets=offsets
        )

    if TYPE_CHECKING:
        __call__ = forward


@by_rows(0, loss=True)
def _loss(
    input: Tensor,
    target: Tensor,
    k: Scalar,
    dim: int,
    tau: Scalar,
    cdf: CDF,
    reduction: Reduction,
    mask: Tensor | None,
    offsets: Tensor | None = None,
) -> Tensor:
    x = arguments.rows(input, dim, mask)
    k, tau = arguments.k_and_tau(k, tau, x, high=x.shape[-1], by_value=True)
    k = arguments.detached(k)
    T = _target_rows(target, input, dim, mask)
    loss, share = row_losses(x, T, k, tau, cdf)
    _check_mass(share, T, k)
    return reduce(loss, with_entries(input, dim, mask), reduction, input.dtype)


def _target_rows(target: Tensor, input: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    """The target with dim last, and 0 where the mask is False."""
    arguments.check_bool_or_real(target, "target")
    T = arguments.like_rows(target, "target", input, dim)
    T = T if T.is_floating_point() else T.to(input.dtype)
    if mask is not None:
        T = arguments.masked(T, arguments.mask_rows(mask, input, dim), 0)
    return arguments.check_values(T, "target", low=0, high=1)


def _check_mass(share: Tensor, T: Tensor, k: Tensor) -> None:
    if arguments.shows_nan(share):
        short = share.isnan()
        least, total = (v.expand(short.shape)[short][0].item() for v in (k, T.sum(-1)))
        raise ValueError(f"each target row must sum to at least k = {least:.8g}, but one sums to {total:.8g}")
