"""Learn features for nearest neighbours, through the nearest neighbours themselves.

A small convolutional network turns images into 32 features; a digit is then recognised by the vote of its 9
nearest neighbours among all training images. The network is trained

- through `nn.SoftKNN`, on the share of an image's soft neighbours that are of another class,
- with the cross-entropy of a linear layer on top, which is dropped afterwards: the usual two stages,

and both are compared with nearest neighbours in the pixels. All take the same number of
steps. On MNIST the first is ahead; scikit-learn's digits are too few to tell the three apart.

    python examples/knn.py --data-dir FOLDER     # MNIST's four gzipped files; 90 s on one core
    python examples/knn.py                       # scikit-learn's digits; 20 s
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

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
from reproduce.harness import data

K, FEATURES, BATCH = 9, 32, 100
NAMES = {"soft": "nn.SoftKNN", "entropy": "cross-entropy", "pixels": "the pixels"}


class Network(nn.Sequential):
    """Images (batch, height · width) to features (batch, FEATURES)."""

    def __init__(self, shape: tuple[int, int]) -> None:
        height, width = shape
        super().__init__(
            nn.Unflatten(1, (1, *shape)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (height // 4) * (width // 4), FEATURES),
        )


@dataclass(frozen=True)
class Result:
    """The accuracy of each method on the test images, and their features."""

    name: str
    accuracy: dict[str, float]
    features: dict[str, Tensor]
    labels: Tensor


def train(
    network: Network, images: data.Images, method: str, steps: int, seed: int, advance: Callable[[], None]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tau = khot.nn.Anneal(1.0, 0.2, steps, "exponential")
    knn, head = khot.nn.SoftKNN(K, 10, tau=tau), nn.Linear(FEATURES, 10)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = torch.randint(len(images.train_labels), (2 * BATCH,), generator=generator)
        features, labels = network(images.train_images[batch]), images.train_labels[batch]
        if method == "soft":
            others = ~torch.eye(len(batch), dtype=torch.bool)
            loss = knn.loss(features, labels, features, labels, others)
        else:
            loss = F.cross_entropy(head(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        tau.step()
        advance()


def run(images: data.Images, steps: int = 300, seed: int = 0) -> Result:
    knn = khot.nn.SoftKNN(K, 10)
    accuracy, test_features = {}, {}
    with Progress(console=Console(stderr=True)) as progress:
        for method, name in NAMES.items():
            task = progress.add_task(name, total=steps + 1)
            templates, queries = images.train_images, images.test_images
            if method != "pixels":
                torch.manual_seed(seed)
                network = Network(images.shape)
                train(network, images, method, steps, seed, lambda task=task: progress.advance(task))
                with torch.no_grad():
                    templates, queries = (
                        torch.cat([network(part) for part in x.split(1000)]) for x in (templates, queries)
                    )
            guess = knn.predict(queries, templates, images.train_labels)
            accuracy[method] = (guess == images.test_labels).double().mean().item()
            test_features[method] = queries[:600]
            progress.update(task, completed=steps + 1)
    return Result(images.name, accuracy, test_features, images.test_labels[:600])


def draw(result: Result, out: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    figure.suptitle(f"{result.name}, test images by the two directions in which their features vary most")
    for axes, (method, name) in zip(figure.subplots(1, 3), NAMES.items(), strict=True):
        centred = result.features[method] - result.features[method].mean(0)
        plane = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
        axes.scatter(*plane.T.numpy(), c=result.labels.numpy(), cmap="tab10", s=8, linewidths=0)
        axes.set_title(f"{name}: {100 * result.accuracy[method]:.1f} %")
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(out, dpi=70)


def main(
    data_dir: Annotated[Path | None, typer.Option(envvar="KHOT_DATA_DIR")] = None,
    steps: int = 300,
    seed: int = 0,
    out: Path = Path("knn.png"),
) -> None:
    """Nine nearest neighbours, in learned features."""
    images = data.load_digits() if data_dir is None else data.load_mnist(data_dir)
    result = run(images, steps, seed)
    table = Table(title=f"{result.name}: the vote of the {K} nearest neighbours")
    table.add_column("features from")
    table.add_column("test accuracy", justify="right")
    for method, name in NAMES.items():
        table.add_row(name, f"{100 * result.accuracy[method]:.2f} %")
    Console().print(table)
    draw(result, out)


if __name__ == "__main__":
    typer.run(main)
