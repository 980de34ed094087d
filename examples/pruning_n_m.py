"""One weight of every four, eight or sixteen: when should the pattern be chosen?

A perceptron with two hidden layers of 64 learns digits with n of every m weights of its hidden layers, the
pattern that sparse tensor cores run for 2:4. The pattern is chosen in three ways:

- softly: half of the training has all weights, then `nn.prune_n_m` selects while an `nn.Anneal` lowers its
  temperature over a quarter, and the last quarter trains with the pattern that has come of it;
- by one cut: the same first half, and then the largest weights of each m, for good;
- hard from the start: what drops out gets no gradient.

All are judged hard: n of every m weights are not zero. The first half is the same network for the first two.

    python examples/pruning_n_m.py                       # scikit-learn's digits, 80 s on one core
    python examples/pruning_n_m.py --data-dir FOLDER     # MNIST, from its four gzipped files
    python examples/pruning_n_m.py --seed 1 --out pruning_n_m.png
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Sequence
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

HIDDEN, BATCH, RATE = 64, 128, 0.1
PATTERNS = ((2, 4), (1, 4), (1, 8), (1, 16))
NAMES = {"soft": "chosen softly", "cut": "by one cut", "hard": "hard from the start"}
COLORS = {"soft": "#0b6e99", "cut": "#d9730d", "hard": "#999999"}


class Training:
    """A network in training, all of whose steps are the same but for the temperature and the mode."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self.model = nn.Sequential(
            nn.Linear(images.n, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 10),
        )

    def prune(self, n: int, m: int, tau: float | khot.nn.Anneal) -> None:
        for layer in (self.model[0], self.model[2]):
            khot.nn.prune_n_m(layer, "weight", n, m, tau=tau)

    def steps(self, count: int, tau: khot.nn.Anneal | None = None) -> None:
        """Train, softly if there is a temperature."""
        self.model.train(tau is not None)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        for _ in range(count):
            batch = torch.randint(len(self.images.train_labels), (BATCH,))
            loss = F.cross_entropy(
                self.model(self.images.train_images[batch]), self.images.train_labels[batch]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if tau is not None:
                tau.step()

    @torch.no_grad()
    def error(self) -> float:
        wrong = self.model.eval()(self.images.test_images).argmax(-1) != self.images.test_labels
        return wrong.float().mean().item()


def train(images: Images, dense: Training, method: str, n: int, m: int, steps: int) -> Training:
    """A network with n of every m weights; ``dense`` has had half of the steps."""
    result = Training(images) if method == "hard" else copy.deepcopy(dense)
    if method == "soft":
        tau = khot.nn.Anneal(1.0, 0.01, steps // 4, "exponential")
        result.prune(n, m, tau)
        result.steps(steps // 4, tau)
        result.steps(steps // 4)
    else:
        result.prune(n, m, 0.01)
        result.steps(steps if method == "hard" else steps // 2)
    for part in (result.model[0], result.model[2]):
        khot.nn.make_permanent(part)
    return result


Errors = dict[str, list[list[float]]]


def run(
    images: Images,
    steps: int = 2000,
    runs: int = 3,
    seed: int = 0,
    patterns: Sequence[tuple[int, int]] = PATTERNS,
) -> tuple[list[float], Errors, Tensor]:
    """The errors with all weights, those of each method by pattern, and the first layer's pruned weight."""
    dense, errors = [], {method: [[] for _ in patterns] for method in NAMES}
    with Progress(console=Console(stderr=True)) as report:
        task = report.add_task("training", total=runs * (1 + len(NAMES) * len(patterns)))
        for number in range(seed, seed + runs):
            torch.manual_seed(number)
            half = Training(images)
            half.steps(steps // 2)
            whole = copy.deepcopy(half)
            whole.steps(steps // 2)
            dense.append(whole.error())
            report.advance(task)
            for i, (n, m) in enumerate(patterns):
                for method in NAMES:
                    pruned = train(images, half, method, n, m, steps)
                    errors[method][i].append(pruned.error())
                    if method == "soft" and i == 0:
                        weight = pruned.model[0].weight.detach()
                    report.advance(task)
    return dense, errors, weight


def draw(
    name: str,
    dense: list[float],
    errors: Errors,
    weight: Tensor,
    out: Path,
    patterns: Sequence[tuple[int, int]] = PATTERNS,
) -> None:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.35])
    for method, label in NAMES.items():
        percent = [[100 * error for error in found] for found in errors[method]]
        for i, found in enumerate(percent):
            left.plot([i] * len(found), found, ".", color=COLORS[method], alpha=0.5)
        means = [statistics.fmean(found) for found in percent]
        left.plot(range(len(means)), means, "o-", color=COLORS[method], linewidth=2, label=label)
    left.axhline(
        100 * statistics.fmean(dense), color="black", linestyle=":", linewidth=1, label="all weights"
    )
    left.set_xticks(range(len(patterns)), [f"{n}:{m}" for n, m in patterns])
    left.set_xlabel("weights kept of every m")
    left.set_ylabel("test error, %")
    left.set_ylim(0)
    left.set_title(f"{name}, 64 and 64 hidden units")
    left.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    part, (n, m) = weight[:8, :32], patterns[0]
    scale = part.abs().max().item()
    right.imshow(part.numpy(), cmap="RdBu", vmin=-scale, vmax=scale)
    for edge in range(0, part.shape[1] + 1, m):
        right.axvline(edge - 0.5, color="#999999", linewidth=0.8)
    right.set_xticks([])
    right.set_yticks([])
    right.set_xlabel("pixel")
    right.set_ylabel("hidden unit")
    right.set_title(f"weights of the first layer: {n} of every {m}; white is 0")
    figure.savefig(out, dpi=80)


def main(
    data_dir: Path | None = None,
    steps: int = 2000,
    runs: int = 3,
    seed: int = 0,
    out: Path = Path("pruning_n_m.png"),
) -> None:
    """n of every m weights."""
    images = load_digits() if data_dir is None else load_mnist(data_dir)
    dense, errors, weight = run(images, steps, runs, seed)
    table = Table(title=f"{images.name}: test error, %; with all weights {100 * statistics.fmean(dense):.1f}")
    table.add_column("the pattern is")
    for n, m in PATTERNS:
        table.add_column(f"{n}:{m}", justify="right")
    for method, name in NAMES.items():
        table.add_row(name, *(f"{100 * statistics.fmean(found):.1f}" for found in errors[method]))
    Console().print(table)
    draw(images.name, dense, errors, weight, out)


if __name__ == "__main__":
    typer.run(main)
