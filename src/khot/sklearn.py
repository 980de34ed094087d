"""Feature selection for scikit-learn pipelines; needs scikit-learn (``pip install khot[sklearn]``)."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from khot.estimators import sample_khot
from khot.nn import Anneal, KHotGate

try:
    import numpy as np
    from sklearn.base import BaseEstimator
    from sklearn.feature_selection import SelectorMixin
    from sklearn.utils import check_random_state, column_or_1d
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("khot.sklearn needs scikit-learn >= 1.6: pip install khot[sklearn]") from error

__all__ = ["KHotSelector"]

Task = Literal["classification", "regression"]

# As in examples/gate.py; benchmarks/selectors.py compares the choices with those of other selectors.
HIDDEN, BATCH, RATE = 128, 64, 2e-3
# A logit can go this far in a training of any length: Adam moves it by at most about its rate per step.
REACH = 30.0
# With prices the shares are soft; at the last tau they are nearly 0 or 1.
HOT, COLD = 1.0, 0.05


class KHotSelector(SelectorMixin, BaseEstimator):
    """Selects the k features from which a small neural network predicts the target best.

    A :class:`khot.nn.KHotGate` in front of a network with one hidden layer is trained with it. Every example
    sees its own sample of k features, so that features are judged together and not one by one. Features and
    regression targets are standardised inside; ``transform`` returns the selected columns unchanged.
    Constant features are selected last.

    Args:
        k: how many features, from 1 to the number of features; None with a cost.
        task: ``"classification"``, with the cross-entropy of the labels as the loss, or ``"regression"``,
            with the squared error of one or several targets.
        cost: the price of each feature, ≥ 0: an array (n_features,); or None, if all count the same.
        budget: with a cost, what the selected features may cost together, > 0.
        steps: the number of training steps, each on 64 examples.
        random_state: an integer for the same result in each call of ``fit``; or as usual in scikit-learn.
            The random numbers of torch are left alone.

    Attributes:
        scores_: the learned logits (n_features,), −∞ for constant features. Larger is better. All others are
            0 where there is no choice to learn: where they all fit within k or the budget.
        n_features_in_, feature_names_in_: as usual in scikit-learn.

    Raises:
        ValueError, TypeError: in ``fit``: an argument that is out of range, or data that scikit-learn
            rejects: NaN, infinity, a y of another length, an X of fewer than two examples.

    Source: Wijk, Vinuesa, Azizpour 2025, sections 2.3 and 4, for the gate.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from khot.sklearn import KHotSelector
        >>> X, y = load_iris(return_X_y=True)
        >>> selector = KHotSelector(2, steps=300, random_state=0).fit(X, y)
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
        steps: int = 1500,
        random_state: Any = None,
    ) -> None:
        self.k = k
        self.task = task
        self.cost = cost
        self.budget = budget
        self.steps = steps
        self.random_state = random_state

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
            targets = torch.from_numpy(_standardised(y.reshape(len(y), -1).astype(np.float64))[0]).float()
        else:
            y = column_or_1d(y, warn=True)
            check_classification_targets(y)
            targets = torch.from_numpy(np.unique(y, return_inverse=True)[1].astype(np.int64))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))

        scores = np.full(X.shape[1], -math.inf)
        scores[varies] = 0.0
        support = varies.copy()
        n = int(varies.sum())
        cost = None if self.cost is None else np.asarray(self.cost, dtype=np.float64)[varies]
        size: float = self.k if self.k is not None else float(self.budget)  # type: ignore[arg-type]
        if (n if cost is None else cost.sum()) > size:
            # the caller may be in any of these modes
            with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
                features = torch.from_numpy(inputs[:, varies]).float()
                gate = _train(features, targets, size, cost, self.steps, seed)
                scores[varies] = gate.logits.detach().double().numpy()
                support[varies] = gate.mask.numpy() > 0
        if self.k is not None:
            rest = np.flatnonzero(~varies)[: max(self.k - n, 0)]
            support[rest] = True
        self.scores_ = scores
        self._support = support
        return self

    def _check(self, n: int) -> None:
        if not isinstance(self.steps, numbers.Integral) or isinstance(self.steps, bool) or self.steps < 1:
            raise ValueError(f"steps must be an integer >= 1, but got {self.steps!r}")
        if self.cost is None:
            if self.budget is not None:
                raise ValueError(f"budget must be None without a cost, but got {self.budget!r}")
            whole = isinstance(self.k, numbers.Integral) and not isinstance(self.k, bool)
            if not whole or not 1 <= self.k <= n:
                raise ValueError(f"k must be an integer in [1, {n}], n_features, but got {self.k!r}")
            return
        if self.k is not None:
            raise ValueError(f"k must be None with a cost, but got {self.k!r}")
        cost = np.asarray(self.cost, dtype=np.float64)
        if cost.shape != (n,):
            raise ValueError(f"cost must have shape ({n},), (n_features,), but got {cost.shape}")
        bad = ~((cost >= 0) & (cost < math.inf))
        if bad.any():
            raise ValueError(f"cost must be finite and >= 0, but got {cost[bad][0]}")
        real = isinstance(self.budget, numbers.Real) and not isinstance(self.budget, bool)
        if not real or not 0 < self.budget < math.inf:
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


def _train(features: Tensor, targets: Tensor, size: float, cost: Any, steps: int, seed: int) -> KHotGate:
    generator = torch.Generator().manual_seed(seed)
    n = features.shape[1]
    tau = Anneal(HOT, COLD, steps, "exponential")
    if cost is None:
        gate = KHotGate(n, int(size), design="pivotal", dtype=torch.float32)
    else:
        gate = KHotGate(n, size, cost=cost.tolist(), tau=tau, dtype=torch.float32)
    regression = targets.is_floating_point()
    outputs = targets.shape[1] if regression else int(targets.max()) + 1
    weights = []
    for fan_in, fan_out in ((n, HIDDEN), (HIDDEN, outputs)):
        for shape in ((fan_out, fan_in), (fan_out,)):
            draw = torch.rand(shape, generator=generator, dtype=torch.float32)
            weights.append(((2 * draw - 1) / math.sqrt(fan_in)).requires_grad_())
    optimizer = torch.optim.Adam(
        [{"params": [gate.logits], "lr": REACH / steps}, {"params": weights, "lr": RATE}]
    )
    for _ in range(steps):
        batch = torch.randint(len(features), (BATCH,), generator=generator)
        seen = features[batch]
        if cost is None:
            # as in the gate's train mode, but with random numbers of its own
            logits = gate.logits.expand(seen.shape)
            seen = seen * sample_khot(logits, int(size), design="pivotal", generator=generator)
        else:
            seen = gate(seen)
        predicted = F.linear(F.linear(seen, weights[0], weights[1]).relu(), weights[2], weights[3])
        loss = F.mse_loss if regression else F.cross_entropy
        optimizer.zero_grad()
        loss(predicted, targets[batch]).backward()
        optimizer.step()
        tau.step()
    return gate
