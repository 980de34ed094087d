"""The error for a name that is not among those that an argument may have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["unknown"]


def unknown(argument: str, value: object, names: Iterable[str], more: str = "") -> ValueError:
    """What to raise; it tells the name that looks most like this one. ``more`` follows the list of names."""
    known = list(names)
    near = difflib.get_close_matches(value, known, 1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    allowed = ", ".join(map(repr, known))
    return ValueError(f"{argument} must be one of {allowed}{more}, but got {value!r}{hint}")
