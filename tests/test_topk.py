"""The statements of the papers about their operators, one test each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import khot
import oracles
from khot import cdfs

CDFS = {
    "logistic": "logistic",
    "laplace": "laplace",
    "normal": "normal",
    "uniform": "uniform",
    "power": cdfs.Power(4 / 3),
}
every_cdf = pytest.mark.parametrize("name", CDFS)


def scores(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


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


@every_cdf
@pytest.mark.parametrize("shift", [-1e3, 1.0, 12345.678])
def test_proposition_1_shift_invariance(name: str, shift: float) -> None:
    x = (scores(20) * 2**20).round() / 2**20  # so that x + shift loses nothing
    shift = round(shift * 2**20) / 2**20
    y, shifted = (khot.soft_topk(v, 6.5, tau=0.7, cdf=CDFS[name]) for v in (x, x + shift))
    torch.testing.assert_close(shifted, y, rtol=0, atol=1e-13)


def test_proposition_1_invertible_up_to_a_constant() -> None:
    x = scores(20)
    y = khot.sigmoid_topk(x, 6.5, tau=0.7)
    constant = 0.7 * torch.logit(y) - x
    torch.testing.assert_close(constant, constant.mean().expand(20), rtol=0, atol=1e-12)


@every_cdf
def test_proposition_1_infinite_temperature(name: str) -> None:
    y = khot.soft_topk(scores(20), 6.5, tau=1e9, cdf=CDFS[name])
    torch.testing.assert_close(y, torch.full_like(y, 6.5 / 20), rtol=0, atol=1e-7)


@every_cdf
def test_proposition_1_zero_temperature(name: str) -> None:
    x = scores(20)
    assert torch.equal(khot.soft_topk(x, 6, tau=1e-9, cdf=CDFS[name]), khot.topk_mask(x, 6))


@every_cdf
def test_proposition_2_by_the_potentials_own_optimality(name: str) -> None:
    # no feasible direction improves the objective, to second order in its length
    F, x, tau = cdfs.resolve(CDFS[name]), scores(8, seed=3), 0.6
    y = khot.soft_topk(x, 3.3, tau=tau, cdf=F)

    def objective(y: Tensor) -> Tensor:
        return (y * x).sum() - tau * F.potential(y).sum()

    best = objective(y)
    for seed in range(50):
        direction = scores(8, seed=100 + seed)
        other = khot.soft_topk(x + 0.3 * direction, 3.3, tau=tau, cdf=F)
        assert objective(other) <= best + 1e-14


# ---------------------------------------------------------------- lapsum.txt, Theorem 3.3


def test_theorem_3_3_sum_and_limits() -> None:
    x = scores(4, 30)
    for k in (0.5, 3.0, 17.25, 29.9):
        y = khot.laplace_topk(x, k, tau=0.8)
        assert ((y > 0) & (y < 1)).all()
        torch.testing.assert_close(y.sum(-1), torch.full((4,), k, dtype=x.dtype), rtol=0, atol=1e-12)
    hard = khot.topk_mask(x, 7)
    previous = math.inf
    for tau in (1.0, 0.1, 0.01, 1e-3, 1e-5):
        distance = (khot.laplace_topk(x, 7, tau=tau) - hard).abs().max().item()
        assert distance <= previous
        previous = distance
    assert previous < 1e-12
    uniform = khot.laplace_topk(x, 7, tau=1e8)
    torch.testing.assert_close(uniform, torch.full_like(x, 7 / 30), rtol=0, atol=1e-7)


# ------------------------------------------------------- soft-ot-topk.txt, sections 2.2 and 3


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("k", [1, 4, 6.5])
def test_soft_is_the_entropic_plan(epsilon: float, k: float) -> None:
    x = scores(9, seed=4)
    want = oracles.sinkhorn_topk(x, k, epsilon)
    np.testing.assert_allclose(khot.ot_topk(x, k, epsilon=epsilon).numpy(), want, atol=1e-10)


def test_theorem_2_bias_of_soft() -> None:
    # ‖Γ^ε − Γ‖_F ≤ ε(ln n + ln 2)/(n·gap); Γ holds y/n and (1 − y)/n
    x, k = scores(12, seed=5), 5
    ordered = x.sort(descending=True).values
    gap = (ordered[k - 1] - ordered[k]).item()
    for epsilon in (0.3, 0.03, 0.003):
        difference = khot.ot_topk(x, k, epsilon=epsilon) - khot.topk_mask(x, k)
        frobenius = math.sqrt(2) * difference.norm().item() / 12
        assert frobenius <= epsilon * math.log(24) / (12 * gap)


def test_normalize_is_per_row_and_differentiable() -> None:
    x = scores(2, 9, seed=6)
    x[1] *= 1e3  # in the published code this row would set the scale of the other
    both = khot.ot_topk(x, 4, normalize=True)
    torch.testing.assert_close(both[0], khot.ot_topk(x[0], 4, normalize=True), rtol=0, atol=1e-14)
    leaf = x[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: khot.ot_topk(v, 4, normalize=True), leaf)


# --------------------------------------------------------------- sparse-topk.txt, section 4


@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_sparsity(p: float) -> None:
    # exact zeros and ones away from the threshold, all of them once τ is below the gap
    x = scores(100, seed=7)
    for tau, cdf in ((0.5, "soft"), (1e-6, "hard")):
        y = khot.sparse_topk(x, 10, tau=tau, p=p)
        undecided = ((y > 0) & (y < 1)).sum()
        assert (undecided == 0) if cdf == "hard" else (0 < undecided < 40)
        assert ((y == 0) | (y == 1) | ((y > 0) & (y < 1))).all()


@pytest.mark.parametrize("p", [2.0, 4 / 3, 1.15, 3.0])
def test_propositions_5_and_6_isotonic_reduction(p: float) -> None:
    for seed in range(5):
        x = scores(12, seed=seed)
        for k in (1, 5, 11):
            y = khot.sparse_topk(x, k, tau=0.4, p=p)
            np.testing.assert_allclose(y.numpy(), oracles.mask_pav(x, k, 0.4, p), atol=1e-9)


# ------------------------------------------------------------------------ the hard mask


def test_mask_rounds_k_half_up() -> None:
    x = scores(6)
    sizes = [khot.topk_mask(x, k).sum().item() for k in (0, 0.49, 0.5, 1.49, 1.5, 5.5, 6)]
    assert sizes == [0, 0, 1, 1, 2, 6, 6]


def test_mask_takes_a_k_a_row_and_breaks_ties_by_index() -> None:
    x = torch.tensor([[1.0, 1.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    want = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    assert torch.equal(khot.topk_mask(x, torch.tensor([2, 3])), want)
    smallest = khot.topk_mask(x, torch.tensor([2, 3]), largest=False)
    assert torch.equal(smallest, torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]))


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
