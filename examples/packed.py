"""Rows of different lengths without padding: nodes of graphs, and lists to be ranked.

*Graphs.* An image of a digit is the graph of its inked pixels, which are neighbours on the grid: 20 to 50
nodes, each with its place and its ink. A layer of messages gives each node a feature and a score; the network
keeps k nodes of each graph, and classifies their sum. How the nodes are kept:

- `khot.soft_topk` of the scores, hard, so that the others are gone, and with its gradient;
- as libraries for graphs do it: the nodes of highest score, times a sigmoid of the score, through which alone
  the scorer learns;
- at random.

*Lists.* A list holds 2 to 60 images, and those of large numbers belong on top, as in `ranking.py`; a linear
scorer is trained with `khot.losses.log_rank_loss`, and with the cross-entropy of a softmax over each list
(ListNet), and judged by NDCG.

Both are one tensor of values and the offsets of its rows; nothing is padded.

    python examples/packed.py                         # scikit-learn's digits, a minute on one core
    python examples/packed.py --keep 3 --seeds 5
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
from reproduce.harness.data import Images, load_digits

WIDTH, BATCH, RATE, TAU = 32, 64, 0.01, 0.3
SHORTEST, LONGEST, LISTS = 2, 60, 20
Keep = Callable[[Tensor, Tensor, Tensor], Tensor]  # the weights of nodes, of scores, k and offsets
COLORS = ("#0b7d4f", "#0b6e99", "#9aa5ad")


class Graphs(NamedTuple):
    """Graphs as packed rows: the nodes of one after those of another.

    Attributes:
        nodes: (N, 3): the place on the grid and the ink.
        neighbours: (N, 8): their numbers; N where the grid has none with ink.
        offsets: (graphs + 1,): where the nodes of each begin.
    """

    nodes: Tensor
    neighbours: Tensor
    offsets: Tensor


def graphs(images: Tensor, height: int, width: int) -> Graphs:
    inked = F.pad(images.view(-1, height, width), (1, 1, 1, 1))
    graph, row, column = torch.nonzero(inked, as_tuple=True)
    number = torch.full(inked.shape, len(graph)).index_put((graph, row, column), torch.arange(len(graph)))
    steps = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b]
    neighbours = torch.stack([number[graph, row + a, column + b] for a, b in steps], 1)
    places = torch.stack((row / height - 0.5, column / width - 0.5), 1)
    nodes = torch.cat((places, inked[graph, row, column].unsqueeze(1)), 1)
    return Graphs(nodes, neighbours, torch.searchsorted(graph, torch.arange(len(images) + 1)))


def soft(scores: Tensor, k: Tensor, offsets: Tensor) -> Tensor:
    return khot.soft_topk(scores, k, tau=TAU, hard=True, offsets=offsets)


def gated(scores: Tensor, k: Tensor, offsets: Tensor) -> Tensor:
    return khot.topk_mask(scores, k, offsets=offsets) * scores.sigmoid()


def at_random(scores: Tensor, k: Tensor, offsets: Tensor) -> Tensor:
    return khot.topk_mask(torch.rand_like(scores), k, offsets=offsets)


KEEPS: dict[str, Keep] = {"soft_topk": soft, "gate": gated, "at random": at_random}


class Classifier(nn.Module):
    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.keep = keep
        self.embed, self.mix = nn.Linear(3, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 1)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))

    def weights(self, of: Graphs, k: int) -> tuple[Tensor, Tensor]:
        """The features of nodes, and how much of each is kept."""
        h = self.embed(of.nodes).relu()
        around = F.pad(h, (0, 0, 0, 1))[of.neighbours].sum(1)
        h = self.mix(torch.cat((h, around), 1)).relu()
        most = of.offsets.diff().clamp(max=k)
        return h, self.keep(self.score(h).squeeze(1), most, of.offsets)

    def forward(self, of: Graphs, k: int) -> Tensor:
        h, weights = self.weights(of, k)
        sums = torch.segment_reduce(h * weights.unsqueeze(1), "sum", offsets=of.offsets, axis=0)
        return self.head(sums / k)


def accuracy(images: Images, keep: Keep, k: int, steps: int, seed: int) -> float:
    """Of test images, by a classifier that keeps k nodes of each graph."""
    torch.manual_seed(seed)
    model = Classifier(keep)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(steps):
        chosen = torch.randint(len(images.train_images), (BATCH,))
        optimizer.zero_grad()
        logits = model(graphs(images.train_images[chosen], *images.shape), k)
        F.cross_entropy(logits, images.train_labels[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        logits = model(graphs(images.test_images, *images.shape), k)
    return (logits.argmax(1) == images.test_labels).float().mean().item()


def lists(count: int, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ragged lists: the images in them, their relevance, and the offsets."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count,))
    index = torch.randint(len(labels), (int(lengths.sum()),))
    return index, (labels[index] - 6).clamp(min=0), F.pad(lengths.cumsum(0), (1, 0))


def log_rank(scores: Tensor, relevance: Tensor, offsets: Tensor) -> Tensor:
    return khot.losses.log_rank_loss(scores, relevance, offsets=offsets)


def listnet(scores: Tensor, relevance: Tensor, offsets: Tensor) -> Tensor:
    """A softmax over each list, by hand."""
    lengths = offsets.diff()
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    both = [
        x - torch.segment_reduce(x.exp(), "sum", offsets=offsets).log()[row]
        for x in (scores, relevance.float())
    ]
    return -(both[1].exp() * both[0]).sum() / len(lengths)


LOSSES = {"log_rank_loss": log_rank, "ListNet": listnet}


def ndcg(images: Images, loss: Callable[[Tensor, Tensor, Tensor], Tensor], steps: int, seed: int) -> float:
    """Of ragged lists of test images, by a linear scorer."""
    torch.manual_seed(seed)
    model = nn.Linear(images.n, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(steps):
        index, relevance, offsets = lists(LISTS, images.train_labels)
        optimizer.zero_grad()
        loss(model(images.train_images[index]).squeeze(1), relevance, offsets).backward()
        optimizer.step()
    index, relevance, offsets = lists(500, images.test_labels)
    with torch.no_grad():
        scores = model(images.test_images[index]).squeeze(1)
        return 1 - khot.losses.ndcg_loss(scores, relevance, tau=1e-9, offsets=offsets).item()


def run(
    images: Images, keep: int = 5, steps: int = 500, seeds: int = 3
) -> tuple[dict[str, list[float]], ...]:
    """The accuracies of each way to keep nodes, and the NDCG of each loss, one for each seed."""
    kept: dict[str, list[float]] = {name: [] for name in KEEPS}
    ranked: dict[str, list[float]] = {name: [] for name in LOSSES}
    with Progress(console=Console(stderr=True)) as report:
        task = report.add_task("training", total=seeds * (len(kept) + len(ranked)))
        for seed in range(seeds):
            for name, way in KEEPS.items():
                kept[name].append(accuracy(images, way, keep, steps, seed))
                report.advance(task)
            for name, loss in LOSSES.items():
                ranked[name].append(ndcg(images, loss, steps, seed))
                report.advance(task)
    return kept, ranked


def draw(images: Images, found: tuple[dict[str, list[float]], ...], keep: int, out: Path) -> None:
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    titles = f"{keep} nodes of each graph: accuracy, %", "ragged lists: NDCG, %"
    for axes, results, title in zip(figure.subplots(1, 2), found, titles, strict=True):
        for place, values in enumerate(results.values()):
            axes.plot([100 * v for v in values], [-place] * len(values), "o", color=COLORS[place], alpha=0.6)
        axes.set_yticks([-i for i in range(len(results))], list(results))
        axes.set_ylim(0.6 - len(results), 0.6)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=80)


def main(keep: int = 5, steps: int = 500, seeds: int = 3, out: Path = Path("packed.png")) -> None:
    """Graph pooling and ranking of rows of different lengths."""
    torch.set_num_threads(1)
    images = load_digits()
    found = run(images, keep, steps, seeds)
    for results, what in zip(found, ("accuracy", "NDCG"), strict=True):
        table = Table("", f"{what}, %, mean and range of {seeds} seeds")
        for name, values in results.items():
            mean, low, high = (100 * v for v in (sum(values) / len(values), min(values), max(values)))
            table.add_row(name, f"{mean:.1f}  ({low:.1f} to {high:.1f})")
        Console().print(table)
    draw(images, found, keep, out)


if __name__ == "__main__":
    typer.run(main)
