"""The feature selector keeps scikit-learn's contract, and selects what the target depends on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.datasets import load_iris, make_friedman1
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import scale
from sklearn.utils.estimator_checks import parametrize_with_checks

from khot.sklearn import KHotSelector

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 8))
LABELS = (X[:, 1] * X[:, 5] > 0).astype(int)  # neither of the two tells anything alone
TARGET = 1e6 * (3 * X[:, 2] - 2 * X[:, 6])


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for these data; a hundred, which are told, took a third of the time."""
    monkeypatch.setattr("khot.sklearn._forest.TREES", 20)
    monkeypatch.setattr("khot._kernel_gates.FITTING", 10)


# Weights are probabilities of being drawn, in the forest and in training: twice the weight is not the same
# as the same example twice, but for the mean over seeds, as in scikit-learn's own forests.
DRAWN = {
    f"check_sample_weight_equivalence_on_{kind}_data": "weights and repetitions draw other examples"
    for kind in ("dense", "sparse")
}


@parametrize_with_checks(
    [KHotSelector(1, task=task, steps=3) for task in ("classification", "regression", "reconstruction")],
    expected_failed_checks=lambda selector: {} if selector.task == "regression" else DRAWN,
)
def test_contract(estimator: Any, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("khot.sklearn._forest.TREES", 3)  # the contract has hundreds of fits
    monkeypatch.setattr("khot._kernel_gates.FITTING", 3)
    check(estimator)


def selected(selector: KHotSelector, X: Any, y: Any) -> list[int]:
    return list(selector.fit(X, y).get_support(indices=True))


def test_selects_features_that_only_tell_together() -> None:
    assert selected(KHotSelector(2, random_state=0), X, LABELS) == [1, 5]


def test_a_rare_class_counts_like_the_other() -> None:
    rng = np.random.default_rng(3)
    features = rng.normal(size=(1000, 30))
    labels = (rng.random(1000) < 0.02).astype(int)
    features[labels == 1, :3] += 1.5
    assert selected(KHotSelector(3, random_state=3), features, labels) == [0, 1, 2]


def test_a_feature_that_counts_by_its_square_alone() -> None:
    features, target = make_friedman1(500, n_features=20, noise=1.0, random_state=2)
    assert selected(KHotSelector(5, task="regression", random_state=2), features, target) == [0, 1, 2, 3, 4]


def test_features_from_which_all_follow() -> None:
    """Of 60 noisy curves of six hidden numbers, one of each number, and one that tells its sign: the others
    then follow with half the error that they have after the choice of a greedy linear method."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(600, 6))
    curves: list[Any] = [
        lambda z, other: np.sin(2 * z),
        lambda z, other: z**2,
        lambda z, other: z * other,
        lambda z, other: z,
    ]
    columns = [curves[i // 6 % 4](hidden[:, i % 6], hidden[:, (i + 1) % 6]) for i in range(60)]
    table = scale(np.stack(columns, 1) + 0.3 * rng.normal(size=(600, 60)))
    selector = KHotSelector(6, task="reconstruction", random_state=0).fit(scipy.sparse.csr_array(table))
    chosen = selector.get_support(indices=True)
    assert {*(chosen % 6)} == {*range(6)}
    greedy, rest = [], table
    for _ in range(6):  # the column on which the others' projections are largest
        products = rest.T @ rest
        best = int((np.square(products).sum(0) / products.diagonal().clip(1e-9)).argmax())
        greedy.append(best)
        rest = rest - np.outer(rest[:, best], products[best] / products[best, best])
    errors = [
        np.square(
            table - cross_val_predict(KernelRidge(alpha=0.3, kernel="rbf", gamma=0.05), table[:, at], table)
        ).mean()
        for at in (chosen, greedy)
    ]
    assert errors[0] < 0.5 * errors[1]
    with pytest.raises(ValueError, match="k must be given for a reconstruction"):
        KHotSelector("auto", task="reconstruction").fit(table)


@pytest.mark.parametrize("factor", [1e-200, 1e200])
def test_regression_of_any_scale(factor: float) -> None:
    selector = KHotSelector(2, task="regression", random_state=0)
    assert selected(selector, X * factor, TARGET) == [2, 6]
    assert selected(selector, X, np.stack([X[:, 2], factor * X[:, 6]], 1)) == [2, 6]


def test_labels_may_be_names() -> None:
    names = np.array(["no", "yes"])[(X[:, 3] > 0).astype(int)]
    assert selected(KHotSelector(1, random_state=0), X, names) == [3]


def test_small_data() -> None:
    assert selected(KHotSelector(1, task="regression", random_state=0), X[:10], X[:10, 4]) == [4]


def test_constant_features_come_last() -> None:
    constant = X.copy()
    constant[:, [0, 3]] = 0.1
    selector = KHotSelector(2, random_state=0)
    assert not set(selected(selector, constant, LABELS)) & {0, 3}
    assert np.isneginf(selector.scores_[[0, 3]]).all() and np.isfinite(selector.scores_[[1, 2, 4]]).all()
    assert selected(KHotSelector(7, steps=3), constant, LABELS) == [0, 1, 2, 4, 5, 6, 7]
    assert selected(KHotSelector(2, steps=3), np.ones((10, 3)), LABELS[:10]) == [0, 1]


def test_support_is_of_the_largest_scores() -> None:
    selector = KHotSelector(3, steps=100, random_state=0).fit(X, LABELS)
    assert set(np.argsort(-selector.scores_)[:3]) == set(selector.get_support(indices=True))


def test_exchanges_correct_the_gates() -> None:
    """Gates of a single step are hardly more than importances, which miss what only tells together."""
    rng = np.random.default_rng(5)
    features = rng.normal(size=(300, 12))
    target = features[:, 3] + features[:, 0] * features[:, 7]
    selector = KHotSelector(3, task="regression", steps=1, random_state=0)
    assert selected(selector, features, target) == [0, 3, 7]
    assert set(np.argsort(-selector.scores_)[:3]) == {0, 3, 7}


def test_budget() -> None:
    """The cheaper copy of a feature is selected, and the budget is kept."""
    copies = np.concatenate([X, X], 1)
    cost = np.repeat([3.0, 1.0], 8)
    selector = KHotSelector(None, task="regression", cost=cost, budget=2.0, random_state=0)
    assert selected(selector, copies, TARGET) == [10, 14]
    selector.set_params(budget=5.0)  # what is left is not spent on noise
    found = selected(selector, copies, TARGET)
    assert {i % 8 for i in found} == {2, 6} and cost[found].sum() <= 5
    selector.set_params(budget=100.0)
    assert len(selected(selector, copies, TARGET)) == 16


def test_same_random_state_same_result_and_torch_is_left_alone() -> None:
    torch.manual_seed(1)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    first = KHotSelector(3, steps=20, random_state=4).fit(X, LABELS).scores_
    torch.manual_seed(2)
    with torch.inference_mode():
        again = KHotSelector(3, steps=20, random_state=4).fit(X, LABELS).scores_
    other = KHotSelector(3, steps=20, random_state=5).fit(X, LABELS).scores_
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    with torch.device("meta"):
        np.testing.assert_array_equal(KHotSelector(3, steps=20, random_state=4).fit(X, LABELS).scores_, first)
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(KHotSelector(3, steps=20, random_state=4).fit(X, LABELS).scores_, first)
    torch.manual_seed(1)
    KHotSelector(3, steps=20).fit(X, LABELS)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads


@pytest.mark.parametrize("steps, lines", [(3, [1, 2, 3]), (95, [10, 19, 29, 38, 48])])
def test_verbose_says_how_far_the_training_is(capsys: Any, steps: int, lines: Any) -> None:
    silent = KHotSelector(3, steps=steps, random_state=0).fit(X, LABELS)
    assert capsys.readouterr() == ("", "")
    loud = KHotSelector(3, steps=steps, random_state=0, verbose=True).fit(X, LABELS)
    np.testing.assert_array_equal(silent.scores_, loud.scores_)
    first, *said = capsys.readouterr().out.splitlines()
    assert first == "KHotSelector: 100 trees on 120 examples of 8 features"
    said = [line for line in said if "exchange" not in line]
    for line, step in zip(said, lines, strict=False):
        assert line.startswith(f"KHotSelector: step {step} of {steps}, tau "), line
    assert len(said) == min(steps, 10) and f"step {steps} of" in said[-1]


def test_sample_weights_say_which_examples_count() -> None:
    """Those of weight 0 are as good as absent, and heavy ones outweigh many light ones."""
    labels = np.where(np.arange(120) < 60, X[:, 1] > 0, X[:, 4] > 0)
    heavy = np.where(np.arange(120) < 60, 1.0, 1e-3)
    for weights, best in [(heavy, 1), (1.001 - heavy, 4)]:
        selector = KHotSelector(1, random_state=0).fit(X, labels, sample_weight=weights)
        assert list(selector.get_support(indices=True)) == [best]
    none = np.where(np.arange(120) < 60, 1.0, 0.0)
    weighted = KHotSelector(2, steps=20, random_state=0).fit(X, labels, sample_weight=none)
    absent = KHotSelector(2, steps=20, random_state=0).fit(X[:60], labels[:60])
    np.testing.assert_array_equal(weighted.scores_, absent.scores_)
    with pytest.raises(ValueError, match="must be > 0 for two examples"):
        KHotSelector(1).fit(X, labels, sample_weight=np.eye(120)[0])
    with pytest.raises(ValueError, match="Negative values"):
        KHotSelector(1).fit(X, labels, sample_weight=heavy - 0.5)


def test_class_weight() -> None:
    """One column tells the frequent classes apart, and another one the rare class from both."""
    rng = np.random.default_rng(1)
    features = rng.normal(size=(900, 10))
    labels = np.where(np.arange(900) < 27, 2, np.arange(900) % 2)
    features[:, 3] += 1.5 * (labels == 1)
    features[:, 6] += 2.5 * (labels == 2)
    for class_weight, best in [
        ("balanced", 6),
        (None, 3),
        ({0: 0.0, 1: 1.0, 2: 100.0}, 6),
    ]:
        selector = KHotSelector(1, class_weight=class_weight, random_state=0)
        assert selected(selector, features, labels) == [best], class_weight


@pytest.mark.parametrize("k, number", [(0.25, 2), (0.1, 1), (0.99, 7)])
def test_k_as_a_share(k: float, number: int) -> None:
    assert KHotSelector(k, steps=3, random_state=0).fit(X, LABELS).k_ == number


def test_auto_finds_how_many_are_needed() -> None:
    features, target = make_friedman1(300, n_features=12, noise=1.0, random_state=3)
    selector = KHotSelector("auto", task="regression", random_state=0)
    assert selected(selector, features, target) == [0, 1, 2, 3, 4]
    found = selector.cv_results_
    assert selector.k_ == 5 and list(found["k"]) == list(range(1, 13))
    best = found["mean_error"].argmin()
    near = found["mean_error"] <= found["mean_error"][best] + found["std_error"][best]
    assert near[4] and not near[:4].any()


def test_auto_of_labels_that_only_tell_together() -> None:
    assert selected(KHotSelector("auto", random_state=0), X, LABELS) == [1, 5]


def test_auto_looks_at_64_features_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("khot.sklearn._size.LARGEST", 4)
    selector = KHotSelector("auto", steps=20, random_state=0).fit(X, X[:, 3] > 0)
    assert list(selector.get_support(indices=True)) == [3] and len(selector.cv_results_["k"]) == 4


def test_ranking_is_that_of_rfe() -> None:
    """1 for all selected columns, and the others by their scores."""
    selector = KHotSelector(3, steps=20, random_state=0).fit(X, LABELS)
    assert (selector.ranking_[selector.get_support()] == 1).all()
    order = np.argsort(-selector.scores_)
    assert list(selector.ranking_[order]) == [1, 1, 1, 2, 3, 4, 5, 6]


def one_hot_groups(seed: int) -> tuple[Any, Any, Any]:
    """Two categories as one-hot columns after ten numbers: the label takes one of each kind."""
    rng = np.random.default_rng(seed)
    numbers, (five, four) = rng.normal(size=(400, 10)), (rng.integers(0, m, 400) for m in (5, 4))
    labels = np.isin(five, [1, 3]) ^ (numbers[:, 2] > 0)
    groups = np.array([*map(str, range(10)), *["five"] * 5, *["four"] * 4])
    return np.hstack([numbers, np.eye(5)[five], np.eye(4)[four]]), labels, groups


def test_groups_are_chosen_together() -> None:
    features, labels, groups = one_hot_groups(0)
    selector = KHotSelector(2, groups=groups, random_state=0)
    assert selected(selector, features, labels) == [2, 10, 11, 12, 13, 14]
    assert selector.k_ == 2 and sorted(set(selector.ranking_)) == list(range(1, 12))
    assert len(set(selector.scores_[15:])) == 1
    # the order of columns does not matter, nor does a column that is constant
    order = np.random.default_rng(0).permutation(19)
    mixed = np.hstack([features[:, order], np.ones((400, 1))])
    selector.set_params(groups=[*groups[order], "five"])
    assert {*groups[order[selected(selector, mixed, labels)[:-1]]]} == {"2", "five"}
    assert selector.get_support()[-1]


def test_groups_that_are_paid_together() -> None:
    features, labels, groups = one_hot_groups(1)
    cost = np.where(groups == "five", 1.0, 2.0)
    selector = KHotSelector(None, groups=groups, cost=cost, budget=7.0, random_state=0)
    assert selected(selector, features, labels) == [2, 10, 11, 12, 13, 14]
    selector.set_params(budget=4.0)  # does not pay for the five columns
    found = selector.fit(features, labels).get_support()
    assert cost[found].sum() <= 4 and not found[10:15].any()


def test_sparse() -> None:
    features = np.where(np.abs(X) > 1, X, 0.0)
    features[:, 4] = 0.0
    target = 2 * features[:, 2] + features[:, 6] ** 2
    selector = KHotSelector(2, task="regression", random_state=0)
    scores = selector.fit(features, target).scores_
    for form in (scipy.sparse.csr_matrix, scipy.sparse.csc_array):
        few = form(features)
        assert selected(selector, few, target) == [2, 6]
        np.testing.assert_allclose(scores, selector.scores_, atol=0.1)  # training amplifies what is rounded
        assert scipy.sparse.issparse(selector.transform(few)) and selector.transform(few).shape == (120, 2)


def test_labels_of_several_outputs() -> None:
    labels = np.stack([np.where(X[:, 3] > 0, "a", "b"), np.where(X[:, 6] > 0, "c", "d")], 1)
    assert selected(KHotSelector(2, random_state=0), X, labels) == [3, 6]
    weights = [{"a": 1.0, "b": 1.0}, {"c": 1.0, "d": 2.0}]
    assert selected(KHotSelector(2, class_weight=weights, random_state=0), X, labels) == [3, 6]
    one = KHotSelector(2, steps=20, random_state=0)
    with pytest.warns(Warning, match="column-vector"):
        column = one.fit(X, labels[:, :1]).scores_
    np.testing.assert_array_equal(column, one.fit(X, labels[:, 0]).scores_)


def test_in_a_grid_search_over_a_pipeline() -> None:
    pipeline = make_pipeline(KHotSelector(1, steps=100, random_state=0), LogisticRegression(max_iter=1000))
    search = GridSearchCV(pipeline, {"khotselector__k": [1, 2]}, cv=2).fit(*load_iris(return_X_y=True))
    assert search.best_score_ > 0.9
    names = search.best_estimator_[0].get_feature_names_out(["a", "b", "c", "d"])
    assert set(names) <= {"c", "d"}


@pytest.mark.parametrize(
    "arguments, X, y, message",
    [
        ({"k": 9}, X, LABELS, r"k must be an integer in \[1, 8\]"),
        *(({"k": k}, X, LABELS, "k must be") for k in (0, 1.5, True, None, "2", 0.0)),
        ({"k": 1, "task": "ranking"}, X, LABELS, "task must be"),
        ({"k": 1, "steps": 0}, X, LABELS, "steps must be"),
        ({"k": 1, "budget": 1.0}, X, LABELS, "budget must be None"),
        ({"k": 1, "cost": [1.0] * 8, "budget": 1.0}, X, LABELS, "k must be None"),
        ({"k": None, "cost": [1.0] * 8}, X, LABELS, "budget must be finite"),
        ({"k": None, "cost": [1.0] * 7, "budget": 1.0}, X, LABELS, r"cost must have shape \(8,\)"),
        ({"k": None, "cost": [-1.0] * 8, "budget": 1.0}, X, LABELS, "cost must be finite and >= 0"),
        *(
            ({"k": None, "cost": cost, "budget": 1.0}, X, LABELS, "cost must be an array of real numbers")
            for cost in (["1"] * 8, [1j] * 8, [[1.0], [1.0] * 2])
        ),
        ({"k": None, "cost": 1.0, "budget": 1.0}, X, LABELS, r"cost must have shape \(8,\)"),
        ({"k": None, "cost": [1.0] * 8, "budget": "1"}, X, LABELS, "budget must be finite"),
        ({"k": 1, "random_state": "a"}, X, LABELS, "cannot be used to seed"),
        ({"k": 1, "steps": 5.0}, X, LABELS, "steps must be"),
        ({"k": 1}, X, None, "requires y"),
        ({"k": 1}, X[:0], LABELS[:0], "0 sample"),
        ({"k": 1}, X[:, :0], LABELS, "0 feature"),
        ({"k": 1}, X[:, 0], LABELS, "Expected 2D array"),
        ({"k": 1}, np.where(X > 2, np.inf, X), LABELS, "contains infinity"),
        ({"k": 1, "task": "regression"}, X, np.where(LABELS, np.nan, 1.0), "contains NaN"),
        ({"k": 3, "groups": [0, 0, 0, 0, 1, 1, 1, 1]}, X, LABELS, r"k must be an integer in \[1, 2\]"),
        ({"k": 1, "groups": [0, 1]}, X, LABELS, r"groups must have shape \(8,\)"),
        ({"k": 1, "class_weight": "even"}, X, LABELS, "class_weight must be"),
        ({"k": 1, "class_weight": {5: 1.0}}, X, LABELS, "class_weight"),
        ({"k": 1, "class_weight": {0: -1.0, 1: 1.0}}, X, LABELS, "class_weight must be finite and >= 0"),
        ({"k": 1, "class_weight": {0: 0.0, 1: 0.0}}, X, LABELS, "must be > 0 for two examples"),
        ({"k": 1}, X, np.stack([LABELS, TARGET], 1), "Unknown label type"),
        ({"k": 1}, X, LABELS[:-1], "inconsistent numbers of samples"),
        ({"k": 1}, np.where(X > 2, np.nan, X), LABELS, "contains NaN"),
        ({"k": 1}, X, TARGET, "Unknown label type"),
    ],
)
def test_bad_input(arguments: dict[str, Any], X: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KHotSelector(**arguments).fit(X, y)


@pytest.mark.parametrize("dtype", [np.int64, np.float16, np.float32, bool])
def test_other_dtypes_are_converted_for_the_choice_alone(dtype: Any) -> None:
    given = (10 * X).astype(dtype)
    selector = KHotSelector(2, steps=20, random_state=0).fit(given, LABELS)
    same = KHotSelector(2, steps=20, random_state=0).fit(given.astype(np.float64), LABELS)
    np.testing.assert_array_equal(selector.scores_, same.scores_)
    assert selector.transform(given).dtype == dtype


def test_transform_of_another_width() -> None:
    selector = KHotSelector(1, steps=1).fit(X, LABELS)
    with pytest.raises(ValueError, match="8 features"):
        selector.transform(X[:, :7])


def test_of_many_examples_some_are_drawn(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("khot.sklearn._table.EXAMPLES", 100)
    rare = np.arange(120) < 10
    KHotSelector(3, steps=3, random_state=0, verbose=True).fit(X, rare)
    assert "on 100 examples" in capsys.readouterr().out


def test_budget_that_pays_for_nothing_selects_nothing() -> None:
    selector = KHotSelector(None, cost=[2.0] * 8, budget=1.0, steps=3, random_state=0)
    assert selected(selector, X, LABELS) == []
