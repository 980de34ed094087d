"""Time, memory and error of a relaxed top-k (sigmoid-topk, Figure 6; lapsum, 5 and 7; sparse-topk, 4)

This experiment measures khot's operators, the methods of the papers and of their competitors, and
torch.softmax, as functions of n, in the forward pass and in forward and backward. It also measures by how
much the values of a row miss their sum k.
`reproduce.tasks.peers` has the other methods, which are written anew from their descriptions, and
packages where they are installed. Scores are normal with standard deviations from 0.1 to 5, and k = n/10.

    python -m reproduce runtime

Departures from the papers:

- Times are CPU times of one thread, as medians of calls that take turns, since the machine is shared. The
  papers have wall times of GPUs and TPUs. Only ratios can be compared.
- There are 4 rows in float32. sigmoid-topk has 100 rows, each with a random k, and lapsum computes in
  float64.
- The error of the sum is that of float32 throughout. lapsum has float64 where a method allows it.
- A method is left out at sizes at which it would take more than about 10 GB, or minutes.
- sigmoid-topk's figure has a second part, on sampling: `python -m benchmarks.times simple` draws it. lapsum's
  Figure 14, on the time and memory of soft permutations, is drawn by `python -m benchmarks.times memory`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import khot
from reproduce.harness import reporting, study, timing
from reproduce.tasks.peers import PEERS, missing

__all__ = ["EXPERIMENT", "OURS", "PASSES", "Args", "methods", "report", "run", "trials"]

OURS: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "khot.sigmoid_topk": lambda x, k, tau: khot.sigmoid_topk(x, k, tau=tau),
    "khot.laplace_topk": lambda x, k, tau: khot.laplace_topk(x, k, tau=tau),
    "khot.sparse_topk": lambda x, k, tau: khot.sparse_topk(x, k, tau=tau),
}
PASSES = ("forward", "forward + backward")
# The figure's lines; the tables have them all.
DRAWN = ("khot.sigmoid_topk", "torch.softmax", "bisection", "sorted laplace", "pav", "sinkhorn")
# What the papers' figures show: the second method takes longer than the first.
PAPER = (
    ("sigmoid-topk, Figure 6", "halley", "sinkhorn"),
    ("lapsum, Figure 5", "sorted laplace", "sinkhorn"),
    ("sparse-topk, Figure 4 (on a TPU)", "dykstra", "pav"),
)
LAPSUM = "sorted laplace"  # whose sum is the most exact in lapsum's Figure 7


@dataclass(frozen=True)
class Args(study.Args):
    """The sizes, and the timing."""

    ns: tuple[int, ...] = field(
        default=tuple(4**i for i in range(3, 9)), metadata={"help": "Lengths of the rows.", "selects": True}
    )
    rows: int = field(default=4, metadata={"help": "Number of rows."})
    seconds: float = field(default=0.2, metadata={"help": "Seconds for which each call is timed."})


def trials(args: Args) -> list[study.Trial]:
    # times come first: measuring memory changes how the process allocates it
    return [{"what": what, "n": n} for what in ("time", "memory", "error") for n in args.ns]


def methods(rows: int, n: int, k: int) -> dict[str, Callable[[Tensor, int, float], Tensor]]:
    """The methods that can be run at this size."""
    found = {name: peer.call for name, peer in PEERS.items() if not missing(peer) and peer.fits(rows, n, k)}
    return {"torch.softmax": lambda x, k, tau: torch.softmax(x / tau, -1), **OURS, **found}


def run(args: Args, trial: study.Trial, checkpoint: study.Checkpoint) -> Iterator[study.Row]:
    n = int(trial["n"])
    k = max(1, n // 10)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(args.rows, n, generator=random) * torch.linspace(0.1, 5, args.rows)[:, None]
    found = methods(args.rows, n, k)
    if trial["what"] == "error":
        for name, operator in found.items():
            if name != "torch.softmax" and not (name in PEERS and PEERS[name].ranks):
                total = operator(x, k, 1.0).double().sum(-1)
                yield {"method": name, "pass": PASSES[0], "error": (total - k).abs().max().item()}
        return
    forward: dict[str, timing.Call] = {name: partial(call, x, k, 1.0) for name, call in found.items()}
    both = {
        name: timing.forward_backward(lambda x, call=call: call(x, k, 1.0), x) for name, call in found.items()
    }
    for kind, timed in zip(PASSES, (forward, both), strict=True):
        if trial["what"] == "time":
            medians = timing.medians(timed, seconds=args.seconds, clock=time.thread_time)
            for name, seconds in medians.items():
                yield {"method": name, "pass": kind, "ms": 1e3 * seconds}
        else:
            for name, call in timed.items():
                size = timing.peak_memory(call)
                if size is not None:
                    yield {"method": name, "pass": kind, "mb": size / 1e6}


def report(args: Args, rows: list[study.Row], folder: Path) -> str:
    """The times as ratios, the memory, and what the papers' figures show."""

    def at(name: str, n: int, unit: str, kind: str = PASSES[1]) -> float | None:
        found = reporting.column(reporting.where(rows, method=name, n=n, **{"pass": kind}), unit)
        return found[0] if found else None

    ns = sorted({int(row["n"]) for row in rows})
    names = list(dict.fromkeys(str(row["method"]) for row in rows))

    def ratios(name: str, n: int) -> str:
        cells = [(at(name, n, "ms", kind), at("torch.softmax", n, "ms", kind)) for kind in PASSES]
        return " / ".join(f"{mine / base:.3g}" if mine and base else "–" for mine, base in cells)

    times = [[name, *(ratios(name, n) for n in ns)] for name in names]
    sizes = [
        [name, *("–" if (mb := at(name, n, "mb")) is None else f"{mb:.1f}" for n in ns)] for name in names
    ]
    says = []
    for source, fast, slow in PAPER:
        common = [(n, a, b) for n in ns if (a := at(fast, n, "ms")) and (b := at(slow, n, "ms"))]
        if common:
            n, a, b = common[-1]
            says.append(
                f"- {source}: {fast} is faster than {slow}. Here {slow} takes {b / a:.3g} times as long at "
                f"n = {n:,}."
            )
    ends = {name: error for name in names if (error := at(name, ns[-1], "error", PASSES[0])) is not None}
    if LAPSUM in ends:
        better = [name for name, error in ends.items() if error < ends[LAPSUM]]
        says.append(
            f"- lapsum, Figure 7: the sum of {LAPSUM} is closer to k than that of all other methods. Here, "
            f"at n = {ns[-1]:,}, closer are: {', '.join(better) or 'none'}."
        )
    errors = [
        [name, *("–" if (e := at(name, n, "error", PASSES[0])) is None else f"{e:.1e}" for n in ns)]
        for name in names
        if any(at(name, n, "error", PASSES[0]) is not None for n in ns)
    ]
    left_out = [name for name in PEERS if name not in names]
    _draw(rows, ns, folder / "runtime.png")
    head = ["", *(f"n = {n:,}" for n in ns)]
    return "\n\n".join(
        [
            "CPU time divided by that of torch.softmax, in forward / forward + backward, with "
            f"{args.rows} rows and k = n/10:",
            reporting.table(head, times).strip(),
            "The largest growth of the process in forward + backward, in MB, with an accuracy of 0.1:",
            reporting.table(head, sizes).strip(),
            "The largest error of a row's sum, |Σy − k|, in float32:",
            reporting.table(head, errors).strip(),
            "What the papers' figures show, at the largest n that both methods can do:",
            "\n".join(says),
            "![Time, memory and error of the sum against n](runtime.png)",
            f"Not measured: {'; '.join(f'{name}, {PEERS[name].source}' for name in left_out)}."
            if left_out
            else "",
        ]
    )


def _draw(rows: list[study.Row], ns: list[int], path: Path) -> None:
    """Plot time and memory of forward + backward, and the error of the sum, against n."""
    figure, panels = reporting.figure(3, width=18, height=5)
    units = {
        "ms": (PASSES[1], "CPU time, ms"),
        "mb": (PASSES[1], "memory, MB"),
        "error": (PASSES[0], "error of the sum"),
    }
    for plot, (unit, (kind, label)) in zip(panels, units.items(), strict=True):
        ends = {}
        for name, color in zip(DRAWN, reporting.COLORS, strict=False):
            mine = reporting.where(rows, method=name, **{"pass": kind})
            points = [(n, y) for n in ns for y in reporting.column(reporting.where(mine, n=n), unit) if y > 0]
            if points:
                plot.loglog(*zip(*points, strict=True), ".-" if name in OURS else ".--", color=color)
                ends[name] = (*points[-1], color)
        plot.set_xlabel("n")
        plot.set_title(f"{label}, {kind}", fontsize=12)
        reporting.label_ends(plot, ends)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="sigmoid-topk, Figure 6; lapsum, Figures 5 and 7; sparse-topk, Figure 4",
    needs="nothing",
    takes="2 min of one core",
    Args=Args,
    smoke={"ns": (64, 256), "seconds": 0.01},
    trials=trials,
    run=run,
    report=report,
)
