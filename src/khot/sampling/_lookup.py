"""Finding a design by its name."""

from __future__ import annotations

from typing import Any, cast

from khot.sampling.table import Design, DesignName, designs

__all__ = ["resolve"]


def resolve(design: Any) -> Design:
    """The design of that name."""
    if not isinstance(design, str) or design not in designs:
        raise ValueError(f"design must be one of {', '.join(map(repr, designs))}, but got {design!r}")
    return designs[cast(DesignName, design)]
