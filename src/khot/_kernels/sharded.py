"""Kernels for rows that are spread over processes: every process holds a shard of each, and they exchange
sums. The reference kernels with another `Reduce`; the hard mask by a selection of its own.

One pass over the rows is one all-reduce of a few numbers a row. All processes then take the same step from
the same sums, so that they make the same decisions: what `reduce` returns is all that these may rest on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import selection
from khot._kernels.reference import soft_topk as reference
from khot._kernels.reference.solver import Threshold

__all__ = ["Shards"]

# Numbers that cost as much to carry as an all-reduce does to start: 0.5 MB, which a link of 10 GB/s carries
# twice in 100 µs, and over 1,000 processes latencies add up to about that.
BLOCK = 1 << 16


class Shards:
    """The processes that a row is spread over, and the `Reduce` over them.

    Args:
        group: the name of their process group; or of several, separated by commas, which are the dimensions
            of a grid of processes.
    """

    def __init__(self, group: str) -> None:
        self.groups: list[dist.ProcessGroup] = [
            c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]
            for name in group.split(",")
        ]
        self.rank: int = 0
        self.world: int = 1
        for each in self.groups:
            self.rank = self.rank * each.size() + each.rank()
            self.world *= each.size()

    def __call__(self, sums: Sequence[Tensor], maxima: Sequence[Tensor] = ()) -> list[Tensor]:
        """One all-reduce. In the sum, each process writes its maxima to slots of their own, where all others
        add 0; where rows and processes are so many that a second all-reduce costs less, there is one."""
        lengths = [v.numel() for v in (*sums, *maxima)]
        totals = _flat(sums)
        tops = _flat(maxima).to(totals.device)
        if self.world * tops.numel() <= BLOCK:
            slots = totals.new_zeros(self.world, tops.numel())
            slots[self.rank] = tops
            block = torch.cat((totals, slots.flatten()))
            self._all_reduce(block, dist.ReduceOp.SUM)
            totals, slots = block.split([totals.numel(), slots.numel()])
            tops = slots.view(self.world, -1).amax(0)
        else:
            self._all_reduce(totals, dist.ReduceOp.SUM)
            self._all_reduce(tops, dist.ReduceOp.MAX)
        parts = torch.cat((totals, tops)).split(lengths)
        return [part.view(v.shape) for part, v in zip(parts, (*sums, *maxima), strict=True)]

    def _all_reduce(self, block: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        for group in self.groups if block.numel() else ():
            dist.all_reduce(block, op, group=group)

    def one_a_process(self, value: Tensor) -> Tensor:
        """(*batch) → (*batch, processes), to be summed."""
        slots = value.new_zeros(*value.shape, self.world)
        slots[..., self.rank] = value
        return slots


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([v.double().flatten() for v in values]) if values else torch.zeros(0).double()


# --------------------------------------------------------------------------------- soft top-k


@torch.library.custom_op("khot::sharded_soft_topk", mutates_args=())
def soft_topk(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As ``khot::soft_topk``, and the entries next to t, which backward needs to know at once."""
    out, t = reference.forward(x, k, tau, cdfs.resolve(cdf, shape), output, Shards(group))
    return out, *t


@soft_topk.register_fake
def _(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch = x.shape[:-1]
    out = x.new_empty((*batch, 0) if output == "threshold" else x.shape)
    return out, *(x.new_empty(batch, dtype=torch.float64) for _ in range(4))  # type: ignore[return-value]


@torch.library.custom_op("khot::sharded_soft_topk_backward", mutates_args=())
def soft_topk_backward(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    hi: Tensor,
    lo: Tensor,
    above: Tensor,
    below: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    output: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    t = Threshold(hi, lo, above, below)
    return reference.backward(grad, grad_lo, x, t, tau, cdfs.resolve(cdf, shape), output, Shards(group))


@soft_topk_backward.register_fake
def _(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    hi: Tensor,
    lo: Tensor,
    above: Tensor,
    below: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    output: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), hi.new_empty(hi.shape), hi.new_empty(hi.shape)


# ---------------------------------------------------------------------------------- selection


class _Place(NamedTuple):
    """The k-th largest entry of each row, and what else the selection of it counted."""

    key: Tensor
    left: Tensor  # how many of the entries equal to it are among the k
    equal: Tensor  # how many there are
    nan: Tensor
    selectable: Tensor  # how many entries are not −inf
    pinned: Tensor  # how many are +inf


def _keys(x: Tensor) -> Tensor:
    """Integers, as wide as x's numbers, in the order of these; 0 and −0 are equal."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return _flip((x + 0.0).contiguous().view(integer))


def _flip(bits: Tensor) -> Tensor:
    """Negative floating-point numbers are in falling order of their bits. Its own inverse."""
    return bits ^ ((bits >> (8 * bits.element_size() - 1)) & torch.iinfo(bits.dtype).max)


def _place(x: Tensor, keys: Tensor, k: Tensor, reduce: Shards) -> _Place:
    """Digit by digit from the highest: each round counts the entries that share the digits known so far.

    The digits of one row have 16 bits, and so make 2 rounds for float32; those of many have fewer.

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
        counts = x.new_zeros(*k.shape, bins + 1, dtype=torch.int32)  # the last is for all others
        one = counts.new_ones(())
        size = max(1, (1 << 20) // max(1, k.numel()))
        for part in keys.split(size, -1):
            index = (part.long() >> shift) - base.unsqueeze(-1)
            index = torch.where((index >= 0) & (index < bins), index, bins)
            counts.scatter_add_(-1, index, one.expand(index.shape))
        counts_all, *new = reduce([counts[..., :-1], *([] if facts else extra)])
        facts = facts or new
        above = torch.nn.functional.pad(counts_all.flip(-1).cumsum(-1).flip(-1), (0, 1))
        at = ((above[..., :-1] >= left.unsqueeze(-1)).sum(-1, keepdim=True) - 1).clamp(min=0)
        left = left - above.gather(-1, at + 1).squeeze(-1)
        equal = counts_all.gather(-1, at).squeeze(-1)
        prefix = base + at.squeeze(-1)
    nan, selectable, pinned = facts
    return _Place(prefix, left, equal, nan > 0, selectable, pinned)


@torch.library.custom_op("khot::sharded_topk_mask", mutates_args=())
def topk_mask(x: Tensor, k: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """As ``khot::topk_mask``, ties going to the lowest rank first, and within it to the lowest index; and
    NaN for rows without an answer, which an empty shard could not tell."""
    reduce = Shards(group)
    k = k.double().expand(x.shape[:-1])
    count = torch.floor(k + 0.5)
    keys = _keys(x)
    place = _place(x, keys, count.nan_to_num(0.0).clamp(0), reduce)
    bad = place.nan | ~((k >= 0) & (k <= place.selectable)) | (place.pinned > count)
    key = place.key.unsqueeze(-1)
    above, level = keys > key, keys == key
    split = (place.left < place.equal) & ~bad
    if bool(split.any()):
        here = level.sum(-1)
        (there,) = reduce([reduce.one_a_process(here)])
        room = place.left - there[..., : reduce.rank].sum(-1)
        level = level & (level.cumsum(-1) <= room.unsqueeze(-1))
    chosen = (above | level) & (count > 0).unsqueeze(-1)
    y = chosen.to(x.dtype).masked_fill_(bad.unsqueeze(-1), math.nan)
    return y, count.masked_fill(bad, math.nan)


@topk_mask.register_fake
def _(x: Tensor, k: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float64)


# ---------------------------------------------------------------------------------- magnitude


def _around(s: Tensor, k: Tensor, reduce: Shards) -> selection.Places:
    keys = _keys(s)
    place = _place(s, keys, k.nan_to_num(1.0).clamp(1), reduce)
    least_in = _flip(place.key.to(keys.dtype)).view(s.dtype).double()
    next_out = s.double().masked_fill(keys >= place.key.unsqueeze(-1), -math.inf)
    next_out = next_out.amax(-1) if s.shape[-1] else torch.full_like(least_in, -math.inf)
    (next_out,) = reduce([], [next_out])
    most_out = torch.where(place.left < place.equal, least_in, next_out)
    return selection.Places(place.nan, place.selectable, place.pinned, least_in, most_out)


@torch.library.custom_op("khot::sharded_soft_topk_magnitude", mutates_args=())
def soft_topk_magnitude(
    s: Tensor, k: Tensor, tau: Tensor, p: float, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``khot::soft_topk_magnitude``."""
    reduce = Shards(group)
    k = k.double().expand(s.shape[:-1])
    return selection.magnitude(s, k, tau, p, _around(s, k, reduce), reduce)


@soft_topk_magnitude.register_fake
def _(s: Tensor, k: Tensor, tau: Tensor, p: float, group: str) -> tuple[Tensor, Tensor, Tensor]:
    hi = s.new_empty(s.shape[:-1], dtype=torch.float64)
    return s.new_empty(s.shape), hi, torch.empty_like(hi)


@torch.library.custom_op("khot::sharded_soft_topk_magnitude_backward", mutates_args=())
def soft_topk_magnitude_backward(
    grad: Tensor,
    grad_lo: Tensor,
    s: Tensor,
    y: Tensor,
    k: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    p: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    return selection.magnitude_backward(grad, grad_lo, s, y, k, hi, lo, tau, p, Shards(group))


@soft_topk_magnitude_backward.register_fake
def _(
    grad: Tensor,
    grad_lo: Tensor,
    s: Tensor,
    y: Tensor,
    k: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    p: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape), hi.new_empty(hi.shape)
