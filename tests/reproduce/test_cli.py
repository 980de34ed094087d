"""`python -m reproduce` as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        run = python("-m", "reproduce", "list", stdout=full.fileno())
    told = "reproduce: cannot write the output: No space left on device\n"
    assert (run.returncode, run.stderr) == (2, told)


def test_exit_code_is_that_of_the_command() -> None:
    run = python("-m", "reproduce", "lst")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "reproduce: no experiment 'lst'; did you mean 'list'?\n"


def test_missing_packages_are_named_before_anything_runs() -> None:
    program = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("rich", "sklearn") else find(name, *more)
sys.argv = ["reproduce", "list"]
runpy.run_module("reproduce", run_name="__main__")
"""
    run = python("-c", program)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "reproduce: needs rich, sklearn; pip install -e '.[reproduce]'\n"


def test_command_starts_without_plotting_and_learning_packages() -> None:
    program = "import sys, reproduce.harness.cli; print({'matplotlib', 'sklearn'} & set(sys.modules))"
    run = python("-c", program)
    assert run.stdout.strip() == "set()", run.stderr
