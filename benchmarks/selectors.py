"""Feature selectors beside khot.sklearn.KHotSelector by its default settings.

Each selector chooses k features on the training part of five splits; a support vector machine and a linear
model, trained on these features alone, are judged on the test part: accuracy, or R² for regression. The sets
are those that scikit-learn ships, and MNIST with k = 50 of 784 pixels: 1,000 training images, drawn anew for
each of three splits, and all 10,000 test images.

    python -m benchmarks.selectors                              # all sets of scikit-learn, into results/
    python -m benchmarks.selectors --data-dir FOLDER            # MNIST, too
    python -m benchmarks.selectors iris wine                    # these sets only
    python -m benchmarks.selectors --only KHotSelector RFE      # these selectors only

A run goes on where the last one stopped. The settings of the others:

- mutual information, RFE, forest, greedy forward search: those of scikit-learn. On MNIST RFE removes 78
  pixels per round. RFE and greedy search judge by a logistic regression, or Ridge. Greedy search is left out
  on digits, where it takes several minutes for each split, and on MNIST, where it takes hours.
- L1: C = 0.1, or for regression α = 0.01.
- STG (Yamada et al. 2020), written here from its description: a gate clip(μ + ½ + ε, 0, 1) per feature with
  noise of deviation ½, a hidden layer of 128, 600 steps, and λ times the mean probability of a gate to be
  open. Of two values of λ that one is taken with which the number of open gates is nearer to k. Features
  are ranked by μ.
- LassoNet: the package lassonet by its defaults, but a path whose penalty grows by 10 % instead of 2 % per
  point, which takes a fifth of the time. Features are ranked by the penalty at which they disappear. The
  row is left out if the package is missing.

C = 100 of the support vector regression that judges is not scikit-learn's default.
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.base import BaseEstimator
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.feature_selection import (
    RFE,
    SelectFromModel,
    SelectKBest,
    SelectorMixin,
    SequentialFeatureSelector,
    mutual_info_classif,
    mutual_info_regression,
)
from sklearn.linear_model import Lasso, LogisticRegression, MultiTaskLasso, Ridge
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.multioutput import MultiOutputRegressor
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR
from torch.nn import functional as F

from benchmarks import report
from khot.sklearn import KHotSelector
from reproduce.harness.data import load_mnist

# the number of features, and whether the target is a number
SETS = {
    "iris": (2, False),
    "wine": (3, False),
    "breast_cancer": (3, False),
    "diabetes": (3, True),
    "linnerud": (2, True),
    "digits": (10, False),
    "mnist": (50, False),
}
# The means of the report. Greedy search was not run on digits.
SMALL = ("iris", "wine", "breast_cancer", "diabetes")
MEANS = {
    "four small sets": SMALL,
    "with digits": (*SMALL, "digits"),
    "with linnerud": (*SMALL, "digits", "linnerud"),
}
SPLITS, MNIST_SPLITS, MNIST_IMAGES = 5, 3, 1_000
RESULTS = Path(__file__).parent / "results" / "selectors"


class Ranking(SelectorMixin, BaseEstimator):
    """Selects the k features of the largest scores."""

    def __init__(self, k: int, regression: bool, seed: int) -> None:
        self.k, self.regression, self.seed = k, regression, seed

    def fit(self, X: Any, y: Any) -> Ranking:
        self.n_features_in_ = X.shape[1]
        self.chosen_ = np.isin(np.arange(X.shape[1]), np.argsort(-self.scores(X, y), kind="stable")[: self.k])
        return self

    def scores(self, X: Any, y: Any) -> Any:
        raise NotImplementedError

    def _get_support_mask(self) -> Any:
        return self.chosen_


class STG(Ranking):
    STEPS, SIGMA, PENALTIES = 600, 0.5, (0.2, 1.0)

    def scores(self, X: Any, y: Any) -> Any:
        found = [self._gates(X, y, penalty) for penalty in self.PENALTIES]
        return min(found, key=lambda mu: abs(int((mu > -0.5).sum()) - self.k))

    def _gates(self, X: Any, y: Any, penalty: float) -> Any:
        torch.manual_seed(self.seed)
        features = torch.from_numpy(X).float()
        if self.regression:
            y = y.reshape(len(y), -1)
            targets = torch.from_numpy((y - y.mean(0)) / y.std(0)).float()
        else:
            targets = torch.from_numpy(np.unique(y, return_inverse=True)[1])
        outputs = targets.shape[1] if self.regression else int(targets.max()) + 1
        mu = torch.zeros(X.shape[1], requires_grad=True)
        network = torch.nn.Sequential(
            torch.nn.Linear(X.shape[1], 128), torch.nn.ReLU(), torch.nn.Linear(128, outputs)
        )
        optimizer = torch.optim.Adam(
            [{"params": [mu], "lr": 1e-2}, {"params": network.parameters()}], lr=2e-3
        )
        for _ in range(self.STEPS):
            batch = torch.randint(len(X), (64,))
            gates = (mu + 0.5 + self.SIGMA * torch.randn(64, len(mu))).clamp(0, 1)
            predicted = network(features[batch] * gates)
            loss = (F.mse_loss if self.regression else F.cross_entropy)(predicted, targets[batch])
            loss = loss + penalty * torch.special.ndtr((mu + 0.5) / self.SIGMA).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return mu.detach().numpy()


class LassoNet(Ranking):
    def scores(self, X: Any, y: Any) -> Any:
        import lassonet

        kind = lassonet.LassoNetRegressor if self.regression else lassonet.LassoNetClassifier
        model = kind(verbose=0, path_multiplier=1.1, random_state=self.seed, torch_seed=self.seed)
        if self.regression:
            y = y.reshape(len(y), -1)
            y = (y - y.mean(0)) / y.std(0)
        model.path(X, y, disable_lambda_warning=True)
        return model.feature_importances_.numpy()


def selectors(name: str, seed: int) -> dict[str, Any]:
    k, regression = SETS[name]
    task = "regression" if regression else "classification"
    linear = Ridge() if regression else LogisticRegression(max_iter=500)
    several = name == "linnerud"
    if several:
        sparse: Any = MultiTaskLasso(alpha=0.01)
    elif regression:
        sparse = Lasso(alpha=0.01)
    else:
        sparse = LogisticRegression(l1_ratio=1, C=0.1, solver="saga", max_iter=300)
    forest = (RandomForestRegressor if regression else RandomForestClassifier)(random_state=seed)
    most = partial(SelectFromModel, max_features=k, threshold=-np.inf)
    information = partial(
        mutual_info_regression if regression else mutual_info_classif,
        random_state=seed,
        n_neighbors=3,
    )
    found = {
        "KHotSelector": KHotSelector(k, task=task, random_state=seed),
        "mutual information": SelectKBest(partial(_mean_information, information), k=k),
        "RFE": RFE(linear, n_features_to_select=k, step=78 if name == "mnist" else 1),
        "L1": most(sparse),
        "forest": most(forest),
        "STG": STG(k, regression, seed),
        "LassoNet": LassoNet(k, regression, seed),
        "greedy": SequentialFeatureSelector(linear, n_features_to_select=k, cv=3),
    }
    if name in ("digits", "mnist"):
        del found["greedy"]
    try:
        import lassonet  # noqa: F401
    except ImportError:
        del found["LassoNet"]
    return found


def _mean_information(information: Any, X: Any, y: Any) -> Any:
    """For several targets, the mean over them."""
    return np.mean([information(X, column) for column in (y.T if y.ndim > 1 else y[None])], axis=0)


def splits(name: str, data_dir: Path | None) -> list[tuple[Any, Any, Any, Any]]:
    """Training features and targets, test features and targets; features are standardised."""
    if name == "mnist":
        assert data_dir is not None
        images = load_mnist(data_dir)
        parts = []
        for seed in range(MNIST_SPLITS):
            generator = torch.Generator().manual_seed(seed)
            train = torch.randperm(len(images.train_labels), generator=generator)[:MNIST_IMAGES]
            arrays = images.train_images[train], images.train_labels[train]
            parts.append((*arrays, images.test_images, images.test_labels))
        found = [tuple(part.double().numpy() if part.ndim > 1 else part.numpy() for part in p) for p in parts]
    else:
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        folds = (KFold if SETS[name][1] else StratifiedKFold)(SPLITS, shuffle=True, random_state=0)
        found = [(X[train], y[train], X[test], y[test]) for train, test in folds.split(X, y)]
    scaled = []
    for A, a, B, b in found:
        scaler = StandardScaler().fit(A)
        scaled.append((scaler.transform(A), a, scaler.transform(B), b))
    return scaled


def judge(regression: bool, A: Any, a: Any, B: Any, b: Any) -> list[float]:
    """100 times the accuracy or R² of the two judges, trained on (A, a)."""
    machine = MultiOutputRegressor(SVR(C=100)) if a.ndim > 1 else SVR(C=100)
    judges = (machine, Ridge()) if regression else (SVC(), LogisticRegression(max_iter=1000))
    return [100 * model.fit(A, a).score(B, b) for model in judges]


def write(results: report.Results) -> None:
    """Save the rows, and the table with the means over the sets."""
    report.save(RESULTS.with_suffix(".json"), results)
    rows: dict[tuple[str, str], list[list[float]]] = {}
    for case, row in results["cases"].items():
        name, method, _ = case.split(", ")
        rows.setdefault((name, method), []).append(row)
    order = list(SETS)
    methods = list(dict.fromkeys(method for _, method in rows))
    lines = []
    for (name, method), found in sorted(rows.items(), key=lambda item: order.index(item[0][0])):
        mean, deviation = np.mean(found, 0), np.std(found, 0, ddof=1) if len(found) > 1 else np.zeros(3)
        cells = [f"{m:.1f} ± {s:.1f}" for m, s in zip(mean[:2], deviation[:2], strict=True)]
        lines.append([name, str(SETS[name][0]), method, *cells, f"{mean[2]:.2f}"])
    means = []
    for method in methods:
        cells = []
        for names in MEANS.values():
            here = [np.mean(rows[n, method], 0) for n in names if (n, method) in rows]
            whole = len(here) == len(names)
            cells += [f"{value:.1f}" for value in np.mean(here, 0)[:2]] if whole else ["–", "–"]
        means.append([method, *cells])
    header = ["selector"] + [f"{names}: {judge}, %" for names in MEANS for judge in ("SVM", "linear")]
    missing = [name for name in order if (name, "KHotSelector") not in rows]
    missing += [name for name in ("LassoNet",) if name not in methods]
    setting = "; ".join(f"{key}: {value}" for key, value in results["setting"].items())
    RESULTS.with_suffix(".md").write_text(
        "# Feature selectors\n\n"
        "Accuracy, or R² on diabetes and linnerud, on the selected features alone; mean ± standard\n"
        "deviation over the splits. `python -m benchmarks.selectors --data-dir FOLDER`, whose docstring\n"
        f"has the settings. {setting}.\n\n"
        f"## Means over the sets that scikit-learn ships\n\n{report.table(header, means)}\n"
        "On linnerud, 20 examples, every R² is far below 0: no selection predicts anything there.\n"
        + (f"Not run: {', '.join(missing)}.\n" if missing else "")
        + "\n"
        "## All sets\n\n"
        + report.table(["data", "k", "selector", "SVM, %", "linear, %", "s per fit"], lines),
        encoding="utf-8",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="feature selectors beside KHotSelector")
    parser.add_argument("sets", nargs="*", choices=[[], *SETS], help="all by default")
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST")
    parser.add_argument("--only", nargs="+", help="selectors; all by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # solvers that stop early
    results = report.resume(RESULTS.with_suffix(".json"), report.machine(cpu_time=True))
    for name in args.sets or [name for name in SETS if name != "mnist" or args.data_dir]:
        for split, (A, a, B, b) in enumerate(splits(name, args.data_dir)):
            for method, selector in selectors(name, split).items():
                case = f"{name}, {method}, {split}"
                if case in results["cases"] or (args.only and method not in args.only):
                    continue
                start = time.process_time()
                chosen = selector.fit(A, a).get_support()
                seconds = time.process_time() - start
                row = [*judge(SETS[name][1], A[:, chosen], a, B[:, chosen], b), seconds]
                results["cases"][case] = row
                write(results)
                print(case, *(f"{value:.1f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
