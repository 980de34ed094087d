"""The soft budget: as much as a budget pays for."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from khot_jax import _arguments as arguments
from khot_jax import cdfs
from khot_jax._threshold import solve
from khot_jax.cdfs import CDF

__all__ = ["soft_budget"]


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

    Differentiable in x, weights, budget and tau, exactly, in both modes and to any order.

    Raises:
        ValueError, TypeError: as for :func:`soft_topk`.

    Example:
        >>> scores, cost = jnp.array([1.0, 3.0, 2.0, 0.0]), jnp.array([1.0, 2.0, 1.0, 4.0])
        >>> y = khot_jax.soft_budget(scores, cost, 3.0, tau=0.5)
        >>> print(jnp.array_str(y, precision=4))
        [0.2416 0.9456 0.7018 0.0413]
    """
    F = cdfs.resolve(cdf)
    rows = arguments.rows(x, axis, where)
    cost = arguments.of_entries(weights, "weights", x, axis)
    if where is not None:
        cost = jnp.where(arguments.selected(where, x, axis), cost, 0)
    goal = arguments.per_row(budget, "budget", rows)
    tau = arguments.per_row(tau, "tau", rows, low_open=True)
    y, _, _ = solve(rows, goal, tau, cost.astype(goal.dtype), F, "y")
    return arguments.unrows(y, axis)
