"""How the kernels are launched, and where launches are counted.

Triton's own way from a kernel's arguments to the compiled program takes the host longer than a short row
takes the device: among other things it compares every global that the kernel uses with what it was when the
kernel was compiled. So a compiled kernel is remembered here by what Triton specialises it for, and started
through the handle that Triton gives out for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime import driver

from khot._kernels.triton.fast import PTX

__all__ = ["launch"]

LARGE = 1 << 31  # from here on an integer has 64 bits

#: Told the name of each kernel that is launched, where something counts them.
watch: Callable[[str], object] | None = None

_COMPILED: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Start so many programs of the kernel: ``kernel[(programs,)](*arguments, **constants)``.

    The arguments come in the kernel's order, and all constants by name, with ``num_warps`` and the like.
    """
    if watch is not None:
        watch(kernel.__name__)
    start(kernel, programs, arguments, constants)


def start(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    if not PTX.value:  # the interpreter; and ROCm, where the size of a tensor counts, too
        kernel[(programs,)](*arguments, **constants)
        return
    device = driver.active.get_current_device()
    key = [kernel.fn, device, *constants, *constants.values()]
    for value in arguments:  # at least as fine as what Triton distinguishes
        kind = type(value)
        if kind is int:
            key.append(value & 15 | 32 if 1 < value < LARGE else value)
        elif kind is float or value is None:
            key.append(kind)
        else:
            key += value.dtype, value.data_ptr() & 15
    found = _COMPILED.get(tuple(key))
    if found is None:
        compiled = kernel[(programs,)](*arguments, **constants)
        _COMPILED[tuple(key)] = compiled, _rest(kernel, len(arguments), constants)
    else:
        compiled, rest = found
        stream = driver.active.get_current_stream(device)
        compiled[(programs, 1, 1)](*arguments, *rest, stream=stream)


def _rest(kernel: Any, given: int, constants: dict[str, Any]) -> tuple[Any, ...]:
    """The kernel's constants in its order."""
    named = kernel.arg_names[given:]
    return tuple(constants.get(name, kernel.signature.parameters[name].default) for name in named)


def forget() -> None:
    """Forget what was compiled."""
    _COMPILED.clear()
