"""The C++ sources: only bindings include torch, and unknown names raise errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
    assert {path.parent.name for path in knowing} == {"bindings"}


def test_no_room_includes_a_header_of_the_bindings() -> None:
    # otherwise it would include torch through them
    knowing = {path for path in sources() if any(name.startswith("bindings/") for name in included(path))}
    assert {path.parent.name for path in knowing} == {"bindings"}


def test_includes_are_written_from_csrc_on() -> None:
    own = [(path, name) for path in sources() for name in re.findall(r'#include "([^"]+)"', path.read_text())]
    assert own
    assert [(path.name, name) for path, name in own if not (CSRC / name).is_file()] == []


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
