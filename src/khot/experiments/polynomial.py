"""Polynomial programming: which gradient of a k-hot sample finds the optimum? (sigmoid-topk, Figure 9)

    minimise over θ:  E ‖x − c‖²,   x k-hot with inclusion probabilities σ_k(θ)

k of the n entries of c are 0.45, the others 0.55, so that the optimum draws the others. The straight-through
estimator takes f to be linear between two samples, so it drives π to c and stays there; the second-order one
goes on to the optimum. Many problems, each with its own order of c, are solved side by side, and each step
draws a batch of samples for every one of them.

    python -m khot.experiments.polynomial --out polynomial.json

About 4 minutes on one core. The paper gives neither optimiser nor number of steps; Adam it uses elsewhere.
What is plotted is the exact E ‖x − c‖² = Σ π(1 − 2c) + c² at the current θ, averaged over the problems. An
estimator whose curve the file of results already has, for the same arguments, is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import khot
from khot import estimators

__all__ = ["ESTIMATORS", "Args", "main", "optimum", "run"]

ESTIMATORS = ("straight_through", "second_order")
LOW, HIGH = 0.45, 0.55  # the entries of c


@dataclass(frozen=True)
class Args:
    """What the programme can be told; the defaults are the paper's where it says."""

    n: int = field(default=100, metadata={"help": "Entries of a problem."})
    k: int = field(
        default=50, metadata={"help": "How many of them a sample has, and how many of c are 0.45."}
    )
    problems: int = field(default=128, metadata={"help": "Problems, solved side by side."})
    batch: int = field(default=256, metadata={"help": "Samples a problem and step."})
    steps: int = field(default=100, metadata={"help": "Steps of Adam."})
    lr: float = field(default=0.3, metadata={"help": "Learning rate."})
    design: str = field(default="pivotal", metadata={"help": "Sampling design."})
    device: str = field(default="cpu", metadata={"help": "Where to compute: cpu, cuda, ..."})
    seed: int = field(default=0, metadata={"help": "Seed of the problems and samples."})
    out: Path = field(
        default=Path("polynomial.json"),
        metadata={"help": "File of results; the plot goes beside it, with the ending .png."},
    )


def run(args: Args) -> dict[str, Any]:
    """Solve the problems with each estimator; returns, writes, prints and plots the results.

    Returns:
        ``args``, ``torch``, ``optimum``, ``start`` (E ‖x − c‖² at θ = 0), and ``estimators``: for each its
        ``loss``, one number a step, and ``seconds``.
    """
    settings = {name: value for name, value in dataclasses.asdict(args).items() if name != "out"}
    best, start = optimum(args)
    result: dict[str, Any] = {
        "args": settings,
        "torch": torch.__version__,
        "optimum": best,
        "start": start,
        "estimators": {},
    }
    if args.out.exists():
        earlier = json.loads(args.out.read_text())
        if earlier["args"] == settings:
            result["estimators"] = earlier["estimators"]
    columns = (TextColumn("{task.description:<18}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name in ESTIMATORS:
            task = progress.add_task(name, total=args.steps)
            if name in result["estimators"]:
                progress.update(task, completed=args.steps)
                continue
            began = time.perf_counter()
            losses = []
            for loss in descend(name, args):
                losses.append(loss)
                progress.advance(task)
            seconds = time.perf_counter() - began
            result["estimators"][name] = {"loss": losses, "seconds": round(seconds, 1)}
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print_table(result)
    draw(result, args.out.with_suffix(".png"))
    return result


def optimum(args: Args) -> tuple[float, float]:
    """E ‖x − c‖² at the best k-hot vector, and with all inclusion probabilities equal."""
    c = torch.full((args.n,), HIGH, dtype=torch.float64)
    c[: args.k] = LOW
    best = khot.topk_mask(c, args.k)
    return expected(best, c).item(), expected(torch.full_like(c, args.k / args.n), c).item()


def expected(probs: Tensor, c: Tensor) -> Tensor:
    """E ‖x − c‖² of every k-hot x with these inclusion probabilities: x² = x."""
    return (probs * (1 - 2 * c) + c**2).sum(-1)


def descend(estimator: str, args: Args) -> Any:
    """Yield E ‖x − c‖², averaged over the problems, before each step of the descent."""
    generator = torch.Generator(args.device).manual_seed(args.seed)
    order = torch.rand(args.problems, args.n, device=args.device, generator=generator)
    c = torch.where(khot.topk_mask(order, args.k) == 1, LOW, HIGH)
    logits = torch.zeros_like(order, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=args.lr)
    for _ in range(args.steps):
        with torch.no_grad():
            yield expected(khot.sigmoid_topk(logits, args.k), c).mean().item()
        x = estimators.sample_khot(
            logits.expand(args.batch, -1, -1),
            args.k,
            estimator=estimator,
            design=args.design,
            generator=generator,
        )
        loss = (x - c).square().sum(-1).mean(0).sum()  # the problems do not share their gradients
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def print_table(result: dict[str, Any]) -> None:
    table = Table(title="E ‖x − c‖² after the last step")
    for column in ("estimator", "loss", "of the way to the optimum", "seconds"):
        table.add_column(column, justify="left" if column == "estimator" else "right")
    start, best = result["start"], result["optimum"]
    for name, curve in result["estimators"].items():
        last = curve["loss"][-1]
        way = (start - last) / (start - best)
        table.add_row(name, f"{last:.2f}", f"{100 * way:.1f} %", f"{curve['seconds']:.0f}")
    table.add_row("optimum", f"{best:.2f}", "100.0 %", "")
    Console().print(table)


def draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    colors = {"straight_through": "#0b6e99", "second_order": "#d9730d"}
    args = result["args"]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, curve in result["estimators"].items():
        axes.plot(curve["loss"], color=colors[name], linewidth=2, label=name)
    axes.axhline(result["optimum"], color="#6b6b6b", linestyle="--", label="optimum")
    axes.set_title(f"Polynomial programming: n = {args['n']}, k = {args['k']}", fontsize=13)
    axes.set_xlabel(f"step of Adam, {args['batch']} samples each")
    axes.set_ylabel(f"E ‖x − c‖², mean of {args['problems']} problems")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """The command: one option for each of :class:`Args`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in dataclasses.fields(Args):
        parser.add_argument(
            f"--{option.name}",
            type=type(option.default),
            default=option.default,
            help=f"{option.metadata['help']} Default: {option.default}.",
        )
    run(Args(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
