"""Pruning MNIST networks beside the usual ways: `python -m benchmarks.pruning --data-dir FOLDER`.

A network learns for 2,000 steps, and 90, 95 or 98 % of its weights (not of its biases) are 0 at the end. All
layers compete for what is left. Every way has the same start, the same batches of 128, and Adam with a rate
of 1e-3 that falls to 0 over the last third:

- `all weights`: nothing is pruned.
- `one cut`: torch.nn.utils.prune.global_unstructured by magnitude after three quarters of the steps; the
  kept weights go on learning.
- `cuts`: the same function in 10 cuts over the second half, ever smaller ones (1 − (1 − t)³ of the weights to
  prune at t from 0 to 1), and the last one after three quarters.
- `movement`: from the middle on, each weight has a score, which learns by the straight-through gradient
  −(weight · gradient of the weight), and those of the largest scores are kept, as many as with `cuts`; from
  three quarters on the same ones.
- `khot`: khot.nn.prune_global with its defaults, from the first step on.
- `khot, tau falls`: the same with a temperature that falls from 1 to 0.01.
- `khot, amount grows`: the same with an amount that grows from half of the weights, over three quarters.
- `khot, by score`: half of the steps with all weights, a quarter with `prune_global(by="score")`, an amount
  that grows as with `cuts`, and a temperature that falls from 0.1 to 0.001; and a quarter with its layers in
  eval mode.
- `khot, in three parts`: half of the steps with all weights, a quarter with `prune_global` and a temperature
  that falls from 1 to 0.01, and a quarter with its layers in eval mode.

The networks are 784-300-100-10, and two convolutions of 8 and 16 channels (5 x 5, stride 2) before a linear
layer. Nothing was tuned for any way. Figures are errors on the 10,000 test images, in %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import khot
from benchmarks import report
from reproduce.harness import data, reporting, training

PATH = Path(__file__).parent / "results" / "pruning.md"
BATCH, RATE, CUTS = 128, 1e-3, 10
AMOUNTS = (0.9, 0.95, 0.98)

Step = Callable[[int], None]
Way = Callable[[nn.Module, float, int], Step]


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )  # fmt: skip


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


NETWORKS = {"784-300-100-10": dense, "two convolutions": convolutions}


def weights(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(part, "weight") for part in model.children() if isinstance(part, (nn.Linear, nn.Conv2d))]


def growing(step: int, steps: int) -> float:
    """The share of what is to be pruned that is pruned after so many steps."""
    t = (step - steps / 2) / (steps / 4)
    return 1 - (1 - min(max(t, 0.0), 1.0)) ** 3


def nothing(model: nn.Module, amount: float, steps: int) -> Step:
    return lambda step: None


def one_cut(model: nn.Module, amount: float, steps: int) -> Step:
    def before(step: int) -> None:
        if step == steps * 3 // 4:
            prune.global_unstructured(weights(model), prune.L1Unstructured, amount=amount)

    return before


def cuts(model: nn.Module, amount: float, steps: int) -> Step:
    done = 0.0

    def before(step: int) -> None:
        nonlocal done
        at = step - steps // 2
        if at > 0 and at % max(steps // 4 // CUTS, 1) == 0 and done < amount:
            now = amount * growing(step, steps)
            # the amount of a further cut is a share of what is left
            prune.global_unstructured(weights(model), prune.L1Unstructured, amount=(now - done) / (1 - done))
            done = now

    return before


class _Moved(nn.Module):
    """A weight times a mask of scores that all layers share."""

    def __init__(self, scores: nn.Parameter, masks: list[Tensor], index: int) -> None:
        super().__init__()
        self.scores, self.masks, self.index = scores, masks, index

    def forward(self, weight: Tensor) -> Tensor:
        # the mask is constant forward, and its gradient is that of the scores
        mask = self.masks[self.index]
        return weight * (mask + self.scores - self.scores.detach())


def movement(model: nn.Module, amount: float, steps: int) -> Step:
    masks: list[Tensor] = []
    scores: list[nn.Parameter] = []
    optimizers: list[torch.optim.Optimizer] = []

    def before(step: int) -> None:
        if step == steps // 2:
            for index, (module, name) in enumerate(weights(model)):
                weight = getattr(module, name)
                scores.append(nn.Parameter(torch.zeros_like(weight)))
                masks.append(torch.ones_like(weight))
                parametrize.register_parametrization(module, name, _Moved(scores[-1], masks, index))
            optimizers.append(torch.optim.Adam(scores, lr=RATE))
        if steps // 2 < step <= steps * 3 // 4:
            optimizers[0].step()
            row = torch.cat([score.detach().flatten() for score in scores])
            kept = khot.topk_mask(row, round((1 - amount * growing(step, steps)) * row.numel()))
            for i, part in enumerate(kept.split([score.numel() for score in scores])):
                masks[i] = part.view_as(scores[i])
        for score in scores:
            score.grad = None

    return before


def by_khot(
    model: nn.Module,
    amount: float,
    steps: int,
    *,
    tau: Callable[[int], Any] = lambda steps: 1.0,
    grow: bool = False,
) -> Step:
    schedule, size = tau(steps), khot.nn.Anneal(0.5, amount, steps * 3 // 4) if grow else amount
    khot.nn.prune_global(weights(model), size, tau=schedule)

    def before(step: int) -> None:
        for part in (schedule, size):
            if step and isinstance(part, khot.nn.Anneal):
                part.step()

    return before


def falling(steps: int) -> khot.nn.Anneal:
    return khot.nn.Anneal(1.0, 0.01, steps)


def keep_in_eval_mode(model: nn.Module, step: int, steps: int) -> None:
    if step >= steps * 3 // 4:
        for module, _ in weights(model):
            module.eval()


def in_three_parts(model: nn.Module, amount: float, steps: int) -> Step:
    tau = falling(steps // 4)

    def before(step: int) -> None:
        if step == steps // 2:
            khot.nn.prune_global(weights(model), amount, tau=tau)
        elif steps // 2 < step < steps * 3 // 4:
            tau.step()
        keep_in_eval_mode(model, step, steps)

    return before


def by_score(model: nn.Module, amount: float, steps: int) -> Step:
    size = khot.nn.Anneal(0.0, amount, steps * 3 // 4, "cubic", wait=steps // 2)
    tau = khot.nn.Anneal(100 * RATE, RATE, steps * 3 // 4, wait=steps // 2)
    khot.nn.prune_global(weights(model), size, tau=tau, by="score")

    def before(step: int) -> None:
        if step:
            size.step()
            tau.step()
        keep_in_eval_mode(model, step, steps)

    return before


WAYS: dict[str, Way] = {
    "all weights": nothing,
    "one cut": one_cut,
    "cuts": cuts,
    "movement": movement,
    "khot": by_khot,
    "khot, tau falls": partial(by_khot, tau=falling),
    "khot, amount grows": partial(by_khot, grow=True),
    "khot, in three parts": in_three_parts,
    "khot, by score": by_score,
}


@lru_cache(1)
def images(folder: Path) -> data.Images:
    return data.load_mnist(folder)


def batches(x: Tensor, y: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(x), (BATCH,), generator=generator)
        yield x[chosen], y[chosen]


def measure(network: str, way: str, amount: float, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    found = images(folder)
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    before = WAYS[way](model, amount, steps)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = training.lr_schedule(optimizer, training.linear_over_last_third, steps)
    train = batches(found.train_images, found.train_labels, seed)
    for step, (x, y) in zip(range(steps), train, strict=False):
        model.train()
        before(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        wrong = (model(found.test_images).argmax(-1) != found.test_labels).double().mean().item()
        kept = [getattr(module, name) != 0 for module, name in weights(model)]
    left = sum(part.sum().item() for part in kept) / sum(part.numel() for part in kept)
    if way != "all weights" and left > 1 - amount + 1e-3:
        raise AssertionError(f"{way} kept {left:.4f} of the weights")
    case = {"network": network, "way": way, "amount": amount, "seed": seed}
    return {**case, "error": 100 * wrong, "kept": 100 * left}


def write(path: Path, results: report.Results) -> None:
    cases = list(results["cases"].values())
    parts = []
    for network in NETWORKS:
        rows = []
        for way in WAYS:
            found = [reporting.where(cases, network=network, way=way, amount=amount) for amount in AMOUNTS]
            if any(found):
                rows.append([way, *(reporting.spread(reporting.column(each, "error"), 2) for each in found)])
        head = ["", *(f"{100 * amount:.0f} % pruned" for amount in AMOUNTS)]
        parts.append(f"## {network}\n\n{report.table(head, rows)}")
    setting = report.said(results["setting"])
    path.write_text(
        f"# Pruning beside the usual ways\n\n`python -m benchmarks.pruning`\n\n{setting}\n\nErrors on test "
        "images, %, mean and standard deviation over the seeds.\n\n" + "\n\n".join(parts),
        encoding="utf-8",
    )


def main() -> None:
    parser = report.parser("pruning beside the usual ways", steps=2000, seeds=3, out=PATH)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with MNIST's four gzipped files")
    args = parser.parse_args()
    setting = {"steps": args.steps, **report.machine(cpu_time=True)}
    todo = {
        f"{network}, {way}, {amount}, {seed}": partial(
            measure, network, way, amount, seed, args.steps, args.data_dir
        )
        for seed in range(args.seeds)
        for network in NETWORKS
        for way in WAYS
        for amount in (AMOUNTS if way != "all weights" else AMOUNTS[:1])
    }
    report.complete(args.out, setting, todo, write)


if __name__ == "__main__":
    main()
