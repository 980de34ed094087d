"""`python -m reproduce` as a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import fresh

ROOT = Path(__file__).resolve().parents[2]


MODULE = "import os, runpy; {}; runpy.run_module('reproduce', run_name='__main__', alter_sys=True)"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_output_that_cannot_be_written_is_one_line() -> None:
    full = MODULE.format("os.dup2(os.open('/dev/full', os.O_WRONLY), 1)")
    run = fresh.run(full, "list", cwd=ROOT)
    told = "reproduce: cannot write the output: No space left on device\n"
    assert (run.returncode, run.stderr) == (2, told)


def test_exit_code_is_that_of_the_command() -> None:
    run = fresh.run(MODULE.format("pass"), "lst", cwd=ROOT)
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
    run = fresh.run(program, cwd=ROOT)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "reproduce: needs rich, sklearn; pip install -e '.[reproduce]'\n"


def test_command_starts_without_plotting_and_learning_packages() -> None:
    program = "import sys, reproduce.harness.cli; print({'matplotlib', 'sklearn'} & set(sys.modules))"
    run = fresh.run(program, cwd=ROOT)
    assert run.stdout.strip() == "set()", run.stderr
