"""Finding a design by its name."""

from __future__ import annotations

from typing import Any, cast

from khot._core.names import unknown
from khot.sampling.table import Design, DesignName, designs

__all__ = ["resolve"]


def resolve(design: Any) -> Design:
    """The design of that name."""
    if not isinstance(design, str) or design not in designs:
        raise unknown("design", design, designs)
    return designs[cast(DesignName, design)]
