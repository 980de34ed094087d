"""Soft ranks, sorts and quantiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from khot_jax import _arguments as arguments
from khot_jax import cdfs
from khot_jax._primitives import arrays, bind, define, linear
from khot_jax._threshold import solve
from khot_jax.cdfs import CDF, Laplace

__all__ = ["soft_quantile", "soft_rank", "soft_sort"]

# A distance in τ beyond which nothing of an entry is left, even in logarithms
FAR = 1e30
# asinh(a) is log 2a from there on
LARGE = 1e4


def soft_rank(
    x: Any,
    axis: int = -1,
    *,
    tau: Any = 1.0,
    cdf: str | CDF = "laplace",
    descending: bool = False,
    where: Any = None,
) -> Array:
    """The place of each entry in its sorted row, softened.

        r_i = ½ + Σ_j F((x_i − x_j)/τ)

    F is the CDF, shifted to the median 0. As τ → 0, r tends to the rank of each entry, counted from 1 for the
    smallest (the largest if ``descending``), and equal entries share the mean of their ranks.

    Args:
        x: scores, of any floating-point dtype. Infinite ones come last or first, and equal ones share ranks.
        axis: the axis to rank along.
        tau: temperature > 0; a number or an array that broadcasts with the batch shape.
        cdf: ``"laplace"``, in O(n log n) time; any other as for :func:`soft_topk`, in O(n²) time and O(n)
            memory.
        descending: give rank 1 to the largest entry, as in the ranks of −x.
        where: bool, broadcastable to x; entries under False are ignored, even NaN and inf, and have rank 0.

    Returns:
        An array of x's shape and dtype, in [1, n]. A row with a NaN is NaN, and so is one with a bad tau.

    Differentiable in x and tau, exactly, in both modes. Errors are those of :func:`soft_topk`.

    Source: Struski et al. 2025, section 3.2 and Theorem 3.2.

    Example:
        >>> print(khot_jax.soft_rank(jnp.array([10.0, 30.0, 20.0]), tau=0.5))
        [1. 3. 2.]
    """
    F, sign, rows, tau = _given(x, axis, tau, cdf, descending, where)
    wide, last = rows.astype(tau.dtype), math.inf * sign
    if isinstance(F, Laplace):
        (ranks,) = bind(_order, wide, tau, law=Order("rank", descending))
    else:
        ranks = _count(sign * wide, sign * wide, tau, F) + 0.5
    if where is not None:
        taken = arguments.selected(where, x, axis)
        out = (~taken).sum(-1, keepdims=True)
        ranks = jnp.where(wide == last, ranks - 0.5 * out, ranks)  # those under False were tied with these
        ranks = jnp.where(taken | jnp.isnan(ranks), ranks, 0)
    return jnp.moveaxis(ranks.astype(rows.dtype), -1, axis)


def soft_sort(
    x: Any,
    axis: int = -1,
    *,
    tau: Any = 1.0,
    cdf: str | CDF = "laplace",
    descending: bool = False,
    where: Any = None,
) -> Array:
    """The sorted row, softened: the i-th value is where the soft count from below is i − ½.

        Σ_j F((s_i − x_j)/τ) = i − ½

    with F the CDF shifted to the median 0: the inverse of :func:`soft_rank`. As τ → 0, s tends to the sorted
    row. For larger τ it spreads beyond the scores.

    Args:
        x, axis, tau, cdf, descending: as for :func:`soft_rank`. Infinite scores stay as they are.
        where: bool, broadcastable to x; entries under False are ignored. The others come first, and the
            places behind them hold 0.

    Returns:
        An array of x's shape and dtype, in ascending order, or descending. A row with a NaN is NaN.

    Differentiable in x and tau, exactly, in both modes. Errors are those of :func:`soft_topk`.

    Source: Struski et al. 2025, section 3.2 and Proposition 4.2.

    Example:
        >>> print(khot_jax.soft_sort(jnp.array([10.0, 30.0, 20.0]), tau=0.5))
        [10. 20. 30.]
    """
    F, sign, rows, tau = _given(x, axis, tau, cdf, descending, where)
    wide, n = rows.astype(tau.dtype), rows.shape[-1]
    if isinstance(F, Laplace):
        (values,) = bind(_order, wide, tau, law=Order("sort", descending))
    else:
        level = lambda i: _level(-sign * wide, i + 0.5, tau, F)
        values = -sign * jnp.moveaxis(lax.map(level, jnp.arange(n, dtype=tau.dtype)), 0, -1)
    if where is not None:
        count = arguments.selected(where, x, axis).sum(-1, keepdims=True)
        values = jnp.where((jnp.arange(n) < count) | jnp.isnan(values), values, 0)
    return jnp.moveaxis(values.astype(rows.dtype), -1, axis)


def _given(
    x: Any, axis: int, tau: Any, cdf: str | CDF, descending: bool, where: Any
) -> tuple[CDF, int, Array, Array]:
    """The CDF, −1 for a descending order, the rows with what is not taken behind the others, and τ."""
    F = cdfs.resolve(cdf)
    arguments.flag(descending, "descending")
    sign = -1 if descending else 1
    rows = arguments.rows(x, axis, where, fill=math.inf * sign)
    return F, sign, rows, arguments.per_row(tau, "tau", rows, positive=True)


def soft_quantile(
    x: Any, q: Any, axis: int = -1, *, tau: Any = 1.0, cdf: str | CDF = "laplace", where: Any = None
) -> Array:
    """The q-quantile of each row, softened: where the soft count from below is ½ + q(n − 1).

    As τ → 0 it tends to the entry nearest to the position q(n − 1) in the sorted row, and to the middle of
    two entries if q(n − 1) lies half-way between them.

    Args:
        x: scores, of any floating-point dtype. Infinite ones come last or first.
        q: in [0, 1]; a number or an array of at most one axis.
        axis: the axis to reduce.
        tau, cdf: as for :func:`soft_topk`.
        where: bool, broadcastable to x; n is then the number of entries under True.

    Returns:
        An array of x's dtype and of its shape without ``axis``; if q has an axis, that comes first, as from
        ``jnp.quantile``. A row is NaN if it holds a NaN or no entry, or if its q or tau is out of range.

    Differentiable in x, q and tau, exactly, in both modes and to any order. Errors: as :func:`soft_topk`.

    Example:
        >>> x = jnp.array([3.0, 1.0, 4.0, 1.5, 9.0])
        >>> print(
        ...     jnp.array_str(khot_jax.soft_quantile(x, jnp.array([0.0, 0.25, 1.0]), tau=0.01), precision=4)
        ... )
        [1.  1.5 9. ]
    """
    F = cdfs.resolve(cdf)
    rows = arguments.rows(x, axis, where)
    tau = arguments.per_row(tau, "tau", rows, positive=True)
    q = arguments.real(q, "q", high=1).astype(tau.dtype)
    if q.ndim > 1:
        raise ValueError(f"q must have at most one axis, but has the shape {q.shape}")
    count = arguments.selected(where, x, axis).sum(-1).astype(tau.dtype)

    def of(q: Array) -> Array:
        level = jnp.where((q >= 0) & (q <= 1) & (count > 0), 0.5 + (1 - q) * (count - 1), jnp.nan)
        return _level(rows.astype(tau.dtype), level, tau, F).astype(rows.dtype)

    return jax.vmap(of)(q) if q.ndim else of(q)


def _level(x: Array, level: Any, tau: Array, F: CDF) -> Array:
    """Where the soft count from above, under F with its median moved to 0, is the level.

    Infinite scores count as those beyond all finite ones, and are the answer for the levels that they fill.
    """
    level = jnp.broadcast_to(level, tau.shape)
    high, low = (x == jnp.inf).sum(-1), (x == -jnp.inf).sum(-1)
    above, below = level <= high, (level >= x.shape[-1] - low) & (low > 0)
    finite = ~(above & (high > 0)) & ~below
    goal = jnp.where(finite, level, 0.5 * (high + x.shape[-1] - low))
    _, hi, lo = solve(x, goal, tau, None, F, "threshold")
    t = jnp.where(finite, (hi + F.median * tau) + lo, jnp.where(below, -jnp.inf, jnp.inf))
    bad = jnp.isnan(x).any(-1) | ~((tau > 0) & (tau < jnp.inf)) | jnp.isnan(level)
    return jnp.where(bad, jnp.nan, t)


def _count(x: Array, at: Array, tau: Array, F: CDF) -> Array:
    """The soft count of x at each entry of ``at``, from below, under F with its median moved to 0.

    Infinite scores lie beyond all others, and count as ½ at equal ones.
    """

    @jax.checkpoint
    def one(a: Array) -> Array:
        a = a[..., None]
        far = jnp.isinf(a) | jnp.isinf(x)
        z = (jnp.where(far, 0, a) - jnp.where(far, 0, x)) / tau[..., None]
        whole = jnp.where(a == x, 0.5, a > x)
        return jnp.where(far, whole, F.cdf(z + F.median)).sum(-1)

    counts = jnp.moveaxis(lax.map(one, jnp.moveaxis(at, -1, 0)), 0, -1)
    bad = jnp.isnan(x).any(-1) | ~((tau > 0) & (tau < jnp.inf))
    return jnp.where(bad[..., None], jnp.nan, counts)


# -------------------------------------------------------------------------------------- Laplace


@dataclass(frozen=True)
class Order:
    """What is fixed when a call is traced."""

    what: str  # "rank" or "sort"
    descending: bool

    known = 2  # x and tau
    moved = (0, 1)

    def attributes(self, _: int) -> dict[str, Any]:
        """What the compiled kernels ask for."""
        return {"what": self.what, "descending": self.descending}


def _order_body(x: Array, tau: Array, *, law: Order) -> list[Array]:
    """By one sort and two scans, in logarithms: sums of exp(−distance) underflow between far entries."""
    n = x.shape[-1]
    if n == 0:
        return [x]
    bad = jnp.isnan(x).any(-1) | ~((tau > 0) & (tau < jnp.inf))
    order = jnp.argsort(lax.stop_gradient(x), axis=-1)
    s = jnp.take_along_axis(x, order, -1)
    most = jnp.finfo(x.dtype).max / 4
    distance = jnp.diff(jnp.clip(s, -most, most))
    # equal entries move apart, but not with τ, whose derivative would be 0/τ²
    tied, unit = distance == 0, tau[..., None]
    apart = jnp.where(tied, distance / lax.stop_gradient(unit), distance / jnp.where(tied, 1, unit))
    gap = jnp.where(apart < FAR, apart, FAR)
    far = jnp.full_like(s[..., :1], FAR)
    # log Σ exp(−distance/τ) of the entries up to each one, and of those from it on
    below = _decayed(jnp.concatenate([far, gap], -1), False)
    above = _decayed(jnp.concatenate([gap, far], -1), True)
    place = jnp.arange(n, dtype=x.dtype)
    excess = 0.5 * (jnp.exp(below) - jnp.exp(above))
    if law.what == "rank":
        ranks = place + 1 - excess
        ranks = n + 1 - ranks if law.descending else ranks
        values = jnp.take_along_axis(ranks, jnp.argsort(order, axis=-1), -1)
    else:
        # how many entries lie at or below the place from above
        search = jnp.vectorize(functools.partial(jnp.searchsorted, side="right"), signature="(n),(m)->(m)")
        count = search(lax.stop_gradient(place - excess), place)
        # of the entries around a place
        at = lambda array: jnp.take_along_axis(array, count, -1)
        lower, upper = at(jnp.concatenate([s[..., :1], s], -1)), at(jnp.concatenate([s, s[..., -1:]], -1))
        B, A = at(jnp.concatenate([-far, below], -1)), at(jnp.concatenate([above, -far], -1))
        apart = at(jnp.concatenate([far, gap, far], -1))
        # measured from the one that is nearer, since the other may be so far that digits would be lost
        at_lower = count > place
        A, B = jnp.where(at_lower, A - apart, A), jnp.where(at_lower, B, B - apart)
        values = jnp.where(at_lower, lower, upper) + tau[..., None] * _between(A, B, place - count + 0.5)
        values = jnp.where(jnp.isfinite(s), values, lax.stop_gradient(s))
        values = values[..., ::-1] if law.descending else values
    return [jnp.where(bad[..., None], jnp.nan, values)]


def _decayed(gap: Array, reverse: bool) -> Array:
    """log Σ_{j≤i} exp(−(s_i − s_j)), from the distances of neighbours."""

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.maximum(a[0] + b[0], -FAR), jnp.logaddexp(jnp.maximum(a[1] + b[0], -FAR), b[1])

    return lax.associative_scan(join, (-gap, jnp.zeros_like(gap)), reverse=reverse, axis=gap.ndim - 1)[1]


def _between(A: Array, B: Array, m: Array) -> Array:
    """d with ½e^(A + d) − ½e^(B − d) = m, what is above less the level."""
    length = 0.5 * (A + B)
    size = jnp.log(jnp.abs(m))
    large = size - length > math.log(LARGE)
    far = jnp.where(m > 0, size - A + math.log(2), B - size - math.log(2))
    return jnp.where(large, far, 0.5 * (B - A) + jnp.arcsinh(m * jnp.exp(-jnp.where(large, 0, length))))


def _order_push(x: Array, tau: Array, dx: Array, dtau: Array, *, law: Order) -> list[Array]:
    return list(jax.jvp(functools.partial(_order_body, law=law), (x, tau), (dx, dtau))[1])


def _order_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, law: Order) -> tuple[Any, Any]:
    return bind(_order, *primals, law=law), bind(_push, *primals, *arrays(tangents), law=law)


_push = linear("khot_order", _order_push)
_order = define("khot_order", _order_body, _order_jvp)
