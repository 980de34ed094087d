"""The sort of many long rows, interpreted, against torch's."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

INF, NAN = torch.inf, torch.nan
# from one chunk and an entry to nine of them: a third that is alone, one entry behind eight
LENGTHS = [17, 48, 81]


@pytest.fixture
def row_sort(kernels: ModuleType) -> ModuleType:
    return sys.modules["khot._kernels.triton.row_sort"]


@pytest.fixture
def small(row_sort: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Chunks of 16 entries, so that rows of few entries have many, and searches of several
    steps; for rows of more entries than that, in batches of any size."""
    small = {"CHUNK": 16, "HELD": 4, "PROBES": 2, "SHORTEST": 17, "LEAST": 0}
    for name, value in small.items():
        monkeypatch.setattr(row_sort, name, value)
    return row_sort


def rows(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal scores, in order and in reverse; ties; all equal; what is not finite or a zero with a sign, in
    places that chunks do not share; the least and the greatest numbers, and NaN alone."""
    g = torch.Generator().manual_seed(n)
    x = torch.randn(9, n, generator=g)
    x[1] = x[0].sort().values
    x[2] = x[0].sort(descending=True).values
    x[3] = (2 * x[3]).round()
    x[4] = -1.5
    x[5, ::3], x[5, 1::5], x[5, 2::7], x[5, 3::11], x[5, 4::13] = INF, -INF, NAN, 0.0, -0.0
    x[6], x[6, ::2] = 0.0, -0.0
    info = torch.finfo(dtype)
    tiny = 1e-40 if dtype == torch.float32 else 1e-6  # where the interpreter stores bfloat16, 1e-40 is 0
    edges = torch.tensor([info.max, info.min, info.smallest_normal, -info.smallest_normal, -NAN, tiny, -INF])
    x[7] = edges[torch.randint(0, 7, (n,), generator=g)]
    x[8] = NAN
    return x.to(dtype)


def check(row_sort: ModuleType, x: Tensor) -> None:
    values, order = torch.sort(x, dim=-1, descending=True, stable=True)
    got, places = row_sort.sort_rows(x)
    assert got.dtype == x.dtype and got.shape == x.shape and places.dtype == torch.int32
    assert torch.equal(places.long(), order)
    torch.testing.assert_close(got, values, rtol=0, atol=0, equal_nan=True)
    alone, _ = row_sort.sort_rows(x, False)
    assert alone.dtype == x.dtype
    torch.testing.assert_close(alone, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", LENGTHS)
def test_rows_of_every_kind_are_sorted_as_torch_does(small: ModuleType, n: int) -> None:
    check(small, rows(n))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_in_half_precision(small: ModuleType, dtype: torch.dtype) -> None:
    check(small, rows(50, dtype))


def test_runs_that_interleave_in_every_way(small: ModuleType) -> None:
    """Of zeros and ones, of which the first chunk has any number and the second one any: searches that end at
    every entry, among ties alone."""
    ones = torch.arange(17)
    first, second = (ones[:, None] > torch.arange(16)).float(), (ones[:, None] > torch.arange(16)).float()
    x = torch.cat((first.repeat_interleave(17, 0), second.repeat(17, 1)), -1)[::13]
    check(small, x)
    check(small, x + torch.arange(32) / 64)


@pytest.mark.parametrize("n", [1_025, 2_048, 4_097])
def test_chunks_as_a_device_has_them(
    kernels: ModuleType, row_sort: ModuleType, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """With the constants that an H100 runs, whose integers are compared as numbers of float64."""
    monkeypatch.setattr(kernels.layout, "compares_doubles", lambda _: True)
    check(row_sort, rows(n)[[3, 5, 7] if n < 2_000 else [3, 5]])


def test_what_torch_sorts(row_sort: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of float64, of whole numbers, of too few or too many entries, and small batches."""

    def refuse(*_: object) -> None:
        raise AssertionError

    x = torch.empty(64, 4_097)
    assert row_sort.serves(x) and row_sort.serves(x.half()) and row_sort.serves(torch.empty(4, 65_536))
    others = (
        x.double(), x.int(), x[:63], torch.empty(65, 4_096), torch.empty(4, 65_537), torch.empty(0, 2_048),
        torch.empty(4_096, 0),
    )  # fmt: skip
    monkeypatch.setattr(row_sort, "sort_rows", refuse)
    for each in others:
        assert not row_sort.serves(each)
        values, order = torch.sort(each, dim=-1, descending=True, stable=True)
        got, places = row_sort.descending(each.mT.contiguous().mT)
        assert torch.equal(places, order)
        torch.testing.assert_close(got, values, rtol=0, atol=0, equal_nan=True)


def test_what_follows_a_sort_takes_it_as_torchs(
    kernels: ModuleType, small: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks, sorts, places, losses, a budget and projections, bit by bit."""
    changes = {
        "ranks": {"RANKED": 16, "SHORT": 16, "CHUNK": 16}, "ranking_losses": {"SORTED": 16},
        "greedy": {"RANKED": 16}, "short_projection": {"LONGEST": 16, "LONGEST_POWERS": 16},
        "long_projection": {"CHUNK": 16},
    }  # fmt: skip
    for module, values in changes.items():
        for name, value in values.items():
            monkeypatch.setattr(sys.modules[f"khot._kernels.triton.{module}"], name, value)
    g = torch.Generator().manual_seed(0)
    x, cost = torch.randn(3, 40, generator=g), torch.rand(3, 40, generator=g)
    x[0, ::4], x[2, ::3] = x[0, 0], -INF
    tau, budget = torch.tensor(0.7, dtype=torch.float64), torch.full((3,), 4.0, dtype=torch.float64)
    grad, weights = torch.randn(3, 40, generator=g), torch.arange(40.0)

    def results() -> list[Tensor]:
        rank, order, place = kernels.laplace_count(x, None, tau)
        _, t, t_order, t_place = kernels.laplace_thresholds(x, None, tau)
        finite = x.nan_to_num(neginf=-30)
        return [
            rank, order, *kernels.laplace_count_backward(grad, x, order, None, place, tau, True),
            t, t_order, t_place,
            *kernels.laplace_thresholds_backward(grad, x, t_order, None, t_place, tau, False)[:1],
            *kernels.laplace_centred_rank(x, tau), kernels.centred_places(cost.bfloat16(), x),
            *kernels.ndcg_loss(rank, cost, x, None, None), kernels.budget_mask(x, cost, budget),
            *kernels.ndcg_loss(rank, (9 * cost).long(), x, None, None),
            *kernels.permutahedron(finite, weights, tau, "l2"),
            *kernels.permutahedron(finite, weights, tau, "kl"),
        ]  # fmt: skip

    sorted_here, calls = results(), []
    monkeypatch.setattr(small, "serves", lambda x: bool(calls.append(x.shape)))
    by_torch = results()
    assert len(calls) > 8
    for got, want in zip(sorted_here, by_torch, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
