"""The page "For JAX" and the example, where the checkout has them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE, EXAMPLE = ROOT / "docs" / "jax.md", ROOT / "examples" / "jax_gate.py"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not a checkout")


def test_the_page_runs() -> None:
    (block,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {})


def test_the_example_runs() -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "40"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"learned k: 1\d\.\d of 40 features, of which 6 count", told)  # on its way from 20
