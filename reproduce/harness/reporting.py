"""What the reports of the experiments are made of: tables, summaries of rows, and plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reproduce.harness.study import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "COLORS",
    "GREY",
    "ORANGE",
    "column",
    "compare",
    "curve",
    "figure",
    "label_ends",
    "last_change",
    "log_axis",
    "spread",
    "spread_out",
    "table",
    "where",
]

BLUE, ORANGE, GREY = "#0b6e99", "#d9730d", "#6b6b6b"
COLORS = (BLUE, ORANGE, "#448361", "#9065b0", "#c14c8a", "#937264", GREY)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. The first column is aligned as text, the others as numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation, such as "0.113 ± 0.002"; for a single value, the value alone."""
    if not values:
        return "–"
    mean = f"{math.fsum(values) / len(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def compare(paper: tuple[float, float] | None, ours: Sequence[float], digits: int = 3) -> list[str]:
    """The cells "paper", "here" and "difference"; a difference above the paper's deviation is bold."""
    if paper is None or not ours:
        return ["–", spread(ours, digits), "–"]
    difference = math.fsum(ours) / len(ours) - paper[0]
    text = f"{difference:+.{digits}f}"
    return [
        f"{paper[0]:.{digits}f} ± {paper[1]:.{digits}f}",
        spread(ours, digits),
        f"**{text}**" if abs(difference) > paper[1] else text,
    ]


def curve(rows: Iterable[Row], y: str) -> tuple[list[float], list[float]]:
    """The steps of the rows that have the entry y, and its mean over the rows of each step."""
    points: dict[float, list[float]] = {}
    for row in rows:
        if "step" in row and y in row:
            points.setdefault(float(row["step"]), []).append(float(row[y]))
    return sorted(points), [statistics.fmean(points[step]) for step in sorted(points)]


def last_change(rows: Iterable[Row], y: str) -> str:
    """By how many percent the curve changed between its last two points: whether it is flat at its end."""
    values = curve(rows, y)[1]
    return f"{100 * (values[-1] / values[-2] - 1):+.1f} %" if len(values) > 1 else "–"


def column(rows: Iterable[Row], name: str) -> list[float]:
    """The entries with that name, of the rows that have one."""
    return [float(row[name]) for row in rows if name in row]


def where(rows: Iterable[Row], **entries: str | int | float) -> list[Row]:
    """The rows that have these entries."""
    return [row for row in rows if all(row.get(key) == value for key, value in entries.items())]


def figure(columns: int = 1, *, width: float = 7, height: float = 4.2) -> tuple[Figure, Sequence[Any]]:
    """A figure with that many plots next to each other, and the list of the plots."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    plots = drawn.subplots(1, columns, squeeze=False)[0]
    for plot in plots:
        plot.spines[["top", "right"]].set_visible(False)
    return drawn, plots


def log_axis(plot: Any) -> None:
    """Make the y axis logarithmic, with plain numbers as its labels. Call it after everything is plotted."""
    plot.set_yscale("log")
    plot.yaxis.set_major_formatter("{x:g}")
    low, high = plot.get_ylim()
    plot.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")
    plot.tick_params(axis="y", which="minor", labelsize=8)


def label_ends(plot: Any, ends: Mapping[str, tuple[float, float, str]], gap: float = 14) -> None:
    """Write each line's name beside its end (x, y, color), in that color.

    The names of lines that end at the same x are at least ``gap`` points apart, and otherwise as close to
    their ends as they can be. Call it after everything is plotted.
    """
    plot.set_ylim(plot.get_ylim())  # from here on it stays
    plot.figure.draw_without_rendering()  # the layout is made now
    to_points = 72 / plot.figure.dpi
    columns: dict[float, list[str]] = {}
    for name, (x, _, _) in sorted(ends.items(), key=lambda item: item[1][1]):
        columns.setdefault(x, []).append(name)
    for x, names in columns.items():
        heights = [plot.transData.transform((x, ends[name][1]))[1] * to_points for name in names]
        for name, height, place in zip(names, heights, spread_out(heights, gap), strict=True):
            plot.annotate(
                name,
                ends[name][:2],
                (8, place - height),
                textcoords="offset points",
                color=ends[name][2],
                va="center",
                fontsize=9,
                annotation_clip=False,
            )


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """The places at least ``gap`` apart that are nearest to ascending heights, by the sum of squares.

    Less i gaps, they are the isotonic regression of the heights.
    """
    from scipy.optimize import isotonic_regression

    shared = isotonic_regression([height - i * gap for i, height in enumerate(heights)]).x
    return [float(place) + i * gap for i, place in enumerate(shared)]
