"""Who may import whom among the experiments, and which names they may use."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from khot import experiments
from khot.experiments.harness import study

ROOT = Path(experiments.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")
# the rooms that a room may import from
BELOW = {
    "harness": {"harness"},
    "tasks": {"harness", "tasks"},
    "papers": {"harness", "tasks"},
}


def imports(path: Path) -> Iterator[tuple[str, str, str]]:
    """Each name that is imported from a module of the experiments: module, name, and the name's alias."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("khot.experiments"):
            for alias in node.names:
                yield str(node.module), alias.name, alias.asname or alias.name


def is_module(package: str, name: str) -> bool:
    return (ROOT.parent.parent / package.replace(".", "/") / f"{name}.py").exists()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    room = path.parent.name
    for module, name, _ in imports(path):
        found = f"{module}.{name}" if module == "khot.experiments" else module
        other = found.split(".")[2]
        # the command line runs the demo, and experiments are found in the folder of the papers
        allowed = {
            "cli.py": {"demo"},
            "study.py": {"papers"},
        }.get(path.name, set())
        assert other in BELOW.get(room, {"harness"}) | allowed, found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_public_names_are_used(path: Path) -> None:
    modules = {}
    for module, name, alias in imports(path):
        if is_module(module, name):
            modules[alias] = importlib.import_module(f"{module}.{name}")
        elif (ROOT.parent.parent / f"{module.replace('.', '/')}.py").exists():
            assert name in importlib.import_module(module).__all__, f"{module}.{name}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            used = modules[node.value.id]
            assert node.attr in used.__all__, f"{used.__name__}.{node.attr}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_and_classes_are_listed_or_private(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT.parent.parent).with_suffix("").parts)
    listed = importlib.import_module(name).__all__
    assert len(set(listed)) == len(listed)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert node.name.startswith("_") != (node.name in listed), node.name
        assert all(hasattr(importlib.import_module(name), public) for public in listed)


def test_every_file_of_the_papers_is_an_experiment() -> None:
    files = {path.stem.replace("_", "-") for path in (ROOT / "papers").glob("*.py")} - {"--init--"}
    assert set(study.names()) == files
    for name in files:
        assert any(paper in study.find(name).source for paper in study.PAPERS)
