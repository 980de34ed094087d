"""What the GPU kernels compile to stays within its bounds: registers, spills, instructions an entry."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_machine_code_within_bounds() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "benchmarks.resources", "--check", "--jobs", "2"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=1800, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("forward") == done.stdout.count("backward") > 0
