"""Sixteen experts for sixteen kinds of tokens: does the router find them?

Tokens come in 16 kinds, clusters in 16 dimensions, and each kind has a linear map of its own that the mixture
has to imitate. There are 16 linear experts, and each token is sent to one. This is enough if the router sends
every kind to an expert of its own.

- `nn.TokenChoiceRouter`, soft in training, whose temperature an `nn.Anneal` lowers;
- the same with a hard selection from the start and the output scaled by the expert's probability, as in the
  Switch transformer, which is how a hard router gets a gradient at all;
- that with the usual loss for an even load on top.

All are judged with one expert per token.

    python examples/mixture.py                 # 25 s on one core
    python examples/mixture.py --seed 1 --out mixture.png
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
from torch.nn import functional as F

import khot

KINDS, DIM, OUT, BATCH = 16, 16, 4, 256
NAMES = {"soft": "soft, annealed", "hard": "hard", "balanced": "hard, balanced"}
EVEN = 0.01  # the weight of the loss for an even load, as in the Switch transformer


class Tokens:
    """Clusters with a linear map each."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.centres = self.normal(KINDS, DIM)
        self.maps = self.normal(KINDS, DIM, OUT) / DIM**0.5

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def draw(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (size, DIM), targets (size, OUT) and kinds (size,)."""
        kind = torch.randint(KINDS, (size,), generator=self.generator)
        x = self.centres[kind] + 0.5 * self.normal(size, DIM)
        return x, (x.unsqueeze(1) @ self.maps[kind]).squeeze(1), kind


class SwitchRouter(khot.nn.TokenChoiceRouter):
    """The k best experts, weighted by their probabilities among all."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> khot.nn.Routing:
        routing = super().forward(input, mask)
        return routing._replace(weights=routing.selection * F.linear(input, self.weight).softmax(-1))


@dataclass
class Result:
    """Averages over the runs: the share of the target's variance left unexplained in the course of training
    and at its end, and the entropy of the load; and where each kind's tokens go, in the last run."""

    course: list[float] = field(default_factory=list)
    error: float = 0.0
    entropy: float = 0.0
    table: Tensor = field(default_factory=lambda: torch.zeros(KINDS, KINDS))


def train(method: str, steps: int, seed: int, progress: Progress) -> Result:
    torch.manual_seed(seed)
    tokens = Tokens(seed)
    tau = khot.nn.Anneal(2.0, 0.05, steps, "exponential")
    choose = khot.nn.TokenChoiceRouter if method == "soft" else SwitchRouter
    router = choose(DIM, KINDS, k=1, tau=tau)
    model = khot.nn.MixtureOfExperts(router, [nn.Linear(DIM, OUT) for _ in range(KINDS)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    test, target, kind = tokens.draw(4000)
    result = Result()
    task = progress.add_task(f"{NAMES[method]}, run {seed}", total=steps)
    for step in range(steps):
        x, y, _ = tokens.draw(BATCH)
        router.train(method == "soft")
        output, routing = model(x)
        loss = F.mse_loss(output, y)
        if method == "balanced":
            probability = F.linear(x, router.weight).softmax(-1).mean(0)
            loss = loss + EVEN * KINDS * (routing.load * probability).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        tau.step()
        progress.advance(task)
        if (step + 1) % (steps // 20) == 0:
            router.eval()
            with torch.no_grad():
                output, routing = model(test)
            result.course.append((F.mse_loss(output, target) / target.var()).item())
    result.error, result.entropy = result.course[-1], routing.entropy.item()
    result.table = (
        F.one_hot(kind, KINDS).float().T @ routing.selection / F.one_hot(kind, KINDS).sum(0)[:, None]
    )
    return result


def run(steps: int = 500, runs: int = 2, seed: int = 0) -> dict[str, Result]:
    results = {}
    with Progress(console=Console(stderr=True)) as progress:
        for method in NAMES:
            each = [train(method, steps, seed + i, progress) for i in range(runs)]
            results[method] = Result(
                course=[sum(values) / runs for values in zip(*(r.course for r in each), strict=True)],
                error=sum(r.error for r in each) / runs,
                entropy=sum(r.entropy for r in each) / runs,
                table=each[-1].table,
            )
    return results


def draw(results: dict[str, Result], out: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, *tables = figure.subplots(1, 3, width_ratios=[1.2, 1, 1])
    for (method, name), color in zip(NAMES.items(), ("#0b6e99", "#d9730d", "#6b6b6b"), strict=True):
        course = results[method].course
        along = [100 * (i + 1) / len(course) for i in range(len(course))]
        left.plot(along, [100 * error for error in course], color=color, label=name, linewidth=2)
    left.set_yscale("log")
    left.set_yticks([5, 10, 20, 50], ["5", "10", "20", "50"])
    left.minorticks_off()
    left.set_xlabel("training, %")
    left.set_ylabel("variance unexplained, %")
    left.set_title("one expert per token")
    left.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    for axes, method in zip(tables, ("soft", "hard"), strict=True):
        table = results[method].table
        axes.imshow(table[:, table.argmax(0).argsort()].numpy(), cmap="Blues", vmin=0, vmax=1)
        axes.set_title(f"{NAMES[method]}: who takes what")
        axes.set_xlabel("expert")
        axes.set_ylabel("kind of token")
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(out, dpi=80)


def main(steps: int = 500, runs: int = 2, seed: int = 0, out: Path = Path("mixture.png")) -> None:
    """Sixteen experts for sixteen kinds of tokens."""
    results = run(steps, runs, seed)
    table = Table(title=f"{KINDS} experts for {KINDS} kinds of tokens", caption=f"mean of {runs} runs")
    table.add_column("router in training")
    table.add_column("variance unexplained", justify="right")
    table.add_column("entropy of the load", justify="right")
    for method, name in NAMES.items():
        table.add_row(name, f"{100 * results[method].error:.1f} %", f"{results[method].entropy:.2f}")
    Console().print(table)
    draw(results, out)


if __name__ == "__main__":
    typer.run(main)
