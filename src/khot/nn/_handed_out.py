"""What is written into a pruned weight is lost, because it is computed at each use. Here that is noticed."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from ctypes import string_at
from typing import Any, NamedTuple, Protocol

from torch import Tensor

__all__ = ["hand_out", "look", "version"]

BYTES = 1024  # of a weight on the CPU, that are compared: so many that some of them are not pruned
MOST = 8  # weights of a thread, at most, that are looked at again


class Owner(Protocol):
    def lost(self) -> str:
        """What is lost, in words."""
        ...


class _Given(NamedTuple):
    """A weight as it was handed out. Its owner's death is what its reference is for, too."""

    weight: Tensor
    version: int
    address: int
    sample: bytes
    owner: weakref.ref[Any]


class _Watch:
    """What one thread was given, and may have written into."""

    def __init__(self) -> None:
        self.given: list[_Given] = []
        self.own: weakref.ref[_Watch] = weakref.ref(self)

    def forget(self, owner: weakref.ref[Any]) -> None:
        self.given = [each for each in self.given if each.owner is not owner]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.watch = _Watch()


_thread = _Thread()


def hand_out(weight: Tensor, owner: Owner) -> Tensor:
    """The weight, which is looked at when this thread asks for the next one, and as long as it is in use.

    PyTorch counts what is written in place, but not through ``.data`` or NumPy. ``.data = x`` shows in the
    weight's address. On the CPU a part of the weight is compared, which notices what changes it as a whole. A
    weight that has come to its backward pass was used with what was written into it.

    Nothing is kept of an owner that is gone: the graph of a weight has all parameters.
    """
    watch = _thread.watch
    reference = weakref.ref(owner, watch.forget)
    watch.given.append(_Given(weight, version(weight), weight.data_ptr(), _sample(weight), reference))
    if weight.grad_fn is not None:
        own = watch.own  # the hook lives as long as the graph, which the watch has
        weight.grad_fn.register_prehook(lambda _: _forget(own, reference))
    return weight


def look() -> None:
    """Raise, or warn, if something was written into what this thread was given."""
    watch = _thread.watch
    if watch.given:
        given, watch.given = watch.given, []
        for each in given:
            _look(each)
        # who has a weight, besides the tuple and this call, can write into it later
        watch.given = [each for each in given if sys.getrefcount(each.weight) > 2][-MOST:]


def version(tensor: Tensor) -> int:
    """How often something was written into a tensor in place; 0 where this is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _look(given: _Given) -> None:
    weight, owner = given.weight, given.owner()
    if owner is None:
        return
    if version(weight) != given.version:
        warnings.warn(owner.lost(), UserWarning, stacklevel=2)  # it may be meant for this one use
    elif weight.data_ptr() != given.address or _sample(weight) != given.sample:
        raise RuntimeError(owner.lost())


def _forget(watch: weakref.ref[_Watch], owner: weakref.ref[Any]) -> None:
    thread = watch()
    if thread is not None:
        thread.forget(owner)


def _sample(weight: Tensor) -> bytes:
    """The bytes in the middle of a weight on the CPU. Operators of torch would take several times as long."""
    if not (weight.is_cpu and weight.is_contiguous()):
        return b""
    size = weight.nbytes
    return string_at(weight.data_ptr() + max(0, size - BYTES) // 2, min(size, BYTES))
