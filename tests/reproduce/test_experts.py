"""The study of balanced experts in a language model: text, model, rules, and a run for seconds."""

from __future__ import annotations

import math

import pytest
import torch

from reproduce.papers import experts
from reproduce.papers.experts import METHODS, RULES, LanguageModel, letters


def test_the_text_is_documentation_and_the_test_is_no_part_of_it() -> None:
    text, test = letters()
    assert len(text) > 8 * len(test) > 10**6 and text.max() < 128
    assert "Permission" in bytes(text.byte().tolist()).decode() + bytes(test.byte().tolist()).decode()
    parts = {bytes(part.byte().tolist()) for part in text.view(-1, experts.PART)}
    assert all(bytes(part.byte().tolist()) not in parts for part in test.view(-1, experts.PART))


@pytest.mark.parametrize("method", [name for name in METHODS if name != "expert choice"])
def test_a_model_does_not_see_later_letters(method: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(method, 12, 10).eval()
    text = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(0))
    other = text.clone()
    other[:, 7:] = 5
    torch.testing.assert_close(model(text)[0][:, :7], model(other)[0][:, :7])


@pytest.mark.parametrize("method", [*RULES, "khot"])
def test_rules_move_the_biases_towards_an_even_load(method: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(method, 64, 10)
    text = torch.randint(128, (32, 64), generator=torch.Generator().manual_seed(0))
    violations = []
    for _ in range(12):
        load = model(text)[1][0].load  # of the first layer, whose logits do not change
        violations.append((load.max() / load.mean() - 1).item())
        model.update()
    assert violations[-1] < violations[0] * (0.99 if method.startswith("sign") else 0.5)


def test_smoke_run(smoke) -> None:
    found = smoke("experts")
    for method in METHODS:
        assert f"| {method} |" in found.report
        assert 3 < found.last("loss", method=method) < 1.2 * math.log(128)
        assert 0 <= found.last("least", method=method) <= 1
    assert found.last("violation", method="expert choice") == 0
