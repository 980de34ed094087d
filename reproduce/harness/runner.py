"""Runs the trials of an experiment, keeps their rows, and writes the report, for ``python -m reproduce``.

Trials run one after the other, or in parallel processes. Each trial is seeded and uses one thread, so that
another run gives the same figures. The experiment's folder contains

    trials.jsonl    the trials that are done, with their rows; those are not run again
    checkpoints/    the state of unfinished trials, from which the same command continues
    notes.md        optional, written by hand: a discussion of the figures, which becomes part of the report
    metrics.csv     the rows of all trials
    report.md       our figures next to the paper's, with plots

One run at a time holds the lock of the folder.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from reproduce.harness import files, study, training
from reproduce.harness.files import FileError
from reproduce.harness.record import VERSIONS, Record, identify
from reproduce.harness.study import Args, ArgumentError, By, Checkpoint, Experiment, Row, Trial

__all__ = ["reproduce"]


class _Outcome(NamedTuple):
    rows: list[Row]
    seconds: float
    error: str  # a traceback, a line, or empty


def reproduce(
    name: str, args: Args, out: Path, *, jobs: int = 1, command: str = "", force: bool = False
) -> tuple[str, list[str]]:
    """Run the trials that are not finished, and write the report.

    Args:
        name: the name of the experiment.
        args: its arguments.
        out: the folder for results; the experiment's own folder in it has the experiment's name.
        jobs: the number of parallel processes for trials.
        command: the command that was typed, which the report names.
        force: continue in a folder with results of other arguments or versions.

    Returns:
        The part of the report about the result, in Markdown (empty if there are no rows), and one line for
        each trial that failed.

    Raises:
        ArgumentError: jobs < 1, or the folder has results of other arguments or versions, or cannot be
            written to.
        DataError: a file of ``args.data_dir`` is missing or broken.
        FileError: another run uses the folder, or a file in it is damaged or cannot be read or written.
    """
    if jobs < 1:
        raise ArgumentError(f"jobs = {jobs}: expected at least 1")
    experiment, folder = study.find(name), out / name
    if experiment.needs == "MNIST":
        training.images(args)
    trials = experiment.trials(args)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.locked(folder))
        except OSError as error:
            raise ArgumentError(f"out: {folder} cannot be written to ({error.strerror})") from None
        return _run(name, experiment, args, trials, folder, jobs, command, force)


def _run(
    name: str,
    experiment: Experiment[Any],
    args: Args,
    trials: list[Trial],
    folder: Path,
    jobs: int,
    command: str,
    force: bool,
) -> tuple[str, list[str]]:
    """What :func:`reproduce` does while it holds the lock."""
    setting = args.setting()
    if experiment.needs != "MNIST":
        del setting["dataset"]
    record = Record(folder, setting, trials, force=force)
    failed: list[str] = []
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[now]}"), console=Console(stderr=True)) as progress:
        done = len(trials) - len(record.left)
        task = progress.add_task(name, total=len(trials), completed=done, now="")

        def tell(row: Row) -> None:
            progress.update(task, now=", ".join(f"{key} {_short(value)}" for key, value in row.items()))

        # closed at once if a file cannot be written: no other process goes on
        with closing(_outcomes(name, args, record, jobs, tell)) as outcomes:
            for trial, outcome in outcomes:
                if outcome.error:
                    *trace, last = outcome.error.splitlines()
                    failed.append(f"{name}: {identify(trial)}: {last}")
                    if trace:
                        print(outcome.error, file=sys.stderr)
                else:
                    record.finish(trial, outcome.rows, outcome.seconds)
                progress.advance(task)
        progress.update(task, now="")

    with suppress(OSError):  # the folder does not exist, or is not empty
        (folder / "checkpoints").rmdir()
    rows = record.rows()
    if not rows:
        return "", failed
    _write_table(folder / "metrics.csv", rows)
    try:
        body = experiment.report(args, rows, folder)
    except OSError as error:
        raise files.unwritable(Path(error.filename or folder), error) from None
    except Exception as error:
        traceback.print_exc()
        return "", [*failed, f"{name}: report: {type(error).__name__}: {error}"]
    _write_report(name, body, folder, record, command)
    return body, failed


def _outcomes(
    name: str, args: Args, record: Record, jobs: int, tell: Callable[[Row], None]
) -> Generator[tuple[Trial, _Outcome], None, None]:
    """Each trial that is left with its outcome, in the order in which they finish."""
    # another process is given the module: its own table of experiments may be a different one
    module = study.module_of(name)
    if jobs > 1 and len(record.left) > 1:
        yield from _in_parallel(module, args, record, jobs, tell)
        return
    for trial in record.left:
        yield trial, _work(module, args, trial, record.kept(trial), tell)


def _work(
    module: str, args: Args, trial: Trial, kept: tuple[Path, By], tell: Callable[[Row], None] | None = None
) -> _Outcome:
    """Run one trial; if it raises an exception, the outcome holds the traceback.

    Raises:
        FileError: a checkpoint is damaged or cannot be written, which would befall the other trials, too.
    """
    checkpoint = Checkpoint(*kept)
    try:
        experiment = importlib.import_module(module).EXPERIMENT
        with training.one_thread(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(trial.get("seed", 0)))
            for row in experiment.run(args, trial, checkpoint):
                checkpoint.rows.append({**trial, **row})
                if tell is not None:
                    tell(checkpoint.rows[-1])
    except FileError:
        raise
    except Exception:
        return _Outcome([], checkpoint.clock(), traceback.format_exc())
    return _Outcome(checkpoint.rows, checkpoint.clock(), "")


def _short(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- processes ----------------------------------------------------------------------------------------------


def _in_parallel(
    module: str, args: Args, record: Record, jobs: int, tell: Callable[[Row], None]
) -> Generator[tuple[Trial, _Outcome], None, None]:
    """Each trial in a process of its own. If one dies, only its trial is lost."""
    context = get_context("spawn")  # a forked process would share the state of torch's threads
    waiting = deque(record.left)
    running: dict[connection.Connection, tuple[SpawnProcess, Trial]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                trial = waiting.popleft()
                end, theirs = context.Pipe(duplex=False)
                work = (theirs, module, args, trial, record.kept(trial))
                process = context.Process(target=_serve, args=work)
                process.start()
                theirs.close()  # so that the connection ends with the process
                running[end] = process, trial
            ready = connection.wait(list(running))
            for end in [end for end in running if end in ready]:
                process, trial = running.pop(end)
                outcome = _receive(end, process)
                tell(trial)
                yield trial, outcome
    finally:  # after a stop no trial goes on
        for process, _ in running.values():
            process.terminate()
            process.join()


def _serve(
    reply: connection.Connection, module: str, args: Args, trial: Trial, kept: tuple[Path, By]
) -> None:
    """Run the trial, and send its outcome, or what stops the whole run."""
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    try:
        reply.send(_work(module, args, trial, kept))
    except (FileError, KeyboardInterrupt) as error:
        reply.send(error)


def _end_with(sentinel: int) -> None:
    """End this process when the other one ends: it no longer holds the lock under which this one writes."""
    connection.wait([sentinel])
    os._exit(1)


def _receive(end: connection.Connection, process: BaseProcess) -> _Outcome:
    """The outcome that the process sent. What stops a whole run is raised here."""
    with end:
        try:
            reply: _Outcome | BaseException = end.recv()
        except (EOFError, OSError):  # the process died
            process.join()
            code = process.exitcode or 0
            killer = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
            how = f"was killed by {killer}" if code < 0 else f"ended with exit code {code}"
            return _Outcome([], 0.0, f"its process {how}; the same command runs it again")
    process.join()
    if isinstance(reply, BaseException):
        raise reply
    return reply


# --- the report ---------------------------------------------------------------------------------------------


def _write_table(path: Path, rows: list[Row]) -> None:
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.replace(path, text.getvalue().encode())


def _write_report(name: str, body: str, folder: Path, record: Record, command: str) -> None:
    """The report; its setting has the versions and arguments of the last trial, and others after them."""
    experiment = study.find(name)
    title, _, text = (sys.modules[experiment.run.__module__].__doc__ or "").partition("\n")
    notes = folder / "notes.md"
    by = record.lines[-1]["by"]
    settings = [f"- arguments: {_arguments(by['args'])}", *(f"- {key}: {by[key]}" for key in VERSIONS)]
    earlier = []
    for other in (line["by"] for line in record.lines):
        if other != by and other not in earlier:  # --force has added to its rows
            earlier.append(other)
            parts = [f"{key} {other[key]}" for key in VERSIONS]
            parts += [f"arguments {_arguments(other['args'])}"] if other["args"] != by["args"] else []
            settings.append(f"- earlier rows: {', '.join(parts)}")
    minutes = sum(line["cpu_seconds"] for line in record.lines) / 60
    settings.append(f"- time: {minutes:.1f} minutes of one core, {len(record.lines)} trials")
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
        "\n".join(settings),
        "All figures are in [metrics.csv](metrics.csv), what computed them in [trials.jsonl](trials.jsonl).",
    ]
    files.replace(folder / "report.md", ("\n\n".join(lines) + "\n").encode())


def _arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {_plain(value)}" for key, value in values.items())


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
