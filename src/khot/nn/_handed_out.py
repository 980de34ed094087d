"""What is written into a pruned weight is lost, because it is computed at each use. Here that is noticed."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from typing import Protocol

from torch import Tensor

__all__ = ["hand_out", "look", "version"]

SAMPLE = 16  # entries, about, that are compared of a weight on the CPU
MOST = 8  # weights of a thread, at most, that are looked at


class Owner(Protocol):
    def lost(self) -> str:
        """What is lost, in words."""
        ...


class _Thread(threading.local):
    def __init__(self) -> None:
        self.given: list[_Given] = []  # in the order in which the thread was given them


_thread = _Thread()


def hand_out(weight: Tensor, owner: Owner) -> Tensor:
    """The weight, which is looked at when this thread asks for the next one, and as long as it is in use.

    PyTorch counts what is written in place, but not through ``.data`` or NumPy. ``.data = x`` shows in the
    weight's address. On the CPU a sample of the entries is compared, which notices what changes the
    weight as a whole. A weight that has come to its backward pass was used with what was written into it.
    """
    _thread.given.append(_Given(weight, owner))
    return weight


def look() -> None:
    """Raise, or warn, if something was written into what this thread was given."""
    given, _thread.given = _thread.given, []
    for each in given:
        each.look()
    _thread.given = [each for each in given if each.is_in_use()][-MOST:]


class _Given:
    """A weight as it was handed out. It is forgotten with its owner, because its graph has the parameters."""

    def __init__(self, weight: Tensor, owner: Owner) -> None:
        self.weight: Tensor | None = weight
        own: weakref.ref[_Given] = weakref.ref(self)
        self.owner = weakref.ref(owner, lambda _: _forget(own))
        self.version = version(weight)
        self.address = weight.data_ptr()
        self.sample = _sample(weight)
        if weight.grad_fn is not None:
            weight.grad_fn.register_prehook(lambda _: _forget(own))

    def look(self) -> None:
        weight, owner = self.weight, self.owner()
        if weight is None or owner is None:
            return
        if version(weight) != self.version:
            self.weight = None
            warnings.warn(owner.lost(), UserWarning, stacklevel=2)  # it may be meant for this one use
        elif weight.data_ptr() != self.address or not _same(_sample(weight), self.sample):
            self.weight = None
            raise RuntimeError(owner.lost())

    def is_in_use(self) -> bool:
        """Whether somebody else has the weight, besides this object and the call below."""
        return self.weight is not None and sys.getrefcount(self.weight) > 2


def version(tensor: Tensor) -> int:
    """How often something was written into a tensor in place; 0 where this is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _forget(reference: weakref.ref[_Given]) -> None:
    given = reference()
    if given is not None:
        given.weight = None


def _sample(weight: Tensor) -> list[float]:
    if not (weight.is_cpu and weight.is_contiguous()):
        return []
    step = max(1, weight.numel() // SAMPLE) | 1  # odd, so that it is not one column of a matrix
    return weight.detach().as_strided((-(-weight.numel() // step),), (step,)).tolist()


def _same(x: list[float], y: list[float]) -> bool:
    return x == y or all(a == b or (a != a and b != b) for a, b in zip(x, y, strict=True))
