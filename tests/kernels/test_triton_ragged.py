"""Packed rows, interpreted: each row as the reference has it alone."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from differences import far
from drawn import f64
from khot._kernels.reference import soft_topk as reference

CDFS: dict[str, float] = {"logistic": 0.0, "laplace": 0.0, "normal": 0.0, "uniform": 2.0, "power": 4 / 3}
#: With empty rows, rows of all pieces, and rows that stream past a program. Two windows of rows.
LENGTHS = [0, 5, 1, 5, 0, 9, 3, 3, 40, 1, 300, 17, 2, 64, 65, 128, 129, *range(1, 50), 0]
HUGE = torch.finfo(torch.float64).max


def packed(lengths: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, offsets, k and τ: of every fourth row none is selected, of another one all."""
    g = torch.Generator().manual_seed(len(lengths))
    offsets = pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0))
    k = [(0.0, n, min(n, 2.5), n / 2)[i % 4] for i, n in enumerate(lengths)]
    tau = 0.3 + torch.rand(len(lengths), dtype=torch.float64, generator=g)
    return torch.randn(int(offsets[-1]), generator=g).to(dtype), offsets, f64(k), tau


def each_row(x: Tensor, offsets: Tensor, k: Tensor, tau: Tensor, grad: Tensor, *which: Any) -> list[Tensor]:
    """Result, gradients of x, k and τ, and t, of the reference in float64."""
    found = []
    for i, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        row, v = x[begin:end].double(), grad[begin:end].double()
        out, hi, lo = reference.soft_topk(row, k[i], tau[i], *which)
        pulled = reference.soft_topk_backward(v, f64(0.0), row, hi, lo, tau[i], *which)
        found.append((out, *pulled, hi))
    return [torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*found, strict=True)]


def of_kernels(
    kernels: ModuleType, x: Tensor, offsets: Tensor, k: Tensor, tau: Tensor, grad: Tensor, *which: Any
) -> list[Tensor]:
    out, hi, lo = kernels.packed_soft_topk(x, offsets, k, tau, *which)
    given = grad, x, offsets, hi, lo, tau
    return [out, *kernels.packed_soft_topk_backward(*given, *which, None), hi]


def error(got: Tensor, want: Tensor) -> float:
    """Relative to 1 and more, where the result is finite; where not, both are the same."""
    finite = want.isfinite() & (want.abs() < HUGE)
    assert torch.equal(got[~finite].double(), want[~finite])
    return (far(got, want) / (1 + want.abs()))[finite].max().item()


@pytest.mark.parametrize("output", ["y", "log"])
@pytest.mark.parametrize("cdf", CDFS)
def test_each_row_alone(kernels: ModuleType, cdf: str, output: str) -> None:
    given = packed(LENGTHS)
    grad = torch.randn(len(given[0]), generator=torch.Generator().manual_seed(1))
    which = cdf, CDFS[cdf], output
    found, expected = of_kernels(kernels, *given, grad, *which), each_row(*given, grad, *which)
    for got, want, most in zip(found, expected, (1e-6, 1e-5, 1e-5, 1e-5, 1e-6), strict=True):
        assert error(got, want) < most
    assert found[0].dtype == torch.float32 and found[4].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_precisions(kernels: ModuleType, dtype: torch.dtype) -> None:
    """Also with offsets of 32 bits, and one k and τ for all."""
    x, offsets, _, _ = packed([4, 70, 3, 17, 2, 300, 2], dtype)
    given = x, offsets.int(), torch.tensor(1.5), f64(0.7)
    grad = torch.ones_like(x).cumsum(0).sub(3).div(100)
    which = "logistic", 0.0, "y"
    alike = given[0], given[1], *(number.expand(7) for number in given[2:]), grad
    found, expected = of_kernels(kernels, *given, grad, *which), each_row(*alike, *which)
    step = {torch.float64: 1e-12}.get(dtype, torch.finfo(dtype).eps)
    for got, want, most in zip(found, expected, (step, step, 1e-5, 1e-5, 1e-5), strict=True):
        assert error(got, want) <= (1e-10 if dtype == torch.float64 else most)
    assert found[0].dtype == found[1].dtype == dtype


def test_short_rows_share_programs(kernels: ModuleType) -> None:
    """As many as there are lanes, and windows of rows that end anywhere."""
    lengths = [1 + i * i % 10 for i in range(150)]
    assert kernels.ragged.parts(150, sum(lengths), torch.float32)[0].tile.together == 16
    given, which = packed(lengths), ("logistic", 0.0, "y")
    grad = torch.ones_like(given[0]).cumsum(0).cos()
    found, expected = of_kernels(kernels, *given, grad, *which), each_row(*given, grad, *which)
    for got, want in zip(found, expected, strict=True):
        assert error(got, want) < 1e-5


def test_windows_of_one_program(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short rows, which a program takes as they lie, with long ones among them."""
    monkeypatch.setattr(kernels.layout, "SMALL_BATCH", 0)
    lengths = [i * i % 10 for i in range(70)]
    lengths[3], lengths[40], lengths[41] = 300, 29, 33
    kernels.ragged.parts.cache_clear()
    short, *long = kernels.ragged.parts(70, sum(lengths), torch.float32)
    assert short.tile.together == 32 and len(long) == 1
    given, which = packed(lengths), ("logistic", 0.0, "y")
    grad = torch.ones_like(given[0]).cumsum(0).cos()
    found, expected = of_kernels(kernels, *given, grad, *which), each_row(*given, grad, *which)
    for got, want in zip(found, expected, strict=True):
        assert error(got, want) < 1e-5
    kernels.ragged.parts.cache_clear()


def test_rows_of_one_length(kernels: ModuleType) -> None:
    """A window of them is not sorted; the last one is not full."""
    given, which = packed([6] * 75), ("logistic", 0.0, "y")
    grad = torch.ones_like(given[0]).cumsum(0).cos()
    found, expected = of_kernels(kernels, *given, grad, *which), each_row(*given, grad, *which)
    for got, want in zip(found, expected, strict=True):
        assert error(got, want) < 1e-5


# short, of many pieces and long, by turns
@pytest.mark.parametrize(
    ("length", "bad"),
    [
        (length, bad)
        for i, length in enumerate((7, 65, 300))
        for j, bad in enumerate(("nan", "inf", "-inf", "k", "tau"))
        if (i + j) % 2 == 0
    ],
)
def test_a_bad_row_is_bad_alone(kernels: ModuleType, length: int, bad: str) -> None:
    """And −inf is an entry that may not be selected."""
    lengths = [9, 1, length, 0, 5, 260, 12]
    x, offsets, _, tau = packed(lengths)
    k, which = f64([2.0, 1, 3, 0, 4.5, 8, 12]), ("logistic", 0.0, "y")
    grad = torch.ones_like(x).cumsum(0).cos()
    clean = of_kernels(kernels, x, offsets, k, tau, grad, *which)
    place = int(offsets[2]) + 4
    x, k, tau = x.clone(), k.clone(), tau.clone()
    if bad == "k":
        k[2] = length + 1.0
    elif bad == "tau":
        tau[2] = 0.0
    elif bad == "inf":
        x[place - 4 : place + 1] = float(bad)  # five, and k is 3
    else:
        x[place] = float(bad)
    found = of_kernels(kernels, x, offsets, k, tau, grad, *which)
    rows = torch.arange(7).repeat_interleave(offsets.diff()) == 2
    for got, before in zip(found, clean, strict=True):
        own = rows if len(got) == len(rows) else torch.arange(7) == 2
        assert torch.equal(got[~own], before[~own])
        assert bad == "-inf" or got[own].isnan().all()
    if bad == "-inf":
        assert found[0][place] == 0 and abs(found[0][rows].sum() - 3) < 1e-5


def test_masked_rows_of_which_all_are_selected(kernels: ModuleType) -> None:
    """Without a search: what is left of them after a mask counts."""
    x = torch.tensor([1.0, -torch.inf, 2.0, -torch.inf, -torch.inf, 5.0])
    offsets, k = torch.tensor([0, 3, 5, 6]), f64([2.0, 0, 1])
    y, hi, _ = kernels.packed_soft_topk(x, offsets, k, f64(0.5), "laplace", 0.0, "y")
    assert y.tolist() == [1, 0, 1, 0, 0, 1] and hi.tolist() == [-HUGE, HUGE, -HUGE]


def test_wrong_offsets_leave_other_memory_alone(kernels: ModuleType) -> None:
    """Nobody looks at them on a device."""
    memory = torch.arange(80.0)
    x, before = memory[32:48], memory.clone()
    for offsets in ([0, 40, 16], [-9, 3, 16], [0, 9, 4, 99], [16, 16, 3]):
        wrong = torch.tensor(offsets)
        y, hi, lo = kernels.packed_soft_topk(x, wrong, f64(0.5), f64(1.0), "logistic", 0.0, "y")
        assert y.shape == x.shape and len(hi) == len(lo) == len(offsets) - 1
        assert torch.equal(memory, before)


@pytest.mark.parametrize("mean", [1, 5, 30, 100, 700, 5_000])
@pytest.mark.parametrize("rows", [1, 63, 4_096, 100_000, 1_000_000])
def test_each_row_has_one_program(kernels: ModuleType, rows: int, mean: int) -> None:
    """Launches are few, whatever the lengths are."""
    short, *long = kernels.ragged.parts(rows, rows * mean, torch.bfloat16)
    most = short.tile.pieces * short.tile.width - 4  # as a row begins behind a multiple of four
    assert 1.9 * mean <= most or most == 1020
    assert short.programs * short.tile.together >= rows
    assert len(long) == (rows * mean > most)
    for part in long:
        assert part.least == most and rows <= part.programs * part.each and part.each <= 64
    (only,) = kernels.ragged.parts(rows, rows * mean, torch.float64)
    assert only.least < 0
