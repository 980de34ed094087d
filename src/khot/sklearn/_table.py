"""A table as the kernel machine wants it: few enough examples, standardised columns, weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.utils.extmath import randomized_svd
from torch import Tensor

from khot._kernel_machine import Data, draw, orthonormal

__all__ = ["Table", "balanced", "components", "counted", "drawn", "one_hot", "standardised"]

# Of more examples, this many are drawn, or fewer, so that a table has no more cells; not fewer than these.
EXAMPLES, CELLS, FEWEST = 10_000, 20_000_000, 1_000
# Columns that are standardised together.
PART = 256
# As many principal components as stand for all columns, where these are the targets.
COMPONENTS = 64


@dataclass(frozen=True)
class Table:
    """Examples of columns that vary.

    Attributes:
        columns: (n, columns), float32; standardised, or sparse and divided by the largest value alone.
        rows: the standardised columns of some examples, as :class:`khot._kernel_machine.Data` wants them.
        coefficients: (columns, DEGREE, DEGREE + 1), of the polynomials.
        feature: which feature each column belongs to.
        targets, weights: (n, outputs), (n,).
        y: the targets as a forest takes them.
    """

    columns: Any
    rows: Callable[[Tensor], Tensor]
    coefficients: Tensor
    feature: Any
    targets: Any
    weights: Any
    y: Any

    def data(self, examples: Any = None) -> Data:
        """All examples, or those of these indices."""
        at = np.arange(len(self.weights)) if examples is None else examples
        index = torch.from_numpy(at)
        return Data(
            self.rows if examples is None else lambda rows: self.rows(index[rows]),
            self.coefficients,
            torch.from_numpy(self.feature),
            torch.from_numpy(self.targets[at]).float(),
            torch.from_numpy(self.weights[at]),
        )


def drawn(n: int, columns: int, weights: Any, generator: torch.Generator) -> tuple[Any, Any]:
    """Indices of the examples that are looked at, in their order, and their weights."""
    size = min(EXAMPLES, max(CELLS // columns, FEWEST))
    if n <= size:
        return np.arange(n), weights / weights.mean()
    rows, left = draw(torch.from_numpy(weights), size, generator)
    rows, order = rows.sort()
    return rows.numpy(), left[order].double().numpy()


def counted(y: Any) -> Any:
    """The labels of each output, counted from 0; (n, outputs)."""
    return np.stack([np.unique(column, return_inverse=True)[1] for column in y.T], 1)


def balanced(y: Any, weights: Any) -> Any:
    """Weights with which all classes of an output weigh the same; those of several outputs multiply."""
    result = weights
    for column in y.T:
        total = np.bincount(column, weights)
        result = result / total[column]
    return result


def one_hot(y: Any) -> Any:
    """The classes (n, outputs), counted from 0, as columns of 0 and 1, those of one output after another."""
    return np.concatenate([np.eye(column.max() + 1)[column] for column in y.T], 1)


def components(columns: Any, seed: int) -> Any:
    """The first principal components of centred columns; (n, at most COMPONENTS).

    Who predicts these, with the deviations that they have, predicts the columns."""
    directions, deviations, _ = randomized_svd(columns, min(COMPONENTS, *columns.shape), random_state=seed)
    return directions * deviations


def standardised(X: Any) -> tuple[Any, Any, Callable[[Tensor], Tensor], Tensor]:
    """Columns of mean 0 and deviation 1: which of them are not constant; these, in float32, where X is sparse
    divided by their largest value alone; a function for the rows; and the coefficients of polynomials."""
    varies, means, deviations, largests, coefficients, dense = [], [], [], [], [], []
    by_columns = X.tocsc() if sparse.issparse(X) else X
    for start in range(0, X.shape[1], PART):
        part = by_columns[:, start : start + PART]
        part = (part.toarray() if sparse.issparse(X) else part).astype(np.float64)
        largest = np.abs(part).max(0)
        largest = np.where(largest > 0, largest, 1.0)
        part = part / largest  # so that no square overflows or underflows
        mean, deviation = part.mean(0), part.std(0)
        # values that differ only by rounding do not vary
        here = (part.min(0) < part.max(0)) & (deviation > 10 * np.finfo(np.float64).eps)
        part = ((part - mean) / np.where(here, deviation, 1.0))[:, here]
        coefficients.append(orthonormal(torch.from_numpy(part)).float())
        varies.append(here)
        means.append(mean[here])
        deviations.append(deviation[here])
        largests.append(largest)
        if not sparse.issparse(X):
            dense.append(part.astype(np.float32))
    kept, largest = np.concatenate(varies), np.concatenate(largests)
    if not sparse.issparse(X):
        columns = np.concatenate(dense, 1)
        whole = torch.from_numpy(columns)
        return kept, columns, lambda rows: whole[rows], torch.cat(coefficients)
    scaled = X.tocsr().astype(np.float64)
    scaled.data = scaled.data / largest[scaled.indices]
    columns = scaled[:, kept].astype(np.float32)
    mean, deviation = np.concatenate(means), np.concatenate(deviations)

    def rows_of(rows: Tensor) -> Tensor:
        return torch.from_numpy((columns[rows.numpy()].toarray() - mean) / deviation).float()

    return kept, columns, rows_of, torch.cat(coefficients)
