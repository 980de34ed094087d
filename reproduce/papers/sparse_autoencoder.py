"""Which sparse autoencoder explains most? (topk-sae)

An autoencoder writes each vector as a sum of 8 of 256 learned directions. It is judged by the share of the
variance of new vectors that its sums leave unexplained, and by the share of its directions that are dead:
that none of 10,000 training vectors uses, or on the digits none of all. The vectors are:

- `digits`: what a small perceptron makes of scikit-learn's digits in its second hidden layer, 64 numbers;
- `mnist`: the same of MNIST, 128 numbers;
- `synthetic`: sums of 8 of 128 random directions of length 1 in 64 dimensions, with coefficients from ½ to
  1½ and noise of deviation 0.02.

They are centred, and divided by the root of their mean square. The methods are:

- `khot`: `khot.nn.TopKSAE` as it is by default, trained on its `loss`.
- `khot, batch`: the same with `batch=True`, where the inputs of a batch share their latents in training, and
  new vectors use what exceeds the layer's threshold.
- `khot, no revival`: the same as `khot` with `revive=None`: directions that none of the last 1,600 vectors
  used do not learn what the others leave.
- `khot, batch, no revival`: the same with `batch=True`.
- `khot, straight-through`: a hard selection with the gradient of the soft one at tau = 0.1, where the first
  pre-activations have a deviation of 1; trained on the mean squared error.
- `top-k`: written by hand in torch, as top-k autoencoders usually are: `torch.topk` of the pre-activations,
  and directions that have length 1 after each step, with gradients orthogonal to them.
- `top-k, AuxK`: the same, with the usual loss for directions that none of the last 10,000 vectors used: 32 of
  them reconstruct the error, with a weight of 1/32.
- `batch top-k`: written by hand; a batch selects 8 per vector in all, and new vectors use what exceeds the
  mean over the training of the smallest selected value.
- `batch top-k, AuxK`: the same, with the loss of `top-k, AuxK`.
- `Gumbel gates`: written by hand as `top-k`, but in training 8 directions are drawn without replacement by
  Gumbel noise with the scale tau, and get the gradient of 8·softmax (at most 1) at the temperature tau, which
  falls from 1 to 0.1. New vectors use `torch.topk`.

The command of the report is

    python -m reproduce sparse-autoencoder --data-dir FOLDER

Everything else is the same for all: Adam with a learning rate of 2e-3 that falls to 0 over the last fifth of
3,000 steps, and 128 vectors per step. Departures from what is usual: the networks and data sets are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from reproduce.harness import reporting, study, training
from reproduce.harness.data import Images, load_digits

__all__ = ["DATA", "EXPERIMENT", "METHODS", "Args", "HandWritten", "report", "run", "trials", "vectors"]

K, LATENTS, BATCH, RATE = 8, 256, 128, 2e-3
ATOMS, DIMS, NOISE = 128, 64, 0.02
IDLE, AUX, AUX_SHARE = 10_000, 32, 1 / 32
HOT, COLD = 1.0, 0.1  # the temperatures of Gumbel gates
DATA = ("digits", "mnist", "synthetic")
METHODS = (
    "khot",
    "khot, batch",
    "khot, no revival",
    "khot, batch, no revival",
    "khot, straight-through",
    "top-k",
    "top-k, AuxK",
    "batch top-k",
    "batch top-k, AuxK",
    "Gumbel gates",
)


@dataclass(frozen=True)
class Args(study.Args):
    """The autoencoders, and their training."""

    methods: tuple[str, ...] = field(
        default=METHODS, metadata={"help": f"Methods, out of: {'; '.join(METHODS)}.", "selects": True}
    )
    steps: int = field(default=3_000, metadata={"help": "Steps of training."})
    pretrain: int = field(default=1_500, metadata={"help": "Steps of training of the perceptrons."})

    def __post_init__(self) -> None:
        super().__post_init__()
        study.check_choices("methods", self.methods, METHODS)


def trials(args: Args) -> list[study.Trial]:
    sets = [name for name in DATA if name != "mnist" or args.data_dir is not None]
    return [
        {"data": name, "method": method, "seed": seed}
        for seed in range(args.seeds)
        for name in sets
        for method in args.methods
    ]


@lru_cache(len(DATA))
def vectors(args: Args, name: str) -> tuple[Tensor, Tensor]:
    """Vectors (N, d) for training and for testing; the same for all methods and seeds."""
    if name == "synthetic":
        train, test = _sums()
    else:
        train, test = _activations(load_digits() if name == "digits" else training.images(args), args)
    mean = train.mean(0)
    scale = (train - mean).square().mean().sqrt()
    return (train - mean) / scale, (test - mean) / scale


def _sums() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    directions = F.normalize(torch.randn(ATOMS, DIMS, generator=random), dim=-1)

    def draw(n: int) -> Tensor:
        which = torch.rand(n, ATOMS, generator=random).topk(K).indices
        code = torch.zeros(n, ATOMS).scatter(1, which, torch.rand(n, K, generator=random) + 0.5)
        return code @ directions + NOISE * torch.randn(n, DIMS, generator=random)

    return draw(50_000), draw(5_000)


def _activations(images: Images, args: Args) -> tuple[Tensor, Tensor]:
    width = 128 if images.n > 64 else 64
    random = torch.get_rng_state()
    torch.manual_seed(0)
    network = training.mlp(images.n, width, width, 10)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for step in range(args.pretrain):
        batch = training.minibatches(len(images.train_labels), 128, step, 0)
        loss = F.cross_entropy(network(images.train_images[batch]), images.train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_rng_state(random)
    hidden = network[:3]
    with torch.no_grad():
        return hidden(images.train_images), hidden(images.test_images)


class HandWritten(nn.Module):
    """A top-k autoencoder in plain torch.

    Args:
        d: size of the vectors.
        aux: whether idle directions have a loss of their own.
        batch: whether the vectors of a batch share their latents.
        gumbel: whether the latents are drawn in training.
    """

    def __init__(self, d: int, aux: bool = False, batch: bool = False, gumbel: bool = False) -> None:
        super().__init__()
        self.aux, self.batch, self.gumbel, self.tau = aux, batch, gumbel, HOT
        self.decoder = nn.Parameter(F.normalize(torch.randn(LATENTS, d), dim=-1))
        self.encoder = nn.Parameter(self.decoder.detach().clone())
        self.encoder_bias, self.bias = nn.Parameter(torch.zeros(LATENTS)), nn.Parameter(torch.zeros(d))
        self.register_buffer("idle", torch.zeros(LATENTS, dtype=torch.int64))
        self.register_buffer("threshold", torch.zeros(()))
        self.idle: Tensor
        self.threshold: Tensor

    def code(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The code and the pre-activations, both (N, LATENTS)."""
        a = F.linear(x - self.bias, self.encoder, self.encoder_bias)
        if self.gumbel and self.training:
            noisy = a / self.tau - torch.empty_like(a).exponential_().log()
            soft = (K * noisy.softmax(-1)).clamp(max=1)
            hard = torch.zeros_like(a).scatter(1, noisy.topk(K).indices, 1.0)
            return (hard + soft - soft.detach()) * a.relu(), a
        if not self.batch:
            values, indices = a.topk(K)
            return torch.zeros_like(a).scatter(1, indices, values.relu()), a
        level = self.threshold
        if self.training:
            level = a.detach().relu().flatten().topk(K * len(a)).values[-1]
            self.threshold.lerp_(level, 0.01) if self.threshold > 0 else self.threshold.copy_(level)
        return a.relu() * (a >= level), a

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x)[0] @ self.decoder + self.bias

    def loss(self, x: Tensor) -> Tensor:
        """The mean squared error, and that of the idle directions' reconstruction of the rest."""
        code, a = self.code(x)
        rest = x - code @ self.decoder - self.bias
        loss = rest.square().mean()
        self.idle.copy_(torch.where((code > 0).any(0), 0, self.idle + len(x)))
        idle = self.idle >= IDLE
        if not self.aux or not bool(idle.any()):
            return loss
        values, indices = a.masked_fill(~idle, -math.inf).topk(min(AUX, int(idle.sum())))
        again = torch.zeros_like(a).scatter(1, indices, values.relu()) @ self.decoder
        share = (rest.detach() - again).square().mean() / rest.detach().square().mean()
        return loss + AUX_SHARE * share * loss.detach()

    @torch.no_grad()
    def before_step(self) -> None:
        """Take what would change the directions' length from their gradient."""
        assert self.decoder.grad is not None
        self.decoder.grad -= (self.decoder.grad * self.decoder).sum(-1, keepdim=True) * self.decoder

    @torch.no_grad()
    def after_step(self) -> None:
        """Give all directions length 1."""
        self.decoder.div_(self.decoder.norm(dim=-1, keepdim=True))


def _ours(method: str, x: Tensor) -> khot.nn.TopKSAE:
    options: dict[str, dict[str, Any]] = {
        "khot, batch": {"batch": True},
        "khot, no revival": {"revive": None},
        "khot, batch, no revival": {"batch": True, "revive": None},
        "khot, straight-through": {"tau": 0.1, "hard": True},
    }
    return khot.nn.TopKSAE(x.shape[-1], LATENTS, K, **options.get(method, {}))


def run(args: Args, trial: study.Trial, checkpoint: study.Checkpoint) -> Iterator[study.Row]:
    method, seed = str(trial["method"]), int(trial["seed"])
    train, test = (part.to(args.device) for part in vectors(args, str(trial["data"])))
    torch.manual_seed(seed)
    hand = HandWritten(
        train.shape[-1], "AuxK" in method, method.startswith("batch top-k"), method == "Gumbel gates"
    )
    model: khot.nn.TopKSAE | HandWritten = _ours(method, train) if method.startswith("khot") else hand
    model.to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, 5 * (1 - s / args.steps)))
    nested: Callable[[Tensor], Tensor] = model.loss
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    for step in training.steps(checkpoint, state, args.steps):
        x = train[training.minibatches(len(train), BATCH, step, seed).to(args.device)]
        hand.tau = HOT * (COLD / HOT) ** (step / args.steps)
        alone = method == "khot, straight-through"
        loss = F.mse_loss(model(x), x) if alone else nested(x)
        optimizer.zero_grad()
        loss.backward()
        if isinstance(model, HandWritten):
            model.before_step()
        optimizer.step()
        if isinstance(model, HandWritten):
            model.after_step()
        schedule.step()
    yield _judge(model.eval(), train[:IDLE], test)


@torch.no_grad()
def _judge(model: khot.nn.TopKSAE | HandWritten, train: Tensor, test: Tensor) -> study.Row:
    def code(x: Tensor) -> Tensor:
        return model.code(x)[0] if isinstance(model, HandWritten) else model.encode(x)

    used, rest, count = torch.zeros(LATENTS, dtype=torch.bool, device=test.device), 0.0, 0.0
    for x in train.split(BATCH):
        used |= (code(x) > 0).any(0)
    for x in test.split(BATCH):
        y = code(x)
        rest += (y @ model.decoder + model.bias - x).square().sum().item()
        count += (y > 0).sum().item()
    total = (test - test.mean(0)).square().sum().item()
    return {"unexplained": rest / total, "dead": 1 - used.double().mean().item(), "size": count / len(test)}


def report(args: Args, rows: list[study.Row], folder: Path) -> str:
    """One table for the errors and one for the directions that nothing uses."""
    sets = [name for name in DATA if reporting.where(rows, data=name)]

    def cells(method: str, column: str, factor: float, digits: int) -> list[str]:
        found = [reporting.column(reporting.where(rows, data=d, method=method), column) for d in sets]
        return [reporting.spread([factor * value for value in values], digits) for values in found]

    present = [method for method in METHODS if reporting.where(rows, method=method)]
    tables = []
    for title, column, factor, digits in (
        ("Variance of new vectors unexplained, %", "unexplained", 100, 2),
        ("Dead directions, %", "dead", 100, 1),
        ("Directions per new vector", "size", 1, 2),
    ):
        lines = [[method, *cells(method, column, factor, digits)] for method in present]
        tables.append(f"{title}:\n\n" + reporting.table(["", *sets], lines))
    _draw(rows, present, sets, folder / "error.png")
    return "\n".join(tables) + "\n![Unexplained variance](error.png)"


def _draw(rows: list[study.Row], present: list[str], sets: list[str], path: Path) -> None:
    """Plot the unexplained variance of every seed."""
    figure, plots = reporting.figure(len(sets), width=11)
    for plot, name in zip(plots, sets, strict=True):
        for place, method in enumerate(present):
            errors = reporting.column(reporting.where(rows, data=name, method=method), "unexplained")
            own = reporting.COLORS[0] if method.startswith("khot") else reporting.COLORS[1]
            plot.plot([100 * e for e in errors], [place] * len(errors), "o", color=own, markersize=6)
        plot.set_yticks(range(len(present)), present if name == sets[0] else [""] * len(present))
        plot.set_ylim(len(present) - 0.5, -0.5)
        plot.set_xlim(0, 1.05 * plot.dataLim.x1)
        plot.set_title(name)
        plot.set_xlabel("variance unexplained, %")
        plot.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="topk-sae",
    needs="MNIST",
    takes="15 min of one core",
    Args=Args,
    smoke={"seeds": 1, "steps": 10, "pretrain": 10},
    trials=trials,
    run=run,
    report=report,
)
