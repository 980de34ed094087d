"""The address of the repository, from which links outside of a checkout are made."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

BUILD = Path(__file__).resolve().parents[2] / "docs" / "build"


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
