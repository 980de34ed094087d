"""Feature selection: choosing the k pixels that predict the image (sigmoid-topk, Table 3)

A vector of n logits, one per pixel, and a network are trained together. The network sees image × x, where x
is a k-hot sample whose parameters are the logits. It predicts the whole image; the loss is the binary
cross-entropy, averaged over the pixels. The experiment compares six methods of sampling, each with its
gradient. The network is 784-512-256-784 with ReLU, the optimiser of the network and of the logits is Adam
with a learning rate of 0.001, and τ is 1. It learns from 50,000 images. The test loss is that of the k pixels
of largest logits; that of masks that the method draws is given beside it.

The paper gives neither batch size nor number of steps nor initial logits, and does not say which loss its
"test loss" is, nor which pixels it is computed with. These are ours: batches of 128 with one mask each,
50,000 steps, logits from N(0, 1), and the loss above, with which the paper's figures can be reached.
Departures from the paper:

- Every method, including Xie & Ermon, has k-hot samples in the forward pass, and a relaxed or expected sample
  in the backward pass.
- The paper does not name the design of `straight_through` and `second_order`. Here it is Pareto sampling
  without adjustment, whose samples are less random than the probabilities say.
- NCPSS is written anew from its description in the paper, with seven rounds of iterative Poisson sampling;
  samples whose size is not k are drawn again.
- There are three seeds instead of five. Xie & Ermon is also run at τ = ½, the default of code that two of the
  paper's authors published for an earlier paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import khot
from reproduce.harness import reporting, study, training
from reproduce.harness.study import ArgumentError, Checkpoint, Row, Trial
from reproduce.tasks import methods
from reproduce.tasks.selection import TEST_MASKS, Selection

__all__ = ["EXPERIMENT", "PAPER", "Args", "report", "run", "trials"]

TRAIN_IMAGES = 50_000

# Table 3, MNIST and Fashion-MNIST: mean and deviation over five seeds.
PAPER = {
    "sequential_softmax_half": {"mnist": (0.113, 2.44e-3), "fashion-mnist": (0.300, 2.39e-3)},
    "sequential_softmax": {"mnist": (0.113, 2.44e-3), "fashion-mnist": (0.300, 2.39e-3)},
    "ncpss": {"mnist": (0.134, 2.47e-3), "fashion-mnist": (0.317, 8.13e-3)},
    "simple": {"mnist": (0.099, 9.03e-4), "fashion-mnist": (0.287, 4.08e-4)},
    "straight_through": {"mnist": (0.102, 1.35e-3), "fashion-mnist": (0.291, 1.20e-3)},
    "second_order": {"mnist": (0.098, 5.49e-4), "fashion-mnist": (0.285, 2.86e-4)},
    "gumbel": {"mnist": (0.096, 5.06e-4), "fashion-mnist": (0.286, 4.89e-4)},
}


@dataclass(frozen=True)
class Args(study.Args):
    """How many pixels are selected, by which methods, and the training."""

    k: int = field(default=50, metadata={"help": "Number of pixels to choose."})
    steps: int = field(default=50_000, metadata={"help": "Training steps."})
    batch: int = field(default=128, metadata={"help": "Images per step."})
    lr: float = field(default=1e-3, metadata={"help": "Learning rate."})
    points: int = field(default=12, metadata={"help": "Number of points of the curve of test losses."})
    methods: tuple[str, ...] = field(
        default=tuple(methods.METHODS), metadata={"help": "Methods to compare.", "selects": True}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        study.check_choices("methods", self.methods, methods.METHODS)


def trials(args: Args) -> list[Trial]:
    n = training.images(args).n
    if args.k > n:
        raise ArgumentError(f"k = {args.k}: expected at most {n}, the number of pixels")
    return [{"method": method, "seed": seed} for seed in range(args.seeds) for method in args.methods]


def run(args: Args, trial: Trial, checkpoint: Checkpoint) -> Iterator[Row]:
    found = training.images(args)
    images = found.train_images[:TRAIN_IMAGES].to(args.device)
    method, seed = str(trial["method"]), int(trial["seed"])
    model = Selection(found.n, found.n).to(args.device)
    torch.nn.init.normal_(model.logits)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    state = {"model": model, "optimizer": optimizer}

    def loss_of(images: Tensor, masks: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(images, masks), images)

    def sample(count: int) -> Tensor:
        return methods.draw(method, model.logits.expand(count, -1), args.k)

    @torch.no_grad()
    def test_loss(masks: Tensor) -> float:
        count = len(found.test_images) // len(masks) * len(masks)
        return loss_of(found.test_images[:count].to(args.device), masks).item()

    def largest() -> Tensor:
        return khot.topk_mask(model.logits.detach(), args.k)

    for step in training.steps(checkpoint, state, args.steps):
        batch = training.minibatches(len(images), args.batch, step, seed).to(args.device)
        loss = loss_of(images[batch], sample(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % max(1, args.steps // args.points) == 0:
            yield {"step": step + 1, "train_loss": loss.item(), "curve": test_loss(largest()[None])}

    with torch.no_grad():
        masks = sample(TEST_MASKS)
    chosen = largest()
    yield {
        "test_loss": test_loss(chosen[None]),
        "sample_loss": test_loss(masks),
        "size": masks.sum(-1).mean().item(),
        # the share of a sample that lies on the k largest logits, which is 1 when the choice is made
        "settled": (masks * chosen).sum(-1).mean().item() / args.k,
        "chosen": " ".join(str(pixel) for pixel in chosen.nonzero().squeeze(1).tolist()),
    }


def report(args: Args, rows: list[Row], folder: Path) -> str:
    lines, means = [], {}
    for method, label in methods.LABELS.items():
        found = reporting.where(rows, method=method)
        losses = reporting.column(found, "test_loss")
        if not losses:
            continue
        means[label] = sum(losses) / len(losses)
        paper = PAPER[method].get(args.setting()["dataset"])
        lines.append(
            (
                label,
                *reporting.compare(paper, losses, 4),
                reporting.spread(reporting.column(found, "sample_loss"), 4),
                reporting.spread([100 * share for share in reporting.column(found, "settled")], 0),
                reporting.last_change(found, "curve"),
            )
        )
    head = ("method", "paper", "here", "difference", "of samples", "settled, %", "last change")
    order = " < ".join(sorted(means, key=means.__getitem__))
    _draw_curves(rows, folder / "curves.png")
    _draw_pixels(args, rows, folder / "pixels.png")
    return f"""{reporting.table(head, lines)}
From best to worst: {order}.

The figures are mean and deviation over the seeds of the test loss, with the k pixels of largest logits. A
difference from the paper is bold if it is larger than the paper's deviation. *of samples*: the test loss with
masks drawn by the method. *settled*: the share of a sample that lies on the k pixels, which is 100 when the
choice is made. *last change*: the change of the test loss over the last 1/{args.points} of the
{args.steps:,} steps.

![Test losses during the training](curves.png)

![The pixels with the largest logits, by method](pixels.png)
"""


def _draw_curves(rows: list[Row], path: Path) -> None:
    figure, (plot,) = reporting.figure()
    for color, (method, label) in zip(reporting.COLORS, methods.LABELS.items(), strict=False):
        steps, losses = reporting.curve(reporting.where(rows, method=method), "curve")
        if steps:
            plot.plot(steps, losses, color=color, linewidth=2, label=label)
    plot.set_title("Feature selection", fontsize=13)
    plot.set_xlabel("step")
    plot.set_ylabel("test loss, mean over seeds")
    reporting.log_axis(plot)
    if plot.lines:
        figure.legend(frameon=False, fontsize=9, loc="outside right center")
    figure.savefig(path, dpi=120)


def _draw_pixels(args: Args, rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    found = training.images(args)
    figure = Figure(figsize=(12, 2.6), layout="constrained")
    for plot, (method, label) in zip(
        figure.subplots(1, len(methods.LABELS)), methods.LABELS.items(), strict=True
    ):
        chosen = [str(row["chosen"]) for row in reporting.where(rows, method=method) if "chosen" in row]
        counts = torch.zeros(found.n)
        for pixels in chosen:
            counts[torch.tensor([int(pixel) for pixel in pixels.split()])] += 1 / len(chosen)
        plot.imshow(counts.view(found.shape).numpy(), cmap="gray_r", vmin=0, vmax=1)
        plot.set_xticks([])
        plot.set_yticks([])
        plot.set_title(label, fontsize=11)
    figure.suptitle(f"The {args.k} pixels with the largest logits: share of the seeds", fontsize=13)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="sigmoid-topk, Table 3",
    needs="MNIST",
    takes="3 hours of one core",
    Args=Args,
    smoke={"k": 8, "steps": 20, "points": 2, "seeds": 1},
    trials=trials,
    run=run,
    report=report,
)
