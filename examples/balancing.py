"""Experts with the same load: how soon does a bias per expert balance a router, and does it stay balanced?

A router with fixed random weights sends each token to 4 of 64 experts by its sigmoid scores. The tokens have
a direction in common, so that a few experts are nearly everyone's best. After half of the steps the direction
changes at once, as it does when the data of a run change. Four routers see the same tokens:

- without a bias;
- the sign rule: after each step, each bias moves by 0.001, the usual rate, towards the mean load;
- the sign rule at the best of seven rates for other tokens, by the mean violation of all steps;
- `nn.QuantileBalancer`, which moves each bias to where its expert would have got its share of the step.

The violation is the largest load over the mean, less 1: how much longer a step takes than an even one. It is
measured on each batch before its update.

    python examples/balancing.py                       # 8 s on one core
    python examples/balancing.py --seed 1 --out balancing.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import khot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import from reproduce/, beside this folder
from reproduce.harness import reporting

WIDTH, EXPERTS, K, TOKENS, RATE = 64, 64, 4, 8192, 1e-3
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
NAMES = {
    "none": "no bias",
    "sign": "sign rule",
    "tuned": "sign rule, best rate",
    "quantile": "QuantileBalancer",
}
COLORS = {"none": "#999999", "sign": "#d9730d", "tuned": "#b58900", "quantile": "#0b6e99"}


class Sign(nn.Module):
    """The sign rule, in the form of a balancer."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, scores: Tensor) -> Tensor:
        experts = (scores + self.bias).topk(K).indices
        load = experts.flatten().bincount(minlength=EXPERTS).float()
        self.change = self.rate * (load.mean() - load).sign()
        return experts

    def update(self) -> None:
        self.bias += self.change


def run(steps: int = 100, seed: int = 0) -> dict[str, list[float]]:
    """The violation of each step."""
    balancers: dict[str, nn.Module] = {
        "none": Sign(0.0),
        "sign": Sign(RATE),
        "tuned": Sign(best_rate(steps, seed + 1)),
        "quantile": khot.nn.QuantileBalancer(EXPERTS, K),
    }
    return follow(balancers, steps, seed)


def best_rate(steps: int, seed: int) -> float:
    violations = follow({str(rate): Sign(rate) for rate in RATES}, steps, seed)
    return min(RATES, key=lambda rate: sum(violations[str(rate)]))


def follow(balancers: dict[str, nn.Module], steps: int, seed: int) -> dict[str, list[float]]:
    torch.manual_seed(seed)
    router = nn.Linear(WIDTH, EXPERTS, bias=False)
    directions = torch.randn(2, WIDTH)
    violations: dict[str, list[float]] = {method: [] for method in balancers}
    for step in range(steps):
        x = torch.randn(TOKENS, WIDTH) + directions[2 * step // steps]
        scores = router(x).sigmoid()
        for method, balancer in balancers.items():
            load = balancer(scores).flatten().bincount(minlength=EXPERTS).double()
            violations[method].append((load.max() / load.mean()).item() - 1)
            balancer.update()
    return violations


def draw(violations: dict[str, list[float]], out: Path) -> None:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for method, values in violations.items():
        axes.semilogy(range(len(values)), values, color=COLORS[method], linewidth=2)
    change = len(violations["none"]) / 2
    axes.axvline(change, color="#333333", linestyle=":")
    axes.set_xlabel("step")
    axes.set_ylabel("largest load over the mean, less 1")
    axes.set_title(f"{EXPERTS} experts, {K} for each token; the tokens change at step {change:g}")
    axes.spines[["top", "right"]].set_visible(False)
    ends = {NAMES[method]: (len(v) - 1, v[-1], COLORS[method]) for method, v in violations.items()}
    reporting.label_ends(axes, ends)
    figure.savefig(out, dpi=80)


def main(steps: int = 100, seed: int = 0, out: Path = Path("balancing.png")) -> None:
    """Experts with the same load."""
    violations = run(steps, seed)
    points = {
        "first step": 0,
        "third": 2,
        "last before the change": steps // 2 - 1,
        "third after": steps // 2 + 2,
        "last": -1,
    }
    table = Table(title="largest load over the mean, less 1")
    table.add_column("router")
    for name in points:
        table.add_column(name, justify="right")
    for method, name in NAMES.items():
        table.add_row(name, *(f"{violations[method][step]:.2f}" for step in points.values()))
    Console().print(table)
    draw(violations, out)


if __name__ == "__main__":
    typer.run(main)
