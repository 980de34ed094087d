"""The row program with a problem that no operator has: :func:`khot._kernels.triton.rows.solve` is to know
nothing of those that there are."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")
arguments = pytest.importorskip("khot._kernels.triton.arguments")
layout = pytest.importorskip("khot._kernels.triton.layout")
rows = pytest.importorskip("khot._kernels.triton.rows")
tl = triton.language

# Of scores x with weights w the t at which Σ(x − t)/w² is k, and what each entry brings to that sum. Rows
# with a weight of 0 are left to float64, which here writes t = 0 and NaN.


@triton.jit
def _sums(x_at, w_at, there, n, T: tl.constexpr):
    column = tl.arange(0, T.width)
    total, mass = there.to(tl.float32) * 0, there.to(tl.float32) * 0
    for start in range(0, n, T.width):
        valid = rows.inside(there, column + start, n, T.together, False)
        x = tl.load(x_at + start, mask=valid, other=0.0).to(tl.float32)
        w = tl.load(w_at + start, mask=valid, other=float("inf")).to(tl.float32)
        total += tl.sum(x / (w * w), axis=0 if T.together == 1 else 1)
        mass += tl.sum(1 / (w * w), axis=0 if T.together == 1 else 1)
    return total, mass


@triton.jit
def _find(
    x, other, k, tau, row, there, n, evaluations, digits, exponent, L: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    at, w_at = rows.at_of(x, row, T), rows.at_of(other, row, T)
    total, mass = _sums(at, w_at, there, n, T)
    own_k, _ = rows.numbers(*k, row, there)
    t = (total - own_k) / mass
    return t.to(tl.float64), (t * 0).to(tl.float64), there & (mass < float("inf")), (at, w_at, t)


@triton.jit
def _write(out_pointer, row, ok, n, found, L: tl.constexpr, T: tl.constexpr):
    at, w_at, t = found
    column = tl.arange(0, T.width)
    to = out_pointer + rows.entries(row, n, column, T.together)
    for start in range(0, n, T.width):
        valid = rows.inside(ok, column + start, n, T.together, False)
        x, w = tl.load(at + start, mask=valid, other=0.0), tl.load(w_at + start, mask=valid, other=1.0)
        y = (x.to(tl.float32) - rows.wide(t, T.together)) / (w * w)
        tl.store(to + start, y.to(out_pointer.dtype.element_ty), mask=valid)


@triton.jit
def _exactly(row, x, other, k, tau, found, n, digits, power, L: tl.constexpr, T: tl.constexpr):
    tl.store(found.hi + row, 0.0)
    tl.store(found.lo + row, 0.0)
    for i in range(n):
        tl.store(found.out + row * n + i, float("nan"))


def solved(x: Tensor, w: Tensor, k: Tensor, tile: object) -> tuple[Tensor, Tensor, Tensor]:
    n, count = x.shape[-1], len(x)
    problem = arguments.Problem(_find, _write, _exactly)
    start, programs = rows.solver(problem, None, tile, count, n)
    found = arguments.Found(
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty(count, dtype=torch.float64), torch.empty(count, dtype=torch.float64),
    )  # fmt: skip
    given = layout.values(k, x.shape[:-1], x.device)
    start(programs, layout.rows(x, n), layout.rows(w, n), given, given, found, count, n, 0, None, (1.0, 0.0))
    return found


TILES = [(1, 3, 16, 1), (4, 3, 16, 1), (8, 1, 64, 1), (1, 2, 8, 1, True)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("seed", range(3))
def test_a_problem_of_ones_own(kernels: ModuleType, tile: tuple[int, ...], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 12, (), generator=g))
    n = int(torch.randint(2, 48, (), generator=g))
    x, w = torch.randn(count, n, generator=g), torch.rand(count, n, generator=g) + 0.5
    if seed == 1:  # rows that are not next to each other
        x, w = x.repeat(1, 2)[:, :n], w.repeat(1, 2)[:, :n]
    k = torch.randn(count if seed else (), generator=g, dtype=torch.float64)
    bad = torch.rand(count, generator=g) < 0.3
    w[bad, 0] = 0
    y, hi, lo = solved(x, w, k, layout.Tile(*tile))
    weight = w.double() ** -2
    t = ((x * weight).sum(-1) - k) / weight.sum(-1)
    torch.testing.assert_close(hi + lo, t.where(~bad, 0.0), rtol=1e-5, atol=1e-5)
    want = ((x - t[:, None]) * weight).float().where(~bad[:, None], torch.nan)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_rows_of_float64_are_left_to_the_search_in_float64(kernels: ModuleType) -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    y, hi, _ = solved(x, x, torch.ones((), dtype=torch.float64), layout.Tile(1, 1, 16, 1))
    assert bool(y.isnan().all()) and hi.tolist() == [0.0] * 3
