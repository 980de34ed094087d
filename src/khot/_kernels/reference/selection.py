"""The k-th largest entry of each row, which the hard mask and the top-k in magnitude need."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.rows import BLOCK, Shards

__all__ = ["Place", "from_keys", "keys_of", "kth_largest", "place"]


def kth_largest(x: Tensor, k: Tensor) -> Tensor:
    """The k-th largest entry of each row; k is (*batch, 1) and is clamped to [1, n]."""
    n = x.shape[-1]
    if n == 0 or k.numel() == 0:
        return x.new_empty(*x.shape[:-1], 1)
    k = k.clamp(1, n)
    if not k.is_cuda and int(k.min()) == int(k.max()):
        return x.kthvalue(n + 1 - int(k.min()), dim=-1, keepdim=True).values
    return x.sort(dim=-1, descending=True).values.gather(-1, k - 1)


class Place(NamedTuple):
    """The k-th largest entry of each row, and what else was counted while selecting it."""

    key: Tensor
    left: Tensor  # how many of the entries equal to the k-th largest are among the k
    equal: Tensor  # how many entries are equal to it
    nan: Tensor
    selectable: Tensor  # how many entries are not −inf
    pinned: Tensor  # how many are +inf


def keys_of(x: Tensor) -> Tensor:
    """Integers as wide as x's numbers and in the same order; 0 and −0 have the same one."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return _flip((x + 0.0).contiguous().view(integer))


def from_keys(keys: Tensor, x: Tensor) -> Tensor:
    """The numbers of x's dtype that have these keys."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return _flip(keys.to(integer)).view(x.dtype)


def _flip(bits: Tensor) -> Tensor:
    """The bits of negative floating-point numbers are in reverse order. This function is its own inverse."""
    return bits ^ ((bits >> (8 * bits.element_size() - 1)) & torch.iinfo(bits.dtype).max)


def place(x: Tensor, keys: Tensor, k: Tensor, row: Shards) -> Place:
    """The place of the k-th largest entry of spread rows, digit by digit of its key, from the highest.

    Each round counts the entries that share the digits known so far. The digits of one row have 16 bits,
    which makes 2 rounds for float32; those of many rows have fewer.

    Args:
        x, keys: (*batch, n), this process's shard.
        k: (*batch), of any dtype, in [1, n].
    """
    shift = 8 * keys.element_size()
    extra = [x.isnan().sum(-1), (x != -math.inf).sum(-1), (x == math.inf).sum(-1)]
    facts: list[Tensor] = []
    left, equal = k.double(), torch.zeros_like(k, dtype=torch.float64)
    prefix = torch.full_like(k, -1, dtype=torch.int64)
    most = max(8, min(16, (BLOCK // max(1, k.numel())).bit_length() - 1))
    while shift:
        digit = min(most, shift)
        shift -= digit
        bins = 1 << digit
        # the highest digit has a sign
        base = prefix << digit if facts else torch.full_like(prefix, -bins // 2)
        counts = x.new_zeros(*k.shape, bins + 1, dtype=torch.int32)  # the last bin counts all other entries
        one = counts.new_ones(())
        size = max(1, (1 << 20) // max(1, k.numel()))
        for part in keys.split(size, -1):
            index = (part.long() >> shift) - base.unsqueeze(-1)
            index = torch.where((index >= 0) & (index < bins), index, bins)
            counts.scatter_add_(-1, index, one.expand(index.shape))
        counts_all, *new = row.reduce([counts[..., :-1], *([] if facts else extra)])
        facts = facts or new
        above = torch.nn.functional.pad(counts_all.flip(-1).cumsum(-1).flip(-1), (0, 1))
        at = ((above[..., :-1] >= left.unsqueeze(-1)).sum(-1, keepdim=True) - 1).clamp(min=0)
        left = left - above.gather(-1, at + 1).squeeze(-1)
        equal = counts_all.gather(-1, at).squeeze(-1)
        prefix = base + at.squeeze(-1)
    nan, selectable, pinned = facts
    return Place(prefix, left, equal, nan > 0, selectable, pinned)
