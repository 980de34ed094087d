"""Cross-entropy for top-k classification."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from khot import cdfs
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import greatest, on, widen
from khot._ops.soft_topk import threshold_map
from khot.cdfs import CDF, CDFName
from khot.losses._reduction import Reduction, check_reduction, reduce

__all__ = ["TopKCrossEntropyLoss"]


class TopKCrossEntropyLoss(nn.Module):
    """Cross-entropy of the event that the label is among the top k, for one k or a mixture of several.

        L(x, label) = −log Σ_k w_k · y^(k)_label,   y^(k) = soft_topk(x, k)

    Args:
        k: an integer ≥ 1; or several with their weights w, which sum to 1: ``{1: 0.5, 5: 0.5}`` trains top-1
            and top-5 accuracy with equal weight.
        dim: the dimension of the classes.
        tau: temperature > 0; a number or a tensor that broadcasts with the batch shape.
        cdf: as for :func:`khot.soft_topk`. It must have full support, because the loss would be inf for a
            label outside a compact one.
        reduction: ``"mean"`` over the rows, ``"sum"`` or ``"none"``.

    Shape:
        input: scores, of any floating-point dtype.

        label: int64, the input's shape without ``dim``, in [0, n).

        output: a number of the input's dtype; with ``reduction="none"`` the batch shape. It is
        computed from logarithms, and is finite however small the probability.

    Differentiable in input and tau, exactly, to any order.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Source: Petersen, Kuehne, Borgelt, Deussen 2022; with the Laplace CDF Struski et al. 2025, section 5.1.

    Example:
        >>> scores, label = torch.tensor([1.0, 3.0, 2.0, 0.0]), torch.tensor(2)
        >>> loss = khot.losses.TopKCrossEntropyLoss({1: 0.5, 2: 0.5}, tau=0.5)(scores, label)
        >>> y1, y2 = khot.soft_topk(scores, 1, tau=0.5), khot.soft_topk(scores, 2, tau=0.5)
        >>> torch.isclose(loss.exp(), 1 / (0.5 * y1[2] + 0.5 * y2[2]))
        tensor(True)
    """

    k: dict[int, float]
    dim: int
    tau: Scalar
    cdf: CDF
    reduction: Reduction

    def __init__(
        self,
        k: int | Mapping[int, float],
        dim: int = -1,
        *,
        tau: Scalar = 1.0,
        cdf: CDFName | CDF = "logistic",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        self.k = _weights(k)
        arguments.check_dim_type(dim)
        arguments.check_scalar(tau, "tau", low=0, low_open=True)
        self.dim, self.tau = dim, tau
        self.cdf = cdfs.resolve(cdf)
        if not self.cdf.full_support:
            raise ValueError(f"cdf must have full support, but got {cdf!r}")
        self.reduction = check_reduction(reduction)

    def extra_repr(self) -> str:
        k = self.k if len(self.k) > 1 else max(self.k)
        return f"k={k}, dim={self.dim}, tau={self.tau}, cdf={self.cdf!r}, reduction={self.reduction!r}"

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        x = arguments.rows(input, self.dim)
        n = x.shape[-1]
        if max(self.k) > n:
            raise ValueError(f"k must be at most the number of classes, {n}, but got {max(self.k)}")
        label = _check_labels(label, x)
        tau = arguments.per_row(self.tau, "tau", x, low=0, low_open=True)
        ks, weights = (
            on(x.device, torch.tensor(v, dtype=torch.float64)) for v in (list(self.k), list(self.k.values()))
        )
        copies = x.unsqueeze(-2).expand(*x.shape[:-1], len(self.k), n)  # a view: the scores are not copied
        tau = tau.unsqueeze(-1)
        _, hi, lo = threshold_map(copies, ks.expand(copies.shape[:-1]), tau, self.cdf, "threshold")
        every = hi == -greatest(hi)
        at = widen(x.gather(-1, label.unsqueeze(-1)))
        z = ((at - hi.masked_fill(every, 0)) - lo.masked_fill(every, 0)) / widen(tau)
        log_y = self.cdf.log_cdf(z).masked_fill(every, 0)
        return reduce(-torch.logsumexp(weights.log() + log_y, -1), self.reduction).to(input.dtype)


def _weights(k: Any) -> dict[int, float]:
    """{k: weight} without weights of 0, in increasing order of k."""
    given = k if isinstance(k, Mapping) else {k: 1.0} if isinstance(k, Integral) else None
    if given is None or isinstance(k, bool):
        raise TypeError(
            f"k must be an int, or a mapping such as {{1: 0.5, 5: 0.5}} of each k to its weight, but "
            f"got {k!r}"
        )
    for each, weight in given.items():
        if isinstance(each, bool) or not isinstance(each, Integral):
            raise TypeError(f"k must be an int, but got {each!r}")
        if each < 1:
            raise ValueError(f"k must be at least 1, but got {each}")
        arguments.check_number(weight, f"the weight of k = {each}", low=0, high=1)
    if abs(sum(given.values()) - 1) > 1e-6:
        raise ValueError(f"the weights of k must sum to 1, but got {dict(given)}")
    return {int(each): float(given[each]) for each in sorted(given) if given[each] > 0}


def _check_labels(label: Tensor, x: Tensor) -> Tensor:
    arguments.check_index(label, "label", x)
    if label.shape != x.shape[:-1]:
        raise ValueError(
            f"label must have the input's shape without dim, {tuple(x.shape[:-1])}, but got "
            f"{tuple(label.shape)}"
        )
    arguments.check_values(label, "label", low=0, high=x.shape[-1] - 1)
    return label
