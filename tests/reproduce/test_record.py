"""`python -m reproduce` with damaged files, other versions, two runs, dead workers."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import khot
from reproduce.harness import files, record
from toy import done, home, invoke, rows, said

GARBAGE = bytes((i * 151 + 7) % 256 for i in range(300))  # starts no UTF-8 text, no zip file and no pickle


def edit(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what computed the trials, those that are done and those that are not."""
    lines = done(out)
    for line in lines:
        change(line["by"])
    if lines:
        (home(out) / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in home(out).glob("checkpoints/*"):
        found = torch.load(path, weights_only=True)
        change(found["by"])
        torch.save(found, path)


def content(out: Path) -> dict[str, bytes]:
    """All files of a run."""
    return {str(path): path.read_bytes() for path in home(out).rglob("*") if path.is_file()}


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "garbage": ("trials.jsonl", lambda old: GARBAGE),
    "half a line": ("trials.jsonl", lambda old: old[:200] + b"\n" + old[-200:]),
    "no rows": ("trials.jsonl", lambda old: old.replace(b'"rows"', b'"lines"', 1)),
    "cut": ("checkpoints/method=a_seed=0.pt", lambda old: old[: len(old) // 2]),
    "a pickle": ("checkpoints/method=a_seed=0.pt", lambda old: pickle.dumps({"call": os.getcwd})),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_file_is_named_in_one_line(toy: Path, out: Path, case: str) -> None:
    """And nothing is changed. (A checkpoint that fits no trial is found when its trial starts.)"""
    name, damage = DAMAGE[case]
    if "checkpoint" in name:
        (toy / "stop").write_text("2")
        assert invoke(out).exit_code == 130
        (toy / "stop").unlink()
    else:
        assert invoke(out).exit_code == 0
    path = home(out) / name
    path.write_bytes(damage(path.read_bytes()))
    before = content(out)
    told = said(invoke(out, "--seeds", "3"))
    assert told.startswith(f"reproduce: {path}: ")
    assert any(advice in told for advice in ("restore a copy", "delete it, and", "delete that line")), told
    assert before.items() <= content(out).items()


OTHERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "khot": (lambda c: c.update(khot="0.0.9"), f"khot = 0.0.9, not {khot.__version__}"),
    "an argument and torch": (
        lambda c: (c["args"].update(count=7), c.update(torch="2.9.0")),
        f"count = 7, not 4, torch = 2.9.0, not {torch.__version__}",
    ),
}


@pytest.mark.parametrize(("case", "unfinished"), [("khot", True), ("an argument and torch", False)])
def test_refuses_to_mix_what_differs_and_names_it(toy: Path, out: Path, case: str, unfinished: bool) -> None:
    change, message = OTHERS[case]
    (toy / "stop").write_text("2" if unfinished else "")
    assert invoke(out).exit_code == (130 if unfinished else 0)
    (toy / "stop").unlink()
    edit(out, change)
    before, old = content(out), done(out)
    told = said(invoke(out, "--seeds", "3"))
    assert f"{home(out)}: holds results with {message}; give another --out, or --force" in told
    assert content(out) == before

    run = invoke(out, "--seeds", "3", "--force")
    assert run.exit_code == 0, run.stderr
    assert done(out)[: len(old)] == old
    for new in done(out)[len(old) :]:
        assert (new["by"]["khot"], new["by"]["torch"]) == (khot.__version__, torch.__version__)
        assert new["by"]["args"]["count"] == 4
    report = (home(out) / "report.md").read_text()
    assert ("- earlier rows: khot " in report) == (not unfinished)
    assert ("device = cpu, count = 7" in report) == ("argument" in case and not unfinished)
    assert len(rows(out)) == 6 * 5


def test_force_is_given_once(toy: Path, out: Path) -> None:
    assert invoke(out).exit_code == 0
    assert invoke(out, "--count", "3", "--seeds", "3", "--force").exit_code == 0
    assert invoke(out, "--count", "3", "--seeds", "4").exit_code == 0
    assert "holds results with count = 3, not 4" in said(invoke(out, "--seeds", "4"))


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    written = [{"a": "x\u2028y", "b": np.float32(0.5), "c": 1, "method": "m"}, {"a": "\x85", "b": 1e-300}]
    trial = {"method": "m"}
    record.Record(tmp_path, {}, [trial], force=False).finish(trial, written, 1.0)
    found = record.Record(tmp_path, {}, [trial], force=False)
    assert not found.left
    assert found.rows() == [{**trial, **row} for row in written]
    assert [type(value) for value in found.rows()[0].values()] == [str, str, float, int]


def test_second_run_is_refused_and_changes_nothing(toy: Path, out: Path, whole: list[Any]) -> None:
    assert invoke(out).exit_code == 0
    before = content(out)
    with files.locked(home(out)):
        for more in ([], ["--force"], ["--seeds", "3"]):
            line = said(invoke(out, *more))
            assert line.startswith(f"reproduce: {home(out)}: in use by another run")
    assert content(out) == before
    assert invoke(out).exit_code == 0


def test_dead_workers_fail_their_own_trials_and_no_other(toy: Path, out: Path, tmp_path: Path) -> None:
    asked = ["--methods", "a,b,c", "--seeds", "1"]
    assert invoke(tmp_path / "other", *asked).exit_code == 0
    (toy / "die").write_text("a kill b exit")
    run = invoke(out, *asked, "--jobs", "2")
    assert run.exit_code == 1
    failed = [line for line in run.stderr.splitlines() if line.startswith("reproduce: failed: ")]
    again = "the same command runs it again"
    assert sorted(failed) == [
        f"reproduce: failed: toy-draw: method=a seed=0: its process was killed by SIGKILL; {again}",
        f"reproduce: failed: toy-draw: method=b seed=0: its process ended with exit code 3; {again}",
    ]
    assert rows(out) == [row for row in rows(tmp_path / "other") if dict(row)["method"] == "c"]
    (toy / "die").unlink()
    assert invoke(out, *asked).exit_code == 0
    assert rows(out) == rows(tmp_path / "other")


def test_replace_keeps_the_old_file_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.csv"
    files.replace(path, b"old")

    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(files.FileError, match="No space left on device"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["x.csv"]
