"""Masked entries in one pass, which ``arguments.masked`` takes for large inputs, against ``torch.where``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import khot
from khot._core import arguments

ROWS, N = 67, 131  # neither of which is a multiple of a vector's lanes


def _given(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, N, generator=g).to(dtype)
    x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    assert x.numel() >= arguments.MANY
    return x, torch.rand(ROWS, N, generator=g) < 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fill", [0.0, math.inf, -math.inf])
def test_is_where(dtype: torch.dtype, fill: float) -> None:
    x, mask = _given(dtype)
    for entries, flags in (
        (x, mask),
        (x.T, mask.T),
        (x, mask[:1].expand_as(x)),
        (x, mask[:, :1].expand_as(x)),
    ):
        expected = torch.where(flags, entries, fill)
        assert_close(arguments.masked(entries, flags, fill), expected, rtol=0, atol=0, equal_nan=True)


def test_derivatives() -> None:
    x, mask = _given(torch.float64)
    x = x.nan_to_num(0, 1, -1).requires_grad_()

    def masked(x: torch.Tensor) -> Any:
        return arguments.masked(x, mask, 0.0)

    first, expected = (
        torch.autograd.grad(f.exp().sum(), x, create_graph=True)[0]
        for f in (masked(x), torch.where(mask, x, 0))
    )
    assert_close(first, expected)
    second, expected = (torch.autograd.grad(g.sin().sum(), x)[0] for g in (first, expected))
    assert_close(second, expected)
    tangent = torch.ones_like(x)
    assert_close(torch.func.jvp(masked, (x.detach(),), (tangent,))[1], mask.double())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), tangent)
        assert_close(torch.autograd.forward_ad.unpack_dual(masked(dual)).tangent, mask.double())


def test_many_rows_of_a_masked_budget() -> None:
    """The gradients of masked entries are zero, and the others those of the rows without them."""
    g = torch.Generator().manual_seed(1)
    x, cost = torch.randn(256, 40, generator=g), torch.rand(256, 40, generator=g) + 0.1
    mask = torch.arange(40) < 30
    x[:, 30:], cost[:, 30:] = math.nan, math.nan
    leaves = [x.requires_grad_(), cost.requires_grad_()]
    shorter = [v.detach()[:, :30].clone().requires_grad_() for v in leaves]
    found = khot.soft_budget(*leaves, 3.0, tau=0.5, mask=mask)
    expected = khot.soft_budget(*shorter, 3.0, tau=0.5)
    assert_close(found[:, :30], expected)
    weights = torch.randn(256, 30, generator=g)
    got = torch.autograd.grad((found[:, :30] * weights).sum(), leaves)
    for whole, part in zip(got, torch.autograd.grad((expected * weights).sum(), shorter), strict=True):
        assert_close(whole[:, :30], part, rtol=1e-4, atol=1e-5)
        assert not whole[:, 30:].any()
