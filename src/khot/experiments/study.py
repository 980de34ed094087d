"""What the papers' experiments have in common: what they are, what they train with, what they report with.

An experiment is a module with an :class:`Experiment` named ``EXPERIMENT``, made of trials, such as one method
with one seed. The module's docstring goes into the report: what is done, and every departure from the paper.
:mod:`khot.experiments.runner` runs it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from khot.experiments import data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "COLORS",
    "EXPERIMENTS",
    "ArgumentError",
    "Args",
    "Checkpoint",
    "Experiment",
    "Row",
    "Trial",
    "annealed",
    "check_choices",
    "check_device",
    "column",
    "compare",
    "curve",
    "falling",
    "figure",
    "find",
    "images",
    "log_axis",
    "minibatches",
    "mlp",
    "names",
    "one_thread",
    "spread",
    "settling",
    "steps",
    "table",
    "where",
]

# Their modules, relative to this package; the name of an experiment is its module's, with hyphens.
EXPERIMENTS: tuple[str, ...] = (
    ".attention",
    ".beam_search",
    ".feature_selection",
    ".knn",
    ".learning_k",
    ".permutation",
    ".polynomial",
    ".pruning",
    ".root_finding",
    ".runtime",
    ".topk_loss",
    ".vae",
)

BLUE, ORANGE, GREY = "#0b6e99", "#d9730d", "#6b6b6b"
COLORS = (BLUE, ORANGE, "#448361", "#9065b0", "#c14c8a", "#937264", GREY)

# Seconds of training between two checkpoints: what a stop costs at most.
SAVE_EVERY = 30.0

Trial = dict[str, str | int | float]
Row = dict[str, str | int | float]


class ArgumentError(ValueError):
    """An argument of an experiment is out of range. The message is one line."""


def check_device(device: str) -> None:
    """Raises ArgumentError for a device that torch cannot use here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.zeros(1, device=device).item()
    except Exception:  # which one depends on the backend: RuntimeError, AssertionError, ImportError, ...
        raise ArgumentError(
            f"device = {device!r}: expected one that torch can use here; `khot info` lists them"
        ) from None


def check_choices(name: str, chosen: Iterable[str], known: Iterable[str]) -> None:
    """Raises ArgumentError if one that is chosen is not known."""
    for choice in chosen:
        if choice not in known:
            raise ArgumentError(f"{name}: {choice!r}: expected some of {', '.join(known)}")


@dataclass(frozen=True)
class Args:
    """What every experiment can be told; each has a subclass with more.

    A field with ``selects`` in its metadata only decides which trials there are, not what a trial does: it
    may differ between runs that share a folder.
    """

    data_dir: Path | None = field(
        default=None,
        metadata={"help": "Folder with MNIST's four gzipped IDX files.", "selects": True},
    )
    dataset: str = field(
        default="mnist",
        metadata={"help": "Another set of that form, in the folder of this name below --data-dir."},
    )
    seeds: int = field(default=3, metadata={"help": "How many seeds: 0, 1, and so on.", "selects": True})
    device: str = field(default="cpu", metadata={"help": "Where to compute: cpu, cuda, cuda:1, ..."})

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            # what is counted is at least 1, what is measured greater than 0
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                expected = "at least 1" if isinstance(value, int) else "more than 0"
                raise ArgumentError(f"{option.name} = {value}: expected {expected}")
        check_device(self.device)

    def setting(self) -> dict[str, Any]:
        """What the rows of a trial depend on."""
        fixed = {
            option.name: getattr(self, option.name)
            for option in dataclasses.fields(self)
            if not option.metadata.get("selects")
        }
        if self.data_dir is None:
            fixed["dataset"] = "digits"
        return json.loads(json.dumps(fixed))


A = TypeVar("A", bound=Args)


class Checkpoint:
    """What there is of a trial that is not finished: its rows, and the state that it saved with them.

    Rows that were yielded before a save are kept; those yielded after the last save are dropped when a
    stopped trial goes on, and come again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.seconds = 0.0
        self._since = time.process_time()

    def load(self) -> dict[str, Any] | None:
        """What :meth:`save` was given last by a run that was stopped; else None."""
        if not self.path.exists():
            return None
        content = torch.load(self.path, weights_only=True)
        self.rows, self.seconds = content["rows"], content["seconds"]
        return content["state"]

    def save(self, state: dict[str, Any]) -> None:
        """Keep the rows so far and this state: state dicts, tensors, numbers, strings."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        torch.save({"state": state, "rows": self.rows, "seconds": self.clock()}, part)
        part.replace(self.path)

    def clock(self) -> float:
        """CPU seconds of the trial, those before a stop included."""
        return self.seconds + time.process_time() - self._since


@dataclass(frozen=True)
class Experiment(Generic[A]):
    """One of the papers' experiments.

    Attributes:
        source: the paper and the table or figure.
        needs: "MNIST" (which :func:`images` loads) or "nothing".
        takes: how long, as measured.
        Args: its arguments.
        smoke: what they become for a run of seconds.
        trials: all trials, in the order in which to run them.
        run: yields a trial's rows without the trial's own entries, which are added: points of curves as they
            come, then the result.
        report: draws plots into the folder and returns the report's Markdown. The rows may be those of some
            trials only.
    """

    source: str
    needs: str
    takes: str
    Args: type[A]
    smoke: Mapping[str, Any]
    trials: Callable[[A], list[Trial]]
    run: Callable[[A, Trial, Checkpoint], Iterator[Row]]
    report: Callable[[A, list[Row], Path], str]


def names() -> list[str]:
    """The experiments there are."""
    return [module.rpartition(".")[2].replace("_", "-") for module in EXPERIMENTS]


def find(name: str) -> Experiment[Any]:
    """The experiment of that name; its module is imported now."""
    module = EXPERIMENTS[names().index(name)]
    experiment: Experiment[Any] = importlib.import_module(module, __package__).EXPERIMENT
    return experiment


# --- what a trial is made of --------------------------------------------------------------------------------


def images(args: Args) -> data.Images:
    """The images to learn from: scikit-learn's digits without ``data_dir``, else the set in it.

    Raises:
        DataError: a file is missing or broken.
    """
    return _images(args.data_dir, args.dataset)


@functools.lru_cache(maxsize=1)
def _images(data_dir: Path | None, dataset: str) -> data.Images:
    if data_dir is None:
        return data.load_digits()
    if dataset == "mnist":
        return data.load_mnist(data_dir)
    return dataclasses.replace(data.load_mnist(data_dir / dataset), name=dataset)


def steps(checkpoint: Checkpoint, state: Mapping[str, Any], total: int) -> Iterator[int]:
    """The numbers of the steps of a training, 0 to total − 1, from where a stopped one was.

    Saves ``state`` (modules, optimisers, schedules: what has a state dict) and the random state of torch,
    every :data:`SAVE_EVERY` seconds and always between two steps.
    """
    first = 0
    saved = checkpoint.load()
    if saved is not None:
        first = saved["step"]
        for name, part in state.items():
            part.load_state_dict(saved["state"][name])
        torch.set_rng_state(saved["rng"])
        if "cuda" in saved:
            torch.cuda.set_rng_state_all(saved["cuda"])
    last = time.monotonic()
    for step in range(first, total):
        if step > first and time.monotonic() - last >= SAVE_EVERY:
            content = {
                "step": step,
                "state": {name: part.state_dict() for name, part in state.items()},
                "rng": torch.get_rng_state(),
            }
            if torch.cuda.is_available():
                content["cuda"] = torch.cuda.get_rng_state_all()
            checkpoint.save(content)
            last = time.monotonic()
        yield step


def minibatches(count: int, size: int, step: int, seed: int) -> Tensor:
    """Which of ``count`` examples step number ``step`` learns from: the epochs' permutations, cut in pieces.

    A function of its arguments alone, so that nothing about the order needs to be saved.
    """
    size = min(size, count)
    epoch, place = divmod(step, count // size)
    return _permutation(count, epoch, seed)[place * size : (place + 1) * size]


@functools.lru_cache(maxsize=1)
def _permutation(count: int, epoch: int, seed: int) -> Tensor:
    # the two numbers as one: no run has 10⁶ epochs
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_000 + epoch))


def falling(progress: float) -> float:
    """The factor of a learning rate that is constant, and falls to 0 over the last third of the steps."""
    return min(1.0, 3 * (1 - progress))


def annealed(progress: float) -> float:
    """The factor of a learning rate that is constant, and falls to 0 along a cosine over the second half of
    the steps: slowly at the end, so that the loss settles."""
    return 0.5 * (1 + math.cos(math.pi * max(0.0, 2 * progress - 1)))


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread.

    Matrices this small gain nothing from a second one, lose much where another process wants the core,
    and sum in the same order on every machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- what reports are made of -------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation, such as "0.113 ± 0.002"; of a single value no deviation."""
    if not values:
        return "–"
    mean = f"{math.fsum(values) / len(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def compare(paper: tuple[float, float] | None, ours: Sequence[float], digits: int = 3) -> list[str]:
    """The cells "paper", "here" and "difference"; bold where it is more than the paper's deviation."""
    if paper is None or not ours:
        return ["–", spread(ours, digits), "–"]
    difference = math.fsum(ours) / len(ours) - paper[0]
    text = f"{difference:+.{digits}f}"
    return [
        f"{paper[0]:.{digits}f} ± {paper[1]:.{digits}f}",
        spread(ours, digits),
        f"**{text}**" if abs(difference) > paper[1] else text,
    ]


def curve(rows: Iterable[Row], y: str) -> tuple[list[float], list[float]]:
    """The steps of the rows that have a y, and its mean over the rows of each step."""
    points: dict[float, list[float]] = {}
    for row in rows:
        if "step" in row and y in row:
            points.setdefault(float(row["step"]), []).append(float(row[y]))
    return sorted(points), [statistics.fmean(points[step]) for step in sorted(points)]


def settling(rows: Iterable[Row], y: str) -> str:
    """By how many percent the curve changed between its last two points: whether it had flattened."""
    values = curve(rows, y)[1]
    return f"{100 * (values[-1] / values[-2] - 1):+.1f} %" if len(values) > 1 else "–"


def column(rows: Iterable[Row], name: str) -> list[float]:
    """The numbers of that name, of the rows that have one."""
    return [float(row[name]) for row in rows if name in row]


def where(rows: Iterable[Row], **entries: str | int | float) -> list[Row]:
    """The rows with these entries."""
    return [row for row in rows if all(row.get(key) == value for key, value in entries.items())]


def figure(columns: int = 1, *, width: float = 7, height: float = 4.2) -> tuple[Figure, Sequence[Any]]:
    """A figure with that many plots beside each other, and the list of them."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    plots = drawn.subplots(1, columns, squeeze=False)[0]
    for plot in plots:
        plot.spines[["top", "right"]].set_visible(False)
    return drawn, plots


def log_axis(plot: Any) -> None:
    """A logarithmic y axis with plain numbers on it, for what is plotted already."""
    plot.set_yscale("log")
    plot.yaxis.set_major_formatter("{x:g}")
    low, high = plot.get_ylim()
    plot.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")
    plot.tick_params(axis="y", which="minor", labelsize=8)
