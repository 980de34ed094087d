"""What every test and every docstring's example finds ready."""

from __future__ import annotations

import os

import pytest
import torch

import khot

# code that builds the documentation, and needs what builds it
collect_ignore_glob = ["docs/*.py", "docs/build/*"]


@pytest.fixture(autouse=True)
def example_names(doctest_namespace: dict[str, object]) -> None:
    """Docstrings write `khot` and `torch` without importing them."""
    doctest_namespace.update(khot=khot, torch=torch)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, unless KHOT_REQUIRE_CUDA=1 says that there must be one."""
    if item.get_closest_marker("needs_cuda") and not torch.cuda.is_available():
        if os.environ.get("KHOT_REQUIRE_CUDA") == "1":
            pytest.fail("KHOT_REQUIRE_CUDA=1, but torch sees no CUDA device")
        pytest.skip("no CUDA device")
