"""Slow, independent oracles: 50-digit root finding, convex programmes, PAV, Sinkhorn, plain sorts.

Nothing here imports khot or follows its code; everything is written from the mathematics.
One row at a time: a 1-D numpy array or CPU tensor, and Python floats for k, tau, p, epsilon.
Results are float64 numpy arrays, rounded once from the 50-digit values where mpmath made them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import logsumexp

__all__ = [
    "ADVERSARIAL",
    "CDFS",
    "TAUS",
    "MpCdf",
    "adversarial_ks",
    "exp_pav",
    "k_support_mp",
    "magnitude_pav",
    "mask_pav",
    "mp",
    "permutahedron",
    "power",
    "relaxed_sum_pav",
    "signed_pav",
    "sinkhorn_topk",
    "soft_budget",
    "soft_budget_grad",
    "soft_levels",
    "soft_permutation",
    "soft_rank",
    "soft_topk",
    "soft_topk_grad",
    "topk_mask",
]

# A context of our own: mpmath's global precision is 15 digits and anybody may change it.
# 10 digits beyond the 50 promised absorb the rounding of sums and of (x - t) / tau.
mp = mpmath.MPContext()
mp.dps = 60

Mpf = Any  # mpmath has no type annotations
Row = np.ndarray | torch.Tensor | Sequence[float]


def _float64(x: Row) -> np.ndarray:
    """x as a float64 array; exact for every floating dtype, bfloat16 included."""
    if isinstance(x, torch.Tensor):
        x = x.detach().to("cpu", torch.float64).numpy()
    return np.array(x, dtype=np.float64)


def _floats(values: Sequence[Mpf]) -> np.ndarray:
    return np.array([float(v) for v in values], dtype=np.float64)


# ------------------------------------------------------------------------------------------- CDFs


@dataclass(frozen=True)
class MpCdf:
    """One CDF F in 50 digits; each field but the last takes and gives an mpf (floats also work).

    `potential` is omega(y), the integral of F^-1; `compact` says that the support is (0, 1).
    """

    cdf: Callable[[Mpf], Mpf]
    pdf: Callable[[Mpf], Mpf]
    log_cdf: Callable[[Mpf], Mpf]
    log_pdf: Callable[[Mpf], Mpf]
    icdf: Callable[[Mpf], Mpf]
    potential: Callable[[Mpf], Mpf]
    compact: bool


def _symmetric(
    lower_cdf: Callable[[Mpf], Mpf],
    lower_pdf: Callable[[Mpf], Mpf],
    lower_icdf: Callable[[Mpf], Mpf],
    lower_potential: Callable[[Mpf], Mpf],
) -> MpCdf:
    """F with F(-z) = 1 - F(z), from its lower half: z <= 0, 0 < y <= 1/2."""

    def cdf(z: Mpf) -> Mpf:
        z = mp.mpf(z)
        return lower_cdf(z) if z <= 0 else 1 - lower_cdf(-z)

    def pdf(z: Mpf) -> Mpf:
        return lower_pdf(-abs(mp.mpf(z)))

    def log_cdf(z: Mpf) -> Mpf:
        z = mp.mpf(z)
        return mp.log(lower_cdf(z)) if z <= 0 else mp.log1p(-lower_cdf(-z))

    def log_pdf(z: Mpf) -> Mpf:
        return mp.log(pdf(z))  # an mpf has an unbounded exponent: no density underflows

    def icdf(y: Mpf) -> Mpf:
        y = mp.mpf(y)
        if y in (0, 1):
            return mp.ninf if y == 0 else mp.inf
        return lower_icdf(y) if 2 * y <= 1 else -lower_icdf(1 - y)

    def potential(y: Mpf) -> Mpf:
        y = mp.mpf(y)
        smaller = min(y, 1 - y)
        return lower_potential(smaller) if smaller > 0 else mp.zero

    return MpCdf(cdf, pdf, log_cdf, log_pdf, icdf, potential, compact=False)


def _normal_lower_icdf(y: Mpf) -> Mpf:
    """Newton on log Phi. It is concave, so from the left of the root the steps rise to it."""
    z, log_y = -mp.sqrt(-2 * mp.log(y)), mp.log(y)  # Phi(-a) <= exp(-a^2/2)/2: left of the root
    while True:
        step = (log_y - mp.log(mp.ncdf(z))) * mp.ncdf(z) / mp.npdf(z)
        z += step
        if abs(step) <= mp.mpf(10) ** (4 - mp.dps) * (1 + abs(z)):
            return z


def power(p: float) -> MpCdf:
    """F(z) = clip(z, 0, 1)^(1 / (p - 1)), with potential y^p / p, for p > 1."""
    exponent = 1 / (mp.mpf(p) - 1)

    def cdf(z: Mpf) -> Mpf:
        return min(max(mp.mpf(z), mp.zero), mp.one) ** exponent

    def pdf(z: Mpf) -> Mpf:
        z = mp.mpf(z)
        return exponent * z ** (exponent - 1) if 0 < z < 1 else mp.zero

    return MpCdf(
        cdf,
        pdf,
        log_cdf=lambda z: mp.log(cdf(z)),
        log_pdf=lambda z: mp.log(pdf(z)),
        icdf=lambda y: mp.mpf(y) ** (1 / exponent),
        potential=lambda y: mp.mpf(y) ** p / p,
        compact=True,
    )


CDFS: dict[str, MpCdf] = {
    "logistic": _symmetric(
        lambda z: mp.exp(z) / (1 + mp.exp(z)),
        lambda z: mp.exp(z) / (1 + mp.exp(z)) ** 2,
        lambda y: mp.log(y) - mp.log1p(-y),
        lambda y: y * mp.log(y) + (1 - y) * mp.log1p(-y),
    ),
    "laplace": _symmetric(
        lambda z: mp.exp(z) / 2,
        lambda z: mp.exp(z) / 2,
        lambda y: mp.log(2 * y),
        lambda y: y * mp.log(2 * y) - y,
    ),
    "normal": _symmetric(
        mp.ncdf,
        mp.npdf,
        _normal_lower_icdf,
        lambda y: -mp.npdf(_normal_lower_icdf(y)),
    ),
    "uniform": power(2.0),
}


def _cdf(name: str, p: float | None) -> MpCdf:
    if (name == "power") != (p is not None):
        raise ValueError(f"p goes with cdf='power' and with nothing else, got {name!r} and p={p}")
    return CDFS[name] if p is None else power(p)


# ------------------------------------------------------------------------------------- soft top-k


def _root(f: Callable[[Mpf], Mpf], low: Mpf, high: Mpf, tolerance: Mpf) -> Mpf:
    """Root of f between low and high: inverse quadratic steps, else bisection (Chandrupatla 1997).

    Ends of equal sign: rounding hides a root that lies on one of them; the nearer one is returned.
    """
    b, a = low, high
    fb, fa = f(b), f(a)
    if fa == 0 or fb == 0 or (fa > 0) == (fb > 0):
        return a if abs(fa) < abs(fb) else b
    fraction = mp.mpf("0.5")
    while True:
        new = a + fraction * (b - a)
        f_new = f(new)
        if (f_new > 0) == (fa > 0):
            c, fc = a, fa
        else:
            c, fc, b, fb = b, fb, a, fa
        a, fa = new, f_new
        if fa == 0:
            return a
        margin = tolerance / abs(b - a)
        if margin >= 0.5:
            return a if abs(fa) < abs(fb) else b
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        fraction = mp.mpf("0.5")
        if phi**2 < xi and (1 - phi) ** 2 < 1 - xi:
            fraction = fa / (fb - fa) * fc / (fb - fc)
            fraction += (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        fraction = min(max(fraction, margin), 1 - margin)


def _threshold(x: Sequence[Mpf], counts: Sequence[int], k: Mpf, tau: Mpf, F: MpCdf) -> Mpf:
    """t with sum_j counts_j F((x_j - t) / tau) = k; t = +inf, -inf where y is all 0, all 1.

    +inf entries use up k, -inf entries are absent; nan where there are more than k of the former.
    """
    k = k - sum(c for v, c in zip(x, counts, strict=True) if v == mp.inf)
    finite = [(v, mp.mpf(c)) for v, c in zip(x, counts, strict=True) if mp.isfinite(v)]
    n = sum(c for _, c in finite)
    if k > n:
        raise ValueError(f"k = {k} beyond the +inf entries, but only {n} are finite")
    if k <= 0:
        return mp.inf if k == 0 else mp.nan
    return mp.ninf if k == n else _spending(*zip(*finite, strict=True), k, tau, F, "score")[0]


def _scaled(x: Sequence[Mpf], t: Mpf, tau: Mpf) -> list[Mpf]:
    """z = (x - t) / tau, with infinite x winning over infinite t."""
    return [v if mp.isinf(v) else (v - t) / tau for v in x]


def soft_topk(
    x: Row,
    k: float,
    tau: float,
    cdf: str,
    p: float | None = None,
    counts: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """y_i = F((x_i - t) / tau) with sum y = k; returns (y, log y, t), rounded from 50 digits.

    `counts`: x_i stands for counts_i equal entries, so that sum counts * y = k (equal entries are
    cheap without it, too). In a gap of compact support t is the midpoint; k = 0, n: t = inf, -inf.
    NaN in the row, or more than k entries of +inf: all nan.
    """
    F, row = _cdf(cdf, p), _float64(x)
    weights = np.ones(len(row), dtype=np.int64) if counts is None else np.asarray(counts)
    distinct, inverse = np.unique(row, return_inverse=True)
    totals = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(totals, inverse, weights)
    values = [mp.mpf(float(v)) for v in distinct]
    if np.isnan(row).any():
        t = mp.nan
    else:
        t = _threshold(values, [int(c) for c in totals], mp.mpf(k), mp.mpf(tau), F)
    if mp.isnan(t):
        return np.full(len(row), np.nan), np.full(len(row), np.nan), math.nan
    z = _scaled(values, t, mp.mpf(tau))
    y, log_y = _floats([F.cdf(v) for v in z]), _floats([F.log_cdf(v) for v in z])
    return y[inverse], log_y[inverse], float(t)


def _centred_sum(x: Sequence[Mpf], at: Mpf, tau: Mpf, F: MpCdf) -> Mpf:
    """sum_j F((x_j - at) / tau + F^-1(1/2)), an entry equal to an infinite `at` counting 1/2."""
    shift, total = F.icdf(mp.mpf("0.5")), mp.zero
    for v in x:
        if mp.isinf(v) or mp.isinf(at):
            total += mp.mpf("0.5") if v == at else int(v > at)
        else:
            total += F.cdf((v - at) / tau + shift)
    return total


def soft_rank(x: Row, tau: float, cdf: str, p: float | None = None) -> np.ndarray:
    """Descending ranks 1/2 + C(x_i), with C the soft count of F shifted to the median 0: plain sums."""
    F, row = _cdf(cdf, p), _float64(x)
    if np.isnan(row).any():
        return np.full(len(row), np.nan)
    values = [mp.mpf(float(v)) for v in row]
    return _floats([_centred_sum(values, v, mp.mpf(tau), F) + mp.mpf("0.5") for v in values])


def permutahedron(z: Row, w: Row, kl: bool = False, p: float = 2.0) -> np.ndarray:
    """The projection of z onto the permutahedron of w, with a p-norm the point y of it with the smallest
    sum(|y|^p/p - y z), or log of the KL projection of e^z onto that of e^w.

    By a formula for the decreasing regression that pools no blocks: v_i is the minimum over a <= i of the
    maximum over b >= i of V(a..b), where V is the value of a block.
    """
    z, w = _float64(z), -np.sort(-_float64(w))
    n = len(z)
    if np.isnan(z).any() or np.isnan(w).any():
        return np.full(n, np.nan)
    order = np.argsort(-z, kind="stable")
    at = z[order]
    value = np.full((n, n), -np.inf, dtype=np.longdouble)
    for a in range(n):
        value[a, a:] = _blocks(at[a:], w[a:], kl, p)
    y = np.empty(n)
    t = at - [value[: i + 1, i:].max(-1).min() for i in range(n)]
    y[order] = t if p == 2 or kl else _power(np.array(t), 1 / (p - 1))
    return y


def _blocks(u: np.ndarray, w: np.ndarray, kl: bool, p: float) -> np.ndarray:
    """V of every block that begins with the first entry."""
    u, w = u.astype(np.longdouble), w.astype(np.longdouble)
    if kl:
        return np.logaddexp.accumulate(u) - np.logaddexp.accumulate(w)
    n, total = np.arange(1, len(u) + 1), w.cumsum()
    if p == 2:
        return (u.cumsum() - total) / n
    inside = np.tri(len(u), dtype=bool)
    even = _power(total / n, p - 1)  # that far above v lie all, if they are equal
    low, high = np.minimum.accumulate(u) - even, np.maximum.accumulate(u) - even
    for _ in range(100):
        v = (low + high) / 2
        below = np.where(inside, _power(u - v[:, None], 1 / (p - 1)), 0).sum(-1) > total
        low, high = np.where(below, v, low), np.where(below, high, v)
    return (low + high) / 2


def _power(t: Any, exponent: float) -> Any:
    return np.sign(t) * np.abs(t) ** np.longdouble(exponent)


def soft_levels(x: Row, levels: Sequence[float], tau: float, cdf: str, p: float | None = None) -> np.ndarray:
    """t with C(t) = level, C as for `soft_rank`: the soft sort at the levels i - 1/2.

    Levels among infinite entries have these for t.
    """
    F, row = _cdf(cdf, p), _float64(x)
    if np.isnan(row).any() or not len(row):
        return np.full(len(levels), np.nan)
    return _floats([_level(row, level, mp.mpf(tau), F) for level in levels]) + 0.0


def _level(row: np.ndarray, level: float, tau: Mpf, F: MpCdf) -> Mpf:
    """t + tau F^-1(1/2) for the soft top-`level`'s threshold t."""
    first, last = int((row == np.inf).sum()), int((row > -np.inf).sum())
    if level <= first or level >= last:
        return mp.inf if level <= first else mp.ninf
    distinct, totals = np.unique(row, return_counts=True)
    values = [mp.mpf(float(v)) for v in distinct]
    t = _threshold(values, [int(c) for c in totals], mp.mpf(level), tau, F)
    return t + tau * F.icdf(mp.mpf("0.5"))


def soft_permutation(x: Row, tau: float, cdf: str, p: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """P and log P in descending order: differences of soft top-i and soft top-(i - 1).

    Infinite entries share their places equally.
    """
    F, row, tau = _cdf(cdf, p), _float64(x), mp.mpf(tau)
    n = len(row)
    if np.isnan(row).any():
        return np.full((n, n), np.nan), np.full((n, n), np.nan)
    first, last = int((row == np.inf).sum()), int((row > -np.inf).sum())
    shift = tau * F.icdf(mp.mpf("0.5"))

    def standardized(i: int) -> list[Mpf]:
        t = mp.inf if i == 0 else mp.ninf if i == n else _level(row, i, tau, F) - shift
        return [
            mp.ninf if t == mp.inf else mp.inf if t == mp.ninf else (mp.mpf(float(v)) - t) / tau for v in row
        ]

    def share(v: float, i: int, before: Mpf, after: Mpf) -> Mpf:
        if v == np.inf:
            return mp.mpf(int(i < first)) / first
        if v == -np.inf:
            return mp.mpf(int(i >= last)) / (n - last)
        if before > 0 and not F.compact:  # 1 - F has more digits there
            return F.cdf(-before) - F.cdf(-after)
        return F.cdf(after) - F.cdf(before)

    z = [standardized(i) for i in range(n + 1)]
    P = [[share(*v) for v in zip(row, [i] * n, z[i], z[i + 1], strict=True)] for i in range(n)]
    log_P = [[mp.log(v) if v > 0 else mp.ninf for v in r] for r in P]
    return np.array([_floats(r) for r in P]), np.array([_floats(r) for r in log_P])


def soft_topk_grad(
    x: Row, k: float, tau: float, cdf: str, v: Row, p: float | None = None
) -> tuple[np.ndarray, float, float]:
    """Gradients (dx, dk, dtau) of <v, y> from the implicit function theorem, in 50 digits.

    Zero where y is all 0 or all 1. In a gap of compact support dx = dtau = 0, and dk is half the
    mean of v over the ties of the k-th value plus half that over the ties of the (k+1)-th. An entry
    exactly on a kink of compact support (z = 0 or 1) has f = 0.
    """
    F, scale = _cdf(cdf, p), mp.mpf(tau)
    row = [mp.mpf(float(e)) for e in _float64(x)]
    incoming = [mp.mpf(float(e)) for e in _float64(v)]
    t = _threshold(row, [1] * len(row), mp.mpf(k), scale, F)
    zeros = np.zeros(len(row))
    if not mp.isfinite(t):
        return zeros, 0.0, 0.0
    finite = [i for i, e in enumerate(row) if mp.isfinite(e)]
    z = {i: (row[i] - t) / scale for i in finite}
    f = {i: F.pdf(z[i]) for i in finite}  # as exact as softmax(log f): an mpf never underflows
    total = mp.fsum(f.values())
    if total == 0:
        lowest_in = min(e for e in row if e > t)
        highest_out = max(row[i] for i in finite if row[i] <= t)
        ties = [[incoming[i] for i in finite if row[i] == e] for e in (lowest_in, highest_out)]
        return zeros, float(sum(mp.fsum(tie) / len(tie) for tie in ties) / 2), 0.0
    v_mean = mp.fsum(f[i] * incoming[i] for i in finite) / total
    z_mean = mp.fsum(f[i] * z[i] for i in finite) / total
    dx = [f[i] * (incoming[i] - v_mean) / scale if i in f else mp.zero for i in range(len(row))]
    dtau = -mp.fsum(f[i] * (z[i] - z_mean) * (incoming[i] - v_mean) for i in finite) / scale
    return _floats(dx), float(v_mean), float(dtau)


# ---------------------------------------------------------------------------------------- budgets


def _spending(
    x: Sequence[Mpf], w: Sequence[Mpf], budget: Mpf, tau: Mpf, F: MpCdf, by: str
) -> tuple[Mpf, tuple[list[int], list[int]]]:
    """t with sum_i w_i F((x_i - t a_i) / tau) = budget; and, in a gap of compact support, the entries next
    to it on either side (else two empty lists). Finite x, w > 0, 0 < budget < sum(w)."""
    a = [v if by == "value" else mp.one for v in w]
    half = F.icdf(mp.mpf("0.5"))
    if F.compact:
        starts = [v / s for v, s in zip(x, a, strict=True)]  # y = 0 from here on
        ends = [(v - tau) / s for v, s in zip(x, a, strict=True)]  # y = 1 up to here
        for flat0 in set(starts):
            above = [i for i, start in enumerate(starts) if start > flat0]
            flat1 = min((ends[i] for i in above), default=mp.ninf)
            if flat1 >= flat0 and sum(w[i] for i in above) == budget:
                sides = (
                    [i for i in above if ends[i] == flat1],
                    [i for i, start in enumerate(starts) if start == flat0],
                )
                a_up, a_down = (_mean_slope(side, w, a) for side in sides)
                return (a_up * flat1 + a_down * flat0) / (a_up + a_down), sides

    def excess(t: Mpf, split: Sequence[bool]) -> Mpf:
        """Decreasing in t, with the sign of the spend less the budget; however small both sides are, it is
        the difference of their logarithms."""
        P = Q = mp.zero
        over = sum((w_i for w_i, up in zip(w, split, strict=True) if up), mp.zero) - budget
        for v, w_i, s, up in zip(x, w, a, split, strict=True):
            z = (v - t * s) / tau
            if not up:
                P += w_i * F.cdf(z)
            else:
                Q += w_i * (1 - F.cdf(z) if F.compact else F.cdf(-z))
        P, Q = P + max(over, mp.zero), Q + max(-over, mp.zero)
        return P - Q if P == 0 or Q == 0 else mp.log(P) - mp.log(Q)

    def split_at(t: Mpf) -> list[bool]:
        return [(v - t * s) / tau > half for v, s in zip(x, a, strict=True)]

    share = F.icdf(budget / sum(w))
    alone = [(v - tau * share) / s for v, s in zip(x, a, strict=True)]
    pad = mp.mpf("1e-30") * (tau / min(a) + max(map(abs, alone)))
    low, high = min(alone) - pad, max(alone) + pad
    bends = (mp.zero, half, mp.one) if F.compact else (mp.zero,)
    points = {(v - tau * z) / s for v, s in zip(x, a, strict=True) for z in bends}
    knots = [low, *sorted(v for v in points if low < v < high), high]
    first, last = 0, len(knots) - 1
    while last - first > 1:
        middle = (first + last) // 2
        if excess(knots[middle], split_at(knots[middle])) > 0:
            first = middle
        else:
            last = middle
    split = split_at((knots[first] + knots[last]) / 2)  # the same between two knots
    reach = max(abs(knots[first]), abs(knots[last]))
    tolerance = max(tau / max(a) * mp.mpf("1e-50"), reach * mp.mpf(10) ** (4 - mp.dps))
    t = _root(lambda t: excess(t, split), knots[first], knots[last], tolerance)
    # A root that rounding moved off a kink would turn y = 0 into 1e-50 and log y into -115.
    return next((v for v in knots[first : last + 1] if abs(t - v) < tau * mp.mpf("1e-45")), t), ([], [])


def _mean_slope(side: Sequence[int], w: Sequence[Mpf], a: Sequence[Mpf]) -> Mpf:
    return sum(w[i] * a[i] for i in side) / sum(w[i] for i in side)


def soft_budget(
    x: Row,
    w: Row,
    budget: float,
    tau: float,
    cdf: str,
    p: float | None = None,
    by: str = "score",
    at_most: bool = False,
) -> tuple[np.ndarray, float]:
    """y_i = F((x_i - t a_i) / tau) with sum w y = budget, and t; a = 1 by score, a = w by value.

    Finite x, w > 0, 0 < budget < sum(w). With `at_most`, t = 0 where that spends no more.
    """
    F, scale = _cdf(cdf, p), mp.mpf(tau)
    row, cost = ([mp.mpf(float(v)) for v in _float64(part)] for part in (x, w))
    t, _ = _spending(row, cost, mp.mpf(budget), scale, F, by)
    t = max(t, mp.zero) if at_most else t
    a = [v if by == "value" else mp.one for v in cost]
    return _floats([F.cdf((v - t * s) / scale) for v, s in zip(row, a, strict=True)]), float(t)


def soft_budget_grad(
    x: Row, w: Row, budget: float, tau: float, cdf: str, v: Row, p: float | None = None, by: str = "score"
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """The gradients of sum v y in x, w, the budget and tau, by implicit differentiation in 50 digits.

    In a gap of compact support, dL/dB is the mean of the derivatives to either side, weighted by the slopes
    a of the entries there.
    """
    F, scale = _cdf(cdf, p), mp.mpf(tau)
    row, cost, pull = ([mp.mpf(float(u)) for u in _float64(part)] for part in (x, w, v))
    t, sides = _spending(row, cost, mp.mpf(budget), scale, F, by)
    a = [u if by == "value" else mp.one for u in cost]
    entries = range(len(row))
    z = [(row[i] - t * a[i]) / scale for i in entries]
    y, f = [F.cdf(u) for u in z], [F.pdf(u) for u in z]
    if sides[0]:
        slopes = [_mean_slope(side, cost, a) for side in sides]
        rises = [sum(a[i] * pull[i] for i in side) / sum(cost[i] * a[i] for i in side) for side in sides]
        price = sum(s * rise for s, rise in zip(slopes, rises, strict=True)) / sum(slopes)
    else:
        mass = sum(cost[i] * a[i] * f[i] for i in entries)
        price = sum(a[i] * f[i] * pull[i] for i in entries) / mass
    dx = [f[i] * (pull[i] - cost[i] * price) / scale for i in entries]
    dw = [-price * y[i] - (t * dx[i] if by == "value" else 0) for i in entries]
    dtau = -sum(dx[i] * z[i] for i in entries)
    return _floats(dx), _floats(dw), float(price), float(dtau)


# ----------------------------------------------------------------------------------- isotonic PAV


def _pav(s: np.ndarray, w: np.ndarray, tau: float, p: float, phi_slope: Callable[[Any], Any]) -> list[Mpf]:
    """r*'(s - v), v = argmin over v_1 >= ... >= v_n of sum_i r*(s_i - v_i) + w_i phi(v_i).

    s and w in descending order, 0 <= w <= 1. Pool adjacent violators (Lim and Wright 2016); the
    blocks are found in float64, and each block's value is then solved for in 50 digits, because
    s - v loses its digits to cancellation where s is much larger than tau.
    """

    def conjugate_slope(d: Any, exponent: Any, scale: Any) -> Any:
        return (abs(d) / scale) ** exponent * (1 if d >= 0 else -1)

    def slope(v: Any, start: int, stop: int, exponent: Any, scale: Any) -> Any:
        block = zip(s[start:stop].tolist(), w[start:stop].tolist(), strict=True)
        return sum(b * phi_slope(v) - conjugate_slope(a - v, exponent, scale) for a, b in block)

    def bracket(start: int, stop: int) -> tuple[float, float]:
        # Left end: r*'(s_i - v) >= 1 >= w_i phi'(v) for every i. Right end: no r*' is positive.
        return min(float(s[stop - 1]) - 2 * tau, 0.0), float(s[start])

    def pooled(start: int, stop: int) -> float:
        low, high = bracket(start, stop)
        precision = {"xtol": 1e-17 * tau, "rtol": 4 * np.finfo(float).eps, "maxiter": 1000}
        return brentq(slope, low, high, args=(start, stop, 1 / (p - 1), tau), **precision)

    blocks: list[tuple[int, int, float]] = []
    for i in range(len(s)):
        blocks.append((i, i + 1, pooled(i, i + 1)))
        while len(blocks) > 1 and blocks[-2][2] < blocks[-1][2]:
            (start, _, _), (_, stop, _) = blocks.pop(-2), blocks.pop(-1)
            blocks.append((start, stop, pooled(start, stop)))

    y: list[Mpf] = []
    exact = (1 / (mp.mpf(p) - 1), mp.mpf(tau))
    for start, stop, _ in blocks:
        low, high = map(mp.mpf, bracket(start, stop))
        tolerance = mp.mpf(tau) * mp.mpf("1e-50")
        v = _root(lambda v, ends=(start, stop): slope(v, *ends, *exact), low, high, tolerance)
        y += [conjugate_slope(si - v, *exact) for si in s[start:stop].tolist()]
    return y


def _place_weights(n: int, k: float) -> np.ndarray:
    """1_k; with a fraction at the next place for fractional k (P(w) stays the capped simplex)."""
    return np.clip(k - np.arange(n), 0.0, 1.0)


def magnitude_pav(x: Row, k: float, tau: float, p: float) -> np.ndarray:
    """Top-k in magnitude (Sander et al. 2023): phi(x) = x^2 / 2, R = tau/p ||.||_p^p, by PAV."""
    row = _float64(x)
    order = np.argsort(-np.abs(row), kind="stable")
    y = np.empty(len(row))
    weights = _place_weights(len(row), k)
    y[order] = _floats(_pav(np.abs(row)[order], weights, tau, p, lambda v: v))
    return np.sign(row) * y


def mask_pav(x: Row, k: float, tau: float, p: float) -> np.ndarray:
    """Sparse top-k mask (Sander et al. 2023): phi(x) = x, R = tau/p ||.||_p^p, by PAV.

    y <= 1 is nowhere imposed; it follows from y lying in the permutahedron P(1_k).
    """
    row = _float64(x)
    order = np.argsort(-row, kind="stable")
    y = np.empty(len(row))
    y[order] = _floats(_pav(row[order], _place_weights(len(row), k), tau, p, lambda v: 1))
    return y


def signed_pav(x: Row, k: float, tau: float, p: float) -> np.ndarray:
    """Signed mask (Sander et al. 2023): phi(x) = abs(x). PAV as for the mask of abs(x), without v >= 0; then
    v is raised to 0, which projects onto the nonnegative monotone cone."""
    row = _float64(x)
    y = mask_pav(np.abs(row), k, tau, p)
    loose = np.abs(row) - tau * y ** (p - 1) < 0
    return np.sign(row) * np.where(loose, (np.abs(row) / tau) ** (1 / (p - 1)), y)


def exp_pav(x: Row, k: float, tau: float, p: float) -> np.ndarray:
    """Top-k with phi(x) = e^(x-1), R = tau/p ||.||_p^p, by PAV."""

    def phi_slope(v: Any) -> Any:
        return math.exp(v - 1) if isinstance(v, float) else mp.exp(v - 1)

    row = _float64(x)
    order = np.argsort(-row, kind="stable")
    y = np.empty(len(row))
    y[order] = _floats(_pav(row[order], _place_weights(len(row), k), tau, p, phi_slope))
    return y


def relaxed_sum_pav(x: Row, k: float, tau: float, p: float, phi: str) -> float:
    """The primal side of Proposition 2, sum R*(s - v) + w phi(v), at the v of PAV."""
    row = _float64(x)
    pav = {"identity": mask_pav, "abs": signed_pav, "square": magnitude_pav, "exp": exp_pav}[phi]
    y = np.abs(pav(row, k, tau, p))
    s = row if phi in ("identity", "exp") else np.abs(row)
    distance = tau * y ** (p - 1)
    v = -np.sort(distance - s)
    of_phi = {"identity": v, "abs": v, "square": v**2 / 2, "exp": np.exp(v - 1)}[phi]
    q = p / (p - 1)
    return float((tau / q * (distance / tau) ** q).sum() + _place_weights(len(row), k) @ of_phi)


def k_support_mp(y: Row, k: float, phi: str) -> float:
    """:func:`k_support` in 50 digits: z = min(1, abs(y)/a), where a is found by bisection."""
    row = [abs(mp.mpf(v)) for v in _float64(y).tolist()]
    low, high = mp.zero, sum(row, mp.zero)
    for _ in range(200):
        a = (low + high) / 2
        low, high = (a, high) if sum(min(mp.one, v / a) for v in row) > k else (low, a)
    pairs = [(v, min(mp.one, v / high)) for v in row if v]
    if phi == "square":
        return float(mp.sqrt(sum(v**2 / z for v, z in pairs)))
    return float(sum(v * mp.log(v / z) for v, z in pairs))


# ------------------------------------------------------------------------------ Sinkhorn, k-hot


def sinkhorn_topk(
    x: Row, k: float, epsilon: float, iterations_max: int = 100_000, tol: float = 1e-13
) -> np.ndarray:
    """SOFT top-k (Xie et al. 2020, Algorithm 1) in the log domain: n times the plan's column of 1.

    Cost (x_i - a_j)^2 with anchors a = (0, 1), marginals 1/n and ((n - k)/n, k/n). Stops once a
    sweep moves no y by more than tol; that takes long where gaps in x far exceed epsilon.
    """
    row = _float64(x)
    n = len(row)
    log_kernel = -((row[:, None] - np.array([0.0, 1.0])) ** 2) / epsilon
    log_mu, log_nu = -math.log(n), np.log(np.array([n - k, k]) / n)
    log_q, y = np.full(2, math.log(0.5)), np.full(n, np.nan)
    for _ in range(iterations_max):
        log_p = log_mu - logsumexp(log_kernel + log_q, axis=1, keepdims=True)
        log_q = log_nu - logsumexp(log_kernel + log_p, axis=0)
        previous, y = y, n * np.exp(log_p[:, 0] + log_kernel[:, 1] + log_q[1])
        if np.max(np.abs(y - previous)) <= tol:
            return y
    raise RuntimeError(f"no convergence to {tol} in {iterations_max} sweeps")


def topk_mask(x: Row, k: float) -> np.ndarray:
    """Hard k-hot mask: floor(k + 1/2) ones, ties to the lowest index, -inf never selected."""
    row = _float64(x).tolist()
    selectable = [i for i, e in enumerate(row) if e != -math.inf]
    chosen = sorted(selectable, key=lambda i: (-row[i], i))[: math.floor(k + 0.5)]
    mask = np.zeros(len(row))
    mask[chosen] = 1.0
    return mask


def nucleus(x: Row, p: float) -> np.ndarray:
    """The fewest entries whose probabilities sum to p, by sorting and adding."""
    row = _float64(x)
    order = np.argsort(-row, kind="stable")
    sums = np.exp(row[order] - row.max()).cumsum()
    before = np.append(0, sums[:-1])
    mask = np.zeros(len(row))
    mask[order[(before < p * sums[-1]) | (p == 1)]] = 1
    return np.where(row == -math.inf, 0, mask)


# ------------------------------------------------------------------------------ adversarial rows

TAUS = (1.0, 0.01)

Scores = Callable[[int, torch.Generator], torch.Tensor]


def _normal(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(n, dtype=torch.float64, generator=generator)


def _clusters(n: int, generator: torch.Generator) -> torch.Tensor:
    side = 50.0 * (1 - 2 * (torch.randperm(n, generator=generator) % 2))
    return side + 0.01 * _normal(n, generator)


def _outlier(n: int, generator: torch.Generator) -> torch.Tensor:
    x = _normal(n, generator)
    x[int(torch.randint(n, (), generator=generator))] = 1e6
    return x


def _with_minus_inf(n: int, generator: torch.Generator) -> torch.Tensor:
    """And a number that stands for it."""
    x = _normal(n, generator)
    left_out = torch.randperm(n, generator=generator)[: n // 10]
    x[left_out], x[left_out[::2]] = -math.inf, -1e9
    return x


def _empty(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.float64)


ADVERSARIAL: dict[str, Scores] = {
    **{
        f"normal_{s:g}": lambda n, generator, s=s: s * _normal(n, generator)
        for s in (1e-6, 0.1, 1.0, 5.0, 100.0, 1e4)
    },
    "uniform": lambda n, generator: torch.rand(n, dtype=torch.float64, generator=generator),
    "cauchy": lambda n, generator: _empty(n).cauchy_(generator=generator),
    "exponential": lambda n, generator: _empty(n).exponential_(generator=generator),
    "lognormal": lambda n, generator: _empty(n).log_normal_(0.0, 3.0, generator=generator),
    "clusters": _clusters,
    "outlier": _outlier,
    "equal": lambda n, generator: torch.full((n,), 0.7, dtype=torch.float64),
    "ties": lambda n, generator: torch.randint(-2, 3, (n,), generator=generator).double(),
    "minus_inf": _with_minus_inf,
}


def adversarial_ks(n_selectable: int) -> list[float]:
    """The design's list of k, for the number of entries that are not -inf."""
    n = n_selectable
    return [0.5, 1.0, n / 100, n / 10 + 0.5, n / 2, n - 1.0, n - 0.5]
