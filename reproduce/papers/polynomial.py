"""Polynomial programming: which gradient of a k-hot sample finds the optimum? (sigmoid-topk, Figure 9)

    minimise over θ:  E ‖x − c‖²,   x k-hot with inclusion probabilities σ_k(θ)

k of the n entries of c are 0.45 and the others are 0.55, so that the optimum selects the others. The
straight-through estimator treats f as linear between two samples, so that it moves π to c and stays there.
The second-order estimator continues to the optimum. Many problems are solved side by side, each with its own
order of c, and each step draws a batch of samples for each of them. The plot shows the exact E ‖x − c‖² = Σ
π(1 − 2c) + c² at the current θ, averaged over the problems.

Departures from the paper, which gives neither the optimiser nor the number of steps of this experiment:

- The optimiser is Adam, which the paper uses elsewhere, with the best of the learning rates 0.1, 0.3 and 1.
- The design is pivotal: the algorithm needs exact inclusion probabilities, and pivotal has them without
  calibration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

import khot
from khot import estimators
from reproduce.harness import reporting, study, training
from reproduce.harness.study import ArgumentError, Checkpoint, Row, Trial

__all__ = ["ESTIMATORS", "EXPERIMENT", "Args", "optimum", "report", "run", "trials"]

ESTIMATORS = ("straight_through", "second_order")
LOW, HIGH = 0.45, 0.55  # the entries of c


@dataclass(frozen=True)
class Args(study.Args):
    """The problems and the optimiser. The defaults are the paper's where it gives them."""

    seeds: int = field(default=5, metadata={"help": "Number of seeds; they are 0, 1, ...", "selects": True})
    n: int = field(default=100, metadata={"help": "Entries of a problem."})
    k: int = field(default=50, metadata={"help": "Ones in a sample, and entries of c that are 0.45."})
    problems: int = field(default=128, metadata={"help": "Problems that are solved side by side."})
    batch: int = field(default=256, metadata={"help": "Samples per problem and step."})
    steps: int = field(default=100, metadata={"help": "Steps of Adam."})
    lr: float = field(default=0.3, metadata={"help": "Learning rate."})
    design: str = field(default="pivotal", metadata={"help": "Sampling design."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k >= self.n:
            raise ArgumentError(f"k = {self.k}: expected less than n = {self.n}")
        if self.design not in khot.sampling.designs:
            raise ArgumentError(
                f"design = {self.design!r}: expected one of {', '.join(khot.sampling.designs)}"
            )


def trials(args: Args) -> list[Trial]:
    return [{"estimator": name, "seed": seed} for seed in range(args.seeds) for name in ESTIMATORS]


def optimum(args: Args) -> tuple[float, float]:
    """E ‖x − c‖² at the best k-hot vector, and with all inclusion probabilities equal."""
    c = torch.full((args.n,), HIGH, dtype=torch.float64)
    c[: args.k] = LOW
    best = khot.topk_mask(c, args.k)
    return _expected(best, c).item(), _expected(torch.full_like(c, args.k / args.n), c).item()


def _expected(probs: Tensor, c: Tensor) -> Tensor:
    """E ‖x − c‖² of a k-hot x with these inclusion probabilities, which is linear in them since x² = x."""
    return (probs * (1 - 2 * c) + c**2).sum(-1)


def run(args: Args, trial: Trial, checkpoint: Checkpoint) -> Iterator[Row]:
    """E ‖x − c‖², averaged over the problems, before each step of the descent."""
    order = torch.rand(args.problems, args.n).to(args.device)
    c = torch.where(khot.topk_mask(order, args.k) == 1, LOW, HIGH)
    logits = nn.ParameterList([torch.zeros_like(order)])
    optimizer = torch.optim.Adam(logits, lr=args.lr)
    for step in training.steps(checkpoint, {"logits": logits, "optimizer": optimizer}, args.steps):
        with torch.no_grad():
            value = _expected(khot.sigmoid_topk(logits[0], args.k), c).mean().item()
        yield {"step": step, "loss": round(value, 6)}
        x = estimators.sample_khot(
            logits[0].expand(args.batch, -1, -1),
            args.k,
            estimator=cast(estimators.EstimatorName, trial["estimator"]),
            design=cast(khot.sampling.DesignName, args.design),
        )
        loss = (x - c).square().sum(-1).mean(0).sum()  # the problems are independent
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def report(args: Args, rows: list[Row], folder: Path) -> str:
    best, start = optimum(args)
    lines = []
    for name in ESTIMATORS:
        ends = [
            reporting.curve(reporting.where(rows, estimator=name, seed=seed), "loss")[1][-1]
            for seed in sorted({int(row["seed"]) for row in reporting.where(rows, estimator=name)})
        ]
        if ends:
            shares = [100 * (start - end) / (start - best) for end in ends]
            lines.append((name, reporting.spread(ends), f"{reporting.spread(shares, 2)} %"))
    lines.append(("optimum", f"{best:.3f}", "100 %"))
    _draw(args, rows, folder / "polynomial.png")
    head = ("estimator", "E ‖x − c‖²", "of the way to the optimum")
    return f"""{reporting.table(head, lines)}
The figures are those after the last step, mean and deviation over the seeds. The paper's Figure 9 has no
numbers. Its caption says: "The second-order estimator (orange) converges to the optimum, while
straight-through (blue) does not."

![E ‖x − c‖² by step](polynomial.png)
"""


def _draw(args: Args, rows: list[Row], path: Path) -> None:
    figure, (plot,) = reporting.figure()
    for name, color in zip(ESTIMATORS, reporting.COLORS, strict=False):
        steps, losses = reporting.curve(reporting.where(rows, estimator=name), "loss")
        plot.plot(steps, losses, color=color, linewidth=2, label=name)
    plot.axhline(optimum(args)[0], color=reporting.GREY, linestyle="--", label="optimum")
    plot.set_title(f"Polynomial programming: n = {args.n}, k = {args.k}", fontsize=13)
    plot.set_xlabel(f"step of Adam, {args.batch} samples each")
    plot.set_ylabel(f"E ‖x − c‖², mean of {args.problems} problems")
    plot.legend(frameon=False)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="sigmoid-topk, Figure 9",
    needs="nothing",
    takes="3 min of one core",
    Args=Args,
    smoke={"seeds": 1, "n": 20, "k": 10, "problems": 8, "batch": 64, "steps": 60},
    trials=trials,
    run=run,
    report=report,
)
