"""Rows that are whole on this process, or spread over processes: one interface for the operators.

An operator needs only a few sums over each row. If a row is spread, each process of a group calls the
operator with its *shard* of the row and gets its shard of the result. One all-reduce turns sums over the
shards into sums over the row, and nothing else changes. k and τ, which the shards have in common, are
*replicated*: every process passes the same numbers and gets the same gradient, that of the whole loss, which
is the sum of the processes' losses. So they stay equal when every process takes the same step, and nothing
has to be summed afterwards. A loss that is computed from such a gradient (for a second derivative) is
replicated as well, and counts once and not once per process.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from khot._core import arguments
from khot._core.torch_internals import collective_device, process_group
from khot.cdfs import CDF

__all__ = [
    "BLOCK",
    "HERE",
    "Row",
    "Shards",
    "batch",
    "batch_with",
    "named",
    "of",
]

#: So many numbers take as long to transfer as an all-reduce takes to start. They are 0.5 MB, which a link of
#: 10 GB/s transfers twice in 100 µs; over 1,000 processes the latencies add up to about that.
BLOCK = 1 << 16

Prepared = TypeVar("Prepared", bound=tuple[Any, ...])


class Row:
    """Rows that are whole on this process.

    Attributes:
        name: the names of the process groups that the rows are spread over; "" for whole rows.
        here: whether the rows are whole on this process.
        rank, world: the index of this shard, and the number of shards.
        lengths: the lengths of all shards, once :meth:`agree` has exchanged them.
    """

    name = ""
    here = True
    rank = 0
    world = 1
    lengths: Sequence[float] = ()

    def reduce(self, sums: Sequence[Tensor], maxima: Sequence[Tensor] = ()) -> list[Tensor]:
        """The row's sums and maxima from those over this shard, in that order. Not differentiable."""
        return [*sums, *maxima]

    def total(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """The row's sums from those over this shard, differentiable: the results are replicated."""
        return list(sums)

    def share(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Replicated numbers, for use by this shard: their gradient is summed over all shards."""
        return list(values)

    def largest(self, values: Tensor) -> Tensor:
        """The row's largest value from the shard's, differentiable."""
        return values

    def count(self, values: Tensor) -> Tensor:
        """The row's number of entries of some kind, from the shard's."""
        return values

    def same(self, values: Tensor) -> Tensor:
        """Replicated numbers, with the same bits on every process; their derivative is that of the values.

        Linear algebra may round differently from one process to the next. Decisions that depend on its
        results would differ, and so would the numbers of all-reduces.
        """
        return values

    def limit(self, x: Tensor) -> float:
        """The largest number of entries that can be selected from rows x, as far as this process knows it."""
        return x.shape[-1]

    def check(self, k: Any, x: Tensor, integer: bool = False) -> None:
        """Raise if k exceeds the length of the whole row, which :meth:`limit` did not know before
        :meth:`agree`."""

    def agree(self, prepare: Callable[[], Prepared], **said: Any) -> Prepared:
        """The result of ``prepare``, which checks the arguments; for shards, they are also compared with one
        another.

        Args:
            prepare: checks the arguments and brings them into the kernels' form, the scores first.
            said: the arguments that must be the same on every process, by name.
        """
        return prepare()


HERE = Row()


class Shards(Row):
    """Rows that are spread over the processes of a group.

    Args:
        name: the name of the group; or the names of several groups, separated by commas, which are the
            dimensions of a grid of processes.
    """

    here = False

    def __init__(self, name: str) -> None:
        self.name = name

    @functools.cached_property
    def groups(self) -> list[dist.ProcessGroup]:
        return [process_group(each) for each in self.name.split(",")]

    @functools.cached_property
    def rank(self) -> int:  # type: ignore[override]
        rank = 0
        for each in self.groups:
            rank = rank * each.size() + each.rank()
        return rank

    @functools.cached_property
    def world(self) -> int:  # type: ignore[override]
        return math.prod(each.size() for each in self.groups)

    def reduce(self, sums: Sequence[Tensor], maxima: Sequence[Tensor] = ()) -> list[Tensor]:
        """The sums and maxima of the row, by one all-reduce of sums: each process writes its maxima to slots
        of its own, to which all others add 0. If there are so many rows and processes that a second
        all-reduce costs less than these slots, there are two."""
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

    def total(self, sums: Sequence[Tensor]) -> list[Tensor]:
        return list(_Total.apply(self, *sums))

    def share(self, values: Sequence[Tensor]) -> list[Tensor]:
        return list(_Share.apply(self, *values))

    def largest(self, values: Tensor) -> Tensor:
        return self.total([self.slots(values)])[0].amax(-1)

    def count(self, values: Tensor) -> Tensor:
        return self.reduce([values])[0]

    def same(self, values: Tensor) -> Tensor:
        mine = values.detach()
        (first,) = self.reduce([mine if self.rank == 0 else torch.zeros_like(mine)])
        return first + (values - mine)

    def slots(self, value: Tensor) -> Tensor:
        """(*batch) → (*batch, processes): one place per process. The places of all other processes are 0,
        so that the sum over the processes has every value in its place."""
        places = value.new_zeros(*value.shape, self.world)
        places[..., self.rank] = value
        return places

    def limit(self, x: Tensor) -> float:
        return sum(self.lengths) if self.lengths else math.inf

    def check(self, k: Any, x: Tensor, integer: bool = False) -> None:
        arguments.per_row(k, "k", x, low=0, high=self.limit(x), integer=integer)

    def agree(self, prepare: Callable[[], Prepared], **said: Any) -> Prepared:
        """The result of prepare(), whose first tensor is this shard. If one process meets an error, all raise
        it.

        It takes one all-reduce of three numbers per process. Without it, the other processes would wait
        forever for the one with the error, and so would processes whose arguments lead to different numbers
        of passes. In a trace, errors are raised on each process alone, and the lengths stay unknown.
        """
        if torch.compiler.is_compiling():
            return prepare()
        prepared, error, call, length = None, None, "", 0
        try:
            prepared = prepare()
            x = prepared[0]
            length = x.shape[-1]
            words = ", ".join(f"{name}={_text(value)}" for name, value in said.items())
            call = f"rows {tuple(x.shape[:-1])} of {x.dtype}, {words}"
        except (TypeError, ValueError, IndexError) as caught:
            error = caught
        # on a device that the group can communicate from, whatever the input's device is
        device = collective_device(self.groups[0])
        facts = [float(error is not None), float(zlib.crc32(call.encode())), float(length)]
        (status,) = self.reduce([self.slots(torch.tensor(facts, dtype=torch.float64, device=device))])
        failed, calls, lengths = status.tolist()
        if prepared is None or any(failed) or len(set(calls)) > 1:
            self._raise(error or call)
        self.lengths = lengths
        return prepared  # type: ignore[return-value]

    def _raise(self, mine: Any) -> None:
        """Raise the first error that a process met; if there is none, raise one that says how the arguments
        differ."""
        met: list[Any] = [mine]
        for group in reversed(self.groups):
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, met, group=group)
            met = [one for part in parts for one in part]
        for one in met:
            if isinstance(one, Exception):
                raise one
        other = next(i for i, one in enumerate(met) if one != met[0])
        raise ValueError(
            f"all processes of group must pass the same arguments, except for their shards of the rows, but "
            f"rank 0 has {met[0]}; rank {other} has {met[other]}"
        )


def of(name: str = "") -> Row:
    """The rows of an operator whose schema has ``str group``: "" for whole rows."""
    return Shards(name) if name else HERE


def named(group: Any) -> Row:
    """The rows that a user describes by ``group``: None, a process group, or a tuple of them for a grid."""
    if group is None:
        return HERE
    groups = group if isinstance(group, tuple) else (group,)
    for each in groups:
        if not isinstance(each, dist.ProcessGroup):
            raise TypeError(f"group must be a torch.distributed.ProcessGroup, but got {type(each).__name__}")
    return Shards(",".join(each.group_name for each in groups))


# Who has other rows of the batch, while a loss is reduced of which each has a part.
_BATCH: ContextVar[Row] = ContextVar("_BATCH", default=HERE)


def batch() -> Row:
    """Who has the other rows of the batch that a loss is reduced over."""
    return HERE if torch.compiler.is_compiling() else _BATCH.get()


@contextlib.contextmanager
def batch_with(others: Row) -> Generator[None]:
    """Let these have the other rows of the batch."""
    token = _BATCH.set(others)
    try:
        yield
    finally:
        _BATCH.reset(token)


def _text(value: Any) -> str:
    """The numbers of a tensor as text, or only its shape if reading them would wait for a device; and of a
    user's CDF, which may show its address, no more than that it is one."""
    if isinstance(value, Tensor):
        return str(value.tolist() if arguments.readable(value) else tuple(value.shape))
    return "a CDF of the user's own" if isinstance(value, CDF) and not value.built_in else str(value)


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([v.double().flatten() for v in values]) if values else torch.zeros(0).double()


class _Total(torch.autograd.Function):
    """Sums over each shard → sums over the rows. The results and their gradients are replicated."""

    @staticmethod
    def forward(ctx: Any, row: Shards, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.row = row
        return tuple(row.reduce(values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_Share.apply(ctx.row, *grads)


class _Share(torch.autograd.Function):
    """Replicated numbers → the same, for use by this shard: their gradients are summed over all shards."""

    @staticmethod
    def forward(ctx: Any, row: Shards, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.row = row
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_Total.apply(ctx.row, *grads)
