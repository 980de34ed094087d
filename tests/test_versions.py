"""The versions of torch: what the package, its workflows and `make matrix` say, and what older ones lack."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from khot._core import torch_internals
from khot._kernels import cpu

ROOT = Path(__file__).resolve().parents[1]
checkout = pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="not a checkout")


def said(file: str, pattern: str) -> str:
    (found,) = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return str(found)


@checkout
def test_matrix_has_the_oldest_the_pinned_and_the_newest_torch() -> None:
    oldest = said("pyproject.toml", r'^dependencies = \["torch>=([\d.]+)"\]')
    pinned = said("constraints.txt", r"^torch==(\S+)$")
    matrix = said("Makefile", r"^TORCH \?= (.+)$").split()
    assert matrix[0] == f"{oldest}.0"
    assert any(version.startswith(f"{cpu.OLDEST_TORCH}.") for version in matrix)
    assert matrix[-2:] == [pinned, "newest"]
    assert said(".github/workflows/ci.yml", r"torch: \[(.+)\]").replace('"', "").split(", ") == matrix


@checkout
@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_pages_name_the_oldest_torch(page: str) -> None:
    oldest = said("pyproject.toml", r'^dependencies = \["torch>=([\d.]+)"\]')
    assert said(page, r"PyTorch ([\d.]+) or newer") == oldest
    assert f"torch {cpu.OLDEST_TORCH} or newer" in (ROOT / page).read_text(encoding="utf-8")


# ------------------------------------------------- what stands in for the names that torch 2.6 does not have

PLAIN, TRAINED = torch.zeros(2), torch.zeros(2, requires_grad=True)
VALUES: list[Any] = [PLAIN, TRAINED, None, 1.5, "logistic"]


@pytest.mark.parametrize("count", range(4))
def test_any_requires_grad_agrees_with_torch(count: int) -> None:
    for args in itertools.product(VALUES, repeat=count):
        expected = any(a is TRAINED for a in args)
        assert torch_internals._any_requires_grad(*args) == expected
        assert torch_internals.any_requires_grad(*args) == expected


class Asks(torch.nn.Module):
    """Adds 1 where it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if torch_internals.is_exporting() else x.clone()


def test_a_call_is_no_export() -> None:
    torch.testing.assert_close(Asks()(PLAIN), PLAIN)
    assert not torch_internals._is_exporting()


def test_an_export_is_known() -> None:
    exported = torch.export.export(Asks(), (PLAIN,), strict=False)
    torch.testing.assert_close(exported.module()(PLAIN), PLAIN + 1)


def test_a_compilation_gets_torch_s_own_answer() -> None:
    # Dynamo of torch 2.10 answers for every compilation that it is an export; torch 2.6 has no answer
    asked = getattr(torch.compiler, "is_exporting", lambda: False)

    def answers(x: Tensor) -> Tensor:
        return x + (1 if torch_internals.is_exporting() else 0) - (1 if asked() else 0)

    compiled = torch.compile(answers, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(PLAIN), PLAIN)


def test_functions_that_run_as_they_are_keep_their_result_under_compile() -> None:
    def opaque(x: Tensor) -> Tensor:
        return x * 2

    torch_internals.run_as_is(opaque)
    torch.testing.assert_close(opaque(TRAINED), TRAINED * 2)
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    torch.testing.assert_close(compiled(opaque(PLAIN)), PLAIN + 1)
