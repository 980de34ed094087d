"""Time and memory of a relaxed top-k (sigmoid-topk, Figure 6; lapsum, Figure 5; sparse-topk, Figure 4)

khot's operators, what the papers and their competitors do (`khot.experiments.peers`: written from their
description, and packages where they are installed), and torch.softmax, against n: forward, and forward and
backward. Scores are normal with deviations from 0.1 to 5, k = n/10.

    khot reproduce runtime

Where it departs from the papers:

- Times are CPU times of one thread, medians of calls that take turns, since the machine is shared. The papers
  have GPUs and TPUs, and wall times. What counts are ratios.
- There are 4 rows, in float32; sigmoid-topk has 100 with any k, and lapsum computes in float64.
- What would take more than about 10 GB or minutes at some n is left out there.
- sigmoid-topk's figure has a second part, on sampling; `python -m benchmarks.sampling` and
  `benchmarks.conditional_poisson` stand for it.
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
from khot.experiments import study, timing
from khot.experiments.peers import PEERS, missing

OURS: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "khot.sigmoid_topk": lambda x, k, tau: khot.sigmoid_topk(x, k, tau=tau),
    "khot.laplace_topk": lambda x, k, tau: khot.laplace_topk(x, k, tau=tau),
    "khot.sparse_topk": lambda x, k, tau: khot.sparse_topk(x, k, tau=tau),
}
PASSES = ("forward", "forward + backward")
# What the papers' figures show: the second takes longer than the first.
PAPER = (
    ("sigmoid-topk, Figure 6", "halley", "sinkhorn"),
    ("lapsum, Figure 5", "sorted laplace", "sinkhorn"),
    ("sparse-topk, Figure 4 (on a TPU)", "dykstra", "pav"),
)


@dataclass(frozen=True)
class Args(study.Args):
    """The sizes, and for how long each is timed."""

    ns: tuple[int, ...] = field(
        default=tuple(4**i for i in range(3, 9)), metadata={"help": "Lengths of a row.", "selects": True}
    )
    rows: int = field(default=4, metadata={"help": "Rows."})
    seconds: float = field(default=0.2, metadata={"help": "For which each call is timed."})


def trials(args: Args) -> list[study.Trial]:
    # times first: measuring memory changes how it is allocated
    return [{"what": what, "n": n} for what in ("time", "memory") for n in args.ns]


def methods(rows: int, n: int, k: int) -> dict[str, Callable[[Tensor, int, float], Tensor]]:
    """What can be run at this size."""
    found = {name: peer.call for name, peer in PEERS.items() if not missing(peer) and peer.fits(rows, n, k)}
    return {"torch.softmax": lambda x, k, tau: torch.softmax(x / tau, -1), **OURS, **found}


def run(args: Args, trial: study.Trial, checkpoint: study.Checkpoint) -> Iterator[study.Row]:
    n = int(trial["n"])
    k = max(1, n // 10)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(args.rows, n, generator=random) * torch.linspace(0.1, 5, args.rows)[:, None]
    found = methods(args.rows, n, k)
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
    """Times as ratios, memory, and what the papers' figures show."""

    def at(name: str, n: int, unit: str, kind: str = PASSES[1]) -> float | None:
        found = study.column(study.where(rows, method=name, n=n, **{"pass": kind}), unit)
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
                f"- {source}: {fast} is faster than {slow}. Here {slow} takes {b / a:.3g} times as long, at "
                f"n = {n:,}."
            )
    left_out = [f"{name} ({why})" for name, peer in PEERS.items() if (why := missing(peer))]
    draw(rows, names, ns, folder / "runtime.png")
    head = ["", *(f"n = {n:,}" for n in ns)]
    return "\n\n".join(
        [
            f"CPU time in times of torch.softmax, forward / forward + backward, {args.rows} rows, k = n/10:",
            study.table(head, times).strip(),
            "Memory, MB, by which the process grows at most in forward + backward (good to 0.1):",
            study.table(head, sizes).strip(),
            "What the papers' figures show, at the largest n that both could do:",
            "\n".join(says),
            "![Time and memory against n](runtime.png)",
            f"Not here: {', '.join(left_out)}." if left_out else "",
        ]
    )


def draw(rows: list[study.Row], names: list[str], ns: list[int], path: Path) -> None:
    """Time and memory of forward + backward against n: khot's operators in full."""
    from matplotlib import colormaps

    figure, panels = study.figure(2, width=12, height=5)
    others = [name for name in names if name not in OURS]
    colors = dict(zip(others, colormaps["tab20"].colors, strict=False))  # type: ignore[attr-defined]
    colors |= dict(zip(OURS, study.COLORS, strict=False))
    for plot, unit, label in zip(panels, ("ms", "mb"), ("CPU time, ms", "memory, MB"), strict=True):
        for name in names:
            mine = study.where(rows, method=name, **{"pass": PASSES[1]})
            points = [(n, y) for n in ns for y in study.column(study.where(mine, n=n), unit) if y > 0]
            if points:
                style = ".-" if name in OURS else ".--"
                plot.loglog(*zip(*points, strict=True), style, color=colors[name], label=name)
        plot.set_xlabel("n")
        plot.set_title(f"{label}, forward + backward", fontsize=12)
    figure.legend(
        *panels[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right center"
    )
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="sigmoid-topk, Figure 6; lapsum, Figure 5; sparse-topk, Figure 4",
    needs="nothing",
    takes="2 min of one core",
    Args=Args,
    smoke={"ns": (64, 256), "seconds": 0.05},
    trials=trials,
    run=run,
    report=report,
)
