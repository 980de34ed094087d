"""A policy of four simultaneous actions: which 4 of 16 valves to open, learned from the reward alone?

In each round a state is seen, a vector of 8 numbers, and 4 of 16 valves are opened at once. Each valve earns
what it earns in this state, and pairs of open valves disturb each other; only the total is told. A network
turns the state into 16 logits, and is trained by REINFORCE with a bonus for entropy: rewards of four samples
a state, each less the mean of the other three. The policies differ in the distribution of the set:

- `khot.distributions.ConditionalPoisson`: the k-hot softmax. `log_prob` and `entropy` of the *set* are exact.
- four draws in turn, each by a softmax over the valves that are still closed (Plackett-Luce), with the
  log-probability of the *order* in which they came, and the entropy of the first draw: those of the set are
  sums over 24 orders.
- one softmax over all 1,820 sets: what "choose one" would do, with 1,820 outputs in the place of 16.

A set is judged by its reward as a share of the best of all 1,820, beyond that of a random set. The picture
shows the course of the training and, to its right, the policies' most probable sets at the end.

    python examples/policy.py                       # a minute on one core
    python examples/policy.py --runs 1 --out policy.png
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import khot

N, K, STATE, BATCH, SAMPLES, TESTS, RATE, BONUS = 16, 4, 8, 64, 4, 400, 0.01, 0.02
NAMES = {
    "set": "ConditionalPoisson",
    "order": "draws in turn (Plackett-Luce)",
    "all": "one softmax over all sets",
}
COLORS = dict(zip(NAMES, ("#0b6e99", "#d9730d", "#999999"), strict=True))
SETS = torch.zeros(1820, N).scatter(1, torch.tensor(list(itertools.combinations(range(N), K))), 1)


@dataclass
class Valves:
    """What each valve earns in a state, and how much each pair of valves disturbs each other."""

    earns: nn.Module
    disturbs: Tensor

    def reward(self, state: Tensor, chosen: Tensor) -> Tensor:
        pairs = (chosen @ self.disturbs * chosen).sum(-1) / 2
        return (self.earns(state) * chosen).sum(-1) - pairs

    def share(self, state: Tensor, chosen: Tensor) -> Tensor:
        """The reward, 1 for the best set and 0 for a random one."""
        every = self.reward(state.unsqueeze(1), SETS)
        best, mean = every.amax(1), every.mean(1)
        return ((self.reward(state, chosen) - mean) / (best - mean)).mean()


def valves(seed: int) -> Valves:
    generator = torch.Generator().manual_seed(seed)
    earns = nn.Sequential(nn.Linear(STATE, 32), nn.Tanh(), nn.Linear(32, N)).requires_grad_(False)
    for layer in earns:
        if isinstance(layer, nn.Linear):
            layer.weight.normal_(std=2 / layer.in_features**0.5, generator=generator)
            layer.bias.normal_(std=0.5, generator=generator)
    disturbs = torch.rand(N, N, generator=generator).triu(1) * 2
    return Valves(earns, disturbs + disturbs.mT)


def draw(policy: str, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Samples of the set, (samples, batch, n), their log-probabilities, and the entropy of each state."""
    if policy == "set":
        law = khot.distributions.ConditionalPoisson(K, logits)
        chosen = law.sample((SAMPLES,))
        return chosen, law.log_prob(chosen), law.entropy()
    if policy == "all":
        one = torch.distributions.Categorical(logits=logits)
        index = one.sample((SAMPLES,))
        return SETS[index], one.log_prob(index), one.entropy()
    gumbel = -torch.empty(SAMPLES, *logits.shape).exponential_().log()
    order = khot.topk(logits.detach() + gumbel, N).indices  # the first four of them are the draws
    ordered = logits.expand(SAMPLES, -1, -1).gather(-1, order)
    left = ordered.flip(-1).logcumsumexp(-1).flip(-1)  # of what a draw may choose from
    chosen = torch.zeros(SAMPLES, *logits.shape).scatter(-1, order[..., :K], 1)
    first = torch.distributions.Categorical(logits=logits)
    return chosen, (ordered - left)[..., :K].sum(-1), first.entropy()


def train(policy: str, world: Valves, steps: int, seed: int) -> tuple[list[float], float]:
    """The share of the best reward: of samples in the course of the training, and of the likeliest sets."""
    torch.manual_seed(seed)
    outputs = len(SETS) if policy == "all" else N
    model = nn.Sequential(nn.Linear(STATE, 64), nn.ReLU(), nn.Linear(64, outputs))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    tests, course = torch.randn(TESTS, STATE), []
    for step in range(steps):
        state = torch.randn(BATCH, STATE)
        chosen, log_prob, entropy = draw(policy, model(state))
        reward = world.reward(state, chosen)
        advantage = (reward - reward.mean(0)) * SAMPLES / (SAMPLES - 1)
        loss = -(advantage * log_prob).mean() - BONUS * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % max(1, steps // 40) == 0:
            with torch.no_grad():
                course.append(world.share(tests, draw(policy, model(tests))[0][0]).item())
    with torch.no_grad():
        logits = model(tests)
        likeliest = SETS[logits.argmax(-1)] if policy == "all" else khot.topk_mask(logits, K)
        return course, world.share(tests, likeliest).item()


def run(steps: int, runs: int, seed: int = 0) -> dict[str, list[tuple[list[float], float]]]:
    found: dict[str, list[tuple[list[float], float]]] = {policy: [] for policy in NAMES}
    with Progress(console=Console(stderr=True)) as report:
        task = report.add_task("training", total=runs * len(NAMES))
        for each in range(seed, seed + runs):
            for policy, results in found.items():
                results.append(train(policy, valves(each), steps, each))
                report.advance(task)
    return found


def picture(found: dict[str, list[tuple[list[float], float]]], steps: int, out: Path) -> None:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 1], sharey=True)
    for place, (policy, results) in enumerate(found.items()):
        courses = 100 * torch.tensor([course for course, _ in results])
        at = steps * (torch.arange(courses.shape[1]) + 1) / courses.shape[1]
        left.plot(at, courses.mean(0), color=COLORS[policy], linewidth=2, label=NAMES[policy])
        left.fill_between(at, courses.amin(0), courses.amax(0), color=COLORS[policy], alpha=0.15, linewidth=0)
        ends = [100 * end for _, end in results]
        right.plot([place] * len(ends), ends, "o", color=COLORS[policy], alpha=0.6)
        right.plot(
            place, sum(ends) / len(ends), "_", color=COLORS[policy], markersize=24, markeredgewidth=2.5
        )
    left.set_xlabel("step")
    left.set_title("samples: reward, % of the best set's")
    left.legend(frameon=False, loc="lower right")
    right.set_title("most probable sets")
    right.set_xticks([])
    right.set_xlim(-0.6, len(found) - 0.4)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=80)


def main(steps: int = 600, runs: int = 5, seed: int = 0, out: Path = Path("policy.png")) -> None:
    """Four of sixteen valves, learned from the reward alone."""
    torch.set_num_threads(1)
    found = run(steps, runs, seed)
    table = Table(title=f"reward, % of the best of {len(SETS):,} sets; {runs} runs of {steps} steps")
    for column in ("policy", "samples", "most probable sets"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy, results in found.items():
        last = 100 * torch.tensor([[course[-1], end] for course, end in results])
        spread = last.std(0, correction=min(1, runs - 1))
        table.add_row(
            NAMES[policy], *(f"{m:.1f} ± {s:.1f}" for m, s in zip(last.mean(0), spread, strict=True))
        )
    Console(width=100).print(table)
    picture(found, steps, out)


if __name__ == "__main__":
    typer.run(main)
