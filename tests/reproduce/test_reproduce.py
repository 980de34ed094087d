"""Every experiment, end to end on scikit-learn's digits: what `python -m reproduce all --smoke` does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from reproduce.harness import study


@pytest.mark.parametrize("name", study.names())
def test_smoke(name: str, smoke: Callable[[str], Any]) -> None:
    """Every trial leaves rows of finite numbers, and the report has the plots that it shows."""
    folder, rows = smoke(name).folder, smoke(name).rows
    experiment = study.find(name)
    wanted = {
        tuple(map(str, trial.values())) for trial in experiment.trials(experiment.Args(**experiment.smoke))
    }
    keys = list(experiment.trials(experiment.Args(**experiment.smoke))[0])
    assert {tuple(row[key] for key in keys) for row in rows} == wanted
    numbers = [cell for row in rows for cell in row.values() if re.fullmatch(r"[-+.e\d]+|nan|-?inf", cell)]
    assert numbers and all(math.isfinite(float(number)) for number in numbers)
    report = (folder / "report.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", report)
    assert pictures and all((folder / p).read_bytes().startswith(b"\x89PNG") for p in pictures)
    assert {path.name for path in folder.glob("*.png")} == set(pictures)
    assert f"`python -m reproduce {name} --smoke`" in report
    assert re.search(r"^\| .+ \|$", report, flags=re.MULTILINE)


@pytest.mark.parametrize("name", study.names())
def test_says_what_it_is(name: str) -> None:
    experiment = study.find(name)
    assert experiment.needs in ("MNIST", "nothing")
    assert re.search(r"\d|second", experiment.takes)
    module = __import__(experiment.run.__module__, fromlist=["__doc__"])
    assert len(module.__doc__.split()) > 40
