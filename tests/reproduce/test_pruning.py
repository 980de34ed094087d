"""Pruning in training, on scikit-learn's digits: who learns, and what is at zero."""

from __future__ import annotations

import pytest

from reproduce.papers import pruning


def test_smoke_run(smoke) -> None:
    found = smoke("pruning")
    error = {method: found.last("error", method=method) for method in pruning.NAMES}
    # seeds 0 to 2: annealed 0.20 to 0.40, tau=0.3 0.34 to 0.41, hard 0.52 to 0.59
    assert error["dense"] < error["annealed"] < 0.7 * error["hard"]
    assert error["tau=0.3"] < error["hard"]
    # a soft selection at a high temperature keeps more than a tenth in training
    assert 0.1 < found.last("kept", method="tau=0.3") < 0.2
    for method in ("annealed", "p=2", "p=4/3", "hard"):
        assert found.last("kept", method=method) == pytest.approx(0.1, abs=0.002)
    assert found.last("kept", method="dense") == 1
    assert all(row["error"] == row["error_in_training"] for row in found.rows if row["method"] == "hard")
    assert "| soft, p = 4/3 |" in found.report
