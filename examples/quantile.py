"""A third of the labels is wrong. Does a network learn less of them if it never trains on the largest losses?

A small network learns digits while a third of the training labels is drawn at random. In each step, the
losses of a batch are cut at their quantile:

- `khot.quantile` of the losses is the threshold; only losses up to it count (a trimmed loss). Its level falls
  from 1 to 0.65 at the beginning, because the first losses say nothing about the labels;
- for comparison, the mean of all losses;
- and the mean over the images whose labels are right, which nobody knows outside an experiment.

All are judged by test images with right labels. The picture also shows the losses of all training images at
the end, with the threshold: wrong labels lie above it. A threshold over all training images, or over all
weights of a model, is the same call: it takes rows of any length, in half precision too.

    python examples/quantile.py                       # scikit-learn's digits, 20 s on one core
    python examples/quantile.py --data-dir FOLDER     # MNIST, from its four gzipped files
    python examples/quantile.py --seed 1 --out quantile.png
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

import khot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import from reproduce/, beside this folder
from reproduce.harness.data import Images, load_digits, load_mnist

WRONG, KEPT, WARM, BATCH, POINTS = 1 / 3, 0.65, 0.1, 128, 20
NAMES = {"trimmed": "losses up to the quantile", "mean": "all losses", "right": "right labels only"}
COLORS = dict(zip(NAMES, ("#0b6e99", "#d9730d", "#6b6b6b"), strict=True))


@dataclass
class Result:
    """The share of test images got wrong in the course of training, and the losses of all training images at
    its end."""

    losses: Tensor
    error: list[float] = field(default_factory=list)


def spoiled(images: Images, seed: int) -> tuple[Tensor, Tensor]:
    """The labels of the training images, of which some are drawn at random, and which of them are wrong."""
    generator = torch.Generator().manual_seed(seed)
    labels = images.train_labels
    drawn = torch.randint(10, labels.shape, generator=generator)
    chosen = torch.rand(labels.shape, generator=generator) < WRONG / 0.9  # a tenth of the draws is right
    labels = torch.where(chosen, drawn, labels)
    return labels, labels != images.train_labels


def train(images: Images, method: str, steps: int, seed: int, report: Progress) -> Result:
    labels, wrong = spoiled(images, seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(images.n, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    result = Result(torch.empty(0))
    for step in range(steps):
        batch = torch.randint(len(labels), (BATCH,))
        losses = F.cross_entropy(model(images.train_images[batch]), labels[batch], reduction="none")
        if method == "trimmed":
            level = max(KEPT, 1 - (1 - KEPT) * step / (WARM * steps))
            kept = losses <= khot.quantile(losses.detach(), level)
        else:
            kept = ~wrong[batch] if method == "right" else torch.ones_like(losses, dtype=torch.bool)
        loss = losses[kept].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report.advance(report.task_ids[0])
        if (step + 1) % (steps // POINTS) == 0:
            with torch.no_grad():
                missed = model(images.test_images).argmax(-1) != images.test_labels
            result.error.append(missed.float().mean().item())
    with torch.no_grad():
        result.losses = F.cross_entropy(model(images.train_images), labels, reduction="none")
    return result


def run(images: Images, steps: int = 2000, seed: int = 0) -> dict[str, Result]:
    with Progress(console=Console(stderr=True)) as report:
        report.add_task("training", total=len(NAMES) * steps)
        return {method: train(images, method, steps, seed, report) for method in NAMES}


def draw(images: Images, results: dict[str, Result], seed: int, out: Path) -> None:
    _, wrong = spoiled(images, seed)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.2, 1, 1])
    for method, name in NAMES.items():
        error = results[method].error
        along = [100 * (i + 1) / len(error) for i in range(len(error))]
        left.plot(along, [100 * share for share in error], color=COLORS[method], label=name, linewidth=2)
    left.set_xlabel("training, %")
    left.set_ylabel("test error, %")
    left.set_ylim(bottom=0)
    left.set_title(f"{images.name}, a third of the labels wrong")
    left.legend(frameon=False)
    for axes, method in ((middle, "trimmed"), (right, "mean")):
        losses = results[method].losses.clamp(min=1e-4)
        bins = torch.logspace(-4, 2, 40).tolist()
        parts = [losses[~wrong].tolist(), losses[wrong].tolist()]
        axes.hist(
            parts, bins, stacked=True, color=["#9dc3d4", "#b3261e"], label=["right label", "wrong label"]
        )
        axes.axvline(khot.quantile(losses, KEPT).item(), color="black", linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_yticks([])
        axes.set_xlabel("loss of a training image")
        axes.set_title(f"{NAMES[method]}:\nthe quantile of {KEPT:.2f} (dashed)")
    middle.legend(frameon=False, loc="upper center")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=80)


def main(
    data_dir: Path | None = None, steps: int = 2000, seed: int = 0, out: Path = Path("quantile.png")
) -> None:
    """Losses up to a quantile."""
    images = load_digits() if data_dir is None else load_mnist(data_dir)
    results = run(images, steps, seed)
    _, wrong = spoiled(images, seed)
    table = Table(title=f"{images.name}: {100 * wrong.float().mean().item():.0f} % of the labels wrong")
    table.add_column("trained on")
    table.add_column("best test error", justify="right")
    table.add_column("last", justify="right")
    table.add_column("wrong labels among the losses kept", justify="right")
    for method, name in NAMES.items():
        result = results[method]
        kept = result.losses <= khot.quantile(result.losses, KEPT)
        share = f"{100 * wrong[kept].float().mean().item():.1f} %"
        table.add_row(name, *(f"{100 * e:.1f} %" for e in (min(result.error), result.error[-1])), share)
    Console().print(table)
    draw(images, results, seed, out)


if __name__ == "__main__":
    typer.run(main)
