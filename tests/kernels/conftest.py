"""Triton's kernels under its interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernels, interpreted. Memory that they allocate is filled with NaN, to show what no kernel
    writes."""
    from khot._kernels import triton

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield triton
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def split(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same, but rows count as long from 17 entries on."""
    small = {"RESIDENT": 16, "STREAMED": 0, "CHUNK": 16, "PROGRAMS": 12, "WINDOW": 32}
    for name, value in small.items():
        monkeypatch.setattr(kernels.layout, name, value)
    # pieces of one entry per thread would only cost the interpreter time
    layout = kernels.layout
    monkeypatch.setattr(layout, "SAMPLE_BLOCK", 2)
    monkeypatch.setattr(layout, "sample", lambda: (1, 16, 1))
    monkeypatch.setattr(layout, "cut", lambda rows, n: layout.Cut(*layout.parts(rows, n), 1, layout.CHUNK, 1))
    # so that a list has more than one program, and its search more than one turn
    monkeypatch.setattr(kernels.levels, "sample", lambda n: 16)
    for name, value in {"VECTOR": 8, "HELD": 4, "LANES": 4}.items():
        monkeypatch.setattr(kernels.levels, name, value)
    return kernels


@pytest.fixture
def larger(split: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same as `split`, with samples that tell something."""
    for name, value in {"RESIDENT": 128, "CHUNK": 256, "WINDOW": 256, "SAMPLE_BLOCK": 4}.items():
        monkeypatch.setattr(split.layout, name, value)
    monkeypatch.setattr(split.layout, "sample", lambda: (1, 128, 1))
    return split
