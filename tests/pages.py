"""The code of README and pages, as doctest reads it.

A page has plain Python, which works when it is copied. Comments right behind a statement that gives something
say what, or what it raises.
"""

from __future__ import annotations

import ast
import doctest
import re
import textwrap
from typing import Any

__all__ = ["blocks", "read_pages", "with_prompts"]

_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
# The statements that may give something; comments behind others are comments.
GIVES = (ast.Expr, ast.For, ast.With)
_RAISED = re.compile(r"(\w+\.)*\w+(Error|Exception|Warning)\b")


def blocks(page: str) -> list[str]:
    """The blocks of Python on a page."""
    return [textwrap.dedent(block[2]) for block in _BLOCK.finditer(page)]


def read_pages() -> None:
    """Let doctest read the code of Markdown."""
    parse = doctest.DocTestParser.parse

    def parse_page(self: doctest.DocTestParser, string: str, name: str = "<string>") -> Any:
        return parse(self, with_prompts(string) if name.endswith(".md") else string, name)

    doctest.DocTestParser.parse = parse_page  # type: ignore[method-assign]


def with_prompts(page: str) -> str:
    """The page, with prompts before its code and without the marks of comments that are results."""
    return _BLOCK.sub(lambda block: _prompted(textwrap.dedent(block[2])), page)


def _prompted(code: str) -> str:
    lines, done, found = code.splitlines(), 0, [""]
    for statement in ast.parse(code).body:
        begin = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))]) - 1
        end = statement.end_lineno or begin + 1
        found += lines[done:begin]
        done = end
        results = []
        while isinstance(statement, GIVES) and done < len(lines) and lines[done].startswith("#"):
            results.append(lines[done].removeprefix("#").removeprefix(" "))
            done += 1
        if isinstance(statement, ast.Expr) and not results:
            lines[begin] = f"_ = {lines[begin]}"  # what it gives is not shown
        found += [f"{'...' if at else '>>>'} {line}" for at, line in enumerate(lines[begin:end])]
        if results and _RAISED.match(results[0]):
            results.insert(0, "Traceback (most recent call last):")
        found += [*results, ""]
    return "\n".join([*found, *lines[done:], ""])
