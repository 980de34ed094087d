"""The formulas of docstrings as TeX."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[2] / "docs" / "build"
FORMULAS = runpy.run_path(str(BUILD / "formulas.py"))
PLAIN = {
    "y_i = F((x_i − t)/τ)": r"y_{i}=F\left(\frac{x_{i}-t}{τ}\right)",
    "1/(1 + e^−z)": r"\frac{1}{1+e^{-z}}",
    "clip(z, 0, 1)^(1/(p−1))": r"\operatorname{clip}(z,0,1)^{\frac{1}{p-1}}",
    "½e^z for z ≤ 0": r"\tfrac12 e^{z}\text{ for }z\le 0",
    "a + b c / d e − f": r"a+\frac{bc}{de}-f",  # a slash between spaces divides products
    "a + b c/d e": r"a+b\frac{c}{d}e",  # one without what stands next to it
    "(a + b)/(c·d)": r"\frac{a+b}{c\cdot d}",
    "(a + b)(c + d)/2": r"(a+b)\frac{c+d}{2}",
    "Σ_(i∈S) θ_i": r"\sum _{i\in S}θ_{i}",
    "P_ij, y^(k)_label, r⁺_i, 2⁻¹, log₂ n": r"P_{ij},y^{(k)}_{\text{label}},r^{+}_{i},2^{-1},\log _{2}n",
    "f*(y) + √2 + ‖x − mean‖²": r"f^{*}(y)+\sqrt{2}+\|x-\text{mean}\|^{2}",
    "a,   with the t for which b": r"a,\quad \text{with the }t\text{ for which }b",
    "soft_topk(x, k)": r"\mathtt{soft\_topk}(x,k)",
    "∂L/∂x": r"\frac{\partial L}{\partial x}",
    "argmax_(y ≥ 0) y": r"\operatorname*{argmax}_{y\ge 0}y",
    "{0, 1}ⁿ": r"\{0,1\}^{n}",
}


@pytest.mark.parametrize("plain", PLAIN)
def test_formula(plain: str) -> None:
    assert FORMULAS["tex"](plain) == PLAIN[plain]


@pytest.mark.parametrize("plain", ["(a", "a)"])
def test_brackets_have_to_match(plain: str) -> None:
    with pytest.raises(ValueError, match="bracket"):
        FORMULAS["tex"](plain)


def test_lines_are_aligned() -> None:
    two_rows = FORMULAS["display"](["    a = b", "    c_i = d"])
    assert two_rows == r"\[\begin{aligned}a &=b \\ c_{i} &=d\end{aligned}\]"
    columns = FORMULAS["display"](["    linear  t", "    cosine  cos t"])
    assert columns == r"\[\begin{aligned}\text{linear} &\quad t \\ \text{cosine} &\quad \cos t\end{aligned}\]"


def test_indented_lines_are_formulas_but_not_sections_and_code() -> None:
    pytest.importorskip("griffe")
    formulas = runpy.run_path(str(BUILD / "roles.py"))["formulas"]
    lines = [
        "What it is.",
        "",
        "    y = x",
        "",
        "Args:",
        "    x: what",
        "",
        "    y: too",
        "",
        "The loop::",
        "",
        "    go()",
    ]
    wanted = [*lines]
    wanted[2], wanted[9] = r"\[y=x\]", "The loop:"
    assert formulas(lines) == wanted


DOCSTRING = """What it is.

Example:
    >>> x = torch.ones(2)  # doctest: +ELLIPSIS
    >>> for i in range(2):
    ...     print(i)
    0
    1
    >>> int("a")
    Traceback (most recent call last):
    ValueError: a

    And then:

    >>> khot.topk_mask(x, 1)
    tensor([1., 0.])
"""
COPIED = """What it is.

Example:
    ```python
    import torch

    x = torch.ones(2)
    for i in range(2):
        print(i)
    # 0
    # 1

    int("a")
    # ValueError: a
    ```

    And then:

    ```python
    import khot

    khot.topk_mask(x, 1)
    # tensor([1., 0.])
    ```
"""


def test_examples_can_be_copied() -> None:
    pytest.importorskip("griffe")
    assert runpy.run_path(str(BUILD / "roles.py"))["examples"](DOCSTRING) == COPIED
