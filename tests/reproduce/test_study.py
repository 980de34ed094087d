"""The harness of `python -m reproduce`: stops, seeds, failures, processes, smoke runs and exit codes."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Run, invoke
from reproduce.harness import reporting, study, training
from reproduce.harness.data import MNIST_FILES

# An experiment of milliseconds, in a file, so that other processes can import it. The file "fail" beside it
# names a method that fails, the file "stop" a step at which every trial stops.
TOY = '''
"""A line is fitted.

By two methods. It departs from no paper.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from reproduce.harness import reporting, study, training

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Args(study.Args):
    count: int = field(default=20, metadata={"help": "Steps."})
    rate: float = field(default=0.1, metadata={"help": "Learning rate."})
    methods: tuple[str, ...] = field(default=("sgd", "adam"), metadata={"help": "Which.", "selects": True})
    ks: tuple[int, ...] = field(default=(1, 2), metadata={"help": "Sizes."})


def trials(args):
    return [{"method": m, "seed": s} for s in range(args.seeds) for m in args.methods]


def run(args, trial, checkpoint):
    if (HERE / "fail").exists() and (HERE / "fail").read_text() == trial["method"]:
        raise RuntimeError("no luck")
    model = torch.nn.Linear(3, 1)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[trial["method"]]
    optimizer = kind(model.parameters(), lr=args.rate)
    images = training.images(args)
    for step in training.steps(checkpoint, {"model": model, "optimizer": optimizer}, args.count):
        if (HERE / "stop").exists() and int((HERE / "stop").read_text()) == step:
            raise KeyboardInterrupt
        x = torch.randn(8, 3)
        batch = training.minibatches(len(images.train_labels), 8, step, trial["seed"])
        loss = (model(x) - images.train_images[batch, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield {"step": step, "loss": loss.item()}
    yield {"final": loss.item(), "where": "here, and there"}


def report(args, rows, folder):
    if (HERE / "fail").exists() and (HERE / "fail").read_text() == "report":
        raise RuntimeError("no paper")
    finals = [row for row in rows if "final" in row]
    return reporting.table(("method", "loss"), [(r["method"], f"{r['final']:.6f}") for r in finals])


EXPERIMENT = study.Experiment(
    source="sigmoid-topk, Table 0",
    needs="MNIST",
    takes="a moment",
    Args=Args,
    smoke={"count": 3, "seeds": 1},
    trials=trials,
    run=run,
    report=report,
)
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the toy experiment, which is the only one."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "toy_line.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(study, "EXPERIMENTS", ("toy_line",))
    yield folder
    sys.modules.pop("toy_line", None)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "toy-line" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def done(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "toy-line" / "trials.jsonl").read_text().splitlines()]


def by_trial(found: list[dict[str, str]]) -> list[dict[str, str]]:
    return sorted(found, key=lambda row: (row["method"], row["seed"], int(row["step"] or 10**6)))


def smoke(out: Path, *more: str) -> Run:
    return invoke("toy-line", "--smoke", "--out", out, *more)


def test_smoke_run_leaves_everything(toy: Path, tmp_path: Path) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    run = smoke(tmp_path, "--rate", "0.2", "--ks", "3,4")
    assert run.exit_code == 0, run.stderr
    folder = tmp_path / "toy-line"
    written = {path.name for path in folder.iterdir()} - {".lock"}
    assert written == {"trials.jsonl", "metrics.csv", "report.md"}
    assert len(rows(tmp_path)) == 2 * (3 + 1)
    assert rows(tmp_path)[3]["where"] == "here, and there"
    lines = done(tmp_path)
    args = {"dataset": "digits", "device": "cpu", "count": 3, "rate": 0.2, "ks": [3, 4]}
    assert [line["by"]["args"] for line in lines] == [args, args]
    assert [line["trial"] for line in lines] == [{"method": m, "seed": 0} for m in ("sgd", "adam")]
    report = (folder / "report.md").read_text()
    command = "python -m reproduce toy-line --smoke --rate 0.2 --ks 3,4"
    heading = f"Written by `{command}`, from sigmoid-topk, Table 0:"
    assert report.startswith(f"# A line is fitted.\n\n{heading}\n\n- sigmoid-topk: Wijk, ")
    for part in ("| sgd |", "It departs from no paper.", "ks = 3 4", f"- torch: {torch.__version__}"):
        assert part in report
    assert "| sgd |" in run.stdout and str(folder / "report.md") in run.stdout
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_notes_become_part_of_the_report(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "toy-line").mkdir()
    (tmp_path / "toy-line" / "notes.md").write_text("It was a rainy day.\n")
    assert smoke(tmp_path).exit_code == 0
    assert "\n\n## Discussion\n\nIt was a rainy day.\n\n" in (tmp_path / "toy-line" / "report.md").read_text()


def test_same_seed_same_figures_and_other_seed_others(toy: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        assert smoke(tmp_path / out, "--seeds", "2").exit_code == 0
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    first, second = ([r["loss"] for r in rows(tmp_path / "a") if r["seed"] == seed] for seed in "01")
    assert first != second


@pytest.mark.parametrize("stop", [0, 1, 7, 19])
def test_stopped_run_goes_on_to_the_same_figures(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    assert smoke(tmp_path / "whole", "--count", "20").exit_code == 0
    (toy / "stop").write_text(str(stop))
    stopped = smoke(tmp_path / "broken", "--count", "20")
    assert stopped.exit_code == 130
    assert "continues from here" in stopped.stderr
    checkpoints = tmp_path / "broken" / "toy-line" / "checkpoints"
    assert checkpoints.exists() == (stop > 0)
    (toy / "stop").unlink()
    assert smoke(tmp_path / "broken", "--count", "20").exit_code == 0
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    assert not checkpoints.exists()


def test_checkpoint_drops_the_rows_after_the_last_save(tmp_path: Path) -> None:
    checkpoint = study.Checkpoint(tmp_path / "deep" / "x.pt", {"torch": "2"})
    assert checkpoint.load() is None
    checkpoint.rows.append({"step": 0})
    checkpoint.save({"weights": torch.ones(2)})
    checkpoint.rows.append({"step": 1})
    again = study.Checkpoint(tmp_path / "deep" / "x.pt", {"torch": "2"})
    state = again.load()
    assert state is not None and torch.equal(state["weights"], torch.ones(2))
    assert again.rows == [{"step": 0}]
    assert again.clock() >= checkpoint.seconds
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.pt"]


def test_failed_report_loses_nothing(toy: Path, tmp_path: Path) -> None:
    (toy / "fail").write_text("report")
    run = smoke(tmp_path)
    assert run.exit_code == 1
    assert "reproduce: failed: toy-line: report: RuntimeError: no paper\n" in run.stderr
    assert len(rows(tmp_path)) == 8


@pytest.mark.parametrize(("jobs", "seeds"), [("1", 2), ("2", 1)])
def test_failed_trial_loses_nothing(toy: Path, tmp_path: Path, jobs: str, seeds: int) -> None:
    """In two processes, too, whose figures are the same as those of one."""
    (toy / "fail").write_text("sgd")
    run = smoke(tmp_path, "--jobs", jobs, "--seeds", str(seeds))
    assert run.exit_code == 1
    lines = [line for line in run.stderr.splitlines() if line.startswith("reproduce: failed: ")]
    assert lines == [
        f"reproduce: failed: toy-line: method=sgd seed={seed}: RuntimeError: no luck" for seed in range(seeds)
    ]
    assert {row["method"] for row in rows(tmp_path)} == {"adam"}
    assert "| adam |" in (tmp_path / "toy-line" / "report.md").read_text()
    before = rows(tmp_path)
    (toy / "fail").write_text("adam")  # which would fail if it was run again
    assert smoke(tmp_path, "--seeds", str(seeds)).exit_code == 0
    assert rows(tmp_path)[: len(before)] == before
    (toy / "fail").unlink()
    assert smoke(tmp_path / "whole", "--seeds", str(seeds)).exit_code == 0
    assert by_trial(rows(tmp_path)) == by_trial(rows(tmp_path / "whole"))


def test_nothing_to_report_when_all_fail(toy: Path, tmp_path: Path) -> None:
    (toy / "fail").write_text("sgd")
    run = smoke(tmp_path, "--methods", "sgd")
    assert run.exit_code == 1
    assert not (tmp_path / "toy-line" / "report.md").exists()


def test_more_seeds_and_methods_are_appended(toy: Path, tmp_path: Path) -> None:
    assert smoke(tmp_path, "--methods", "sgd").exit_code == 0
    first = rows(tmp_path)
    assert smoke(tmp_path, "--seeds", "2").exit_code == 0
    assert rows(tmp_path)[: len(first)] == first
    assert {(row["method"], row["seed"]) for row in rows(tmp_path)} == {
        (method, seed) for method in ("sgd", "adam") for seed in ("0", "1")
    }


def test_all_runs_everything(toy: Path, tmp_path: Path) -> None:
    run = invoke("all", "--smoke", "--out", tmp_path, "--seeds", "2")
    assert run.exit_code == 0, run.stderr
    assert {row["seed"] for row in rows(tmp_path)} == {"0", "1"}


def test_list_says_what_there_is(toy: Path) -> None:
    run = invoke("list")
    assert run.exit_code == 0
    assert run.stdout.splitlines() == [
        "name      source                 needs  takes",
        "toy-line  sigmoid-topk, Table 0  MNIST  a moment",
    ]


def test_help_names_the_experiments_and_their_options(toy: Path) -> None:
    assert all(name in invoke().stdout for name in ("list", "all", "toy-line", "--force", "locked"))
    run = invoke("toy-line", "--help")
    for part in (
        "--force",
        "sigmoid-topk, Table 0",
        "--data-dir",
        "--ks",
        "Default: 1,2.",
        "--jobs",
        "--smoke",
        "--out",
    ):
        assert part in run.stdout


def refused(run: Run) -> str:
    """The one line that a run left on stderr when it refused its arguments."""
    assert run.exit_code == 2, run.stderr
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1, run.stderr
    return run.stderr


REFUSED = {
    "no folder of the data set": (
        ["--smoke", "--dataset", "fashion"],
        "dataset = 'fashion': give --data-dir or KHOT_DATA_DIR the folder that has it",
    ),
    "no data": ([], "toy-line needs MNIST: give --data-dir or KHOT_DATA_DIR"),
    "no seeds": (["--smoke", "--seeds", "0"], "seeds = 0: expected at least 1"),
    "negative rate": (["--smoke", "--rate", "-1"], "rate = -1.0: expected more than 0"),
    "no such device": (["--smoke", "--device", "abacus"], "device = 'abacus': expected"),
    "no jobs": (["--smoke", "--jobs", "0"], "jobs = 0: expected at least 1"),
    "no numbers": (["--smoke", "--ks", "1,two"], "argument --ks: 1,two: expected ints with commas"),
    "no such option": (["--smoke", "--colour", "red"], "--colour"),
    "not a number": (["--smoke", "--count", "many"], "--count"),
    "no such folder": (["--data-dir", "nowhere"], "nowhere: expected a folder with train-images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_line(toy: Path, tmp_path: Path, case: str) -> None:
    arguments, message = REFUSED[case]
    assert message in refused(invoke("toy-line", "--out", tmp_path, *arguments))
    assert not (tmp_path / "toy-line").exists()


def test_unknown_experiments_are_refused_with_a_suggestion(toy: Path) -> None:
    assert refused(invoke("toy-lime")) == "reproduce: no experiment 'toy-lime'; did you mean 'toy-line'?\n"
    assert refused(invoke("lst")) == "reproduce: no experiment 'lst'; did you mean 'list'?\n"
    assert refused(invoke("xyz")) == (
        "reproduce: no experiment 'xyz'; `python -m reproduce list` prints what there is\n"
    )


def test_suggestions_are_among_all_experiments() -> None:
    line = refused(invoke("feature-selction"))
    assert line == "reproduce: no experiment 'feature-selction'; did you mean 'feature-selection'?\n"


def write_images(folder: Path) -> None:
    """A data set of 20 training and 10 test images of 2 x 2 pixels, in MNIST's form."""
    folder.mkdir(parents=True)
    for name, count in zip(MNIST_FILES, (20, 20, 10, 10), strict=True):
        sizes = (count, 2, 2) if "images" in name else (count,)
        header = struct.pack(f">{1 + len(sizes)}I", 0x0800 + len(sizes), *sizes)
        (folder / name).write_bytes(gzip.compress(header + bytes(i % 10 for i in range(math.prod(sizes)))))


def test_smoke_run_takes_the_dataset_that_is_asked_for(toy: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    write_images(data_dir / "tiny")
    asked = ["--smoke", "--dataset", "tiny", "--methods", "sgd"]
    run = invoke("toy-line", *asked, "--out", tmp_path / "asked", data_dir=data_dir)
    assert run.exit_code == 0, run.stderr
    assert done(tmp_path / "asked")[0]["by"]["args"]["dataset"] == "tiny"
    report = (tmp_path / "asked" / "toy-line" / "report.md").read_text()
    assert "`python -m reproduce toy-line --smoke --data-dir FOLDER --dataset tiny --methods sgd`" in report
    # without --dataset it takes scikit-learn's digits, whether or not there is a folder
    run = invoke("toy-line", "--smoke", "--out", tmp_path / "other", data_dir=data_dir)
    assert run.exit_code == 0, run.stderr
    assert done(tmp_path / "other")[0]["by"]["args"]["dataset"] == "digits"
    assert rows(tmp_path / "other")[0]["loss"] != rows(tmp_path / "asked")[0]["loss"]


def test_refuses_broken_files(toy: Path, tmp_path: Path) -> None:
    for name in MNIST_FILES:
        (tmp_path / name).write_bytes(b"no gzip")
    assert str(tmp_path / MNIST_FILES[0]) in refused(invoke("toy-line", data_dir=tmp_path))
    line = refused(invoke("toy-line", "--dataset", "fashion", data_dir=tmp_path))
    assert str(tmp_path / "fashion") in line


def test_refuses_a_folder_with_results_of_other_arguments(toy: Path, tmp_path: Path) -> None:
    assert smoke(tmp_path).exit_code == 0
    before = rows(tmp_path)
    assert "holds results with count = 3, not 4; give another --out" in refused(
        smoke(tmp_path, "--count", "4")
    )
    assert rows(tmp_path) == before


def test_refuses_a_place_that_cannot_be_written_to(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written to" in refused(smoke(tmp_path / "file"))


def test_images_of_another_set_are_in_a_folder_of_their_own(tmp_path: Path) -> None:
    given = os.environ.get("KHOT_DATA_DIR")
    if not given:
        pytest.skip("KHOT_DATA_DIR is not set")
    (tmp_path / "fashion").symlink_to(Path(given).resolve())
    found = training.images(study.Args(data_dir=tmp_path, dataset="fashion"))
    assert (found.name, found.n) == ("fashion", 784)
    assert training.images(study.Args()).name == "scikit-learn digits"


def test_minibatches_are_epochs() -> None:
    first = torch.cat([training.minibatches(10, 3, step, seed=0) for step in range(3)])
    second = torch.cat([training.minibatches(10, 3, step, seed=0) for step in range(3, 6)])
    assert len(first.unique()) == len(second.unique()) == 9
    assert not torch.equal(first, second)
    assert not torch.equal(first, torch.cat([training.minibatches(10, 3, step, seed=1) for step in range(3)]))
    assert sorted(training.minibatches(4, 9, 0, seed=0).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("values", "text"), [([], "–"), ([0.25], "0.250"), ([1.0, 2.0, 3.0], "2.000 ± 1.000")]
)
def test_spread(values: list[float], text: str) -> None:
    assert reporting.spread(values) == text


def test_learning_rates_fall_to_zero() -> None:
    progress = (0, 1 / 2, 2 / 3, 3 / 4, 5 / 6, 1)
    assert [training.linear_over_last_third(p) for p in progress] == pytest.approx([1, 1, 1, 3 / 4, 1 / 2, 0])
    assert [training.cosine_over_last_half(p) for p in progress] == pytest.approx(
        [1, 1, 3 / 4, 1 / 2, 1 / 4, 0]
    )
