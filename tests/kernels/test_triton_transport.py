"""The Triton kernels of the sorted SOFT top-k, interpreted, with gradients, against float64."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from differences import error
from khot._core.dispatch import OPERATORS
from khot._kernels.reference import transport

INF, NAN = torch.inf, torch.nan
# the interpreter cuts digits off where it stores bfloat16, and a device rounds
ROUNDED = {torch.float64: 1e-12, torch.float32: 2e-7, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def rows(n: int, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Raw scores, ties, all equal, two far groups, −inf, +inf, and rows without an answer: a NaN, too many of
    +inf, too many of −inf."""
    x = torch.randn(9, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x[1] = x[1].round()
    x[2] = 0.25
    x[3, ::2] += 30
    x[4, : (n - k) // 2] = -INF
    x[5, n - (k + 1) // 2 :] = INF
    x[6, -1] = NAN
    x[7, : k + 1] = INF if k < n else NAN
    x[8, : n - k + 1] = -INF
    return x.to(dtype)


def gradients(v: Tensor, x: Tensor, epsilon: Tensor, places: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """By the operations that autograd records."""
    dx, depsilon = OPERATORS["sorted_soft_topk_backward"].kernel(v.double(), x.double(), epsilon, *places)
    return dx, depsilon


def check(
    kernels: ModuleType, x: Tensor, k: int, epsilon: Tensor, of_gradients: float = 1e-10, rounded: float = 0.0
) -> None:
    y, *places = kernels.sorted_soft_topk(x, k, epsilon)
    want, *wanted = transport.sorted_soft_topk(x.double(), k, epsilon)
    assert y.dtype == x.dtype and y.shape == want.shape
    assert error(y, want) <= (rounded or ROUNDED[x.dtype])
    assert torch.equal(places[1].nan_to_num(), wanted[1].nan_to_num())
    good = ~wanted[1].isnan().any(-1)
    largest = x.gather(-1, places[0])
    assert torch.equal(largest[good], x.gather(-1, wanted[0])[good])  # the order of ties is left open
    assert all((row.sort().values.diff() > 0).all() for row in places[0].flatten(0, -2))
    v = torch.randn(y.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64).to(x.dtype)
    dx, depsilon = kernels.sorted_soft_topk_backward(v, x, epsilon, *places)
    want_dx, want_depsilon = gradients(v, x, epsilon, tuple(wanted))
    assert dx.dtype == x.dtype and depsilon.dtype == torch.float64
    assert error(dx, want_dx) <= of_gradients + (ROUNDED[x.dtype] if x.dtype != torch.float64 else 0)
    assert error(depsilon.unsqueeze(-1), want_depsilon.unsqueeze(-1)) <= of_gradients


@pytest.mark.parametrize(
    ("n", "k", "epsilon"),
    [
        (9, 2, 0.5),
        (5, 5, 0.3),
        (7, 6, 3.0),
        (6, 1, 0.02),
        *(pytest.param(*a, marks=pytest.mark.slow) for a in ((40, 5, 0.05), (40, 20, 0.1), (33, 32, 1.0))),
    ],
)
def test_rows_of_every_kind(kernels: ModuleType, n: int, k: int, epsilon: float) -> None:
    """In float64, which a launch before sorts; also of one number on the CPU."""
    check(kernels, rows(n, k), k, torch.tensor(epsilon, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_that_the_program_sorts(kernels: ModuleType, dtype: torch.dtype) -> None:
    """By a number for each row."""
    epsilon = torch.tensor([0.5, 0.3, 2.0, 0.1, 0.7, 0.4, 1.0, 1.0, 1.0], dtype=torch.float64)
    check(kernels, rows(13, 4, dtype), 4, epsilon)


@pytest.mark.parametrize("sorted_entries", [0, 1024])
def test_rows_in_several_chunks(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, sorted_entries: int
) -> None:
    module = sys.modules["khot._kernels.triton.transport"]
    monkeypatch.setattr(module, "HELD", 16)
    monkeypatch.setattr(module, "FEW", 1)
    monkeypatch.setattr(module, "SORTED", sorted_entries)
    x = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).exp()
    x[1, 25:] = x[1, :25]
    check(kernels, x, 3, torch.tensor(0.2, dtype=torch.float64))


@pytest.mark.parametrize("epsilon", [1e-3, 0.03, 50.0])
def test_every_place_is_filled(kernels: ModuleType, epsilon: float) -> None:
    """From almost hard to almost uniform, of raw data with near ties."""
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x[1], x[2] = (2 * x[1]).exp(), (x[2] > 0) + 1e-4 * x[2]
    y, *_ = kernels.sorted_soft_topk(x, 6, torch.tensor(epsilon, dtype=torch.float64))
    assert (y.sum(-1) - 1).abs().max() <= 1e-12
    assert y.sum(-2).max() <= 1 + 1e-12 and y.min() >= 0


@pytest.mark.parametrize("gap", [2.0, 4.0, 30.0, 1e4])
def test_gradients_where_groups_hardly_exchange_anything(kernels: ModuleType, gap: float) -> None:
    """Each group has those of a row of its own."""
    near, epsilon = torch.tensor([[0.3, 0.28, 0.25]], dtype=torch.float64), torch.tensor(0.05).double()
    x, v = torch.cat((near + gap, near), -1), torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(3))
    _, *places = kernels.sorted_soft_topk(x, 5, epsilon)
    dx, _ = kernels.sorted_soft_topk_backward(v.double(), x, epsilon, *places)
    for group, k in ((slice(0, 3), 3), (slice(3, 6), 2)):
        _, *alone = transport.sorted_soft_topk(near, k, epsilon)
        part = v[:, :3, :3] if k == 3 else v[:, 3:, 3:]
        want, _ = gradients(part, near, epsilon, tuple(alone))
        assert error(dx[:, group], want) <= 1e-11 + 2e-16 * gap / 0.05 * 10


def test_gradients_where_the_coupling_leaves_the_range_of_float64(kernels: ModuleType) -> None:
    """Of neighbours it is exp(−gap/ε), whose inverse is infinite before it is 0 itself."""
    gap, epsilon = torch.linspace(640, 745, 16, dtype=torch.float64), torch.tensor(1e-3, dtype=torch.float64)
    x = -gap.unsqueeze(-1) * epsilon * torch.arange(3)
    y, *places = kernels.sorted_soft_topk(x, 2, epsilon)
    v = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    dx, depsilon = kernels.sorted_soft_topk_backward(v, x, epsilon, *places)
    assert dx.isfinite().all() and depsilon.isfinite().all()
    assert dx.abs().max() <= 1e-270 and depsilon.abs().max() <= 1e-266


def test_rows_that_newton_leaves_are_swept(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["khot._kernels.triton.transport"]
    monkeypatch.setattr(module, "STEPS", module.tl.constexpr(0))
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y, *_ = kernels.sorted_soft_topk(x, 2, torch.tensor(5.0, dtype=torch.float64))
    want, *_ = transport.sorted_soft_topk(x, 2, torch.tensor(5.0, dtype=torch.float64))
    assert 0 < error(y, want) <= 1e-9


def test_more_anchors_than_a_program_holds(kernels: ModuleType) -> None:
    x = torch.randn(2, 140, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    epsilon = torch.tensor(0.5, dtype=torch.float64)
    got, want = kernels.sorted_soft_topk(x, 130, epsilon), transport.sorted_soft_topk(x, 130, epsilon)
    assert all(map(torch.equal, got, want))
    pulled = kernels.sorted_soft_topk_backward(got[0], x, epsilon, *got[1:])
    assert all(map(torch.equal, pulled, gradients(got[0], x, epsilon, tuple(got[1:]))))
