"""Feature selection for scikit-learn pipelines; needs scikit-learn (``pip install khot[sklearn]``)."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from khot._core.precision import without_autocast
from khot.budgets import budget_mask, soft_budget
from khot.topk import soft_topk, topk_mask

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

NETWORKS, HIDDEN, BATCH, RATE = 4, 64, 64, 2e-3
# The weight of the squared weights beside the sum of the examples' losses, as Ridge's alpha.
PRIOR = 1.0
# A logit can go this far in a training of any length: Adam moves it by at most about its rate per step.
REACH = 30.0
# tau falls by a constant factor per step, and stays at its last value in the last tenth of the training.
HOT, COLD, COOLING = 1.0, 0.01, 0.9


class KHotSelector(SelectorMixin, BaseEstimator):
    """Selects the k features from which a small neural network predicts the target best.

    Features are multiplied by the weights of :func:`khot.soft_topk`, or with a cost :func:`khot.soft_budget`,
    of learned logits, and go to four networks, which are trained with the logits. All have a linear part, a
    hidden layer and a penalty on their weights, so that they suit small data, too. While tau falls, the
    weights turn from equal ones into a choice. Features are therefore judged together and not one by one.
    Classes count alike, however rare they are.
    Features and regression targets are standardised inside; ``transform`` returns the selected columns
    unchanged. Constant features are selected last.

    Args:
        k: how many features, from 1 to the number of features; None with a cost.
        task: ``"classification"``, with the cross-entropy of the labels as the loss, or ``"regression"``,
            with the squared error of one or several targets.
        cost: the price of each feature, ≥ 0: an array (n_features,); or None, if all count the same.
        budget: with a cost, what the selected features may cost together, > 0.
        steps: the number of training steps, each on 64 examples.
        random_state: an integer for the same result in each call of ``fit``; or as usual in scikit-learn.
            The random numbers of torch are left alone.
        verbose: whether ``fit`` prints how far it is, ten times.

    Attributes:
        scores_: the learned logits (n_features,), −∞ for constant features. Larger is better. All others are
            0 where there is no choice to learn: where they all fit within k or the budget.
        n_features_in_, feature_names_in_: as usual in scikit-learn.

    Raises:
        ValueError, TypeError: in ``fit``: an argument that is out of range, or data that scikit-learn
            rejects: NaN, infinity, a y of another length, an X of fewer than two examples.

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
        steps: int = 1000,
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
            cpu = torch.device("cpu")
            with cpu, torch.inference_mode(False), torch.enable_grad(), without_autocast(cpu):
                features = torch.from_numpy(inputs[:, varies]).float()
                logits, mask = _train(features, targets, size, cost, self.steps, seed, self.verbose)
                scores[varies] = logits.double().numpy()
                support[varies] = mask.numpy() > 0
        if self.k is not None:
            rest = np.flatnonzero(~varies)[: max(self.k - n, 0)]
            support[rest] = True
        self.scores_ = scores
        self._support = support
        return self

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


def _train(
    features: Tensor, targets: Tensor, size: float, cost: Any, steps: int, seed: int, verbose: bool
) -> tuple[Tensor, Tensor]:
    """The learned logits and the selection, both (n,)."""
    generator = torch.Generator().manual_seed(seed)
    examples, n = features.shape
    prices = None if cost is None else torch.from_numpy(cost)
    regression = targets.is_floating_point()
    outputs = targets.shape[1] if regression else int(targets.max()) + 1
    logits = torch.zeros(n, dtype=torch.float32, requires_grad=True)
    networks = _Networks(n, outputs, generator)
    optimizer = torch.optim.Adam(
        [{"params": [logits], "lr": REACH / steps}, {"params": networks.parameters, "lr": RATE}], fused=True
    )
    for step in range(steps):
        tau = HOT * (COLD / HOT) ** min(step / (COOLING * steps), 1.0)
        if prices is None:
            shares = soft_topk(logits, size, tau=tau)
        else:
            shares = soft_budget(logits, prices, size, tau=tau)
        batch = _draw(targets, generator)
        predicted, wanted = networks(features[batch] * shares).flatten(0, 1), targets[batch].flatten(0, 1)
        error = F.mse_loss(predicted, wanted) if regression else F.cross_entropy(predicted, wanted)
        # each network has a loss of its own: the error is a mean over all of them
        loss = NETWORKS * error + PRIOR / examples * networks.squares()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if verbose and (step + 1) * 10 // steps > step * 10 // steps:
            print(f"KHotSelector: step {step + 1} of {steps}, tau {tau:.2f}, error {error.item():.3f}")
    found = logits.detach()
    return found, topk_mask(found, size) if prices is None else budget_mask(found, prices, size)


def _draw(targets: Tensor, generator: torch.Generator) -> Tensor:
    """The examples of a step, (NETWORKS, B). Each class is drawn as often as any other, because a rare one
    would hardly be seen, and nothing be learned about what tells it."""
    if targets.is_floating_point():
        return torch.randint(len(targets), (NETWORKS, BATCH), generator=generator)
    chances = 1 / targets.bincount()[targets]
    return chances.multinomial(NETWORKS * BATCH, True, generator=generator).view(NETWORKS, BATCH)


class _Networks:
    """Networks with a hidden layer and a linear part, (NETWORKS, B, n) to (NETWORKS, B, outputs)."""

    def __init__(self, n: int, outputs: int, generator: torch.Generator) -> None:
        def random(rows: int, columns: int) -> Tensor:
            draw = torch.rand(NETWORKS, rows, columns, generator=generator, dtype=torch.float32)
            return ((2 * draw - 1) / math.sqrt(rows)).requires_grad_()

        def zeros(rows: int, columns: int) -> Tensor:
            return torch.zeros(NETWORKS, rows, columns, dtype=torch.float32, requires_grad=True)

        self.weights = [random(n, HIDDEN), random(HIDDEN, outputs), zeros(n, outputs)]
        self.biases = [zeros(1, HIDDEN), zeros(1, outputs)]
        self.parameters = [*self.weights, *self.biases]

    def __call__(self, input: Tensor) -> Tensor:
        first, second, linear = self.weights
        hidden = torch.baddbmm(self.biases[0], input, first).relu()
        return torch.baddbmm(self.biases[1], hidden, second) + torch.bmm(input, linear)

    def squares(self) -> Tensor:
        """The sum of the squares of all weights."""
        return torch.stack([weight.square().sum() for weight in self.weights]).sum()
