"""The k largest entries of each row, or of each row of a product, with their indices."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from khot._core import arguments, eager
from khot._core.precision import autocast_dtype
from khot._core.torch_internals import save_in_exports
from khot._core.ways import by_rows
from khot._ops.selected import best_of_product, selected_dot
from khot._ops.topk import largest_entries

__all__ = ["linear_topk", "topk"]


class TopK(NamedTuple):
    """What :func:`khot.topk` and :func:`khot.linear_topk` return: the entries, and where they were.

    Attributes:
        values: the entries that were selected, of the input's dtype.
        indices: their indices along ``dim``, in int64.

    Both have the input's shape with k in the place of n.
    """

    values: Tensor
    indices: Tensor


save_in_exports(TopK, "khot.TopK")


@by_rows(1, entries=False)
def topk(
    input: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> TopK:
    """The k largest entries of each row and their indices: ``torch.topk``, with ties at the lowest index.

    Of equal entries those of lowest index are selected, and with ``sorted`` they come in the order of their
    indices, on every device: the result is the first k of a stable sort. ``torch.topk`` leaves open which of
    equal entries it returns.

    Args:
        input: of any floating-point dtype. −inf and +inf are ordinary entries, 0 and −0 are equal, and NaN
            counts as larger than every number, as for ``torch.topk``.
        k: how many to select, an integer in [0, n].
        dim: the dimension to select along.
        largest: select the largest entries; if False, the smallest.
        sorted: return them in order, the largest (or smallest) first; if False, in any order, which saves
            time where k is large.
        mask: bool, broadcastable to input; False excludes an entry. Then entries of −inf (with ``largest``;
            otherwise of +inf) are excluded, too.
        offsets: of packed rows, as for :func:`khot.soft_topk`. Indices count from the first entry of a row.

    Returns:
        A named tuple (values, indices), each of the input's shape with k in the place of n: the entries, of
        the input's dtype, and where they were along ``dim``, in int64.

    The gradient goes to the selected entries, in both modes and to any order. The indices have none.

    A DTensor must have whole rows on every process.

    Raises:
        ValueError: k is not in [0, n]; of a 0-dim input, k is not 1; a row with fewer than k entries under
            the mask (checked on the CPU in eager mode; elsewhere the values that it lacks are −inf, or +inf);
            a DTensor that is sharded along dim.
        TypeError: input that is not a floating-point tensor, k that is not an int, a flag that is not a bool.
        IndexError: dim out of range.

    Example:
        >>> values, indices = khot.topk(torch.tensor([1.0, 3.0, 2.0, 3.0]), 3)
        >>> values, indices
        (tensor([3., 3., 2.]), tensor([1, 3, 2]))
    """
    if mask is None and not is_dynamo_compiling():
        plain = eager.topk(input, k, dim, largest, sorted)
        if plain is not None:
            return TopK(*plain)
    arguments.check_flags(largest=largest, sorted=sorted)
    fill = -math.inf if largest else math.inf
    x = arguments.rows(input, dim, mask, fill=fill)
    arguments.check_integer(k, "k", low=0 if input.dim() else 1, high=x.shape[-1])
    count = k if isinstance(k, torch.SymInt) else int(k)
    if mask is not None:
        arguments.check_enough(x != fill, "k", count)
    values, indices = largest_entries(x, count, largest, sorted)
    return TopK(arguments.unrows(values, input, dim), arguments.unrows(indices, input, dim))


@by_rows(1, of_all=frozenset({"weight", "bias"}))
def linear_topk(input: Tensor, weight: Tensor, k: int, bias: Tensor | None = None) -> TopK:
    """The k largest entries of each row of a linear map, and their indices, without the map in memory.

    It is ``khot.topk(F.linear(input, weight, bias), k)``, of which a part of the rows is computed at a time
    and forgotten. Neither the n entries of a row nor their gradients are kept: those of input, weight and
    bias are sums over the k entries that were selected.

    Args:
        input: (..., d), of any floating-point dtype.
        weight: (n, d), of input's dtype.
        k: how many to select, an integer in [0, n].
        bias: None, or (n,), of input's dtype. Entries with a bias of −inf come after all others, as under a
            mask.

    Returns:
        A named tuple (values, indices), both (..., k), the largest first: the entries, of the dtype of
        ``F.linear``, and their indices in [0, n), in int64.

    The entries are compared in float32, or in float64 if they are in float64. Half precision is rounded
    afterwards, so that entries which it makes equal are selected by what they were before. Of entries that
    are equal in float32, those of lowest index are selected. Under autocast the arguments are cast as
    ``F.linear`` casts them.

    The gradient goes to the selected entries, in both modes and to any order. The indices have none. For a
    DTensor of rows (..., d) that are whole on every process, each process selects for its own rows; weight
    and bias are then DTensors, or the same on every process.

    Raises:
        ValueError: k is not in [0, n]; shapes that do not fit; arguments on different devices; a DTensor that
            is sharded along d.
        TypeError: a tensor that is not dense or not of a floating-point dtype, different dtypes, k that is
            not an int.

    Example:
        >>> input, weight = torch.eye(2), torch.tensor([[1.0, 5.0], [3.0, 4.0], [2.0, 6.0]])
        >>> values, indices = khot.linear_topk(input, weight, 2)
        >>> values, indices
        (tensor([[3., 2.],
                [6., 5.]]), tensor([[1, 2],
                [2, 0]]))
    """
    arguments.check_input(input)
    arguments.check_input(weight, "weight")
    if not input.dim():
        raise ValueError("input must have the shape (..., d), but got a 0-dim tensor")
    d = input.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != d:
        raise ValueError(
            f"weight must have the shape (n, {d}), {d} being the last size of input, but got "
            f"{tuple(weight.shape)}"
        )
    if bias is not None:
        arguments.check_input(bias, "bias")
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias must have the shape {tuple(weight.shape[:1])}, one entry for each row of weight, but "
                f"got {tuple(bias.shape)}"
            )
    input, weight = _as_linear(input), _as_linear(weight)
    bias = None if bias is None else _as_linear(bias)
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None:
            if x.dtype != input.dtype:
                raise TypeError(f"{name} must have input's dtype {input.dtype}, but got {x.dtype}")
            if x.device != input.device:
                raise ValueError(f"{name} must be on input's device {input.device}, but got {x.device}")
    arguments.check_integer(k, "k", low=0, high=weight.shape[0])
    count = k if isinstance(k, torch.SymInt) else int(k)
    scores, indices = best_of_product(input, weight, count, bias)
    values = selected_dot(input, weight, indices, bias, known=scores)
    return TopK(values.to(input.dtype), indices)


def _as_linear(x: Tensor) -> Tensor:
    """x in the dtype that ``F.linear`` has under autocast."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)
