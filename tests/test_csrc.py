"""The C++ sources: only bindings include torch, and unknown names raise errors."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

import khot
from khot import _kernels as kernels

CSRC = Path(__file__).resolve().parents[1] / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', flags=re.MULTILINE)

needs_extension = pytest.mark.skipif(
    not kernels.active()["cpu"].startswith("compiled"), reason="the compiled kernels are not in use"
)


def sources() -> Iterator[Path]:
    return (path for path in sorted(CSRC.rglob("*")) if path.suffix in (".h", ".cpp"))


def included(path: Path) -> list[str]:
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


def test_only_the_bindings_include_a_header_of_torch() -> None:
    torch_headers = ("torch/", "ATen/", "c10/", "pybind11/", "Python.h")
    knowing = {path for path in sources() if any(name.startswith(torch_headers) for name in included(path))}
    assert {path.parent.name for path in knowing} == {"bindings", "eager"}


def test_no_room_includes_a_header_of_the_bindings() -> None:
    # otherwise it would include torch through them
    bindings = ("bindings/", "eager/")
    knowing = {path for path in sources() if any(name.startswith(bindings) for name in included(path))}
    assert {path.parent.name for path in knowing} == {"bindings", "eager"}


def test_no_macro_is_asked_for_that_a_pragma_may_leave_undefined() -> None:
    """In C++ before GCC 13, a pragma that chooses the instruction set does not define its macros, so that the
    plainer code was compiled."""
    asking = re.compile(r"__(AVX\w*|FMA|F16C|BMI2?)__\)?\s*(&&|\|\||\)|$)", flags=re.MULTILINE)
    conditions = re.compile(r"^\s*#\s*(?:el)?if.*$", flags=re.MULTILINE)
    found = [(path.name, line) for path in sources() for line in conditions.findall(path.read_text())]
    assert found
    assert [each for each in found if asking.search(each[1])] == []


def test_includes_are_written_from_csrc_on() -> None:
    own = [(path, name) for path in sources() for name in re.findall(r'#include "([^"]+)"', path.read_text())]
    assert own
    assert [(path.name, name) for path, name in own if not (CSRC / name).is_file()] == []


# ------------------------------------------------------------------------------------------ the built library

LIBRARY = next(iter(sorted(Path(khot.__file__).parent.glob("_C.*.so"))), None)
# C++ of torch, of pybind11 or of Python: none of it is stable
UNSTABLE = re.compile(r"\b(c10|at|torch|caffe2|pybind11)::|^_?Py")
STABLE_HEADERS = (
    "torch/csrc/inductor/aoti_torch/c/shim.h",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h",
    "torch/csrc/stable/c/shim.h",
)


def undefined(library: Path) -> dict[str, str]:
    """The symbols that a library takes from others, without their versions: mangled, and readable."""
    found = []
    for option in ("-D", "-DC"):
        command = ["nm", option, "--undefined-only", str(library)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        # "  U name@version" or "  w name"; a weak symbol may stay undefined
        found.append([line.split(maxsplit=1)[1] for line in told.splitlines() if line.split()[0] == "U"])
    return dict(zip(*found, strict=True))


def unstable(symbols: dict[str, str]) -> list[str]:
    """The symbols that a later torch may lack or change. Those with a version are of C and C++."""
    headers = [Path(path) / name for path in include_paths() for name in STABLE_HEADERS]
    declared = set(re.findall(r"\w+", "".join(path.read_text() for path in headers if path.is_file())))
    return [
        name
        for name, readable in symbols.items()
        if UNSTABLE.search(readable) or not (name in declared or "@" in name or readable.startswith("std::"))
    ]


@pytest.mark.skipif(
    LIBRARY is None or sys.platform != "linux" or shutil.which("nm") is None, reason="no library, or no nm"
)
def test_the_library_uses_stable_symbols_only() -> None:
    assert LIBRARY is not None
    symbols = undefined(LIBRARY)
    assert len([name for name in symbols if name.startswith(("aoti_torch_", "torch_"))]) > 10
    assert unstable(symbols) == []


@pytest.mark.parametrize(
    "name, readable",
    [
        ("_ZN3c105ErrorC1Ev", "c10::Error::Error()"),
        ("_ZN2at5emptyEv", "at::empty()"),
        ("_ZN5torch8autograd8FunctionEv@V1", "torch::autograd::Function()"),
        ("_ZNSt6vectorIN3c1010ScalarTypeEE", "std::vector<c10::ScalarType>"),
        ("PyObject_Call", "PyObject_Call"),
        ("_Py_Dealloc", "_Py_Dealloc"),
        ("aoti_torch_cpu_no_such_operator", "aoti_torch_cpu_no_such_operator"),
        ("torch_no_such_function", "torch_no_such_function"),
        ("cblas_sgemm", "cblas_sgemm"),
    ],
)
def test_unstable_symbols_are_seen(name: str, readable: str) -> None:
    assert unstable({name: readable}) == [name]


@needs_extension
def test_unknown_cdf_raises_by_name() -> None:
    x, k, tau = torch.randn(3, 8), torch.tensor(2.0), torch.tensor(1.0)
    with pytest.raises(
        RuntimeError,
        match="unknown cdf 'cauchy': the CPU kernels know logistic, laplace, normal, uniform, power",
    ):
        torch.ops.khot.soft_topk(x, k, tau, "cauchy", 0.0, "y")
    with pytest.raises(RuntimeError, match="unknown output 'logit': the CPU kernels know y, log, threshold"):
        torch.ops.khot.soft_topk(x, k, tau, "logistic", 0.0, "logit")
    t = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="unknown cdf 'cauchy'"):
        torch.ops.khot.soft_topk_backward(x, t, x, t, t, tau, "cauchy", 0.0, "y", None)


@needs_extension
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=["no rows", "no entries"])
def test_unknown_cdf_raises_where_there_is_nothing_to_compute(shape: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError, match="unknown cdf 'cauchy'"):
        torch.ops.khot.soft_topk(torch.randn(shape), torch.tensor(0.0), torch.tensor(1.0), "cauchy", 0.0, "y")
