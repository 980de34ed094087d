"""Many long rows in descending order, equal entries in the order of their places, NaN first: in float32 and
narrower, for all kernels that go through sorted rows. Zeros and NaN come back without their signs.

A program sorts a chunk of a row. Then runs are merged, two into one of twice the length in each launch: a
program finds by search how many entries of either run come before its tile of the result, and puts the rest
of one behind the other in reverse, which is in order after as many exchanges as a tile has binary digits.

An entry and its place are one integer, and the digits of a number in [1, 2) at the same time, which takes one
instruction to compare where float64 runs at half the rate of float32. Without the places it is the half of
that, and an integer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.triton import layout
from khot._kernels.triton.launch import launch
from khot._kernels.triton.selection import key_of, number
from khot._kernels.triton.sizes import cdiv

CHUNK = 1024  # entries that one warp sorts or merges: threads exchange them without shared memory
HELD = 32  # of them in each thread, whose exchanges take the least
PROBES = 32  # of a step of a search
# Entries of a row, and of a batch at least. On an H100 torch's sort takes some 30 ps an entry of rows of up
# to 4,096, which it sorts in one launch, and 83 ps of longer ones, as measured. Chunks take 20 ps and each
# merge 5.5 ps, as modelled: 31 ps for 4,096 entries, and 53 ps for 65,536. A smaller batch does not fill a
# device.
SHORTEST, LONGEST, LEAST = 4097, 1 << 16, layout.SMALL_BATCH
PLACES, PLACE = tl.constexpr(20), tl.constexpr((1 << 20) - 1)  # binary digits of a place, and all of them
ONE = tl.constexpr(0x3FF << 52)  # the digits of 1.0
LAST = tl.constexpr((0x400 << 52) - 1)  # behind all entries, and below 2.0
LAST_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _merged(digits, DOUBLES: tl.constexpr):
    """Rows of digits in ascending order, of which the first ones ascend and the others descend."""
    if DOUBLES:
        digits = digits.to(tl.float64, bitcast=True)
    digits = tl.bitonic_merge(digits)
    return digits.to(tl.int64, bitcast=True) if DOUBLES else digits


@triton.constexpr_function
def _doublings(size):
    return size.bit_length() - 1


@triton.jit
def _sorted(digits, DOUBLES: tl.constexpr, CHUNK: tl.constexpr):
    """Digits in ascending order. Runs of 2, 4, 8, … entries ascend and descend in turn. Digits of those that
    descend are turned before and after, so that all exchanges have one direction, which `tl.sort` looks up at
    each of them."""
    for power in tl.static_range(1, _doublings(CHUNK) + 1):
        odd = tl.arange(0, CHUNK >> power)[:, None] & 1
        turned = (odd.to(tl.int64) << 63) if DOUBLES else -odd.to(digits.dtype)
        digits = tl.reshape(digits, (CHUNK >> power, 1 << power)) ^ turned
        digits = _merged(digits, DOUBLES) ^ turned
    return tl.reshape(digits, (CHUNK,))


# Where the compiler does not know that rows begin at multiples of 16 bytes, each thread reads single entries,
# and those of a warp are neighbours.
@triton.jit(do_not_specialize=["x_stride", "n", "parts"])
def _sort_chunks(
    x_pointer, x_stride, digits_pointer, n, parts,
    INDEXED: tl.constexpr, DOUBLES: tl.constexpr, CHUNK: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64) // parts, tl.program_id(0) % parts
    WIDTH: tl.constexpr = CHUNK // HELD
    column = part * CHUNK + tl.arange(0, HELD)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_pointer + row * x_stride + column, mask=column < n, other=0).to(tl.float32)
    digits = ~key_of(x)
    if INDEXED:
        digits = (digits ^ -0x80000000).to(tl.uint32, bitcast=True).to(tl.int64)
        digits = tl.where(column < n, (digits << PLACES) | column | ONE, LAST)
    else:
        digits = tl.where(column < n, digits, LAST_KEY)
    # their order is free, so that a thread's entries, a warp apart, become neighbours without a move
    digits = _sorted(tl.trans(digits), DOUBLES, CHUNK)
    column = part * CHUNK + tl.arange(0, CHUNK)
    tl.store(digits_pointer + row * n + column, digits, mask=column < n)


@triton.jit
def _narrow(least, more, count, a_at, b_at, PROBES: tl.constexpr):
    """One step of a search for how many of the first `count` entries of two merged runs come from the first
    run: at least `least`, and at most `more` beside these."""
    step = more // PROBES + 1
    a = least + (tl.arange(0, PROBES) + 1) * step - 1
    there = a < least + more
    taken = tl.load(a_at + a, mask=there, other=0) < tl.load(b_at + (count - 1 - a), mask=there, other=0)
    passed = tl.sum(tl.where(there & taken, 1, 0), axis=0) * step
    return least + passed, tl.minimum(more - passed, step - 1)


@triton.jit(do_not_specialize=["run", "tiles"])
def _merge_runs(
    digits_pointer, merged_pointer, out_pointer, index_pointer, n, run, tiles,
    INDEXED: tl.constexpr, DOUBLES: tl.constexpr, CHUNK: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """A tile of two merged runs; of the last two, the entries themselves."""
    row, start = tl.program_id(0).to(tl.int64) // tiles, tl.program_id(0) % tiles * CHUNK
    base = start // (2 * run) * (2 * run)
    a_all = tl.minimum(run, n - base)
    b_all = tl.minimum(run, n - base - a_all)
    a_at = digits_pointer + row * n + base
    b_at = a_at + run
    first = start - base
    end = tl.minimum(first + CHUNK, a_all + b_all)
    a, a_end = tl.maximum(first - b_all, 0), tl.maximum(end - b_all, 0)
    more, more_end = tl.minimum(first, a_all) - a, tl.minimum(end, a_all) - a_end
    while (more > 0) | (more_end > 0):
        a, more = _narrow(a, more, first, a_at, b_at, PROBES)
        a_end, more_end = _narrow(a_end, more_end, end, a_at, b_at, PROBES)
    b, b_end, lane = first - a, end - a_end, tl.arange(0, CHUNK)
    of_a, behind = lane < a_end - a, CHUNK - 1 - lane
    at = tl.where(of_a, a + lane, run + b + behind)
    valid = of_a | (behind < b_end - b)
    digits = tl.load(a_at + at, mask=valid, other=LAST if INDEXED else LAST_KEY)
    digits = _merged(digits, DOUBLES)
    to, there = row * n + start + lane, start + lane < n
    if out_pointer is None:
        tl.store(merged_pointer + to, digits, mask=there)
    else:
        if INDEXED:
            tl.store(index_pointer + to, (digits & PLACE).to(tl.int32), mask=there)
            digits = (digits >> PLACES).to(tl.int32) ^ -0x80000000
        tl.store(out_pointer + to, number(~digits).to(out_pointer.dtype.element_ty), mask=there)


KERNELS = (_sort_chunks, _merge_runs)


# ---------------------------------------------------------------------------------------------- the host


def descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in descending order, and the places that their entries came from, of 32 or 64 bits."""
    if serves(x):
        return sort_rows(x)
    return torch.sort(x.contiguous(), dim=-1, descending=True, stable=True)


def descending_values(x: Tensor) -> Tensor:
    """The rows in descending order alone."""
    return sort_rows(x, False)[0] if serves(x) else x.sort(-1, descending=True).values


def serves(x: Tensor) -> bool:
    """Whether rows are sorted here, and not by torch."""
    small = x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return small and SHORTEST <= x.shape[-1] <= LONGEST and x.numel() >= LEAST


def sort_rows(x: Tensor, indexed: bool = True) -> tuple[Tensor, Tensor]:
    """:func:`descending`, of rows of more than one chunk; unless indexed, the places hold anything."""
    n = x.shape[-1]
    rows, chunks = x.numel() // n, cdiv(n, CHUNK)
    values, order = x.new_empty(x.shape), x.new_empty(x.shape if indexed else 0, dtype=torch.int32)
    digits = x.new_empty(x.numel(), dtype=torch.int64 if indexed else torch.int32)
    which: dict[str, Any] = {
        "INDEXED": indexed, "DOUBLES": indexed and layout.compares_doubles(x.device), "CHUNK": CHUNK,
        "num_warps": 1,
    }  # fmt: skip
    launch(_sort_chunks, rows * chunks, *layout.rows(x, n), digits, n, chunks, HELD=HELD, **which)
    run, merged = CHUNK, digits.new_empty(digits.shape if n > 2 * CHUNK else 0)
    while 2 * run < n:
        launch(_merge_runs, rows * chunks, digits, merged, None, None, n, run, chunks, PROBES=PROBES, **which)
        digits, merged, run = merged, digits, 2 * run
    launch(
        _merge_runs, rows * chunks, digits, None, values, order, n, run, chunks, PROBES=PROBES, **which
    )  # fmt: skip
    return values, order
