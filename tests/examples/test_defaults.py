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


def test_knn() -> None:
    script = example("knn")
    found = script.run(script.data.load_digits()).accuracy
    accuracies = said(
        "recipes.md",
        "in features of `SoftKNN` gets {} % right, in those of cross-entropy {} %, and in the pixels {} %.",
    )
    for method, accuracy in zip(script.NAMES, accuracies, strict=True):
        assert 100 * found[method] == pytest.approx(accuracy, abs=0.6)  # three images


def table(page: str) -> dict[str, list[float]]:
    """The rows of a page's only table."""
    lines = re.findall(r"^\| (.+) \|$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    rows = [line.split(" | ") for line in lines[1:] if not line.startswith("-")]
    return {name: [float(cell.rstrip(" %") or "nan") for cell in cells] for name, *cells in rows}


def test_moe_llm() -> None:
    script = example("moe_llm")
    said_of = table("tutorial-experts.md")
    assert list(said_of) == list(script.NAMES.values())
    for method, (loss, violation) in zip(script.NAMES, said_of.values(), strict=True):
        violations, found = script.train(method, 300, 0)
        assert found == pytest.approx(loss, abs=0.1)
        assert sum(violations[-20:]) / 20 == pytest.approx(violation, abs=0.1 + 0.2 * violation)


def test_sae_minilm() -> None:
    pytest.importorskip("all_minilm_l6_v2")
    script = example("sae_minilm")
    found, _ = script.run(script.docstrings(), *script.load())
    said_of = table("tutorial-autoencoder.md")
    assert list(said_of) == list(script.NAMES.values())
    for result, (rate, unexplained, unused, recovered) in zip(found.values(), said_of.values(), strict=True):
        assert result.rate is None or result.rate == rate
        assert 100 * result.unexplained == pytest.approx(unexplained, abs=1)
        assert 100 * result.unused == pytest.approx(unused, abs=3)
        assert 100 * result.recovered == pytest.approx(recovered, abs=2)
