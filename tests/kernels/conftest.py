"""Triton's kernels under its interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernels, interpreted. Memory that they allocate is filled with NaN, to show what no kernel
    writes."""
    from triton.runtime import interpreter

    from khot._kernels import triton

    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", scan)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield triton
    torch.use_deterministic_algorithms(before)


def scan(self: Any, given: list[Any]) -> list[Any]:
    """The interpreter's scan in steps that double their reach, as a device takes them, over whole tensors.
    Its own calls a function for each entry."""
    values, reach = [v.handle.data for v in given], 1
    place = np.arange(values[0].shape[self.axis])
    place = place if self.axis else place.reshape(-1, *(1,) * (values[0].ndim - 1))
    while reach < place.size:
        pieces = [
            self.to_tensor(v, g.dtype)
            for half in ([np.roll(v, reach, self.axis) for v in values], values)
            for v, g in zip(half, given, strict=True)
        ]
        joined = self.combine_fn.fn(*pieces)
        joined = joined if isinstance(joined, tuple) else (joined,)
        values = [np.where(place < reach, v, j.handle.data) for v, j in zip(values, joined, strict=True)]
        reach *= 2
    return [self.to_tensor(v, g.dtype) for v, g in zip(values, given, strict=True)]


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
