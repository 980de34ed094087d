"""The Triton kernels of the k largest entries, interpreted, against the stable sort of the reference."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from khot._kernels.reference import topk as reference
from selection_rows import rows

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def check(kernels: ModuleType, x: Tensor, k: int, largest: bool) -> None:
    values, indices = kernels.topk(x, k, largest, True)
    want, at = reference.topk(x, k, largest, True)
    assert torch.equal(indices, at)
    torch.testing.assert_close(values, x.gather(-1, at), rtol=0, atol=0, equal_nan=True)
    assert values.shape == want.shape


@pytest.fixture
def largest(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The room that the kernels have, small, because the interpreter takes milliseconds for an operation."""
    module = sys.modules["khot._kernels.triton.largest"]
    monkeypatch.setattr(module, "SORTED", 8)
    monkeypatch.setattr(module, "SOME", 8)
    return module


@every_dtype
@pytest.mark.parametrize("n", [1, 5, 64])
def test_short_rows(kernels: ModuleType, dtype: torch.dtype, n: int) -> None:
    x = rows(n).to(dtype)
    check(kernels, x, min(n, 3), True)
    check(kernels, x, n, False)
    check(kernels, x.mT.contiguous().mT, 1, True)


@every_dtype
def test_rows_of_one_program(largest: ModuleType, dtype: torch.dtype) -> None:
    x = rows(300).to(dtype)
    check(largest, x, 7, True)
    check(largest, x[:, :297], 7, False)


@every_dtype
def test_rows_of_many_turns(largest: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Groups of many vectors, as those of long rows."""
    monkeypatch.setattr(largest, "_search", lambda n, k, size: largest._Search(64, 16 // size, 16, 256, 1))
    x = rows(1500).to(dtype)
    check(largest, x, 9, True)
    check(largest, x[8:], 12, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_programs_share(
    largest: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(largest, "PARTED", 200)
    x = rows(500).to(dtype)
    assert largest._parts(6, 500, 9) == (2, 256)
    check(largest, x[::2], 9, True)
    check(largest, x[1::2], 12, False)
    check(largest, x, 2, True)  # no entry more than is wanted reaches the level
    check(largest, x, 1, False)


@every_dtype
def test_many_of_a_row(largest: ModuleType, dtype: torch.dtype) -> None:
    x = rows(90).to(dtype)
    check(largest, x, 45, True)
    check(largest, x[:, :-1], 17, False)
    values, indices = largest.topk(x[:3], 30, True, False)  # in any order
    assert torch.equal(indices.sort().values, reference.topk(x[:3], 30, True, True)[1].sort().values)
    assert torch.equal(values, x[:3].gather(-1, indices))


def test_many_of_a_long_row(largest: ModuleType, split: ModuleType) -> None:
    x = rows(90).float()[::2]
    check(largest, x, 40, True)
    check(largest, x, 11, False)


def test_what_is_left_to_torch(largest: ModuleType) -> None:
    check(largest, rows(40).double(), 3, True)
    check(largest, rows(40).float(), 30, False)


@pytest.mark.parametrize("shape", [(0, 9), (2, 0), (0, 0)])
def test_empty(kernels: ModuleType, shape: tuple[int, int]) -> None:
    values, indices = kernels.topk(torch.empty(shape), 0, True, True)
    assert values.shape == indices.shape == (shape[0], 0)
