"""Sorting pictures of numbers: that the order is learned, and how it is judged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from khot.experiments.harness import data
from khot.experiments.papers import permutation
from khot.experiments.tasks import numbers


def test_smoke_run(smoke) -> None:
    found = smoke("permutation")
    # a sixth and a third by chance; seed 0: 0.71 and 0.79
    assert found.last("sequences", n="3") > 0.5
    assert found.last("elements", n="3") > 0.6
    assert found.last("tau", n="3") != pytest.approx(permutation.START, abs=0.01)  # it is learned
    assert "| 3, laplace |" in found.report
    assert (found.folder / "order.png").read_bytes().startswith(b"\x89PNG")


def test_judge_knows_right_from_wrong() -> None:
    images = data.load_digits()
    index = numbers.pick((300,), permutation.DIGITS, 0, len(images.test_labels))
    _, truth = numbers.draw(images.test_images, images.test_labels, images.shape, index)

    class Oracle(nn.Module):
        """Scores in the order in which they are asked for: the values themselves, or their negatives."""

        def __init__(self, sign: int) -> None:
            super().__init__()
            self.sign = sign

        def forward(self, pictures: Tensor) -> Tensor:
            return self.sign * truth[: len(pictures)].double()

    right = permutation.judge(Oracle(1), images, 3, 300, "cpu")
    assert right == {"sequences": 1.0, "elements": 1.0}
    wrong = permutation.judge(Oracle(-1), images, 3, 300, "cpu")
    # of three different numbers turned round, the middle one stays; some sequences hold one number twice
    assert wrong["sequences"] < 0.01
    assert wrong["elements"] == pytest.approx(1 / 3, abs=0.02)


def test_network_scores_every_picture() -> None:
    network = permutation.Network(28, 112)
    pictures = torch.rand(2, 3, 28, 112, generator=torch.Generator().manual_seed(0))
    scores = network(pictures)
    assert scores.shape == (2, 3)
    torch.testing.assert_close(scores[1, 2], network(pictures[1:, 2:])[0, 0], rtol=1e-4, atol=1e-6)
