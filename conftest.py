"""Fixtures and hooks for all tests and docstring examples."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

import khot
import pages

# these build the documentation, and need its dependencies
collect_ignore_glob = ["docs/*.py", "docs/build/*"]


@pytest.fixture(autouse=True)
def example_names(doctest_namespace: dict[str, object]) -> None:
    """Docstrings write `khot` and `torch` without importing them."""
    doctest_namespace.update(khot=khot, torch=torch)


def pytest_configure(config: pytest.Config) -> None:
    pages.read_pages()
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        import interpreting

        interpreting.quicken()
    if os.environ.get("KHOT_KERNELS") == "triton":
        # Triton's interpreter computes with NumPy, which warns of infinities; they are intended
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")


@pytest.fixture(autouse=os.environ.get("KHOT_KERNELS") == "triton")
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory is filled with NaN, to show what no kernel writes; and programs are small. The tests of kernels
    see to both."""
    if request.path.parent.name == "kernels":
        yield
        return
    from khot._kernels.triton import layout

    monkeypatch.setattr(layout, "TOGETHER", 32)  # the interpreter also spends time on rows that do not exist
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def pytest_collection_finish() -> None:
    """The modules and the tests themselves, a million objects, stay until the end: later collections need
    not look at them. There are fewer of these, which took 8 % of the time of the tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    # or some modules complain at the end of the process; pytest collects five times before
    atexit.register(gc.unfreeze)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests if there is no GPU, unless KHOT_REQUIRE_CUDA=1 requires one."""
    if item.get_closest_marker("needs_cuda") and not torch.cuda.is_available():
        if os.environ.get("KHOT_REQUIRE_CUDA") == "1":
            pytest.fail("KHOT_REQUIRE_CUDA=1, but torch sees no CUDA device")
        pytest.skip("no CUDA device")
