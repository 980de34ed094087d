"""Balancing experts: the rules take the steps that they are described by, and khot's stays with the exact."""

from __future__ import annotations

import pytest
import torch

from reproduce.papers import balancing
from reproduce.papers.balancing import KINDS, RULES, batches, violation


def test_batches_share_their_distribution_and_not_their_tokens() -> None:
    x, fresh = batches(2_000, 16, seed=0)
    assert not torch.equal(x, fresh)
    assert (x.mean(0) - fresh.mean(0)).abs().max() < 0.3 < x.mean(0).std()
    assert torch.equal(x, batches(2_000, 16, seed=0)[0])


def test_violation_by_hand() -> None:
    scores = torch.tensor([[3.0, 2, 1, 0]] * 3 + [[0.0, 1, 2, 3]])
    assert violation(scores, torch.zeros(4), 1) == 2.0  # loads 3, 0, 0, 1
    assert violation(scores, torch.tensor([0.0, 9, 0, 0]), 1) == 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_khot_follows_the_exact_rule(kind: str) -> None:
    x = KINDS[kind](batches(4_000, 16, seed=1)[0])
    ours, exact = RULES["khot"](16, 2), RULES["exact"](16, 2)
    for _ in range(3):
        a, b = ours(x), exact(x)
        assert (a - b).abs().max() < 0.05 * b.abs().max()


def test_the_exact_rule_by_hand() -> None:
    scores = torch.tensor([[3.0, 2, 0], [4.0, 1, 0], [5.0, 0, 3]])
    rule = RULES["exact"](3, 1)
    # From both cutoffs the distances are −1, −3, −2; 1, 3, 5; 3, 4, 2, and each expert gets one of three
    # tokens: all from the first to the second of them are quantiles, and the nearest to 0 is taken.
    # The steps are −2, 1 and 2, and the largest bias is 0 afterwards.
    assert rule(scores).tolist() == [-4, -1, 0]


def test_the_sign_rule_moves_each_bias_by_its_rate() -> None:
    x = batches(400, 16, seed=2)[0]
    step = RULES["sign rule"](16, 2)(x)
    loads = x.topk(2).indices.flatten().bincount(minlength=16)
    assert torch.equal(step > 0, loads < 50) and torch.equal(step < 0, loads > 50)
    torch.testing.assert_close(step[loads != 50].abs(), torch.full_like(step[loads != 50], 1e-3))


def test_the_average_of_equal_micro_batches_is_that_of_one() -> None:
    x = batches(100, 16, seed=3)[0]
    same = x.repeat(balancing.MICRO_BATCHES, 1)
    wanted = x.topk(3).values[:, 2:] - x
    want = wanted.quantile(2 / 16, 0)
    torch.testing.assert_close(RULES["micro-batches"](16, 2)(same), want - want.mean())


def test_the_histogram_is_right_to_a_bin() -> None:
    x = torch.sigmoid(batches(4_000, 16, seed=4)[0])
    want = (x.topk(3).values[:, 2:] - x).quantile(2 / 16, 0)
    got = RULES["histogram"](16, 2)(x)
    assert (got - (want - want.mean())).abs().max() <= 2 * 2 / 1_000


def test_smoke_run(smoke) -> None:
    found = smoke("balancing")
    for kind in KINDS:
        last = {name: found.last("violation", scores=kind, step="10", method=name) for name in RULES}
        assert last["khot"] < 0.2 < last["sign rule"]
        assert last["khot"] <= last["exact"] + 0.05
        assert found.last("violation", scores=kind, method="cold start") < 0.3
    assert "| E = 16, k = 2: khot |" in found.report
