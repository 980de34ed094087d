"""Rows that a program holds two entries to a register, interpreted: against the reference, and the same rows
held otherwise."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import oracles
from agreement import error_in_tau
from drawn import f64
from khot._kernels.reference import soft_topk as reference

CDFS: dict[str, float] = {"logistic": 0.0, "laplace": 0.0, "uniform": 2.0, "power": 4 / 3}
HALVES = [torch.bfloat16, torch.float16]
every_cdf = pytest.mark.parametrize("cdf", CDFS)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
LEAST = 33  # entries that do not stay on chip one to a register


@pytest.fixture
def words(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels with rows of 33 to 64 entries two to a register, 16 at a time, and the list of which rows
    were. Rows that are not stream past, 16 entries at a time."""
    layout = kernels.layout
    monkeypatch.setattr(layout, "RESIDENT", LEAST - 1)
    monkeypatch.setattr(
        layout, "word_tile", lambda n: layout.Tile(1, 2 * layout.cdiv(n, 16), 8, 1, in_words=True)
    )
    monkeypatch.setattr(layout, "tile", lambda rows, n: layout.Tile(1, 2, 8, 1, True))
    return kernels


@pytest.fixture
def ways(words: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of each launch, whether a row is held two entries to a register."""
    found: list[bool] = []
    solver = words.counted.solver

    def watched(problem: Any, law: Any, tile: Any, *size: int) -> object:
        made, programs = solver(problem, law, tile, *size)

        def start(*arguments: object) -> None:
            found.append(tile.in_words)
            made(*arguments)

        return start, programs

    words.counted._variant.cache_clear()
    monkeypatch.setattr(words.counted, "solver", watched)
    yield found
    words.counted._variant.cache_clear()


def adversarial(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of the list and rows with infinities, no finite entry, a NaN at either half of a register; with k
    at its ends, whole and fractional."""
    rows, ks = [], []
    for i, scores in enumerate(oracles.ADVERSARIAL.values()):
        x = scores(n, torch.Generator().manual_seed(n)).to(dtype)
        selectable = int((x > -torch.inf).sum())
        some = [0.0, *oracles.adversarial_ks(selectable), float(selectable)]
        rows.append(x)
        ks.append(min(max(some[(5 * i) % len(some)], 0.0), selectable))
    hard = 2 * torch.randn(8, n, generator=torch.Generator().manual_seed(1)).to(dtype)
    hard[0, 4], hard[1, 7], hard[2, ::2], hard[3, 1::2] = torch.nan, torch.nan, -torch.inf, -torch.inf
    hard[4, :3], hard[5], hard[6, 0], hard[7, -1] = torch.inf, -torch.inf, -torch.inf, torch.inf
    return torch.stack([*rows, *hard]), f64([*ks, 3.0, 3.0, 5.5, 5.5, 2.5, 0.0, 7.0, 7.25])


def alike(got: Tensor, want: Tensor, ulps: float, least: float = 0.0) -> None:
    """Within so many roundings of the dtype that got has, or within the least."""
    rtol = ulps * torch.finfo(got.dtype).eps
    want = want.to(got.dtype).double()
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=least, equal_nan=True)


@pytest.mark.parametrize(
    ("cdf", "n", "output", "dtype"),
    [
        ("logistic", 64, "y", torch.bfloat16),
        ("uniform", 34, "y", torch.float16),
        ("power", 46, "log", torch.float16),
        ("laplace", 46, "threshold", torch.bfloat16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(
                CDFS, (34, 64), ("y", "log", "threshold"), (torch.float16, torch.bfloat16)
            )
        ),
    ],
    ids=str,
)
def test_adversarial_rows(
    words: ModuleType, ways: list[bool], monkeypatch: pytest.MonkeyPatch,
    cdf: str, n: int, output: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    x, k = adversarial(n, dtype)
    tau = f64(0.5) if n != 34 else torch.linspace(0.01, 3, len(x), dtype=torch.float64)
    args = (k, tau, cdf, CDFS[cdf], output)
    y, *t = words.soft_topk(x, *args)
    want, *wanted = reference.soft_topk(x.double(), *args)
    assert ways == [True]
    if output == "threshold":
        size = x.masked_fill(~x.isfinite(), 0).abs().amax(-1).double()
        assert (error_in_tau(t, wanted, 0.5) <= 1e-12 + size / 0.5 * 2**-52).all()
        return
    # the interpreter cuts numbers off when it rounds them to bfloat16
    least = 1e-6 if dtype == torch.bfloat16 else 2**-24
    alike(y, want, 1, least if output == "y" else 1e-5)
    monkeypatch.setattr(words.layout, "RESIDENT", LEAST // 2 - 1)  # too long even for two to a register
    past, *past_t = words.soft_topk(x, *args)
    assert ways == [True, False]
    alike(y, past, 1, least)
    for a, b in zip(t, past_t, strict=True):
        assert torch.equal(a.isnan(), b.isnan())


@every_half
def test_gaps(words: ModuleType, ways: list[bool], dtype: torch.dtype) -> None:
    """Such a row is read again from memory where its threshold lies in a gap."""
    for cdf, where in itertools.product(CDFS, (0, 1)):
        x = torch.randn(2, 50, generator=torch.Generator().manual_seed(6)).to(dtype)
        x[0, where::10] += 50
        x[1, where + 7 :: 25] += 40
        args = (f64([5.0, 2.0]), f64(0.01), cdf, CDFS[cdf], "y")
        y, *t = words.soft_topk(x, *args)
        _, *want = reference.soft_topk(x.double(), *args)
        assert torch.equal(y, (x > 20).to(dtype))
        torch.testing.assert_close(sum(t), sum(want), rtol=0, atol=1e-5)
    assert all(ways)


@every_half
def test_rows_that_do_not_come_in_pairs(words: ModuleType, ways: list[bool], dtype: torch.dtype) -> None:
    """Odd lengths and strides, and entries that begin in the middle of a word, are not read as words."""
    memory = torch.randn(600, generator=torch.Generator().manual_seed(2)).to(dtype)
    cases = [
        (memory[:200].view(4, 50), True),
        (memory[2:202].view(4, 50), True),
        (memory.as_strided((4, 50), (54, 1)), True),
        (memory.as_strided((4, 50), (0, 1)), True),
        (memory.as_strided((4, 50), (50, 1), 1), False),
        (memory.as_strided((4, 50), (53, 1)), False),
        (memory[:196].view(4, 49), False),
        (memory[:128].view(4, 32), False),
        (memory[:264].view(4, 66), False),
        (memory[:200].view(4, 50).float(), False),
    ]
    args = (f64([3.0, 20.5, 30.0, 0.0]), f64(0.5), "logistic", 0.0, "y")
    for x, way in cases:
        y, *_ = words.soft_topk(x, *args)
        want, *_ = reference.soft_topk(x.double(), *args)
        assert ways.pop() is way
        alike(y, want, 1, 1e-6)
    words.soft_topk(cases[0][0], *args[:2], "normal", *args[3:])
    assert ways == [False]


@pytest.mark.parametrize("n", [34, 46, 64])
def test_padding_costs_no_second_look(words: ModuleType, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """The moments of a finite row are right at once: they are taken again where an entry is not finite."""

    def again(*_: object) -> None:
        raise AssertionError("the moments were taken again")

    monkeypatch.setattr(importlib.import_module("khot._kernels.triton.threshold"), "moment_terms", again)
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(3)).bfloat16()
    args = (f64(5.5), f64(0.5), "logistic", 0.0, "y")
    y, *_ = words.soft_topk(x, *args)
    want, *_ = reference.soft_topk(x.double(), *args)
    alike(y, want, 1, 1e-6)
    x[1, 3] = -torch.inf
    with pytest.raises(Exception, match="taken again"):
        words.soft_topk(x, *args)


@every_half
def test_a_row_of_ordinary_size(kernels: ModuleType, dtype: torch.dtype) -> None:
    """In the tile that it has on a device."""
    x = torch.randn(1, 40_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert kernels.layout.fits_words(x, 40_000, 40_000) and not kernels.layout.fits_words(
        x.float(), 40_000, 40_000
    )
    args = (f64(1000.5), f64(0.5), "logistic", 0.0, "y")
    y, hi, lo = kernels.soft_topk(x, *args)
    want, *t = reference.soft_topk(x.double(), *args)
    alike(y, want, 1, 1e-6)
    assert ((hi + lo) - sum(t)).abs().item() <= 1e-6
