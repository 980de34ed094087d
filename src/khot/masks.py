"""Relaxed top-k masks under every name that the papers give them, and the hard mask."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from khot import cdfs
from khot._core import arguments, eager, rows
from khot._core.arguments import Scalar
from khot._core.precision import at_least_single, in_dtype, large, widen
from khot._core.rows import Row
from khot._core.ways import by_shards
from khot._ops import packed
from khot._ops.soft_topk import threshold_map
from khot._ops.topk_mask import hard_mask
from khot.cdfs import CDF, CDFName

__all__ = [
    "laplace_topk",
    "log_soft_topk",
    "ot_topk",
    "sigmoid_topk",
    "soft_topk",
    "sparse_topk",
    "topk_mask",
]


def soft_topk(
    input: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "logistic",
    largest: bool = True,
    mask: Tensor | None = None,
    hard: bool = False,
    group: Any = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """A k-hot mask that is differentiable: k ones, spread softly over the largest entries of each row.

        y_i = F((x_i − t)/τ),   with the t for which Σ_i y_i = k

    Equivalently, y is the point of the capped simplex {y ∈ [0, 1]ⁿ, Σy = k} that maximises
    ⟨y, x⟩ − τ Σ ω(y_i), with ω = ∫F⁻¹ the CDF's potential. As τ → 0, y tends to the hard top-k mask; as
    τ → ∞, to k/n everywhere.

    Args:
        input: scores, of any floating-point dtype. −inf is never selected, +inf always.
        k: how many to select, in [0, n], not necessarily an integer; a number or a tensor that broadcasts
            with the batch shape (the input's shape without ``dim``).
        dim: the dimension to select along.
        tau: temperature > 0, in the units of the scores; a number or a tensor, as k.
        cdf: ``"logistic"``, ``"laplace"``, ``"normal"``, ``"uniform"``, or an object of
            :mod:`khot.cdfs`.
        largest: select the largest entries; if False, the smallest.
        mask: bool, broadcastable to the input; True where an entry may be selected. Entries under False are
            ignored, even NaN and inf.
        hard: return the k-hot mask of :func:`topk_mask`, with the gradient of the soft one
            (straight-through, as in ``torch.nn.functional.gumbel_softmax``).
        group: a ``torch.distributed`` process group over which the rows are spread. ``input`` and ``mask``
            are this process's shard of the rows along ``dim``, in the order of the ranks and of any length,
            including 0; k and tau must be the same on every process. The processes exchange a few sums per
            pass, so all of them have to make the call and the backward call. A DTensor has its own group, and
            the result is then a DTensor.
        offsets: (B + 1,), int32 or int64, from 0 to the length of an input of one dim, and never falling: the
            input packs B rows of different lengths, and row i is ``input[offsets[i]:offsets[i + 1]]``. A
            tensor for each row is (B,), and the result is packed as the input. A nested input with
            ``layout=torch.jagged`` has its own offsets, and so does the result.

    Returns:
        Same shape and dtype as the input, in [0, 1], each row summing to k. A row with a NaN, or with more
        than k entries of +inf, is NaN.

    The gradient in input, k and tau is exact (by implicit differentiation; nothing is unrolled), in both
    modes and to second order. With ``hard=True`` it is a surrogate. With ``group``, every process gets the
    gradient of the sum of all processes' losses, in its shard and in the whole of k and tau; forward mode is
    that of ``torch.autograd.forward_ad``, and the transforms of ``torch.func`` are not supported.

    Raises:
        ValueError: k is negative or larger than the number of entries that may be selected; tau ≤ 0; a mask
            or scalar does not broadcast; the cdf is unknown; arguments differ between the processes of a
            group. If one process of a group raises an error, all of them raise it. (The values of tensors are
            checked on the CPU in eager mode; elsewhere a row with a bad value is NaN.)
        TypeError: input that is not a floating-point tensor, mask that is not bool.
        IndexError: dim out of range.

    Sources: Wijk, Vinuesa, Azizpour 2025, eq. 9 (logistic); Struski et al. 2025 (Laplace); Sander et al.
    2023 (uniform, power).

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> khot.soft_topk(scores, 2, tau=0.5)
        tensor([0.2689, 0.9526, 0.7311, 0.0474])
    """
    if not is_dynamo_compiling():
        call = eager.hard_topk if hard is True else eager.soft_topk
        plain = call(input, k, dim, tau, cdf, largest, mask, group, False, offsets)
        if plain is not None:
            if not isinstance(hard, bool):
                arguments.check_flags(hard=hard)
            return plain
        if hard is True and offsets is None:  # on a GPU both are plain calls
            plain = eager.soft_topk(input, k, dim, tau, cdf, largest, mask, group, False, None)
            if plain is not None:
                return topk_mask(input, k, dim, largest=largest, mask=mask) + (plain - plain.detach())
    return _soft(input, k, dim, group, tau, cdf, largest, mask, hard, offsets=offsets)


def log_soft_topk(
    input: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "logistic",
    largest: bool = True,
    mask: Tensor | None = None,
    group: Any = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The logarithm of :func:`soft_topk`, finite where y underflows.

        log y_i = log F((x_i − t)/τ),   with the t for which Σ_i y_i = k

    Args:
        input, k, dim, tau, cdf, largest, mask, group: as for :func:`soft_topk`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        log y in [−inf, 0], of the input's shape and dtype; −inf where y is exactly 0. For CDFs with full
        support this happens only where an entry may not be selected, or where k = 0.

    Gradients, errors: as for :func:`soft_topk`.

    Example:
        >>> khot.log_soft_topk(torch.tensor([200.0, 100.0, 0.0]), 1.5, tau=0.5)[1:]
        tensor([  -0.6931, -200.0000])
    """
    if not is_dynamo_compiling():
        plain = eager.soft_topk(input, k, dim, tau, cdf, largest, mask, group, True, offsets)
        if plain is not None:
            return plain
    return _soft(input, k, dim, group, tau, cdf, largest, mask, output="log", offsets=offsets)


@by_shards(at_once=packed.soft_at_once)
def _soft(
    input: Tensor,
    k: Scalar,
    dim: int,
    group: Any,
    tau: Scalar,
    cdf: str | CDF,
    largest: bool,
    mask: Tensor | None,
    hard: bool = False,
    output: str = "y",
    offsets: Tensor | None = None,
) -> Tensor:
    """:func:`soft_topk`, or with output "log" :func:`log_soft_topk`."""
    row = rows.named(group)

    def prepare() -> tuple[Tensor, Tensor, Tensor, CDF]:
        if not (isinstance(largest, bool) and isinstance(hard, bool)):
            arguments.check_flags(largest=largest, hard=hard)
        F = cdfs.resolve(cdf)
        x = arguments.rows(input, dim, mask, largest)
        return x, *arguments.k_and_tau(k, tau, x, high=row.limit(x), by_value=row.here), F

    x, count, scale, F = row.agree(prepare, k=k, tau=tau, cdf=cdf, largest=largest, output=output, hard=hard)
    row.check(k, x)
    y, _, _ = threshold_map(x, count, scale, F, output, row)
    return arguments.unrows(_hardened(y, x, count, row) if hard else y, input, dim)


eager.PYTHON_WAY["soft_topk"] = lambda input, k, dim, tau, cdf, largest, mask, group, log: _soft(
    input, k, dim, group, tau, cdf, largest, mask, output="log" if log else "y"
)


def _hardened(y: Tensor, x: Tensor, k: Tensor, row: Row) -> Tensor:
    """The hard mask, with the gradient of y."""
    return hard_mask(x.detach(), k.detach(), row) + (y - y.detach())


def sigmoid_topk(
    input: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    largest: bool = True,
    mask: Tensor | None = None,
    hard: bool = False,
    group: Any = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Sigmoid top-k: the sigmoids of scores that are shifted so that each row sums to k.

        y_i = σ((x_i − t)/τ),   σ(z) = 1/(1 + e^−z),   with the t for which Σ_i y_i = k

    It is smooth to any order, and 0 and 1 are only approached. It maximises ⟨y, x⟩ plus τ times the binary
    entropies of y over the capped simplex (Wijk, Vinuesa, Azizpour 2025, Propositions 1 and 2). It is the
    same function as the LML projection and, at τ = ε/2, as :func:`ot_topk`; :func:`soft_topk` has it as its
    default.

    Args:
        input: scores, of any floating-point dtype.
        k: how many to select, in [0, n], not necessarily an integer; a number or a tensor with one value for
            each row.
        dim: the dimension to select along.
        tau: temperature > 0, in the units of the scores; as k.
        largest, mask, hard, group: as for :func:`soft_topk`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input, in [0, 1], each row summing to k.

    Gradients and errors: as for :func:`soft_topk`.

    Example:
        >>> khot.sigmoid_topk(torch.tensor([1.0, 3.0, 2.0, 0.0]), 2, tau=0.5)
        tensor([0.2689, 0.9526, 0.7311, 0.0474])
    """
    return soft_topk(
        input, k, dim, tau=tau, largest=largest, mask=mask, hard=hard, group=group, offsets=offsets
    )


def laplace_topk(
    input: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    largest: bool = True,
    mask: Tensor | None = None,
    hard: bool = False,
    group: Any = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """LapSum top-k: the Laplace CDF of scores that are shifted so that each row sums to k.

        y_i = F((x_i − t)/τ),   with the t for which Σ_i y_i = k
        F(z) = ½e^z for z ≤ 0,   F(z) = 1 − ½e^−z for z > 0

    The density of F has its peak, a corner, at the threshold: the entries next to it get most of the
    gradient, and second derivatives jump there. Far from it, weights approach 0 and 1 as e^−|z|, as with
    :func:`sigmoid_topk`. This is :func:`soft_topk` with ``cdf="laplace"`` (Struski et al. 2025,
    Theorem 3.3).

    Args:
        input: scores, of any floating-point dtype.
        k: how many to select, in [0, n], not necessarily an integer; a number or a tensor with one value for
            each row.
        dim: the dimension to select along.
        tau: temperature > 0, in the units of the scores; as k.
        largest, mask, hard, group: as for :func:`soft_topk`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input, in [0, 1], each row summing to k.

    Gradients and errors: as for :func:`soft_topk`.

    Example:
        >>> khot.laplace_topk(torch.tensor([1.0, 3.0, 2.0, 0.0]), 2, tau=0.5)
        tensor([0.1839, 0.9751, 0.8161, 0.0249])
    """
    return soft_topk(
        input,
        k,
        dim,
        tau=tau,
        cdf="laplace",
        largest=largest,
        mask=mask,
        hard=hard,
        group=group,
        offsets=offsets,
    )


@by_shards()
def ot_topk(
    input: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    epsilon: Scalar = 0.1,
    normalize: bool = False,
    largest: bool = True,
    mask: Tensor | None = None,
    hard: bool = False,
    group: Any = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """SOFT top-k: the entropic optimal transport of the scores onto the anchors 0 and 1.

        y_i = n Γ_(i,1),   Γ = argmin_Γ Σ_ij C_ij Γ_ij + ε Σ_ij Γ_ij log Γ_ij,   C_ij = (x_i − j)²

    where the plans Γ have two columns, j = 0 and 1, with the sums (n − k)/n and k/n, and rows that sum to 1/n
    (Xie et al. 2020). It equals :func:`sigmoid_topk` at τ = ε/2, and is computed that way.

    Args:
        input: scores, of any floating-point dtype.
        k: how many to select, in [0, n], not necessarily an integer; a number or a tensor with one value for
            each row.
        dim: the dimension to select along.
        epsilon: regularisation > 0, in the units of the scores, twice the ``tau`` of :func:`sigmoid_topk`; as
            k.
        normalize: divide the cost by its largest entry in the row. (The published code divides by the largest
            entry of the whole batch, and ignores the gradient of that.)
        largest, mask, hard, group: as for :func:`soft_topk`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input, in [0, 1], each row summing to k.

    Gradients and errors: as for :func:`soft_topk`; also differentiable in epsilon.

    Example:
        >>> x = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> torch.equal(khot.ot_topk(x, 2, epsilon=0.1), khot.sigmoid_topk(x, 2, tau=0.05))
        True
    """
    plain = hard is False and normalize is False and type(epsilon) is float and offsets is None
    if plain and not is_dynamo_compiling():
        small = eager.soft_topk(input, k, dim, epsilon / 2, "logistic", largest, mask, group, False, None)
        if small is not None:
            return small
    row = rows.named(group)

    def prepare() -> tuple[Tensor, Tensor, Tensor]:
        arguments.check_flags(largest=largest, normalize=normalize, hard=hard)
        x = arguments.rows(input, dim, mask, largest)
        scale = arguments.per_row(epsilon, "epsilon", x, low=0, low_open=True)
        # in the wider dtype, in which neither epsilon/2 nor a squared score overflows or underflows
        return x, arguments.per_row(k, "k", x, low=0, high=row.limit(x)), widen(scale)

    said = {"largest": largest, "normalize": normalize, "hard": hard}
    x, count, scale = row.agree(prepare, k=k, epsilon=epsilon, **said)
    row.check(k, x)
    if normalize:
        x = at_least_single(x)  # its two gradients are summed in its dtype
    tau = _ot_temperature(scale, _largest_cost(x, row) if normalize else None)
    y, _, _ = threshold_map(x, count, tau, cdfs.Logistic(), "y", row)
    y = in_dtype(_hardened(y, x, count, row) if hard else y, input.dtype)
    return arguments.unrows(y, input, dim)


def _largest_cost(x: Tensor, row: Row) -> Tensor:
    """The greatest of the costs (x − 0)² and (x − 1)² of each row. Infinite entries and NaN are left out; a
    NaN makes its row NaN anyway."""
    finite = widen(x).nan_to_num(0.0, 0.0, 0.0)
    costs = torch.maximum(finite**2, (finite - 1) ** 2).masked_fill(x.isinf(), 0)
    cost = costs.amax(-1) if x.shape[-1] else costs.sum(-1)
    return row.largest(cost)


def _ot_temperature(epsilon: Tensor, largest_cost: Tensor | None) -> Tensor:
    tau = torch.where(epsilon / 2 == 0, epsilon, epsilon / 2)
    if largest_cost is None:
        return tau
    scaled = (tau * largest_cost.masked_fill(largest_cost == 0, 1)).clamp(1 / large(tau), large(tau))
    return scaled.where((tau > 0) & (tau < math.inf), math.nan)


def sparse_topk(
    input: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    p: float = 2.0,
    largest: bool = True,
    mask: Tensor | None = None,
    hard: bool = False,
    group: Any = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Sparse top-k: weights that sum to k, of which those far from the threshold are exactly 0 and 1.

        y_i = clip((x_i − t)/τ, 0, 1)^(1/(p−1)),   with the t for which Σ_i y_i = k

    Entries more than τ apart are exactly 0 and 1. y maximises ⟨y, x⟩ − τ Σ y_i^p / p over the capped simplex
    (Sander et al. 2023). With p = 2 it is the Euclidean projection of x/τ; with p = 4/3 it is smooth where y
    leaves 0; for p > 2 its slope is infinite there.

    Args:
        input: scores, of any floating-point dtype.
        k: how many to select, in [0, n], not necessarily an integer; a number or a tensor with one value for
            each row.
        dim: the dimension to select along.
        tau: temperature > 0, in the units of the scores; as k.
        p: in [1.15, 3], of which 1.15 is what float32 bears; the CDF is ``khot.cdfs.Power(p)``.
        largest, mask, hard, group: as for :func:`soft_topk`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input, in [0, 1], each row summing to k.

    Gradients and errors: as for :func:`soft_topk`.

    Example:
        >>> khot.sparse_topk(torch.tensor([1.0, 3.0, 2.0, 0.0]), 2, tau=2.0)
        tensor([0.2500, 1.0000, 0.7500, 0.0000])
    """
    cdf: CDFName | CDF = "uniform" if isinstance(p, (int, float)) and p == 2 else cdfs.Power(p)
    return soft_topk(
        input, k, dim, tau=tau, cdf=cdf, largest=largest, mask=mask, hard=hard, group=group, offsets=offsets
    )


def topk_mask(
    input: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    largest: bool = True,
    mask: Tensor | None = None,
    group: Any = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The hard k-hot mask: 1 for the ⌊k + ½⌋ largest entries of each row, 0 for the others.

    Ties go to the lowest index. The mask has no gradient.

    Args:
        input, k, dim, largest, mask, group: as for :func:`soft_topk`. With a group, the lowest
            index is that of the whole row.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones of the input's shape and dtype. A row with a NaN is NaN.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`soft_topk`.

    Example:
        >>> khot.topk_mask(torch.tensor([1.0, 3.0, 2.0, 0.0]), 2)
        tensor([0., 1., 1., 0.])
    """
    if offsets is None and not is_dynamo_compiling():
        plain = eager.topk_mask(input, k, dim, largest, mask, group)
        if plain is not None:
            return plain
    return _hard(input, k, dim, group, largest, mask, offsets=offsets)


@by_shards(at_once=packed.hard_at_once)
def _hard(
    input: Tensor,
    k: Scalar,
    dim: int,
    group: Any,
    largest: bool,
    mask: Tensor | None,
    offsets: Tensor | None = None,
) -> Tensor:
    """:func:`topk_mask`."""
    row = rows.named(group)

    def prepare() -> tuple[Tensor, Tensor]:
        if not isinstance(largest, bool):
            arguments.check_flags(largest=largest)
        x = arguments.rows(input, dim, mask, largest)
        count = arguments.per_row(k, "k", x, low=0, high=row.limit(x), by_value=row.here)
        return arguments.detached(x), count.detach() if isinstance(k, Tensor) else count

    x, count = row.agree(prepare, k=k, largest=largest)
    row.check(k, x)
    return arguments.unrows(hard_mask(x, count, row), input, dim)
