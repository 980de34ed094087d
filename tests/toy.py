"""An experiment of milliseconds, in a file, so that other processes can import it, and what its runs leave.

Files beside it say what goes wrong: "stop" names a step at which every trial is interrupted, and "die"
methods and how each ends ("a exit b kill c raise"), or "report raise"; while "wait" is there, trials wait.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import command
from command import Run
from reproduce.harness import study, training

SOURCE = '''
"""Numbers are drawn.

By two methods. It departs from no paper.
"""

import os, signal, time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from reproduce.harness import reporting, study, training

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Args(study.Args):
    count: int = field(default=4, metadata={"help": "Steps."})
    rate: float = field(default=0.1, metadata={"help": "Learning rate."})
    methods: tuple[str, ...] = field(default=("a", "b"), metadata={"help": "Which.", "selects": True})
    ks: tuple[int, ...] = field(default=(1, 2), metadata={"help": "Sizes."})


def trials(args):
    return [{"method": m, "seed": s} for s in range(args.seeds) for m in args.methods]


def said(name):
    return (HERE / name).read_text().split() if (HERE / name).exists() else []


def run(args, trial, checkpoint):
    method = trial["method"]
    images = training.images(args).train_images if method == "images" else torch.zeros(9, 1)
    model = torch.nn.Linear(3, 1)
    kind = torch.optim.SGD if method == "a" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=args.rate)
    for step in training.steps(checkpoint, {"model": model, "optimizer": optimizer}, args.count):
        how = dict(zip(said("die")[::2], said("die")[1::2])).get(method)
        if how == "raise":
            raise RuntimeError("no luck")
        if how:
            os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
        (HERE / f"pid-{method}").write_text(str(os.getpid()))
        while (HERE / "wait").exists():
            time.sleep(0.02)
        if str(step) in said("stop"):
            raise KeyboardInterrupt
        batch = training.minibatches(len(images), 8, step, trial["seed"])
        loss = (model(torch.randn(8, 3)) - images[batch, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield {"step": step, "loss": loss.item()}
    yield {"final": loss.item(), "word": "here, and there"}


def report(args, rows, folder):
    if said("die")[:1] == ["report"]:
        raise RuntimeError("no paper")
    (folder / "plot.png").write_bytes(b"plot")
    cells = [(row["method"], str(row["final"])) for row in rows if "final" in row]
    return reporting.table(("method", "final"), cells)


EXPERIMENT = study.Experiment(
    source="sigmoid-topk, Table 0",
    needs="MNIST",
    takes="a moment",
    Args=Args,
    smoke={"seeds": 2},
    trials=trials,
    run=run,
    report=report,
)
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the toy experiment, which is the only one, and saves its state after every step."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "toy_draw.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(study, "EXPERIMENTS", ("toy_draw",))
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    yield folder
    sys.modules.pop("toy_draw", None)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def whole(toy: Path, tmp_path: Path) -> list[Any]:
    """The rows of a run to which nothing happened."""
    assert invoke(tmp_path / "whole").exit_code == 0
    found = rows(tmp_path / "whole")
    assert len(found) == 4 * 5
    return found


def invoke(out: Path, *more: str) -> Run:
    return command.invoke("toy-draw", "--smoke", "--out", out, *more)


def home(out: Path) -> Path:
    return out / "toy-draw"


def done(out: Path) -> list[dict[str, Any]]:
    """The trials that are done."""
    path = home(out) / "trials.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(out: Path) -> list[tuple[tuple[str, str], ...]]:
    """The rows, in an order that does not depend on when the trials ran."""
    with (home(out) / "metrics.csv").open(newline="") as file:
        return sorted(tuple(sorted(row.items())) for row in csv.DictReader(file))


def said(run: Run) -> str:
    """The one line of a run that ends with exit code 2."""
    assert run.exit_code == 2, run.stderr
    assert "Traceback" not in run.stderr
    lines = [line for line in run.stderr.splitlines() if "reproduce: " in line]
    assert len(lines) == 1, run.stderr
    return lines[0]
