"""Root finding for sigmoid top-k: the roots, and how many steps they take."""

from __future__ import annotations

import pytest

from reproduce.papers import root_finding
from reproduce.papers.root_finding import METHODS, PAPER, problems


@pytest.mark.parametrize("method", METHODS)
def test_steps_are_those_of_the_paper(method: str) -> None:
    """The mean of two draws at the paper's n and rows is within two of its standard errors."""
    counts = [root_finding.solve(*problems(rows=100, n=10_000, seed=seed), method) for seed in range(2)]
    mean, deviation = map(float, PAPER[method][0].split(" ± "))
    assert abs(sum(counts) / 2 - mean) <= max(0.05, 1.5 * deviation)


def test_smoke_run(smoke) -> None:
    found = smoke("root-finding")
    for seed in "01":
        steps = {method: found.last("steps", what="table", seed=seed, method=method) for method in METHODS}
        assert steps["bisection"] > 30
        assert max(steps[m] for m in METHODS[1:]) < 15
        assert steps["halley, both"] <= min(steps.values())
    for method in METHODS:
        assert found.last("error", what="figure", method=method) <= root_finding.TOLERANCE
    timed = [row["method"] for row in found.rows if row["what"] == "time"]
    assert timed == [*METHODS, *root_finding.OURS]
    assert "| halley, both |" in found.report
