"""Parameters that are pruned together, and what of each is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from khot import masks
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.names import unknown
from khot._core.precision import at_least_single
from khot._core.torch_internals import forward_mode_is_on, transforms_are_on
from khot.magnitude import soft_topk_magnitude
from khot.nn._handed_out import version
from khot.nn._pruning_costs import checked_costs, cost_row, shown, summed, total
from khot.nn._pruning_selection import Repeatable, affordable_selection, bounded_selection, kept
from khot.nn._values import Value, current, positive

__all__ = ["Blocks", "By", "Group", "Member", "Together", "kind"]

By = Literal["magnitude", "score"]
Member = tuple[nn.Module, str]  # a module, and the name of its parameter


class Together:
    """Parameters that are pruned together, of which each has a parametrisation that knows this object.

    A copy has no parameters at first: each copied parametrisation adds its own. So the copy of a model has
    all of them, and the copy of one layer only its own.
    """

    def __init__(self, members: list[Member]) -> None:
        tensors = [module.get_parameter(name) for module, name in members]
        distinct = list({id(x): x for x in tensors}.values())
        # which of them is the tensor of each member
        self.places = [next(i for i, y in enumerate(distinct) if y is x) for x in tensors]
        self.count = len(distinct)
        self._forget()
        for index, member in enumerate(members):
            self.join(index, member)

    def _forget(self) -> None:
        self.members: dict[int, Member] = {}
        self.first: dict[int, Member] = {}  # a member for each tensor
        self.last = threading.local()  # what each thread did last

    def join(self, index: int, member: Member) -> None:
        self.members[index] = member
        self.first.setdefault(self.places[index], member)

    def originals(self) -> list[Tensor]:
        """The learned tensors, one that several members share (tied weights) only once."""
        return self.of_places(lambda module, name: module.parametrizations[name].original)

    def of_places(self, get: Callable[[Any, str], Tensor]) -> list[Tensor]:
        """One tensor for each that is pruned, of the first member that has it."""
        try:
            return [get(*self.first[i]) for i in range(self.count)]
        except (AttributeError, KeyError):
            missing = self._missing()
            if not missing:
                raise
        raise RuntimeError(missing)

    def check(self) -> None:
        """Raise unless all are there that are pruned together."""
        missing = self._missing()
        if missing:
            raise RuntimeError(missing)

    def _missing(self) -> str:
        for index, (module, name) in self.members.items():
            if not parametrize.is_parametrized(module, name) or not self._has(module, name):
                return (
                    f"of the {len(self.places)} parameters that are pruned together, number {index}, the "
                    f"{name!r} of a {kind(module)}, is pruned with the others no more, and these cannot be "
                    "selected without it. khot.nn.make_permanent would have removed the parametrisations of "
                    "all of them. Now remove those of the others, too, by "
                    "torch.nn.utils.parametrize.remove_parametrizations(module, name, "
                    "leave_parametrized=False), and prune again"
                )
        if len(self.first) == self.count:
            return ""
        module, name = next(iter(self.members.values()))
        return (
            f"the {name!r} of a {kind(module)} was copied without others of the {len(self.places)} parameters"
            " that are pruned together, and without these it is not known which of its entries are kept. Copy"
            " the whole model, or call khot.nn.make_permanent before the copy (with peft, before it copies"
            " the modules_to_save of an adapter)"
        )

    def _has(self, module: Any, name: str) -> bool:
        return getattr(module.parametrizations[name][0], "group", None) is self

    def __getstate__(self) -> dict[str, Any]:
        left = ("members", "first", "last")
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def kind(module: nn.Module) -> str:
    """The name of a module's class, as its author knows it."""
    return type(module).__name__.removeprefix("Parametrized")


class Blocks(Together):
    """A parameter whose every m entries are a row of their own."""

    def __init__(self, member: Member, n: int, m: int, dim: int, tau: Value) -> None:
        super().__init__([member])
        self.n, self.m, self.dim, self.tau = n, m, dim, positive(tau, "tau")

    def part(self, index: int, hard: bool) -> Tensor:
        return self.select(hard)[0][index]

    def select(self, hard: bool) -> tuple[list[Tensor], list[None]]:
        [learned] = self.originals()
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

    def settings(self) -> dict[str, Any]:
        return {"n": self.n, "m": self.m, "dim": self.dim, "tau": self.tau}


class Group(Together):
    """Parameters whose entries compete for the same places."""

    def __init__(
        self,
        members: list[Member],
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
        super().__init__(members)
        self.p, self.by, self.min_share, self.max_share = p, by, min_share, max_share
        sizes = [x.numel() for x in self.of_places(lambda module, name: module.get_parameter(name))]
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
            self._size(amount)

    def settings(self) -> dict[str, Any]:
        shares = {"min_share": self.min_share, "max_share": self.max_share} if self._bounded() else {}
        costs = {} if self.cost is None else {"cost": shown(self.cost)}
        form = {"p": self.p} if self.by == "magnitude" else {"by": self.by}
        return {"amount": self.amount, "tau": self.tau, **form, **shares, **costs}

    def _bounded(self) -> bool:
        return self.cost is None and (sum(self.least) > 0 or sum(self.most) < self.n)

    def _size(self, amount: Scalar) -> Any:
        """How many entries are kept, or what they may cost."""
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
            part, written, made_of = selection.parts.pop(index, (None, 0, ()))
            # autograd refuses the other parts of a row, where one was written into
            if part is not None and version(part) == written and self._unchanged(index, made_of):
                return part
        parts, made_of_parts = self.select(hard, shared=True)
        left = {}
        for i in self.members:
            part = parts[self.places[i]]
            left[i] = part, version(part), made_of_parts[self.places[i]]
        self.last.selection = _Selection(state, left)
        return left.pop(index)[0]

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
        k, tau = self._size(current(self.amount)), current(self.tau)
        if not any(arguments.is_dtensor(x) for x in originals):
            row, learned = self._row([originals, *scores], hard, None, shared, k, tau)
            copies = [_split(each.detach(), originals, cast=False) for each in learned]
            return _split(row, originals), list(zip(*copies, strict=True))
        if self.cost is not None:
            raise ValueError("cost must be None for parameters that are DTensors, but got one")
        # torch does not load torch.distributed.tensor by itself, and most users never need it
        from khot._core.dtensor import Pieces

        pieces = Pieces(originals)
        local = pieces.locals()
        held = [local, *(Pieces(each).locals() for each in scores)]
        row, _ = self._row(held, hard, pieces.groups, shared, k, tau)
        return pieces.join(_split(row, local)), [()] * len(originals)

    def soft(self, tensors: list[Tensor], amount: float, tau: Scalar) -> list[Tensor]:
        """What the soft selection by magnitude makes of plain tensors."""
        row, _ = self._row([tensors], False, None, False, self._size(amount), tau)
        return _split(row, tensors)

    def _row(
        self,
        held: list[list[Tensor]],
        hard: bool,
        group: Any,
        shared: bool,
        k: Any,
        tau: Scalar,
    ) -> tuple[Tensor, list[Tensor]]:
        """The selection of all entries, and what it was made of: the entries and their scores, a row each."""
        tensors = held[0]
        learned = [torch.cat([x.flatten() for x in each]) for each in held]
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
        tensors = self.of_places(lambda module, name: module.get_parameter(name))
        return [nn.Parameter(at_least_single(torch.zeros_like(x))) for x in tensors]

    def learned(self) -> list[list[Tensor]]:
        """What is learned of each tensor: the tensor itself, and by score the scores."""
        if self.by == "magnitude":
            return [self.originals()]
        scores = self.of_places(lambda module, name: module.parametrizations[name][0].score)
        return [self.originals(), scores]

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


class _Selection:
    """The parts of a selection that were not returned yet, with their versions and the learned tensors that
    they were made of, and the state that the selection was made for."""

    def __init__(
        self, state: tuple[Any, ...], parts: dict[int, tuple[Tensor, int, tuple[Tensor, ...]]]
    ) -> None:
        self.state, self.parts = state, parts


def _split(row: Tensor, tensors: list[Tensor], cast: bool = True) -> list[Tensor]:
    parts = row.split([x.numel() for x in tensors])
    return [y.view(x.shape).to(x.dtype if cast else y.dtype) for y, x in zip(parts, tensors, strict=True)]
