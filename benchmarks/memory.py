"""The memory of forward + backward against n (lapsum, appendix F): `python -m benchmarks.memory`.

The largest growth of the process in MB on the CPU, for one row of normal scores in float32: soft top-k with
k = n/2 beside the methods of khot.baselines (lapsum's Figures 10 and 11), and soft permutations beside the
other relaxed sorts, with their CPU times and a plot of both (Figure 14). The calls of khot that are marked *
need no matrix of places by entries. A cell is empty where a call would take more than a minute or 2 GB. For
times of the soft top-k see benchmarks.cpu and the runtime experiment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import khot
from benchmarks import report, timing
from khot import baselines

# a function of a row, and the largest n for which it is called
Case = tuple[Callable[[Tensor], Tensor], int]
LONGEST = 1 << 20


def half(x: Tensor) -> int:
    return x.shape[-1] // 2


TOPK: dict[str, Case] = {
    "laplace_topk": (lambda x: khot.laplace_topk(x, half(x)), LONGEST),
    "sigmoid_topk": (lambda x: khot.sigmoid_topk(x, half(x)), LONGEST),
    "sparse_topk": (lambda x: khot.sparse_topk(x, half(x)), LONGEST),
    "rescaled sigmoid": (lambda x: baselines.rescaled_sigmoid_topk(x, half(x)), LONGEST),
    "Sinkhorn": (lambda x: baselines.sinkhorn_topk(x, half(x)), LONGEST),
    "Dykstra": (lambda x: baselines.dykstra_topk(x, half(x)), LONGEST),
    "PAV": (lambda x: baselines.pav_topk(x, half(x)), LONGEST),
    "sequential softmax": (lambda x: baselines.sequential_softmax_topk(x, half(x)), 4096),
    "softmax k times": (lambda x: baselines.masked_softmax_topk(x, half(x)), 4096),
    "SoftSort": (lambda x: baselines.softsort_topk(x, half(x)), 4096),
    "NeuralSort": (lambda x: baselines.neuralsort_topk(x, half(x)), 4096),
}
SORTS: dict[str, Case] = {
    "soft_sort *": (khot.soft_sort, LONGEST),
    "permutation_cross_entropy *": (
        lambda x: khot.losses.permutation_cross_entropy(x, x.detach().argsort(-1)),
        LONGEST,
    ),
    "soft_permutation": (khot.soft_permutation, 4096),
    "SoftSort": (baselines.softsort_permutation, 4096),
    "NeuralSort": (baselines.neuralsort_permutation, 4096),
    "sorted Sinkhorn, k = n/2": (lambda x: baselines.sorted_sinkhorn_topk(x, half(x)), 1024),
}
NS = (256, 1024, 4096, 65_536, LONGEST)
SECONDS = 0.3  # for the time of each call
PLOT = Path(__file__).parent / "results" / "memory.png"


def check(x: Tensor) -> None:
    """Raise unless what is measured is a selection, whose rows sum to k, or to 1 for each place."""
    n = x.shape[-1]
    for cases, total in ((TOPK, n // 2), (SORTS, 1)):
        for name, (call, _) in cases.items():
            y = call(x).detach().double()
            if not name.endswith("*") and (y.sum(-1) / total - 1).abs().max() > 1e-3:
                raise SystemExit(f"{name} does not sum to {total}: nothing is reported")


def passes(cases: dict[str, Case], n: int) -> dict[str, timing.Call]:
    """Forward and backward of one row, for the cases that can be called at this n."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    return {name: timing.forward_backward(call, x) for name, (call, longest) in cases.items() if n <= longest}


def main() -> None:
    torch.set_num_threads(1)
    print(*(f"{key}: {value}" for key, value in report.machine(cpu_time=True).items()), sep="; ")
    print("forward + backward of one row of float32 scores; *: makes no matrix of places by entries\n")
    check(torch.randn(64, generator=torch.Generator().manual_seed(0)))
    header = [f"n = {n:,}" for n in NS]
    memory: dict[str, list[tuple[float, float]]] = {}
    for title, cases in (("soft top-k, k = n/2", TOPK), ("soft permutations and sorts", SORTS)):
        sizes = [{name: report.peak_memory(call) for name, call in passes(cases, n).items()} for n in NS]
        rows = [[name, *(report.megabytes(size.get(name)) for size in sizes)] for name in cases]
        print(report.table([f"{title}, MB", *header], rows), flush=True)
        memory = {
            name: [(n, found / 1e6) for n, size in zip(NS, sizes, strict=True) if (found := size.get(name))]
            for name in cases
        }
    times = [timing.medians(passes(SORTS, n), seconds=SECONDS, clock=time.thread_time) for n in NS]
    rows = [[name, *(f"{1e3 * t[name]:.3g}" if name in t else "" for t in times)] for name in SORTS]
    print(report.table(["soft permutations and sorts, ms", *header], rows))
    curves = {name: [(n, t[name]) for n, t in zip(NS, times, strict=True) if name in t] for name in SORTS}
    panels = {"memory, MB: forward + backward of one row": memory, "CPU time, s": curves}
    report.loglog(PLOT, panels, "n", [name for name in SORTS if name.endswith("*")])


if __name__ == "__main__":
    main()
