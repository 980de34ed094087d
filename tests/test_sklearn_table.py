"""What the feature selector makes of a table before it learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

from khot.sklearn._table import CELLS, EXAMPLES, FEWEST, balanced, counted, drawn, one_hot, standardised

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "n, columns, expected",
    [
        (5_000, 100, 5_000),
        (100_000, 100, EXAMPLES),
        (100_000, 10_000, CELLS // 10_000),
        (100_000, 1_000_000, FEWEST),
        (500, 1_000_000, 500),
    ],
)
def test_how_many_examples_are_looked_at(n: int, columns: int, expected: int) -> None:
    rows, weights = drawn(n, columns, np.ones(n), torch.Generator().manual_seed(0))
    assert len(rows) == expected and (np.diff(rows) > 0).all()
    np.testing.assert_allclose(weights, 1.0, rtol=1e-6)


def test_a_rare_class_is_kept_and_weighs_as_much_as_the_other() -> None:
    labels = (np.arange(100_000) % 1000 == 0).astype(int)[:, None]
    rows, weights = drawn(100_000, 10, balanced(labels, np.ones(100_000)), torch.Generator().manual_seed(0))
    rare = labels[rows, 0] == 1
    assert rare.sum() == 100
    assert weights[rare].sum() == pytest.approx(weights[~rare].sum(), rel=1e-4)


def test_balanced_classes_weigh_the_same_whatever_their_examples_weigh() -> None:
    labels, weights = RNG.integers(0, 3, (200, 1)), RNG.random(200)
    totals = np.bincount(labels[:, 0], balanced(labels, weights))
    np.testing.assert_allclose(totals, 1.0)


def test_labels_are_counted_for_each_output() -> None:
    labels = counted(np.array([["b", "x"], ["a", "x"], ["c", "y"]]))
    assert labels.tolist() == [[1, 0], [0, 0], [2, 1]]
    assert one_hot(labels).tolist() == [[0, 1, 0, 1, 0], [1, 0, 0, 1, 0], [0, 0, 1, 0, 1]]


@pytest.mark.parametrize("parts", [3, 256])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_sparse_and_dense_columns_are_the_same(
    parts: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("khot.sklearn._table.PART", parts)
    X: Any = np.where(RNG.random((50, 8)) < 0.3, RNG.normal(size=(50, 8)), 0.0) * scale
    X[:, 2] = 0.0
    X[:, 5] = 0.1 * scale  # constant, but for rounding
    varies, columns, rows, coefficients = standardised(X)
    assert varies.tolist() == [True, True, False, True, True, False, True, True]
    expected = (X / scale)[:, varies]
    expected = (expected - expected.mean(0)) / expected.std(0)
    np.testing.assert_allclose(columns, expected, atol=1e-5)
    some = torch.tensor([4, 2, 2])
    np.testing.assert_allclose(rows(some), expected[[4, 2, 2]], atol=1e-5)
    again, few, rows_of, same = standardised(scipy.sparse.csr_array(X))
    assert scipy.sparse.issparse(few) and again.tolist() == varies.tolist()
    np.testing.assert_allclose(rows_of(some), expected[[4, 2, 2]], atol=1e-5)
    torch.testing.assert_close(same, coefficients)
