"""A network that learns with most of its weights at zero: does it matter how they are chosen?

A perceptron with two hidden layers of 32 learns digits, and 95 of 100 weights, of all layers together, are
zero in the end. Half of the training all weights learn; in the third quarter ever more of them are pruned; in
the last one those that are left go on learning. Which are pruned follows from

- a score of each weight, which is learned: `nn.prune_global(by="score")`, with an amount and a temperature
  that `nn.Anneal` changes;
- their magnitude, in ten cuts by `torch.nn.utils.prune.global_unstructured`;
- and, for comparison, none are.

    python examples/pruning.py                       # scikit-learn's digits, 20 s on one core
    python examples/pruning.py --data-dir FOLDER     # MNIST, from its four gzipped files, 60 s
    python examples/pruning.py --seed 1 --out pruning.png
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import khot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import from reproduce/, beside this folder
from reproduce.harness.data import Images, load_digits, load_mnist

HIDDEN, AMOUNT, RATE, BATCH, POINTS, CUTS = 32, 0.95, 3e-3, 128, 20, 10
NAMES = {"score": "learned scores", "cuts": "magnitude, ten cuts", "dense": "all weights"}


@dataclass
class Result:
    """The share of test images got wrong, in the course of training, and the network, pruned."""

    model: nn.Sequential
    error: list[float] = field(default_factory=list)

    @property
    def weights(self) -> int:
        """How many are not 0."""
        return sum(int((layer.weight != 0).sum()) for layer in self.model[::2])

    @property
    def looks_at(self) -> Tensor:
        """How many weights of the first layer each pixel has: (n,)."""
        return (self.model[0].weight != 0).sum(0)


def train(images: Images, method: str, steps: int, seed: int, report: Progress) -> Result:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(images.n, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
    )
    weights = [(layer, "weight") for layer in model[::2]]
    prune_from, prune_to = steps // 2, steps * 3 // 4
    amount = khot.nn.Anneal(0.0, AMOUNT, prune_to, "cubic", wait=prune_from)
    tau = khot.nn.Anneal(100 * RATE, RATE, prune_to, wait=prune_from)
    if method == "score":
        khot.nn.prune_global(weights, amount, tau=tau, by="score")
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    result, cut = Result(model), 0.0
    for step in range(steps):
        model.train(step < prune_to)  # in eval mode the selection is hard, and the weights still learn
        batch = torch.randint(len(images.train_labels), (BATCH,))
        loss = F.cross_entropy(model(images.train_images[batch]), images.train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        amount.step(), tau.step()
        if method == "cuts" and prune_from <= step < prune_to and (step + 1) % (steps // 4 // CUTS) == 0:
            more = (amount().item() - cut) / (1 - cut)  # a share of what is left
            prune.global_unstructured(weights, prune.L1Unstructured, amount=more)
            cut = amount().item()
        report.advance(report.task_ids[0])
        if (step + 1) % (steps // POINTS) == 0:
            with torch.no_grad():
                wrong = model.eval()(images.test_images).argmax(-1) != images.test_labels
            result.error.append(wrong.float().mean().item())
    if method == "score":
        khot.nn.make_permanent(model)
    return result


def run(images: Images, steps: int = 1000, seed: int = 0) -> dict[str, Result]:
    with Progress(console=Console(stderr=True)) as report:
        report.add_task("training", total=len(NAMES) * steps)
        return {method: train(images, method, steps, seed, report) for method in NAMES}


def draw(images: Images, results: dict[str, Result], out: Path) -> None:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, *pictures = figure.subplots(1, 3, width_ratios=[1.4, 1, 1])
    for (method, name), color in zip(NAMES.items(), ("#0b6e99", "#d9730d", "#6b6b6b"), strict=True):
        error = results[method].error
        along = [100 * (i + 1) / len(error) for i in range(len(error))]
        left.plot(along, [100 * share for share in error], "o-", color=color, label=name, linewidth=2)
    left.set_yscale("log")
    left.set_yticks(ticks := [2, 5, 10, 20, 50], [str(n) for n in ticks])
    left.minorticks_off()
    left.set_xlabel("training, %")
    left.set_ylabel("test error, %")
    left.set_title(f"{images.name}, {100 * AMOUNT:.0f} % of the weights at zero")
    left.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    for axes, method in zip(pictures, ("score", "cuts"), strict=True):
        looks_at = results[method].looks_at
        axes.imshow(looks_at.view(images.shape).numpy(), cmap="Blues", vmin=0, vmax=HIDDEN / 2)
        axes.set_title(f"{NAMES[method]}:\nweights a pixel, {int((looks_at > 0).sum())} pixels used")
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(out, dpi=80)


def main(
    data_dir: Path | None = None, steps: int = 1000, seed: int = 0, out: Path = Path("pruning.png")
) -> None:
    """95 of 100 weights at zero."""
    images = load_digits() if data_dir is None else load_mnist(data_dir)
    results = run(images, steps, seed)
    table = Table(title=f"{images.name}: {images.n}-{HIDDEN}-{HIDDEN}-10")
    table.add_column("pruned by")
    table.add_column("weights", justify="right")
    table.add_column("test error", justify="right")
    for method, name in NAMES.items():
        result = results[method]
        table.add_row(name, f"{result.weights:,}", f"{100 * result.error[-1]:.1f} %")
    Console().print(table)
    draw(images, results, out)


if __name__ == "__main__":
    typer.run(main)
