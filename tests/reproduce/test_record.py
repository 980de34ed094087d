"""`python -m reproduce` with damaged files, full disks, other versions, two runs, kills and dead workers."""

from __future__ import annotations

import csv
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


def config(out: Path) -> dict[str, Any]:
    return json.loads((home(out) / "config.json").read_text())


def edit(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = config(out)
    change(content)
    (home(out) / "config.json").write_text(json.dumps(content))


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


def without(key: str) -> Callable[[bytes], bytes]:
    return lambda old: json.dumps({k: v for k, v in json.loads(old).items() if k != key}).encode()


def with_(key: str, value: object) -> Callable[[bytes], bytes]:
    return lambda old: json.dumps({**json.loads(old), key: value}).encode()


def lines(change: Callable[[list[str]], list[str]]) -> Callable[[bytes], bytes]:
    return lambda old: ("\n".join(change(old.decode().splitlines())) + "\n").encode()


def drop(column: str) -> Callable[[bytes], bytes]:
    """A CSV file without this column."""

    def change(old: bytes) -> bytes:
        table = list(csv.reader(old.decode().splitlines()))
        place = table[0].index(column)
        return "".join(
            ",".join(f'"{cell}"' for i, cell in enumerate(row) if i != place) + "\n" for row in table
        ).encode()

    return change


DAMAGE: dict[str, dict[str, Callable[[bytes], bytes | None]]] = {
    "config.json": {
        "empty": lambda old: b"",
        "cut": lambda old: old[: len(old) // 2],
        "garbage": lambda old: GARBAGE,
        "zeros": lambda old: bytes(len(old)),
        "a list": lambda old: b"[]",
        "a number": lambda old: b"7",
        "deep": lambda old: b"[" * 100_000,
        "no args": without("args"),
        "no times": without("cpu_seconds"),
        "no marks": without("rows"),
        "no columns": without("columns"),
        "no version": without("torch"),
        "earlier a number": with_("earlier", 3),
        "args a list": with_("args", [1]),
        "marks a list": with_("rows", []),
        "columns a number": with_("columns", 3),
        "a mark that is no number": with_("rows", {"method=a seed=0": "five"}),
        "a version that is no text": with_("torch", 2.13),
        "missing": lambda old: None,
    },
    "metrics.csv": {
        "empty": lambda old: b"",
        "garbage": lambda old: GARBAGE,
        "zeros": lambda old: bytes(len(old)),
        "half a line": lambda old: old[:-25],
        "half a cell": lambda old: old[:-3],
        "no end of line": lambda old: old[:-1],
        "half a header": lambda old: old[:7],
        "a short line": lines(lambda found: [*found[:3], "a,0", *found[4:]]),
        "a long line": lines(lambda found: [*found[:3], found[3] + ",1", *found[4:]]),
        "an open quote": lines(lambda found: [*found[:3], '"' + found[3], *found[4:]]),
        "no header": lines(lambda found: found[1:]),
        "a column twice": lines(lambda found: [found[0].replace("number", "step"), *found[1:]]),
        "no column seed": drop("seed"),
        "no column number": drop("number"),
        "no column word": drop("word"),
    },
    "checkpoints/method=a_seed=0.pt": {
        "empty": lambda old: b"",
        "cut": lambda old: old[: len(old) // 2],
        "the end cut": lambda old: old[:-30],
        "garbage": lambda old: GARBAGE,
        "zeros": lambda old: bytes(len(old)),
        "a pickle": lambda old: pickle.dumps({"state": {}, "rows": [], "seconds": 0.0, "call": os.getcwd}),
        "a list": lambda old: saved([1, 2]),
        "no rows": lambda old: saved({"state": {}, "seconds": 1.0}),
        "no step": lambda old: saved({"state": {}, "rows": [], "seconds": 1.0}),
        "another model": lambda old: saved(
            {
                "state": {"step": 1, "state": {"model": {"weight": torch.ones(3)}}, "rng": torch.ones(1)},
                "rows": [],
                "seconds": 1.0,
            }
        ),
    },
}


def saved(value: object) -> bytes:
    from io import BytesIO

    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


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
    new = DAMAGE[name][damage](path.read_bytes())
    path.unlink()
    if new is not None:
        path.write_bytes(new)
    before = content(out)
    line = said(invoke(out, "--seeds", "3"))
    assert line.startswith(f"reproduce: {path}: ")
    assert any(advice in line for advice in ("restore a copy", "delete it, and", "delete that line")), line
    after = content(out)
    if damage in ("no step", "another model"):
        before.pop(str(home(out) / "config.json"))
    assert before.items() <= after.items()


@pytest.mark.parametrize("advice", ["delete the line", "delete the file"])
def test_advice_for_damaged_rows_helps(toy: Path, out: Path, whole: list[Any], advice: str) -> None:
    """The trial that lost a row runs again, and no other one."""
    assert invoke(out).exit_code == 0
    path = home(out) / "metrics.csv"
    text = path.read_text()
    path.write_text(text[:-9])
    assert "delete that line" in said(invoke(out)) or advice == "delete the file"
    (toy / "die").write_text("" if advice == "delete the file" else "a exit")
    if advice == "delete the line":
        path.write_text("".join(text.splitlines(keepends=True)[:-1]))
    else:
        path.unlink()
    run = invoke(out)
    assert run.exit_code == 0, run.stderr
    assert f"run again: {1 if advice == 'delete the line' else 4} trials" in run.stderr
    assert rows(out) == whole


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
        ("config.json.part", "config.json"),
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
    runner._serve(reply, "toy_draw", args, {"method": "a", "seed": 0}, path)  # type: ignore[arg-type]
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
        assert sorted(config(out)["rows"].values()) == [5] * 4
    # settle once; per trial three checkpoints, the rows and the mark; the report
    assert place == 1 + 1 + 4 * (3 + 2) + 1


def test_trial_is_done_only_when_it_says_so(toy: Path, out: Path, whole: list[Any]) -> None:
    assert invoke(out).exit_code == 0
    edit(out, lambda c: c["rows"].pop("method=b seed=0"))
    (toy / "die").write_text("a exit")  # which would end this process if it was run again
    assert invoke(out).exit_code == 0
    assert rows(out) == whole
    assert config(out)["rows"]["method=b seed=0"] == 5


@pytest.mark.parametrize("change", ["lost", "twice"])
def test_trial_with_other_rows_than_it_says_runs_again(
    toy: Path, out: Path, whole: list[Any], change: str
) -> None:
    assert invoke(out).exit_code == 0
    path = home(out) / "metrics.csv"
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*text[:2], *text[3:]] if change == "lost" else [*text, text[3]]))
    run = invoke(out)
    assert run.exit_code == 0
    assert "has not all rows of method=a seed=0" in run.stderr or change == "twice"
    assert "run again: 1 trials" in run.stderr
    assert rows(out) == whole


def test_failed_trial_with_old_rows_is_not_reported(toy: Path, out: Path) -> None:
    assert invoke(out, "--methods", "a", "--seeds", "1").exit_code == 0
    edit(out, lambda c: c["rows"].clear())
    (toy / "die").write_text("a raise")
    assert invoke(out, "--methods", "a,b", "--seeds", "1").exit_code == 1
    report = (home(out) / "report.md").read_text()
    assert "| b |" in report and "| a |" not in report


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
    before, old = content(out), config(out)
    line = said(invoke(out, "--seeds", "3"))
    assert f"{home(out)}: holds results with {message}; give another --out, or --force" in line
    assert content(out) == before

    run = invoke(out, "--seeds", "3", "--force")
    assert run.exit_code == 0, run.stderr
    (entry,) = config(out)["earlier"]
    assert config(out)["torch"] == torch.__version__ and config(out)["khot"] == khot.__version__
    assert all(entry.get(key) == old.get(key) for key in ("khot", "torch", "python"))
    assert entry.get("args", config(out)["args"]) == old["args"]
    assert config(out)["args"]["count"] == 4
    report = (home(out) / "report.md").read_text()
    assert "- earlier rows: khot " in report
    assert ("arguments device = cpu, count = 7" in report) == ("argument" in case)
    assert len(rows(out)) == 6 * 5
    # nothing differs any more
    assert invoke(out, "--seeds", "4").exit_code == 0
    assert config(out)["earlier"] == [entry]


@pytest.mark.parametrize("key", ["python", "system", "kernels"])
def test_other_surroundings_are_written_down(toy: Path, out: Path, key: str) -> None:
    assert invoke(out).exit_code == 0
    edit(out, lambda c: c.update({key: "another"}))
    assert invoke(out, "--seeds", "3").exit_code == 0
    assert [entry[key] for entry in config(out)["earlier"]] == ["another"]
    assert config(out)[key] != "another"


def test_every_version_is_kept(toy: Path, out: Path) -> None:
    assert invoke(out).exit_code == 0
    for place, version in enumerate(("2.8.0", "2.9.0")):
        edit(out, lambda c, version=version: c.update(torch=version))
        assert invoke(out, "--seeds", str(3 + place), "--force").exit_code == 0
    assert [entry["torch"] for entry in config(out)["earlier"]] == ["2.8.0", "2.9.0"]


def test_other_versions_do_not_matter_before_there_are_rows(toy: Path, out: Path) -> None:
    (toy / "stop").write_text("0")
    assert invoke(out).exit_code == 130
    (toy / "stop").unlink()
    edit(out, lambda c: c.update(torch="2.9.0"))
    assert invoke(out).exit_code == 0
    assert "earlier" not in config(out)


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
