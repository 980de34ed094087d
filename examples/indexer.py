"""Attend to 16 of n keys that a small indexer has chosen: as good as attention to all keys.

Every query is a noisy copy of one of n keys, in another basis, and is to be answered by the value of that
key. Attention has 4 heads of 16 entries. The indexer beside it has 2 heads of 12 and one head of keys, and
scores a key by Σ_h w_h relu(⟨q_h, k⟩): 26 multiplications for a pair, where attention takes 128. Only the 16
keys with the highest scores are attended to, by `nn.selected_attention`. The indexer learns from attention
alone: its loss is the divergence of its softmax over the chosen keys from the weights that attention has for
them. In the first third of the training all keys are chosen, so that attention learns what to look for.

All methods start with the same parameters and see the same data: attention to all keys, the indexer, and an
indexer that does not learn. They train with 128 keys.

    python examples/indexer.py                 # 25 s on one core
    python examples/indexer.py --seed 1 --out indexer.png
"""

from __future__ import annotations

from collections.abc import Iterable
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

SIZE, HEADS, WIDTH, CHOSEN = 16, 4, 64, 16
INDEX_HEADS, INDEX_SIZE = 2, 12
BATCH, QUERIES, LENGTH = 8, 16, 128
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
NAMES = {"dense": "all keys", "indexer": "16 by indexer", "untrained": "not trained"}


class Lookups:
    """Queries (size, QUERIES, SIZE), keys and values (size, n, SIZE), and what to answer."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.basis = torch.linalg.qr(self.normal(SIZE, SIZE)).Q

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def draw(self, size: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, values = self.normal(size, n, SIZE), self.normal(size, n, SIZE)
        right = torch.randint(n, (size, QUERIES, 1), generator=self.generator)
        query = keys.take_along_dim(right, 1) + 0.3 * self.normal(size, QUERIES, SIZE)
        return query @ self.basis, keys, values, values.take_along_dim(right, 1)


class Indexer(nn.Module):
    """Scores (batch, L, n) of keys for queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(SIZE, INDEX_HEADS * INDEX_SIZE), nn.Linear(SIZE, INDEX_SIZE)
        self.weight = nn.Linear(SIZE, INDEX_HEADS)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        q = self.query(query).unflatten(-1, (INDEX_HEADS, INDEX_SIZE))
        products = torch.einsum("blhd, bnd -> blhn", q, self.key(keys)).relu()
        return torch.einsum("blh, blhn -> bln", self.weight(query), products)


class Attention(nn.Module):
    """Attention to the keys that an indexer chooses, or to all without one."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(SIZE, WIDTH), nn.Linear(SIZE, WIDTH)
        self.value, self.out = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, SIZE)
        self.indexer = None if method == "dense" else Indexer()

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The answers, and the loss of the indexer."""
        q, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer, x in ((self.query, query), (self.key, keys), (self.value, values))
        )
        if self.indexer is None:
            found, loss = F.scaled_dot_product_attention(q, key, value), torch.zeros(())
        else:
            scores = self.indexer(query, keys)
            best, indices = khot.topk(scores, k)
            indices = indices.unsqueeze(1)  # the same for all heads
            found = khot.nn.selected_attention(q, key, value, indices)
            with torch.no_grad():
                chosen = key.unsqueeze(2).take_along_dim(indices.unsqueeze(-1), 3)
                logits = torch.einsum("bhle, bhlke -> bhlk", q, chosen) / q.shape[-1] ** 0.5
            loss = F.kl_div(best.log_softmax(-1), logits.softmax(-1).mean(1), reduction="batchmean") / QUERIES
        return self.out(found.transpose(1, 2).flatten(-2)), loss


def run(steps: int = 400, seed: int = 0, methods: Iterable[str] = NAMES) -> dict[str, dict[int, float]]:
    """The share of the target's variance that each method leaves unexplained, at each length."""
    errors: dict[str, dict[int, float]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        for method in methods:
            task = progress.add_task(NAMES[method], total=steps)
            torch.manual_seed(seed)
            lookups, layer = Lookups(seed), Attention(method)
            optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            for step in range(steps):
                *context, target = lookups.draw(BATCH, LENGTH)
                answer, loss = layer(*context, LENGTH if step < steps // 3 else CHOSEN)
                optimizer.zero_grad()
                (F.mse_loss(answer, target) + (loss if method == "indexer" else 0)).backward()
                optimizer.step()
                schedule.step()
                progress.advance(task)
            errors[method] = {}
            with torch.no_grad():
                for n in LENGTHS:
                    *context, target = lookups.draw(32, n)
                    answer, _ = layer(*context, CHOSEN)
                    errors[method][n] = (F.mse_loss(answer, target) / target.var()).item()
    return errors


def draw(errors: dict[str, dict[int, float]], out: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for method, color in zip(errors, ("#6b6b6b", "#0b6e99", "#d9730d"), strict=False):
        percent = [100 * errors[method][n] for n in LENGTHS]
        axes.plot(LENGTHS, percent, "o-", color=color, label=NAMES[method], linewidth=2)
    axes.axvline(LENGTH, color="#cccccc", linestyle="--", zorder=0)
    axes.annotate(
        " trained here", (LENGTH, 1), color="#6b6b6b", va="bottom", xycoords=("data", "axes fraction")
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("keys")
    axes.set_ylabel("variance unexplained, %")
    axes.set_title(f"Attention to {CHOSEN} keys that an indexer chooses\n")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=100)


def main(steps: int = 400, seed: int = 0, out: Path = Path("indexer.png")) -> None:
    """Attend to 16 of n keys that an indexer has chosen."""
    errors = run(steps, seed)
    table = Table(title=f"Variance unexplained, trained with {LENGTH} keys", caption="keys")
    table.add_column("attention to")
    for n in LENGTHS:
        table.add_column(str(n), justify="right")
    for method, name in NAMES.items():
        table.add_row(name, *(f"{100 * errors[method][n]:.1f} %" for n in LENGTHS))
    Console().print(table)
    draw(errors, out)


if __name__ == "__main__":
    typer.run(main)
