"""The counts of a balancer: how far tokens are from getting an expert, or from losing it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["MANTISSA", "OCTAVES", "SCALE", "WIDER", "count_distances", "dropped_bits", "window"]

OCTAVES = 64  # that the bins of one sign cover
WIDER = 2  # log2 of how many times as many they cover, all that a float32 has, while its size is not known
MANTISSA = 23  # bits
SCALE = 2.0**20  # of the distances, so that subnormal ones have bins of their own


def count_distances(
    counts: Tensor,
    biased: Tensor,
    values: Tensor,
    best: Tensor,
    updates: Tensor,
    octave: Tensor,
    mask: Tensor | None,
    sums: Tensor | None,
    tops: Tensor | None,
    closed: Tensor | None,
) -> None:
    """Add the tokens to the counts, by the distance of each expert.

    Args:
        counts: (bins + 1, E), int64, by the bits of the distance times ``SCALE``. The last row has the tokens
            that the expert is closed to.
        biased: (..., E), scores with the biases. A token with a NaN is not counted.
        values, best: (..., k + 1), the largest of them that were offered, and their indices.
        updates: 0-dim, int64. After an odd number of them distances are from the middle of the two cutoffs.
        octave: (E,), int64: where the bins of each expert end, as an exponent in the bits of a float32; 0:
            all exponents have bins.
        mask: None, or (...), bool; False where a token is not counted.
        sums, tops, closed: None, or of G groups of neighbours: (..., G), the sums by which groups are chosen;
            (..., M + 1), the largest of these; and (..., G), bool, whether the group is closed to the token.
    """
    bins, experts = counts.shape[0] - 1, counts.shape[1]
    half, both = bins // 2, updates % 2 == 0
    chosen = torch.zeros_like(biased, dtype=torch.bool).scatter(-1, best[..., :-1], True)
    distance = _distance(biased, chosen, values, both)
    if sums is not None and tops is not None and closed is not None:
        size = experts // sums.shape[-1]
        # all experts of a group move, and two of them make its sum
        short = (_distance(sums, ~closed, tops, both) / min(2, size)).repeat_interleave(size, -1)
        bound = closed.repeat_interleave(size, -1) | chosen
        distance = torch.where(bound, torch.maximum(distance, short), distance)
    lowest, dropped = window(octave, bins)
    place = ((distance.abs().view(torch.int32) - lowest.int()) >> dropped.int()).clamp(0, half - 1)
    # by the choice and not by the sign: the negative bins are then the load even where scores are equal
    place = torch.where(chosen, half - 1 - place, half + place)
    place = place.masked_fill(biased == -math.inf, bins).long()
    counted = ~biased.amax(-1).isnan()
    if mask is not None:
        counted = counted & mask
    ones = counted.long().unsqueeze(-1).expand_as(place)
    seen = counts.scatter_add(0, place.reshape(-1, experts), ones.reshape(-1, experts))
    counts.copy_(seen)  # an addition in place would say nothing of vmap, which this cannot work in


def _distance(scores: Tensor, chosen: Tensor, values: Tensor, both: Tensor) -> Tensor:
    """How much each score has to rise to be among the chosen, ≤ 0 for these, times SCALE: from the cutoffs,
    which are the last two of the largest scores, ``values``, or else from the middle between them."""
    last, next = values[..., -2:].split(1, -1)
    middle = torch.where(last == next, last, last / 2 + next / 2).nan_to_num(0.0, math.inf, -math.inf)
    cutoff = torch.where(chosen, torch.where(both, next, middle), torch.where(both, last, middle))
    return ((cutoff - scores) * SCALE).float().masked_fill(scores == cutoff, 0)  # ∞ − ∞ is NaN


def window(octave: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """For each expert the bits of the smallest distance that has a bin of its own, and how many bits at the
    end of a float32 make no difference to the bin, in int64."""
    wide = octave == 0
    start = (octave - OCTAVES).masked_fill(wide, 0)
    return start << MANTISSA, dropped_bits(bins) + WIDER * wide


def dropped_bits(bins: int) -> int:
    """The latter where the octaves are not the wide ones."""
    return MANTISSA + OCTAVES.bit_length() - (bins // 2).bit_length()
