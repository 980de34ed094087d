"""The demo: that it does what it promises, and what it refuses."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from reproduce.harness.data import load_digits

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def demo() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT), run_name="demo"))


@pytest.fixture(autouse=True)
def few_trees(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr("khot.sklearn._forest.TREES", 3)
        monkeypatch.setattr("khot._kernel_gates.FITTING", 3)


def invoke(demo: SimpleNamespace, *args: str | Path, data_dir: Path | None = None) -> Result:
    app = typer.Typer(add_completion=False)
    app.command()(demo.main)
    environment = {"KHOT_DATA_DIR": None if data_dir is None else str(data_dir)}
    return CliRunner().invoke(app, [str(arg) for arg in args], env=environment)


def accuracies(demo: SimpleNamespace, output: str) -> dict[str, float]:
    """The table that the demo prints, by the name of the pixels."""
    cells = dict(re.findall(r"^│ (.+?) +│ +\d+ │ +([\d.]+) % │$", output, flags=re.MULTILINE))
    return {name: float(cells[label]) for name, label in demo.LABELS.items()}


def test_short_demo_prints_the_table_and_draws_the_picture(demo: SimpleNamespace, tmp_path: Path) -> None:
    picture = tmp_path / "x.png"
    run = invoke(demo, "--steps", "3", "--k", "5", "--out", picture)
    assert run.exit_code == 0, run.output
    assert all(0 <= percent <= 100 for percent in accuracies(demo, run.stdout).values())
    assert "Which 5 of 64 pixels" in run.stdout
    assert str(picture) in run.stdout
    assert "KHotSelector: step 3 of 3" in run.output
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize("k, steps", [(1, 2), (64, 1)])
def test_demo_runs_at_both_ends(demo: SimpleNamespace, k: int, steps: int) -> None:
    result = demo.run(load_digits(), k, steps)
    assert result.chosen.sum() == k
    assert result.variance.sum() == k
    assert result.scores.shape == (64,)


def test_demo_repeats_itself_and_leaves_no_trace(demo: SimpleNamespace) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first, again, other = (demo.run(load_digits(), 10, 3, seed) for seed in (1, 1, 2))
    assert first.accuracy == again.accuracy
    assert torch.equal(first.scores, again.scores)
    assert torch.equal(first.chosen, again.chosen)
    assert not torch.equal(first.scores, other.scores)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def check_demo(demo: SimpleNamespace, run: Result, picture: Path) -> None:
    """The chosen pixels win over both baselines, and no k pixels over all of them.

    The seed is fixed, but rounding differs between machines and the choice with it. Over seeds 0 to 4 the
    chosen pixels win over those of highest variance by 2.5 to 4.1 percentage points on digits.
    """
    assert run.exit_code == 0, run.output
    found = accuracies(demo, run.stdout)
    assert found["all"] > found["chosen"] > found["variance"], found
    assert found["chosen"] > found["random"], found
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_demo_beats_the_baselines_on_digits(demo: SimpleNamespace, tmp_path: Path) -> None:
    check_demo(demo, invoke(demo, "--out", tmp_path / "digits.png"), tmp_path / "digits.png")


@pytest.mark.slow
def test_demo_beats_the_baselines_on_mnist(demo: SimpleNamespace, tmp_path: Path) -> None:
    given = os.environ.get("KHOT_DATA_DIR")
    if not given:
        pytest.skip("KHOT_DATA_DIR is not set")
    run = invoke(demo, "--out", tmp_path / "mnist.png", data_dir=Path(given))
    check_demo(demo, run, tmp_path / "mnist.png")
    assert "Which 50 of 784 pixels" in run.stdout


REFUSED = {
    "k below 1": (["--k", "0"], "--k"),
    "k above n": (["--k", "65"], "k = 65: expected at most 64"),
    "k not a number": (["--k", "ten"], "--k"),
    "no steps": (["--steps", "0"], "--steps"),
    "negative seed": (["--seed", "-1"], "--seed"),
    "seed too large": (["--seed", "4294967296"], "--seed"),
    "no such option": (["--pixels", "3"], "--pixels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_demo_refuses_before_it_trains(demo: SimpleNamespace, case: str) -> None:
    arguments, message = REFUSED[case]
    run = invoke(demo, *arguments)
    assert (run.exit_code, run.stdout) == (2, "")
    assert message in run.stderr
