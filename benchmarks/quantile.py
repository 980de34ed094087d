"""What exact order statistics cost on the CPU beside torch's: `python -m benchmarks.quantile`.

Times are ratios in the same run: all calls take turns in random order, medians of CPU time on one thread, in
float32. torch.quantile takes no more than 2^24 entries.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from torch import Tensor

import khot
from benchmarks import report
from reproduce.harness import timing

SHAPES: tuple[tuple[int, ...], ...] = (
    (64,),
    (1000,),
    (10_000,),
    (100_000,),
    (1_000_000,),
    (10_000_000,),
    (100_000_000,),
    (4096, 64),
    (128, 1000),
)
MOST_OF_TORCH = 2**24
COLUMNS = ("shape", "khot, ms", "torch.kthvalue : kth_value", "torch.quantile : quantile", "half tied : not")


def rows(shape: tuple[int, ...], tied: bool = False) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if tied:
        x[..., ::2] = 0.1
    return x


def measure(shape: tuple[int, ...], seconds: float) -> str:
    """A line of the table, for the median and the quantile of 0.9."""
    n = shape[-1]
    x, tied, k = rows(shape), rows(shape, tied=True), n // 2
    calls: dict[str, Callable[[], Tensor]] = {
        "kth_value": lambda: khot.kth_value(x, k, largest=False),
        "tied": lambda: khot.kth_value(tied, k, largest=False),
        "torch.kthvalue": lambda: x.kthvalue(k).values,
    }
    if not torch.equal(calls["kth_value"](), calls["torch.kthvalue"]()):
        raise AssertionError(f"kth_value differs from torch.kthvalue for {shape}")
    if n <= MOST_OF_TORCH:
        calls["quantile"] = lambda: khot.quantile(x, 0.9)
        calls["torch.quantile"] = lambda: torch.quantile(x, 0.9, -1)
        torch.testing.assert_close(calls["quantile"](), calls["torch.quantile"]())
    t = timing.medians(calls, seconds=seconds, clock=timing.clock(cpu_time=True))
    whole = report.ratio(t["torch.quantile"] / t["quantile"]) if n <= MOST_OF_TORCH else "–"
    cells = [
        " x ".join(f"{size:,}" for size in shape),
        f"{1e3 * t['kth_value']:.3g}",
        report.ratio(t["torch.kthvalue"] / t["kth_value"]),
    ]
    return "| " + " | ".join([*cells, whole, f"{t['tied'] / t['kth_value']:.2f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description="exact order statistics beside torch's, on the CPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each call")
    parser.add_argument("--most", type=int, default=10_000_000, help="the longest row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(*(f"{key}: {value}" for key, value in report.machine(cpu_time=True).items()), sep="; ")
    print(f"float32; load: {os.getloadavg()[0]:.1f}\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for shape in SHAPES:
        if shape[-1] <= args.most:
            print(measure(shape, args.seconds), flush=True)


if __name__ == "__main__":
    main()
