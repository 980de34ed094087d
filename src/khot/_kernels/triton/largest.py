"""The k largest entries of each row with their indices.

A row falls into more than k groups, and its k largest entries lie in the k groups with the largest maxima:
one read of the row for the maxima, a bisection over these numbers, and a look into k groups. No row is a bad
one.
A group is a vector that a thread loads at once, and those that follow it at the distance of all groups
together. So the second look reads whole vectors, and in a sorted row the largest entries are spread over many
groups.

What was found is packed as (key, place) into an integer, so that a sort puts it in order, the lowest index
first where entries are equal. A long row of a small batch is cut into parts; what these find is searched by
another launch, as a row of such integers. Short rows are sorted as they are.

Where k is large, the level that k entries reach comes from :mod:`.levels`. Two more launches take these
entries in the order of their places, and torch sorts what they found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import topk as reference
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Rows, Values
from khot._kernels.triton.functions import load, place
from khot._kernels.triton.launch import launch
from khot._kernels.triton.levels import MOST, PLACE, STATE, level_of, levels
from khot._kernels.triton.selection import LEAST, LEAST64, key_of, number, ordered, reaches
from khot._kernels.triton.sizes import cdiv, next_power_of_2

SORTED = 256  # entries of a row that is sorted as a whole, which takes less time than to search it
SOME = 2048  # the same where at least one entry of 16 is wanted
ROOM = 2048  # entries that a program sorts at the end
VECTOR = 16  # bytes that a thread loads at once
THREAD = 32 * 32  # entries of a warp at a time
PARTED = 16384  # entries of a part of a row that is split, at least

_PLACES = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _keys(pointer, at, valid, LARGEST: tl.constexpr, PACKED: tl.constexpr):
    if PACKED:
        return tl.load(pointer + at, mask=valid, other=LEAST64)
    else:
        return tl.where(valid, key_of(tl.load(pointer + at, mask=valid, other=0.0), LARGEST), LEAST)


@triton.jit
def _packed(key, at, PACKED: tl.constexpr):
    """Key and place as one integer, in the order of keys, then from the last place to the first."""
    return key if PACKED else (key.to(tl.int64) << 32) | (at ^ _PLACES).to(tl.int64)


@triton.jit
def _middle(low, high):
    """Of two integers, rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _level(best, k, enough, PACKED: tl.constexpr):
    """A level that k to `enough` of the numbers reach; or else the k-th largest of them. And how many reach
    it."""
    low, high = tl.min(best, axis=0), tl.max(best, axis=0)
    reached = tl.sum((best >= low).to(tl.int32), axis=0)
    step = 0
    while (low < high) & (reached > enough):
        middle = _middle(low, high)
        if not PACKED:
            # the first few steps halve the range of the numbers and not that of the keys: most rows need
            # a third as many
            half = number(low) + 0.5 * (number(high) - number(low))
            usable = (step < 8) & (half == half) & (tl.abs(half) < float("inf"))
            nearer = tl.minimum(tl.maximum(ordered(half), low + 1), high)
            middle = tl.where(usable, nearer, middle)
        count = tl.sum((best >= middle).to(tl.int32), axis=0)
        high = tl.where(count >= k, high, middle - 1)
        low = tl.where(count >= k, middle, low)
        reached = tl.where(count >= k, count, reached)
        step += 1
    return low, reached


@triton.jit
def _places(first, slot_group, element, GROUPS: tl.constexpr, NEAR: tl.constexpr, ROOM: tl.constexpr):
    """Where the elements of a look into some groups lie."""
    return first + (element // (ROOM * NEAR)) * (GROUPS * NEAR) + slot_group * NEAR + element % NEAR


@triton.jit(do_not_specialize=["parts"])
def _search_rows(
    keys, x, values_pointer, index_pointer, scratch_pointer, n, length, parts, k, LARGEST: tl.constexpr,
    PACKED: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr, NEAR: tl.constexpr, ROOM: tl.constexpr,
    LOOK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, part = program // parts, (program % parts).to(tl.int32)
    base = keys.pointer + row * keys.stride
    scratch_pointer += program * ROOM
    begin = part * length
    end = tl.minimum(n, begin + length)
    group, near, slot = tl.arange(0, GROUPS), tl.arange(0, NEAR), tl.arange(0, ROOM)

    # one read: the largest key of each group
    key_type: tl.constexpr = tl.int64 if PACKED else tl.int32
    least: tl.constexpr = LEAST64 if PACKED else LEAST
    best = tl.full((GROUPS,), least, key_type)
    for first in range(begin, end, GROUPS * NEAR):
        at = first + group[:, None] * NEAR + near[None, :]
        best = tl.maximum(best, tl.max(_keys(base, at, at < end, LARGEST, PACKED), axis=1))

    # the groups that may have one of the k largest entries: fewer than k where more reach the level
    enough = k + k // 4
    level, reached = _level(best, k, enough, PACKED)
    chosen = tl.where(reached > enough, best > level, best >= level)
    groups = tl.sum(chosen.to(tl.int32), axis=0)
    tl.store(scratch_pointer + tl.cumsum(chosen.to(tl.int32), 0) - 1, group.to(tl.int64), mask=chosen)
    tl.debug_barrier()
    element = tl.arange(0, LOOK)
    its_slot = (element // NEAR) % ROOM
    here = its_slot < groups
    its_group = tl.load(scratch_pointer + its_slot, mask=here, other=0, volatile=True).to(tl.int32)

    # a higher level where they have more above it than there is room for, as sorted rows do
    if PACKED:  # no two are equal, and what is at the level is kept with what is above the one before it
        level = tl.maximum(level, LEAST64 + 1) - 1
    low, high = level, tl.max(best, axis=0)
    searching = True
    while searching:
        above, there = tl.zeros((LOOK,), tl.int32), tl.zeros((LOOK,), tl.int32)
        for first in range(begin, end, (LOOK // (ROOM * NEAR)) * GROUPS * NEAR):
            at = _places(first, its_group, element, GROUPS, NEAR, ROOM)
            valid = here & (at < end)
            key = _keys(base, at, valid, LARGEST, PACKED)
            above += (valid & (key > level)).to(tl.int32)
            there += (valid & (key > level if PACKED else key >= level)).to(tl.int32)
        fits, all_there = tl.sum(above, axis=0) <= ROOM, tl.sum(there, axis=0) >= k
        searching = not (fits & (all_there | (level == low)))
        low = tl.where(fits, low, level + 1)
        high = tl.where(fits, level - 1, high)
        level = tl.where(searching, _middle(low, high), level)
    tl.debug_barrier()  # all threads have read the groups, whose place is used again

    found = tl.zeros((), tl.int32)
    for first in range(begin, end, (LOOK // (ROOM * NEAR)) * GROUPS * NEAR):
        at = _places(first, its_group, element, GROUPS, NEAR, ROOM)
        valid = here & (at < end)
        key = _keys(base, at, valid, LARGEST, PACKED)
        hit = (valid & (key > level)).to(tl.int32)
        place = found + tl.cumsum(hit, 0) - 1
        tl.store(scratch_pointer + place, _packed(key, at, PACKED), mask=hit > 0)
        found += tl.sum(hit, axis=0)
    if not PACKED:  # the first of the entries at the level itself
        first = begin
        while (first < end) & (found < k):
            at = first + group
            key = _keys(base, at, at < end, LARGEST, PACKED)
            hit = ((key == level) & (at < end)).to(tl.int32)
            place = found + tl.cumsum(hit, 0) - 1
            tl.store(scratch_pointer + place, _packed(key, at, PACKED), mask=(hit > 0) & (place < k))
            found = tl.minimum(found + tl.sum(hit, axis=0), tl.maximum(found, k))
            first += GROUPS
    tl.debug_barrier()

    packed = tl.load(scratch_pointer + slot, mask=slot < found, other=LEAST64, volatile=True)
    packed = tl.sort(packed, descending=True)
    wanted = slot < k
    if PART:
        tl.store(index_pointer + program * k + slot, packed, mask=wanted)
    else:
        index = (packed & _PLACES).to(tl.int32) ^ _PLACES
        value = tl.load(x.pointer + row * x.stride + index, mask=wanted)
        tl.store(values_pointer + row * k + slot, value, mask=wanted)
        tl.store(index_pointer + row * k + slot, index.to(tl.int64), mask=wanted)


@triton.jit(do_not_specialize=["rows"])
def _sort_short_rows(
    x, values_pointer, index_pointer, rows, n, k, LARGEST: tl.constexpr, TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH)
    there = row < rows
    valid = there[:, None] & (column < n)[None, :]
    held = load(x.pointer, row, x.stride, column, valid, tl.float32)
    key = tl.where(valid, key_of(held, LARGEST), LEAST)
    packed = _packed(key, column[None, :], False)
    packed = tl.topk(packed, KEPT) if KEPT < WIDTH else tl.sort(packed, descending=True)
    slot = tl.arange(0, KEPT)
    wanted = there[:, None] & (slot < k)[None, :]
    index = (packed & _PLACES).to(tl.int32) ^ _PLACES
    value = tl.load(x.pointer + row[:, None] * x.stride + index, mask=wanted)
    out = row[:, None] * k + slot[None, :]
    tl.store(values_pointer + out, value, mask=wanted)
    tl.store(index_pointer + out, index.to(tl.int64), mask=wanted)


@triton.jit
def _selected(x, level_pointer, row, start, n, LARGEST: tl.constexpr, CHUNK: tl.constexpr):
    """Some of a row's entries, their places, and which of them are selected."""
    column = start + tl.arange(0, CHUNK)
    valid = column < n
    held = tl.load(x.pointer + row * x.stride + column, mask=valid, other=0.0)
    level, tie = tl.load(level_pointer + row * STATE), tl.load(level_pointer + row * STATE + 1)
    return held, column, valid & reaches(key_of(held, LARGEST), column, level, tie)


@triton.jit(do_not_specialize=["parts"])
def _count_selected(
    x, level_pointer, counts_pointer, n, length, parts, LARGEST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    number_of = tl.zeros((CHUNK,), tl.int32)
    for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
        _, _, chosen = _selected(x, level_pointer, row, start, n, LARGEST, CHUNK)
        number_of += chosen.to(tl.int32)
    tl.store(counts_pointer + row * parts + part, tl.sum(number_of))


@triton.jit(do_not_specialize=["parts"])
def _take_selected(
    x, level_pointer, counts_pointer, values_pointer, index_pointer, n, length, parts, k,
    LARGEST: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = place(parts)
    other = tl.arange(0, PARTS)
    slot = tl.sum(tl.load(counts_pointer + row * parts + other, mask=other < part, other=0))
    for start in range(part * length, tl.minimum(n, (part + 1) * length), CHUNK):
        held, column, chosen = _selected(x, level_pointer, row, start, n, LARGEST, CHUNK)
        hit = chosen.to(tl.int32)
        at = row * k + slot + tl.cumsum(hit) - hit
        tl.store(values_pointer + at, held, mask=chosen)
        tl.store(index_pointer + at, column.to(tl.int64), mask=chosen)
        slot += tl.sum(hit)


@triton.jit
def _judge_few(values_pointer, index_pointer, out_pointer, k, WHAT: tl.constexpr):
    """What :func:`.levels.levels` returns, from the k + 1 largest entries of each row."""
    row = tl.program_id(0).to(tl.int64)
    values_pointer += row * (k + 1)
    greatest, last = tl.load(values_pointer), tl.load(values_pointer + k - 1)
    bad = greatest != greatest
    if WHAT == PLACE:
        value = tl.where(bad, greatest, tl.where(last == 0, 0.0, last))
        tl.store(out_pointer + row, value.to(out_pointer.dtype.element_ty))
    else:
        # as many entries as are chosen must be above −inf, and no more than these at +inf
        bad |= (last == float("-inf")) | (tl.load(values_pointer + k) == float("inf"))
        tl.store(out_pointer + row * STATE, key_of(last))
        tl.store(out_pointer + row * STATE + 1, ~tl.load(index_pointer + row * (k + 1) + k - 1).to(tl.int32))
        tl.store(out_pointer + row * STATE + 2, tl.where(bad, 1, 0))


KERNELS = (_search_rows, _sort_short_rows, _count_selected, _take_selected, _judge_few)


class _Search(NamedTuple):
    """How a program searches a row."""

    groups: int
    near: int
    room: int
    look: int
    warps: int


def _search(n: int, k: int, size: int) -> _Search:
    """For n entries of so many bytes: 32 of them per thread at a time, and several groups for each of the k.

    Few warps, since all that comes after the read costs each of them the same, whatever it holds.
    """
    near = VECTOR // size
    room = next_power_of_2(max(16, k + k // 4))
    warps = 1 if n <= 2048 else 2 if n <= 16384 else 4 if n <= 131072 else 8
    most = next_power_of_2(cdiv(n, near))
    while warps < 16 and (THREAD * warps // near < min(4 * room, most) or room * near > THREAD * warps):
        warps *= 2
    groups = min(THREAD * warps // near, most)
    return _Search(groups, near, room, max(THREAD // 4 * warps, room * near), warps)


def _grouped(n: int, k: int) -> bool:
    """Whether groups are what finds the k largest of a row that is not short."""
    return k + k // 4 <= ROOM and 16 * k <= n


def of_long_rows(
    x: Tensor, k: Values, rows: int, n: int, what: tl.constexpr, count: int = 1
) -> Tensor:  # fmt: skip
    """:func:`.levels.levels`; by the groups where k is the same for all rows, and small, and no more than one
    entry of each is wanted."""
    wanted = k.high + k.low
    one = k.pointer is None and count == 1 and wanted == int(wanted) and wanted >= 1
    number_of = int(wanted)
    if not one or not _grouped(n, number_of + 1):
        return levels(x, layout.rows(x, n), k, rows * count, n, what, count)
    values, indices = topk(x, number_of + 1, True, True)
    shape = (rows,) if what == PLACE else (rows, STATE.value)
    out = x.new_empty(shape, dtype=x.dtype if what == PLACE else torch.int32)
    launch(_judge_few, rows, values, indices, out, number_of, WHAT=what.value, num_warps=1)
    return out


def _parts(rows: int, n: int, k: int) -> tuple[int, int]:
    """Into how many parts a row is cut, and their length: one for each of the programs that fill a device."""
    if n <= 2 * PARTED:
        return 1, n
    parts = max(1, min(n // max(PARTED, 16 * k), layout.PROGRAMS // 2 // rows))
    length = cdiv(cdiv(n, parts), VECTOR) * VECTOR
    return cdiv(n, length), length


def topk(x: Tensor, k: int, largest: bool, sorted: bool) -> tuple[Tensor, Tensor]:
    """`topk.topk`, in Triton. Float64, and k of more than half a row, are left to torch's sort."""
    batch, n = x.shape[:-1], x.shape[-1]
    rows = batch.numel()
    short = n <= SORTED or (n <= SOME and 16 * k > n)
    grouped = _grouped(n, k)
    if x.dtype == torch.float64 or n > MOST or not (short or grouped or 2 * k <= n):
        return reference.topk(x, k, largest, sorted)
    values = x.new_empty(*batch, k)
    indices = torch.empty_like(values, dtype=torch.int64)
    if rows == 0 or k == 0:
        return values, indices
    source = layout.rows(x, n)
    if short:
        width = max(2, next_power_of_2(n))
        kept = max(2, next_power_of_2(k))
        together, warps = max(1, layout.TOGETHER // width), max(1, min(8, width // 256))
        launch(
            _sort_short_rows, cdiv(rows, together), source, values, indices, rows, n, k,
            LARGEST=largest, TOGETHER=together, WIDTH=width, KEPT=kept, num_warps=max(4, warps),
        )  # fmt: skip
        return values, indices
    if not grouped:
        _take(x, source, values, indices, rows, n, k, largest)
        if not sorted:
            return values, indices
        values, order = values.sort(dim=-1, descending=largest, stable=True)
        return values, indices.gather(-1, order)
    parts, length = _parts(rows, n, k)
    _launch_search(source, source, values, indices, rows, n, length, parts, k, largest)
    return values, indices


def _take(
    x: Tensor, source: Rows, values: Tensor, indices: Tensor,
    rows: int, n: int, k: int, largest: bool,
) -> None:  # fmt: skip
    """Write the k largest entries of each row in the order of their places."""
    level = level_of(x, source, k, rows, n, largest)
    parts, length = layout.parts(rows, n)
    counts = torch.empty((rows, parts), dtype=torch.int32, device=x.device)
    which: dict[str, Any] = {
        "LARGEST": largest,
        "CHUNK": layout.CHUNK,
        "num_warps": max(1, layout.CHUNK // 512),
    }
    if parts > 1:  # a single part has none before it
        launch(_count_selected, rows * parts, source, level, counts, n, length, parts, **which)
    launch(
        _take_selected, rows * parts,
        source, level, counts, values, indices, n, length, parts, k,
        PARTS=next_power_of_2(parts), **which,
    )  # fmt: skip


def _launch_search(
    keys: Rows, source: Rows, values: Tensor, indices: Tensor,
    rows: int, n: int, length: int, parts: int, k: int, largest: bool,
) -> None:  # fmt: skip
    """Search rows of entries, or of what their parts found, and write the k largest."""
    packed, part = keys.pointer is not source.pointer, parts > 1
    how = _search(length, k, keys.pointer.element_size())
    scratch = indices.new_empty(rows * parts * how.room)
    found = indices.new_empty(rows, parts * k) if part else indices
    launch(
        _search_rows, rows * parts,
        keys, source, values, found, scratch, n, length, parts, k,
        LARGEST=largest, PACKED=packed, PART=part,
        GROUPS=how.groups, NEAR=how.near, ROOM=how.room, LOOK=how.look, num_warps=how.warps,
    )  # fmt: skip
    if part:
        m = parts * k
        _launch_search(Rows(found, m), source, values, indices, rows, m, m, 1, k, largest)
