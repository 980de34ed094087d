"""A convolutional network at a tenth of its multiply-adds: which weights are worth what they cost?

A weight of a convolution is used once for each pixel of its output, here 64 and 16 times, and one of the last
layer once. A small network learns digits, and is then pruned to a share of its multiply-adds and trained on:

- `nn.prune_global(cost=)`, which keeps the weights that are largest for what they cost;
- `nn.prune_global` without costs, to the share of weights that has the same multiply-adds at the beginning.
  Training moves them (to 1.3 % where 2 % was asked for), as nothing holds them;
- each layer by itself, to the same share, by `nn.prune_magnitude`.

All start from the same trained network, have the same temperatures and steps, and are judged hard, with their
multiply-adds counted.

    python examples/pruning_macs.py                       # scikit-learn's digits, 70 s on one core
    python examples/pruning_macs.py --seed 1 --out pruning_macs.png
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import khot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import from reproduce/, beside this folder
from reproduce.harness.data import Images, load_digits

BATCH, SHARES = 128, (0.02, 0.05, 0.1, 0.2)
COSTS, LAYERS = (64, 16, 1), ("convolution 1", "convolution 2", "linear")
NAMES = {"cost": "prune_global(cost=)", "count": "prune_global by count", "layers": "each layer alone"}
COLORS = dict(zip(NAMES, ("#0b6e99", "#d9730d", "#999999"), strict=True))


@dataclass
class Result:
    """The share of test images got wrong, the multiply-adds, and the share of each layer's weights kept."""

    error: float
    macs: int
    kept: list[float]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def layers(model: nn.Sequential) -> list[tuple[nn.Module, str]]:
    return [(model[i], "weight") for i in (0, 3, 7)]


def macs(model: nn.Sequential) -> int:
    return sum(c * int((layer.weight != 0).sum()) for c, (layer, _) in zip(COSTS, layers(model), strict=True))


def fit(model: nn.Sequential, images: Images, steps: int, tau: khot.nn.Anneal | None = None) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    shape = (-1, 1, *images.shape)
    for _ in range(steps):
        model.train()
        batch = torch.randint(len(images.train_labels), (BATCH,))
        loss = F.cross_entropy(model(images.train_images[batch].view(shape)), images.train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if tau is not None:
            tau.step()


def amount_by_count(model: nn.Sequential, share: float) -> float:
    """The share of weights to prune, of all layers together, that leaves this share of the multiply-adds."""
    weights = [layer.weight.detach().abs().flatten() for layer, _ in layers(model)]
    cost = torch.cat([torch.full_like(w, c) for w, c in zip(weights, COSTS, strict=True)])
    order = torch.cat(weights).argsort(descending=True)
    kept = int((cost[order].cumsum(0) <= share * cost.sum()).sum())
    return 1 - kept / len(cost)


def pruned(dense: nn.Sequential, images: Images, method: str, share: float, steps: int) -> Result:
    torch.manual_seed(0)
    model = copy.deepcopy(dense)
    tau = khot.nn.Anneal(1.0, 0.01, steps, "exponential")
    if method == "cost":
        khot.nn.prune_global(layers(model), 1 - share, tau=tau, cost=COSTS)
    elif method == "count":
        khot.nn.prune_global(layers(model), amount_by_count(model, share), tau=tau)
    else:
        for layer, name in layers(model):
            khot.nn.prune_magnitude(layer, name, 1 - share, tau=tau)
    fit(model, images, steps, tau)
    khot.nn.make_permanent(model)
    with torch.no_grad():
        wrong = model.eval()(images.test_images.view(-1, 1, *images.shape)).argmax(-1) != images.test_labels
    kept = [float((layer.weight != 0).float().mean()) for layer, _ in layers(model)]
    return Result(wrong.float().mean().item(), macs(model), kept)


def run(
    images: Images, steps: int = 300, runs: int = 2, shares: tuple[float, ...] = SHARES, seed: int = 0
) -> tuple[list[float], dict[str, list[list[Result]]]]:
    """The errors of the dense networks, and for each method and share the results of all runs."""
    results: dict[str, list[list[Result]]] = {method: [[] for _ in shares] for method in NAMES}
    dense = []
    with Progress(console=Console(stderr=True)) as report:
        task = report.add_task("training", total=runs * (1 + len(NAMES) * len(shares)))
        for i in range(runs):
            torch.manual_seed(seed + i)
            model = network()
            fit(model, images, steps)
            with torch.no_grad():
                wrong = model(images.test_images.view(-1, 1, *images.shape)).argmax(-1) != images.test_labels
            dense.append(wrong.float().mean().item())
            report.advance(task)
            for method in NAMES:
                for j, share in enumerate(shares):
                    results[method][j].append(pruned(model, images, method, share, steps))
                    report.advance(task)
    return dense, results


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def draw(
    dense: list[float], results: dict[str, list[list[Result]]], shares: tuple[float, ...], out: Path
) -> None:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    whole = macs(network())
    for method, name in NAMES.items():
        errors = [100 * mean([r.error for r in each]) for each in results[method]]
        along = [100 * mean([r.macs for r in each]) / whole for each in results[method]]
        left.plot(along, errors, "o-", color=COLORS[method], label=name)
    left.axhline(100 * mean(dense), color="#333333", linestyle=":", label="all weights")
    left.set_xscale("log")
    left.set_xticks([100 * s for s in shares], [f"{100 * s:g}" for s in shares])
    left.minorticks_off()
    left.set_xlabel("multiply-adds left, %")
    left.set_ylabel("test error, %")
    left.set_ylim(bottom=0)
    left.legend(frameon=False)
    middle = shares.index(0.1) if 0.1 in shares else 0
    for i, method in enumerate(NAMES):
        kept = [mean([r.kept[layer] for r in results[method][middle]]) for layer in range(3)]
        places = [layer + 0.27 * (i - 1) for layer in range(3)]
        right.bar(places, [100 * share for share in kept], 0.25, color=COLORS[method], label=NAMES[method])
    right.set_xticks(range(3), [f"{name}\n({c} each)" for name, c in zip(LAYERS, COSTS, strict=True)])
    right.set_ylabel(f"weights kept, %, at {100 * shares[middle]:g} % of multiply-adds")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=80)


def main(steps: int = 300, runs: int = 2, seed: int = 0, out: Path = Path("pruning_macs.png")) -> None:
    """A network at a share of its multiply-adds."""
    torch.set_num_threads(1)
    images = load_digits()
    dense, results = run(images, steps, runs, SHARES, seed)
    table = Table(title=f"{images.name}: test error, all weights {100 * mean(dense):.1f} %, {runs} runs")
    table.add_column("multiply-adds left")
    for name in NAMES.values():
        table.add_column(name, justify="right")
    for j, share in enumerate(SHARES):
        row = [f"{100 * mean([r.error for r in results[method][j]]):.1f} %" for method in NAMES]
        table.add_row(f"{100 * share:g} %", *row)
    Console().print(table)
    draw(dense, results, SHARES, out)


if __name__ == "__main__":
    typer.run(main)
