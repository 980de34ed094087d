"""Feature selection for scikit-learn pipelines; needs scikit-learn (``pip install khot[sklearn]``)."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from khot._core.precision import without_autocast
from khot._kernel_gates import Data, choose, draw

try:
    import numpy as np
    from sklearn.base import BaseEstimator
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from sklearn.feature_selection import SelectorMixin
    from sklearn.utils import check_random_state, column_or_1d
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("khot.sklearn needs scikit-learn >= 1.6: pip install khot[sklearn]") from error

__all__ = ["KHotSelector"]

Task = Literal["classification", "regression"]

# Of more examples, this many are drawn.
EXAMPLES = 10_000
# The forest; a third of the columns at each split is what Breiman (2001) takes for regression.
TREES, TRIED_PER_SPLIT = 100, 1 / 3


class KHotSelector(SelectorMixin, BaseEstimator):
    """Selects the k features from which a kernel machine predicts the target best.

    Gates, the weights of :func:`khot.soft_topk` or with a cost of :func:`khot.soft_budget`, stand before a
    kernel machine that is solved, not trained. Their logits start from the importances of a forest of 100
    trees and are learned on random examples, while tau falls and the gates turn into a choice. Then features
    are exchanged as long as exact evaluations say that others are better. Features are therefore judged
    together and not one by one; effects that are not monotone, such as a square, and those of several
    features together count as linear ones do. Classes count alike, however rare they are.
    Features and regression targets are standardised inside; ``transform`` returns the selected columns
    unchanged. Constant features are selected last.

    Time and memory grow in proportion to the number of features. Of more than 10,000 examples, 10,000 are
    drawn, each class as often as any other while it lasts.

    Args:
        k: how many features, from 1 to the number of features; None with a cost.
        task: ``"classification"``, with the cross-entropy of the labels as the loss, or ``"regression"``,
            with the squared error of one or several targets.
        cost: the price of each feature, ≥ 0: an array (n_features,); or None, if all count the same.
        budget: with a cost, what the selected features may cost together, > 0. What is left of it
            need not be spent on features that do not help.
        steps: the number of training steps of the gates, each on 160 examples.
        random_state: an integer for the same result in each call of ``fit``; or as usual in scikit-learn.
            The random numbers of torch are left alone.
        verbose: whether ``fit`` prints how far it is: ten times in the training, and for each exchange.

    Attributes:
        scores_: the learned logits (n_features,), −∞ for constant features. Larger is better. Those of the
            selected features are raised together, where exchanges made that necessary, so that they are
            the largest. All others are 0 where there is no choice to learn: where they all fit within k or
            the budget.
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

    def __init__(
        self,
        k: int | None,
        *,
        task: Task = "classification",
        cost: Sequence[float] | None = None,
        budget: float | None = None,
        steps: int = 150,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.k = k
        self.task = task
        self.cost = cost
        self.budget = budget
        self.steps = steps
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> KHotSelector:
        """Learn which features to select from X (examples, n_features) and y (examples,)."""
        if self.task not in get_args(Task):
            raise ValueError(f"task must be one of {get_args(Task)}, but got {self.task!r}")
        regression = self.task == "regression"
        X, y = validate_data(
            self,
            X,
            y,
            dtype=np.float64,
            ensure_min_samples=2,
            multi_output=True,
            y_numeric=regression,
        )
        self._check(X.shape[1])
        inputs, varies = _standardised(X)
        if regression:
            y = _standardised(y.reshape(len(y), -1).astype(np.float64))[0]
        else:
            y = column_or_1d(y, warn=True)
            check_classification_targets(y)
            y = np.unique(y, return_inverse=True)[1].astype(np.int64)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))

        scores = np.full(X.shape[1], -math.inf)
        scores[varies] = 0.0
        support = varies.copy()
        n = int(varies.sum())
        cost = None if self.cost is None else np.asarray(self.cost, dtype=np.float64)[varies]
        size: float = self.k if self.k is not None else float(self.budget)  # type: ignore[arg-type]
        if (n if cost is None else cost.sum()) > size:
            # the caller may be in any of these modes
            cpu = torch.device("cpu")
            with cpu, torch.inference_mode(False), torch.enable_grad(), without_autocast(cpu):
                logits, mask = self._learn(inputs[:, varies], y, cost, size, seed)
            support[varies] = mask.numpy() > 0
            scores[varies] = logits.double().numpy()
            short = scores[varies & ~support].max() - scores[support].min(initial=math.inf)
            if short >= 0:
                scores[support] += short + 1.0
        if self.k is not None:
            rest = np.flatnonzero(~varies)[: max(self.k - n, 0)]
            support[rest] = True
        self.scores_ = scores
        self._support = support
        return self

    def _learn(self, X: Any, y: Any, cost: Any, size: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The learned logits and the selection of the columns of X, which all vary."""
        generator = torch.Generator().manual_seed(seed)
        regression = self.task == "regression"
        classes = None if regression else torch.from_numpy(y)
        if len(X) > EXAMPLES:
            rows = draw(classes, len(X), EXAMPLES, generator)
            X, y, classes = X[rows.numpy()], y[rows.numpy()], None if classes is None else classes[rows]
        X = X.astype(np.float32)
        self._say(f"{TREES} trees on {len(X)} examples of {X.shape[1]} features")
        prior = torch.from_numpy(_prior(X, y, regression, seed)).float()
        targets = torch.from_numpy(y) if classes is None else torch.nn.functional.one_hot(classes)
        data = Data(torch.from_numpy(X), targets.float(), classes)
        prices = None if cost is None else torch.from_numpy(cost)
        return choose(data, prior, prices, size, self.steps, generator, self._say)

    def _say(self, message: str) -> None:
        if self.verbose:
            print(f"KHotSelector: {message}")

    def _check(self, n: int) -> None:
        """Raise for an argument that is out of range for n features."""
        if not isinstance(self.steps, numbers.Integral) or isinstance(self.steps, bool) or self.steps < 1:
            raise ValueError(f"steps must be an integer >= 1, but got {self.steps!r}")
        if self.cost is None:
            if self.budget is not None:
                raise ValueError(f"budget must be None without a cost, but got {self.budget!r}")
            if not isinstance(self.k, numbers.Integral) or isinstance(self.k, bool) or not 1 <= self.k <= n:
                raise ValueError(f"k must be an integer in [1, {n}], n_features, but got {self.k!r}")
            return
        if self.k is not None:
            raise ValueError(f"k must be None with a cost, but got {self.k!r}")
        try:
            cost = np.asarray(self.cost)
        except ValueError:  # rows of different lengths
            cost = np.asarray(self.cost, dtype=object)
        if cost.dtype.kind not in "biuf":
            raise ValueError(f"cost must be an array of real numbers, but got {self.cost!r}")
        if cost.shape != (n,):
            raise ValueError(f"cost must have shape ({n},), (n_features,), but got {cost.shape}")
        bad = ~((cost >= 0) & (cost < math.inf))
        if bad.any():
            raise ValueError(f"cost must be finite and >= 0, but got {cost[bad][0]}")
        budget = self.budget
        if not isinstance(budget, numbers.Real) or isinstance(budget, bool) or not 0 < budget < math.inf:
            raise ValueError(f"budget must be finite and > 0 with a cost, but got {self.budget!r}")

    def _get_support_mask(self) -> Any:
        check_is_fitted(self, "scores_")
        return self._support

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = self.task == "regression"
        return tags


def _standardised(X: Any) -> tuple[Any, Any]:
    """Columns of mean 0 and deviation 1, and which of them are not constant; the constant ones are 0."""
    largest = np.abs(X).max(0)
    X = X / np.where(largest > 0, largest, 1.0)  # so that no square overflows or underflows
    varies = X.min(0) < X.max(0)
    X = X - X.mean(0)
    deviation = X.std(0)
    # values that differ only by rounding
    varies &= deviation > 10 * np.finfo(np.float64).eps
    return np.where(varies, X / np.where(varies, deviation, 1.0), 0.0), varies


def _prior(X: Any, y: Any, regression: bool, seed: int) -> Any:
    """What a forest believes about the features: the log of the share of the splits' gain that each has.

    A feature of no gain is as likely as one of a tenth of the mean."""
    if regression:
        forest = RandomForestRegressor(TREES, max_features=TRIED_PER_SPLIT, random_state=seed)
    else:
        forest = RandomForestClassifier(TREES, class_weight="balanced_subsample", random_state=seed)
    y = y[:, 0] if regression and y.shape[1] == 1 else y
    return np.log(forest.fit(X, y).feature_importances_ + 0.1 / X.shape[1])
