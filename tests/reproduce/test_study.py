"""The harness of `python -m reproduce`: stops, seeds, failures, processes, smoke runs and exit codes."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import pytest
import torch

import command
from command import Run
from reproduce.harness import study, training
from reproduce.harness.data import MNIST_FILES
from toy import done, home, invoke, rows


def test_smoke_run_leaves_everything(toy: Path, out: Path) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    home(out).mkdir(parents=True)
    (home(out) / "notes.md").write_text("It was a rainy day.\n")
    run = invoke(out, "--rate", "0.2", "--ks", "3,4", "--seeds", "1")
    assert run.exit_code == 0, run.stderr
    written = {path.name for path in home(out).iterdir()} - {".lock", "notes.md"}
    assert written == {"trials.jsonl", "metrics.csv", "report.md", "plot.png"}
    assert (
        len(rows(out)) == 2 * (4 + 1) and [dict(r)["word"] for r in rows(out)].count("here, and there") == 2
    )
    args = {"dataset": "digits", "device": "cpu", "count": 4, "rate": 0.2, "ks": [3, 4]}
    assert [line["by"]["args"] for line in done(out)] == [args, args]
    assert [line["trial"] for line in done(out)] == [{"method": m, "seed": 0} for m in ("a", "b")]
    report = (home(out) / "report.md").read_text()
    command = "python -m reproduce toy-draw --smoke --seeds 1 --rate 0.2 --ks 3,4"
    heading = f"Written by `{command}`, from sigmoid-topk, Table 0:"
    assert report.startswith(f"# Numbers are drawn.\n\n{heading}\n\n- sigmoid-topk: Wijk, ")
    assert "\n\n## Discussion\n\nIt was a rainy day.\n\n" in report
    for part in ("| a |", "It departs from no paper.", "ks = 3 4", f"- torch: {torch.__version__}"):
        assert part in report
    assert "| a |" in run.stdout and str(home(out) / "report.md") in run.stdout
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("stop", [0, 3])
def test_stopped_run_goes_on_to_the_same_figures(
    toy: Path, out: Path, whole: list[object], stop: int
) -> None:
    (toy / "stop").write_text(str(stop))
    stopped = invoke(out)
    assert stopped.exit_code == 130
    assert "continues from here" in stopped.stderr
    assert (home(out) / "checkpoints").exists() == (stop > 0)
    (toy / "stop").unlink()
    assert invoke(out).exit_code == 0
    assert rows(out) == whole
    assert not (home(out) / "checkpoints").exists()


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


def test_failures_lose_nothing(toy: Path, out: Path, whole: list[object]) -> None:
    (toy / "die").write_text("a raise")
    run = invoke(out)
    assert run.exit_code == 1
    lines = [line for line in run.stderr.splitlines() if line.startswith("reproduce: failed: ")]
    assert lines == [
        f"reproduce: failed: toy-draw: method=a seed={seed}: RuntimeError: no luck" for seed in (0, 1)
    ]
    assert rows(out) == [row for row in whole if dict(row)["method"] == "b"]
    assert "| b |" in (home(out) / "report.md").read_text()
    (toy / "die").write_text("b raise")  # which would fail if it was run again
    assert invoke(out).exit_code == 0
    assert rows(out) == whole
    (toy / "die").write_text("report raise")
    run = invoke(out)
    assert run.exit_code == 1 and rows(out) == whole
    assert "reproduce: failed: toy-draw: report: RuntimeError: no paper\n" in run.stderr


def test_all_runs_everything_and_what_is_new_is_appended(toy: Path, out: Path, whole: list[object]) -> None:
    assert invoke(out, "--methods", "a", "--seeds", "1").exit_code == 0
    first = done(out)
    run = command.invoke("all", "--smoke", "--out", out, "--seeds", "2")
    assert run.exit_code == 0, run.stderr
    assert done(out)[:1] == first and rows(out) == whole


def test_list_says_what_there_is(toy: Path) -> None:
    run = command.invoke("list")
    assert run.exit_code == 0
    assert run.stdout.splitlines() == [
        "name      source                 needs  takes",
        "toy-draw  sigmoid-topk, Table 0  MNIST  a moment",
    ]


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
    "no data": ([], "toy-draw needs MNIST: give --data-dir or KHOT_DATA_DIR"),
    "no such device": (["--smoke", "--device", "abacus"], "device = 'abacus': expected"),
    "no numbers": (["--smoke", "--ks", "1,two"], "argument --ks: 1,two: expected ints with commas"),
    "no such folder": (["--data-dir", "nowhere"], "nowhere: expected a folder with train-images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_line(toy: Path, tmp_path: Path, case: str) -> None:
    arguments, message = REFUSED[case]
    assert message in refused(command.invoke("toy-draw", "--out", tmp_path, *arguments))
    assert not (tmp_path / "toy-draw").exists()


def test_unknown_experiments_are_refused_with_a_suggestion(toy: Path) -> None:
    said = {"toy-drow": "did you mean 'toy-draw'?", "lst": "did you mean 'list'?"}
    said["xyz"] = "`python -m reproduce list` prints what there is"
    for name, advice in said.items():
        assert refused(command.invoke(name)) == f"reproduce: no experiment '{name}'; {advice}\n"


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
    found = []
    # without --dataset it takes scikit-learn's digits, whether or not there is a folder
    for asked in (["--dataset", "tiny"], []):
        words = ["--smoke", *asked, "--seeds", "1", "--methods", "images"]
        out = tmp_path / f"out{len(asked)}"
        run = command.invoke("toy-draw", *words, "--out", out, data_dir=data_dir)
        assert run.exit_code == 0, run.stderr
        assert done(out)[0]["by"]["args"]["dataset"] == (asked or ["", "digits"])[1]
        found.append(done(out)[0]["rows"][0]["loss"])
        told = " ".join(["--smoke", *["--data-dir FOLDER"] * bool(asked), *words[1:]])
        assert f"`python -m reproduce toy-draw {told}`" in (home(out) / "report.md").read_text()
    assert found[0] != found[1]


def test_minibatches_are_epochs() -> None:
    first = torch.cat([training.minibatches(10, 3, step, seed=0) for step in range(3)])
    second = torch.cat([training.minibatches(10, 3, step, seed=0) for step in range(3, 6)])
    assert len(first.unique()) == len(second.unique()) == 9
    assert not torch.equal(first, second)
    assert not torch.equal(first, torch.cat([training.minibatches(10, 3, step, seed=1) for step in range(3)]))
    assert sorted(training.minibatches(4, 9, 0, seed=0).tolist()) == [0, 1, 2, 3]


def test_learning_rates_fall_to_zero() -> None:
    progress = (0, 1 / 2, 2 / 3, 3 / 4, 5 / 6, 1)
    assert [training.linear_over_last_third(p) for p in progress] == pytest.approx([1, 1, 1, 3 / 4, 1 / 2, 0])
    assert [training.cosine_over_last_half(p) for p in progress] == pytest.approx(
        [1, 1, 3 / 4, 1 / 2, 1 / 4, 0]
    )
