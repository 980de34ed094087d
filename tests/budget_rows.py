"""Rows of every kind for the kernels of the soft budget, and what they are to agree with the reference in."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Generator, Tensor

from khot._kernels.reference import soft_budget as reference

__all__ = ["CDFS", "check_gradients", "check_rows", "far", "numbers", "table"]

INF = math.inf
CDFS = {"logistic": 0.0, "laplace": 0.0, "normal": 0.0, "uniform": 0.0, "power": 4 / 3}

SCORES = {
    "normal": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64),
    "wide": lambda n, g: 300 * torch.randn(n, generator=g, dtype=torch.float64),
    "Cauchy": lambda n, g: torch.empty(n, dtype=torch.float64).cauchy_(generator=g).clamp(-1e30, 1e30),
    "ties": lambda n, g: torch.randint(0, 4, (n,), generator=g).double(),
    "equal": lambda n, g: torch.full((n,), 0.3, dtype=torch.float64),
    "masked": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64).masked_fill(
        torch.arange(n) % 3 == 1, -INF
    ),
    "certain": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64).masked_fill(
        torch.arange(n) % 17 == 5, INF
    ),
}
COSTS = {
    "equal": lambda n, g: torch.full((n,), 2.0, dtype=torch.float64),
    "exponential": lambda n, g: torch.empty(n, dtype=torch.float64).exponential_(generator=g) + 1e-3,
    "twelve decades": lambda n, g: 10 ** (12 * torch.rand(n, generator=g, dtype=torch.float64) - 6),
    "some free": lambda n, g: torch.rand(n, generator=g, dtype=torch.float64).masked_fill(
        torch.arange(n) % 5 == 2, 0
    ),
    "one dear": lambda n, g: torch.rand(n, generator=g, dtype=torch.float64).index_fill(
        0, torch.tensor([n // 2]), 1e9
    ),
}
SHARES = (0.0, 1e-6, 0.3, 0.9, 1.0)


def table(n: int, dtype: torch.dtype, shares: tuple[float, ...] = SHARES) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of all scores with all costs and all budgets."""
    rows, costs, budgets = [], [], []
    for scores in SCORES.values():
        for prices in COSTS.values():
            g = Generator().manual_seed(n)
            x, w = scores(n, g).to(dtype), prices(n, g).to(dtype)
            total, pinned = w[x > -INF].double().sum(), w[x == INF].double().sum()
            for share in shares:
                rows.append(x), costs.append(w), budgets.append(pinned + share * (total - pinned))
    return torch.stack(rows), torch.stack(costs), torch.stack(budgets)


def numbers(*values: float) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(value, dtype=torch.float64) for value in values)


def far(got: Tensor, want: Tensor) -> Tensor:
    same = (got == want) | (got.isnan() & want.isnan())
    return (got.double() - want.double()).abs().masked_fill(same, 0).nan_to_num(nan=INF)


def check_rows(
    kernels: Any, x: Tensor, w: Tensor, budget: Tensor, tau: float, cdf: str, by: str, at_most: bool
) -> None:
    """The shares, and what they spend."""
    rest = (*numbers(tau), cdf, CDFS[cdf], by, at_most)
    y, hi, lo = kernels.soft_budget(x, w, budget, *rest)
    want, want_hi, want_lo = reference.soft_budget(x.double(), w.double(), budget, *rest)
    assert torch.equal(hi.isnan(), want_hi.isnan())
    assert ((y.nan_to_num() >= 0) & (y.nan_to_num() <= 1)).all()
    bound = hi.abs() < 1e308 if not at_most else (hi.abs() < 1e308) & ((hi != 0) | (lo != 0))
    paid = w.double().masked_fill(x == -INF, 0)
    spent = (paid * y.double()).sum(-1)
    sharp = 1e-6 if x.dtype == torch.float32 else 1e-12
    assert ((spent - budget).abs() <= sharp * budget)[bound].all()
    # every y, but where small costs alone decide the spend, as the budget then does not determine them
    z = reference._position(x.double(), w.double(), want_hi, want_lo, torch.full_like(hi, tau), by == "value")
    a = paid if by == "value" else (paid > 0).double()
    f = reference.cdfs.resolve(cdf, CDFS[cdf]).pdf(z).nan_to_num(nan=0)
    steep = (f * a).amax(-1) / (paid * a * f).sum(-1).clamp(min=1e-300)
    unclear = 8 * torch.finfo(torch.float64).eps * budget * steep
    limit = (5e-7 if x.dtype == torch.float32 else 1e-12) + unclear
    excess = far(y, want).amax(-1) / limit
    # whether a sum of all costs equals the budget is a matter of the order of its terms
    sure = (unclear < 1e-4) & (hi.abs() > 1e300).eq(want_hi.abs() > 1e300)
    assert (excess <= 1)[sure].all()


def check_gradients(
    kernels: Any, x: Tensor, w: Tensor, budget: Tensor, tau: float, cdf: str, by: str, at_most: bool
) -> None:
    g = Generator().manual_seed(1)
    grad = torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)
    F = reference.cdfs.resolve(cdf, CDFS[cdf])
    rest = (*numbers(tau), cdf, CDFS[cdf], by, at_most)
    _, hi, lo = kernels.soft_budget(x, w, budget, *rest)
    for grad_lo in (torch.zeros_like(hi), torch.randn(hi.shape, generator=g, dtype=torch.float64)):
        given = (grad, grad_lo, x, w, hi, lo, *rest)
        got = kernels.soft_budget_backward(*given)
        true = reference.soft_budget_backward(grad.double(), grad_lo, x.double(), w.double(), hi, lo, *rest)
        relative = 1e-5 if x.dtype == torch.float32 else 1e-10
        # the terms of a sum may cancel, so that errors are relative to their sizes
        d = reference.weigh(
            x.double(),
            w.double(),
            hi,
            lo,
            torch.tensor(tau),
            F,
            by == "value",
            at_most,
            reference.rows.HERE,
        )
        edge = torch.minimum(d.z.abs(), (d.z - 1).abs()).amin(-1) < (
            1e-5 if x.dtype == torch.float32 else 1e-12
        )
        kinked = edge & (cdf in ("uniform", "power"))
        v = grad.double().abs()
        mass = (d.w * d.a * d.weight).sum(-1)
        price = (d.a * v * d.weight).sum(-1) / mass.where(mass > 0, 1)
        cheapest = d.w.masked_fill(d.w == 0, INF).amin(-1)
        price = price.where(mass > 0, v.amax(-1) / cheapest) + true[2].abs().nan_to_num(0, 0, 0)
        dx = d.rate * (v + d.w * price.unsqueeze(-1)) / tau
        dx = dx + d.w * d.weight * (grad_lo.abs() / mass.where(mass > 0, 1)).unsqueeze(-1)
        t = (hi + lo).masked_fill(hi.abs() > 1e300, 0).abs() if by == "value" else torch.zeros_like(hi)
        units = (
            dx.amax(-1, True) + 1e-30,
            (price + t * dx.amax(-1)).unsqueeze(-1) + 1e-30,
            price + 1e-30,
            (dx * d.z.abs()).sum(-1) + 1e-30,
        )
        for name, a, b, unit in zip(("dx", "dw", "dB", "dtau"), got, true, units, strict=True):
            fits = ~b.to(a.dtype).isinf()  # a finite gradient of float64 may be infinite in float32
            excess = ((far(a, b) / (relative * unit)).masked_fill(~fits, 0)).reshape(len(x), -1).amax(-1)
            assert (excess <= 1)[~kinked].all(), name
