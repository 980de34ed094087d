"""What the operators take on a GPU, as measured and as they are now: `python -m benchmarks.gpu`.

Needs no GPU. The measured times are those of `benchmarks/results/device.json`. "Launches now" are counted on
a pretended device (tests/device.py, which has to be on the path): our kernels and torch's operations that are
not views, forward / with the gradient. A sort of torch is one of them, and takes several kernels. What is
newer than the measurement has a modelled time beside it: of each launch what it moves at the bandwidth of a
copy, or the instructions that its kernel compiles to (`benchmarks.resources`, for sm_90) at the issue rate
that such a kernel may hope for, whichever is more, and at least what the shortest kernel takes.
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
SHORT, LONG = "other operators, (4,096, 64) float32", "other operators, (4,096, 8,192) float32"
FEW = "long rows, (1, 6,300,000) float32"


class Kernel(NamedTuple):
    """A launch: the kernel's name in `benchmarks.resources`, the entries that it takes and the bytes that it
    moves."""

    name: str
    entries: float = 0
    moved: float = 0


class Measured(NamedTuple):
    """What was measured of something else that the line starts with."""

    table: str
    line: str


SEED = Kernel("")  # any kernel that takes no longer than the shortest one
N64, N8192, N6M = 4_096 * 64, 4_096 * 8_192, 6_300_000


def budget(by: str, evaluations: int) -> list[Kernel | Measured]:
    """Of few long rows: a fill, what weighs, evaluations and those that return at once, what rescues and what
    writes."""
    step = Kernel(f"_spend_parts logistic, by {by}", N6M, 8 * N6M)
    return [
        SEED, Kernel(f"_weigh_budget_parts logistic, by {by}", N6M, 8 * N6M), *[step] * evaluations,
        *[SEED] * (split_budget.STEPS - evaluations), SEED,
        Kernel(f"_write_budget_parts logistic, by {by}", N6M, 12 * N6M),
    ]  # fmt: skip


#: By table and line, the launches forward of what is newer than the measurement.
MODELS: dict[tuple[str, str], list[Kernel | Measured]] = {
    (SHORT, "quantile"): [Measured(SHORT, "kth_value"), Kernel("_interpolate", 4_096, 4_096 * 12)],
    (LONG, "quantile"): [Measured(LONG, "kth_value"), Kernel("_interpolate", 4_096, 4_096 * 12)],
    (SHORT, "budget_mask"): [Kernel("_greedy_rows n = 64", N64, 12 * N64)],
    # scores and places in order, costs and results at random, of which a row stays in the cache
    (LONG, "budget_mask"): [Measured(LONG, "torch.sort"), Kernel("_greedy", N8192, 20 * N8192)],
    # normal scores at τ = 1 take one turn; what a program writes for itself is counted, too
    (SHORT, "soft_rank, projection"): [SEED, Kernel("_project_rows n = 64, 1 turn", N64, 60 * N64)],
    # the ranks are one row, which torch sorts in some eight kernels
    (LONG, "soft_rank, projection"): [
        SEED, Measured(LONG, "torch.sort"), *[SEED] * 8,
        Kernel("_project_long_rows one turn", N8192, 60 * N8192),
    ],
    # a row of 64 units and its phantom is padded to 128
    (SHORT, "sample, systematic"): [SEED, Kernel("_systematic 128 units at a time", 2 * N64, 8 * N64)],
    (LONG, "sample, systematic"): [SEED, Kernel("_systematic 1,024 units at a time", N8192, 12 * N8192)],
    (SHORT, "sample, pivotal"): [SEED, Kernel("_duels 65 units", 2 * N64, 8 * N64)],
    # 8,193 units are five parts of 2,048
    (LONG, "sample, pivotal"): [
        SEED, Kernel("_phantoms", N8192, 4 * N8192), Kernel("_duels 2,048 units", 1.25 * N8192, 8 * N8192),
        SEED,
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


@cache
def instructions() -> dict[str, int]:
    return {case.id.rstrip(): number for number, case in enumerate(resources_draws.cases())}


@cache
def per_entry(name: str) -> float:
    line = resources_draws.line(instructions()[name], resources._read, resources.TARGETS["sm_90"])
    return line.per_entry


def seconds(step: Kernel | Measured, cases: dict[str, Any]) -> tuple[float, str]:
    """What a launch takes, and what binds it."""
    if isinstance(step, Measured):
        return cases[f"bench: {step.table}"][step.line][0]["device"], step.line
    memory = step.moved / (cases["copy"]["a copy, GB/s"] * 1e9)
    rate = resources.SCHEDULERS * resources.CLOCK * resources.ISSUE
    issue = step.entries / 32 * per_entry(step.name) / rate if step.name else 0.0
    return max((memory, "memory"), (issue, "instructions"), (SHORTEST, "the launch"))


def modelled(steps: list[Kernel | Measured], cases: dict[str, Any]) -> tuple[str, str]:
    found = [seconds(step, cases) for step in steps]
    return device.microseconds(sum(s for s, _ in found)), max(found)[1]


def launches(make: device.Maker, case: device.Case) -> dict[str, str]:
    """By line, our kernels and torch's operations, forward / with the gradient."""
    from device import backward, pretend, tensor  # tests/ has to be on the path

    found = {}
    with pretend(pytest.MonkeyPatch()) as watched:
        x = tensor(case.rows, case.n, dtype=case.dtype)
        for name, function in make(case, x.detach()).items():
            if not name.startswith(("softmax", "torch.")):
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


def table() -> str:
    results = json.loads((RESULTS / "device.json").read_text(encoding="utf-8"))
    cases = results["cases"]
    rows = []
    shapes: dict[str, tuple[device.Maker, device.Case]] = {
        SHORT: (device.others, device.MANY[0]),
        LONG: (device.others, device.MANY[1]),
        FEW: (device.streaming, device.SOFT_TOPK[-1]),
    }
    for title, (make, case) in shapes.items():
        for name, counted in launches(make, case).items():
            known = cases.get(f"bench: {title}", {}).get(name)
            forward, *both = known if isinstance(known, list) else [{}]
            times = [device.microseconds(each.get("device")) for each in (forward, *both)]
            kernels = [f"{each['kernels']:.0f}" for each in (forward, *both) if "kernels" in each]
            steps = MODELS.get((title, name))
            rows.append([
                case.id, name, " / ".join(times), " / ".join(kernels) or "–", counted,
                *(modelled(steps, cases) if steps else ("–", "–")),
            ])  # fmt: skip
    head = ["shape", "operator", "µs, measured", "kernels, measured", "launches now",
            "µs forward, modelled", "bound by"]  # fmt: skip
    setting = results["setting"]
    return (
        "# The operators on a GPU\n\n" + (__doc__ or "").partition("\n\n")[2] + "\n"
        f"Measured on {setting['device']}, {setting['khot']}, torch {setting['torch']}, Triton "
        f"{setting['triton']}. Counted with torch {torch.__version__}.\n\n{report.table(head, rows)}\n"
    )


def main() -> None:
    if len(sys.argv) > 1:
        raise SystemExit(__doc__)
    text = table()
    (RESULTS / "gpu.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
