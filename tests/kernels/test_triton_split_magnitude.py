"""Top-k in magnitude of rows that many programs share, under Triton's interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from khot._kernels.reference import magnitude as reference
from noted import Launches

FORWARD = ("_sample_rows", "_sum_parts", "_finish_parts", "_write_sizes")
BACKWARD = ("_pull_parts", "_gradient_parts")


def number(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def error(got: Tensor, want: Tensor) -> float:
    """The largest difference in a row, in units of 1 + the largest finite number of that row; inf where NaN
    and infinite numbers do not agree."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isnan(), want.isnan()):
        return float("inf")
    difference = (got - want).masked_fill((got == want) | want.isnan(), 0)
    size = 1 + want.masked_fill(~want.isfinite(), 0).abs()
    return (difference / (size.amax(-1, True) if want.dim() > 1 else size)).abs().max().item()


def check(kernels: ModuleType, x: Tensor, k: Tensor, tau: Tensor, p: float, signed: bool = True) -> None:
    """Forward and backward against the reference in float64."""
    y, *t = kernels.soft_topk_magnitude(x, k, tau, p, signed)
    want, *want_t = reference.soft_topk_magnitude(x.double(), k, tau, p, signed)
    assert y.dtype == x.dtype and error(y, want) <= 1e-6
    assert torch.equal(t[0].isnan(), want_t[0].isnan())
    generator = torch.Generator().manual_seed(0)
    v, v_lo = torch.randn(x.shape, generator=generator), torch.randn(len(x), generator=generator).double()
    rest = (k, *want_t, tau, p, signed)
    got = kernels.soft_topk_magnitude_backward(v, v_lo, x, want.to(x.dtype), *rest)
    true = reference.soft_topk_magnitude_backward(v.double(), v_lo, x.double(), want, *rest)
    assert error(got[0], true[0]) <= 2e-5
    assert error(got[1], true[1]) <= 1e-4  # a sum of terms of either sign


@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_what_may_not_be_selected(larger: ModuleType, p: float) -> None:
    """Every third entry, and all but twelve, of which as many are asked for as there are, or more."""
    x = torch.randn(4, 500, generator=torch.Generator().manual_seed(1)).abs()
    x[0, ::3] = -torch.inf
    x[1:, 12:] = -torch.inf
    check(larger, x, number([60, 5, 12, 13]), number(0.3), p, signed=False)


@pytest.mark.parametrize(
    ("bad", "p", "signed"),
    [
        (torch.nan, 2.0, True),
        (torch.nan, 4 / 3, False),
        (torch.inf, 4 / 3, True),
        (torch.inf, 2.0, False),
        (-torch.inf, 2.0, True),
        (-torch.inf, 4 / 3, False),
    ],
)
def test_what_the_sample_misses(split: ModuleType, p: float, bad: float, signed: bool) -> None:
    """A NaN spoils its row, and no other; an infinite entry is selected, unless it is one that may not be."""
    x = torch.randn(2, 33, generator=torch.Generator().manual_seed(0)).abs()
    x[0, 3] = bad
    check(split, x, number(3.0), number(1.0), p, signed)
    y, hi, _ = split.soft_topk_magnitude(x, number(3.0), number(1.0), p, signed)
    assert y[1].isfinite().all()
    if bad != bad:
        assert y[0].isnan().all() and hi[0].isnan()
    else:
        assert y[0, 3] == (bad if signed or bad > 0 else 0) and y[0].isfinite().sum() >= 32


@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_ordinary_rows_take_two_evaluations(
    larger: ModuleType, monkeypatch: pytest.MonkeyPatch, p: float
) -> None:
    """And no program goes through a row by itself."""
    monkeypatch.setattr(larger.layout, "CHUNK", 4096)
    monkeypatch.setattr(larger.layout, "sample", lambda: (1, 16384, 1))
    launches = Launches(larger.split, FORWARD[:3], monkeypatch)
    x = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(3))
    args = (number(10_000.0), number(1.0), p, True)

    def none(*_: object, **__: object) -> None:
        raise AssertionError("a row was solved by one program")

    own = larger.split.iterate
    monkeypatch.setattr(larger.split, "iterate", none)
    try:
        y, *_ = larger.soft_topk_magnitude(x, *args)
    finally:
        monkeypatch.setattr(larger.split, "iterate", own)
    assert launches.given["_finish_parts"]["status"] == [larger.split.DONE.value] * 2
    assert error(y, reference.soft_topk_magnitude(x.double(), *args)[0]) <= 1e-6


@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_few_pooled_entries_are_gathered(
    larger: ModuleType, monkeypatch: pytest.MonkeyPatch, p: float
) -> None:
    """And the window of them is enough, sorted or not."""
    monkeypatch.setattr(larger.layout, "WINDOW", 512)
    launches = Launches(larger.split, FORWARD[:3], monkeypatch)
    x = torch.randn(2, 2000, generator=torch.Generator().manual_seed(4))
    x[1] = x[1].sort().values
    args = (number(20.0), number(1e-3), p, True)
    y, _, _ = larger.soft_topk_magnitude(x, *args)
    assert error(y, reference.soft_topk_magnitude(x.double(), *args)[0]) <= 1e-6
    assert launches.given["_sum_parts"]["status"] == [larger.split.GATHER.value] * 2
    window = launches.given["_finish_parts"]["window_pointer"]
    count = launches.given["_finish_parts"]["state_pointer"][:, larger.split.COUNT.value].int()
    for row, found, size in zip(x, window, count.tolist(), strict=True):
        chosen = found[:size]
        inside = row[(row.abs() >= chosen.abs().min()) & (row.abs() <= chosen.abs().max())]
        assert torch.equal(chosen, inside)  # all of them, in their order


def test_a_sample_that_tells_nothing(larger: ModuleType) -> None:
    """Its bounds do not hold then, and the row is solved without them."""
    n, blocks = 1000, 32
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(2))
    sampled = (torch.arange(blocks)[:, None] * (n // blocks) + torch.arange(4)).flatten()
    x[:, sampled] *= 1e-3
    for tau in (1.0, 1e-3):
        check(larger, x, number([20.0, 700.0]), number(tau), 2.0)


def test_launches(split: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many whatever the row takes, and what they count is reset, so that they can be replayed."""
    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(5))
    noted = Launches(split.split, FORWARD[:3], monkeypatch)
    rest = Launches(split.magnitude, FORWARD[3:], monkeypatch)
    backward = Launches(split.pull, BACKWARD, monkeypatch)
    for tau in (1.0, 1e-5):
        y, hi, lo = split.soft_topk_magnitude(x, number(3.0), number(tau), 2.0, True)
        given = (x, number(0.0), x, y, number(3.0), hi, lo, number(tau), 2.0, True)
        split.soft_topk_magnitude_backward(*given)
        assert noted.given["_finish_parts"]["counter_pointer"].tolist() == [0]
        assert backward.given["_pull_parts"]["counter_pointer"].tolist() == [0]
    assert noted.names == [*FORWARD[:3]] * 2 and rest.names == [FORWARD[3]] * 2
    assert backward.names == [*BACKWARD] * 2
