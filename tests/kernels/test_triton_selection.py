"""The Triton kernels of hard masks and order statistics, interpreted, against sorts, on hard rows."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import triton.language as tl
from torch import Tensor

from khot._kernels.reference import order_statistics, quantiles, topk_mask
from noted import Launches
from selection_rows import rows

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def hard(n: int, dtype: torch.dtype) -> Tensor:
    """Those, and numbers of many magnitudes."""
    x = rows(n)
    x[9] = torch.exp(8 * torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64))
    return x.to(dtype)


def check(kernels: ModuleType, x: Tensor, k: Tensor) -> None:
    got, want = kernels.topk_mask(x, k), topk_mask.topk_mask(x, k)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    places = torch.stack((k, x.shape[-1] - k), -1)
    value, correct = kernels.order_statistics(x, places), order_statistics.order_statistics(x, places)
    torch.testing.assert_close(value, correct, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def long(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Rows of more than 128 entries are long, and a sample is an eighth of them."""
    for name, value in {"RESIDENT": 128, "CHUNK": 256, "SAMPLE_BLOCK": 4}.items():
        monkeypatch.setattr(kernels.layout, name, value)
    for name, value in {"HELD": 8, "LANES": 16}.items():
        monkeypatch.setattr(kernels.levels, name, value)
    monkeypatch.setattr(kernels.levels, "sample", lambda n: 64)
    return kernels


@every_dtype
def test_rows_of_one_program(kernels: ModuleType, dtype: torch.dtype) -> None:
    x = hard(150, dtype)
    check(kernels, x, torch.arange(12.0) * 12)
    check(kernels, x[::2], torch.arange(12.0, 6.0, -1.0))


@every_dtype
@pytest.mark.parametrize("n", [3, 21, 100])
def test_short_rows_are_sorted_or_searched(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, n: int, dtype: torch.dtype
) -> None:
    x, k = hard(n, dtype), torch.linspace(0, n, 12).round()
    for entries in (128, 0):
        monkeypatch.setattr(sys.modules["khot._kernels.triton.selection"], "SORTED", entries)
        for each in (k, k.flip(0), torch.full((12,), n // 2)):
            check(kernels, x, each)
            check(kernels, x[:, :-1].mT.contiguous().mT, each.clamp(max=n - 1))


@every_dtype
@pytest.mark.parametrize("entries", [128, 0])
def test_neighbours_by_one_search(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, entries: int, dtype: torch.dtype
) -> None:
    """Ties, infinities and NaN included; the last entry has none after it."""
    monkeypatch.setattr(sys.modules["khot._kernels.triton.selection"], "SORTED", entries)
    x, weight = hard(70, dtype), torch.tensor(0.3, dtype=torch.float64)
    for first in (1, 2, 35, 36, 69, 70):
        k = torch.arange(first, first + 2, dtype=torch.float64).expand(12, 2)
        for got, want in zip(kernels.quantiles(x, k, weight), quantiles.quantiles(x, k, weight), strict=True):
            rounding = 0 if dtype == torch.float32 else 2**-7  # the interpreter cuts digits off
            torch.testing.assert_close(got, want, rtol=rounding, atol=0, equal_nan=True)


@every_dtype
def test_long_rows(long: ModuleType, dtype: torch.dtype) -> None:
    x = hard(515, dtype)
    check(long, x, torch.arange(12.0) * 46 + 1)
    few, k = x[:8:3, :-1].mT.contiguous().mT, torch.tensor(3.0)
    assert torch.equal(long.topk_mask(few, k), topk_mask.topk_mask(few, k))


def test_few_of_long_rows(long: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x = hard(515, torch.float32)
    x[10, :4], x[11, :3], x[7, 3:] = torch.inf, torch.inf, -torch.inf
    monkeypatch.delattr(long.largest, "levels")  # so that the groups find them
    for k in (torch.tensor(3.0), torch.tensor(4.0)):
        got, want = long.topk_mask(x, k), topk_mask.topk_mask(x, k)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        got, want = long.order_statistics(x, k.view(1)), order_statistics.order_statistics(x, k.expand(12, 1))
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_sample_that_is_wrong(long: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few ranks to either side, or more entries between them than there is room for: the row decides."""
    x, k = hard(515, torch.float32)[[0, 1, 3, 5, 9]], torch.arange(5.0) * 110 + 1
    monkeypatch.setattr(long.levels, "_room", lambda n, size, k: 16)
    check(long, x, k)
    monkeypatch.setattr(long.levels, "_MARGIN", tl.constexpr(0.0))
    check(long, x, k)


def test_there_is_room_for_what_a_sample_leaves(long: ModuleType) -> None:
    """The number of entries between two ranks of a sample has room, but once in 10⁸."""
    generator = torch.Generator().manual_seed(0)
    for k in (1, 1_000, 50_000, 99_990):
        size, n = 4_096, 100_000
        room = long.levels._room(n, size, long.layout.Values(None, 0, float(k), 0.0))
        assert room <= long.levels._room(n, size, long.layout.Values(torch.empty(0), 1, 0.0, 0.0)) < n // 8
        share = k / n
        margin = 5 * (size * share * (1 - share)) ** 0.5 + 5
        ranks = int(min(size, size * share + margin + 1)) - max(0, int(size * share - margin))
        spacings = torch.empty(50, size + 1, dtype=torch.float64).exponential_(generator=generator)
        taken = n * spacings[:, :ranks].sum(-1) / spacings.sum(-1)
        assert taken.max() < room


def test_long_lists_are_narrowed(long: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a sample of their own, and what is found is the same, ties at the lowest places too."""
    monkeypatch.setattr(long.levels, "NARROW", 0)
    monkeypatch.setattr(long.levels, "sample", lambda n: 256)
    launches: list[str] = []
    monkeypatch.setattr(long.launch, "watch", launches.append)
    n = 900
    x = hard(n, torch.float32)
    check(long, x, torch.linspace(0, n, 12).floor())
    assert launches.count("_bracket") == launches.count("_gather") == 2 * launches.count("_finish")


def test_a_narrowed_list_is_shorter(long: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long.levels, "NARROW", 0)
    monkeypatch.setattr(long.levels, "sample", lambda n: 256)
    noted = Launches(long.levels, ("_finish",), monkeypatch)
    x = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0))
    got = long.order_statistics(x, torch.tensor([1500, 1501]))
    given = noted.given["_finish"]
    (above, found), (over, fewer) = (
        given[name][0, 4:6].tolist() for name in ("level_pointer", "narrow_pointer")
    )
    assert above + over < 1500 <= above + over + fewer and 2 * fewer < found
    assert torch.equal(got, x.sort(descending=True).values[:, 1499:1501])
