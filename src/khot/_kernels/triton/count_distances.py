"""What a balancer counts, in one launch: distances of tokens and experts, by bins."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import count_distances as reference
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Rows, Tile
from khot._kernels.triton.launch import launch
from khot._kernels.triton.sizes import cdiv

OCTAVES, MANTISSA = tl.constexpr(reference.OCTAVES), tl.constexpr(reference.MANTISSA)
SCALE, WIDER = tl.constexpr(reference.SCALE), tl.constexpr(reference.WIDER)


class Groups(NamedTuple):
    """Of groups of neighbours the sums that decide, the largest of these, and which groups are closed."""

    sums: Rows | None
    tops: Rows | None
    closed: Rows | None


@triton.jit
def _distance(scores, chosen, last, next, both):
    """`count_distances._distance`; the middle of two cutoffs that are no numbers is 0."""
    middle = tl.where(last == next, last, last * 0.5 + next * 0.5)
    middle = tl.where(middle == middle, middle, 0.0)
    cutoff = tl.where(chosen, tl.where(both, next, middle), tl.where(both, last, middle))
    return tl.where(scores == cutoff, 0.0, ((cutoff - scores) * SCALE).to(tl.float32))


@triton.jit(do_not_specialize=["rows"])
def _count_distances(
    counts_pointer, x, values, best, updates_pointer, octave_pointer, mask_pointer, groups,
    rows, n, k, size, top, HALF: tl.constexpr, DROPPED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    TOGETHER: tl.constexpr = T.together
    WIDTH: tl.constexpr = T.width
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)[None, :]
    there = row < rows
    valid = there[:, None] & (column < n)
    score = tl.load(x.pointer + row[:, None] * x.stride + column, mask=valid, other=0.0)
    both = tl.load(updates_pointer) % 2 == 0
    counted = there & (tl.max((score != score).to(tl.int32), axis=1) == 0)
    if mask_pointer is not None:
        counted &= tl.load(mask_pointer + row, mask=there, other=0) != 0

    shut = column < 0
    if groups.closed is not None:
        group = column // size
        at = groups.closed.pointer + row[:, None] * groups.closed.stride + group
        shut = tl.load(at, mask=valid, other=0) != 0
    # of equal scores the first are chosen, so that the k-th best is the last of its equals that is; those of
    # closed groups are offered as −inf
    at = values.pointer + row * values.stride + k
    last = tl.load(at - 1, mask=there, other=0.0)[:, None]
    next = tl.load(at, mask=there, other=0.0)[:, None]
    least = tl.load(best.pointer + row * best.stride + k - 1, mask=there, other=0)[:, None]
    offered = tl.where(shut, float("-inf"), score)
    chosen = (offered > last) | ((offered == last) & (column <= least))

    distance = _distance(score, chosen, last, next, both)
    if groups.closed is not None:
        at = groups.sums.pointer + row[:, None] * groups.sums.stride + group
        sums = tl.load(at, mask=valid, other=0.0)
        at = groups.tops.pointer + row * groups.tops.stride + top
        last = tl.load(at - 1, mask=there, other=0.0)[:, None]
        next = tl.load(at, mask=there, other=0.0)[:, None]
        short = _distance(sums, shut == 0, last, next, both)
        short = tl.where(size > 1, short * 0.5, short)
        larger = tl.where((short > distance) | (short != short), short, distance)
        distance = tl.where(shut | chosen, larger, distance)

    octave = tl.load(octave_pointer + column, mask=column < n, other=0)
    wide = octave == 0
    lowest = (tl.where(wide, 0, octave - OCTAVES) << MANTISSA).to(tl.int32)
    dropped = DROPPED + tl.where(wide, WIDER, 0)
    bits = tl.abs(distance).to(tl.int32, bitcast=True)
    place = tl.minimum(tl.maximum((bits - lowest) >> dropped, 0), HALF - 1)
    place = tl.where(chosen, HALF - 1 - place, HALF + place)
    place = tl.where(score == float("-inf"), 2 * HALF, place)
    one = tl.full((TOGETHER, WIDTH), 1, tl.int64)
    at = counts_pointer + place.to(tl.int64) * n + column
    tl.atomic_add(at, one, mask=valid & counted[:, None], sem="relaxed")


KERNELS = (_count_distances,)


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
    """`count_distances.count_distances`, in Triton for as many experts as one program holds. Sums of integers
    are the same in every order."""
    n = biased.shape[-1]
    if n > layout.RESIDENT:
        reference.count_distances(counts, biased, values, best, updates, octave, mask, sums, tops, closed)
        return
    if not biased.numel():
        return
    bins, rows, (width, together, warps) = counts.shape[0] - 1, biased.numel() // n, layout.block(n)
    groups = Groups(*(None if v is None else layout.rows(v, v.shape[-1]) for v in (sums, tops, closed)))
    launch(
        _count_distances, cdiv(rows, together),
        counts, *(layout.rows(v, v.shape[-1]) for v in (biased, values, best)),
        updates, octave, None if mask is None else mask.contiguous(), groups,
        rows, n, values.shape[-1] - 1,
        1 if sums is None else n // sums.shape[-1], 0 if tops is None else tops.shape[-1] - 1,
        HALF=bins // 2, DROPPED=reference.dropped_bits(bins),
        T=Tile(together, 1, width, full=False, streams=False, chunk=0), num_warps=warps,
        enable_fp_fusion=False,  # so that a middle of cutoffs is rounded as the reference rounds it
    )  # fmt: skip
