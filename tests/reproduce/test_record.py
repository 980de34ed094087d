"""`python -m reproduce` with damaged files, a full disk, other versions, two runs, kills, dead workers."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import khot
from reproduce.harness import files, record, runner, study
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


# --- damaged files ------------------------------------------------------------------------------------------


def altered_line(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """The file with its second line changed."""

    def changed(old: bytes) -> bytes:
        lines = old.decode().splitlines()
        found = json.loads(lines[1])
        change(found)
        return "\n".join([lines[0], json.dumps(found), *lines[2:], ""]).encode()

    return changed


def put(text: str) -> Callable[[bytes], bytes]:
    """The file with this as its second line."""
    return lambda old: b"\n".join([old.splitlines()[0], text.encode(), *old.splitlines()[2:], b""])


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def altered(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """A checkpoint that is changed."""

    def changed(old: bytes) -> bytes:
        found = torch.load(io.BytesIO(old), weights_only=True)
        change(found)
        return saved(found)

    return changed


DAMAGE: dict[str, dict[str, Callable[[bytes], bytes]]] = {
    "trials.jsonl": {
        "garbage": lambda old: GARBAGE,
        "half a line between others": lambda old: old[:200] + b"\n" + old[-200:],
        "an empty line": put(""),
        "a list": put("[]"),
        "deep": put("[" * 100_000),
        "no trial": altered_line(lambda found: found.pop("trial")),
        "a time that is no number": altered_line(lambda found: found.update(cpu_seconds="five")),
        "no rows": altered_line(lambda found: found.pop("rows")),
        "rows of numbers": altered_line(lambda found: found.update(rows=[1, 2])),
        "a version that is no text": altered_line(lambda found: found["by"].update(torch=2.13)),
        "by a list": altered_line(lambda found: found.update(by=[])),
    },
    "checkpoints/method=a_seed=0.pt": {
        "cut": lambda old: old[: len(old) // 2],
        "a pickle": lambda old: pickle.dumps({"state": {}, "rows": [], "seconds": 0.0, "call": os.getcwd}),
        "a list": lambda old: saved([1, 2]),
        "no rows": altered(lambda found: found.pop("rows")),
        "no step": altered(lambda found: found.update(state={})),
        "another model": altered(
            lambda found: found["state"]["state"].update(model={"weight": torch.ones(3)})
        ),
    },
}


@pytest.mark.parametrize(
    ("name", "damage"), [(name, damage) for name, kinds in DAMAGE.items() for damage in kinds]
)
def test_damaged_file_is_named_in_one_line(toy: Path, out: Path, name: str, damage: str) -> None:
    """And nothing is changed. (A checkpoint that fits no trial is found when its trial starts.)"""
    if "checkpoint" in name:
        (toy / "stop").write_text("2")
        assert invoke(out).exit_code == 130
        (toy / "stop").unlink()
    else:
        assert invoke(out).exit_code == 0
    path = home(out) / name
    path.write_bytes(DAMAGE[name][damage](path.read_bytes()))
    before = content(out)
    told = said(invoke(out, "--seeds", "3"))
    assert told.startswith(f"reproduce: {path}: ")
    assert any(advice in told for advice in ("restore a copy", "delete it, and", "delete that line")), told
    assert before.items() <= content(out).items()


def test_advice_for_a_damaged_line_helps(toy: Path, out: Path, whole: list[Any]) -> None:
    """Its trial runs again, and no other one."""
    assert invoke(out).exit_code == 0
    path = home(out) / "trials.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    (method, seed), cut = done(out)[1]["trial"].values(), lines[1][:-9] + "\n"
    path.write_text("".join([lines[0], cut, *lines[2:]]))
    assert "line 2 is damaged" in said(invoke(out))
    path.write_text("".join([lines[0], *lines[2:]]))
    # which would end this process if the other method was run again
    (toy / "die").write_text("b exit" if method == "a" else "a exit")
    assert invoke(out).exit_code == 0
    assert rows(out) == whole
    assert done(out)[-1]["trial"] == {"method": method, "seed": seed}


# --- full disks ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
@pytest.mark.parametrize("name", ["trials.jsonl", "plot.png"])
def test_full_disk_is_one_line_and_the_same_command_continues(
    toy: Path, out: Path, whole: list[Any], name: str
) -> None:
    path = home(out) / (name if name == "plot.png" else f"{name}.part")
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    line = said(invoke(out))
    assert line.startswith(f"reproduce: {home(out)}")
    assert "No space left on device" in line and "make room on the disk" in line
    path.unlink(missing_ok=True)
    assert invoke(out).exit_code == 0
    assert rows(out) == whole
    assert not list(home(out).rglob("*.part"))


class Reply:
    """The end of a pipe, which keeps what is sent as another process would receive it."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, value: object) -> None:
        self.sent.append(pickle.dumps(value))


@pytest.mark.parametrize(
    ("case", "raised"),
    [("damaged", files.FileError), ("full", files.FileError), ("stopped", KeyboardInterrupt)],
)
def test_what_stops_a_run_stops_it_from_a_worker(
    toy: Path, tmp_path: Path, case: str, raised: type[BaseException]
) -> None:
    path = tmp_path / "x.pt"
    if case == "damaged":
        path.write_bytes(GARBAGE)
    elif case == "full":
        (tmp_path / "x.pt.part").mkdir()  # cannot be written, either
    else:
        (toy / "stop").write_text("0")
    args = study.find("toy-draw").Args()
    reply = Reply()
    runner._serve(reply, "toy_draw", args, {"method": "a", "seed": 0}, (path, {}))  # type: ignore[arg-type]
    ours, theirs = multiprocessing.Pipe()
    for value in reply.sent:
        theirs.send_bytes(value)
    ended = multiprocessing.Process()
    ended.join = lambda: None  # type: ignore[method-assign, misc]
    with pytest.raises(raised) as caught:
        runner._receive(ours, ended)
    assert raised is KeyboardInterrupt or str(caught.value).startswith(f"{path}: ")


# --- stops --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def test_kill_after_any_write_duplicates_and_loses_nothing(
    toy: Path, tmp_path: Path, whole: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.replace
    left = 0

    def counted(path: Path, content: bytes) -> None:
        nonlocal left
        left -= 1
        write(path, content)
        if left == 0:
            raise Killed

    monkeypatch.setattr(files, "replace", counted)
    for place in range(1, 100):
        out, left = tmp_path / str(place), place
        try:
            assert invoke(out).exit_code == 0
        except Killed:
            left = 0
        else:
            break
        assert invoke(out).exit_code == 0
        assert rows(out) == whole, place
        assert [len(line["rows"]) for line in done(out)] == [5] * 4
    # per trial three checkpoints and its line; then the table and the report
    assert place == 4 * (3 + 1) + 2 + 1


# --- other versions and arguments ---------------------------------------------------------------------------

OTHERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "khot": (lambda c: c.update(khot="0.0.9"), f"khot = 0.0.9, not {khot.__version__}"),
    "an argument and torch": (
        lambda c: (c["args"].update(count=7), c.update(torch="2.9.0")),
        f"count = 7, not 4, torch = 2.9.0, not {torch.__version__}",
    ),
}


@pytest.mark.parametrize("unfinished", [False, True])
@pytest.mark.parametrize("case", OTHERS)
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


def test_rows_without_trials_are_not_replaced(toy: Path, out: Path) -> None:
    home(out).mkdir(parents=True)
    (home(out) / "metrics.csv").write_text("method,seed\na,0\n")
    before = content(out)
    assert "trials.jsonl: missing, although metrics.csv has rows" in said(invoke(out, "--force"))
    assert before.items() <= content(out).items()


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    written = [{"a": "x\u2028y", "b": np.float32(0.5), "c": 1, "method": "m"}, {"a": "\x85", "b": 1e-300}]
    trial = {"method": "m"}
    record.Record(tmp_path, {}, [trial], force=False).finish(trial, written, 1.0)
    found = record.Record(tmp_path, {}, [trial], force=False)
    assert not found.left
    assert found.rows() == [{**trial, **row} for row in written]
    assert [type(value) for value in found.rows()[0].values()] == [str, str, float, int]


def test_other_surroundings_are_written_down(toy: Path, out: Path) -> None:
    assert invoke(out).exit_code == 0
    edit(out, lambda c: c.update(system="another"))
    assert invoke(out, "--seeds", "3").exit_code == 0
    assert [line["by"]["system"] == "another" for line in done(out)] == 4 * [True] + 2 * [False]
    report = (home(out) / "report.md").read_text()
    assert report.count("system another") == 1 and f"- torch: {torch.__version__}\n" in report


# --- two runs, and dead processes ---------------------------------------------------------------------------


def test_second_run_is_refused_and_changes_nothing(toy: Path, out: Path, whole: list[Any]) -> None:
    assert invoke(out).exit_code == 0
    before = content(out)
    with files.locked(home(out)):
        for more in ([], ["--force"], ["--seeds", "3"]):
            line = said(invoke(out, *more))
            assert line.startswith(f"reproduce: {home(out)}: in use by another run")
    assert content(out) == before
    assert invoke(out).exit_code == 0


def wait_for(what: Callable[[], bool]) -> None:
    for _ in range(1200):
        if what():
            return
        time.sleep(0.05)
    raise AssertionError("nothing happened in a minute")


def alive(pid: int) -> bool:
    """Whether a process runs: a dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_killed_run_leaves_no_lock_and_no_worker(
    toy: Path, out: Path, whole: list[Any], tmp_path: Path
) -> None:
    for file in toy.glob("pid-*"):  # of the whole run
        file.unlink()
    (toy / "wait").write_text("")
    program = (
        "from reproduce.harness import cli, study\n"
        "if __name__ == '__main__':\n"
        "    study.EXPERIMENTS = ('toy_draw',)\n"
        f"    cli.main(['toy-draw', '--smoke', '--jobs', '2', '--out', {str(out)!r}])\n"
    )
    (tmp_path / "first.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(toy), *sys.path])}
    first = subprocess.Popen(
        [sys.executable, str(tmp_path / "first.py")], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: len(list(toy.glob("pid-*"))) == 2 and all(p.read_text() for p in toy.glob("pid-*")))
        assert "in use by another run" in said(invoke(out))
        workers = [int(path.read_text()) for path in toy.glob("pid-*")]
        assert all(map(alive, workers))
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    wait_for(lambda: not any(map(alive, workers)))
    (toy / "wait").unlink()
    assert (home(out) / files.LOCK).exists()
    assert invoke(out).exit_code == 0
    assert rows(out) == whole


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
