"""The parametrisation of a pruned parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from khot._core import arguments
from khot._core.torch_internals import as_usual
from khot.nn._handed_out import hand_out, look
from khot.nn._left_soft import LeftSoft
from khot.nn._pruning_groups import Blocks, Group, kind
from khot.nn._values import describe

__all__ = ["Pruned"]


class Pruned(LeftSoft):
    """The part of a group's selection that belongs to one parameter."""

    def __init__(self, group: Group | Blocks, index: int) -> None:
        super().__init__()
        self.group, self.index = group, index
        # in a tuple, which torch does not take for a submodule
        self.member = group.members[index]
        for key, value in group.settings().items():  # attributes, so that the state of modules is saved
            setattr(self, key, value)

    def register(self) -> None:
        """Become the parametrisation of the parameter."""
        module, name = self.member
        if parametrize.is_parametrized(module):
            _give_own_class(module)
        # unsafe=True, because the check would need a selection before all parameters are registered
        parametrize.register_parametrization(module, name, self, unsafe=True)

    def remove(self, value: Tensor) -> None:
        """Make the parameter plain again, with this value. Parametrisations that were added later stay."""
        module, name = self.member
        held: Any = module.parametrizations[name]  # type: ignore[index]
        with torch.no_grad():
            held.original.copy_(value)
        if len(held) > 1:
            del held[0]
        else:
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _give_own_class(self.member[0])
        self.group.join(self.index, self.member)

    def forward(self, weight: Tensor) -> Tensor:
        first = self.index == 0  # it speaks for the group
        has_data = arguments.has_data(weight)
        if first and has_data and self.training and weight.requires_grad and torch.is_grad_enabled():
            self._note()
        watched = has_data and as_usual()
        if watched:
            look()  # before the next selection, which can take the memory of the last
        computed = self.group.part(self.index, hard=not self.training)
        return hand_out(computed, self) if watched else computed

    def _outside(self) -> float:
        if not all(arguments.has_data(x) for x in self.group.originals()):
            return math.nan
        with torch.no_grad():
            both = (self.group.select(hard)[0] for hard in (False, True))
            soft, hard = (torch.cat([x.flatten() for x in parts]) for parts in both)
        sizes = soft.double().abs()
        total = sizes.sum().item()
        return sizes[hard == 0].sum().item() / total if total else 0.0

    def lost(self) -> str:
        module, name = self.member
        return (
            f"what was written into the pruned {name!r} of a {kind(module)} is lost, because {name!r} is "
            f"computed at each use: write into parametrizations.{name}.original, or call "
            "khot.nn.make_permanent before (also before adapters are initialised from a weight or merged)"
        )

    def _title(self) -> str:
        module, name = self.member
        others = len(self.group.places) - 1
        more = f" and {others} more" * bool(others)
        return f"The pruned {name} of {kind(module)}{more} ({self.extra_repr()})"

    def extra_repr(self) -> str:
        return describe(**self.group.settings())


def _give_own_class(module: nn.Module) -> None:
    """Give a module that has parametrisations a class that is not that of its copies, too.

    torch makes a class for such a module, with a property for each tensor. A copy has the same class, so that
    a property which the one gets or loses is the other's, too.
    """
    made = type(module)
    if made.__module__ == parametrize.__name__:
        fields = {key: value for key, value in vars(made).items() if key not in ("__dict__", "__weakref__")}
        own: Any = type(made.__name__, made.__bases__, fields)
        module.__class__ = own
