"""What comments, docstrings and pages name exists: files, and what the kernels' comments quote."""

from __future__ import annotations

import functools
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "khot"
CODE = {".py", ".h", ".cpp"}

# Parts of other projects' folders and of pages that are built.
ELSEWHERE = ("torch/csrc/", "notebooks/")
# NAME stands for a file that the reader is to write.
PLACEHOLDER = re.compile(r"\bNAME\b")
# Names of torch that comments explain and no code uses.
OF_TORCH = {"torch", "compiler", "disable", "export", "FakeTensorMode", "is_grads_batched"}


def tracked() -> list[Path]:
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in run.stdout.splitlines() if (ROOT / name).is_file()]


@functools.cache
def prose(path: Path) -> tuple[str, ...]:
    """The comments and docstrings of a file of code, and all of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return tuple(
            token.string
            for token in tokens
            if token.type == tokenize.COMMENT or token.string.startswith(('"""', 'r"""'))
        )
    return tuple(re.findall(r"//.*", text)) if path.suffix in CODE else (text,)


def identifiers(path: Path) -> set[str]:
    """The names in a file, without its comments and docstrings; strings may hold names of operators."""
    text = path.read_text(encoding="utf-8")
    for part in prose(path):
        text = text.replace(part, " ")
    return set(re.findall(r"[A-Za-z_]\w*", text))


def test_files_that_are_named_exist() -> None:
    files = tracked()
    ends = {"/".join(path.parts[i:]) for path in files for i in range(1, len(path.parts))}
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        if path.suffix in CODE | {".md"} and path.name != "CHANGELOG.md"
        for part in prose(path)
        for name in re.findall(r"(?<![\w/.<-])([A-Za-z_][\w/-]*\.(?:py|h|cpp|md))\b", part)
        if name not in ends and not name.startswith(ELSEWHERE) and not PLACEHOLDER.search(name)
    ]
    assert missing == []


def test_names_that_the_kernels_comments_quote_exist() -> None:
    private = tuple(f"src/khot/_{room}/" for room in ("core", "kernels", "ops"))
    rooms = [
        path
        for path in tracked()
        if path.suffix in CODE and str(path.relative_to(ROOT)).startswith((*private, "csrc/"))
    ]
    known = OF_TORCH.union(*map(identifiers, rooms), (path.stem for path in rooms))
    # quoted, or in the form that no English word has
    name = re.compile(r"`+([A-Za-z_][\w.]*)(?:\(\))?`+|(?<![\w.`/])([a-z]{3,}(?:_[a-z]{3,})+)\b")
    missing = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in rooms
        for part in prose(path)
        for match in name.findall(part)
        for word in "".join(match).split(".")
        if word not in known
    ]
    assert missing == []


def stale_references(path: Path) -> Iterator[str]:
    """Modules and functions that a file of the kernels names in its comments, and that are not there."""
    text = path.read_text(encoding="utf-8")
    code = re.sub(r":\w+:`[^`]*`", "", text)
    for role, dot, name in re.findall(r":(mod|func|class):`(\.?)([\w.]+)`", text):
        if dot:
            there = leads_somewhere(path.parent, name) and (role == "mod" or "." in name)
        elif name.startswith("khot."):
            there = leads_somewhere(PACKAGE, name.removeprefix("khot.").partition(".")[0])
        else:  # of the file itself, or imported there
            there = re.search(rf"\b{name}\b", code) is not None
        if not there:
            yield name
    for name in re.findall(r"_kernels\.((?:reference|triton)(?:\.\w+)*)", text):
        if not leads_somewhere(PACKAGE / "_kernels", name):
            yield name


def leads_somewhere(folder: Path, name: str) -> bool:
    """Whether the folder has the module, and the module the function, that a dotted name leads to."""
    first, _, rest = name.partition(".")
    if (folder / first).is_dir():
        return not rest or leads_somewhere(folder / first, rest)
    home = folder / f"{first}.py"
    return home.exists() and (
        not rest or re.search(rf"\b{rest}\b", home.read_text(encoding="utf-8")) is not None
    )


def test_what_comments_on_kernels_refer_to_is_there() -> None:
    stale = {path.name: list(stale_references(path)) for path in (PACKAGE / "_kernels").rglob("*.py")}
    assert not {name: found for name, found in stale.items() if found}


def rooms(folder: Path) -> set[str]:
    """The folders and files of code in this folder, as a map names them: ``nn/``, ``masks.py``."""
    parts = [
        path.relative_to(folder).parts for path in tracked() if folder in path.parents if path.suffix in CODE
    ]
    return {part[0] + ("/" if len(part) > 1 else "") for part in parts} - {"__main__.py"}


def test_the_maps_name_every_room() -> None:
    """docs/architecture.md the package's and the checkout's, and csrc/README.md those of the CPU kernels."""
    house = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    house = house.split("## Places")[1].split("\n## ")[0]
    kernels = (ROOT / "csrc" / "README.md").read_text(encoding="utf-8").split("\n## ")[1]
    top = {room for room in rooms(ROOT) if room.endswith("/")} - {"src/"}

    def missing(names: set[str], text: str) -> set[str]:
        return {name for name in names if not re.search(rf"`(src/khot/)?{re.escape(name)}", text)}

    assert missing(top | rooms(PACKAGE), house) == set()
    assert missing(rooms(ROOT / "csrc"), kernels) == set()
