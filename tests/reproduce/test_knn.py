"""Neighbours that train features: what learns, on scikit-learn's digits, and what the report makes of it."""

from __future__ import annotations

import re

import pytest
import torch

from reproduce.harness import data
from reproduce.papers import knn


def test_smoke_run(smoke) -> None:
    found = smoke("knn")
    assert {row["by"] for row in found.rows} == set(knn.NAMES)
    for method in ("logistic", "laplace", "entropy", "linear"):
        # seeds 0 to 3: at most 0.042; after 36 steps at a high learning rate 0.15 and 0.24 (linear)
        assert found.last("error", by=method) < 0.05
    assert len([row for row in found.rows if row["by"] == "logistic"]) == found.args.epochs
    # the papers' figures are those of MNIST
    assert re.search(r"\| neighbours in the pixels \| 9[78]\.\d\d \| – \| – \|", found.report)


@pytest.mark.parametrize("method", knn.UNTRAINED)
def test_methods_without_a_network_are_those_of_scikit_learn(smoke, method: str) -> None:
    from sklearn.decomposition import PCA
    from sklearn.neighbors import KNeighborsClassifier

    images = data.load_digits()
    train, test = images.train_images.numpy(), images.test_images.numpy()
    if method == "pca":
        pca = PCA(knn.COMPONENTS).fit(train)
        train, test = pca.transform(train), pca.transform(test)
    other = KNeighborsClassifier(knn.UNTRAINED_K, weights="distance").fit(train, images.train_labels)
    accuracy = other.score(test, images.test_labels)
    assert smoke("knn").last("error", by=method) == pytest.approx(1 - accuracy, abs=1e-12)


def test_image_at_distance_0_decides() -> None:
    # the nearest of three is the same image and outvotes the two others, which are of another class
    shape, pixels = (1, 2), torch.tensor([[0.0, 0.0], [0.0, 0.1], [0.1, 0.0]])
    test = (torch.zeros(1, 2), torch.tensor([3]))
    images = data.Images("three", shape, pixels, torch.tensor([3, 5, 5]), *test)
    assert knn.untrained_error(images, "pixels", "cpu") == 0


def test_differences_are_called_by_their_noise() -> None:
    # two standard errors of 99.4 % on 10,000 images are 0.154
    assert knn.with_difference([99.5, 99.6], 99.4) == ["99.4", "+0.15, within noise"]
    assert knn.with_difference([99.56], 99.4) == ["99.4", "+0.16, **above**"]
    assert knn.with_difference([98.0], 99.4) == ["99.4", "-1.40, **below**"]
