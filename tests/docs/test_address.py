"""The address of the repository, from which links outside of a checkout are made."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "docs" / "build"


@pytest.fixture(scope="module")
def address() -> dict[str, Any]:
    return runpy.run_path(str(BUILD / "address.py"))


@pytest.mark.parametrize(
    "given",
    [
        "https://github.com/Some-one/khot",
        "https://github.com/Some-one/khot.git",
        "https://github.com/Some-one/khot/",
        "git@github.com:Some-one/khot.git",
        "ssh://git@github.com/Some-one/khot.git",
    ],
)
def test_every_form_of_a_remote_is_one_address(
    given: str, address: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KHOT_REPOSITORY", given)
    assert address["repository"]() == "https://github.com/Some-one/khot"
    assert address["site"]() == "https://some-one.github.io/khot/"


@pytest.mark.parametrize("given", ["/home/someone/khot", "file:///home/someone/khot", "../khot", "C:\\khot"])
def test_a_folder_is_no_address(given: str, address: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KHOT_REPOSITORY", given)
    assert address["repository"]() == address["site"]() == ""
    assert address["absolute"]("[a](docs/a.md)", "1.2.3") == "[a](docs/a.md)"


def test_the_citation_has_the_address_or_says_that_it_lacks_it(
    address: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KHOT_REPOSITORY", "https://example.org/a/fork")
    run = subprocess.run(
        [sys.executable, str(BUILD / "address.py")], capture_output=True, text=True, check=False
    )
    assert (run.returncode == 0) == bool(address["cited"]())
    assert "repository-code" in run.stderr or run.stdout.strip() == address["cited"]()
    citation = tmp_path / "CITATION.cff"
    citation.write_text('title: khot\nrepository-code: "https://example.org/one/khot"\n')
    monkeypatch.setitem(address["cited"].__globals__, "CITATION", citation)
    monkeypatch.delenv("KHOT_REPOSITORY")
    assert address["repository"]() == "https://example.org/one/khot"


def test_the_address_stands_once() -> None:
    """In CITATION.cff, from where all else takes it."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    if not files:
        pytest.skip("no checkout")
    name = re.compile(r"https://(?:github\.com|gitlab\.com|codeberg\.org)/[\w.-]+/khot\b")
    texts = [
        ROOT / file
        for file in files
        if file.endswith((".md", ".toml", ".yml", ".py", ".cff", ".yaml", ".ipynb"))
    ]
    found = [str(p.relative_to(ROOT)) for p in texts if name.search(p.read_text(encoding="utf-8"))]
    assert set(found) <= {"CITATION.cff", "tests/docs/test_address.py"}


def test_other_hosts_have_no_known_site(address: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KHOT_REPOSITORY", "https://example.org/some/one/khot.git")
    assert address["repository"]() == "https://example.org/some/one/khot"
    assert address["site"]() == ""


def test_links_of_the_readme_become_absolute(
    address: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KHOT_REPOSITORY", "https://github.com/a/khot")
    text = "![p](docs/p.png) [q](docs/q.md#r) [s](https://t.org) [u](#v)"
    there = "https://github.com/a/khot"
    assert address["absolute"](text, "1.2.3") == (
        f"![p]({there}/raw/v1.2.3/docs/p.png) [q]({there}/blob/v1.2.3/docs/q.md#r) [s](https://t.org) [u](#v)"
    )
    badges, title = address["badges"](there), "# khot\n\n"
    assert address["absolute"](title, "1") == f"# khot\n\n{badges}\n\n"
    for workflow in re.findall(r"workflows/(\w+\.yml)", badges):
        assert (BUILD.parents[1] / ".github" / "workflows" / workflow).is_file()
    # a picture that is a link
    assert address["absolute"]("[![p](p.png)](q.md)", "1").count(there) == 2
