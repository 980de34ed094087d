"""The `khot` command: what it prints, what it refuses, and that the demo does what it promises."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import khot
from khot.experiments import demo
from khot.experiments.harness import cli, entry
from khot.experiments.harness.data import MNIST_FILES

PNG = b"\x89PNG\r\n\x1a\n"


def invoke(*args: str | Path, data_dir: Path | None = None) -> Result:
    environment = {"KHOT_DATA_DIR": None if data_dir is None else str(data_dir)}
    return CliRunner().invoke(cli.app, [str(arg) for arg in args], env=environment)


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120)


def accuracies(output: str) -> dict[str, float]:
    """The table that the demo prints, by the name of the pixels."""
    cells = dict(re.findall(r"^│ (.+?) +│ +\d+ │ +([\d.]+) % │$", output, flags=re.MULTILINE))
    return {name: float(cells[label]) for name, label in demo.LABELS.items()}


def test_info_prints_versions_devices_and_kernels() -> None:
    run = python("-m", "khot", "info")
    assert (run.returncode, run.stderr) == (0, "")
    lines = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    names = ["khot", "torch", "python", "triton", "devices", "cpu kernels", "gpu kernels"]
    assert [name for name in lines if name != "note"] == names
    assert lines["khot"] == khot.__version__
    assert lines["torch"] == torch.__version__
    assert lines["devices"].startswith("cpu")
    assert (lines["gpu kernels"] == "none") == (not torch.cuda.is_available())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
@pytest.mark.parametrize("command", [["info"], ["reproduce", "list"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "khot", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert (run.returncode, run.stderr) == (2, "khot: cannot write the output: No space left on device\n")


def test_a_reader_that_has_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        run = subprocess.run(
            [sys.executable, "-m", "khot", "info"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert (run.returncode, run.stderr) == (1, "")


def test_an_interrupt_while_torch_is_imported_is_quiet() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    [(module, function)] = re.findall(r'^khot = "(.+):(.+)"$', pyproject, flags=re.MULTILINE)
    # what Ctrl-C does, at the moment that the import of torch begins
    code = f"""
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from {module} import {function}
{function}()
"""
    run = python("-c", code)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def test_version() -> None:
    run = invoke("--version")
    assert (run.exit_code, run.stdout) == (0, f"khot {khot.__version__}\n")


def test_no_command_prints_the_help() -> None:
    run = invoke()
    assert run.exit_code == 0
    assert "demo" in run.stdout
    assert "info" in run.stdout


def test_short_demo_prints_the_table_and_draws_the_picture(tmp_path: Path) -> None:
    run = invoke("demo", "--steps", "3", "--k", "5", "--out", tmp_path)
    assert run.exit_code == 0, run.output
    assert all(0 <= percent <= 100 for percent in accuracies(run.stdout).values())
    assert "Which 5 of 64 pixels" in run.stdout
    picture = tmp_path / "khot-demo.png"
    assert str(picture) in run.stdout
    assert "KHotSelector: step 3 of 3" in run.output
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("k", [1, 64])
def test_demo_runs_at_both_ends(tmp_path: Path, steps: int, k: int) -> None:
    result = demo.run(demo.Args(steps=steps, k=k, out=tmp_path))
    assert result.chosen.sum() == k
    assert result.variance.sum() == k
    assert result.scores.shape == (64,)


def test_demo_repeats_itself_and_leaves_no_trace(tmp_path: Path) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first, again, other = (
        demo.run(demo.Args(steps=10, seed=seed, out=tmp_path / "x.png")) for seed in (1, 1, 2)
    )
    assert first.accuracy == again.accuracy
    assert torch.equal(first.scores, again.scores)
    assert torch.equal(first.chosen, again.chosen)
    assert not torch.equal(first.scores, other.scores)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def check_demo(run: Result, picture: Path) -> None:
    """The chosen pixels win over both baselines, and no k pixels over all of them.

    The seed is fixed, but rounding differs between machines and the choice with it. Over seeds 0 to 4 the
    chosen pixels win over those of highest variance by 2.5 to 4.1 percentage points on digits.
    """
    assert run.exit_code == 0, run.output
    found = accuracies(run.stdout)
    assert found["all"] > found["chosen"] > found["variance"], found
    assert found["chosen"] > found["random"], found
    assert picture.read_bytes().startswith(PNG)


def test_demo_beats_the_baselines_on_digits(tmp_path: Path) -> None:
    check_demo(invoke("demo", "--out", tmp_path / "digits.png"), tmp_path / "digits.png")


@pytest.mark.slow
def test_demo_beats_the_baselines_on_mnist(tmp_path: Path) -> None:
    given = os.environ.get("KHOT_DATA_DIR")
    if not given:
        pytest.skip("KHOT_DATA_DIR is not set")
    run = invoke("demo", "--out", tmp_path / "mnist.png", data_dir=Path(given))
    check_demo(run, tmp_path / "mnist.png")
    assert "Which 50 of 784 pixels" in run.stdout


def refused(run: Result) -> str:
    """The one line that a run left on stderr when it refused its arguments."""
    assert run.exit_code == 2
    assert run.stdout == ""
    *lines, end = run.stderr.split("\n")
    assert end == ""
    assert len(lines) == 1, run.stderr
    return lines[0]


REFUSED = {
    "k below 1": (["--k", "0"], "k = 0: expected at least 1"),
    "k negative": (["--k", "-3"], "k = -3: expected at least 1"),
    "k above n": (["--k", "65"], "k = 65: expected at most 64"),
    "k not a number": (["--k", "ten"], "--k"),
    "no steps": (["--steps", "0"], "steps = 0: expected at least 1"),
    "negative seed": (["--seed", "-1"], "seed = -1: expected"),
    "seed too large": (["--seed", "4294967296"], "seed = 4294967296: expected 0 to 2**32 - 1"),
    "no such option": (["--pixels", "3"], "--pixels"),
    "out below a file": (["--out", f"{__file__}/x.png"], "expected a place that can be written to"),
    "out of another kind": (["--out", "x.pdf"], "expected a .png file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_demo_refuses_in_one_line(case: str) -> None:
    arguments, message = REFUSED[case]
    assert message in refused(invoke("demo", *arguments))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_demo_reports_a_full_disk_in_one_line(tmp_path: Path) -> None:
    picture = tmp_path / "x.png"
    picture.symlink_to("/dev/full")
    run = invoke("demo", "--steps", "1", "--out", picture)
    assert run.exit_code == 2
    (line,) = [line for line in run.stderr.splitlines() if "khot: " in line]
    assert line.startswith(f"khot: {picture}: cannot be written (No space left on device)")
    assert "Traceback" not in run.output


def test_unknown_commands_are_refused_in_one_line() -> None:
    assert refused(invoke("dmeo")) == "khot: no command 'dmeo'; did you mean 'demo'?"
    assert refused(invoke("xyz")) == "khot: no command 'xyz'; `khot --help` prints what there is"


def test_demo_names_the_files_that_it_misses(tmp_path: Path) -> None:
    for run in (
        invoke("demo", data_dir=tmp_path),
        invoke("demo", "--data-dir", tmp_path),
        invoke("demo", "--data-dir", tmp_path / "nowhere"),
    ):
        line = refused(run)
        assert str(tmp_path) in line
        assert all(name in line for name in MNIST_FILES)


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"no header"), gzip.compress(b"0" * 99)],
    ids=["no gzip", "no header", "wrong header"],
)
def test_demo_names_the_file_that_is_broken(tmp_path: Path, content: bytes) -> None:
    for name in MNIST_FILES:
        (tmp_path / name).write_bytes(content)
    line = refused(invoke("demo", data_dir=tmp_path))
    assert str(tmp_path / MNIST_FILES[0]) in line
    assert "expected" in line


def test_demo_reports_in_one_line_as_a_process(tmp_path: Path) -> None:
    run = python("-m", "khot", "demo", "--data-dir", str(tmp_path))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1


def test_missing_packages_are_named_by_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys; sys.modules['typer'] = None; sys.argv[1:] = ['demo']; from khot.__main__ import main"
    )
    run = python("-c", f"{program}; main()")
    assert run.returncode == 1
    assert run.stderr.splitlines() == [entry.MISSING]
    assert "pip install khot[demo]" in entry.MISSING

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run_without = invoke("demo")
    assert run_without.exit_code == 1
    assert "pip install khot[demo]" in run_without.output


def test_demo_names_the_extra_of_a_selector_that_cannot_be_imported() -> None:
    program = (
        "import sys; sys.modules['sklearn.utils.validation'] = None; sys.argv[1:] = ['demo'];"
        "from khot.__main__ import main"
    )
    run = python("-c", f"{program}; main()")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "khot: khot.sklearn needs scikit-learn >= 1.6: pip install khot[sklearn]\n"


def test_command_starts_without_plotting_and_learning_packages() -> None:
    program = "import sys, khot.experiments.harness.cli; print({'matplotlib', 'sklearn'} & set(sys.modules))"
    run = python("-c", program)
    assert run.stdout.strip() == "set()"
