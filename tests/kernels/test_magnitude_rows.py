"""Top-k in magnitude by a search in float, against the reference kernels in float64.

Values, which are rounded once, and gradients, of rows of every kind and length.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import khot
from drawn import floats
from khot._kernels.reference import magnitude as reference
from oracles import ADVERSARIAL

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
P = [2.0, 4 / 3]

each_p = pytest.mark.parametrize("p", P, ids=["p2", "p4/3"])
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=[str(d)[6:] for d in FLOATS])


def assert_as_reference(x: Tensor, k: Tensor, tau: Tensor, p: float) -> None:
    """y is rounded once from float64, γ has 11 digits, and gradients those of the dtype."""
    eps, tiny = torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny * torch.finfo(x.dtype).eps
    rest = (k.double(), tau.double(), p)
    y, hi, lo = torch.ops.khot.soft_topk_magnitude(x, *rest, True)
    want, want_hi, want_lo = reference.soft_topk_magnitude(x.double(), *rest, True)
    size = want.abs().nan_to_num(0, 0, 0)
    assert torch.equal(y.isnan(), want.isnan())
    error = (y.double() - want.to(x.dtype).double().where(want.to(x.dtype).isinf(), want)).abs()
    allowed = (0.51 * eps + 1e-11 / (p - 1)) * size + tiny + 1e-13 * size.amax(-1, True)
    assert (error.nan_to_num(0, 0, 0) <= allowed).all()
    assert ((y.signbit() == x.signbit()) | (y == 0) | y.isnan()).all()
    gamma, want_gamma = hi + lo, want_hi + want_lo
    clear = want_gamma.abs() < 1e300
    assert torch.equal(clear, gamma.abs() < 1e300)
    assert ((gamma - want_gamma).abs() <= 1e-11 * want_gamma.abs() + 1e-300)[clear].all()

    v = floats(*x.shape, seed=3).to(x.dtype)
    zero = torch.zeros_like(want_hi)
    given = (k.double(), want_hi, want_lo, tau.double(), p, True)
    got = torch.ops.khot.soft_topk_magnitude_backward(v, zero, x, want.to(x.dtype), *given)
    true = reference.soft_topk_magnitude_backward(
        v.double(), zero, x.double(), want.to(x.dtype).double(), *given
    )
    scale = true[0].abs().nan_to_num(0, 0, 0)
    least = torch.finfo(x.dtype).tiny
    assert torch.equal(got[0].isnan(), true[0].isnan())
    error = (got[0].double() - true[0]).abs().nan_to_num(0, 0, 0)
    assert (error <= (1e-9 + 2 * eps) * scale.amax(-1, True) + least).all()
    error = (got[1] - true[1]).abs().nan_to_num(0, 0, 0)
    fall = (v.double() * want.abs() ** (p - 1)).abs().nan_to_num(0, 0, 0)  # of y, which is rounded
    size = true[1].abs().nan_to_num(0, 0, 0) + scale.sum(-1) + fall.sum(-1)
    assert (error <= (1e-9 + 2 * eps) * size + least).all()


@pytest.mark.parametrize("first", [0, 2])
@each_p
def test_rows_of_every_length(p: float, first: int) -> None:
    """Rows of 1 to 70 entries: a group of lanes and rows that are left over, and k up to both of its ends."""
    for n in range(1, 71):
        tau = (1e-3, 0.1, 1.0, 30.0, 1e3)[(first + n) % 5]  # each beside every number of lanes that are left
        x = floats(19, n, seed=n)
        x[0] = x[0].round()
        x[1] = 0.75
        x[2, ::2] = 0
        k = torch.arange(19) % (n + 1)
        assert_as_reference(x, k, torch.tensor(tau), p)


@each_p
def test_rows_that_are_left_to_the_other_solver(p: float) -> None:
    """In one group with rows that are not: a NaN, infinite entries, k or tau out of range."""
    x = floats(32, 64)
    x[3, 5], x[4, 7], x[5, :3] = math.nan, math.inf, -math.inf
    x[6] *= 1e30
    x[7] *= 1e-30
    k, tau = torch.full((32,), 8.0), torch.ones(32)
    k[8], k[9], k[10], k[11] = -1, 65, 2.5, math.nan
    tau[12], tau[13], tau[14], tau[15] = 0, math.inf, 1e-20, 1e20
    assert_as_reference(x, k, tau, p)


@pytest.mark.parametrize("kind", ["normal_1", "cauchy", "lognormal", "ties", "outlier"])
@each_p
def test_long_rows(p: float, kind: str) -> None:
    """The first guess comes from a sample of the row."""
    n = 70_001
    x = ADVERSARIAL[kind](n, torch.Generator().manual_seed(1)).float().expand(3, n)
    assert_as_reference(x, torch.tensor([5, 700, n // 2]), torch.tensor(0.3), p)
    if kind == "normal_1":
        assert_as_reference(x.bfloat16(), torch.tensor([5, 700, n // 2]), torch.tensor(1e-3), p)


@each_p
def test_infinite_and_missing_entries_of_long_rows(p: float) -> None:
    """They are not in the sample."""
    x = floats(3, 70_001)
    x[0, 69_000], x[1, 69_000] = math.inf, math.nan
    assert_as_reference(x, torch.tensor(700), torch.tensor(1.0), p)


@each_float
@each_p
def test_gradients_are_those_of_a_row_by_itself(p: float, dtype: torch.dtype) -> None:
    """Short rows are taken together, and their incoming gradients may be expanded."""
    for n in (1, 4, 8, 16, 33, 64, 65):
        x, tau = floats(37, n).to(dtype), torch.linspace(0.1, 2, 37).requires_grad_()
        k = torch.arange(37) % n + 1
        leaf = x.clone().requires_grad_()
        y = khot.soft_topk_magnitude(leaf, k, tau=tau, p=p)
        for v in (floats(37, n, seed=1).to(dtype), torch.ones(37, 1, dtype=dtype).expand(37, n)):
            together = torch.autograd.grad(y, (leaf, tau), v, retain_graph=True)
            for i in (0, 20, 36):
                row, own_tau = x[i].clone().requires_grad_(), tau[i].detach().requires_grad_()
                alone = khot.soft_topk_magnitude(row, k[i], tau=own_tau, p=p)
                grads = torch.autograd.grad(alone, (row, own_tau), v[i])
                assert torch.equal(alone, y[i]) and torch.equal(grads[0], together[0][i])
                torch.testing.assert_close(grads[1], together[1][i], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("k", "most"), [((0.0, 51.0, 7.5, 0.0), 0), ((0.0, 1.0, 5.0, 45.0), 10)])
@pytest.mark.parametrize("tau", [0.01, 1.0, 30.0])
@each_p
def test_passes_of_the_reference(
    p: float, tau: float, k: tuple[float, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None where k is 0 or out of range, as no γ is searched; at most ten of ordinary rows beside these."""
    passes: list[Tensor] = []
    guarded = getattr(reference, "guarded")  # noqa: B009

    def counting(trial: Tensor, *rest: Tensor) -> Tensor:
        passes.append(trial)
        return guarded(trial, *rest)

    monkeypatch.setattr(reference, "guarded", counting)
    x, taus = floats(4, 50).double(), torch.full((4,), tau, dtype=torch.float64)
    reference.soft_topk_magnitude(x, torch.tensor(k, dtype=torch.float64), taus, p, True)
    assert len(passes) <= most
