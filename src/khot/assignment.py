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
from khot._ops.bounded_assign import Bounds, bounded_assign
from khot._ops.soft_assign import SLACK, filled
from khot._ops.soft_assign import soft_assign as assigned
from khot.cdfs import CDF, CDFName

__all__ = ["soft_assign"]

HALF = (torch.float16, torch.bfloat16)
Sum = Scalar | tuple[Scalar, Scalar]  # given, or within bounds: (least, most)


@overload
def soft_assign(
    input: Tensor,
    k: Sum,
    capacity: Sum | None = None,
    *,
    total: Scalar | None = None,
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
    k: Sum,
    capacity: Sum | None = None,
    *,
    total: Scalar | None = None,
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
    k: Sum,
    capacity: Sum | None = None,
    *,
    total: Scalar | None = None,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "logistic",
    at_most: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    return_bias: bool = False,
    group: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A differentiable selection whose rows and columns both have given sums, or sums within bounds.

    Each of m rows (tokens, say) selects k of E columns (experts), and each column is selected by as many rows
    as its capacity. The result is

        y_ij = F((x_ij − r_i − c_j)/τ),    Σ_j y_ij = k,    Σ_i y_ij = capacity_j

    with one number per row and one per column, which are determined by the sums up to a constant. It
    maximises Σ x y less τ times a convex penalty among all matrices with these sums and entries in [0, 1].
    As τ → 0 it solves the linear programme of transport with upper bounds.

    A pair (least, most) in the place of k or capacity is a sum within bounds, and ``total`` is the sum of all
    entries. Then

        y_ij = F((x_ij − r_i − c_j + μ)/τ)

    where r_i = 0 if the sum of the row lies between its bounds, r_i > 0 if it is at its most, and r_i < 0 if
    it is at its least; c_j is the same for the column, and μ is one number for all entries, which is 0
    without a total. It maximises the same among all matrices within these bounds. ``k=(0, 4), total=100``
    selects 100 entries of a matrix, and no more than 4 of a row.

    Args:
        input: scores x, (*batch, m, E), of any floating-point dtype. −inf is never selected, +inf always. A
            row of nothing but −inf takes no part: its sum is 0.
        k: the sum of each row, in [0, number of its entries that may be selected]; a number or a tensor that
            broadcasts with (*batch, m). Or a pair (least, most) of these, a tuple; the most may exceed the
            number of entries, and inf is no bound.
        capacity: the sum of each column, in [0, number of rows that may select it]; a number or a tensor that
            broadcasts with (*batch, E); or a pair, as for k. By default the sum of the rows over E, or no
            bounds if k is a pair. The sum of numbers must be that of the rows; a difference of up to a
            relative 1e-6, or of the resolution of k and capacity in half precision, counts as rounding, and
            is spread over the columns that are neither empty nor full. Bounds that exceed the number of
            entries, or a least that exceeds its most, by no more than that count as equal to it.
        total: the sum of all entries, which the bounds of rows and columns have to allow; a number or a
            tensor that broadcasts with the batch shape. By default it follows from the scores.
        tau: temperature > 0, in the units of the input; a number or a tensor that broadcasts with the batch
            shape.
        cdf: F, as for :func:`khot.soft_topk`. With compact support (``"uniform"``, ``Power(p)``) most entries
            are exactly 0 or 1.
        at_most: a column may have less than its capacity, which is then a number: the same as the pair
            (0, capacity). Then c ≥ 0, and c_j = 0 unless the column is full.
        mask: bool, broadcastable to the input; True where an entry may be selected. Entries under False are
            ignored, even NaN and inf.
        bias: a guess of μ − c that broadcasts with (*batch, E), such as that of the step before; it saves
            time and does not change the result.
        return_bias: return μ − c, too.
        group: a ``torch.distributed`` process group over which the rows are spread. Each process passes its
            rows, of any number, with the k and the mask of these, and the same capacity, total, tau and bias.
            The gradients of what is the same are those of the sum of the processes' losses.

    Returns:
        A tensor of the input's shape and dtype, in [0, 1]. With ``return_bias`` also the bias μ − c,
        (*batch, E), in float64: each row of y is the soft top-k of that row of the input plus the bias; or,
        if its sum lies between its bounds, F((x + bias)/τ). If all sums are given, the mean of the bias is 0,
        or with ``at_most`` it is ≤ 0. It is ∓inf for columns that are empty or full. A matrix with a NaN is
        NaN.

    The gradient in input, k, capacity, total and tau is exact (by implicit differentiation; nothing is
    unrolled), in both modes and to second order. That of the capacity has mean 0 if its sum is given. The
    gradient in a bound is 0 where the sum is not at it, and also, for the bound of a row, where no entry of
    the row lies between 0 and 1. A total that leaves all rows, or all columns, their least or their most can
    only move together with these: then the bounds have the gradient.

    Pairs, totals and compact support are solved in PyTorch operations on any device, one matrix after the
    other, and a GPU waits for them.

    Raises:
        ValueError: fewer than two dims; k not in [0, number of entries that may be selected]; a capacity that
            is out of range or has another sum, or that no matrix meets under the mask; a least that is above
            its most, or above the number of entries that may be selected; bounds of rows and columns, or a
            total, that no matrix meets; ``at_most`` with a pair as capacity; tau ≤ 0; an argument that does
            not broadcast. (The values of tensors are checked on the CPU in eager mode; elsewhere a matrix
            with a bad value is NaN.)
        RuntimeError: the search for the thresholds did not converge, although the bounds do not contradict
            one another, as far as one can tell. (As above, on the CPU in eager mode.)
        TypeError: input that is not a floating-point tensor, mask that is not bool.

    Example:
        >>> scores = torch.tensor([[2.0, 1.0], [3.0, 0.0], [1.0, 0.5], [2.0, 2.0]])
        >>> y = khot.soft_assign(scores, 1, tau=0.1)
        >>> y.sum(0)
        tensor([2., 2.])
        >>> y.argmax(-1)
        tensor([0, 0, 1, 1])

        Five entries in all, at least one in each row, and at most three in a column:

        >>> khot.soft_assign(scores, (1, 2), (0, 3), total=5, tau=0.02).round(decimals=2)
        tensor([[1., 0.],
                [1., 0.],
                [0., 1.],
                [1., 1.]])
    """
    if arguments.is_dtensor(input):
        raise TypeError(
            "input must be a plain tensor, but got a DTensor: pass its local tensor and its group"
        )
    row = rows.named(group)

    def prepare() -> tuple[Any, ...]:
        arguments.check_flags(at_most=at_most, return_bias=return_bias)
        arguments.check_input(input)
        if input.dim() < 2:
            raise ValueError(
                f"input must have at least 2 dims, (*batch, m, E), but got shape {tuple(input.shape)}"
            )
        if at_most and isinstance(capacity, tuple):
            raise ValueError("at_most must be False if capacity is a pair (least, most), but got True")
        F = cdfs.resolve(cdf)
        x = arguments.rows(input, -1, mask)
        *batch, m, width = x.shape
        count = [bound.expand(*batch, m) for bound in _fitting(_bounds(k, "k", x, width), k, x)]
        if width:
            count = [torch.where(x.amax(-1) == -math.inf, 0, bound) for bound in count]
        room = None
        if capacity is not None:
            most = math.inf if at_most or not row.here else m
            room = [bound.expand(*batch, width) for bound in _bounds(capacity, "capacity", x.mT, most)]
        matrices = x[..., :1].flatten(-2)  # a row for each matrix, even where E = 0
        scale = arguments.per_row(tau, "tau", matrices, low=0, low_open=True).expand(batch).unsqueeze(-1)
        whole = None
        if total is not None:
            whole = arguments.per_row(total, "total", matrices, low=0).expand(batch).unsqueeze(-1)
        if bias is None:
            start = x.new_zeros(*batch, width, dtype=wide_dtype(x.device))
        else:
            arguments.check_input(bias, "bias")
            start = -arguments.per_row(bias, "bias", x.mT, low=-math.inf).detach().expand(*batch, width)
        # for a group, the columns come first: they have to agree, and the rows are what is spread
        return x.mT, x, count, room, whole, scale, start, F

    _, x, count, room, whole, scale, start, F = row.agree(
        prepare,
        within=isinstance(k, tuple),
        capacity=capacity,
        total=total,
        tau=tau,
        cdf=cdf,
        at_most=at_most,
        bias=bias,
    )
    slack = _slack(*_values(k), *_values(capacity), total)
    if room is not None:
        room = _fitting(room, capacity, x.mT, row)
    sides: list[Tensor]
    if room is None and len(count) == 1:
        (sums,) = row.total([widen(count[0]).sum(-1, keepdim=True)])
        sides = [(sums / max(x.shape[-1], 1)).expand(*x.shape[:-2], x.shape[-1])]
    elif room is None:
        sides = [torch.zeros_like(start), torch.full_like(start, math.inf)]
    elif len(count) == len(room) == 1 and whole is None:
        sides = [_balanced(count[0], room[0], x, at_most, slack, row)]
    else:
        sides = room
    numbers = len(count) == len(sides) == 1
    if numbers and whole is None and F.full_support:
        y, _, c = assigned(x, count[0], sides[0], scale, start, F, at_most, row)
        return (y, -c.detach()) if return_bias else y
    if at_most and len(sides) == 1:
        sides = [torch.zeros_like(sides[0]), *sides]
    bounds = Bounds(count[0], count[-1], sides[0], sides[-1], whole, numbers and not at_most, slack)
    y, c, t = bounded_assign(x, bounds, scale, start, F, row)
    return (y, -(c + t).detach()) if return_bias else y


def _bounds(value: Any, name: str, x: Tensor, high: float) -> list[Tensor]:
    """One number for each row of x, up to ``high`` but for its rounding, or two."""
    if isinstance(value, list):
        raise TypeError(f"{name} must be a number, a tensor or a tuple (least, most), but got {value}")
    if not isinstance(value, tuple):
        if not isinstance(value, Tensor):
            rounded = isinstance(value, float) and high < value <= high * (1 + SLACK)
            return [arguments.per_row(high if rounded else value, name, x, low=0, high=high)]
        bound = arguments.per_row(value, name, x, low=0)
        if arguments.readable(bound) and bool((bound > high * (1 + _slack(bound))).any()):
            arguments.check_values(bound, name, low=0, high=high)
        return [bound]
    if len(value) != 2:
        raise ValueError(
            f"{name} must be a number, a tensor or a pair (least, most), but got {len(value)} values"
        )
    least, most = (arguments.per_row(bound, name, x, low=0) for bound in value)
    slack = 1 + _slack(least, most)
    if arguments.readable(least) and arguments.readable(most):
        bad = torch.broadcast_tensors(least, most)
        wrong = bad[0] > bad[1] * slack
        if bool(wrong.any()):
            low, high = (arguments.plain(bound.detach()[wrong][0].item()) for bound in bad)
            raise ValueError(
                f"{name} must be a pair (least, most) with least <= most, but got ({low}, {high})"
            )
    return [torch.where((least > most) & (least <= most * slack), most, least), most]


def _fitting(bounds: list[Tensor], value: Any, x: Tensor, row: rows.Row = rows.HERE) -> list[Tensor]:
    """These bounds of rows x. What misses by its rounding the number of entries that may be selected, or that
    of +inf, meets it."""
    if not any(_rounded(each) for each in _values(value)):
        return bounds  # nothing has to be counted
    fewest, entries = _ends(x, row)
    slack = _slack(*_values(value))

    def fit(bound: Tensor) -> Tensor:
        bound = torch.where((bound > entries) & (bound <= entries * (1 + slack)), entries, bound)
        return torch.where((bound < fewest) & (bound >= fewest * (1 - slack)), fewest, bound)

    return [fit(widen(bound)) for bound in bounds]


def _ends(x: Tensor, row: rows.Row) -> tuple[Tensor, Tensor]:
    """How many entries of rows x are +inf, and how many may be selected, in all processes."""
    counts = torch.stack([(x == math.inf).sum(-1), (x != -math.inf).sum(-1)])
    fewest, entries = row.count(widen(counts))
    return fewest, entries


def _rounded(value: Any) -> bool:
    """Whether bounds may miss a whole number by their rounding. Where values cannot be read, they may."""
    if not isinstance(value, Tensor):
        return math.isfinite(value) and 0 < abs(value - round(value)) <= SLACK * value
    if not arguments.readable(value):
        return value.is_floating_point()
    wide = widen(value.detach())
    off = (wide - wide.round()).abs()
    return bool(((off > 0) & (off <= _slack(value) * wide)).any())


def _values(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _slack(*bounds: Any) -> float:
    """By how much sums of these may miss one another by their rounding, relative."""
    half = [torch.finfo(b.dtype).eps for b in bounds if isinstance(b, Tensor) and b.dtype in HALF]
    return max([SLACK, *half])


def _balanced(k: Tensor, capacity: Tensor, x: Tensor, at_most: bool, slack: float, row: rows.Row) -> Tensor:
    """The capacities with the sum that they need, where they miss it by their rounding; or as given."""
    half = slack > SLACK
    readable = arguments.readable(k) and arguments.readable(capacity)
    if not (half or readable):
        return capacity
    (need,) = row.total([widen(k.detach()).sum(-1)])
    room = widen(capacity.detach()).sum(-1)
    short = need - room
    far = short.abs() > slack * need.clamp(min=1)
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
    fewest, entries = _ends(x.mT, row)
    return filled(widen(capacity), fewest, entries, torch.where(off, short, 0).unsqueeze(-1))
