"""The README, the imports and the package, which users rely on besides the operators."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import re
import sys
from pathlib import Path

import pytest

import fresh
import khot
import pages
from khot import cdfs

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")


def documented(page: str, pattern: str) -> list[str]:
    """The matches of ``pattern`` in the table of a page of the reference, sorted, with duplicates."""
    text = (ROOT / "docs" / "api" / page).read_text(encoding="utf-8")
    return sorted(re.findall(pattern, text, flags=re.MULTILINE))


def test_the_reference_lists_every_cdf() -> None:
    public = [getattr(cdfs, name) for name in cdfs.__all__]
    choices = [c for c in public if isinstance(c, type) and issubclass(c, cdfs.CDF)]
    assert documented("cdfs.md", r"^\| .* \| \[`khot\.cdfs\.(\w+)`\]\([^)]*\) \|") == sorted(
        c.__name__ for c in choices if c is not cdfs.CDF
    )


def test_readme_leads() -> None:
    """What khot is, a picture, its definition, ten lines of code and why not something else come before the
    first heading."""
    top = README.split("\n## ")[0]
    (code,) = pages.blocks(top)
    assert top.count("![") == 1 and code.count("\n") <= 10 and "t makes the sum k" in top
    assert len(README.split()) <= 750
    assert "coming" not in "".join(re.findall(r"^#+ .*$", README, flags=re.MULTILINE))


def test_import_loads_nothing_that_torch_does_not() -> None:
    program = """
import json, sys
import torch
before = set(sys.modules)
import khot
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    run = fresh.run(program)
    assert run.returncode == 0, run.stderr
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
    papers = re.findall(
        r"^  title +=", (ROOT / "docs" / "papers.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(citation["references"]) == len(papers)
    assert all({"type", "title", "authors", "year"} <= set(paper) for paper in citation["references"])


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


@pytest.mark.parametrize("name", ["lightning", "sklearn", "transformers"])
def test_what_needs_another_package_says_so(name: str) -> None:
    program = f"""
import sys, khot
try:
    khot.{name}
except AttributeError as error:
    print(error)
sys.modules["{name}"] = None
try:
    import khot.{name}
except ImportError as error:
    print(error)
"""
    out = fresh.run(program).stdout
    assert f"import khot.{name}\n" in out and f"pip install '.[{name}]' in a checkout" in out
