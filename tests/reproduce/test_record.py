"""`python -m reproduce` with damaged files, full disks, other versions, two runs, kills and dead workers."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import command
import khot
from command import Run
from reproduce.harness import files, record, runner, study, training

# An experiment of milliseconds, in a file, so that other processes can import it. Files beside it say what
# goes wrong: "stop" names a step at which every trial is interrupted, "die" methods and how the processes of
# each die ("a exit b kill"), and while "wait" is there, every trial waits.
TOY = '''
"""Numbers are drawn.

It departs from no paper.
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
    methods: tuple[str, ...] = field(default=("a", "b"), metadata={"help": "Which.", "selects": True})


def trials(args):
    return [{"method": m, "seed": s} for s in range(args.seeds) for m in args.methods]


def said(name):
    return (HERE / name).read_text().split() if (HERE / name).exists() else []


def run(args, trial, checkpoint):
    model = torch.nn.Linear(1, 1)
    for step in training.steps(checkpoint, {"model": model}, args.count):
        (HERE / f"pid-{trial['method']}").write_text(str(os.getpid()))
        while (HERE / "wait").exists():
            time.sleep(0.02)
        if str(step) in said("stop"):
            raise KeyboardInterrupt
        how = dict(zip(said("die")[::2], said("die")[1::2])).get(trial["method"])
        if how == "raise":
            raise RuntimeError("no luck")
        if how:
            os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
        yield {"step": step, "number": torch.rand(()).item()}
    yield {"final": torch.rand(()).item(), "word": "here, and there"}


def report(args, rows, folder):
    (folder / "plot.png").write_bytes(b"plot")
    cells = [(row["method"], str(row["final"])) for row in rows if "final" in row]
    return reporting.table(("method", "final"), cells)


EXPERIMENT = study.Experiment(
    source="sigmoid-topk, Table 0",
    needs="nothing",
    takes="a moment",
    Args=Args,
    smoke={"seeds": 2},
    trials=trials,
    run=run,
    report=report,
)
'''
GARBAGE = bytes((i * 151 + 7) % 256 for i in range(300))  # starts no UTF-8 text, no zip file and no pickle


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the toy experiment, which is the only one, and saves its state after every step."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "toy_draw.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(study, "EXPERIMENTS", ("toy_draw",))
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    yield folder
    sys.modules.pop("toy_draw", None)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def invoke(out: Path, *more: str) -> Run:
    return command.invoke("toy-draw", "--smoke", "--out", out, *more)


def home(out: Path) -> Path:
    return out / "toy-draw"


def done(out: Path) -> list[dict[str, Any]]:
    """The trials that are done."""
    path = home(out) / "trials.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


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


def rows(out: Path) -> list[tuple[tuple[str, str], ...]]:
    """The rows, in an order that does not depend on when the trials ran."""
    with (home(out) / "metrics.csv").open(newline="") as file:
        return sorted(tuple(sorted(row.items())) for row in csv.DictReader(file))


def content(out: Path) -> dict[str, bytes]:
    """All files of a run."""
    return {str(path): path.read_bytes() for path in home(out).rglob("*") if path.is_file()}


def said(run: Run) -> str:
    """The one line of a run that ends with exit code 2."""
    assert run.exit_code == 2, run.stderr
    assert "Traceback" not in run.stderr
    lines = [line for line in run.stderr.splitlines() if "reproduce: " in line]
    assert len(lines) == 1, run.stderr
    return lines[0]


@pytest.fixture
def whole(toy: Path, tmp_path: Path) -> list[Any]:
    """The rows of a run to which nothing happened."""
    assert invoke(tmp_path / "whole").exit_code == 0
    found = rows(tmp_path / "whole")
    assert len(found) == 4 * 5
    return found


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
        "zeros": lambda old: bytes(len(old)),
        "half a line": lambda old: old[:-25],
        "half a line between others": lambda old: old[:200] + b"\n" + old[-200:],
        "an empty line": put(""),
        "a list": put("[]"),
        "a number": put("7"),
        "deep": put("[" * 100_000),
        "no trial": altered_line(lambda found: found.pop("trial")),
        "no time": altered_line(lambda found: found.pop("cpu_seconds")),
        "a time that is no number": altered_line(lambda found: found.update(cpu_seconds="five")),
        "no rows": altered_line(lambda found: found.pop("rows")),
        "rows of numbers": altered_line(lambda found: found.update(rows=[1, 2])),
        "no version": altered_line(lambda found: found["by"].pop("torch")),
        "a version that is no text": altered_line(lambda found: found["by"].update(torch=2.13)),
        "no arguments": altered_line(lambda found: found["by"].pop("args")),
        "by a list": altered_line(lambda found: found.update(by=[])),
    },
    "checkpoints/method=a_seed=0.pt": {
        "empty": lambda old: b"",
        "cut": lambda old: old[: len(old) // 2],
        "the end cut": lambda old: old[:-30],
        "garbage": lambda old: GARBAGE,
        "zeros": lambda old: bytes(len(old)),
        "a pickle": lambda old: pickle.dumps({"state": {}, "rows": [], "seconds": 0.0, "call": os.getcwd}),
        "a list": lambda old: saved([1, 2]),
        "no rows": altered(lambda found: found.pop("rows")),
        "no versions": altered(lambda found: found.pop("by")),
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


def test_advice_for_a_damaged_checkpoint_helps(toy: Path, out: Path, whole: list[Any]) -> None:
    (toy / "stop").write_text("2")
    assert invoke(out).exit_code == 130
    (toy / "stop").unlink()
    (path,) = (home(out) / "checkpoints").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert str(path) in said(invoke(out))
    path.unlink()
    assert invoke(out).exit_code == 0
    assert rows(out) == whole


# --- full disks ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("trials.jsonl.part", "trials.jsonl"),
        ("metrics.csv.part", "metrics.csv"),
        ("report.md.part", "report.md"),
        ("plot.png", ""),
        ("checkpoints/method=a_seed=0.pt.part", "checkpoints/method=a_seed=0.pt"),
    ],
)
def test_full_disk_is_one_line_and_the_same_command_continues(
    toy: Path, out: Path, whole: list[Any], written: str, named: str
) -> None:
    path = home(out) / written
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    line = said(invoke(out))
    assert line.startswith(f"reproduce: {home(out) / named}")
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


@pytest.mark.parametrize("before", [True, False])
def test_kill_beside_any_write_duplicates_and_loses_nothing(
    toy: Path,
    tmp_path: Path,
    whole: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    before: bool,
) -> None:
    write = files.replace
    left = 0

    def counted(path: Path, content: bytes) -> None:
        nonlocal left
        left -= 1
        if before and left == 0:
            raise Killed
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
    "torch": (lambda c: c.update(torch="2.9.0"), f"torch = 2.9.0, not {torch.__version__}"),
    "both": (
        lambda c: c.update(torch="2.9.0", khot="0.0.9"),
        f"khot = 0.0.9, not {khot.__version__}, torch = 2.9.0, not {torch.__version__}",
    ),
    "an argument": (lambda c: c["args"].update(count=7), "count = 7, not 4"),
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
    assert ("arguments device = cpu, count = 7" in report) == ("argument" in case and not unfinished)
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


def test_unfinished_trial_goes_on_in_other_surroundings(toy: Path, out: Path, whole: list[Any]) -> None:
    (toy / "stop").write_text("2")
    assert invoke(out).exit_code == 130
    (toy / "stop").unlink()
    edit(out, lambda by: by.update(system="another"))
    (path,) = home(out).glob("checkpoints/*")
    found = torch.load(path, weights_only=True)
    found["rows"][0]["number"] = 7.0  # which shows that it went on
    torch.save(found, path)
    assert invoke(out, "--force").exit_code == 0
    assert done(out)[0]["rows"][0]["number"] == 7.0
    assert len(rows(out)) == len(whole)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    written = [{"a": "x\u2028y", "b": np.float32(0.5), "c": 1, "method": "m"}, {"a": "\x85", "b": 1e-300}]
    trial = {"method": "m"}
    record.Record(tmp_path, {}, [trial], force=False).finish(trial, written, 1.0)
    found = record.Record(tmp_path, {}, [trial], force=False)
    assert not found.left
    assert found.rows() == [{**trial, **row} for row in written]
    assert [type(value) for value in found.rows()[0].values()] == [str, str, float, int]


@pytest.mark.parametrize("key", ["python", "system", "kernels"])
def test_other_surroundings_are_written_down(toy: Path, out: Path, key: str) -> None:
    assert invoke(out).exit_code == 0
    edit(out, lambda c: c.update({key: "another"}))
    assert invoke(out, "--seeds", "3").exit_code == 0
    assert [line["by"][key] == "another" for line in done(out)] == 4 * [True] + 2 * [False]
    assert f"{key} another" in (home(out) / "report.md").read_text()


def test_every_version_is_named(toy: Path, out: Path) -> None:
    assert invoke(out).exit_code == 0
    versions = ("2.8.0", "2.9.0", "2.9.0", torch.__version__)
    lines = done(out)
    for line, version in zip(lines, versions, strict=True):
        line["by"]["torch"] = version
    (home(out) / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert invoke(out, "--seeds", "3", "--force").exit_code == 0
    report = (home(out) / "report.md").read_text()
    assert [report.count(f"torch {version},") for version in ("2.8.0", "2.9.0")] == [1, 1]
    assert f"- torch: {torch.__version__}\n" in report


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


def test_lock_file_that_is_left_locks_nothing(toy: Path, out: Path) -> None:
    home(out).mkdir(parents=True)
    (home(out) / files.LOCK).write_text("")
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
    for file in toy.glob("pid-*"):
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
    asked = ["--methods", "a,b,c,d", "--seeds", "1"]
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
    assert rows(out) == [row for row in rows(tmp_path / "other") if dict(row)["method"] in "cd"]
    (toy / "die").unlink()
    assert invoke(out, *asked).exit_code == 0
    assert rows(out) == rows(tmp_path / "other")


# --- the file formats ---------------------------------------------------------------------------------------


def test_versions_of_the_refusal_are_recorded_ones() -> None:
    assert set(record.MUST_MATCH) <= set(record.VERSIONS)


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
