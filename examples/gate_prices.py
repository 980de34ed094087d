"""Which pixels are worth their price?

A classifier of digits may look at the pixels of an image for a price. Those of the middle, which tell most,
are expensive, and those at the border are cheap. A gate learns which of them to buy for a budget:

- `nn.KHotGate(n, budget, cost=prices)` learns it together with the classifier;
- for comparison, a gate that knows no prices, `nn.KHotGate(n, k)`: the budget pays for its best;
- and the pixels of most variance per unit of price, a rule that looks at no label. It is as good on these
  images, where all that varies belongs to the digit.

All are judged by a classifier trained from scratch on the pixels alone.

    python examples/gate_prices.py                       # scikit-learn's digits, 30 s on one core
    python examples/gate_prices.py --data-dir FOLDER     # MNIST, from its four gzipped files
    python examples/gate_prices.py --seed 1 --out gate_prices.png
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
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

BATCH, SHARE = 64, 0.1
NAMES = {
    "prices": "nn.KHotGate with prices",
    "count": "nn.KHotGate without",
    "variance": "variance per price",
}


@dataclass
class Result:
    """The pixels chosen (n,), their price, and the test accuracy of a classifier on them."""

    mask: Tensor
    price: float
    accuracy: float


def price_list(images: Images) -> Tensor:
    """From 1 at the corners to 10 in the middle."""
    rows, columns = (torch.linspace(-1, 1, size) for size in images.shape)
    return 1 + 9 * torch.exp(-2 * (rows[:, None].square() + columns.square())).flatten()


class Only(nn.Module):
    """A fixed choice."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, input: Tensor) -> Tensor:
        return input * self.mask


def fit(
    images: Images,
    gate: nn.Module,
    steps: int,
    seed: int,
    report: Progress,
    tau: khot.nn.Anneal | None = None,
) -> nn.Module:
    """A classifier behind the gate, both trained."""
    torch.manual_seed(seed)
    model = nn.Sequential(gate, nn.Linear(images.n, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(
        [{"params": gate.parameters(), "lr": 30 / steps}, {"params": model[1:].parameters(), "lr": 2e-3}]
    )
    for _ in range(steps):
        batch = torch.randint(len(images.train_labels), (BATCH,))
        loss = F.cross_entropy(model(images.train_images[batch]), images.train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if tau is not None:
            tau.step()
        report.advance(report.task_ids[0])
    return model.eval()


def run(images: Images, steps: int = 800, seed: int = 0) -> dict[str, Result]:
    prices = price_list(images)
    budget = SHARE * prices.sum().item()
    results = {}
    with Progress(console=Console(stderr=True)) as report:
        report.add_task("training", total=5 * steps)
        for method in NAMES:
            if method == "variance":
                worth = images.train_images.var(0) / prices
                mask = khot.budget_mask(worth, prices, budget)
            elif method == "prices":
                tau = khot.nn.Anneal(1.0, 0.02, steps, "exponential")
                gate = khot.nn.KHotGate(images.n, budget, cost=prices, tau=tau)
                fit(images, gate, steps, seed, report, tau)
                mask = gate.mask
            else:
                gate = khot.nn.KHotGate(images.n, round(SHARE * images.n), design="pivotal")
                fit(images, gate, steps, seed, report)
                mask = khot.budget_mask(gate.logits.detach(), prices, budget)  # the best that it pays for
            judge = fit(images, Only(mask), steps, seed, report)
            with torch.no_grad():
                right = judge(images.test_images).argmax(-1) == images.test_labels
            results[method] = Result(mask, (mask * prices).sum().item(), right.float().mean().item())
    return results


def draw(images: Images, results: dict[str, Result], out: Path) -> None:
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    prices = price_list(images).view(images.shape)
    axes = figure.subplots(1, 4)
    shown = axes[0].imshow(prices.numpy(), cmap="Oranges", vmin=0)
    axes[0].set_title("price of a pixel")
    figure.colorbar(shown, ax=axes[0], shrink=0.7)
    mean = images.train_images.mean(0).view(images.shape)
    for ax, (method, result) in zip(axes[1:], results.items(), strict=True):
        ax.imshow(mean.numpy(), cmap="gray_r", vmin=0, vmax=2 * mean.max().item())
        rows, columns = result.mask.view(images.shape).nonzero().unbind(-1)
        ax.scatter(columns, rows, s=14e2 / images.shape[0] ** 1.2, marker="s", color="#0b6e99", alpha=0.6)
        count = int(result.mask.sum())
        ax.set_title(
            f"{NAMES[method]}:\n{count} pixels for {result.price:.0f}, {100 * result.accuracy:.1f} %"
        )
    for ax in axes:
        ax.set_xticks([])
        ax.set_yticks([])
    figure.savefig(out, dpi=80)


def main(
    data_dir: Path | None = None, steps: int = 800, seed: int = 0, out: Path = Path("gate_prices.png")
) -> None:
    """Which pixels are worth their price."""
    images = load_digits() if data_dir is None else load_mnist(data_dir)
    results = run(images, steps, seed)
    table = Table(title=f"{images.name}: a tenth of the price of all {images.n} pixels")
    table.add_column("chosen by")
    for name in ("pixels", "price", "test accuracy"):
        table.add_column(name, justify="right")
    for method, name in NAMES.items():
        result = results[method]
        accuracy = f"{100 * result.accuracy:.1f} %"
        table.add_row(name, str(int(result.mask.sum())), f"{result.price:.1f}", accuracy)
    Console().print(table)
    draw(images, results, out)


if __name__ == "__main__":
    typer.run(main)
