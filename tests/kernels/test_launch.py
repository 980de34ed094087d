"""How Triton's kernels are launched: with little work, through one place, and built seldom."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import khot
from khot._kernels import gpu

triton = pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).parents[2]
FOLDER = Path(khot.__file__).parent / "_kernels" / "triton"
# a number of which there are many, and which no kernel should be built for
COUNTS = {"rows", "parts", "count", "evaluations", "wanted", "unused", "place", "done", "shift"}

HOST = """
import sys
import torch
from benchmarks import host
import khot
with host.device():
    print(host.builds([(rows, 64) for rows in host.ROWS]), host.builds([(128, n) for n in range(33, 65)]))
    x = torch.ones(512, 64)
    khot.soft_topk(x, 8)
    entered = []
    sys.setprofile(lambda frame, event, _: event == "call" and entered.append(frame.f_code.co_name))
    khot.soft_topk(x, 8)
    sys.setprofile(None)
    print(len(entered))
"""


def test_a_call_builds_seldom_and_enters_few_functions() -> None:
    """Of a soft top-k, forward and backward: two builds whatever the number of rows, and six for the lengths
    of one width (it is full, divisible by 16, or neither). Python functions are entered before a launch:
    time would show how busy the machine is."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "KHOT_KERNELS": "reference"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", HOST], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows, lengths, entered = map(int, done.stdout.split())
    assert rows == 2 and lengths <= 6
    assert entered <= 67


def modules() -> list[ModuleType]:
    from khot._kernels import triton as kernels

    found = [getattr(kernels, path.stem, None) or sys.modules.get(f"{kernels.__name__}.{path.stem}")
             for path in FOLDER.glob("*.py")]  # fmt: skip
    return [module for module in found if hasattr(module, "KERNELS")]


def test_no_kernel_is_built_for_a_count() -> None:
    kernels = [kernel for module in modules() for kernel in module.KERNELS]
    assert len(kernels) > 20
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter builds nothing")
    for kernel in kernels:
        special = {p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize)}
        assert not special & COUNTS, kernel.__name__


def test_every_launch_goes_through_one_place() -> None:
    for path in FOLDER.glob("*.py"):
        if path.name == "launch.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)), (
                f"{path.name}:{node.lineno}"
            )


def test_an_old_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.available()
    monkeypatch.delattr(triton, "constexpr_function")
    assert not gpu.available()
