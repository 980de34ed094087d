"""What a k-hot draw costs beside torch.topk: `python -m benchmarks.sampling`.

One draw of every design for each row of σ_k(scores), as a ratio to torch.topk on the same scores in the same
run: all calls take turns, medians. Nothing is reported if sizes or inclusion probabilities are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import khot
from benchmarks import report, timing
from khot.sampling import designs, gumbel_topk, sample

SHAPES = {(4_096, 8): 2, (128, 1_000): 100, (100, 10_000): 1_000}
GOALS = {"pareto": 3.5, "pivotal": 4.0, "random_pivotal": 2.0}
GOALS |= dict.fromkeys(("conditional_poisson", "sampford", "pareto, exact"), 8.0)
LONG, SLOW = 1_000, ("brewer",)  # O(nk): not for rows that are longer
DRAWS, TOLERANCE = (
    2_000,
    6.0,
)  # for the check, whose tolerance is in standard deviations: 1e-5 for 5,000 units


def scores(rows: int, n: int) -> Tensor:
    """N(0, s²), s from 0.1 to 5 evenly over the rows."""
    return (
        torch.randn(rows, n, generator=torch.Generator().manual_seed(0))
        * torch.linspace(0.1, 5, rows)[:, None]
    )


def check(name: str, probs: Tensor, k: int, draw: Callable[[Tensor], Tensor]) -> None:
    """Raise unless sizes are k, and units of a few short rows are selected as often as they should be."""
    if not bool((draw(probs[:4]).sum(-1) == k).all()):
        raise SystemExit(f"{name} at {tuple(probs.shape)} draws the wrong size: nothing is reported")
    short = khot.sigmoid_topk(scores(5, 100).double(), 10)
    error = (draw(short.expand(DRAWS, 5, 100)).double().mean(0) - short).abs()
    bound = TOLERANCE * (short * (1 - short) / DRAWS).sqrt() + TOLERANCE**2 / DRAWS
    if not bool((error <= bound).all()):
        raise SystemExit(f"{name} has the wrong inclusion probabilities: nothing is reported")


def calls(x: Tensor, k: int) -> dict[str, timing.Call]:
    """Every design, and what else draws, on the rows of x."""
    probs = khot.sigmoid_topk(x, k)
    draws = {name: partial(sample, design=name) for name, d in designs.items() if d.fixed_size and d.close}
    draws["pareto, exact"] = partial(sample, adjust="exact")
    if x.shape[-1] > LONG:
        draws = {name: draw for name, draw in draws.items() if name not in SLOW}
    for name, draw in draws.items():
        check(name, probs, k, draw)
    return (
        {"torch.topk": partial(torch.topk, x, k)}
        | {name: partial(draw, probs) for name, draw in draws.items()}
        | {"gumbel_topk": partial(gumbel_topk, x, k)}
    )


def main() -> None:
    seconds, clock = report.begin("k-hot draws beside torch.topk, on the CPU")
    columns = {
        shape: timing.medians(calls(scores(*shape), k), seconds=seconds, clock=clock)
        for shape, k in SHAPES.items()
    }
    rows = []
    for name in next(iter(columns.values())):
        ratios = (times[name] / times["torch.topk"] if name in times else None for times in columns.values())
        goal = f"{GOALS[name]}" if name in GOALS else ""
        rows.append([name, goal, *("" if r is None else report.ratio(r) for r in ratios)])
    print(report.table(["one draw, in torch.topk", "goal", *(f"{s}" for s in SHAPES)], rows))


if __name__ == "__main__":
    main()
