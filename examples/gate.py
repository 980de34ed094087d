"""Which pixels tell the digits apart, and how many does it take?

A gate in front of a small classifier lets only some pixels through, and both learn together from the labels:

- `nn.KHotGate(n, k)`: k pixels, learned from k-hot samples;
- `nn.KHotGate(n, None)`: the number is learned, too, with a penalty per pixel;
- for comparison, the k pixels of the highest variance, chosen before training.

All are judged by a classifier trained from scratch on the chosen pixels alone.

    python examples/gate.py                       # scikit-learn's digits, 1 min on one core
    python examples/gate.py --data-dir FOLDER     # MNIST, from its four gzipped files
    python examples/gate.py --seed 1 --out gate.png
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

BATCH, PRICE = 64, 0.01
NAMES = {"fixed": "nn.KHotGate, k given", "learned": "nn.KHotGate, k learned", "variance": "highest variance"}


@dataclass
class Result:
    """The pixels chosen (n,), the test accuracy of a classifier on them, and the expected number of pixels
    in the course of the training."""

    mask: Tensor
    accuracy: float = 0.0
    size: list[float] = field(default_factory=list)


def fit(
    images: Images, gate: nn.Module, steps: int, seed: int, report: Progress
) -> tuple[nn.Module, list[float]]:
    """A classifier behind the gate, both trained, and the course of the expected number of pixels."""
    torch.manual_seed(seed)
    model = nn.Sequential(gate, nn.Linear(images.n, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(
        [
            {"params": gate.parameters(), "lr": 30 / steps},  # so that a logit can go far enough in any time
            {"params": model[1:].parameters(), "lr": 2e-3},
        ]
    )
    size = []
    for _ in range(steps):
        batch = torch.randint(len(images.train_labels), (BATCH,))
        loss = F.cross_entropy(model(images.train_images[batch]), images.train_labels[batch])
        if isinstance(gate, khot.nn.KHotGate):
            probs = gate.probs
            size.append(probs.sum().item())
            if gate.k is None:
                loss = loss + khot.losses.size_penalty(probs, PRICE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report.advance(report.task_ids[0])
    return model.eval(), size


class Only(nn.Module):
    """A fixed choice."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, input: Tensor) -> Tensor:
        return input * self.mask


def run(images: Images, k: int, steps: int = 1500, seed: int = 0) -> dict[str, Result]:
    results = {}
    with Progress(console=Console(stderr=True)) as report:
        report.add_task("training", total=5 * steps)
        for method in NAMES:
            if method == "variance":
                result = Result(khot.topk_mask(images.train_images.var(0), k))
            else:
                # pivotal is exact, and the cheapest design where most probabilities are near 0 or 1
                gate = khot.nn.KHotGate(images.n, k if method == "fixed" else None, design="pivotal")
                _, size = fit(images, gate, steps, seed, report)
                result = Result(gate.mask, size=size)
            judge, _ = fit(images, Only(result.mask), steps, seed, report)
            with torch.no_grad():
                right = judge(images.test_images).argmax(-1) == images.test_labels
            result.accuracy = right.float().mean().item()
            results[method] = result
    return results


def draw(images: Images, results: dict[str, Result], out: Path) -> None:
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    *pictures, right = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.3])
    mean = images.train_images.mean(0).view(images.shape)
    colors = dict(zip(NAMES, ("#0b6e99", "#6b4c9a", "#d9730d"), strict=True))
    for axes, (method, result) in zip(pictures, results.items(), strict=True):
        # the doubled range keeps the image pale behind the squares
        axes.imshow(mean.numpy(), cmap="gray_r", vmin=0, vmax=2 * mean.max().item())
        rows, columns = result.mask.view(images.shape).nonzero().unbind(-1)
        axes.scatter(
            columns, rows, s=14e2 / images.shape[0] ** 1.2, marker="s", color=colors[method], alpha=0.6
        )
        axes.set_title(f"{NAMES[method]}\n{int(result.mask.sum())} pixels, {100 * result.accuracy:.1f} %")
        axes.set_xticks([])
        axes.set_yticks([])
    for method, result in results.items():
        if result.size:
            right.plot(result.size, color=colors[method], label=NAMES[method], linewidth=2)
    right.set_xlabel("step")
    right.set_title("expected number of pixels")
    right.set_yscale("log")
    right.set_yticks(ticks := [5, 10, 20, 50, 100, 200, 400], [str(n) for n in ticks])
    right.set_ylim(0.8 * min(min(r.size, default=images.n) for r in results.values()), 0.7 * images.n)
    right.minorticks_off()
    right.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False)
    figure.savefig(out, dpi=80)


def main(
    data_dir: Path | None = None, steps: int = 1500, seed: int = 0, out: Path = Path("gate.png")
) -> None:
    """Which pixels, and how many."""
    images = load_digits() if data_dir is None else load_mnist(data_dir)
    results = run(images, 10 if data_dir is None else 50, steps, seed)
    table = Table(title=f"{images.name}: which of {images.n} pixels?")
    table.add_column("chosen by")
    table.add_column("pixels", justify="right")
    table.add_column("test accuracy", justify="right")
    for method, name in NAMES.items():
        result = results[method]
        table.add_row(name, str(int(result.mask.sum())), f"{100 * result.accuracy:.1f} %")
    Console().print(table)
    draw(images, results, out)


if __name__ == "__main__":
    typer.run(main)
