"""Soft ranks, sorting, permutations and quantiles: the soft count of a row at many levels, or its inverse.

All of them use the CDF with its median moved to 0, so that an entry counts itself as ½. They count from the
largest entry; ascending order is the descending order of the negative scores. :func:`soft_rank` and
:func:`soft_sort` can also be projections onto permutahedra.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from khot import cdfs
from khot._core import arguments, eager
from khot._core.arguments import Scalar
from khot._core.interpolation import InterpolationName, check_interpolation
from khot._core.names import unknown
from khot._core.parts import in_parts
from khot._core.precision import at_least_single, in_dtype, on, wide_dtype, widen
from khot._core.ways import by_rows
from khot._ops.interpolation import interpolate
from khot._ops.laplace import laplace_rank, laplace_sort
from khot._ops.permutahedron import RegularizationName, check_regularization, permutahedron, without
from khot._ops.permutation import (
    boundaries,
    by_scans,
    correction,
    log_between,
    places,
    quantiles,
    standardize,
)
from khot._ops.permutation_matrix import matrix, serves
from khot._ops.permutation_shares import shares
from khot._ops.soft_count import count_above
from khot.cdfs import CDF, CDFName

__all__ = [
    "log_soft_permutation",
    "soft_median",
    "soft_permutation",
    "soft_quantile",
    "soft_rank",
    "soft_sort",
]

MethodName = Literal["count", "projection"]
_METHODS = get_args(MethodName)


def soft_rank(
    input: Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    descending: bool = False,
    method: MethodName = "count",
    regularization: RegularizationName = "l2",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The place of each entry in its sorted row, softened.

        r_i = ½ + Σ_j F((x_i − x_j)/τ)

    F is the CDF, shifted to the median 0. As τ → 0, r tends to the rank of each entry, counted from 1 for the
    smallest (the largest if ``descending``), and equal entries share the mean of their ranks. As τ → ∞, r
    tends to (n + 1)/2. Where F is symmetric (all but Power(p), p < 2) a row sums to n(n + 1)/2 for every τ.

    With ``method="projection"`` the ranks are instead the point nearest to x/τ in the permutahedron of
    (n, …, 1), as in fast-soft-sort and torchsort (:func:`khot.project_permutahedron`). They sum to
    n(n + 1)/2, and for "l2" they are exactly 1, …, n where different scores are at least τ apart.

    Args:
        input: scores, of any floating-point dtype. Infinite ones come last or first, and equal ones
            share ranks.
        dim: the dimension to rank along.
        tau: temperature > 0, in the units of the scores; a number or a tensor that broadcasts with the batch
            shape (the input's shape without ``dim``).
        cdf: ``"laplace"``, in O(n log n) time; ``"logistic"``, ``"normal"``, ``"uniform"``, or an object of
            :mod:`khot.cdfs`, in O(n²). Only for ``method="count"``.
        descending: give rank 1 to the largest entry, as in the ranks of −input.
        method: ``"count"``, or ``"projection"`` in O(n log n).
        regularization: of the projection: ``"l2"``, or ``"kl"``, whose ranks are the exponential of the
            projection with the logarithms of n, …, 1.
        mask: bool, broadcastable to the input; True where an entry takes part. Entries under False are
            ignored, even NaN and inf: the others have the ranks of a row without them.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input, in [1, n], and 0 where the mask is False. A row with a NaN is NaN.

    The gradient in input and tau is exact, to any order and in either mode (that of the projection "l2" is
    piecewise constant in the input). Memory is O(n), except when
    the backward pass of a CDF other than Laplace's is itself recorded.

    Raises:
        ValueError: tau ≤ 0, or of a shape that does not broadcast; an unknown cdf, method or regularization;
            a cdf for a projection, or "kl" for a count. (The values of tensors are checked on the CPU in
            eager mode; elsewhere a row with a bad value is NaN.)
        TypeError: input that is not a floating-point tensor.
        IndexError: dim out of range.

    Source: Struski et al. 2025, section 3.2 and Theorem 3.2; Blondel et al. 2020 for the projection.

    Example:
        >>> khot.soft_rank(torch.tensor([10.0, 30.0, 20.0]), tau=0.5)
        tensor([1., 3., 2.])
    """
    if offsets is None and not is_dynamo_compiling():
        plain = eager.soft_rank(input, dim, tau, cdf, descending, method, regularization, mask)
        if plain is not None:
            return plain
    return _rank(input, dim, tau, cdf, descending, method, regularization, mask, offsets=offsets)


@by_rows(1)
def _rank(
    input: Tensor,
    dim: int,
    tau: Scalar,
    cdf: CDFName | CDF,
    descending: bool,
    method: MethodName,
    regularization: RegularizationName,
    mask: Tensor | None,
    offsets: Tensor | None = None,
) -> Tensor:
    """:func:`soft_rank`."""
    if not isinstance(descending, bool):
        arguments.check_flags(descending=descending)
    F = _resolve(method, cdf, regularization)
    if method == "projection":
        return _projected_rank(input, dim, tau, descending, regularization, mask)
    if by_scans(F):
        last = -math.inf if descending else math.inf
        x = arguments.rows(input, dim, mask, fill=last)
        tau = arguments.per_row(tau, "tau", x, low=0, low_open=True, by_value=True)
        rank = laplace_rank(x, tau, descending)
    else:
        last = -math.inf
        x = arguments.rows(input, dim, mask, largest=descending)
        tau = arguments.per_row(tau, "tau", x, low=0, low_open=True, by_value=True)
        x = at_least_single(x)  # its two gradients are summed in its dtype
        rank = (count_above(x, x, tau, F, centred=True) + 0.5).to(input.dtype)
    if mask is not None:
        selected = arguments.mask_rows(mask, input, dim)
        out = (~selected).sum(-1, keepdim=True)
        rank = torch.where(x == last, rank - 0.5 * out, rank)  # the masked entries were tied with these
        rank = (rank * selected).to(input.dtype)  # unlike torch.where, the product keeps a NaN
    return arguments.unrows(rank, input, dim)


def soft_sort(
    input: Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    descending: bool = False,
    method: MethodName = "count",
    regularization: RegularizationName = "l2",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The sorted row, softened: the i-th value is where the soft count from below is i − ½.

        Σ_j F((s_i − x_j)/τ) = i − ½

    with F the CDF shifted to the median 0: the inverse of :func:`soft_rank`. As τ → 0, s tends to the sorted
    row. For larger τ it spreads beyond the scores.

    With ``method="projection"`` it is instead the point nearest to (n, …, 1)/τ in the permutahedron of the
    scores, as in torchsort (:func:`khot.project_permutahedron`). Ascending order is minus the descending
    order of −input. For larger τ it tends to the mean of the scores; for "kl" in descending order, to the
    logarithm of the mean of their exponentials.

    Args:
        input: scores, of any floating-point dtype. Infinite ones stay as they are; in a projection, all
            entries that are pooled with them become infinite, or NaN where both infinities are pooled.
        dim: the dimension to sort along.
        tau, cdf, method, regularization: as for :func:`soft_rank`.
        descending: put the largest first: minus the soft sort of −input.
        mask: as for :func:`soft_rank`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input, in ascending (or descending) order. With a mask, the entries that
        take part come first, and the places behind them hold 0. A row with a NaN is NaN.

    Gradients, memory, errors: as for :func:`soft_rank`.

    Source: Struski et al. 2025, section 3.2; for Laplace in closed form between neighbours (Proposition 4.2).
    Blondel et al. 2020 for the projection.

    Example:
        >>> khot.soft_sort(torch.tensor([10.0, 30.0, 20.0]), tau=0.5)
        tensor([10., 20., 30.])
    """
    if offsets is None and not is_dynamo_compiling():
        plain = eager.soft_sort(input, dim, tau, cdf, descending, method, regularization, mask)
        if plain is not None:
            return plain
    return _sort(input, dim, tau, cdf, descending, method, regularization, mask, offsets=offsets)


@by_rows(1)
def _sort(
    input: Tensor,
    dim: int,
    tau: Scalar,
    cdf: CDFName | CDF,
    descending: bool,
    method: MethodName,
    regularization: RegularizationName,
    mask: Tensor | None,
    offsets: Tensor | None = None,
) -> Tensor:
    """:func:`soft_sort`."""
    if not isinstance(descending, bool):
        arguments.check_flags(descending=descending)
    F = _resolve(method, cdf, regularization)
    if method == "projection":
        return _projected_sort(input, dim, tau, descending, regularization, mask)
    if by_scans(F):
        x = arguments.rows(input, dim, mask, fill=-math.inf if descending else math.inf)
        tau = arguments.per_row(tau, "tau", x, low=0, low_open=True, by_value=True)
        t = laplace_sort(x, tau, descending)
    else:
        x = arguments.rows(input, dim, mask, largest=descending)
        tau = arguments.per_row(tau, "tau", x, low=0, low_open=True)
        t = quantiles(x, torch.arange(x.shape[-1], dtype=wide_dtype(x.device), device=x.device) + 0.5, tau, F)
        t = (t if descending else -t).to(x.dtype)
    if mask is not None:
        taken = places(x) <= arguments.mask_rows(mask, input, dim).sum(-1, keepdim=True)
        t = torch.where(taken | t.isnan(), t, 0)
    return arguments.unrows(t, input, dim)


eager.PYTHON_WAY |= {"soft_rank": _rank, "soft_sort": _sort}


def _resolve(method: Any, cdf: CDFName | CDF, regularization: Any) -> CDF:
    """The CDF, if all three go together."""
    F = cdfs.resolve(cdf)
    if not isinstance(method, str):
        raise TypeError(f"method must be a name, but got {type(method).__name__}")
    if method not in _METHODS:
        raise unknown("method", method, _METHODS)
    if not (isinstance(regularization, str) and regularization == "l2"):
        check_regularization(regularization)
        if method == "count":
            raise ValueError(
                f"regularization must be left out with method='count', but got {regularization!r}"
            )
    if method == "projection" and cdf != "laplace":
        raise ValueError(f"cdf must be left out with method='projection', but got {cdf!r}")
    return F


def _projected_rank(
    input: Tensor, dim: int, tau: Scalar, descending: bool, regularization: str, mask: Tensor | None
) -> Tensor:
    z = arguments.rows(input, dim, largest=not descending)
    tau = arguments.per_row(tau, "tau", z, low=0, low_open=True, by_value=True)
    ranks, selected = _descending(z), None
    if mask is not None:
        selected = arguments.mask_rows(mask, input, dim)
        ranks = (ranks - (~selected).sum(-1, keepdim=True)).clamp(min=1)
        z, _ = without(z, ranks, selected)
    if regularization == "kl":  # half precision has too few digits for the logarithm
        z, ranks = z.to(torch.promote_types(z.dtype, torch.float32)), widen(ranks).log()
    y = permutahedron(z, ranks, tau, regularization)
    y = (y.exp() if regularization == "kl" else y).to(input.dtype)
    if selected is not None:
        y = torch.where(selected | y.isnan(), y, 0)
    return arguments.unrows(y, input, dim)


def _projected_sort(
    input: Tensor, dim: int, tau: Scalar, descending: bool, regularization: str, mask: Tensor | None
) -> Tensor:
    x = arguments.rows(input, dim, largest=descending)
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True, by_value=True)
    ranks = _descending(x).expand(x.shape)
    taken = None
    if mask is not None:
        selected = arguments.mask_rows(mask, input, dim)
        ranks = ranks - (~selected).sum(-1, keepdim=True)
        taken = ranks > 0
        _, x = without(x, x, selected)
        ranks = torch.where(taken, ranks, -math.inf)
    y = permutahedron(ranks, x, tau, regularization).to(x.dtype)
    y = y if descending else -y
    if taken is not None:
        y = torch.where(taken | y.isnan(), y, 0)
    return arguments.unrows(y, input, dim)


def _descending(x: Tensor) -> Tensor:
    """n, …, 1, in float32 if x has no more digits and float32 has these numbers."""
    n = x.shape[-1]
    dtype = torch.float32 if x.dtype != torch.float64 and n <= 1 << 24 else wide_dtype(x.device)
    return torch.arange(n, 0, -1, dtype=dtype, device=x.device)


@by_rows(2)
def soft_permutation(
    input: Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    descending: bool = False,
    k: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The matrix that sorts a row, softened to a doubly stochastic one.

        P_ij = F((x_j − t_i)/τ) − F((x_j − t_(i−1))/τ)

    where t_i is the threshold of a soft top-i. P_ij is how much of entry j is in the soft top-i but not yet
    in the soft top-(i − 1). This is the descending order; the ascending order is the descending one of
    −input. As τ → 0, P tends to the permutation matrix for which P @ input is sorted.

    Args:
        input: scores, of any floating-point dtype. Infinite ones share the first or last places equally.
        dim: the dimension to sort along.
        tau: as for :func:`soft_rank`.
        cdf: as for :func:`soft_rank`; Laplace's thresholds take O(n log n) time, the others' O(n²).
        descending: the first row selects the largest entry instead of the smallest.
        k: an int in [0, n], to compute only the first k rows, in O(kn) memory; they sum to a soft top-k mask.
            None for all rows.
        mask: as for :func:`soft_rank`.

    Returns:
        A tensor of the input's dtype and shape, with ``dim`` replaced by two dims (n, n), or (k, n): places
        by entries. Its entries lie in [0, 1]. Rows sum to 1, and so do the columns of all n rows. With a
        mask, the columns of the entries under False are 0, and so are the rows after the places of the
        others. The matrix of a row of scores with a NaN is NaN.

    ``P @ values`` moves what belongs to the entries, such as features of (n, d), to their places.

    The gradient in input and tau is exact, to any order and in either mode. Errors: as for :func:`soft_rank`;
    ValueError for a k that is not in [0, n], and TypeError for one that is not an int.

    Source: Struski et al. 2025, Definition 3.5 and Theorem 3.6.

    Example:
        >>> khot.soft_permutation(torch.tensor([1.0, 3.0, 2.0]), tau=0.5)
        tensor([[0.8040, 0.0234, 0.1726],
                [0.1726, 0.1726, 0.6547],
                [0.0234, 0.8040, 0.1726]])
        >>> features = torch.tensor([[1.0, 10.0], [3.0, 30.0], [2.0, 20.0]])
        >>> khot.soft_permutation(torch.tensor([1.0, 3.0, 2.0]), tau=0.01, descending=True, k=2) @ features
        tensor([[ 3., 30.],
                [ 2., 20.]])
    """
    F = cdfs.resolve(cdf)
    x, tau, selected = _oriented(input, dim, tau, descending, mask, F)
    k = _rows_asked(k, x)
    if k == x.shape[-1] and serves(x, F):
        p = matrix(x, tau, F)
        if selected is not None:
            p = correction(x, on(x.device, tau), selected, lambda share: share)(p, 0, x.shape[-1])
    elif F.built_in and x.is_cpu and x.numel() and not torch.compiler.is_compiling():
        correct = correction(x, tau, selected, lambda share: share)
        # the gradient of shares takes the last threshold as infinite, so one more place takes the rest
        p = correct(shares(x, *boundaries(x, tau, F, k), tau, F)[..., :k, :], 0, k)
    else:
        p = _matrix(x, tau, selected, F, k, lambda z, *_: F.cdf(z).diff(dim=-2), lambda share: share)
    return _places_first(p, input, dim)


@by_rows(2)
def log_soft_permutation(
    input: Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    descending: bool = False,
    k: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The logarithm of :func:`soft_permutation`, finite where an entry of P underflows.

    Args:
        input, dim, tau, cdf, descending, k, mask: as for :func:`soft_permutation`.

    Returns:
        log P in [−inf, 0], of P's shape and dtype; −inf where P is exactly 0. Without a mask and for CDFs
        with full support this happens only where a place or an entry belongs to an infinite score.

    Gradients, errors: as for :func:`soft_permutation`.

    Example:
        >>> khot.log_soft_permutation(torch.tensor([200.0, 0.0]), tau=0.5)
        tensor([[-200.6931,    0.0000],
                [   0.0000, -200.6931]])
    """
    F = cdfs.resolve(cdf)
    x, tau, selected = _oriented(input, dim, tau, descending, mask)
    k = _rows_asked(k, x)
    log_p = _matrix(x, tau, selected, F, k, functools.partial(log_between, F=F, dtype=x.dtype), torch.log)
    return _places_first(log_p, input, dim) + 0.0  # turns −0 into 0


@by_rows(0)
def soft_quantile(
    input: Tensor,
    q: Scalar,
    dim: int = -1,
    keepdim: bool = False,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    interpolation: InterpolationName | None = None,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The q-quantile of each row, softened: where the soft count from below is ½ + q(n − 1).

    As τ → 0 it tends to the entry nearest to the position q(n − 1) in the sorted row, and to the middle of
    two entries if q(n − 1) lies half-way between them. With an ``interpolation``, whole positions keep these
    values, and other positions interpolate between them: the limit is then that of ``torch.quantile``.

    Args:
        input: scores, of any floating-point dtype. Infinite ones come last or first.
        q: in [0, 1]; a number or a tensor of at most one dim.
        dim: the dimension to reduce.
        keepdim: keep this dimension, with one entry.
        tau, cdf, mask: as for :func:`soft_rank`; n is then the number of entries that take part.
        interpolation: what stands at a position q(n − 1) that is not whole: None, as above; or ``"linear"``,
            ``"lower"``, ``"higher"``, ``"nearest"`` (half-way the neighbour whose position is even) or
            ``"midpoint"``, as for :func:`khot.quantile`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A tensor of the input's dtype and of its shape without ``dim``. If q has a dim, the result has a first
        dim of q's length, as from ``torch.quantile``. The quantile of a row with a NaN, or of a row in which
        no entry takes part, is NaN.

    The gradient in input, q and tau is exact, to any order and in either mode. With an interpolation other
    than linear, q has none, because the result is constant in q between the steps.

    Raises:
        ValueError: q outside [0, 1] or with more than one dim; an unknown interpolation; others as for
            :func:`soft_rank`.
        TypeError, IndexError: as for :func:`soft_rank`.

    Source: after Struski et al. 2025, section 3.2.

    Example:
        >>> x = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0])
        >>> khot.soft_quantile(x, torch.tensor([0.0, 0.25, 1.0]), tau=0.01)
        tensor([1.0000, 1.5000, 9.0000])
        >>> khot.soft_quantile(x, 0.3, tau=0.01), khot.soft_quantile(x, 0.3, tau=0.01, interpolation="linear")
        (tensor(1.5051), tensor(1.8000))
    """
    arguments.check_flags(keepdim=keepdim)
    F = cdfs.resolve(cdf)
    x = arguments.rows(input, dim, mask)
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True)
    q = arguments.quantile_levels(q, x)
    level = widen(q).reshape(-1)
    n = x.shape[-1] if mask is None else arguments.mask_rows(mask, input, dim).sum(-1, keepdim=True)
    if interpolation is None:
        t = quantiles(x, _from_above(1 - level, n, x), tau, F)
    else:
        t = _interpolated(x, level, n, tau, F, check_interpolation(interpolation))
    if isinstance(n, Tensor):
        t = t.masked_fill(n == 0, math.nan)
    t = t.to(x.dtype).movedim(-1, 0)
    if keepdim:
        t = t.unsqueeze(arguments.check_dim(input, dim) + 1) if input.dim() else t
    return t if q.dim() else t.squeeze(0)


def _from_above(share: Tensor, n: int | Tensor, x: Tensor) -> Tensor:
    """The soft counts ½ + share · (n − 1), for shares (m): (*batch, m). No entries have the count 0."""
    if isinstance(n, int):
        return (0.5 + share * (n - 1)).expand(*x.shape[:-1], -1)
    return (0.5 + share * (n - 1)).masked_fill(n == 0, 0)


def _interpolated(
    x: Tensor, level: Tensor, n: int | Tensor, tau: Tensor, F: CDF, interpolation: InterpolationName
) -> Tensor:
    """What stands between the soft quantiles at whole positions, whose counts from above are ½, 1½, …"""
    last = n - 1 if isinstance(n, int) else (n - 1).clamp(min=0)
    position = (level * last).expand(*x.shape[:-1], -1)
    where = position.detach()
    lower, higher = where.floor(), where.ceil()
    rounded = {"lower": lower, "higher": higher, "nearest": where.round()}.get(interpolation)
    counts = 0.5 + last - (torch.cat((higher, lower), -1) if rounded is None else rounded)
    t = quantiles(x, counts if isinstance(n, int) else counts.masked_fill(n == 0, 0), tau, F)
    if rounded is not None:
        return t
    return interpolate(t, position - lower if interpolation == "linear" else 0.5 * (higher - lower))


def soft_median(
    input: Tensor,
    dim: int = -1,
    keepdim: bool = False,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "laplace",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The median of each row, softened: :func:`soft_quantile` at q = ½, half the entries on either side.

    As τ → 0 it tends to the middle entry, or for even n to the mean of the two middle entries.
    ``torch.median`` takes the lower of the two, as ``soft_quantile(input, 0.5, interpolation="lower")`` does.

    Args:
        input, dim, keepdim, tau, cdf, mask: as for :func:`soft_quantile`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns, gradients, errors: as for :func:`soft_quantile`.

    Example:
        >>> khot.soft_median(torch.tensor([3.0, 1.0, 4.0, 9.0]), tau=0.01)
        tensor(3.5000)
    """
    return soft_quantile(input, 0.5, dim, keepdim, tau=tau, cdf=cdf, mask=mask, offsets=offsets)


def _oriented(
    input: Tensor, dim: int, tau: Scalar, descending: bool, mask: Tensor | None, served: CDF | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows, negated where the smallest entry comes first; τ; and which entries take part (None: all).

    Where a kernel serves a CDF, τ may be on the CPU; elsewhere the rows have at least float32, in which the
    gradients of their thresholds are summed.
    """
    arguments.check_flags(descending=descending)
    x = arguments.rows(input, dim, mask, largest=descending)
    selected = None if mask is None else arguments.mask_rows(mask, input, dim)
    by_kernel = served is not None and serves(x, served)
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True, by_value=by_kernel)
    return x if by_kernel else at_least_single(x), tau, selected


def _matrix(
    x: Tensor,
    tau: Tensor,
    selected: Tensor | None,
    F: CDF,
    k: int,
    between: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    of_share: Callable[[Tensor], Tensor],
) -> Tensor:
    """The matrix (*batch, k, n) of the first places by entries, in parts of the places.

    Args:
        between: of the entries' distances z to thresholds, these as hi and lo, and τ, all of one part: what
            each of the places between the thresholds gets.
        of_share: the same of the share that an infinite entry has of a place.
    """
    hi, lo = (t.unsqueeze(-1) for t in boundaries(x, tau, F, k))
    entries, correct = x.unsqueeze(-2), correction(x, tau, selected, of_share)

    def part(start: int, stop: int) -> Tensor:
        ends = slice(start, stop + 1)
        at = hi[..., ends, :], lo[..., ends, :], tau[..., None, None]
        p = between(standardize(entries, *at), *at)
        return correct(p, start, stop).to(x.dtype)

    return in_parts(part, k, x.numel(), x.device)


def _rows_asked(k: int | None, x: Tensor) -> int:
    if k is None:
        return x.shape[-1]
    arguments.check_integer(k, "k", low=0, high=x.shape[-1])
    return k if isinstance(k, torch.SymInt) else int(k)


def _places_first(p: Tensor, input: Tensor, dim: int) -> Tensor:
    p, dim = in_dtype(p, input.dtype), arguments.check_dim(input, dim)
    return p if dim == max(input.dim(), 1) - 1 else p.movedim((-2, -1), (dim, dim + 1))
