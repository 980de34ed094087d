"""How Triton's kernels are launched: with little work, through one place, and built seldom."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import inspect
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import khot
from khot._core import eager
from khot._kernels import gpu

triton = pytest.importorskip("triton", reason="Triton is not installed")
launch = pytest.importorskip("khot._kernels.triton.launch")
sizes = pytest.importorskip("khot._kernels.triton.sizes")
ROOT = Path(__file__).parents[2]
FOLDER = Path(khot.__file__).parent / "_kernels" / "triton"
# a number of which there are many, and which no kernel should be built for
COUNTS = {"rows", "parts", "count", "evaluations", "wanted", "unused", "place", "done", "shift"}

HOST = """
import json
import sys
import traceback
import torch
from benchmarks import host
import khot
from khot._kernels.triton import launch
with host.device():
    start, stacks = launch.start, []
    def noted(*given):
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
        files = [frame.f_code.co_filename.partition("src/khot/")[2] for frame in frames]
        stacks.append([f"{f.f_code.co_name} ({file})" for f, file in zip(frames, files) if file])
        start(*given)
    x = torch.ones(512, 64)
    khot.soft_budget(x, x, 8), khot.soft_sort(x)  # imports the kernels
    launch.start = noted
    khot.soft_budget(x, x, 8), khot.soft_sort(x)
    launch.start = start
    print(json.dumps(stacks))
    print(host.builds([(rows, 64) for rows in host.ROWS]), host.builds([(128, n) for n in range(33, 65)]))
    for start in (lambda: None, host._start_nothing):
        start()
        launch.forget()
        for x in (torch.ones(512, 64), torch.ones(512, 64, requires_grad=True)):
            khot.soft_topk(x, 8), khot.soft_topk(x, 8)  # compiles, plans
            entered = []
            sys.setprofile(lambda frame, event, _: event == "call" and entered.append(frame.f_code.co_name))
            khot.soft_topk(x, 8)
            sys.setprofile(None)
            print(len(entered))
"""


def test_a_call_builds_seldom_and_enters_few_functions() -> None:
    """Of a soft top-k, forward and backward: two builds whatever the number of rows, and six for the lengths
    of one width (it is full, divisible by 16, or neither). Python functions are entered before a launch, in
    the ordinary way and in a plain call: time would show how busy the machine is."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "KHOT_KERNELS": "reference"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", HOST], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    stacks, *counts = done.stdout.splitlines()
    rows, lengths, entered, entered_with_gradient, *plain = map(int, " ".join(counts).split())
    assert rows == 2 and lengths <= 6
    assert entered <= 62 and entered_with_gradient <= 71
    assert eager._extension() is None or max(plain) <= 4
    walks = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = walks.partition("function by function")[2]
    lines = drawn.partition("```text\n")[2].partition("```")[0].splitlines()
    for begin, stack in zip((0, 65), json.loads(stacks), strict=True):
        way = [re.match(r"(?:\w+\.)?(\w+ \(.*?\.py)\)", line[begin:]) for line in lines]
        own = [each.replace("_kernels/", "").rstrip(")") for each in reversed(stack)]
        assert [*own, "start (triton/launch.py"] == [each[1] for each in way if each]


class Kernel:
    """What a launch uses of a Triton kernel and of a compiled one; notes the device that it runs on."""

    __name__, arg_names = "kernel", ("x_pointer", "n", "WIDTH")
    signature = inspect.signature(lambda x_pointer, n, WIDTH: None)
    function, packed_metadata = 17, (4, 1, 0)

    def __init__(self, devices: list[int]) -> None:
        self.fn, self.devices, self.builds, self.runs = self, devices, 0, []  # type: ignore[var-annotated]
        self.told = 0  # launches in Triton's own way, which tells hooks of them

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **_: Any) -> Kernel:
            self.builds += len(grid) == 1  # a compiled kernel is given all three
            self.told += len(grid) == 3
            self.runs.append((grid[0], self.devices[-1], *arguments[1:]))
            return self

        return run

    def run(self, *given: Any) -> None:
        assert given[1:9] == (1, 1, 0, self.function, self.packed_metadata, None, None, None)
        self.runs.append((given[0], self.devices[-1], *given[10:]))


@dataclass(frozen=True)
class There:
    """What a launch asks of a tensor."""

    device: int
    address: int = 0
    dtype: torch.dtype = torch.float32

    def get_device(self) -> int:
        return self.device

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    devices = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        devices.append(index)
        yield
        devices.pop()

    active = SimpleNamespace(get_current_device=lambda: devices[-1], get_current_stream=lambda _: 0)
    monkeypatch.setattr(launch, "PTX", SimpleNamespace(value=True))
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "_VARIANTS", {})
    monkeypatch.setattr(torch.cuda, "device", device)
    return Kernel(devices)


def test_a_kernel_runs_on_the_device_of_its_first_argument(kernel: Kernel) -> None:
    for device in (0, 1, 0, 1):
        launch.launch(kernel, 5, There(device), 3, WIDTH=8)
    assert [run[1] for run in kernel.runs] == [0, 1, 0, 1]
    assert kernel.builds == 2


def test_a_kernel_is_built_for_what_triton_tells_apart(kernel: Kernel) -> None:
    calls = [
        (5, There(0), 3, 8, 1),
        (7, There(0), 19, 8, 1),  # other programs; an integer with the same rest modulo 16
        (7, There(0), 1, 8, 2),  # 1 is a constant
        (7, There(0), 16, 8, 3),
        (7, There(0, address=8), 16, 8, 4),
        (7, There(0, dtype=torch.float16), 16, 8, 5),
        (7, There(0), 16, 16, 6),
        (9, There(0), 32, 16, 6),
        (9, There(0), 1 << 31, 16, 7),
    ]
    for programs, x, n, width, builds in calls:
        launch.launch(kernel, programs, x, n, WIDTH=width)
        assert kernel.builds == builds
    # the compiled kernel gets the constants in its order
    assert kernel.runs[1] == (7, 0, 19, 8) and kernel.runs[7] == (9, 0, 32, 16)


def test_hooks_are_told_of_every_launch(kernel: Kernel) -> None:
    """Where there are none, Triton's launcher is not made to call an empty list of them."""
    hooks = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    for hook in (None, *hooks):
        if hook is not None:
            hook.add(print)
        try:
            for _ in range(2):
                launch.launch(kernel, 5, There(0), 3, WIDTH=8)
        finally:
            if hook is not None:
                hook.remove(print)
    assert kernel.builds == 1 and kernel.told == 4 and len(kernel.runs) == 6


def modules() -> list[ModuleType]:
    found = [
        importlib.import_module(f"khot._kernels.triton.{path.stem}") for path in FOLDER.glob("[a-z]*.py")
    ]
    return [module for module in found if hasattr(module, "KERNELS")]


def test_no_kernel_is_built_for_a_count() -> None:
    kernels = [kernel for module in modules() for kernel in module.KERNELS]
    assert len(kernels) > 20
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter builds nothing")
    for kernel in kernels:
        special = {p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize)}
        assert not special & COUNTS, kernel.__name__


def problems() -> dict[str, Any]:
    """What the row programs solve and pull back through, by file and name."""
    from khot._kernels.triton.arguments import Problem, Puller

    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in (importlib.import_module(f"khot._kernels.triton.{p.stem}") for p in FOLDER.glob("*.py"))
        for name, value in vars(module).items()
        if isinstance(value, (Problem, Puller))
    }


def test_what_is_compiled_is_known_by_every_body() -> None:
    """Triton writes a constant tuple of functions down by their names: with an upgrade of khot it would take
    what it compiled before from its files."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter builds nothing")
    from triton.compiler import ASTSource

    from khot._kernels.triton.pull import pull_rows
    from khot._kernels.triton.rows import solve

    found = problems()
    solved = {"counted.COUNT", "paid.PAID", "magnitude.SIZED", "losses.LOSS"}
    assert set(found) == solved | {"pull.PULL_PAID", "magnitude.PULL_SIZED"}
    for name, problem in found.items():
        kernel = solve if name in solved else pull_rows
        at = kernel.arg_names.index("P")
        kinds = dict.fromkeys(kernel.arg_names, "i32") | {"P": "constexpr"}
        members = [member for member in problem._fields if member != "left"]
        changed = [problem]
        for member in members:
            other = copy.copy(getattr(problem, member))
            other._unsafe_update_src(f"{other.src}\n    pass")
            changed.append(problem._replace(**{member: other}))
        assert len({ASTSource(kernel, kinds, {(at,): each}, {}).hash() for each in changed}) == len(changed)


def test_sizes_are_those_of_triton() -> None:
    """Whose functions are left to kernels: on the host each call takes as long as several launches."""
    for n in (*range(1, 1_030), 2**20 - 1, 2**20, 2**31 + 1):
        assert sizes.next_power_of_2(n) == triton.next_power_of_2(n)
        assert all(sizes.cdiv(n - 1, size) == triton.cdiv(n - 1, size) for size in (1, 3, 64))
    for path in FOLDER.glob("*.py"):
        assert "triton.cdiv(" not in path.read_text() and "triton.next_power" not in path.read_text(), path


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


def test_no_global_of_a_kernel_is_nan() -> None:
    """Triton compares the globals of a kernel before a launch with what they were when it was compiled. NaN
    differs from itself, so that a second launch would be an error, which the interpreter does not see."""
    import triton.language as tl

    from khot._kernels import triton as kernels

    for module in pkgutil.iter_modules(kernels.__path__):
        for name, value in vars(importlib.import_module(f"{kernels.__name__}.{module.name}")).items():
            number = value.value if isinstance(value, tl.constexpr) else value
            assert not (isinstance(number, float) and math.isnan(number)), f"{module.name}.{name}"
