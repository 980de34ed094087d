"""Reading under a token budget: what should be read, if long passages crowd out short ones?

Each question comes with 32 passages, each of 20 to 640 tokens, and 700 tokens may be read. A passage adds to
what is known by an amount that its features tell on average, and the answer is right if what was read adds up
to what the question takes. A small network scores the passages. It is trained on the answers alone, through
the choice:

- `khot.soft_budget`: the choice spends the 700 tokens exactly, so that a long passage has to be worth the
  short ones that it displaces;
- `khot.soft_topk` with k = 700 tokens over the mean length: the same without prices;
- a price per token, found by dual ascent, and a sigmoid for each passage: 700 tokens on average, as one would
  write by hand.

All networks see the lengths, too. All are judged hard: passages are read in the order of their scores while
they fit (`khot.budget_mask`), never more than 700 tokens. For comparison, "the truth" is the same greedy
choice by the true strength per token.

    python examples/budget.py                       # 30 s on one core
    python examples/budget.py --seed 1 --out budget.png
"""

from __future__ import annotations

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

PASSAGES, FEATURES, BUDGET, BATCH, TESTS, RUNS = 32, 6, 700.0, 256, 4000, 3
SHORTEST, LONGEST, TAKES = 20.0, 640.0, 4.0
NAMES = {
    "budget": "soft_budget",
    "topk": "soft_topk, no prices",
    "price": "a price per token, by hand",
    "truth": "the truth",
}
COLORS = dict(zip(NAMES, ("#0b6e99", "#d9730d", "#999999", "#333333"), strict=True))


@dataclass
class Questions:
    """Features, lengths and contents of the passages, (count, 32, ...), what these are on average, and what
    the question takes."""

    features: Tensor
    length: Tensor
    content: Tensor
    strength: Tensor
    takes: Tensor


@dataclass
class Result:
    """The share of right answers of each run, and of one run what was read: passages and their strengths."""

    right: list[float]
    spent: float
    length: Tensor
    strength: Tensor
    read: Tensor


def questions(count: int, generator: torch.Generator) -> Questions:
    features = torch.randn(count, PASSAGES, FEATURES, generator=generator)
    length = SHORTEST * (LONGEST / SHORTEST) ** torch.rand(count, PASSAGES, generator=generator)
    # half of the features count; a long passage says more, but less per token
    strength = 0.3 * F.softplus(2 * features[..., 0] + features[..., 1] - features[..., 2])
    strength = strength * (length / 100) ** 0.3
    content = 2 * strength * torch.rand(count, PASSAGES, generator=generator)
    takes = TAKES + torch.randn(count, generator=generator)
    return Questions(features, length.round(), content, strength, takes)


def chosen(method: str, score: Tensor, length: Tensor, tau: float, price: Tensor) -> Tensor:
    """The passages that are read in training: hard choices with soft gradients."""
    if method == "budget":
        return khot.soft_budget(score, length, BUDGET, tau=tau, hard=True)
    if method == "topk":
        return khot.soft_topk(score, BUDGET * PASSAGES / length.sum(-1), tau=tau, hard=True)
    z = score - price * length / 100
    soft = torch.sigmoid(z / tau)
    return (z > 0).float() - soft.detach() + soft


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES + 1, 32), nn.ReLU(), nn.Linear(32, 1))


def scores(model: nn.Module, data: Questions) -> Tensor:
    seen = torch.cat([data.features, (data.length / 100).log().unsqueeze(-1)], -1)
    return model(seen).squeeze(-1)


def train(method: str, steps: int, seed: int, report: Progress) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, price = network(), torch.zeros(())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        data = questions(BATCH, generator)
        y = chosen(method, scores(model, data), data.length, 0.3, price)
        loss = F.softplus(2 * (data.takes - (y * data.content).sum(-1))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if method == "price":
            price = (price + 0.02 * ((y.detach() * data.length).sum(-1).mean() / BUDGET - 1)).clamp(min=0)
        report.advance(report.task_ids[0])
    return model, price


@torch.no_grad()
def judge(method: str, model: nn.Module | None, price: Tensor, seed: int) -> tuple[float, Result]:
    data = questions(TESTS, torch.Generator().manual_seed(1000 + seed))
    if model is None:
        read = khot.budget_mask(data.strength, data.length, BUDGET, by="value")
    else:
        score = scores(model, data)
        if method == "price":
            score = score - price * data.length / 100
        read = khot.budget_mask(score, data.length, BUDGET)
    right = ((read * data.content).sum(-1) > data.takes).float().mean().item()
    spent = (read * data.length).sum(-1).max().item()
    return right, Result([right], spent, data.length[:40], data.strength[:40], read[:40].bool())


def run(steps: int = 400, runs: int = RUNS, seed: int = 0) -> dict[str, Result]:
    results: dict[str, Result] = {}
    with Progress(console=Console(stderr=True)) as report:
        report.add_task("training", total=3 * runs * steps)
        for method in NAMES:
            for i in range(runs):
                model, price = (
                    (None, torch.zeros(())) if method == "truth" else train(method, steps, seed + i, report)
                )
                right, result = judge(method, model, price, seed + i)
                results.setdefault(method, result)
                if i:
                    results[method].right.append(right)
    return results


def draw(results: dict[str, Result], out: Path) -> None:
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    for ax, (method, result) in zip(figure.subplots(1, 4, sharey=True), results.items(), strict=True):
        length, strength, read = result.length.flatten(), result.strength.flatten(), result.read.flatten()
        ax.scatter(length[~read], strength[~read], s=5, color="#dddddd", label="not read")
        ax.scatter(length[read], strength[read], s=5, color=COLORS[method], label="read")
        ax.set_xscale("log")
        ax.set_xticks(ticks := [20, 50, 100, 200, 500], [str(n) for n in ticks])
        ax.minorticks_off()
        mean = 100 * sum(result.right) / len(result.right)
        ax.set_title(f"{NAMES[method]}:\n{mean:.1f} % right", fontsize=11)
        ax.set_xlabel("tokens")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=9, loc="upper left")
    figure.axes[0].set_ylabel("strength")
    figure.savefig(out, dpi=80)


def main(steps: int = 400, runs: int = RUNS, seed: int = 0, out: Path = Path("budget.png")) -> None:
    """Reading under a token budget."""
    results = run(steps, runs, seed)
    table = Table(title=f"{PASSAGES} passages, {BUDGET:.0f} tokens, {runs} runs")
    table.add_column("the choice in training")
    for name in ("right answers", "worst run", "most tokens"):
        table.add_column(name, justify="right")
    for method, name in NAMES.items():
        right = results[method].right
        table.add_row(
            name,
            f"{100 * sum(right) / len(right):.1f} %",
            f"{100 * min(right):.1f} %",
            f"{results[method].spent:.0f}",
        )
    Console().print(table)
    draw(results, out)


if __name__ == "__main__":
    typer.run(main)
