"""Where the repository and the site are: one place for the links of pages, of the README and of the metadata.

The address is KHOT_REPOSITORY of the environment, or `repository-code` of CITATION.cff, or that of git's
remote `origin`. Where there is none, links stay inside the checkout.

    python docs/build/address.py

says what it is, and fails if CITATION.cff lacks it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["absolute", "cited", "repository", "site"]

CITATION = Path(__file__).resolve().parents[2] / "CITATION.cff"


def repository() -> str:
    """The address that a browser opens, without a slash at its end; empty if there is none."""
    address = os.environ.get("KHOT_REPOSITORY") or cited() or _origin()
    address = re.sub(r"^(?:ssh://)?git@([\w.-]+)[:/]", r"https://\1/", address)
    address = re.sub(r"(?:\.git)?/?$", "", address)
    return address if re.fullmatch(r"https://[\w.-]+(?:/[\w.-]+)+", address) else ""


def cited() -> str:
    """What CITATION.cff says."""
    found = re.search(
        r'^repository-code: "?([^"\n]+)"?$', CITATION.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    return found[1] if found else ""


def _origin() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "remote", "get-url", "origin"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def site() -> str:
    """The site that GitHub's Pages make of a repository there; elsewhere none is known."""
    found = re.fullmatch(r"https://github\.com/([\w.-]+)/([\w.-]+)", repository())
    return f"https://{found[1].lower()}.github.io/{found[2]}/" if found else ""


def badges(address: str) -> str:
    """Whether the tests pass, and where the documentation is."""
    tests = f"{address}/actions/workflows/ci.yml"
    pages = f"{address}/actions/workflows/site.yml"
    return f"[![tests]({tests}/badge.svg)]({tests}) [![documentation]({pages}/badge.svg)]({site()})"


def absolute(text: str, version: str) -> str:
    """The README with links that work outside of the repository, and badges, where its address is known."""
    address = repository()
    if not address:
        return text
    if site():
        text = re.sub(r"^# .*\n", lambda title: f"{title[0]}\n{badges(address)}\n", text, count=1)
    # a browser shows the pictures of `raw` and the pages of `blob`
    text = re.sub(r"\]\((?!https?:|#)([^)]*\.png)\)", rf"]({address}/raw/v{version}/\1)", text)
    return re.sub(r"\]\((?!https?:|#)([^)]*)\)", rf"]({address}/blob/v{version}/\1)", text)


if __name__ == "__main__":
    if not cited():
        sys.exit("CITATION.cff has no repository-code, the address of the repository")
    print(cited())
