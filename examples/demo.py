"""Which k pixels tell the digits apart?

``khot.sklearn.KHotSelector`` chooses k of the n pixels. New classifiers then judge the choice. They are
trained from scratch on the chosen pixels alone, on the k pixels of highest variance, on k random pixels, and
on all pixels, always with the same architecture, steps, minibatches and seed.

    python examples/demo.py                        # scikit-learn's digits, 10 of 64 pixels
    python examples/demo.py --data-dir FOLDER      # MNIST, 50 of 784 pixels
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from khot.sklearn import KHotSelector

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import from reproduce/, beside this folder
from reproduce.harness.data import Images, load_digits, load_mnist
from reproduce.harness.reporting import BLUE, GREY, ORANGE
from reproduce.harness.training import one_thread

# Four classifiers are trained side by side, because the accuracy of a single one varies by about 1 % on the
# 544 test digits.
CLASSIFIERS = 4
HIDDEN = 128
BATCH = 128


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


def run(images: Images, k: int, steps: int = 1000, seed: int = 0) -> Result:
    """Choose k pixels and judge the choice."""
    start = time.perf_counter()
    with one_thread(), _progress_bar((1 + len(LABELS)) * steps) as report:
        report(f"choosing {k} of {images.n} pixels", 0)
        selector = KHotSelector(k, steps=min(steps, 150), random_state=seed, verbose=True)
        selector.fit(images.train_images.numpy(), images.train_labels.numpy())
        report("standardising images", steps)
        chosen, scores = (torch.from_numpy(x).float() for x in (selector.get_support(), selector.scores_))
        split = _standardise(images)
        variance = khot.topk_mask(images.train_images.var(0), k)
        generator = torch.Generator().manual_seed(seed)
        random = khot.topk_mask(torch.rand(CLASSIFIERS, images.n, generator=generator), k)
        masks = {
            "chosen": chosen,
            "variance": variance,
            "random": random,
            "all": torch.ones(images.n),
        }
        accuracy = {name: _judge(split, mask, name, steps, seed, report) for name, mask in masks.items()}
    return Result(accuracy, chosen, variance, scores, time.perf_counter() - start)


# --- training -----------------------------------------------------------------------------------------------

_Report = Callable[[str, int], None]


@dataclass(frozen=True)
class _Split:
    """Standardised images."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def _standardise(images: Images) -> _Split:
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


def _judge(split: _Split, mask: Tensor, name: str, steps: int, seed: int, report: _Report) -> float:
    """The mean test accuracy, in percent, of classifiers trained from scratch on the pixels in ``mask``.

    ``mask`` has shape (n,), or (CLASSIFIERS, n) to give each classifier its own pixels.
    """
    masks = mask.expand(CLASSIFIERS, -1)
    pixels = torch.stack([row.nonzero().squeeze(1) for row in masks])[:, None]
    model = _Classifiers(pixels.shape[-1], seed)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    for batch in _minibatches(split, steps, seed):
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


def _minibatches(split: _Split, steps: int, seed: int) -> Tensor:
    """Indices of training images, (steps, CLASSIFIERS, BATCH), drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, CLASSIFIERS, BATCH)
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


def _print_table(images: Images, k: int, result: Result, out: Path) -> None:
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
    console.print(f"{result.seconds:.0f} s; picture: {out}", soft_wrap=True, markup=False, highlight=False)


def draw(images: Images, k: int, result: Result, out: Path) -> None:
    """Draw the chosen pixels and those of highest variance over the mean image, and the learned scores."""
    accuracy = result.accuracy
    figure = Figure(figsize=(13, 4.8), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.2])
    figure.suptitle(f"Which {k} of {images.n} pixels tell the digits apart?  ({images.name})", fontsize=15)

    mean = images.train_images.mean(0).view(images.shape).numpy()
    for axes, mask, color, title in (
        (left, result.chosen, BLUE, f"chosen by khot: {accuracy['chosen']:.1f} %"),
        (middle, result.variance, ORANGE, f"highest variance: {accuracy['variance']:.1f} %"),
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

    shown = right.imshow(result.scores.view(images.shape).numpy(), cmap="viridis")
    right.set_title("the scores that chose them", fontsize=13)
    right.set_xlabel("white: pixels that never change, without a score", color=GREY, loc="left")
    right.set_xticks([])
    right.set_yticks([])
    figure.colorbar(shown, ax=right)
    figure.savefig(out, dpi=120)


def main(
    data_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="KHOT_DATA_DIR",
            help="Folder with MNIST's four gzipped IDX files. Default: scikit-learn's digits.",
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option(min=1, help="Number of pixels. Default: 10 of the digits' 64, 50 of MNIST's 784."),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(min=1, help="Training steps of each judging classifier; the choice takes at most 150."),
    ] = 1000,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**32 - 1, help="Seed of the weights, minibatches and random pixels."),
    ] = 0,
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("khot-demo.png"),
) -> None:
    """Which k pixels tell the digits apart? Learn to choose them, and compare with other choices."""
    images = load_digits() if data_dir is None else load_mnist(data_dir)
    k = k or (10 if data_dir is None else 50)
    if k > images.n:
        raise typer.BadParameter(
            f"k = {k}: expected at most {images.n}, the number of pixels of {images.name}"
        )
    result = run(images, k, steps, seed)
    draw(images, k, result, out)
    _print_table(images, k, result, out)


if __name__ == "__main__":
    typer.run(main)
