"""Losses for top-k accuracy, compared with cross-entropy (sparse-topk, Figure 6; lapsum, Table 1)

There are 100 classes, and the right one should be among the k highest scores. The classes are the numbers
from 00 to 99, each a picture of two digits, and the network is a perceptron. The losses are:

- `cross-entropy`.
- `p=2`, `p=4/3`: the top-3 loss of sparse-topk. Its gradient in the scores is the sparse top-3 mask minus the
  one-hot label.
- `last`, `even`, `ends`: `khot.losses.TopKCrossEntropyLoss` with the Laplace CDF, as in lapsum. k is 5
  (`last`), one of 1 to 5 with a probability of 0.2 each (`even`), or 1 or 5 with a probability of 0.5 each
  (`ends`).

The command of the report is

    khot reproduce topk-loss --data-dir FOLDER

The papers train ResNets and pretrained transformers on CIFAR-100 and ImageNet. This experiment is much
smaller, so that only the order of the losses can be compared with the papers, and not the figures. Further
departures:

- Training uses 5,000 numbers. The learning rate and the step at which to stop are chosen by the top-5
  accuracy on another 5,000. lapsum also searches for a rate and stops early; sparse-topk trains for 100
  steps.
- The network is a perceptron with 128 hidden units, trained by Adam in batches of 100.
- The loss of sparse-topk has no minimum, because its label sums to 1 and not to 3: lowering all scores
  together always lowers the loss. A pretrained network tolerates that for 100 steps, but a network with
  random initial weights drifts and learns almost nothing. Therefore the mean of the scores is subtracted
  first, which does not change the mask.
- The temperature is 1. lapsum chose another one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import khot
from khot.experiments.harness import reporting, study, training
from khot.experiments.tasks import numbers

__all__ = ["EXPERIMENT", "KS", "NAMES", "Args", "accuracies", "report", "run", "sparse", "trials"]

KS = (1, 3, 5, 10)
CHOSEN_BY = 5  # the top-5 accuracy on the validation set chooses


def sparse(p: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss whose gradient in the centred scores is that of sparse-topk's loss: soft top-3 minus label."""

    def loss(scores: Tensor, label: Tensor) -> Tensor:
        gradient = khot.sparse_topk(scores, 3, p=p) - F.one_hot(label, scores.shape[-1])
        centred = scores - scores.mean(-1, keepdim=True)
        return (gradient.detach() * centred).sum(-1).mean()

    return loss


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "p=2": sparse(2),
    "p=4/3": sparse(4 / 3),
    "last": khot.losses.TopKCrossEntropyLoss(5, cdf="laplace"),
    "even": khot.losses.TopKCrossEntropyLoss(dict.fromkeys(range(1, 6), 0.2), cdf="laplace"),
    "ends": khot.losses.TopKCrossEntropyLoss({1: 0.5, 5: 0.5}, cdf="laplace"),
}
NAMES = {
    "cross-entropy": "cross-entropy",
    "p=2": "sparse top-3, p = 2",
    "p=4/3": "sparse top-3, p = 4/3",
    "last": "Lap-Top-k, [0, 0, 0, 0, 1]",
    "even": "Lap-Top-k, [.2, .2, .2, .2, .2]",
    "ends": "Lap-Top-k, [.5, 0, 0, 0, .5]",
}


@dataclass(frozen=True)
class Args(study.Args):
    """The losses, and the training."""

    methods: tuple[str, ...] = field(
        default=tuple(NAMES), metadata={"help": f"Losses, out of {', '.join(NAMES)}.", "selects": True}
    )
    lrs: tuple[float, ...] = field(
        default=(1e-4, 3e-4, 1e-3, 3e-3), metadata={"help": "Learning rates of Adam.", "selects": True}
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


def trials(args: Args) -> list[study.Trial]:
    return [
        {"method": method, "lr": lr, "seed": seed}
        for seed in range(args.seeds)
        for method in args.methods
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
        drawn[name] = pictures.flatten(1).to(args.device), value.to(args.device)

    loss = LOSSES[str(trial["method"])]
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


def accuracies(scores: Tensor, label: Tensor) -> study.Row:
    """The share of labels among the k highest scores, for each k of KS."""
    above = (scores > scores.gather(-1, label[:, None])).sum(-1)
    return {f"top-{k}": (above < k).double().mean().item() for k in KS}


def report(args: Args, rows: list[study.Row], folder: Path) -> str:
    """The test accuracies at the learning rate and step that the validation set chooses."""
    chosen, lines = {}, []
    for method, label in NAMES.items():
        mine = [row for row in rows if row["method"] == method]
        if not mine:
            continue
        settings = {(row["lr"], row["step"]) for row in mine}

        def at(
            part: str, k: int, setting: tuple[object, object], mine: list[study.Row] = mine
        ) -> list[float]:
            return [
                100 * float(row[f"top-{k}"])
                for row in mine
                if row["part"] == part and (row["lr"], row["step"]) == setting
            ]

        best = max(settings, key=lambda s: statistics.fmean(at("validation", CHOSEN_BY, s)))
        chosen[method] = [at("test", k, best) for k in KS]
        lines.append([label, *(reporting.spread(a, 1) for a in chosen[method]), f"{best[0]:g}, {best[1]}"])
    _draw(chosen, folder / "accuracy.png")
    head = ["trained with", *(f"top-{k}, %" for k in KS), "learning rate, step"]
    return (
        reporting.table(head, lines) + "\n![Accuracy minus that of cross-entropy](accuracy.png)\n\n"
        "In sparse-topk's picture for CIFAR-100, the top-3 losses beat cross-entropy for several k. "
        "In lapsum's Table 1, top-1 and top-5 accuracy on CIFAR-100 are 57.2 and 86.8 % for [0, 0, 0, 0, 1], "
        "and top-1 accuracy is 63.2 % for [.2, .2, .2, .2, .2]."
    )


def _draw(chosen: dict[str, list[list[float]]], path: Path) -> None:
    """Plot the accuracy of each loss minus that of cross-entropy."""
    figure, (axes,) = reporting.figure()
    base = [statistics.fmean(values) for values in chosen.get("cross-entropy", [[0.0]] * len(KS))]
    for i, (color, (method, found)) in enumerate(zip(reporting.COLORS, chosen.items(), strict=False)):
        ahead = [statistics.fmean(values) - zero for values, zero in zip(found, base, strict=True)]
        error = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in found]
        place = [x + 0.12 * (i - (len(chosen) - 1) / 2) for x in range(len(KS))]
        axes.errorbar(place, ahead, error, fmt="o", color=color, label=NAMES[method])
    axes.axhline(0, color=reporting.GREY, linewidth=1)
    axes.set_xticks(range(len(KS)), [f"top-{k}" for k in KS])
    axes.set_ylabel("test accuracy minus that of cross-entropy, points")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="sparse-topk, Figure 6; lapsum, Table 1",
    needs="MNIST",
    takes="7 min of one core",
    Args=Args,
    smoke={"seeds": 1, "lrs": (3e-3,), "count": 1_000, "test": 1_000, "steps": 300},
    trials=trials,
    run=run,
    report=report,
)
