"""What a forest believes about features."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

from khot.sklearn._arguments import Task
from khot.sklearn._table import Table

__all__ = ["TREES", "prior"]

# A third of the columns at each split is what Breiman (2001) takes for regression; many take too long.
TREES, TRIED_PER_SPLIT, MOST_TRIED = 100, 1 / 3, 100


def prior(table: Table, examples: Any, task: Task, seed: int) -> Any:
    """The log of the share of the splits' gain that each feature has.

    A feature of no gain is as likely as one of a tenth of the mean. Where the features are themselves the
    targets, each of which has the most gain for its own, all are as likely."""
    features = int(table.feature.max()) + 1
    if task == "reconstruction":
        return np.zeros(features)
    X, y, weights = table.columns[examples], table.y[examples], table.weights[examples]
    if task == "regression":
        tried = int(max(min(X.shape[1] * TRIED_PER_SPLIT, MOST_TRIED), X.shape[1] ** 0.5, 1))
        forest = RandomForestRegressor(TREES, max_features=tried, random_state=seed)
    else:
        forest = RandomForestClassifier(TREES, random_state=seed)
    forest.fit(X, y[:, 0] if y.shape[1] == 1 else y, sample_weight=weights)
    gain = np.bincount(table.feature, forest.feature_importances_, features)
    return np.log(gain + 0.1 / features)
