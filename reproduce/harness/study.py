"""What an experiment is: its arguments, its trials, and how the experiments are found.

An experiment is a module of :mod:`reproduce.papers` with an :class:`Experiment` named ``EXPERIMENT``.
It consists of trials, such as one method with one seed. The module's docstring becomes part of the report: it
says what is done, and names every departure from the paper.

:mod:`reproduce.harness.runner` runs the trials, :mod:`reproduce.harness.training` has what they
train with, and :mod:`reproduce.harness.reporting` has what their reports are made of.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import pkgutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from reproduce import papers
from reproduce.harness import files

__all__ = [
    "EXPERIMENTS",
    "PAPERS",
    "ArgumentError",
    "Args",
    "By",
    "Checkpoint",
    "Experiment",
    "Row",
    "Trial",
    "check_choices",
    "check_device",
    "find",
    "module_of",
    "names",
]

# The modules of the experiments. The name of an experiment is its module's, with hyphens for underscores.
EXPERIMENTS: tuple[str, ...] = tuple(
    f"{papers.__name__}.{module.name}" for module in pkgutil.iter_modules(papers.__path__)
)

# The papers, under the names that `Experiment.source` uses.
PAPERS = {
    "sigmoid-topk": "Wijk, Vinuesa, Azizpour 2025, Differentiable Top-k: From One-Hot to k-Hot",
    "soft-ot-topk": "Xie et al. 2020, Differentiable Top-k Operator with Optimal Transport",
    "lapsum": "Struski et al. 2025, LapSum: One Method to Differentiate Them All",
    "sparse-topk": "Sander et al. 2023, Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective",
    "topk-sae": "Gao et al. 2024, Scaling and Evaluating Sparse Autoencoders",
    "quantile-balancing": "What frameworks for training do: biases of experts from quantiles of their scores",
}

Trial = dict[str, str | int | float]
Row = dict[str, str | int | float]
By = dict[str, Any]  # the versions and the arguments that a row was computed with


class ArgumentError(ValueError):
    """An argument of an experiment is out of range. The message is one line."""


def check_device(device: str) -> None:
    """Raise ArgumentError for a device that torch cannot use on this machine."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.zeros(1, device=device).item()
    except Exception:  # the type depends on the backend: RuntimeError, AssertionError, ImportError, ...
        raise ArgumentError(
            f"device = {device!r}: expected one that torch can use here; `khot info` lists them"
        ) from None


def check_choices(name: str, chosen: Iterable[str], known: Iterable[str]) -> None:
    """Raise ArgumentError if any of the chosen values is not a known one."""
    for choice in chosen:
        if choice not in known:
            raise ArgumentError(f"{name}: {choice!r}: expected some of {', '.join(known)}")


@dataclass(frozen=True)
class Args:
    """The arguments that every experiment takes; each experiment has a subclass with more.

    A field with ``selects`` in its metadata only decides which trials there are, not what a trial does. Runs
    that share a folder may differ in such a field.
    """

    data_dir: Path | None = field(
        default=None,
        metadata={"help": "Folder with MNIST's four gzipped IDX files.", "selects": True},
    )
    dataset: str = field(
        default="mnist",
        metadata={"help": "Another data set in MNIST's form, from the folder of this name in --data-dir."},
    )
    seeds: int = field(default=3, metadata={"help": "Number of seeds; they are 0, 1, ...", "selects": True})
    device: str = field(default="cpu", metadata={"help": "Device to compute on: cpu, cuda, cuda:1, ..."})

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            # integers count something and are at least 1; floats measure something and are greater than 0
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                expected = "at least 1" if isinstance(value, int) else "more than 0"
                raise ArgumentError(f"{option.name} = {value}: expected {expected}")
        check_device(self.device)

    def setting(self) -> dict[str, Any]:
        """The arguments that the rows of a trial depend on."""
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
    """What is left of an unfinished trial: its rows, and the state that was saved with them.

    Rows that were yielded before the last save are kept. Rows that were yielded after it are dropped when a
    stopped trial continues, which yields them again.

    Args:
        path: the file.
        by: the versions and the arguments of this run; what is loaded has those that it was saved with.
    """

    def __init__(self, path: Path, by: By) -> None:
        self.path = path
        self.by = by
        self.rows: list[Row] = []
        self.seconds = 0.0
        self._since = time.process_time()

    def load(self) -> dict[str, Any] | None:
        """The state of the last :meth:`save` of a stopped run, or None if there is none.

        Raises:
            FileError: the file is damaged or cannot be read.
        """
        if not self.path.exists():
            return None
        try:
            content = torch.load(self.path, weights_only=True)
            rows, seconds, state = list(content["rows"]), float(content["seconds"]), dict(content["state"])
            by = dict(content["by"])
        except PermissionError as error:
            raise files.FileError(f"{self.path}: {error.strerror}; make it readable") from None
        except Exception as error:  # the type depends on where the file is damaged
            raise self.damaged(error) from None
        self.rows, self.seconds, self.by = rows, seconds, by
        return state

    def damaged(self, error: Exception) -> files.FileError:
        """What to say of a file that this error shows to be damaged, or to be of another trial."""
        return files.FileError(
            f"{self.path}: damaged, or of another version ({type(error).__name__}); delete it, and its trial "
            "starts again"
        )

    def save(self, state: dict[str, Any]) -> None:
        """Keep the rows so far and this state, which may hold state dicts, tensors, numbers and strings.

        Raises:
            FileError: the file cannot be written.
        """
        content = io.BytesIO()  # torch hides the reason for which a file cannot be written
        torch.save({"state": state, "rows": self.rows, "seconds": self.clock(), "by": self.by}, content)
        files.replace(self.path, content.getvalue())

    def clock(self) -> float:
        """CPU seconds that the trial has taken, including those before a stop."""
        return self.seconds + time.process_time() - self._since


@dataclass(frozen=True)
class Experiment(Generic[A]):
    """An experiment of one of the papers.

    Attributes:
        source: the paper, by its name in :data:`PAPERS`, and the table or figure.
        needs: "MNIST" (which :func:`reproduce.harness.training.images` loads) or "nothing".
        takes: how long it took when it was measured.
        Args: its arguments.
        smoke: the arguments that make it a run of seconds.
        trials: all trials, in the order in which they are run.
        run: yields the rows of a trial: points of curves as they are computed, then the result. The entries
            of the trial are added to every row.
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
    """The names of all experiments."""
    return [module.rpartition(".")[2].replace("_", "-") for module in EXPERIMENTS]


def module_of(name: str) -> str:
    """The module of the experiment with this name."""
    return EXPERIMENTS[names().index(name)]


def find(name: str) -> Experiment[Any]:
    """The experiment with this name. Its module is imported now, and not earlier."""
    experiment: Experiment[Any] = importlib.import_module(module_of(name)).EXPERIMENT
    return experiment
