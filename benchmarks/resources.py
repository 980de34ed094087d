"""What the GPU kernels of the soft top-k compile to: `python -m benchmarks.resources`. Needs no GPU.

Compiles the float32 kernels (of the logistic CDF unless another is named) at the constants that they run
with, and reads registers, spills, stores to shared memory and instructions off the machine code. "Ordinary"
is the path of a row that takes one evaluation, which is rare except with the logistic CDF, and "whole" the
kernel with everything else. Instructions are those of a warp for each entry that a thread holds; of a row
that streams past, those of the loops alone, as the difference of two numbers of entries at a time. Where a
row is held two entries to a register, the ordinary path spills: as it has no loop, the compiler takes
registers apart once, where the whole kernel does so at each use. Beside them are those of one evaluation
more, those of a softmax in the same style, and the ratio of the two times at one evaluation that follows from
memory traffic and issue slots alone, for an H100. With --check nothing is written, and the exit code is 1 if
a bound is exceeded; --few takes some of the shapes only.

--arch takes sm_80, sm_90 or gfx942. On gfx942 registers are vector registers, of which a thread may have
512, spills are stores to scratch memory, and a warp has 64 threads.

No figure here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks import resources_draws, resources_split
from khot import cdfs
from khot._kernels.triton import fast, layout, resident, resident_backward
from khot._kernels.triton.fast import LOG2E, reciprocal, wide
from khot._kernels.triton.functions import OUTPUTS
from khot._kernels.triton.resident import entries, inside, load_rows, place_rows

RESULTS = Path(__file__).parent / "results" / "resources.md"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# of an H100, for the model: bytes a second that a copy moves, clock, schedulers; and the share of issue slots
# and of bandwidth that a kernel of this kind may hope for
BANDWIDTH, CLOCK, SCHEDULERS, ISSUE = 3.0e12, 1.755e9, 528, 0.75


class Case(NamedTuple):
    """A shape, and what its kernels may take: instructions per entry on the ordinary path."""

    rows: int
    n: int
    dtype: str
    forward: float
    backward: float
    cdf: str = "logistic"
    evaluation: float | None = None  # of a further evaluation, the row's own step included; None: not counted
    few: bool = False  # whether it is among the few
    output: str = "y"

    @property
    def id(self) -> str:
        cdf = "" if self.cdf == "logistic" else f" {self.cdf}"
        output = "" if self.output == "y" else f", {self.output} alone"
        return f"({self.rows:,}, {self.n:,}) {self.dtype}{cdf}{output}"


CASES = [
    Case(1_000_000, 64, "fp32", 42, 31),
    Case(4_096, 64, "fp32", 60, 42, few=True),
    Case(32_768, 512, "bf16", 37, 30, few=True),
    Case(128, 1_000, "fp32", 77, 52),
    # An evaluation may take 1.3 times as much as its formulas alone (22.7, 11.4, 12.0, 32.3, 12.8).
    Case(4_096, 4_096, "fp32", 37, 29, evaluation=29.5),
    Case(4_096, 4_096, "fp32", 31, 25, "laplace", 14.8),
    Case(4_096, 4_096, "fp32", 30, 31, "uniform", 15.6),
    Case(4_096, 4_096, "fp32", 71, 26, "normal", 42.0),
    Case(4_096, 4_096, "fp32", 37, 33, "power", 16.6),
    Case(4_096, 8_192, "fp32", 38, 29),
    Case(4_096, 32_768, "fp32", 32, 39),
    # three passes
    Case(100, 100_000, "fp32", 35, 38),
    Case(100, 100_000, "fp32", 32, 32, "laplace"),
    Case(100, 100_000, "fp32", 71, 34, "normal"),
    Case(100, 100_000, "fp32", 32, 34, "uniform"),
    Case(100, 100_000, "fp32", 35, 43, "power"),
    # forward, two entries to a register
    Case(2_048, 65_536, "bf16", 32, 44, few=True),
    # with an evaluation in float64, whose instructions each four entries of a long row take
    Case(4_096, 64, "fp32", 130, 48, output="threshold"),
    Case(4_096, 8_192, "fp32", 49, 32, output="threshold"),
    Case(4_096, 4_096, "fp32", 102, 32, "normal", output="threshold"),
    Case(4_096, 4_096, "fp32", 66, 36, "power", output="threshold"),
]


class Bounds(NamedTuple):
    """What an architecture allows."""

    instructions: float = 1.0  # times what a case says
    registers: int = 128
    spills: int = 0  # stores a thread, in what few rows need
    held_spills: int = 40  # the same where a thread holds 64 entries
    shared: int = 24  # of the ordinary path: the sums of several warps, and nothing of size n


BOUNDS = {
    "sm_80": Bounds(held_spills=100),  # of rows of two entries to a register; of others 7
    "sm_90": Bounds(),
    "gfx942": Bounds(instructions=2.5, registers=256, spills=32, held_spills=80),
}


@triton.jit(do_not_specialize=["rows"])
def softmax_rows(
    x_pointer, x_stride, out_pointer, rows, n_columns,
    TOGETHER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Softmax in the style of the kernels that it is compared with."""
    AXIS: tl.constexpr = 0 if TOGETHER == 1 else 1
    row, there = place_rows(rows, TOGETHER)
    column = tl.arange(0, WIDTH)
    x = load_rows(
        x_pointer + entries(row, x_stride, column, TOGETHER), there, n_columns, TOGETHER, PIECES, WIDTH, EXACT
    )
    greatest = x[0]
    for i in tl.static_range(1, PIECES):
        greatest = tl.maximum(greatest, x[i])
    top = wide(tl.max(greatest, axis=AXIS) * LOG2E, TOGETHER)
    powers = (tl.exp2(x[0] * LOG2E - top),)
    total = powers[0]
    for i in tl.static_range(1, PIECES):
        power = tl.exp2(x[i] * LOG2E - top)
        powers = powers + (power,)  # type: ignore[assignment]  # noqa: RUF005
        total += power
    factor = wide(reciprocal(tl.sum(total, axis=AXIS)), TOGETHER)
    at = out_pointer + entries(row, n_columns, column, TOGETHER)
    for i in tl.static_range(PIECES):
        valid = inside(there, column + i * WIDTH, n_columns, TOGETHER, EXACT)
        tl.store(at + i * WIDTH, (powers[i] * factor).to(out_pointer.dtype.element_ty), mask=valid)


SPILL, SHARE = "scratch_store", "ds_write"  # AMD's instructions


class Counts(NamedTuple):
    registers: int
    instructions: int
    spills: int  # stores to local memory
    shared: int  # stores to shared memory


def resolve(cdf: str) -> cdfs.CDF:
    return cdfs.Power(4 / 3) if cdf == "power" else cdfs.resolve(cdf)


def packs(case: Case, kernel: str) -> bool:
    """Whether the kernel holds a row two entries to a word."""
    aligned = torch.empty(0, dtype=torch.float32 if case.dtype == "fp32" else torch.bfloat16)
    return kernel == "forward" and case.cdf != "normal" and layout.packs(aligned, case.n, case.n)


def tiling(case: Case, kernel: str) -> layout.Tile:
    return layout.packed_tile(case.n) if packs(case, kernel) else layout.tile(case.rows, case.n)


def constants(case: Case, kernel: str, **more: Any) -> dict[str, Any]:
    tile = tiling(case, kernel)
    return {
        "TOGETHER": tile.together,
        "PIECES": tile.pieces,
        "WIDTH": tile.width,
        "EXACT": case.n == tile.pieces * tile.width,
        **more,
    }


def counts(
    case: Case, kernel: str, ordinary: int, by_value: bool = True, arch: str = "sm_90",
    pieces: int | None = None,
) -> Counts:  # fmt: skip
    """Of one kernel, "forward", "backward" or "softmax"; of all of it (0), or of so many evaluations.

    k and tau are given as numbers or as tensors; pieces are those that a program holds at a time.
    """
    target = TARGETS[arch]
    fast.PTX = tl.constexpr(target.backend == "cuda")
    tile = tiling(case, kernel)
    tile = tile._replace(pieces=pieces or tile.pieces)
    if kernel == "softmax":
        given = constants(case, kernel)
        function = softmax_rows
        if tile.streams:
            function = resources_split.softmax_long_rows
            given = {"PIECES": tile.pieces, "WIDTH": tile.width}
    else:
        given = constants(
            case, kernel, OUTPUT=OUTPUTS[case.output], STREAM=tile.streams, CHUNK=layout.RESCUE * tile.warps,
            ORDINARY=ordinary, PIECES=tile.pieces,
        )  # fmt: skip
        F = resolve(case.cdf)
        given |= {"CDF": layout.cdf_id(F.name), "WHOLE": layout.whole(F)}
        if kernel == "forward":
            function = resident.solve_rows
            given |= {"POLISHED": layout.steep(F, case.output), "PACKED": packs(case, kernel)}
        else:
            function = resident_backward.pull_rows
            given |= {"AGAIN": tile.pieces > 8, "grad_column": 1, "ASKED": False}
            given |= {"grad_lo_pointer": None, "grad_lo_stride": 0}
        if by_value:
            given |= {"tau_pointer": None, "tau_stride": 0}
            given |= {"k_pointer": None, "k_stride": 0} if kernel == "forward" else {}
    names = function.arg_names
    signature = {name: _type(name, case.dtype) for name in names} | dict.fromkeys(given, "constexpr")
    multiples = [n for n in names if n.endswith("_pointer") and n not in given]
    if case.n % 16 == 0:
        multiples += [n for n in ("x_stride", "n_columns", "grad_row") if n in names]
    source = ASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in given.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    options = {"num_warps": tile.warps, **layout.registers()}
    code = triton.compile(source, target=target, options=options).asm
    return _read(code["cubin"]) if target.backend == "cuda" else _read_amd(code["amdgcn"])


def _type(name: str, dtype: str) -> str:
    if name in ("x_pointer", "out_pointer", "grad_pointer", "dx_pointer"):
        return f"*{dtype}"
    return "*fp64" if name.endswith("_pointer") else "fp32" if name.endswith(("_high", "_low")) else "i32"


def _read(cubin: bytes) -> Counts:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(
                [TOOLS / tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = re.search(r"REG:(\d+)", usage)
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][A-Z0-9_]*)", code)
    kinds = Counter(lines)
    if found is None or not kinds:
        raise RuntimeError("cuobjdump and nvdisasm say nothing that is understood here")
    del kinds["NOP"]
    return Counts(int(found[1]), kinds.total(), kinds["STL"], kinds["STS"])


def _read_amd(code: str) -> Counts:
    registers = re.search(r"\.vgpr_count:\s*(\d+)", code)
    kinds = Counter(
        re.findall(r"^\s+((?:[vs]|ds|global|buffer|flat|scratch)_[a-z0-9_]+)", code, re.MULTILINE)
    )
    if registers is None or not kinds:
        raise RuntimeError("the assembly says nothing that is understood here")
    idle = [kind for kind in kinds if kind in ("s_nop", "s_waitcnt", "s_code_end")]
    total = kinds.total() - sum(kinds[kind] for kind in idle)
    stores = {
        which: sum(n for kind, n in kinds.items() if kind.startswith(which)) for which in (SPILL, SHARE)
    }
    return Counts(int(registers[1]), total, stores[SPILL], stores[SHARE])


class Line(NamedTuple):
    """All of a case: one direction."""

    case: Case
    kernel: str
    ordinary: Counts
    whole: Counts
    per_entry: float
    softmax: float | None  # per entry
    twice: Counts | None  # the ordinary path with two evaluations
    arch: str

    @property
    def per_evaluation(self) -> float | None:
        """Of one evaluation more, for each entry."""
        if self.twice is None:
            return None
        held = _held(self.case, self.kernel, self.arch)
        return (self.twice.instructions - self.ordinary.instructions) / held

    def ratio(self) -> str:
        """The modelled time of an ordinary row, in softmaxes."""
        if self.softmax is None:
            return "–"
        size = 4 if self.case.dtype == "fp32" else 2
        memory = 2 * size * 32 / (BANDWIDTH / SCHEDULERS / CLOCK)
        times = [max(memory, entry / ISSUE) for entry in (self.per_entry, self.softmax)]
        return f"{times[0] / times[1]:.2f}"

    def faults(self) -> Iterator[str]:
        bound = self.case.forward if self.kernel == "forward" else self.case.backward
        allowed = BOUNDS[self.arch]
        most = allowed.held_spills if _held(self.case, self.kernel, self.arch) > 32 else allowed.spills
        ordinary_spills = 0 if packs(self.case, self.kernel) else self.ordinary.spills  # see above
        bound *= allowed.instructions
        for what, value, limit in (
            ("instructions per entry", self.per_entry, bound),
            ("instructions per entry and evaluation", self.per_evaluation or 0, self.case.evaluation or 0),
            ("registers", max(self.ordinary.registers, self.whole.registers), allowed.registers),
            ("spills of the ordinary path", ordinary_spills, 0),
            ("spills", self.whole.spills, most),
            ("stores to shared memory", self.ordinary.shared, allowed.shared),
        ):
            if value > limit:
                where = f"{self.arch}, {self.kernel} {self.case.id}"
                yield f"{where}: {value:.1f} {what}, and {limit} are allowed"


def _held(case: Case, kernel: str, arch: str) -> float:
    """Entries that a thread holds."""
    tile, threads = tiling(case, kernel), TARGETS[arch].warp_size
    if tile.streams:
        return tile.pieces * tile.width / threads / tile.warps
    return tile.together * case.n / threads / tile.warps


def per_entry(case: Case, kernel: str, ordinary: Counts, arch: str) -> float:
    """Instructions of the ordinary path; of a row that streams past, those of its loops alone."""
    tile, held = tiling(case, kernel), _held(case, kernel, arch)
    if not tile.streams:
        return ordinary.instructions / held
    half = counts(case, kernel, 1, arch=arch, pieces=tile.pieces // 2)
    return (ordinary.instructions - half.instructions) / (held / 2)


def line(case: Case, kernel: str, arch: str = "sm_90", few: bool = False) -> Line:
    count = partial(counts, case, arch=arch)
    whole, ordinary = kernel == "forward" and not few, count(kernel, 1)
    softmax = per_entry(case, "softmax", count("softmax", 1), arch) if whole else None
    twice = count(kernel, 2) if whole and case.evaluation is not None else None
    entry = per_entry(case, kernel, ordinary, arch)
    return Line(case, kernel, ordinary, count(kernel, 0), entry, softmax, twice, arch)


def table(lines: list[Line]) -> str:
    head = [
        "shape", "kernel", "instructions per entry", "of a further evaluation", "softmax's", "modelled ratio",
        "registers, ordinary", "registers, whole", "spills, ordinary", "spills, whole",
        "shared stores, ordinary", "shared stores, whole", "instructions, whole",
    ]  # fmt: skip
    body = [
        [
            each.case.id, each.kernel, f"{each.per_entry:.1f}",
            "–" if each.per_evaluation is None else f"{each.per_evaluation:.1f}",
            "–" if each.softmax is None else f"{each.softmax:.1f}",
            each.ratio(),
            str(each.ordinary.registers), str(each.whole.registers), str(each.ordinary.spills),
            str(each.whole.spills), str(each.ordinary.shared), str(each.whole.shared),
            f"{each.whole.instructions:,}",
        ]
        for each in lines
    ]  # fmt: skip
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])


def keep(section: str) -> None:
    """Put a section into the report, in the place of the one with the same title."""
    title = section.partition("\n")[0]
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    sections = {part.partition("\n")[0]: part for part in re.split(r"^(?=## )", old, flags=re.MULTILINE)[1:]}
    sections[title] = section.rstrip() + "\n\n"
    modules = (__doc__, resources_split.__doc__, resources_draws.__doc__)
    explained = [(doc or "").partition("\n\n")[2] for doc in modules]
    head = "# Machine code of the GPU kernels\n\n" + "\n".join(explained) + "\n"
    RESULTS.write_text(head + "".join(sections[key] for key in sorted(sections)), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.resources", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="only compare with the bounds")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--arch", choices=list(TARGETS), default="sm_90")
    parser.add_argument("--few", action="store_true", help="some of the shapes, and nothing beside them")
    args = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("benchmarks.resources compiles, which TRITON_INTERPRET=1 rules out")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    fast.PTX = tl.constexpr(TARGETS[args.arch].backend == "cuda")
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    with ProcessPoolExecutor(args.jobs) as pool:
        tasks = [
            pool.submit(line, case, kernel, args.arch, args.few)
            for case in CASES
            for kernel in ("forward", "backward")
            if case.few or not args.few
        ]
        # that the rest compiles, too: padding, float16, the logarithm, one k and one τ per row
        others = [
            pool.submit(counts, Case(256, n, "fp16", 0, 0, cdf, output="log"), kernel, 0, False, args.arch)
            for cdf, n in (
                ("logistic", 700),
                ("laplace", 40_000),
                ("laplace", 100),
                ("uniform", 100),
                ("normal", 100),
                ("power", 100),
            )
            for kernel in ("forward", "backward")
            if not args.few
        ]
        shared = [
            pool.submit(resources_split.line, case, _read, TARGETS[args.arch])
            for case in resources_split.CASES
            if args.arch == "sm_90" and not args.few
        ]
        draws = [
            pool.submit(resources_draws.line, number, _read, TARGETS[args.arch])
            for number, case in enumerate(resources_draws.cases())
            if args.arch == "sm_90" and (case.few or not args.few)
        ]
        lines = [task.result() for task in tasks]
        draw_lines = [task.result() for task in draws]
        split_lines = [task.result() for task in shared]
        for task in others:
            task.result()
    text = f"## Triton {triton.__version__}, {args.arch}\n\n{table(lines)}\n"
    if not args.few and args.arch == "sm_90":
        text += f"\n### Rows that many programs share\n\n{resources_split.table(split_lines)}\n"
        text += f"\n### {resources_draws.TITLE}\n\n{resources_draws.table(draw_lines)}\n"
    print(text)
    if not args.check:
        keep(text)
    faults = [fault for each in [*lines, *split_lines, *draw_lines] for fault in each.faults()]
    print(*faults, sep="\n", file=sys.stderr)
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
