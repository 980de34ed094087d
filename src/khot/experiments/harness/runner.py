"""Runs the trials of an experiment, keeps their rows, and writes the report, for ``khot reproduce``.

Trials run one after the other, or in parallel processes. Each trial is seeded and uses one thread, so that
another run gives the same figures. The experiment's folder contains

    metrics.csv     the rows of the finished trials, which are not run again
    checkpoints/    the state of unfinished trials, from which the same command continues
    config.json     the arguments and versions
    notes.md        optional, written by hand: a discussion of the figures, which becomes part of the report
    report.md       our figures next to the paper's, with plots
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import khot
from khot import _kernels as kernels
from khot.experiments.harness import study, training
from khot.experiments.harness.study import Args, ArgumentError, Checkpoint, Experiment, Row, Trial

__all__ = ["reproduce"]


class _Outcome(NamedTuple):
    rows: list[Row]
    seconds: float
    error: str  # a traceback, or empty


def reproduce(name: str, args: Args, out: Path, *, jobs: int = 1, command: str = "") -> tuple[str, list[str]]:
    """Run the trials that are not finished, and write the report.

    Args:
        name: the name of the experiment.
        args: its arguments.
        out: the folder for results; the experiment's own folder in it has the experiment's name.
        jobs: the number of parallel processes for trials.
        command: the command that was typed, which the report names.

    Returns:
        The part of the report about the result, in Markdown (empty if there are no rows), and one line for
        each trial that failed.

    Raises:
        ArgumentError: jobs < 1, or the folder has results of other arguments or cannot be written to.
        DataError: a file of ``args.data_dir`` is missing or broken.
    """
    if jobs < 1:
        raise ArgumentError(f"jobs = {jobs}: expected at least 1")
    experiment, folder = study.find(name), out / name
    if experiment.needs == "MNIST":
        training.images(args)
    trials = experiment.trials(args)
    config = _settle(folder, experiment, args)
    metrics = folder / "metrics.csv"
    done = {_id(trial) for trial in trials if any(_of(trial, row) for row in _read(metrics))}
    left = [trial for trial in trials if _id(trial) not in done]

    failed = []
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[now]}"), console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=len(trials), completed=len(done), now="")

        def tell(row: Row) -> None:
            progress.update(task, now=", ".join(f"{key} {_short(value)}" for key, value in row.items()))

        for trial, outcome in _outcomes(name, args, left, folder, jobs, tell):
            if outcome.error:
                failed.append(f"{name}: {_id(trial)}: {outcome.error.splitlines()[-1]}")
                print(outcome.error, file=sys.stderr)
            else:
                _write(metrics, [*_read(metrics), *outcome.rows])
                config["cpu_seconds"][_id(trial)] = round(outcome.seconds, 1)
                _save_json(folder / "config.json", config)
                _checkpoint(folder, trial).unlink(missing_ok=True)
            progress.advance(task)
        progress.update(task, now="")

    with suppress(OSError):  # the folder does not exist, or is not empty
        (folder / "checkpoints").rmdir()
    rows = _read(metrics)
    if not rows:
        return "", failed
    try:
        body = experiment.report(args, rows, folder)
    except Exception as error:
        traceback.print_exc()
        return "", [*failed, f"{name}: report: {type(error).__name__}: {error}"]
    _write_report(name, body, folder, config, command)
    return body, failed


def _outcomes(
    name: str, args: Args, trials: list[Trial], folder: Path, jobs: int, tell: Callable[[Row], None]
) -> Iterator[tuple[Trial, _Outcome]]:
    """Each trial with its outcome, in the order in which they finish."""
    # another process is given the module: its own table of experiments may be a different one
    module = study.module_of(name)
    if jobs == 1 or len(trials) < 2:
        for trial in trials:
            yield trial, _work(module, args, trial, _checkpoint(folder, trial), tell)
        return
    # spawned: a forked process would share the state of torch's threads
    with ProcessPoolExecutor(min(jobs, len(trials)), get_context("spawn")) as pool:
        running = {
            pool.submit(_work, module, args, trial, _checkpoint(folder, trial)): trial for trial in trials
        }
        try:
            for future in as_completed(running):
                try:
                    outcome = future.result()
                except Exception as error:  # the process died
                    outcome = _Outcome([], 0.0, f"{type(error).__name__}: {error}")
                tell(running[future])
                yield running[future], outcome
        finally:  # after a stop no further trial starts
            pool.shutdown(cancel_futures=True)


def _work(
    module: str, args: Args, trial: Trial, path: Path, tell: Callable[[Row], None] | None = None
) -> _Outcome:
    """Run one trial; if it raises an exception, the outcome holds the traceback."""
    experiment = importlib.import_module(module).EXPERIMENT
    checkpoint = Checkpoint(path)
    try:
        with training.one_thread(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(trial.get("seed", 0)))
            for row in experiment.run(args, trial, checkpoint):
                checkpoint.rows.append({**trial, **row})
                if tell is not None:
                    tell(checkpoint.rows[-1])
    except Exception:
        return _Outcome([], checkpoint.clock(), traceback.format_exc())
    return _Outcome(checkpoint.rows, checkpoint.clock(), "")


def _id(trial: Trial) -> str:
    return " ".join(f"{key}={value}" for key, value in trial.items())


def _of(trial: Trial, row: Row) -> bool:
    return all(str(row.get(key)) == str(value) for key, value in trial.items())


def _checkpoint(folder: Path, trial: Trial) -> Path:
    return folder / "checkpoints" / (re.sub(r"[^\w.=-]+", "_", _id(trial)) + ".pt")


def _short(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- files --------------------------------------------------------------------------------------------------


def _settle(folder: Path, experiment: Experiment[Any], args: Args) -> dict[str, Any]:
    """Write config.json and return its contents. Refuse a folder with results of other arguments."""
    path, setting = folder / "config.json", args.setting()
    if experiment.needs != "MNIST":
        del setting["dataset"]
    seconds = {}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        other = [
            f"{key} = {found['args'].get(key)}, not {value}"
            for key, value in setting.items()
            if found["args"].get(key) != value
        ]
        if other:
            raise ArgumentError(f"{folder}: holds results with {', '.join(other)}; give another --out")
        seconds = found["cpu_seconds"]
    config = {
        "args": setting,
        "khot": khot.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, one thread per trial",
        "kernels": kernels.active()["cpu"],
        "cpu_seconds": seconds,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _save_json(path, config)
    except OSError as error:
        raise ArgumentError(f"out: {folder} cannot be written to ({error.strerror})") from None
    return config


def _save_json(path: Path, content: Any) -> None:
    _replace(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _replace(path: Path, text: str) -> None:
    """Write another file and move it into place, so that a stop never leaves half a file."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8", newline="")
    part.replace(path)


def _read(path: Path) -> list[Row]:
    """The rows of a CSV file. Numbers become int or float; a row has no entry for an empty cell."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: _parse(cell) for key, cell in row.items() if cell} for row in csv.DictReader(file)]


def _parse(cell: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


def _write(path: Path, rows: list[Row]) -> None:
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _replace(path, text.getvalue())


def _write_report(name: str, body: str, folder: Path, config: dict[str, Any], command: str) -> None:
    experiment = study.find(name)
    title, _, text = (sys.modules[experiment.run.__module__].__doc__ or "").partition("\n")
    notes = folder / "notes.md"
    minutes = sum(config["cpu_seconds"].values()) / 60
    setting = {key: value for key, value in config.items() if key != "cpu_seconds"}
    arguments = ", ".join(f"{key} = {_plain(value)}" for key, value in setting.pop("args").items())
    lines = [
        f"# {title}",
        f"Written by `{command}`, from {experiment.source}:",
        "\n".join(f"- {key}: {paper}" for key, paper in study.PAPERS.items() if key in experiment.source),
        "## Result",
        body.strip(),
        *(["## Discussion", notes.read_text(encoding="utf-8").strip()] if notes.exists() else []),
        "## What was done",
        text.strip("\n"),
        "## Setting",
        f"- arguments: {arguments}\n"
        + "\n".join(f"- {key}: {value}" for key, value in setting.items())
        + f"\n- time: {minutes:.1f} minutes of one core, {len(config['cpu_seconds'])} trials",
        "All figures are in [metrics.csv](metrics.csv); the configuration is in [config.json](config.json).",
    ]
    _replace(folder / "report.md", "\n\n".join(lines) + "\n")


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
