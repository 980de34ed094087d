"""What the pages say of an example is what it gives by default. Each of these runs takes minutes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from statistics import fmean
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
        "load over the mean, less 1, is {} with the balancer and {} with the sign rule",
    )
    rate, third, fiftieth, there = said(
        "balancing.md",
        "At a rate of {}, the best of seven for other tokens, it is {} at the third step and {} at the "
        "fiftieth, where the balancer has {}.",
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


def test_budget() -> None:
    script = example("budget")
    ours, truth, price, topk = said(
        "budgets.md",
        "through the choice: {} % are right, with the greedy choice by the true strength per token {} %, "
        "with a price per token by hand {} %, with `soft_topk` {} %.",
    )
    found = {method: 100 * fmean(result.right) for method, result in script.run().items()}
    assert found == pytest.approx({"budget": ours, "topk": topk, "price": price, "truth": truth}, abs=1)


def test_indexer() -> None:
    errors = example("indexer").run(methods=("dense", "indexer"))
    said("select.md", "leave an error within a tenth of that of all keys, up to eight times as many keys")
    assert all(errors["indexer"][n] < 1.1 * errors["dense"][n] for n in (32, 64, 128, 256))


def test_policy() -> None:
    script = example("policy")
    rows = re.findall(
        r"^\| .+ \| ([\d.]+) ± [\d.]+ \|", (DOCS / "sampling.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    found = [100 * fmean(end for _, end in results) for results in script.run(600, 5).values()]
    assert found == pytest.approx([float(row) for row in rows], abs=2)


def test_pruning_macs() -> None:
    script = example("pruning_macs")
    share, ours, layers = said(
        "budgets.md", "At {} %, it errs on {} % of the test digits, and with each layer by itself on {} %."
    )
    _, results = script.run(script.load_digits(), shares=(share / 100,))
    found = {method: 100 * fmean(result.error for result in runs[0]) for method, runs in results.items()}
    assert found["cost"] == pytest.approx(ours, abs=1)
    assert found["layers"] == pytest.approx(layers, abs=2)


def test_pruning_n_m() -> None:
    script = example("pruning_n_m")
    figures = said(
        "pruning.md",
        "{} % errors with 2:4, as with the cut ({} %); {} against {} % with 1:4, {} against {} % with 1:8, "
        "and {} against {} % with 1:16. A hard selection from the start has {} to {} %.",
    )
    _, errors, _ = script.run(script.load_digits(), runs=5)
    soft, cut, hard = ([100 * fmean(runs) for runs in errors[name]] for name in ("soft", "cut", "hard"))
    assert [x for pair in zip(soft, cut, strict=True) for x in pair] == pytest.approx(figures[:8], abs=0.3)
    assert [min(hard), max(hard)] == pytest.approx(figures[8:], abs=0.5)


def test_quantile() -> None:
    script = example("quantile")
    results = script.run(script.load_digits())
    trimmed, mean = said(
        "recipes.md",
        "The example ends at a test error of {} %, where the mean of all losses ends at {} %.",
    )
    assert 100 * results["trimmed"].error[-1] == pytest.approx(trimmed, abs=1)
    assert 100 * results["mean"].error[-1] == pytest.approx(mean, abs=1.5)


def test_ranking() -> None:
    script = example("ranking")
    text = (DOCS / "ranking.md").read_text(encoding="utf-8").partition("## Beside ListNet and RankNet")[2]
    rows = dict(re.findall(r"^\| (\S+(?:, k = 10)?) \| (.+ ± .+) \|$", text, re.MULTILINE))
    results = script.run(script.load_digits(), seeds=5)
    metrics = ("NDCG@10", "right"), ("average precision", "right"), ("Spearman", "right"), ("NDCG@10", "30 %")
    kinds = {"right": "right labels", "30 %": "30 % random labels"}
    assert [name.replace("`", "") for name in rows] == list(script.LOSSES)
    for name, cells in rows.items():
        figures = [float(cell.strip("*").partition(" ")[0]) for cell in cells.split(" | ")]
        runs = {kind: results[words][name.replace("`", "")] for kind, words in kinds.items()}
        found = [100 * script.mean_and_spread(runs[kind], metric)[0] for metric, kind in metrics]
        assert found == pytest.approx(figures, abs=0.5), name
