"""Feature selection: choosing the k pixels that predict the image or the digit (sigmoid-topk, Table 3)

A vector of n logits, one per pixel, and a network are trained together. The network sees image × x, where x
is a k-hot sample whose parameters are the logits. The experiment compares six methods of sampling, each with
its gradient. After the training, the test loss is computed with masks that the same method draws, and with
the k pixels of largest logits.

The paper does not say which loss its "test loss" is, so the experiment has two tasks. *Reconstruction* has
the binary cross-entropy of the whole image, averaged over the pixels, with a network 784-512-256-512-784.
*Classification* has the cross-entropy of the label, with a network 784-512-256-10. As in the paper's Appendix
D, both networks have ReLU and are trained by Adam with a learning rate of 0.001, and τ is 1.

Departures from the paper, which gives neither batch size nor number of steps nor initial logits:

- The logits start at 0 and learn faster than the network, so that the choice is made within few steps.
- Both learning rates fall to 0 along a cosine over the second half of the steps.
- A minibatch has only a few masks, each for a part of its images, because the cost of SIMPLE and of the
  sequential softmax is proportional to the number of masks.
- Every method, including Xie & Ermon, has k-hot samples in the forward pass, and a relaxed or expected sample
  in the backward pass.
- `straight_through` and `second_order` draw by the pivotal design, whose inclusion probabilities are exact.
- NCPSS is written anew from its description in the paper, with three rounds of iterative Poisson sampling.
- There are three seeds instead of five.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import khot
from khot.experiments.harness import reporting, study, training
from khot.experiments.harness.study import ArgumentError, Checkpoint, Row, Trial
from khot.experiments.tasks import methods
from khot.experiments.tasks.selection import TASKS, TEST_MASKS, Selection

__all__ = ["EXPERIMENT", "PAPER", "Args", "report", "run", "trials"]

# Table 3, MNIST and Fashion-MNIST: mean and deviation over five seeds.
PAPER = {
    "sequential_softmax": {"mnist": (0.113, 2.44e-3), "fashion-mnist": (0.300, 2.39e-3)},
    "ncpss": {"mnist": (0.134, 2.47e-3), "fashion-mnist": (0.317, 8.13e-3)},
    "simple": {"mnist": (0.099, 9.03e-4), "fashion-mnist": (0.287, 4.08e-4)},
    "straight_through": {"mnist": (0.102, 1.35e-3), "fashion-mnist": (0.291, 1.20e-3)},
    "second_order": {"mnist": (0.098, 5.49e-4), "fashion-mnist": (0.285, 2.86e-4)},
    "gumbel": {"mnist": (0.096, 5.06e-4), "fashion-mnist": (0.286, 4.89e-4)},
}


@dataclass(frozen=True)
class Args(study.Args):
    """What is selected, by which methods, and the training."""

    k: int = field(default=50, metadata={"help": "Number of pixels to choose."})
    reconstruction_steps: int = field(default=6_000, metadata={"help": "Training steps for reconstruction."})
    classification_steps: int = field(default=15_000, metadata={"help": "Training steps for classification."})
    batch: int = field(default=64, metadata={"help": "Images per step."})
    masks: int = field(default=16, metadata={"help": "Masks per step, each for batch/masks images."})
    lr: float = field(default=1e-3, metadata={"help": "Learning rate of the network."})
    logits_lr: float = field(default=0.05, metadata={"help": "Learning rate of the logits."})
    points: int = field(default=12, metadata={"help": "Number of points of the curve of test losses."})
    tasks: tuple[str, ...] = field(
        default=TASKS, metadata={"help": "What the network predicts.", "selects": True}
    )
    methods: tuple[str, ...] = field(
        default=tuple(methods.METHODS), metadata={"help": "Methods to compare.", "selects": True}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        study.check_choices("methods", self.methods, methods.METHODS)
        study.check_choices("tasks", self.tasks, TASKS)
        if self.batch % self.masks:
            raise ArgumentError(f"masks = {self.masks}: expected a divisor of batch = {self.batch}")

    def steps(self, task: str) -> int:
        return self.reconstruction_steps if task == "reconstruction" else self.classification_steps


def trials(args: Args) -> list[Trial]:
    n = training.images(args).n
    if args.k > n:
        raise ArgumentError(f"k = {args.k}: expected at most {n}, the number of pixels")
    return [
        {"task": task, "method": method, "seed": seed}
        for seed in range(args.seeds)
        for task in args.tasks
        for method in args.methods
    ]


def run(args: Args, trial: Trial, checkpoint: Checkpoint) -> Iterator[Row]:
    found = training.images(args)
    images, labels = found.train_images.to(args.device), found.train_labels.to(args.device)
    task, method, seed = str(trial["task"]), str(trial["method"]), int(trial["seed"])
    steps = args.steps(task)
    model = Selection(found.n, task).to(args.device)
    optimizer = torch.optim.Adam(
        [
            {"params": model.network.parameters(), "lr": args.lr},
            {"params": [model.logits], "lr": args.logits_lr},
        ],
        fused=True,
    )
    schedule = training.lr_schedule(optimizer, training.cosine_over_last_half, steps)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}

    def sample(count: int) -> Tensor:
        return methods.draw(method, model.logits.expand(count, -1), args.k)

    @torch.no_grad()
    def test_masks() -> Tensor:
        """Masks from the same random numbers in each call: the curve only shows changes of the model."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return sample(TEST_MASKS)

    @torch.no_grad()
    def test_loss(masks: Tensor) -> float:
        count = len(found.test_labels) // len(masks) * len(masks)
        images = found.test_images[:count].to(args.device)
        return model.losses(images, found.test_labels[:count].to(args.device), masks).mean().item()

    every, latest = max(1, steps // args.points), 0.0
    for step in training.steps(checkpoint, state, steps):
        batch = training.minibatches(len(labels), args.batch, step, seed).to(args.device)
        loss = model.losses(images[batch], labels[batch], sample(args.masks)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % every == 0:
            latest = test_loss(test_masks())
            yield {"step": step + 1, "train_loss": loss.item(), "curve": latest}

    masks = test_masks()
    chosen = khot.topk_mask(model.logits.detach(), args.k)
    yield {
        # if the curve has a point at the last step, that point is the test loss
        "test_loss": latest if steps % every == 0 else test_loss(masks),
        "top_k_loss": test_loss(chosen[None]),
        "size": masks.sum(-1).mean().item(),
        # the share of a sample that lies on the k largest logits, which is 1 when the choice is made
        "settled": (masks * chosen).sum(-1).mean().item() / args.k,
        "chosen": " ".join(str(pixel) for pixel in chosen.nonzero().squeeze(1).tolist()),
    }


def report(args: Args, rows: list[Row], folder: Path) -> str:
    parts = []
    for task in TASKS:
        of_task = reporting.where(rows, task=task)
        if not of_task:
            continue
        lines, means = [], {}
        for method, label in methods.LABELS.items():
            found = reporting.where(of_task, method=method)
            losses = reporting.column(found, "test_loss")
            if not losses:
                continue
            means[label] = sum(losses) / len(losses)
            paper = PAPER[method].get(args.setting()["dataset"])
            lines.append(
                (
                    label,
                    *reporting.compare(paper, losses),
                    reporting.spread(reporting.column(found, "top_k_loss")),
                    reporting.spread([100 * share for share in reporting.column(found, "settled")], 0),
                    reporting.last_change(found, "curve"),
                )
            )
        head = ("method", "paper", "here", "difference", "k largest logits", "settled, %", "last change")
        order = " < ".join(sorted(means, key=means.__getitem__))
        parts.append(
            f"### {task.capitalize()}\n\n{reporting.table(head, lines)}\nFrom best to worst: {order}."
        )
    _draw_curves(rows, folder / "curves.png")
    _draw_pixels(args, rows, folder / "pixels.png")
    return (
        "\n\n".join(parts)
        + f"""

The figures are mean and deviation over the seeds of the test loss, with masks drawn by the method. A
difference from the paper is bold if it is larger than the paper's deviation. *k largest logits*: the test
loss with those pixels, without sampling. *settled*: the share of a sample that lies on those pixels, which is
100 when the choice is made. *last change*: the change of the test loss over the last 1/{args.points} of the
steps. There are {args.reconstruction_steps:,} steps of reconstruction and {args.classification_steps:,} of
classification.

![Test losses during the training](curves.png)

![The pixels with the largest logits, by method](pixels.png)
"""
    )


def _draw_curves(rows: list[Row], path: Path) -> None:
    figure, plots = reporting.figure(2, width=12)
    for plot, task in zip(plots, TASKS, strict=True):
        of_task = reporting.where(rows, task=task)
        for color, (method, label) in zip(reporting.COLORS, methods.LABELS.items(), strict=False):
            steps, losses = reporting.curve(reporting.where(of_task, method=method), "curve")
            if steps:
                plot.plot(steps, losses, color=color, linewidth=2, label=label)
        plot.set_title(f"Feature selection: {task}", fontsize=13)
        plot.set_xlabel("step")
        plot.set_ylabel("test loss, mean over seeds")
        reporting.log_axis(plot)
        if plot.lines:
            plot.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _draw_pixels(args: Args, rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    found = training.images(args)
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    plots = figure.subplots(len(TASKS), len(methods.LABELS))
    for line, task in zip(plots, TASKS, strict=True):
        for plot, (method, label) in zip(line, methods.LABELS.items(), strict=True):
            chosen = [
                str(row["chosen"])
                for row in reporting.where(rows, task=task, method=method)
                if "chosen" in row
            ]
            counts = torch.zeros(found.n)
            for pixels in chosen:
                counts[torch.tensor([int(pixel) for pixel in pixels.split()])] += 1 / len(chosen)
            plot.imshow(counts.view(found.shape).numpy(), cmap="gray_r", vmin=0, vmax=1)
            plot.set_xticks([])
            plot.set_yticks([])
            if task == TASKS[0]:
                plot.set_title(label, fontsize=11)
        line[0].set_ylabel(task)
    figure.suptitle(f"The {args.k} pixels with the largest logits: share of the seeds", fontsize=13)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="sigmoid-topk, Table 3",
    needs="MNIST",
    takes="85 min of one core",
    Args=Args,
    smoke={"k": 8, "reconstruction_steps": 20, "classification_steps": 20, "points": 2, "seeds": 1},
    trials=trials,
    run=run,
    report=report,
)
