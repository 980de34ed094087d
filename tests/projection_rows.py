"""Rows of every kind for the projection onto the permutahedron, and what kernels have to agree with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from types import ModuleType

import torch
from torch import Tensor

from drawn import f64
from drawn import normal as randn
from khot._kernels.reference import permutahedron as reference

__all__ = ["ROUNDED", "ROWS", "check", "f64", "randn", "ranks", "table"]


def ranks(n: int) -> Tensor:
    return torch.arange(n, 0, -1, dtype=torch.float64)


#: Scores and w of n entries.
ROWS: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "normal": lambda n: (randn(n), randn(n, seed=1)),
    "ranks": lambda n: (3 * randn(n), ranks(n)),
    "ties": lambda n: (randn(n).round(), randn(n, seed=1).round()),
    "all equal": lambda n: (torch.full((n,), 0.3).double(), ranks(n)),
    "a cascade": lambda n: (ranks(n), torch.cat((ranks(n)[1:] / 2, f64([-100.0])))),
    "one outlier": lambda n: (torch.cat((f64([1000.0]), randn(n - 1))), ranks(n)),
    "top k": lambda n: (randn(n), (torch.arange(n) < n // 3).double()),
    "ascending w": lambda n: (randn(n), torch.linspace(-1, 1, n).double()),
}
ROUNDED = ("ties", "all equal", "top k")  # where rounding decides whether equal values are pooled


def table(n: int, taus: Iterable[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Every kind of row at every τ."""
    rows = [(*ROWS[kind](n), f64(tau)) for kind, tau in itertools.product(ROWS, taus)]
    z, w, tau = (torch.stack(values) for values in zip(*rows, strict=True))
    return z, w, tau


def check(
    kernels: ModuleType,
    z: Tensor,
    w: Tensor,
    tau: Tensor,
    regularization: str = "l2",
    same: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The projection, its blocks in the rows that are `same` (None: in all), and all gradients; of rows of
    float32 or less to one unit of their last place."""
    got = kernels.permutahedron(z, w, tau, regularization)
    want = reference.permutahedron(z, w, tau, regularization)
    size = 1 + w.abs().nan_to_num(posinf=0).sum().item() if z.dtype == torch.float64 else 0
    torch.testing.assert_close(got[0], want[0], rtol=_sharp(z.dtype), atol=1e-13 * size, equal_nan=True)
    rows = slice(None) if same is None else same
    for a, b in zip(got[1:], want[1:], strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a[rows], b[rows])
    grad = randn(*z.shape, seed=5).to(z.dtype)
    for want_w in (False, True):
        given = (grad, z, w, tau, *want[1:], regularization, want_w)
        found, wanted = kernels.permutahedron_backward(*given), reference.permutahedron_backward(*given)
        for a, b in zip(found, wanted, strict=True):
            sharp, scale = (
                _sharp(b.dtype),
                b.nan_to_num(posinf=0, neginf=0).abs().max().item() if b.numel() else 0,
            )
            torch.testing.assert_close(a, b, rtol=sharp, atol=sharp * scale, equal_nan=True)
    return got


def _sharp(dtype: torch.dtype) -> float:
    return 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
