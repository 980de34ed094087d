"""What the kernels of rows that many programs share compile to: a part of :mod:`benchmarks.resources`.

A kernel is counted whole and, for the instructions per entry, twice: with the entries that a thread reads at
a time, and with half of them. The difference is what its loops take for so many more entries: of the sums of
an evaluation (and of the counts of a window, which only rows with few undecided entries take), or of the
write. For `_finish_parts` that includes the search that one program may have to do, so no figure is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from khot import cdfs
from khot._kernels.triton import exact_split, layout, split, split_backward
from khot._kernels.triton.fast import LOG2E, reciprocal
from khot._kernels.triton.functions import OUTPUTS

__all__ = ["CASES", "Case", "SplitLine", "line", "table"]


class Case(NamedTuple):
    """A shape, and what a kernel of it may take: instructions per entry in its loops, spills a thread."""

    rows: int
    n: int
    cdf: cdfs.CDF
    kernel: str
    entry: float | None
    spills: int = 0
    fine: bool = False  # where t is to have the digits of float64

    @property
    def id(self) -> str:
        return f"({self.rows:,}, {self.n:,}) {self.cdf.name}{', fine' * self.fine}"


def _cases() -> Iterator[Case]:
    # Loading an entry, with its mask, takes about 7. To an evaluation (at most 1.3 times its formulas' 22.7,
    # 11.4, 32.3, 12.0 and 12.8) comes the pass that counts the window's entries, about 20 with its loads; and
    # with the last three CDFs a count of NaN, about 7.
    # "fine" adds a difference in float64 for each entry that is loaded.
    bounds = {
        "logistic": (41.0, 15.7),
        "laplace": (32.0, 15.7),
        "normal": (62.0, 30.0),
        "uniform": (47.0, 11.5),
        "power": (46.0, 13.4),
    }
    for name, (evaluation, write) in bounds.items():
        F = cdfs.Power(4 / 3) if name == "power" else cdfs.resolve(name)
        yield Case(16, 1_000_000, F, "_sum_parts", evaluation)
        yield Case(16, 1_000_000, F, "_finish_parts", None, 32)
        yield Case(16, 1_000_000, F, "_write_parts", write)
        yield Case(16, 1_000_000, F, "_polish_parts", None, 32, fine=True)
        if name == "logistic":
            yield Case(16, 1_000_000, F, "_sample_rows", None, 48)
            yield Case(16, 1_000_000, F, "_sample_rows", None, 48, fine=True)
            yield Case(16, 1_000_000, F, "_sum_parts", 48.0, fine=True)
            yield Case(16, 1_000_000, F, "_finish_parts", None, 32, fine=True)
            yield Case(16, 1_000_000, F, "_write_fine", None, fine=True)
            yield Case(16, 1_000_000, F, "_pull_fine", None, fine=True)
            yield Case(16, 1_000_000, F, "_write_pull_fine", None, fine=True)
            yield Case(16, 1_000_000, F, "_pull_parts", 34.0, 8)
            yield Case(16, 1_000_000, F, "_gradient_parts", 34.0)
            yield Case(1, 6_300_000, F, "_sum_parts", evaluation)
            yield Case(1, 6_300_000, F, "_finish_parts", None, 32)


CASES = list(_cases())
REGISTERS = 128
SHARED_STORES = 64  # the sums of several warps, and nothing of the size of a part


class SplitLine(NamedTuple):
    case: Case
    whole: Any
    per_entry: float | None

    def faults(self) -> Iterator[str]:
        for what, value, limit in (
            ("instructions per entry", self.per_entry or 0, self.case.entry or 0),
            ("registers", self.whole.registers, REGISTERS),
            ("spills", self.whole.spills, self.case.spills),
            ("stores to shared memory", self.whole.shared, SHARED_STORES),
        ):
            if value > limit:
                yield f"{self.case.kernel} {self.case.id}: {value:.1f} {what}, and {limit} are allowed"


def _counts(case: Case, pieces: int, read: Callable[[bytes], Any], target: GPUTarget) -> Any:
    kernels = {k.fn.__name__: k for k in (*split.KERNELS, *exact_split.KERNELS, *split_backward.KERNELS)}
    function = kernels[case.kernel]
    cut = layout.cut(case.rows, case.n)
    warps, width = cut.warps, cut.width
    if case.kernel == "_sample_rows":
        pieces, width, warps = layout.sample()
    given = {
        "CDF": layout.cdf_id(case.cdf.name), "WHOLE": layout.whole(case.cdf), "OUTPUT": OUTPUTS["y"],
        "PIECES": pieces, "WIDTH": width, "PARTS": triton.next_power_of_2(cut.parts),
        "FINE": case.fine, "POOLED": 0, "SIGNED": False,
        "CHUNK": layout.RESCUE * warps, "BLOCK": layout.SAMPLE_BLOCK, "grad_column": 1,
        "k_pointer": None, "k_stride": 0, "tau_pointer": None, "tau_stride": 0,
        "grad_lo_pointer": None, "grad_lo_stride": 0, "ASKED": False,
    }  # fmt: skip
    names = function.arg_names
    given = {name: value for name, value in given.items() if name in names}
    narrow = ("x_pointer", "out_pointer", "grad_pointer", "dx_pointer", "window_pointer")
    signature = {
        name: "constexpr" if name in given
        else "*fp32" if name in narrow
        else "*i32" if name == "counter_pointer"
        else "*fp64" if name.endswith("_pointer")
        else "fp32" if name.endswith(("_high", "_low")) else "i32"
        for name in names
    }  # fmt: skip
    multiples = [n for n in names if n.endswith("_pointer") and n not in given]
    multiples += [n for n in ("x_stride", "n_columns", "grad_row") if n in names]
    source = ASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in given.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    options = {"num_warps": warps, **layout.registers()}
    return read(triton.compile(source, target=target, options=options).asm["cubin"])


def line(case: Case, read: Callable[[bytes], Any], target: GPUTarget) -> SplitLine:
    cut = layout.cut(case.rows, case.n)
    whole = _counts(case, cut.pieces, read, target)
    if case.entry is None:
        return SplitLine(case, whole, None)
    fewer = _counts(case, cut.pieces // 2, read, target)
    entries = cut.pieces // 2 * cut.width / (32 * cut.warps)
    return SplitLine(case, whole, (whole.instructions - fewer.instructions) / entries)


def table(lines: list[SplitLine]) -> str:
    head = ["shape", "kernel", "instructions per entry", "registers", "spills", "instructions, whole"]
    body = [
        [
            each.case.id, each.case.kernel, "–" if each.per_entry is None else f"{each.per_entry:.1f}",
            str(each.whole.registers), str(each.whole.spills), f"{each.whole.instructions:,}",
        ]
        for each in lines
    ]  # fmt: skip
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])


@triton.jit(do_not_specialize=["rows"])
def softmax_long_rows(
    x_pointer, x_stride, out_pointer, rows, n_columns, PIECES: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Softmax of a row that streams past one program twice, in the style of the kernels beside it."""
    STEP: tl.constexpr = PIECES * WIDTH
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    at, to = x_pointer + row * x_stride + column, out_pointer + row * n_columns + column
    top = tl.full((WIDTH,), -1e30, tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, n_columns, STEP):
        held, most = (), top
        for i in tl.static_range(PIECES):
            piece = tl.load(
                at + (start + i * WIDTH), mask=column + (start + i * WIDTH) < n_columns, other=-1e30
            )
            held = held + (piece.to(tl.float32) * LOG2E,)  # type: ignore[assignment]  # noqa: RUF005
            most = tl.maximum(most, held[i])
        total *= tl.exp2(top - most)
        for i in tl.static_range(PIECES):
            total += tl.exp2(held[i] - most)
        top = most
    greatest = tl.max(top, axis=0)
    factor = reciprocal(tl.sum(total * tl.exp2(top - greatest), axis=0))
    steps = tl.cdiv(n_columns, STEP)
    for behind in range(steps):
        start = (steps - 1 - behind) * STEP
        for i in tl.static_range(PIECES):
            valid = column + (start + i * WIDTH) < n_columns
            x = tl.load(at + (start + i * WIDTH), mask=valid, other=0.0).to(tl.float32)
            y = tl.exp2(x * LOG2E - greatest) * factor
            tl.store(to + (start + i * WIDTH), y.to(out_pointer.dtype.element_ty), mask=valid)
