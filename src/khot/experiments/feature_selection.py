"""Feature selection: which k pixels tell the digits, or the image (sigmoid-topk, Table 3)

A vector of n logits and a network are trained together. The network sees image × x, with x a k-hot sample
whose parameters the logits are, one a pixel; six methods of sampling, and of its gradient, are compared.
After the training the test loss is taken with masks that the same method draws, and with the k pixels of
largest logits.

The paper does not say which loss its "test loss" is, so both are trained for: *reconstruction* is the binary
cross-entropy of the whole image, mean over pixels, of a network 784-512-256-512-784; *classification* is the
cross-entropy of the label, of a network 784-512-256-10. Both networks are those of its Appendix D, with ReLU;
Adam and the network's learning rate, 0.001, too, and τ = 1.

Where it departs from the paper, which gives neither batch size, nor number of steps, nor initial logits:

- The logits start at 0, and learn faster than the network, so that the choice is made within few steps.
- Both rates fall to 0 along a cosine over the second half of the steps.
- A minibatch shares few masks, each seen by some of its images: what SIMPLE and the sequential softmax cost
  is their number.
- Every method gives k-hot samples forward, Xie & Ermon included, and a relaxed or expected sample backward.
- straight_through and second_order draw by the pivotal design, whose inclusion probabilities are exact.
- NCPSS is written anew from its description in the paper, with three rounds of iterative Poisson sampling.
- There are three seeds, and not five.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot.experiments import methods, study
from khot.experiments.study import ArgumentError, Checkpoint, Row, Trial
from khot.topk import topk_mask

__all__ = ["EXPERIMENT", "PAPER", "TASKS", "Args"]

TASKS = ("reconstruction", "classification")

# Table 3, MNIST and Fashion-MNIST: mean and deviation over five seeds.
PAPER = {
    "sequential_softmax": {"mnist": (0.113, 2.44e-3), "fashion-mnist": (0.300, 2.39e-3)},
    "ncpss": {"mnist": (0.134, 2.47e-3), "fashion-mnist": (0.317, 8.13e-3)},
    "simple": {"mnist": (0.099, 9.03e-4), "fashion-mnist": (0.287, 4.08e-4)},
    "straight_through": {"mnist": (0.102, 1.35e-3), "fashion-mnist": (0.291, 1.20e-3)},
    "second_order": {"mnist": (0.098, 5.49e-4), "fashion-mnist": (0.285, 2.86e-4)},
    "gumbel": {"mnist": (0.096, 5.06e-4), "fashion-mnist": (0.286, 4.89e-4)},
}

HIDDEN = (512, 256)
TEST_MASKS = 100


@dataclass(frozen=True)
class Args(study.Args):
    k: int = field(default=50, metadata={"help": "How many pixels to choose."})
    reconstruction_steps: int = field(default=6_000, metadata={"help": "Training steps, for the image."})
    classification_steps: int = field(default=15_000, metadata={"help": "Training steps, for the label."})
    batch: int = field(default=64, metadata={"help": "Images a step."})
    masks: int = field(default=16, metadata={"help": "Masks a step, each for batch/masks of the images."})
    lr: float = field(default=1e-3, metadata={"help": "Learning rate of the network."})
    logits_lr: float = field(default=0.05, metadata={"help": "Learning rate of the logits."})
    points: int = field(default=12, metadata={"help": "Points of the curve of test losses."})
    tasks: tuple[str, ...] = field(
        default=TASKS, metadata={"help": "What the network is to tell.", "selects": True}
    )
    methods: tuple[str, ...] = field(
        default=tuple(methods.METHODS), metadata={"help": "Which methods.", "selects": True}
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
    n = study.images(args).n
    if args.k > n:
        raise ArgumentError(f"k = {args.k}: expected at most {n}, the number of pixels")
    return [
        {"task": task, "method": method, "seed": seed}
        for seed in range(args.seeds)
        for task in args.tasks
        for method in args.methods
    ]


class Selection(nn.Module):
    """Logits of the pixels, and the network behind the mask."""

    def __init__(self, n: int, task: str) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(n))
        outputs = (HIDDEN[0], n) if task == "reconstruction" else (10,)
        self.network = study.mlp(n, *HIDDEN, *outputs)

    def losses(self, images: Tensor, labels: Tensor, masks: Tensor) -> Tensor:
        """The loss of each image, mask after mask: the first images behind the first mask, and so on."""
        seen = (images.view(len(masks), -1, images.shape[-1]) * masks.unsqueeze(1)).flatten(0, 1)
        told = self.network(seen)
        if told.shape == images.shape:
            return F.binary_cross_entropy_with_logits(told, images, reduction="none").mean(-1)
        return F.cross_entropy(told, labels, reduction="none")


def run(args: Args, trial: Trial, checkpoint: Checkpoint) -> Iterator[Row]:
    found = study.images(args)
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
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: study.annealed(step / steps))
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}

    def sample(count: int) -> Tensor:
        return methods.draw(method, model.logits.expand(count, -1), args.k)

    @torch.no_grad()
    def test_masks() -> Tensor:
        """From the same random numbers each time, so that the curve moves where the model does."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return sample(TEST_MASKS)

    @torch.no_grad()
    def test_loss(masks: Tensor) -> float:
        count = len(found.test_labels) // len(masks) * len(masks)
        images = found.test_images[:count].to(args.device)
        return model.losses(images, found.test_labels[:count].to(args.device), masks).mean().item()

    for step in study.steps(checkpoint, state, steps):
        batch = study.minibatches(len(labels), args.batch, step, seed).to(args.device)
        loss = model.losses(images[batch], labels[batch], sample(args.masks)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, steps // args.points) == 0:
            yield {"step": step + 1, "train_loss": loss.item(), "curve": test_loss(test_masks())}

    masks = test_masks()
    chosen = topk_mask(model.logits.detach(), args.k)
    yield {
        "test_loss": test_loss(masks),
        "top_k_loss": test_loss(chosen[None]),
        "size": masks.sum(-1).mean().item(),
        # how much of a sample lies on the k largest logits: 1 where the choice is made
        "settled": (masks * chosen).sum(-1).mean().item() / args.k,
        "chosen": " ".join(str(pixel) for pixel in chosen.nonzero().squeeze(1).tolist()),
    }


def report(args: Args, rows: list[Row], folder: Path) -> str:
    parts = []
    for task in TASKS:
        of_task = study.where(rows, task=task)
        if not of_task:
            continue
        lines, means = [], {}
        for method, label in methods.LABELS.items():
            found = study.where(of_task, method=method)
            losses = study.column(found, "test_loss")
            if not losses:
                continue
            means[label] = sum(losses) / len(losses)
            paper = PAPER[method].get(args.setting()["dataset"])
            lines.append(
                (
                    label,
                    *study.compare(paper, losses),
                    study.spread(study.column(found, "top_k_loss")),
                    study.spread([100 * share for share in study.column(found, "settled")], 0),
                    study.settling(found, "curve"),
                )
            )
        head = ("method", "paper", "here", "difference", "k largest logits", "settled, %", "last change")
        order = " < ".join(sorted(means, key=means.__getitem__))
        parts.append(f"### {task.capitalize()}\n\n{study.table(head, lines)}\nFrom best to worst: {order}.")
    draw_curves(rows, folder / "curves.png")
    draw_pixels(args, rows, folder / "pixels.png")
    return (
        "\n\n".join(parts)
        + f"""

The test loss, with masks drawn by the method, mean and deviation over seeds; the difference to the paper is
bold where it is more than the paper's deviation. *k largest logits*: the same, with those pixels and no
draws. *settled*: how much of a sample lies on them, 100 when the choice is made. *last change*: of the test
loss, over the last 1/{args.points} of the steps: {args.reconstruction_steps} of reconstruction, and
{args.classification_steps} of classification.

![test losses in the course of the training](curves.png)

![the pixels with the largest logits, by method](pixels.png)
"""
    )


def draw_curves(rows: list[Row], path: Path) -> None:
    figure, plots = study.figure(2, width=12)
    for plot, task in zip(plots, TASKS, strict=True):
        of_task = study.where(rows, task=task)
        for color, (method, label) in zip(study.COLORS, methods.LABELS.items(), strict=False):
            steps, losses = study.curve(study.where(of_task, method=method), "curve")
            if steps:
                plot.plot(steps, losses, color=color, linewidth=2, label=label)
        plot.set_title(f"Feature selection: {task}", fontsize=13)
        plot.set_xlabel("step")
        plot.set_ylabel("test loss, mean over seeds")
        study.log_axis(plot)
        if plot.lines:
            plot.legend(frameon=False)
    figure.savefig(path, dpi=120)


def draw_pixels(args: Args, rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    found = study.images(args)
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    plots = figure.subplots(len(TASKS), len(methods.LABELS))
    for line, task in zip(plots, TASKS, strict=True):
        for plot, (method, label) in zip(line, methods.LABELS.items(), strict=True):
            chosen = [
                str(row["chosen"]) for row in study.where(rows, task=task, method=method) if "chosen" in row
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
