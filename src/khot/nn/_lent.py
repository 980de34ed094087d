"""What is written into a tensor that a layer computed from its parameters is lost. Here that is noticed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from khot._core.torch_internals import as_usual

__all__ = ["Lent"]

ENTRIES = 2**22  # of a tensor on the CPU, at most, of which a copy is kept
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Lent:
    """Notices what is written into tensors that were computed and given to a user. A copy forgets them.

    PyTorch counts writes, but not those through ``.data`` or NumPy. On the CPU small tensors are compared
    with a copy instead, which notices these, too.
    """

    def __init__(self) -> None:
        self._written: dict[str, Callable[[], bool]] = {}

    def __reduce__(self) -> tuple[type[Lent], tuple[()]]:
        return type(self), ()

    def lend(self, name: str, value: Tensor) -> None:
        """A user gets this value, which was computed for the attribute of this name."""
        if as_usual() and type(value) is Tensor and not value.is_meta:
            written = _watch(value.detach())
            if written is not None:
                self._written[name] = written

    def take(self, name: str) -> None:
        """The user has assigned to the attribute."""
        self._written.pop(name, None)

    def tell(self, layer: str) -> None:
        """Warn of what was written since a value was lent."""
        if not self._written or not as_usual():
            return
        asked, self._written = self._written, {}
        for name in [name for name, written in asked.items() if written()]:
            warnings.warn(
                f"what was written into the {name} of this {layer} is lost, because {name} is computed from "
                f"other parameters whenever it is read: assign to it, as in sae.{name} = x, and clone() what "
                "is to be changed for something else",
                UserWarning,
                stacklevel=2,
            )


def _watch(value: Tensor) -> Callable[[], bool] | None:
    """A question to ask later: was something written into this tensor? None where it has no answer."""
    if value.is_cpu and value.numel() <= ENTRIES:
        bits = value.view(INTEGERS[value.element_size()])  # NaNs are equal, too
        copy = bits.clone()
        return lambda: not bits.equal(copy)
    if value.is_inference():
        return None
    value.data = value.new_empty(0)  # the version is still that of what was lent, whose memory is not kept
    version = value._version
    return lambda: value._version != version
