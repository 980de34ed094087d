"""Pruning by learned scores: the selection is the soft top-k of the scores, and they are learned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import khot
from khot.nn import make_permanent, prune_global


def layers(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, **options), nn.Tanh(), nn.Linear(5, 3, **options))


def scores(model: nn.Sequential) -> list[Tensor]:
    return [model[i].parametrizations.weight[0].score for i in (0, 2)]  # type: ignore[union-attr, index]


def originals(model: nn.Sequential) -> list[Tensor]:
    return [model[i].parametrizations.weight.original for i in (0, 2)]  # type: ignore[union-attr, index]


def pruned(amount: Any = 0.6, **options: Any) -> nn.Sequential:
    """45 weights, of which 18 are kept, with scores of which many are near the threshold."""
    model = layers(dtype=torch.float64)
    prune_global([(model[0], "weight"), (model[2], "weight")], amount, tau=0.5, by="score", **options)
    with torch.no_grad():
        for score in scores(model):
            score.normal_()
    return model


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


def weights(model: nn.Sequential) -> Tensor:
    return flat([model[0].weight, model[2].weight])  # type: ignore[list-item]


def test_is_the_soft_top_k_of_the_scores_of_all_layers_times_the_weights() -> None:
    model = pruned()
    row, score = (flat(each).detach().requires_grad_() for each in (originals(model), scores(model)))
    want, got = row * khot.soft_topk(score, 18, tau=0.5), weights(model)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    slope = torch.randn(45, dtype=torch.float64)
    (got * slope).sum().backward(), (want * slope).sum().backward()
    for tensors, by_hand in ((originals(model), row), (scores(model), score)):
        grads = flat([x.grad for x in tensors if x.grad is not None])
        torch.testing.assert_close(grads, by_hand.grad, rtol=0, atol=1e-14)
    hard = row.detach() * khot.topk_mask(score.detach(), 18)
    assert torch.equal(weights(model.eval()), hard)
    assert torch.equal(weights(make_permanent(model)), hard)
    assert {name for name, _ in model.named_parameters()} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_the_scores_are_parameters_and_part_of_the_state() -> None:
    model, other = pruned(), pruned()
    assert sum("score" in name for name, _ in model.named_parameters()) == 2
    with torch.no_grad():
        scores(model)[0].add_(1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(weights(other), weights(model))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        scores(twin)[1].zero_()
    assert not torch.equal(weights(twin), weights(model)) and torch.equal(weights(other), weights(model))
    assert "by='score'" in repr(model)


def test_a_score_that_is_changed_between_two_layers_counts() -> None:
    model, x = pruned(), torch.randn(2, 6, dtype=torch.float64)
    model[0](x)
    scores(model)[1].data.neg_()  # which torch does not count as a change
    fresh = copy.deepcopy(model)
    second = fresh[2].weight
    assert torch.equal(model[2].weight, second)  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [0, 9, 45])
def test_amounts(kept: int) -> None:
    model = pruned(45 - kept)
    model(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in scores(model))
    assert int((weights(model.eval()) != 0).sum()) == kept


def test_shares_of_layers_are_bounded() -> None:
    model = pruned(min_share=0.3, max_share=0.5)  # of 30 and 15: at least 9 and 4, at most 15 and 8
    with torch.no_grad():
        scores(model)[0].add_(10)
    soft, row = weights(model), flat(originals(model))
    torch.testing.assert_close((soft / row)[:30].sum().item(), 14.0)
    torch.testing.assert_close((soft / row)[30:].sum().item(), 4.0)
    model.eval()
    assert [int((model[i].weight != 0).sum()) for i in (0, 2)] == [14, 4]  # type: ignore[operator, arg-type]


def test_costs_are_those_of_a_soft_budget() -> None:
    model, cost = pruned(cost=[3, 1]), torch.tensor([3.0] * 30 + [1.0] * 15, dtype=torch.float64)
    budget = 0.4 * cost.sum().item()
    row, score = flat(originals(model)).detach(), flat(scores(model)).detach()
    want = row * khot.soft_budget(score, cost, budget, tau=0.5)
    torch.testing.assert_close(weights(model), want, rtol=0, atol=1e-13)
    assert torch.equal(weights(model.eval()), row * khot.budget_mask(score, cost, budget))


def test_tied_weights_have_one_score() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    prune_global([(layer, "weight") for layer in model], 0.5, tau=0.5, by="score")
    assert sum("score" in name for name, _ in model.named_parameters()) == 1
    assert torch.equal(model[0].weight, model[1].weight)  # type: ignore[arg-type]


def test_scores_of_half_precision_weights_are_kept_in_single() -> None:
    model = layers(dtype=torch.bfloat16)
    prune_global([(model[0], "weight"), (model[2], "weight")], 0.6, tau=0.5, by="score")
    assert {score.dtype for score in scores(model)} == {torch.float32}
    model(torch.randn(2, 6, dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.dtype == torch.bfloat16  # type: ignore[union-attr]
