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
from khot_jax._primitives import bind, define, derivatives, zeros
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

    Differentiable in x and tau, exactly, in both modes.

    Raises:
        ValueError, TypeError: as for :func:`soft_topk`.

    Source: Struski et al. 2025, section 3.2 and Theorem 3.2.

    Example:
        >>> print(khot_jax.soft_rank(jnp.array([10.0, 30.0, 20.0]), tau=0.5))
        [1. 3. 2.]
    """
    F, sign, rows, tau = _given(x, axis, tau, cdf, descending, where)
    wide, last = rows.astype(tau.dtype), math.inf * sign
    if isinstance(F, Laplace):
        ranks = _ordered(wide, tau, "rank", descending)
    else:
        ranks = _count(sign * wide, sign * wide, tau, F) + 0.5
    if where is not None:
        taken = arguments.selected(where, x, axis)
        out = (~taken).sum(-1, keepdims=True)
        ranks = jnp.where(wide == last, ranks - 0.5 * out, ranks)  # those under False were tied with these
        ranks = jnp.where(taken | jnp.isnan(ranks), ranks, 0)
    return arguments.unrows(ranks.astype(rows.dtype), axis)


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

    Differentiable in x and tau, exactly, in both modes.

    Raises:
        ValueError, TypeError: as for :func:`soft_topk`.

    Source: Struski et al. 2025, section 3.2 and Proposition 4.2.

    Example:
        >>> print(khot_jax.soft_sort(jnp.array([10.0, 30.0, 20.0]), tau=0.5))
        [10. 20. 30.]
    """
    F, sign, rows, tau = _given(x, axis, tau, cdf, descending, where)
    wide, n = rows.astype(tau.dtype), rows.shape[-1]
    if isinstance(F, Laplace):
        values = _ordered(wide, tau, "sort", descending)
    else:
        level = lambda i: _level(-sign * wide, i + 0.5, tau, F)
        values = -sign * jnp.moveaxis(lax.map(level, jnp.arange(n, dtype=tau.dtype)), 0, -1)
    if where is not None:
        count = arguments.selected(where, x, axis).sum(-1, keepdims=True)
        values = jnp.where((jnp.arange(n) < count) | jnp.isnan(values), values, 0)
    return arguments.unrows(values.astype(rows.dtype), axis)


def _given(
    x: Any, axis: int, tau: Any, cdf: str | CDF, descending: bool, where: Any
) -> tuple[CDF, int, Array, Array]:
    """The CDF, −1 for a descending order, the rows with what is not taken behind the others, and τ."""
    F = cdfs.resolve(cdf)
    arguments.flag(descending, "descending")
    sign = -1 if descending else 1
    rows = arguments.rows(x, axis, where, fill=math.inf * sign)
    return F, sign, rows, arguments.per_row(tau, "tau", rows, low_open=True)


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

    Differentiable in x, q and tau, exactly, in both modes and to any order.

    Raises:
        ValueError, TypeError: as for :func:`soft_topk`.

    Example:
        >>> x = jnp.array([3.0, 1.0, 4.0, 1.5, 9.0])
        >>> print(
        ...     jnp.array_str(khot_jax.soft_quantile(x, jnp.array([0.0, 0.25, 1.0]), tau=0.01), precision=4)
        ... )
        [1.  1.5 9. ]
    """
    F = cdfs.resolve(cdf)
    rows = arguments.rows(x, axis, where)
    tau = arguments.per_row(tau, "tau", rows, low_open=True)
    arguments.per_row(q, "q", rows[..., 0], high=1) if jnp.ndim(q) == 0 else None
    q = jnp.asarray(q, tau.dtype)
    if q.ndim > 1:
        raise ValueError(f"q must have at most one axis, but has the shape {q.shape}")
    count = arguments.selected(where, x, axis).sum(-1).astype(tau.dtype)
    wide = rows.astype(tau.dtype)

    def of(q: Array) -> Array:
        level = jnp.where((q >= 0) & (q <= 1) & (count > 0), 0.5 + (1 - q) * (count - 1), jnp.nan)
        return _level(wide, level, tau, F).astype(rows.dtype)

    return jax.vmap(of)(q) if q.ndim else of(q)


def _level(x: Array, level: Any, tau: Array, F: CDF) -> Array:
    """Where the soft count from above, under F with its median moved to 0, is the level.

    Infinite scores count as those beyond all finite ones, and are the answer for the levels that they fill.
    """
    level = jnp.broadcast_to(level, tau.shape)
    high, low = (x == jnp.inf).sum(-1), (x == -jnp.inf).sum(-1)
    above, below = level <= high, (level >= x.shape[-1] - low) & (low > 0)
    finite = ~(above & (high > 0)) & ~below
    _, hi, lo = solve(
        x, jnp.where(finite, level, 0.5 * (high + x.shape[-1] - low)), tau, None, F, "threshold"
    )
    t = (hi + F.median * tau) + lo
    ends = jnp.where(below, -jnp.inf, jnp.inf)
    bad = jnp.isnan(x).any(-1) | ~((tau > 0) & (tau < jnp.inf)) | jnp.isnan(level)
    return jnp.where(bad, jnp.nan, jnp.where(finite, t, ends))


def _count(x: Array, at: Array, tau: Array, F: CDF) -> Array:
    """The soft count of x at each entry of ``at``, from below, under F with its median moved to 0."""

    @jax.checkpoint
    def one(a: Array) -> Array:
        same = jnp.isinf(x) & (x == a[..., None])
        z = jnp.where(same, 0, a[..., None] - jnp.where(same, 0, x)) / tau[..., None]
        z = jnp.where(same, 0, z)
        return F.cdf(z + F.median).sum(-1)

    counts = jnp.moveaxis(lax.map(one, jnp.moveaxis(at, -1, 0)), 0, -1)
    bad = jnp.isnan(x).any(-1) | ~((tau > 0) & (tau < jnp.inf))
    return jnp.where(bad[..., None], jnp.nan, counts)


# -------------------------------------------------------------------------------------- Laplace


@dataclass(frozen=True)
class Order:
    """What is fixed when a call is traced."""

    what: str  # "rank" or "sort"
    descending: bool

    @property
    def known(self) -> int:
        """x and tau."""
        return 2


def _ordered(x: Array, tau: Array, what: str, descending: bool) -> Array:
    (values,) = bind(_order, x, tau, law=Order(what, descending))
    return values


def _order_body(x: Array, tau: Array, *, law: Order) -> list[Array]:
    """By one sort and two scans, in logarithms: sums of exp(−distance) underflow between far entries."""
    n = x.shape[-1]
    bad = jnp.isnan(x).any(-1) | ~((tau > 0) & (tau < jnp.inf))
    if n == 0:
        return [x]
    order = jnp.argsort(lax.stop_gradient(x), axis=-1)
    s = jnp.take_along_axis(x, order, -1)
    below, above = _distance(s[..., :-1]), _distance(s[..., 1:])
    apart = jnp.where(below == above, 0, (above - below) / tau[..., None])
    gap = jnp.minimum(jnp.where(jnp.isfinite(apart), apart, FAR), FAR)
    from_below = _decayed(gap)
    from_above = _decayed(gap[..., ::-1])[..., ::-1]
    place = jnp.arange(n, dtype=x.dtype)
    excess = 0.5 * (jnp.exp(from_below) - jnp.exp(from_above))
    if law.what == "rank":
        ranks = place + 1 - excess
        ranks = n + 1 - ranks if law.descending else ranks
        values = jnp.take_along_axis(ranks, jnp.argsort(order, axis=-1), -1)
    else:
        values = _sorted(s, gap, from_below, from_above, excess, place, tau)
        values = values[..., ::-1] if law.descending else values
    return [jnp.where(bad[..., None], jnp.nan, values)]


def _distance(s: Array) -> Array:
    """s with the greatest numbers in place of infinities."""
    return jnp.clip(s, -jnp.finfo(s.dtype).max / 4, jnp.finfo(s.dtype).max / 4)


def _decayed(gap: Array) -> Array:
    """log Σ_{j<i} exp(−(s_i − s_j)) of rows that ascend, from the distances of neighbours."""

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.maximum(a[0] + b[0], -FAR), jnp.logaddexp(jnp.maximum(a[1] + b[0], -FAR), b[1])

    if gap.shape[-1] == 0:
        return jnp.full((*gap.shape[:-1], 1), -FAR, gap.dtype)
    first = jnp.full_like(gap[..., :1], -FAR)
    _, sums = lax.associative_scan(join, (-gap, -gap), axis=-1)
    return jnp.concatenate([first, sums], -1)


def _sorted(
    s: Array, gap: Array, from_below: Array, from_above: Array, excess: Array, place: Array, tau: Array
) -> Array:
    """Where the count from above is n − ½ − p, for p = 0, …, n − 1: in closed form between neighbours."""
    n = s.shape[-1]
    # the last entry at or below the level, −1 if it lies below all
    search = functools.partial(jnp.searchsorted, side="right")
    for _ in range(s.ndim - 1):
        search = jax.vmap(search, in_axes=(0, None))
    lower = search(lax.stop_gradient(place - excess), place) - 1
    take = lambda values, at: jnp.take_along_axis(values, jnp.clip(at, 0, values.shape[-1] - 1), -1)
    inside = (lower >= 0) & (lower < n - 1)
    apart = jnp.where(inside, take(gap, lower), FAR) if n > 1 else jnp.full_like(s, FAR)
    half = math.log(0.5)
    has_below, has_above = lower >= 0, lower < n - 1
    B = jnp.where(has_below, half + jnp.logaddexp(take(from_below, lower), 0), -FAR)
    A = jnp.where(has_above, half + jnp.logaddexp(take(from_above, lower + 1), 0), -FAR)
    # measured from the lower neighbour, or from the upper one if that is none, or infinite
    at_lower = has_below & jnp.isfinite(take(s, lower))
    anchor = jnp.where(at_lower, take(s, lower), take(s, lower + 1))
    A = jnp.where(at_lower, A - apart, A)
    B = jnp.where(at_lower, B, B - apart)
    m = place - lower - 0.5  # what is above less the level
    length = 0.5 * (A + B) + math.log(2)
    size = jnp.log(jnp.abs(m))
    large = size - length > math.log(LARGE)
    far = jnp.where(m > 0, size - A, B - size)
    near = 0.5 * (B - A) + jnp.arcsinh(m * jnp.exp(-jnp.where(large, 0, length)))
    t = anchor + tau[..., None] * jnp.where(large, far, near)
    return jnp.where(jnp.isfinite(s), t, s)


def _order_push(x: Array, tau: Array, dx: Array, dtau: Array, *, law: Order) -> list[Array]:
    return list(jax.jvp(functools.partial(_order_body, law=law), (x, tau), (dx, dtau))[1])


def _order_pull(x: Array, tau: Array, v: Array, *, law: Order) -> list[Array]:
    return list(jax.vjp(functools.partial(_order_body, law=law), x, tau)[1]([v]))


_order = define("khot_order", _order_body)
_push = define("khot_order_push", _order_push)
_pull = define("khot_order_pull", _order_pull)


def _order_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, law: Order) -> tuple[Any, Any]:
    results = bind(_order, *primals, law=law)
    return results, bind(_push, *primals, *zeros(tangents), law=law)


derivatives(_order, _order_jvp, _push, _pull)
