"""Losses that train a selection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from khot import cdfs, ranking
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import greatest, on, widen
from khot._ops.soft_topk import threshold_map
from khot.cdfs import CDF

__all__ = ["FenchelYoungTopKLoss", "TopKCrossEntropyLoss", "permutation_cross_entropy", "size_penalty"]


class FenchelYoungTopKLoss(nn.Module):
    """The Fenchel-Young loss of a soft top-k: convex in the scores, 0 where the soft top-k is the target.

    With y = ``khot.soft_topk(x, k)``, the regulariser ω of the CDF and a target T with ΣT = k:

        L(x, T) = max over the capped simplex of (⟨·, x⟩ − τ Σω) + τ Σ ω(T_i) − ⟨x, T⟩ ≥ 0,   dL/dx = y − T

    For k = 1 and the logistic CDF it is what binary cross-entropy is to the sigmoid, under the constraint
    that the probabilities sum to k.

    Args:
        k: how many, in [0, n]; a number or a tensor that broadcasts with the batch shape.
        dim: the dimension of the classes.
        tau: temperature > 0; a number or a tensor, as k.
        cdf: as for :func:`khot.soft_topk`.
        reduction: ``"mean"`` over the rows, ``"sum"`` or ``"none"``.

    Shape:
        input: scores, of any floating-point dtype. −inf and +inf are decided: they cost nothing where the
        target agrees, and make the loss inf where it does not.

        target: the input's shape; bool, integer or floating-point in [0, 1]. A row that sums to m ≥ k (as m
        labels of equal right) is scaled by k/m. One that sums to less has no finite loss for any scores and
        is refused; on other devices than the CPU, and while compiling, its loss is NaN.

        output: a number of the input's dtype; with ``reduction="none"`` the batch shape.

    Differentiable in input (gradient y − T over the scale of the reduction), tau and target, exactly, to any
    order; not in k, which the target's sum fixes.

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
    reduction: str

    def __init__(
        self,
        k: Scalar,
        dim: int = -1,
        *,
        tau: Scalar = 1.0,
        cdf: str | CDF = "logistic",
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.k, self.dim, self.tau = k, dim, tau
        self.cdf = cdfs.resolve(cdf)
        self.reduction = _check_reduction(reduction)

    def extra_repr(self) -> str:
        return f"k={self.k}, dim={self.dim}, tau={self.tau}, cdf={self.cdf!r}, reduction={self.reduction!r}"

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        x = arguments.rows(input, self.dim)
        k = arguments.per_row(self.k, "k", x, low=0, high=x.shape[-1]).detach()
        tau = arguments.per_row(self.tau, "tau", x, low=0, low_open=True)
        T = _target_rows(target, input, self.dim, k)
        _, hi, lo = threshold_map(x, k, tau, self.cdf, "threshold")

        # where nothing, or everything, is selected no score matters; nor does one that is infinite
        infinite, settled = x.isinf(), (hi.abs() == greatest(hi)).unsqueeze(-1)
        decided = infinite | settled
        at_decided = torch.where(infinite, x > 0, hi.unsqueeze(-1) < 0).to(hi.dtype)
        t_hi, t_lo = (v.unsqueeze(-1).masked_fill(settled, 0) for v in (hi, lo))
        tau = widen(tau).unsqueeze(-1)
        z = ((widen(x).masked_fill(decided, 0) - t_hi) - t_lo) / tau
        # Every term is ≥ 0. t stays attached: it adds nothing to the gradient, but to the Hessian.
        terms = tau * (self.cdf.conjugate(z) + self.cdf.potential(T) - z * T)
        mismatch = torch.where((T - at_decided).abs() < 1e-6, 0.0, math.inf)
        loss = torch.where(decided, mismatch, terms).sum(-1)
        return _reduce(torch.where(hi.isnan(), math.nan, loss), self.reduction).to(input.dtype)


class TopKCrossEntropyLoss(nn.Module):
    """Cross-entropy of the event that the label is among the top k, for one k or a distribution over it.

        L(x, label) = −log Σ_k p_k · y^(k)_label,   y^(k) = soft_topk(x, k)

    Args:
        p: the probabilities p_1, p_2, ... of k = 1, 2, ...; they sum to 1. ``[0.5, 0, 0, 0, 0.5]`` trains
            top-1 and top-5 accuracy alike.
        dim: the dimension of the classes.
        tau: temperature > 0; a number or a tensor that broadcasts with the batch shape.
        cdf: as for :func:`khot.soft_topk`, with full support: the loss of a label outside a compact one is
            inf.
        reduction: ``"mean"`` over the rows, ``"sum"`` or ``"none"``.

    Shape:
        input: scores, of any floating-point dtype.

        label: int64, the input's shape without ``dim``, in [0, n).

        output: a number of the input's dtype; with ``reduction="none"`` the batch shape. Computed from
        logarithms, so finite however small the probability.

    Differentiable in input and tau, exactly, to any order.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Source: Petersen, Kuehne, Borgelt, Deussen 2022; with the Laplace CDF Struski et al. 2025, section 5.1.

    Example:
        >>> scores, label = torch.tensor([1.0, 3.0, 2.0, 0.0]), torch.tensor(2)
        >>> loss = khot.losses.TopKCrossEntropyLoss([0.5, 0.5], tau=0.5)(scores, label)
        >>> y1, y2 = khot.soft_topk(scores, 1, tau=0.5), khot.soft_topk(scores, 2, tau=0.5)
        >>> torch.isclose(loss.exp(), 1 / (0.5 * y1[2] + 0.5 * y2[2]))
        tensor(True)
    """

    p: tuple[float, ...]
    dim: int
    tau: Scalar
    cdf: CDF
    reduction: str

    def __init__(
        self,
        p: Sequence[float],
        dim: int = -1,
        *,
        tau: Scalar = 1.0,
        cdf: str | CDF = "logistic",
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.p = tuple(float(share) for share in p)
        if not self.p or not all(share >= 0 for share in self.p) or abs(sum(self.p) - 1) > 1e-6:
            raise ValueError(f"p must be probabilities that sum to 1, but got {list(p)}")
        self.dim, self.tau = dim, tau
        self.cdf = cdfs.resolve(cdf)
        if not self.cdf.full_support:
            raise ValueError(f"cdf must have full support, but got {cdf!r}")
        self.reduction = _check_reduction(reduction)

    def extra_repr(self) -> str:
        return (
            f"p={list(self.p)}, dim={self.dim}, tau={self.tau}, cdf={self.cdf!r}, "
            f"reduction={self.reduction!r}"
        )

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        x = arguments.rows(input, self.dim)
        n = x.shape[-1]
        if len(self.p) > n:
            raise ValueError(
                f"p must have at most as many entries as there are classes, {n}, but got {len(self.p)}"
            )
        label = _check_labels(label, x)
        tau = arguments.per_row(self.tau, "tau", x, low=0, low_open=True)
        k, p = zip(*((i + 1.0, share) for i, share in enumerate(self.p) if share), strict=True)
        ks, shares = (on(x.device, torch.tensor(v, dtype=torch.float64)) for v in (k, p))

        copies = x.unsqueeze(-2).expand(*x.shape[:-1], len(k), n)  # views: no copy of the scores is made
        tau = tau.unsqueeze(-1)
        _, hi, lo = threshold_map(copies, ks.expand(copies.shape[:-1]), tau, self.cdf, "threshold")
        every = hi == -greatest(hi)
        at = widen(x.gather(-1, label.unsqueeze(-1)))
        z = ((at - hi.masked_fill(every, 0)) - lo.masked_fill(every, 0)) / widen(tau)
        log_y = self.cdf.log_cdf(z).masked_fill(every, 0)
        return _reduce(-torch.logsumexp(shares.log() + log_y, -1), self.reduction).to(input.dtype)


def size_penalty(probs: Tensor, weight: Scalar) -> Tensor:
    """The price of a subset whose size is learned: λ Σ_i π_i, averaged over the batch.

    Σπ is the expected size of a sample with the inclusion probabilities π, so λ is what one more entry has
    to be worth; it plays the part of the regularisation parameter of the lasso.

    Args:
        probs: inclusion probabilities in [0, 1] along the last dim, such as ``logits.sigmoid()``.
        weight: λ ≥ 0; a number or a tensor that broadcasts with the batch shape.

    Returns:
        A scalar ≥ 0 of the probabilities' dtype, differentiable in both.

    Raises:
        ValueError: weight < 0, or a weight that does not broadcast with the batch shape.
        TypeError: probs that is not a floating-point tensor.

    Source: Wijk, Vinuesa, Azizpour 2025, section 2.3.

    Example:
        >>> khot.losses.size_penalty(torch.tensor([0.5, 1.0, 0.25]), 0.1)
        tensor(0.1750)
    """
    arguments.check_input(probs, "probs")
    x = arguments.rows(probs, -1)
    weight = arguments.per_row(weight, "weight", x, low=0)
    return (weight.to(x.dtype) * x.sum(-1)).mean()


def permutation_cross_entropy(
    input: Tensor,
    target: Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: str | CDF = "laplace",
    descending: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """How improbable the true order is under the soft permutation of the scores: −log P_(i, target_i).

    The row-wise cross-entropy of :func:`khot.soft_permutation` with the true permutation matrix. Only the n
    entries of P on the true order are computed: with the Laplace CDF in O(n log n) time.

    Args:
        input: scores, of any floating-point dtype.
        target: int64, of the input's shape: which entry belongs in each place, as ``torch.argsort`` of the
            true values gives it, in the same order (``descending`` or not).
        dim: the dimension that is sorted.
        tau, cdf, descending: as for :func:`khot.soft_permutation`.
        reduction: ``"mean"`` over all places, ``"sum"``, or ``"none"``.

    Returns:
        A number of the input's dtype, ≥ 0; with ``"none"`` the loss of each place, of the input's shape.

    The gradient in input and tau is exact, to any order and in either mode.

    Raises:
        ValueError: an index in target that is not in [0, n), a target of another shape, an unknown reduction;
            tau and cdf as for :func:`khot.soft_permutation`.
        TypeError: input that is not a floating-point tensor, target that is not an int64 one.
        IndexError: dim out of range.

    Source: Struski et al. 2025, section 5.2.

    Example:
        >>> scores = torch.tensor([0.1, 2.0, 0.9])
        >>> khot.losses.permutation_cross_entropy(scores, torch.tensor([0, 2, 1]), tau=0.5)
        tensor(0.3086)
    """
    F = cdfs.resolve(cdf)
    x = arguments.rows(input, dim, largest=descending)
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True)
    _check_reduction(reduction)
    index = _order_rows(target, input, x, dim)
    loss = 0.0 - ranking.log_shares(x, index, tau, F)  # 0 has no sign
    if reduction == "none":
        return arguments.unrows(loss, input, dim)
    return _reduce(loss, reduction)


def _check_reduction(reduction: str) -> str:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', but got {reduction!r}")
    return reduction


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _target_rows(target: Tensor, input: Tensor, dim: int, k: Tensor) -> Tensor:
    """The target, dim last, every row scaled to the sum k."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a torch.Tensor, but got {type(target).__name__}")
    if target.shape != input.shape:
        raise ValueError(
            f"target must have the input's shape {tuple(input.shape)}, but got {tuple(target.shape)}"
        )
    T = arguments.check_values(arguments.rows(widen(target), dim), "target", low=0, high=1)
    mass = torch.where(k == 0, 1, T.sum(-1) / k)
    arguments.check_values(mass, "the sum of each target row, in units of k,", low=1 - 1e-6)
    share = torch.where(mass < 1 - 1e-6, math.nan, torch.where(k == 0, 0, 1 / mass))
    return T * share.unsqueeze(-1)


def _check_labels(label: Tensor, x: Tensor) -> Tensor:
    if not isinstance(label, Tensor):
        raise TypeError(f"label must be a torch.Tensor, but got {type(label).__name__}")
    if label.dtype != torch.int64:
        raise TypeError(f"label must have dtype torch.int64, but got {label.dtype}")
    if label.shape != x.shape[:-1]:
        raise ValueError(
            f"label must have the input's shape without dim, {tuple(x.shape[:-1])}, but got "
            f"{tuple(label.shape)}"
        )
    arguments.check_values(label, "label", low=0, high=x.shape[-1] - 1)
    return label


def _order_rows(target: Any, input: Tensor, x: Tensor, dim: int) -> Tensor:
    if not isinstance(target, Tensor) or target.dtype != torch.int64:
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(f"target must be a tensor of dtype torch.int64, but got {got}")
    if target.shape != input.shape:
        raise ValueError(
            f"target must have the input's shape {tuple(input.shape)}, but got {tuple(target.shape)}"
        )
    arguments.check_values(target, "target", low=0, high=x.shape[-1] - 1)
    return target.movedim(dim, -1) if target.dim() else target.reshape(1)
