"""What a soft top-k costs on the CPU: `python -m benchmarks.cpu`, `make bench`.

Every operator of the soft top-k, forward and forward + backward, beside torch.softmax on the same tensor in
the same run and beside what people run today: all calls interleaved, medians, as ratios. Ranking, transport
and sampling have benchmarks of their own.

It writes cpu.json, cpu.md and cpu.png, case by case. The same command with the same code on the same machine
continues a run that was stopped. It reports nothing once an operator disagrees with the
reference kernels in float64.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report, timing
from benchmarks.operators import CDFS, OPERATORS, Operator, disagreement
from reproduce.harness.timing import Call
from reproduce.tasks.peers import PEERS, missing

RESULTS = Path(__file__).parent / "results"

# rows, n: k, and the goals for the logistic CDF, forward and forward + backward, in softmaxes
SHAPES: dict[tuple[int, int], tuple[int, float, float]] = {
    (4_096, 64): (8, 1.8, 1.7),
    (128, 1_000): (100, 1.5, 1.5),
    (100, 10_000): (1_000, 1.2, 1.1),
    (100, 100_000): (10_000, 1.0, 1.0),
    (16, 1_000_000): (100_000, 0.9, 0.95),
    (1, 6_000_000): (600_000, 0.9, 0.95),
}
SCORES_AT = ((128, 1_000), (100, 10_000), (100, 100_000))
GROWTH_ROWS, GROWTH_N = 16, [4**i for i in range(3, 11)]  # powers of 2, which bitonic networks need
# The lines of the figure; the tables have them all.
DRAWN = ("softmax", "sigmoid_topk", "rescaled sigmoid", "entmax", "torchsort", "sinkhorn")
OURS = {name: OPERATORS[name] for name in ("sigmoid_topk", "laplace_topk", "sparse_topk")}


# ------------------------------------------------------------------------------------------ scores


def spread_normal(rows: int, n: int, random: torch.Generator) -> Tensor:
    """N(0, s²), s from 0.1 to 5 evenly over the rows."""
    spread = torch.linspace(0.1, 5, rows) if rows > 1 else torch.tensor([2.0])
    return torch.randn(rows, n, generator=random) * spread[:, None]


def drawn(sample: Callable[[Tensor, torch.Generator], Tensor]) -> Callable[..., Tensor]:
    return lambda rows, n, random: sample(torch.empty(rows, n), random)


def student_t3(x: Tensor, random: torch.Generator) -> Tensor:
    normal = [torch.randn(x.shape, generator=random) for _ in range(4)]
    return normal[0] / torch.sqrt(sum(z**2 for z in normal[1:]) / 3)


@dataclass(frozen=True)
class Scores:
    """What to select from: how scores are drawn, how many of them to select, at which temperature."""

    draw: Callable[[int, int, torch.Generator], Tensor]
    allowed: float  # times the goals of spread normal scores
    share: int = 10  # k = n / share
    tau: float = 1.0


FAMILIES = {
    "N(0, s²)": Scores(spread_normal, 1),
    "k = n/100": Scores(spread_normal, 2, share=100),
    "uniform": Scores(drawn(lambda x, g: x.uniform_(generator=g)), 2),
    "exponential": Scores(drawn(lambda x, g: x.exponential_(generator=g)), 2),
    "log-normal(0, 1)": Scores(drawn(lambda x, g: x.log_normal_(0, 1, generator=g)), 2),
    "Student t, 3 degrees": Scores(drawn(student_t3), 2),
    "ReLU": Scores(lambda *a: torch.relu(spread_normal(*a)), 2),
    "Cauchy": Scores(drawn(lambda x, g: x.cauchy_(generator=g)), 4),
    "log-normal(0, 3)": Scores(drawn(lambda x, g: x.log_normal_(0, 3, generator=g)), 4),
    "tau = 1e-3": Scores(spread_normal, 4, tau=1e-3),
    "N(0, 1e4²)": Scores(drawn(lambda x, g: 1e4 * torch.randn(x.shape, generator=g)), 4),
}


# ------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One tensor, and what is measured on it."""

    section: str  # "operators", "scores", "peers", "growth" or "memory"
    rows: int
    n: int
    family: str = "N(0, s²)"

    @property
    def id(self) -> str:
        return f"{self.section}: {self.family} ({self.rows}, {self.n})"

    @property
    def k(self) -> int:
        ours = SHAPES.get((self.rows, self.n))
        share = FAMILIES[self.family].share
        return ours[0] if ours and share == 10 else max(1, self.n // share)


def cases(quick: bool) -> list[Case]:
    shapes = [shape for shape in SHAPES if not quick or shape == (128, 1_000)]
    wide = [n for n in GROWTH_N if not quick or n <= 4_096]
    return [
        *(Case("operators", *shape) for shape in shapes),
        *(Case("scores", *s, f) for f in list(FAMILIES)[1:] for s in SCORES_AT if s in shapes),
        *(Case("peers", *shape) for shape in shapes),
        *(Case("growth", GROWTH_ROWS, n) for n in wide),
        *(Case("memory", GROWTH_ROWS, n) for n in wide),
    ]


def measure(case: Case, seconds: float, clock: timing.Clock) -> dict[str, Any]:
    family = FAMILIES[case.family]
    x, k, tau = family.draw(case.rows, case.n, torch.Generator().manual_seed(0)), case.k, family.tau
    ours = {"operators": OPERATORS, "scores": CDFS}.get(case.section, OURS)
    for name, operator in ours.items():
        if found := disagreement(operator, x, k, tau):
            raise SystemExit(f"{name}, {case.id}: {found}. Nothing is reported.")
    functions: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda x: torch.softmax(x, -1)}
    functions |= {name: partial(call_operator, operator, k=k, tau=tau) for name, operator in ours.items()}
    left_out = {}
    if case.section in ("peers", "growth", "memory"):
        for name, peer in PEERS.items():
            if missing(peer):
                continue
            if peer.fits(case.rows, case.n, k):
                functions[name] = partial(call_peer, name, k=k, tau=tau)
            else:
                left_out[name] = "too large"
    forward: dict[str, Call] = {name: partial(f, x) for name, f in functions.items()}
    both = {
        name: timing.forward_backward(f, x)
        for name, f in functions.items()
        if name not in OPERATORS or OPERATORS[name].public != "topk_mask"
    }
    result: dict[str, Any] = {"k": k, "tau": tau, "left out": left_out}
    if case.section == "memory":
        result["bytes"] = [{name: timing.peak_memory(f) for name, f in c.items()} for c in (forward, both)]
        return result
    timed = partial(timing.medians, seconds=seconds, clock=clock)
    result["seconds"] = [timed(forward), timed(both)]
    if case.section == "peers":
        result["errors"] = {n: errors(n, x, k, tau) for n in functions if n in PEERS}
    return result


def call_operator(operator: Operator, x: Tensor, *, k: int, tau: float) -> Tensor:
    return operator.call(x, k, tau=tau)


def call_peer(name: str, x: Tensor, *, k: int, tau: float) -> Tensor:
    return PEERS[name].call(x, k, tau)


def errors(name: str, x: Tensor, k: int, tau: float) -> dict[str, float]:
    """The errors of a peer: in its sums, of values above 1, and against khot in float64."""
    peer = PEERS[name]
    if peer.ranks:
        return {}
    y = peer.call(x, k, tau).double()
    found = {"sum": (y.sum(-1) - k).abs().max().item(), "above 1": max(0.0, y.max().item() - 1)}
    if peer.equals:
        found["value"] = (y - peer.equals(x.double(), k, tau)).abs().max().item()
    return found


# ------------------------------------------------------------------------------------------ report


def ratios(result: dict[str, Any], name: str, to: str = "softmax") -> str:
    """Forward / forward + backward."""
    pair = [times[name] / times[to] if name in times else None for times in result["seconds"]]
    return " / ".join("–" if value is None else report.ratio(value) for value in pair)


def sections(results: report.Results) -> Iterator[tuple[str, str]]:
    """What each table says, and the table."""
    done: dict[str, dict[str, Any]] = results["cases"]

    def of(section: str, family: str = "N(0, s²)") -> dict[str, dict[str, Any]]:
        found = {f"({r:,}, {n:,})": Case(section, r, n, family).id for r, n in SHAPES}
        return {shape: done[id] for shape, id in found.items() if id in done}

    head = list(of("operators"))
    if head:
        goals = [f"{a} / {b}" for (r, n), (_, a, b) in SHAPES.items() if f"({r:,}, {n:,})" in head]
        rows = [[f"`{name}`", *(ratios(c, name) for c in of("operators").values())] for name in OPERATORS]
        yield (
            "Operators, in softmaxes: forward / forward + backward; scores N(0, s²), k = n/10 (8 of 64)",
            report.table(["", *head], [["*goal, logistic*", *goals], *rows]),
        )
    rows = []
    for name, family in FAMILIES.items():
        for shape, result in of("scores", name).items():
            cells = [ratios(result, cdf) for cdf in CDFS]
            rows.append([f"{name}, {shape}", f"{family.allowed:.0f}x", *cells])
    if rows:
        yield (
            "Other scores, in softmaxes: forward / forward + backward; allowed: times the goals",
            report.table(["", "allowed", *CDFS], rows),
        )
    peers = of("peers")
    if not peers:
        return
    here = [
        name
        for name in PEERS
        if any(name in found["errors"] or name in found["left out"] for found in peers.values())
    ]
    names = [*OURS, *here]
    yield (
        "What people run today, in softmaxes: forward / forward + backward",
        report.table(
            ["", *peers],
            [[name, *(peer_cell(result, name, "softmax") for result in peers.values())] for name in names],
        ),
    )
    yield (
        "The same, in times of khot.sigmoid_topk",
        report.table(
            ["", *peers],
            [
                [name, *(peer_cell(result, name, "sigmoid_topk") for result in peers.values())]
                for name in here
            ],
        ),
    )
    yield (
        "Their errors: largest of |Σy − k|, of y − 1, and of |y − y of khot's operator in float64|",
        report.table(
            ["", *peers],
            [[name, *(error_cell(result, name) for result in peers.values())] for name in here],
        ),
    )


def peer_cell(result: dict[str, Any], name: str, to: str) -> str:
    return result["left out"].get(name) or ratios(result, name, to)


def error_cell(result: dict[str, Any], name: str) -> str:
    found = result["errors"].get(name)
    if not found:
        return "–"
    values = (found.get(key) for key in ("sum", "above 1", "value"))
    return ", ".join("–" if v is None else f"{v:.0e}" if v else "0" for v in values)


def write(path: Path, results: report.Results) -> None:
    """Everything there is so far, as Markdown and as a picture."""
    setting = ["- " + f"{key}: {value}" for key, value in results["setting"].items()]
    parts = [f"## {title}\n\n{table}" for title, table in sections(results)]
    text = "\n\n".join(["# CPU benchmark", "\n".join(setting), *parts])
    path.write_text(text, encoding="utf-8")
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for n in GROWTH_N:
        timed = results["cases"].get(Case("growth", GROWTH_ROWS, n).id)
        sized = results["cases"].get(Case("memory", GROWTH_ROWS, n).id)
        for title, unit, values in (
            ("Time of forward + backward, ms", 1e-3, timed and timed["seconds"][1]),
            ("Memory of forward + backward, MB", 1e6, sized and sized["bytes"][1]),
        ):
            for name in DRAWN:
                value = (values or {}).get(name) or 0
                panels.setdefault(title, {}).setdefault(name, []).append((n, value / unit))
    if panels:
        caption = "; ".join(
            f"{key}: {value}" for key, value in results["setting"].items() if key != "packages"
        )
        x_label = f"n ({GROWTH_ROWS} rows, k = n/10)"
        report.loglog(path.with_suffix(".png"), panels, x_label, ["softmax", *OURS], caption)


# -------------------------------------------------------------------------------------------- main


def options(args: argparse.Namespace) -> list[str]:
    """What the figures depend on."""
    chosen = [f"--{name.replace('_', '-')}" for name in ("quick", "cpu_time") if getattr(args, name)]
    return chosen if args.seconds is None else [*chosen, f"--seconds {args.seconds:g}"]


def packages() -> Iterator[str]:
    """Those of the peers that are here, with their versions."""
    for peer in PEERS.values():
        if peer.needs and not missing(peer):
            module = peer.needs.partition(":")[0]
            yield f"{module} {importlib.metadata.version(module)}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="one shape and small n, few rounds: a minute or two"
    )
    parser.add_argument("--seconds", type=float, help="for each call: 1, or 0.05 with --quick")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread and its CPU time: steadier on a machine that others use",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for cpu.json, cpu.md and cpu.png")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    clock = timing.clock(args.cpu_time)

    path = args.out / ("cpu-quick.md" if args.quick else "cpu.md")
    setting = {
        "command": " ".join(["python -m benchmarks.cpu", *options(args)]),
        **report.machine(cpu_time=args.cpu_time),
        "packages": ", ".join(packages()),
    }
    seconds = args.seconds or (0.05 if args.quick else 1.0)
    todo = {case.id: lambda case=case: measure(case, seconds, clock) for case in cases(args.quick)}
    report.complete(path, setting, todo, write)


if __name__ == "__main__":
    main()
