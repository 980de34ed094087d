"""The operators in float64, by a root finder, written from the mathematics; and the rows that are hard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, log_expit, log_ndtr, logsumexp, ndtr

__all__ = ["CDFS", "Answer", "Law", "adversarial", "ks", "power", "soft_topk", "threshold"]


@dataclass(frozen=True)
class Law:
    """F, log F and log f; F of compact support is 0 below 0 and 1 above 1."""

    cdf: Callable[[np.ndarray], np.ndarray]
    log_cdf: Callable[[np.ndarray], np.ndarray]
    log_pdf: Callable[[np.ndarray], np.ndarray]
    compact: bool = False

    def tail(self, z: np.ndarray, above: np.ndarray) -> np.ndarray:
        """1 − F above, F below."""
        if self.compact:
            return np.where(above, 1 - self.cdf(z), self.cdf(z))
        return self.cdf(-np.abs(z))


def power(p: float) -> Law:
    e = 1 / (p - 1)
    with np.errstate(all="ignore"):
        return Law(
            lambda z: np.clip(z, 0, 1) ** e,
            lambda z: e * np.log(np.clip(z, 0, 1)),
            lambda z: np.where(
                (z > 0) & (z < 1), math.log(e) + (e - 1) * np.log(np.clip(z, 1e-300, 1)), -np.inf
            ),
            compact=True,
        )


CDFS = {
    "logistic": Law(expit, log_expit, lambda z: log_expit(z) + log_expit(-z)),
    "laplace": Law(
        lambda z: np.where(z > 0, 1 - 0.5 * np.exp(-np.abs(z)), 0.5 * np.exp(-np.abs(z))),
        lambda z: np.where(z > 0, np.log1p(-0.5 * np.exp(-np.abs(z))), -np.abs(z) - math.log(2)),
        lambda z: -np.abs(z) - math.log(2),
    ),
    "normal": Law(ndtr, log_ndtr, lambda z: -0.5 * z * z - 0.5 * math.log(2 * math.pi)),
    "uniform": power(2.0),
}


def threshold(x: np.ndarray, k: float, tau: float, law: Law) -> tuple[float, float]:
    """t = anchor + offset for finite x and 0 < k < n, the anchor being the entry of rank ⌈k⌉.

    The root of m − A + B = k, where m entries lie above t; where m = k, of log A = log B.
    """
    x = np.asarray(x, np.float64)
    centre = 0.5 if law.compact else 0.0
    ordered = np.sort(x)[::-1]
    anchor = ordered[math.ceil(k) - 1]
    distance = (x - anchor) / tau
    # the root lies a quantile away from an entry, and quantiles of more than 1e-40 are within 100
    low, high = distance.min() - 100, distance.max() + 100

    def excess(s: float) -> float:
        z = distance - s
        above = z > centre
        over = above.sum() - k
        A, B = law.tail(z, above)[above], law.tail(z, above)[~above]
        if over == 0 and not law.compact:
            return logsumexp(law.log_cdf(z[~above])) - logsumexp(law.log_cdf(-z[above]))
        return over - math.fsum(A) + math.fsum(B)

    if law.compact:
        gap = ordered[math.ceil(k) - 1] - ordered[min(math.ceil(k), len(x) - 1)]
        if k == math.ceil(k) and gap >= tau:  # the middle of a gap
            return anchor, -0.5 * gap - 0.5 * tau
    # to the last digit of s, however near to the anchor
    return anchor, brentq(excess, low, high, xtol=1e-300, rtol=4 * np.finfo(float).eps, maxiter=1000) * tau


@dataclass(frozen=True)
class Answer:
    """Of one row, with v coming in: y, log y, and of Σ v y dL/dx = f (v − v̄)/τ, dL/dk = v̄ and
    dL/dτ = −Σ f (z − z̄)(v − v̄)/τ, with means weighted by f."""

    y: np.ndarray
    log_y: np.ndarray
    dx: np.ndarray
    dk: float
    dtau: float


def soft_topk(x: np.ndarray, k: float, tau: float, law: Law, v: np.ndarray | float = 0.0) -> Answer:
    """For finite x and 0 < k < n."""
    x, v = np.asarray(x, np.float64), np.broadcast_to(np.asarray(v, np.float64), x.shape)
    k, tau = float(k), float(tau)
    anchor, offset = threshold(x, k, tau, law)
    z = ((x - anchor) - offset) / tau
    with np.errstate(divide="ignore"):
        y, log_y, log_f = law.cdf(z), law.log_cdf(z), law.log_pdf(z)
    if np.isneginf(log_f).all():  # half of a change to each side of a gap
        above = z >= 1
        up, down = above & (x == x[above].min()), ~above & (x == x[~above].max())
        return Answer(y, log_y, np.zeros_like(x), 0.5 * v[up].mean() + 0.5 * v[down].mean(), 0.0)
    weights = np.exp(log_f - logsumexp(log_f))
    mean, centre = weights @ v, weights @ z
    f = np.exp(log_f)
    dtau = -math.fsum(f * (z - centre) * (v - mean)) / tau
    return Answer(y, log_y, f * (v - mean) / tau, mean, dtau)


def ks(n: int) -> list[float]:
    return sorted({0.5, 1, n / 100, n / 10 + 0.5, n // 2, n - 1, n - 0.5})


def adversarial(n: int) -> Iterator[tuple[str, np.ndarray]]:
    """Rows of float32 that have broken solvers of khot."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(n)
    rows = {f"normal {s:g}": s * normal for s in (1e-6, 0.1, 1, 5, 100, 1e4)}
    rows |= {
        "uniform": rng.random(n),
        "cauchy": rng.standard_cauchy(n),
        "cauchy 1e4": 1e4 * rng.standard_cauchy(n),
        "exponential": rng.exponential(size=n),
        "log-normal": np.exp(3 * normal),
        "clusters": np.where(rng.random(n) < 0.5, -50.0, 50.0) + 0.1 * normal,
        "outlier": np.where(np.arange(n) == n // 3, 1e6, normal),
        "equal": np.full(n, 0.7),
        "ties": np.round(normal),
        "gap of 1e9": np.where(np.arange(n) < n // 2, 0.0, -1e9) + np.where(np.arange(n) < n // 2, normal, 0),
        "subnormal": 1e-40 * normal,
    }
    for name, row in rows.items():
        yield name, row.astype(np.float32)
