"""What are digits made of? A sparse autoencoder describes each image by a few of many directions.

Every image is approximated by a sum of a few directions from a learned dictionary. Their number is given, and
an encoder chooses which ones to use:

- `nn.TopKSAE` on its `loss`, the logarithm of the error, with a second error of 1.5 times as many directions,
  and a third of those that are not used;
- hard, but with the gradient of a soft selection (`tau=0.1, hard=True`);
- hard, on the mean squared error alone, as top-k autoencoders are usually trained.

All are judged hard, by the share of the images' variance that their sums leave unexplained, and by how many
of the directions are never used.

    python examples/sae.py                       # scikit-learn's digits, 90 s on one core
    python examples/sae.py --data-dir FOLDER     # MNIST, from its four gzipped files
    python examples/sae.py --seed 1 --out sae.png
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
from torch import Tensor
from torch.nn import functional as F

import khot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import from reproduce/, beside this folder
from reproduce.harness.data import Images, load_digits, load_mnist

LATENTS, BATCH, POINTS, LATELY = 256, 128, 20, 10_000
NAMES = {"nested": "its loss", "straight": "straight-through", "hard": "hard, one error"}


@dataclass
class Result:
    """The autoencoder; its error in the course of the training, and the share of latents that were not used
    by any of the last inputs."""

    sae: khot.nn.TopKSAE
    error: list[float] = field(default_factory=list)
    dead: float = 0.0


def train(images: Images, method: str, k: int, steps: int, seed: int, report: Progress) -> Result:
    torch.manual_seed(seed)
    soft = {"tau": 0.1, "hard": True} if method == "straight" else {}
    sae = khot.nn.TopKSAE(images.n, LATENTS, k, **soft)
    optimizer = torch.optim.Adam(sae.parameters(), lr=2e-3)
    result = Result(sae)
    for step in range(steps):
        x = images.train_images[torch.randint(len(images.train_images), (BATCH,))]
        optimizer.zero_grad()
        loss = sae.loss(x) if method == "nested" else F.mse_loss(sae(x), x)
        loss.backward()
        optimizer.step()
        report.advance(report.task_ids[0])
        if (step + 1) % (steps // POINTS) == 0:
            result.error.append(unexplained(sae.eval(), images.test_images))
            sae.train()
    result.dead = sae.dead(LATELY).item()
    sae.eval()
    return result


@torch.no_grad()
def unexplained(sae: khot.nn.TopKSAE, x: Tensor) -> float:
    return ((sae(x) - x).square().sum() / (x - x.mean(0)).square().sum()).item()


def run(images: Images, k: int, steps: int = 600, seed: int = 0) -> dict[str, Result]:
    with Progress(console=Console(stderr=True)) as report:
        report.add_task("training", total=len(NAMES) * steps)
        return {method: train(images, method, k, steps, seed, report) for method in NAMES}


def draw(images: Images, results: dict[str, Result], out: Path) -> None:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
    for (method, name), color in zip(NAMES.items(), ("#0b6e99", "#d9730d", "#6b4c9a"), strict=True):
        error = results[method].error
        along = [100 * (i + 1) / len(error) for i in range(len(error))]
        left.plot(along, [100 * share for share in error], color=color, label=name, linewidth=2)
    left.set_ylim(0, 200 * min(min(result.error) for result in results.values()))
    left.set_xlabel("training, %")
    left.set_ylabel("variance unexplained, %")
    left.set_title(f"{images.name}, judged with a hard selection")
    left.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)

    sae = results["nested"].sae
    height, width = images.shape
    with torch.no_grad():
        values, indices = sae.top(images.test_images[:4])
        values, indices = values[:, :6], indices[:, :6]
        sums = sae(images.test_images[:4])
    gap = torch.zeros(height, max(1, width // 8))
    rows = []
    for image, total, value, index in zip(images.test_images, sums, values, indices, strict=False):
        # an image, the sum that stands for it, and its largest terms, as deviations from the grey in between
        parts = [image - sae.bias, total - sae.bias, *(value.unsqueeze(-1) * sae.decoder[index])]
        rows += [torch.cat([x for part in parts for x in (part.detach().view(height, width), gap)], -1)]
        rows += [torch.zeros(gap.shape[1], rows[0].shape[1])]
    right.imshow(torch.cat(rows[:-1]).numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
    right.set_title("image less mean, its code's sum, and the 6 largest terms", loc="left")
    right.axis("off")
    figure.savefig(out, dpi=80)


def main(data_dir: Path | None = None, steps: int = 600, seed: int = 0, out: Path = Path("sae.png")) -> None:
    """What digits are made of."""
    images = load_digits() if data_dir is None else load_mnist(data_dir)
    k = 6 if data_dir is None else 16
    results = run(images, k, steps, seed)
    table = Table(title=f"{images.name}: {k} of {LATENTS} directions per image")
    table.add_column("selection in training")
    table.add_column("variance unexplained", justify="right")
    table.add_column("dead latents", justify="right")
    for method, name in NAMES.items():
        result = results[method]
        table.add_row(name, f"{100 * result.error[-1]:.1f} %", f"{100 * result.dead:.0f} %")
    Console().print(table)
    draw(images, results, out)


if __name__ == "__main__":
    typer.run(main)
