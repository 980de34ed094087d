"""Who may import whom in reproduce/, and which names they may use."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from reproduce.harness import study

TOP = Path(__file__).resolve().parents[2]
ROOT = TOP / "reproduce"
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")
# the rooms that a room may import from
BELOW = {
    "reproduce": {"harness"},
    "harness": {"harness"},
    "tasks": {"harness", "tasks"},
    "papers": {"harness", "tasks"},
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(TOP).with_suffix("").parts)


def is_module(name: str) -> bool:
    return TOP.joinpath(*name.split(".")).with_suffix(".py").exists()


def imports(path: Path) -> Iterator[tuple[str, str, str]]:
    """Each name that is imported from a module of reproduce/: module, name, and the name's alias."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "reproduce":
            for alias in node.names:
                yield str(node.module), alias.name, alias.asname or alias.name


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_one_way(path: Path) -> None:
    for module, name, _ in imports(path):
        room = f"{module}.{name}".split(".")[1]
        # experiments are found in the folder of the papers
        allowed = {"papers"} if path.name == "study.py" else set()
        assert room in BELOW[path.parent.name] | allowed, f"{module}.{name}"


def test_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        found = {
            f"{module}.{name}" if is_module(f"{module}.{name}") else module
            for module, name, _ in imports(path)
        }
        graph[module_of(path)] = found
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_library_does_not_know_its_experiments() -> None:
    """What the wheel holds imports nothing of reproduce/, which is not in it."""
    assert [path for path in (TOP / "src").rglob("*.py") if list(imports(path))] == []


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_public_names_are_used(path: Path) -> None:
    modules = {}
    for module, name, alias in imports(path):
        if is_module(f"{module}.{name}"):
            modules[alias] = importlib.import_module(f"{module}.{name}")
        elif is_module(module):
            assert name in importlib.import_module(module).__all__, f"{module}.{name}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            used = modules[node.value.id]
            assert node.attr in used.__all__, f"{used.__name__}.{node.attr}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_functions_and_classes_are_listed_or_private(path: Path) -> None:
    module = importlib.import_module(module_of(path))
    listed = module.__all__
    assert len(set(listed)) == len(listed)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert node.name.startswith("_") != (node.name in listed), node.name
    assert all(hasattr(module, public) for public in listed)


def test_every_file_of_the_papers_is_an_experiment() -> None:
    files = {path.stem.replace("_", "-") for path in (ROOT / "papers").glob("*.py")} - {"--init--"}
    assert set(study.names()) == files
    for name in files:
        assert any(paper in study.find(name).source for paper in study.PAPERS)
