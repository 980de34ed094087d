"""What tau, its schedule and the logits' rate do to a learned choice: `python -m benchmarks.learning`.

A mask of 10 of the 64 pixels of scikit-learn's digits is learned together with a classifier behind it, from a
cross-entropy, by each of three selections:

- soft: the weights of `khot.nn.SoftTopK`;
- hard: its hard mask with the soft gradient (`hard=True`, straight-through);
- gate: `khot.nn.KHotGate`, which draws a hard mask for each image.

Three figures each, mean and standard deviation over seeds: the accuracy with the weights of the training,
that of the same model in eval mode, where the selection is hard, and that of a classifier that is trained
from scratch on the selected pixels, which judges the choice itself. All are on test images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from benchmarks import report
from khot.nn import Anneal
from reproduce.harness.data import Images, load_digits
from reproduce.harness.reporting import spread

K, BATCH, RATE = 10, 64, 0.03
TAUS = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class Learned(nn.Module):
    """Pixels times the selection from learned scores."""

    def __init__(self, n: int, select: nn.Module) -> None:
        super().__init__()
        self.logits, self.select = nn.Parameter(torch.zeros(n)), select

    def forward(self, input: Tensor) -> Tensor:
        return input * self.select(self.logits)

    @property
    def mask(self) -> Tensor:
        return khot.topk_mask(self.logits.detach(), K)


class Fixed(nn.Module):
    """Pixels times a given mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, input: Tensor) -> Tensor:
        return input * self.mask


class Setting(NamedTuple):
    name: str
    make: Callable[[int, int], nn.Module]  # from the number of pixels and of steps
    rate: float = RATE


def soft(start: float, end: float | None = None, hard: bool = False) -> Callable[[int, int], nn.Module]:
    def make(n: int, steps: int) -> nn.Module:
        tau = start if end is None else Anneal(start, end, steps=steps)
        return Learned(n, khot.nn.SoftTopK(K, tau=tau, hard=hard))

    return make


def gate(n: int, steps: int) -> nn.Module:
    return khot.nn.KHotGate(n, K, design="pivotal")


TABLES = {
    "temperature of a soft selection": [
        *(Setting(f"tau = {tau:g}", soft(tau)) for tau in TAUS),
        *(Setting(f"tau = 1 to {end:g}", soft(1.0, end)) for end in (0.1, 0.03, 0.01)),
    ],
    "temperature of a hard selection with the soft gradient": [
        *(Setting(f"hard, tau = {tau:g}", soft(tau, hard=True)) for tau in TAUS),
        Setting("hard, tau = 1 to 0.03", soft(1.0, 0.03, hard=True)),
    ],
    "learning rate of the logits": [
        *(Setting(f"soft, tau = 1 to 0.03, rate {rate:g}", soft(1.0, 0.03), rate) for rate in RATES),
        *(Setting(f"gate, rate {rate:g}", gate, rate) for rate in RATES),
    ],
}


def fit(images: Images, select: nn.Module, rate: float, steps: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(select, nn.Linear(images.n, 64), nn.ReLU(), nn.Linear(64, 10))
    groups = [{"params": list(select.parameters()), "lr": rate}, {"params": model[1:].parameters()}]
    optimizer = torch.optim.Adam([g for g in groups if g["params"]], lr=2e-3)
    schedules = [part for part in model.modules() if isinstance(part, Anneal)]
    for _ in range(steps):
        batch = torch.randint(len(images.train_labels), (BATCH,))
        loss = F.cross_entropy(model(images.train_images[batch]), images.train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    return 100 * (model(images.test_images).argmax(-1) == images.test_labels).float().mean().item()


def measure(setting: Setting, images: Images, steps: int, seed: int) -> list[float]:
    model = fit(images, setting.make(images.n, steps), setting.rate, steps, seed)
    trained, used = accuracy(model.train(), images), accuracy(model.eval(), images)
    judge = fit(images, Fixed(model[0].mask.clone()), RATE, steps, seed)
    return [trained, used, accuracy(judge, images)]


def main() -> None:
    args = report.parser("what tau, its schedule and the learning rate do", steps=1500, seeds=5).parse_args()
    images = load_digits()
    print(report.said(report.machine(cpu_time=True)))
    print(f"{K} of {images.n} pixels, {args.steps} steps, {args.seeds} seeds; accuracy on test images, %")
    for title, settings in TABLES.items():
        rows = []
        for setting in settings:
            found = [measure(setting, images, args.steps, seed) for seed in range(args.seeds)]
            rows.append([setting.name, *(spread(figures, 1) for figures in zip(*found, strict=True))])
        header = [title, "weights of the training", "eval mode", "trained anew on the choice"]
        print("\n" + report.table(header, rows), end="", flush=True)


if __name__ == "__main__":
    main()
