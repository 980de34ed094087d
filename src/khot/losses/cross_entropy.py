"""Cross-entropy for top-k classification."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from khot import cdfs
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.names import unknown
from khot._core.precision import at_least_single, greatest, vector, wide_dtype, widen
from khot._core.ways import by_rows
from khot._ops.soft_topk import threshold_map
from khot.cdfs import CDF, CDFName
from khot.losses._reduction import Reduction, check_reduction, reduce
from khot.selection import topk

__all__ = ["TopKCrossEntropyLoss"]

Top1Mode = Literal["topk", "softmax", "cross_entropy"]


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
        top1_mode: what the weight of k = 1 applies to. ``"topk"``: y^(1) as above. ``"softmax"``: y^(1) is
            softmax(x), at temperature 1 whatever tau is. ``"cross_entropy"``: the top-1 part is a loss of its
            own, and the mixture has the other k only:

                L = w_1 · (−log softmax(x)_label) + (1 − w_1) · (−log Σ_(k>1) w_k/(1 − w_1) · y^(k)_label)
        m: how many scores the loss looks at, in [2, n] and at least the largest k: that of the label, and the
            m − 1 largest of the others. All other scores have no influence and no gradient. None: all scores.
        ignore_index: rows with this label are 0 and left out of the mean, as in
            ``torch.nn.CrossEntropyLoss``.
        label_smoothing: ε in [0, 1]: the target is 1 − ε at the label, and ε/n at each of the n classes.
        reduction: ``"mean"`` over the rows that are not ignored, ``"sum"`` or ``"none"``. As in PyTorch, the
            mean over no rows is NaN.

    Shape:
        input: scores, of any floating-point dtype.

        label: int64, the input's shape without ``dim``, in [0, n); or floating-point, the input's shape: how
        much each class counts, ≥ 0, as probabilities or as a k-hot vector of several labels. The loss is then
        Σ_c label_c L(x, c), also with label smoothing, and ``m`` must be None.

        mask: bool, broadcastable to input; False leaves a class out, as does a score of −inf then. The label
        must be a class that is there, and each row must have k of these, or m, unless it is ignored. So are
        rows without a class, if the label is floating-point.

        offsets: of packed rows, as for :func:`khot.soft_topk`.

        output: a number of the input's dtype; with ``reduction="none"`` the batch shape. It is
        computed from logarithms, and is finite however small the probability.

    Differentiable in input and tau, exactly, to any order. A softmax, unlike a soft top-k, is NaN for a score
    of +inf.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Source: Petersen, Kuehne, Borgelt, Deussen 2022; with the Laplace CDF Struski et al. 2025, section 5.1.
    The code of the former has ``"softmax"`` as its default, and m. Its ``"cross_entropy"`` has w_k in place
    of w_k/(1 − w_1), which adds the constant −(1 − w_1) log(1 − w_1).

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
    top1_mode: Top1Mode
    m: int | None
    ignore_index: int
    label_smoothing: float
    reduction: Reduction

    def __init__(
        self,
        k: int | Mapping[int, float],
        dim: int = -1,
        *,
        tau: Scalar = 1.0,
        cdf: CDFName | CDF = "logistic",
        top1_mode: Top1Mode = "topk",
        m: int | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
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
        self.top1_mode = _check_mode(top1_mode)
        if m is not None:
            arguments.check_integer(m, "m", low=max(2, *self.k))
        self.m = m
        arguments.check_integer(ignore_index, "ignore_index", low=-sys.maxsize, high=sys.maxsize)
        arguments.check_number(label_smoothing, "label_smoothing", low=0, high=1)
        self.ignore_index, self.label_smoothing = int(ignore_index), float(label_smoothing)
        self.reduction = check_reduction(reduction)

    def extra_repr(self) -> str:
        k = self.k if len(self.k) > 1 else max(self.k)
        options = "" if self.top1_mode == "topk" else f", top1_mode={self.top1_mode!r}"
        options += "" if self.m is None else f", m={self.m}"
        options += "" if self.ignore_index == -100 else f", ignore_index={self.ignore_index}"
        options += f", label_smoothing={self.label_smoothing}" if self.label_smoothing else ""
        return (
            f"k={k}, dim={self.dim}, tau={self.tau}, cdf={self.cdf!r}{options}, reduction={self.reduction!r}"
        )

    def forward(
        self, input: Tensor, label: Tensor, *, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        is_soft = isinstance(label, Tensor) and label.is_floating_point()
        is_soft = is_soft and (label.dim() == input.dim() or arguments.is_nested(input))
        hard, soft = (None, label) if is_soft else (label, None)
        k = tuple(self.k.items())
        of = _Settings(k, self.cdf, self.top1_mode, self.m, self.ignore_index, self.label_smoothing)
        return _loss(input, hard, soft, self.dim, self.tau, self.reduction, of, mask=mask, offsets=offsets)

    if TYPE_CHECKING:
        __call__ = forward


class _Settings(NamedTuple):
    """The arguments of a module, which are the same for all rows; k with the weights."""

    k: tuple[tuple[int, float], ...]
    cdf: CDF
    top1_mode: Top1Mode
    m: int | None
    ignore_index: int
    label_smoothing: float

    @property
    def most(self) -> int:
        """The largest k."""
        return max(k for k, _ in self.k)

    def log_selected(self, x: Tensor, at: Tensor, tau: Tensor, ks: list[int]) -> Tensor:
        """log y^(k) of the scores ``at`` (*batch, c) for each k: (*batch, c, number of ks)."""
        counts = vector(x.device, [min(k, x.shape[-1]) for k in ks])  # rows that are ignored may be short
        copies = x.unsqueeze(-2).expand(*x.shape[:-1], len(ks), x.shape[-1])  # a view: nothing is copied
        tau = tau.unsqueeze(-1)
        _, hi, lo = threshold_map(copies, counts.expand(copies.shape[:-1]), tau, self.cdf, "threshold")
        every = (hi == -greatest(hi)).unsqueeze(-2)
        hi, lo = (t.unsqueeze(-2).masked_fill(every, 0) for t in (hi, lo))
        z = ((at.unsqueeze(-1) - hi) - lo) / widen(tau).unsqueeze(-1)
        return self.cdf.log_cdf(z).masked_fill(every, 0)


@by_rows(0, loss=True)
def _loss(
    input: Tensor,
    label: Tensor | None,
    soft_label: Tensor | None,
    dim: int,
    tau: Scalar,
    reduction: Reduction,
    of: _Settings,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    of = _Settings(*of)  # a trace of packed rows passes it as a plain tuple
    # at least float32, in which the gradients of the selections are summed
    x = at_least_single(arguments.rows(input, dim, mask))
    there = None if mask is None else x != -math.inf
    at, share, counted, x = _target(label, soft_label, input, x, there, dim, of)
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True)
    # the logarithm of each target's share in each selection, and the weight of this selection
    weights, logs = dict(of.k), []
    first = weights.pop(1, 0.0) if of.top1_mode != "topk" else 0.0
    if first:
        logs.append((at - torch.logsumexp(widen(x), -1, keepdim=True)).unsqueeze(-1))
    if weights:
        logs.append(of.log_selected(x, at, tau, list(weights)))
    if first and of.top1_mode == "cross_entropy":
        loss = -first * logs[0].squeeze(-1)
        if weights:
            loss = loss - (1 - first) * _log_mixture([w / (1 - first) for w in weights.values()], logs[1])
    else:
        loss = -_log_mixture([first] * bool(first) + list(weights.values()), torch.cat(logs, -1))
    loss = loss.squeeze(-1) if share is None else torch.where(share > 0, share * loss, 0).sum(-1)
    return reduce(loss, counted, reduction, input.dtype)


def _target(
    label: Any,
    soft_label: Tensor | None,
    input: Tensor,
    x: Tensor,
    there: Tensor | None,
    dim: int,
    of: _Settings,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """The scores of the classes that count, (*batch, c); how much each counts, None for one that counts
    whole; which rows count, None for all; and the scores that the loss looks at."""
    if soft_label is not None:
        _check_one_label(of, "label must be int64", soft_label.dtype)
        share, given, counted = _shares(soft_label, input, dim), there, None
        if there is not None:
            counted = there.any(-1)
            x, there = _without(~counted, x, there)
        _check_classes(of, x, there, counted)
        if given is not None:
            _check_named((share > 0) & ~given)
        return *_of_all(x, share, there, of.label_smoothing), counted, x
    arguments.check_index(label, "label", x)
    if label.shape != x.shape[:-1]:
        raise ValueError(
            f"label must have the input's shape without dim, {tuple(x.shape[:-1])}, but got "
            f"{tuple(label.shape)}"
        )
    ignored = label == of.ignore_index
    if not arguments.readable(ignored) or ignored.any():
        label = label.masked_fill(ignored, 0)
        x, there = _without(ignored, x, there)
    _check_classes(of, x, there, ~ignored)
    if not x.shape[-1]:  # all rows are ignored, and have one class for their label
        x, there = pad(x, (0, 1)), None
    arguments.check_values(label, "label", low=0, high=x.shape[-1] - 1)
    if there is not None:
        _check_named(~there.gather(-1, label.unsqueeze(-1)))
    if of.label_smoothing:
        _check_one_label(of, "label_smoothing must be 0", of.label_smoothing)
        share = torch.zeros_like(x, dtype=wide_dtype(x.device)).scatter(-1, label.unsqueeze(-1), 1)
        return *_of_all(x, share, there, of.label_smoothing), ~ignored, x
    at = x.gather(-1, label.unsqueeze(-1))
    if of.m is not None:
        others = topk(x.scatter(-1, label.unsqueeze(-1), -math.inf), min(of.m, x.shape[-1]) - 1).values
        x = torch.cat((at, others), -1)
    return widen(at), None, ~ignored, x


def _without(ignored: Tensor, x: Tensor, there: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The scores, with 0 in rows that are ignored, which may be NaN or have no class to select; and the
    classes that are there."""
    ignored = ignored.unsqueeze(-1)
    return x.masked_fill(ignored, 0), None if there is None else there | ignored


def _check_classes(of: _Settings, x: Tensor, there: Tensor | None, counted: Tensor | None) -> None:
    name, size, n = "k" if of.m is None else "m", of.m or of.most, x.shape[-1]
    if size > n and (counted is None or not arguments.has_data(counted) or bool(counted.any())):
        raise ValueError(f"{name} must be at most the number of classes, {n}, but got {size}")
    if there is not None:
        arguments.check_enough(there, name, min(size, n))


def _check_named(excluded: Tensor) -> None:
    if arguments.readable(excluded) and bool(excluded.any()):
        raise ValueError("label must name classes under the mask, but got one that is left out")


def _check_one_label(of: _Settings, must: str, got: Any) -> None:
    if of.m is not None:
        raise ValueError(
            f"{must} where m is given, which leaves other classes out, but got {got} and m = {of.m}"
        )


def _shares(label: Tensor, input: Tensor, dim: int) -> Tensor:
    """How much each class counts, with dim last."""
    share = arguments.like_rows(label.detach(), "a floating-point label", input, dim)
    return widen(arguments.check_values(share, "label", low=0, high=sys.float_info.max))


def _of_all(x: Tensor, share: Tensor, there: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """The scores of all classes, and how much each counts after smoothing. A class that does not count may
    have a score of −inf."""
    if epsilon:
        classes = share.shape[-1] if there is None else there.sum(-1, keepdim=True, dtype=share.dtype)
        share = share + epsilon * (1 / classes - share)
    if there is not None:
        share = torch.where(there, share, 0)
    return widen(x).masked_fill(share == 0, 0), share


def _log_mixture(weights: list[float], logs: Tensor) -> Tensor:
    """log Σ_i weights_i e^(logs_i) along the last dim."""
    w = vector(logs.device, [math.log(weight) for weight in weights])
    return torch.logsumexp(w + logs, -1)


def _check_mode(mode: Any) -> Any:
    names = get_args(Top1Mode)
    if not isinstance(mode, str):
        raise TypeError(f"top1_mode must be a string, but got {type(mode).__name__}")
    if mode not in names:
        raise unknown("top1_mode", mode, names)
    return mode


def _weights(k: Any) -> dict[int, float]:
    """{k: weight} without weights of 0, in increasing order of k."""
    given = k if isinstance(k, Mapping) else {int(k): 1.0} if isinstance(k, Integral) else None
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
