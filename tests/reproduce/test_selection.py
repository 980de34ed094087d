"""Feature selection, learned sizes and VAEs on digits, and the methods they compare."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduce.harness import training
from reproduce.harness.study import ArgumentError, Checkpoint, Row, Trial
from reproduce.papers import (
    balancing,
    experts,
    feature_selection,
    permutation,
    polynomial,
    topk_loss,
    vae,
)
from reproduce.tasks import methods

TRIALS: list[tuple[Any, dict[str, Any], Trial]] = [
    (
        feature_selection,
        {"k": 8, "steps": 6},
        {"method": "gumbel", "seed": 0},
    ),
    (vae, {"steps": 6}, {"size": "small", "method": "straight_through", "seed": 0}),
    (
        polynomial,
        {"n": 8, "k": 4, "problems": 2, "batch": 4, "steps": 6},
        {"estimator": "second_order", "seed": 0},
    ),
]


def rows(module: Any, options: dict[str, Any], trial: Trial, path: Path, stop: int = 10**9) -> list[Row]:
    """What a trial with the seed 0 yields, as far as the row number ``stop``."""
    torch.manual_seed(0)
    checkpoint = Checkpoint(path, {})
    for row in itertools.islice(module.run(module.Args(**options), trial, checkpoint), stop):
        checkpoint.rows.append(row)
    return checkpoint.rows


@pytest.mark.parametrize("case", range(len(TRIALS)))
def test_stopped_training_goes_on_to_the_same_figures(
    case: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    module, options, trial = TRIALS[case]
    if module is not polynomial:
        options = {**options, "points": 3}
    with training.one_thread():
        whole = rows(module, options, trial, tmp_path / "whole.pt")
        part = rows(module, options, trial, tmp_path / "part.pt", stop=2)
        assert part == whole[:2]
        assert (tmp_path / "part.pt").exists()
        assert rows(module, options, trial, tmp_path / "part.pt") == whole


@pytest.mark.parametrize("method", methods.METHODS)
def test_methods_draw_k_ones_with_a_gradient(method: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 12, requires_grad=True)
    x = methods.draw(method, logits, 4)
    assert set(x.detach().round(decimals=4).unique().tolist()) == {0.0, 1.0}
    sizes = x.detach().round().sum(-1)
    assert (sizes == 4).all()
    (x * torch.arange(12.0)).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert logits.grad[:, -1].mean() > 0 > logits.grad[:, 0].mean()


REFUSED = {
    "unknown rule": (experts, {"methods": ("soft",)}, "'soft': expected some of nothing"),
    "unknown loss": (topk_loss, {"methods": ("hinge",)}, "methods: 'hinge'"),
    "k of all experts": (balancing, {"experts": "8", "ks": "2,8"}, "expected"),
    "unknown precision": (permutation, {"precision": "int8"}, "expected some of"),
    "unknown method": (feature_selection, {"methods": ("gumble",)}, "'gumble': expected some of"),
    "k above n": (feature_selection, {"k": 65}, "k = 65: expected at most 64"),
    "k not below n": (polynomial, {"k": 100}, "k = 100: expected less than n = 100"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    module, options, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message):
        module.trials(module.Args(**options))
