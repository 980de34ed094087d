"""Modules in one mode for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

__all__ = ["in_mode"]


@contextmanager
def in_mode(training: bool, *roots: nn.Module) -> Generator[None]:
    """Modules and all their parts in train or eval mode, and each of them in its own mode afterwards.

    Roots are switched by their ``train``, both ways, which may be a user's own and do more than set the mode,
    or warn that training has ended. After that the parts get the modes that they had. This is no switch, so
    that a part whose mode is what it was does not warn.
    """
    before = [(module, module.training) for root in roots for module in root.modules()]
    of_roots = [root.training for root in roots]
    try:
        for root in roots:
            root.train(training)
        yield
    finally:
        try:
            for root, mode in zip(roots, of_roots, strict=True):
                root.train(mode)
        finally:  # also where a warning is an error
            for module, mode in before:
                module.training = mode
