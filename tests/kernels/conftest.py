"""Triton's kernels under its interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from khot._kernels import gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the files test_triton*.py have runs under the interpreter alone."""
    marks = (
        pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
        # Triton reads this variable at import, so a test cannot set it
        pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs with TRITON_INTERPRET=1"),
        # the interpreter computes with NumPy, which warns of infinities; they are intended
        pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    )
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name.startswith("test_triton"):
            for mark in marks:
                item.add_marker(mark)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The operators and the files of the kernels, interpreted. Memory that they allocate is filled with NaN,
    to show what no kernel writes."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    package = "khot._kernels.triton"
    files = [file.name for file in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    module = ModuleType("kernels")
    vars(module).update({file: importlib.import_module(f"{package}.{file}") for file in files})
    vars(module).update({name: gpu.load(name) for name in gpu.KERNELS})
    yield module
    torch.use_deterministic_algorithms(before)


#: Sizes by which rows of 17 entries are long, so that programs share them, with several pieces of everything.
SHARED: dict[str, dict[str, Any]] = {
    "layout": {"RESIDENT": 16, "STREAMED": 0, "CHUNK": 16, "PROGRAMS": 32, "WINDOW": 32, "SAMPLE_BLOCK": 2},
    "levels": {"VECTOR": 8, "HELD": 4, "LANES": 4},
    "counts": {"TILE": 16, "LEVELS": 2, "MANY": 2},
    "ranks": {"RANKED": 8, "SHORT": 8, "CHUNK": 16},
    "row_sort": {"CHUNK": 16, "HELD": 4, "PROBES": 2, "SHORTEST": 17, "LEAST": 0},
    "greedy": {"RANKED": 8, "WIDTH": 16},
    "short_projection": {"LONGEST": 8, "LONGEST_POWERS": 8},
    "transport": {"HELD": 16, "FEW": 1, "SORTED": 8},
    "draws": {"HELD": 8, "CHUNK": 16},
    "designs": {"NODES": 4, "WIDTH": 16},
}
#: Sizes by which such rows stream past a program each.
STREAMED: dict[str, dict[str, Any]] = {
    "layout": {"RESIDENT": 16},
    "short_projection": {"LONGEST": 8, "LONGEST_POWERS": 8},
    "long_projection": {"CHUNK": 16},
}


def resize(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, dict[str, Any]]) -> None:
    """Set constants of the kernels' modules."""
    for module, values in sizes.items():
        for name, value in values.items():
            monkeypatch.setattr(sys.modules[f"khot._kernels.triton.{module}"], name, value)


@pytest.fixture
def split(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same, but rows count as long from 17 entries on, and programs share them."""
    resize(monkeypatch, SHARED)
    # pieces of one entry per thread would only cost the interpreter time
    layout = kernels.layout
    monkeypatch.setattr(layout, "sample", lambda: (1, 16, 1))
    monkeypatch.setattr(layout, "cut", lambda rows, n: layout.Cut(*layout.parts(rows, n), 1, layout.CHUNK, 1))
    # so that a list has more than one program, and its search more than one turn
    monkeypatch.setattr(kernels.levels, "sample", lambda n: 16)
    return kernels


@pytest.fixture
def streamed(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The same, but rows from 17 entries on stream past a program each, 16 entries at a time."""
    resize(monkeypatch, STREAMED)
    for name in ("tile", "pair_tile"):
        monkeypatch.setattr(kernels.layout, name, lambda rows, n: kernels.layout.Tile(1, 2, 8, 1, True))
    held = [
        cached
        for module in ("counted", "losses", "magnitude", "paid", "pull")
        for name, cached in vars(sys.modules[f"khot._kernels.triton.{module}"]).items()
        if name in ("variants", "_variants", "_variant")
    ]
    for cached in held:
        cached.cache_clear()
    yield kernels
    for cached in held:
        cached.cache_clear()


@pytest.fixture
def larger(split: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same as `split`, with samples that tell something."""
    for name, value in {"RESIDENT": 128, "CHUNK": 256, "WINDOW": 256, "SAMPLE_BLOCK": 4}.items():
        monkeypatch.setattr(split.layout, name, value)
    monkeypatch.setattr(split.layout, "sample", lambda: (1, 128, 1))
    return split
