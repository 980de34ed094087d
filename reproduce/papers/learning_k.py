"""Learning how many features to select (sigmoid-topk, Figure 5)

This is feature selection as in `feature-selection`, but the network is 784-512-256-10 and predicts the digit,
and each pixel has a price λ = 0.01: the loss is the cross-entropy + λ Σπ. *Learned*: the inclusion
probabilities are π = σ(logits), and the size of a sample is one of the two integers next to Σπ, so that the
size is learned. It starts from several guesses. *Fixed*: the same with π = σ_k(logits), for each k of a grid.
Both draw by the pivotal design and have the straight-through gradient. From every guess, the learned size
should end where the penalised test loss of the grid has its minimum.

Departures from the paper, which has a picture without numbers, and gives neither batch size nor number of
steps nor guesses nor grid:

- The guesses and the grid are ours. All logits of a guess k₀ start at the logit of k₀/n.
- The batches have 64 images, and 16 masks. The network learns at 0.001 and the logits at 0.03: with 0.05 the
  pixels are dropped before the network has learned to use them. Both rates fall to 0 over the last third.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from khot import estimators, losses, sigmoid_topk
from reproduce.harness import reporting, study, training
from reproduce.harness.study import ArgumentError, Checkpoint, Row, Trial
from reproduce.tasks.selection import TEST_MASKS, Selection

__all__ = ["EXPERIMENT", "Args", "report", "run", "trials"]


@dataclass(frozen=True)
class Args(study.Args):
    """The price of a pixel, the sizes, and the training."""

    seeds: int = field(default=5, metadata={"help": "Number of seeds; they are 0, 1, ...", "selects": True})
    weight: float = field(default=0.01, metadata={"help": "Price λ of a pixel."})
    steps: int = field(default=4_000, metadata={"help": "Training steps."})
    batch: int = field(default=64, metadata={"help": "Images per step."})
    masks: int = field(default=16, metadata={"help": "Masks per step, each for batch/masks images."})
    lr: float = field(default=1e-3, metadata={"help": "Learning rate of the network."})
    logits_lr: float = field(default=0.03, metadata={"help": "Learning rate of the logits."})
    points: int = field(default=50, metadata={"help": "Number of points of the curve of sizes."})
    guesses: tuple[int, ...] = field(
        default=(10, 30, 100, 300), metadata={"help": "Initial values of the learned size.", "selects": True}
    )
    grid: tuple[int, ...] = field(
        default=(5, 10, 15, 20, 30, 50, 100), metadata={"help": "Fixed sizes.", "selects": True}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch % self.masks:
            raise ArgumentError(f"masks = {self.masks}: expected a divisor of batch = {self.batch}")


def trials(args: Args) -> list[Trial]:
    n = training.images(args).n
    for k in (*args.guesses, *args.grid):
        if not 0 < k < n:
            raise ArgumentError(f"size {k}: expected more than 0 and less than {n}, the number of pixels")
    return [
        {"size": size, "k": k, "seed": seed}
        for seed in range(args.seeds)
        for size, ks in (("learned", args.guesses), ("fixed", args.grid))
        for k in ks
    ]


def run(args: Args, trial: Trial, checkpoint: Checkpoint) -> Iterator[Row]:
    found = training.images(args)
    k, learned = int(trial["k"]), trial["size"] == "learned"
    images, labels = found.train_images.to(args.device), found.train_labels.to(args.device)
    model = Selection(found.n, 10).to(args.device)
    torch.nn.init.constant_(model.logits, math.log(k / (found.n - k)))
    optimizer = torch.optim.Adam(
        [
            {"params": model.network.parameters(), "lr": args.lr},
            {"params": [model.logits], "lr": args.logits_lr},
        ],
        fused=True,
    )
    schedule = training.lr_schedule(optimizer, training.linear_over_last_third, args.steps)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}

    def sample(count: int) -> Tensor:
        logits = model.logits.expand(count, -1)
        return estimators.straight_through(logits, None if learned else k, design="pivotal")

    def penalty() -> Tensor:
        probs = model.logits.sigmoid() if learned else sigmoid_topk(model.logits, k)
        return losses.size_penalty(probs, args.weight)

    for step in training.steps(checkpoint, state, args.steps):
        batch = training.minibatches(len(labels), args.batch, step, int(trial["seed"])).to(args.device)
        loss = F.cross_entropy(model(images[batch], sample(args.masks)), labels[batch])
        if learned:
            loss = loss + penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, args.steps // args.points) == 0:
            yield {"step": step + 1, "train_loss": loss.item(), "size_now": penalty().item() / args.weight}

    with torch.no_grad():
        count = len(found.test_labels) // TEST_MASKS * TEST_MASKS
        predicted = model(found.test_images[:count].to(args.device), sample(TEST_MASKS))
        loss = F.cross_entropy(predicted, found.test_labels[:count].to(args.device))
        price = penalty()
    yield {
        "final_size": price.item() / args.weight,
        "test_loss": loss.item(),
        "penalised": (loss + price).item(),
    }


def report(args: Args, rows: list[Row], folder: Path) -> str:
    parts = []
    for size, start in (("learned", "starts at"), ("fixed", "k")):
        lines = []
        for k in sorted({int(row["k"]) for row in reporting.where(rows, size=size)}):
            found = reporting.where(rows, size=size, k=k)
            cells = [
                reporting.spread(reporting.column(found, name), digits)
                for name, digits in (("final_size", 1), ("test_loss", 3), ("penalised", 3))
            ]
            lines.append((str(k), *cells))
        if lines:
            head = (start, "ends at", "cross-entropy", "penalised")
            parts.append(f"### {size.capitalize()} size\n\n{reporting.table(head, lines)}")
    _draw(rows, folder / "sizes.png")
    return (
        "\n".join(parts)
        + """
The losses are those on the test images. The paper's Figure 5 has no numbers. Its caption says: "Learning k
finds a near-optimal k in a single run for different initial guesses."

![Penalised loss by size, and sizes during the training](sizes.png)
"""
    )


def _draw(rows: list[Row], path: Path) -> None:
    figure, (left, right) = reporting.figure(2, width=12)
    final = [row for row in rows if "final_size" in row]

    def mean(name: str, **entries: str | int | float) -> float:
        return statistics.fmean(reporting.column(reporting.where(final, **entries), name))

    grid = sorted({int(row["k"]) for row in reporting.where(final, size="fixed")})
    if grid:
        penalised = [mean("penalised", size="fixed", k=k) for k in grid]
        left.plot(grid, penalised, color=reporting.GREY, marker="o", label="fixed k")
        best = grid[penalised.index(min(penalised))]
        right.axhline(best, color=reporting.GREY, linestyle="--", label="best of the grid")
    guesses = sorted({int(row["k"]) for row in reporting.where(final, size="learned")})
    for color, start in zip(reporting.COLORS, guesses, strict=False):
        place = [mean(name, size="learned", k=start) for name in ("final_size", "penalised")]
        left.plot(*place, "*", color=color, markersize=14, label=f"from {start}")
        for seed in sorted({int(row["seed"]) for row in rows}):
            one = reporting.where(rows, size="learned", k=start, seed=seed)
            steps, sizes = reporting.curve(one, "size_now")
            label = None if seed else f"from {start}"
            right.plot([0, *steps], [float(start), *sizes], color=color, linewidth=1, label=label)
    left.set_title("Penalised test loss, mean over seeds", fontsize=13)
    left.set_xlabel("size: k, or the learned Σπ")
    left.set_ylabel("cross-entropy + λ Σπ")
    right.set_title("The learned size, by seed", fontsize=13)
    right.set_xlabel("step")
    right.set_ylabel("Σπ")
    reporting.log_axis(right)
    for plot in (left, right):
        if plot.lines:
            plot.legend(frameon=False)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="sigmoid-topk, Figure 5",
    needs="MNIST",
    takes="20 min of one core",
    Args=Args,
    smoke={"steps": 20, "points": 4, "guesses": (4, 30), "grid": (5, 20), "seeds": 1},
    trials=trials,
    run=run,
    report=report,
)
