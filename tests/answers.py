"""Which calls the extension for plain calls answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from khot._core import eager

__all__ = ["answers"]


@contextmanager
def answers(name: str = "soft_topk") -> Iterator[list[bool]]:
    """For each call of this name: whether the extension answered."""
    call, found = getattr(eager, name), []

    def noted(*args: Any) -> Any:
        result = call(*args)
        found.append(result is not None)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, name, noted)
        yield found
