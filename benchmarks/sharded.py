"""A row over processes: what each of them computes and exchanges, `python -m benchmarks.sharded`.

Processes on one machine, gloo, one thread per process. Times are medians of the CPU time of the busiest
process, forward / forward + backward, as ratios to one process that has the whole row and runs the same
kernels (plain torch, in float64) without a group: 1/ranks would be perfect. Wall time is left out, since the
processes share cores. The passes, and the bytes that a process hands to torch.distributed, do not depend on
the machine.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import khot
from benchmarks import report
from khot._kernels.reference import soft_topk as reference

SIZES = (10_000, 100_000, 1_000_000)
TAU = 0.5


def whole(x: Tensor, k: float, backward: bool) -> None:
    """The kernels that shards run, on all of the row."""
    count, tau = torch.tensor([k]).double(), torch.tensor([TAU]).double()
    y, hi, lo = reference.soft_topk(x, count, tau, "logistic", 0.0, "y")
    if backward:
        reference.soft_topk_backward(y, torch.zeros_like(lo), x, hi, lo, tau, "logistic", 0.0, "y")


def shard(x: Tensor, k: float, backward: bool) -> None:
    leaf = x.requires_grad_(backward)
    y = khot.soft_topk(leaf, k, tau=TAU, group=dist.group.WORLD)
    if backward:
        torch.autograd.grad(y, leaf, y.detach())


def median(call: Callable[[], None], seconds: float) -> float:
    """CPU seconds of this process; the number of rounds is that of rank 0."""
    times: list[float] = []
    begun = time.perf_counter()
    while True:
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
        go_on = torch.tensor(float(time.perf_counter() - begun < seconds or len(times) < 3))
        if dist.is_initialized():
            dist.broadcast(go_on, 0)
        if not go_on:
            return statistics.median(times[1:])


def exchanged(call: Callable[[], None]) -> tuple[int, int]:
    """All-reduces, and their bytes."""
    real, sizes = dist.all_reduce, []

    def counting(block: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(block.numel() * block.element_size())
        return real(block, *args, **options)

    dist.all_reduce = counting
    try:
        call()
    finally:
        dist.all_reduce = real
    return len(sizes), sum(sizes)


def scores(n: int, rank: int, ranks: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=generator).tensor_split(ranks)[rank].clone().unsqueeze(0)


def serve(rank: int, ranks: int, folder: str, seconds: float, end: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    for n in SIZES:
        x = scores(n, rank, ranks)
        found: list[Any] = []
        for backward in (False, True):
            call = functools.partial(shard, x, n / 100, backward)
            found.append((exchanged(call), median(call, seconds)))
        end.send((n, found))
    dist.destroy_process_group()


def measure(ranks: int, seconds: float) -> dict[int, list[tuple[tuple[int, int], float]]]:
    """For each n, forward and forward + backward: what is exchanged, and the time of the busiest process."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=serve, args=(rank, ranks, folder, seconds, theirs)))
            processes[-1].start()
            ends.append(ours)
        table = {}
        for _ in SIZES:
            answers = [end.recv() for end in ends]
            (n, first), *_ = answers
            worst = [max(found[i][1] for _, found in answers) for i in range(2)]
            table[n] = [(first[i][0], worst[i]) for i in range(2)]
        for process in processes:
            process.join()
    return table


def main() -> None:
    parser = report.parser(__doc__ or "", seconds=0.5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    print(report.said(report.machine(cpu_time=True)))
    alone = {}
    for n in SIZES:
        x = scores(n, 0, 1)
        alone[n] = [
            median(functools.partial(whole, x, n / 100, backward), args.seconds) for backward in (False, True)
        ]
    rows = []
    for ranks in args.ranks:
        for n, found in measure(ranks, args.seconds).items():
            ratios = (f"{time / base:.2f}" for (_, time), base in zip(found, alone[n], strict=True))
            base = " / ".join(f"{1000 * time:.1f}" for time in alone[n])
            counts, sizes = zip(*(sent for sent, _ in found), strict=True)
            cells = [" / ".join(ratios), "{} / {}".format(*counts), "{:,} / {:,}".format(*sizes)]
            rows.append([str(ranks), f"{n:,}", base, *cells])
    titles = ["ranks", "n", "one process, ms", "ratio", "all-reduces", "bytes per process"]
    print(report.table(titles, rows))


if __name__ == "__main__":
    main()
