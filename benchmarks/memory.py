"""The memory of forward + backward against n (lapsum, appendix F): `python -m benchmarks.memory`.

The largest growth of the process in MB on the CPU, for one row of normal scores in float32: soft top-k with
k = n/2 beside the methods of khot.baselines (lapsum's Figures 10 and 11), and soft permutations beside the
other relaxed sorts (Figure 14). The calls of khot that are marked * need no matrix of places by entries. A
cell is empty where a call would take more than a minute or 2 GB. For times see benchmarks.cpu and the runtime
experiment.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

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
NS = (1024, 4096, 65_536, LONGEST)


def check(x: Tensor) -> None:
    """Raise unless what is measured is a selection, whose rows sum to k, or to 1 for each place."""
    n = x.shape[-1]
    for cases, total in ((TOPK, n // 2), (SORTS, 1)):
        for name, (call, _) in cases.items():
            y = call(x).detach().double()
            if not name.endswith("*") and (y.sum(-1) / total - 1).abs().max() > 1e-3:
                raise SystemExit(f"{name} does not sum to {total}: nothing is reported")


def measured(sorts: bool, name: str, n: int) -> int | None:
    call, _ = (SORTS if sorts else TOPK)[name]
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    return timing.peak_memory(timing.forward_backward(call, x))


def megabytes(sorts: bool, name: str, n: int) -> str:
    # in a process of its own, because what earlier calls have left in the heap changed the figures
    with multiprocessing.get_context("fork").Pool(1) as pool:
        size = pool.apply(measured, (sorts, name, n))
    # peak_memory is accurate to about 0.1 MB
    return "" if size is None else "< 0.1" if size < 1e5 else f"{size / 1e6:,.1f}"


def main() -> None:
    torch.set_num_threads(1)
    print(*(f"{key}: {value}" for key, value in report.machine(cpu_time=False).items()), sep="; ")
    print("forward + backward of one row of float32 scores; *: makes no matrix of places by entries\n")
    check(torch.randn(64, generator=torch.Generator().manual_seed(0)))
    header = [f"n = {n:,}" for n in NS]
    for sorts, title in enumerate(("soft top-k, k = n/2, MB", "soft permutations and sorts, MB")):
        rows = [
            [name, *(megabytes(bool(sorts), name, n) if n <= longest else "" for n in NS)]
            for name, (_, longest) in (SORTS if sorts else TOPK).items()
        ]
        print(report.table([title, *header], rows), flush=True)


if __name__ == "__main__":
    main()
