"""How rows are laid out over programs, and what the host passes to the kernels."""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from khot import cdfs
from khot._kernels.triton import arguments, fast
from khot._kernels.triton.arguments import Law, Matrix, Rows, Solved, Threshold, Values
from khot._kernels.triton.float64_sums import BY
from khot._kernels.triton.functions import CDFS, OUTPUTS
from khot._kernels.triton.sizes import cdiv, next_power_of_2

RESIDENT = 32768  # entries of a row that stay on chip
PAIRS = 8192  # the same of entries that come in pairs, as a score and its cost
TOGETHER = 1024  # entries of short rows that share a program
CHUNK = 4096  # entries of a long row that a program holds at a time
PROGRAMS = 1024  # about as many as fill a large device several times over
RESCUE = 64  # entries per warp that a search in float64 takes at a time: more would not fit into registers
# Long rows have a program each where there are many of them, and where a row is done by one in the time that
# the host takes for the launches of a row split over programs. Both by reckoning.
STREAMS = 64  # rows
STREAMED = 1 << 18  # entries
# Of a row that is split over programs. A sample of s entries places the threshold with a deviation of at most
# √s/2 of its entries; it is taken in blocks that a warp reads at once. What the threshold may be among then
# is gathered if there is room.
SAMPLE = 16384
SAMPLE_BLOCK = 32
WINDOW = 65536
SMALL_BATCH = 1 << 18  # entries of a batch that fill a large device once


def block(n: int) -> tuple[int, int, int]:
    """Of a resident row: the width it is padded to, rows in a program, warps."""
    width = next_power_of_2(n)
    return width, max(1, TOGETHER // width), min(16, max(4, width // 1024))


_FLOAT32 = struct.Struct("f")


class Tile(NamedTuple):
    """How a program of the float32 kernels holds rows: in pieces of four entries per thread."""

    together: int
    pieces: int
    width: int  # of a piece
    warps: int
    streams: bool = False  # past the program, as much at a time
    in_words: bool = False  # two entries to a word


def tile(rows: int, n: int) -> Tile:
    """8 to 64 entries per thread, fewer if there are few rows; 16 at a time of a row longer than `RESIDENT`.

    A short row is held by a part of a warp, so that its sums need no barrier. Rows of 16 take 0.6 of the time
    with 32 in a warp that they take with 8 (on an H100).
    """
    if n > RESIDENT:
        return Tile(1, 4, 2048, 16, True)
    width = 1 << (n - 1).bit_length()
    together, warps = max(1, min(max(8, 512 // width), 32, 1024 // width)), min(16, max(1, width // 1024))
    if rows * width <= SMALL_BATCH:  # too few warps to hide a latency behind each other: shorter ones
        if together > 1:
            together //= 2
        else:
            warps = min(16, 4 * warps)
    piece = 128 * warps // together
    return Tile(together, cdiv(n, piece), piece, warps)


def fits_words(x: Tensor, stride: int, n: int) -> bool:
    """Whether a row of half precision, too long for a register an entry, is held two entries to a word: where
    PTX keeps the compiler from taking all words apart at once."""
    return (
        RESIDENT < n <= 2 * RESIDENT
        and x.element_size() == 2
        and (n | stride) % 2 == 0
        and x.data_ptr() % 4 == 0
        and (fast.PTX.value or fast.INTERPRETED.value)
    )


def word_tile(n: int) -> Tile:
    """Of such a row: 64 to 128 entries per thread. Two of the pieces make one of words."""
    return Tile(1, 2 * cdiv(n, 4096), 2048, 16, in_words=True)


def held(tile: Tile, n: int) -> dict[str, Any]:
    """The constants of a kernel that holds rows of n entries in this way."""
    return {
        "TOGETHER": tile.together,
        "PIECES": tile.pieces,
        "WIDTH": tile.width,
        "FULL": n == tile.pieces * tile.width,
        "num_warps": tile.warps,
    }


def constant(tile: Tile, n: int) -> arguments.Tile:
    """The same as one constant."""
    full = n == tile.pieces * tile.width
    return arguments.Tile(*tile[:3], full, tile.streams, RESCUE * tile.warps, tile.in_words)


def pair_tile(rows: int, n: int) -> Tile:
    """The same for entries that are pairs: 4 to 16 per thread, 8 at a time of a row longer than `PAIRS`."""
    if n > PAIRS:
        return STREAMED_PAIRS
    held = tile(rows, n)
    if held.pieces <= 4:
        return held
    together, warps = (held.together // 2, held.warps) if held.together > 1 else (1, 2 * held.warps)
    piece = 2 * held.width
    return Tile(together, cdiv(n, piece), piece, warps)


def splits(rows: int, n: int) -> bool:
    """Whether a row is split over programs."""
    return n > max(RESIDENT, STREAMED) and rows < STREAMS


#: A row of pairs that streams past one program.
STREAMED_PAIRS = Tile(1, 2, 2048, 16, True)


class Cut(NamedTuple):
    """How a row is cut into parts, and in how many entries at a time a program reads one."""

    parts: int
    length: int
    pieces: int
    width: int
    warps: int


def window(rows: int) -> int:
    """For how many entries that the threshold may be among there is room. Of many rows, programs may as well
    go through all entries."""
    return WINDOW if rows < STREAMS else 0


def part_tile(cut: Cut, pieces: int | None = None) -> arguments.Tile:
    """How a program streams past its part of a row."""
    return arguments.Tile(1, pieces or cut.pieces, cut.width, False, True, RESCUE * cut.warps)


def cut(rows: int, n: int) -> Cut:
    return Cut(*parts(rows, n), 4, CHUNK // 4, max(1, CHUNK // 512))


def sample() -> tuple[int, int, int]:
    """Of a program that holds a sample of a split row: pieces, their width, warps."""
    return 8, SAMPLE // 8, max(1, SAMPLE // 1024)


def registers() -> dict[str, int]:
    """How many registers a thread may have: the search in float64, which few rows need, is not to crowd the
    others out.

    Unless it is told how many, ptxas gives 64 to a thread of a program of 16 warps, so that it spills in the
    loops, and up to 180 to a thread of a smaller program.
    """
    return {"maxnreg": 128} if fast.PTX.value else {}


@functools.cache
def compares_doubles(device: torch.device) -> bool:
    """Whether the device compares numbers of float64 at half the rate of float32, as NVIDIA's for data
    centres do."""
    if not fast.PTX.value or device.type != "cuda" or not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return minor == 0 and major <= 10


def parts(rows: int, n: int) -> tuple[int, int]:
    """Into how many parts a long row is cut, and their length: enough programs to fill a device."""
    parts = min(cdiv(n, CHUNK), max(1, PROGRAMS // rows))
    length = cdiv(cdiv(n, parts), CHUNK) * CHUNK
    return cdiv(n, length), length


def rows(x: Tensor, n: int) -> Rows:
    """The rows of x one after another, and the distance between them."""
    flat = x if x.dim() == 2 else x.reshape(-1, n)
    if n > 1 and flat.stride(1) != 1:
        flat = flat.contiguous()
    return Rows(flat, flat.stride(0))


def matrix(value: Tensor, x: Tensor) -> Matrix:
    """A value of each entry of x: its rows, and the distances between rows and between columns."""
    flat = value.expand(x.shape).reshape(-1, x.shape[-1])
    return Matrix(flat, *flat.stride())


def like(x: Tensor) -> Tensor:
    """A contiguous tensor to be filled, of the shape and dtype of x, in a third of new_empty's time."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def numbers(value: Tensor, batch: torch.Size, device: torch.device) -> tuple[Tensor, int]:
    """The per-row scalars, likewise, on the device; a single number may lie on the CPU."""
    if value.numel() == 1:
        if value.device != device:
            value = torch.full((), value.item(), dtype=value.dtype, device=device)
        return value, 0
    return value.expand(batch).contiguous(), 1


def halves(number: float) -> tuple[float, float]:
    """The number as the sum of two of float32, which is off by at most 2⁻⁴⁹ of it."""
    high = _narrow(number)
    return high, _narrow(number - high)


def _narrow(number: float) -> float:
    """In float32, as which a launch hands numbers over."""
    return float(_FLOAT32.unpack(_FLOAT32.pack(number))[0])


def values(value: Tensor, batch: torch.Size, device: torch.device) -> Values:
    """The per-row scalars for the float32 kernels; a single number on the CPU is passed by value."""
    if value.dim() == 0 and value.is_cpu and (given := _by_value(value.item())):
        return given
    return Values(*numbers(value, batch, device), 0.0, 0.0)


def solved(hi: Tensor, lo: Tensor, tau: Tensor, goal: Tensor | None = None) -> Solved:
    """What gradients know of rows: t = hi + lo, τ, and the goal where it counts."""
    batch, device = hi.shape, hi.device
    held = None if goal is None else values(goal, batch, device)
    return Solved(Threshold(hi.contiguous(), lo.contiguous()), values(tau, batch, device), held)


def third(value: Tensor, given: Values) -> float:
    """What is left of a number that is given by value, for a kernel that needs its last digit."""
    return 0.0 if given.pointer is not None else (value.item() - given.high) - given.low


@functools.lru_cache(maxsize=256)
def _by_value(number: float) -> Values | None:
    """A number by value, if float32 holds both halves."""
    fits = number == 0 or 1e-20 < abs(number) < 1e30
    return Values(None, 0, *halves(float(number))) if fits else None


def cdf_id(name: str) -> int:
    """What the kernels call a CDF.

    Raises:
        ValueError: for a CDF that they do not have.
    """
    if name not in CDFS:
        raise ValueError(f"the Triton kernels have the CDFs {', '.join(map(repr, CDFS))}, but not {name!r}")
    return CDFS[name]


class Asked(NamedTuple):
    """What rows are asked for, in words: the CDF, whether entries are counted or have costs, the result, and
    whether a budget may be left unspent."""

    F: cdfs.CDF
    by: str
    output: str
    at_most: bool


@functools.lru_cache(maxsize=256)
def asked(cdf: str, shape: float, by: str = "count", output: str = "y", at_most: bool = False) -> Asked:
    return Asked(cdfs.resolve(cdf, shape), by, output, at_most)


def law(F: cdfs.CDF, by: str = "count", output: str = "y", at_most: bool = False) -> Law:
    """The same as a constant of kernels."""
    return Law(cdf_id(F.name), whole(F), OUTPUTS[output], BY[by], at_most=at_most)


def power(F: cdfs.CDF) -> tuple[float, float]:
    """1/(p − 1), the exponent of z, as the sum of two numbers of float32."""
    return halves(1 / (F.shape - 1)) if F.shape else (1.0, 0.0)


def whole(F: cdfs.CDF) -> int:
    """The same where it is 2 or 3, so that products do instead of a logarithm; otherwise 0."""
    high, low = power(F)
    return int(high) if high in (2, 3) and abs(low) < 1e-12 else 0


def whole_of_sizes(p: float) -> int:
    """The same of a top-k in magnitude, 1 for p = 2."""
    return 1 if p == 2 else whole(cdfs.Power(p))


def steep(F: cdfs.CDF, output: str) -> bool:
    """Whether results need more digits of the threshold than float32 finds: the threshold itself; and where
    their slope has no bound, at the end of a compact support: that of log F, and of F itself with p > 2."""
    unbounded = power(F)[0] < 1 or output == "log"
    return output in ("threshold", "rounded") or (unbounded and not F.full_support)


def compute(dtype: torch.dtype, tau: Tensor | None = None) -> tl.dtype:
    """The dtype of the arithmetic: float64 where τ, if it can be read without waiting, exceeds float32."""
    fits = tau is None or not tau.is_cpu or bool(((tau > 1e-30) & (tau < 1e30)).all())
    return tl.float32 if fits and dtype != torch.float64 else tl.float64
