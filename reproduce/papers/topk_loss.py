"""Losses for top-k accuracy, compared with cross-entropy (sparse-topk, Figure 6; lapsum, Table 1)

There are 100 classes, and the right one should be among the k highest scores. The classes are the numbers
from 00 to 99, each a picture of two digits, and the network is a perceptron. Numbers of the same five, 00 to
04, 05 to 09, 10 to 14 and so on, are confused in the labels: a label is replaced by a random one of its five
with a probability of 0.6, so that 52 % of the labels are right. Such noise within groups of classes is what
Berrada et al. 2018 made top-5 losses for. The losses are:

- `cross-entropy`, of the scores divided by tau. The papers compare with tau = 1, which has a row of its own.
- `p=2`, `p=4/3`: the top-3 loss of sparse-topk. Its gradient in the scores is the sparse top-3 mask minus the
  one-hot label.
- `last`, `even`, `ends`: `khot.losses.TopKCrossEntropyLoss` with the Laplace CDF, as in lapsum. k is 5
  (`last`), one of 1 to 5 with a probability of 0.2 each (`even`), or 1 or 5 with a probability of 0.5 each
  (`ends`). `ends-ce` has `top1_mode="cross_entropy"`, which is half of the cross-entropy and half of `last`.

The command of the report is

    python -m reproduce topk-loss --data-dir FOLDER

`--noises 0` has clear labels. The papers train ResNets and pretrained transformers on CIFAR-100 and ImageNet.
This experiment is much smaller, so that only the order of the losses can be compared with the papers, and not
the figures. Further departures:

- Training uses 5,000 numbers. The temperature, the learning rate and the step at which to stop are chosen for
  every loss, cross-entropy too, by the top-5 accuracy on another 5,000, whose labels are noisy in the same
  way. The test has 10,000 numbers with their true labels. lapsum also searches for a temperature and a rate
  and stops early; sparse-topk trains for 100 steps.
- The network is a perceptron with 128 hidden units, trained by Adam in batches of 100.
- The loss of sparse-topk has no minimum, because its label sums to 1 and not to 3: lowering all scores
  together always lowers the loss. A pretrained network tolerates that for 100 steps, but a network with
  random initial weights drifts and learns almost nothing. Therefore the mean of the scores is subtracted
  first, which does not change the mask.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import khot
from reproduce.harness import reporting, study, training
from reproduce.tasks import numbers

__all__ = [
    "EXPERIMENT",
    "GROUP",
    "KS",
    "LOSSES",
    "NAMES",
    "Args",
    "accuracies",
    "chosen",
    "confuse",
    "report",
    "run",
    "sparse",
    "trials",
]

KS = (1, 3, 5, 10)
CHOSEN_BY = 5  # the top-5 accuracy on the validation set chooses
GROUP = 5  # classes that the noise confuses: 00 to 04, 05 to 09, ...
Loss = Callable[[Tensor, Tensor], Tensor]


def _cross_entropy(tau: float) -> Loss:
    return lambda scores, label: F.cross_entropy(scores / tau, label)


def sparse(p: float) -> Callable[[float], Loss]:
    """A loss whose gradient in the centred scores is that of sparse-topk's loss: soft top-3 minus label."""

    def of(tau: float) -> Loss:
        def loss(scores: Tensor, label: Tensor) -> Tensor:
            gradient = khot.sparse_topk(scores, 3, tau=tau, p=p) - F.one_hot(label, scores.shape[-1])
            centred = scores - scores.mean(-1, keepdim=True)
            return (gradient.detach() * centred).sum(-1).mean()

        return loss

    return of


def _laplace(
    k: int | dict[int, float], top1_mode: Literal["topk", "cross_entropy"] = "topk"
) -> Callable[[float], Loss]:
    return lambda tau: khot.losses.TopKCrossEntropyLoss(k, tau=tau, cdf="laplace", top1_mode=top1_mode)


# The loss at a temperature
LOSSES: dict[str, Callable[[float], Loss]] = {
    "cross-entropy": _cross_entropy,
    "p=2": sparse(2),
    "p=4/3": sparse(4 / 3),
    "last": _laplace(5),
    "even": _laplace(dict.fromkeys(range(1, 6), 0.2)),
    "ends": _laplace({1: 0.5, 5: 0.5}),
    "ends-ce": _laplace({1: 0.5, 5: 0.5}, "cross_entropy"),
}
BASE = "cross-entropy"
PLAIN = "cross-entropy, tau = 1"
NAMES = {
    BASE: BASE,
    "p=2": "sparse top-3, p = 2",
    "p=4/3": "sparse top-3, p = 4/3",
    "last": "Lap-Top-k, [0, 0, 0, 0, 1]",
    "even": "Lap-Top-k, [.2, .2, .2, .2, .2]",
    "ends": "Lap-Top-k, [.5, 0, 0, 0, .5]",
    "ends-ce": "half Lap-Top-5, half cross-entropy",
}


@dataclass(frozen=True)
class Args(study.Args):
    """The losses, and the training."""

    methods: tuple[str, ...] = field(
        default=tuple(NAMES), metadata={"help": f"Losses, out of {', '.join(NAMES)}.", "selects": True}
    )
    noises: tuple[float, ...] = field(
        default=(0.6,),
        metadata={"help": "Probabilities that a label is drawn anew from its five.", "selects": True},
    )
    taus: tuple[float, ...] = field(
        default=(1.0, 2.0, 4.0, 8.0), metadata={"help": "Temperatures.", "selects": True}
    )
    lrs: tuple[float, ...] = field(
        default=(3e-4, 1e-3, 3e-3), metadata={"help": "Learning rates of Adam.", "selects": True}
    )
    count: int = field(
        default=5_000, metadata={"help": "Numbers in the training set, and in the validation set."}
    )
    test: int = field(default=10_000, metadata={"help": "Numbers in the test set."})
    batch: int = field(default=100, metadata={"help": "Numbers per step."})
    steps: int = field(default=1_500, metadata={"help": "Training steps."})
    hidden: int = field(default=128, metadata={"help": "Hidden units."})

    def __post_init__(self) -> None:
        super().__post_init__()
        study.check_choices("methods", self.methods, NAMES)
        if not all(0 <= noise <= 1 for noise in self.noises):
            raise study.ArgumentError(f"noises: {self.noises}: expected probabilities")


def trials(args: Args) -> list[study.Trial]:
    return [
        {"noise": noise, "method": method, "tau": tau, "lr": lr, "seed": seed}
        for seed in range(args.seeds)
        for noise in args.noises
        for method in args.methods
        for tau in args.taus
        for lr in args.lrs
    ]


def run(args: Args, trial: study.Trial, checkpoint: study.Checkpoint) -> Iterator[study.Row]:
    images, seed = training.images(args), int(trial["seed"])
    half = len(images.train_labels) // 2
    # training and validation numbers are composed of different halves of the training images
    parts = {
        "train": (images.train_images[:half], images.train_labels[:half], args.count, 3 * seed),
        "validation": (images.train_images[half:], images.train_labels[half:], args.count, 3 * seed + 1),
        "test": (images.test_images, images.test_labels, args.test, 3 * seed + 2),
    }
    drawn = {}
    for name, (x, label, count, own) in parts.items():
        pictures, value = numbers.draw(x, label, images.shape, numbers.pick((count,), 2, own, len(label)))
        if name != "test":
            value = confuse(value, float(trial["noise"]), 1_000 + own)  # not the stream that drew the numbers
        drawn[name] = pictures.flatten(1).to(args.device), value.to(args.device)

    loss = LOSSES[str(trial["method"])](float(trial["tau"]))
    model = training.mlp(2 * images.n, args.hidden, 100).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=float(trial["lr"]))
    x, label = drawn["train"]
    for step in training.steps(checkpoint, {"model": model, "optimizer": optimizer}, args.steps):
        batch = training.minibatches(args.count, args.batch, step, seed)
        value = loss(model(x[batch]), label[batch])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if (step + 1) % max(1, args.steps // 10) == 0:
            for part in ("validation", "test"):
                with torch.no_grad():
                    found = accuracies(model(drawn[part][0]), drawn[part][1])
                yield {"step": step + 1, "part": part, **found}


def confuse(label: Tensor, noise: float, seed: int) -> Tensor:
    """Labels that are drawn anew from their GROUP with probability ``noise``."""
    random = torch.Generator().manual_seed(seed)
    other = label - label % GROUP + torch.randint(GROUP, label.shape, generator=random)
    return torch.where(torch.rand(label.shape, generator=random) < noise, other, label)


def accuracies(scores: Tensor, label: Tensor) -> study.Row:
    """The share of labels among the k highest scores, for each k of KS."""
    above = (scores > scores.gather(-1, label[:, None])).sum(-1)
    return {f"top-{k}": (above < k).double().mean().item() for k in KS}


def report(args: Args, rows: list[study.Row], folder: Path) -> str:
    """The test accuracies at the temperature, learning rate and step that the validation set chooses."""
    noises = sorted({float(row["noise"]) for row in rows})
    found = {noise: chosen([row for row in rows if float(row["noise"]) == noise]) for noise in noises}
    _draw(found, folder / "accuracy.png")
    head = ["trained with", *(f"top-{k}, %" for k in KS), "tau, learning rate, step"]
    parts = []
    for noise, methods in found.items():
        lines = [
            [name, *(reporting.spread(values, 1) for values in at), "{:g}, {:g}, {:g}".format(*setting)]
            for name, (setting, at) in methods.items()
        ]
        parts += [
            f"A label is drawn anew with probability {noise:g}, the test has true labels:",
            reporting.table(head, lines).strip(),
        ]
        if BASE in methods:
            parts.append(_ahead(methods))
    return "\n\n".join(
        [
            *parts,
            "![Accuracy minus that of cross-entropy](accuracy.png)",
            "In sparse-topk's picture for CIFAR-100, the top-3 losses beat cross-entropy for several k. "
            "In lapsum's Table 1, top-1 and top-5 accuracy on CIFAR-100 are 57.2 and 86.8 % for "
            "[0, 0, 0, 0, 1], and top-1 accuracy is 63.2 % for [.2, .2, .2, .2, .2].",
        ]
    )


Setting = tuple[float, float, float]  # temperature, learning rate, step


def chosen(rows: list[study.Row]) -> dict[str, tuple[Setting, list[list[float]]]]:
    """For each loss the setting that the validation set chooses, and with it the test accuracies in %, for
    each k of KS those of all seeds."""
    found = {}
    plain = [row for row in rows if row["method"] == BASE and float(row["tau"]) == 1]
    groups = {PLAIN: plain} | {name: reporting.where(rows, method=method) for method, name in NAMES.items()}
    for name, mine in groups.items():
        parts: dict[str, dict[Setting, list[study.Row]]] = {"validation": {}, "test": {}}
        for row in mine:
            setting = float(row["tau"]), float(row["lr"]), float(row["step"])
            parts[str(row["part"])].setdefault(setting, []).append(row)
        tried = parts["validation"]
        if not tried:
            continue
        # a setting that has not been run with all seeds yet is no candidate
        seeds = max(len(own) for own in tried.values())
        best = max(
            (setting for setting, own in tried.items() if len(own) == seeds),
            key=lambda setting: statistics.fmean(reporting.column(tried[setting], f"top-{CHOSEN_BY}")),
        )
        tested = parts["test"][best]
        found[name] = best, [[100 * x for x in reporting.column(tested, f"top-{k}")] for k in KS]
    return found


def _ahead(methods: dict[str, tuple[Setting, list[list[float]]]]) -> str:
    """Which losses are ahead of cross-entropy, for each k of KS."""
    means = {name: [statistics.fmean(values) for values in at] for name, (_, at) in methods.items()}
    base = means.pop(BASE)
    lines = []
    for i, k in enumerate(KS):
        better = sorted((n for n in means if means[n][i] > base[i]), key=lambda n: -means[n][i])
        text = ", ".join(f"{name} ({means[name][i] - base[i]:+.1f})" for name in better)
        lines.append(f"- top-{k}: {text or 'none'}")
    return "Ahead of cross-entropy, by points:\n\n" + "\n".join(lines)


def _draw(found: dict[float, dict[str, tuple[Setting, list[list[float]]]]], path: Path) -> None:
    """Plot the accuracy of each loss minus that of cross-entropy at its best tau; a panel for each noise."""
    figure, panels = reporting.figure(len(found), width=7.5 * len(found))
    for axes, (noise, methods) in zip(panels, found.items(), strict=True):
        others = dict(methods)
        _, zero = others.pop(BASE, ((), [[0.0]] * len(KS)))
        base = [statistics.fmean(values) for values in zero]
        for i, (color, (name, (_, at))) in enumerate(zip(reporting.COLORS, others.items(), strict=False)):
            ahead = [statistics.fmean(values) - other for values, other in zip(at, base, strict=True)]
            error = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in at]
            place = [x + 0.1 * (i - (len(others) - 1) / 2) for x in range(len(KS))]
            axes.errorbar(place, ahead, error, fmt="o", color=color, label=name)
        axes.axhline(0, color=reporting.GREY, linewidth=1)
        axes.set_xticks(range(len(KS)), [f"top-{k}" for k in KS])
        axes.set_title(f"labels drawn anew with probability {noise:g}", fontsize=12)
        axes.set_ylabel("test accuracy minus that of cross-entropy, points")
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="sparse-topk, Figure 6; lapsum, Table 1",
    needs="MNIST",
    takes="30 min of one core",
    Args=Args,
    smoke={
        "seeds": 1,
        "noises": (0.0,),
        "taus": (1.0,),
        "lrs": (3e-3,),
        "count": 1_000,
        "test": 1_000,
        "steps": 300,
    },
    trials=trials,
    run=run,
    report=report,
)
