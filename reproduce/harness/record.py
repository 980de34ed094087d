"""What a run leaves: the rows of its trials, which of them are done, and the versions that computed them.

metrics.csv has the rows. config.json has the arguments, the versions, and under ``rows`` the number of rows
of each finished trial. This number is written after the rows, and it is what marks a trial as done: a trial
without a number, or with another number of rows, runs again, and its new rows replace the old ones.
"""

from __future__ import annotations

import csv
import io
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
from reproduce.harness.study import ArgumentError, Checkpoint, Row, Trial

__all__ = ["VERSIONS", "Record", "belongs", "identify"]

# What config.json says about where rows were computed. Rows of different MUST_MATCH in one file need --force;
# differences in the others are only written down.
VERSIONS = ("khot", "torch", "python", "system", "kernels")
MUST_MATCH = ("khot", "torch")

# what else config.json has
COUNTS = ("cpu_seconds", "rows")
ENTRIES = {
    "args": dict,
    "columns": list,
    "earlier": list,
    **dict.fromkeys(COUNTS, dict),
    **dict.fromkeys(VERSIONS, str),
}


def identify(trial: Trial) -> str:
    """The name of a trial in config.json and in messages."""
    return " ".join(f"{key}={value}" for key, value in trial.items())


def belongs(row: Row, trial: Trial) -> bool:
    """Whether this is a row of the trial."""
    return all(str(row.get(key)) == str(value) for key, value in trial.items())


class Record:
    """The rows and the configuration in an experiment's folder.

    Nothing is written before a trial is left to run, so that a report can be written again by other versions
    and still names the versions that computed its rows.

    Args:
        folder: the experiment's own folder, whose lock is held.
        setting: the arguments that rows depend on.
        trials: the trials of this run.
        force: add to rows of other arguments or versions. config.json then has those under ``earlier``.

    Attributes:
        config: the contents of config.json.
        left: the trials that are not done.
        remark: a line to tell the user, or empty.

    Raises:
        ArgumentError: the folder has rows of other arguments or versions, and ``force`` is false.
        FileError: a file or a checkpoint is damaged, or cannot be read or written.
    """

    def __init__(self, folder: Path, setting: dict[str, Any], trials: list[Trial], *, force: bool) -> None:
        self.folder = folder
        self._columns, self._rows = _read_table(self._metrics)
        found = _read_config(self._config)
        if self._rows and not found:
            raise FileError(
                f"{self._config}: missing, although {self._metrics.name} has rows; restore a copy of it, or "
                "give another --out"
            )
        missing = [column for column in found.get("columns", []) if column not in self._columns]
        if missing and self._columns:
            raise _damaged(self._metrics, f"no column {', '.join(missing)}")
        marks, earlier = found.get("rows", {}), found.get("earlier", [])
        self.left = [trial for trial in trials if marks.get(identify(trial)) != len(self._rows_of(trial))]
        lost = [name for name in map(identify, self.left) if name in marks]
        told = f"{self._metrics}: has not all rows of {', '.join(lost)}; run again: {len(lost)} trials"
        self.remark = told if lost else ""

        self.config: dict[str, Any] = {"args": setting, **_versions()}
        held = bool(self._rows) or any(self.checkpoint(trial).exists() for trial in trials)
        if found and held:
            self._compare(found, force)
        for trial in self.left:
            Checkpoint(self.checkpoint(trial)).load()  # a damaged one is refused before any work is done
        if found and not self.left:
            self.config = found
            return
        if found and held:
            entry = {key: found[key] for key in VERSIONS}
            if found["args"] != setting:
                entry["args"] = found["args"]
            now = {key: self.config[key] for key in VERSIONS}
            if entry != now and entry not in earlier:
                earlier = [*earlier, entry]
        again = {identify(trial) for trial in self.left}
        self.config |= {
            **({"earlier": earlier} if earlier else {}),
            "cpu_seconds": found.get("cpu_seconds", {}),
            "columns": self._columns,
            "rows": {name: count for name, count in marks.items() if name not in again},
        }
        self._save()

    @property
    def _config(self) -> Path:
        return self.folder / "config.json"

    @property
    def _metrics(self) -> Path:
        return self.folder / "metrics.csv"

    def checkpoint(self, trial: Trial) -> Path:
        """The file with the state of this trial while it is not done."""
        return self.folder / "checkpoints" / (re.sub(r"[^\w.=-]+", "_", identify(trial)) + ".pt")

    def finish(self, trial: Trial, rows: list[Row], seconds: float) -> None:
        """Keep the rows of a trial, then mark it as done."""
        self._rows = [*(row for row in self._rows if not belongs(row, trial)), *rows]
        # a column is never dropped: config.json says which ones there must be
        self._columns = list(dict.fromkeys([*self._columns, *(key for row in rows for key in row)]))
        _write_table(self._metrics, self._columns, self._rows)
        self.config["cpu_seconds"][identify(trial)] = round(seconds, 1)
        self.config["columns"] = self._columns
        self.config["rows"][identify(trial)] = len(self._rows_of(trial))
        self._save()
        path = self.checkpoint(trial)
        for file in (path, path.with_name(path.name + ".part")):
            file.unlink(missing_ok=True)

    def rows(self, without: list[Trial]) -> list[Row]:
        """The rows of metrics.csv, without those of some trials."""
        return [
            row for row in _read_table(self._metrics)[1] if not any(belongs(row, trial) for trial in without)
        ]

    def _rows_of(self, trial: Trial) -> list[Row]:
        return [row for row in self._rows if belongs(row, trial)]

    def _save(self) -> None:
        text = json.dumps(self.config, indent=1, ensure_ascii=False) + "\n"
        files.replace(self._config, text.encode())

    def _compare(self, found: dict[str, Any], force: bool) -> None:
        """Refuse to add to rows of other arguments or versions; a report alone may be of other versions."""
        pairs = [(key, found["args"].get(key), value) for key, value in self.config["args"].items()]
        if self.left:
            pairs += [(key, found[key], self.config[key]) for key in MUST_MATCH]
        other = [f"{key} = {old}, not {new}" for key, old, new in pairs if old != new]
        if other and not force:
            raise ArgumentError(
                f"{self.folder}: holds results with {', '.join(other)}; give another --out, or --force to "
                "continue nevertheless"
            )


def _versions() -> dict[str, str]:
    return {
        "khot": khot.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, one thread per trial",
        "kernels": kernels.active()["cpu"],
    }


# --- files --------------------------------------------------------------------------------------------------


def _content(path: Path) -> str | None:
    """The text of a file, or None if there is no such file."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except UnicodeDecodeError:
        raise _damaged(path, "no UTF-8 text") from None


def _damaged(path: Path, reason: str) -> FileError:
    advice = "give another --out" if path.suffix == ".json" else "delete it, and its trials run again"
    return FileError(f"{path}: damaged ({reason}); restore a copy of it, or {advice}")


def _read_config(path: Path) -> dict[str, Any]:
    """The entries of config.json; none if there is no such file."""
    text = _content(path)
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise _damaged(path, "no object")
    entries: dict[str, Any] = {"earlier": [], **found}
    for key, kind in ENTRIES.items():
        if not isinstance(entries.get(key), kind):
            raise _damaged(path, f"no {kind.__name__} {key!r}")
    if not all(isinstance(value, (int, float)) for key in COUNTS for value in entries[key].values()):
        raise _damaged(path, f"what is no number in {' or '.join(COUNTS)}")
    return entries


def _read_table(path: Path) -> tuple[list[str], list[Row]]:
    """The columns of a CSV file and its rows. Numbers become int or float; a row has no empty cells."""
    text = _content(path)
    if text is None:
        return [], []
    if "\n" in text and not text.endswith("\n"):
        raise FileError(f"{path}: its last line is cut; delete that line, and its trial runs again")
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        columns, found = list(reader.fieldnames or []), list(reader)
    except csv.Error as error:
        raise _damaged(path, f"line {reader.line_num}: {error}") from None
    if not columns or not all(columns) or len(set(columns)) != len(columns) or "\n" not in text:
        raise _damaged(path, "no header of different names")
    for place, row in enumerate(found):
        if None in row or None in row.values():  # too many cells, or too few
            raise _damaged(path, f"row {place + 1} has not as many cells as the header")
    return columns, [{key: _parse(cell) for key, cell in row.items() if cell} for row in found]


def _parse(cell: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


def _write_table(path: Path, columns: list[str], rows: list[Row]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.replace(path, text.getvalue().encode())
