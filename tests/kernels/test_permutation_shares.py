"""The shares of the places between thresholds, and their gradients, against F written out in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from khot import cdfs
from khot._core.precision import greatest
from khot._kernels.reference import permutation as reference

INF, NAN = math.inf, math.nan
CDFS = [
    ("logistic", 0.0),
    ("laplace", 0.0),
    ("normal", 0.0),
    ("uniform", 0.0),
    ("power", 4 / 3),
    ("power", 3.0),
]
# twice what each of the two F may be off by
LIMITS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
#: The last length is two blocks and a part of one, which neither the CDF nor the dtype changes.
CASES = [
    (*key, dtype, n)
    for (i, key), (j, dtype) in itertools.product(enumerate(CDFS), enumerate(LIMITS))
    for n in ((1, 2, 3, 40, 700) if i % 4 == j else (1, 2, 3, 40))
]
every_case = pytest.mark.parametrize(("cdf", "shape", "dtype", "n"), CASES, ids=lambda v: str(v)[:14])


def ends(t: Tensor) -> tuple[Tensor, Tensor]:
    """Falling thresholds between +inf and −inf, as pairs whose second half counts."""
    hi = t.float().double()
    end = hi.new_full((*hi.shape[:-1], 1), greatest(hi))
    zero = torch.zeros_like(end)
    return torch.cat((end, hi, -end), -1), torch.cat((zero, t - hi, zero), -1)


def rows(n: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, hi, lo and τ of six rows: at three temperatures, near 0 and near 100."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(6, n, generator=g, dtype=torch.float64)
    t = torch.randn(6, n - 1, generator=g, dtype=torch.float64).sort(-1, descending=True).values
    x, t = (
        x + 100 * torch.tensor([0, 0, 0, 1, 1, 1])[:, None],
        t + 100 * torch.tensor([0, 0, 0, 1, 1, 1])[:, None],
    )
    tau = torch.tensor([1.0, 0.05, 30.0] * 2, dtype=torch.float64)
    return x.to(dtype), *ends(t), tau


def standardized(x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor) -> Tensor:
    """At the thresholds within."""
    return (x.double().unsqueeze(-2) - (hi + lo)[..., 1:-1, None]) / tau[..., None, None]


def written_out(x: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, F: cdfs.CDF) -> Tensor:
    y = F.cdf(standardized(x, hi, lo, tau))
    none = torch.zeros_like(x.double()).unsqueeze(-2)
    return torch.cat((none, y, none + 1), -2).diff(dim=-2)


def op(*args: object) -> Tensor:
    p: Tensor = torch.ops.khot.permutation_shares(*args)
    return p


@every_case
def test_values(cdf: str, shape: float, dtype: torch.dtype, n: int) -> None:
    x, hi, lo, tau = rows(n, dtype)
    p = op(x, hi, lo, tau, cdf, shape)
    assert p.shape == (6, n, n) and p.dtype == dtype
    want = written_out(x, hi, lo, tau, cdfs.resolve(cdf, shape))
    slack = 40 if dtype == torch.float64 else 1  # F at x − t of 1e-16·100/0.05
    assert ((p.double() - want).abs() <= slack * LIMITS[dtype]).all()


@every_case
def test_gradients(cdf: str, shape: float, dtype: torch.dtype, n: int) -> None:
    x, hi, lo, tau = rows(n, dtype)
    g = torch.randn(6, n, n, generator=torch.Generator().manual_seed(1)).to(dtype)
    dx, dlo, dtau = torch.ops.khot.permutation_shares_backward(g, x, hi, lo, tau, cdf, shape)
    assert dx.dtype == dtype and dlo.dtype == dtau.dtype == torch.float64
    z = standardized(x, hi, lo, tau)
    along = -g.double().diff(dim=-2) * cdfs.resolve(cdf, shape).pdf(z) / tau[:, None, None]
    size = along.abs()
    fine = 1e-12 if dtype == torch.float64 else 3e-6
    coarse = max(fine, LIMITS[dtype])  # dx is rounded to the dtype
    assert ((dx.double() - along.sum(-2)).abs() <= coarse * (size.sum(-2) + 1e-3)).all()
    assert ((dlo[:, 1:-1] + along.sum(-1)).abs() <= fine * (size.sum(-1) + 1e-3)).all()
    assert not dlo[:, [0, -1]].any()
    turned = (along * z).sum((-2, -1))
    assert ((dtau + turned).abs() <= fine * ((size * z.abs()).sum((-2, -1)) + 1e-3)).all()


def test_infinite_entries_and_thresholds_move_nothing() -> None:
    x, hi, lo, tau = rows(40, torch.float32)
    x[0, 3], x[1, 4] = INF, -INF
    hi[2, 1:4], lo[2, 1:4] = greatest(hi), 0
    hi[3, -3:-1], lo[3, -3:-1] = -greatest(hi), 0
    g = torch.randn(6, 40, 40, generator=torch.Generator().manual_seed(1))
    p = op(x, hi, lo, tau, "normal", 0.0)
    dx, dlo, dtau = torch.ops.khot.permutation_shares_backward(g, x, hi, lo, tau, "normal", 0.0)
    assert torch.isfinite(dx).all() and torch.isfinite(dlo).all() and torch.isfinite(dtau).all()
    assert dx[0, 3] == dx[1, 4] == 0 and not dlo[2, :4].any() and not dlo[3, -3:].any()
    assert not p[2, :3].any() and not p[3, -2:].any()  # between two ends there is nothing
    assert (p.sum(-2)[2:] - 1).abs().max() < 1e-6
    assert (dx[0, :3] != 0).any() and dlo[2, 4:-1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_float_does_not_carry(dtype: torch.dtype) -> None:
    """Temperatures and scores at the ends of float32."""
    for scale in (1e-32, 1e-27, 1e27, 1e32):
        x, hi, lo, tau = rows(30, torch.float64)
        want = op(x, hi, lo, tau, "laplace", 0.0)
        exact = (scale * x).to(dtype)
        t = ends(scale * (hi + lo)[:, 1:-1])
        p = op(exact, *t, scale * tau, "laplace", 0.0)
        off = 1e-11 if dtype == torch.float64 else 2e-4  # x is rounded, by 1e-5 at 100 where τ is 0.05
        assert ((p.double() - want).abs() <= off).all()


def test_derivatives_of_the_rule() -> None:
    """Reverse and forward mode, and both of the reverse."""
    x, hi, lo, tau = rows(6, torch.float64)
    x, hi, lo, tau = x[:2], hi[:2], lo[:2], tau[:2]
    from khot._ops.permutation_shares import shares

    for name in ("logistic", "normal"):
        F = cdfs.resolve(name)
        leaves = [t.clone().requires_grad_() for t in (x, lo, tau)]
        torch.autograd.gradcheck(
            lambda x, lo, tau, F=F: shares(x, hi, lo, tau, F), leaves, check_forward_ad=True
        )
        torch.autograd.gradgradcheck(lambda x, lo, tau, F=F: shares(x, hi, lo, tau, F), leaves)


def test_the_reference_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, hi, lo, tau = rows(30, torch.float64)
    g = torch.randn(6, 30, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = (x, hi, lo, tau, "normal", 0.0)
    whole = reference.permutation_shares(*given), *reference.permutation_shares_backward(g, *given)
    monkeypatch.setattr(reference, "AT_ONCE", 6 * 30 * 4)
    parts = reference.permutation_shares(*given), *reference.permutation_shares_backward(g, *given)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
