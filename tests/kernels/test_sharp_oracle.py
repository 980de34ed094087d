"""Soft top-ks of sharp rows on the CPU, whose scores spread far beyond tau, against float64 answers by
bisection, in which the tails on both sides and the weights of the gradients are kept as logarithms."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

import khot

pytest.importorskip("scipy")
from scipy.special import erfcx, log_ndtr

Array = NDArray[np.float64]
CDFS = ("logistic", "laplace", "normal", "uniform", khot.cdfs.Power(1.5), khot.cdfs.Power(4 / 3))
KINDS = (
    "normal",
    "uniform",
    "Cauchy",
    "ties",
    "two clusters",
    "outlier",
    "equally spaced",
    "gap",
    "masked",
    "pinned",
    "bad row",
    "offset",
)
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)


def logs(cdf: Any, z: Array) -> tuple[Array, Array, Array]:
    """log F, log(1 - F) and log f."""
    if cdf == "logistic":
        a, b = -np.logaddexp(0, -z), -np.logaddexp(0, z)
        return a, b, a + b
    if cdf == "laplace":
        density = -np.abs(z) - np.log(2)
        other = np.log1p(-np.exp(density))
        return np.where(z < 0, density, other), np.where(z < 0, other, density), density
    if cdf == "normal":
        return log_ndtr(z), log_ndtr(-z), -0.5 * z * z - 0.5 * np.log(2 * np.pi)
    power = 1.0 if cdf == "uniform" else round(1 / (cdf.shape - 1))
    inside = np.clip(z, 0, 1)
    within = (z > 0) & (z < 1)
    return (
        power * np.log(inside),
        np.log1p(-(inside**power)),
        np.where(within, np.log(power) + (power - 1) * np.log(inside), -np.inf),
    )


def log_sum(a: Array) -> Array:
    top = a.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    return np.log(np.exp(a - top).sum(-1)) + top[:, 0]


@dataclass
class Logarithms:
    """log y with its gradients."""

    y: Array
    dx: Array
    dk: Array
    dtau: Array
    pulls: Array  # the size of v f/F, of which dx is made
    reach: Array  # of the terms of dtau
    mass: Array  # the logarithm of the sum of f


@dataclass
class Answer:
    y: Array
    dx: Array
    dk: Array
    dtau: Array
    size: Array  # of the terms of dx before these cancel
    reach: Array  # of those of dtau
    digits: Array  # how far the weights of float64 may be off here
    safe: Array  # whether no entry is at a kink
    log: Logarithms


def answer(x: Array, k: Array, tau: Array, cdf: Any, v: Array) -> Answer:
    """Of rows without NaN whose k is strictly between the number of +inf entries and that of the others."""
    batch = x.shape[0]
    order = np.pad(-np.sort(-x, axis=-1), ((0, 0), (0, 1)), constant_values=-np.inf)
    first = np.take_along_axis(order, np.ceil(k).astype(int)[:, None] - 1, -1)
    after = np.take_along_axis(order, np.ceil(k).astype(int)[:, None], -1)
    origin = np.where(np.isfinite(first), first, after)
    from_origin = x - origin
    finite = np.where(np.isfinite(from_origin), from_origin, np.nan)
    with np.errstate(all="ignore"):
        reach = np.maximum(np.nanmax(np.abs(finite), -1), 0) + 80 * tau
        ends = []
        for closed in (False, True):
            low, high = -reach, reach.copy()
            for _ in range(120):
                t = 0.5 * (low + high)
                less = compare(from_origin, t, k, tau, cdf)
                higher = less > 0 if not closed else less >= 0
                low, high = np.where(higher, t, low), np.where(higher, high, t)
            ends.append(0.5 * (low + high))
        t = 0.5 * (ends[0] + ends[1])
        z = (from_origin - t[:, None]) / tau[:, None]
        log_y, _, log_f = logs(cdf, z)
        log_f = np.where(np.isfinite(x), log_f, -np.inf)
        total = log_sum(log_f)
        empty = ~np.isfinite(total)
        weights = np.where(empty[:, None], 0, np.exp(log_f - np.where(empty, 0, total)[:, None]))
        f = np.exp(log_f)
    held = np.where(np.isfinite(z), z, 0)
    v_mean = (weights * v).sum(-1)
    # In a gap of compact support each side has the mean over the entries that are equal there.
    sides = [np.take_along_axis(order, np.round(k).astype(int)[:, None] - 1 + i, -1) for i in (0, 1)]
    beside = sum(0.5 * (v * (x == side)).sum(-1) / np.maximum((x == side).sum(-1), 1) for side in sides)
    v_mean = np.where(empty, beside, v_mean)
    z_mean = (weights * held).sum(-1)
    dx = f * (v - v_mean[:, None]) / tau[:, None]
    most = np.abs(v).max(-1)
    near_kink = np.abs(held * (1 - held)).min(-1) if cdf not in CDFS[:3] else np.ones(batch)
    with np.errstate(all="ignore"):
        # of f and F as logarithms the normal CDF's tail has no digits
        hazard = np.sqrt(2 / np.pi) / erfcx(-z / np.sqrt(2)) if cdf == "normal" else np.exp(log_f - log_y)
        u = np.where(np.isfinite(x), v * hazard, 0)
        total_u = u.sum(-1)
        by_log = Logarithms(
            log_y,
            (u - weights * total_u[:, None]) / tau[:, None],
            total_u / np.exp(total),
            (total_u * z_mean - (u * held).sum(-1)) / tau,
            np.abs(u).sum(-1),
            (np.abs(u) * (1 + np.abs(held) + np.abs(z_mean)[:, None])).sum(-1) / tau,
            total,
        )
    return Answer(
        np.exp(log_y),
        dx,
        v_mean,
        -(f * (held - z_mean[:, None]) * (v - v_mean[:, None])).sum(-1) / tau,
        f.max(-1) * most / tau,
        (f * (1 + np.abs(held) + np.abs(z_mean)[:, None])).sum(-1) * most / tau,
        1e-15 * np.abs(np.where(np.isfinite(z), z, np.inf)).min(-1) ** (2 if cdf == "normal" else 1),
        (near_kink > 1e-4) & ~(empty & (k != np.round(k))),
        by_log,
    )


def compare(from_origin: Array, t: Array, k: Array, tau: Array, cdf: Any) -> Array:
    """The sign of C(t) - k, from the small tails on both sides."""
    z = (from_origin - t[:, None]) / tau[:, None]
    log_cdf, log_sf, _ = logs(cdf, z)
    above = log_cdf > log_sf
    surplus = above.sum(-1) - k
    with np.errstate(all="ignore"):
        plus = np.logaddexp(log_sum(np.where(above, -np.inf, log_cdf)), np.log(np.maximum(surplus, 0)))
        minus = np.logaddexp(log_sum(np.where(above, log_sf, -np.inf)), np.log(np.maximum(-surplus, 0)))
    return np.where(plus == minus, 0, np.where(plus > minus, 1, -1))


@dataclass
class Case:
    x: Tensor
    k: Tensor
    tau: Tensor
    cdf: Any
    v: Tensor
    bad: list[int]

    def alone(self) -> bool:
        return bool((self.k == self.k[0]).all() and (self.tau == self.tau[0]).all())


def drawn(kind: str, seed: int) -> Case:
    draw = random.Random(f"{kind} {seed}")
    g = Generator().manual_seed(draw.randrange(1 << 30))
    short = draw.random() < 0.8
    n = draw.choice([2, 3, 255, 256, draw.randint(2, 256), draw.randint(2, 40)]) if short else 0
    n = n or draw.choice([257, 1_000, 4_096, draw.randint(257, 4_096)])
    batch = draw.choice([1, 16, 32, 64, draw.randint(1, 70)]) if short else draw.randint(1, 6)
    dtype = draw.choice(DTYPES)
    x = torch.randn(batch, n, generator=g, dtype=torch.float64)
    if kind == "uniform":
        x = torch.rand(batch, n, generator=g, dtype=torch.float64)
    elif kind == "Cauchy":
        x = x / torch.randn(batch, n, generator=g, dtype=torch.float64)
    elif kind == "ties":
        x = (2 * x).round() / 2
    elif kind == "two clusters":
        x = 0.1 * x + 10 * (torch.rand(batch, n, generator=g) < draw.random())
    elif kind == "outlier":
        x[:, draw.randrange(n)] = draw.choice([1e3, -1e3])
    elif kind == "equally spaced":
        x = torch.linspace(0, 1, n, dtype=torch.float64)[torch.rand(batch, n, generator=g).argsort(-1)]
    elif kind == "gap":
        x = x + draw.choice([5, 100]) * (x > 0)
    elif kind == "masked":
        out = torch.rand(batch, n, generator=g) < draw.choice([0.3, 0.6, 0.95])
        out[:, :2] = False
        x = x.masked_fill(out, -torch.inf)
    elif kind == "offset":
        x = x + 1e4
    spread = 1.0 if kind != "uniform" else 0.3
    x = x.to(dtype)
    pinned = 0
    if kind == "pinned" and n > 3:
        pinned = draw.randint(1, min(3, n - 2))
        x[:, torch.randperm(n, generator=g)[:pinned]] = torch.inf
    finite = (x > -torch.inf).sum(-1).tolist()

    def rank(most: int) -> float:
        whole = draw.randint(pinned + 1, max(pinned + 1, most - 1))
        near_gap = int((x[0] > 2.5).sum())
        value = draw.choice(
            [
                whole,
                whole,
                whole - 0.5,
                whole + draw.choice([1e-3, -1e-3, 1e-5, -1e-5]),
                draw.uniform(pinned + 0.5, most - 0.5),
                pinned + 0.5,
                most - 0.5,
                most - 1,
                near_gap,
            ]
        )
        return min(max(value, pinned + 0.25), most - 0.25)

    least = min(finite)
    k = [rank(least)] * batch if draw.random() < 0.5 else [rank(each) for each in finite]
    tau = [spread * 10 ** draw.uniform(-6, 1)] * batch
    if draw.random() < 0.3:
        tau = [spread * 10 ** draw.uniform(-6, 1) for _ in range(batch)]
    bad = [draw.randrange(batch)] if kind == "bad row" else []
    for row in bad:
        x[row, draw.randrange(n)] = torch.nan
    return Case(
        x,
        torch.tensor(k, dtype=torch.float32).double(),
        torch.tensor(tau, dtype=torch.float32).double(),
        draw.choice(CDFS),
        torch.randn(batch, n, generator=g).to(dtype),
        bad,
    )


def solved(case: Case, plain: bool, operator: Any = khot.soft_topk) -> list[Tensor]:
    leaf = case.x.clone().requires_grad_()
    if plain:
        y = operator(leaf, case.k[0].item(), tau=case.tau[0].item(), cdf=case.cdf)
        return [y.detach(), *torch.autograd.grad(y, leaf, case.v)]
    k, tau = case.k.clone().requires_grad_(), case.tau.clone().requires_grad_()
    y = operator(leaf, k, tau=tau, cdf=case.cdf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, k, tau], case.v)]


def faults(case: Case) -> list[str]:
    """What is wrong with the answers of a case, by name and row."""
    n, found = case.x.shape[-1], []
    good = np.array([row not in case.bad for row in range(case.x.shape[0])])
    rows = torch.from_numpy(np.flatnonzero(good))
    x, k, tau, v = (each[rows].double().numpy() for each in (case.x, case.k, case.tau, case.v))
    wanted = answer(x, k, tau, case.cdf, v) if len(rows) else None
    eps = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}.get(case.x.dtype, 0)
    tiny = 1e-7 if case.x.dtype == torch.float16 else 1e-37
    # of what float32 is allowed
    part = 1e-6 if case.x.dtype == torch.float64 else 1
    # gradients beyond float16 overflow
    most = torch.finfo(case.x.dtype).max

    def check(way: str, name: str, error: Array, bound: Array) -> None:
        over = ~(error <= bound)
        over = over.any(-1) if over.ndim > 1 else over
        for row in np.flatnonzero(over):
            found.append(f"{way} {name} row {rows[row]}: {np.max(error[row]):.3g} > {np.max(bound[row]):.3g}")

    for plain in (False, True)[: 1 + case.alone()]:
        way = "plain" if plain else "general"
        outs = solved(case, plain)
        for bad in case.bad:
            if not outs[0][bad].isnan().all():
                found.append(f"{way} NaN row {bad} is not NaN")
        if wanted is None:
            continue
        y, dx, *rest = (each[rows].double().numpy() for each in outs)
        few = np.maximum(np.minimum(k, np.isfinite(x).sum(-1) + (x == np.inf).sum(-1) - k), 1)
        check(way, "sum", np.abs(y.sum(-1) - k), part * (1e-6 * few + n * 2.0**-24) + eps * y.sum(-1) * 1.01)
        check(way, "y", np.abs(y - wanted.y), 5e-7 * part + eps * wanted.y * 1.01 + (tiny if eps else 0))
        check(way, "range", np.maximum(-y, y - 1), np.zeros_like(y))
        order = np.argsort(x, -1, kind="stable")
        sorted_x, sorted_y = np.take_along_axis(x, order, -1), np.take_along_axis(y, order, -1)
        check(way, "monotone", -np.diff(sorted_y), np.full_like(sorted_y[:, 1:], 0))
        with np.errstate(invalid="ignore"):
            equal = sorted_x[:, 1:] == sorted_x[:, :-1]
        check(way, "ties", np.abs(np.diff(sorted_y)) * equal, np.zeros_like(sorted_y[:, 1:]))
        safe = wanted.safe & (wanted.size < most / 4)
        scale = np.abs(wanted.dx).max(-1)
        bound = part * (1e-4 * scale + 3e-6 * wanted.size) + tiny
        error = np.where(safe[:, None], np.abs(dx - wanted.dx) - eps * np.abs(wanted.dx) * 1.01, 0)
        check(way, "dx", error, bound[:, None] + np.zeros_like(dx))
        if rest:
            dk, dtau = rest
            check(
                way,
                "dk",
                np.where(safe, np.abs(dk - wanted.dk), 0),
                (1e-4 * part + wanted.digits) * np.abs(v).max(-1),
            )
            check(
                way, "dtau", np.where(safe, np.abs(dtau - wanted.dtau), 0), 1e-4 * part * wanted.reach + 1e-37
            )
        if case.cdf not in CDFS[:3]:
            continue
        logs = wanted.log
        log_y, dx, *rest = (each[rows].double().numpy() for each in solved(case, plain, khot.log_soft_topk))
        with np.errstate(invalid="ignore"):
            error = np.where(np.isfinite(logs.y), np.abs(log_y - logs.y), log_y != logs.y)
            size = np.where(np.isfinite(logs.y), 1 + np.abs(logs.y), 1)
        check(way, "log y", np.where(size < most, error, 0), (1e-6 * part + eps * 1.01) * size)
        kept = (logs.pulls / tau * 4 < most)[:, None]
        bound = (
            part * 1e-4 * np.abs(logs.dx).max(-1) + (3e-6 * part + wanted.digits) * logs.pulls / tau + tiny
        )
        error = np.where(kept, np.abs(dx - logs.dx) - eps * np.abs(logs.dx) * 1.01, 0)
        check(way, "log dx", error, bound[:, None] + np.zeros_like(dx))
        if rest:
            dk, dtau = rest
            bound = (1e-4 * part + wanted.digits) * logs.reach + 1e-37
            check(way, "log dtau", np.abs(dtau - logs.dtau), bound)
            with np.errstate(all="ignore"):
                bound = (1e-4 * part + wanted.digits) * logs.pulls / np.exp(np.maximum(logs.mass, -600))
                error = np.where(logs.mass > -600, np.abs(dk - logs.dk), 0)
            check(way, "log dk", error, bound)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_sharp_rows_are_those_of_float64(kind: str) -> None:
    for seed in (*range(6), 33):  # the last one has an outlier 80,000 tau away
        assert faults(drawn(kind, seed)) == [], f"{kind} {seed}"


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
def test_infinite_gradients_of_sharp_rows(cdf: Any) -> None:
    """They are not lost, however many rows there are beside: short ones go in groups."""
    x = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).expand(33, 4).clone().requires_grad_()
    incoming = torch.tensor([1.0, torch.inf, 1.0, 1.0]).expand(33, 4)
    (dx,) = torch.autograd.grad(khot.soft_topk(x, 2, tau=1e-3, cdf=cdf), x, incoming)
    one = x[:1].detach().requires_grad_()
    (alone,) = torch.autograd.grad(khot.soft_topk(one, 2, tau=1e-3, cdf=cdf), one, incoming[:1])
    assert not alone.isfinite().all()
    torch.testing.assert_close(dx, alone.expand(33, 4), rtol=0, atol=0, equal_nan=True)
