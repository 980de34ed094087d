"""Feature selectors beside khot.sklearn.KHotSelector by its default settings, on sets with noise columns.

Each selector chooses k columns on the training part. A support vector machine (C = 10) and a forest (200
trees), trained on these columns alone, are judged on the test part, and the score is the mean of both: R² for
regression, balanced accuracy on ``unbalanced``, accuracy elsewhere, all in percent.

    python -m benchmarks.selectors                            # everything, into results/
    python -m benchmarks.selectors friedman1 wide             # these sets only
    python -m benchmarks.selectors --only KHotSelector RFE    # these selectors only
    python -m benchmarks.selectors --seeds 20 21              # these seeds only
    python -m benchmarks.selectors --out FILE                 # elsewhere, for a table of another revision

A run goes on where the last one stopped. The settings of KHotSelector were chosen on other sizes, noise and
seeds (100 to 109) of the same kinds of sets. The settings of the others, on which nothing was tuned either:

- RFE: a forest of 200 trees, and a tenth of the columns is removed in each round.
- RFE balanced: the same with ``class_weight="balanced_subsample"``, on ``unbalanced`` alone.
- SelectFromModel: a forest of 200 trees.
- Boruta: BorutaPy (``pip install boruta``; 0.4.3 in the published table) as its authors advise, a forest of
  depth 5, of 100 trees in 50 rounds. Of columns of equal rank those of the largest mean importance are
  chosen, to have k of them.
- mutual information: SelectKBest, three neighbours.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.feature_selection import (
    RFE,
    SelectFromModel,
    SelectKBest,
    mutual_info_classif,
    mutual_info_regression,
)
from sklearn.metrics import accuracy_score, balanced_accuracy_score, r2_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR

from benchmarks import report
from khot.sklearn import KHotSelector

SEEDS = tuple(range(20, 30))
TEST = 2_000  # examples of synthetic sets; of the others 30 %
RESULTS = Path(__file__).parent / "results" / "selectors"


@dataclass(frozen=True)
class Set:
    """A kind of data: how many columns to choose, training examples and all columns of a synthetic set, the
    first ``true`` of which count; or the number of columns of noise beside those of a set of scikit-learn."""

    k: int
    columns: int
    examples: int | None = None
    true: int = 0
    regression: bool = False
    settings: dict[str, Any] | None = None


_MADELON = {"n_informative": 5, "n_redundant": 5, "n_clusters_per_class": 8}
SETS = {
    "friedman1": Set(5, 40, 300, 5, regression=True),
    "madelon": Set(10, 50, 750, 10, settings=_MADELON),
    "unbalanced": Set(
        4, 30, 750, 4, settings={"n_informative": 4, "n_redundant": 0, "weights": [0.95], "flip_y": 0}
    ),
    "redundant": Set(4, 40, 450, 28, settings={"n_informative": 4, "n_redundant": 16, "n_repeated": 8}),
    "digits": Set(16, 0),
    "breast_cancer": Set(5, 30),
    "wine": Set(4, 17),
    "diabetes": Set(4, 20, regression=True),
    "wide": Set(10, 2_000, 750, 10, settings=_MADELON),
}
# ``wide`` shows many columns, and is not one of the eight that the mean is of.
MEAN = [name for name in SETS if name != "wide"]


@dataclass(frozen=True)
class Split:
    """Standardised training and test part; which columns count, where that is known."""

    train: tuple[Any, Any]
    test: tuple[Any, Any]
    true: Any


@lru_cache(1)
def split(name: str, seed: int) -> Split:
    kind = SETS[name]
    rng = np.random.default_rng(1000 + seed)
    true = None
    if kind.examples is not None:
        n = kind.examples + TEST
        if kind.settings is None:
            X, y = datasets.make_friedman1(n, kind.columns, noise=1.0, random_state=seed)
        else:
            X, y = datasets.make_classification(
                n, kind.columns, shuffle=False, random_state=seed, **kind.settings
            )
        order = rng.permutation(kind.columns)
        X, true = X[:, order], order < kind.true
        size: dict[str, Any] = {"train_size": kind.examples}
    else:
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        X = np.hstack([X, rng.standard_normal((len(X), kind.columns))])
        size = {"test_size": 0.3}
    A, B, a, b = train_test_split(X, y, random_state=seed, stratify=None if kind.regression else y, **size)
    scaler = StandardScaler().fit(A)
    return Split((scaler.transform(A), a), (scaler.transform(B), b), true)


class _Boruta:
    """The k columns that BorutaPy ranks first."""

    def __init__(self, k: int, regression: bool, seed: int) -> None:
        self.k, self.regression, self.seed = k, regression, seed

    def fit(self, X: Any, y: Any) -> _Boruta:
        from boruta import BorutaPy

        forest = _forest(self.regression, 100, self.seed).set_params(max_depth=5)
        if not self.regression:
            forest.set_params(class_weight="balanced")
        found = BorutaPy(forest, n_estimators=100, max_iter=50, random_state=self.seed).fit(X, y)
        importance = np.nan_to_num(np.nanmean(found.importance_history_[1:], 0), nan=-1.0)
        self.support = np.zeros(X.shape[1], bool)
        self.support[np.lexsort((-importance, found.ranking_))[: self.k]] = True
        return self

    def get_support(self) -> Any:
        return self.support


def _forest(regression: bool, trees: int, seed: int) -> Any:
    return (RandomForestRegressor if regression else RandomForestClassifier)(trees, random_state=seed)


def selectors(name: str, seed: int) -> dict[str, Any]:
    k, regression = SETS[name].k, SETS[name].regression
    information = partial(
        mutual_info_regression if regression else mutual_info_classif, random_state=seed, n_neighbors=3
    )
    found = {
        "KHotSelector": KHotSelector(
            k, task="regression" if regression else "classification", random_state=seed
        ),
        "RFE": RFE(_forest(regression, 200, seed), n_features_to_select=k, step=0.1),
        "SelectFromModel": SelectFromModel(_forest(regression, 200, seed), max_features=k, threshold=-np.inf),
        "Boruta": _Boruta(k, regression, seed),
        "mutual information": SelectKBest(information, k=k),
    }
    if name == "unbalanced":
        forest = _forest(regression, 200, seed).set_params(class_weight="balanced_subsample")
        found["RFE balanced"] = RFE(forest, n_features_to_select=k, step=0.1)
    return found


def measure(name: str, method: str, seed: int, khot: str) -> dict[str, Any]:
    data, start = split(name, seed), time.process_time()
    chosen = selectors(name, seed)[method].fit(*data.train).get_support()
    seconds = time.process_time() - start
    columns = " ".join(map(str, np.flatnonzero(chosen)))
    return {
        "score": judge(name, columns, seed),
        "seconds": seconds,
        "true": None if data.true is None else int((chosen & data.true).sum()),
        "columns": columns,
        "khot": khot if method == "KHotSelector" else None,
    }


@cache
def judge(name: str, columns: str, seed: int) -> float:
    """The mean score of the two judges, in percent."""
    chosen, data = list(map(int, columns.split())), split(name, seed)
    regression = SETS[name].regression
    machine = TransformedTargetRegressor(SVR(C=10), transformer=StandardScaler()) if regression else SVC(C=10)
    score = r2_score if regression else balanced_accuracy_score if name == "unbalanced" else accuracy_score
    (A, a), (B, b) = data.train, data.test
    judges = (machine, _forest(regression, 200, 0))
    return 100 * float(np.mean([score(b, j.fit(A[:, chosen], a).predict(B[:, chosen])) for j in judges]))


def write(path: Path, results: report.Results) -> None:
    rows: dict[tuple[str, str], dict[int, Any]] = {}
    for case, row in results["cases"].items():
        name, method, seed = case.split(", ")
        rows.setdefault((name, method), {})[int(seed)] = row
    names = [name for name in SETS if any(n == name for n, _ in rows)]
    methods = [method for method in selectors("unbalanced", 0) if any(m == method for _, m in rows)]
    most = max(len(here) for here in rows.values())
    scores, seconds, against = [], [], []
    for method in methods:
        found = {name: rows[name, method] for name in names if (name, method) in rows}
        mean = {name: _mean(here, "score") for name, here in found.items()}
        cells = []
        for name in names:
            hits = [row["true"] for row in found.get(name, {}).values() if row["true"] is not None]
            said = f"{mean[name]:.1f}" if name in mean else "–"
            cells.append(f"{said} ({np.mean(hits):.1f})" if hits else said)
        seeds = min(len(here) for here in found.values())
        label = method if seeds == most else f"{method}, {seeds} seeds"
        whole = all(name in mean for name in MEAN)
        eight = f"{np.mean([mean[name] for name in MEAN]):.2f}" if whole else "–"
        scores.append([label, *cells, eight])
        spent = [f"{_mean(found[n], 'seconds'):.2f}" if n in found else "–" for n in names]
        total = f"{np.mean([_mean(found[n], 'seconds') for n in MEAN]):.2f}" if whole else "–"
        seconds.append([label, *spent, total])
        if method != "KHotSelector" and (lead := _lead(rows, method)):
            against.append([method, *lead])
    khot = sorted({row["khot"] for row in results["cases"].values() if row["khot"]})
    k = [f"{name}, {SETS[name].k} of {SETS[name].columns + _own(name)}" for name in names]
    path.write_text(
        "# Feature selectors\n\n"
        "Mean of a support vector machine and a forest on the selected columns alone, in percent, and over\n"
        f"seeds ({_seeds(rows)}, or the first of them). In brackets: how many selected columns count.\n"
        "`python -m benchmarks.selectors`, whose docstring has the settings.\n"
        f"{report.said(results['setting'])}; khot: {', '.join(khot)}.\n\n"
        + report.table(["selector", *k, "mean of eight"], scores)
        + "\n## Seconds per choice\n\n"
        + report.table(["selector", *names, "mean of eight"], seconds)
        + "\n## KHotSelector less another one\n\nThe difference of the means of eight sets, paired by seeds, "
        "with its standard error.\n\n"
        + report.table(["selector", "difference", "standard error", "seeds"], against),
        encoding="utf-8",
    )


def _mean(rows: dict[int, Any], what: str) -> float:
    return float(np.mean([row[what] for row in rows.values()]))


def _seeds(rows: dict[tuple[str, str], dict[int, Any]]) -> str:
    """The seeds of each set, or of all of them where they are the same."""
    seeds: dict[str, list[int]] = {}
    for (name, _), here in rows.items():
        seeds[name] = sorted({*seeds.get(name, []), *here})
    said = {name: f"{min(found)} to {max(found)}" for name, found in seeds.items()}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{name}: {found}" for name, found in said.items())


def _lead(rows: dict[tuple[str, str], dict[int, Any]], method: str) -> list[str] | None:
    """KHotSelector less another one on the mean of eight sets: mean, standard error, number of seeds."""
    both = [rows.get((name, each), {}) for name in MEAN for each in ("KHotSelector", method)]
    seeds = sorted(set.intersection(*(set(here) for here in both)))
    if len(seeds) < 2:
        return None
    leads = [
        np.mean([rows[n, "KHotSelector"][seed]["score"] - rows[n, method][seed]["score"] for n in MEAN])
        for seed in seeds
    ]
    error = np.std(leads, ddof=1) / len(seeds) ** 0.5
    return [f"{np.mean(leads):+.2f}", f"{error:.2f}", str(len(seeds))]


def _own(name: str) -> int:
    """The number of columns that a set of scikit-learn has without noise."""
    if SETS[name].examples is not None:
        return 0
    return getattr(datasets, f"load_{name}")(return_X_y=True)[0].shape[1]


def main() -> None:
    parser = report.parser("feature selectors beside KHotSelector", out=RESULTS)
    parser.add_argument("sets", nargs="*", choices=[[], *SETS], help="all by default")
    parser.add_argument("--only", nargs="+", help="selectors; all by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # solvers that stop early
    machine = report.machine(cpu_time=True)
    # the other selectors do not depend on it, so each row of ours has its own
    khot = f"{machine.pop('khot')}, {machine.pop('kernels')}"
    machine["scikit-learn"] = sklearn.__version__
    todo = {
        f"{name}, {method}, {seed}": partial(measure, name, method, seed, khot)
        for seed in args.seeds
        for name in args.sets or SETS
        for method in selectors(name, seed)
        if not args.only or method in args.only
    }
    report.complete(args.out.with_suffix(".md"), machine, todo, write)


if __name__ == "__main__":
    main()
