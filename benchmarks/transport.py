"""The sorted SOFT top-k beside 200 Sinkhorn sweeps: `python -m benchmarks.transport`.

Times are ratios, sweeps to khot, forward / forward + backward, in the same run: all calls interleaved,
medians of CPU time on one thread, in float64. The sweeps come in logarithms and in plain numbers, which
are faster and underflow; their backward pass is the closed form of Xie et al. 2020, algorithm 4. What is left
of accuracy shows in the row sums, which should be 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import khot
from benchmarks import report

SHAPES = [(1, 10_000, 5), (16, 10_000, 5), (100, 1_000, 5), (4, 1_000, 64)]
EPSILONS = (0.01, 0.1, 1.0)
SWEEPS = 200


def log_sweeps(x: Tensor, k: int, epsilon: float, sweeps: int = SWEEPS) -> Tensor:
    """n times the plan, less its last anchor, (batch, k, n): alternate scaling in logarithms."""
    n = x.shape[-1]
    anchors = torch.arange(k, -1, -1, dtype=x.dtype)
    kernel = -((x[:, None, :] - anchors[:, None]) ** 2) / epsilon
    log_mass = torch.zeros(k + 1, dtype=x.dtype)
    log_mass[k] = torch.tensor(float(max(n - k, 1e-300))).log()
    b = torch.zeros(len(x), k + 1, 1, dtype=x.dtype)
    for _ in range(sweeps):
        a = -(kernel + b).logsumexp(-2, keepdim=True)
        b = log_mass[:, None] - (kernel + a).logsumexp(-1, keepdim=True)
    return (kernel + a + b).exp()[:, :k]


def plain_sweeps(x: Tensor, k: int, epsilon: float, sweeps: int = SWEEPS) -> Tensor:
    """The same without logarithms: two matrix-vector products per sweep, and NaN where exp underflows."""
    n = x.shape[-1]
    anchors = torch.arange(k, -1, -1, dtype=x.dtype)
    kernel = torch.exp(-((x[:, None, :] - anchors[:, None]) ** 2) / epsilon)
    mass = torch.ones(k + 1, 1, dtype=x.dtype)
    mass[k] = n - k
    q = torch.ones(len(x), k + 1, 1, dtype=x.dtype)
    for _ in range(sweeps):
        p = 1 / (kernel.mT @ q)
        q = mass / (kernel @ p)
    return (kernel * p.mT * q)[:, :k]


class ClosedForm(torch.autograd.Function):
    """Sweeps forward, and backward the implicit gradient at the plan that they have come to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int, epsilon: float, sweeps: Callable[..., Tensor]) -> Tensor:
        y = sweeps(x, k, epsilon)
        ctx.save_for_backward(y)
        ctx.epsilon = epsilon
        return y

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Any, ...]:
        (y,) = ctx.saved_tensors
        h = y * (v - (v * y).sum(-2, keepdim=True))
        K = torch.diag_embed(y.sum(-1)) - y @ y.mT
        pull = torch.linalg.solve(K, h.sum(-1, keepdim=True))
        h = h - y * (pull - (pull * y).sum(-2, keepdim=True))
        anchors = torch.arange(y.shape[-2], 0, -1, dtype=y.dtype)
        return 2 / ctx.epsilon * (anchors[:, None] * h).sum(-2), None, None, None


def medians(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in calls.items():
            call()  # what ran before has the caches
            start = time.thread_time()
            call()
            times[name].append(time.thread_time() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def measure(rows: int, n: int, k: int, epsilon: float, seconds: float) -> str:
    x = torch.randn(rows, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v = torch.randn(rows, k, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "khot": lambda x: khot.sorted_soft_topk(x, k, epsilon=epsilon),
        "log": lambda x: ClosedForm.apply(x, k, epsilon, log_sweeps),
        "plain": lambda x: ClosedForm.apply(x, k, epsilon, plain_sweeps),
    }

    def both(form: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        leaf = x.clone().requires_grad_()
        return lambda: torch.autograd.grad(form(leaf), leaf, v)

    forward = medians({name: lambda form=form: form(x) for name, form in forms.items()}, seconds)  # type: ignore[misc]
    whole = medians({name: both(form) for name, form in forms.items()}, seconds)
    off = {name: (form(x).sum(-1) - 1).abs().max().item() for name, form in forms.items()}
    cells = [f"({rows}, {n}) | {k} | {epsilon} | {1e3 * forward['khot']:.1f} / {1e3 * whole['khot']:.1f}"]
    cells += [
        f"{forward[m] / forward['khot']:.1f} / {whole[m] / whole['khot']:.1f}" for m in ("log", "plain")
    ]
    cells += [f"{off[name]:.0e}" for name in forms]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description="sorted SOFT top-k beside 200 Sinkhorn sweeps, on the CPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each cell of the table")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first few")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(*(f"{key}: {value}" for key, value in report.machine(cpu_time=True).items()), sep="; ")
    print(f"float64; load: {os.getloadavg()[0]:.1f}\n")
    columns = ["rows, n", "k", "ε", "khot, ms", "log sweeps : khot", "plain sweeps : khot"]
    columns += ["row sums off by: khot", "log", "plain"]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for rows, n, k in SHAPES[: args.shapes]:
        for epsilon in EPSILONS:
            print(measure(rows, n, k, epsilon, args.seconds), flush=True)


if __name__ == "__main__":
    main()
