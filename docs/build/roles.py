"""Shows as Markdown what docstrings say as Sphinx reads it: roles, which become links, and simple tables.

Indented lines that stand by themselves are a formula, or after a double colon code.
"""

from __future__ import annotations

import doctest
import re
import runpy
import textwrap
from pathlib import Path
from typing import Any

import griffe

display = runpy.run_path(str(Path(__file__).with_name("formulas.py")))["display"]

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`(~?)([\w.]+)`")
RULE = re.compile(r"^=+(?:\s+=+)+$")


class Roles(griffe.Extension):
    """A griffe extension."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            lines = examples(obj.docstring.value).splitlines()
            text = ROLE.sub(lambda match: link(match, obj), "\n".join(formulas(tables(lines))))
            text = text.replace("*(", "\\*(")  # ω*(z) is no emphasis
            # griffe knows the plural only
            text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
            # it takes "k, tau: ..." for a name and a type, unless nothing is to be split
            text = re.sub(
                r"^    \w+(?:, \w+)+:", lambda m: m[0].replace(", ", ",\xa0"), text, flags=re.MULTILINE
            )
            if obj.is_function and obj.returns is not None:
                # and for a type what is returned, up to a colon
                text = re.sub(r"^Returns:\n    ", f"Returns:\n    {obj.returns}: ", text, flags=re.MULTILINE)
            obj.docstring.value = text


def link(match: re.Match[str], obj: griffe.Object) -> str:
    """A cross-reference to what is public and no module, else the name alone."""
    name = match[2]
    shown = name.rpartition(".")[2] if match[1] or "." not in name else name
    return f"[`{shown}`][{name}]" if name.startswith("khot.") and match[0][:4] != ":mod" else f"`{shown}`"


def examples(text: str) -> str:
    """The text, with its examples as code to copy: without prompts, with imports, and results as comments."""
    out: list[str] = []
    code: list[str] = []  # of examples that follow each other
    imported: set[str] = set()

    def close(indent: str) -> None:
        used = {name for name in ("torch", "khot") if re.search(rf"\b{name}\.", "\n".join(code))} - imported
        imported.update(used)
        head = [f"import {', '.join(sorted(used, reverse=True))}"] if used else []
        if head and not code[0].startswith(("import ", "from ")):
            head.append("")
        block = "\n".join(["```python", *head, *code]).rstrip("\n") + "\n```\n"
        out.append(textwrap.indent(block, indent))
        code.clear()

    indent = ""
    for part in doctest.DocTestParser().parse(text):
        if isinstance(part, doctest.Example):
            indent = " " * part.indent
            code += re.sub(r" *# doctest: .*", "", part.source).splitlines()
            if result := part.exc_msg or part.want:
                code += [*(f"# {line}".rstrip() for line in result.splitlines()), ""]
        elif part.strip() or not code:
            if code:
                close(indent)
            out.append(part)
    if code:
        close(indent)
    return "".join(out)


def tables(lines: list[str]) -> list[str]:
    """The lines, with tables between rules of ``=`` as Markdown's."""
    out: list[str] = []
    rules = [i for i, line in enumerate(lines) if RULE.match(line.strip())]
    done = 0
    for first, second, last in zip(*(iter(rules),) * 3, strict=True):
        rule = lines[first]
        starts = [match.start() for match in re.finditer(r"=+", rule)]
        spans = list(zip(starts, [*starts[1:], None], strict=True))
        indent = rule[: starts[0]]

        def row(line: str, spans: list[Any] = spans, indent: str = indent) -> str:
            return indent + "| " + " | ".join(line[a:b].strip() for a, b in spans) + " |"

        out += [*lines[done:first], ""]
        out += [row(lines[first + 1]), indent + "|---" * len(spans) + "|"]
        out += [*map(row, lines[second + 1 : last]), ""]
        done = last + 1
    return out + lines[done:]


def formulas(lines: list[str]) -> list[str]:
    """The lines, with indented ones after a paragraph as a formula; a section's follow its title at once."""
    out: list[str] = []
    held: list[str] = []
    for line in [*lines, ""]:
        before = ["", "", *out][-2:]
        if line.startswith("    ") and (held or (before[0][:1].strip() and not before[1])):
            held.append(line)
            continue
        if held and before[0].endswith("::"):
            out[-2] = before[0][:-1]
            out += held
        elif held:
            out.append(display(held))
        held = []
        out.append(line)
    return out[:-1]
