"""The soft top-k, its logarithm, and the hard mask."""

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

__all__ = ["log_soft_topk", "soft_topk", "topk_mask"]


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


def topk_mask(x: Any, k: Any, axis: int = -1, *, largest: bool = True, where: Any = None) -> Array:
    """The hard k-hot mask: 1 for the ⌊k + ½⌋ largest entries of each row, 0 for the others.

    Ties go to the lowest index. The mask has no gradient. Unlike ``jax.lax.top_k`` it takes a traced k.

    Args:
        x, k, axis, largest, where: as for :func:`soft_topk`.

    Returns:
        Zeros and ones of x's shape and dtype. A row is NaN as for :func:`soft_topk`.

    Raises:
        ValueError, TypeError: as for :func:`soft_topk`.

    Example:
        >>> print(khot_jax.topk_mask(jnp.array([1.0, 3.0, 2.0, 0.0]), 2))
        [0. 1. 1. 0.]
    """
    arguments.flag(largest, "largest")
    rows = arguments.rows(x, axis, where, largest=largest)
    k = arguments.per_row(k, "k", rows, high=rows.shape[-1])
    (y,) = bind(_mask, lax.stop_gradient(rows), lax.stop_gradient(k))
    return arguments.unrows(y, axis)


def _soft(
    x: Any, k: Any, axis: int, tau: Any, cdf: str | CDF, largest: bool, where: Any, output: str
) -> Array:
    F = cdfs.resolve(cdf)
    arguments.flag(largest, "largest")
    rows = arguments.rows(x, axis, where, largest=largest)
    k = arguments.per_row(k, "k", rows, high=rows.shape[-1])
    tau = arguments.per_row(tau, "tau", rows, low_open=True)
    y, _, _ = solve(rows, k, tau, None, F, output)
    return arguments.unrows(y, axis)


def _mask_body(x: Array, k: Array) -> Sequence[Array]:
    """The k-th largest key of each row, found bit by bit, so that k may be traced."""
    dtype = arguments.wide(x)
    wide = x.astype(dtype)
    selectable, pinned = (wide != -jnp.inf).sum(-1), (wide == jnp.inf).sum(-1)
    whole = jnp.floor(k + 0.5)
    bad = jnp.isnan(wide).any(-1) | ~((k >= 0) & (k <= selectable)) | (pinned > whole)
    count = jnp.where(bad, 0, whole).astype(jnp.int32)
    integer = jnp.int32 if dtype == jnp.float32 else jnp.int64
    least = jnp.iinfo(integer).min
    bits = lax.bitcast_convert_type(jnp.where(wide == 0, 0, wide), integer)
    key = jnp.where(bits < 0, least - bits, bits)  # ordered as the numbers

    def body(i: Array, t: Array) -> Array:
        width = jnp.iinfo(integer).bits
        trial = jnp.where(i == 0, jnp.zeros_like(t), t | (jnp.ones_like(t) << (width - 1 - i)))
        enough = (key >= trial[..., None]).sum(-1) >= count
        return jnp.where(enough, trial, t)

    t = lax.fori_loop(0, jnp.iinfo(integer).bits, body, jnp.full(k.shape, least, integer))
    above, tie = key > t[..., None], key == t[..., None]
    left = count - above.sum(-1)
    chosen = (above | (tie & (jnp.cumsum(tie, -1) <= left[..., None]))) & (count > 0)[..., None]
    return [jnp.where(bad[..., None], jnp.nan, chosen).astype(x.dtype)]


_mask = define("khot_mask", _mask_body)
