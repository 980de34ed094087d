"""Which entries of a long row are its k largest, for any k: a level, and a place among those at the level.

1. `_bracket`: one program a row takes a sample of the row, and two of its entries between which the row's
   k-th largest lies, five deviations of a sample's rank to either side.
2. `_gather`: all programs count what is above the two and list what lies between them, in one read.
3. `_finish`: one program a row searches the list (:mod:`.selection`). Where the sample was wrong it searches
   the row itself, which takes long, and happens to one row in a million.

A list that would be long, as in the middle of a row of millions, is first narrowed in the same way: between
2. and 3. `_bracket` takes a sample of the list, and `_gather` lists what lies between two of its entries.

Entries are compared by key and place, so that equal ones are different too, and rows of few different numbers
are like any other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Rows, Values
from khot._kernels.triton.functions import place
from khot._kernels.triton.launch import launch
from khot._kernels.triton.rows import entries, place_rows
from khot._kernels.triton.selection import (
    GREATEST,
    INFINITE,
    LEAST,
    MINUS_INFINITE,
    choose,
    k_of,
    key_of,
    load_keys,
    longest,
    masked,
    number,
    ranked,
    reaches,
    search,
)
from khot._kernels.triton.sizes import cdiv

MOST = 2_000_000_000  # entries of a row whose places fit into int32
FEW, MANY = 4096, 16384  # entries of a sample; many of a row that is longer than `layout.STREAMED`
DEVIATIONS = 5.0  # of a rank in the sample; so many ranks more cover the ends, where a rank has no deviation
VECTOR = 16  # bytes that a thread loads at once
HELD = 32  # entries of a thread
LANES = 128  # threads of a program that lists
STATE = tl.constexpr(10)  # numbers of a row: two entries, or the result; and what `_gather` counts
# what is wanted of a row: a level, the level of a mask, or the entry itself
LEVEL, MASK, PLACE = (tl.constexpr(i) for i in range(3))

# Entries of a list from which on it is narrowed. One program takes some 15 looks at it, and two launches more
# cost less than that from about here on, by reckoning.
NARROW = 65536

_MARGIN = tl.constexpr(DEVIATIONS)


@triton.jit
def _wanted(level_pointer, k, n, WHAT: tl.constexpr):
    """Which of a row's entries is wanted, and whether there is none."""
    greatest = tl.load(level_pointer + 6)
    if WHAT == MASK:
        return masked(k, greatest, n - tl.load(level_pointer + 8), tl.load(level_pointer + 7))
    elif WHAT == PLACE:
        return ranked(k, greatest, n)
    else:
        return k.to(tl.int32), False


@triton.jit
def _sampled(element, spacing, BLOCK: tl.constexpr):
    """Where an element of the sample lies: each block at a pseudo-random place of its stretch of the row, so
    that no period of a row is the sample's."""
    block = element // BLOCK
    mixed = block.to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)).to(tl.uint64) * (spacing - BLOCK + 1).to(tl.uint64)
    return block * spacing + (mixed >> 32).to(tl.int32) + element % BLOCK


@triton.jit(do_not_specialize=["count"])
def _bracket(
    x, k, level_pointer, before_pointer, list_pointer, n, count, room, LARGEST: tl.constexpr,
    SAMPLE: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, WHAT: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """LISTED says that it is not of the row but of the list, of which `before_pointer` has the state."""
    query = tl.program_id(0).to(tl.int64)
    level_pointer += query * STATE
    at = x.pointer + query // count * x.stride
    own_k = k_of(*k, query, query % count)
    if LISTED:
        before_pointer += query * STATE
        at = list_pointer + query * 2 * room
        found = tl.load(before_pointer + 5)
        wanted, bad = _wanted(before_pointer, own_k, n, WHAT)
        own_k = (wanted - tl.load(before_pointer + 4)).to(tl.float64)
        whole = (found < SAMPLE) | (found > room) | (own_k < 1) | (own_k > found) | bad
        size, n = tl.where(whole, 0, found), tl.where(whole, SAMPLE, found)
    else:
        own_k = tl.floor(own_k + 0.5)
    spacing = n // (SAMPLE // BLOCK)
    keys, places = (), ()
    for i in tl.static_range(PIECES):
        element = tl.arange(0, SAMPLE // PIECES) + i * (SAMPLE // PIECES)
        slot = _sampled(element, spacing, BLOCK)
        if LISTED:  # what is equal is listed in any order: the bracket may be wider then
            key = tl.load(at + slot, mask=slot < size, other=LEAST)
            place_ = tl.load(at + room + slot, mask=slot < size, other=0)
        else:
            key, place_ = key_of(tl.load(at + slot), LARGEST), slot
        keys = keys + (key,)  # type: ignore[assignment]  # noqa: RUF005
        places = places + (place_,)  # type: ignore[assignment]  # noqa: RUF005
    share = (tl.where((own_k >= 1) & (own_k <= n), own_k, 1.0) / n).to(tl.float32)
    mean = share * SAMPLE
    margin = _MARGIN * tl.sqrt(mean * (1 - share)) + _MARGIN
    for lower in range(2):
        rank = tl.where(lower == 0, mean - margin, mean + margin + 1).to(tl.int32)
        if LISTED:
            rank = tl.where(whole, tl.where(lower == 0, 0, SAMPLE + 1), rank)
        level, tie = choose(keys, places, tl.minimum(tl.maximum(rank, 1), SAMPLE))
        level = tl.where(rank < 1, GREATEST, tl.where(rank > SAMPLE, LEAST, level))
        tl.store(level_pointer + 2 * lower, level)
        tl.store(level_pointer + 2 * lower + 1, tl.where((rank < 1) | (rank > SAMPLE), LEAST, tie))
    for i in range(4, STATE):
        tl.store(level_pointer + i, tl.where(i == 6, LEAST, 0))


@triton.jit(do_not_specialize=["count", "parts"])
def _gather(
    x, level_pointer, before_pointer, before_list, list_pointer, n, count, parts, before_room, room,
    LARGEST: tl.constexpr, PIECES: tl.constexpr, LANES: tl.constexpr, NEAR: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    query, part = place(parts)
    at = x.pointer + query // count * x.stride
    level_pointer += query * STATE
    list_pointer += query * 2 * room
    if LISTED:
        at = before_list + query * 2 * before_room
        n = tl.minimum(tl.load(before_pointer + query * STATE + 5), before_room)
    level, tie = tl.load(level_pointer), tl.load(level_pointer + 1)
    low_level, low_tie = tl.load(level_pointer + 2), tl.load(level_pointer + 3)
    lane = tl.arange(0, LANES)[:, None] * NEAR + tl.arange(0, NEAR)[None, :]
    start = part * (PIECES * LANES * NEAR)
    keys, columns = (), ()
    for i in tl.static_range(PIECES):  # all loads first
        column = start + i * (LANES * NEAR) + lane
        valid = column < n
        if LISTED:
            key = tl.load(at + column, mask=valid, other=LEAST)
            column = tl.load(at + before_room + column, mask=valid, other=0)
        else:
            key = tl.where(valid, key_of(tl.load(at + column, mask=valid, other=0.0), LARGEST), LEAST)
        keys = keys + (key,)  # type: ignore[assignment]  # noqa: RUF005
        columns = columns + (column,)  # type: ignore[assignment]  # noqa: RUF005

    above, found = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32)
    greatest, least = tl.full((LANES,), LEAST, tl.int32), tl.full((LANES,), GREATEST, tl.int32)
    for i in tl.static_range(PIECES):
        over = reaches(keys[i], columns[i], level, tie)
        inside = reaches(keys[i], columns[i], low_level, low_tie) & (keys[i] > LEAST)
        above += tl.sum(over.to(tl.int32), axis=1)
        found += tl.sum(inside.to(tl.int32), axis=1)
        greatest = tl.maximum(greatest, tl.max(keys[i], axis=1))
        least = tl.minimum(least, tl.min(tl.where(keys[i] > LEAST, keys[i], GREATEST), axis=1))
    found -= above
    before = tl.atomic_add(level_pointer + 5, tl.sum(found)) + tl.cumsum(found) - found
    for i in tl.static_range(PIECES):
        inside = reaches(keys[i], columns[i], low_level, low_tie) & (keys[i] > LEAST)
        inside = inside & (reaches(keys[i], columns[i], level, tie) == 0)
        hit = inside.to(tl.int32)
        slot = before[:, None] + tl.cumsum(hit, axis=1) - hit
        inside = inside & (slot < room)
        tl.store(list_pointer + slot, keys[i], mask=inside)
        tl.store(list_pointer + room + slot, columns[i], mask=inside)
        before += tl.sum(hit, axis=1)

    tl.atomic_add(level_pointer + 4, tl.sum(above))
    if not LISTED:
        top = tl.max(greatest)
        tl.atomic_max(level_pointer + 6, top)
        if (top >= INFINITE) | (tl.min(least) <= MINUS_INFINITE):
            pinned, shut = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32)
            for i in tl.static_range(PIECES):
                pinned += tl.sum((keys[i] == INFINITE).to(tl.int32), axis=1)
                shut += tl.sum(((keys[i] <= MINUS_INFINITE) & (keys[i] > LEAST)).to(tl.int32), axis=1)
            tl.atomic_add(level_pointer + 7, tl.sum(pinned))
            tl.atomic_add(level_pointer + 8, tl.sum(shut))


# -------------------------------------------------------------------------------------- of what is listed


@triton.jit
def _entry(given, start):
    """Keys of the list, or of the row itself, and their places."""
    list_pointer, room, row, size, listed, slot, LARGEST = given[:7]
    slot = start + slot
    in_list, in_row = slot < tl.where(listed, size, 0), slot < tl.where(listed, 0, size)
    key = tl.load(list_pointer + slot, mask=in_list, other=LEAST)
    key = tl.where(in_row, key_of(tl.load(row + slot, mask=in_row, other=0.0), LARGEST), key)
    column = tl.where(in_row, slot, tl.load(list_pointer + room + slot, mask=in_list, other=0))
    return key, column


@triton.jit
def _keys(given, start):
    key, _ = _entry(given, start)
    return key


@triton.jit
def _ties(given, start):
    """The complements of the places of what is at the level."""
    key, column = _entry(given, start)
    return tl.where(key == given[7], ~column, LEAST)


@triton.jit
def _reach(these: tl.constexpr, given, at):
    reached = given[5] * 0
    for start in range(0, given[3], given[5].shape[0]):
        reached += (these(given, start) >= at).to(tl.int32)
    return tl.sum(reached)


@triton.jit
def _ends(these: tl.constexpr, given, low, high):
    least, greatest = given[5] * 0 + high, given[5] * 0 + low
    for start in range(0, given[3], given[5].shape[0]):
        key = these(given, start)
        least = tl.minimum(least, tl.where(key >= low, key, high))
        greatest = tl.maximum(greatest, tl.where(key < high, key, low))
    return tl.min(least), tl.max(greatest)


@triton.jit
def _reach_keys(given, at):
    return _reach(_keys, given, at)


@triton.jit
def _key_ends(given, low, high):
    return _ends(_keys, given, low, high)


@triton.jit
def _reach_ties(given, at):
    return _reach(_ties, given, at)


@triton.jit
def _tie_ends(given, low, high):
    return _ends(_ties, given, low, high)


@triton.jit(do_not_specialize=["count"])
def _finish(
    x, k, level_pointer, list_pointer, narrow_pointer, narrow_list, out_pointer, n, count, room, narrow_room,
    LARGEST: tl.constexpr, WHAT: tl.constexpr, CHUNK: tl.constexpr, NARROWED: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    level_pointer += query * STATE
    above, found = tl.load(level_pointer + 4), tl.load(level_pointer + 5)
    own_k = k_of(*k, query, query % count)
    wanted, bad = _wanted(level_pointer, own_k, n, WHAT)
    left = wanted - above
    listed = (left >= 1) & (left <= found) & (found <= room)
    list_pointer += query * 2 * room
    if NARROWED:
        narrow_pointer += query * STATE
        over, fewer = tl.load(narrow_pointer + 4), tl.load(narrow_pointer + 5)
        fits = listed & (left > over) & (left - over <= fewer) & (fewer <= narrow_room)
        list_pointer = tl.where(fits, narrow_list + query * 2 * narrow_room, list_pointer)
        left, found = tl.where(fits, left - over, left), tl.where(fits, fewer, found)
        room = tl.where(fits, narrow_room, room)
    left = tl.where(listed, left, tl.maximum(wanted, 1))
    size = tl.where(listed, found, n)
    size = tl.where((wanted == 0) | bad, 0, size)  # nothing to search
    slot = tl.arange(0, CHUNK)
    row = x.pointer + query // count * x.stride
    given = (list_pointer, room, row, size, listed, slot, LARGEST)
    low, high = _key_ends(given, LEAST + 1, GREATEST)
    level, reached = search(_reach_keys, _key_ends, given, low, high, size, left, True)
    if WHAT == PLACE:
        exact, _ = _key_ends(given, level, GREATEST)
        value = tl.where(bad, float("nan"), number(exact))
        tl.store(out_pointer + query, value.to(out_pointer.dtype.element_ty))
    else:
        tie = level * 0 + LEAST
        if reached > left:
            equal = given + (level,)  # noqa: RUF005
            ties = _reach_ties(equal, LEAST + 1)
            low, high = _tie_ends(equal, LEAST + 1, GREATEST)
            left -= reached - ties
            tie, _ = search(_reach_ties, _tie_ends, equal, low, high, ties, left, False)
        tl.store(level_pointer, tl.where(wanted == 0, GREATEST, level))
        tl.store(level_pointer + 1, tl.where(wanted == 0, LEAST, tie))
        tl.store(level_pointer + 2, tl.where(bad, 1, 0))


@triton.jit(do_not_specialize=["rows"])
def _resident_level(
    x, level_pointer, rows, n, k, LARGEST: tl.constexpr, TOGETHER: tl.constexpr, PIECES: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The same of rows that a program holds."""
    row, there = place_rows(rows, TOGETHER)
    at = x.pointer + entries(row, x.stride, tl.arange(0, WIDTH), TOGETHER)
    keys, columns = load_keys(at, there, n, tl.float32, TOGETHER, PIECES, WIDTH, FULL, LARGEST)
    level, tie = choose(keys, columns, tl.max(keys[0], axis=len(keys[0].shape) - 1) * 0 + k)
    tl.store(level_pointer + row * STATE, level, mask=there)
    tl.store(level_pointer + row * STATE + 1, tie, mask=there)


KERNELS = (_bracket, _gather, _finish, _resident_level)


def sample(n: int) -> int:
    return FEW if n <= layout.STREAMED else MANY


def _room(n: int, size: int, k: Values) -> int:
    """For how many entries between the two of a sample: six deviations more than there should be."""
    share = min(1.0, max(0.0, (k.high + k.low) / n)) if k.pointer is None else 0.5
    margin = DEVIATIONS * math.sqrt(size * share * (1 - share)) + DEVIATIONS + 1
    ranks = min(2 * margin, size * share + margin)
    return int(n / size * (ranks + 6 * math.sqrt(ranks))) // 16 * 16 + 16


def level_of(x: Tensor, source: Rows, k: int, rows: int, n: int, largest: bool) -> Tensor:
    """For each row STATE numbers, the first two of which are the level and the tie of its k largest entries,
    or of its k smallest ones; k is at least 1."""
    if n > longest():
        given = Values(None, 0, *layout.halves(float(k)))
        return levels(x, source, given, rows, n, LEVEL, largest=largest)
    state = torch.empty((rows, STATE.value), dtype=torch.int32, device=x.device)
    tile = layout.tile(rows, n)
    launch(
        _resident_level, cdiv(rows, tile.together),
        source, state, rows, n, k, LARGEST=largest, **layout.held(tile, n),
    )  # fmt: skip
    return state


def levels(
    x: Tensor,
    source: Rows,
    k: Values,
    queries: int,
    n: int,
    what: tl.constexpr,
    count: int = 1,
    largest: bool = True,
) -> Tensor:
    """Of so many queries, `count` for each row: the entries (PLACE), of x's dtype; or for each query STATE
    numbers, the first three of which are a level, a tie (:func:`.selection.reaches`), and 1 for a row that
    has no mask."""
    size = sample(n)
    warps = max(1, size // 1024)
    state = torch.empty((queries, STATE.value), dtype=torch.int32, device=x.device)
    room = _room(n, size, k)
    found = torch.empty(queries * 2 * room, dtype=torch.int32, device=x.device)
    out = x.new_empty(queries) if what == PLACE else state
    near = VECTOR // x.element_size()
    bracket: dict[str, Any] = {
        "LARGEST": largest, "SAMPLE": size, "PIECES": max(1, size // 128 // warps),
        "BLOCK": layout.SAMPLE_BLOCK, "WHAT": what.value, "num_warps": warps,
    }  # fmt: skip
    gather: dict[str, Any] = {"LARGEST": largest, "LANES": LANES, "num_warps": max(1, LANES // 32)}
    launch(_bracket, queries, source, k, state, None, None, n, count, room, LISTED=False, **bracket)
    parts = cdiv(n, HELD * LANES)
    launch(
        _gather, queries * parts, source, state, None, None, found, n, count, parts, 0, room,
        PIECES=HELD // near, NEAR=near, LISTED=False, **gather,
    )  # fmt: skip
    narrow, fewer, narrow_room = None, None, 0
    if room > NARROW:
        middle = Values(None, 0, 0.5 * room, 0.0)  # where in its list what is wanted lies
        narrow, narrow_room = torch.empty_like(state), max(size, _room(room, size, middle))
        fewer = torch.empty(queries * 2 * narrow_room, dtype=torch.int32, device=x.device)
        launch(_bracket, queries, source, k, narrow, state, found, n, count, room, LISTED=True, **bracket)
        near = VECTOR // 4  # keys and places have four bytes
        parts = cdiv(room, HELD * LANES)
        launch(
            _gather, queries * parts,
            source, narrow, state, found, fewer, n, count, parts, room, narrow_room,
            PIECES=HELD // near, NEAR=near, LISTED=True, **gather,
        )  # fmt: skip
    launch(
        _finish, queries,
        source, k, state, found, narrow, fewer, out, n, count, room, narrow_room,
        LARGEST=largest, WHAT=what.value, CHUNK=layout.CHUNK, NARROWED=narrow is not None,
        num_warps=max(1, layout.CHUNK // 512),
    )  # fmt: skip
    return out
