"""Attention to the k best of 16,384 keys beside dense attention: `python -m benchmarks.attention`.

One head of 64 entries, 16,384 queries and keys in float32, k = 32. khot.nn.topk_attention, soft, soft among
candidates and hard, beside what one would write by hand, torch's scaled_dot_product_attention with a mask of
each query's k best keys, and beside plain attention without a selection. CPU time of one thread and the peak
of memory beyond the arguments, forward and forward + backward.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import khot
from benchmarks import report, timing

E, K, TAU = 64, 32, 0.1
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    best = (q @ k.mT).topk(K, -1).indices
    mask = torch.zeros(*q.shape[:-1], k.shape[-2], dtype=torch.bool).scatter(-1, best, True)
    return F.scaled_dot_product_attention(q, k, v, mask)


CALLS: dict[str, Attention] = {
    "topk_attention": lambda q, k, v: khot.nn.topk_attention(q, k, v, K, tau=TAU),
    f"topk_attention, {4 * K} candidates": lambda q, k, v: khot.nn.topk_attention(
        q, k, v, K, tau=TAU, candidates=4 * K
    ),
    "topk_attention, hard": lambda q, k, v: khot.nn.topk_attention(q, k, v, K, hard=True),
    "by hand: topk, mask, attention": by_hand,
    "attention to all keys": F.scaled_dot_product_attention,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="attention to the k best keys beside dense attention")
    parser.add_argument("--length", type=int, default=16_384, help="queries and keys")
    args = parser.parse_args()
    clock = timing.clock(cpu_time=True)
    print(*(f"{key}: {value}" for key, value in report.machine(cpu_time=True).items()), sep="; ")
    print(f"load: {os.getloadavg()[0]:.1f}\n")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, args.length, E, generator=generator) for _ in range(3))
    hard = CALLS["topk_attention, hard"](q, k, v)
    if not torch.allclose(hard, by_hand(q, k, v), rtol=0, atol=1e-5):
        raise SystemExit("the hard selection and the one by hand disagree: nothing is reported")

    def both(attention: Attention) -> Callable[[], object]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return lambda: torch.autograd.grad(attention(*leaves).sum(), leaves)

    forward = {name: (lambda f=f: f(q, k, v)) for name, f in CALLS.items()}
    whole = {name: both(f) for name, f in CALLS.items()}
    times = [timing.medians(calls, seconds=1.0, rounds=5, clock=clock) for calls in (forward, whole)]
    memory = [{name: timing.peak_memory(call) for name, call in calls.items()} for calls in (forward, whole)]
    rows = [
        [
            name,
            " / ".join(f"{t[name]:.1f}" for t in times),
            " / ".join(f"{m[name] / 2**20:,.0f}" for m in memory),
        ]
        for name in CALLS
    ]
    print(report.table([f"{args.length:,} queries and keys", "seconds", "peak memory, MiB"], rows))


if __name__ == "__main__":
    main()
