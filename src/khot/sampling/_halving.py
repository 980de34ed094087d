"""Draws of k units as independent trials given their sum, any number from each of several designs."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._ops import uniform as philox
from khot._ops.draws import trials

__all__ = ["draw_rows"]


def draw_rows(z: Tensor, k: Tensor, which: Tensor, generator: torch.Generator | None) -> Tensor:
    """Bool (*shape, n): one draw per entry of which (*shape), with k entries True in each row.

    Args:
        z: float64 logits (m, n), one design per row, with Σσ(z) nearly k.
        k: (m). Where it does not suit the design (NaN, too many certain units) the draws stay empty.
        which: the index in [0, m) of the design of each draw.
    """
    drawn: Tensor = trials(z, k, which.reshape(-1), philox.new_seed(z.device, generator))
    return drawn.reshape(*which.shape, z.shape[-1])
