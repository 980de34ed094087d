"""How many features are needed, by cross-validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from khot._kernel_gates import path
from khot.sklearn._arguments import Task
from khot.sklearn._forest import prior
from khot.sklearn._table import Table

__all__ = ["LARGEST", "smallest"]

FOLDS = 5
# No larger number of features is looked at.
LARGEST = 64


def smallest(
    table: Table,
    task: Task,
    steps: int,
    seed: int,
    generator: torch.Generator,
    report: Callable[[str], None],
) -> tuple[int, Any, Any]:
    """The smallest number of features whose error is within a standard error of the best.

    In each fold features are removed one after the other, and each set predicts the fold's examples. Returns
    the number; and for the numbers from 1 the mean error and its standard error over folds."""
    n, features = len(table.weights), int(table.feature.max()) + 1
    largest, folds = min(features, LARGEST), min(FOLDS, n)
    # examples of a class, or of similar targets, are spread over the folds
    random = torch.rand(n, generator=generator).numpy()
    fold = np.empty(n, np.int64)
    fold[np.lexsort((random, table.y[:, 0]))] = np.arange(n) % folds
    errors = np.empty((folds, largest))
    for at in range(folds):
        report(f"fold {at + 1} of {folds}, 1 to {largest} features")
        inside, outside = np.flatnonzero(fold != at), np.flatnonzero(fold == at)
        belief = torch.from_numpy(prior(table, inside, task, seed + at)).float()
        others = table.data(outside)
        targets, weights = others.targets, others.weights / others.weights.sum()
        predictions = path(table.data(inside), others, belief, largest, steps, generator)
        for number, predicted in predictions:
            error = (predicted - targets).square().sum(-1).double()
            errors[at, number - 1] = float(weights @ error)
    mean, deviation = errors.mean(0), errors.std(0, ddof=1) / folds**0.5
    best = int(mean.argmin())
    number = int(np.flatnonzero(mean <= mean[best] + deviation[best])[0]) + 1
    report(
        f"{number} features: their error {mean[number - 1]:.3f} is within {deviation[best]:.3f} of the best"
    )
    return number, mean, deviation
