"""Pruning, softly: which weights are kept is learned together with their values."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from khot import cdfs, masks
from khot._core import arguments, rows
from khot._core.arguments import Scalar
from khot._core.names import unknown
from khot._core.precision import at_least_single, vector, wide_dtype
from khot._core.torch_internals import forward_mode_is_on, transforms_are_on
from khot.budgets import budget_mask, soft_budget
from khot.magnitude import soft_topk_magnitude
from khot.nn._left_soft import LeftSoft
from khot.nn._values import Value, current, describe, positive

__all__ = ["make_permanent", "prune_global", "prune_magnitude", "prune_n_m"]

By = Literal["magnitude", "score"]


def prune_magnitude(
    module: nn.Module, name: str, amount: int | Value, *, tau: Value = 1.0, p: float = 2.0
) -> nn.Module:
    """Prune a parameter: all but its largest entries in magnitude become 0, softly in train mode.

    The parameter becomes a ``torch.nn.utils.parametrize`` parametrisation of itself. In train mode its value
    is the rescaled :func:`khot.soft_topk_magnitude` of the learned tensor, taken as one row. Kept entries are
    unchanged and the others 0. Those around the threshold are between 0 and their learned value, so that they
    get a gradient and can still be kept or pruned. In eval mode the selection is hard.

    Args:
        module: the module that owns the parameter.
        name: the parameter's name, such as ``"weight"``.
        amount: how much to prune, as for :mod:`torch.nn.utils.prune`: an int is a number of entries, a float
            in [0, 1] a share of them, rounded; or a module that gives a share (:class:`khot.nn.Anneal`, to
            prune gradually).
        tau: temperature > 0; a number or a module that gives one. With p = 2 it is a ratio: the entries
            between the threshold and (1 + tau) times the threshold are reduced and not yet 0.
        p: the norm, as for :func:`khot.soft_topk_magnitude`.

    Returns:
        The module, changed in place. The learned tensor is ``module.parametrizations[name].original``, the
        same Parameter as before, so that an optimizer made earlier still trains it. In eval mode all pruned
        entries are exactly 0; in train mode some of them are.

    Raises:
        ValueError: amount, tau or p out of range, a tensor that is parametrised already.
        AttributeError: no parameter of that name.

    Source: Sander et al. 2023, section 6. Their code returns y + τ·y^(p−1), too, though the paper does not
    mention it: with it a kept weight has the same size in both modes, whatever tau.

    Example:
        >>> layer = torch.nn.Linear(4, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([-3.0, 1.0, 2.0, 1.8]))
        >>> _ = khot.nn.prune_magnitude(layer, "weight", 0.5, tau=0.5)
        >>> layer.weight.data
        tensor([[-3.0000,  0.0000,  1.4400,  0.8400]])
        >>> layer.eval().weight.data
        tensor([[-3.,  0.,  2.,  0.]])
    """
    prune_global([(module, name)], amount, tau=tau, p=p)
    return module


def prune_global(
    parameters: Iterable[tuple[nn.Module, str]],
    amount: int | Value,
    *,
    tau: Value | None = None,
    p: float = 2.0,
    by: By = "magnitude",
    min_share: float = 0.0,
    max_share: float = 1.0,
    cost: Sequence[float | Tensor] | None = None,
) -> None:
    """Prune many parameters as if they were one: all their entries compete for the same places.

    As :func:`prune_magnitude`, with the entries of all parameters in one row. The selection is made once per
    forward pass of the model: the first layer that needs its weight computes the weights of all of them. The
    parameters have to be on one device. Several threads may run the model at the same time; each of them
    makes its own selection.

    Args:
        parameters: (module, name) pairs, as for ``torch.nn.utils.prune.global_unstructured``. A parameter
            that several modules share (tied weights) is given for each of them; it counts once and is pruned
            alike in all of them, and its costs add up.
        amount, tau, p: as for :func:`prune_magnitude`; amount is of the entries of all parameters together.
            tau has to be given with ``by="score"``, and is 1 otherwise.
        by: ``"magnitude"``, or ``"score"`` for scores that are learned.
        min_share: the least share of the entries of each parameter that is kept, in [0, 1], rounded to a
            number of entries. It protects small layers, and those with small weights, from being pruned away.
        max_share: the largest share of each parameter that is kept, in [min_share, 1].
        cost: what a kept entry costs, such as its multiply-adds: for each parameter, in their order, a number
            ≥ 0 or a tensor that broadcasts to it. ``amount`` is then in units of cost: an int is the cost
            that is pruned away, a float its share of the cost of all entries. An entry of cost 0 is kept.
            Not with ``min_share`` and ``max_share``, and not for DTensors.

    With ``by="score"`` every entry has a score, a parameter that starts at 0 and is learned with the weights.
    In train mode an entry is multiplied by its share in the soft top-k of all scores, so that a weight of any
    size can be kept or pruned, and one that is nearly pruned still has a gradient; in eval mode the entries
    of the largest scores are kept. With a ``cost``, :func:`khot.soft_budget` of the scores takes the place of
    the soft top-k. The scores are parameters of the model, ``module.parametrizations[name][0].score``, so
    make the optimizer afterwards, without weight decay for them. ``tau`` is in units of the scores, which
    Adam moves by about its learning rate in each step: let it fall from 100 rates to 1 while ``amount``
    grows. ``p`` is 2.

    With a cost c, the kept entries w are those of largest abs(w)/√c. They are the choice that changes the
    weights least, in the sum of squares, for what it costs. The hard selection never exceeds the budget. In
    train mode, the entries are multiplied by shares in [0, 1] that spend it exactly, from
    :func:`khot.soft_budget` of log(abs(w)/√c); with p = 2, those between the threshold and e^τ times the
    threshold are reduced and not yet 0.

    With ``min_share`` and ``max_share``, the hard selection is the best that observes them: each parameter
    keeps its ``min_share`` largest entries, can keep its ``max_share`` largest ones, and what is between
    competes with the other parameters. In train mode, a parameter at a bound is selected by itself, with that
    number of entries, and the others share what is left. The total is always that of ``amount``.

    Parameters that are DTensors (of FSDP2, of tensor parallelism) stay where they are: the processes exchange
    a few sums, as for ``group=`` in :func:`khot.soft_topk_magnitude`, and a weight is placed as its parameter
    is. Where FSDP2 gathers a module's parameters for its forward pass, that module gets its whole weight, and
    the selection is made once per wrapped module. Prune first, then call ``fully_shard``.

    Under ``torch.compile`` and the transforms of ``torch.func`` every layer computes the selection.

    Every layer's weight can be part of a loss of its own, and these losses can be backpropagated together or
    one after the other. A learned tensor may be changed in place at any time. Between two layers of one
    forward pass, a change that PyTorch does not count (through ``.data`` or NumPy) is noticed by the layer
    whose tensor it is, and on the CPU only.

    Raises:
        ValueError, AttributeError: as :func:`prune_magnitude`; also for no parameters, or one that is given
            twice; for scores without a tau; for shares out of range, or with which the amount cannot be kept;
            and for a cost that is negative or not finite, does not broadcast, or is not one per parameter.
        TypeError: parameters are not pairs (module, name).

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
        >>> khot.nn.prune_global([(model[0], "weight"), (model[2], "weight")], amount=0.9)
        >>> _ = khot.nn.make_permanent(model)
        >>> sum(int((model[i].weight != 0).sum()) for i in (0, 2))
        75

        A convolution uses its weights once for each pixel of its output, here 14 · 14 times, and a linear
        layer once. Half of all multiply-adds are pruned away:

        >>> convolution, linear = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Linear(1568, 10)
        >>> parameters = [(convolution, "weight"), (linear, "weight")]
        >>> khot.nn.prune_global(parameters, amount=0.5, cost=[14 * 14, 1])
        >>> kept = [int((module.eval().weight != 0).sum()) for module, _ in parameters]
        >>> 0.49 < (14 * 14 * kept[0] + kept[1]) / (14 * 14 * 216 + 15680) <= 0.5
        True
    """
    if not (isinstance(parameters, Iterable) and all(map(_is_pair, members := list(parameters)))):
        raise TypeError(
            "parameters must be pairs (module, name), such as "
            '[(m, "weight") for m in model.modules() if isinstance(m, torch.nn.Linear)]'
        )
    if not members or len({(id(module), name) for module, name in members}) < len(members):
        raise ValueError(f"parameters must be one or more, each given once, but got {members}")
    for module, name in members:
        _plain_parameter(module, name)
    if tau is None and by == "score":
        raise ValueError(
            "tau must be given with by='score', in units of the scores, and should fall: for Adam at a rate "
            "r, such as khot.nn.Anneal(100 * r, r, steps)"
        )
    group = _Group(members, amount, 1.0 if tau is None else tau, p, by, min_share, max_share, cost)
    scores = group.new_scores() if by == "score" else None
    for index, (module, name) in enumerate(members):
        part = _Pruned(group, index)
        if scores is not None:
            part.score = scores[group.places[index]]
        # unsafe=True, because the check would need a selection before all parameters are registered
        parametrize.register_parametrization(module, name, part, unsafe=True)


def prune_n_m(
    module: nn.Module, name: str, n: int = 2, m: int = 4, dim: int = 1, *, tau: Value = 1.0
) -> nn.Module:
    """Prune a parameter to at most n nonzero entries of every m, the pattern that sparse tensor cores run.

    As :func:`prune_magnitude` with p = 2, with every m consecutive entries along a dimension as a row of its
    own: soft in train mode, hard in eval mode.

    Args:
        module: the module that owns the parameter.
        name: the parameter's name, such as ``"weight"``.
        n: how many entries of each m are kept, in [0, m]. Hardware supports 2 of 4.
        m: the length of the rows. It has to divide the parameter's size along ``dim``.
        dim: the dimension that the m entries are consecutive in; 1 is the input of linear layers and of
            convolutions, which their products sum over.
        tau: temperature > 0, as for :func:`prune_magnitude`.

    Returns:
        The module, changed in place, as :func:`prune_magnitude`. :func:`make_permanent` makes the pattern
        permanent.

    Raises:
        ValueError: n, m or tau out of range, a size that m does not divide, a tensor that is parametrised
            already.
        AttributeError: no parameter of that name.
        IndexError: no such dimension.

    Example:
        >>> layer = torch.nn.Linear(8, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([3.0, 1.0, 2.0, 1.8, 0.1, 0.0, -0.4, 0.2]))
        >>> khot.nn.prune_n_m(layer, "weight").eval().weight.data
        tensor([[ 3.0000,  0.0000,  2.0000,  0.0000,  0.0000,  0.0000, -0.4000,  0.2000]])
    """
    parameter = _plain_parameter(module, name)
    arguments.check_integer(m, "m", low=1)
    arguments.check_integer(n, "n", low=0, high=m)
    dim = arguments.check_dim(parameter, dim)
    size = parameter.shape[dim]
    if size % m:
        raise ValueError(f"m must divide the size of {name!r} along dim {dim}, which is {size}, but got {m}")
    group = _Blocks((module, name), n, m, dim, tau)
    parametrize.register_parametrization(module, name, _Pruned(group, 0), unsafe=True)
    return module


def make_permanent(module: nn.Module) -> nn.Module:
    """Make the pruned parameters of a module and its submodules plain parameters again, zeros included.

    The values are those of eval mode, in which exactly the pruned entries are 0. Parameters that were pruned
    together become permanent together, also where some of them belong to another module.

    Args:
        module: a model with pruned parameters.

    Returns:
        The module, changed in place. The parameters are still the same objects.

    Raises:
        ValueError: a module without pruned parameters.

    Example:
        >>> layer = khot.nn.prune_magnitude(torch.nn.Linear(4, 5), "weight", 12)
        >>> khot.nn.make_permanent(layer)
        Linear(in_features=4, out_features=5, bias=True)
        >>> int((layer.weight == 0).sum())
        12
    """
    groups = {part.group for part in module.modules() if isinstance(part, _Pruned)}
    if not groups:
        raise ValueError(f"module must have a pruned parameter, but got {module}")
    for group in groups:
        with torch.no_grad():
            weights, _ = group.select(hard=True)
        for (owner, name), place in zip(group.members, group.places, strict=True):
            parametrize.remove_parametrizations(owner, name, leave_parametrized=False)
            with torch.no_grad():
                getattr(owner, name).copy_(weights[place])
    return module


def _plain_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter of that name, which is not parametrised."""
    if parametrize.is_parametrized(module, name):
        raise ValueError(f"name must be a tensor that is not parametrised, but {name!r} is")
    return module.get_parameter(name)


class _Pruned(LeftSoft):
    """The parametrisation: the part of the group's selection that belongs to one member."""

    def __init__(self, group: _Group | _Blocks, index: int) -> None:
        super().__init__()
        self.group, self.index = group, index
        for key, value in group.settings().items():  # attributes, so that the state of modules is saved
            setattr(self, key, value)

    def forward(self, weight: Tensor) -> Tensor:
        first = self.index == 0  # it speaks for the group
        learns = self.training and weight.requires_grad and torch.is_grad_enabled()
        if first and learns and arguments.has_data(weight):
            self._note()
        return self.group.part(self.index, hard=not self.training)

    def _outside(self) -> float:
        if not all(arguments.has_data(x) for x in self.group.originals()):
            return math.nan
        with torch.no_grad():
            both = (self.group.select(hard)[0] for hard in (False, True))
            soft, hard = (torch.cat([x.flatten() for x in parts]) for parts in both)
        sizes = soft.double().abs()
        total = sizes.sum().item()
        return sizes[hard == 0].sum().item() / total if total else 0.0

    def _title(self) -> str:
        (module, name), *others = self.group.members
        more = f" and {len(others)} more" * bool(others)
        kind = type(module).__name__.removeprefix("Parametrized")
        return f"The pruned {name} of {kind}{more} ({self.extra_repr()})"

    def extra_repr(self) -> str:
        return describe(**self.group.settings())


class _Blocks:
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


def _is_pair(member: object) -> bool:
    if not isinstance(member, (tuple, list)) or len(member) != 2:
        return False
    return isinstance(member[0], nn.Module) and isinstance(member[1], str)


class _Group:
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
        self.cost = None if cost is None else _summed(_checked_costs(cost, members), self.places)
        self.n: float = sum(sizes) if self.cost is None else _total(self.cost, sizes)
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
        costs = {} if self.cost is None else {"cost": _shown(self.cost)}
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
        cost = None if self.cost is None else _cost_row(self.cost, tensors)

        def selected(k: Any, tau: Scalar, row: Tensor, score: Tensor | None = None) -> Tensor:
            if cost is not None:
                return _affordable_selection(row, score, cost, k, hard=hard, tau=tau, p=p)
            if limits is not None:
                return _bounded_selection(
                    row, score, lengths, k, *limits, hard=hard, tau=tau, p=p, group=group
                )
            return _kept(row, score, k, hard=hard, tau=tau, p=p, group=group)

        # forward mode needs the graph itself, and has no backward pass
        if not shared or forward_mode_is_on():
            return selected(k, tau, *learned), learned
        row: Tensor = _Repeatable.apply(selected, k, tau, *learned)
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


def _checked_costs(cost: Any, members: list[tuple[nn.Module, str]]) -> list[float | Tensor]:
    """The costs of the entries of each member: numbers, and tensors that broadcast to it."""
    if isinstance(cost, (str, Tensor)) or not isinstance(cost, Sequence):
        raise TypeError(f"cost must be a list of numbers and tensors, but got {type(cost).__name__}")
    if len(cost) != len(members):
        raise ValueError(f"cost must have one entry per parameter, {len(members)}, but got {len(cost)}")
    found: list[float | Tensor] = []
    for each, (module, name) in zip(cost, members, strict=True):
        if isinstance(each, Tensor):
            arguments.check_real(each, "cost")
            shape = module.get_parameter(name).shape
            try:
                each.expand(shape)
            except RuntimeError:
                raise ValueError(
                    f"cost must broadcast to {name!r} of shape {tuple(shape)}, but got {tuple(each.shape)}"
                ) from None
            each = each.detach().clone()  # a later change by the caller is not meant
            bad = ~((each >= 0) & (each < math.inf))
            if arguments.readable(each) and bool(bad.any()):
                raise ValueError(f"cost must be finite and >= 0, but got {each[bad][0].item()}")
        else:
            arguments.check_number(each, "cost", low=0, high=sys.float_info.max)
        found.append(each)
    return found


def _summed(cost: list[float | Tensor], places: list[int]) -> list[float | Tensor]:
    """The cost of each tensor: of tied weights that of all their uses."""
    return [sum(c for c, at in zip(cost, places, strict=True) if at == i) for i in range(max(places) + 1)]


def _shown(cost: list[float | Tensor]) -> tuple[float | str, ...]:
    """The costs in a few words, for the repr."""
    return tuple(f"tensor {tuple(c.shape)}" if isinstance(c, Tensor) else c for c in cost)


def _total(cost: list[float | Tensor], sizes: list[int]) -> float:
    """The cost of all entries."""
    parts = (
        each.double().mean().item() * size if isinstance(each, Tensor) else each * size
        for each, size in zip(cost, sizes, strict=True)
    )
    return float(sum(parts))


def _cost_row(cost: list[float | Tensor], tensors: list[Tensor]) -> Tensor:
    """The cost of every entry, in one row."""
    parts = []
    for each, x in zip(cost, tensors, strict=True):
        if isinstance(each, Tensor):
            parts.append(each.to(x.device, wide_dtype(x.device)).expand(x.shape).flatten())
        else:
            parts.append(torch.full((x.numel(),), each, dtype=wide_dtype(x.device), device=x.device))
    return torch.cat(parts)


def _kept(
    row: Tensor, score: Tensor | None, k: Any, *, hard: bool, tau: Scalar, p: float, **options: Any
) -> Tensor:
    """The row with k entries kept: those of largest score, or without scores of largest magnitude."""
    if hard:
        return row * masks.topk_mask(row.abs() if score is None else score, k, **options)
    if score is None:
        return soft_topk_magnitude(row, k, tau=tau, p=p, rescale=True, **options)
    return row * masks.soft_topk(score, k, tau=tau, **options)


def _affordable_selection(
    row: Tensor,
    score: Tensor | None,
    cost: Tensor,
    budget: float | Tensor,
    *,
    hard: bool,
    tau: Scalar,
    p: float,
) -> Tensor:
    """The row with the entries of largest score kept that the budget pays for, or without scores with those
    that change it least for what they cost."""
    free = cost == 0
    cdf: cdfs.CDF | cdfs.CDFName = "logistic"
    if score is None:
        size = row.abs().clamp(min=torch.finfo(row.dtype).tiny)
        score = size.log() - 0.5 * cost.masked_fill(free, 1).log().to(row.dtype)
        cdf = cdfs.Uniform() if p == 2 else cdfs.Power(p)
    score = score.masked_fill(free, math.inf)
    if hard:
        return row * budget_mask(score, cost, budget)
    return row * soft_budget(score, cost, budget, tau=tau, cdf=cdf)


def _bounded_selection(
    row: Tensor,
    score: Tensor | None,
    lengths: list[int],
    k: int | Tensor,
    least: list[int],
    most: list[int],
    *,
    hard: bool,
    tau: Scalar,
    p: float,
    group: Any,
) -> Tensor:
    """The row with k entries kept, of which ``least`` to ``most`` are of each part.

    The largest ``least`` entries of a part are kept whatever the others are, those behind its ``most``
    largest never are, and what is between competes. No value is read, so that this can be traced.
    """
    size = row.detach().abs() if score is None else score.detach()
    parts = size.split(lengths)

    def largest(counts: list[int]) -> Tensor:
        of_parts = [masks.topk_mask(x, c, group=group) for x, c in zip(parts, counts, strict=True)]
        return torch.cat(of_parts).bool()

    ranked = size.masked_fill(largest(least), math.inf)
    chosen = masks.topk_mask(ranked, k, mask=largest(most), group=group)
    if hard:
        return row * chosen
    scores = [None] * len(lengths) if score is None else score.split(lengths)
    counts = rows.named(group).count(torch.stack([x.sum(dtype=torch.int64) for x in chosen.split(lengths)]))
    low, high = (vector(row.device, bound) for bound in (least, most))
    free = (counts > low) & (counts < high)
    competes = torch.cat([each.expand(n) for each, n in zip(free, lengths, strict=True)])
    options: dict[str, Any] = {"hard": False, "tau": tau, "p": p, "group": group}
    shared = _kept(row, score, (counts * free).sum(), mask=competes, **options)
    alone = [_kept(*each, **options) for each in zip(row.split(lengths), scores, counts, strict=True)]
    return torch.where(competes, shared, torch.cat(alone))


class _Selection:
    """The parts of a selection that were not returned yet, with the learned tensors that they were made of,
    and the state that the selection was made for."""

    def __init__(self, state: tuple[Any, ...], parts: dict[int, tuple[Tensor, tuple[Tensor, ...]]]) -> None:
        self.state, self.parts = state, parts


def _split(row: Tensor, tensors: list[Tensor], cast: bool = True) -> list[Tensor]:
    parts = row.split([x.numel() for x in tensors])
    return [y.view(x.shape).to(x.dtype if cast else y.dtype) for y, x in zip(parts, tensors, strict=True)]


class _Repeatable(torch.autograd.Function):
    """A function of tensors and numbers whose backward pass can run several times.

    The layers of a pruned model share a selection, but not always a loss. Autograd frees what a graph saved
    in the first backward pass through it. Here later passes, and those that are differentiated themselves,
    compute the function again.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        # attributes, because autograd frees what is saved by save_for_backward; the inputs are made for this
        # function, so that nothing changes them in place
        ctx.function, ctx.inputs = function, inputs
        ctx.graph = _recorded(function, inputs) if any(ctx.needs_input_grad) else None
        return function(*inputs) if ctx.graph is None else ctx.graph[1].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inputs, output), ctx.graph = ctx.graph or (ctx.inputs, None), None
        if torch.is_grad_enabled():
            inputs, output = ctx.inputs, ctx.function(*ctx.inputs)
        elif output is None:
            inputs, output = _recorded(ctx.function, inputs)
        needed = [x for x, need in zip(inputs, ctx.needs_input_grad[1:], strict=True) if need]
        again = torch.is_grad_enabled()
        grads = iter(torch.autograd.grad(output, needed, grad, create_graph=again, allow_unused=True))
        return (None, *(next(grads) if need else None for need in ctx.needs_input_grad[1:]))


def _recorded(function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> tuple[list[Any], Tensor]:
    """Copies of the inputs, and a graph from them to the output."""
    with torch.enable_grad():
        copies = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
        return copies, function(*copies)
