"""What a benchmark leaves behind: results that survive a stop, tables in Markdown, a plot.

Results are one JSON file, ``{"setting": ..., "cases": {id: ...}}``, written anew after each case. A run with
the same setting goes on where the last one stopped; any other starts from nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import khot
from benchmarks import timing
from khot import _kernels as kernels
from reproduce.harness.reporting import COLORS, label_ends, table

__all__ = [
    "Curves",
    "Results",
    "by_steps",
    "complete",
    "loglog",
    "machine",
    "megabytes",
    "parser",
    "peak_memory",
    "ratio",
    "resume",
    "said",
    "save",
    "table",
]

Results = dict[str, Any]


def machine(*, cpu_time: bool) -> dict[str, str]:
    """What the figures depend on, but for the name of the machine."""
    return {
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "time": "CPU time of one thread" if cpu_time else "wall time",
        "kernels": kernels.active()["cpu"],
        "khot": f"{khot.__version__} ({_revision()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def said(setting: Mapping[str, Any]) -> str:
    return "; ".join(f"{key}: {value}" for key, value in setting.items())


def parser(description: str, **defaults: float | Path) -> argparse.ArgumentParser:
    """The command line of a measurement on one thread, with --out, --steps, --seeds or --seconds."""
    torch.set_num_threads(1)
    made = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        made.add_argument(f"--{name}", type=type(default), default=default)
    return made


def by_steps(path: Path) -> list[Results]:
    """What :func:`complete` has left beside this file, for each number of steps."""
    found = [json.loads(file.read_text("utf-8")) for file in path.parent.glob(f"{path.stem}*.json")]
    return sorted(found, key=lambda results: results["setting"]["steps"])


def _processor() -> str:
    cores = torch.multiprocessing.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {cores} cores"


def _revision() -> str:
    """The commit, with "-dirty" if the working tree differs from it; where there is no git, what
    KHOT_REVISION says."""
    if "KHOT_REVISION" in os.environ:
        return os.environ["KHOT_REVISION"]
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown revision"


def resume(path: Path, setting: Mapping[str, Any]) -> Results:
    """The results so far, if they were made with this setting; else empty ones."""
    if path.exists():
        found: Results = json.loads(path.read_text(encoding="utf-8"))
        if found.get("setting") == setting:
            return found
    return {"setting": dict(setting), "cases": {}}


def save(path: Path, results: Results) -> None:
    """Write another file and move it into place, so that a stop never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def complete(
    out: Path,
    setting: Mapping[str, Any],
    todo: Mapping[str, Callable[[], Any]],
    write: Callable[[Path, Results], None],
    stem: str = "",
) -> None:
    """Measure the cases that are not there yet, with a bar, and write all there is after each of them, to out
    and, with ``stem`` behind its name, as JSON. A stopped run goes on from there."""
    from rich.progress import track  # imported late: some benchmarks run on machines that have torch alone

    path = out.with_stem(out.stem + stem).with_suffix(".json")
    results = resume(path, setting)
    for case, measure in track(todo.items()):
        if case not in results["cases"]:
            results["cases"][case] = measure()
            save(path, results)
            write(out, results)
            print(case, flush=True)
    print(out.read_text(encoding="utf-8"))


def ratio(value: float) -> str:
    """Three digits below 10, none behind the point from 100."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def peak_memory(call: timing.Call) -> int | None:
    """:func:`timing.peak_memory` in a process of its own, because what earlier calls left in the heap of one
    process changed the figures. It has one thread, because OpenMP's others do not come along, and it would
    wait for them for ever."""
    context = multiprocessing.get_context("fork")
    theirs, ours = context.Pipe()
    process = context.Process(target=lambda: theirs.send(timing.peak_memory(call)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        process.start()
    finally:
        torch.set_num_threads(threads)
    process.join()
    if process.exitcode:
        raise SystemExit(f"the memory of a call could not be measured: exit code {process.exitcode}")
    size: int | None = ours.recv()
    return size


def megabytes(size: int | None) -> str:
    """For a table. The accuracy of the measurement is about 0.1 MB."""
    return "" if size is None else "< 0.1" if size < 1e5 else f"{size / 1e6:,.1f}"


Curves = Mapping[str, Sequence[tuple[float, float]]]


def loglog(
    path: Path, panels: Mapping[str, Curves], x_label: str, first: Sequence[str], caption: str = ""
) -> None:
    """One panel for each title, one line for each name, which stands at its end: those in ``first`` drawn
    through, the others dashed. Names have the same color in all panels, so there may be six of them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colors = dict(zip(names, COLORS[:6], strict=False))
    # panels lie below each other, so that they can be read on a phone
    figure, axes = plt.subplots(len(panels), 1, figsize=(7, 4.4 * len(panels)), squeeze=False)
    for axis, (title, curves) in zip(axes[:, 0], panels.items(), strict=True):
        ends = {}
        for name, color in colors.items():
            points = [(x, y) for x, y in curves.get(name, ()) if y > 0]
            if points:
                line = ".-" if name in first else ".--"
                axis.loglog(*zip(*points, strict=True), line, color=color)
                ends[name] = (*points[-1], color)
        axis.set_title(title, loc="left")
        axis.set_xlabel(x_label)
        axis.grid(True, which="major", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.2)  # names that make room for each other stay below the title
        label_ends(axis, ends)
    if caption:
        figure.text(0.01, -0.01, textwrap.fill(caption, 110), fontsize=8, va="top", color="0.35")
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
