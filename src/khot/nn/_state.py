"""State that layers write in a forward pass: once for each pass, and for all processes of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from khot._core import arguments, rows
from khot._core.torch_internals import is_recomputation, process_group, transforms_are_on, within_backward

__all__ = ["Grouped", "Settled", "Steady", "counts", "observes"]

# With so many passes behind it, a training has had a batch with inputs that are finite, or will not have one.
PASSES = 8


def counts(layer: nn.Module) -> bool:
    """Whether a forward pass may write state that depends on the order of passes: in train mode, when the
    pass is computed for the first time.

    Activation checkpointing with ``use_reentrant=True`` computes it without gradients then, so that passes
    without gradients count, too.
    """
    return layer.training and not within_backward()


def observes(layer: nn.Module) -> bool:
    """Whether a forward pass may write other state: in train mode, while gradients are enabled, and once if
    activation checkpointing computes it twice.

    So evaluation leaves no trace. With ``use_reentrant=True`` it is the second time that counts.
    """
    return layer.training and torch.is_grad_enabled() and not is_recomputation()


class Grouped(nn.Module):
    """Has a process group, or a tuple of them, whose processes train the layer together."""

    _group: str = ""

    @property
    def group(self) -> Any:
        """The process group, a tuple of them for a grid of processes, or None."""
        groups = tuple(process_group(name) for name in self._group.split(",") if name)
        return groups if len(groups) > 1 else groups[0] if groups else None

    @group.setter
    def group(self, group: dist.ProcessGroup | tuple[dist.ProcessGroup, ...] | None) -> None:
        self._group = rows.named(group).name  # a group itself can neither be copied nor pickled

    def _shared(self) -> rows.Row:
        """The tokens or inputs of all processes, in train mode."""
        return rows.of(self._group if self.training else "")


class _Watched:
    """Knows whether a state is as the layer itself left it. A copy does not."""

    def __init__(self) -> None:
        self._state: tuple[Tensor, int] | None = None  # as this layer left it

    def __reduce__(self) -> tuple[type[_Watched], tuple[()]]:
        return type(self), ()

    def _knows(self, state: Tensor) -> bool:
        return self._state is not None and self._state[0] is state and self._state[1] == state._version


class Settled(_Watched):
    """Whether a state that only the first passes change needs no more of them, where it cannot be read.

    It is so after some passes since somebody else wrote to the state. All processes of a group say the same,
    because they make the same passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passes = 0

    def __call__(self, state: Tensor) -> bool:
        return _is_eager(state) and self._passes >= PASSES and self._knows(state)

    def write(self, state: Tensor, value: Tensor) -> None:
        """Write to the state in a pass."""
        eager = _is_eager(state)
        known = eager and self._knows(state)
        state.copy_(value)
        if eager:
            self._passes, self._state = self._passes + 1 if known else 1, (state, state._version)


class Steady(_Watched):
    """A value that a forward pass reads from a state which forward passes write.

    It is renewed by the first forward pass after a backward pass, and where somebody else has written to the
    state. So a pass that activation checkpointing computes again, within the backward pass, reads what it
    read the first time, however many other passes came between. A copy reads anew.

    PyTorch does not count writes through ``.data`` or NumPy. They are seen on the CPU; elsewhere, where to
    look would wait for the device, the first forward pass after a backward pass reads what they wrote.
    """

    def __init__(self) -> None:
        super().__init__()
        self._due = True
        self._value: Tensor | None = None
        self._left: Tensor | None = None  # the values of the state as it was left

    def _knows(self, state: Tensor) -> bool:
        return super()._knows(state) and (self._left is None or state.equal(self._left))

    def _leave(self, state: Tensor, values: Tensor | None) -> None:
        self._state, self._left = (state, state._version), values

    def read(self, state: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """``compute()`` from the state as it is, or as it was when the value was renewed."""
        if not _is_eager(state):
            return compute()
        if self._value is None or not (within_backward() or (not self._due and self._knows(state))):
            self._value, self._due = compute(), False
            self._leave(state, state.clone() if arguments.readable(state) else None)
        return self._value

    def write(self, state: Tensor, value: Tensor) -> None:
        """Write to the state, without a renewal for that."""
        known = _is_eager(state) and self._knows(state)
        state.copy_(value)
        if known:
            self._leave(state, value if arguments.readable(state) else None)

    def until_backward_of(self, result: Any) -> None:
        """The backward pass of this result of a forward pass makes the value due for renewal."""
        if torch.compiler.is_compiling() or transforms_are_on() or not isinstance(result, Tensor):
            return
        if result.grad_fn is not None:  # a hook of the tensor itself would be in the way where it is saved
            result.grad_fn.register_prehook(self._renew)
        elif torch.is_grad_enabled():
            self._due = True

    def _renew(self, _: Any) -> None:
        self._due = True


def _is_eager(state: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or transforms_are_on() or state.is_inference())
