"""Checks of the selector's arguments, and what the data makes of them."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, get_args

import numpy as np
from sklearn.utils import column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets

from khot._core.names import unknown

__all__ = ["Task", "check", "class_weights", "features", "labels", "number", "prices"]

Task = Literal["classification", "regression", "reconstruction"]


def check(selector: Any) -> None:
    """Raise for an argument that is out of range whatever the data is."""
    if selector.task not in get_args(Task):
        raise unknown("task", selector.task, get_args(Task))
    if selector.task == "reconstruction" and isinstance(selector.k, str) and selector.k == "auto":
        raise ValueError('k must be given for a reconstruction, where every feature tells of itself: "auto"')
    steps = selector.steps
    if not isinstance(steps, numbers.Integral) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps must be an integer >= 1, but got {steps!r}")
    weight = selector.class_weight
    known = weight is None or isinstance(weight, dict | list)
    if not (weight == "balanced" if isinstance(weight, str) else known):
        raise ValueError(
            f'class_weight must be "balanced", a dict, a list of dicts or None, but got {weight!r}'
        )


def features(groups: Any, n: int) -> Any:
    """Which feature each of n columns belongs to, counted from 0; (n,)."""
    if groups is None:
        return np.arange(n)
    labels = np.asarray(groups)
    if labels.shape != (n,):
        raise ValueError(f"groups must have shape ({n},), (n_features,), but got {labels.shape}")
    return np.unique(labels, return_inverse=True)[1]


def number(k: Any, n: int) -> int | None:
    """How many of n features to select, or None if that is to be found out."""
    if isinstance(k, str) and k == "auto":
        return None
    if isinstance(k, numbers.Integral) and not isinstance(k, bool) and 1 <= int(k) <= n:
        return int(k)
    if isinstance(k, numbers.Real) and not isinstance(k, numbers.Integral) and 0 < float(k) < 1:
        return max(int(float(k) * n), 1)
    raise ValueError(
        f"k must be an integer in [1, {n}] (as many as there are columns or groups), a share in (0, 1), "
        f'"auto", or None with a cost and a budget, but got {k!r}'
    )


def prices(selector: Any, feature: Any) -> tuple[Any, float] | None:
    """The price of each feature and what they may cost together; None without a cost."""
    n = len(feature)
    if selector.cost is None:
        if selector.budget is not None:
            raise ValueError(f"budget must be None without a cost, but got {selector.budget!r}")
        return None
    if selector.k is not None:
        raise ValueError(f"k must be None with a cost, but got {selector.k!r}")
    try:
        cost = np.asarray(selector.cost)
    except ValueError:  # rows of different lengths
        cost = np.asarray(selector.cost, dtype=object)
    if cost.dtype.kind not in "biuf":
        raise ValueError(f"cost must be an array of real numbers, but got {selector.cost!r}")
    if cost.shape != (n,):
        raise ValueError(f"cost must have shape ({n},), (n_features,), but got {cost.shape}")
    bad = ~((cost >= 0) & (cost < math.inf))
    if bad.any():
        raise ValueError(f"cost must be finite and >= 0, but got {cost[bad][0]}")
    budget = selector.budget
    if not isinstance(budget, numbers.Real) or isinstance(budget, bool) or not 0 < float(budget) < math.inf:
        raise ValueError(f"budget must be finite and > 0 with a cost, but got {selector.budget!r}")
    return np.bincount(feature, cost), float(budget)


def labels(y: Any) -> Any:
    """The labels of each output, (n, outputs)."""
    y = column_or_1d(y, warn=True)[:, None] if y.ndim == 1 or y.shape[1] == 1 else y
    for column in y.T:
        check_classification_targets(column)
    return y


def class_weights(class_weight: Any, y: Any) -> Any:
    """The weight of each example (n,) by its class, 1 where that depends on the others' weights."""
    if class_weight is None or isinstance(class_weight, str):
        return np.ones(len(y))
    weights = compute_sample_weight(class_weight, y[:, 0] if y.shape[1] == 1 else y)
    bad = ~((weights >= 0) & (weights < math.inf))
    if bad.any():
        raise ValueError(f"class_weight must be finite and >= 0, but got {weights[bad][0]}")
    return weights
