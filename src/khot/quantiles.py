"""Exact order statistics: the k-th entry of each row and its quantiles, also with weights, without a sort."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from khot._core import arguments, rows
from khot._core.arguments import Scalar
from khot._core.interpolation import InterpolationName, check_interpolation
from khot._core.precision import on, wide_dtype, widen
from khot._core.rows import Row
from khot._core.ways import by_rows
from khot._ops import shared
from khot._ops.interpolation import interpolate
from khot._ops.order_statistics import order_statistics, weighted_quantiles
from khot._ops.quantiles import quantiles

__all__ = ["conformal_quantile", "kth_value", "quantile"]


@by_rows(0)
def kth_value(
    input: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    largest: bool = True,
    mask: Tensor | None = None,
    group: Any = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The k-th largest entry of each row, exactly and without a sort.

    Args:
        input: entries of any floating-point dtype; infinite ones are ordinary entries.
        k: an integer in [1, n]; a number or a tensor that broadcasts with the batch shape (the input's shape
            without ``dim``). k = 1 is the largest entry.
        dim: the dimension to reduce.
        largest: count from the largest entry; if False, from the smallest, as ``torch.kthvalue`` does.
        mask: bool, broadcastable to the input; True where an entry takes part. n is then the number of these
            entries. Entries under False are ignored, even NaN and inf.
        group: a ``torch.distributed`` process group over which the rows are spread. ``input`` and ``mask``
            are this process's shard of the rows along ``dim``, in the order of the ranks and of any length,
            including 0; k must be the same on every process. All processes get the result. All of them have
            to make the call and the backward call, which together take a few all-reduces.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A tensor of the input's dtype and of its shape without ``dim``. The result of a row with a NaN is NaN.

    The whole gradient goes to the entry that is returned. Of equal entries, it goes to the one of lowest
    index. An infinite result has no gradient, and a row with a NaN has NaN. With ``group``, every process
    gets the gradient of the sum of all processes' losses, in its shard; forward mode is that of
    ``torch.autograd.forward_ad``.

    Raises:
        ValueError: k is not an integer in [1, n]; a mask or k does not broadcast; arguments differ between
            the processes of a group. (The values of tensors are checked on the CPU in eager mode; elsewhere,
            and with a group under ``torch.compile``, a row with a bad k is NaN.)
        TypeError: input that is not a floating-point tensor, mask that is not bool.
        IndexError: dim out of range.

    Example:
        >>> x = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0])
        >>> khot.kth_value(x, 2)
        tensor(4.)
        >>> khot.kth_value(x, 2, largest=False)
        tensor(1.5000)
    """
    row = rows.named(group)
    if _is_one_number(k, mask, row):
        arguments.check_flags(largest=largest)
        x = arguments.rows(input, dim)
        n = x.shape[-1]
        arguments.check_scalar(k, "k", low=1, high=n, integer=True)
        return _entries(x, int(k) if largest else n + 1 - int(k)).squeeze(-1)

    def prepare() -> tuple[Tensor, Tensor]:
        arguments.check_flags(largest=largest)
        x = arguments.rows(input, dim, mask)
        return x, arguments.per_row(k, "k", x, low=1, high=row.limit(x), integer=True)

    x, place = row.agree(prepare, k=k, largest=largest)
    if not row.here:
        place = arguments.per_row(k, "k", x, low=1, high=row.limit(x), integer=True)
    counts = _lengths(x, input, dim, mask, row)
    place = widen(on(x.device, place.detach())).expand(x.shape[:-1]).unsqueeze(-1)
    bad = place > counts
    if isinstance(counts, Tensor) and arguments.readable(bad) and bool(bad.any()):
        most = arguments.plain(counts.expand(place.shape)[bad][0].item())
        raise ValueError(
            f"k must lie in [1, number of entries that take part], but got "
            f"{arguments.plain(place[bad][0].item())} for a row with {most}"
        )
    place = (place if largest else counts + 1 - place).masked_fill(bad, math.nan)
    return order_statistics(x, place, row).squeeze(-1)


@by_rows(0)
def quantile(
    input: Tensor,
    q: Scalar,
    dim: int | None = -1,
    keepdim: bool = False,
    *,
    interpolation: InterpolationName = "linear",
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    group: Any = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The q-quantile of each row, exactly and without a sort: the entry at the position q(n − 1) in the
    sorted row.

    It is the function of ``torch.quantile`` and ``numpy.quantile``, for rows of any length and also in half
    precision. The position and the interpolation are computed in float64, and the result is rounded once.

    Args:
        input: entries of any floating-point dtype.
        q: in [0, 1]; a number or a tensor of at most one dim.
        dim: the dimension to reduce; None for all entries of the input.
        keepdim: keep the reduced dimensions, with one entry.
        interpolation: what stands at a position between two entries: ``"linear"``, the point of the line
            between them; ``"lower"`` or ``"higher"``, one of the two; ``"nearest"``, the nearer one, and
            half-way the one whose position is even; ``"midpoint"``, the mean of the two.
        weights: ≥ 0, a tensor of integers or floating-point numbers that broadcasts to the input. The
            quantile is then the smallest entry up to which the weights sum to q times all of them, as from
            ``numpy.quantile(..., method="inverted_cdf", weights=...)``: q and the sums are in float64, and
            rounded as the running sums of the sorted row are. A row in which rounding may decide is sorted,
            as all rows are on a GPU; sums of whole numbers are not rounded. Entries of weight 0 are never the
            quantile. Not with an interpolation or a group.
        mask, group: as for :func:`kth_value`; with ``dim=None``, all entries of all processes are one row.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A tensor of the input's dtype and of its shape without ``dim``. If q has a dim, the result has a first
        dim of q's length, as from ``torch.quantile``. The quantile of a row with a NaN, or of a row in which
        no entry takes part or all weights are 0, is NaN.

        Infinite entries are ordinary ones. Strictly between a finite and an infinite entry, linear
        interpolation and the midpoint give the infinite one, and between −inf and inf they give NaN.

    The gradient goes to the entries that the result is computed from, and of equal ones to the one of lowest
    index. An infinite result has no gradient, and a row with a NaN has NaN. With linear interpolation, the
    result is differentiable in q too. Weights have no gradient. With ``group``, gradients are those of
    :func:`kth_value`.

    Raises:
        ValueError: q outside [0, 1] or with more than one dim; rows without any entry; an unknown
            interpolation; a weight that is negative, infinite or NaN; others as for :func:`kth_value`.
        TypeError, IndexError: as for :func:`kth_value`.

    Example:
        >>> x = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0])
        >>> khot.quantile(x, 0.9)
        tensor(7.)
        >>> khot.quantile(x, torch.tensor([0.0, 0.5, 0.9]), interpolation="higher")
        tensor([1., 3., 9.])
        >>> khot.quantile(x, 0.5, weights=torch.tensor([1, 1, 1, 1, 5]))
        tensor(9.)
    """
    row = rows.named(group)
    if weights is not None:
        if check_interpolation(interpolation) != "linear":
            raise ValueError(f"interpolation must be left out with weights, but got {interpolation!r}")
        if not row.here:
            raise ValueError("weights must be None with a group, but got a tensor")

    def prepare() -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
        arguments.check_flags(keepdim=keepdim)
        check_interpolation(interpolation)
        flat, chosen, axis = _flattened(input, mask) if dim is None else (input, mask, dim)
        x = arguments.rows(flat, axis, chosen)
        if row.limit(x) == 0:
            raise ValueError(_empty(input))
        if one_number:
            arguments.check_scalar(q, "q", low=0, high=1)
            return x, x, flat, chosen, axis
        return x, arguments.quantile_levels(q, x), flat, chosen, axis

    one_number = weights is None and _is_one_number(q, mask, row)
    x, level, flat, chosen, axis = row.agree(prepare, q=q, interpolation=interpolation)
    if row.limit(x) == 0:
        raise ValueError(_empty(input))
    if one_number:
        value = _at_number(x, float(q) * (x.shape[-1] - 1), interpolation)
        return value.reshape(_kept(input, dim)) if keepdim else value.squeeze(-1)
    if weights is not None:
        w = arguments.of_entries(weights, "weights", input, -1 if dim is None else dim, mask)
        levels = widen(level.detach()).reshape(-1).expand(*x.shape[:-1], -1)
        value = weighted_quantiles(x, w.detach().reshape(x.shape), levels)
        return _as_asked(value.movedim(-1, 0), level, input, dim, keepdim)
    n = _lengths(x, flat, axis, chosen, row)
    if not row.here and torch.compiler.is_compiling():
        level = shared.share(level, row.name)
    else:
        (level,) = row.share([level])
    last = (n - 1).clamp(min=0) if isinstance(n, Tensor) else n - 1
    value = _at(x, widen(level).reshape(-1) * last, n, interpolation, row).movedim(-1, 0)
    return _as_asked(value, level, input, dim, keepdim)


@by_rows(0)
def conformal_quantile(
    scores: Tensor,
    alpha: Scalar,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The threshold of split conformal prediction: the ⌈(n + 1)(1 − α)⌉-th smallest of n scores.

    A new score that is exchangeable with the n scores is no larger than it with a probability of at least
    1 − α. So the labels whose scores are no larger than it are a set that has the right one as often as that.
    Where (n + 1)(1 − α) > n there are too few scores for this α, and the threshold is +inf.

    Args:
        scores: nonconformity scores of calibration data, large where a label does not fit; of any
            floating-point dtype.
        alpha: the error rate α, in [0, 1]; a number or a tensor that broadcasts with the batch shape (the
            shape of the scores without ``dim``). (n + 1)(1 − α) counts as whole where it is so up to the
            rounding of α, as for n = 9 and α = 0.7, where in floating point it is above 3.
        dim: the dimension of the calibration data.
        mask: bool, broadcastable to the scores; True where a score takes part. n is then the number of these
            scores. For a threshold for each class, pass the scores as ``scores.expand(num_classes, -1)`` and
            ``labels == torch.arange(num_classes).unsqueeze(-1)`` as the mask.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A tensor of the scores' dtype and of their shape without ``dim``. The result of a row with a NaN is
        NaN.

    The gradient goes to the score that is returned, as for :func:`kth_value`.

    Raises:
        ValueError: α outside [0, 1]; a mask or α that does not broadcast.
        TypeError, IndexError: as for :func:`kth_value`.

    Source: Vovk, Gammerman, Shafer 2005; Angelopoulos, Bates 2023, section 1.

    Example:
        >>> scores = torch.tensor([0.3, 0.1, 0.9, 0.5])
        >>> khot.conformal_quantile(scores, 0.2), khot.conformal_quantile(scores, 0.1)
        (tensor(0.9000), tensor(inf))
    """
    arguments.check_input(scores, "scores")
    x = arguments.rows(scores, dim, mask, fill=math.inf)
    alpha = arguments.per_row(alpha, "alpha", x, low=0, high=1)
    more = 1 + (x.shape[-1] if mask is None else arguments.mask_rows(mask, scores, dim).sum(-1))
    place = more * (1 - widen(alpha.detach()))
    rounding = 2 * min(torch.finfo(alpha.dtype).eps, torch.finfo(torch.float32).eps)
    near = (place - place.round()).abs() <= more * rounding
    k = torch.where(near, place.round(), place.ceil()).clamp(min=1)
    return kth_value(torch.nn.functional.pad(x, (0, 1), value=math.inf), k, largest=False)


def _as_asked(value: Tensor, level: Tensor, input: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """Quantiles (m, *batch) in the shape of the input without dim, with a first dim if the level has one."""
    if keepdim:
        value = value.reshape(value.shape[0], *_kept(input, dim))
    return value if level.dim() else value.squeeze(0)


def _kept(input: Tensor, dim: int | None) -> list[int]:
    """The shape of one quantile with the reduced dimensions."""
    if dim is None or not input.dim():
        return [1] * input.dim()
    kept = list(input.shape)
    kept[arguments.check_dim(input, dim)] = 1
    return kept


def _is_one_number(place: Any, mask: Tensor | None, row: Row) -> bool:
    """Whether all rows want the same place, known to Python. The few operations on tensors that this saves
    take longer than a short row does. A trace has dynamic shapes, and so places that Python does not know."""
    return row.here and mask is None and not isinstance(place, Tensor) and not torch.compiler.is_compiling()


def _entries(x: Tensor, first: int) -> Tensor:
    """The entries of a place, the same in all rows, which counts from 1 for the largest: (*batch, 1)."""
    return order_statistics(x, _places(x, first, 1))


def _places(x: Tensor, first: int, count: int) -> Tensor:
    where = "cpu" if x.is_cuda else x.device  # the GPU kernels take numbers by value
    k = torch.arange(first, first + count, dtype=wide_dtype(x.device), device=where)
    return k if x.dim() == 1 else k.expand(*x.shape[:-1], -1)


def _at_number(x: Tensor, position: Any, interpolation: str) -> Tensor:
    """What stands at a position of each row, which counts from 0 for the smallest entry: (*batch, 1)."""
    n, lower, higher = x.shape[-1], math.floor(position), math.ceil(position)
    one = {"lower": lower, "higher": higher, "nearest": round(position)}.get(interpolation)
    if one is not None or lower == higher:
        return _entries(x, n - (lower if one is None else one))
    weight = position - lower if interpolation == "linear" else 0.5
    where = "cpu" if x.is_cuda else x.device  # the GPU kernels take numbers by value
    given = torch.full((), weight, dtype=wide_dtype(x.device), device=where)
    return quantiles(x, _places(x, n - higher, 2), given)


def _at(x: Tensor, position: Tensor, n: Tensor | float, interpolation: str, row: Row) -> Tensor:
    """What stands at positions (m) or (*batch, m) of each row, which count from 0 for the smallest entry."""
    where, batch = position.detach(), x.shape[:-1]
    if interpolation in ("lower", "higher", "nearest"):
        rounded = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](where)
        return order_statistics(x, (n - rounded).expand(*batch, -1), row)
    lower, higher = where.floor(), where.ceil()
    places = (n - torch.cat((higher, lower), -1)).expand(*batch, -1)
    weight = position - lower if interpolation == "linear" else 0.5 * (higher - lower)
    weight = weight.expand(*batch, -1)
    return quantiles(x, places, weight) if row.here else interpolate(order_statistics(x, places, row), weight)


def _lengths(x: Tensor, input: Tensor, dim: int, mask: Tensor | None, row: Row) -> Tensor | float:
    """How many entries of each row take part: a number, or in the wide dtype as (*batch, 1) or (1)."""
    known = row.here or bool(row.lengths)  # a trace does not know the lengths of other shards
    if mask is None:
        if known:
            return row.limit(x)
        mine = torch.full((1,), x.shape[-1], dtype=wide_dtype(x.device), device=x.device)
        return shared.total(mine, row.name)
    counts = widen(arguments.mask_rows(mask, input, dim).sum(-1, keepdim=True))
    return row.count(counts) if known else shared.total(counts, row.name)


def _flattened(input: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """The input and the mask as one row."""
    arguments.check_input(input)
    if mask is not None:
        arguments.mask_rows(mask, input, -1)
        mask = mask.expand(input.shape).reshape(-1)
    return input.reshape(-1), mask, -1


def _empty(input: Tensor) -> str:
    return f"input must have at least one entry along dim, but got shape {tuple(input.shape)}"
