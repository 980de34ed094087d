"""Sorting pictures of numbers, learned from their order alone (lapsum, Table 4)

Each picture shows four digits side by side. A convolutional network computes one score for each picture, and
n pictures are sorted by their scores. The training only knows the right order. Its loss is the row-wise
cross-entropy of a soft permutation of the scores with the true one. The methods are:

- `laplace`, `logistic`, `normal`: `khot.losses.permutation_cross_entropy` with this CDF; `laplace` is the
  paper's method. The temperature is learned, too, and starts at 0.4.
- `neuralsort`, `softsort`: the permutations of `khot.baselines`, with the same temperature.

    python -m reproduce permutation --data-dir FOLDER --seeds 1

The options `--ns 7,9,15` and `--methods laplace,neuralsort` choose other lengths and methods. Departures
from the paper:

- The network is smaller by default: two convolutions of 5 x 5 with 16 and 32 filters, without padding, each
  followed by pooling, and 64 hidden units. `--networks published` has the paper's 32 and 64 filters with
  padding, and takes four times as long a step; `--networks small,published` trains both.
- There are 60,000 steps of 100 pictures each. The paper's code takes 125,000 steps of 20 sequences at a
  constant rate and keeps the best epoch of a validation set. Here the rate of Adam rises to 2e-3 and falls to
  0, so that the last step is the one to keep, and no validation set is needed.
- Every step has new numbers, composed of training images. The test has 20,000 sequences of 10,000 numbers,
  which are composed of test images.
- With `--precision bfloat16` the network computes in bfloat16, with parameters, scores and loss in float32.
  This takes two thirds of the time on a CPU that has instructions for it, and nine times as long on one that
  has none.
- The paper's rows for NeuralSort are those of Grover et al. 2019, whose temperature is fixed. The paper also
  has Sinkhorn operators and a classifier of permutations, which sort nothing there; they are not run here.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import khot
from khot.cdfs import CDFName
from reproduce.harness import reporting, study, training
from reproduce.harness.data import Images
from reproduce.tasks import numbers

__all__ = ["DIGITS", "EXPERIMENT", "START", "Args", "Network", "judge", "report", "run", "trials"]

DIGITS, PICTURES, SEQUENCES = 4, 10_000, 20_000
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
START = 0.4  # the paper's initial temperature
# % of sequences in the right order, and of elements in the right place
PAPER = {
    "laplace": {3: (93.1, 95.3), 5: (84.2, 92.9), 7: (73.0, 90.5), 9: (62.6, 88.6), 15: (31.6, 82.6)},
    "neuralsort": {3: (93.0, 95.1), 5: (83.7, 92.7), 7: (73.8, 90.9), 9: (64.9, 89.6), 15: (38.6, 85.7)},
}
CLOSE = 3.0  # points below the paper that we still count as met: it gives no deviations
NETWORKS = {"small": (16, 0), "published": (32, 2)}  # filters of the first convolution, and the padding


def _by_cdf(cdf: CDFName) -> Loss:
    return lambda scores, order, tau: khot.losses.permutation_cross_entropy(scores, order, tau=tau, cdf=cdf)


def _by_matrix(permutation: Callable[..., Tensor]) -> Loss:
    """The same cross-entropy for an operator that makes the matrix, in descending order."""

    def loss(scores: Tensor, order: Tensor, tau: Tensor) -> Tensor:
        share = permutation(-scores, tau=tau).gather(-1, order.unsqueeze(-1))
        return -share.clamp(min=torch.finfo(share.dtype).tiny).log().mean()

    return loss


# Loss of scores, their true order (the smallest first), and the temperature
LOSSES: dict[str, Loss] = {
    "laplace": _by_cdf("laplace"),
    "logistic": _by_cdf("logistic"),
    "normal": _by_cdf("normal"),
    "neuralsort": _by_matrix(khot.baselines.neuralsort_permutation),
    "softsort": _by_matrix(khot.baselines.softsort_permutation),
}


@dataclass(frozen=True)
class Args(study.Args):
    """What is sorted, and the training."""

    ns: tuple[int, ...] = field(
        default=(3, 5), metadata={"help": "Lengths of the sequences.", "selects": True}
    )
    methods: tuple[str, ...] = field(
        default=("laplace",), metadata={"help": f"Methods, out of {', '.join(LOSSES)}.", "selects": True}
    )
    networks: tuple[str, ...] = field(
        default=("small",), metadata={"help": f"Networks, out of {', '.join(NETWORKS)}.", "selects": True}
    )
    precision: str = field(
        default="float32",
        metadata={"help": f"What the network computes in: {' or '.join(training.PRECISIONS)}."},
    )
    pictures: int = field(default=100, metadata={"help": "Pictures per step."})
    steps: int = field(default=60_000, metadata={"help": "Training steps."})
    lr: float = field(default=2e-3, metadata={"help": "The highest learning rate of Adam."})

    def __post_init__(self) -> None:
        super().__post_init__()
        study.check_choices("methods", self.methods, LOSSES)
        study.check_choices("networks", self.networks, NETWORKS)
        study.check_choices("precision", (self.precision,), training.PRECISIONS)


def trials(args: Args) -> list[study.Trial]:
    return [
        {"n": n, "method": method, "network": network, "seed": seed}
        for seed in range(args.seeds)
        for network in args.networks
        for method in args.methods
        for n in args.ns
    ]


class Network(nn.Module):
    """Pictures (..., height, width) to scores (...), and the temperature to sort them at."""

    def __init__(
        self, height: int, width: int, size: str = "small", precision: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        filters, padding = NETWORKS[size]
        # without padding nothing would be left of scikit-learn's digits after two convolutions
        padding = padding if height >= 16 else 2
        h, w = (((side - 4 + 2 * padding) // 2 - 4 + 2 * padding) // 2 for side in (height, width))
        self.precision = precision
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, height)),
            nn.Conv2d(1, filters, 5, padding=padding),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(filters, 2 * filters, 5, padding=padding),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * filters * h * w, 64),
            nn.ReLU(),
        )
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # twice as fast on a CPU
        self.score = nn.Linear(64, 1)
        self.log_tau = nn.Parameter(torch.tensor(math.log(START)))

    def forward(self, pictures: Tensor) -> Tensor:
        x = pictures.flatten(0, -3)
        with training.computing_in(self.precision, x.device):
            features = self.layers(x)
        # the scores are float32: two numbers of equal scores could not be told apart
        return self.score(features.float()).view(pictures.shape[:-2])


def run(args: Args, trial: study.Trial, checkpoint: study.Checkpoint) -> Iterator[study.Row]:
    images, n, seed = training.images(args), int(trial["n"]), int(trial["seed"])
    height, width = images.shape
    precision = training.PRECISIONS[args.precision]
    network = Network(height, DIGITS * width, str(trial["network"]), precision).to(args.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, pct_start=0.1)
    state = {"network": network, "optimizer": optimizer, "schedule": schedule}
    count = max(1, args.pictures // n)
    for step in training.steps(checkpoint, state, args.steps):
        # a different seed for each step, as no run has 10⁶ steps
        index = numbers.pick((count, n), DIGITS, seed * 1_000_000 + step, len(images.train_labels))
        pictures, value = numbers.draw(images.train_images, images.train_labels, images.shape, index)
        order = value.argsort(-1).to(args.device)
        loss = LOSSES[str(trial["method"])](network(pictures.to(args.device)), order, network.log_tau.exp())
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
    kinds = sorted(
        {(int(row["n"]), str(row["method"]), str(row["network"])) for row in rows},
        key=lambda kind: (kind[0], list(LOSSES).index(kind[1]), list(NETWORKS).index(kind[2])),
    )
    lines = []
    for n, method, network in kinds:
        mine = reporting.where(rows, n=n, method=method, network=network)
        last = reporting.where(mine, step=args.steps)
        right, elements = (
            [100 * x for x in reporting.column(last, kind)] for kind in ("sequences", "elements")
        )
        theirs = ["–", "–"]
        if n in paper.get(method, {}):
            difference = statistics.fmean(right) - paper[method][n][0]
            text = f"{difference:+.1f}"
            theirs = ["{} ({})".format(*paper[method][n]), f"**{text}**" if difference < -CLOSE else text]
        here = f"{reporting.spread(right, 1)} ({reporting.spread(elements, 1)})"
        tau = reporting.spread(reporting.column(last, "tau"), 2)
        lines.append([f"{n}, {method}, {network}", here, *theirs, tau])
    _draw(args, rows, kinds, paper, folder / "order.png")
    return (
        reporting.table(
            ["n, method, network", "here: sequences (elements), %", "paper", "difference", "tau, learned"],
            lines,
        )
        + f"\nThe paper gives no deviations; more than {CLOSE:g} points below it are bold.\n\n"
        "![Sequences in the right order](order.png)"
    )


def _draw(
    args: Args,
    rows: list[study.Row],
    kinds: list[tuple[int, str, str]],
    paper: dict[str, dict[int, tuple[float, float]]],
    path: Path,
) -> None:
    """Plot the share of sequences in the right order during the training."""
    figure, (axes,) = reporting.figure(width=9)
    lengths = sorted({n for n, _, _ in kinds})
    color = dict(zip(lengths, itertools.cycle(reporting.COLORS), strict=False))
    marker = dict(zip(LOSSES, "osD^v", strict=True))
    for n, method, network in kinds:
        mine = reporting.where(rows, n=n, method=method, network=network)
        steps, right = reporting.curve(mine, "sequences")
        style = marker[method] + ("--" if network == "published" else "-")
        label = f"n = {n}, {method}" + (", published network" if network == "published" else "")
        axes.plot(steps, [100 * x for x in right], style, color=color[n], markersize=4, label=label)
    for n, method in dict.fromkeys(kind[:2] for kind in kinds):
        if n in paper.get(method, {}):
            label = f"n = {n}, {method}, in the paper"
            axes.axhline(paper[method][n][0], color=color[n], linestyle=":", label=label)
    axes.set_xlabel(f"step, {args.pictures} pictures each")
    axes.set_ylabel("test sequences in the right order, %")
    axes.set_ylim(0, 100)
    figure.legend(frameon=False, fontsize=9, loc="outside right center")
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="lapsum, Table 4",
    needs="MNIST",
    takes="60 min of one core per length and seed",
    Args=Args,
    smoke={"seeds": 1, "ns": (3,), "steps": 150},
    trials=trials,
    run=run,
    report=report,
)
