"""The selector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from khot._core.precision import without_autocast
from khot._kernel_gates import choose
from khot.sklearn import _arguments as arguments
from khot.sklearn._arguments import Task
from khot.sklearn._forest import TREES, prior
from khot.sklearn._size import smallest
from khot.sklearn._table import Table, balanced, components, counted, drawn, one_hot, standardised

__all__ = ["KHotSelector"]


class KHotSelector(SelectorMixin, BaseEstimator):
    """Selects the k features from which a kernel machine predicts the target, or all features, best.

    Gates, the weights of :func:`khot.soft_topk` or with a cost of :func:`khot.soft_budget`, stand before a
    kernel machine that is solved, not trained. Their logits start from the importances of a forest of 100
    trees and are learned on random examples, while tau falls and the gates turn into a choice. Then features
    are exchanged as long as exact evaluations say that others are better. Features are therefore judged
    together and not one by one; effects that are not monotone, such as a square, and those of several
    features together count as linear ones do. Classes count alike, however rare they are.
    Features and regression targets are standardised inside; ``transform`` returns the selected columns
    unchanged. Constant features are selected last.

    Time and memory grow in proportion to the number of features. Of more than 10,000 examples, 10,000 are
    drawn by their weights, so each class as often as any other while it lasts; of more than 2,000 features,
    as many as make 20 million cells, but not fewer than 1,000 examples.

    Args:
        k: how many features, from 1 to the number of features; or the share of them, in (0, 1), which is
            rounded down, to at least one; or ``"auto"``, which takes several times as long: the smallest
            number whose error in a cross-validation of five folds is within a standard error of the best,
            with 64 as the largest, and 0 if all are constant; not for a reconstruction. None with a cost.
            With groups, k is a number or a share of these.
        task: ``"classification"``, of the labels of one or several outputs; ``"regression"``, of one or
            several targets; or ``"reconstruction"``, of all features from those that are selected.
        class_weight: how much an example of each class counts: ``"balanced"``, so that all classes count
            alike; None, so that all examples do; or a dict from labels to weights, for several outputs a list
            of them, as usual in scikit-learn. The weights of several outputs multiply. Other tasks
            have none.
        groups: a label for each column, (n_features,): those of the same label are one feature, all or none
            of which are selected, as the columns of a one-hot code. None: each column by itself.
        cost: the price of each column, ≥ 0: an array (n_features,); or None, if all count the same. A group
            costs what its columns cost together.
        budget: with a cost, what the selected features may cost together, > 0. What is left of it
            need not be spent on features that do not help.
        steps: the number of training steps of the gates, each on 160 examples.
        random_state: an integer for the same result in each call of ``fit``; or as usual in scikit-learn.
            The random numbers of torch are left alone.
        verbose: whether ``fit`` prints how far it is: ten times in the training, and for each exchange and
            each fold.

    Attributes:
        scores_: the learned logits (n_features,), −∞ for constant features; a group has one for all its
            columns. Larger is better. Those of the selected features are raised together, where exchanges
            made that necessary, so that they are the largest. All others are 0 where there is no choice to
            learn: where they all fit within k or the budget.
        ranking_: 1 for all selected features, and from 2 on the others by their scores, (n_features,), as
            that of ``sklearn.feature_selection.RFE``.
        k_: how many features are selected, or groups.
        cv_results_: for ``k="auto"`` a dict of arrays: each number ``k``, its ``mean_error`` over the folds,
            and the ``std_error`` of that mean. Errors are squares, of a classification from 0 and 1.
        n_features_in_, feature_names_in_: as usual in scikit-learn.

    Raises:
        ValueError, TypeError: in ``fit``: an argument that is out of range, or data that scikit-learn
            rejects: NaN, infinity, a y of another length, an X of fewer than two examples.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from khot.sklearn import KHotSelector
        >>> X, y = load_iris(return_X_y=True)
        >>> selector = KHotSelector(2, random_state=0).fit(X, y)
        >>> selector.get_support(indices=True)
        array([2, 3])
        >>> selector.transform(X).shape
        (150, 2)
    """

    task: Task

    def __init__(
        self,
        k: int | float | str | None,
        *,
        task: Task = "classification",
        class_weight: Any = "balanced",
        groups: Sequence[Any] | None = None,
        cost: Sequence[float] | None = None,
        budget: float | None = None,
        steps: int = 150,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.k = k
        self.task = task
        self.class_weight = class_weight
        self.groups = groups
        self.cost = cost
        self.budget = budget
        self.steps = steps
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KHotSelector:
        """Learn which features to select.

        Args:
            X: (examples, n_features), an array or a sparse matrix.
            y: (examples,) or (examples, outputs): labels, or numbers for a regression; for a reconstruction
                it is ignored.
            sample_weight: how much each example counts, ≥ 0, (examples,); None: all alike.
        """
        arguments.check(self)
        if hasattr(self, "cv_results_"):  # of another fit
            del self.cv_results_
        sort_of: dict[str, Any] = {
            "accept_sparse": "csr",
            "dtype": (np.float64, np.float32),
            "ensure_min_samples": 2,
        }
        if self.task == "reconstruction":
            X = validate_data(self, X, **sort_of)
            y = np.zeros((X.shape[0], 1))
        else:
            numeric = self.task == "regression"
            X, y = validate_data(self, X, y, multi_output=True, y_numeric=numeric, **sort_of)
        feature = arguments.features(self.groups, X.shape[1])
        priced = arguments.prices(self, feature)
        number = None if priced else arguments.number(self.k, int(feature.max()) + 1)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if self.task == "regression":
            y = y.reshape(len(y), -1).astype(np.float64)
        elif self.task == "classification":
            y = arguments.labels(y)
            weights = weights * arguments.class_weights(self.class_weight, y)
        if (weights == 0).any():
            counts = weights > 0
            if counts.sum() < 2:
                raise ValueError("sample_weight and class_weight must be > 0 for two examples or more")
            X, y, weights = X[counts], y[counts], weights[counts]
        if self.task == "classification":
            y = counted(y)
            if self.class_weight == "balanced":
                weights = balanced(y, weights)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        # the caller may be in any of these modes; that of a device looks at every call of torch
        cpu = torch.device("cpu")
        here: Any = nullcontext() if torch.get_default_device() == cpu else cpu
        with here, torch.inference_mode(False), torch.enable_grad(), without_autocast(cpu):
            self._select(X, y, weights, feature, priced, number, seed)
        return self

    def _select(
        self,
        X: Any,
        y: Any,
        weights: Any,
        feature: Any,
        priced: tuple[Any, float] | None,
        number: int | None,
        seed: int,
    ) -> None:
        """Select from some of the examples and the columns that vary, and set the attributes."""
        generator = torch.Generator().manual_seed(seed)
        at, weights = drawn(len(y), X.shape[1], weights, generator)
        if len(at) < len(y):
            X, y = X[at], y[at]
        varies, columns, rows, coefficients = standardised(X)
        live = np.unique(feature[varies])  # the features that have a column that varies
        chosen, logits = np.ones(len(live), bool), np.zeros(len(live))
        price, size = (priced[0][live], priced[1]) if priced else (None, number)
        if (len(live) if price is None else price.sum()) > (1 if size is None else size):
            members = np.searchsorted(live, feature[varies])
            if self.task == "classification":
                targets = one_hot(y)
            elif self.task == "regression":
                targets = y = standardised_targets(y)
            else:
                every = rows(torch.arange(len(weights))).numpy()
                targets = y = components(every, seed)
            table = Table(columns, rows, coefficients, members, targets, weights, y)
            logits, chosen = self._learn(table, price, size, seed, generator)
        short = logits[~chosen].max(initial=-math.inf) - logits[chosen].min(initial=math.inf)
        if short >= 0:
            logits = logits + chosen * (short + 1.0)
        self._keep(feature, live, logits, chosen, number)

    def _keep(self, feature: Any, live: Any, logits: Any, chosen: Any, number: int | None) -> None:
        """Set the attributes: what was found of the live features, for the columns."""
        total = int(feature.max()) + 1
        scores = np.full(total, -math.inf)
        scores[live] = logits
        support = np.zeros(total, bool)
        support[live[chosen]] = True
        if number is not None:  # constant features, where the others are too few
            support[np.setdiff1d(np.arange(total), live)[: max(number - len(live), 0)]] = True
        ranking = np.ones(total, np.int64)
        rest = np.flatnonzero(~support)
        ranking[rest[np.argsort(-scores[rest], kind="stable")]] = np.arange(2, len(rest) + 2)
        self.scores_, self.ranking_, self._support = scores[feature], ranking[feature], support[feature]
        self.k_ = int(support.sum())

    def _learn(
        self, table: Table, price: Any, size: Any, seed: int, generator: torch.Generator
    ) -> tuple[Any, Any]:
        """The learned logits of the features and which are selected."""
        n, columns = table.columns.shape
        if size is None:
            size, mean, deviation = smallest(table, self.task, self.steps, seed, generator, self._say)
            self.cv_results_ = {
                "k": np.arange(1, len(mean) + 1),
                "mean_error": mean,
                "std_error": deviation,
            }
            if size == len(np.unique(table.feature)):
                return np.zeros(size), np.ones(size, bool)
        if self.task != "reconstruction":
            self._say(f"{TREES} trees on {n} examples of {columns} features")
        belief = prior(table, np.arange(n), self.task, seed)
        prices = None if price is None else torch.from_numpy(price)
        logits, mask = choose(
            table.data(), torch.from_numpy(belief).float(), prices, size, self.steps, generator, self._say
        )
        return logits.double().numpy(), mask.numpy() > 0

    def _say(self, message: str) -> None:
        if self.verbose:
            print(f"KHotSelector: {message}")

    def _get_support_mask(self) -> Any:
        check_is_fitted(self, "scores_")
        return self._support

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = self.task != "reconstruction"
        tags.target_tags.multi_output = True
        tags.input_tags.sparse = True
        return tags


def standardised_targets(y: Any) -> Any:
    """Targets of mean 0 and deviation 1; those that are constant are 0."""
    result = np.zeros(y.shape)
    varies, columns, _, _ = standardised(y)
    result[:, varies] = columns
    return result
