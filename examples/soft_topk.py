"""Learn which 5 of 256 items count, from the mean of their values alone.

Every example is a bag of random items. One hidden direction ranks them, another one gives each a value, and
the target is the mean value of the 5 ranked highest. A scorer and a reader learn from targets, joined by

- a soft top-k: `nn.SoftTopK`, whose temperature an `nn.Anneal` lowers,
- a hard top-k: of the items that it picks, each is weighted by the sigmoid of its score, which is how the
  scorer gets a gradient at all,
- softmax attention over all items.

All are judged as they would be used: 5 items are chosen, and their values are averaged.

    python examples/soft_topk.py                 # 30 s on one core
    python examples/soft_topk.py --seed 1 --out soft_topk.png
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import khot

FEATURES, K, BATCH = 16, 5, 64
NAMES = {"soft": "nn.SoftTopK, annealed", "hard": "hard top-k, gated", "softmax": "softmax attention"}


class Bags:
    """Bags of items with a hidden ranking and a hidden value."""

    def __init__(self, items: int, seed: int) -> None:
        self.items = items
        self.generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(FEATURES, 2, generator=self.generator)
        self.hidden = torch.linalg.qr(hidden).Q

    def draw(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Items (size, items, FEATURES), targets (size,), and the mask of what counts (size, items)."""
        items = torch.randn(size, self.items, FEATURES, generator=self.generator)
        rank, value = (items @ self.hidden).unbind(-1)
        counts = khot.topk_mask(rank, K)
        return items, (counts * value).sum(-1) / K, counts


class Reader(nn.Module):
    """Scores every item, reads every item, and joins the two by one of the three methods."""

    def __init__(self, method: str, steps: int) -> None:
        super().__init__()
        self.method = method
        self.score = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1))
        self.value = nn.Linear(FEATURES, 1)
        self.tau = khot.nn.Anneal(1.0, 0.05, steps, "exponential")
        self.select = khot.nn.SoftTopK(K, tau=self.tau)
        if method == "hard":
            self.select.eval()

    def forward(self, items: Tensor) -> Tensor:
        scores, values = self.score(items).squeeze(-1), self.value(items).squeeze(-1)
        if self.method == "softmax":
            return (scores.softmax(-1) * values).sum(-1)
        gates = scores.sigmoid() if self.method == "hard" else 1.0
        return (self.select(scores) * gates * values).sum(-1) / K

    def choose(self, items: Tensor) -> Tensor:
        return khot.topk_mask(self.score(items).squeeze(-1), K)


@dataclass(frozen=True)
class Result:
    """How each method did: the share of the right items that it chose, during training and at its end, and
    how much of the target's variance the mean of the chosen items' values leaves unexplained."""

    found: dict[str, list[float]] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)


def run(steps: int = 600, items: int = 256, seed: int = 0) -> Result:
    result = Result()
    with Progress(console=Console(stderr=True)) as progress:
        for method, name in NAMES.items():
            task = progress.add_task(name, total=steps)
            torch.manual_seed(seed)
            bags, model = Bags(items, seed), Reader(method, steps)
            test, target, counts = bags.draw(1000)
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
            found = result.found[method] = []
            for step in range(steps):
                batch, want, _ = bags.draw(BATCH)
                optimizer.zero_grad()
                (model(batch) - want).square().mean().backward()
                optimizer.step()
                model.tau.step()
                if (step + 1) % (steps // 20) == 0:
                    found.append((model.choose(test) * counts).sum().item() / counts.sum().item())
                progress.advance(task)
            with torch.no_grad():
                got = (model.choose(test) * model.value(test).squeeze(-1)).sum(-1) / K
            result.error[method] = ((got - target).square().mean() / target.var()).item()
    return result


def draw(result: Result, items: int, out: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for method, color in zip(NAMES, ("#0b6e99", "#d9730d", "#6b6b6b"), strict=True):
        course = result.found[method]
        along = [100 * (i + 1) / len(course) for i in range(len(course))]
        axes.plot(along, [100 * share for share in course], color=color, label=NAMES[method], linewidth=2)
    axes.axhline(100 * K / items, color="#cccccc", linestyle="--", label="by chance", zorder=0)
    axes.set_xlabel("training, %")
    axes.set_ylabel("right items among the chosen, %")
    axes.set_title(f"Which {K} of {items} items count? Learned from their mean alone")
    axes.set_ylim(0, 103)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right")
    figure.savefig(out, dpi=100)


def main(steps: int = 600, items: int = 256, seed: int = 0, out: Path = Path("soft_topk.png")) -> None:
    """Learn which 5 items count."""
    result = run(steps, items, seed)
    table = Table(title=f"Which {K} of {items} items count?")
    table.add_column("trained through")
    table.add_column("right items chosen", justify="right")
    table.add_column("variance unexplained", justify="right")
    for method, name in NAMES.items():
        table.add_row(name, f"{100 * result.found[method][-1]:.1f} %", f"{100 * result.error[method]:.1f} %")
    Console().print(table)
    draw(result, items, out)


if __name__ == "__main__":
    typer.run(main)
