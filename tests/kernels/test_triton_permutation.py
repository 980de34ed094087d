"""Soft permutations of the Triton kernels, interpreted, with gradients, against the reference in float64."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
from differences import far as error
from khot import cdfs
from khot._core.dispatch import OPERATORS

CDFS = [
    cdfs.Logistic(),
    cdfs.Laplace(),
    cdfs.Normal(),
    cdfs.Uniform(),
    cdfs.Power(4 / 3),
    cdfs.Power(1.3),
    cdfs.Power(3.0),
]
INF = torch.inf


def rows(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of several kinds with a temperature each, and what arrives at the matrix."""
    g = torch.Generator().manual_seed(n)
    x = torch.randn(6, n, generator=g)
    x[1] = 2 * x[1].round()  # ties
    x[2] = 300 + 40 * x[2]  # gaps
    x[3, ::3], x[3, 1::4] = -INF, INF
    x[4] = 1.5
    x[5] = -INF
    tau = torch.tensor([1.0, 0.3, 0.5, 0.7, 2.0, 1.0], dtype=torch.float64)
    return x, tau, torch.randn(6, n, n, generator=g)


def reference(x: Tensor, tau: Tensor, v: Tensor, F: cdfs.CDF) -> tuple[Tensor, ...]:
    p, hi, lo = OPERATORS["soft_permutation"].kernel(x.double(), tau, *F.key)
    backward = OPERATORS["soft_permutation_backward"].kernel
    return p, *backward(v.double(), x.double(), hi, lo, tau, *F.key, True)


def check(kernels: ModuleType, x: Tensor, tau: Tensor, v: Tensor, F: cdfs.CDF) -> None:
    p, hi, lo = kernels.soft_permutation(x, tau, *F.key)
    dx, dtau = kernels.soft_permutation_backward(v, x, hi, lo, tau, *F.key, True)
    want, want_dx, want_dtau = reference(x, tau, v, F)
    assert p.dtype == dx.dtype == x.dtype and dtau.dtype == hi.dtype == torch.float64
    # small shares keep their digits; with compact support z has an error of a rounding at the edge
    rounding = torch.finfo(x.dtype).eps
    relative, absolute = 2e-5 + rounding, 1e-12 if F.full_support else 3e-7
    if isinstance(F, cdfs.Power) and F.shape > 2:
        absolute = 1e-3  # F begins with an infinite slope
    if x.dtype == torch.float16:
        absolute = max(absolute, 6e-8)  # its least number
    n = x.shape[-1]
    assert (error(p, want) <= relative * want + absolute).all(), (error(p, want) / (want + absolute)).max()
    if x.dtype == torch.float32 and absolute < 1e-6:
        good = ~want.isnan().flatten(1).any(-1)
        one = torch.ones_like(p[good].sum(-1))
        torch.testing.assert_close(p[good].sum(-1), one, rtol=0, atol=2e-6)
        torch.testing.assert_close(p[good].sum(-2), one, rtol=0, atol=2e-6)
    if isinstance(F, cdfs.Power) and F.shape > 2:
        return  # its density has no bound
    # no density exceeds 3 or 10/3; where it jumps, the edges are the same in both
    size = 10 * v.double().abs().amax((-1, -2)) / tau.clamp(1e-300, 1e300)
    assert (error(dx, want_dx) <= (4e-7 + rounding) * n * size[:, None]).all()
    assert (error(dtau, want_dtau) <= 2e-6 * n * size * (1 + n)).all()


# the shortest rows with the CDFs by turns
@pytest.mark.parametrize(
    ("F", "n"), [*((F, 9) for F in CDFS), *((F, 1 + i % 2) for i, F in enumerate(CDFS))], ids=str
)
def test_values_and_gradients(kernels: ModuleType, F: cdfs.CDF, n: int) -> None:
    check(kernels, *rows(n), F)


@pytest.mark.parametrize(("n", "row"), [(33, 1), (16, 0), (48, 3)])
def test_several_programs_a_row(kernels: ModuleType, n: int, row: int) -> None:
    x, tau, v = (t[row : row + 1] for t in rows(n))
    check(kernels, x, tau, v, cdfs.Logistic())


@pytest.mark.parametrize(("F", "n"), [(CDFS[0], 33), (CDFS[1], 32)], ids=str)
def test_thresholds_have_the_digits_of_float64(kernels: ModuleType, F: cdfs.CDF, n: int) -> None:
    """Of rows that are dense, far from 0 and spread; in two programs, whose first level is the same, and in
    more."""
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(n)) * torch.tensor([[1.0], [2.0], [30.0]])
    x[1] += 1000
    tau = torch.tensor([0.6, 1.0, 3.0], dtype=torch.float64)
    _, hi, lo = kernels.soft_permutation(x, tau, *F.key)
    _, want_hi, want_lo = OPERATORS["soft_permutation"].kernel(x.double(), tau, *F.key)
    assert torch.equal(hi[:, [0, -1]], want_hi[:, [0, -1]]) and torch.equal(lo[:, 0], want_lo[:, 0])
    off = ((hi - want_hi) + (lo - want_lo))[:, 1:-1] / tau.unsqueeze(-1)
    assert off.abs().max() < 2e-12, off.abs().amax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("n", [255, 256, 257, 512])
@pytest.mark.parametrize("F", CDFS[:2], ids=str)
def test_longer_rows(kernels: ModuleType, F: cdfs.CDF, n: int) -> None:
    x, tau, v = (t[:1] for t in rows(n))
    check(kernels, x, tau, v, F)


@pytest.mark.parametrize("tau", [1e-42, 1e-30, 1e30, 1e290])
def test_temperatures_that_float32_does_not_hold(kernels: ModuleType, tau: float) -> None:
    x = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))
    x[0, 0] = x[0, 1]
    for given in (torch.tensor(tau, dtype=torch.float64), torch.tensor([tau], dtype=torch.float64)):
        p = kernels.soft_permutation(x, given, "logistic", 0.0)[0]
        want = OPERATORS["soft_permutation"].kernel(x.double(), given, "logistic", 0.0)[0]
        assert (error(p, want) <= 1e-6).all()


def test_the_operator_is_what_it_was(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels and without them, with a mask, in both orders."""
    operator, backward = OPERATORS["soft_permutation"], OPERATORS["soft_permutation_backward"]
    x = torch.tensor([[0.3, -1.0, 2.2, INF], [0.5, 0.4, -INF, 7.0]])
    mask = torch.tensor([[True, True, True, True], [True, False, True, True]])
    cases: list[dict[str, Any]] = [{"mask": mask}, {"descending": True, "cdf": "logistic"}]
    for options in cases:
        want = with_gradient(x, options)
        with monkeypatch.context() as patch:
            for each in (operator, backward):
                patch.setattr(each, "_faster", {"cpu": getattr(kernels, each.name)})
                patch.setattr(each, "compute", each._by_device)
            got = with_gradient(x, options)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def with_gradient(x: Tensor, options: dict[str, Any]) -> list[Tensor]:
    leaf, tau = x.clone().requires_grad_(), torch.tensor([0.5, 0.9]).requires_grad_()
    p = khot.soft_permutation(leaf, tau=tau, **options)
    v = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    (dx, dtau) = torch.autograd.grad((p * v).sum(), (leaf, tau), create_graph=True)
    again = torch.autograd.grad(dx.square().sum() + dtau.square().sum(), (leaf, tau))
    return [p.detach(), dx.detach(), dtau.detach(), *again]
