"""How large the tensors are that operations return."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["Largest"]


class Largest(TorchDispatchMode):
    """The most entries and bytes that a tensor had which an operation inside made; views are of none."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_iter(args) if isinstance(t, Tensor)}
        for t in tree_iter(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.numel, self.nbytes = max(self.numel, t.numel()), max(self.nbytes, t.nbytes)
        return out
