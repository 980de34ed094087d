"""Rows of every kind for the kernels of the soft budget, and what they are to agree with the reference in."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

import oracles
from differences import far
from khot._kernels.reference import budget_mask as hard
from khot._kernels.reference import implicit
from khot._kernels.reference import soft_budget as reference

__all__ = [
    "CDFS",
    "GAP_EXAMPLES",
    "GAP_TAUS",
    "REFERENCE",
    "check_gap_gradients",
    "check_gap_shares",
    "check_gradients",
    "check_rows",
    "check_slack",
    "check_spend",
    "check_sums",
    "far",
    "gaps",
    "mask_share",
    "numbers",
    "soft_share",
    "sums",
    "table",
]

INF = math.inf
REFERENCE = SimpleNamespace(
    soft_budget=reference.soft_budget,
    soft_budget_backward=reference.soft_budget_backward,
    budget_mask=hard.budget_mask,
)
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
    # in the tail of a normal, NumPy's exponentials leave 1e-6 on some processors and 1.6e-6 on others
    sharp = 2e-6 if x.dtype == torch.float32 else 1e-12
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
        scale = torch.full_like(hi, tau)
        solved = implicit.Solved(
            x.double(), w.double(), hi, lo, scale, F, "y", by == "value", at_most, reference.rows.HERE
        )
        d = implicit.weigh(solved)
        a = torch.ones_like(d.z) if d.a is None else d.a
        edge = torch.minimum(d.z.abs(), (d.z - 1).abs()).amin(-1) < (
            1e-5 if x.dtype == torch.float32 else 1e-12
        )
        kinked = edge & (cdf in ("uniform", "power"))
        v = grad.double().abs()
        mass = (d.w * a * d.weight).sum(-1)
        price = (a * v * d.weight).sum(-1) / mass.where(mass > 0, 1)
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


# -------------------------------------------------------------------------------------- rounded budgets

PRICES = {
    "any": lambda n, g: torch.rand(n, generator=g, dtype=torch.float64),
    "six decades": lambda n, g: 10 ** (6 * torch.rand(n, generator=g, dtype=torch.float64) - 6),
    "tenths": lambda n, g: torch.full((n,), 0.1, dtype=torch.float64),
    "equal shares": lambda n, g: torch.full((n,), 1 / n, dtype=torch.float64),
    "softmax": lambda n, g: (3 * torch.randn(n, generator=g, dtype=torch.float64)).softmax(-1),
}


def sums(w: Tensor) -> dict[str, Tensor]:
    """The sum of costs as users add them in the costs' own dtype."""
    half = w.shape[-1] // 2
    found = {
        "at once": w.sum(-1),
        "from the end": w.flip(-1).sum(-1),
        "two halves": w[..., :half].sum(-1) + w[..., half:].sum(-1),
    }
    if w.dtype == torch.float64:
        found["one by one"] = torch.from_numpy(np.cumsum(w.numpy(), -1)[..., -1])
    return found


def soft_share(n: int, dtype: torch.dtype) -> float:
    """The share of n costs by which a soft budget may exceed them."""
    eps = torch.finfo(dtype).eps
    return 4 * eps + min(n * min(eps, 2.0**-23) / 2, 2.0**-10)


def mask_share(n: int, cost: torch.dtype, budget: torch.dtype) -> float:
    """The share of a hard budget by which it may be exceeded."""
    own = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(budget, 0.0)
    return max(own, (128 + n / 2) * 2.0**-52 if cost == torch.float64 else 2.0**-16)


def check_sums(kernels: Any, dtype: torch.dtype, n: int, seed: int) -> None:
    """A budget that is the sum of the costs pays for all of them, in whatever order they were added."""
    g = Generator().manual_seed(seed)
    for name, prices in PRICES.items():
        x, w = torch.randn(n, generator=g).to(dtype), prices(n, g).to(dtype)
        exact = math.fsum(w.tolist())
        budgets = dict(sums(w))
        if dtype == torch.float32:
            # a mask is promised sums by torch only
            budgets["one by one"] = torch.from_numpy(np.cumsum(w.numpy())[-1:])[0]
        for way, budget in budgets.items():
            what = name, way, n, budget.item() / exact - 1
            if way != "one by one" or dtype == torch.float64:
                assert kernels.budget_mask(x, w, budget).all(), what
            for by in ("score", "value"):
                y, hi, _ = kernels.soft_budget(x, w, budget, *numbers(1.0), "logistic", 0.0, by, False)
                assert not y.isnan().any() and not hi.isnan(), what
                assert budget.item() < exact * (1 - 1e-15) or (y == 1)[w > 0].all(), what


def check_slack(kernels: Any, dtype: torch.dtype, budget_dtype: torch.dtype, n: int) -> None:
    """What a budget may miss by, and no more: from each side of it."""
    w = torch.full((n,), 2.0**-3, dtype=dtype)
    x = torch.arange(n, 0, -1).to(dtype)
    rest = (*numbers(1.0), "uniform", 0.0, "score", False)
    for part, pays in ((0.8, True), (1.25, False)):
        budget = torch.tensor(n * 2.0**-3 * (1 + part * soft_share(n, dtype)), dtype=torch.float64)
        y = kernels.soft_budget(x, w, budget, *rest)[0]
        assert (y == 1).all() if pays else y.isnan().all()
        share = mask_share(n, dtype, budget_dtype)
        budget = torch.tensor(n * 2.0**-3 / (1 + part * share), dtype=torch.float64)
        if budget_dtype == torch.float64:
            assert kernels.budget_mask(x, w, budget).sum() == (n if pays else n - 1)
    if budget_dtype != torch.float64:  # one unit below, and two units below
        for units, pays in ((0.5, True), (2.0, False)):
            budget = torch.tensor(n * 2.0**-3 * (1 - units * torch.finfo(budget_dtype).eps))
            assert bool(kernels.budget_mask(x, w, budget.to(budget_dtype)).all()) == pays


# ------------------------------------------------------------------------------------------------- gaps

GAP_TAUS = (1e-6, 0.01, 1.0, 100.0)
GAP_SCORES = {
    "normal": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64),
    "wide": lambda n, g: 300 * torch.randn(n, generator=g, dtype=torch.float64),
    "tied levels": lambda n, g: torch.randint(-3, 4, (n,), generator=g).double(),
}
GAP_COSTS = {
    "twelve decades": COSTS["twelve decades"],
    "four decades": lambda n, g: 10 ** (4 * torch.rand(n, generator=g, dtype=torch.float64) - 2),
    "whole": lambda n, g: torch.randint(1, 10, (n,), generator=g).double(),
    "equal": COSTS["equal"],
}
# scores, costs, budget, τ: the step of Newton's method left the gap
GAP_EXAMPLES = (
    ((0.0, 2.0, 5.0), (5.0, 1.0, 10.0), 1.0, 0.01),
    ((1e6, 8.7, -10.0), (155438.0, 433952.0, 1e-4), 589390.0, 1.0),
    ((1.38, -1.04, -1.72), (72.0, 2.0**-12, 2.0**-17), 72 + 2.0**-12, 1e-20),
)


def gaps(
    n: int, dtype: torch.dtype, by: str, count: int = 24, exact: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose budget is the cost of their first entries, to the last digit or by one digit more or less.

    Args:
        exact: costs of few digits, whose sums are exact, over four decades at most; the budget is a sum.
    """
    g = Generator().manual_seed(n)
    narrow = exact or dtype in (torch.float16, torch.bfloat16)
    costs = [prices for name, prices in GAP_COSTS.items() if not (narrow and name == "twelve decades")]
    scores, rows, prices, budgets = list(GAP_SCORES.values()), [], [], []
    for i in range(count):
        w = costs[i % len(costs)](n, g)
        w = (w.bfloat16() if exact else w).to(dtype)
        tied = i % len(scores) == 2
        x = scores[i % len(scores)](n, g)
        x = (x * w.double() if tied and by == "value" else x).to(dtype)
        level = x.double() / (w.double() if by == "value" else 1)
        ordered = w.double()[level.argsort(descending=True, stable=True)].tolist()
        budget = math.fsum(ordered[: int(torch.randint(1, n, (), generator=g))])
        towards = (budget, math.inf, 0.0)[i // 2 % 3] if not exact else budget
        rows.append(x), prices.append(w), budgets.append(math.nextafter(budget, towards))
    return torch.stack(rows), torch.stack(prices), torch.tensor(budgets, dtype=torch.float64)


def check_spend(
    kernels: Any,
    x: Tensor,
    w: Tensor,
    budget: Tensor,
    tau: float | Tensor,
    cdf: str,
    by: str,
    at_most: bool = False,
) -> Tensor:
    """The spend is the budget, to a part of the greatest cost; the shares. tau: one number, or one a row."""
    tau = torch.as_tensor(tau, dtype=torch.float64)
    y = kernels.soft_budget(x, w, budget, tau, cdf, CDFS[cdf], by, at_most)[0]
    assert ((y >= 0) & (y <= 1)).all()
    w = w.double()
    dearest, missing = w.amax(-1), w.sum(-1) - budget
    sharp = 1e-12 if x.dtype == torch.float64 else 1e-6
    limit = sharp * torch.maximum(dearest, torch.minimum(budget, missing))
    limit = limit + x.shape[-1] * torch.finfo(x.dtype).eps / 2 * dearest
    over = (w * y.double()).sum(-1) - budget
    free = reference.cdfs.resolve(cdf, CDFS[cdf]).cdf(x.double() / tau.unsqueeze(-1))
    slack = at_most & ((w * free).sum(-1) <= budget)  # all that F(x/τ) asks for is paid
    assert (over <= limit).all() and (over >= -limit)[~slack].all(), (over / limit).tolist()
    return y


@functools.cache
def _shares(
    x: tuple[float, ...], w: tuple[float, ...], budget: float, tau: float, cdf: str, by: str, at_most: bool
) -> np.ndarray:
    return oracles.soft_budget(x, w, budget, tau, cdf, _power(cdf), by, at_most)[0]


def _power(cdf: str) -> float | None:
    return CDFS[cdf] if cdf == "power" else None


def check_gap_shares(
    kernels: Any, x: Tensor, w: Tensor, budget: Tensor, tau: float, cdf: str, by: str, at_most: bool = False
) -> None:
    """Every share is that of the 50-digit oracle."""
    y = check_spend(kernels, x, w, budget, tau, cdf, by, at_most).double()
    limit = 1e-12 if x.dtype == torch.float64 else 5e-7
    for i in range(len(x)):
        row = tuple(x[i].tolist()), tuple(w[i].tolist()), budget[i].item()
        want = torch.from_numpy(_shares(*row, tau, cdf, by, at_most))
        assert (far(y[i], want) <= limit).all(), (row, tau, cdf, by, y[i].tolist(), want.tolist())


@functools.cache
def _grads(
    x: tuple[float, ...],
    w: tuple[float, ...],
    budget: float,
    tau: float,
    cdf: str,
    v: tuple[float, ...],
    by: str,
) -> tuple[Any, ...]:
    t = oracles.soft_budget(x, w, budget, tau, cdf, _power(cdf), by)[1]
    signed = oracles.soft_budget_grad(x, w, budget, tau, cdf, v, _power(cdf), by)
    sizes = oracles.soft_budget_grad(x, w, budget, tau, cdf, tuple(map(abs, v)), _power(cdf), by)
    return t, signed, sizes


def check_gap_gradients(
    kernels: Any, x: Tensor, w: Tensor, budget: Tensor, tau: float, cdf: str, by: str
) -> None:
    """The gradients of a sum of shares are those of the 50-digit oracle."""
    g = Generator().manual_seed(1)
    v = torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)
    rest = (*numbers(tau), cdf, CDFS[cdf], by, False)
    _, hi, lo = kernels.soft_budget(x, w, budget, *rest)
    got = kernels.soft_budget_backward(v, torch.zeros_like(hi), x, w, hi, lo, *rest)
    relative = 1e-10 if x.dtype == torch.float64 else 1e-5
    for i in range(len(x)):
        row = tuple(x[i].tolist()), tuple(w[i].tolist()), budget[i].item()
        t, want, sizes = _grads(*row, tau, cdf, tuple(v[i].tolist()), by)
        price = torch.tensor(sizes[2], dtype=torch.float64)  # the mean of abs(v)
        wide = w[i].double()
        z = (x[i].double() - t * (wide if by == "value" else 1)) / tau
        F = reference.cdfs.resolve(cdf, CDFS[cdf])
        if not F.full_support and torch.minimum(z.abs(), (z - 1).abs()).amin() < 1e-9:
            continue  # a kink
        # the logarithms of densities have this many digits before the point
        depth = (z.square() if cdf == "normal" else z.abs()).amin()
        limit = relative + 16 * torch.finfo(torch.float64).eps * depth
        unit = F.pdf(z) * (v[i].double().abs() + wide * price) / tau
        z = z.abs().clamp(min=1e-12)  # its accuracy where y has 12 digits
        t_unit = abs(t) * unit if by == "value" else 0 * unit
        units = (unit, price + t_unit, price, (unit * z).sum())
        for name, a, b, size in zip(("dx", "dw", "dB", "dtau"), got, want, units, strict=True):
            error = far(a[i], torch.as_tensor(b, dtype=torch.float64))
            assert (error <= limit * size + 1e-30).all(), (name, row, tau, cdf, by, a[i].tolist(), b)
