"""What the operators take on a GPU, as measured and as they are now: `python -m benchmarks.gpu`.

Needs no GPU. The measured times are those of `benchmarks/results/device.json`. "Launches now" are counted on
a pretended device (tests/device.py, which has to be on the path): our kernels and torch's operations that are
not views, forward / with the gradient. A sort of torch is one of them, and takes several kernels.

What is newer than the measurement has a modelled time beside it, which stands until a device measures it: of
each launch what it moves at the bandwidth of a copy, or the instructions that its kernel compiles to, for
sm_90, at three quarters of the issue rate, of kernels that sort at 0.4 of it, as such kernels were measured;
whichever is more, and at least 2 µs. Where few rows are worked on, it is the longest chain of instructions of
one program.

A goal is that of the project, as a time, forward / with the gradient: so many softmaxes, sorts or
`torch.topk` of the same tensor, as measured. It is met if the modelled time, or else the measured one, is no
more; where only the forward pass has a modelled time, that counts alone. Where the goal is missed, the last
column says what binds. The host's time is in `host.md`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks import device, report

RESULTS = Path(__file__).parent / "results"
SHORT, LONG = "other operators, (4,096, 64) float32", "other operators, (4,096, 8,192) float32"
FEW = "long rows, (1, 6,300,000) float32"
TOPK, TOPK_LONG, TOPK_HALF, TOPK_ONE = (f"soft top-k, {device.SOFT_TOPK[i].id}" for i in (0, 2, 4, -1))
SQUARE, WIDE, ASSIGNED = (f"n² and more, {case.id}" for case in (*device.SQUARES, device.MANY[0]))
TRANSPORT = "sorted_soft_topk, k = 16"


class Modelled(NamedTuple):
    """What binds the forward pass; µs forward, and with the gradient if its launches are newer, too."""

    bound: str
    forward: float
    both: float | None = None

    def seconds(self) -> list[float]:
        return [1e-6 * time for time in (self.forward, self.both) if time is not None]


#: By table and line, what is newer than the measurement, of 4de9cc0.
MODELLED: dict[tuple[str, str], Modelled] = {
    (TOPK, "topk_mask"): Modelled("instructions", 2.5),
    (SHORT, "soft_topk, packed"): Modelled("the launches", 4.0, 8.0),
    (SHORT, "inverse_soft_count"): Modelled("the launch", 2.0),
    (SHORT, "kth_value"): Modelled("instructions", 2.1, 4.2),
    (SHORT, "quantile"): Modelled("instructions", 2.6, 4.6),
    (SHORT, "FenchelYoungTopKLoss"): Modelled("the launch", 4.0, 8.0),
    (SHORT, "budget_mask"): Modelled("instructions", 2.6),
    (SHORT, "soft_rank"): Modelled("soft_rank, descending", 4.0, 9.4),
    (SHORT, "soft_sort"): Modelled("soft_sort, descending", 7.0, 19.0),
    (SHORT, "soft_rank, projection"): Modelled("instructions", 9.2),
    (SHORT, "ndcg_loss"): Modelled("ndcg_loss", 11.2, 22.7),
    (SHORT, "spearman_loss"): Modelled("spearman_loss", 14.3, 25.7),
    (SHORT, "sample_khot"): Modelled("one program's instructions", 27.4),
    (SHORT, "sample, systematic"): Modelled("instructions", 7.2),
    (SHORT, "sample, pivotal"): Modelled("instructions", 8.7),
    (SHORT, "sample, conditional_poisson"): Modelled("instructions", 80.7),
    (LONG, "inverse_soft_count"): Modelled("instructions", 66.5),
    (LONG, "quantile"): Modelled("kth_value", 137.8),
    (LONG, "FenchelYoungTopKLoss"): Modelled("memory", 92.1),
    (LONG, "budget_mask"): Modelled("instructions", 1427.8),
    (LONG, "soft_rank"): Modelled("the rest", 2031.4),
    (LONG, "soft_sort"): Modelled("the rest", 2170.0),
    (LONG, "soft_rank, projection"): Modelled("instructions", 2723.4),
    (LONG, "ndcg_loss"): Modelled("the rest", 2731.9),
    (LONG, "spearman_loss"): Modelled("the rest", 3790.8),
    (LONG, "sample_khot"): Modelled("instructions", 416.2),
    (LONG, "sample, systematic"): Modelled("instructions", 368.6),
    (LONG, "sample, pivotal"): Modelled("instructions", 664.9),
    (SQUARE, "soft_permutation"): Modelled("instructions", 8.4),
    (SQUARE, TRANSPORT): Modelled("one program's instructions", 146.8, 187.7),
    (WIDE, "soft_permutation"): Modelled("instructions", 29.9),
    (WIDE, TRANSPORT): Modelled("one program's instructions", 94.2, 128.6),
    (TOPK_HALF, "soft_topk"): Modelled("memory", 359.0, 834.2),
    (FEW, "soft_topk_magnitude"): Modelled("instructions", 77.8),
    (FEW, "FenchelYoungTopKLoss"): Modelled("instructions", 69.1),
    (FEW, "soft_budget, by score"): Modelled("instructions", 134.0),
    (FEW, "soft_budget, by value"): Modelled("instructions", 194.8),
}


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
#: By table and line, what binds where the goal is missed.
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
            if key in MODELLED:
                best = [*MODELLED[key].seconds()]
                model = " / ".join(map(device.microseconds, best)), MODELLED[key].bound
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
        f"{setting['triton']}. Counted of {now}, torch {torch.__version__}.\n\n"
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
