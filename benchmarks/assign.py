"""The two-sided assignment beside Sinkhorn's sweeps at equal error: `python -m benchmarks.assign`.

khot.soft_assign beside the sweeps of POT (`ot.sinkhorn` on NumPy arrays, in plain numbers and in logarithms),
for float64 scores (normal, sd 1), with rows of sum 1 and columns of equal sums. The regularisers differ:
Sinkhorn's is the entropy of y, khot's that of y and of 1 − y. So both are compared at the same error: for
each, the temperature is sought at which Σ x y is the given fraction below the optimum of the linear programme
(`ot.emd`), with the sums of the columns right to a relative 1e-6. Sinkhorn's `stopThr` is tightened until
they are. `at_most` has a tenth more room than it needs. The warm start is the solution plus noise of 0.1 τ.

Times are of one run: all calls interleaved, medians of CPU time on one thread. The steps are those of
Newton's method, in part on a sample of the rows or in float32.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import ot
import torch
from torch import Tensor

import khot
from benchmarks import report
from reproduce.harness import timing

SHAPES = ((1024, 16), (1024, 64), (4096, 64))
GAP, SUMS = 2e-4, 1e-6
METHODS = ("sinkhorn", "sinkhorn_log")
COLUMNS = (
    "shape",
    "τ : ε",
    "khot, ms",
    "sinkhorn : khot",
    "sinkhorn_log : khot",
    "sums off by: khot",
    "sinkhorn",
    "sweeps",
    "Newton steps",
    "khot k = 2, ms",
    "at_most, ms",
    "warm start, ms",
)


def temperature(gap: Callable[[float], float], goal: float) -> float:
    """Where the gap, which grows with the temperature, is the goal, by bisection of its logarithm."""
    low, high = 0.002, 0.1
    for _ in range(8):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gap(middle) < goal else (low, middle)
    return low


def sweeps(x: np.ndarray, epsilon: float, method: str, stop: float) -> tuple[np.ndarray, int]:
    """The plan of POT, with rows of sum 1, and the number of its sweeps."""
    m, width = x.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan, log = ot.sinkhorn(
            np.full(m, 1 / m),
            np.full(width, 1 / width),
            -x,
            epsilon,
            method=method,
            numItermax=100_000,
            stopThr=stop,
            log=True,
        )
    return m * plan, log["niter"]


def off(y: Any) -> float:
    """By how much the sum of a column or of a row is off, relative."""
    m, width = y.shape
    return max(float(abs(y.sum(0) * width / m - 1).max()), float(abs(y.sum(1) - 1).max()))


def newton_steps(call: Callable[[], Any]) -> int:
    """The linear systems solved in a call."""
    counts = [0]
    solves = {name: getattr(torch.linalg, name) for name in ("solve", "solve_ex")}

    def counting(solve: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            counts[0] += 1
            return solve(*args)

        return counted

    try:
        for name, solve in solves.items():
            setattr(torch.linalg, name, counting(solve))
        call()
    finally:
        for name, solve in solves.items():
            setattr(torch.linalg, name, solve)
    return counts[0]


def measure(m: int, width: int, goal: float, seconds: float) -> str:
    x = torch.randn(m, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = x.numpy()
    best = float((rows * ot.emd(np.ones(m), np.full(width, m / width), -rows, numItermax=10**7)).sum())

    def gap(y: Any) -> float:
        return 1 - float((x * torch.as_tensor(y)).sum()) / best

    stop = 1e-6
    epsilon = temperature(lambda e: gap(sweeps(rows, e, "sinkhorn", stop)[0]), goal)
    while off(sweeps(rows, epsilon, "sinkhorn", stop)[0]) > SUMS:
        stop /= 1.5
    plan, count = sweeps(rows, epsilon, "sinkhorn", stop)
    tau = temperature(lambda tau: gap(khot.soft_assign(x, 1, tau=tau)), goal)
    y, bias = khot.soft_assign(x, 1, tau=tau, return_bias=True)
    near = bias + 0.1 * tau * torch.randn(width, generator=torch.Generator().manual_seed(1))

    def two() -> Tensor:
        return khot.soft_assign(x, 2, tau=tau)

    calls: dict[str, Callable[[], Any]] = {
        "khot": lambda: khot.soft_assign(x, 1, tau=tau),
        **{name: lambda name=name: sweeps(rows, epsilon, name, stop) for name in METHODS},
        "two": two,
        "at_most": lambda: khot.soft_assign(x, 1, 1.1 * m / width, tau=tau, at_most=True),
        "warm": lambda: khot.soft_assign(x, 1, tau=tau, bias=near),
    }
    t = timing.medians(calls, seconds=seconds, clock=timing.clock(cpu_time=True))
    assert max(gap(y), gap(plan)) <= goal * 1.01 and off(y) <= SUMS
    cells = [f"{m:,} x {width}", f"{tau:.4f} : {epsilon:.4f}", f"{1e3 * t['khot']:.1f}"]
    cells += [f"{t[name] / t['khot']:.1f}" for name in METHODS]
    cells += [f"{off(y):.0e}", f"{off(plan):.0e}", str(count)]
    cells += [f"{newton_steps(calls['khot'])} cold, {newton_steps(calls['warm'])} warm"]
    cells += [f"{1e3 * t[name]:.1f}" for name in ("two", "at_most", "warm")]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description="the two-sided assignment beside Sinkhorn, on the CPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each call")
    parser.add_argument("--gap", type=float, default=GAP, help="the relative gap to the linear programme")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(*(f"{key}: {value}" for key, value in report.machine(cpu_time=True).items()), sep="; ")
    print(f"POT: {ot.__version__}; float64; gap: {args.gap:g}; load: {os.getloadavg()[0]:.1f}\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for m, width in SHAPES:
        print(measure(m, width, args.gap, args.seconds), flush=True)


if __name__ == "__main__":
    main()
