"""The README, the imports and the package, which users rely on besides the operators."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import khot
from khot import cdfs
from reproduce.tasks.peers import PEERS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")


def documented(pattern: str) -> list[str]:
    """The matches of ``pattern`` in the README's tables, sorted, with duplicates."""
    return sorted(re.findall(pattern, README, flags=re.MULTILINE))


def test_readme_lists_every_public_operator() -> None:
    operators = sorted(
        name for name in khot.__all__ if callable(getattr(khot, name)) and name != "show_config"
    )
    assert operators
    assert documented(r"^\| `khot\.(\w+)` \|") == operators


def test_readme_lists_every_cdf() -> None:
    public = [getattr(cdfs, name) for name in cdfs.__all__]
    choices = [c for c in public if isinstance(c, type) and issubclass(c, cdfs.CDF)]
    assert documented(r"^\| .* \| `khot\.cdfs\.(\w+)` \|") == sorted(
        c.__name__ for c in choices if c is not cdfs.CDF
    )


def test_readme_quotes_the_committed_measurements() -> None:
    """Forward + backward beside softmax, and of the fastest other method and package beside khot."""
    text = (ROOT / "benchmarks" / "results" / "cpu.md").read_text(encoding="utf-8")

    def measured(title: str) -> dict[str, list[str]]:
        section = text.split(f"## {title}")[1].split("\n## ")[0]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()[4:] if line]
        return {row[0]: [cell.partition(" / ")[2] for cell in row[1:]] for row in rows}

    def ends(cells: list[str]) -> str:
        return " to ".join(f(cells, key=float) for f in (min, max))

    def fastest(names: set[str]) -> str:
        return min(names, key=lambda name: math.prod(map(float, peers[name])))

    peers = {
        name: cells
        for name, cells in measured("The same, in times of khot.sigmoid_topk").items()
        if all(cells)
    }
    packages = {name for name in peers if PEERS[name].needs}
    readme = " ".join(README.split())
    assert f"takes {ends(measured('What people run today')['sigmoid_topk'])} times as long as" in readme
    name = fastest(set(peers))
    assert f"({name}) takes {ends(peers[name])} times as long as khot" in readme
    name = fastest(packages)
    assert f"({name}) {ends(peers[name])} times" in readme


def test_readme_keeps_its_top_screen() -> None:
    """What khot is, a picture, five lines of code and figures of speed come before the first heading."""
    top = README.split("\n## ")[0]
    assert top.count("![") == 1 and top.count("\n>>> ") == 5 and "benchmarks/results/cpu.md" in top
    assert README.split("\n## ")[1].startswith("Install\n")
    assert "coming" not in "".join(re.findall(r"^#+ .*$", README, flags=re.MULTILINE))


def test_import_loads_nothing_that_torch_does_not() -> None:
    program = """
import json, sys
import torch
before = set(sys.modules)
import khot
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert set(json.loads(run.stdout)) - sys.stdlib_module_names - {"torch"} == {"khot"}


def test_package_says_that_it_is_typed() -> None:
    assert importlib.resources.files("khot").joinpath("py.typed").is_file()


def test_every_folder_of_code_is_a_package() -> None:
    # Without its __init__.py a folder works from a checkout and is missing from the wheel.
    folders = {path.parent for path in (ROOT / "src" / "khot").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_version_is_stated_once() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', pyproject, flags=re.MULTILINE)
    assert khot.__version__ == version == importlib.metadata.version("khot")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, flags=re.MULTILINE) == [version]


def test_citation_has_what_the_format_requires_and_the_package_says() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    about = importlib.metadata.metadata("khot")
    assert citation["license"] == about["License-Expression"]
    assert ",".join(citation["keywords"]) == about["Keywords"]
    assert [author["name"] for author in citation["authors"]] == ["The khot developers"]


def test_every_supported_python_has_a_classifier() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (oldest,) = re.findall(r'^requires-python = ">=3\.(\d+)"$', pyproject, flags=re.MULTILINE)
    listed = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', pyproject)
    assert listed == [str(minor) for minor in range(int(oldest), 15)]
    ours = set(
        re.findall(r"^ {8}python: \[(.+)\]$", WORKFLOW, flags=re.MULTILINE)[0].replace('"', "").split(", ")
    )
    assert ours <= {f"3.{minor}" for minor in listed} and {f"3.{oldest}", f"3.{listed[-1]}"} <= ours


@pytest.mark.parametrize("setting", ["python_version", "pythonVersion"])  # mypy's and pyright's
def test_types_are_checked_for_the_oldest_python(setting: str) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (oldest,) = re.findall(r'^requires-python = ">=(.+)"$', pyproject, flags=re.MULTILINE)
    assert re.findall(rf'^{setting} = "([\d.]+)"', pyproject, flags=re.MULTILINE) == [oldest]


def test_changelog_has_a_place_for_the_next_change() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "\n## [Unreleased]\n" in changelog
