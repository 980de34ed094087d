"""How far results are from what is wanted, where both may be infinite or NaN."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["compare", "error", "far"]


def far(got: Tensor, want: Tensor) -> Tensor:
    """abs(got − want); 0 where both are the same infinity or NaN, inf where only one of them is."""
    same = (got == want) | (got.isnan() & want.isnan())
    return (got.double() - want.double()).abs().masked_fill(same, 0).nan_to_num(nan=math.inf)


def error(got: Tensor, want: Tensor) -> float:
    """The largest difference in units of 1 + abs(want)."""
    size = 1 + want.double().abs().nan_to_num(0, 0, 0)
    return (far(got, want) / size).max().item() if want.numel() else 0.0


def compare(got: Tensor, want: Tensor, allowed: Tensor | float) -> None:
    assert (far(got, want) <= allowed).all(), (far(got, want) / allowed).max()
