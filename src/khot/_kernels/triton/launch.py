"""How the kernels are launched, and where launches are counted.

Triton's own way from a kernel's arguments to the compiled program takes the host longer than a short row
takes the device: among other things it compares every global that the kernel uses with what it was when the
kernel was compiled, and it tells hooks of every launch, also where none are set. So a compiled kernel is
remembered here by what Triton specialises it for, with its constants, and given to Triton's launcher itself.
Where the extension for plain calls is in use, it remembers the kernel as well, and starts it without Python
(:mod:`.native`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

from khot._core import eager
from khot._kernels.triton import native
from khot._kernels.triton.fast import PTX

LARGE = 1 << 31  # from here on an integer has 64 bits

#: Told the name of each kernel that is launched, where something counts them.
watch: Callable[[str], object] | None = None

_VARIANTS: dict[Any, Variant] = {}
_numbers = itertools.count()


class Variant:
    """A kernel with its constants, and what it was compiled to for each kind of arguments."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel = kernel
        self.constants = constants
        self.compiled: dict[Any, _Compiled] = {}
        self.table = next(_numbers)  # of the extension

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Start so many programs: ``kernel[(programs,)](*arguments, **constants)``.

        The arguments come in the kernel's order; those that belong together are one named tuple. The first of
        all is a tensor on the device that runs it.
        """
        noted = _noted.get()
        if noted is not None:
            noted.append((self, programs, arguments))
            programs = 0
        elif watch is not None:
            watch(self.kernel.__name__)
        start(self, programs, arguments)


_noted: ContextVar[list[tuple[Variant, int, tuple[Any, ...]]] | None] = ContextVar("_noted", default=None)


@contextmanager
def unstarted() -> Iterator[list[tuple[Variant, int, tuple[Any, ...]]]]:
    """The launches of this thread, which are compiled and noted, but not started."""
    noted: list[tuple[Variant, int, tuple[Any, ...]]] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


class _Compiled:
    """A compiled kernel, with the constants in its order, and what Triton's launcher is told of it."""

    __slots__ = ("constants", "function", "kernel", "metadata", "run")

    def __init__(self, kernel: Any, constants: tuple[Any, ...]) -> None:
        self.kernel, self.constants = kernel, constants
        self.run, self.function, self.metadata = kernel.run, kernel.function, kernel.packed_metadata


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Start so many programs of the kernel, as :class:`Variant` does.

    All constants come by name, with ``num_warps`` and the like.
    """
    variant(kernel, **constants)(programs, *arguments)


def variant(kernel: Any, **constants: Any) -> Variant:
    """The kernel with these constants, which is the same object in every call."""
    key = kernel.fn, *constants, *constants.values()
    found = _VARIANTS.get(key)
    if found is None:
        found = _VARIANTS[key] = Variant(kernel, constants)
    return found


def start(variant: Variant, programs: int, arguments: tuple[Any, ...]) -> None:
    if eager.start(variant.table, programs, arguments):
        return
    x: Any = arguments
    while isinstance(x, tuple):
        x = x[0]
    if not PTX.value:  # the interpreter; and ROCm, where the size of a tensor counts, too
        with torch.cuda.device_of(x):
            variant.kernel[(programs,)](*arguments, **variant.constants)
        return
    device, active = x.get_device(), driver.active
    current = active.get_current_device()
    if current != device >= 0:
        with torch.cuda.device(device):
            start(variant, programs, arguments)
        return
    key: list[Any] = [current]
    _extend(key, arguments)
    found = variant.compiled.get(tuple(key))
    if found is None:
        kernel = variant.kernel[(programs,)](*arguments, **variant.constants)
        if kernel is not None:  # a hook of Triton's may keep it from compiling
            variant.compiled[tuple(key)] = _Compiled(kernel, _in_order(variant, len(arguments)))
            native.remember(variant.table, arguments, kernel)
        return
    stream = active.get_current_stream(current)
    if _watched():
        found.kernel[(programs, 1, 1)](*arguments, *found.constants, stream=stream)
        return
    found.run(
        programs, 1, 1, stream, found.function, found.metadata, None, None, None,
        *arguments, *found.constants,
    )  # fmt: skip


def _extend(key: list[Any], arguments: tuple[Any, ...]) -> None:
    """At least as fine as what Triton distinguishes. It takes a tuple's members as arguments of their own."""
    left = list(reversed(arguments))
    while left:
        value = left.pop()
        kind = type(value)
        if kind is int:
            key.append(value & 15 | 32 if 1 < value < LARGE else value)
        elif kind is float or value is None:
            key.append(kind)
        elif isinstance(value, tuple):
            left += reversed(value)
        else:
            key += value.dtype, value.data_ptr() & 15


def _watched() -> bool:
    """Whether something, such as a profiler of Triton's, is to be told of launches. Triton's hooks are lists
    of functions, unless somebody has put another function there."""
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def _in_order(variant: Variant, given: int) -> tuple[Any, ...]:
    """The constants in the kernel's order."""
    named, parameters = variant.kernel.arg_names[given:], variant.kernel.signature.parameters
    return tuple(variant.constants.get(name, parameters[name].default) for name in named)


def forget() -> None:
    """Forget what was compiled."""
    eager.forget()
    for each in _VARIANTS.values():
        each.compiled.clear()
