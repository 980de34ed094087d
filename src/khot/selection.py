"""The k largest entries of each row, with their indices."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from khot._core import arguments, eager
from khot._core.rows import by_rows
from khot._core.torch_internals import save_in_exports
from khot._ops.topk import largest_entries

__all__ = ["topk"]


class TopK(NamedTuple):
    """What :func:`khot.topk` returns: the entries, and where they were.

    Attributes:
        values: the entries that were selected, of the input's dtype.
        indices: their indices along ``dim``, in int64.

    Both have the input's shape with k in the place of n.
    """

    values: Tensor
    indices: Tensor


save_in_exports(TopK, "khot.TopK")


@by_rows(1)
def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> TopK:
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

    Returns:
        A named tuple (values, indices), each of the input's shape with k in the place of n: the entries, of
        the input's dtype, and where they were along ``dim``, in int64.

    The gradient goes to the selected entries, in both modes and to any order. The indices have none.

    A DTensor must have whole rows on every process.

    Raises:
        ValueError: k is not in [0, n]; of a 0-dim input, k is not 1; a DTensor that is sharded along dim.
        TypeError: input that is not a floating-point tensor, k that is not an int, a flag that is not a bool.
        IndexError: dim out of range.

    Example:
        >>> values, indices = khot.topk(torch.tensor([1.0, 3.0, 2.0, 3.0]), 3)
        >>> values, indices
        (tensor([3., 3., 2.]), tensor([1, 3, 2]))
    """
    if not torch.compiler.is_compiling():
        plain = eager.topk(input, k, dim, largest, sorted)
        if plain is not None:
            return TopK(*plain)
    arguments.check_flags(largest=largest, sorted=sorted)
    x = arguments.rows(input, dim)
    arguments.check_integer(k, "k", low=0 if input.dim() else 1, high=x.shape[-1])
    count = k if isinstance(k, torch.SymInt) else int(k)
    values, indices = largest_entries(x, count, largest, sorted)
    return TopK(arguments.unrows(values, input, dim), arguments.unrows(indices, input, dim))
