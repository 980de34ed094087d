"""Which images show large numbers? A scorer is trained to put them on top of its lists.

A list holds 20 to 60 images of digits. A 9 has relevance 3, an 8 has 2, a 7 has 1, all others 0. The scorer
is a small network, trained with

- `khot.losses.log_rank_loss`, which is made to train by, and has no tau;
- `khot.losses.ndcg_loss` of the whole list, and of its first 10 places;
- `khot.losses.spearman_loss`, which cares for all places alike;
- for comparison, ListNet (the cross-entropy of a softmax over the list) and RankNet (a logistic loss of every
  pair), each written by hand.

This is done twice: with the right labels, and with three of ten labels drawn at random. The lists have
different lengths, which `mask=` tells the losses. Every loss has the learning rate and the number of steps
that are best for it on lists of images that are held back from training, with labels of the same kind. All
are judged by NDCG@10 of other images with right labels, over five seeds, with the hard metric: the same loss
at a tau near 0. The picture also shows the time that a loss takes by the length of the list. `--hidden 0`
makes the scorer linear.

    python examples/ranking.py                        # scikit-learn's digits, two minutes on one core
    python examples/ranking.py --hidden 0 --seeds 3 --out ranking.png
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
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
from reproduce.harness.data import Images, load_digits

SHORTEST, LONGEST, BATCH, PLACES = 20, 60, 15, 10
TAU, HARD = 0.3, 1e-9
CHECKS = 10  # of a model in training
RATES = (0.01, 0.03, 0.1)
WRONG = {"right labels": 0.0, "30 % random labels": 0.3}
LENGTHS = (64, 256, 1024, 4096)

Data = tuple[Tensor, Tensor]  # images and labels
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of scores, relevance and mask, all of them (lists, n)


def listnet(scores: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    target = relevance.float().masked_fill(~mask, -torch.inf).softmax(-1)
    log_p = scores.masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0)
    return -(target * log_p).sum(-1).mean()


def ranknet(scores: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    """It has all pairs of a list in memory."""
    better = relevance.unsqueeze(-1) > relevance.unsqueeze(-2)
    pairs = better & mask.unsqueeze(-1) & mask.unsqueeze(-2)
    losses = F.softplus(scores.unsqueeze(-2) - scores.unsqueeze(-1))
    return (losses * pairs).sum() / pairs.sum().clamp(min=1)


def log_rank(scores: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    return khot.losses.log_rank_loss(scores, relevance, mask=mask)


def ndcg(scores: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    return khot.losses.ndcg_loss(scores, relevance, tau=TAU, mask=mask)


def ndcg_at_10(scores: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    return khot.losses.ndcg_loss(scores, relevance, PLACES, tau=TAU, mask=mask)


def spearman(scores: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    return khot.losses.spearman_loss(scores, relevance, tau=TAU, mask=mask)


LOSSES: dict[str, Loss] = {
    "log_rank_loss": log_rank,
    "ndcg_loss": ndcg,
    "ndcg_loss, k = 10": ndcg_at_10,
    "spearman_loss": spearman,
    "ListNet": listnet,
    "RankNet": ranknet,
}
METRICS = ("NDCG@10", "NDCG", "average precision", "Spearman")
COLORS = dict(zip(LOSSES, ("#0b7d4f", "#0b6e99", "#4ba3c3", "#6b4c9a", "#d9730d", "#b3261e"), strict=True))


@dataclass
class Result:
    """The learning rate that was chosen, and the metrics of test lists."""

    rate: float
    metrics: dict[str, float]


@dataclass
class Lists:
    """Ragged lists of images: rows of indices, and which of them take part."""

    images: Tensor
    relevance: Tensor
    index: Tensor
    mask: Tensor


def draw_lists(images: Tensor, labels: Tensor, count: int, generator: torch.Generator) -> Lists:
    length = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    whole = len(images) // LONGEST  # lists that one permutation of the images gives, without repetition
    orders = [torch.randperm(len(images), generator=generator) for _ in range(-(-count // whole))]
    index = torch.cat([order[: whole * LONGEST].view(whole, LONGEST) for order in orders])[:count]
    return Lists(images, (labels - 6).clamp(min=0)[index], index, torch.arange(LONGEST) < length)


def spoiled(labels: Tensor, share: float, seed: int) -> Tensor:
    """The labels, of which a share is drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(10, labels.shape, generator=generator)
    return torch.where(torch.rand(labels.shape, generator=generator) < share, drawn, labels)


def score(model: nn.Module, lists: Lists) -> Tensor:
    return model(lists.images).squeeze(-1)[lists.index]


def measure(model: nn.Module, lists: Lists) -> dict[str, float]:
    """The hard metrics: the losses at a tau so small that ranks are integers."""
    with torch.no_grad():
        x, r, options = score(model, lists), lists.relevance, {"mask": lists.mask, "tau": HARD}
        losses = (
            khot.losses.ndcg_loss(x, r, PLACES, **options),
            khot.losses.ndcg_loss(x, r, **options),
            khot.losses.average_precision_loss(x, r > 0, **options),
            khot.losses.spearman_loss(x, r, **options),
        )
    return {name: 1 - loss.item() for name, loss in zip(METRICS, losses, strict=True)}


def train(
    training: Data, validation: Lists, loss: Loss, rate: float, hidden: int, steps: int, seed: int
) -> tuple[float, nn.Module]:
    """The model at the time when its NDCG@10 of the validation lists is best, and that NDCG@10."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    n = training[0].shape[-1]
    model: nn.Module = nn.Linear(n, 1)
    if hidden:
        model = nn.Sequential(nn.Linear(n, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    best, kept = -1.0, model
    for step in range(steps):
        lists = draw_lists(*training, BATCH, generator)
        optimizer.zero_grad()
        loss(score(model, lists), lists.relevance, lists.mask).backward()
        optimizer.step()
        if (step + 1) % (steps // CHECKS) == 0:
            found = measure(model, validation)["NDCG@10"]
            if found > best:
                best, kept = found, copy.deepcopy(model)
    return best, kept


def run(
    images: Images, hidden: int = 32, steps: int = 300, seeds: int = 5, rates: tuple[float, ...] = RATES
) -> dict[str, dict[str, list[Result]]]:
    """For either kind of labels and every loss, one result per seed."""
    held = torch.arange(len(images.train_labels)) % 4 == 0
    results: dict[str, dict[str, list[Result]]] = {kind: {name: [] for name in LOSSES} for kind in WRONG}
    with Progress(console=Console(stderr=True)) as report:
        task = report.add_task("training", total=len(WRONG) * seeds * len(LOSSES) * len(rates))
        for kind, share in WRONG.items():
            for seed in range(seeds):
                generator = torch.Generator().manual_seed(1000 + seed)
                labels = spoiled(images.train_labels, share, seed)
                validation = draw_lists(images.train_images[held], labels[held], 200, generator)
                test = draw_lists(images.test_images, images.test_labels, 500, generator)
                training = images.train_images[~held], labels[~held]
                for name, loss in LOSSES.items():
                    models = {}
                    for rate in rates:
                        models[rate] = train(training, validation, loss, rate, hidden, steps, seed)
                        report.advance(task)
                    best = max(models, key=lambda rate, m=models: m[rate][0])
                    results[kind][name].append(Result(best, measure(models[best][1], test)))
    return results


def seconds(name: str, n: int) -> float:
    """The least of three times for one list, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    relevance = torch.randint(0, 4, (1, n), generator=generator)
    scores = torch.randn(1, n, generator=generator).requires_grad_()
    mask, times = torch.ones(1, n, dtype=torch.bool), []
    for _ in range(3):
        start = time.perf_counter()
        LOSSES[name](scores, relevance, mask).backward()
        times.append(time.perf_counter() - start)
    return min(times)


def mean_and_spread(results: list[Result], metric: str) -> tuple[float, float]:
    values = torch.tensor([result.metrics[metric] for result in results])
    return values.mean().item(), values.std(correction=min(1, len(values) - 1)).item()


def draw(results: dict[str, dict[str, list[Result]]], out: Path, lengths: tuple[int, ...] = LENGTHS) -> None:
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    *panels, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.2])
    for axes, (kind, found) in zip(panels, results.items(), strict=True):
        for place, name in enumerate(reversed(LOSSES)):
            values = [100 * result.metrics["NDCG@10"] for result in found[name]]
            axes.plot(values, [place] * len(values), "o", color=COLORS[name], alpha=0.5)
            axes.plot(
                sum(values) / len(values), place, "|", color=COLORS[name], markersize=20, markeredgewidth=2.5
            )
        axes.set_yticks(
            range(len(LOSSES)), list(reversed(LOSSES)) if axes is panels[0] else [""] * len(LOSSES)
        )
        axes.set_ylim(-0.6, len(LOSSES) - 0.4)
        axes.set_title(f"NDCG@10 of test lists, %:\n{kind}")
    for name in LOSSES:
        times = [1e3 * seconds(name, n) for n in lengths]
        right.plot(lengths, times, "o-", color=COLORS[name], label=name, linewidth=2, markersize=4)
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("entries in the list")
    right.set_title("milliseconds of a loss,\nforward and backward, one core")
    right.legend(frameon=False, fontsize=8)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=80)


def main(hidden: int = 32, steps: int = 300, seeds: int = 5, out: Path = Path("ranking.png")) -> None:
    """Lists with large numbers on top."""
    torch.set_num_threads(1)
    results = run(load_digits(), hidden, steps, seeds)
    scorer = f"{hidden} hidden units" if hidden else "linear"
    for kind, found in results.items():
        table = Table(
            title=f"scikit-learn digits, {scorer}, {kind}: test lists, %, mean ± deviation of {seeds} seeds"
        )
        for column in ("loss", *METRICS, "learning rates"):
            table.add_column(column, justify="left" if column == "loss" else "right")
        for name in LOSSES:
            cells = []
            for metric in METRICS:
                mean, spread = mean_and_spread(found[name], metric)
                cells.append(f"{100 * mean:.1f} ± {100 * spread:.1f}")
            rates = sorted({result.rate for result in found[name]})
            table.add_row(name, *cells, ", ".join(map(str, rates)))
        Console(width=130).print(table)
    draw(results, out)


if __name__ == "__main__":
    typer.run(main)
