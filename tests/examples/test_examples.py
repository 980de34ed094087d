"""The examples, in a shortened form: what each claims holds, and its picture is drawn."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

from khot.experiments.data import load_digits

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name))


def assert_picture(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size < 100_000


def test_soft_topk(tmp_path: Path) -> None:
    script = example("soft_topk")
    result = script.run(steps=160, items=64)
    found = {method: course[-1] for method, course in result.found.items()}
    assert found["soft"] > found["softmax"] > found["hard"] + 0.2
    assert result.error["soft"] < 0.7 * result.error["softmax"]
    script.draw(result, 64, tmp_path / "soft_topk.png")
    assert_picture(tmp_path / "soft_topk.png")


def test_attention(tmp_path: Path) -> None:
    script = example("attention")
    errors = script.run(steps=300)
    assert errors["topk"][32] < 0.5 * errors["softmax"][32]
    assert errors["topk"][1024] < 0.2 * errors["softmax"][1024]
    script.draw(errors, tmp_path / "attention.png")
    assert_picture(tmp_path / "attention.png")


def test_gate(tmp_path: Path) -> None:
    script = example("gate")
    images = load_digits()
    results = script.run(images, 10, steps=400)
    assert results["fixed"].mask.sum() == 10
    assert results["fixed"].accuracy > results["variance"].accuracy
    assert results["learned"].size[-1] < results["learned"].size[0]
    script.draw(images, results, tmp_path / "gate.png")
    assert_picture(tmp_path / "gate.png")


def test_pruning(tmp_path: Path) -> None:
    script = example("pruning")
    images = load_digits()
    results = script.run(images, steps=300)
    assert results["soft"].weights == results["hard"].weights == 339  # a tenth of 64·32 + 32·32 + 32·10
    assert results["soft"].error[-1] < 0.7 * results["hard"].error[-1]
    script.draw(images, results, tmp_path / "pruning.png")
    assert_picture(tmp_path / "pruning.png")
