"""Metrics of rankings as losses, with soft ranks or a soft top-k for the hard ones; and one to train by.

A list is a row of scores. Ranks count from 1 for the largest score, and an entry counts itself as ½ where it
counts those above it, as in :func:`khot.soft_rank`. Half precision is widened, and only the loss is rounded
to the dtype of the scores.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from khot import cdfs
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import at_least_single, not_below_zero, widen
from khot._core.ways import by_rows
from khot._ops.laplace import laplace_centred_rank, laplace_rank
from khot._ops.log_rank import log_ranks
from khot._ops.permutation import by_scans
from khot._ops.ranking_losses import centred_places, correlation_loss
from khot._ops.ranking_losses import ndcg_loss as row_losses
from khot._ops.soft_count import count_above
from khot.cdfs import CDF, CDFName
from khot.losses._reduction import Reduction, check_reduction, mean_over, reduce
from khot.masks import soft_topk

__all__ = [
    "average_precision_loss",
    "hit_at_k_loss",
    "log_rank_loss",
    "ndcg_loss",
    "precision_at_k_loss",
    "recall_at_k_loss",
    "spearman_loss",
]


@by_rows(0, loss=True)
def spearman_loss(
    scores: Tensor,
    targets: Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    offsets: Tensor | None = None,
) -> Tensor:
    """1 − Spearman's rank correlation, averaged over the lists.

        L = 1 − corr(r, s),   r = the soft ranks of the scores,   s = the ranks of the targets

    As τ → 0 the correlation tends to ``scipy.stats.spearmanr``; as τ → ∞, to Pearson's correlation of the
    scores with the ranks of the targets. It does not change when all scores and τ are multiplied by the same
    number.

    Args:
        scores: of any floating-point dtype; each row along ``dim`` is a list. An entry with a score of −inf
            takes no part, as one under the mask; if it is to count as the last one, give it a finite score.
        targets: the true values, of the scores' shape; bool, integer or floating-point. Only their order
            counts, and equal ones share the mean of their ranks.
        dim: the dimension along which the entries of a list lie.
        tau, cdf: as for :func:`khot.soft_rank`.
        mask: bool, broadcastable to the scores; True where an entry takes part, for lists of different
            lengths. Scores and targets under False are ignored, even NaN.
        reduction: ``"mean"`` over the lists, ``"sum"`` or ``"none"``.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A number in [0, 2] of the scores' dtype; with ``"none"`` the batch shape. A list in which all targets
        are equal, or with fewer than two entries, has no rank correlation: it is 0 with ``"none"`` and is
        left out of the mean, which is 0 if no list remains. A list of equal scores counts as uncorrelated:
        its loss is 1 and its gradient 0.

    The gradient in scores and tau is exact, to any order and in either mode; the targets are constants. With
    the Laplace CDF it takes O(n log n) time, with others O(n²); memory is O(n) as for :func:`khot.soft_rank`.

    Raises:
        ValueError: targets of another shape, an unknown reduction; tau, cdf and mask as for
            :func:`khot.soft_rank`.
        TypeError: scores that are not a floating-point tensor, targets that are not a tensor of real numbers.
        IndexError: dim out of range.

    Source: after Blondel, Teboul, Berthet, Djolonga 2020, section 6.3, with the soft ranks of Struski et al.
    2025.

    Example:
        >>> scores = torch.tensor([0.1, 2.0, 0.9, 1.2])
        >>> khot.losses.spearman_loss(scores, torch.tensor([1, 4, 3, 2]), tau=0.01)  # 1 − 0.8
        tensor(0.2000)
    """
    lists = _lists(scores, dim, tau, cdf, mask, reduction)
    places = centred_places(_rows(targets, "targets", scores, dim), lists.x)
    loss, counted = correlation_loss(lists.centred_rank(), places)
    return lists.reduce(loss, counted, reduction)


@by_rows(0, loss=True)
def ndcg_loss(
    scores: Tensor,
    relevance: Tensor,
    k: Scalar | None = None,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    offsets: Tensor | None = None,
) -> Tensor:
    """1 − the normalised discounted cumulative gain (NDCG), averaged over the lists.

        L = 1 − DCG / max DCG,   DCG = Σ_i relevance_i · y_i/log₂(1 + r_i)

    r is the soft rank of an entry, 1 for the largest score. y is 1, or with ``k`` the soft top-k of the
    scores, which cuts the list after k places. The largest DCG is that of the list sorted by relevance. The
    gain is the relevance itself, as in ``sklearn.metrics.ndcg_score``, to which 1 − L tends as τ → 0 if no
    two scores are equal; for exponential gains pass ``2**relevance - 1``.

    Args:
        scores: of any floating-point dtype; each row along ``dim`` is a list. An entry with a score of −inf
            takes no part, as one under the mask.
        relevance: finite and ≥ 0, of the scores' shape; bool, integer or floating-point.
        k: how many places count, > 0; a number or a tensor that broadcasts with the batch shape. Lists that
            are shorter count whole. None: all places.
        dim, tau, cdf, mask, reduction: as for :func:`spearman_loss`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A number of the scores' dtype, in [0, 1] for every τ if F is symmetric (all but Power(p), p < 2); with
        ``"none"`` the batch shape. A list without an entry of positive relevance has no NDCG: it is 0 with
        ``"none"`` and is left out of the mean, which is 0 if no list remains.

    Gradients, time, memory, errors: as for :func:`spearman_loss`; ValueError also for relevance < 0 or
    infinite, and for k ≤ 0. The relevance and k are constants.

    Source: Järvelin, Kekäläinen 2002, with the soft ranks of Struski et al. 2025; Qin, Liu, Li 2010 have the
    loss with the logistic CDF (ApproxNDCG).

    Example:
        >>> scores = torch.tensor([3.0, 1.0, 2.0])
        >>> khot.losses.ndcg_loss(scores, torch.tensor([2, 1, 0]), tau=0.01)  # 1 − 2.5 / 2.63
        tensor(0.0498)
    """
    lists = _lists(scores, dim, tau, cdf, mask, reduction)
    gain = _rows(relevance, "relevance", scores, dim)
    if arguments.readable(gain):
        arguments.check_values(lists.only(widen(gain)), "relevance", low=0, high=sys.float_info.max)
    size = None if k is None else _size(k, lists)
    cut = None if size is None else lists.topk(size)
    loss, counted = row_losses(lists.rank(), gain, lists.x, cut, size)
    return lists.reduce(loss, counted, reduction)


@by_rows(0, loss=True)
def log_rank_loss(
    scores: Tensor,
    relevance: Tensor,
    dim: int = -1,
    *,
    grades: int | None = None,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    offsets: Tensor | None = None,
) -> Tensor:
    """The logarithm of how many less relevant entries stand before each relevant one: a loss to train by.

        L = Σ_c (c − c⁻) Σ_(i: relevance_i ≥ c) log(1 + N_ic / o_c) / Σ_i relevance_i
        N_ic = Σ_(j: relevance_j < c) G(x_j − x_i),   G(t) = max(t, 0) + ½ e^(−|t|)

    c goes through the grades, the distinct relevances > 0 of the list, and c⁻ is the grade below (0 for the
    lowest). N is the number of entries of lower grade before entry i, with a slope: G is the integral of the
    Laplace CDF, so that N, like RankNet's loss, goes on to fall by a unit of score with each entry that is in
    its wrong place, however wrong that is. o_c is the mean place of the entries of grade c and above in the
    perfect order, (their number + 1)/2. The logarithm makes places at the top count for more.

    It is a surrogate, neither a bound nor a limit of NDCG, and has no temperature: the scores find their own
    scale. Train with it, and measure with :func:`ndcg_loss`, whose gradient vanishes for pairs that are many
    τ in the wrong order.

    Args:
        scores: of any floating-point dtype; each row along ``dim`` is a list. An entry with a score of −inf
            takes no part, as one under the mask.
        relevance: finite and ≥ 0, of the scores' shape; bool, integer or floating-point.
        dim: the dimension along which the entries of a list lie.
        grades: the largest number of distinct relevances > 0 in a list, 4 for grades of 0 to 4. None: it is
            counted, for which a GPU waits; where it cannot be counted, under ``torch.compile`` and under
            ``torch.func``'s transforms of the relevance, it is n. Bool relevance has one.
        mask: bool, broadcastable to the scores; True where an entry takes part.
        reduction: ``"mean"``: the sum over the lists divided by the sum of all relevances, as
            ``torch.nn.functional.cross_entropy`` divides by the sum of its weights, so that lists with many
            relevant entries count for more; ``"sum"`` or ``"none"``: not divided.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A number ≥ 0 of the scores' dtype; with ``"none"`` the batch shape. A list without an entry of
        positive relevance is 0.

    The gradient in the scores is exact, to any order and in either mode; the relevance is a constant. It
    takes O(n log n + C n) time and O(C n) memory for C grades. On the CPU, long lists of which a quarter or
    more of the relevances are distinct take O(n²) time and O(n) memory instead.

    Raises:
        ValueError: relevance of another shape, negative or infinite; grades < 1, or fewer than a list has; an
            unknown reduction. (The values of tensors are checked on the CPU in eager mode; elsewhere a list
            with a bad value is NaN.)
        TypeError: scores that are not a floating-point tensor, relevance that is not a tensor of real
            numbers, grades that is not an integer.
        IndexError: dim out of range.

    Example:
        >>> scores = torch.tensor([3.0, 1.0, 2.0])
        >>> khot.losses.log_rank_loss(scores, torch.tensor([2, 1, 0]))
        tensor(0.3073)
    """
    check_reduction(reduction)
    arguments.check_input(scores, "scores")
    if grades is not None:
        arguments.check_integer(grades, "grades", low=1)
    x = arguments.rows(scores, dim, mask)
    given = _rows(relevance, "relevance", scores, dim)
    gain = arguments.check_values(
        torch.where(x == -math.inf, 0, widen(given)), "relevance", low=0, high=sys.float_info.max
    )
    grade, step, bad = _grades(gain, 1 if given.dtype == torch.bool else grades)
    bad = bad | x.isnan().any(-1) | ~((gain >= 0) & (gain < math.inf)).all(-1)
    loss = log_ranks(widen(x), gain, grade, step).masked_fill(bad, math.nan)
    if reduction != "mean":
        return reduce(loss, None, reduction, scores.dtype)
    weight = gain.sum().masked_fill(bad.any(), math.nan)  # a bad list is none that weighs nothing
    return mean_over(loss.sum(), weight, zero_of_none=True).to(scores.dtype)


@by_rows(0, loss=True)
def average_precision_loss(
    scores: Tensor,
    labels: Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    offsets: Tensor | None = None,
) -> Tensor:
    """1 − average precision, averaged over the lists (1 − mAP).

        L = 1 − (1/m) Σ_(i positive) r⁺_i/r_i

    r⁺ is the soft rank of a positive entry among the m positive ones, and r that among all. As τ → 0, 1 − L
    tends to ``sklearn.metrics.average_precision_score`` if no two scores are equal.

    Args:
        scores: of any floating-point dtype; each row along ``dim`` is a list. An entry with a score of −inf
            takes no part, as one under the mask.
        labels: 1 where an entry is positive (relevant), else 0, of the scores' shape; bool, integer or
            floating-point.
        dim, tau, cdf, mask, reduction: as for :func:`spearman_loss`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A number in [0, 1) of the scores' dtype; with ``"none"`` the batch shape. A list without positive
        entries has no average precision: it is 0 with ``"none"`` and is left out of the mean, which is 0 if
        no list remains.

    Gradients, time, memory, errors: as for :func:`spearman_loss`; ValueError also for labels other than 0
    and 1.

    Source: after Brown, Xie, Kalogeiton, Zisserman 2020 (Smooth-AP), whose form is that with the logistic CDF
    and takes O(n²) time and memory.

    Example:
        >>> scores = torch.tensor([4.0, 1.0, 3.0, 2.0])
        >>> khot.losses.average_precision_loss(scores, torch.tensor([1, 0, 0, 1]), tau=0.01)  # 1 − ½ (1 + ⅔)
        tensor(0.1667)
    """
    lists = _lists(scores, dim, tau, cdf, mask, reduction)
    positive, bad = _positive(labels, lists)
    m = positive.sum(-1)
    among_positive = lists._replace(x=torch.where(positive, lists.x, -math.inf)).rank()
    precision = torch.where(positive, widen(among_positive) / lists.rank(), 0).sum(-1) / m.clamp(min=1)
    loss = not_below_zero(1 - precision.masked_fill(bad, math.nan))
    return lists.reduce(loss, (m > 0) | bad, reduction)


@by_rows(0, loss=True)
def recall_at_k_loss(
    scores: Tensor,
    labels: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    offsets: Tensor | None = None,
) -> Tensor:
    """1 − recall at k, averaged over the lists: the share of the positive entries that the top k miss.

        L = 1 − Σ_i labels_i · y_i / Σ_i labels_i,   y = soft_topk(scores, k)

    As τ → 0, 1 − L tends to the recall of the k largest scores, if the k-th and the next are not equal.

    Args:
        scores: of any floating-point dtype; each row along ``dim`` is a list. An entry with a score of −inf
            takes no part, as one under the mask.
        labels: as for :func:`average_precision_loss`.
        k: how many entries are selected, > 0; a number or a tensor that broadcasts with the batch shape.
            Lists that are shorter are selected whole.
        dim, tau, cdf, mask, reduction: as for :func:`spearman_loss`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A number in [0, 1] of the scores' dtype; with ``"none"`` the batch shape. A list without positive
        entries has no recall: it is 0 with ``"none"`` and is left out of the mean, which is 0 if no list
        remains.

    The gradient in scores and tau is exact, to any order and in either mode; k is a constant. Time and memory
    are O(n) for every CDF. Errors: as for :func:`average_precision_loss`; ValueError also for k ≤ 0.

    Source: after Patel, Tolias, Matas 2022, with the soft top-k of :func:`khot.soft_topk`, which selects
    exactly k.

    Example:
        >>> scores = torch.tensor([4.0, 1.0, 3.0, 2.0])
        >>> khot.losses.recall_at_k_loss(scores, torch.tensor([1, 0, 0, 1]), 2, tau=0.01)
        tensor(0.5000)
    """
    lists = _lists(scores, dim, tau, cdf, mask, reduction)
    positive, bad = _positive(labels, lists)
    m = positive.sum(-1)
    found = (positive * lists.topk(_size(k, lists))).sum(-1)
    recall = (found / m.clamp(min=1)).masked_fill(bad, math.nan)
    return lists.reduce(not_below_zero(1 - recall), (m > 0) | bad, reduction)


@by_rows(0, loss=True)
def precision_at_k_loss(
    scores: Tensor,
    labels: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    offsets: Tensor | None = None,
) -> Tensor:
    """1 − precision at k, averaged over the lists: the share of the top k that is not positive.

        L = 1 − Σ_i labels_i · y_i / k,   y = soft_topk(scores, k)

    As τ → 0, 1 − L tends to the precision of the k largest scores, if the k-th and the next are not equal.
    The divisor is k for shorter lists, too, whose missing places count as not positive.

    Args:
        scores, labels, k: as for :func:`recall_at_k_loss`.
        dim, tau, cdf, mask, reduction: as for :func:`spearman_loss`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A number in [0, 1] of the scores' dtype; with ``"none"`` the batch shape. A list without positive
        entries, of which no scores are better than others, is 0 with ``"none"`` and is left out of the mean,
        as in the other losses.

    Gradients, time, memory, errors: as for :func:`recall_at_k_loss`.

    Example:
        >>> scores = torch.tensor([4.0, 1.0, 3.0, 2.0])
        >>> khot.losses.precision_at_k_loss(scores, torch.tensor([1, 0, 0, 1]), 3, tau=0.01)
        tensor(0.3333)
    """
    lists = _lists(scores, dim, tau, cdf, mask, reduction)
    positive, bad = _positive(labels, lists)
    k = _size(k, lists)
    precision = (positive * lists.topk(k)).sum(-1) / widen(k)
    loss = not_below_zero(1 - precision.masked_fill(bad, math.nan))
    return lists.reduce(loss, positive.any(-1) | bad, reduction)


@by_rows(0, loss=True)
def hit_at_k_loss(
    scores: Tensor,
    labels: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    offsets: Tensor | None = None,
) -> Tensor:
    """1 − the hit rate at k (success at k): the share of the lists of which the top k have no positive entry.

        L = Π_(i: labels_i = 1) (1 − y_i),   y = soft_topk(scores, k)

    One positive entry among the top k is enough, so that the loss leaves the others where they are. With one
    positive entry in each list it is :func:`recall_at_k_loss`. As τ → 0, L tends to 0 where one of the k
    largest scores is positive, and to 1 elsewhere, if the k-th and the next are not equal.

    Args:
        scores, labels, k: as for :func:`recall_at_k_loss`.
        dim, tau, cdf, mask, reduction: as for :func:`spearman_loss`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A number in [0, 1] of the scores' dtype; with ``"none"`` the batch shape. A list without positive
        entries, which cannot be hit, is 0 with ``"none"`` and is left out of the mean.

    Gradients, time, memory, errors: as for :func:`recall_at_k_loss`.

    Example:
        >>> scores = torch.tensor([4.0, 1.0, 3.0, 2.0])
        >>> khot.losses.hit_at_k_loss(scores, torch.tensor([0, 1, 0, 1]), 2, tau=0.5)
        tensor(0.7957)
    """
    lists = _lists(scores, dim, tau, cdf, mask, reduction)
    positive, bad = _positive(labels, lists)
    missed = torch.where(positive, 1 - lists.topk(_size(k, lists)), 1)
    tiny = torch.finfo(missed.dtype).tiny
    loss = missed.clamp(min=tiny).log().sum(-1).exp()  # torch.prod looks at values
    return lists.reduce(loss.masked_fill(bad, math.nan), positive.any(-1) | bad, reduction)


class _Lists(NamedTuple):
    scores: Tensor  # as given
    dim: int
    x: Tensor  # (*batch, n), at least float32; −inf where no entry takes part, as padding is marked, too
    tau: Tensor  # broadcasts with batch
    cdf: CDF

    def only(self, value: Tensor) -> Tensor:
        """A value of each entry, and 0 for entries that take no part."""
        return torch.where(self.x == -math.inf, 0, value)

    def rank(self) -> Tensor:
        """The soft ranks, 1 for the largest; some number from 1 on for entries that take no part."""
        if by_scans(self.cdf):
            return laplace_rank(self.x, self.tau)
        return count_above(widen(self.x), widen(self.x), self.tau, self.cdf, centred=True) + 0.5

    def centred_rank(self) -> Tensor:
        """The soft ranks less their mean, and 0 for entries that take no part."""
        if by_scans(self.cdf):
            return laplace_centred_rank(self.x, self.tau)
        rank, taken = self.only(self.rank()), self.only(torch.ones_like(self.x))
        return self.only(rank - (rank.sum(-1) / taken.sum(-1).clamp(min=1)).unsqueeze(-1))

    def topk(self, k: Tensor) -> Tensor:
        """The soft top-k, of the whole list where that has fewer than k entries."""
        k = torch.minimum(widen(k), widen((self.x != -math.inf).sum(-1)))
        return soft_topk(widen(self.x), k, tau=self.tau, cdf=self.cdf)

    def reduce(self, loss: Tensor, counted: Tensor, reduction: Reduction) -> Tensor:
        return reduce(loss, counted, reduction, self.scores.dtype, zero_of_none=True)


def _lists(
    scores: Tensor, dim: int, tau: Scalar, cdf: CDFName | CDF, mask: Tensor | None, reduction: Reduction
) -> _Lists:
    resolved = cdfs.resolve(cdf)
    check_reduction(reduction)
    arguments.check_input(scores, "scores")
    x = arguments.rows(scores, dim, mask)
    x = at_least_single(x)  # half precision has too few digits for ranks
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True, by_value=by_scans(resolved))
    return _Lists(scores, dim, x, tau, resolved)


def _rows(value: Any, name: str, scores: Tensor, dim: int) -> Tensor:
    """What belongs to the scores, as a constant with dim last."""
    arguments.check_bool_or_real(value, name)
    return arguments.like_rows(value.detach(), name, scores, dim, "the scores'")


def _grades(gain: Tensor, most: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct gains > 0 of each list in rising order, +inf where it has fewer than `most`; how far each
    is above the one below it, 0 for those of +inf; and which lists have more."""
    risen = F.pad(gain.sort(-1).values, (1, 0))
    number = F.pad((risen[..., 1:] > risen[..., :-1]).cumsum(-1), (1, 0))  # the distinct gains up to each
    if most is None:
        known = arguments.has_data(number) and number.numel()
        most = int(number.max()) if known else gain.shape[-1]
    many = number[..., -1] > most
    if arguments.readable(many) and many.any():
        raise ValueError(
            f"grades must be at least the number of distinct relevances > 0 in a list, {int(number.max())}, "
            f"but got {most}"
        )
    grade = risen.new_full((*risen.shape[:-1], most + 1), math.inf)
    grade = grade.scatter(-1, number.clamp(max=most), risen)
    step = torch.where(grade[..., 1:] < math.inf, grade[..., 1:] - grade[..., :-1], 0)
    return grade[..., 1:], step, many


def _positive(labels: Any, lists: _Lists) -> tuple[Tensor, Tensor]:
    """Which entries are positive; and which lists have another label than 0 and 1, or NaN."""
    v = lists.only(_rows(labels, "labels", lists.scores, lists.dim))
    return v == 1, arguments.not_binary(v, "labels").any(-1)


def _size(k: Scalar, lists: _Lists) -> Tensor:
    """k, one per list."""
    k = arguments.per_row(k, "k", lists.x, low=0, low_open=True).detach()
    return widen(k).expand(lists.x.shape[:-1])
