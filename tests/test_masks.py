"""``mask=`` of ranks, sorting, permutations, quantiles and sorted top-k: False leaves an entry out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
import processes
from khot import cdfs

INF, NAN = math.inf, math.nan
ROWS = torch.tensor(
    [
        [0.3, NAN, -1.2, 2.0, INF, 0.3, -0.4, 5.0],
        [1.0, -INF, 0.5, 0.5, -INF, INF, 3.0, NAN],
        [NAN, NAN, INF, 7.0, -INF, 0.0, -2.0, 1.0],
    ],
    dtype=torch.float64,
)
MASK = torch.tensor(
    [
        [True, False, True, True, False, True, True, False],
        [True, True, True, False, False, True, True, False],
        [False, False, False, True, False, False, False, False],
    ]
)
every_cdf = pytest.mark.parametrize(
    "cdf", ["laplace", "logistic", "normal", "uniform", cdfs.Power(1.5)], ids=str
)
either = pytest.mark.parametrize("descending", [False, True])


def kept() -> list[Tensor]:
    return [row[mask] for row, mask in zip(ROWS, MASK, strict=True)]


@every_cdf
@either
def test_ranks(cdf: Any, descending: bool) -> None:
    got = khot.soft_rank(ROWS, tau=0.7, cdf=cdf, descending=descending, mask=MASK)
    assert (got[~MASK] == 0).all()
    for row, mask, ranks in zip(kept(), MASK, got, strict=True):
        want = khot.soft_rank(row, tau=0.7, cdf=cdf, descending=descending)
        torch.testing.assert_close(ranks[mask], want, rtol=0, atol=1e-12)


@every_cdf
@either
def test_sorting(cdf: Any, descending: bool) -> None:
    got = khot.soft_sort(ROWS, tau=0.7, cdf=cdf, descending=descending, mask=MASK)
    for row, values in zip(kept(), got, strict=True):
        want = khot.soft_sort(row, tau=0.7, cdf=cdf, descending=descending)
        torch.testing.assert_close(values[: len(row)], want, rtol=0, atol=1e-9)
        assert (values[len(row) :] == 0).all()


@every_cdf
@either
@pytest.mark.parametrize("log", [False, True])
def test_permutations(cdf: Any, descending: bool, log: bool) -> None:
    operator = khot.log_soft_permutation if log else khot.soft_permutation
    got = operator(ROWS, tau=0.7, cdf=cdf, descending=descending, mask=MASK)
    nothing = -INF if log else 0.0
    for row, mask, P in zip(kept(), MASK, got, strict=True):
        want = operator(row, tau=0.7, cdf=cdf, descending=descending)
        torch.testing.assert_close(P[: len(row), mask], want, rtol=1e-9, atol=1e-9)
        assert (P[:, ~mask] == nothing).all() and (P[len(row) :] == nothing).all()


@every_cdf
def test_quantiles(cdf: Any) -> None:
    q = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64)
    got = khot.soft_quantile(ROWS, q, tau=0.7, cdf=cdf, mask=MASK)
    for i, row in enumerate(kept()):
        torch.testing.assert_close(got[:, i], khot.soft_quantile(row, q, tau=0.7, cdf=cdf), rtol=0, atol=1e-9)
    # of as many rows, as those that are solved together round otherwise than one alone
    median = khot.soft_median(ROWS, tau=0.7, cdf=cdf, mask=MASK)
    assert torch.equal(median, khot.soft_quantile(ROWS, 0.5, tau=0.7, cdf=cdf, mask=MASK))
    assert khot.soft_median(ROWS, tau=0.7, cdf=cdf, mask=torch.tensor(False)).isnan().all()


def test_sorted_top_k() -> None:
    finite = ROWS[:2].nan_to_num(posinf=4.0)
    got = khot.sorted_soft_topk(finite, 2, epsilon=1.5, mask=MASK[:2])
    assert (got.transpose(-1, -2)[~MASK[:2]] == 0).all()
    with pytest.raises(ValueError, match="number of entries that may be selected"):
        khot.sorted_soft_topk(ROWS.nan_to_num(), 2, mask=MASK)


@pytest.mark.parametrize(
    "operator",
    [khot.soft_rank, khot.soft_sort, khot.soft_permutation, khot.soft_median],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("cdf", ["laplace", "logistic"])
def test_gradients(operator: Callable[..., Tensor], cdf: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, dtype=torch.float64, generator=generator).requires_grad_()
    mask = torch.tensor([True, True, False, True, False, True])
    assert torch.autograd.gradcheck(lambda x: operator(x, tau=0.8, cdf=cdf, mask=mask), x)
    x = x.detach().masked_fill(~mask, NAN).requires_grad_()
    operator(x, tau=0.8, cdf=cdf, mask=mask).sum().backward()
    assert x.grad is not None and (x.grad[:, ~mask] == 0).all() and x.grad.isfinite().all()


def test_another_dim_and_a_mask_that_broadcasts() -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([True, False, True, True, False])
    got = khot.soft_rank(x, 0, mask=mask[:, None])
    torch.testing.assert_close(got[mask], khot.soft_rank(x[mask], 0))
    with pytest.raises(TypeError, match=r"torch\.bool"):
        khot.soft_sort(x, mask=torch.ones(3))


def test_one_level_per_row() -> None:
    x = torch.randn(3, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    count = torch.tensor([[1.0, 2.5, 3.0, 6.0]], dtype=torch.float64).expand(3, 4)
    t = khot.inverse_soft_count(x, count, 1, tau=0.5)
    assert t.shape == (3, 4)
    for i in range(3):
        for j in range(4):
            one = khot.inverse_soft_count(x[i, :, j], count[i, j].item(), tau=0.5)
            torch.testing.assert_close(t[i, j], one, rtol=0, atol=1e-12)
    torch.testing.assert_close(khot.soft_count(x, t, 1, tau=0.5), count, rtol=0, atol=1e-12)
    assert torch.equal(khot.inverse_soft_count(x, count[0], 1, tau=0.5), t)


def _tangents(group: Any, x: Tensor, v: Tensor, options: dict[str, Any], name: str) -> tuple[Tensor, ...]:
    part, along = (a.chunk(group.size(), -1)[group.rank()].contiguous() for a in (x, v))
    call = getattr(khot, name)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(part, along)
        y = call(dual, 3, **options, group=group)
        return tuple(torch.autograd.forward_ad.unpack_dual(y))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("soft_topk", {"tau": 0.5}),
        ("log_soft_topk", {"tau": 0.5, "cdf": "laplace"}),
        ("soft_topk_magnitude", {"tau": 0.5, "p": 1.5}),
    ],
    ids=str,
)
def test_forward_mode_over_processes(name: str, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    x, v = torch.randn(2, 2, 9, dtype=torch.float64, generator=generator)
    parts = processes.run(2, _tangents, x, v, options, name)
    want = torch.func.jvp(lambda x: getattr(khot, name)(x, 3, **options), (x,), (v,))
    for got, expected in zip(zip(*parts, strict=True), want, strict=True):
        torch.testing.assert_close(torch.cat(got, -1), expected, rtol=0, atol=1e-10)
