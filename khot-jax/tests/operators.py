"""Every public operator, as a function of arrays in which it is differentiable, for tests of transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import khot_jax as kj

try:
    from jax import enable_x64
except ImportError:  # jax 0.6
    from jax.experimental import enable_x64  # type: ignore[no-redef]

__all__ = ["OPERATORS", "arguments", "enable_x64"]

# name: (the function, how many arguments after x and before tau, whether it is smooth)
OPERATORS: dict[str, tuple[Callable[..., Array], int, bool]] = {
    "soft_topk logistic": (lambda x, k, tau: kj.soft_topk(x, k, tau=tau), 1, True),
    "soft_topk laplace": (lambda x, k, tau: kj.soft_topk(x, k, tau=tau, cdf="laplace"), 1, False),
    "soft_topk normal": (lambda x, k, tau: kj.soft_topk(x, k, tau=tau, cdf="normal", largest=False), 1, True),
    "soft_topk uniform": (lambda x, k, tau: kj.soft_topk(x, k, tau=4 * tau, cdf="uniform"), 1, False),
    "soft_topk power": (lambda x, k, tau: kj.soft_topk(x, k, tau=4 * tau, cdf=kj.cdfs.Power(1.5)), 1, False),
    "log_soft_topk": (lambda x, k, tau: kj.log_soft_topk(x, k, tau=tau), 1, True),
    "log_soft_topk normal": (lambda x, k, tau: kj.log_soft_topk(x, k, tau=tau, cdf="normal"), 1, True),
    "soft_budget": (lambda x, w, b, tau: kj.soft_budget(x, w, b, tau=tau), 2, True),
    "soft_rank laplace": (lambda x, tau: kj.soft_rank(x, tau=tau), 0, False),
    "soft_rank logistic": (lambda x, tau: kj.soft_rank(x, tau=tau, cdf="logistic", descending=True), 0, True),
    "soft_sort laplace": (lambda x, tau: kj.soft_sort(x, tau=tau, descending=True), 0, False),
    "soft_sort normal": (lambda x, tau: kj.soft_sort(x, tau=tau, cdf="normal"), 0, True),
    "soft_quantile": (lambda x, q, tau: kj.soft_quantile(x, q, tau=tau, cdf="logistic"), 1, True),
}


def arguments(name: str, n: int = 7, dtype: Any = jnp.float32) -> tuple[Array, ...]:
    """Of one row, away from kinks."""
    rng = np.random.default_rng(sum(map(ord, name)))
    x = rng.permutation(np.linspace(-1.3, 1.4, n) + 0.05 * rng.random(n))
    between: tuple[Any, ...] = (2.3,)
    if name == "soft_budget":
        w = 0.5 + rng.random(n)
        between = (w, 0.4 * w.sum())
    elif name == "soft_quantile":
        between = (0.3,)
    between = between[: OPERATORS[name][1]]
    return tuple(jnp.asarray(each, dtype) for each in (x, *between, 0.7))
