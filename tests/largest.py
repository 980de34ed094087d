"""How large the tensors are that operations return."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["Largest"]


class Largest(TorchDispatchMode):
    """The most entries and bytes that a tensor had which an operation inside returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, Tensor):
                self.numel, self.nbytes = max(self.numel, t.numel()), max(self.nbytes, t.nbytes)
        return out
