"""How to find the threshold of sigmoid top-k (sigmoid-topk, Table 5 and Figure 8)

    find c with Σ_j σ(x_j + c) = k,   x_j ~ N(0, s²), s evenly from 0.1 to 5 over the problems, k uniform

for 100 problems at once, in float64, until the error of the sum is at most 1e-8 in each of them. The methods
are bisection, Newton and Halley. In each step Newton and Halley also try the middle of the bracket, and take
whichever of the two points has the smaller error. They start from zero, from the quantile c = −x_(n−k), from
the logit c = σ⁻¹(k/n) − mean x, or from whichever of the last two has the smaller error. They are compared
with khot's own solver, in plain torch and compiled.

    python -m reproduce root-finding

As in the paper, the table has n = 10⁴ and is the mean over 100 draws of the problems, and the figure has
n = 10⁶. The paper's bracket is ±(max |x| + σ⁻¹(1 − ε)), where it does not give ε. Here it is
±(max |x| + 10). The middle of the bracket and the point that a step takes narrow it; the guess does not, so
that the first middle is zero. Departures from the paper:

- Times are CPU times of one thread, as medians of calls that take turns, since the machine is shared. They
  are measured on the first draw only. The paper has wall times of a GPU.
- khot's solver does not stop at 1e-8, but continues to the last digits. For it the table counts passes over
  the scores: one for their mean, variance and extremes, some for histograms if the scores have a wide spread,
  and one per step. The other methods need one pass for each point that they try, which is two per step, and
  more for the guess.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import khot
from khot._kernels.reference import soft_topk
from khot.baselines._root_finders import GUESSES, STEPS, iterate
from reproduce.harness import reporting, study, timing

__all__ = [
    "EXPERIMENT",
    "METHODS",
    "OURS",
    "PAPER",
    "TOLERANCE",
    "Args",
    "problems",
    "report",
    "run",
    "solve",
    "trials",
]

TOLERANCE = 1e-8
MARGIN = 10.0  # by which the bracket exceeds the largest |x|
ROWS_AT_ONCE = 10  # in the figure: the rows are independent, and 100 rows of 10⁶ need several GB
METHODS = ("bisection", *(f"{step}, {guess}" for step in STEPS[1:] for guess in GUESSES))
OURS = ("khot, plain torch", "khot, compiled")
# the number of steps, and milliseconds on the paper's GPU
PAPER = {
    "bisection": ("43.0 ± 0.0", 9.21),
    "newton, zero": ("8.16 ± 0.44", 5.62),
    "newton, quantile": ("7.27 ± 0.73", 5.18),
    "newton, logit": ("7.34 ± 0.86", 4.55),
    "newton, both": ("5.34 ± 0.47", 3.90),
    "halley, zero": ("5.82 ± 0.41", 5.52),
    "halley, quantile": ("4.50 ± 0.56", 4.29),
    "halley, logit": ("4.32 ± 0.53", 3.66),
    "halley, both": ("3.15 ± 0.36", 3.25),
}


@dataclass(frozen=True)
class Args(study.Args):
    """The problems, and the timing."""

    seeds: int = field(default=100, metadata={"help": "Number of draws of the problems.", "selects": True})
    n: int = field(default=10_000, metadata={"help": "Scores per problem in the table."})
    wide: int = field(default=1_000_000, metadata={"help": "Scores per problem in the figure."})
    rows: int = field(default=100, metadata={"help": "Problems that are solved at once."})
    seconds: float = field(default=1.0, metadata={"help": "Seconds for which each method is timed."})


def trials(args: Args) -> list[study.Trial]:
    table: list[study.Trial] = [{"what": "table", "seed": seed} for seed in range(args.seeds)]
    return [*table, {"what": "time", "seed": 0}, {"what": "figure", "seed": 0}]


def problems(rows: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scores (rows, n) in float64, and k (rows, 1)."""
    random = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.1, 5, rows, dtype=torch.float64)[:, None]
    x = torch.randn(rows, n, generator=random, dtype=torch.float64) * spread
    return x, torch.randint(1, n, (rows, 1), generator=random).double()


def solve(x: Tensor, k: Tensor, method: str) -> int:
    """The number of steps until the error of every row is at most TOLERANCE."""
    return len(_errors(x, k, method)) - 1


def _errors(x: Tensor, k: Tensor, method: str) -> list[float]:
    """The largest error of all rows: that of the guess, then after each step, down to TOLERANCE."""
    step, _, guess = method.partition(", ")
    quantile = None
    if guess in ("quantile", "both"):
        n = x.shape[-1]
        quantile = x.sort(-1).values.gather(-1, (n - k.long() - 1).clamp(min=0))
    found = []
    for _, error in itertools.islice(iterate(x, k, step, guess or "zero", quantile, margin=MARGIN), 200):
        found.append(error.abs().max().item())
        if found[-1] <= TOLERANCE:
            break
    return found


def run(args: Args, trial: study.Trial, checkpoint: study.Checkpoint) -> Iterator[study.Row]:
    what = trial["what"]
    x, k = problems(args.rows, args.wide if what == "figure" else args.n, int(trial["seed"]))
    if what == "figure":
        for method in METHODS:
            parts = zip(x.split(ROWS_AT_ONCE), k.split(ROWS_AT_ONCE), strict=True)
            errors = [_errors(*part, method) for part in parts]
            for i, found in enumerate(itertools.zip_longest(*errors, fillvalue=0.0)):
                yield {"method": method, "step": i, "error": max(found)}
        return
    one = torch.ones(args.rows, dtype=torch.float64)
    plain = partial(soft_topk.solve, x, k[:, 0], one, khot.cdfs.Logistic())
    if what == "table":
        for method in METHODS:
            yield {"method": method, "steps": solve(x, k, method)}
        _, _, passes = plain()
        yield {"method": OURS[0], "steps": passes.max().item()}
    else:
        calls: dict[str, Callable[[], object]] = {m: partial(solve, x, k, m) for m in METHODS}
        calls[OURS[0]] = plain
        calls[OURS[1]] = partial(khot.inverse_soft_count, x, k)
        for method, seconds in timing.medians(calls, seconds=args.seconds, clock=time.thread_time).items():
            yield {"method": method, "ms": 1e3 * seconds}


def report(args: Args, rows: list[study.Row], folder: Path) -> str:
    """The numbers of steps, the times, and the course of the error."""
    ms = {row["method"]: float(row["ms"]) for row in rows if row["what"] == "time"}
    lines = []
    for method in (*METHODS, *OURS):
        counted = [float(r["steps"]) for r in rows if r["what"] == "table" and r["method"] == method]
        steps, paper_ms = PAPER.get(method, ("–", math.nan))
        passes = " passes" if method in OURS and counted else ""
        lines.append(
            [
                method,
                reporting.spread(counted, 2) + passes,
                steps,
                f"{ms[method]:.1f}" if method in ms else "–",
                f"{ms[method] / ms['bisection']:.2f}" if method in ms else "–",
                "–" if math.isnan(paper_ms) else f"{paper_ms / PAPER['bisection'][1]:.2f}",
            ]
        )
    _draw(args, rows, folder / "error.png")
    head = ["", "steps", "paper", "CPU ms", "relative to bisection", "paper"]
    return (
        reporting.table(head, lines)
        + f"\nThere are {args.rows} problems with n = {args.n:,}.\n\n![Error after each step](error.png)"
    )


def _draw(args: Args, rows: list[study.Row], path: Path) -> None:
    """Plot the largest error after each step."""
    figure, (axes,) = reporting.figure(width=8.5)
    colors: dict[str, str] = dict(zip(GUESSES, reporting.COLORS, strict=False))
    for method in METHODS:
        step, _, guess = method.partition(", ")
        errors = [float(row["error"]) for row in rows if row["what"] == "figure" and row["method"] == method]
        axes.plot(
            errors,
            color=colors.get(guess, reporting.GREY),
            linestyle="--" if step == "newton" else "-",
            label=method,
        )
    axes.axhline(TOLERANCE, color=reporting.GREY, linewidth=1, linestyle=":")
    axes.set_yscale("log")
    axes.set_xlim(0, 14)
    axes.set_xlabel("step")
    axes.set_ylabel(f"largest |Σσ − k| of {args.rows} problems, n = {args.wide:,}")
    figure.legend(frameon=False, fontsize=9, loc="outside right center")
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="sigmoid-topk, Table 5 and Figure 8",
    needs="nothing",
    takes="5 min of one core",
    Args=Args,
    smoke={"seeds": 2, "n": 500, "wide": 2_000, "rows": 20, "seconds": 0.01},
    trials=trials,
    run=run,
    report=report,
)
