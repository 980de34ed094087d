"""Which k pixels tell the digits apart?

``khot.sklearn.KHotSelector`` chooses k of the n pixels. New classifiers then judge the choice. They are
trained from scratch on the chosen pixels alone, on the k pixels of highest variance, on k random pixels, and
on all pixels, always with the same architecture, steps, minibatches and seed.

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
from khot.experiments.harness.study import ArgumentError
from khot.experiments.harness.training import one_thread

__all__ = ["LABELS", "ArgumentError", "Args", "Result", "run"]

# Four classifiers are trained side by side, because the accuracy of a single one varies by about 1 % on the
# 544 test digits.
CLASSIFIERS = 4
HIDDEN = 128
BATCH = 128


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
    seed: int = field(default=0, metadata={"help": "Seed of the weights, minibatches and random pixels."})
    out: Path = field(
        default=Path("khot-demo.png"),
        metadata={"help": "PNG file to write, or a folder to write khot-demo.png into. It may be new."},
    )

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 1:
            raise ArgumentError(f"k = {self.k}: expected at least 1")
        if self.steps < 1:
            raise ArgumentError(f"steps = {self.steps}: expected at least 1")
        if not 0 <= self.seed < 2**32:
            raise ArgumentError(f"seed = {self.seed}: expected 0 to 2**32 - 1")
        path = self.png
        if path.suffix.lower() != ".png":
            raise ArgumentError(
                f"out = '{self.out}': expected a .png file, a folder that exists, or a name without a suffix "
                "for a new folder"
            )
        place = next((p for p in (path, *path.parents) if p.exists()), Path())
        if not os.access(place, os.W_OK) or not (place == path or place.is_dir()):
            raise ArgumentError(f"out = '{self.out}': expected a place that can be written to")

    @property
    def png(self) -> Path:
        """The file to write: ``out``, or khot-demo.png in it if it is a folder or may become one."""
        return self.out / "khot-demo.png" if self.out.is_dir() or not self.out.suffix else self.out


@dataclass(frozen=True)
class Result:
    """The result of the demo.

    Attributes:
        accuracy: mean test accuracy in percent, for each of :data:`LABELS`.
        chosen, variance: k-hot masks (n,) of the chosen pixels, and of the pixels of highest variance.
        scores: what the selector learned for each pixel, (n,); −∞ for pixels that never change.
        seconds: the time that the demo took.
    """

    accuracy: dict[str, float]
    chosen: Tensor
    variance: Tensor
    scores: Tensor
    seconds: float


def run(args: Args) -> Result:
    """Choose pixels, judge the choice, print the table and draw the picture.

    Raises:
        ArgumentError: ``k`` is more than the images have pixels.
        DataError: a file of ``args.data_dir`` is missing or broken.
        ImportError: scikit-learn is too old for the selector.
    """
    from khot.sklearn import KHotSelector

    start = time.perf_counter()
    if args.data_dir is None:
        images, usual_k = data.load_digits(), 10
    else:
        images, usual_k = data.load_mnist(args.data_dir), 50
    k = usual_k if args.k is None else args.k
    if k > images.n:
        raise ArgumentError(f"k = {k}: expected at most {images.n}, the number of pixels of {images.name}")
    args.png.parent.mkdir(parents=True, exist_ok=True)

    with one_thread(), _progress_bar((1 + len(LABELS)) * args.steps) as report:
        report(f"choosing {k} of {images.n} pixels", 0)
        selector = KHotSelector(k, steps=args.steps, random_state=args.seed, verbose=True)
        selector.fit(images.train_images.numpy(), images.train_labels.numpy())
        report("standardising images", args.steps)
        chosen, scores = (torch.from_numpy(x).float() for x in (selector.get_support(), selector.scores_))
        split = _standardise(images)
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
    _draw_picture(images, k, accuracy, chosen, variance, scores, args)
    result = Result(accuracy, chosen, variance, scores, time.perf_counter() - start)
    _print_table(images, k, result, args)
    return result


# --- training -----------------------------------------------------------------------------------------------

_Report = Callable[[str, int], None]


@dataclass(frozen=True)
class _Split:
    """Standardised images."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def _standardise(images: data.Images) -> _Split:
    """Centre every pixel and scale all to a similar range.

    The 0.2 keeps the values of pixels with hardly any variance small.
    """
    mean, scale = images.train_images.mean(0), images.train_images.std(0) + 0.2
    return _Split(
        (images.train_images - mean) / scale,
        images.train_labels,
        (images.test_images - mean) / scale,
        images.test_labels,
    )


def _judge(split: _Split, mask: Tensor, name: str, args: Args, report: _Report) -> float:
    """The mean test accuracy, in percent, of classifiers trained from scratch on the pixels in ``mask``.

    ``mask`` has shape (n,), or (CLASSIFIERS, n) to give each classifier its own pixels.
    """
    masks = mask.expand(CLASSIFIERS, -1)
    pixels = torch.stack([row.nonzero().squeeze(1) for row in masks])[:, None]
    model = _Classifiers(pixels.shape[-1], args.seed)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=args.steps)
    for batch in _minibatches(split, args):
        logits = model(split.train_images[batch[:, :, None], pixels])
        # the cross-entropy, averaged over the minibatch and summed over the classifiers
        loss = CLASSIFIERS * F.cross_entropy(logits.flatten(0, 1), split.train_labels[batch].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        report(f"training on {LABELS[name]}", 1)
    with torch.no_grad():
        logits = model(split.test_images[:, pixels[:, 0]].movedim(1, 0))
    return 100 * (logits.argmax(-1) == split.test_labels).float().mean().item()


class _Classifiers(nn.Module):
    """Independent perceptrons with one hidden layer, which are computed together.

    Maps images (CLASSIFIERS, batch, inputs) to logits (CLASSIFIERS, batch, 10).
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


def _minibatches(split: _Split, args: Args) -> Tensor:
    """Indices of training images, (steps, CLASSIFIERS, BATCH), drawn with replacement."""
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.steps, CLASSIFIERS, BATCH)
    return torch.randint(len(split.train_labels), shape, generator=generator)


# --- output ------------------------------------------------------------------------------------------------

LABELS = {
    "chosen": "the pixels khot chose",
    "variance": "the pixels of highest variance",
    "random": "random pixels",
    "all": "all pixels",
}


@contextmanager
def _progress_bar(total: int) -> Generator[_Report]:
    """A progress bar on stderr; yields the function that sets its text and advances it by so many steps."""
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("reading images", total=total)
        yield lambda doing, steps: progress.update(task, advance=steps, description=doing)
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
    scores: Tensor,
    args: Args,
) -> None:
    """Draw the chosen pixels and those of highest variance over the mean image, and the learned scores."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(13, 4.8), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.2])
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

    shown = right.imshow(scores.view(images.shape).numpy(), cmap="viridis")
    right.set_title("the scores that chose them", fontsize=13)
    right.set_xlabel("white: pixels that never change, without a score", color=GREY, loc="left")
    right.set_xticks([])
    right.set_yticks([])
    figure.colorbar(shown, ax=right)
    figure.savefig(args.png, dpi=120)
