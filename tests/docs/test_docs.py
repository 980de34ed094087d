"""The documentation has every public name, and every code block and notebook in it runs."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
import types
from pathlib import Path

import pytest
from benchmarks import times

import khot
import khot.lightning
import khot.sklearn
import khot.transformers
import pages

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def public_names(module: types.ModuleType) -> set[str]:
    """Every name in the module's ``__all__`` and those of the public modules below it."""
    names = set()
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            names |= public_names(value)
        else:
            names.add(f"{module.__name__}.{name}")
    return names


def test_reference_holds_every_public_name() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md")]
    shown = re.findall(r"^::: ([\w.]+)$", "\n".join(pages), flags=re.MULTILINE)
    names = public_names(khot) - {"khot.estimators.sample_khot"}  # documented as khot.sample_khot
    for module in (
        khot.lightning,
        khot.sklearn,
        khot.transformers,
    ):  # not imported with khot: they are optional
        names |= public_names(module)
    assert sorted(shown) == sorted(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_blank_line_ends_each_table(page: Path) -> None:
    # the builder takes lines that follow at once for rows
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\|.*\n[^|\n].*", text, flags=re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_python_can_be_copied(page: Path) -> None:
    """And is run: as doctests of the page, but for patterns of calls, "py", which are no programs."""
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        assert language in ("python", "py", "sh", "bibtex", "text", ""), f"what is ```{language}?"
        assert ">>> " not in block


def test_results_on_pages_are_compared() -> None:
    code = "x = 1\n# no\nx + 1\n# 2\nfor i in range(2):\n    print(i)\n# 0\n# 1\nint('a')\n# ValueError: a\n"
    examples = doctest.DocTestParser().parse(f"Text\n\n```python\n{code}```\n", "page.md")
    found = [each.exc_msg or each.want for each in examples if isinstance(each, doctest.Example)]
    assert found == ["", "2\n", "0\n1\n", "ValueError: a\n"]


@pytest.mark.parametrize("page", [*PAGES, *sorted((DOCS / "api").glob("*.md"))], ids=lambda path: path.name)
def test_links_can_be_followed_on_a_code_host(page: Path) -> None:
    """To files, and of the reference to the entries that the site has there."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"`\]\[[^\]]*\]", text)
    for file, name in re.findall(r"\]\((?!\w+:)([^)#]*)(?:#([^)]*))?\)", text):
        target = page.parent / file if file else page
        assert target.exists(), file
        if name.startswith("khot."):
            assert re.search(rf"^::: {re.escape(name)}$", target.read_text(encoding="utf-8"), re.MULTILINE), (
                name
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for module in re.findall(r"python -m ((?:benchmarks|khot)[\w.]*)", text):
        assert importlib.util.find_spec(module), module
    for subject in re.findall(r"benchmarks\.times (\w+)", text):
        assert subject in times.SUBJECTS, subject


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(notebook: Path) -> None:
    text = notebook.read_text(encoding="utf-8")
    assert '"outputs": [' not in text.replace('"outputs": []', "")


def pictures_of_the_site(notebook: Path) -> list[bytes]:
    """Of its page, if the site was built from all that is here now: then `make docs` executed it."""
    page = ROOT / "site" / "notebooks" / notebook.stem / "index.html"
    sources = [
        notebook,
        *(DOCS / "build").rglob("*.py"),
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "src").rglob("*.so"),
    ]
    if not page.exists() or page.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        return []
    return [path.read_bytes() for path in page.parents[1].glob(f"{notebook.stem}-*.png")]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook: Path) -> None:
    pictures = pictures_of_the_site(notebook)
    if not pictures:
        pytest.importorskip("nbclient")
        pytest.importorskip("mkdocs")
        hooks = runpy.run_path(str(DOCS / "build" / "hooks.py"))
        page, *pictures = hooks["notebook"](notebook).values()
        assert page.startswith("# ")
    assert len(pictures) >= 2
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.slow
def test_figures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(DOCS / "figures.py"))
    few = script["design_entropy"]
    monkeypatch.setitem(script["designs"].__globals__, "design_entropy", lambda probs, _: few(probs, 1000))
    for figure in script["FIGURES"]:
        figure(tmp_path)
        path = tmp_path / f"{figure.__name__}.png"
        assert 10_000 < path.stat().st_size < 100_000
        assert (DOCS / "figures" / path.name).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_import_what_they_use(page: Path) -> None:
    """Although the tests' own names would do."""
    code = "".join(pages.blocks(page.read_text(encoding="utf-8"))).splitlines()
    used = {name for name in ("torch", "khot") if any(re.search(rf"\b{name}\.", line) for line in code)}
    imported = {name for line in code if "import" in line for name in re.findall(r"\w+", line)}
    assert used <= imported


@pytest.mark.parametrize("name", ["headline", "sae_parts"])
def test_figures_of_tables_show_the_tables(name: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    script = runpy.run_path(str(DOCS / "figures.py"))
    found: list[str] = []
    script[name].__globals__["save"] = lambda figure, *_, **__: found.append(script["shown"](figure))
    script[name](tmp_path)
    with image.open(DOCS / "figures" / f"{name}.png") as picture:
        assert [picture.text["Description"]] == found, "`make figures` draws it anew"


def test_pictures_exist() -> None:
    for page in PAGES:
        for source in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / source).is_file(), f"{page.name}: {source}"


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_valid(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["name"] == path.stem
    assert True in workflow  # YAML 1.1 reads the key `on` as True
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, job in workflow["jobs"].items():
        assert job["runs-on"] and job["steps"], name
        assert set(job.get("needs", [])) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), f"{name}: {step}"
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"{name}: make {target}"


def test_workflows_lint_test_build_and_document() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    for command in ("make lint", "make test", "make docs", "make dist-test", "pypa/cibuildwheel"):
        assert command in text
