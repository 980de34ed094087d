"""The statements of the papers about their operators, one test each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

import khot
from drawn import normal as scores
from khot import cdfs

CDFS = {
    "logistic": "logistic",
    "laplace": "laplace",
    "normal": "normal",
    "uniform": "uniform",
    "power": cdfs.Power(4 / 3),
}
every_cdf = pytest.mark.parametrize("name", CDFS)


# --------------------------------------------- sigmoid-topk.txt, Propositions 1 and 2, Corollary 1


@every_cdf
def test_proposition_1_order_preservation(name: str) -> None:
    x = scores(50, 20)
    y = khot.soft_topk(x, 6.5, tau=0.7, cdf=CDFS[name])
    above = (x.unsqueeze(-1) > x.unsqueeze(-2)) & (y.unsqueeze(-1) < y.unsqueeze(-2))
    assert not above.any()
    if cdfs.resolve(CDFS[name]).full_support:  # strictly, elsewhere ties at 0 and 1
        order = x.argsort(-1)
        assert (y.gather(-1, order).diff(dim=-1) > 0).all()


# ------------------------------------------------------------------------ the hard mask


def test_mask_rounds_k_half_up() -> None:
    x = scores(6)
    sizes = [khot.topk_mask(x, k).sum().item() for k in (0, 0.49, 0.5, 1.49, 1.5, 5.5, 6)]
    assert sizes == [0, 0, 1, 1, 2, 6, 6]


def test_mask_is_a_constant_in_forward_mode() -> None:
    x, tangent = scores(3, 6), scores(3, 6, seed=1)
    with dual_level():
        y = make_dual(x, tangent)
        assert torch.equal(unpack_dual(khot.topk_mask(y, 2) * y).tangent, khot.topk_mask(x, 2) * tangent)


def test_hard_never_selects_what_is_masked() -> None:
    x = scores(5)
    keep = torch.tensor([True, False, True, False, True])
    y = khot.soft_topk(x, 3, mask=keep, hard=True)
    assert torch.equal(y, keep.to(y.dtype))


def with_ties(kind: str, rows: int, n: int) -> Tensor:
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(n))
    return {
        "half zeros": x.clamp(min=0),
        "two values": (x > 0).float(),
        "two odd values": torch.where(x > 0, 3e-41, -1e30),
        "rounded": (2 * x).round(),
        "one value": torch.full_like(x, -2.5),
        "few different": torch.where(torch.arange(n) % 97 == 0, x, 1.0),
        "signed zeros": torch.where(x > 0, 0.0, -0.0),
        "infinite": torch.where(x > 1, math.inf, x).where(x > -1, -math.inf),
        "next to each other": torch.where(x > 0, 1.0, 1 + 2**-7),
    }[kind]


KINDS = (
    "half zeros",
    "two values",
    "two odd values",
    "rounded",
    "one value",
    "few different",
    "signed zeros",
    "infinite",
    "next to each other",
)


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1_000, 1_025, 4_096, 4_097, 20_000, 70_001])
@pytest.mark.parametrize("kind", KINDS)
def test_of_many_equal_entries_the_first_are_selected(kind: str, n: int) -> None:
    """Against a stable sort, at every k for which the search may end in another way."""
    x = with_ties(kind, 2, n)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        rows = x.to(dtype)
        order = rows.double().sort(dim=-1, descending=True, stable=True)[1]
        place = order.argsort(-1)
        least = int((rows == math.inf).sum(-1).max())
        most = int((rows > -math.inf).sum(-1).min())
        ks = {1, 2, n // 100, n // 4, n // 2 - 1, n // 2, n // 2 + 1, 3 * n // 4, n - 1, n, least, most}
        for side in (rows > 0, rows >= 0):  # where the ties of a kind begin and end
            ks |= {int(c) + d for c in side.sum(-1) for d in (-1, 0, 1)}
        for k in sorted(k for k in ks if max(least, 0) <= k <= most):
            assert torch.equal(khot.topk_mask(rows, k), (place < k).to(dtype)), (dtype, k)
