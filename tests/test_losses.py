"""The losses: values against their definitions, gradients, reductions, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import khot
from khot import cdfs
from khot.losses import permutation_cross_entropy

CDFS: list[str | cdfs.CDF] = ["laplace", "logistic", "normal", "uniform", cdfs.Power(4 / 3)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("cdf", CDFS, ids=str)
@pytest.mark.parametrize("descending", [False, True])
def test_permutation_cross_entropy_is_that_of_the_whole_matrix(cdf: Any, descending: bool) -> None:
    x, target = randn(3, 6), randn(3, 6, seed=1).argsort(-1)
    tau = torch.tensor([8.0, 9.0, 10.0], dtype=torch.float64)
    log_p = khot.log_soft_permutation(x, tau=tau, cdf=cdf, descending=descending)
    want = -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    options: dict[str, Any] = {"tau": tau, "cdf": cdf, "descending": descending}
    for reduction, value in (("none", want), ("mean", want.mean()), ("sum", want.sum())):
        got = permutation_cross_entropy(x, target, **options, reduction=reduction)
        torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)
    got = permutation_cross_entropy(x.mT, target.mT, 0, **options, reduction="none")
    torch.testing.assert_close(got, want.mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cdf", CDFS, ids=str)
def test_permutation_cross_entropy_has_exact_gradients(cdf: Any) -> None:
    x, tau = randn(2, 5).requires_grad_(), torch.tensor([8.0, 9.0]).double().requires_grad_()
    target = randn(2, 5, seed=1).argsort(-1)

    def loss(x: Tensor, tau: Tensor) -> Tensor:
        return permutation_cross_entropy(x, target, tau=tau, cdf=cdf)

    torch.autograd.gradcheck(loss, (x, tau), check_forward_ad=True)
    torch.autograd.gradgradcheck(loss, (x, tau), check_fwd_over_rev=True)
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, tau), loss(x, tau), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x, tau), (x, tau)), torch.autograd.grad(loss(x, tau), (x, tau))
    )


def test_permutation_cross_entropy_is_least_at_the_true_order_and_falls_with_tau() -> None:
    x = randn(7)
    right = permutation_cross_entropy(x, x.argsort(), tau=0.01)
    assert 0 <= right <= 0.5
    assert permutation_cross_entropy(x, x.argsort(), tau=1e-6) <= 1e-12
    assert permutation_cross_entropy(x, x.argsort().flip(0), tau=0.01) > 10
    assert permutation_cross_entropy(1e4 * x, x.argsort().flip(0), tau=1e-4).isfinite()


def test_permutation_cross_entropy_learns_to_sort() -> None:
    target, x = torch.tensor([2, 0, 3, 1]), torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        permutation_cross_entropy(x, target).backward()
        optimizer.step()
    assert torch.equal(x.argsort(), target)


def test_permutation_cross_entropy_in_linear_memory() -> None:
    from test_soft_count import PeakMemory

    n = 20_000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with PeakMemory() as memory:
        permutation_cross_entropy(x, x.argsort()).backward()
    assert memory.peak <= 8 * n * n / 200


def test_permutation_cross_entropy_of_bad_arguments() -> None:
    x, target = randn(2, 3), torch.tensor([[0, 1, 2], [2, 1, 0]])
    with pytest.raises(TypeError, match=r"^target must be a tensor of dtype torch\.int64, but got torch"):
        permutation_cross_entropy(x, target.int())
    with pytest.raises(TypeError, match=r"^target must be a tensor of dtype torch\.int64, but got list"):
        permutation_cross_entropy(x, [0, 1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^target must have the input's shape"):
        permutation_cross_entropy(x, target[0])
    with pytest.raises(ValueError, match=r"^target must lie in"):
        permutation_cross_entropy(x, target + 1)
    with pytest.raises(ValueError, match=r"^reduction must be 'mean', 'sum' or 'none', but got 'max'"):
        permutation_cross_entropy(x, target, reduction="max")
