"""Parameters that are pruned together, and what of each is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from khot import masks
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.names import unknown
from khot._core.precision import at_least_single
from khot._core.torch_internals import forward_mode_is_on, transforms_are_on
from khot.magnitude import soft_topk_magnitude
from khot.nn._pruning_costs import checked_costs, cost_row, shown, summed, total
from khot.nn._pruning_selection import Repeatable, affordable_selection, bounded_selection, kept
from khot.nn._values import Value, current, positive

__all__ = ["Blocks", "By", "Group"]

By = Literal["magnitude", "score"]


class Blocks:
    """A parameter whose every m entries are a row of their own."""

    def __init__(self, member: tuple[nn.Module, str], n: int, m: int, dim: int, tau: Value) -> None:
        self.members, self.places = [member], [0]
        self.n, self.m, self.dim, self.tau = n, m, dim, positive(tau, "tau")

    def part(self, index: int, hard: bool) -> Tensor:
        return self.select(hard)[0][index]

    def select(self, hard: bool) -> tuple[list[Tensor], list[None]]:
        [(module, name)] = self.members
        learned: Tensor = module.parametrizations[name].original  # type: ignore[union-attr, index]
        if not arguments.is_dtensor(learned):
            return [self._kept(learned, hard)], [None]
        # torch does not load torch.distributed.tensor by itself, and most users never need it
        from khot._core.dtensor import with_whole_dim

        kept = with_whole_dim(lambda x: self._kept(x, hard), learned, self.dim)  # type: ignore[arg-type]
        return [kept], [None]

    def _kept(self, learned: Tensor, hard: bool) -> Tensor:
        blocks = learned.unflatten(self.dim, (-1, self.m))
        if hard:
            kept = blocks * masks.topk_mask(blocks.abs(), self.n, dim=self.dim + 1)
        else:
            tau = current(self.tau)
            kept = soft_topk_magnitude(blocks, self.n, dim=self.dim + 1, tau=tau, rescale=True)
        return kept.flatten(self.dim, self.dim + 1)

    def originals(self) -> list[Tensor]:
        [(module, name)] = self.members
        return [module.parametrizations[name].original]  # type: ignore[union-attr, index]

    def settings(self) -> dict[str, Any]:
        return {"n": self.n, "m": self.m, "dim": self.dim, "tau": self.tau}


class Group:
    """Parameters that are pruned together, and for each thread the parts of its last selection."""

    def __init__(
        self,
        members: list[tuple[nn.Module, str]],
        amount: int | Value,
        tau: Value,
        p: float,
        by: By,
        min_share: float,
        max_share: float,
        cost: Sequence[float | Tensor] | None,
    ) -> None:
        if by not in get_args(By):
            raise unknown("by", by, get_args(By))
        arguments.check_number(p, "p", low=1.15, high=3.0)
        if by == "score" and p != 2:
            raise ValueError(f"p must be 2 with by='score', but got {p}")
        arguments.check_number(min_share, "min_share", low=0, high=1)
        arguments.check_number(max_share, "max_share", low=min_share, high=1)
        self.members, self.p, self.by = members, p, by
        self.min_share, self.max_share = min_share, max_share
        tensors = [module.get_parameter(name) for module, name in members]
        distinct = list({id(x): x for x in tensors}.values())
        # which of them is the tensor of each member
        self.places = [next(i for i, y in enumerate(distinct) if y is x) for x in tensors]
        sizes = [x.numel() for x in distinct]
        self.cost = None if cost is None else summed(checked_costs(cost, members), self.places)
        self.n: float = sum(sizes) if self.cost is None else total(self.cost, sizes)
        self.least, self.most = ([round(share * size) for size in sizes] for share in (min_share, max_share))
        if self.cost is not None and (min_share > 0 or max_share < 1):
            raise ValueError(
                f"min_share and max_share must be 0 and 1 with a cost, but got {min_share} and {max_share}"
            )
        self.amount, self.tau = amount, positive(tau, "tau")
        if not isinstance(amount, nn.Module):
            arguments.check_number(amount, "amount", low=0, high=self.n if isinstance(amount, int) else 1)
            self._size()
        self.last = threading.local()

    def settings(self) -> dict[str, Any]:
        shares = {"min_share": self.min_share, "max_share": self.max_share} if self._bounded() else {}
        costs = {} if self.cost is None else {"cost": shown(self.cost)}
        form = {"p": self.p} if self.by == "magnitude" else {"by": self.by}
        return {"amount": self.amount, "tau": self.tau, **form, **shares, **costs}

    def _bounded(self) -> bool:
        return self.cost is None and (sum(self.least) > 0 or sum(self.most) < self.n)

    def _size(self) -> Any:
        """How many entries are kept, or what they may cost."""
        amount = current(self.amount)
        if self.cost is not None:
            return self.n - (amount if isinstance(amount, int) else amount * self.n)
        if isinstance(amount, Tensor):
            k: Any = self.n - (amount * self.n).round()
        else:
            k = self.n - (amount if isinstance(amount, int) else round(amount * self.n))
        low, high = sum(self.least), sum(self.most)
        known = not isinstance(k, Tensor) or arguments.readable(k)
        if self._bounded() and known and not low <= k <= high:
            raise ValueError(
                f"amount must keep {low} to {high} of the {self.n} entries, which min_share and max_share "
                f"allow, but it keeps {int(k)}"
            )
        return k

    def part(self, index: int, hard: bool) -> Tensor:
        """A member's weight.

        Every part of a selection is returned once: a member that asks again is in a new forward pass. Threads
        do not share selections, because they may be in different forward passes.
        """
        state = self._state(hard)
        if state is None:
            return self.select(hard)[0][self.places[index]]
        selection: _Selection | None = getattr(self.last, "selection", None)
        if selection is not None and selection.state == state:
            part, made_of = selection.parts.pop(index, (None, ()))
            if part is not None and self._unchanged(index, made_of):
                return part
        parts, made_of_parts = self.select(hard, shared=True)
        pairs = {i: (parts[place], made_of_parts[place]) for i, place in enumerate(self.places)}
        self.last.selection = _Selection(state, pairs)
        return pairs.pop(index)[0]

    def _unchanged(self, index: int, made_of: tuple[Tensor, ...]) -> bool:
        """Whether a member's learned tensors still have the values that the selection was made of.

        A change through ``.data`` or NumPy does not change the version that :meth:`_state` looks at. Values
        are compared only where this does not wait for a device.
        """
        place = self.places[index]
        pairs = zip((each[place] for each in self.learned()), made_of, strict=False)
        return all(torch.equal(y.to(x.dtype), x) for x, y in pairs if arguments.readable(x))

    def select(self, hard: bool, shared: bool = False) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        """The weights of all tensors, each in its shape and dtype, and copies of what is learned of each.

        With ``shared`` the weights can be parts of several losses, with a backward pass for each. There is no
        copy of DTensors.
        """
        originals, *scores = self.learned()
        if not any(arguments.is_dtensor(x) for x in originals):
            row, learned = self._row([originals, *scores], hard, None, shared)
            copies = [_split(each.detach(), originals, cast=False) for each in learned]
            return _split(row, originals), list(zip(*copies, strict=True))
        if self.cost is not None:
            raise ValueError("cost must be None for parameters that are DTensors, but got one")
        # torch does not load torch.distributed.tensor by itself, and most users never need it
        from khot._core.dtensor import Pieces

        pieces = Pieces(originals)
        local = pieces.locals()
        held = [local, *(Pieces(each).locals() for each in scores)]
        row, _ = self._row(held, hard, pieces.groups, shared)
        return pieces.join(_split(row, local)), [()] * len(originals)

    def _row(
        self, held: list[list[Tensor]], hard: bool, group: Any, shared: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """The selection of all entries, and what it was made of: the entries and their scores, a row each."""
        tensors = held[0]
        learned = [torch.cat([x.flatten() for x in each]) for each in held]
        k, tau = self._size(), current(self.tau)
        # not self below, because otherwise the graph would keep the model alive
        p, limits = self.p, (self.least, self.most) if self._bounded() else None
        lengths = [x.numel() for x in tensors]
        cost = None if self.cost is None else cost_row(self.cost, tensors)

        def selected(k: Any, tau: Scalar, row: Tensor, score: Tensor | None = None) -> Tensor:
            if cost is not None:
                return affordable_selection(row, score, cost, k, hard=hard, tau=tau, p=p)
            if limits is not None:
                return bounded_selection(
                    row, score, lengths, k, *limits, hard=hard, tau=tau, p=p, group=group
                )
            return kept(row, score, k, hard=hard, tau=tau, p=p, group=group)

        # forward mode needs the graph itself, and has no backward pass
        if not shared or forward_mode_is_on():
            return selected(k, tau, *learned), learned
        row: Tensor = Repeatable.apply(selected, k, tau, *learned)
        return row, learned

    def new_scores(self) -> list[nn.Parameter]:
        """A score for every entry, in float32 at least: steps of bfloat16 would be too coarse."""
        tensors = self._of_places(lambda module, name: module.get_parameter(name))
        return [nn.Parameter(at_least_single(torch.zeros_like(x))) for x in tensors]

    def learned(self) -> list[list[Tensor]]:
        """What is learned of each tensor: the tensor itself, and by score the scores."""
        if self.by == "magnitude":
            return [self.originals()]
        return [
            self.originals(),
            self._of_places(lambda module, name: module.parametrizations[name][0].score),
        ]

    def originals(self) -> list[Tensor]:
        """The learned tensors, one that several members share (tied weights) only once."""
        return self._of_places(lambda module, name: module.parametrizations[name].original)

    def _of_places(self, get: Callable[[Any, str], Tensor]) -> list[Tensor]:
        """One tensor for each that is pruned, of the first member that has it."""
        return [get(*self.members[self.places.index(i)]) for i in range(max(self.places) + 1)]

    def _state(self, hard: bool) -> tuple[Any, ...] | None:
        """What a selection depends on; None where it is unknown, while tracing and under transforms."""
        if torch.compiler.is_compiling() or transforms_are_on():
            return None
        tensors = [x for each in self.learned() for x in each]
        for value in (self.amount, self.tau):
            if isinstance(value, nn.Module):
                tensors += [*value.parameters(), *value.buffers()]
        held = [getattr(x, "_local_tensor", x) for x in tensors]
        if not all(arguments.has_data(x) for x in held) or any(x.is_inference() for x in tensors):
            return None
        seen = ((id(x), y.data_ptr(), x._version, y._version) for x, y in zip(tensors, held, strict=True))
        return hard, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *seen

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "last"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.last = threading.local()  # a copy makes its own selections


class _Selection:
    """The parts of a selection that were not returned yet, with the learned tensors that they were made of,
    and the state that the selection was made for."""

    def __init__(self, state: tuple[Any, ...], parts: dict[int, tuple[Tensor, tuple[Tensor, ...]]]) -> None:
        self.state, self.parts = state, parts


def _split(row: Tensor, tensors: list[Tensor], cast: bool = True) -> list[Tensor]:
    parts = row.split([x.numel() for x in tensors])
    return [y.view(x.shape).to(x.dtype if cast else y.dtype) for y, x in zip(parts, tensors, strict=True)]
