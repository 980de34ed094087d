"""What a soft top-k costs in JAX, on a CPU, in softmaxes, and what it gets wrong.

    python khot-jax/benchmarks/peers.py            # writes benchmarks/results/jax.md

It runs in an environment with jax and khot_jax, without torch. softjax and ott-jax take part where they are
installed. One thread of one core; the CPU time of the process; each call alternates with ``jax.nn.softmax``
on the same array, under jit, and the medians are divided.
"""

from __future__ import annotations

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import khot_jax

SHAPES = ((4096, 64, 8), (128, 1000, 32), (100, 10_000, 100), (16, 1_000_000, 1000))
SECONDS = 2.0  # for each pair of calls
HARD = ("`lax", "`jnp", "`khot_jax.topk_mask")  # without a gradient
MOST = 3e9  # bytes that a rival may allocate
FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "jax.md"

Operator = Callable[[Any], Any]


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


def operators(b: int, n: int, k: int) -> Iterator[tuple[str, Operator | None]]:
    """Names, and soft or hard top-ks of rows; None where it would not fit into memory."""

    def pure(x: Any) -> Any:
        return khot_jax.soft_topk(x, float(k), cdf=Uncompiled())

    yield "`khot_jax.soft_topk`", lambda x: khot_jax.soft_topk(x, float(k))
    yield "the same, bfloat16", lambda x: khot_jax.soft_topk(x.astype(jnp.bfloat16), float(k))
    yield "the same, Laplace", lambda x: khot_jax.soft_topk(x, float(k), cdf="laplace")
    yield "the same, scores 100 times as wide", lambda x: khot_jax.soft_topk(100 * x, float(k))
    yield "the same, pure engine", pure
    yield "50 bisections by hand", lambda x: bisection(x, k)
    yield "`khot_jax.topk_mask`", lambda x: khot_jax.topk_mask(x, float(k))
    yield "`lax.top_k`", lambda x: lax.top_k(x, k)[0]
    yield "`jnp.sort`", lambda x: jnp.sort(x, -1)
    try:
        import softjax
    except ImportError:
        pass
    else:
        for method, size in (("softsort", b * k * n), ("neuralsort", b * n * n)):
            fits = 12 * (size + b * k * n) < MOST

            def soft(x: Any, method: str = method) -> Any:
                return softjax.top_k(x, k, method=method)[1].sum(-2)

            yield f"softjax `top_k`, {method}", soft if fits else None
    try:
        from ott.tools import soft_sort
    except ImportError:
        pass
    else:
        yield "ott `topk_mask`", (lambda x: soft_sort.topk_mask(x, axis=-1, k=k)) if n <= 1000 else None


class Uncompiled(khot_jax.cdfs.Logistic):
    """On the pure engine."""

    compiled = None


def once(f: Callable[..., Any], *given: Any) -> float:
    start = time.process_time()
    jax.block_until_ready(f(*given))
    return time.process_time() - start


def ratio(f: Callable[..., Any], g: Callable[..., Any], *given: Any) -> float:
    for each in (f, g):
        once(each, *given)
    pairs, start = [], time.perf_counter()
    while len(pairs) < 3 or (time.perf_counter() - start < SECONDS and len(pairs) < 60):
        pairs.append((once(f, *given), once(g, *given)))
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


def both(f: Operator) -> Callable[..., Any]:
    def value_and_pull(x: Any, v: Any) -> Any:
        y, pull = jax.vjp(f, x)
        return y, pull(v.astype(y.dtype))

    return jax.jit(value_and_pull)


def price(name: str, f: Operator | None, x: Any, v: Any) -> str:
    if f is None:
        return "not run"
    try:
        forward = ratio(jax.jit(f), jax.jit(jax.nn.softmax), x)
        if name.startswith(HARD):
            return f"{forward:.3g}"
        return f"{forward:.3g} / {ratio(both(f), both(jax.nn.softmax), x, v):.3g}"
    except Exception as error:
        return type(error).__name__


def wrong(f: Operator | None, k: int, x: Any) -> str:
    """The sum and the largest y on normal and Cauchy scores, and whether a −inf spoils the gradient."""
    if f is None:
        return ""
    found = []
    for kind, rows in (("normal", x), ("Cauchy", jax.random.cauchy(jax.random.key(0), x.shape))):
        y = jax.jit(f)(rows).astype(jnp.float32)
        if y.shape != x.shape:
            return ""
        off = float(jnp.abs(y.sum(-1) - k).max())
        found.append(f"{kind}: sum off by {off:.2g}, y up to {float(y.max()):.4g}")
    out = x.at[:, 0].set(-jnp.inf)
    try:
        grad = jax.jit(jax.grad(lambda x: (f(x) * x.at[:, 0].set(0)).sum()))(out)
        spoilt = not bool(jnp.isfinite(grad).all())
    except Exception as error:
        return "; ".join([*found, f"−inf: {type(error).__name__}"])
    return "; ".join([*found, f"−inf: gradient {'not finite' if spoilt else 'finite'}"])


def main() -> None:
    rows: dict[str, list[str]] = {}
    faults: dict[str, str] = {}
    for b, n, k in SHAPES:
        rng = np.random.default_rng(0)
        x, v = (jnp.asarray(rng.standard_normal((b, n)), jnp.float32) for _ in range(2))
        for name, f in operators(b, n, k):
            rows.setdefault(name, []).append(price(name, f, x, v))
            if n == 1000 and not name.startswith(("the same, scores", *HARD)):
                faults[name] = wrong(f, k, x)
            print(f"({b}, {n})", name, rows[name][-1], faults.get(name, ""), file=sys.stderr, flush=True)
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jax", "khot-jax", "softjax", "ott-jax")
        if any(True for d in importlib.metadata.distributions() if d.metadata["Name"] == name)
    )
    heads = " | ".join(f"({b:,}, {n:,}) k = {k:,}" for b, n, k in SHAPES)
    lines = [
        "# Soft top-k in JAX, on a CPU",
        "",
        "Written by `python khot-jax/benchmarks/peers.py`.",
        "",
        f"processor: {processor()}; threads: 1; time: CPU time; "
        f"kernels: {khot_jax.instruction_set() or 'none'}; {versions}; "
        f"python: {platform.python_version()}; system: {platform.system()} {platform.machine()}",
        "",
        f"| in softmaxes (`jax.nn.softmax`, float32, jit): forward / forward + backward | {heads} |",
        "| --- |" + " ---: |" * len(SHAPES),
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()),
        "",
        f'"not run" would have needed more than {MOST / 1e9:g} GB, or, of ott, minutes.',
        "",
        "| at (128, 1,000), k = 32 | what comes out |",
        "| --- | --- |",
        *(f"| {name} | {told} |" for name, told in faults.items() if told),
    ]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else "unknown"


if __name__ == "__main__":
    main()
