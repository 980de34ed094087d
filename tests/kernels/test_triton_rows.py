"""The Triton kernels except those of the soft top-k, interpreted, against the reference.

The operators' table runs on them too, with KHOT_KERNELS=triton: tests/test_operators.py.
"""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch
from torch import Tensor

from differences import error
from khot._kernels.reference import laplace as scans
from khot._kernels.reference import magnitude

ACCURACY = {torch.float64: 1e-12, torch.float32: 5e-7}


def rows(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ties, signed zeros, equal, infinite and NaN entries, too many infinite ones; k at its ends and
    above."""
    x = 2 * torch.randn(11, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x[1] = x[1].round()
    x[2, -1] = torch.nan
    x[3, :2] = torch.inf
    x[4, ::2] = -torch.inf
    x[5], x[5, ::2] = 0.0, -0.0
    x[6, :3] = torch.inf
    x[7] = 1.5
    half, few = max(n // 2, 1), min(n, 3)
    k = [few, half, half, min(n, 2), n // 2, half, 1, half, 0, n, n + 1]
    return x.to(dtype), torch.tensor(k, dtype=torch.float64)


@pytest.fixture(autouse=True)
def small(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs, because the interpreter also spends time on the rows of a program that do not exist."""
    monkeypatch.setattr(kernels.layout, "TOGETHER", 64)


@pytest.mark.parametrize(
    ("where", "n", "tau", "dtype", "p"),
    [
        ("kernels", 33, 0.3, torch.float64, 4 / 3),
        ("kernels", 20, 30.0, torch.float32, 2.0),
        ("split", 33, 0.3, torch.float32, 4 / 3),
        ("split", 33, 0.3, torch.float64, 2.0),
        ("kernels", 1, 0.7, torch.float32, 1.15),
        *(
            pytest.param(where, *size, dtype, p, marks=pytest.mark.slow)
            for where, size, dtype, p in itertools.product(
                ("kernels", "split"), ((33, 0.01), (20, 30.0), (9, 1e5)), ACCURACY, (1.15, 4 / 3, 2.0)
            )
        ),
    ],
    ids=str,
)
def test_digits_of_sizes(
    request: pytest.FixtureRequest, where: str, n: int, tau: float, dtype: torch.dtype, p: float
) -> None:
    """With infinite entries, and k at its ends and above."""
    kernels = request.getfixturevalue(where)
    x, k = rows(n, dtype)
    s, scale = x.abs(), torch.tensor(tau, dtype=torch.float64)
    s[4, ::2] = -torch.inf  # may not be selected
    got = kernels.soft_topk_magnitude(s, k, scale, p, False)
    y, hi, lo = magnitude.soft_topk_magnitude(s.double(), k, scale, p, False)
    assert error(got[0], y) <= ACCURACY[dtype]
    assert torch.equal(got[1].isnan(), hi.isnan())
    gamma, found_gamma = hi + lo, got[1] + got[2]
    near = gamma.isfinite() & (gamma != 0)
    assert error((found_gamma / gamma)[near], torch.ones_like(gamma)[near]) <= 10 * ACCURACY[dtype]
    generator = torch.Generator().manual_seed(0)
    v, v_lo = torch.randn(s.shape, generator=generator), torch.randn(11, generator=generator).double()
    rest = (k, hi, lo, scale, p, False)
    want = magnitude.soft_topk_magnitude_backward(v.double(), v_lo, s.double(), y, *rest)
    found = kernels.soft_topk_magnitude_backward(v.to(dtype), v_lo, s, y.to(dtype), *rest)
    for a, b in zip(found, want, strict=True):
        # the slope of w^(q−1) has up to seven times its rounding error
        size = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0
        assert error(a / (1 + size), b / (1 + size)) <= 20 * ACCURACY[dtype]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [1, 13, 50])
def test_decay_scan(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, n: int, reverse: bool) -> None:
    monkeypatch.setattr(kernels.layout, "CHUNK", 16)
    monkeypatch.setattr(kernels.layout, "PROGRAMS", 9)
    generator = torch.Generator().manual_seed(n)
    w = torch.randn(4, n, generator=generator, dtype=torch.float64)
    g = torch.rand(4, n, generator=generator, dtype=torch.float64)
    g[1], g[2, n // 2] = 0.0, 1000.0
    g[:, 0] = torch.nan  # is not read
    assert error(kernels.decay_scan(w, g, reverse), scans.decay_scan(w, g.nan_to_num(), reverse)) <= 1e-14
    one = torch.ones(n, dtype=torch.float64)
    assert error(kernels.decay_scan(one, g, reverse), scans.decay_scan(one, g.nan_to_num(), reverse)) <= 1e-14
