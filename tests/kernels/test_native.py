"""Launches without Python, on a driver that records them: the files `launches*.py` in a process of
their own, in which tensors on the CPU take the way of those on a GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from khot._core import eager

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler of C"),
    pytest.mark.skipif(eager._extension() is None, reason="the extension for plain calls is not built"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a driver of CUDA is in use"),
]


def test_launches_without_python(tmp_path: Path) -> None:
    library, source = tmp_path / "libcuda.so.1", ROOT / "tests" / "libcuda.c"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    (tmp_path / "libcuda.so").symlink_to(library.name)  # as older versions of Triton link it
    environment = {
        **os.environ,
        "KHOT_KERNELS": "reference",
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path),
    }
    files = [
        f"tests/kernels/{name}.py"
        for name in ("launches", "launches_plans", "launches_calls", "launches_samples")
    ]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
