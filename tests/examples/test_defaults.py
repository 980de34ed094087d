"""What the pages say of an example is what it gives by default. Each of these runs takes minutes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
pytestmark = pytest.mark.slow


def example(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name=name))


def said(page: str, sentence: str) -> list[float]:
    """The numbers in place of the {} of a sentence of the page."""
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    found = re.search(re.escape(sentence).replace(r"\{\}", r"([\d.]+)"), text)
    assert found, f"{page} does not say: {sentence}"
    return [float(number) for number in found.groups()]


def test_balancing() -> None:
    script = example("balancing")
    violations = script.run()
    quantile, sign = said(
        "balancing.md",
        "load is {} times the mean above it with the balancer, and {} times with the sign rule",
    )
    rate, third, fiftieth, there = said(
        "balancing.md",
        "At {}, the best of seven rates for other tokens, it is {} times above it at the third step and {} "
        "times at the fiftieth, where the balancer is at {}.",
    )
    assert violations["quantile"][2] == pytest.approx(quantile, abs=0.05)
    assert violations["sign"][2] == pytest.approx(sign, rel=0.05)
    assert script.best_rate(100, 1) == rate
    assert violations["tuned"][2] == pytest.approx(third, rel=0.05)
    assert violations["tuned"][49] == pytest.approx(fiftieth, rel=0.1)
    assert violations["quantile"][49] == pytest.approx(there, abs=0.05)
