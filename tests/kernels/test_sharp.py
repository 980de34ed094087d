"""Soft top-ks of float32 on the CPU at every temperature, k from ½ to n − ½, against float64, which is solved
by other kernels (`csrc/soft_topk/careful.h`). Sharp rows, whose scores spread far beyond τ, have ways of
their own: in lanes, by counts of long rows, and, where all entries are decided, for gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import khot

CDFS = ("logistic", "laplace", "normal", "uniform", khot.cdfs.Power(1.5))
SIZES = (2, 3, 5, 8, 16, 17, 31, 64, 100, 128, 200, 256, 257, 500, 1_000, 4_096)

Rows = Callable[[Tensor, random.Random, Generator], Tensor]


def masked(x: Tensor, draw: random.Random, g: Generator) -> Tensor:
    out = torch.rand(x.shape, generator=g) < draw.choice([0.3, 0.7, 0.95])
    out[:, 0] = False
    return x.masked_fill(out, -torch.inf)


def pinned(x: Tensor, draw: random.Random, g: Generator) -> Tensor:
    return x.index_fill(1, torch.tensor([draw.randrange(x.shape[1])]), torch.inf)


KINDS: dict[str, Rows] = {
    "normal": lambda x, draw, g: x,
    "uniform": lambda x, draw, g: torch.rand(x.shape, generator=g, dtype=x.dtype),
    "Cauchy": lambda x, draw, g: x / x.flip(0).roll(1, 1),
    "ties": lambda x, draw, g: (3 * x).round() / 3,
    "two clusters": lambda x, draw, g: 0.1 * x + 10 * (x.roll(1, 1) > 0),
    "outlier": lambda x, draw, g: x.index_fill(1, torch.tensor([0]), 1_000.0),
    "equally spaced": lambda x, draw, g: torch.linspace(0, 1, x.shape[1], dtype=x.dtype).expand_as(x) + 0,
    "gap": lambda x, draw, g: x + 5 * (x > 0),
    "masked": masked,
    "pinned": pinned,
    "offset": lambda x, draw, g: x + 1e4,
}


def drawn(kind: str, seed: int) -> tuple[Tensor, Tensor, float, Any, Tensor]:
    """Rows, k of each, τ, a CDF and an incoming gradient."""
    draw = random.Random(f"{kind} {seed}")
    g = Generator().manual_seed(draw.randrange(1 << 30))
    n, batch = draw.choice(SIZES), draw.choice([1, 3, 16, 32, 37])
    x = KINDS[kind](torch.randn(batch, n, generator=g, dtype=torch.float64), draw, g).float()
    whole = draw.randint(1, max(1, n - 1))
    given = draw.choice(
        [whole, whole - 0.5, draw.uniform(0.5, n - 0.5), whole - 1e-3, whole + 1e-3, 1, n - 1]
    )
    k = torch.full((batch,), float(given), dtype=torch.float64)
    if draw.random() < 0.3:
        k = torch.tensor([draw.uniform(0.5, n - 0.5) for _ in range(batch)], dtype=torch.float64)
    k = torch.minimum(k, (x > -torch.inf).sum(-1) - 1e-3).clamp(min=1.001 if kind == "pinned" else 0)
    return x, k, 10 ** draw.uniform(-6, 1), draw.choice(CDFS), torch.randn(batch, n, generator=g)


def solved(x: Tensor, k: Tensor, tau: float, cdf: Any, v: Tensor) -> list[Tensor]:
    """y, and the gradients in x, k and τ."""
    given = [x, k, torch.full_like(k, tau)]
    leaves = [each.clone().requires_grad_() for each in given]
    y = khot.soft_topk(leaves[0], leaves[1], tau=leaves[2], cdf=cdf)
    return [y.detach(), *torch.autograd.grad(y, leaves, v)]


def plain(x: Tensor, k: Tensor, tau: float, cdf: Any, v: Tensor) -> list[Tensor]:
    """The same of rows with one k, in a plain call, which has fewer gradients."""
    leaf = x.clone().requires_grad_()
    y = khot.soft_topk(leaf, k[0].item(), tau=tau, cdf=cdf)
    return [y.detach(), *torch.autograd.grad(y, leaf, v)]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kind", KINDS)
def test_rows_at_every_temperature(kind: str, seed: int) -> None:
    x, k, tau, cdf, v = drawn(kind, seed)
    wanted = solved(x.double(), k, tau, cdf, v.double())
    z = (x.double() - threshold(x, k, tau, cdf)) / tau
    f = khot.cdfs.resolve(cdf).pdf(z).nan_to_num(0, 0, 0)
    # what gradients are sums of, before these cancel
    size = f.amax(-1) * v.double().abs().amax(-1) / tau
    reach = (f * (1 + z.nan_to_num(0, 0, 0).abs())).amax(-1) * v.double().abs().amax(-1) / tau
    few = torch.minimum(k, (x > -torch.inf).sum(-1) - k).clamp(min=1)
    ways = [solved(x, k, tau, cdf, v)]
    if (k == k[0]).all():
        ways.append(plain(x, k, tau, cdf, v))
    for y, dx, *numbers in ways:
        y, n = y.double(), x.shape[-1]
        assert ((y.sum(-1) - k).abs() <= 1e-6 * few + n * 2**-24).all()
        assert ((y - wanted[0]).abs() <= 5e-7).all() and (y >= 0).all() and (y <= 1).all()
        assert ((dx.double() - wanted[1]).abs() <= 1e-4 * size[:, None] + 1e-36).all()
        if numbers:
            dk, dtau = numbers
            if not isinstance(cdf, khot.cdfs.Power):  # whose f has no bounded slope where entries are decided
                assert ((dk - wanted[2]).abs() <= 1e-4 * v.abs().amax(-1)).all()
            assert ((dtau - wanted[3]).abs() <= 1e-4 * reach + 1e-36).all()


def threshold(x: Tensor, k: Tensor, tau: float, cdf: Any) -> Tensor:
    return khot.inverse_soft_count(x.double(), k.unsqueeze(-1), tau=torch.full_like(k, tau), cdf=cdf)


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
@pytest.mark.parametrize("n", [16, 64, 1_000])
def test_a_bad_row_among_sharp_ones(n: int, cdf: Any) -> None:
    x = torch.randn(16, n, generator=Generator().manual_seed(n))
    for tau in (1e-2, 1e-5):
        y = khot.soft_topk(x, 3, tau=tau, cdf=cdf)
        for bad in (torch.nan, torch.inf):
            spoiled = x.clone()
            spoiled[5, :4] = bad
            found = khot.soft_topk(spoiled, 3, tau=tau, cdf=cdf)
            assert found[5].isnan().all() and torch.equal(found[:5], y[:5]) and torch.equal(found[6:], y[6:])


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
def test_entries_that_are_equal_at_the_threshold_share_alike(cdf: Any) -> None:
    for n in (11, 64, 300):
        for equal in (2, 5):
            x = torch.randn(16, n, generator=Generator().manual_seed(n)).clamp(max=5)
            x[:, :4] += 20
            x[:, 4 : 4 + equal] = 7
            for tau in (0.01, 1e-4, 1e-6):
                y = khot.soft_topk(x, 5, tau=tau, cdf=cdf)
                share = y[:, 4 : 4 + equal]
                assert (share == share[:, :1]).all() and (share - 1 / equal).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 17, 255])
def test_both_ends_of_a_gap_weigh_alike_where_densities_underflow(n: int, dtype: torch.dtype) -> None:
    """With t in the middle, also where some of the densities are still numbers of float64, and others not."""
    v = torch.zeros(1, n, dtype=dtype)
    v[0, -1] = 1
    for gap in range(1_380, 1_520, 2):
        x = torch.zeros(1, n, dtype=dtype)
        x[0, :-1] = torch.linspace(0, 3, n - 1)
        x[0, -1] = -gap
        k = torch.tensor([n - 1.0], dtype=torch.float64, requires_grad=True)
        (dk,) = torch.autograd.grad(khot.soft_topk(x.requires_grad_(), k), k, v)
        assert abs(dk.item() - 0.5) < 1e-3, gap
