"""Pruning by magnitude, softly: the weights that are kept are learned together with their values."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from khot import topk
from khot._core import arguments
from khot.magnitude import soft_topk_magnitude
from khot.nn.values import Value, current, describe, positive

__all__ = ["make_permanent", "prune_global", "prune_magnitude"]


def prune_magnitude(
    module: nn.Module, name: str, amount: int | Value, tau: Value = 1.0, p: float = 2.0
) -> nn.Module:
    """Prune a parameter: all but its largest entries in magnitude become 0, softly in train mode.

    The parameter turns into a ``torch.nn.utils.parametrize`` parametrisation of itself. In train mode it is
    :func:`khot.soft_topk_magnitude` of the learned tensor, rescaled, all of it one row: kept entries are
    what they are, the others 0, and those around the threshold in between, so that they get a gradient and
    can still come in or drop out. In eval mode the selection is hard.

    Args:
        module: the module that owns the parameter.
        name: the parameter's name, such as ``"weight"``.
        amount: how much to prune, as for :mod:`torch.nn.utils.prune`: an int is a number of entries, a float
            in [0, 1] a share of them, rounded; or a module that gives a share (:class:`khot.nn.Anneal`, to
            prune gradually).
        tau: temperature > 0, a number or a module that gives one. With p = 2 it is a ratio: entries between
            the threshold and 1 + tau times it are in between.
        p: as for :func:`khot.soft_topk_magnitude`.

    Returns:
        The module, changed in place. What is learned is ``module.parametrizations[name].original``, the same
        Parameter as before, so that an optimizer made earlier still trains it. In eval mode entries that are
        not kept are exactly 0; in train mode, too, but fewer of them.

    Raises:
        ValueError: amount, tau or p out of range, a tensor that is parametrised already.
        AttributeError: no parameter of that name.

    Source: Sander et al. 2023, section 6. Rescaling is ours: a weight that is kept then has the same size in
    both modes, whatever tau.

    Example:
        >>> layer = torch.nn.Linear(4, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([-3.0, 1.0, 2.0, 1.8]))
        >>> _ = khot.nn.prune_magnitude(layer, "weight", 0.5, tau=0.5)
        >>> layer.weight.data
        tensor([[-3.0000,  0.0000,  1.4400,  0.8400]])
        >>> layer.eval().weight.data
        tensor([[-3.,  0.,  2.,  0.]])
    """
    prune_global([(module, name)], amount, tau, p)
    return module


def prune_global(
    parameters: Iterable[tuple[nn.Module, str]], amount: int | Value, tau: Value = 1.0, p: float = 2.0
) -> None:
    """Prune many parameters as if they were one: all their entries compete for the same places.

    As :func:`prune_magnitude`, with the entries of all of them in one row, selected once a forward pass of
    the model: the first of the layers to ask computes it for all of them. Their parameters have to be on one
    device.

    Args:
        parameters: (module, name) pairs, as for ``torch.nn.utils.prune.global_unstructured``.
        amount, tau, p: as for :func:`prune_magnitude`; amount is of the entries of all parameters together.

    Parameters that are DTensors (of FSDP2, of tensor parallelism) stay where they are: the processes exchange
    a few sums, as for ``group=`` in :func:`khot.soft_topk_magnitude`, and a weight is placed as its parameter
    is. Where FSDP2 gathers a module's parameters for its forward pass, that module gets its whole weight, and
    the selection is made once a wrapped module. Prune first, then call ``fully_shard``.

    Under ``torch.compile`` and the transforms of ``torch.func`` every layer computes the selection.

    Raises:
        ValueError, AttributeError: as :func:`prune_magnitude`; also for no parameters, or one given twice.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
        >>> khot.nn.prune_global([(model[0], "weight"), (model[2], "weight")], amount=0.9)
        >>> _ = khot.nn.make_permanent(model)
        >>> sum(int((model[i].weight != 0).sum()) for i in (0, 2))
        75
    """
    members = list(parameters)
    if not members or len({(id(module), name) for module, name in members}) < len(members):
        raise ValueError(f"parameters must be one or more, each given once, but got {members}")
    for module, name in members:
        if parametrize.is_parametrized(module, name):
            raise ValueError(f"name must be a tensor that is not parametrised, but {name!r} is")
        module.get_parameter(name)
    group = _Group(members, amount, tau, p)
    for index, (module, name) in enumerate(members):
        # unsafe: the check would ask for a selection before all are there
        parametrize.register_parametrization(module, name, _Pruned(group, index), unsafe=True)


def make_permanent(module: nn.Module) -> nn.Module:
    """Make the pruned parameters of a module and its submodules plain ones again: zeros, and what was kept.

    The values are those of eval mode: exactly the entries to be pruned are 0. What was pruned together
    becomes permanent together, also where a part of it belongs to another module.

    Args:
        module: a model with pruned parameters.

    Returns:
        The module, changed in place. The parameters are still the same objects.

    Raises:
        ValueError: nothing in it is pruned.

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
        for (owner, name), weight in zip(group.members, weights, strict=True):
            parametrize.remove_parametrizations(owner, name, leave_parametrized=False)
            with torch.no_grad():
                getattr(owner, name).copy_(weight)
    return module


class _Pruned(nn.Module):
    """The parametrisation: one member's part of the group's selection."""

    def __init__(self, group: _Group, index: int) -> None:
        super().__init__()
        self.group, self.index = group, index
        self.amount, self.tau = group.amount, group.tau  # where they are modules, their state is saved

    def forward(self, weight: Tensor) -> Tensor:
        return self.group.part(self.index, hard=not self.training)

    def extra_repr(self) -> str:
        return describe(amount=self.amount, tau=self.tau, p=self.group.p)


class _Group:
    """Parameters that are pruned together, and the parts of the last selection that nobody asked for yet."""

    def __init__(
        self, members: list[tuple[nn.Module, str]], amount: int | Value, tau: Value, p: float
    ) -> None:
        arguments.check_number(p, "p", low=1.15, high=2.0)
        self.members, self.p = members, p
        self.n = sum(module.get_parameter(name).numel() for module, name in members)
        self.amount, self.tau = amount, positive(tau, "tau")
        if not isinstance(amount, nn.Module):
            arguments.check_number(amount, "amount", low=0, high=self.n if isinstance(amount, int) else 1)
        self.parts: dict[int, Tensor] = {}
        self.state: tuple[Any, ...] = ()

    def part(self, index: int, hard: bool) -> Tensor:
        """A member's weight.

        Every part of a selection is handed out once. A member that asks again is in a new forward pass, whose
        graph must be its own: the old one may have been used up by a backward pass.
        """
        state = self._state(hard)
        if state is None:
            return self.select(hard)[0][index]
        if index not in self.parts or state != self.state:
            parts, row = self.select(hard)
            self.state = state
            self.parts.clear()
            self.parts.update(enumerate(parts))
            if row.requires_grad:
                row.register_hook(_Forget(self))
        return self.parts.pop(index)

    def select(self, hard: bool) -> tuple[list[Tensor], Tensor]:
        """The weights of all members, each in its shape and dtype, and the row that they are made of."""
        originals = self.originals()
        if not any(hasattr(x, "placements") for x in originals):
            row = self._row(originals, hard, None)
            return _split(row, originals), row
        from khot._core.dtensor import Pieces

        pieces = Pieces(originals)
        local = pieces.locals()
        row = self._row(local, hard, pieces.groups)
        return pieces.join(_split(row, local)), row

    def _row(self, tensors: list[Tensor], hard: bool, group: Any) -> Tensor:
        row = torch.cat([x.flatten() for x in tensors])
        amount = current(self.amount)
        if isinstance(amount, Tensor):
            k: Any = self.n - (amount * self.n).round()
        else:
            k = self.n - (amount if isinstance(amount, int) else round(amount * self.n))
        if hard:
            return row * topk.topk_mask(row.abs(), k, group=group)
        return soft_topk_magnitude(row, k, tau=current(self.tau), p=self.p, rescale=True, group=group)

    def originals(self) -> list[Tensor]:
        return [module.parametrizations[name].original for module, name in self.members]  # type: ignore

    def _state(self, hard: bool) -> tuple[Any, ...] | None:
        """What a selection depends on; None where tensors do not tell: while tracing and under transforms."""
        if torch.compiler.is_compiling():
            return None
        tensors = self.originals()
        for value in (self.amount, self.tau):
            if isinstance(value, nn.Module):
                tensors += [*value.parameters(), *value.buffers()]
        for x in tensors:
            if torch._C._functorch.is_functorch_wrapped_tensor(x) or x.is_inference():
                return None
        held = [getattr(x, "_local_tensor", x) for x in tensors]
        seen = ((id(x), y.data_ptr(), x._version, y._version) for x, y in zip(tensors, held, strict=True))
        return hard, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *seen

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "parts": {}}  # copies compute their own


def _split(row: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    parts = row.split([x.numel() for x in tensors])
    return [y.view(x.shape).to(x.dtype) for y, x in zip(parts, tensors, strict=True)]


class _Forget:
    """A hook: parts that are left over when a backward pass comes by are about to lose their graph."""

    def __init__(self, group: _Group) -> None:
        self.group = weakref.ref(group)  # or the graph would keep itself alive through its own hook

    def __call__(self, grad: Tensor) -> None:
        if (group := self.group()) is not None:
            group.parts.clear()
