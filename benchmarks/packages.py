"""Packages that choose k of n, beside khot.sigmoid_topk: `python -m benchmarks.packages`.

Those of the peers in :mod:`reproduce.tasks.peers` that are packages, where they are installed. They
compute different functions, which the last columns tell apart: the largest error of the sum of a row, and
the largest weight.
"""

from __future__ import annotations

import importlib.metadata
from functools import partial

import torch
from torch import Tensor

import khot
from benchmarks import report, timing
from reproduce.tasks.peers import PEERS, missing

SHAPES = {(64, 64): 8, (4_096, 64): 8, (128, 1_000): 100}
PACKAGES = {name: peer for name, peer in PEERS.items() if peer.needs}


def ours(x: Tensor, k: int, tau: float) -> Tensor:
    return khot.sigmoid_topk(x, k, tau=tau)


def measure(rows: int, n: int, k: int, seconds: float, clock: timing.Clock) -> dict[str, tuple[str, str]]:
    """By name: the times in those of khot, and what the weights sum to."""
    spread = torch.linspace(0.1, 5, rows)[:, None]
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(0)) * spread
    calls = {"khot": ours}
    calls |= {name: p.call for name, p in PACKAGES.items() if not missing(p) and p.fits(rows, n, k)}
    forward = timing.medians(
        {name: partial(call, x, k, 1.0) for name, call in calls.items()}, seconds=seconds, clock=clock
    )
    both = timing.medians(
        {n: timing.forward_backward(lambda x, call=call: call(x, k, 1.0), x) for n, call in calls.items()},
        seconds=seconds,
        clock=clock,
    )
    found = {}
    for name, call in calls.items():
        times = [report.ratio(t[name] / t["khot"]) for t in (forward, both)]
        y = call(x, k, 1.0).detach().double()
        sums = (
            "–"
            if name in PEERS and PEERS[name].ranks
            else f"{(y.sum(-1) - k).abs().max():.0e}, {y.max():.2f}"
        )
        found[name] = (" / ".join(times), sums)
    return found


def main() -> None:
    seconds, clock = report.begin("packages that choose k of n, on the CPU", seconds=0.3)
    modules = dict.fromkeys(p.needs.partition(":")[0] for p in PACKAGES.values() if not missing(p))
    print(", ".join(f"{module} {importlib.metadata.version(module)}" for module in modules) + "\n")
    found = {shape: measure(*shape, k, seconds, clock) for shape, k in SHAPES.items()}
    head = [
        "forward / forward + backward, in khot.sigmoid_topk",
        *(f"{s}, k = {k}" for s, k in SHAPES.items()),
    ]
    names = [name for name in PACKAGES if any(name in one for one in found.values())]
    rows = [[name, *(one.get(name, ("too large",))[0] for one in found.values())] for name in names]
    print(report.table(head, rows) + "\n")
    head = ["largest error of a sum, largest weight", *map(str, SHAPES)]
    rows = [[name, *(one.get(name, ("", "–"))[1] for one in found.values())] for name in ["khot", *names]]
    print(report.table(head, rows))


if __name__ == "__main__":
    main()
