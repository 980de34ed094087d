"""The trials of an experiment that are done: what they found, and what computed it.

``trials.jsonl`` has a line of JSON for each of them: the trial, its rows, the CPU seconds that it took, and
under ``by`` the versions and the arguments. A trial is done if it has a line. Any other one runs.
"""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import khot
from khot import _kernels as kernels
from reproduce.harness import files
from reproduce.harness.files import FileError
from reproduce.harness.study import ArgumentError, By, Checkpoint, Row, Trial

__all__ = ["VERSIONS", "Record", "identify"]

# What computed a trial, or ended one that was stopped. Different MUST_MATCH in one file need --force; other
# differences are only written down.
VERSIONS = ("khot", "torch", "python", "system", "kernels")
MUST_MATCH = ("khot", "torch")

# the entries of a line
ENTRIES: dict[str, type | tuple[type, ...]] = {
    "trial": dict,
    "rows": list,
    "cpu_seconds": (int, float),
    "by": dict,
}


def identify(trial: Trial) -> str:
    """The name of a trial in messages."""
    return " ".join(f"{key}={value}" for key, value in trial.items())


class Record:
    """The trials in an experiment's folder that are done.

    Args:
        folder: the experiment's own folder, whose lock is held.
        setting: the arguments that rows depend on.
        trials: the trials of this run.
        force: add to trials of other arguments or versions. Of these, what is not finished starts again.

    Attributes:
        lines: what ``trials.jsonl`` has, in the order in which the trials ended.
        left: the trials that are not done.

    Raises:
        ArgumentError: the folder has trials of other arguments or versions, and ``force`` is false.
        FileError: a file or a checkpoint is damaged, or cannot be read or written.
    """

    def __init__(self, folder: Path, setting: dict[str, Any], trials: list[Trial], *, force: bool) -> None:
        self.folder = folder
        self._by: By = {**_versions(), "args": setting}
        self.lines = _read(self._path)
        if not self.lines and (folder / "metrics.csv").exists():
            advice = "restore a copy of it, or give another --out"
            raise FileError(f"{self._path}: missing, although metrics.csv has rows; {advice}")
        done = [line["trial"] for line in self.lines]
        self.left = [trial for trial in trials if trial not in done]
        # a damaged checkpoint is refused before any work is done
        begun = [Checkpoint(*self.kept(trial)) for trial in self.left]
        others = [line["by"] for line in self.lines[-1:]]
        others += [checkpoint.by for checkpoint in begun if checkpoint.load() is not None]
        different = dict.fromkeys(words for by in others for words in self._differences(by))
        if different and not force:
            raise ArgumentError(
                f"{self.folder}: holds results with {', '.join(different)}; "
                "give another --out, or --force to continue nevertheless"
            )
        for checkpoint in begun:
            if self._differences(checkpoint.by):
                checkpoint.path.unlink()

    @property
    def _path(self) -> Path:
        return self.folder / "trials.jsonl"

    def kept(self, trial: Trial) -> tuple[Path, By]:
        """The file with the state of this trial while it is not done, and what computes it."""
        name = re.sub(r"[^\w.=-]+", "_", identify(trial)) + ".pt"
        return self.folder / "checkpoints" / name, self._by

    def finish(self, trial: Trial, rows: list[Row], seconds: float) -> None:
        """Keep the rows of a trial, which is done with that."""
        own = [{key: row[key] for key in row if key not in trial or row[key] != trial[key]} for row in rows]
        self.lines.append({"trial": trial, "cpu_seconds": round(seconds, 1), "by": self._by, "rows": own})
        text = "".join(json.dumps(line, ensure_ascii=False, default=float) + "\n" for line in self.lines)
        files.replace(self._path, text.encode())
        path, _ = self.kept(trial)
        for file in (path, path.with_name(path.name + ".part")):
            file.unlink(missing_ok=True)

    def rows(self) -> list[Row]:
        """The rows of all trials that are done, with the entries of their trials."""
        return [{**line["trial"], **row} for line in self.lines for row in line["rows"]]

    def _differences(self, by: By) -> list[str]:
        """Why trials of this cannot be added to others; a report alone may be of other versions."""
        pairs = [(key, by.get("args", {}).get(key), value) for key, value in self._by["args"].items()]
        if self.left:
            pairs += [(key, by.get(key), self._by[key]) for key in MUST_MATCH]
        return [f"{key} = {old}, not {new}" for key, old, new in pairs if old != new]


def _versions() -> dict[str, str]:
    return {
        "khot": khot.__version__,
        "torch": str(torch.__version__),  # which is a class of its own
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, one thread per trial",
        "kernels": kernels.active()["cpu"],
    }


def _read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, none if there is no such file."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except UnicodeDecodeError:
        raise FileError(f"{path}: damaged (no UTF-8 text); restore a copy of it, or delete it") from None
    found = []
    for place, line in enumerate(text.removesuffix("\n").split("\n") if text else [], start=1):
        try:
            found.append(json.loads(line))
            _check(found[-1])
        except (ValueError, RecursionError) as error:
            advice = "delete that line, and its trial runs again"
            raise FileError(f"{path}: line {place} is damaged ({error}); {advice}") from None
    return found


def _check(line: Any) -> None:
    """Raise ValueError for what is no line of a trial."""
    if not isinstance(line, dict):
        raise ValueError("no object")
    wrong = [key for key, kind in ENTRIES.items() if not isinstance(line.get(key), kind)]
    if not wrong:
        wrong = [key for key in VERSIONS if not isinstance(line["by"].get(key), str)]
        wrong += [] if isinstance(line["by"].get("args"), dict) else ["args"]
        wrong += [] if all(isinstance(row, dict) for row in line["rows"]) else ["rows"]
    if wrong:
        raise ValueError(f"no {', '.join(wrong)}")
