"""How many instructions GPU kernels issue for soft selections: `python -m benchmarks.issued`. Needs no GPU.

Kernels are compiled to PTX for sm_90, and some programs of each launch run on the CPU, an instruction of all
threads at a time. Their results are compared with those of the CPU's own kernels. Counted are instructions of
PTX, which a warp issues for 32 threads: 32 times their number, divided by that of entries, is what a thread
would issue for an entry if all threads were full. Float32 scores, normal, sd 1; k is half of a row, at most
8, and a budget a tenth of what all entries cost, 0.1 to 1.1 each; the logistic CDF.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks import ptx_guard, report
from benchmarks.times import LENGTHS

RESULTS = Path(__file__).parent / "results"
SAMPLE = 64  # programs of a launch that run
Array = npt.NDArray[Any]

# ------------------------------------------------------------------------------------------- PTX on a CPU

#: A word that PTX has for a type, and NumPy's.
TYPES: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "b64": np.uint64,
    "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ONE: dict[str, Callable[[Array], Array]] = {
    "mov": np.copy, "neg": np.negative, "abs": np.abs, "not": np.invert, "sqrt": np.sqrt, "ex2": np.exp2,
    "lg2": np.log2, "rcp": np.reciprocal, "rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
}  # fmt: skip
TWO: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "div": np.divide, "min": np.fmin, "max": np.fmax, "copysign": lambda sign, x: np.copysign(x, sign),
}  # fmt: skip
COMPARED: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal,
}  # fmt: skip


class Memory:
    """The tensors that a launch is given, by their addresses."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = [(t.data_ptr(), t.numpy().reshape(-1).view(np.uint8)) for t in tensors if t.numel()]

    def at(self, address: Array, dtype: Any) -> tuple[Array, Array]:
        """Numbers, and which of them lie at these addresses, all in one tensor."""
        for begin, held in self.tensors:
            if begin <= address[0] < begin + held.size:
                place = (address - np.uint64(begin)).astype(np.int64)
                if (place % np.dtype(dtype).itemsize).any() or place.min() < 0 or place.max() >= held.size:
                    break
                return held.view(dtype), place // np.dtype(dtype).itemsize
        raise MemoryError(hex(int(address[0])))


class Program:
    """A kernel in PTX, whose threads run in step, as arrays: no branch may part them."""

    def __init__(self, text: str) -> None:
        head, body = re.sub("//.*", "", text).split("\n{", 1)
        self.parameters = re.findall(r"\.param \.(\w+).*?(\w+_param_\d+)", head)
        found = re.search(r"\.reqntid (\d+)", head)
        assert found is not None
        self.threads = int(found[1])
        self.labels: dict[str, int] = {}
        self.code: list[tuple[str, list[str], list[str]]] = []
        for line in filter(None, map(str.strip, body.splitlines())):
            if label := re.match(r"(\$L\w+):", line):
                self.labels[label[1]] = len(self.code)
            elif read := re.match(r"(?:@(!?%\w+)\s+)?([a-z]\S*)\s*(.*);", line):
                given = re.findall(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+)", read[3])
                self.code.append((read[1] or "", read[2].split("."), [each.strip() for each in given]))

    def run(self, number: int, values: Sequence[Any], memory: Memory) -> int:
        """How many instructions each of its warps issues."""
        threads = _Threads(self, number, values, memory)
        place = issued = 0
        while True:
            guard, words, given = self.code[place]
            place, issued = place + 1, issued + 1
            mask = threads.flags(guard)
            if words[0] in ("bra", "ret"):
                if mask.any() and not mask.all():
                    raise RuntimeError(f"threads part at instruction {place}")
                if mask.all() and words[0] == "ret":
                    return issued
                place = self.labels[given[0]] if mask.all() else place
            elif words[0] != "bar":
                threads.do(words, given, mask)


class _Threads:
    """Of one program: registers, and memory that the threads share."""

    def __init__(self, program: Program, number: int, values: Sequence[Any], memory: Memory) -> None:
        self.count, self.memory = program.threads, memory
        self.lane = np.arange(self.count)
        self.shared = np.zeros(1 << 16, np.uint8)
        self.registers: dict[str, Array] = {
            "%tid.x": self.lane.astype(np.uint32),
            "%ctaid.x": np.full(self.count, number, np.uint32),
        }
        self.given = {
            name: np.full(self.count, value, TYPES[kind])
            for (kind, name), value in zip(program.parameters, values, strict=True)
        }

    def flags(self, guard: str) -> Array:
        if not guard:
            return np.ones(self.count, bool)
        return ~self.registers[guard[1:]] if guard[0] == "!" else self.registers[guard]

    def get(self, name: str, kind: str) -> Array:
        dtype = np.dtype(TYPES[kind])
        if name.startswith("%"):
            held = self.registers.get(name, np.zeros(self.count, dtype))
            return held.view(dtype) if held.itemsize == dtype.itemsize else held.astype(dtype)
        if exact := re.match(r"0([fd])([0-9A-F]+)$", name):
            number = struct.unpack(f">{exact[1]}", bytes.fromhex(exact[2]))[0]
            return np.full(self.count, number, {"f": np.float32, "d": np.float64}[exact[1]]).view(dtype)
        number = 0 if name == "global_smem" else int(name.rstrip("U"), 0)
        if dtype == np.bool_:
            return np.full(self.count, bool(number))
        bits = BITS[dtype.itemsize]
        return np.full(self.count, number & (256**dtype.itemsize - 1), bits).view(dtype)

    def put(self, name: str, value: Array, mask: Array) -> None:
        if value.dtype != np.bool_:
            value = np.ascontiguousarray(value).view(BITS[value.itemsize])
        if not mask.all():
            value = np.where(mask, value, self.registers.get(name, np.zeros_like(value)))
        self.registers[name] = value

    def address(self, text: str) -> Array:
        base, _, offset = text.strip("[]").replace(" ", "").partition("+")
        wide = self.get(base, "u64" if base.startswith("%rd") else "u32").astype(np.int64)
        return (wide + int(offset or 0)).astype(np.uint64)

    def do(self, words: list[str], given: list[str], mask: Array) -> None:
        name, kind = words[0], words[-1]
        method = getattr(self, f"_{name}", None)
        if method is not None:
            method(words, given, mask)
        elif name in ONE and not given[1].startswith("{") and not given[0].startswith("{"):
            self.put(given[0], ONE[name](self.get(given[1], kind)), mask)
        elif name == "mov":
            self._parts(given, kind, mask)
        elif name in TWO:
            kind = kind.replace("s16x2", "b32")
            x, y = self.get(given[1], kind), self.get(given[2], kind)
            if words[-1] == "s16x2":
                x, y = x.view(np.int16), y.view(np.int16)
            self.put(given[0], TWO[name](x, y).view(TYPES[kind]), mask)
        else:
            raise NotImplementedError(".".join(words))

    def _parts(self, given: list[str], kind: str, mask: Array) -> None:
        """A register taken apart, or put together."""
        half = {"b64": "b32", "b32": "b16"}[kind]
        names = [each.strip() for each in "".join(given).partition("}")[0].partition("{")[2].split(",")]
        if given[0].startswith("{"):
            pairs = self.get(given[1], kind).view(TYPES[half]).reshape(-1, 2)
            for i, name in enumerate(names):
                self.put(name, pairs[:, i], mask)
        else:
            pairs = np.stack([self.get(name, half) for name in names], 1)
            self.put(given[0], pairs.view(TYPES[kind])[:, 0], mask)

    def _ld(self, words: list[str], given: list[str], mask: Array) -> None:
        if words[1] == "param":
            value = self.given[given[1].strip("[]")]
            wide = given[0].startswith("%rd") and value.itemsize == 4
            self.put(given[0], value.view(TYPES[words[-1]]).astype(np.int64) if wide else value, mask)
            return
        dtype, address = np.dtype(TYPES[words[-1]]), self.address(given[1])
        for i, name in enumerate(each.strip() for each in given[0].strip("{} ").split(",")):
            found = np.zeros(self.count, dtype)
            if mask.any():
                held, place = self._at(words[1], address[mask] + np.uint64(i * dtype.itemsize), dtype)
                found[mask] = held[place]
            self.put(name, found.astype(np.uint16) if dtype == np.uint8 else found, mask)

    def _st(self, words: list[str], given: list[str], mask: Array) -> None:
        dtype, address = np.dtype(TYPES[words[-1]]), self.address(given[0])
        for i, name in enumerate(each.strip() for each in given[1].strip("{} ").split(",")):
            if mask.any():
                held, place = self._at(words[1], address[mask] + np.uint64(i * dtype.itemsize), dtype)
                held[place] = self.get(name, words[-1])[mask]

    def _at(self, space: str, address: Array, dtype: Any) -> tuple[Array, Array]:
        if space == "shared":
            return self.shared.view(dtype), address.astype(np.int64) // np.dtype(dtype).itemsize
        return self.memory.at(address, dtype)

    def _matrix(self, words: list[str], given: list[str], load: bool) -> None:
        """Rows of 16 bytes in shared memory, of which a thread has four."""
        names, address = (given[0], given[1]) if load else (given[1], given[0])
        rows, words32 = self.address(address).astype(np.int64) // 4, self.shared.view(np.uint32)
        for i, name in enumerate(each.strip() for each in names.strip("{} ").split(",")):
            place = rows[self.lane // 32 * 32 + 8 * i + self.lane % 32 // 4] + self.lane % 4
            if load:
                self.put(name, words32[place], np.ones(self.count, bool))
            else:
                words32[place] = self.get(name, "u32")

    def _ldmatrix(self, words: list[str], given: list[str], mask: Array) -> None:
        self._matrix(words, given, True)

    def _stmatrix(self, words: list[str], given: list[str], mask: Array) -> None:
        self._matrix(words, given, False)

    def _shfl(self, words: list[str], given: list[str], mask: Array) -> None:
        value, number = self.get(given[1], "b32"), self.get(given[2], "u32").astype(np.int64)
        own = self.lane % 32
        source = {"bfly": own ^ number, "idx": number & 31}[words[2]]
        self.put(given[0], value[self.lane - own + source], mask)

    def _redux(self, words: list[str], given: list[str], mask: Array) -> None:
        by_warp = self.get(given[1], words[-1]).reshape(-1, 32)
        reduce = {"add": np.add, "max": np.maximum, "min": np.minimum}[words[2]].reduce
        self.put(given[0], np.repeat(reduce(by_warp, 1), 32).astype(TYPES[words[-1]]), mask)

    def _vote(self, words: list[str], given: list[str], mask: Array) -> None:
        by_warp = self.get(given[1], "pred").reshape(-1, 32).astype(np.uint64)
        ballot = (by_warp << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
        self.put(given[0], np.repeat(ballot, 32), mask)

    def _popc(self, words: list[str], given: list[str], mask: Array) -> None:
        self.put(given[0], np.bitwise_count(self.get(given[1], "u32")).astype(np.uint32), mask)

    def _setp(self, words: list[str], given: list[str], mask: Array) -> None:
        x, y = self.get(given[1], words[-1]), self.get(given[2], words[-1])
        unordered = (x != x) | (y != y)
        how = words[1]
        if how in ("num", "nan"):
            found = unordered == (how == "nan")
        elif how in COMPARED:
            found = COMPARED[how](x, y) & ~unordered
        else:
            found = COMPARED[how[:2]](x, y) | unordered
        self.put(given[0], found, mask)

    def _selp(self, words: list[str], given: list[str], mask: Array) -> None:
        x, y = self.get(given[1], words[-1]), self.get(given[2], words[-1])
        self.put(given[0], np.where(self.get(given[3], "pred"), x, y), mask)

    def _cvt(self, words: list[str], given: list[str], mask: Array) -> None:
        self.put(given[0], self.get(given[1], words[-1]).astype(TYPES[words[-2]]), mask)

    def _prmt(self, words: list[str], given: list[str], mask: Array) -> None:
        each = np.stack([self.get(name, "u32") for name in given[1:3]], 1).view(np.uint8)
        chosen = [int(given[3].rstrip("U"), 0) >> 4 * i & 7 for i in range(4)]
        self.put(given[0], np.ascontiguousarray(each[:, chosen]).view(np.uint32)[:, 0], mask)

    def _bfe(self, words: list[str], given: list[str], mask: Array) -> None:
        x, first, count = (self.get(name, "u32") for name in given[1:4])
        self.put(given[0], (x >> first) & ((np.uint32(1) << count) - np.uint32(1)), mask)

    def _shift(self, words: list[str], given: list[str], mask: Array) -> None:
        x = self.get(given[1], words[-1])
        by = self.get(given[2], "u32").astype(x.dtype)
        self.put(given[0], x << by if words[0] == "shl" else x >> by, mask)

    _shl = _shr = _shift

    def _mul(self, words: list[str], given: list[str], mask: Array) -> None:
        kind = words[-1]
        x, y = self.get(given[1], kind), self.get(given[2], kind)
        if words[1] == "wide":
            wide = TYPES[kind.replace("32", "64")]
            found = x.astype(wide) * y.astype(wide)
        elif words[1] == "hi":
            found = (x.astype(np.int64) * y.astype(np.int64) >> 32).astype(TYPES[kind])
        else:
            found = x * y
        self.put(given[0], found, mask)

    def _mad(self, words: list[str], given: list[str], mask: Array) -> None:
        kind, wider = words[-1], words[-1].replace("32", "64")
        x, y = self.get(given[1], kind).astype(TYPES[wider]), self.get(given[2], kind).astype(TYPES[wider])
        found = x * y + self.get(given[3], wider if words[1] == "wide" else kind).astype(TYPES[wider])
        self.put(given[0], found if words[1] == "wide" else found.astype(TYPES[kind]), mask)

    _fma = _mad  # of float32 in float64, which is rounded twice


# ------------------------------------------------------------------------------------------- launches


class Launches:
    """In the place of launches on a device: some of their programs, on the CPU."""

    def __init__(self) -> None:
        self.programs: dict[Any, Program] = {}
        self.issued: list[float] = []  # by warps, of each launch

    def start(self, variant: Any, programs: int, arguments: tuple[Any, ...]) -> None:
        asked = ptx_guard.addresses(arguments)
        built = variant.kernel.run(*asked, grid=(programs,), warmup=True, **variant.constants)
        key = variant, str(built.src.signature), str(built.src.attrs)
        if key not in self.programs:
            self.programs[key] = Program(ptx_guard.compiled(built, 90)[0])
        program = self.programs[key]
        values = list(_members(arguments, built.src.constants))
        memory = Memory(value for value in values if isinstance(value, Tensor))
        given = [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
        given += [0] * (len(program.parameters) - len(given))  # scratch that no kernel asks for
        # of programs that look for long rows, all: few of them find one
        few = programs <= SAMPLE or variant.constants["T"].streams
        chosen = range(programs) if few else np.random.default_rng(0).choice(programs, SAMPLE, False).tolist()
        issued = [program.run(number, given, memory) for number in chosen]
        self.issued.append(sum(issued) / len(issued) * programs * program.threads / 32)


def _members(value: Any, constants: Any, path: tuple[int, ...] = ()) -> Iterable[Any]:
    """What is no constant."""
    for i, each in enumerate(value):
        at = (*path, i)
        if isinstance(each, tuple):
            yield from _members(each, constants, at)
        elif each is not None and at not in constants:
            yield each


def _right(got: Tensor, want: Tensor) -> None:
    """What the programs that ran have written."""
    written = ~got.isnan()
    size = want[written].abs().max().clamp(min=1)
    assert written.any() and torch.allclose(got[written] / size, want[written] / size, rtol=1e-4, atol=2e-6)


def packed(launches: Launches, lengths: Tensor) -> list[float]:
    """The instructions of each launch, forward and backward."""
    from khot._kernels.triton import ragged

    offsets, how = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), ("logistic", 0.0, "y")
    x, k, tau = torch.randn(int(offsets[-1])), (lengths / 2).clamp(max=8).double(), torch.tensor(1.0).double()
    launches.issued = []
    y, _, _ = ragged.packed_soft_topk(x, offsets, k, tau, *how)
    want, hi, lo = torch.ops.khot.packed_soft_topk(x, offsets, k, tau, *how)
    _right(y, want)
    given = torch.randn(len(x)), x, offsets, hi, lo, tau, *how, None
    _right(ragged.packed_soft_topk_backward(*given)[0], torch.ops.khot.packed_soft_topk_backward(*given)[0])
    return launches.issued


def equal(launches: Launches, x: Tensor, tau: float = 1.0) -> list[float]:
    k = torch.tensor(min(x.shape[-1] / 2, 8.0)).double()
    return _both_ways(launches, "soft_topk", (x,), k.expand(len(x)), tau, ("logistic", 0.0, "y"), (None,))


def budget(launches: Launches, x: Tensor, tau: float) -> list[float]:
    w = torch.rand_like(x) + 0.1
    goal = 0.1 * w.double().masked_fill(x == -torch.inf, 0).sum(-1)
    return _both_ways(launches, "soft_budget", (x, w), goal, tau, ("logistic", 0.0, "score", False), ())


def _both_ways(
    launches: Launches,
    name: str,
    rows: tuple[Tensor, ...],
    goal: Tensor,
    tau: float,
    how: tuple[Any, ...],
    more: tuple[Any, ...],
) -> list[float]:
    """The instructions of each launch of an operator, forward and backward; more is of its gradient alone."""
    from khot._kernels.triton import ways

    tau_ = torch.tensor(tau).double()
    launches.issued = []
    y, _, _ = getattr(ways, name)(*rows, goal, tau_, *how)
    want, hi, lo = getattr(torch.ops.khot, name)(*rows, goal, tau_, *how)
    _right(y, want)
    given = torch.randn_like(y), torch.tensor(0.0).double(), *rows, hi, lo, tau_, *how
    got = getattr(ways, f"{name}_backward")(*given)[0]
    # in units of z, or what cancels at a small tau would count
    _right(tau * got, tau * getattr(torch.ops.khot, f"{name}_backward")(*given, *more)[0])
    return launches.issued


def _per_entry(issued: list[float], entries: int) -> tuple[float, float]:
    """Forward, and with the gradient."""
    half = len(issued) // 2
    return 32 * sum(issued[:half]) / entries, 32 * sum(issued) / entries


def _cell(numbers: tuple[float, float], digits: int = 0) -> str:
    return " / ".join(f"{number:.{digits}f}" for number in numbers)


def of_packed_rows(launches: Launches) -> str:
    rows = []
    for case, make in LENGTHS.items():
        torch.manual_seed(0)
        lengths = make(torch.Generator().manual_seed(0))
        n = max(1, round(lengths.double().mean().item()))
        ragged, even = packed(launches, lengths), equal(launches, torch.randn(len(lengths), n))
        own, other = _per_entry(ragged, int(lengths.sum())), _per_entry(even, len(lengths) * n)
        ratio = own[0] / other[0], own[1] / other[1]
        launched = f"{len(ragged) // 2} / {len(ragged)}"
        rows.append([case, launched, f"{n}", _cell(own), _cell(other), _cell(ratio, 2)])
        print(*rows[-1], sep=" | ", flush=True)
    head = ["packed rows", "launches", "mean length", "instructions", "of rows of this length", "ratio"]
    return f"""Beside packed rows are as many rows of their mean length, which the ordinary kernels take in
one launch each way; where it is no multiple of four, their threads hold no neighbours, which takes more.
tau = 1; forward / with the gradient:

{report.table(head, rows)}"""


def of_calls(launches: Launches) -> str:
    rows = []
    for n in (64, 1000, 8192):
        torch.manual_seed(0)
        x = torch.randn(SAMPLE, n) if n > 64 else torch.randn(64 * SAMPLE, n)
        masked = x.masked_fill(torch.rand_like(x) > 0.7, -torch.inf)
        calls = [(x, tau) for tau in (1.0, 0.03, 1e-3, 1e-6)] + [(masked, 1.0)]
        for name, call in (("soft_topk", equal), ("soft_budget", budget)):
            issued = [_per_entry(call(launches, *given), x.numel()) for given in calls]
            ratios = [_cell((own[0] / issued[0][0], own[1] / issued[0][1]), 2) for own in issued[1:]]
            rows.append([f"{name}, {n}", _cell(issued[0]), *ratios])
            print(*rows[-1], sep=" | ", flush=True)
    head = ["operator, n", "instructions at tau = 1", "tau = 0.03", "tau = 0.001", "tau = 1e-06", "masked"]
    return f"""Sharp temperatures, and scores of which 30 % are masked, beside the plain call, forward / with
the gradient. Not every row is sharp to a program of short ones: the slowest of its rows counts.

{report.table(head, rows)}"""


def main() -> None:
    if len(sys.argv) > 1:
        raise SystemExit(__doc__)
    np.seterr(all="ignore")
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    launches = Launches()
    ptx_guard.start_nothing(launches.start)
    text = (__doc__ or "").partition("\n\n")[2]
    tables = [of_packed_rows(launches), of_calls(launches)]
    parts = ["# Instructions of soft selections on a GPU", text, *tables]
    page = "\n\n".join(part.strip() for part in parts)
    (RESULTS / "issued.md").write_text(page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
