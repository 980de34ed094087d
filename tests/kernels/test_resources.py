"""What the GPU kernels compile to is held to what was recorded: registers, spills, instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

resources = pytest.importorskip("benchmarks.resources", reason="Triton is not installed")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("calls", ["--few", pytest.param("--no-few", marks=pytest.mark.slow)])
def test_machine_code_is_as_recorded(calls: str) -> None:
    command = [sys.executable, "-m", "benchmarks.resources", "--check", calls]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=3000, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, 0),
        ({"instructions": 1_050}, 0),
        ({"instructions": 1_051}, 1),
        ({"registers": 128}, 0),
        ({"registers": 129, "spills": 17}, 2),
        ({"error": "CompilationError: no"}, 1),
    ],
)
def test_what_grew_is_told(change: dict[str, object], told: int) -> None:
    recorded = {"kernel": "solve", "instructions": 1_000, "registers": 100, "spills": 0, "shared": 48}
    assert len(list(resources.faults({"a call": recorded | change}, {"a call": recorded}))) == told
    unknown = list(resources.faults({"another": recorded | change}, {"a call": recorded}))
    assert len(unknown) == ("error" in change)
