"""Ranks and sorting by projection beside torchsort and fast-soft-sort: `python -m benchmarks.permutahedron`.

khot.soft_rank and khot.soft_sort with method="projection", torchsort.soft_rank and soft_sort on the same
float32 rows, and fast-soft-sort's NumPy classes with Numba, which take one float64 row at a time. The scores
are normal. For each operator, the first τ makes a row one block or few, and the second one blocks of a few
entries.

Errors are those of the first row, relative to the largest entry: of the values and of the gradient that
belongs to a fixed normal one, against pooling in 80-bit floats. Times are ratios to khot's in the same run,
forward and forward + backward: all calls interleaved, medians.

torchsort is on the package index; of fast-soft-sort, which is not, a checkout has to be on PYTHONPATH (with
`np.int`, which NumPy has removed, replaced by `int`). A peer that cannot be imported has no columns. The
temperature of fast-soft-sort's soft_sort only adds to the ranks. For "l2" the scores are multiplied by τ and
the result is divided by it, which is the same; for "kl" it takes no part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import khot
from benchmarks import report, timing

try:
    import torchsort
except ImportError:
    torchsort = None
try:
    from fast_soft_sort import numpy_ops
except ImportError:
    numpy_ops = None

SHAPES = [(100, 1_000), (16, 100_000)]
NAMES = ("soft_rank", "soft_sort")
CLASSES = {"soft_rank": "SoftRank", "soft_sort": "SoftSort"}
TEMPERATURES: dict[str, Callable[[int], tuple[float, float]]] = {
    "soft_rank": lambda n: (1.0, 2 / n),
    "soft_sort": lambda n: (10.0 * n, n / 2),
}
Operator = Callable[[Tensor], Tensor]
Long = np.longdouble


class Rows:
    """An operator of fast-soft-sort on each row of an array, and its gradient."""

    def __init__(self, name: str, regularization: str, tau: float) -> None:
        self.scale, strength = (1.0, tau) if name == "soft_rank" else (tau, 1.0)
        kind = getattr(numpy_ops, CLASSES[name])
        self.make = partial(kind, regularization_strength=strength, regularization=regularization)

    def forward(self, x: np.ndarray) -> np.ndarray:
        return np.stack([self.make(self.scale * row).compute() for row in x]) / self.scale

    def both(self, x: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        operators = [self.make(self.scale * row) for row in x]
        values = [operator.compute() / self.scale for operator in operators]
        grads = [operator.vjp(one) for operator, one in zip(operators, v, strict=True)]
        return np.stack(values), np.stack(grads)


def truth(name: str, regularization: str, tau: float, x: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """The value and the gradient at a row, by pooling one entry after the other in 80-bit floats."""
    x, v, n, kl = x.astype(Long), v.astype(Long), len(x), regularization == "kl"
    ranks = np.arange(n, 0, -1).astype(Long)
    sign = 1 if name == "soft_rank" else -1
    order = np.argsort(-sign * x, kind="stable")
    scores = sign * x[order]
    u, w = (scores / tau, np.log(ranks) if kl else ranks) if name == "soft_rank" else (ranks / tau, scores)
    blocks: list[
        tuple[int, Any, Any]
    ] = []  # the first place, and the sums of u and w or of their exponentials
    for i in range(n):
        first, a, b = (i, u[i], w[i])
        while blocks:
            p, c, d = blocks[-1]
            before, now = (c - d, a - b) if kl else ((c - d) / (first - p), (a - b) / (i + 1 - first))
            if before > now:
                break
            blocks.pop()
            first, a, b = (p, np.logaddexp(c, a), np.logaddexp(d, b)) if kl else (p, a + c, b + d)
        blocks.append((first, a, b))
    y, grad = np.empty(n, Long), np.empty(n, Long)
    stops = [p for p, _, _ in blocks[1:]] + [n]
    v = v[order] if name == "soft_rank" else v
    for (p, a, b), stop in zip(blocks, stops, strict=True):
        here = slice(p, stop)
        y[here] = u[here] - (a - b if kl else (a - b) / (stop - p))
        if name == "soft_rank":
            y[here] = np.exp(y[here]) if kl else y[here]
            g = v[here] * (y[here] if kl else 1)
            share = np.exp(u[here] - a) if kl else 1 / Long(stop - p)
            grad[here] = (g - share * g.sum()) / tau
        else:
            grad[here] = v[here].sum() * (np.exp(w[here] - b) if kl else 1 / Long(stop - p))
    out = np.empty(n, Long)
    out[order] = grad
    if name == "soft_sort":
        return [sign * y, out]
    placed = np.empty(n, Long)
    placed[order] = y
    return [placed, out]


def error(got: tuple[Any, Any], want: list[np.ndarray]) -> str:
    """Of the first row: the largest error of values and gradient, relative to the largest entry."""
    errors = [
        float(np.abs(np.asarray(a[0]).astype(Long) - b).max() / np.abs(b).max())
        for a, b in zip(got, want, strict=True)
    ]
    return " / ".join(f"{e:.0e}" for e in errors)


def value_and_gradient(operator: Operator, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = operator(leaf)
    (grad,) = torch.autograd.grad(y, leaf, v)
    return y.detach(), grad


def measure(
    shape: tuple[int, int], name: str, regularization: str, tau: float, seconds: float, clock: timing.Clock
) -> list[str]:
    x, v = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    x64, v64 = x.double().numpy(), v.double().numpy()
    want = truth(name, regularization, tau, x64[0], v64[0])
    operators = {
        "khot": partial(getattr(khot, name), method="projection", regularization=regularization, tau=tau)
    }
    if torchsort is not None:
        operators["torchsort"] = partial(
            getattr(torchsort, name), regularization=regularization, regularization_strength=tau
        )
    errors = [
        error(value_and_gradient(operator, x.to(dtype), v.to(dtype)), want)
        for dtype in (torch.float32, torch.float64)
        for operator in operators.values()
    ]
    forward: dict[str, Callable[[], Any]] = {who: partial(f, x) for who, f in operators.items()}
    whole: dict[str, Callable[[], Any]] = {
        who: partial(value_and_gradient, f, x, v) for who, f in operators.items()
    }
    if numpy_ops is not None:
        if name == "soft_rank" or regularization == "l2":
            rows = Rows(name, regularization, tau)
            errors.append(error(rows.both(x64, v64), want))
            forward["fast-soft-sort"] = partial(rows.forward, x64)
            whole["fast-soft-sort"] = partial(rows.both, x64, v64)
        else:
            errors.append("")
    one, both = (timing.medians(calls, seconds=seconds, clock=clock) for calls in (forward, whole))
    ratios = [
        " / ".join(report.ratio(t[who] / t["khot"]) for t in (one, both)) if who in one else ""
        for who in peers()
    ]
    times = f"{1e3 * one['khot']:.2f} / {1e3 * both['khot']:.2f}"
    return [f"{shape}", f"{name}, {regularization}", f"{tau:g}", times, *ratios, *errors]


def peers() -> list[str]:
    found = (("torchsort", torchsort), ("fast-soft-sort", numpy_ops))
    return [name for name, module in found if module is not None]


def main() -> None:
    seconds, clock = report.begin("ranks and sorting by projection beside torchsort, on the CPU")
    header = ["rows, n", "operator", "τ", "khot, ms", *(f"{name} : khot" for name in peers())]
    compared = ["khot", *(name for name in peers() if name == "torchsort")]
    header += [f"error, {bits}: {name}" for bits in ("float32", "float64") for name in compared]
    header += ["error, float64: fast-soft-sort"] * ("fast-soft-sort" in peers())
    rows = [
        measure(shape, name, regularization, tau, seconds, clock)
        for shape in SHAPES
        for name in NAMES
        for regularization in ("l2", "kl")
        for tau in TEMPERATURES[name](shape[1])
    ]
    print("times: forward / forward + backward; errors: of values / of gradients, relative\n")
    print(report.table(header, rows))


if __name__ == "__main__":
    main()
