"""The guard of every search for a root: which trials are not taken, but the middle of the bracket instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from khot._kernels.reference.tiles import two_sum

__all__ = ["guarded", "guarded_pairs", "middle"]


def middle(low: Tensor, high: Tensor) -> Tensor:
    """Of the bracket; the sum of its ends may overflow."""
    return 0.5 * low + 0.5 * high


def guarded(trial: Tensor, low: Tensor, high: Tensor, known: Tensor | None = None) -> Tensor:
    """The trial, if it lies inside the bracket or is known to be the root; else the middle of the bracket."""
    taken = (trial > low) & (trial < high)
    taken = taken if known is None else taken | known
    return torch.where(taken, trial, middle(low, high))


def guarded_pairs(
    hi: Tensor, lo: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Several trials a row, (*batch, K), where numbers are pairs hi + lo.

    The first two results are the trials. Points that are spread over the bracket take the place of those that
    lie outside of it; of a single one, it is the middle. The third says which trials lay inside. The last has
    the middle, as hi and lo, and whether there is any number between the ends of the bracket for it.
    """
    (left_hi, left_lo), (right_hi, right_lo) = ([v.unsqueeze(-1) for v in end] for end in (left, right))
    width = (right_hi - left_hi) + (right_lo - left_lo)
    half_hi, half_lo = two_sum(left_hi, left_lo + 0.5 * width)
    inside = ((hi - left_hi) + (lo - left_lo) > 0) & ((right_hi - hi) + (right_lo - lo) > 0)
    # of two numbers next to each other, the middle is rounded to either
    apart = ((half_hi - left_hi) + (half_lo - left_lo) > 0) & (
        (right_hi - half_hi) + (right_lo - half_lo) > 0
    )
    apart = apart.squeeze(-1)
    # the shares of the bracket at which points are spread, closer to one another near its ends, where a root
    # is that they miss by little
    rank, count = (~inside).cumsum(-1), (~inside).sum(-1, keepdim=True)
    share, up = rank / (count + 1), 2 * rank <= count + 1
    step = (0.5 * width) * ((2 * torch.minimum(share, 1 - share)) ** 4).to(width.dtype)
    spread_hi, spread_lo = two_sum(
        torch.where(up, left_hi, right_hi), torch.where(up, left_lo + step, right_lo - step)
    )
    hi, lo = torch.where(inside, hi, spread_hi), torch.where(inside, lo, spread_lo)
    return hi, lo, inside, (half_hi, half_lo, apart)
