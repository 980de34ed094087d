"""Short rows leave the solver that takes as many of them at once as a vector has lanes only where they must:
one that is given back costs as much as ten that are not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# of all rows; under the powers, rounding decides about rows of which all entries but one are chosen
SHARES = {
    "logistic": 1e-4,
    "normal": 1e-4,
    "laplace": 1e-4,
    "log, logistic": 1e-4,
    "log, laplace": 1e-4,
    "uniform": 1e-3,
    "power 1.5": 2e-3,
    "power 4/3": 2e-3,
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_rows_given_back(tmp_path: Path) -> None:
    """Between ordinary and sharp temperatures, too, where moments tell little of the few that are chosen."""
    program = tmp_path / "given_back"
    flags = ["-O1", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", f"-I{HERE.parents[1] / 'csrc'}"]
    subprocess.run(["c++", *flags, HERE / "given_back.cpp", "-o", program], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    found = [line.rsplit(" ", 2) for line in printed.splitlines()]
    assert [name for name, _, _ in found] == list(SHARES)
    for name, share, most in found:
        assert float(share) <= SHARES[name], name
        assert name.startswith(("uniform", "power")) or float(most) < 0.01, name
