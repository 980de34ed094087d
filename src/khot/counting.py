"""The soft count C(b) = Σ_j F((x_j − b)/τ), and its inverse: the level above which a given number of
entries lie.

Every deterministic operator is built on these two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from khot import cdfs
from khot._core import arguments, eager, precision
from khot._core.arguments import Scalar
from khot._core.precision import widen
from khot._core.ways import by_rows
from khot._ops.laplace import laplace_count, laplace_thresholds
from khot._ops.permutation import by_scans
from khot._ops.soft_count import count_above
from khot._ops.soft_topk import threshold_map, thresholds
from khot.cdfs import CDF, CDFName

__all__ = ["inverse_soft_count", "soft_count"]


class _Few(NamedTuple):
    """Up to so many levels, a pass or a search for each of them costs less than a sort and its scans."""

    levels: int
    counts: int


FEW_ON_CPU = _Few(levels=32, counts=6)  # measured
FEW_ELSEWHERE = _Few(levels=2048, counts=256)  # from the instructions per entry; a sort is many launches


@by_rows(0)
def soft_count(
    input: Tensor,
    at: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "logistic",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """How many entries of each row lie above ``at``, softened.

        C(b) = Σ_j F((x_j − b)/τ)

    As τ → 0, C(b) tends to the number of entries above b, where an entry equal to b counts as F(0).

    Args:
        input: scores, of any floating-point dtype; ±inf count as 1 and 0.
        at: the levels b. A number or a tensor that broadcasts with the batch shape (the input's shape without
            ``dim``) gives one level per row, and ``dim`` is dropped. A tensor with as many dims as the input
            gives m levels along ``dim``; its other dims broadcast with the input's.
        dim: the dimension to count along.
        tau: temperature > 0; a number or a tensor that broadcasts with the batch shape (the input's shape
            without ``dim``).
        cdf: ``"logistic"``, ``"laplace"``, ``"normal"``, ``"uniform"``, or an object of
            :mod:`khot.cdfs`.
        mask: bool, broadcastable to the input; True where an entry is counted. Entries under False are
            ignored, even NaN and inf.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Counts in [0, n], of the input's dtype, with m entries along ``dim`` or without it.
        Differentiable (exactly, to any order and in either mode) in input, at and tau. Many levels take
        O((n + m) log n) time with Laplace's CDF, which sorts the row (Struski et al. 2025, Theorem 4.1), and
        O(n·m) with the others. Memory is linear in n + m, except, with these others, when the backward pass
        is itself recorded.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Example:
        >>> x = torch.tensor([3.0, 1.0, 2.0, 0.0])
        >>> khot.soft_count(x, 1.5, tau=0.01)
        tensor(2.)
    """
    if mask is None and not is_dynamo_compiling():
        plain = eager.soft_count(input, at, dim, tau, cdf)
        if plain is not None:
            return plain
    F = cdfs.resolve(cdf)
    x = arguments.rows(input, dim, mask)
    at, one = _levels(at, "at", input, x, dim, low=-math.inf)
    scans = by_scans(F) and not one and min(at.shape[-1], x.shape[-1]) > _few(x).levels
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True, by_value=not scans)
    if at.device != x.device:  # a number, by value
        return count_above(x, at, tau, F)
    if one:
        at = at.unsqueeze(-1).expand(*x.shape[:-1], 1)
    count = laplace_count(x, at, tau) if scans else count_above(x, at, tau, F)
    count = count.to(input.dtype)
    return count.squeeze(-1) if one else count.movedim(-1, dim)


@by_rows(0)
def inverse_soft_count(
    input: Tensor,
    count: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "logistic",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The threshold above which the soft count of each row is ``count``.

        Σ_j F((x_j − t)/τ) = count

    Where C is constant only because of rounding (an integer count and a gap much wider than τ), t is still
    the exact root. Where C is truly constant (compact support), t is the middle of the gap.

    Args:
        input: scores, of any floating-point dtype. −inf never counts, +inf always.
        count: in [0, n]; a number or a tensor, as ``at`` for :func:`soft_count`.
        dim, tau, cdf, mask: as for :func:`soft_count`. With a mask, n is the number of entries that are
            counted.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Thresholds of the input's dtype, with m entries along ``dim`` or without it; +inf for count = 0 and
        −inf for count = n. Differentiable (exactly, by the implicit function theorem) in input, count and
        tau. Many counts take O((n + m) log n) time with Laplace's CDF and O(n·m) with the others, as many
        levels do for :func:`soft_count`.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Example:
        >>> x = torch.tensor([3.0, 1.0, 2.0, 0.0])
        >>> khot.inverse_soft_count(x, 2, tau=0.01)
        tensor(1.5000)
    """
    if mask is None and not is_dynamo_compiling():
        plain = eager.inverse_soft_count(input, count, dim, tau, cdf)
        if plain is not None:
            return plain
    F = cdfs.resolve(cdf)
    x = arguments.rows(input, dim, mask)
    count, one = _levels(count, "count", input, x, dim, low=0.0, high=float(x.shape[-1]))
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True, by_value=one)
    if one and x.is_cuda:
        return threshold_map(x, count, tau, F, "rounded")[0]
    if one:
        _, hi, lo = threshold_map(x, count, tau, F, "threshold")
    elif by_scans(F) and min(count.shape[-1], x.shape[-1]) > _few(x).counts:
        hi, lo = _sorted_thresholds(x, count, tau)
    else:
        hi, lo = thresholds(x, count, tau, F)
    t = (hi + lo).to(input.dtype)
    return t if one else t.movedim(-1, dim)


def _few(x: Tensor) -> _Few:
    return FEW_ON_CPU if x.device.type == "cpu" else FEW_ELSEWHERE


def _sorted_thresholds(x: Tensor, count: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """The thresholds of :func:`laplace_thresholds`, but NaN for counts that only a limit would meet."""
    hi, lo = laplace_thresholds(x, widen(count), tau)
    pinned, selectable = (x == math.inf).sum(-1, keepdim=True), (x > -math.inf).sum(-1, keepdim=True)
    hi = hi.masked_fill((count < pinned) | (count > selectable), math.nan)
    arguments.explain_nan(hi, x.unsqueeze(-2), count, tau.unsqueeze(-1), name="count")
    return hi, lo


def _levels(
    value: Scalar, name: str, input: Tensor, x: Tensor, dim: int, *, low: float, high: float = math.inf
) -> tuple[Tensor, bool]:
    """The levels, and whether there is one per row: they broadcast with the batch then, and a number goes by
    value; otherwise they are (*batch, m)."""
    if isinstance(value, Tensor):
        arguments.check_real(value, name)  # first, because nested tensors have no shape
    if not isinstance(value, Tensor) or value.dim() < max(input.dim(), 1):
        return arguments.per_row(value, name, x, low=low, high=high, by_value=True), True
    arguments.check_has_values(value, name, input)
    levels = precision.on(x.device, value.movedim(dim, -1))
    if value.dim() != max(input.dim(), 1) or not arguments.broadcasts(levels.shape[:-1], x.shape[:-1]):
        raise ValueError(
            f"{name} must be a number, or broadcast with the batch shape {tuple(x.shape[:-1])}, or have the "
            f"input's {input.dim()} dims and broadcast with its shape {tuple(input.shape)} outside "
            f"dim {dim}, but got shape {tuple(value.shape)}"
        )
    levels = arguments.check_values(levels, name, low=low, high=high)
    return levels.expand(*x.shape[:-1], levels.shape[-1]), False
