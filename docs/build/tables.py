"""The tables of pages that a command writes: public names, and committed benchmarks.

    python docs/build/tables.py

writes the rows of `docs/api` anew, from the source: for each name its signature and the first sentence of its
docstring. A new name needs a row that begins with `| <a id="khot.NAME"></a>`, which the command completes. A
code host shows the rows, and links arrive at them; on the site each row leads to the whole docstring, which
follows the table. In `docs/performance.md` it lists the tables of `benchmarks/results`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import griffe

__all__ = ["PAGES", "PERFORMANCE", "benchmark", "entries", "listed", "load", "names", "signature", "written"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "api"
PERFORMANCE = ROOT / "docs" / "performance.md"
BENCHMARKS = ROOT / "benchmarks" / "results"
LINK = "../benchmarks/results/"
LIST = re.compile(r"(^\| table \| command \|\n\|---\|---\|\n)(?:\|.*\n)*", flags=re.MULTILINE)
ROW = re.compile(r'^\| <a id="(khot[\w.]+)"></a>.*\n', flags=re.MULTILINE)
TABLE = re.compile(rf"(?:{ROW.pattern})+", flags=re.MULTILINE)
SENTENCE = re.compile(r"\.(?=\s+[A-Z`:]|\s*$)")  # "et al. 2025" goes on


def names(page: str) -> list[str]:
    """The names that a page has rows for."""
    return ROW.findall(page)


def written(page: str, package: griffe.Object | griffe.Alias) -> str:
    """The page with its rows as the source has them."""
    return ROW.sub(
        lambda row: f'| <a id="{row[1]}"></a>`{signature(row[1], package)}` | {line(row[1], package)} |\n',
        page,
    )


def found(name: str, package: griffe.Object | griffe.Alias) -> griffe.Object:
    member = package[name.partition(".")[2]]
    return member.final_target if isinstance(member, griffe.Alias) else member


def line(name: str, package: griffe.Object | griffe.Alias) -> str:
    """The first sentence of its docstring."""
    docstring = found(name, package).docstring
    if docstring is None:
        raise ValueError(f"{name} has no docstring")
    first = SENTENCE.split(docstring.value.partition("\n\n")[0])[0]
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", " ".join(first.split())).replace("``", "`")
    return text.replace("|", r"\|").replace("*", r"\*")


def signature(name: str, package: griffe.Object | griffe.Alias) -> str:
    """With the defaults, but without annotations."""
    obj = found(name, package)
    if not isinstance(obj, (griffe.Function, griffe.Class)):
        return name
    if isinstance(obj, griffe.Class) and "NamedTuple" in map(str, obj.bases):
        return f"{name}({', '.join(field for field, what in obj.members.items() if what.is_attribute)})"
    parts: list[str] = []
    for parameter in obj.parameters:
        if parameter.name == "self":
            continue
        if parameter.kind is griffe.ParameterKind.keyword_only and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is None else f"={parameter.default}"
        parts.append(parameter.name + default.replace("'", '"'))
    return f"{name}({', '.join(parts)})"


def entries(page: str) -> str:
    """The page for the site: rows that lead to the docstrings, and below each table the docstrings."""

    def table(rows: re.Match[str]) -> str:
        short = re.sub(r'<a id="([\w.]+)"></a>`[^`]*`', r"[`\1`](#\1)", rows[0])
        return short + "".join(f"\n::: {name}\n" for name in names(rows[0]))

    return TABLE.sub(table, page)


def load() -> griffe.Object | griffe.Alias:
    """The package, read and not run."""
    return griffe.load("khot", search_paths=[ROOT / "src"], allow_inspection=False)


def listed(page: str) -> str:
    """The page with its list of the committed tables as they are."""
    return LIST.sub(lambda head: head[1] + reports(), page)


def reports() -> str:
    """A row for each committed table of benchmarks/results, and its command."""
    rows = []
    for path in sorted(BENCHMARKS.glob("*.md")):
        title, command = benchmark(path.stem)
        other = f" ([AVX2]({LINK}avx2/{path.name}))" if (path.parent / "avx2" / path.name).exists() else ""
        rows.append(f"| [{title}]({LINK}{path.name}){other} | `python {command}` |\n")
    return "".join(rows)


def benchmark(name: str) -> tuple[str, str]:
    """The first line of a benchmark, a script or a function of benchmarks/times.py, and its command."""
    if name == "jax":
        script = ROOT / "khot-jax" / "benchmarks" / "peers.py"
        document = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
        return document.partition("\n")[0].rstrip(".:"), str(script.relative_to(ROOT))
    script = ROOT / "benchmarks" / f"{name}.py"
    own = script.exists()
    tree = ast.parse((script if own else script.with_name("times.py")).read_text(encoding="utf-8"))
    node = tree if own else next(f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == name)
    title = (ast.get_docstring(node) or "").partition("\n")[0].partition(": `")[0].rstrip(".:")
    return title, f"-m benchmarks.{name if own else f'times {name}'}"


def main() -> None:
    package = load()
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(written(path.read_text(encoding="utf-8"), package), encoding="utf-8")
    PERFORMANCE.write_text(listed(PERFORMANCE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
