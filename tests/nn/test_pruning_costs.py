"""Pruning to a budget of costs, such as multiply-adds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from khot.nn import Anneal, prune_global

# these tensors are small, so that some are pruned away as a whole
pytestmark = pytest.mark.filterwarnings("ignore:all entries of parameters")

SIZES = [(2, 3), (3, 2)]
COSTS: dict[str, list[Any]] = {
    "one": [1, 1],
    "numbers": [3, 1.5],
    "by entry": [torch.arange(1.0, 7).view(2, 3), torch.tensor([2, 1])],
    "far apart": [1e6, 1e-3],
}
each_cost = pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)


def model_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.ModuleList:
    generator = torch.Generator().manual_seed(seed)
    model = nn.ModuleList(nn.Linear(n, m, bias=False, dtype=dtype) for m, n in SIZES)
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64))
    return model


def members(model: nn.ModuleList) -> list[tuple[nn.Module, str]]:
    return [(layer, "weight") for layer in model]


def rows(model: nn.ModuleList, cost: list[Any]) -> tuple[Tensor, Tensor]:
    """The weights and their costs, in one row each."""
    weights = torch.cat([layer.weight.detach().flatten() for layer in model])
    costs = [
        torch.as_tensor(c, dtype=torch.float64).expand(layer.weight.shape).flatten()
        for c, layer in zip(cost, model, strict=True)
    ]
    return weights.double(), torch.cat(costs)


@each_cost
@pytest.mark.parametrize("amount", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_hard_selection_is_greedy_within_the_budget(
    cost: list[Any], amount: float, dtype: torch.dtype
) -> None:
    model = model_of(dtype=dtype)
    w, c = rows(model, cost)
    prune_global(members(model), amount, cost=cost)
    kept, _ = rows(model.eval(), cost)
    budget = (1 - amount) * c.sum().item()
    left, want = budget * (1 + 1e-12), torch.zeros_like(w)
    for i in (w.abs() / c.sqrt()).argsort(descending=True).tolist():
        if c[i] <= left:
            left -= c[i].item()
            want[i] = w[i]
    assert (c * (kept != 0)).sum() <= budget * (1 + 1e-12)
    assert torch.equal(kept, want)


@each_cost
@pytest.mark.parametrize("p", [2.0, 4 / 3])
@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_the_soft_shares_spend_the_budget(cost: list[Any], p: float, tau: float) -> None:
    for amount in (0.2, 0.5, 0.8):
        model = model_of()
        w, c = rows(model, cost)
        prune_global(members(model), amount, cost=cost, tau=tau, p=p)
        kept, _ = rows(model, cost)
        shares = kept / w
        assert ((shares >= 0) & (shares <= 1)).all()
        assert math.isclose((shares * c).sum(), (1 - amount) * c.sum(), rel_tol=1e-9)


def test_an_amount_in_units_of_cost_and_one_of_a_module() -> None:
    cost = [3.0, 1.0]  # 24 in all
    weights = []
    for amount in (6, 0.25, Anneal(0.25, 0.5, steps=2)):
        model = model_of()
        prune_global(members(model), amount, cost=cost, tau=0.3)
        weights.append(rows(model, cost)[0])
    assert torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[0], weights[2])


def test_entries_without_a_cost_are_kept() -> None:
    model = model_of()
    with torch.no_grad():
        model[1].weight[0] = 0.0
    w, _ = rows(model, [1.0, 0.0])
    prune_global(members(model), 1.0, cost=[1.0, 0.0])
    for training in (True, False):
        kept, _ = rows(model.train(training), [1.0, 0.0])
        assert torch.equal(kept, torch.cat((torch.zeros(6), w[6:])))


def test_gradients_of_weights_that_are_0() -> None:
    """Their logarithm is not finite."""
    model = model_of()
    with torch.no_grad():
        model[0].weight[0, 0] = 0.0
    prune_global(members(model), 0.4, cost=[2.0, 1.0], tau=1.0)
    originals = [layer.parametrizations.weight.original for layer in model]
    sum(layer.weight.square().sum() for layer in model).backward()
    assert all(x.grad.isfinite().all() for x in originals)


def test_a_state_dict_and_later_changes_of_the_costs() -> None:
    cost = [torch.ones(2, 3), 1.0]
    model, other = model_of(), model_of(1)
    for each in (model, other):
        prune_global(members(each), 0.5, cost=cost)
    cost[0].fill_(100.0)  # type: ignore[union-attr]
    other.load_state_dict(model.state_dict())
    plain = model_of()
    prune_global(members(plain), 0.5, cost=[1, 1])
    for a, b, c in zip(model.eval(), other.eval(), plain.eval(), strict=True):
        assert torch.equal(a.weight, b.weight) and torch.equal(a.weight, c.weight)
