"""Feature selectors of scikit-learn beside khot.sklearn.KHotSelector by its default settings.

Each selector chooses k features on the training part of five splits; a support vector machine and a linear
model, trained on these features alone, are judged on the test part: accuracy, or R² for regression.

    python -m benchmarks.selectors                      # prints the table; about 2 minutes on one core
    python -m benchmarks.selectors iris wine            # of these sets only

The strength of L1 (C = 0.1, α = 0.01) and C = 100 of the judge of regressions are not scikit-learn's
defaults. One seed per split, one k per set, chosen beforehand. STG and LassoNet are missing. Greedy forward
search is left out on digits, where it takes several minutes for each split.
"""

from __future__ import annotations

import sys
import time
import warnings
from functools import partial
from typing import Any

import numpy as np
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.feature_selection import (
    RFE,
    SelectFromModel,
    SelectKBest,
    SequentialFeatureSelector,
    mutual_info_classif,
    mutual_info_regression,
)
from sklearn.linear_model import Lasso, LogisticRegression, Ridge
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR

from khot.sklearn import KHotSelector

# the number of features, and whether the target is a number
SETS = {
    "iris": (2, False),
    "wine": (3, False),
    "breast_cancer": (3, False),
    "diabetes": (3, True),
    "digits": (10, False),
}


def selectors(k: int, regression: bool, seed: int) -> dict[str, Any]:
    task = "regression" if regression else "classification"
    linear = Ridge() if regression else LogisticRegression(max_iter=500)
    information = mutual_info_regression if regression else mutual_info_classif
    sparse = (
        Lasso(alpha=0.01)
        if regression
        else LogisticRegression(l1_ratio=1, C=0.1, solver="saga", max_iter=300)
    )
    forest = (RandomForestRegressor if regression else RandomForestClassifier)(random_state=seed)
    most = partial(SelectFromModel, max_features=k, threshold=-np.inf)
    return {
        "KHotSelector": KHotSelector(k, task=task, random_state=seed),
        "mutual information": SelectKBest(partial(information, random_state=seed), k=k),
        "RFE": RFE(linear, n_features_to_select=k),
        "L1": most(sparse),
        "forest": most(forest),
        "greedy": SequentialFeatureSelector(linear, n_features_to_select=k, cv=3),
    }


def run(name: str) -> None:
    k, regression = SETS[name]
    X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    folds = (KFold if regression else StratifiedKFold)(5, shuffle=True, random_state=0)
    scores: dict[str, list[tuple[float, float, float]]] = {}
    for split, (train, test) in enumerate(folds.split(X, y)):
        scaler = StandardScaler().fit(X[train])
        A, B = scaler.transform(X[train]), scaler.transform(X[test])
        for method, selector in selectors(k, regression, split).items():
            if name == "digits" and method == "greedy":
                continue
            start = time.perf_counter()
            chosen = selector.fit(A, y[train]).get_support()
            seconds = time.perf_counter() - start
            judges = (SVR(C=100), Ridge()) if regression else (SVC(), LogisticRegression(max_iter=1000))
            svm, linear = (
                make_pipeline(judge).fit(A[:, chosen], y[train]).score(B[:, chosen], y[test])
                for judge in judges
            )
            scores.setdefault(method, []).append((100 * svm, 100 * linear, seconds))
    for method, rows in scores.items():
        mean, deviation = np.mean(rows, 0), np.std(rows, 0, ddof=1)
        cells = [f"{m:.1f} ± {s:.1f}" for m, s in zip(mean[:2], deviation[:2], strict=True)]
        print(
            f"| {name} | {k} of {X.shape[1]} | {method} | {cells[0]} | {cells[1]} | {mean[2]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # solvers that stop early
    print("| data | k | selector | SVM, % | linear, % | s per fit |\n|---|---|---|---|---|---|")
    for each in sys.argv[1:] or SETS:
        run(each)
