"""What a budget costs on the CPU beside a count: `python -m benchmarks.budget`.

soft_budget beside soft_topk and torch.softmax of the same float32 scores (normal, sd 1; costs uniform in 0.05
to 1.05; a tenth of them is paid for; τ = 1), forward and forward + backward, with gradients in the scores
and, for the budget, in the costs. Times are ratios in the same run: all calls interleaved, medians of CPU
time on one thread. Set KHOT_KERNELS=avx2 for the older instruction set.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import khot
from benchmarks import report
from khot import _kernels as kernels
from reproduce.harness import timing

SHAPES = ((4096, 64), (128, 1000), (100, 10_000), (100, 100_000), (16, 1_000_000))
SHARE = 0.1
COLUMNS = (
    "shape",
    "cdf",
    "by score : top-k",
    "by value : top-k",
    "by score : softmax",
    "by value : softmax",
)


def calls(
    shape: tuple[int, int], cdf: Any
) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """The calls forward, and the same with the backward pass."""
    g = torch.Generator().manual_seed(0)
    x, cost = torch.randn(shape, generator=g), torch.rand(shape, generator=g) + 0.05
    budget, k, grad = SHARE * cost.sum(-1), SHARE * shape[1], torch.randn(shape, generator=g)
    of: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "softmax": lambda x, _: torch.softmax(x, -1),
        "top-k": lambda x, _: khot.soft_topk(x, k, cdf=cdf),
        "score": lambda x, cost: khot.soft_budget(x, cost, budget, cdf=cdf),
        "value": lambda x, cost: khot.soft_budget(x, cost, budget, cdf=cdf, by="value"),
    }

    def both(call: Callable[[Tensor, Tensor], Tensor], name: str) -> Callable[[], Any]:
        leaf, price = x.clone().requires_grad_(), cost.clone().requires_grad_(name in ("score", "value"))
        inputs = (leaf, price) if price.requires_grad else (leaf,)
        return lambda: torch.autograd.grad(call(leaf, price), inputs, grad)

    forward = {name: lambda call=call: call(x, cost) for name, call in of.items()}
    for name in ("score", "value"):
        spent = (cost.double() * forward[name]().double()).sum(-1)
        torch.testing.assert_close(spent, budget.double(), rtol=2e-6, atol=0)
    return forward, {name: both(call, name) for name, call in of.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="the soft budget beside soft top-k and softmax, on the CPU")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each call")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(*(f"{key}: {value}" for key, value in report.machine(cpu_time=True).items()), sep="; ")
    print(f"kernels: {kernels.active()['cpu']}; float32; load: {os.getloadavg()[0]:.1f}\n")
    print("Each cell: forward / forward + backward.\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for shape in SHAPES:
        for cdf in ("logistic", "normal", "uniform"):
            t = [
                timing.medians(these, seconds=args.seconds, clock=timing.clock(cpu_time=True))
                for these in calls(shape, cdf)
            ]
            cells = [
                " / ".join(f"{one[name] / one[base]:.2f}" for one in t)
                for base in ("top-k", "softmax")
                for name in ("score", "value")
            ]
            print(
                "| " + " | ".join([str(shape).replace(",", " x").strip("()"), cdf, *cells]) + " |", flush=True
            )


if __name__ == "__main__":
    main()
