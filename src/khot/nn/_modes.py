"""A module in one mode for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

__all__ = ["in_mode"]


@contextmanager
def in_mode(training: bool, root: nn.Module) -> Generator[None]:
    """A module and all its parts in train or eval mode, and each of them in its own mode afterwards.

    The root is switched by its ``train``, both ways, which may be a user's own and do more than set the mode,
    or warn that training has ended. After that the parts get the modes that they had. This is no switch, so
    that a part whose mode is what it was does not warn.
    """
    before, parts = root.training, [(module, module.training) for module in root.modules()]
    try:
        root.train(training)
        yield
    finally:
        try:
            root.train(before)
        finally:  # also where a warning is an error
            for module, mode in parts:
                module.training = mode
