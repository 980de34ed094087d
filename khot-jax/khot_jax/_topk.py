"""The soft top-k, its logarithm, the soft budget, and the hard mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from khot_jax import _arguments as arguments
from khot_jax import cdfs
from khot_jax._primitives import bind, define
from khot_jax._threshold import solve
from khot_jax.cdfs import CDF

__all__ = ["log_soft_topk", "soft_budget", "soft_topk", "topk_mask"]


def soft_topk(
    x: Any,
    k: Any,
    axis: int = -1,
    *,
    tau: Any = 1.0,
    cdf: str | CDF = "logistic",
    largest: bool = True,
    where: Any = None,
    hard: bool = False,
) -> Array:
    """A k-hot mask that is differentiable: k ones, spread softly over the largest entries of each row.

        y_i = F((x_i − t)/τ),   with the t for which Σ_i y_i = k

    As τ → 0, y tends to the hard top-k mask; as τ → ∞, to k/n everywhere.

    Args:
        x: scores, of any floating-point dtype. −inf is never selected, +inf always.
        k: how many to select, in [0, n], not necessarily an integer; a number or an array that broadcasts
            with the batch shape (x's shape without ``axis``). It may be traced.
        axis: the axis to select along.
        tau: temperature > 0, in the units of the scores; a number or an array, as k.
        cdf: ``"logistic"``, ``"laplace"``, ``"normal"``, ``"uniform"``, or an object of :mod:`khot_jax.cdfs`.
        largest: select the largest entries; if False, the smallest.
        where: bool, broadcastable to x; True where an entry may be selected. Entries under False are
            ignored, even NaN and inf.
        hard: return the mask of :func:`topk_mask`, with the gradient of the soft one (straight-through).

    Returns:
        An array of x's shape and dtype, in [0, 1], each row summing to k. A row is NaN if it holds a NaN or
        more than k entries of +inf, or if its k or tau is out of range.

    Differentiable in x, k and tau, exactly (by implicit differentiation), in both modes and to any order.

    Raises:
        ValueError: a Python number k or tau out of range; arguments that do not broadcast; an unknown cdf; an
            axis that x does not have.
        TypeError: x that is not of floating point, ``where`` that is not bool.

    Source: as for khot.soft_topk: Wijk et al. 2025, Struski et al. 2025, Sander et al. 2023, Xie et al. 2020.

    Example:
        >>> y = khot_jax.soft_topk(jnp.array([1.0, 3.0, 2.0, 0.0]), 2, tau=0.5)
        >>> print(jnp.array_str(y, precision=4))
        [0.2689 0.9526 0.7311 0.0474]
    """
    arguments.flag(hard, "hard")
    y = _soft(x, k, axis, tau, cdf, largest, where, "y")
    if not hard:
        return y
    y_hard = topk_mask(x, k, axis, largest=largest, where=where)
    # not y + stop_gradient(y_hard − y), which would be rounded: 0.99999994 is no one
    return y_hard + (y - lax.stop_gradient(y))


def log_soft_topk(
    x: Any,
    k: Any,
    axis: int = -1,
    *,
    tau: Any = 1.0,
    cdf: str | CDF = "logistic",
    largest: bool = True,
    where: Any = None,
) -> Array:
    """The logarithm of :func:`soft_topk`, finite where y underflows.

    It is −inf where y is exactly 0: where an entry may not be selected, or under a CDF of compact support.
    Arguments, gradients and errors are those of :func:`soft_topk`.

    Example:
        >>> log_y = khot_jax.log_soft_topk(jnp.array([0.0, 1.0, 400.0]), 1)
        >>> print(jnp.array_str(log_y, precision=2))
        [-200.66 -199.66    0.  ]
    """
    return _soft(x, k, axis, tau, cdf, largest, where, "log")


def soft_budget(
    x: Any,
    weights: Any,
    budget: Any,
    axis: int = -1,
    *,
    tau: Any = 1.0,
    cdf: str | CDF = "logistic",
    where: Any = None,
) -> Array:
    """A differentiable selection of entries with costs: the shares y that spend a budget, Σ_i w_i y_i = B.

        y_i = F((x_i − t)/τ),   with the t for which Σ_i w_i y_i = B

    It is :func:`soft_topk` with a sum of costs in place of the number of entries. Equal scores have equal
    shares. With log-probabilities as x, probabilities as weights and the budget p, it is a soft top-p.

    Args:
        x: scores, of any floating-point dtype. −inf is never selected and is not paid for; +inf always.
        weights: the costs w ≥ 0, an array of real numbers that broadcasts to x.
        budget: B, in [0, cost of all entries that may be selected]; a number or an array that broadcasts with
            the batch shape. A budget that exceeds all costs by the rounding of their sum pays for all.
        axis, tau, cdf, where: as for :func:`soft_topk`.

    Returns:
        An array of x's shape and dtype, in [0, 1]. A row is NaN if it holds a NaN, a negative or infinite
        cost, or entries of +inf that cost more than the budget, or if its budget or tau is out of range.

    Differentiable in x, weights, budget and tau, exactly, in both modes and to any order. Errors are those of
    :func:`soft_topk`.

    Example:
        >>> scores, cost = jnp.array([1.0, 3.0, 2.0, 0.0]), jnp.array([1.0, 2.0, 1.0, 4.0])
        >>> y = khot_jax.soft_budget(scores, cost, 3.0, tau=0.5)
        >>> print(jnp.array_str(y, precision=4))
        [0.2416 0.9456 0.7018 0.0413]
    """
    F = cdfs.resolve(cdf)
    rows = arguments.rows(x, axis, where)
    cost = arguments.costs(weights, x, axis)
    if where is not None:
        cost = jnp.where(arguments.selected(where, x, axis), cost, 0)
    goal = arguments.per_row(budget, "budget", rows)
    tau = arguments.per_row(tau, "tau", rows, positive=True)
    y, _, _ = solve(rows, goal, tau, cost.astype(goal.dtype), F, "y")
    return jnp.moveaxis(y, -1, axis)


def topk_mask(x: Any, k: Any, axis: int = -1, *, largest: bool = True, where: Any = None) -> Array:
    """The hard k-hot mask: 1 for the ⌊k + ½⌋ largest entries of each row, 0 for the others.

    Ties go to the lowest index. The mask has no gradient. Unlike ``jax.lax.top_k`` it takes a traced k.
    Errors are those of :func:`soft_topk`.

    Args:
        x, k, axis, largest, where: as for :func:`soft_topk`.

    Returns:
        Zeros and ones of x's shape and dtype. A row is NaN as for :func:`soft_topk`.

    Example:
        >>> print(khot_jax.topk_mask(jnp.array([1.0, 3.0, 2.0, 0.0]), 2))
        [0. 1. 1. 0.]
    """
    arguments.flag(largest, "largest")
    rows = arguments.rows(x, axis, where, largest=largest)
    k = arguments.per_row(k, "k", rows, high=rows.shape[-1])
    (y,) = bind(_mask, lax.stop_gradient(rows), lax.stop_gradient(k))
    return jnp.moveaxis(y, -1, axis)


def _soft(
    x: Any, k: Any, axis: int, tau: Any, cdf: str | CDF, largest: bool, where: Any, output: str
) -> Array:
    F = cdfs.resolve(cdf)
    arguments.flag(largest, "largest")
    rows = arguments.rows(x, axis, where, largest=largest)
    k = arguments.per_row(k, "k", rows, high=rows.shape[-1])
    tau = arguments.per_row(tau, "tau", rows, positive=True)
    y, _, _ = solve(rows, k, tau, None, F, output)
    return jnp.moveaxis(y, -1, axis)


def _mask_body(x: Array, k: Array) -> Sequence[Array]:
    """What exceeds the k-th largest entry, and of those that equal it the first. k may be traced."""
    n = x.shape[-1]
    if n == 0:
        return [x]
    selectable, pinned = (x != -jnp.inf).sum(-1), (x == jnp.inf).sum(-1)
    whole = jnp.floor(k + 0.5)
    bad = jnp.isnan(x).any(-1) | ~((k >= 0) & (k <= selectable)) | (pinned > whole)
    count = jnp.where(bad, 0, whole).astype(jnp.int32)[..., None]
    t = jnp.take_along_axis(jnp.sort(x, -1), n - jnp.maximum(count, 1), -1)
    above, tie = x > t, x == t
    chosen = above | (tie & (jnp.cumsum(tie, -1) <= count - above.sum(-1, keepdims=True)))
    return [jnp.where(bad[..., None], jnp.nan, chosen).astype(x.dtype)]


_mask = define("khot_mask", _mask_body)
