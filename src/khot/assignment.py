"""Soft assignments: every row and every column of the result has a given sum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot import cdfs
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import widen
from khot._ops.soft_assign import soft_assign as assigned
from khot.cdfs import CDF, CDFName

__all__ = ["soft_assign"]


def soft_assign(
    input: Tensor,
    k: Scalar,
    capacity: Scalar | None = None,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "logistic",
    at_most: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    return_bias: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each row chooses k columns, and each column gets as many rows as its capacity.

    The result is y = F((x − r_i − c_j)/τ) with thresholds of the rows and of the columns for which

        Σ_j y_ij = k_i,     Σ_i y_ij = capacity_j

    It maximises ⟨y, x⟩ − τ Σ ω(y) under these sums, where ω is the potential of the CDF; as τ → 0 it tends to
    the solution of the linear program.

    Args:
        input: scores (*batch, m, E), of any floating-point dtype. −inf is never selected;
            entries of +inf get 1.
        k: the sum of each row, in [0, E]: a number or a tensor that broadcasts with (*batch, m).
        capacity: the sum of each column, in [0, m]: a number or a tensor that broadcasts with (*batch, E).
            The capacities and the k have to have the same sum. By default all columns have the same.
        tau: temperature > 0; a number or a tensor that broadcasts with the batch shape.
        cdf: as for :func:`khot.soft_topk`, with full support: ``"logistic"``, ``"laplace"``, ``"normal"`` or
            your own. Without it, thresholds that fit need not be unique.
        at_most: a column gets at most its capacity: c ≥ 0, and c = 0 where there is room left. Then the
            capacities may have a larger sum.
        mask: bool, broadcastable to the input; True where an entry may be selected.
        bias: thresholds c to start from, which broadcast with (*batch, E), such as those of the last call.
            They save time and do not change the result.
        return_bias: return the thresholds c, too.

    Returns:
        y, of the input's shape and dtype, with entries in [0, 1]; with ``return_bias`` also c, (*batch, E),
        in float64 and without gradient. The k largest of x − c are the choice of a row without the others. c
        has the mean 0 over the columns that are neither empty nor full. A matrix with a NaN is NaN.

    The gradient in input, k, capacity and tau is exact, in both modes and of any order: nothing is unrolled.
    In k and capacity it is that along changes that keep the two sums equal.

    Raises:
        ValueError: k, capacity or tau out of range or of a shape that does not broadcast; sums of k and
            capacity that differ; sums that the mask does not allow; a cdf with compact support.
        TypeError: input that is not a floating-point tensor.

    Example:
        >>> scores = torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
        >>> from khot.assignment import soft_assign
        >>> soft_assign(scores, 1, tau=0.1)
        tensor([[9.9942e-01, 5.7629e-04],
                [9.2117e-01, 7.8832e-02],
                [7.2987e-02, 9.2701e-01],
                [6.4214e-03, 9.9358e-01]])
    """
    arguments.check_input(input)
    if input.dim() < 2:
        raise ValueError(
            f"input must have at least 2 dims, (*batch, m, E), but got shape {tuple(input.shape)}"
        )
    F = cdfs.resolve(cdf)
    if not F.full_support:
        raise ValueError(f"cdf must have full support, such as 'logistic' or 'normal', but got {cdf!r}")
    x = arguments.rows(input, -1, mask)
    *batch, m, width = x.shape
    k = arguments.per_row(k, "k", x, low=0, high=width).expand(*batch, m)
    if capacity is None:
        capacity = (widen(k).sum(-1, keepdim=True) / max(width, 1)).expand(*batch, width)
    else:
        most = math.inf if at_most else m
        capacity = arguments.per_row(capacity, "capacity", x.mT, low=0, high=most).expand(*batch, width)
        _check_sums(k, capacity, at_most)
    tau = arguments.per_row(tau, "tau", x[..., 0], low=0, low_open=True).expand(batch).unsqueeze(-1)
    if bias is None:
        start = torch.zeros_like(capacity, dtype=torch.float64)
    else:
        arguments.check_input(bias, "bias")
        start = arguments.per_row(bias, "bias", x.mT, low=-math.inf).detach().expand(*batch, width)
    y, _, c = assigned(x, k, capacity, tau, start, F, at_most)
    return (y, c.detach()) if return_bias else y


def _check_sums(k: Tensor, capacity: Tensor, at_most: bool) -> None:
    if not (arguments.readable(k) and arguments.readable(capacity)):
        return
    need, room = widen(k).sum(-1), widen(capacity).sum(-1)
    slack = 1e-6 * need.clamp(min=1)
    bad = (room < need - slack) if at_most else ((room - need).abs() > slack)
    if bool(bad.any()):
        relation = "at least" if at_most else "the same as"
        raise ValueError(
            f"capacity must have a sum that is {relation} that of k, {need[bad][0].item()}, but got "
            f"{room[bad][0].item()}"
        )
