"""The k-th largest entry of a row: keys in the order of the numbers, and the search for all selections.

The search looks for a key that k others reach. It guesses by where the counts at its two ends say that the
key should lie, in turn between the numbers and between their keys, halves the keys at every third step, and
now and then moves its ends to the nearest keys that there are, so that rows of few different numbers are done
early. Most rows take 7 to 15 counts, and none can take more than three times the bits of a key.

Of equal keys the first ones are chosen, which is the same search, among their places.

The steps of a search wait for one another. A batch of short rows that gives each scheduler a few warps sorts
its keys instead, with more instructions, but most of them at the same time.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from khot._kernels.triton import layout
from khot._kernels.triton.fast import any_row, log2, reciprocal
from khot._kernels.triton.rows import inside
from khot._kernels.triton.sizes import next_power_of_2

LEAST = tl.constexpr(-(1 << 31))  # below every key of 32 bits
GREATEST = tl.constexpr((1 << 31) - 1)  # above every one
# of float32: above the key of inf, and its complement above LEAST
NAN, INFINITE, MINUS_INFINITE = (tl.constexpr(key) for key in (0x7FFFFFFE, 0x7F800000, -0x7F800001))
# the same of float64
LEAST64, GREATEST64, NAN64 = (tl.constexpr(key) for key in (-(1 << 63), (1 << 63) - 1, (1 << 63) - 2))
INFINITE64, MINUS_INFINITE64 = tl.constexpr(0x7FF << 52), tl.constexpr(-(0x7FF << 52) - 1)
HELD = 16384
SORTED = 128  # entries of a row that is sorted, if few share the device
SORTER = 512, 4  # entries and warps of a program that sorts
SNAP = tl.constexpr(6)  # steps until the ends of the search move to keys that there are

# ----------------------------------------------------------------------------------------------- keys


@triton.jit
def ordered(x):
    """Integers in the order of the scores; −0 is 0."""
    x = tl.where(x == 0, 0.0, x)
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        key = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key


@triton.jit
def key_of(x, LARGEST: tl.constexpr = True):
    """An integer in the order in which entries are wanted, the greatest first. NaN is above inf."""
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    key = tl.where(x != x, NAN64 if x.dtype == tl.float64 else NAN, ordered(x))
    return key if LARGEST else ~key


@triton.jit
def number(key):
    """The number that :func:`ordered` has the key for."""
    if key.dtype == tl.int64:
        return (key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    else:
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_keys(
    at, there, n, COMPUTE: tl.constexpr,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    LARGEST: tl.constexpr = True,
):  # fmt: skip
    """The keys of the rows that a program holds, in pieces, and the columns that they are in. Where there is
    no entry the key is the least integer."""
    keys, columns = (), ()
    for i in tl.static_range(PIECES):
        column = tl.arange(0, WIDTH) + i * WIDTH
        valid = inside(there, column, n, TOGETHER, FULL)
        x = tl.load(at + i * WIDTH, mask=valid, other=0.0).to(COMPUTE)
        key = tl.where(valid, key_of(x, LARGEST), LEAST64 if x.dtype == tl.float64 else LEAST)
        keys = keys + (key,)  # type: ignore[assignment]  # noqa: RUF005
        columns = columns + (column if TOGETHER == 1 else column[None, :],)  # type: ignore[assignment]  # noqa: RUF005
    return keys, columns


@triton.jit
def reaches(key, place, level, tie):
    """Whether an entry is among those that a level and, at the level, the complement of a place select."""
    return (key > level) | ((key == level) & (~place >= tie))


# --------------------------------------------------------------------------------------------- search


@triton.jit
def _odds(count, n):
    """The logarithm of the odds that one of n is among so many, of which no end is infinite."""
    count = count.to(tl.float32) + 0.5
    return log2(count) - log2(n.to(tl.float32) - count + 1)


@triton.jit
def _guess(low, high, share, step, NUMBERS: tl.constexpr):
    """A key between two others: at a share of their distance, as numbers or as keys, or half-way."""
    WIDE: tl.constexpr = tl.uint64 if low.dtype == tl.int64 else tl.uint32
    distance = (high - low).to(WIDE, bitcast=True)  # which may exceed what a signed integer holds
    between = low + (distance.to(tl.float32) * share).to(WIDE).to(low.dtype, bitcast=True)
    guess = tl.where(step % 3 == 2, low + (distance >> 1).to(low.dtype, bitcast=True), between)
    if NUMBERS:
        start = number(low)
        wanted = start + (number(high) - start) * share
        # the ends may be infinite, or beyond the numbers
        guess = tl.where((step % 3 == 0) & (tl.abs(wanted) < float("inf")), ordered(wanted), guess)
    return tl.minimum(tl.maximum(guess, low + 1), high - 1)


@triton.jit
def search(
    reach: tl.constexpr, ends: tl.constexpr, given, low, high, n, k,
    NUMBERS: tl.constexpr, DIMS: tl.constexpr = 1,
):  # fmt: skip
    """The k-th largest of n integers from low to high; or, if exactly k reach it, any number that parts these
    from the others. And how many reach it.

    reach(given, at) is how many reach at, and ends(given, low, high) the least of those that reach low and
    the greatest of those that do not reach high. NUMBERS says that the integers are keys of numbers, and DIMS
    is 2 where several rows are searched together.
    """
    high = tl.where(n > k, high + 1, low + 1)
    at_low, low_odds, high_odds, odds = n, _odds(n, n), _odds(n * 0, n), _odds(k, n)
    step = 0
    running = any_row(low + 1 < high, DIMS)
    while running:
        if step % SNAP == SNAP - 1:
            least, greatest = ends(given, low, high)
            wide = low + 1 < high
            low, high = tl.where(wide, least, low), tl.where(wide, greatest + 1, high)
        else:
            share = (low_odds - odds) * reciprocal(low_odds - high_odds)
            share = tl.minimum(tl.maximum(share, 0.0), 0.999)
            at = _guess(low, high, share, step, NUMBERS)
            count = reach(given, at)
            count_odds = _odds(count, n)
            up = count >= k
            high = tl.where(count > k, high, tl.where(up, at + 1, at))
            high_odds = tl.where(up, high_odds, count_odds)
            low, at_low = tl.where(up, at, low), tl.where(up, count, at_low)
            low_odds = tl.where(up, count_odds, low_odds)
        step += 1
        running = any_row(low + 1 < high, DIMS)
    return low, at_low


# Keys that a program holds are in pieces, of which a thread holds a part of each: they are counted first.


@triton.jit
def _wide(value, key):
    """Numbers of rows, so that they broadcast with the keys of the rows."""
    if len(key.shape) == 1:
        return value
    else:
        return value[:, None]


@triton.jit
def greatest_of(keys):
    greatest = keys[0]
    for i in tl.static_range(1, len(keys)):
        greatest = tl.maximum(greatest, keys[i])
    return tl.max(greatest, axis=len(greatest.shape) - 1)


@triton.jit
def reached(keys, at):
    """How many keys of each row reach a number."""
    at = _wide(at, keys[0])
    number_of = (keys[0] >= at).to(tl.int32)
    for i in tl.static_range(1, len(keys)):
        number_of += (keys[i] >= at).to(tl.int32)
    return tl.sum(number_of, axis=len(number_of.shape) - 1)


@triton.jit
def ends(keys, low, high):
    """The least key of each row that reaches low, and the greatest that does not reach high."""
    low, high = _wide(low, keys[0]), _wide(high, keys[0])
    least, greatest = tl.where(keys[0] >= low, keys[0], high), tl.where(keys[0] < high, keys[0], low)
    for i in tl.static_range(1, len(keys)):
        least = tl.minimum(least, tl.where(keys[i] >= low, keys[i], high))
        greatest = tl.maximum(greatest, tl.where(keys[i] < high, keys[i], low))
    return tl.min(least, axis=len(least.shape) - 1), tl.max(greatest, axis=len(least.shape) - 1)


@triton.jit
def kth(keys, k):
    """The search among the keys that a program holds, of one row or of several. Those that do not take part
    are the least integer."""
    NONE: tl.constexpr = LEAST64 if keys[0].dtype == tl.int64 else LEAST
    high = greatest_of(keys) + 1
    low, high = ends(keys, high * 0 + NONE + 1, high)
    return search(reached, ends, keys, low, high, reached(keys, low), k, True, len(keys[0].shape))


@triton.jit
def in_order(keys):
    """The keys of rows that are in one piece, the greatest first."""
    return tl.sort(keys[0], descending=True)


@triton.jit
def at_place(keys, k):
    """The k-th of the keys of each row."""
    column = tl.arange(0, keys.shape[1])[None, :]
    return tl.sum(tl.where(column == (k - 1)[:, None], keys, 0), axis=1)


@triton.jit
def choose(keys, places, k, SORT: tl.constexpr = False):
    """The level and the complement of a place that the k largest keys of each row reach, k of them at least
    1: see :func:`reaches`. Places increase along a row."""
    if SORT:
        level = at_place(in_order(keys), k)
        number_of = reached(keys, level)
    else:
        level, number_of = kth(keys, k)
    excess = number_of > k
    tie = k * 0 + LEAST
    if any_row(excess, len(keys[0].shape)):
        AXIS: tl.constexpr = len(keys[0].shape) - 1
        at, seen = _wide(level, keys[0]), k - number_of + reached(keys, level) - reached(keys, level + 1)
        last = k * 0 - 1
        for i in tl.static_range(len(keys)):
            equal = (keys[i] == at).to(tl.int32)
            first = (keys[i] == at) & (tl.cumsum(equal, axis=AXIS) <= _wide(seen, keys[0]))
            last = tl.maximum(last, tl.max(tl.where(first, places[i], -1), axis=AXIS))
            seen -= tl.sum(equal, axis=AXIS)
        tie = tl.where(excess, ~last, tie)
    return level, tie


def longest() -> int:
    """Entries of a row that one program holds: with more than 32 keys a thread runs out of registers."""
    return min(layout.RESIDENT, HELD)


def held(rows: int, n: int, compute: tl.dtype) -> tuple[int, dict[str, Any]]:
    """How many rows of n keys a program holds, and the constants for it and for what it does with them."""
    width = max(16, next_power_of_2(n))
    sort = n <= SORTED and rows * width <= layout.SMALL_BATCH and compute == tl.float32
    tile = layout.Tile(SORTER[0] // width, 1, width, SORTER[1]) if sort else layout.tile(rows, n)
    return tile.together, {"COMPUTE": compute, "SORT": sort, **layout.held(tile, n)}


# ---------------------------------------------------------------------------------- what is wanted of a row


@triton.jit
def k_of(pointer, stride, high, low, row, after=0):
    """The k of each row in float64; without a pointer it came by value, the same for all, from which so many
    more are counted."""
    if pointer is None:
        return row.to(tl.float64) * 0 + high + low + after
    else:
        return tl.load(pointer + row * stride).to(tl.float64)


@triton.jit
def masked(k, greatest, selectable, pinned):
    """How many entries a hard mask chooses, and whether the row has no answer: of the greatest key, the
    number of entries above −inf and that of entries at +inf."""
    IS_NAN: tl.constexpr = NAN64 if greatest.dtype == tl.int64 else NAN
    wanted = tl.floor(k + 0.5)
    bad = (greatest == IS_NAN) | (k != k) | (k < 0) | (k > selectable) | (pinned > wanted)
    return tl.where(bad, 0.0, wanted).to(tl.int32), bad


@triton.jit
def ranked(k, greatest, n):
    """Which entry an order statistic is, and whether there is none."""
    IS_NAN: tl.constexpr = NAN64 if greatest.dtype == tl.int64 else NAN
    bad = (greatest == IS_NAN) | (k != k) | (k < 1) | (k > n) | (k != tl.floor(k))
    return tl.where(bad, 1.0, k).to(tl.int32), bad
