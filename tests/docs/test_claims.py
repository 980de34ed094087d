"""The figures of the README and of the pages are those of the committed tables.

A claim is a sentence with a place for each figure, and the figures, which are read from a table here.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from khot._kernels import cpu

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Rows = dict[str, list[str]]  # the cells of a row, by its first


@functools.cache
def tables(file: str) -> list[tuple[str, Rows]]:
    """Each table of a report: what stands above it, with its head, and its rows."""
    found: list[tuple[str, Rows]] = []
    above: list[str] = []
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            above = [*above[-3:], line]
            continue
        cells = [cell.strip().strip("`*") for cell in line.strip().strip("|").split("|")]
        if above:
            found.append(("\n".join([*above, line]), {}))
            above = []
        elif set(cells[0]) != {"-"}:
            found[-1][1].setdefault(cells[0], cells[1:])
    return found


def rows(file: str, title: str = "") -> Rows:
    """The rows of the first table of benchmarks/results with these words in or above its head."""
    return next(
        found for above, found in tables(f"benchmarks/results/{file}") if title.lower() in above.lower()
    )


def number(cell: str) -> float:
    return float(cell.partition(" (")[0].replace(",", ""))


def part(cells: Iterable[str], place: int) -> list[str]:
    """Of cells "forward / forward + backward" the first or the second, without those that are no figures."""
    return [cell.split(" / ")[place] for cell in cells if re.match(r"[\d.,]+ / [\d.,]+$", cell)]


def ends(cells: Iterable[str]) -> list[str]:
    """The smallest and the largest."""
    ordered = sorted(cells, key=number)
    return [ordered[0], ordered[-1]]


def rounded(cells: Iterable[str], digits: int) -> list[str]:
    """The ends, with so many digits."""
    return [f"{float(f'{number(cell):.{digits}g}'):g}" for cell in ends(cells)]


def headline(device: int) -> Rows:
    return tables("benchmarks/results/headline.md")[device][1]


@functools.cache
def device() -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((RESULTS / "device.json").read_text(encoding="utf-8"))["cases"]
    return cases


def on_a_gpu(name: str) -> list[str]:
    """A row of the table on the page: at two sizes, forward and with the gradient, in softmaxes."""
    cells = []
    for shape in ("(4,096, 64)", "(4,096, 8,192)"):
        sections = (
            device()[f"bench: {title}, {shape} float32"] for title in ("soft top-k", "other operators")
        )
        measured = next(times for times in sections if name in times)
        for place in (0, 1):
            times = measured[name][place] if place < len(measured[name]) else {}
            ratio = times["device"] / measured["softmax"][place]["device"] if times else None
            cells.append("" if ratio is None else f"{ratio:#.2g}".rstrip("."))
    return cells


def small(name: str, place: int = 0) -> str:
    """Microseconds at (4, 64)."""
    kind = ("## Forward\n", "## Forward + backward")[place]
    cells = rows("latency.md", kind)[name]
    return cells[1].partition(" (")[0]


def heavy() -> list[str]:
    other = rows("cpu.md", "Other scores")
    names = ("Cauchy", "log-normal(0, 3)", "tau = 1e-3")
    return [part([cells[1]], 0)[0] for name, cells in other.items() if name.startswith(names)]


def smooth(place: int) -> list[str]:
    """How many times as long the reference takes for a soft top-k whose CDF is smooth."""
    found = rows("reference.md", "in times of the compiled")
    names = ("sigmoid_topk", "laplace_topk", "soft_topk, normal", "log_soft_topk")
    return [cell for name in names for cell in part(found[name], place)]


def beside(name: str, place: int = 1) -> list[str]:
    return ends(part(rows("cpu.md", "in times of khot.sigmoid_topk")[name], place))


def packages(name: str) -> list[str]:
    return part(rows("packages.md", "forward / forward")[name], 1)


def budgets(file: str) -> list[str]:
    """In times of a soft top-k, by score and by value, but for the row that the page names."""
    lines = [
        line.split("|")[1:]
        for line in (RESULTS / file).read_text(encoding="utf-8").splitlines()
        if " x " in line
    ]
    found: list[str] = []
    for column in (2, 3):
        for place in (0, 1):
            cells = part((line[column].strip() for line in lines), place)
            found += ends([f"{number(cell):.1f}" for cell in cells if cell not in ("5.36", "3.95")])
    return found


def permutahedron() -> list[str]:
    return ends(part([cells[3] for _, cells in table_lines("permutahedron.md")], 1))


def table_lines(file: str) -> list[tuple[str, list[str]]]:
    """All lines of a table whose first cells repeat."""
    found = []
    for line in (RESULTS / file).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ("):
            found.append((cells[0], cells[1:]))
    return found


Figures = Callable[[], list[str]]
READ_SHAPES = ("(4,096, 64)", "(4,096, 8,192)")


def milliseconds(name: str) -> list[str]:
    """The README's row of a function: forward + backward at two shapes, on a CPU and on a GPU, in ms, and for
    all but softmax in softmaxes."""
    cells = []
    for place, measured in enumerate((on_cpu, on_device)):
        for shape in READ_SHAPES:
            ms = measured(shape, name)
            cells.append(f"{ms:,.0f}" if ms >= 1000 else f"{ms:#.3g}".removesuffix("."))
            if name != "torch.softmax":
                cells.append(headline(place)[name][rows_of(place).index(f"{shape} float32")])
    return cells


def on_cpu(shape: str, name: str) -> float:
    cases = json.loads((RESULTS / "headline.json").read_text(encoding="utf-8"))["cases"]
    return 1e3 * float(cases[f"{shape} float32"][name])


def rows_of(device: int) -> list[str]:
    """The shapes of a table of headline.md."""
    above = tables("benchmarks/results/headline.md")[device][0].splitlines()[-1]
    return [cell.strip() for cell in above.strip("|").split("|")][1:]


def on_device(shape: str, name: str) -> float:
    """ms of forward and backward, where entmax was measured later, beside a softmax of its own."""
    short = {"torch.softmax": "softmax", "khot.soft_topk": "soft_topk"}
    case = f"bench: soft top-k, {shape} float32"
    if name in short:
        return 1e3 * float(device()[case][short[name]][1]["device"])
    later = json.loads((RESULTS / "device_entmax.json").read_text(encoding="utf-8"))["cases"]
    return 1e-3 * float(later[case]["entmax, budget bisection"][1]["device"])


def less(other: str) -> list[str]:
    """By how much the selector is ahead."""
    difference, error, _ = rows("selectors.md", "KHotSelector less another one")[other]
    return [difference.removeprefix("+"), error]


def bare(cell: str) -> list[str]:
    """Mean and deviation of "1.50 ± 0.03 (1)"."""
    return re.findall(r"[\d.]+", cell)[:2]


README: list[tuple[str, Figures]] = [
    ("{} ± {} points above RFE with a forest, eight tables, ten seeds", lambda: less("RFE")),
    (
        "{} ± {} % of the variance unexplained, SAELens tuned: {} ± {}, three seeds",
        lambda: [n for cell in (rows("sae.md")["hidden"][i] for i in (0, 2)) for n in bare(cell)],
    ),
    (
        "{} ± {} % errors with 95 % pruned, movement pruning {} ± {}, three seeds",
        lambda: [n for way in ("khot, by score", "movement") for n in bare(rows("pruning.md")[way][1])],
    ),
    (
        "{} ± {} points of NDCG@10 above RankNet where labels are wrong, eight seeds",
        lambda: bare(rows("rankers.md", "less the others")["RankNet"][2]),
    ),
    ("| `torch.softmax` | {} | {} | {} | {} |", lambda: milliseconds("torch.softmax")),
    *(
        (
            f"| `{name}` | {{}} ({{}}) | {{}} ({{}}) | {{}} ({{}}) | {{}} ({{}}) |",
            functools.partial(milliseconds, name),
        )
        for name in ("khot.soft_topk", "entmax.budget_bisect")
    ),
    (
        "the first takes {} softmaxes at `tau=1e-3`, and {} with a mask",
        lambda: [rows("calls.md")[name][0].split(" / ")[1] for name in ("logistic, tau = 0.001", "masked")],
    ),
    (
        "Without a compiler it takes {} (",
        lambda: [rows("reference.md", "reference, in softmaxes")["sigmoid_topk"][1].split(" / ")[1]],
    ),
]
PERFORMANCE: list[tuple[str, Figures]] = [
    (
        "forward and backward, then takes {} to {} softmaxes",
        lambda: ends(part(rows("reference.md", "reference, in softmaxes")["sigmoid_topk"], 1)),
    ),
    ("forward {} to {} softmaxes with the logistic CDF", lambda: rounded(heavy(), 2)),
    ("where normal scores take {} to {}", lambda: rounded(part(rows("cpu.md")["soft_topk, logistic"], 0), 2)),
    (
        "`soft_topk` takes {} µs and `torch.softmax` {} µs, forward and backward {} and {} µs",
        lambda: [small("soft_topk"), small("softmax"), small("soft_topk", 1), small("softmax", 1)],
    ),
    ("a hard mask {} µs, and the layer `nn.SoftTopK` {}", lambda: [small("topk_mask"), small("nn.SoftTopK")]),
    (
        "Soft ranks take {}, a soft sort {} and a Pareto sample {} µs",
        lambda: [small(name) for name in ("soft_rank", "soft_sort", "sampling.sample, pareto")],
    ),
    *(
        (f"| {shown} | {{}} | {{}} | {{}} | {{}} |", functools.partial(on_a_gpu, name))
        for shown, name in {
            "`soft_topk`, logistic": "soft_topk",
            "`soft_topk_magnitude`": "soft_topk_magnitude",
            "`FenchelYoungTopKLoss`": "FenchelYoungTopKLoss",
            "`inverse_soft_count`": "inverse_soft_count",
            "`soft_budget` by score": "soft_budget, by score",
            "`soft_budget` by value": "soft_budget, by value",
            "`topk`": "topk",
            "`topk_mask`": "topk_mask",
            "`quantile`": "quantile",
            "`torch.topk`": "torch.topk",
            "`soft_rank`": "soft_rank",
            "`soft_sort`": "soft_sort",
            "`ndcg_loss`": "ndcg_loss",
            "`spearman_loss`": "spearman_loss",
            "`torch.sort`": "torch.sort",
        }.items()
    ),
]
COMPARISON: list[tuple[str, Figures]] = [
    ("`budget_bisect` | 64 to 6 million scores per row | {} to {} | `cpu.md`", lambda: beside("entmax")),
    ("written anew, not the package | the same | {} to {} |", lambda: beside("sorted laplace")),
    ("the fastest that we measured | the same | {} to {} |", lambda: beside("rescaled sigmoid")),
    ("torchsort's `soft_rank` and `soft_sort` take {} to {} times as long", permutahedron),
    (
        "`khot.soft_topk` takes {} to {} times as long as `torch.softmax`",
        lambda: ends(part(rows("cpu.md", "What people run")["sigmoid_topk"], 1)),
    ),
    (
        "one `soft_rank` of the row | the same | {} to {} |",
        lambda: beside("torchsort"),
    ),
    ("the only one that fits its n x n matrices | {} |", lambda: beside("difftopk")[:1]),
    ("(64, 64) to (128, 1,000) | {} to {} |", lambda: ends(packages("softtorch, softsort"))),
    (
        "softtorch's default method, NeuralSort | the same | {} to {} |",
        lambda: ends(packages("softtorch, neuralsort")),
    ),
    (
        "On an H100, entmax takes {} to {} softmaxes where `khot.soft_topk` takes {} to {}",
        lambda: ends(headline(1)["entmax.budget_bisect"]) + ends(headline(1)["khot.soft_topk"]),
    ),
    ("the only one that fits | {} |", lambda: packages("softtorch, ot")),
]
BUDGETS: list[tuple[str, Figures]] = [
    (
        f"| {name} ([`{file}`]) | {{}} to {{}} / {{}} to {{}} | {{}} to {{}} / {{}} to {{}} |",
        functools.partial(budgets, file),
    )
    for name, file in {"with AVX-512": "budget.md", "without": "avx2/budget.md"}.items()
]


def pruned(way: str) -> list[str]:
    return [cell for network in ("784-300", "two conv") for cell in rows("pruning.md", network)[way]]


PRUNING: list[tuple[str, Figures]] = [
    (f"| {name} |" + " {} |" * 6, functools.partial(pruned, way))
    for name, way in {
        **{name: name for name in ("all weights", "one cut", "cuts", "movement")},
        "khot, by magnitude from the first step on": "khot",
        "the same, amount grows": "khot, amount grows",
        "khot, by magnitude in three parts": "khot, in three parts",
        "**khot, by score**": "khot, by score",
    }.items()
]


def autoencoders(name: str) -> list[str]:
    """Of khot, and of each package as it is and at its best rate."""
    khot, *others = rows("sae.md")[name]
    ways = others[:3], others[3:]
    return [khot, *(cell for way in ways for cell in (way[0], least(way)))]


def longer(name: str) -> list[str]:
    """The same after 3,000 steps, at the rate that was better for the first seed, which has three."""
    khot, *others = rows("sae.md", "3,000 steps")[name]
    return [khot, *(cell for cell in others if "±" in cell)]


def least(cells: Iterable[str]) -> str:
    return min(cells, key=lambda cell: float(cell.split()[0]))


AUTOENCODERS: list[tuple[str, Figures]] = [
    (f"| {words} | **{{}}** |" + " {} |" * others, functools.partial(figures, name))
    for figures, others in ((autoencoders, 4), (longer, 2))
    for words, name in {
        "second hidden layer": "hidden",
        "before its relu": "before relu",
        "first hidden layer": "first",
        "first, each number to mean 0 and deviation 1": "standardised",
        "sums": "sums",
        "language model, layer 1": "MiniLM 1",
        "layer 3": "MiniLM 3",
        "layer 5": "MiniLM 5",
    }.items()
]


def tally() -> list[str]:
    """How many claims of the papers are met, met in their order only, not met, open, not tried."""
    lines = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    first = lines.index("|---|---|---|---|") + 1
    rows = lines[first : lines.index("", first)]
    verdicts = [line.split("|")[2].strip(" *") for line in rows]
    kinds = ("met in order", "met", "not met", "open", "not tried")  # each verdict counts for the first
    order, *others = (
        [v for v in verdicts if next(k for k in kinds if v.startswith(k)) == kind] for kind in kinds
    )
    return [str(len(found)) for found in (verdicts, others[0], order, *others[1:])]


CLAIMS = [
    (
        "docs/results.md",
        "Of {} claims, {} are met, {} are met in their order only, {} are not met, {} is open and {} was "
        "not tried.",
        tally,
    ),
    *(("README.md", *claim) for claim in README),
    *(("docs/performance.md", *claim) for claim in PERFORMANCE),
    *(("docs/comparison.md", *claim) for claim in COMPARISON),
    *(("docs/budgets.md", *claim) for claim in BUDGETS),
    *(("docs/pruning.md", *claim) for claim in PRUNING),
    *(("docs/sparse-autoencoders.md", *claim) for claim in AUTOENCODERS),
    (
        "docs/troubleshooting.md",
        "a soft top-k takes {} to {} softmaxes",
        lambda: ends(part(rows("reference.md", "reference, in softmaxes")["sigmoid_topk"], 1)),
    ),
]


def prose(page: str) -> str:
    """Without blocks of code and the targets of links, with one space between words."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


@pytest.mark.parametrize("page, sentence, figures", CLAIMS, ids=[f"{c[0]}: {c[1][:40]}" for c in CLAIMS])
def test_figures_are_those_of_a_table(page: str, sentence: str, figures: Figures) -> None:
    claim = " ".join(sentence.format(*figures()).split())
    assert claim in prose(page)


# versions, and numbers that are no measurement
NAMED = {"3.10", "2.6", "2.10", "1.0", "1e-3", "1e-6", "2.0", "95"}


def test_the_readme_has_no_other_figure() -> None:
    text = prose("README.md")
    for sentence, figures in README:
        text = text.replace(" ".join(sentence.format(*figures()).split()), " ")
    found = set(
        re.findall(r"(?<![\w.-])\d+\.\d+(?![\w.])|(?<![\w.])\d+e-\d+|\d+(?= (?:%|times|softmaxes))", text)
    )
    assert found - NAMED == set()


def test_a_pure_build_names_the_measured_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KHOT_KERNELS", raising=False)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([]))
    _, note = cpu.load()
    low, high, sparse = map(number, re.findall(r"[\d,]*\d(?= times|(?= to \d+ times))", note))
    measured = [number(cell) for place in (0, 1) for cell in smooth(place)]
    assert low == pytest.approx(min(measured), rel=0.05) and high == pytest.approx(max(measured), rel=0.05)
    both = rows("reference.md", "in times of the compiled")["sparse_topk"]
    assert sparse == pytest.approx(max(number(cell) for cell in part(both, 0)), rel=0.05)
