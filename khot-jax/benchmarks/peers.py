"""What a soft top-k costs in JAX, on a CPU, in softmaxes, and what it gets wrong.

    python khot-jax/benchmarks/peers.py            # writes benchmarks/results/jax.md

It runs on Linux, in an environment with khot_jax, softjax and ott-jax, without torch. One thread of one
core; the CPU time of the process; each call alternates with ``jax.nn.softmax`` on the same array, under jit,
and the medians are divided.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import softjax
from jax import lax
from ott.tools import soft_sort

from khot_jax import cdfs, instruction_set, soft_topk, topk_mask

SHAPES = ((4096, 64, 8), (128, 1000, 32), (100, 10_000, 100), (16, 1_000_000, 1000))
SECONDS = 2.0  # for each pair of calls
HARD = ("`lax", "`jnp", "`khot_jax.topk_mask")  # without a gradient
MOST = 3e9  # bytes that a rival may allocate
FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "jax.md"

Operator = Callable[[Any], Any]


class Uncompiled(cdfs.Logistic):
    """On the pure engine, as any CDF of one's own."""


def bisection(x: Any, k: float, steps: int = 50) -> Any:
    """What is written by hand: bisection without gradient, and one differentiable step of Newton's method."""
    fixed = lax.stop_gradient(x)

    def halve(_: Any, ends: Any) -> Any:
        middle = 0.5 * (ends[0] + ends[1])
        more = jax.nn.sigmoid(fixed - middle[..., None]).sum(-1) > k
        return jnp.where(more, middle, ends[0]), jnp.where(more, ends[1], middle)

    low, high = lax.fori_loop(0, steps, halve, (fixed.min(-1) - 20, fixed.max(-1) + 20))
    t = lax.stop_gradient(0.5 * (low + high))
    y = jax.nn.sigmoid(x - t[..., None])
    t = t + (y.sum(-1) - k) / lax.stop_gradient((y * (1 - y)).sum(-1))
    return jax.nn.sigmoid(x - t[..., None])


def operators(b: int, n: int, k: int) -> dict[str, Operator | None]:
    """Soft or hard top-ks of rows; None where it would not fit into memory."""

    def sorting(method: str, size: int) -> Operator | None:
        soft = lambda x: softjax.top_k(x, k, method=method)[1].sum(-2)
        return soft if 12 * (size + b * k * n) < MOST else None

    return {
        "`khot_jax.soft_topk`": lambda x: soft_topk(x, float(k)),
        "the same, bfloat16": lambda x: soft_topk(x.astype(jnp.bfloat16), float(k)),
        "the same, Laplace": lambda x: soft_topk(x, float(k), cdf="laplace"),
        "the same, scores 100 times as wide": lambda x: soft_topk(100 * x, float(k)),
        "the same, pure engine": lambda x: soft_topk(x, float(k), cdf=Uncompiled()),
        "50 bisections by hand": lambda x: bisection(x, k),
        "`khot_jax.topk_mask`": lambda x: topk_mask(x, float(k)),
        "`lax.top_k`": lambda x: lax.top_k(x, k)[0],
        "`jnp.sort`": lambda x: jnp.sort(x, -1),
        "softjax `top_k`, softsort": sorting("softsort", b * k * n),
        "softjax `top_k`, neuralsort": sorting("neuralsort", b * n * n),
        "ott `topk_mask`": (lambda x: soft_sort.topk_mask(x, axis=-1, k=k)) if n <= 1000 else None,
    }


def ratio(use: Callable[..., Any], f: Operator, *given: Any) -> float:
    """The time of a use of f, in that of the same use of softmax."""
    calls = [jax.jit(partial(use, operator)) for operator in (f, jax.nn.softmax)]

    def once(call: Callable[..., Any]) -> float:
        start = time.process_time()
        jax.block_until_ready(call(*given))
        return time.process_time() - start

    rounds = [[once(call) for call in calls]]  # the first compiles
    start = time.perf_counter()
    while len(rounds) < 4 or (time.perf_counter() - start < SECONDS and len(rounds) < 61):
        rounds.append([once(call) for call in calls])
    own, softmax = map(statistics.median, zip(*rounds[1:], strict=True))
    return own / softmax


def both(f: Operator, x: Any, v: Any) -> Any:
    y, pull = jax.vjp(f, x)
    return y, pull(v.astype(y.dtype))


def price(name: str, f: Operator, x: Any, v: Any) -> str:
    forward = lambda f, x, _: f(x)
    uses = (forward,) if name.startswith(HARD) else (forward, both)
    return " / ".join(f"{ratio(use, f, x, v):.3g}" for use in uses)


def wrong(f: Operator, k: int, x: Any) -> str:
    """The sum and the largest y on normal and Cauchy scores, and whether a −inf spoils the gradient."""
    found = []
    for kind, rows in (("normal", x), ("Cauchy", jax.random.cauchy(jax.random.key(0), x.shape))):
        y = jax.jit(f)(rows).astype(jnp.float32)
        off = float(jnp.abs(y.sum(-1) - k).max())
        found.append(f"{kind}: sum off by {off:.2g}, y up to {float(y.max()):.4g}")
    grad = jax.jit(jax.grad(lambda x: (f(x) * x.at[:, 0].set(0)).sum()))(x.at[:, 0].set(-jnp.inf))
    return "; ".join([*found, f"−inf: gradient {'' if jnp.isfinite(grad).all() else 'not '}finite"])


def main() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows: dict[str, list[str]] = {}
    faults: dict[str, str] = {}
    for b, n, k in SHAPES:
        rng = np.random.default_rng(0)
        x, v = (jnp.asarray(rng.standard_normal((b, n)), jnp.float32) for _ in range(2))
        for name, f in operators(b, n, k).items():
            rows.setdefault(name, []).append("not run" if f is None else price(name, f, x, v))
            if f is not None and n == 1000 and not name.startswith(("the same, scores", *HARD)):
                faults[name] = wrong(f, k, x)
            print(f"({b}, {n})", name, rows[name][-1], faults.get(name, ""), flush=True)
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("model name\t: ")[2].partition("\n")[0]
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "khot-jax", "softjax", "ott-jax"))
    heads = " | ".join(f"({b:,}, {n:,}) k = {k:,}" for b, n, k in SHAPES)
    lines = [
        "# Soft top-k in JAX, on a CPU",
        "",
        "Written by `python khot-jax/benchmarks/peers.py`.",
        "",
        f"processor: {cpu}; threads: 1; time: CPU time; kernels: {instruction_set()}; {versions}; python: "
        f"{platform.python_version()}; system: {platform.system()} {platform.machine()}",
        "",
        f"| in softmaxes (`jax.nn.softmax`, float32, jit): forward / forward + backward | {heads} |",
        "| --- |" + " ---: |" * len(SHAPES),
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()),
        "",
        f'"not run" would have needed more than {MOST / 1e9:g} GB, or, of ott, minutes.',
        "",
        "| at (128, 1,000), k = 32 | what comes out |",
        "| --- | --- |",
        *(f"| {name} | {told} |" for name, told in faults.items()),
    ]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
