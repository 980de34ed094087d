"""Attend to the 4 nearest of n: attention that was trained on short contexts, used on long ones.

Every example is a query and n pairs of a key and a value; the target is the mean value of the 4 keys nearest
to the query. Queries and keys are written in different bases, which the projections have to learn. Both
layers start with the same parameters and train with 32 pairs. Softmax attention learns one sharpness, which
is right for 32 pairs: the more pairs there are, the more of them share the weight. `nn.TopKAttention`
attends to 4 of any number.

    python examples/attention.py                 # 15 s on one core
    python examples/attention.py --seed 1 --out attention.png
"""

from __future__ import annotations

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

SIZE, NEAREST, BATCH, LENGTH = 8, 4, 128, 32
LENGTHS = (16, 32, 64, 128, 256, 1024)
NAMES = {"topk": "nn.TopKAttention", "softmax": "nn.MultiheadAttention"}


class Pairs:
    """Queries (size, 1, SIZE), keys and values (size, n, SIZE), and what to answer (size, 1, SIZE)."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.basis = torch.linalg.qr(self.normal(SIZE, SIZE)).Q

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def draw(self, size: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query, keys = (F.normalize(self.normal(size, m, SIZE), dim=-1) for m in (1, n))
        values = self.normal(size, n, SIZE)
        nearest = khot.topk_mask(query @ keys.mT, NEAREST)
        return query, keys @ self.basis, values, nearest @ values / NEAREST


def make(method: str, steps: int, seed: int) -> tuple[nn.Module, khot.nn.Anneal]:
    torch.manual_seed(seed)
    tau = khot.nn.Anneal(1.0, 0.03, steps, "exponential")
    plain = nn.MultiheadAttention(SIZE, 1, batch_first=True)
    if method == "softmax":
        return plain, tau
    layer = khot.nn.TopKAttention(SIZE, 1, NEAREST, batch_first=True, tau=tau)
    layer.load_state_dict(plain.state_dict(), strict=False)
    return layer, tau


def run(steps: int = 600, seed: int = 0) -> dict[str, dict[int, float]]:
    """The share of the target's variance that each layer leaves unexplained, at each length."""
    errors: dict[str, dict[int, float]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        for method, name in NAMES.items():
            task = progress.add_task(name, total=steps)
            pairs, (layer, tau) = Pairs(seed), make(method, steps, seed)
            optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            for _ in range(steps):
                query, keys, values, target = pairs.draw(BATCH, LENGTH)
                optimizer.zero_grad()
                F.mse_loss(layer(query, keys, values, need_weights=False)[0], target).backward()
                optimizer.step()
                schedule.step()
                tau.step()
                progress.advance(task)
            layer.eval()
            errors[method] = {}
            with torch.no_grad():
                for n in LENGTHS:
                    query, keys, values, target = pairs.draw(1000, n)
                    got, _ = layer(query, keys, values, need_weights=False)
                    errors[method][n] = (F.mse_loss(got, target) / target.var()).item()
    return errors


def draw(errors: dict[str, dict[int, float]], out: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for method, color in zip(NAMES, ("#0b6e99", "#d9730d"), strict=True):
        axes.plot(
            LENGTHS,
            [100 * errors[method][n] for n in LENGTHS],
            "o-",
            color=color,
            label=NAMES[method],
            linewidth=2,
        )
    axes.axvline(LENGTH, color="#cccccc", linestyle="--", zorder=0)
    axes.annotate(
        " trained here", (LENGTH, 1), color="#6b6b6b", va="bottom", xycoords=("data", "axes fraction")
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("pairs in the context")
    axes.set_ylabel("variance unexplained, %")
    axes.set_title(f"The mean of the {NEAREST} nearest, by attention\n")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=100)


def main(steps: int = 600, seed: int = 0, out: Path = Path("attention.png")) -> None:
    """Attend to the 4 nearest of n."""
    errors = run(steps, seed)
    table = Table(title=f"Variance unexplained, trained with {LENGTH} pairs", caption="pairs in the context")
    table.add_column("layer")
    for n in LENGTHS:
        table.add_column(str(n), justify="right")
    for method, name in NAMES.items():
        table.add_row(name, *(f"{100 * errors[method][n]:.1f} %" for n in LENGTHS))
    Console().print(table)
    draw(errors, out)


if __name__ == "__main__":
    typer.run(main)
