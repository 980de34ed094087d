"""Choosing on two sides at once: each row selects k columns, and each column has a capacity."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from khot import cdfs
from khot._core import arguments, rows
from khot._core.arguments import Scalar
from khot._core.precision import wide_dtype, widen
from khot._ops.soft_assign import soft_assign as assigned
from khot.cdfs import CDF, CDFName

__all__ = ["soft_assign"]


@overload
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
    return_bias: Literal[False] = False,
    group: Any = None,
) -> Tensor: ...


@overload
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
    return_bias: Literal[True],
    group: Any = None,
) -> tuple[Tensor, Tensor]: ...


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
    group: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A differentiable selection whose rows and columns both have given sums.

    Each of m rows (tokens, say) selects k of E columns (experts), and each column is selected by as many rows
    as its capacity. The result is

        y_ij = F((x_ij − r_i − c_j)/τ),    Σ_j y_ij = k,    Σ_i y_ij = capacity_j

    with one number per row and one per column, which are determined by the sums up to a constant. It
    maximises Σ x y less τ times a convex penalty among all matrices with these sums and entries in [0, 1].
    As τ → 0 it solves the linear programme of transport with upper bounds.

    Args:
        input: scores x, (*batch, m, E), of any floating-point dtype. −inf is never selected, +inf always. A
            row of nothing but −inf takes no part: its sum is 0.
        k: the sum of each row, in [0, number of its entries that may be selected]; a number or a tensor that
            broadcasts with (*batch, m).
        capacity: the sum of each column, in [0, number of rows that may select it]; a number or a tensor that
            broadcasts with (*batch, E). By default the sum of the rows over E. Their sum must be that of the
            rows; a difference of up to a relative 1e-6, or of the resolution of k and capacity in half
            precision, counts as rounding, and is spread over the columns.
        tau: temperature > 0, in the units of the input; a number or a tensor that broadcasts with the batch
            shape.
        cdf: F, a CDF whose support is the whole line: ``"logistic"``, ``"laplace"``, ``"normal"``, or a
            CDF of your own.
        at_most: a column may have less than its capacity: then c ≥ 0, and c_j = 0 unless the column is full.
        mask: bool, broadcastable to the input; True where an entry may be selected. Entries under False are
            ignored, even NaN and inf.
        bias: a guess of −c that broadcasts with (*batch, E), such as that of the step before; it saves time
            and does not change the result.
        return_bias: return −c, too.
        group: a ``torch.distributed`` process group over which the rows are spread. Each process passes its
            rows, of any number, with the k and the mask of these, and the same capacity, tau and bias. The
            gradients of what is the same are those of the sum of the processes' losses.

    Returns:
        A tensor of the input's shape and dtype, in [0, 1]. With ``return_bias`` also the bias −c,
        (*batch, E), in float64: y is the soft top-k of each row of the input plus the bias.
        Its mean is 0, or with
        ``at_most`` it is ≤ 0; it is ∓inf for columns that are empty or full. A matrix with a NaN is NaN.

    The gradient in input, k, capacity and tau is exact (by implicit differentiation; nothing is unrolled), in
    both modes and to second order. That of the capacity has mean 0, because its sum is given.

    Raises:
        ValueError: fewer than two dims; k not in [0, number of entries that may be selected]; a capacity that
            is out of range or has another sum, or that no matrix meets under the mask;
            tau ≤ 0; a cdf with compact support; an argument that does not broadcast. (The values of tensors
            are checked on the CPU in eager mode; elsewhere a matrix with a bad value is NaN.)
        TypeError: input that is not a floating-point tensor, mask that is not bool.

    Example:
        >>> scores = torch.tensor([[2.0, 1.0], [3.0, 0.0], [1.0, 0.5], [2.0, 2.0]])
        >>> y = khot.soft_assign(scores, 1, tau=0.1)
        >>> y.sum(0)
        tensor([2., 2.])
        >>> y.argmax(-1)
        tensor([0, 0, 1, 1])
    """
    if rows.is_dtensor(input):
        raise TypeError(
            "input must be a plain tensor, but got a DTensor: pass its local tensor and its group"
        )
    row = rows.named(group)

    def prepare() -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, CDF]:
        arguments.check_flags(at_most=at_most, return_bias=return_bias)
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
        count = arguments.per_row(k, "k", x, low=0, high=width).expand(*batch, m)
        if width:
            count = torch.where(x.amax(-1) == -math.inf, 0, count)
        room = None
        if capacity is not None:
            most = math.inf if at_most or not row.here else m
            room = arguments.per_row(capacity, "capacity", x.mT, low=0, high=most).expand(*batch, width)
        matrices = x[..., :1].flatten(-2)  # a row for each matrix, even where E = 0
        scale = arguments.per_row(tau, "tau", matrices, low=0, low_open=True).expand(batch).unsqueeze(-1)
        if bias is None:
            start = x.new_zeros(*batch, width, dtype=wide_dtype(x.device))
        else:
            arguments.check_input(bias, "bias")
            start = -arguments.per_row(bias, "bias", x.mT, low=-math.inf).detach().expand(*batch, width)
        # for a group, the columns come first: they have to agree, and the rows are what is spread
        return x.mT, x, count, room, scale, start, F

    said = "a CDF of the user's own" if isinstance(cdf, CDF) and not cdf.built_in else cdf
    _, x, count, room, scale, start, F = row.agree(
        prepare, capacity=capacity, tau=tau, cdf=said, at_most=at_most, bias=bias
    )
    if room is None:
        (total,) = row.total([widen(count).sum(-1, keepdim=True)])
        room = (total / max(x.shape[-1], 1)).expand(*x.shape[:-2], x.shape[-1])
    else:
        room = _balanced(count, room, at_most, row)
    y, _, c = assigned(x, count, room, scale, start, F, at_most, row)
    return (y, -c.detach()) if return_bias else y


def _balanced(k: Tensor, capacity: Tensor, at_most: bool, row: rows.Row) -> Tensor:
    """The capacities with the sum that they need, where they miss it by their rounding; or as given."""
    half = [torch.finfo(x.dtype).eps for x in (k, capacity) if x.dtype in (torch.float16, torch.bfloat16)]
    readable = arguments.readable(k) and arguments.readable(capacity)
    if not (half or readable):
        return capacity
    (need,) = row.total([widen(k.detach()).sum(-1)])
    room = widen(capacity.detach()).sum(-1)
    short, slack = need - room, max([1e-6, *half]) * need.clamp(min=1)
    far = short.abs() > slack
    bad = far & (short > 0) if at_most else far
    if readable and bool(bad.any()):
        relation = "at least" if at_most else "the same as"
        raise ValueError(
            f"capacity must have a sum that is {relation} that of k, {arguments.plain(need[bad][0].item())}, "
            f"but got {arguments.plain(room[bad][0].item())}"
        )
    if not half:  # the solver takes up what is left
        return capacity
    off = ~far & ((short > 0) if at_most else (short != 0))
    ratio = torch.where(off, need / room.masked_fill(room == 0, 1), 1)
    return widen(capacity) * ratio.unsqueeze(-1)
