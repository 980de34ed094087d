"""k-hot samples with given inclusion probabilities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from khot_jax import _arguments as arguments
from khot_jax._topk import soft_topk

__all__ = ["sample_khot"]


def sample_khot(key: Any, logits: Any, k: Any, axis: int = -1, *, tau: Any = 1.0, hard: bool = True) -> Array:
    """Draw k of n at random, with a gradient: a k-hot sample, as Gumbel-softmax draws a one-hot sample.

    With ``hard`` the sample has Σx = k and E[x] = y, the soft top-k of the logits, and its gradient is that
    of y (straight-through). Its design is pivotal: entries in random order play a tournament, so that E[x] is
    exact. A k that is not an integer gives ⌊k⌋ or ⌈k⌉ ones. With ``hard=False`` it is relaxed instead: the
    soft top-k of logits + Gumbel noise, whose gradient is exact.

    Args:
        key: a key of ``jax.random``.
        logits: scores of any floating-point dtype. −inf is never drawn, +inf always.
        k, axis, tau: as for :func:`soft_topk`.
        hard: False for a relaxed sample, in [0, 1]ⁿ.

    Returns:
        Zeros and ones (or relaxed numbers) of the logits' shape and dtype. A row is NaN as for
        :func:`soft_topk`.

    Raises:
        ValueError, TypeError: as for :func:`soft_topk`.

    Source: Wijk, Vinuesa, Azizpour 2025, Algorithms 1 and 3; Deville, Tillé 1998 for the design.

    Example:
        >>> x = khot_jax.sample_khot(jax.random.key(0), jnp.zeros((3, 8)), 2)
        >>> print(x.sum(-1))
        [2. 2. 2.]
    """
    arguments.flag(hard, "hard")
    rows = arguments.rows(logits, axis)
    wide = rows.astype(arguments.wide(rows))
    if not hard:
        noise = jax.random.gumbel(key, rows.shape, wide.dtype)
        return jnp.moveaxis(soft_topk(wide + noise, k, tau=tau).astype(rows.dtype), -1, axis)
    y = soft_topk(wide, k, tau=tau)
    k = arguments.per_row(k, "k", rows)
    drawn = _tournament(key, lax.stop_gradient(y), lax.stop_gradient(k))
    return jnp.moveaxis((drawn + (y - lax.stop_gradient(y))).astype(rows.dtype), -1, axis)


def _tournament(key: Array, probs: Array, k: Array) -> Array:
    """Zeros and ones with these expectations, which sum to k.

    Two units with probabilities p and q meet. If p + q < 1, one of them is out, and the other goes on with
    p + q; otherwise one of them is in, and the other goes on with p + q − 1. What goes on is decided at the
    end, where it is what the others have left of k.
    """
    order_key, end_key, *keys = jax.random.split(key, 2 + max(1, probs.shape[-1]).bit_length())
    n = probs.shape[-1]
    if n == 0:
        return probs
    noise = jax.random.uniform(order_key, probs.shape)
    order = jnp.argsort(noise, axis=-1)
    width = 1 << (n - 1).bit_length()
    level = jnp.take_along_axis(probs, order, -1)
    level = jnp.pad(level, [(0, 0)] * (probs.ndim - 1) + [(0, width - n)])
    duels = []
    while level.shape[-1] > 1:
        p, q = level[..., 0::2], level[..., 1::2]
        both = p + q
        low = both < 1
        stays = jnp.where(low, p / jnp.where(both > 0, both, 1), (1 - p) / jnp.where(both < 2, 2 - both, 1))
        first = jax.random.uniform(keys.pop(), both.shape, both.dtype) < stays
        level = jnp.where(low, both, both - 1)
        duels.append((first, ~low))
    last = level[..., 0]
    drawn = jax.random.uniform(end_key, last.shape, last.dtype) < last
    drawn = jnp.where(k == jnp.floor(k), last > 0.5, drawn)[..., None]
    for first, other in reversed(duels):
        pair = jnp.where(first, drawn, other), jnp.where(first, other, drawn)
        drawn = jnp.stack(pair, -1).reshape(*first.shape[:-1], 2 * first.shape[-1])
    drawn = jnp.take_along_axis(drawn[..., :n], jnp.argsort(order, axis=-1), -1)
    return jnp.where(jnp.isnan(probs), probs, drawn.astype(probs.dtype))
