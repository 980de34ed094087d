"""The documentation has every public name, and every code block and notebook in it runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import runpy
import types
from pathlib import Path
from typing import Any

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
REFERENCE = sorted((DOCS / "api").glob("*.md"))
OTHERS = [
    ROOT / "CHANGELOG.md",
    *(ROOT / folder / "README.md" for folder in ("csrc", "examples", "khot-jax")),
    *sorted(DOCS.glob("results/*/report.md")),
]
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


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    pytest.importorskip("griffe")
    return runpy.run_path(str(DOCS / "build" / "tables.py"))


def test_reference_holds_every_public_name(tables: dict[str, Any]) -> None:
    shown = [name for page in REFERENCE for name in tables["names"](page.read_text(encoding="utf-8"))]
    names = public_names(khot) - {"khot.estimators.sample_khot"}  # documented as khot.sample_khot
    for module in (
        khot.lightning,
        khot.sklearn,
        khot.transformers,
    ):  # not imported with khot: they are optional
        names |= public_names(module)
    assert sorted(shown) == sorted(names)


def test_reference_is_written_from_the_source(tables: dict[str, Any]) -> None:
    package = tables["load"]()
    for page in REFERENCE:
        text = page.read_text(encoding="utf-8")
        assert tables["written"](text, package) == text, "python docs/build/tables.py"


def test_committed_tables_are_listed(tables: dict[str, Any]) -> None:
    text = tables["PERFORMANCE"].read_text(encoding="utf-8")
    assert text.count("../benchmarks/results/") > 30
    assert tables["listed"](text) == text, "python docs/build/tables.py"


def test_the_documentation_is_short() -> None:
    """In words, without code, reports and the rows that a command writes."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in [*DOCS.glob("*.md"), *REFERENCE])
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\| <a id=.*|^\| \[.*\]\(\.\./benchmarks/results/.*", "", text, flags=re.MULTILINE)
    assert len(text.split()) <= 30_000


def test_reports_are_listed() -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    for report in sorted((DOCS / "results").glob("*/report.md")):
        assert f"({report.relative_to(DOCS)})" in text


def test_signatures_of_the_reference(tables: dict[str, Any]) -> None:
    package = tables["load"]()
    for module in (khot, khot.nn, khot.losses, khot.sampling, khot.estimators):
        for name in set(module.__all__).difference(["CDF"]):
            value = getattr(module, name)
            if not callable(value) or not value.__module__.startswith("khot"):
                continue
            shown = tables["signature"](f"{module.__name__}.{name}", package)
            parameters = inspect.signature(value).parameters.values()
            bare = [
                p.replace(annotation=p.empty, default=...)
                if p.default is not p.empty
                else p.replace(annotation=p.empty)
                for p in parameters
            ]
            assert (
                re.sub(r"=(\([^)]*\)|[^,)]*)", "=Ellipsis", shown).partition("(")[2]
                == str(inspect.Signature(bare))[1:]
            ), name


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
        assert language in ("python", "py", "sh", "bibtex", "text", "math", ""), f"what is ```{language}?"
        assert ">>> " not in block


def test_results_on_pages_are_compared() -> None:
    code = "x = 1\n# no\nx + 1\n# 2\nfor i in range(2):\n    print(i)\n# 0\n# 1\nint('a')\n# ValueError: a\n"
    examples = doctest.DocTestParser().parse(f"Text\n\n```python\n{code}```\n", "page.md")
    found = [each.exc_msg or each.want for each in examples if isinstance(each, doctest.Example)]
    assert found == ["", "2\n", "0\n1\n", "ValueError: a\n"]


def headings(page: Path) -> list[str]:
    """As text, without marks."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "") for heading in found
    ]


def slug(heading: str) -> str:
    """The anchor that code hosts give a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, *REFERENCE], ids=lambda path: path.name)
def test_headings_have_one_anchor_on_the_site_and_on_a_code_host(page: Path) -> None:
    slugs = pytest.importorskip("pymdownx.slugs")
    assert "slugify: !!python/object/apply:pymdownx.slugs.slugify { kwds: { case: lower } }" in (
        ROOT / "mkdocs.yml"
    ).read_text("utf-8")
    ours = slugs.slugify(case="lower")
    assert [ours(heading, "-") for heading in headings(page)] == [slug(heading) for heading in headings(page)]
    assert not [heading for heading in headings(page) if heading.endswith("}")]


@pytest.mark.parametrize("page", [*PAGES, *REFERENCE, *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_arrive_on_a_code_host(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"`\]\[[^\]]*\]", text)
    for file, name in re.findall(r"\]\((?!\w+:)([^)#]*)(?:#([^)]*))?\)", text):
        target = page.parent / file if file else page
        assert target.exists(), file
        if name:
            there = [slug(heading) for heading in headings(target)]
            there += re.findall(r'<a id="([^"]+)"></a>', target.read_text(encoding="utf-8"))
            assert there.count(name) == 1, f"{file}#{name}"


@pytest.mark.parametrize("page", [*PAGES, *REFERENCE], ids=lambda path: path.name)
def test_formulas_are_read_alike_on_the_site_and_on_a_code_host(page: Path) -> None:
    """Between dollars a code host first reads Markdown: it takes backslashes off signs, and underscores
    between signs for emphasis. So such formulas are in blocks."""
    text = re.sub(
        r"^ *```.*?^ *```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    assert not re.findall(r"\\[(\[]", text)
    assert text.count("$") % 2 == 0
    for before, formula, after in re.findall(r"(.?)\$([^$]*)\$(.?)", text):
        assert re.fullmatch(r"\S|\S[^\n]*\S", formula), formula
        assert not re.search(r"\\[^A-Za-z]|[^\w ]_[^\w ]|[*<|]", formula), formula
        assert re.fullmatch(r"[\s(]?", before) and re.fullmatch(r"[\s.,:;)]?", after), formula


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


NUMBER = re.compile(r"\d+(?:\.\d*)?")


def shown(output: Any) -> Any:
    """What an output has: text, or a picture, which has a text for those who do not see it."""
    return output.get("data", {"text/plain": output.get("text")})


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_give_what_they_store(notebook: Path) -> None:
    """The same kinds of outputs, the same words and, within a twentieth, the same numbers."""
    pytest.importorskip("nbclient")
    stored = pytest.importorskip("nbformat").read(notebook, as_version=4)
    executed = runpy.run_path(str(DOCS / "build" / "notebooks.py"))["executed"](notebook)
    outputs, again = (
        [shown(o) for cell in book.cells for o in cell.get("outputs", [])] for book in (stored, executed)
    )
    assert sum("image/png" in output for output in outputs) >= 2
    for old, new in zip(outputs, again, strict=True):
        assert old.keys() == new.keys()
        assert NUMBER.split(old["text/plain"]) == NUMBER.split(new["text/plain"])
        numbers, found = (list(map(float, NUMBER.findall(o["text/plain"]))) for o in (old, new))
        assert "image/png" in old or found == pytest.approx(numbers, rel=0.05)


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
