"""Which k pixels tell the digits apart?

A vector of n scores, one per pixel, is trained together with small classifiers. A relaxed top-k connects
them: the classifiers see image × y with y = soft_topk(scores, k, tau), whose weights are in [0, 1] and sum to
k. While tau falls, y turns from equal weights for all pixels into a choice of k pixels. New classifiers then
judge the choice. They are trained from scratch on the chosen pixels alone, on the k pixels of highest
variance, on k random pixels, and on all pixels, always with the same architecture, steps, minibatches and
seed.

    khot demo                        # scikit-learn's digits, 10 of 64 pixels
    khot demo --data-dir FOLDER      # MNIST, 50 of 784 pixels
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from khot.experiments.harness import data
from khot.experiments.harness.reporting import BLUE, GREY, ORANGE
from khot.experiments.harness.study import ArgumentError, check_device
from khot.experiments.harness.training import one_thread

__all__ = ["CDFS", "LABELS", "ArgumentError", "Args", "Curve", "Result", "run"]

CDFS = ("logistic", "laplace", "normal", "uniform")

# How the scales of tau and of the scores fit together: in each step Adam moves a score by about its learning
# rate. A learning rate of 100 divided by the number of steps therefore lets scores end a few units apart,
# whatever the number of steps. The width of the gate is tau times the CDF's standard deviation. It starts at
# the scale of these differences, where every pixel counts, and ends far below them, where only k pixels
# count.
SCORE_TRAVEL = 100.0
WIDTH_START, WIDTH_END = 3.6, 0.09

# Four classifiers are trained side by side: behind the gate, so that the choice does not depend on a single
# one, and in the comparison, because the accuracy of a single one varies by about 1 % on the 544 test digits.
CLASSIFIERS = 4
HIDDEN = 128
CHOICE_BATCH = 32
JUDGE_BATCH = 128


@dataclass(frozen=True)
class Args:
    """The arguments of ``khot demo``. All are checked here, except k ≤ n, which depends on the images."""

    data_dir: Path | None = field(
        default=None,
        metadata={"help": "Folder with MNIST's four gzipped IDX files. Default: scikit-learn's digits."},
    )
    k: int | None = field(
        default=None,
        metadata={"help": "Number of pixels to choose. Default: 10 of the digits' 64, 50 of MNIST's 784."},
    )
    steps: int = field(
        default=1000,
        metadata={"help": "Training steps, both for the choice and for each classifier that judges it."},
    )
    cdf: str = field(default="logistic", metadata={"help": f"CDF of the soft choice: {', '.join(CDFS)}."})
    device: str = field(default="cpu", metadata={"help": "Device to train on: cpu, cuda, cuda:1, ..."})
    seed: int = field(default=0, metadata={"help": "Seed of the weights, minibatches and random pixels."})
    out: Path = field(
        default=Path("khot-demo.png"),
        metadata={"help": "PNG file to write, or a folder to write khot-demo.png into."},
    )

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 1:
            raise ArgumentError(f"k = {self.k}: expected at least 1")
        if self.steps < 1:
            raise ArgumentError(f"steps = {self.steps}: expected at least 1")
        if self.cdf not in CDFS:
            raise ArgumentError(f"cdf = {self.cdf!r}: expected one of {', '.join(CDFS)}")
        if not 0 <= self.seed < 2**62:
            raise ArgumentError(f"seed = {self.seed}: expected 0 to 2**62 - 1")
        check_device(self.device)
        path = self.png
        if path.suffix.lower() != ".png" or not path.parent.is_dir():
            raise ArgumentError(
                f"out = '{self.out}': expected a .png file in a folder that exists, or such a folder"
            )
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ArgumentError(f"out = '{self.out}': expected a place that can be written to")

    @property
    def png(self) -> Path:
        """The file to write: ``out``, or khot-demo.png in it if it is a folder."""
        return self.out / "khot-demo.png" if self.out.is_dir() else self.out


@dataclass(frozen=True)
class Curve:
    """The course of the training, with one entry per training step.

    Attributes:
        accuracy: the share of the minibatch that the classifiers behind the gate get right.
        concentration: (sum of the k largest gate weights) / k, which is 1 when the choice is hard.
        tau: the temperature.
    """

    accuracy: list[float] = field(default_factory=list)
    concentration: list[float] = field(default_factory=list)
    tau: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """The result of the demo.

    Attributes:
        accuracy: mean test accuracy in percent, for each of :data:`LABELS`.
        chosen, variance: k-hot masks (n,) of the chosen pixels, and of the pixels of highest variance.
        curve: the course of the training.
        seconds: the time that the demo took.
    """

    accuracy: dict[str, float]
    chosen: Tensor
    variance: Tensor
    curve: Curve
    seconds: float


def run(args: Args) -> Result:
    """Choose pixels, judge the choice, print the table and draw the picture.

    Raises:
        ArgumentError: ``k`` is more than the images have pixels.
        DataError: a file of ``args.data_dir`` is missing or broken.
    """
    start = time.perf_counter()
    if args.data_dir is None:
        images, usual_k = data.load_digits(), 10
    else:
        images, usual_k = data.load_mnist(args.data_dir), 50
    k = usual_k if args.k is None else args.k
    if k > images.n:
        raise ArgumentError(f"k = {k}: expected at most {images.n}, the number of pixels of {images.name}")

    with one_thread(), _progress_bar((1 + len(LABELS)) * args.steps) as report:
        split = _standardise(images, args.device)
        chosen, curve = _choose_pixels(split, k, args, report)
        variance = khot.topk_mask(images.train_images.var(0), k)
        generator = torch.Generator().manual_seed(args.seed)
        random = khot.topk_mask(torch.rand(CLASSIFIERS, images.n, generator=generator), k)
        masks = {
            "chosen": chosen,
            "variance": variance,
            "random": random,
            "all": torch.ones(images.n),
        }
        accuracy = {name: _judge(split, mask, name, args, report) for name, mask in masks.items()}
    _draw_picture(images, k, accuracy, chosen, variance, curve, args)
    result = Result(accuracy, chosen, variance, curve, time.perf_counter() - start)
    _print_table(images, k, result, args)
    return result


# --- training -----------------------------------------------------------------------------------------------

_Report = Callable[[str], None]


@dataclass(frozen=True)
class _Split:
    """Standardised images on the device of the training."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def _standardise(images: data.Images, device: str) -> _Split:
    """Centre every pixel and scale all to a similar range, so that dark pixels are not at a disadvantage.

    A closed gate then stands for the mean of a pixel and not for black. The 0.2 keeps the values of pixels
    with hardly any variance small.
    """
    mean, scale = images.train_images.mean(0), images.train_images.std(0) + 0.2
    return _Split(
        ((images.train_images - mean) / scale).to(device),
        images.train_labels.to(device),
        ((images.test_images - mean) / scale).to(device),
        images.test_labels.to(device),
    )


def _choose_pixels(split: _Split, k: int, args: Args, report: _Report) -> tuple[Tensor, Curve]:
    """Train the gate and the classifiers behind it. Returns the k-hot mask (n,) on the CPU, and the curve."""
    n = split.train_images.shape[1]
    model = _Classifiers(n, args.seed).to(args.device)
    scores = nn.Parameter(torch.zeros(n, device=args.device))
    optimizer = torch.optim.Adam(
        [
            {"params": model.parameters(), "lr": 3e-3},
            {"params": [scores], "lr": SCORE_TRAVEL / args.steps},
        ]
    )
    cdf = khot.cdfs.resolve(args.cdf)
    deviation = cdf.variance**0.5
    curve = Curve()
    for step, batch in enumerate(_minibatches(split, CHOICE_BATCH, args)):
        # the last tenth of the steps uses the final tau
        progress = min(step / (0.9 * args.steps), 1.0)
        tau = WIDTH_START * (WIDTH_END / WIDTH_START) ** progress / deviation
        y = khot.soft_topk(scores, k, tau=tau, cdf=cdf)
        logits = model(split.train_images[batch] * y)
        labels = split.train_labels[batch]
        _descend(optimizer, logits, labels)

        curve.accuracy.append((logits.argmax(-1) == labels).float().mean().item())
        curve.concentration.append(y.detach().topk(k).values.sum().item() / k)
        curve.tau.append(tau)
        report(f"choosing {k} of {n} pixels, tau {tau:.2f}")
    return khot.topk_mask(scores.detach(), k).cpu(), curve


def _judge(split: _Split, mask: Tensor, name: str, args: Args, report: _Report) -> float:
    """The mean test accuracy, in percent, of classifiers trained from scratch on the pixels in ``mask``.

    ``mask`` has shape (n,), or (CLASSIFIERS, n) to give each classifier its own pixels.
    """
    masks = mask.to(args.device).expand(CLASSIFIERS, -1)
    pixels = torch.stack([row.nonzero().squeeze(1) for row in masks])[:, None]
    model = _Classifiers(pixels.shape[-1], args.seed).to(args.device)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=args.steps)
    for batch in _minibatches(split, JUDGE_BATCH, args):
        logits = model(split.train_images[batch[:, :, None], pixels])
        _descend(optimizer, logits, split.train_labels[batch])
        schedule.step()
        report(f"training on {LABELS[name]}")
    with torch.no_grad():
        logits = model(split.test_images[:, pixels[:, 0]].movedim(1, 0))
    return 100 * (logits.argmax(-1) == split.test_labels).float().mean().item()


class _Classifiers(nn.Module):
    """Independent perceptrons with one hidden layer, which are computed together.

    Maps images (CLASSIFIERS, batch, inputs) to logits (CLASSIFIERS, batch, 10). The same seed gives the same
    initial weights on every device.
    """

    def __init__(self, inputs: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def uniform(rows: int, columns: int, fan_in: int) -> nn.Parameter:
            # the initialisation of nn.Linear
            values = torch.rand(CLASSIFIERS, rows, columns, generator=generator)
            return nn.Parameter((2 * values - 1) / fan_in**0.5)

        self.weight_1, self.bias_1 = uniform(inputs, HIDDEN, inputs), uniform(1, HIDDEN, inputs)
        self.weight_2, self.bias_2 = uniform(HIDDEN, 10, HIDDEN), uniform(1, 10, HIDDEN)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.baddbmm(self.bias_1, images, self.weight_1).relu()
        return torch.baddbmm(self.bias_2, hidden, self.weight_2)


def _descend(optimizer: torch.optim.Optimizer, logits: Tensor, labels: Tensor) -> None:
    """One step on the cross-entropy, averaged over the minibatch and summed over the classifiers."""
    loss = CLASSIFIERS * F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _minibatches(split: _Split, size: int, args: Args) -> Tensor:
    """Indices of training images, (steps, CLASSIFIERS, size), drawn with replacement."""
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.steps, CLASSIFIERS, size)
    return torch.randint(len(split.train_labels), shape, generator=generator).to(args.device)


# --- output ------------------------------------------------------------------------------------------------

LABELS = {
    "chosen": "the pixels khot chose",
    "variance": "the pixels of highest variance",
    "random": "random pixels",
    "all": "all pixels",
}


@contextmanager
def _progress_bar(total: int) -> Generator[_Report]:
    """A progress bar on stderr; yields the function that advances it by one step and sets its text."""
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("reading images", total=total)
        yield lambda doing: progress.update(task, advance=1, description=doing)
        progress.update(task, description="done")


def _print_table(images: data.Images, k: int, result: Result, args: Args) -> None:
    """Print the test accuracies as a table on stdout."""
    table = Table(
        title=f"Which {k} of {images.n} pixels tell the digits apart?",
        caption=f"{images.name}: {len(images.train_labels):,} training images, "
        f"{len(images.test_labels):,} test images",
    )
    table.add_column("classifier trained on")
    table.add_column("pixels", justify="right")
    table.add_column(f"test accuracy (mean of {CLASSIFIERS})", justify="right")
    for name, accuracy in result.accuracy.items():
        pixels = images.n if name == "all" else k
        style = "bold green" if name == "chosen" else None
        table.add_row(LABELS[name], str(pixels), f"{accuracy:.1f} %", style=style)
    console = Console()
    console.print(table)
    console.print(
        f"{result.seconds:.0f} s; picture: {args.png}", soft_wrap=True, markup=False, highlight=False
    )


def _draw_picture(
    images: data.Images,
    k: int,
    accuracy: dict[str, float],
    chosen: Tensor,
    variance: Tensor,
    curve: Curve,
    args: Args,
) -> None:
    """Draw the chosen pixels and those of highest variance over the mean image, and the training curves."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(13, 4.8), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.5])
    figure.suptitle(f"Which {k} of {images.n} pixels tell the digits apart?  ({images.name})", fontsize=15)

    mean = images.train_images.mean(0).view(images.shape).numpy()
    for axes, mask, color, title in (
        (left, chosen, BLUE, f"chosen by khot: {accuracy['chosen']:.1f} %"),
        (middle, variance, ORANGE, f"highest variance: {accuracy['variance']:.1f} %"),
    ):
        # the doubled range keeps the image pale behind the squares
        axes.imshow(mean, cmap="gray_r", vmin=0, vmax=2 * mean.max())
        for pixel in mask.nonzero().squeeze(1).tolist():
            row, column = divmod(pixel, images.shape[1])
            corner = (column - 0.5, row - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=color, alpha=0.35, linewidth=0))
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=color, linewidth=1.8))
        axes.set_title(title, color=color, fontsize=13)
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_color("#cccccc")
    left.set_xlabel(
        f"over the mean image, with the test accuracy; random pixels: {accuracy['random']:.1f} %, "
        f"all pixels: {accuracy['all']:.1f} %",
        color=GREY,
        loc="left",
    )

    steps = range(1, len(curve.tau) + 1)
    window = max(1, len(curve.accuracy) // 50)
    right.plot(steps, _smooth(curve.accuracy, window), color=BLUE, label="training accuracy")
    right.plot(
        steps,
        [100 * share for share in curve.concentration],
        color=ORANGE,
        label=f"weight on the {k} largest",
    )
    right.set_title("as tau falls, the gate hardens", fontsize=13)
    right.set_xlabel("step")
    right.set_ylabel("%")
    right.set_ylim(0, 103)
    right.spines["top"].set_visible(False)
    temperature = right.twinx()
    temperature.plot(steps, curve.tau, color=GREY, linestyle="--", label="tau (right)")
    temperature.set_yscale("log")
    temperature.set_ylabel("tau", color=GREY)
    temperature.spines["top"].set_visible(False)
    handles = [*right.get_lines(), *temperature.get_lines()]
    right.legend(handles=handles, loc=(0.1, 0.03), frameon=False)
    figure.savefig(args.png, dpi=120)


def _smooth(values: list[float], window: int) -> list[float]:
    """Percentages, each averaged over the ``window`` steps that end there."""
    sums = torch.tensor([0.0, *values], dtype=torch.float64).cumsum(0)
    ends = torch.arange(1, len(values) + 1)
    starts = (ends - window).clamp(min=0)
    return (100 * (sums[ends] - sums[starts]) / (ends - starts)).tolist()
