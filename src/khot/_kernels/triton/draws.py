"""Uniform random numbers, and the draws of k units that stand on them.

A number is computed where it is needed, from the seed, the row and the column (`_kernels.reference.philox`),
so that a draw reads the probabilities and writes the sample, and nothing else passes through memory.

Pareto sampling compares the odds e^(logit U − θ) instead of their logarithms. Of these about k lie below 1,
with a standard deviation of 1/√d, d = Σπ(1 − π): the threshold is sought from there, by the number of keys
below a guess. A row that one program holds takes one launch. A longer one takes three: its sums; its keys in
float32, which decide all units but those with a key near 1; and the keys of these in float64, with the choice
among them. One more launch serves the rows for which the formula does not hold (:mod:`.calibration`). It
finds out on the device which these are: nothing waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import draws as reference
from khot._kernels.reference import philox
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Drawn
from khot._kernels.triton.calibration import LARGEST_VARIANCE, VECTORS, calibrate
from khot._kernels.triton.fast import LOG2E, double, plus, reciprocal, reciprocal64, total
from khot._kernels.triton.functions import place
from khot._kernels.triton.launch import launch
from khot._kernels.triton.mask import topk_mask
from khot._kernels.triton.sizes import cdiv, next_power_of_2

HELD = 4096  # entries of a row that one program holds, with a key of 64 bits each
PIECE = 4  # entries of a thread in a piece
MOST_PARTS = 512  # of a row, each of which reads the sums of all
LISTED = 512  # units near the threshold that are looked at together
CHUNK = 512  # entries of a long row that a program holds at a time
CALIBRATED = 1 << 20  # units at most for which there is memory to calibrate them at a time
CAREFUL = 512  # programs that calibrate, about twice as many as a large device runs at a time
LOOK = tl.constexpr(32)  # rows of a program that are looked at together
CALIBRATED_WIDTH = 64  # units of a row that are calibrated side by side, for 16 nodes or 8 frequencies each
CALIBRATED_WARPS = 8
# The k-th key lies within so many standard deviations, but for one row in 10⁷. The last launch draws other
# rows from all of their keys, which gives the same sample.
DEVIATIONS = tl.constexpr(5.5)
IMPOSSIBLE = tl.constexpr(1e-290)  # a probability that stands for all smaller ones, −0 among them
SPACING = tl.constexpr(2.0**-23)  # of the uniforms by which float32 decides
ROUNDED = tl.constexpr(1e-6)
ADJUSTMENT = tl.constexpr(0.0482)  # the most that p(1 − p)(p − ½) may be
MARGIN = tl.constexpr(1e-5)  # for roundings of the ends
GUESSES = tl.constexpr(12)  # by interpolation, before bisection takes over
ROUNDS = tl.constexpr(philox.ROUNDS)
MULTIPLIER_A, MULTIPLIER_B = (tl.constexpr(m) for m in philox.MULTIPLIERS)
STEP_A, STEP_B = (tl.constexpr(s) for s in philox.KEY_STEPS)
UNBOUNDED = tl.constexpr(0x7FF0000000000000)  # the bits of +inf, which no key exceeds
SIZES = ["parts", "length", "capacity", "nodes", "column"]  # for which Triton need not compile anew

# ------------------------------------------------------------------------------- uniform random numbers


@triton.jit
def _midpoint(high, low):
    """(x + ½)/2⁵² for the upper 52 of 64 bits: 1 + x/2⁵² less 1 − 2⁻⁵³."""
    bits = (high.to(tl.uint64) << 20) | (low >> 12).to(tl.uint64) | 0x3FF0000000000000
    return bits.to(tl.float64, bitcast=True) - 0.99999999999999988898


@triton.jit
def _words(seed, row, block):
    """32 random bits for each of the columns 2·block and 2·block + 1, each with 32 that come after them."""
    k, m = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    block, row = block.to(tl.int64), block * 0 + row
    a, b, c, d = (
        block.to(tl.uint32),
        (block >> 32).to(tl.uint32),
        row.to(tl.uint32),
        (row >> 32).to(tl.uint32),
    )
    for _ in tl.static_range(ROUNDS):
        p, q = a.to(tl.uint64) * MULTIPLIER_A, c.to(tl.uint64) * MULTIPLIER_B
        a, b = (q >> 32).to(tl.uint32) ^ b ^ k, q.to(tl.uint32)
        c, d = (p >> 32).to(tl.uint32) ^ d ^ m, p.to(tl.uint32)
        k, m = k + STEP_A, m + STEP_B
    return b, a, d, c


@triton.jit
def uniforms(seed, row, block):
    """The uniforms of the columns 2·block and 2·block + 1, in float64."""
    a, a_after, b, b_after = _words(seed, row, block)
    return _midpoint(a, a_after), _midpoint(b, b_after)


@triton.jit
def _uniform_of(seed, row, column):
    """The uniforms of single columns."""
    a, a_after, b, b_after = _words(seed, row, column // 2)
    odd = column % 2 == 1
    return _midpoint(tl.where(odd, b, a), tl.where(odd, b_after, a_after))


@triton.jit
def columns_of(pair):
    """Both columns of a pair, (pairs, 2)."""
    return 2 * pair[:, None] + tl.arange(0, 2)[None, :]


@triton.jit(do_not_specialize=SIZES)
def _uniform(seed_pointer, out_pointer, n, offset, parts, PAIRS: tl.constexpr):
    row, part = place(parts)
    pair = (part * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)
    first, second = uniforms(tl.load(seed_pointer), row, offset // 2 + pair)
    column = columns_of(pair) - offset % 2
    there = (column >= 0) & (column < n)
    tl.store(out_pointer + row * n + column, tl.join(first, second), mask=there)


def uniform(seed: Tensor, rows: int, n: int, offset: int) -> Tensor:
    """`philox.uniform_kernel`, in Triton."""
    out = torch.empty((rows, n), dtype=torch.float64, device=seed.device)
    if out.numel() == 0:
        return out
    pairs = min(next_power_of_2(n // 2 + 1), CHUNK // 2)
    parts = cdiv(n // 2 + 1, pairs)  # one pair more, for an odd offset
    launch(_uniform, rows * parts, seed, out, n, offset, parts, PAIRS=pairs, num_warps=4)
    return out


# -------------------------------------------------------------------------------------- order sampling


@triton.jit(do_not_specialize=SIZES)
def _part_order_keys(theta, seed_pointer, out_pointer, n, parts, PAIRS: tl.constexpr):
    """θ − logit U, the greatest of which are chosen; finite, so that k of them always are."""
    row, part = place(parts)
    pair = part * PAIRS + tl.arange(0, PAIRS)
    column = columns_of(pair)
    there = column < n
    own_theta = tl.load(theta.pointer + row * theta.stride + column, mask=there, other=0.0)
    own_theta = double(own_theta)
    first, second = uniforms(tl.load(seed_pointer), row, pair)
    u = tl.join(first, second)
    key = own_theta - tl.log(u / (1 - u))
    # a unit whose θ is NaN comes last
    key = tl.where(own_theta == own_theta, tl.minimum(tl.maximum(key, -1.6e308), 1.6e308), -1.7e308)
    tl.store(out_pointer + row * n + column, key, mask=there)


def order_sample(theta: Tensor, k: Tensor, seed: Tensor) -> Tensor:
    """`draws.order_sample`, in Triton."""
    n = theta.shape[-1]
    if theta.numel() == 0:
        return torch.empty_like(theta, dtype=torch.bool, memory_format=torch.contiguous_format)
    keys = torch.empty(theta.shape, dtype=torch.float64, device=theta.device)
    pairs = min(next_power_of_2(cdiv(n, 2)), CHUNK // 2)
    parts = cdiv(n, 2 * pairs)
    launch(
        _part_order_keys,
        theta.numel() // n * parts,
        layout.rows(theta, n),
        seed,
        keys,
        n,
        parts,
        PAIRS=pairs,
        num_warps=4,
    )
    return topk_mask(keys, k).bool()


# ------------------------------------------------------------------------------------- Pareto sampling


@triton.jit
def _two_numbers(pointer, pair, n):
    """p of both columns of each pair, and 0 beyond the row."""
    column = columns_of(pair)
    return tl.split(tl.load(pointer + column, mask=column < n, other=0.0))


@triton.jit
def moments_of(x):
    """Probabilities, and p − p², which is NaN of what is none."""
    p = double(x)
    variance = p - p * p
    return p, tl.where(variance >= 0, variance, float("nan"))


@triton.jit
def plan_of(total, variance, least, tolerance):
    """How many units are drawn, of which a phantom with the probability that follows; d; and whether the
    formula of the adjustment holds, which it does not of what is not of probabilities."""
    nearest = tl.floor(total + 0.5)
    phantom = tl.where(tl.abs(total - nearest) <= tolerance, 0.0, tl.ceil(total) - total)
    d = variance + (phantom - phantom * phantom)
    fair = d >= least
    k = tl.where(fair, tl.floor(total + phantom + 0.5), 1.0).to(tl.int32)
    return k, tl.where(fair, phantom, 0.0), tl.where(fair, d, 1.0), fair


@triton.jit
def _key(p, u, scale):
    """The bits of e^(logit u − θ), which are in the order of the numbers, for
    θ = logit p − p(1 − p)(p − ½)/d².

    As d ≥ 2.5, the last term is less than 0.008, and its exponential's series needs few terms.
    """
    q = 1 - p
    a = p * q * (p - 0.5) * scale
    power = 1 + a * (1 + a * (1 / 2 + a * (1 / 6 + a * (1 / 24 + a * (1 / 120 + a * (1 / 720))))))
    odds = u * q * power * reciprocal64(tl.maximum((1 - u) * p, IMPOSSIBLE))
    return odds.to(tl.int64, bitcast=True)


@triton.jit
def _keys(first, second, pair, seed, row, n, phantom, scale):
    """The keys of both columns of each pair, with the phantom unit after the row."""
    first, second = double(first), double(second)
    first = tl.where(2 * pair == n, phantom, first)
    second = tl.where(2 * pair + 1 == n, phantom, second)
    u, v = uniforms(seed, row, pair)
    return _key(first, u, scale), _key(second, v, scale)


@triton.jit
def _as_key(x):
    return x.to(tl.int64, bitcast=True)


@triton.jit
def _guess(at, count, k, low, high, below, above, per_key, tries):
    """The next guess of the threshold and the next bracket, from the number of keys up to the last guess.

    Up to low there are `below` keys, less than k, and up to high `above`, more than k.
    """
    low, below = tl.where(count < k, at, low), tl.where(count < k, count, below)
    high, above = tl.where(count > k, at, high), tl.where(count > k, count, above)
    # an empty side is stepped towards, further every time, by the keys' density
    step = (k - count).to(tl.float32) * (1 + tries) * per_key
    step = tl.minimum(tl.maximum(step * LOG2E, -60.0), 60.0)
    stepped = at.to(tl.float64, bitcast=True) * tl.exp2(step).to(tl.float64)
    share = ((k - below).to(tl.float32) + 0.5) * reciprocal((above - below + 1).to(tl.float32))
    start = tl.where(low < 0, 0, low).to(tl.float64, bitcast=True)
    between = start + (high.to(tl.float64, bitcast=True) - start) * share.to(tl.float64)
    guess = _as_key(tl.where((low < 0) | (high == UNBOUNDED), stepped, between))
    middle = low + ((high - low) >> 1)
    at = tl.where((guess > low) & (guess < high) & (tries < GUESSES), guess, middle)
    return at, low, high, below, above


@triton.jit
def _seek(up_to: tl.constexpr, equal_up_to: tl.constexpr, given, k, keys, per_key, n, running):
    """Which keys are the k smallest: those up to the first result, and of those that equal the second, the
    ones up to the column that is the third.

    up_to(given, at) counts the keys up to at, and equal_up_to(given, key, column) those that equal key, up to
    the column. There are so many keys in all.
    """
    zero = tl.zeros((), tl.float64)
    at, low, high = _as_key(zero + 1.0), _as_key(zero) - 1, _as_key(zero + float("inf"))
    below, above, tries = k * 0, k * 0 + keys, k * 0
    at = tl.where(k == 0, low, tl.where(k == keys, high, at))  # which has k keys up to it
    seeks = running
    while running:
        count = up_to(given, at)
        running = count != k
        if running:
            at, low, high, below, above = _guess(at, count, k, low, high, below, above, per_key, tries)
            tries += 1
            running = high - low > 1
            at = tl.where(running, at, low)

    last = n
    tied = seeks & (high - low <= 1)
    if tied:
        start = k * 0 - 1
        while last - start > 1:
            middle = (start + last) // 2
            reached = equal_up_to(given, high, middle) >= k - below
            last, start = tl.where(reached, middle, last), tl.where(reached, start, middle)
    return at, tl.where(tied, high, -1), last


@triton.jit
def _held(keys, at):
    """Of keys in pieces, those of even and of odd columns."""
    number = tl.where(keys[0] <= at, 1, 0)
    for i in tl.static_range(1, len(keys)):
        number += tl.where(keys[i] <= at, 1, 0)
    return tl.sum(number)


@triton.jit
def _held_equal(keys, key, column):
    pair = 2 * tl.arange(0, keys[0].shape[0])
    number = tl.where((keys[0] == key) & (pair <= column), 1, 0)
    for i in tl.static_range(1, len(keys)):
        first = 2 * (i // 2) * keys[0].shape[0] + i % 2
        number += tl.where((keys[i] == key) & (pair + first <= column), 1, 0)
    return tl.sum(number)


@triton.jit
def _entry(given, start, n):
    """Keys of a list in memory, their columns, and which of them there are."""
    keys_pointer, columns_pointer, found, slots = given
    slot = start + slots
    there = slot < found
    column = slot if columns_pointer is None else tl.load(columns_pointer + slot, mask=there, other=n)
    return tl.load(keys_pointer + slot, mask=there, other=UNBOUNDED), column, there


@triton.jit
def _listed(given, at):
    number = given[3] * 0
    for start in range(0, given[2], given[3].shape[0]):
        key, _, there = _entry(given, start, 0)
        number += tl.where((key <= at) & there, 1, 0)
    return tl.sum(number)


@triton.jit
def _listed_equal(given, key, last):
    number = given[3] * 0
    for start in range(0, given[2], given[3].shape[0]):
        each, column, there = _entry(given, start, 0)
        number += tl.where((each == key) & (column <= last) & there, 1, 0)
    return tl.sum(number)


@triton.jit
def _mark(given, k, d, out_pointer, n, running):
    """1 for the k units with the smallest of the keys that are listed."""
    per_key = reciprocal(d.to(tl.float32))
    at, level, last = _seek(_listed, _listed_equal, given, k, given[2], per_key, n, running)
    one = (given[3] * 0 + 1).to(tl.float32).to(out_pointer.dtype.element_ty)
    for start in range(0, given[2], given[3].shape[0]):
        key, column, there = _entry(given, start, n)
        chosen = (key <= at) | ((key == level) & (column <= last))
        tl.store(out_pointer + column, one, mask=chosen & there & (column < n))


@triton.jit
def _load_pairs(x_row, n, PIECES: tl.constexpr, PAIRS: tl.constexpr):
    """p of a row in pieces, those of even and of odd columns."""
    p = ()
    for i in tl.static_range(PIECES):
        p = p + _two_numbers(x_row, i * PAIRS + tl.arange(0, PAIRS), n)
    return p


@triton.jit
def _draw(p, out_row, seed, row, n, k, phantom, d, fair, PIECES: tl.constexpr, PAIRS: tl.constexpr):
    """Draw k of the units with these p, of which the phantom unit is one if there is room for it."""
    pair, scale = tl.arange(0, PAIRS), 1 / (d * d)
    keys = ()
    for i in tl.static_range(PIECES):
        keys = keys + _keys(p[2 * i], p[2 * i + 1], i * PAIRS + pair, seed, row, n, phantom, scale)

    at, level, last = _seek(
        _held, _held_equal, keys, k, 2 * PIECES * PAIRS, reciprocal(d.to(tl.float32)), n, fair
    )
    for i in tl.static_range(PIECES):
        column = columns_of(i * PAIRS + pair)
        key = tl.join(keys[2 * i], keys[2 * i + 1])
        chosen = (key <= at) | ((key == level) & (column <= last))
        out = tl.where(chosen, 1.0, 0.0).to(out_row.dtype.element_ty)
        tl.store(out_row + column, out, mask=column < n)


@triton.jit
def _pareto(
    x, seed_pointer, out_pointer, drawn_pointer, probabilities_pointer, n, least, tolerance,
    PIECES: tl.constexpr, PAIRS: tl.constexpr, MORE: tl.constexpr, MORE_PAIRS: tl.constexpr,
    WHOLE: tl.constexpr = False,
):  # fmt: skip
    """A row whose sum is whole has no phantom unit. Any other needs MORE pieces, or MORE_PAIRS in each.

    WHOLE leaves out all other rows: for counting instructions, and for nothing else."""
    row = tl.program_id(0).to(tl.int64)
    x_row, out_row, seed = x.pointer + row * x.stride, out_pointer + row * n, tl.load(seed_pointer)
    p, sums = _load_pairs(x_row, n, PIECES, PAIRS), ()
    for i in tl.static_range(2 * PIECES):
        sums = plus(sums, moments_of(p[i]))
    sums = total(sums, 1)
    k, phantom, d, fair = plan_of(sums[0], sums[1], least, tolerance)
    if WHOLE | ((MORE == PIECES) & (MORE_PAIRS == PAIRS)):  # noqa: SIM114 (known when it is compiled)
        _draw(p, out_row, seed, row, n, k, phantom, d, fair, PIECES, PAIRS)
    elif phantom == 0:
        _draw(p, out_row, seed, row, n, k, phantom, d, fair, PIECES, PAIRS)
    else:
        more = _load_pairs(x_row, n, MORE, MORE_PAIRS)
        _draw(more, out_row, seed, row, n, k, phantom, d, fair, MORE, MORE_PAIRS)
    tl.store(drawn_pointer + row, fair)
    if row == 0:
        tl.store(probabilities_pointer, True)  # which a row that is none takes back, in the next launch


@triton.jit
def _moments_between(x_pointer, begin, end, n, WIDTH: tl.constexpr):
    """The sums of :func:`moments_of` over columns of a row."""
    zero = tl.zeros((WIDTH,), tl.float64)
    sums = (zero, zero)
    for start in range(begin, end, WIDTH):
        column = start + tl.arange(0, WIDTH)
        sums = plus(sums, moments_of(tl.load(x_pointer + column, mask=column < n, other=0.0)))
    return total(sums, 1)


@triton.jit(do_not_specialize=SIZES)
def _part_moments(
    x, sums_pointer, found_pointer, columns_pointer, n, length, parts, capacity, CHUNK: tl.constexpr,
):  # fmt: skip
    """The sums of a part. The row's list begins with its phantom unit."""
    row, part = place(parts)
    sums = _moments_between(
        x.pointer + row * x.stride, part * length, tl.minimum(n, (part + 1) * length), n, CHUNK
    )
    at = sums_pointer + (row * 2) * parts + part
    tl.store(at, sums[0])
    tl.store(at + parts, sums[1])
    if part == 0:
        tl.store(found_pointer + row, 1)
        tl.store(columns_pointer + row * capacity, n)


@triton.jit
def _row_plan(sums_pointer, row, parts, least, tolerance, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    at, there = sums_pointer + row * 2 * parts + part, part < parts
    sums = (tl.load(at, mask=there, other=0.0), tl.load(at + parts, mask=there, other=0.0))
    sums = total(sums, 1)
    return plan_of(sums[0], sums[1], least, tolerance)


@triton.jit
def _far(x, word, low, high):
    """Whether u(1 − p)/((1 − u)p) is certainly less than low, and whether it is certainly greater than high,
    if of u the upper bits are known. ROUNDED covers eight roundings, of both sides."""
    p = x if x.dtype == tl.float64 else x.to(tl.float32)
    p, q = p.to(tl.float32), (1 - p).to(tl.float32)
    u = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1
    least, most = low * p, high * p
    under = (u + SPACING) * (q + least) < least * (1 - ROUNDED)
    return under, u * (q + most) > most * (1 + ROUNDED)


@triton.jit(do_not_specialize=SIZES)
def _part_keys(
    x, seed_pointer, sums_pointer, below_pointer, found_pointer, columns_pointer, out_pointer, n, length,
    parts, capacity, least, tolerance, PARTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Choose the part's units with keys far below 1, and list those with keys near 1, in any order."""
    row, part = place(parts)
    _, _, d, _ = _row_plan(sums_pointer, row, parts, least, tolerance, PARTS)
    seed, d = tl.load(seed_pointer), d.to(tl.float32)
    width = (1 / tl.sqrt(d)) * DEVIATIONS + (1 / (d * d)) * ADJUSTMENT + MARGIN
    low, high = tl.exp(-width), tl.exp(width)
    columns_pointer += row * capacity
    number = tl.zeros((PAIRS,), tl.int32)
    for start in range(part * length, tl.minimum(n, (part + 1) * length), 2 * PAIRS):
        pair = start // 2 + tl.arange(0, PAIRS)
        column = columns_of(pair)
        first, second = _two_numbers(x.pointer + row * x.stride, pair, n)
        words = _words(seed, row, pair)
        a_under, a_over = _far(first, words[0], low, high)
        b_under, b_over = _far(second, words[2], low, high)
        number += tl.where(a_under, 1, 0) + tl.where(b_under, 1, 0)
        out = tl.join(tl.where(a_under, 1.0, 0.0), tl.where(b_under, 1.0, 0.0))
        tl.store(out_pointer + row * n + column, out.to(out_pointer.dtype.element_ty), mask=column < n)
        near = tl.join(~(a_under | a_over), ~(b_under | b_over)) & (column < n)
        slot = tl.atomic_add(found_pointer + row + column * 0, column * 0 + 1, mask=near, sem="relaxed")
        tl.store(columns_pointer + slot, column, mask=near & (slot < capacity))
    tl.store(below_pointer + row * parts + part, tl.sum(number))


@triton.jit(do_not_specialize=SIZES)
def _choose(
    x, seed_pointer, sums_pointer, below_pointer, found_pointer, keys_pointer, columns_pointer, to, n, parts,
    capacity, least, tolerance, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Choose among the units that are listed. All other keys are outside the interval that has to contain
    the threshold."""
    row = tl.program_id(0).to(tl.int64)
    k, phantom, d, fair = _row_plan(sums_pointer, row, parts, least, tolerance, PARTS)
    part = tl.arange(0, PARTS)
    k -= tl.sum(tl.load(below_pointer + row * parts + part, mask=part < parts, other=0))
    found = tl.load(found_pointer + row)
    listed = fair & (found <= capacity)
    found = tl.where(listed, found, 0)
    seed, scale, slots = tl.load(seed_pointer), 1 / (d * d), tl.arange(0, WIDTH)
    width = DEVIATIONS / tl.sqrt(d)
    low, high = _as_key(tl.exp(-width)), _as_key(tl.exp(width))
    keys_pointer += row * capacity
    columns_pointer += row * capacity
    under, up_to = slots * 0, slots * 0
    for start in range(0, found, WIDTH):
        there = start + slots < found
        column = tl.load(columns_pointer + start + slots, mask=there, other=n)
        p = double(tl.load(x.pointer + row * x.stride + column, mask=column < n, other=0.0))
        key = _key(tl.where(column == n, phantom, p), _uniform_of(seed, row, column), scale)
        tl.store(keys_pointer + start + slots, key, mask=there)
        under += tl.where(there & (key < low), 1, 0)
        up_to += tl.where(there & (key <= high), 1, 0)
    tl.debug_barrier()
    drawn = listed & (k >= tl.sum(under)) & (k <= tl.sum(up_to))
    given = (keys_pointer, columns_pointer, tl.where(drawn, found, 0), slots)
    _mark(given, k, d, to.out + row * n, n, drawn)
    tl.store(to.drawn + row, drawn)
    if row == 0:
        tl.store(to.probabilities, True)  # which a row that is none takes back, in the next launch


@triton.jit
def _draw_carefully(
    x_row, out_row, row, seed, numbers_pointer, keys_pointer, singles_pointer, n, least, tolerance,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Draw from a row, and return whether it is of probabilities; if not, it is NaN."""
    sums = _moments_between(x_row, 0, n, n, WIDTH)
    k, phantom, d, fair = plan_of(sums[0], sums[1], 0.0, tolerance)
    for start in range(0, n, WIDTH):
        column = start + tl.arange(0, WIDTH)
        blank = tl.where(fair, 0.0, float("nan")).to(out_row.dtype.element_ty)
        tl.store(out_row + column, blank, mask=column < n)
    if fair:
        calibrated = d < least
        units = n + 1
        if calibrated:
            shift = (sums[0] + phantom - k) / d
            units = calibrate(x_row, n, k, phantom, shift, d, numbers_pointer, singles_pointer, WIDTH)
        keys_row = keys_pointer + n + 1
        d = tl.where(calibrated, 1.0, d)
        scale = 1 / (d * d)
        for start in range(0, units, 2 * PAIRS):
            pair = start // 2 + tl.arange(0, PAIRS)
            column = columns_of(pair)
            u, v = uniforms(seed, row, pair)
            u = tl.join(u, v)
            if calibrated:
                theta = tl.load(numbers_pointer + column, mask=column < units, other=0.0)
                key = _as_key(u / (1 - u) * tl.exp(-theta))
            else:
                p = double(tl.load(x_row + column, mask=column < n, other=0.0))
                key = _key(tl.where(column == n, phantom, p), u, scale)
            tl.store(keys_row + column, key, mask=column < units)
        tl.debug_barrier()
        _mark((keys_row, None, units, tl.arange(0, 2 * PAIRS)), k, d, out_row, n, fair)
        tl.debug_barrier()
    return fair


@triton.jit(do_not_specialize=["rows", "programs"])
def _careful(
    x, seed_pointer, out_pointer, drawn_pointer, probabilities_pointer, numbers_pointer, keys_pointer,
    singles_pointer, n, least, tolerance, rows, programs, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The rows that have no draw yet: d is less than `least`, and they are calibrated; or too many keys, or
    too few, were near 1. A row that is not of probabilities is NaN, and the flag for all rows is lowered.

    Numbers, keys and singles are three views of the same memory: of each program, the θ and the keys of a
    row, and more vectors. Calibration needs all of it.
    """
    program = tl.program_id(0).to(tl.int64)
    seed, at = tl.load(seed_pointer), program * VECTORS * (n + 1)
    numbers_pointer += at
    keys_pointer += at
    singles_pointer += 2 * at
    first = program
    while first < rows:
        turn = tl.arange(0, LOOK)
        look = first + turn * programs
        drawn = tl.load(drawn_pointer + look, mask=look < rows, other=True).to(tl.int32)
        left = tl.where(drawn == 0, turn, LOOK)
        next_ = tl.min(left)
        while next_ < LOOK:
            row = first + next_ * programs
            fair = _draw_carefully(
                x.pointer + row * x.stride, out_pointer + row * n, row, seed, numbers_pointer, keys_pointer,
                singles_pointer, n, least, tolerance, WIDTH, PAIRS,
            )  # fmt: skip
            if fair == 0:
                tl.store(probabilities_pointer, False)
            left = tl.where(left == next_, LOOK, left)
            next_ = tl.min(left)
        first += LOOK * programs


def which(n: int) -> dict[str, int]:
    """The constants of rows that one program holds: pieces and pairs of entries in each, for a row and for
    one with a phantom unit."""
    warps = min(16, max(1, next_power_of_2(n) // 256))
    pairs, more = (min(32 * warps * PIECE, max(2, next_power_of_2(units))) // 2 for units in (n, n + 1))
    return {
        "PIECES": cdiv(n, 2 * pairs), "PAIRS": pairs, "MORE": cdiv(n + 1, 2 * more), "MORE_PAIRS": more,
        "num_warps": warps,
    }  # fmt: skip


def pareto_sample(probs: Tensor, seed: Tensor, least: float, tolerance: float) -> tuple[Tensor, Tensor]:
    """`draws.pareto_sample`, in Triton where few rows are calibrated. Nothing waits for the device there: a
    row that is not of probabilities is NaN."""
    batch, n = probs.shape[:-1], probs.shape[-1]
    if not probs.numel() or not 2.5 <= least <= LARGEST_VARIANCE:  # `_key` has terms enough from 2.5 on
        return reference.pareto_sample(probs, seed, least, tolerance)
    rows, source = batch.numel(), layout.rows(probs, n)
    out = probs.new_empty(probs.shape)
    flags = torch.empty(rows + 16, dtype=torch.bool, device=probs.device)
    drawn, probabilities = flags[16:], flags[0]  # both where Triton takes an address to be aligned
    _by_formula(source, seed, out, drawn, probabilities, n, least, tolerance)
    programs = min(rows, CAREFUL, max(1, CALIBRATED // n))
    numbers = torch.empty(programs * VECTORS.value * (n + 1), dtype=torch.float64, device=probs.device)
    width = max(2, min(CALIBRATED_WIDTH, next_power_of_2(n)))
    launch(
        _careful, programs,
        source, seed, out, drawn, probabilities, numbers, numbers.view(torch.int64),
        numbers.view(torch.float32), n, least, tolerance, rows, programs,
        WIDTH=width, PAIRS=width // 2, num_warps=CALIBRATED_WARPS, **layout.registers(),
    )  # fmt: skip
    return out, probabilities


def _by_formula(
    source: tuple[Tensor, int],
    seed: Tensor,
    out: Tensor,
    drawn: Tensor,
    probabilities: Tensor,
    n: int,
    least: float,
    tolerance: float,
) -> None:
    """Draw from the rows that are of probabilities and have a d of at least `least`; `drawn` says which."""
    rows = drawn.numel()
    if n <= HELD:
        launch(
            _pareto, rows, source, seed, out, drawn, probabilities, n, least, tolerance,
            **which(n), **layout.registers(),
        )  # fmt: skip
        return
    parts = min(cdiv(n, CHUNK), max(1, layout.PROGRAMS // rows), MOST_PARTS)
    length = cdiv(cdiv(n, parts), CHUNK) * CHUNK
    parts = cdiv(n, length)
    capacity = next_power_of_2(64 + int(8 * n**0.5))  # twice what p = ½ lets expect
    sums = torch.empty(rows * parts * 2, dtype=torch.float64, device=out.device)
    keys = torch.empty(rows * capacity, dtype=torch.int64, device=out.device)
    columns = torch.empty(rows * (capacity + parts + 1), dtype=torch.int32, device=out.device)
    columns, below, found = columns.split([rows * capacity, rows * parts, rows])
    width, rule = {"PARTS": next_power_of_2(parts)}, (least, tolerance)
    launch(
        _part_moments, rows * parts,
        source, sums, found, columns, n, length, parts, capacity, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    launch(
        _part_keys, rows * parts,
        source, seed, sums, below, found, columns, out, n, length, parts, capacity, *rule,
        **width, PAIRS=CHUNK // 2, num_warps=4,
    )  # fmt: skip
    launch(
        _choose, rows,
        source, seed, sums, below, found, keys, columns, Drawn(out, drawn, probabilities), n, parts, capacity,
        *rule, **width, WIDTH=LISTED, num_warps=LISTED // 128,
    )  # fmt: skip


KERNELS = (_uniform, _part_order_keys, _pareto, _part_moments, _part_keys, _choose, _careful)
