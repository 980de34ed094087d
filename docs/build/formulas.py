"""Sets the formulas of docstrings as TeX. They are written in plain text, as `help()` shows them.

A slash without spaces divides what stands next to it, a slash between spaces the whole products on its sides.
Two spaces or more are a wide gap, or in formulas of several lines the edge of a column.
"""

from __future__ import annotations

import re

__all__ = ["display", "tex"]

RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿᵀᵏʲ", "0123456789+-nTkj", strict=True))
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
SYMBOLS = {
    "·": r"\cdot ",
    "½": r"\tfrac12 ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "∝": r"\propto ",
    "∈": r"\in ",
    "←": r"\gets ",
    "→": r"\to ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "−": "-",
    "~": r"\sim ",
    "∇": r"\nabla ",
    "∞": r"\infty ",
    "Σ": r"\sum ",
    "∫": r"\int ",
    "‖": r"\|",
    "{": r"\{",
    "}": r"\}",
}
FUNCTIONS = {"log", "exp", "max", "min", "cos"}
BELOW = {"argmin", "argmax"}  # what they run over stands below
ENDS = {"(": ")", "[": "]", "{": "}", "‖": "‖"}
SIGNS = {"+", "-", "=", ",", ":", "<", ">", *(SYMBOLS[sign] for sign in "≤≥∈∝←→")}  # they end a product
BESIDE = SIGNS | {r"\cdot ", "|"}  # where TeX has a space of its own
FRACTION = r"\\left\(\\frac\{[^{}]*\}\{[^{}]*\}\\right\)"
TOKEN = re.compile(
    r"(?P<gap>\s{2,})|(?P<space>\s)|(?P<code>[a-z]{2,}(?:_[a-z]{2,})+)|(?P<word>[A-Za-z]{2,})"
    rf"|(?P<number>\d+(?:\.\d+)?)|(?P<raised>[{''.join(RAISED)}]+)|(?P<lowered>[{''.join(LOWERED)}]+)|(?P<sign>.)"
)


def display(lines: list[str]) -> str:
    """The block of a formula in Markdown."""
    if len(lines) == 1:
        return rf"\[{tex(lines[0].strip())}\]"
    rows = []
    for line in lines:
        first, _, rest = re.sub(r"\s{2,}| (?== )", "\n", line.strip(), count=1).partition("\n")
        rows.append(tex(first) + (" &" if rest.startswith("=") else r" &\quad ") + tex(rest))
    return r"\[\begin{aligned}" + r" \\ ".join(rows) + r"\end{aligned}\]"


def tex(formula: str) -> str:
    """A formula in plain text as TeX."""
    parser = Parser([(match.lastgroup or "", match[0]) for match in TOKEN.finditer(formula)])
    found = parser.row("")
    if parser.at < len(parser.tokens):
        raise ValueError(f"a bracket is closed that was not opened: {formula}")
    return found


class Parser:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at = tokens, 0

    def next(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("", "")

    def row(self, end: str) -> str:
        """All up to a closing bracket."""
        parts: list[str] = []
        while (token := self.next())[1] not in ("", end, ")", "]", "}"):
            if token[1] != "/":
                parts.append(self.part())
                continue
            self.at += 1
            if parts[-1] == " ":
                above = [parts.pop()]
                while parts and parts[-1] not in SIGNS | {r"\quad "}:
                    above.insert(0, parts.pop())
                below = self.product(end)
            else:
                above, below = [parts.pop()], self.atom()
            parts.append(rf"\frac{{{bare(joined(above))}}}{{{bare(below)}}}")
        return joined(parts)

    def product(self, end: str) -> str:
        """All up to a sign that ends it."""
        parts: list[str] = []
        while (token := self.next())[1] not in ("", end, ")", "]", "}"):
            if token[0] == "gap" or SYMBOLS.get(token[1], token[1]) in SIGNS:
                break
            parts.append(self.part())
        return joined(parts)

    def part(self) -> str:
        if self.next()[0] not in ("gap", "space"):
            return self.atom()
        self.at += 1
        return " " if self.tokens[self.at - 1][0] == "space" else r"\quad "

    def atom(self) -> str:
        """One symbol, name or bracket, with its sub- and superscripts, and what a function is applied to."""
        kind, text = self.next()
        self.at += 1
        applied = self.next()[1] == "("
        if text in ENDS:
            found = self.bracket(text)
            if re.fullmatch(FRACTION, found) and self.next()[1] != "^":
                return bare(found)
        elif kind == "code":
            found = r"\mathtt{" + text.replace("_", r"\_") + "}"
        elif kind == "word" and text in FUNCTIONS:
            found = f"\\{text} "
        elif kind == "word" and (applied or text in BELOW):
            found = rf"\operatorname{'*' if text in BELOW else ''}{{{text}}}"
        elif kind == "word":
            found = rf"\text{{{text}}}"
        elif text == "∂":
            found = rf"\partial {self.atom()}"
        elif text == "√":
            found = rf"\sqrt{{{bare(self.atom())}}}"
        else:
            found = SYMBOLS.get(text, text)
        found += self.scripts()
        if self.next()[1] == "(" and (kind in ("code", "word") or text.isalpha()) and text not in SYMBOLS:
            self.at += 1
            found += self.bracket("(") + self.scripts()
        return found

    def bracket(self, opened: str) -> str:
        inside = self.row(ENDS[opened])
        closed = self.next()[1]
        if closed not in ENDS.values():
            raise ValueError(f"a bracket is not closed: {inside}")
        self.at += 1
        tall = r"\frac" in inside or r"\sum" in inside
        left, right = (r"\left", r"\right") if tall else ("", "")
        return f"{left}{SYMBOLS.get(opened, opened)}{inside}{right}{SYMBOLS.get(closed, closed)}"

    def scripts(self) -> str:
        found = ""
        while (token := self.next())[0] in ("raised", "lowered") or token[1] in ("_", "^", "*"):
            self.at += 1
            if token[0] == "raised":
                found += "^{" + "".join(RAISED[digit] for digit in token[1]) + "}"
            elif token[0] == "lowered":
                found += "_{" + "".join(LOWERED[digit] for digit in token[1]) + "}"
            else:
                found += "^{*}" if token[1] == "*" else f"{token[1]}{{{self.script()}}}"
        return found

    def script(self) -> str:
        kind, text = self.next()
        self.at += 1
        if text in ENDS:
            inside = self.bracket(text)
            return inside if re.fullmatch(r"\([a-z]\)", inside) else bare(inside)  # y^(k) keeps its brackets
        if text in ("−", "-", "+"):
            return SYMBOLS.get(text, text) + self.atom()
        if kind == "word" and len(text) > 2:
            return rf"\text{{{text}}}"
        return SYMBOLS.get(text, text)


def bare(part: str) -> str:
    """Without the brackets around all of it."""
    inside = re.fullmatch(r"(?:\\left)?(\(|\\\{)(.*?)(?:\\right)?(?:\)|\\\})", part)
    depth = 0
    for place, sign in enumerate(part):
        depth += (sign in "({") - (sign in ")}")
        if depth == 0 and sign in ")}" and place < len(part) - 1:
            return part  # the first bracket closes before the end
    return inside[2] if inside else part


def joined(parts: list[str]) -> str:
    """The parts in a row. Spaces count only between words and beside them, but not beside signs."""
    text = ""
    for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False):
        if part != " ":
            text += part
        elif not {before, after} & BESIDE and not re.fullmatch(r"|\\(sum.*|[a-z]{3} )", before):
            words = before.startswith(r"\text{") or after.startswith(r"\text{")
            text += r"\text{ }" if words and after else ""
    words = re.compile(r"(\\text\{[\w ]*)\}\\text\{")
    while words.search(text):
        text = words.sub(r"\1", text)
    return text
