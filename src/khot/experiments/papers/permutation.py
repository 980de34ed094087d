"""Sorting pictures of numbers, learned from their order alone (lapsum, Table 4)

Each picture shows four digits side by side. A convolutional network computes one score for each picture, and
n pictures are sorted by their scores. The training only knows the right order. Its loss is
`khot.losses.permutation_cross_entropy`, which compares the soft permutation of the scores with the true
permutation row by row. The temperature is learned, too, and starts at 0.4.

    khot reproduce permutation --data-dir FOLDER --seeds 1

The options `--ns 7,9,15` and `--cdfs logistic` choose other lengths and another CDF. Departures from the
paper:

- The paper does not describe the network. Here it has two convolutions with 16 and 32 filters of 5 x 5, each
  followed by pooling, and 64 hidden units.
- The paper does not describe the training either. Here it is Adam, with a learning rate that rises to 2e-3
  and falls to 0, for as many steps of 100 pictures as a CPU takes in a few minutes. The curves in the plot
  suggest what more steps would give.
- Every step has new numbers, composed of training images. The test has 20,000 sequences of 10,000 numbers,
  which are composed of test images.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import khot
from khot.experiments.harness import reporting, study, training
from khot.experiments.harness.data import Images
from khot.experiments.tasks import numbers

__all__ = ["DIGITS", "EXPERIMENT", "START", "Args", "Network", "judge", "report", "run", "trials"]

DIGITS, PICTURES, SEQUENCES = 4, 10_000, 20_000
START = 0.4  # the paper's initial temperature
# % of sequences in the right order, and of elements in the right place
PAPER = {3: (93.1, 95.3), 5: (84.2, 92.9), 7: (73.0, 90.5), 9: (62.6, 88.6), 15: (31.6, 82.6)}


@dataclass(frozen=True)
class Args(study.Args):
    """What is sorted, and the training."""

    ns: tuple[int, ...] = field(
        default=(3, 5), metadata={"help": "Lengths of the sequences.", "selects": True}
    )
    cdfs: tuple[str, ...] = field(
        default=("laplace",), metadata={"help": "CDFs of the soft permutation.", "selects": True}
    )
    pictures: int = field(default=100, metadata={"help": "Pictures per step."})
    steps: int = field(default=1_500, metadata={"help": "Training steps."})
    lr: float = field(default=2e-3, metadata={"help": "The highest learning rate of Adam."})


def trials(args: Args) -> list[study.Trial]:
    return [
        {"n": n, "cdf": cdf, "seed": seed} for seed in range(args.seeds) for n in args.ns for cdf in args.cdfs
    ]


class Network(nn.Module):
    """Pictures (..., height, width) to scores (...), and the temperature to sort them at."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        # without padding nothing would be left of scikit-learn's digits after two convolutions
        padding = 0 if height >= 16 else 2
        h, w = (((side - 4 + 2 * padding) // 2 - 4 + 2 * padding) // 2 for side in (height, width))
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, height)),
            nn.Conv2d(1, 16, 5, padding=padding),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 5, padding=padding),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * h * w, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # twice as fast on a CPU
        self.log_tau = nn.Parameter(torch.tensor(math.log(START)))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layers(pictures.flatten(0, -3)).view(pictures.shape[:-2])


def run(args: Args, trial: study.Trial, checkpoint: study.Checkpoint) -> Iterator[study.Row]:
    images, n, cdf, seed = training.images(args), int(trial["n"]), str(trial["cdf"]), int(trial["seed"])
    height, width = images.shape
    network = Network(height, DIGITS * width).to(args.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, pct_start=0.1)
    state = {"network": network, "optimizer": optimizer, "schedule": schedule}
    count = max(1, args.pictures // n)
    for step in training.steps(checkpoint, state, args.steps):
        # a different seed for each step, as no run has 10⁶ steps
        index = numbers.pick((count, n), DIGITS, seed * 1_000_000 + step, len(images.train_labels))
        pictures, value = numbers.draw(images.train_images, images.train_labels, images.shape, index)
        order = value.argsort(-1).to(args.device)
        loss = khot.losses.permutation_cross_entropy(
            network(pictures.to(args.device)), order, tau=network.log_tau.exp(), cdf=khot.cdfs.resolve(cdf)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, args.steps // 10) == 0 or step + 1 == args.steps:
            tested = PICTURES if step + 1 == args.steps else PICTURES // 10
            found = judge(network, images, n, tested, args.device)
            yield {"step": step + 1, "tau": network.log_tau.exp().item(), "loss": loss.item(), **found}


@torch.no_grad()
def judge(network: nn.Module, images: Images, n: int, count: int, device: str) -> study.Row:
    """The shares of sequences in the right order, and of elements in the right place.

    The sequences are drawn from ``count`` test numbers.
    """
    index = numbers.pick((count,), DIGITS, 0, len(images.test_labels))
    scores, values = [], []
    for part in index.split(500):
        pictures, value = numbers.draw(images.test_images, images.test_labels, images.shape, part)
        scores.append(network(pictures.to(device)).cpu())
        values.append(value)
    sequence = numbers.pick((SEQUENCES,), n, 1, count)
    right = torch.cat(scores)[sequence].argsort(-1) == torch.cat(values)[sequence].argsort(-1)
    return {"sequences": right.all(-1).double().mean().item(), "elements": right.double().mean().item()}


def report(args: Args, rows: list[study.Row], folder: Path) -> str:
    """The shares in the right order, next to the paper's."""
    paper = PAPER if args.setting()["dataset"] == "mnist" else {}
    kinds = sorted({(int(row["n"]), str(row["cdf"])) for row in rows})
    lines = []
    for n, cdf in kinds:
        last = reporting.where(rows, n=n, cdf=cdf, step=args.steps)
        right, elements = (
            [100 * x for x in reporting.column(last, kind)] for kind in ("sequences", "elements")
        )
        theirs = ["–", "–"]
        if n in paper:
            theirs = ["{} ({})".format(*paper[n]), f"{statistics.fmean(right) - paper[n][0]:+.1f}"]
        here = f"{reporting.spread(right, 1)} ({reporting.spread(elements, 1)})"
        lines.append([f"{n}, {cdf}", here, *theirs, reporting.spread(reporting.column(last, "tau"), 2)])
    _draw(args, rows, kinds, paper, folder / "order.png")
    return (
        reporting.table(
            ["n, CDF", "here: sequences (elements), %", "paper", "difference", "tau, learned"], lines
        )
        + "\nThe paper gives no deviations.\n\n![Sequences in the right order](order.png)"
    )


def _draw(
    args: Args,
    rows: list[study.Row],
    kinds: list[tuple[int, str]],
    paper: dict[int, tuple[float, float]],
    path: Path,
) -> None:
    """Plot the share of sequences in the right order during the training."""
    figure, (axes,) = reporting.figure()
    for color, (n, cdf) in zip(reporting.COLORS, kinds, strict=False):
        steps, right = reporting.curve(reporting.where(rows, n=n, cdf=cdf), "sequences")
        axes.plot(steps, [100 * x for x in right], "o-", color=color, markersize=3, label=f"n = {n}, {cdf}")
        if n in paper:
            axes.axhline(paper[n][0], color=color, linestyle=":", label=f"n = {n}, published")
    axes.set_xlabel(f"step, {args.pictures} pictures each")
    axes.set_ylabel("test sequences in the right order, %")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="lapsum, Table 4",
    needs="MNIST",
    takes="3 min of one core per seed",
    Args=Args,
    smoke={"seeds": 1, "ns": (3,), "steps": 150},
    trials=trials,
    run=run,
    report=report,
)
