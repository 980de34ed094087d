"""Smoke runs of the experiments, each run once and read by every test that asks for it."""

from __future__ import annotations

import csv
import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from command import invoke
from reproduce.harness import study
from toy import out, toy, whole  # noqa: F401


@dataclass(frozen=True)
class Smoke:
    """What a smoke run left: its arguments, the rows of metrics.csv as text, and the folder."""

    args: study.Args
    rows: list[dict[str, str]]
    folder: Path

    @property
    def report(self) -> str:
        return (self.folder / "report.md").read_text(encoding="utf-8")

    def last(self, column: str, **where: str) -> float:
        """What the last row says that has these entries and that column."""
        found = [row for row in self.rows if row[column] and all(row[key] == where[key] for key in where)]
        return float(found[-1][column])


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Smoke]:
    """``smoke(name)`` is what ``python -m reproduce NAME --smoke`` leaves, for all workers."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "smoke"
    folder.mkdir(exist_ok=True)

    @functools.cache
    def one(name: str) -> Smoke:
        with warnings.catch_warnings(), FileLock(folder / f"{name}.lock"):
            # so few steps leave a layer soft, and it says so
            warnings.filterwarnings("ignore", ".* is not used as it was trained", UserWarning)
            if not (folder / name / "report.md").exists():  # which is written last
                run = invoke(name, "--smoke", "--out", folder)
                assert run.exit_code == 0, run.stderr
        experiment = study.find(name)
        with (folder / name / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return Smoke(experiment.Args(**experiment.smoke), rows, folder / name)

    return one
