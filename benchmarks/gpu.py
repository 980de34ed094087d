"""What the operators take on a GPU, as measured and as they are now: `python -m benchmarks.gpu`.

Needs no GPU. The measured times are those of `benchmarks/results/device.json`. "Launches now" are counted on
a pretended device (tests/device.py, which has to be on the path): our kernels and torch's operations that are
not views, forward / with the gradient. A sort of torch is one of them, and takes several kernels. What is
newer than the measurement has a modelled time beside it: of each launch what it moves at the bandwidth of a
copy, or the instructions that its kernel compiles to (`benchmarks.resources`, for sm_90) at the issue rate
that such a kernel may hope for, whichever is more, and at least what the shortest kernel takes. Of rows that
fill a multiprocessor by themselves, as 65,536 entries do, it is the sum of the two. A kernel that sorts has
the issue rate at which the sort of rows of 512 was measured; of long rows, what comes before and after the
sort is what was measured less torch's sorts. Where a launch works on few rows, it is the longest chain of
instructions of one program, at the cycles that each took in an earlier version of the kernel, as measured;
and of a kernel that loops, what it took then, times the share of its instructions that is left.

A goal is that of the project, as a time, forward / with the gradient: so many softmaxes, sorts or
`torch.topk` of the same tensor, as measured. It is met if the modelled time, or else the measured one, is no
more; where only the forward pass has a modelled time, that counts alone. Where the goal is missed, the last
column says what binds. The host's time is in `host.md`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks import device, report, resources, resources_draws
from khot._kernels.triton import split_budget

RESULTS = Path(__file__).parent / "results"
SHORTEST = 2e-6  # seconds of a kernel: the softmax of (4096, 64), as measured
# The share of issue slots of a warp that sorts: of 4,096 rows of 512, whose ranks take 275 instructions an
# entry, in 49 µs.
SORTING = 0.4
# of an instruction of a chain: 325,000 of them took 1,060 µs when the slowest row was calibrated in 16 steps
CYCLES = 5.7
SHORT, LONG = "other operators, (4,096, 64) float32", "other operators, (4,096, 8,192) float32"
FEW = "long rows, (1, 6,300,000) float32"
TOPK, TOPK_LONG, TOPK_HALF, TOPK_ONE = (f"soft top-k, {device.SOFT_TOPK[i].id}" for i in (0, 2, 4, -1))
SQUARE, WIDE, ASSIGNED = (f"n² and more, {case.id}" for case in (*device.SQUARES, device.MANY[0]))


class Kernel(NamedTuple):
    """A launch: the kernel's name in `benchmarks.resources`, the entries that it takes and the bytes that it
    moves."""

    name: str
    entries: float = 0
    moved: float = 0
    rate: float = resources.ISSUE


class Measured(NamedTuple):
    """What was measured of something that the line has in common with another, less so many of torch's sorts;
    or of the line itself, and the share of its instructions that is left, those of loops as often as they are
    executed."""

    table: str
    line: str
    sorts: int = 0
    share: float = 1.0


class Gradient(NamedTuple):
    """The same of what a gradient took, beside the forward pass."""

    table: str
    line: str


class Chain(NamedTuple):
    """A launch in which few rows are worked on, by so many instructions one after another."""

    instructions: float


TRANSPORT = "sorted_soft_topk, k = 16"
Step = Kernel | Measured | Gradient | Chain
SEED = Kernel("")  # any kernel that takes no longer than the shortest one
PLAIN = f"without Python, {device.MANY[0].id}"
RANKED: list[Step] = [Gradient(PLAIN, "soft_rank, descending")]
N64, N8192, N6M, N_HALF = 4_096 * 64, 4_096 * 8_192, 6_300_000, 2_048 * 65_536


def budget(by: str, evaluations: int) -> list[Step]:
    """Of few long rows: a fill, what weighs, evaluations and those that return at once, what rescues and what
    writes."""
    step = Kernel(f"_spend_parts logistic, by {by}", N6M, 8 * N6M)
    return [
        SEED, Kernel(f"_weigh_budget_parts logistic, by {by}", N6M, 8 * N6M), *[step] * evaluations,
        *[SEED] * (split_budget.STEPS - evaluations), SEED,
        Kernel(f"_write_budget_parts logistic, by {by}", N6M, 12 * N6M),
    ]  # fmt: skip


#: Of (4,096, 8,192) entries in float32: chunks, and three merges.
SORTED = [
    Kernel("_sort_chunks entries and places", N8192, 12 * N8192, SORTING),
    *[Kernel("_merge_runs entries and places", N8192, 16 * N8192, SORTING)] * 2,
    Kernel("_merge_runs entries and places, the last", N8192, 16 * N8192, SORTING),
]
SORTED_ALONE = [
    Kernel("_sort_chunks entries alone", N8192, 8 * N8192, SORTING),
    *[Kernel("_merge_runs entries alone", N8192, 8 * N8192, SORTING)] * 2,
    Kernel("_merge_runs entries alone, the last", N8192, 8 * N8192, SORTING),
]

#: By table and line, the launches forward of what is newer than the measurement.
MODELS: dict[tuple[str, str], list[Step]] = {
    # One launch. One program fills a multiprocessor, so that a row's instructions wait for its entries: the
    # two times add up, as they did when such rows streamed past.
    (TOPK_HALF, "soft_topk"): [
        Kernel("", moved=4 * N_HALF), Kernel("(2,048, 65,536) bf16", N_HALF),
    ],
    # of 550 instructions 107 are for ties and infinities
    (TOPK, "topk_mask"): [Kernel("_resident_mask n = 64", 0.81 * N64, 8 * N64, SORTING)],
    (SHORT, "kth_value"): [Kernel("_resident_places n = 64", N64, 4 * N64, SORTING)],
    (SHORT, "quantile"): [Kernel("_resident_quantiles n = 64", N64, 4 * N64, SORTING)],
    # the upper entry; the lower one takes two passes over what a program holds
    (LONG, "quantile"): [Measured(LONG, "kth_value")],
    (SHORT, "budget_mask"): [Kernel("_greedy_rows n = 64", N64, 12 * N64)],
    # scores and places in order, costs and results at random, of which a row stays in the cache
    (LONG, "budget_mask"): [*SORTED, Kernel("_greedy", N8192, 16 * N8192)],
    (LONG, "soft_rank"): [*SORTED, Measured(LONG, "soft_rank", 1)],
    (LONG, "soft_sort"): [*SORTED, Measured(LONG, "soft_sort", 1)],
    (LONG, "ndcg_loss"): [*SORTED, *SORTED_ALONE, Measured(LONG, "ndcg_loss", 2)],
    (LONG, "spearman_loss"): [*SORTED, *SORTED, Measured(LONG, "spearman_loss", 2)],
    # of 4,096 rows N(0, s²), s from 0.1 to 5, 250 are calibrated, four of these in four steps and the others
    # in three, of 910 instructions or fewer, after 1,100 and before 850 for the keys; a call without Python
    # has these launches and no more
    (SHORT, "sample_khot"): [
        Measured(TOPK, "soft_topk"), SEED, Kernel("_pareto n = 64", N64, 8 * N64), Chain(5_600),
    ],
    # keys of all units in float32, and of some 300 of each row in float64; two that carry the gradient
    (LONG, "sample_khot"): [
        Measured(TOPK_LONG, "soft_topk"), SEED, Kernel("_part_moments long rows", N8192, 4 * N8192),
        Kernel("_part_keys long rows", N8192, 8 * N8192), Kernel("_choose long rows", 4_096 * 512), SEED,
        SEED, SEED,
    ],
    # of 64 levels two programs hold 64, and of 256 seventeen hold 272
    (SQUARE, "soft_permutation"): [
        Kernel("_permute laplace, n = 64, ordinary levels", 256 * 64 * 64, 4 * 256 * 64 * 64), SEED,
    ],
    (WIDE, "soft_permutation"): [
        Kernel("_permute laplace, n = 256, ordinary levels", 64 * 272 * 256, 4 * 64 * 256 * 256), SEED,
    ],
    # normal scores at τ = 1 take one turn; what a program writes for itself is counted, too
    (SHORT, "soft_rank, projection"): [SEED, Kernel("_project_rows n = 64, 1 turn", N64, 60 * N64)],
    # the ranks are one row, which torch sorts in some eight kernels
    (LONG, "soft_rank, projection"): [
        SEED, *SORTED, *[SEED] * 8,
        Kernel("_project_long_rows one turn", N8192, 60 * N8192),
    ],
    # of 12,500 instructions of a warp for each row 7,500 are left: three steps of 1,800 that were 3,070
    (SHORT, "sample, conditional_poisson"): [Measured(SHORT, "sample, conditional_poisson", share=0.6)],
    # a row of 64 units and its phantom is padded to 128
    (SHORT, "sample, systematic"): [SEED, Kernel("_systematic 128 units at a time", 2 * N64, 8 * N64)],
    (LONG, "sample, systematic"): [SEED, Kernel("_systematic 1,024 units at a time", N8192, 12 * N8192)],
    (SHORT, "sample, pivotal"): [SEED, Kernel("_duels 65 units", 2 * N64, 8 * N64)],
    # 8,193 units are five parts of 2,048
    (LONG, "sample, pivotal"): [
        SEED, Kernel("_phantoms", N8192, 4 * N8192), Kernel("_duels 2,048 units", 1.25 * N8192, 8 * N8192),
        SEED,
    ],
    (SHORT, "inverse_soft_count"): [Kernel("(4,096, 64) fp32, threshold alone", N64, 4 * N64)],
    (LONG, "inverse_soft_count"): [Kernel("(4,096, 8,192) fp32, threshold alone", N8192, 4 * N8192)],
    # in one order or in the other, a kernel as measured
    (SHORT, "soft_rank"): [Measured(PLAIN, "soft_rank, descending")],
    (SHORT, "soft_sort"): [Measured(PLAIN, "soft_sort, descending")],
    # their forward launches are those that were measured
    (SHORT, "ndcg_loss"): [Measured(SHORT, "ndcg_loss")],
    (SHORT, "spearman_loss"): [Measured(SHORT, "spearman_loss")],
    # The slowest of normal rows takes four steps of Newton's, of 2,200 instructions for the matrix and one
    # evaluation of 2,800, after two evaluations; 3,400 come before and after them. Rows of 64 have
    # evaluations of 1,900, and two programs after one another.
    (SQUARE, TRANSPORT): [Chain(2 * (6 * 1_900 + 4 * 2_200 + 2_400))],
    (WIDE, TRANSPORT): [Chain(6 * 2_800 + 4 * 2_200 + 3_400)],
    # scores and targets; and the mean
    (SHORT, "FenchelYoungTopKLoss"): [
        Kernel("solve_losses logistic, n = 64, an ordinary row", N64, 8 * N64), SEED,
    ],
    (LONG, "FenchelYoungTopKLoss"): [
        Kernel("solve_losses logistic, n = 8,192, an ordinary row", N8192, 8 * N8192), SEED,
    ],
    (FEW, "FenchelYoungTopKLoss"): [
        SEED, Kernel("", N6M, 4 * N6M), Kernel("", N6M, 4 * N6M),
        Kernel("_target_parts logistic", N6M, 4 * N6M), Kernel("_loss_parts logistic", N6M, 8 * N6M),
    ],
    # of a million normal scores the interpreter counts one evaluation by score, and two by value
    (FEW, "soft_budget, by score"): budget("score", 1),
    (FEW, "soft_budget, by value"): budget("value", 2),
    # few rows take what `_finish_parts` and `_write_sizes` have for other rows
    (FEW, "soft_topk_magnitude"): [
        SEED, Kernel("_sum_parts p = 2", N6M, 4 * N6M), Kernel("_sum_parts p = 2", N6M, 4 * N6M),
        Kernel("", N6M, 8 * N6M),
    ],
}  # fmt: skip


#: The launches of the gradient, where they have a model, too.
GRADIENTS: dict[tuple[str, str], list[Step]] = {
    (TOPK_HALF, "soft_topk"): [Gradient(TOPK_HALF, "soft_topk")],
    (SHORT, "kth_value"): [Gradient(SHORT, "kth_value")],
    (SHORT, "quantile"): [Kernel("_pull_quantiles n = 64", N64, 8 * N64)],
    # that of the mean is divided by their number first
    (SHORT, "FenchelYoungTopKLoss"): [
        SEED, Kernel("pull_losses logistic, n = 64, an ordinary row", N64, 12 * N64),
    ],
    (SHORT, "soft_rank"): [Gradient(PLAIN, "soft_rank, descending")],
    (SHORT, "soft_sort"): [Gradient(PLAIN, "soft_sort, descending")],
    # that of the mean is divided by their number, and the lists that count have it
    (SHORT, "ndcg_loss"): [SEED, SEED, Kernel("_pull_ndcg n = 64", N64, 12 * N64), *RANKED],
    (SHORT, "spearman_loss"): [SEED, SEED, Kernel("_pull_correlations n = 64", N64, 12 * N64), *RANKED],
    (SQUARE, TRANSPORT): [Chain(2 * 6_300)],
    (WIDE, TRANSPORT): [Chain(10_600)],
}  # fmt: skip


@cache
def instructions() -> dict[str, resources.Case | int]:
    """The cases of `benchmarks.resources` by name; those of `resources_draws` are numbers."""
    drawn = {case.id.rstrip(): number for number, case in enumerate(resources_draws.cases())}
    return {case.id: case for case in resources.CASES} | drawn


@cache
def per_entry(name: str) -> float:
    case = instructions()[name]
    if isinstance(case, int):
        return resources_draws.line(case, resources._read, resources.TARGETS["sm_90"]).per_entry
    return resources.line(case, "forward", few=True).per_entry


def seconds(step: Step, cases: dict[str, Any]) -> tuple[float, str]:
    """What a launch takes, and what binds it."""
    if isinstance(step, Measured):
        lines = cases[f"bench: {step.table}"]
        time = step.share * lines[step.line][0]["device"]
        if step.sorts or step.share < 1:
            return time - step.sorts * lines[SORT][0]["device"], "the rest" if step.sorts else "instructions"
        return time, step.line
    if isinstance(step, Gradient):
        forward, both = cases[f"bench: {step.table}"][step.line]
        return both["device"] - forward["device"], step.line
    if isinstance(step, Chain):
        return step.instructions * CYCLES / resources.CLOCK, "one program's instructions"
    memory = step.moved / (cases["copy"]["a copy, GB/s"] * 1e9)
    rate = resources.SCHEDULERS * resources.CLOCK * step.rate
    issue = step.entries / 32 * per_entry(step.name) / rate if step.name else 0.0
    return max((memory, "memory"), (issue, "instructions"), (SHORTEST, "the launch"))


def launches(make: device.Maker, case: device.Case, names: tuple[str, ...] | None) -> dict[str, str]:
    """By line, or by those named, our kernels and torch's operations, forward / with the gradient."""
    from device import backward, pretend, tensor  # tests/ has to be on the path

    found = {}
    with pretend(pytest.MonkeyPatch()) as watched:
        x = tensor(case.rows, case.n, dtype=case.dtype)
        for name, function in make(case, x.detach()).items():
            if name in names if names else not name.startswith(("softmax", "torch.")):
                found[name] = _counted(function, x, watched, backward)
    return found


def _counted(
    function: Callable[[Tensor], Any], x: Tensor, watched: Any, backward: Callable[[Tensor], None]
) -> str:
    watched.forget()
    y = function(x)
    counts = [len(watched.kernels) + len(watched.torch)]
    if isinstance(y, Tensor) and y.requires_grad:
        backward(y)
        counts.append(len(watched.kernels) + len(watched.torch))
    return " / ".join(map(str, counts))


SOFTMAX, SORT, OF_TOPK, SQUARED = "softmax", "torch.sort", "torch.topk", "softmax of n²"


class Goal(NamedTuple):
    """A time, forward and with the gradient: in µs, or in times what another line of the table took."""

    forward: float
    both: float | None = None
    of: str = ""

    def seconds(self, known: dict[str, Any]) -> list[float | None]:
        goals = (self.forward, self.both)
        units = [1e-6, 1e-6] if not self.of else [each["device"] for each in known[self.of]]
        return [None if goal is None else goal * unit for goal, unit in zip(goals, units, strict=False)]


_SEARCH = Goal(1.5, None, SOFTMAX)
GOALS: dict[tuple[str, str], Goal] = {
    (TOPK, "soft_topk"): Goal(1.3, 1.0, SOFTMAX),
    (TOPK, "topk_mask"): _SEARCH,
    (TOPK_LONG, "soft_topk"): Goal(1.3, 1.0, SOFTMAX),
    (TOPK_LONG, "topk_mask"): _SEARCH,
    (TOPK_HALF, "soft_topk"): Goal(1.2, 0.9, SOFTMAX),
    (TOPK_HALF, "topk_mask"): Goal(1, None, OF_TOPK),
    (TOPK_ONE, "topk_mask"): Goal(1, None, OF_TOPK),
    **{(table, "soft_topk_magnitude"): Goal(2.5, 2.5, SOFTMAX) for table in (SHORT, LONG, FEW)},
    **{(table, "inverse_soft_count"): Goal(1.5, 1.5, SOFTMAX) for table in (SHORT, LONG)},
    **{(table, "FenchelYoungTopKLoss"): Goal(1.5, 1.5, SOFTMAX) for table in (SHORT, LONG, FEW)},
    **{(table, "soft_budget, by score"): Goal(3, 3, SOFTMAX) for table in (SHORT, LONG, FEW)},
    **{(table, "budget_mask"): Goal(1.3, None, SORT) for table in (SHORT, LONG)},
    **{(table, name): _SEARCH for table in (SHORT, LONG, FEW) for name in ("kth_value", "quantile")},
    **{(SHORT, name): Goal(8, 16) for name in ("soft_rank", "soft_sort")},
    **{(LONG, name): Goal(1.3, 1.5, SORT) for name in ("soft_rank", "soft_sort")},
    (SHORT, "soft_rank, projection"): Goal(10, 15),
    (LONG, "soft_rank, projection"): Goal(2, 2, SORT),
    **{(SHORT, name): Goal(15, 30) for name in ("ndcg_loss", "spearman_loss")},
    **{(LONG, name): Goal(1.6, 2.2, SORT) for name in ("ndcg_loss", "spearman_loss")},
    **{(table, "soft_permutation"): Goal(2, 2, SQUARED) for table in (SQUARE, WIDE)},
    (WIDE, TRANSPORT): Goal(100, 150),
    (ASSIGNED, "soft_assign"): Goal(300, 400),
    (SHORT, "sample, conditional_poisson"): Goal(100),
    **{(SHORT, f"sample, {design}"): Goal(10) for design in ("systematic", "pivotal")},
    **{(table, "sample_khot"): Goal(1, None, OF_TOPK) for table in (SHORT, LONG)},
}
_CALIBRATED = (
    "the slowest row that is calibrated, by one program: four steps that follow one another. A row with "
    "Σπ(1 − π) ≥ 2.5 takes none. A seed, the soft top-k, the draw and the calibration are four launches; in "
    "the ordinary way two more carry the gradient"
)
_SUMMED = (
    "two launches of 2.0 µs each way. The last program to end could add up the losses, if it knew that it is "
    "the last: a count that begins at 0 takes a launch, and one that stays between calls would be shared by "
    "streams and graphs. The gradient of the mean is divided by the number of rows first"
)
_PULLED = (
    "the backward, 12 µs: two pairs of scans, whose results go through memory, each of which waits for what "
    "is before it"
)
#: By table and line, what binds where the goal is missed. Instructions are those of `resources.md`.
BINDS: dict[tuple[str, str], str] = {
    (TOPK, "soft_topk"): "54 instructions an entry for one evaluation, where a softmax has 13",
    (SHORT, "soft_topk_magnitude"): "103 instructions an entry; missed by less than a twentieth",
    (SHORT, "FenchelYoungTopKLoss"): _SUMMED,
    (SHORT, "soft_sort"): _PULLED,
    (SHORT, "sample_khot"): _CALIBRATED,
}


def verdict(key: tuple[str, str], best: list[float | None], known: dict[str, Any]) -> tuple[str, str, str]:
    """The goal, whether it is met, and what binds."""
    if key not in GOALS:
        return "–", "–", ""
    goals = GOALS[key].seconds(known)
    missed = [
        name
        for name, time, goal in zip(("forward", "both"), best, goals, strict=False)
        if time is not None and goal is not None and time > goal
    ]
    text = " / ".join(device.microseconds(goal) for goal in goals if goal is not None)
    if not missed:
        return text, "yes", ""
    return text, f"no: {' and '.join(missed)}", BINDS[key]


def table() -> str:
    results = json.loads((RESULTS / "device.json").read_text(encoding="utf-8"))
    cases = results["cases"]
    rows = []
    plain = ("soft_topk", "topk_mask")
    shapes: dict[str, tuple[device.Maker, device.Case, tuple[str, ...] | None]] = {
        TOPK: (device.soft_topks, device.SOFT_TOPK[0], plain),
        SHORT: (device.others, device.MANY[0], None),
        ASSIGNED: (device.slow, device.MANY[0], None),
        TOPK_LONG: (device.soft_topks, device.SOFT_TOPK[2], plain),
        LONG: (device.others, device.MANY[1], None),
        SQUARE: (device.slow, device.SQUARES[0], None),
        WIDE: (device.slow, device.SQUARES[1], None),
        TOPK_HALF: (device.soft_topks, device.SOFT_TOPK[4], plain),
        TOPK_ONE: (device.soft_topks, device.SOFT_TOPK[-1], plain),
        FEW: (device.streaming, device.SOFT_TOPK[-1], None),
    }
    for title, (make, case, names) in shapes.items():
        for name, counted in launches(make, case, names).items():
            key, table = (title, name), cases.get(f"bench: {title}", {})
            known = table.get(name)
            forward, *both = known if isinstance(known, list) else [{}]
            times = [device.microseconds(each.get("device")) for each in (forward, *both)]
            kernels = [f"{each['kernels']:.0f}" for each in (forward, *both) if "kernels" in each]
            best = [each.get("device") for each in (forward, *both)]
            model = ("–", "–")
            if key in MODELS:
                found = [seconds(step, cases) for step in MODELS[key]]
                best = [sum(s for s, _ in found)]
                if key in GRADIENTS:
                    best.append(best[0] + sum(seconds(step, cases)[0] for step in GRADIENTS[key]))
                model = " / ".join(map(device.microseconds, best)), max(found)[1]
            rows.append([
                case.id, name, " / ".join(times), " / ".join(kernels) or "–", counted, *model,
                *verdict(key, best, table),
            ])  # fmt: skip
    head = ["shape", "operator", "µs, measured", "kernels, measured", "launches now",
            "µs, modelled", "forward bound by", "goal, µs", "met", "what binds"]  # fmt: skip
    setting, now = results["setting"], report.machine(cpu_time=True)["khot"]
    return (
        "# The operators on a GPU\n\n" + (__doc__ or "").partition("\n\n")[2] + "\n"
        f"Measured on {setting['device']}, {setting['khot']}, torch {setting['torch']}, Triton "
        f"{setting['triton']}. Counted and modelled of {now}, torch {torch.__version__}.\n\n"
        f"{report.table(head, rows)}\n"
    )


def main() -> None:
    if len(sys.argv) > 1:
        raise SystemExit(__doc__)
    text = table()
    (RESULTS / "gpu.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
